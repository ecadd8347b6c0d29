"""The cuda probe: what fits, what does not, and what nobody can know, each with its one cause."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.cudalibs import build_runs, driver_runs, is_older, kernel_runs, minimum_driver, torch_build
from sidecar.environment import DriverLibrary, EnvironmentFacts, KernelFiles, LibraryFile
from sidecar.gpuset import GpuSet, Member
from sidecar.model import (
    Answer,
    Finding,
    Gate,
    Outcome,
    Placement,
    Result,
    Scope,
    ServerView,
    Severity,
    Standing,
    Status,
    World,
)
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.probes.cuda import CONDITIONS, PROBE, CudaFacts
from tests.builders import HOST, view

T, F, U = Status.TRUE, Status.FALSE, Status.UNKNOWN
TOO_OLD, LIBCUDA, ARCH, UNAVAILABLE, FELL_BACK = (kind.code for kind in CONDITIONS)
LIB = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
COMPAT = "/usr/local/cuda-13.0/compat/libcuda.so.1"
OWN = LibraryFile(path=LIB, version="580.159.04", where="ld.so.cache")
NO_SERVER = view(Answer.REFUSED)


def libcuda(*found: LibraryFile, compat: tuple[LibraryFile, ...] = (), seen: bool = True) -> DriverLibrary:
    return DriverLibrary(found=found, compat=compat, path_seen=seen)


def compat(version: str = "580.95.05", where: str = "LD_LIBRARY_PATH", conf: str | None = None) -> LibraryFile:
    return LibraryFile(path=COMPAT, version=version, kind="compat", where=where, conf=conf)


def own(version: str) -> LibraryFile:
    return replace(OWN, version=version)


def environment(torch: str = "2.11.0+cu130", cuda: str | None = "13.0", **changes: Any) -> EnvironmentFacts:
    """An environment whose torch, kernel wheel and libcuda fit an H200 with driver 580."""
    values: dict[str, Any] = {
        "scope": Scope.SERVER,
        "torch_present": True,
        "torch_version": torch,
        "torch_cuda": cuda,
        "distributions": {"sglang-kernel": "0.4.5"},
        "kernel": KernelFiles(kind="package", folders=("sm100", "sm90")),
        "libcuda": libcuda(OWN),
    }
    return EnvironmentFacts(**{**values, **changes})


def gpu(index: int = 0, capability: str | None = "9.0", name: str = "NVIDIA H200") -> GpuReading:
    return GpuReading(index=index, code=0, uuid=f"GPU-{index}", name=name, compute_capability=capability)


def reading(
    driver: str | None = "580.159.04", cuda: str | None = "13.0", *gpus: GpuReading, **changes: Any
) -> NvmlReading:
    """NVML of a healthy machine whose kernel module has the driver's version."""
    shown = gpus or (gpu(),)
    values: dict[str, Any] = {
        "code": 0,
        "driver_version": driver,
        "cuda_driver_version": cuda,
        "module_version": driver,
        "module_present": driver is not None,
        "count": len(shown),
        "gpus": shown,
    }
    return NvmlReading(**{**values, **changes})


def judged(
    facts: CudaFacts | None,
    *,
    server: ServerView = NO_SERVER,
    standing: Standing = HOST,
    outcome: Outcome = Outcome.OK,
) -> dict[str, Finding]:
    result: Result[CudaFacts] = Result(probe="cuda", outcome=outcome, facts=facts)
    world = World(standing=standing, server=server, now=0.0, settings=Settings())
    return {finding.code: finding for finding in PROBE.judge(result, world)}


def verdict(code: str, facts: CudaFacts, **more: Any) -> tuple[Status, str | None]:
    found = judged(facts, **more)[code]
    return found.status, found.reason


def fit(**changes: Any) -> CudaFacts:
    """Everything fits."""
    return replace(CudaFacts(environment=environment(), reading=reading()), **changes)


def test_everything_fits() -> None:
    """On a healthy machine every condition is judged and fine."""
    assert {code: found.status for code, found in judged(fit()).items()} == {kind.code: F for kind in CONDITIONS}


def test_every_reason_is_declared() -> None:
    """A reason in any of the tables below is one of its condition's declared tokens."""
    declared = {kind.code: kind.reasons for kind in CONDITIONS}
    tables = ((TOO_OLD, AGE), (LIBCUDA, FOUND), (ARCH, ARCHITECTURES), (UNAVAILABLE, CUDA_USE), (FELL_BACK, FALLEN))
    reasons = [(code, row[-1][1]) for code, rows in tables for row in rows if row[-1][1] is not None]
    assert len(reasons) > 20
    assert [(code, reason) for code, reason in reasons if reason not in declared[code]] == []


