"""The readiness of each second, while drivers flap, servers restart, imports take long and the sidecar starts anew.

The scheduler, the store, the judge and each probe's own judgement are real; what the probes would read is given as a
function of the second, on a clock that the test moves. A timeline is written in runs: ``P3 R40 N12`` is pending for
3 seconds, ready for 40, not ready for 12.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.catalog import build
from sidecar.config import Settings
from sidecar.environment import (
    DriverLibrary,
    EnvironmentFacts,
    FlashInferFiles,
    KernelFiles,
    LibraryFile,
    MambaFiles,
)
from sidecar.gpuset import GpuSet
from sidecar.imports import ImportEvidence, ImportOutcome
from sidecar.model import Answer, Probe, ProbeTimeout, Processes, Scope, Snapshot, Target
from sidecar.nvml.reading import NvmlReading
from sidecar.probes import cuda, driver, flashinfer, launch, server
from sidecar.probes.cuda import CudaFacts
from sidecar.probes.driver import DriverFacts
from sidecar.probes.flashinfer import FlashinferFacts, ImportState
from sidecar.probes.server import ServerFacts, summarize
from sidecar.processes import ServerProcesses
from sidecar.readiness import readyz
from sidecar.scheduler import Scheduler
from sidecar.serverinfo import Problem, ServerInfo, ServerObservation
from sidecar.store import Store
from sidecar.target import RUNNING
from tests.builders import HOST, FakeClock
from tests.gpus import facts as driver_facts
from tests.gpus import gpu, known, reading, silent

# -- the harness --------------------------------------------------------------------------------------

PROBES: tuple[Probe[Any], ...] = (driver.PROBE, cuda.PROBE, flashinfer.PROBE, server.PROBE, launch.PROBE)
Script = Callable[[float], Any]
"""What a probe finds at a second; an exception is raised, a number of seconds with it is waited before."""


@dataclass(frozen=True, slots=True)
class After:
    """Facts, or an exception, that take their time."""

    seconds: float
    what: Any


@dataclass(slots=True)
class Life:
    """What was published, second by second."""

    readiness: str = ""
    active: list[tuple[str, ...]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def runs(self) -> str:
        """The readiness of each second, in runs."""
        return " ".join(f"{letter}{len(list(same))}" for letter, same in itertools.groupby(self.readiness))

    def seconds_of(self, code: str) -> str:
        """While which seconds a condition was active: ``12-40``, and ``41-`` where it still is."""
        spans, since = [], None
        for second, codes in enumerate(self.active):
            if (code in codes) is (since is None):
                if since is None:
                    since = second
                else:
                    spans.append(f"{since}-{second - 1}")
                    since = None
        return " ".join([*spans, *([] if since is None else [f"{since}-"])])


def _letter(snapshot: Snapshot) -> str:
    return "P" if snapshot.verdict.pending else "R" if snapshot.verdict.ready else "N"


async def live(seconds: int, scripts: Mapping[str, Script], *, restarts: tuple[int, ...] = ()) -> Life:
    """Run the agent for so many seconds; at a restart it forgets everything, as a new process does."""
    clock = FakeClock()
    life = Life()
    for begin, end in itertools.pairwise((0, *restarts, seconds)):
        await _process(clock, scripts, begin, end, life)
    assert len(life.readiness) == seconds
    return life


async def _process(clock: FakeClock, scripts: Mapping[str, Script], begin: int, end: int, life: Life) -> None:
    probes = tuple(
        replace(probe, collect=_reader(scripts[probe.name], clock)) for probe in PROBES if probe.name in scripts
    )
    store = Store(
        probes,
        standing=HOST,
        settings=Settings(),
        required=(),
        clock=clock,
        lifetimes={probe.name: 3 * probe.interval + probe.deadline for probe in probes},
    )
    scheduler = Scheduler(
        probes,
        services=None,  # type: ignore[arg-type]  # what these probes read is given
        publish=store.publish,
        clock=clock,
        rng=lambda: 0.5,
    )
    task = asyncio.create_task(scheduler.run())
    try:
        for _ in range(begin, end):
            await clock.advance(0)
            if (expiry := store.next_expiry()) is not None and expiry <= clock.monotonic():
                store.refresh()
            life.readiness += _letter(store.snapshot)
            life.active.append(tuple(one.code for one in store.snapshot.conditions.values() if one.active))
            life.snapshots.append(store.snapshot)
            await clock.advance(1)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _reader(script: Script, clock: FakeClock) -> Callable[[Any], Awaitable[Any]]:
    async def collect(_services: Any) -> Any:
        found = script(clock.monotonic())
        if isinstance(found, After):
            await clock.sleep(found.seconds)
            found = found.what
        if isinstance(found, Exception):
            raise found
        return found

    return collect


def steps(first: Any, *later: tuple[float, Any]) -> Script:
    """One thing, and from the given seconds on others."""

    def at(second: float) -> Any:
        return [first, *(what for begins, what in later if begins <= second)][-1]

    return at


# -- what is read -------------------------------------------------------------------------------------

MINE = known("GPU-0", "GPU-1")
HEALTHY = reading()
UNREACHABLE = reading(gpu(0), silent(1, 999))
LOST = reading(gpu(0), silent(1, 15))
NOT_LOADED = NvmlReading(code=9, call="nvmlInit", words="Driver Not Loaded", module_present=False)
UPGRADED = replace(HEALTHY, library="/usr/lib/libnvidia-ml.so.590.10", library_version="590.10")
REFUSING = replace(
    UPGRADED, code=18, call="nvmlInit", words="RM has detected an NVML/RM version mismatch.", count=None, gpus=()
)
HUNG = After(5.0, ProbeTimeout("NVML hangs.", where="nvmlInit", stuck=True))


def drives(one: NvmlReading, gpus: GpuSet = MINE) -> DriverFacts:
    return driver_facts(one, gpu_set=gpus)


def serves(
    answer: Answer,
    *,
    pid: int = 7,
    info: ServerInfo | None = None,
    problem: str | None = None,
    replaced: tuple[str, ...] | None = None,
) -> ServerFacts:
    """A server whose command line was read, so that a refusal is proof."""
    problems = {Answer.REFUSED: Problem("refused", "Nobody."), Answer.TIMEOUT: Problem("timeout", "Silence.")}
    target = Target(
        url="http://127.0.0.1:30000",
        url_source="command-line",
        scope=Scope.SERVER,
        pid=pid,
        create_time=float(pid),
        launch={"mamba_backend": "flashinfer", "device": "cuda"},
        launch_source=RUNNING,
    )
    return ServerFacts(
        target=summarize(target),
        observation=ServerObservation(
            answer=answer, status=200 if answer is Answer.ACCEPTED else None, problem=problems.get(answer)
        ),
        info=info,
        info_problem=None if problem is None else Problem(problem, "So it is."),
        processes=Processes.SHARED,
        every_process=True,
        nvidia_present=True,
        running=ServerProcesses(replaced=replaced),
    )


INFO = ServerInfo(version="0.5.16", device="cuda", mamba_backend="flashinfer")
UP, STARTING, SERVING = serves(Answer.ACCEPTED), serves(Answer.REFUSED), serves(Answer.ACCEPTED, info=INFO)

ENVIRONMENT = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/venv/bin/python",
    fingerprint="f",
    torch_present=True,
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    distributions={"sglang-kernel": "0.4.5"},
    kernel=KernelFiles(kind="package", folders=("sm100", "sm90")),
    libcuda=DriverLibrary(
        found=(LibraryFile(path="/usr/lib/libcuda.so.1", version="580.159.04", where="ld.so.cache"),), path_seen=True
    ),
    flashinfer=FlashInferFiles(kind="package", version="0.6.14", mamba=MambaFiles(state="present", symbol="bound")),
)
IMPORTING = FlashinferFacts(environment=ENVIRONMENT, state=ImportState.PENDING, variables={})
IMPORT_FAILED = replace(
    IMPORTING,
    state=ImportState.DONE,
    evidence=ImportEvidence(
        outcome=ImportOutcome.FAILED,
        at=0.0,
        step="import",
        seconds=90.0,
        exception="RuntimeError",
        message="no such kernel",
    ),
)
IMPORTED = replace(
    IMPORTING,
    state=ImportState.DONE,
    evidence=ImportEvidence(outcome=ImportOutcome.OK, at=0.0, step="symbol", seconds=90.0),
)


def torch_sees(one: NvmlReading) -> CudaFacts:
    return CudaFacts(environment=ENVIRONMENT, reading=one)


# -- a server in each state ---------------------------------------------------------------------------

NOBODY = replace(
    STARTING, target=Target(url="http://127.0.0.1:30000", url_source="default", scope=Scope.SELF), running=None
)
HIDDEN = replace(NOBODY, processes=Processes.HIDDEN, every_process=False)


@pytest.mark.parametrize(
    ("seen", "gates", "line"),
    [
        (NOBODY, True, "[+]server ok: server-not-found, not gating"),
        (HIDDEN, False, "[+]server ok: server-not-found, not gating"),
        (STARTING, True, "[+]server ok"),
        (serves(Answer.TIMEOUT), False, "[+]server ok: server-unreachable, not gating"),
        (serves(Answer.ACCEPTED, problem="not-json"), False, "[+]server ok: server-unreachable, not gating"),
        (serves(Answer.ACCEPTED, problem="no-key"), False, "[+]server ok: server-unauthorized, not gating"),
        (serves(Answer.ACCEPTED, problem="key-refused"), False, "[+]server ok: server-unauthorized, not gating"),
        (UP, False, "[+]server ok"),
        (SERVING, False, "[+]server ok"),
        (ProbeTimeout("Silence."), False, "[+]server ok: timeout, not gating"),
        (After(60.0, UP), False, "[+]server ok: pending, not gating"),
    ],
)
async def test_a_server_in_each_state(seen: Any, gates: bool, line: str) -> None:
    """No state of the server fails the answer; it decides only whether what hinders a launch does."""
    catalog = build(PROBES)
    for one, expected in ((HEALTHY, True), (REFUSING, not gates)):
        life = await live(5, {"driver": steps(drives(one)), "server": steps(seen)})
        assert life.runs == ("R5" if expected else "N5")
        reply = readyz(life.snapshots[-1], catalog, stopping=False, verbose=True)
        assert (reply.status == 200) is expected
        assert line in reply.text.splitlines()


# -- a driver that flaps ------------------------------------------------------------------------------


def _alternating(second: float) -> DriverFacts:
    """A GPU whose handle fails in every other ten seconds until 100 s, then for good, and from 200 s on never."""
    bad = second // 10 % 2 == 1 if second < 100 else second < 200
    return drives(UNREACHABLE if bad else HEALTHY)


FLAPPING = {"driver": _alternating, "server": steps(UP)}


@pytest.mark.parametrize(
    ("restarts", "runs", "active"),
    [
        ((), "R100 N120 R30", "100-219"),
        ((45,), "R105 N120 R25", "105-224"),
        # A new process believes its first round, good or bad; single good ones do not undo it.
        ((55,), "R55 N170 R25", "55-224"),
        ((150,), "R100 N120 R30", "100-219"),
        ((205,), "R100 N105 R45", "100-204"),
    ],
)
async def test_a_flapping_gpu(restarts: tuple[int, ...], runs: str, active: str) -> None:
    """Single bad rounds change nothing, two in a row make unready, three good ones ready again (case 46).

    A pod that flaps with its probe: modelplaneai/modelplane#206.
    """
    life = await live(250, FLAPPING, restarts=restarts)
    assert (life.runs, life.seconds_of("gpu-lost")) == (runs, active)


UNLOADED = {
    "driver": steps(drives(HEALTHY), (45, drives(NOT_LOADED)), (225, drives(HEALTHY))),
    "cuda": steps(torch_sees(HEALTHY), (45, torch_sees(NOT_LOADED)), (225, torch_sees(HEALTHY))),
    "server": steps(STARTING),
}


@pytest.mark.parametrize(
    ("restarts", "runs", "looked_again"),
    [((), "R50 N180 R70", 240), ((100,), "R50 N180 R70", 280), ((227,), "R50 N177 R73", 227)],
)
async def test_a_driver_that_is_unloaded_and_loaded_again(
    restarts: tuple[int, ...], runs: str, looked_again: int
) -> None:
    """Code 9 and its end take effect in the round that brings them, and what they explained leaves no fault behind.

    That torch has no CUDA was a consequence; from the driver's return until its own, slower probe looks it is unknown.
    """
    life = await live(300, UNLOADED, restarts=restarts)
    assert life.runs == runs
    assert life.seconds_of("cuda-unavailable-to-torch") == ""
    after = [life.snapshots[second].conditions["cuda-unavailable-to-torch"] for second in range(230, 300)]
    reasons = [(one.status.value, one.reason) for one in after]
    waiting = max(0, looked_again - 230)
    assert reasons == [("unknown", "cause-ended")] * waiting + [("false", None)] * (70 - waiting)


# -- a slow import at start ---------------------------------------------------------------------------


def _slow_first_round(*starts: int) -> Script:
    return lambda second: After(3.0, drives(HEALTHY)) if second in starts else drives(HEALTHY)


@pytest.mark.parametrize(
    ("restarts", "imports", "runs", "active"),
    [
        # Pending only until the driver was looked at; an import that runs gates nothing.
        ((), steps(IMPORTING, (90, IMPORTED)), "P3 R197", ""),
        # One that failed gates from the round that tells until the server answers all the same.
        ((), steps(IMPORTING, (90, IMPORT_FAILED)), "P3 R117 N30 R50", "120-"),
        # The new process imports again; by the time that it knows, the server has passed its launch.
        ((100,), steps(IMPORTING, (190, IMPORT_FAILED)), "P3 R97 P3 R97", ""),
        ((130,), steps(IMPORTING, (90, IMPORT_FAILED)), "P3 R117 N10 P3 N27 R40", "120-"),
    ],
)
async def test_a_slow_import_at_start(restarts: tuple[int, ...], imports: Script, runs: str, active: str) -> None:
    """Readiness waits for the first driver round and for no import (case 53, NVIDIA/dcgm-exporter#164)."""
    scripts = {
        "driver": _slow_first_round(0, *restarts),
        "flashinfer": imports,
        "server": steps(STARTING, (150, SERVING)),
    }
    life = await live(200, scripts, restarts=restarts)
    assert (life.runs, life.seconds_of("flashinfer-import-failed")) == (runs, active)


# -- a server that restarts ---------------------------------------------------------------------------

RESTARTED = steps(
    UP,
    (100, serves(Answer.REFUSED, pid=8)),
    (160, serves(Answer.TIMEOUT, pid=8)),
    (220, serves(Answer.ACCEPTED, pid=8)),
)


@pytest.mark.parametrize(
    ("restarts", "runs"),
    [
        ((), "R120 N120 R60"),
        ((50,), "R110 N120 R70"),
        ((130,), "R120 N100 R80"),
        # Who never saw the refusal has no proof that nobody serves: a time-out alone gates nothing.
        ((200,), "R120 N80 R100"),
        ((250,), "R120 N120 R60"),
    ],
)
async def test_a_server_that_restarts_on_a_driver_that_no_longer_fits(restarts: tuple[int, ...], runs: str) -> None:
    """A mismatch leaves the running server alone, and gates its next launch from the refusal until it answers."""
    scripts = {"driver": steps(drives(HEALTHY), (15, drives(REFUSING))), "server": RESTARTED}
    life = await live(300, scripts, restarts=restarts)
    assert (life.runs, life.seconds_of("driver-library-mismatch")) == (runs, "20-")


@pytest.mark.parametrize("restarts", [(), (130,), (200,)])
async def test_a_server_that_restarts_where_all_is_well(restarts: tuple[int, ...]) -> None:
    """That a server is gone, starts, or does not answer in time makes nothing unready by itself."""
    life = await live(300, {"driver": steps(drives(HEALTHY)), "server": RESTARTED}, restarts=restarts)
    assert life.runs == "R300"


def _crashing(second: float) -> ServerFacts:
    """A server that dies and starts anew for ever: 20 s until it accepts, 30 s until it dies; each has a new pid."""
    number, within = divmod(second, 50)
    answer = Answer.REFUSED if within < 20 else Answer.ACCEPTED
    return serves(answer, pid=int(10 + number))


@pytest.mark.parametrize("restarts", [(), (95,), (130, 160)])
async def test_a_server_that_crashes_again_and_again(restarts: tuple[int, ...]) -> None:
    """What hinders its launch gates while nobody answers and leaves whoever answers alone, round by round.

    The server is looked at every 30 s, so that is how late each change is seen; nothing is latched in between.
    """
    scripts = {"driver": steps(drives(REFUSING)), "server": _crashing}
    life = await live(300, scripts, restarts=restarts)
    looks = sorted({begin + 30 * number for begin in (0, *restarts) for number in range(10)})
    for second in range(300):
        begun = max(begin for begin in (0, *restarts) if begin <= second)
        last = max(look for look in looks if begun <= look <= second and (look - begun) % 30 == 0)
        served = _crashing(last).observation.answer is Answer.ACCEPTED
        assert life.readiness[second] == ("R" if served else "N"), second
    assert {"R", "N"} == set(life.readiness)


async def test_proof_that_nobody_serves_ends_with_what_is_known_of_the_server() -> None:
    """When the server can no longer be looked at, a launch gates until its facts are too old, and then no more."""
    scripts = {"driver": steps(drives(REFUSING)), "server": steps(STARTING, (25, ProbeTimeout("Silence.")))}
    life = await live(200, scripts)
    assert life.runs == "N95 R105"


# -- an upgrade under a running server ----------------------------------------------------------------

UPGRADE = {
    "driver": steps(drives(HEALTHY), (45, drives(UPGRADED))),
    "server": steps(
        serves(Answer.ACCEPTED, replaced=()),
        (45, serves(Answer.ACCEPTED, replaced=("torch/lib/libtorch_cuda.so",))),
        (200, serves(Answer.REFUSED, pid=8)),
    ),
}


@pytest.mark.parametrize(
    ("restarts", "runs", "mismatch", "replaced_files"),
    [
        ((), "R210 N40", "60-", "60-209"),
        ((52,), "R202 N48", "52-", "52-201"),
        ((100,), "R220 N30", "60-", "60-219"),
        ((230,), "R210 N40", "60-", "60-209"),
    ],
)
async def test_an_upgrade_under_a_running_server(
    restarts: tuple[int, ...], runs: str, mismatch: str, replaced_files: str
) -> None:
    """What was replaced on disk alerts, and makes unready only when the server has to start on it."""
    life = await live(250, UPGRADE, restarts=restarts)
    assert life.runs == runs
    assert life.seconds_of("driver-library-mismatch") == mismatch
    assert life.seconds_of("server-runs-replaced-files") == replaced_files


# -- NVML that hangs and comes back -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restarts", "runs", "hung"),
    [
        ((), "R200", "55-149"),
        # The new process waits for its first round's deadline, and then for nothing.
        ((82,), "R82 P5 R113", "55-81 87-151"),
        ((140,), "R200", "55-139"),
    ],
)
async def test_nvml_that_hangs_and_comes_back(restarts: tuple[int, ...], runs: str, hung: str) -> None:
    """A driver that does not answer alerts and is unknown; a healthy pod stays in service (case 4)."""
    scripts = {"driver": steps(drives(HEALTHY), (40, HUNG), (130, drives(HEALTHY))), "server": steps(UP)}
    life = await live(200, scripts, restarts=restarts)
    assert (life.runs, life.seconds_of("driver-hung")) == (runs, hung)


