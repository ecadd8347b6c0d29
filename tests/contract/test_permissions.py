"""What an agent may read of a server's process, by user and capabilities, with real processes.

The rows are those that containers of one pod can have; a container's runtime is not needed to have them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar.procfs import process_status
from tests.fakes import privileges
from tests.fakes.proc import CONTAINER, PTRACE

ROOT = Path(__file__).parents[2]
USER = 10001
MARKER = "SECRET-DO-NOT-EXPORT"
FULL = 0x1FFFFFFFFFF


def _may_become_anybody() -> bool:
    status = process_status(Path("/proc"), "self")
    needed = sum(1 << bit for bit in (6, 7, 8)) | PTRACE | CONTAINER
    return status is not None and status.effective is not None and status.effective & needed == needed


pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not _may_become_anybody(),
    reason="only root with SYS_PTRACE and a container's capabilities can become each of these users",
)


@dataclass(frozen=True)
class Rights:
    """User, group, capabilities and bounding set of a process."""

    uid: int = 0
    gid: int = 0
    capabilities: int = 0
    bounding: int | None = None

    @property
    def words(self) -> list[str]:
        bounding = self.capabilities if self.bounding is None else self.bounding
        return [str(self.uid), str(self.gid), f"{self.capabilities:x}", f"{bounding:x}"]


LOOK = """
import asyncio, json, sys, time
from sidecar.config import Settings
from sidecar.model import Placement, Processes, Standing
from sidecar.processes import ProcessReader
from sidecar.target import TargetFinder
from tests.fakes.privileges import become
pid, uid, gid, capabilities, bounding = sys.argv[1:]
standing = Standing(
    placement=Placement.CONTAINER, placement_why="", processes=Processes.SHARED, processes_why=""
)
finder = TargetFinder(Settings(server_pid=int(pid)), standing, time, environ={})
async def look():
    target = await finder.find()
    found = await ProcessReader(time, patience=30).read(target)
    main = found.processes[0]
    return {
        "pid": target.pid, "flags": target.launch.get("tp_size"), "uid": target.uid,
        "started": target.create_time is not None, "cwd": target.cwd,
        "environ": None if target.environ is None else target.environ.get("PLAIN"),
        "environ_missing": target.environ_missing, "scope": target.scope, "why": target.why,
        "resident": main.resident, "maps": main.mapped is not None, "replaced": found.replaced,
        "denied": dict(main.denied),
    }
become(int(uid), int(gid), int(capabilities, 16), int(bounding, 16))
print(json.dumps(asyncio.run(look())))
"""


@contextmanager
def server(rights: Rights) -> Iterator[int]:
    """A process with the command line of a server and those rights; its pid."""
    script = [sys.executable, privileges.__file__, *rights.words, "--tp", "8", "--api-key", MARKER]
    process = subprocess.Popen(
        script,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PLAIN": "yes", "HF_TOKEN": MARKER},
        cwd="/",
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def look(pid: int, rights: Rights) -> dict[str, Any]:
    """What the agent's own code makes of that process when it runs with those rights."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(pid), *rights.words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert MARKER not in done.stdout
    return json.loads(done.stdout)  # type: ignore[no-any-return]  # what LOOK prints


LINKS = ("cwd", "exe", "maps", "ns", "root")
OWNERS = ("environ", "fd")
THEIRS = Rights(capabilities=CONTAINER)
"""A server that is root with what a container's root gets."""
PLAIN = Rights(uid=USER, gid=USER)
"""A server, or an agent, that is another user and has no capability."""


@pytest.mark.parametrize(
    ("theirs", "ours", "links", "owners"),
    [
        (THEIRS, Rights(capabilities=CONTAINER), None, None),
        (THEIRS, Rights(), "no-sys-ptrace", "no-sys-ptrace"),
        (THEIRS, Rights(capabilities=PTRACE), None, None),
        (THEIRS, PLAIN, "other-user", "other-user"),
        (
            THEIRS,
            Rights(uid=USER, gid=USER, bounding=PTRACE),
            "sys-ptrace-not-effective",
            "sys-ptrace-not-effective",
        ),
        (THEIRS, Rights(uid=USER, gid=USER, capabilities=PTRACE), None, "owner-only"),
        (PLAIN, PLAIN, None, None),
        (PLAIN, Rights(), "no-sys-ptrace", "no-sys-ptrace"),
        (PLAIN, Rights(capabilities=PTRACE), None, "owner-only"),
        (PLAIN, Rights(uid=USER, gid=0), "other-group", "other-group"),
        (PLAIN, Rights(uid=0, capabilities=CONTAINER), "no-sys-ptrace", "no-sys-ptrace"),
        (PLAIN, Rights(uid=USER + 1, gid=USER, bounding=FULL), "other-user", "other-user"),
    ],
    ids=[
        "root-like-the-server",
        "root-without-capabilities",
        "root-with-ptrace-alone",
        "user-without-capabilities",
        "user-granted-ptrace-by-kubernetes",
        "user-with-ptrace-on-the-interpreter",
        "the-servers-user",
        "root-without-capabilities-beside-a-user",
        "root-with-ptrace-alone-beside-a-user",
        "the-servers-user-in-another-group",
        "root-with-default-capabilities-beside-a-user",
        "another-user-of-a-host",
    ],
)
def test_each_row_of_rights_reads_what_the_kernel_allows(
    theirs: Rights, ours: Rights, links: str | None, owners: str | None
) -> None:
    """Command line, state and memory are there for everybody; each other field is read, or unknown with its reason.

    BishopFox/badPods#11, moby/moby#40713, cloudfoundry/garden-runc-release#117
    """
    with server(theirs) as pid:
        found = look(pid, ours)
    denied = {name: links for name in LINKS if links} | {name: owners for name in OWNERS if owners}
    assert found["denied"] == denied
    assert (found["pid"], found["flags"], found["uid"], found["started"]) == (pid, 8, theirs.uid, True)
    assert found["resident"] > 0
    assert (found["environ"], found["environ_missing"]) == ((None, owners) if owners else ("yes", None))
    assert found["maps"] is (links is None)
    assert found["replaced"] == (None if links else [])
    assert found["cwd"] == (None if links else "/")
    # Nothing of the agent's own stands in for what it may not see.
    assert found["scope"] == ("self" if links else "server")
    assert ("may not be read" in found["why"]) is (links is not None)
