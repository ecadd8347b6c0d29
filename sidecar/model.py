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
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct, field

from sidecar.record import Discreet

FactsT = TypeVar("FactsT")
"""The type of a probe's facts: a frozen ``msgspec.Struct`` that holds data only."""


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
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    ERROR = "error"


FAILURES = (Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.CRASHED, Outcome.ERROR)
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
    FLASHINFER = "flashinfer"
    """Something that was asked for, or that the running server settled on, runs FlashInfer: mamba or another part."""
    FLASHINFER_IMPORT = "flashinfer-import"
    """The server imports FlashInfer whatever its flags are, as releases of SGLang do on CUDA."""
    FA3 = "fa3"
    FA4 = "fa4"


class Phase(StrEnum):
    """The phases of inference that choose an attention backend of their own."""

    PREFILL = "prefill"
    DECODE = "decode"
    VISION = "vision"
    DRAFT = "draft"


# -- metrics --------------------------------------------------------------------------------------


class Family(Struct, frozen=True, kw_only=True):
    """One metric family, named without the ``sglang_sidecar_`` prefix.

    ``kind`` is gauge, counter (the name ends in ``_total``) or info (the name ends in ``_info``). Several probes may
    declare one and the same ``shared`` family, and give samples of it with different labels.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    shared: bool = False


class Sample(Struct, frozen=True):
    """One series: the family's name without prefix, label values in the family's order, a number."""

    family: str
    labels: tuple[str, ...]
    value: float


# -- conditions -----------------------------------------------------------------------------------


class ConditionType(Struct, frozen=True, kw_only=True):
    """A condition, declared once by the probe that judges it.

    ``reasons`` maps each stable token that the condition can carry to its meaning.
    ``depends_on`` names the codes that explain this one: while one of them is active, this one is
    suppressed and listed as its consequence. ``moot_under`` names those that do so whatever a finding's own
    ``explained_by`` says. ``uses`` names the feature whose users it concerns; for
    a server that does not use it the condition is irrelevant, or, with ``info_when_unused``, shown
    as info and never gating; with ``only_when_used`` it is irrelevant, too, while the use is unknown.
    ``deferred`` marks a fault that surfaces only after the server answers: a finding may then say that
    it still gates (`Finding.gate`). ``hold`` is (bad rounds, good rounds) needed before a published
    verdict changes.
    """

    code: str
    severity: Severity
    gate: Gate
    title: str
    when: str
    remedy: str
    reasons: Mapping[str, str]
    depends_on: tuple[str, ...] = ()
    moot_under: tuple[str, ...] = ()
    uses: Feature | None = None
    info_when_unused: bool = False
    only_when_used: bool = False
    deferred: bool = False
    hold: tuple[int, int] = (2, 3)

    @property
    def causes(self) -> tuple[str, ...]:
        """Every code that can explain this one, those first under which it is moot."""
        return (*self.moot_under, *self.depends_on)


class Finding(Struct, frozen=True, kw_only=True):
    """What a probe's judge says about one of its conditions in one round.

    ``final`` marks a fact that no further round can make more certain (NVML 9, 12, 15, 18, a verified
    import): it takes effect without hold. ``severity`` and ``gate`` lower the declared ones for this
    finding, for example when the server's GPU set is unknown; only for a deferred type may ``gate`` be
    ``serving`` where ``launch`` is declared. ``irrelevant``: the question does not arise here. ``from_outcome`` marks
    what was judged from how the probe's run ended instead of from its facts, so that a failed run counts as a round
    of it too. ``explained_by`` narrows the type's ``depends_on`` to what can explain this reason; None leaves it.
    ``sglang_says`` is the sentence that SGLang prints when it meets this, by which a person finds it in the log; None
    where it prints none of its own or where none is known.
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
    irrelevant: bool = False
    from_outcome: bool = False
    explained_by: tuple[str, ...] | None = None
    sglang_says: str | None = None


