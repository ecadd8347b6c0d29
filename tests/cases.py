"""Failures that people reported in public, each set up on a machine that works otherwise; the source of docs/cases.md.

A case is not a copy of somebody's report but of its state: which versions lay there, what the driver answered, which
flags were given. What the document shows is printed by a real check of that state (`tests.casebench`).
``UPDATE_GOLDENS=1 make test ARGS="-k test_cases"`` rewrites it.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sidecar.config import ImportPolicy
from sidecar.model import Placement
from tests.casebench import Checked, Machine, register, toolkit
from tests.fakes import kernel
from tests.fakes.nvml import build
from tests.fakes.site import driver_library

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "cases.md"

Step = Callable[[Machine], None]


def nothing(_machine: Machine) -> None:
    """Leave everything as it is; as a step: look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A state of the machine and what a check makes of it.

    ``expects`` are the codes that are told of, in any order; none: nothing is wrong. ``steps`` happen between further
    looks. ``fact`` names a line of the facts that belongs to the answer. ``unknowns``: what could not be judged belongs
    to it, too. ``compiles``: a C compiler is needed. ``x86``: the answer differs on other processors.
    """

    setup: Step
    expects: tuple[str, ...]
    title: str = ""
    steps: tuple[Step, ...] = ()
    fact: str | None = None
    unknowns: bool = False
    compiles: bool = False
    x86: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A reported failure: what was ``seen``, where it was reported, and the ``scenes`` of it.

    ``refs`` are OWNER/REPOSITORY#NUMBER. ``note`` says what the answer means, or why there is no verdict; then
    ``tests`` are files with the tests that keep the agent itself from failing in this way.
    """

    number: int
    title: str
    seen: str
    refs: tuple[str, ...]
    scenes: tuple[Scene, ...] = ()
    note: str = ""
    tests: tuple[str, ...] = ()


# -- ways to break a machine --------------------------------------------------------------------------


def uuid(index: int) -> str:
    """The fake library's uuid of a GPU."""
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def nvml(lines: Mapping[str, str | int] | None = None, **more: str | int) -> Step:
    """NVML answers so."""
    return lambda machine: machine.nvml.set({**(lines or {}), **more})


def flags(*words: str) -> Step:
    """The launch has these flags."""
    return lambda machine: machine.flags.extend(words)


def every(*steps: Step) -> Step:
    """One thing after another."""

    def apply(machine: Machine) -> None:
        for step in steps:
            step(machine)

    return apply


def dist(name: str, version: str | None, *instead_of: str) -> Step:
    """A distribution of another version, or none (None); ``instead_of`` are folders and files that go with it."""

    def apply(machine: Machine) -> None:
        folder = name.replace("-", "_")
        for path in machine.site.packages.glob(f"{folder}-*.dist-info"):
            machine.site.remove(path.name)
        for path in instead_of:
            machine.site.remove(path)
        if version is not None:
            machine.site.dist(name, version)

    return apply


def removes(*paths: str) -> Step:
    """Files or folders below site-packages are gone."""

    def apply(machine: Machine) -> None:
        for path in paths:
            machine.site.remove(path)

    return apply


def writes(path: str, text: str = "") -> Step:
    """A file below site-packages."""
    return lambda machine: (machine.site.write(path, text), None)[1]


def environ(**variables: str) -> Step:
    """Variables of the launch."""
    return lambda machine: machine.environ.update(variables)


def settings(**values: object) -> Step:
    """Settings of the agent."""
    return lambda machine: machine.settings.update(values)


def without_flashinfer(machine: Machine) -> None:
    """FlashInfer and its companions are not installed."""
    for path in [*machine.site.packages.glob("flashinfer*")]:
        machine.site.remove(path.name)


def flashinfer(version: str, **companions: str) -> Step:
    """FlashInfer of a release, with these companions, by the last part of their names, and no others."""

    def apply(machine: Machine) -> None:
        without_flashinfer(machine)
        machine.site.flashinfer(version)
        for name, theirs in companions.items():
            machine.site.companion(f"flashinfer-{name.replace('_', '-')}", theirs)

    return apply


def compiled(*, symbol: str | None = None, needs: str | None = None, has: str | None = None) -> Step:
    """The kernel wheel's compiled part wants a symbol or a library; ``has`` is a library below site-packages."""

    def apply(machine: Machine) -> None:
        for folder in ("sm90", "sm100"):
            kernel.operations(machine.site, folder, symbol=symbol, needs=needs)
        register(machine.site)
        if has is not None:
            machine.site.write(has)

    return apply


def libcuda(*folders: tuple[str, str | None]) -> Step:
    """A libcuda.so.1 in each of these folders, which come first in LD_LIBRARY_PATH."""

    def apply(machine: Machine) -> None:
        for folder, version in folders:
            driver_library(machine.folder, folder.lstrip("/"), version)
        paths = [f"{machine.folder}{folder}" for folder, _ in folders]
        before = machine.environ.get("LD_LIBRARY_PATH")
        machine.environ["LD_LIBRARY_PATH"] = ":".join([*paths, *([before] if before else [])])

    return apply


def container(machine: Machine) -> None:
    """The agent runs in a container."""
    machine.settings["placement"] = Placement.CONTAINER


def devices_revoked(machine: Machine) -> None:
    """The device node is there, and nobody may open it: what no right of root helps against."""
    (machine.folder / "dev").mkdir()
    (machine.folder / "dev" / "nvidiactl").symlink_to("/proc/sys/kernel/ostype")
    machine.nvml.set(nvmlInit=999, driver_generation=1)


def no_library(machine: Machine) -> None:
    """What the loader finds first under the library's name is no library."""
    machine.library = machine.folder / "empty"
    machine.library.mkdir()
    (machine.library / "libnvidia-ml.so.1").write_text("not a library")


