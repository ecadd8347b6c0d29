"""Clients of the NVML worker for tests: real workers, the compiled fake, and children that cannot be killed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from sidecar.isolation import Child, Isolation
from sidecar.nvml.client import NvmlClient
from tests.fakes.nvml import Scenario

MakeClient = Callable[..., NvmlClient]


@asynccontextmanager
async def nvml_clients(library: Path, scenario: Scenario, folder: Path) -> AsyncIterator[MakeClient]:
    """Give a function that makes clients of ``library``; at the end close them and see that no worker is left.

    ``folder`` holds what they take for /proc and /dev. The function's keywords are those of `NvmlClient`, and
    ``library`` for another one; ``environ`` is added to what the fake needs.
    """
    isolation = Isolation()
    clients: list[NvmlClient] = []

    def make(*, library: Path = library, environ: dict[str, str] | None = None, **more: Any) -> NvmlClient:
        client = NvmlClient(
            more.pop("isolation", isolation),
            environ={"PATH": os.defpath} | scenario.environ(library) | (environ or {}),
            proc=folder / "proc",
            dev=folder / "dev",
            **more,
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()
    await isolation.close()
    assert workers() == []


def workers() -> list[int]:
    """Find the pids of this process' children that are NVML workers."""
    return [
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and any("nvml/worker.py" in word for word in child.cmdline())
    ]


class Unkillable(Isolation):
    """An isolation on a machine where SIGKILL has no effect: its children are only declared stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Child] = []

    async def start(self, *args: Any, **more: Any) -> Child:
        """Start a child and remember it."""
        child = await super().start(*args, **more)
        self.started.append(child)
        return child

    async def stop(self, child: Child, *, grace: float = 0.0) -> int | None:
        """Fail to end a child, whatever ``grace`` it gets."""
        del grace
        child.stuck = True
        return None

    async def end(self) -> None:
        """End them all after all."""
        for child in self.started:
            await super().stop(child)
