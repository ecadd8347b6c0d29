"""A server on loopback that answers as SGLang does, or as something that is not SGLang at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

CAPTURES = Path(__file__).parents[1] / "captures" / "sglang"
MARKER = "SECRET-DO-NOT-EXPORT"
"""The key that the recorded answers carry, planted for tests to look for."""
MEBIBYTE = bytes(1024 * 1024)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def capture(name: str) -> dict[str, Any]:
    """The recorded ``/server_info`` answer of a capture folder."""
    answer: dict[str, Any] = json.loads((CAPTURES / name / "server_info.json").read_text())
    return answer


@dataclass(slots=True)
class FakeSglang:
    """What the server does; a test may change any field while it runs.

    ``info`` and ``model_info`` are the bodies, ``ready`` the status of ``/ready`` (404 before 0.5.20).
    ``old`` leaves only the paths that releases before 0.5.6 have. ``api_key`` is wanted as SGLang wants it.
    ``special`` replaces the answer of every information path. ``delay`` is in seconds, before any answer.
    As in SGLang, OPTIONS passes without the key; ``refusals`` counts what did not.
    """

    info: Any = field(default_factory=lambda: capture("0.5.16-h200-fa3"))
    model_info: Any = field(default_factory=lambda: {"model_path": "/models/tiny", "has_image_understanding": False})
    ready: int = 404
    old: bool = False
    api_key: str | None = None
    special: Handler | None = None
    delay: float = 0.0
    url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    authorizations: list[str | None] = field(default_factory=list)
    refusals: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests[request.path] += 1
        self.authorizations.append(request.headers.get("Authorization"))
        await asyncio.sleep(self.delay)
        if request.method == "OPTIONS":
            return web.Response(text="OK")
        if request.path == "/ready" and self.ready != 404:
            return web.Response(status=self.ready)
        paths = {"/get_server_info", "/get_model_info"} | (set() if self.old else {"/server_info", "/model_info"})
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            self.refusals += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path not in paths:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path.endswith("model_info"):
            return web.json_response(self.model_info)
        return await self.special(request) if self.special else web.json_response(self.info)


@contextlib.asynccontextmanager
async def serve(fake: FakeSglang, *, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[FakeSglang]:
    """Run it on a free port of loopback (or on ``port``) until the block ends."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        yield fake
    finally:
        await runner.cleanup()


def answering(body: bytes | str, *, status: int = 200, content_type: str = "text/html", **headers: str) -> Handler:
    """A handler that gives one fixed answer."""

    async def handle(_request: web.Request) -> web.StreamResponse:
        data = body.encode() if isinstance(body, str) else body
        return web.Response(body=data, status=status, content_type=content_type, headers=headers)

    return handle


async def endless(request: web.Request) -> web.StreamResponse:
    """A body that never ends."""
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b'{"version": "' + b"x" * 65536)
    return response


async def hundred_megabytes(request: web.Request) -> web.StreamResponse:
    """A body of 100 MiB that says its length."""
    response = web.StreamResponse(headers={"Content-Length": str(100 * len(MEBIBYTE))})
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            await response.write(MEBIBYTE)
    return response


@contextlib.asynccontextmanager
async def raw(answer: bytes, *, hold: bool = False) -> AsyncIterator[str]:
    """A TCP server that sends fixed bytes to whoever connects, and then hangs up or holds the line."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            if not hold:
                await reader.read(4096)
            writer.write(answer)
            await writer.drain()
            if hold:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
