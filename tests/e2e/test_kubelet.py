"""The agent as a kubelet sees it: probes with its rules, under load, with a broken driver, at the start and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes import agent
from tests.fakes.kubelet import Kubelet, ask, idle_connection
from tests.fakes.load import load
from tests.fakes.nvml import Scenario

ALONE = ("--processes", "hidden", "--image", "own")
"""Whatever else runs on this machine is no business of these tests."""
FAST = ("--intervals", "driver=0.5", "--deadlines", "driver=1")
SCRAPERS = ("--scrapers", "100", "--one-shot", "100", "--pause", "1")


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Print how many probes there were and how long they took, whatever becomes of the rest of the output."""

    def write(what: str, **probes: Kubelet) -> None:
        counts = [
            f"{name} {len(one.attempts)} probes, {len(one.failed())} failed, "
            f"slowest {1000 * max(attempt.seconds for attempt in one.attempts):.0f} ms"
            for name, one in probes.items()
        ]
        with capsys.disabled():
            sys.stdout.write(f"\nkubelet, {what}: {'; '.join(counts)}\n")

    return write


def test_a_hung_driver_under_load(
    tmp_path: Path, fake_library: Path, closed_port: str, tell: Callable[..., None]
) -> None:
    """While 200 scrape and the driver hangs, every probe passes within its second, and the condition is there.

    Case 46, NVIDIA/dcgm-exporter#393
    """
    scenario = Scenario(tmp_path / "scenario", gpus=8)
    env = scenario.environ(fake_library)
    with agent.serve(tmp_path / "log", "--server-url", closed_port, *ALONE, *FAST, env=env) as served:
        served.until("ready", 1)
        with (
            load(served.url, *SCRAPERS) as counted,
            Kubelet(served.url + "/readyz", initially=False, period=0.25) as ready,
            Kubelet(served.url + "/livez", initially=True, period=0.25) as live,
        ):
            ready.until(True)
            scenario.set({"nvmlDeviceGetCount": "hang"})
            served.until("condition_active", 1, code="driver-hung", severity="critical")
            time.sleep(5)
            served.scrape()
            assert served.value("condition_active", code="driver-hung", severity="critical") == 1
            assert served.value("ready") == 1
        tell(f"driver hung, {counted['scrapes']} scrapes beside it", readyz=ready, livez=live)
        assert ready.failed() == []
        assert live.failed() == []
        assert (ready.success, live.success) == (True, True)
        assert min(len(ready.attempts), len(live.attempts)) > 10
        assert counted["scrapes"] > 200
        assert "refused" not in counted


def test_a_driver_that_is_gone_and_back_under_load(
    tmp_path: Path, fake_library: Path, closed_port: str, tell: Callable[..., None]
) -> None:
    """Readiness fails every time while the driver is not loaded, passes every time after, and liveness throughout."""
    scenario = Scenario(tmp_path / "scenario", gpus=2)
    env = scenario.environ(fake_library)
    arguments = ("--server-url", closed_port, "--placement", "host", *ALONE, *FAST)
    with agent.serve(tmp_path / "log", *arguments, env=env) as served:
        served.until("ready", 1)
        with (
            load(served.url, *SCRAPERS),
            Kubelet(served.url + "/readyz", initially=False, period=0.25) as ready,
            Kubelet(served.url + "/livez", initially=True, period=0.25) as live,
        ):
            ready.until(True)
            scenario.set({"nvmlInit": 9}, driver_generation=1)
            served.until("ready", 0)
            gone = time.monotonic()
            ready.until(False)
            time.sleep(1)
            back = time.monotonic()
            assert ready.passed(since=gone) == []
            assert {attempt.answer for attempt in ready.failed(since=gone)} == {503}
            scenario.set({"nvmlInit": None}, driver_generation=2)
            served.until("ready", 1)
            again = time.monotonic()
            ready.until(True)
            time.sleep(1)
        assert again > back
        tell("driver gone and back (readyz must fail while it is gone)", readyz=ready, livez=live)
        assert ready.failed(since=again) == []
        assert [success for _, success in ready.results] == [True, False, True]
        assert live.failed() == []


