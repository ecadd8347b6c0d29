"""Reads an environment and keeps what is known of it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import asdict, replace

from sidecar.config import Settings
from sidecar.credentials import Credentials, home_of
from sidecar.environment.answer import facts_from, surroundings_from
from sidecar.environment.facts import EnvironmentFacts
from sidecar.isolation import ChildReport, Isolation
from sidecar.model import Clock, ProbeCrash, ProbeTimeout, ProbeUnavailable, Skip, Target
from sidecar.pythonflags import without_ignored
from sidecar.redaction import scrubbed, secrets_of
from sidecar.target import variables
from sidecar.untrusted import last_line

STATIC_READER = str(Path(__file__).parents[1] / "inenv" / "static_reader.py")

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
    "quack-kernels",
    "cuda-python",
    "cuda-bindings",
    "torch-c-dlpack-ext",
)
"""Distributions of which more than the version is read, by normalised name; so are nvidia-cutlass-dsl's parts."""

DETAILED = ("sglang", "flashinfer-python", "flash-attn-4")
"""Distributions whose requirements are read."""

MODULES = (
    "sglang",
    "sglang.launch_server",
    "sglang.cli.main",
    "sgl_kernel",
    "sgl_kernel.flash_attn",
    "sgl_kernel.flash_ops",
    "sgl_kernel._fa4_interface",
    "flash_attn",
    "flash_attn.cute",
    "flash_attn_2_cuda",
    "flash_attn_interface",
    "sglang.jit_kernel.flash_attention",
    "sglang.jit_kernel.flash_attention.cute",
    "sglang.jit_kernel.flash_attention_v3",
    "sglang.jit_kernel.flash_attention_v4",
    "sglang.jit_kernel.flash_attn",
    "sglang.jit_kernel.flash_attn.cute",
    "sglang.kernels.ops.attention.flash_attention",
    "sglang.kernels.ops.attention.flash_attention_v3",
    "sglang.kernels.ops.attention.flash_attention_v4",
    "sglang.kernels.ops.attention.flash_attention_v4_sm120",
    "sglang.kernels.ops.attention.flash_attn",
    "sglang.kernels.ops.attention.flash_attn.cute",
    "flashinfer",
    "flashinfer_cubin",
    "flashinfer_jit_cache",
    "cutlass",
    "cutlass.cute",
    "quack",
    "cuda.bindings",
    "cuda.bindings.driver",
    "tvm_ffi",
    "torch",
    "torch_c_dlpack_ext",
    "triton",
    "transformers",
    "einops",
    "kernels",
    "pynvml",
)
"""Modules that are looked for: FlashAttention's of every SGLang release, and what those need at import."""

_VARIABLES = {
    # What decides an interpreter's import path besides its own files.
    "PYTHONPATH": 16384,
    "PYTHONHOME": 8192,
    "PYTHONUSERBASE": 4096,
    "PYTHONNOUSERSITE": 64,
    "PYTHONSAFEPATH": 64,
    "HOME": 4096,
    # Where the dynamic loader looks first.
    "LD_LIBRARY_PATH": 16384,
    # Where FlashInfer looks for a compiler, its cache and precompiled kernels.
    "PATH": 16384,
    "CUDA_HOME": 4096,
    "CUDA_PATH": 4096,
    "FLASHINFER_WORKSPACE_BASE": 4096,
    "FLASHINFER_CUBIN_DIR": 4096,
}
"""Variables of the server that the reader gets, with the characters of each: all must fit into one argument."""
_START_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""What an interpreter may need to start at all; the static reader's child gets nothing else."""
_SET_IT: Final = "set server_python to the interpreter of the server's environment"
_CACHE_SECONDS = 30.0
"""Several probes ask in every minute; all get the answer of one child."""


