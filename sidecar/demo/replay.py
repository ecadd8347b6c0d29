"""The agent's edges in a demo: each gives what was recorded for the moment that it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.demo import BASELINE, PROC, Moment, Recording
from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence, ImportWork
from sidecar.isolation import Isolation
from sidecar.model import Clock, Target
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.processes import ServerProcesses
from sidecar.serverinfo import Problem, ServerInfo, ServerObservation
from sidecar.services import Services

INTERVAL = 2.0
"""Seconds between the rounds of every probe: nothing is asked, and nobody wants to wait for a minute."""
NOT_LOOKED_AT: Final = frozenset(
    {
        "placement", "image", "processes", "server_url", "server_key_file", "server_ca_file", "server_pid",
        "server_pattern", "server_python", "server_root", "gpus", "gpus_expected", "nvml", "import",
        "import_with_devices", "baseline", "state_dir", "intervals", "deadlines",
    }
)  # fmt: skip
"""Settings that say where to look, and how: of no effect in a demo."""
_PERIOD = 90.0
"""Seconds in which the load of a GPU rises and falls."""
_MOST_POWER = 610.0
_WARMEST = 67.0
_COOLEST = 34.0
"""Watts and degrees Celsius of an H200 under load, and of one without."""


def settings_for(settings: Settings) -> Settings:
    """The settings of a demo: where to listen, how to log and how to judge are the user's, the rest is the demo's."""
    plain = Settings()
    return replace(
        settings,
        server_url=plain.server_url,
        server_key_file=None,
        server_ca_file=None,
        server_pid=None,
        server_pattern=None,
        server_python=None,
        server_root=None,
        gpus=(),
        gpus_expected=None,
        state_dir=None,
        baseline=BASELINE,
        launch=(),
        intervals={},
        deadlines={},
    )


class Player:
    """Tells which moment it is; ``frozen`` is for who looks once, and sees how it ends. One per agent."""

    def __init__(self, recording: Recording, clock: Clock, *, frozen: bool) -> None:
        ahead = recording.moments[-1][0] if frozen else 0.0
        start = clock.time() - ahead
        self._clock = clock
        self._begun = clock.monotonic() - ahead
        self._moments = tuple((begins, moment.moved(start)) for begins, moment in recording.moments)

    @property
    def seconds(self) -> float:
        """How long the demo has run."""
        return self._clock.monotonic() - self._begun

    @property
    def now(self) -> Moment:
        """What the edges give now."""
        passed = self.seconds
        return next(moment for begins, moment in reversed(self._moments) if begins <= passed)


class _Nvml:
    """GPUs. Their load is made up: those of the recording had none."""

    def __init__(self, player: Player, clock: Clock) -> None:
        self._player = player
        self._clock = clock
        self._latest: NvmlReading | None = None
        self._latest_at: float | None = None

    @property
    def latest(self) -> NvmlReading | None:
        return self._latest

    @property
    def latest_at(self) -> float | None:
        return self._latest_at

    async def round(self, _deadline: float) -> NvmlReading:
        moment = self._player.now
        loaded = moment.observation.status is not None
        reading = moment.nvml
        if loaded:
            reading = replace(reading, gpus=tuple(_busy(gpu, self._player.seconds) for gpu in reading.gpus))
        self._latest, self._latest_at = reading, self._clock.time()
        return reading

    async def close(self) -> None:
        """Nothing runs."""


def _busy(gpu: GpuReading, seconds: float) -> GpuReading:
    """A GPU that serves requests, more and fewer of them in turn."""
    if gpu.code != 0 or gpu.utilization is None or gpu.power is None:
        return gpu
    share = 0.55 + 0.4 * math.sin(2 * math.pi * (seconds / _PERIOD + gpu.index / 5))
    return replace(
        gpu,
        utilization=round(share, 2),
        power=round(gpu.power + share * (_MOST_POWER - gpu.power), 3),
        temperature=round(_COOLEST + share * (_WARMEST - _COOLEST)),
    )


class _Targets:
    proc: Path = PROC

    def __init__(self, player: Player) -> None:
        self._player = player

    async def find(self) -> Target:
        return self._player.now.target

    def with_sglang(self, _target: Target) -> str | None:
        return None


class _Server:
    def __init__(self, player: Player) -> None:
        self._player = player

    @property
    def observation(self) -> ServerObservation | None:
        return self._player.now.observation

    @property
    def problem(self) -> Problem | None:
        return self._player.now.info_problem

    async def observe(self, _target: Target) -> ServerObservation:
        return self._player.now.observation

    async def info(self, _target: Target) -> ServerInfo | None:
        return self._player.now.info

    async def close(self) -> None:
        """Nothing runs."""


class _Processes:
    def __init__(self, player: Player) -> None:
        self._player = player

    async def read(self, _target: Target) -> ServerProcesses | None:
        return self._player.now.processes


class _Environment:
    def __init__(self, player: Player) -> None:
        self._player = player

    async def read(self, _target: Target) -> EnvironmentFacts:
        return self._player.now.environment

    async def close(self) -> None:
        """Nothing runs."""


class _Imports:
    """Imports that are all over: none is ever due."""

    stage: str | None = None

    def __init__(self, player: Player) -> None:
        self._player = player

    def importing(self, _work: ImportWork) -> bool:
        return False

    def evidence(self, work: ImportWork, _facts: EnvironmentFacts, _target: Target) -> ImportEvidence | None:
        return self._player.now.imports.get(work.module)

    def broken_start(self, _facts: EnvironmentFacts, _target: Target) -> ImportEvidence | None:
        return None

    def due(self, _work: ImportWork, _facts: EnvironmentFacts, _target: Target) -> bool:
        return False

    def request(self, work: ImportWork, facts: EnvironmentFacts, target: Target, done: Callable[[], None]) -> None:
        """Nothing is ever started."""

    async def wait(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing runs."""


def services(
    recording: Recording, *, settings: Settings, clock: Clock, wake: Callable[[str], None], frozen: bool
) -> Services:
    """Everything that probes may use, from a recording. ``frozen`` shows how it ends."""
    player = Player(recording, clock, frozen=frozen)
    return Services(
        settings=settings,
        clock=clock,
        standing=recording.moments[-1][1].standing,
        isolation=Isolation(),
        nvml=_Nvml(player, clock),
        targets=_Targets(player),
        server=_Server(player),
        processes=_Processes(player),
        environment=_Environment(player),
        imports=_Imports(player),
        wake=wake,
    )
