"""Small, plain builders for the types that many tests need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sidecar.model import (
    Answer,
    Attempt,
    ConditionType,
    Feature,
    Finding,
    Gate,
    Outcome,
    Placement,
    Probe,
    Processes,
    Result,
    ServerView,
    Severity,
    Standing,
    Status,
    World,
)

EPOCH = 1_800_000_000.0
HOST = Standing(placement=Placement.HOST, placement_why="test", processes=Processes.SHARED, processes_why="test")


class FakeClock:
    """Time that moves only when the test says so."""

    def __init__(self, now: float = EPOCH) -> None:
        self.now = now
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - EPOCH

    async def sleep(self, seconds: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, waiter))
        await waiter

    async def advance(self, seconds: float) -> None:
        """Move on in the order in which sleepers wake, letting each run before the next."""
        end = self.now + seconds
        while True:
            await settle()
            self._sleepers = [(at, waiter) for at, waiter in self._sleepers if not waiter.done()]
            due = min((at for at, _ in self._sleepers if at <= end), default=None)
            if due is None:
                break
            self.now = max(self.now, due)
            for at, waiter in self._sleepers:
                if at <= self.now and not waiter.done():
                    waiter.set_result(None)
        self.now = end
        await settle()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def condition(code: str, **changes: Any) -> ConditionType:
    """A critical condition that gates serving and has no hold."""
    values: dict[str, Any] = {
        "severity": Severity.CRITICAL,
        "gate": Gate.SERVING,
        "title": f"Title of {code}",
        "when": "always",
        "remedy": f"Repair {code}.",
        "reasons": {"broken": "It is broken."},
        "hold": (1, 1),
    }
    return ConditionType(code=code, **{**values, **changes})


def finding(code: str, status: Status | bool | None, **changes: Any) -> Finding:
    """A finding; True, False and None stand for the three statuses."""
    if not isinstance(status, Status):
        status = {True: Status.TRUE, False: Status.FALSE, None: Status.UNKNOWN}[status]
    return Finding(code=code, status=status, **changes)


Facts = Mapping[str, Any]


def probe(name: str, *conditions: ConditionType, **changes: Any) -> Probe[Facts]:
    """A probe whose facts are a mapping of code -> True, False, None or a Finding."""

    async def collect(_services: Any) -> Facts:
        return {}

    def judge(result: Result[Facts], _world: World) -> Iterable[Finding]:
        for code, said in (result.facts or {}).items():
            if isinstance(said, Finding):
                yield said
            elif any(kind.code == code for kind in conditions):
                yield finding(code, said)

    values: dict[str, Any] = {
        "title": name,
        "interval": 10.0,
        "deadline": 5.0,
        "collect": collect,
        "judge": judge,
        "samples": lambda _facts: (),
        "families": (),
        "conditions": conditions,
    }
    return Probe(name=name, **{**values, **changes})


def server_probe(view: Callable[[Any], ServerView] = lambda facts: facts["view"]) -> Probe[Facts]:
    """A server probe whose facts carry the view to return under "view"."""
    return probe("server", view=view)


def view(
    answer: Answer | None = None,
    *,
    proof: bool = True,
    process: str | None = None,
    features: Mapping[Feature, bool] | None = None,
) -> ServerView:
    """What the judge may know of a server."""
    return ServerView(answer=answer, refusal_is_proof=proof, process=process, features=features or {})


def attempt(name: str, facts: Any = None, outcome: Outcome = Outcome.OK, **changes: Any) -> Attempt[Any]:
    """A finished run."""
    values: dict[str, Any] = {"started_at": EPOCH, "duration": 0.01}
    return Attempt(probe=name, outcome=outcome, facts=facts, **{**values, **changes})
