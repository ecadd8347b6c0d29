"""`Environment`: one child for both probes, one import per state of the environment, and every way it can end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.config import Settings
from sidecar.environment import Environment, ImportEvidence, ImportLimits, ImportOutcome
from sidecar.isolation import Isolation
from sidecar.memory import MemoryLimit, MemoryReading
from sidecar.model import Placement, ProbeCrash, ProbeTimeout, Scope, Skip, Target
from tests.builders import FakeClock
from tests.fakes.site import RealClock, Site, good

QUICK = ImportLimits(stall=1.0, cap=3.0, sample=0.05)
"""For imports that never end; one that should end could be starved by these on a busy machine."""
NO_LIMIT = MemoryLimit(cgroup=Path("/nonexistent"))


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
async def environment(isolation: Isolation) -> AsyncIterator[Environment]:
    one = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    yield one
    await one.close()


@pytest.fixture
async def impatient(isolation: Isolation) -> AsyncIterator[Environment]:
    """An environment that gives up on an import within seconds."""
    one = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT, limits=QUICK)
    yield one
    await one.close()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An environment whose import leaves a mark: one line per import, with what it saw."""
    site = good(tmp_path / "venv")
    site.flashinfer(mamba=RECORDER)
    return site


RECORDER = """
import json, os
with open(os.path.join(os.path.dirname(__file__), "seen"), "a") as file:
    print(json.dumps({"environ": dict(os.environ), "uid": os.getuid(), "nice": os.nice(0)}), file=file)
"""


def seen(site: Site) -> list[dict[str, object]]:
    path = site.packages / "flashinfer/mamba/seen"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def imported(environment: Environment, target: Target) -> ImportEvidence:
    """The evidence of an import, running one where it is due."""
    facts = await environment.read(target)
    if environment.import_due(facts, target):
        environment.request_import(facts, target, lambda: None)
        await environment.wait_import()
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    return evidence


async def of(environment: Environment, root: Path, code: str) -> ImportEvidence:
    """The evidence of importing ``code``."""
    site = good(root / "venv")
    site.flashinfer(mamba=code)
    return await imported(environment, site.target())


# -- reading -----------------------------------------------------------------------------------------------


async def test_two_probes_share_one_reading(environment: Environment, site: Site) -> None:
    """Concurrent and soon repeated readings get the very same facts."""
    first, second = await asyncio.gather(environment.read(site.target()), environment.read(site.target()))
    assert first is second
    assert await environment.read(site.target()) is first


async def test_unchanged_environment_keeps_its_facts(isolation: Isolation, site: Site) -> None:
    """Once the cache has expired, an unchanged environment is confirmed and a changed one is read anew."""
    clock = FakeClock()
    environment = Environment(isolation, clock, Settings(), placement=Placement.CONTAINER)
    first = await environment.read(site.target())
    clock.now += 31
    assert await environment.read(site.target()) is first
    site.companion("flashinfer-cubin", "0.6.14")
    clock.now += 31
    assert (await environment.read(site.target())).distributions["flashinfer-cubin"] == "0.6.14"


async def test_a_cancelled_probe_does_not_take_the_reading_away(environment: Environment, site: Site) -> None:
    """One probe's deadline leaves the reading to the other."""
    first = asyncio.ensure_future(environment.read(site.target()))
    second = asyncio.ensure_future(environment.read(site.target()))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).flashinfer.kind == "package"


async def test_nothing_to_read_is_skipped(environment: Environment) -> None:
    """Without interpreter and root the question does not arise; the sentence says what to set."""
    with pytest.raises(Skip, match="set server_python"):
        await environment.read(Target(url="http://h", url_source="t", scope=Scope.SELF))


@pytest.mark.parametrize("program", ["/nonexistent/python", "/", "/bin/true", "/bin/cat", "/etc/passwd"])
async def test_what_is_no_interpreter(environment: Environment, program: str) -> None:
    """A server_python that does not exist or is no Python is one clear sentence (sgl-project/sglang#30612)."""
    target = Target(url="http://h", url_source="t", scope=Scope.IMAGE, python=program, python_source="server_python")
    with pytest.raises(ProbeCrash, match=r"\(server_python\).*set server_python"):
        await environment.read(target)


