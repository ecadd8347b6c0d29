"""What a running SGLang server says of itself over HTTP.

Two questions, asked apart. ``observe`` is cheap and asked each round: does the address answer? ``info`` costs the
server a round trip through its schedulers, which has no deadline there, so it is asked once per server process:
one request at a time, with a deadline and a back-off. ``/health`` is never asked: it generates a token and takes a
second.

The answer holds keys (``api_key``, the raw command line). It is reduced to `ServerInfo` at once and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.exhaustion import exhausted
from sidecar.model import Answer, Clock, Target
from sidecar.offload import OneByOne, in_daemon_thread
from sidecar.regular import IrregularError, open_regular
from sidecar.sockets import is_local, listeners
from sidecar.target import PREFLIGHT

if TYPE_CHECKING:
    import ssl

    from sidecar.httpget import Reply, Transport

BODY_LIMIT: Final = 8 * 1024 * 1024
"""Longest accepted body in bytes. A real answer is 35 kB; hundreds of data-parallel ranks make a few MB."""
INFO_SECONDS: Final = 5.0
"""Deadline of one request for the server's information. Real answers take 23 to 130 ms."""
REFRESH_SECONDS: Final = 3600.0
"""Arguments are constant for the life of a process; asked again in case the process changed unseen."""
BACKOFF_BASE: Final = 30.0
BACKOFF_CAP: Final = 600.0
"""Seconds between failed requests: behind a wedged scheduler each one leaves a waiter in the server."""

_OBSERVE_SHARE: Final = 0.5
_WAIT_SHARE: Final = 0.4
"""Shares of the server probe's deadline for the two questions; the rest is for finding the server."""
_CONFIRMED_SECONDS: Final = 95.0
"""How long an answer outlives the last sign of a server whose process cannot be seen: 3 rounds and a deadline."""
_TOKEN: Final = re.compile(r"[\w.+:/-]{1,64}", re.ASCII)
"""What a backend name or a version looks like. Anything else from the network is not shown."""
_KEY_LIMIT: Final = 8192
"""Bytes of the largest accepted file with a key."""
_FILE_SHARE: Final = 0.2
_FILE_SECONDS: Final = 1.0
"""How long the file with the key may take, as a share of the server probe's deadline and at most: what is asked of the
server with it has its own part of that deadline."""
_OWN_ADDRESSES: Final = frozenset({"command-line", "listening-socket"})
"""The `Target.url_source` of an address that is a process's own, and no guess."""
_PREFLIGHT: Final = {"Origin": "http://localhost", "Access-Control-Request-Method": "GET"}
_UNAUTHORIZED: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_NEVER: Final = object()
"""No state of the file with the key."""
_READY_SINCE: Final = (0, 5, 20)
"""First release with ``/ready``. Before it the path is refused like any other where the server wants a key."""
KEY_PROBLEMS: Final = frozenset({"no-key", "key-unreadable", "key-refused", "key-withheld"})
"""The tokens of `Problem` that mean that the server wants a key."""


# -- what is kept -----------------------------------------------------------------------------------


class ServerInfo(Struct, frozen=True, kw_only=True):
    """The server's arguments as it resolved them. None: it did not say.

    ``fa_impl_ver`` is a plugin's own key: SGLang has no such argument. ``is_vision`` is whether the model
    understands images.
    """

    version: str | None = None
    device: str | None = None
    tp_size: int | None = None
    dp_size: int | None = None
    pp_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    base_gpu_id: int | None = None
    gpu_id_step: int | None = None
    enable_dp_attention: bool | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    mm_attention_backend: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_attention_backend: str | None = None
    mamba_backend: str | None = None
    mamba_ssm_dtype: str | None = None
    enable_mamba_cache_stochastic_rounding: bool | None = None
    mamba_cache_philox_rounds: int | None = None
    sampling_backend: str | None = None
    moe_runner_backend: str | None = None
    linear_attn_backend: str | None = None
    linear_attn_decode_backend: str | None = None
    linear_attn_prefill_backend: str | None = None
    speculative_attention_mode: str | None = None
    enable_deterministic_inference: bool | None = None
    disable_cuda_graph: bool | None = None
    skip_server_warmup: bool | None = None
    fa_impl_ver: int | str | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    is_vision: bool | None = None


