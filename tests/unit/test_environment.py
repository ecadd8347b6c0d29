"""`Environment`: one child for all probes, and every way in which reading can go wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sidecar.config import Settings
from sidecar.environment import InterpreterUnusable
from sidecar.imports import ImportOutcome
from sidecar.isolation import Isolation
from sidecar.model import Placement, ProbeCrash, ProbeTimeout, Scope, Skip, Target
from sidecar.requirements import Interpreter, read_lines
from tests.builders import FakeClock
from tests.fakes.site import RealClock, Site, good
from tests.fakes.sources import Sources, fake_proc


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
async def environment(isolation: Isolation) -> AsyncIterator[Sources]:
    one = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER)
    yield one
    await one.close()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An environment in which everything works."""
    return good(tmp_path / "venv")


# -- reading -----------------------------------------------------------------------------------------------


async def test_two_probes_share_one_reading(environment: Sources, site: Site) -> None:
    """Concurrent and soon repeated readings get the very same facts."""
    first, second = await asyncio.gather(environment.read(site.target()), environment.read(site.target()))
    assert first is second
    assert await environment.read(site.target()) is first


async def test_unchanged_environment_keeps_its_facts(isolation: Isolation, site: Site) -> None:
    """Once the cache has expired, an unchanged environment is confirmed and a changed one is read anew."""
    clock = FakeClock()
    environment = Sources(isolation, clock, Settings(), placement=Placement.CONTAINER)
    first = await environment.read(site.target())
    clock.now += 31
    assert await environment.read(site.target()) is first
    site.companion("flashinfer-cubin", "0.6.14")
    clock.now += 31
    assert (await environment.read(site.target())).distributions["flashinfer-cubin"] == "0.6.14"


async def test_a_cancelled_probe_does_not_take_the_reading_away(environment: Sources, site: Site) -> None:
    """One probe's deadline leaves the reading to the other."""
    first = asyncio.ensure_future(environment.read(site.target()))
    second = asyncio.ensure_future(environment.read(site.target()))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).flashinfer.kind == "package"


async def test_nothing_to_read_is_skipped(environment: Sources) -> None:
    """Without interpreter and root the question does not arise; the sentence says what to set."""
    with pytest.raises(Skip, match="set server_python"):
        await environment.read(Target(url="http://h", url_source="t", scope=Scope.SELF))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("/nonexistent/python", "missing"),
        ("/etc/passwd/python", "missing"),
        ("/", "folder"),
        ("/bin/true", "not-python"),
        ("/bin/cat", "not-python"),
        ("/etc/passwd", "not-executable"),
    ],
)
async def test_what_is_no_interpreter(environment: Sources, program: str, reason: str) -> None:
    """A server_python that does not exist or is no Python is one clear sentence (sgl-project/sglang#30612)."""
    target = Target(url="http://h", url_source="t", scope=Scope.IMAGE, python=program, python_source="setting")
    with pytest.raises(InterpreterUnusable) as raised:
        await environment.read(target)
    assert raised.value.reason == reason
    assert raised.value.sentence.startswith(f"The interpreter {program}, which the setting server_python names, ")
    assert str(raised.value).endswith("; correct server_python.")


async def test_an_interpreter_that_hangs(isolation: Isolation, tmp_path: Path) -> None:
    """An interpreter that never answers costs the deadline, names where, and is gone afterwards."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 600\n")
    script.chmod(0o755)
    settings = Settings(deadlines={"packages": 1.5})
    environment = Sources(isolation, RealClock(), settings, placement=Placement.CONTAINER)
    with pytest.raises(ProbeTimeout, match="did not answer within 1 s"):
        await environment.read(
            Target(url="http://h", url_source="t", scope=Scope.IMAGE, python=str(script), python_source="t")
        )


async def test_foreign_root_is_read_and_never_imported(environment: Sources, tmp_path: Path) -> None:
    """Through a foreign root files are read; an import is not allowed."""
    site = good(tmp_path / "root/opt/venv")
    target = site.target(root=str(tmp_path / "root"), python="/opt/venv/bin/python")
    facts = await environment.read(target)
    assert facts.distributions["flashinfer-python"] == "0.6.14"
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "foreign-root")
    assert not environment.import_due(facts, target)


# -- rights ---------------------------------------------------------------------------------------------------------

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can enter, which pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_reader_runs_as_the_servers_user(isolation: Isolation, open_folder: Path) -> None:
    """The server's interpreter is started as its user, with its groups, without capabilities or a way to gain any."""
    base = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if base is None:
        pytest.skip("needs an interpreter outside root's home")
    site = Site(open_folder / "venv", base=base)
    site.dependencies()
    site.flashinfer()
    told = open_folder / "told"
    told.mkdir()
    told.chmod(0o777)
    os.rename(site.python, f"{site.python}-real")
    Path(site.python).write_text(f'#!/bin/sh\ncat /proc/$$/status > {told}/status\nexec "$0-real" "$@"\n')
    Path(site.python).chmod(0o755)
    proc = fake_proc(open_folder, NOBODY, "ffffffffffffffff")
    environment = Sources(isolation, RealClock(), Settings(), placement=Placement.HOST, proc=proc)
    facts = await environment.read(site.target(pid=77))
    assert facts.flashinfer.kind == "package"
    status = dict(line.split(":", 1) for line in (told / "status").read_text().splitlines())
    assert status["Uid"].split() == status["Gid"].split() == [str(NOBODY)] * 4
    assert status["Groups"].split() == ["7"]
    assert [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")] == [0, 0, 0, 0]
    assert status["NoNewPrivs"].strip() == "1"


@pytest.mark.skipif(os.geteuid() != 0, reason="the rule is about an agent that is root without capabilities")
async def test_without_the_right_to_lower_itself_nothing_is_imported(isolation: Isolation, tmp_path: Path) -> None:
    """Root without CAP_SETUID reads another user's environment but runs nothing of it."""
    proc = fake_proc(tmp_path, NOBODY, "0000000000000000")
    environment = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, proc=proc)
    site = good(tmp_path / "venv")
    os.unlink(site.python)
    interpreter = Path(site.python)
    interpreter.write_text(f'#!/bin/sh\ntouch {tmp_path}/executed\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    target = site.target(pid=77)
    facts = await environment.read(target)
    assert facts.flashinfer.kind == "package"
    # Its owner would have been given root by our running it, were it only to read.
    assert not (tmp_path / "executed").exists()
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "privilege")


