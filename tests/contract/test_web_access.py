"""HTTPS, client certificates and the bearer token: who gets what, and files that change under a running agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sidecar.access import Access, AccessError
from sidecar.config import Listen, Settings
from sidecar.connections import Limits
from sidecar.exposition import Exposition
from sidecar.regular import read_regular
from sidecar.web import Web, bind
from tests.fakes import agent
from tests.fakes.certificates import DAYS, Authority, Pair, project, projected
from tests.samples import ProcessState, Store, catalog, snapshot

OPEN = ("/livez", "/startupz", "/readyz", "/readyz?verbose", "/readyz/driver", "/readyz/gpu-lost")
CLOSED = ("/metrics", "/metrics/", "/report", "/", "/docs", "/nowhere", "/livez/", "/livezz", "//livez", "/%6detrics",
          "/livez/../metrics", "/readyz/driver/x")  # fmt: skip
USUAL = Limits()
TOKEN = "s3cr3t-token"


@dataclass
class Door:
    """A served port."""

    port: int
    access: Access

    async def ask(self, path, *, tls=None, method="GET", **headers):
        """Status, headers and body of an answer; a connection of its own, which verifies by ``tls``."""
        return await asyncio.to_thread(self._ask, path, tls, method, headers)

    def _ask(self, path, tls, method, headers):
        kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
        connection = kind("127.0.0.1", self.port, timeout=5, **({} if tls is None else {"context": tls}))
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()


def of(edges: dict | None = None, **settings) -> Access:
    """What is made of these settings; ``edges`` are those to the machine that are others than usual."""
    return Access(Settings(**{name: str(value) for name, value in settings.items()}), **(edges or {}))


@contextlib.asynccontextmanager
async def serving(limits: Limits = USUAL, *, access: Access | None = None, **settings) -> AsyncIterator[Door]:
    """Serve with these settings until the block ends, or with what was made of them."""
    access = access or of(**settings)
    access.load()
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    exposition = Exposition(catalog(), more=access.samples)
    web = Web(Store(snapshot()), exposition, catalog(), state=ProcessState(), access=access, limits=limits)
    await web.start(sockets)
    try:
        yield Door(sockets[0].getsockname()[1], access)
    finally:
        await web.stop()


@pytest.fixture(scope="session")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def served(authority) -> Pair:
    return authority.sign("server")


@pytest.fixture(scope="session")
def client(authority) -> Pair:
    return authority.sign("client")


@pytest.fixture
def token_file(tmp_path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def trusting(authority: Authority, shown: Pair | None = None) -> ssl.SSLContext:
    """A client that trusts an authority, and shows a certificate if it has one."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