def test_readiness_fails_from_the_start_where_the_driver_is_not_loaded(
    tmp_path: Path, fake_library: Path, closed_port: str
) -> None:
    """No probe passes before the first round is over, nor after it: there is no moment of false readiness."""
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    scenario.set({"nvmlInit": 9})
    env = scenario.environ(fake_library)
    arguments = ("--server-url", closed_port, "--placement", "host", *ALONE, *FAST)
    with (
        agent.serve(tmp_path / "log", *arguments, env=env) as served,
        Kubelet(served.url + "/readyz", initially=False, period=0.02) as ready,
    ):
        served.until("condition_active", 1, code="driver-not-loaded")
        time.sleep(1)
    assert ready.passed() == []
    assert {attempt.answer for attempt in ready.attempts} == {503}


@contextlib.contextmanager
def silent_server():
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("driver", [None, 9, 999, "hang"])
def test_the_start_without_a_server(tmp_path: Path, fake_library: Path, closed_port: str, driver: object) -> None:
    """/startupz passes within 5 s and /livez from the first moment, with no server and whatever the driver does.

    Case 53, NVIDIA/gpu-monitoring-tools#180
    """
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    scenario.set({"nvmlInit": driver})
    env = scenario.environ(fake_library)
    _starts(tmp_path / "log", closed_port, env)


def test_the_start_beside_a_server_that_is_silent(tmp_path: Path, fake_library: Path) -> None:
    """A server that accepts and does not answer, as while it loads, holds the start up no longer."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    with silent_server() as url:
        _starts(tmp_path / "log", url, env)


def _starts(log: Path, url: str, env: dict[str, str]) -> None:
    """See a start through: startup and liveness probes from the moment it listens."""
    with (
        agent.serve(log, "--server-url", url, *ALONE, env=env) as served,
        Kubelet(served.url + "/livez", initially=True, period=0.1, failure_threshold=1) as live,
        Kubelet(served.url + "/startupz", initially=False, period=0.1, failure_threshold=100) as startup,
    ):
        startup.until(True, seconds=6)  # the 5 s that are promised count from before it listens
        time.sleep(1)
        assert live.failed() == []
        assert startup.failed(since=startup.results[0][0]) == []
        assert {attempt.answer for attempt in startup.failed()} <= {503}
        assert served.process.poll() is None


def test_the_end_with_a_kept_connection(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """From SIGTERM on readiness answers 503, an idle client holds nothing up, and the status is 0.

    Case 51, aio-libs/aiohttp#3638
    """
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    with agent.serve(tmp_path / "log", "--server-url", closed_port, *ALONE, env=env) as served:
        served.until("ready", 1)
        with idle_connection(served.url) as idle, load(served.url, "--scrapers", "20", "--slow", "20"):
            served.process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            answers = []
            while served.process.poll() is None and time.monotonic() - begun < 20:
                answers.append(ask(served.url + "/readyz").answer)
            seconds = time.monotonic() - begun
            assert idle.recv(1) == b""
        assert served.process.wait(20) == 0
        assert seconds < 2
        refused = [answer for answer in answers if answer != 200]
        assert answers.index(503) <= 1, answers  # one may have been answered before the signal arrived
        assert 200 not in answers[answers.index(503) :]
        assert set(refused) <= {503, "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected"}


def test_a_frozen_process_is_not_alive(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """A process that is stopped fails its liveness after three time-outs, and passes again when it goes on."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    with agent.serve(tmp_path / "log", "--server-url", closed_port, *ALONE, env=env) as served:
        served.until("ready", 1)
        with (
            Kubelet(served.url + "/livez", initially=True, period=0.1, timeout=0.5) as live,
            Kubelet(served.url + "/readyz", initially=True, period=0.1, timeout=0.5) as ready,
        ):
            time.sleep(0.5)
            assert live.failed() == ready.failed() == []
            os.kill(served.process.pid, signal.SIGSTOP)
            frozen = time.monotonic()
            try:
                live.until(False)
                ready.until(False)
                assert live.passed(since=frozen + 0.1) == []
                assert {attempt.answer for attempt in live.failed()} == {"TimeoutError"}
            finally:
                os.kill(served.process.pid, signal.SIGCONT)
            live.until(True)
            ready.until(True)
            healed = time.monotonic()
            time.sleep(1)
            assert live.failed(since=healed) == ready.failed(since=healed) == []
        assert served.stop()[0] == 0
