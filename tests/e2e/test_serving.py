"""The served agent as its users meet it: Prometheus, secrets, wrong input, preflight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import agent, shim
from tests.fakes.nvml import Scenario
from tests.fakes.pipes import unread_pipe
from tests.fakes.sglang import MARKER, FakeSglang, answering, capture, endless, hundred_megabytes, serve
from tests.fakes.site import good


@contextlib.contextmanager
def sglang(fake: FakeSglang) -> Iterator[FakeSglang]:
    """The fake server in a thread of its own, for tests that block."""
    loop = asyncio.new_event_loop()
    ready, done = threading.Event(), asyncio.Event()

    async def main() -> None:
        async with serve(fake):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _nothing_ignored() -> Iterator[None]:
    """Signals end what a test starts, also where nohup or a shell's background hands on that they are ignored."""
    ignored = [number for number in STOPS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_prometheus_scrapes_it(tmp_path: Path, fake_library: Path) -> None:
    """A real Prometheus finds the target up and answers queries over our series."""
    env = Scenario(tmp_path / "scenario", gpus=8).environ(fake_library)
    port = free_port()
    with sglang(FakeSglang()) as server, agent.serve(tmp_path / "log", "--server-url", server.url, env=env) as served:
        served.until("gpus_visible", 8)
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            "scrape_configs:\n"
            f"- {{job_name: sidecar, static_configs: [{{targets: ['{served.url.removeprefix('http://')}']}}]}}\n"
        )
        with (tmp_path / "prometheus.log").open("wb") as log:
            prometheus = subprocess.Popen(
                ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            assert _query(port, "up", 30) == ["1"]
            assert _query(
                port, "count(sglang_sidecar_gpu_memory_used_bytes < sglang_sidecar_gpu_memory_total_bytes)"
            ) == ["8"]
            assert _query(port, 'sglang_sidecar_flash_attention_version{phase="decode"}') == ["3"]
            join = "sglang_sidecar_gpu_power_watts * on (uuid) group_left (name) sglang_sidecar_gpu_info"
            assert _query(port, f"count({join})") == ["8"]
        finally:
            prometheus.terminate()
            prometheus.wait(30)


def _query(port: int, expression: str, seconds: float = 15) -> list[str]:
    end = time.monotonic() + seconds
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.request.quote(expression)}"  # type: ignore[attr-defined]  # re-exported
    while True:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(address, timeout=5) as response:
                values = [series["value"][1] for series in json.load(response)["data"]["result"]]
            if values and values != ["0"]:
                return values
        if time.monotonic() > end:
            return []
        time.sleep(0.3)


def test_no_secret_leaves_the_agent(tmp_path: Path, fake_library: Path) -> None:
    """A key in the server's answer, command line and environment is in nothing that is served or logged."""
    payload = capture("0.5.16") | {"admin_api_key": MARKER, "launch_command": f"sglang serve --api-key {MARKER}"}
    launcher = tmp_path / "sglang" / "launch_server.py"
    launcher.parent.mkdir()
    (launcher.parent / "__init__.py").touch()
    launcher.write_text("import time; time.sleep(600)\n")
    key = tmp_path / "key"
    key.write_text(MARKER + "\n")
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    with sglang(FakeSglang(info=payload, api_key=MARKER)) as server:
        port = server.url.rpartition(":")[2]
        started = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", "--port", port, "--api-key", MARKER],
            cwd=tmp_path,
            env=os.environ | {"SGLANG_API_KEY": MARKER, "PYTHONPATH": str(tmp_path)},
        )
        try:
            arguments = ("--server-url", server.url, "--server-key-file", str(key), "--log-level", "debug")
            with agent.serve(tmp_path / "log", *arguments, env=env) as served:
                served.until("server_up", 1)
                served.until("flash_attention_version", 0, phase="prefill")
                assert served.report()["server"]["pid"] == started.pid
                for path in ("/metrics", "/report", "/", "/readyz?verbose", "/livez", "/startupz"):
                    assert MARKER not in served.get(path)[1], path
                served.stop()
                assert MARKER not in served.log
            for form in ("text", "json", "metrics"):
                checked = agent.run("check", "-v", "--no-import", "--format", form, *arguments, env=env)
                assert MARKER not in checked.stdout + checked.stderr
        finally:
            started.kill()
            started.wait()


