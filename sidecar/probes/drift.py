"""Whether the environment is as its baseline wants it, and whether what is remembered of it can be trusted.

The comparison itself needs what all other probes know, so it is the judge's (`sidecar.drift.compare`); this probe reads
the file anew in each round and says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from sidecar import baseline as files
from sidecar.drift import ITEMS, MIG, written
from sidecar.exposure import objection, writable_by_all
from sidecar.model import (
    Baseline,
    BaselineProblem,
    ConditionType,
    Deviation,
    Drift,
    Finding,
    Gate,
    Placement,
    Probe,
    Result,
    Sample,
    Severity,
    Status,
    World,
)
from sidecar.offload import in_daemon_thread
from sidecar.services import Services
from sidecar.state import StateProblem

STATE: Final = "state"
"""The key under which the agent leaves a `StateProblem`, or None, in `Services.memory`."""


class DriftFacts(Struct, frozen=True, kw_only=True):
    """The baseline as it is now, None where none is set, and what is wrong with the state directory, if anything."""

    baseline: Baseline | None
    state_set: bool
    state_problem: StateProblem | None


async def collect(services: Services) -> DriftFacts:
    """Read the baseline file. Never raises for what is wrong with it."""
    path = services.settings.baseline
    loaded = None
    if path is not None:
        on_host = services.standing.placement is Placement.HOST
        loaded = await in_daemon_thread(lambda: _load(Path(path), on_host=on_host))
    problem = services.memory.get(STATE)
    return DriftFacts(
        baseline=loaded,
        state_set=services.settings.state_dir is not None,
        state_problem=problem if isinstance(problem, StateProblem) else None,
    )


def _load(path: Path, *, on_host: bool) -> Baseline:
    """Read the file; what any user may write is not believed on a host, and only reported in a container."""
    loaded = files.load(path, ITEMS)
    open_to_all = writable_by_all(path)
    if open_to_all is None:
        return loaded
    problem = BaselineProblem("open-to-others", f"{objection(open_to_all)}.")
    if on_host:
        return Baseline(problems=(problem,))
    return Baseline(items=loaded.items, problems=(*loaded.problems, problem))


# -- judgement ----------------------------------------------------------------------------------------

_MIG_UNEXPECTED: Final = "mig-unexpected"
"""The condition of the driver probe that says more of a drift of MIG mode, GPU by GPU."""

DRIFT: Final = ConditionType(
    code="environment-drift",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="The environment is not as its baseline wants it",
    when="An item of the environment is known and differs from the baseline. What is unknown never drifts. "
    "Irrelevant where no baseline is set.",
    remedy="Bring the environment back, or accept it: `sglang-sidecar baseline write` prints it as it is now.",
    depends_on=(_MIG_UNEXPECTED,),
    reasons={
        "different": "A value is another one than the baseline wants.",
        "other-build": "The version is the one that the baseline wants, in another build: its local tag differs.",
        "missing": "Something that the baseline wants is not there.",
        "unexpected": "Something is there that the baseline wants absent.",
        "no-baseline": "No baseline is set.",
        "baseline-unreadable": "Unknown: the baseline cannot be read.",
        "nothing-known": "Unknown: none of the baseline's items is known.",
    },
)
UNREADABLE: Final = ConditionType(
    code="baseline-unreadable",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="The baseline cannot be read, or not all of it",
    when="The file named by `baseline` is missing, is no baseline, or names items that this release does not know. "
    "What can be read of it is still compared. Irrelevant where no baseline is set.",
    remedy="Correct the file; `sglang-sidecar baseline write` prints a whole one.",
    reasons={
        "unreadable": "The file cannot be read.",
        "not-toml": "The file is not valid TOML.",
        "no-table": "The file has no table [environment].",
        "unknown-key": "The file holds something besides the table [environment].",
        "unknown-item": "The file names an item that this release does not know.",
        "invalid-value": "A value is neither a text nor a version specifier.",
        "open-to-others": "Every user may write the file or its folder; on a host it is not used then.",
        "no-baseline": "No baseline is set.",
    },
)
STATE_UNUSABLE: Final = ConditionType(
    code="state-unusable",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="What was known before a restart is lost, or cannot be kept",
    when="The directory named by `state_dir` cannot be read or written, the file in it was not whole, or another agent "
    "uses it. The agent works on without it and tries again: changes that happen while it does not run are not noticed "
    "meanwhile. A file that was set aside is told of until the next start. Irrelevant where none is set.",
    remedy="Give the agent's user a writable directory of its own, and look for what fills or changes it.",
    reasons={
        "set-aside": "The file could not be used; it was renamed and is written anew.",
        "unreadable": "The file cannot be read.",
        "unwritable": "The file or its folder cannot be written.",
        "in-use": "Another agent uses the directory; it is not touched.",
        "open-to-others": "Other users may change the file; on a host it is not used then.",
        "no-state-dir": "No state directory is set.",
    },
)
CONDITIONS: Final = (DRIFT, UNREADABLE, STATE_UNUSABLE)


def judge(result: Result[DriftFacts], world: World) -> Iterable[Finding]:
    """Judge from what was read and what the judge compared."""
    facts = result.facts
    if facts is None:
        return ()
    return (_drift(facts, world), _unreadable(facts), _state(facts))


def _not_asked(kind: ConditionType, reason: str) -> Finding:
    return Finding(code=kind.code, status=Status.UNKNOWN, reason=reason, irrelevant=True)


def _drift(facts: DriftFacts, world: World) -> Finding:
    if facts.baseline is None:
        return _not_asked(DRIFT, "no-baseline")
    if not facts.baseline.items:
        return Finding(code=DRIFT.code, status=Status.UNKNOWN, reason="baseline-unreadable")
    if not world.drifts:
        if not set(facts.baseline.items) & set(world.environment):
            return Finding(code=DRIFT.code, status=Status.UNKNOWN, reason="nothing-known")
        return Finding(code=DRIFT.code, status=Status.FALSE)
    lead, *rest = world.drifts
    more = f" {len(rest)} more item{'s differ' if len(rest) > 1 else ' differs'}." if rest else ""
    return Finding(
        code=DRIFT.code,
        status=Status.TRUE,
        reason=lead.deviation.value,
        message=f"{_sentence(lead)}{more}",
        evidence=tuple(_sentence(one) for one in world.drifts),
        explained_by=(_MIG_UNEXPECTED,) if {one.item for one in world.drifts} == {MIG} else (),
    )


def _sentence(one: Drift) -> str:
    match one.deviation:
        case Deviation.MISSING:
            return f"{one.item} is not there; the baseline wants {one.expected}."
        case Deviation.UNEXPECTED:
            return f"{one.item} is {one.observed}; the baseline wants it absent."
        case Deviation.OTHER_BUILD:
            return f"{one.item} is {one.observed}, another build of what the baseline wants ({one.expected})."
        case Deviation.DIFFERENT:
            return f"{one.item} is {one.observed}; the baseline wants {one.expected}."


def _unreadable(facts: DriftFacts) -> Finding:
    if facts.baseline is None:
        return _not_asked(UNREADABLE, "no-baseline")
    if not facts.baseline.problems:
        return Finding(code=UNREADABLE.code, status=Status.FALSE)
    lead = facts.baseline.problems[0]
    return Finding(
        code=UNREADABLE.code,
        status=Status.TRUE,
        reason=lead.token,
        message=lead.sentence,
        evidence=tuple(one.sentence for one in facts.baseline.problems[:20]),
        # Read from the file itself: another round cannot make it more certain.
        final=True,
    )


def _state(facts: DriftFacts) -> Finding:
    if not facts.state_set:
        return _not_asked(STATE_UNUSABLE, "no-state-dir")
    problem = facts.state_problem
    if problem is None:
        return Finding(code=STATE_UNUSABLE.code, status=Status.FALSE)
    return Finding(
        code=STATE_UNUSABLE.code, status=Status.TRUE, reason=problem.token, message=problem.sentence, final=True
    )


# -- what is shown --------------------------------------------------------------------------------------


def samples(_facts: DriftFacts) -> Iterable[Sample]:
    """Export nothing: the agent's own families tell of drift, from what the judge compared."""
    return ()


class BaselineSection(Struct, frozen=True, kw_only=True):
    """The baseline in the report; null where none is set. ``items`` as the file writes them."""

    items: Mapping[str, str]
    problems: tuple[str, ...]


def report(facts: DriftFacts) -> Mapping[str, Any]:
    """Give the report's ``baseline``."""
    if facts.baseline is None:
        return {}
    return {
        "baseline": BaselineSection(
            items={item: written(wanted) for item, wanted in facts.baseline.items.items()},
            problems=tuple(one.sentence for one in facts.baseline.problems),
        )
    }


PROBE: Probe[DriftFacts] = Probe(
    name="drift",
    title="Whether the environment is as its baseline wants it",
    interval=60.0,
    deadline=5.0,
    collect=collect,
    judge=judge,
    samples=samples,
    families=(),
    conditions=CONDITIONS,
    report=report,
    sections={"baseline": BaselineSection},
    baseline=lambda facts: facts.baseline,
)
