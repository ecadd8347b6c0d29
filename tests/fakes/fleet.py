"""A fleet of replicas for a real Prometheus to scrape: each with facts of its own, judged and rendered by our code.

For each scenario a real agent looks once at fakes (the compiled NVML library, a package tree and the answers of
SGLang 0.5.16 as recorded, a made-up ``/proc``). What its probes brought is then published, as rounds, to the store of
each replica that is in the scenario; a replica has its own GPUs, labels, clock of rounds and past. Only the look is
shared: verdicts, holds, changes and counters are each replica's own.

By hand, for pictures and for trying queries::

    python -m tests.fakes.fleet --replicas 10 --gpus 8 --scenario gpu-lost --scenario upgraded:3 --after 60
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from aiohttp import web
from msgspec import Struct
from msgspec.structs import fields, replace

from sidecar.app import Agent
from sidecar.catalog import Catalog
from sidecar.config import Image, ImportPolicy, Settings
from sidecar.exposition import Exposition
from sidecar.model import Attempt, Outcome, Placement, Probe, Processes, Sample, Snapshot, Standing
from sidecar.nvml.reading import GpuReading
from sidecar.store import Store
from tests.fakes.nvml import Scenario
from tests.fakes.nvml import build as build_library
from tests.fakes.releases import install, load, placed, proc_tree, toolkit
from tests.fakes.sglang import FakeSglang
from tests.fakes.sglang import serve as serve_sglang
from tests.fakes.site import RealClock, Site, driver_library

RELEASE = "0.5.16"
DRIVER = "580.159.04"
EXTRA = {"flashinfer-cubin": "0.6.14", "triton": "3.6.0"}
"""Installed beside what the release requires: a server that downloads its kernels is not what "healthy" means."""
PORT = 9477
SLOWER = 6
"""Rounds of the driver probe in one of the others."""
HOLD = 3
"""Rounds after which any finding is published (`ConditionType.hold`)."""
_FAKE_UUID = "GPU-00000000-0000-4000-8000-"


# -- scenarios --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is different from a healthy server.

    ``nvml`` are lines of the fake library's scenario, ``later`` those that follow after a first round of the driver
    probe. ``module`` is the version of the loaded kernel module where it is not the driver's, "" for none loaded.
    ``packages`` are versions, None for not installed.
    ``flags`` and ``info`` are added to the server's. ``answers`` False: the process is there and its port refuses, as
    in the first minute of a launch. ``dead`` counts workers that ended; ``replaced``: libraries were replaced under
    the server. ``baseline`` makes the healthy environment the baseline, ``no_baseline`` names one that is not there.

    The others are what a look cannot show: probes whose child cannot be killed (``stuck``) or ended (``crashed``), two
    scenarios that take turns (``flapping``), a sidecar that does not answer (``silent``), that is slow by ``delay``
    seconds, that gives more series than it should (``padding``), or whose port is somebody else's (``stranger``).
    """

    nvml: Mapping[str, str | bytes | int] = field(default_factory=dict)
    later: Mapping[str, str | bytes | int] = field(default_factory=dict)
    release: str = RELEASE
    driver: str = DRIVER
    module: str | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    answers: bool = True
    dead: int = 0
    replaced: bool = False
    baseline: bool = False
    damage: Callable[[Site], object] = lambda _site: None
    no_baseline: bool = False
    stuck: tuple[str, ...] = ()
    crashed: tuple[str, ...] = ()
    flapping: tuple[str, str] | None = None
    silent: bool = False
    delay: float = 0.0
    padding: int = 0
    stranger: bool = False


MAMBA = ("--device", "cuda", "--mamba-backend", "flashinfer")
FA4 = {"attention_backend": "fa4", "prefill_attention_backend": "fa4", "decode_attention_backend": "fa4"}

