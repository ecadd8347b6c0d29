"""Launches that end before any code of SGLang's runs: one cause first, with its repair, by the real program."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidecar.environment import STATIC_READER
from tests.fakes import agent
from tests.fakes.nvml import Scenario
from tests.fakes.site import Site

SERVER_ARGS = "class ServerArgs:\n    model_path: str\n"
FOREIGN_ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00" + bytes(200)
"""The head of a program for 64-bit ARM, of which no line is for any processor."""
AGAIN = "{python} -m pip install --force-reinstall --no-deps sglang==0.5.16"


def environment(root: Path, *, base: str | None = None) -> Site:
    """SGLang with what each launch reads of it, a FlashInfer that works and a kernel wheel."""
    site = Site(root / "venv", base=base)
    site.dependencies()
    site.flashinfer()
    files = {
        "sglang/__init__.py": "",
        "sglang/launch_server.py": "import sglang\n",
        "sglang/srt/server_args.py": SERVER_ARGS,
        "sglang/srt/utils/common.py": "x = 1\n",
    }
    site.install("sglang", "0.5.16", files, requires=("torch==2.11.0",))
    site.dist("torch", "2.11.0")
    site.dist("pip", "26.0")
    site.kernel("sm90", "sm100")
    return site


class Case(NamedTuple):
    """What is done to the environment, and the one cause that must come first."""

    change: Callable[[Site, Path], str | None]
    """Returns the interpreter to launch with, where it is another than the environment's."""
    code: str
    reason: str
    message: str
    remedy: str
    says: str | None = None


def writes(name: str, text: str) -> Callable[[Site, Path], None]:
    return lambda site, _root: site.write(name, text) and None


def removes(*names: str) -> Callable[[Site, Path], None]:
    def change(site: Site, _root: Path) -> None:
        for name in names:
            site.remove(name)

    return change


def program(content: bytes, mode: int = 0o755) -> Callable[[Site, Path], str]:
    def change(_site: Site, root: Path) -> str:
        path = root / "bin/python3"
        path.parent.mkdir()
        path.write_bytes(content)
        path.chmod(mode)
        return str(path)

    return change


def folder(_site: Site, root: Path) -> str:
    (root / "bin/python3").mkdir(parents=True)
    return str(root / "bin/python3")


def link_to_nothing(_site: Site, root: Path) -> str:
    (root / "bin").mkdir()
    (root / "bin/python3").symlink_to("/nonexistent/python3.11")
    return str(root / "bin/python3")


def requires_newer(site: Site, _root: Path) -> None:
    file = site.packages / "sglang-0.5.16.dist-info/METADATA"
    file.write_text(file.read_text().replace("Version: 0.5.16", "Version: 0.5.16\nRequires-Python: >=3.14", 1))


