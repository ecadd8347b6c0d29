"""What is told of a module of the server's environment: its metrics and its entry in the report.

Several probes judge modules, each its own; they share the families and the report's key ``modules``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from sidecar.environment import EnvironmentFacts
from sidecar.imports import INTERPRETER_BROKEN, ImportEvidence, ImportOutcome
from sidecar.loaderrors import LoadFault, load_error
from sidecar.model import Family, Sample, Scope

MODULE_FAMILIES: Final = (
    Family(
        name="module_importable",
        kind="gauge",
        help="1 when the module can be imported in the server's environment by the best evidence there is, 0 when not; "
        "absent while unknown.",
        labels=("module",),
        shared=True,
    ),
    Family(
        name="module_import_verified",
        kind="gauge",
        help="1 when module_importable rests on a real import, 0 when on reading files.",
        labels=("module",),
        shared=True,
    ),
    Family(
        name="module_import_duration_seconds",
        kind="gauge",
        help="Duration of the last real import that succeeded or raised.",
        labels=("module",),
        shared=True,
    ),
)
"""A probe that judges modules declares all three."""


# -- what a failed import leaves open -----------------------------------------------------------------

_OF_THE_PLATFORM: Final = re.compile(
    r"KUBERNETES_|(INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|NOTIFY_SOCKET|MAINPID|MANAGERPID)\Z"
    r"|WATCHDOG_|LISTEN_(FDS|PID)|SSH_|DBUS_|XDG_(SESSION|RUNTIME|SEAT|VTNR)"
    r"|(MAIL|COLORTERM|DISPLAY|TMUX|EDITOR|PAGER|container|GPG_KEY)\Z"
    r"|(HF|HUGGING_FACE_HUB|HUGGINGFACEHUB_API)_TOKEN\Z|AWS_"
)
"""Variables that a platform, a session or an image sets, and what models are fetched with: no import reads them."""
_OF_THE_LOADER: Final = ("LD_",)
"""How the variables begin that tell the dynamic loader what to load and where to look (LD_PRELOAD)."""
_DEVICES_TEXT: Final = re.compile(
    r"\bGPUs?\b|CUDA[ _]?VISIBLE[ _]?DEVICES|CUDA[ -](capable )?devices?\b|[Ii]nvalid device|\bno devices?\b"
    r"|device[ _](count|id|index|ordinal|properties|capability)\b|[Nn]o NVIDIA driver|NVIDIA driver on your system"
    r"|driver version is insufficient|CUDA (driver|runtime|error)|\bcuInit\b|\bcudaError|\bCUDA_ERROR_"
    r"|compute capability"
    # What int() says of the first word of an empty list of devices.
    r"|invalid literal for int\(\) with base 10: ''"
)
"""What an exception of any type says where code looks for a GPU and finds none."""
_DEVICES_PLACE: Final = re.compile(
    r"(torch/cuda|torch/_C|cuda/bindings|cuda/core|cupy|pycuda|triton/backends/nvidia|triton/runtime)\b"
)
_OF_THE_CODE: Final = frozenset({"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"})
"""Exceptions that come from what is installed, wherever a GPU is."""


def variables_missed(evidence: ImportEvidence) -> tuple[str, ...]:
    """Name the server's variables that the import had not and that the imported code may well read."""
    return tuple(name for name in evidence.withheld if _OF_THE_PLATFORM.match(name) is None)


def variable_named(evidence: ImportEvidence, text: str) -> bool:
    """Whether a failure's text names a variable of the server that the import had not, whatever that is for."""
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in evidence.withheld)


def loader_told_less(evidence: ImportEvidence) -> bool:
    """Whether the server's dynamic loader is told what the import's was not."""
    return any(name.startswith(_OF_THE_LOADER) for name in evidence.withheld)


def devices_missed(evidence: ImportEvidence) -> bool:
    """Whether a failure can come from the GPUs being hidden: it speaks of them, or was raised where they are used."""
    if evidence.devices_hidden is False or load_error(evidence.message) is not None:
        return False
    said = said_by(evidence)
    if evidence.exception in _OF_THE_CODE:
        # Such an exception may be raised from another one that speaks of GPUs.
        inner = said.removeprefix(evidence.message)
        return evidence.exception == "ImportError" and bool(_DEVICES_TEXT.search(inner))
    return bool(_DEVICES_TEXT.search(said)) or bool(
        _DEVICES_PLACE.match(evidence.where or "") and evidence.exception not in {"AttributeError", "NameError"}
    )


