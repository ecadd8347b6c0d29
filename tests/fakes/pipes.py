"""Pipes whose reader does not read, as behind a log collector that hangs."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def unread_pipe(*, full: bool = False) -> Iterator[tuple[int, int]]:
    """The two ends of a pipe that holds no more than a page; ``full``: as much is in it already."""
    read, write = os.pipe()
    try:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        if full:
            fill(write)
        yield read, write
    finally:
        os.close(read)
        os.close(write)


def fill(write: int) -> None:
    """Fill a pipe. Whoever else writes to it blocks from now on."""
    # Opened anew: this one alone does not block.
    own = os.open(f"/proc/self/fd/{write}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"\n" * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"\n")
    finally:
        os.close(own)
