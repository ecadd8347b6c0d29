"""The real agent while its children, its descriptors, its disk, its clock and its server fail at random moments.

A few trials of each run with the other tests; `make chaos COUNT=100` runs as many of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from sidecar.state import FILE, FOLDER, decode
from tests.fakes import agent, shim
from tests.fakes.agent import Served
from tests.fakes.badserver import MANNERS, BadServer
from tests.fakes.machine import Machine, fill, may_mount, small_disk
from tests.fakes.pipes import fill as fill_pipe
from tests.fakes.pipes import unread_pipe
from tests.fakes.reader import read
from tests.fakes.site import good

COUNT = int(os.environ.get("COUNT") or 0)
FEW = 3
TIMES = 20
SEED = int(os.environ.get("SEED") or 20261201)
PROMPT = 2.0
"""Seconds from SIGTERM to the end that users are promised."""

Tell = Callable[[str, str], None]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory, fake_library: Path) -> Iterator[Machine]:
    """A machine on which all is well, with a server that answers."""
    with Machine(tmp_path_factory.mktemp("machine") / "m", fake_library, times=TIMES) as one:
        one.start()
        yield one


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is preloaded."""
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


def arguments(machine: Machine, state: Path | None) -> list[str]:
    """Flags of an agent with a state directory of its own."""
    words = machine.arguments
    at = words.index("--state-dir")
    return words[:at] + words[at + 2 :] + ([] if state is None else ["--state-dir", str(state)])


@contextlib.contextmanager
def serve(*arguments: Any, **more: Any) -> Iterator[Served]:
    """Serve as `agent.serve` does. An answer may take long: on a busy machine it is no hang yet."""
    with agent.serve(*arguments, **more) as served:
        served.patience = 30.0
        yield served


def active(served: Served) -> set[str]:
    """Codes of what is active and not only for information."""
    served.scrape()
    return {
        labels["code"]
        for labels in served.labels("condition_active")
        if labels["severity"] != "info" and served.value("condition_active", **labels) == 1
    }


def healthy(served: Served) -> bool:
    """Whether all was looked at, and all is well."""
    return (
        active(served) == set()
        and served.value("ready") == 1
        and served.value("server_up") == 1
        and served.value("nvml_up") == 1
        and served.value("module_import_verified", module="flashinfer.mamba") == 1
    )


