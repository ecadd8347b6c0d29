"""The keeper: what is remembered survives a disk that hangs, is full, or is another agent's, and so does the agent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.drift import advance
from sidecar.keeper import Keeper
from sidecar.model import Known, Observed
from sidecar.probes.drift import STATE
from sidecar.state import FILE, FOLDER, State, StateError, StateFile, StateProblem, Stuck
from sidecar.store import Store
from tests.builders import EPOCH, HOST, FakeClock, attempt, condition, probe

OLD = State(known=advance(Known(), {"torch": Observed(value="2.11.0", source="driver")}, 1.0))


class Disk:
    """A real folder that can be made to hang and to fail, as network file systems and full ones do."""

    def __init__(self, folder: Path) -> None:
        self.file = StateFile(folder)
        self.answers = threading.Event()
        self.answers.set()
        self.failure: Exception | None = None
        self.saves = 0

    def claim(self) -> StateProblem | None:
        return self.file.claim()

    def close(self) -> None:
        self.file.close()

    def load(self, now: float) -> tuple[State, StateProblem | None]:
        self._meet()
        return self.file.load(now)

    def save(self, state: State) -> StateProblem | None:
        self.saves += 1
        self._meet()
        return self.file.save(state)

    def _meet(self) -> None:
        assert self.answers.wait(20)
        if self.failure is not None:
            raise self.failure


class Machine:
    """An agent's store and keeper over a folder. What a probe reads is what the test publishes."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk(folder)
        self.clock = FakeClock()
        self.memory: dict[str, object] = {}
        self.woken: list[str] = []
        self.store = Store(
            [probe("driver", condition("a"))],
            standing=HOST,
            settings=None,
            required=(),
            clock=self.clock,
            lifetimes={"driver": 35.0},
            observe=lambda results: results["driver"].facts or {},
        )
        self.keeper = self.make(patience=0.3, retry=0.2, handover=0.0)

    def make(self, **times: float) -> Keeper:
        return Keeper(self.disk, self.store, self.clock, memory=self.memory, wake=self.woken.append, **times)

    def see(self, torch: str) -> None:
        self.store.publish(attempt("driver", {"torch": Observed(value=torch, source="driver")}))

    @property
    def token(self) -> str | None:
        problem = self.memory.get(STATE)
        return problem.token if isinstance(problem, StateProblem) else None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start, and end as the agent does. Its clock goes on by itself."""
        await self.keeper.restore()
        task = asyncio.create_task(self.keeper.run())
        await asyncio.sleep(0)
        ticking = asyncio.create_task(self._tick())
        try:
            yield
            assert not task.done(), "the agent would end with it"
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            await self.clock.advance(0.5)


async def until(met: Callable[[], Any]) -> None:
    for _ in range(2000):
        if met():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def remembered(folder: Path) -> dict[str, str | None]:
    state, problem = StateFile(folder).load(EPOCH)
    assert problem is None
    return {item: one.value for (item, _), one in state.known.seen.items()}


async def test_what_is_seen_is_written_and_goes_on(tmp_path: Path, machine: Machine) -> None:
    """A change is on the disk soon after, and the next agent counts on from there."""
    async with machine.running():
        machine.see("2.11.0")
        await until(lambda: remembered(tmp_path) == {"torch": "2.11.0"})
    second = Machine(tmp_path)
    async with second.running():
        second.see("2.12.0")
        assert second.store.snapshot.known.counts == {"torch": 1}
    assert remembered(tmp_path) == {"torch": "2.12.0"}, "the end writes what was not written yet"
    assert (machine.token, second.token, second.woken) == (None, None, [])


async def test_a_disk_that_hangs_at_the_start(tmp_path: Path, machine: Machine) -> None:
    """The start does not wait for it, nothing is written over what was not read, and when it answers all is counted."""
    machine.disk.file.save(OLD)
    machine.disk.answers.clear()
    async with machine.running():
        assert machine.token == "unreadable"
        machine.see("2.12.0")
        await until(lambda: machine.clock.now > EPOCH + 20)
        assert (machine.disk.saves, remembered(tmp_path)) == (0, {"torch": "2.11.0"})
        machine.disk.answers.set()
        await until(lambda: machine.store.snapshot.known.counts == {"torch": 1})
        await until(lambda: remembered(tmp_path) == {"torch": "2.12.0"})
        await until(lambda: machine.token is None)


async def test_a_disk_that_never_answers_is_not_written_at_the_end(tmp_path: Path, machine: Machine) -> None:
    """An agent that never read what was remembered leaves it to the next one."""
    machine.disk.file.save(OLD)
    machine.disk.answers.clear()
    async with machine.running():
        machine.see("2.12.0")
    machine.disk.answers.set()
    await asyncio.sleep(0.1)
    assert (machine.disk.saves, remembered(tmp_path)) == (0, {"torch": "2.11.0"})


async def test_a_disk_that_hangs_later(tmp_path: Path, machine: Machine) -> None:
    """A write that hangs is told of, is the only one, and what changed meanwhile is written after it."""
    async with machine.running():
        machine.disk.answers.clear()
        machine.see("2.11.0")
        await until(lambda: machine.token == "unwritable")
        machine.see("2.12.0")
        await asyncio.sleep(0.6)
        assert machine.disk.saves == 1
        machine.disk.answers.set()
        await until(lambda: remembered(tmp_path) == {"torch": "2.12.0"})
        await until(lambda: machine.token is None)


@pytest.mark.parametrize(
    "failure",
    [
        StateError(StateProblem("unwritable", "No space left on device.")),
        RuntimeError("can't start new thread"),
    ],
    ids=["full", "no-thread"],
)
async def test_a_failed_write_is_tried_again_without_a_change(
    tmp_path: Path, machine: Machine, failure: Exception
) -> None:
    """When there is room again, what was not written is, although nothing new happened, and the warning ends."""
    async with machine.running():
        machine.disk.failure = failure
        machine.see("2.11.0")
        await until(lambda: machine.token == "unwritable" and machine.disk.saves > 1)
        machine.disk.failure = None
        await until(lambda: machine.token is None)
        assert remembered(tmp_path) == {"torch": "2.11.0"}
    assert machine.woken == ["drift", "drift"]


async def test_a_load_that_fails_in_an_unforeseen_way(tmp_path: Path, machine: Machine) -> None:
    """It is told of and tried again; the agent goes on."""
    machine.disk.file.save(OLD)
    machine.disk.failure = RuntimeError("can't start new thread")
    async with machine.running():
        assert machine.token == "unreadable"
        machine.see("2.12.0")
        machine.disk.failure = None
        await until(lambda: machine.store.snapshot.known.counts == {"torch": 1})


async def test_another_agent_s_directory(tmp_path: Path, machine: Machine) -> None:
    """It is not touched while the other one runs, and taken over, with what the other one left, when it has ended."""
    other = StateFile(tmp_path)
    assert other.claim() is None
    other.save(OLD)
    async with machine.running():
        assert machine.token == "in-use"
        machine.see("2.12.0")
        await until(lambda: machine.clock.now > EPOCH + 20)
        assert (machine.disk.saves, remembered(tmp_path)) == (0, {"torch": "2.11.0"})
        other.close()
        await until(lambda: remembered(tmp_path) == {"torch": "2.12.0"})
        assert machine.token is None
        assert machine.store.snapshot.known.counts == {"torch": 1}


async def test_a_directory_that_another_agent_leaves_just_now(tmp_path: Path, machine: Machine) -> None:
    """An agent that replaces another one may overlap with it for a moment; that is waited for."""
    other = StateFile(tmp_path)
    assert other.claim() is None
    other.save(OLD)
    threading.Timer(0.1, other.close).start()
    machine.keeper = machine.make(patience=10.0, handover=5.0)
    async with machine.running():
        machine.see("2.12.0")
        assert (machine.token, machine.store.snapshot.known.counts) == (None, {"torch": 1})


async def test_a_file_that_was_set_aside_stays_told_of(tmp_path: Path, machine: Machine) -> None:
    """That what was known is lost does not end with the next write."""
    machine.disk.file.save(OLD)
    (tmp_path / FOLDER / FILE).write_text("{")
    async with machine.running():
        machine.see("2.12.0")
        await until(lambda: remembered(tmp_path) == {"torch": "2.12.0"})
        assert machine.token == "set-aside"


async def test_a_stuck_probe_is_remembered_until_it_is_not(tmp_path: Path, machine: Machine) -> None:
    """It is published before the first round of the next agent, and forgotten when a round ends well."""
    machine.disk.file.save(State(stuck=(Stuck(probe="driver", where="nvmlInit", detail="It hangs.", since=5.0),)))
    async with machine.running():
        result = machine.store.snapshot.results["driver"]
        assert (result.stuck, result.where, result.failing_since) == (True, "nvmlInit", 5.0)
        machine.see("2.12.0")
        await until(lambda: StateFile(tmp_path).load(EPOCH)[0].stuck == ())
