"""The page, its strip and the documentation as the web side serves them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from msgspec.structs import replace

from sidecar import page
from sidecar.config import Listen
from sidecar.exposition import Exposition
from sidecar.model import Snapshot, Status
from sidecar.web import Web, bind
from tests.samples import Facts, catalog, condition, snapshot

LOST = condition("gpu-lost", Status.TRUE)


@dataclass
class Agent:
    """What the web side asks; a test may change any of it."""

    snapshot: Snapshot = field(default_factory=lambda: snapshot(LOST))
    stopping: bool = False

    def alive(self) -> None:
        return None

    def started(self) -> None:
        return None


@dataclass
class Served:
    agent: Agent
    session: aiohttp.ClientSession
    url: str

    async def get(self, path: str, method: str = "GET") -> tuple[aiohttp.ClientResponse, str]:
        async with self.session.request(method, self.url + path) as response:
            return response, await response.text()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    agent = Agent()
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    web = Web(agent, Exposition(catalog()), catalog(), state=agent)
    await web.start(sockets)
    async with aiohttp.ClientSession() as session:
        yield Served(agent, session, f"http://127.0.0.1:{sockets[0].getsockname()[1]}")
    await web.stop()


@pytest.mark.parametrize(
    ("path", "policy", "refresh"),
    [
        ("/", page.POLICY, None),
        ("/?refresh=on", page.POLICY, str(page.REFRESH_EVERY)),
        ("/?refresh=off", page.POLICY, None),
        ("/?live=x", page.LIVE_POLICY, str(page.LIVE_EVERY)),
        ("/docs", page.POLICY, None),
    ],
)
async def test_headers(served: Served, path: str, policy: str, refresh: str | None) -> None:
    """Each document has its policy, and only what asks for it is fetched anew; HEAD says the same."""
    for method in ("GET", "HEAD"):
        response, body = await served.get(path, method)
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["Content-Security-Policy"] == policy
        assert response.headers.get("Refresh") == refresh
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert bool(body) is (method == "GET")


async def test_the_strip_of_a_page_follows_the_verdict(served: Served) -> None:
    """As long as the page is true its strip says so; then it says what has become of it, and a new page agrees."""

    async def strip(of: str) -> str:
        address = re.search(r'<iframe src="([^"]*)"', of)
        assert address is not None
        return (await served.get(address[1]))[1]

    _, first = await served.get("/")
    assert "Still so at" in await strip(first)
    served.agent.snapshot = snapshot(LOST, generation=8)
    assert "Still so at" in await strip(first)
    served.agent.snapshot = snapshot(generation=9)
    assert "Changed: now ok." in await strip(first)
    _, second = await served.get("/")
    assert "Still so at" in await strip(second)


@pytest.mark.parametrize("mark", ["", "%00", "<script>", "x" * 4000, "a&live=b"])
async def test_a_mark_that_is_none_is_just_another_one(served: Served, mark: str) -> None:
    """Whatever somebody puts there, the answer is one of two."""
    response, body = await served.get(f"/?live={mark}")
    assert response.status == 200
    assert "Changed: now critical, gpu-lost." in body
    assert mark[:8] not in body or not mark


async def test_all_that_readers_ask_for_rests_on_one_report(served: Served) -> None:
    """However many pages and strips are asked for, a probe's facts are turned into sections once per generation."""
    calls: list[object] = []
    one = catalog()
    counting = replace(
        one, probes=tuple(replace(probe, report=lambda facts: calls.append(facts) or {}) for probe in one.probes)
    )
    agent = Agent(snapshot(facts={"driver": Facts()}))
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    web = Web(agent, Exposition(one), counting, state=agent)
    await web.start(sockets)
    for path in ("/", "/?live=a", "/?live=b", "/?refresh=on", "/docs", "/"):
        async with served.session.get(f"http://127.0.0.1:{sockets[0].getsockname()[1]}{path}") as response:
            assert response.status == 200
    await web.stop()
    assert len(calls) == 1
