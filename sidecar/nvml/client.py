"""The agent's side of the NVML worker: one worker, one deadline per round, and what the answer means.

Not only NVML is asked in the worker but also ``/proc/driver/nvidia`` and ``/dev/nvidiactl``: both end in the
driver's own code, and a wedged driver must not reach the serving process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidecar.isolation import Child, Isolation, child_environment
from sidecar.model import ProbeCrash, ProbeTimeout
from sidecar.nvml.reading import GpuReading, NvmlReading

_WORKER = str(Path(__file__).with_name("worker.py"))
_MAX_STUCK = 2
"""Workers that cannot be killed: one, and the one more that was tried beside it. Never a third."""
_FRESH_AFTER_MISSING = 6
"""Rounds without a library after which a new worker looks: the loader remembers folders it did not find."""
_LIBRARY_NOT_FOUND = 12
_CLOSE_WAIT = 0.5
"""Seconds that closing gives a round in progress to notice its worker's end."""


class NvmlClient:
    """Keeps one worker and asks it. One per agent; safe to cancel at any point."""

    def __init__(
        self,
        isolation: Isolation,
        *,
        environ: Mapping[str, str],
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        binding: Path | None = None,
    ) -> None:
        """``binding`` is the folder that holds ``pynvml``, by default the agent's own."""
        self._isolation = isolation
        self._environ = dict(environ)
        self._proc = proc
        self._dev = dev
        self._binding = binding or _find_binding()
        self._turn = asyncio.Lock()
        self._worker: Child | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stuck: list[Child] = []
        self._where: str | None = None
        self._succeeded = False
        self._missing = 0
        self._uuids: dict[int, str] = {}

    async def round(self, deadline: float) -> NvmlReading:
        """Ask the worker once; start one first if there is none.

        Raises ProbeTimeout after ``deadline`` seconds (plus at most a second to end the worker), and at once
        while workers that cannot be killed stand in the way; ProbeCrash when the worker ended instead of
        answering, and when the NVML binding cannot be used. Whatever it raises, the next round starts afresh.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(deadline):
                    await self._room()
                    answer = await self._ask()
            except TimeoutError:
                worker = self._worker
                await self._retire()
                where = self._where or "the start of the worker"
                raise ProbeTimeout(
                    f"NVML did not return from {where} within {deadline:g} s.",
                    where=where,
                    stuck=worker is not None and worker.stuck,
                ) from None
            except BaseException:
                # Also on cancellation: a worker whose answer nobody took would give it to the next round.
                self._let_go()
                raise
            return self._reading(answer)

    async def close(self) -> None:
        """End the worker. No child that can be killed is left afterwards; a round in progress fails."""
        if self._worker is not None:
            self._worker.signal_group(signal.SIGKILL)
        # The round first: it would wait to its deadline for a channel that is closed under it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WAIT), self._turn:
                pass
        await self._retire()

    # -- the worker's life ------------------------------------------------------------------------

    async def _room(self) -> None:
        """Wait for the end of earlier workers. Raises ProbeTimeout where one more would pile up."""
        if self._ending:
            await asyncio.wait(self._ending)
        self._stuck = [child for child in self._stuck if child.exit_code is None]
        if len(self._stuck) >= _MAX_STUCK:
            where = self._where or "an NVML call"
            raise ProbeTimeout(
                f"{len(self._stuck)} NVML workers cannot be killed, the last one in {where}; no more are started.",
                where=where,
                stuck=True,
            )

    async def _start(self) -> Child:
        argv = [sys.executable, "-I", "-S", _WORKER, "--proc", str(self._proc), "--dev", str(self._dev)]
        if self._binding is not None:
            argv += ["--binding", str(self._binding)]
        self._missing = 0
        self._worker = await self._isolation.start(argv, env=child_environment(self._environ))
        return self._worker

    def _let_go(self) -> None:
        """Begin to end the worker. A task of its own, so that a cancelled round does not leave it alive."""
        worker, self._worker = self._worker, None
        if worker is None:
            return

        async def end() -> None:
            await self._isolation.stop(worker)
            if worker.stuck:
                self._stuck.append(worker)

        task = asyncio.get_running_loop().create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _retire(self) -> None:
        self._let_go()
        if self._ending:
            await asyncio.wait(self._ending)

    # -- a round ----------------------------------------------------------------------------------

    async def _ask(self) -> Mapping[str, Any]:
        """Get one result. A worker that finds its library replaced, or none for long, gives way to a new one."""
        if self._missing >= _FRESH_AFTER_MISSING:
            await self._retire()
        for _ in range(2):
            worker = self._worker or await self._start()
            answer = await self._exchange(worker)
            if "stale" not in answer:
                return answer
            await self._retire()
        raise ProbeCrash(f"The NVML library {answer['stale']} is being replaced.")

    async def _exchange(self, worker: Child) -> Mapping[str, Any]:
        self._where = None
        with contextlib.suppress(OSError):  # it is gone; what it still said, and how it ended, follows below
            await worker.send({"op": "round"})
        while (line := await worker.receive()) is not None:
            if "at" in line:
                self._where = str(line["at"])
            elif "result" in line or "stale" in line:
                return line
            elif "unusable" in line:
                raise ProbeCrash(f"The Python binding for NVML (nvidia-ml-py) cannot be used: {line['unusable']}")
            elif "exec_error" in line:
                raise ProbeCrash(f"The NVML worker could not be started: {line['exec_error']}")
        await self._retire()
        raise ProbeCrash(_obituary(worker, self._where))

    def _reading(self, answer: Mapping[str, Any]) -> NvmlReading:
        result = answer["result"]
        if not isinstance(result["code"], int):
            self._let_go()
            raise ProbeCrash(
                f"The Python binding for NVML (nvidia-ml-py) cannot be used: {result['call']}: {result['words']}"
            )
        version, flavour = parse_module(result["module_text"] or "")
        reading = NvmlReading(
            code=result["code"],
            call=result["call"],
            words=result["words"],
            loader=result["loader"],
            driver_version=result.get("driver_version") or None,
            nvml_version=result.get("nvml_version") or None,
            cuda_driver_version=cuda_version(result.get("cuda_driver_version")),
            library=result["library"],
            library_version=library_version(result["library"]),
            count=result["count"],
            gpus=self._gpus(result["gpus"]),
            errors=result["errors"],
            module_present=result["module_text"] is not None,
            module_version=version,
            module_flavour=flavour,
            module_gpus=result["module_gpus"],
            device_present=result["device"]["present"],
            device_refused=result["device"]["refused"],
            succeeded_before=self._succeeded,
            visible_devices=_short(self._environ.get("NVIDIA_VISIBLE_DEVICES")),
            driver_capabilities=_short(self._environ.get("NVIDIA_DRIVER_CAPABILITIES")),
        )
        self._succeeded = self._succeeded or reading.code == 0
        self._missing = self._missing + 1 if reading.code == _LIBRARY_NOT_FOUND else 0
        return reading

    def _gpus(self, found: list[dict[str, Any]]) -> tuple[GpuReading, ...]:
        answered = {gpu["index"]: gpu["uuid"] for gpu in found if gpu.get("uuid")}
        if found:
            # A remembered name is dropped once another index carries it: the driver has renumbered.
            known = {index: uuid for index, uuid in self._uuids.items() if uuid not in answered.values()}
            self._uuids = known | answered
        return tuple(_gpu(gpu, self._uuids.get(gpu["index"])) for gpu in found)


def parse_module(text: str) -> tuple[str | None, str | None]:
    """Read version and flavour (open or proprietary) of the kernel module from ``/proc/driver/nvidia/version``.

    Lines differ with flavour and release: "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release
    Build" and "NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12".
    """
    found = re.search(r"^NVRM version:[^\n]*?\b(Open )?Kernel Module\b([^\n]*)", text, re.MULTILINE)
    if found is None:
        return None, None
    version = re.search(r"(?<![\w.])\d{2,4}(?:\.\d{1,4}){1,3}(?![\w.])", found.group(2))
    return (version.group() if version else None), ("open" if found.group(1) else "proprietary")


def library_version(path: str | None) -> str | None:
    """Read the version in the real file name of the library; None for a name without one, such as ``.so.1``."""
    found = re.search(r"/libnvidia-ml\.so\.(\d+(?:\.\d+)+)$", path or "")
    return found.group(1) if found else None


def cuda_version(number: int | None) -> str | None:
    """Write NVML's number of a CUDA version (13000) as people do (13.0)."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _gpu(found: Mapping[str, Any], uuid: str | None) -> GpuReading:
    used, total = found.get("memory") or (None, None)
    capability = found.get("compute_capability")
    power, percent = found.get("power_mw"), found.get("utilization_percent")
    return GpuReading(
        index=found["index"],
        code=found["code"],
        words=found["words"],
        uuid=uuid,
        name=found.get("name") or None,
        compute_capability=".".join(str(part) for part in capability) if capability else None,
        mig=found.get("mig"),
        memory_used=used,
        memory_total=total,
        temperature=found.get("temperature"),
        power=None if power is None else power / 1000,
        utilization=None if percent is None else percent / 100,
        errors=found["errors"],
    )


def _obituary(worker: Child, where: str | None) -> str:
    """One sentence on a worker that ended without an answer."""
    code = worker.exit_code
    if code is None:
        how = "closed its channel"
    elif code < 0:
        how = f"was ended by {_signal_name(-code)}"
    else:
        how = f"ended with status {code}"
    last = worker.tail.strip().splitlines()[-1:]
    said = f"; it said: {last[0].strip()[:200]}" if last else ""
    return f"The NVML worker {how} at {where or 'its start'}{said}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _short(value: str | None) -> str | None:
    """Cut a value from the environment to what a sentence can carry."""
    return None if value is None else value[:100]


def _find_binding() -> Path | None:
    """Find the folder from which this process would import ``pynvml``, without importing it."""
    try:
        spec = importlib.util.find_spec("pynvml")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.parent.parent if spec.submodule_search_locations else origin.parent
