"""The real agent for a long time at many times its usual rates, while faults come and go (`make soak`)."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.fakes import agent
from tests.fakes.agent import Served
from tests.fakes.load import load
from tests.fakes.machine import GPUS, Machine, fill, may_mount, small_disk
from tests.fakes.vitals import Vitals, Watch, slope

MINUTES = float(os.environ.get("MINUTES") or 30)
TIMES = 50
HELD = 62.0
"""Seconds after which the outcome of an import counts as having held."""
SETTLING = 0.25
"""The part of the run that does not count for what must not grow: allocators and caches reach their size in it."""
MOST_GROWTH = 4 * 2**20
"""Bytes per hour by which the resident memory may grow, at fifty times the usual rates: one month's worth then takes
some 60 MiB. A leak of 100 bytes in each round of the driver would be 1.8 MB per hour and probe."""


@dataclass(slots=True)
class Tale:
    """The run: what each phase took until the verdict was right, in seconds, and how often it was had."""

    machine: Machine
    served: Served
    waits: dict[str, list[float]] = field(default_factory=dict)
    looks: Counter[str] = field(default_factory=Counter)

    def active(self) -> set[str]:
        """The codes of all active conditions but those that only inform."""
        self.served.scrape()
        return {
            labels["code"]
            for labels in self.served.labels("condition_active")
            if labels["severity"] != "info" and self.served.value("condition_active", **labels) == 1
        }

    def until(self, phase: str, wanted: Callable[[], object], seconds: float = 180.0) -> None:
        """Wait for the right verdict, then see that it stays for a while."""
        begun = time.monotonic()
        while not wanted():
            assert time.monotonic() - begun < seconds, f"{phase}: {self.active()}\n{self.served.log[-6000:]}"
            assert self.served.process.poll() is None, self.served.log[-6000:]
            time.sleep(0.1)
        self.waits.setdefault(phase, []).append(time.monotonic() - begun)
        self.stays(phase, wanted, 2.0)

    def stays(self, phase: str, wanted: Callable[[], object], seconds: float) -> None:
        """See that a verdict does not change, and that the agent counts as alive."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert wanted(), f"{phase}: did not stay: {self.active()}\n{self.served.log[-6000:]}"
            assert self.served.get("/livez")[0] == 200
            self.looks[phase] += 1
            time.sleep(0.2)

    def ready(self, wanted: bool) -> bool:
        """Whether metrics and probe endpoint both say so."""
        return self.served.value("ready") == wanted and self.served.get("/readyz")[0] == (200 if wanted else 503)

    def healthy(self, phase: str) -> None:
        """All is well, and nothing is unknown of what was wrong before."""
        self.until(phase, lambda: self.active() == set() and self.ready(True) and self.served.value("server_up") == 1)


def driver_lost(tale: Tale) -> None:
    """The driver is unloaded and comes back."""
    tale.machine.driver.set({"nvmlInit": 9, "driver_generation": len(tale.waits.get("driver lost", ())) * 2 + 1})
    tale.until("driver lost", lambda: "driver-not-loaded" in tale.active() and tale.ready(False))
    tale.machine.driver.set({"nvmlInit": None, "driver_generation": len(tale.waits["driver lost"]) * 2})
    tale.healthy("driver back")


