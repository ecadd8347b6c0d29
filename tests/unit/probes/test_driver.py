"""The driver probe: its judge as a table over codes, placement and /proc; its series, identity and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sidecar.config import Settings
from sidecar.model import (
    Feature,
    Finding,
    Gate,
    Outcome,
    Placement,
    Processes,
    Result,
    ServerView,
    Severity,
    Standing,
    Status,
    World,
)
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.probes.driver import CONDITIONS, FAMILIES, PROBE, DriverSection, GpuSection, identity, report, samples

NOW = 1_750_000_100.0
HOST, CONTAINER = Placement.HOST, Placement.CONTAINER
CODES = {kind.code: kind for kind in CONDITIONS}
NAMES = {
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    17: "The operating system has blocked the request.",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}


def gpu(index: int, **more: Any) -> GpuReading:
    values: dict[str, Any] = {
        "code": 0,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "mig": False,
        "memory_used": 644939776,
        "memory_total": 150754820096,
        "temperature": 38,
        "power": 78.786,
        "utilization": 0.25,
    }
    return GpuReading(index=index, **(values | more))


HEALTHY = NvmlReading(
    code=0,
    driver_version="580.159.04",
    nvml_version="13.580.159.04",
    cuda_driver_version="13.0",
    library="/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
    library_version="580.159.04",
    count=2,
    gpus=(gpu(0), gpu(1)),
    module_present=True,
    module_version="580.159.04",
    module_flavour="open",
    module_gpus=2,
    device_present=True,
    device_refused=False,
)


def failed(code: int, *, module: bool = True, **more: Any) -> NvmlReading:
    """Make a reading in which nvmlInit failed with ``code``."""
    values: dict[str, Any] = {
        "code": code,
        "call": "nvmlInit",
        "words": NAMES.get(code, "whatever"),
        "library": HEALTHY.library,
        "library_version": "580.159.04",
        "nvml_version": "13.580.159.04",
    }
    if code == 12:
        values |= {"library": None, "library_version": None, "nvml_version": None}
    if module:
        values |= {
            "module_present": True,
            "module_version": "580.159.04",
            "module_flavour": "open",
            "module_gpus": 2,
            "device_present": True,
            "device_refused": False,
        }
    return NvmlReading(**(values | more))


def world(placement: Placement) -> World:
    standing = Standing(placement=placement, placement_why="", processes=Processes.HIDDEN, processes_why="")
    return World(standing=standing, server=ServerView(), now=NOW, settings=Settings())


def judged(
    facts: NvmlReading | None, placement: Placement = HOST, outcome: Outcome = Outcome.OK, **more: Any
) -> Mapping[str, Finding]:
    result: Result[NvmlReading] = Result(probe="driver", outcome=outcome, facts=facts, **more)
    findings = list(PROBE.judge(result, world(placement)))
    found = {finding.code: finding for finding in findings}
    assert len(found) == len(findings)
    assert set(found) == set(CODES)
    for finding in findings:
        if finding.status is not Status.FALSE:
            assert finding.reason in CODES[finding.code].reasons
    return found


def active(found: Mapping[str, Finding]) -> dict[str, str | None]:
    return {code: finding.reason for code, finding in found.items() if finding.status is Status.TRUE}


def unknown(found: Mapping[str, Finding]) -> dict[str, str | None]:
    return {code: finding.reason for code, finding in found.items() if finding.status is Status.UNKNOWN}


REFUSED = {"device_refused": True}
BEFORE = {"succeeded_before": True}
TABLE = [
    # code, placement, /proc shows a module, more facts, (the one cause, its reason)
    (12, HOST, True, {}, ("nvml-library-missing", "not-found")),
    (12, HOST, False, {}, ("nvml-library-missing", "not-found")),
    (12, CONTAINER, False, {}, ("nvml-library-missing", "not-found")),
    (12, CONTAINER, False, {"loader": "libnvidia-ml.so.1: file too short"}, ("nvml-library-missing", "unloadable")),
    (12, CONTAINER, True, {}, ("sidecar-gpu-access", "no-library")),
    (9, HOST, False, {}, ("driver-not-loaded", "not-loaded")),
    (9, HOST, True, {}, ("driver-not-loaded", "no-device-nodes")),
    (9, CONTAINER, False, {}, ("driver-not-loaded", "not-loaded")),
    (9, CONTAINER, True, {}, ("sidecar-gpu-access", "no-device-nodes")),
    (4, HOST, True, {}, ("device-permission", "init-refused")),
    (4, HOST, False, {}, ("device-permission", "init-refused")),
    (4, HOST, True, REFUSED, ("device-permission", "init-refused")),
    (4, CONTAINER, True, {}, ("sidecar-gpu-access", "no-permission")),
    (4, CONTAINER, False, {}, ("sidecar-gpu-access", "no-permission")),
    (4, CONTAINER, True, REFUSED, ("sidecar-gpu-access", "no-permission")),
    (4, CONTAINER, True, REFUSED | BEFORE, ("device-access-lost", "revoked")),
    (17, HOST, False, {}, ("driver-blocked", "blocked-by-os")),
    (17, CONTAINER, True, {}, ("driver-blocked", "blocked-by-os")),
    (18, HOST, True, {}, ("driver-library-mismatch", "refused")),
    (18, CONTAINER, True, {"library_version": "580.65.06"}, ("driver-library-mismatch", "refused")),
    (18, CONTAINER, False, {}, ("driver-library-mismatch", "refused")),
    (999, CONTAINER, True, REFUSED | BEFORE, ("device-access-lost", "revoked")),
    (999, CONTAINER, True, REFUSED, ("device-access-lost", "refused")),
    (999, HOST, True, REFUSED, ("device-access-lost", "refused")),
    (999, CONTAINER, True, BEFORE, ("nvml-init-failed", "init")),
    (999, CONTAINER, True, REFUSED | {"device_present": False}, ("nvml-init-failed", "init")),
    (999, HOST, False, {}, ("nvml-init-failed", "init")),
    (999, HOST, True, {"library_version": "580.65.06"}, ("driver-library-mismatch", "versions-differ")),
    (13, HOST, True, {}, ("nvml-init-failed", "init")),
    (15, HOST, True, {}, ("nvml-init-failed", "init")),
    (1, HOST, True, {"call": "nvmlDeviceGetCount"}, ("nvml-init-failed", "session")),
    (9, HOST, False, {"call": "nvmlDeviceGetCount"}, ("driver-not-loaded", "not-loaded")),
]


@pytest.mark.parametrize(("code", "placement", "module", "more", "expected"), TABLE)
def test_one_cause(
    code: int, placement: Placement, module: bool, more: dict[str, Any], expected: tuple[str, str]
) -> None:
    """Each failure has exactly one cause, told by NVML's code, the placement and /proc.

    Cases 1, 2, 8, 9, 10: pando85/homelab#4110, NVIDIA/nvidia-docker#1730, GoogleCloudPlatform/
    compute-gpu-installation#18, NVIDIA/k8s-device-plugin#440, bottlerocket-os/bottlerocket#3718.
    """
    facts = failed(code, module=module, **more)
    found = judged(facts, placement)
    cause, reason = expected
    assert active(found) == {cause: reason}
    assert found[cause].final is (code in (9, 12, 15, 18))
    assert str(code) in " ".join((found[cause].message, *found[cause].evidence))
    assert found["gpu-lost"].status is Status.UNKNOWN


@pytest.mark.parametrize("placement", list(Placement))
def test_healthy(placement: Placement) -> None:
    """With a healthy driver every condition is judged and fine."""
    found = judged(HEALTHY, placement)
    assert (active(found), unknown(found)) == ({}, {})


@pytest.mark.parametrize("code", [12, 9, 4])
def test_without_access_the_driver_is_unknown(code: int) -> None:
    """A container without access says nothing of the server's driver: unknown, neither fine nor broken.

    Case 9: NVIDIA/nvidia-container-toolkit#154.
    """
    found = judged(failed(code), CONTAINER)
    others = set(CODES) - {"sidecar-gpu-access", "driver-hung"}
    assert unknown(found) == dict.fromkeys(others, "no-gpu-access")


def test_what_comes_after_a_missing_library_is_unknown() -> None:
    """Without a library nothing about the driver can be judged."""
    found = judged(failed(12, module=False))
    assert unknown(found) == dict.fromkeys(
        set(CODES) - {"nvml-library-missing", "sidecar-gpu-access", "driver-hung"}, "not-reached"
    )


def test_what_comes_before_the_cause_is_fine() -> None:
    """A driver that is not loaded proves that the library is there; whether versions agree is not known."""
    found = judged(failed(9, module=False))
    assert found["nvml-library-missing"].status is Status.FALSE
    assert unknown(found) == {"driver-library-mismatch": "not-reached", "gpu-lost": "not-reached"}


def test_no_gpu_in_a_container() -> None:
    """NVML that shows none of the node's GPUs to a container is lack of access, not lack of GPUs."""
    found = judged(replace(HEALTHY, count=0, gpus=()), CONTAINER)
    assert active(found) == {"sidecar-gpu-access": "no-gpus"}
    assert unknown(found) == {"gpu-lost": "no-gpu-access"}
    assert "0 of the 2 GPUs" in found["sidecar-gpu-access"].message


