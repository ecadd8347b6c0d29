"""The demo as somebody starts it: real processes that serve and check recorded servers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.demo import SCENARIOS
from tests.fakes import agent

WATCH = """
import os, sys
ALLOWED = tuple(sys.argv[1].split(os.pathsep))
seen = []
def hook(event, arguments):
    if event in {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.system", "socket.connect"}:
        seen.append(f"{event} {arguments[:1]}")
    elif event in {"open", "os.listdir", "os.scandir"} and isinstance(arguments[0], str):
        path = os.path.abspath(arguments[0])
        if not path.startswith(ALLOWED):
            seen.append(f"{event} {path}")
sys.addaudithook(hook)
from sidecar.cli import main
code = main(sys.argv[2:])
sys.stderr.write("".join(f"SAW {one}\\n" for one in seen))
sys.exit(code)
"""
"""Runs a command of the agent and tells of each process, connection and file that is not one of ours."""


@pytest.mark.parametrize(("name", "status"), [("healthy", 0), ("upgrade-drift", 1), ("mamba-missing", 2)])
def test_check_shows_a_scenario(name: str, status: int) -> None:
    """`check --demo` prints what it would print of that server, says that it is a demo, and has that exit status."""
    done = agent.run("check", "--demo", name)
    assert (done.returncode, done.stderr) == (status, "")
    assert f"{name}: recorded, nothing of this machine" in done.stdout


def test_every_format_is_marked() -> None:
    """A report or metrics of a demo that end up beside real ones can be told apart."""
    done = agent.run("check", "--demo", "gpu-lost", "--format", "json")
    assert json.loads(done.stdout)["demo"]["scenario"] == "gpu-lost"
    done = agent.run("check", "--demo", "gpu-lost", "--format", "metrics")
    assert "\nsglang_sidecar_demo 1.0\n" in done.stdout


@pytest.mark.parametrize("command", ["check", "serve"])
def test_an_unknown_scenario_is_a_usage_error(command: str) -> None:
    """Exit status 64, and one line that lists what there is."""
    done = agent.run(command, "--demo", "nope")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in SCENARIOS)


def test_a_launch_is_not_judged_against_a_recording() -> None:
    """Flags behind -- belong to a launch on this machine; a demo has its own."""
    done = agent.run("check", "--demo", "healthy", "--", "--tp", "2")
    assert (done.returncode, done.stdout) == (64, "")
    assert "leave out what stands after --" in done.stderr


def test_settings_without_effect_are_named(tmp_path: Path) -> None:
    """Who sets where to look learns that a demo does not look there; a state directory stays as it was."""
    done = agent.run("check", "--demo", "healthy", "--state-dir", str(tmp_path), "--gpus", "0", "--accept", "gpu-lost")
    assert done.stderr == "sglang-sidecar: warning: of no effect in a demo: gpus, state_dir\n"
    assert list(tmp_path.iterdir()) == []


def test_settings_of_the_judge_count() -> None:
    """What is accepted is accepted in a demo, too: that is worth trying before it is rolled out."""
    assert agent.run("check", "--demo", "upgrade-drift").returncode == 1
    accepted = ("requirement-violated", "server-runs-replaced-files", "environment-drift")
    arguments = [word for code in accepted for word in ("--accept", code)]
    assert agent.run("check", "--demo", "upgrade-drift", *arguments).returncode == 0


def test_nothing_of_this_machine_is_touched(tmp_path: Path) -> None:
    """No process, no connection, and no file but Python's, the agent's own and its own entry in /proc."""
    site = Path(pytest.__file__).parents[1]
    allowed = [str(agent.ROOT), str(site), sys.base_prefix, sys.prefix, "/proc/self/", os.devnull]
    done = subprocess.run(
        [sys.executable, "-c", WATCH, os.pathsep.join(allowed), "check", "--demo", "fa4-deferred", "-v"],
        env=agent.environment({"HOME": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    # The time zone and the kinds of files are Python's own affair, the time of boot is psutil's.
    own = re.compile(r"SAW open (/etc/(localtime|mime\.types)|/usr/share/zoneinfo/.*|/proc/stat)$")
    assert [line for line in done.stderr.splitlines() if not own.match(line)] == []


def test_a_served_demo_is_labelled_everywhere(tmp_path: Path) -> None:
    """Page, report, metrics and log say that it is a demo, from the first second on."""
    with agent.serve(tmp_path / "log", "--demo", "mamba-missing") as served:
        served.until("condition_active", 1.0, code="flashinfer-mamba-missing", severity="critical")
        assert served.value("demo") == 1.0
        assert served.report()["demo"]["scenario"] == "mamba-missing"
        status, page = served.get("/")
        assert status == 200
        assert "This is a demo" in page
        assert served.get("/readyz")[0] == 503
        lines = [json.loads(line) for line in served.log.splitlines()]
        assert lines[0]["event"].startswith("this is a demo")
        assert all(line["demo"] == "mamba-missing" for line in lines)
        status, seconds = served.stop()
    assert status == 0
    assert seconds < 5


def test_a_fleet_is_served_on_as_many_addresses(tmp_path: Path) -> None:
    """Four replicas with metrics of their own, side by side as Prometheus would see them; all end together."""
    with agent.serve(tmp_path / "log", "--demo", "fleet-skew") as served:
        end = time.monotonic() + 20
        urls: list[str] = []
        while len(urls) < 4 and time.monotonic() < end:
            lines = [json.loads(line) for line in served.log.splitlines()]
            listening = sorted(
                (line["replica"], line["addresses"][0]) for line in lines if line["event"] == "listening"
            )
            urls = [f"http://{address}" for _, address in listening]
            time.sleep(0.05)
        assert len(set(urls)) == 4
        versions: list[str] = []
        for url in urls:
            while True:
                items = labels(url, "sglang_sidecar_environment_info")
                if "flashinfer-python" in items and "driver" in items:
                    break
                assert time.monotonic() < end
                time.sleep(0.1)
            versions.append(f"{items['driver']} {items['flashinfer-python']}")
        assert versions == ["580.159.04 0.6.14"] * 2 + ["580.126.09 0.6.14", "580.159.04 0.6.13"]
        assert served.stop()[0] == 0
    for url in urls:
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(url + "/livez", timeout=2)


def labels(url: str, family: str) -> dict[str, str]:
    """Item -> value of an info family, as a scrape gives it."""
    with urllib.request.urlopen(url + "/metrics", timeout=5) as response:
        text = response.read().decode()
    return {
        sample.labels["item"]: sample.labels["value"]
        for one in text_string_to_metric_families(text)
        for sample in one.samples
        if sample.name == family
    }


def test_a_fleet_takes_ports_that_follow_each_other(tmp_path: Path) -> None:
    """An address in use is one clear sentence that names it, and nothing is left listening."""
    taken = agent.run("serve", "--demo", "fleet-skew", "--listen", "127.0.0.1:65535")
    assert taken.returncode == 64
    assert "65536" in taken.stderr
