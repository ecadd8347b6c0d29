"""The server's processes: which roles run, what they hold, and which files they have loaded.

Everything here reads ``/proc``; each read has its own fallback and its own reason, since a sidecar may be allowed
some and not others.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from sidecar import procfs
from sidecar.model import Clock, Target
from sidecar.offload import in_daemon_thread
from sidecar.procfs import ProcessStat

_KEEP_SECONDS: Final = 5.0
"""How long a reading is reused: the probes of one round share it."""
_PATIENCE_SECONDS: Final = 1.5
"""How long a caller waits for a reading: much less than a probe's deadline, so that one process that blocks its
readers (in uninterruptible sleep, or with its memory map locked) costs what is read here and no more."""
_MAPS_LIMIT: Final = 4 * 1024 * 1024
"""Bytes of a process's maps. A real server maps about 1500 objects in 200 kB; what is larger is cut, not refused."""
_PROCESS_LIMIT: Final = 512
"""Processes of one server: eight GPUs make about a dozen; compilers that it starts may add some."""
_REPLACED_LIMIT: Final = 20
"""Replaced files that are named: enough to see which packages they belong to."""
_NAME_LIMIT: Final = 160
"""Characters of a file name that is shown."""
_START_TOLERANCE: Final = 5.0
"""Seconds by which two readings of one process's start may differ: the kernel rounds the time of boot."""


class Role(StrEnum):
    """What a process of a server does, by the title that SGLang gives it."""

    MAIN = "main"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    TOKENIZER_WORKER = "tokenizer-worker"
    DATA_PARALLEL_CONTROLLER = "data-parallel-controller"
    OTHER = "other"


_TITLES: Final = (
    ("sglang::scheduler", Role.SCHEDULER),
    ("sgl_diffusion::scheduler", Role.SCHEDULER),
    # The router in front of several detokenizers counts as one of them.
    ("sglang::detokenizer", Role.DETOKENIZER),
    ("sglang::tokenizer_worker", Role.TOKENIZER_WORKER),
    ("sglang::data_parallel_controller", Role.DATA_PARALLEL_CONTROLLER),
)
_SHORT_NAME: Final = 15
"""Characters that the kernel keeps of a process's name."""

_OBJECTS: Final = re.compile(
    r"(?:flash_ops|flashmla_ops|common_ops|flash_attn_2_cuda|_?(?:sgl_)?flash_attn_?3)[\w.-]*\.so"
    r"|lib(?:cute_dsl|cuda_dialect|mlir_cuda)_runtime\.so|libtorch_cuda\.so|libcuda\.so(?:\.[0-9.]+)?",
    re.ASCII,
)
"""Base names of the mapped objects that are kept: what FlashAttention, the kernel wheel and CUDA load."""
_FOLDER_OF_BUILD: Final = re.compile(r"sm[0-9]{2,3}[a-z]?", re.ASCII)
"""The folder of the kernel wheel that holds a build for one architecture; kept in front of the base name."""
_PACKAGES: Final = re.compile(r"(?P<folder>/.*/(?:site|dist)-packages)/(?P<file>[^/].*)")
_LIBRARY: Final = re.compile(r"\.so(?:\.[0-9.]+)?$|/\.nfs[0-9a-fA-F]+$", re.ASCII)
"""Shared objects; a network file system keeps a deleted one under such a name while it is mapped."""
_OWN_PACKAGES: Final = ("torch", "sgl_kernel", "flashinfer")
"""Packages whose mapped objects tell which environment a server runs in."""
_DELETED: Final = " (deleted)"
_LINE: Final = re.compile(
    r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ (?P<major>[0-9a-f]{1,8}):(?P<minor>[0-9a-f]{1,8}) (?P<inode>[0-9]{1,20})"
    r" +(?P<path>/.*)$"
)
_LINKS: Final = ("exe", "root", "cwd")
"""Links of the main process that finding its environment needs."""


