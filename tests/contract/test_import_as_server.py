"""The import happens as the server would do it; where it does not, it says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.imports import ImportOutcome
from sidecar.isolation import Isolation
from sidecar.pythonflags import leading_script, leads_with_cwd, python_options
from tests.fakes.site import RealClock, Site, good
from tests.fakes.sources import NO_LIMIT, Sources, import_of, imported


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
async def environment(isolation: Isolation) -> AsyncIterator[Sources]:
    one = Sources(isolation, RealClock(), memory=NO_LIMIT)
    yield one
    await one.close()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An environment in which everything works."""
    return good(tmp_path / "venv")


# -- its import path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "outcome"), [(True, ImportOutcome.FAILED), (False, ImportOutcome.OK)])
async def test_the_servers_folder_leads_the_import_path(
    environment: Sources, tmp_path: Path, first: bool, outcome: ImportOutcome
) -> None:
    """A module in the server's folder shadows the installed one with python -m, and only then."""
    site = good(tmp_path / "venv")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/requests.py").write_text("raise ImportError('shadow')\n")
    target = site.target(cwd=str(tmp_path / "work"), cwd_on_path=first)
    assert (await imported(environment, target)).outcome is outcome


@pytest.mark.parametrize(("name", "outcome"), [("launch.py", ImportOutcome.FAILED), ("link", ImportOutcome.OK)])
async def test_the_servers_script_leads_the_import_path(
    environment: Sources, tmp_path: Path, name: str, outcome: ImportOutcome
) -> None:
    """A module beside the script that the server was started by shadows the installed one; a link is followed."""
    site = good(tmp_path / "venv")
    for folder in ("work", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "launch.py").touch()
    (tmp_path / "work/requests.py").write_text("raise ImportError('shadow')\n")
    (tmp_path / "work/link").symlink_to(tmp_path / "elsewhere/launch.py")
    assert (await imported(environment, site.target(script=str(tmp_path / "work" / name)))).outcome is outcome


async def test_evidence_is_of_one_way_to_start(environment: Sources, tmp_path: Path) -> None:
    """Another folder, script or flag makes another import path, for which an earlier outcome says nothing."""
    site = good(tmp_path / "venv")
    await imported(environment, site.target(cwd="/"))
    for changes in ({"cwd": "/", "cwd_on_path": True}, {"cwd": "/", "script": "/x.py"}, {"python_flags": ("-s",)}):
        target = site.target(**changes)
        assert environment.import_evidence(await environment.read(target), target) is None


@pytest.mark.parametrize(
    ("needed", "reason"),
    [({"cwd_on_path": True}, "cannot-enter-folder"), ({"PYTHONPATH": "/x:"}, "cannot-enter-folder"), ({}, None)],
)
async def test_a_folder_that_cannot_be_entered_allows_no_claim(
    environment: Sources, tmp_path: Path, needed: dict[str, Any], reason: str | None
) -> None:
    """Where the child cannot be in the server's folder, and it is on its import path, nothing is claimed."""
    base = good(tmp_path / "venv").target(cwd=str(tmp_path / "gone"), cwd_on_path="cwd_on_path" in needed)
    path = {"PYTHONPATH": needed["PYTHONPATH"]} if "PYTHONPATH" in needed else {}
    evidence = await imported(environment, replace(base, environ={**(base.environ or {}), **path}))
    assert evidence.reason == reason
    assert evidence.outcome is (ImportOutcome.OK if reason is None else ImportOutcome.NOT_ALLOWED)


SWITCHES = [
    # switches and variables; what of: site-packages, the user's packages, PYTHONPATH, working folder, script's folder
    ((), {}, "site user path cwd script"),
    (("-E",), {}, "site user cwd script"),
    (("-s",), {}, "site path cwd script"),
    (("-S",), {}, "path cwd script"),
    (("-I",), {}, "site"),
    (("-P",), {}, "site user path"),
    (("-s", "-P"), {}, "site path"),
    ((), {"PYTHONSAFEPATH": "1"}, "site user path"),
    ((), {"PYTHONNOUSERSITE": "1"}, "site path cwd script"),
    (("-E",), {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}, "site user cwd script"),
]


@pytest.mark.parametrize(("flags", "variables", "found"), SWITCHES)
async def test_packages_are_found_where_the_server_finds_them(
    isolation: Isolation, tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], found: str
) -> None:
    """Whatever keeps the server from a place keeps the reading and the import from it, and nothing else does."""
    donor = good(tmp_path / "donor")
    for place in ("site", "user", "path", "cwd", "script"):
        venv = Site(tmp_path / place / "venv", system=True)
        home = tmp_path / place / "home"
        home.mkdir()
        inside = {"site": venv.packages, "user": home / ".local" / venv.packages.relative_to(venv.root)}
        folder = inside.get(place, tmp_path / place / "folder")
        shutil.copytree(donor.packages, folder, dirs_exist_ok=True)
        environ = {"PATH": os.defpath, "HOME": str(home), **variables}
        environ |= {"PYTHONPATH": str(folder)} if place == "path" else {}
        options = python_options([*flags, *([str(folder / "run.py")] if place == "script" else ["-m", "run"])])
        cwd = str(folder if place == "cwd" else home)
        target = venv.target(
            environ=environ,
            cwd=cwd,
            cwd_on_path=leads_with_cwd(options, environ),
            script=leading_script(options, cwd),
            python_flags=options.flags,
        )
        environment = Sources(isolation, RealClock(), memory=NO_LIMIT)
        kind = (await environment.read(target)).flashinfer.kind
        outcome = (await imported(environment, target)).outcome
        expected = ("package", ImportOutcome.OK) if place in found.split() else ("absent", ImportOutcome.FAILED)
        assert (kind, outcome) == expected, place


