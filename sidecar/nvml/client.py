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
import site
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from sidecar.childenv import child_environment
from sidecar.isolation import Child, Isolation, signal_name
from sidecar.model import ProbeCrash, ProbeTimeout
from sidecar.nvml.reading import GpuReading, MigDevice, NvmlReading, PcieLink, RemappedRows, XidCount

_WORKER = str(Path(__file__).with_name("worker.py"))
HUNG = "hung"
"""The code of a GPU that is left out because a call to it did not return."""
RETRY_EVERY = 10
"""Rounds after which a GPU that hung is asked again."""
_HUNG_AFTER = 0.5
"""The part of the deadline that one GPU may take, in one call or in all: enough is left to ask the others anew."""
_OPEN = "nvmlDeviceGetHandleByIndex"
_OPEN_HUNG_AFTER = 2.0
"""The same for the first call to a GPU, in deadlines: without persistence mode it starts the GPU, for seconds."""
_RETRY_OPEN_HUNG_AFTER = 0.8
"""The same for the first call to a GPU that hung before: the last thing in its round."""
_INIT = "nvmlInit"
_INIT_PATIENCE = 60.0
"""Seconds that opening NVML may take: without persistence mode it starts every GPU of the machine."""
_MAX_STUCK = 2
"""Workers that cannot be killed: one, and the one more that was tried beside it. Never a third."""
_FRESH_AFTER_MISSING = 6
"""Rounds without a library after which a new worker looks: the loader remembers folders it did not find."""
_LIBRARY_NOT_FOUND = 12
_CLOSE_WAIT = 0.5
"""Seconds that closing gives a round in progress to notice its worker's end."""
_UNREADABLE = (AssertionError, AttributeError, KeyError, TypeError, ValueError)
"""What is raised over an answer that lacks something or has another shape."""
_MOST_GPUS = 1024
"""What no machine has: a larger number of GPUs is none."""
_EVENTS = -1
"""Stands for the event set among what can be left out; GPUs count from 0."""


class _LeftOut(Struct):
    """Something that hung: the call, and for how many rounds it was not asked since."""

    call: str
    rounds: int = 0


