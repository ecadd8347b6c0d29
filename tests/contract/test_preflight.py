"""A launch judged before it happens, and the configuration file of one that has: by real processes and files."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sidecar.config import Settings
from sidecar.model import Placement, Processes, Scope, Standing, Target
from sidecar.target import RUNNING, TargetFinder
from tests.fakes import agent
from tests.fakes.nvml import Scenario
from tests.fakes.sglang import MARKER
from tests.fakes.site import RealClock, Site, good


@pytest.fixture(name="site")
def _site(tmp_path: Path) -> Site:
    """An environment with SGLang 0.5.16 and a FlashInfer that works."""
    site = good(tmp_path / "venv")
    site.dist("sglang", "0.5.16")
    site.write("sglang/__init__.py")
    return site


@pytest.fixture(name="env")
def _env(tmp_path: Path, fake_library: Path) -> Mapping[str, str]:
    return Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)


def launch(site: Site, *flags: str) -> list[str]:
    return [site.python, "-m", "sglang.launch_server", "--model-path", f"/{MARKER}/model", *flags]


def checked(command: list[str], env: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    """The report of a preflight."""
    done = subprocess.run(
        agent.command("check", "--no-import", "--format", "json", "--", *command),
        env=agent.environment(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert MARKER not in done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def rejection(report: dict[str, Any]) -> tuple[str, str | None]:
    """Status and reason of what is said of the flags."""
    (found,) = [one for one in report["conditions"] if one["code"] == "launch-flags-rejected"]
    return found["status"], found["reason"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--mamba-backend", "flashinfer", "--api-key", MARKER), ("false", None)),
        (("--mamba-backend", "bogus"), ("true", "invalid-choice")),
        (("--attention-backend", "fa33"), ("true", "unknown-choice")),
        (("--attention-backend",), ("true", "missing-value")),
        (("--tp", MARKER), ("true", "not-a-number")),
    ],
)
def test_flags_are_judged_by_the_installed_release(
    site: Site, env: Mapping[str, str], tmp_path: Path, flags: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    """The SGLang in the environment of the command decides, by reading its metadata alone."""
    report = checked(launch(site, *flags), env, tmp_path)
    assert rejection(report) == expected
    assert report["preflight"]["release"] == "0.5.16"
    assert ("launch-flags-rejected" in report["verdict"]["blockers"]) is (expected[1] not in {None, "unknown-choice"})


def test_an_older_release_has_fewer_flags(env: Mapping[str, str], tmp_path: Path) -> None:
    """--mamba-backend came with 0.5.9: before it argparse ends with unrecognized arguments."""
    old = Site(tmp_path / "old")
    old.dist("sglang", "0.5.8.post1")
    report = checked(launch(old, "--mamba-backend", "triton"), env, tmp_path)
    assert rejection(report) == ("true", "unrecognized-flag")


def test_a_configuration_file_counts(site: Site, env: Mapping[str, str], tmp_path: Path) -> None:
    """Its entries are flags, the command line wins, its secrets stay in it; relative to where the launch would be."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/a.yaml").write_text(
        f"attention-backend: fa4\ndecode-attention-backend: fa3\napi-key: {MARKER}\nmamba-backend: flashinfer\n"
    )
    flags = ("--config", "conf/a.yaml", "--attention-backend", "triton")
    report = checked(launch(site, *flags), env, tmp_path)
    assert report["server"]["launch"] == {
        "attention_backend": "triton",
        "decode_attention_backend": "fa3",
        "mamba_backend": "flashinfer",
    }
    assert (report["preflight"]["config"], report["preflight"]["complete"]) == ("read", True)
    assert report["preflight"]["passed_over"] == ["--api-key"]
    assert (report["attention"]["prefill"]["version"], report["attention"]["decode"]["version"]) == (0, 3)


def test_a_shell_s_launch_is_read_too(site: Site, env: Mapping[str, str], tmp_path: Path) -> None:
    """`sh -c` with redirections and a variable in front gives the same flags; the variable is the server's."""
    line = f"SGLANG_IS_FLASHINFER_AVAILABLE=false exec {site.python} -m sglang.launch_server --model m "
    report = checked(["sh", "-c", line + "--mamba-backend flashinfer >log 2>&1"], env, tmp_path)
    assert rejection(report) == ("false", None)
    active = [one["code"] for one in report["conditions"] if one["active"]]
    assert "flashinfer-disabled-by-env" in active


UNSEEN_LAUNCHES = [
    ("docker run --gpus all image {launch}", "docker runs the command in another environment"),
    ("sudo {launch}", "sudo gives the command an environment that only its rules tell"),
    ("ssh host {launch}", "ssh runs the command on another machine"),
    ("./start {launch}", "there is no file start, which stands in front of it"),
    ("export PYTHONPATH=$(x); {launch}", "the launch sets PYTHONPATH to what only its shell knows"),
    ("cd $(x); {launch}", "the folder that the launch goes to is not known"),
]


