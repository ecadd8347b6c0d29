"""A whole machine for an agent to stand beside: a driver, a server in an environment of its own, a state directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from sidecar.catalog import discover
from tests.fakes import kernel
from tests.fakes.nvml import Scenario
from tests.fakes.site import Site, driver_library, good

_SERVER = Path(__file__).with_name("launch_server.py")
GPUS = 8


def free_port() -> int:
    """A port of loopback that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Machine:
    """Everything that an agent looks at, below ``folder``. Leaving the block ends the server.

    ``library`` is the folder of the fake NVML. ``times`` is by how much its probes run more often than usual.
    """

    def __init__(self, folder: Path, library: Path, *, times: float = 1.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.times = times
        self.port = free_port()
        self.driver = Scenario(folder / "scenario", gpus=GPUS)
        self.site: Site = good(folder / "venv")
        self.site.dist("sglang", "0.5.16")
        self.site.dist("flashinfer-python", "0.6.14")
        self.site.dist("torch", "2.11.0")
        self.site.dist("transformers", "5.0.0")
        kernel.wheel(self.site)
        for variant in ("sm90", "sm100"):
            kernel.operations(self.site, variant)
        self.site.write("sglang/__init__.py")
        self.site.write("sglang/launch_server.py", _SERVER.read_text())
        # The server names its scheduler, which is started by that name, to whoever lists processes.
        (self.site.root / "bin/sglang::scheduler").symlink_to(os.path.realpath(sys.executable))
        driver_library(folder, "/lib")
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.library = library
        self.server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The agent's variables."""
        return self.driver.environ(self.library)

    @property
    def arguments(self) -> list[str]:
        """Flags of ``serve`` for an agent on this machine, which has other people's servers, too."""
        intervals = ",".join(f"{probe.name}={probe.interval / self.times:g}" for probe in discover())
        return [
            "--placement", "host", "--server-url", self.url, "--server-pattern", f"--port {self.port}( |$)",
            "--gpus", ",".join(map(str, range(GPUS))), "--intervals", intervals, "--deadlines", "driver=2",
            "--state-dir", str(self.state),
        ]  # fmt: skip

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [self.site.python, "-m", "sglang.launch_server", "--model-path", "/models/tiny", "--port",
                 str(self.port), "--mamba-backend", "flashinfer"],
                env={"PATH": f"{self.site.root}/bin:{os.defpath}", "HOME": str(self.folder),
                     "LD_LIBRARY_PATH": str(self.folder / "lib"), "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=self.folder, stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self.url + "/model_info", timeout=5).read()
                return
            assert self.server.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.05)

    def stop(self) -> None:
        """End the server, as Kubernetes does."""
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(30)
            self.server = None

    def install(self, name: str, before: str, after: str) -> None:
        """Replace a distribution's version, as installers do: the old one goes before the new one is there."""
        self.site.remove(f"{name.replace('-', '_')}-{before}.dist-info")
        self.site.dist(name, after)


@contextlib.contextmanager
def small_disk(place: Path, size: str = "256k") -> Iterator[Path]:
    """A file system of its own at a folder, which is soon full. Needs to be root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """Fill the file system of a folder; gives the file that has to go for there to be room again."""
    file = place / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(4096))
    return file


def may_mount() -> bool:
    """Whether this process may mount file systems."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and _mounts()


def _mounts() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
