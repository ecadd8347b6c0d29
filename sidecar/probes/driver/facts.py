"""What one round of the probe found, and what it remembers from one round to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from sidecar.config import Settings
from sidecar.gpuset import CountSource, Expected, GpuSet, Member, Pins, expected_gpus, mig_parents, server_gpus
from sidecar.model import Placement, Standing, Target
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.probes.driver.declare import DEADLINE, GPU_HUNG, NAME, NO_PERMISSION, SUCCESS
from sidecar.serverinfo import ServerInfo
from sidecar.services import Services

LOADED: Final = 0.5
"""Utilization, 0 to 1, from which on a GPU counts as under load: its PCIe link is then at full speed."""
DEGRADED_ROUNDS: Final = 2
"""Rounds under load with a slow PCIe link that make it degraded."""
_SERVER_WAIT: Final = 1.0
"""Seconds that the search for the server may outlast NVML: the round must not wait for a server that hangs."""
_NO_DRIVER: Final = (9, 12, 18)
"""Codes after which a working NVML means that the driver was loaded anew."""
_MAX_REMEMBERED: Final = 256
"""GPUs that are remembered. No machine has as many."""


class Gone(Struct, frozen=True, kw_only=True):
    """A GPU that was visible earlier in the life of this agent and is no more; ``index`` is the last it had."""

    index: int
    uuid: str


class Trend(Struct, frozen=True, kw_only=True):
    """What the agent saw happen to one GPU.

    ``new_errors`` and ``new_remaps`` count the uncorrectable memory errors and the rows remapped for such errors
    since the agent first saw the GPU. ``pcie_degraded`` holds until the link is seen at full speed under load.
    ``healed_at`` is when the driver withdrew a recovery that it had asked for (epoch seconds, 0 for never): what was
    reported before that is settled.
    """

    new_errors: int = 0
    new_remaps: int = 0
    pcie_degraded: bool = False
    healed_at: float = 0.0


class DriverFacts(Struct, frozen=True, kw_only=True):
    """One round.

    ``expected`` is how many GPUs the server needs here. ``highest`` is the most that were visible at once.
    ``vanished`` were visible earlier; ``unseen`` belong to the server and never were. ``assumed`` are indices of
    GPUs without a known uuid that can only be members of the set. ``unanswering`` belong to the server and can only
    be among several GPUs that neither answer nor have a known uuid. ``trends`` is keyed by `key`. ``loaded_at`` is when
    the driver came back, in epoch seconds, 0 where it was there from the start. ``detail`` asks for all families.
    """

    reading: NvmlReading
    gpu_set: GpuSet = field(default_factory=lambda: GpuSet(known=False, why="Nothing is known of the server."))
    expected: Expected | None = None
    highest: int = 0
    vanished: tuple[Gone, ...] = ()
    unseen: tuple[Member, ...] = ()
    assumed: frozenset[int] = frozenset()
    unanswering: tuple[Member, ...] = ()
    trends: Mapping[str, Trend] = field(default_factory=dict)
    loaded_at: float = 0.0
    detail: bool = False

    def in_scope(self, index: int | None, uuid: str | None) -> bool | None:
        """Whether a GPU is the server's; None while that is not known.

        A GPU without a known uuid may be any of the server's that no other one is.
        """
        held = self.gpu_set.holds(index, uuid)
        if held is not False or uuid is not None:
            return held
        if index in self.assumed:
            return True
        return None if _not_shown(self.gpu_set, self.reading) else False

    def trend(self, index: int, uuid: str | None) -> Trend:
        """What was seen to happen to a GPU."""
        return self.trends.get(key(index, uuid), Trend())


def _not_shown(gpu_set: GpuSet, reading: NvmlReading) -> tuple[Member, ...]:
    """The server's GPUs that NVML shows neither by their uuid nor, where that is not known, by their index."""
    uuids = {gpu.uuid for gpu in reading.gpus}
    indices = {gpu.index for gpu in reading.gpus}
    return tuple(one for one in gpu_set.gpus if (one.uuid not in uuids if one.uuid else one.index not in indices))


def key(index: int, uuid: str | None) -> str:
    """Name a GPU for a memory: by its uuid, by its index while that is not known."""
    return uuid or f"#{index}"


class _History(Struct):
    """What is remembered of one GPU."""

    errors: int | None = None
    remaps: int | None = None
    new_errors: int = 0
    new_remaps: int = 0
    slow_rounds: int = 0
    pcie_degraded: bool = False
    recovery: bool = False
    healed_at: float = 0.0

    def fold(self, gpu: GpuReading, now: float) -> None:
        self.new_errors, self.errors = _growth(self.new_errors, self.errors, gpu.ecc_uncorrected)
        remaps = None if gpu.remapped_rows is None else gpu.remapped_rows.uncorrectable
        self.new_remaps, self.remaps = _growth(self.new_remaps, self.remaps, remaps)
        if (slow := slow_link(gpu)) is not None and (gpu.utilization or 0.0) >= LOADED:
            self.slow_rounds = self.slow_rounds + 1 if slow else 0
            self.pcie_degraded = self.slow_rounds >= DEGRADED_ROUNDS
        if gpu.recovery_action is not None:
            asked = gpu.recovery_action != "none"
            if self.recovery and not asked:
                self.healed_at = now
                self.new_errors = self.new_remaps = 0
            self.recovery = asked


def _growth(new: int, before: int | None, count: int | None) -> tuple[int, int | None]:
    """Add what a counter gained. One that went back was reset with the driver: it starts afresh."""
    if count is None or before is None:
        return new, before if count is None else count
    return (new + count - before if count >= before else 0), count


