"""Processes that a child leaves behind: adopted, told from others, and ended.

A kill of the child's group misses whoever took a session of its own and lost its parent. As a child subreaper this
process gets them all, and with them what is none of its business: as the first process of a container the agent is
the parent of whatever is orphaned there. What a child started is known by what it cannot all get rid of: a variable
in its environment, and limits that the launcher lowered and that nobody without a capability can raise again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Final

import psutil

VARIABLE: Final = "SGLANG_SIDECAR_CHILD_OF"
"""The variable by which descendants of a child are recognised."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIMITS: Final = {"Max core file size": resource.RLIMIT_CORE, "Max msgqueue size": resource.RLIMIT_MSGQUEUE}
"""The limits of `limits`, as the kernel calls them in /proc."""


def limits() -> dict[int, int]:
    """What the launcher limits a child to, by resource.

    1 byte of core file, not 0: with 0 the kernel still hands a core to a program that collects them (fs/coredump.c).
    One byte less for message queues, which nobody notices: where core files are as limited for this process itself,
    it is that by which a child is known.
    """
    core, queues = (_hard(kind) for kind in _LIMITS.values())
    return {
        resource.RLIMIT_CORE: 1 if core == resource.RLIM_INFINITY else min(core, 1),
        resource.RLIMIT_MSGQUEUE: 1 << 40 if queues == resource.RLIM_INFINITY else max(queues - 1, 0),
    }


def adopt(wanted: bool) -> None:
    """Become the parent of orphaned descendants, or no longer."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


class Orphans:
    """What the children of one owner leave behind. Each child has a mark of its own, `mark`."""

    def __init__(self) -> None:
        self._owner = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._count = 0

    def mark(self) -> str:
        """The value of `VARIABLE` for a new child."""
        self._count += 1
        return f"{self._owner}.{self._count}"

    def sweep(self, known: Collection[int], running: Collection[str], *, unmarked: bool) -> bool:
        """End and reap what belongs to no running child; say whether there was any.

        ``known`` are the numbers of the owner's own children, ``running`` the marks of those that may still need
        what they started. ``unmarked``: those count as well that are without a mark, so that nobody can tell whose
        they are.
        """
        found = False
        for pid in _children():
            if pid in known:
                continue
            mark = _mark_of(pid)
            if mark is None:
                if not _was_launched(pid):
                    continue
                # A dead one has no environment any more, and is in nobody's use.
                ours = unmarked or _is_dead(pid)
            else:
                ours = mark.startswith(f"{self._owner}.") and mark not in running
            if ours:
                found = True
                _end(pid)
        return found


def _children() -> list[int]:
    """Children of every thread of this process; orphans come to whichever thread the kernel chooses.

    A kernel without CONFIG_PROC_CHILDREN names none.
    """
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _mark_of(pid: int) -> str | None:
    """A process's mark; None without one, and where its environment may not be read."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = f"{VARIABLE}=".encode()
    return next((os.fsdecode(one.removeprefix(name)) for one in variables if one.startswith(name)), None)


def _was_launched(pid: int) -> bool:
    """Whether a process descends from a launcher's child, by its limits."""
    try:
        text = Path(f"/proc/{pid}/limits").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    marks = {kind: most for kind, most in limits().items() if most != _hard(kind)}
    # The name is words, the soft and the hard limit are one each, and so is the unit.
    hard = {
        kind: line.removeprefix(name).split()[1]
        for line in text.splitlines()
        for name, kind in _LIMITS.items()
        if line.startswith(name)
    }
    return any(hard.get(kind) == str(most) for kind, most in marks.items())


def _hard(kind: int) -> int:
    return resource.getrlimit(kind)[1]


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
