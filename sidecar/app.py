"""The composition root: builds every part, starts and stops them in order."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog
from msgspec import Struct
from msgspec.structs import replace

from sidecar import __version__, progress
from sidecar.catalog import FIRST_ROUND, Catalog, build, discover
from sidecar.conditions import Overrides
from sidecar.config import ImportPolicy, Listen, NvmlMode, Settings
from sidecar.credentials import Credentials
from sidecar.demo import Recording, load, replay
from sidecar.environment import Environment
from sidecar.imports import Importer
from sidecar.isolation import Isolation
from sidecar.keeper import Keeper
from sidecar.memory import MemoryLimit
from sidecar.model import Clock, Outcome, Placement, Probe, Severity, Snapshot
from sidecar.nvml.client import NvmlClient
from sidecar.processes import ProcessReader
from sidecar.scheduler import Scheduler
from sidecar.serverinfo import ServerClient
from sidecar.services import Services
from sidecar.state import StateFile
from sidecar.store import Store, change, label
from sidecar.target import TargetFinder, stand

if TYPE_CHECKING:
    from sidecar.access import Access

_log = structlog.get_logger()

DRAIN = 0.3
"""Seconds between saying "not ready" and closing: enough for one scrape or probe in flight."""
START_LIMIT = 5.0
"""Seconds after which /startupz passes whatever the first rounds do (design: endpoints)."""
FIRST_VERDICTS = ("driver", "packages", "flashinfer")
"""The probes whose first result /startupz waits for: the driver round and the static verdicts."""


LAST_PORT = 65535
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StoppedError(Exception):
    """A signal ended a check before it was done. ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


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