CASES: Mapping[str, Case] = MappingProxyType(
    {
        "healthy": Case(),
        # The driver
        "driver-not-loaded": Case(nvml={"nvmlInit": 9}, module=""),
        "driver-library-mismatch": Case(nvml={"nvmlInit": 18}, module="580.126.09"),
        "driver-upgraded": Case(driver="590.44.01"),
        "nvml-library-missing": Case(nvml={"nvmlInit": 12}, module=""),
        "driver-too-old": Case(driver="570.86.15", nvml={"cuda_driver_version": 12080}),
        "device-permission": Case(nvml={"nvmlInit": 4}),
        "probe-stuck": Case(stuck=("driver",)),
        # GPUs
        "gpu-lost": Case(later={"nvmlDeviceGetHandleByIndex@0": 15}),
        "gpus-lost": Case(later={"nvmlDeviceGetHandleByIndex": 15}),
        "gpu-missing": Case(later={"gpus": "one less"}),
        "xid-79": Case(later={"xid@0": 79, "xid_sequence": 1}),
        "xid-94": Case(later={"xid@0": 94, "xid_sequence": 1}),
        "row-remap-failed": Case(nvml={"remap_failed@0": 1, "remapped_uncorrectable@0": 9}),
        "row-remap-pending": Case(nvml={"remap_pending@0": 1, "remapped_uncorrectable@0": 1}),
        "recovery-required": Case(nvml={"recovery_action@0": 1}),
        "ecc-uncorrected": Case(nvml={"ecc_uncorrected@0": 3}),
        "fabric-not-ready": Case(nvml={"fabric_state": 2}, answers=False),
        "nvlink-down": Case(nvml={"nvlinks_down@0": 2}),
        "thermal-slowdown": Case(nvml={"clocks_event_reasons@0": 0x40, "temperature@0": 92}),
        # Software
        "flashinfer-cubin-mismatch": Case(packages={"flashinfer-cubin": "0.6.12"}, flags=MAMBA, answers=False),
        "mamba-missing": Case(
            release="0.5.9",
            packages={"flashinfer-python": "0.6.0", "flashinfer-cubin": "0.6.0"},
            flags=MAMBA,
            answers=False,
        ),
        "sglang-incomplete": Case(damage=lambda site: site.write("sglang/launch_server.py", "\0" * 100), answers=False),
        "fa-version-invalid": Case(environ={"SGLANG_FLASHATTENTION_VERSION": "5"}),
        "fa4-not-importable": Case(
            packages={"nvidia-cutlass-dsl": None}, flags=("--attention-backend", "fa4"), info=FA4, answers=False
        ),
        "fa4": Case(flags=("--attention-backend", "fa4"), info=FA4),
        "backend-unsupported": Case(flags=("--attention-backend", "trtllm_mha"), answers=False),
        "on-cpu": Case(info={"device": "cpu"}),
        "requirement-violated": Case(packages={"sglang-kernel": "0.4.4"}),
        "drift": Case(driver="580.126.09", packages={"triton": "3.5.1"}, baseline=True),
        "as-baseline": Case(baseline=True),
        "baseline-unreadable": Case(no_baseline=True),
        "upgraded": Case(release="0.5.18", packages={"flashinfer-cubin": "0.6.17", "triton": "3.7.0"}),
        # The server
        "workers-missing": Case(dead=1),
        "replaced-files": Case(replaced=True),
        "launching": Case(answers=False),
        # What a look does not show
        "flapping": Case(flapping=("healthy", "gpu-lost")),
        "flapping-fabric": Case(flapping=("launching", "fabric-not-ready")),
        "import-stuck": Case(stuck=("flashinfer",)),
        "packages-crashed": Case(crashed=("packages",)),
        "silent": Case(silent=True),
        "slow": Case(delay=1.2),
        "too-large": Case(padding=300),
        "stranger": Case(stranger=True),
    }
)
"""Every scenario by the name under which a test or the command line asks for it."""


_OUTSIDE = [case for case in CASES.values() if case.silent or case.delay or case.padding or case.stranger]
"""Scenarios in which the replica knows of nothing wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the probes brought in one scenario, and what the agent that looked knew of itself."""

    attempts: tuple[Attempt[Any], ...]
    snapshot: Snapshot
    catalog: Catalog
    standing: Standing


