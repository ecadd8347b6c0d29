"""What is measured: the sidecar, its peers, and the floor, each as processes of its own on a port of loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measure import cpu, tree
from scraping import ScrapeError, scrape_once

ROOT = Path(__file__).resolve().parents[1]
NODE_EXPORTER = "prometheus-node-exporter"
PEERS = "nvitop-exporter==1.7.2"
_PATIENCE = 60.0
"""Seconds until the first answer."""


class SubjectError(Exception):
    """A subject cannot be measured. The argument says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One program. ``{port}`` in its command is the port that it gets; ``environ`` is added to the common one."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    modules: str = ""
    """What the program imports before it can serve, as a statement; empty for one that is not Python."""

    @property
    def python(self) -> str:
        """Its interpreter."""
        return self.command[0]


@dataclass(slots=True)
class Running:
    """A subject that answers.

    ``first_scrape`` is the seconds from its start to its first answer, ``start_cpu`` the CPU seconds of all its
    processes until then.
    """

    subject: Subject
    process: subprocess.Popen[bytes]
    port: int
    first_scrape: float
    start_cpu: float

    @property
    def pids(self) -> list[int]:
        """Its processes, the one that serves first."""
        return tree(self.process.pid)

    def cpu(self) -> float:
        """CPU seconds of all its processes so far, those that ended included."""
        return cpu(self.pids)


def common_environ() -> dict[str, str]:
    """This process' environment without what would change how a subject behaves."""
    dropped = (
        "SGLANG",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "KUBERNETES_",
        "NVIDIA_",
        "CUDA_",
        "FLASHINFER",
        "PYTHONDONT",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def sidecar(*flags: str, name: str = "sidecar", discover: bool = False, environ: Mapping[str, str]) -> Subject:
    """The agent with its defaults, where no server is: whatever runs on this machine is not what is measured.

    ``discover``: it looks for one among the processes of this machine all the same.
    """
    alone = ("--server-url", "http://127.0.0.1:9") + (() if discover else ("--processes", "hidden", "--image", "own"))
    listen = ("--listen", "127.0.0.1:{port}", "--log-level", "error")
    return Subject(
        name=name,
        command=(sys.executable, "-m", "sidecar", "serve", *listen, *alone, *flags),
        environ={**environ, **_path_to("sidecar")},
        modules="import sidecar.cli, sidecar.exposition, sidecar.web; sidecar.cli.catalog.discover()",
    )


def bare() -> Subject:
    """The floor."""
    return Subject(
        name="bare server",
        command=(sys.executable, str(ROOT / "bench/bare.py"), "{port}"),
        modules="import aiohttp.web, prometheus_client",
    )


def nvitop(place: Path | None, *flags: str, name: str = "nvitop-exporter", environ: Mapping[str, str]) -> Subject:
    """nvitop-exporter, of an interpreter that has it or from a folder of packages.

    Raises SubjectError where it is not there.
    """
    if place is None:
        raise SubjectError("no interpreter or folder that has it was named (--peer-python)")
    place = place.absolute()  # not resolved: an environment's interpreter is a link
    if place.is_dir():
        python, path = sys.executable, {"PYTHONPATH": str(place)}
    else:
        python, path = str(place), {}
    subject = Subject(
        name=name,
        command=(python, "-m", "nvitop_exporter", "--bind-address", "127.0.0.1", "--port", "{port}", *flags),
        environ={**environ, **path},
        modules="import nvitop_exporter.cli",
    )
    probe = [python, "-c", "import nvitop_exporter"]
    try:
        done = subprocess.run(probe, env=common_environ() | path, capture_output=True, check=False)
    except OSError as error:
        raise SubjectError(f"{place} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise SubjectError(f"{place} has no nvitop_exporter (pip install {PEERS})")
    return subject


def node_exporter() -> Subject:
    """Debian's node_exporter. Raises SubjectError where it is not installed."""
    program = shutil.which(NODE_EXPORTER)
    if program is None:
        raise SubjectError(
            f"{NODE_EXPORTER} is not installed (apt-get install --no-install-recommends {NODE_EXPORTER})"
        )
    return Subject(name="node_exporter", command=(program, "--web.listen-address=127.0.0.1:{port}"))


def _path_to(package: str) -> dict[str, str]:
    """What makes the interpreter find a package of this checkout, unless it is installed."""
    probe = [sys.executable, "-c", f"import {package}"]
    if not subprocess.run(probe, cwd="/", env=common_environ(), capture_output=True, check=False).returncode:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(subject: Subject) -> Iterator[Running]:
    """Start a subject and wait until it has answered a scrape; end it afterwards.

    Raises SubjectError, with what it said, where it does not answer.
    """
    port = free_port()
    command = [word.replace("{port}", str(port)) for word in subject.command]
    with tempfile.TemporaryFile() as said:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd="/",
            env=common_environ() | dict(subject.environ),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    scrape_once(port)
                except (OSError, ScrapeError, ValueError):
                    if process.poll() is not None or time.perf_counter() - begun > _PATIENCE:
                        said.seek(0)
                        words = said.read().decode(errors="replace")[-2000:]
                        raise SubjectError(f"{subject.name} does not answer; it said: {words}") from None
                    time.sleep(0.002)
                else:
                    break
            first = time.perf_counter() - begun
            yield Running(subject, process, port, first, cpu(tree(process.pid)))
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a subject and whatever it started."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