def kubelet() -> ssl.SSLContext:
    """The kubelet's probes over HTTPS: they verify nothing and show nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# -- the token ----------------------------------------------------------------------------------------


async def test_probe_paths_ask_for_nothing_and_everything_else_for_the_token(token_file) -> None:
    """Also what does not exist, and other spellings of a path, are closed without it and as always with it."""
    async with serving(token_file=token_file) as door:
        for path in OPEN:
            assert (await door.ask(path))[0] == 200, path
        for path in CLOSED:
            status, headers, body = await door.ask(path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
            assert body == b"a bearer token is needed\n"
            assert headers["Server"] == "sglang-sidecar"
            assert (await door.ask(path, Authorization=f"Bearer {TOKEN}"))[0] in (200, 404), path
        assert (await door.ask("/metrics", method="POST"))[0] == 401
        assert (await door.ask("/metrics", method="POST", Authorization=f"Bearer {TOKEN}"))[0] == 405


@pytest.mark.parametrize(
    "authorization",
    [
        "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}",
        f"Bearer {TOKEN} x", f"Bearer {TOKEN.upper()}", "Bearer " + "x" * 4000, "Bearer \xff\xfe",
        "Basic " + base64.b64encode(f"user:{TOKEN}".encode()).decode(),
    ],
)  # fmt: skip
async def test_what_is_not_the_token(authorization, token_file) -> None:
    """Nothing near the token is taken for it."""
    async with serving(token_file=token_file) as door:
        status, _, body = await door.ask("/metrics", Authorization=authorization)
    assert status == 401
    assert b"# TYPE" not in body


@pytest.mark.parametrize("authorization", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER   {TOKEN} "])
async def test_the_schemes_name_has_no_case(authorization, token_file) -> None:
    """RFC 9110, 11.1: the scheme is case-insensitive; the token is not."""
    async with serving(token_file=token_file) as door:
        assert (await door.ask("/metrics", Authorization=authorization))[0] == 200


async def test_a_token_is_changed_without_a_restart(tmp_path) -> None:
    """As a mounted Secret changes; two lines let both in, so that nobody is locked out meanwhile."""
    folder = projected(tmp_path / "secret")
    project(folder, 1, token=b"first\n")
    async with serving(token_file=folder / "token") as door:

        async def known() -> list[str]:
            words = ("first", "second")
            return [word for word in words if (await door.ask("/report", Authorization=f"Bearer {word}"))[0] == 200]

        assert await known() == ["first"]
        for generation, (content, expected) in enumerate(
            ((b"first\nsecond\n", ["first", "second"]), (b"second", ["second"]), (b"\n", ["second"])), 2
        ):
            project(folder, generation, token=content)
            door.access.renew()
            assert await known() == expected


# -- TLS ----------------------------------------------------------------------------------------------


async def test_https_and_nothing_else(authority, served) -> None:
    """Every path over HTTPS; what is no TLS gets no answer, and what is too old a TLS neither."""
    async with serving(tls_cert_file=served.certificate, tls_key_file=served.key) as door:
        for path in (*OPEN, "/metrics", "/report", "/"):
            assert (await door.ask(path, tls=trusting(authority)))[0] == 200, path
        assert (await door.ask("/livez", tls=kubelet()))[0] == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            await door.ask("/livez")
        old = trusting(authority)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that it is old is the point
            old.maximum_version = ssl.TLSVersion.TLSv1_1
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            await door.ask("/livez", tls=old)
        assert (await door.ask("/livez", tls=trusting(authority)))[0] == 200


async def test_with_client_certificates_the_kubelet_still_gets_its_probes(authority, served, client, tmp_path) -> None:
    """Without a certificate the probe paths alone; with a good one everything; with a strange one nothing."""
    stranger = Authority(tmp_path / "other").sign("client")
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key}
    async with serving(**files, tls_client_ca_file=authority.certificate) as door:
        for path in OPEN:
            assert (await door.ask(path, tls=kubelet()))[0] == 200
            assert (await door.ask(path, tls=trusting(authority, client)))[0] == 200
        for path in CLOSED:
            assert (await door.ask(path, tls=kubelet()))[0] == 403, path
            assert (await door.ask(path, tls=trusting(authority, client)))[0] in (200, 404), path
        for path in ("/livez", "/metrics"):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                await door.ask(path, tls=trusting(authority, stranger))


async def test_where_both_are_set_both_are_needed(authority, served, client, token_file) -> None:
    """A certificate without the token is not enough, nor the other way round."""
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key, "token_file": token_file}
    async with serving(**files, tls_client_ca_file=authority.certificate) as door:
        found = [
            (await door.ask("/metrics", tls=tls, **headers))[0]
            for tls in (kubelet(), trusting(authority, client))
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}"})
        ]
    assert found == [403, 403, 401, 200]


async def test_a_resumed_session_keeps_its_client(authority, served, client) -> None:
    """A client that comes back with a ticket of its session is who it was, and one without a certificate too."""
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key}
    async with serving(**files, tls_client_ca_file=authority.certificate) as door:

        def twice(context: ssl.SSLContext) -> list[tuple[bool, bytes]]:
            session, found = None, []
            for _ in range(2):
                with (
                    socket.create_connection(("127.0.0.1", door.port), timeout=5) as raw,
                    context.wrap_socket(raw, server_hostname="127.0.0.1", session=session) as one,
                ):
                    one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    status = one.recv(65536)[:12]
                    while one.recv(65536):
                        pass
                    session = one.session
                    found.append((bool(one.session_reused), status))
            return found

        mine = await asyncio.to_thread(twice, trusting(authority, client))
        nobodys = await asyncio.to_thread(twice, trusting(authority))
    assert mine == [(False, b"HTTP/1.1 200"), (True, b"HTTP/1.1 200")]
    assert nobodys == [(False, b"HTTP/1.1 403"), (True, b"HTTP/1.1 403")]


def shown_by(port: int) -> str:
    """The certificate that a port shows, as PEM."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        kubelet().wrap_socket(raw, server_hostname="127.0.0.1") as one,
    ):
        return ssl.DER_cert_to_PEM_cert(one.getpeercert(binary_form=True) or b"")


