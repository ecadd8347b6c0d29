"""Finding the server: its process, interpreter, root, environment and address, each with the way it was found.

Everything here reads ``/proc`` and file names; nothing is executed or imported. Command lines and environments
hold keys: a command line is reduced to its allow-listed flags at once, and an environment stays inside `Target`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sidecar.config import Image, Settings
from sidecar.launchargs import (
    INCOMPLETE,
    LaunchArguments,
    LaunchForm,
    LaunchValue,
    is_python,
    is_shell,
    parse_launch,
    server_form,
)
from sidecar.model import Clock, Placement, Processes, Scope, Standing, Target
from sidecar.offload import in_daemon_thread
from sidecar.sockets import listeners_of

PREFLIGHT: Final = "command-line"
"""`Target.launch_source` when a launch is judged that has not happened yet."""
RUNNING: Final = "process"
"""`Target.launch_source` when the flags are those of a running process."""

READ_SOURCES: Final = frozenset({"setting", "command-line"})
"""The `Target.url_source` of an address that is known: nobody listening there means that the server does not.

All others may be wrong: ``listening-socket`` (the one port on which the process listens), ``command-line-incomplete``
(the flags read do not settle it), ``command-line-other-network`` (there it is, here it may be somebody else's) and
``default`` (SGLang's own default, where no command line could be read).
"""

_KEEP_SECONDS: Final = 5.0
"""How long a found target is reused: the probes of one round share it."""
_DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_PORT: Final = 30000
"""What SGLang takes where neither a flag nor a configuration file says otherwise."""
_HOST: Final = re.compile(r"[\w.:%-]+", re.ASCII)
"""What a host may look like: a process chooses its own command line, and must not choose more of a URL with it."""
_CMDLINE_LIMIT: Final = 256 * 1024
_ENVIRON_LIMIT: Final = 1024 * 1024
_MAPS_LIMIT: Final = 4 * 1024 * 1024
"""A real server maps about 1500 objects in 200 kB; what is larger is cut, not refused."""

_INIT_SHIMS: Final = frozenset({"tini", "tini-static", "dumb-init", "catatonit", "docker-init", "s6-svscan"})
_POD_INIT: Final = "pause"
"""Process 1 of a pod whose containers share their processes."""
_KERNEL_THREADS: Final = "kthreadd"
"""Process 2 wherever the process namespace is the machine's own, in a pod with hostPID too."""
_CONTAINER_CGROUP: Final = re.compile(r"kubepods|docker|containerd|libpod")
_RETITLED_MAIN: Final = "sglang::http_server"
"""What SGLang 0.5.2 renames its main process to; other releases leave that one alone."""
_SERVER_PACKAGES: Final = ("sglang", "flashinfer", "flashinfer_python")
_LEFT_TO_READER: Final = "left-to-reader"
"""`Target.python_source` where the reader of a foreign root has to find the interpreter in it."""


# -- where the agent stands -------------------------------------------------------------------------


def stand(
    settings: Settings,
    *,
    proc: Path = Path("/proc"),
    environ: Mapping[str, str] = os.environ,
    filesystem: Path = Path("/"),
    pid: int | None = None,
    parent: int | None = None,
) -> Standing:
    """Decide where the agent itself runs and whether it can see the server's processes.

    ``pid`` and ``parent`` are the agent's own, looked up when left out. Never raises; what cannot be read
    counts as absent.
    """
    if settings.placement is not None:
        placement, placement_why = settings.placement, "placement is set in the configuration"
    else:
        placement, placement_why = _placement(proc, environ, filesystem)
    if settings.processes is not None:
        return Standing(
            placement=placement,
            placement_why=placement_why,
            processes=settings.processes,
            processes_why="processes is set in the configuration",
        )
    processes, processes_why = _processes(
        placement,
        proc,
        environ,
        os.getpid() if pid is None else pid,
        os.getppid() if parent is None else parent,
    )
    return Standing(placement=placement, placement_why=placement_why, processes=processes, processes_why=processes_why)


def _placement(proc: Path, environ: Mapping[str, str], filesystem: Path) -> tuple[Placement, str]:
    for marker in (".dockerenv", "run/.containerenv"):
        if _exists(filesystem / marker):
            return Placement.CONTAINER, f"/{marker} exists"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return Placement.CONTAINER, "KUBERNETES_SERVICE_HOST is set"
    for member in ("self", "1"):
        match = _CONTAINER_CGROUP.search(_text(proc / member / "cgroup", 65536) or "")
        if match:
            return Placement.CONTAINER, f"the control group of process {member} names {match.group()}"
    return Placement.HOST, "no sign of a container was found"


def _processes(
    placement: Placement, proc: Path, environ: Mapping[str, str], pid: int, parent: int
) -> tuple[Processes, str]:
    """Whether a server that runs would be seen. Hidden where in doubt: then its absence proves nothing."""
    if placement is Placement.HOST:
        return Processes.SHARED, "on a host every process can be seen"
    if pid == 1:
        return Processes.HIDDEN, "this process is number 1 of its container: it shares no process namespace"
    if _name(proc, 2) == _KERNEL_THREADS:
        return Processes.SHARED, "the kernel's own threads can be seen, and so every process of the machine"
    name = _name(proc, 1)
    if name == _POD_INIT:
        return Processes.SHARED, "process 1 is pause, which holds the process namespace that a pod's containers share"
    if parent == 1 and name in _INIT_SHIMS:
        return Processes.HIDDEN, f"process 1 is {name}, which started this one: it shares no process namespace"
    if not _in_kubernetes(proc, environ):
        # In a pod the server has a container of its own; elsewhere it is started beside the agent, as on a machine.
        return Processes.SHARED, "this container shows no sign of Kubernetes: what runs in it can be seen"
    named = f"process 1 ({name or 'unreadable'})"
    if _reaches_first(proc, parent):
        return Processes.HIDDEN, f"{named} started this one: it is this container's own, other containers' are not seen"
    match _beside_first(proc):
        case True:
            return Processes.HIDDEN, f"{named} is in this container: other containers' processes are not seen"
        case False:
            return Processes.SHARED, f"{named} is in another container: the pod's containers share their processes"
        case None:
            return Processes.HIDDEN, f"it cannot be told whose {named} is: other containers' processes may not be seen"


def _in_kubernetes(proc: Path, environ: Mapping[str, str]) -> bool:
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    return any("kubepods" in (_text(proc / member / "cgroup", 65536) or "") for member in ("self", "1"))


def _reaches_first(proc: Path, parent: int) -> bool:
    """Whether process 1 started the agent, directly or not. Whatever comes from outside has parent 0 instead."""
    seen: set[int] = set()
    while parent > 1 and parent not in seen:
        seen.add(parent)
        status = _stat(proc, parent)
        parent = status[0] if status is not None else 0
    return parent == 1


def _beside_first(proc: Path) -> bool | None:
    """Whether process 1 is in the agent's own container, by its files or else its control group; None: not told."""
    first, ours = (_link(proc / member / "ns" / "mnt") for member in ("1", "self"))
    if first is None or ours is None:
        first, ours = (_text(proc / member / "cgroup", 65536) for member in ("1", "self"))
    return first == ours if first and ours else None


# -- reading /proc ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """A process that may be the server. ``argv`` may hold secrets: it never leaves this module."""

    pid: int
    argv: tuple[str, ...]
    parent: int
    started_ticks: int
    form: LaunchForm | None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _text(path: Path, limit: int) -> str | None:
    """The start of a file, or None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def _link(path: Path) -> str | None:
    try:
        return str(path.readlink())
    except OSError:
        return None


def _name(proc: Path, pid: int) -> str:
    """A process's short name, empty when it cannot be read."""
    return (_text(proc / str(pid) / "comm", 64) or "").strip()


def _argv(proc: Path, pid: int) -> tuple[str, ...]:
    """A process's command line. A renamed process has its title and padding there; the padding is dropped."""
    text = _text(proc / str(pid) / "cmdline", _CMDLINE_LIMIT)
    if not text:
        return ()
    words = text.rstrip("\0").split("\0")
    return tuple(word.rstrip() for word in words) if words[0].startswith("sglang::") else tuple(words)


def _stat(proc: Path, pid: int) -> tuple[int, int] | None:
    """(parent's pid, start time in clock ticks since boot), or None for a process that is gone or a zombie."""
    text = _text(proc / str(pid) / "stat", 4096)
    if text is None:
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    try:
        return None if fields[0] in {"Z", "X"} else (int(fields[1]), int(fields[19]))
    except (IndexError, ValueError):
        return None


def _boot_time(proc: Path) -> float | None:
    match = re.search(r"^btime (\d+)$", _text(proc / "stat", 1024 * 1024) or "", re.MULTILINE)
    return float(match.group(1)) if match else None


def _environ(proc: Path, pid: int) -> tuple[dict[str, str] | None, str | None]:
    """(environment, None), or (None, the reason as a token)."""
    try:
        with (proc / str(pid) / "environ").open("rb") as file:
            data = file.read(_ENVIRON_LIMIT + 1)
    except PermissionError:
        return None, "permission-denied"
    except OSError:
        return None, "unreadable"
    if len(data) > _ENVIRON_LIMIT:
        return None, "too-large"
    if data and not data.strip(b"\0"):
        # setproctitle writes over the memory that the kernel shows here; it reads back without an error.
        return None, "environ-overwritten"
    pairs = (item.partition("=") for item in data.decode("utf-8", "replace").split("\0"))
    return {name: value for name, separator, value in pairs if separator and name}, None


def _user(proc: Path, pid: int) -> int | None:
    """The user id of a process; None when it cannot be read.

    None too where it has several: then somebody else than the user it acts for may have chosen its command line.
    """
    match = re.search(r"^Uid:((?:\s+\d+)+)$", _text(proc / str(pid) / "status", 65536) or "", re.MULTILINE)
    ids = set(match.group(1).split()) if match else set()
    return int(ids.pop()) if len(ids) == 1 else None


def _endpoint(form: LaunchForm | None, flags: Mapping[str, LaunchValue]) -> tuple[str | None, int | None]:
    """(host, port) that a server with these flags listens on, each None where the flags do not settle it.

    Flags of a program that is not SGLang's own launcher mean what that program makes of them.
    """
    if form is LaunchForm.OTHER:
        return None, None
    complete = INCOMPLETE not in flags
    host = flags.get("host", _DEFAULT_HOST if complete else None)
    port = flags.get("port", _DEFAULT_PORT if complete else None)
    return (
        host if isinstance(host, str) and _HOST.fullmatch(host) else None,
        port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536 else None,
    )


def _url(flags: Mapping[str, LaunchValue], host: str, port: int) -> str:
    """The URL of a server, as seen from the same network."""
    if host in {"0.0.0.0", "*"}:  # noqa: S104 - compared with, not bound to
        host = _DEFAULT_HOST
    elif host == "::":
        host = "::1"
    if ":" in host:
        host = f"[{host}]"
    return f"{'https' if flags.get('ssl') else 'http'}://{host}:{port}"


# -- interpreters -----------------------------------------------------------------------------------


def _is_executable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.X_OK)
    except OSError:
        return False


def _site_folders(python: Path) -> Iterator[Path]:
    """Where packages of an interpreter lie, told from its unresolved path alone."""
    prefix = python.parent.parent
    yield from _packages_under(prefix)
    configuration = _text(prefix / "pyvenv.cfg", 65536)
    if configuration is None:
        if prefix.name == "usr":  # Debian keeps what pip installs for /usr/bin/python3 under /usr/local
            yield prefix / "lib/python3/dist-packages"
            yield from _packages_under(prefix / "local")
        return
    values = dict(re.findall(r"^\s*([\w-]+)\s*=\s*(.*?)\s*$", configuration, re.MULTILINE))
    if values.get("include-system-site-packages", "").lower() == "true" and values.get("home"):
        yield from _packages_under(Path(values["home"]).parent)


def _packages_under(prefix: Path) -> Iterator[Path]:
    for library in ("lib", "lib64"):
        try:
            versions = sorted(entry for entry in (prefix / library).iterdir() if entry.name.startswith("python3."))
        except OSError:
            continue
        for version in versions:
            yield version / "site-packages"
            yield version / "dist-packages"


def _holds(python: Path, packages: Sequence[str]) -> bool:
    """Whether one of the packages is installed for an interpreter, by file names alone.

    An editable installation has no folder of its own there, only its metadata: official images install SGLang so.
    """
    pattern = re.compile(rf"(?:__editable__[._])?(?:{'|'.join(packages)})(?:$|[-_][0-9]|\.egg-)")
    for folder in _site_folders(python):
        try:
            if any(pattern.match(entry.name) for entry in folder.iterdir()):
                return True
        except OSError:
            continue
    return False


def _shebang(script: Path) -> str | None:
    """The interpreter that a console script names."""
    line = (_text(script, 512) or "").partition("\n")[0]
    program = line[2:].strip() if line.startswith("#!") else ""
    return program if program.startswith("/") and is_python(program) else None


# -- the finder -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interpreter:
    path: str
    source: str


class TargetFinder:
    """Finds the server, and keeps what it found for about five seconds.

    ``environ``, ``prefix`` (of the agent's own environment) and ``filesystem`` (in front of well-known absolute
    paths) are the agent's edges. ``proc`` is public because probes that look there must look into the same tree.
    """

    def __init__(
        self,
        settings: Settings,
        standing: Standing,
        clock: Clock,
        *,
        proc: Path = Path("/proc"),
        environ: Mapping[str, str] = os.environ,
        prefix: str = sys.prefix,
        filesystem: Path = Path("/"),
    ) -> None:
        self.proc = proc
        self._settings = settings
        self._standing = standing
        self._clock = clock
        self._environ = environ
        self._prefix = prefix
        self._filesystem = filesystem
        self._found: Target | None = None
        self._found_at = 0.0
        self._search: asyncio.Task[Target] | None = None

    async def find(self) -> Target:
        """The server as it is now. Never raises for a server that is absent or may not be read.

        One search at a time: a caller that meets one in progress waits for it. A search that blocks (a process
        in uninterruptible sleep) blocks its callers until their deadlines, not the event loop.
        """
        if self._found is not None and self._clock.monotonic() - self._found_at < _KEEP_SECONDS:
            return self._found
        if self._search is None or self._search.done():
            self._search = asyncio.get_running_loop().create_task(self._look())
        # Shielded: one caller's deadline must not cancel the search that another one waits for.
        return await asyncio.shield(self._search)

    async def _look(self) -> Target:
        target = await in_daemon_thread(self._find)
        self._found, self._found_at = target, self._clock.monotonic()
        return target

    def _find(self) -> Target:
        if self._settings.launch:
            return self._preflight()
        process: _Process | None = None
        candidates: tuple[int, ...] = ()
        why = ""
        # Hidden means that not every server can be seen. One that is seen is none the worse for it.
        if self._settings.processes is not Processes.HIDDEN:
            process, candidates, why = self._choose(self._scan())
        if process is not None:
            return self._running(process, candidates, why)
        if self._standing.processes is Processes.HIDDEN:
            why = f"{why} The server's processes may be hidden: {self._standing.processes_why}.".lstrip()
        return self._unseen(candidates, why)

    # -- a launch that has not happened yet

    def _preflight(self) -> Target:
        launch = parse_launch(self._settings.launch)
        environ = {**self._environ, **launch.environ}
        interpreter = self._set_by_hand() or self._named_by(launch, environ) or self._search_image(environ)
        return Target(
            url=self._settings.server_url,
            url_source=self._url_source(),
            scope=Scope.SERVER,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else "not-found",
            root=self._settings.server_root,
            launch=launch.flags,
            launch_source=PREFLIGHT,
            environ=environ,
            why="A launch is judged before it happens: it would run right here.",
        )

    def _named_by(self, launch: LaunchArguments, environ: Mapping[str, str]) -> _Interpreter | None:
        if launch.program is None:
            return None
        program = launch.program
        if "/" not in program:
            program = shutil.which(program, path=environ.get("PATH", os.defpath)) or program
        if "/" in program:
            program = os.path.abspath(program)  # noqa: PTH100 - Path.resolve would follow a virtual environment's link
        if is_python(program):
            return _Interpreter(path=program, source="launch-command")
        interpreter = _shebang(Path(program))
        return _Interpreter(path=interpreter, source="launch-command") if interpreter else None

    # -- a running server

    def _scan(self) -> list[_Process]:
        """The processes that may be a server's main one, parents of others only once."""
        pattern = re.compile(self._settings.server_pattern) if self._settings.server_pattern else None
        found: dict[int, _Process] = {}
        parents: dict[int, int] = {}
        own = int(_link(self.proc / "self") or os.getpid())
        for pid in self._pids():
            if self._settings.server_pid not in {None, pid}:
                continue
            status = _stat(self.proc, pid)
            if status is None:
                continue
            parents[pid] = status[0]
            argv = _argv(self.proc, pid)
            if pid == own or not argv or not argv[0]:
                continue
            form = self._form(pid, argv, pattern)
            if form is not None:
                found[pid] = _Process(pid=pid, argv=argv, parent=status[0], started_ticks=status[1], form=form)
        # A process that is about to become something else still shows its parent's command line.
        return [process for process in found.values() if not _descends(process.pid, parents, {*found, own})]

    def _form(self, pid: int, argv: tuple[str, ...], pattern: re.Pattern[str] | None) -> LaunchForm | None:
        if pid == self._settings.server_pid:
            return server_form(argv) or LaunchForm.OTHER
        form = server_form(argv)
        if form is None and argv[0].startswith(_RETITLED_MAIN):
            form = LaunchForm.OTHER
        if pattern is None:
            return form
        # The pattern both narrows the choice and adds programs that embed the engine; their children and the
        # shells around them carry the same words.
        renamed_child = form is None and argv[0].startswith("sglang::")
        if renamed_child or is_shell(argv[0]) or pattern.search(" ".join(argv)) is None:
            return None
        return form or LaunchForm.OTHER

    def _pids(self) -> Iterator[int]:
        try:
            names = [entry.name for entry in self.proc.iterdir()]
        except OSError:
            return
        yield from sorted(int(name) for name in names if name.isdecimal())

    def _choose(self, found: list[_Process]) -> tuple[_Process | None, tuple[int, ...], str]:
        """(the server's main process, candidates when there is no choice, why)."""
        settings = self._settings
        if settings.server_pid is not None:
            for process in found:
                if process.pid == settings.server_pid:
                    return process, (), f"Process {process.pid} is set by server_pid."
            return None, (), f"server_pid is {settings.server_pid}, but there is no such process."
        if not found:
            what = "matches server_pattern" if settings.server_pattern else "looks like an SGLang server"
            return None, (), f"No process that can be seen {what}."
        if "server_url" in settings.explicit:
            url = urlsplit(settings.server_url)
            port = url.port or (443 if url.scheme == "https" else 80)
            matching = [process for process in found if port in self._ports(process)]
            if len(matching) == 1:
                return matching[0], (), f"Process {matching[0].pid} listens on the port of server_url ({port})."
        if len(found) == 1:
            return found[0], (), f"Process {found[0].pid} is the only SGLang server that can be seen."
        pids = tuple(process.pid for process in found)
        listed = ", ".join(map(str, pids))
        return None, pids, f"Several SGLang servers can be seen (processes {listed}) and none is chosen."

    def _ports(self, process: _Process) -> set[int]:
        """The ports that a process may serve on: the one that its flags settle, else those it listens on."""
        port = _endpoint(process.form, parse_launch(process.argv).flags)[1]
        return {port} if port is not None else {listener.port for listener in listeners_of(self.proc, process.pid)}

    def _address(self, process: _Process, flags: Mapping[str, LaunchValue]) -> tuple[str, str]:
        """(URL, how it was found) of a running server."""
        if "server_url" in self._settings.explicit:
            return self._settings.server_url, self._url_source()
        host, port = _endpoint(process.form, flags)
        ours = self._shares(self.proc / str(process.pid), "net") is True
        if host is not None and port is not None:
            # In another network namespace the address is somebody else's: what it answers proves nothing.
            return _url(flags, host, port), "command-line" if ours else "command-line-other-network"
        # Sought only where the flags do not tell: a server in its first minutes does not listen yet.
        found = [one for one in listeners_of(self.proc, process.pid) if port in {None, one.port}] if ours else []
        if len({listener.port for listener in found}) == 1:
            return _url(flags, found[0].reachable_host, found[0].port), "listening-socket"
        if process.form is LaunchForm.OTHER:
            return self._settings.server_url, "default"
        return _url(flags, host or _DEFAULT_HOST, port or _DEFAULT_PORT), "command-line-incomplete"

    def _running(self, process: _Process, candidates: tuple[int, ...], why: str) -> Target:
        folder = self.proc / str(process.pid)
        launch = parse_launch(process.argv)
        environ, environ_missing = _environ(self.proc, process.pid)
        same_files, root, root_why = self._root_of(folder)
        url, url_source = self._address(process, launch.flags)
        by_hand = self._set_by_hand()
        theirs = self._interpreter_of(process, environ) if root is None else self._named_in(process, environ)
        here = None
        if by_hand is None and not same_files:
            here = self._in_image(theirs, _on_path(process.argv[0], environ))
        interpreter: _Interpreter | None
        if self._settings.server_root is not None:
            root, interpreter = self._settings.server_root, by_hand or theirs
            scope, scope_why = Scope.SERVER, "server_root is set"
        elif same_files and (by_hand or theirs):
            interpreter, scope, scope_why = by_hand or theirs, Scope.SERVER, root_why
        elif by_hand is not None:
            interpreter, root, scope, scope_why = by_hand, None, Scope.IMAGE, "server_python is set"
        elif here is not None:
            interpreter, root = here, None
            scope, scope_why = Scope.IMAGE, "the server's interpreter and its packages are in this image too"
        elif root is not None:
            interpreter, scope, scope_why = theirs, Scope.SERVER, root_why
        else:
            interpreter = self._search_unless_own()
            scope, scope_why = (Scope.IMAGE if interpreter else Scope.SELF), root_why
        boot = _boot_time(self.proc)
        return Target(
            url=url,
            url_source=url_source,
            scope=scope,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else _LEFT_TO_READER if root else "not-found",
            root=root,
            pid=process.pid,
            uid=_user(self.proc, process.pid),
            create_time=None if boot is None else boot + process.started_ticks / os.sysconf("SC_CLK_TCK"),
            # A renamed process shows a title where its flags were: nothing is known of them.
            launch={} if process.argv[0].startswith("sglang::") else launch.flags,
            launch_source=None if process.argv[0].startswith("sglang::") else RUNNING,
            environ=environ,
            environ_missing=environ_missing,
            candidates=candidates,
            why=f"{why} Scope {scope.value}: {scope_why}.",
        )

    def _shares(self, folder: Path, namespace: str) -> bool | None:
        """Whether a process is in the agent's own namespace of that kind; None when that may not be read."""
        theirs = _link(folder / "ns" / namespace)
        ours = _link(self.proc / "self" / "ns" / namespace)
        return None if theirs is None or ours is None else theirs == ours

    def _root_of(self, folder: Path) -> tuple[bool, str | None, str]:
        """(it runs on the very files that we see, its root when that is another and may be entered, why)."""
        files = self._shares(folder, "mnt")
        if files is None:
            return False, None, "its namespaces may not be read (needs its user id, or uid 0 with SYS_PTRACE)"
        changed_root = (_link(folder / "root") or "/") != "/"
        if files and not changed_root:
            if self._shares(folder, "pid") is False:
                return False, None, "it shares our files but not our process namespace"
            return True, None, "it runs in our own mount and process namespaces"
        # Not entered here: whatever lies behind it may block for as long as its server pleases.
        if _link(folder / "root") is None:
            return False, None, "its files are others than ours and may not be read"
        return False, str(folder / "root"), "its own files are read through its root"

    def _interpreter_of(self, process: _Process, environ: Mapping[str, str] | None) -> _Interpreter | None:
        """The interpreter that a process on our own files was started with, as it was named.

        Never the ``exe`` link first: it shows the base interpreter, which does not reveal a virtual environment.
        """
        program = process.argv[0]
        if is_python(program) and program.startswith("/"):
            return _Interpreter(path=program, source="argv0")
        for path in _on_path(program, environ):
            if os.path.lexists(path):
                return _Interpreter(path=path, source="server-path")
        virtual = (environ or {}).get("VIRTUAL_ENV", "")
        if virtual.startswith("/") and os.path.lexists(f"{virtual}/bin/python"):
            return _Interpreter(path=f"{virtual}/bin/python", source="virtual-env")
        mapped = self._mapped_prefix(process.pid)
        if mapped is not None and os.path.lexists(f"{mapped}/bin/python3"):
            return _Interpreter(path=f"{mapped}/bin/python3", source="maps")
        executable = _link(self.proc / str(process.pid) / "exe")
        if executable is not None and is_python(executable):
            return _Interpreter(path=executable, source="exe")
        return None

    def _named_in(self, process: _Process, environ: Mapping[str, str] | None) -> _Interpreter | None:
        """The interpreter of a process on other files than ours, as far as names alone settle it.

        No path below that root is looked at: only the reader, a child with a deadline, resolves paths inside it.
        None leaves the search to the reader, which is better than a base interpreter without its environment.
        """
        program = process.argv[0]
        if is_python(program) and program.startswith("/"):
            return _Interpreter(path=program, source="argv0")
        mapped = self._mapped_prefix(process.pid)
        if mapped is not None:
            return _Interpreter(path=f"{mapped}/bin/python3", source="maps")
        named = _on_path(program, environ)
        virtual = (environ or {}).get("VIRTUAL_ENV", "")
        if virtual.startswith("/") and (not named or f"{virtual}/bin/{program}" in named):
            return _Interpreter(path=f"{virtual}/bin/python", source="virtual-env")
        executable = _link(self.proc / str(process.pid) / "exe")
        # In the first folder of the search path no virtual environment can have come before it.
        if executable and is_python(executable) and named and _folder(executable) == _folder(named[0]):
            return _Interpreter(path=executable, source="exe")
        return None

    def _mapped_prefix(self, pid: int) -> str | None:
        """The prefix of the environment whose kernels a process has mapped."""
        maps = _text(self.proc / str(pid) / "maps", _MAPS_LIMIT) or ""
        match = re.search(r" (/\S*)/lib/python3\.\d+/site-packages/(?:sgl_kernel|torch)/", maps)
        return match.group(1) if match else None

    # -- no server process in sight

    def _unseen(self, candidates: tuple[int, ...], why: str) -> Target:
        interpreter = self._set_by_hand() or self._search_unless_own()
        root = self._settings.server_root
        if root is not None:
            scope, scope_why = Scope.IMAGE, "server_root is set"
        elif interpreter is not None:
            scope, scope_why = Scope.IMAGE, f"an interpreter of the image is known ({interpreter.source})"
        else:
            scope, scope_why = Scope.SELF, "no interpreter with SGLang or FlashInfer was found outside the agent's own"
        return Target(
            url=self._settings.server_url,
            url_source=self._url_source(),
            scope=scope,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else "not-found",
            root=root,
            environ_missing="no-process" if self._standing.processes is Processes.SHARED else "processes-hidden",
            candidates=candidates,
            why=f"{why} Scope {scope.value}: {scope_why}.",
        )

    def _url_source(self) -> str:
        return "setting" if "server_url" in self._settings.explicit else "default"

    # -- interpreters of this image

    def _set_by_hand(self) -> _Interpreter | None:
        # Not checked: one that does not exist must reach the probe that says so.
        path = self._settings.server_python
        return _Interpreter(path=path, source="setting") if path else None

    def _in_image(self, theirs: _Interpreter | None, on_path: Sequence[str]) -> _Interpreter | None:
        """The server's interpreter at the same path in our own image, if its packages are there too.

        ``on_path`` is where the server may have found it, when it did not say.
        """
        image = self._settings.image
        # On a host an equal path proves nothing: the server in a container has an image of its own.
        if image is Image.OWN or (image is None and self._standing.placement is Placement.HOST):
            return None
        if theirs is None:
            there = [path for path in on_path if _is_executable(self._filesystem / path.lstrip("/"))]
            theirs = _Interpreter(path=there[0], source="server-path") if there else None
        if theirs is not None:
            path = self._filesystem / theirs.path.lstrip("/")
            return theirs if _is_executable(path) and _holds(path, _SERVER_PACKAGES) else None
        return self._search_image(self._environ) if image is Image.SERVER else None

    def _search_unless_own(self) -> _Interpreter | None:
        return None if self._settings.image is Image.OWN else self._search_image(self._environ)

    def _search_image(self, environ: Mapping[str, str]) -> _Interpreter | None:
        """The first interpreter in this image that has SGLang or FlashInfer, and is not the agent's own.

        The agent's own counts when SGLang itself is installed beside it: then it was installed into the
        server's environment.
        """
        for path, source in self._candidates(environ):
            own = os.path.realpath(path.parent.parent) == os.path.realpath(self._prefix)
            if _is_executable(path) and _holds(path, ("sglang",) if own else _SERVER_PACKAGES):
                shown = "/" / path.relative_to(self._filesystem) if self._filesystem != Path("/") else path
                return _Interpreter(path=str(shown), source="own-environment" if own else source)
        return None

    def _candidates(self, environ: Mapping[str, str]) -> Iterable[tuple[Path, str]]:
        root = self._filesystem
        if virtual := environ.get("VIRTUAL_ENV"):
            yield root / virtual.lstrip("/") / "bin/python", "virtual-env"
        yield Path(self._prefix) / "bin/python", "own-environment"
        for path in sorted(root.glob("opt/sglang*/bin/python")):
            yield path, "well-known-path"
        yield root / "opt/venv/bin/python", "well-known-path"
        if conda := environ.get("CONDA_PREFIX"):
            yield root / conda.lstrip("/") / "bin/python", "conda"
        for folder in ("opt/conda", "opt/miniconda3"):
            yield root / folder / "bin/python", "conda"
        for folder in environ.get("PATH", "").split(":"):
            for name in ("python3", "python"):
                if folder.startswith("/"):
                    yield root / folder.lstrip("/") / name, "path"
        for folder in ("usr/local/bin", "usr/bin"):
            yield root / folder / "python3", "well-known-path"


def _folder(path: str) -> str:
    """The folder in a path of another root: text, not a file of ours."""
    return path.rpartition("/")[0]


def _on_path(program: str, environ: Mapping[str, str] | None) -> tuple[str, ...]:
    """The paths where a process may have found an interpreter that it was told without one, in its own order."""
    if environ is None or "/" in program or not is_python(program):
        return ()
    return tuple(f"{folder}/{program}" for folder in environ.get("PATH", "").split(":") if folder.startswith("/"))


def _descends(pid: int, parents: Mapping[int, int], ancestors: set[int]) -> bool:
    """Whether a process was started, directly or not, by one of the given ones."""
    seen = {pid}
    parent = parents.get(pid, 0)
    while parent and parent not in seen:
        if parent in ancestors:
            return True
        seen.add(parent)
        parent = parents.get(parent, 0)
    return False