@pytest.mark.parametrize(("flags", "outcome"), [(("-E",), ImportOutcome.OK), (("-E", "-s"), ImportOutcome.FAILED)])
async def test_user_packages_are_found_without_variables(
    environment: Sources, tmp_path: Path, flags: tuple[str, ...], outcome: ImportOutcome
) -> None:
    """With -E the user's packages are found by the home folder, which is private here; with -s they are not."""
    venv = Site(tmp_path / "venv", system=True)
    home = tmp_path / "home"
    donor = good(tmp_path / "donor")
    shutil.copytree(donor.packages, home / ".local" / venv.packages.relative_to(venv.root))
    target = venv.target(environ={"HOME": str(home)}, python_flags=flags)
    assert (await imported(environment, target)).outcome is outcome


async def test_user_site_survives_the_private_home(environment: Sources, tmp_path: Path) -> None:
    """What was installed with pip install --user stays importable (Dao-AILab/flash-attention#2310)."""
    venv = Site(tmp_path / "venv", system=True)
    home = tmp_path / "home"
    user = home / ".local" / venv.packages.relative_to(venv.root)
    donor = good(tmp_path / "donor")
    shutil.copytree(donor.packages, user)
    target = venv.target(environ={"HOME": str(home)})
    assert (await imported(environment, target)).outcome is ImportOutcome.OK


# -- what was otherwise, and whose it was -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import os; assert 'PYTHONPATH' not in os.environ",
        "import sys; assert sys.flags.ignore_environment and sys.dont_write_bytecode",
    ],
)
async def test_what_the_server_ignores_is_not_withheld(environment: Sources, tmp_path: Path, code: str) -> None:
    """Variables that the server's interpreter is told to ignore are neither given nor missed."""
    site = good(tmp_path / "venv")
    site.flashinfer(mamba=code)
    environ = {"PATH": os.defpath, "HOME": "/", "PYTHONPATH": "/nonexistent", "PYTHONMALLOC": "debug"}
    evidence = await imported(environment, site.target(environ=environ, python_flags=("-E",)))
    assert (evidence.outcome, evidence.withheld) == (ImportOutcome.OK, ())


async def test_what_is_withheld_is_that_of_the_server_of_now(environment: Sources, site: Site) -> None:
    """A server that came back without a preload misses none, though the import was before that."""
    base = site.target()
    less = base.environ or {}
    first = await imported(environment, replace(base, environ={**less, "LD_PRELOAD": "/libtcmalloc.so"}))
    again = await imported(environment, base)
    assert (first.withheld, again.withheld) == (("LD_PRELOAD",), ())
    assert again.at == first.at


async def test_what_was_withheld_is_named(environment: Sources, site: Site) -> None:
    """The names of the variables that the import did not get are told, and never a value."""
    base = site.target()
    planted = {"LD_PRELOAD": "/libtcmalloc.so", "PROMETHEUS_MULTIPROC_DIR": "/m", "MY_TOKEN": "marker", "SHLVL": "1"}
    evidence = await imported(environment, replace(base, environ={**(base.environ or {}), **planted}))
    assert evidence.withheld == ("LD_PRELOAD", "MY_TOKEN", "PROMETHEUS_MULTIPROC_DIR")
    assert "marker" not in repr(evidence)


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("import os; open(os.environ['HOME'] + '/absent')", True),
        (
            "import os; raise ImportError(os.environ['TMPDIR'] + '/x.so: failed to map segment from shared object')",
            True,
        ),
        ("raise OSError(28, 'No space left on device')", True),
        ("raise OSError(28, 'No space left on device', '/server/file')", False),
        ("raise ImportError('x')", False),
        ("import os; raise ImportError('cannot map', path=os.environ['HOME'] + '/x/a.so')", True),
        # Wrapped by whoever asked for the file, the place is named by the error behind.
        (
            "try:\n    raise OSError(28, 'No space left on device', '/x')\nexcept OSError:\n    raise ValueError",
            False,
        ),
        (
            "try:\n    raise OSError(122, 'Disk quota exceeded')\nexcept OSError as e:\n    raise ValueError from e",
            True,
        ),
        ("import os; raise ImportError(os.environ['HOME'] + '/.local/lib/python3/site-packages/x.so: no')", False),
    ],
)
async def test_a_failure_in_the_private_folder_says_so(
    environment: Sources, tmp_path: Path, code: str, private: bool
) -> None:
    """What fails in the folder that only the child has, or for want of room there, may not fail for the server."""
    evidence = await import_of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.private) == (ImportOutcome.FAILED, private)


async def test_secrets_are_in_no_text(environment: Sources, tmp_path: Path) -> None:
    """A secret that the code got hold of by another way stands in no text of the evidence."""
    secret = "s3cr3t-marker-value"
    other = f"redis://:{secret}2@host/0"
    site = good(tmp_path / "venv")
    site.flashinfer(
        mamba=f"print({secret!r}, flush=True)\ntry:\n    raise OSError({secret!r})\n"
        f"except OSError as e:\n    raise ImportError({other!r} + 'x' * 5950 + {secret!r}) from e"
    )
    base = site.target()
    environ = {**(base.environ or {}), "SGLANG_DB_PWD": secret, "SGLANG_REDIS_URL": other}
    evidence = await imported(environment, replace(base, environ=environ))
    assert evidence.outcome is ImportOutcome.FAILED
    assert "s3cr3t" not in repr(evidence)
