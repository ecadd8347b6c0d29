"""The probe `driver`: whether the GPU driver is up, which version it is, and whether its GPUs answer.

The judge tells causes apart that look alike from outside. Which one it is follows from NVML's code, from
where the agent runs (on a host what NVML says of the driver is true; a container may merely lack access),
and from what the kernel module says of itself in ``/proc/driver/nvidia``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sidecar.model import (
    ConditionType,
    Family,
    Feature,
    Finding,
    Gate,
    Outcome,
    Placement,
    Probe,
    Result,
    Sample,
    Severity,
    Status,
    World,
)
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.services import Services

DriverFacts = NvmlReading
"""The facts are the reading itself: there is nothing that this probe would add to it."""

_NAME = "driver"
_DEADLINE = 5.0
_SUCCESS, _NO_PERMISSION, _NOT_LOADED, _NO_LIBRARY, _LOST, _MISMATCH, _UNKNOWN = 0, 4, 9, 12, 15, 18, 999
_FINAL = frozenset({_NOT_LOADED, _NO_LIBRARY, _LOST, _MISMATCH})
"""Codes that no further round makes more certain."""

_SHARED_REASONS = {
    "pending": "the first round has not ended",
    "driver-hung": "the driver does not answer, and what was known before is too old",
    "probe-crashed": "the worker that asks NVML ended without an answer",
    "probe-error": "the probe itself failed",
    "not-reached": "NVML failed at something that comes before",
    "no-gpu-access": "this container has no access to the GPUs, so nothing can be said of the server's",
}
"""Tokens of an unknown condition, the same for all codes of this probe."""


def _condition(code: str, severity: Severity, gate: Gate, *, reasons: Mapping[str, str], **more: Any) -> ConditionType:
    return ConditionType(
        code=code, severity=severity, gate=gate, reasons={**reasons, **_SHARED_REASONS}, uses=Feature.GPU, **more
    )


LIBRARY_MISSING = _condition(
    "nvml-library-missing",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="The NVML library is missing",
    when="No libnvidia-ml.so.1 can be loaded (NVML code 12) on a host, or in a container on a machine whose "
    "/proc shows no NVIDIA driver either.",
    remedy="Install the NVIDIA driver with its user-space libraries; in a container, let the NVIDIA runtime inject "
    "them: runtimeClassName: nvidia, NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
    reasons={
        "not-found": "the dynamic loader finds no such library",
        "unloadable": "there is such a file, but it cannot be loaded",
    },
)
NOT_LOADED = _condition(
    "driver-not-loaded",
    Severity.CRITICAL,
    Gate.SERVING,
    title="The NVIDIA kernel module is not loaded",
    when="NVML answers 9 on a host, or in a container on a machine whose /proc shows no NVIDIA driver.",
    remedy="Load it with `modprobe nvidia`; if that fails after a kernel upgrade, rebuild it (`dkms autoinstall`) "
    "or boot the kernel that it was built for.",
    reasons={
        "not-loaded": "NVML says that no driver is loaded",
        "no-device-nodes": "the module is loaded, but NVML cannot reach it: the device nodes are missing or hidden",
    },
)
NO_ACCESS = _condition(
    "sidecar-gpu-access",
    Severity.WARNING,
    Gate.NEVER,
    title="The sidecar has no access to the GPUs",
    when="In a container, NVML cannot be used (codes 12, 9, 4) or shows no GPU although /proc shows a driver with "
    "GPUs. This says nothing of the server's container.",
    remedy="Give the sidecar's container the GPUs without claiming one: runtimeClassName: nvidia with "
    "NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility, or the server's own device claim.",
    reasons={
        "no-library": "the driver's libraries are not injected into this container",
        "no-device-nodes": "this container has no GPU device nodes",
        "no-permission": "this container may not open the GPU device nodes",
        "no-gpus": "NVML works but shows none of the GPUs that /proc lists",
    },
)
MISMATCH = _condition(
    "driver-library-mismatch",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="Kernel module and driver libraries differ",
    when="NVML answers 18, or the loaded kernel module and the file name of the NVML library carry different "
    "versions. CUDA work that runs goes on; every new process fails.",
    remedy="Drain the node and reboot it, or stop every GPU process and reload the module (`modprobe -r nvidia_drm "
    "nvidia_modeset nvidia_uvm nvidia && modprobe nvidia`); exclude the driver from unattended upgrades.",
    reasons={
        "refused": "NVML refuses to work with the loaded kernel module (code 18)",
        "versions-differ": "the two versions differ, though NVML did not say so",
    },
)
ACCESS_LOST = _condition(
    "device-access-lost",
    Severity.WARNING,
    Gate.NEVER,
    title="This container lost its GPU devices",
    when="/dev/nvidiactl is there but may not be opened, and NVML answers 999, or worked before. Typical after "
    "`systemctl daemon-reload` on a host whose container runtime lets systemd manage the device cgroup.",
    remedy="Recreate the pod: nothing inside the container heals it. For good: CDI, or device nodes linked under "
    "/dev/char, or the cgroupfs driver on the host.",
    reasons={
        "revoked": "it worked earlier in the sidecar's life",
        "refused": "it never worked in the sidecar's life",
    },
)
PERMISSION = _condition(
    "device-permission",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="No permission for the GPU devices",
    when="NVML answers 4 when it is opened, on a host. A single value that may not be read, as on a GPU in MIG mode, "
    "does not count.",
    remedy="Let this user open the device nodes: `ls -l /dev/nvidia*` should show crw-rw-rw-; else add the user to "
    "their group, or allow the devices in the service's DeviceAllow=.",
    reasons={"init-refused": "NVML may not open the device nodes (code 4)"},
)
BLOCKED = _condition(
    "driver-blocked",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="The operating system blocks the GPUs",
    when="NVML answers 17: the hypervisor, WSL or a policy of the system denies access.",
    remedy="Enable GPU access in the layer below: on WSL update Windows, its NVIDIA driver and `wsl --update`; in a "
    "virtual machine check the GPU assignment.",
    reasons={"blocked-by-os": "NVML says that the operating system blocked the request (code 17)"},
)
INIT_FAILED = _condition(
    "nvml-init-failed",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="NVML cannot be used",
    when="NVML answers a code at start that no other condition covers.",
    remedy="Run `nvidia-smi` and look for NVRM lines in the kernel log (`dmesg | grep -i nvrm`); reset or reboot the "
    "node if they name a GPU.",
    reasons={
        "init": "nvmlInit failed; the message has the code",
        "session": "NVML was opened, but a call about the system failed; the message has the code",
    },
)
HUNG = _condition(
    "driver-hung",
    Severity.CRITICAL,
    Gate.NEVER,
    title="The GPU driver does not answer",
    when="A call into the driver did not return before the probe's deadline.",
    remedy="Look for Xid and `blocked for more than 120 seconds` lines in the kernel log; if it lasts, drain the node "
    "and reboot it.",
    reasons={
        "deadline": "the call did not return in time; the worker was replaced",
        "unkillable": "the call did not return, and its process cannot be killed (it waits inside the kernel)",
    },
)
GPU_LOST = _condition(
    "gpu-lost",
    Severity.CRITICAL,
    Gate.SERVING,
    title="A GPU does not answer",
    when="A GPU answers NVML code 15, or cannot be addressed at all. While it is not known which GPUs are the "
    "server's, this is a warning and gates nothing.",
    remedy="Drain the node and power-cycle it; if the GPU is lost again, check power, cooling and seating, and "
    "replace it.",
    reasons={
        "lost": "NVML says that the GPU is lost: it has fallen off the bus (code 15)",
        "unreachable": "NVML cannot address the GPU, with the code in the message",
    },
    depends_on=(
        LIBRARY_MISSING.code,
        NOT_LOADED.code,
        NO_ACCESS.code,
        MISMATCH.code,
        ACCESS_LOST.code,
        PERMISSION.code,
        BLOCKED.code,
        INIT_FAILED.code,
    ),
)
CONDITIONS = (
    LIBRARY_MISSING,
    NOT_LOADED,
    NO_ACCESS,
    MISMATCH,
    ACCESS_LOST,
    PERMISSION,
    BLOCKED,
    INIT_FAILED,
    HUNG,
    GPU_LOST,
)

_GPU = ("gpu", "uuid")
FAMILIES = (
    Family(name="nvml_up", kind="gauge", help="1 if NVML could be opened and asked, 0 if not."),
    Family(name="nvml_return_code", kind="gauge", help="NVML's last return code; 0 is success, 12 no library."),
    Family(
        name="driver_info",
        kind="info",
        help="Versions of the GPU driver; an empty label is not known.",
        labels=("driver_version", "kernel_module_version", "kernel_module", "cuda_driver_version", "nvml_version"),
    ),
    Family(name="gpus_visible", kind="gauge", help="Number of GPUs that NVML shows to the sidecar."),
    Family(
        name="gpu_info",
        kind="info",
        help="Identity of a GPU; mig is enabled, disabled or empty where there is no such mode.",
        labels=("gpu", "uuid", "name", "compute_capability", "mig"),
    ),
    Family(name="gpu_up", kind="gauge", help="1 if the GPU answers NVML, 0 if it is lost or unreachable.", labels=_GPU),
    Family(name="gpu_memory_used_bytes", kind="gauge", help="GPU memory in use.", labels=_GPU),
    Family(name="gpu_memory_total_bytes", kind="gauge", help="GPU memory in total.", labels=_GPU),
    Family(name="gpu_temperature_celsius", kind="gauge", help="Temperature of the GPU core.", labels=_GPU),
    Family(name="gpu_power_watts", kind="gauge", help="Power drawn by the GPU board.", labels=_GPU),
    Family(
        name="gpu_utilization_ratio",
        kind="gauge",
        help="Share of the last sample period in which a kernel ran, 0 to 1.",
        labels=_GPU,
    ),
)


# -- collect --------------------------------------------------------------------------------------


async def collect(services: Services) -> DriverFacts:
    """Ask NVML once. Raises ProbeTimeout and ProbeCrash as `NvmlClient.round` does."""
    return await services.nvml.round(services.settings.deadlines.get(_NAME, _DEADLINE))


# -- judge ----------------------------------------------------------------------------------------


def judge(result: Result[DriverFacts], world: World) -> Iterable[Finding]:
    """Say of each condition whether it holds; at most one of those about opening NVML does."""
    found: dict[str, Finding] = {}
    if result.facts is not None:
        found = _from_facts(result.facts, world.standing.placement)
    if result.outcome is Outcome.TIMEOUT:
        found[HUNG.code] = _hung(result, world.now)
    elif result.facts is not None:
        found[HUNG.code] = Finding(code=HUNG.code, status=Status.FALSE)
    token, sentence = _why_unknown(result)
    return tuple(found.get(kind.code) or _unknown(kind.code, token, sentence) for kind in CONDITIONS)


def _why_unknown(result: Result[DriverFacts]) -> tuple[str, str]:
    match result.outcome:
        case Outcome.PENDING:
            return "pending", "The driver has not been asked yet."
        case Outcome.TIMEOUT:
            return "driver-hung", "The driver does not answer."
        case Outcome.CRASHED:
            return "probe-crashed", result.detail
        case _:
            return "probe-error", result.detail


def _unknown(code: str, reason: str, message: str) -> Finding:
    return Finding(code=code, status=Status.UNKNOWN, reason=reason, message=message)


def _hung(result: Result[DriverFacts], now: float) -> Finding:
    where = result.where or "an unknown call"
    message = f"The driver did not return from {where}"
    if result.failing_since is not None:
        since = datetime.fromtimestamp(result.failing_since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        message += f"; it has not answered since {since}, {max(0, round(now - result.failing_since))} s ago"
    if result.stuck:
        message += "; the worker that waits for it cannot be killed"
    return Finding(
        code=HUNG.code,
        status=Status.TRUE,
        reason="unkillable" if result.stuck else "deadline",
        message=message + ".",
        evidence=(f"call: {where}",),
    )


def _from_facts(facts: DriverFacts, placement: Placement) -> dict[str, Finding]:
    """Judge everything that facts decide, `driver-hung` apart."""
    cause = _cause(facts, placement)
    found: dict[str, Finding] = {}
    for kind in CONDITIONS:
        if cause is not None and kind.code == cause.code:
            found[kind.code] = cause
        else:
            found[kind.code] = _not_the_cause(kind.code, facts, cause)
    if facts.code == _SUCCESS and facts.count:
        found[GPU_LOST.code] = _gpu_lost(facts)
    del found[HUNG.code]
    return found


def _cause(facts: DriverFacts, placement: Placement) -> Finding | None:
    """Find the one condition about opening NVML that holds; None if NVML works."""
    contained = placement is Placement.CONTAINER
    refused = facts.device_present and facts.device_refused is True
    if facts.code == _NO_PERMISSION and refused and facts.succeeded_before and contained:
        return _access_lost(facts)
    if (named := _named(facts, contained=contained)) is not None:
        return named
    if _versions_differ(facts):
        return _mismatch("versions-differ", facts)
    if refused and facts.code in (_SUCCESS, _UNKNOWN):
        return _access_lost(facts)
    if facts.code != _SUCCESS:
        reason = "init" if facts.call == "nvmlInit" else "session"
        return _true(INIT_FAILED, reason, f"NVML cannot be used: {_nvml(facts)}.", facts)
    if facts.count == 0 and contained and facts.module_gpus:
        return _no_access("no-gpus", facts)
    return None


def _named(facts: DriverFacts, *, contained: bool) -> Finding | None:
    """Judge the codes that name their cause. In a container it may be the container's alone."""
    elsewhere = contained and facts.module_present
    match facts.code:
        case 12:
            return _no_access("no-library", facts) if elsewhere else _library_missing(facts)
        case 9:
            return _no_access("no-device-nodes", facts) if elsewhere else _not_loaded(facts)
        case 4 if contained:
            # Also where /proc is masked: a refusal shows that there is a device, and only here is it refused.
            return _no_access("no-permission", facts)
        case 4:
            return _true(PERMISSION, "init-refused", f"NVML may not open the GPU devices: {_nvml(facts)}.", facts)
        case 17:
            return _true(BLOCKED, "blocked-by-os", f"The operating system blocks the GPUs: {_nvml(facts)}.", facts)
        case 18:
            return _mismatch("refused", facts)
        case _:
            return None