class Looks:
    """Looks at scenarios, each once. The folder holds the fakes."""

    def __init__(self, folder: Path, gpus: int = 8) -> None:
        self._folder = folder
        self._gpus = gpus
        self._libraries: dict[str, Path] = {}
        self._known: dict[str, Look] = {}

    async def at(self, name: str) -> Look:
        """The look at a scenario. Raises KeyError for a name that is none."""
        if name not in self._known:
            self._known[name] = await self._take(name, CASES[name])
        return self._known[name]

    def _library(self, version: str) -> Path:
        if version not in self._libraries:
            self._libraries[version] = build_library(self._folder / f"nvml-{version}", version)
        return self._libraries[version]

    async def _take(self, name: str, case: Case) -> Look:
        folder = self._folder / name
        folder.mkdir()
        described = load(case.release, "environment.json")
        site = install(folder / "environment", case.release, {**EXTRA, **case.packages})
        _importable(site)
        case.damage(site)
        processes = self._processes(case, site)
        driver_library(folder, "driver", case.driver)
        theirs = {
            "PATH": os.defpath,
            "HOME": str(folder),
            "LD_LIBRARY_PATH": str(folder / "driver"),
            "CUDA_HOME": str(toolkit(folder / "cuda", described["torch_cuda"])),
            **case.environ,
        }
        proc = self._proc(folder, processes, theirs, case)
        scenario = Scenario(folder / "scenario", gpus=self._gpus, driver_version=case.driver)
        scenario.set(self._lines(case.nvml))
        info = load(case.release, "server_info.json")
        for part in (info, *info.get("internal_states", ())):
            part.update({"tp_size": self._gpus, **case.info})
        fake = FakeSglang(info=info, model_info=load(case.release, "model_info.json"))
        async with self._server(fake, answers=case.answers) as url:
            settings = Settings(
                server_url=url,
                server_pid=processes[0]["pid"],
                placement=Placement.HOST,
                image=Image.SERVER,
                processes=Processes.SHARED,
                gpus=tuple(map(str, range(self._gpus))),
                gpu_detail=True,
                import_policy=ImportPolicy.ALWAYS,
                baseline=self._baseline(case),
                explicit=frozenset({"server_url"}),
            )
            environ = {"PATH": os.defpath, **scenario.environ(self._library(case.driver))}
            async with Agent.create(settings, once=True, environ=environ, proc=proc) as agent:
                if case.later:
                    await self._driver(agent)
                    scenario.set(self._lines(case.later))
                snapshot = await agent.check()
                return Look(
                    attempts=tuple(_attempt(snapshot, probe, case) for probe in agent.catalog.probes),
                    snapshot=snapshot,
                    catalog=agent.catalog,
                    standing=agent.services.standing,
                )

    def _lines(self, lines: Mapping[str, str | bytes | int]) -> dict[str, str | bytes | int]:
        return {key: self._gpus - 1 if value == "one less" else value for key, value in lines.items()}

    def _processes(self, case: Case, site: Site) -> list[dict[str, Any]]:
        """The recorded processes, with a scheduler for each GPU and the scenario's flags."""
        main, *others = placed(load(case.release, "processes.json")["processes"], site)
        scheduler = next(one for one in others if one["cmdline"][0].startswith("sglang::scheduler"))
        rest = [one for one in others if not one["cmdline"][0].startswith("sglang::scheduler")]
        flags = ("--tp", str(self._gpus), *case.flags)
        main = main | {"cmdline": [*main["cmdline"], *flags]}
        if case.replaced:
            scheduler = scheduler | {"maps": [f"{path} (deleted)" for path in scheduler["maps"]]}
        schedulers = [
            scheduler | {"pid": scheduler["pid"] + rank, "cmdline": [f"sglang::scheduler_TP{rank}", "", ""]}
            for rank in range(self._gpus)
        ]
        return [main, *schedulers[: self._gpus - case.dead], *rest] if case.answers else [main]

    def _proc(self, folder: Path, processes: list[dict[str, Any]], environ: Mapping[str, str], case: Case) -> Path:
        proc = proc_tree(folder, processes, environ)
        driver = proc / "driver" / "nvidia"
        module = case.driver if case.module is None else case.module
        if not module:
            shutil.rmtree(driver)
            return proc
        version = driver / "version"
        version.write_text(version.read_text().replace(DRIVER, module))
        for index in range(1, self._gpus):
            (driver / "gpus" / f"0000:00:{index + 6:02x}.0").mkdir()
        return proc

    def _baseline(self, case: Case) -> str | None:
        path = self._folder / "baseline.toml"
        if case.no_baseline:
            return str(path.with_name("absent.toml"))
        if not case.baseline:
            return None
        described = load(RELEASE, "environment.json")
        versions = described["distributions"] | EXTRA
        versions["torch"] += "+cu" + described["torch_cuda"].replace(".", "")
        wanted = {item: versions[item] for item in ("sglang", "torch", "flashinfer-python", *EXTRA)}
        lines = "".join(f'{item} = "{version}"\n' for item, version in wanted.items())
        path.write_text(f'[environment]\ndriver = "{DRIVER}"\n{lines}')
        path.chmod(0o644)
        return str(path)

    @contextlib.asynccontextmanager
    async def _server(self, fake: FakeSglang, *, answers: bool) -> AsyncIterator[str]:
        if not answers:
            yield f"http://127.0.0.1:{free_port()}"
            return
        async with serve_sglang(fake) as server:
            yield server.url

    async def _driver(self, agent: Agent) -> None:
        """A first round of the driver probe, from which on events are watched."""
        agent.store.publish(await agent.scheduler.attempt(agent.catalog.by_name["driver"]))