class Problem(Struct, frozen=True):
    """Why something could not be learned: a stable token and one sentence without secrets."""

    token: str
    sentence: str


PROBLEMS: Final = {
    "timeout": "it took the connection and did not answer in time",
    "protocol": "it took the connection and did not answer in HTTP",
    "tls": "the TLS handshake failed",
    "refused": "nothing listens at the address",
    "unreachable": "the address cannot be reached",
    "name-resolution": "the host name cannot be resolved",
    "invalid-url": "the address is not a usable URL",
    "ca-file": "the file with the certificate authority cannot be used",
    "no-key": "the server wants a key and none is configured",
    "key-unreadable": "the server wants a key and the configured file gives none",
    "key-refused": "the server refuses the configured key",
    "key-withheld": "the server wants a key, and nothing proves that it is the one which the configured key is for",
    "http-error": "the server answered with an error status",
    "not-json": "the answer is not JSON",
    "too-large": "the answer is larger than any server's information",
    "not-sglang": "something answers, but it is no SGLang server",
}
"""Every token of `Problem`, with its meaning."""


class ServerObservation(Struct, frozen=True, kw_only=True):
    """What the address did in one round.

    ``answer`` is None when it was not tried, or could not be (then ``problem`` says why). ``status`` is the HTTP
    status of the deciding request, ``ready`` what SGLang's own readiness says (None before 0.5.20, which has none).
    """

    answer: Answer | None
    status: int | None = None
    ready: bool | None = None
    problem: Problem | None = None

    @property
    def up(self) -> bool | None:
        """Whether anything answered in HTTP, whatever the status; None when it was not tried."""
        return None if self.answer is None else self.status is not None


def public_url(url: str) -> str:
    """A URL as it may be shown and logged: without user, password, query and fragment."""
    try:
        return urlunsplit(_without_credentials(urlsplit(url)))
    except ValueError:
        return "(invalid URL)"


def _without_credentials(parts: SplitResult) -> SplitResult:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")


# -- reading the payload ----------------------------------------------------------------------------


class _Payload(msgspec.Struct):
    """The keys that are looked at, untyped: one odd value must cost that value only."""

    version: Any = None
    device: Any = None
    tp_size: Any = None
    dp_size: Any = None
    pp_size: Any = None
    nnodes: Any = None
    node_rank: Any = None
    base_gpu_id: Any = None
    gpu_id_step: Any = None
    enable_dp_attention: Any = None
    attention_backend: Any = None
    prefill_attention_backend: Any = None
    decode_attention_backend: Any = None
    mm_attention_backend: Any = None
    speculative_algorithm: Any = None
    speculative_draft_attention_backend: Any = None
    mamba_backend: Any = None
    mamba_ssm_dtype: Any = None
    enable_mamba_cache_stochastic_rounding: Any = None
    mamba_cache_philox_rounds: Any = None
    sampling_backend: Any = None
    moe_runner_backend: Any = None
    linear_attn_backend: Any = None
    linear_attn_decode_backend: Any = None
    linear_attn_prefill_backend: Any = None
    speculative_attention_mode: Any = None
    enable_deterministic_inference: Any = None
    disable_cuda_graph: Any = None
    skip_server_warmup: Any = None
    fa_impl_ver: Any = None
    page_size: Any = None
    kv_cache_dtype: Any = None
    quantization: Any = None


class _Whole(_Payload):
    internal_states: msgspec.Raw = msgspec.Raw(b"null")


class _ModelPayload(msgspec.Struct):
    has_image_understanding: Any = None


