"""One HTTP request at a time, to a server that may be anything: the transport below `sidecar.serverinfo`.

A module of its own because the HTTP library takes a tenth of a second to load.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Mapping
from types import SimpleNamespace

from msgspec import Struct

from sidecar import __version__
from sidecar.exhaustion import exhausted
from sidecar.httplib import AbstractResolver, ResolveResult, aiohttp
from sidecar.model import Answer
from sidecar.offload import in_daemon_thread


class Reply(Struct, frozen=True, kw_only=True):
    """What came back. ``body`` is empty where none was asked for."""

    status: int
    body: bytes


class RequestFailed(Exception):  # noqa: N818 - an outcome, no error of ours
    """A request without a usable answer.

    ``answer`` is how the address reacted, None where it was not tried. ``token`` says why: timeout, protocol, tls,
    refused, unreachable, name-resolution, invalid-url or too-large. The error's own text may hold credentials and is
    dropped.
    """

    def __init__(self, answer: Answer | None, token: str) -> None:
        super().__init__(token)
        self.answer = answer
        self.token = token


class Transport:
    """Follows no redirect, uses no proxy, no cookies and no compression.

    It opens a new connection for each request: an old one would answer for a listener that is gone.
    """

    def __init__(self) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(_note_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, resolver=_Resolver(), use_dns_cache=False),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": f"sglang-sidecar/{__version__}", "Accept-Encoding": "identity"},
            trace_configs=[trace],
        )

    async def close(self) -> None:
        """Drop every connection."""
        await self._session.close()

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | bool,
        until: float,
        limit: int,
    ) -> Reply:
        """Ask once, until the loop's time ``until``. With ``limit`` 0 the body is not read. Raises `RequestFailed`.

        A time-out is told apart by whether the connection was made: then somebody is there. An OSError that is no
        answer of anybody, because the agent itself lacks what it needs to ask, is raised as it is.
        """
        connection = SimpleNamespace(made=False)
        try:
            async with (
                asyncio.timeout_at(until),
                self._session.request(
                    method, url, headers=headers, allow_redirects=False, ssl=tls, trace_request_ctx=connection
                ) as response,
            ):
                body = b"" if limit == 0 else await _body(response, limit)
                # What follows of the body is not waited for; with it goes the connection.
                response.close()
                return Reply(status=response.status, body=body)
        except TimeoutError:
            raise RequestFailed(Answer.ACCEPTED if connection.made else Answer.TIMEOUT, "timeout") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            if exhausted(cause):
                raise cause from None
            raise _failure(error) from None


class _Resolver(AbstractResolver):
    """Name look-ups in daemon threads: a silent name server must not hold up the agent's end."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The host's addresses. Raises OSError when there is none."""
        found = await in_daemon_thread(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Nothing is held."""


async def _note_connection(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _parameters: aiohttp.TraceConnectionCreateEndParams
) -> None:
    context.trace_request_ctx.made = True


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """A body of at most ``limit`` bytes, read piece by piece: it may be endless. Raises `RequestFailed` beyond."""
    body = bytearray()
    if (response.content_length or 0) <= limit:
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > limit:
                break
        else:
            return bytes(body)
    response.close()
    raise RequestFailed(Answer.ACCEPTED, "too-large")


def _failure(error: Exception) -> RequestFailed:
    """What an error of the client means for the server."""
    if isinstance(error, aiohttp.InvalidURL):
        return RequestFailed(None, "invalid-url")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return RequestFailed(Answer.UNREACHABLE, "name-resolution")
    if isinstance(error, aiohttp.ClientSSLError):
        return RequestFailed(Answer.ACCEPTED, "tls")
    if not isinstance(error, aiohttp.ClientConnectorError):
        return RequestFailed(Answer.ACCEPTED, "protocol")
    cause = error.os_error
    # With several addresses behind one name, all failures arrive in one text and without a number.
    if cause.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(cause):
        return RequestFailed(Answer.REFUSED, "refused")
    if cause.errno == errno.ETIMEDOUT:
        return RequestFailed(Answer.TIMEOUT, "timeout")
    if isinstance(cause, ConnectionResetError | ConnectionAbortedError | ssl.SSLError):
        return RequestFailed(Answer.ACCEPTED, "tls")
    return RequestFailed(Answer.UNREACHABLE, "unreachable")
