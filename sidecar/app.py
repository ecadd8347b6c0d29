"""The composition root: builds every part, starts and stops them in order."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import structlog

from sidecar import __version__
from sidecar.catalog import Catalog, build, discover
from sidecar.config import ImportPolicy, NvmlMode, Settings
from sidecar.environment import Environment
from sidecar.isolation import Isolation
from sidecar.model import Outcome, Probe, Severity, Snapshot
from sidecar.nvml.client import NvmlClient
from sidecar.scheduler import Scheduler
from sidecar.serverinfo import ServerClient
from sidecar.services import Services
from sidecar.store import Store, label
from sidecar.target import TargetFinder, stand

_log = structlog.get_logger()

DRAIN = 0.3
"""Seconds between saying "not ready" and closing: enough for one scrape or probe in flight."""
START_LIMIT = 5.0
"""Seconds after which /startupz passes whatever the first rounds do (design: endpoints)."""
FIRST_VERDICTS = ("driver", "packages", "flashinfer")
"""The probes whose first result /startupz waits for: the driver round and the static verdicts."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SystemClock:
    """The machine's own time."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class Agent:
    """Every part of a running agent. Use as an async context manager; leaving it ends every child."""

    settings: Settings
    catalog: Catalog
    clock: SystemClock
    services: Services
    store: Store
    scheduler: Scheduler
    stopping: bool = False
    started_at: float = 0.0

    @classmethod
    def create(
        cls,
        settings: Settings,
        *,
        once: bool = False,
        environ: Mapping[str, str] | None = None,
        proc: Path = Path("/proc"),
    ) -> Agent:
        """Build an agent; nothing runs yet. Needs a running event loop.

        ``once`` is for `check`. ``environ`` and ``proc`` are this machine's own unless a test puts others in their
        place.
        """
        environ = os.environ if environ is None else environ
        probes = tuple(
            replace(
                probe,
                interval=settings.intervals.get(probe.name, probe.interval),
                deadline=settings.deadlines.get(probe.name, probe.deadline),
            )
            for probe in discover()
        )
        # From here on both places tell the same: the effective values.
        settings = replace(
            settings,
            intervals={probe.name: probe.interval for probe in probes},
            deadlines={probe.name: probe.deadline for probe in probes},
        )
        catalog = build(probes)
        clock = SystemClock()
        standing = stand(settings, proc=proc, environ=environ)
        isolation = Isolation()
        targets = TargetFinder(settings, standing, clock, proc=proc, environ=environ)
        services = Services(
            settings=settings,
            clock=clock,
            standing=standing,
            isolation=isolation,
            nvml=NvmlClient(isolation, environ=environ, proc=proc, oneshot=settings.nvml is NvmlMode.ONESHOT),
            targets=targets,
            server=ServerClient(settings, clock),
            environment=Environment(
                isolation, clock, settings, placement=standing.placement, proc=proc, environ=environ
            ),
            wake=lambda name: scheduler.wake(name),  # noqa: PLW0108 - the scheduler is made below
        )
        store = Store(
            catalog.probes,
            standing=standing,
            settings=settings,
            required=required_codes(catalog, settings),
            clock=clock,
            lifetimes={
                # Whoever looks once waits for an import of minutes if need be; nothing expires meanwhile.
                probe.name: math.inf if once else 3 * probe.interval + probe.deadline
                for probe in probes
            },
            on_fault=lambda probe, error: _log.error("judge failed", probe=probe, exc_info=error),
        )
        scheduler = Scheduler(
            catalog.probes,
            services=services,
            publish=store.publish,
            clock=clock,
        )
        return cls(
            settings=settings,
            catalog=catalog,
            clock=clock,
            services=services,
            store=store,
            scheduler=scheduler,
            started_at=clock.monotonic(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.services.environment.close()
        await self.services.nvml.close()
        await self.services.server.close()
        await self.services.isolation.close()

    # -- what the web side asks ---------------------------------------------------------------------

    def alive(self) -> str | None:
        """None while the scheduler makes progress, else a token-like reason."""
        return self.scheduler.alive()

    def started(self) -> str | None:
        """None once the first verdicts are there or `START_LIMIT` passed, else what is waited for."""
        if self.clock.monotonic() - self.started_at >= START_LIMIT:
            return None
        results = self.store.snapshot.results
        for name in FIRST_VERDICTS:
            if name in results and results[name].outcome is Outcome.PENDING:
                return f"{name}-pending"
        return None

    # -- the two ways to run -----------------------------------------------------------------------

    async def check(self) -> Snapshot:
        """Run every probe once, wait for an import that was started, and return the final snapshot."""
        await asyncio.gather(*(self._once(probe) for probe in self.catalog.probes))
        if await self.services.environment.wait_import():
            probe = next(probe for probe in self.catalog.probes if probe.name == "flashinfer")
            await self._once(probe)
        return self.store.snapshot

    async def _once(self, probe: Probe[Any]) -> None:
        self.store.publish(await self.scheduler.attempt(probe))

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises `sidecar.web.ListenError` for an address that cannot be had."""
        # Here: a check needs neither, and would pay for them with a tenth of its time.
        from sidecar.exposition import Exposition
        from sidecar.web import Web, bind

        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            if stop.is_set():
                os._exit(128 + number)  # asked twice: whatever still hangs is not waited for
            self.stopping = True
            stop.set()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        sockets = bind(self.settings.listen)
        web = Web(self.store, Exposition(self.catalog), self.catalog, state=self)
        async with AsyncExitStack() as stack:
            await web.start(sockets)
            stack.push_async_callback(web.stop)
            addresses = [f"{name[0]}:{name[1]}" for name in (sock.getsockname() for sock in sockets)]
            _log.info(
                "listening",
                addresses=addresses,
                version=__version__,
                placement=self.services.standing.placement.value,
                processes=self.services.standing.processes.value,
            )
            self.store.subscribe(log_transitions)
            work = [
                loop.create_task(self.scheduler.run(), name="scheduler"),
                loop.create_task(self._expire(), name="expiry"),
            ]
            stopper = loop.create_task(stop.wait(), name="stop")
            try:
                done, _ = await asyncio.wait({*work, stopper}, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopper}:
                    task.result()  # a loop that ended is a bug: let it end the process, so that it is restarted
                _log.info("stopping")
                await self.clock.sleep(DRAIN)
            finally:
                for task in (*work, stopper):
                    task.cancel()
                await asyncio.wait(work, timeout=1.0)

    async def _expire(self) -> None:
        """Publish anew when facts reach the end of their life without a probe that says so."""
        while True:
            at = self.store.next_expiry()
            now = self.clock.monotonic()
            if at is not None and at <= now:
                self.store.refresh()
                continue
            await self.clock.sleep(1.0 if at is None else min(max(at - now, 0.05), 5.0))


