"""Faults of driver and GPUs that people reported: a real worker, the compiled fake, the probe over rounds, the judge.

What each test sets up is what the machine of the report showed; what it expects is the cause that people had to find
by hand.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar.conditions import Judgement, Memory
from sidecar.conditions import judge as judge_all
from sidecar.config import Settings
from sidecar.model import Answer, Gate, Outcome, Placement, ProbeTimeout, Result, Status, Target
from sidecar.nvml.client import NvmlClient
from sidecar.probes.driver import PROBE
from sidecar.probes.driver.facts import DriverFacts, DriverMemory
from tests.builders import server_probe, view
from tests.fakes.nvml import Scenario, build
from tests.fakes.nvml.harness import MakeClient, nvml_clients
from tests.gpus import standing, target

GENEROUS = 30.0
HOST, CONTAINER = Placement.HOST, Placement.CONTAINER
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (root@host)\n"


def uuid(index: int) -> str:
    """The fake's uuid of a GPU."""
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


@pytest.fixture(name="library")
def _library(fake_library: Path) -> Path:
    return fake_library


@dataclass
class Node:
    """A machine with a driver, and an agent that looks at it round after round, ten seconds apart."""

    client: NvmlClient
    scenario: Scenario
    folder: Path
    placement: Placement = HOST
    server: Target | None = None
    settings: Settings = field(default_factory=Settings)
    answer: Answer = Answer.REFUSED
    memory: DriverMemory = field(default_factory=DriverMemory)
    judged: Memory = field(default_factory=Memory)
    facts: DriverFacts | None = None
    rounds: int = 0
    clock: list[float] = field(default_factory=lambda: [1_800_000_000.0])

    @property
    def now(self) -> float:
        """Epoch seconds, for the probe and its client alike."""
        return self.clock[0]

    def module(self, version: str | None, gpus: int = 2) -> None:
        """What the kernel module says of itself; None while it is not loaded."""
        driver = self.folder / "proc" / "driver" / "nvidia"
        shutil.rmtree(driver, ignore_errors=True)
        if version is not None:
            for index in range(gpus):
                (driver / "gpus" / f"0000:00:{index + 6:02x}.0").mkdir(parents=True)
            (driver / "version").write_text(MODULE.format(version=version))

    async def round(self, deadline: float = GENEROUS) -> Judgement:
        """One round of the probe, and what is published after it."""
        self.rounds += 1
        self.clock[0] += 10.0
        outcome, more = Outcome.OK, dict[str, Any]()
        try:
            reading = await self.client.round(deadline)
        except ProbeTimeout as timeout:
            outcome, more = Outcome.TIMEOUT, {"where": timeout.where, "stuck": timeout.stuck, "failing_since": self.now}
        else:
            self.memory.target = self.server
            self.facts = self.memory.fold(reading, self.settings, standing(self.placement), self.now)
        results: dict[str, Result[Any]] = {
            "driver": Result(probe="driver", outcome=outcome, facts=self.facts, rounds=self.rounds, **more),
            "server": Result(probe="server", outcome=Outcome.OK, facts={"view": view(self.answer)}, rounds=1),
        }
        judgement = judge_all(
            [PROBE, server_probe()],
            results,
            standing=standing(self.placement),
            settings=self.settings,
            required=(),
            memory=self.judged,
            now=self.now,
        )
        assert judgement.faults == ()
        self.judged = judgement.memory
        return judgement


MakeNode = Callable[..., Node]


@pytest.fixture(name="clients")
async def _clients(library: Path, tmp_path: Path) -> AsyncIterator[MakeClient]:
    async with nvml_clients(library, Scenario(tmp_path / "scenario"), tmp_path) as make:
        yield make