class Condition(Struct, frozen=True, kw_only=True):
    """A judged condition as it is published. ``accepted``: the settings accept it, so it weighs nothing."""

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
    sglang_says: str | None = None
    relevant: bool = True
    accepted: bool = False
    consequence_of: str | None = None

    @property
    def active(self) -> bool:
        """True when it holds, matters here, and no other condition explains it."""
        return self.status is Status.TRUE and self.relevant and self.consequence_of is None


# -- the server, as the judge needs it --------------------------------------------------------------


class ServerView(Struct, frozen=True, kw_only=True):
    """What the judge needs to know of the server, whichever way it was learned.

    ``features`` holds True (used or asked for), False (known not to be) or nothing (unknown).
    ``refusal_is_proof`` is False where a refused connection may just mean a wrong guess of the
    address. ``process`` changes when the server is another process than before. ``far``: it would run on another
    machine, of which this one's GPUs and driver say nothing.
    """

    answer: Answer | None = None
    refusal_is_proof: bool = False
    process: str | None = None
    far: bool = False
    features: Mapping[Feature, bool] = field(default_factory=dict)


class Standing(Struct, frozen=True, kw_only=True):
    """Where the agent stands (design: where the sidecar stands), and why it thinks so."""

    placement: Placement
    placement_why: str
    processes: Processes
    processes_why: str


class LaunchProblem(Struct, frozen=True, kw_only=True):
    """What SGLang refuses in a launch's flags whichever release it is.

    The token odd-value is an exception: a release refuses it where the flag has choices. ``token`` is stable, ``flag``
    the flag as SGLang spells it, ``says`` the sentence that SGLang ends with. Neither repeats a value that was given.
    """

    token: str
    flag: str
    says: str


class LaunchNotes(Struct, frozen=True, kw_only=True):
    """How the flags of a launch were read.

    ``form`` names how the command starts SGLang. ``given`` holds each allow-listed flag in the order in which SGLang
    meets it: (flag, field, value); a field's last value is the one in `Target.launch`. ``from_config`` names the flags
    that a configuration file gives. ``passed_over`` names the first flags that were not looked at,
    ``passed_over_count`` counts all of them. ``has_model`` is whether a model is named.
    ``config`` says what became of the file that ``--config`` names: None (it names none), read, ignored (by SGLang
    too), or the token of the reason why it was not read. ``abbreviated`` holds what stands for a longer flag: (word,
    flag that it is read as). ``launches`` counts the launches in the command; of several, the last one is read.
    """

    form: str
    given: tuple[tuple[str, str, str | int | bool], ...] = ()
    from_config: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    passed_over_count: int = 0
    problems: tuple[LaunchProblem, ...] = ()
    has_model: bool = False
    config: str | None = None
    abbreviated: tuple[tuple[str, str], ...] = ()
    launches: int = 1


class Target(Discreet, frozen=True, kw_only=True):
    """The server whose environment is examined, field by field, each with the way it was found.

    ``launch`` holds allow-listed launch flags only, keyed as SGLang's ServerArgs names them; ``notes`` tells how they
    were read, None where nothing could be. ``environ`` is the server's environment where it may be read; it is never
    exported. ``limited``: the launch may set limits (ulimit) for it. ``environ_missing`` says as a token why it, or a
    part of it, is not there. ``unseen`` names variables that the server may have with values that are not known: they
    are not in ``environ``. ``unread`` is a sentence that says why the server's environment is not known well enough to
    be read at all, None where it is. ``far``: the launch leads to another machine than this one. ``uid`` is the
    server's user id, None too where the process has several. ``cwd`` is its working folder as it names it itself: below
    ``root`` where that is set; ``cwd_on_path`` says whether Python put that folder in front of its import path, as for
    ``python -m``; ``script`` is the path of the script whose own folder Python put there instead; ``python_flags`` are
    those of its flags that decide what an import finds and does (``-s``, ``-I``).
    """

    withheld = frozenset({"environ"})

    url: str
    url_source: str
    scope: Scope
    python: str | None = None
    python_source: str = "not-found"
    root: str | None = None
    cwd: str | None = None
    cwd_on_path: bool | None = None
    script: str | None = None
    python_flags: tuple[str, ...] = ()
    pid: int | None = None
    uid: int | None = None
    create_time: float | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)
    launch_source: str | None = None
    notes: LaunchNotes | None = None
    environ: Mapping[str, str] | None = None
    environ_missing: str | None = None
    limited: bool = False
    unseen: frozenset[str] = frozenset()
    unread: str | None = None
    far: bool = False
    candidates: tuple[int, ...] = ()
    why: str = ""


