"""The HTTP client and its two probes against servers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sidecar.config import Settings
from sidecar.environment import Environment
from sidecar.isolation import Isolation
from sidecar.model import Answer, Feature, Phase, Placement, Processes, Scope, Standing, Target
from sidecar.probes import attention, server
from sidecar.processes import ProcessReader
from sidecar.serverinfo import KEY_PROBLEMS, PROBLEMS, ServerClient
from sidecar.target import PREFLIGHT
from tests.fakes.sglang import (
    MARKER,
    FakeSglang,
    Handler,
    answering,
    capture,
    endless,
    hundred_megabytes,
    raw,
    serve,
)
from tests.fakes.sources import Sources
from tests.gpus import reading

HYBRID = "0.5.16-h200-fa4-fa3-hybrid"


@dataclass
class Clock:
    """Time that moves only when a test says so."""

    now: float = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@dataclass
class Targets:
    """A server that has been found already."""

    target: Target
    proc: Path

    async def find(self) -> Target:
        return self.target


@dataclass
class Services:
    """The edges that the two probes use."""

    settings: Settings
    clock: Clock
    targets: Targets
    server: ServerClient
    processes: ProcessReader
    environment: Environment
    nvml: SimpleNamespace
    standing: Standing = field(
        default_factory=lambda: Standing(
            placement=Placement.CONTAINER, placement_why="", processes=Processes.HIDDEN, processes_why=""
        )
    )
    memory: dict[str, object] = field(default_factory=dict)


def target(url: str, **more: Any) -> Target:
    return Target(**{"url": url, "url_source": "default", "scope": Scope.SELF} | more)


Make = Callable[..., Services]


@pytest.fixture(name="make")
async def _make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[ServerClient] = []

    def make(url: str, *, settings: Settings | None = None, proc: Path = Path("/proc"), **more: Any) -> Services:
        clock = Clock()
        # Generous where nothing is meant to time out: the machine that runs this may be busy.
        settings = settings or Settings(deadlines={"server": 30.0})
        client = ServerClient(settings, clock, proc=proc)
        made.append(client)
        processes = ProcessReader(clock, proc=tmp_path)
        # No interpreter is named, so no child is started, and no GPU is there.
        environment = Sources(Isolation(), clock, settings).environment
        nvml = SimpleNamespace(latest=reading(), latest_at=clock.monotonic())
        targets = Targets(target(url, **more), tmp_path)
        return Services(settings, clock, targets, client, processes, environment, nvml)

    yield make
    for client in made:
        await client.close()


async def collect(services: Services) -> server.ServerFacts:
    return await server.collect(services)  # type: ignore[arg-type]  # only the edges that this probe uses


async def collect_attention(services: Services) -> attention.AttentionFacts:
    return await attention.collect(services)  # type: ignore[arg-type]  # as above


# -- a server that answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.5.16", {("prefill", 0), ("decode", 0), ("torch_native", "prefill"), ("torch_native", "decode")}),
        ("0.5.16-h200-fa3", {("prefill", 3), ("decode", 3), ("fa3", "prefill"), ("fa3", "decode")}),
        ("0.5.16-h200-fa4", {("prefill", 4), ("decode", 4), ("fa4", "prefill"), ("fa4", "decode")}),
        (HYBRID, {("prefill", 4), ("decode", 3), ("fa4", "prefill"), ("fa3", "decode")}),
    ],
)
async def test_recorded_servers_show_their_attention(make: Make, name: str, expected: set[tuple[str, object]]) -> None:
    """A recorded answer gives one version and one backend for each phase that the server has, and nothing else."""
    async with serve(FakeSglang(info=capture(name))) as fake:
        facts = await collect_attention(make(fake.url))
    shown: set[tuple[str, object]] = set()
    for sample in attention.PROBE.samples(facts):
        if sample.family == "flash_attention_version":
            shown.add((sample.labels[0], sample.value))
        else:
            phase, backend, source = sample.labels
            assert (sample.family, source, sample.value) == ("attention_backend_info", "server-info", 1)
            shown.add((backend, phase))
    assert shown == expected


async def test_the_planted_key_appears_nowhere(make: Make) -> None:
    """A recorded answer carries a key at two levels; no facts, report or series show it."""
    assert json.dumps(capture("0.5.16")).count(MARKER) == 2
    async with serve(FakeSglang(info=capture("0.5.16"))) as fake:
        services = make(fake.url.replace("http://", f"http://user:{MARKER}@"))
        both = (await collect(services), await collect_attention(services))
    assert both[0].info is not None
    for probe, facts in zip((server.PROBE, attention.PROBE), both, strict=True):
        shown = [
            repr(facts),
            msgspec.json.encode(probe.report(facts)).decode(),  # type: ignore[arg-type]  # each with its own
            repr(list(probe.samples(facts))),  # type: ignore[arg-type]
        ]
        assert all(MARKER not in text and len(text) > 10 for text in shown)


async def test_the_information_is_fetched_once_for_both_probes(make: Make) -> None:
    """The request that costs the server a round trip through its schedulers is made once per process."""
    async with serve(FakeSglang()) as fake:
        services = make(fake.url)
        await asyncio.gather(collect(services), collect_attention(services))
        for _ in range(3):
            services.clock.now += 30
            await collect(services)
            await collect_attention(services)
    assert fake.requests["/server_info"] == 1
    assert fake.requests["/get_server_info"] == 0
    assert fake.requests["/ready"] == 1, "a path that is not there is not asked again"
    assert not [path for path in fake.requests if path.startswith("/health")]


async def test_the_information_is_renewed_after_an_hour(make: Make) -> None:
    """An hour later the answer is asked for again, and a failure then does not lose what is known."""
    async with serve(FakeSglang()) as fake:
        services = make(fake.url)
        await collect(services)
        fake.info = capture("0.5.16-h200-fa4")
        services.clock.now += 3601
        renewed = await collect(services)
        fake.special = answering("", status=500)
        services.clock.now += 3601
        kept = await collect(services)
    assert renewed.info is not None
    assert renewed.info.attention_backend == "fa4"
    assert kept.info == renewed.info
    assert server.state(kept) is server.ServerState.UP


async def test_an_old_release_is_asked_by_its_old_path(make: Make) -> None:
    """A server before 0.5.6 has only /get_server_info."""
    async with serve(FakeSglang(old=True)) as fake:
        facts = await collect(make(fake.url))
    assert facts.info is not None
    assert (facts.info.version, facts.observation.up, facts.info.is_vision) == ("0.5.16", True, None)
    assert fake.requests["/get_server_info"] == 1


@pytest.mark.parametrize(("status", "ready"), [(200, True), (503, False)])
async def test_a_new_release_answers_ready(make: Make, status: int, ready: bool) -> None:
    """From 0.5.20 on /ready says whether the server is ready; either way it is up."""
    async with serve(FakeSglang(ready=status)) as fake:
        facts = await collect(make(fake.url))
    assert (facts.observation.up, facts.observation.ready, facts.observation.status) == (True, ready, status)
    assert server.state(facts) is server.ServerState.UP


async def test_a_vision_model_is_recognised(make: Make) -> None:
    """/model_info says whether the model sees; with no vision backend named, that phase is unknown, not absent."""
    async with serve(FakeSglang(model_info={"has_image_understanding": True})) as fake:
        section = attention.PROBE.report(await collect_attention(make(fake.url)))["attention"]
    assert section["vision"].state == "unknown"
    assert section["draft"].state == "not-applicable"


async def test_a_preflight_asks_nobody(make: Make) -> None:
    """A launch that is judged beforehand is not confused with a server that happens to listen."""
    async with serve(FakeSglang()) as fake:
        services = make(fake.url, launch={"mamba_backend": "flashinfer"}, launch_source=PREFLIGHT)
        facts = await collect(services)
        view = server.view(facts)
    assert not fake.requests
    assert (facts.observation.answer, facts.observation.up, facts.info) == (None, None, None)
    assert view.features[Feature.FLASHINFER_MAMBA] is True


async def test_attention_of_a_launch_is_read_from_its_flags(make: Make) -> None:
    """Without a server's information the backends are those that were asked for; without either they are unknown."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        nothing = await collect_attention(make(url))
        seen = await collect_attention(make(url, launch={"attention_backend": "fa3"}, launch_source=PREFLIGHT))
    assert {phase.version for phase in nothing.phases.values()} == {None}
    assert seen.phases[Phase.PREFILL].version == 3


