"""Imports under limits that only the kernel has: memory and CPU time of a real control group.

The agent's side runs in a process of its own inside the group, as an agent in a container does; the import is its
child and counts in the same group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cgroups import MIB, RealGroup, real_group
from tests.fakes.site import Site, good

ROOT = Path(__file__).parents[2]
AGENT = """
import asyncio, json, os, sys, time
spec = json.loads(sys.argv[1])
for file in spec["procs"]:
    with open(file, "w") as group:
        group.write(str(os.getpid()))
sys.path.insert(0, spec["root"])
from sidecar.imports import ImportLimits
from sidecar.isolation import Isolation
from sidecar.memory import MemoryLimit
from sidecar.model import Scope, Target
from tests.fakes.site import RealClock
from tests.fakes.sources import Sources
from sidecar.environment import EnvironmentFacts

async def main():
    isolation = Isolation()
    limits = ImportLimits(**spec["limits"])
    sources = Sources(isolation, RealClock(), memory=MemoryLimit(), limits=limits)
    target = Target(url="http://h", url_source="test", scope=Scope.SERVER, python=spec["python"],
                    environ={"PATH": os.defpath, "HOME": "/nonexistent"})
    facts = EnvironmentFacts(scope=Scope.SERVER)
    sources.request_import(facts, target, lambda: None)
    await sources.wait_import()
    evidence = sources.import_evidence(facts, target)
    await sources.close()
    await isolation.close()
    print(json.dumps({"outcome": evidence.outcome, "stage": evidence.stage, "seconds": evidence.seconds}))

asyncio.run(main())
"""


def run_agent(group: RealGroup, site: Site, timeout: float, **limits: float) -> dict[str, Any]:
    """What an agent inside the group makes of the import of this environment."""
    spec = {"procs": group.procs, "root": str(ROOT), "python": site.python, "limits": limits}
    command = [sys.executable, "-c", AGENT, json.dumps(spec)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=timeout, check=False)
    # Ended by the kernel, it would have printed nothing: that is what Kubernetes would show as an OOM kill.
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def with_mamba(root: Path, code: str) -> Site:
    site = good(root / "venv")
    site.flashinfer(mamba=code)
    return site


@contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    """Processes of normal priority that keep a core busy each, as a server's schedulers do; their numbers."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [one.pid for one in loops]
    finally:
        for one in loops:
            one.send_signal(signal.SIGKILL)
            one.wait()


def test_the_kernel_never_meets_the_limit(tmp_path: Path) -> None:
    """An import that grows without end is ended by the watchdog before the kernel has to refuse or kill anything.

    On version 2 with ``memory.oom.group``, as Kubernetes sets it, meeting the limit would end the agent, too.
    """
    code = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * (2 << 20))\n    time.sleep(0.04)\n"
    site = with_mamba(tmp_path, code)
    with real_group("memory") as group:
        if isinstance(group, str):
            pytest.skip(group)
        group.set("memory.limit_in_bytes", 300 * MIB)
        found = run_agent(group, site, timeout=60, memory_needed=100 * MIB)
        assert found["outcome"] == "insufficient-memory"
        assert found["stage"] == "import flashinfer.jit"
        most = int(group.get("memory.max_usage_in_bytes"))
        refused, control = group.get("memory.failcnt"), group.get("memory.oom_control")
    # It was let grow: the limit that counts is 90 % of 300 MiB.
    assert 200 * MIB < most < 300 * MIB
    assert refused == "0"
    assert "oom_kill 0" in control.splitlines()


def test_what_the_kernel_ends_lacked_memory(tmp_path: Path) -> None:
    """An import that takes all at once, before anybody looks, is ended by the kernel, which counts it: no fault.

    flashinfer-ai/flashinfer#4889
    """
    site = with_mamba(tmp_path, "kept = b'x' * (900 << 20)")
    with real_group("memory") as group:
        if isinstance(group, str):
            pytest.skip(group)
        group.set("memory.limit_in_bytes", 300 * MIB)
        found = run_agent(group, site, timeout=60, memory_needed=0, sample=30.0)
        control = group.get("memory.oom_control")
    assert "oom_kill 1" in control.splitlines()
    assert (found["outcome"], found["stage"]) == ("insufficient-memory", "import flashinfer.jit")


def test_no_room_no_child(tmp_path: Path) -> None:
    """In a group that is too small for an import none is started."""
    proof = tmp_path / "ran"
    site = with_mamba(tmp_path, f"open({str(proof)!r}, 'w')")
    with real_group("memory") as group:
        if isinstance(group, str):
            pytest.skip(group)
        group.set("memory.limit_in_bytes", 300 * MIB)
        assert run_agent(group, site, timeout=60)["outcome"] == "insufficient-memory"
    assert not proof.exists()


BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
"""Code that takes this much CPU time, without a stage on the way."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("inside", "burn", "patience"), [(False, 1.0, 5.0), (True, 0.3, 20.0)], ids=["beside", "inside"]
)
def test_a_tenth_of_a_core_beside_busy_loops_is_slow_and_right(
    tmp_path: Path, inside: bool, burn: float, patience: float
) -> None:
    """With 100 millicores beside busy loops an import takes its time and succeeds.

    The loops keep every core busy from outside of the group, or take their share of the same 100 millicores; then
    the import gets a few per cent of a core.
    """
    site = with_mamba(tmp_path, BURN.format(seconds=burn))
    with real_group("cpu") as group:
        if isinstance(group, str):
            pytest.skip(group)
        group.set("cpu.cfs_period_us", 100_000)
        group.set("cpu.cfs_quota_us", 10_000)
        with busy_loops(1 if inside else os.cpu_count() or 1) as loops:
            for loop in loops if inside else ():
                for file in group.procs:
                    Path(file).write_text(str(loop))
            found = run_agent(group, site, timeout=280, stall=patience, memory_needed=0)
    assert found["outcome"] == "ok"
    assert found["seconds"] > 5.0


@pytest.mark.timeout(300)
def test_busy_neighbours_without_a_group(tmp_path: Path) -> None:
    """Also where no group can be made: beside busy loops of higher priority an import is never taken for hung."""
    site = with_mamba(tmp_path, BURN.format(seconds=1.0))
    with busy_loops(2 * (os.cpu_count() or 1)):
        found = run_agent(RealGroup({}), site, timeout=280, stall=5.0, memory_needed=0)
    assert found["outcome"] == "ok"