class _Exchange(Struct):
    """What a worker was asked and has answered so far.

    Times are the loop's: when it was asked, when it last said anything, when it named the call in progress, when it
    began to ask the GPU in progress; opening the GPU does not count there.
    """

    begun: float = 0.0
    retry: tuple[int, ...] = ()
    heard: float = 0.0
    called: float = 0.0
    entered: float = 0.0
    call: str | None = None
    gpu: int | None = None
    head: Mapping[str, Any] | None = None
    gpus: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    events: Mapping[str, Any] | None = None

    @property
    def where(self) -> str | None:
        """The call in progress, in words."""
        return self.call if self.gpu is None or self.call is None else f"{self.call} on GPU {self.gpu}"

    @property
    def culprit(self) -> int | None:
        """What can be left out if the call in progress never returns: a GPU, the event set, or nothing."""
        if self.gpu is not None:
            return self.gpu
        return _EVENTS if (self.call or "").startswith("nvmlEventSet") else None


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
        oneshot: bool = False,
        init_patience: float = _INIT_PATIENCE,
        slow_every: float | None = None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``binding`` is the folder that holds ``pynvml``, by default the agent's own.

        ``oneshot`` ends the worker after each round, so that ``/dev/nvidiactl`` is not held open in between; Xid
        events cannot be had then. ``init_patience`` is how many seconds opening NVML may take, ``slow_every`` for
        how many the worker keeps facts that rarely change (its own default if None), ``now`` epoch seconds,
        ``monotonic`` those of a clock that never goes back.
        """
        self._isolation = isolation
        self._environ = dict(environ)
        self._proc = proc
        self._dev = dev
        self._binding = binding or _find_binding()
        self._oneshot = oneshot
        self._init_patience = init_patience
        self._slow_every = slow_every
        self._now = now
        self._monotonic = monotonic
        self._turn = asyncio.Lock()
        self._worker: Child | None = None
        self._exchange: _Exchange | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._stuck: list[Child] = []
        self._where: str | None = None
        self._succeeded = False
        self._missing = 0
        self._rounds = 0
        self._read_in: dict[int, int] = {}
        self._uuids: dict[int, str] = {}
        self._left_out: dict[int, _LeftOut] = {}
        self._opened: set[int] = set()
        self._xids: dict[tuple[str | int, int], XidCount] = {}
        self._links_seen_up: dict[str | int, set[int]] = {}
        self._latest: NvmlReading | None = None
        self._latest_at: float | None = None

    @property
    def latest(self) -> NvmlReading | None:
        """What the last round that was answered found."""
        return self._latest

    @property
    def latest_at(self) -> float | None:
        """When `latest` was found, in monotonic seconds: its age must not follow a clock that is set anew."""
        return self._latest_at

    async def round(self, deadline: float) -> NvmlReading:
        """Ask the worker once; start one first if there is none.

        A GPU that does not return from a call, or takes half the deadline, is left out and the others are asked by a
        new worker, within the same deadline; what could not be asked any more is then as in the round before, and
        has no entry if it was not asked in that one either. Raises ProbeTimeout after
        ``deadline`` seconds (plus at most a second to end the worker) where that is not about one GPU, and at once
        while workers that cannot be killed stand in the way; ProbeCrash when the worker ended instead of
        answering, and when the NVML binding cannot be used. Whatever it raises, the next round starts afresh, but
        for a worker that is still opening NVML or making progress: the next round goes on waiting for its answer.
        """
        async with self._turn:
            found = _Exchange()
            hung: set[int] = set()
            self._rounds += 1
            try:
                async with asyncio.timeout(deadline):
                    await self._ask(found, hung, deadline)
            except (TimeoutError, ProbeTimeout) as error:
                if self._exchange is not None:
                    _merge(found, self._exchange)
                if found.head is not None and (hung or self._complete(found)):
                    # What hangs is known already, and this is about what it cost the others; or it is only about
                    # something that is retried, and cost nobody anything.
                    self._give_up_retry()
                    self._let_go()
                elif isinstance(error, TimeoutError):
                    raise await self._timeout(deadline) from None
                else:
                    self._let_go()
                    raise
            except _UNREADABLE as error:
                self._let_go()
                raise _nonsense(error) from error
            except BaseException:
                # Also on cancellation: a worker whose answer nobody took would give it to the next round.
                self._let_go()
                raise
            if self._oneshot:
                await self._retire()
            try:
                return self._reading(found)
            except _UNREADABLE as error:
                self._let_go()
                raise _nonsense(error) from error

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
        if self._slow_every is not None:
            argv += ["--slow-every", str(self._slow_every)]
        self._missing = 0
        self._opened.clear()
        self._worker = await self._isolation.start(argv, env=child_environment(self._environ))
        return self._worker

    def _let_go(self) -> None:
        """Begin to end the worker. A task of its own, so that a cancelled round does not leave it alive."""
        worker, self._worker = self._worker, None
        self._exchange = None
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

    async def _timeout(self, deadline: float) -> ProbeTimeout:
        """Say what did not return, and end the worker unless waiting for it makes sense."""
        worker, exchange = self._worker, self._exchange
        where = self._where = (exchange and exchange.where) or "the start of the worker"
        sentence = f"NVML did not return from {where} within {deadline:g} s."
        if exchange is not None and exchange.call is not None:
            now = asyncio.get_running_loop().time()
            limit = self._limit(exchange, deadline) or exchange.heard + deadline * _HUNG_AFTER
            if (exchange.call == _INIT or now < limit) and now - exchange.begun < self._init_patience:
                return ProbeTimeout(sentence, where=where)
        await self._retire()
        return ProbeTimeout(sentence, where=where, stuck=worker is not None and worker.stuck)

    # -- a round ----------------------------------------------------------------------------------

    async def _ask(self, found: _Exchange, hung: set[int], deadline: float) -> None:
        """Fill ``found``, with as many workers as that takes, and add to ``hung`` what does not return."""
        await self._room()
        if self._missing >= _FRESH_AFTER_MISSING:
            await self._retire()
        if self._exchange is None:
            for left_out in self._left_out.values():
                left_out.rounds += 1
        retry = self._due()
        replaced: str | None = None
        while True:
            worker = self._worker or await self._start()
            if self._exchange is None:
                self._exchange = await self._request(worker, found, retry)
            exchange = self._exchange
            ending = await self._listen(worker, exchange, deadline)
            _merge(found, exchange)
            if ending == "done":
                self._exchange = None
                for index in exchange.retry:
                    if index in exchange.gpus or (index == _EVENTS and exchange.events is not None):
                        self._left_out.pop(index, None)
                return
            if ending != HUNG:
                if replaced is not None:
                    raise ProbeCrash(f"The NVML library {ending} is being replaced.")
                replaced = ending
                await self._retire()
                self._left_out.clear()  # hangs of another driver
                continue
            culprit = exchange.culprit
            assert culprit is not None  # `_listen` waits for ever for what cannot be left out
            hung.add(culprit)
            self._where = exchange.where
            self._left_out[culprit] = _LeftOut(exchange.call or "")
            retry = tuple(index for index in retry if index not in hung and index not in found.gpus)
            self._let_go()
            if self._complete(found) and not retry:
                return
            await self._room()

    def _due(self) -> tuple[int, ...]:
        """What to retry in this round: one thing, and nothing beside a worker that cannot be killed."""
        if self._stuck or not self._left_out:
            return ()
        longest = max(self._left_out, key=lambda index: self._left_out[index].rounds)
        return (longest,) if self._left_out[longest].rounds >= RETRY_EVERY else ()

    def _give_up_retry(self) -> None:
        """Go on leaving out what is being retried and has not answered yet."""
        exchange = self._exchange
        culprit = None if exchange is None else exchange.culprit
        if exchange is not None and culprit is not None and culprit in exchange.retry:
            self._where = exchange.where
            self._left_out[culprit] = _LeftOut(exchange.call or "")

    def _complete(self, found: _Exchange) -> bool:
        """Whether nothing but what is left out is missing from an answer."""
        if found.head is None or (found.events is None and _EVENTS not in self._left_out):
            return False
        return all(index in found.gpus or index in self._left_out for index in range(found.head["count"] or 0))

    async def _request(self, worker: Child, found: _Exchange, retry: tuple[int, ...]) -> _Exchange:
        """Ask for what ``found`` does not have yet."""
        now = asyncio.get_running_loop().time()
        events = not self._oneshot and (_EVENTS not in self._left_out or _EVENTS in retry)
        leave_out = {index for index in self._left_out if index not in retry} | found.gpus.keys()
        request = {
            "op": "round",
            "leave_out": sorted(leave_out - {_EVENTS}),
            "retry": [index for index in retry if index != _EVENTS],
            "events": events,
        }
        with contextlib.suppress(OSError):  # it is gone; what it still said, and how it ended, follows below
            await worker.send(request)
        return _Exchange(begun=now, retry=retry)

    def _limit(self, exchange: _Exchange, deadline: float) -> float | None:
        """When the call in progress counts as hung; None for one that cannot be left out, where the deadline rules."""
        if exchange.culprit is None:
            return None
        if exchange.call == _OPEN and exchange.gpu not in self._opened:
            again = exchange.gpu in exchange.retry
            return exchange.called + deadline * (_RETRY_OPEN_HUNG_AFTER if again else _OPEN_HUNG_AFTER)
        begun = exchange.heard if exchange.gpu is None else exchange.entered
        return begun + deadline * _HUNG_AFTER

    async def _listen(self, worker: Child, exchange: _Exchange, deadline: float) -> str:
        """Take lines into ``exchange`` until "done", "hung", or the path of a library that was replaced."""
        loop = asyncio.get_running_loop()
        exchange.heard = exchange.entered = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(self._limit(exchange, deadline)):
                    line = await worker.receive()
            except TimeoutError:
                return HUNG
            if line is None:
                break
            exchange.heard = loop.time()
            if "at" in line:
                if line.get("gpu") != exchange.gpu or exchange.call == _OPEN:
                    exchange.entered = exchange.heard
                exchange.call, exchange.gpu, exchange.called = str(line["at"]), line.get("gpu"), exchange.heard
            elif "head" in line:
                exchange.head = line["head"]
                if not 0 <= (line["head"]["count"] or 0) <= _MOST_GPUS:
                    raise ValueError(line["head"]["count"])
            elif "gpu" in line:
                index = line["gpu"]["index"]
                exchange.gpus[index] = line["gpu"]
                (self._opened.add if line["gpu"]["code"] == 0 else self._opened.discard)(index)
            elif "events" in line:
                exchange.events = line["events"]
                self._count_xids(line["events"]["xids"])
            elif "done" in line:
                return "done"
            elif "stale" in line:
                return str(line["stale"])
            elif "unusable" in line:
                raise ProbeCrash(f"The Python binding for NVML (nvidia-ml-py) cannot be used: {line['unusable']}")
            elif "exec_error" in line:
                raise ProbeCrash(f"The NVML worker could not be started: {line['exec_error']}")
        await self._retire()
        raise ProbeCrash(_obituary(worker, exchange.where))

    def _count_xids(self, found: list[tuple[int, str | None, int]]) -> None:
        for index, uuid, xid in found:
            key = (uuid or index, xid)
            before = self._xids[key].count if key in self._xids else 0
            self._xids[key] = XidCount(index=index, uuid=uuid, xid=xid, count=before + 1, last=self._now())

    def _renumber_xids(self, gpus: tuple[GpuReading, ...]) -> None:
        """Give what was counted the index that its GPU has now. A GPU that is gone keeps its last one."""
        now: dict[str | None, int] = {gpu.uuid: gpu.index for gpu in gpus if gpu.uuid is not None}
        self._xids = {key: replace(one, index=now.get(one.uuid, one.index)) for key, one in self._xids.items()}

    # -- what the answer means --------------------------------------------------------------------

    def _reading(self, found: _Exchange) -> NvmlReading:
        head = found.head
        assert head is not None
        if not isinstance(head["code"], int):
            self._let_go()
            raise ProbeCrash(
                f"The Python binding for NVML (nvidia-ml-py) cannot be used: {head['call']}: {head['words']}"
            )
        version, flavour = parse_module(head["module_text"] or "")
        watched, event_errors = self._watched(found)
        gpus = self._gpus(found.gpus, head["count"] or 0)
        self._renumber_xids(gpus)
        reading = NvmlReading(
            code=head["code"],
            call=head["call"],
            words=head["words"],
            loader=head["loader"],
            driver_version=head.get("driver_version") or None,
            nvml_version=head.get("nvml_version") or None,
            cuda_driver_version=cuda_version(head.get("cuda_driver_version")),
            library=head["library"],
            library_version=library_version(head["library"]),
            count=head["count"],
            gpus=gpus,
            errors={**head["errors"], **event_errors},
            module_present=head["module_text"] is not None,
            module_version=version,
            module_flavour=flavour,
            module_gpus=head["module_gpus"],
            device_present=head["device"]["present"],
            device_refused=head["device"]["refused"],
            succeeded_before=self._succeeded,
            visible_devices=_short(self._environ.get("NVIDIA_VISIBLE_DEVICES")),
            driver_capabilities=_short(self._environ.get("NVIDIA_DRIVER_CAPABILITIES")),
            xids=tuple(self._xids.values()),
            xids_watched=watched,
            left_out={
                index: left_out.call
                for index, left_out in sorted(self._left_out.items())
                if 0 <= index < (head["count"] or 0)
            },
            stuck_workers=sum(child.exit_code is None for child in self._stuck),
        )
        self._succeeded = self._succeeded or reading.code == 0
        self._missing = self._missing + 1 if reading.code == _LIBRARY_NOT_FOUND else 0
        self._latest, self._latest_at = reading, self._monotonic()
        return reading

    def _watched(self, found: _Exchange) -> tuple[bool | None, Mapping[str, int | str]]:
        """Whether Xid events are listened for, and the errors that tell why not."""
        left_out = self._left_out.get(_EVENTS)
        if found.head is None or found.head["code"] != 0:
            return None, {}
        if left_out is not None:
            return False, {left_out.call: HUNG}
        return (found.events["watched"], found.events["errors"]) if found.events is not None else (None, {})

    def _gpus(self, found: Mapping[int, Mapping[str, Any]], count: int) -> tuple[GpuReading, ...]:
        answered = {index: gpu["uuid"] for index, gpu in found.items() if gpu.get("uuid")}
        if found:
            # A remembered name is dropped once another index carries it: the driver has renumbered.
            known = {index: uuid for index, uuid in self._uuids.items() if uuid not in answered.values()}
            self._uuids = known | answered
        self._read_in |= dict.fromkeys(found, self._rounds)
        # Values that are older than one round would look current: a GPU without any says more.
        before = {
            gpu.index: gpu
            for gpu in (self._latest.gpus if self._latest is not None else ())
            if self._read_in.get(gpu.index) == self._rounds - 1
        }
        gpus: list[GpuReading] = []
        for index in sorted({*found, *range(count)}):
            uuid = self._uuids.get(index)
            if index in found:
                gpus.append(_gpu(found[index], uuid, self._links_seen_up.setdefault(uuid or index, set())))
            elif (left_out := self._left_out.get(index)) is not None:
                gpus.append(
                    GpuReading(index=index, code=HUNG, words=f"{left_out.call} did not return in time", uuid=uuid)
                )
            elif index in before and before[index].uuid == uuid:
                gpus.append(before[index])
        return tuple(gpus)


def _nonsense(error: Exception) -> ProbeCrash:
    """Say that a worker does not answer as ours does: the driver's library runs in it and may have damaged it."""
    return ProbeCrash(f"The NVML worker's answer cannot be read ({type(error).__name__}); a new one is started.")


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