class ServerProcess(Struct, frozen=True, kw_only=True):
    """One process.

    ``resident`` is in bytes; memory that processes share counts in each. ``mapped`` holds base names of the objects
    of interest that it has mapped, ``common_ops`` with the folder of its build in front where it has one
    (``sm90/common_ops.abi3.so``); None where its maps may not be read or were not (role other). ``denied`` maps what
    may not be read to the reason's token (`procfs.Denial`).
    """

    pid: int
    role: Role
    zombie: bool = False
    resident: int | None = None
    started_at: float | None = None
    mapped: frozenset[str] | None = None
    denied: Mapping[str, str] = field(default_factory=dict)


class ServerProcesses(Struct, frozen=True, kw_only=True):
    """The processes of the server that was found, its main one first.

    ``replaced`` lists mapped objects of installed packages whose file was deleted or replaced since, relative to
    their site-packages; None where no process's maps could be read. ``site_folders`` are the site-packages from which
    torch and the kernels were mapped, as the server names them; None likewise. ``problem`` is a token where nothing
    was read: ``timeout`` (a process blocks its readers) or ``no-thread`` (the agent may start none). ``cut`` says
    that there were more processes than are listed.
    """

    processes: tuple[ServerProcess, ...] = ()
    replaced: tuple[str, ...] | None = None
    site_folders: tuple[str, ...] | None = None
    problem: str | None = None
    cut: bool = False

    def of(self, role: Role) -> tuple[ServerProcess, ...]:
        """The living processes of a role."""
        return tuple(one for one in self.processes if one.role is role and not one.zombie)

    def zombies(self, role: Role) -> tuple[ServerProcess, ...]:
        """The processes of a role that have ended and were not collected by their parent."""
        return tuple(one for one in self.processes if one.role is role and one.zombie)


def role_of(argv: tuple[str, ...], name: str) -> Role:
    """The role of a child of the server by its title, or by its short name where a zombie has no title any more."""
    title = argv[0] if argv else ""
    for prefix, role in _TITLES:
        if title.startswith(prefix) or (not title and name == prefix[:_SHORT_NAME]):
            return role
    return Role.OTHER


# -- maps ---------------------------------------------------------------------------------------------


class _Object(NamedTuple):
    """A mapped file: the path without the kernel's mark, whether it is deleted, and its identity."""

    path: str
    deleted: bool
    device: int
    inode: int


def _objects(maps: str) -> Iterable[_Object]:
    """Each mapped file once."""
    seen: set[str] = set()
    # Not splitlines: a file name may hold other characters that end a line for it, the kernel escapes newlines alone.
    for line in maps.split("\n"):
        # Each library has four lines or more: what was seen costs no match.
        path = line[line.find("/") :] if "/" in line else ""
        if path in seen or not (".so" in path or "/.nfs" in path):
            continue
        seen.add(path)
        match = _LINE.match(line)
        if match is None:
            continue
        yield _Object(
            path=match["path"].removesuffix(_DELETED),
            deleted=match["path"].endswith(_DELETED),
            device=os.makedev(int(match["major"], 16) & 0xFFF, int(match["minor"], 16) & 0xFFFFF),
            inode=int(match["inode"]),
        )


def _interesting(path: str) -> str | None:
    """The name under which a mapped object is kept, or None for one of no interest."""
    folder, _, name = path.rpartition("/")
    if _OBJECTS.fullmatch(name) is None:
        return None
    build = folder.rpartition("/")[2]
    return f"{build}/{name}" if name.startswith("common_ops") and _FOLDER_OF_BUILD.fullmatch(build) else name


def _installed(path: str) -> tuple[str, str] | None:
    """(site-packages, file in it) of a shared object of an installed package; None for other files.

    Libraries elsewhere are left out: compilers at run time map objects that they delete on purpose.
    """
    match = _PACKAGES.fullmatch(path)
    return (match["folder"], match["file"]) if match is not None and _LIBRARY.search(path) else None


