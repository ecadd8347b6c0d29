"""Whether there is a server, how it is reached, and what it says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from sidecar import backends
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
from sidecar.probes.server import running
from sidecar.probes.server.facts import ServerFacts, ServerState, collect, is_sglang, problem, state, summarize
from sidecar.processes import Role
from sidecar.procfs import Denial
from sidecar.serverinfo import KEY_PROBLEMS, PROBLEMS, ServerInfo
from sidecar.target import PREFLIGHT, READ_SOURCES

__all__ = ["PROBE", "ServerFacts", "ServerSection", "ServerState", "collect", "state", "summarize", "view"]

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
        far=target.far,
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
    used = backends.features(facts.info, launch, preflight=facts.target.launch_source == PREFLIGHT)
    gpu = _uses_gpu(facts)
    return used if gpu is None else {**used, Feature.GPU: gpu}


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
_REACHED: Final = (SERVER_NOT_FOUND, SERVER_UNREACHABLE, SERVER_UNAUTHORIZED)
CONDITIONS: Final = (*_REACHED, *running.CONDITIONS)


def judge(result: Result[ServerFacts], world: World) -> Iterable[Finding]:
    """Say of each condition whether it holds. A server that is starting, or a launch not done yet, is no fault."""
    facts = result.facts
    if facts is None:
        return ()
    now = state(facts)
    findings = {kind.code: Finding(code=kind.code, status=Status.FALSE) for kind in _REACHED}
    found = problem(facts)
    if now is ServerState.NOT_FOUND:
        findings[SERVER_NOT_FOUND.code] = _not_found(facts)
    elif now is ServerState.UNAUTHORIZED and found is not None:
        findings[SERVER_UNAUTHORIZED.code] = Finding(
            code=SERVER_UNAUTHORIZED.code,
            status=Status.TRUE,
            reason=found.token,
            message=found.sentence,
            remedy=_REMEDIES.get(found.token),
        )
    elif now is ServerState.UNREACHABLE and found is not None:
        findings[SERVER_UNREACHABLE.code] = Finding(
            code=SERVER_UNREACHABLE.code,
            status=Status.TRUE,
            reason=found.token,
            message=found.sentence,
            remedy=_REMEDIES.get(found.token),
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
    return [*findings.values(), *running.judge(facts, world.now)]


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
            message=f"{target.why} {nobody}".strip(),
            remedy="Choose one with server_pid, or with the port in server_url.",
            evidence=tuple(f"process {pid}" for pid in target.candidates),
        )
    if facts.processes is Processes.SHARED:
        return Finding(
            code=SERVER_NOT_FOUND.code,
            status=Status.TRUE,
            reason="no-process",
            message=f"{target.why} {nobody}".strip(),
        )
    return Finding(
        code=SERVER_NOT_FOUND.code,
        status=Status.TRUE,
        reason="connection-refused",
        message=f"{nobody} {target.why}".strip(),
        remedy="Start the server, or give its address with server_url; with shareProcessNamespace: true it is found.",
    )


# -- what is shown ----------------------------------------------------------------------------------

UP: Final = Family(
    name="server_up",
    kind="gauge",
    help="1 while the server's address answers in HTTP, else 0; also 0 where what answers there is known to be no "
    "SGLang server.",
)
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
RESIDENT: Final = Family(
    name="server_resident_memory_bytes",
    kind="gauge",
    help="Resident memory of the server's processes by role; memory that they share counts in each.",
    labels=("role",),
)
PROCESSES: Final = Family(
    name="server_processes",
    kind="gauge",
    help="Living processes of the server by role; absent while they cannot be seen.",
    labels=("role",),
)
_EXPECTED_ROLES: Final = (Role.MAIN, Role.SCHEDULER, Role.DETOKENIZER)
"""Roles that every server has: their number is shown when it is 0, too."""


def _up(facts: ServerFacts) -> bool | None:
    """Whether the server answers; None also where a process serves at an address that nobody knows."""
    if state(facts) is ServerState.ADDRESS_UNKNOWN:
        return None
    return False if is_sglang(facts) is False else facts.observation.up


def samples(facts: ServerFacts) -> Iterable[Sample]:
    """Whether it answers, what it is, since when it runs; each only where known."""
    if (up := _up(facts)) is not None:
        yield Sample(UP.name, (), float(up))
    if (info := facts.info) is not None:
        known = (info.version, info.mamba_backend, info.tp_size, info.device)
        yield Sample(INFO.name, tuple("" if value is None else str(value) for value in known), 1)
    if facts.target.create_time is not None:
        yield Sample(STARTED.name, (), facts.target.create_time)
    seen = facts.running
    if seen is None or seen.problem is not None or seen.cut:
        return
    for role in Role:
        living = seen.of(role)
        if living or seen.zombies(role) or role in _EXPECTED_ROLES:
            yield Sample(PROCESSES.name, (role.value,), len(living))
        sizes = [one.resident for one in living if one.resident is not None]
        if living and len(sizes) == len(living):
            yield Sample(RESIDENT.name, (role.value,), sum(sizes))


class ProblemSection(Struct, frozen=True, kw_only=True):
    """Why something is not known: a stable token and one sentence."""

    token: str
    sentence: str


class ProcessSection(Struct, frozen=True, kw_only=True):
    """One process of the server. ``resident`` is in bytes."""

    pid: int
    role: str
    resident: int | None
    zombie: bool


class DeniedSection(Struct, frozen=True, kw_only=True):
    """Something of the server's processes that may not be read: which, why as a token and a sentence, the way out."""

    what: str
    token: str
    sentence: str
    remedy: str