# -- what the system said -----------------------------------------------------------------------------

_ERRNO_TEXT: Final = re.compile(r"\[Errno (\d{1,4})\]")
_SHORT: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
_SHORT_TEXT: Final = re.compile(
    r"No space left on device|Disk quota exceeded|Too many open files|Cannot allocate memory|can't start new thread"
)
INTERPRETER_UNUSABLE: Final = "interpreter-unusable"
SGLANG_NOT_INSTALLED: Final = "sglang-not-installed"
ENDS_EVERY_LAUNCH: Final = (INTERPRETER_UNUSABLE, SGLANG_NOT_INSTALLED)
"""Codes under which it is moot what else is wrong with the packages of an interpreter: it is the wrong one."""
DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
"""Error numbers of a right that is missing."""
PLACES: Final[Mapping[int, tuple[str, str]]] = {
    errno.ENOENT: ("is not there", "see that the file or folder that the exception names is there and can be used"),
    errno.ENOTDIR: ("is no folder", "see that the file or folder that the exception names is what it should be"),
    errno.EISDIR: ("is a folder", "see that the file or folder that the exception names is what it should be"),
    errno.ELOOP: ("is a link that leads to itself", "correct the links of what the exception names"),
    errno.EROFS: (
        "is on a read-only file system",
        "mount that file system writable, or name a writable folder in HOME, TMPDIR or FLASHINFER_WORKSPACE_BASE",
    ),
    errno.EIO: (
        "cannot be read from or written to the medium (I/O error)",
        "look at the kernel's log and the health of the disk or of the network file system",
    ),
    errno.ESTALE: (
        "is on a network file system that no longer knows it",
        "mount the network file system again, and start the server anew",
    ),
}
"""Error number -> (what it says of the file or folder that an exception names, what to do about it)."""


def as_sentence(text: str) -> str:
    """End a text with a full stop, where nothing ends it yet."""
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def as_remedy(words: str) -> str:
    """Write what is to be done, and is no command, as a sentence of its own."""
    return as_sentence(words[:1].upper() + words[1:])


def said_by(evidence: ImportEvidence) -> str:
    """All that an import's exceptions say, in one text."""
    inner = (link.message for link in evidence.chain[1:])
    return " ".join((evidence.message, evidence.cause or "", *inner))


def error_number(evidence: ImportEvidence) -> int | None:
    """Give the system's error number behind a failure, also of an exception that only quotes one."""
    if evidence.errno is not None:
        return evidence.errno
    match = _ERRNO_TEXT.search(said_by(evidence))
    return None if match is None or evidence.exception in _OF_THE_CODE else int(match[1])


def ran_short(evidence: ImportEvidence) -> bool:
    """Whether there was too little of something where an import ran: no fault of what is installed."""
    said = said_by(evidence)
    error = load_error(said)
    scarce = error is not None and error.fault is LoadFault.SHORTAGE
    return evidence.errno in _SHORT or scarce or _SHORT_TEXT.search(said) is not None


# -- what reading leaves open, and why there was no import ----------------------------------------------

_KNOWN_START_CODE: Final = ("_virtualenv.pth", "-nspkg.pth")
"""How the names end of what has a known effect on what is found: releases of virtualenv and uv patch distutils with
the one, setuptools declares a namespace (google, mpl_toolkits) with the other."""


def start_code(environment: EnvironmentFacts) -> tuple[str, ...]:
    """Name the .pth files whose code can make modules and distributions importable that no reading finds."""
    return tuple(name for name in environment.path_code if not name.endswith(_KNOWN_START_CODE))


_NO_ANSWER: Final[Mapping[str, str]] = {
    "killed": "The importing process was killed from outside.",
    "memory-error": "The import raised MemoryError where memory was not short.",
    "no-answer": "The importing process ended without an answer, and with exit code 0.",
    "rlimit": "The importing process met a limit that the agent's processes are under.",
    INTERPRETER_BROKEN: "The server's interpreter does not start.",
    "flood": "The importing process sent more than any import has to say.",
}