def slow_link(gpu: GpuReading) -> bool | None:
    """Whether the PCIe link runs below what GPU and slot can do together; None where that is not known."""
    link = gpu.pcie
    if link is None:
        return None
    pairs = ((link.generation, link.generation_max), (link.width, link.width_max))
    known = [(now, best) for now, best in pairs if now is not None and best is not None]
    return any(now < best for now, best in known) if known else None


class DriverMemory(Struct):
    """What the probe remembers between rounds. One per agent."""

    target: Target | None = None
    info: ServerInfo | None = None
    highest: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    failed_with: int = SUCCESS
    loaded_at: float = 0.0
    _pins: dict[int, str] = field(default_factory=dict)
    _mig: dict[str, str] = field(default_factory=dict)
    _pinned_for: object = None
    _history: dict[str, _History] = field(default_factory=dict)

    def fold(self, reading: NvmlReading, settings: Settings, standing: Standing, now: float) -> DriverFacts:
        """Combine a reading with what is remembered, and remember it."""
        if reading.code == SUCCESS and self.failed_with in _NO_DRIVER:
            self.loaded_at = now
        self.failed_with = reading.code
        self._pin(reading, keep=bool(settings.gpus))
        gpu_set = server_gpus(
            settings, self.target, reading, standing, self.info, pins=Pins(indices=self._pins, mig=self._mig)
        )
        listed = reading.code == SUCCESS and reading.count == len(reading.gpus)
        shown = {gpu.uuid for gpu in reading.gpus}
        if listed:
            self.highest = max(self.highest, len(reading.gpus))
            self.seen |= {gpu.uuid: gpu.index for gpu in reading.gpus if gpu.uuid is not None}
        unseen = tuple(one for one in _not_shown(gpu_set, reading) if one.uuid not in self.seen) if listed else ()
        taken = {one.index for one in gpu_set.gpus if one.uuid is None}
        nameless = [gpu for gpu in reading.gpus if gpu.uuid is None and gpu.index not in taken]
        # Where every GPU of the node is visible, the members without a GPU are among the GPUs without a name if there
        # are enough of those; if there are as many, they can only be each other.
        whole = standing.placement is Placement.HOST or reading.count == reading.module_gpus
        among = bool(unseen) and whole and len(nameless) >= len(unseen)
        equal = among and len(nameless) == len(unseen)
        dead = all(gpu.code not in (SUCCESS, GPU_HUNG, NO_PERMISSION) for gpu in nameless)
        return DriverFacts(
            reading=reading,
            gpu_set=gpu_set,
            expected=self._expected(settings, gpu_set),
            highest=self.highest,
            vanished=tuple(
                Gone(index=index, uuid=uuid) for uuid, index in self.seen.items() if listed and uuid not in shown
            ),
            unseen=() if among else unseen,
            assumed=frozenset(gpu.index for gpu in nameless) if equal else frozenset[int](),
            unanswering=unseen if among and not equal and dead else (),
            trends=self._trends(reading, now),
            loaded_at=self.loaded_at,
            detail=settings.gpu_detail,
        )

    def _pin(self, reading: NvmlReading, *, keep: bool) -> None:
        """Remember what indices and MIG devices meant when the server, which counts the same, was first seen.

        ``keep``: they are the operator's, who does not count anew with each process of the server.
        """
        server = None if self.target is None else (self.target.pid, self.target.create_time)
        if server != self._pinned_for and not keep:
            self._pinned_for = server
            self._pins.clear()
            self._mig.clear()
        for gpu in reading.gpus[:_MAX_REMEMBERED]:
            if gpu.uuid is not None and gpu.uuid not in self._pins.values():
                self._pins.setdefault(gpu.index, gpu.uuid)
        if len(self._mig) < 8 * _MAX_REMEMBERED:
            self._mig |= mig_parents(reading)

    def _expected(self, settings: Settings, gpu_set: GpuSet) -> Expected | None:
        told = expected_gpus(settings, self.target, self.info)
        if told is not None:
            return told
        if gpu_set.known:
            return Expected(count=len(gpu_set.gpus), source=CountSource.GPU_SET)
        return Expected(count=self.highest, source=CountSource.SEEN) if self.highest else None

    def _trends(self, reading: NvmlReading, now: float) -> Mapping[str, Trend]:
        for gpu in reading.gpus[:_MAX_REMEMBERED]:
            if gpu.code == SUCCESS:
                self._history.setdefault(key(gpu.index, gpu.uuid), _History()).fold(gpu, now)
        while len(self._history) > 4 * _MAX_REMEMBERED:
            del self._history[next(iter(self._history))]
        return {
            name: Trend(
                new_errors=one.new_errors,
                new_remaps=one.new_remaps,
                pcie_degraded=one.pcie_degraded,
                healed_at=one.healed_at,
            )
            for name, one in self._history.items()
        }


async def collect(services: Services) -> DriverFacts:
    """Ask NVML once, and whose GPUs these are. Raises ProbeTimeout and ProbeCrash as `NvmlClient.round` does."""
    memory = services.memory.setdefault(NAME, DriverMemory())
    assert isinstance(memory, DriverMemory)
    server = asyncio.get_running_loop().create_task(_find_server(services, memory))
    try:
        reading = await services.nvml.round(services.settings.deadlines.get(NAME, DEADLINE))
        await asyncio.wait({server}, timeout=_SERVER_WAIT)
    finally:
        # What it had learned by now is in the memory; the rest is asked for again in the next round.
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
    return memory.fold(reading, services.settings, services.standing, services.clock.time())


async def _find_server(services: Services, memory: DriverMemory) -> None:
    target = await services.targets.find()
    if (target.pid, target.create_time, target.url) != _identity(memory.target):
        memory.info = None
    memory.target = target
    memory.info = await services.server.info(target)


def _identity(target: Target | None) -> object:
    return None if target is None else (target.pid, target.create_time, target.url)