class ServerSection(Struct, frozen=True, kw_only=True):
    """The server in the report. null: not known.

    ``answer`` is what the address does with a connection, whoever listens there; ``is_sglang`` whether that is an
    SGLang server; ``up`` is that it answers in HTTP and is not known to be anything else. ``scope`` says whose
    environment software facts describe, ``why`` how the server was found. ``launch`` holds allow-listed flags as
    typed; ``launch_source`` is ``process`` or ``command-line`` (a launch judged beforehand). ``environ`` is
    ``readable`` or the reason why the server's environment variables cannot be seen. ``started_at`` is in seconds
    since the epoch. ``processes`` are the main one and all that it started, null where they cannot be seen;
    ``schedulers_expected`` is how many its sizes make on this node; ``denied`` lists what may not be read of them.
    ``mapped_elsewhere`` names site-packages that the server has loaded libraries from and that are not in the
    environment which was examined: then server_python points to another one than the server's.
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
    processes: tuple[ProcessSection, ...] | None = None
    schedulers_expected: int | None = None
    denied: tuple[DeniedSection, ...] = ()
    mapped_elsewhere: tuple[str, ...] = ()
    is_sglang: bool | None = None


def _denied(facts: ServerFacts) -> Iterable[DeniedSection]:
    """What may not be read, once for each kind of process: eight schedulers are refused alike."""
    said: set[tuple[str, str]] = set()
    for one in facts.running.processes if facts.running is not None else ():
        for name, token in one.denied.items():
            what = name if one.role is Role.MAIN else f"{name} of {one.role.value}"
            if (what, token) not in said:
                said.add((what, token))
                reason = Denial(token)
                yield DeniedSection(what=what, token=token, sentence=reason.sentence, remedy=reason.remedy)


def _processes(facts: ServerFacts) -> tuple[ProcessSection, ...] | None:
    if facts.running is None or facts.running.problem is not None:
        return None
    return tuple(
        ProcessSection(pid=one.pid, role=one.role.value, resident=one.resident, zombie=one.zombie)
        for one in facts.running.processes
    )


def report(facts: ServerFacts) -> Mapping[str, ServerSection]:
    """Give the report's ``server`` key."""
    target, info = facts.target, facts.info or ServerInfo()
    trouble = problem(facts)
    return {
        "server": ServerSection(
            state=state(facts).value,
            up=_up(facts),
            answer=None if facts.observation.answer is None else facts.observation.answer.value,
            ready=None if is_sglang(facts) is False else facts.observation.ready,
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
            info_problem=None if trouble is None else ProblemSection(token=trouble.token, sentence=trouble.sentence),
            processes=_processes(facts),
            schedulers_expected=facts.schedulers_expected,
            denied=tuple(_denied(facts)),
            mapped_elsewhere=facts.mapped_elsewhere,
            is_sglang=is_sglang(facts),
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
    families=(UP, INFO, STARTED, RESIDENT, PROCESSES),
    conditions=CONDITIONS,
    identity=identity,
    report=report,
    sections={"server": ServerSection},
    view=view,
)
