"""Children that do as a test tells them, and what became of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

RESULT = "import json, os, sys; fd = int(sys.argv[-1]); put = lambda o: os.write(fd, json.dumps(o).encode() + b'\\n')\n"
"""The start of a child's code: ``put`` sends an object over the channel."""


def python(code: str) -> list[str]:
    """A command that runs code with `RESULT` in front of it."""
    return [sys.executable, "-c", RESULT + code]


def alive(pid: int) -> bool:
    """True for a process that exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether a condition comes to hold within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        await asyncio.sleep(0.02)
    return condition()
