"""Whether ``flashinfer.mamba`` can be imported in the server's environment, and if not, the one cause.

A verdict from reading files is there within a second. The verdict of a real import, where one may be run,
replaces it. This module collects the facts and shows the verdict; `verdict.classify` finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.config import ImportPolicy, Settings
from sidecar.environment import ImportEvidence, ImportOutcome
from sidecar.model import (
    Answer,
    ConditionType,
    Feature,
    Finding,
    Gate,
    Probe,
    Result,
    Sample,
    Scope,
    Severity,
    Status,
    Target,
    World,
)
from sidecar.probes.flashinfer.conditions import CONDITIONS, DISABLED, FAMILIES, MODULE
from sidecar.probes.flashinfer.facts import FlashinferFacts, ImportState
from sidecar.probes.flashinfer.faults import OTHER_CAUSE, Classification
from sidecar.probes.flashinfer.reading import version_unread
from sidecar.probes.flashinfer.texts import AVAILABLE_VARIABLE, BYPASS_VARIABLE, flashinfer_version
from sidecar.probes.flashinfer.verdict import classify, classify_module, disabled
from sidecar.services import Services

__all__ = [
    "PROBE",
    "FlashinferFacts",
    "ImportState",
    "classify",
    "collect",
    "judge",
    "report",
    "requires_mamba",
    "samples",
]

_CUBIN_DIR_VARIABLE = "FLASHINFER_CUBIN_DIR"
SEEN_VARIABLES = (AVAILABLE_VARIABLE, BYPASS_VARIABLE)
"""Variables of the server whose values are kept: neither can hold a secret or a path."""


# -- facts ------------------------------------------------------------------------------------------------


async def collect(services: Services) -> FlashinferFacts:
    """Read the environment, take what earlier imports showed, and start one where it would tell something new."""
    target = await services.targets.find()
    environment, demanded = await asyncio.gather(services.environment.read(target), _demanded(services, target))
    evidence = services.environment.import_evidence(environment, target)
    policy = services.settings.import_policy
    wanted = policy is ImportPolicy.ALWAYS or (policy is ImportPolicy.AUTO and demanded)
    if wanted and environment.problem is None and services.environment.import_due(environment, target):
        services.environment.request_import(environment, target, lambda: services.wake("flashinfer"))
    return FlashinferFacts(
        environment=environment,
        evidence=evidence,
        state=_import_state(evidence, running=services.environment.importing),
        variables=_seen(target),
        variables_missing=target.environ_missing,
        cubin_dir=bool(target.environ and target.environ.get(_CUBIN_DIR_VARIABLE)),
    )


async def _demanded(services: Services, target: Target) -> bool:
    """Whether somebody counts on ``flashinfer.mamba``: the operator, the flags, or the running server."""
    if requires_mamba(services.settings) or target.launch.get("mamba_backend") == "flashinfer":
        return True
    if services.settings.import_policy is not ImportPolicy.AUTO:
        return False
    info = await services.server.info(target)
    return info is not None and info.mamba_backend == "flashinfer"


def requires_mamba(settings: Settings) -> bool:
    """Whether the settings require the feature or one of its conditions."""
    return not {Feature.FLASHINFER_MAMBA.value, *(kind.code for kind in CONDITIONS)}.isdisjoint(settings.require)


def _seen(target: Target) -> Mapping[str, str] | None:
    if target.environ is None:
        return None
    return {name: target.environ[name][:64] for name in SEEN_VARIABLES if name in target.environ}


def _import_state(evidence: ImportEvidence | None, *, running: bool) -> ImportState:
    if evidence is None:
        return ImportState.PENDING if running else ImportState.NOT_REQUESTED
    return ImportState.NOT_ALLOWED if evidence.outcome is ImportOutcome.NOT_ALLOWED else ImportState.DONE


# -- the verdict ------------------------------------------------------------------------------------------


def judge(result: Result[FlashinferFacts], world: World) -> Iterable[Finding]:
    """One finding per condition; at most one of them is true."""
    if result.facts is None:
        return []
    facts = result.facts
    verdict, module = classify(facts), classify_module(facts)
    return [
        _disabled(verdict, facts, world) if kind is DISABLED else _finding(kind, verdict, module, facts)
        for kind in CONDITIONS
    ]


def _finding(kind: ConditionType, verdict: Classification, module: Classification, facts: FlashinferFacts) -> Finding:
    """Judge a condition of the module; ``verdict`` is the cause, which may be that it is disabled."""
    if verdict.code == kind.code:
        return _active(verdict, final=verdict.verified)
    if kind.code in module.ruled_out:
        return Finding(code=kind.code, status=Status.FALSE, message="Not the case.", final=module.verified)
    if module.code == kind.code:
        message = f"{module.message} SGLang does not get this far while {verdict.code} is active."
        return _undecided(kind, OTHER_CAUSE, message, module.evidence)
    if module.undecided == OTHER_CAUSE:
        message = f"Unknown while {verdict.code} is active: what is behind it shows once that is repaired."
        return _undecided(kind, OTHER_CAUSE, message)
    if module.importable and not module.verified and version_unread(facts, kind.code):
        return _undecided(kind, "version-unknown")
    return _undecided(kind, module.undecided, module.undecided_message, module.evidence)


def _disabled(verdict: Classification, facts: FlashinferFacts, world: World) -> Finding:
    """Judge whether FlashInfer is disabled, by the server's variables or by what it has been seen to do."""
    if verdict.code == DISABLED.code:
        return _active(verdict, final=True)
    off = disabled(facts)
    if off is False:
        # Read from the server's process itself: no further round can make it more certain.
        message = f"{AVAILABLE_VARIABLE} does not say so."
        return Finding(code=DISABLED.code, status=Status.FALSE, message=message, final=True)
    server = world.server
    if server.answer is Answer.ACCEPTED and server.features.get(Feature.FLASHINFER_MAMBA) is True:
        message = "The running server uses FlashInfer's mamba backend, so it was not disabled when it started."
        return Finding(code=DISABLED.code, status=Status.FALSE, message=message)
    if facts.variables is not None:
        return _undecided(DISABLED, "value-unclear")
    return _undecided(DISABLED, "scope-self" if facts.environment.scope is Scope.SELF else "environ-unseen")