def _merge(found: _Exchange, exchange: _Exchange) -> None:
    """Add to what a round has found what one of its workers answered."""
    found.head = exchange.head or found.head
    found.events = found.events or exchange.events
    found.gpus.update(exchange.gpus)


def _gpu(found: Mapping[str, Any], uuid: str | None, links_seen_up: set[int]) -> GpuReading:
    """Read one GPU's answers; adds the links that are up to ``links_seen_up``."""
    used, total = found.get("memory") or (None, None)
    capability = found.get("compute_capability")
    power, percent = found.get("power_mw"), found.get("utilization_percent")
    links, active = _nvlinks(found.get("nvlinks"), links_seen_up, whole=found.get("fabric") == "completed")
    clock_events, mig_devices = found.get("clock_events"), found.get("mig_devices")
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
        pci_bus_id=found.get("pci_bus_id") or None,
        ecc_corrected=found.get("ecc_corrected"),
        ecc_uncorrected=found.get("ecc_uncorrected"),
        remapped_rows=_remapped_rows(found.get("remapped_rows")),
        recovery_action=found.get("recovery_action"),
        clock_events=None if clock_events is None else frozenset(clock_events),
        pcie=_pcie(found),
        nvlinks_active=active,
        nvlinks=links,
        fabric=found.get("fabric"),
        mig_devices=None
        if mig_devices is None
        else tuple(MigDevice(uuid=uuid, name=name) for uuid, name in mig_devices),
        licensed=found.get("licensed"),
        errors=found["errors"],
    )


