"""A small world for the renderers' tests: four probes, a catalogue of them, and snapshots built by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sidecar.catalog import Catalog, build
from sidecar.model import (
    Answer,
    Condition,
    ConditionType,
    Family,
    Finding,
    Gate,
    Outcome,
    Placement,
    Probe,
    Processes,
    Result,
    Sample,
    Scope,
    ServerView,
    Severity,
    Snapshot,
    Standing,
    Status,
    Transition,
    Verdict,
    World,
)

NOW = 1_750_000_000.0
"""When the samples happen, in seconds since the epoch: 2025-06-15T15:06:40Z."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSection:
    """A GPU in the sample report, with the fields that people are shown."""

    gpu: str
    uuid: str
    name: str | None
    up: bool = True
    return_code: int = 0
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSection:
    """The driver in the sample report."""

    driver_version: str | None
    return_code: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of any sample probe: its samples, identity and report are given outright."""

    samples: tuple[Sample, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    scope: Scope | None = None


def condition_type(code: str, severity: Severity, gate: Gate, **more: Any) -> ConditionType:
    """Make a declaration with texts that follow from the code."""
    return ConditionType(
        code=code,
        severity=severity,
        gate=gate,
        title=f"title of {code}",
        when=f"when {code}",
        remedy=f"remedy of {code}",
        reasons={"some-reason": "for some reason"},
        **more,
    )


async def _collect(_services: Any) -> Facts:
    return Facts()


def _judge(_result: Result[Facts], _world: World) -> Iterable[Finding]:
    return ()


def probe(name: str, *conditions: ConditionType, **more: Any) -> Probe[Facts]:
    """Make a probe that never runs: the renderers only read its declaration."""
    return Probe(
        name=name,
        title=f"title of {name}",
        interval=10.0,
        deadline=5.0,
        collect=_collect,
        judge=_judge,
        samples=lambda facts: facts.samples,
        families=more.pop("families", ()),
        conditions=conditions,
        identity=lambda facts: facts.identity,
        report=lambda facts: facts.report,
        **more,
    )


def catalog() -> Catalog:
    """Four probes that resemble the real ones."""
    return build(
        (
            probe(
                "driver",
                condition_type("nvml-library-missing", Severity.CRITICAL, Gate.LAUNCH),
                condition_type("gpu-lost", Severity.CRITICAL, Gate.SERVING, depends_on=("nvml-library-missing",)),
                condition_type("driver-hung", Severity.CRITICAL, Gate.NEVER),
                condition_type("thermal-slowdown", Severity.WARNING, Gate.NEVER),
                families=(Family(name="gpus_visible", kind="gauge", help="How many GPUs NVML shows"),),
                sections={"driver": DriverSection, "gpus": tuple[GpuSection, ...]},
            ),
            probe(
                "flashinfer",
                condition_type("flashinfer-not-installed", Severity.CRITICAL, Gate.LAUNCH),
                condition_type("flashinfer-import-failed", Severity.CRITICAL, Gate.LAUNCH),
                sections={"modules": dict[str, dict[str, Any]]},
            ),
            probe(
                "server",
                condition_type("server-not-found", Severity.INFO, Gate.NEVER),
                sections={"server": dict[str, Any], "attention": dict[str, dict[str, Any]]},
            ),
            probe("packages"),
        )
    )


def condition(code: str, status: Status, **more: Any) -> Condition:
    """Make a published condition of the sample catalogue, declared values unless given."""
    declared = catalog().conditions[code]
    values: dict[str, Any] = {
        "severity": declared.severity,
        "gate": declared.gate,
        "reason": None if status is Status.FALSE else "some-reason",
        "message": "" if status is Status.FALSE else f"message of {code}",
        "remedy": declared.remedy,
        "evidence": (),
        "since": NOW - 60,
    }
    return Condition(code=code, status=status, **(values | more))


def snapshot(
    *conditions: Condition,
    facts: Mapping[str, Facts] | None = None,
    outcomes: Mapping[str, Outcome] | None = None,
    pending: bool = False,
    blockers: tuple[str, ...] = (),
    history: tuple[Transition, ...] = (),
    generation: int = 7,
    answer: Answer | None = None,
) -> Snapshot:
    """Make a snapshot in which every condition that is not given is judged and fine."""
    facts = facts or {}
    outcomes = outcomes or {}
    sample = catalog()
    published = {code: condition(code, Status.FALSE) for code in sample.conditions}
    published |= {item.code: item for item in conditions}
    return Snapshot(
        generation=generation,
        taken_at=NOW,
        standing=Standing(
            placement=Placement.CONTAINER,
            placement_why="/.dockerenv exists",
            processes=Processes.HIDDEN,
            processes_why="no process of a server is visible",
        ),
        server=ServerView(answer=answer),
        results={
            one.name: Result(
                probe=one.name,
                outcome=outcomes.get(one.name, Outcome.OK),
                facts=facts.get(one.name),
                started_at=NOW - 3,
                duration=0.25,
                last_success_at=NOW - 3,
                rounds=4,
            )
            for one in sample.probes
        },
        conditions=published,
        verdict=Verdict(ready=not (pending or blockers), pending=pending, blockers=blockers),
        history=history,
        ready_transitions={},
    )


@dataclass(slots=True)
class Store:
    """Holds whatever snapshot a test publishes."""

    snapshot: Snapshot


@dataclass(slots=True)
class ProcessState:
    """The process as a test wants it to be."""

    stopping: bool = False
    stalled: str | None = None
    waiting: str | None = None

    def alive(self) -> str | None:
        """Tell why it makes no progress."""
        return self.stalled

    def started(self) -> str | None:
        """Tell what it waits for."""
        return self.waiting
