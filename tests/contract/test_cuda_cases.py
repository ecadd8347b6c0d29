"""The cuda probe over whole trees: the real reader looks at a server's root, and the verdict names the one cause."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.credentials import Credentials
from sidecar.environment import Environment
from sidecar.isolation import Isolation
from sidecar.model import Answer, Finding, Outcome, Result, Skip, Status, Target, World
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.probes.cuda import PROBE
from sidecar.serverinfo import ServerInfo
from tests.builders import HOST, view
from tests.fakes.site import RealClock, Site, driver_library, loader_cache, loader_config

LIB = f"/usr/lib/{os.uname().machine}-linux-gnu"
COMPAT = "/usr/local/cuda-13.0/compat"
DEFAULT = f"{LIB}/libcuda.so.1"


def reading(driver: str = "580.159.04", cuda: str = "13.0", **gpu: Any) -> NvmlReading:
    """A healthy GPU behind a driver of this version."""
    values: dict[str, Any] = {"name": "NVIDIA H200", "compute_capability": "9.0", **gpu}
    return NvmlReading(
        code=0,
        driver_version=driver,
        module_version=driver,
        module_present=True,
        cuda_driver_version=cuda,
        count=1,
        gpus=(GpuReading(index=0, code=0, uuid="GPU-0", **values),),
    )


class Machine:
    """A server's root with its environment, and what NVML says of the machine."""

    def __init__(self, root: Path, isolation: Isolation) -> None:
        self.root = root
        self.site = Site(root / "opt/venv")
        self.site.dependencies()
        self.site.kernel("sm100", "sm90")
        self.reading: NvmlReading | None = reading()
        self.age = 1.0
        self.info: ServerInfo | None = None
        self.clock: Any = RealClock()
        self.environ: dict[str, str] | None = {"PATH": os.defpath}
        self._environment = Environment(isolation, RealClock(), Settings(), Credentials())

    @property
    def latest(self) -> NvmlReading | None:
        """The last reading, as the NVML client gives it."""
        return self.reading

    @property
    def latest_at(self) -> float | None:
        """When that was found."""
        return None if self.reading is None else self.clock.monotonic() - self.age

    async def find(self) -> Target:
        """The server's process, seen through its root."""
        return self.site.target(root=str(self.root), python="/opt/venv/bin/python", environ=self.environ)

    async def read(self, target: Target) -> Any:
        """The environment, read by a real child."""
        return await self._environment.read(target)

    async def judged(self) -> dict[str, Finding]:
        """One round of the probe."""
        services: Any = SimpleNamespace(
            settings=Settings(),
            clock=self.clock,
            standing=HOST,
            nvml=self,
            targets=self,
            environment=self,
            server=SimpleNamespace(info=self._info),
        )
        facts = await PROBE.collect(services)
        world = World(standing=HOST, server=view(Answer.REFUSED), now=0.0, settings=Settings())
        result: Result[Any] = Result(probe="cuda", outcome=Outcome.OK, facts=facts)
        return {finding.code: finding for finding in PROBE.judge(result, world)}

    async def _info(self, _target: Target) -> ServerInfo | None:
        return self.info


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    """A machine without libcuda; each test puts it where its case has it."""
    isolation = Isolation()
    yield Machine(tmp_path / "root", isolation)
    await isolation.close()


def active(findings: dict[str, Finding]) -> dict[str, str | None]:
    return {code: one.reason for code, one in findings.items() if one.status is Status.TRUE}


async def test_a_healthy_machine(machine: Machine) -> None:
    """Where everything fits, every condition is judged and none holds."""
    driver_library(machine.root, LIB)
    assert {one.status for one in (await machine.judged()).values()} == {Status.FALSE}


async def test_driver_too_old_for_torch(machine: Machine) -> None:
    """NVML says 12.4 and torch was built for 13.0 (sgl-project/sglang#11395)."""
    driver_library(machine.root, LIB, "550.54.15")
    machine.reading = reading("550.54.15", "12.4")
    assert active(await machine.judged()) == {
        "driver-too-old-for-cuda": "driver-older",
        "cuda-unavailable-to-torch": "driver-too-old",
    }


@pytest.mark.parametrize(("library", "explained"), [("580.159.04", True), ("570.195.03", False), (None, False)])
async def test_half_of_an_upgrade(machine: Machine, library: str | None, explained: bool) -> None:
    """A module that is too old, under libraries that are not: the reboot that is due mends both, an upgrade neither.

    pando85/homelab#4110
    """
    driver_library(machine.root, LIB, "570.124.06")
    machine.reading = replace(reading("570.124.06", "12.8"), library_version=library)
    found = (await machine.judged())["driver-too-old-for-cuda"]
    assert (found.status, found.explained_by) == (Status.TRUE, ("driver-library-mismatch",) if explained else ())