def gpu_lost(tale: Tale) -> None:
    """One of the server's GPUs falls off the bus."""
    lost = f"@{len(tale.waits.get('GPU lost', ())) % GPUS}"
    calls = {f"{call}{lost}": 15 for call in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature")}
    tale.machine.driver.set(calls)
    tale.until("GPU lost", lambda: tale.active() == {"gpu-lost"} and tale.ready(False))
    tale.machine.driver.set(dict.fromkeys(calls))
    tale.healthy("GPU back")


def driver_hangs(tale: Tale) -> None:
    """A call into the driver does not return."""
    tale.machine.driver.set({"nvmlDeviceGetCount": "hang"})
    tale.until("driver hangs", lambda: "driver-hung" in tale.active() and tale.served.value("nvml_up") != 1)
    tale.machine.driver.set({"nvmlDeviceGetCount": None})
    tale.healthy("driver answers again")


def worker_dies(tale: Tale) -> None:
    """The NVML library crashes its process each time."""
    tale.machine.driver.set({"nvmlDeviceGetCount": "abort"})
    tale.until("NVML crashes", lambda: (tale.active(), tale.served.value("probe_success", probe="driver"))[1] == 0)
    tale.machine.driver.set({"nvmlDeviceGetCount": None})
    tale.healthy("NVML works again")


def server_restarts(tale: Tale) -> None:
    """The server ends and another one starts."""
    tale.machine.stop()
    tale.until("server gone", lambda: (tale.active(), tale.served.value("server_up"))[1] == 0)
    tale.machine.start()
    tale.healthy("server back")


def restarted(tale: Tale, phase: str) -> None:
    """The server is restarted, as it should be after an upgrade under it."""
    tale.machine.stop()
    tale.machine.start()
    tale.healthy(phase)


def package_upgraded(tale: Tale) -> None:
    """A package is replaced under the running server, which is restarted later."""
    number = len(tale.waits.get("upgrade", ()))
    before, after = f"5.{number}.0", f"5.{number + 1}.0"
    tale.machine.install("transformers", before, after)
    tale.until(
        "upgrade",
        lambda: (
            tale.active() == {"server-runs-replaced-files"}
            and tale.served.value("environment_info", item="transformers", value=after) == 1
        ),
        seconds=300,
    )
    restarted(tale, "restarted after the upgrade")


def import_breaks(tale: Tale) -> None:
    """An upgrade makes flashinfer.mamba fail at import, and is taken back."""

    def importable(wanted: float) -> bool:
        tale.served.scrape()
        values = (
            tale.served.value(name, module="flashinfer.mamba")
            for name in ("module_importable", "module_import_verified")
        )
        return list(values) == [wanted, 1]

    site = tale.machine.site
    site.remove("flashinfer_python-0.6.14.dist-info")
    site.flashinfer("0.6.15", mamba="raise AttributeError('torch has no float4')")
    tale.until("import broken", lambda: importable(0), seconds=300)
    assert "flashinfer-import-failed" in tale.active()
    assert tale.ready(True)  # the server has passed it
    # After several changes within a minute no further import would be due for ten.
    tale.stays("import broken", lambda: importable(0), HELD)
    site.remove("flashinfer_python-0.6.15.dist-info")
    site.flashinfer("0.6.14")
    tale.until("import repaired", lambda: importable(1), seconds=300)
    restarted(tale, "restarted after the import")


def disk_full(tale: Tale) -> None:
    """The state directory has no room; what happens meanwhile is not lost."""
    filler = fill(tale.machine.state)
    # Something to write: what CUDA the driver has is an item of the environment.
    tale.machine.driver.set(cuda_driver_version=(13010, 13000)[len(tale.waits.get("disk full", ())) % 2])
    tale.until("disk full", lambda: "state-unusable" in tale.active() and tale.ready(True))
    filler.unlink()
    tale.healthy("room again")


PHASES = (
    disk_full, driver_lost, gpu_lost, server_restarts, driver_hangs, package_upgraded, worker_dies, import_breaks,
)  # fmt: skip


@pytest.fixture
def state_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for the state."""
    if not may_mount():
        pytest.skip("the state directory's own file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    with small_disk(place) as mounted:
        yield mounted


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_nothing_grows_and_every_verdict_is_right(
    tmp_path: Path, fake_library: Path, state_disk: Path, told: Callable[[str, str], None]
) -> None:
    """Over MINUTES of faults memory, descriptors, threads and processes stay, and no verdict is wrong."""
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(Machine(tmp_path / "machine", fake_library, times=TIMES))
        machine.state = state_disk
        machine.start()
        served = stack.enter_context(agent.serve(tmp_path / "log", *machine.arguments, env=machine.environ))
        # At these rates the agent may want more than its share of a machine that has other things to do.
        served.patience = 60.0
        tale = Tale(machine, served)
        tale.healthy("start")
        seconds = MINUTES * 60
        counted = stack.enter_context(
            load(served.url, "--scrapers", "10", "--one-shot", "10", "--pause", "0.5", seconds=seconds + 600)
        )
        watch = stack.enter_context(Watch(served.process.pid))
        begun = time.monotonic()
        rounds = 0
        try:
            while time.monotonic() - begun < seconds:
                for phase in PHASES:
                    phase(tale)
                    if time.monotonic() - begun >= seconds:
                        break
                rounds += 1
        finally:
            _table(told, tale, watch.seen, rounds)
        tale.served.scrape()
        runs = {p: served.value("probe_runs_total", probe=p, outcome="ok") for p in ("driver", "server", "packages")}
        told("rounds of driver, server, packages", ", ".join(f"{count:.0f}" for count in runs.values() if count))
        spent = sum(psutil.Process(served.process.pid).cpu_times()[:4])
        told("processor time with children, of one core", f"{100 * spent / (time.monotonic() - begun):.0f} %")
        code, ended = served.stop()
        told("SIGTERM until the end", f"{ended:.2f} s, status {code}")
        told("log", f"{len(served.log) / 1024:.0f} KiB")
    told("scrapes", str(counted))
    assert code == 0
    assert ended < 4.0  # twice what is promised, for a busy machine
    assert "scrapes failed" not in counted
    assert "a bug of the sidecar" not in served.log
    assert "Traceback" not in served.log
    settled = watch.seen[int(len(watch.seen) * SETTLING) :]
    assert _lasting(settled) == 0
    for name in ("descriptors", "threads", "processes"):
        values = [getattr(one, name) for one in settled]
        third = len(values) // 3
        assert statistics.median(values[-third:]) <= statistics.median(values[:third]), name
    if MINUTES >= 10:
        # Within less, the size that caches reach hides the slope.
        assert 3600 * slope([(one.at, one.resident) for one in settled]) < MOST_GROWTH


def _lasting(seen: list[Vitals], looks: int = 30) -> int:
    """The most children that had ended and were not reaped at any of so many looks in a row."""
    windows = (seen[at : at + looks] for at in range(max(1, len(seen) - looks + 1)))
    # One that just ended is reaped when its owner's turn comes, which on a busy machine takes more than one look.
    return max(min(one.zombies for one in window) for window in windows)


def _table(told: Callable[[str, str], None], tale: Tale, seen: list[Vitals], rounds: int) -> None:
    told("minutes, rounds of all faults", f"{(seen[-1].at - seen[0].at) / 60:.1f}, {rounds}")
    for phase, waits in tale.waits.items():
        told(
            f"  {phase}",
            f"{len(waits)} times, right after {statistics.median(waits):.1f} s (longest {max(waits):.1f} s),"
            f" then {tale.looks[phase]} times looked at",
        )
    settled = seen[int(len(seen) * SETTLING) :]
    for name, scale, unit in (
        ("resident", 2**20, " MiB"), ("descriptors", 1, ""), ("threads", 1, ""), ("processes", 1, ""),
        ("zombies", 1, ""),
    ):  # fmt: skip
        values = [getattr(one, name) / scale for one in settled]
        third = len(values) // 3
        per_hour = 3600 * slope([(one.at, getattr(one, name) / scale) for one in settled])
        told(
            name,
            f"median of first third {statistics.median(values[:third]):.1f}{unit}, of last"
            f" {statistics.median(values[-third:]):.1f}{unit}, most {max(values):.1f}{unit},"
            f" slope {per_hour:+.2f}{unit}/h",
        )
