"""Recorded servers, to see the page, the metrics and the alerts without a GPU.

A *scenario* is a file in ``recordings``: what the agent's edges (`sidecar.services`) would give, moment after moment.
Probes, judge and renderers are the real ones. A moment says only what differs from the one before, as a JSON merge
patch (RFC 7396), and a scenario only what differs from the one that it rests on; beyond that RFC, an object whose keys
are indices patches the items of a list. Times are seconds relative to the start of the demo.

Nothing of this machine is looked at: the edges that would do so are not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence
from sidecar.model import Demo, Standing, Target
from sidecar.nvml.reading import NvmlReading
from sidecar.processes import ServerProcesses
from sidecar.serverinfo import Problem, ServerInfo, ServerObservation

SCENARIOS: Final = (
    "healthy",
    "driver-mismatch",
    "mamba-missing",
    "fa4-deferred",
    "gpu-lost",
    "upgrade-drift",
    "fleet-skew",
)
"""Every scenario, the one in which nothing is wrong first."""

MODULES: Final = ("flashinfer.mamba", "sgl_kernel", "sgl_kernel.flash_attn", "sglang.jit_kernel.flash_attn.cute")
"""The modules whose real import is recorded."""

FILES: Final = Path(__file__).parent
BASELINE: Final = str(FILES / "baseline.toml")
"""The baseline of every scenario: the environment of the healthy one."""
PROC: Final = FILES / "proc"
"""What stands for /proc: a kernel module is loaded."""


class UnknownScenarioError(Exception):
    """There is no such scenario. The argument is one sentence that names those there are."""


class Moment(Struct, frozen=True, kw_only=True):
    """What each edge gives at one time. ``imports`` maps modules to what their real import did."""

    standing: Standing
    target: Target
    nvml: NvmlReading
    observation: ServerObservation
    info: ServerInfo | None = None
    info_problem: Problem | None = None
    processes: ServerProcesses | None = None
    environment: EnvironmentFacts
    imports: Mapping[str, ImportEvidence] = field(default_factory=dict)

    def moved(self, start: float) -> Moment:
        """The same with its times in epoch seconds, for a demo that starts at ``start``."""
        created, processes = self.target.create_time, self.processes
        return replace(
            self,
            target=replace(self.target, create_time=None if created is None else created + start),
            nvml=replace(self.nvml, xids=tuple(replace(one, last=one.last + start) for one in self.nvml.xids)),
            processes=None
            if processes is None
            else replace(
                processes,
                processes=tuple(
                    replace(one, started_at=None if one.started_at is None else one.started_at + start)
                    for one in processes.processes
                ),
            ),
            environment=replace(
                self.environment,
                changed_at={name: at + start for name, at in self.environment.changed_at.items()},
            ),
            imports={name: replace(one, at=one.at + start) for name, one in self.imports.items()},
        )


class Recording(Struct, frozen=True, kw_only=True):
    """What one replica of a scenario shows: moments with the seconds after which each begins, the first at 0."""

    demo: Demo
    moments: tuple[tuple[float, Moment], ...]


def load(name: str) -> tuple[Recording, ...]:
    """Read a scenario: one recording, or one per replica. Raises `UnknownScenarioError`."""
    if name not in SCENARIOS:
        raise UnknownScenarioError(f"there is no demo of that name; there are {', '.join(SCENARIOS)}")
    described = _described(name)
    replicas: list[Any] = described.get("replicas", [{}])
    return tuple(
        Recording(
            demo=Demo(
                scenario=name,
                title=described["title"],
                shows=described["shows"],
                replica=number if len(replicas) > 1 else None,
                replicas=len(replicas),
            ),
            moments=tuple(
                (float(frame["at"]), msgspec.convert(merged(state, patch), Moment, str_keys=True))
                for frame, state in zip(described["frames"], states(name), strict=True)
            ),
        )
        for number, patch in enumerate(replicas, 1)
    )


def _described(name: str) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((FILES / "recordings" / f"{name}.json").read_text(encoding="utf-8"))
    return described


def states(name: str) -> list[Any]:
    """The whole state of each moment of a scenario, as JSON values."""
    described = _described(name)
    # A scenario begins where the one that it rests on ends.
    state: Any = states(described["base"])[-1] if "base" in described else {}
    found = []
    for frame in described["frames"]:
        state = merged(state, frame["set"])
        found.append(state)
    return found


def merged(whole: Any, patch: Any) -> Any:
    """Apply a JSON merge patch: objects are merged, null takes a key away, anything else takes its place.

    Where there is a list, an object patches the items at the indices that are its keys.
    """
    if not isinstance(patch, dict):
        return patch
    if isinstance(whole, list):
        items = list(whole)
        for index, value in patch.items():
            items[int(index)] = merged(items[int(index)], value)
        return items
    kept = dict(whole) if isinstance(whole, dict) else {}
    for key, value in patch.items():
        if value is None:
            kept.pop(key, None)
        else:
            kept[key] = merged(kept.get(key), value)
    return kept