async def test_a_narrowed_search_is_told_from_a_whole_one(make: Make) -> None:
    """A server that server_pid or server_pattern does not name may run unseen, as may one in hidden processes."""
    shared = Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why="")
    found = []
    for settings in (Settings(), Settings(server_pid=7), Settings(server_pattern="x")):
        services = make("http://127.0.0.1:9", settings=settings)
        hidden = (await collect(services)).every_process
        services.standing = shared
        found.append((hidden, (await collect(services)).every_process))
    assert found == [(False, True), (False, False), (False, False)]


async def test_a_secondary_node_is_not_asked_for_information(make: Make) -> None:
    """Nodes of higher rank answer HTTP but have no information; that is no fault."""
    async with serve(FakeSglang(special=answering("", status=404))) as fake:
        facts = await collect(make(fake.url, launch={"node_rank": 1}, launch_source="process"))
    assert (facts.observation.up, server.state(facts)) == (True, server.ServerState.UP)
    assert fake.requests["/server_info"] == 0


# -- its key ------------------------------------------------------------------------------------------


async def test_a_server_with_a_key_is_up_but_says_nothing_without_it(make: Make) -> None:
    """401 means up, unauthorized, and a sentence that says what is missing."""
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        facts = await collect(make(fake.url))
    assert (facts.observation.up, facts.info, server.state(facts)) == (True, None, server.ServerState.UNAUTHORIZED)
    assert facts.info_problem is not None
    assert facts.info_problem.token == "no-key"


