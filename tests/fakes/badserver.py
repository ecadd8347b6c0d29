"""Servers that are none: each misbehaves in one manner on its port, or in all of them at random."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class BadServer:
    """Serves on a free port of loopback, a thread for each connection, until the block is left."""

    def __init__(self, manner: str) -> None:
        self._behave = _MANNERS[manner]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._stop = threading.Event()
        self._chance = random.Random(manner)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(one,), daemon=True).start()

    def _talk(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError), one:
            one.settimeout(10)
            self._behave(self, one)

    def pause(self, seconds: float) -> bool:
        """Wait; whether to go on."""
        return not self._stop.wait(seconds)

    @property
    def chance(self) -> random.Random:
        return self._chance


def _trickle(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    for byte in OK + b"Content-Length: 2\r\n\r\n{}":
        one.sendall(bytes([byte]))
        if not server.pause(60):
            return


def _silent(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    while server.pause(1):
        pass


def _endless_headers(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    one.sendall(OK)
    number = 0
    while server.pause(0):
        one.sendall(b"".join(b"X-Header-%d: %s\r\n" % (number + k, b"x" * 100) for k in range(100)))
        number += 100


def _one_endless_header(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    one.sendall(OK + b"X: ")
    while server.pause(0):
        one.sendall(b"x" * 65536)


def _endless_body(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    one.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    while server.pause(0):
        one.sendall(b"10000\r\n" + b"[" * 65536 + b"\r\n")


def _reset(_server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    one.sendall(OK + b"Content-Length: 1000\r\n\r\n{")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _closes(_server: BadServer, _one: socket.socket) -> None:
    pass


def _noise(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    one.sendall(server.chance.randbytes(server.chance.randrange(1, 4096)))


def _continues(server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    while server.pause(0):
        one.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def _huge_number(_server: BadServer, one: socket.socket) -> None:
    one.recv(4096)
    body = b'{"version": ' + b"9" * 500_000 + b', "tp_size": 1e999999, "device": "\\ud800"}'
    one.sendall(OK + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


def _random(server: BadServer, one: socket.socket) -> None:
    manner = server.chance.choice([one for name, one in _MANNERS.items() if name != "random"])
    manner(server, one)


_MANNERS: dict[str, Callable[[BadServer, socket.socket], None]] = {
    "trickle": _trickle,
    "silent": _silent,
    "endless-headers": _endless_headers,
    "one-endless-header": _one_endless_header,
    "endless-body": _endless_body,
    "reset": _reset,
    "closes": _closes,
    "noise": _noise,
    "continues": _continues,
    "huge-number": _huge_number,
    "random": _random,
}
MANNERS = tuple(_MANNERS)
