"""The driver probe on single GPUs: every condition as a table, whose GPU it is, and what happens over rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.conditions import Memory
from sidecar.conditions import judge as judge_all
from sidecar.config import Settings
from sidecar.drift import compare, expectation
from sidecar.gpuset import CountSource, Expected, GpuSource, Member
from sidecar.model import (
    Condition,
    Drift,
    Finding,
    Gate,
    Observed,
    Outcome,
    Placement,
    Result,
    ServerView,
    Severity,
    Status,
    World,
)
from sidecar.nvml.reading import GpuReading, MigDevice, PcieLink, RemappedRows, XidCount
from sidecar.probes.driver import CONDITIONS, PROBE, health, presence
from sidecar.probes.driver.facts import DriverFacts, DriverMemory, Trend
from sidecar.probes.driver.xids import XIDS, XidClass, explain
from tests.gpus import ROWS, changed, facts, gpu, known, reading, rounds, silent, standing, target

NOW = 100_000.0
CODES = {kind.code: kind for kind in CONDITIONS}
GPU_CODES = {kind.code for kind in (*presence.CONDITIONS, *health.CONDITIONS)}
MINE = known("GPU-0", "GPU-1")
HOST, CONTAINER = Placement.HOST, Placement.CONTAINER


def judged(
    one: DriverFacts, placement: Placement = HOST, now: float = NOW, *, drifts: tuple[Drift, ...] = ()
) -> Mapping[str, Finding]:
    result: Result[DriverFacts] = Result(probe="driver", outcome=Outcome.OK, facts=one)
    world = World(standing=standing(placement), server=ServerView(), now=now, settings=Settings(), drifts=drifts)
    found = {finding.code: finding for finding in PROBE.judge(result, world)}
    assert set(found) == set(CODES)
    for finding in found.values():
        if finding.status is not Status.FALSE:
            assert finding.reason in CODES[finding.code].reasons
            assert finding.message.endswith(".")
    return found


def active(one: DriverFacts, placement: Placement = HOST, now: float = NOW) -> dict[str, str | None]:
    found = judged(one, placement, now)
    return {code: finding.reason for code, finding in found.items() if finding.status is Status.TRUE}


def unknown(one: DriverFacts, placement: Placement = HOST) -> dict[str, str | None]:
    found = judged(one, placement)
    return {code: finding.reason for code, finding in found.items() if finding.status is Status.UNKNOWN}


def conditions(one: DriverFacts) -> Mapping[str, Condition]:
    """What is published after causes have suppressed their consequences."""
    result: Result[Any] = Result(probe="driver", outcome=Outcome.OK, facts=one, rounds=1)
    return judge_all(
        [PROBE], {"driver": result}, standing=standing(), settings=Settings(), required=(), memory=Memory(), now=NOW
    ).conditions


def with_first(**changes: Any) -> DriverFacts:
    """Two GPUs of the server, the first one changed."""
    return facts(reading(gpu(0, **changes), gpu(1)), gpu_set=MINE)


def rows(**changes: Any) -> RemappedRows:
    return replace(ROWS, **changes)


TABLE: list[tuple[str, DriverFacts, dict[str, str]]] = [
    ("healthy", with_first(), {}),
    ("lost", facts(reading(silent(0, 15), gpu(1)), gpu_set=MINE), {"gpu-lost": "lost"}),
    ("unreachable", facts(reading(silent(0, 999), gpu(1)), gpu_set=MINE), {"gpu-lost": "unreachable"}),
    ("remap-failed", with_first(remapped_rows=rows(failed=True)), {"row-remap-failed": "failed"}),
    ("remap-pending", with_first(remapped_rows=rows(pending=True)), {"row-remap-pending": "waits-for-reset"}),
    ("remap-counts", with_first(remapped_rows=rows(correctable=3, uncorrectable=11)), {}),
    ("reset", with_first(recovery_action="reset"), {"gpu-recovery-required": "reset"}),
    ("reboot", with_first(recovery_action="reboot"), {"gpu-recovery-required": "reboot"}),
    ("drain-p2p", with_first(recovery_action="drain-p2p"), {"gpu-recovery-required": "drain-p2p"}),
    ("drain-reset", with_first(recovery_action="drain-reset"), {"gpu-recovery-required": "drain-reset"}),
    ("bus-reset", with_first(recovery_action="bus-reset"), {"gpu-recovery-required": "bus-reset"}),
    ("new-action", with_first(recovery_action="brand-new"), {"gpu-recovery-required": "other"}),
    ("ecc", with_first(ecc_uncorrected=2), {"ecc-uncorrected": "counted"}),
    ("ecc-corrected", with_first(ecc_corrected=1000), {}),
    ("nvlink", with_first(nvlinks_active=17), {"nvlink-down": "links-down"}),
    ("no-nvlink", with_first(nvlinks_active=None, nvlinks=None), {}),
    ("hw-thermal", with_first(clock_events=frozenset({"hw_thermal_slowdown"})), {"thermal-slowdown": "hardware"}),
    ("sw-thermal", with_first(clock_events=frozenset({"sw_thermal_slowdown"})), {"thermal-slowdown": "software"}),
    (
        "brake",
        with_first(clock_events=frozenset({"hw_power_brake_slowdown", "sw_thermal_slowdown"})),
        {"thermal-slowdown": "power-brake"},
    ),
    ("power-cap", with_first(clock_events=frozenset({"sw_power_cap"})), {}),
    ("licensed", with_first(licensed=True), {}),
    ("unlicensed", with_first(licensed=False), {"vgpu-unlicensed": "unlicensed"}),
    ("fabric-failed", with_first(fabric="failed"), {"fabric-not-ready": "failed"}),
    ("fabric-starting", with_first(fabric="in-progress"), {"fabric-not-ready": "in-progress"}),
    ("fabric-not-started", with_first(fabric="not-started"), {"fabric-not-ready": "not-started"}),
    ("no-fabric", with_first(fabric="not-supported"), {}),
    ("divided", with_first(mig=True), {"mig-unexpected": "parent-given"}),
    ("slow-when-idle", with_first(pcie=PcieLink(generation=1, generation_max=5, width=16, width_max=16)), {}),
    (
        "hung",
        facts(reading(silent(0, "hung"), gpu(1), left_out={0: "nvmlX"}), gpu_set=MINE),
        {"driver-hung": "gpu-hung"},
    ),
    ("stuck", facts(reading(stuck_workers=1), gpu_set=MINE), {"driver-hung": "unkillable"}),
]


@pytest.mark.parametrize(("one", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_one_fault_has_one_condition(one: DriverFacts, expected: dict[str, str]) -> None:
    """Each fault of one GPU is one condition that names that GPU, while the other one stays judged.

    Cases 3, 5, 11, 24: NVIDIA/open-gpu-kernel-modules#1151, leptonai/gpud#80, NVIDIA/gpu-operator#628,
    wilicc/gpu-burn#92.
    """
    assert active(one) == expected
    for code in expected:
        finding = judged(one)[code]
        if finding.reason != "unkillable":
            assert finding.gpus == (("0", "GPU-0"),)
            assert "GPU-0" in finding.message
        assert finding.final is (finding.reason == "lost")
        assert finding.gate is None


UNKNOWN_SET = facts(reading()).gpu_set


@pytest.mark.parametrize(
    ("one", "code"),
    [(row[1], code) for row in TABLE for code in row[2] if code != "mig-unexpected" and row[0] != "stuck"],
)
def test_a_gpu_that_is_not_known_to_be_the_servers_gates_nothing(one: DriverFacts, code: str) -> None:
    """With the set unknown, and for a GPU outside a known one, each of them is at most a warning that never gates.

    Case 10: NVIDIA/k8s-device-plugin#605.
    """
    for gpu_set, words in ((UNKNOWN_SET, "is not known"), (known("GPU-1"), "does not use this GPU")):
        finding = judged(replace(one, gpu_set=gpu_set))[code]
        assert (finding.status, finding.gate) == (Status.TRUE, Gate.NEVER)
        assert (finding.severity or CODES[code].severity).rank <= Severity.WARNING.rank
        assert words in finding.message


def test_the_servers_own_gpu_decides() -> None:
    """With one GPU inside the set and one outside, the one inside gives reason and weight; both are named."""
    one = facts(reading(silent(0, 15), silent(1, 999), gpu(2)), gpu_set=known("GPU-1", "GPU-2"))
    finding = judged(one)["gpu-lost"]
    assert (finding.reason, finding.severity or Severity.CRITICAL, finding.gate) == (
        "unreachable",
        Severity.CRITICAL,
        None,
    )
    assert finding.gpus == (("1", "GPU-1"), ("0", "GPU-0"))
    assert "Not the server's: GPU 0" in finding.message
    assert finding.final is False


def test_the_remedy_names_the_gpu_for_any_container() -> None:
    """A reset is spelled out with the uuids of the GPUs that need it: an index differs between containers."""
    one = facts(reading(gpu(0, recovery_action="reset"), gpu(1, recovery_action="reset")), gpu_set=MINE)
    assert "nvidia-smi -i GPU-0,GPU-1 -r" in (judged(one)["gpu-recovery-required"].remedy or "")


RECOVERIES = {
    "reset": "nvidia-smi -i GPU-0 -r",
    "drain-reset": "nvidia-smi -i GPU-0 -r",
    "reboot": "drain the node and reboot it",
    "system-reboot": "drain the node and reboot it",
    "bus-reset": "over its PCI bus",
    "drain-p2p": "peer-to-peer",
    "recover-imex-domain": "nvidia-imex",
    "other": "nvidia-smi -q -i GPU-0",
    "brand-new": "nvidia-smi -q -i GPU-0",
}


@pytest.mark.parametrize("action", RECOVERIES)
def test_each_recovery_has_its_own_remedy(action: str) -> None:
    """What the driver asks for decides what to do; only where it is a reset of the GPU is one advised."""
    finding = judged(with_first(recovery_action=action))["gpu-recovery-required"]
    remedy = finding.remedy or ""
    assert RECOVERIES[action].lower() in remedy.lower()
    assert ("-r`" in remedy) is (action in ("reset", "drain-reset"))
    assert (finding.reason, "does not know" in finding.message) == (
        (action, False) if action in CODES["gpu-recovery-required"].reasons and action != "other" else ("other", True)
    )
    assert ("brand-new" in finding.message) is (action == "brand-new")


def test_the_pci_address_is_in_the_message() -> None:
    """Whoever goes to the machine finds the board by its PCI address."""
    assert "00000000:00:06.0" in judged(with_first(nvlinks_active=0))["nvlink-down"].message


# -- what could not be read ---------------------------------------------------------------------------

GETTERS = {
    "nvmlDeviceGetRemappedRows": ("remapped_rows", {"row-remap-failed", "row-remap-pending"}),
    "nvmlDeviceGetTotalEccErrors": ("ecc_uncorrected", {"ecc-uncorrected"}),
    "nvmlDeviceGetFieldValues": ("recovery_action", {"gpu-recovery-required"}),
    "nvmlDeviceGetCurrentClocksEventReasons": ("clock_events", {"thermal-slowdown"}),
    "nvmlDeviceGetNvLinkState": ("nvlinks", {"nvlink-down"}),
    "nvmlDeviceGetGpuFabricInfo": ("fabric", {"fabric-not-ready"}),
    "nvmlDeviceGetCurrPcieLinkGeneration": ("pcie", {"pcie-degraded"}),
    "nvmlDeviceGetGridLicensableFeatures": ("licensed", {"vgpu-unlicensed"}),
    "nvmlDeviceGetMigMode": ("mig", {"mig-unexpected"}),
}


@pytest.mark.parametrize("call", GETTERS)
@pytest.mark.parametrize("code", [3, 13, 25, "not-in-binding"])
def test_what_a_gpu_does_not_have_cannot_be_wrong(call: str, code: int | str) -> None:
    """Not supported by the GPU, or not known to its driver, is judged and fine (case 5: leptonai/gpud#219)."""
    field, _codes = GETTERS[call]
    one = with_first(**{field: None, "errors": {call: code}})
    assert (active(one), unknown(one)) == ({}, {})


@pytest.mark.parametrize("call", GETTERS)
@pytest.mark.parametrize("code", [4, 999, "undecodable"])
def test_what_a_gpu_did_not_tell_is_unknown(call: str, code: int | str) -> None:
    """A value that is there and was not read makes its own conditions unknown, and nothing worse.

    Case 7: NVIDIA/nvidia-container-toolkit#842.
    """
    field, codes = GETTERS[call]
    one = with_first(**{field: None, "errors": {call: code}})
    assert (active(one), unknown(one)) == ({}, dict.fromkeys(codes, "not-read"))
    outside = replace(one, gpu_set=known("GPU-1"))
    assert unknown(outside) == {}


def test_a_silent_gpu_leaves_its_health_unknown() -> None:
    """Nothing is said of the health of a lost GPU; one outside the set does not matter."""
    one = facts(reading(silent(0, 15), gpu(1)), gpu_set=MINE)
    expected = dict.fromkeys(GPU_CODES - {"gpu-lost", "gpu-missing", "xid-critical", "xid-warning"}, "gpu-silent")
    assert unknown(one) == expected
    assert unknown(replace(one, gpu_set=known("GPU-1"))) == {}


def test_a_round_cut_short_proves_nothing_of_the_rest() -> None:
    """Where a hanging GPU kept others from ever being read, they are unknown, not fine and not missing."""
    one = facts(reading(gpu(0), count=8, left_out={1: "nvmlX"}), gpu_set=MINE)
    assert active(one) == {"driver-hung": "gpu-hung"}
    assert unknown(one)["thermal-slowdown"] == "gpu-silent"


# -- memory: what happens over rounds -------------------------------------------------------------------

SERVER = target({"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"})
BOTH = reading()


def test_a_gpu_that_vanished_is_named() -> None:
    """A GPU that was visible is missed by its uuid, whether the count shrinks or another one took its place.

    Case 3: JosephKJ/OWOD#81, NVIDIA/NVSentinel#155.
    """
    for after in (reading(gpu(0)), reading(gpu(0), gpu(1, uuid="GPU-7"))):
        one = rounds(BOTH, after, server=SERVER)
        finding = judged(one)["gpu-missing"]
        assert (finding.status, finding.reason, finding.gate) == (Status.TRUE, "vanished", None)
        assert finding.gpus == (("1", "GPU-1"),)
        assert "GPU-1" in finding.message
        unknown_set = judged(rounds(BOTH, after))["gpu-missing"]
        assert (unknown_set.severity, unknown_set.gate) == (Severity.WARNING, Gate.NEVER)


def test_a_neighbours_gpu_that_vanished_gates_nothing() -> None:
    """A GPU of the node that is known not to be the server's may go without taking its pod out."""
    server = target({"NVIDIA_VISIBLE_DEVICES": "GPU-0"})
    finding = judged(rounds(BOTH, reading(gpu(0)), server=server))["gpu-missing"]
    assert (finding.severity, finding.gate) == (Severity.WARNING, Gate.NEVER)


def test_a_gpu_that_came_back_is_no_longer_missing() -> None:
    """Missing ends with the GPU's return."""
    assert active(rounds(BOTH, reading(gpu(0)), BOTH, server=SERVER)) == {}


def test_all_gpus_gone_is_a_loss_not_a_lack_of_access() -> None:
    """In a container that had GPUs, none any more is gpu-missing; that none was ever there is sidecar-gpu-access."""
    none = reading(count=0, module_gpus=2)
    none = replace(none, gpus=())
    assert active(rounds(BOTH, none, server=SERVER), CONTAINER) == {"gpu-missing": "vanished"}
    assert active(rounds(none, server=SERVER), CONTAINER) == {"sidecar-gpu-access": "no-gpus"}


def test_gpus_that_the_sidecar_was_never_given() -> None:
    """A GPU of the server that this container never saw, while the node has it, is the sidecar's own lack.

    Cases 9 and 10: bottlerocket-os/bottlerocket#3718.
    """
    one = rounds(reading(gpu(0), module_gpus=2), server=SERVER, placement=CONTAINER)
    assert active(one, CONTAINER) == {"sidecar-gpu-access": "server-gpus-not-seen"}
    assert "GPU-1" in judged(one, CONTAINER)["sidecar-gpu-access"].message
    assert unknown(one, CONTAINER)["gpu-missing"] == unknown(one, CONTAINER)["row-remap-failed"] == "no-gpu-access"
    assert active(one, HOST) == {"gpu-missing": "not-listed"}


def test_a_gpu_that_the_node_does_not_list_either_is_missing() -> None:
    """Where the kernel module lists fewer GPUs than the server has, one was lost before the sidecar started."""
    one = rounds(reading(gpu(0), module_gpus=1), server=SERVER, placement=CONTAINER)
    assert active(one, CONTAINER) == {"gpu-missing": "not-listed"}


def test_a_gpu_without_a_name_can_only_be_the_one_that_is_looked_for() -> None:
    """A GPU lost before the sidecar ever saw its uuid is the server's if exactly that many of its are not seen."""
    one = rounds(reading(gpu(0), silent(1, 15, uuid=None)), server=SERVER)
    finding = judged(one)["gpu-lost"]
    assert (finding.reason, finding.gate, active(one)) == ("lost", None, {"gpu-lost": "lost"})


DEAD = reading(gpu(0), silent(1, 15, uuid=None), silent(2, 15, uuid=None), gpu(3))
"""Two GPUs that were dead before the sidecar could ask for their uuids."""


def of(*uuids: str) -> Settings:
    return Settings(gpus=uuids)


@pytest.mark.parametrize("placement", [HOST, CONTAINER])
@pytest.mark.parametrize("server", [("GPU-1",), ("GPU-0", "GPU-1")])
def test_a_gpu_of_the_server_among_several_without_a_name(placement: Placement, server: tuple[str, ...]) -> None:
    """All GPUs of the node visible, and none answers to the server's uuid: it is lost, whichever of the dead it is.

    Case 3: NVIDIA/open-gpu-kernel-modules#507.
    """
    one = rounds(DEAD, DEAD, settings=of(*server), placement=placement)
    assert active(one, placement) == {"gpu-lost": "lost"}
    finding = judged(one, placement)["gpu-lost"]
    assert (finding.severity, finding.gate, finding.final) == (Severity.CRITICAL, None, True)
    assert finding.gpus == (("", "GPU-1"), ("1", ""), ("2", ""))
    assert finding.message.startswith("GPU-1 belongs to the server and is among the 2 GPUs that do not answer")
    assert "GPU -1" not in finding.message
    assert one.in_scope(1, None) is one.in_scope(2, None) is None
    assert unknown(one, placement)["ecc-uncorrected"] == "gpu-silent"


def test_a_gpu_without_a_name_is_a_neighbours_where_all_of_the_servers_answer() -> None:
    """A dead GPU that cannot be the server's takes nothing from what is known of the server's."""
    one = rounds(DEAD, settings=of("GPU-0", "GPU-3"))
    assert (one.in_scope(1, None), unknown(one)) == (False, {})
    finding = judged(one)["gpu-lost"]
    assert (finding.severity, finding.gate) == (Severity.WARNING, Gate.NEVER)
    assert "The server uses none of these GPUs." in finding.message


def test_a_gpu_without_a_name_where_others_are_hidden() -> None:
    """In a container that sees a part of the node a dead GPU without a uuid may be a neighbour's: no gate.

    Case 10: NVIDIA/k8s-device-plugin#605.
    """
    partly = reading(gpu(0), gpu(1), silent(2, 15, uuid=None), gpu(3), module_gpus=8)
    one = rounds(partly, partly, settings=of("GPU-7"), placement=CONTAINER)
    found = judged(one, CONTAINER)
    assert active(one, CONTAINER) == {"sidecar-gpu-access": "server-gpus-not-seen", "gpu-lost": "lost"}
    assert (found["gpu-lost"].severity, found["gpu-lost"].gate) == (Severity.WARNING, Gate.NEVER)
    assert "Whether the server uses this GPU is not known." in found["gpu-lost"].message
    alive = reading(*(gpu(index) for index in range(4)), module_gpus=8)
    before = judged(rounds(alive, settings=of("GPU-7"), placement=CONTAINER), CONTAINER)
    assert before["sidecar-gpu-access"] == found["sidecar-gpu-access"]
    assert before["gpu-missing"] == found["gpu-missing"]


def test_more_gpus_unfound_than_dead_ones_without_a_name() -> None:
    """One dead GPU cannot be two of the server's: at least one is missing, and both are named by uuid alone."""
    one = rounds(reading(gpu(0), silent(1, 15, uuid=None)), settings=of("GPU-0", "GPU-8", "GPU-9"))
    finding = judged(one)["gpu-missing"]
    assert (finding.reason, finding.gate) == ("not-listed", None)
    assert finding.gpus == (("", "GPU-8"), ("", "GPU-9"))
    assert finding.message.startswith("GPU-8 belongs to the server")
    assert judged(one)["gpu-lost"].gate is Gate.NEVER


def test_access_is_no_question_where_every_gpu_is_visible() -> None:
    """A uuid that is not among all GPUs of the node is missing, not hidden from this container."""
    one = rounds(reading(), settings=of("GPU-0", "GPU-9"), placement=CONTAINER)
    assert active(one, CONTAINER) == {"gpu-missing": "not-listed"}
    assert judged(one, CONTAINER)["gpu-missing"].gate is None


def test_what_a_masked_proc_does_not_tell_is_unknown() -> None:
    """In a container whose /proc does not list GPUs, one that was never seen is neither hidden nor missing."""
    masked = reading(gpu(0), gpu(1), module_gpus=None)
    one = rounds(masked, settings=of("GPU-0", "GPU-9"), placement=CONTAINER)
    assert (active(one, CONTAINER), unknown(one, CONTAINER)["gpu-missing"]) == ({}, "no-gpu-access")


def test_an_index_beyond_those_that_the_server_sees_is_missing() -> None:
    """A GPU of the server that has neither an index nor a uuid here is missed under the name it was given."""
    server = target({"NVIDIA_VISIBLE_DEVICES": "GPU-0", "CUDA_VISIBLE_DEVICES": "0,5"})
    finding = judged(rounds(BOTH, server=server))["gpu-missing"]
    assert (finding.reason, finding.gate, finding.gpus) == ("not-listed", None, (("", ""),))
    assert finding.message == "A GPU belongs to the server (as 5) and was never visible."


# -- GPUs that may not be opened ------------------------------------------------------------------------

REFUSED = reading(gpu(0), silent(1, 4))


@pytest.mark.parametrize("before", [(), (BOTH,)])
def test_a_gpu_that_may_not_be_opened_is_not_lost(before: tuple[Any, ...]) -> None:
    """NVML lists GPUs that the caller may not open: unknown on a host, the sidecar's own lack in a container."""
    for placement in (HOST, CONTAINER):
        one = rounds(*before, REFUSED, REFUSED, server=SERVER, placement=placement)
        expected = {"sidecar-gpu-access": "no-permission"} if placement is CONTAINER else {}
        assert active(one, placement) == expected
        not_seen = GPU_CODES - {"gpu-missing", "xid-critical", "xid-warning"}
        assert unknown(one, placement) == dict.fromkeys(not_seen, "no-permission")
        assert "GPU-1" in judged(one, placement)["gpu-lost"].message


def test_a_neighbours_gpu_may_be_closed() -> None:
    """What this container may not open does not matter while it is known not to be the server's."""
    one = rounds(REFUSED, server=target({"NVIDIA_VISIBLE_DEVICES": "GPU-0"}), placement=CONTAINER)
    assert (active(one, CONTAINER), unknown(one, CONTAINER)) == ({}, {})


def test_closed_gpus_of_an_unknown_owner() -> None:
    """While the server's GPUs are not known, access is lacking only if no GPU at all may be opened."""
    assert active(rounds(REFUSED, placement=CONTAINER), CONTAINER) == {}
    assert unknown(rounds(REFUSED, placement=CONTAINER), CONTAINER)["gpu-lost"] == "no-permission"
    none = reading(silent(0, 4), silent(1, 4))
    assert active(rounds(none, placement=CONTAINER), CONTAINER) == {"sidecar-gpu-access": "no-permission"}


def test_a_gpu_of_the_server_among_closed_ones_without_a_name() -> None:
    """A uuid that is not found may belong to a GPU that could not be asked: neither lost nor missing."""
    closed = reading(gpu(0), silent(1, 4, uuid=None), silent(2, 15, uuid=None))
    one = rounds(closed, settings=of("GPU-1"), placement=CONTAINER)
    found = judged(one, CONTAINER)
    assert active(one, CONTAINER) == {"gpu-lost": "lost", "sidecar-gpu-access": "no-permission"}
    assert found["gpu-lost"].gate is Gate.NEVER


# -- indices over the life of a server --------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "result"), [(True, {"gpu-missing": "vanished"}), (False, {})])
def test_the_operators_indices_outlive_a_server_process(setting: bool, result: dict[str, str]) -> None:
    """A new process counts the GPUs anew; the operator who wrote ``gpus`` does not."""
    settings = Settings(gpus=("0", "1")) if setting else Settings()
    four = reading(*(gpu(index) for index in range(4)))
    moved = reading(*(gpu(index, uuid=f"GPU-{index + 1}") for index in range(3)))
    environ = {"CUDA_VISIBLE_DEVICES": "0,1"}
    memory = DriverMemory(target=target(environ, root=None, pid=7))
    memory.fold(four, settings, standing(), 1000.0)
    memory.fold(moved, settings, standing(), 1010.0)
    memory.target = target(environ, root=None, pid=8)
    one = memory.fold(moved, settings, standing(), 1020.0)
    gated = {code: finding.reason for code, finding in judged(one).items() if finding.status is Status.TRUE}
    wanted = {"GPU-0", "GPU-1"} if setting else {"GPU-1", "GPU-2"}
    assert {member.uuid for member in one.gpu_set.gpus} == wanted
    assert {code: reason for code, reason in gated.items() if judged(one)[code].gate is None} == result


@pytest.mark.parametrize(
    ("expected", "gpu_set", "placement", "listed", "result"),
    [
        (8, None, HOST, 2, ("fewer-than-expected", Gate.NEVER)),
        (8, None, CONTAINER, 2, ("fewer-than-expected", Gate.NEVER)),
        (2, None, HOST, 8, None),
        (4, MINE, HOST, 8, ("fewer-than-expected", None)),
        (1, MINE, HOST, 8, None),
    ],
)
def test_fewer_than_expected(expected: int, gpu_set: Any, placement: Placement, listed: int, result: Any) -> None:
    """Fewer GPUs than the server needs gate only if the set is known; more never matter."""
    one = facts(
        reading(module_gpus=listed),
        gpu_set=gpu_set or UNKNOWN_SET,
        expected=Expected(count=expected, source=CountSource.SETTING),
    )
    finding = judged(one, placement)["gpu-missing"]
    assert (None if finding.status is Status.FALSE else (finding.reason, finding.gate)) == result


def test_a_container_that_sees_a_part_of_the_node_is_normal() -> None:
    """Fewer visible than needed while the node has enough says nothing: unknown, neither fine nor missing."""
    one = facts(reading(gpu(0), module_gpus=8), expected=Expected(count=8, source=CountSource.SERVER_INFO))
    assert active(one, CONTAINER) == {}
    assert unknown(one, CONTAINER) == {"gpu-missing": "no-gpu-access"}


def test_the_highest_number_seen_never_gates() -> None:
    """While neither set nor sizes are known the expectation is what was visible, and a warning at most."""
    one = rounds(BOTH, reading(gpu(0)))
    assert one.expected == Expected(count=2, source=CountSource.SEEN)
    assert judged(one)["gpu-missing"].gate is Gate.NEVER


def test_errors_that_come_while_the_sidecar_watches() -> None:
    """Old errors are told from new ones, and new ones with a row that is not repaired are critical.

    Cases 5 and 6: wtdcode/vllm-backport#62, NVIDIA/open-gpu-kernel-modules#1355, aws/eks-node-monitoring-agent#245.
    """
    old = changed(BOTH, 0, ecc_uncorrected=5)
    more = changed(BOTH, 0, ecc_uncorrected=7)
    found = judged(rounds(old, more, server=SERVER))["ecc-uncorrected"]
    assert (found.reason, found.severity) == ("new", Severity.WARNING)
    assert "2 more" in found.message
    assert active(rounds(old, old, server=SERVER)) == {"ecc-uncorrected": "counted"}
    bad = changed(more, 0, remapped_rows=rows(pending=True))
    found = judged(rounds(old, bad, server=SERVER))["ecc-uncorrected"]
    assert (found.reason, found.severity) == ("new-unrepaired", Severity.CRITICAL)
    assert active(rounds(more, old, server=SERVER)) == {"ecc-uncorrected": "counted"}


def test_rows_that_are_remapped_while_the_sidecar_watches() -> None:
    """A growing number of remapped rows is a trend worth a warning, although each was repaired (case 6)."""
    before, after = (changed(BOTH, 0, remapped_rows=rows(uncorrectable=count)) for count in (11, 12))
    found = judged(rounds(before, after, server=SERVER))["ecc-uncorrected"]
    assert (found.reason, found.severity) == ("remap-growing", Severity.WARNING)
    assert active(rounds(after, after, server=SERVER)) == {}


SLOW = PcieLink(generation=3, generation_max=5, width=16, width_max=16)
NARROW = PcieLink(generation=5, generation_max=5, width=8, width_max=16)


def test_a_slow_link_counts_only_under_load() -> None:
    """PCIe is judged after two busy rounds, passes over idle ones, and is fine again after a fast busy one."""
    busy, idle = (changed(BOTH, 0, pcie=SLOW, utilization=share) for share in (0.9, 0.0))
    fast = changed(BOTH, 0, utilization=0.9)
    assert active(rounds(idle, idle, idle, server=SERVER)) == {}
    assert active(rounds(busy, server=SERVER)) == {}
    assert active(rounds(busy, idle, busy, idle, server=SERVER)) == {"pcie-degraded": "generation"}
    assert active(rounds(busy, busy, fast, server=SERVER)) == {}
    narrow = changed(BOTH, 0, pcie=NARROW, utilization=0.9)
    assert active(rounds(narrow, narrow, server=SERVER)) == {"pcie-degraded": "width"}


# -- Xids -----------------------------------------------------------------------------------------------


def xid(code: int, *, at: float = NOW - 60, index: int = 0, count: int = 1) -> XidCount:
    return XidCount(index=index, uuid=f"GPU-{index}", xid=code, count=count, last=at)


def reported(*codes: int, at: float = NOW - 60) -> DriverFacts:
    return facts(reading(xids=tuple(xid(code, at=at) for code in codes)), gpu_set=MINE)


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 69])
def test_the_fault_of_a_program_is_no_condition(code: int) -> None:
    """Xids that a program causes are counted and nothing else."""
    assert active(reported(code)) == {}
    assert explain(code).kind is XidClass.APPLICATION


