"""Threads for blocking calls, where the system has no room for another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
