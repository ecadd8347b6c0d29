"""The NVML client against a real worker process with the real binding and a compiled fake library."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pynvml
import pytest

from sidecar.model import ProbeCrash, ProbeTimeout
from sidecar.nvml.reading import NvmlReading
from tests.fakes.nvml import SONAME, Scenario, build
from tests.fakes.nvml.harness import MakeClient, Unkillable, nvml_clients, workers

CAPTURE = json.loads((Path(__file__).parents[1] / "captures/nvml/h200x2.json").read_text())
GENEROUS = 30.0
"""Seconds for rounds that are expected to be answered."""
SHORT = 1.0
"""Seconds for rounds that are expected not to be."""
GETTERS = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetVirtualizationMode",
)
"""Every call that a regular round makes to a GPU."""
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)


@pytest.fixture(name="library")
def _library(fake_library: Path) -> Path:
    return fake_library


@pytest.fixture(name="scenario")
def _scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path / "scenario")


@pytest.fixture(name="make")
async def _make(library: Path, scenario: Scenario, tmp_path: Path) -> AsyncIterator[MakeClient]:
    async with nvml_clients(library, scenario, tmp_path) as make:
        yield make


@pytest.mark.parametrize("gpus", [1, 2, 8])
async def test_healthy(make: MakeClient, scenario: Scenario, gpus: int) -> None:
    """Every GPU of a healthy node is read completely, without a single error."""
    scenario.set(gpus=gpus)
    reading = await make().round(GENEROUS)
    assert (reading.code, reading.call, reading.count, dict(reading.errors)) == (0, None, gpus, {})
    assert [(gpu.index, gpu.code, dict(gpu.errors)) for gpu in reading.gpus] == [(n, 0, {}) for n in range(gpus)]
    assert len({gpu.uuid for gpu in reading.gpus}) == gpus


async def test_values_are_those_of_the_recorded_machine(make: MakeClient) -> None:
    """Versions and per-GPU values come out in the units of the reading, equal to those recorded on two H200."""
    reading = await make().round(GENEROUS)
    system = CAPTURE["system"]
    assert reading.driver_version == system["nvmlSystemGetDriverVersion"]["value"]
    assert reading.nvml_version == system["nvmlSystemGetNVMLVersion"]["value"]
    assert (reading.cuda_driver_version, system["nvmlSystemGetCudaDriverVersion"]["value"]) == ("13.0", 13000)
    for gpu, recorded in zip(reading.gpus, CAPTURE["devices"], strict=True):
        assert gpu.uuid == recorded["nvmlDeviceGetUUID"]["value"]
        assert gpu.name == recorded["nvmlDeviceGetName"]["value"]
        assert gpu.compute_capability == "9.0"
        assert gpu.mig is False
        # What the plain call counts as used on an idle GPU is the driver's reservation; nvidia-smi says 0 MiB.
        assert gpu.memory_used == 0
        assert gpu.memory_total == recorded["nvmlDeviceGetMemoryInfo"]["value"]["total"]
        assert gpu.temperature == recorded["nvmlDeviceGetTemperature"]["[0]"]["value"]
        assert gpu.power == pytest.approx(recorded["nvmlDeviceGetPowerUsage"]["value"] / 1000)
        assert gpu.utilization == recorded["nvmlDeviceGetUtilizationRates"]["value"]["gpu"] / 100


async def test_library_path_and_version(make: MakeClient, library: Path) -> None:
    """The library is reported by the real name behind the link, which carries its version."""
    reading = await make().round(GENEROUS)
    assert reading.library == str(library / "libnvidia-ml.so.580.159.04")
    assert reading.library_version == "580.159.04"


@pytest.mark.parametrize("code", [4, 9, 15, 17, 18, 999])
async def test_init_code(make: MakeClient, scenario: Scenario, code: int) -> None:
    """A failing nvmlInit is reported with its code, and the same worker recovers once the driver does.

    Cases 1, 2, 8: NVIDIA/nvidia-docker#1730, pando85/homelab#4110, microsoft/WSL#9938.
    """
    scenario.set(nvmlInit=code)
    client = make()
    reading = await client.round(GENEROUS)
    assert (reading.code, reading.call, reading.count, reading.gpus) == (code, "nvmlInit", None, ())
    assert reading.words
    assert (reading.library_version, reading.nvml_version) == ("580.159.04", "13.580.159.04")
    before = workers()
    scenario.set(nvmlInit=None)
    assert (await client.round(GENEROUS)).code == 0
    assert workers() == before


async def test_unnamed_code(make: MakeClient, scenario: Scenario) -> None:
    """A code that the binding has no name for is described by the library itself."""
    scenario.set(nvmlInit=4242)
    reading = await make().round(GENEROUS)
    assert (reading.code, reading.words) == (4242, "Fake Error 4242")


async def test_no_library(make: MakeClient, tmp_path: Path) -> None:
    """Without a library the code is 12 and the loader's sentence is kept (case 9: NVIDIA/nvidia-docker#1711)."""
    reading = await make(library=tmp_path / "nowhere").round(GENEROUS)
    if reading.code != 12:
        pytest.skip("this machine has an NVIDIA driver library of its own, so its absence cannot be tried")
    assert reading.library is None
    assert "No such file" in (reading.loader or "")


