"""Whether the driver is up and NVML can be used: causes that look alike from outside, told apart.

Which one it is follows from NVML's code, from where the agent runs (on a host what NVML says of the driver is true;
a container may merely lack access), and from what the kernel module says of itself in ``/proc/driver/nvidia``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from msgspec.structs import replace

from sidecar.model import ConditionType, Finding, Gate, Placement, Result, Severity, Status
from sidecar.nvml.reading import NvmlReading
from sidecar.probes.driver.declare import SUCCESS, condition, fine, unknown

_NO_PERMISSION, _NO_LIBRARY, _UNKNOWN = 4, 12, 999
FINAL: Final = frozenset({9, 12, 15, 18})
"""Codes that no further round makes more certain."""

LIBRARY_MISSING = condition(
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
NOT_LOADED = condition(
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
NO_ACCESS = condition(
    "sidecar-gpu-access",
    Severity.WARNING,
    Gate.NEVER,
    title="The sidecar has no access to the GPUs",
    when="In a container, NVML cannot be used (codes 12, 9, 4) although /proc shows a driver, or it never showed a GPU "
    "that is known to be the server's (or any, while that is not known) although /proc lists enough, or may not open "
    "one (code 4). This says nothing "
    "of the server's container.",
    remedy="Give the sidecar's container the GPUs without claiming one: runtimeClassName: nvidia with "
    "NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility, or the server's own device claim.",
    reasons={
        "no-library": "the driver's libraries are not injected into this container",
        "no-device-nodes": "this container has no GPU device nodes",
        "no-permission": "this container may not open the GPU device nodes",
        "no-gpus": "NVML works but shows none of the GPUs that /proc lists",
        "server-gpus-not-seen": "NVML works but never showed some of the GPUs that are known to be the server's",
    },
)
MISMATCH = condition(
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
ACCESS_LOST = condition(
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
PERMISSION = condition(
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
BLOCKED = condition(
    "driver-blocked",
    Severity.CRITICAL,
    Gate.LAUNCH,
    title="The operating system blocks the GPUs",
    when="NVML answers 17: the hypervisor, WSL or a policy of the system denies access.",
    remedy="Enable GPU access in the layer below: on WSL update Windows, its NVIDIA driver and `wsl --update`; in a "
    "virtual machine check the GPU assignment.",
    reasons={"blocked-by-os": "NVML says that the operating system blocked the request (code 17)"},
)
INIT_FAILED = condition(
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
HUNG = condition(
    "driver-hung",
    Severity.CRITICAL,
    Gate.NEVER,
    title="The GPU driver does not answer",
    when="A call into the driver did not return before the probe's deadline. A GPU whose calls hang is left out "
    "afterwards and named here; while it is not known to be the server's, this is a warning.",
    remedy="Look for Xid and `blocked for more than 120 seconds` lines in the kernel log; if it lasts, drain the node "
    "and reboot it.",
    reasons={
        "deadline": "the call did not return in time; the worker was replaced",
        "unkillable": "the call did not return, and its process cannot be killed (it waits inside the kernel)",
        "gpu-hung": "a call to one GPU does not return; it is left out, and the others are asked as before",
    },
)
CONDITIONS: Final[tuple[ConditionType, ...]] = (
    LIBRARY_MISSING,
    NOT_LOADED,
    NO_ACCESS,
    MISMATCH,
    ACCESS_LOST,
    PERMISSION,
    BLOCKED,
    INIT_FAILED,
    HUNG,
)
CAUSES: Final = tuple(kind.code for kind in CONDITIONS if kind is not HUNG)
"""What explains everything that is wrong with single GPUs."""


def judge(facts: NvmlReading, placement: Placement, *, seen_before: bool) -> dict[str, Finding]:
    """Judge all conditions but `driver-hung`; at most one holds.

    ``seen_before``: NVML showed a GPU earlier in the life of this agent, so that showing none is a loss.
    """
    cause = find_cause(facts, placement, seen_before=seen_before)
    return {
        kind.code: cause if cause is not None and kind.code == cause.code else _not_the_cause(kind.code, facts, cause)
        for kind in CONDITIONS
        if kind is not HUNG
    }


def hung(result: Result[Any], now: float) -> Finding:
    """Judge `driver-hung` after a round that did not end."""
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
        from_outcome=True,
    )


def find_cause(facts: NvmlReading, placement: Placement, *, seen_before: bool) -> Finding | None:
    """Find the one condition about opening NVML that holds; None if NVML works."""
    contained = placement is Placement.CONTAINER
    refused = facts.device_present and facts.device_refused is True
    if facts.code == _NO_PERMISSION and refused and facts.succeeded_before and contained:
        return _access_lost(facts)
    if (named := _named(facts, contained=contained)) is not None:
        return named
    if _versions_differ(facts):
        return _mismatch("versions-differ", facts)
    if refused and facts.code in (SUCCESS, _UNKNOWN):
        return _access_lost(facts)
    if facts.code != SUCCESS:
        reason = "init" if facts.call == "nvmlInit" else "session"
        return _true(INIT_FAILED, reason, f"NVML cannot be used: {_nvml(facts)}.", facts)
    if facts.count == 0 and contained and facts.module_gpus and not seen_before:
        return _no_access("no-gpus", facts)
    return None


def _named(facts: NvmlReading, *, contained: bool) -> Finding | None:
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


def _not_the_cause(code: str, facts: NvmlReading, cause: Finding | None) -> Finding:
    """Judge a condition other than the cause: fine where NVML got past it, else unknown.

    An answer that is certain one way is certain the other way: a driver that came back is not held off, and two
    causes never stand beside each other for a round.
    """
    certain = facts.code == SUCCESS or facts.code in FINAL
    if cause is None or code == NO_ACCESS.code or facts.code == SUCCESS:
        return replace(fine(code), final=certain)
    if cause.code == NO_ACCESS.code:
        return unknown(code, "no-gpu-access", cause.message)
    unreached = unknown(code, "not-reached", cause.message)
    if facts.code == _NO_LIBRARY:
        return unreached
    if code == MISMATCH.code:
        compared = facts.module_version is not None and facts.library_version is not None
        return replace(fine(code), final=certain) if compared and not _versions_differ(facts) else unreached
    return replace(fine(code), final=certain)


def beyond(cause: Finding) -> tuple[str, str]:
    """Say why nothing can be said of single GPUs: a token and a sentence."""
    return ("no-gpu-access" if cause.code == NO_ACCESS.code else "not-reached"), cause.message


def _true(kind: ConditionType, reason: str, message: str, facts: NvmlReading, *, remedy: str | None = None) -> Finding:
    return Finding(
        code=kind.code,
        status=Status.TRUE,
        reason=reason,
        message=message,
        remedy=remedy,
        evidence=_evidence(facts),
        final=facts.code in FINAL,
    )


def _evidence(facts: NvmlReading) -> tuple[str, ...]:
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


def _device(facts: NvmlReading) -> str:
    if not facts.device_present:
        return "absent"
    return {True: "open refused", False: "opens", None: "does not open"}[facts.device_refused]


def _set(value: str | None) -> str:
    return "not set" if value is None else value or "empty"


def _nvml(facts: NvmlReading) -> str:
    """Put the failed call in NVML's own terms: "nvmlInit answered 999 (Unknown Error)"."""
    return f"{facts.call or 'nvmlInit'} answered {facts.code} ({(facts.words or 'no description').rstrip('.')})"