# -- driver and CUDA version ------------------------------------------------------------------------

GEFORCE = gpu(name="NVIDIA GeForce RTX 4090", capability="8.9")
OLD = ("535.183.01", "12.2")
AGE: list[tuple[str, CudaFacts, tuple[Status, str | None]]] = [
    # sgl-project/sglang#11395: found version 12040, torch for 13.0
    ("driver 12.4, torch 13.0", fit(reading=reading("550.54.15", "12.4")), (T, "driver-older")),
    ("driver 12.8, torch 13.0", fit(reading=reading("570.124.06", "12.8")), (T, "driver-older")),
    (
        "driver 11.8, torch 12.4",
        fit(environment=environment("2.6.0+cu124", "12.4"), reading=reading("520.61.05", "11.8")),
        (T, "driver-older"),
    ),
    # minor-version compatibility, docs.nvidia.com CUDA Compatibility
    (
        "driver 12.4, torch 12.8",
        fit(environment=environment("2.8.0+cu128", "12.8"), reading=reading("550.54.15", "12.4")),
        (F, None),
    ),
    ("driver 13.0, torch 13.2", fit(environment=environment("2.14.1+cu132", "13.2")), (F, None)),
    # NVIDIA/nvidia-docker#781: the driver is newer
    ("driver 13.0, torch 12.4", fit(environment=environment("2.6.0+cu124", "12.4")), (F, None)),
    (
        "driver by /proc only",
        fit(reading=reading("550.54.15", None, code=12, driver_version=None, count=None, gpus=())),
        (T, "driver-older"),
    ),
    ("driver by NVML only", fit(reading=reading(None, "12.4", module_present=False)), (T, "driver-older")),
    # vllm-project/vllm#32474: NVML states the CUDA version of the libcuda that it finds
    ("NVML states a newer compat's CUDA", fit(reading=reading("535.183.01", "13.0")), (T, "driver-older")),
    ("NVML states an older libcuda's CUDA", fit(reading=reading("580.159.04", "12.4")), (U, "versions-disagree")),
    # forward compatibility, as llm-d/llm-d#706 has it at its best
    (
        "compat first",
        fit(environment=environment(libcuda=libcuda(compat(), own("535.183.01"))), reading=reading(*OLD)),
        (F, None),
    ),
    (
        "compat installed, not found",
        fit(
            environment=environment(libcuda=libcuda(own("535.183.01"), compat=(compat(where="compat"),))),
            reading=reading(*OLD),
        ),
        (T, "driver-older"),
    ),
    (
        "compat too old itself",
        fit(environment=environment(libcuda=libcuda(compat("550.54.15"), own("535.183.01"))), reading=reading(*OLD)),
        (T, "driver-older"),
    ),
    (
        "compat on a GeForce",
        fit(environment=environment(libcuda=libcuda(compat(), own("535.183.01"))), reading=reading(*OLD, GEFORCE)),
        (T, "compat-needs-datacenter-gpu"),
    ),
    (
        "compat, variables unseen",
        fit(
            environment=environment(libcuda=libcuda(compat=(compat(where="compat"),), seen=False)),
            reading=reading(*OLD),
        ),
        (U, "compat-may-apply"),
    ),
    (
        "compat in the image",
        fit(
            environment=environment(scope=Scope.IMAGE, libcuda=libcuda(compat=(compat(where="compat"),))),
            reading=reading(*OLD),
        ),
        (U, "compat-may-apply"),
    ),
    (
        "compat in the image of a server on CUDA",
        fit(
            environment=environment(scope=Scope.IMAGE, libcuda=libcuda(compat=(compat(where="compat"),))),
            reading=reading(*OLD),
            device="cuda",
        ),
        (F, None),
    ),
    (
        "no compat in the image",
        fit(environment=environment(scope=Scope.IMAGE, libcuda=libcuda()), reading=reading(*OLD)),
        (T, "driver-older"),
    ),
    ("a CUDA that no table knows", fit(environment=environment("3.0.0+cu150", "15.0")), (T, "driver-older")),
    ("torch without CUDA", fit(environment=environment("2.11.0+cpu", None, torch_without_cuda=True)), (F, None)),
    ("torch that does not say", fit(environment=environment("2.11.0", None)), (U, "torch-cuda-unknown")),
    ("no torch", fit(environment=environment("", None, torch_present=False)), (U, "torch-not-found")),
    ("no driver version", fit(reading=reading(None, None, code=9)), (U, "driver-unknown")),
    ("NVML not read", fit(reading=None), (U, "driver-unknown")),
    ("no interpreter", fit(environment=None), (U, "no-interpreter")),
    ("own environment only", fit(environment=environment(scope=Scope.SELF)), (U, "scope-self")),
    ("root unreadable", fit(environment=environment(problem="root-unreadable")), (U, "root-unreadable")),
    ("server of unknown files runs on CUDA", fit(environment=None, device="cuda"), (F, None)),
]