def _replaced(found: _Object, *, same_files: bool) -> bool:
    """Whether the file that is mapped is not the one that lies there now."""
    if found.deleted or found.path.rpartition("/")[2].startswith(".nfs"):
        return True
    if not same_files:
        # Below another root a path may block for as long as its server pleases, or lead out of that root.
        return False
    try:
        status = os.stat(found.path)  # noqa: PTH116 - hundreds of them
    except (OSError, ValueError):
        # Unreadable, or gone behind a mount: the kernel would have marked a deleted one.
        return False
    # On overlay and btrfs the two devices differ for one and the same file: then inodes cannot be compared.
    return status.st_dev == found.device and status.st_ino != found.inode


def _shown(name: str) -> str:
    """A file name as it may be shown: a program chooses the names of its own files."""
    return "".join(char if char.isprintable() else "?" for char in name)[:_NAME_LIMIT]


# -- the reader ---------------------------------------------------------------------------------------


class _Loaded(Struct):
    """What all processes together have mapped of installed packages. Filled while they are read."""

    replaced: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    readable: bool = False
    known: dict[_Object, str | None] = field(default_factory=dict)
    """What was looked at, and the name under which it is kept."""

    def add(self, found: _Object, *, same_files: bool) -> None:
        """Look at one more object."""
        if (installed := _installed(found.path)) is None:
            return
        folder, file = installed
        if file.partition("/")[0] in _OWN_PACKAGES:
            self.folders.add(_shown(folder))
        if _replaced(found, same_files=same_files):
            self.replaced.add(_shown(file))


