"""Load on an agent's port, from a process of its own: scrapers, and connections that dribble a byte a second.

    python load.py URL [--scrapers N] [--one-shot N] [--pause SECONDS] [--slow N]

``--scrapers`` keep their connection, ``--one-shot`` open a new one each time, both with ``--pause`` between two scrapes
(0: the next follows at once). ``--slow`` connections begin a request that they never finish, and connect anew when
they are cut. Prints ``ready`` once all are connected, and counts as JSON when standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: agent\r\nAccept: text/plain\r\nAccept-Encoding: gzip\r\n"
SLOW = b"GET /readyz HTTP/1.1\r\nHost: agent\r\nX-Slow: " + b"a" * 10_000


class Load:
    """Everything that runs, and what it counted."""

    def __init__(self, host: str, port: int, pause: float) -> None:
        self.address = (host, port)
        self.pause = pause
        self.counts: Counter[str] = Counter()
        self.times: list[float] = []
        self.connected = 0

    async def scrape(self, *, keep: bool) -> None:
        """Scrape again and again."""
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        first = True
        request = SCRAPE + (b"\r\n" if keep else b"Connection: close\r\n\r\n")
        while True:
            begun = time.perf_counter()
            try:
                reader, writer = streams = streams or await asyncio.open_connection(*self.address)
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                self.counts["scrapes" if head.startswith(b"HTTP/1.1 200") else "refused"] += 1
                self.times.append(time.perf_counter() - begun)
            except (OSError, asyncio.IncompleteReadError, StopIteration):
                self.counts["scrapes failed"] += 1
                if streams is not None:
                    streams[1].close()
                streams = None
                await asyncio.sleep(0.1)
                continue
            self.connected += first
            first = False
            if not keep:
                writer.close()
                streams = None
            await asyncio.sleep(self.pause)

    async def dribble(self) -> None:
        """Send a request a byte a second, and begin anew when it is cut."""
        first = True
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*self.address)
                self.connected += first
                first = False
                end = asyncio.ensure_future(until_cut(reader))
                for byte in SLOW:
                    writer.write(bytes([byte]))
                    done, _ = await asyncio.wait({end}, timeout=1.0)
                    if done:
                        break
                self.counts["slow cut"] += 1
                end.cancel()
                writer.close()


async def until_cut(reader: asyncio.StreamReader) -> None:
    """Wait for the end of a connection, whichever it is."""
    with contextlib.suppress(OSError):
        await reader.read()


def tell(line: str) -> None:
    """Write a line to whoever started this."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    for flag in ("--scrapers", "--one-shot", "--slow"):
        parser.add_argument(flag, type=int, default=0)
    parser.add_argument("--pause", type=float, default=1.0)
    options = parser.parse_args()
    parts = urllib.parse.urlsplit(options.url)
    load = Load(parts.hostname or "", parts.port or 0, options.pause)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True).start()
    work = [loop.create_task(load.dribble()) for _ in range(options.slow)]
    work += [loop.create_task(load.scrape(keep=True)) for _ in range(options.scrapers)]
    work += [loop.create_task(load.scrape(keep=False)) for _ in range(options.one_shot)]
    while load.connected < len(work) and not ended.is_set():
        await asyncio.sleep(0.02)
    tell("ready")
    load.times.clear()
    begun, before = time.perf_counter(), load.counts["scrapes"]
    await ended.wait()
    seconds = time.perf_counter() - begun
    ordered = sorted(load.times) or [0.0]
    result: dict[str, Any] = dict(load.counts)
    result["scrapes per second"] = round((load.counts["scrapes"] - before) / seconds, 1)
    result["scrape p50 ms"] = round(1000 * ordered[len(ordered) // 2], 2)
    result["scrape p99 ms"] = round(1000 * ordered[int(len(ordered) * 0.99)], 2)
    tell(json.dumps(result))
    for task in work:
        task.cancel()


@contextlib.contextmanager
def load(url: str, *arguments: str, seconds: float = 60.0) -> Iterator[dict[str, Any]]:
    """Put load on an address while the block runs; what was counted is in the dictionary afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), url, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    guard = threading.Timer(seconds, process.kill)  # a load that never connects must not hang its user
    guard.start()
    counted: dict[str, Any] = {}
    try:
        assert process.stdout.readline() == "ready\n"
        yield counted
        process.stdin.close()
        counted.update(json.loads(process.stdout.read()))
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            stream.close()


if __name__ == "__main__":
    asyncio.run(main())