WITHOUT_SGLANG = removes("sglang", "sglang-0.5.16.dist-info")
NO_MODULE = "ModuleNotFoundError: No module named 'sglang'"
CORRECT = "correct the launch's command, or name the interpreter in server_python"
CASES = {
    "no such interpreter": Case(
        lambda _site, root: str(root / "gone/python"),
        "interpreter-unusable", "missing",
        "The interpreter {root}/gone/python, which the launch names, or its script's first line, does not exist.",
        CORRECT,
    ),
    "a link to nothing": Case(
        link_to_nothing, "interpreter-unusable", "missing", "is a link to a file that does not exist", CORRECT
    ),
    "a folder": Case(folder, "interpreter-unusable", "folder", "is a folder, not a program", CORRECT),
    "without the right to execute it": Case(
        program(b"#!/bin/sh\n", 0o644), "interpreter-unusable", "not-executable", "(Permission denied)", CORRECT
    ),
    "for another processor": Case(
        program(FOREIGN_ELF), "interpreter-unusable", "wrong-architecture",
        f"is a program for another processor than this {os.uname().machine}", CORRECT,
    ),
    "with a first line that leads nowhere": Case(
        program(b"#!/nonexistent/env python3\n"), "interpreter-unusable", "loader-missing", "does not exist", CORRECT
    ),
    "no Python": Case(
        program(b"#!/bin/sh\necho no licence; exit 3\n"), "interpreter-unusable", "not-python",
        "exited with code 3 without an answer (no licence)", CORRECT,
    ),
    "older than SGLang requires": Case(
        requires_newer, "interpreter-unusable", "older-than-required", "SGLang 0.5.16 requires Python >=3.14",
        "python3.14 -m venv VENV && VENV/bin/python -m pip install sglang==0.5.16  # and launch with VENV/bin/python",
    ),
    "no SGLang": Case(
        WITHOUT_SGLANG, "sglang-not-installed", "absent", "The interpreter of this launch, {python}, has no SGLang.",
        "{python} -m pip install sglang", NO_MODULE,
    ),
    "neither SGLang nor anything else": Case(
        removes("sglang", "sglang-0.5.16.dist-info", "flashinfer", "flashinfer_python-0.6.14.dist-info", "sgl_kernel"),
        "sglang-not-installed", "absent", "has no SGLang.", "{python} -m pip install sglang", NO_MODULE,
    ),
    "started without its site-packages": Case(
        lambda site, _root: f"{site.python} -S", "sglang-not-installed", "without-site-packages",
        "is started with -S", "Leave -S out of the launch.", NO_MODULE,
    ),
    "a leftover folder": Case(
        removes("sglang/__init__.py", "sglang/launch_server.py", "sglang-0.5.16.dist-info"),
        "sglang-not-installed", "leftover-folder",
        "only a leftover folder ({packages}/sglang)", "{python} -m pip install sglang",
        "ModuleNotFoundError: No module named 'sglang.launch_server'",
    ),
    "the registration alone": Case(
        removes("sglang"), "sglang-incomplete", "module-gone", "and its package is gone", AGAIN, NO_MODULE
    ),
    "server_args.py is not there": Case(
        removes("sglang/srt/server_args.py"), "sglang-incomplete", "files-missing",
        "sglang/srt/server_args.py is missing", AGAIN,
    ),
    "server_args.py is empty": Case(
        writes("sglang/srt/server_args.py", ""), "sglang-incomplete", "files-damaged",
        "sglang/srt/server_args.py is empty", AGAIN,
    ),
    "server_args.py is cut off inside a statement": Case(
        writes("sglang/srt/server_args.py", SERVER_ARGS[:10]), "sglang-incomplete", "files-damaged",
        "sglang/srt/server_args.py does not parse", AGAIN,
    ),
    "server_args.py is cut off between statements": Case(
        writes("sglang/srt/server_args.py", "import os\n"), "sglang-incomplete", "files-damaged",
        "sglang/srt/server_args.py is cut off", AGAIN,
    ),
    "launch_server.py full of null bytes": Case(
        writes("sglang/launch_server.py", "\0" * 100), "sglang-incomplete", "files-damaged",
        "sglang/launch_server.py does not parse", AGAIN,
    ),
}  # fmt: skip


@pytest.fixture(name="env")
def _env(tmp_path: Path, fake_library: Path) -> Mapping[str, str]:
    return Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)