def _active(verdict: Classification, *, final: bool) -> Finding:
    return Finding(
        code=str(verdict.code),
        status=Status.TRUE,
        reason=verdict.reason,
        message=verdict.message,
        remedy=verdict.remedy,
        evidence=verdict.evidence,
        final=final,
        severity=verdict.severity,
        gate=Gate.NEVER if verdict.severity is Severity.WARNING else None,
        # Only this failure follows from a torch that sees no GPU; the others are there beside it.
        explained_by=None if verdict.reason == "torch-without-cuda" else (),
    )


def _undecided(kind: ConditionType, reason: str, message: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(
        code=kind.code,
        status=Status.UNKNOWN,
        reason=reason,
        message=message or kind.reasons[reason],
        evidence=evidence,
    )


# -- what is shown ------------------------------------------------------------------------------------------


def samples(facts: FlashinferFacts) -> Iterable[Sample]:
    """Tell of ``flashinfer.mamba`` by the best evidence; nothing while unknown."""
    # Disabled is SGLang's decision; the module itself may well be importable, and then says so.
    module = classify_module(facts)
    if module.importable is not None:
        yield Sample("module_importable", (MODULE,), float(module.importable))
        yield Sample("module_import_verified", (MODULE,), float(module.verified))
    evidence = facts.evidence
    ended = evidence is not None and evidence.outcome in {ImportOutcome.OK, ImportOutcome.FAILED}
    if evidence is not None and evidence.seconds is not None and ended:
        yield Sample("module_import_duration_seconds", (MODULE,), evidence.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSection:
    """A module of the server's environment.

    ``importable``: null while unknown. ``verified``: by a real import. ``evidence``: how the last import ended, or
    files, pending or not-allowed. ``why``: token behind not-allowed. ``stage``: the last one that the import
    reached. ``code``: the condition that names the cause.
    """

    importable: bool | None
    verified: bool
    evidence: str
    why: str | None
    seconds: float | None
    version: str | None
    stage: str | None
    scope: str
    code: str | None
    reason: str | None
    names: tuple[str, ...]
    variables: Mapping[str, str] | None
    variables_missing: str | None
    peak_memory_bytes: int | None
    cuda_initialized: bool | None


def report(facts: FlashinferFacts) -> Mapping[str, Any]:
    """Give the report's ``modules``."""
    verdict, alone = classify(facts), classify_module(facts)
    evidence = facts.evidence
    how = "pending" if facts.state is ImportState.PENDING else "files"
    section = ModuleSection(
        importable=alone.importable,
        verified=alone.verified,
        evidence=evidence.outcome.value if evidence is not None else how,
        why=evidence.reason if evidence is not None else None,
        seconds=evidence.seconds if evidence is not None else None,
        version=flashinfer_version(facts),
        stage=evidence.stage if evidence is not None else None,
        scope=facts.environment.scope.value,
        code=verdict.code,
        reason=verdict.reason,
        names=evidence.names if evidence is not None else (),
        variables=facts.variables,
        variables_missing=facts.variables_missing,
        peak_memory_bytes=evidence.max_rss_bytes if evidence is not None else None,
        cuda_initialized=evidence.cuda_initialized if evidence is not None else None,
    )
    return {"modules": {MODULE: section}}


PROBE: Probe[FlashinferFacts] = Probe(
    name="flashinfer",
    title="flashinfer.mamba",
    interval=60.0,
    deadline=10.0,
    backoff=True,
    collect=collect,
    judge=judge,
    samples=samples,
    families=FAMILIES,
    conditions=CONDITIONS,
    report=report,
    sections={"modules": dict[str, ModuleSection]},
    requirable={Feature.FLASHINFER_MAMBA.value: tuple(kind.code for kind in CONDITIONS)},
)
