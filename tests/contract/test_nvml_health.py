"""What a round finds out about the health of each GPU: every field, every way in which a call can fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pynvml
import pytest
from msgspec.structs import replace

from sidecar.nvml.reading import GpuReading, MigDevice, PcieLink, RemappedRows
from tests.fakes.nvml import Scenario, build
from tests.fakes.nvml.harness import MakeClient, nvml_clients

CAPTURE = json.loads((Path(__file__).parents[1] / "captures/nvml/h200x2.json").read_text())
GENEROUS = 30.0
"""Seconds for rounds that are expected to be answered."""
CODES = sorted(
    {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)}
    | {4242}
)
"""Every return code that the binding names, and one that it does not."""
NOT_SUPPORTED, LOST = 3, 15
LOUD = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetMigMode": "mig",
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetPowerUsage": "power",
    "nvmlDeviceGetUtilizationRates": "utilization",
}
"""Getters of what every GPU has: "not supported" is worth telling."""
QUIET = {
    "nvmlDeviceGetPciInfo": "pci_bus_id",
    "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetRemappedRows": "remapped_rows",
    "nvmlDeviceGetFieldValues": "recovery_action",
    "nvmlDeviceGetCurrentClocksEventReasons": "clock_events",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie.generation",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie.generation_max",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie.width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie.width_max",
    "nvmlDeviceGetNvLinkState": "nvlinks",
    "nvmlDeviceGetGpuFabricInfo": "fabric",
    "nvmlDeviceGetVirtualizationMode": None,
}
"""Getters of what some GPUs do not have: "not supported" is no error."""
ASKED_ONCE = {
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetVirtualizationMode",
}
EVENT_CALLS = ("nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait")


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


# -- values -------------------------------------------------------------------------------------------


async def test_health_of_the_recorded_machine(make: MakeClient) -> None:
    """Every health field comes out equal to what was recorded on two H200."""
    reading = await make().round(GENEROUS)
    for gpu, recorded in zip(reading.gpus, CAPTURE["devices"], strict=True):
        assert gpu.pci_bus_id == recorded["nvmlDeviceGetPciInfo"]["value"]["busId"]
        assert gpu.ecc_corrected == recorded["nvmlDeviceGetTotalEccErrors"]["[0, 0]"]["value"]
        assert gpu.ecc_uncorrected == recorded["nvmlDeviceGetTotalEccErrors"]["[1, 0]"]["value"]
        assert recorded["nvmlDeviceGetRemappedRows"]["value"] == [0, 0, 0, 0]
        assert gpu.remapped_rows == RemappedRows(correctable=0, uncorrectable=0, pending=False, failed=False)
        assert recorded["_field_values"]["NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"]["value"] == 0
        assert gpu.recovery_action == "none"
        assert recorded["nvmlDeviceGetCurrentClocksEventReasons"]["value"] == pynvml.nvmlClocksEventReasonGpuIdle
        assert gpu.clock_events == frozenset()
        assert gpu.pcie == PcieLink(
            generation=recorded["nvmlDeviceGetCurrPcieLinkGeneration"]["value"],
            generation_max=recorded["nvmlDeviceGetMaxPcieLinkGeneration"]["value"],
            width=recorded["nvmlDeviceGetCurrPcieLinkWidth"]["value"],
            width_max=recorded["nvmlDeviceGetMaxPcieLinkWidth"]["value"],
        )
        assert recorded["nvmlDeviceGetGpuFabricInfoV"]["value"] == {"state": 3, "status": 0}
        assert gpu.fabric == "completed"
        links = recorded["nvmlDeviceGetNvLinkState"].values()
        assert (gpu.nvlinks, gpu.nvlinks_active) == (len(links), sum(link["value"] for link in links))
        assert recorded["nvmlDeviceGetVirtualizationMode"]["value"] == pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH
        assert (gpu.licensed, gpu.mig_devices) == (None, None)
    assert recorded["_events"]["register"] == "ok"
    assert (reading.xids_watched, reading.xids) == (True, ())


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("h200", ("NVIDIA H200", "9.0", 150754820096, 5, 18, 0, "completed")),
        ("h100", ("NVIDIA H100 80GB HBM3", "9.0", 85520809984, 5, 18, 0, "completed")),
        ("a100", ("NVIDIA A100-SXM4-80GB", "8.0", 85899345920, 4, 12, 0, None)),
        ("b200", ("NVIDIA B200", "10.0", 192265846784, 5, 18, 0, "completed")),
        ("rtx4090", ("NVIDIA GeForce RTX 4090", "8.9", 25757220864, 4, None, None, None)),
    ],
)
async def test_models(make: MakeClient, scenario: Scenario, profile: str, expected: tuple[object, ...]) -> None:
    """What a model has is read, and what it does not have is absent; that is no error but for the MIG mode."""
    scenario.set(gpus=16, profile=profile)
    reading = await make().round(GENEROUS)
    assert len(reading.gpus) == 16
    gpu = reading.gpus[15]
    assert gpu.pcie is not None
    assert expected == (
        gpu.name,
        gpu.compute_capability,
        gpu.memory_total,
        gpu.pcie.generation,
        gpu.nvlinks,
        gpu.ecc_uncorrected,
        gpu.fabric,
    )
    assert (gpu.remapped_rows is None) == (gpu.ecc_uncorrected is None)
    assert gpu.errors == ({"nvmlDeviceGetMigMode": NOT_SUPPORTED} if profile == "rtx4090" else {})


async def test_trouble_is_read(make: MakeClient, scenario: Scenario) -> None:
    """Each sign of trouble arrives in its own field, on its own GPU (case 5: leptonai/gpud#80, case 6)."""
    trouble = {
        "ecc_corrected": 5,
        "ecc_uncorrected": 2,
        "remapped_correctable": 3,
        "remapped_uncorrectable": 1,
        "remap_pending": 1,
        "remap_failed": 1,
        "recovery_action": pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET,
        "clocks_event_reasons": 0xFD,
        "pcie_generation": 1,
        "pcie_width": 4,
        "fabric_state": pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS,
    }
    scenario.set({f"{key}@1": value for key, value in trouble.items()})
    fine, gpu = (await make().round(GENEROUS)).gpus
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (5, 2)
    assert gpu.remapped_rows == RemappedRows(correctable=3, uncorrectable=1, pending=True, failed=True)
    assert gpu.recovery_action == "reset"
    assert gpu.clock_events == {
        "sw_power_cap",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    }
    assert gpu.pcie == PcieLink(generation=1, generation_max=5, width=4, width_max=16)
    assert (gpu.fabric, dict(gpu.errors)) == ("in-progress", {})
    assert (fine.ecc_uncorrected, fine.recovery_action, fine.clock_events) == (0, "none", frozenset())


@pytest.mark.parametrize(
    ("number", "token"),
    [
        (pynvml.NVML_GPU_RECOVERY_ACTION_NONE, "none"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, "reset"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT, "reboot"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, "drain-p2p"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET, "drain-reset"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT, "system-reboot"),
        (99, "other"),
    ],
)
async def test_recovery_actions(make: MakeClient, scenario: Scenario, number: int, token: str) -> None:
    """Each of NVML's recovery actions has its token, and one that is new is not taken for none."""
    scenario.set(recovery_action=number)
    assert (await make().round(GENEROUS)).gpus[0].recovery_action == token


@pytest.mark.parametrize(
    ("code", "errors"),
    [(3, {}), (2, {}), (999, {"nvmlDeviceGetFieldValues": 999}), (4, {"nvmlDeviceGetFieldValues": 4})],
)
async def test_recovery_action_refused(make: MakeClient, scenario: Scenario, code: int, errors: dict[str, int]) -> None:
    """A driver that does not know the field has no such value; another code in the field is an error."""
    scenario.set(recovery_action_code=code)
    gpu = (await make().round(GENEROUS)).gpus[0]
    assert (gpu.code, gpu.recovery_action, dict(gpu.errors)) == (0, None, errors)


@pytest.mark.parametrize(
    ("state", "status", "token"),
    [(0, 0, "not-supported"), (1, 0, "not-started"), (2, 0, "in-progress"), (3, 0, "completed"), (3, 999, "failed"),
     (9, 0, None)],
)  # fmt: skip
async def test_fabric_states(make: MakeClient, scenario: Scenario, state: int, status: int, token: str | None) -> None:
    """Each state of the fabric registration has its token; completed with an error is failed."""
    scenario.set(fabric_state=state, fabric_status=status)
    assert (await make().round(GENEROUS)).gpus[0].fabric == token


async def test_links_that_went_down(make: MakeClient, scenario: Scenario) -> None:
    """A link that was up is still expected after it went down, also by the next worker."""
    scenario.set(fabric_state=0)
    client = make()
    await client.round(GENEROUS)
    scenario.set({"nvlinks_down@1": 3})
    assert [(gpu.nvlinks_active, gpu.nvlinks) for gpu in (await client.round(GENEROUS)).gpus] == [(18, 18), (15, 18)]
    scenario.set(driver_generation=1)
    await client.round(GENEROUS)
    assert [(gpu.nvlinks_active, gpu.nvlinks) for gpu in (await client.round(GENEROUS)).gpus] == [(18, 18), (15, 18)]


@pytest.mark.parametrize(
    ("down", "fabric", "expected"), [(18, 0, (0, 0)), (14, 0, (4, 4)), (18, 3, (0, 18)), (3, 3, (15, 18))]
)
async def test_links_that_never_were_up(
    make: MakeClient, scenario: Scenario, down: int, fabric: int, expected: tuple[int, int]
) -> None:
    """Links without a peer, as on a GPU without bridge, are not down; in a fabric every link counts, also at first."""
    scenario.set(nvlinks_down=down, fabric_state=fabric)
    gpu = (await make().round(GENEROUS)).gpus[0]
    assert (gpu.nvlinks_active, gpu.nvlinks) == expected


async def test_mig_devices(make: MakeClient, scenario: Scenario) -> None:
    """MIG devices are listed with uuid and name, and no longer once the mode is off."""
    scenario.set({"mig@0": 1, "mig_devices@0": 2})
    client = make()
    gpu, other = (await client.round(GENEROUS)).gpus
    assert gpu.mig_devices == (
        MigDevice(uuid="MIG-00000000-0000-4000-8000-000000000001", name="NVIDIA H200 MIG 1g.18gb"),
        MigDevice(uuid="MIG-00000000-0000-4000-8000-000000000002", name="NVIDIA H200 MIG 1g.18gb"),
    )
    assert (other.mig, other.mig_devices) == (False, None)
    scenario.set({"mig@0": 0})
    gpu = (await client.round(GENEROUS)).gpus[0]
    assert (gpu.mig, gpu.mig_devices) == (False, None)


async def test_mig_mode_without_devices(make: MakeClient, scenario: Scenario) -> None:
    """A GPU in MIG mode that was not divided has no devices, which is not the same as not knowing them."""
    scenario.set({"mig": 1, "nvmlDeviceGetMaxMigDeviceCount@1": 999})
    none, unknown = (await make().round(GENEROUS)).gpus
    assert (none.mig_devices, dict(none.errors)) == ((), {})
    assert (unknown.mig_devices, dict(unknown.errors)) == (None, {"nvmlDeviceGetMaxMigDeviceCount": 999})


@pytest.mark.parametrize(
    ("mode", "licensed"),
    [
        (pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE, None),
        (pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH, None),
        (pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU, False),
        (pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU, None),
    ],
)
async def test_licence(make: MakeClient, scenario: Scenario, mode: int, licensed: bool | None) -> None:
    """Only a vGPU in a guest needs a licence (case 11: NVIDIA/gpu-operator#628)."""
    scenario.set(virtualization=mode, licensed=0)
    assert (await make().round(GENEROUS)).gpus[0].licensed is licensed


# -- what is asked when -----------------------------------------------------------------------------------


async def test_static_facts_are_asked_once(make: MakeClient, scenario: Scenario) -> None:
    """What never changes is asked once per GPU and session, and shown in every round."""
    scenario.set(dict.fromkeys(ASKED_ONCE, "after:1:999"))
    client = make()
    first = await client.round(GENEROUS)
    second = await client.round(GENEROUS)
    assert second.gpus == first.gpus
    assert [dict(gpu.errors) for gpu in second.gpus] == [{}, {}]


async def test_facts_of_a_dead_gpu_are_dropped(make: MakeClient, scenario: Scenario) -> None:
    """A GPU that comes back is asked anew what it is."""
    client = make()
    await client.round(GENEROUS)
    scenario.set({"nvmlDeviceGetHandleByIndex@1": 999})
    assert (await client.round(GENEROUS)).gpus[1].name is None
    scenario.set({"nvmlDeviceGetHandleByIndex@1": None, "name@1": "NVIDIA H200 NVL"})
    assert [gpu.name for gpu in (await client.round(GENEROUS)).gpus] == ["NVIDIA H200", "NVIDIA H200 NVL"]


async def test_slow_facts_are_kept_meanwhile(make: MakeClient, scenario: Scenario) -> None:
    """Rare facts are shown from the last time they were asked until it is time to ask again."""
    scenario.set(virtualization=2, licensed=1, mig=1, mig_devices=1)
    kept, renewed = make(), make(slow_every=0)
    for client in (kept, renewed):
        await client.round(GENEROUS)
    scenario.set(licensed=0, mig_devices=2)
    gpu = (await kept.round(GENEROUS)).gpus[0]
    assert (gpu.licensed, len(gpu.mig_devices or ())) == (True, 1)
    gpu = (await renewed.round(GENEROUS)).gpus[0]
    assert (gpu.licensed, len(gpu.mig_devices or ())) == (False, 2)


async def test_a_slow_fact_that_failed_is_asked_again(make: MakeClient, scenario: Scenario) -> None:
    """A failure is not kept for the slow interval: each round shows it, and the first success ends it."""
    scenario.set(virtualization=2, nvmlDeviceGetGridLicensableFeatures="until:2:999")
    client = make()
    seen = [(await client.round(GENEROUS)).gpus[0] for _ in range(3)]
    failed = {"nvmlDeviceGetGridLicensableFeatures": 999}
    assert [(gpu.licensed, dict(gpu.errors)) for gpu in seen] == [(None, failed), (None, failed), (True, {})]


# -- failures -------------------------------------------------------------------------------------------


def _without(gpu: GpuReading, field: str | None) -> GpuReading:
    """The same reading if the getter of ``field`` had not answered."""
    pcie = gpu.pcie
    assert pcie is not None
    match field:
        case "memory":
            return replace(gpu, memory_used=None, memory_total=None)
        case "ecc":
            return replace(gpu, ecc_corrected=None, ecc_uncorrected=None)
        case "nvlinks":
            return replace(gpu, nvlinks=None, nvlinks_active=None)
        case "uuid" | None:  # a uuid once seen is remembered
            return gpu
        case _ if field.startswith("pcie."):
            return replace(gpu, pcie=replace(pcie, **{field.removeprefix("pcie."): None}))
        case _:
            return replace(gpu, **{field: None})


def _expected(healthy: GpuReading, call: str, code: int) -> GpuReading:
    if call == "nvmlDeviceGetCurrentClocksEventReasons" and code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        return healthy  # answered by the call's older name
    errors = {call: code}
    if call in QUIET and code == NOT_SUPPORTED:
        errors = {}
    if call == "nvmlDeviceGetNvLinkState" and code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        errors = {}  # there is no link of that number
    return replace(_without(healthy, (LOUD | QUIET)[call]), errors=errors)


@pytest.mark.parametrize("call", [*LOUD, *QUIET])
async def test_a_getter_fails_alone(make: MakeClient, scenario: Scenario, call: str) -> None:
    """Whatever code a getter answers, it costs its own field on its own GPU; 15 means that the GPU is lost."""
    client = make()
    healthy = (await client.round(GENEROUS)).gpus
    for number, code in enumerate(CODES, start=1):
        scenario.set({f"{call}@1": code, "driver_generation": number})
        assert (await client.round(GENEROUS)).code == 999  # ends the session: static facts are asked once in each
        reading = await client.round(GENEROUS)
        assert (reading.code, reading.count, dict(reading.errors)) == (0, 2, {}), code
        assert reading.gpus[0] == healthy[0], code
        if code == LOST:
            assert (reading.gpus[1].code, reading.gpus[1].uuid) == (LOST, healthy[1].uuid)
        else:
            assert reading.gpus[1] == _expected(healthy[1], call, code), code


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
async def test_a_system_call_fails(make: MakeClient, scenario: Scenario, call: str) -> None:
    """Whatever code opening or counting answers is the reading's code, and the round after recovers."""
    client = make()
    for number, code in enumerate(CODES, start=1):
        scenario.set({call: code, "driver_generation": number})
        await client.round(GENEROUS)
        reading = await client.round(GENEROUS)
        assert (reading.code, reading.call, reading.gpus, reading.xids_watched) == (code, call, (), None)
        scenario.set({call: None})
        reading = await client.round(GENEROUS)
        assert (reading.code, len(reading.gpus), reading.xids_watched) == (0, 2, True), code


async def test_a_handle_fails(make: MakeClient, scenario: Scenario) -> None:
    """Whatever code a handle answers is that GPU's code and hides no other GPU."""
    client = make()
    healthy = (await client.round(GENEROUS)).gpus
    for code in CODES:
        scenario.set({"nvmlDeviceGetHandleByIndex@1": code})
        reading = await client.round(GENEROUS)
        assert (reading.code, reading.gpus[0]) == (0, healthy[0])
        assert (reading.gpus[1].code, reading.gpus[1].uuid) == (code, healthy[1].uuid)


@pytest.mark.parametrize("call", EVENT_CALLS)
async def test_an_event_call_fails(make: MakeClient, scenario: Scenario, call: str) -> None:
    """Whatever code an event call answers, it tells that Xids are not seen, and hides no GPU."""
    client = make()
    healthy = (await client.round(GENEROUS)).gpus
    for number, code in enumerate(CODES, start=1):
        scenario.set({call: code, "driver_generation": number})
        await client.round(GENEROUS)
        reading = await client.round(GENEROUS)
        quiet_end = call == "nvmlEventSetWait" and code == pynvml.NVML_ERROR_TIMEOUT
        assert reading.xids_watched is quiet_end, code
        of_gpu = {call: code} if call == "nvmlDeviceRegisterEvents" else {}
        assert dict(reading.errors) == ({} if of_gpu or quiet_end else {call: code})
        assert [replace(gpu, errors={}) for gpu in reading.gpus] == list(healthy)
        assert [dict(gpu.errors) for gpu in reading.gpus] == [of_gpu, of_gpu]


NEW_CALLS = [call for call in QUIET if call != "nvmlDeviceGetCurrentClocksEventReasons"]


@pytest.mark.parametrize("call", [*NEW_CALLS, *EVENT_CALLS])
async def test_a_driver_that_lacks_a_call(make: MakeClient, tmp_path: Path, call: str) -> None:
    """A library without a function costs what only that function tells, and no more."""
    reading = await make().round(GENEROUS)
    names = [call, f"{call}_v2", f"{call}_v3", f"{call}V"]
    old = await make(library=build(tmp_path / "old", "470.57.02", omit=names)).round(GENEROUS)
    field = QUIET.get(call)
    assert [replace(gpu, errors={}) for gpu in old.gpus] == [_without(gpu, field) for gpu in reading.gpus]
    found = {**old.errors, **old.gpus[0].errors}
    assert found == {call: 13}
    assert old.xids_watched is (call not in EVENT_CALLS)


async def test_older_forms_of_calls(make: MakeClient, tmp_path: Path, scenario: Scenario) -> None:
    """Fabric state and clock events of an older driver come from the older forms of the calls."""
    scenario.set(fabric_state=3, clocks_event_reasons=0x40)
    omit = ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetCurrentClocksEventReasons"]
    gpu = (await make(library=build(tmp_path / "old", omit=omit)).round(GENEROUS)).gpus[0]
    assert (gpu.fabric, gpu.clock_events, dict(gpu.errors)) == ("completed", {"hw_thermal_slowdown"}, {})


# -- Xid events -----------------------------------------------------------------------------------------


async def test_xids_are_counted(make: MakeClient, scenario: Scenario) -> None:
    """Each Xid is counted for its GPU with the time it was last seen, and is not counted twice."""
    clock = iter(range(1000, 2000))
    client = make(now=lambda: float(next(clock)))
    scenario.set(gpus=4)
    await client.round(GENEROUS)
    scenario.set({"xid@3": "79", "xid@1": "31,31", "xid_sequence": 1})
    reading = await client.round(GENEROUS)
    found = {(xid.index, xid.xid): (xid.uuid, xid.count) for xid in reading.xids}
    assert found == {(1, 31): (reading.gpus[1].uuid, 2), (3, 79): (reading.gpus[3].uuid, 1)}
    assert (await client.round(GENEROUS)).xids == reading.xids
    scenario.set({"xid@1": None, "xid_sequence": 2})
    later = {xid.xid: xid for xid in (await client.round(GENEROUS)).xids}
    earlier = {xid.xid: xid for xid in reading.xids}
    assert (later[79].count, later[31]) == (2, earlier[31])
    assert later[79].last > earlier[79].last


async def test_xids_follow_their_gpu(make: MakeClient, scenario: Scenario) -> None:
    """When the driver renumbers, what was counted moves with its GPU and goes on; one that is gone keeps its index."""
    uuids = [f"GPU-00000000-0000-4000-8000-{number:012d}" for number in range(4)]
    scenario.set({"gpus": 4} | {f"uuid@{index}": uuid for index, uuid in enumerate(uuids)})
    client = make()
    await client.round(GENEROUS)
    scenario.set({"xid@1": "13", "xid@3": "79,31", "xid_sequence": 1})
    await client.round(GENEROUS)
    scenario.set({"gpus": 3, "uuid@1": uuids[2], "uuid@2": uuids[3], "xid@1": None, "xid@3": None})
    scenario.set(driver_generation=1)
    await client.round(GENEROUS)  # ends the session
    found = {(one.uuid, one.xid): (one.index, one.count) for one in (await client.round(GENEROUS)).xids}
    assert found == {(uuids[1], 13): (1, 1), (uuids[3], 79): (2, 1), (uuids[3], 31): (2, 1)}
    scenario.set({"xid@2": 79, "xid_sequence": 2})
    found = {(one.uuid, one.xid): (one.index, one.count) for one in (await client.round(GENEROUS)).xids}
    assert found == {(uuids[1], 13): (1, 1), (uuids[3], 79): (2, 2), (uuids[3], 31): (2, 1)}


async def test_xids_outlive_the_worker(make: MakeClient, scenario: Scenario) -> None:
    """What was counted stays over a session that died and a worker that was replaced."""
    client = make()
    await client.round(GENEROUS)
    scenario.set({"xid@0": 48, "xid_sequence": 1})
    assert [xid.count for xid in (await client.round(GENEROUS)).xids] == [1]
    scenario.set(driver_generation=1)
    assert [xid.count for xid in (await client.round(GENEROUS)).xids] == [1]
    scenario.set(xid_sequence=2)  # nobody listens now
    await client.round(GENEROUS)
    await client.close()
    await client.round(GENEROUS)
    scenario.set(xid_sequence=3)
    assert [(xid.xid, xid.count) for xid in (await client.round(GENEROUS)).xids] == [(48, 2)]


async def test_xid_of_a_lost_gpu(make: MakeClient, scenario: Scenario) -> None:
    """The last event of a GPU that fell off the bus is its own, although it answers nothing any more.

    Case 3: NVIDIA/open-gpu-kernel-modules#507.
    """
    client = make()
    first = await client.round(GENEROUS)
    scenario.set({"xid@1": 79, "xid_sequence": 1, "nvmlDeviceGetHandleByIndex@1": 15, "nvmlDeviceGetUUID@1": 15})
    reading = await client.round(GENEROUS)
    assert [(xid.index, xid.uuid, xid.xid) for xid in reading.xids] == [(1, first.gpus[1].uuid, 79)]
    assert reading.xids_watched is True


async def test_events_come_back_after_a_failed_wait(make: MakeClient, scenario: Scenario) -> None:
    """A wait that failed costs one round: the next one listens anew."""
    client = make()
    await client.round(GENEROUS)
    scenario.set(nvmlEventSetWait=15)
    assert (await client.round(GENEROUS)).xids_watched is False
    scenario.set(nvmlEventSetWait=None)
    assert (await client.round(GENEROUS)).xids_watched is True
    scenario.set({"xid@1": 94, "xid_sequence": 1})
    assert [xid.xid for xid in (await client.round(GENEROUS)).xids] == [94]


async def test_one_gpu_without_events(make: MakeClient, scenario: Scenario) -> None:
    """A GPU that refuses to register says so itself; the others are listened to."""
    scenario.set({"nvmlDeviceRegisterEvents@0": NOT_SUPPORTED})
    client = make()
    reading = await client.round(GENEROUS)
    assert [dict(gpu.errors) for gpu in reading.gpus] == [{"nvmlDeviceRegisterEvents": NOT_SUPPORTED}, {}]
    scenario.set({"xid@1": 13, "xid_sequence": 1})
    reading = await client.round(GENEROUS)
    assert (reading.xids_watched, [xid.xid for xid in reading.xids]) == (True, [13])