@pytest.mark.parametrize(
    "special",
    [
        answering("<html>login</html>"),
        answering("{", content_type="application/json"),
        answering("[" * 100_000, content_type="application/json"),
        answering(b"\xff\xfe\x00", content_type="application/json"),
        answering("broken", status=500),
        endless,
        hundred_megabytes,
    ],
    ids=["html", "cut", "deep", "bytes", "500", "endless", "100MB"],
)
def test_a_server_that_is_no_sglang(tmp_path: Path, fake_library: Path, special: object) -> None:
    """Whatever the address answers, one condition with one sentence says so and the rest of the agent goes on."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    fake = FakeSglang(special=special)  # type: ignore[arg-type]  # a handler
    with sglang(fake) as server, agent.serve(tmp_path / "log", "--server-url", server.url, env=env) as served:
        served.until("condition_active", 1, code="server-unreachable")
        served.until("nvml_up", 1)
        served.until("ready", 1)
        assert served.value("process_resident_memory_bytes") < 120 * 2**20  # type: ignore[operator]  # present
        (said,) = [c for c in served.report()["conditions"] if c["code"] == "server-unreachable"]
        assert said["message"].count("\n") == 0
        assert served.value("flash_attention_version", phase="prefill") is None


def test_a_key_on_a_disk_that_does_not_answer(tmp_path: Path, fake_library: Path) -> None:
    """It is told; the agent answers and ends meanwhile, one thread waits, and the key is used once it is there."""
    key, release = tmp_path / "key", tmp_path / "release"
    key.write_text(MARKER)
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library) | {
        "LD_PRELOAD": str(shim.build(tmp_path / "shim")),
        "SHIM_SLOW": str(key), "SHIM_DELAY": "hang", "SHIM_RELEASE": str(release),
    }  # fmt: skip
    with sglang(FakeSglang(api_key=MARKER)) as server:
        arguments = ("--server-url", server.url, "--server-key-file", str(key), "--intervals", "server=1")
        with agent.serve(tmp_path / "log", *arguments, env=env) as served:
            served.until("condition_active", 1, code="server-unauthorized")
            (said,) = [one for one in served.report()["conditions"] if one["code"] == "server-unauthorized"]
            assert said["reason"] == "key-unreadable"
            assert said["message"].endswith(f"{key} does not answer.")
            threads = []
            for _ in range(2):
                rounds = served.value("probe_runs_total", probe="server", outcome="ok") or 0
                while (served.value("probe_runs_total", probe="server", outcome="ok") or 0) < rounds + 3:
                    assert served.get("/livez")[0] == 200
                    served.scrape()
                    time.sleep(0.1)
                threads.append(len(os.listdir(f"/proc/{served.process.pid}/task")))
            # A thread for each round would be three more at least.
            assert threads[1] < threads[0] + 3
            release.touch()
            served.until("condition_active", 0, code="server-unauthorized")
            release.unlink()
            code, seconds = served.stop()
            assert code == 0
            assert seconds < 2
            assert MARKER not in served.log


def test_an_interpreter_that_does_not_exist_stops_only_its_probes(tmp_path: Path, fake_library: Path) -> None:
    """A wrong server_python is one clear sentence; driver and endpoints go on."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    for python, word in (
        ("/nonexistent/bin/python", "does not exist; correct server_python"),
        ("/bin/true", "/bin/true"),
    ):
        with agent.serve(tmp_path / "log", "--server-python", python, env=env) as served:
            served.until("nvml_up", 1)
            served.until("probe_success", 0, probe="packages")
            detail = served.report()["probes"]["packages"]["detail"]
            assert word in detail
            assert "server_python" in detail
            assert served.get("/livez")[0] == 200
            assert {c["code"]: c for c in served.report()["conditions"]}["flashinfer-not-installed"][
                "status"
            ] == "unknown"


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (("--listen", "nowhere"), {}, ("listen", "nowhere", "HOST:PORT")),
        (("--no-such-flag",), {}, ("--no-such-flag",)),
        ((), {"SGLANG_SIDECAR_IMPORT": "sometimes"}, ("import", "sometimes", "auto", "never")),
        (("--config", "/nonexistent.toml"), {}, ("/nonexistent.toml",)),
        (("--server-root", "/etc/passwd"), {}, ("server_root", "/etc/passwd", "directory")),
        (("--require", "warp-drive"), {}, ("require", "warp-drive", "flashinfer-mamba")),
        (("--server-url", "ftp://x"), {}, ("server_url", "ftp://x", "http")),
    ],
)
def test_wrong_settings_are_one_clear_sentence_each(
    arguments: tuple[str, ...], env: dict[str, str], words: tuple[str, ...]
) -> None:
    """A bad value names the key, the value and what is allowed, with status 64, never 2 ("critical")."""
    for command in ("serve", "check"):
        ended = agent.run(command, *arguments, env=env)
        assert ended.returncode == 64
        assert all(word in ended.stderr for word in words), ended.stderr
        assert "Traceback" not in ended.stderr


