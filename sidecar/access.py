"""Who may ask: the certificate that the agent serves with, the clients' authority, the bearer token.

All of it lies in files that somebody else renews (cert-manager, a projected Secret), so they are looked at again and
again, and a change takes effect without a restart. What is wrong with them at the start ends it; what is wrong with
them later is said, and what was good goes on: a renewal that is half done must not close the port. Each part is
renewed for itself: a token that cannot be read must not keep an authority in force that was replaced. A certificate out
of its time is served all the same, with a warning: the kubelet's probes do not look at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from weakref import WeakSet

import structlog

from sidecar.certificates import Validity, validities
from sidecar.config import Settings
from sidecar.exposure import objection, writable_by_all
from sidecar.model import Clock, Sample
from sidecar.offload import in_daemon_thread
from sidecar.regular import IrregularError, read_regular

_log = structlog.get_logger()

RELOAD_SECONDS: Final = 5.0
"""Time between two looks at the files."""
PATIENCE_SECONDS: Final = 10.0
"""Time that a look at files may take, which are read within milliseconds, before it is said that they do not answer."""
_LIMIT: Final = 1024 * 1024
"""Bytes of the largest accepted file: bundles of authorities have some 200 kB."""
_SCHEME: Final = "bearer "


class AccessError(Exception):
    """A file cannot be used. The argument is one sentence that names the setting, and holds nothing of the file."""


_CERTIFICATE: Final = "certificate"
_AUTHORITY: Final = "clients' authority"
_TOKENS: Final = "tokens"
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    _CERTIFICATE: ("tls_cert_file", "tls_key_file"),
    _AUTHORITY: ("tls_client_ca_file",),
    _TOKENS: ("token_file",),
}
"""What is renewed as a whole, with the settings that name its files; one part does not wait for another."""
_LABELS: Final[Mapping[str, str]] = {_CERTIFICATE: "certificate", _AUTHORITY: "client_ca", _TOKENS: "token"}
"""What metrics call the parts."""

Read = Callable[[str, int], bytes]
"""Reads the start of a regular file; a parameter so that tests can have a file system that hangs."""


class Access:
    """The rules for one agent's port. `load` before use; `watch` keeps them in step with the files.

    ``settings`` are those whose names begin with ``tls_``, and ``token_file``. On a host what any user may write is
    not believed. ``now`` gives seconds since the epoch, ``patience`` is how long files may take to answer.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_host: bool = False,
        read: Read = read_regular,
        now: Callable[[], float] = time.time,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self._on_host = on_host
        self._read = read
        self._now = now
        self._patience = patience
        self._parts = tuple(part for part, names in _PARTS.items() if getattr(settings, names[0]) is not None)
        self._marks: dict[str, bytes] = {}
        self._problems: dict[str, str] = {}
        self._warned: dict[str, frozenset[str]] = {}
        self._looked_at: dict[str, str] = {}
        # Kept, because a context is made of both, and the files of the one may be gone when the other is renewed.
        self._pair = (b"", b"")
        self._authority: bytes | None = None
        self._context: ssl.SSLContext | None = None
        self._vouched: WeakSet[ssl.SSLContext] = WeakSet()
        self._served: Validity | None = None
        self._authorities: tuple[Validity | None, ...] = ()
        self._tokens: tuple[bytes, ...] = ()
        self._taking = threading.Lock()

    def load(self) -> None:
        """Read the files for the first time. Blocks. Raises `AccessError` where one cannot be used."""
        for part in self._parts:
            self._take(part, self._contents(part))
            self._warn(part)

    async def start(self) -> None:
        """`load` beside the event loop. Raises `AccessError` also where a file does not answer."""
        try:
            async with asyncio.timeout(self._patience):
                await in_daemon_thread(self.load)
        except TimeoutError:
            silent = list(self._looked_at)[-1:] or self._parts[:1]
            raise AccessError(self._silence(silent[0])) from None

    @property
    def configured(self) -> bool:
        """Whether there is any file to keep in step with."""
        return bool(self._parts)

    @property
    def context(self) -> ssl.SSLContext | None:
        """For the next connection; None where no TLS is spoken."""
        return self._context

    @property
    def certificate_needed(self) -> bool:
        """Whether whoever asks for more than a probe needs a certificate of the clients' authority."""
        return self._settings.tls_client_ca_file is not None

    @property
    def token_needed(self) -> bool:
        """Whether whoever asks for more than a probe needs the token."""
        return self._settings.token_file is not None

    def vouched(self, context: object) -> bool:
        """Whether who connected with a context was let in by the clients' authority that is in force."""
        return context in self._vouched

    def samples(self) -> Iterable[Sample]:
        """Yield when the certificate ends, and which parts are not those that the files hold now."""
        if self._served is not None:
            yield Sample("tls_certificate_not_after_timestamp_seconds", (), self._served.ends)
        for part in self._parts:
            yield Sample("access_renewal_failing", (_LABELS[part],), float(part in self._problems))

    def knows(self, authorization: str) -> bool:
        """Whether a request's ``Authorization`` bears one of the tokens; takes as long for each that it does not."""
        given = authorization[len(_SCHEME) :].strip() if authorization[: len(_SCHEME)].lower() == _SCHEME else ""
        # A digest first: comparing the texts would tell how long the token is.
        asked = _digest(given.encode("utf-8", "surrogateescape"))
        found = False
        for token in self._tokens:
            found |= hmac.compare_digest(asked, token)
        return found

    async def watch(self, clock: Clock) -> None:
        """Follow the files until cancelled. One that does not answer leaves what was read before in force."""
        async with asyncio.TaskGroup() as tasks:
            for part in self._parts:
                tasks.create_task(self._follow(part, clock))

    async def _follow(self, part: str, clock: Clock) -> None:
        while True:
            await clock.sleep(RELOAD_SECONDS)
            waiting = asyncio.create_task(self._lose_patience(part, clock))
            try:
                await in_daemon_thread(lambda: self._renew(part))
            except OSError as error:
                self._tell(part, f"the files could not be looked at: {error.strerror}")
            finally:
                waiting.cancel()

    async def _lose_patience(self, part: str, clock: Clock) -> None:
        """Say that a look takes too long. It is not given up: each further one would hold a thread as well."""
        await clock.sleep(self._patience)
        self._tell(part, self._silence(part))

    def _silence(self, part: str) -> str:
        return f"{self._looked_at.get(part, part)} has not answered for {self._patience:g} seconds"

    def renew(self) -> None:
        """Use what changed anew, each part for itself. Blocks.

        What cannot be used is said once, and what was loaded of that part before stays in force.
        """
        for part in self._parts:
            self._renew(part)

    def _renew(self, part: str) -> None:
        try:
            contents = self._contents(part)
            changed = _mark(contents) != self._marks[part]
            if changed and self._contents(part) != contents:
                return  # it is being renewed right now: the files may be of two generations
            if changed:
                self._take(part, contents)
        except AccessError as error:
            self._tell(part, str(error))
            return
        self._warn(part)
        problem = self._problems.pop(part, None)
        if changed:
            _log.info("access renewed", part=part)
        elif problem is not None:
            _log.info("access files usable again", part=part)

    def _take(self, part: str, contents: Mapping[str, bytes]) -> None:
        """Put a part's new contents in force. Raises `AccessError`, and then changes nothing."""
        with self._taking:
            if part == _TOKENS:
                self._tokens = _tokens(str(self._settings.token_file), contents["token_file"])
            else:
                pair, authority = self._pair, self._authority
                if part == _CERTIFICATE:
                    pair = contents["tls_cert_file"], contents["tls_key_file"]
                else:
                    authority = contents["tls_client_ca_file"]
                context = _context(self._settings, pair, authority)
                # Before anybody can connect with it; whom another authority let in is none of them.
                self._vouched = WeakSet([context, *(self._vouched if authority == self._authority else ())])
                self._context = context
                self._pair, self._authority = pair, authority
                # Further certificates of that file are those of authorities, which clients may do without.
                self._served = next(iter(validities(pair[0])), None)
                self._authorities = () if authority is None else validities(authority)
            self._marks[part] = _mark(contents)

    def _tell(self, part: str, problem: str) -> None:
        if problem != self._problems.get(part):
            self._problems[part] = problem
            _log.warning("access not renewed; what was loaded before stays in force", part=part, message=problem)

    def _warn(self, part: str) -> None:
        """Say once what is doubtful of a part that is in force; it becomes so by the passing of time, too."""
        found = frozenset(self._doubts(part))
        for doubt in sorted(found - self._warned.get(part, frozenset())):
            _log.warning("access is doubtful", part=part, message=doubt)
        self._warned[part] = found

    def _doubts(self, part: str) -> Iterator[str]:
        for setting in _PARTS[part]:
            # In a container: on a host it was not taken.
            place = writable_by_all(Path(getattr(self._settings, setting)))
            if place is not None:
                yield f"{setting}: {objection(place)}"
        if part == _CERTIFICATE:
            named = f"tls_cert_file: {self._settings.tls_cert_file}"
            yield from _untimely(named, [self._served], self._now(), "clients that verify it refuse")
        elif part == _AUTHORITY:
            named = f"tls_client_ca_file: {self._settings.tls_client_ca_file}"
            yield from _untimely(named, self._authorities, self._now(), "clients that it vouches for are refused")

    def _contents(self, part: str) -> dict[str, bytes]:
        """What each of a part's files holds, by setting. Raises `AccessError`."""
        found: dict[str, bytes] = {}
        for setting in _PARTS[part]:
            path = str(getattr(self._settings, setting))
            self._looked_at[part] = f"{setting}: {path}"
            try:
                found[setting] = self._read(path, _LIMIT + 1)
                place = writable_by_all(Path(path)) if self._on_host else None
            except IrregularError as error:
                raise AccessError(f"{setting}: {path} {error}") from None
            except OSError as error:
                why = (error.strerror or type(error).__name__).lower()
                raise AccessError(f"{setting}: {path} cannot be read: {why}") from None
            if place is not None:
                raise AccessError(f"{setting}: {objection(place)}")
            if len(found[setting]) > _LIMIT:
                raise AccessError(f"{setting}: {path} is larger than {_LIMIT} bytes; is it the right file?")
        return found