# -- drift ----------------------------------------------------------------------------------------


class ChangeKind(StrEnum):
    """How an item differs from before."""

    ADDED = "added"
    """It was proven absent and is there now."""
    REMOVED = "removed"
    """It was there and is proven absent now."""
    CHANGED = "changed"
    REBUILT = "rebuilt"
    """The same version in another build: its local tag differs, or its files do."""


class Observed(Struct, frozen=True, kw_only=True):
    """One item as a probe sees it. ``value`` None: looked for and not there.

    ``source`` is the probe and the scope: values of different sources are never compared with each other. ``build`` is
    a mark of the files behind the value, None where there is none.
    """

    value: str | None
    source: str
    build: str | None = None


class Change(Struct, frozen=True, kw_only=True):
    """A change of one item, at ``at`` seconds since the epoch."""

    item: str
    kind: ChangeKind
    before: str | None
    after: str | None
    at: float


class Known(Struct, frozen=True, kw_only=True):
    """The last known identity and how often it changed.

    ``seen`` maps (item, source) to what was last seen. ``counts`` and ``last_change`` are per item, the latter in
    seconds since the epoch.
    """

    seen: Mapping[tuple[str, str], Observed] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    last_change: Mapping[str, float] = field(default_factory=dict)
    recent: tuple[Change, ...] = ()


class Deviation(StrEnum):
    """How an item differs from its baseline."""

    DIFFERENT = "different"
    OTHER_BUILD = "other-build"
    """The version that the baseline wants, in another build: its local tag differs."""
    MISSING = "missing"
    """It is proven absent, and the baseline wants a value."""
    UNEXPECTED = "unexpected"
    """It is there, and the baseline wants it absent."""


class Expectation(Struct, frozen=True, kw_only=True):
    """What a baseline says of one item: an exact ``value``, a PEP 440 ``specifier`` as written, or neither: absence."""

    value: str | None = None
    specifier: str | None = None


class BaselineProblem(Struct, frozen=True):
    """What is wrong with a baseline: a token, and a sentence that names the file, the item and the remedy."""

    token: str
    sentence: str


class Baseline(Struct, frozen=True, kw_only=True):
    """What a baseline file says. ``items`` are those that could be read; ``problems`` says what could not."""

    items: Mapping[str, Expectation] = field(default_factory=dict)
    problems: tuple[BaselineProblem, ...] = ()


class Drift(Struct, frozen=True, kw_only=True):
    """An item that is not as the baseline wants it. ``observed`` None: proven absent."""

    item: str
    deviation: Deviation
    expected: str
    observed: str | None


# -- probes ---------------------------------------------------------------------------------------


class Skip(Exception):  # noqa: N818 - control flow, not an error: the probe does not apply here
    """Raised by ``collect`` when the probe's question does not arise. The argument is one sentence."""


class ProbeUnavailable(Exception):  # noqa: N818 - an outcome, named after `Outcome.UNAVAILABLE`
    """Raised by ``collect`` when what it was told to ask is not there or cannot be used: nobody's code failed.

    The argument is one sentence, which says what to correct.
    """


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


class Attempt(Struct, Generic[FactsT], frozen=True, kw_only=True):
    """One run of a probe, as the scheduler reports it to the store."""

    probe: str
    outcome: Outcome
    started_at: float
    duration: float
    facts: FactsT | None = None
    detail: str = ""
    where: str | None = None
    stuck: bool = False


class Result(Struct, Generic[FactsT], frozen=True, kw_only=True):
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


