"""The types that every layer shares. Frozen, slotted, free of behaviour that could fail.

Three rules hold for all of them:

* ``None`` means "the source did not say". There is no sentinel such as "N/A" or -1.
* What happened to a *probe* (`Outcome`) and what is wrong with the *server's environment*
  (`Condition`) are different things and never share a field.
* Texts come in threes: a token (kebab-case, stable, for machines), one sentence (for people) and one
  action (the remedy).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

FactsT = TypeVar("FactsT")
"""The type of a probe's facts: a frozen dataclass that holds data only."""


class Clock(Protocol):
    """Time as the agent sees it; injected so that tests own it."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


# -- closed vocabularies --------------------------------------------------------------------------


class Outcome(StrEnum):
    """What happened to a probe's last run. "Broken" belongs to conditions, not here."""

    PENDING = "pending"
    OK = "ok"
    SKIPPED = "skipped"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    ERROR = "error"


FAILURES = (Outcome.TIMEOUT, Outcome.CRASHED, Outcome.ERROR)
"""Outcomes that brought nothing new."""


class Severity(StrEnum):
    """How bad a condition is while it is active."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for info, 2 for critical."""
        return ("info", "warning", "critical").index(self.value)


class Gate(StrEnum):
    """When an active condition makes the pod unready (design: conditions).

    ``serving``: whenever active. ``launch``: only while no server answers. ``never``: alerts only.
    """

    SERVING = "serving"
    LAUNCH = "launch"
    NEVER = "never"


class Status(StrEnum):
    """Whether a condition holds. Unknown is neither healthy nor broken."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"


class Scope(StrEnum):
    """Whose environment a software fact was read from (design: probes)."""

    SERVER = "server"
    IMAGE = "image"
    SELF = "self"


class Placement(StrEnum):
    """Where the agent itself runs."""

    HOST = "host"
    CONTAINER = "container"


class Processes(StrEnum):
    """Whether the server's processes can be seen."""

    SHARED = "shared"
    HIDDEN = "hidden"


class Answer(StrEnum):
    """What the server's address did when it was last tried."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"


class Feature(StrEnum):
    """What a server can use; conditions that concern only its users name it."""

    GPU = "gpu"
    FLASHINFER_MAMBA = "flashinfer-mamba"


class Phase(StrEnum):
    """The phases of inference that choose an attention backend of their own."""

    PREFILL = "prefill"
    DECODE = "decode"
    VISION = "vision"
    DRAFT = "draft"


# -- metrics --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric family, named without the ``sglang_sidecar_`` prefix.

    ``kind`` is gauge, counter (the name ends in ``_total``) or info (the name ends in ``_info``).
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: the family's name without prefix, label values in the family's order, a number."""

    family: str
    labels: tuple[str, ...]
    value: float


# -- conditions -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionType:
    """A condition, declared once by the probe that judges it.

    ``reasons`` maps each stable token that the condition can carry to its meaning.
    ``depends_on`` names the codes that explain this one: while one of them is active, this one is
    suppressed and listed as its consequence. ``uses`` names the feature whose users it concerns; for
    a server that does not use it the condition is irrelevant, or, with ``info_when_unused``, shown
    as info and never gating. ``hold`` is (bad rounds, good rounds) needed before a published verdict
    changes.
    """

    code: str
    severity: Severity
    gate: Gate
    title: str
    when: str
    remedy: str
    reasons: Mapping[str, str]
    depends_on: tuple[str, ...] = ()
    uses: Feature | None = None
    info_when_unused: bool = False
    hold: tuple[int, int] = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a probe's judge says about one of its conditions in one round.

    ``final`` marks a fact that no further round can make more certain (NVML 9, 12, 15, 18, a verified
    import): it takes effect without hold. ``severity`` and ``gate`` lower the declared ones for this
    finding, for example when the server's GPU set is unknown. ``from_outcome`` marks what was judged from how the
    probe's run ended instead of from its facts, so that a failed run counts as a round of it too. ``explained_by``
    narrows the type's ``depends_on`` to what can explain this reason; None leaves it.
    """

    code: str
    status: Status
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    gpus: tuple[tuple[str, str], ...] = ()
    final: bool = False
    severity: Severity | None = None
    gate: Gate | None = None
    from_outcome: bool = False
    explained_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A judged condition as it is published."""

    code: str
    status: Status
    severity: Severity
    gate: Gate
    reason: str | None
    message: str
    remedy: str
    evidence: tuple[str, ...]
    since: float
    gpus: tuple[tuple[str, str], ...] = ()
    explained_by: tuple[str, ...] = ()
    relevant: bool = True
    consequence_of: str | None = None

    @property
    def active(self) -> bool:
        """True when it holds, matters here, and no other condition explains it."""
        return self.status is Status.TRUE and self.relevant and self.consequence_of is None