@pytest.mark.parametrize(("facts", "wanted"), [row[1:] for row in AGE], ids=[row[0] for row in AGE])
def test_driver_against_torchs_cuda(facts: CudaFacts, wanted: tuple[Status, str | None]) -> None:
    """A driver of an older CUDA major is too old unless a forward-compatibility libcuda is the one that is found."""
    assert verdict(TOO_OLD, facts) == wanted


def test_too_old_names_versions_and_branch() -> None:
    """Message and remedy carry both versions and the oldest driver that will do (sgl-project/sglang#11395)."""
    found = judged(fit(reading=reading("550.54.15", "12.4")))[TOO_OLD]
    assert found.message == (
        "torch was built for CUDA 13.0, which the driver 550.54.15 (CUDA 12.4) does not run. "
        "It needs 580.65.06 or newer."
    )
    assert found.remedy is not None
    assert found.remedy.startswith("Upgrade the driver to branch R580 or newer (580.65.06 at least)")
    assert "cuda-compat-13-0" in found.remedy


def test_too_old_with_an_unused_compat_names_its_folder() -> None:
    """Where the package is there and only not found, the remedy says which folder must come first."""
    installed = libcuda(own("535.183.01"), compat=(compat(where="compat"),))
    found = judged(fit(environment=environment(libcuda=installed), reading=reading(*OLD)))[TOO_OLD]
    assert "put /usr/local/cuda-13.0/compat first" in (found.remedy or "")


def test_a_newer_minor_is_mentioned_only() -> None:
    """Inside one major the driver's older minor is fine, and what remains of it is in the evidence."""
    facts = fit(environment=environment("2.8.0+cu128", "12.8"), reading=reading("550.54.15", "12.4"))
    assert any("PTX" in line for line in judged(facts)[TOO_OLD].evidence)
    assert not any("PTX" in line for line in judged(fit())[TOO_OLD].evidence)


@pytest.mark.parametrize(
    ("cuda", "driver", "stated", "runs"),
    [
        ("12.4", "525.60.13", None, True),
        ("12.4", "520.61.05", None, False),
        ("11.8", "450.80.02", None, True),
        ("11.8", "440.33.01", None, False),
        ("13.0", "580.65.06", "13.0", True),
        ("13.0", "575.64", "12.9", False),
        ("13.0", None, "13.0", True),
        ("13.0", "not a version", None, None),
        ("10.2", "580.65.06", "13.0", None),
        ("14.0", "650.10", None, None),
        ("14.0", "650.10", "14.0", True),
        (None, "580.65.06", "13.0", None),
    ],
)
def test_what_a_driver_runs(cuda: str | None, driver: str | None, stated: str | None, runs: bool | None) -> None:
    """The published minimum per CUDA major decides; without a version there is no verdict."""
    assert driver_runs(cuda, driver, stated) is runs


def test_truncated_versions_compare_equal() -> None:
    """NVML prints 570.124.06 as 570.124, which is not older (pando85/homelab#4110)."""
    assert is_older("570.124", "570.124.06") is False
    assert is_older("570.124.04", "570.124.06") is True
    assert is_older("1.1.", "570.124.06") is None
    assert minimum_driver("12.8") == "525.60.13"


# -- libcuda ----------------------------------------------------------------------------------------

