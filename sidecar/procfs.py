"""Reading other processes in ``/proc``: bounded, never raising, and with the reason where a read is refused.

The kernel refuses by several rules at once (user, group, capabilities, a security module), and says only "permission
denied". Which rule it was decides what an operator has to change, so it is worked out here from both processes'
``status``. The rules are those of ``ptrace_may_access`` in kernel/ptrace.c for reading.
"""

from __future__ import annotations

import errno
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

_TEXT_LIMIT: Final = 65536
"""Bytes of a ``status`` or a control group file; real ones are below 10 kB."""
_CMDLINE_LIMIT: Final = 256 * 1024
_ENVIRON_LIMIT: Final = 1024 * 1024

_DAC_OVERRIDE: Final = 1
_DAC_READ_SEARCH: Final = 2
_SYS_MODULE: Final = 16
_SYS_PTRACE: Final = 19
_OWNER_ONLY: Final = frozenset({"environ", "fd", "io"})
"""What only the owner may open by its mode; the right to trace a process does not help there."""
_UNCONFINED_TYPES: Final = frozenset({"unconfined_t", "unconfined_service_t", "spc_t", "initrc_t", "kernel_t"})
_INITIAL_NAMESPACE: Final = ["0", "0", "4294967295"]

TITLES: Final = ("sglang::", "sgl_diffusion::")
"""What the command line of a process starts with that SGLang renamed."""


class Denial(StrEnum):
    """Why something of a process cannot be read."""

    OTHER_USER = "other-user"
    OTHER_GROUP = "other-group"
    NO_SYS_PTRACE = "no-sys-ptrace"
    SYS_PTRACE_NOT_EFFECTIVE = "sys-ptrace-not-effective"
    OWNER_ONLY = "owner-only"
    USER_NAMESPACE = "user-namespace"
    SECURITY_MODULE = "security-module"
    NOT_DUMPABLE = "not-dumpable"
    PERMISSION_DENIED = "permission-denied"
    ZOMBIE = "zombie"
    GONE = "gone"
    UNREADABLE = "unreadable"

    @property
    def sentence(self) -> str:
        """What it means."""
        return _SENTENCES[self][0]

    @property
    def remedy(self) -> str:
        """What would allow the read; empty where nothing can."""
        return _SENTENCES[self][1]


_SERVERS_USER: Final = "Run the agent with the server's own user and group (runAsUser, runAsGroup)"
_SENTENCES: Final = {
    Denial.OTHER_USER: (
        "the server runs as another user than the agent",
        f"{_SERVERS_USER}, or as uid 0 with the capability SYS_PTRACE.",
    ),
    Denial.OTHER_GROUP: (
        "the server runs as the agent's user, but with another group",
        "Give the agent the server's group (runAsGroup).",
    ),
    Denial.NO_SYS_PTRACE: (
        "the agent lacks the capability SYS_PTRACE, and the server has rights or a user that it has not",
        "Add it (securityContext.capabilities.add: [SYS_PTRACE]), or run the agent as the server's user.",
    ),
    Denial.SYS_PTRACE_NOT_EFFECTIVE: (
        "SYS_PTRACE was granted to the container, but a process that is not root does not get it",
        f"{_SERVERS_USER}, or as uid 0: Kubernetes makes an added capability effective for uid 0 only.",
    ),
    Denial.OWNER_ONLY: (
        "only the server's user may open it; SYS_PTRACE alone does not help",
        f"{_SERVERS_USER}, or as uid 0 with the capability DAC_READ_SEARCH.",
    ),
    Denial.USER_NAMESPACE: (
        "the agent's capabilities count in its own user namespace, and the server is in another one",
        "Run the agent in the server's user namespace, with the server's user.",
    ),
    Denial.SECURITY_MODULE: (
        "a security module (AppArmor or SELinux) confines the agent, and nothing else explains the refusal",
        "Give the agent the server's profile (appArmorProfile, seLinuxOptions); the node's log names the refusal.",
    ),
    Denial.NOT_DUMPABLE: (
        "the process has closed itself to others (it is not dumpable)",
        "Run the agent as uid 0 with the capability SYS_PTRACE.",
    ),
    Denial.PERMISSION_DENIED: (
        "the kernel refuses, and which of its rules it was cannot be told",
        f"{_SERVERS_USER}, or as uid 0 with the capability SYS_PTRACE.",
    ),
    Denial.ZOMBIE: ("the process has ended and waits to be collected by its parent", ""),
    Denial.GONE: ("the process has ended", ""),
    Denial.UNREADABLE: ("it cannot be read", ""),
}


