"""Each way in which an import can end: what is the module's fault, and what says nothing of it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence, ImportLimits, ImportOutcome
from sidecar.isolation import Isolation
from tests.fakes.cgroups import MIB, Cgroup
from tests.fakes.interpreters import available
from tests.fakes.site import RealClock, Site, good, version_of
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


@pytest.mark.parametrize(
    ("code", "outcome", "ending"),
    [
        ("import os; os._exit(5)", ImportOutcome.CRASHED, 5),
        ("import os; os.abort()", ImportOutcome.CRASHED, "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", ImportOutcome.CRASHED, "SIGSEGV"),
        # Memory was not short: what ended it is not known.
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ImportOutcome.NOT_ALLOWED, "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", ImportOutcome.NOT_ALLOWED, "SIGXCPU"),
        ("raise MemoryError", ImportOutcome.NOT_ALLOWED, None),
        ("class Sized(MemoryError): pass\nraise Sized", ImportOutcome.NOT_ALLOWED, None),
        (
            "try:\n    raise MemoryError\nexcept MemoryError as e:\n    raise ImportError from e",
            ImportOutcome.NOT_ALLOWED,
            None,
        ),
        ("import os; os._exit(0)", ImportOutcome.NOT_ALLOWED, 0),
        ("import sys; sys.exit(3)", ImportOutcome.FAILED, None),
    ],
)
async def test_ways_to_end(
    environment: Sources, tmp_path: Path, code: str, outcome: ImportOutcome, ending: int | str | None
) -> None:
    """Each way in which the child can end has its own outcome, with the signal or exit status where it crashed."""
    evidence = await import_of(environment, tmp_path, code)
    assert evidence.outcome is outcome
    assert (evidence.exit_code if evidence.signal is None else evidence.signal) == ending


@pytest.mark.parametrize("code", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "raise MemoryError"])
async def test_short_memory_explains_a_kill(isolation: Isolation, tmp_path: Path, code: str) -> None:
    """Killed while the limit was near, it lacked memory, which is no fault (flashinfer-ai/flashinfer#4889)."""
    group = Cgroup(tmp_path / "c", 1, str(8000 * MIB), used=100 * MIB)
    environment = Sources(isolation, RealClock(), memory=group.limit(), limits=ImportLimits(sample=0.05))
    usage = group.group / "memory.usage_in_bytes"
    code = f"open({str(usage)!r}, 'w').write('{6500 * MIB}'); import time; time.sleep(1); {code}"
    assert (await import_of(environment, tmp_path, code)).outcome is ImportOutcome.INSUFFICIENT_MEMORY


@pytest.mark.parametrize("group", [(2, "memory.events"), (1, "memory.oom_control")])
@pytest.mark.parametrize("more", [1, 0])
async def test_the_kernels_count_explains_a_kill(
    isolation: Isolation, tmp_path: Path, group: tuple[int, str], more: int
) -> None:
    """Where the kernel counts what it ends for want of memory that decides, however full the group looked."""
    version, name = group
    fake = Cgroup(tmp_path / "c", version, str(8000 * MIB), used=6500 * MIB)
    events = fake.group / name
    events.write_text("oom_kill 3\n")
    limits = ImportLimits(sample=0.05)
    environment = Sources(isolation, RealClock(), memory=fake.limit(), limits=limits)
    told = f"open({str(events)!r}, 'w').write('oom_kill {3 + more}')"
    evidence = await import_of(
        environment, tmp_path, f"{told}; import os, time; time.sleep(0.3); os.kill(os.getpid(), 9)"
    )
    expected = (ImportOutcome.INSUFFICIENT_MEMORY, None) if more else (ImportOutcome.NOT_ALLOWED, "killed")
    assert (evidence.outcome, evidence.reason) == expected


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """A resource limit of this process, which its children have as well."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


async def test_a_limit_of_the_agents_is_not_the_servers(environment: Sources, tmp_path: Path) -> None:
    """What the agent's own limits keep an import from says nothing of the server: too little memory, or CPU time."""
    with limited(resource.RLIMIT_DATA, 4 << 30):
        evidence = await import_of(environment, tmp_path / "memory", "x = bytearray(8 << 30)")
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.INSUFFICIENT_MEMORY, "rlimit")
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    with limited(resource.RLIMIT_CPU, int(used) + 600):
        code = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1 << 20))\nwhile True: pass"
        evidence = await import_of(environment, tmp_path / "cpu", code)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "rlimit")
    assert evidence.signal == "SIGXCPU"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.closerange(3, 1 << 17)",
        "import os; os.closerange(3, 1 << 17); [open(os.devnull, 'w') for _ in range(50)]; held = os.dup(1)",
    ],
)
async def test_a_closed_channel_is_no_crash(environment: Sources, tmp_path: Path, code: str) -> None:
    """Code that closes every descriptor, the probe's too, leaves no answer: that is unknown, and no crash."""
    evidence = await import_of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "no-answer")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.closerange(3, 1024)",
        "import time, json; time.monotonic = json.dumps = None; del json.dumps",
        "import builtins; builtins.isinstance = builtins.str = builtins.len = builtins.sorted = lambda *a, **k: 1 / 0",
        "import sys; sys.modules.pop('flashinfer.mamba'); __all__ = 5",
    ],
)
async def test_what_the_probe_needs_is_its_own(environment: Sources, tmp_path: Path, code: str) -> None:
    """Builtins, clocks and descriptors that the import takes away do not keep the probe from its answer."""
    evidence = await _ending_with(environment, tmp_path, code)
    assert evidence.outcome is not ImportOutcome.CRASHED
    assert evidence.reason is None


