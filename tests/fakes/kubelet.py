"""A kubelet's HTTP probes: its rules for connections, time limits, thresholds and what counts as success."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One request: when it began (monotonic), whether it passed, its status or what went wrong, how long it took."""

    at: float
    passed: bool
    answer: int | str
    seconds: float


def ask(url: str, timeout: float = 1.0) -> Attempt:
    """Probe once, as the kubelet does: a new connection, a time limit for everything, success from 200 to 399."""
    parts = urllib.parse.urlsplit(url)
    begun = time.monotonic()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    answer: int | str
    try:
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {"User-Agent": "kube-probe/1.31", "Accept": "*/*", "Connection": "close"}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read(10 * 1024)
        answer = response.status
    except (OSError, http.client.HTTPException) as error:
        answer = type(error).__name__
    finally:
        connection.close()
    seconds = time.monotonic() - begun
    passed = isinstance(answer, int) and 200 <= answer < 400 and seconds <= timeout
    return Attempt(at=begun, passed=passed, answer=answer, seconds=seconds)


@dataclass(slots=True)
class Kubelet:
    """One probe of a container, asked for again and again in a thread until the block is left.

    ``success`` is the result that the kubelet acts on: after ``failure_threshold`` failures in a row it is False, after
    one success True; before any it is ``initially``, which is True for liveness and False for readiness and startup.
    """

    url: str
    initially: bool
    period: float = 1.0
    timeout: float = 1.0
    failure_threshold: int = 3
    initial_delay: float = 0.0
    success: bool = field(init=False)
    attempts: deque[Attempt] = field(init=False, default_factory=deque)
    results: list[tuple[float, bool]] = field(init=False, default_factory=list)
    _stop: threading.Event = field(init=False, default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        """Begin."""
        self.success = self.initially
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """End after the attempt that is under way."""
        self._stop.set()
        self._thread.join(self.timeout + 10)

    def failed(self, since: float = 0.0) -> list[Attempt]:
        """Give the attempts that failed, begun at ``since`` or later."""
        return [one for one in list(self.attempts) if not one.passed and one.at >= since]

    def passed(self, since: float = 0.0) -> list[Attempt]:
        """Give the attempts that passed, begun at ``since`` or later."""
        return [one for one in list(self.attempts) if one.passed and one.at >= since]

    def until(self, success: bool, seconds: float = 20.0) -> None:
        """Wait for a result."""
        end = time.monotonic() + seconds
        while self.success is not success:
            assert time.monotonic() < end, list(self.attempts)[-5:]
            time.sleep(0.02)

    def _run(self) -> None:
        self._stop.wait(self.initial_delay)
        in_a_row = 0
        while not self._stop.is_set():
            begun = time.monotonic()
            attempt = ask(self.url, self.timeout)
            self.attempts.append(attempt)
            in_a_row = 0 if attempt.passed else in_a_row + 1
            if attempt.passed or in_a_row >= self.failure_threshold:
                if self.success is not attempt.passed:
                    self.results.append((attempt.at, attempt.passed))
                self.success = attempt.passed
            self._stop.wait(max(0.0, begun + self.period - time.monotonic()))


def idle_connection(url: str) -> socket.socket:
    """Open a keep-alive connection that asked once, got its answer and says nothing more."""
    parts = urllib.parse.urlsplit(url)
    opened = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5)
    opened.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert opened.recv(65536).startswith(b"HTTP/1.1 200")
    return opened