def required_codes(catalog: Catalog, settings: Settings) -> frozenset[str]:
    """The condition codes that ``require`` stands for: features are spelled out, codes are themselves."""
    codes: set[str] = set()
    for name in settings.require:
        codes.update(catalog.requirable.get(name, (name,)))
    return frozenset(codes)


def log_transitions(before: Snapshot, after: Snapshot) -> None:
    """Log what changed between two snapshots, and nothing else."""
    for code, condition in after.conditions.items():
        was, is_ = label(before.conditions[code]), label(condition)
        if was == is_ or "active" not in (was, is_):
            continue
        if condition.active:
            tell = _log.info if condition.severity is Severity.INFO else _log.warning
            tell(
                "condition active",
                code=code,
                severity=condition.severity.value,
                reason=condition.reason,
                message=condition.message,
                remedy=condition.remedy,
            )
        else:
            _log.info("condition cleared", code=code, now=is_, reason=condition.reason)
    for name, result in after.results.items():
        previous = before.results[name].outcome
        if result.outcome is not previous and not (
            previous is Outcome.PENDING and result.outcome in (Outcome.OK, Outcome.SKIPPED)
        ):
            _log.info(
                "probe outcome", probe=name, before=previous.value, now=result.outcome.value, detail=result.detail
            )
    if before.verdict.ready != after.verdict.ready:
        _log.info("readiness", ready=after.verdict.ready, blockers=list(after.verdict.blockers))


async def serve(settings: Settings) -> None:
    """Run the agent until it is told to stop."""
    async with Agent.create(settings) as agent:
        await agent.serve()


async def check(settings: Settings) -> tuple[Snapshot, Catalog]:
    """Run every probe once and judge."""
    if "import" not in settings.explicit:
        # Someone asked and waits: unless told otherwise, prove it by a real import.
        settings = replace(settings, import_policy=ImportPolicy.ALWAYS)
    task = asyncio.current_task()
    assert task is not None
    for number in STOP_SIGNALS:
        # Cancelled rather than killed: children and their folders are gone afterwards.
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    async with Agent.create(settings, once=True) as agent:
        return await agent.check(), agent.catalog