@pytest.mark.parametrize("code", [48, 64, 74, 79, 95, 119, 120, 140])
def test_a_hardware_fault_is_critical(code: int) -> None:
    """Xids of broken hardware are critical, say when and what, and stay for a day.

    Cases 3 and 6: NVIDIA/open-gpu-kernel-modules#507, marin-community/marin#7344.
    """
    finding = judged(reported(code))["xid-critical"]
    assert (finding.status, finding.severity) == (Status.TRUE, Severity.CRITICAL)
    assert f"Xid {code} (" in finding.message
    assert "1970-01-02T03:45:40Z" in finding.message
    assert set(active(reported(code))) == {"xid-critical"}
    assert active(reported(code, at=NOW - health.XID_CRITICAL_SECONDS)) == {}


@pytest.mark.parametrize("code", [63, 92, 94, 4242])
def test_what_was_contained_or_is_not_known_is_a_warning(code: int) -> None:
    """Contained errors and codes that are new are a warning for an hour."""
    assert set(active(reported(code))) == {"xid-warning"}
    assert active(reported(code, at=NOW - health.XID_WARNING_SECONDS)) == {}


def remedy(code: str, *events: XidCount, gpus: tuple[GpuReading, ...] = ()) -> str:
    one = facts(reading(*gpus, xids=events), gpu_set=MINE)
    return judged(one)[code].remedy or ""