def _untimely(named: str, found: Sequence[Validity | None], now: float, follows: str) -> Iterator[str]:
    """Yield sentences for what is not good yet, or no more, of the certificates of a file, and what follows."""
    known = [one for one in found if one is not None]
    if ended := [one.ends for one in known if one.ends < now]:
        yield f"{named} holds a certificate that ended on {_date(max(ended))}; {follows}"
    if coming := [one.begins for one in known if one.begins > now]:
        yield f"{named} holds a certificate that begins only on {_date(min(coming))}; {follows}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _mark(contents: Mapping[str, bytes]) -> bytes:
    """What tells these contents from others."""
    return _digest(b"".join(f"{name} {len(content)} ".encode() + content for name, content in contents.items()))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _tokens(path: str, content: bytes) -> tuple[bytes, ...]:
    """The digests of the tokens: one per line, so that the next one can be let in before the last one is gone."""
    lines = [line.strip() for line in content.splitlines()]
    tokens = [line for line in lines if line]
    if not tokens:
        raise AccessError(f"token_file: {path} is empty; it must hold the token, one per line where there are several")
    if not all(33 <= byte <= 126 for token in tokens for byte in token):
        raise AccessError(f"token_file: {path} must hold tokens of printable ASCII characters without spaces")
    return tuple(_digest(token) for token in tokens)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Give a path by which OpenSSL reads a content: it takes keys only from files, and those may have changed since."""
    with os.fdopen(os.memfd_create("access"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _context(settings: Settings, pair: tuple[bytes, bytes], authority: bytes | None) -> ssl.SSLContext:
    """Make what the port speaks TLS with, of a certificate with its key and the clients' authority.

    Raises `AccessError`, and OSError where there is no room for a descriptor.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def no_password() -> str:
        # Otherwise OpenSSL asks on the terminal, and waits.
        raise AccessError(
            f"tls_key_file: {settings.tls_key_file} is encrypted; it must hold the key without a password"
        )

    with _as_file(pair[0]) as certificate, _as_file(pair[1]) as key:
        try:
            context.load_cert_chain(certificate, key, password=no_password)
        except ssl.SSLError as error:
            raise AccessError(_refusal(settings, certificate, error)) from None
    if authority is not None:
        try:
            with _as_file(authority) as file:
                context.load_verify_locations(cafile=file)
            # A client's own certificate is taken as well, and then refuses every client.
            usable = context.cert_store_stats()["x509_ca"] > 0
        except ssl.SSLError:
            usable = False
        if not usable:
            raise AccessError(
                f"tls_client_ca_file: {settings.tls_client_ca_file} holds no certificate of an authority (PEM)"
            )
        # Not "required": the kubelet's probes have none, and would end in the handshake. One that is shown must be
        # good; whoever shows none gets the probes alone.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _refusal(settings: Settings, certificate: str, error: ssl.SSLError) -> str:
    """The sentence for a pair of files that OpenSSL does not take; ``certificate`` is where it read the first."""
    named, key = settings.tls_cert_file, settings.tls_key_file
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key_file: {key} is not the key of the certificate in tls_cert_file {named}"
    # OpenSSL says the same of both; which one it is, is found out by looking at the certificate alone.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=certificate)
    except ssl.SSLError:
        return f"tls_cert_file: {named} holds no certificate (PEM)"
    reason = f" ({error.reason.lower().replace('_', ' ')})" if error.reason else ""
    return f"tls_key_file: {key} holds no private key that can be used with tls_cert_file {named} (PEM){reason}"