class ProcessReader:
    """Reads them for a target; one reading serves every probe of a round. One per agent."""

    def __init__(self, clock: Clock, *, proc: Path = Path("/proc"), patience: float = _PATIENCE_SECONDS) -> None:
        self._clock = clock
        self.proc = proc
        self._patience = patience
        self._latest: tuple[tuple[int, float | None], float, ServerProcesses | None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def read(self, target: Target) -> ServerProcesses | None:
        """The processes below the target's main one; None where there is no process to see.

        Never raises. One reading at a time: while one is blocked, callers get `ServerProcesses.problem`.
        """
        if target.pid is None:
            return None
        key = (target.pid, target.create_time)
        if (kept := self._kept(key)) is not None:
            return kept[0]
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read(target, key))
        await asyncio.wait({self._reading}, timeout=self._patience)
        # Where the reading was of another process, this one's turn comes in the next round.
        kept = self._kept(key)
        return ServerProcesses(problem="timeout") if kept is None else kept[0]

    def _kept(self, key: tuple[int, float | None]) -> tuple[ServerProcesses | None] | None:
        if self._latest is None or self._latest[0] != key:
            return None
        return None if self._clock.monotonic() - self._latest[1] >= _KEEP_SECONDS else (self._latest[2],)

    async def _read(self, target: Target, key: tuple[int, float | None]) -> None:
        try:
            found = await in_daemon_thread(lambda: self._look(key[0], target.create_time))
        except RuntimeError:
            # No thread can be started: the agent's container is at its limit of processes.
            found = ServerProcesses(problem="no-thread")
        self._latest = (key, self._clock.monotonic(), found)

    # -- in a thread of its own

    def _look(self, main: int, create_time: float | None) -> ServerProcesses | None:
        stats = {pid: stat for pid in procfs.pids(self.proc) if (stat := procfs.process_stat(self.proc, pid))}
        if main not in stats or not self._is_the_one(stats[main], create_time):
            return None
        members = [main, *sorted(_descendants(main, {pid: stat.parent for pid, stat in stats.items()}))]
        loaded = _Loaded()
        same_files = self._same_files(main)
        found = tuple(
            self._process(pid, stats[pid], loaded, main=pid == main, same_files=same_files)
            for pid in members[:_PROCESS_LIMIT]
        )
        return ServerProcesses(
            processes=found,
            replaced=tuple(sorted(loaded.replaced)[:_REPLACED_LIMIT]) if loaded.readable else None,
            site_folders=tuple(sorted(loaded.folders)) if loaded.readable else None,
            cut=len(members) > _PROCESS_LIMIT,
        )

    def _is_the_one(self, stat: ProcessStat, create_time: float | None) -> bool:
        """Whether the process is the one that was found, not a later one with its number."""
        started = procfs.start_time(self.proc, stat)
        return started is None or create_time is None or abs(started - create_time) <= _START_TOLERANCE

    def _same_files(self, pid: int) -> bool:
        """Whether a process names its files as the agent does: same mounts, same root."""
        mounts = [procfs.read_link(self.proc / member / "ns" / "mnt") for member in (str(pid), "self")]
        return (
            mounts[0] is not None and mounts[0] == mounts[1] and procfs.read_link(self.proc / str(pid) / "root") == "/"
        )

    def _process(self, pid: int, stat: ProcessStat, loaded: _Loaded, *, main: bool, same_files: bool) -> ServerProcess:
        role = Role.MAIN if main else role_of(procfs.command_line(self.proc, pid), stat.name)
        started_at = procfs.start_time(self.proc, stat)
        if stat.ended:
            return ServerProcess(pid=pid, role=role, zombie=True, started_at=started_at)
        status = procfs.process_status(self.proc, pid)
        process = ServerProcess(
            pid=pid, role=role, started_at=started_at, resident=None if status is None else status.resident
        )
        denied = self._denied(pid) if main else {}
        if role is Role.OTHER:
            # Compilers and helpers: what they map says nothing of what the server runs.
            return process
        try:
            maps = procfs.read_bytes(self.proc / str(pid) / "maps", _MAPS_LIMIT).decode("utf-8", "replace")
        except OSError as error:
            denied["maps"] = procfs.denial(self.proc, pid, "maps", error).value
            return replace(process, denied=denied)
        if not maps:
            # A process without memory: it is ending at this moment.
            return replace(process, denied={**denied, "maps": procfs.Denial.GONE.value})
        return replace(process, denied=denied, mapped=_mapped(maps, loaded, same_files=same_files))

    def _denied(self, pid: int) -> dict[str, str]:
        """What finding the server's environment and address needs and may not be read of its main process."""
        folder = self.proc / str(pid)
        denied: dict[str, str] = {}
        for name in (*_LINKS, "ns", "environ", "fd"):
            try:
                if name == "environ":
                    procfs.read_bytes(folder / name, 1)
                elif name == "fd":
                    # Root may list them without the right to see what they are.
                    for entry in os.listdir(folder / name)[:1]:  # noqa: PTH208 - a name is needed, no Path
                        (folder / name / entry).readlink()
                else:
                    (folder / ("ns/mnt" if name == "ns" else name)).readlink()
            except FileNotFoundError:
                continue  # a descriptor that was closed since it was listed, or a process that is ending
            except OSError as error:
                denied[name] = procfs.denial(self.proc, pid, name, error).value
        return denied


def _mapped(maps: str, loaded: _Loaded, *, same_files: bool) -> frozenset[str]:
    """The objects of interest in a process's maps; what it has mapped of installed packages goes to ``loaded``."""
    loaded.readable = True
    names: set[str] = set()
    for found in _objects(maps):
        # Every process maps the same files: one look serves all.
        if found not in loaded.known:
            loaded.known[found] = _interesting(found.path)
            loaded.add(found, same_files=same_files)
        if (name := loaded.known[found]) is not None:
            names.add(name)
    return frozenset(names)


def _descendants(main: int, parents: Mapping[int, int]) -> set[int]:
    """Every process that the main one started, directly or not. A loop, which only a race can make, ends."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [main]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid != main and pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found
