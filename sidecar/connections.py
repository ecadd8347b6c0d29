"""The connections to the HTTP side: how many, for how long, how much they may send, whose turn it is.

Whoever reaches the port may open connections and say nothing, or say it a byte a second. The kubelet's probes must
be answered all the same, so no connection is refused because others are open: the one that deserves it least is
closed instead (`Connections.admit`); and nothing that a probe needs waits behind the requests of others (`Turns`).
aiohttp limits lines and idle time after an answer, but neither the number of connections, nor the time that a request
may take to arrive, nor its size as a whole.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from sidecar.httplib import HttpProcessingError, web

_RESERVED: Final = 128
"""File descriptors kept for everything that is no connection: listeners, children's pipes, files that are read."""
_FEWEST: Final = 16
"""Connections that are allowed where there are few descriptors: fewer would hardly serve Prometheus and a kubelet."""
_SHARE: Final = 4
"""The part of the descriptors that those get where there are even fewer, so that the rest can still be looked at."""
_SWEEP_SECONDS: Final = 1.0
"""Time between two looks for overdue requests; they live that much longer at most."""
PROBE_STARTS: Final = tuple(
    method + path for method in (b"GET ", b"HEAD ") for path in (b"/readyz", b"/livez", b"/startupz")
)
"""How the requests begin that never wait: the kubelet gives up after a second."""
_LINGER_SECONDS: Final = 1.0
"""Time that an answered connection gets to read its answer when it goes on sending a body that nobody wants."""


