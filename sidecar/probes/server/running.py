"""What the server's processes show: whether its workers live, and whether it runs what is installed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from sidecar.environment import Damage
from sidecar.model import Answer, ConditionType, Finding, Gate, Processes, Severity, Status
from sidecar.probes.server.facts import ServerFacts
from sidecar.processes import Role, ServerProcesses
from sidecar.target import PREFLIGHT, READ_SOURCES

_CLOCK_MARGIN: Final = 5.0
"""Seconds by which a change must be later than the start of the server: the kernel's time of boot is rounded, and a
clock that is being adjusted moves it by a second or two."""
_SHOWN: Final = 12
"""Entries of evidence: enough to see which packages it is."""

_UNKNOWN_REASONS: Final = {
    "processes-hidden": "Unknown: the server's processes cannot be seen from here.",
    "no-process": "Unknown: the server answers and its process was not found.",
    "not-read": "Unknown: its processes could not be read in time.",
}
SERVER_WORKERS_MISSING: Final = ConditionType(
    code="server-workers-missing",
    severity=Severity.CRITICAL,
    gate=Gate.NEVER,
    title="The server answers, and workers of it are gone",
    when="The server's address answers while scheduler processes of it have ended or are fewer than its sizes make.",
    remedy="Read the server's log for the exception that ended the worker, then restart the server.",
    reasons={
        "ended": "scheduler processes have ended and wait to be collected (zombies)",
        "gone": "fewer scheduler processes run than did before",
        "fewer": "fewer scheduler processes run than tp * pp (* dp) / nnodes",
        **_UNKNOWN_REASONS,
        "never-seen": "Unknown: no scheduler process was ever seen; some launches (Ray, encoders) start none here.",
        "address-unknown": "Unknown: what answers at the address may be another server.",
    },
)
SERVER_RUNS_REPLACED_FILES: Final = ConditionType(
    code="server-runs-replaced-files",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="The server runs on files that were replaced since",
    when="Libraries that the server has loaded were deleted or replaced on disk, or files of its packages changed or "
    "were removed after it started.",
    remedy="Restart the server to load what is installed now.",
    reasons={
        "mapped-replaced": "libraries that it has loaded were deleted or replaced on disk",
        "changed-after-start": "files of its packages changed, or went, after it started",
        **_UNKNOWN_REASONS,
        "files-gone": "Unknown: files of its packages are not there, and may have gone after it started.",
        "files-unseen": "Unknown: the times of its packages' files cannot be read from here.",
    },
)
CONDITIONS: Final = (SERVER_WORKERS_MISSING, SERVER_RUNS_REPLACED_FILES)


def judge(facts: ServerFacts, now: float) -> Iterable[Finding]:
    """Judge both. ``now`` is in seconds since the epoch."""
    return (_workers(facts), _replaced(facts, now))


def _unknown(kind: ConditionType, reason: str) -> Finding:
    # Where the sidecar stands decides what it sees, for good: that is no open question which a check must fail on.
    return Finding(code=kind.code, status=Status.UNKNOWN, reason=reason, severity=Severity.INFO)


def _fine(kind: ConditionType, message: str, evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=kind.code, status=Status.FALSE, message=message, evidence=evidence)


def _unseen(facts: ServerFacts) -> str:
    return "processes-hidden" if facts.processes is Processes.HIDDEN else "no-process"


def _nobody(facts: ServerFacts) -> bool:
    """Whether there is no server to judge: a launch to come, or nobody in sight."""
    refused = facts.observation.answer is Answer.REFUSED
    return facts.target.launch_source == PREFLIGHT or (facts.target.pid is None and refused)


# -- workers ------------------------------------------------------------------------------------------


def _workers(facts: ServerFacts) -> Finding:
    kind = SERVER_WORKERS_MISSING
    if _nobody(facts) or facts.observation.answer is not Answer.ACCEPTED:
        return _fine(kind, "No server answers: workers that are not there are not missed.")
    if facts.running is None:
        return _unknown(kind, _unseen(facts))
    if facts.running.problem is not None:
        return _unknown(kind, "not-read")
    if facts.target.url_source not in READ_SOURCES and facts.target.url_source != "listening-socket":
        return _unknown(kind, "address-unknown")
    return _missing(facts, facts.running)


def _missing(facts: ServerFacts, running: ServerProcesses) -> Finding:
    kind = SERVER_WORKERS_MISSING
    alive, ended = len(running.of(Role.SCHEDULER)), running.zombies(Role.SCHEDULER)
    expected, seen = facts.schedulers_expected, facts.schedulers_seen
    if expected is not None and alive >= expected:
        return _fine(kind, f"{_count(alive)} run.", _layout(running))
    if not alive and not ended and not seen:
        # Nobody saw one: it may be a kind of launch that has none below its main process.
        return _unknown(kind, "never-seen")
    if running.cut:
        return _unknown(kind, "not-read")
    if ended:
        reason, why = "ended", f"{_count(len(ended))} ended and {'was' if len(ended) == 1 else 'were'} not replaced"
    elif alive < seen:
        reason, why = "gone", f"{_count(seen)} ran before"
    elif expected is not None:
        reason, why = "fewer", f"its sizes make {expected}"
    else:
        return _fine(kind, f"{_count(alive)} run.", _layout(running))
    return Finding(
        code=kind.code,
        status=Status.TRUE,
        reason=reason,
        message=f"The server answers with {alive or 'no'} scheduler{'' if alive == 1 else 's'} alive: {why}.",
        evidence=(*(f"process {one.pid}: scheduler, a zombie" for one in ended[:_SHOWN]), *_layout(running)),
    )


def _count(number: int) -> str:
    return f"{number} scheduler{'' if number == 1 else 's'}"


def _layout(running: ServerProcesses) -> tuple[str, ...]:
    """The living processes in one line."""
    numbers = ((role, len(running.of(role))) for role in Role)
    return (", ".join(f"{role.value} {number}" for role, number in numbers if number),)


# -- replaced files -----------------------------------------------------------------------------------


def _replaced(facts: ServerFacts, now: float) -> Finding:
    kind = SERVER_RUNS_REPLACED_FILES
    if _nobody(facts):
        return _fine(kind, "No server runs.")
    running = facts.running
    if running is None:
        return _unknown(kind, _unseen(facts))
    changed = _changed(facts, now)
    if running.replaced or changed or facts.removed:
        return _found(facts, running.replaced or (), changed or ())
    if changed is None:
        # Nothing that is loaded as a library was replaced; of Python sources nothing is known.
        return _unknown(kind, "not-read" if running.problem is not None else "files-unseen")
    if gone := _may_have_gone(facts):
        return replace(
            _unknown(kind, "files-gone"),
            message=f"Files of {', '.join(gone)} are not there; they may have gone after the server started.",
            evidence=tuple(_missing_files(name, damage) for name, damage in gone.items()),
        )
    return _fine(kind, "No file of its packages changed since it started.")


def _may_have_gone(facts: ServerFacts) -> dict[str, Damage]:
    """Packages that lack files which may have been there when the server started."""
    started = facts.target.create_time
    return {
        name: damage
        for name, damage in facts.incomplete.items()
        if started is None or damage.missing_since is None or damage.missing_since > started + _CLOCK_MARGIN
    }


def _missing_files(name: str, damage: Damage) -> str:
    since = "" if damage.missing_since is None else f", at the latest since {_stamp(damage.missing_since)}"
    return f"{name}: {damage.missing} files that it is registered with are missing{since}"


def _changed(facts: ServerFacts, now: float) -> tuple[tuple[str, float], ...] | None:
    """Packages whose files changed after the server started, and when; None where that is not known."""
    started = facts.target.create_time
    if facts.changed_at is None or started is None:
        return None
    # A change in the future shows that the clock was set back since: then it dates nothing.
    return tuple(
        (package, at)
        for package, at in sorted(facts.changed_at.items())
        if started + _CLOCK_MARGIN < at <= now + _CLOCK_MARGIN
    )


def _found(facts: ServerFacts, mapped: tuple[str, ...], changed: tuple[tuple[str, float], ...]) -> Finding:
    packages = sorted({name for name, _ in changed} | set(facts.removed) | {file.partition("/")[0] for file in mapped})
    listed = ", ".join(packages[:5]) + (f" and {len(packages) - 5} more" if len(packages) > 5 else "")
    running, installed = facts.info.version if facts.info is not None else None, facts.installed_sglang
    evidence = [f"loaded, and deleted or replaced on disk: {file}" for file in mapped[:_SHOWN]]
    evidence += [f"{name}: files changed at {_stamp(at)}" for name, at in changed[:_SHOWN]]
    evidence += [f"{name}: {what}" for name, what in list(facts.removed.items())[:_SHOWN]]
    if facts.target.create_time is not None:
        evidence.append(f"process {facts.target.pid} started at {_stamp(facts.target.create_time)}")
    if running is not None and installed is not None and running != installed:
        evidence.append(f"the server says that it runs sglang {running}; {installed} is installed")
    happened = "replaced" if mapped or changed else "removed"
    return Finding(
        code=SERVER_RUNS_REPLACED_FILES.code,
        status=Status.TRUE,
        reason="mapped-replaced" if mapped else "changed-after-start",
        message=f"Files of {listed} were {happened} under the running server: what it runs is not what is installed.",
        evidence=tuple(evidence),
    )


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