def _not_the_cause(code: str, facts: DriverFacts, cause: Finding | None) -> Finding:
    """Judge a condition other than the cause: fine where NVML got past it, else unknown."""
    fine = Finding(code=code, status=Status.FALSE)
    if cause is None or code == NO_ACCESS.code:
        return fine
    works = facts.code == _SUCCESS
    if cause.code == NO_ACCESS.code and not (works and code != GPU_LOST.code):
        return _unknown(code, "no-gpu-access", cause.message)
    unreached = _unknown(code, "not-reached", cause.message)
    if facts.code == _NO_LIBRARY:
        return unreached
    if code == GPU_LOST.code:
        return fine if works else unreached
    if code == MISMATCH.code:
        compared = facts.module_version is not None and facts.library_version is not None
        return fine if works or (compared and not _versions_differ(facts)) else unreached
    return fine


def _true(kind: ConditionType, reason: str, message: str, facts: DriverFacts, *, remedy: str | None = None) -> Finding:
    return Finding(
        code=kind.code,
        status=Status.TRUE,
        reason=reason,
        message=message,
        remedy=remedy,
        evidence=_evidence(facts),
        final=facts.code in _FINAL,
    )


def _evidence(facts: DriverFacts) -> tuple[str, ...]:
    module = "shows no NVIDIA driver"
    if facts.module_present:
        module = f"shows {facts.module_flavour or 'an'} kernel module {facts.module_version or 'of unknown version'}"
    items = [f"{facts.call or 'NVML'}: {facts.code}", f"/proc/driver/nvidia: {module}"]
    if facts.module_gpus is not None:
        items.append(f"GPUs in /proc: {facts.module_gpus}")
    if facts.library is not None:
        items.append(f"library: {facts.library}")
    if facts.loader is not None:
        items.append(f"loader: {facts.loader}")
    items.append(f"/dev/nvidiactl: {_device(facts)}")
    items.append(f"NVIDIA_VISIBLE_DEVICES: {_set(facts.visible_devices)}")
    items.append(f"NVIDIA_DRIVER_CAPABILITIES: {_set(facts.driver_capabilities)}")
    return tuple(items)