def broken_start(evidence: ImportEvidence) -> str | None:
    """Say which file ends an interpreter that does not start, and how, or what it printed last; None: not known."""
    if evidence.where and evidence.cause:
        return f"{evidence.where} {evidence.cause}"
    return evidence.message or None


def no_import(evidence: ImportEvidence | None) -> str:
    """Say in one sentence why an import that was to be run tells nothing; empty where nothing is known of it."""
    if evidence is None or evidence.outcome is not ImportOutcome.NOT_ALLOWED:
        return ""
    if evidence.reason == INTERPRETER_BROKEN and (how := broken_start(evidence)) is not None:
        return f"The server's interpreter does not start: {how}."
    return _NO_ANSWER.get(evidence.reason or "", f"An import may not be run from here ({evidence.reason}).")


class ModuleSection(Struct, frozen=True, kw_only=True):
    """A module of the server's environment.

    ``importable``: null while unknown. ``verified``: by a real import. ``evidence``: how the last import ended, or
    files, pending or not-allowed. ``why``: token behind not-allowed. ``stage``: the last one that the import
    reached. ``code``: the condition that names the cause. ``devices_hidden``: the import ran with the GPUs hidden.
    ``libraries``: shared libraries that were loaded for themselves, with what the loader said of those that failed.
    ``by_files``: what reading alone says (importable, unknown, or a condition and its reason). ``disagreement``: one
    sentence where a real import showed something else; the import has the last word.
    """

    importable: bool | None
    verified: bool
    evidence: str
    why: str | None
    seconds: float | None
    version: str | None
    stage: str | None
    scope: str
    code: str | None
    reason: str | None
    names: tuple[str, ...]
    variables: Mapping[str, str] | None
    variables_missing: str | None
    peak_memory_bytes: int | None
    cuda_initialized: bool | None
    devices_hidden: bool | None
    libraries: Mapping[str, str | None]
    by_files: str | None
    disagreement: str | None


MODULE_SECTIONS: Final[Mapping[str, Any]] = {"modules": dict[str, ModuleSection]}
"""The report's key; a probe that judges modules declares it, and each contributes its own modules."""


def module_samples(
    module: str, *, importable: bool | None, verified: bool, evidence: ImportEvidence | None
) -> Iterable[Sample]:
    """Tell of a module by the best evidence; nothing while unknown."""
    if importable is not None:
        yield Sample("module_importable", (module,), float(importable))
        yield Sample("module_import_verified", (module,), float(verified))
    ended = evidence is not None and evidence.outcome in {ImportOutcome.OK, ImportOutcome.FAILED}
    if evidence is not None and evidence.seconds is not None and ended:
        yield Sample("module_import_duration_seconds", (module,), evidence.seconds)


def module_section(
    *,
    importable: bool | None,
    verified: bool,
    evidence: ImportEvidence | None,
    pending: bool,
    scope: Scope,
    version: str | None = None,
    code: str | None = None,
    reason: str | None = None,
    variables: Mapping[str, str] | None = None,
    variables_missing: str | None = None,
    by_files: str | None = None,
    disagreement: str | None = None,
) -> ModuleSection:
    """Give a module's entry. ``pending``: its import is under way or waiting for its turn."""
    how = "pending" if pending else "files"
    return ModuleSection(
        importable=importable,
        verified=verified,
        evidence=evidence.outcome.value if evidence is not None else how,
        why=evidence.reason if evidence is not None else None,
        seconds=evidence.seconds if evidence is not None else None,
        version=version,
        stage=evidence.stage if evidence is not None else None,
        scope=scope.value,
        code=code,
        reason=reason,
        names=evidence.names if evidence is not None else (),
        variables=variables,
        variables_missing=variables_missing,
        peak_memory_bytes=evidence.max_rss_bytes if evidence is not None else None,
        cuda_initialized=evidence.cuda_initialized if evidence is not None else None,
        devices_hidden=evidence.devices_hidden if evidence is not None else None,
        libraries={one.path: one.error for one in evidence.loads} if evidence is not None else {},
        by_files=by_files,
        disagreement=disagreement,
    )
