"""What clients may take of the HTTP side: connections, time, memory and turns, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from sidecar.acceptor import Arrival
from sidecar.config import Listen
from sidecar.connections import Limits, Turns
from sidecar.exposition import Exposition
from sidecar.web import Web, bind
from tests.fakes import agent
from tests.fakes.kubelet import ask, idle_connection
from tests.fakes.load import load
from tests.samples import ProcessState, Store, catalog, snapshot

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
SMALL = Limits(connections=8, request_seconds=0.5, idle_seconds=2.0, request_bytes=4096)


@dataclass
class Door:
    """A port that is served, and the connections that a test opened to it."""

    port: int
    web: Web
    writers: list[asyncio.StreamWriter] = field(default_factory=list)


@contextlib.asynccontextmanager
async def serving(limits):
    """Serve with limits until the block ends."""
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    web = Web(Store(snapshot()), Exposition(catalog()), catalog(), state=ProcessState(), limits=limits)
    door = Door(sockets[0].getsockname()[1], web)
    await web.start(sockets)
    try:
        yield door
    finally:
        for writer in door.writers:
            writer.close()
        await web.stop()


async def opened(door, *sent):
    """Open a connection and send something."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    door.writers.append(writer)
    for one in sent:
        writer.write(one)
    await asyncio.sleep(0)
    return reader, writer


async def answered(door):
    """Open a connection and get one answer on it."""
    reader, writer = await opened(door, LIVEZ)
    await head_of(reader)
    return reader, writer


async def head_of(reader):
    """Read an answer; gives its head."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await asyncio.wait_for(reader.readexactly(length), 5)
    return head


async def ended(reader, seconds=5.0):
    """Wait for the end of a connection; gives what came before it."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), seconds)
    return b""


async def is_open(connection):
    """Tell whether a kept connection still answers."""
    connection[1].write(LIVEZ)
    try:
        return (await head_of(connection[0])).startswith(b"HTTP/1.1 200")
    except (OSError, asyncio.IncompleteReadError):
        return False


# -- time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /livez HTTP/1.1\r\nHost: x\r\n", b"GET /metrics HTTP/1.1\r\nX: "])
async def test_a_request_that_does_not_come_is_cut(sent) -> None:
    """A client that connects and says nothing, or half of something, loses its connection."""
    async with serving(SMALL) as door:
        reader, _ = await opened(door, sent)
        assert await ended(reader) == b""


async def test_headers_that_are_dribbled_do_not_extend_the_time() -> None:
    """A byte now and then keeps no connection: the whole request has a limit, not the pause within it."""
    async with serving(SMALL) as door:
        reader, writer = await opened(door, b"GET /livez HTTP/1.1\r\nX: ")
        end = asyncio.ensure_future(ended(reader, 10))
        begun = time.monotonic()
        while not end.done():
            writer.write(b"a")
            await asyncio.wait({end}, timeout=0.05)
        assert await end == b""
        assert time.monotonic() - begun < 5


async def test_a_kept_connection_has_the_same_time_for_each_request() -> None:
    """Half a request after an answer is cut as well."""
    async with serving(Limits(request_seconds=0.5, idle_seconds=60)) as door:
        reader, writer = await answered(door)
        await asyncio.sleep(1.7)  # it rests: longer than a request may take
        writer.write(LIVEZ)
        assert await head_of(reader)
        writer.write(b"GET /l")
        assert await ended(reader) == b""


async def test_a_connection_at_rest_is_closed_in_the_end() -> None:
    """After its answer a connection stays for the idle time and no longer."""
    async with serving(SMALL) as door:
        reader, _ = await answered(door)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 1)
        assert await ended(reader, 10) == b""


async def test_an_answer_that_nobody_reads_is_cut() -> None:
    """A client that asks and never reads holds neither memory nor a place for longer than a request may take."""
    async with serving(Limits(request_seconds=0.5)) as door:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", door.port))
            client.setblocking(False)

            async def ask_without_end():
                while True:
                    await asyncio.get_running_loop().sock_sendall(client, METRICS * 8)
                    await asyncio.sleep(0.01)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(ask_without_end(), 30)


