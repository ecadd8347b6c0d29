"""How work grows, counted instead of timed: calls, opened files and live objects at one size and at twice that."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.app import Agent
from sidecar.config import Image, Settings
from sidecar.environment import DETAILED, MODULES, STATIC_READER, TRACKED
from sidecar.exposition import Exposition
from sidecar.model import Attempt, Outcome, Placement, Processes
from sidecar.target import TargetFinder, stand
from tests.builders import FakeClock
from tests.fakes.nvml import Scenario
from tests.fakes.proc import ProcTree
from tests.fakes.site import Site

TWICE = 2.3
"""The most that twice the work may cost: what does not grow makes it less than 2, chance does not make it more."""


@asynccontextmanager
async def looked(library: Path, folder: Path, gpus: int) -> AsyncIterator[tuple[Agent, Attempt[Any]]]:
    """An agent that has looked at so many GPUs, and its next reading of them."""
    environ = {"PATH": os.defpath} | Scenario(folder / f"gpus-{gpus}", gpus=gpus).environ(library)
    settings = Settings(server_url="http://127.0.0.1:9", processes=Processes.HIDDEN, image=Image.OWN)
    async with Agent.create(settings, environ=environ) as agent:
        await agent.check()
        yield agent, await agent.scheduler.attempt(agent.catalog.by_name["driver"])


def calls(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, ``work`` calls."""
    made = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal made
        made += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made


async def test_judging_and_rendering_grow_with_the_gpus_at_most(fake_library: Path, tmp_path: Path) -> None:
    """Twice the GPUs are not more than twice the calls."""
    made = {}
    for gpus in (4, 8, 16):
        async with looked(fake_library, tmp_path, gpus) as (agent, attempt):
            agent.store.publish(attempt)  # what is computed once is
            exposition = Exposition(agent.catalog, process=list)
            snapshot = agent.store.publish(attempt)
            made[gpus] = (
                calls(lambda agent=agent, attempt=attempt: agent.store.publish(attempt)),
                calls(lambda to=exposition, shown=snapshot: to.render(shown, accept="", accept_encoding="")),
            )
    for half, whole in ((4, 8), (8, 16)):
        assert made[whole][0] <= TWICE * made[half][0]
        assert made[half][1] < made[whole][1] <= TWICE * made[half][1]


async def test_rounds_leave_nothing_behind(fake_library: Path, tmp_path: Path) -> None:
    """After thousands of rounds, of which many fail, there are as many objects as after hundreds."""
    async with looked(fake_library, tmp_path, 1) as (agent, good):
        bad = Attempt(probe="driver", outcome=Outcome.TIMEOUT, started_at=good.started_at, duration=5.0, detail="hung")
        exposition = Exposition(agent.catalog, process=list)

        def pass_by(first: int, last: int) -> int:
            for number in range(first, last):
                attempt = bad if number % 10 < 3 else replace(good, started_at=good.started_at + 10 * number)
                snapshot = agent.store.publish(attempt)
                if number % 7 == 0:
                    exposition.render(snapshot, accept="", accept_encoding="gzip")
            gc.collect()
            return len(gc.get_objects())

        # The history of transitions is full by then.
        early = pass_by(0, 700)
        late = pass_by(700, 1400)
    assert late <= early + 50


COUNTED = """
import os, runpy, sys
opened = 0
def hook(event, _arguments):
    global opened
    opened += event in {"open", "os.listdir", "os.scandir"}
sys.addaudithook(hook)
"""


def files_of_a_reader(site: Site, known: str | None) -> tuple[int, str]:
    """How many files and folders the static reader opens, and the fingerprint that it finds."""
    spec = {
        "environ": {},
        "environ_seen": True,
        "tracked": TRACKED,
        "detailed": DETAILED,
        "modules": MODULES,
        "known": known,
    }
    reading, writing = os.pipe()
    program = COUNTED + (
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    os.write(2, b'opened %d\\n' % opened)\n"
    )
    with os.fdopen(reading) as channel:
        process = subprocess.Popen(
            [site.python, "-I", "-S", "-B", "-c", program, STATIC_READER, json.dumps(spec), "--fd", str(writing)],
            pass_fds=(writing,),
            env={},
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writing)
        answer = json.loads(channel.readlines()[-1])["result"]
        _, said = process.communicate(timeout=60)
    return int(said.rpartition("opened ")[2]), answer["fingerprint"]


def test_reading_packages_grows_with_them_at_most(tmp_path: Path) -> None:
    """Twice the packages are not more than twice the files, and an unchanged environment is known by far fewer."""
    opened, confirmed = {}, {}
    for packages in (200, 400):
        site = Site(tmp_path / str(packages))
        for number in range(packages):
            site.dist(f"package-{number}", "1.0")
        opened[packages], fingerprint = files_of_a_reader(site, None)
        confirmed[packages], _ = files_of_a_reader(site, fingerprint)
    assert opened[200] < opened[400] <= TWICE * opened[200]
    assert confirmed[400] <= confirmed[200] + 10
    assert confirmed[400] < opened[400] / 2


def files_of_a_search(folder: Path, processes: int) -> int:
    """How many files and folders the search for a server opens among so many processes."""
    program = COUNTED + (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from sidecar.config import Image, Settings\n"
        "from sidecar.model import Placement, Processes\n"
        "from sidecar.target import TargetFinder, stand\n"
        "from tests.builders import FakeClock\n"
        "from tests.fakes.proc import ProcTree\n"
        "tree = ProcTree(Path(sys.argv[1]))\n"
        "for number in range(int(sys.argv[2])):\n"
        "    tree.process(1000 + number, ['/usr/bin/worker', str(number)])\n"
        "settings = Settings(processes=Processes.SHARED, image=Image.OWN, placement=Placement.HOST)\n"
        "standing = stand(settings, proc=tree.proc, environ={})\n"
        "finder = TargetFinder(settings, standing, FakeClock(), proc=tree.proc, environ={})\n"
        "before = opened\n"
        "asyncio.run(finder.find())\n"
        "print(opened - before)\n"
    )
    root = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", program, str(folder), str(processes)]
    done = subprocess.run(arguments, cwd=root, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.parametrize("processes", [100, 400])
def test_looking_for_a_server_reads_two_files_of_a_process(tmp_path: Path, processes: int) -> None:
    """Of a process that is no server, its state and its command line are read, and nothing else."""
    assert files_of_a_search(tmp_path / "machine", processes) <= 2 * processes + 60


async def test_callers_share_a_search(tmp_path: Path) -> None:
    """Every probe asks for the server, and the machine's processes are gone through once."""
    tree = ProcTree(tmp_path)
    settings = Settings(processes=Processes.SHARED, image=Image.OWN, placement=Placement.HOST)
    standing = stand(settings, proc=tree.proc, environ={})
    finder = TargetFinder(settings, standing, FakeClock(), proc=tree.proc, environ={})
    found = await asyncio.gather(*(finder.find() for _ in range(9)))
    assert len({id(one) for one in found}) == 1
