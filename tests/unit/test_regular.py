"""Only regular files are read, and nobody is waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sidecar.regular import IrregularError, open_regular, read_regular


def test_the_start_of_a_file(tmp_path: Path) -> None:
    """As much as asked for; through a link, unless that is ruled out."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"abcdef")
    link.symlink_to(path)
    assert read_regular(path, 4) == read_regular(str(link), 4) == b"abcd"
    with pytest.raises(OSError, match="symbolic"):
        open_regular(link, os.O_NOFOLLOW)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe that nobody writes to, an endless device, a socket and a folder; none stays open."""
    pipe, listening = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(listening))
        before = len(os.listdir("/proc/self/fd"))
        for path in (pipe, Path("/dev/zero")):
            with pytest.raises(IrregularError, match="is no regular file"):
                read_regular(path, 1)
        for path in (listening, tmp_path, tmp_path / "none"):
            with pytest.raises(OSError, match=r"."):
                read_regular(path, 1)
        assert len(os.listdir("/proc/self/fd")) == before
