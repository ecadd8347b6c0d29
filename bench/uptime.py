"""Runs a serving agent for as many rounds as it makes in days or years, on a clock that is moved on whenever it waits.

    python bench/uptime.py [--rounds 1000000] [--json FILE]

Probes, judge, state file and HTTP server are the real ones; what they look at is recorded (`sidecar.demo`): a healthy
server, then one fault after the other, again and again, and a probe that hangs now and then. At powers of ten it is
measured what a round costs by then, and what has piled up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from measure import MIB, growth, table
from msgspec.structs import replace

from sidecar import log
from sidecar.app import Agent
from sidecar.config import Settings
from sidecar.demo import Moment, Recording, load, replay
from sidecar.model import ProbeTimeout, Snapshot
from sidecar.state import FILE, FOLDER

FAULTS = ("gpu-lost", "driver-mismatch", "mamba-missing", "upgrade-drift")
SCENARIOS = tuple(name for fault in FAULTS for name in ("healthy", fault))
DWELL = 300.0
"""Seconds that the server stays in each."""
HANGS = 50
"""One in so many rounds of the driver probe does not end."""
PROBES = 9
SCRAPES = 500
"""Rounds between two scrapes."""


class MovingClock:
    """Time that its event loop moves on."""

    def __init__(self) -> None:
        self.passed = 0.0
        self._begun = time.time()

    def time(self) -> float:
        """Seconds since the epoch, of which ``passed`` never were."""
        return self._begun + self.passed

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self.passed

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop, which does not."""
        await asyncio.sleep(seconds)


class _Selector(selectors.DefaultSelector):
    """Never waits for time alone: that is moved on instead. Waits for a thread that works, as on the state file."""

    def __init__(self, clock: MovingClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        busy = threading.active_count() > 1
        if (ready := super().select(0.05 if busy else 0)) or busy:
            return ready
        self._clock.passed += timeout
        return []


class MovingLoop(asyncio.SelectorEventLoop):
    """An event loop on a `MovingClock`."""

    def __init__(self, clock: MovingClock) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def time(self) -> float:
        """What all its timers go by."""
        return self._clock.passed


def recording(rounds: int) -> Recording:
    """The scenarios in turns, for at least so many rounds."""
    ends: list[tuple[Recording, Moment]] = [(one, one.moments[-1][1]) for one in (load(name)[0] for name in SCENARIOS)]
    seconds = rounds / PROBES * replay.INTERVAL * 1.5
    count = int(seconds / DWELL) + 1
    moments = tuple((DWELL * number, ends[number % len(ends)][1]) for number in range(count))
    return Recording(demo=ends[0][0].demo, moments=moments)


def made(snapshot: Snapshot) -> int:
    """Rounds of all probes so far."""
    return sum(sum(result.runs.values()) for result in snapshot.results.values())


async def scrape(port: int) -> bytes:
    """One scrape, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise RuntimeError(answer[:200].decode(errors="replace"))
    return answer


class Uptime:
    """One agent and what is measured of it."""

    def __init__(self, agent: Agent, folder: Path, port: int, rounds: int) -> None:
        self._agent = agent
        self._folder = folder
        self._port = port
        self._rounds = rounds
        self._next = 1000
        self._mark = (0, time.process_time())
        self.found: dict[str, dict[int, float]] = {}

    async def watch(self) -> None:
        """Scrape now and then, and measure at powers of ten; end when all rounds are made."""
        scraped = 0
        while (done := made(self._agent.store.snapshot)) < self._rounds:
            await self._agent.clock.sleep(replay.INTERVAL / PROBES)
            if done >= self._next:
                self._measure(done, await scrape(self._port))
                self._next *= 10
            elif done >= scraped + SCRAPES:
                scraped = done
                await scrape(self._port)
        if done >= self._next or done > 1.01 * self._next / 10:
            self._measure(done, await scrape(self._port))
        self._agent.stop.set()

    def _measure(self, done: int, body: bytes) -> None:
        before, used = self._mark
        spent = time.process_time() - used
        gc.collect()
        state = self._folder / FOLDER / FILE
        process = psutil.Process()
        figures = {
            "CPU of a round, all probes, ms": 1000 * spent / max(done - before, 1),
            "objects alive": float(len(gc.get_objects())),
            "resident memory, MiB": process.memory_info().rss / MIB,
            "descriptors": float(process.num_fds()),
            "tasks": float(len(asyncio.all_tasks())),
            "bytes of the state file": float(state.stat().st_size),
            "bytes of a scrape": float(len(body)),
            "changes counted": float(sum(self._agent.store.snapshot.known.counts.values())),
        }
        for name, value in figures.items():
            self.found.setdefault(name, {})[min(self._next, done)] = value
        days = self._agent.clock.monotonic() / 86400
        sys.stderr.write(f"{done} rounds, {days:.2f} days of its clock: {figures}\n")
        self._mark = (done, time.process_time())


async def run(rounds: int, clock: MovingClock, folder: Path) -> dict[str, dict[int, float]]:
    """Serve until so many rounds are made."""
    agent = Agent.create(Settings(), demo=recording(rounds), clock=clock)
    # A demo keeps nothing by itself.
    agent.settings = replace(agent.settings, state_dir=str(folder))
    real, calls = agent.services.nvml.round, 0

    async def sometimes(deadline: float) -> Any:
        nonlocal calls
        calls += 1
        if calls % HANGS == 0:
            await asyncio.sleep(deadline)
            raise ProbeTimeout("NVML did not answer.", where="nvmlDeviceGetTemperature of GPU 0")
        return await real(deadline)

    agent.services.nvml.round = sometimes  # type: ignore[method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    uptime = Uptime(agent, folder, listener.getsockname()[1], rounds)
    async with agent:
        serving = asyncio.create_task(agent.serve([listener]))
        watching = asyncio.create_task(uptime.watch())
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        await watching
        await serving
    return uptime.found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log as a server's sidecar does, to nowhere: nearly all of it is on purpose."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        log.configure("json", "info", nowhere)
        yield


def main() -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000, help="how many, of all probes (default: 100000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    clock = MovingClock()
    with tempfile.TemporaryDirectory() as name, quiet():
        loop = MovingLoop(clock)
        with contextlib.closing(loop):
            found = loop.run_until_complete(run(options.rounds, clock, Path(name)))
    rows = [
        [
            cost,
            "  ".join(f"{size}: {value:.6g}" for size, value in values.items()),
            f"{growth(list(values), list(values.values())):.2f}" if all(values.values()) else "",
        ]
        for cost, values in found.items()
    ]
    print(table(["after rounds", "figures", "grows with the power"], rows))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