def _importable(site: Site) -> None:
    """Give the stubs what an import looks for: objects that can be loaded, functions that can be called."""
    empty = site.root / "empty.so"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(empty)], check=True
    )
    for stub in site.packages.glob("sgl_kernel/**/*.abi3.so"):
        shutil.copyfile(empty, stub)
    function = "def flash_attn_varlen_func(): ...\n"
    site.write("sgl_kernel/flash_attn.py", function)
    site.write("sglang/jit_kernel/flash_attn/cute/__init__.py", f"import cutlass\n{function}")


def _attempt(snapshot: Snapshot, probe: Probe[Any], case: Case) -> Attempt[Any]:
    result = snapshot.results[probe.name]
    attempt = Attempt(
        probe=probe.name,
        outcome=result.outcome,
        started_at=result.started_at or snapshot.taken_at,
        duration=result.duration or 0.0,
        facts=result.facts,
        detail=result.detail,
        where=result.where,
    )
    if probe.name in case.crashed:
        detail = "The child ended without an answer (killed by signal 9)."
        return replace(attempt, outcome=Outcome.CRASHED, facts=None, detail=detail)
    if probe.name not in case.stuck:
        return attempt
    where = "nvmlDeviceGetTemperature of GPU 0" if probe.name == "driver" else "importing torch"
    detail = f"A child process waits in {where} and cannot be killed."
    failed = replace(attempt, outcome=Outcome.TIMEOUT, duration=probe.deadline, facts=None)
    return replace(failed, detail=detail, where=where, stuck=True)


# -- replicas ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a replica runs, as the labels of its target say it."""

    pod: str
    node: str
    workload: str = "qwen3"
    namespace: str = "inference"
    cluster: str = "eu-1"

    @property
    def labels(self) -> dict[str, str]:
        """The target's labels."""
        names = ("cluster", "namespace", "workload", "pod", "node")
        return {name: getattr(self, name) for name in names} | {"instance": f"{self.pod}:{PORT}"}


def places(count: int, *, per_node: int = 1, workload: str = "qwen3", namespace: str = "inference") -> list[Place]:
    """Replicas of one workload, as a StatefulSet names them, ``per_node`` on each node."""
    return [
        Place(pod=f"{workload}-{index}", node=f"gpu-{index // per_node:02d}", workload=workload, namespace=namespace)
        for index in range(count)
    ]


