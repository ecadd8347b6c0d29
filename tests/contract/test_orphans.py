"""What children leave behind: none of it stays, and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.childenv import child_environment
from sidecar.isolation import Isolation, Privilege
from tests.fakes.children import alive, python, until

ENV = child_environment(os.environ)
ORPHAN = (
    "import subprocess, time\n"
    "made = subprocess.Popen(['sh', '-c', '{command} & echo $!'], start_new_session=True, env={environ}, "
    "stdout=subprocess.PIPE, text=True)\n"
    "orphan = int(made.stdout.readline())\nmade.wait()\n"
)
"""Leaves a process whose parent is gone, in a session of its own; its number is ``orphan``."""


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    """An isolation that is closed afterwards."""
    one = Isolation()
    yield one
    await one.close()


async def test_a_daemon_that_a_child_leaves_behind_is_ended_and_other_children_are_not(isolation: Isolation) -> None:
    """A process that took a session of its own is found by its mark, once its parent is gone."""
    stranger = await asyncio.create_subprocess_exec("sleep", "600")
    code = (
        "import subprocess; daemon = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "put({'result': daemon.pid})"
    )
    report = await isolation.run(python(code), env=ENV, timeout=20)
    assert report.result is not None
    daemon = report.result["result"]
    assert await until(lambda: not alive(daemon))
    assert alive(stranger.pid)
    stranger.kill()
    await stranger.wait()


async def test_a_daemon_without_any_variable_is_ended(isolation: Isolation) -> None:
    """A daemon that forked twice and cleared its environment is known by limits that it cannot raise again."""
    stranger = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    code = (
        "import subprocess; daemon = subprocess.Popen(['sleep', '600'], start_new_session=True, env={}); "
        "put({'result': daemon.pid})"
    )
    report = await isolation.run(python(code), env=ENV, timeout=20, privilege=Privilege(capabilities=False))
    assert report.result is not None
    daemon = report.result["result"]
    assert await until(lambda: not alive(daemon))
    assert alive(stranger.pid)
    stranger.kill()
    await stranger.wait()


@pytest.mark.parametrize("environ", ["None", "{}"], ids=["marked", "cleared"])
async def test_what_a_running_child_left_is_its_own(isolation: Isolation, tmp_path: Path, environ: str) -> None:
    """The end of one child leaves alone what another one, which runs on, has put into the background."""
    go = tmp_path / "go"
    code = ORPHAN.format(command="sleep 600", environ=environ) + (
        f"put({{'stage': 'made', 'pid': orphan}})\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "put({'result': os.path.exists('/proc/%d' % orphan)})"
    )
    made = asyncio.Event()

    async def watch(_child: object, lines: object) -> None:
        if lines:
            made.set()

    first = asyncio.create_task(isolation.run(python(code), env=ENV, timeout=60, watch=watch))
    await asyncio.wait_for(made.wait(), 30)
    await isolation.run(python("put({'result': 1})"), env=ENV, timeout=20)
    go.touch()
    report = await first
    assert report.result == {"result": True}
    assert await until(lambda: not alive(report.lines[0]["pid"]))


@pytest.mark.parametrize("environ", ["None", "{}"], ids=["marked", "cleared"])
async def test_what_ended_by_itself_is_reaped(isolation: Isolation, environ: str) -> None:
    """A process in the background that ended before its time leaves no entry in the process table either."""
    # It may be reaped while the child that left it still looks, which is as good.
    code = ORPHAN.format(command="true", environ=environ) + (
        "try:\n"
        "    while open('/proc/%d/stat' % orphan).read().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.02)\n"
        "except (FileNotFoundError, ProcessLookupError):\n"
        "    pass\n"
        "put({'result': orphan})"
    )
    report = await isolation.run(python(code), env=ENV, timeout=20)
    assert report.result is not None
    assert not Path(f"/proc/{report.result['result']}").exists()


AGENT = """
import asyncio, os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from sidecar.childenv import child_environment
from sidecar.isolation import Isolation, Privilege
async def main():
    isolation = Isolation()
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    report = await isolation.run(sys.argv[1:], env=child_environment(os.environ), timeout=20,
                                 privilege=Privilege(capabilities=False))
    await isolation.close()
    print(report.result["result"], stranger.poll())
    stranger.kill()
    stranger.wait()
asyncio.run(main())
"""


async def test_where_no_core_file_is_allowed_a_daemon_is_known_as_well() -> None:
    """In containers whose limit of core files is nought anyway, another limit tells what a child started."""
    code = ORPHAN.format(command="sleep 600", environ="{}") + "put({'result': orphan})"
    done = subprocess.run(
        [sys.executable, "-c", AGENT, *python(code)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    orphan, stranger = done.stdout.split()
    assert stranger == "None"
    assert await until(lambda: not alive(int(orphan)))


async def test_a_copy_of_a_copy_that_keeps_forking_is_ended(isolation: Isolation) -> None:
    """Processes that each start another one and end are all caught, however many there were."""
    chain = "import os, sys, time\nfor _ in range(5):\n    if os.fork(): os._exit(0)\n    os.setsid()\ntime.sleep(600)"
    code = (
        f"import subprocess, time; subprocess.run([sys.executable, '-S', '-c', {chain!r}], env={{'NAMED': str(fd)}})\n"
        "put({'result': 1})"
    )
    await isolation.run(python(code), env=ENV, timeout=20, privilege=Privilege(capabilities=False))
    assert await until(lambda: not children_of_this())


def children_of_this() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}
