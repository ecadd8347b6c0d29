"""Scrapes a server, alone or with many scrapers at a time.

    python bench/scraping.py PORT SCRAPERS SECONDS

As a program: so many scrapers, each a second after its last, from a process of its own; prints the seconds that each
scrape took, and how many failed, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

NEGOTIATION = (
    b"Accept: application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\nAccept-Encoding: gzip\r\n"
)
"""What Prometheus 2 asks for."""
_GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n"
PLAIN = _GET + b"Connection: close\r\n\r\n"
PROMETHEUS = _GET + NEGOTIATION + b"\r\n"


class ScrapeError(Exception):
    """An answer that is none."""


class Scraper:
    """One scraper as Prometheus is one: keeps its connection where the server does, takes gzip."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._close()

    def scrape(self) -> bytes:
        """The body of one answer, as it came. Raises OSError, ScrapeError."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=30)
        self._socket.sendall(PROMETHEUS)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        fields = head.lower().split(b"\r\n")
        if fields[0].split()[1:2] != [b"200"]:
            raise ScrapeError(fields[0])
        length = next((int(field.partition(b":")[2]) for field in fields if field.startswith(b"content-length:")), None)
        if length is not None:
            while len(body) < length:
                body += self._more()
        elif b"transfer-encoding: chunked" in fields:
            while not body.endswith(b"0\r\n\r\n"):
                body += self._more()
        else:
            with contextlib.suppress(EOFError):
                while True:
                    body += self._more()
        if fields[0].startswith(b"http/1.0") or length is None or b"connection: close" in fields:
            self._close()
        return body

    def _more(self) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(1 << 17)
        if not data:
            self._close()
            raise EOFError
        return data

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def scrape_once(port: int) -> bytes:
    """The body in the classic text, over a connection of its own. Raises OSError, ScrapeError."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(PLAIN)
        data = b""
        while piece := connection.recv(1 << 17):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] + b" ":
        raise ScrapeError(head[:80])
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    return body


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole += body[:length]
        body = body[length + 2 :]
    return whole


def compressed_size(body: bytes) -> int:
    """The size of a text with gzip."""
    return len(zlib.compress(body, 6)) + 12  # gzip's head and end are 12 bytes longer than zlib's


@dataclass(slots=True)
class Storm:
    """What many scrapers met: the seconds that each answered scrape took, and how many were not answered."""

    times: list[float] = field(default_factory=list)
    failed: int = 0

    async def scrape(self, port: int, end: float) -> None:
        """Scrape once a second until ``end``."""
        await asyncio.sleep(random.random())
        while time.perf_counter() < end:
            begun = time.perf_counter()
            data = b""
            with contextlib.suppress(OSError):  # a short queue of connections is full
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(_GET + NEGOTIATION + b"Connection: close\r\n\r\n")
                data = await reader.read()
                writer.close()
            if data.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
                self.times.append(time.perf_counter() - begun)
            else:
                self.failed += 1
            await asyncio.sleep(max(0.0, begun + 1 - time.perf_counter()))


async def storm(port: int, scrapers: int, seconds: float) -> Storm:
    """Let so many scrapers scrape for so long."""
    one = Storm()
    end = time.perf_counter() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(scrapers):
            group.create_task(one.scrape(port, end))
    return one


def storm_apart(port: int, scrapers: int, seconds: float) -> Storm:
    """`storm` in a process of its own."""
    program = [sys.executable, str(Path(__file__)), str(port), str(scrapers), str(seconds)]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    return Storm(**json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(storm(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))))
