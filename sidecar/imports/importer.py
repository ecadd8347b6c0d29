"""Runs imports and keeps what they showed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from sidecar.childenv import server_environment, withheld
from sidecar.credentials import Credentials, home_of
from sidecar.environment import EnvironmentFacts, digest
from sidecar.imports.answer import USER_SITE, Circumstances, evidence_from, never_started
from sidecar.imports.evidence import INTERPRETER_BROKEN, ImportEvidence, ImportOutcome, ImportWork
from sidecar.imports.supervisor import ImportLimits, Supervisor
from sidecar.isolation import Child, ChildReport, Isolation, Privilege
from sidecar.memory import MemoryLimit
from sidecar.model import Clock, Placement, Scope, Target
from sidecar.offload import in_daemon_thread
from sidecar.pythonflags import without_ignored
from sidecar.redaction import scrubbed, secrets_of
from sidecar.target import SET_BY_LAUNCH
from sidecar.untrusted import text

IMPORT_PROBE = str(Path(__file__).parents[1] / "inenv" / "import_probe.py")
START_PROBE = str(Path(__file__).parents[1] / "inenv" / "start_probe.py")
_START_SECONDS: Final = 60.0
"""Time for an interpreter to start, file by file."""

_FOLDER_PREFIX = "sglang-sidecar-import-"
_LEFTOVER_AFTER = 3600.0
"""Seconds after which the folder of an import is certainly nobody's any more: four times its longest life."""
_IMPORT_PREFIXES = (
    "FLASHINFER_", "FLASH_ATTENTION", "TVM_FFI_", "CUDA", "CUTE_", "TORCH", "TRITON_", "PYTHON", "LD_", "NVSHMEM_",
    # Not all of SGLang's: SGLANG_RUN_ID differs from start to start.
    "SGLANG_IS_", "SGLANG_USE_", "SGLANG_INKLING_",
)  # fmt: skip
_IMPORT_VARIABLES = ("HOME", "PATH")
"""Variables that change what an import does; evidence holds only while they stay the same."""
_MOST_IN_A_ROW: Final = 3
"""Imports of one work, one right after the other, of which none held: one that changes its own packages would be due
again at once for ever."""
_MOST_STARVED_IN_A_ROW: Final = 2
"""The same for those that took all their time."""
_LONGEST_PAUSE: Final = 6 * 3600.0
_HELD_AFTER: Final = 60.0
"""Seconds after its end at which an outcome has held: before that the environment may not have been read again."""


class _Past(Struct):
    """What became of the imports of one work, one after the other.

    ``starved`` counts the last ones that took all their time and told nothing; ``void`` those that did not hold: the
    environment was another soon after.
    """

    starved: int = 0
    void: int = 0
    ended: float = float("-inf")


