"""The whole agent on machines whose GPUs fail: what its users see on /metrics, /readyz and /report."""

from __future__ import annotations

import gzip
import time
import urllib.request
from pathlib import Path

import pytest

from tests.fakes import agent
from tests.fakes.nvml import Scenario


def uuid(index: int) -> str:
    """The fake's uuid of a GPU."""
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


# A port that nobody listens on: the state of the server is not what these tests are about.
FAST = ("--server-url", "http://127.0.0.1:9", "--placement", "host", "--intervals", "driver=0.3")


def test_a_gpu_of_the_server_is_lost_and_comes_back(tmp_path: Path, fake_library: Path) -> None:
    """A lost GPU of the server makes the pod unready by name, one of a neighbour does not; recovery needs no restart.

    NVIDIA/open-gpu-kernel-modules#1151, NVIDIA/k8s-device-plugin#605
    """
    scenario = Scenario(tmp_path / "scenario", gpus=8)
    env = scenario.environ(fake_library)
    with agent.serve(tmp_path / "log", *FAST, "--gpus", f"0,{uuid(1)}", "--gpu-detail", "true", env=env) as served:
        served.until("ready", 1)
        assert served.value("gpus_expected") == served.value("gpus_in_scope") == 2
        assert served.value("gpus_visible") == 8
        assert served.value("gpu_pcie_link_generation_max", gpu="0") == 5

        scenario.set({"nvmlDeviceGetTemperature@5": 15})
        served.until("condition_active", 1, code="gpu-lost", severity="warning")
        assert served.value("gpu_condition_active", code="gpu-lost", gpu="5", uuid=uuid(5)) == 1
        assert served.value("ready") == 1

        scenario.set({"nvmlDeviceGetHandleByIndex@1": 15})
        served.until("condition_active", 1, code="gpu-lost", severity="critical")
        served.until("ready", 0)
        status, text = served.get("/readyz")
        assert (status, "[-]driver failed: gpu-lost" in text) == (503, True)
        assert served.value("gpu_up", gpu="1") == 0
        assert served.value("gpu_temperature_celsius", gpu="0") == 38
        report = served.report()
        assert [gpu["in_scope"] for gpu in report["gpus"]] == [True, True, *[False] * 6]
        assert (report["gpu_set"]["source"], report["gpu_set"]["expected_source"]) == ("setting", "gpu-set")

        scenario.set({"nvmlDeviceGetHandleByIndex@1": None, "nvmlDeviceGetTemperature@5": None})
        served.until("ready", 1)
        served.until("gpu_up", 1, gpu="1")


def test_an_xid_is_counted_dated_and_judged(tmp_path: Path, fake_library: Path) -> None:
    """An application's Xid is counted only; one of broken hardware is an alert; neither makes the pod unready.

    leptonai/gpud#108
    """
    scenario = Scenario(tmp_path / "scenario", gpus=2)
    with agent.serve(tmp_path / "log", *FAST, "--gpus", "0,1", env=scenario.environ(fake_library)) as served:
        served.until("condition_active", 0, code="xid-critical")
        begun = time.time()
        scenario.set({"xid@0": 31, "xid_sequence": 1})
        served.until("gpu_xid_errors_total", 1, gpu="0", xid="31")
        last = served.value("gpu_xid_last_timestamp_seconds", gpu="0", xid="31")
        assert last is not None
        assert begun - 1 <= last <= time.time() + 1
        assert served.value("condition_active", code="xid-critical") == 0
        scenario.set({"xid@0": 48, "xid_sequence": 2})
        served.until("condition_active", 1, code="xid-critical")
        assert served.value("condition_active", code="xid-warning") == 0
        assert served.value("ready") == 1
        assert {one["xid"]: one["kind"] for one in served.report()["driver"]["xids"]} == {
            31: "application",
            48: "hardware",
        }


@pytest.mark.parametrize(("detail", "series", "kib"), [("false", 340, 40), ("true", 440, 52)])
def test_the_budget_of_eight_gpus(tmp_path: Path, fake_library: Path, detail: str, series: int, kib: int) -> None:
    """A scrape of a node with eight GPUs stays within the documented number of series and bytes."""
    env = Scenario(tmp_path / "scenario", gpus=8).environ(fake_library)
    with agent.serve(tmp_path / "log", *FAST, "--gpu-detail", detail, env=env) as served:
        served.until("gpus_visible", 8)
        served.until("probe_success", 1, probe="packages")
        served.until("gpu_nvlink_links", 18 if detail == "true" else None, gpu="7")
        with urllib.request.urlopen(served.url + "/metrics", timeout=5) as response:
            body = response.read()
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
        assert len(lines) <= series
        assert len(body) <= kib * 1024


def test_a_check_before_the_launch_fails_on_a_broken_gpu(tmp_path: Path, fake_library: Path) -> None:
    """In a preflight the visible GPUs are the server's: a lost one ends the check as critical, and it is named."""
    scenario = Scenario(tmp_path / "scenario", gpus=2)
    scenario.set({"nvmlDeviceGetHandleByIndex@1": 15})
    env = scenario.environ(fake_library)
    launch = ("--", "--model-path", "model", "--tp-size", "2")
    checked = agent.run("check", "--no-import", "--placement", "host", *launch, env=env)
    assert checked.returncode == 2
    assert checked.stdout.startswith("critical: this launch would fail: gpu-lost: GPU 1 ")
    scenario.set({"nvmlDeviceGetHandleByIndex@1": None, "gpus": 1})
    checked = agent.run("check", "--no-import", "--placement", "host", *launch, env=env)
    assert checked.returncode == 2
    assert checked.stdout.startswith(
        "critical: this launch would fail: gpu-missing: The server was given 1 GPU and needs 2"
    )