async def test_a_client_that_closes_its_half_gets_its_answer() -> None:
    """Whoever sends a request and ends sending, as a pipe into netcat does, is answered."""
    async with serving(Limits()) as door:
        for request in (LIVEZ, METRICS):
            reader, writer = await opened(door, request)
            writer.write_eof()
            assert (await ended(reader)).startswith(b"HTTP/1.1 200")


async def test_half_a_request_and_its_end_leave_nothing_open() -> None:
    """A client that leaves in the middle does not keep its place for the time of a request."""
    async with serving(Limits(connections=4, request_seconds=60)) as door:
        for _ in range(3):
            reader, writer = await opened(door, b"GET /livez HTTP/1.1\r\n")
            await asyncio.sleep(0.05)
            writer.write_eof()
            assert await ended(reader) == b""


# -- size -------------------------------------------------------------------------------------------


async def test_many_headers_are_not_kept() -> None:
    """Headers that are each allowed and too many together end the connection, whether it sends on or not."""
    async with serving(SMALL) as door:
        header = b"X-%04d: " + b"v" * 500 + b"\r\n"
        reader, writer = await opened(door, b"GET /livez HTTP/1.1\r\n", *(header % number for number in range(20)))
        writer.write(b"\r\n")
        assert b" 200 " not in await ended(reader)


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"GET"])
async def test_a_large_body_is_not_read(method) -> None:
    """The answer comes before the body, and what is sent after it is left in the kernel."""
    async with serving(SMALL) as door:
        reader, writer = await opened(
            door, method + b" /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
        )
        head = await head_of(reader)
        assert head.startswith(b"HTTP/1.1 200" if method == b"GET" else b"HTTP/1.1 405")
        sent = 0
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                while sent < 100_000_000:
                    writer.write(b"x" * 100_000)
                    await writer.drain()
                    sent += 100_000
        assert sent < 50_000_000
        assert (await ask_one(door, LAST)).startswith(b"HTTP/1.1 200")


async def ask_one(door, request):
    """Send a request on a connection of its own; gives all that comes."""
    reader, writer = await opened(door, request)
    got = await ended(reader)
    writer.close()
    return got