def test_a_gpu_off_the_bus_is_not_reset() -> None:
    """No reset is advised for a GPU that has fallen off the bus, whatever else it reported, but for its neighbour.

    Case 3: NVIDIA/open-gpu-kernel-modules#507.
    """
    for events in ((xid(79),), (xid(167),), (xid(79), xid(48))):
        text = remedy("xid-critical", *events)
        assert text.startswith("Drain the node and power-cycle it")
        assert "nvidia-smi" not in text
    text = remedy("xid-critical", xid(79), xid(48, index=1))
    assert "power-cycle" in text
    assert "nvidia-smi -i GPU-1 -r" in text
    assert "nvidia-smi" not in remedy("xid-critical", xid(48), gpus=(silent(0, 15), gpu(1)))
    assert "nvidia-smi -i GPU-0 -r" in remedy("xid-critical", xid(48))


def test_what_to_do_about_an_xid_is_for_the_servers_gpus() -> None:
    """A neighbour's Xid adds nothing to what is to be done for the server."""
    one = facts(reading(xids=(xid(48), xid(74, index=1))), gpu_set=known("GPU-0"))
    text = judged(one)["xid-critical"].remedy or ""
    assert ("GPU-0" in text, "NVSwitches" in text) == (True, False)


def test_an_xid_that_is_not_known_is_looked_up() -> None:
    """Nothing but a look at the catalogue is advised for a code that is not in the table."""
    assert remedy("xid-warning", xid(4242)) == "Look it up in NVIDIA's Xid catalogue."