async def rounds(services: Services, number: int = 10) -> server.ServerFacts:
    """Half a minute after another."""
    for _ in range(number):
        facts = await collect(services)
        services.clock.now += 30.0
    return facts


async def test_a_server_that_wants_a_key_is_not_asked_in_vain(make: Make) -> None:
    """Before 0.5.20 /ready is refused like any path: without a key one refusal is left in the log, and no more."""
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        facts = await rounds(make(fake.url))
        assert (fake.refusals, fake.requests.total()) == (1, 10)
    assert (facts.observation.up, server.state(facts)) == (True, server.ServerState.UNAUTHORIZED)
    assert facts.info_problem is not None
    assert facts.info_problem.token == "no-key"


@pytest.mark.parametrize(("key", "refusals"), [(MARKER, 1), ("wrong", 3)])
async def test_the_key_is_used_where_ready_is_refused(make: Make, tmp_path: Path, key: str, refusals: int) -> None:
    """A key that fits makes every later round quiet; one that does not is not tried again and again."""
    path = tmp_path / "key"
    path.write_text(key)
    settings = Settings(server_key_file=str(path), deadlines={"server": 30.0})
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        facts = await rounds(make(fake.url, settings=settings, url_source="setting"))
        assert fake.refusals == refusals
        assert fake.requests["/ready"] == 1
        # One for each round, and once the server's information.
        assert fake.requests.total() <= 12
    assert facts.observation.up is True
    assert (facts.info is not None) is (key == MARKER)


async def test_a_key_that_is_refused_is_tried_again_slowly(make: Make) -> None:
    """Whoever guards only one path, or takes the key away again, is noticed within minutes, not each round."""
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        services = make(fake.url)
        await rounds(services, 50)
        assert 2 <= fake.refusals <= 4
        fake.api_key = None
        assert (await rounds(services, 22)).info is not None


@pytest.mark.parametrize(("version", "path"), [("0.5.19", "/model_info"), ("0.5.20", "/ready")])
async def test_ready_is_asked_of_releases_that_have_it(make: Make, version: str, path: str) -> None:
    """A release that is known to lack /ready is not asked for it again, whatever answers there."""
    async with serve(FakeSglang(ready=503, info={**capture("0.5.16-h200-fa3"), "version": version})) as fake:
        services = make(fake.url)
        await collect(services)
        before = fake.requests[path]
        await collect(services)
        assert fake.requests[path] == before + 1


