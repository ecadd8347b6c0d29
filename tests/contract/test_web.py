"""The HTTP endpoints on real sockets, asked by a real client."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import socket
from dataclasses import dataclass

import aiohttp
import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sidecar.config import Listen
from sidecar.exposition import Exposition
from sidecar.model import Status
from sidecar.web import ListenError, Web, bind
from tests.samples import Facts, ProcessState, Store, catalog, condition, snapshot

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;q=0.8,"
    "application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=1.0.0;q=0.7,text/plain;version=0.0.4;q=0.6,*/*;q=0.5"
)
PATHS = ("/metrics", "/metrics/", "/livez", "/startupz", "/readyz", "/readyz/driver", "/report", "/")
LOST = condition("gpu-lost", Status.TRUE)


@dataclass
class Running:
    """A served agent: its parts to turn, and a client session with its base URL."""

    web: Web
    store: Store
    state: ProcessState
    session: aiohttp.ClientSession
    url: str
    port: int

    async def get(self, path, method="GET", **headers):
        """Give the response and its body as sent, never following a redirect; compressed only on demand."""
        headers = {"Accept-Encoding": "identity"} | headers
        async with self.session.request(method, self.url + path, headers=headers, allow_redirects=False) as response:
            return response, await response.read()


@pytest.fixture
async def running():
    """Serve an agent's web side on a port of its own."""
    store, state = Store(snapshot()), ProcessState()
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    port = sockets[0].getsockname()[1]
    web = Web(store, Exposition(catalog()), catalog(), state=state)
    await web.start(sockets)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield Running(web, store, state, session, f"http://127.0.0.1:{port}", port)
    await web.stop()


@pytest.mark.parametrize("path", PATHS)
async def test_every_endpoint_answers_get_and_head_alike(running, path) -> None:
    """HEAD gives the headers of GET without a body, and no path redirects (case 49, BerriAI/litellm#3475)."""
    got, body = await running.get(path)
    head, empty = await running.get(path, method="HEAD")
    assert got.status == head.status == 200
    assert body
    assert empty == b""
    assert head.headers["Content-Type"] == got.headers["Content-Type"]
    assert head.headers["Content-Length"] == got.headers["Content-Length"]


@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
async def test_every_answer_forbids_sniffing_and_caching(running, path) -> None:
    """Also an error carries the headers, and none names the software's version."""
    response, _ = await running.get(path)
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Server"] == "sglang-sidecar"


async def test_metrics_have_the_exact_text_content_type(running) -> None:
    """A plain scrape gets the type that Prometheus 3 demands (cases 48 and 49, aio-libs/aiohttp#2197)."""
    response, body = await running.get("/metrics", Accept="text/plain")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    assert {family.name for family in parse_text(body.decode())} >= {"sglang_sidecar_ready"}


async def test_metrics_are_negotiated_as_prometheus_3_asks(running) -> None:
    """The Accept header of Prometheus 3 yields OpenMetrics that its parser reads (case 49, pretix/pretix#5133)."""
    response, body = await running.get("/metrics", Accept=PROMETHEUS_3)
    assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in parse_openmetrics(body.decode())} >= {"sglang_sidecar_ready"}