def test_without_events_nothing_is_known_of_xids() -> None:
    """Where events cannot be had, that none is known does not mean that there was none (case 6)."""
    for watched in (False, None):
        one = facts(reading(xids_watched=watched), gpu_set=MINE)
        assert unknown(one) == {"xid-critical": "events-unavailable", "xid-warning": "events-unavailable"}


def test_a_driver_that_was_loaded_anew_settles_earlier_xids() -> None:
    """What was reported before the driver came back, or before it withdrew a recovery, is over."""
    event = xid(79, at=1005.0)
    works = reading(xids=(event,))
    gone = reading(code=9, count=None, xids=(event,))
    gone = replace(gone, gpus=())
    memory = DriverMemory(target=SERVER)
    one = memory.fold(works, Settings(), standing(), 1010.0)
    assert set(active(one, now=1010.0)) == {"xid-critical"}
    memory.fold(gone, Settings(), standing(), 1020.0)
    one = memory.fold(works, Settings(), standing(), 1030.0)
    assert active(one, now=1030.0) == {}
    asked = changed(works, 0, recovery_action="reset")
    one = rounds(asked, works, server=SERVER, start=1010.0)
    assert active(one, now=1030.0) == {}


def test_the_table_of_xids_is_complete_in_itself() -> None:
    """Each entry has a meaning, an action, and a reason of its condition exactly where it can be one."""
    kinds = {XidClass.HARDWARE: "xid-critical", XidClass.CONTAINED: "xid-warning"}
    for code, entry in XIDS.items():
        assert entry.meaning, code
        assert entry.action, code
        assert (entry.reason is not None) is (entry.kind in kinds), code
        if entry.reason is not None:
            assert entry.reason in CODES[kinds[entry.kind]].reasons, code
    assert explain(4242).kind is XidClass.UNLISTED


