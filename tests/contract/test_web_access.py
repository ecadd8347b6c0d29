"""HTTPS, client certificates and the bearer token: who gets what, and files that change under a running agent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import os
import socket
import ssl
import time
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sidecar.access import Access, AccessError
from sidecar.config import Listen, Settings
from sidecar.connections import Limits
from sidecar.exposition import Exposition
from sidecar.web import Web, bind
from tests.fakes import agent
from tests.fakes.certificates import Authority, Pair, project, projected
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


@contextlib.asynccontextmanager
async def serving(limits: Limits = USUAL, **settings) -> AsyncIterator[Door]:
    """Serve with these settings until the block ends."""
    access = Access(Settings(**{name: str(value) for name, value in settings.items()}))
    access.load()
    sockets = bind([Listen(host="127.0.0.1", port=0)])
    web = Web(Store(snapshot()), Exposition(catalog()), catalog(), state=ProcessState(), access=access, limits=limits)
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


async def test_a_file_that_does_not_answer_holds_up_no_other_part(token_file, authority, served) -> None:
    """One on a file system that hangs, as a pipe that nobody writes to, while the others are followed."""
    files = {"tls_cert_file": served.certificate, "tls_key_file": served.key, "token_file": token_file}
    async with serving(**files) as door:

        class Clock:
            """Sleeps a hundredth of what is asked for."""

            async def sleep(self, seconds: float) -> None:
                await asyncio.sleep(seconds / 100)

        own, before = door.access.context, token_file.read_text()
        token_file.unlink()
        os.mkfifo(token_file)
        watching = asyncio.create_task(door.access.watch(Clock()))
        await asyncio.sleep(0.3)
        renewed = authority.sign("renewed")
        kept = served.certificate.read_bytes(), served.key.read_bytes()
        try:
            served.certificate.write_bytes(renewed.certificate.read_bytes())
            served.key.write_bytes(renewed.key.read_bytes())
            end = time.monotonic() + 10
            while door.access.context is own:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            assert door.access.knows(f"Bearer {before.strip()}")
        finally:
            served.certificate.write_bytes(kept[0])
            served.key.write_bytes(kept[1])
            watching.cancel()
            # Whoever waits for the pipe's other end goes on.
            os.close(os.open(token_file, os.O_RDWR | os.O_NONBLOCK))
            await asyncio.gather(watching, return_exceptions=True)


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
    cases = (
        (("--tls-cert-file", files["cert"]), "tls_cert_file: is set"),
        (("--tls-key-file", files["key"]), "tls_key_file: is set"),
        (("--tls-client-ca-file", files["ca"]), "tls_client_ca_file: is set"),
        (("--tls-cert-file", files["cert"], "--tls-key-file", files["other_key"]), "tls_key_file: "),
        (("--tls-cert-file", files["cert"], "--tls-key-file", tmp_path / "absent"), "tls_key_file: "),
        (("--token-file", files["blank"]), "token_file: "),
        (("--token-file", TOKEN), "token_file: the value (not shown)"),
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
