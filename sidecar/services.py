"""What a probe's ``collect`` may use: the agent's edges to the outside, passed in so that others can stand there.

The protocols say what probes and the agent ask of each edge. The machine's own are `sidecar.nvml.client.NvmlClient`,
`sidecar.target.TargetFinder`, `sidecar.serverinfo.ServerClient`, `sidecar.processes.ProcessReader`,
`sidecar.environment.Environment` and `sidecar.imports.Importer`; a demo has recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct, field

from sidecar.config import Settings
from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence, ImportWork
from sidecar.isolation import Isolation
from sidecar.model import Clock, Standing, Target
from sidecar.nvml.reading import NvmlReading
from sidecar.processes import ServerProcesses
from sidecar.serverinfo import Problem, ServerInfo, ServerObservation


class Nvml(Protocol):
    """Where the GPUs are read."""

    @property
    def latest(self) -> NvmlReading | None:
        """What the last round that was answered found."""

    @property
    def latest_at(self) -> float | None:
        """When `latest` was found, in epoch seconds."""

    async def round(self, deadline: float) -> NvmlReading:
        """Ask once, for ``deadline`` seconds at most. Raises ProbeTimeout and ProbeCrash."""

    async def close(self) -> None:
        """End what is running."""


class Targets(Protocol):
    """Where the server is looked for. ``proc`` is the /proc that is looked into."""

    @property
    def proc(self) -> Path:
        """The /proc that is looked into, for probes that look there too."""

    async def find(self) -> Target:
        """The server as it is now. Never raises for a server that is absent or may not be read."""

    def with_sglang(self, target: Target) -> str | None:
        """An interpreter of this image, another than the target's, that has SGLang."""


class Server(Protocol):
    """Who asks the server over HTTP."""

    @property
    def observation(self) -> ServerObservation | None:
        """What the address did when it was last tried."""

    @property
    def problem(self) -> Problem | None:
        """Why the last request for the server's information failed, if it did."""

    async def observe(self, target: Target) -> ServerObservation:
        """Try the address."""

    async def info(self, target: Target) -> ServerInfo | None:
        """The server's arguments as it resolved them; None while they are not known."""

    async def close(self) -> None:
        """End what is running."""


class ServerProcessReader(Protocol):
    """Who reads the server's processes."""

    async def read(self, target: Target) -> ServerProcesses | None:
        """The server's processes, None where none can be seen."""


class EnvironmentReader(Protocol):
    """Who reads the server's packages."""

    async def read(self, target: Target) -> EnvironmentFacts:
        """Read the environment. Raises Skip, ProbeTimeout and ProbeCrash."""

    async def close(self) -> None:
        """End what is running."""


class Imports(Protocol):
    """Who runs real imports; see `sidecar.imports.Importer`."""

    @property
    def stage(self) -> str | None:
        """The step that the import under way has reached; None while there is none."""

    def importing(self, work: ImportWork) -> bool:
        """Whether this import is under way or waiting for its turn."""

    def evidence(self, work: ImportWork, facts: EnvironmentFacts, target: Target) -> ImportEvidence | None:
        """The outcome of the last import in exactly this environment; None if there was none yet."""

    def broken_start(self, facts: EnvironmentFacts, target: Target) -> ImportEvidence | None:
        """What an import showed of an interpreter that does not start."""

    def due(self, work: ImportWork, facts: EnvironmentFacts, target: Target) -> bool:
        """Whether an import would tell something new."""

    def request(self, work: ImportWork, facts: EnvironmentFacts, target: Target, done: Callable[[], None]) -> None:
        """Start an import in the background; ``done`` is called at its end."""

    async def wait(self) -> bool:
        """Wait for the imports that are running or waiting; False when there are none."""

    async def close(self) -> None:
        """End what is running."""


_LAUNCH: Final = "launch"


class Services(Struct, frozen=True, kw_only=True):
    """One per agent. ``wake(probe)`` asks the scheduler to run a probe now, for late results.

    ``memory`` is where a probe keeps what it must remember from one round to the next, under its own name.
    """

    settings: Settings
    clock: Clock
    standing: Standing
    isolation: Isolation
    nvml: Nvml
    targets: Targets
    server: Server
    processes: ServerProcessReader
    environment: EnvironmentReader
    imports: Imports
    wake: Callable[[str], None]
    memory: dict[str, object] = field(default_factory=dict)

    def imported(self, probe: str) -> None:
        """Let those look again whom the end of a probe's import concerns."""
        self.wake(probe)
        # An interpreter that does not start is met by whichever import comes first.
        self.wake(_LAUNCH)


_DRIVER: Final = "driver"
_DRIVER_INTERVAL: Final = 10.0
_DRIVER_DEADLINE: Final = 5.0
"""The driver probe's name and what it has unless configured: its reading lives as long elsewhere as there."""
_DRIVER_WAIT: Final = 6.0
_DRIVER_POLL: Final = 0.05
"""Seconds: the driver probe's deadline and a little, and how often to look whether its first round has ended."""


async def driver_reading(services: Services) -> NvmlReading | None:
    """Take the last reading of NVML while it lives; at start, when all probes run at once, wait for the first one."""
    until = services.clock.monotonic() + _DRIVER_WAIT
    while services.nvml.latest is None and services.clock.monotonic() < until:
        await services.clock.sleep(_DRIVER_POLL)
    interval = services.settings.intervals.get(_DRIVER, _DRIVER_INTERVAL)
    life = 3 * interval + services.settings.deadlines.get(_DRIVER, _DRIVER_DEADLINE)
    found_at = services.nvml.latest_at
    alive = found_at is not None and services.clock.monotonic() - found_at <= life
    return services.nvml.latest if alive else None
