"""The whole agent on machines whose driver is missing, unloaded, hidden, healthy or hung."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.fakes import agent
from tests.fakes.debian import download
from tests.fakes.nvml import Scenario, build


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has an NVIDIA library of its own"
)
def test_no_library_and_no_server(tmp_path: Path, closed_port: str) -> None:
    """Code 12 names nvml-library-missing, gates while nobody answers, and a check exits with 2.

    NVIDIA/nvidia-container-toolkit#154
    """
    arguments = ("--server-url", closed_port)
    with agent.serve(tmp_path / "log", *arguments) as served:
        served.until("nvml_return_code", 12)
        assert served.value("nvml_up") == 0
        assert served.value("condition_active", code="nvml-library-missing", severity="critical") == 1
        served.until("ready", 0)
        status, text = served.get("/readyz")
        assert status == 503
        assert "[-]driver failed: nvml-library-missing" in text
        assert served.get("/readyz/nvml-library-missing")[0] == 503
        assert served.get("/livez") == (200, "ok\n")
        assert served.stop()[0] == 0
    checked = agent.run("check", "--no-import", *arguments)
    assert checked.returncode == 2
    assert checked.stdout.startswith("critical: nvml-library-missing")


def test_a_server_that_answers_lifts_the_launch_gate(tmp_path: Path) -> None:
    """With any answer on the server's address, a launch condition stays active but gates nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        env = {"LD_LIBRARY_PATH": str(tmp_path)}
        (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
        with agent.serve(tmp_path / "log", "--server-url", url, "--intervals", "server=1", env=env) as served:
            served.until("condition_active", 1, code="nvml-library-missing")
            served.until("ready", 1)
            assert served.get("/readyz")[0] == 200
            assert served.get("/readyz/driver")[0] == 503
            listener.close()
            served.until("ready", 0)


@pytest.fixture(scope="session")
def real_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVIDIA's own NVML library, from Debian's non-free component."""
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver, which answers for itself")
    folder = tmp_path_factory.mktemp("libnvidia-ml1")
    try:
        download("libnvidia-ml1", folder)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"NVIDIA's library could not be fetched from Debian's non-free component: {error}")
    library = next(folder.rglob("libnvidia-ml.so.1"))
    return library.parent


@pytest.fixture
def no_node_left_behind() -> object:
    """As root NVIDIA's library creates /dev/nvidiactl; a test must not leave it."""
    nodes = [Path("/dev/nvidiactl"), Path("/dev/nvidia-caps")]
    before = {node for node in nodes if node.exists()}
    yield
    for node in nodes:
        if node not in before and node.exists() and not node.is_dir():
            node.unlink()


@pytest.mark.usefixtures("no_node_left_behind")
def test_the_real_library_without_a_driver(tmp_path: Path, real_library: Path, closed_port: str) -> None:
    """NVIDIA's library on a machine without a driver says 9: driver-not-loaded.

    GoogleCloudPlatform/compute-gpu-installation#18
    """
    env = {"LD_LIBRARY_PATH": str(real_library)}
    with agent.serve(tmp_path / "log", "--server-url", closed_port, env=env) as served:
        served.until("nvml_return_code", 9)
        assert served.value("condition_active", code="driver-not-loaded", severity="critical") == 1
        assert served.value("condition_active", code="nvml-library-missing", severity="critical") in (0, None)
        assert "[-]driver failed: driver-not-loaded" in served.get("/readyz")[1]
    assert agent.run("check", "--no-import", "--server-url", closed_port, env=env).returncode == 2


def test_a_healthy_driver(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """Two healthy GPUs: values on /metrics, nothing active, a check that exits with 0."""
    scenario = Scenario(tmp_path / "scenario", gpus=2)
    env = scenario.environ(fake_library)
    with agent.serve(tmp_path / "log", "--server-url", closed_port, env=env) as served:
        served.until("gpus_visible", 2)
        assert served.value("nvml_up") == 1
        assert served.value("nvml_return_code") == 0
        assert served.value("driver_info", driver_version="580.159.04", cuda_driver_version="13.0") == 1
        assert [labels["name"] for labels in served.labels("gpu_info")] == ["NVIDIA H200"] * 2
        served.until("ready", 1)
        active = [labels for labels in served.labels("condition_active") if served.value("condition_active", **labels)]
        assert [labels for labels in active if labels["severity"] != "info"] == []


def test_a_driver_that_hangs(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """A call that never returns: everything keeps answering, driver-hung says where, and SIGTERM ends it at once.

    leptonai/gpud#117
    """
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    env = scenario.environ(fake_library)
    arguments = ("--server-url", closed_port, "--intervals", "driver=1", "--deadlines", "driver=1")
    with agent.serve(tmp_path / "log", *arguments, env=env) as served:
        served.until("ready", 1)
        ready_before = served.get("/readyz")[0]
        scenario.set({"nvmlDeviceGetCount": "hang"})
        served.until("condition_active", 1, code="driver-hung")
        for path in ("/metrics", "/livez", "/report"):
            begun = time.monotonic()
            assert served.get(path)[0] == 200
            assert time.monotonic() - begun < 1
        (hung,) = [c for c in served.report()["conditions"] if c["code"] == "driver-hung"]
        assert "nvmlDeviceGetCount" in hung["message"]
        assert served.get("/readyz")[0] == ready_before == 200
        time.sleep(3)
        assert served.get("/readyz")[0] == 200
        kids = agent.children(served.process.pid)
        assert len(kids) <= 1
        code, seconds = served.stop()
        assert code == 0
        assert seconds < 2
        assert [pid for pid in kids if agent.running(pid)] == []


def test_a_driver_that_hangs_from_the_start_and_comes_back(
    tmp_path: Path, fake_library: Path, closed_port: str
) -> None:
    """Hung before any success: readiness waits for the deadline only, and recovery needs no restart."""
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    scenario.set({"nvmlDeviceGetCount": "hang"})
    env = scenario.environ(fake_library)
    arguments = ("--server-url", closed_port, "--intervals", "driver=1", "--deadlines", "driver=1")
    with agent.serve(tmp_path / "log", *arguments, env=env) as served:
        served.until("condition_active", 1, code="driver-hung")
        served.until("ready", 1)
        scenario.set({"nvmlDeviceGetCount": None})
        served.until("condition_active", 0, code="driver-hung")
        served.until("nvml_up", 1)


def test_logs_are_one_json_object_a_line_and_only_transitions(
    tmp_path: Path, fake_library: Path, closed_port: str
) -> None:
    """Every line parses (hynek/structlog#360), and rounds in which nothing changes are silent."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    arguments = ("--server-url", closed_port, "--intervals", "driver=0.2,server=0.2")
    with agent.serve(tmp_path / "log", *arguments, env=env) as served:
        served.until("ready", 1)
        time.sleep(2)
        before = len(served.log.splitlines())
        time.sleep(2)
        served.scrape()
        assert (served.value("probe_runs_total", probe="driver", outcome="ok") or 0) > 5
        assert len(served.log.splitlines()) == before
        served.stop()
        events = [json.loads(line)["event"] for line in served.log.splitlines()]
        assert events[0] == "listening"
        assert events[-1] == "stopping"


def test_inherited_multiprocess_directory_is_left_alone(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """The server's metrics directory in the environment changes nothing.

    prometheus/client_python#1015
    """
    folder = tmp_path / "multiproc"
    folder.mkdir()
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library) | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    with agent.serve(tmp_path / "log", "--server-url", closed_port, env=env) as served:
        served.until("nvml_up", 1)
        assert served.value("process_resident_memory_bytes") is not None
    assert os.listdir(folder) == []


def test_a_driver_that_goes_and_comes(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """Unloaded, replaced and back again under a running agent: two rounds later the one right condition is active."""
    scenario = Scenario(tmp_path / "scenario", gpus=2)
    library = tmp_path / "library"
    shutil.copytree(fake_library, library, symlinks=True)
    arguments = ("--server-url", closed_port, "--placement", "host", "--intervals", "driver=0.5")
    with agent.serve(tmp_path / "log", *arguments, env=scenario.environ(library)) as served:
        served.until("nvml_up", 1)
        _two_rounds(served)
        assert _driver_causes(served) == []
        generation = 0
        for code, cause in (
            (9, "driver-not-loaded"),
            (18, "driver-library-mismatch"),
            (0, None),
            (17, "driver-blocked"),
            (0, None),
            (999, "nvml-init-failed"),
            (9, "driver-not-loaded"),
            (0, None),
        ):
            generation += 1
            scenario.set({"nvmlInit": code or None}, driver_generation=generation)
            _two_rounds(served)
            assert _driver_causes(served) == ([cause] if cause else []), (code, served.log)
        # Another driver is installed: the library file is replaced under the running worker.
        build(library, version="590.44.01")
        scenario.set(driver_version="590.44.01", driver_generation=generation + 1)
        _two_rounds(served)
        assert served.value("driver_info", driver_version="590.44.01") == 1
        assert len(served.labels("driver_info")) == 1
        for library_file in library.glob("libnvidia-ml.so*"):
            library_file.unlink()
        _two_rounds(served)
        assert _driver_causes(served) == ["nvml-library-missing"]
        build(library)
        scenario.set(driver_version="580.159.04", driver_generation=generation + 2)
        served.until("nvml_up", 1)
        assert _driver_causes(served) == []


def _two_rounds(served: agent.Served) -> None:
    """Wait until two rounds that began from now on have been published."""
    served.scrape()
    wanted = (served.value("probe_runs_total", probe="driver", outcome="ok") or 0) + 3
    end = time.monotonic() + 20
    while (served.value("probe_runs_total", probe="driver", outcome="ok") or 0) < wanted:
        assert time.monotonic() < end, served.log
        time.sleep(0.05)
        served.scrape()


def _driver_causes(served: agent.Served) -> list[str]:
    return [
        condition["code"]
        for condition in served.report()["conditions"]
        if condition["active"] and condition["probe"] == "driver" and condition["severity"] != "info"
    ]