async def test_older_releases_have_another_quiet_path(make: Make) -> None:
    """Before 0.5.6 the model is described at /get_model_info: what does not exist is asked once."""
    async with serve(FakeSglang(old=True)) as fake:
        facts = await rounds(make(fake.url))
        assert fake.requests["/get_model_info"] >= 8
    assert facts.observation.status == 200


async def test_a_pipe_in_place_of_the_key_holds_nothing_up(make: Make, tmp_path: Path) -> None:
    """Nobody writes to it: there is no key, and the next file in its place is read."""
    path = tmp_path / "key"
    os.mkfifo(path)
    settings = Settings(server_key_file=str(path), deadlines={"server": 30.0})
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        services = make(fake.url, settings=settings, url_source="setting")
        facts = await asyncio.wait_for(rounds(services), 20)
        assert facts.info_problem is not None
        assert facts.info_problem.token == "key-unreadable"
        path.unlink()
        path.write_text(MARKER)
        assert (await rounds(services)).info is not None


async def test_a_key_mounted_later_is_used_at_once(make: Make, tmp_path: Path) -> None:
    """The key file is read anew: a wrong or missing key is told apart, a corrected one needs no waiting."""
    path = tmp_path / "key"
    services = make("", settings=Settings(server_key_file=str(path), deadlines={"server": 30.0}))
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        services.targets.target = target(fake.url)
        tokens = []
        for content in (None, "wrong", f"{MARKER}\n"):
            if content is not None:
                path.write_text(content)
            facts = await collect(services)
            tokens.append(facts.info_problem.token if facts.info_problem else "none")
    assert tokens == ["key-unreadable", "key-refused", "none"]
    assert facts.info is not None
    assert MARKER not in repr(facts)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: no such file or directory"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (MARKER.encode() * 1000, "is too large: it has more than 8192 bytes"),
        (MARKER.encode() + "\u00e9".encode(), "does not hold a key: it is not ASCII"),
        (f"{MARKER}\n{MARKER}\n".encode(), "does not hold a key: it has more than one line"),
        (f"{MARKER}\t{MARKER}".encode(), "does not hold a key: some of it cannot be printed"),
        ("a folder", "cannot be read: is a directory"),
        ("a pipe", "is no regular file"),
    ],
)
async def test_why_a_file_gives_no_key(make: Make, tmp_path: Path, content: bytes | str | None, why: str) -> None:
    """It is said, without what is in the file; a pipe that nobody writes to is not waited for."""
    path = tmp_path / "key"
    if content == "a folder":
        path.mkdir()
    elif content == "a pipe":
        os.mkfifo(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    settings = Settings(server_key_file=str(path), deadlines={"server": 30.0})
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        facts = await rounds(make(fake.url, settings=settings, url_source="setting"), 3)
    assert server.state(facts) == server.ServerState.UNAUTHORIZED
    assert facts.info_problem is not None
    assert facts.info_problem.token == "key-unreadable"
    assert facts.info_problem.sentence.endswith(f": {path} {why}.")
    assert MARKER not in repr(facts)


async def test_an_authority_that_is_a_pipe_is_not_waited_for(make: Make, tmp_path: Path) -> None:
    """It is a file that cannot be used."""
    os.mkfifo(tmp_path / "ca.pem")
    settings = Settings(server_ca_file=str(tmp_path / "ca.pem"), deadlines={"server": 30.0})
    async with asyncio.timeout(10):
        facts = await collect(make("https://127.0.0.1:9", settings=settings))
    assert facts.observation.problem is not None
    assert facts.observation.problem.token == "ca-file"


async def test_the_key_is_not_sent_where_it_is_not_needed(make: Make, tmp_path: Path) -> None:
    """A redirect is not followed, so the key stays with the address that was configured; /ready never gets it."""
    path = tmp_path / "key"
    path.write_text(MARKER)
    settings = Settings(server_key_file=str(path), deadlines={"server": 30.0})
    async with serve(FakeSglang()) as other:
        moved = answering("", status=307, Location=f"{other.url}/server_info")
        async with serve(FakeSglang(ready=200, special=moved)) as fake:
            facts = await collect(make(fake.url, settings=settings))
    assert not other.requests
    assert facts.info_problem is not None
    assert facts.info_problem.token == "not-sglang"
    assert fake.authorizations == [None, f"Bearer {MARKER}"]


OURS, STRANGER = os.geteuid(), 54321


def listening(proc: Path, port: int, uid: int) -> Path:
    """A table of sockets in which one user listens on a port."""
    (proc / "self/net").mkdir(parents=True)
    (proc / "self/net/tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        f"   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {uid:5}        0 77 1\n"
    )
    return proc


@pytest.mark.parametrize(
    ("found", "listener", "sent"),
    [
        ({"url_source": "command-line", "pid": 7, "uid": 0}, OURS, True),
        ({"url_source": "command-line", "pid": 7, "uid": OURS}, OURS, True),
        ({"url_source": "listening-socket", "pid": 7, "uid": OURS}, OURS, True),
        ({"url_source": "default"}, 0, True),
        ({"url_source": "setting", "pid": 7, "uid": STRANGER}, STRANGER, True),
        ({"url_source": "command-line", "pid": 42, "uid": STRANGER}, STRANGER, True),
        ({"url_source": "command-line", "pid": 7, "uid": STRANGER}, STRANGER, False),
        ({"url_source": "command-line", "pid": 7, "uid": STRANGER}, OURS, False),
        ({"url_source": "command-line", "pid": 7}, OURS, False),
        ({"url_source": "command-line", "pid": 7, "uid": OURS}, STRANGER, False),
        ({"url_source": "command-line", "pid": 42, "uid": OURS}, STRANGER, False),
        ({"url_source": "command-line-incomplete", "pid": 7, "uid": OURS}, OURS, False),
        ({"url_source": "command-line-other-network", "pid": 7, "uid": OURS}, OURS, False),
        ({"url_source": "default", "pid": 7, "uid": OURS}, OURS, False),
        ({"url_source": "default"}, STRANGER, False),
        ({"url_source": "default"}, None, False),
    ],
)
async def test_the_key_goes_only_to_the_server_it_is_for(
    make: Make, tmp_path: Path, found: dict[str, Any], listener: int | None, sent: bool
) -> None:
    """A process can look like a server, and anybody can listen early: the key needs more than that."""
    (tmp_path / "key").write_text(MARKER)
    settings = Settings(server_key_file=str(tmp_path / "key"), server_pid=42, deadlines={"server": 30.0})
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        port = int(fake.url.rpartition(":")[2])
        proc = tmp_path if listener is None else listening(tmp_path, port, listener)
        facts = await collect(make(fake.url, settings=settings, proc=proc, **found))
    assert (f"Bearer {MARKER}" in fake.authorizations) is sent
    assert (facts.info is not None) is sent
    assert facts.info_problem is None if sent else facts.info_problem and facts.info_problem.token == "key-withheld"


async def test_the_key_is_not_sent_to_a_name(make: Make, tmp_path: Path) -> None:
    """A host on a command line that is no address of this machine, but a name, could lead anywhere: no key for it."""
    (tmp_path / "key").write_text(MARKER)
    settings = Settings(server_key_file=str(tmp_path / "key"), deadlines={"server": 30.0})
    async with serve(FakeSglang(api_key=MARKER)) as fake:
        # Not an address as such, but every resolver turns it into 127.0.0.1.
        url = fake.url.replace("127.0.0.1", "0x7f.1")
        facts = await collect(make(url, settings=settings, url_source="command-line", pid=7, uid=OURS))
    assert facts.observation.status == 401
    assert facts.info_problem is not None
    assert facts.info_problem.token == "key-withheld"
    assert set(fake.authorizations) == {None}


# -- what is no server, or a broken one ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("special", "token"),
    [
        (answering("<html>Welcome to nginx</html>"), "not-json"),
        (answering(b"\x00\x9f\x92\x96" * 100, content_type="application/octet-stream"), "not-json"),
        (answering('{"status": "ok"}', content_type="application/json"), "not-sglang"),
        (answering("Internal Server Error", status=500), "http-error"),
        (answering("", status=404), "not-sglang"),
        (endless, "too-large"),
        (hundred_megabytes, "too-large"),
    ],
    ids=["html", "garbage", "other-json", "500", "404", "endless", "100-MiB"],
)
async def test_a_useless_answer_is_one_sentence(make: Make, special: Handler, token: str) -> None:
    """HTML, garbage, errors, endless and huge bodies are each one token and one sentence; the server is up."""
    async with serve(FakeSglang(special=special)) as fake:
        facts = await collect(make(fake.url))
    assert (facts.observation.up, facts.info) == (True, None)
    assert facts.info_problem is not None
    assert facts.info_problem.token == token
    assert facts.info_problem.sentence.endswith(".")
    assert server.state(facts) is server.ServerState.UNREACHABLE


