"""The HTTP side: listening sockets and handlers that only read what was published.

No handler triggers work: metrics, report and page are rendered at most once per generation of the snapshot,
so a scrape storm costs what one scrape costs. What makes report and page is loaded when somebody asks for one: most
replicas are only scraped and probed. What a client may take of connections, time and memory is limited by
`sidecar.connections`; the paths that the kubelet asks for never wait behind the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct, field

from sidecar import readiness
from sidecar.acceptor import Acceptor
from sidecar.access import Access
from sidecar.catalog import Catalog
from sidecar.config import Listen
from sidecar.connections import Connections, Limits
from sidecar.exposition import Exposition
from sidecar.httplib import Handler, Middleware, web
from sidecar.model import Snapshot
from sidecar.readiness import Reply

_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted; what finds no place is tried again a second later, when
the kubelet has given up."""
_FAMILY_IS_OFF = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)
_BODY_LIMIT = 1024
"""Bytes of a request's body: no endpoint reads one."""

_OPEN: Final = ("/livez", "/startupz", "/readyz", "/readyz/{name}")
"""The probe paths: they ask nobody for anything."""

_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    # The default names the versions of Python and aiohttp to whoever asks.
    "Server": "sglang-sidecar",
}


class ListenError(Exception):
    """An address cannot be listened on. The argument is one sentence with the remedy."""


class StoreLike(Protocol):
    """Where the current snapshot comes from."""

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that is served now."""


class State(Protocol):
    """What the process knows of itself, for the endpoints that are not about the server's environment."""

    @property
    def stopping(self) -> bool:
        """True once the process was told to end."""

    def alive(self) -> str | None:
        """Tell why the process makes no progress, as a token; None while it does."""

    def started(self) -> str | None:
        """Tell what the start still waits for, as a token; None once it is over."""


_Create = Callable[[int, int], socket.socket]
"""Opens a socket of a family and a kind; a parameter so that tests can have a machine without IPv6."""


# -- listening --------------------------------------------------------------------------------------


def bind(listens: Sequence[Listen], *, create: _Create = socket.socket) -> list[socket.socket]:
    """Open listening sockets for every address, or none.

    An address without a host is one IPv6 socket that takes IPv4 too, and IPv4 alone where IPv6 is off. Raises
    `ListenError` for the first address that cannot be had.
    """
    with contextlib.ExitStack() as undo:
        sockets: list[socket.socket] = []
        taken: list[Listen] = []
        for listen in listens:
            for opened in _open(listen, create, taken):
                undo.callback(opened.close)
                sockets.append(opened)
            taken.append(listen)
        undo.pop_all()
    return sockets


def _open(listen: Listen, create: _Create, taken: Sequence[Listen]) -> list[socket.socket]:
    """Give the sockets of one address: one per IP address that its host stands for. ``taken`` are open already."""
    opened: list[socket.socket] = []
    failure: OSError | None = None
    for family, address, dual in _addresses(listen):
        try:
            opened.append(_listener(create, family, address, dual=dual))
        except OSError as error:
            failure = failure or error
            # A name may stand for an address of a family that is off; any other failure is the user's business.
            if error.errno not in _FAMILY_IS_OFF:
                for one in opened:
                    one.close()
                raise _refusal(listen, error, taken) from error
        else:
            if dual:
                break
    if not opened and failure is not None:
        raise _refusal(listen, failure, taken) from failure
    return opened


def _addresses(listen: Listen) -> list[tuple[socket.AddressFamily, Any, bool]]:
    """Give what to bind as (family, address, whether it takes both families), in order of preference."""
    if listen.host is None:
        return [
            (socket.AF_INET6, ("::", listen.port), True),
            (socket.AF_INET, ("0.0.0.0", listen.port), False),  # noqa: S104 - every interface is what no host means
        ]
    try:
        found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {_shown(listen)}: the host name is not known here; set `listen` to an address of this "
            "machine, or to :PORT for every interface"
        ) from error
    return [(family, address, False) for family, _, _, _, address in found]


