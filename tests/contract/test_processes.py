"""The server's processes, its restart and its replaced files, with real processes in the real /proc."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import SystemClock
from sidecar.config import Settings
from sidecar.environment import EnvironmentFacts
from sidecar.model import Placement, Processes, Scope, Skip, Standing, Target
from sidecar.probes import server
from sidecar.processes import ProcessReader, Role, ServerProcesses
from sidecar.serverinfo import ServerClient
from sidecar.target import TargetFinder
from tests.fakes.sglang import FakeSglang, serve

LAUNCHER = """
import os, subprocess, sys
worker = '''
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
kept = [ctypes.CDLL(library) for library in sys.argv[2:]]
print("up", flush=True)
sys.stdin.read()
'''
children = []
libraries = [name for name in sys.argv[sys.argv.index("--libraries") + 1].split(",") if name]
for title, loads in (("sglang::scheduler_TP0", libraries), ("sglang::scheduler_TP1", []), ("sglang::detokenizer", [])):
    child = subprocess.Popen(
        [title, "-S", "-c", worker, title, *loads],
        executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    children.append(child)
print(os.getpid(), *(child.pid for child in children), flush=True)
sys.stdin.read()
"""
"""A stand-in for SGLang's launcher: children under its titles, of which nobody collects the ended ones."""


@dataclass
class Launch:
    """A running stand-in and its children's pids. ``starter`` holds its standard input open."""

    starter: subprocess.Popen[str]
    pid: int
    schedulers: list[int]
    detokenizer: int


@dataclass
class Launcher:
    """Starts stand-ins and ends them, children included."""

    folder: Path
    running: list[Launch] = field(default_factory=list)

    def start(self, *libraries: Path, flags: tuple[str, ...] = (), adopted: bool = True) -> Launch:
        """``adopted``: it loses its parent, since an agent takes none of its own children for a server."""
        module = self.folder / "sglang" / "launch_server.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(LAUNCHER)
        (module.parent / "__init__.py").touch()
        argv = [os.path.realpath(sys.executable), "-m", "sglang.launch_server", "--tp", "2", *flags]
        argv += ["--libraries", ",".join(map(str, libraries))]
        shell = ["sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh"] if adopted else []
        starter = subprocess.Popen(
            [*shell, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self.folder
        )
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        if adopted:
            starter.wait()
        self.running.append(Launch(starter, pids[0], pids[1:3], pids[3]))
        return self.running[-1]

    def stop(self, launch: Launch) -> None:
        self.running.remove(launch)
        # Its children end with the pipes that it holds.
        with contextlib.suppress(ProcessLookupError):
            os.kill(launch.pid, signal.SIGKILL)
        launch.starter.communicate()


@pytest.fixture(name="launcher")
def _launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for launch in list(launcher.running):
        launcher.stop(launch)


def standing() -> Standing:
    return Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why="")


def finder(**settings: Any) -> TargetFinder:
    return TargetFinder(Settings(**settings), standing(), SystemClock(), environ={})


async def read(launch: Launch) -> tuple[Target, ServerProcesses]:
    target = await finder(server_pid=launch.pid).find()
    found = await ProcessReader(SystemClock(), patience=30).read(target)
    assert found is not None
    return target, found


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what the kernel does in its own time."""
    for _ in range(200):
        if await look():
            return
        await asyncio.sleep(0.02)
    pytest.fail("it did not come about within four seconds")


@pytest.fixture(name="library")
def _library(tmp_path: Path) -> Path:
    """A small real shared object in a folder of installed packages."""
    modules = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})) / "lib-dynload"
    source = next(iter(sorted(modules.glob("_heapq*.so")) or sorted(modules.glob("*.so"))))
    copy = tmp_path / "lib/python3.12/site-packages/sgl_kernel/flash_ops.abi3.so"
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    return copy


async def test_a_real_tree_shows_its_roles_memory_and_libraries(launcher: Launcher, library: Path) -> None:
    """Titles, memory, start and loaded libraries of living processes are read as the kernel shows them."""
    before = time.time()
    launch = launcher.start(library)
    target, found = await read(launch)
    assert [(one.pid, one.role) for one in found.processes if one.role is not Role.OTHER] == [
        (launch.pid, Role.MAIN),
        *((pid, Role.SCHEDULER) for pid in launch.schedulers),
        (launch.detokenizer, Role.DETOKENIZER),
    ]
    assert (target.cwd, target.cwd_on_path) == (str(launcher.folder), True)
    assert [one.mapped for one in found.of(Role.SCHEDULER)] == [{"flash_ops.abi3.so"}, frozenset()]
    assert (found.replaced, found.site_folders) == ((), (str(library.parents[1]),))
    for one in found.processes:
        assert one.denied == {}
        assert one.resident is not None
        assert one.resident > 1024 * 1024
        assert one.started_at is not None
        assert before - 3 <= one.started_at <= time.time() + 3


async def test_a_worker_that_was_killed_is_a_zombie_of_its_role(launcher: Launcher) -> None:
    """A scheduler that died and was not collected by its parent is seen as that, though it has no title any more.

    sgl-project/sglang#18579, vllm-project/vllm#36960
    """
    launch = launcher.start()
    os.kill(launch.schedulers[0], signal.SIGKILL)

    async def ended() -> bool:
        _, found = await read(launch)
        return [one.pid for one in found.zombies(Role.SCHEDULER)] == launch.schedulers[:1]

    await until(ended)
    _, found = await read(launch)
    assert [one.pid for one in found.of(Role.SCHEDULER)] == launch.schedulers[1:]


@pytest.mark.parametrize("way", ["unlink", "rename", "reinstall"])
async def test_a_library_replaced_under_the_server_is_named(launcher: Launcher, library: Path, way: str) -> None:
    """Deleted, renamed over, or deleted and written anew as installers do: what is loaded is not what lies there."""
    launch = launcher.start(library)
    content = library.read_bytes()
    if way == "rename":
        (library.parent / "new.so").write_bytes(content)
        (library.parent / "new.so").rename(library)
    else:
        library.unlink()
        if way == "reinstall":
            library.write_bytes(content)
    _, found = await read(launch)
    assert found.replaced == ("sgl_kernel/flash_ops.abi3.so",)
    assert found.of(Role.SCHEDULER)[0].mapped == {"flash_ops.abi3.so"}


async def test_a_restarted_server_is_found_anew(launcher: Launcher) -> None:
    """A server that was restarted is another process with a later start, and is followed by the next search."""
    flags = ("--port", "39211")
    pattern = "port 39211"
    first = launcher.start(flags=flags)
    before = await finder(server_pattern=pattern).find()
    launcher.stop(first)
    gone = await finder(server_pattern=pattern).find()
    second = launcher.start(flags=flags)
    after = await finder(server_pattern=pattern).find()
    assert (before.pid, gone.pid, after.pid) == (first.pid, None, second.pid)
    assert before.create_time is not None
    assert after.create_time is not None
    assert before.create_time <= after.create_time


async def test_a_zombie_main_process_is_said_to_be_one(launcher: Launcher) -> None:
    """A server_pid whose process has ended without being collected is told from one that never was."""
    launch = launcher.start(adopted=False)
    os.kill(launch.pid, signal.SIGKILL)

    async def ended() -> bool:
        return "zombie" in (await finder(server_pid=launch.pid).find()).why

    await until(ended)


# -- the probe over them ------------------------------------------------------------------------------


@dataclass
class Files:
    """The environment's reader: times of files that a test sets."""

    changed_at: dict[str, float] | None = None
    reads: int = 0

    async def read(self, target: Target) -> EnvironmentFacts:
        self.reads += 1
        if self.changed_at is None:
            sentence = "no interpreter"
            raise Skip(sentence)
        return EnvironmentFacts(
            scope=target.scope,
            changed_at=self.changed_at,
            site_dirs=("/elsewhere",),
            distributions={"sglang": "0.5.17"},
        )


@dataclass
class Services:
    """The edges that the probe uses, most of them real."""

    settings: Settings
    targets: TargetFinder
    server: ServerClient
    processes: ProcessReader
    environment: Files = field(default_factory=Files)
    clock: SystemClock = field(default_factory=SystemClock)
    standing: Standing = field(default_factory=standing)
    memory: dict[str, object] = field(default_factory=dict)


@pytest.fixture(name="probe")
async def _probe() -> AsyncIterator[Callable[[Launch, str], Services]]:
    made: list[ServerClient] = []

    def make(launch: Launch, url: str) -> Services:
        settings = Settings(server_pid=launch.pid, server_url=url, explicit=frozenset({"server_url"}))
        made.append(ServerClient(settings, SystemClock()))
        targets = TargetFinder(settings, standing(), SystemClock(), environ={})
        return Services(settings, targets, made[-1], ProcessReader(SystemClock(), patience=30))

    yield make
    for client in made:
        await client.close()


async def collect(services: Services) -> server.ServerFacts:
    return await server.collect(services)  # type: ignore[arg-type]  # only the edges that this probe uses


async def test_the_probe_remembers_how_many_schedulers_there_were(
    launcher: Launcher, probe: Callable[[Launch, str], Services]
) -> None:
    """The most schedulers seen of this server at once is kept from round to round, and not for another server."""
    launch = launcher.start()
    async with serve(FakeSglang()) as fake:
        services = probe(launch, fake.url)
        first = await collect(services)
        for pid in launch.schedulers:
            os.kill(pid, signal.SIGKILL)

        async def ended() -> bool:
            services.processes = ProcessReader(SystemClock(), patience=30)
            facts = await collect(services)
            return facts.running is not None and not facts.running.of(Role.SCHEDULER)

        await until(ended)
        after = await collect(services)
        other = launcher.start()
        os.kill(other.schedulers[0], signal.SIGKILL)
        fresh = probe(other, fake.url)
        # What was remembered of the first server is handed on and must not count for this one.
        fresh.memory = services.memory

        async def one_left() -> bool:
            fresh.processes = ProcessReader(SystemClock(), patience=30)
            found = await fresh.processes.read(await fresh.targets.find())
            return found is not None and len(found.of(Role.SCHEDULER)) == 1

        await until(one_left)
        second = await collect(fresh)
    assert (first.schedulers_seen, after.schedulers_seen, second.schedulers_seen) == (2, 2, 1)
    assert first.target.scope is Scope.SERVER


async def test_times_of_files_are_read_once_in_a_minute(
    launcher: Launcher, library: Path, probe: Callable[[Launch, str], Services]
) -> None:
    """Rounds share a reading of the environment; one that cannot be read leaves the question open and is retried."""
    launch = launcher.start(library)
    async with serve(FakeSglang()) as fake:
        services = probe(launch, fake.url)
        unread = await collect(services)
        services.environment.changed_at = {"torch": 5.0}
        first, second = await collect(services), await collect(services)
    assert (unread.changed_at, unread.installed_sglang) == (None, None)
    assert (first.changed_at, second.changed_at, first.installed_sglang) == ({"torch": 5.0}, {"torch": 5.0}, "0.5.17")
    assert services.environment.reads == 2
    # The server's libraries come from a folder that the examined environment does not have.
    assert first.mapped_elsewhere == (str(library.parents[1]),)
