"""Runs each probe in a task of its own: at once, then at its interval, never twice at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from sidecar.exhaustion import exhausted
from sidecar.model import Attempt, Clock, Outcome, Probe, ProbeCrash, ProbeTimeout, ProbeUnavailable, Skip
from sidecar.services import Services

_log = structlog.get_logger()

JITTER = 0.1
"""Share of the interval by which rounds are spread, so that a fleet does not beat in step."""
MARGIN = 1.5
"""Seconds above its own deadline that a probe gets: its verdict on what hung beats ours, and ending a
child takes up to a second."""
SLACK = 15.0
"""Seconds beyond the latest planned end of a round after which a probe's task counts as frozen."""
MAX_BACKOFF = 5


class Scheduler:
    """One task per probe. ``publish`` takes each finished `Attempt`."""

    def __init__(
        self,
        probes: Sequence[Probe[Any]],
        *,
        services: Services,
        publish: Callable[[Attempt[Any]], object],
        clock: Clock,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """``rng`` gives numbers in [0, 1) for the jitter."""
        self._probes = tuple(probes)
        self._services = services
        self._publish = publish
        self._clock = clock
        self._rng = rng
        self._wakes = {probe.name: asyncio.Event() for probe in probes}
        self._due: dict[str, float] = {}

    async def run(self) -> None:
        """Run all probes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for probe in self._probes:
                group.create_task(self._loop(probe), name=f"probe:{probe.name}")

    def wake(self, probe: str) -> None:
        """Run a probe now instead of at its next turn: a late result of it has arrived."""
        self._wakes[probe].set()

    def woken(self, probe: str) -> bool:
        """Whether a late result waits for the probe's next run."""
        return self._wakes[probe].is_set()

    def alive(self) -> str | None:
        """None while every probe's task makes progress, else a token-like sentence naming one that does not.

        A probe that fails or whose child hangs still makes progress: its round ends at the deadline.
        """
        now = self._clock.monotonic()
        for name, due in self._due.items():
            if now > due:
                return f"probe {name} made no progress"
        return None

    async def _loop(self, probe: Probe[Any]) -> None:
        structlog.contextvars.bind_contextvars(probe=probe.name)
        interval = probe.interval
        deadline = probe.deadline + MARGIN
        timeouts = 0
        while True:
            self._due[probe.name] = self._clock.monotonic() + deadline + SLACK
            self._wakes[probe.name].clear()
            begun = self._clock.monotonic()
            attempt = await self.attempt(probe)
            self._publish(attempt)
            timeouts = timeouts + 1 if attempt.outcome is Outcome.TIMEOUT else 0
            factor = min(2**timeouts, MAX_BACKOFF) if probe.backoff else 1
            spread = 1 + JITTER * (2 * self._rng() - 1)
            # From the start of the round, and never at once: no bursts to catch up.
            pause = max(interval * factor * spread - (self._clock.monotonic() - begun), interval * JITTER)
            self._due[probe.name] = self._clock.monotonic() + pause + deadline + SLACK
            await self._pause(probe.name, pause)

    async def _pause(self, name: str, seconds: float) -> None:
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        wake = asyncio.ensure_future(self._wakes[name].wait())
        try:
            await asyncio.wait((sleep, wake), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            wake.cancel()

    async def attempt(self, probe: Probe[Any]) -> Attempt[Any]:
        """Run a probe once. Every way in which it can end becomes an outcome; only cancellation passes."""
        started_at, begun = self._clock.time(), self._clock.monotonic()
        facts: Any = None
        outcome, detail, where, stuck = Outcome.OK, "", None, False
        deadline = probe.deadline
        try:
            async with asyncio.timeout(deadline + MARGIN):
                facts = await probe.collect(self._services)
        except Skip as skip:
            outcome, detail = Outcome.SKIPPED, str(skip)
        except ProbeUnavailable as missing:
            outcome, detail = Outcome.UNAVAILABLE, str(missing)
        except ProbeTimeout as timeout:
            outcome, detail, where, stuck = Outcome.TIMEOUT, str(timeout), timeout.where, timeout.stuck
        except TimeoutError:
            outcome, detail = Outcome.TIMEOUT, f"The {probe.name} probe did not finish within {deadline:g} s."
        except ProbeCrash as crash:
            outcome, detail = Outcome.CRASHED, str(crash)
        except Exception as error:  # noqa: BLE001 - a bug in one probe must not end the agent
            outcome = Outcome.ERROR
            if isinstance(error, OSError) and exhausted(error):
                # Nothing was looked at, and nobody's code is at fault.
                why = (error.strerror or type(error).__name__).lower()
                detail = f"The system refuses the agent what the {probe.name} probe needs: {why}."
            else:
                detail = f"{type(error).__name__} in the {probe.name} probe: a bug of the sidecar."
                _log.error("probe failed", probe=probe.name, exc_info=error)
        return Attempt(
            probe=probe.name,
            outcome=outcome,
            started_at=started_at,
            duration=self._clock.monotonic() - begun,
            facts=facts,
            detail=detail,
            where=where,
            stuck=stuck,
        )
