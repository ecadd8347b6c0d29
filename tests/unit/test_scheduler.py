"""The scheduler: every ending becomes an outcome, intervals are kept, frozen tasks are seen."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sidecar.model import Attempt, Outcome, Probe, ProbeCrash, ProbeTimeout, ProbeUnavailable, Skip
from sidecar.scheduler import MARGIN, SLACK, Scheduler
from tests.builders import FakeClock, probe


def make(clock: FakeClock, probes: list[Probe[Any]], publish: Callable[[Attempt[Any]], object]) -> Scheduler:
    return Scheduler(
        probes,
        services=None,  # type: ignore[arg-type]  # these probes use nothing
        publish=publish,
        clock=clock,
        rng=lambda: 0.5,
    )


@contextlib.asynccontextmanager
async def running(scheduler: Scheduler) -> AsyncIterator[None]:
    task = asyncio.create_task(scheduler.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _skip(_services: Any) -> Any:
    raise Skip("not here")


async def _unavailable(_services: Any) -> Any:
    raise ProbeUnavailable("no such program")


async def _timeout(_services: Any) -> Any:
    raise ProbeTimeout("hung", where="nvmlInit", stuck=True)


async def _crash(_services: Any) -> Any:
    raise ProbeCrash("died")


async def _exhausted(_services: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


async def _bug(_services: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("collect", "outcome", "detail"),
    [
        (_skip, Outcome.SKIPPED, "not here"),
        (_unavailable, Outcome.UNAVAILABLE, "no such program"),
        (_timeout, Outcome.TIMEOUT, "hung"),
        (_crash, Outcome.CRASHED, "died"),
        (_bug, Outcome.ERROR, "ZeroDivisionError"),
        (_exhausted, Outcome.ERROR, "The system refuses the agent what the driver probe needs: too many open files."),
    ],
)
async def test_every_ending_is_an_outcome(clock: FakeClock, collect: Any, outcome: Outcome, detail: str) -> None:
    """Skip, time-out, crash and our own bug are told apart, with a sentence."""
    one = probe("driver", collect=collect)
    ended = await make(clock, [one], lambda _: None).attempt(one)
    assert ended.outcome is outcome
    assert detail in ended.detail
    assert ended.facts is None
    if outcome is Outcome.TIMEOUT:
        assert (ended.where, ended.stuck) == ("nvmlInit", True)


async def test_a_collect_that_never_returns_ends_at_its_deadline(clock: FakeClock) -> None:
    """A probe that forgets its own deadline is ended by the scheduler."""

    async def forever(_services: Any) -> Any:
        await asyncio.Event().wait()

    one = probe("driver", collect=forever, deadline=0.05 - MARGIN)
    ended = await make(clock, [one], lambda _: None).attempt(one)
    assert ended.outcome is Outcome.TIMEOUT


async def test_probes_run_at_once_and_then_at_their_interval(clock: FakeClock) -> None:
    """The first round comes at once, later ones an interval after the start of the last."""
    times: list[float] = []
    async with running(make(clock, [probe("driver")], lambda _: times.append(clock.monotonic()))):
        await clock.advance(35)
    assert times == [0, 10, 20, 30]


async def test_waking_a_probe_runs_it_now(clock: FakeClock) -> None:
    """A late result does not wait for the next turn."""
    times: list[float] = []
    scheduler = make(clock, [probe("driver")], lambda _: times.append(clock.monotonic()))
    async with running(scheduler):
        await clock.advance(4)
        scheduler.wake("driver")
        await clock.advance(1)
    assert times == [0, 4]


async def test_a_costly_probe_backs_off_while_it_times_out(clock: FakeClock) -> None:
    """Rounds of a probe declared costly come up to five times rarer while they time out."""
    times: list[float] = []
    one = probe("packages", collect=_timeout, backoff=True)
    async with running(make(clock, [one], lambda _: times.append(clock.monotonic()))):
        await clock.advance(170)
    assert times == [0, 20, 60, 110, 160]


async def test_liveness_sees_a_frozen_task_and_no_failing_probe(clock: FakeClock) -> None:
    """A probe that fails every round is alive; one whose round does not end is not."""
    never = asyncio.Event()

    async def freeze(_services: Any) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await never.wait()

    failing, frozen = probe("failing", collect=_bug), probe("frozen", collect=freeze)
    scheduler = make(clock, [failing, frozen], lambda _: None)
    async with running(scheduler):
        await clock.advance(5 + MARGIN + SLACK)
        assert scheduler.alive() is None
        await clock.advance(1)
        assert scheduler.alive() == "probe frozen made no progress"
        never.set()
        await clock.advance(0)
        assert scheduler.alive() is None