_WHENCE: Final[Mapping[str, tuple[str, str]]] = {
    "setting": ("which the setting server_python names", "correct server_python"),
    "launch-command": (
        "which the launch names, or its script's first line",
        "correct the launch's command, or name the interpreter in server_python",
    ),
    "argv0": ("from the server's command line", _SET_IT),
    "exe": ("which the server's process runs", _SET_IT),
    "maps": ("beside the packages that the server has loaded", _SET_IT),
    "server-path": ("from the server's PATH", _SET_IT),
    "virtual-env": ("from VIRTUAL_ENV", _SET_IT),
    "conda": ("from CONDA_PREFIX or a usual place of conda", _SET_IT),
    "path": ("from PATH", _SET_IT),
}
"""Where an interpreter's path came from, in words, and what to do where it is wrong."""


class InterpreterUnusable(ProbeUnavailable):
    """Raised where the interpreter that was to be asked is none that can be.

    ``reason`` is a token: missing, folder, not-executable, wrong-architecture, loader-missing or not-python.
    ``sentence`` names the interpreter, where its path came from and what is wrong; ``remedy`` what to do. Its text is
    both.
    """

    def __init__(self, reason: str, target: Target, wrong: str) -> None:
        whence, self.remedy = _WHENCE.get(target.python_source, (f"found as {target.python_source}", _SET_IT))
        self.reason = reason
        self.sentence = f"The interpreter {target.python}, {whence}, {wrong}."
        super().__init__(f"{self.sentence[:-1]}; {self.remedy}.")


def _unusable(target: Target, number: int | None, words: str) -> InterpreterUnusable:
    """Say what is wrong with an interpreter that the system does not execute."""
    path = Path(str(target.python))
    there = os.path.lexists(path)
    if path.is_dir():
        return InterpreterUnusable("folder", target, "is a folder, not a program")
    if number == errno.ENOENT and there and not path.exists():
        return InterpreterUnusable("missing", target, "is a link to a file that does not exist")
    if number == errno.ENOENT and there:
        wrong = "is there, but the loader or the program in its first line, which it needs in turn, does not exist"
        return InterpreterUnusable("loader-missing", target, wrong)
    if number in {errno.ENOENT, errno.ENOTDIR}:
        return InterpreterUnusable("missing", target, "does not exist")
    if number == errno.ENOEXEC:
        wrong = f"is a program for another processor than this {os.uname().machine}, or none at all ({words})"
        return InterpreterUnusable("wrong-architecture", target, wrong)
    return InterpreterUnusable("not-executable", target, f"may not be executed ({words})")