@pytest.mark.parametrize(
    "code",
    [
        # Whatever is asked of modules after the import is asked of code that may do anything.
        "class Lazy:\n    def __getattribute__(self, name): raise SystemExit\nsys.modules['tvm_ffi'] = Lazy()",
        "sys.modules['torch'].version.cuda = float('inf')",
        "a = []; a.append(a); sys.modules['torch'].version.cuda = a",
        "sys.modules['torch'].cuda.is_initialized = os.abort",
        # A copy of the process that comes back from the import says nothing, be it first or last.
        "pid = os.fork()\nif pid == 0: sys.exit(1)\nos.waitpid(pid, 0)",
        "if os.fork() == 0:\n    time.sleep(0.02)\n    raise ValueError('copy')",
    ],
)
async def test_what_follows_an_import_does_not_undo_it(environment: Sources, tmp_path: Path, code: str) -> None:
    """An import that succeeded has, whatever the questions after it meet, and whatever a copy of the process does."""
    evidence = await _ending_with(environment, tmp_path, f"import os, sys, time\n{code}")
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.OK, None)


async def _ending_with(environment: Sources, root: Path, code: str) -> ImportEvidence:
    """The evidence of importing a module that ends with this code."""
    site = good(root / "venv")
    path = site.packages / "flashinfer/mamba/__init__.py"
    path.write_text(f"{path.read_text()}\n{code}\n")
    return await imported(environment, site.target())


async def test_numbers_of_any_kind_arrive(environment: Sources, tmp_path: Path) -> None:
    """An error number that shows itself as something else is a number nevertheless."""
    code = "import enum\nclass Code(enum.IntEnum):\n    IO = 5\nraise OSError(Code.IO, 'x')"
    evidence = await import_of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.errno) == (ImportOutcome.FAILED, 5)


@pytest.mark.parametrize("changed", ["argv = ['x']", "stderr = None", "stdout = sys.stdin = None"])
async def test_what_a_start_changes_does_not_confuse_the_probe(
    environment: Sources, tmp_path: Path, changed: str
) -> None:
    """A sitecustomize that replaces sys.argv or the standard streams leaves the import as it is."""
    site = good(tmp_path / "venv")
    site.write("sitecustomize.py", f"import sys; sys.{changed}\n")
    assert (await imported(environment, site.target())).outcome is ImportOutcome.OK


async def test_a_module_of_a_library_name_is_met_by_the_import_alone(environment: Sources, tmp_path: Path) -> None:
    """A json.py on PYTHONPATH does not break the probe, only what imports it."""
    site = good(tmp_path / "venv")
    (tmp_path / "shadow").mkdir()
    for name in ("json", "glob"):
        (tmp_path / f"shadow/{name}.py").write_text("raise ValueError('shadow')\n")
    target = site.target(environ={"PATH": os.defpath, "HOME": "/", "PYTHONPATH": str(tmp_path / "shadow")})
    assert (await imported(environment, target)).outcome is ImportOutcome.OK


@pytest.mark.parametrize("case", ["exits", "crashes", "home"])
async def test_an_interpreter_that_does_not_start_is_no_fault_of_the_module(
    environment: Sources, tmp_path: Path, case: str
) -> None:
    """What ends the interpreter before anything is imported has a reason of its own, with its last words."""
    site = good(tmp_path / "venv")
    target = site.target()
    if case == "home":
        target = replace(target, environ={**(target.environ or {}), "PYTHONHOME": "/nonexistent"})
    else:
        code = {"exits": "print('gone', flush=True); import os; os._exit(3)", "crashes": "import os; os.abort()"}[case]
        site.write("sitecustomize.py", code)
    evidence = await imported(environment, target)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "interpreter-broken")
    assert evidence.message == ("gone" if case == "exits" else evidence.tail)
    start = site.packages / "sitecustomize.py"
    how = {"exits": "ends it with exit code 3", "crashes": "ends it by SIGABRT", "home": "ends it with exit code 1"}
    assert (evidence.where, evidence.cause) == (None if case == "home" else str(start), how[case])


