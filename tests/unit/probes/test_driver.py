"""The driver probe: its judge as a table over codes, placement and /proc; its series, identity and report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

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
from sidecar.nvml.reading import NvmlReading
from sidecar.probes.driver import CONDITIONS, PROBE, health, identity, presence, report
from sidecar.probes.driver.sections import DriverSection, GpuSection
from tests.gpus import facts, gpu, reading

NOW = 1_750_000_100.0
HOST, CONTAINER = Placement.HOST, Placement.CONTAINER
CODES = {kind.code: kind for kind in CONDITIONS}
GPU_CODES = {kind.code for kind in (*presence.CONDITIONS, *health.CONDITIONS)}
NAMES = {
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    17: "The operating system has blocked the request.",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}
HEALTHY = reading()


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
    one: NvmlReading | None, placement: Placement = HOST, outcome: Outcome = Outcome.OK, **more: Any
) -> Mapping[str, Finding]:
    """Judge a reading of which nothing is remembered."""
    known = None if one is None else facts(one, highest=len(one.gpus))
    result = Result(probe="driver", outcome=outcome, facts=known, **more)
    findings = list(PROBE.judge(result, world(placement)))
    found = {finding.code: finding for finding in findings}
    assert len(found) == len(findings)
    assert set(found) == (set() if known is None and outcome is not Outcome.TIMEOUT else set(CODES))
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
    found = judged(failed(code, module=module, **more), placement)
    cause, reason = expected
    assert active(found) == {cause: reason}
    assert found[cause].final is (code in (9, 12, 15, 18))
    assert str(code) in " ".join((found[cause].message, *found[cause].evidence))
    assert {found[code].status for code in GPU_CODES} == {Status.UNKNOWN}


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
    assert unknown(found) == dict.fromkeys({"driver-library-mismatch", *GPU_CODES}, "not-reached")


def test_no_gpu_in_a_container() -> None:
    """NVML that shows none of the node's GPUs to a container is lack of access, not lack of GPUs."""
    found = judged(replace(HEALTHY, count=0, gpus=()), CONTAINER)
    assert active(found) == {"sidecar-gpu-access": "no-gpus"}
    assert unknown(found) == dict.fromkeys(GPU_CODES, "no-gpu-access")
    assert "0 of the 2 GPUs" in found["sidecar-gpu-access"].message


@pytest.mark.parametrize(
    ("placement", "listed"), [(HOST, 2), (CONTAINER, 0), (CONTAINER, None)], ids=["host", "none-listed", "no-proc"]
)
def test_no_gpu_elsewhere(placement: Placement, listed: int | None) -> None:
    """No visible GPU is not lack of access on a host, nor where /proc lists none; single GPUs cannot be judged."""
    found = judged(replace(HEALTHY, count=0, gpus=(), module_gpus=listed), placement)
    assert active(found) == {}
    assert unknown(found) == dict.fromkeys(GPU_CODES, "no-gpu")


def test_mismatch_names_both_versions() -> None:
    """Both versions are in the message, also where NVML itself did not complain (case 1: oddmario's guide #4)."""
    for one in (
        failed(18, module_version="570.124.04", library_version="570.124.06"),
        replace(HEALTHY, module_version="570.124.04", library_version="570.124.06"),
    ):
        finding = judged(one)["driver-library-mismatch"]
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
    assert (found["driver-hung"].final, found["driver-hung"].from_outcome) == (False, True)


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


@pytest.mark.parametrize("outcome", [Outcome.PENDING, Outcome.CRASHED, Outcome.ERROR, Outcome.OK])
def test_without_facts_nothing_is_said(outcome: Outcome) -> None:
    """A probe that has no facts leaves every condition to the judge, who says why it is unknown."""
    assert judged(None, outcome=outcome) == {}


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
    "gpu-missing": (Severity.CRITICAL, Gate.SERVING),
    "row-remap-failed": (Severity.CRITICAL, Gate.NEVER),
    "xid-critical": (Severity.CRITICAL, Gate.NEVER),
    "gpu-recovery-required": (Severity.CRITICAL, Gate.NEVER),
    "ecc-uncorrected": (Severity.CRITICAL, Gate.NEVER),
    "row-remap-pending": (Severity.WARNING, Gate.NEVER),
    "xid-warning": (Severity.WARNING, Gate.NEVER),
    "fabric-not-ready": (Severity.CRITICAL, Gate.LAUNCH),
    "nvlink-down": (Severity.WARNING, Gate.NEVER),
    "pcie-degraded": (Severity.WARNING, Gate.NEVER),
    "thermal-slowdown": (Severity.WARNING, Gate.NEVER),
    "vgpu-unlicensed": (Severity.WARNING, Gate.NEVER),
    "mig-unexpected": (Severity.WARNING, Gate.NEVER),
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


def test_identity() -> None:
    """The identity has the known items only; models are sorted and unique."""
    assert identity(facts(HEALTHY)) == {
        "driver": "580.159.04",
        "kernel_module": "580.159.04",
        "cuda_driver": "13.0",
        "gpu_model": "NVIDIA H200",
        "mig": "disabled",
    }
    mixed = replace(HEALTHY, gpus=(gpu(0), gpu(1, name="NVIDIA A100", mig=True), gpu(2)))
    found = identity(facts(mixed))
    assert (found["gpu_model"], found["mig"]) == ("NVIDIA A100, NVIDIA H200", "disabled, enabled")
    assert identity(facts(failed(9))) == {"kernel_module": "580.159.04"}


def test_identity_with_an_unknown_model() -> None:
    """A GPU that does not tell its name or its MIG mode makes that list unknown, not shorter."""
    assert "gpu_model" not in identity(facts(reading(gpu(0, name="NVIDIA A100"), gpu(1, name=None))))
    assert "mig" not in identity(facts(reading(gpu(0), gpu(1, mig=None))))


def test_report() -> None:
    """The report's sections are JSON of the declared shape."""
    data = json.loads(msgspec.json.encode(report(facts(HEALTHY))))
    driver = msgspec.convert(data["driver"], DriverSection)
    gpus = msgspec.convert(data["gpus"], PROBE.sections["gpus"])
    assert (driver.driver_version, driver.kernel_module, driver.gpus_on_node) == ("580.159.04", "open", 2)
    assert [one.uuid for one in gpus] == ["GPU-0", "GPU-1"]
    assert isinstance(gpus[0], GpuSection)
    assert gpus[0].memory_total_bytes == 150754820096


def test_report_of_a_failed_round() -> None:
    """Where NVML could not list the GPUs the report says null, which is not an empty list."""
    found = report(facts(failed(9)))
    assert found["gpus"] is None
    assert (found["driver"].return_code, found["driver"].failed_call) == (9, "nvmlInit")