@pytest.fixture(name="node")
def _node(clients: MakeClient, tmp_path: Path) -> MakeNode:
    def make(*, gpus: int = 2, **more: Any) -> Node:
        scenario = Scenario(tmp_path / "scenario", gpus=gpus)
        clock = [1_800_000_000.0]
        client = clients(slow_every=0.0, now=lambda: clock[0], **more.pop("client", {}))
        node = Node(client=client, scenario=scenario, folder=tmp_path, clock=clock, **more)
        node.module("580.159.04", gpus)
        return node

    return make


def active(judgement: Judgement) -> dict[str, str | None]:
    return {code: one.reason for code, one in judgement.conditions.items() if one.active}


def pod(*gpus: int) -> Target:
    """A server in a pod that was given these GPUs."""
    return target({"NVIDIA_VISIBLE_DEVICES": ",".join(uuid(index) for index in gpus)})


# -- 1 to 4: the driver ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "reason"), [(18, "refused"), (0, "versions-differ")])
async def test_case_1_an_unattended_upgrade(node: MakeNode, code: int, reason: str) -> None:
    """The libraries were upgraded under the loaded module: both versions are named, and no GPU is called missing.

    lyulyul/shine-cluster#30, mozilla/translations#1167, NVIDIA/ubuntu-packaging-nvidia-driver#3
    """
    machine = node()
    machine.module("570.124.06")
    machine.scenario.set(nvmlInit=code)
    judgement = await machine.round()
    found = judgement.conditions["driver-library-mismatch"]
    assert active(judgement) == {"driver-library-mismatch": reason}
    assert "570.124.06" in found.message
    assert "580.159.04" in found.message
    assert judgement.verdict.blockers == ("driver-library-mismatch",)
    machine.answer = Answer.ACCEPTED
    assert (await machine.round()).verdict.ready


async def test_case_2_a_daemon_reload_takes_the_devices_away(node: MakeNode, tmp_path: Path) -> None:
    """Unknown Error after success, with the device node there and refused: this container's loss, not the GPU's.

    NVIDIA/nvidia-docker#1730, NVIDIA/nvidia-container-toolkit#48, dstackai/dstack#2860
    """
    machine = node(placement=CONTAINER, server=pod(0, 1))
    assert active(await machine.round()) == {}
    # What nobody may open for writing, not even root, and that without a cgroup.
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").symlink_to("/proc/sys/kernel/ostype")
    machine.scenario.set(nvmlInit=999, driver_generation=1)
    await machine.round()
    judgement = await machine.round()
    assert active(judgement) == {"device-access-lost": "revoked"}
    assert "Recreate the pod" in judgement.conditions["device-access-lost"].remedy
    assert judgement.verdict.ready


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"])
async def test_case_3_a_gpu_falls_off_the_bus(node: MakeNode, call: str) -> None:
    """Lost, at once, named with uuid and PCI address, whichever call met it; the pod that has it is unready.

    NVIDIA/open-gpu-kernel-modules#1151, leptonai/gpud#1209, JosephKJ/OWOD#81
    """
    machine = node(gpus=8, server=pod(2, 3))
    machine.answer = Answer.ACCEPTED
    assert (await machine.round()).verdict.ready
    machine.scenario.set({f"{call}@3": 15, "xid@3": 79, "xid_sequence": 1})
    judgement = await machine.round()
    assert active(judgement) == {"gpu-lost": "lost"}
    assert judgement.conditions["gpu-lost"].gpus == (("3", uuid(3)),)
    assert judgement.verdict.blockers == ("gpu-lost",)
    assert machine.facts is not None
    assert [gpu.code for gpu in machine.facts.reading.gpus] == [0, 0, 0, 15, 0, 0, 0, 0]


async def test_case_3_a_gpu_is_gone_after_a_reboot_of_the_driver(node: MakeNode) -> None:
    """The count is fine by itself, and a GPU of the server is missed by its uuid, after two rounds.

    NVIDIA/NVSentinel#155, pop-os/pop#3363
    """
    machine = node(gpus=8, server=pod(6, 7))
    await machine.round()
    machine.scenario.set(gpus=7)
    await machine.round()
    judgement = await machine.round()
    assert active(judgement) == {"gpu-missing": "vanished"}
    assert uuid(7) in judgement.conditions["gpu-missing"].message
    assert judgement.verdict.blockers == ("gpu-missing",)