@dataclass(slots=True)
class Replica:
    """A running replica: a store of its own, fed with rounds of the scenario it is in.

    ``other`` is what it shows every other time while it flaps, ``shown`` what it showed last.
    """

    place: Place
    store: Store
    exposition: Exposition
    look: Look
    name: str = "healthy"
    case: Case = field(default_factory=Case)
    rounds: int = 0
    other: Look | None = None
    shown: Look | None = None

    def round(self, now: float) -> None:
        """Publish one more round: of the driver probe, whose interval is the shortest, and at times of all."""
        self.rounds += 1
        turn = self._shown()
        self._publish(turn, now, ("driver",) if turn is self.shown and self.rounds % SLOWER else None)
        self.shown = turn

    def settle(self, now: float) -> None:
        """Publish rounds until what the scenario is like has passed every hold."""
        self.shown = None
        self.round(now)
        for _ in range(HOLD - 1):
            # What a look cannot show is in no look's verdict either.
            late = {*self.case.stuck, *self.case.crashed} | {
                self.look.catalog.owner[code]
                for code, condition in self._shown().snapshot.conditions.items()
                if condition.status is not self.store.snapshot.conditions[code].status
            }
            self._publish(self._shown(), now, late)

    def _shown(self) -> Look:
        turned = self.other is not None and self.rounds // (HOLD + 1) % 2
        return self.other if turned and self.other is not None else self.look

    def _publish(self, look: Look, now: float, probes: Container[str] | None = None) -> None:
        dice = random.Random(f"{self.place.pod} {self.rounds}")
        for attempt in look.attempts:
            if probes is None or attempt.probe in probes:
                facts = _placed(attempt.facts, self.place.node, dice)
                duration = attempt.duration * dice.uniform(0.8, 1.2)
                self.store.publish(replace(attempt, facts=facts, started_at=now, duration=duration))

    def render(self, accept: str) -> tuple[bytes, Mapping[str, str]]:
        """The exposition of the present."""
        rendered = self.exposition.render(self.store.snapshot, accept=accept, accept_encoding="")
        if not self.case.padding:
            return rendered.body, rendered.headers
        more = "".join(f'padding{{number="{number}"}} 1\n' for number in range(self.case.padding))
        return more.encode() + rendered.body, rendered.headers


def _placed(value: Any, node: str, dice: random.Random) -> Any:
    """Facts as they are on a node: its GPUs' uuids, and readings that vary from round to round."""
    if type(value) is str:
        return value.replace(_FAKE_UUID, f"GPU-{zlib.crc32(node.encode()):08x}-0000-4000-8000-")
    if isinstance(value, GpuReading):
        value = _varied(value, dice)
    if isinstance(value, Struct):
        changes = {}
        for one in fields(value):
            before = getattr(value, one.name)
            if (after := _placed(before, node, dice)) is not before:
                changes[one.name] = after
        return replace(value, **changes) if changes else value
    if type(value) in (tuple, frozenset):
        return type(value)(_placed(one, node, dice) for one in value)
    if isinstance(value, Mapping):
        return {_placed(key, node, dice): _placed(one, node, dice) for key, one in value.items()}
    return value


def _varied(gpu: GpuReading, dice: random.Random) -> GpuReading:
    """A GPU under load; what is hot, as in a scenario, stays as it is."""
    if gpu.code != 0 or gpu.temperature is None or gpu.temperature > 80:
        return gpu
    busy = dice.uniform(0.55, 0.95)
    total = gpu.memory_total or 0
    return replace(
        gpu,
        temperature=int(48 + 22 * busy + dice.uniform(-1, 1)),
        power=round(180 + 430 * busy, 3),
        utilization=round(busy, 2),
        memory_used=int(total * dice.uniform(0.86, 0.88)) if total else gpu.memory_used,
    )


def _access() -> Iterator[Sample]:
    """What an agent that serves TLS says of its certificate: it ends in a month."""
    yield Sample("tls_certificate_not_after_timestamp_seconds", (), time.time() + 30 * 86400)
    yield Sample("access_renewal_failing", ("certificate",), 0.0)


