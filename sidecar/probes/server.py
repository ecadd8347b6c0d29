"""Whether there is a server, how it is reached, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from sidecar.model import (
    Answer,
    ConditionType,
    Family,
    Feature,
    Finding,
    Gate,
    Probe,
    Processes,
    Result,
    Sample,
    ServerView,
    Severity,
    Status,
    Target,
    World,
)
from sidecar.offload import in_daemon_thread
from sidecar.serverinfo import KEY_PROBLEMS, PROBLEMS, Problem, ServerInfo, ServerObservation, public_url
from sidecar.services import Services
from sidecar.target import PREFLIGHT, READ_SOURCES

# -- facts ------------------------------------------------------------------------------------------


def summarize(target: Target) -> Target:
    """A target without what must not be shown: the environment, and credentials in the URL."""
    return replace(target, url=public_url(target.url), environ=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One round's picture of the server.

    ``target`` is summarized. ``every_process`` is whether each server's process would have been found: none can be
    hidden, and no setting narrows the search. ``nvidia_present`` is whether an NVIDIA kernel module is loaded here: a
    server that resolved to another device on such a machine may have lost its GPU.
    """

    target: Target
    observation: ServerObservation
    info: ServerInfo | None
    info_problem: Problem | None
    processes: Processes
    every_process: bool
    nvidia_present: bool


class ServerState(StrEnum):
    """The server in one word."""

    PREFLIGHT = "preflight"
    """A launch is judged that has not happened yet."""
    UP = "up"
    STARTING = "starting"
    """Its process is there and its port is not open yet (a dead one looks the same until it exits)."""
    ADDRESS_UNKNOWN = "address-unknown"
    """Its process is there, and nothing listens at the address that was guessed: it may well serve elsewhere."""
    NOT_FOUND = "not-found"
    UNAUTHORIZED = "unauthorized"
    UNREACHABLE = "unreachable"


async def collect(services: Services) -> ServerFacts:
    """Find the server, try its address and ask for its information. Never raises for what the server does."""
    target = await services.targets.find()
    observation = await services.server.observe(target)
    # After the observation, which tells whether what is remembered belongs to a server that is gone.
    info = await services.server.info(target)
    narrowed = services.settings.server_pid is not None or services.settings.server_pattern is not None
    version_file = services.targets.proc / "driver" / "nvidia" / "version"
    return ServerFacts(
        target=summarize(target),
        observation=observation,
        info=info,
        info_problem=services.server.problem,
        processes=services.standing.processes,
        every_process=services.standing.processes is Processes.SHARED and not narrowed,
        nvidia_present=await in_daemon_thread(version_file.exists),
    )


def state(facts: ServerFacts) -> ServerState:
    """Put the facts in one word."""
    if facts.target.launch_source == PREFLIGHT:
        return ServerState.PREFLIGHT
    if facts.observation.answer is Answer.REFUSED:
        if facts.target.pid is None:
            return ServerState.NOT_FOUND
        return ServerState.STARTING if facts.target.url_source in READ_SOURCES else ServerState.ADDRESS_UNKNOWN
    problem = _problem(facts)
    if problem is None:
        return ServerState.UP
    return ServerState.UNAUTHORIZED if problem.token in KEY_PROBLEMS else ServerState.UNREACHABLE


def _problem(facts: ServerFacts) -> Problem | None:
    """Why the server cannot be asked, if so. What is known already outweighs a later failure to ask again."""
    if facts.observation.problem is not None:
        return None if facts.target.launch.get("grpc") else facts.observation.problem
    problem = facts.info_problem
    if problem is None:
        return None
    if facts.info is not None:
        return problem if problem.token in KEY_PROBLEMS else None
    # Refused in between two requests: the next round sees which it is.
    return None if problem.token == "refused" else problem  # noqa: S105 - a problem's token, no secret


# -- what the judge needs of the server -------------------------------------------------------------


def view(facts: ServerFacts) -> ServerView:
    """Reduce the facts to what other probes' conditions depend on."""
    target = facts.target
    process = None if target.pid is None else f"{target.pid}:{target.create_time}"
    # A launch that is only considered has no server that passed it: what hinders a launch gates.
    preflight = target.launch_source == PREFLIGHT
    return ServerView(
        answer=Answer.REFUSED if preflight else facts.observation.answer,
        refusal_is_proof=preflight or _refusal_is_proof(facts),
        process=process,
        features=_features(facts),
    )