STARTS = {
    "sitecustomize.py": ("import sys; sys.exit('no licence')\n", "raises SystemExit: no licence"),
    "usercustomize.py": ("raise KeyboardInterrupt\n", "raises KeyboardInterrupt: "),
    "zz-hook.pth": ("import os; os._exit(4)\n", "ends it with exit code 4"),
    "aa-hook.pth": ("import ctypes; ctypes.string_at(0)\n", "ends it by SIGSEGV"),
}


@pytest.mark.parametrize("python", available(), ids=lambda path: os.path.realpath(path).rpartition("/")[2])
@pytest.mark.parametrize("name", STARTS)
async def test_the_file_that_ends_a_start_is_named(
    environment: Sources, tmp_path: Path, name: str, python: str
) -> None:
    """Among files that do no harm, as a virtual environment has them (https://docs.python.org/3/library/site.html)."""
    site = Site(tmp_path / "venv", base=python, system=True)
    site.dependencies()
    site.flashinfer()
    site.write("mm-fine.pth", "import sys; sys.fine = True\n")
    code, how = STARTS[name]
    user = tmp_path / f"user/lib/python{version_of(python)}/site-packages"
    user.mkdir(parents=True)
    place = user / name if name.startswith("user") else site.packages / name
    place.write_text(code)
    target = site.target()
    target = replace(target, environ={**(target.environ or {}), "PYTHONUSERBASE": str(tmp_path / "user")})
    evidence = await imported(environment, target)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "interpreter-broken")
    assert (evidence.where, evidence.cause) == (str(place), how)


@pytest.mark.parametrize("name", ["sitecustomize.py", "zz-hook.pth"])
@pytest.mark.parametrize("code", ["import sys; print('hello'); sys.stderr.write('x')", "import nosuch", "1 / 0"])
async def test_what_a_start_survives_changes_nothing(
    environment: Sources, tmp_path: Path, name: str, code: str
) -> None:
    """Python prints what such code raises and goes on, in the server as well."""
    site = good(tmp_path / "venv")
    site.write(name, code if name.endswith(".py") else f"import sys; exec({code!r})\n")
    assert (await imported(environment, site.target())).outcome is ImportOutcome.OK


async def test_an_interpreter_that_is_too_old_is_no_fault(isolation: Isolation, tmp_path: Path) -> None:
    """An interpreter before Python 3.8 says so itself; that is neither a crash nor a failure of the environment."""
    run = (
        "import sys; sys.version_info = (3, 7, 16, 'final', 0); path = sys.argv[1]; del sys.argv[0]; "
        "exec(compile(open(path).read(), path, 'exec'), {'__name__': '__main__', '__file__': path})"
    )
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$@"\n')
    interpreter.chmod(0o755)
    environment = Sources(isolation, RealClock(), memory=NO_LIMIT)
    target = replace(good(tmp_path / "venv").target(), python=str(interpreter))
    facts = EnvironmentFacts(scope=target.scope)
    environment.request_import(facts, target, lambda: None)
    await environment.wait_import()
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "interpreter-too-old")
    assert "3.7.16" in evidence.message
    assert evidence.devices_hidden is None


HOSTILE = """
import os
for entry in os.listdir("/proc/self/fd"):
    try:
        if os.readlink("/proc/self/fd/" + entry).startswith("socket:") and int(entry) > 2:
            os.write(int(entry), %r)
            break
    except OSError:
        pass
os._exit(0)
"""


async def test_hostile_lines_are_made_harmless(environment: Sources, tmp_path: Path) -> None:
    """Line ends, escapes, infinities and numbers without end on the channel get into no text and no number."""
    lines = (
        b'{"stage": "a\\nready \\u001b[2J"}\n{"result": {"ok": true, "seconds": 1e999, "max_rss_bytes": 1'
        + b"0" * 300
        + b', "versions": {"x\\ny": "1\\n2"}}}\n'
        + b"[" * 100000
        + b"\n"
    )
    evidence = await import_of(environment, tmp_path, HOSTILE % lines)
    assert evidence.stage == "a?ready ?[2J"
    assert (evidence.seconds, evidence.max_rss_bytes, evidence.versions) == (None, None, {"x?y": "1?2"})


async def test_noise_is_bounded_and_kept_apart(environment: Sources, tmp_path: Path) -> None:
    """A flood on stdout changes nothing about the verdict."""
    evidence = await import_of(environment, tmp_path, "for _ in range(20000): print('noise ' * 20)")
    assert (evidence.outcome, evidence.tail) == (ImportOutcome.OK, "")


async def test_a_flood_of_results_says_nothing_about_the_server(environment: Sources, tmp_path: Path) -> None:
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
    evidence = await import_of(environment, tmp_path, code)
    assert (evidence.outcome, evidence.reason) == (ImportOutcome.NOT_ALLOWED, "flood")