class World(Struct, frozen=True, kw_only=True):
    """What a probe's judge may know besides its own result.

    ``environment`` is what all probes together know of its items, ``drifts`` what of it is not as the baseline wants.
    """

    standing: Standing
    server: ServerView
    now: float
    settings: Any
    environment: Mapping[str, Observed] = field(default_factory=dict)
    drifts: tuple[Drift, ...] = ()


class Option(Struct, frozen=True, kw_only=True):
    """A setting of a probe's own: TOML key, variable, flag, `config show` and documentation follow from it.

    ``default`` is the default as it would be written. ``parse`` turns what TOML, a variable or a flag holds into the
    value; it raises ValueError with what is allowed, as the rest of a sentence that begins with the value ("must be").
    """

    key: str
    default: str
    doc: str
    metavar: str
    parse: Callable[[object], Any]

    def of(self, settings: Any) -> Any:
        """The effective value, of `sidecar.config.Settings`."""
        return settings.options[self.key] if self.key in settings.options else self.parse(self.default)


class Probe(Struct, Generic[FactsT], frozen=True, kw_only=True):
    """A probe's declaration: everything the rest of the agent needs to run, judge and show it.

    ``collect`` may take long and may fail; ``judge``, ``samples``, ``identity``, ``report`` and
    ``view`` are pure. ``judge`` yields one `Finding` for each of ``conditions``; a code it leaves out
    is unknown. ``report`` returns values for the report's top-level keys declared in ``sections``; where several
    probes declare one key with the same type, an object, each contributes its own entries of it.
    ``requirable`` names features that the ``require`` setting accepts, with the codes that must then hold
    off. ``options`` are settings of the probe's own. ``uses`` tells of features that the server's own view leaves
    unknown. ``backoff`` widens the interval while the probe times out, for probes whose rounds are costly.
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
    identity: Callable[[FactsT], Mapping[str, str | None]] = lambda _facts: {}
    builds: Callable[[FactsT], Mapping[str, str]] = lambda _facts: {}
    baseline: Callable[[FactsT], Baseline | None] | None = None
    report: Callable[[FactsT], Mapping[str, Any]] = lambda _facts: {}
    sections: Mapping[str, Any] = field(default_factory=dict)
    view: Callable[[FactsT], ServerView] | None = None
    uses: Callable[[FactsT], Mapping[Feature, bool]] | None = None
    requirable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    backoff: bool = False


# -- demo -----------------------------------------------------------------------------------------


class Demo(Struct, frozen=True, kw_only=True):
    """The recorded scenario that is shown instead of this machine.

    ``title`` and ``shows`` are for people. ``replica`` counts from 1 where the scenario has several, else it is None.
    """

    scenario: str
    title: str
    shows: str
    replica: int | None = None
    replicas: int = 1


# -- what is published ------------------------------------------------------------------------------


class Verdict(Struct, frozen=True, kw_only=True):
    """The answer behind /readyz. ``pending`` until the first driver round ended or met its deadline."""

    ready: bool
    pending: bool
    blockers: tuple[str, ...]


class Transition(Struct, frozen=True, kw_only=True):
    """A change that people want to see afterwards: a condition's status or the readiness."""

    at: float
    subject: str
    before: str
    after: str
    reason: str | None = None


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that is served, built once per publication and never changed afterwards.

    ``ready_transitions`` counts changes of the verdict by what it changed to, ``condition_transitions`` those of
    conditions by whether one became active. ``demo`` is None where it is about this machine.
    """

    generation: int
    taken_at: float
    standing: Standing
    server: ServerView
    results: Mapping[str, Result[Any]]
    conditions: Mapping[str, Condition]
    verdict: Verdict
    history: tuple[Transition, ...]
    ready_transitions: Mapping[bool, int]
    condition_transitions: Mapping[bool, int] = field(default_factory=dict)
    environment: Mapping[str, Observed] = field(default_factory=dict)
    baseline: Baseline | None = None
    drifts: tuple[Drift, ...] = ()
    known: Known = field(default_factory=Known)
    demo: Demo | None = None