async def test_an_interpreter_that_hangs(isolation: Isolation, tmp_path: Path) -> None:
    """An interpreter that never answers costs the deadline, names where, and is gone afterwards."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 600\n")
    script.chmod(0o755)
    settings = Settings(deadlines={"packages": 1.5})
    environment = Environment(isolation, RealClock(), settings, placement=Placement.CONTAINER)
    with pytest.raises(ProbeTimeout, match="did not answer within 1 s"):
        await environment.read(
            Target(url="http://h", url_source="t", scope=Scope.IMAGE, python=str(script), python_source="t")
        )


async def test_foreign_root_is_read_and_never_imported(environment: Environment, tmp_path: Path) -> None:
    """Through a foreign root files are read; an import is not allowed."""
    site = good(tmp_path / "root/opt/venv")
    target = site.target(root=str(tmp_path / "root"), python="/opt/venv/bin/python")
    facts = await environment.read(target)
    assert facts.distributions["flashinfer-python"] == "0.6.14"
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "foreign-root")
    assert not environment.import_due(facts, target)


# -- importing: when ------------------------------------------------------------------------------------------


async def test_an_unchanged_environment_is_imported_once(isolation: Isolation, site: Site) -> None:
    """Evidence holds while the environment stays the same, and for a day at most."""
    clock = FakeClock()
    environment = Environment(
        isolation, clock, Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT, limits=ImportLimits(sample=0.05)
    )
    for _ in range(3):
        assert (await imported(environment, site.target())).outcome is ImportOutcome.OK
        clock.now += 3600
    assert len(seen(site)) == 1
    clock.now += 24 * 3600
    await imported(environment, site.target())
    assert len(seen(site)) == 2


@pytest.mark.parametrize("change", ["files", "variable"])
async def test_evidence_of_another_state_is_dropped(isolation: Isolation, site: Site, change: str) -> None:
    """A changed file or a changed relevant variable makes earlier evidence void; an irrelevant one does not."""
    clock = FakeClock()
    environment = Environment(isolation, clock, Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    target = site.target()
    await imported(environment, target)
    other = replace(target, environ={**(target.environ or {}), "UNRELATED": "1"})
    assert environment.import_evidence(await environment.read(other), other) is not None
    if change == "files":
        site.write("flashinfer/mamba/extra.py", "x = 1\n")
        clock.now += 31
    else:
        target = replace(target, environ={**(target.environ or {}), "FLASHINFER_LOGLEVEL": "5"})
    facts = await environment.read(target)
    assert environment.import_evidence(facts, target) is None
    assert environment.import_due(facts, target)


async def test_one_import_at_a_time_and_a_call_at_its_end(environment: Environment, site: Site) -> None:
    """A second request while one runs is none; its end is announced once, when nothing runs any more."""
    ended: list[bool] = []
    target = site.target()
    facts = await environment.read(target)
    for _ in range(3):
        environment.request_import(facts, target, lambda: ended.append(environment.importing))
    assert environment.importing
    assert await environment.wait_import()
    await asyncio.sleep(0.01)
    assert ended == [False]
    assert len(seen(site)) == 1
    assert not await environment.wait_import()


async def test_the_heavy_slot_is_shared(environment: Environment, isolation: Isolation, site: Site) -> None:
    """An import waits for whatever other expensive child is running."""
    target = site.target()
    facts = await environment.read(target)
    async with isolation.heavy:
        environment.request_import(facts, target, lambda: None)
        await asyncio.sleep(0.3)
        assert not seen(site)
    await environment.wait_import()
    assert len(seen(site)) == 1


async def test_a_bad_outcome_is_tried_again_sooner(isolation: Isolation, tmp_path: Path) -> None:
    """A failure may rest on something outside the fingerprint: it is renewed hourly, a success daily."""
    clock = FakeClock()
    environment = Environment(isolation, clock, Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    site = good(tmp_path / "venv")
    site.flashinfer(mamba="raise ImportError('x')")
    facts = await environment.read(site.target())
    await imported(environment, site.target())
    assert not environment.import_due(facts, site.target())
    clock.now += 3601
    assert environment.import_due(facts, site.target())


# -- importing: how ---------------------------------------------------------------------------------------------


async def test_the_child_gets_the_servers_environment_without_secrets(environment: Environment, site: Site) -> None:
    """Secrets and preloads stay out; GPUs are hidden; homes and caches are private and gone afterwards."""
    planted = {
        "HF_TOKEN": "SECRET-DO-NOT-EXPORT",
        "AWS_SECRET_ACCESS_KEY": "SECRET-DO-NOT-EXPORT",
        "DB_PASSWORD": "SECRET-DO-NOT-EXPORT",
        "LD_PRELOAD": "/nonexistent.so",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "FLASHINFER_WORKSPACE_BASE": "/server/cache",
        "FLASHINFER_LOGLEVEL": "1",
    }
    base = site.target()
    evidence = await imported(environment, replace(base, environ={**(base.environ or {}), **planted}))
    assert evidence.outcome is ImportOutcome.OK
    [mark] = seen(site)
    environ = mark["environ"]
    assert isinstance(environ, dict)
    assert "SECRET-DO-NOT-EXPORT" not in json.dumps(mark)
    assert "LD_PRELOAD" not in environ
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert environ["FLASHINFER_LOGLEVEL"] == "1"
    private = environ["HOME"]
    assert private != str(site.root)
    for name in ("TMPDIR", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR"):
        assert environ[name].startswith(private)
    assert not os.path.exists(private)
    assert environ["PYTHONUSERBASE"] == f"{site.root}/.local"
    assert (environ["PYTHONDONTWRITEBYTECODE"], environ["OMP_NUM_THREADS"]) == ("1", "1")
    assert mark["nice"] == 10
    assert not list(site.packages.glob("flashinfer/__pycache__"))


async def test_user_site_survives_the_private_home(environment: Environment, tmp_path: Path) -> None:
    """What was installed with pip install --user stays importable (Dao-AILab/flash-attention#2310)."""
    venv = Site(tmp_path / "venv", system=True)
    home = tmp_path / "home"
    user = home / ".local" / venv.packages.relative_to(venv.root)
    donor = good(tmp_path / "donor")
    shutil.copytree(donor.packages, user)
    target = venv.target(environ={"HOME": str(home)})
    assert (await imported(environment, target)).outcome is ImportOutcome.OK


async def test_a_hang_is_a_timeout_with_its_stage(impatient: Environment, tmp_path: Path) -> None:
    """An import that sleeps for ever is ended for want of progress, and the stage is named."""
    evidence = await of(impatient, tmp_path, "import time; time.sleep(600)")
    assert (evidence.outcome, evidence.stage) == (ImportOutcome.TIMEOUT, "import flashinfer.jit")


async def test_polling_a_lock_is_no_progress(impatient: Environment, tmp_path: Path) -> None:
    """A loop that wakes now and then, as for a leftover lock file, counts as hung."""
    evidence = await of(impatient, tmp_path, "import time\nwhile True: time.sleep(0.05)")
    assert evidence.outcome is ImportOutcome.TIMEOUT


async def test_busy_to_the_cap_is_starved(impatient: Environment, tmp_path: Path) -> None:
    """An import that is busy for longer than the cap is unknown, not a fault."""
    evidence = await of(impatient, tmp_path, "while True: pass")
    assert evidence.outcome is ImportOutcome.STARVED


async def test_work_of_descendants_is_progress(impatient: Environment, tmp_path: Path) -> None:
    """A compiler that the import waits for keeps it from counting as hung; at the cap it is starved."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    assert (await of(impatient, tmp_path, code)).outcome is ImportOutcome.STARVED


@pytest.mark.parametrize(
    ("code", "outcome", "ending"),
    [
        ("import os; os._exit(5)", ImportOutcome.CRASHED, 5),
        ("import os; os.abort()", ImportOutcome.CRASHED, "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", ImportOutcome.CRASHED, "SIGSEGV"),
        # flashinfer-ai/flashinfer#4889: out of memory in the probe is no fault of the environment
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ImportOutcome.INSUFFICIENT_MEMORY, None),
        ("raise MemoryError", ImportOutcome.INSUFFICIENT_MEMORY, None),
        ("import sys; sys.exit(3)", ImportOutcome.FAILED, None),
    ],
)
async def test_ways_to_end(
    environment: Environment, tmp_path: Path, code: str, outcome: ImportOutcome, ending: int | str | None
) -> None:
    """Each way in which the child can end has its own outcome, with the signal or exit status where it crashed."""
    evidence = await of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.signal or evidence.exit_code) == (outcome, ending)


async def test_noise_is_bounded_and_kept_apart(environment: Environment, tmp_path: Path) -> None:
    """A flood on stdout changes nothing about the verdict."""
    evidence = await of(environment, tmp_path, "for _ in range(20000): print('noise ' * 20)")
    assert (evidence.outcome, evidence.tail) == (ImportOutcome.OK, "")


async def test_closing_ends_the_import(isolation: Isolation, tmp_path: Path) -> None:
    """close() leaves neither the child nor its folder."""
    environment = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    site = good(tmp_path / "venv")
    site.flashinfer(mamba=RECORDER + "\nimport time; time.sleep(600)")
    target = site.target()
    facts = await environment.read(target)
    environment.request_import(facts, target, lambda: None)
    for _ in range(200):
        await asyncio.sleep(0.05)
        if seen(site):
            break
    [mark] = seen(site)
    environ = mark["environ"]
    assert isinstance(environ, dict)
    assert os.path.isdir(environ["HOME"])
    await environment.close()
    assert not os.path.exists(environ["HOME"])
    assert not environment.importing


# -- memory -------------------------------------------------------------------------------------------------------


class Cgroup:
    """A fake control group, version 1 or 2, under a fake /proc."""

    def __init__(self, root: Path, version: int, limit: str, used: int, cache: int = 0) -> None:
        self.version = version
        self.proc = root / "proc"
        self.mount = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        line = "0::/pod/box\n" if version == 2 else "11:cpu:/\n4:memory:/pod/box\n0::/\n"
        (self.proc / "self/cgroup").write_text(line)
        self.group = self.mount / ("pod/box" if version == 2 else "memory/pod/box")
        self.group.mkdir(parents=True)
        names = ("memory.max", "inactive_file") if version == 2 else ("memory.limit_in_bytes", "total_inactive_file")
        (self.group / names[0]).write_text(f"{limit}\n")
        (self.group / "memory.stat").write_text(f"anon 1\n{names[1]} {cache}\n")
        self.use(used)

    def use(self, used: int) -> None:
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        (self.group / name).write_text(f"{used}\n")

    def limit(self) -> MemoryLimit:
        return MemoryLimit(proc=self.proc, cgroup=self.mount)


MIB = 1024 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_memory_counts_without_idle_file_pages(tmp_path: Path, version: int) -> None:
    """What the kernel can give back at once does not count as used."""
    group = Cgroup(tmp_path, version, str(2048 * MIB), used=1000 * MIB, cache=400 * MIB)
    assert group.limit().read() == MemoryReading(limit=2048 * MIB, used=600 * MIB)


@pytest.mark.parametrize(("version", "limit"), [(1, "9223372036854771712"), (2, "max"), (2, "garbage"), (2, "")])
def test_no_limit_is_no_reading(tmp_path: Path, version: int, limit: str) -> None:
    """An unlimited group, or one that says nothing sensible, limits nothing."""
    assert Cgroup(tmp_path, version, limit, used=5).limit().read() is None


def test_the_tightest_parent_counts(tmp_path: Path) -> None:
    """A parent with less room than the group itself decides."""
    group = Cgroup(tmp_path, 2, str(4096 * MIB), used=100 * MIB)
    (group.group.parent / "memory.max").write_text(str(1000 * MIB))
    (group.group.parent / "memory.current").write_text(str(900 * MIB))
    reading = group.limit().read()
    assert reading is not None
    assert reading.free == 100 * MIB


async def test_no_import_without_room(isolation: Isolation, tmp_path: Path, site: Site) -> None:
    """With less than 1.2 GiB below the limit no child is started at all."""
    memory = Cgroup(tmp_path / "c", 2, str(2000 * MIB), used=900 * MIB).limit()
    environment = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=memory)
    assert (await imported(environment, site.target())).outcome is ImportOutcome.INSUFFICIENT_MEMORY
    assert not seen(site)


async def test_an_import_that_nears_the_limit_is_ended(isolation: Isolation, tmp_path: Path) -> None:
    """At 90 % of the limit the child is ended before the kernel ends everything."""
    group = Cgroup(tmp_path / "c", 1, str(2000 * MIB), used=100 * MIB)
    environment = Environment(
        isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=group.limit(), limits=QUICK
    )
    usage = group.group / "memory.usage_in_bytes"
    code = f"open({str(usage)!r}, 'w').write('{1900 * MIB}'); import time; time.sleep(600)"
    assert (await of(environment, tmp_path, code)).outcome is ImportOutcome.INSUFFICIENT_MEMORY


async def test_a_flood_of_results_says_nothing_about_the_server(environment: Environment, tmp_path: Path) -> None:
    """An import that floods the private channel is ended, and is neither a success nor a fault."""
    code = """
import glob, os
for entry in os.listdir("/proc/self/fd"):
    try:
        if os.readlink("/proc/self/fd/" + entry).startswith("socket:") and int(entry) > 2:
            while True:
                os.write(int(entry), b'{"stage": "again"}\\n' * 100)
    except OSError:
        pass
"""
    evidence = await of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "flood")


# -- rights ---------------------------------------------------------------------------------------------------------

NOBODY = 65534
REPORTER = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
raise ValueError([os.getuid(), os.getgid(), os.getgroups(), status["CapEff"].strip(), status["NoNewPrivs"].strip()])
"""


def fake_proc(root: Path, uid: int, capabilities: str) -> Path:
    ids = "\t".join([str(uid)] * 4)
    for name, text in (
        ("77/status", f"Name:\tpython\nUid:\t{ids}\nGid:\t{ids}\nGroups:\t7 \n"),
        ("self/status", f"CapEff:\t{capabilities}\n"),
    ):
        path = root / "proc" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return root / "proc"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can enter, which pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_import_runs_as_the_servers_user(isolation: Isolation, open_folder: Path) -> None:
    """The child has the server's user, group and groups, no capabilities and no way to gain any."""
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if python is None:
        pytest.skip("needs an interpreter outside root's home")
    site = Site(open_folder / "venv", base=python)
    site.dependencies()
    site.flashinfer(mamba=REPORTER)
    environment = Environment(
        isolation,
        RealClock(),
        Settings(),
        placement=Placement.CONTAINER,
        memory=NO_LIMIT,
        proc=fake_proc(open_folder, NOBODY, "ffffffffffffffff"),
    )
    evidence = await imported(environment, site.target(pid=77))
    assert evidence.message == f"[{NOBODY}, {NOBODY}, [7], '{0:016x}', '1']"
    assert evidence.same_user


@pytest.mark.skipif(os.geteuid() != 0, reason="the rule is about an agent that is root without capabilities")
async def test_without_the_right_to_lower_itself_nothing_is_imported(isolation: Isolation, tmp_path: Path) -> None:
    """Root without CAP_SETUID reads another user's environment but runs nothing of it."""
    proc = fake_proc(tmp_path, NOBODY, "0000000000000000")
    environment = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, proc=proc)
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