async def test_broken_library(make: MakeClient, tmp_path: Path) -> None:
    """A file that is no library is told apart from a missing one by the loader's sentence."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / SONAME).write_text("not an ELF file, but long enough to be looked at by the dynamic loader" * 10)
    reading = await make(library=broken).round(GENEROUS)
    assert reading.code == 12
    assert "invalid ELF header" in (reading.loader or "")


async def test_library_that_arrives_later_is_found(make: MakeClient, tmp_path: Path) -> None:
    """A library installed after the start is found without a restart of the agent."""
    late = tmp_path / "late"
    client = make(library=late)
    if (await client.round(GENEROUS)).code != 12:
        pytest.skip("this machine has an NVIDIA driver library of its own, so its absence cannot be tried")
    build(late)
    codes = [(await client.round(GENEROUS)).code for _ in range(8)]
    assert codes[-1] == 0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"])
async def test_hang(make: MakeClient, scenario: Scenario, call: str) -> None:
    """A call about no GPU that never returns ends the round, is named, and the next round starts afresh.

    Case 4: leptonai/gpud#117, NVIDIA/gpu-monitoring-tools#46.
    """
    client = make(init_patience=0)
    scenario.set(nvmlDeviceGetCount=999)
    await client.round(GENEROUS)  # a warm worker without a session: the short deadline is for the call alone
    scenario.set({"nvmlDeviceGetCount": None, call: "hang"})
    with pytest.raises(ProbeTimeout) as caught:
        await client.round(SHORT)
    assert (caught.value.where, caught.value.stuck) == (call, False)
    assert workers() == []
    scenario.set({call: None})
    assert (await client.round(GENEROUS)).code == 0
    assert len(workers()) == 1


async def test_hang_in_shutdown(make: MakeClient, scenario: Scenario) -> None:
    """A session that died and cannot even be closed costs one round, not the agent."""
    client = make()
    await client.round(GENEROUS)
    scenario.set(nvmlDeviceGetCount=999, nvmlShutdown="hang")
    assert (await client.round(GENEROUS)).code == 999
    scenario.set(nvmlDeviceGetCount=None)
    with pytest.raises(ProbeTimeout) as caught:
        await client.round(SHORT)
    assert caught.value.where == "nvmlShutdown"
    assert (await client.round(GENEROUS)).code == 0


async def test_slow_is_not_hung(make: MakeClient, scenario: Scenario) -> None:
    """A call that takes its time within the deadline is answered like any other."""
    scenario.set({"nvmlDeviceGetCount": "slow:300"})
    assert (await make().round(GENEROUS)).count == 2


async def test_abort(make: MakeClient, scenario: Scenario) -> None:
    """A library that aborts is reported once, with signal and call, and the next round has a new worker."""
    client = make()
    await client.round(GENEROUS)
    scenario.set({"nvmlDeviceGetPowerUsage@1": "abort"})
    with pytest.raises(ProbeCrash, match=r"SIGABRT at nvmlDeviceGetPowerUsage on GPU 1"):
        await client.round(GENEROUS)
    scenario.set({"nvmlDeviceGetPowerUsage@1": None})
    assert (await client.round(GENEROUS)).code == 0


async def test_killed_between_rounds(make: MakeClient) -> None:
    """A worker that somebody killed between two rounds is reported once and then replaced."""
    client = make()
    await client.round(GENEROUS)
    (pid,) = workers()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProbeCrash, match="SIGKILL"):
        await client.round(GENEROUS)
    assert (await client.round(GENEROUS)).code == 0
    assert pid not in workers()


async def test_stopped_worker(make: MakeClient) -> None:
    """A worker that makes no progress at all, as in an uninterruptible sleep, is a time-out and is replaced.

    Case 4: NVIDIA/nvidia-docker#377.
    """
    client = make()
    await client.round(GENEROUS)
    (pid,) = workers()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ProbeTimeout) as caught:
        await client.round(SHORT)
    assert caught.value.where == "the start of the worker"
    assert (await client.round(GENEROUS)).code == 0


async def test_unkillable_workers_do_not_pile_up(make: MakeClient, scenario: Scenario) -> None:
    """Beside a worker that cannot be killed one more is tried, never a third (case 4: leptonai/gpud#261)."""
    scenario.set(nvmlInit="hang")
    isolation = Unkillable()
    client = make(isolation=isolation, init_patience=0)
    try:
        for _ in range(2):
            with pytest.raises(ProbeTimeout) as caught:
                await client.round(3 * SHORT)
            assert caught.value.stuck
        with pytest.raises(ProbeTimeout, match="cannot be killed") as caught:
            await client.round(GENEROUS)
        assert (caught.value.where, caught.value.stuck) == ("nvmlInit", True)
        assert len(isolation.started) == 2
        os.killpg(isolation.started[0].pid, signal.SIGKILL)
        await isolation.started[0].wait(GENEROUS)
        scenario.set(nvmlInit=None)
        assert (await client.round(GENEROUS)).code == 0
    finally:
        await client.close()
        await isolation.end()


async def test_missing_symbols_cost_only_their_field(make: MakeClient, tmp_path: Path) -> None:
    """A library that lacks functions answers everything else; each lack is code 13 of that field."""
    old = build(tmp_path / "old", "450.80.02", omit=["nvmlDeviceGetMigMode", "nvmlDeviceGetUtilizationRates"])
    reading = await make(library=old).round(GENEROUS)
    assert (reading.code, reading.count) == (0, 2)
    for gpu in reading.gpus:
        assert gpu.errors == {"nvmlDeviceGetMigMode": 13, "nvmlDeviceGetUtilizationRates": 13}
        assert (gpu.code, gpu.mig, gpu.utilization, gpu.name) == (0, None, None, "NVIDIA H200")


async def test_library_too_old_to_open(make: MakeClient, tmp_path: Path) -> None:
    """A library without the function that opens it is code 13 of that call, not a crash."""
    old = build(tmp_path / "old", "375.26", omit=["nvmlInitWithFlags"])
    reading = await make(library=old).round(GENEROUS)
    assert (reading.code, reading.call) == (13, "nvmlInit")


async def test_undecodable_name(make: MakeClient, scenario: Scenario) -> None:
    """A name that is not UTF-8 costs that name only, on that GPU only."""
    scenario.set({"name@0": b"NVIDIA \xff\xfe"})
    reading = await make().round(GENEROUS)
    assert [gpu.name for gpu in reading.gpus] == [None, "NVIDIA H200"]
    assert reading.gpus[0].errors == {"nvmlDeviceGetName": "undecodable"}
    assert reading.gpus[0].memory_total == 150754820096


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"])
async def test_lost_gpu(make: MakeClient, scenario: Scenario, call: str) -> None:
    """A GPU that answers 15 is lost, keeps the uuid seen before, and hides none of the others.

    Case 3: NVIDIA/open-gpu-kernel-modules#507, leptonai/gpud#1209.
    """
    scenario.set(gpus=4)
    client = make()
    before = await client.round(GENEROUS)
    scenario.set({f"{call}@2": 15})
    reading = await client.round(GENEROUS)
    assert [gpu.code for gpu in reading.gpus] == [0, 0, 15, 0]
    assert [gpu.uuid for gpu in reading.gpus] == [gpu.uuid for gpu in before.gpus]
    assert (reading.code, reading.gpus[3].name) == (0, "NVIDIA H200")


async def test_remembered_uuid_is_dropped_when_another_gpu_has_it(make: MakeClient, scenario: Scenario) -> None:
    """After the driver renumbered its GPUs no uuid appears twice."""
    client = make()
    first = (await client.round(GENEROUS)).gpus[0].uuid
    scenario.set({"nvmlDeviceGetHandleByIndex@0": 999, "uuid@1": first, "driver_generation": 1})
    assert (await client.round(GENEROUS)).code == 999
    reading = await client.round(GENEROUS)
    assert [(gpu.code, gpu.uuid) for gpu in reading.gpus] == [(999, None), (0, first)]


async def test_gpu_that_answers_nothing_is_not_up(make: MakeClient, scenario: Scenario) -> None:
    """A GPU with a handle but not one answer carries the code of its silence."""
    scenario.set({f"{call}@1": 999 for call in GETTERS})
    reading = await make().round(GENEROUS)
    assert [gpu.code for gpu in reading.gpus] == [0, 999]


async def test_memory_of_a_driver_without_the_versioned_call(make: MakeClient, tmp_path: Path) -> None:
    """An old driver answers the plain call, whose "used" includes what the driver reserved."""
    old = build(tmp_path / "old", omit=["nvmlDeviceGetMemoryInfo_v2"])
    gpu = (await make(library=old).round(GENEROUS)).gpus[0]
    recorded = CAPTURE["devices"][0]["nvmlDeviceGetMemoryInfo"]["value"]
    assert (gpu.memory_used, gpu.memory_total) == (recorded["used"], recorded["total"])
    assert gpu.errors == {}


async def test_mig_parent(make: MakeClient, scenario: Scenario) -> None:
    """A GPU in MIG mode refuses some values: they are unknown, the GPU is up (case 7: rapidsai/dask-cuda#583)."""
    scenario.set({"mig@0": 1, "nvmlDeviceGetMemoryInfo@0": 4, "nvmlDeviceGetUtilizationRates@0": 3})
    gpu = (await make().round(GENEROUS)).gpus[0]
    assert (gpu.code, gpu.mig, gpu.memory_used, gpu.utilization) == (0, True, None, None)
    assert gpu.errors == {"nvmlDeviceGetMemoryInfo": 4, "nvmlDeviceGetUtilizationRates": 3}


@pytest.mark.parametrize("code", [1, 9, 18])
async def test_code_of_a_system_call(make: MakeClient, scenario: Scenario, code: int) -> None:
    """A code that ends an open session is reported with its call; that it once was open is remembered."""
    client = make()
    assert (await client.round(GENEROUS)).succeeded_before is False
    scenario.set(nvmlDeviceGetCount=code)
    reading = await client.round(GENEROUS)
    assert (reading.code, reading.call, reading.succeeded_before) == (code, "nvmlDeviceGetCount", True)


async def test_session_that_died_is_opened_again(make: MakeClient, scenario: Scenario) -> None:
    """After the driver was loaded anew the old session fails once; the next round has a new one, no new worker."""
    client = make()
    await client.round(GENEROUS)
    before = workers()
    scenario.set(driver_generation=1)
    assert (await client.round(GENEROUS)).code == 999
    assert (await client.round(GENEROUS)).code == 0
    assert workers() == before


@pytest.mark.parametrize("lines", [{"gpus": 0}, {"nvmlDeviceGetHandleByIndex": 999}], ids=["none", "all-fail"])
async def test_session_without_a_gpu_is_opened_again(
    make: MakeClient, scenario: Scenario, lines: dict[str, int]
) -> None:
    """While no GPU answers each round opens a new session, since NVML looks for GPUs only then."""
    client = make()
    scenario.set(lines)
    assert (await client.round(GENEROUS)).code == 0
    scenario.set(nvmlInit=9)
    assert (await client.round(GENEROUS)).code == 9


async def test_replaced_library(make: MakeClient, tmp_path: Path) -> None:
    """After an upgrade of the library on disk a fresh worker sees what new processes would.

    Case 1: an unattended upgrade under a running process (lyulyul/shine-cluster#30).
    """
    folder = build(tmp_path / "upgraded", "570.124.04")
    client = make(library=folder)
    assert (await client.round(GENEROUS)).library_version == "570.124.04"
    (before,) = workers()
    build(folder, "570.124.06")
    assert (await client.round(GENEROUS)).library_version == "570.124.06"
    assert before not in workers()


async def test_kernel_module_and_device(make: MakeClient, tmp_path: Path) -> None:
    """What the kernel module shows of itself and the state of the control device are part of the reading."""
    for name in ("0000:00:06.0", "0000:00:07.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(OPEN_MODULE)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    reading = await make(environ={"NVIDIA_VISIBLE_DEVICES": "void"}).round(GENEROUS)
    assert (reading.module_present, reading.module_version, reading.module_flavour) == (True, "580.159.04", "open")
    assert reading.module_gpus == 2
    assert (reading.device_present, reading.device_refused) == (True, False)
    assert (reading.visible_devices, reading.driver_capabilities) == ("void", None)


async def test_no_kernel_module(make: MakeClient) -> None:
    """Where the kernel module shows nothing, nothing is claimed."""
    reading = await make().round(GENEROUS)
    assert (reading.module_present, reading.module_version, reading.module_gpus) == (False, None, None)
    assert (reading.device_present, reading.device_refused) == (False, None)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('no ctypes here')", "no ctypes here"),
        ("nvmlInit = print", "AttributeError"),
    ],
)
async def test_unusable_binding(make: MakeClient, tmp_path: Path, source: str, said: str) -> None:
    """A binding that cannot be imported, or is another module of that name, is named (vllm-project/vllm#8953)."""
    (tmp_path / "binding").mkdir()
    (tmp_path / "binding/pynvml.py").write_text(source)
    with pytest.raises(ProbeCrash, match=rf"nvidia-ml-py\) cannot be used: .*{said}"):
        await make(binding=tmp_path / "binding").round(GENEROUS)