class Importer:
    """Runs imports and keeps their outcomes. One per agent.

    ``with_devices`` leaves the GPUs visible as they are to the server; an import may then take GPU memory.
    """

    def __init__(
        self,
        isolation: Isolation,
        clock: Clock,
        credentials: Credentials,
        *,
        placement: Placement,
        with_devices: bool = False,
        memory: MemoryLimit | None = None,
        limits: ImportLimits | None = None,
    ) -> None:
        self._isolation = isolation
        self._clock = clock
        self._credentials = credentials
        self._placement = placement
        self._with_devices = with_devices
        self._memory = memory or MemoryLimit()
        self._limits = limits or ImportLimits()
        self._evidence: dict[ImportWork, tuple[str, ImportEvidence]] = {}
        self._running: dict[ImportWork, asyncio.Task[None]] = {}
        self._past: dict[ImportWork, _Past] = {}
        self._stage: str | None = None

    @property
    def stage(self) -> str | None:
        """The step that the import under way has reached, by its child's word; None while there is none."""
        return self._stage

    def importing(self, work: ImportWork) -> bool:
        """Whether this import is under way or waiting for its turn."""
        return work in self._running

    def evidence(self, work: ImportWork, facts: EnvironmentFacts, target: Target) -> ImportEvidence | None:
        """Give the outcome of the last import in exactly this environment, or why none may run; None if not yet."""
        refusal = self._refusal(target)
        if refusal is not None:
            return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason=refusal, at=self._clock.time())
        key, evidence = self._evidence.get(work, (None, None))
        if evidence is None or key != self._key(facts, target):
            return None
        # What the server has that the import had not: by now it may be another one, which has less or more.
        missed = tuple(sorted({*withheld(self._heeded(target)), *target.unseen}))
        return evidence if evidence.withheld == missed else replace(evidence, withheld=missed)

    def broken_start(self, facts: EnvironmentFacts, target: Target) -> ImportEvidence | None:
        """Give what any import in exactly this environment showed of an interpreter that does not start."""
        found = (self.evidence(work, facts, target) for work in self._evidence)
        return next((one for one in found if one is not None and one.reason == INTERPRETER_BROKEN), None)

    def due(self, work: ImportWork, facts: EnvironmentFacts, target: Target) -> bool:
        """Whether an import would tell something new: nothing known yet, or known for too long."""
        evidence = self.evidence(work, facts, target)
        limits, past = self._limits, self._past.setdefault(work, _Past())
        if evidence is None:
            return self._clock.time() - past.ended >= self._pause_after_change(past)
        if self._refusal(target) is not None:
            return False
        if self._clock.time() - past.ended >= _HELD_AFTER:
            past.void = 0
        match evidence.outcome:
            case ImportOutcome.OK:
                patience = limits.fresh_for
            case ImportOutcome.FAILED | ImportOutcome.CRASHED | ImportOutcome.TIMEOUT:
                patience = limits.retry_after
            case ImportOutcome.STARVED | ImportOutcome.INSUFFICIENT_MEMORY | ImportOutcome.NOT_ALLOWED:
                # Each holds up all others for as long as it takes.
                patience = min(limits.retry_soon * 2 ** min(past.starved, 10), _LONGEST_PAUSE)
        return self._clock.time() - evidence.at >= patience

    def _pause_after_change(self, past: _Past) -> float:
        """Seconds from the end of an import to the next one of an environment that is another by then."""
        over = max(past.void - _MOST_IN_A_ROW, past.starved - _MOST_STARVED_IN_A_ROW)
        if over < 0:
            return float("-inf")
        # Not longer than a fault waits: what changed may have been repaired.
        pause: float = self._limits.retry_soon * 2 ** min(over, 10)
        return min(pause, self._limits.retry_after)

    def request(self, work: ImportWork, facts: EnvironmentFacts, target: Target, done: Callable[[], None]) -> None:
        """Start an import in the background, unless the same one is running; ``done`` is called at its end."""
        if self.importing(work) or self._refusal(target) is not None:
            return
        task = asyncio.get_running_loop().create_task(self._run(work, facts, target))
        self._running[work] = task

        def ended(task: asyncio.Task[None]) -> None:
            self._running.pop(work, None)
            if not task.cancelled():
                task.exception()  # seen
                done()

        task.add_done_callback(ended)

    async def wait(self) -> bool:
        """Wait for the imports that are running or waiting; False when there are none."""
        tasks = list(self._running.values())
        if not tasks:
            return False
        await asyncio.wait(tasks)
        return True

    async def close(self) -> None:
        """End what is running. Children and their folders are gone afterwards."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one import ------------------------------------------------------------------------------

    async def _run(self, work: ImportWork, facts: EnvironmentFacts, target: Target) -> None:
        # Before the import: if the environment changes meanwhile, the outcome belongs to neither state.
        key = self._key(facts, target)
        past = self._past.setdefault(work, _Past())
        # Those that took all their time and told nothing go last.
        while before := [task for one, task in self._running.items() if self._starved(one) < past.starved]:
            await asyncio.wait(before)
            await asyncio.sleep(0)
        async with self._isolation.heavy:
            try:
                evidence = await self._once(work, target)
            except OSError:
                # The agent itself is out of processes, descriptors or disk.
                outcome = ImportOutcome.NOT_ALLOWED
                evidence = ImportEvidence(outcome=outcome, reason="cannot-start", at=self._clock.time())
            finally:
                self._stage = None
        past.starved = past.starved + 1 if evidence.outcome is ImportOutcome.STARVED else 0
        past.void += 1
        past.ended = self._clock.time()
        self._evidence[work] = (key, evidence)

    def _starved(self, work: ImportWork) -> int:
        past = self._past.get(work)
        return 0 if past is None else past.starved

    async def _once(self, work: ImportWork, target: Target) -> ImportEvidence:
        now = self._clock.time()
        reading = self._memory.read()
        if reading is not None and reading.free < self._limits.memory_needed:
            return ImportEvidence(outcome=ImportOutcome.INSUFFICIENT_MEMORY, at=now, stage="start")
        try:
            await in_daemon_thread(_remove_leftovers)
            folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        except OSError:
            return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason="no-temporary-folder", at=now)
        privilege = replace(self._credentials.privilege(target)[1], capabilities=False)
        supervise = Supervisor(self._clock, self._limits, self._memory)
        try:
            if privilege.uid is not None:
                os.chown(folder, privilege.uid, privilege.gid if privilege.gid is not None else -1)
            report = await self._child(work, target, folder, privilege, supervise)
            start = await self._start(target, folder, privilege) if never_started(report) else None
        finally:
            await in_daemon_thread(lambda: shutil.rmtree(folder, ignore_errors=True))
        around = Circumstances(
            same_user=self._credentials.same_user(target, privilege),
            memory_short=supervise.memory_short,
            memory_limited=_limited(resource.RLIMIT_AS, resource.RLIMIT_DATA),
            cpu_limited=_limited(resource.RLIMIT_CPU),
            busy=supervise.busy,
            folder=folder,
        )
        evidence = evidence_from(report, now, around, start)
        ran = evidence.outcome is not ImportOutcome.NOT_ALLOWED
        return replace(evidence, devices_hidden=not self._with_devices if ran else None)

    async def _child(
        self, work: ImportWork, target: Target, folder: str, privilege: Privilege, supervise: Supervisor
    ) -> ChildReport:
        """Run the import probe as the server's interpreter would run the server; no secret is in what it says."""
        secrets = secrets_of(self._credentials.environ(target))
        leads = target.cwd_on_path is True and target.cwd is not None
        spec = asdict(work) | {"devices": self._with_devices, "cwd_on_path": leads, "script": target.script}
        environ = self._environ(target, folder)
        _show_user_site(folder, environ, target.python_flags)

        async def watch(child: Child, lines: Sequence[Mapping[str, Any]]) -> str | None:
            stages = [line["stage"] for line in lines if isinstance(line.get("stage"), str)]
            self._stage = text(scrubbed(stages[-1], secrets), 120) if stages else None
            return await supervise(child, lines)

        report = await self._isolation.run(
            [str(target.python), *_flags(target), IMPORT_PROBE, json.dumps(spec)],
            env=environ,
            timeout=self._limits.cap,
            # Not lower: beside a server that keeps every core busy, nice 19 and SCHED_IDLE starve.
            nice=10,
            privilege=privilege,
            oom_score_adj=1000 if self._placement is Placement.HOST else None,
            watch=watch,
            watch_interval=self._limits.sample,
            cwd=target.cwd or "/",
            cwd_needed=leads or _has_relative_entries(environ.get("PYTHONPATH", "")),
        )
        return replace(report, lines=tuple(scrubbed(list(report.lines), secrets)), tail=scrubbed(report.tail, secrets))

    async def _start(self, target: Target, folder: str, privilege: Privilege) -> ChildReport:
        """Start the server's interpreter file by file, to see which one ends it."""
        secrets = secrets_of(self._credentials.environ(target))
        report = await self._isolation.run(
            [str(target.python), *_flags(target), "-S", START_PROBE],
            env=self._environ(target, folder),
            timeout=_START_SECONDS,
            nice=10,
            privilege=privilege,
            cwd=target.cwd or "/",
        )
        return replace(report, lines=tuple(scrubbed(list(report.lines), secrets)), tail=scrubbed(report.tail, secrets))

    def _heeded(self, target: Target) -> Mapping[str, str]:
        """The server's variables, but for those that its interpreter is told to ignore."""
        return without_ignored(self._credentials.environ(target), target.python_flags)

    def _environ(self, target: Target, folder: str) -> dict[str, str]:
        environ = self._heeded(target)
        private = {
            "HOME": folder,
            "TMPDIR": folder,
            "XDG_CACHE_HOME": f"{folder}/cache",
            "FLASHINFER_WORKSPACE_BASE": folder,
            "TORCH_EXTENSIONS_DIR": f"{folder}/torch_extensions",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if not self._with_devices:
            # Hidden, not absent: the import must neither create a context on the server's GPU nor fail for want
            # of memory on it.
            private["CUDA_VISIBLE_DEVICES"] = ""
        home = environ["HOME"] if "HOME" in environ else home_of(self._credentials.user(target))
        if not environ.get("PYTHONUSERBASE") and home is not None:
            # The private HOME must not hide what was installed with ``pip install --user``.
            private["PYTHONUSERBASE"] = f"{home.rstrip('/')}/.local"
        return server_environment(environ, private)

    # -- what it rests on ------------------------------------------------------------------------

    def _refusal(self, target: Target) -> str | None:
        """Token that says why no import may be run, or None."""
        if target.root is not None:
            return "foreign-root"
        if (
            target.unread is not None
            or target.limited
            or (target.environ_missing == SET_BY_LAUNCH and self._is_blind(target))
        ):
            return "environment-unseen"
        if target.python is None:
            return "no-interpreter"
        if target.scope is Scope.SELF:
            return "scope-self"
        return self._credentials.privilege(target)[0]

    def _is_blind(self, target: Target) -> bool:
        """Whether a variable that changes what an import does may have a value that is not known."""
        hidden = set() if self._with_devices else {"CUDA_VISIBLE_DEVICES"}  # the import has a value of its own
        return target.environ is None or any(map(_changes_imports, target.unseen - hidden))

    def _key(self, facts: EnvironmentFacts, target: Target) -> str:
        relevant = {
            name: value for name, value in server_environment(self._heeded(target)).items() if _changes_imports(name)
        }
        user = self._credentials.user(target)
        # The driver's library is mounted or changed beside the environment's own files.
        libcuda = [[one.path, one.version] for one in facts.libcuda.found]
        start = [target.cwd, target.cwd_on_path, target.script, target.python_flags]
        return digest([facts.fingerprint, target.scope, sorted(relevant.items()), user and user.uid, libcuda, start])


def _changes_imports(name: str) -> bool:
    return name in _IMPORT_VARIABLES or name.startswith(_IMPORT_PREFIXES)


def _limited(*kinds: int) -> bool:
    """Whether this process, and with it its children, is under any of these resource limits."""
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def _has_relative_entries(path: str) -> bool:
    """Whether the working folder decides what an import path means; an empty entry stands for that folder."""
    return path != "" and any(not entry.startswith("/") for entry in path.split(":"))


def _flags(target: Target) -> list[str]:
    """The flags of the server's interpreter, and no compiled files written where its variables are ignored."""
    flags = list(target.python_flags)
    return flags if {"-E", "-I"}.isdisjoint(flags) else [*flags, "-B"]


def _show_user_site(folder: str, environ: Mapping[str, str], flags: Sequence[str]) -> None:
    """Let an interpreter that ignores PYTHONUSERBASE find what the user installed, below the private HOME."""
    if "-E" not in flags or "PYTHONUSERBASE" not in environ:
        return
    link = Path(folder, USER_SITE)
    with contextlib.suppress(OSError):
        link.parent.mkdir()
        link.symlink_to(f"{environ['PYTHONUSERBASE']}/lib")


def _remove_leftovers() -> None:
    """Remove folders of imports whose agent was killed: older than any import lasts, and our own."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LEFTOVER_AFTER:
                shutil.rmtree(path, ignore_errors=True)