@pytest.mark.parametrize(
    ("placement", "listed"), [(HOST, 2), (CONTAINER, 0), (CONTAINER, None)], ids=["host", "none-listed", "no-proc"]
)
def test_no_gpu_elsewhere(placement: Placement, listed: int | None) -> None:
    """No visible GPU is not lack of access on a host, nor where /proc lists none."""
    assert active(judged(replace(HEALTHY, count=0, gpus=(), module_gpus=listed), placement)) == {}


def test_mismatch_names_both_versions() -> None:
    """Both versions are in the message, also where NVML itself did not complain (case 1: oddmario's guide #4)."""
    for facts in (
        failed(18, module_version="570.124.04", library_version="570.124.06"),
        replace(HEALTHY, module_version="570.124.04", library_version="570.124.06"),
    ):
        finding = judged(facts)["driver-library-mismatch"]
        assert finding.status is Status.TRUE
        assert "570.124.04" in finding.message
        assert "570.124.06" in finding.message


@pytest.mark.parametrize("field", ["module_version", "library_version"])
def test_one_unknown_version_is_no_mismatch(field: str) -> None:
    """Versions are compared only when both are known."""
    assert active(judged(replace(HEALTHY, **{field: None}))) == {}


def test_access_lost_while_the_session_lives() -> None:
    """The worker keeps what it had opened, so a refused node counts although NVML still answers.

    Case 2: NVIDIA/nvidia-container-toolkit#48.
    """
    found = judged(replace(HEALTHY, device_refused=True), CONTAINER)
    assert active(found) == {"device-access-lost": "revoked"}
    assert "still works" in found["device-access-lost"].message