# -- the server, as the judge needs it --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What the judge needs to know of the server, whichever way it was learned.

    ``features`` holds True (used or asked for), False (known not to be) or nothing (unknown).
    ``refusal_is_proof`` is False where a refused connection may just mean a wrong guess of the
    address. ``process`` changes when the server is another process than before.
    """

    answer: Answer | None = None
    refusal_is_proof: bool = False
    process: str | None = None
    features: Mapping[Feature, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the agent stands (design: where the sidecar stands), and why it thinks so."""

    placement: Placement
    placement_why: str
    processes: Processes
    processes_why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server whose environment is examined, field by field, each with the way it was found.

    ``launch`` holds allow-listed launch flags only, keyed as SGLang's ServerArgs names them.
    ``environ`` is the server's environment where it may be read; it is never exported.
    ``environ_missing`` says as a token why it is not there. ``uid`` is the server's user id, None too where the
    process has several.
    """

    url: str
    url_source: str
    scope: Scope
    python: str | None = None
    python_source: str = "not-found"
    root: str | None = None
    pid: int | None = None
    uid: int | None = None
    create_time: float | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)
    launch_source: str | None = None
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    environ_missing: str | None = None
    candidates: tuple[int, ...] = ()
    why: str = ""


# -- probes ---------------------------------------------------------------------------------------


class Skip(Exception):  # noqa: N818 - control flow, not an error: the probe does not apply here
    """Raised by ``collect`` when the probe's question does not arise. The argument is one sentence."""


class ProbeTimeout(Exception):  # noqa: N818 - an outcome, named after `Outcome.TIMEOUT`
    """Raised by ``collect`` when its source did not answer in time.

    ``where`` names the call or stage that did not return; ``stuck`` is True while a child that was
    told to die has not.
    """

    def __init__(self, sentence: str, *, where: str | None = None, stuck: bool = False) -> None:
        super().__init__(sentence)
        self.where = where
        self.stuck = stuck


class ProbeCrash(Exception):  # noqa: N818 - an outcome, named after `Outcome.CRASHED`
    """Raised by ``collect`` when its child ended without an answer. The argument is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Generic[FactsT]):
    """One run of a probe, as the scheduler reports it to the store."""

    probe: str
    outcome: Outcome
    started_at: float
    duration: float
    facts: FactsT | None = None
    detail: str = ""
    where: str | None = None
    stuck: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Generic[FactsT]):
    """All that is known of a probe: its last attempt, and facts while they live.

    ``facts`` are those of the last successful run; they are dropped at `expires_at` (monotonic seconds), so a
    reader never meets stale ones. ``failing_since`` is the start of the first of the unbroken failures.
    """

    probe: str
    outcome: Outcome = Outcome.PENDING
    facts: FactsT | None = None
    detail: str = ""
    where: str | None = None
    stuck: bool = False
    started_at: float | None = None
    duration: float | None = None
    last_success_at: float | None = None
    expires_at: float | None = None
    failing_since: float | None = None
    rounds: int = 0
    runs: Mapping[Outcome, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a probe's judge may know besides its own result."""

    standing: Standing
    server: ServerView
    now: float
    settings: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Generic[FactsT]):
    """A probe's declaration: everything the rest of the agent needs to run, judge and show it.

    ``collect`` may take long and may fail; ``judge``, ``samples``, ``identity``, ``report`` and
    ``view`` are pure. ``judge`` yields one `Finding` for each of ``conditions``; a code it leaves out
    is unknown. ``report`` returns values for the report's top-level keys declared in ``sections``.
    ``requirable`` names features that the ``require`` setting accepts, with the codes that must then hold
    off. ``backoff`` widens the interval while the probe times out, for probes whose rounds are costly.
    """

    name: str
    title: str
    interval: float
    deadline: float
    collect: Callable[[Any], Awaitable[FactsT]]
    judge: Callable[[Result[FactsT], World], Iterable[Finding]]
    samples: Callable[[FactsT], Iterable[Sample]]
    families: tuple[Family, ...]
    conditions: tuple[ConditionType, ...]
    identity: Callable[[FactsT], Mapping[str, str]] = lambda _facts: {}
    report: Callable[[FactsT], Mapping[str, Any]] = lambda _facts: {}
    sections: Mapping[str, Any] = field(default_factory=dict)
    view: Callable[[FactsT], ServerView] | None = None
    requirable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    backoff: bool = False


# -- what is published ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer behind /readyz. ``pending`` until the first driver round ended or met its deadline."""

    ready: bool
    pending: bool
    blockers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change that people want to see afterwards: a condition's status or the readiness."""

    at: float
    subject: str
    before: str
    after: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that is served, built once per publication and never changed afterwards."""

    generation: int
    taken_at: float
    standing: Standing
    server: ServerView
    results: Mapping[str, Result[Any]]
    conditions: Mapping[str, Condition]
    verdict: Verdict
    history: tuple[Transition, ...]
    ready_transitions: Mapping[bool, int]