def _refusal_is_proof(facts: ServerFacts) -> bool:
    """Whether nobody listening means that no server runs, rather than that the address was a wrong guess."""
    target = facts.target
    if target.url_source in READ_SOURCES:
        return True
    # The process of a server is there, or may be: then it serves where nobody looked.
    return target.pid is None and not target.candidates and facts.every_process


def _features(facts: ServerFacts) -> Mapping[Feature, bool]:
    launch = None if facts.target.launch_source is None else facts.target.launch
    features = {
        Feature.GPU: _uses_gpu(facts),
        Feature.FLASHINFER_MAMBA: _uses_flashinfer_mamba(facts.info, launch),
    }
    return {feature: used for feature, used in features.items() if used is not None}


def _uses_gpu(facts: ServerFacts) -> bool | None:
    asked = facts.target.launch.get("device")
    if isinstance(asked, str):
        return asked.startswith("cuda")
    resolved = facts.info.device if facts.info is not None else None
    if resolved is None:
        return None
    if resolved.startswith("cuda"):
        return True
    # It resolved to another device without being seen to be asked: with NVIDIA hardware that may be the failure.
    return None if facts.nvidia_present else False


def _uses_flashinfer_mamba(info: ServerInfo | None, launch: Mapping[str, Any] | None) -> bool | None:
    if info is not None:
        return info.mamba_backend == "flashinfer"
    if launch is None or ("mamba_backend" not in launch and "incomplete" in launch):
        return None
    # Never resolved automatically: without the flag it is triton.
    return bool(launch.get("mamba_backend") == "flashinfer")


# -- judgement --------------------------------------------------------------------------------------

SERVER_NOT_FOUND: Final = ConditionType(
    code="server-not-found",
    severity=Severity.INFO,
    gate=Gate.NEVER,
    title="No SGLang server was found",
    when="No server process can be seen and nothing listens at the server's address.",
    remedy="Start the server, or say where it is with server_url (or server_pid).",
    reasons={
        "no-process": "processes can be seen, none of them is an SGLang server, and nothing listens",
        "connection-refused": "processes are hidden, and nothing listens at the address",
        "several-servers": "several servers can be seen and none is chosen",
    },
)
_UNREACHABLE_REASONS: Final = {
    token: meaning for token, meaning in PROBLEMS.items() if token not in {*KEY_PROBLEMS, "refused"}
}
_UNKNOWN_REASONS: Final = {
    "info-pending": "Unknown: the server answers, its information is still being fetched.",
    "address-unknown": "Unknown: the server's process is there, and the only address to try is a guess where nothing"
    " listens.",
}
_REMEDIES: Final = {
    "timeout": "See whether the server hangs; for one that is only busy, give the server probe a longer deadline.",
    "tls": "Name the certificate authority of the server with server_ca_file, or correct the scheme of server_url.",
    "ca-file": "Correct server_ca_file: it must be a PEM file that this agent may read.",
    "protocol": "Correct server_url: what listens there speaks another protocol (https instead of http, or gRPC).",
    "not-json": "Correct server_url: it must be the address of SGLang itself, not of a proxy or a router's page.",
    "not-sglang": "Correct server_url: it must be the address of SGLang itself, not of a proxy or a router's page.",
    "too-large": "Correct server_url: it must be the address of SGLang itself, not of a proxy or a router's page.",
    "http-error": "Read the server's own log: it fails to describe itself.",
    "key-withheld": "Name the server that the key is for with server_url.",
}
SERVER_UNREACHABLE: Final = ConditionType(
    code="server-unreachable",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="The server cannot be asked what it runs",
    when="The server's address does not answer in time, or what answers gives no SGLang server's information.",
    remedy="Check server_url and that the agent shares the server's network.",
    reasons=_UNREACHABLE_REASONS | _UNKNOWN_REASONS,
)
SERVER_UNAUTHORIZED: Final = ConditionType(
    code="server-unauthorized",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="The server wants a key that the agent does not have",
    when="The server answers 401 or 403 to the request for its information.",
    remedy="Mount the server's --api-key as a file and name that file with server_key_file.",
    reasons={token: PROBLEMS[token] for token in sorted(KEY_PROBLEMS)} | _UNKNOWN_REASONS,
)
CONDITIONS: Final = (SERVER_NOT_FOUND, SERVER_UNREACHABLE, SERVER_UNAUTHORIZED)


