"""Accepts connections: cheaply, and those of the kubelet first.

To serve a connection costs as much as to answer a request. Two hundred that come at once would all be set up before
the probe behind them is looked at, so each is first only accepted and its first bytes are looked at; a probe is
served at once, the others when their turn has come. One that says nothing costs a file descriptor and little else.

With TLS nobody can see what a client wants before its handshake, which costs a millisecond, so that all handshakes
wait for their turn; the probe that is read afterwards does not.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

from sidecar.connections import PROBE_STARTS, Connection, Connections
from sidecar.exhaustion import exhausted
from sidecar.httplib import web

_BATCH: Final = 64
"""Connections accepted in one turn of the event loop; each costs a few system calls."""
_RETRY_SECONDS: Final = 0.5
"""Pause after the system had no room for a connection."""
_SHED_SECONDS: Final = 0.02
"""The same where another connection was closed to make room, which takes a turn of the event loop."""
_log = logging.getLogger(__name__)  # the standard library's: what repeats is withheld there (`sidecar.log.Bridge`)
_LOOK: Final = max(map(len, PROBE_STARTS))


_SHUTDOWN_SECONDS: Final = 1.0
"""Time that a client gets to agree to the end of its TLS connection."""


class Arrival:
    """A connection that was accepted and has not said yet what it wants, or is in the midst of its TLS handshake."""

    __slots__ = ("asking_since", "handed_over", "setup", "socket")

    def __init__(self, accepted: socket.socket, since: float) -> None:
        self.socket = accepted
        self.asking_since: float | None = since
        self.setup: asyncio.Task[Any] | None = None
        self.handed_over = False
        """Whether the loop's transport has the socket, and closes it."""

    def cut(self) -> None:
        """End it."""
        if self.setup is not None:
            self.setup.cancel()
        elif self.socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.socket)
            self.socket.close()


def _is_waited_for(listener: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    return bool(waiting.poll(0))


class Acceptor:
    """Serves what connects to listening sockets from `open` until `close`."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        connections: Connections,
        server: web.Server,
        *,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """``server`` is aiohttp's, which handles the requests; ``tls`` gives what the next connection speaks."""
        self._sockets = tuple(sockets)
        self._connections = connections
        self._server = server
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._arrivals: set[Arrival] = set()
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}

    def open(self) -> None:
        """Begin to accept."""
        for listener in self._sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Accept no more, close the listening sockets and what has not asked for anything yet."""
        for retry in self._retries.values():
            retry.cancel()
        for listener in self._sockets:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()
        for arrival in self._arrivals:
            self._connections.forget(arrival)
            # A request that has arrived is still answered; a handshake may never end.
            if arrival.setup is None or self._tls() is not None:
                arrival.cut()
        self._arrivals.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if exhausted(error):
                    if not _is_waited_for(listener):
                        return  # Linux takes a descriptor before it looks whether anybody is there
                    # It stays in the kernel's queue, of which the loop would be told without end.
                    self._loop.remove_reader(listener)
                    pause = _SHED_SECONDS if self._connections.shed() else _RETRY_SECONDS
                    self._retries[listener] = self._loop.call_later(
                        pause, self._loop.add_reader, listener, self._accept, listener
                    )
                    _log.warning("no room for another connection: %s", error.strerror)
                    return
                continue  # the client has left already, or sent nothing that concerns us
            accepted.setblocking(False)
            arrival = Arrival(accepted, self._loop.time())
            self._arrivals.add(arrival)
            self._connections.admit(arrival)
            if not self._look(arrival):
                self._loop.add_reader(accepted, self._look, arrival)

    def _look(self, arrival: Arrival) -> bool:
        """Look at what a client sent; True when it sent something or is gone."""
        try:
            start = arrival.socket.recv(_LOOK, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            start = b""
        self._loop.remove_reader(arrival.socket)
        if not start:
            self._leave(arrival)
            arrival.cut()
        elif start.startswith(PROBE_STARTS) and self._tls() is None:
            self._serve(arrival)
        else:
            self._connections.turns.take(lambda: self._serve(arrival))
        return True

    def _serve(self, arrival: Arrival) -> None:
        """Hand a connection to aiohttp; it keeps its place until it has one as such."""
        accepted = arrival.socket
        if accepted.fileno() < 0:
            return  # closed while it waited for its turn
        context = self._tls()
        more = (
            {}
            if context is None
            else {
                "ssl_handshake_timeout": self._connections.limits.request_seconds,
                "ssl_shutdown_timeout": _SHUTDOWN_SECONDS,
            }
        )

        def protocol() -> Connection:
            connection = Connection(self._connections, self._server, arrival=arrival)
            arrival.handed_over = True
            return connection

        arrival.setup = self._loop.create_task(
            self._loop.connect_accepted_socket(protocol, accepted, ssl=context, **more)
        )
        arrival.setup.add_done_callback(lambda task: self._served(arrival, task))

    def _served(self, arrival: Arrival, task: asyncio.Task[Any]) -> None:
        self._leave(arrival)
        if not arrival.handed_over:
            # Cancelled before its first step.
            arrival.socket.close()
        if not task.cancelled():
            task.exception()  # looked at, so that nobody is told of a client that left in between

    def _leave(self, arrival: Arrival) -> None:
        self._arrivals.discard(arrival)
        self._connections.forget(arrival)