class Agent(Struct):
    """Every part of a running agent. Use as an async context manager; leaving it ends every child."""

    settings: Settings
    catalog: Catalog
    clock: Clock
    services: Services
    store: Store
    scheduler: Scheduler
    stop: asyncio.Event
    started_at: float = 0.0

    @classmethod
    def create(
        cls,
        settings: Settings,
        *,
        once: bool = False,
        environ: Mapping[str, str] | None = None,
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        demo: Recording | None = None,
        stop: asyncio.Event | None = None,
        clock: Clock | None = None,
    ) -> Agent:
        """Build an agent; nothing runs yet. Needs a running event loop.

        ``once`` is for `check`. ``environ``, ``proc``, ``dev`` and ``clock`` are this machine's own unless a test
        puts others in their place. ``demo`` is looked at instead of this machine. ``stop`` is set by whoever wants it
        to end.
        """
        environ = os.environ if environ is None else environ
        if demo is not None:
            settings = replay.settings_for(settings)
        probes = tuple(
            replace(
                probe,
                interval=settings.intervals.get(probe.name, probe.interval if demo is None else replay.INTERVAL),
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
        clock = clock or SystemClock()

        def wake(name: str) -> None:
            scheduler.wake(name)  # made below

        if demo is None:
            services = _of_this_machine(settings, clock, wake, environ=environ, proc=proc, dev=dev)
        else:
            services = replay.services(demo, settings=settings, clock=clock, wake=wake, frozen=once)
        store = Store(
            catalog.probes,
            standing=services.standing,
            settings=settings,
            required=required_codes(catalog, settings),
            clock=clock,
            lifetimes={
                # Whoever looks once waits for an import of minutes if need be; nothing expires meanwhile.
                probe.name: math.inf if once else 3 * probe.interval + probe.deadline
                for probe in probes
            },
            overrides=Overrides.of(settings),
            observe=catalog.observed,
            demo=None if demo is None else demo.demo,
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
            stop=stop or asyncio.Event(),
            started_at=clock.monotonic(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.services.imports.close()
        await self.services.environment.close()
        await self.services.nvml.close()
        await self.services.server.close()
        await self.services.isolation.close()

    # -- what the web side asks ---------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """True once the process was told to end."""
        return self.stop.is_set()

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
        await self.services.imports.wait()
        # An import may have ended while another probe was still busy: then nothing is left to wait for.
        if woken := [probe for probe in self.catalog.probes if self.scheduler.woken(probe.name)]:
            # And it may outlast the driver's reading, by which others judge the GPUs.
            await self._once(self.catalog.by_name[FIRST_ROUND])
            await asyncio.gather(*map(self._once, woken))
        return self.store.snapshot

    async def _once(self, probe: Probe[Any]) -> None:
        self.store.publish(await self.scheduler.attempt(probe))

    async def serve(self, sockets: Sequence[socket.socket], access: Access | None = None) -> None:
        """Serve on listening sockets until `stop` is set. They are closed at the end.

        ``access`` says who may ask for what; None: everybody for everything.
        """
        # Here: a check needs neither, and would pay for them with a tenth of its time.
        from sidecar.exposition import Exposition
        from sidecar.web import Web

        loop = asyncio.get_running_loop()
        exposition = Exposition(self.catalog, more=tuple if access is None else access.samples)
        web = Web(self.store, exposition, self.catalog, state=self, access=access)
        async with AsyncExitStack() as stack:
            await web.start(sockets)
            stack.push_async_callback(web.stop)
            addresses = [_shown(sock.getsockname()) for sock in sockets]
            _log.info(
                "listening",
                addresses=addresses,
                tls=access is not None and access.context is not None,
                version=__version__,
                placement=self.services.standing.placement.value,
                processes=self.services.standing.processes.value,
            )
            self.store.subscribe(log_transitions)
            work = []
            if self.settings.state_dir is not None:
                keeper = self._keeper(self.settings.state_dir)
                # Before the first result: what was known is what that is compared with.
                await keeper.restore()
                work.append(loop.create_task(keeper.run(), name="keeper"))
            work += [
                loop.create_task(self.scheduler.run(), name="scheduler"),
                loop.create_task(self._expire(), name="expiry"),
            ]
            if access is not None:
                work.append(loop.create_task(access.watch(self.clock), name="access"))
            stopper = loop.create_task(self.stop.wait(), name="stop")
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

    def _keeper(self, directory: str) -> Keeper:
        return Keeper(
            StateFile(Path(directory), on_host=self.services.standing.placement is Placement.HOST),
            self.store,
            self.clock,
            memory=self.services.memory,
            wake=self.scheduler.wake,
        )

    async def _expire(self) -> None:
        """Publish anew when facts reach the end of their life without a probe that says so."""
        while True:
            at = self.store.next_expiry()
            now = self.clock.monotonic()
            if at is not None and at <= now:
                self.store.refresh()
                continue
            await self.clock.sleep(1.0 if at is None else min(max(at - now, 0.05), 5.0))


def _shown(address: tuple[Any, ...]) -> str:
    """An address as a URL has it."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def on_host(placement: Placement | None) -> bool:
    """Whether the agent runs on a host, among other users; None is found out."""
    return stand(Settings(placement=placement)).placement is Placement.HOST


def required_codes(catalog: Catalog, settings: Settings) -> frozenset[str]:
    """The condition codes that ``require`` stands for: features are spelled out, codes are themselves."""
    codes: set[str] = set()
    for name in settings.require:
        codes.update(catalog.requirable.get(name, (name,)))
    return frozenset(codes)


def log_transitions(before: Snapshot, after: Snapshot) -> None:
    """Log what changed between two snapshots, and nothing else."""
    for code, condition in after.conditions.items():
        if change(before.conditions[code], condition) is None:
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
            _log.info("condition cleared", code=code, now=label(condition), reason=condition.reason)
    for name, result in after.results.items():
        previous = before.results[name].outcome
        if result.outcome is not previous and not (
            previous is Outcome.PENDING and result.outcome in (Outcome.OK, Outcome.SKIPPED)
        ):
            tell = _log.info if result.outcome in (Outcome.OK, Outcome.SKIPPED) else _log.warning
            tell("probe outcome", probe=name, before=previous.value, now=result.outcome.value, detail=result.detail)
    if (before.verdict.pending, before.verdict.ready) != (after.verdict.pending, after.verdict.ready):
        _log.info("readiness", ready=after.verdict.ready, blockers=list(after.verdict.blockers))


async def serve(settings: Settings, demo: str | None = None) -> None:
    """Run the agent until SIGTERM, SIGINT or SIGHUP; in a demo one for each replica of the scenario.

    Raises `sidecar.web.ListenError` for an address that cannot be had, `sidecar.access.AccessError` for a file that
    cannot be used, `sidecar.demo.UnknownScenarioError`.
    """
    from sidecar.access import Access  # a check is faster without the HTTP server and what belongs to it
    from sidecar.web import bind

    recordings: tuple[Recording | None, ...] = (None,) if demo is None else load(demo)
    stop = _stop_on_signals()
    access = None
    if settings.tls_cert_file is not None or settings.token_file is not None:
        access = Access(settings, on_host=on_host(settings.placement))
        await access.start()
    async with AsyncExitStack() as stack:
        running = []
        for number, recording in enumerate(recordings):
            sockets = bind(tuple(_shifted(one, number) for one in settings.listen))
            for one in sockets:
                stack.callback(one.close)
            agent = await stack.enter_async_context(Agent.create(settings, demo=recording, stop=stop))
            running.append((agent, sockets, recording))
        async with asyncio.TaskGroup() as group:
            for agent, sockets, recording in running:
                group.create_task(_serve_one(agent, sockets, recording, access))


async def _serve_one(
    agent: Agent, sockets: Sequence[socket.socket], recording: Recording | None, access: Access | None
) -> None:
    if recording is not None:
        shown = recording.demo
        structlog.contextvars.bind_contextvars(demo=shown.scenario)
        if shown.replica is not None:
            structlog.contextvars.bind_contextvars(replica=shown.replica)
        _log.warning("this is a demo: what is shown was recorded, and nothing of this machine", shows=shown.shows)
    await agent.serve(sockets, access)


def _shifted(listen: Listen, number: int) -> Listen:
    """The address of a replica: the same host, and as many ports further; the kernel's choice stays its choice."""
    if not listen.port or not number:
        return listen
    if listen.port + number > LAST_PORT:
        from sidecar.web import ListenError  # a check is faster without the HTTP server

        raise ListenError(
            f"replica {number + 1} of the demo would listen on port {listen.port + number}, and ports end at "
            f"{LAST_PORT}; set `listen` to a lower port"
        )
    return replace(listen, port=listen.port + number)


def _stop_on_signals() -> asyncio.Event:
    """Give an event that is set when the process is told to end."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)  # asked twice: whatever still hangs is not waited for
        stop.set()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


def _of_this_machine(
    settings: Settings,
    clock: Clock,
    wake: Callable[[str], None],
    *,
    environ: Mapping[str, str],
    proc: Path,
    dev: Path,
) -> Services:
    """The edges to the machine that the agent runs on."""
    standing = stand(settings, proc=proc, environ=environ)
    isolation = Isolation()
    credentials = Credentials(proc=proc, environ=environ)
    return Services(
        settings=settings,
        clock=clock,
        standing=standing,
        isolation=isolation,
        nvml=NvmlClient(isolation, environ=environ, proc=proc, dev=dev, oneshot=settings.nvml is NvmlMode.ONESHOT),
        targets=TargetFinder(settings, standing, clock, proc=proc, environ=environ),
        server=ServerClient(settings, clock),
        processes=ProcessReader(clock, proc=proc),
        environment=Environment(isolation, clock, settings, credentials),
        imports=Importer(
            isolation,
            clock,
            credentials,
            placement=standing.placement,
            with_devices=settings.import_with_devices,
            memory=MemoryLimit(proc=proc),
        ),
        wake=wake,
    )


async def check(settings: Settings, demo: str | None = None) -> tuple[Snapshot, Catalog]:
    """Run every probe once and judge; in a demo, how its first replica ends.

    Raises `UnknownScenarioError`, and `StoppedError` after SIGTERM, SIGINT or SIGHUP.
    """
    recording = None if demo is None else load(demo)[0]
    if "import" not in settings.explicit:
        # Someone asked and waits: unless told otherwise, prove it by a real import.
        settings = replace(settings, import_policy=ImportPolicy.ALWAYS)
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def on_signal(number: signal.Signals) -> None:
        # Cancelled rather than killed: children and their folders are gone afterwards.
        received.append(number)
        task.cancel()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        async with Agent.create(settings, once=True, demo=recording) as agent:
            return await _watched(agent), agent.catalog
    except asyncio.CancelledError:
        if not received:
            raise
        raise StoppedError(received[0]) from None


async def _watched(agent: Agent) -> Snapshot:
    """What a check finds; a terminal shows meanwhile what it waits for."""

    def waiting_for() -> list[str]:
        results = agent.store.snapshot.results.values()
        return [result.probe for result in results if result.outcome is Outcome.PENDING]

    imports = agent.services.imports
    async with progress.shown(
        sys.stderr, waiting_for, lambda: imports.stage, lambda: shutil.get_terminal_size().columns
    ):
        return await agent.check()