def test_an_address_in_use_is_one_clear_sentence() -> None:
    """A taken address ends serve with status 64 and its name."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = agent.run("serve", "--listen", address)
    assert ended.returncode == 64
    assert address in ended.stderr
    assert ended.stderr.strip().count("\n") == 0


def test_variables_that_kubernetes_injects_are_no_settings(tmp_path: Path) -> None:
    """A service called sglang-sidecar puts its addresses into every pod's environment; they are ignored."""
    env = {
        "SGLANG_SIDECAR_PORT": "tcp://10.0.0.1:9477",
        "SGLANG_SIDECAR_SERVICE_HOST": "10.0.0.1",
        "SGLANG_SIDECAR_SERVICE_PORT": "9477",
        "SGLANG_SIDECAR_PORT_9477_TCP_ADDR": "10.0.0.1",
        "SGLANG_SIDECAR_LOG_LEVEL": "debug",
    }
    shown = agent.run("config", "show", "--format", "json", env=env)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "10.0.0.1" not in shown.stdout


def test_preflight_judges_the_flags_after_the_dashes(tmp_path: Path, fake_library: Path) -> None:
    """`check -- LAUNCH` shows the backends that the launch asks for, by phase, as declared."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    launch = ("--", "python3", "-m", "sglang.launch_server", "--prefill-attention-backend", "fa4",
              "--decode-attention-backend=fa3", "--api-key", MARKER)  # fmt: skip
    checked = agent.run("check", "--no-import", "--format", "json", *launch, env=env)
    attention = json.loads(checked.stdout)["attention"]
    assert (attention["prefill"]["declared"], attention["prefill"]["version"]) == ("fa4", 4)
    assert (attention["decode"]["declared"], attention["decode"]["version"]) == ("fa3", 3)
    assert MARKER not in checked.stdout + checked.stderr


def test_the_json_of_check_is_the_report(tmp_path: Path, fake_library: Path) -> None:
    """`check --format json` and /report have the same shape, and the exit status follows --fail-on."""
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library)
    with agent.serve(tmp_path / "log", env=env) as served:
        served.until("nvml_up", 1)
        shape = served.report().keys()
    checked = agent.run("check", "--no-import", "--format", "json", env=env)
    assert json.loads(checked.stdout).keys() == shape
    Scenario(tmp_path / "scenario").set({"nvmlInit": 9})
    assert agent.run("check", "--no-import", "--placement", "host", env=env).returncode == 2
    assert agent.run("check", "--no-import", "--placement", "host", "--fail-on", "critical", env=env).returncode == 2


def test_closed_standard_streams(tmp_path: Path) -> None:
    """Without stdin, stdout and stderr it runs all the same, and a check's status is its own."""
    port = free_port()
    shell = " ".join(agent.command("serve", "--listen", f"127.0.0.1:{port}")) + " <&- >&- 2>&-"
    served = subprocess.Popen(["sh", "-c", "exec " + shell], env=agent.environment())
    try:
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                assert urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=2).read() == b"ok\n"
                break
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        served.terminate()
        assert served.wait(10) == 0
    shell = " ".join(agent.command("explain")) + " >/dev/full"
    full = subprocess.run(["sh", "-c", shell], env=agent.environment(), capture_output=True, text=True, check=False)
    assert full.returncode == 70
    assert full.stderr.count("\n") == 1
    shell = " ".join(agent.command("check", "--no-import", "--format", "json")) + " 2>&-"
    quiet = subprocess.run(["sh", "-c", shell], env=agent.environment(), capture_output=True, text=True, check=False)
    assert json.loads(quiet.stdout)["verdict"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["explain"], 0),
        (["explain", "no-such-code"], 64),
        (["serve", "--demo", "no-such-demo"], 64),
        (["serve", "--no-such-flag"], 64),
        (["config", "show", "--intervals", "driver=x"], 64),
        (["config", "show", "--config", "/nonexistent.toml"], 64),
        (["explain", "--", "--tp", "2"], 64),
    ],
)
def test_a_full_disk_behind_stderr_changes_no_status(words: list[str], status: int, unbuffered: str) -> None:
    """Python itself ends with 120 where it cannot write at exit what is left (bugs.python.org/issue5319)."""
    environ = agent.environment({"PYTHONUNBUFFERED": unbuffered})
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(agent.command(*words), env=environ, stdout=subprocess.DEVNULL, stderr=full, check=False)
    assert ended.returncode == status


