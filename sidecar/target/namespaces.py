"""What a process shares with the agent: its network, and the files that it runs on."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from sidecar import procfs
from sidecar.procfs import Denial


class Files(Struct, frozen=True, kw_only=True):
    """The files that a process runs on: whether they are the very ones that we see, and ``why`` that is said.

    ``root`` is its root when that is another and may be entered.
    """

    ours: bool = False
    root: str | None = None
    why: str


def shares(proc: Path, pid: int, namespace: str) -> bool | None:
    """Whether a process is in the agent's own namespace of that kind; None when that may not be read."""
    theirs = procfs.read_link(proc / str(pid) / "ns" / namespace)
    ours = procfs.read_link(proc / "self" / "ns" / namespace)
    return None if theirs is None or ours is None else theirs == ours


def files_of(proc: Path, pid: int) -> Files:
    """The files that a process runs on, told from its namespaces and the text of its root's link."""
    folder = proc / str(pid)
    same = shares(proc, pid, "mnt")
    if same is None:
        return Files(why=f"its namespaces may not be read: {_why_denied(proc, pid, 'ns/mnt')}")
    changed_root = (procfs.read_link(folder / "root") or "/") != "/"
    if same and not changed_root:
        if shares(proc, pid, "pid") is False:
            return Files(why="it shares our files but not our process namespace")
        return Files(ours=True, why="it runs in our own mount and process namespaces")
    # Not entered here: whatever lies behind it may block for as long as its server pleases.
    if procfs.read_link(folder / "root") is None:
        why = _why_denied(proc, pid, "root")
        return Files(why=f"its files are others than ours and may not be read: {why}")
    return Files(root=str(folder / "root"), why="its own files are read through its root")


def _why_denied(proc: Path, pid: int, field: str) -> str:
    """Why a link of a process may not be read, and what would allow it."""
    try:
        (proc / str(pid) / field).readlink()
    except OSError as error:
        reason = procfs.denial(proc, pid, field, error)
    else:
        reason = Denial.UNREADABLE  # it could not be read a moment ago
    # The remedy is a sentence of its own and this one goes on behind it.
    return f"{reason.sentence}. {reason.remedy}".strip().rstrip(".")