def judge(result: Result[ServerFacts], _world: World) -> Iterable[Finding]:
    """Say of each condition whether it holds. A server that is starting, or a launch not done yet, is no fault."""
    facts = result.facts
    if facts is None:
        return ()
    now = state(facts)
    findings = {kind.code: Finding(code=kind.code, status=Status.FALSE) for kind in CONDITIONS}
    problem = _problem(facts)
    if now is ServerState.NOT_FOUND:
        findings[SERVER_NOT_FOUND.code] = _not_found(facts)
    elif now is ServerState.UNAUTHORIZED and problem is not None:
        findings[SERVER_UNAUTHORIZED.code] = Finding(
            code=SERVER_UNAUTHORIZED.code,
            status=Status.TRUE,
            reason=problem.token,
            message=problem.sentence,
            remedy=_REMEDIES.get(problem.token),
        )
    elif now is ServerState.UNREACHABLE and problem is not None:
        findings[SERVER_UNREACHABLE.code] = Finding(
            code=SERVER_UNREACHABLE.code,
            status=Status.TRUE,
            reason=problem.token,
            message=problem.sentence,
            remedy=_REMEDIES.get(problem.token),
        )
    elif now is ServerState.UP and facts.info is None and _serves_info(facts):
        for kind in (SERVER_UNREACHABLE, SERVER_UNAUTHORIZED):
            findings[kind.code] = Finding(
                code=kind.code,
                status=Status.UNKNOWN,
                reason="info-pending",
                message="The server answers; its information is still being fetched.",
            )
    elif now is ServerState.ADDRESS_UNKNOWN:
        for kind in (SERVER_UNREACHABLE, SERVER_UNAUTHORIZED):
            findings[kind.code] = _address_unknown(kind, facts.target)
    return list(findings.values())


def _address_unknown(kind: ConditionType, target: Target) -> Finding:
    return Finding(
        code=kind.code,
        status=Status.UNKNOWN,
        reason="address-unknown",
        message=f"Process {target.pid} is a server, and nothing listens at {target.url}: that address is a guess.",
        remedy="Wait until the server listens; if this stays, say where it does with server_url.",
    )


def _serves_info(facts: ServerFacts) -> bool:
    """Whether this kind of server has information to give: secondary nodes and gRPC servers have none over HTTP."""
    return not (facts.target.launch.get("grpc") or facts.target.launch.get("node_rank"))


def _not_found(facts: ServerFacts) -> Finding:
    target = facts.target
    nobody = f"Nothing listens at {target.url}."
    if target.candidates:
        return Finding(
            code=SERVER_NOT_FOUND.code,
            status=Status.TRUE,
            reason="several-servers",
            message=f"{target.why} {nobody}",
            remedy="Choose one with server_pid, or with the port in server_url.",
            evidence=tuple(f"process {pid}" for pid in target.candidates),
        )
    if facts.processes is Processes.SHARED:
        return Finding(
            code=SERVER_NOT_FOUND.code, status=Status.TRUE, reason="no-process", message=f"{target.why} {nobody}"
        )
    return Finding(
        code=SERVER_NOT_FOUND.code,
        status=Status.TRUE,
        reason="connection-refused",
        message=f"{nobody} {target.why}",
        remedy="Start the server, or give its address with server_url; with shareProcessNamespace: true it is found.",
    )


# -- what is shown ----------------------------------------------------------------------------------

UP: Final = Family(name="server_up", kind="gauge", help="1 while the server's address answers in HTTP, else 0.")
INFO: Final = Family(
    name="server_info",
    kind="info",
    help="The running server as it describes itself; an empty label is not known.",
    labels=("version", "mamba_backend", "tp_size", "device"),
)
STARTED: Final = Family(
    name="server_start_time_seconds",
    kind="gauge",
    help="Start of the server's main process in seconds since the epoch; absent while that process cannot be seen.",
)