async def test_a_request_in_pieces_is_one_request() -> None:
    """However the bytes are cut, the answer is the same: also where a turn is awaited in between."""
    async with serving(Limits()) as door:
        for request in (LAST, METRICS.replace(b"Host: x", b"Host: x\r\nConnection: close")):
            reader, writer = await opened(door)
            for at in range(len(request)):
                writer.write(request[at : at + 1])
                await asyncio.sleep(0.001)
            assert (await ended(reader)).startswith(b"HTTP/1.1 200")


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests that come together, probes and others, are answered in the order in which they were sent."""
    async with serving(Limits()) as door:
        got = await ask_one(door, METRICS + LIVEZ + b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n" + LAST)
        statuses = [part.split(b" ", 1)[0] for part in got.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [b"200", b"200", b"404", b"200"]


# -- number -----------------------------------------------------------------------------------------


async def test_a_new_connection_is_never_refused() -> None:
    """With every place taken by clients that never ask, each new request is answered all the same."""
    async with serving(Limits(connections=8, request_seconds=60)) as door:
        silent = [await opened(door, b"GET /l") for _ in range(30)]
        for request in (LAST, METRICS.replace(b"Host: x", b"Host: x\r\nConnection: close")):
            assert (await ask_one(door, request)).startswith(b"HTTP/1.1 200")
        assert [await ended(reader) for reader, _ in silent[:20]] == [b""] * 20


async def test_the_oldest_that_never_asked_goes_first() -> None:
    """Those that were answered keep their place while others that never finished a request hold more than half."""
    async with serving(Limits(connections=8, request_seconds=60)) as door:
        kept = [await answered(door) for _ in range(3)]
        silent = [await opened(door, b"GET /l") for _ in range(7)]
        await asyncio.sleep(0.1)
        assert [await ended(reader) for reader, _ in silent[:2]] == [b"", b""]
        silent[-1][1].write(b"ivez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await head_of(silent[-1][0])
        assert [await is_open(one) for one in kept] == [True] * 3


async def test_those_that_rest_do_not_push_out_a_probe() -> None:
    """Where clients that were answered hold the places, the one that rests longest goes, not the newcomer."""
    async with serving(Limits(connections=8, request_seconds=60)) as door:
        kept = [await answered(door) for _ in range(8)]
        assert await is_open(kept[0])  # so that the second rests longest
        newcomer = await opened(door, b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        await asyncio.sleep(0.1)
        another = await answered(door)
        newcomer[1].write(b"\r\n")
        assert (await head_of(newcomer[0])).startswith(b"HTTP/1.1 200")
        assert await ended(kept[1][0]) == await ended(kept[2][0]) == b""
        assert [await is_open(one) for one in (kept[0], kept[7], another)] == [True] * 3


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(-1, 2048), (65536, 2048), (1024, 896), (64, 16), (32, 8), (3, 1)]
)
def test_fewer_descriptors_mean_fewer_connections(descriptors, connections) -> None:
    """What the process needs for itself is left to it; its children and files must not fail for strangers."""
    assert Limits().within(descriptors).connections == connections


async def test_where_descriptors_run_out_first_the_least_deserving_connection_goes() -> None:
    """Strangers that hold every descriptor do not keep a probe waiting until they are cut."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(Limits(connections=4096, request_seconds=60)) as door:
        # In another process: this one is to run out of them.
        clients = subprocess.Popen([sys.executable, "-S", "-c", STRANGERS, str(door.port)], stdin=subprocess.PIPE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        try:
            clients.stdin.close()
            assert await asyncio.to_thread(clients.wait, 20) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            clients.kill()
            clients.wait()


STRANGERS = """
import socket, sys
sys.stdin.read()
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5) for _ in range(40)]
for one in held:
    one.sendall(b"GET /l")
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
one.sendall(b"GET /livez HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
sys.exit(not one.recv(4096).startswith(b"HTTP/1.1 200"))
"""


async def test_the_last_descriptor_serves_whoever_got_it() -> None:
    """Nobody has to leave for a connection that is not there: accept(2) fails for want of a descriptor all the same."""
    async with serving(Limits(connections=4096)) as door:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as client:
            client.setblocking(False)
            # The next one that is opened gets the least free number, and is the last.
            last = os.open(os.devnull, os.O_RDONLY)
            os.close(last)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", door.port))
                await asyncio.get_running_loop().sock_sendall(client, LAST)
                async with asyncio.timeout(10):
                    answer = await asyncio.get_running_loop().sock_recv(client, 4096)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert answer.startswith(b"HTTP/1.1 200")


async def test_no_descriptor_left_is_not_the_end() -> None:
    """A connection for which the system has no room is accepted when there is some again."""
    async with serving(Limits(connections=4096)) as door:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.socket()
        client.setblocking(False)
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        try:
            # No number below the least free one is left.
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", door.port))
            await asyncio.get_running_loop().sock_sendall(client, LAST)
            await asyncio.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(10):
            assert (await asyncio.get_running_loop().sock_recv(client, 4096)).startswith(b"HTTP/1.1 200")
        client.close()


# -- turns ------------------------------------------------------------------------------------------


async def test_a_turn_does_so_much_and_no_more() -> None:
    """Work beyond a turn is done in later ones, in order, and what fails takes nothing else with it."""
    turns, done, per_turn = Turns(2), [], []
    for number in range(7):
        turns.take(lambda number=number: done.append(number))
    for _ in range(4):
        per_turn.append(len(done))
        await asyncio.sleep(0)
    assert per_turn == [2, 4, 6, 7]
    assert done == list(range(7))
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    for work in (lambda: None, lambda: None, lambda: 1 / 0, lambda: done.append("after")):
        turns.take(work)
    for _ in range(4):
        await asyncio.sleep(0)
    assert done[-1] == "after"
    assert [type(one) for one in told] == [ZeroDivisionError]


async def test_probes_do_not_wait_for_scrapes() -> None:
    """A probe that comes after a hundred scrapes is answered before most of them."""
    async with serving(Limits()) as door:
        order = []

        async def one(name, request):
            reader, writer = await opened(door)
            await ready.wait()
            writer.write(request)
            await head_of(reader)
            order.append(name)

        ready = asyncio.Event()
        tasks = [asyncio.ensure_future(one("scrape", METRICS)) for _ in range(100)]
        tasks.append(asyncio.ensure_future(one("probe", LIVEZ)))
        await asyncio.sleep(0.2)
        ready.set()
        await asyncio.gather(*tasks)
        assert order.index("probe") < 50


async def test_a_connection_that_ends_before_its_setup_began_is_closed() -> None:
    """Its socket has no transport yet that would close it."""
    async with serving(Limits()) as door:
        acceptor = door.web._acceptor
        theirs, ours = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            arrival = Arrival(ours, 0.0)
            acceptor._serve(arrival)
            arrival.cut()
            await asyncio.wait({arrival.setup})
            await asyncio.sleep(0)
            assert ours.fileno() == -1


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz", "/readyz/driver", "/startupz", "/report", "/"])
async def test_nothing_can_be_written(path) -> None:
    """No path takes another method than GET and HEAD."""
    async with serving(Limits()) as door:
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
            request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            got = await ask_one(door, request)
            assert got.startswith(b"HTTP/1.1 405"), method
            assert b"Allow: GET,HEAD" in got


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00 not http \r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cr3t\x00\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"s3cr3t" * 2000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: s3cr3t\r\n\r\n",
        b"CONNECT s3cr3t HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["tls", "http2", "nul", "long", "length", "connect"],
)
async def test_what_is_no_request_is_neither_repeated_nor_logged(request_, caplog) -> None:
    """An error's answer carries our headers and no version, and no part of what was sent reaches answer or log."""
    caplog.set_level(logging.DEBUG)
    async with serving(Limits(request_seconds=1.0, idle_seconds=1.0)) as door:
        got = await ask_one(door, request_)
    assert got.split(b" ", 2)[1].startswith(b"4")
    assert b"Server: sglang-sidecar\r\n" in got
    assert b"nosniff" in got
    assert b"s3cr3t" not in got
    assert "s3cr3t" not in caplog.text
    assert "Traceback" not in caplog.text


