"""A child's end and its answer into evidence: whatever it says, only what has the right shape gets in."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from sidecar.imports.evidence import INTERPRETER_BROKEN, ImportEvidence, ImportLink, ImportOutcome, LibraryLoad
from sidecar.isolation import FLOOD, ChildReport, signal_name
from sidecar.loaderrors import below_packages
from sidecar.untrusted import boolean, integer, last_line, mapping, number, text, texts, versions

_CRASHES: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"})
"""Signals by which code ends itself. All others are sent, or are limits of ours: they say nothing of the code."""
_BEFORE_THE_IMPORT: Final = frozenset({None, "interpreter"})
"""Stages at which nothing of the module was touched yet."""
_FULL: Final = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)}
_FULL_SOMEWHERE: Final = re.compile(rf"(?:{'|'.join(map(re.escape, _FULL.values()))})(?!: b?['\"])")
"""What is said where an open file was written to. Elsewhere the file is named: `_FULL_AT`."""
_FULL_AT: Final = re.compile(rf"(?:{'|'.join(map(re.escape, _FULL.values()))}): b?['\"]")
USER_SITE: Final = ".local/lib"
"""Below the child's home, and the server's nevertheless: a link to what its user installed."""


class Circumstances(Struct, frozen=True, kw_only=True):
    """What is known of an import's surroundings when it has ended.

    ``memory_short``: the group or the machine was short of memory, or the kernel ended a process for want of it.
    ``memory_limited``, ``cpu_limited``: a resource limit of the agent's, which the child has as well, was in force.
    ``busy``: it got the CPU for a good part of its time. ``folder`` is the private folder of the child.
    """

    same_user: bool
    memory_short: bool
    memory_limited: bool
    cpu_limited: bool
    busy: bool
    folder: str


def never_started(report: ChildReport) -> bool:
    """Whether the interpreter came to its end, or to nothing, before the probe's own first line."""
    return report.exec_error is None and report.stage is None and report.result is None and not report.lines


def evidence_from(
    report: ChildReport, at: float, around: Circumstances, start: ChildReport | None = None
) -> ImportEvidence:
    """Say what a child's end and its answer show.

    ``start`` is how a start file by file ended, where the interpreter did not get to the probe.
    """
    evidence = _evidence(report, at, around)
    if start is not None and evidence.reason == INTERPRETER_BROKEN:
        file = next((text(line["file"], 4096) for line in reversed(start.lines) if "file" in line), None)
        evidence = replace(evidence, where=file, cause=_ending(start))
    return replace(evidence, private=_is_private(evidence, around.folder))


def _ending(start: ChildReport) -> str | None:
    """Say in a few words how a start ended that was done file by file; None where it went well."""
    result = start.result
    if result is not None:
        raised = text(result["result"])
        return None if raised is None else f"raises {raised}"
    if start.signal_name is not None:
        return f"ends it by {start.signal_name}"
    return "does not end" if start.timed_out else f"ends it with exit code {start.exit_code}"


def _evidence(report: ChildReport, at: float, around: Circumstances) -> ImportEvidence:
    line = report.result
    common: dict[str, Any] = {"at": at, "stage": report.stage, "same_user": around.same_user}
    if line is not None and isinstance(line["result"], dict):
        return _from_result(line["result"], common, around)
    if report.exec_error is not None:
        # In another folder than the server's its import path would be another.
        reason = "cannot-enter-folder" if any("folder" in line for line in report.lines) else "cannot-start"
        return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason=reason, **common)
    if (too_old := next((line["too_old"] for line in report.lines if "too_old" in line), None)) is not None:
        message = f"Python {text(too_old, 16) or ''} is older than what the probe runs on (3.8)."
        return ImportEvidence(
            outcome=ImportOutcome.NOT_ALLOWED, reason="interpreter-too-old", message=message, **common
        )
    common["seconds"] = report.duration
    printed, trace = _without_trace(report.tail)
    common["tail"] = last_line(printed)
    common["loading"] = next((text(line["loading"]) for line in reversed(report.lines) if "loading" in line), None)
    common["died_at"] = _died_at(trace)
    if report.stopped == FLOOD:
        return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason=FLOOD, **common)
    imports = report.stage not in _BEFORE_THE_IMPORT
    if report.stopped is not None and (imports or report.stopped != ImportOutcome.TIMEOUT):
        return ImportEvidence(outcome=ImportOutcome(report.stopped), **common)
    if report.timed_out:
        return ImportEvidence(outcome=ImportOutcome.STARVED, reason="busy" if around.busy else None, **common)
    if report.signal_name == "SIGKILL" and report.stopped is None and not report.killed and around.memory_short:
        # Nothing of ours sent it: that is how the kernel ends a process when memory runs out.
        return ImportEvidence(outcome=ImportOutcome.INSUFFICIENT_MEMORY, **common)
    ending: dict[str, Any] = {"exit_code": report.exit_code, "signal": report.signal_name, **common}
    untold = _untold(report, around)
    if untold is not None:
        return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason=untold, message=common["tail"], **ending)
    return ImportEvidence(outcome=ImportOutcome.CRASHED, **ending)


