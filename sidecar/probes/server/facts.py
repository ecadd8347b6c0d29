"""One round's picture of the server: how it is collected, and what it is in one word."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from sidecar.environment import Damage, EnvironmentFacts
from sidecar.gpuset import expected_schedulers
from sidecar.model import Answer, ProbeCrash, ProbeTimeout, ProbeUnavailable, Processes, Scope, Skip, Target
from sidecar.offload import in_daemon_thread
from sidecar.processes import Role, ServerProcesses
from sidecar.requirements import distribution_of
from sidecar.serverinfo import KEY_PROBLEMS, Problem, ServerInfo, ServerObservation, public_url
from sidecar.services import Services
from sidecar.target import PREFLIGHT, READ_SOURCES

_MEMORY: Final = "server"
"""Where this probe keeps what it must remember, in `Services.memory`."""
_ENVIRONMENT_SECONDS: Final = 60.0
"""How long the files' times are reused: other probes read them every minute anyway, this one adds no reading."""
_ENVIRONMENT_PATIENCE: Final = 2.0
"""Seconds to wait for the environment's reader: less than this probe's deadline, which HTTP facts must not miss."""


class ServerFacts(Struct, frozen=True, kw_only=True):
    """One round's picture of the server.

    ``target`` is summarized. ``every_process`` is whether each server's process would have been found: none can be
    hidden, and no setting narrows the search. ``nvidia_present`` is whether an NVIDIA kernel module is loaded here: a
    server that resolved to another device on such a machine may have lost its GPU.

    ``running`` are the server's processes, None where none can be seen. ``schedulers_expected`` is how many its sizes
    make on this node, ``schedulers_seen`` the most that this agent has seen of this server at once. ``changed_at``
    maps tracked packages of the server's environment to the latest change of their files (seconds since the epoch),
    ``installed_sglang`` is the release that is installed there; None where its files were not read in scope server.
    ``removed`` says of packages what this agent saw there since this server started and does not see any more,
    ``incomplete`` which have not all the files that they are registered with, whenever those went.
    ``mapped_elsewhere`` names site-packages that it has mapped and that the examined environment does not have.
    """

    target: Target
    observation: ServerObservation
    info: ServerInfo | None
    info_problem: Problem | None
    processes: Processes
    every_process: bool
    nvidia_present: bool
    running: ServerProcesses | None = None
    schedulers_expected: int | None = None
    schedulers_seen: int = 0
    changed_at: Mapping[str, float] | None = None
    installed_sglang: str | None = None
    removed: Mapping[str, str] = field(default_factory=dict)
    incomplete: Mapping[str, Damage] = field(default_factory=dict)
    mapped_elsewhere: tuple[str, ...] = ()


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


class _Memory(Struct, frozen=True):
    """What one round hands to the next.

    ``process`` is the server that it is about: pid and start. ``first`` is its environment as it was first seen.
    """

    process: tuple[int | None, float | None]
    schedulers: int = 0
    environment: EnvironmentFacts | None = None
    first: EnvironmentFacts | None = None
    read_at: float = 0.0


def summarize(target: Target) -> Target:
    """A target without what must not be shown: the environment, and credentials in the URL."""
    return replace(target, url=public_url(target.url), environ=None)


async def collect(services: Services) -> ServerFacts:
    """Find the server, try its address and ask for its information. Never raises for what the server does."""
    target = await services.targets.find()
    observation = await services.server.observe(target)
    # After the observation, which tells whether what is remembered belongs to a server that is gone.
    info = await services.server.info(target)
    running = await services.processes.read(target)
    memory = _remembered(services, target)
    if running is not None and memory.process[0] is not None:
        memory = replace(memory, schedulers=max(memory.schedulers, len(running.of(Role.SCHEDULER))))
    memory = await _with_environment(services, target, memory)
    services.memory[_MEMORY] = memory
    narrowed = services.settings.server_pid is not None or services.settings.server_pattern is not None
    version_file = services.targets.proc / "driver" / "nvidia" / "version"
    environment = memory.environment
    return ServerFacts(
        target=summarize(target),
        observation=observation,
        info=info,
        info_problem=services.server.problem,
        processes=services.standing.processes,
        every_process=services.standing.processes is Processes.SHARED and not narrowed,
        nvidia_present=await in_daemon_thread(version_file.exists),
        running=running,
        schedulers_expected=expected_schedulers(target, info),
        schedulers_seen=memory.schedulers,
        changed_at=None if environment is None else environment.changed_at,
        installed_sglang=None if environment is None else environment.sglang_release,
        removed=removed_since(memory.first, environment),
        incomplete={} if environment is None else {key: one for key, one in environment.damaged.items() if one.missing},
        mapped_elsewhere=await _mapped_elsewhere(target, running, environment),
    )


def _remembered(services: Services, target: Target) -> _Memory:
    """What is remembered of this very server: nothing of another one counts for it."""
    memory = services.memory.get(_MEMORY)
    process = (target.pid, target.create_time)
    return memory if isinstance(memory, _Memory) and memory.process == process else _Memory(process)