def test_lost_gpu() -> None:
    """A lost GPU is named, at once, as a warning that gates nothing while the server's GPUs are not known.

    Cases 3 and 10: NVIDIA/open-gpu-kernel-modules#1151, NVIDIA/k8s-device-plugin#605.
    """
    finding = judged(replace(HEALTHY, gpus=(gpu(0), gpu(1, code=15, words="GPU is lost"))))["gpu-lost"]
    assert (finding.status, finding.reason, finding.final) == (Status.TRUE, "lost", True)
    assert (finding.severity, finding.gate) == (Severity.WARNING, Gate.NEVER)
    assert finding.gpus == (("1", "GPU-1"),)
    assert "GPU-1" in finding.message
    assert (CODES["gpu-lost"].severity, CODES["gpu-lost"].gate) == (Severity.CRITICAL, Gate.SERVING)


@pytest.mark.parametrize("code", [2, 4, 16, 999, "binding-error"])
def test_unreachable_gpu(code: int | str) -> None:
    """A GPU that cannot be addressed is unreachable, with the code in the message, and takes effect with hold."""
    finding = judged(replace(HEALTHY, gpus=(gpu(0, code=code, uuid=None), gpu(1))))["gpu-lost"]
    assert (finding.reason, finding.final, finding.gpus) == ("unreachable", False, (("0", ""),))
    assert str(code) in finding.message


def test_field_errors_are_no_fault() -> None:
    """Values that a GPU in MIG mode refuses make no condition (case 7: NVIDIA/nvidia-container-toolkit#842)."""
    parent = gpu(0, mig=True, memory_used=None, memory_total=None, errors={"nvmlDeviceGetMemoryInfo": 4})
    assert active(judged(replace(HEALTHY, gpus=(parent, gpu(1))))) == {}


