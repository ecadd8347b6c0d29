"""What the benchmarks compute: quantiles and their spread, ratios, memory and CPU time of a tree of processes."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20


# -- numbers ----------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the values lie, between two of them in proportion.

    Raises ValueError for none.
    """
    if not values:
        raise ValueError("a quantile of no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was taken several times: its median, and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for no values."""
        return cls(statistics.median(values), quantile(values, 0.25), quantile(values, 0.75), len(values))

    def __truediv__(self, unit: float) -> Spread:
        """The same in a larger unit."""
        return Spread(self.median / unit, self.low / unit, self.high / unit, self.count)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratio in each round: what disturbs the machine disturbs both sides of a round.

    Raises ValueError where the rounds are not the same number; rounds in which theirs is 0 tell nothing.
    """
    return [mine / other for mine, other in zip(ours, theirs, strict=True) if other]


def growth(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent with which a cost grows: 0 is constant, 1 linear, 2 quadratic.

    The slope of the least squares through the logarithms. Raises ValueError for fewer than two sizes or for what is
    not above 0.
    """
    if len(sizes) < 2:
        raise ValueError("growth needs two sizes")
    return statistics.linear_regression([math.log(one) for one in sizes], [math.log(one) for one in costs]).slope


# -- expositions ------------------------------------------------------------------------------------


def series(exposition: bytes) -> int:
    """How many series an exposition in one of the text formats has."""
    return sum(1 for line in exposition.splitlines() if line and not line.startswith(b"#"))


# -- processes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process, in bytes: resident, and with what it shares counted in proportion (proc_pid_smaps_rollup(5))."""

    resident: int
    proportional: int

    @classmethod
    def parse(cls, rollup: str) -> Memory:
        """Read the text of smaps_rollup. Raises ValueError where a number is missing."""
        found = {}
        for line in rollup.splitlines():
            name, _, value = line.partition(":")
            amount, _, unit = value.strip().partition(" ")
            if name in {"Rss", "Pss"} and unit == "kB":
                found[name] = int(amount) * 1024
        if len(found) < 2:
            raise ValueError("smaps_rollup without Rss and Pss")
        return cls(found["Rss"], found["Pss"])

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Of a process that runs."""
        return cls.parse(Path(f"/proc/{pid}/smaps_rollup").read_text())


def tree(pid: int) -> list[int]:
    """A process and its living descendants, itself first."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def clock_of(pid: int) -> int:
    """The identifier of a process' CPU clock, as clock_getcpuclockid(3) makes it: to the nanosecond, all threads."""
    return (~pid << 3) | 2


def cpu(pids: Iterable[int]) -> float:
    """CPU seconds that processes have used so far, with those of children that have ended and were waited for."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            ended = psutil.Process(pid).cpu_times()
            total += time.clock_gettime(clock_of(pid)) + ended.children_user + ended.children_system
    return total


# -- output -----------------------------------------------------------------------------------------


def figure(name: str, value: float, unit: str, budget: float | None = None) -> bool:
    """Print a figure; True when it is within its budget."""
    within = budget is None or value <= budget
    limit = "" if budget is None else f"  (budget {budget:g} {unit}{'' if within else ': OVER'})"
    print(f"{name:<34} {value:10.2f} {unit}{limit}")
    return within


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts in Markdown, its columns in line."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    written = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(written)
