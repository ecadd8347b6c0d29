"""A package that goes under a running server, as the static reader and the server's probe tell of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.environment.answer import facts_from
from sidecar.environment.facts import EnvironmentFacts
from sidecar.model import Answer, Finding, Processes, Scope, Target
from sidecar.probes.server.facts import ServerFacts, removed_since
from sidecar.probes.server.running import judge
from sidecar.processes import Role, ServerProcess, ServerProcesses
from sidecar.serverinfo import ServerObservation
from tests.fakes.reader import read
from tests.fakes.site import Site

FILES = {"flashinfer/__init__.py": "", "flashinfer/mamba/__init__.py": "x = 1\n"}
AGO = 600.0


@pytest.fixture(name="site")
def _site(tmp_path: Path) -> Site:
    """Installed well before the server started."""
    site = Site(tmp_path / "venv")
    site.install("flashinfer-python", "0.6.14", FILES)
    site.install("sglang", "0.5.16", {"sglang/__init__.py": "", "sglang/launch_server.py": "import sglang\n"})
    old = time.time() - 10 * AGO
    for path in (*site.root.rglob("*"), site.root):
        os.utime(path, (old, old), follow_symlinks=False)
    return site


def target(site: Site) -> Target:
    return Target(
        url="http://127.0.0.1:1",
        url_source="command-line",
        scope=Scope.SERVER,
        why="Found.",
        python=site.python,
        pid=7,
        create_time=time.time() - AGO,
    )


def environment(site: Site) -> EnvironmentFacts:
    return facts_from(read(site.python), target(site))


def found(site: Site, first: EnvironmentFacts | None) -> Finding:
    now = environment(site)
    facts = ServerFacts(
        target=target(site),
        observation=ServerObservation(answer=Answer.ACCEPTED, status=200),
        info=None,
        info_problem=None,
        processes=Processes.SHARED,
        every_process=True,
        nvidia_present=False,
        running=ServerProcesses(processes=(ServerProcess(pid=7, role=Role.MAIN),), replaced=()),
        changed_at=now.changed_at,
        removed=removed_since(first, now),
        incomplete=now.damaged,
    )
    return next(one for one in judge(facts, time.time()) if one.code == "server-runs-replaced-files")


def moved_away(site: Site) -> None:
    (site.packages / "flashinfer").rename(site.root / "flashinfer.away")


def one_file(site: Site) -> None:
    site.remove("flashinfer/mamba/__init__.py")


def uninstalled(site: Site) -> None:
    site.remove("flashinfer")
    site.remove("flashinfer_python-0.6.14.dist-info")


@pytest.mark.parametrize("change", [moved_away, one_file, uninstalled])
def test_what_went_while_the_agent_watched_is_told(site: Site, change: Callable[[Site], None]) -> None:
    """Although no file that is there is newer than the server's start."""
    first = environment(site)
    assert found(site, first).status == "false"
    change(site)
    told = found(site, first)
    assert (told.status, told.reason) == ("true", "changed-after-start")
    assert "flashinfer-python" in told.message


@pytest.mark.parametrize("change", [moved_away, one_file])
def test_what_went_before_the_agent_came_is_left_open(site: Site, change: Callable[[Site], None]) -> None:
    """It may have gone before the server started, unless the time of the folder says that it has."""
    change(site)
    told = found(site, None)
    assert (told.status, told.reason) == ("unknown", "files-gone")
    assert "flashinfer-python" in told.message
    old = time.time() - 10 * AGO
    for folder in (site.packages, *site.packages.rglob("flashinfer/mamba")):
        os.utime(folder, (old, old))
    assert found(site, None).status == "false"
