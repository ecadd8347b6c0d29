"""Which attention backend, and so which FlashAttention implementation, each phase of inference uses.

The running server's resolved arguments come before the flags as typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sidecar.backends import PhaseBackend, phases
from sidecar.model import Family, Finding, Phase, Probe, Result, Sample, Skip, World
from sidecar.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """The attention backend of each phase."""

    phases: Mapping[Phase, PhaseBackend]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSection:
    """One phase of attention in the report.

    ``declared`` is the backend that the flags ask for, ``resolved`` the one that the running server settled on,
    ``loaded`` and ``installed`` what its process has mapped and what its environment offers (null: not looked at).
    ``version`` is 3 or 4, 0 for a backend without FlashAttention, null for unknown. ``state`` tells the nulls apart.
    """

    declared: str | None
    resolved: str | None
    loaded: int | None
    installed: int | None
    version: int | None
    state: str


VERSION: Final = Family(
    name="flash_attention_version",
    kind="gauge",
    help="FlashAttention implementation in use, 0 where the phase's backend runs none; absent while unknown.",
    labels=("phase",),
)
BACKEND: Final = Family(
    name="attention_backend_info",
    kind="info",
    help="Attention backend of each phase, and where it was read.",
    labels=("phase", "backend", "source"),
)


async def collect(services: Services) -> AttentionFacts:
    """Read the backends from the server's information, else from its command line.

    Raises Skip where there is neither: then there is nothing to look at.
    """
    target = await services.targets.find()
    info = await services.server.info(target)
    launch = None if target.launch_source is None else target.launch
    if info is None and launch is None:
        raise Skip("there is neither a server's information nor a launch command to read the backends from")
    return AttentionFacts(phases=phases(info, launch))


def judge(_result: Result[AttentionFacts], _world: World) -> Iterable[Finding]:
    """Find nothing: this probe only shows."""
    return ()


def samples(facts: AttentionFacts) -> Iterable[Sample]:
    """One version per phase that has a known one, one backend per phase that names one."""
    for phase, backend in facts.phases.items():
        if backend.version is not None:
            yield Sample(VERSION.name, (phase.value,), backend.version)
    for phase, backend in facts.phases.items():
        if backend.backend is not None and backend.source is not None:
            yield Sample(BACKEND.name, (phase.value, backend.backend, backend.source.value), 1)


def report(facts: AttentionFacts) -> Mapping[str, Mapping[str, PhaseSection]]:
    """Give the report's ``attention`` key: one section per phase."""
    return {
        "attention": {
            phase.value: PhaseSection(
                declared=backend.declared,
                resolved=backend.resolved,
                loaded=None,
                installed=None,
                version=backend.version,
                state=backend.state.value,
            )
            for phase, backend in facts.phases.items()
        }
    }


PROBE: Probe[AttentionFacts] = Probe(
    name="attention",
    title="Which FlashAttention implementation is active in each phase",
    interval=60,
    deadline=10,
    collect=collect,
    judge=judge,
    samples=samples,
    families=(VERSION, BACKEND),
    conditions=(),
    report=report,
    sections={"attention": dict[str, PhaseSection]},
)
