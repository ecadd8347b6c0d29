"""Where the agent itself stands: in a container or on a host, and whether it can see the server's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sidecar import procfs
from sidecar.config import Settings
from sidecar.model import Placement, Processes, Standing

_INIT_SHIMS: Final = frozenset({"tini", "tini-static", "dumb-init", "catatonit", "docker-init", "s6-svscan"})
_POD_INIT: Final = "pause"
"""Process 1 of a pod whose containers share their processes."""
_KERNEL_THREADS: Final = "kthreadd"
"""Process 2 wherever the process namespace is the machine's own, in a pod with hostPID too."""
_CONTAINER_CGROUP: Final = re.compile(r"kubepods|docker|containerd|libpod")


def stand(
    settings: Settings,
    *,
    proc: Path = Path("/proc"),
    environ: Mapping[str, str] = os.environ,
    filesystem: Path = Path("/"),
    pid: int | None = None,
    parent: int | None = None,
) -> Standing:
    """Decide where the agent itself runs and whether it can see the server's processes.

    ``pid`` and ``parent`` are the agent's own, looked up when left out. Never raises; what cannot be read
    counts as absent.
    """
    if settings.placement is not None:
        placement, placement_why = settings.placement, "placement is set in the configuration"
    else:
        placement, placement_why = _placement(proc, environ, filesystem)
    if settings.processes is not None:
        return Standing(
            placement=placement,
            placement_why=placement_why,
            processes=settings.processes,
            processes_why="processes is set in the configuration",
        )
    processes, processes_why = _processes(
        placement,
        proc,
        environ,
        os.getpid() if pid is None else pid,
        os.getppid() if parent is None else parent,
    )
    return Standing(placement=placement, placement_why=placement_why, processes=processes, processes_why=processes_why)


def _placement(proc: Path, environ: Mapping[str, str], filesystem: Path) -> tuple[Placement, str]:
    for marker in (".dockerenv", "run/.containerenv"):
        if _exists(filesystem / marker):
            return Placement.CONTAINER, f"/{marker} exists"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return Placement.CONTAINER, "KUBERNETES_SERVICE_HOST is set"
    for member in ("self", "1"):
        match = _CONTAINER_CGROUP.search(procfs.read_text(proc / member / "cgroup") or "")
        if match:
            return Placement.CONTAINER, f"the control group of process {member} names {match.group()}"
    return Placement.HOST, "no sign of a container was found"


def _processes(
    placement: Placement, proc: Path, environ: Mapping[str, str], pid: int, parent: int
) -> tuple[Processes, str]:
    """Whether a server that runs would be seen. Hidden where in doubt: then its absence proves nothing."""
    if placement is Placement.HOST:
        return Processes.SHARED, "on a host every process can be seen"
    if pid == 1:
        return Processes.HIDDEN, "this process is number 1 of its container: it shares no process namespace"
    if procfs.command_name(proc, 2) == _KERNEL_THREADS:
        return Processes.SHARED, "the kernel's own threads can be seen, and so every process of the machine"
    name = procfs.command_name(proc, 1)
    if name == _POD_INIT:
        return Processes.SHARED, "process 1 is pause, which holds the process namespace that a pod's containers share"
    if parent == 1 and name in _INIT_SHIMS:
        return Processes.HIDDEN, f"process 1 is {name}, which started this one: it shares no process namespace"
    if not _in_kubernetes(proc, environ):
        # In a pod the server has a container of its own; elsewhere it is started beside the agent, as on a machine.
        return Processes.SHARED, "this container shows no sign of Kubernetes: what runs in it can be seen"
    named = f"process 1 ({name or 'unreadable'})"
    if _reaches_first(proc, parent):
        return Processes.HIDDEN, f"{named} started this one: it is this container's own, other containers' are not seen"
    match _beside_first(proc):
        case True:
            return Processes.HIDDEN, f"{named} is in this container: other containers' processes are not seen"
        case False:
            return Processes.SHARED, f"{named} is in another container: the pod's containers share their processes"
        case None:
            return Processes.HIDDEN, f"it cannot be told whose {named} is: other containers' processes may not be seen"


def _in_kubernetes(proc: Path, environ: Mapping[str, str]) -> bool:
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    return any("kubepods" in (procfs.read_text(proc / member / "cgroup") or "") for member in ("self", "1"))


def _reaches_first(proc: Path, parent: int) -> bool:
    """Whether process 1 started the agent, directly or not. Whatever comes from outside has parent 0 instead."""
    seen: set[int] = set()
    while parent > 1 and parent not in seen:
        seen.add(parent)
        stat = procfs.process_stat(proc, parent)
        parent = stat.parent if stat is not None else 0
    return parent == 1


def _beside_first(proc: Path) -> bool | None:
    """Whether process 1 is in the agent's own container, by its files or else its control group; None: not told."""
    first, ours = (procfs.read_link(proc / member / "ns" / "mnt") for member in ("1", "self"))
    if first is None or ours is None:
        first, ours = (procfs.read_text(proc / member / "cgroup") for member in ("1", "self"))
    return first == ours if first and ours else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