def _device(facts: DriverFacts) -> str:
    if not facts.device_present:
        return "absent"
    return {True: "open refused", False: "opens", None: "does not open"}[facts.device_refused]


def _set(value: str | None) -> str:
    return "not set" if value is None else value or "empty"


def _nvml(facts: DriverFacts) -> str:
    """Put the failed call in NVML's own terms: "nvmlInit answered 999 (Unknown Error)"."""
    return f"{facts.call or 'nvmlInit'} answered {facts.code} ({facts.words or 'no description'})"


def _versions_differ(facts: DriverFacts) -> bool:
    module, library = facts.module_version, facts.library_version
    return module is not None and library is not None and module != library


def _library_missing(facts: DriverFacts) -> Finding:
    absent = facts.loader is None or "No such file" in facts.loader
    message = (
        "No NVIDIA driver library: libnvidia-ml.so.1 is not there."
        if absent
        else (f"The NVIDIA driver library libnvidia-ml.so.1 cannot be loaded: {facts.loader}.")
    )
    remedy = None
    if facts.module_version is not None:
        branch = facts.module_version.partition(".")[0]
        remedy = (
            f"Install the user-space libraries of driver {facts.module_version}, which the loaded kernel module has "
            f"(Ubuntu: apt-get install libnvidia-compute-{branch}; Debian: libnvidia-ml1)."
        )
    return _true(LIBRARY_MISSING, "not-found" if absent else "unloadable", message, facts, remedy=remedy)