STUB = LibraryFile(path="/usr/local/cuda/lib64/stubs/libcuda.so.1", kind="stub", where="LD_LIBRARY_PATH")
FOUND: list[tuple[str, CudaFacts, tuple[Status, str | None]]] = [
    ("the driver's own", fit(), (F, None)),
    # NVIDIA/nvidia-docker#400, sgl-project/sglang#4778
    ("none", fit(environment=environment(libcuda=libcuda())), (T, "not-mounted")),
    (
        "none, NVML missing too",
        fit(environment=environment(libcuda=libcuda()), reading=reading(code=12)),
        (T, "not-mounted"),
    ),
    (
        "none, no driver either",
        fit(environment=environment(libcuda=libcuda()), reading=reading(None, None, code=9, module_present=False)),
        (U, "no-driver"),
    ),
    # sgl-project/sglang#2584: the popular wrong advice
    ("stub alone", fit(environment=environment(libcuda=libcuda(STUB))), (T, "stub")),
    ("stub before the driver's", fit(environment=environment(libcuda=libcuda(STUB, OWN))), (T, "stub")),
    ("stub behind the driver's", fit(environment=environment(libcuda=libcuda(OWN, STUB))), (F, None)),
    # llm-d/llm-d#706, NVIDIA/nvidia-container-toolkit#1679: compat 580 under a 595 driver
    (
        "older compat first",
        fit(environment=environment(libcuda=libcuda(compat(), own("595.45.04"))), reading=reading("595.45.04", "13.2")),
        (T, "compat-shadows"),
    ),
    (
        "older compat behind",
        fit(environment=environment(libcuda=libcuda(own("595.45.04"), compat())), reading=reading("595.45.04", "13.2")),
        (F, None),
    ),
    # intelligent-machine-learning/atorch#2: a distribution's driver package inside the image
    (
        "older library from a package",
        fit(environment=environment(libcuda=libcuda(own("535.183.01")))),
        (T, "compat-shadows"),
    ),
    ("newer compat first", fit(environment=environment(libcuda=libcuda(compat("590.48.01"), OWN))), (F, None)),
    (
        "newer compat on a GeForce",
        fit(
            environment=environment(libcuda=libcuda(compat("590.48.01"), OWN)),
            reading=reading("580.159.04", "13.0", GEFORCE),
        ),
        (T, "compat-needs-datacenter-gpu"),
    ),
    (
        "newer compat on a GeForce whose driver is too old",
        fit(environment=environment(libcuda=libcuda(compat())), reading=reading(*OLD, GEFORCE)),
        (F, None),
    ),
    # microsoft/WSL#9938: its libcuda.so.1 has no version in its name
    (
        "without version",
        fit(environment=environment(libcuda=libcuda(LibraryFile(path="/usr/lib/wsl/lib/libcuda.so.1")))),
        (F, None),
    ),
    (
        "compat without version",
        fit(environment=environment(libcuda=libcuda(replace(compat(), version=None)))),
        (U, "driver-unknown"),
    ),
    (
        "another container of the image",
        fit(environment=environment(scope=Scope.IMAGE, libcuda=libcuda())),
        (U, "scope-image"),
    ),
    ("variables unseen", fit(environment=environment(libcuda=libcuda(seen=False))), (U, "environ-unseen")),
    (
        "server on CUDA in another container",
        fit(environment=environment(scope=Scope.IMAGE, libcuda=libcuda()), device="cuda"),
        (F, None),
    ),
    (
        "a running server proves nothing against files",
        fit(environment=environment(libcuda=libcuda(STUB)), device="cuda"),
        (T, "stub"),
    ),
    ("NVML not read", fit(reading=None), (U, "driver-unknown")),
    ("no interpreter", fit(environment=None), (U, "no-interpreter")),
]


@pytest.mark.parametrize(("facts", "wanted"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND])
def test_the_libcuda_that_is_found(facts: CudaFacts, wanted: tuple[Status, str | None]) -> None:
    """The first libcuda.so.1 of the loader's order is judged against the driver in the kernel."""
    assert verdict(LIBCUDA, facts) == wanted


def test_compat_shadow_says_versions_and_file() -> None:
    """Both versions are in the message, and the remedy names what puts the folder first (vllm-project/vllm#32474)."""
    conf = "/etc/ld.so.conf.d/00-compat-123.conf"
    shadow = libcuda(compat(where="ld.so.cache", conf=conf), own("595.45.04"))
    found = judged(fit(environment=environment(libcuda=shadow), reading=reading("595.45.04", "13.2")))[LIBCUDA]
    assert "580.95.05" in found.message
    assert "595.45.04" in found.message
    assert found.remedy == f"Remove /usr/local/cuda-13.0/compat from {conf} in the image and run ldconfig."