async def test_minor_version_compatibility(machine: Machine) -> None:
    """CUDA 12.8 on a driver of 12.4 is fine (docs.nvidia.com: minor-version compatibility)."""
    machine.site.dependencies(cuda="12.8")
    driver_library(machine.root, LIB, "550.54.15")
    machine.reading = reading("550.54.15", "12.4")
    assert active(await machine.judged()) == {}


async def test_forward_compatibility(machine: Machine) -> None:
    """The compat package that the loader finds first makes up for an older driver, and only then."""
    driver_library(machine.root, LIB, "550.54.15")
    driver_library(machine.root, COMPAT, "580.95.05")
    machine.reading = reading("550.54.15", "12.4")
    assert active(await machine.judged())["driver-too-old-for-cuda"] == "driver-older"
    machine.environ = {"LD_LIBRARY_PATH": COMPAT}
    assert active(await machine.judged()) == {}
    machine.environ = None
    found = (await machine.judged())["driver-too-old-for-cuda"]
    assert (found.status, found.reason) == (Status.UNKNOWN, "compat-may-apply")


async def test_forward_compatibility_needs_a_data_center_gpu(machine: Machine) -> None:
    """A consumer's GPU refuses the package: the driver stays too old (docs.nvidia.com: forward compatibility)."""
    driver_library(machine.root, LIB, "550.54.15")
    driver_library(machine.root, COMPAT, "580.95.05")
    machine.environ = {"LD_LIBRARY_PATH": COMPAT}
    machine.reading = reading("550.54.15", "12.4", name="NVIDIA GeForce RTX 4090", compute_capability="8.9")
    assert active(await machine.judged())["driver-too-old-for-cuda"] == "compat-needs-datacenter-gpu"


async def test_error_35_with_a_new_driver(machine: Machine) -> None:
    """The versions fit and no libcuda is mounted: the cause (NVIDIA/nvidia-docker#781, ovg-project/kvcached#74)."""
    findings = await machine.judged()
    assert active(findings) == {"libcuda-unusable": "not-mounted", "cuda-unavailable-to-torch": "libcuda-unusable"}
    assert findings["driver-too-old-for-cuda"].status is Status.FALSE


@pytest.mark.parametrize("by", ["variable", "cache", "configuration"])
async def test_error_803(machine: Machine, by: str) -> None:
    """An old compat folder before the newer driver's own (llm-d/llm-d#706, NVIDIA/nvidia-container-toolkit#1679)."""
    driver_library(machine.root, LIB, "595.45.04")
    driver_library(machine.root, COMPAT, "580.95.05")
    machine.reading = reading("595.45.04", "13.2")
    assert active(await machine.judged()) == {}
    if by == "variable":
        machine.environ = {"LD_LIBRARY_PATH": f"/usr/lib:{COMPAT}"}
    else:
        loader_config(machine.root, **{"00-compat-7": f"{COMPAT}\n"})
    if by == "cache":
        loader_cache(machine.root, f"{COMPAT}/libcuda.so.1", DEFAULT)
    machine.environ = dict(machine.environ or {}, HOME=f"/{by}")  # another key: not the answer of half a minute ago
    findings = await machine.judged()
    assert active(findings)["libcuda-unusable"] == "compat-shadows"
    remedy = findings["libcuda-unusable"].remedy or ""
    assert ("LD_LIBRARY_PATH" if by == "variable" else "/etc/ld.so.conf.d/00-compat-7.conf") in remedy


async def test_the_popular_wrong_advice(machine: Machine) -> None:
    """A stub folder on LD_LIBRARY_PATH satisfies the import and nothing else (sgl-project/sglang#4778, #2584)."""
    driver_library(machine.root, "/usr/local/cuda/lib64/stubs", None)
    machine.environ = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64/stubs"}
    assert active(await machine.judged())["libcuda-unusable"] == "stub"


async def test_unseen_variables_prove_nothing(machine: Machine) -> None:
    """Without the server's LD_LIBRARY_PATH a missing libcuda is unknown: it may lie where only that leads."""
    machine.environ = None
    found = (await machine.judged())["libcuda-unusable"]
    assert (found.status, found.reason) == (Status.UNKNOWN, "environ-unseen")


async def test_new_gpu_old_wheel(machine: Machine) -> None:
    """An RTX 5090 with a torch for CUDA 12.4 (sgl-project/sglang#7249)."""
    machine.site.dependencies(cuda="12.4")
    driver_library(machine.root, LIB)
    machine.site.write("torch/version.py", "__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n")
    machine.reading = reading(name="NVIDIA GeForce RTX 5090", compute_capability="12.0")
    findings = await machine.judged()
    if os.uname().machine == "x86_64":
        assert active(findings) == {"gpu-arch-unsupported": "not-in-torch-build"}
    else:
        assert active(findings) == {"gpu-arch-unsupported": "not-in-kernel-wheel"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="torch is built for other GPUs elsewhere")
