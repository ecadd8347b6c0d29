"""Finding the server: its process, interpreter, root, environment and address, each with the way it was found.

Everything here reads ``/proc`` and file names; nothing is executed or imported. Command lines and environments
hold keys: a command line is reduced to its allow-listed flags at once, and an environment stays inside `Target`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from sidecar import procfs
from sidecar.childenv import may_matter
from sidecar.config import Image, Settings
from sidecar.launch.args import INCOMPLETE, LaunchArguments, LaunchValue, ReadConfig, parse_launch
from sidecar.launch.file import LaunchFiles
from sidecar.launch.forms import LaunchForm, is_python, is_shell, server_form
from sidecar.launch.shell import Outside
from sidecar.model import Clock, Placement, Processes, Scope, Standing, Target
from sidecar.offload import in_daemon_thread
from sidecar.procfs import Denial
from sidecar.pythonflags import PythonOptions, leading_script, leads_with_cwd, python_options, without_ignored
from sidecar.sockets import is_local, listeners_of

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
_CLOCK_JITTER: Final = 5.0
"""Seconds by which the time of boot, and with it every start time, may move while the clock is adjusted."""
_HOST: Final = re.compile(r"[\w.:%-]+", re.ASCII)
"""What a host may look like: a process chooses its own command line, and must not choose more of a URL with it."""
_PATTERN_LIMIT: Final = 1024
"""Characters of a command line that ``server_pattern`` is held against. A search cannot be interrupted and keeps the
whole agent waiting, and what a pattern with several wildcards costs grows with a power of the text's length."""
_MAPS_LIMIT: Final = 4 * 1024 * 1024
"""A real server maps about 1500 objects in 200 kB; what is larger is cut, not refused."""

SET_BY_LAUNCH: Final = "set-by-launch"
"""`Target.environ_missing` where a launch sets variables to what cannot be told before it happens."""
_FINDING: Final = frozenset(
    {"PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONPLATLIBDIR", "HOME"}
)
"""Variables that decide which packages an interpreter finds."""
_OF_SHELLS: Final = frozenset({"PWD", "OLDPWD", "SHLVL", "_"})
"""Variables that a shell hands on with values of its own, which no import reads."""
_SCRIPT_LIMIT: Final = 256 * 1024
"""Bytes of the longest file that a shell of a launch reads and that is followed."""

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
        match = _CONTAINER_CGROUP.search(procfs.read_text(proc / member / "cgroup") or "")
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
    if procfs.command_name(proc, 2) == _KERNEL_THREADS:
        return Processes.SHARED, "the kernel's own threads can be seen, and so every process of the machine"
    name = procfs.command_name(proc, 1)
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
    return any("kubepods" in (procfs.read_text(proc / member / "cgroup") or "") for member in ("self", "1"))


def _reaches_first(proc: Path, parent: int) -> bool:
    """Whether process 1 started the agent, directly or not. Whatever comes from outside has parent 0 instead."""
    seen: set[int] = set()
    while parent > 1 and parent not in seen:
        seen.add(parent)
        stat = procfs.process_stat(proc, parent)
        parent = stat.parent if stat is not None else 0
    return parent == 1


def _beside_first(proc: Path) -> bool | None:
    """Whether process 1 is in the agent's own container, by its files or else its control group; None: not told."""
    first, ours = (procfs.read_link(proc / member / "ns" / "mnt") for member in ("1", "self"))
    if first is None or ours is None:
        first, ours = (procfs.read_text(proc / member / "cgroup") for member in ("1", "self"))
    return first == ours if first and ours else None


# -- reading /proc ----------------------------------------------------------------------------------


class _Process(Struct, frozen=True, kw_only=True):
    """A process that may be the server. ``argv`` may hold secrets: it never leaves this module."""

    pid: int
    argv: tuple[str, ...]
    parent: int
    stat: procfs.ProcessStat
    form: LaunchForm | None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _user(proc: Path, pid: int) -> int | None:
    """The user id of a process; None when it cannot be read.

    None too where it has several: then somebody else than the user it acts for may have chosen its command line.
    """
    status = procfs.process_status(proc, pid)
    ids = set() if status is None else set(status.uids)
    return ids.pop() if len(ids) == 1 else None


