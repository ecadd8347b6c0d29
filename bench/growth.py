"""Measures how cost grows with work: GPUs, packages, processes on the machine and scrapers; uptime.py has the rounds.

    python bench/growth.py [--json FILE]

Every cost is CPU time (of this process, or of the child that does the work), the best of several, or memory. The last
column is the exponent of the growth over all sizes: 0 is constant, 1 is linear, and what is constant beside what grows
keeps it below that. The shapes are held by tests that count (tests/contract/test_growth.py); these are the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import MIB, cpu, growth, table

sys.path.insert(0, str(Path(__file__).parents[1]))

import subjects
from scraping import storm_apart

from sidecar.app import Agent
from sidecar.config import Image, Settings
from sidecar.exposition import Exposition
from sidecar.model import Placement, Processes
from sidecar.target import TargetFinder, stand
from tests.builders import FakeClock
from tests.fakes.nvml import Scenario
from tests.fakes.nvml import build as build_library
from tests.fakes.proc import ProcTree
from tests.fakes.reader import read
from tests.fakes.site import Site

TRIES = 3


@dataclass(slots=True)
class Row:
    """One cost at growing sizes."""

    work: str
    cost: str
    unit: str
    values: dict[int, float] = field(default_factory=dict)

    @property
    def exponent(self) -> float:
        """How it grows."""
        return growth(list(self.values), list(self.values.values()))


def best(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """The least milliseconds that ``work`` takes by a clock."""
    taken = []
    for _ in range(TRIES):
        begun = clock()
        work()
        taken.append(1000 * (clock() - begun))
    return min(taken)


def children() -> float:
    """CPU seconds of children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


# -- GPUs -------------------------------------------------------------------------------------------


async def with_gpus(folder: Path, gpus: int) -> dict[tuple[str, str], float]:
    """A round of the NVML worker, and what the agent makes of it, for so many GPUs."""
    scenario = Scenario(folder / f"gpus-{gpus}", gpus=gpus)
    environ = {"PATH": os.defpath} | scenario.environ(build_library(folder / "nvml"))
    settings = Settings(server_url="http://127.0.0.1:9", processes=Processes.HIDDEN, image=Image.OWN)
    found: dict[tuple[str, str], float] = {}
    async with Agent.create(settings, environ=environ) as agent:
        driver = agent.catalog.by_name["driver"]
        await agent.check()
        worker = psutil.Process().children()[-1].pid
        exposition = Exposition(agent.catalog)
        rounds = 30
        before, used = time.process_time(), cpu([worker])
        attempts = []
        for number in range(rounds):
            scenario.set(power=80_000 + number, temperature=40 + number % 9)
            attempts.append(await agent.scheduler.attempt(driver))
        found["GPU", "round, NVML worker"] = 1000 * (cpu([worker]) - used) / rounds
        found["GPU", "round, agent's side of it"] = 1000 * (time.process_time() - before) / rounds
        judging, rendering = 0.0, 0.0
        for attempt in attempts:
            begun = time.process_time()
            snapshot = agent.store.publish(attempt)
            between = time.process_time()
            exposition.render(snapshot, accept="", accept_encoding="gzip")
            judging += between - begun
            rendering += time.process_time() - between
        found["GPU", "judging a round"] = 1000 * judging / rounds
        found["GPU", "rendering a changed state"] = 1000 * rendering / rounds
    return found


# -- packages ---------------------------------------------------------------------------------------


def with_packages(folder: Path, packages: int) -> dict[tuple[str, str], float]:
    """Reading an environment with so many distributions, and confirming that it has not changed."""
    site = Site(folder / f"site-{packages}")
    for number in range(packages):
        site.dist(f"package-{number}", "1.0", ("package-0>=1",))
    answer = read(site.python)
    return {
        ("package", "reading all of them"): best(lambda: read(site.python), children),
        ("package", "confirming that nothing changed"): best(
            lambda: read(site.python, known=answer["fingerprint"]), children
        ),
    }


# -- processes --------------------------------------------------------------------------------------


def with_processes(folder: Path, processes: int) -> dict[tuple[str, str], float]:
    """Looking for the server among so many processes."""
    tree = ProcTree(folder / f"proc-{processes}")
    for number in range(processes):
        tree.process(1000 + number, ["/usr/bin/worker", f"--number={number}"])
    settings = Settings(processes=Processes.SHARED, image=Image.OWN, placement=Placement.HOST)
    standing = stand(settings, proc=tree.proc, environ={})
    clock = FakeClock()

    def find() -> None:
        finder = TargetFinder(settings, standing, clock, proc=tree.proc, environ={})
        asyncio.run(finder.find())

    return {("process on the machine", "looking for the server"): best(find)}


# -- scrapers ---------------------------------------------------------------------------------------


def with_scrapers(one: subjects.Running, scrapers: int, seconds: float) -> dict[tuple[str, str], float]:
    """So many scrapers, each with a new connection every second."""
    before = one.cpu()
    scrapes = len(storm_apart(one.port, scrapers, seconds).times)
    used = one.cpu() - before
    return {
        ("scraper", "CPU of a second"): 1000 * used / seconds,
        ("scraper", "CPU per scrape"): 1000 * used / scrapes,
        ("scraper", "resident memory afterwards, MiB"): psutil.Process(one.process.pid).memory_info().rss / MIB,
    }


# -- all --------------------------------------------------------------------------------------------


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    rows: dict[tuple[str, str], Row] = {}

    def note(size: int, found: dict[tuple[str, str], float]) -> None:
        for (work, cost), value in found.items():
            unit = "" if "MiB" in cost else "ms"
            rows.setdefault((work, cost), Row(work, cost, unit)).values[size] = value

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for gpus in (1, 2, 4, 8, 16):
            note(gpus, asyncio.run(with_gpus(folder, gpus)))
        for packages in (50, 100, 200, 500, 1000):
            note(packages, with_packages(folder, packages))
        for processes in (10, 100, 1000, 5000):
            note(processes, with_processes(folder, processes))
        environ = Scenario(folder / "scenario", gpus=8).environ(build_library(folder / "nvml"))
        with subjects.running(subjects.sidecar(environ=environ)) as one:
            time.sleep(8)  # the first rounds are over
            for scrapers in (1, 10, 50, 200):
                note(scrapers, with_scrapers(one, scrapers, 8.0))
    shown = [
        [
            row.work,
            f"{row.cost}{f', {row.unit}' if row.unit else ''}",
            "  ".join(f"{size}: {value:.3g}" for size, value in row.values.items()),
            f"{row.exponent:.2f}",
        ]
        for row in rows.values()
    ]
    print(table(["per", "cost", "sizes and figures", "grows with the power"], shown))
    if options.json is not None:
        written: list[Any] = [
            {"per": row.work, "cost": row.cost, "unit": row.unit, "values": row.values, "exponent": row.exponent}
            for row in rows.values()
        ]
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
