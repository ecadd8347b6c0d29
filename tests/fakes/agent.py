"""The real agent as a real process, for end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would change the agent's mind, plus ``extra``."""
    dropped = ("SGLANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "KUBERNETES_", "NVIDIA_", "CUDA_", "FLASHINFER", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PYTHONPATH": str(ROOT)} | dict(extra or {})


def command(*arguments: str) -> list[str]:
    """How the agent is started."""
    return [sys.executable, "-m", "sidecar", *arguments]


def run(*arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command of the agent to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@dataclass(slots=True)
class Served:
    """A running agent."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    patience: float = 5.0
    """Seconds that an answer may take."""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and body."""
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.patience) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.get("/report")[1])
        return loaded

    def scrape(self) -> None:
        """Read the metrics anew into `samples`."""
        text = self.get("/metrics")[1]
        self.samples = {
            (sample.name.removeprefix("sglang_sidecar_"), frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, /, **labels: str) -> float | None:
        """The value of the one series of that name that has these labels, or None."""
        wanted = labels.items()
        found = [
            value for (series, has), value in self.samples.items() if series == name and wanted <= dict(has).items()
        ]
        assert len(found) <= 1, f"{name} {labels} names {len(found)} series"
        return found[0] if found else None

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of a family."""
        return [dict(has) for series, has in self.samples if series == name]

    def until(self, name: str, wanted: float | None, /, *, seconds: float = 20.0, **labels: str) -> None:
        """Scrape until a series has a value."""
        end = time.monotonic() + seconds
        while True:
            self.scrape()
            if self.value(name, **labels) == wanted:
                return
            assert time.monotonic() < end, f"{name}{labels} is {self.value(name, **labels)}, not {wanted}\n{self.log}"
            assert self.process.poll() is None, self.log
            time.sleep(0.1)

    def stop(self) -> tuple[int, float]:
        """SIGTERM; the exit status and the seconds it took."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30), time.monotonic() - begun


@contextlib.contextmanager
def serve(
    log_path: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    through: Callable[[list[str]], list[str]] = lambda command: command,
) -> Iterator[Served]:
    """Start ``serve`` on a free port of loopback and wait until it listens; ``through`` says how a command is run."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            through(command("serve", "--listen", "127.0.0.1:0", "--log-format", "json", *arguments)),
            env=environment(env),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Served(process=process, url=_address(process, log_path), log_path=log_path)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log_path: Path) -> str:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for line in log_path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "listening":
                    return f"http://{event['addresses'][0]}"
        assert process.poll() is None, log_path.read_text(errors="replace")
        select.select([], [], [], 0.05)
    raise AssertionError(f"the agent never listened: {log_path.read_text(errors='replace')}")


def children(pid: int) -> list[int]:
    """Live descendants of a process, by /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return found


def running(pid: int) -> bool:
    """True for a process that exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