async def test_metrics_are_compressed_when_asked(running) -> None:
    """With gzip accepted the body is the same text, compressed."""
    response, packed = await running.get("/metrics", Accept="text/plain", **{"Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    assert b"sglang_sidecar_ready 1.0" in gzip.decompress(packed)


async def test_metrics_follow_the_snapshot(running) -> None:
    """A new generation is what the next scrape shows."""
    await running.get("/metrics", Accept="text/plain")
    running.store.snapshot = snapshot(LOST, blockers=("gpu-lost",), generation=8)
    _, body = await running.get("/metrics", Accept="text/plain")
    assert b"sglang_sidecar_ready 0.0" in body


async def test_readyz_follows_the_verdict(running) -> None:
    """503 with the code while a condition gates, 200 once excluded."""
    running.store.snapshot = snapshot(LOST, blockers=("gpu-lost",))
    response, body = await running.get("/readyz")
    assert response.status == 503
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert b"[-]driver failed: gpu-lost\n" in body
    response, body = await running.get("/readyz?exclude=gpu-lost&exclude=flashinfer&verbose")
    assert response.status == 200
    assert b"[+]flashinfer excluded: ok\n" in body


async def test_readyz_of_one_code_or_probe_and_of_none(running) -> None:
    """One check answers for itself; a name nobody has is 404 in plain text."""
    running.store.snapshot = snapshot(LOST)
    assert (await running.get("/readyz/gpu-lost"))[0].status == 503
    assert (await running.get("/readyz/driver"))[0].status == 503
    assert (await running.get("/readyz/flashinfer"))[0].status == 200
    response, _ = await running.get("/readyz/nonsense")
    assert response.status == 404
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"


async def test_stopping_is_not_ready_but_alive(running) -> None:
    """From SIGTERM on readiness fails at once while liveness passes (case 51, aio-libs/aiohttp#3638)."""
    running.state.stopping = True
    response, body = await running.get("/readyz")
    assert response.status == 503
    assert body.startswith(b"[-]shutting-down failed\n")
    assert (await running.get("/livez"))[0].status == 200


async def test_livez_and_startupz_ask_the_process(running) -> None:
    """They depend on the process alone: a broken environment fails neither."""
    running.store.snapshot = snapshot(LOST, pending=True)
    assert (await running.get("/livez"))[0].status == 200
    assert (await running.get("/startupz"))[0].status == 200
    running.state.stalled, running.state.waiting = "scheduler-stalled", "driver-pending"
    response, body = await running.get("/livez")
    assert (response.status, body) == (503, b"[-]scheduler failed: scheduler-stalled\nlivez check failed\n")
    response, body = await running.get("/startupz")
    assert (response.status, body) == (503, b"[-]startup failed: driver-pending\nstartupz check failed\n")


async def test_report_and_page_follow_the_snapshot(running) -> None:
    """Both are JSON and HTML of the current generation."""
    _, before = await running.get("/report")
    running.store.snapshot = snapshot(LOST, generation=8, blockers=("gpu-lost",))
    response, after = await running.get("/report")
    assert response.headers["Content-Type"] == "application/json"
    assert (json.loads(before)["generation"], json.loads(after)["generation"]) == (7, 8)
    response, page = await running.get("/")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert b"Not ready: gated by gpu-lost." in page


async def test_report_is_built_once_per_generation(running) -> None:
    """However often report and page are asked for, a probe's facts are turned into sections once."""
    calls = []
    one = catalog()
    counting = replace(
        one, probes=tuple(replace(probe, report=lambda facts: calls.append(facts) or {}) for probe in one.probes)
    )
    store = Store(snapshot(facts={"driver": Facts()}))
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    web = Web(store, Exposition(one), counting, state=ProcessState())
    await web.start(sockets)
    for path in ("/report", "/", "/report", "/"):
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}{path}"
        async with running.session.get(url) as response:
            assert response.status == 200
    await web.stop()
    assert len(calls) == 1


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("POST", "/metrics", 405)])
async def test_wrong_path_or_method_is_a_plain_text_error(running, method, path, status) -> None:
    """Nothing is writable and nothing else exists."""
    response, _ = await running.get(path, method=method)
    assert response.status == status
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"


async def test_garbage_on_the_port_leaves_the_server_serving(running) -> None:
    """Bytes that are no HTTP get an error answer and the next request is served."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"\x16\x03\x01\x02\x00 not http \r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.0 400")
    writer.close()
    assert (await running.get("/livez"))[0].status == 200


async def test_overlong_request_line_is_refused(running) -> None:
    """A query of a megabyte is an error, not memory."""
    response, _ = await running.get("/readyz?exclude=" + "x" * 1_000_000)
    assert response.status in (400, 414)


async def test_stop_closes_idle_keep_alive_connections_at_once() -> None:
    """An idle client cannot hold up the end of the process (case 51, aio-libs/aiohttp#1221)."""
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    web = Web(Store(snapshot()), Exposition(catalog()), catalog(), state=ProcessState())
    await web.start(sockets)
    idle = await asyncio.open_connection(*sockets[0].getsockname())
    kept = await asyncio.open_connection(*sockets[0].getsockname())
    kept[1].write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await kept[0].readline()).startswith(b"HTTP/1.1 200")
    half = await asyncio.open_connection(*sockets[0].getsockname())
    half[1].write(b"GET /livez HTTP/1.1\r\n")
    await asyncio.sleep(0.05)
    # Well below aiohttp's own limits (15 s and 60 s), well above what a busy machine needs.
    await asyncio.wait_for(web.stop(), 5)
    for reader, writer in (idle, kept, half):
        await asyncio.wait_for(reader.read(), 5)
        assert reader.at_eof()
        writer.close()