# -- one cause --------------------------------------------------------------------------------------------


def published(one: DriverFacts) -> tuple[set[str], dict[str, str | None]]:
    """(codes of root causes, consequences with their cause)."""
    found = conditions(one)
    causes = {code for code, each in found.items() if each.active}
    return causes, {code: each.consequence_of for code, each in found.items() if each.consequence_of}


def test_one_broken_gpu_has_one_cause() -> None:
    """Everything that one GPU says of the same fault is a consequence of the deepest of it.

    Case 6: wtdcode/vllm-backport#62, where four reports of one GPU looked like four problems.
    """
    sick = gpu(0, ecc_uncorrected=3, remapped_rows=rows(pending=True), recovery_action="reset")
    one = facts(reading(sick, gpu(1), xids=(xid(95), xid(63))), gpu_set=MINE)
    assert published(one) == (
        {"xid-critical"},
        dict.fromkeys(("gpu-recovery-required", "ecc-uncorrected", "row-remap-pending", "xid-warning"), "xid-critical"),
    )


def test_a_lost_gpu_explains_its_xid() -> None:
    """Xid 79 of a GPU that is lost is a consequence of that."""
    one = facts(reading(silent(0, 15), gpu(1), xids=(xid(79),)), gpu_set=MINE)
    assert published(one) == ({"gpu-lost"}, {"xid-critical": "gpu-lost"})


