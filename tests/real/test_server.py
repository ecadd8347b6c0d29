"""A real SGLang server, on the CPU: found without being told, followed through its life, and left in peace.

Two starts of about two minutes each on two cores.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import agent
from tests.fakes.site import Site
from tests.real.conftest import FULL_SGLANG, Shelf, overlay, pip, row
from tests.real.model import tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

TABLE = "Beside a real server"
KEY = "key-of-the-real-server-5f1c"
START_LIMIT = 600.0
QUIET_MINUTES = 1.0
"""How long the server is left alone with the agent while our requests are counted."""
ACCESS = re.compile(r'"(GET|POST) (/\S*) HTTP')


@dataclass(slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    def requests(self) -> list[str]:
        """The paths that were asked for so far, by the server's own log."""
        return [path for _, path in ACCESS.findall(self.log.read_text(errors="replace"))]

    def stop(self) -> None:
        """End it with all its processes: its scheduler busies a core."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def server(site: Site, folder: Path, libcuda: Path, port: int) -> Iterator[Server]:
    """Start one and wait until it answers."""
    flags = f"--load-format dummy --skip-tokenizer-init --device cpu --attention-backend torch_native --port {port}"
    more = "--mem-fraction-static 0.1 --max-total-tokens 2048 --disable-overlap-schedule --skip-server-warmup"
    words = [site.python, "-m", "sglang.launch_server", "--model-path", str(tiny_model(folder)), *flags.split()]
    log = folder / f"server-{time.monotonic_ns()}.log"
    env = agent.environment(
        {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "LD_LIBRARY_PATH": str(libcuda), "SECRET_TOKEN": KEY}
    )
    env.pop("PYTHONPATH")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, *more.split(), "--api-key", KEY], env=env, stdout=output, stderr=output, start_new_session=True
        )
    one = Server(process=process, log=log, port=port)
    try:
        begun = time.monotonic()
        while not answers(port):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() - begun < START_LIMIT
            time.sleep(1)
        row(TABLE, "seconds until it answered", f"{time.monotonic() - begun:.0f}")
        yield one
    finally:
        one.stop()


def answers(port: int) -> bool:
    """Whether the server gives information about its model."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/model_info", headers={"Authorization": f"Bearer {KEY}"})
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(request, timeout=5).status == 200
    return False


def until(served: agent.Served, seconds: float, **wanted: Any) -> dict[str, Any]:
    """The report's ``server`` once it has these values."""
    end = time.monotonic() + seconds
    while True:
        found: dict[str, Any] = served.report()["server"] or {}
        if wanted.items() <= found.items():
            return found
        assert time.monotonic() < end, (wanted, {name: found.get(name) for name in wanted}, served.log[-2000:])
        time.sleep(0.5)


def active(served: agent.Served) -> dict[str, str]:
    """Conditions that hold, with their reasons."""
    return {one["code"]: one["reason"] for one in served.report()["conditions"] if one["status"] == "true"}


def roles(found: Mapping[str, Any]) -> set[str]:
    return {one["role"] for one in found["processes"]}


def everything(served: agent.Served) -> str:
    """All that the agent has served and logged."""
    paths = ("/metrics", "/report", "/", "/readyz?verbose", "/livez", "/startupz")
    return "\n".join(served.get(path)[1] for path in paths) + served.log


def test_a_real_server(full: Path, shelf: Shelf, libcuda: Path, tmp_path: Path, unused_tcp_port: int) -> None:
    """Found, described with and without the key, counted, watched through an upgrade, a stop and a new start."""
    site = overlay(full, tmp_path / "environment", without=("flashinfer*",))
    pip("--python", site.python, "install", "--no-deps", "flashinfer-python==0.6.14")
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    quick = ("--intervals", "server=2,attention=2,packages=5,flashinfer=5")
    without_key, with_key = tmp_path / "without.log", tmp_path / "with.log"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(server(site, tmp_path, libcuda, unused_tcp_port))
        with agent.serve(without_key, *quick, env={"HOME": str(tmp_path)}) as served:
            found = until(served, 60, state="unauthorized")
            assert (found["pid"], found["url"]) == (first.process.pid, f"http://127.0.0.1:{unused_tcp_port}")
            assert roles(found) >= {"main", "scheduler", "detokenizer"}
            assert "server-unauthorized" in active(served)
            phases = served.report()["attention"]
            told = [(phases[name]["declared"], phases[name]["resolved"], phases[name]["version"]) for name in PHASES]
            assert told == [("torch_native", None, 0)] * 2, "the command line tells what the server may not"
            assert KEY not in everything(served)
        counted = len(first.requests())
        with agent.serve(with_key, "--server-key-file", str(key), env={"HOME": str(tmp_path)}) as served:
            time.sleep(60 * QUIET_MINUTES)
            asked = first.requests()[counted:]
        row(TABLE, "requests per minute, intervals as configured", f"{len(asked) / QUIET_MINUTES:.1f}")
        assert asked.count("/server_info") == 1
        assert not {"/health", "/health_generate", "/generate"} & set(asked)
        assert len(asked) <= 8 * QUIET_MINUTES
        served = stack.enter_context(
            agent.serve(with_key, *quick, "--server-key-file", str(key), env={"HOME": str(tmp_path)})
        )
        found = until(served, 60, state="up", version=FULL_SGLANG, device="cpu")
        assert (found["pid"], found["scope"], found["python"]) == (first.process.pid, "server", site.python)
        phases = served.report()["attention"]
        assert [(phases[name]["resolved"], phases[name]["version"]) for name in PHASES] == [("torch_native", 0)] * 2
        assert "server-runs-replaced-files" not in active(served)
        resident = sum(one["resident"] or 0 for one in found["processes"])
        row(TABLE, "its processes", f"{len(found['processes'])}, {resident / 2**20:.0f} MiB resident")

        pip("--python", site.python, "install", "--no-deps", "--force-reinstall", "flashinfer-python==0.6.13")
        served.until("condition_active", 1, seconds=90, code="server-runs-replaced-files")

        first.stop()
        served.until("server_up", 0, seconds=60)
        until(served, 60, state="not-found", pid=None)

        second = stack.enter_context(server(site, tmp_path, libcuda, unused_tcp_port))
        again = until(served, 90, state="up", pid=second.process.pid)
        assert again["started_at"] > found["started_at"]
        served.until("condition_active", 0, seconds=90, code="server-runs-replaced-files")
        second.stop()
        served.until("server_up", 0, seconds=60)
        assert KEY not in everything(served)
    assert KEY not in without_key.read_text() + with_key.read_text()


PHASES = ("prefill", "decode")
