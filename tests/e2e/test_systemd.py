"""The agent on a host with the user, rights and mounts of its unit and of each drop-in: what it sees of a server."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import agent
from tests.fakes.agent import Served
from tests.fakes.containers import Images
from tests.fakes.kubelet import ask
from tests.fakes.site import Site
from tests.fakes.units import launcher, settings

pytestmark = [pytest.mark.pods, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PREFIX = "/opt/sglang-sidecar"
SERVERS_USER, DYNAMIC = 20001, 61184
MARKER = "SECRET-DO-NOT-EXPORT"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Host:
    """A mount namespace in which this machine has the agent and a server's environment under /opt, and a server."""

    def __init__(self, images: Images, folder: Path) -> None:
        self._folder = folder
        folder.chmod(0o755)
        opt = folder / "opt"
        (opt / "sglang-sidecar").mkdir(parents=True)
        # Of the agent's interpreter: this machine's own may lie where that user may not go.
        site = Site(opt / "sglang", base=f"{PREFIX}/python/bin/python3.11")
        (site.root / "bin/python3").symlink_to("python")
        site.dependencies()
        site.flashinfer("0.6.14")
        site.install("sglang", "0.5.16", {"sglang/__init__.py": ""})
        site.write("sglang/launch_server.py", (ROOT / "tests/fakes/launch_server.py").read_text())
        script = (
            f"mount --bind {opt} /opt && mount --bind {images.root('sidecar')}{PREFIX} {PREFIX}"
            f" && mount -t tmpfs -o mode=1777 tmpfs /tmp && exec sleep infinity"
        )
        self._holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", script])
        end = time.monotonic() + 10
        while Path(f"/proc/{self._holder.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < end
            assert self._holder.poll() is None
            time.sleep(0.02)
        self.port = _free_port()
        self._server = self.start(
            [*_as(SERVERS_USER), "/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/tiny",
             "--mamba-backend", "flashinfer", "--port", str(self.port), "--api-key", MARKER],
            folder / "server.log",
            {"HOME": "/tmp"},
        )  # fmt: skip
        while not ask(self.url + "/model_info").passed:
            assert self._server.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, command: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a command there."""
        with log.open("wb") as out:
            inside = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--wd=/", *command]
            base = {"PATH": os.defpath, "LANG": "C.UTF-8"}
            return subprocess.Popen(inside, env=base | environ, stdout=out, stderr=subprocess.STDOUT)

    def left_in_tmp(self) -> list[str]:
        """Names in the host's /tmp."""
        return sorted(os.listdir(f"/proc/{self._holder.pid}/root/tmp"))

    def close(self) -> None:
        for process in (self._server, self._holder):
            for pid in reversed(agent.children(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            process.kill()
            process.wait()


def _as(user: int) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture(scope="module")
def host(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One host for all variants."""
    # Other users have to reach it, whatever the modes above pytest's folders are.
    folder = Path(f"/var/tmp/sglang-sidecar-test-{os.getpid()}")
    folder.mkdir()
    made = Host(images, folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


@contextlib.contextmanager
def serving(host: Host, log: Path, options: dict[str, str], user: int, **environ: str) -> Iterator[Served]:
    """The agent as these options have systemd start it."""
    port = _free_port()
    settings_of_unit = dict(word.split("=", 1) for word in options["Environment"].split())
    settings_of_unit.pop("SGLANG_SIDECAR_STATE_DIR")
    listen = {"SGLANG_SIDECAR_LISTEN": f"127.0.0.1:{port}", "SGLANG_SIDECAR_SERVER_URL": host.url}
    command = [*launcher(options, user, user), *options["ExecStart"].split()]
    process = host.start(command, log, settings_of_unit | listen | environ)
    served = Served(process=process, url=f"http://127.0.0.1:{port}", log_path=log)
    try:
        end = time.monotonic() + 30
        while not ask(served.url + "/startupz").passed:
            assert process.poll() is None, served.log
            assert time.monotonic() < end, served.log
            time.sleep(0.1)
        served.until("server_up", 1)
        yield served
    finally:
        for pid in [*reversed(agent.children(process.pid)), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait()


def module(served: Served) -> dict[str, Any]:
    """What is said of flashinfer.mamba once its import is over or refused; empty where it cannot be looked for."""
    end = time.monotonic() + 30
    while True:
        report = served.report()
        found: dict[str, Any] = (report["modules"] or {}).get("flashinfer.mamba", {})
        looked = report["probes"]["flashinfer"]["outcome"] in {"ok", "skipped"}
        if looked and (not found or found["verified"] or found["why"] not in {None, "import-running", "importing"}):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)


def test_the_unit_alone_sees_the_server_from_outside(host: Host, tmp_path: Path) -> None:
    """Any user that is not the server's: its command line, what it answers, packages that everybody may read.

    Nothing of its process, and no import with another user's rights; each with the reason.
    """
    with serving(host, tmp_path / "log", settings(None), DYNAMIC) as served:
        imported = module(served)
        assert (imported["importable"], imported["verified"], imported["why"]) == (True, False, "privilege")
        report = served.report()
        assert report["standing"]["placement"] == "host"
        found = report["server"]
        assert found["pid"] is not None
        assert (found["version"], found["scope"], found["environ"]) == ("0.5.16", "image", "other-user")
        assert {one["token"] for one in found["denied"]} == {"other-user"}
        assert MARKER not in served.get("/report")[1]


@pytest.mark.parametrize(("drop_in", "user"), [("server-user.conf", SERVERS_USER), ("any-server.conf", 0)])
def test_with_a_drop_in_the_import_is_the_servers_own(host: Host, tmp_path: Path, drop_in: str, user: int) -> None:
    """The server's files, variables and environment; imported as its user; nothing is left behind."""
    with serving(host, tmp_path / "log", settings(drop_in), user) as served:
        found = module(served)
        report = served.report()
        assert (report["server"]["scope"], report["server"]["environ"]) == ("server", "readable")
        assert report["server"]["denied"] == []
        assert (found["verified"], found["scope"]) == (True, "server")
        served.scrape()
        assert served.value("condition_active", code="server-workers-missing", severity="critical") == 0
        assert [name for name in host.left_in_tmp() if name.startswith("sglang-sidecar")] == []
        assert MARKER not in served.get("/report")[1]


def test_mounts_of_its_own_keep_the_agent_from_importing(host: Host, tmp_path: Path) -> None:
    """Why the drop-ins switch those options off: the files are read through the server's root, and not imported."""
    options = settings("server-user.conf") | {"ProtectSystem": "strict"}
    with serving(host, tmp_path / "log", options, SERVERS_USER) as served:
        found = module(served)
        assert (found["importable"], found["verified"], found["why"]) == (True, False, "foreign-root")