async def test_case_4_a_call_that_never_returns(node: MakeNode) -> None:
    """A hang is named with its call and gates nothing; what was known goes on to be told.

    leptonai/gpud#117, NVIDIA/gpu-monitoring-tools#46, utkuozdemir/nvidia_gpu_exporter#89
    """
    machine = node(server=pod(0, 1))
    await machine.round()
    machine.scenario.set(nvmlDeviceGetCount="hang")
    judgement = await machine.round(1.0)
    assert judgement.conditions["driver-hung"].status is Status.FALSE  # one round does not outweigh what was published
    judgement = await machine.round(1.0)
    assert active(judgement) == {"driver-hung": "deadline"}
    assert "nvmlDeviceGetCount" in judgement.conditions["driver-hung"].message
    assert judgement.verdict.ready
    machine.scenario.set(nvmlDeviceGetCount=None)
    for _ in range(3):
        judgement = await machine.round()
    assert active(judgement) == {}


async def test_case_4_one_gpu_of_many_hangs(node: MakeNode) -> None:
    """A GPU whose call hangs is left out and named; the others are read and judged as before.

    NVIDIA/NVSentinel#1574
    """
    machine = node(gpus=4, server=pod(2))
    await machine.round()
    machine.scenario.set({"nvmlDeviceGetTemperature@2": "hang", "temperature": 71})
    for _ in range(2):
        judgement = await machine.round(3.0)
    assert active(judgement) == {"driver-hung": "gpu-hung"}
    assert judgement.conditions["driver-hung"].gpus == (("2", uuid(2)),)
    assert "nvmlDeviceGetTemperature" in judgement.conditions["driver-hung"].message
    assert machine.facts is not None
    assert [gpu.temperature for gpu in machine.facts.reading.gpus] == [71, 71, None, 71]


# -- 5 to 7: memory and MIG -----------------------------------------------------------------------------

REMAPS: list[tuple[Mapping[str, int], dict[str, str]]] = [
    ({"remapped_uncorrectable": 11}, {}),
    ({"remapped_uncorrectable": 12, "remap_pending": 1}, {"row-remap-pending": "waits-for-reset"}),
    ({"remap_failed": 1}, {"row-remap-failed": "failed"}),
    ({"remap_failed": 1, "remap_pending": 1}, {"row-remap-failed": "failed"}),
]


@pytest.mark.parametrize(("lines", "expected"), REMAPS)
async def test_case_5_rows_of_memory(node: MakeNode, lines: Mapping[str, int], expected: dict[str, str]) -> None:
    """A pending remap asks for a reset, a failed one for a new GPU, and repaired rows alone for nothing.

    leptonai/gpud#80, aws/eks-node-monitoring-agent#245, Azure/azurehpc#617
    """
    machine = node(server=pod(0, 1))
    machine.scenario.set({f"{name}@0": value for name, value in lines.items()})
    judgement = await machine.round()
    assert active(judgement) == expected
    assert judgement.verdict.ready
    for code in expected:
        assert judgement.conditions[code].gate is Gate.NEVER


@pytest.mark.parametrize("profile", ["rtx4090", "a100"])
async def test_case_5_a_gpu_without_row_remapping(node: MakeNode, profile: str) -> None:
    """A GPU that does not support it is judged and fine, with nothing unknown.

    leptonai/gpud#219
    """
    machine = node(server=pod(0, 1))
    machine.scenario.set(profile=profile)
    if profile == "a100":
        machine.scenario.set(nvmlDeviceGetRemappedRows=3)
    judgement = await machine.round()
    statuses = {code: one.status for code, one in judgement.conditions.items()}
    assert set(statuses.values()) == {Status.FALSE}


