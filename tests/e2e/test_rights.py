"""What the agent needs of its surroundings and believes of them: no rights, no writable files, nobody else's word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidecar.state import FILE, FOLDER
from tests.fakes import agent, namespaces
from tests.fakes.nvml import Scenario
from tests.fakes.site import good

ALONE = ("--processes", "hidden", "--image", "own")
own_mounts = pytest.mark.skipif(
    not namespaces.allowed(), reason="this machine lets no process have mounts of its own (unshare -rm)"
)


@own_mounts
def test_without_rights_and_on_a_read_only_root(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """As user 1000 without capabilities, with only the state directory writable, every endpoint and the state work."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    site = good(tmp_path / "venv")
    site.dist("triton", "3.6.0")
    site.write("sglang/__init__.py")
    env = Scenario(tmp_path / "scenario", gpus=2).environ(fake_library)
    arguments = ("--server-url", closed_port, "--server-python", site.python, "--import", "always")
    with agent.serve(
        tmp_path / "log",
        *(*arguments, "--processes", "hidden", "--state-dir", str(state), "--intervals", "drift=1"),
        env=env | {"HOME": "/nonexistent"},
        through=lambda command: namespaces.read_only(command, writable=str(state)),
    ) as served:
        served.until("ready", 1)
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        served.until("probe_success", 1, probe="flashinfer")
        found = {path: served.get(path)[0] for path in ("/livez", "/startupz", "/readyz", "/metrics", "/report", "/")}
        assert found == dict.fromkeys(found, 200)
        served.until("environment_info", 1, item="triton", value="3.6.0")
        served.until("condition_active", 0, code="state-unusable")
        served.scrape()
        failed = {
            one["probe"]: served.value("probe_runs_total", probe=one["probe"], outcome="error")
            for one in served.labels("probe_success")
        }
        assert failed == dict.fromkeys(failed, 0)
        assert served.stop()[0] == 0
    assert "3.6.0" in (state / FOLDER / FILE).read_text()


@own_mounts
def test_a_mounted_config_map_is_nobody_s_to_write(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """Its folder is 0777 and its mount read-only: no warning, on a host neither (kubernetes/kubernetes#133641)."""
    folder = tmp_path / "config"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..2026" / "baseline.toml").write_text('[environment]\ndriver = "580.159.04"\n')
    (folder / "..2026" / "sidecar.toml").write_text(f'baseline = "{folder}/baseline.toml"\n')
    (folder / "..data").symlink_to("..2026")
    for name in ("baseline.toml", "sidecar.toml"):
        (folder / name).symlink_to(f"..data/{name}")
    folder.chmod(0o777)
    env = Scenario(tmp_path / "scenario", gpus=2).environ(fake_library)
    arguments = ("--config", f"{folder}/sidecar.toml", "--server-url", closed_port, *ALONE, "--placement", "host")
    with agent.serve(tmp_path / "log", *arguments, env=env, through=namespaces.read_only) as served:
        served.until("condition_active", 0, code="baseline-unreadable")
        served.until("condition_active", 0, code="environment-drift")
        assert "may be written" not in served.log
        assert served.stop()[0] == 0


@pytest.mark.parametrize("command", ["serve", "check", "config show"])
def test_a_configuration_that_anybody_may_write(
    tmp_path: Path, fake_library: Path, closed_port: str, command: str
) -> None:
    """On a host, among other users, it is an error, whatever it says of the placement; in a container a warning."""
    tmp_path.chmod(0o755)
    file = tmp_path / "sidecar.toml"
    file.write_text(f'placement = "container"\nserver_url = "{closed_port}"\nlisten = "nobody.invalid:1"\n')
    file.chmod(0o666)
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    words = f"config: {file} may be written by every user"
    told = agent.run(*command.split(), "--config", str(file), "--placement", "host", env=env)
    assert words in told.stderr
    assert told.returncode == (0 if command == "config show" else 64)
    assert (told.stdout == "") is (command != "config show")
    file.write_text(f'server_url = "{closed_port}"\nlisten = "nobody.invalid:1"\n')
    told = agent.run(*command.split(), "--config", str(file), "--placement", "container", env=env)
    assert f"warning: {words}" in told.stderr
    # It was believed: `serve` ends for the address that it names.
    assert ("nobody.invalid" in told.stderr + told.stdout) is (command != "check")


def test_two_agents_and_one_state_directory(tmp_path: Path, fake_library: Path, closed_port: str) -> None:
    """The second one says so, writes nothing there and serves all the same; the first goes on undisturbed."""
    state = tmp_path / "state"
    state.mkdir()
    env = Scenario(tmp_path / "one", gpus=1).environ(fake_library)
    other = Scenario(tmp_path / "other", gpus=1, name="NVIDIA B200").environ(fake_library)
    arguments = ("--server-url", closed_port, *ALONE, "--state-dir", str(state), "--intervals", "driver=0.5,drift=0.5")
    with agent.serve(tmp_path / "first.log", *arguments, env=env) as first:
        first.until("condition_active", 0, code="state-unusable")
        with agent.serve(tmp_path / "second.log", *arguments, env=other) as second:
            second.until("condition_active", 1, code="state-unusable", severity="warning")
            second.until("ready", 1)
            second.until("environment_info", 1, item="gpu_model", value="NVIDIA B200")
            told = {one["code"]: one for one in second.report()["conditions"]}["state-unusable"]
            assert told["reason"] == "in-use"
            assert second.stop()[0] == 0
        first.scrape()
        assert first.value("condition_active", code="state-unusable", severity="warning") == 0
        assert first.stop()[0] == 0
    kept = json.loads((state / FOLDER / FILE).read_text())
    assert {one["value"] for one in kept["seen"] if one["item"] == "gpu_model"} == {"NVIDIA H200"}
    assert kept["counts"] == {}
