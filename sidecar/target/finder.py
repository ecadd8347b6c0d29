"""The search for the server, from a launch to come to a server of which nothing is seen."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sidecar.config import Settings
from sidecar.model import Clock, Processes, Scope, Standing, Target
from sidecar.offload import in_daemon_thread
from sidecar.target.address import url_source
from sidecar.target.choosing import Choice, choose
from sidecar.target.configuration import ConfigFiles
from sidecar.target.image import ImageInterpreters
from sidecar.target.interpreters import set_by_hand, unnamed_source
from sidecar.target.preflight import preflight
from sidecar.target.running import RunningServers
from sidecar.target.scanning import scan

_KEEP_SECONDS: Final = 5.0
"""How long a found target is reused: the probes of one round share it."""


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
        self._image = ImageInterpreters(settings, standing, environ=environ, prefix=prefix, filesystem=filesystem)
        self._configs = ConfigFiles(settings)
        self._servers = RunningServers(settings, self._image, self._configs, proc=proc)
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

    def with_sglang(self, target: Target) -> str | None:
        """An interpreter of this image, another than the target's, that has SGLang beside it."""
        return self._image.with_sglang(target)

    async def _look(self) -> Target:
        target = await in_daemon_thread(self._find)
        self._found, self._found_at = target, self._clock.monotonic()
        return target

    def _find(self) -> Target:
        if self._settings.launch:
            return preflight(self._settings, self._image, self._configs, self._environ)
        choice = Choice(why="")
        # Hidden means that not every server can be seen. One that is seen is none the worse for it.
        if self._settings.processes is not Processes.HIDDEN:
            choice = choose(scan(self._settings, self.proc), self._settings, self.proc)
        if choice.process is not None:
            return self._servers.target(choice.process, choice.why)
        why = choice.why
        if self._standing.processes is Processes.HIDDEN:
            why = f"{why} The server's processes may be hidden: {self._standing.processes_why}.".lstrip()
        return self._unseen(choice.candidates, why)

    def _unseen(self, candidates: tuple[int, ...], why: str) -> Target:
        """What is known of a server of which no process is in sight."""
        interpreter = set_by_hand(self._settings) or self._image.unless_own()
        root = self._settings.server_root
        if root is not None:
            scope, scope_why = Scope.IMAGE, "server_root is set"
        elif interpreter is not None:
            scope, scope_why = Scope.IMAGE, f"an interpreter of the image is known ({interpreter.source})"
        else:
            scope, scope_why = Scope.SELF, "no interpreter with SGLang or FlashInfer was found outside the agent's own"
        return Target(
            url=self._settings.server_url,
            url_source=url_source(self._settings),
            scope=scope,
            python=interpreter.path if interpreter else None,
            python_source=interpreter.source if interpreter else unnamed_source(self._settings),
            root=root,
            environ_missing="no-process" if self._standing.processes is Processes.SHARED else "processes-hidden",
            candidates=candidates,
            why=f"{why} Scope {scope.value}: {scope_why}.",
        )