@pytest.mark.parametrize(
    ("pins", "command"),
    [
        (
            ("torch==2.11.0", "sglang-kernel==0.4.5"),
            ": uv pip install --python /opt/venv/bin/python --reinstall torch==2.11.0 sglang-kernel==0.4.5",
        ),
        # PyPI's torch 2.7 is a build for CUDA 12.6: the same command would install the same fault.
        (("torch==2.7.1", "sgl-kernel==0.2.4"), "(cu128, cu130)."),
        ((), "(cu128, cu130)."),
    ],
)
async def test_a_new_gpu_gets_the_command(machine: Machine, pins: tuple[str, ...], command: str) -> None:
    """What SGLang itself pins, where an index gives a build for that GPU (sgl-project/sglang#7249)."""
    driver_library(machine.root, LIB)
    machine.site.dist("sglang", "0.5.16", pins)
    machine.site.write("torch/version.py", "__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n")
    machine.reading = reading(name="NVIDIA GeForce RTX 5090", compute_capability="12.0")
    found = (await machine.judged())["gpu-arch-unsupported"]
    assert (found.reason, (found.remedy or "").endswith(command)) == ("not-in-torch-build", True), found.remedy


async def test_wrong_folder_in_the_kernel_wheel(machine: Machine) -> None:
    """Compute capability 8.6 with a wheel that holds Hopper's build only (sgl-project/sglang#13948)."""
    driver_library(machine.root, LIB)
    machine.site.remove("sgl_kernel/sm100")
    machine.reading = reading(name="NVIDIA A10", compute_capability="8.6")
    assert active(await machine.judged()) == {"gpu-arch-unsupported": "not-in-kernel-wheel"}


async def test_torch_without_cuda(machine: Machine) -> None:
    """A CPU build of torch is one cause, not several."""
    machine.site.dependencies(cuda=None)
    driver_library(machine.root, LIB)
    findings = await machine.judged()
    assert active(findings) == {"cuda-unavailable-to-torch": "torch-without-cuda"}
    assert findings["cuda-unavailable-to-torch"].explained_by == (), "no driver makes up for it"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
async def test_what_the_server_resolved(machine: Machine, device: str) -> None:
    """A server on CUDA settles what is unknown; one on the CPU has not fallen back while its flags are unseen."""
    machine.environ = None
    machine.info = ServerInfo(device=device)
    findings = await machine.judged()
    assert active(findings) == {}
    unknown = {code for code, one in findings.items() if one.status is Status.UNKNOWN}
    shared = {"libcuda-unusable", "cuda-unavailable-to-torch", "server-fell-back-to-cpu"}
    assert unknown == (set() if device == "cuda" else shared)


# -- collecting -----------------------------------------------------------------------------------------


class LeapingClock:
    """Time that passes at once, with something that happens after a number of waits."""

    def __init__(self, machine: Machine, waits: int | None) -> None:
        self._machine = machine
        self._waits = waits
        self.waited = 0
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._now += seconds
        self.waited += 1
        if self.waited == self._waits:
            self._machine.reading = reading()


async def test_the_first_reading_of_nvml_is_waited_for(machine: Machine) -> None:
    """When all probes start at once, the driver's first round ends after the reading of files has begun."""
    driver_library(machine.root, LIB)
    machine.reading = None
    machine.clock = LeapingClock(machine, waits=3)
    assert (await machine.judged())["driver-too-old-for-cuda"].status is Status.FALSE
    assert machine.clock.waited == 3


async def test_a_driver_that_never_answers_is_not_waited_for_long(machine: Machine) -> None:
    """Within the probe's own deadline the rest is judged, and the driver unknown (leptonai/gpud#117)."""
    machine.reading = None
    machine.clock = LeapingClock(machine, waits=None)
    findings = await machine.judged()
    assert machine.clock.monotonic() < PROBE.deadline
    assert (findings["driver-too-old-for-cuda"].status, active(findings)) == (Status.UNKNOWN, {})


async def test_an_old_reading_is_not_believed(machine: Machine) -> None:
    """Once NVML has been silent for three rounds and a deadline, what it said before is no longer known."""
    driver_library(machine.root, LIB)
    machine.age = 34.0
    assert (await machine.judged())["driver-too-old-for-cuda"].status is Status.FALSE
    machine.age = 36.0
    assert (await machine.judged())["driver-too-old-for-cuda"].reason == "driver-unknown"


async def test_without_an_interpreter_nothing_fails(machine: Machine) -> None:
    """Where no environment can be found the software is unknown, and the driver's state still counts."""

    async def nothing(_target: Target) -> Any:
        raise Skip("no interpreter")

    machine.read = nothing  # type: ignore[method-assign]  # this fake's own edge
    findings = await machine.judged()
    assert active(findings) == {}
    assert findings["driver-too-old-for-cuda"].reason == "no-interpreter"
    machine.reading = replace(reading(), code=18, count=None, gpus=())
    assert active(await machine.judged()) == {"cuda-unavailable-to-torch": "driver-unusable"}