@pytest.mark.parametrize(
    ("restarts", "runs"),
    [((), "R20 N45 R65 N70"), ((82,), "R20 N45 R17 P5 R45 N68"), ((50,), "R20 N30 P5 R75 N70")],
)
async def test_nvml_that_hangs_after_a_gpu_was_lost(restarts: tuple[int, ...], runs: str) -> None:
    """A lost GPU gates while its fact lives, 35 s; then it is unknown, and gates again as soon as it is seen."""
    scripts = {
        "driver": steps(drives(HEALTHY), (15, drives(LOST)), (40, HUNG), (130, drives(LOST))),
        "server": steps(UP),
    }
    life = await live(200, scripts, restarts=restarts)
    assert life.runs == runs


# -- what people see of it ----------------------------------------------------------------------------


async def test_since_and_history_tell_of_each_change_once() -> None:
    """Through a day of flapping a condition's since is that of its published status, and each change has one line."""
    life = await live(250, FLAPPING)
    since = [snapshot.conditions["gpu-lost"].since for snapshot in life.snapshots]
    assert [len(list(same)) for _, same in itertools.groupby(since)] == [100, 120, 30]
    history = [(one.subject, one.before, one.after) for one in life.snapshots[-1].history]
    assert history == [
        ("ready", "pending", "ready"),
        ("gpu-lost", "false", "active"),
        ("ready", "ready", "not-ready"),
        ("gpu-lost", "active", "false"),
        ("ready", "not-ready", "ready"),
    ]
    assert life.snapshots[-1].ready_transitions == {True: 2, False: 1}
