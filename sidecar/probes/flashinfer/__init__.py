"""Whether ``flashinfer.mamba`` can be imported in the server's environment, and if not, the one cause.

A verdict from reading files is there within a second. The verdict of a real import, where one may be run,
replaces it. This module collects the facts and shows the verdict; `verdict.classify` finds it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sidecar import backends, sglangtexts
from sidecar.config import ImportPolicy, Settings
from sidecar.environment import EnvironmentFacts
from sidecar.imports import FLASHINFER_MAMBA, ImportEvidence, ImportOutcome
from sidecar.loaderrors import LoadFault, found_in_wheels, load_error
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
from sidecar.modules import MODULE_FAMILIES, MODULE_SECTIONS, module_samples, module_section
from sidecar.offload import in_daemon_thread
from sidecar.probes.flashinfer import beside
from sidecar.probes.flashinfer.conditions import (
    CAUSES,
    CONDITIONS,
    DISABLED,
    IMPORT_FAILED,
    MODULE,
    NOT_INSTALLED,
    ROUNDING_DTYPE,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts, ImportState, MambaArguments
from sidecar.probes.flashinfer.faults import OTHER_CAUSE, Classification
from sidecar.probes.flashinfer.reading import version_unread
from sidecar.probes.flashinfer.texts import (
    ARCH_VARIABLE,
    AVAILABLE_VARIABLE,
    BUILD_LOG_VARIABLE,
    BYPASS_VARIABLE,
    CALL_LOG_VARIABLE,
    LOG_FILE_VARIABLE,
    flashinfer_version,
)
from sidecar.probes.flashinfer.verdict import classify, classify_module, disabled, disagreement, read
from sidecar.serverinfo import ServerInfo
from sidecar.services import Services
from sidecar.target import PREFLIGHT, variables

__all__ = [
    "PROBE",
    "FlashinferFacts",
    "ImportState",
    "MambaArguments",
    "classify",
    "collect",
    "judge",
    "report",
    "requires_mamba",
    "samples",
]

_CUBIN_DIR_VARIABLE = "FLASHINFER_CUBIN_DIR"
_WORKSPACE_VARIABLE = "FLASHINFER_WORKSPACE_BASE"
SEEN_VARIABLES = (AVAILABLE_VARIABLE, BYPASS_VARIABLE, CALL_LOG_VARIABLE, BUILD_LOG_VARIABLE, ARCH_VARIABLE)
"""Variables of the server whose values are kept: none can hold a secret or a path."""
_USERS = (Feature.FLASHINFER_MAMBA, Feature.FLASHINFER, Feature.FLASHINFER_IMPORT)


# -- facts ------------------------------------------------------------------------------------------------


async def collect(services: Services) -> FlashinferFacts:
    """Read the environment, take what earlier imports showed, and start one where it would tell something new."""
    target = await services.targets.find()
    environment, info = await asyncio.gather(services.environment.read(target), services.server.info(target))
    evidence = services.imports.evidence(FLASHINFER_MAMBA, environment, target)
    policy = services.settings.import_policy
    wanted = policy is ImportPolicy.ALWAYS or (policy is ImportPolicy.AUTO and _demanded(services, target, info))
    if wanted and environment.problem is None and services.imports.due(FLASHINFER_MAMBA, environment, target):
        services.imports.request(FLASHINFER_MAMBA, environment, target, lambda: services.imported("flashinfer"))
    version = environment.sglang_release or (info.version if info is not None else None)
    environ = target.environ or {}
    seen = variables(target, *SEEN_VARIABLES)
    return FlashinferFacts(
        environment=environment,
        evidence=evidence,
        state=_import_state(evidence, running=services.imports.importing(FLASHINFER_MAMBA)),
        sglang=version,
        mamba=_mamba_arguments(target, info),
        server_seen=target.pid is not None or bool(target.candidates) or info is not None,
        variables=None if seen is None else {name: seen[name][:64] for name in SEEN_VARIABLES if name in seen},
        variables_missing=target.environ_missing if seen is None else None,
        cubin_dir=bool(environ.get(_CUBIN_DIR_VARIABLE)) or _CUBIN_DIR_VARIABLE in target.unseen,
        log_file=bool(environ.get(LOG_FILE_VARIABLE)) or LOG_FILE_VARIABLE in target.unseen,
        cache_stands=_cache_stands(environment, target, version),
        library_at=await _library_at(environment, target, evidence),
    )


def _demanded(services: Services, target: Target, info: ServerInfo | None) -> bool:
    """Whether somebody counts on FlashInfer: the operator, the flags, or the running server."""
    launch = _flags(target)
    used = backends.features(info, launch, preflight=target.launch_source == PREFLIGHT)
    return requires_mamba(services.settings) or any(used.get(feature) is True for feature in _USERS)


def requires_mamba(settings: Settings) -> bool:
    """Whether the settings require the feature or one of its conditions."""
    return not {Feature.FLASHINFER_MAMBA.value, *(kind.code for kind in CONDITIONS)}.isdisjoint(settings.require)


def _flags(target: Target) -> Mapping[str, Any] | None:
    return None if target.launch_source is None and not target.launch else target.launch


def _mamba_arguments(target: Target, info: ServerInfo | None) -> MambaArguments:
    if info is not None:
        rounding, dtype = info.enable_mamba_cache_stochastic_rounding, info.mamba_ssm_dtype
        # A release without the field has no rounding either.
        return MambaArguments(source="server-info", rounding=rounding is True, ssm_dtype=dtype)
    flags = _flags(target)
    if flags is None:
        return MambaArguments()
    rounding = flags.get("enable_mamba_cache_stochastic_rounding")
    if rounding is not True:
        return MambaArguments(source="flags", rounding=None if "incomplete" in flags else False)
    dtype = flags.get("mamba_ssm_dtype")
    if dtype is None and "incomplete" in flags:
        return MambaArguments(source="flags")
    return MambaArguments(source="flags", rounding=True, ssm_dtype=dtype)


def _cache_stands(environment: EnvironmentFacts, target: Target, version: str | None) -> bool:
    """Whether the cache folder that was judged is the one that FlashInfer uses in the server."""
    known = variables(target, "HOME", "XDG_CACHE_HOME", _WORKSPACE_VARIABLE)
    if environment.scope is not Scope.SERVER or known is None:
        return False
    # Without a home the import fails wherever the cache is.
    redirected = sglangtexts.redirects_cache(version) and not known.get(_WORKSPACE_VARIABLE)
    return environment.cache.problem == "no-home" or not redirected


async def _library_at(environment: EnvironmentFacts, target: Target, evidence: ImportEvidence | None) -> str | None:
    """Where the shared library lies that the import did not find, if NVIDIA's wheels brought it."""
    if evidence is None or evidence.outcome is not ImportOutcome.FAILED or target.root is not None:
        return None
    error = load_error(f"{evidence.message} {evidence.cause or ''}")
    if error is None or error.fault is not LoadFault.LIBRARY:
        return None
    return await in_daemon_thread(lambda: found_in_wheels(environment.site_dirs, error.name))