async def test_a_failing_request_is_not_repeated_at_once(make: Make) -> None:
    """Behind a wedged scheduler each request leaves a waiter in the server: failures are spaced out, doubling."""
    async with serve(FakeSglang(special=answering("", status=500))) as fake:
        services = make(fake.url)
        counts = []
        for seconds in (0, 10, 25, 30, 35):
            services.clock.now += seconds
            await collect(services)
            counts.append(fake.requests["/server_info"])
        services.clock.now += 10_000
        fake.special = None
        facts = await collect(services)
    assert counts == [1, 1, 2, 2, 3]
    assert facts.info is not None
    assert facts.info_problem is None


async def test_a_server_that_takes_the_connection_and_hangs_answers(make: Make) -> None:
    """A time-out behind an accepted connection is an answer of the address, not of the server."""
    async with serve(FakeSglang(delay=60)) as fake:
        facts = await collect(make(fake.url, settings=Settings(deadlines={"server": 1.0})))
    assert (facts.observation.answer, facts.observation.up) == (Answer.ACCEPTED, False)
    assert facts.observation.problem is not None
    assert facts.observation.problem.token == "timeout"
    assert server.state(facts) is server.ServerState.UNREACHABLE


async def test_slow_information_arrives_with_a_later_round(make: Make) -> None:
    """Information that takes longer than a round may wait is there in a later round, and asked for once."""

    async def slow(_request: object) -> Any:
        await asyncio.sleep(1.5)
        return await answering(json.dumps(capture(HYBRID)), content_type="application/json")(_request)  # type: ignore[arg-type]

    async with serve(FakeSglang(special=slow)) as fake:
        services = make(fake.url, settings=Settings(deadlines={"server": 2.0}))
        first = await collect(services)
        for _ in range(20):
            later = await collect(services)
            if later.info is not None:
                break
    assert (first.info, first.info_problem) == (None, None)
    assert later.info is not None
    assert fake.requests["/server_info"] == 1


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 20\x00 ?\r\n\r\n", b"\x00" * 20000])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_another_protocol_is_an_answer_without_a_status(make: Make, scheme: str, answer: bytes) -> None:
    """What accepts a connection and speaks no HTTP, or no TLS, has answered, but no server is up."""
    async with raw(answer) as address:
        facts = await collect(make(f"{scheme}://{address}"))
    assert (facts.observation.answer, facts.observation.up, facts.info) == (Answer.ACCEPTED, False, None)
    assert facts.observation.problem is not None
    assert facts.observation.problem.token == ("tls" if scheme == "https" else "protocol")


