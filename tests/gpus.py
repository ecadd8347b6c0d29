"""Readings of NVML as the driver probe's tests need them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.gpuset import GpuSet, GpuSource, Member
from sidecar.launch.args import INCOMPLETE
from sidecar.model import Placement, Processes, Scope, Standing, Target
from sidecar.nvml.reading import GpuReading, NvmlReading, PcieLink, RemappedRows
from sidecar.probes.driver.facts import DriverFacts, DriverMemory

ROWS = RemappedRows(correctable=0, uncorrectable=0, pending=False, failed=False)
LINK = PcieLink(generation=5, generation_max=5, width=16, width_max=16)


def gpu(index: int, **more: Any) -> GpuReading:
    """A healthy H200, idle but for a quarter."""
    values: dict[str, Any] = {
        "code": 0,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "mig": False,
        "memory_used": 644939776,
        "memory_total": 150754820096,
        "temperature": 38,
        "power": 78.786,
        "utilization": 0.25,
        "pci_bus_id": f"00000000:00:{index + 6:02x}.0",
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "remapped_rows": ROWS,
        "recovery_action": "none",
        "clock_events": frozenset(),
        "pcie": LINK,
        "nvlinks_active": 18,
        "nvlinks": 18,
        "fabric": "completed",
    }
    return GpuReading(index=index, **(values | more))


def silent(index: int, code: int | str, **more: Any) -> GpuReading:
    """A GPU that does not answer."""
    return GpuReading(index=index, code=code, **({"uuid": f"GPU-{index}"} | more))


def reading(*gpus: GpuReading, **more: Any) -> NvmlReading:
    """A round in which NVML works; two GPUs unless given."""
    shown = gpus or (gpu(0), gpu(1))
    values: dict[str, Any] = {
        "code": 0,
        "driver_version": "580.159.04",
        "nvml_version": "13.580.159.04",
        "cuda_driver_version": "13.0",
        "library": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
        "library_version": "580.159.04",
        "count": len(shown),
        "gpus": shown,
        "module_present": True,
        "module_version": "580.159.04",
        "module_flavour": "open",
        "module_gpus": len(shown),
        "device_present": True,
        "device_refused": False,
        "xids_watched": True,
    }
    return NvmlReading(**(values | more))


def known(*uuids: str, source: GpuSource = GpuSource.SETTING) -> GpuSet:
    """A set of GPUs that are the server's."""
    members = tuple(Member(given=uuid, index=int(uuid.rpartition("-")[2]), uuid=uuid) for uuid in uuids)
    return GpuSet(known=True, source=source, gpus=members, why="The test says so.")


def facts(one: NvmlReading, **more: Any) -> DriverFacts:
    """A round of which nothing is remembered."""
    return DriverFacts(reading=one, **({"highest": one.count or 0} | more))


def standing(placement: Placement = Placement.HOST) -> Standing:
    """Where the agent stands, processes shared."""
    return Standing(placement=placement, placement_why="", processes=Processes.SHARED, processes_why="")


def target(environ: dict[str, str] | None = None, **more: Any) -> Target:
    """A running server in a container of its own, whose sizes are not known."""
    values: dict[str, Any] = {
        "url": "http://127.0.0.1:30000",
        "url_source": "command-line",
        "scope": Scope.SERVER,
        "root": "/proc/7/root",
        "pid": 7,
        "create_time": 1.0,
        "launch": {INCOMPLETE: True},
        "launch_source": "process",
        "environ": environ,
    }
    return Target(**(values | more))


def rounds(
    *readings: NvmlReading,
    settings: Settings | None = None,
    placement: Placement = Placement.HOST,
    server: Target | None = None,
    start: float = 1000.0,
) -> DriverFacts:
    """The facts of the last of several rounds, ten seconds apart."""
    memory = DriverMemory(target=server)
    found: DriverFacts | None = None
    for number, one in enumerate(readings):
        found = memory.fold(one, settings or Settings(), standing(placement), start + 10 * number)
    assert found is not None
    return found


def changed(one: NvmlReading, index: int, **changes: Any) -> NvmlReading:
    """The same round with one GPU changed."""
    return replace(one, gpus=tuple(replace(each, **changes) if each.index == index else each for each in one.gpus))
