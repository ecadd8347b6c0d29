"""The probe's metric families, and the series of one round. What is not known or not supported has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sidecar.model import Family, Sample
from sidecar.nvml.reading import GpuReading
from sidecar.probes.driver.declare import SUCCESS
from sidecar.probes.driver.facts import DriverFacts

_GPU: Final = ("gpu", "uuid")
CLOCK_EVENTS: Final = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""The values of the label ``reason``."""


def _gpu_gauge(name: str, text: str) -> Family:
    return Family(name=name, kind="gauge", help=text, labels=_GPU)


_DETAIL = "With gpu_detail: "
FAMILIES: Final[tuple[Family, ...]] = (
    Family(name="nvml_up", kind="gauge", help="1 if NVML could be opened and asked, 0 if not."),
    Family(name="nvml_return_code", kind="gauge", help="NVML's last return code; 0 is success, 12 no library."),
    Family(
        name="driver_info",
        kind="info",
        help="Versions of the GPU driver; an empty label is not known.",
        labels=("driver_version", "kernel_module_version", "kernel_module", "cuda_driver_version", "nvml_version"),
    ),
    Family(
        name="gpus_expected",
        kind="gauge",
        help="Number of GPUs that the server needs on this node; while that is not known, the most that were visible.",
    ),
    Family(name="gpus_visible", kind="gauge", help="Number of GPUs that NVML shows to the sidecar."),
    Family(
        name="gpus_in_scope",
        kind="gauge",
        help="Number of visible GPUs that are known to be the server's; absent while it is not known which ones are.",
    ),
    Family(
        name="gpu_info",
        kind="info",
        help="Identity of a GPU; mig is enabled, disabled or empty where there is no such mode.",
        labels=("gpu", "uuid", "name", "compute_capability", "mig"),
    ),
    _gpu_gauge("gpu_up", "1 if the GPU answers NVML, 0 if it is lost, unreachable or hangs."),
    _gpu_gauge("gpu_memory_used_bytes", "GPU memory in use."),
    _gpu_gauge("gpu_memory_total_bytes", "GPU memory in total."),
    _gpu_gauge("gpu_temperature_celsius", "Temperature of the GPU core."),
    _gpu_gauge("gpu_power_watts", "Power drawn by the GPU board."),
    _gpu_gauge("gpu_utilization_ratio", "Share of the last sample period in which a kernel ran, 0 to 1."),
    Family(
        name="gpu_ecc_errors_total",
        kind="counter",
        help="Memory errors since the driver was loaded, by type: corrected or uncorrected.",
        labels=(*_GPU, "type"),
    ),
    _gpu_gauge("gpu_row_remap_pending", "1 while a row of GPU memory waits for a reset to be remapped."),
    _gpu_gauge("gpu_row_remap_failure", "1 if a row of GPU memory could not be remapped."),
    Family(
        name="gpu_remapped_rows",
        kind="gauge",
        help="Rows of GPU memory that were remapped, by cause: correctable or uncorrectable errors.",
        labels=(*_GPU, "cause"),
    ),
    Family(
        name="gpu_recovery_action_info",
        kind="info",
        help="What the driver asks for to recover the GPU: none, reset, reboot, drain-p2p, drain-reset and the like.",
        labels=(*_GPU, "action"),
    ),
    Family(
        name="gpu_xid_errors_total",
        kind="counter",
        help="Xid events of the GPU since the sidecar started.",
        labels=(*_GPU, "xid"),
    ),
    Family(
        name="gpu_xid_last_timestamp_seconds",
        kind="gauge",
        help="When the Xid event was last seen, in seconds since the epoch.",
        labels=(*_GPU, "xid"),
    ),
    Family(
        name="gpu_clock_event_active",
        kind="gauge",
        help=f"{_DETAIL}1 while the GPU's clocks are held back for this reason.",
        labels=(*_GPU, "reason"),
    ),
    _gpu_gauge("gpu_pcie_link_generation", f"{_DETAIL}PCIe generation that the link runs at; lower when idle."),
    _gpu_gauge("gpu_pcie_link_generation_max", f"{_DETAIL}highest PCIe generation that GPU and slot can do together."),
    _gpu_gauge("gpu_pcie_link_width", f"{_DETAIL}PCIe lanes that the link uses."),
    _gpu_gauge("gpu_pcie_link_width_max", f"{_DETAIL}most PCIe lanes that GPU and slot can use together."),
    _gpu_gauge("gpu_nvlink_links_active", f"{_DETAIL}NVLinks that are up."),
    _gpu_gauge(
        "gpu_nvlink_links",
        f"{_DETAIL}NVLinks that the GPU supports on an NVSwitch system, else those that were ever up.",
    ),
    _gpu_gauge(
        "gpu_fabric_healthy",
        f"{_DETAIL}1 if the registration with the NVSwitch fabric is complete; absent without such a fabric.",
    ),
)


