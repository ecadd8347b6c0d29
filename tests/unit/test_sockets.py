"""The kernel's tables of sockets, as written down and as they are here."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sidecar.sockets import Listener, is_local, listeners, listeners_of

PROC = Path("/proc")
ROW = "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 7171 1 0 100 0 0 10 0"


def table(base: Path, text: str) -> Path:
    (base / "self/net").mkdir(parents=True)
    (base / "self/net/tcp").write_text(text)
    return base


def test_a_row_is_an_address_a_port_and_an_owner(tmp_path: Path) -> None:
    """A recorded row gives what it says; the head line and a row that makes no sense give nothing."""
    proc = table(tmp_path, f"  sl  local_address\n{ROW}\n 1: zz:1 0:0 0A\n 2: 01:0 0:0 0A 0:0 0:0 0 x 0 1\n\n")
    assert listeners(proc) == (Listener(host="127.0.0.1", port=30000, uid=1000, inode=7171),)


def test_a_row_that_was_cut_is_not_read(tmp_path: Path) -> None:
    """A table that ends inside a row loses that row: a part of a number is another number."""
    assert listeners(table(tmp_path, f"  sl  local_address\n{ROW[: ROW.index('71 1')]}")) == ()


def test_tables_that_cannot_be_read_are_empty(tmp_path: Path) -> None:
    """Where there is no table, or no such process, nothing is known to listen."""
    assert listeners(tmp_path) == ()
    assert listeners_of(tmp_path, 7) == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0"])
def test_this_process_finds_its_own_listener(host: str) -> None:
    """A real socket is found with its port and owner while it listens, and is reached where it says."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if host == "::1" and not is_local(host):
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
        before = [one for one in listeners_of(PROC, os.getpid()) if one.port == port]
        server.listen()
        found = [one for one in listeners_of(PROC, os.getpid()) if one.port == port]
        with socket.create_connection((found[0].reachable_host, port), timeout=10):
            pass
    assert before == []
    assert [(one.host, one.uid) for one in found] == [(host, os.geteuid())]


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("192.0.2.1", False),
        ("2001:db8::1", False),
        ("localhost.example", False),
        ("127.1", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_are_local(host: str, local: bool) -> None:
    """Loopback is local; another machine's address and a name that would have to be looked up are not."""
    assert is_local(host) is local