# -- the whole agent --------------------------------------------------------------------------------


def test_slow_clients_neither_silence_nor_swell_the_agent(tmp_path, closed_port) -> None:
    """Scrapers and connections that dribble leave /readyz to answer every time, and memory where it was.

    llm-d/llm-d-benchmark#1734
    """
    arguments = ("--server-url", closed_port, "--processes", "hidden", "--image", "own")
    with agent.serve(tmp_path / "log", *arguments) as served:
        served.until("probe_success", 1, probe="driver")
        process = psutil.Process(served.process.pid)
        before = process.memory_info().rss
        with load(served.url, "--slow", "150", "--scrapers", "20", "--one-shot", "20", "--pause", "0.2") as counted:
            attempts = [ask(served.url + "/livez", timeout=5) for _ in range(30)]
            attempts += [ask(served.url + "/startupz", timeout=5) for _ in range(30)]
            after = process.memory_info().rss
        assert [one.answer for one in attempts] == [200] * 60
        assert counted["scrapes"] >= 40  # each once at least
        assert "scrapes failed" not in counted
        assert after - before < 30 * 2**20
        assert served.stop()[0] == 0
    assert (tmp_path / "log").stat().st_size < 20_000


def test_the_agent_dumps_no_core(tmp_path, closed_port) -> None:
    """Its memory, which holds the server's environment and key, goes into no file and to no program."""
    with agent.serve(tmp_path / "log", "--server-url", closed_port) as served:
        limits = Path(f"/proc/{served.process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
        assert line.split()[4] in ("0", "1")
        assert line.split()[4] == line.split()[5]


def test_an_idle_connection_does_not_hold_up_the_end(tmp_path, closed_port) -> None:
    """With a kept connection open SIGTERM ends the process (case 51, aio-libs/aiohttp#3638)."""
    with agent.serve(tmp_path / "log", "--server-url", closed_port) as served, idle_connection(served.url):
        code, seconds = served.stop()
    assert code == 0
    assert seconds < 5