def _folder_of(link: str | None, root: str | None) -> str | None:
    """A process's working folder as it names it itself, from the link's text and that of its root's link."""
    if link is None or not link.startswith("/") or link.endswith(" (deleted)"):
        return None
    if root is None or root == "/":
        return link
    # Below another root: what is outside of it has no name in there.
    return link.removeprefix(root) or "/" if link == root or link.startswith(f"{root}/") else None


def _options(argv: Sequence[str]) -> PythonOptions:
    """The interpreter's options of a process; none of a program that is no Python interpreter."""
    return python_options(argv[1:]) if argv and is_python(argv[0]) else PythonOptions()


def _imports_from_cwd(argv: Sequence[str], environ: Mapping[str, str] | None) -> bool:
    """Whether a process's interpreter puts its working folder first on its import path."""
    return leads_with_cwd(_options(argv), environ)


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
    configuration = procfs.read_text(prefix / "pyvenv.cfg")
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


def _shebang(script: Path, environ: Mapping[str, str]) -> str | None:
    """The interpreter that a console script names: directly, through ``env``, or through a shell.

    Installers write the last where the interpreter's path is too long for a first line, or holds blanks.
    """
    lines = (procfs.read_text(script, 2048) or "").split("\n")
    words = lines[0][2:].split() if lines[0].startswith("#!") else []
    program: str | None = " ".join(words)
    if len(words) == 2 and words[0].endswith("/env") and is_python(words[1]):
        program = shutil.which(words[1], path=environ.get("PATH", os.defpath))
    elif words == ["/bin/sh"] and len(lines) > 1:
        match = re.match(r"\'\'\'exec\' (?:\"([^\"]+)\"|(\S+)) ", lines[1])
        program = (match[1] or match[2]) if match else None
    return program if program is not None and program.startswith("/") and is_python(program) else None


# -- the finder -------------------------------------------------------------------------------------


