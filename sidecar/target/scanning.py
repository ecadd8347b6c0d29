"""The processes that may be a server, by their command lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from sidecar import procfs
from sidecar.config import Settings
from sidecar.launch.forms import LaunchForm, is_shell, server_form

_PATTERN_LIMIT: Final = 1024
"""Characters of a command line that ``server_pattern`` is held against. A search cannot be interrupted and keeps the
whole agent waiting, and what a pattern with several wildcards costs grows with a power of the text's length."""
_RETITLED_MAIN: Final = "sglang::http_server"
"""What SGLang 0.5.2 renames its main process to; other releases leave that one alone."""


class ServerProcess(Struct, frozen=True, kw_only=True):
    """A process that may be the server. ``argv`` may hold secrets: it never leaves this package."""

    pid: int
    argv: tuple[str, ...]
    stat: procfs.ProcessStat
    form: LaunchForm


def scan(settings: Settings, proc: Path) -> list[ServerProcess]:
    """The processes that may be a server's main one, parents of others only once."""
    pattern = re.compile(settings.server_pattern) if settings.server_pattern else None
    found: dict[int, ServerProcess] = {}
    parents: dict[int, int] = {}
    own = int(procfs.read_link(proc / "self") or os.getpid())
    for pid in procfs.pids(proc):
        if settings.server_pid not in {None, pid}:
            continue
        stat = procfs.process_stat(proc, pid)
        if stat is None:
            continue
        parents[pid] = stat.parent
        argv = () if stat.ended else procfs.command_line(proc, pid)
        if pid == own or not argv or not argv[0]:
            continue
        form = _form(settings, pid, argv, pattern)
        if form is not None:
            found[pid] = ServerProcess(pid=pid, argv=argv, stat=stat, form=form)
    # A process that is about to become something else still shows its parent's command line.
    return [process for process in found.values() if not _descends(process.pid, parents, {*found, own})]


def _form(settings: Settings, pid: int, argv: tuple[str, ...], pattern: re.Pattern[str] | None) -> LaunchForm | None:
    if pid == settings.server_pid:
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