def test_shadow_from_the_variable() -> None:
    """A folder on LD_LIBRARY_PATH is to be removed there (gpustack/gpustack#3686)."""
    shadow = libcuda(compat(), own("595.45.04"))
    found = judged(fit(environment=environment(libcuda=shadow), reading=reading("595.45.04", "13.2")))[LIBCUDA]
    assert found.remedy == "Remove /usr/local/cuda-13.0/compat from the server's LD_LIBRARY_PATH."


# -- architectures ----------------------------------------------------------------------------------

RTX5090 = gpu(name="NVIDIA GeForce RTX 5090", capability="12.0")
T4 = gpu(name="Tesla T4", capability="7.5")
CU124 = environment("2.6.0+cu124", "12.4", kernel=KernelFiles())


def on(*gpus: GpuReading, env: EnvironmentFacts | None = None, **changes: Any) -> CudaFacts:
    return fit(environment=env or environment(), reading=reading("580.159.04", "13.0", *gpus), **changes)


def known(*indices: int) -> GpuSet:
    members = tuple(Member(given=str(index), index=index, uuid=f"GPU-{index}") for index in indices)
    return GpuSet(known=True, why="test", gpus=members)


ARCHITECTURES: list[tuple[str, CudaFacts, tuple[Status, str | None]]] = [
    # sgl-project/sglang#7249: RTX 5090 with torch for CUDA 12.4
    ("RTX 5090, cu124", on(RTX5090, env=CU124), (T, "not-in-torch-build")),
    # pytorch/pytorch#167244
    ("RTX 5090, cu126", on(RTX5090, env=environment("2.9.1+cu126", "12.6")), (T, "not-in-torch-build")),
    ("RTX 5090, cu128", on(RTX5090, env=environment("2.9.1+cu128", "12.8")), (F, None)),
    ("RTX 5090, cu130", on(RTX5090), (F, None)),
    (
        "RTX 5090, kernel for cu124",
        on(RTX5090, env=environment("2.8.0+cu128", "12.8", distributions={"sgl-kernel": "0.3.9+cu124"})),
        (T, "not-in-kernel-wheel"),
    ),
    ("B200, cu124", on(gpu(capability="10.0"), env=CU124), (T, "not-in-torch-build")),
    ("B300 by its B200 code", on(gpu(capability="10.3")), (F, None)),
    ("DGX Spark", on(gpu(capability="12.1")), (U, "architectures-unknown")),
    ("H100", on(gpu()), (F, None)),
    ("L40S by sm_86 and sm_89", on(gpu(capability="8.9")), (F, None)),
    # pytorch/pytorch#182250: in some releases of cu128 and not in others
    (
        "V100, cu128",
        on(gpu(capability="7.0"), env=environment("2.9.1+cu128", "12.8", kernel=KernelFiles())),
        (U, "architectures-unknown"),
    ),
    ("V100, cu130", on(gpu(capability="7.0")), (T, "not-in-torch-build")),
    # sgl-project/sglang#7249 and kin: on sm_75 sgl_kernel imports fine and fails at launch
    ("T4", on(T4), (T, "not-in-kernel-wheel")),
    (
        "T4, older kernel wheel",
        on(T4, env=environment(kernel=KernelFiles(kind="package", plain=True))),
        (U, "architectures-unknown"),
    ),
    # sgl-project/sglang#18203: only the folder for another GPU is there
    (
        "wheel for Blackwell only",
        on(gpu(), env=environment(kernel=KernelFiles(kind="package", folders=("sm100",)))),
        (T, "not-in-kernel-wheel"),
    ),
    (
        "wheel for Hopper only",
        on(gpu(capability="8.6"), env=environment(kernel=KernelFiles(kind="package", folders=("sm90",)))),
        (T, "not-in-kernel-wheel"),
    ),
    (
        "a build of one's own",
        on(RTX5090, env=environment("2.6.0a0+ecf3bae40a.nv25.01", "12.8")),
        (U, "architectures-unknown"),
    ),
    (
        "a release that no table knows",
        on(RTX5090, env=environment("2.40.0+cu124", "12.4", kernel=KernelFiles())),
        (U, "architectures-unknown"),
    ),
    ("another machine", on(RTX5090, env=CU124, machine="riscv64"), (U, "architectures-unknown")),
    ("no capability", on(gpu(capability=None)), (U, "gpus-unknown")),
    ("NVML not read", fit(reading=None), (U, "gpus-unknown")),
    ("no torch", on(env=environment(torch_present=False)), (U, "torch-not-found")),
    ("own environment only", on(RTX5090, env=replace(CU124, scope=Scope.SELF)), (U, "scope-self")),
    ("the GPU is another server's", on(gpu(0), gpu(1, "12.0"), env=CU124, gpus=known(0)), (F, None)),
    ("one of the server's", on(gpu(0), gpu(1, "12.0"), env=CU124, gpus=known(0, 1)), (T, "not-in-torch-build")),
]