async def test_long_requirements_are_read_and_endless_ones_counted(isolation: Isolation, tmp_path: Path) -> None:
    """A requirement with a long marker arrives whole; one beyond what is parsed counts as unreadable, not as absent."""
    site = good(tmp_path / "venv")
    long = "torch==2.9.1; " + " or ".join(f'python_version == "3.{minor}"' for minor in range(60))
    endless = "numpy<2; " + " or ".join(f'python_version == "3.{minor}"' for minor in range(600))
    cut = f"scipy @ https://host/{'x' * 5000}"
    site.dist("sglang", "0.5.16", (long, endless, cut))
    sources = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER)
    facts = await sources.read(site.target())
    assert facts.requires[0] == long
    lines = read_lines(facts.requires, Interpreter(python_version="3.11"))
    assert lines.unreadable == 2


async def test_requirements_past_any_number_are_counted(isolation: Isolation, tmp_path: Path) -> None:
    """Of more lines than are taken the rest counts as one that could not be read; a folded line is one line."""
    site = good(tmp_path / "venv")
    folded = "torch==2.9.1;\n        python_version < '3.0'"
    site.dist("sglang", "0.5.16", (folded, *(f"package{number}" for number in range(700))))
    sources = Sources(isolation, RealClock())
    facts = await sources.read(site.target())
    assert facts.requires[0] == "torch==2.9.1; python_version < '3.0'"
    lines = read_lines(facts.requires, Interpreter(python_version="3.11"))
    assert (len(facts.requires), lines.unreadable) == (500, 1)
    assert "torch" not in {one.package for one in lines.asked}


async def test_what_python_is_required_is_read_whole_or_not_at_all(isolation: Isolation, tmp_path: Path) -> None:
    """A cut specifier would say something else."""
    found = []
    for count in (30, 300):
        site = good(tmp_path / f"venv{count}")
        site.dist("sglang", "0.5.16", ("numpy",))
        stated = ">=3.8" + "".join(f", !=3.9.{number}" for number in range(count))
        metadata = site.packages / "sglang-0.5.16.dist-info/METADATA"
        metadata.write_text(f"Requires-Python: {stated}\n{metadata.read_text()}")
        facts = await Sources(isolation, RealClock()).read(site.target())
        found.append(facts.requires_python.get("sglang") == stated)
    assert found == [True, False]
    assert facts.requires_python == {}


async def test_a_login_in_a_requirement_is_not_read(isolation: Isolation, tmp_path: Path) -> None:
    """A requirement may name a place to install from, and whoever wrote it a password in front of that."""
    site = good(tmp_path / "venv")
    site.dist("sglang", "0.5.16", ("flashinfer-python @ https://me:marker@host/x.whl",))
    facts = await Sources(isolation, RealClock()).read(site.target())
    assert facts.requires == ("flashinfer-python @ https://***@host/x.whl",)
    assert read_lines(facts.requires, Interpreter(python_version="3.11")).unreadable == 0


@pytest.mark.parametrize("key", ["stage", "exec_error", "none"])
async def test_a_hostile_interpreter_puts_no_lines_into_a_sentence(
    isolation: Isolation, tmp_path: Path, key: str
) -> None:
    """What stands in the interpreter's place chooses neither the length nor the lines of what is told of it."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys, json, time\nsaid = 'a\\n\\x1b[2Jb' + 'x' * 5000\n"
        "print(said, flush=True)\n"
        f"os.write(int(sys.argv[-1]), json.dumps({{{key!r}: said}}).encode() + b'\\n')\n"
        f"time.sleep({600 if key == 'stage' else 0})\n"
    )
    script.chmod(0o755)
    sources = Sources(isolation, RealClock(), Settings(deadlines={"packages": 1.5}))
    target = Target(url="http://h", url_source="t", scope=Scope.IMAGE, python=str(script), python_source="t")
    with pytest.raises((ProbeCrash, ProbeTimeout, InterpreterUnusable)) as caught:
        await sources.read(target)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 800
