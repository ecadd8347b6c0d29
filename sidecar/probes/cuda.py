"""Whether the server's CUDA build can run on this driver and on these GPUs. By reading alone: nothing is loaded.

Three things must fit: the CUDA version that torch was built for and the driver, the ``libcuda.so.1`` that the
server's dynamic loader finds and the kernel module, and the architectures of the binaries and the GPUs. What a
running server says of its device settles what reading leaves open, and never overrules what reading shows: the
files may have been replaced since it started.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from packaging.version import Version

from sidecar.cudalibs import (
    Capability,
    build_runs,
    driver_runs,
    is_older,
    kernel_runs,
    minimum_driver,
    shown,
    torch_build,
)
from sidecar.environment import EnvironmentFacts, LibraryFile
from sidecar.gpuset import Gpu, GpuSet, capabilities, server_gpus
from sidecar.model import (
    Answer,
    ConditionType,
    Feature,
    Finding,
    Gate,
    Placement,
    Probe,
    Result,
    Sample,
    Scope,
    Severity,
    Skip,
    Status,
    Target,
    World,
)
from sidecar.nvml.reading import NvmlReading
from sidecar.requirements import installer, parsed, pinned
from sidecar.services import Services, driver_reading
from sidecar.sglangtexts import unavailable

_NOT_LOADED, _NO_LIBRARY, _BLOCKED, _MISMATCH = 9, 12, 17, 18

_UNKNOWN_REASONS: Mapping[str, str] = {
    "no-interpreter": "Unknown: no interpreter of the server was found.",
    "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing about the server's.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
    "torch-not-found": "Unknown: no torch was found in the server's environment.",
    "torch-cuda-unknown": "Unknown: torch's version file does not say for which CUDA it was built.",
    "driver-unknown": "Unknown: the driver's version is not known.",
}


def _condition(
    code: str, title: str, when: str, remedy: str, reasons: Mapping[str, str], **other: Any
) -> ConditionType:
    return ConditionType(
        **{
            "code": code,
            "severity": Severity.CRITICAL,
            "gate": Gate.LAUNCH,
            "title": title,
            "when": when,
            "remedy": remedy,
            "reasons": {**reasons, **_UNKNOWN_REASONS},
            "uses": Feature.GPU,
            **other,
        }
    )


_HALF_UPGRADED: Final = "driver-library-mismatch"
"""The driver's libraries were upgraded already, and the module that is loaded is still the older one."""

