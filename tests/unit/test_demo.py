"""The demo's recordings: what they hold, what is judged of it, and how that changes as time passes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import fields

from sidecar import demo
from sidecar.app import Agent
from sidecar.catalog import build, discover
from sidecar.config import ImportPolicy, Settings
from sidecar.demo import SCENARIOS, Moment, Recording, UnknownScenarioError, load, merged, replay
from sidecar.model import Scope, Snapshot
from sidecar.report import Level, level
from sidecar.scheduler import Scheduler
from sidecar.store import Store
from tests.builders import EPOCH, FakeClock

HEALTHY = "healthy"


# -- recordings -----------------------------------------------------------------------------------------


def lost(recorded: Any, read: Any, path: str = "") -> list[str]:
    """What a recording says and nobody reads: a misspelt key, a field that is gone."""
    if isinstance(read, Struct):
        known = {one.name: getattr(read, one.name) for one in fields(read)}
    elif isinstance(read, Mapping):
        known = {str(key): value for key, value in read.items()}
    elif isinstance(recorded, list) and isinstance(read, tuple | list):
        return [one for index, item in enumerate(recorded) for one in lost(item, read[index], f"{path}.{index}")]
    else:
        return []
    if not isinstance(recorded, dict):
        return []
    return [
        one
        for key, value in recorded.items()
        for one in ([f"{path}.{key}"] if key not in known else lost(value, known[key], f"{path}.{key}"))
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_recorded_is_read(name) -> None:
    """Each state becomes the very types that the edges give; no key of it is passed over."""
    for state in demo.states(name):
        assert lost(state, msgspec.convert(state, Moment, str_keys=True)) == []
    for recording in load(name):
        begins = [seconds for seconds, _ in recording.moments]
        assert begins[0] == 0
        assert begins == sorted(set(begins))
        assert recording.demo.scenario == name
        assert recording.demo.title
        assert recording.demo.shows.endswith(".")


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_recorded_is_looked_for_here(name) -> None:
    """No path is followed on this machine, and no key was recorded."""
    for recording in load(name):
        for _, moment in recording.moments:
            assert moment.target.scope is Scope.SERVER
            assert moment.processes is None or moment.processes.site_folders is None
            assert set(moment.target.environ or {}) <= {"NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "HOME"}


def test_an_unknown_scenario_is_refused_with_the_list() -> None:
    """The sentence names what there is."""
    with pytest.raises(UnknownScenarioError, match=", ".join(SCENARIOS)):
        load("nope")


@pytest.mark.parametrize(
    ("whole", "patch", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": {"1": {"b": 3}}}, {"a": [{"b": 1}, {"b": 3}]}),
        ({"a": 1}, {"a": {"b": {"c": None, "d": 1}}}, {"a": {"b": {"d": 1}}}),
        ({}, {"a": None}, {}),
    ],
)
def test_patches(whole, patch, expected) -> None:
    """As RFC 7396 has it, and items of a list by their index; what is patched stays as it was."""
    before = msgspec.json.encode(whole)
    assert merged(whole, patch) == expected
    assert msgspec.json.encode(whole) == before


# -- what is judged -------------------------------------------------------------------------------------

ENDS = {
    "healthy": (Level.OK, (), ()),
    "driver-mismatch": (Level.CRITICAL, ("driver-library-mismatch",), ("driver-library-mismatch",)),
    "mamba-missing": (
        Level.CRITICAL,
        ("flashinfer-mamba-missing",),
        ("environment-drift", "flashinfer-mamba-missing"),
    ),
    "fa4-deferred": (
        Level.CRITICAL,
        ("fa4-not-importable",),
        ("environment-drift", "fa4-not-importable", "requirement-violated"),
    ),
    "gpu-lost": (Level.CRITICAL, ("gpu-lost",), ("gpu-lost",)),
    "upgrade-drift": (
        Level.WARNING,
        (),
        ("environment-drift", "requirement-violated", "server-runs-replaced-files"),
    ),
    "fleet-skew": (Level.OK, (), ()),
}
"""How each scenario ends: its level, what makes the pod unready, what is active."""
NOT_RECORDED: frozenset[str] = frozenset()
"""Probes whose question the recordings have no answer to: in a demo it does not arise."""


def verdict(snapshot: Snapshot) -> tuple[Level, tuple[str, ...], tuple[str, ...]]:
    active = sorted(code for code, one in snapshot.conditions.items() if one.active)
    return level(snapshot), snapshot.verdict.blockers, tuple(active)


async def look(recording: Recording) -> Snapshot:
    """One look at how a recording ends."""
    settings = Settings(import_policy=ImportPolicy.ALWAYS)
    async with Agent.create(settings, once=True, demo=recording) as agent:
        return await agent.check()


@pytest.mark.parametrize("name", SCENARIOS)
async def test_how_each_scenario_ends(name) -> None:
    """The real probes and the real judge come to what the scenario is there to show."""
    snapshot = await look(load(name)[0])
    assert verdict(snapshot) == ENDS[name]
    assert snapshot.demo is not None
    outcomes = {one.probe: one.outcome.value for one in snapshot.results.values()}
    assert outcomes == {probe: "skipped" if probe in NOT_RECORDED else "ok" for probe in outcomes}


async def test_the_fleet_s_replicas_differ_in_what_they_are_made_of() -> None:
    """Side by side they show one older driver and one older image, on eight GPUs of which none is the same."""
    snapshots = [await look(recording) for recording in load("fleet-skew")]
    assert [one.demo and (one.demo.replica, one.demo.replicas) for one in snapshots] == [(n, 4) for n in (1, 2, 3, 4)]
    assert all(one.verdict.ready for one in snapshots)

    def values(item: str) -> list[str | None]:
        return [one.environment[item].value for one in snapshots]

    assert values("driver") == ["580.159.04", "580.159.04", "580.126.09", "580.159.04"]
    assert values("flashinfer-python") == ["0.6.14", "0.6.14", "0.6.14", "0.6.13"]
    uuids = [gpu.uuid for one in snapshots for gpu in one.results["driver"].facts.reading.gpus]
    assert len(set(uuids)) == 8
    assert all(one.results["driver"].facts.gpu_set.known for one in snapshots)


# -- how it changes -------------------------------------------------------------------------------------


class Running:
    """A serving demo whose time the test owns."""

    def __init__(self, name: str, clock: FakeClock) -> None:
        self.clock = clock
        settings = replay.settings_for(Settings())
        # The driver first: others wait for its first reading, and time stands still meanwhile.
        self.probes = sorted(discover(), key=lambda probe: probe.name != "driver")
        self.services = replay.services(
            load(name)[0], settings=settings, clock=clock, wake=lambda _name: None, frozen=False
        )
        catalog = build(self.probes)
        self.store = Store(
            self.probes,
            standing=self.services.standing,
            settings=settings,
            required=(),
            clock=clock,
            lifetimes={probe.name: 60.0 for probe in self.probes},
            observe=catalog.observed,
        )

    async def until(self, seconds: float) -> Snapshot:
        """Let the demo go on until it has run so long, a round of every probe every two seconds."""
        scheduler = Scheduler(self.probes, services=self.services, publish=self.store.publish, clock=self.clock)
        while self.clock.now - EPOCH < seconds:
            for probe in self.probes:
                self.store.publish(await scheduler.attempt(probe))
            self.clock.now += replay.INTERVAL
        return self.store.snapshot


@pytest.mark.parametrize(
    ("name", "first", "later", "seconds"),
    [
        ("gpu-lost", (), ("gpu-lost",), 26),
        ("upgrade-drift", (), ENDS["upgrade-drift"][2], 26),
        ("driver-mismatch", (), ("driver-library-mismatch",), 24),
        ("healthy", (), (), 20),
    ],
)
async def test_a_scenario_begins_well_and_changes(name, first, later, seconds, clock: FakeClock) -> None:
    """What changes is seen changing: it is in the history, with the readiness that goes with it."""
    running = Running(name, clock)
    assert verdict(await running.until(10))[2] == first
    snapshot = await running.until(seconds)
    assert verdict(snapshot)[2] == later
    changed = {one.subject for one in snapshot.history if one.after == "active"}
    assert changed == set(later)


async def test_a_mismatch_gates_only_the_next_start(clock: FakeClock) -> None:
    """The server that runs goes on and the pod is ready; once it has to start anew, it is not."""
    running = Running("driver-mismatch", clock)
    assert (await running.until(30)).verdict.ready
    assert (await running.until(60)).verdict.blockers == ("driver-library-mismatch",)


async def test_a_deferred_failure_gates_although_http_answers(clock: FakeClock) -> None:
    """Before and after the server answers, what would kill it at its first request keeps the pod unready."""
    running = Running("fa4-deferred", clock)
    assert (await running.until(8)).verdict.blockers == ("fa4-not-importable",)
    snapshot = await running.until(30)
    assert snapshot.server.answer is not None
    assert snapshot.server.answer.value == "accepted"
    assert snapshot.verdict.blockers == ("fa4-not-importable",)


async def test_an_upgrade_is_counted_as_a_change(clock: FakeClock) -> None:
    """The identity is seen changing, before and after."""
    snapshot = await Running("upgrade-drift", clock).until(30)
    changes = {one.item: (one.before, one.after) for one in snapshot.known.recent}
    assert changes["flashinfer-python"] == ("0.6.14", "0.6.15")
    assert snapshot.known.counts["transformers"] == 1


async def test_gpus_are_busy_and_stay_within_reason(clock: FakeClock) -> None:
    """A dashboard has curves to draw: utilization, power and temperature move, within what an H200 does."""
    nvml = Running(HEALTHY, clock).services.nvml
    seen = []
    for _ in range(20):
        clock.now += 6
        seen.append((await nvml.round(1)).gpus[0])
    assert len({gpu.utilization for gpu in seen}) > 8
    assert all(0 <= (gpu.utilization or -1) <= 1 and 70 < (gpu.power or 0) < 700 for gpu in seen)
    assert all(30 < (gpu.temperature or 0) < 80 for gpu in seen)


async def test_times_are_this_moment_s() -> None:
    """What was recorded relative to the start happens now: the server's start, an Xid, an import."""
    clock = FakeClock()
    services = replay.services(
        load("gpu-lost")[0], settings=Settings(), clock=clock, wake=lambda _name: None, frozen=True
    )
    target, reading = await asyncio.gather(services.targets.find(), services.nvml.round(1))
    assert target.create_time is not None
    assert math.isclose(EPOCH - target.create_time, 6 * 3600 + 15)
    assert [EPOCH - one.last for one in reading.xids] == [1.0]
