"""A process that has no file descriptor left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Let nothing be opened in this process while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    # Numbers that are free below the highest one in use would still be given out.
    top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in held:
            os.close(one)