# -- plain reading ------------------------------------------------------------------------------------


def read_bytes(path: Path, limit: int) -> bytes:
    """The start of a file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(limit)


def read_text(path: Path, limit: int = _TEXT_LIMIT) -> str | None:
    """The start of a file, or None when it cannot be read."""
    try:
        return read_bytes(path, limit).decode("utf-8", "replace")
    except OSError:
        return None


def read_link(path: Path) -> str | None:
    """Where a link leads, or None when it cannot be read."""
    try:
        return str(path.readlink())
    except (OSError, ValueError):
        return None


def pids(proc: Path) -> list[int]:
    """Every process that can be seen, in ascending order; empty where the folder cannot be read."""
    try:
        names = os.listdir(proc)  # noqa: PTH208 - names alone are needed; a Path for each of thousands costs more
    except OSError:
        return []
    # isdecimal is true of other scripts' digits too; the kernel writes ASCII ones.
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 11)


def command_name(proc: Path, pid: int) -> str:
    """A process's short name, cut to 15 characters by the kernel; empty when it cannot be read."""
    return (read_text(proc / str(pid) / "comm", 64) or "").strip()


def command_line(proc: Path, pid: int) -> tuple[str, ...]:
    """A process's command line, which may hold secrets; empty for a zombie or where it cannot be read.

    A renamed process has its title and padding there; the padding is dropped.
    """
    text = read_text(proc / str(pid) / "cmdline", _CMDLINE_LIMIT)
    if not text:
        return ()
    words = text.rstrip("\0").split("\0")
    return tuple(word.rstrip() for word in words) if words[0].startswith(TITLES) else tuple(words)


class ProcessStat(Struct, frozen=True, kw_only=True):
    """``stat`` of a process. ``name`` is cut to 15 characters; ``started_ticks`` counts clock ticks since boot."""

    name: str
    state: str
    parent: int
    started_ticks: int
    threads: int

    @property
    def ended(self) -> bool:
        """Whether it is a zombie. A first thread that ended while others run looks like one and is none."""
        return self.state in {"Z", "X", "x"} and self.threads <= 1


def process_stat(proc: Path, pid: int) -> ProcessStat | None:
    """A process's ``stat``, or None for a process that is gone."""
    text = read_text(proc / str(pid) / "stat", 4096)
    if text is None:
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    try:
        return ProcessStat(
            name=head.partition("(")[2],
            state=fields[0],
            parent=int(fields[1]),
            started_ticks=int(fields[19]),
            threads=int(fields[17]),
        )
    except (IndexError, ValueError):
        return None


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """``status`` of a process; None: not said.

    ``uids`` and ``gids`` are real, effective, saved and file system ids. ``resident`` is in bytes. The capabilities
    are bit sets.
    """

    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    resident: int | None = None
    permitted: int | None = None
    effective: int | None = None
    bounding: int | None = None


