"""The probe `driver`: whether the GPU driver is up, which version it is, and whether the server's GPUs are healthy.

``state`` judges the driver as a whole, ``presence`` whether the GPUs are there and answer, ``health`` what they say
of themselves. Whose GPUs they are (`sidecar.gpuset`) decides how much a fault of one of them weighs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sidecar.drift import MIG
from sidecar.model import ConditionType, Finding, Outcome, Probe, Result, World
from sidecar.probes.driver import health, presence, state
from sidecar.probes.driver.declare import DEADLINE, NAME, SUCCESS, unknown
from sidecar.probes.driver.facts import DriverFacts, collect
from sidecar.probes.driver.metrics import FAMILIES, samples
from sidecar.probes.driver.sections import SECTIONS, report

__all__ = ["CONDITIONS", "FAMILIES", "PROBE", "DriverFacts", "collect", "identity", "judge", "report", "samples"]

CONDITIONS: tuple[ConditionType, ...] = (*state.CONDITIONS, *presence.CONDITIONS, *health.CONDITIONS)
"""Everything that this probe judges."""


def judge(result: Result[DriverFacts], world: World) -> Iterable[Finding]:
    """Say of each condition whether it holds; at most one of those about opening NVML does.

    What is left out is unknown for the reason that the run itself gives.
    """
    found: dict[str, Finding] = {}
    facts = result.facts
    if facts is not None:
        found = _from_facts(facts, world)
        found[state.HUNG.code] = presence.hanging(facts)
    if result.outcome is Outcome.TIMEOUT:
        found[state.HUNG.code] = state.hung(result, world.now)
        for kind in CONDITIONS:
            found.setdefault(kind.code, unknown(kind.code, "driver-hung", "The driver does not answer."))
    elif result.outcome is Outcome.PENDING and result.stuck:
        # From before a restart of the agent: the first round of this one will tell anew.
        found[state.HUNG.code] = state.hung(result, world.now)
    return tuple(found.values())


def _from_facts(facts: DriverFacts, world: World) -> dict[str, Finding]:
    placement = world.standing.placement
    seen_before = facts.highest > 0
    found = state.judge(facts.reading, placement, seen_before=seen_before)
    cause = state.find_cause(facts.reading, placement, seen_before=seen_before)
    if facts.reading.code == SUCCESS and (cause is None or cause.code != state.NO_ACCESS.code):
        found |= presence.judge(facts, placement)
        found |= health.judge(facts, world)
        if cause is None and (no_access := presence.unseen(facts, placement)) is not None:
            found[no_access.code] = no_access
    elif cause is not None:
        token, sentence = state.beyond(cause)
        gpu_kinds = (*presence.CONDITIONS, *health.CONDITIONS)
        found |= {kind.code: unknown(kind.code, token, sentence) for kind in gpu_kinds}
    return found


def identity(facts: DriverFacts) -> Mapping[str, str]:
    """Give the items of the environment that are known: driver, kernel_module, cuda_driver, gpu_model, mig."""
    reading = facts.reading
    items = {
        "driver": reading.driver_version,
        "kernel_module": reading.module_version,
        "cuda_driver": reading.cuda_driver_version,
        "gpu_model": _all_of(gpu.name for gpu in reading.gpus),
        MIG: _all_of(None if gpu.mig is None else health.mode(gpu.mig) for gpu in reading.gpus),
    }
    return {item: value for item, value in items.items() if value}


def _all_of(values: Iterable[str | None]) -> str | None:
    """List what the GPUs have; None where it is not known of all: the list would be wrong, and look like a change."""
    different = set(values)
    return None if None in different else ", ".join(sorted(value for value in different if value))


PROBE: Probe[DriverFacts] = Probe(
    name=NAME,
    title="GPU driver",
    interval=10.0,
    deadline=DEADLINE,
    collect=collect,
    judge=judge,
    samples=samples,
    families=FAMILIES,
    conditions=CONDITIONS,
    identity=identity,
    report=report,
    sections=SECTIONS,
    requirable={
        "cuda": tuple(kind.code for kind in state.CONDITIONS if kind not in (state.NO_ACCESS, state.ACCESS_LOST))
    },
)
"""What the rest of the agent needs to know of this probe."""