def samples(facts: DriverFacts) -> Iterable[Sample]:
    """Give the series of a round."""
    reading = facts.reading
    yield Sample("nvml_up", (), float(reading.code == SUCCESS))
    yield Sample("nvml_return_code", (), float(reading.code))
    versions = (
        reading.driver_version,
        reading.module_version,
        reading.module_flavour,
        reading.cuda_driver_version,
        reading.nvml_version,
    )
    if any(versions):
        yield Sample("driver_info", tuple(value or "" for value in versions), 1.0)
    if facts.expected is not None:
        yield Sample("gpus_expected", (), float(facts.expected.count))
    if reading.code == SUCCESS and reading.count is not None:
        yield Sample("gpus_visible", (), float(reading.count))
        # A round that was cut short lists less than there is: the number would be too small.
        if facts.gpu_set.known and len(reading.gpus) >= reading.count:
            mine = sum(facts.in_scope(gpu.index, gpu.uuid) is True for gpu in reading.gpus)
            yield Sample("gpus_in_scope", (), float(mine))
    for gpu in reading.gpus:
        yield from _identity(gpu)
        yield from _values(gpu)
        yield from _memory_health(gpu)
        if facts.detail:
            yield from _detail(gpu)
    for one in reading.xids:
        labels = (str(one.index), one.uuid or "", str(one.xid))
        yield Sample("gpu_xid_errors_total", labels, float(one.count))
        yield Sample("gpu_xid_last_timestamp_seconds", labels, one.last)


def _labels(gpu: GpuReading) -> tuple[str, str]:
    return str(gpu.index), gpu.uuid or ""


def _identity(gpu: GpuReading) -> Iterable[Sample]:
    if gpu.name is not None or gpu.compute_capability is not None:
        mig = {True: "enabled", False: "disabled", None: ""}[gpu.mig]
        yield Sample("gpu_info", (*_labels(gpu), gpu.name or "", gpu.compute_capability or "", mig), 1.0)
    yield Sample("gpu_up", _labels(gpu), float(gpu.code == SUCCESS))


def _given(gpu: GpuReading, *values: tuple[str, float | None]) -> Iterable[Sample]:
    for family, value in values:
        if value is not None:
            yield Sample(family, _labels(gpu), float(value))


def _values(gpu: GpuReading) -> Iterable[Sample]:
    return _given(
        gpu,
        ("gpu_memory_used_bytes", gpu.memory_used),
        ("gpu_memory_total_bytes", gpu.memory_total),
        ("gpu_temperature_celsius", gpu.temperature),
        ("gpu_power_watts", gpu.power),
        ("gpu_utilization_ratio", gpu.utilization),
    )


def _memory_health(gpu: GpuReading) -> Iterable[Sample]:
    labels = _labels(gpu)
    for kind, count in (("corrected", gpu.ecc_corrected), ("uncorrected", gpu.ecc_uncorrected)):
        if count is not None:
            yield Sample("gpu_ecc_errors_total", (*labels, kind), float(count))
    if (rows := gpu.remapped_rows) is not None:
        yield Sample("gpu_row_remap_pending", labels, float(rows.pending))
        yield Sample("gpu_row_remap_failure", labels, float(rows.failed))
        yield Sample("gpu_remapped_rows", (*labels, "correctable"), float(rows.correctable))
        yield Sample("gpu_remapped_rows", (*labels, "uncorrectable"), float(rows.uncorrectable))
    if gpu.recovery_action is not None:
        yield Sample("gpu_recovery_action_info", (*labels, gpu.recovery_action), 1.0)


def _detail(gpu: GpuReading) -> Iterable[Sample]:
    if gpu.clock_events is not None:
        for event in CLOCK_EVENTS:
            yield Sample("gpu_clock_event_active", (*_labels(gpu), event), float(event in gpu.clock_events))
    if (link := gpu.pcie) is not None:
        yield from _given(
            gpu,
            ("gpu_pcie_link_generation", link.generation),
            ("gpu_pcie_link_generation_max", link.generation_max),
            ("gpu_pcie_link_width", link.width),
            ("gpu_pcie_link_width_max", link.width_max),
        )
    fabric = None if gpu.fabric in (None, "not-supported") else float(gpu.fabric == "completed")
    yield from _given(
        gpu,
        ("gpu_nvlink_links_active", gpu.nvlinks_active),
        ("gpu_nvlink_links", gpu.nvlinks),
        ("gpu_fabric_healthy", fabric),
    )