def _remapped_rows(found: list[int] | None) -> RemappedRows | None:
    if found is None:
        return None
    correctable, uncorrectable, pending, failed = found
    return RemappedRows(
        correctable=correctable, uncorrectable=uncorrectable, pending=bool(pending), failed=bool(failed)
    )


def _pcie(found: Mapping[str, Any]) -> PcieLink | None:
    """The PCIe link; None where nothing of it is known. A generation or width of 0 is a driver's "no link"."""
    names = ("generation", "generation_max", "width", "width_max")
    values = {name: found.get(f"pcie_{name}") or None for name in names}
    return PcieLink(**values) if any(values.values()) else None


def _nvlinks(found: list[tuple[int, bool]] | None, seen_up: set[int], *, whole: bool) -> tuple[int | None, int | None]:
    """Count the links that should be up, and those that are.

    A link that was never up may simply have nothing at its other end (a GPU without bridge), so it is not
    expected; in an NVSwitch fabric, which the GPU joined ``whole``, every link has, whether or not it ever was.
    """
    if found is None:
        return None, None
    supported = {link for link, _ in found}
    active = {link for link, up in found if up}
    seen_up |= active
    expected = supported if whole else supported & seen_up
    return len(expected), len(active)


def _obituary(worker: Child, where: str | None) -> str:
    """One sentence on a worker that ended without an answer."""
    code = worker.exit_code
    if code is None:
        how = "closed its channel"
    elif code < 0:
        how = f"was ended by {signal_name(code)}"
    else:
        how = f"ended with status {code}"
    last = worker.tail.strip().splitlines()[-1:]
    said = f"; it said: {last[0].strip()[:200]}" if last else ""
    return f"The NVML worker {how} at {where or 'its start'}{said}."


def _short(value: str | None) -> str | None:
    """Cut a value from the environment to what a sentence can carry."""
    return None if value is None else value[:100]


def _find_binding() -> Path | None:
    """Find the folder of the agent's own ``pynvml``, without importing it.

    Its own environment first: PYTHONPATH may be the server's, whose copy can be another package's of that name.
    """
    # Not by sysconfig, which loads how this interpreter was built to tell: a quarter of a megabyte, kept for good.
    for own in map(Path, site.getsitepackages()):
        if (own / "pynvml.py").is_file():
            return own
    try:
        spec = importlib.util.find_spec("pynvml")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.parent.parent if spec.submodule_search_locations else origin.parent