def _listener(create: _Create, family: socket.AddressFamily, address: Any, *, dual: bool) -> socket.socket:
    """Open a listening socket. Raises OSError and leaves nothing open."""
    opened = create(family, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        # A restart must not wait for the old connections' TIME_WAIT; a second listener is refused all the same.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        opened.bind(address)
        # At once, not when serving starts: only then is the port really ours.
        opened.listen(_BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _refusal(listen: Listen, error: OSError, taken: Sequence[Listen]) -> ListenError:
    """Give the sentence for an address that the system refuses. ``taken`` are those that were opened before it."""
    own = next((_shown(one) for one in taken if one.port == listen.port), None)
    if error.errno == errno.EADDRINUSE and own is not None:
        return ListenError(f"cannot listen on {_shown(listen)}: {own} takes it already; leave one of them out")
    remedies = {
        errno.EADDRINUSE: "another process listens there; stop it or set `listen` to a free port",
        errno.EADDRNOTAVAIL: "no interface of this machine has that address; set `listen` to :PORT for every interface",
        errno.EACCES: "ports below 1024 need a privilege that this process lacks; set `listen` to a higher port",
    }
    why = remedies.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    return ListenError(f"cannot listen on {_shown(listen)}: {why}")


def _shown(listen: Listen) -> str:
    host = listen.host or ""
    return f"[{host}]:{listen.port}" if ":" in host else f"{host}:{listen.port}"


# -- serving ----------------------------------------------------------------------------------------


class _Rendered(Struct):
    """What was made of one snapshot so far; made when first asked for."""

    snapshot: Snapshot
    report: dict[str, Any] | None = None
    json: bytes | None = None
    html: dict[bool, bytes] = field(default_factory=dict)
    """The page, by whether it is fetched anew as a whole."""
    mark: str | None = None
    live: dict[bool, bytes] = field(default_factory=dict)
    """The strip, by whether the page that it stands in is out of date."""


class Web:
    """The endpoints. `start` serves on sockets from `bind` until `stop`."""

    def __init__(
        self,
        store: StoreLike,
        exposition: Exposition,
        catalog: Catalog,
        *,
        state: State,
        access: Access | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        """``access`` says who may ask for what; None: everybody for everything, without TLS."""
        self._store = store
        self._exposition = exposition
        self._catalog = catalog
        self._state = state
        self._rendered = _Rendered(store.snapshot)
        self._documents: bytes | None = None
        self._access = access
        self._limits = limits
        self._connections: Connections | None = None
        self._acceptor: Acceptor | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on listening sockets, which are closed by `stop`."""
        self._runner = web.AppRunner(self.application(), handle_signals=False, access_log=None)
        await self._runner.setup()
        assert self._runner.server is not None
        limits = self._limits.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._connections = Connections(limits, _HEADERS)
        self._connections.start()
        # Not by aiohttp's sites: they set up every connection before the first request is looked at.
        access = self._access
        self._acceptor = Acceptor(
            sockets, self._connections, self._runner.server, tls=lambda: None if access is None else access.context
        )
        self._acceptor.open()

    async def stop(self, drain: float = 0.5) -> None:
        """Stop: close what is idle at once, give requests in flight ``drain`` seconds, then close them too."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        end = asyncio.get_running_loop().time() + drain / 2
        if self._acceptor is not None:
            self._acceptor.close()
        if self._connections is not None:
            while self._connections.turns and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0)  # requests that have arrived become requests in flight
            self._connections.close()
        # What `AppRunner.cleanup` does, but with a limit chosen now, which it waits out twice per connection
        # (the handler's end, then its cancellation).
        if runner.server is not None:
            await asyncio.sleep(0)  # requests that have arrived become requests in flight
            runner.server.pre_shutdown()
            await runner.server.shutdown(drain / 2)
        await runner.cleanup()

    def application(self) -> web.Application:
        """Give the aiohttp application with every route."""
        middlewares = [] if self._access is None else [_guard(self._access)]
        application = web.Application(client_max_size=_BODY_LIMIT, middlewares=middlewares)
        application.on_response_prepare.append(_set_headers)
        for path in ("/metrics", "/metrics/"):
            application.router.add_get(path, self._metrics)
        for path, handler in zip(_OPEN, (self._livez, self._startupz, self._readyz, self._readyz_single), strict=True):
            application.router.add_get(path, handler)
        application.router.add_get("/report", self._report)
        application.router.add_get("/docs", self._documentation)
        application.router.add_get("/", self._page)
        return application

    async def _metrics(self, request: web.Request) -> web.Response:
        rendered = self._exposition.render(
            self._store.snapshot,
            accept=",".join(request.headers.getall("Accept", [])),
            accept_encoding=",".join(request.headers.getall("Accept-Encoding", [])),
        )
        # As a header: aiohttp's content_type argument refuses a charset (aio-libs/aiohttp#2197).
        return web.Response(body=rendered.body, headers=rendered.headers)

    async def _livez(self, request: web.Request) -> web.Response:
        return _text(readiness.livez(self._state.alive(), verbose="verbose" in request.query))

    async def _startupz(self, request: web.Request) -> web.Response:
        return _text(readiness.startupz(self._state.started(), verbose="verbose" in request.query))

    async def _readyz(self, request: web.Request) -> web.Response:
        return _text(
            readiness.readyz(
                self._store.snapshot,
                self._catalog,
                stopping=self._state.stopping,
                verbose="verbose" in request.query,
                exclude=request.query.getall("exclude", []),
            )
        )

    async def _readyz_single(self, request: web.Request) -> web.Response:
        reply = readiness.single(
            self._store.snapshot, self._catalog, request.match_info["name"], stopping=self._state.stopping
        )
        if reply is None:
            return _text(Reply(404, "no probe and no condition has that name; /readyz?verbose lists the probes\n"))
        return _text(reply)

    async def _report(self, _request: web.Request) -> web.Response:
        from sidecar import report

        current = self._current()
        if current.json is None:
            current.json = report.encode(_built(current, self._catalog))
        return web.Response(body=current.json, content_type="application/json")

    async def _page(self, request: web.Request) -> web.Response:
        from sidecar import page

        if (seen := request.query.get("live")) is not None:
            return self._live(seen)
        current = self._current()
        refreshing = request.query.get("refresh") == "on"
        if refreshing not in current.html:
            built = _built(current, self._catalog)
            current.html[refreshing] = page.render(built, refreshing=refreshing).encode()
        return _html(current.html[refreshing], page.POLICY, refresh=page.REFRESH_EVERY if refreshing else None)

    def _live(self, seen: str) -> web.Response:
        """Tell whether the page that bears the mark ``seen`` still says what is known."""
        from sidecar import page

        current = self._current()
        built = _built(current, self._catalog)
        if current.mark is None:
            current.mark = page.mark(built)
        changed = seen != current.mark
        if changed not in current.live:
            current.live[changed] = page.live(built, changed=changed).encode()
        return _html(current.live[changed], page.LIVE_POLICY, refresh=page.LIVE_EVERY)

    async def _documentation(self, _request: web.Request) -> web.Response:
        from sidecar import page

        if self._documents is None:
            self._documents = page.documents(self._catalog).encode()
        return _html(self._documents, page.POLICY)

    def _current(self) -> _Rendered:
        """Give what was rendered of the current snapshot; nothing yet when it is a new one."""
        snapshot = self._store.snapshot
        if self._rendered.snapshot is not snapshot:
            self._rendered = _Rendered(snapshot)
        return self._rendered


def _guard(access: Access) -> Middleware:
    """Ask everybody for what ``access`` wants, but for the probe paths: a kubelet has neither token nor certificate."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        # By the route, not by the text of the path, which can be written in many ways; what leads nowhere is closed.
        if resource is not None and resource.canonical in _OPEN:
            return await handler(request)
        if access.certificate_needed:
            if not (request.transport and request.transport.get_extra_info("peercert")):
                return web.Response(status=403, text="a client certificate is needed\n")
            if not access.vouched(request.transport.get_extra_info("sslcontext")):
                # A certificate is looked at in the handshake alone, so that only another one can tell.
                response = web.Response(status=403, text="the clients' authority was replaced: connect anew\n")
                response.force_close()
                return response
        if access.token_needed and not access.knows(request.headers.get("Authorization", "")):
            return web.Response(status=401, text="a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return guard


def _built(current: _Rendered, catalog: Catalog) -> dict[str, Any]:
    """Give the report of a snapshot, built once."""
    from sidecar import report

    if current.report is None:
        current.report = report.build(current.snapshot, catalog)
    return current.report


def _html(body: bytes, policy: str, *, refresh: int | None = None) -> web.Response:
    """A page for a browser, which fetches it anew after ``refresh`` seconds."""
    headers = {"Content-Security-Policy": policy}
    if refresh is not None:
        # By header, not by an element of the page, which tools for accessibility take for a page that moves by itself.
        headers["Refresh"] = str(refresh)
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


def _text(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, text=reply.text)


async def _set_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Put our headers on every answer, aiohttp's own errors included."""
    response.headers.update(_HEADERS)