def old_library(machine: Machine) -> None:
    """A library of a driver that lacks the newer calls."""
    machine.library = build(
        machine.folder / "old",
        omit=["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetGpuFabricInfoV"],
    )


def served(**info: object) -> Step:
    """A server runs, and says this of itself."""
    return lambda machine: machine.serves(**info)


def replaced(machine: Machine) -> None:
    """Libraries that the server has mapped were replaced on the disk, which the kernel marks."""
    for one in machine.processes:
        one["maps"] = [f"{path} (deleted)" if "/torch/lib/" in path else path for path in one["maps"]]


def half_of_its_schedulers(machine: Machine) -> None:
    """A server of two schedulers, of which one is gone."""
    machine.serves(tp_size=2)
    machine.nvml.set(gpus=2)


def alone(machine: Machine) -> None:
    """No process of a server can be seen, and nothing listens."""
    machine.running = True
    machine.environ = {}


# -- the cases ------------------------------------------------------------------------------------------

CASES: Sequence[Case] = (
    Case(
        number=1,
        title="The driver's libraries were upgraded under the loaded kernel module",
        seen="Running jobs go on, every new client of the GPUs fails with `Driver/library version mismatch`. An"
        " unattended upgrade did it, and a reboot cures it.",
        refs=("lyulyul/shine-cluster#30", "pando85/homelab#4110", "mozilla/translations#1167"),
        scenes=(
            Scene(
                setup=every(lambda machine: machine.module("570.124.06"), nvml(nvmlInit=18)),
                expects=("driver-library-mismatch",),
            ),
        ),
    ),
    Case(
        number=2,
        title="A container loses its GPUs after `systemctl daemon-reload`",
        seen="`Failed to initialize NVML: Unknown Error` inside a container that worked for days, while the host is"
        " fine.",
        refs=("NVIDIA/nvidia-docker#1730", "NVIDIA/nvidia-container-toolkit#48", "dstackai/dstack#2860"),
        scenes=(
            Scene(
                setup=container,
                steps=(devices_revoked, nothing),
                expects=("device-access-lost",),
            ),
        ),
        note="The node and its GPUs are fine, so readiness is left alone: the server's own devices are another matter.",
    ),
    Case(
        number=3,
        title="A GPU falls off the bus",
        seen="`GPU is lost`, with Xid 79 in the kernel's log or, on newer drivers, without any number.",
        refs=("NVIDIA/open-gpu-kernel-modules#1151", "leptonai/gpud#1209", "JosephKJ/OWOD#81"),
        scenes=(
            Scene(
                title="A GPU stops answering",
                setup=every(nvml(gpus=8), flags("--tp", "8")),
                steps=(nvml({"nvmlDeviceGetHandleByIndex@3": 15, "xid@3": 79, "xid_sequence": 1}),),
                expects=("gpu-lost",),
            ),
            Scene(
                title="A GPU is not there any more, and no call fails",
                setup=every(nvml(gpus=8), flags("--tp", "8")),
                steps=(nvml(gpus=7), nothing),
                expects=("gpu-missing",),
            ),
        ),
    ),
    Case(
        number=4,
        title="A call of the driver never returns",
        seen="`nvidia-smi` hangs and cannot be killed; exporters freeze for days while their health endpoint is green.",
        refs=("leptonai/gpud#117", "NVIDIA/gpu-monitoring-tools#46", "utkuozdemir/nvidia_gpu_exporter#89"),
        scenes=(
            Scene(
                setup=every(
                    nvml(nvmlDeviceGetCount="hang"),
                    settings(deadlines={"driver": 1.0}, import_policy=ImportPolicy.NEVER),
                ),
                expects=("driver-hung",),
            ),
        ),
        note="The call runs in a child that is ended at its deadline; the agent itself goes on answering.",
    ),
    Case(
        number=5,
        title="A GPU waits for a reset to repair its memory, or cannot repair it",
        seen="Schedulers kept placing jobs on a GPU with a pending row remap, because nobody looked. Elsewhere a GPU"
        " was"
        " taken out for an error that the driver had repaired already.",
        refs=("leptonai/gpud#80", "aws/eks-node-monitoring-agent#245", "Azure/azurehpc#617"),
        scenes=(
            Scene(
                title="A remap is pending",
                setup=nvml(remapped_uncorrectable=12, remap_pending=1),
                expects=("row-remap-pending",),
            ),
            Scene(title="A remap failed", setup=nvml(remap_failed=1), expects=("row-remap-failed",)),
            Scene(title="Rows that are repaired", setup=nvml(remapped_uncorrectable=11), expects=()),
        ),
    ),
    Case(
        number=6,
        title="A hang that was blamed on the engine and was the GPU's memory",
        seen="Two engines hung in turn on one machine; much later Xids 48, 63, 94 and 154 turned out to be of one GPU.",
        refs=("wtdcode/vllm-backport#62", "marin-community/marin#7344", "NVIDIA/open-gpu-kernel-modules#1355"),
        scenes=(
            Scene(
                setup=every(nvml({"gpus": 2, "remapped_uncorrectable@1": 11}), flags("--tp", "2")),
                steps=(
                    nvml(
                        {
                            "xid@1": "48,63,94,154",
                            "xid_sequence": 1,
                            "remapped_uncorrectable@1": 12,
                            "remap_pending@1": 1,
                        }
                    ),
                    nothing,
                ),
                expects=("xid-critical",),
            ),
        ),
    ),
    Case(
        number=7,
        title="A GPU in MIG mode does not tell its memory",
        seen="`Insufficient Permissions` from a getter of the parent GPU was taken for a broken driver.",
        refs=("NVIDIA/nvidia-container-toolkit#842", "rapidsai/dask-cuda#583", "Syllo/nvtop#256"),
        scenes=(
            Scene(
                setup=nvml(
                    {
                        "gpus": 2,
                        "mig@0": 1,
                        "nvmlDeviceGetMemoryInfo@0": 4,
                        "nvmlDeviceGetUtilizationRates@0": 3,
                    }
                ),
                expects=(),
            ),
        ),
        note="What a parent GPU refuses is left out of the metrics: there is neither a fault nor a value made up.",
    ),
    Case(
        number=8,
        title="The driver is not loaded after an upgrade of the kernel, or is blocked",
        seen="`couldn't communicate with the NVIDIA driver`; in Windows' subsystem for Linux `GPU access blocked by the"
        " operating system`.",
        refs=("GoogleCloudPlatform/compute-gpu-installation#18", "negativo17/nvidia-driver#56", "microsoft/WSL#9938"),
        scenes=(
            Scene(
                title="Not loaded",
                setup=every(lambda machine: machine.module(None), nvml(nvmlInit=9)),
                expects=("driver-not-loaded",),
            ),
            Scene(
                title="Blocked",
                setup=every(lambda machine: machine.module(None), nvml(nvmlInit=17)),
                expects=("driver-blocked",),
            ),
        ),
    ),
    Case(
        number=9,
        title="A sidecar without the NVML library",
        seen="`libnvidia-ml.so.1: cannot open shared object file` in a container that did not ask for the driver's"
        " utilities, reported as a broken driver.",
        refs=("NVIDIA/nvidia-container-toolkit#154", "NVIDIA/nvidia-docker#1301", "canonical/lxd#9964"),
        scenes=(Scene(setup=every(container, no_library), expects=("sidecar-gpu-access",)),),
        note="The sidecar's own configuration, never a fault of the server: it warns and gates nothing.",
    ),
    Case(
        number=10,
        title="A sidecar sees the GPUs of other pods",
        seen="With `NVIDIA_VISIBLE_DEVICES=all` every sidecar of a node sees every GPU, and one dead GPU took eight"
        " pods"
        " out of service.",
        refs=("NVIDIA/k8s-device-plugin#605", "NVIDIA/gpu-operator#421", "bottlerocket-os/bottlerocket#3718"),
        scenes=(
            Scene(
                title="GPU 5 is lost, and the server has GPUs 0 and 1",
                setup=every(
                    nvml({"gpus": 8, "nvmlDeviceGetTemperature@5": 15}),
                    settings(gpus=("0", "1")),
                ),
                expects=("gpu-lost",),
            ),
        ),
        note="Told as a warning of the node, which takes no pod out.",
    ),
    Case(
        number=11,
        title="A virtual GPU without a licence",
        seen="It works for some minutes; then everything crawls.",
        refs=("NVIDIA/gpu-operator#628", "NVIDIA/TensorRT-LLM#1861"),
        scenes=(Scene(setup=nvml(virtualization=2, licensed=0), expects=("vgpu-unlicensed",)),),
    ),
    Case(
        number=12,
        title="The kernel wheel was built for another torch",
        seen="`undefined symbol` in `common_ops` after torch was upgraded; pip saw no conflict.",
        refs=("sgl-project/sglang#5100", "sgl-project/sglang#7033", "agentica-project/rllm#8"),
        scenes=(
            Scene(
                setup=compiled(symbol="_ZN5torch3jit17parseSchemaOrNameERKSsb"),
                expects=("kernel-wheel-broken",),
                compiles=True,
            ),
        ),
    ),
    Case(
        number=13,
        title="The same, taken for a missing architecture",
        seen="The loader's own text speaks of compute capabilities and locations; behind it stood an undefined symbol.",
        refs=("sgl-project/sglang#30562",),
        scenes=(
            Scene(
                setup=compiled(symbol="_ZN3c1013MessageLogger6streamB5cxx11Ev"),
                expects=("kernel-wheel-broken",),
                compiles=True,
            ),
        ),
    ),
    Case(
        number=14,
        title="A kernel wheel for CUDA 12 beside a torch for CUDA 13",
        seen="`Could not load any common_ops library!` on a system that has only CUDA 13's runtime.",
        refs=("sgl-project/sglang#18203", "sgl-project/sglang#13948"),
        scenes=(
            Scene(
                setup=compiled(needs="libcudart.so.12", has="nvidia/cu13/lib/libcudart.so.13"),
                expects=("kernel-wheel-broken",),
                compiles=True,
            ),
        ),
    ),
    Case(
        number=15,
        title="A library lies where the loader does not look",
        seen="`libnvrtc.so.12: cannot open shared object file`, with the file in a wheel's folder all along.",
        refs=("sgl-project/sglang#5094", "sgl-project/sglang#16052", "xorbitsai/inference#3203"),
        scenes=(
            Scene(
                setup=compiled(needs="libnvrtc.so.13", has="nvidia/cuda_nvrtc/lib/libnvrtc.so.13"),
                expects=("kernel-wheel-broken",),
                compiles=True,
            ),
        ),
    ),
    Case(
        number=16,
        title="libcuda.so.1 is a toolkit's stub",
        seen="`libcuda.so.1: cannot open shared object file`; popular advice is to add the toolkit's `stubs` folder,"
        " which"
        " satisfies the import and nothing else.",
        refs=("sgl-project/sglang#4778", "sgl-project/sglang#2584", "xorbitsai/inference#1286"),
        scenes=(
            Scene(
                setup=every(
                    lambda machine: machine.environ.pop("LD_LIBRARY_PATH") and None,
                    libcuda(("/usr/local/cuda/lib64/stubs", None)),
                ),
                expects=("libcuda-unusable",),
            ),
        ),
    ),
    Case(
        number=17,
        title="The kernel wheel is older than SGLang wants",
        seen="`sgl-kernel is installed with version 0.0.9.post2, which is less than the minimum required version"
        " 0.1.1`."
        " Elsewhere versions were compared as strings, so that 2.10 came before 2.6.",
        refs=("verl-project/verl#1832", "sgl-project/sglang#11242", "areal-project/AReaL#1010"),
        scenes=(Scene(setup=dist("sglang-kernel", "0.4.1.post2"), expects=("requirement-violated",)),),
    ),
    Case(
        number=18,
        title="A new GPU and a torch that was built before it",
        seen="`no kernel image is available for execution on the device`, on the first kernel: the import succeeds.",
        refs=("sgl-project/sglang#7249", "pytorch/pytorch#167244", "vllm-project/vllm#19906"),
        scenes=(
            Scene(
                setup=every(
                    lambda machine: machine.gpu("NVIDIA GeForce RTX 5090", 120),
                    writes(
                        "torch/version.py",
                        "from typing import Optional\n__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n",
                    ),
                    dist("torch", "2.6.0"),
                    lambda machine: machine.environ.update(
                        CUDA_HOME=str(toolkit(machine.folder / "cuda-12.4", "12.4"))
                    ),
                    flags("--attention-backend", "triton"),
                ),
                expects=("gpu-arch-unsupported", "requirement-violated"),
                x86=True,
            ),
        ),
    ),
    Case(
        number=19,
        title="Wheels for CUDA 12 and for CUDA 13 in one environment",
        seen="`undefined symbol: ncclCommResume`: two wheels own the same file, and the one that was installed last"
        " won.",
        refs=("GoogleCloudPlatform/scientific-computing-examples#157", "KellerJordan/modded-nanogpt#258"),
        scenes=(
            Scene(
                setup=every(
                    lambda machine: machine.site.dist("nvidia-nccl-cu12", "2.27.5"),
                    lambda machine: machine.site.dist("nvidia-nccl-cu13", "2.28.9"),
                ),
                expects=("cuda-flavour-mismatch",),
            ),
        ),
    ),
    Case(
        number=20,
        title="An environment put together by hand",
        seen="Mixed sets of torch, FlashInfer and SGLang; `No package metadata was found` for a package that is there.",
        refs=("sgl-project/sglang#4812", "Alibaba-NLP/DeepResearch#25", "opendatalab/MinerU#3418"),
        scenes=(
            Scene(
                title="FlashInfer is there without metadata, and other pins are not met",
                setup=every(
                    dist("flashinfer-python", None),
                    dist("transformers", "4.57.1"),
                    dist("torchao", "0.9.0"),
                ),
                expects=("requirement-violated",),
            ),
        ),
    ),
    Case(
        number=21,
        title="The driver is too old for torch, and the server runs on the CPU",
        seen="A warning `driver on your system is too old (found version 12040)`, then `Auto-configed device: cpu`.",
        refs=("sgl-project/sglang#11395", "lllyasviel/Fooocus#1313", "PromtEngineer/localGPT#569"),
        scenes=(
            Scene(
                title="Before the launch",
                setup=every(
                    lambda machine: machine.driver("550.54.15", 12040),
                ),
                expects=("driver-too-old-for-cuda",),
            ),
            Scene(
                title="Of the server that runs",
                setup=every(
                    served(device="cpu"),
                    lambda machine: machine.driver("550.54.15", 12040),
                ),
                expects=("driver-too-old-for-cuda", "server-fell-back-to-cpu"),
            ),
        ),
    ),
    Case(
        number=22,
        title="`CUDA driver version is insufficient`, with a driver that is new enough",
        seen="Error 35 although the driver is newer than the runtime: the container had not been given the driver.",
        refs=("ovg-project/kvcached#74", "NVIDIA/nvidia-docker#781", "SYSTRAN/faster-whisper#1278"),
        scenes=(
            Scene(
                setup=lambda machine: (shutil.rmtree(machine.folder / "driver"), None)[1],
                expects=("libcuda-unusable",),
            ),
        ),
    ),
    Case(
        number=23,
        title="A compat library shadows a newer driver",
        seen="`Error 803: system has unsupported display driver / cuda driver combination` in images that bring CUDA's"
        " forward compatibility.",
        refs=("llm-d/llm-d#706", "NVIDIA/nvidia-container-toolkit#1679", "vllm-project/vllm#32474"),
        scenes=(
            Scene(
                setup=every(
                    lambda machine: machine.driver("595.45.04", 13020),
                    libcuda(("/usr/local/cuda-13.0/compat", "580.95.05")),
                ),
                expects=("libcuda-unusable",),
            ),
        ),
    ),
    Case(
        number=24,
        title="The NVSwitch fabric is not ready",
        seen="`Error 802: system not yet initialized` while every GPU is listed.",
        refs=("huggingface/huggingface_hub#4128", "wilicc/gpu-burn#92", "NVIDIA/nvtrust#128"),
        scenes=(Scene(setup=every(nvml(gpus=8, fabric_state=2), flags("--tp", "8")), expects=("fabric-not-ready",)),),
    ),
    Case(
        number=25,
        title="flashinfer-cubin of another release",
        seen="`flashinfer-cubin version (…) does not match flashinfer version (…)`: a RuntimeError, which SGLang's"
        " guard"
        " around the import does not catch.",
        refs=("NVIDIA-NeMo/Export-Deploy#679", "NVIDIA/Megatron-LM#4700", "sgl-project/sglang#13848"),
        scenes=(
            Scene(
                title="Refused",
                setup=every(flashinfer("0.6.14", cubin="0.6.8.post1"), flags("--mamba-backend", "flashinfer")),
                expects=("flashinfer-cubin-mismatch",),
            ),
            Scene(
                title="With the check bypassed",
                setup=every(
                    flashinfer("0.6.14", cubin="0.6.13"),
                    flags("--mamba-backend", "flashinfer"),
                    environ(FLASHINFER_DISABLE_VERSION_CHECK="1"),
                ),
                expects=("flashinfer-cubin-mismatch",),
            ),
        ),
    ),
    Case(
        number=26,
        title="The matching flashinfer-cubin is not on PyPI",
        seen="`pip install -U sglang` brings a newer FlashInfer and leaves the cubins of an older one, whose newer"
        " releases the index does not have; the server restarts for ever.",
        refs=("flashinfer-ai/flashinfer#4781", "flashinfer-ai/flashinfer#4869", "sgl-project/sglang#37377"),
        scenes=(Scene(setup=flashinfer("0.6.14", cubin="0.6.13"), expects=("flashinfer-cubin-mismatch",)),),
        note="The remedy does not name a version that nobody can install from there.",
    ),
    Case(
        number=27,
        title="flashinfer-jit-cache of another release",
        seen="Refused at import; with the check bypassed, illegal memory accesses.",
        refs=("lightseekorg/tokenspeed#284", "vllm-project/recipes#511"),
        scenes=(
            Scene(
                setup=every(
                    flashinfer("0.6.14", cubin="0.6.14", jit_cache="0.6.9+cu130"),
                    flags("--mamba-backend", "flashinfer"),
                ),
                expects=("flashinfer-jit-cache-mismatch",),
            ),
        ),
    ),
    Case(
        number=28,
        title="A FlashInfer without `flashinfer.mamba`",
        seen="`FlashInfer mamba module not available, please check the FlashInfer installation.`, which names"
        " neither the"
        " version nor the cause.",
        refs=("sgl-project/sglang#18070", "vllm-project/vllm#36162", "radixark/miles#616"),
        scenes=(
            Scene(
                setup=every(flashinfer("0.6.0", cubin="0.6.0"), flags("--mamba-backend", "flashinfer")),
                expects=("flashinfer-mamba-missing",),
            ),
        ),
    ),
    Case(
        number=29,
        title="FlashInfer is not installed, or is switched off",
        seen="The same sentence for two causes; flags that disable FlashInfer do not keep it from being imported.",
        refs=("sgl-project/sglang#945", "sgl-project/sglang#6160", "modal-labs/modal-examples#864"),
        scenes=(
            Scene(
                title="Not installed",
                setup=every(
                    without_flashinfer,
                    flags("--mamba-backend", "flashinfer"),
                ),
                expects=("flashinfer-not-installed",),
            ),
            Scene(
                title="Switched off",
                setup=every(
                    lambda machine: machine.assignments.append("SGLANG_IS_FLASHINFER_AVAILABLE=false"),
                    flags("--mamba-backend", "flashinfer"),
                ),
                expects=("flashinfer-disabled-by-env",),
            ),
        ),
    ),
    Case(
        number=30,
        title="FlashInfer's distribution changed its name",
        seen="Tools that ask for one name say that an installed FlashInfer is not there.",
        refs=("flashinfer-ai/flashinfer#794", "sgl-project/sglang#5034", "vllm-project/vllm#22297"),
        scenes=(
            Scene(
                setup=every(
                    dist("flashinfer-python", None),
                    lambda machine: machine.site.dist("flashinfer", "0.6.14+cu130torch2.11"),
                    flags("--mamba-backend", "flashinfer"),
                ),
                expects=("requirement-violated",),
            ),
        ),
        note="It is found under its old name and imported; what SGLang's own check makes of that name is told.",
    ),
    Case(
        number=31,
        title="FlashInfer is newer than SGLang supports",
        seen="FlashInfer was upgraded alone; the import works, and the first forward pass fails.",
        refs=("sgl-project/sglang#10891", "sgl-project/sglang#12204", "NVIDIA/Megatron-LM#4700"),
        scenes=(Scene(setup=flashinfer("0.7.2", cubin="0.7.2"), expects=("requirement-violated",)),),
    ),
    Case(
        number=32,
        title="Importing FlashInfer takes memory of a GPU",
        seen="A bare import initialises CUDA where `cuda.tile` is installed: a probe would take some hundred MiB of"
        " a GPU"
        " that the server has filled.",
        refs=("flashinfer-ai/flashinfer#4889", "flashinfer-ai/flashinfer#4901", "mlc-ai/xgrammar#231"),
        note="About the probe rather than the server: its import runs in a child with the GPUs hidden.",
        tests=("tests/contract/test_flashinfer_table.py", "tests/contract/test_import_limits.py"),
    ),
    Case(
        number=33,
        title="FlashInfer cannot build kernels",
        seen="`Could not find nvcc`, or a colon in front of the compiler's path, long after a successful import.",
        refs=("flashinfer-ai/flashinfer#1919", "flashinfer-ai/flashinfer#1904", "sgl-project/sglang#5389"),
        scenes=(
            Scene(
                title="CUDA_HOME leads nowhere",
                setup=every(
                    flashinfer("0.6.14"),
                    flags("--attention-backend", "flashinfer"),
                    lambda machine: machine.environ.update(CUDA_HOME=f":{machine.folder}/cuda"),
                ),
                expects=("flashinfer-jit-toolchain", "flashinfer-cubins-not-installed"),
            ),
        ),
    ),
    Case(
        number=34,
        title="FlashInfer downloads kernels while serving",
        seen="Several processes fetch cubins at once, without a lock; sites without a network fail.",
        refs=("sgl-project/sglang#10933",),
        scenes=(Scene(setup=flashinfer("0.6.14"), expects=("flashinfer-cubins-not-installed",)),),
    ),
    Case(
        number=35,
        title="FlashAttention 2 was built for another torch",
        seen="`flash_attn_2_cuda…so: undefined symbol` after an upgrade of torch.",
        refs=("sgl-project/sglang#851", "Dao-AILab/flash-attention#1832", "turboderp-org/exllamav2#522"),
        scenes=(
            Scene(
                setup=every(
                    lambda machine: machine.site.dist("flash-attn", "2.8.3"),
                    writes("flash_attn_2_cuda.py", "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')\n"),
                ),
                expects=(),
            ),
        ),
        note="SGLang does not run FlashAttention 2, so that nothing depends on it: the report lists it as installed.",
    ),
    Case(
        number=36,
        title="A kernel wheel without FlashAttention 3",
        seen="`Can not import FA3 in sgl_kernel. Please check your installation.`, which hides the cause; or a model"
        " that"
        " is said to be unknown.",
        refs=("sgl-project/sglang#9309", "sgl-project/sglang#22306"),
        scenes=(
            Scene(
                setup=every(removes("sgl_kernel/flash_ops.py"), flags("--attention-backend", "fa3")),
                expects=("fa3-not-importable", "duplicate-distribution"),
            ),
        ),
    ),
    Case(
        number=37,
        title="FlashAttention 3 on a GPU that cannot run it",
        seen="`The 'fa3' backend is not supported on Blackwell GPUs`, after the imports.",
        refs=("sgl-project/sglang#12360", "sgl-project/sglang#35080", "Dao-AILab/flash-attention#2003"),
        scenes=(
            Scene(
                setup=every(nvml(profile="b200"), flags("--attention-backend", "fa3")),
                expects=("fa3-unsupported-gpu",),
            ),
        ),
    ),
    Case(
        number=38,
        title="A wrong sentence about the GPUs of FlashAttention 3",
        seen="`only supported on sm90 and above`, while 8.0 to 8.9 are accepted and 10.0 and later are not.",
        refs=("gpustack/gpustack#3326",),
        scenes=(
            Scene(
                title="An RTX 4090 is not refused; models with latent attention are, there",
                setup=every(nvml(profile="rtx4090"), flags("--attention-backend", "fa3")),
                expects=(),
                unknowns=True,
            ),
            Scene(
                title="An RTX 5090 is not",
                setup=every(
                    lambda machine: machine.gpu("NVIDIA GeForce RTX 5090", 120), flags("--attention-backend", "fa3")
                ),
                expects=("fa3-unsupported-gpu",),
            ),
        ),
    ),
    Case(
        number=39,
        title="A GPU that is too old for either",
        seen="`FlashAttention v3 Backend requires SM>=80 and SM<=90` on a T4, V100 or 2080 Ti.",
        refs=("sgl-project/sglang#931", "vllm-project/vllm#8189", "flashinfer-ai/flashinfer#1115"),
        scenes=(
            Scene(
                setup=every(lambda machine: machine.gpu("Tesla T4", 75), flags("--attention-backend", "fa3")),
                expects=("gpu-arch-unsupported",),
            ),
        ),
    ),
    Case(
        number=40,
        title="A second component picks FlashAttention by itself",
        seen="The main model runs FlashInfer on an RTX 5090, and another component still chose fa3.",
        refs=("sgl-project/sglang#15342", "Edge0-AI/Audio8_TTS#17"),
        scenes=(
            Scene(
                title="fa3 for the images alone",
                setup=every(
                    lambda machine: machine.gpu("NVIDIA GeForce RTX 5090", 120),
                    flags("--attention-backend", "triton", "--mm-attention-backend", "fa3"),
                ),
                expects=("fa3-unsupported-gpu",),
            ),
        ),
        note="Each phase is judged for itself: prefill, decode, vision and draft. What SGLang's diffusion servers"
        " choose"
        " inside is not seen from outside.",
    ),
    Case(
        number=41,
        title="FlashAttention 4 lacks one package after another",
        seen="`No module named 'cutlass…'`; once that is installed, `quack`; then `tvm_ffi`.",
        refs=("Dao-AILab/flash-attention#2234", "Dao-AILab/flash-attention#2205", "PrimeIntellect-ai/prime-rl#1945"),
        scenes=(
            Scene(
                setup=every(
                    dist("nvidia-cutlass-dsl", None, "nvidia_cutlass_dsl", "nvidia_cutlass_dsl.pth"),
                    dist("quack-kernels", None, "quack"),
                    flags("--attention-backend", "fa4"),
                ),
                expects=("fa4-not-importable", "requirement-violated"),
            ),
        ),
        note="All that is missing is named at once.",
    ),
    Case(
        number=42,
        title="`No module named 'cutlass'` with nvidia-cutlass-dsl installed",
        seen="The package relies on a `.pth` file, which an interpreter in isolated mode or a copied folder leaves"
        " out.",
        refs=("NVIDIA/cutlass#3001", "NVIDIA/cutlass#3034", "vllm-project/vllm#43738"),
        scenes=(
            Scene(
                setup=every(removes("nvidia_cutlass_dsl.pth"), flags("--attention-backend", "fa4")),
                expects=("fa4-not-importable",),
            ),
        ),
    ),
    Case(
        number=43,
        title="FlashAttention 4 can be imported and cannot be compiled",
        seen="`fmax() takes 2 positional arguments but 3 positional arguments … were given`, from a pair of packages"
        " that"
        " do not belong together.",
        refs=("hao-ai-lab/FastVideo#1558", "Dao-AILab/flash-attention#2089"),
        scenes=(
            Scene(
                setup=every(dist("nvidia-cutlass-dsl", "4.4.0"), flags("--attention-backend", "fa4")),
                expects=("requirement-violated",),
            ),
        ),
        note="An import is no proof that kernels compile, but the version that SGLang was made for is known.",
    ),
    Case(
        number=44,
        title="flash-attn-4 alone, taken for FlashAttention 2",
        seen="`cannot import name 'flash_attn_func' from 'flash_attn'`: both share the folder.",
        refs=("huggingface/transformers#44559",),
        scenes=(Scene(setup=flags("--attention-backend", "fa4"), expects=(), fact="attention prefill"),),
        note="Version 4 is offered, version 2 is not, and the shared folder is no evidence of it.",
    ),
    Case(
        number=45,
        title="A FlashAttention version that SGLang does not have",
        seen="`Invalid version: self.fa_impl_ver=2`, from a plugin or a patched registry.",
        refs=("sgl-project/sglang#22028",),
        scenes=(
            Scene(
                title="Asked for in the configuration",
                setup=every(
                    lambda machine: (
                        (machine.folder / "server.yaml").write_text("attention-backend: fa3\nfa-impl-ver: 2\n"),
                        machine.flags.extend(("--config", f"{machine.folder}/server.yaml")),
                        None,
                    )[2],
                ),
                expects=("fa-version-invalid",),
            ),
            Scene(
                title="Asked for in a variable that nothing reads",
                setup=lambda machine: machine.assignments.append("SGLANG_FLASHATTENTION_VERSION=5"),
                expects=("fa-version-invalid",),
            ),
        ),
    ),
    Case(
        number=46,
        title="Probes time out after a second",
        seen="A health endpoint took 1.001 s, the kubelet waits for 1 s: the pod goes in and out of service.",
        refs=("modelplaneai/modelplane#206", "llm-d/llm-d-benchmark#1734", "NVIDIA/dcgm-exporter#393"),
        note="About the agent itself: nothing that it serves triggers work, and a verdict that was published changes"
        " only"
        " after two bad or three good rounds.",
        tests=("tests/e2e/test_kubelet.py", "tests/e2e/test_pods.py", "tests/contract/test_web_limits.py"),
    ),
    Case(
        number=47,
        title="Healthy, and the scheduler is dead",
        seen="The main process answers while the processes that do the work are gone.",
        refs=("sgl-project/sglang#18579", "vllm-project/vllm#36960", "ai-dynamo/dynamo#2137"),
        scenes=(Scene(setup=half_of_its_schedulers, expects=("server-workers-missing",)),),
        note="Seen where the agent sees the server's processes.",
    ),
    Case(
        number=48,
        title="aiohttp refuses a charset in its content type",
        seen="`charset must not be in content_type argument`: /metrics answers 500.",
        refs=("aio-libs/aiohttp#2197", "hikari-py/hikari#1319"),
        note="About the agent itself.",
        tests=("tests/contract/test_web.py",),
    ),
    Case(
        number=49,
        title="Prometheus 3 refuses a content type",
        seen="`received unsupported Content-Type`, or a redirect from `/metrics`.",
        refs=("pretix/pretix#5133", "prometheus/prometheus#17086", "BerriAI/litellm#3475"),
        note="About the agent itself; a real Prometheus 3 scrapes it in the tests.",
        tests=("tests/contract/test_web.py", "tests/e2e/test_alerting.py"),
    ),
    Case(
        number=50,
        title="A server's `PROMETHEUS_MULTIPROC_DIR` is inherited",
        seen="Empty metrics, files in the server's folder, or a crash when the first gauge is made.",
        refs=("prometheus/client_python#1015", "trallnag/prometheus-fastapi-instrumentator#282"),
        note="About the agent itself: it renders its families anew for each snapshot and keeps none in the library.",
        tests=("tests/e2e/test_driver_states.py",),
    ),
    Case(
        number=51,
        title="Shutdown takes a minute, or drops requests",
        seen="An idle connection holds the process until it is killed; as process 1 without a handler it ignores"
        " SIGTERM.",
        refs=("aio-libs/aiohttp#1221", "aio-libs/aiohttp#3638", "taskcluster/taskcluster#6717"),
        note="About the agent itself: readiness says 503 at once, and the process ends within 2 s.",
        tests=("tests/contract/test_web.py", "tests/e2e/test_kubelet.py"),
    ),
    Case(
        number=52,
        title="Lines of a log that are no JSON",
        seen="Bytes and exceptions break one-event-per-line; warnings of libraries mix with the output of probes.",
        refs=("hynek/structlog#360", "elastic/ecs-logging-python#41", "goauthentik/authentik#19478"),
        note="About the agent itself; children answer over a pipe of their own.",
        tests=("tests/unit/test_log.py", "tests/contract/test_import_probe.py"),
    ),
    Case(
        number=53,
        title="An exporter is killed while it waits for the GPUs",
        seen="Liveness fails before the initialisation has ended: it restarts for ever, or stays silent.",
        refs=("NVIDIA/gpu-monitoring-tools#180", "NVIDIA/dcgm-exporter#164"),
        note="About the agent itself: it listens before the first probe has ended, and serves with every code of NVML.",
        tests=("tests/e2e/test_kubelet.py", "tests/contract/test_driver_codes.py"),
    ),
    Case(
        number=54,
        title="The deprecated `pynvml` distribution is installed",
        seen="`The pynvml package is deprecated` in the server's log; with releases from 12 on it is harmless.",
        refs=("flashinfer-ai/flashinfer#1693", "mlco2/codecarbon#933", "rapidsai/ucxx#434"),
        scenes=(Scene(setup=lambda machine: machine.site.dist("pynvml", "13.0.1"), expects=()),),
    ),
    Case(
        number=55,
        title="Two distributions own the module `pynvml`",
        seen="`module 'pynvml' has no attribute '_nvmlGetFunctionPointer'`: a folder shadows the file of nvidia-ml-py.",
        refs=("XuehaiPan/nvitop#44", "wookayin/gpustat#105", "vllm-project/vllm#8953"),
        scenes=(
            Scene(
                setup=every(
                    lambda machine: (
                        machine.site.install("pynvml", "11.4.1", {"pynvml/__init__.py": "", "pynvml/nvml.py": ""}),
                        None,
                    )[1],
                ),
                expects=("nvml-binding-conflict",),
            ),
        ),
    ),
    Case(
        number=56,
        title="An old driver lacks functions that a newer binding asks for",
        seen="`Function Not Found` for a call of a later version, and the whole tool ends.",
        refs=("gpuopenanalytics/pynvml#43", "NVIDIA/k8s-device-plugin#331", "Syllo/nvtop#210"),
        scenes=(Scene(setup=old_library, expects=()),),
        note="What the driver does not know is left out; the older form of a call is tried.",
    ),
    Case(
        number=57,
        title="The server's process may not be read",
        seen="Permission denied for `/proc/PID/environ` and `/proc/PID/root`, even as root: another user, a missing"
        " capability, or AppArmor.",
        refs=("BishopFox/badPods#11", "moby/moby#40713", "containers/container-selinux#273"),
        note="No verdict: what may not be read is unknown, with the reason in the report, field by field. Which rights"
        " let the agent see what is in [kubernetes.md](kubernetes.md#least-privileges).",
        tests=("tests/contract/test_permissions.py", "tests/e2e/test_rights.py"),
    ),
    Case(
        number=58,
        title="The server's processes are out of sight",
        seen="A sidecar without a shared process namespace sees itself alone.",
        refs=("joe-elliott/netcore-kubernetes-profiling#2", "aylei/kubectl-debug#59"),
        scenes=(Scene(setup=alone, expects=("server-not-found",), unknowns=True),),
    ),
    Case(
        number=59,
        title="SGLang renames its processes",
        seen="The command line becomes `sglang::scheduler_TP0`, and the environment is written over with zeros.",
        refs=("sgl-project/sglang#9952", "dvarrazzo/py-setproctitle#17"),
        scenes=(Scene(setup=served(), expects=(), fact="server"),),
        note="Arguments and environment come from the main process, which keeps them. A main process that was renamed,"
        " too, leaves them unknown rather than empty.",
    ),
    Case(
        number=60,
        title="Another interpreter than the server's, or files replaced under it",
        seen="The image's interpreter moved into a virtual environment, and a tool looked at the system's. Or: packages"
        " were upgraded in place, and the running server still has the old ones.",
        refs=("sgl-project/sglang#30612", "sgl-project/sglang#4812", "Dao-AILab/flash-attention#2310"),
        scenes=(
            Scene(
                title="Upgraded in place",
                setup=every(served(), replaced),
                expects=("server-runs-replaced-files",),
            ),
        ),
        note="The environment is found by the command line, `VIRTUAL_ENV` and what is mapped, never by the link"
        " `/proc/PID/exe` alone; the report names the interpreter and how it was found.",
        tests=("tests/unit/test_target.py",),
    ),
)