def test_a_fault_of_one_gpu_does_not_hide_that_of_another() -> None:
    """Causes explain what concerns the same GPUs only."""
    one = facts(reading(silent(0, 15), gpu(1, remapped_rows=rows(failed=True))), gpu_set=MINE)
    assert published(one) == ({"gpu-lost", "row-remap-failed"}, {})


# -- MIG ------------------------------------------------------------------------------------------------


def test_a_server_with_a_mig_device_is_as_expected() -> None:
    """A set that names the MIG device is fine; so is a launch in a container that was given one (case 7)."""
    divided = gpu(0, mig=True, mig_devices=(MigDevice(uuid="MIG-1"),))
    given = Member(given="MIG-1", index=0, uuid="GPU-0", mig=True)
    one = facts(reading(divided), gpu_set=replace(MINE, gpus=(given,)))
    assert active(one) == {}
    one = facts(reading(divided), gpu_set=known("GPU-0", source=GpuSource.PREFLIGHT))
    assert active(one) == {}


def test_a_divided_gpu_of_unknown_owner_is_unknown() -> None:
    """Whether a GPU in MIG mode is given as a whole cannot be told while the set is unknown."""
    one = facts(reading(gpu(0, mig=True)))
    assert (active(one), unknown(one)) == ({}, {"mig-unexpected": "set-unknown"})