@pytest.mark.parametrize(("facts", "wanted"), [row[1:] for row in ARCHITECTURES], ids=[row[0] for row in ARCHITECTURES])
def test_architectures(facts: CudaFacts, wanted: tuple[Status, str | None]) -> None:
    """A GPU for which torch or the kernel wheel has no code is found before a kernel is launched on it."""
    assert verdict(ARCH, facts) == wanted


def test_architecture_fault_names_the_gpu() -> None:
    """The condition carries the GPU, its capability and the builds that know it (sgl-project/sglang#7249)."""
    found = judged(on(RTX5090, env=CU124))[ARCH]
    assert found.gpus == (("0", "GPU-0"),)
    assert "compute capability 12.0 (GPU 0)" in found.message
    assert "cu128" in (found.remedy or "")
    assert (found.severity, found.gate) == (None, None)
    assert any("sm_90" in line and "sm_120" not in line for line in found.evidence)


def test_a_mixed_node_warns_only() -> None:
    """With the server's GPUs unknown, one unfit GPU among fit ones is a warning that never gates."""
    found = judged(on(gpu(0), gpu(1, "12.0"), env=CU124))[ARCH]
    assert (found.status, found.severity, found.gate) == (T, Severity.WARNING, Gate.NEVER)
    assert found.gpus == (("1", "GPU-1"),)
    certain = judged(on(gpu(0), gpu(1, "12.0"), env=CU124, gpus=known(1)))[ARCH]
    assert (certain.severity, certain.gate) == (None, None)


@pytest.mark.parametrize(
    ("torch", "cuda", "machine", "gpu_capability", "runs"),
    [
        ("2.11.0+cu126", "12.6", "x86_64", (12, 0), False),
        ("2.11.0+cu126", "12.6", "x86_64", (5, 2), True),
        ("2.11.0+cu128", "12.8", "x86_64", (10, 3), True),
        ("2.11.0+cu130", "13.0", "x86_64", (11, 0), False),
        ("2.11.0+cu130", "13.0", "aarch64", (11, 0), True),
        ("2.11.0+cu130", "13.0", "x86_64", (13, 0), True),
        ("2.8.0+cu128", "12.8", "x86_64", (13, 0), None),
        ("2.11.0+cu130", "12.8", "x86_64", (9, 0), None),
        ("2.11.0", "13.0", "x86_64", (9, 0), None),
    ],
)
def test_what_torch_has_code_for(
    torch: str, cuda: str, machine: str, gpu_capability: tuple[int, int], runs: bool | None
) -> None:
    """The published lists decide for published wheels, newer GPUs by their intermediate code (pytorch RELEASE.md)."""
    assert build_runs(torch_build(torch, cuda, machine), gpu_capability) is runs


@pytest.mark.parametrize(
    ("folders", "gpu_capability", "more", "runs"),
    [
        (("sm100", "sm90"), (8, 6), {}, True),
        (("sm100", "sm90"), (8, 6), {"machine": "aarch64"}, None),
        (("sm100", "sm90"), (10, 3), {"cuda": "12.8"}, None),
        (("sm100", "sm90"), (12, 0), {"cuda": None}, None),
        (("sm100", "sm90"), (12, 0), {"kernel": "0.3.21+cu130", "cuda": "12.4"}, True),
        (("sm100",), (9, 0), {"plain": True}, None),
        ((), (9, 0), {}, None),
    ],
)
def test_what_the_kernel_wheel_has_code_for(
    folders: tuple[str, ...], gpu_capability: tuple[int, int], more: dict[str, Any], runs: bool | None
) -> None:
    """The folder that the import would choose must be there, and hold code for the GPU (sgl-project/sglang#13948)."""
    values: dict[str, Any] = {"plain": False, "kernel": "0.4.5", "cuda": "13.0", "machine": "x86_64", **more}
    assert kernel_runs(folders, gpu_capability, **values) is runs