async def test_a_renewed_certificate_is_shown_without_a_restart(authority, tmp_path) -> None:
    """A mounted Secret turns to its next content; connections that are open go on."""
    pairs = [authority.sign(f"generation{number}") for number in range(3)]
    folder = projected(tmp_path / "secret")

    def turn(number: int, certificate: Path, key: Path) -> None:
        project(folder, number, tls_crt=certificate.read_bytes(), tls_key=key.read_bytes())

    def now() -> str:
        return pem.split("\n", 1)[1] if (pem := shown_by(door.port)) else ""

    def of(pair: Pair) -> str:
        return pair.certificate.read_text().split("\n", 1)[1]

    turn(0, pairs[0].certificate, pairs[0].key)
    async with serving(tls_cert_file=folder / "tls.crt", tls_key_file=folder / "tls.key") as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=trusting(authority))
        assert await asyncio.to_thread(now) == of(pairs[0])
        turn(1, pairs[1].certificate, pairs[1].key)
        door.access.renew()
        assert await asyncio.to_thread(now) == of(pairs[1])
        with capture_logs() as logs:
            # A certificate whose key is yet to come, as when two files are written one after the other.
            turn(2, pairs[2].certificate, pairs[1].key)
            for _ in range(3):
                door.access.renew()
            assert await asyncio.to_thread(now) == of(pairs[1])
            turn(3, pairs[2].certificate, pairs[2].key)
            door.access.renew()
        assert await asyncio.to_thread(now) == of(pairs[2])
        assert [one["log_level"] for one in logs] == ["warning", "info"]
        assert "tls_key_file" in logs[0]["message"]
        with capture_logs() as logs:
            (folder / "..data").unlink()
            for _ in range(3):
                door.access.renew()
            assert await asyncio.to_thread(now) == of(pairs[2])
            (folder / "..data").symlink_to("..3")
            door.access.renew()
        assert [(one["log_level"], one["event"]) for one in logs] == [
            ("warning", "access not renewed; what was loaded before stays in force"),
            ("info", "access files usable again"),
        ]
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("lost", ["token", "certificate"])
async def test_each_part_is_renewed_for_itself(lost, authority, client, token_file, tmp_path) -> None:
    """An authority that was replaced is out although another file is missing; what is missing stays in force."""
    other = Authority(tmp_path / "other")
    pair = authority.sign("own")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate.read_bytes())
    files = {"tls_cert_file": pair.certificate, "tls_key_file": pair.key, "token_file": token_file}
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    async with serving(**files, tls_client_ca_file=ca) as door:
        old, new = trusting(authority, client), trusting(authority, other.sign("client"))
        assert (await door.ask("/metrics", tls=old, **bearer))[0] == 200
        gone = token_file if lost == "token" else pair.certificate
        kept = gone.read_bytes()
        gone.unlink()
        ca.write_bytes(other.certificate.read_bytes())
        with capture_logs() as logs:
            for _ in range(3):
                door.access.renew()
        told = [(one["log_level"], one["part"]) for one in logs]
        assert sorted(told) == [
            ("info", "clients' authority"),
            ("warning", "tokens" if lost == "token" else "certificate"),
        ]
        assert (await door.ask("/metrics", tls=new, **bearer))[0] == 200
        assert (await door.ask("/metrics", tls=new))[0] == 401
        assert (await door.ask("/metrics", tls=kubelet(), **bearer))[0] == 403
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            await door.ask("/metrics", tls=old, **bearer)
        gone.write_bytes(kept)
        with capture_logs() as logs:
            door.access.renew()
        assert [(one["log_level"], one["event"]) for one in logs] == [("info", "access files usable again")]


async def test_an_authority_that_is_lost_keeps_out_whom_it_kept_out(authority, served, client, tmp_path) -> None:
    """Neither its file's loss nor rubbish in it lets anybody in, while certificate and token are renewed."""
    ca, token = tmp_path / "ca.pem", tmp_path / "token"
    ca.write_bytes(authority.certificate.read_bytes())
    token.write_text("first")
    stranger = Authority(tmp_path / "other").sign("client")
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key, "tls_client_ca_file": ca}
    async with serving(**files, token_file=token) as door:
        for number, change in enumerate((lambda: ca.write_bytes(b""), ca.unlink)):
            change()
            token.write_text(f"token{number}")
            door.access.renew()
            bearer = {"Authorization": f"Bearer token{number}"}
            assert (await door.ask("/metrics", tls=trusting(authority, client), **bearer))[0] == 200
            assert (await door.ask("/metrics", tls=kubelet(), **bearer))[0] == 403
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                await door.ask("/metrics", tls=trusting(authority, stranger), **bearer)