TOO_OLD = _condition(
    "driver-too-old-for-cuda",
    "The driver is too old for torch's CUDA",
    "The server's torch was built for a CUDA major that this driver does not run. A newer minor of the same major "
    "is fine (CUDA 11 and later), and so is a forward-compatibility package that the loader finds, on data-center "
    "GPUs. SGLang itself only warns, and may go on with the CPU.",
    "Upgrade the driver, or use an image whose torch was built for an older CUDA.",
    {
        "driver-older": "The driver runs an older CUDA major only.",
        "compat-needs-datacenter-gpu": "Only a forward-compatibility package would help, and these GPUs refuse it.",
        "compat-may-apply": "Unknown: a forward-compatibility package is installed, and whether the server's loader "
        "finds it cannot be seen from here.",
        "versions-disagree": "Unknown: the driver's version and the CUDA version that NVML states contradict each "
        "other, as where another libcuda is found first.",
    },
    depends_on=(_HALF_UPGRADED,),
)
LIBCUDA = _condition(
    "libcuda-unusable",
    "The server's libcuda.so.1 cannot work",
    "The dynamic loader, with the server's LD_LIBRARY_PATH, finds no libcuda.so.1 although a driver is loaded, or "
    "first finds one that does not fit the loaded driver. NVML works all the same.",
    "Let the container runtime mount the driver's libraries, and keep stubs and compat folders out of "
    "LD_LIBRARY_PATH and /etc/ld.so.conf.d.",
    {
        "not-mounted": "There is none: the container runtime did not mount the driver's libraries.",
        "stub": "A toolkit's stub, made for linking only, is found first.",
        "compat-shadows": "One that is older than the loaded kernel module is found first (CUDA error 803).",
        "compat-needs-datacenter-gpu": "A forward-compatibility one is found first, and these GPUs refuse it "
        "(CUDA error 804).",
        "scope-image": "Unknown: the driver's files are mounted per container, and the server's cannot be seen.",
        "environ-unseen": "Unknown: the server's LD_LIBRARY_PATH cannot be seen from here.",
        "no-driver": "Unknown: no kernel module is loaded, so none is to be expected.",
    },
)
ARCH = _condition(
    "gpu-arch-unsupported",
    "torch or the kernel wheel has no code for a GPU",
    "A GPU's compute capability is not among the architectures for which torch or sgl_kernel was built. Imports "
    "succeed; the first kernel fails with `no kernel image is available for execution on the device`.",
    "Install the torch and the kernel wheel that SGLang pins, built for a CUDA version that knows these GPUs.",
    {
        "not-in-torch-build": "torch has no code for it.",
        "not-in-kernel-wheel": "sgl_kernel has no code for it.",
        "gpus-unknown": "Unknown: no GPU's compute capability is known.",
        "architectures-unknown": "Unknown: this build's architectures are not published.",
    },
)
UNAVAILABLE = _condition(
    "cuda-unavailable-to-torch",
    "torch cannot use CUDA",
    "torch was built without CUDA, or what it needs of the driver is not there. "
    "Never concluded from an import, which runs with the GPUs hidden.",
    "Install the torch that SGLang pins, in its build for CUDA.",
    {
        "torch-without-cuda": "torch is a build without CUDA.",
        "driver-unusable": "The driver cannot be used.",
        "driver-too-old": "The driver is too old for torch's CUDA.",
        "libcuda-unusable": "The server's libcuda.so.1 cannot work.",
        "rocm-build": "Unknown: torch is a build for AMD GPUs, and no NVIDIA hardware is seen.",
        "not-verified": "Unknown: reading found no fault, and no running server proves that there is none.",
    },
    depends_on=(
        "nvml-library-missing",
        "driver-not-loaded",
        "driver-library-mismatch",
        "driver-blocked",
        "device-permission",
        TOO_OLD.code,
        LIBCUDA.code,
    ),
)
FELL_BACK = _condition(
    "server-fell-back-to-cpu",
    "The server runs on the CPU without having been told to",
    "The running server resolved its device to cpu, no --device was given, and the machine has NVIDIA hardware.",
    "Repair what keeps torch from using CUDA, then restart the server; --device cuda makes it fail instead.",
    {
        "resolved-to-cpu": "Its information says cpu, and its command line does not ask for it.",
        "info-unseen": "Unknown: the server's information cannot be had.",
        "flags-unseen": "Unknown: the server's command line cannot be seen, or not in full.",
    },
    gate=Gate.NEVER,
)
CONDITIONS: Final = (TOO_OLD, LIBCUDA, ARCH, UNAVAILABLE, FELL_BACK)


# -- facts ------------------------------------------------------------------------------------------


class CudaFacts(Struct, frozen=True, kw_only=True):
    """All that is judged.

    ``environment`` is None where no interpreter was found, ``reading`` where NVML was not read yet. ``device`` is
    what the running server resolved, ``device_asked`` the one that its flags name; ``flags_seen`` says that a flag
    which is not there was not given. ``gpus`` are the server's, None before NVML was read. ``machine`` is the
    processor's architecture as uname names it.
    """

    environment: EnvironmentFacts | None
    reading: NvmlReading | None
    device: str | None = None
    device_asked: str | None = None
    flags_seen: bool = False
    info_seen: bool = False
    gpus: GpuSet | None = None
    machine: str = "x86_64"


async def collect(services: Services) -> CudaFacts:
    """Read the environment, shared with other probes, and take the driver probe's last reading.

    Raises ProbeTimeout and ProbeCrash as the reading of the environment does.
    """
    target = await services.targets.find()
    environment, reading, info = await asyncio.gather(
        _environment(services, target), driver_reading(services), services.server.info(target)
    )
    asked = target.launch.get("device")
    return CudaFacts(
        environment=environment,
        reading=reading,
        device=info.device if info is not None else None,
        device_asked=asked if isinstance(asked, str) else None,
        flags_seen=target.launch_source is not None and "incomplete" not in target.launch,
        info_seen=info is not None,
        gpus=None if reading is None else server_gpus(services.settings, target, reading, services.standing, info),
        machine=os.uname().machine,
    )


async def _environment(services: Services, target: Target) -> EnvironmentFacts | None:
    try:
        return await services.environment.read(target)
    except Skip:
        return None


# -- judgement --------------------------------------------------------------------------------------