# -- torch and CUDA ---------------------------------------------------------------------------------

CONTAINER = replace(HOST, placement=Placement.CONTAINER)
CPU_TORCH = environment("2.11.0+cpu", None, torch_without_cuda=True)
ROCM = environment("2.11.0+rocm6.4", None, torch_without_cuda=True, torch_hip="6.4.43482")
NO_DRIVER = reading(None, None, code=9, module_present=False, gpus=(), count=None)
CUDA_USE: list[tuple[str, CudaFacts, Standing, tuple[Status, str | None]]] = [
    ("fits", fit(), HOST, (F, None)),
    ("a CPU build", fit(environment=CPU_TORCH), HOST, (T, "torch-without-cuda")),
    (
        "a CPU build in the image",
        fit(environment=replace(CPU_TORCH, scope=Scope.IMAGE)),
        HOST,
        (T, "torch-without-cuda"),
    ),
    (
        "a CPU build of the sidecar itself",
        fit(environment=replace(CPU_TORCH, scope=Scope.SELF)),
        HOST,
        (U, "scope-self"),
    ),
    ("a build for AMD, no NVIDIA", fit(environment=ROCM, reading=NO_DRIVER), HOST, (U, "rocm-build")),
    ("a build for AMD on NVIDIA", fit(environment=ROCM), HOST, (T, "torch-without-cuda")),
    # lyulyul/shine-cluster#30, pytorch/pytorch#88363, microsoft/WSL#9938
    ("driver/library mismatch", fit(reading=reading(code=18)), HOST, (T, "driver-unusable")),
    ("driver not loaded", fit(reading=NO_DRIVER), HOST, (T, "driver-unusable")),
    ("access blocked", fit(reading=reading(code=17)), HOST, (T, "driver-unusable")),
    # NVIDIA/nvidia-docker#1711: in a container that may be the sidecar's own lack
    ("9 beside a loaded module", fit(reading=reading(code=9, count=None)), CONTAINER, (U, "not-verified")),
    ("the sidecar's missing library", fit(reading=reading(code=12, count=None)), CONTAINER, (U, "not-verified")),
    ("driver too old", fit(reading=reading("550.54.15", "12.4")), HOST, (T, "driver-too-old")),
    ("stub", fit(environment=environment(libcuda=libcuda(STUB))), HOST, (T, "libcuda-unusable")),
    ("libcuda unseen", fit(environment=environment(scope=Scope.IMAGE)), HOST, (U, "not-verified")),
    ("libcuda unseen, server on CUDA", fit(environment=environment(scope=Scope.IMAGE), device="cuda"), HOST, (F, None)),
    ("nothing known", fit(environment=None, reading=None), HOST, (U, "no-interpreter")),
]


@pytest.mark.parametrize(
    ("facts", "standing", "wanted"), [row[1:] for row in CUDA_USE], ids=[row[0] for row in CUDA_USE]
)
def test_whether_torch_can_use_cuda(facts: CudaFacts, standing: Standing, wanted: tuple[Status, str | None]) -> None:
    """A build without CUDA is a cause of its own; what the driver's conditions explain is certain here too."""
    assert verdict(UNAVAILABLE, facts, standing=standing) == wanted


def test_the_remedy_uses_sglangs_own_pin() -> None:
    """The torch to install is the one that SGLang's metadata in this environment pins."""
    pinned = replace(CPU_TORCH, requires=("torch==2.11.0 ; extra == 'srt'", "torch==1.0 ; extra == 'x'"))
    pinned = replace(pinned, python="/venv/bin/python", distributions={**CPU_TORCH.distributions, "pip": "26.0"})
    found = judged(fit(environment=pinned))[UNAVAILABLE]
    assert found.remedy == (
        "/venv/bin/python -m pip install --force-reinstall torch==2.11.0"
        "  # in a build for CUDA (cu130 or the like), not for the CPU"
    )
    old = replace(pinned, torch_version="2.6.0+cu124", torch_cuda="12.4", torch_without_cuda=False)
    assert judged(on(RTX5090, env=old))[ARCH].remedy == (
        "Install torch and the kernel wheel that SGLang pins in a build for CUDA 12.8 or newer (cu128, cu130): "
        "/venv/bin/python -m pip install --force-reinstall torch==2.11.0 sglang-kernel"
    )