def _not_loaded(facts: DriverFacts) -> Finding:
    if not facts.module_present:
        return _true(NOT_LOADED, "not-loaded", f"The NVIDIA kernel module is not loaded: {_nvml(facts)}.", facts)
    return _true(
        NOT_LOADED,
        "no-device-nodes",
        f"The NVIDIA kernel module {facts.module_version or ''} is loaded, but NVML cannot reach it: "
        f"{_nvml(facts)}.".replace("  ", " "),
        facts,
        remedy="Create the device nodes (`nvidia-modprobe -c 0 -u`, or run `nvidia-smi` once as root), and make sure "
        "that the service may see them (no PrivateDevices=yes).",
    )


def _no_access(reason: str, facts: DriverFacts) -> Finding:
    said = f"NVML shows 0 of the {facts.module_gpus} GPUs of this node" if reason == "no-gpus" else _nvml(facts)
    proc = f"the kernel module {facts.module_version}" if facts.module_version else "a driver"
    shown = f", although /proc shows {proc}" if facts.module_present and reason != "no-gpus" else ""
    return _true(NO_ACCESS, reason, f"This container has no access to the GPUs: {said}{shown}.", facts)


def _mismatch(reason: str, facts: DriverFacts) -> Finding:
    module = facts.module_version or "of unknown version"
    library = facts.library_version or facts.nvml_version or "of unknown version"
    message = f"The loaded kernel module is {module}, the driver's libraries are {library}"
    if facts.code != _SUCCESS:
        message += f": {_nvml(facts)}"
    return _true(MISMATCH, reason, message + ".", facts)