_TRACE: Final = re.compile(r"Fatal Python error: .*?^(?:Current thread|Stack)\b[^\n]*$", re.MULTILINE | re.DOTALL)
"""How the interpreter's account of a fatal signal begins (the module ``faulthandler``)."""
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"\n]{1,4096})", line (?P<line>\d{1,7}) in', re.MULTILINE)
_NOT_THE_CODE: Final = re.compile(r"<frozen |.*/(?:ctypes/__init__|import_probe)\.py$")
"""Frames through which code gets into the loader, and those of the probe itself."""


def _without_trace(tail: str) -> tuple[str, str]:
    """(what was printed before a fatal signal, the interpreter's trace of the thread that met it)."""
    match = _TRACE.search(tail)
    return (tail, "") if match is None else (tail[: match.start()], tail[match.end() :].partition("\n\n")[0])


def _died_at(trace: str) -> str | None:
    """``file:line`` of the innermost frame of the imported code, below site-packages where it is there."""
    for match in _FRAME.finditer(trace):
        if not _NOT_THE_CODE.match(match["file"]):
            return text(f"{below_packages(match['file'])}:{match['line']}")
    return None


def _untold(report: ChildReport, around: Circumstances) -> str | None:
    """The token for an end without an answer that says nothing of the imported code; None for a crash."""
    if report.stage in _BEFORE_THE_IMPORT:
        # What runs in every start of this interpreter ended it, or keeps it: nothing was imported yet.
        return INTERPRETER_BROKEN
    if report.killed or report.exit_code in {0, None}:
        # It closed the channel that only we know of, or the probe could not answer: nothing that an import does.
        return "no-answer"
    if report.signal_name == "SIGXCPU" and around.cpu_limited:
        return "rlimit"
    return "killed" if report.signal_name is not None and report.signal_name not in _CRASHES else None


def _from_result(result: Mapping[str, Any], common: Mapping[str, Any], around: Circumstances) -> ImportEvidence:
    exception = text(result.get("exception"), 100)
    ok = result.get("ok") is True
    outcome, reason = ImportOutcome.OK if ok else ImportOutcome.FAILED, None
    if result.get("is_memory_error") is True and not ok:
        # Where there was enough it was anything else that code calls so.
        enough = not (around.memory_short or around.memory_limited)
        outcome = ImportOutcome.NOT_ALLOWED if enough else ImportOutcome.INSUFFICIENT_MEMORY
        reason = "memory-error" if enough else None if around.memory_short else "rlimit"
    return ImportEvidence(
        outcome=outcome,
        reason=reason,
        seconds=number(result.get("seconds"), 1e6),
        step=text(result.get("step")),
        symbol=text(result.get("symbol")),
        names=texts(result.get("names")),
        exception=exception,
        message=text(result.get("message"), 6000, lines=True) or "",
        where=text(result.get("where")),
        missing=text(result.get("missing")),
        errno=integer(result.get("errno")),
        os_error=result.get("is_os_error") is True,
        exited=result.get("exit") is True,
        sglang_catches=boolean(result.get("sglang_catches")),
        cause=text(result.get("cause"), 400),
        versions=versions(result.get("versions")),
        torch_cuda=text(result.get("torch_cuda"), 16),
        cuda_initialized=boolean(result.get("cuda_initialized")),
        max_rss_bytes=integer(result.get("max_rss_bytes")),
        chain=tuple(
            ImportLink(
                exception=text(item.get("exception"), 100) or "",
                message=text(item.get("message"), 1000, lines=True) or "",
                library=text(item.get("library")),
            )
            for item in _items(result.get("chain"))
        ),
        loads=tuple(
            load
            for item in _items(result.get("loads"))
            if (path := text(item.get("path"))) is not None and (load := _load_from(path, item)) is not None
        ),
        wheels={
            text(key, 100) or "": texts(value, 5) for key, value in list(mapping(result.get("wheels")).items())[:4]
        },
        cuda_available=boolean(result.get("cuda_available")),
        **common,
    )


def _items(value: object) -> Iterator[Mapping[str, Any]]:
    """The first items of a list as objects, or none of anything else."""
    return map(mapping, value[:8] if isinstance(value, list) else ())


def _load_from(path: str, answer: Mapping[str, Any]) -> LibraryLoad | None:
    number = integer(answer.get("signal"))
    ended_by = None if number is None else signal_name(-number)
    if ended_by is not None and ended_by not in _CRASHES:
        return None  # something outside ended it, which says nothing of the library
    if ended_by is not None:
        return LibraryLoad(path, f"the process that loaded it was ended by {ended_by}", ended_by)
    return LibraryLoad(path, text(answer.get("error"), 1000, lines=True))


def _is_private(evidence: ImportEvidence, folder: str) -> bool:
    """Whether a failure concerns the child's own folder, which the server has not, or a disk that is full below it."""
    said = [load.error or "" for load in evidence.loads]
    full = False
    if evidence.outcome in {ImportOutcome.FAILED, ImportOutcome.CRASHED}:
        said += [evidence.message, evidence.cause or "", evidence.tail]
        said += [part for link in evidence.chain for part in (link.message, link.library or "")]
        full = evidence.errno in _FULL and not _FULL_AT.search(evidence.message)
    # By its name, which is nobody else's: paths arrive shortened, too.
    inside = re.compile(re.escape(Path(folder).name) + rf"(?!/{re.escape(USER_SITE)})")
    return full or any(inside.search(part) or _FULL_SOMEWHERE.search(part) for part in said)