def process_status(proc: Path, pid: int | str) -> ProcessStatus | None:
    """A process's ``status``, or None for a process that is gone."""
    text = read_text(proc / str(pid) / "status")
    if text is None:
        return None
    fields = dict(re.findall(r"^(\w+):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    resident = re.fullmatch(r"([0-9]{1,15}) kB", fields.get("VmRSS", ""))
    return ProcessStatus(
        uids=_ids(fields.get("Uid", "")),
        gids=_ids(fields.get("Gid", "")),
        resident=int(resident.group(1)) * 1024 if resident else None,
        permitted=_bits(fields.get("CapPrm", "")),
        effective=_bits(fields.get("CapEff", "")),
        bounding=_bits(fields.get("CapBnd", "")),
    )


def _ids(text: str) -> tuple[int, ...]:
    words = text.split()
    return tuple(map(int, words)) if all(re.fullmatch(r"[0-9]{1,10}", word) for word in words) else ()


def _bits(text: str) -> int | None:
    return int(text, 16) if re.fullmatch(r"[0-9a-f]{1,16}", text) else None


def boot_time(proc: Path) -> float | None:
    """When the machine started, in seconds since the epoch as its clock counts now; None when it is not told.

    The kernel derives it anew from the present time: when the clock is set, it moves with it.
    """
    match = re.search(r"^btime ([0-9]{1,12})$", read_text(proc / "stat", 1024 * 1024) or "", re.MULTILINE)
    return float(match.group(1)) if match else None


def start_time(proc: Path, stat: ProcessStat) -> float | None:
    """When a process started, in seconds since the epoch; one second off at most while the clock is not set."""
    boot = boot_time(proc)
    return None if boot is None else boot + stat.started_ticks / os.sysconf("SC_CLK_TCK")


def environment(proc: Path, pid: int) -> tuple[dict[str, str] | None, str | None]:
    """(environment, None), or (None, the reason as a token)."""
    try:
        data = read_bytes(proc / str(pid) / "environ", _ENVIRON_LIMIT + 1)
    except OSError as error:
        return None, denial(proc, pid, "environ", error).value
    if len(data) > _ENVIRON_LIMIT:
        return None, "too-large"
    if data and not data.strip(b"\0"):
        # setproctitle writes over the memory that the kernel shows here; it reads back without an error.
        return None, "environ-overwritten"
    pairs = (item.partition("=") for item in data.decode("utf-8", "replace").split("\0"))
    return {name: value for name, separator, value in pairs if separator and name}, None


# -- refused reads ------------------------------------------------------------------------------------


def denial(proc: Path, pid: int, field: str, error: OSError) -> Denial:
    """Why a field of a process (a file's or link's name in its folder) could not be read. Never raises."""
    if not isinstance(error, PermissionError):
        stat = process_stat(proc, pid)
        if stat is not None and stat.ended:
            return Denial.ZOMBIE
        gone = error.errno in {errno.ENOENT, errno.ESRCH}
        return Denial.GONE if gone and stat is None else Denial.UNREADABLE
    ours, theirs = process_status(proc, "self"), process_status(proc, pid)
    if ours is None or theirs is None or ours.effective is None or len(ours.uids) < 4 or len(theirs.uids) < 3:
        return Denial.PERMISSION_DENIED
    if ours.effective >> _SYS_PTRACE & 1:
        return _although_tracer(proc, field, ours, theirs)
    return _without_capability(proc, ours, theirs)


def _although_tracer(proc: Path, field: str, ours: ProcessStatus, theirs: ProcessStatus) -> Denial:
    """Why a process that may trace others is refused."""
    reads_all = (ours.effective or 0) >> _DAC_OVERRIDE & 1 or (ours.effective or 0) >> _DAC_READ_SEARCH & 1
    if field in _OWNER_ONLY and ours.uids[3] != theirs.uids[1] and not reads_all:
        return Denial.OWNER_ONLY
    if (read_text(proc / "self" / "uid_map") or "").split() not in ([], _INITIAL_NAMESPACE):
        return Denial.USER_NAMESPACE
    return Denial.SECURITY_MODULE if _confined(proc) else Denial.PERMISSION_DENIED


def _without_capability(proc: Path, ours: ProcessStatus, theirs: ProcessStatus) -> Denial:
    """Why a process that may not trace others is refused, by the kernel's own order of checks."""
    if set(theirs.uids[:3]) != {ours.uids[3]}:
        bounding = ours.bounding or 0
        # A host's user has a full bounding set, which was granted by nobody.
        granted = bounding >> _SYS_PTRACE & 1 and not bounding >> _SYS_MODULE & 1
        if granted and ours.uids[3] != 0:
            return Denial.SYS_PTRACE_NOT_EFFECTIVE
        return Denial.NO_SYS_PTRACE if ours.uids[3] == 0 else Denial.OTHER_USER
    if len(ours.gids) > 3 and set(theirs.gids[:3]) != {ours.gids[3]}:
        return Denial.OTHER_GROUP
    if theirs.permitted is not None and ours.permitted is not None and theirs.permitted & ~ours.permitted:
        return Denial.NO_SYS_PTRACE
    return Denial.SECURITY_MODULE if _confined(proc) else Denial.NOT_DUMPABLE


def _confined(proc: Path) -> bool:
    """Whether a security module confines the agent, by the label that it gave it."""
    for name in ("attr/apparmor/current", "attr/current"):
        label = (read_text(proc / "self" / name, 4096) or "").strip(" \n\0")
        if not label:
            continue
        if label.count(":") >= 2:
            return label.split(":")[2] not in _UNCONFINED_TYPES
        return label != "unconfined" and not label.endswith("(complain)")
    return False