def test_remedy_names_the_version() -> None:
    """Where the loaded kernel module tells, the remedy for a missing library names the exact version."""
    remedy = judged(failed(12), HOST)["nvml-library-missing"].remedy
    assert remedy is not None
    assert "580.159.04" in remedy
    assert "libnvidia-compute-580" in remedy


def test_evidence_shows_what_the_container_was_given() -> None:
    """The container's NVIDIA variables are part of the evidence (case 9: NVIDIA/nvidia-docker#1301)."""
    evidence = judged(failed(12, visible_devices="void"), CONTAINER)["sidecar-gpu-access"].evidence
    assert "NVIDIA_VISIBLE_DEVICES: void" in evidence
    assert "NVIDIA_DRIVER_CAPABILITIES: not set" in evidence


HANG: dict[str, Any] = {
    "outcome": Outcome.TIMEOUT,
    "where": "nvmlDeviceGetCount",
    "failing_since": NOW - 90,
    "detail": "NVML did not return.",
}


def test_hung() -> None:
    """A hanging driver is active at once, says where and since when; without facts the rest is unknown.

    Case 4: leptonai/gpud#117.
    """
    found = judged(None, **HANG)
    assert active(found) == {"driver-hung": "deadline"}
    assert unknown(found) == dict.fromkeys(set(CODES) - {"driver-hung"}, "driver-hung")
    message = found["driver-hung"].message
    assert "nvmlDeviceGetCount" in message
    assert "2025-06-15T15:06:50Z, 90 s ago" in message
    assert found["driver-hung"].final is False


def test_hung_with_living_facts() -> None:
    """While what was known before is recent enough, it still decides the other conditions."""
    found = judged(HEALTHY, **HANG)
    assert (active(found), unknown(found)) == ({"driver-hung": "deadline"}, {})
    assert set(active(judged(failed(18), **HANG))) == {"driver-hung", "driver-library-mismatch"}


def test_hung_beyond_killing() -> None:
    """A worker that cannot be killed is said to be so (case 4: NVIDIA/NVSentinel#1574)."""
    finding = judged(None, stuck=True, **HANG)["driver-hung"]
    assert finding.reason == "unkillable"
    assert "cannot be killed" in finding.message


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(Outcome.PENDING, "pending"), (Outcome.CRASHED, "probe-crashed"), (Outcome.ERROR, "probe-error")],
)
def test_without_facts_everything_is_unknown(outcome: Outcome, reason: str) -> None:
    """A probe that has no facts judges nothing, and says why."""
    assert unknown(judged(None, outcome=outcome)) == dict.fromkeys(CODES, reason)


def test_a_crash_does_not_outweigh_living_facts() -> None:
    """One crash of the worker changes nothing while the facts of the last success live."""
    found = judged(HEALTHY, outcome=Outcome.CRASHED)
    assert (active(found), unknown(found)) == ({}, {})


# -- declarations -----------------------------------------------------------------------------------

DECLARED = {
    "nvml-library-missing": (Severity.CRITICAL, Gate.LAUNCH),
    "driver-not-loaded": (Severity.CRITICAL, Gate.SERVING),
    "sidecar-gpu-access": (Severity.WARNING, Gate.NEVER),
    "driver-library-mismatch": (Severity.CRITICAL, Gate.LAUNCH),
    "device-access-lost": (Severity.WARNING, Gate.NEVER),
    "device-permission": (Severity.CRITICAL, Gate.LAUNCH),
    "driver-blocked": (Severity.CRITICAL, Gate.LAUNCH),
    "nvml-init-failed": (Severity.CRITICAL, Gate.LAUNCH),
    "driver-hung": (Severity.CRITICAL, Gate.NEVER),
    "gpu-lost": (Severity.CRITICAL, Gate.SERVING),
}


def test_declared_weight() -> None:
    """Severity and gate of each condition are the public ones; all concern users of GPUs only."""
    assert {kind.code: (kind.severity, kind.gate) for kind in CONDITIONS} == DECLARED
    assert {kind.uses for kind in CONDITIONS} == {Feature.GPU}