def report_of(env: Mapping[str, str], cwd: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        agent.command("check", "--format", "json", *arguments),
        env=agent.environment(env), cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def launch(python: str) -> tuple[str, ...]:
    return (*python.split(), "-m", "sglang.launch_server", "--model-path", "/m", "--mamba-backend", "flashinfer")


def active(report: dict[str, Any], *severities: str) -> list[dict[str, Any]]:
    return [one for one in report["conditions"] if one["active"] and one["severity"] in severities]


@pytest.mark.parametrize("name", CASES)
def test_one_cause_comes_first(name: str, env: Mapping[str, str], tmp_path: Path) -> None:
    """The cause is the only critical one, blocks, and says what to do; what else is wrong there follows from it."""
    case = CASES[name]
    site = environment(tmp_path)
    python = case.change(site, tmp_path) or site.python
    report = report_of(env, tmp_path, "--no-import", "--", *launch(python))
    (found,) = active(report, "critical")
    words = {"root": tmp_path, "python": site.python, "packages": site.packages}
    assert (found["code"], found["reason"]) == (case.code, case.reason)
    assert case.message.format(**words) in found["message"]
    assert found["remedy"] == case.remedy.format(**words)
    assert found["sglang_says"] == case.says
    assert report["verdict"]["blockers"] == [case.code]


def test_an_environment_that_is_whole_has_none_of_them(env: Mapping[str, str], tmp_path: Path) -> None:
    """Nor has one whose files were patched, or one of another release's files."""
    site = environment(tmp_path)
    site.write("sglang/srt/server_args.py", f"{SERVER_ARGS}PATCHED = True\n")
    site.remove("sglang/srt/utils/common.py")
    report = report_of(env, tmp_path, "--no-import", "--", *launch(site.python))
    codes = {one["code"]: one["status"] for one in report["conditions"]}
    assert [codes[code] for code in ("interpreter-unusable", "sglang-not-installed", "sglang-incomplete")] == [
        "false"
    ] * 3


def test_an_interpreter_that_has_sglang_is_named(env: Mapping[str, str], tmp_path: Path) -> None:
    """Where another interpreter of this image has it, that is the repair."""
    right = environment(tmp_path)
    wrong = Site(tmp_path / "other")
    report = report_of({**env, "VIRTUAL_ENV": str(right.root)}, tmp_path, "--no-import", "--", *launch(wrong.python))
    (found,) = active(report, "critical")
    assert found["code"] == "sglang-not-installed"
    assert found["remedy"].startswith(f"Launch with {right.python}, which has SGLang, or install it here: `")


def test_a_setting_that_names_no_interpreter_is_said_once(env: Mapping[str, str], tmp_path: Path) -> None:
    """The launch may run on another one: nothing is judged, in one sentence that names the setting."""
    site = environment(tmp_path)
    gone = str(tmp_path / "gone/python")
    arguments = ("check", "--server-python", gone, "--", *launch(site.python))
    done = subprocess.run(
        agent.command(*arguments), env=agent.environment(env), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    sentence = f"The interpreter {gone}, which the setting server_python names, does not exist; correct server_python."
    (line,) = [line for line in done.stdout.splitlines() if sentence in line and "probe-unavailable" in line]
    assert "attention, cuda, flashinfer, kernel, packages" in line
    assert "crashed" not in done.stdout


@pytest.mark.parametrize("kind", ["no such interpreter", "a folder", "no Python", "for another processor"])
def test_an_interpreter_that_is_none_is_no_crash_of_a_probe(kind: str, env: Mapping[str, str], tmp_path: Path) -> None:
    """The probes that would read what lies there have nothing to ask: no bug of the sidecar is to be looked for."""
    python = CASES[kind].change(environment(tmp_path), tmp_path)
    report = report_of(env, tmp_path, "--no-import", "--", *launch(str(python)))
    outcomes = {name: one["outcome"] for name, one in report["probes"].items()}
    asking = {"attention", "cuda", "flashinfer", "kernel", "packages"}
    assert {name for name, outcome in outcomes.items() if outcome == "unavailable"} == asking
    assert not set(outcomes.values()) & {"crashed", "error", "timeout"}
    assert not [one["code"] for one in report["conditions"] if one["reason"] == "probe-crashed"]


class Shadow(NamedTuple):
    """What lies in a folder in front of the installed SGLang, and what becomes of the launch."""

    files: Mapping[str, str]
    status: str
    reason: str | None
    says: str | None = None
    """What Python really prints, and the report quotes where reading tells."""


WHOLE = {
    "sglang/__init__.py": "__version__ = 'dev'\n",
    "sglang/launch_server.py": "import sglang.srt.server_args\n",
    "sglang/cli/__init__.py": "",
    "sglang/cli/main.py": "import sglang.srt.server_args\n",
    "sglang/srt/server_args.py": SERVER_ARGS,
}
"""As a developer's checkout has it."""
NO_SERVER = "No module named sglang.launch_server"
SHADOWS = {
    "an empty package": Shadow({"sglang/__init__.py": ""}, "true", "shadowed", NO_SERVER),
    "a script of that name": Shadow({"sglang.py": "print('hello')\n"}, "true", "shadowed"),
    "a package that raises": Shadow({"sglang/__init__.py": "raise ImportError('no')\n"}, "true", "shadowed"),
    "a whole copy that raises": Shadow(
        {**WHOLE, "sglang/__init__.py": "raise ImportError('no')\n"}, "true", "shadowed"
    ),
    "a whole copy whose package does not parse": Shadow({**WHOLE, "sglang/__init__.py": "x = (\n"}, "true", "shadowed"),
    "a package that joins the installed one": Shadow(
        {"sglang/__init__.py": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"},
        "unknown", "shadow-unread",
    ),
    "a package that may lead elsewhere": Shadow(
        {"sglang/__init__.py": "__path__.append('/elsewhere')\n"}, "unknown", "shadow-unread"
    ),
    "a launch of its own": Shadow(
        {"sglang/__init__.py": "", "sglang/launch_server.py": "print('mine')\n"}, "unknown", "shadow-unread"
    ),
    "a whole one": Shadow(WHOLE, "false", None),
    "a leftover folder": Shadow({"sglang/notes.txt": ""}, "false", None),
}  # fmt: skip
PLACES = {
    "working folder": lambda python, folder: ("env", "-C", str(folder), *launch(python)),
    "PYTHONPATH": lambda python, folder: ("env", f"PYTHONPATH={folder}", *launch(python)),
    "shell": lambda python, folder: ("sh", "-c", f"cd {folder} && exec {' '.join(launch(python))}"),
}


def incomplete(report: dict[str, Any]) -> dict[str, Any]:
    (found,) = [one for one in report["conditions"] if one["code"] == "sglang-incomplete"]
    return dict(found)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", SHADOWS)
def test_what_comes_before_the_installed_one_is_judged(
    name: str, where: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    """As Python itself does: where the launch would end there, that is the one cause."""
    shadow = SHADOWS[name]
    site = environment(tmp_path)
    front = tmp_path / "front"
    for file, text in shadow.files.items():
        (front / file).parent.mkdir(parents=True, exist_ok=True)
        (front / file).write_text(text)
    report = report_of(env, tmp_path, "--no-import", "--", *PLACES[where](site.python, front))
    found = incomplete(report)
    assert (found["status"], found["reason"]) == (shadow.status, shadow.reason)
    assert found["sglang_says"] == shadow.says
    # What the environment's own Python makes of the same launch.
    real = subprocess.run(
        [site.python, "-m", "sglang.launch_server"], cwd=front, env={}, capture_output=True, text=True, check=False
    )
    if shadow.status == "true":
        assert [one["code"] for one in active(report, "critical")] == ["sglang-incomplete"]
        assert report["verdict"]["blockers"] == ["sglang-incomplete"]
        assert f"take {front} out of the server's PYTHONPATH" in found["remedy"].replace("Take", "take")
        assert real.returncode != 0
        assert shadow.says is None or shadow.says in real.stderr
    elif shadow.status == "false":
        assert real.returncode == 0, real.stderr


def test_the_release_of_what_comes_first_is_not_the_installed_ones(env: Mapping[str, str], tmp_path: Path) -> None:
    """A flag is judged by the release that reads it; one that is registered beside the copy is known."""
    site = environment(tmp_path)
    front = tmp_path / "front"
    for file, text in WHOLE.items():
        (front / file).parent.mkdir(parents=True, exist_ok=True)
        (front / file).write_text(text)
    command = ("env", "-C", str(front), *launch(site.python))
    report = report_of(env, tmp_path, "--no-import", "--", *command)
    assert str(front / "sglang") in incomplete(report)["message"]
    codes = {one["code"]: one for one in report["conditions"]}
    assert codes["launch-flags-rejected"]["reason"] == "sglang-version-unknown"
    registration = front / "sglang.egg-info"
    registration.mkdir()
    (registration / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n")
    report = report_of(env, tmp_path, "--no-import", "--", *command)
    assert incomplete(report)["message"] == ""
    codes = {one["code"]: one for one in report["conditions"]}
    assert codes["launch-flags-rejected"]["status"] == "false"


def test_the_console_script_does_not_look_in_the_working_folder(env: Mapping[str, str], tmp_path: Path) -> None:
    """Its own folder leads the path; only PYTHONPATH puts something in front."""
    site = environment(tmp_path)
    site.write("sglang/cli/__init__.py")
    site.write("sglang/cli/main.py", "import sglang\n")
    script = site.root / "bin/sglang"
    script.write_text(f"#!{site.python}\nfrom sglang.cli.main import main\n")
    script.chmod(0o755)
    front = tmp_path / "front"
    (front / "sglang").mkdir(parents=True)
    (front / "sglang/__init__.py").write_text("")
    serve = (str(script), "serve", "--model-path", "/m")
    beside = report_of(env, tmp_path, "--no-import", "--", "env", "-C", str(front), *serve)
    assert incomplete(beside)["status"] == "false"
    ahead = incomplete(report_of(env, tmp_path, "--no-import", "--", "env", f"PYTHONPATH={front}", *serve))
    assert (ahead["status"], ahead["reason"]) == ("true", "shadowed")
    assert ahead["sglang_says"] == "ModuleNotFoundError: No module named 'sglang.cli'"


def test_the_source_of_an_editable_install_is_what_is_installed(env: Mapping[str, str], tmp_path: Path) -> None:
    """Launched in its own source folder it is no shadow, and its registered release is its release."""
    site = environment(tmp_path)
    source = tmp_path / "checkout/python"
    for file, text in WHOLE.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(text)
    site.remove("sglang")
    site.write("__editable__.sglang-0.5.16.pth", f"{source}\n")
    url = {"url": f"file://{source}", "dir_info": {"editable": True}}
    site.write("sglang-0.5.16.dist-info/direct_url.json", json.dumps(url))
    report = report_of(env, tmp_path, "--no-import", "--", "env", "-C", str(source), *launch(site.python))
    found = incomplete(report)
    assert (found["status"], found["message"]) == ("false", "")
    codes = {one["code"]: one for one in report["conditions"]}
    assert codes["launch-flags-rejected"]["status"] == "false"


STARTS = {"sitecustomize.py": "import sys; sys.exit('no licence')\n", "zz-site.pth": "import os; os._exit(4)\n"}


@pytest.mark.parametrize("name", STARTS)
def test_what_ends_the_interpreter_at_its_start_is_named(env: Mapping[str, str], tmp_path: Path, name: str) -> None:
    """Where the server's own variables are all there, the file is the cause, and FlashInfer is not blamed."""
    site = environment(tmp_path)
    site.write(name, STARTS[name])
    given = {**env, "PATH": os.defpath, "HOME": str(tmp_path), "PYTHONPATH": str(agent.ROOT)}
    command = ("env", "-i", "LANG=C", *launch(site.python))
    done = subprocess.run(
        agent.command("check", "--format", "json", "--", *command),
        env=given, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    (found,) = active(report, "critical")
    assert (found["code"], found["reason"]) == ("interpreter-unusable", "ends-at-start")
    assert str(site.packages / name) in found["message"]
    assert found["remedy"] == f"repair or remove {site.packages / name}: Python runs it whenever it starts"
    assert not [one for one in report["conditions"] if one["code"].startswith("flashinfer-") and one["active"]
                and one["severity"] != "info"]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="becomes another user")
@pytest.mark.parametrize(("user", "found"), [(65534, {"sglang/srt/server_args.py": "unreadable"}), (1000, {}), (0, {})])
def test_a_file_that_may_not_be_read(tmp_path: Path, user: int, found: dict[str, str]) -> None:
    """What is closed to the server's user is told apart from what is damaged, and only where its user looks."""
    with tempfile.TemporaryDirectory() as folder:
        # pytest's own folders are closed to others.
        Path(folder).chmod(0o755)
        site = environment(Path(folder), base="/usr/bin/python3")
        (site.packages / "sglang/srt/server_args.py").chmod(0)
        spec = {"tracked": ["sglang"], "detailed": [], "modules": [], "user": {"uid": user, "gid": user, "groups": []}}
        answer = tmp_path / "answer"
        with answer.open("wb") as out:
            subprocess.run(
                [site.python, "-I", "-S", "-B", STATIC_READER, json.dumps(spec), "--fd", str(out.fileno())],
                check=True, pass_fds=(out.fileno(),), user=65534, group=65534, env={}, cwd="/",
                            )  # fmt: skip
        result = json.loads(answer.read_text().splitlines()[-1])["result"]
    assert result["unusable"] == found
