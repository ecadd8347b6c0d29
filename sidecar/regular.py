"""Files that somebody else puts in their place: opened without waiting for anybody, and read only where they are files.

A path may name something else by the time it is opened: to open a pipe waits for its other end, which nobody may hold.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class IrregularError(Exception):
    """A path names a pipe, a socket or a device. The argument goes on behind the path."""


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading; ``flags`` are further ones of open(2).

    Blocks for as long as the file system does, and for nobody's end of a pipe. Raises OSError, also for a folder, and
    `IrregularError`.
    """

    def opener(name: str, _flags: int) -> int:
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)

    file = open(path, "rb", opener=opener)  # noqa: SIM115 - Path has no opener; the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise IrregularError("is no regular file")
    return file


def read_regular(path: str | Path, limit: int) -> bytes:
    """The start of a regular file, ``limit`` bytes at most. Blocks and raises like `open_regular`."""
    with open_regular(path) as file:
        return file.read(limit)