@pytest.mark.parametrize(
    "words", [["serve", "--no-such-flag"], ["serve", "--config", "/nonexistent.toml"], ["serve", "--demo", "no-such"]]
)
def test_a_log_that_nobody_reads_keeps_no_start_from_failing(words: list[str]) -> None:
    """A container that cannot start ends, so that it is told, also where nobody reads what it says."""
    with unread_pipe(full=True) as (_, write):
        ended = subprocess.run(
            agent.command(*words), env=agent.environment(), stdout=write, stderr=write, check=False, timeout=30
        )
    assert ended.returncode == 64


# -- signals ----------------------------------------------------------------------------------------------


def console_script() -> list[str]:
    """What an installer makes of the package's entry."""
    project = tomllib.loads((agent.ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["sglang-sidecar"].partition(":")
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


def image_script() -> list[str]:
    """What an image starts, but for its interpreter."""
    return [sys.executable, str(agent.ROOT / "deploy/image/sglang-sidecar")]


@contextlib.contextmanager
def loading(tmp_path: Path, command: list[str], **more: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command that is still loading its libraries, one of which takes for ever; and the id of its own process."""
    folder = tmp_path / "slow"
    folder.mkdir()
    begun = tmp_path / "begun"
    (folder / "structlog.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")
    env = agent.environment({"PYTHONPATH": f"{folder}:{agent.ROOT}"})
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        end = time.monotonic() + 30
        while not begun.exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield process, (agent.children(process.pid) or [process.pid])[-1]
    finally:
        for left in (*agent.children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
@pytest.mark.parametrize(
    "command", [agent.command(), console_script(), image_script()], ids=["module", "console script", "image"]
)
@pytest.mark.parametrize("words", [["serve"], ["explain"]], ids=" ".join)
def test_a_signal_while_it_loads_ends_it(
    tmp_path: Path, command: list[str], words: list[str], number: signal.Signals
) -> None:
    """At once, with the status for it and without a traceback."""
    with loading(tmp_path, [*command, *words]) as (process, _):
        process.send_signal(number)
        assert process.communicate(timeout=10) == ("", "")
        assert process.returncode == 128 + number


def _may_make_processes_1() -> bool:
    return subprocess.run(["unshare", "-pf", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _may_make_processes_1(), reason="this machine lets no process have processes of its own")
def test_process_1_of_a_container_ends_while_it_loads(tmp_path: Path) -> None:
    """The kernel drops what process 1 has no handler for: a pod would wait out its grace period."""
    with loading(tmp_path, ["unshare", "-pf", *agent.command("serve")]) as (process, pid):
        assert pid != process.pid
        os.kill(pid, signal.SIGTERM)
        assert process.communicate(timeout=10) == ("", "")
        assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_that_was_ignored_stays_ignored_while_it_loads(tmp_path: Path) -> None:
    """As nohup wants it."""
    ignoring = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with loading(tmp_path, agent.command("check"), preexec_fn=ignoring) as (process, _):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_signal_while_it_prints_ends_it(number: signal.Signals) -> None:
    """After the event loop as before it."""
    with unread_pipe() as (read, write):
        command = agent.command("check", "--demo", "healthy", "--format", "json")
        process = subprocess.Popen(command, env=agent.environment(), stdout=write, stderr=subprocess.PIPE)
        # There is more to be printed than fits.
        assert select.select([read], [], [], 60)[0]
        process.send_signal(number)
        assert process.communicate(timeout=10)[1] == b""
        assert process.returncode == 128 + number


def test_a_slow_import_loses_no_verdict(tmp_path: Path, fake_library: Path) -> None:
    """A check waits for an import longer than facts live in a running agent, and keeps what it found first."""
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    scenario.set({"nvmlInit": 9})
    site = good(tmp_path / "venv")
    site.flashinfer(mamba="import time; time.sleep(4)\ndef selective_state_update(): pass\n")
    arguments = ("--placement", "host", "--server-python", site.python, "--intervals", "driver=0.5",
                 "--deadlines", "driver=1")  # fmt: skip
    checked = agent.run("check", *arguments, env=scenario.environ(fake_library))
    assert checked.returncode == 2
    assert checked.stdout.startswith("critical: driver-not-loaded")


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_check_that_is_stopped_leaves_nothing(tmp_path: Path, fake_library: Path, number: signal.Signals) -> None:
    """A signal during an import ends its child and removes its folder, and the status says which it was."""
    site = good(tmp_path / "venv")
    site.flashinfer(mamba="import time; time.sleep(600)")
    (tmp_path / "tmp").mkdir()
    env = Scenario(tmp_path / "scenario", gpus=1).environ(fake_library) | {"TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(
        agent.command("check", "--server-python", site.python), env=agent.environment(env), stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 20
    while not list((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.5)
    children = agent.children(process.pid)
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [pid for pid in children if agent.running(pid)] == []


def test_many_connections_that_never_ask(tmp_path: Path) -> None:
    """Hundreds of half-sent requests keep no probe from being answered, also where the limit starts low."""
    low = "import resource, os, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
    low += "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); os.execv(sys.argv[1], sys.argv[1:])"
    port = free_port()
    command = agent.command("serve", "--listen", f"127.0.0.1:{port}", "--server-url", "http://127.0.0.1:9")
    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen([sys.executable, "-c", low, *command], env=agent.environment(), stderr=log)
    half_open: list[socket.socket] = []
    try:
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError):
                half_open.append(socket.create_connection(("127.0.0.1", port), timeout=2))
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(400):
            half_open.append(socket.create_connection(("127.0.0.1", port), timeout=2))
            half_open[-1].sendall(b"GET /l")
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=5).read() == b"ok\n"
    finally:
        for connection in half_open:
            connection.close()
        served.terminate()
        assert served.wait(10) == 0
    assert (tmp_path / "log").stat().st_size < 100_000
