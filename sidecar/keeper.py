"""Keeps the state file in step with what is known: read once at start, written when something changed.

The directory may be full, gone, another agent's, or on a file system that does not answer. None of that holds the
agent up or ends it; it is tried again, and what was remembered is never written over before it was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, MutableMapping
from typing import Protocol

import structlog

from sidecar.model import Clock, Result, Snapshot
from sidecar.offload import in_daemon_thread
from sidecar.probes.drift import STATE
from sidecar.state import State, StateError, StateProblem, Stuck
from sidecar.store import Store

_log = structlog.get_logger()

PATIENCE = 1.2
"""Seconds that start-up waits for the directory: one that hangs (a network file system) must not hold it up, nor an
end that is asked for meanwhile."""
RETRY = 30.0
"""Seconds after which what failed is tried again without a change that would give reason to."""
HANDOVER = 0.8
"""Seconds that the agent before may still hold the directory while it ends."""
_PAUSE = 1.0
"""Seconds between two writes: a round of all probes is one change, not six."""
_POLL = 0.1
_IN_USE = "in-use"
_LASTING = frozenset({"set-aside"})
"""What a write that succeeds does not end: a file that was set aside stays a fact of this run."""


class Disk(Protocol):
    """What `sidecar.state.StateFile` does. Every method blocks."""

    def claim(self) -> StateProblem | None:
        """Make it this agent's."""

    def close(self) -> None:
        """Leave it to others."""

    def load(self, now: float) -> tuple[State, StateProblem | None]:
        """Read it."""

    def save(self, state: State) -> StateProblem | None:
        """Write it, or raise StateError."""


class Keeper:
    """One per serving agent whose ``state_dir`` is set. ``memory`` is `Services.memory`, ``wake`` runs a probe."""

    def __init__(
        self,
        disk: Disk,
        store: Store,
        clock: Clock,
        *,
        memory: MutableMapping[str, object],
        wake: Callable[[str], None],
        patience: float = PATIENCE,
        retry: float = RETRY,
        handover: float = HANDOVER,
    ) -> None:
        self._disk = disk
        self._store = store
        self._clock = clock
        self._memory = memory
        self._wake = wake
        self._patience = patience
        self._retry = retry
        self._handover = handover
        self._saved = State()
        self._ours = False
        self._changed = asyncio.Event()
        self._opening: asyncio.Task[tuple[State, StateProblem | None]] | None = None
        self._writing: tuple[asyncio.Task[StateProblem | None], State] | None = None

    async def restore(self) -> None:
        """Go on from what was remembered, before any probe runs; without it, for now, if that takes too long."""
        state = await self._open()
        if state is not None:
            stuck: dict[str, Result[object]] = {
                one.probe: Result(
                    probe=one.probe, stuck=True, where=one.where, detail=one.detail, failing_since=one.since
                )
                for one in state.stuck
            }
            self._store.restore(state.known, stuck)
        self._store.subscribe(self._look)

    async def run(self) -> None:
        """Write what changed, until cancelled; then once more."""
        try:
            while not self._ours:
                await self._clock.sleep(self._retry)
                if (state := await self._open()) is not None:
                    self._store.resume(state.known)
            failed = False
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._retry if failed else None)
                self._changed.clear()
                failed = not await self._save()
                await self._clock.sleep(_PAUSE)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE):
                    # Twice where a write of something older was under way.
                    while self._ours and _state_of(self._store.snapshot) != self._saved and await self._save():
                        pass
            self._disk.close()

    def _look(self, _before: Snapshot, after: Snapshot) -> None:
        if _state_of(after) != self._saved:
            self._changed.set()

    # -- reading --------------------------------------------------------------------------------------

    async def _open(self) -> State | None:
        """Claim and read it. None while it is another agent's or does not answer."""
        if self._opening is None:
            now = self._clock.time()
            self._opening = asyncio.create_task(in_daemon_thread(lambda: self._claimed(now)))
        done, _ = await asyncio.wait({self._opening}, timeout=self._patience)
        if not done:
            self._tell(StateProblem("unreadable", "The state directory does not answer; it is waited for."))
            return None
        opening, self._opening = self._opening, None
        try:
            state, problem = opening.result()
        except Exception as error:  # noqa: BLE001 - no thread to be had, for one; a memory that fails ends nothing
            self._tell(StateProblem("unreadable", f"The state directory could not be looked at: {error}."))
            return None
        self._tell(problem)
        if problem is not None and problem.token == _IN_USE:
            return None
        self._ours = True
        self._saved = state
        return state

    def _claimed(self, now: float) -> tuple[State, StateProblem | None]:
        """Claim and read it. Blocks."""
        end = time.monotonic() + self._handover
        while (taken := self._disk.claim()) is not None:
            if time.monotonic() >= end:
                return State(), taken
            time.sleep(_POLL)
        return self._disk.load(now)

    # -- writing --------------------------------------------------------------------------------------

    async def _save(self) -> bool:
        """Write what is known now; False where that failed or did not end. Never two writes at once."""
        if self._writing is None:
            state = _state_of(self._store.snapshot)
            self._writing = (asyncio.create_task(in_daemon_thread(lambda: self._disk.save(state))), state)
        task, state = self._writing
        done, _ = await asyncio.wait({task}, timeout=self._patience)
        if not done:
            self._tell(StateProblem("unwritable", "The state directory does not answer; it is waited for."))
            return False
        self._writing = None
        try:
            problem = task.result()
        except StateError as error:
            self._tell(error.problem)
            return False
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(StateProblem("unwritable", f"The state could not be written: {error}."))
            return False
        self._saved = state
        if problem is not None or self._is_cured():
            self._tell(problem)
        self._look(self._store.snapshot, self._store.snapshot)  # what changed while it was written
        return problem is None

    def _tell(self, problem: StateProblem | None) -> None:
        before = self._memory.get(STATE)
        if problem == before:
            return
        self._memory[STATE] = problem
        self._wake("drift")
        if problem is not None:
            _log.warning("state not usable", reason=problem.token, message=problem.sentence)
        elif before is not None:
            _log.info("state usable again")

    def _is_cured(self) -> bool:
        """Whether a write that succeeded ends what was wrong."""
        problem = self._memory.get(STATE)
        return isinstance(problem, StateProblem) and problem.token not in _LASTING


def _state_of(snapshot: Snapshot) -> State:
    return State(
        known=snapshot.known,
        stuck=tuple(
            Stuck(
                probe=result.probe,
                where=result.where,
                detail=result.detail,
                since=result.failing_since or result.started_at or snapshot.taken_at,
            )
            for result in snapshot.results.values()
            if result.stuck
        ),
    )