def _access_lost(facts: DriverFacts) -> Finding:
    said = "NVML still works on what it had opened" if facts.code == _SUCCESS else _nvml(facts)
    worked = facts.succeeded_before or facts.code == _SUCCESS
    return _true(
        ACCESS_LOST,
        "revoked" if worked else "refused",
        f"This container lost its device cgroup: /dev/nvidiactl may no longer be opened; {said}."
        if worked
        else f"The device cgroup of this container refuses /dev/nvidiactl; {said}.",
        facts,
    )


def _gpu_lost(facts: DriverFacts) -> Finding:
    silent = [gpu for gpu in facts.gpus if gpu.code != 0]
    if not silent:
        return Finding(code=GPU_LOST.code, status=Status.FALSE)
    lost = any(gpu.code == _LOST for gpu in silent)
    named = ", ".join(
        f"GPU {gpu.index} ({gpu.uuid or 'uuid unknown'}): {gpu.code} {gpu.words or ''}".rstrip() for gpu in silent
    )
    return Finding(
        code=GPU_LOST.code,
        status=Status.TRUE,
        reason="lost" if lost else "unreachable",
        message=f"{len(silent)} of {len(facts.gpus)} GPUs do not answer NVML: {named}.",
        gpus=tuple((str(gpu.index), gpu.uuid or "") for gpu in silent),
        final=lost,
        # Which GPUs are the server's is not known: one dead GPU must not take its neighbours' pods out.
        severity=Severity.WARNING,
        gate=Gate.NEVER,
    )


# -- publish --------------------------------------------------------------------------------------


def samples(facts: DriverFacts) -> Iterable[Sample]:
    """Give the series of a round. What is not known has none."""
    yield Sample("nvml_up", (), float(facts.code == _SUCCESS))
    yield Sample("nvml_return_code", (), float(facts.code))
    versions = (
        facts.driver_version,
        facts.module_version,
        facts.module_flavour,
        facts.cuda_driver_version,
        facts.nvml_version,
    )
    if any(versions):
        yield Sample("driver_info", tuple(value or "" for value in versions), 1.0)
    if facts.code == _SUCCESS and facts.count is not None:
        yield Sample("gpus_visible", (), float(facts.count))
    for gpu in facts.gpus:
        yield from _gpu_samples(gpu)


