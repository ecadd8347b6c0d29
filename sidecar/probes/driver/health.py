"""The health of the GPUs that answer: what each of them says of itself, and what was reported of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from sidecar.drift import MIG as MIG_ITEM
from sidecar.gpuset import GpuSource
from sidecar.model import ConditionType, Drift, Finding, Gate, Severity, World
from sidecar.nvml.reading import GpuReading, XidCount
from sidecar.probes.driver.declare import LOST, gpu_condition, unknown
from sidecar.probes.driver.facts import DriverFacts, key
from sidecar.probes.driver.hits import Hit, Look, Unread, conclude, hit, name, survey, unread
from sidecar.probes.driver.presence import GPU_LOST, GPU_MISSING
from sidecar.probes.driver.state import CAUSES
from sidecar.probes.driver.xids import Xid, XidClass, XidReason, explain

XID_CRITICAL_SECONDS: Final = 24 * 3600.0
"""How long an Xid that means broken hardware stays active, unless the driver is loaded anew before."""
XID_WARNING_SECONDS: Final = 3600.0
"""How long any other one does."""

_DRAIN: Final = "Drain the node, stop what uses the GPU, "
_GONE: Final = (*CAUSES, GPU_LOST.code, GPU_MISSING.code)

REMAP_FAILED: Final = gpu_condition(
    "row-remap-failed",
    Severity.CRITICAL,
    Gate.NEVER,
    title="A GPU cannot repair its memory any more",
    when="NVML says that a row of the GPU's memory could not be remapped.",
    remedy="Drain the node and have the GPU replaced: it has no spare rows left where it needs one.",
    reasons={"failed": "remapping a row of memory failed"},
    depends_on=_GONE,
)
XID_CRITICAL: Final = gpu_condition(
    "xid-critical",
    Severity.CRITICAL,
    Gate.NEVER,
    title="The driver reported a hardware fault of a GPU",
    when="The driver reported an Xid that means that the GPU cannot be trusted before it was reset or replaced (46, "
    "48, 62, 64, 74, 79, 95, 109, 119, 120, 136, 140, 143 and kin). An Xid is an event: this stays active for 24 "
    "hours after the last one, or until the driver was loaded anew or the GPU recovered. What was reported before the "
    "sidecar started is not visible. Xids that are faults of a program (13, 31, 43, 45, 68, 69 and kin) are only "
    "counted.",
    remedy=_DRAIN + "and reset it with `nvidia-smi -i GPU -r`; power-cycle the node instead for Xid 79 and 167, since "
    "a GPU that is off the bus cannot be reset; replace the GPU if it returns.",
    reasons={
        XidReason.FELL_OFF_BUS: "the GPU has fallen off the bus (79, 167)",
        XidReason.MEMORY: "memory errors that could not be corrected or contained (48, 64, 95, 140)",
        XidReason.FIRMWARE: "a processor of the GPU failed (62, 119, 120)",
        XidReason.NVLINK: "an NVLink failed (74, 136, 144 to 150, 155)",
        XidReason.ENGINE: "the GPU stopped working (46, 109, 110, 143, 151, 158)",
        XidReason.POWER: "the board is not supplied with power as it should (54)",
        XidReason.RETIREMENT: "a part of the GPU could not be retired (157, 161)",
        "events-unavailable": "the driver's events cannot be had here: that none is known does not mean that there "
        "was none",
    },
    depends_on=(*_GONE, REMAP_FAILED.code),
)
RECOVERY: Final = gpu_condition(
    "gpu-recovery-required",
    Severity.CRITICAL,
    Gate.NEVER,
    title="A GPU needs to be recovered",
    when="The driver asks for a recovery of the GPU.",
    remedy=_DRAIN + "and recover it as the reason says.",
    reasons={
        "system-reboot": "the whole system must be rebooted",
        "reboot": "the node must be rebooted",
        "bus-reset": "the GPU must be reset over its bus",
        "reset": "the GPU must be reset",
        "recover-imex-domain": "the NVLink domain of several nodes must be recovered",
        "drain-reset": "the GPU works with less than it has; it must be reset once its work has ended",
        "drain-p2p": "work that uses peer-to-peer access must end",
        "other": "an action that this release does not know",
    },
    depends_on=(*_GONE, REMAP_FAILED.code, XID_CRITICAL.code),
)
ECC: Final = gpu_condition(
    "ecc-uncorrected",
    Severity.CRITICAL,
    Gate.NEVER,
    title="A GPU had memory errors that ECC could not correct",
    when="Uncorrectable memory errors since the driver was loaded, or more rows remapped because of them since the "
    "sidecar started. A warning, since the driver handles them; critical when new ones come while a row waits to be "
    "remapped or could not be.",
    remedy="Let the work finish, then drain the node and reset the GPU (`nvidia-smi -i GPU -r`); replace the GPU if "
    "errors return.",
    reasons={
        "new-unrepaired": "new errors while a row of memory waits to be remapped, or could not be",
        "new": "new errors since the sidecar started",
        "remap-growing": "more rows were remapped since the sidecar started",
        "counted": "errors since the driver was loaded, none of them new",
    },
    depends_on=(*_GONE, REMAP_FAILED.code, XID_CRITICAL.code, RECOVERY.code),
)
REMAP_PENDING: Final = gpu_condition(
    "row-remap-pending",
    Severity.WARNING,
    Gate.NEVER,
    title="A GPU waits for a reset to repair its memory",
    when="NVML says that a row of the GPU's memory is to be remapped at its next reset.",
    remedy="Let the work finish, then drain the node and reset the GPU: `nvidia-smi -i GPU -r`.",
    reasons={"waits-for-reset": "a row of memory waits to be remapped"},
    depends_on=(*_GONE, REMAP_FAILED.code, XID_CRITICAL.code, RECOVERY.code),
)
XID_WARNING: Final = gpu_condition(
    "xid-warning",
    Severity.WARNING,
    Gate.NEVER,
    title="The driver reported a fault of a GPU that it handled",
    when="The driver reported an Xid that it contained (63, 92, 94 and kin), or one that this release does not know, "
    "within the last hour.",
    remedy="Let the work finish, then reset the GPU when convenient: `nvidia-smi -i GPU -r`. Look up a code that is "
    "not in the table in NVIDIA's Xid catalogue.",
    reasons={
        XidReason.MEMORY: "memory errors that were corrected, remapped or contained (63, 92, 93, 94, 168, 171, 172)",
        XidReason.NVLINK: "corrected errors on a link (121)",
        XidReason.RETIREMENT: "a part of the GPU is to be retired (156, 160)",
        XidReason.FIRMWARE: "the driver's parts do not fit together (78)",
        XidReason.UNLISTED: "a code that is not in the sidecar's table",
        "events-unavailable": "the driver's events cannot be had here: that none is known does not mean that there "
        "was none",
    },
    depends_on=(*_GONE, REMAP_FAILED.code, XID_CRITICAL.code, RECOVERY.code, ECC.code, REMAP_PENDING.code),
)
FABRIC: Final = gpu_condition(
    "fabric-not-ready",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="The NVLink fabric is not ready",
    when="A GPU of a system with NVSwitches has not completed its registration with the fabric. CUDA then fails with "
    "error 802 (system not yet initialized) although every GPU is listed.",
    remedy="On the host start the fabric manager of the driver's very version: `systemctl restart "
    "nvidia-fabricmanager`; see `nvidia-smi -q | grep -A3 Fabric`.",
    reasons={
        "failed": "the registration ended with an error",
        "not-started": "the registration has not begun",
        "in-progress": "the registration has not ended",
    },
    depends_on=_GONE,
)
NVLINK_DOWN: Final = gpu_condition(
    "nvlink-down",
    Severity.WARNING,
    Gate.NEVER,
    title="NVLinks of a GPU are down",
    when="Fewer NVLinks are active than should be: every one that the GPU supports on an NVSwitch system (its fabric "
    "registration is completed), whether or not it was ever up; for any other GPU those that were up since the sidecar "
    "started, since a GPU without a bridge has links that lead nowhere.",
    remedy="Look at `nvidia-smi nvlink -s` and `nvidia-smi nvlink -e`; drain the node, reset all its GPUs together, "
    "and check the seating of boards and bridges if links stay down.",
    reasons={"links-down": "some links are not active"},
    depends_on=(*_GONE, FABRIC.code),
)
PCIE: Final = gpu_condition(
    "pcie-degraded",
    Severity.WARNING,
    Gate.NEVER,
    title="The PCIe link of a GPU is slower than it could be",
    when="In two rounds in a row with the GPU at least half busy its link ran at a lower generation or width than GPU "
    "and slot can do together. An idle GPU slows its link down by itself: that is not judged.",
    remedy="Drain the node, reseat the GPU or its riser, and see `lspci -vv` for LnkCap and LnkSta of the GPU and of "
    "the bridges above it.",
    reasons={
        "width": "the link has fewer lanes than it could have",
        "generation": "the link is of a lower generation than it could be",
    },
    depends_on=_GONE,
    # The two rounds are counted where idle ones can be passed over.
    hold=(1, 3),
)
THERMAL: Final = gpu_condition(
    "thermal-slowdown",
    Severity.WARNING,
    Gate.NEVER,
    title="A GPU is slowed down by heat or power supply",
    when="The driver or the hardware holds the GPU's clocks back because of temperature, or because the power supply "
    "asks for it. A power limit that is reached is normal and not meant.",
    remedy="Check fans, inlet temperature and power supply of the node: `nvidia-smi -q -d TEMPERATURE,PERFORMANCE`.",
    reasons={
        "power-brake": "the power supply asks for less",
        "hardware": "the hardware slows the GPU down because of its temperature",
        "software": "the driver slows the GPU down because of its temperature",
    },
    depends_on=_GONE,
)
UNLICENSED: Final = gpu_condition(
    "vgpu-unlicensed",
    Severity.WARNING,
    Gate.NEVER,
    title="A virtual GPU has no licence",
    when="The GPU needs a vGPU licence and has none. It works for some minutes and is then throttled.",
    remedy="Put the client configuration token into /etc/nvidia/ClientConfigToken on the guest and run `systemctl "
    "restart nvidia-gridd`; see `nvidia-smi -q | grep -i license`.",
    reasons={"unlicensed": "no licence was granted"},
    depends_on=_GONE,
)
MIG: Final = gpu_condition(
    "mig-unexpected",
    Severity.WARNING,
    Gate.NEVER,
    title="A GPU is divided that should not be, or the other way round",
    when="A GPU that is in MIG mode is named as a whole among the server's GPUs; CUDA then uses at most one of its MIG "
    "devices. Or the MIG mode of the GPUs is not the one that the baseline wants.",
    remedy="Name a MIG device instead (`nvidia-smi -L` lists them), or leave MIG mode on a drained node: "
    "`nvidia-smi -i GPU -mig 0`.",
    reasons={
        "parent-given": "the whole GPU is named, not one of its MIG devices",
        "not-as-baseline": "the MIG mode is not the one that the baseline wants",
        "set-unknown": "a GPU is in MIG mode, and which GPUs are the server's is not known",
    },
    depends_on=_GONE,
)

CONDITIONS: Final[tuple[ConditionType, ...]] = (
    REMAP_FAILED,
    XID_CRITICAL,
    RECOVERY,
    ECC,
    REMAP_PENDING,
    XID_WARNING,
    FABRIC,
    NVLINK_DOWN,
    PCIE,
    THERMAL,
    UNLICENSED,
    MIG,
)


def judge(facts: DriverFacts, world: World) -> Mapping[str, Finding]:
    """Judge a round in which NVML could be asked for its GPUs."""
    found = {kind.code: survey(kind, look, facts, remedy=_REMEDIES.get(kind.code)) for kind, look in _LOOKS}
    found[XID_CRITICAL.code] = _xids(XID_CRITICAL, facts, world.now)
    found[XID_WARNING.code] = _xids(XID_WARNING, facts, world.now)
    found[MIG.code] = _mig(facts, world.drifts)
    return found


_REMEDIES: Final[Mapping[str, str]] = {
    ECC.code: "Let the work finish, drain the node and reset the GPU: `nvidia-smi -i {gpus} -r`; replace it if errors "
    "return.",
    REMAP_PENDING.code: "Let the work finish, drain the node and reset the GPU: `nvidia-smi -i {gpus} -r`.",
}


# -- what a GPU says of itself --------------------------------------------------------------------------


def _remap_failed(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    rows = gpu.remapped_rows
    if rows is None:
        return unread(gpu, *_ROWS)
    return hit(gpu, "failed", f"could not remap a row ({_counts(gpu)})") if rows.failed else None


def _remap_pending(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    rows = gpu.remapped_rows
    if rows is None:
        return unread(gpu, *_ROWS)
    return hit(gpu, "waits-for-reset", f"waits for a reset to remap a row ({_counts(gpu)})") if rows.pending else None


def _counts(gpu: GpuReading) -> str:
    rows = gpu.remapped_rows
    assert rows is not None
    return f"remapped so far: {rows.uncorrectable} for uncorrectable, {rows.correctable} for correctable errors"


def _recovery(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    action = gpu.recovery_action
    if action is None:
        return unread(gpu, *_FIELDS)
    if action == "none":
        return None
    if action in _RECOVERIES:
        return hit(gpu, action, f"asks for: {action}", action=_RECOVERIES[action])
    # "other" is a number that NVML's reader has no name for.
    named = "" if action == "other" else f" ({action})"
    return hit(gpu, "other", f"asks for an action that this release does not know{named}", action=_OTHER_RECOVERY)


_REBOOT: Final = "drain the node and reboot it"
_RECOVERIES: Final[Mapping[str, str]] = {
    "system-reboot": _REBOOT,
    "reboot": _REBOOT,
    "bus-reset": "drain the node, stop what uses the GPU, and reset it over its PCI bus; reboot the node where that "
    "cannot be done",
    "reset": "drain the node, stop what uses the GPU, and reset it: `nvidia-smi -i {gpus} -r`",
    "recover-imex-domain": "stop the work in the NVLink domain and recover it: `systemctl restart nvidia-imex` on "
    "each of its nodes",
    "drain-reset": "start no new work on the GPU, let what runs there finish, then reset it: `nvidia-smi -i {gpus} -r`",
    "drain-p2p": "end all work that uses peer-to-peer access to the GPU; what runs on one GPU alone may go on",
}
"""What to do for each action that the driver asks for."""
_OTHER_RECOVERY: Final = "drain the node, and do what `nvidia-smi -q -i {gpus}` calls the GPU's recovery action"


def _ecc(gpu: GpuReading, facts: DriverFacts) -> Hit | Unread | None:
    trend, rows, count = facts.trend(gpu.index, gpu.uuid), gpu.remapped_rows, gpu.ecc_uncorrected
    if trend.new_errors:
        text = f"had {trend.new_errors} more uncorrectable errors since the sidecar started ({count} in all)"
        if rows is not None and (rows.pending or rows.failed):
            return hit(gpu, "new-unrepaired", f"{text}, and a row of memory is not repaired")
        return hit(gpu, "new", text, severity=Severity.WARNING)
    if trend.new_remaps:
        text = f"remapped {trend.new_remaps} more rows since the sidecar started ({_counts(gpu) if rows else ''})"
        return hit(gpu, "remap-growing", text, severity=Severity.WARNING)
    if count is None:
        return unread(gpu, *_ECC_CALLS)
    if count:
        text = f"had {count} uncorrectable errors since the driver was loaded"
        return hit(gpu, "counted", text, severity=Severity.WARNING)
    return None


def _fabric(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    if gpu.fabric is None:
        return unread(gpu, *_FABRIC_CALLS)
    return hit(gpu, gpu.fabric, f"has state {gpu.fabric}") if gpu.fabric in FABRIC_STATES else None


FABRIC_STATES: Final = ("failed", "not-started", "in-progress")
"""The states of the fabric registration that keep CUDA from starting."""


def _nvlink(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    if gpu.nvlinks is None or gpu.nvlinks_active is None:
        return unread(gpu, *_NVLINK_CALLS)
    if gpu.nvlinks_active >= gpu.nvlinks:
        return None
    return hit(gpu, "links-down", f"has {gpu.nvlinks_active} of {gpu.nvlinks} links active")


def _pcie(gpu: GpuReading, facts: DriverFacts) -> Hit | Unread | None:
    link = gpu.pcie
    if link is None or not facts.trend(gpu.index, gpu.uuid).pcie_degraded:
        return unread(gpu, *_PCIE_CALLS)
    narrow = link.width is not None and link.width_max is not None and link.width < link.width_max
    text = f"ran under load at generation {link.generation} x{link.width}, of {link.generation_max} x{link.width_max}"
    return hit(gpu, "width" if narrow else "generation", text)


_SLOWDOWNS: Final = {
    "hw_power_brake_slowdown": "power-brake",
    "hw_thermal_slowdown": "hardware",
    "sw_thermal_slowdown": "software",
}


def _thermal(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    if gpu.clock_events is None:
        return unread(gpu, *_CLOCK_CALLS)
    reasons = [reason for event, reason in _SLOWDOWNS.items() if event in gpu.clock_events]
    if not reasons:
        return None
    warmth = "" if gpu.temperature is None else f" at {gpu.temperature:g} degrees Celsius"
    return hit(gpu, reasons[0], f"is slowed down ({', '.join(reasons)}){warmth}")


def _unlicensed(gpu: GpuReading, _facts: DriverFacts) -> Hit | Unread | None:
    if gpu.licensed is None:
        return unread(gpu, *_LICENCE_CALLS)
    return None if gpu.licensed else hit(gpu, "unlicensed", "has no vGPU licence")


_ROWS: Final = ("nvmlDeviceGetRemappedRows",)
_FIELDS: Final = ("nvmlDeviceGetFieldValues",)
_ECC_CALLS: Final = ("nvmlDeviceGetTotalEccErrors",)
_FABRIC_CALLS: Final = ("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo")
_NVLINK_CALLS: Final = ("nvmlDeviceGetNvLinkState",)
_PCIE_CALLS: Final = (
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
)
_CLOCK_CALLS: Final = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_LICENCE_CALLS: Final = ("nvmlDeviceGetGridLicensableFeatures", "nvmlDeviceGetVirtualizationMode")

_LOOKS: Final[tuple[tuple[ConditionType, Look], ...]] = (
    (REMAP_FAILED, _remap_failed),
    (RECOVERY, _recovery),
    (ECC, _ecc),
    (REMAP_PENDING, _remap_pending),
    (FABRIC, _fabric),
    (NVLINK_DOWN, _nvlink),
    (PCIE, _pcie),
    (THERMAL, _thermal),
    (UNLICENSED, _unlicensed),
)


# -- what was reported of it ----------------------------------------------------------------------------


def _xids(kind: ConditionType, facts: DriverFacts, now: float) -> Finding:
    hits = tuple(_reported(kind, facts, now))
    missed = [("events-unavailable", sentence) for sentence in _unheard(facts)]
    return conclude(kind, hits, facts, missed=missed)


def _unheard(facts: DriverFacts) -> Iterable[str]:
    """Say whose events cannot be had."""
    if not facts.reading.xids_watched:
        yield "The driver's events cannot be had here; Xids are in the kernel log."
    for gpu in facts.reading.gpus:
        code = gpu.errors.get("nvmlDeviceRegisterEvents")
        if code is not None and facts.in_scope(gpu.index, gpu.uuid) is not False:
            yield f"The events of {name(gpu.index, gpu.uuid, gpu.pci_bus_id)} cannot be had (NVML code {code})."


def _concerns(kind: ConditionType, one: XidCount, facts: DriverFacts, now: float) -> bool:
    critical = explain(one.xid).kind is XidClass.HARDWARE
    settled = max(facts.loaded_at, facts.trend(one.index, one.uuid).healed_at)
    if explain(one.xid).reason is None or critical is not (kind is XID_CRITICAL):
        return False
    return one.last > settled and now - one.last < (XID_CRITICAL_SECONDS if critical else XID_WARNING_SECONDS)


def _reported(kind: ConditionType, facts: DriverFacts, now: float) -> Iterable[Hit]:
    # By uuid where there is one: the index of a GPU that is gone may be another's by now.
    addresses = {key(gpu.index, gpu.uuid): gpu.pci_bus_id for gpu in facts.reading.gpus}
    off_bus = {key(gpu.index, gpu.uuid) for gpu in facts.reading.gpus if gpu.code == LOST} | {
        key(one.index, one.uuid)
        for one in facts.reading.xids
        if explain(one.xid).reason is XidReason.FELL_OFF_BUS and _concerns(XID_CRITICAL, one, facts, now)
    }
    for one in facts.reading.xids:
        entry = explain(one.xid)
        if entry.reason is not None and _concerns(kind, one, facts, now):
            at = datetime.fromtimestamp(one.last, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            times = "once" if one.count == 1 else f"{one.count} times"
            yield Hit(
                index=one.index,
                uuid=one.uuid,
                pci=addresses.get(key(one.index, one.uuid)),
                reason=entry.reason,
                text=f"reported Xid {one.xid} ({entry.meaning}) {times}, last at {at}",
                action=_action(entry, off_bus=key(one.index, one.uuid) in off_bus),
            )


def _action(entry: Xid, *, off_bus: bool) -> str:
    """Say what to do about an Xid. A GPU that is off the bus cannot be reset, whatever else it reported."""
    if not entry.resets:
        return entry.action
    return explain(_OFF_BUS).action if off_bus else f"{entry.action} (`nvidia-smi -i {{gpus}} -r`)"


_OFF_BUS: Final = 79


# -- what it was made into ------------------------------------------------------------------------------


_SWITCH: Final = {False: "`nvidia-smi -i {gpus} -mig 0`", True: "`nvidia-smi -i {gpus} -mig 1`"}


def mode(mig: bool) -> str:
    """Say whether a GPU is in MIG mode, as the environment's item and a baseline do."""
    return "enabled" if mig else "disabled"


