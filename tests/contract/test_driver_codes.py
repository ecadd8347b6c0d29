"""Every NVML return code at every call of a round: a real worker, the compiled fake, the probe, the judge.

The tables below say what each code means where. One client serves all of them: whatever NVML answers, the agent's
side of it lives on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
from msgspec.structs import fields

from sidecar.conditions import Judgement, Memory
from sidecar.conditions import judge as judge_all
from sidecar.config import Settings
from sidecar.model import Answer, Gate, Outcome, Result, Status
from sidecar.nvml.client import NvmlClient
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.probes.driver import PROBE
from sidecar.probes.driver.facts import DriverMemory
from tests.builders import server_probe, view
from tests.fakes.nvml import Scenario
from tests.fakes.nvml.harness import nvml_clients, workers
from tests.gpus import standing

GENEROUS = 30.0
NAMED = sorted(
    value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)
)
CODES = [*NAMED, 4242]
"""Every code that the installed binding names, and one that it does not."""

AT_INIT: Mapping[int, tuple[str, Gate]] = {
    4: ("device-permission", Gate.LAUNCH),
    9: ("driver-not-loaded", Gate.SERVING),
    12: ("nvml-library-missing", Gate.LAUNCH),
    17: ("driver-blocked", Gate.LAUNCH),
    18: ("driver-library-mismatch", Gate.LAUNCH),
}
"""What a code means where NVML is opened or asked for the number of GPUs, on a host; all others are this:"""
AT_INIT_ELSE = ("nvml-init-failed", Gate.LAUNCH)
NOT_THERE = {2, 3, 13, 22, 25, 26}
"""Codes by which a getter says that the GPU or its driver does not have such a thing."""

GETTERS: Mapping[str, tuple[set[str], set[str]]] = {
    # call: (fields that it fills, conditions that it decides)
    "nvmlDeviceGetUUID": (set(), set()),  # remembered from before
    "nvmlDeviceGetName": ({"name"}, set()),
    "nvmlDeviceGetCudaComputeCapability": ({"compute_capability"}, set()),
    "nvmlDeviceGetPciInfo": ({"pci_bus_id"}, set()),
    "nvmlDeviceGetMigMode": ({"mig"}, {"mig-unexpected"}),
    "nvmlDeviceGetMemoryInfo": ({"memory_used", "memory_total"}, set()),
    "nvmlDeviceGetTemperature": ({"temperature"}, set()),
    "nvmlDeviceGetPowerUsage": ({"power"}, set()),
    "nvmlDeviceGetUtilizationRates": ({"utilization"}, set()),
    "nvmlDeviceGetTotalEccErrors": ({"ecc_corrected", "ecc_uncorrected"}, {"ecc-uncorrected"}),
    "nvmlDeviceGetRemappedRows": ({"remapped_rows"}, {"row-remap-failed", "row-remap-pending"}),
    "nvmlDeviceGetFieldValues": ({"recovery_action"}, {"gpu-recovery-required"}),
    "nvmlDeviceGetCurrentClocksEventReasons": ({"clock_events"}, {"thermal-slowdown"}),
    "nvmlDeviceGetCurrPcieLinkGeneration": ({"pcie"}, {"pcie-degraded"}),
    "nvmlDeviceGetCurrPcieLinkWidth": ({"pcie"}, {"pcie-degraded"}),
    "nvmlDeviceGetMaxPcieLinkGeneration": ({"pcie"}, {"pcie-degraded"}),
    "nvmlDeviceGetMaxPcieLinkWidth": ({"pcie"}, {"pcie-degraded"}),
    "nvmlDeviceGetNvLinkState": ({"nvlinks", "nvlinks_active"}, {"nvlink-down"}),
    "nvmlDeviceGetGpuFabricInfo": ({"fabric"}, {"fabric-not-ready"}),
    "nvmlDeviceGetVirtualizationMode": (set(), {"vgpu-unlicensed"}),
    "nvmlDeviceRegisterEvents": (set(), {"xid-critical", "xid-warning"}),
}
OLDER_NAMES = {"nvmlDeviceGetCurrentClocksEventReasons": ("nvmlDeviceGetCurrentClocksThrottleReasons",)}
"""What is asked instead where a call does not exist."""
SYSTEM = ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion")
EVENTS = ("nvmlEventSetCreate", "nvmlEventSetWait")
XIDS = {"xid-critical", "xid-warning"}


@pytest.fixture(name="library")
def _library(fake_library: Path) -> Path:
    return fake_library


class Bench:
    """A client whose every reading comes from a new session, and what it gives when nothing fails."""

    def __init__(self, client: NvmlClient, scenario: Scenario) -> None:
        self.client = client
        self.scenario = scenario
        self.baseline: NvmlReading | None = None

    async def round(self, line: Mapping[str, int]) -> NvmlReading:
        """Read with one line added to the scenario. A round without GPUs before it ends the session: some facts
        are asked for once a session only."""  # noqa: D205, D209 - one thought
        self.scenario.set(gpus=0)
        await self.client.round(GENEROUS)
        self.scenario.set({"gpus": 2, **line})
        try:
            return await self.client.round(GENEROUS)
        finally:
            self.scenario.set(dict.fromkeys(line))


@pytest.fixture(name="bench")
async def _bench(library: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    scenario = Scenario(tmp_path / "scenario", gpus=2)
    async with nvml_clients(library, scenario, tmp_path) as make:
        bench = Bench(make(slow_every=0.0), scenario)
        bench.baseline = await bench.round({})
        yield bench
        assert len(workers()) == 1


def judged(reading: NvmlReading, *, known: bool, answer: Answer = Answer.REFUSED) -> Judgement:
    """Judge the first round of an agent on a host whose server has GPU 0."""
    settings = Settings(gpus=("0",) if known else ())
    facts = DriverMemory().fold(reading, settings, standing(), 1000.0)
    results: dict[str, Result[Any]] = {
        "driver": Result(probe="driver", outcome=Outcome.OK, facts=facts, rounds=1),
        "server": Result(probe="server", outcome=Outcome.OK, facts={"view": view(answer)}, rounds=1),
    }
    judgement = judge_all(
        [PROBE, server_probe()],
        results,
        standing=standing(),
        settings=settings,
        required=(),
        memory=Memory(),
        now=1001.0,
    )
    assert judgement.faults == ()
    return judgement


def active(judgement: Judgement) -> list[str]:
    return [code for code, condition in judgement.conditions.items() if condition.active]


def unknown(judgement: Judgement) -> set[str]:
    return {code for code, condition in judgement.conditions.items() if condition.status is Status.UNKNOWN}


def differing(one: GpuReading, other: GpuReading) -> set[str]:
    names = {field.name for field in fields(GpuReading)} - {"errors", "words"}
    return {name for name in names if getattr(one, name) != getattr(other, name)}


def only(judgement: Judgement, code: str, gate: Gate) -> None:
    """Exactly this is wrong, and it gates as it should: serving always, launch while nobody answers."""
    assert active(judgement) == [code]
    assert judgement.conditions[code].gate is gate
    gates = gate is Gate.SERVING or (gate is Gate.LAUNCH and judgement.server.answer is Answer.REFUSED)
    assert judgement.verdict.blockers == ((code,) if gates else ())


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
async def test_codes_where_nvml_is_opened(bench: Bench, call: str) -> None:
    """Each code at init and at the count is its own condition with its own gate, and no GPU is called broken.

    Cases 1, 2, 8: illinois-scicomp/machine-shop-maintenance#70, NVIDIA/nvidia-docker#1671, pytorch/pytorch#88363.
    """
    for code in CODES:
        reading = await bench.round({call: code})
        assert (reading.code, reading.call, reading.gpus) == (code, call, ())
        for answer in (Answer.REFUSED, Answer.ACCEPTED):
            only(judged(reading, known=True, answer=answer), *AT_INIT.get(code, AT_INIT_ELSE))
        if code != 12:  # by which the binding says that there is no library to ask
            assert reading.nvml_version == "13.580.159.04"


@pytest.mark.parametrize("call", SYSTEM)
async def test_codes_of_a_version(bench: Bench, call: str) -> None:
    """A version that is not told costs that version only, whatever the code."""
    for code in CODES:
        reading = await bench.round({call: code})
        versions = (reading.driver_version, reading.nvml_version, reading.cuda_driver_version)
        assert [version is None for version in versions] == [name == call for name in SYSTEM]
        judgement = judged(reading, known=True)
        assert (active(judgement), unknown(judgement)) == ([], set())


async def test_codes_of_a_handle(bench: Bench) -> None:
    """A GPU that cannot be addressed is lost (15) or unreachable, and the other one is read completely.

    One that this process may not open (4) is unknown: NVML lists such devices too.

    Case 3: NVIDIA/open-gpu-kernel-modules#507, pop-os/pop#3363.
    """
    assert bench.baseline is not None
    for code in CODES:
        reading = await bench.round({"nvmlDeviceGetHandleByIndex@0": code})
        assert differing(reading.gpus[1], bench.baseline.gpus[1]) == set()
        judgement = judged(reading, known=True)
        if code == 4:
            for each in (judgement, judged(reading, known=False)):
                assert (active(each), each.verdict.blockers) == ([], ())
                assert each.conditions["gpu-lost"].status is Status.UNKNOWN
                assert each.conditions["gpu-lost"].reason == "no-permission"
            continue
        only(judgement, "gpu-lost", Gate.SERVING)
        assert judgement.conditions["gpu-lost"].reason == ("lost" if code == 15 else "unreachable")
        assert judgement.conditions["gpu-lost"].gpus == (("0", bench.baseline.gpus[0].uuid),)
        only(judged(reading, known=False), "gpu-lost", Gate.NEVER)


@pytest.mark.parametrize("call", GETTERS)
async def test_codes_of_a_getter(bench: Bench, call: str) -> None:
    """A value that is refused costs that value; 15 from whichever call means that the GPU is lost.

    Cases 5 and 7: leptonai/gpud#987, NVIDIA/nvidia-container-toolkit#842, Syllo/nvtop#256.
    """
    assert bench.baseline is not None
    filled, decided = GETTERS[call]
    for code in CODES:
        reading = await bench.round({f"{name}@0": code for name in (call, *OLDER_NAMES.get(call, ()))})
        judgement = judged(reading, known=True)
        assert differing(reading.gpus[1], bench.baseline.gpus[1]) == set()
        if code == 15 and call != "nvmlDeviceRegisterEvents":
            only(judgement, "gpu-lost", Gate.SERVING)
            continue
        assert differing(reading.gpus[0], bench.baseline.gpus[0]) == filled, code
        assert active(judgement) == []
        missing = code not in NOT_THERE or call == "nvmlDeviceRegisterEvents"
        assert unknown(judgement) == (decided if missing else set()), code
        assert judgement.verdict.blockers == ()


@pytest.mark.parametrize("call", EVENTS)
async def test_codes_of_the_events(bench: Bench, call: str) -> None:
    """Where events cannot be had the Xids are unknown and all values are there; 10 means that there was none."""
    assert bench.baseline is not None
    for code in CODES:
        reading = await bench.round({call: code})
        for gpu, before in zip(reading.gpus, bench.baseline.gpus, strict=True):
            assert differing(gpu, before) == set()
        judgement = judged(reading, known=True)
        assert active(judgement) == []
        nothing_happened = code == 10 and call == "nvmlEventSetWait"
        assert unknown(judgement) == (set() if nothing_happened else XIDS), code


def test_every_code_is_tried_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """The tables cover every code that the binding names; the number of combinations is printed."""
    assert {4, 9, 12, 15, 17, 18, 999} <= set(NAMED)
    assert len(CODES) == len(set(CODES))
    places = 2 + len(SYSTEM) + 1 + len(GETTERS) + len(EVENTS)
    with capsys.disabled():
        print(f"\n{len(CODES)} return codes x {places} calls = {len(CODES) * places} combinations")  # noqa: T201 - asked for