# -- the fleet --------------------------------------------------------------------------------------


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the loop to its end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something run until the loop is closed."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        self.run(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Fleet:
    """Replicas that one HTTP server of this process answers for, under ``/<pod>/metrics``.

    Looks and rounds are made in one thread, scrapes are answered in another one, so that neither waits for the other
    and the methods serve plain code. ``interval`` is how often, in seconds, every replica has a round, and ``flapping``
    how often one that flaps.
    """

    def __init__(
        self,
        folder: Path,
        where: Sequence[Place],
        *,
        gpus: int = 8,
        interval: float = 5.0,
        flapping: float | None = None,
    ) -> None:
        self.port = 0
        self.replicas: dict[str, Replica] = {}
        self.places = {place.pod: place for place in where}
        self._interval = interval
        self._flapping = flapping or interval
        self._looks = Looks(folder, gpus)
        self._close = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            working, serving = _Loop("fleet"), _Loop("fleet-http")
            stack.callback(working.close)
            stack.callback(serving.close)
            self._run = working.run
            working.run(self._make())
            runner = serving.run(self._serve())
            stack.callback(lambda: serving.run(runner.cleanup()))
            working.start(self._rounds(self._interval, flapping=False))
            working.start(self._rounds(self._flapping, flapping=True))
            self._close = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._close.close()

    def prepare(self, *scenarios: str) -> None:
        """Look at scenarios in advance, so that `set` takes no time."""
        for scenario in scenarios:
            for name in _looks_of(scenario):
                self._run(self._looks.at(name))

    def set(self, scenario: str, *pods: str) -> None:
        """Put these replicas, or all, into a scenario, and have it pass every hold at once.

        Ends when the last one is in it; the look at a scenario that is new takes a second.
        """
        self._run(self._set(scenario, pods or tuple(self.replicas)))

    def snapshot(self, pod: str) -> Snapshot:
        """What a replica knows now."""
        return self.replicas[pod].store.snapshot

    def targets(self) -> list[dict[str, Any]]:
        """Targets for ``file_sd_configs`` or ``static_configs``."""
        return [
            {
                "targets": [f"127.0.0.1:{self.port}"],
                "labels": place.labels | {"__metrics_path__": f"/{place.pod}/metrics"},
            }
            for place in self.places.values()
        ]

    async def _make(self) -> None:
        look = await self._looks.at("healthy")
        for pod, place in self.places.items():
            store = Store(
                look.catalog.probes,
                standing=look.standing,
                settings=Settings(),
                required=(),
                clock=RealClock(),
                lifetimes={probe.name: 3 * probe.interval + probe.deadline for probe in look.catalog.probes},
                observe=look.catalog.observed,
            )
            exposition = Exposition(look.catalog, process=list, more=_access)
            self.replicas[pod] = Replica(place, store, exposition, look)
            self.replicas[pod].round(time.time())

    async def _serve(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/{pod}/metrics", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner

    async def _rounds(self, interval: float, *, flapping: bool) -> None:
        while True:
            await asyncio.sleep(interval)
            for replica in self.replicas.values():
                if flapping == (replica.other is not None):
                    replica.round(time.time())
                    await asyncio.sleep(0)

    async def _set(self, scenario: str, pods: Sequence[str]) -> None:
        case = CASES[scenario]
        look, *others = [await self._looks.at(name) for name in _looks_of(scenario)]
        other = others[0] if others else None
        for pod in pods:
            replica = self.replicas[pod]
            replica.name, replica.case, replica.look, replica.other = scenario, case, look, other
            replica.settle(time.time())
            await asyncio.sleep(0)

    async def _answer(self, request: web.Request) -> web.Response:
        replica = self.replicas.get(request.match_info["pod"])
        if replica is None:
            return web.Response(status=404)
        if replica.case.silent:
            return web.Response(status=503)
        if replica.case.stranger:
            return web.Response(text="node_load1 0.5\n")
        await asyncio.sleep(replica.case.delay)
        body, headers = replica.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers=headers)


def _looks_of(scenario: str) -> tuple[str, ...]:
    """The scenarios that a replica in this one shows, in turns."""
    case = CASES[scenario]
    return case.flapping or ("healthy" if case in _OUTSIDE else scenario,)


# -- Prometheus and Alertmanager ----------------------------------------------------------------------


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(slots=True)
class Service:
    """A running Prometheus or Alertmanager."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    def get(self, path: str, **parameters: str) -> Any:
        """The JSON that a path of its interface answers."""
        query = "?" + urllib.parse.urlencode(parameters) if parameters else ""
        with urllib.request.urlopen(self.url + path + query, timeout=30) as response:
            return json.load(response)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an instant query of a Prometheus finds."""
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expr)["data"]["result"]
        return found

    def until(self, expr: str, *, seconds: float = 30.0) -> list[dict[str, Any]]:
        """Ask until a query finds something."""
        end = time.monotonic() + seconds
        while not (found := self.query(expr)):
            assert time.monotonic() < end, f"nothing for {expr}\n{self.log_path.read_text()[-2000:]}"
            assert self.process.poll() is None, self.log_path.read_text()[-2000:]
            time.sleep(0.2)
        return found

    def reload(self) -> None:
        """Have it read its configuration again."""
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/-/reload", method="POST"), timeout=30).close()