def _up(facts: ServerFacts) -> bool | None:
    """Whether the server answers; None also where a process serves at an address that nobody knows."""
    return None if state(facts) is ServerState.ADDRESS_UNKNOWN else facts.observation.up


def samples(facts: ServerFacts) -> Iterable[Sample]:
    """Whether it answers, what it is, since when it runs; each only where known."""
    if (up := _up(facts)) is not None:
        yield Sample(UP.name, (), float(up))
    if (info := facts.info) is not None:
        known = (info.version, info.mamba_backend, info.tp_size, info.device)
        yield Sample(INFO.name, tuple("" if value is None else str(value) for value in known), 1)
    if facts.target.create_time is not None:
        yield Sample(STARTED.name, (), facts.target.create_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSection:
    """Why something is not known: a stable token and one sentence."""

    token: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSection:
    """The server in the report. null: not known.

    ``scope`` says whose environment software facts describe, ``why`` how the server was found. ``launch`` holds
    allow-listed flags as typed; ``launch_source`` is ``process`` or ``command-line`` (a launch judged beforehand).
    ``environ`` is ``readable`` or the reason why the server's environment variables cannot be seen.
    ``started_at`` is in seconds since the epoch.
    """

    state: str
    up: bool | None
    answer: str | None
    ready: bool | None
    url: str
    url_source: str
    pid: int | None
    started_at: float | None
    candidates: tuple[int, ...]
    scope: str
    python: str | None
    python_source: str
    root: str | None
    environ: str
    launch: Mapping[str, str | int | bool]
    launch_source: str | None
    why: str
    version: str | None
    device: str | None
    tp_size: int | None
    dp_size: int | None
    pp_size: int | None
    nnodes: int | None
    node_rank: int | None
    mamba_backend: str | None
    mamba_ssm_dtype: str | None
    speculative_algorithm: str | None
    kv_cache_dtype: str | None
    quantization: str | None
    page_size: int | None
    info_problem: ProblemSection | None


def report(facts: ServerFacts) -> Mapping[str, ServerSection]:
    """Give the report's ``server`` key."""
    target, info = facts.target, facts.info or ServerInfo()
    problem = _problem(facts)
    return {
        "server": ServerSection(
            state=state(facts).value,
            up=_up(facts),
            answer=None if facts.observation.answer is None else facts.observation.answer.value,
            ready=facts.observation.ready,
            url=target.url,
            url_source=target.url_source,
            pid=target.pid,
            started_at=target.create_time,
            candidates=target.candidates,
            scope=target.scope.value,
            python=target.python,
            python_source=target.python_source,
            root=target.root,
            environ=target.environ_missing or "readable",
            launch=dict(target.launch),
            launch_source=target.launch_source,
            why=target.why,
            version=info.version,
            device=info.device,
            tp_size=info.tp_size,
            dp_size=info.dp_size,
            pp_size=info.pp_size,
            nnodes=info.nnodes,
            node_rank=info.node_rank,
            mamba_backend=info.mamba_backend,
            mamba_ssm_dtype=info.mamba_ssm_dtype,
            speculative_algorithm=info.speculative_algorithm,
            kv_cache_dtype=info.kv_cache_dtype,
            quantization=info.quantization,
            page_size=info.page_size,
            info_problem=None if problem is None else ProblemSection(token=problem.token, sentence=problem.sentence),
        )
    }


def identity(facts: ServerFacts) -> Mapping[str, str]:
    """Give SGLang's version as the server itself says it; where its packages can be read, theirs comes first."""
    version = facts.info.version if facts.info is not None else None
    return {} if version is None else {"sglang": version}


PROBE: Probe[ServerFacts] = Probe(
    name="server",
    title="Whether there is a server, and what it says of itself",
    interval=30,
    deadline=5,
    collect=collect,
    judge=judge,
    samples=samples,
    families=(UP, INFO, STARTED),
    conditions=CONDITIONS,
    identity=identity,
    report=report,
    sections={"server": ServerSection},
    view=view,
)