def _import_state(evidence: ImportEvidence | None, *, running: bool) -> ImportState:
    if evidence is None:
        return ImportState.PENDING if running else ImportState.NOT_REQUESTED
    return ImportState.NOT_ALLOWED if evidence.outcome is ImportOutcome.NOT_ALLOWED else ImportState.DONE


# -- the verdict ------------------------------------------------------------------------------------------


def judge(result: Result[FlashinferFacts], world: World) -> Iterable[Finding]:
    """One finding per condition; of the causes at most one is true."""
    if result.facts is None:
        return []
    facts = result.facts
    verdict, module = classify(facts), classify_module(facts)
    causes = [
        _disabled(verdict, facts, world) if kind is DISABLED else _finding(kind, verdict, module, facts, world)
        for kind in CAUSES
    ]
    return [*causes, beside.jit_toolchain(facts), beside.cubins(facts), beside.rounding(facts, world)]


def _finding(
    kind: ConditionType, verdict: Classification, module: Classification, facts: FlashinferFacts, world: World
) -> Finding:
    """Judge a condition of the module; ``verdict`` is the cause, which may be that it is disabled."""
    if verdict.code == kind.code:
        return _active(verdict, facts, world, final=verdict.verified)
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
        return _active(verdict, facts, world, final=True)
    off = disabled(facts)
    if off is False:
        # Read from the server's process itself: no further round can make it more certain.
        message = f"{AVAILABLE_VARIABLE} does not say so."
        return Finding(code=DISABLED.code, status=Status.FALSE, message=message, final=True)
    server = world.server
    if server.answer is Answer.ACCEPTED and server.features.get(Feature.FLASHINFER) is True:
        message = "The running server uses FlashInfer, so it was not disabled when it started."
        return Finding(code=DISABLED.code, status=Status.FALSE, message=message)
    if facts.variables is not None:
        return _undecided(DISABLED, "value-unclear")
    return _undecided(DISABLED, "scope-self" if facts.environment.scope is Scope.SELF else "environ-unseen")