DIVIDED, WHOLE = gpu(0, mig=True), gpu(1, mig=False)


@pytest.mark.parametrize(
    ("wanted", "gpus", "named", "words"),
    [
        ("disabled", (DIVIDED, WHOLE), ("GPU-0",), "GPU-0 -mig 0"),
        ("enabled", (DIVIDED, WHOLE), ("GPU-1",), "GPU-1 -mig 1"),
        ("enabled", (gpu(0), gpu(1)), ("GPU-0", "GPU-1"), "GPU-0,GPU-1 -mig 1"),
        ("disabled, enabled", (gpu(0), gpu(1)), ("GPU-0", "GPU-1"), "baseline"),
        ("absent", (DIVIDED,), ("GPU-0",), "baseline"),
        ("disabled", (gpu(0), gpu(1)), (), ""),
        ("enabled", (DIVIDED,), (), ""),
        ("disabled, enabled", (DIVIDED, WHOLE), (), ""),
        ("enabled", (gpu(0, mig=None), WHOLE), (), ""),
    ],
)
def test_mig_mode_is_not_as_the_baseline_wants_it(
    wanted: str, gpus: tuple[GpuReading, ...], named: tuple[str, ...], words: str
) -> None:
    """Each GPU whose mode differs is named with the command that brings it back; what is not known does not differ."""
    one = facts(reading(*gpus), gpu_set=known("GPU-0", "GPU-1", source=GpuSource.PREFLIGHT))
    item = {"mig": value} if (value := PROBE.identity(one).get("mig")) else {}
    observed = {name: Observed(value=value, source="driver") for name, value in item.items()}
    drifts = compare({"mig": expectation(wanted)}, observed)
    finding = judged(one, drifts=drifts)["mig-unexpected"]
    assert tuple(uuid for _, uuid in finding.gpus) == named
    if named:
        assert (finding.status, finding.reason, finding.final) == (Status.TRUE, "not-as-baseline", True)
        assert wanted in finding.message
        assert words in (finding.remedy or "")
    else:
        assert finding.status is Status.FALSE


