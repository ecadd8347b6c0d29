"""The Python environment of the server: what is installed in it, and what a real import in it does.

Two children answer, neither of which is trusted with more than its answer:

* the *static reader* reads files and executes nothing of the environment; it runs once a minute and does almost
  nothing while the environment's fingerprint stays the same;
* the *import probe* imports ``flashinfer.mamba`` as SGLang does. It is expensive, so its outcome is kept as
  `ImportEvidence` for as long as everything that it rests on stays the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pwd
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from sidecar.config import Settings
from sidecar.isolation import FLOOD, Child, ChildReport, Isolation, Privilege, server_environment
from sidecar.memory import MemoryLimit
from sidecar.model import Clock, Placement, ProbeCrash, ProbeTimeout, Scope, Skip, Target
from sidecar.offload import in_daemon_thread

_SCRIPTS = Path(__file__).with_name("inenv")
STATIC_READER = str(_SCRIPTS / "static_reader.py")
IMPORT_PROBE = str(_SCRIPTS / "import_probe.py")

TRACKED = (
    "sglang",
    "torch",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "sglang-kernel",
    "sgl-kernel",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "transformers",
    "nvidia-ml-py",
    "nvidia-ml-py3",
    "pynvml",
)
"""Distributions whose versions are read, by normalised name."""

_FOLDER_PREFIX = "sglang-sidecar-import-"
_LEFTOVER_AFTER = 3600.0
"""Seconds after which the folder of an import is certainly nobody's any more: four times its longest life."""
_PATH_VARIABLES = ("PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "HOME")
"""What decides an interpreter's import path besides its own files."""
_LOADER_VARIABLE = "LD_LIBRARY_PATH"
"""Where the dynamic loader looks first."""
_LOADER_VARIABLE_LIMIT = 16384
"""Characters of it that are passed on: with the import path it must fit into one argument of a process."""
_START_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""What an interpreter may need to start at all; the static reader's child gets nothing else."""
_IMPORT_PREFIXES = ("FLASHINFER_", "TVM_FFI_", "CUDA_", "SGLANG_IS_FLASHINFER", "TORCH_EXTENSIONS_DIR", "PYTHON")
_IMPORT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH")
"""Variables that change what an import does; evidence holds only while they stay the same."""

_CACHE_SECONDS = 30.0
"""Two probes ask in every minute; both get the answer of one child."""
_CAP_SETGID, _CAP_SETUID = 6, 7


class ImportOutcome(StrEnum):
    """How an import ended. Only ok, failed, crashed and timeout say something about the environment."""

    OK = "ok"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    STARVED = "starved"
    INSUFFICIENT_MEMORY = "insufficient-memory"
    NOT_ALLOWED = "not-allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportLimits:
    """Bounds of an import child. Seconds and bytes.

    ``stall``: time without CPU progress and without a new stage after which it counts as hung. ``cap``: wall time
    after which it counts as starved, however busy it is. ``memory_needed``: room under the memory limit to start
    at all (a CUDA build of torch and FlashInfer peak at about 0.85 GiB). ``memory_fraction``: share of the limit
    at which it is ended; ``memory_most``: what it may hold resident where there is no limit, or one far above what
    the server leaves. ``fresh_for``: age at which a good outcome is renewed; ``retry_after``: a bad one, which
    may rest on something outside the fingerprint (a system library); ``retry_soon``: one that said nothing.
    """

    stall: float = 60.0
    cap: float = 900.0
    memory_needed: int = 1200 * 1024 * 1024
    memory_fraction: float = 0.9
    memory_most: int = 8 * 1024**3
    sample: float = 0.2
    fresh_for: float = 24 * 3600.0
    retry_after: float = 3600.0
    retry_soon: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A package that FlashInfer looks for beside itself. ``kind`` is package, module, namespace or absent."""

    kind: str = "absent"
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaFiles:
    """The files of ``flashinfer.mamba``.

    ``state``: present, absent, no-init (a folder without ``__init__``), empty-init, invalid-init (does not parse).
    ``symbol``: bound, missing, source-missing (its submodule's file is not there) or unknown.
    """

    state: str = "absent"
    names: tuple[str, ...] | None = None
    symbol: str = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferFiles:
    """FlashInfer as its files show it.

    ``kind``: package, module (a file shadows the package), namespace (a leftover folder) or absent. ``version`` is
    what ``flashinfer.__version__`` would say, from its build metadata; not the distribution's. ``missing`` lists
    modules that every import of it needs and that are not there.
    """

    kind: str = "absent"
    places: tuple[str, ...] = ()
    version: str | None = None
    mamba: MambaFiles = field(default_factory=MambaFiles)
    cubin: Companion = field(default_factory=Companion)
    jit_cache: Companion = field(default_factory=Companion)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFiles:
    """The kernel wheel's package ``sgl_kernel``.

    ``kind`` is package, module, namespace or absent. ``folders`` names the builds for GPUs that it holds (sm90,
    sm100), ``plain`` says that there is one beside them, as older releases have it.
    """

    kind: str = "absent"
    folders: tuple[str, ...] = ()
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFile:
    """A ``libcuda.so.1``.

    ``version`` is the driver's, from the real file's name. ``kind`` is stub (a toolkit's, for linking only), compat
    (a forward-compatibility package) or driver. ``where`` says what led to it: LD_LIBRARY_PATH, ld.so.cache,
    ld.so.conf, default or compat. ``conf`` is the file of the loader's configuration that names its folder.
    """

    path: str
    version: str | None = None
    kind: str = "driver"
    where: str = "default"
    conf: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLibrary:
    """The CUDA driver's library as the dynamic loader would find it, by reading alone.

    ``found`` is in the loader's order: the first is the one that is used. ``compat`` are the forward-compatibility
    ones that are installed, whether found or not. ``path_seen`` is False where LD_LIBRARY_PATH is not the server's.
    """

    found: tuple[LibraryFile, ...] = ()
    compat: tuple[LibraryFile, ...] = ()
    path_seen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """An environment, read and not executed.

    ``problem`` is a token when the environment may not or cannot be read; then nothing else is known.
    ``requires`` holds SGLang's own requirement lines for the tracked distributions. ``path_code`` names the .pth
    files that run code at start, which can make modules importable that no reading finds.
    """

    scope: Scope
    python: str | None = None
    python_source: str = "not-found"
    python_version: str | None = None
    root: str | None = None
    problem: str | None = None
    fingerprint: str = ""
    site_dirs: tuple[str, ...] = ()
    path_code: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)
    distribution_count: int = 0
    requires: tuple[str, ...] = ()
    editable: tuple[str, ...] = ()
    torch_present: bool = False
    torch_version: str | None = None
    torch_cuda: str | None = None
    torch_without_cuda: bool = False
    torch_hip: str | None = None
    kernel: KernelFiles = field(default_factory=KernelFiles)
    libcuda: DriverLibrary = field(default_factory=DriverLibrary)
    flashinfer: FlashInferFiles = field(default_factory=FlashInferFiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportEvidence:
    """What a real ``import flashinfer.mamba`` did, as far as the child could tell.

    ``reason`` is the token behind not-allowed. ``step`` is import or symbol. ``exited``: the code called
    ``sys.exit``. ``same_user`` is False when the child could not run as the server's user. ``tail`` is the last
    line that the child printed.
    """

    outcome: ImportOutcome
    at: float
    reason: str | None = None
    seconds: float | None = None
    stage: str | None = None
    step: str | None = None
    symbol: str | None = None
    names: tuple[str, ...] = ()
    exception: str | None = None
    message: str = ""
    where: str | None = None
    missing: str | None = None
    errno: int | None = None
    os_error: bool = False
    exited: bool = False
    sglang_catches: bool | None = None
    cause: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    tail: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    cuda_initialized: bool | None = None
    max_rss_bytes: int | None = None
    same_user: bool = True


@dataclass(frozen=True, slots=True)
class _User:
    uid: int
    gid: int
    groups: tuple[int, ...]


class Environment:
    """Reads the server's environment and keeps what is known of it. One per agent.

    ``environ`` stands in for the server's environment where that may not be read.
    """

    def __init__(
        self,
        isolation: Isolation,
        clock: Clock,
        settings: Settings,
        *,
        placement: Placement,
        proc: Path = Path("/proc"),
        environ: Mapping[str, str] | None = None,
        memory: MemoryLimit | None = None,
        limits: ImportLimits | None = None,
    ) -> None:
        self._isolation = isolation
        self._clock = clock
        self._placement = placement
        self._proc = proc
        self._environ = os.environ if environ is None else environ
        self._memory = memory or MemoryLimit(proc=proc)
        self._limits = limits or ImportLimits()
        deadlines = (settings.deadlines.get(probe, 10.0) for probe in ("packages", "flashinfer"))
        # Less than the scheduler's deadline, so that this module's sentence is the one that is seen.
        self._timeout = max(1.0, min(deadlines) - 1.0)
        self._facts: tuple[str, float, EnvironmentFacts] | None = None
        self._reading: dict[str, asyncio.Task[EnvironmentFacts]] = {}
        self._stuck_at: int | None = None
        self._evidence: tuple[str, ImportEvidence] | None = None
        self._import: asyncio.Task[None] | None = None

    # -- reading ---------------------------------------------------------------------------------

    async def read(self, target: Target) -> EnvironmentFacts:
        """Read the environment; one child at a time, and at most one in half a minute.

        Raises Skip where there is no interpreter to ask, ProbeTimeout and ProbeCrash with one sentence otherwise.
        """
        if target.python is None and target.root is None:
            sentence = "no interpreter with SGLang or FlashInfer was found; set server_python"
            raise Skip(sentence)
        key = self._key(target)
        if self._facts is not None and self._facts[0] == key:
            _, read_at, facts = self._facts
            if self._clock.monotonic() - read_at < _CACHE_SECONDS:
                return facts
        task = self._reading.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._read(target, key))
            self._reading[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # Shielded: a probe that meets its deadline must not take the answer away from the other one.
        return await asyncio.shield(task)

    def _forget(self, key: str, task: asyncio.Task[EnvironmentFacts]) -> None:
        self._reading.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, should nobody be waiting any more

    async def _read(self, target: Target, key: str) -> EnvironmentFacts:
        if self._stuck_at is not None:
            if self._isolation.abandoned >= self._stuck_at:
                sentence = "an earlier reading of the environment hangs in the kernel and cannot be ended"
                raise ProbeTimeout(sentence, stuck=True)
            self._stuck_at = None
        previous = self._facts[2] if self._facts is not None and self._facts[0] == key else None
        environ = self._server_environ(target)
        spec = {
            "environ": {name: environ[name][:65536] for name in _PATH_VARIABLES if name in environ}
            | {_LOADER_VARIABLE: environ.get(_LOADER_VARIABLE, "")[:_LOADER_VARIABLE_LIMIT]},
            "tracked": TRACKED,
            "known": previous.fingerprint if previous is not None else None,
        }
        refusal, privilege = self._privilege(target)
        # A foreign interpreter is never executed, nor one whose owner the agent cannot become: it would run with
        # more rights than its owner has. Both are read from outside, by the agent's own interpreter.
        outside = target.root is not None or refusal is not None
        if outside:
            spec |= {"root": target.root or "/", "python": target.python}
        report = await self._isolation.run(
            [sys.executable if outside else str(target.python), "-I", "-S", STATIC_READER, json.dumps(spec)],
            env={} if outside else {name: environ[name] for name in _START_VARIABLES if name in environ},
            timeout=self._timeout,
            privilege=None if outside else privilege,
        )
        if report.stuck:
            self._stuck_at = self._isolation.abandoned
        answer = self._answer(report, target)
        if answer.get("unchanged") is True and previous is not None:
            libcuda = _libcuda_from(answer.get("libcuda"), target)
            facts = previous if libcuda == previous.libcuda else replace(previous, libcuda=libcuda)
        elif answer.get("problem") == "no-environment":
            sentence = "no Python environment with SGLang or FlashInfer was found under the root; set server_python"
            raise Skip(sentence)
        else:
            facts = _facts_from(answer, target)
        self._facts = (key, self._clock.monotonic(), facts)
        return facts

    def _answer(self, report: ChildReport, target: Target) -> Mapping[str, Any]:
        line = report.result
        if line is not None and isinstance(line["result"], dict):
            return line["result"]
        outside = target.root is not None or self._privilege(target)[0] is not None
        name = "the reader" if outside else f"{target.python} ({target.python_source})"
        advice = "set server_python to the interpreter of the server's environment"
        if report.exec_error is not None:
            sentence = f"{name} could not be started: {report.exec_error}; {advice}"
            raise ProbeCrash(sentence)
        if report.timed_out:
            at = report.stage or "start"
            sentence = f"{name} did not answer within {self._timeout:g} s while its packages were read (at: {at})"
            raise ProbeTimeout(sentence, where=at, stuck=report.stuck)
        ended = _ending(report)
        if report.stage is None:
            said = f" ({_last_line(report.tail)})" if _last_line(report.tail) else ""
            sentence = f"{name} {ended} without an answer{said}: it is no Python 3.8 or newer; {advice}"
            raise ProbeCrash(sentence)
        sentence = f"{name} {ended} while its packages were read (at: {report.stage})"
        raise ProbeCrash(sentence)

    # -- importing -------------------------------------------------------------------------------

    @property
    def importing(self) -> bool:
        """Whether an import is under way or waiting for its turn."""
        return self._import is not None and not self._import.done()

    def import_evidence(self, facts: EnvironmentFacts, target: Target) -> ImportEvidence | None:
        """Give the outcome of the last import in exactly this environment, or why none may run; None if not yet."""
        refusal = self._refusal(target)
        if refusal is not None:
            return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason=refusal, at=self._clock.time())
        if self._evidence is None or self._evidence[0] != self._evidence_key(facts, target):
            return None
        return self._evidence[1]

    def import_due(self, facts: EnvironmentFacts, target: Target) -> bool:
        """Whether an import would tell something new: nothing known yet, or known for too long."""
        evidence = self.import_evidence(facts, target)
        if evidence is None:
            return True
        if self._refusal(target) is not None:
            return False
        limits = self._limits
        match evidence.outcome:
            case ImportOutcome.OK:
                patience = limits.fresh_for
            case ImportOutcome.FAILED | ImportOutcome.CRASHED | ImportOutcome.TIMEOUT:
                patience = limits.retry_after
            case ImportOutcome.STARVED | ImportOutcome.INSUFFICIENT_MEMORY | ImportOutcome.NOT_ALLOWED:
                patience = limits.retry_soon
        return self._clock.time() - evidence.at >= patience

    def request_import(self, facts: EnvironmentFacts, target: Target, done: Callable[[], None]) -> None:
        """Start an import in the background, unless one is running; ``done`` is called at its end."""
        if self.importing or self._refusal(target) is not None:
            return
        self._import = asyncio.get_running_loop().create_task(self._run_import(facts, target))
        self._import.add_done_callback(lambda task: None if task.cancelled() else done())

    async def wait_import(self) -> bool:
        """Wait for the import that is running; False when there is none."""
        if self._import is None or self._import.done():
            return False
        await asyncio.wait([self._import])
        return True

    async def close(self) -> None:
        """End what is running. Children and their folders are gone afterwards."""
        tasks = [task for task in (self._import, *self._reading.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_import(self, facts: EnvironmentFacts, target: Target) -> None:
        # Before the import: if the environment changes meanwhile, the outcome belongs to neither state.
        key = self._evidence_key(facts, target)
        async with self._isolation.heavy:
            try:
                evidence = await self._import_once(target)
            except OSError:
                # The agent itself is out of processes, descriptors or disk.
                outcome = ImportOutcome.NOT_ALLOWED
                evidence = ImportEvidence(outcome=outcome, reason="cannot-start", at=self._clock.time())
        self._evidence = (key, evidence)

    async def _import_once(self, target: Target) -> ImportEvidence:
        now = self._clock.time()
        reading = self._memory.read()
        if reading is not None and reading.free < self._limits.memory_needed:
            return ImportEvidence(outcome=ImportOutcome.INSUFFICIENT_MEMORY, at=now, stage="start")
        privilege = replace(self._privilege(target)[1], capabilities=False)
        try:
            await in_daemon_thread(_remove_leftovers)
            folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        except OSError:
            return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason="no-temporary-folder", at=now)
        try:
            if privilege.uid is not None:
                os.chown(folder, privilege.uid, privilege.gid if privilege.gid is not None else -1)
            report = await self._isolation.run(
                [str(target.python), IMPORT_PROBE, "{}"],
                env=self._import_environ(target, folder),
                timeout=self._limits.cap,
                # Not lower: beside a server that keeps every core busy, nice 19 and SCHED_IDLE starve.
                nice=10,
                privilege=privilege,
                oom_score_adj=1000 if self._placement is Placement.HOST else None,
                watch=_Supervisor(self._clock, self._limits, self._memory),
                watch_interval=self._limits.sample,
            )
        finally:
            await in_daemon_thread(lambda: shutil.rmtree(folder, ignore_errors=True))
        same_user = self._same_user(target, privilege)
        return _evidence_from(report, now, same_user=same_user)

    def _import_environ(self, target: Target, folder: str) -> dict[str, str]:
        environ = self._server_environ(target)
        private = {
            "HOME": folder,
            "TMPDIR": folder,
            "XDG_CACHE_HOME": f"{folder}/cache",
            "FLASHINFER_WORKSPACE_BASE": folder,
            "TORCH_EXTENSIONS_DIR": f"{folder}/torch_extensions",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            # Hidden, not absent: the import must neither create a context on the server's GPU nor fail for want
            # of memory on it.
            "CUDA_VISIBLE_DEVICES": "",
        }
        home = environ.get("HOME") or _home_of(self._user(target))
        if "PYTHONUSERBASE" not in environ and home:
            # The private HOME must not hide what was installed with ``pip install --user``.
            private["PYTHONUSERBASE"] = f"{home}/.local"
        return server_environment(environ, private)

    def _refusal(self, target: Target) -> str | None:
        """Token that says why no import may be run, or None."""
        if target.root is not None:
            return "foreign-root"
        if target.python is None:
            return "no-interpreter"
        if target.scope is Scope.SELF:
            return "scope-self"
        return self._privilege(target)[0]

    # -- whose environment, whose rights -----------------------------------------------------------

    def _server_environ(self, target: Target) -> Mapping[str, str]:
        return self._environ if target.environ is None else target.environ

    def _user(self, target: Target) -> _User | None:
        """Find the user of the server's process, or None where there is none to see."""
        return None if target.pid is None else _user_of(target.pid, self._proc)

    def _privilege(self, target: Target) -> tuple[str | None, Privilege]:
        """(refusal, privilege) for code of the server's environment: never more rights than the server has."""
        user = self._user(target)
        if user is None or user.uid == os.geteuid():
            return None, Privilege()
        if os.geteuid() == 0 and _may_change_user(self._proc):
            return None, Privilege(uid=user.uid, gid=user.gid, groups=user.groups)
        if user.uid == 0:
            # Root's files run with the agent's lesser rights: safe, though not faithful (`same_user`).
            return None, Privilege()
        return "privilege", Privilege()

    def _same_user(self, target: Target, privilege: Privilege) -> bool:
        user = self._user(target)
        uid = os.geteuid() if privilege.uid is None else privilege.uid
        # Root without capabilities is not the root that the server is.
        return user is None or (user.uid == uid and uid != 0)

    def _key(self, target: Target) -> str:
        environ = self._server_environ(target)
        path = {name: environ.get(name) for name in (*_PATH_VARIABLES, _LOADER_VARIABLE)}
        return _digest([target.python, target.root, target.scope, target.pid, path])

    def _evidence_key(self, facts: EnvironmentFacts, target: Target) -> str:
        environ = self._server_environ(target)
        relevant = {
            name: value
            for name, value in environ.items()
            if name in _IMPORT_VARIABLES or name.startswith(_IMPORT_PREFIXES)
        }
        user = self._user(target)
        return _digest([facts.fingerprint, target.scope, sorted(relevant.items()), user and user.uid])


class _Supervisor:
    """Watches an import child: ends it when it hangs, starves or runs out of memory (`isolation.Watch`)."""

    _CPU_INTERVAL = 1.0
    """Seconds between looks at the CPU time: finding the descendants reads all of /proc."""
    _CPU_STEP = 0.25
    """Seconds of CPU time that count as progress; a loop that polls a lock file stays well below."""

    def __init__(self, clock: Clock, limits: ImportLimits, memory: MemoryLimit) -> None:
        self._clock = clock
        self._limits = limits
        self._memory = memory
        self._progress_at = clock.monotonic()
        self._looked_at = float("-inf")
        self._cpu = 0.0
        self._stages = 0
        self._runnable = 0
        self._looks = 0
        self._resident = 0

    async def __call__(self, child: Child, lines: Sequence[Mapping[str, Any]]) -> str | None:
        reading = self._memory.read()
        if reading is not None and reading.used >= reading.limit * self._limits.memory_fraction:
            return ImportOutcome.INSUFFICIENT_MEMORY
        now = self._clock.monotonic()
        stages = sum("stage" in line for line in lines)
        if stages > self._stages:
            self._stages = stages
            self._progressed(now)
        if now - self._looked_at >= min(self._CPU_INTERVAL, self._limits.stall / 4):
            self._looked_at = now
            self._look_at_tree(child.pid, now)
            if self._resident >= self._limits.memory_most:
                return ImportOutcome.INSUFFICIENT_MEMORY
        if now - self._progress_at < self._limits.stall:
            return None
        # Ready to run most of the time and still no progress: it did not get the CPU; that is not its fault.
        starved = self._looks > 0 and self._runnable / self._looks > 0.5
        return ImportOutcome.STARVED if starved else ImportOutcome.TIMEOUT

    def _progressed(self, now: float) -> None:
        self._progress_at = now
        self._runnable = self._looks = 0

    def _look_at_tree(self, pid: int, now: float) -> None:
        total = 0.0
        self._resident = 0
        runnable = False
        with contextlib.suppress(psutil.Error):
            leader = psutil.Process(pid)
            for process in (leader, *leader.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
                    self._resident += process.memory_info().rss
                    runnable = runnable or process.status() == psutil.STATUS_RUNNING
        self._looks += 1
        self._runnable += runnable
        if abs(total - self._cpu) >= self._CPU_STEP:
            self._cpu = total
            self._progressed(now)


# -- children's answers into facts: whatever they say, only what has the right shape gets in ----------------


def _str(value: object, limit: int = 300) -> str | None:
    if not isinstance(value, str):
        return None
    # Undecodable file names arrive as lone surrogates, which no output could encode.
    return value[:limit].encode("utf-8", "replace").decode()


def _strs(value: object, limit: int = 200) -> tuple[str, ...]:
    items = value if isinstance(value, list) else []
    return tuple(text for item in items[:limit] if (text := _str(item)) is not None)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _versions(value: object) -> dict[str, str]:
    return {key: text for key, item in _map(value).items() if (text := _str(item, 64)) is not None}


def _facts_from(answer: Mapping[str, Any], target: Target) -> EnvironmentFacts:
    torch = answer.get("torch")
    problem = _str(answer.get("problem"))
    return EnvironmentFacts(
        scope=target.scope,
        python=_str(answer.get("python"), 4096) or target.python,
        python_source=target.python_source,
        python_version=_str(answer.get("python_version"), 32),
        root=target.root,
        problem=problem if problem in {None, "kernel-too-old"} else "root-unreadable",
        fingerprint=_str(answer.get("fingerprint"), 64) or "",
        site_dirs=_strs(answer.get("site_dirs")),
        path_code=_strs(answer.get("path_code")),
        distributions={key: value for key, value in _versions(answer.get("distributions")).items() if key in TRACKED},
        distribution_count=_int(answer.get("distribution_count")) or 0,
        requires=_strs(answer.get("requires")),
        editable=_strs(answer.get("editable")),
        torch_present=isinstance(torch, dict),
        torch_version=_str(_map(torch).get("version"), 64),
        torch_cuda=_str(_map(torch).get("cuda"), 16),
        torch_without_cuda=_map(torch).get("cuda_stated") is True and _map(torch).get("cuda") is None,
        torch_hip=_str(_map(torch).get("hip"), 32),
        kernel=_kernel_from(_map(answer.get("kernel"))),
        libcuda=_libcuda_from(answer.get("libcuda"), target),
        flashinfer=_flashinfer_from(_map(answer.get("flashinfer"))),
    )


def _kernel_from(answer: Mapping[str, Any]) -> KernelFiles:
    return KernelFiles(
        kind=_str(answer.get("kind")) or "absent",
        folders=_strs(answer.get("folders")),
        plain=answer.get("plain") is True,
    )


def _libcuda_from(answer: object, target: Target) -> DriverLibrary:
    return DriverLibrary(
        found=_libraries(_map(answer).get("found")),
        compat=_libraries(_map(answer).get("compat")),
        path_seen=target.environ is not None,
    )


def _libraries(value: object) -> tuple[LibraryFile, ...]:
    items = value if isinstance(value, list) else []
    return tuple(
        LibraryFile(
            path=path,
            version=_str(_map(item).get("version"), 32),
            kind=_str(_map(item).get("kind"), 16) or "driver",
            where=_str(_map(item).get("where"), 32) or "default",
            conf=_str(_map(item).get("conf"), 4096),
        )
        for item in items[:40]
        if (path := _str(_map(item).get("path"), 4096)) is not None
    )


def _flashinfer_from(answer: Mapping[str, Any]) -> FlashInferFiles:
    mamba = _map(answer.get("mamba"))
    names = mamba.get("names")
    version = _str(answer.get("version"), 64)
    if version is None and answer.get("kind") == "package" and answer.get("build_meta") is False:
        version = UNKNOWN_VERSION
    return FlashInferFiles(
        kind=_str(answer.get("kind")) or "absent",
        places=_strs(answer.get("places")),
        version=version,
        mamba=MambaFiles(
            state=_str(mamba.get("state")) or "absent",
            names=None if names is None else _strs(names),
            symbol=_str(mamba.get("symbol")) or "unknown",
        ),
        cubin=_companion_from(_map(answer.get("cubin"))),
        jit_cache=_companion_from(_map(answer.get("jit_cache"))),
        missing=_strs(answer.get("missing")),
    )


UNKNOWN_VERSION = "0.0.0+unknown"
"""What FlashInfer calls itself without its build metadata; it then compares no versions."""


def _companion_from(answer: Mapping[str, Any]) -> Companion:
    return Companion(kind=_str(answer.get("kind")) or "absent", version=_str(answer.get("version"), 64))


def _evidence_from(report: ChildReport, at: float, *, same_user: bool) -> ImportEvidence:
    line = report.result
    common: dict[str, Any] = {"at": at, "stage": _str(report.stage, 120), "same_user": same_user}
    if line is not None and isinstance(line["result"], dict):
        return _evidence_from_result(line["result"], common)
    if report.exec_error is not None:
        return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason="cannot-start", **common)
    common["seconds"] = report.duration
    common["tail"] = _last_line(report.tail)
    if report.stopped == FLOOD:
        return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason=FLOOD, **common)
    if report.stopped is not None:
        return ImportEvidence(outcome=ImportOutcome(report.stopped), **common)
    if report.timed_out:
        return ImportEvidence(outcome=ImportOutcome.STARVED, **common)
    if report.killed:
        # It closed the channel that only we know of, and lived on: nothing that an import does.
        return ImportEvidence(outcome=ImportOutcome.NOT_ALLOWED, reason="no-answer", **common)
    if report.exit_code is not None and -report.exit_code == signal.SIGKILL:
        # Nothing of ours sent it: that is how the kernel ends a process when memory runs out.
        return ImportEvidence(outcome=ImportOutcome.INSUFFICIENT_MEMORY, **common)
    return ImportEvidence(
        outcome=ImportOutcome.CRASHED, exit_code=report.exit_code, signal=report.signal_name, **common
    )


def _evidence_from_result(result: Mapping[str, Any], common: Mapping[str, Any]) -> ImportEvidence:
    seconds = result.get("seconds")
    exception = _str(result.get("exception"), 100)
    ok = result.get("ok") is True
    outcome = ImportOutcome.OK if ok else ImportOutcome.FAILED
    if exception == "MemoryError":
        outcome = ImportOutcome.INSUFFICIENT_MEMORY
    return ImportEvidence(
        outcome=outcome,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        step=_str(result.get("step")),
        symbol=_str(result.get("symbol")),
        names=_strs(result.get("names")),
        exception=exception,
        message=_str(result.get("message"), 2000) or "",
        where=_str(result.get("where")),
        missing=_str(result.get("missing")),
        errno=_int(result.get("errno")),
        os_error=result.get("is_os_error") is True,
        exited=result.get("exit") is True,
        sglang_catches=_bool(result.get("sglang_catches")),
        cause=_str(result.get("cause"), 400),
        versions=_versions(result.get("versions")),
        torch_cuda=_str(result.get("torch_cuda"), 16),
        cuda_initialized=_bool(result.get("cuda_initialized")),
        max_rss_bytes=_int(result.get("max_rss_bytes")),
        **common,
    )


def _ending(report: ChildReport) -> str:
    if report.signal_name is not None:
        return f"was ended by {report.signal_name}"
    return f"exited with code {report.exit_code}"


def _last_line(tail: str) -> str:
    """Give the last line that a child printed, printable characters only, bounded."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return "".join(char for char in (lines[-1] if lines else "") if char.isprintable())[:200]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _remove_leftovers() -> None:
    """Remove folders of imports whose agent was killed: older than any import lasts, and our own."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LEFTOVER_AFTER:
                shutil.rmtree(path, ignore_errors=True)


def _status_field(path: Path, name: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.split()
    return []


def _user_of(pid: int, proc: Path) -> _User | None:
    """Effective user, group and supplementary groups of a process, or None when it is gone."""
    status = proc / str(pid) / "status"
    uids, gids, groups = (_status_field(status, name) for name in ("Uid", "Gid", "Groups"))
    try:
        return _User(int(uids[1]), int(gids[1]), tuple(int(group) for group in groups))
    except (ValueError, IndexError):
        return None


def _may_change_user(proc: Path) -> bool:
    """Whether this process holds CAP_SETUID and CAP_SETGID: uid 0 in a container often does not."""
    try:
        capabilities = int(_status_field(proc / "self/status", "CapEff")[0], 16)
    except (ValueError, IndexError):
        return False
    return bool(capabilities >> _CAP_SETUID & 1 and capabilities >> _CAP_SETGID & 1)


def _home_of(user: _User | None) -> str | None:
    """Home directory by the user database, which is what Python falls back to without HOME."""
    try:
        return pwd.getpwuid(os.geteuid() if user is None else user.uid).pw_dir
    except KeyError:
        return None