def test_its_causes_are_declared() -> None:
    """Each condition that makes CUDA unavailable explains it, so that one cause is shown."""
    kind = next(kind for kind in CONDITIONS if kind.code == UNAVAILABLE)
    assert {TOO_OLD, LIBCUDA, "driver-not-loaded", "driver-library-mismatch", "driver-blocked"} <= set(kind.depends_on)


# -- a server on the CPU ----------------------------------------------------------------------------


def running(device: str | None = "cpu", **changes: Any) -> CudaFacts:
    return fit(**{"device": device, "info_seen": True, "flags_seen": True, **changes})


UP = view(Answer.ACCEPTED)
FALLEN: list[tuple[str, CudaFacts, ServerView, tuple[Status, str | None]]] = [
    # sgl-project/sglang#11395: "Auto-configed device: cpu"
    ("unasked", running(), UP, (T, "resolved-to-cpu")),
    ("asked", running(device_asked="cpu"), UP, (F, None)),
    ("on CUDA", running("cuda"), UP, (F, None)),
    ("flags not seen", running(flags_seen=False), UP, (U, "flags-unseen")),
    ("no NVIDIA hardware", running(reading=NO_DRIVER), UP, (F, None)),
    ("driver not read", running(reading=None), UP, (U, "driver-unknown")),
    ("files of no interest", running(environment=None), UP, (T, "resolved-to-cpu")),
    ("no information", fit(), UP, (U, "info-unseen")),
    ("information without device", running(None), UP, (U, "info-unseen")),
    ("no server", fit(), NO_SERVER, (F, None)),
    ("a launch to come", fit(), view(None), (F, None)),
    ("maybe another address", fit(), view(Answer.REFUSED, proof=False), (U, "info-unseen")),
]


@pytest.mark.parametrize(("facts", "server", "wanted"), [row[1:] for row in FALLEN], ids=[row[0] for row in FALLEN])
def test_fall_back_to_the_cpu(facts: CudaFacts, server: ServerView, wanted: tuple[Status, str | None]) -> None:
    """Only a server that is seen to run on the CPU without a flag, beside NVIDIA hardware, has fallen back."""
    assert verdict(FELL_BACK, facts, server=server) == wanted


# -- the probe --------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.PENDING, Outcome.TIMEOUT, Outcome.OK])
def test_without_facts_nothing_is_said(outcome: Outcome) -> None:
    """Before the first round, and after facts have expired, the judge alone says why everything is unknown."""
    assert judged(None, outcome=outcome) == {}


def test_the_report_shows_what_was_compared() -> None:
    """The section has both CUDA versions, the library with what led to it, and the architectures."""
    facts = fit(environment=environment(libcuda=libcuda(OWN, compat=(compat(),))))
    section = msgspec.json.decode(msgspec.json.encode(PROBE.report(facts)))
    assert section["cuda"] == {
        "torch_cuda": "13.0",
        "driver_cuda": "13.0",
        "driver": "580.159.04",
        "libcuda": {
            "path": LIB,
            "version": "580.159.04",
            "kind": "driver",
            "found_by": "ld.so.cache",
            "configured_in": None,
        },
        "compat": [
            {
                "path": COMPAT,
                "version": "580.95.05",
                "kind": "compat",
                "found_by": "LD_LIBRARY_PATH",
                "configured_in": None,
            }
        ],
        "architectures": {
            "torch": ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"],
            "torch_ptx": "12.0",
            "kernel": ["sm100", "sm90"],
            "gpus": {"0": "9.0"},
        },
        "scope": "server",
    }


@pytest.mark.parametrize("scope", [Scope.IMAGE, Scope.SELF])
def test_the_report_shows_no_foreign_libcuda(scope: Scope) -> None:
    """The library of another container than the server's is not shown as the server's."""
    section = PROBE.report(fit(environment=environment(scope=scope)))["cuda"]
    assert section.libcuda is None


def test_the_report_of_nothing() -> None:
    """With nothing read every field is null, none invented."""
    report = PROBE.report(CudaFacts(environment=None, reading=None))
    section = msgspec.json.decode(msgspec.json.encode(report))["cuda"]
    architectures = section.pop("architectures")
    assert section.pop("compat") == []
    assert set(section.values()) == {None}
    assert architectures == {"torch": None, "torch_ptx": None, "kernel": [], "gpus": {}}