async def test_nobody_listening_is_a_refusal(make: Make) -> None:
    """A closed port refuses: no server there, nothing unreachable."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        facts = await collect(make(f"http://127.0.0.1:{closed.getsockname()[1]}"))
    assert (facts.observation.answer, facts.observation.up) == (Answer.REFUSED, False)
    assert server.state(facts) is server.ServerState.NOT_FOUND


async def test_a_name_with_two_addresses_refuses_too(make: Make) -> None:
    """`localhost` has an address in each family; when both refuse, that is a refusal."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        facts = await collect(make(f"http://localhost:{closed.getsockname()[1]}"))
    assert facts.observation.answer is Answer.REFUSED


async def test_a_name_that_does_not_exist_is_unreachable(make: Make) -> None:
    """A host name without an address is unreachable and says so."""
    facts = await collect(make("http://no-such-host.invalid:30000"))
    assert (facts.observation.answer, facts.observation.up) == (Answer.UNREACHABLE, False)
    assert facts.observation.problem is not None
    assert facts.observation.problem.token == "name-resolution"


@contextlib.contextmanager
def silent(port: int = 0) -> Iterator[int]:
    """An address that neither accepts nor refuses: a listener whose backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_silence_is_a_time_out(make: Make) -> None:
    """An address that neither accepts nor refuses in time is a time-out, which proves nothing."""
    with silent() as port:
        facts = await collect(make(f"http://127.0.0.1:{port}", settings=Settings(deadlines={"server": 1.0})))
    assert (facts.observation.answer, facts.observation.up) == (Answer.TIMEOUT, False)


async def test_another_server_process_is_asked_anew(make: Make) -> None:
    """After a refusal, or with another process, what the last server said is forgotten."""
    async with serve(FakeSglang()) as fake:
        services = make(fake.url)
        before = await collect(services)
        port = int(fake.url.rpartition(":")[2])
    gone = await collect(services)
    async with serve(FakeSglang(info=capture("0.5.16-h200-fa4")), port=port) as fake:
        after = await collect(services)
        fake.info = capture(HYBRID)
        services.targets.target = target(fake.url, pid=7, create_time=1.0)
        other = await collect(services)
    shown = [
        facts.info.prefill_attention_backend or facts.info.attention_backend
        for facts in (before, after, other)
        if facts.info
    ]
    assert shown == ["fa3", "fa4", "fa4"]
    assert (gone.info, gone.observation.answer) == (None, Answer.REFUSED)
    assert other.info is not None
    assert other.info.mamba_backend == "flashinfer"


async def test_what_an_unseen_server_said_expires_with_its_silence(make: Make) -> None:
    """Without a process to look at, a server that falls silent takes its information with it after three rounds."""
    async with serve(FakeSglang()) as fake:
        services = make(fake.url, settings=Settings(deadlines={"server": 1.0}))
        for _ in range(20):
            if (await collect(services)).info is not None:
                break
    with silent(int(fake.url.rpartition(":")[2])):
        services.clock.now += 30
        soon = await collect(services)
        services.clock.now += 90
        late = await collect(services)
    assert (soon.observation.answer, late.observation.answer) == (Answer.TIMEOUT, Answer.TIMEOUT)
    assert soon.info is not None
    assert late.info is None


# -- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", name="certificate")
def _certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("making a certificate needs the openssl program")
    files = (str(folder / "certificate.pem"), str(folder / "key.pem"))
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run([program, *request.split(), *names], check=True, capture_output=True)
    return files


async def test_a_certificate_is_verified(make: Make, certificate: tuple[str, str], tmp_path: Path) -> None:
    """An unknown certificate is a TLS problem, the configured authority makes it good, a bad file is named."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    (tmp_path / "bad.pem").write_text("not a certificate")
    async with serve(FakeSglang(), tls=context) as fake:
        outcomes = []
        for file in (None, certificate[0], str(tmp_path / "bad.pem"), str(tmp_path / "absent.pem")):
            settings = Settings(server_ca_file=file, deadlines={"server": 30.0})
            facts = await collect(make(fake.url, settings=settings))
            problem = facts.observation.problem
            outcomes.append((facts.observation.answer, problem.token if problem else None))
    assert outcomes == [
        (Answer.ACCEPTED, "tls"),
        (Answer.ACCEPTED, None),
        (None, "ca-file"),
        (None, "ca-file"),
    ]


async def test_without_an_authority_of_its_own_the_systems_are_trusted(
    make: Make, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSL_CERT_FILE names them, as everywhere with OpenSSL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    async with serve(FakeSglang(), tls=context) as fake:
        facts = await collect(make(fake.url, settings=Settings(deadlines={"server": 30.0})))
    assert (facts.observation.answer, facts.observation.problem) == (Answer.ACCEPTED, None)


async def test_every_problem_that_can_occur_is_declared() -> None:
    """Each token has a meaning, and each one that an operator sees belongs to a condition's closed set of reasons."""
    declared = set(server.SERVER_UNREACHABLE.reasons) | set(server.SERVER_UNAUTHORIZED.reasons) | {"refused"}
    assert set(PROBLEMS) <= declared
    assert set(KEY_PROBLEMS) <= set(server.SERVER_UNAUTHORIZED.reasons)