async def test_old_binding(make: MakeClient, tmp_path: Path) -> None:
    """A binding that lacks a call costs that value only (case 56: gpuopenanalytics/pynvml#43)."""
    (tmp_path / "binding").mkdir()
    (tmp_path / "binding/pynvml.py").write_text(_wrapper("del nvmlDeviceGetMigMode"))
    reading = await make(binding=tmp_path / "binding").round(GENEROUS)
    assert [dict(gpu.errors) for gpu in reading.gpus] == [{"nvmlDeviceGetMigMode": "not-in-binding"}] * 2


async def test_noise_does_not_reach_the_channel(make: MakeClient, tmp_path: Path) -> None:
    """Whatever the binding prints, the answer is read all the same (case 54: mlco2/codecarbon#933, a FutureWarning)."""
    (tmp_path / "binding").mkdir()
    noise = "import sys; print('{\"result\": 1}', flush=True); sys.stderr.write('FutureWarning: ' + 'x' * 500000)"
    (tmp_path / "binding/pynvml.py").write_text(_wrapper(noise))
    assert (await make(binding=tmp_path / "binding").round(GENEROUS)).code == 0


def _wrapper(extra: str) -> str:
    """Write a module that is the real binding and then something else."""
    return f"exec(compile(open({pynvml.__file__!r}).read(), 'pynvml', 'exec'))\n{extra}\n"


