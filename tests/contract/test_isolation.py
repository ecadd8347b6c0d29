"""Isolation against real children: what they do must never reach the agent."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.childenv import child_environment
from sidecar.isolation import FLOOD, Isolation, Privilege
from tests.fakes.children import RESULT, alive, python, until


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    """An isolation that is closed afterwards."""
    one = Isolation()
    yield one
    await one.close()


ENV = child_environment(os.environ)


async def test_the_result_is_read_although_the_child_prints_noise_and_aborts(isolation: Isolation) -> None:
    """Output never mixes with the result, and a crash after it is told by its signal."""
    code = "print('noise' * 10); put({'stage': 'one'}); put({'result': {'ok': True}}); sys.stdout.flush(); os.abort()"
    report = await isolation.run(python(code), env=ENV, timeout=20)
    assert report.result == {"result": {"ok": True}}
    assert report.stage == "one"
    assert report.signal_name == "SIGABRT"
    assert report.tail.startswith("noise")
    assert not report.timed_out


async def test_a_hanging_child_and_its_descendants_are_ended(isolation: Isolation) -> None:
    """The kill reaches what the child started, and the last stage says where it hung."""
    code = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '600'], pass_fds=(fd,)); "
        "put({'stage': 'hang', 'pid': child.pid}); time.sleep(600)"
    )
    report = await isolation.run(python(code), env=ENV, timeout=1.5)
    assert report.timed_out
    assert report.stage == "hang"
    pid = report.lines[0]["pid"]
    assert await until(lambda: not alive(pid))
    assert isolation.abandoned == 0


async def test_a_descendant_that_keeps_the_channel_open_does_not_hold_up_the_end(isolation: Isolation) -> None:
    """A child that has ended is done, even if something it started still holds its descriptors."""
    code = "import subprocess; subprocess.Popen(['sleep', '600'], pass_fds=(fd,)); put({'result': 1})"
    report = await isolation.run(python(code), env=ENV, timeout=60)
    assert report.result == {"result": 1}
    assert report.exit_code == 0
    assert report.duration < 30


@pytest.mark.parametrize(
    ("program", "sentence"),
    [("/nonexistent/python", "No such file or directory"), ("/etc/passwd", "Permission denied")],
)
async def test_a_program_that_cannot_be_started_is_a_sentence_not_an_exception(
    isolation: Isolation, program: str, sentence: str
) -> None:
    """An interpreter that does not exist is told with the system's own words."""
    report = await isolation.run([program], env=ENV, timeout=20)
    assert report.exec_error == sentence


async def test_garbage_on_the_channel_is_counted_and_ignored(isolation: Isolation) -> None:
    """Bytes that are no JSON object do no harm."""
    code = "os.write(fd, b'\\xff\\xfe nonsense\\n[1]\\n'); put({'result': 2})"
    report = await isolation.run(python(code), env=ENV, timeout=20)
    assert report.result == {"result": 2}
    assert report.garbage > 0


@pytest.mark.parametrize(
    "flood",
    ["put({'stage': 'x'})", "os.write(fd, b'{' * 60000)"],
    ids=["lines", "garbage"],
)
async def test_a_flood_on_the_result_channel_ends_the_child_and_leaves_the_loop_free(
    isolation: Isolation, flood: str
) -> None:
    """A child that never stops sending is ended with a token; meanwhile the event loop serves others."""
    lag = 0.0

    async def measure() -> None:
        nonlocal lag
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            lag = max(lag, time.monotonic() - begun)

    meter = asyncio.create_task(measure())
    report = await isolation.run(python(f"\nwhile True: {flood}"), env=ENV, timeout=60)
    meter.cancel()
    assert report.stopped == FLOOD
    assert report.killed
    assert len(report.lines) < 3000
    assert lag < 2


async def test_variables_of_the_child_do_not_act_on_the_launcher(isolation: Isolation, tmp_path: Path) -> None:
    """Code that a variable names runs in the child, with its lowered rights, and never before."""
    (tmp_path / "libffi.so.8").write_text("not a library")
    (tmp_path / "sitecustomize.py").write_text(
        f"import os; open({str(tmp_path / 'ran')!r}, 'a').write('%d\\n' % os.getuid())"
    )
    extra = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "LD_AUDIT": "/nonexistent.so"}
    report = await isolation.run(python("put({'result': 1})"), env=child_environment(os.environ, extra), timeout=20)
    assert report.exec_error is None
    assert report.result == {"result": 1}
    assert (tmp_path / "ran").read_text().count("\n") == 1


async def test_a_child_that_closes_its_channel_and_stays_is_ended_by_us(isolation: Isolation) -> None:
    """A SIGKILL of ours is told apart from one of the kernel's."""
    code = "os.close(fd); import time; time.sleep(600)"
    report = await isolation.run(python(code), env=ENV, timeout=60)
    assert (report.exit_code, report.killed, report.timed_out) == (-9, True, False)
    gone = await isolation.run(python("os.kill(os.getpid(), 9)"), env=ENV, timeout=60)
    assert (gone.exit_code, gone.killed) == (-9, False)


async def test_a_launch_that_fails_in_any_way_is_an_exec_error(isolation: Isolation) -> None:
    """What goes wrong before the program runs is never taken for the program's own end."""
    report = await isolation.run(python("put({'result': 1})"), env=ENV, timeout=20, privilege=Privilege(groups=(-1,)))
    assert report.exec_error is not None
    assert report.result is None