async def test_stop_without_start_is_harmless() -> None:
    """A start that failed half way can still be stopped, and twice."""
    web = Web(Store(snapshot()), Exposition(catalog()), catalog(), state=ProcessState())
    await web.stop()
    await web.stop()
    assert web.application().router.routes()


# -- listening --------------------------------------------------------------------------------------


def _close(sockets):
    for one in sockets:
        one.close()


def _can_use_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_no_host_is_reachable_over_every_family_that_is_on() -> None:
    """``:PORT`` takes IPv4, and IPv6 where the machine has it, on one port."""
    sockets = bind([Listen(host=None, port=0)])
    port = sockets[0].getsockname()[1]
    hosts = ["127.0.0.1", "::1"] if _can_use_ipv6() else ["127.0.0.1"]
    try:
        for host in hosts:
            socket.create_connection((host, port), timeout=5).close()
    finally:
        _close(sockets)
    assert len(sockets) == 1


def test_no_host_is_ipv4_alone_where_ipv6_is_off() -> None:
    """A kernel without IPv6 is served over IPv4."""

    def create(family, kind):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return socket.socket(family, kind)

    sockets = bind([Listen(host=None, port=0)], create=create)
    families, names = [one.family for one in sockets], [one.getsockname()[0] for one in sockets]
    _close(sockets)
    assert (families, names) == ([socket.AF_INET], ["0.0.0.0"])


def test_privileged_port_is_refused_with_the_way_out() -> None:
    """A port that needs a privilege says so, and the half-made sockets are closed."""
    made = []

    class Unprivileged(socket.socket):
        """A socket of a process that may not bind below 1024."""

        def bind(self, address) -> None:
            """Refuse what the kernel would refuse."""
            if 0 < address[1] < 1024:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().bind(address)

    def create(family, kind):
        made.append(Unprivileged(family, kind))
        return made[-1]

    with pytest.raises(ListenError, match="cannot listen on :80: ports below 1024 need a privilege"):
        bind([Listen(host="127.0.0.1", port=0), Listen(host=None, port=80)], create=create)
    assert [one.fileno() for one in made] == [-1] * len(made)
    assert len(made) == 2


def test_address_in_use_is_one_sentence_with_a_remedy() -> None:
    """A second agent on the same port learns at once what is wrong, and nothing stays open."""
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    port = sockets[0].getsockname()[1]
    try:
        with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: another process .*`listen`"):
            bind([Listen(host="127.0.0.1", port=0), Listen(host="127.0.0.1", port=port)])
        with pytest.raises(ListenError, match=rf"cannot listen on :{port}: "):
            bind([Listen(host=None, port=port)])
    finally:
        _close(sockets)


def test_the_same_port_twice_is_told_as_that() -> None:
    """An address that another one of the same agent takes in is no other process's."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: :{port} takes it already"):
        bind([Listen(host=None, port=port), Listen(host="127.0.0.1", port=port)])
    _close(bind([Listen(host="127.0.0.1", port=port)]))


@pytest.mark.parametrize(
    ("host", "sentence"),
    [("192.0.2.1", "no interface of this machine has that address"), ("no.such.host.invalid", "not known here")],
)
def test_address_of_another_machine_is_refused(host, sentence) -> None:
    """An address nobody here has, or a name nobody knows, names itself and the way out."""
    with pytest.raises(ListenError, match=sentence) as raised:
        bind([Listen(host=host, port=0)])
    assert f"cannot listen on {host}:0" in str(raised.value)
    assert ":PORT" in str(raised.value)


def test_ipv6_address_is_shown_in_brackets() -> None:
    """The sentence repeats the address in the form in which it is written."""
    with pytest.raises(ListenError) as raised:
        bind([Listen(host="2001:db8::1", port=9477)])
    assert str(raised.value).startswith("cannot listen on [2001:db8::1]:9477: ")
    assert raised.value.__cause__.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def test_several_addresses_are_all_bound() -> None:
    """``listen`` may be given more than once."""
    sockets = bind([Listen(host="127.0.0.1", port=0), Listen(host="localhost", port=0)])
    ports = {one.getsockname()[1] for one in sockets}
    _close(sockets)
    assert len(ports) == len(sockets) >= 2