async def test_rounds_take_turns(make: MakeClient) -> None:
    """Two rounds at the same time share one worker and are both answered."""
    client = make()
    readings: list[NvmlReading] = await asyncio.gather(client.round(GENEROUS), client.round(GENEROUS))
    assert [reading.count for reading in readings] == [2, 2]
    assert len(workers()) == 1


async def test_cancelled_round(make: MakeClient, scenario: Scenario) -> None:
    """A round cancelled in mid-call takes its worker with it, and the next one gets no stale answer."""
    scenario.set(nvmlDeviceGetCount="hang")
    client = make()
    task = asyncio.create_task(client.round(GENEROUS))
    while not workers():
        await asyncio.sleep(0.01)
    (pid,) = workers()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    scenario.set(nvmlDeviceGetCount=None, gpus=5)
    assert (await client.round(GENEROUS)).count == 5
    assert pid not in workers()


async def test_close_leaves_no_child(make: MakeClient, scenario: Scenario) -> None:
    """Closing ends the worker even while it hangs in the driver."""
    client = make()
    await client.round(GENEROUS)
    assert len(workers()) == 1
    scenario.set(nvmlDeviceGetCount="hang")
    task = asyncio.create_task(client.round(GENEROUS))
    await asyncio.sleep(0.05)
    await client.close()
    assert workers() == []
    with pytest.raises(ProbeCrash):
        await task


def test_the_worker_loads_no_more_than_it_needs() -> None:
    """Its memory counts once per replica. What the binding imports without use is loaded when it is used."""
    program = (
        "import sys\n"
        "sys.path.append(sys.argv[1])\n"
        "import worker\n"
        "worker.load_binding(sys.argv[2])\n"
        "print(*sys.modules)\n"
        "import ctypes.util\n"
        "print(ctypes.util.find_library('no-such-library'), ctypes.util.__file__)\n"
    )
    folder = Path(__file__).parents[2] / "sidecar/nvml"
    arguments = [sys.executable, "-I", "-S", "-c", program, str(folder), str(Path(pynvml.__file__).parent)]
    modules, found = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {"asyncio", "pathlib", "random", "shutil", "subprocess", "tempfile", "typing"}.isdisjoint(modules.split())
    assert "pynvml" in modules.split()
    assert found.startswith("None ")
    assert found.endswith("util.py")