def judge(result: Result[CudaFacts], world: World) -> Iterable[Finding]:
    """Judge each condition from this probe's own facts; the driver's state is taken from the reading's code."""
    facts = result.facts
    if facts is None:
        return ()
    too_old = _driver_too_old(facts)
    libcuda = _libcuda_unusable(facts)
    return [
        _settled(too_old, facts),
        _settled(libcuda, facts),
        _arch_unsupported(facts),
        _unavailable(facts, world, too_old, libcuda),
        _fell_back(facts, world),
    ]


def _unknown(kind: ConditionType, reason: str, message: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=kind.code, status=Status.UNKNOWN, reason=reason, message=message, evidence=evidence)


def _fine(kind: ConditionType, message: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(code=kind.code, status=Status.FALSE, message=message, evidence=evidence)


def _settled(finding: Finding, facts: CudaFacts) -> Finding:
    """Let a server that runs on CUDA settle what reading left open."""
    if finding.status is Status.UNKNOWN and _runs_on_cuda(facts):
        return replace(finding, status=Status.FALSE, reason=None, message="The running server uses CUDA.")
    return finding


def _runs_on_cuda(facts: CudaFacts) -> bool:
    environment = facts.environment
    amd = environment is not None and environment.torch_hip is not None
    # SGLang calls AMD's devices cuda, too.
    return (facts.device or "").startswith("cuda") and not amd


def _blind(facts: CudaFacts) -> str | None:
    """Token that says why nothing is known of the server's files, or None."""
    environment = facts.environment
    if environment is None:
        return "no-interpreter"
    if environment.problem is not None:
        return environment.problem
    return "scope-self" if environment.scope is Scope.SELF else None


def _driver_version(facts: CudaFacts) -> str | None:
    """Version of the driver in the kernel, which decides what can run."""
    reading = facts.reading
    return None if reading is None else reading.module_version or reading.driver_version


def _nvidia_hardware(facts: CudaFacts) -> bool | None:
    """Whether NVIDIA hardware with a driver was seen; None before NVML was read."""
    reading = facts.reading
    return None if reading is None else reading.module_present or bool(reading.count)


def _consumer_gpu(facts: CudaFacts) -> str | None:
    """Name of a GPU that certainly refuses forward compatibility: a consumer's one."""
    names = (gpu.name for gpu in (facts.reading.gpus if facts.reading is not None else ()))
    return next((name for name in names if name and ("GeForce" in name or "TITAN" in name)), None)


# -- driver and CUDA version ------------------------------------------------------------------------


def _driver_too_old(facts: CudaFacts) -> Finding:
    environment = facts.environment
    if environment is None or _blind(facts) is not None:
        return _unknown(TOO_OLD, _blind(facts) or "no-interpreter")
    if not environment.torch_present:
        return _unknown(TOO_OLD, "torch-not-found")
    if environment.torch_without_cuda:
        return _fine(TOO_OLD, "torch is a build without CUDA.")
    cuda = environment.torch_cuda
    if cuda is None:
        return _unknown(TOO_OLD, "torch-cuda-unknown")
    driver = _driver_version(facts)
    stated = facts.reading.cuda_driver_version if facts.reading is not None else None
    runs = driver_runs(cuda, driver, stated)
    evidence = _version_evidence(facts)
    if runs is None:
        disagree = driver is not None and stated is not None
        return _unknown(TOO_OLD, "versions-disagree" if disagree else "driver-unknown", evidence=evidence)
    if runs:
        if stated is not None and stated.split(".")[0] == cuda.split(".")[0] and is_older(stated, cuda):
            note = (
                f"CUDA {cuda} is a newer minor than the driver's {stated}, which is compatible; only what is compiled "
            )
            evidence += (note + "at run time from PTX of the newer minor needs a newer driver",)
        return _fine(TOO_OLD, evidence=evidence)
    return _forward_compatibility(facts, environment, cuda, evidence)


def _version_evidence(facts: CudaFacts) -> tuple[str, ...]:
    environment, reading = facts.environment, facts.reading
    shown_items = {
        "torch": environment.torch_version if environment is not None else None,
        "CUDA of torch": environment.torch_cuda if environment is not None else None,
        "driver": _driver_version(facts),
        "CUDA of the driver, by NVML": reading.cuda_driver_version if reading is not None else None,
    }
    return tuple(f"{name}: {value}" for name, value in shown_items.items() if value is not None)


def _forward_compatibility(
    facts: CudaFacts, environment: EnvironmentFacts, cuda: str, evidence: tuple[str, ...]
) -> Finding:
    """Judge a driver that is too old by itself: a newer libcuda that is found first may make up for it."""
    libraries = environment.libcuda
    fitting = tuple(one for one in (*libraries.found, *libraries.compat) if _fits(one, cuda))
    first = libraries.found[0] if libraries.found else None
    seen = environment.scope is Scope.SERVER and libraries.path_seen
    if fitting and (consumer := _consumer_gpu(facts)) is not None:
        finding = _too_old(facts, cuda, "compat-needs-datacenter-gpu", evidence)
        message = f"{finding.message} Forward compatibility does not work on {consumer}."
        return replace(finding, message=message, remedy=f"{_upgrade(cuda)}.")
    if seen and first is not None and _fits(first, cuda):
        reason = (
            f"forward compatibility: {first.path} of driver {first.version} is found first; it works on data-center "
            "GPUs only"
        )
        return _fine(TOO_OLD, "A forward-compatibility package makes up for the older driver.", (*evidence, reason))
    if fitting and not seen:
        message = f"{_sentence(facts, cuda)} {fitting[0].path} makes up for it if the server's loader finds it."
        return _unknown(TOO_OLD, "compat-may-apply", message, evidence)
    finding = _too_old(facts, cuda, "driver-older", evidence)
    if fitting:
        folder = PurePosixPath(fitting[0].path).parent
        extra = f"; on data-center GPUs it is enough to put {folder} first in the server's LD_LIBRARY_PATH."
        return replace(finding, remedy=_upgrade(cuda) + extra)
    major, minor = (*cuda.split("."), "0")[:2]
    extra = (
        f"; or use an image whose torch was built for an older CUDA; or, on data-center GPUs, install "
        f"cuda-compat-{major}-{minor} in the image."
    )
    return replace(finding, remedy=_upgrade(cuda) + extra)


def _fits(one: LibraryFile, cuda: str) -> bool:
    # A newer libcuda elsewhere is half of an upgrade, not a forward-compatibility package.
    return one.kind == "compat" and driver_runs(cuda, one.version, None) is True


def _sentence(facts: CudaFacts, cuda: str) -> str:
    driver = _driver_version(facts)
    stated = facts.reading.cuda_driver_version if facts.reading is not None else None
    runs = f" (CUDA {stated})" if stated is not None and driver_runs(cuda, None, stated) is False else ""
    name = f"the driver {driver}{runs}" if driver is not None else f"a driver that runs CUDA {stated}"
    return f"torch was built for CUDA {cuda}, which {name} does not run."


def _too_old(facts: CudaFacts, cuda: str, reason: str, evidence: tuple[str, ...]) -> Finding:
    oldest = minimum_driver(cuda)
    needs = f" It needs {oldest} or newer." if oldest is not None else ""
    message = _sentence(facts, cuda) + needs
    library = None if facts.reading is None else facts.reading.library_version
    # Half of an upgrade that is new enough as a whole: what is wrong is that it is half.
    explained_by = (_HALF_UPGRADED,) if library is not None and driver_runs(cuda, library, None) else ()
    return Finding(
        code=TOO_OLD.code,
        status=Status.TRUE,
        reason=reason,
        message=message,
        evidence=evidence,
        explained_by=explained_by,
    )


def _upgrade(cuda: str) -> str:
    oldest = minimum_driver(cuda)
    if oldest is None:
        return f"Upgrade the driver to one that runs CUDA {cuda.partition('.')[0]}"
    return f"Upgrade the driver to branch R{oldest.partition('.')[0]} or newer ({oldest} at least)"


# -- libcuda ----------------------------------------------------------------------------------------


def _libcuda_unusable(facts: CudaFacts) -> Finding:
    environment = facts.environment
    if environment is None or _blind(facts) is not None:
        return _unknown(LIBCUDA, _blind(facts) or "no-interpreter")
    if environment.scope is not Scope.SERVER:
        return _unknown(LIBCUDA, "scope-image")
    if not environment.libcuda.path_seen:
        return _unknown(LIBCUDA, "environ-unseen")
    if facts.reading is None:
        return _unknown(LIBCUDA, "driver-unknown")
    found = environment.libcuda.found
    evidence = tuple(_library_line(one) for one in found[:5])
    if not found:
        if not facts.reading.module_present:
            return _unknown(LIBCUDA, "no-driver")
        return Finding(
            code=LIBCUDA.code,
            status=Status.TRUE,
            reason="not-mounted",
            message="A driver is loaded, but the server's loader finds no libcuda.so.1.",
            remedy="Start the server's container through the NVIDIA runtime with `compute` among its "
            "NVIDIA_DRIVER_CAPABILITIES; a stub or compat folder on LD_LIBRARY_PATH does not help.",
        )
    first = found[0]
    if first.kind == "stub":
        others = [one for one in found if one.kind != "stub"]
        behind = f"; the driver's own, {others[0].path}, comes after it" if others else ""
        return Finding(
            code=LIBCUDA.code,
            status=Status.TRUE,
            reason="stub",
            message=f"The server's loader first finds {first.path}, a toolkit's stub made for linking only{behind}.",
            remedy=_take_out(first),
            evidence=evidence,
        )
    return _against_module(facts, first, evidence)


def _against_module(facts: CudaFacts, first: LibraryFile, evidence: tuple[str, ...]) -> Finding:
    """Judge the library that is found first by the version of the driver in the kernel."""
    driver = _driver_version(facts)
    older = is_older(first.version, driver)
    if older:
        return Finding(
            code=LIBCUDA.code,
            status=Status.TRUE,
            reason="compat-shadows",
            message=f"The server's loader first finds {first.path} of driver {first.version}, which is older than "
            f"the loaded kernel module {driver}: CUDA refuses the combination (error 803), while NVML works.",
            remedy=_take_out(first),
            evidence=evidence,
        )
    if older is None:
        # A name without version (WSL, Jetson) is the platform's own; a compat package always carries one.
        if first.kind == "compat":
            return _unknown(LIBCUDA, "driver-unknown", evidence=evidence)
        return _fine(LIBCUDA, evidence=evidence)
    environment = facts.environment
    consumer = _consumer_gpu(facts)
    if first.kind == "compat" and is_older(driver, first.version) and consumer is not None and environment is not None:
        stated = facts.reading.cuda_driver_version if facts.reading is not None else None
        if driver_runs(environment.torch_cuda, driver, stated) is not False:
            return Finding(
                code=LIBCUDA.code,
                status=Status.TRUE,
                reason="compat-needs-datacenter-gpu",
                message=f"The server's loader first finds {first.path}, a forward-compatibility package, which "
                f"{consumer} refuses (error 804).",
                remedy=_take_out(first),
                evidence=evidence,
            )
    return _fine(LIBCUDA, evidence=evidence)


def _library_line(one: LibraryFile) -> str:
    named = f", folder named in {one.conf}" if one.conf is not None else ""
    return f"{one.path}: {one.kind}, version {one.version or 'not in its name'}, found by {one.where}{named}"


def _take_out(one: LibraryFile) -> str:
    folder = PurePosixPath(one.path).parent
    if one.where == "LD_LIBRARY_PATH":
        return f"Remove {folder} from the server's LD_LIBRARY_PATH."
    if one.conf is not None:
        return f"Remove {folder} from {one.conf} in the image and run ldconfig."
    return f"Remove {one.path} from the image and run ldconfig."


# -- architectures ----------------------------------------------------------------------------------


def _arch_unsupported(facts: CudaFacts) -> Finding:
    environment = facts.environment
    if environment is None or _blind(facts) is not None:
        return _unknown(ARCH, _blind(facts) or "no-interpreter")
    if not environment.torch_present:
        return _unknown(ARCH, "torch-not-found")
    gpus = _capabilities(facts)
    if not gpus:
        return _unknown(ARCH, "gpus-unknown")
    verdicts = {gpu: _runs_on(facts, environment, gpus[gpu]) for gpu in gpus}
    bad = tuple(gpu for gpu, verdict in verdicts.items() if False in verdict)
    evidence = _architecture_evidence(facts, environment, gpus)
    if bad:
        return _no_code(facts, environment, bad, verdicts, evidence)
    if all(verdict == (True, True) for verdict in verdicts.values()):
        return _fine(ARCH, evidence=evidence)
    return _unknown(ARCH, "architectures-unknown", evidence=evidence)


def _capabilities(facts: CudaFacts) -> dict[Gpu, Capability]:
    return capabilities(facts.reading, facts.gpus)


def _runs_on(facts: CudaFacts, environment: EnvironmentFacts, gpu: Capability) -> tuple[bool | None, bool | None]:
    """(torch has code for it, the kernel wheel has); a kernel wheel that is not there has nothing against it."""
    build = torch_build(environment.torch_version, environment.torch_cuda, facts.machine)
    kernel = environment.kernel
    if kernel.kind == "absent":
        return build_runs(build, gpu), True
    by_kernel = kernel_runs(
        kernel.folders,
        gpu,
        plain=kernel.plain,
        kernel=_kernel_version(environment),
        cuda=environment.torch_cuda,
        machine=facts.machine,
    )
    return build_runs(build, gpu), by_kernel


def _kernel_version(environment: EnvironmentFacts) -> str | None:
    versions = environment.distributions
    return versions.get("sglang-kernel") or versions.get("sgl-kernel")


def _architecture_evidence(
    facts: CudaFacts, environment: EnvironmentFacts, gpus: Mapping[Gpu, Capability]
) -> tuple[str, ...]:
    items = [f"GPU {index}: compute capability {major}.{minor}" for (index, _), (major, minor) in gpus.items()][:16]
    build = torch_build(environment.torch_version, environment.torch_cuda, facts.machine)
    if build is not None:
        ptx = f", PTX of {shown([build.ptx])}" if build.ptx is not None and build.ptx_sure else ""
        items.append(f"torch {environment.torch_version} is published with {shown(build.sure)}{ptx}")
    if environment.kernel.folders:
        version = _kernel_version(environment) or "of unknown version"
        items.append(f"sgl_kernel {version} holds {', '.join(environment.kernel.folders)}")
    return tuple(items)


def _no_code(
    facts: CudaFacts,
    environment: EnvironmentFacts,
    bad: tuple[Gpu, ...],
    verdicts: Mapping[Gpu, tuple[bool | None, bool | None]],
    evidence: tuple[str, ...],
) -> Finding:
    gpus = _capabilities(facts)
    by_torch = any(verdicts[gpu][0] is False for gpu in bad)
    kernel = f"sgl_kernel {_kernel_version(environment) or ''}".strip()
    what = f"torch {environment.torch_version}" if by_torch else kernel
    names = ", ".join(f"{major}.{minor}" for major, minor in sorted({gpus[gpu] for gpu in bad}))
    finding = Finding(
        code=ARCH.code,
        status=Status.TRUE,
        reason="not-in-torch-build" if by_torch else "not-in-kernel-wheel",
        message=f"{what} has no code for compute capability {names} (GPU {', '.join(gpu[0] for gpu in bad)}): its "
        "import succeeds, and the first kernel fails with `no kernel image is available`.",
        remedy=_arch_remedy(facts, environment, min(gpus[gpu] for gpu in bad), by_torch=by_torch),
        evidence=evidence,
        gpus=bad,
    )
    if len(bad) == len(gpus) or (facts.gpus is not None and facts.gpus.known):
        return finding
    # Some of the node's GPUs can run it, and which of them are the server's is not known.
    return replace(finding, severity=Severity.WARNING, gate=Gate.NEVER)


def _arch_remedy(facts: CudaFacts, environment: EnvironmentFacts, gpu: Capability, *, by_torch: bool) -> str:
    if by_torch and gpu < (7, 5):
        return "Install torch in a build for CUDA 12.6 (cu126), the last one for this GPU; SGLang needs 7.5 or newer."
    if gpu < (8, 0):
        return "Use a GPU of compute capability 8.0 or newer: no released kernel wheel of this kind has code for it."
    kernel = _kernel_distribution(environment)
    command = _install_anew(environment, *(("torch", kernel) if by_torch else (kernel,)))
    if gpu < (10, 0):
        return f"{command}  # as published for this machine"
    what = "torch and the kernel wheel" if by_torch else "the kernel wheel"
    words = f"Install {what} that SGLang pins in a build for CUDA 12.8 or newer (cu128, cu130)"
    return f"{words}: {command}" if _built_for_new_gpus(facts.machine, environment) else f"{words}."


def _kernel_distribution(environment: EnvironmentFacts) -> str:
    """The kernel wheel's name: as SGLang asks for it, else as it is installed."""
    names = ("sglang-kernel", "sgl-kernel")
    found = [name for name in names if pinned(environment, name) is not None or name in environment.distributions]
    return found[0] if found else names[0]


def _install_anew(environment: EnvironmentFacts, *names: str) -> str:
    """The command that replaces distributions by those that SGLang pins there."""
    asked = ((name, pinned(environment, name)) for name in names)
    wanted = [name if one is None else one.argument for name, one in asked]
    return installer(environment).install(*wanted, replace=True)


_ON_PYPI: Final = {"x86_64": Version("2.8"), "aarch64": Version("2.11")}
"""The first torch whose wheels on PyPI are built for CUDA 12.8 or newer: before, an index of its own has them."""


def _built_for_new_gpus(machine: str, environment: EnvironmentFacts) -> bool:
    """Whether what SGLang pins comes from PyPI with code for GPUs of compute capability 10.0 and newer."""
    torch = pinned(environment, "torch")
    release = None if torch is None else parsed(torch.specifier.removeprefix("=="))
    first = _ON_PYPI.get(machine)
    return release is not None and first is not None and release >= first


# -- torch and CUDA ---------------------------------------------------------------------------------


def _unavailable(facts: CudaFacts, world: World, too_old: Finding, libcuda: Finding) -> Finding:
    """Judge whether torch can use CUDA, with what SGLang makes of it where it was to run FlashInfer's mamba."""
    finding = _judge_unavailable(facts, world, too_old, libcuda)
    if finding.status is not Status.TRUE or not world.server.features.get(Feature.FLASHINFER_MAMBA):
        return finding
    version = facts.environment.sglang_release if facts.environment is not None else None
    # SGLang looks for FlashInfer only where torch sees a GPU, and says that FlashInfer is missing.
    return replace(finding, sglang_says=unavailable(version, rounding=None))


def _judge_unavailable(facts: CudaFacts, world: World, too_old: Finding, libcuda: Finding) -> Finding:
    """Judge whether torch can use CUDA; what other conditions explain is true here too, and suppressed by them."""
    environment = facts.environment
    blind = _blind(facts)
    if environment is not None and blind is None and environment.torch_without_cuda:
        return _without_cuda(facts, environment)
    if _driver_unusable(facts, world):
        code = facts.reading.code if facts.reading is not None else 0
        message = f"The driver cannot be used (NVML code {code}), and so cannot CUDA."
        return Finding(code=UNAVAILABLE.code, status=Status.TRUE, reason="driver-unusable", message=message)
    for cause, reason in ((too_old, "driver-too-old"), (libcuda, "libcuda-unusable")):
        if cause.status is Status.TRUE:
            return Finding(code=UNAVAILABLE.code, status=Status.TRUE, reason=reason, message=cause.message)
    if _runs_on_cuda(facts):
        return _fine(UNAVAILABLE, "The running server uses CUDA.")
    if blind is not None:
        return _unknown(UNAVAILABLE, blind)
    reading = facts.reading
    works = reading is not None and reading.code == 0 and bool(reading.count)
    if works and too_old.status is Status.FALSE and libcuda.status is Status.FALSE:
        return _fine(UNAVAILABLE, "By their files torch, libcuda and the driver fit.")
    return _unknown(UNAVAILABLE, "not-verified")


def _without_cuda(facts: CudaFacts, environment: EnvironmentFacts) -> Finding:
    if environment.torch_hip is not None and not _nvidia_hardware(facts):
        return _unknown(UNAVAILABLE, "rocm-build")
    other = "AMD GPUs" if environment.torch_hip is not None else "the CPU"
    return Finding(
        code=UNAVAILABLE.code,
        status=Status.TRUE,
        reason="torch-without-cuda",
        message=f"torch {environment.torch_version or ''} is a build without CUDA.".replace("  ", " "),
        remedy=f"{_install_anew(environment, 'torch')}  # in a build for CUDA (cu130 or the like), not for {other}",
        evidence=_version_evidence(facts),
        # No driver makes up for a build without CUDA.
        explained_by=(),
    )


def _driver_unusable(facts: CudaFacts, world: World) -> bool:
    """Whether the reading proves that no new client can use the driver.

    Not from a library that is missing (12) or access that is refused (4): the server's may differ from the
    sidecar's; but on a host without the kernel module either there is no driver at all. Nor from 9 in a container
    beside a loaded module: that is how missing device nodes look.
    """
    reading = facts.reading
    if reading is None:
        return False
    if reading.code == _NO_LIBRARY:
        return world.standing.placement is Placement.HOST and reading.module_present is False
    if reading.code == _NOT_LOADED:
        return world.standing.placement is Placement.HOST or not reading.module_present
    return reading.code in {_BLOCKED, _MISMATCH}


def _fell_back(facts: CudaFacts, world: World) -> Finding:
    if facts.device_asked is not None:
        return _fine(FELL_BACK, f"Its flags ask for {facts.device_asked}.")
    if not facts.info_seen:
        nobody = world.server.answer is None or (
            world.server.answer is Answer.REFUSED and world.server.refusal_is_proof
        )
        return _fine(FELL_BACK, "No server is running.") if nobody else _unknown(FELL_BACK, "info-unseen")
    if facts.device is None:
        return _unknown(FELL_BACK, "info-unseen")
    if facts.device != "cpu":
        return _fine(FELL_BACK)
    hardware = _nvidia_hardware(facts)
    if hardware is False:
        return _fine(FELL_BACK, "No NVIDIA hardware is seen.")
    if hardware is None:
        return _unknown(FELL_BACK, "driver-unknown")
    if not facts.flags_seen:
        return _unknown(FELL_BACK, "flags-unseen")
    return Finding(
        code=FELL_BACK.code,
        status=Status.TRUE,
        reason="resolved-to-cpu",
        message="The server runs on the CPU although nobody asked for it and the machine has NVIDIA hardware.",
        evidence=_version_evidence(facts),
    )


# -- what is shown ----------------------------------------------------------------------------------


class LibcudaSection(Struct, frozen=True, kw_only=True):
    """A libcuda.so.1: path, version of the driver it belongs to, kind, and what led to it (null: not known)."""

    path: str
    version: str | None
    kind: str
    found_by: str
    configured_in: str | None


class ArchitecturesSection(Struct, frozen=True, kw_only=True):
    """Architectures in torch's build (null: not published) and in the kernel wheel, and the GPUs' capabilities."""

    torch: tuple[str, ...] | None
    torch_ptx: str | None
    kernel: tuple[str, ...]
    gpus: Mapping[str, str]


class CudaSection(Struct, frozen=True, kw_only=True):
    """The report's ``cuda``. A field that is null is not known.

    ``torch_cuda`` is the CUDA version that torch was built for, ``driver_cuda`` the one that NVML states for the
    driver, ``driver`` the version of the kernel's driver. ``libcuda`` is the library that the server's loader finds
    first, ``compat`` lists installed forward-compatibility packages. ``scope`` says whose files these are.
    """

    torch_cuda: str | None
    driver_cuda: str | None
    driver: str | None
    libcuda: LibcudaSection | None
    compat: tuple[LibcudaSection, ...]
    architectures: ArchitecturesSection
    scope: Scope | None


def report(facts: CudaFacts) -> Mapping[str, CudaSection]:
    """Give the report's ``cuda`` key."""
    environment = facts.environment
    known = environment if _blind(facts) is None else None
    build = None if known is None else torch_build(known.torch_version, known.torch_cuda, facts.machine)
    gpus = {index: f"{major}.{minor}" for (index, _), (major, minor) in _capabilities(facts).items()}
    architectures = ArchitecturesSection(
        torch=None if build is None else tuple(f"{major}.{minor}" for major, minor in sorted(build.sure)),
        torch_ptx=None if build is None or not build.ptx_sure or build.ptx is None else "{}.{}".format(*build.ptx),
        kernel=() if known is None else known.kernel.folders,
        gpus=gpus,
    )
    section = CudaSection(
        torch_cuda=None if known is None else known.torch_cuda,
        driver_cuda=None if facts.reading is None else facts.reading.cuda_driver_version,
        driver=_driver_version(facts),
        # In another container than the server's the driver's files are that container's own.
        libcuda=_library_section(known.libcuda.found[0])
        if known is not None and known.scope is Scope.SERVER and known.libcuda.path_seen and known.libcuda.found
        else None,
        compat=() if known is None else tuple(_library_section(one) for one in known.libcuda.compat),
        architectures=architectures,
        scope=None if environment is None else environment.scope,
    )
    return {"cuda": section}


def _library_section(one: LibraryFile) -> LibcudaSection:
    return LibcudaSection(path=one.path, version=one.version, kind=one.kind, found_by=one.where, configured_in=one.conf)


def samples(_facts: CudaFacts) -> Iterable[Sample]:
    """Export nothing: the versions are in environment_info and driver_info, the verdicts in the conditions."""
    return ()


PROBE: Probe[CudaFacts] = Probe(
    name="cuda",
    title="CUDA build, driver and GPUs",
    interval=60.0,
    deadline=10.0,
    collect=collect,
    judge=judge,
    samples=samples,
    families=(),
    conditions=CONDITIONS,
    report=report,
    sections={"cuda": CudaSection},
    requirable={"cuda": (TOO_OLD.code, LIBCUDA.code, UNAVAILABLE.code, ARCH.code)},
    backoff=True,
)
"""What the rest of the agent needs to know of this probe."""