class _Interpreter(Struct, frozen=True, kw_only=True):
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
        self._started: tuple[int, int, float] | None = None
        self._launch_files = LaunchFiles()

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
        own = _own_folder()
        root = self._settings.server_root
        outside = Outside(
            environ=self._environ,
            cwd=own,
            is_absent=lambda path: root is None and not os.path.lexists(path),
            is_folder=lambda path: _may_be_entered((root or "") + path),
            # A file of another root may be a link out of it.
            read=_script_text if root is None else lambda _: None,
        )
        launch = parse_launch(self._settings.launch, self._config_reader(own), outside)
        options = self._options_of(launch)
        environ, unseen = launch.environ, _heeded(launch.unseen, options)
        by_hand = self._set_by_hand()
        cwd_on_path = _module_launch(launch, environ, options)
        doubt = self._unread(launch, unseen, cwd_on_path=cwd_on_path is True)
        # Where its packages are is the operator's word then; how it finds them is not seen all the same.
        unread = None if by_hand is not None or root is not None else doubt
        interpreter = by_hand if by_hand is not None or unread is not None else self._launched_by(launch)
        known = doubt is None
        why = "A launch is judged before it happens: it would run right here."
        if launch.limits:
            why += " It sets limits (ulimit) that nothing here has, so no import stands for its own."
        if launch.depends:
            why += f" The server is started only if what is in front of it lets it: {', '.join(launch.depends)}."
        return Target(
            url=self._settings.server_url,
            url_source=self._url_source(),
            scope=Scope.SERVER,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else self._unnamed_source(),
            root=root,
            cwd=launch.cwd,
            cwd_on_path=cwd_on_path,
            script=leading_script(options, launch.cwd),
            python_flags=options.flags,
            launch=launch.flags,
            launch_source=PREFLIGHT,
            notes=launch.notes,
            environ=environ if known else None,
            environ_missing=None if known and not any(map(may_matter, unseen)) else SET_BY_LAUNCH,
            unseen=unseen,
            unread=unread,
            limited=launch.limits,
            far=launch.far,
            why=why if unread is None else f"{why} {unread}",
        )

    def _unread(self, launch: LaunchArguments, unseen: frozenset[str], *, cwd_on_path: bool) -> str | None:
        """Why the environment of a launch is not known well enough to be read, as a sentence; None where it is."""
        if launch.loss is not None:
            return f"The server's environment is not seen: {launch.loss.sentence}"
        program = launch.program or ""
        refused = python_options(launch.options).refused if is_python(program) else None
        if refused is not None:
            reached = f"It is not certain that the server is reached: with {refused} Python does not run it."
            return f"The server's environment is not seen: {reached}"
        deciding = {name for name in unseen if name in _FINDING}
        if launch.program is not None and "/" not in program and "PATH" in unseen:
            deciding.add("PATH")
        if deciding:
            names = ", ".join(sorted(deciding))
            return f"The server's environment is not seen: the launch sets {names} to what only its shell knows."
        path = [*launch.environ.get("PYTHONPATH", "/").split(":"), *([program] if "/" in program else ["/"])]
        relative = cwd_on_path or any(not entry.startswith("/") for entry in path)
        if launch.cwd is None and relative:
            return "The server's environment is not seen: the folder that the launch goes to is not known."
        return None

    def _unnamed_source(self) -> str:
        """What is said of an interpreter that nothing names."""
        return "not-found" if self._settings.server_root is None else _LEFT_TO_READER

    def _launched_by(self, launch: LaunchArguments) -> _Interpreter | None:
        if self._settings.server_root is None:
            return self._named_by(launch) or self._search_image(launch.environ)
        program = launch.program
        if program is not None and program.startswith("/") and is_python(program):
            return _Interpreter(path=program, source="launch-command")
        # A bare name, a console script or a relative path means a file inside the root, and this machine's own PATH
        # and files say nothing of it: the reader, which cannot be led out of the root, looks for it there.
        return None

    def _options_of(self, launch: LaunchArguments) -> PythonOptions:
        """How the interpreter of a launch is started; the kernel starts a console script's with the script."""
        if launch.program is None or is_python(launch.program):
            return python_options(launch.options)
        program = _program_of(launch) if self._settings.server_root is None else None
        return PythonOptions(script=program if program is not None and program.startswith("/") else None)

    def _named_by(self, launch: LaunchArguments) -> _Interpreter | None:
        program = _program_of(launch)
        if program is None:
            return None
        if is_python(program):
            return _Interpreter(path=program, source="launch-command")
        interpreter = _shebang(Path(program), launch.environ)
        return _Interpreter(path=interpreter, source="launch-command") if interpreter else None

    # -- a running server

    def _scan(self) -> list[_Process]:
        """The processes that may be a server's main one, parents of others only once."""
        pattern = re.compile(self._settings.server_pattern) if self._settings.server_pattern else None
        found: dict[int, _Process] = {}
        parents: dict[int, int] = {}
        own = int(procfs.read_link(self.proc / "self") or os.getpid())
        for pid in procfs.pids(self.proc):
            if self._settings.server_pid not in {None, pid}:
                continue
            stat = procfs.process_stat(self.proc, pid)
            if stat is None:
                continue
            parents[pid] = stat.parent
            argv = () if stat.ended else procfs.command_line(self.proc, pid)
            if pid == own or not argv or not argv[0]:
                continue
            form = self._form(pid, argv, pattern)
            if form is not None:
                found[pid] = _Process(pid=pid, argv=argv, parent=stat.parent, stat=stat, form=form)
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
        if renamed_child or is_shell(argv[0]) or pattern.search(" ".join(argv)[:_PATTERN_LIMIT]) is None:
            return None
        return form or LaunchForm.OTHER

    def _choose(self, found: list[_Process]) -> tuple[_Process | None, tuple[int, ...], str]:
        """(the server's main process, candidates when there is no choice, why)."""
        settings = self._settings
        if settings.server_pid is not None:
            for process in found:
                if process.pid == settings.server_pid:
                    return process, (), f"Process {process.pid} is set by server_pid."
            stat = procfs.process_stat(self.proc, settings.server_pid)
            if stat is not None and stat.ended:
                return None, (), f"Process {settings.server_pid}, which server_pid names, has ended (it is a zombie)."
            return None, (), f"server_pid is {settings.server_pid}, but there is no such process."
        if not found:
            what = "matches server_pattern" if settings.server_pattern else "looks like an SGLang server"
            return None, (), f"No process that can be seen {what}."
        if "server_url" in settings.explicit:
            return self._choose_by_port(found)
        if len(found) == 1:
            return found[0], (), f"Process {found[0].pid} is the only SGLang server that can be seen."
        pids = tuple(process.pid for process in found)
        return None, pids, f"Several SGLang servers can be seen (processes {_listed(found)}) and none is chosen."

    def _choose_by_port(self, found: list[_Process]) -> tuple[_Process | None, tuple[int, ...], str]:
        """Choose the process that may be at the port of a configured ``server_url``; none rather than another server.

        What one server is and another answers would make faults that neither has.
        """
        url = urlsplit(self._settings.server_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        ports = {process.pid: self._ports(process) for process in found}
        serving = [process for process in found if port in ports[process.pid]]
        if len(serving) == 1:
            return serving[0], (), f"Process {serving[0].pid} listens on the port of server_url ({port})."
        # One that is starting shows no port yet where its flags do not settle it.
        possible = serving or [process for process in found if not ports[process.pid]]
        if not possible and self._settings.server_pattern is not None:
            # A port may be mapped or lie behind a proxy: then the pattern is how its process is named.
            possible = [process for process in found if not self._is_reached(process, url.hostname or "")]
        if len(possible) == 1:
            pid = possible[0].pid
            return (
                possible[0],
                (),
                f"Process {pid} is the only visible server that may be at server_url's port ({port}).",
            )
        if possible:
            pids = tuple(process.pid for process in possible)
            why = f"Several SGLang servers can be seen (processes {_listed(possible)}) and none is chosen."
            return None, pids, why
        seen = f"process {found[0].pid} serves" if len(found) == 1 else f"processes {_listed(found)} serve"
        hint = "If it is reached through a proxy, name its process with server_pid or server_pattern."
        return None, (), f"No visible SGLang server is at the port of server_url ({port}): {seen} elsewhere. {hint}"

    def _is_reached(self, process: _Process, host: str) -> bool:
        """Whether a process would answer at its own port of that host: nothing in between changes the port."""
        return is_local(host) and self._shares(self.proc / str(process.pid), "net") is True

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
        environ, environ_missing = procfs.environment(self.proc, process.pid)
        same_files, root, root_why = self._root_of(folder, process.pid)
        cwd = _folder_of(procfs.read_link(folder / "cwd"), procfs.read_link(folder / "root"))
        uid = _user(self.proc, process.pid)
        # A file of the server is looked at only where its files are ours.
        reader = self._config_reader(cwd, uid) if same_files and root is None and uid is not None else None
        launch = parse_launch(process.argv, reader)
        url, url_source = self._address(process, launch.flags)
        by_hand = self._set_by_hand()
        theirs = self._interpreter_of(process, environ, cwd) if root is None else self._named_in(process, environ, cwd)
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
        return Target(
            url=url,
            url_source=url_source,
            scope=scope,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else _LEFT_TO_READER if root else "not-found",
            root=root,
            # Another container's folder says nothing of the files here.
            cwd=cwd if scope is Scope.SERVER else None,
            cwd_on_path=_imports_from_cwd(process.argv, environ),
            script=leading_script(_options(process.argv), cwd) if scope is Scope.SERVER else None,
            python_flags=_options(process.argv).flags,
            pid=process.pid,
            uid=uid,
            create_time=self._create_time(process),
            # A renamed process shows a title where its flags were: nothing is known of them.
            launch={} if process.argv[0].startswith("sglang::") else launch.flags,
            launch_source=None if process.argv[0].startswith("sglang::") else RUNNING,
            notes=None if process.argv[0].startswith("sglang::") else launch.notes,
            environ=environ,
            environ_missing=environ_missing,
            candidates=candidates,
            why=f"{why} Scope {scope.value}: {scope_why}.{_about_config(launch.notes.config)}",
        )

    def _config_reader(self, folder: str | None, uid: int | None = None) -> ReadConfig | None:
        """What reads the file of a ``--config`` flag, for the user who gave it; None below a root that is set."""
        if self._settings.server_root is not None:
            return None
        return lambda path: self._launch_files.read(path, folder, uid)

    def _create_time(self, process: _Process) -> float | None:
        """When a process started; the same number for one process, since it tells processes apart.

        The kernel derives the time of boot from the clock, which is adjusted by fractions of a second all the time.
        """
        started = procfs.start_time(self.proc, process.stat)
        same, known = (process.pid, process.stat.started_ticks), self._started
        if started is not None and known is not None and known[:2] == same and abs(known[2] - started) <= _CLOCK_JITTER:
            return known[2]
        self._started = None if started is None else (*same, started)
        return started

    def _shares(self, folder: Path, namespace: str) -> bool | None:
        """Whether a process is in the agent's own namespace of that kind; None when that may not be read."""
        theirs = procfs.read_link(folder / "ns" / namespace)
        ours = procfs.read_link(self.proc / "self" / "ns" / namespace)
        return None if theirs is None or ours is None else theirs == ours

    def _root_of(self, folder: Path, pid: int) -> tuple[bool, str | None, str]:
        """(it runs on the very files that we see, its root when that is another and may be entered, why)."""
        files = self._shares(folder, "mnt")
        if files is None:
            return False, None, f"its namespaces may not be read: {_why_denied(self.proc, pid, 'ns/mnt')}"
        changed_root = (procfs.read_link(folder / "root") or "/") != "/"
        if files and not changed_root:
            if self._shares(folder, "pid") is False:
                return False, None, "it shares our files but not our process namespace"
            return True, None, "it runs in our own mount and process namespaces"
        # Not entered here: whatever lies behind it may block for as long as its server pleases.
        if procfs.read_link(folder / "root") is None:
            why = _why_denied(self.proc, pid, "root")
            return False, None, f"its files are others than ours and may not be read: {why}"
        return False, str(folder / "root"), "its own files are read through its root"

    def _interpreter_of(
        self, process: _Process, environ: Mapping[str, str] | None, cwd: str | None
    ) -> _Interpreter | None:
        """The interpreter that a process on our own files was started with, as it was named.

        Never the ``exe`` link first: it shows the base interpreter, which does not reveal a virtual environment.
        """
        program = process.argv[0]
        if (named_path := _from_cwd(program, cwd)) is not None:
            return _Interpreter(path=named_path, source="argv0")
        for path in _on_path(program, environ):
            if os.path.lexists(path):
                return _Interpreter(path=path, source="server-path")
        virtual = (environ or {}).get("VIRTUAL_ENV", "")
        if virtual.startswith("/") and os.path.lexists(f"{virtual}/bin/python"):
            return _Interpreter(path=f"{virtual}/bin/python", source="virtual-env")
        mapped = self._mapped_prefix(process.pid)
        if mapped is not None and os.path.lexists(f"{mapped}/bin/python3"):
            return _Interpreter(path=f"{mapped}/bin/python3", source="maps")
        executable = procfs.read_link(self.proc / str(process.pid) / "exe")
        if executable is not None and is_python(executable):
            return _Interpreter(path=executable, source="exe")
        return None

    def _named_in(self, process: _Process, environ: Mapping[str, str] | None, cwd: str | None) -> _Interpreter | None:
        """The interpreter of a process on other files than ours, as far as names alone settle it.

        No path below that root is looked at: only the reader, a child with a deadline, resolves paths inside it.
        None leaves the search to the reader, which is better than a base interpreter without its environment.
        """
        program = process.argv[0]
        if (named_path := _from_cwd(program, cwd)) is not None:
            return _Interpreter(path=named_path, source="argv0")
        mapped = self._mapped_prefix(process.pid)
        if mapped is not None:
            return _Interpreter(path=f"{mapped}/bin/python3", source="maps")
        named = _on_path(program, environ)
        virtual = (environ or {}).get("VIRTUAL_ENV", "")
        if virtual.startswith("/") and (not named or f"{virtual}/bin/{program}" in named):
            return _Interpreter(path=f"{virtual}/bin/python", source="virtual-env")
        executable = procfs.read_link(self.proc / str(process.pid) / "exe")
        # In the first folder of the search path no virtual environment can have come before it.
        if executable and is_python(executable) and named and _folder(executable) == _folder(named[0]):
            return _Interpreter(path=executable, source="exe")
        return None

    def _mapped_prefix(self, pid: int) -> str | None:
        """The prefix of the environment whose kernels a process has mapped."""
        maps = procfs.read_text(self.proc / str(pid) / "maps", _MAPS_LIMIT) or ""
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
            python_source=interpreter.source if interpreter else self._unnamed_source(),
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

    def with_sglang(self, target: Target) -> str | None:
        """An interpreter of this image, another than the target's, that has SGLang beside it."""
        if target.root is not None:
            return None
        for path, _ in self._candidates({**self._environ, **(target.environ or {})}):
            shown = str("/" / path.relative_to(self._filesystem)) if self._filesystem != Path("/") else str(path)
            if shown != target.python and _is_executable(path) and _holds(path, ("sglang",)):
                return shown
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


def _listed(processes: Iterable[_Process]) -> str:
    return ", ".join(str(process.pid) for process in processes)


def _about_config(found: str | None) -> str:
    """What became of a configuration file, as a further sentence where its flags are not known."""
    return "" if found in {None, "read", "ignored"} else f" Its configuration file is not known ({found})."


def _program_of(launch: LaunchArguments) -> str | None:
    """The path of the program of a launch, its bare name where it is not found; None where none is known."""
    program, cwd = launch.known_program, launch.cwd or "/"
    if program is None:
        return None
    if "/" not in program:
        folders = launch.environ.get("PATH", os.defpath).split(":")
        found = shutil.which(program, path=":".join(str(Path(cwd, folder)) for folder in folders))
        return found or program
    path = Path(cwd, program)
    if ".." in path.parts:
        # The kernel goes up from where a link leads to.
        return str(Path(os.path.realpath(path.parent), path.name))
    # Links stay: that of a virtual environment tells it.
    return os.path.normpath(path)


def _may_be_entered(path: str) -> bool:
    try:
        return os.path.isdir(path) and os.access(path, os.X_OK)  # noqa: PTH112 - the answer is about a text
    except (OSError, ValueError):
        return False


def _script_text(path: str) -> str | None:
    """The text of a file that a shell of a launch reads commands from; only of a regular one of modest size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            content = file.read(_SCRIPT_LIMIT + 1)
        return content.decode() if len(content) <= _SCRIPT_LIMIT else None
    except (OSError, UnicodeDecodeError):
        return None


def _heeded(unseen: frozenset[str], options: PythonOptions) -> frozenset[str]:
    """Those of the variables that a program may take notice of: not a shell's own, nor what Python is to ignore."""
    return (frozenset(without_ignored(dict.fromkeys(unseen, ""), options.flags)) & unseen) - _OF_SHELLS


def variables(target: Target, *names: str) -> Mapping[str, str] | None:
    """The server's variables, where they are known as far as these names go: one that is not there is not set."""
    return target.environ if target.unseen.isdisjoint(names) else None


def _own_folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return None


def _module_launch(launch: LaunchArguments, environ: Mapping[str, str], options: PythonOptions) -> bool | None:
    """Whether a launch to come puts its working folder on the import path; None where its form does not tell."""
    if launch.form is LaunchForm.CONSOLE_SCRIPT:
        return False
    if launch.form is LaunchForm.MODULE and options != PythonOptions():
        return leads_with_cwd(options, environ)
    if environ.get("PYTHONSAFEPATH"):
        return False
    return True if launch.form is LaunchForm.MODULE else None


def _from_cwd(program: str, cwd: str | None) -> str | None:
    """The path of an interpreter that was started by a path: absolute, or relative to its working folder."""
    if not is_python(program) or "/" not in program:
        return None
    if program.startswith("/"):
        return program
    return None if cwd is None else f"{cwd.rstrip('/')}/{program.removeprefix('./')}"


def _why_denied(proc: Path, pid: int, field: str) -> str:
    """Why a link of a process may not be read, and what would allow it."""
    try:
        (proc / str(pid) / field).readlink()
    except OSError as error:
        reason = procfs.denial(proc, pid, field, error)
    else:
        reason = Denial.UNREADABLE  # it could not be read a moment ago
    # The remedy is a sentence of its own and this one goes on behind it.
    return f"{reason.sentence}. {reason.remedy}".strip().rstrip(".")


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