_TEXTS: Final = (
    "device",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "mm_attention_backend",
    "speculative_algorithm",
    "speculative_draft_attention_backend",
    "mamba_backend",
    "mamba_ssm_dtype",
    "sampling_backend",
    "moe_runner_backend",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "speculative_attention_mode",
    "kv_cache_dtype",
    "quantization",
)
_NUMBERS: Final = (
    "tp_size",
    "dp_size",
    "pp_size",
    "nnodes",
    "node_rank",
    "base_gpu_id",
    "gpu_id_step",
    "page_size",
    "mamba_cache_philox_rounds",
)
_SWITCHES: Final = (
    "enable_mamba_cache_stochastic_rounding",
    "enable_dp_attention",
    "enable_deterministic_inference",
    "disable_cuda_graph",
    "skip_server_warmup",
)


def parse_info(body: bytes, asked: str = "/server_info") -> ServerInfo | Problem:
    """Reduce a ``/server_info`` body to what is kept; ``asked`` is the address that gave it, for the sentences.

    The scheduler's own view (``internal_states``) comes before the top level, which in releases before 0.5.4 shows
    the flags as typed. Never raises, whatever the body.
    """
    try:
        whole = msgspec.json.decode(body, type=_Whole)
    except msgspec.ValidationError:
        return Problem("not-sglang", f"What {asked} answers is JSON, but not the information of an SGLang server.")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Problem("not-json", f"What {asked} answers is not JSON, as an SGLang server's information is.")
    states: Sequence[_Payload] = ()
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        states = msgspec.json.decode(whole.internal_states, type=list[_Payload])
    sources: tuple[_Payload, ...] = (*states[:1], whole)
    kept: dict[str, Any] = {name: _first(sources, name, _is_token) for name in _TEXTS}
    kept |= {name: _first(sources, name, _is_number) for name in _NUMBERS}
    kept |= {name: _first(sources, name, _is_switch) for name in _SWITCHES}
    kept["fa_impl_ver"] = _first(sources, "fa_impl_ver", lambda value: _is_number(value) or _is_token(value))
    info = ServerInfo(version=_first((whole,), "version", _is_token), **kept)
    if info.version is None and info.tp_size is None and info.attention_backend is None:
        return Problem("not-sglang", f"What {asked} answers is JSON, but not the information of an SGLang server.")
    return info


def _first(sources: Sequence[_Payload], name: str, accepts: Callable[[object], bool]) -> Any:
    """The first source's value that is what it should be. A null in one source lets the next one speak."""
    for source in sources:
        value = getattr(source, name)
        if accepts(value):
            return value
    return None


def _is_token(value: object) -> bool:
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1_000_000


# -- the client -------------------------------------------------------------------------------------


class _Failure(Exception):  # noqa: N818 - carries a problem to the caller inside this module, no error of ours
    def __init__(self, answer: Answer | None, problem: Problem) -> None:
        super().__init__(problem.token)
        self.answer = answer
        self.problem = problem


class _KeyFileError(Exception):
    """The file with the key gives none: the rest of a sentence that starts with its path, without its content."""


def _key_in(path: str) -> str:
    """The key that a file holds. Blocks where its disk hangs. Raises `_KeyFileError`, OSError like `_read_key`."""
    try:
        with open_regular(path) as file:
            content = file.read(_KEY_LIMIT + 1)
    except OSError as error:
        if exhausted(error):
            raise
        raise _KeyFileError(f"cannot be read: {(error.strerror or type(error).__name__).lower()}") from None
    except IrregularError as error:
        raise _KeyFileError(str(error)) from None
    if len(content) > _KEY_LIMIT:
        raise _KeyFileError(f"is too large: it has more than {_KEY_LIMIT} bytes")
    key = content.strip()
    if not key:
        raise _KeyFileError("is empty")
    if not key.isascii():
        raise _KeyFileError("does not hold a key: it is not ASCII")
    if len(key.splitlines()) > 1:
        raise _KeyFileError("does not hold a key: it has more than one line")
    text = key.decode("ascii")
    if not text.isprintable():
        raise _KeyFileError("does not hold a key: some of it cannot be printed")
    return text


