"""`Importer`: one import per state of the environment, what the child gets, and every way in which it can end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.environment import DriverLibrary, LibraryFile
from sidecar.imports import FLASHINFER_MAMBA, ImportLimits, ImportOutcome, ImportWork
from sidecar.isolation import Isolation
from sidecar.memory import MemoryReading
from sidecar.model import Placement
from tests.builders import FakeClock
from tests.fakes.cgroups import MIB, Cgroup
from tests.fakes.site import RealClock, Site, good
from tests.fakes.sources import NO_LIMIT, Sources, fake_proc, import_of, imported

QUICK = ImportLimits(stall=1.0, cap=3.0, sample=0.05)
"""For imports that never end; one that should end could be starved by these on a busy machine."""


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
async def environment(isolation: Isolation) -> AsyncIterator[Sources]:
    one = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    yield one
    await one.close()


@pytest.fixture
async def impatient(isolation: Isolation) -> AsyncIterator[Sources]:
    """An environment that gives up on an import within seconds."""
    one = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT, limits=QUICK)
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


# -- importing: when ------------------------------------------------------------------------------------------


async def test_an_unchanged_environment_is_imported_once(isolation: Isolation, site: Site) -> None:
    """Evidence holds while the environment stays the same, and for a day at most."""
    clock = FakeClock()
    environment = Sources(
        isolation, clock, Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT, limits=ImportLimits(sample=0.05)
    )
    for _ in range(3):
        assert (await imported(environment, site.target())).outcome is ImportOutcome.OK
        clock.now += 3600
    assert len(seen(site)) == 1
    clock.now += 24 * 3600
    await imported(environment, site.target())
    assert len(seen(site)) == 2


@pytest.mark.parametrize("change", ["files", "variable", "driver"])
async def test_evidence_of_another_state_is_dropped(isolation: Isolation, site: Site, change: str) -> None:
    """A changed file or a changed relevant variable makes earlier evidence void; an irrelevant one does not."""
    clock = FakeClock()
    environment = Sources(isolation, clock, Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    target = site.target()
    await imported(environment, target)
    other = replace(target, environ={**(target.environ or {}), "UNRELATED": "1"})
    assert environment.import_evidence(await environment.read(other), other) is not None
    if change == "files":
        site.write("flashinfer/mamba/extra.py", "x = 1\n")
        clock.now += 31
    elif change == "variable":
        target = replace(target, environ={**(target.environ or {}), "FLASHINFER_LOGLEVEL": "5"})
    facts = await environment.read(target)
    if change == "driver":
        # It is mounted beside the environment's own files, and no part of their fingerprint.
        facts = replace(facts, libcuda=DriverLibrary(found=(LibraryFile(path="/lib/libcuda.so.1", version="580.1"),)))
    assert environment.import_evidence(facts, target) is None
    assert environment.import_due(facts, target)


async def test_one_import_at_a_time_and_a_call_at_its_end(environment: Sources, site: Site) -> None:
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


async def test_the_heavy_slot_is_shared(environment: Sources, isolation: Isolation, site: Site) -> None:
    """An import waits for whatever other expensive child is running."""
    target = site.target()
    facts = await environment.read(target)
    async with isolation.heavy:
        environment.request_import(facts, target, lambda: None)
        await asyncio.sleep(0.3)
        assert not seen(site)
    await environment.wait_import()
    assert len(seen(site)) == 1


async def test_several_modules_wait_for_their_turn(environment: Sources, site: Site) -> None:
    """Works that are requested together run one after the other, and each keeps an outcome of its own."""
    site.write("slow.py", f"import time; began = time.time(); time.sleep(0.5)\n{STAMP}")
    site.write("other.py", f"import time; began = time.time()\n{STAMP}")
    works = [ImportWork("slow"), ImportWork("other"), ImportWork("absent")]
    target = site.target()
    facts = await environment.read(target)
    imports = environment.imports
    for work in works:
        imports.request(work, facts, target, lambda: None)
    assert [imports.importing(work) for work in works] == [True, True, True]
    assert await imports.wait()
    found = [imports.evidence(work, facts, target) for work in works]
    assert [one and one.outcome for one in found] == [ImportOutcome.OK, ImportOutcome.OK, ImportOutcome.FAILED]
    spans = sorted(json.loads(path.read_text()) for path in site.packages.glob("*.span"))
    assert spans[0][1] <= spans[1][0]
    assert imports.evidence(FLASHINFER_MAMBA, facts, target) is None


STAMP = """
import json
with open(__file__ + ".span", "w") as file:
    json.dump([began, time.time()], file)