def _gpu_samples(gpu: GpuReading) -> Iterable[Sample]:
    labels = (str(gpu.index), gpu.uuid or "")
    if gpu.name is not None or gpu.compute_capability is not None:
        mig = {True: "enabled", False: "disabled", None: ""}[gpu.mig]
        yield Sample("gpu_info", (*labels, gpu.name or "", gpu.compute_capability or "", mig), 1.0)
    yield Sample("gpu_up", labels, float(gpu.code == 0))
    for family, value in (
        ("gpu_memory_used_bytes", gpu.memory_used),
        ("gpu_memory_total_bytes", gpu.memory_total),
        ("gpu_temperature_celsius", gpu.temperature),
        ("gpu_power_watts", gpu.power),
        ("gpu_utilization_ratio", gpu.utilization),
    ):
        if value is not None:
            yield Sample(family, labels, float(value))


def identity(facts: DriverFacts) -> Mapping[str, str]:
    """Give the items of the environment that are known: driver, kernel_module, cuda_driver, gpu_model."""
    # With one model unknown the list would be wrong, and look like a change.
    names = {gpu.name for gpu in facts.gpus}
    model = ", ".join(sorted(name for name in names if name)) if None not in names else None
    items = {
        "driver": facts.driver_version,
        "kernel_module": facts.module_version,
        "cuda_driver": facts.cuda_driver_version,
        "gpu_model": model,
    }
    return {item: value for item, value in items.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSection:
    """The report's ``driver``. A field that is null is not known.

    ``return_code`` is NVML's (0 success, 12 no library), ``failed_call`` the call that failed and
    ``error`` NVML's words for it. ``kernel_module`` is open or proprietary. ``library_version`` is the
    version in the file name of the loaded NVML library. ``gpus_visible`` is the number that NVML shows,
    ``gpus_on_node`` the number that the kernel module lists. ``field_errors`` maps an NVML call that failed
    without further harm to its code.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSection:
    """One entry of the report's ``gpus``. A field that is null is not known.

    ``up`` tells whether the GPU answers NVML; ``return_code`` is why not. ``mig`` is the current MIG mode.
    ``utilization_ratio`` runs from 0 to 1. ``field_errors`` maps an NVML call that failed to its code.
    """

    gpu: str
    uuid: str | None
    up: bool
    return_code: int | str
    name: str | None
    compute_capability: str | None
    mig: bool | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    temperature_celsius: float | None
    power_watts: float | None
    utilization_ratio: float | None
    field_errors: Mapping[str, int | str]


def report(facts: DriverFacts) -> Mapping[str, Any]:
    """Give the report's ``driver`` and ``gpus``; the latter is null where NVML could not list them."""
    driver = DriverSection(
        return_code=facts.code,
        failed_call=facts.call,
        error=facts.words,
        driver_version=facts.driver_version,
        kernel_module_version=facts.module_version,
        kernel_module=facts.module_flavour,
        cuda_driver_version=facts.cuda_driver_version,
        nvml_version=facts.nvml_version,
        library=facts.library,
        library_version=facts.library_version,
        gpus_visible=facts.count,
        gpus_on_node=facts.module_gpus,
        field_errors=facts.errors,
    )
    gpus = tuple(
        GpuSection(
            gpu=str(gpu.index),
            uuid=gpu.uuid,
            up=gpu.code == 0,
            return_code=gpu.code,
            name=gpu.name,
            compute_capability=gpu.compute_capability,
            mig=gpu.mig,
            memory_used_bytes=gpu.memory_used,
            memory_total_bytes=gpu.memory_total,
            temperature_celsius=gpu.temperature,
            power_watts=gpu.power,
            utilization_ratio=gpu.utilization,
            field_errors=gpu.errors,
        )
        for gpu in facts.gpus
    )
    return {"driver": driver, "gpus": gpus if facts.code == _SUCCESS else None}


PROBE: Probe[DriverFacts] = Probe(
    name=_NAME,
    title="GPU driver",
    interval=10.0,
    deadline=_DEADLINE,
    collect=collect,
    judge=judge,
    samples=samples,
    families=FAMILIES,
    conditions=CONDITIONS,
    identity=identity,
    report=report,
    sections={"driver": DriverSection, "gpus": tuple[GpuSection, ...]},
    requirable={
        "cuda": (
            LIBRARY_MISSING.code,
            NOT_LOADED.code,
            MISMATCH.code,
            PERMISSION.code,
            BLOCKED.code,
            INIT_FAILED.code,
            HUNG.code,
        )
    },
)
"""What the rest of the agent needs to know of this probe."""