async def test_case_6_a_hang_of_the_engine_that_was_memory(node: MakeNode) -> None:
    """Xids 48, 63, 94 and 154 of one GPU and a growing number of remapped rows are one cause: that GPU.

    wtdcode/vllm-backport#62, marin-community/marin#7344
    """
    machine = node(server=pod(0, 1))
    machine.scenario.set({"remapped_uncorrectable@1": 11})
    await machine.round()
    machine.scenario.set(
        {"xid@1": "48,63,94,154", "xid_sequence": 1, "remapped_uncorrectable@1": 12, "remap_pending@1": 1}
    )
    await machine.round()
    judgement = await machine.round()
    assert active(judgement) == {"xid-critical": "memory"}
    assert judgement.conditions["xid-critical"].gpus == (("1", uuid(1)),)
    explained = {code for code, one in judgement.conditions.items() if one.consequence_of == "xid-critical"}
    assert explained == {"ecc-uncorrected", "row-remap-pending", "xid-warning"}


async def test_case_6_without_events_xids_are_unknown(node: MakeNode) -> None:
    """Where the driver gives no events, their absence is not told as health.

    NVIDIA/open-gpu-kernel-modules#1355
    """
    machine = node(server=pod(0, 1), client={"oneshot": True})
    judgement = await machine.round()
    for code in ("xid-critical", "xid-warning"):
        assert (judgement.conditions[code].status, judgement.conditions[code].reason) == (
            Status.UNKNOWN,
            "events-unavailable",
        )


async def test_case_7_a_mig_parent_refuses(node: MakeNode) -> None:
    """Memory refused (4) and utilization not supported (3) on a GPU in MIG mode: no fault, and no value made up.

    NVIDIA/nvidia-container-toolkit#842, rapidsai/dask-cuda#583, Syllo/nvtop#256
    """
    machine = node(server=pod(1))
    machine.scenario.set({"mig@0": 1, "nvmlDeviceGetMemoryInfo@0": 4, "nvmlDeviceGetUtilizationRates@0": 3})
    judgement = await machine.round()
    assert active(judgement) == {}
    assert machine.facts is not None
    families = {(sample.family, *sample.labels[:1]) for sample in PROBE.samples(machine.facts)}
    assert ("gpu_utilization_ratio", "0") not in families
    assert ("gpu_memory_used_bytes", "0") not in families
    assert ("gpu_temperature_celsius", "0") in families


# -- 8 to 11: who may see what --------------------------------------------------------------------------


async def test_case_8_the_module_is_not_loaded_after_a_kernel_upgrade(node: MakeNode) -> None:
    """No module and NVML 9: not loaded, which gates whatever the server says; its return needs no restart of ours.

    GoogleCloudPlatform/compute-gpu-installation#18, negativo17/nvidia-driver#56
    """
    machine = node(server=pod(0, 1), placement=CONTAINER)
    machine.answer = Answer.ACCEPTED
    machine.module(None)
    machine.scenario.set(nvmlInit=9)
    judgement = await machine.round()
    assert active(judgement) == {"driver-not-loaded": "not-loaded"}
    assert judgement.verdict.blockers == ("driver-not-loaded",)
    machine.module("580.159.04")
    machine.scenario.set(nvmlInit=None)
    for _ in range(3):
        judgement = await machine.round()
    assert active(judgement) == {}


async def test_case_8_the_operating_system_blocks_the_gpu(node: MakeNode) -> None:
    """NVML 17 is the layer below, not a driver that is not loaded.

    microsoft/WSL#9938, microsoft/WSL#14339
    """
    machine = node()
    machine.module(None)
    machine.scenario.set(nvmlInit=17)
    assert active(await machine.round()) == {"driver-blocked": "blocked-by-os"}