def _active(verdict: Classification, facts: FlashinferFacts, world: World, *, final: bool) -> Finding:
    severity = _severity(verdict, facts, world)
    told = disagreement(facts)
    return Finding(
        code=str(verdict.code),
        status=Status.TRUE,
        reason=verdict.reason,
        message=verdict.message,
        remedy=verdict.remedy.text(triton=_triton_helps(verdict, facts, world)) if verdict.remedy else None,
        evidence=verdict.evidence if told is None else (*verdict.evidence, told),
        final=final,
        severity=severity,
        gate=None if severity is None else Gate.NEVER,
        explained_by=_explained_by(verdict),
        sglang_says=_sglang_says(verdict, facts, world),
    )


_OF_THE_DRIVER = re.compile(r"driver (on your system )?(is too old|version is insufficient)|CUDA driver version")


def _explained_by(verdict: Classification) -> tuple[str, ...]:
    """Name the conditions that this failure follows from; others that are active are there beside it."""
    if verdict.code != IMPORT_FAILED.code:
        return ()
    if verdict.reason == "torch-without-cuda":
        return ("cuda-unavailable-to-torch",)
    said = " ".join((verdict.message, *verdict.evidence))
    if _OF_THE_DRIVER.search(said):
        return ("driver-too-old-for-cuda",)
    error = load_error(said)
    return ("libcuda-unusable",) if error is not None and error.name.startswith("libcuda.so") else ()


def _severity(verdict: Classification, facts: FlashinferFacts, world: World) -> Severity | None:
    """Lower what does not stop this server; None leaves the declared severity."""
    if verdict.code != NOT_INSTALLED.code or requires_mamba(world.settings):
        return verdict.severity
    # Releases that import FlashInfer only where it is installed fall back to other backends without it.
    asked = world.server.features.get(Feature.FLASHINFER) is True
    return verdict.severity if asked or sglangtexts.always_imports(facts.sglang) else Severity.INFO


def _triton_helps(verdict: Classification, facts: FlashinferFacts, world: World) -> bool:
    """Whether another mamba backend is a way out: not where SGLang imports FlashInfer all the same."""
    if world.server.features.get(Feature.FLASHINFER_MAMBA) is False:
        return False
    only_mamba = verdict.mamba_only or verdict.code == DISABLED.code
    return only_mamba or sglangtexts.always_imports(facts.sglang) is not True


def _sglang_says(verdict: Classification, facts: FlashinferFacts, world: World) -> str | None:
    """Give what stands in the server's log: SGLang's own sentence, or the exception that it lets through."""
    raised = verdict.raised
    features = world.server.features
    mamba = features.get(Feature.FLASHINFER_MAMBA)
    others = any(features.get(feature) for feature in (Feature.FLASHINFER, Feature.FLASHINFER_IMPORT))
    if raised.translated and (mamba or not others):
        return sglangtexts.unavailable(facts.sglang, rounding=facts.mamba.rounding)
    return raised.text


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
    return module_samples(MODULE, importable=module.importable, verified=module.verified, evidence=facts.evidence)


def report(facts: FlashinferFacts) -> Mapping[str, Any]:
    """Give the report's ``modules``."""
    verdict, alone = classify(facts), classify_module(facts)
    section = module_section(
        importable=alone.importable,
        verified=alone.verified,
        evidence=facts.evidence,
        pending=facts.state is ImportState.PENDING,
        scope=facts.environment.scope,
        version=flashinfer_version(facts),
        code=verdict.code,
        reason=verdict.reason,
        variables=facts.variables,
        variables_missing=facts.variables_missing,
        by_files=read(facts),
        disagreement=disagreement(facts),
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
    families=MODULE_FAMILIES,
    conditions=CONDITIONS,
    report=report,
    sections=MODULE_SECTIONS,
    requirable={Feature.FLASHINFER_MAMBA.value: tuple(kind.code for kind in (*CAUSES, ROUNDING_DTYPE))},
)