# -- the document ---------------------------------------------------------------------------------------

_INTRO = """\
<!-- Generated by `UPDATE_GOLDENS=1 make test ARGS="-k test_cases"`; edit tests/cases.py or the product's texts. -->

# Failures that people reported

{count} failures that were reported in public by people who run SGLang, other engines or the GPUs below them, and what
this agent says of each. A test sets up the state behind every report, without a GPU: packages of those versions, an
NVML library that answers so, those flags. Then a real check looks at it; what is shown is what it printed, without what
could not be judged and without the list of versions. Environments lie in `/opt/venv` here, and every time is the same.

Most are judged before the launch, by `sglang-sidecar check -- python -m sglang.launch_server`, as an init container
does; those of a running server by an agent beside it. Each code is explained in [conditions.md](conditions.md), and by
`sglang-sidecar explain CODE`.
"""
_PARTS = (
    (1, "Driver and GPUs"),
    (12, "Kernel wheel and CUDA libraries"),
    (21, "Driver against CUDA"),
    (25, "FlashInfer"),
    (35, "FlashAttention"),
    (46, "An agent's own faults"),
    (54, "Python's bindings for NVML"),
    (57, "Finding the server and its environment"),
)
"""The number that each part of the document begins with."""


def answer(scene: Scene, checked: Checked) -> str:
    """What the document shows of a scene."""
    blocks = [checked.text] if scene.unknowns else [re.split(r"\n+could not be judged[ :(]", checked.text)[0]]
    if scene.fact is not None:
        blocks.append(checked.fact(scene.fact))
    return "\n\n".join(blocks)


