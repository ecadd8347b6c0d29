"""Which TCP sockets listen here, as the kernel's own tables in ``/proc`` tell it.

Nothing is connected to. Reading these files and links never touches another program's files, so it cannot block on
them.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import Struct

_TABLE_LIMIT: Final = 1024 * 1024
"""Bytes read of one table. Listening sockets come first in it: this is room for about 7000 of them."""
_DESCRIPTOR_LIMIT: Final = 4096
"""File descriptors looked at. They are listed by number, and a server opens its listening socket early."""
_LISTEN: Final = "0A"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to


class Listener(Struct, frozen=True, kw_only=True):
    """A listening TCP socket. ``uid`` is the user that opened it, ``inode`` tells it from others."""

    host: str
    port: int
    uid: int
    inode: int

    @property
    def reachable_host(self) -> str:
        """The address at which it is reached from the same machine: loopback where it listens on every address."""
        return _ANY.get(self.host, self.host)


def listeners(proc: Path, process: str = "self") -> tuple[Listener, ...]:
    """Every listening socket of a process's network namespace, IPv4 first; empty where the tables cannot be read."""
    return tuple(listener for table in ("tcp", "tcp6") for listener in _table(proc / process / "net" / table))


def listeners_of(proc: Path, pid: int) -> tuple[Listener, ...]:
    """The listening sockets that a process itself holds; empty where that may not be read, or it holds none."""
    held = _sockets(proc / str(pid) / "fd")
    return tuple(listener for listener in listeners(proc, str(pid)) if listener.inode in held) if held else ()


def is_local(host: str) -> bool:
    """Whether an address is this machine's own. A name other than ``localhost`` is not looked up: it is not."""
    if host == "localhost":
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # The kernel takes only an address of its own, and a bound socket that waits for nothing disturbs nobody.
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _table(path: Path) -> Iterator[Listener]:
    try:
        with path.open("rb") as file:
            text = file.read(_TABLE_LIMIT).decode("ascii", "replace")
    except OSError:
        return
    # Past the limit the last line may be cut inside a number.
    for line in text.rpartition("\n")[0].splitlines()[1:]:
        fields = line.split()
        try:
            if fields[3] == _LISTEN:
                host, _, port = fields[1].partition(":")
                yield Listener(host=_host(host), port=int(port, 16), uid=int(fields[7]), inode=int(fields[9]))
        except (IndexError, ValueError, struct.error):
            continue


def _host(digits: str) -> str:
    """An address as the tables write it: hexadecimal words of four bytes in this machine's byte order."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return socket.inet_ntop(
        socket.AF_INET if len(words) == 1 else socket.AF_INET6, struct.pack(f"={len(words)}I", *words)
    )


def _sockets(folder: Path) -> set[int]:
    """Inodes of the sockets among a process's file descriptors."""
    found: set[int] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _DESCRIPTOR_LIMIT):
                target = _link(Path(entry.path))
                if target.startswith("socket:[") and target[8:-1].isdecimal():
                    found.add(int(target[8:-1]))
    except OSError:
        return found
    return found


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed since it was listed
        return ""
