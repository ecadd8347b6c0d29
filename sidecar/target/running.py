"""A server that runs: what its process tells, and where its files and its interpreter are to be looked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from sidecar import procfs
from sidecar.config import Settings
from sidecar.launch.args import parse_launch
from sidecar.model import Scope, Target
from sidecar.pythonflags import leading_script, leads_with_cwd
from sidecar.target.address import address_of
from sidecar.target.configuration import ConfigFiles, about_config
from sidecar.target.facts import LEFT_TO_READER, RUNNING
from sidecar.target.image import ImageInterpreters
from sidecar.target.interpreters import Interpreter, set_by_hand
from sidecar.target.invocation import folder_of, interpreter_of, named_in, on_path, options_of
from sidecar.target.namespaces import Files, files_of
from sidecar.target.scanning import ServerProcess

_CLOCK_JITTER: Final = 5.0
"""Seconds by which the time of boot, and with it every start time, may move while the clock is adjusted."""


class _Place(Struct, frozen=True, kw_only=True):
    """The interpreter that stands for the server's, the root that it is in, and what it then shows of the server."""

    interpreter: Interpreter | None
    root: str | None = None
    scope: Scope
    why: str


class RunningServers:
    """Tells of servers what their processes show, and remembers when the last one started."""

    def __init__(self, settings: Settings, image: ImageInterpreters, configs: ConfigFiles, *, proc: Path) -> None:
        self._settings = settings
        self._image = image
        self._configs = configs
        self._proc = proc
        self._started: tuple[int, int, float] | None = None

    def target(self, process: ServerProcess, why: str) -> Target:
        """The server whose main process this is; ``why`` says why it is this one."""
        folder = self._proc / str(process.pid)
        environ, environ_missing = procfs.environment(self._proc, process.pid)
        files = files_of(self._proc, process.pid)
        cwd = folder_of(procfs.read_link(folder / "cwd"), procfs.read_link(folder / "root"))
        uid = _user(self._proc, process.pid)
        # A file of the server is looked at only where its files are ours.
        reader = self._configs.reader(cwd, uid) if files.ours and uid is not None else None
        launch = parse_launch(process.argv, reader)
        url, url_source = address_of(process, self._settings, self._proc, launch.flags)
        place = self._place(process, files, environ, cwd)
        interpreter = place.interpreter
        options = options_of(process.argv)
        # A renamed process shows a title where its flags were: nothing is known of them.
        renamed = process.argv[0].startswith("sglang::")
        return Target(
            url=url,
            url_source=url_source,
            scope=place.scope,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else LEFT_TO_READER if place.root else "not-found",
            root=place.root,
            # Another container's folder says nothing of the files here.
            cwd=cwd if place.scope is Scope.SERVER else None,
            cwd_on_path=leads_with_cwd(options, environ),
            script=leading_script(options, cwd) if place.scope is Scope.SERVER else None,
            python_flags=options.flags,
            pid=process.pid,
            uid=uid,
            create_time=self._create_time(process),
            launch={} if renamed else launch.flags,
            launch_source=None if renamed else RUNNING,
            notes=None if renamed else launch.notes,
            environ=environ,
            environ_missing=environ_missing,
            why=f"{why} Scope {place.scope.value}: {place.why}.{about_config(launch.notes.config)}",
        )

    def _place(
        self, process: ServerProcess, files: Files, environ: Mapping[str, str] | None, cwd: str | None
    ) -> _Place:
        """Decide where the server's files and its interpreter are read: what is set comes before what is seen."""
        root = self._settings.server_root
        by_hand = set_by_hand(self._settings)
        named = interpreter_of if files.root is None else named_in
        theirs = named(self._proc, process, environ, cwd)
        here = None
        if by_hand is None and not files.ours:
            here = self._image.like(theirs, on_path(process.argv[0], environ))
        if root is not None:
            return _Place(interpreter=by_hand or theirs, root=root, scope=Scope.SERVER, why="server_root is set")
        if files.ours and (by_hand or theirs):
            return _Place(interpreter=by_hand or theirs, scope=Scope.SERVER, why=files.why)
        if by_hand is not None:
            return _Place(interpreter=by_hand, scope=Scope.IMAGE, why="server_python is set")
        if here is not None:
            why = "the server's interpreter and its packages are in this image too"
            return _Place(interpreter=here, scope=Scope.IMAGE, why=why)
        if files.root is not None:
            return _Place(interpreter=theirs, root=files.root, scope=Scope.SERVER, why=files.why)
        found = self._image.unless_own()
        return _Place(interpreter=found, scope=Scope.IMAGE if found else Scope.SELF, why=files.why)

    def _create_time(self, process: ServerProcess) -> float | None:
        """When a process started; the same number for one process, since it tells processes apart.

        The kernel derives the time of boot from the clock, which is adjusted by fractions of a second all the time.
        """
        started = procfs.start_time(self._proc, process.stat)
        same, known = (process.pid, process.stat.started_ticks), self._started
        if started is not None and known is not None and known[:2] == same and abs(known[2] - started) <= _CLOCK_JITTER:
            return known[2]
        self._started = None if started is None else (*same, started)
        return started


def _user(proc: Path, pid: int) -> int | None:
    """The user id of a process; None when it cannot be read.

    None too where it has several: then somebody else than the user it acts for may have chosen its command line.
    """
    status = procfs.process_status(proc, pid)
    ids = set() if status is None else set(status.uids)
    return ids.pop() if len(ids) == 1 else None