@pytest.mark.parametrize(("script", "sentence"), UNSEEN_LAUNCHES)
def test_a_launch_into_what_is_not_seen_claims_nothing(
    site: Site, env: Mapping[str, str], tmp_path: Path, script: str, sentence: str
) -> None:
    """No condition of packages is true and none verified, a sentence says why, and the flags are judged."""
    site.remove("tvm_ffi")  # which FlashInfer needs: a fault, if it were the server's
    line = " ".join(launch(site, "--mamba-backend", "flashinfer", "--tp", "x"))
    report = checked(["sh", "-c", script.format(launch=line)], env, tmp_path)
    active = {one["code"] for one in report["conditions"] if one["status"] == "true"}
    assert not {code for code in active if not code.startswith(("launch-", "nvml-", "driver-"))}
    assert rejection(report) == ("true", "not-a-number")
    why = [one["message"] for one in report["conditions"] if one["code"] == "flashinfer-import-failed"]
    assert why[0].startswith("The server's environment is not seen: ")
    assert sentence in why[0]
    module = report.get("modules", {}).get("flashinfer.mamba", {})
    assert not module.get("verified")
    seen = checked(["sh", "-c", line], env, tmp_path)
    assert "flashinfer-import-failed" in {one["code"] for one in seen["conditions"] if one["active"]}


def test_a_mismatch_that_a_variable_may_excuse_is_open(site: Site, env: Mapping[str, str], tmp_path: Path) -> None:
    """Where the launch may set what makes FlashInfer ignore its companion's version, that version is no fault."""
    site.companion("flashinfer-cubin", "0.6.1")
    line = " ".join(launch(site, "--mamba-backend", "flashinfer"))
    found = {}
    for value in ("", "1", "$(x)"):
        script = f"FLASHINFER_DISABLE_VERSION_CHECK={value} {line}"
        (one,) = [
            one
            for one in checked(["sh", "-c", script], env, tmp_path)["conditions"]
            if one["code"] == "flashinfer-cubin-mismatch"
        ]
        found[value] = one["status"], one["reason"], one["severity"]
    assert found == {
        "": ("true", "version-mismatch", "critical"),
        "1": ("true", "check-bypassed", "warning"),
        "$(x)": ("unknown", "environ-unseen", "critical"),
    }


def test_gpus_of_this_machine_are_not_another_ones(site: Site, tmp_path: Path, fake_library: Path) -> None:
    """A fault of this machine's driver hinders a launch here, and tells nothing of one on another machine."""
    broken = Scenario(tmp_path / "broken", gpus=1, nvmlInit=18).environ(fake_library)
    line = " ".join(launch(site))
    weights = {}
    for script in (line, f"ssh host {line}"):
        report = checked(["sh", "-c", script], broken, tmp_path)
        (found,) = [one for one in report["conditions"] if one["code"] == "driver-library-mismatch"]
        weights[script] = (found["active"], found["severity"])
    assert weights == {line: (True, "critical"), f"ssh host {line}": (True, "info")}


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("tp: 2\nport: [\n", "a.yaml", "/a.yaml, line 3: not valid YAML\n"),
        ("- tp\n", "a.yaml", "/a.yaml, line 1: keys with values are wanted here (SGLang: ValueError: Config file must"),
        ("tp: 2\n", "a.toml", "/a.toml: not named .yaml or .yml (SGLang: ValueError: Config file must be YAML format"),
        (None, "a.yaml", "/a.yaml: there is no such file (SGLang: ValueError: Config file not found: "),
        (
            f"a: &{MARKER} 1\nb: *{MARKER}\n",
            "a.yaml",
            (
                "/a.yaml, line 2: aliases (*name) are not read here, though SGLang reads them; write the value out in "
                "their place\n"
            ),
        ),
    ],
)
def test_a_configuration_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, content: str | None, name: str, expected: str
) -> None:
    """The file and the line are named, in one line, with status 64; nothing of the content is repeated."""
    if content is not None:
        (tmp_path / name).write_text(content)
    done = agent.run("check", "--no-import", "--", "--config", str(tmp_path / name))
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith(f"sglang-sidecar: the launch's --config {tmp_path}{expected}")
    assert done.stderr.count("\n") == 1
    assert MARKER not in done.stderr