def _versions_differ(facts: NvmlReading) -> bool:
    module, library = facts.module_version, facts.library_version
    return module is not None and library is not None and module != library


def _library_missing(facts: NvmlReading) -> Finding:
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


def _not_loaded(facts: NvmlReading) -> Finding:
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


def _no_access(reason: str, facts: NvmlReading) -> Finding:
    said = f"NVML shows 0 of the {facts.module_gpus} GPUs of this node" if reason == "no-gpus" else _nvml(facts)
    proc = f"the kernel module {facts.module_version}" if facts.module_version else "a driver"
    shown = f", although /proc shows {proc}" if facts.module_present and reason != "no-gpus" else ""
    return _true(NO_ACCESS, reason, f"This container has no access to the GPUs: {said}{shown}.", facts)


def _mismatch(reason: str, facts: NvmlReading) -> Finding:
    module = facts.module_version or "of unknown version"
    library = facts.library_version or facts.nvml_version or "of unknown version"
    message = f"The loaded kernel module is {module}, the driver's libraries are {library}"
    if facts.code != SUCCESS:
        message += f": {_nvml(facts)}"
    return _true(MISMATCH, reason, message + ".", facts)


def _access_lost(facts: NvmlReading) -> Finding:
    said = "NVML still works on what it had opened" if facts.code == SUCCESS else _nvml(facts)
    worked = facts.succeeded_before or facts.code == SUCCESS
    return _true(
        ACCESS_LOST,
        "revoked" if worked else "refused",
        f"This container lost its device cgroup: /dev/nvidiactl may no longer be opened; {said}."
        if worked
        else f"The device cgroup of this container refuses /dev/nvidiactl; {said}.",
        facts,
    )
