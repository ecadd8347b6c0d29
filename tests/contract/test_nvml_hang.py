"""A GPU that hangs, and NVML that is only slow: what the others' values, the worker and the next rounds do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.model import ProbeCrash, ProbeTimeout
from sidecar.nvml.client import RETRY_EVERY
from sidecar.nvml.reading import NvmlReading
from tests.fakes.nvml import Scenario
from tests.fakes.nvml.harness import MakeClient, Unkillable, nvml_clients, workers

GENEROUS = 30.0
"""Seconds for rounds that are expected to be answered."""
SHORT = 2.0
"""Seconds for rounds in which something hangs: a part of it is what a call may take."""
GETTER = "nvmlDeviceGetMemoryInfo"
SLOW_GETTERS = [
    f"nvmlDeviceGet{what}"
    for what in ("MemoryInfo", "Temperature", "PowerUsage", "UtilizationRates", "RemappedRows", "FieldValues")
]
"""Getters that are asked in every round. Each may be slow by less than what counts as hanging: it adds up."""


@pytest.fixture(name="library")
def _library(fake_library: Path) -> Path:
    return fake_library


@pytest.fixture(name="scenario")
def _scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path / "scenario", gpus=8)


@pytest.fixture(name="make")
async def _make(library: Path, scenario: Scenario, tmp_path: Path) -> AsyncIterator[MakeClient]:
    async with nvml_clients(library, scenario, tmp_path) as make:
        yield make


def _codes(reading: NvmlReading) -> list[int | str]:
    return [gpu.code for gpu in reading.gpus]


async def test_one_gpu_hangs_and_seven_stay_current(make: MakeClient, scenario: Scenario) -> None:
    """For as many rounds as ten minutes have, seven GPUs are new in each, and never more than one worker runs.

    Case 4: leptonai/gpud#117, NVIDIA/gpu-monitoring-tools#46. The GPU that hangs keeps its name; it is asked again
    every tenth round, as the last one.
    """
    client = make()
    first = await client.round(GENEROUS)
    scenario.set({f"{GETTER}@3": "hang"})
    halfway: list[int] = []
    for number in range(60):
        scenario.set(temperature=30 + number)
        reading = await client.round(SHORT)
        assert (reading.code, reading.count) == (0, 8)
        assert _codes(reading) == [0, 0, 0, "hung", 0, 0, 0, 0], number
        assert dict(reading.left_out) == {3: GETTER}
        assert {gpu.temperature for gpu in reading.gpus if gpu.index != 3} == {30 + number}
        assert reading.gpus[3].uuid == first.gpus[3].uuid
        assert reading.xids_watched is True
        assert len(workers()) <= 1
        if number % RETRY_EVERY == RETRY_EVERY // 2:
            halfway += workers()
    # Each time that it is asked again costs a worker, and nothing else does.
    assert len(set(halfway)) == len(halfway) == 6


async def test_a_gpu_that_hung_recovers(make: MakeClient, scenario: Scenario) -> None:
    """A GPU that answers when it is asked again is back with all its values."""
    client = make()
    first = await client.round(GENEROUS)
    scenario.set({f"{GETTER}@3": "hang"})
    assert _codes(await client.round(SHORT))[3] == "hung"
    scenario.set({f"{GETTER}@3": None})
    readings = [await client.round(GENEROUS) for _ in range(RETRY_EVERY)]
    assert [_codes(reading)[3] for reading in readings] == ["hung"] * (RETRY_EVERY - 1) + [0]
    assert readings[-1].gpus == first.gpus
    assert dict(readings[-1].left_out) == {}


async def test_the_first_round_of_all_names_the_gpu(make: MakeClient, scenario: Scenario) -> None:
    """Also in a first round, as of a one-shot check, seven GPUs are read and the eighth is known to hang."""
    scenario.set({f"{GETTER}@3": "hang"})
    reading = await make().round(2 * SHORT)
    assert _codes(reading) == [0, 0, 0, "hung", 0, 0, 0, 0]
    assert reading.gpus[3].words == f"{GETTER} did not return in time"


@pytest.mark.parametrize("call", ["nvmlDeviceGetUUID", "nvmlDeviceGetNvLinkState", "nvmlDeviceRegisterEvents"])
async def test_the_call_that_hangs_is_named(make: MakeClient, scenario: Scenario, call: str) -> None:
    """Whichever call to a GPU hangs, it is the one that is named."""
    scenario.set({"gpus": 2, f"{call}@1": "hang"})
    reading = await make().round(2 * SHORT)
    assert (_codes(reading), dict(reading.left_out)) == ([0, "hung"], {1: call})


async def test_two_gpus_hang(make: MakeClient, scenario: Scenario) -> None:
    """Two GPUs that hang at once are both left out by the end of the second round, and nobody else is."""
    client = make()
    await client.round(GENEROUS)
    scenario.set({f"{GETTER}@0": "hang", f"{GETTER}@7": "hang"})
    first = await client.round(SHORT)
    assert [gpu.code for gpu in first.gpus if gpu.index not in {0, 7}] == [0] * 6
    reading = await client.round(SHORT)
    assert _codes(reading) == ["hung", 0, 0, 0, 0, 0, 0, "hung"]
    assert dict(reading.left_out) == {0: GETTER, 7: GETTER}


async def test_the_only_gpu_hangs(make: MakeClient, scenario: Scenario) -> None:
    """Where the only GPU hangs the driver still answers: versions and count are there, and the session stays open."""
    scenario.set({"gpus": 1, f"{GETTER}@0": "hang"})
    client = make()
    for _ in range(2):
        reading = await client.round(SHORT)
        assert (reading.code, reading.count, reading.driver_version) == (0, 1, "580.159.04")
        assert _codes(reading) == ["hung"]
    scenario.set(nvmlInit=9)
    assert (await client.round(SHORT)).code == 0


async def test_a_gpu_that_hangs_when_it_is_opened(make: MakeClient, scenario: Scenario) -> None:
    """Opening a GPU may take longer than a round; two rounds later at most it counts as hung, and seven are read."""
    scenario.set({"nvmlDeviceGetHandleByIndex@3": "hang"})
    client = make()
    with pytest.raises(ProbeTimeout) as caught:
        await client.round(SHORT)
    assert caught.value.where == "nvmlDeviceGetHandleByIndex on GPU 3"
    await asyncio.sleep(SHORT)
    reading = await client.round(SHORT)
    assert _codes(reading) == [0, 0, 0, "hung", 0, 0, 0, 0]


async def test_slow_gpus_are_not_hung(make: MakeClient, scenario: Scenario) -> None:
    """Eight GPUs that take their time to open, as without persistence mode, end one round without result, no more."""
    scenario.set(nvmlDeviceGetHandleByIndex="slow:400")
    client = make()
    with pytest.raises(ProbeTimeout):
        await client.round(SHORT)
    before = workers()
    reading = await client.round(2 * SHORT)
    assert (_codes(reading), dict(reading.left_out)) == ([0] * 8, {})
    assert workers() == before


async def test_a_gpu_that_is_slow_in_every_call_costs_the_others_nothing(make: MakeClient, scenario: Scenario) -> None:
    """A GPU whose calls all return, but together far too late, is left out in the first round; the others are read."""
    scenario.set({f"{getter}@3": f"slow:{400 * SHORT:.0f}" for getter in SLOW_GETTERS})
    client = make()
    for temperature in (40, 41):
        scenario.set(temperature=temperature)
        reading = await client.round(2 * SHORT)
        assert _codes(reading) == [0, 0, 0, "hung", 0, 0, 0, 0]
        assert {gpu.temperature for gpu in reading.gpus if gpu.index != 3} == {temperature}


@pytest.mark.parametrize("busy", [0, 400])
async def test_a_slow_gpu_that_is_retried_costs_no_round(make: MakeClient, scenario: Scenario, busy: int) -> None:
    """A GPU that is still too slow when it is asked again, as the last one, stays left out, and the round is answered.

    It makes no difference whether the others were quick or left it less time than a call may take.
    """
    scenario.set({"gpus": 4, f"{GETTER}@3": "hang"})
    client = make()
    assert _codes(await client.round(2 * SHORT)) == [0, 0, 0, "hung"]
    for _ in range(RETRY_EVERY - 1):
        await client.round(SHORT)
    before = workers()
    scenario.set({f"{getter}@3": f"slow:{400 * SHORT:.0f}" for getter in SLOW_GETTERS})
    scenario.set({f"{GETTER}@{index}": f"slow:{busy}" for index in range(3)} | {"temperature": 77})
    retried = await client.round(SHORT)
    assert _codes(retried) == [0, 0, 0, "hung"]
    assert {gpu.temperature for gpu in retried.gpus[:3]} == {77}
    scenario.set({f"{getter}@3": None for getter in SLOW_GETTERS})
    readings = [await client.round(GENEROUS) for _ in range(RETRY_EVERY)]
    assert [_codes(reading)[3] for reading in readings] == ["hung"] * (RETRY_EVERY - 1) + [0]
    assert workers() != before  # it was asked: the worker that waited for it is gone


async def test_all_gpus_hang(make: MakeClient, scenario: Scenario) -> None:
    """What was not reached is shown for one round as it was before, then without any values, until it is asked.

    A GPU that has no entry is neither up nor down.
    """
    client = make()
    first = await client.round(GENEROUS)
    scenario.set({GETTER: "hang"})
    cut = await client.round(SHORT)
    assert cut.gpus[7] == first.gpus[7]
    assert cut.gpus[0].code == "hung"
    later = await client.round(SHORT)
    assert later.count == 8
    assert len(later.gpus) < 8
    assert {(gpu.code, gpu.temperature) for gpu in later.gpus} == {("hung", None)}


async def test_opening_nvml_may_take_long(make: MakeClient, scenario: Scenario) -> None:
    """A slow nvmlInit is waited for over several rounds, always the same one of the same worker."""
    scenario.set(nvmlInit=999)
    client = make()
    await client.round(GENEROUS)  # a warm worker without a session: the short deadline is for the call alone
    before = workers()
    scenario.set(nvmlInit="slow:5000")
    for _ in range(2):
        with pytest.raises(ProbeTimeout) as caught:
            await client.round(SHORT / 2)
        assert (caught.value.where, caught.value.stuck) == ("nvmlInit", False)
        assert workers() == before
    reading = await client.round(GENEROUS)
    assert _codes(reading) == [0] * 8
    assert workers() == before


async def test_patience_with_opening_ends(make: MakeClient, scenario: Scenario) -> None:
    """An nvmlInit that takes longer than it ever may is given up, and the next round has a new worker."""
    scenario.set(nvmlInit="hang")
    client = make(init_patience=1.5 * SHORT)
    with pytest.raises(ProbeTimeout):
        await client.round(SHORT)
    (before,) = workers()
    with pytest.raises(ProbeTimeout):
        await client.round(SHORT)
    assert workers() == []
    scenario.set(nvmlInit=None)
    assert (await client.round(GENEROUS)).code == 0
    assert before not in workers()


async def test_events_that_hang(make: MakeClient, scenario: Scenario) -> None:
    """An event call that never returns hides no GPU; Xids are not seen until it is tried again."""
    client = make()
    await client.round(GENEROUS)
    scenario.set(nvmlEventSetWait="hang")
    for _ in range(2):
        reading = await client.round(SHORT)
        assert _codes(reading) == [0] * 8
        assert (reading.xids_watched, dict(reading.errors)) == (False, {"nvmlEventSetWait": "hung"})
        assert dict(reading.left_out) == {}
    scenario.set(nvmlEventSetWait=None)
    watched = [(await client.round(GENEROUS)).xids_watched for _ in range(RETRY_EVERY - 1)]
    assert watched == [False] * (RETRY_EVERY - 2) + [True]


async def test_a_worker_that_cannot_be_killed_gets_one_other_beside_it(make: MakeClient, scenario: Scenario) -> None:
    """Beside the worker that hangs in GPU 3 one more asks the others and never GPU 3, until the first one is gone.

    Case 4: leptonai/gpud#261.
    """
    isolation = Unkillable()
    client = make(isolation=isolation)
    try:
        await client.round(GENEROUS)
        scenario.set({f"{GETTER}@3": "hang"})
        for _ in range(RETRY_EVERY + 2):
            reading = await client.round(SHORT)
            assert _codes(reading) == [0, 0, 0, "hung", 0, 0, 0, 0]
            assert reading.stuck_workers == 1
        assert len(isolation.started) == 2
        scenario.set({f"{GETTER}@3": None})
        os.killpg(isolation.started[0].pid, signal.SIGKILL)
        await isolation.started[0].wait(GENEROUS)
        reading = await client.round(GENEROUS)
        assert (_codes(reading), reading.stuck_workers) == ([0] * 8, 0)
        assert len(isolation.started) == 2
    finally:
        await client.close()
        await isolation.end()


async def test_two_workers_that_cannot_be_killed_get_no_third(make: MakeClient, scenario: Scenario) -> None:
    """Where the worker beside a stuck one hangs too, nothing is asked any more, and the last call is named."""
    isolation = Unkillable()
    client = make(isolation=isolation)
    try:
        await client.round(GENEROUS)
        scenario.set({f"{GETTER}@3": "hang"})
        await client.round(SHORT)
        scenario.set({f"{GETTER}@5": "hang"})
        reading = await client.round(SHORT)
        assert (_codes(reading)[3], _codes(reading)[5], reading.stuck_workers) == ("hung", "hung", 2)
        for _ in range(2):
            with pytest.raises(ProbeTimeout, match="no more are started") as caught:
                await client.round(SHORT)
            assert (caught.value.where, caught.value.stuck) == (f"{GETTER} on GPU 5", True)
        assert len(isolation.started) == 2
    finally:
        await client.close()
        await isolation.end()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_worker_that_somebody_stops_or_kills(make: MakeClient, number: signal.Signals) -> None:
    """Whatever is done to the worker between rounds, one round fails and the next is answered."""
    client = make()
    await client.round(GENEROUS)
    (pid,) = workers()
    os.kill(pid, number)
    with pytest.raises((ProbeTimeout, ProbeCrash)):
        await client.round(SHORT)
    assert _codes(await client.round(GENEROUS)) == [0] * 8


async def test_closing_while_a_gpu_hangs(make: MakeClient, scenario: Scenario) -> None:
    """Closing in the middle of a call that hangs ends the worker, and starts no other."""
    client = make()
    await client.round(GENEROUS)
    scenario.set({f"{GETTER}@3": "hang"})
    task = asyncio.create_task(client.round(GENEROUS))
    await asyncio.sleep(0.2)
    await client.close()
    assert workers() == []
    with pytest.raises(ProbeCrash):
        await task


async def test_oneshot_leaves_nothing_behind(make: MakeClient, scenario: Scenario) -> None:
    """In one-shot mode no process is left between rounds, and names are remembered all the same."""
    client = make(oneshot=True)
    first = await client.round(GENEROUS)
    assert (workers(), _codes(first), first.xids_watched) == ([], [0] * 8, False)
    scenario.set({"nvmlDeviceGetHandleByIndex@2": 15})
    second = await client.round(GENEROUS)
    assert workers() == []
    assert (second.gpus[2].code, second.gpus[2].uuid) == (15, first.gpus[2].uuid)
    scenario.set({"nvmlDeviceGetHandleByIndex@2": None, f"{GETTER}@3": "hang"})
    for _ in range(2):
        assert _codes(await client.round(2 * SHORT)) == [0, 0, 0, "hung", 0, 0, 0, 0]
        assert workers() == []


async def test_latest(make: MakeClient, scenario: Scenario) -> None:
    """The last reading and its time are kept, also over rounds that were not answered."""
    client = make(monotonic=lambda: 1234.5, init_patience=0)
    assert (client.latest, client.latest_at) == (None, None)
    reading = await client.round(GENEROUS)
    assert client.latest is reading
    assert client.latest_at == 1234.5
    scenario.set(nvmlDeviceGetCount="hang")
    with pytest.raises(ProbeTimeout):
        await client.round(SHORT)
    assert client.latest is reading
