"""What changed and what should be: the real agent over upgrades, edits of its baseline, restarts and kills."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from sidecar.state import FILE, FOLDER
from tests.fakes import agent
from tests.fakes.site import Site, good

QUICK = ("--intervals", "packages=1,drift=1,flashinfer=60", "--import", "never")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = good(tmp_path / "venv")
    site.dist("sglang", "0.5.15")
    site.dist("flashinfer-python", "0.6.14")
    return site


def upgrade(site: Site, before: str, after: str) -> None:
    site.remove(f"sglang-{before}.dist-info")
    site.dist("sglang", after)


def seconds_of_cache() -> float:
    """A reading of the environment is kept for 30 s, so a change shows by then, also on a machine that is busy."""
    return 90.0


def test_changes_are_counted_across_restarts(tmp_path: Path, site: Site) -> None:
    """An upgrade while the agent runs, and one while it does not, are both seen; SIGKILL loses nothing."""
    state = tmp_path / "state"
    state.mkdir(mode=0o777)
    arguments = (*QUICK, "--server-python", site.python, "--state-dir", str(state))
    with agent.serve(tmp_path / "first.log", *arguments) as served:
        served.until("environment_info", 1, item="sglang", value="0.5.15")
        assert served.value("environment_changes_total", item="sglang") == 0
        upgrade(site, "0.5.15", "0.5.16")
        served.until("environment_changes_total", 1, item="sglang", seconds=seconds_of_cache())
        changed_at = served.value("environment_last_change_timestamp_seconds", item="sglang")
        served.until("condition_active", 0, code="state-unusable")
        _until_saved(state, "0.5.16")
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
    upgrade(site, "0.5.16", "0.5.17")
    with agent.serve(tmp_path / "second.log", *arguments) as served:
        served.until("environment_changes_total", 2, item="sglang")
        assert served.value("environment_changes_total", item="flashinfer-python") == 0
        assert (served.value("environment_last_change_timestamp_seconds", item="sglang") or 0) > (changed_at or 0)
        changes = served.report()["changes"]
        assert [(one["item"], one["kind"], one["before"], one["after"]) for one in changes] == [
            ("sglang", "changed", "0.5.15", "0.5.16"),
            ("sglang", "changed", "0.5.16", "0.5.17"),
        ]
        assert served.stop()[0] == 0
    (state / FOLDER / FILE).write_text("{")
    with agent.serve(tmp_path / "third.log", *arguments) as served:
        served.until("condition_active", 1, code="state-unusable", severity="warning")
        served.until("environment_info", 1, item="sglang", value="0.5.17")
        assert served.value("environment_changes_total", item="sglang") == 0
        assert served.value("ready") is not None
        _until_saved(state, "0.5.17")


def _until_saved(state: Path, version: str) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        path = state / FOLDER / FILE
        seen = json.loads(path.read_text())["seen"] if path.exists() else []
        if any(one["item"] == "sglang" and one["value"] == version for one in seen):
            return
        time.sleep(0.1)
    raise AssertionError(f"{version} was never saved")


def test_a_baseline_is_read_anew(tmp_path: Path, site: Site) -> None:
    """Drift appears and goes with edits of the file; it alerts, never gates, and a broken file is a condition."""
    folder = tmp_path / "config"
    folder.mkdir()
    baseline = folder / "baseline.toml"
    written = agent.run("baseline", "write", "--server-python", site.python)
    assert written.returncode == 0, written.stderr
    baseline.write_text(written.stdout)
    same = agent.run("baseline", "diff", "--server-python", site.python, "--baseline", str(baseline))
    assert (same.returncode, "different" in same.stdout) == (0, False), same.stdout + same.stderr
    arguments = (*QUICK, "--server-python", site.python, "--baseline", str(baseline))
    with agent.serve(tmp_path / "log", *arguments) as served:
        served.until("condition_active", 0, code="environment-drift")
        assert (served.value("baseline_loaded"), served.value("drift_items")) == (1, 0)
        baseline.write_text(written.stdout.replace('sglang = "0.5.15"', 'sglang = ">=0.5.16"'))
        served.until("condition_active", 1, code="environment-drift", severity="warning")
        assert (served.value("drift_items"), served.value("drift", item="sglang")) == (1, 1)
        assert served.report()["drift"] == [
            {"item": "sglang", "deviation": "different", "expected": ">=0.5.16", "observed": "0.5.15"}
        ]
        differs = agent.run("baseline", "diff", "--server-python", site.python, "--baseline", str(baseline))
        assert differs.returncode == 1
        assert "sglang" in differs.stdout
        assert "[+]drift ok: environment-drift, not gating" in served.get("/readyz?verbose")[1]
        baseline.write_text("[environment\n")
        served.until("baseline_loaded", 0)
        served.until("condition_active", 1, code="baseline-unreadable")
        assert served.value("condition_unknown", code="environment-drift") == 1
        baseline.unlink()
        served.until("condition_active", 1, code="baseline-unreadable")
        baseline.write_text(written.stdout)
        served.until("condition_active", 0, code="environment-drift")


def test_a_stuck_probe_survives_a_restart(tmp_path: Path, site: Site) -> None:
    """What hung before a restart is published before the first round of the new agent has ended."""
    state = tmp_path / "state"
    (state / FOLDER).mkdir(parents=True, mode=0o700)
    stuck = {"probe": "driver", "where": "nvmlDeviceGetCount", "detail": "It hangs.", "since": 1764547200.0}
    document = {"format": 1, "seen": [], "counts": {}, "last_change": {}, "recent": [], "stuck": [stuck]}
    (state / FOLDER / FILE).write_text(json.dumps(document))
    (state / FOLDER / FILE).chmod(0o600)
    arguments = (*QUICK, "--server-python", site.python, "--state-dir", str(state))
    with agent.serve(tmp_path / "log", *arguments) as served:
        served.until("baseline_loaded", None)
        history = served.report()["history"]
        told = [one for one in history if one["subject"] == "driver-hung"]
        assert told[0]["after"] == "active"
        assert told[0]["reason"] == "unkillable"


def test_the_first_baseline_needs_no_file(tmp_path: Path, site: Site) -> None:
    """Where its path is set already, as in a pod whose ConfigMap is made from what is written; that is said."""
    path = tmp_path / "baseline.toml"
    written = agent.run("baseline", "write", "--server-python", site.python, "--baseline", str(path))
    assert written.returncode == 0
    assert 'sglang = "' in written.stdout
    assert f"there is no baseline {path} yet" in written.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    "arguments", [("diff",), ("diff", "--baseline", "/nonexistent/b.toml"), ("write", "--baseline", "relative.toml")]
)
def test_wrong_use_is_explained(arguments: tuple[str, ...]) -> None:
    """A missing or unreadable baseline is a usage error that names it."""
    done = agent.run("baseline", *arguments)
    assert done.returncode == 64
    assert "baseline" in done.stderr