class Limits(Struct, frozen=True, kw_only=True):
    """What one client, and all of them together, may take.

    ``connections`` is their number. ``request_seconds`` is the time from opening a connection, or from the first byte
    of a further request, to the end of the answer: as long as the usual scrapers wait themselves. ``idle_seconds`` is
    how long a connection stays after an answer: longer than the usual scrape intervals, so that they reuse one.
    ``request_bytes`` is the size of a request with its headers and body. ``turns`` is how many requests that are no
    probes are taken up in one turn of the event loop: whatever is asked for meanwhile, a probe waits for so many.
    """

    connections: int = 2048
    request_seconds: float = 10.0
    idle_seconds: float = 75.0
    request_bytes: int = 16 * 1024
    turns: int = 1

    def within(self, descriptors: int) -> Limits:
        """Give these limits for a process that may have so many file descriptors (-1: any number)."""
        if descriptors < 0:
            return self
        fewest = max(1, min(_FEWEST, descriptors // _SHARE))
        return replace(self, connections=min(self.connections, max(descriptors - _RESERVED, fewest)))


class Place(Protocol):
    """What takes a place among the connections: one that is served, or one that has yet to say what it wants.

    ``asking_since`` (monotonic seconds) is None while it rests after an answer.
    """

    asking_since: float | None

    def cut(self) -> None:
        """End it now, with whatever was not read."""


class Connection(web.RequestHandler):
    """One connection: aiohttp's protocol, with the limits that it lacks.

    Only public methods are overridden. ``asking_since`` (monotonic seconds) is set while a request is awaited or on
    its way to its answer, None while the connection rests after one.
    """

    __slots__ = ("_arrival", "_connections", "_ended", "_queued", "_received", "asking_since")

    def __init__(self, connections: Connections, server: web.Server, *, arrival: Place) -> None:
        """``arrival`` is what held its place so far, since the client connected."""
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=connections.limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            access_log=None,  # type: ignore[arg-type]  # what aiohttp documents for "none"
        )
        self._connections = connections
        self._received = 0
        self._queued = b""
        self._ended = False
        self._arrival: Place | None = arrival
        self.asking_since: float | None = arrival.asking_since

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: a place is found for it."""
        super().connection_made(transport)
        if self._arrival is not None:
            # First: it must not have to make room for itself.
            self._connections.forget(self._arrival)
            self._arrival = None
        self._connections.admit(self)

    def data_received(self, data: bytes) -> None:
        """Take what fits into a request when its turn has come.

        Nothing is read beyond it, and the connection ends after its answer.
        """
        if not data:
            super().data_received(data)  # aiohttp's own way to go on with what it has
            return
        if self.asking_since is None:
            self.asking_since = self._loop.time()
        room = self._connections.limits.request_bytes - self._received
        self._received += len(data)
        if self._queued:
            self._queued += data[: max(room, 0)]
        elif room > 0 and (data.startswith(PROBE_STARTS) or b"\n" not in data):
            # The latter ends no request, so that nothing is to be done.
            super().data_received(data[:room])
        elif room > 0:
            self._queued = data[:room]
            self._connections.turns.take(self._feed)
        if len(data) > room and self.transport is not None:
            # Not closed: an answer may be on its way, which a reset would take from the client.
            self.transport.pause_reading()

    def _feed(self) -> None:
        data, self._queued = self._queued, b""
        if self.transport is not None:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's gives None: end at once
        """Tell whether to keep the connection: a client that asked and will not ask again still gets its answer."""
        self._ended = True
        self.asking_since = -math.inf  # what is not a whole request by now never will be: for the next sweep
        # Over TLS there are no halves: asyncio closes the connection whatever is said here, and complains.
        halves = self.transport is not None and self.transport.get_extra_info("ssl_object") is None
        return halves and self._received > 0

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        """Note that an answer was handed over: this is what aiohttp calls at its end, whatever it was."""
        super().log_access(request, response, time)
        if self._ended or self._received > self._connections.limits.request_bytes:
            self.close()
            return
        self._received = 0
        self.asking_since = None
        self._connections.answered(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End: its place is free."""
        super().connection_lost(exc)
        self._connections.forget(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP without repeating it, in the answer or the log: it may contain somebody's key."""
        if isinstance(exc, HttpProcessingError):
            response: web.StreamResponse = web.Response(status=status, text="the request cannot be read as HTTP\n")
            response.force_close()
        else:
            response = super().handle_error(request, status, exc, message)
        # The application's own hook does not see these answers.
        response.headers.update(self._connections.headers)
        return response

    def cut(self) -> None:
        """End it now, with whatever it has not read."""
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """All open connections. `start` watches them until `close`."""

    def __init__(self, limits: Limits, headers: Mapping[str, str]) -> None:
        """``headers`` are put on the answers that no handler makes."""
        self.limits = limits
        self.headers = headers
        self.turns = Turns(limits.turns)
        # Both in the order in which they would be closed: dictionaries, because sets have none.
        self._unproven: dict[Place, None] = {}
        self._proven: dict[Place, None] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._unproven) + len(self._proven)

    def start(self) -> None:
        """Begin to look for overdue requests."""
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def close(self) -> None:
        """Stop looking. Open connections stay."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # -- told by the connections ---------------------------------------------------------------------

    def admit(self, place: Place) -> None:
        """Take a new connection in, and close another if there is no place.

        One without any answered request goes first while they hold more than half of the places; so as many newer
        ones would have to come before a probe that just connected is answered. Else those that were answered hold
        more than half, and the one that rests longest goes.
        """
        if len(self) >= self.limits.connections:
            self._make_room()
        self._unproven[place] = None

    def answered(self, place: Place) -> None:
        """Note an answer: this one is the last of those that would be closed."""
        if place in self._proven or place in self._unproven:  # not closed meanwhile
            self.forget(place)
            self._proven[place] = None

    def forget(self, place: Place) -> None:
        """Note that a connection is gone."""
        self._unproven.pop(place, None)
        self._proven.pop(place, None)

    # -- closing -------------------------------------------------------------------------------------

    def shed(self) -> bool:
        """Close the one that deserves its place least, where the system has no room for another; False without any."""
        if not len(self):
            return False
        self._make_room()
        return True

    def _make_room(self) -> None:
        if len(self._unproven) > self.limits.connections // 2 or not self._proven:
            victim = next(iter(self._unproven))
        else:
            resting = (one for one in self._proven if one.asking_since is None)
            victim = next(resting, next(iter(self._proven)))
        # At once: the transport tells of the end only in the next turn of the loop.
        self.forget(victim)
        victim.cut()

    def _sweep(self) -> None:
        """Cut what takes too long. A request that is read too slowly counts like one that is sent too slowly."""
        self.start()
        overdue = asyncio.get_running_loop().time() - self.limits.request_seconds
        for one in [*self._unproven, *self._proven]:
            if one.asking_since is not None and one.asking_since < overdue:
                self.forget(one)
                one.cut()


class Turns:
    """Does so much per turn of the event loop, in the order in which it came.

    A storm of scrapes otherwise fills each turn with as many answers as there are scrapers, and a probe, which takes a
    few turns (to be accepted, read, answered), waits for all of them each time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._done = 0
        self._turning = False
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, work: Callable[[], None]) -> None:
        """Do ``work`` now if this turn has room for it, else in a later one."""
        self._schedule()
        if self._done < self._size and not self._waiting:
            self._done += 1
            work()
        else:
            self._waiting.append(work)

    def _schedule(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        self._done = 0
        if self._waiting:
            self._schedule()  # first: whatever the work below raises, the rest is done
        while self._waiting and self._done < self._size:
            self._done += 1
            self._waiting.popleft()()