def wait(served: Served, what: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not what():
        assert served.process.poll() is None, served.log[-4000:]
        assert time.monotonic() < end, f"{active(served)}\n{served.log[-4000:]}"
        time.sleep(0.05)


def stays(served: Served, seconds: float, allowed: frozenset[str] = frozenset()) -> None:
    """See for some seconds that it answers and says nothing that is wrong."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert served.get("/livez")[0] == 200
        wrong = active(served) - allowed
        assert not wrong, f"{wrong}\n{served.log[-4000:]}"
        time.sleep(0.1)


def ends(served: Served) -> float:
    """End it; the seconds that took. Nothing that it started is left, nor did a bug of its own show."""
    descendants = agent.children(served.process.pid)
    code, seconds = served.stop()
    assert code == 0, served.log[-4000:]
    assert "Traceback" not in served.log
    assert "bug of the sidecar" not in served.log
    gone(descendants)
    return seconds


def gone(pids: list[int]) -> None:
    """See that processes have ended, or do so at once."""
    end = time.monotonic() + 3
    while left := [pid for pid in pids if agent.running(pid)]:
        assert time.monotonic() < end, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.02)


def trials(few: int = FEW) -> int:
    """How many."""
    return COUNT or few


def with_chaos(*few: object, more: tuple[object, ...]) -> list[object]:
    """Parameters of which the rest wait for `make chaos`."""
    return [*few, *(pytest.param(one, marks=pytest.mark.chaos) for one in more)]


# -- the end at any moment --------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
def test_sigterm_at_any_moment(tmp_path: Path, machine: Machine, state: Path, told: Tell) -> None:
    """From the first instruction on: it ends in time, leaves no process and no file, and its state reads back."""
    chance = random.Random(SEED)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = agent.environment(machine.environ | {"TMPDIR": str(temporary)})
    command = agent.command("serve", "--listen", "127.0.0.1:0", "--log-format", "json", *arguments(machine, state))
    codes: Counter[int] = Counter()
    times = []
    for number in range(trials(6)):
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        # A third in the interpreter's own start, however long that takes here, the others in the first rounds.
        if number % 3:
            _until_listening(tmp_path / "log", process)
        time.sleep(chance.uniform(0.0, 1.5))
        descendants = agent.children(process.pid)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            codes[process.wait(20)] += 1
        finally:
            process.kill()
        times.append(time.monotonic() - begun)
        said = (tmp_path / "log").read_text()
        assert "Traceback" not in said, said
        gone(descendants)
        assert list(temporary.iterdir()) == []
        if (state / FOLDER / FILE).exists():
            decode((state / FOLDER / FILE).read_bytes())
        assert [one.name for one in state.glob(f"{FOLDER}/.{FILE}.*")] == []
    # The interpreter's own start ends by the signal; the program's, which puts nothing away yet, by the status for it.
    assert set(codes) <= {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    told("SIGTERM at any moment", f"{sum(codes.values())} trials, statuses {dict(codes)}, longest {max(times):.2f} s")
    assert sorted(times)[len(times) // 2] < PROMPT
    assert max(times) < 2 * PROMPT


def _until_listening(log: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while b'"listening"' not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end
        time.sleep(0.005)


# -- children ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Hunter:
    """Waits for a child of the agent by a word of its command line, and sends it a signal after a pause."""

    pid: int
    word: str
    number: int
    pause: float
    hit: int | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while self.hit is None and not self._stop.is_set():
            for pid in _children_of(self.pid):
                with contextlib.suppress(OSError):
                    if self.word in Path(f"/proc/{pid}/cmdline").read_bytes().decode():
                        self._stop.wait(self.pause)
                        os.kill(pid, self.number)
                        self.hit = pid
                        return
            self._stop.wait(0.001)


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


WORKER, READER, PROBE = "nvml/worker.py", "static_reader.py", "import_probe.py"
CRASHED_IMPORT = frozenset({"flashinfer-import-crashed", "kernel-wheel-broken"})
ALLOWED = {
    # A worker that is stopped is, from outside, one that hangs in the driver.
    (WORKER, signal.SIGSTOP): frozenset({"driver-hung"}),
    # An import that ends by SIGSEGV is what that condition is about.
    (PROBE, signal.SIGSEGV): CRASHED_IMPORT,
}
ATTACKS = [
    (word, number) for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV) for word in (WORKER, READER, PROBE)
]


@pytest.mark.timeout(3600)
def test_children_that_are_ended_or_stopped(tmp_path: Path, machine: Machine, told: Tell) -> None:
    """Whichever child, whenever, by whichever signal: no verdict is made of it, and nothing is leaked."""
    chance = random.Random(SEED)
    hits: Counter[str] = Counter()
    longest = 0.0
    for number in range(trials()):
        word, signal_number = ATTACKS[number % len(ATTACKS)] if COUNT else ATTACKS[number * 2 % len(ATTACKS)]
        temporary = tmp_path / f"tmp{number}"
        temporary.mkdir()
        env = machine.environ | {"TMPDIR": str(temporary)}
        with serve(tmp_path / "log", *arguments(machine, None), env=env) as served:
            pause = chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.3)])
            with Hunter(served.process.pid, word, signal_number, pause) as hunter:
                stays(served, 1.5, ALLOWED.get((word, signal_number), frozenset()))
            if hunter.hit is not None:
                hits[f"{word} {signal.Signals(signal_number).name}"] += 1
            if word == WORKER:
                wait(served, lambda: served.scrape() or served.value("nvml_up") == 1)
            elif hunter.hit is not None:
                # What was interrupted must not be taken for done.
                assert served.value("module_import_verified", module="flashinfer.mamba") in (None, 1, 0)
            longest = max(longest, ends(served))
        assert list(temporary.iterdir()) == []
    told("children ended or stopped", f"{number + 1} trials, {sum(hits.values())} met, longest end {longest:.2f} s")
    for which, count in sorted(hits.items()):
        told(f"  {which}", str(count))
    assert hits
    assert longest < 2 * PROMPT


class Starver:
    """Leaves the children with a word in their command line a share of the processor, as a CPU quota does.

    A quota is such a thing itself: its processes run for a part of each tenth of a second and wait for the rest
    (Documentation/scheduler/sched-bwc.rst).
    """

    PERIOD = 0.1

    def __init__(self, pid: int, word: str, share: float) -> None:
        self._pid = pid
        self._word = word
        self._share = share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.starved: set[int] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._over.is_set():
            found = set(filter(self._is_meant, _children_of(self._pid)))
            self.starved |= found
            self._send(found, signal.SIGSTOP)
            self._over.wait(self.PERIOD * (1 - self._share) if found else 0.001)
            self._send(found, signal.SIGCONT)
            if found:
                self._over.wait(self.PERIOD * self._share)

    def _is_meant(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._word in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        return False

    @staticmethod
    def _send(pids: set[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


SHARES = (0.05, 0.02, 0.2)


@pytest.mark.timeout(3600)
def test_children_that_starve(tmp_path: Path, machine: Machine, told: Tell) -> None:
    """With a twentieth of a processor all takes twenty times as long, and none of it is held against the server."""
    starved: Counter[str] = Counter()
    longest = 0.0
    for number in range(trials()):
        word, share = (WORKER, READER, PROBE)[number % 3], SHARES[number // 3 % 3]
        temporary = tmp_path / f"tmp{number}"
        temporary.mkdir()
        env = machine.environ | {"TMPDIR": str(temporary)}
        with serve(tmp_path / "log", *arguments(machine, None), env=env) as served:
            # A driver call that does not return in time is all that can be seen of a worker that does not run.
            allowed = frozenset({"driver-hung"}) if word == WORKER else frozenset()
            with Starver(served.process.pid, word, share) as starver:
                stays(served, 4.0, allowed)
            starved[f"{word} with {share:.0%}"] += len(starver.starved)
            wait(served, lambda: healthy(served))
            longest = max(longest, ends(served))
        assert list(temporary.iterdir()) == []
    told("children starved", f"{number + 1} trials, longest end {longest:.2f} s")
    for which, count in sorted(starved.items()):
        told(f"  {which}", f"{count} children")
    assert all(starved.values())
    assert longest < 2 * PROMPT


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_stopped_agent_goes_on(tmp_path: Path, machine: Machine, state: Path, told: Tell) -> None:
    """Frozen and thawed with all its children at random, as by a hypervisor: what it says stays right."""
    chance = random.Random(SEED)
    with serve(tmp_path / "log", *arguments(machine, state), env=machine.environ) as served:
        wait(served, lambda: healthy(served))
        for _ in range(trials(3)):
            pids = [served.process.pid, *agent.children(served.process.pid)]
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(chance.uniform(0.01, 0.8))
            # A pause as long as a deadline is, from inside, a driver that did not answer in time.
            stays(served, 0.3, frozenset({"driver-hung"}))
        wait(served, lambda: healthy(served))
        told("agent stopped and continued", f"{trials(3)} trials, end {ends(served):.2f} s")


# -- what the system refuses ------------------------------------------------------------------------------


def limited(kind: int, most: int) -> Callable[[list[str]], list[str]]:
    """How to run a command under a limit that it cannot raise."""
    code = (
        "import os, resource, sys; most = int(sys.argv[2]); resource.setrlimit(int(sys.argv[1]), (most, most)); "
        "os.execv(sys.argv[3], sys.argv[3:])"
    )
    return lambda command: [sys.executable, "-c", code, str(kind), str(most), *command]


@contextlib.contextmanager
def held(url: str, number: int) -> Iterator[list[socket.socket]]:
    """Connections that say half of something."""
    host, _, port = url.removeprefix("http://").partition(":")
    sockets = []
    try:
        for _ in range(number):
            one = socket.create_connection((host, int(port)), timeout=5)
            sockets.append(one)
            one.sendall(b"GET /met")
        yield sockets
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize("most", with_chaos(30, more=(20, 64)))
def test_hardly_any_descriptors(tmp_path: Path, machine: Machine, state: Path, most: int) -> None:
    """Where children cannot be started for want of descriptors all is unknown, and as before when there are some."""
    through = limited(resource.RLIMIT_NOFILE, most)
    with serve(tmp_path / "log", *arguments(machine, state), env=machine.environ, through=through) as served:
        with held(served.url, 40):
            stays(served, 2.0)
            assert served.get("/readyz")[0] in (200, 503)
        if most >= 64:
            wait(served, lambda: healthy(served))
        assert served.stop()[0] == 0
        assert "Traceback" not in served.log


@pytest.mark.parametrize("most", with_chaos(0, more=(512, 4096)))
def test_no_file_may_grow(tmp_path: Path, machine: Machine, state: Path, most: int) -> None:
    """A limit of the size of files stops the state, and no verdict is made of it."""
    log = tmp_path / "log"
    command = limited(resource.RLIMIT_FSIZE, most)(
        agent.command("serve", "--listen", "127.0.0.1:0", "--log-format", "json", *arguments(machine, state))
    )
    # The log goes through a pipe, which has no size.
    process = subprocess.Popen(
        command, env=agent.environment(machine.environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    lines: list[bytes] = []
    pump = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    pump.start()
    try:
        end = time.monotonic() + 20
        while not any(b'"listening"' in line for line in list(lines)):
            assert process.poll() is None, lines
            assert time.monotonic() < end, lines
            time.sleep(0.05)
        address = next(json.loads(line)["addresses"][0] for line in list(lines) if b'"listening"' in line)
        served = Served(process=process, url=f"http://{address}", log_path=log)
        log.write_text("")
        stays(served, 2.0, frozenset({"state-unusable"}))
        process.terminate()
        assert process.wait(10) == 0
        pump.join(10)
        assert b"Traceback" not in b"".join(lines), b"".join(lines).decode()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]


@pytest.mark.chaos
@pytest.mark.skipif(not may_mount(), reason="a small file system needs root")
def test_a_full_disk_for_state_log_and_temporary_files(tmp_path: Path, machine: Machine) -> None:
    """With no room anywhere it serves what it knows, says what it lacks, and uses the room once there is some."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk) as place:
        folders = [place / name for name in ("state", "tmp")]
        for folder in folders:
            folder.mkdir(mode=0o700)
        filler = fill(place)
        env = machine.environ | {"TMPDIR": str(folders[1])}
        with serve(tmp_path / "log", *arguments(machine, folders[0]), env=env) as served:
            wait(served, lambda: "state-unusable" in active(served))
            stays(served, 1.0, frozenset({"state-unusable"}))
            assert served.value("ready") == 1
            filler.unlink()
            wait(served, lambda: active(served) == set(), seconds=45)
            assert ends(served) < 2 * PROMPT
        decode((folders[0] / FOLDER / FILE).read_bytes())


def test_a_log_that_cannot_be_written(machine: Machine, state: Path) -> None:
    """A full disk behind standard error is nobody's reason to end."""
    port = _free_port()
    command = agent.command(
        "serve", "--listen", f"127.0.0.1:{port}", "--log-level", "debug", *arguments(machine, state)
    )
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command, env=agent.environment(machine.environ), stdout=full, stderr=full)
    served = Served(process=process, url=f"http://127.0.0.1:{port}", log_path=Path(os.devnull))
    try:
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                if served.get("/livez")[0] == 200:
                    break
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        wait(served, lambda: healthy(served))
        assert served.stop()[0] == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("since", ["the start", "some time later"])