class FastClock:
    """Sleeps a hundredth of what is asked for."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


class Mount:
    """A file system of which one file does not answer while ``hangs`` is set."""

    def __init__(self, file: Path) -> None:
        self.file, self.answers = str(file), threading.Event()
        self.answers.set()

    def read(self, path: str, limit: int) -> bytes:
        if path == self.file:
            assert self.answers.wait(60)
        return read_regular(path, limit)


async def until(true: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_a_file_that_does_not_answer_holds_up_no_other_part(token_file, authority, tmp_path) -> None:
    """It is told once, and is followed again when it answers; the others are followed all the while."""
    pair, renewed = authority.sign("mounted"), authority.sign("renewed")
    mount = Mount(token_file)
    settings = {"tls_cert_file": pair.certificate, "tls_key_file": pair.key, "token_file": token_file}
    access = of({"read": mount.read}, **settings)
    async with serving(access=access):
        own = access.context
        mount.answers.clear()
        token_file.write_text("next")
        watching = asyncio.create_task(access.watch(FastClock()))
        try:
            with capture_logs() as logs:
                await until(lambda: any("has not answered" in one.get("message", "") for one in logs))
                pair.certificate.write_bytes(renewed.certificate.read_bytes())
                pair.key.write_bytes(renewed.key.read_bytes())
                await until(lambda: access.context is not own)
                await asyncio.sleep(0.5)
            told = [one["message"] for one in logs if one["log_level"] == "warning" and one["part"] == "tokens"]
            assert told == [f"token_file: {token_file} has not answered for 10 seconds"]
            assert access.knows(f"Bearer {TOKEN}")
            assert failing(access) == {"token"}
            with capture_logs() as logs:
                mount.answers.set()
                await until(lambda: access.knows("Bearer next"))
                await until(lambda: ("access renewed", "tokens") in [(one["event"], one.get("part")) for one in logs])
            assert not access.knows(f"Bearer {TOKEN}")
            assert failing(access) == set()
        finally:
            mount.answers.set()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def test_a_file_that_does_not_answer_at_the_start_ends_it(token_file) -> None:
    """With the sentence that names it."""
    mount = Mount(token_file)
    mount.answers.clear()
    access = of({"read": mount.read, "patience": 0.2}, token_file=token_file)
    try:
        with pytest.raises(AccessError, match=f"token_file: {token_file} has not answered for 0.2 seconds"):
            await access.start()
    finally:
        mount.answers.set()


def failing(access: Access) -> set[str]:
    """The files that could not be renewed, as the metric has it."""
    return {one.labels[0] for one in access.samples() if one.family == "access_renewal_failing" and one.value == 1}


@pytest.mark.parametrize("setting", ["token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
async def test_what_is_no_file_is_a_wrong_renewal(setting, put, authority, token_file, tmp_path) -> None:
    """A pipe above all, which nobody writes to: told once, what was loaded stays, and the next good file is taken."""
    pair = authority.sign(f"own-{setting}")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate.read_bytes())
    files = {
        "tls_cert_file": pair.certificate, "tls_key_file": pair.key, "tls_client_ca_file": ca, "token_file": token_file,
    }  # fmt: skip
    async with serving(**files) as door:
        path = files[setting]
        kept = path.read_bytes()
        path.unlink()
        put(path)
        watching = asyncio.create_task(door.access.watch(FastClock()))
        try:
            with capture_logs() as logs:
                await until(lambda: bool(failing(door.access)))
                await asyncio.sleep(0.3)
            assert [(one["log_level"], one["event"]) for one in logs] == [
                ("warning", "access not renewed; what was loaded before stays in force")
            ]
            assert logs[0]["message"].startswith(f"{setting}: {path} ")
            assert (await door.ask("/metrics", tls=trusting(authority, authority.sign("asker")),
                                   Authorization=f"Bearer {TOKEN}"))[0] == 200  # fmt: skip
            path.rmdir() if put is os.mkdir else path.unlink()
            path.write_bytes(kept)
            await until(lambda: not failing(door.access))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("setting", ["token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"])
async def test_what_any_user_may_write_is_not_believed_on_a_host(setting, authority, token_file, tmp_path) -> None:
    """It ends the start there, and is no renewal; in a container it is told of once."""
    pair = authority.sign(f"open-{setting}")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate.read_bytes())
    files = {
        "tls_cert_file": pair.certificate, "tls_key_file": pair.key, "tls_client_ca_file": ca, "token_file": token_file,
    }  # fmt: skip
    sentence = f"{setting}: {files[setting]} may be written by every user; remove that right (chmod o-w)"
    for path in files.values():
        path.chmod(0o600)
        path.parent.chmod(0o755)
    access = of({"on_host": True}, **files)
    access.load()
    files[setting].chmod(0o606)
    with pytest.raises(AccessError) as refused:
        of({"on_host": True}, **files).load()
    assert str(refused.value) == sentence
    with capture_logs() as logs:
        contained = of(**files)
        contained.load()
        contained.renew()
    assert [(one["event"], one["message"]) for one in logs] == [("access is doubtful", sentence)]
    changed = files[setting].read_bytes() + b"\n\n"
    files[setting].write_bytes(changed)
    with capture_logs() as logs:
        access.renew()
        access.renew()
        assert len(failing(access)) == 1
    assert [one["message"] for one in logs] == [sentence]
    files[setting].chmod(0o600)
    with capture_logs() as logs:
        access.renew()
    assert [one["event"] for one in logs] == ["access renewed"]
    assert failing(access) == set()


async def test_a_certificate_out_of_its_time_is_told_of_and_served(authority, served, tmp_path) -> None:
    """At the start, when its time comes, and at a renewal; with the setting and the date. The metric has its end."""
    now = time.time()
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key}
    edges = {"now": lambda: now}

    def told(act: Callable[[], None]) -> list[str]:
        with capture_logs() as logs:
            act()
        assert {(one["log_level"], one["event"]) for one in logs} <= {("warning", "access is doubtful")}
        return [one["message"] for one in logs]

    access = of(edges, **files, tls_client_ca_file=authority.certificate)
    assert told(access.load) == []
    now += (DAYS + 1) * 86400
    named = (f"tls_cert_file: {served.certificate}", f"tls_client_ca_file: {authority.certificate}")
    ended = told(access.renew)
    assert [one.split(" holds a certificate that ended on ")[0] for one in ended] == list(named)
    assert told(access.renew) == []
    assert told(of(edges, **files, tls_client_ca_file=authority.certificate).load) == ended
    shown = subprocess.check_output(["openssl", "x509", "-noout", "-enddate", "-in", served.certificate], text=True)
    end = ssl.cert_time_to_seconds(shown.strip().partition("=")[2])
    assert time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(end)) in ended[0]
    now -= 10 * 86400
    assert [" begins only on " in one for one in told(of(edges, **files).load)] == [True]
    async with serving(access=of(edges, **files)) as door:
        status, _, body = await door.ask("/metrics", tls=trusting(authority))
        assert status == 200
        ends = [float(line.split()[1]) for line in body.splitlines() if b"not_after" in line and line[:1] != b"#"]
        assert ends == [end]
        assert b'sglang_sidecar_access_renewal_failing{file="certificate"} 0.0' in body


async def test_without_tls_there_is_no_certificate_to_tell_of(token_file) -> None:
    """The token alone has its own series."""
    async with serving(token_file=token_file) as door:
        token_file.write_text("")
        door.access.renew()
        body = (await door.ask("/metrics", Authorization=f"Bearer {TOKEN}"))[2]
    assert b"tls_certificate" not in body
    lines = [line for line in body.splitlines() if line.startswith(b"sglang_sidecar_access_renewal_failing")]
    assert lines == [b'sglang_sidecar_access_renewal_failing{file="token"} 1.0']


async def test_the_end_of_a_tls_connection_is_no_warning(authority, served, caplog) -> None:
    """A client that asks and closes, with or without a word, is the usual end of a scrape."""
    async with serving(tls_cert_file=served.certificate, tls_key_file=served.key) as door:
        for request in (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /livez HT"):
            _, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=trusting(authority))
            writer.write(request)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.2)
    assert [one.getMessage() for one in caplog.records if one.name == "asyncio" and one.levelname != "DEBUG"] == []


async def test_a_clients_authority_is_changed_without_a_restart(authority, served, client, tmp_path) -> None:
    """Whom the old authority vouched for is out, with a ticket of an earlier session too; whom the new one, is in."""
    other = Authority(tmp_path / "other")
    others = other.sign("client")
    file = tmp_path / "ca.pem"
    file.write_bytes(authority.certificate.read_bytes())
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key, "tls_client_ca_file": file}
    async with serving(**files) as door:
        old, new = trusting(authority, client), trusting(authority, others)
        assert (await door.ask("/metrics", tls=old))[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            await door.ask("/metrics", tls=new)
        file.write_bytes(other.certificate.read_bytes())
        door.access.renew()
        assert (await door.ask("/metrics", tls=new))[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            await door.ask("/metrics", tls=old)


async def test_connections_end_with_the_authority_that_let_them_in(authority, served, client, tmp_path) -> None:
    """Not with a certificate that is renewed. Probe paths go on, and who is vouched for now connects anew."""
    other = Authority(tmp_path / "other")
    pair, next_pair, ca = authority.sign("first"), authority.sign("second"), tmp_path / "ca.pem"
    ca.write_bytes(authority.certificate.read_bytes())
    files = {"tls_cert_file": pair.certificate, "tls_key_file": pair.key, "tls_client_ca_file": ca}
    async with serving(**files) as door:
        kept = http.client.HTTPSConnection("127.0.0.1", door.port, timeout=5, context=trusting(authority, client))
        probing = http.client.HTTPSConnection("127.0.0.1", door.port, timeout=5, context=kubelet())

        def asked(connection: http.client.HTTPSConnection, path: str) -> tuple[int, str | None, int]:
            own = connection.sock and connection.sock.getsockname()[1]
            connection.request("GET", path)
            number = own or connection.sock.getsockname()[1]
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.getheader("Connection"), number

        with contextlib.closing(kept), contextlib.closing(probing):
            first = await asyncio.to_thread(asked, kept, "/metrics")
            probe = await asyncio.to_thread(asked, probing, "/readyz")
            assert (first[0], probe[0]) == (200, 200)
            pair.certificate.write_bytes(next_pair.certificate.read_bytes())
            pair.key.write_bytes(next_pair.key.read_bytes())
            door.access.renew()
            assert await asyncio.to_thread(asked, kept, "/metrics") == first
            # The old one is still among them: a bundle, while clients change over.
            ca.write_bytes(other.certificate.read_bytes() + authority.certificate.read_bytes())
            door.access.renew()
            assert await asyncio.to_thread(asked, probing, "/readyz") == probe
            assert await asyncio.to_thread(asked, kept, "/readyz") == (200, None, first[2])
            assert await asyncio.to_thread(asked, kept, "/metrics") == (403, "close", first[2])
            again = await asyncio.to_thread(asked, kept, "/metrics")
            assert again[0] == 200
            assert again[2] != first[2]
            ca.write_bytes(other.certificate.read_bytes())
            door.access.renew()
            assert (await asyncio.to_thread(asked, kept, "/metrics"))[:2] == (403, "close")
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                await asyncio.to_thread(asked, kept, "/metrics")


async def test_a_clients_certificate_is_no_authority(authority, served, client, tmp_path) -> None:
    """It would refuse all who show one: no start with it, and no renewal; in a bundle it may be."""
    ca = tmp_path / "ca.pem"
    ca.write_bytes(client.certificate.read_bytes())
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key, "tls_client_ca_file": ca}
    sentence = f"tls_client_ca_file: {ca} holds no certificate of an authority (PEM)"
    with pytest.raises(AccessError) as refused:
        of(**files).load()
    assert str(refused.value) == sentence
    ca.write_bytes(client.certificate.read_bytes() + authority.certificate.read_bytes())
    async with serving(**files) as door:
        assert (await door.ask("/metrics", tls=trusting(authority, client)))[0] == 200
        ca.write_bytes(client.certificate.read_bytes())
        with capture_logs() as logs:
            door.access.renew()
            door.access.renew()
        assert [one["message"] for one in logs] == [sentence]
        assert failing(door.access) == {"client_ca"}
        assert (await door.ask("/metrics", tls=trusting(authority, client)))[0] == 200


# -- clients that take their time -----------------------------------------------------------------------


async def test_a_handshake_that_never_ends_holds_a_place_and_is_cut(authority, served) -> None:
    """Connections in their handshake count among all, make room for a probe, and end at the time limit."""
    limits = Limits(connections=8, request_seconds=1.0, idle_seconds=2.0)
    async with serving(limits, tls_cert_file=served.certificate, tls_key_file=served.key) as door:
        stalled = []
        for sent in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01") * 10:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(sent)
            stalled.append((reader, writer))
        begun = time.monotonic()
        assert (await door.ask("/livez", tls=kubelet()))[0] == 200
        open_now = len(os.listdir("/proc/self/fd"))
        for reader, _ in stalled:
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
        assert time.monotonic() - begun < 8
        for _, writer in stalled:
            writer.close()
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) < open_now
        assert (await door.ask("/livez", tls=kubelet()))[0] == 200


async def test_stopping_waits_for_nobodys_goodbye(authority, served) -> None:
    """Clients that stay silent, in their handshake or after it, do not hold up the end."""
    async with serving(tls_cert_file=served.certificate, tls_key_file=served.key) as door:
        _, asked = await asyncio.open_connection("127.0.0.1", door.port, ssl=trusting(authority))
        asked.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        _, silent = await asyncio.open_connection("127.0.0.1", door.port)
        silent.write(b"\x16\x03\x01")
        await asyncio.sleep(0.2)
        begun = time.monotonic()
    assert time.monotonic() - begun < 1.5
    for writer in (asked, silent):
        writer.transport.abort()


# -- what is wrong ----------------------------------------------------------------------------------------


def material(folder: Path, authority: Authority) -> dict[str, Path]:
    """Good and bad files by name."""
    good, other = authority.sign("good"), authority.sign("other")
    files = {"cert": good.certificate, "key": good.key, "other_key": other.key, "ca": authority.certificate}
    for name, content in (
        ("empty", b""), ("text", b"not a certificate\n"), ("binary", bytes(range(256))), ("spaces", b"a b\n"),
        ("huge", b"x" * 2**20 + b"x"), ("blank", b" \n\n"), ("cut", good.key.read_bytes()[:80]),
    ):  # fmt: skip
        files[name] = folder / name
        files[name].write_bytes(content)
    files["ca_cut"] = folder / "ca_cut"
    files["ca_cut"].write_bytes(authority.certificate.read_bytes() + authority.certificate.read_bytes()[:200])
    files["encrypted"] = folder / "encrypted"
    encrypt = f"openssl ec -in {good.key} -aes256 -passout pass:x -out {files['encrypted']} 2>/dev/null"
    assert os.system(encrypt) == 0
    return files


@pytest.mark.parametrize(
    ("settings", "names", "word"),
    [
        ({"tls_cert_file": "cert", "tls_key_file": "other_key"}, "tls_key_file", "not the key of"),
        ({"tls_cert_file": "text", "tls_key_file": "key"}, "tls_cert_file", "no certificate"),
        ({"tls_cert_file": "empty", "tls_key_file": "key"}, "tls_cert_file", "no certificate"),
        ({"tls_cert_file": "binary", "tls_key_file": "key"}, "tls_cert_file", "no certificate"),
        ({"tls_cert_file": "huge", "tls_key_file": "key"}, "tls_cert_file", "larger"),
        ({"tls_cert_file": "key", "tls_key_file": "cert"}, "tls_cert_file", "no certificate"),
        ({"tls_cert_file": "cert", "tls_key_file": "text"}, "tls_key_file", "no private key"),
        ({"tls_cert_file": "cert", "tls_key_file": "cut"}, "tls_key_file", "no private key"),
        ({"tls_cert_file": "cert", "tls_key_file": "cert"}, "tls_key_file", "no private key"),
        ({"tls_cert_file": "cert", "tls_key_file": "encrypted"}, "tls_key_file", "encrypted"),
        (
            {"tls_cert_file": "cert", "tls_key_file": "key", "tls_client_ca_file": "text"},
            "tls_client_ca_file",
            "no cert",
        ),
        (
            {"tls_cert_file": "cert", "tls_key_file": "key", "tls_client_ca_file": "key"},
            "tls_client_ca_file",
            "no cert",
        ),
        (
            {"tls_cert_file": "cert", "tls_key_file": "key", "tls_client_ca_file": "ca_cut"},
            "tls_client_ca_file",
            "no cert",
        ),
        ({"token_file": "empty"}, "token_file", "empty"),
        ({"token_file": "blank"}, "token_file", "empty"),
        ({"token_file": "spaces"}, "token_file", "printable"),
        ({"token_file": "binary"}, "token_file", "printable"),
    ],
)
def test_wrong_material_is_one_sentence_that_names_the_setting(settings, names, word, authority, tmp_path) -> None:
    """Nothing of the file is in it, and OpenSSL asks nobody for a password."""
    files = material(tmp_path, authority)
    access = Access(Settings(**{name: str(files[file]) for name, file in settings.items()}))
    with pytest.raises(AccessError) as refused:
        access.load()
    sentence = str(refused.value)
    assert sentence.startswith(f"{names}: ")
    assert word in sentence
    assert "\n" not in sentence
    assert "PRIVATE KEY" not in sentence


def test_serving_with_wrong_material_ends_at_once(authority, tmp_path) -> None:
    """Status 64 and the sentence, for one setting without the other as for a key of another certificate."""
    files = material(tmp_path, authority)
    anybodys = tmp_path / "anybodys"
    anybodys.write_text("a-token")
    anybodys.chmod(0o666)
    leaf = ("--tls-cert-file", files["cert"], "--tls-key-file", files["key"], "--tls-client-ca-file", files["cert"])
    cases = (
        (("--tls-cert-file", files["cert"]), "tls_cert_file: is set"),
        (("--tls-key-file", files["key"]), "tls_key_file: is set"),
        (("--tls-client-ca-file", files["ca"]), "tls_client_ca_file: is set"),
        (("--tls-cert-file", files["cert"], "--tls-key-file", files["other_key"]), "tls_key_file: "),
        (("--tls-cert-file", files["cert"], "--tls-key-file", tmp_path / "absent"), "tls_key_file: "),
        (("--token-file", files["blank"]), "token_file: "),
        (("--token-file", TOKEN), "token_file: the value (not shown)"),
        (
            ("--token-file", "absent/token.txt"),
            "token_file: 'absent/token.txt' (flag --token-file) must name a readable",
        ),
        (("--token-file", anybodys, "--placement", "host"), f"token_file: {anybodys} may be written by every user"),
        (leaf, "tls_client_ca_file: "),
    )
    for arguments, sentence in cases:
        ended = agent.run("serve", "--listen", "127.0.0.1:0", *map(str, arguments))
        assert ended.returncode == 64, ended.stderr
        assert f"sglang-sidecar: {sentence}" in ended.stderr
        assert ended.stderr.count("\n") == 1
        assert TOKEN not in ended.stderr


# -- the whole agent --------------------------------------------------------------------------------------


def test_the_agent_follows_its_files_and_logs_no_secret(authority, client, tmp_path, closed_port) -> None:
    """Certificate and token are renewed under it; probes pass all the while; the log knows no token and no key."""
    folder = projected(tmp_path / "secret")
    pairs = [authority.sign(f"agent{number}") for number in range(2)]
    for number in range(2):
        files = {"tls_crt": pairs[number].certificate.read_bytes(), "tls_key": pairs[number].key.read_bytes()}
        if number == 0:
            project(folder, number, token=b"first-s3cr3t", **files)
            arguments = ("--tls-cert-file", f"{folder}/tls.crt", "--tls-key-file", f"{folder}/tls.key",
                         "--tls-client-ca-file", str(authority.certificate), "--token-file", f"{folder}/token",
                         "--server-url", closed_port, "--log-level", "debug")  # fmt: skip
    with agent.serve(tmp_path / "log", *arguments) as running:
        port = int(running.url.rpartition(":")[2])

        def status(path: str, context: ssl.SSLContext, **headers: str) -> int:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
            with contextlib.closing(connection):
                connection.request("GET", path, headers=headers)
                return connection.getresponse().status

        mine = trusting(authority, client)
        assert status("/metrics", mine, Authorization="Bearer first-s3cr3t") == 200
        assert status("/metrics", mine, Authorization="Bearer second-s3cr3t") == 401
        assert status("/metrics", kubelet(), Authorization="Bearer first-s3cr3t") == 403
        scraped = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=mine)
        with contextlib.closing(scraped):
            scraped.request("GET", "/metrics", headers={"Authorization": "Bearer first-s3cr3t"})
            body = scraped.getresponse().read()
        assert body.count(b"\nsglang_sidecar_access_renewal_failing{") == 3
        assert b"\nsglang_sidecar_tls_certificate_not_after_timestamp_seconds " in body
        project(folder, 1, token=b"second-s3cr3t", **files)
        end = time.monotonic() + 20
        while status("/metrics", mine, Authorization="Bearer second-s3cr3t") != 200:
            assert status("/livez", kubelet()) == 200
            assert time.monotonic() < end, running.log
            time.sleep(0.2)
        assert status("/metrics", mine, Authorization="Bearer first-s3cr3t") == 401
        assert running.stop()[0] == 0
    log = (tmp_path / "log").read_text()
    assert "access renewed" in log
    assert "s3cr3t" not in log
    assert "PRIVATE" not in log
    assert "Traceback" not in log
