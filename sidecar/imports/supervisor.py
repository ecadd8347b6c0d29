"""The watch over an import child: whether it gets on, and how much it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from msgspec import Struct

from sidecar.imports.evidence import ImportOutcome
from sidecar.isolation import Child
from sidecar.memory import MemoryLimit
from sidecar.model import Clock


class ImportLimits(Struct, frozen=True, kw_only=True):
    """Bounds of an import child. Seconds and bytes.

    ``stall``: time without CPU progress and without a new stage after which it counts as hung. ``cap``: wall time
    after which it counts as starved, however busy it is. ``memory_needed``: room under the memory limit to start
    at all (a CUDA build of torch and FlashInfer peak at about 0.85 GiB). ``memory_fraction``: share of the limit
    at which it is ended; ``memory_most``: what it may hold resident where there is no limit, or one far above what
    the server leaves. ``fresh_for``: age at which a good outcome is renewed; ``retry_after``: a bad one, which
    may rest on something outside the fingerprint (a system library); ``retry_soon``: one that said nothing.
    """

    stall: float = 60.0
    cap: float = 900.0
    memory_needed: int = 1200 * 1024 * 1024
    memory_fraction: float = 0.9
    memory_most: int = 8 * 1024**3
    sample: float = 0.2
    fresh_for: float = 24 * 3600.0
    retry_after: float = 3600.0
    retry_soon: float = 600.0


class Supervisor:
    """Watches an import child: ends it when it hangs, starves or runs out of memory (`isolation.Watch`)."""

    _CPU_INTERVAL = 1.0
    """Seconds between looks at the CPU time: finding the descendants reads all of /proc."""
    _CPU_STEP = 0.25
    """Seconds of CPU time that count as progress; a loop that polls a lock file stays well below."""
    _BUSY = 0.25
    """Share of the time on one core from which a child counts as busy."""
    _SHORT = 0.7
    """Share of a limit from which memory counts as short, should the child be killed."""
    _LOW = 256 * 1024 * 1024
    """Available bytes of the machine below which it does."""
    _MOST_PER_LOOK = 5.0
    """Seconds without progress that one look can add: after a pause of this process (frozen, throttled, stopped)
    the child, which was paused with it, gets the time to show what it does."""

    def __init__(self, clock: Clock, limits: ImportLimits, memory: MemoryLimit) -> None:
        self._clock = clock
        self._limits = limits
        self._memory = memory
        self._idle = 0.0
        self._called_at = clock.monotonic()
        self._looked_at = float("-inf")
        self._cpu = 0.0
        self._stages = 0
        self._runnable = 0
        self._looks = 0
        self._resident = 0
        self._began = self._called_at
        self._group_was_short = False
        self._machine_was_short = False
        self._kills = memory.kills()

    @property
    def memory_short(self) -> bool:
        """Whether the kernel ended a process of this group for want of memory, or somebody may have.

        Where the kernel does not count them, it may have where the group was short of memory at any look; another
        program that sees to it may have where the machine was.
        """
        kills = self._memory.kills()
        by_kernel = kills > self._kills if kills is not None and self._kills is not None else self._group_was_short
        return by_kernel or self._machine_was_short

    @property
    def busy(self) -> bool:
        """Whether the child got the CPU for a good part of its time, so that more of it would not have helped."""
        return self._cpu >= self._BUSY * (self._called_at - self._began)

    async def __call__(self, child: Child, lines: Sequence[Mapping[str, Any]]) -> str | None:
        """Look at the child; the token of an outcome ends it (`isolation.Watch`)."""
        reading = self._memory.read()
        if reading is not None:
            # Looks are apart, and the last of the memory may go between two of them.
            self._group_was_short |= reading.used >= reading.limit * self._SHORT
            if reading.used >= reading.limit * self._limits.memory_fraction:
                return ImportOutcome.INSUFFICIENT_MEMORY
        now = self._clock.monotonic()
        self._idle += min(now - self._called_at, self._MOST_PER_LOOK)
        self._called_at = now
        stages = sum("stage" in line for line in lines)
        if stages > self._stages:
            self._stages = stages
            self._progressed()
        if now - self._looked_at >= min(self._CPU_INTERVAL, self._limits.stall / 4):
            self._looked_at = now
            self._look_at_tree(child.pid)
            available = psutil.virtual_memory().available
            self._machine_was_short |= self._resident > available or available < self._LOW
            if self._resident >= self._limits.memory_most:
                return ImportOutcome.INSUFFICIENT_MEMORY
        if self._idle < self._limits.stall:
            return None
        # Ready to run most of the time and still no progress: it did not get the CPU; that is not its fault.
        starved = self._looks > 0 and self._runnable / self._looks > 0.5
        return ImportOutcome.STARVED if starved else ImportOutcome.TIMEOUT

    def _progressed(self) -> None:
        self._idle = 0.0
        self._runnable = self._looks = 0

    def _look_at_tree(self, pid: int) -> None:
        total = 0.0
        self._resident = 0
        runnable = False
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(pid)
            for process in (leader, *leader.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    # With those of children that have ended: a compiler runs for less than the time between looks.
                    total += times.user + times.system + times.children_user + times.children_system
                    self._resident += process.memory_info().rss
                    runnable = runnable or process.status() == psutil.STATUS_RUNNING
        self._looks += 1
        self._runnable += runnable
        if abs(total - self._cpu) >= self._CPU_STEP:
            self._cpu = total
            self._progressed()