def _mig(facts: DriverFacts, drifts: Sequence[Drift]) -> Finding:
    wanted = next((one.expected for one in drifts if one.item == MIG_ITEM), None)
    if wanted is None and not facts.gpu_set.known and any(gpu.mig for gpu in facts.reading.gpus):
        return unknown(MIG.code, "set-unknown", "A GPU is in MIG mode; which GPUs are the server's is not known.")
    return survey(MIG, partial(_divided, wanted=wanted), facts)


def _divided(gpu: GpuReading, facts: DriverFacts, *, wanted: str | None) -> Hit | Unread | None:
    """``wanted`` is what the baseline wants of the GPUs' MIG modes where it is not as it wants it, else None."""
    if gpu.mig is None:
        return unread(gpu, "nvmlDeviceGetMigMode")
    # A container that was given MIG devices sees their GPUs too: only what is named as a whole counts.
    named = facts.gpu_set.source is not GpuSource.PREFLIGHT and any(
        gpu.uuid is not None and member.uuid == gpu.uuid and not member.mig for member in facts.gpu_set.gpus
    )
    if gpu.mig and named:
        instead = "name a MIG device instead (`nvidia-smi -L` lists them), or leave MIG mode on a drained node"
        return hit(gpu, "parent-given", "is in MIG mode and named as a whole", action=f"{instead}: {_SWITCH[False]}")
    if wanted in (None, mode(gpu.mig)):
        return None
    back = next((way for mig, way in _SWITCH.items() if mode(mig) == wanted), "`nvidia-smi -mig` sets it")
    return hit(
        gpu,
        "not-as-baseline",
        f"has MIG mode {mode(gpu.mig)}; the baseline wants {wanted}",
        action=f"bring the mode back on a drained node ({back}), or correct `mig` in the baseline",
        final=True,  # what NVML says of it and what the file says are both certain
    )