def test_a_log_that_nobody_reads(machine: Machine, state: Path, since: str) -> None:
    """A collector that hangs leaves a pipe that is full: the agent starts, answers and ends all the same."""
    port = _free_port()
    command = agent.command(
        "serve", "--listen", f"127.0.0.1:{port}", "--log-level", "debug", *arguments(machine, state)
    )
    with unread_pipe(full=since == "the start") as (read, write):
        process = subprocess.Popen(command, env=agent.environment(machine.environ), stdout=write, stderr=write)
        try:
            served = Served(process=process, url=f"http://127.0.0.1:{port}", log_path=Path(os.devnull))
            if since != "the start":
                end = time.monotonic() + 60
                said = b""
                while b'"listening"' not in said:
                    assert time.monotonic() < end
                    said += os.read(read, 4096)
                fill_pipe(write)
            end = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    if served.get("/livez")[0] == 200:
                        break
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            # Each change is a line of the log that waits.
            wait(served, lambda: healthy(served))
            stays(served, 1.0)
            code, seconds = served.stop()
            assert code == 0
            assert seconds < PROMPT
        finally:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# -- time, signals, slow files ----------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_wall_clock_jumps(tmp_path: Path, machine: Machine, state: Path, library: Path) -> None:
    """Ten years back or forth are no reason for a verdict, nor for a pause; what is shown is never NaN or negative."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    env = machine.environ | {"LD_PRELOAD": str(library), "SHIM_CLOCK": str(clock)}
    with serve(tmp_path / "log", *arguments(machine, state), env=env) as served:
        wait(served, lambda: healthy(served))
        years = 365 * 86400
        for offset in [3600, -3600, 10 * years, -10 * years, 0] * max(1, COUNT // 20):
            clock.write_text(str(offset))
            runs = served.value("probe_runs_total", probe="driver", outcome="ok") or 0
            stays(served, 1.0)
            served.scrape()
            assert (served.value("probe_runs_total", probe="driver", outcome="ok") or 0) > runs
            assert served.value("ready") == 1
            assert all(value >= 0 for (name, _), value in served.samples.items() if name.endswith("seconds"))
            wrong = [value for (name, _), value in served.samples.items() if value != value]  # noqa: PLR0124 - NaN
            assert wrong == []
            shown = served.value("probe_last_success_timestamp_seconds", probe="driver") or 0
            assert abs(shown - (time.time() + offset)) < 60
        wait(served, lambda: healthy(served))
        assert ends(served) < 2 * PROMPT


def test_a_storm_of_signals(tmp_path: Path, machine: Machine, state: Path, library: Path) -> None:
    """System calls that are interrupted a thousand times a second fail nothing (EINTR)."""
    env = machine.environ | {"LD_PRELOAD": str(library), "SHIM_STORM": "1000"}
    with serve(tmp_path / "log", *arguments(machine, state), env=env) as served:
        wait(served, lambda: healthy(served))
        stays(served, 2.0 if not COUNT else 20.0)
        assert all(
            served.value("probe_runs_total", probe=probe, outcome=outcome) in (0, None)
            for probe in ("driver", "packages", "server", "flashinfer")
            for outcome in ("error", "crashed")
        )
        assert ends(served) < 2 * PROMPT


@pytest.mark.parametrize("where", with_chaos("SERVER hang", more=("/proc/ 20", "STATE hang")))
def test_files_that_do_not_open(tmp_path: Path, machine: Machine, state: Path, library: Path, where: str) -> None:
    """Where files open slowly or never it answers all the same, and ends in time; what is not seen is unknown."""
    release = tmp_path / "release"
    prefix, delay = where.split()
    assert machine.server is not None
    prefix = {"STATE": str(state), "SERVER": f"/proc/{machine.server.pid}/"}.get(prefix, prefix)
    env = machine.environ | {
        "LD_PRELOAD": str(library), "SHIM_SLOW": prefix, "SHIM_DELAY": delay, "SHIM_RELEASE": str(release)
    }  # fmt: skip
    release.touch()
    with serve(tmp_path / "log", *arguments(machine, state), env=env) as served:
        wait(served, lambda: healthy(served), seconds=60)
        release.unlink()
        stays(served, 3.0, frozenset({"state-unusable"}))
        # What nobody can read any more becomes unknown, not good and not bad.
        assert served.get("/readyz")[0] == 200
        assert served.stop()[1] < 2 * PROMPT


# -- the server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manner", with_chaos("random", more=tuple(one for one in MANNERS if one != "random")))
def test_a_server_that_misbehaves(tmp_path: Path, machine: Machine, state: Path, manner: str) -> None:
    """Whatever it does on its port: no hang, no growth, and no verdict but that nothing is known of it."""
    with BadServer(manner) as bad:
        words = arguments(machine, state)
        words[words.index("--server-url") + 1] = bad.url
        words[words.index("--server-pattern") + 1] = "no such server"
        with serve(tmp_path / "log", *words, env=machine.environ) as served:
            wait(served, lambda: served.scrape() or served.value("nvml_up") == 1)
            process = psutil.Process(served.process.pid)
            before = process.memory_info().rss
            stays(served, 2.5 if not COUNT else 15.0, frozenset({"server-unreachable"}))
            assert served.value("server_info") is None
            assert served.value("flash_attention_version", phase="prefill") is None
            assert process.memory_info().rss - before < 30 * 2**20
            assert process.num_fds() < 60
            assert bad.connections > 0
            assert ends(served) < 2 * PROMPT


# -- the environment --------------------------------------------------------------------------------------


def test_packages_that_vanish_while_they_are_read(tmp_path: Path, told: Tell) -> None:
    """An installer at work: each reading gives an answer, and none tells of a package that was always there as gone."""
    site = good(tmp_path / "venv")
    site.dist("sglang", "0.5.16")
    for number in range(60):
        site.dist(f"filler-{number}", "1.0")
    chance = random.Random(SEED)
    stop = threading.Event()

    def install() -> None:
        while not stop.is_set():
            name = f"filler-{chance.randrange(60)}"
            with contextlib.suppress(OSError):
                site.remove(f"{name.replace('-', '_')}-1.0.dist-info")
                time.sleep(chance.uniform(0, 0.002))
                site.dist(name, "1.0")

    installer = threading.Thread(target=install)
    installer.start()
    try:
        for _ in range(trials(8)):
            answer = read(site.python)
            assert answer["distributions"].get("sglang") == "0.5.16"
    finally:
        stop.set()
        installer.join()
    told("readings beside an installer", f"{trials(8)} trials")


@pytest.mark.parametrize("entries", with_chaos(25_000, more=(100_000,)))
def test_a_folder_with_very_many_entries(tmp_path: Path, entries: int) -> None:
    """Thousands of files, loops of links and files that are none take no more time than the probe has."""
    site = good(tmp_path / "venv")
    site.dist("sglang", "0.5.16")
    for number in range(entries):
        os.close(os.open(site.packages / f"f{number}.txt", os.O_CREAT | os.O_WRONLY))
    loop = site.packages / "loop"
    loop.symlink_to("loop")
    (site.packages / "loop-1.0.dist-info").symlink_to("loop-1.0.dist-info")
    (site.packages / "round").symlink_to(".")
    os.mkfifo(site.packages / "pipe.pth")
    (site.packages / "pipe-1.0.dist-info").mkdir()
    os.mkfifo(site.packages / "pipe-1.0.dist-info" / "METADATA")
    begun = time.monotonic()
    answer = read(site.python)
    assert time.monotonic() - begun < 90  # far less, but for a busy machine
    assert answer["distributions"]["sglang"] == "0.5.16"
