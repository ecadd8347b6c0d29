"""The probe's parts of the report. A field that is null is not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from sidecar.nvml.reading import GpuReading, MigDevice, PcieLink, RemappedRows
from sidecar.probes.driver.declare import SUCCESS
from sidecar.probes.driver.facts import DriverFacts
from sidecar.probes.driver.xids import explain


class XidSection(Struct, frozen=True, kw_only=True):
    """One Xid that a GPU reported since the sidecar started.

    ``kind`` is how far it reaches: application, contained, hardware, information or unlisted. ``last`` is in epoch
    seconds.
    """

    gpu: str
    uuid: str | None
    xid: int
    count: int
    last: float
    kind: str
    meaning: str
    action: str


class DriverSection(Struct, frozen=True, kw_only=True):
    """The report's ``driver``. A field that is null is not known.

    ``return_code`` is NVML's (0 success, 12 no library), ``failed_call`` the call that failed and
    ``error`` NVML's words for it. ``kernel_module`` is open or proprietary. ``library_version`` is the
    version in the file name of the loaded NVML library. ``gpus_visible`` is the number that NVML shows,
    ``gpus_on_node`` the number that the kernel module lists. ``field_errors`` maps an NVML call that failed
    without further harm to its code. ``xids_watched`` is false where the driver's events cannot be had: that
    ``xids`` is empty then does not mean that there were none; what came before the sidecar's start is never there.
    ``left_out`` maps a GPU that is not asked for now to the call that hung.
    """

    return_code: int
    failed_call: str | None
    error: str | None
    driver_version: str | None
    kernel_module_version: str | None
    kernel_module: str | None
    cuda_driver_version: str | None
    nvml_version: str | None
    library: str | None
    library_version: str | None
    gpus_visible: int | None
    gpus_on_node: int | None
    field_errors: Mapping[str, int | str]
    xids_watched: bool | None
    xids: tuple[XidSection, ...]
    left_out: Mapping[str, str]


class MemberSection(Struct, frozen=True, kw_only=True):
    """One GPU of the server: how it was named, and which one that is."""

    given: str
    gpu: str | None
    uuid: str | None
    mig: bool


class GpuSetSection(Struct, frozen=True, kw_only=True):
    """The report's ``gpu_set``: which GPUs are the server's, how many it needs, and what told."""

    known: bool
    source: str | None
    why: str
    gpus: tuple[MemberSection, ...]
    expected: int | None
    expected_source: str | None


class GpuSection(Struct, frozen=True, kw_only=True):
    """One entry of the report's ``gpus``. A field that is null is not known or not supported.

    ``in_scope`` tells whether the GPU is the server's. ``up`` tells whether it answers NVML; ``return_code`` is why
    not. ``mig`` is the current MIG mode. ``utilization_ratio`` runs from 0 to 1. ``ecc_*`` count errors since the
    driver was loaded. ``clock_events`` are the reasons for which clocks are held back now. ``fabric`` is the state of
    the registration with the NVSwitch fabric. ``licensed`` is null where no vGPU licence is needed.
    ``field_errors`` maps an NVML call that failed to its code.
    """

    gpu: str
    uuid: str | None
    pci_bus_id: str | None
    in_scope: bool | None
    up: bool
    return_code: int | str
    name: str | None
    compute_capability: str | None
    mig: bool | None
    mig_devices: tuple[MigDevice, ...] | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None
    utilization_ratio: float | None
    ecc_corrected: int | None
    ecc_uncorrected: int | None
    remapped_rows: RemappedRows | None
    recovery_action: str | None
    clock_events: tuple[str, ...] | None
    pcie: PcieLink | None
    nvlinks_active: int | None
    nvlinks: int | None
    fabric: str | None
    licensed: bool | None
    field_errors: Mapping[str, int | str]


SECTIONS: Mapping[str, Any] = {"driver": DriverSection, "gpus": tuple[GpuSection, ...], "gpu_set": GpuSetSection}


def report(facts: DriverFacts) -> Mapping[str, Any]:
    """Give the report's sections; ``gpus`` is null where NVML could not list them."""
    gpus = tuple(_gpu(gpu, facts) for gpu in facts.reading.gpus)
    return {
        "driver": _driver(facts),
        "gpus": gpus if facts.reading.code == SUCCESS else None,
        "gpu_set": _gpu_set(facts),
    }


def _driver(facts: DriverFacts) -> DriverSection:
    reading = facts.reading
    return DriverSection(
        return_code=reading.code,
        failed_call=reading.call,
        error=reading.words,
        driver_version=reading.driver_version,
        kernel_module_version=reading.module_version,
        kernel_module=reading.module_flavour,
        cuda_driver_version=reading.cuda_driver_version,
        nvml_version=reading.nvml_version,
        library=reading.library,
        library_version=reading.library_version,
        gpus_visible=reading.count,
        gpus_on_node=reading.module_gpus,
        field_errors=reading.errors,
        xids_watched=reading.xids_watched,
        xids=tuple(
            XidSection(
                gpu=str(one.index),
                uuid=one.uuid,
                xid=one.xid,
                count=one.count,
                last=one.last,
                kind=explain(one.xid).kind.value,
                meaning=explain(one.xid).meaning,
                action=explain(one.xid).action,
            )
            for one in reading.xids
        ),
        left_out={str(index): call for index, call in reading.left_out.items()},
    )


def _gpu_set(facts: DriverFacts) -> GpuSetSection:
    found, expected = facts.gpu_set, facts.expected
    return GpuSetSection(
        known=found.known,
        source=None if found.source is None else found.source.value,
        why=found.why,
        gpus=tuple(
            MemberSection(
                given=member.given,
                gpu=None if member.index is None else str(member.index),
                uuid=member.uuid,
                mig=member.mig,
            )
            for member in found.gpus
        ),
        expected=None if expected is None else expected.count,
        expected_source=None if expected is None else expected.source.value,
    )


def _gpu(gpu: GpuReading, facts: DriverFacts) -> GpuSection:
    return GpuSection(
        gpu=str(gpu.index),
        uuid=gpu.uuid,
        pci_bus_id=gpu.pci_bus_id,
        in_scope=facts.in_scope(gpu.index, gpu.uuid),
        up=gpu.code == SUCCESS,
        return_code=gpu.code,
        name=gpu.name,
        compute_capability=gpu.compute_capability,
        mig=gpu.mig,
        mig_devices=gpu.mig_devices,
        memory_used_bytes=gpu.memory_used,
        memory_total_bytes=gpu.memory_total,
        temperature_celsius=gpu.temperature,
        power_watts=gpu.power,
        utilization_ratio=gpu.utilization,
        ecc_corrected=gpu.ecc_corrected,
        ecc_uncorrected=gpu.ecc_uncorrected,
        remapped_rows=gpu.remapped_rows,
        recovery_action=gpu.recovery_action,
        clock_events=None if gpu.clock_events is None else tuple(sorted(gpu.clock_events)),
        pcie=gpu.pcie,
        nvlinks_active=gpu.nvlinks_active,
        nvlinks=gpu.nvlinks,
        fabric=gpu.fabric,
        licensed=gpu.licensed,
        field_errors=gpu.errors,
    )