async def _with_environment(services: Services, target: Target, memory: _Memory) -> _Memory:
    """Read the server's environment where its files are the server's own, at most once in a minute."""
    if target.pid is None or target.scope is not Scope.SERVER:
        # The times of another container's files tell when that one was made, not what the server runs on.
        return replace(memory, environment=None)
    now = services.clock.monotonic()
    if memory.environment is not None and now - memory.read_at < _ENVIRONMENT_SECONDS:
        return memory
    try:
        async with asyncio.timeout(_ENVIRONMENT_PATIENCE):
            environment = await services.environment.read(target)
    except (Skip, ProbeUnavailable, ProbeTimeout, ProbeCrash, TimeoutError):
        # The probes whose subject this is report it; here it leaves the question open.
        return replace(memory, environment=None)
    # A reading without the times of files (it may not read them) leaves the question open as well.
    usable = environment.problem is None and environment.changed_at
    if not usable:
        return replace(memory, environment=None, read_at=now)
    first = memory.first
    same = first is not None and (first.python, first.site_dirs) == (environment.python, environment.site_dirs)
    return replace(memory, environment=environment, first=first if same else environment, read_at=now)


_CODE: Final = frozenset({"package", "module", "extension"})
"""Kinds of a module that has code of its own."""


def removed_since(first: EnvironmentFacts | None, environment: EnvironmentFacts | None) -> Mapping[str, str]:
    """Package -> what of it was there when its server's environment was first seen, and is not any more.

    What goes leaves no file behind whose time would tell.
    """
    if first is None or environment is None or first is environment:
        return {}
    found: dict[str, str] = {}
    for name, damage in environment.damaged.items():
        before = first.damaged.get(name, Damage())
        if damage.missing > before.missing and not before.no_record:
            listed = f" ({', '.join(damage.examples[:2])})" if damage.examples else ""
            found[name] = f"{damage.missing - before.missing} files are gone{listed}"
    for module, files in first.modules.items():
        gone = environment.modules.get(module)
        if "." not in module and files.kind in _CODE and gone is not None and gone.kind not in _CODE:
            found[distribution_of(module)] = f"the module {module} is gone ({files.places[0]})"
    found |= {name: "it is not registered any more" for name in first.changed_at if name not in environment.changed_at}
    return dict(sorted(found.items()))


async def _mapped_elsewhere(
    target: Target, running: ServerProcesses | None, environment: EnvironmentFacts | None
) -> tuple[str, ...]:
    """Site-packages that the server has mapped and the examined environment does not have.

    Only where its paths are ours: maps show paths with every link resolved, and links of another root cannot be
    resolved here.
    """
    if running is None or not running.site_folders or environment is None or not environment.site_dirs:
        return ()
    if target.root is not None:
        return ()
    folders, examined = running.site_folders, environment.site_dirs
    known = await in_daemon_thread(lambda: {*examined, *map(os.path.realpath, examined)})
    return tuple(folder for folder in folders if folder not in known)


def state(facts: ServerFacts) -> ServerState:
    """Put the facts in one word."""
    if facts.target.launch_source == PREFLIGHT:
        return ServerState.PREFLIGHT
    if facts.observation.answer is Answer.REFUSED:
        if facts.target.pid is None:
            return ServerState.NOT_FOUND
        return ServerState.STARTING if facts.target.url_source in READ_SOURCES else ServerState.ADDRESS_UNKNOWN
    found = problem(facts)
    if found is None:
        return ServerState.UP
    return ServerState.UNAUTHORIZED if found.token in KEY_PROBLEMS else ServerState.UNREACHABLE


_FOREIGN: Final = frozenset({"not-sglang", "not-json", "too-large"})
"""Tokens of an answer to the request for the server's information that no SGLang gives."""


def is_sglang(facts: ServerFacts) -> bool | None:
    """Whether what answers at the address is an SGLang server; None where that is not known.

    One that gave its information is; one that answers the request for it with anything else is not, unless the process
    of a server is there: that may be behind a proxy which does not pass such a request on.
    """
    if facts.observation.answer is not Answer.ACCEPTED:
        return None
    if facts.info is not None:
        return True
    found = facts.info_problem
    hidden = facts.target.pid is not None or bool(facts.target.candidates)
    return False if found is not None and found.token in _FOREIGN and not hidden else None


def problem(facts: ServerFacts) -> Problem | None:
    """Why the server cannot be asked, if so. What is known already outweighs a later failure to ask again."""
    if facts.observation.problem is not None:
        return None if facts.target.launch.get("grpc") else facts.observation.problem
    found = facts.info_problem
    if found is None:
        return None
    if facts.info is not None:
        return found if found.token in KEY_PROBLEMS else None
    # Refused in between two requests: the next round sees which it is.
    return None if found.token == "refused" else found  # noqa: S105 - a problem's token, no secret