def test_a_whole_gpu_that_is_divided_is_said_first() -> None:
    """Where a GPU in MIG mode is named as a whole too, that is what the server suffers from."""
    drifts = compare({"mig": expectation("disabled")}, {"mig": Observed(value="enabled", source="driver")})
    finding = judged(facts(reading(DIVIDED), gpu_set=known("GPU-0")), drifts=drifts)["mig-unexpected"]
    assert finding.reason == "parent-given"
    assert finding.remedy == (
        "Name a MIG device instead (`nvidia-smi -L` lists them), or leave MIG mode on a drained node: "
        "`nvidia-smi -i GPU-0 -mig 0`."
    )


def test_a_divided_gpu_of_unknown_owner_differs_all_the_same() -> None:
    """The baseline is of the machine: whose GPU it is does not matter."""
    drifts = compare({"mig": expectation("disabled")}, {"mig": Observed(value="enabled", source="driver")})
    finding = judged(facts(reading(DIVIDED)), drifts=drifts)["mig-unexpected"]
    assert (finding.status, finding.reason) == (Status.TRUE, "not-as-baseline")


def test_field_errors_of_a_mig_parent_are_no_fault() -> None:
    """Values that a GPU in MIG mode refuses make no condition (case 7: rapidsai/dask-cuda#583)."""
    parent = gpu(0, memory_used=None, memory_total=None, errors={"nvmlDeviceGetMemoryInfo": 4})
    assert active(facts(reading(parent, gpu(1)), gpu_set=MINE)) == {}


# -- readiness of neighbours ------------------------------------------------------------------------------


@pytest.mark.parametrize(("known_set", "unready"), [(True, [3]), (False, [])])
def test_one_dead_gpu_takes_one_pod_out(known_set: bool, unready: list[int]) -> None:
    """Of eight single-GPU servers on a node one reacts to its dead GPU; with the sets unknown none does.

    Case 10: NVIDIA/k8s-device-plugin#605.
    """
    gpus: list[GpuReading] = [gpu(index) if index != 3 else silent(3, 15) for index in range(8)]
    found = []
    for server in range(8):
        environ = {"NVIDIA_VISIBLE_DEVICES": f"GPU-{server}"} if known_set else None
        one = rounds(reading(*gpus), server=target(environ))
        result: Result[Any] = Result(probe="driver", outcome=Outcome.OK, facts=one, rounds=1)
        judgement = judge_all(
            [PROBE], {"driver": result}, standing=standing(), settings=Settings(), required=(), memory=Memory(), now=NOW
        )
        assert judgement.conditions["gpu-lost"].active
        if not judgement.verdict.ready:
            found.append(server)
    assert found == unready


def test_trends_are_kept_by_uuid() -> None:
    """What was seen of a GPU follows it when the driver numbers it anew."""
    one = facts(reading(), trends={"GPU-1": Trend(new_errors=3)})
    assert [one.trend(0, "GPU-1").new_errors, one.trend(1, "GPU-0").new_errors] == [3, 0]


def test_the_same_fault_of_many_gpus_is_one_clause() -> None:
    """More than two GPUs with one fault are named by their indices; the finding keeps their uuids."""
    many = [gpu(index, fabric="in-progress") for index in range(3)]
    one = facts(reading(*many, gpu(3)), gpu_set=known(*(f"GPU-{index}" for index in range(4))))
    found = judged(one)["fabric-not-ready"]
    assert found.message == "Each of the GPUs 0, 1, 2 has state in-progress."
    assert [uuid for _, uuid in found.gpus] == ["GPU-0", "GPU-1", "GPU-2"]
    two = facts(reading(*many[:2]), gpu_set=known("GPU-0", "GPU-1"))
    assert judged(two)["fabric-not-ready"].message.count("GPU-") == 2