def test_names_refer_to_declared_codes() -> None:
    """Dependencies and the feature cuda name codes that exist."""
    named = {code for kind in CONDITIONS for code in kind.depends_on} | set(PROBE.requirable["cuda"])
    assert named <= set(CODES)


# -- publish ----------------------------------------------------------------------------------------


def series(facts: NvmlReading) -> dict[tuple[str, ...], float]:
    """Key samples by (family, *labels); check that each is declared, with that many labels, and unique."""
    labels = {family.name: len(family.labels) for family in FAMILIES}
    found = list(samples(facts))
    assert all(len(sample.labels) == labels[sample.family] for sample in found)
    unique = {(sample.family, *sample.labels): sample.value for sample in found}
    assert len(unique) == len(found)
    return unique


def test_samples() -> None:
    """A healthy round gives every family once per GPU or once, in base units."""
    found = series(replace(HEALTHY, gpus=HEALTHY.gpus[:1], count=1))
    assert found == {
        ("nvml_up",): 1,
        ("nvml_return_code",): 0,
        ("driver_info", "580.159.04", "580.159.04", "open", "13.0", "13.580.159.04"): 1,
        ("gpus_visible",): 1,
        ("gpu_info", "0", "GPU-0", "NVIDIA H200", "9.0", "disabled"): 1,
        ("gpu_up", "0", "GPU-0"): 1,
        ("gpu_memory_used_bytes", "0", "GPU-0"): 644939776,
        ("gpu_memory_total_bytes", "0", "GPU-0"): 150754820096,
        ("gpu_temperature_celsius", "0", "GPU-0"): 38,
        ("gpu_power_watts", "0", "GPU-0"): pytest.approx(78.786),
        ("gpu_utilization_ratio", "0", "GPU-0"): 0.25,
    }
    assert {key[0] for key in found} == {family.name for family in FAMILIES}


def test_samples_of_a_failed_round() -> None:
    """What is not known has no series: no count of GPUs, and no driver_info when no version is known."""
    assert series(failed(12, module=False)) == {("nvml_up",): 0, ("nvml_return_code",): 12}
    assert ("driver_info", "", "580.159.04", "open", "", "13.580.159.04") in series(failed(9))


def test_samples_of_a_lost_gpu() -> None:
    """A lost GPU is down and has no values, under the uuid that it had."""
    lost = GpuReading(index=1, code=15, uuid="GPU-1")
    found = series(replace(HEALTHY, gpus=(gpu(0), lost)))
    assert {key: value for key, value in found.items() if key[1:2] == ("1",)} == {("gpu_up", "1", "GPU-1"): 0}


def test_identity() -> None:
    """The identity has the known items only; models are sorted and unique."""
    assert identity(HEALTHY) == {
        "driver": "580.159.04",
        "kernel_module": "580.159.04",
        "cuda_driver": "13.0",
        "gpu_model": "NVIDIA H200",
    }
    mixed = replace(HEALTHY, gpus=(gpu(0), gpu(1, name="NVIDIA A100"), gpu(2)))
    assert identity(mixed)["gpu_model"] == "NVIDIA A100, NVIDIA H200"
    assert identity(failed(9)) == {"kernel_module": "580.159.04"}


def test_identity_with_an_unknown_model() -> None:
    """A GPU that does not tell its name makes the list of models unknown, not shorter."""
    assert "gpu_model" not in identity(replace(HEALTHY, gpus=(gpu(0, name="NVIDIA A100"), gpu(1, name=None))))


def test_report() -> None:
    """The report's sections are JSON of the declared shape."""
    data = json.loads(msgspec.json.encode(report(HEALTHY)))
    driver = msgspec.convert(data["driver"], DriverSection)
    gpus = msgspec.convert(data["gpus"], PROBE.sections["gpus"])
    assert (driver.driver_version, driver.kernel_module, driver.gpus_on_node) == ("580.159.04", "open", 2)
    assert [one.uuid for one in gpus] == ["GPU-0", "GPU-1"]
    assert isinstance(gpus[0], GpuSection)
    assert gpus[0].memory_total_bytes == 150754820096


def test_report_of_a_failed_round() -> None:
    """Where NVML could not list the GPUs the report says null, which is not an empty list."""
    found = report(failed(9))
    assert found["gpus"] is None
    assert (found["driver"].return_code, found["driver"].failed_call) == (9, "nvmlInit")