"""


async def test_a_bad_outcome_is_tried_again_sooner(isolation: Isolation, tmp_path: Path) -> None:
    """A failure may rest on something outside the fingerprint: it is renewed hourly, a success daily."""
    clock = FakeClock()
    environment = Sources(isolation, clock, Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
    site = good(tmp_path / "venv")
    site.flashinfer(mamba="raise ImportError('x')")
    facts = await environment.read(site.target())
    await imported(environment, site.target())
    assert not environment.import_due(facts, site.target())
    clock.now += 3601
    assert environment.import_due(facts, site.target())


# -- importing: how ---------------------------------------------------------------------------------------------


async def test_the_child_gets_the_servers_environment_without_secrets(environment: Sources, site: Site) -> None:
    """Secrets and preloads stay out; GPUs are hidden; homes and caches are private and gone afterwards."""
    planted = {
        "HF_TOKEN": "SECRET-DO-NOT-EXPORT",
        "AWS_SECRET_ACCESS_KEY": "SECRET-DO-NOT-EXPORT",
        "DB_PASSWORD": "SECRET-DO-NOT-EXPORT",
        "LD_PRELOAD": "/nonexistent.so",
        "PROMETHEUS_MULTIPROC_DIR": "/server/metrics",
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
    # Metrics of the import would mix into the server's (sgl-project/sglang sets it when metrics are on).
    assert not {"LD_PRELOAD", "PROMETHEUS_MULTIPROC_DIR"} & environ.keys()
    assert environ["CUDA_VISIBLE_DEVICES"] == ""
    assert environ["FLASHINFER_LOGLEVEL"] == "1"
    private = environ["HOME"]
    assert private != str(site.root)
    for name in ("TMPDIR", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR"):
        assert environ[name].startswith(private)
    assert not os.path.exists(private)
    assert environ["PYTHONUSERBASE"] == f"{site.root}/.local"
    assert (environ["PYTHONDONTWRITEBYTECODE"], environ["OMP_NUM_THREADS"]) == ("1", "1")
    assert mark["nice"] == min(19, os.nice(0) + 10)
    assert not list(site.packages.glob("flashinfer/__pycache__"))


@pytest.mark.parametrize(("devices", "seen_by_child"), [(False, ""), (True, "0,1")])
async def test_gpus_are_hidden_unless_opted_in(
    isolation: Isolation, site: Site, devices: bool, seen_by_child: str
) -> None:
    """By default the GPUs are hidden from the import; on request it sees those of the server. Evidence says which."""
    environment = Sources(isolation, RealClock(), memory=NO_LIMIT, with_devices=devices)
    base = site.target()
    target = replace(base, environ={**(base.environ or {}), "CUDA_VISIBLE_DEVICES": "0,1"})
    site.write("torch/cuda.py", "def is_initialized(): return True\ndef is_available(): return True\n")
    evidence = await imported(environment, target)
    [mark] = seen(site)
    environ = mark["environ"]
    assert isinstance(environ, dict)
    assert environ["CUDA_VISIBLE_DEVICES"] == seen_by_child
    # With the GPUs hidden, torch's answer to whether there is one says nothing, and is not asked for.
    assert (evidence.devices_hidden, evidence.cuda_available) == (not devices, True if devices else None)


async def test_a_hang_is_a_timeout_with_its_stage(impatient: Sources, tmp_path: Path) -> None:
    """An import that sleeps for ever is ended for want of progress, and the stage is named."""
    evidence = await import_of(impatient, tmp_path, "import time; time.sleep(600)")
    assert (evidence.outcome, evidence.stage) == (ImportOutcome.TIMEOUT, "import flashinfer.jit")


async def test_polling_a_lock_is_no_progress(impatient: Sources, tmp_path: Path) -> None:
    """A loop that wakes now and then, as for a leftover lock file, counts as hung."""
    evidence = await import_of(impatient, tmp_path, "import time\nwhile True: time.sleep(0.05)")
    assert evidence.outcome is ImportOutcome.TIMEOUT


async def test_a_pause_of_the_agent_is_no_hang(isolation: Isolation, tmp_path: Path) -> None:
    """When the agent itself stood still, as in a paused container, the child gets time to show what it does."""
    clock = FakeClock()
    environment = Sources(isolation, clock, memory=NO_LIMIT, limits=ImportLimits(sample=0.05))
    site = good(tmp_path / "venv")
    site.flashinfer(mamba=RECORDER + "\nimport time; time.sleep(1)")
    target = site.target()
    facts = await environment.read(target)
    environment.request_import(facts, target, lambda: None)
    while not seen(site):
        await asyncio.sleep(0.02)
    clock.now += 3600
    await environment.wait_import()
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    assert evidence.outcome is ImportOutcome.OK


async def test_busy_to_the_cap_is_starved(impatient: Sources, tmp_path: Path) -> None:
    """An import that is busy for longer than the cap is unknown, not a fault."""
    evidence = await import_of(impatient, tmp_path, "while True: pass")
    assert evidence.outcome is ImportOutcome.STARVED


async def test_what_told_nothing_goes_last_and_waits_longer(isolation: Isolation, tmp_path: Path) -> None:
    """An import that computed to the cap says so; its next try comes after all others, and later each time."""
    clock = RealClock()
    limits = ImportLimits(stall=1.0, cap=2.0, sample=0.05, retry_soon=1.0)
    environment = Sources(isolation, clock, memory=NO_LIMIT, limits=limits)
    site = good(tmp_path / "venv")
    site.write("loop.py", "while True: pass\n")
    site.write("quick.py", "")
    loop, quick = ImportWork("loop"), ImportWork("quick")
    target, imports = site.target(), environment.imports
    facts = await environment.read(target)
    ended: list[str] = []
    imports.request(loop, facts, target, lambda: ended.append("loop"))
    await imports.wait()
    evidence = imports.evidence(loop, facts, target)
    assert evidence is not None
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.STARVED, "busy")
    assert not imports.due(loop, facts, target) or clock.time() - evidence.at >= 2 * limits.retry_soon
    imports.request(loop, facts, target, lambda: ended.append("loop"))
    imports.request(quick, facts, target, lambda: ended.append("quick"))
    while await imports.wait():
        await asyncio.sleep(0)
    assert ended == ["loop", "quick", "loop"]


async def test_an_import_that_changes_its_own_files_comes_to_rest(isolation: Isolation, tmp_path: Path) -> None:
    """Packages that are another after each import are imported a few times, and then only now and then."""
    clock = FakeClock()
    environment = Sources(isolation, clock, memory=NO_LIMIT)
    site = good(tmp_path / "venv")
    site.flashinfer(mamba=f"with open(__file__, 'a') as file: file.write('#')\n{RECORDER}")
    target = site.target()
    runs = []
    for _ in range(8):
        facts = await environment.read(target)
        due = environment.import_due(facts, target)
        runs.append(due)
        if due:
            environment.request_import(facts, target, lambda: None)
            await environment.wait_import()
        clock.now += 60
    assert runs == [True] * 3 + [False] * 5
    clock.now += 600
    assert environment.import_due(await environment.read(target), target)


async def test_what_never_ends_and_never_stays_the_same_does_not_hold_the_slot(
    isolation: Isolation, tmp_path: Path
) -> None:
    """An import that computes to the cap and leaves another environment behind is not due again at once for ever."""
    clock = FakeClock()
    limits = ImportLimits(stall=0.2, cap=0.4, sample=0.05, retry_soon=600.0)
    environment = Sources(isolation, clock, memory=NO_LIMIT, limits=limits)
    site = good(tmp_path / "venv")
    site.flashinfer(mamba="with open(__file__, 'a') as file: file.write('#')\nwhile True: pass")
    target, begun = site.target(), []
    for minute in range(0, 80, 4):
        facts = await environment.read(target)
        if environment.import_due(facts, target):
            begun.append(minute)
            environment.request_import(facts, target, lambda: None)
            await environment.wait_import()
        clock.now += 240
    # Twice at once, then after 10, 20 and 40 minutes.
    assert begun == [0, 4, 16, 36, 76]


async def test_a_server_that_ends_is_no_other_environment(isolation: Isolation, tmp_path: Path) -> None:
    """Its process is gone before the target is looked for anew: what was imported for it still holds for the next."""
    clock = FakeClock()
    proc = fake_proc(tmp_path, os.geteuid(), "0")
    environment = Sources(isolation, clock, memory=NO_LIMIT, proc=proc)
    target = good(tmp_path / "venv").target(pid=77)
    facts = await environment.read(target)
    assert environment.import_due(facts, target)
    environment.request_import(facts, target, lambda: None)
    await environment.wait_import()
    (proc / "77" / "status").unlink()
    assert not environment.import_due(await environment.read(target), target)
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    assert evidence.outcome is ImportOutcome.OK


async def test_what_settles_is_imported_at_once_again(isolation: Isolation, tmp_path: Path) -> None:
    """Changes that come now and then, each with an outcome that held, never have to wait."""
    clock = FakeClock()
    environment = Sources(isolation, clock, memory=NO_LIMIT)
    site = good(tmp_path / "venv")
    target = site.target()
    for number in range(6):
        site.write("flashinfer/mamba/extra.py", f"x = {number}\n" * (number + 1))
        clock.now += 61
        facts = await environment.read(target)
        assert environment.import_due(facts, target)
        await imported(environment, target)
        clock.now += 61
        assert not environment.import_due(await environment.read(target), target)


async def test_short_processes_are_progress(isolation: Isolation, tmp_path: Path) -> None:
    """An import that waits for one compiler after another, each gone before anybody looks, is neither hung nor idle."""
    limits = ImportLimits(stall=2.0, cap=6.0, sample=0.05)
    environment = Sources(isolation, RealClock(), memory=NO_LIMIT, limits=limits)
    work = "import time\nwhile time.process_time() < 0.2: pass"
    code = f"import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-I', '-S', '-c', {work!r}])"
    evidence = await import_of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.STARVED, "busy")
    assert evidence.seconds is not None
    assert evidence.seconds >= 6.0


async def test_work_of_descendants_is_progress(impatient: Sources, tmp_path: Path) -> None:
    """A compiler that the import waits for keeps it from counting as hung; at the cap it is starved."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    assert (await import_of(impatient, tmp_path, code)).outcome is ImportOutcome.STARVED


