"""What one round of NVML calls found. Data only."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class RemappedRows(Struct, frozen=True, kw_only=True):
    """Rows of memory that were replaced, by cause; whether more wait for a reset; whether replacing failed."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


class PcieLink(Struct, frozen=True, kw_only=True):
    """The PCIe link as it runs now and the best that GPU and slot can do together."""

    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None


class MigDevice(Struct, frozen=True, kw_only=True):
    """One MIG device of a GPU."""

    uuid: str
    name: str | None = None


class XidCount(Struct, frozen=True, kw_only=True):
    """How often the driver reported an Xid for a GPU since this agent listens, and when last (epoch seconds).

    ``index`` is the one that the GPU has in the same reading, the last it had if it is not there any more.
    """

    index: int
    uuid: str | None
    xid: int
    count: int
    last: float


class GpuReading(Struct, frozen=True, kw_only=True):
    """What one GPU answered. A field is None where the source did not say; ``errors`` then tells why.

    ``code`` is 0 for a GPU that answers, 15 for a lost one, else the NVML code (or a token, as in
    ``errors``) with which its handle failed; ``words`` are NVML's own. ``uuid`` of a GPU that no longer
    answers is the one seen at its index before. ``mig`` is the current MIG mode. Memory is in bytes,
    ``temperature`` in degrees Celsius, ``power`` in watts, ``utilization`` a ratio from 0 to 1. ``errors``
    maps an NVML call to its code, or to a token where the binding itself failed (``undecodable``,
    ``not-in-binding``, ``binding-error``).

    ``ecc_*`` count errors since the driver was loaded. ``recovery_action`` is NVML's token (none, reset, reboot,
    drain-p2p, drain-reset, recover-imex-domain, bus-reset, system-reboot, or other). ``clock_events`` are the
    reasons, by the exporter's names, for which clocks are held back right now. ``nvlinks`` counts the links that
    the GPU supports where it is part of an NVSwitch system (``fabric`` is completed), whether or not one was ever
    up; for any other GPU those that this agent ever saw up, since a GPU without a bridge has links and nothing is
    wrong with it. ``nvlinks_active`` counts those that are up. ``fabric`` is the state of its registration with the
    NVSwitch fabric (not-supported, not-started, in-progress, completed, or failed where completed with an error
    status).
    ``mig_devices`` is None outside MIG mode. ``licensed`` is None where no vGPU licence is needed.
    A GPU that is left out because a call to it hung, or all of them took too long, has code ``hung``.
    """

    index: int
    code: int | str
    words: str | None = None
    uuid: str | None = None
    name: str | None = None
    compute_capability: str | None = None
    mig: bool | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    power: float | None = None
    utilization: float | None = None
    pci_bus_id: str | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: RemappedRows | None = None
    recovery_action: str | None = None
    clock_events: frozenset[str] | None = None
    pcie: PcieLink | None = None
    nvlinks_active: int | None = None
    nvlinks: int | None = None
    fabric: str | None = None
    mig_devices: tuple[MigDevice, ...] | None = None
    licensed: bool | None = None
    errors: Mapping[str, int | str] = field(default_factory=dict)


class NvmlReading(Struct, frozen=True, kw_only=True):
    """What one round found.

    ``code`` is 0, or the NVML code of the system-level ``call`` that failed, with NVML's own ``words``; 12
    means that no library could be loaded, for which ``loader`` is the dynamic loader's sentence.
    ``library`` is the path of the loaded library, ``library_version`` the version in its real file name.
    ``count`` is the number of GPUs that NVML shows. ``module_*`` come from ``/proc/driver/nvidia``: whether a
    kernel module shows itself, its version, its flavour (open or proprietary), the GPUs it lists.
    ``device_present`` and ``device_refused`` tell of ``/dev/nvidiactl``; refused is None where it is not
    known. ``succeeded_before`` is True once an earlier round of this agent opened NVML.
    ``xids`` counts over the life of the agent; ``xids_watched`` is False where events cannot be had, which is
    not the same as none. ``left_out`` maps the index of a GPU that is not asked for now to the call that hung.
    ``stuck_workers`` counts earlier workers that cannot be killed. ``gpus`` has ``count`` entries, but for a round
    that was cut short by a hanging GPU: one that was not reached is as in the round before, and has no entry if it
    was not read in that one.
    ``visible_devices`` and ``driver_capabilities`` are the agent's own NVIDIA_* environment variables.
    """

    code: int
    call: str | None = None
    words: str | None = None
    loader: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_driver_version: str | None = None
    library: str | None = None
    library_version: str | None = None
    count: int | None = None
    gpus: tuple[GpuReading, ...] = ()
    errors: Mapping[str, int | str] = field(default_factory=dict)
    module_present: bool = False
    module_version: str | None = None
    module_flavour: str | None = None
    module_gpus: int | None = None
    device_present: bool = False
    device_refused: bool | None = None
    succeeded_before: bool = False
    visible_devices: str | None = None
    driver_capabilities: str | None = None
    xids: tuple[XidCount, ...] = ()
    xids_watched: bool | None = None
    left_out: Mapping[int, str] = field(default_factory=dict)
    stuck_workers: int = 0