def section(case: Case, answers: Sequence[str]) -> str:
    """One case of the document; ``answers`` are those of its scenes."""
    reported = ", ".join(f"[{ref}]({url(ref)})" for ref in case.refs)
    lines = [f"### {heading(case)}", "", wrapped(case.seen), "", wrapped(f"Reported in {reported}.")]
    for scene, text in zip(case.scenes, answers, strict=True):
        lines += ["", f"{scene.title}:"] if scene.title else []
        lines += ["", "```text", text, "```"]
    if case.note:
        lines += ["", wrapped(case.note)]
    if case.tests:
        tests = ", ".join(f"[`{path}`](../{path})" for path in case.tests)
        lines += ["", wrapped(f"Tests: {tests}.")]
    return "\n".join(lines) + "\n"


def wrapped(sentence: str) -> str:
    """Prose as the other pages have it."""
    return textwrap.fill(sentence, width=120, break_long_words=False, break_on_hyphens=False)


def heading(case: Case) -> str:
    """Number and title."""
    return f"{case.number}. {case.title}"


def url(ref: str) -> str:
    """Where OWNER/REPOSITORY#NUMBER is: GitHub leads from an issue's address to a pull request, too."""
    repository, _, number = ref.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def document(sections: Mapping[int, str]) -> str:
    """Put the sections together, by the cases' numbers."""
    parts = dict(_PARTS)
    pieces = [_INTRO.format(count=len(CASES))]
    for case in CASES:
        pieces += [f"## {parts[case.number]}\n"] if case.number in parts else []
        pieces.append(sections[case.number])
    return "\n".join(pieces)


def sections_of(text: str) -> Mapping[int, str]:
    """Take a document apart again."""
    found: dict[int, str] = {}
    for number, body in re.findall(r"^### (\d+)\. (.*?)(?=\n##|\Z)", text, re.DOTALL | re.MULTILINE):
        found[int(number)] = f"### {number}. {body.rstrip()}\n"
    return found