async def test_closing_ends_the_import(isolation: Isolation, tmp_path: Path) -> None:
    """close() leaves neither the child nor its folder."""
    environment = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=NO_LIMIT)
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


@pytest.mark.parametrize(
    ("version", "name", "text", "count"),
    [
        (2, "memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0\n", 3),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 2),
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", None),
        (2, "memory.events", "", None),
        (2, "other", "oom_kill 1\n", None),
    ],
)
def test_kills_are_counted_where_the_kernel_does(
    tmp_path: Path, version: int, name: str, text: str, count: int | None
) -> None:
    """The kernel's count of what it ended for want of memory, or nothing where it has none."""
    group = Cgroup(tmp_path, version, "max", used=5)
    (group.group / name).write_text(text)
    assert group.limit().kills() == count


async def test_no_import_without_room(isolation: Isolation, tmp_path: Path, site: Site) -> None:
    """With less than 1.2 GiB below the limit no child is started at all."""
    memory = Cgroup(tmp_path / "c", 2, str(2000 * MIB), used=900 * MIB).limit()
    environment = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=memory)
    assert (await imported(environment, site.target())).outcome is ImportOutcome.INSUFFICIENT_MEMORY
    assert not seen(site)


async def test_an_import_that_nears_the_limit_is_ended(isolation: Isolation, tmp_path: Path) -> None:
    """At 90 % of the limit the child is ended before the kernel ends everything."""
    group = Cgroup(tmp_path / "c", 1, str(2000 * MIB), used=100 * MIB)
    environment = Sources(
        isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=group.limit(), limits=QUICK
    )
    usage = group.group / "memory.usage_in_bytes"
    code = f"open({str(usage)!r}, 'w').write('{1900 * MIB}'); import time; time.sleep(600)"
    assert (await import_of(environment, tmp_path, code)).outcome is ImportOutcome.INSUFFICIENT_MEMORY


# -- rights ---------------------------------------------------------------------------------------------------------

NOBODY = 65534
REPORTER = """
import os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
capabilities = [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
adjusted = open("/proc/self/oom_score_adj").read().strip()
raise ValueError([os.getresuid(), os.getresgid(), os.getgroups(), capabilities, status["NoNewPrivs"].strip(), adjusted])
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can enter, which pytest's own cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_import_runs_as_the_servers_user(isolation: Isolation, open_folder: Path) -> None:
    """On a host the child has the server's user, group and groups, no capabilities and no way to gain any."""
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if python is None:
        pytest.skip("needs an interpreter outside root's home")
    site = Site(open_folder / "venv", base=python)
    site.dependencies()
    site.flashinfer(mamba=REPORTER)
    environment = Sources(
        isolation,
        RealClock(),
        Settings(),
        placement=Placement.HOST,
        memory=NO_LIMIT,
        proc=fake_proc(open_folder, NOBODY, "ffffffffffffffff"),
    )
    evidence = await imported(environment, site.target(pid=77))
    ids = (NOBODY, NOBODY, NOBODY)
    assert evidence.message == str([ids, ids, [7], [0, 0, 0, 0], "1", "1000"])
    assert evidence.same_user
