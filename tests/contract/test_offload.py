"""Threads for blocking calls: where the system has no room for another one, and where a call hangs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sidecar.offload import OneByOne

PROGRAM = """
import asyncio, os, resource
from sidecar.config import Settings
from sidecar.exhaustion import exhausted
from sidecar.offload import in_daemon_thread

async def main():
    try:
        await in_daemon_thread(lambda: 1)
    except OSError as error:
        print(exhausted(error), error.strerror)

assert asyncio.run(in_daemon_thread(lambda: 1)) == 1
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.getuid() == 0:
    os.setuid(65534)  # no limit holds for root
asyncio.run(main())
"""


def test_no_room_for_a_thread_is_what_the_system_refuses() -> None:
    """Not an error of another kind, which would count as a bug of the agent (a container's limit of processes)."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "True no thread can be started\n", done.stderr


async def test_a_call_that_hangs_is_waited_for_once() -> None:
    """Further ones fail at once and start no thread, until it returns."""
    calls = OneByOne(1.0)
    assert await calls.run(lambda: 1) == 1
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await calls.run(release.wait)
    threads = threading.active_count()
    begun = time.monotonic()
    for _ in range(20):
        with pytest.raises(TimeoutError):
            await calls.run(lambda: 2)
    assert time.monotonic() - begun < 0.9
    assert threading.active_count() == threads
    release.set()
    end = time.monotonic() + 10
    while True:
        try:
            assert await calls.run(lambda: 3) == 3
            break
        except TimeoutError:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)


async def test_calls_at_the_same_time_come_one_after_another() -> None:
    """Each has its own result or error, whatever the one before it came to."""
    calls = OneByOne(10.0)
    results = await asyncio.gather(*(calls.run(lambda n=n: 6 // n) for n in range(4)), return_exceptions=True)
    assert isinstance(results[0], ZeroDivisionError)
    assert results[1:] == [6, 3, 2]