@contextlib.contextmanager
def _service(folder: Path, name: str, command: Sequence[str]) -> Iterator[Service]:
    """Start it on a free port and wait until it is ready; another port if somebody else was quicker."""
    log_path = folder / f"{name}.log"
    for _ in range(3):
        port = free_port()
        with log_path.open("wb") as log:
            process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        service = Service(process, f"http://127.0.0.1:{port}", log_path)
        try:
            if _is_ready(service):
                yield service
                return
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise AssertionError(f"{command[0]} did not start: {log_path.read_text()[-2000:]}")


def _is_ready(service: Service) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{service.url}/-/ready", timeout=5):
            return True
        if service.process.poll() is not None:
            return False
        time.sleep(0.1)
    return False


def scrape_config(targets: Path, interval: str = "1s") -> dict[str, Any]:
    """Scrape targets that are listed in a file."""
    return {
        "job_name": "sglang-sidecar",
        "scrape_interval": interval,
        "scrape_timeout": interval if interval.endswith("ms") or int(interval.rstrip("sm")) < 10 else "10s",
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
    }


@contextlib.contextmanager
def prometheus(
    folder: Path, config: Mapping[str, Any], *, program: str = "prometheus", flags: Sequence[str] = ()
) -> Iterator[Service]:
    """Run a Prometheus with this configuration, which names files by their whole paths."""
    path = folder / "prometheus.yml"
    # JSON is YAML.
    path.write_text(json.dumps(config))
    command = [program, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}", "--web.enable-lifecycle"]
    with _service(folder, "prometheus", [*command, *flags]) as service:
        yield service


@contextlib.contextmanager
def alertmanager(
    folder: Path, config: Mapping[str, Any], *, program: str = "prometheus-alertmanager"
) -> Iterator[Service]:
    """Run an Alertmanager with this configuration, without a cluster."""
    path = folder / "alertmanager.yml"
    path.write_text(json.dumps(config))
    command = [program, f"--config.file={path}", f"--storage.path={folder / 'data'}", "--cluster.listen-address="]
    with _service(folder, "alertmanager", command) as service:
        yield service


@contextlib.contextmanager
def watched(fleet: Fleet, folder: Path, *, interval: str = "1s", rules: Sequence[Path] = ()) -> Iterator[Service]:
    """Run a Prometheus that scrapes a fleet."""
    targets = folder / "targets.json"
    targets.write_text(json.dumps(fleet.targets()))
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [scrape_config(targets, interval)],
    }
    with prometheus(folder, config) as service:
        yield service


# -- by hand ------------------------------------------------------------------------------------------


def _wanted(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    if name not in CASES or not (count or "1").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME or NAME:COUNT; names: {', '.join(CASES)}")
    return name, int(count or 1)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a fleet and its Prometheus until interrupted. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.fleet", description="A fleet to look at.")
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        type=_wanted,
        metavar="NAME[:COUNT]",
        help=f"the first replicas are in these, the rest is healthy; one of {', '.join(CASES)}",
    )
    parser.add_argument("--replicas", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--per-node", type=int, default=1, help="replicas on each node (default: 1)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each node (default: 8)")
    parser.add_argument("--after", type=float, default=0.0, metavar="SECONDS", help="all are healthy until then")
    parser.add_argument("--interval", default="5s", help="scrape interval (default: 5s)")
    parser.add_argument("--rules", type=Path, action="append", default=[], help="a file of rules (repeatable)")
    options = parser.parse_args(arguments)
    where = places(options.replicas, per_node=options.per_node)
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        (folder := Path(name) / "fakes").mkdir()
        rules = [path.resolve() for path in options.rules]
        with (
            Fleet(folder, where, gpus=options.gpus) as fleet,
            watched(fleet, Path(name), interval=options.interval, rules=rules) as service,
        ):
            _tell(f"Prometheus: {service.url}")
            _tell(f"Replicas:   http://127.0.0.1:{fleet.port}/{where[0].pod}/metrics and so on")
            time.sleep(options.after)
            pods = iter(fleet.places)
            for scenario, count in options.scenario:
                chosen = [pod for _, pod in zip(range(count), pods, strict=False)]
                if chosen:
                    fleet.set(scenario, *chosen)
                    _tell(f"{scenario}: {', '.join(chosen)}")
            _tell("Interrupt to end.")
            threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
