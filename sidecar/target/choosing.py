"""Which of the processes that may be a server is the one that is meant."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from sidecar import procfs
from sidecar.config import Settings
from sidecar.sockets import is_local
from sidecar.target.address import ports_of
from sidecar.target.namespaces import shares
from sidecar.target.scanning import ServerProcess


class Choice(Struct, frozen=True, kw_only=True):
    """The server's main process, None where there is no choice, and the candidates then; ``why`` is a sentence."""

    process: ServerProcess | None = None
    candidates: tuple[int, ...] = ()
    why: str


def choose(found: list[ServerProcess], settings: Settings, proc: Path) -> Choice:
    """Choose among the processes that may be a server; none where several may be meant."""
    if settings.server_pid is not None:
        return _choose_by_pid(found, settings.server_pid, proc)
    if not found:
        what = "matches server_pattern" if settings.server_pattern else "looks like an SGLang server"
        return Choice(why=f"No process that can be seen {what}.")
    if "server_url" in settings.explicit:
        return _choose_by_port(found, settings, proc)
    if len(found) == 1:
        return Choice(process=found[0], why=f"Process {found[0].pid} is the only SGLang server that can be seen.")
    return _undecided(found)


def _choose_by_pid(found: list[ServerProcess], pid: int, proc: Path) -> Choice:
    for process in found:
        if process.pid == pid:
            return Choice(process=process, why=f"Process {pid} is set by server_pid.")
    stat = procfs.process_stat(proc, pid)
    if stat is not None and stat.ended:
        return Choice(why=f"Process {pid}, which server_pid names, has ended (it is a zombie).")
    return Choice(why=f"server_pid is {pid}, but there is no such process.")


def _choose_by_port(found: list[ServerProcess], settings: Settings, proc: Path) -> Choice:
    """Choose the process that may be at the port of a configured ``server_url``; none rather than another server.

    What one server is and another answers would make faults that neither has.
    """
    url = urlsplit(settings.server_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    ports = {process.pid: ports_of(process, proc) for process in found}
    serving = [process for process in found if port in ports[process.pid]]
    if len(serving) == 1:
        why = f"Process {serving[0].pid} listens on the port of server_url ({port})."
        return Choice(process=serving[0], why=why)
    # One that is starting shows no port yet where its flags do not settle it.
    possible = serving or [process for process in found if not ports[process.pid]]
    if not possible and settings.server_pattern is not None:
        # A port may be mapped or lie behind a proxy: then the pattern is how its process is named.
        possible = [process for process in found if not _is_reached(process, proc, url.hostname or "")]
    if len(possible) == 1:
        why = f"Process {possible[0].pid} is the only visible server that may be at server_url's port ({port})."
        return Choice(process=possible[0], why=why)
    if possible:
        return _undecided(possible)
    seen = f"process {found[0].pid} serves" if len(found) == 1 else f"processes {_listed(found)} serve"
    hint = "If it is reached through a proxy, name its process with server_pid or server_pattern."
    return Choice(why=f"No visible SGLang server is at the port of server_url ({port}): {seen} elsewhere. {hint}")


def _undecided(possible: list[ServerProcess]) -> Choice:
    why = f"Several SGLang servers can be seen (processes {_listed(possible)}) and none is chosen."
    return Choice(candidates=tuple(process.pid for process in possible), why=why)


def _is_reached(process: ServerProcess, proc: Path, host: str) -> bool:
    """Whether a process would answer at its own port of that host: nothing in between changes the port."""
    return is_local(host) and shares(proc, process.pid, "net") is True


def _listed(processes: Iterable[ServerProcess]) -> str:
    return ", ".join(str(process.pid) for process in processes)