class Environment:
    """Reads the server's environment and keeps what is known of it. One per agent."""

    def __init__(self, isolation: Isolation, clock: Clock, settings: Settings, credentials: Credentials) -> None:
        self._isolation = isolation
        self._clock = clock
        self._credentials = credentials
        deadlines = (settings.deadlines.get(probe, 10.0) for probe in ("packages", "flashinfer"))
        # Less than the scheduler's deadline, so that this module's sentence is the one that is seen.
        self._timeout = max(1.0, min(deadlines) - 1.0)
        self._facts: tuple[str, float, EnvironmentFacts] | None = None
        self._reading: dict[str, asyncio.Task[EnvironmentFacts]] = {}
        self._stuck_at: int | None = None

    # -- reading ---------------------------------------------------------------------------------

    async def read(self, target: Target) -> EnvironmentFacts:
        """Read the environment; one child at a time, and at most one in half a minute.

        Raises Skip where there is no interpreter to ask, InterpreterUnusable where the one that is named is none,
        ProbeTimeout and ProbeCrash with one sentence otherwise.
        """
        if target.unread is not None:
            raise Skip(target.unread)
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
        environ = without_ignored(self._credentials.environ(target), target.python_flags)
        user = self._credentials.user(target)
        spec = {
            "environ": {name: environ[name][:limit] for name, limit in _VARIABLES.items() if name in environ},
            # Of a user of another root this machine's database says nothing.
            "home": None if target.root is not None else home_of(user),
            "environ_seen": variables(target, *_VARIABLES) is not None,
            "cwd": target.cwd,
            "cwd_on_path": target.cwd_on_path is True,
            "script": target.script,
            "no_site": "-S" in target.python_flags,
            "user": None if user is None else asdict(user),
            "tracked": TRACKED,
            "detailed": DETAILED,
            "modules": MODULES,
            "known": previous.fingerprint if previous is not None else None,
        }
        refusal, privilege = self._credentials.privilege(target)
        # A foreign interpreter is never executed, nor one whose owner the agent cannot become: it would run with
        # more rights than its owner has. Both are read from outside, by the agent's own interpreter.
        outside = target.root is not None or refusal is not None
        if outside:
            spec |= {"root": target.root or "/", "python": target.python}
        report = await self._isolation.run(
            [sys.executable if outside else str(target.python), "-I", "-S", "-B", STATIC_READER, json.dumps(spec)],
            env={} if outside else {name: environ[name] for name in _START_VARIABLES if name in environ},
            timeout=self._timeout,
            # Whoever owns the environment may have put anything in its interpreter's place: it gets no capability of
            # the agent's. The agent's own interpreter may need one to look through another process's root.
            privilege=None if outside else replace(privilege, capabilities=False),
        )
        if report.stuck:
            self._stuck_at = self._isolation.abandoned
        answer = self._answer(report, target)
        if answer.get("unchanged") is True and previous is not None:
            facts = replace(previous, **surroundings_from(answer, target))
            facts = previous if facts == previous else facts
        elif answer.get("problem") == "no-environment":
            sentence = "no Python environment with SGLang or FlashInfer was found under the root; set server_python"
            raise Skip(sentence)
        else:
            facts = facts_from(answer, target)
        self._facts = (key, self._clock.monotonic(), facts)
        return facts

    def _answer(self, report: ChildReport, target: Target) -> Mapping[str, Any]:
        line = report.result
        if line is not None and isinstance(line["result"], dict):
            return line["result"]
        outside = target.root is not None or self._credentials.privilege(target)[0] is not None
        name = "the reader" if outside else f"{target.python} ({target.python_source})"
        advice = _SET_IT
        if report.exec_error is not None:
            if not outside:
                number = next((line.get("errno") for line in report.lines if "exec_error" in line), None)
                raise _unusable(target, number, report.exec_error)
            sentence = f"{name} could not be started: {report.exec_error}; {advice}"
            raise ProbeCrash(sentence)
        if report.timed_out:
            at = report.stage or "start"
            sentence = f"{name} did not answer within {self._timeout:g} s while its packages were read (at: {at})"
            raise ProbeTimeout(sentence, where=at, stuck=report.stuck)
        ended = _ending(report)
        if report.stage is None:
            # Whatever stands in the interpreter's place may print what it likes.
            said = last_line(scrubbed(report.tail, secrets_of(self._credentials.environ(target))))
            said = f" ({said})" if said else ""
            if not outside:
                wrong = f"{ended} without an answer{said}: it is no Python 3.8 or newer, or one that does not start"
                raise InterpreterUnusable("not-python", target, wrong)
            sentence = f"{name} {ended} without an answer{said}; {advice}"
            raise ProbeCrash(sentence)
        sentence = f"{name} {ended} while its packages were read (at: {report.stage})"
        raise ProbeCrash(sentence)

    async def close(self) -> None:
        """End what is running."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _key(self, target: Target) -> str:
        environ = self._credentials.environ(target)
        user = self._credentials.user(target)
        return digest(
            [
                target.python,
                target.python_source,
                target.root,
                target.scope,
                target.pid,
                target.cwd,
                target.cwd_on_path,
                target.script,
                target.python_flags,
                variables(target, *_VARIABLES) is None,
                None if user is None else [user.uid, user.gid, *user.groups],
                {name: environ.get(name) for name in _VARIABLES},
            ]
        )


def _ending(report: ChildReport) -> str:
    if report.signal_name is not None:
        return f"was ended by {report.signal_name}"
    return f"exited with code {report.exit_code}"


def digest(value: object) -> str:
    """A key for whatever JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