@pytest.mark.parametrize("program", ["python3", "sglang"])
def test_a_launch_below_a_root_is_judged_by_what_lies_there(
    site: Site, env: Mapping[str, str], tmp_path: Path, program: str
) -> None:
    """`python3` of a mounted image is the image's, whatever this machine's PATH leads to."""
    root = tmp_path / "image"
    inside = Site(root / "opt/venv")
    (root / "opt/venv/bin/python3").symlink_to("python")
    inside.dependencies()
    inside.flashinfer("0.6.0")
    inside.dist("sglang", "0.5.16", ("flashinfer_python==0.6.14", "torch==2.11.0"))
    inside.write("sglang/__init__.py")
    here = Path(site.python).parent
    (here / "python3").symlink_to("python")
    rest = ["serve"] if program == "sglang" else ["-m", "sglang.launch_server"]
    done = subprocess.run(
        agent.command(
            "check", "--no-import", "--format", "json", "--server-root", str(root), "--",
            program, *rest, "--model-path", "m", "--mamba-backend", "flashinfer",
        ),
        env={**agent.environment(env), "PATH": f"{here}:{os.defpath}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    source = report["environment_source"]
    assert (source["python"], source["found_by"]) == ("/opt/venv/bin/python3", "left-to-reader")
    active = {one["code"]: one["remedy"] for one in report["conditions"] if one["status"] == "true"}
    assert (
        "uv pip install --python /opt/venv/bin/python3 flashinfer-python==0.6.14" in active["flashinfer-mamba-missing"]
    )


def test_the_text_speaks_of_the_launch(site: Site, env: Mapping[str, str]) -> None:
    """One cause first, SGLang's own sentence with it, and what was passed over by name."""
    command = launch(site, "--mamba-backend", "bogus", "--trust-remote-code")
    done = agent.run("check", "--no-import", "--", *command, env=env)
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    assert lines[0].startswith("critical: this launch would fail: launch-flags-rejected: SGLang 0.5.16 does not take")
    assert "  SGLang says: error: argument --mamba-backend: invalid choice: 'bogus'" in lines
    assert "  fix: Give --mamba-backend one of: flashinfer, triton." in lines
    found = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line.strip()}
    assert found["launch"] == "python -m sglang.launch_server, SGLang 0.5.16"
    assert found["passed over"] == "1: --trust-remote-code"


def test_a_preflight_loads_no_http_library() -> None:
    """It asks no server, so it does not wait for what would ask one."""
    code = "import sys; from sidecar import cli; sys.stdout = open('/dev/null', 'w'); "
    code += "cli.main(['check', '--no-import', '--', '--tp', '1']); "
    code += (
        "sys.stderr.write(' '.join(name for name in ('aiohttp', 'yaml', 'prometheus_client') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=agent.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_sees_what_is_being_done(site: Site, env: Mapping[str, str]) -> None:
    """During an import a line on the terminal names its stage; it is erased, and no part of the report."""
    site.flashinfer(mamba="import time; time.sleep(3)")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        agent.command("check", "--", *launch(site, "--mamba-backend", "flashinfer")),
        env=agent.environment(env),
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.stdout is not None
        report = process.stdout.read()
    os.close(ours)
    assert b"checking judging | import: import flashinfer" in shown
    assert shown.endswith(b"\r\x1b[K")
    assert b"\x1b" not in report
    assert b"checking" not in report


# -- a running server's file ---------------------------------------------------------------------------


@pytest.fixture(name="server")
def _server(tmp_path: Path) -> Iterator[int]:
    """A process that looks like a server whose folder holds its configuration file; its number."""
    package = tmp_path / "packages/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("import time; time.sleep(600)\n")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.yaml").write_text(f"attention-backend: fa4\nport: 31234\napi-key: {MARKER}\n")
    # Not a child of this process: an agent takes none of its own descendants for the server.
    line = f"{sys.executable} -m sglang.launch_server --config a.yaml --tp 2 >/dev/null 2>&1 & echo $!"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    started = subprocess.run(["sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=True)
    pid = int(started.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


async def find(pid: int) -> Target:
    """The target that a finder makes of this process."""
    standing = Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why="")
    end = time.monotonic() + 20
    while b"launch_server" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.02)
    return await TargetFinder(Settings(server_pid=pid), standing, RealClock()).find()


async def test_a_running_servers_file_is_read(server: int) -> None:
    """Its relative path is taken from the server's working folder; then nothing of its flags is missing."""
    target = await find(server)
    assert (target.scope, target.launch_source) == (Scope.SERVER, RUNNING)
    assert target.launch == {"attention_backend": "fa4", "port": 31234, "tp_size": 2}
    assert (target.url, target.url_source) == ("http://127.0.0.1:31234", "command-line")
    assert target.notes is not None
    assert target.notes.config == "read"
    assert MARKER not in repr(target.launch) + repr(target.notes) + target.why


async def test_a_running_servers_file_that_says_nothing(server: int, tmp_path: Path) -> None:
    """The flags are incomplete and the reason is told, as a token."""
    (tmp_path / "work/a.yaml").write_text("attention-backend: [\n")
    target = await find(server)
    assert target.launch == {"tp_size": 2, "incomplete": True}
    assert target.why.endswith("Its configuration file is not known (invalid-yaml).")