async def test_endless_output_is_bounded(isolation: Isolation) -> None:
    """A child that prints for ever costs a bounded tail."""
    code = "import itertools\nfor _ in itertools.repeat(0, 20000): sys.stdout.write('x' * 100)\nput({'result': 3})"
    report = await isolation.run(python(code), env=ENV, timeout=60)
    assert report.result == {"result": 3}
    assert len(report.tail) <= 32768


async def test_a_child_starts_in_the_folder_that_it_is_given(isolation: Isolation, tmp_path: Path) -> None:
    """Its folder is the given one; where that cannot be entered nothing runs, and the launcher says why."""
    report = await isolation.run(python("put({'result': os.getcwd()})"), env=ENV, timeout=20, cwd=str(tmp_path))
    assert report.result == {"result": str(tmp_path)}
    report = await isolation.run(python("put({'result': 1})"), env=ENV, timeout=20, cwd=str(tmp_path / "no"))
    assert (report.result, report.exec_error) == (None, "No such file or directory")
    assert report.lines[0]["folder"] == str(tmp_path / "no")


async def test_json_without_end_is_garbage(isolation: Isolation) -> None:
    """A line nested deeper than Python can read is passed over, and the result after it arrives."""
    code = "fd = int(sys.argv[-1]); os.write(fd, b'[' * 100000 + b'\\n'); put({'result': 1})"
    report = await isolation.run(python(code), env=ENV, timeout=20)
    assert (report.result, report.garbage) == ({"result": 1}, 100000)


async def test_a_watch_can_stop_a_child(isolation: Isolation) -> None:
    """A supervisor's token ends the child and is handed on."""

    async def watch(_child: object, lines: object) -> str | None:
        return "too-much" if lines else None

    report = await isolation.run(
        python("put({'stage': 'grow'}); import time; time.sleep(600)"), env=ENV, timeout=60, watch=watch
    )
    assert report.stopped == "too-much"
    assert not report.timed_out


async def test_cancelling_leaves_no_child(isolation: Isolation) -> None:
    """A probe that is cancelled takes its child with it."""
    task = asyncio.create_task(isolation.run(python("import time; time.sleep(600)"), env=ENV, timeout=600))
    await asyncio.sleep(0.3)
    (child,) = isolation._children  # the pid of a child that run() keeps to itself
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(child.pid)


async def test_a_child_has_no_core_dumps_and_gains_no_privileges(isolation: Isolation) -> None:
    """No core is dumped, not even to a program; no_new_privs is on, the niceness holds, it leads its own session."""
    core = min(1, resource.getrlimit(resource.RLIMIT_CORE)[1] % 2**64)
    code = (
        "import resource; status = open('/proc/self/status').read(); "
        "put({'result': {'core': resource.getrlimit(resource.RLIMIT_CORE)[1], 'nnp': 'NoNewPrivs:\\t1' in status, "
        "'nice': os.nice(0), 'leader': os.getsid(0) == os.getpid()}})"
    )
    report = await isolation.run(python(code), env=ENV, timeout=20, nice=10)
    assert report.result == {"result": {"core": core, "nnp": True, "nice": min(19, os.nice(0) + 10), "leader": True}}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand its identity down")
async def test_a_child_runs_as_the_user_it_is_given(isolation: Isolation) -> None:
    """Uid, gid and groups are the given ones and no capability is left."""
    code = (
        "status = open('/proc/self/status').read(); "
        "put({'result': [os.getresuid(), os.getresgid(), os.getgroups(), 'CapEff:\\t0000000000000000' in status]})"
    )
    report = await isolation.run(
        _as_anyone(code),
        env=ENV | {"HOME": "/"},
        timeout=20,
        privilege=Privilege(uid=65534, gid=65534, groups=()),
    )
    assert report.result == {"result": [[65534] * 3, [65534] * 3, [], True]}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")
async def test_a_child_that_stays_root_loses_every_capability(isolation: Isolation) -> None:
    """Permitted, effective and inheritable sets are empty after exec, although the user is root."""
    code = (
        "sets = [line.split() for line in open('/proc/self/status') if line[:6] in ('CapInh', 'CapPrm', 'CapEff')]; "
        "put({'result': [os.geteuid(), [int(mask, 16) for _, mask in sets]]})"
    )
    report = await isolation.run(_as_anyone(code), env=ENV, timeout=20, privilege=Privilege(capabilities=False))
    assert report.result == {"result": [0, [0, 0, 0]]}


def _as_anyone(code: str) -> list[str]:
    """A Python that any user may run: the one under test may live in root's home."""
    for candidate in ("/usr/bin/python3", sys.executable):
        if os.path.exists(candidate):
            return [candidate, "-c", RESULT + code]
    raise AssertionError("no interpreter")


async def test_children_die_with_a_killed_agent(tmp_path: Path) -> None:
    """SIGKILL of the agent ends its children through the parent-death signal."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import asyncio, os, sys\n"
        "from sidecar.childenv import child_environment\n"
        "from sidecar.isolation import Isolation\n"
        "async def main():\n"
        "    child = await Isolation().start([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "env=child_environment(os.environ))\n"
        "    await asyncio.sleep(0.7)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(agent), stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert alive(pid)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await until(lambda: not alive(pid))
