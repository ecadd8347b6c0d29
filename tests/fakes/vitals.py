"""What a process takes of the machine, over time."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.fakes import agent


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look. ``at`` is monotonic seconds, ``resident`` bytes; ``zombies`` are among its own children."""

    at: float
    resident: int
    descriptors: int
    threads: int
    processes: int
    zombies: int


def look(pid: int) -> Vitals:
    """Look at a process. Raises OSError once it is gone."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    zombies = 0
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            zombies += child.status() == psutil.STATUS_ZOMBIE
    return Vitals(
        at=time.monotonic(),
        resident=int(fields["VmRSS"].split()[0]) * 1024,
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=int(fields["Threads"]),
        processes=len(agent.children(pid)),
        zombies=zombies,
    )


class Watch:
    """Looks at a process in a thread until the block is left."""

    def __init__(self, pid: int, every: float = 1.0) -> None:
        self._pid = pid
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[Vitals] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            with contextlib.suppress(OSError, psutil.Error):
                self.seen.append(look(self._pid))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """By how much the second grows per unit of the first, by the median of the slopes between halves (Theil-Sen).

    A few high values, as of a moment in which something was rendered, do not move it.
    """
    half = len(points) // 2
    return statistics.median(
        (later[1] - before[1]) / (later[0] - before[0])
        for before, later in zip(points[:half], points[-half:], strict=True)
    )