async def test_case_9_a_sidecar_without_the_library(node: MakeNode, tmp_path: Path) -> None:
    """No library in a container beside a loaded driver is the sidecar's own configuration, shown with its variables.

    NVIDIA/nvidia-container-toolkit#154, NVIDIA/nvidia-docker#1301
    """
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "libnvidia-ml.so.1").write_text("not a library")
    machine = node(
        placement=CONTAINER,
        client={"environ": {"LD_LIBRARY_PATH": str(empty), "NVIDIA_VISIBLE_DEVICES": "void"}},
    )
    judgement = await machine.round()
    assert active(judgement) == {"sidecar-gpu-access": "no-library"}
    assert "NVIDIA_VISIBLE_DEVICES: void" in judgement.conditions["sidecar-gpu-access"].evidence
    assert judgement.conditions["nvml-library-missing"].status is Status.UNKNOWN
    assert judgement.verdict.ready


@pytest.mark.parametrize(("known", "unready"), [(True, [5]), (False, [])])
async def test_case_10_one_dead_gpu_on_a_node_of_eight_pods(node: MakeNode, known: bool, unready: list[int]) -> None:
    """Every sidecar sees all eight GPUs; only the one whose server has the dead one takes its pod out.

    NVIDIA/k8s-device-plugin#605, NVIDIA/gpu-operator#421, bottlerocket-os/bottlerocket#3718
    """
    machine = node(gpus=8, placement=CONTAINER)
    healthy = await machine.client.round(GENEROUS)
    machine.scenario.set({"nvmlDeviceGetTemperature@5": 15})
    broken = await machine.client.round(GENEROUS)
    found = []
    for index in range(8):
        memory = DriverMemory(target=pod(index) if known else target(None, environ_missing="permission-denied"))
        memory.fold(healthy, Settings(), standing(CONTAINER), 1000.0)
        facts = memory.fold(broken, Settings(), standing(CONTAINER), 1010.0)
        result: Result[Any] = Result(probe="driver", outcome=Outcome.OK, facts=facts, rounds=1)
        judgement = judge_all(
            [PROBE],
            {"driver": result},
            standing=standing(CONTAINER),
            settings=Settings(),
            required=(),
            memory=Memory(),
            now=1010.0,
        )
        assert active(judgement) == {"gpu-lost": "lost"}
        if not judgement.verdict.ready:
            found.append(index)
    assert found == unready


@pytest.mark.parametrize(("licensed", "expected"), [(0, {"vgpu-unlicensed": "unlicensed"}), (1, {})])
async def test_case_11_a_virtual_gpu_without_a_licence(node: MakeNode, licensed: int, expected: dict[str, str]) -> None:
    """A guest's virtual GPU without a licence is a warning before it is slowed down.

    NVIDIA/gpu-operator#628, NVIDIA/TensorRT-LLM#1861
    """
    machine = node(server=pod(0, 1))
    machine.scenario.set(virtualization=2, licensed=licensed)
    judgement = await machine.round()
    assert active(judgement) == expected
    assert judgement.verdict.ready


async def test_case_11_a_driver_without_the_question(node: MakeNode, tmp_path: Path) -> None:
    """A library that lacks the calls about virtual GPUs has no such condition, rather than an unknown one.

    NVIDIA/gpu-operator#220
    """
    old = build(tmp_path / "old", omit=["nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetGridLicensableFeatures_v4"])
    machine = node(client={"library": old})
    judgement = await machine.round()
    assert judgement.conditions["vgpu-unlicensed"].status is Status.FALSE


async def test_case_24_a_fabric_that_is_not_ready(node: MakeNode) -> None:
    """Every GPU is listed and CUDA would say 802: the fabric is named, and a launch is held back.

    huggingface/huggingface_hub#4128, wilicc/gpu-burn#92, NVIDIA/nvtrust#128
    """
    machine = node(gpus=8, server=pod(*range(8)))
    machine.scenario.set(fabric_state=2)
    judgement = await machine.round()
    assert active(judgement) == {"fabric-not-ready": "in-progress"}
    assert judgement.verdict.blockers == ("fabric-not-ready",)