class ServerClient:
    """Asks the server over HTTP. One per agent; `close` it at the end.

    Never follows a redirect, uses no proxy, no cookies and no compression, and opens a new connection for each
    request: an old one would answer for a listener that is gone. ``proc`` and ``uid``, the agent's own user id, are
    its edges: they decide who is trusted with the key.
    """

    def __init__(self, settings: Settings, clock: Clock, *, proc: Path = Path("/proc"), uid: int | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._proc = proc
        self._trusted = frozenset({0, os.geteuid() if uid is None else uid})
        self._transport: Transport | None = None
        self._tls: ssl.SSLContext | None = None
        self._key: object = None
        self._lacks_ready = False
        self._wants_key = False
        self._refused_stamp: object = _NEVER
        self._model_path = "/model_info"
        self._info: ServerInfo | None = None
        self._info_at = 0.0
        self._confirmed_at = 0.0
        self._problem: Problem | None = None
        self._observation: ServerObservation | None = None
        self._failures = 0
        self._not_before = 0.0
        self._key_stamp: object = None
        self._key_file = OneByOne(min(_FILE_SECONDS, self._deadline * _FILE_SHARE))
        self._ca_file = OneByOne(self._deadline * _OBSERVE_SHARE)
        self._fetch: asyncio.Task[None] | None = None

    @property
    def problem(self) -> Problem | None:
        """Why there is no server information, as of the last request for it; None when there is, or none was made."""
        return self._problem

    @property
    def observation(self) -> ServerObservation | None:
        """What the address did when it was last tried; None before that."""
        return self._observation

    async def observe(self, target: Target) -> ServerObservation:
        """Try the server's address once: ``/ready``, or ``/model_info`` where that does not exist. Never raises.

        Takes at most half of the server probe's deadline. A launch that is judged before it happens has no server.
        """
        if target.launch_source == PREFLIGHT:
            return ServerObservation(answer=None)
        self._follow(target)
        self._observation = observation = await self._observe(target)
        if observation.answer is Answer.ACCEPTED:
            self._confirmed_at = self._clock.monotonic()
        elif observation.answer is Answer.REFUSED:
            # Whatever listens here later is another process.
            self._forget()
        return observation

    async def info(self, target: Target) -> ServerInfo | None:
        """The server's information, from memory where the same process gave it already. Never raises.

        Waits for a request in progress for less than half of the server probe's deadline; one that takes longer
        goes on, and its answer is there the next time. None when there is no answer (yet); `problem` says why.
        """
        if target.launch_source == PREFLIGHT:
            return None
        # Before the rest, which must not be interrupted: who else asks meanwhile must find it asked.
        stamp = await self._stamp() if self._problem is not None else None
        self._follow(target)
        if target.launch.get("grpc") or target.launch.get("node_rank"):
            return None  # these serve no information over HTTP
        if self._is_due(target, stamp):
            self._fetch = asyncio.get_running_loop().create_task(self._refresh(target, self._key))
        if self._fetch is not None and not self._fetch.done():
            await asyncio.wait([self._fetch], timeout=self._deadline * _WAIT_SHARE)
        return self._info if self._is_confirmed(target) else None

    async def close(self) -> None:
        """Drop a request in progress and every connection."""
        self._key_file.close()
        self._ca_file.close()
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    # -- one server process after another

    @property
    def _deadline(self) -> float:
        return self._settings.deadlines.get("server", 5.0)

    def _follow(self, target: Target) -> None:
        key = (target.url, target.pid, target.create_time)
        if key != self._key:
            self._forget()
            self._key = key

    def _forget(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch = None
        self._key = None
        self._lacks_ready = self._wants_key = False
        self._refused_stamp = _NEVER
        self._model_path = "/model_info"
        self._info = self._problem = None
        self._failures = 0
        self._not_before = 0.0

    def _is_due(self, target: Target, stamp: object) -> bool:
        if self._fetch is not None and not self._fetch.done():
            return False
        now = self._clock.monotonic()
        if self._info is not None and self._is_confirmed(target) and now - self._info_at < REFRESH_SECONDS:
            return False
        # A key that has just been mounted is worth a try at once.
        return now >= self._not_before or stamp != self._key_stamp

    def _is_confirmed(self, target: Target) -> bool:
        """Whether what was learned still holds: its process is there, or an address answered a while ago."""
        return target.pid is not None or self._clock.monotonic() - self._confirmed_at < _CONFIRMED_SECONDS

    async def _stamp(self) -> object:
        """What tells one state of the file with the key from another."""
        path = self._settings.server_key_file
        if path is None:
            return None
        try:
            status = await self._key_file.run(Path(path).stat)
        except OSError:  # of which TimeoutError is one
            return "unreadable"
        return status.st_mtime_ns, status.st_size, status.st_ino

    # -- requests

    async def _observe(self, target: Target) -> ServerObservation:
        until = asyncio.get_running_loop().time() + self._deadline * _OBSERVE_SHARE
        status: int | None = None
        path = "quiet" if self._lacks_ready else "/ready"
        try:
            if path == "/ready":
                status = (await self._get(target, path, until=until, limit=0)).status
                if status in _UNAUTHORIZED:
                    # Where the path exists it is open to all: next time another one is asked, with the key.
                    self._lacks_ready = self._wants_key = True
                elif status == HTTPStatus.NOT_FOUND:
                    self._lacks_ready = True
                    path = "quiet"
            if path != "/ready":
                status = await self._ask_quietly(target, until)
        except _Failure as failure:
            return ServerObservation(answer=failure.answer, status=status, problem=failure.problem)
        ready = None
        if path == "/ready" and status in {HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE}:
            ready = status == HTTPStatus.OK
        return ServerObservation(answer=Answer.ACCEPTED, status=status, ready=ready)

    async def _ask_quietly(self, target: Target, until: float) -> int:
        """Ask for what costs the server least and leaves no refusal in its log, and give the status. Raises _Failure.

        Without a key that it takes, this is the request that browsers make before another one: SGLang's check of keys
        lets it pass in every release, and it is answered in HTTP all the same.
        """
        if self._wants_key and (self._refused_stamp == await self._stamp() or await self._key_for(target) is None):
            return (await self._get(target, self._model_path, until=until, limit=0, preflight=True)).status
        stamp = await self._stamp()
        status = (await self._get(target, self._model_path, until=until, limit=0)).status
        if status in _UNAUTHORIZED:
            self._wants_key, self._refused_stamp = True, stamp
        elif status == HTTPStatus.NOT_FOUND:
            self._model_path = "/get_model_info"  # as releases before 0.5.6 call it
        return status

    async def _refresh(self, target: Target, key: object) -> None:
        """Ask for the information and remember the answer, or the problem and when to try again."""
        self._key_stamp = await self._stamp()
        answer: Answer | None = Answer.ACCEPTED
        outcome: ServerInfo | Problem
        try:
            # The first refusal said it already; later requests ask again, in case only that path is guarded.
            spared = self._wants_key and not self._failures and await self._key_for(target) is None
            outcome = await (self._unauthorized(target, public_url(target.url)) if spared else self._ask(target))
        except _Failure as failure:
            answer, outcome = failure.answer, failure.problem
        if key != self._key:
            return  # another server by now
        now = self._clock.monotonic()
        if isinstance(outcome, ServerInfo):
            self._info, self._info_at, self._confirmed_at = outcome, now, now
            self._problem, self._failures, self._not_before = None, 0, 0.0
            self._lacks_ready = self._lacks_ready or _is_before(outcome.version, _READY_SINCE)
            return
        self._problem = outcome
        if answer is Answer.REFUSED:
            return  # costs the server nothing, and its start should be seen soon
        self._failures += 1
        if outcome.token in KEY_PROBLEMS:
            # Nothing but another key changes it, and that one is tried at once.
            self._not_before = now + BACKOFF_CAP
            return
        self._not_before = now + min(BACKOFF_CAP, BACKOFF_BASE * 2 ** min(self._failures - 1, 16))

    async def _ask(self, target: Target) -> ServerInfo | Problem:
        until = asyncio.get_running_loop().time() + INFO_SECONDS
        # In this order: the older path writes a warning into the server's log on every call.
        path = "/server_info"
        reply = await self._get(target, path, until=until, limit=BODY_LIMIT)
        if reply.status == HTTPStatus.NOT_FOUND:
            path = "/get_server_info"
            reply = await self._get(target, path, until=until, limit=BODY_LIMIT)
        shown = public_url(target.url)
        if reply.status in _UNAUTHORIZED:
            return await self._unauthorized(target, shown)
        if reply.status == HTTPStatus.NOT_FOUND:
            return Problem("not-sglang", f"{shown} answers, but has neither /server_info nor /get_server_info.")
        if reply.status != HTTPStatus.OK:
            redirected = HTTPStatus.MULTIPLE_CHOICES <= reply.status < HTTPStatus.BAD_REQUEST
            token = "not-sglang" if redirected else "http-error"
            return Problem(token, f"{shown}{path} answered with HTTP status {reply.status}.")
        info = parse_info(reply.body, f"{shown}{path}")
        if isinstance(info, Problem):
            return info
        return replace(info, is_vision=await self._is_vision(target, until))

    async def _is_vision(self, target: Target, until: float) -> bool | None:
        try:
            reply = await self._get(target, "/model_info", until=until, limit=BODY_LIMIT)
            payload = msgspec.json.decode(reply.body, type=_ModelPayload)
        except (_Failure, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        value = payload.has_image_understanding if reply.status == HTTPStatus.OK else None
        return value if isinstance(value, bool) else None

    async def _get(self, target: Target, path: str, *, until: float, limit: int, preflight: bool = False) -> Reply:
        """One request, ended at ``until`` (the loop's time). With ``limit`` 0 the body is not read. Raises _Failure.

        ``preflight``: only ask whether another origin might ask, without a key.
        """
        # Only here: a launch that is judged beforehand asks nobody, and need not wait for the library to load.
        from sidecar.httpget import RequestFailed, Transport

        if self._transport is None:
            self._transport = Transport()
        try:
            async with asyncio.timeout_at(until):
                key = None if path == "/ready" or preflight else await self._key_for(target)
        except TimeoutError:
            raise _Failure(Answer.TIMEOUT, _problem("timeout", target.url)) from None
        try:
            return await self._transport.ask(
                "OPTIONS" if preflight else "GET",
                _address(target.url, path, with_user=key is None),
                headers=_PREFLIGHT if preflight else {"Authorization": f"Bearer {key}"} if key else {},
                tls=await self._trust(target.url),
                until=until,
                limit=limit,
            )
        except RequestFailed as failed:
            problem = _problem(failed.token, target.url)
            if failed.token == "too-large":  # noqa: S105 - a problem's token, no secret
                sentence = f"{public_url(target.url)} answered with more than {limit // 1024**2} MiB."
                problem = Problem(failed.token, sentence)
            raise _Failure(failed.answer, problem) from None

    async def _trust(self, url: str) -> ssl.SSLContext | bool:
        """How a server's certificate is verified: by the configured authority, else by the system's."""
        if not url.startswith("https:"):
            return True  # there is none
        if self._tls is None:
            import ssl  # with the library that it loads, only where it is needed

            file = self._settings.server_ca_file

            def trusting() -> ssl.SSLContext:
                if self._tls is not None:
                    return self._tls
                if file is not None:
                    # OpenSSL would wait for whoever is to write into a pipe.
                    open_regular(file).close()
                context = ssl.create_default_context(cafile=file)
                context.set_alpn_protocols(["http/1.1"])
                # Here, so that one that comes late serves the next request.
                self._tls = context
                return context

            try:
                # Reading all of a system's authorities takes tens of milliseconds, which no probe should wait for.
                return await self._ca_file.run(trusting)
            except TimeoutError:
                where = "The system's certificate authorities do" if file is None else f"server_ca_file {file} does"
                raise _Failure(None, Problem("ca-file", f"{where} not answer.")) from None
            except (OSError, ValueError, IrregularError) as error:
                if exhausted(error):
                    raise
                sentence = f"server_ca_file {file} holds no usable certificate authority."
                raise _Failure(None, Problem("ca-file", sentence)) from None
        return self._tls

    async def _key_for(self, target: Target) -> str | None:
        """The key, where it may be sent to this server. The file is not even read where it may not."""
        path = self._settings.server_key_file
        if path is None or not await self._may_have_key(target):
            return None
        try:
            return await self._read_key(path)
        except _KeyFileError:
            return None

    async def _may_have_key(self, target: Target) -> bool:
        """Whether it is proven that a server is the one that the configured key is for.

        Any user may run a process that looks like a server, or listen at its address before it does. So either the
        operator set the address, or whoever listens there, on this machine, belongs to root or to the agent's own
        user, and so does the server's process where one is seen; the user of the process that is set by server_pid
        is as good. A pattern is no proof: everybody chooses his own command line.
        """
        if target.url_source == "setting":
            return True
        trusted = self._trusted
        if target.pid is not None:
            if target.pid == self._settings.server_pid and target.uid is not None:
                trusted |= {target.uid}
            if target.uid not in trusted or target.url_source not in _OWN_ADDRESSES:
                return False
        address = urlsplit(target.url)
        if not is_local(address.hostname or ""):
            return False
        owners = await in_daemon_thread(
            lambda: {listener.uid for listener in listeners(self._proc) if listener.port == address.port}
        )
        return bool(owners) and owners <= trusted

    async def _read_key(self, path: str) -> str:
        """The bearer key, read anew each time: a mounted secret is replaced in place.

        Raises `_KeyFileError`, and OSError where the agent itself lacks what it needs to look.
        """
        try:
            return await self._key_file.run(lambda: _key_in(path))
        except TimeoutError:
            raise _KeyFileError("does not answer") from None

    async def _unauthorized(self, target: Target, shown: str) -> Problem:
        path = self._settings.server_key_file
        if path is None:
            return Problem("no-key", f"{shown} wants a key and none is configured.")
        if not await self._may_have_key(target):
            return Problem(
                "key-withheld",
                f"{shown} wants a key, and the one in {path} is kept back: that address was found, not configured, and"
                " nothing proves who answers there.",
            )
        try:
            await self._read_key(path)
        except _KeyFileError as error:
            return Problem("key-unreadable", f"{shown} wants a key, and the file for it gives none: {path} {error}.")
        return Problem("key-refused", f"{shown} refuses the key in {path}.")


def _is_before(version: str | None, release: tuple[int, int, int]) -> bool:
    """Whether a version of SGLang is known to be older than a release."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?!\d)", version or "")
    # A source tree that does not know its release says 0.0.0.
    return match is not None and (0, 0, 0) < (int(match[1]), int(match[2]), int(match[3])) < release


def _address(url: str, path: str, *, with_user: bool) -> str:
    parts = urlsplit(url)
    # aiohttp turns user and password into a header of the same name as the key's: both together are an error.
    netloc = parts.netloc if with_user else parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, netloc, parts.path.rstrip("/") + path, "", ""))


def _problem(token: str, url: str) -> Problem:
    return Problem(token, f"{public_url(url)}: {PROBLEMS[token]}.")
