"""Which FlashAttention implementation each phase of inference uses, and whether it can work here.

SGLang exports no version; it follows from the backend's name. Evidence comes in this order: what the running server
resolved, its flags, what its schedulers have mapped, what is installed. For a launch that is only considered, what
the release chooses by itself on these GPUs is a prediction, and marked so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from sidecar.backends import BackendSource, PhaseBackend, phases, predict, release, uses_version
from sidecar.config import ImportPolicy, Settings
from sidecar.cudalibs import Capability, version
from sidecar.environment import EnvironmentFacts
from sidecar.gpuset import Gpu, capabilities, server_gpus
from sidecar.model import (
    Answer,
    ConditionType,
    Feature,
    Finding,
    Gate,
    Phase,
    Probe,
    Result,
    Sample,
    Severity,
    Skip,
    Status,
    Target,
    World,
)
from sidecar.modules import MODULE_SECTIONS, module_samples, module_section
from sidecar.probes.attention.conditions import (
    BACKEND,
    BACKEND_UNSUPPORTED,
    CONDITIONS,
    FA3_NOT_IMPORTABLE,
    FA3_UNSUPPORTED,
    FA4_NOT_IMPORTABLE,
    FA4_UNSUPPORTED,
    FAMILIES,
    VERSION,
)
from sidecar.probes.attention.facts import OVERRIDE_VARIABLE, AttentionFacts, ImportState
from sidecar.probes.attention.hardware import Fit, backend_fit, fa3_fit, fa4_fit
from sidecar.probes.attention.relations import answers, disagreement, nobody, proven
from sidecar.probes.attention.releases import PIP_VARIABLE, READY_SINCE
from sidecar.probes.attention.software import classify, driver_library, installed_2, provider, unread
from sidecar.probes.attention.versions import ineffective, invalid
from sidecar.processes import Role, ServerProcesses
from sidecar.serverinfo import ServerInfo
from sidecar.services import Services, driver_reading
from sidecar.target import PREFLIGHT, variables

__all__ = ["PROBE", "AttentionFacts", "collect", "judge", "report", "samples", "uses"]

NAME: Final = "attention"
_VERSIONS: Final = (3, 4)
_VALUE_LIMIT: Final = 16
"""Characters of a value that is shown: a version is one."""


# -- facts ------------------------------------------------------------------------------------------------


async def collect(services: Services) -> AttentionFacts:
    """Read backends, processes and files, and start an import where it would tell something new.

    Raises ProbeTimeout and ProbeCrash as the reading of the environment does.
    """
    target = await services.targets.find()
    environment, reading, info, processes = await asyncio.gather(
        _environment(services, target),
        driver_reading(services),
        services.server.info(target),
        services.processes.read(target),
    )
    gpus = None if reading is None else server_gpus(services.settings, target, reading, services.standing, info)
    facts = _seen(target, environment, info, processes, MappingProxyType(capabilities(reading, gpus)))
    facts = replace(
        facts,
        gpus_known=gpus is not None and gpus.known,
        ran=_has_run(services, target, facts),
        ready_seen=_readiness(services, facts) is not None,
    )
    imports = {
        number: _import(services, target, facts, number)
        for number in _VERSIONS
        if environment is not None and unread(environment) is None
    }
    return replace(facts, imports=MappingProxyType(imports))


def _seen(
    target: Target,
    environment: EnvironmentFacts | None,
    info: ServerInfo | None,
    processes: ServerProcesses | None,
    found: Mapping[Gpu, Capability],
) -> AttentionFacts:
    launch = None if target.launch_source is None else target.launch
    environ = target.environ or {}
    prediction = None
    if target.launch_source == PREFLIGHT and environment is not None:
        # Never for a running server, which says itself what it chose.
        installed = environment.sglang_release
        prediction = predict(installed, set(found.values()), version(environment.torch_cuda), target.launch)
    return AttentionFacts(
        phases=phases(info, launch, prediction),
        environment=environment,
        server_version=None if info is None else info.version,
        info_seen=info is not None,
        launch=launch,
        preflight=target.launch_source == PREFLIGHT,
        declared=_declared(info, launch),
        override=_shown(environ.get(OVERRIDE_VARIABLE)),
        environ_seen=variables(target, OVERRIDE_VARIABLE, PIP_VARIABLE) is not None,
        environ_missing=target.environ_missing,
        from_pip=environ.get(PIP_VARIABLE) == "1",
        gpus=found,
        mapped=_mapped(processes),
        prediction_why=None if prediction is None else prediction.why,
    )


async def _environment(services: Services, target: Target) -> EnvironmentFacts | None:
    try:
        return await services.environment.read(target)
    except Skip:
        return None


def _declared(info: ServerInfo | None, launch: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Where a ``fa_impl_ver`` is written down, with its value."""
    values = {
        "server-info": getattr(info, "fa_impl_ver", None),
        "flags": (launch or {}).get("fa_impl_ver"),
    }
    found = {where: _shown(str(value)) for where, value in values.items() if value is not None}
    return MappingProxyType({where: value for where, value in found.items() if value})


def _shown(value: str | None) -> str | None:
    """A value that may be shown: short, and printable."""
    return None if value is None else "".join(char for char in value.strip()[:_VALUE_LIMIT] if char.isprintable())


def _mapped(processes: ServerProcesses | None) -> tuple[frozenset[str] | None, ...] | None:
    """What each scheduler has mapped. What other processes map proves nothing."""
    if processes is None:
        return None
    return tuple(one.mapped for one in processes.of(Role.SCHEDULER)) or None


def _has_run(services: Services, target: Target, facts: AttentionFacts) -> bool:
    """Whether an attention call of this server is known to have been made; remembered for the server's life."""
    observation = services.server.observation
    process = f"{target.pid}:{target.create_time}:{target.url}"
    refused = observation is not None and observation.answer is Answer.REFUSED
    before = services.memory.get(NAME) == process and not refused
    ready = _readiness(services, facts) is True
    ran = not facts.preflight and (before or ready or facts.loaded(4) is True)
    services.memory[NAME] = process if ran else None
    return ran


def _readiness(services: Services, facts: AttentionFacts) -> bool | None:
    """Whether the server says that its warm-up has run; None where it does not say, as before 0.5.20."""
    observation, found = services.server.observation, release(facts.server_version)
    return observation.ready if observation is not None and found is not None and found >= READY_SINCE else None


def _import(services: Services, target: Target, facts: AttentionFacts, number: int) -> ImportState:
    """Take what earlier imports of a version's module showed, and start one where somebody counts on it."""
    source, environment, imports = provider(facts, number), facts.environment, services.imports
    # Without the driver's library these imports fail however good the environment is.
    if source is None or environment is None or not driver_library(environment):
        return ImportState()
    if _wanted(services.settings, facts, number) and imports.due(source.work, environment, target):
        imports.request(source.work, environment, target, lambda: services.imported(NAME))
    return ImportState(
        evidence=imports.evidence(source.work, environment, target), pending=imports.importing(source.work)
    )


def _wanted(settings: Settings, facts: AttentionFacts, number: int) -> bool:
    """Whether to import a version's module: where it is used or required, else only if explicitly told to, always.

    A ``check`` imports always by itself; versions that nothing uses would double the time that it takes.
    """
    if settings.import_policy is ImportPolicy.NEVER:
        return False
    if settings.import_policy is ImportPolicy.ALWAYS and "import" in settings.explicit:
        return True
    name = f"fa{number}"
    required = not {name, *PROBE.requirable[name]}.isdisjoint(settings.require)
    return required or bool(facts.phases_of(number))


def uses(facts: AttentionFacts) -> Mapping[Feature, bool]:
    """Tell of the versions that a launch would use without saying so, by prediction."""
    if not facts.preflight or facts.prediction_why is None:
        return {}
    found = {Feature.FA3: uses_version(facts.phases, 3), Feature.FA4: uses_version(facts.phases, 4)}
    return {feature: True for feature, used in found.items() if used}


# -- judgement --------------------------------------------------------------------------------------------


def judge(result: Result[AttentionFacts], world: World) -> Iterable[Finding]:
    """Judge each condition from the probe's own facts and what is known of the server."""
    facts = result.facts
    if facts is None:
        return ()
    return (
        invalid(facts, world),
        ineffective(facts, world),
        _importable(FA3_NOT_IMPORTABLE, 3, facts, world),
        _on_gpus(FA3_UNSUPPORTED, facts, world, _fits_of(facts, world, 3)),
        _on_gpus(FA4_UNSUPPORTED, facts, world, _fits_of(facts, world, 4)),
        _gated(_importable(FA4_NOT_IMPORTABLE, 4, facts, world), facts),
        _backends(facts, world),
        disagreement(facts, world),
    )


def _importable(kind: ConditionType, number: int, facts: AttentionFacts, world: World) -> Finding:
    verdict = classify(facts, number)
    source = provider(facts, number)
    finding = Finding(
        code=kind.code,
        status=Status.TRUE if verdict.importable is False else Status.FALSE,
        reason=verdict.reason,
        message=verdict.message,
        remedy=verdict.remedy,
        evidence=verdict.evidence,
        final=verdict.verified,
        explained_by=verdict.explained_by,
        sglang_says=source.says if source is not None and verdict.importable is False else None,
    )
    if verdict.importable is False:
        # What is only predicted kills a launch just as well, but the prediction may be wrong.
        return _lowered(finding) if facts.only_predicted(number) else finding
    if verdict.importable and verdict.verified and verdict.reason is None:
        return finding
    proof = proven(facts, world, number)
    if proof is not None:
        return replace(finding, status=Status.FALSE, reason=None, message=proof)
    message = verdict.message
    if number == 4 and answers(facts, world) and facts.phases_of(4):
        message = f"{message or kind.reasons[str(verdict.reason)]} The server answers, which proves nothing before "
        message += "its first attention call."
    unknown = replace(finding, status=Status.UNKNOWN, message=message)
    return replace(unknown, severity=Severity.WARNING) if facts.only_predicted(number) else unknown


def _lowered(finding: Finding) -> Finding:
    return replace(finding, severity=Severity.WARNING, gate=Gate.NEVER)


def _gated(finding: Finding, facts: AttentionFacts) -> Finding:
    """Let a failed real import gate a server that answers, until attention is known to have run in it.

    Only an import that ran as in the server, and only where it would show that attention has run: else a server that
    serves well would be held back for good.
    """
    shows = facts.loaded(4) is not None or facts.ready_seen
    failed = finding.status is Status.TRUE and finding.final and classify(facts, 4).faithful
    if failed and shows and finding.gate is None and not facts.ran:
        return replace(finding, gate=Gate.SERVING)
    return finding


Fits = Mapping[Gpu, tuple[Phase, PhaseBackend, Fit]]
"""For each GPU, the worst that a phase meets on it."""


def _fits_of(facts: AttentionFacts, world: World, number: int) -> Fits:
    """How the GPUs fit a FlashAttention version in the phases that run it; in any, where none does."""
    running = facts.phases_of(number) or {Phase.PREFILL: PhaseBackend(state=facts.phases[Phase.PREFILL].state)}
    passed = answers(facts, world)

    def fit(gpu: Capability, phase: Phase) -> Fit:
        if number == 3:
            return fa3_fit(gpu, phase, facts.cuda, answers=passed)
        return fa4_fit(gpu, facts.running_release)

    return {
        gpu: _worst((phase, one, fit(capability, phase)) for phase, one in running.items())
        for gpu, capability in facts.gpus.items()
    }


def _worst(fits: Iterable[tuple[Phase, PhaseBackend, Fit]]) -> tuple[Phase, PhaseBackend, Fit]:
    order = {False: 0, None: 1, True: 2}
    return min(fits, key=lambda one: order[one[2].runs])


def _backends(facts: AttentionFacts, world: World) -> Finding:
    """Judge the backends without FlashAttention that SGLang refuses on some GPUs."""
    code = BACKEND_UNSUPPORTED.code
    device = (facts.launch or {}).get("device")
    if isinstance(device, str) and not device.startswith("cuda"):
        return Finding(code=code, status=Status.FALSE, message=f"The flags ask for {device}.")
    named = {phase: one for phase, one in facts.phases.items() if one.backend is not None}
    if not named:
        if nobody(world) and facts.launch is None:
            return Finding(code=code, status=Status.FALSE, message="No server is running, and no launch is judged.")
        if facts.launch is not None or facts.info_seen:
            return Finding(code=code, status=Status.FALSE, message="No backend is named: SGLang chooses by the GPU.")
        # Nothing is known to be asked of the GPUs: that this is open must not change a verdict.
        return Finding(code=code, status=Status.UNKNOWN, reason="backends-unseen", severity=Severity.INFO)

    def fit(gpu: Capability, phase: Phase, one: PhaseBackend) -> Fit:
        return backend_fit(str(one.backend), phase, gpu, facts.running_release, facts.cuda)

    ruled = any(
        fit(gpu, phase, one).runs is not True for phase, one in named.items() for gpu in ((7, 0), (9, 0), (12, 0))
    )
    if not ruled:
        return Finding(code=code, status=Status.FALSE, message="The backends in use have no such limits.")
    fits = {
        gpu: _worst((phase, one, fit(capability, phase, one)) for phase, one in named.items())
        for gpu, capability in facts.gpus.items()
    }
    return _on_gpus(BACKEND_UNSUPPORTED, facts, world, fits)


_INSTEAD: Final = {
    "fa3-unsupported-gpu": (("fa4", (10, 10)), ("flashinfer", (11, 12)), ("triton", (0, 7))),
    "fa4-unsupported-gpu": (("fa3", (8, 9)), ("flashinfer", (11, 12)), ("triton", (0, 7))),
    "attention-backend-unsupported-gpu": (("fa3", (9, 9)), ("flashinfer", (8, 12)), ("triton", (0, 7))),
}
"""What to choose instead, by the major of the GPU's compute capability; the first that fits counts."""
_INSTEAD_VISION: Final = (("fa4", (10, 10)), ("fa3", (8, 9)), ("triton_attn", (0, 99)))
"""The same for the vision tower, which has backends of its own."""


_OLDEST_OF_KERNELS: Final = (8, 0)
"""The oldest compute capability for which released kernel wheels have code."""


def _on_gpus(kind: ConditionType, facts: AttentionFacts, world: World, fits: Fits) -> Finding:
    """Judge by the GPUs: all of the server's where they are known, else with less weight where only some refuse."""
    evidence = tuple(
        f"GPU {index}: compute capability {major}.{minor}" for (index, _), (major, minor) in facts.gpus.items()
    )
    if facts.cuda is not None:
        evidence += (f"torch is built for CUDA {'.'.join(map(str, facts.cuda))}",)
    if not fits:
        if answers(facts, world):
            return Finding(code=kind.code, status=Status.FALSE, message="The running server has passed this check.")
        return Finding(code=kind.code, status=Status.UNKNOWN, reason="gpus-unknown")
    bad = tuple(gpu for gpu, (_, _, fit) in fits.items() if fit.runs is False)
    if not bad:
        open_ = next((fit for _, _, fit in fits.values() if fit.runs is None), None)
        if open_ is None:
            return Finding(code=kind.code, status=Status.FALSE, evidence=evidence)
        return Finding(code=kind.code, status=Status.UNKNOWN, reason=open_.reason, evidence=evidence)
    phase, one, fit = fits[bad[0]]
    capability = facts.gpus[bad[0]]
    name = one.backend or kind.code.partition("-")[0]
    where = f" for {phase}" if one.backend is not None else ""
    shown = ", ".join(gpu[0] for gpu in bad)
    finding = Finding(
        code=kind.code,
        status=Status.TRUE,
        reason=fit.reason,
        message=f"The backend {name}{where} does not run on GPU {shown} of compute capability "
        f"{capability[0]}.{capability[1]}: {kind.reasons[str(fit.reason)].rstrip('.')}.",
        remedy=_instead(kind, facts, phase, capability),
        evidence=evidence,
        gpus=bad,
        sglang_says=fit.says,
        # Where the kernel wheel itself has no code for them, no other backend helps.
        explained_by=kind.depends_on if all(facts.gpus[gpu] < _OLDEST_OF_KERNELS for gpu in bad) else (),
    )
    if one.backend is not None and all(
        each.source is BackendSource.PREDICTION for _, each, _ in (fits[gpu] for gpu in bad)
    ):
        return _lowered(finding)
    if facts.gpus_known or len(bad) == len(fits):
        return finding
    # Some of the node's GPUs can run it, and which of them are the server's is not known.
    return _lowered(finding)


def _instead(kind: ConditionType, facts: AttentionFacts, phase: Phase, capability: Capability) -> str | None:
    """What to choose instead, by the flag that decides about this phase."""
    refused = facts.phases[phase].backend if phase in facts.phases else None
    for backend, (first, last) in _INSTEAD_VISION if phase is Phase.VISION else _INSTEAD[kind.code]:
        if first <= capability[0] <= last and backend != refused:
            flag = _flag_of(facts, phase)
            return f"Choose {flag} {backend} for compute capability {capability[0]}.{capability[1]}."
    return None


def _flag_of(facts: AttentionFacts, phase: Phase) -> str:
    """The flag that chooses a phase's backend: its own where the phases differ, since it counts more."""
    if phase is Phase.VISION:
        return "--mm-attention-backend"
    other = Phase.PREFILL if phase is Phase.DECODE else Phase.DECODE
    mine, theirs = (None if one not in facts.phases else facts.phases[one].backend for one in (phase, other))
    if theirs is None or mine == theirs:
        return "--attention-backend"
    return "--speculative-draft-attention-backend" if phase is Phase.DRAFT else f"--{phase}-attention-backend"


# -- what is shown ----------------------------------------------------------------------------------------


class PhaseSection(Struct, frozen=True, kw_only=True):
    """One phase of attention in the report.

    ``declared`` is the backend that the flags ask for, ``resolved`` the one that the running server settled on; for
    a launch that is only considered ``predicted`` may be what this release chooses by itself. ``version`` is 3 or 4,
    0 for a backend without FlashAttention, null for unknown; ``state`` tells the nulls apart, ``source`` says where
    the backend was read. ``loaded`` is that version where the server's schedulers have its library mapped, 0 where
    they have not (version 4 is mapped by its first call), null where that cannot be seen. ``installed`` is that
    version where the environment has all that it needs, 0 where not, null for unknown. ``needs`` names the modules
    that it needs, ``missing`` those that are not there.
    """

    declared: str | None
    resolved: str | None
    predicted: str | None
    loaded: int | None
    installed: int | None
    version: int | None
    state: str
    source: str | None
    needs: tuple[str, ...]
    missing: tuple[str, ...]


class ImplementationSection(Struct, frozen=True, kw_only=True):
    """A FlashAttention version in the server's environment, whether it is used or not.

    ``installed`` and ``importable`` are null while unknown. ``module`` is where SGLang takes it from (null: this
    release has none, or its release is not known). Version 2 is no choice of SGLang's.
    """

    installed: bool | None
    importable: bool | None
    module: str | None
    distribution: str | None
    distribution_version: str | None
    missing: tuple[str, ...]


def samples(facts: AttentionFacts) -> Iterable[Sample]:
    """One version per phase that has a known one, one backend per phase that names one, and the modules in use."""
    for phase, backend in facts.phases.items():
        if backend.version is not None:
            yield Sample(VERSION.name, (phase.value,), backend.version)
    for phase, backend in facts.phases.items():
        if backend.backend is not None and backend.source is not None:
            yield Sample(BACKEND.name, (phase.value, backend.backend, backend.source.value), 1)
    for number, source, verdict, state in _modules(facts):
        if facts.phases_of(number) or state.evidence is not None:
            yield from module_samples(
                source, importable=verdict.importable, verified=verdict.verified, evidence=state.evidence
            )


def _modules(facts: AttentionFacts) -> Iterable[tuple[int, str, Any, ImportState]]:
    """The modules of the versions that this environment's release knows, each with its verdict."""
    for number in _VERSIONS:
        source = provider(facts, number)
        if source is not None and unread(facts.environment) is None:
            yield number, source.module, classify(facts, number), facts.imports.get(number, ImportState())


def report(facts: AttentionFacts) -> Mapping[str, Mapping[str, Any]]:
    """Give the report's ``attention``, one section per phase, ``flash_attention`` and its share of ``modules``."""
    environment = facts.environment
    codes = {3: FA3_NOT_IMPORTABLE.code, 4: FA4_NOT_IMPORTABLE.code}
    modules = {
        module: module_section(
            importable=verdict.importable,
            verified=verdict.verified,
            evidence=state.evidence,
            pending=state.pending,
            scope=environment.scope,
            version=environment.distributions.get(_distribution(facts, number) or ""),
            code=codes[number] if verdict.importable is False else None,
            reason=verdict.reason,
        )
        for number, module, verdict, state in _modules(facts)
        if environment is not None
    }
    return {
        "attention": {phase.value: _phase(facts, one) for phase, one in facts.phases.items()},
        "flash_attention": _implementations(facts),
        "modules": modules,
    }


def _distribution(facts: AttentionFacts, number: int) -> str | None:
    """The distribution that brings a version, by the name under which it is installed."""
    source, environment = provider(facts, number), facts.environment
    if source is None:
        return None
    names = ("sglang-kernel", "sgl-kernel") if number == 3 else (source.distribution,)
    installed = () if environment is None else environment.distributions
    return next((name for name in names if name in installed), source.distribution)


def _phase(facts: AttentionFacts, one: PhaseBackend) -> PhaseSection:
    number = one.version if one.version in _VERSIONS else None
    verdict = None if number is None else classify(facts, number)
    source = None if number is None else provider(facts, number)
    offered = None if verdict is None else verdict.installed
    return PhaseSection(
        declared=one.declared,
        resolved=one.resolved,
        predicted=one.backend if one.source is BackendSource.PREDICTION else None,
        loaded=_loaded(facts, one.version),
        installed=None if offered is None else number if offered else 0,
        version=one.version,
        state=one.state.value,
        source=None if one.source is None else one.source.value,
        needs=() if source is None else (source.module, *source.needs),
        missing=() if verdict is None else verdict.missing,
    )


def _loaded(facts: AttentionFacts, number: int | None) -> int | None:
    if number is None:
        return None
    if number == 0:
        # Older releases load version 3 whatever runs, so that what is mapped says nothing of this phase.
        return 0 if facts.loaded(3) is False and facts.loaded(4) is False else None
    seen = facts.loaded(number)
    return None if seen is None else number if seen else 0


def _implementations(facts: AttentionFacts) -> Mapping[str, ImplementationSection]:
    environment = facts.environment
    if environment is None or unread(environment) is not None:
        return {}
    found = {
        "2": ImplementationSection(
            installed=installed_2(environment),
            importable=None,
            module="flash_attn",
            distribution="flash-attn",
            distribution_version=environment.distributions.get("flash-attn"),
            missing=(),
        )
    }
    for number in _VERSIONS:
        source, verdict = provider(facts, number), classify(facts, number)
        name = _distribution(facts, number)
        found[str(number)] = ImplementationSection(
            installed=None if source is None else verdict.installed,
            importable=verdict.importable if verdict.verified else None,
            module=None if source is None else source.module,
            distribution=name,
            distribution_version=environment.distributions.get(name or ""),
            missing=verdict.missing,
        )
    return found


PROBE: Probe[AttentionFacts] = Probe(
    name=NAME,
    title="Which FlashAttention implementation is active in each phase",
    interval=60,
    deadline=10,
    backoff=True,
    collect=collect,
    judge=judge,
    samples=samples,
    families=FAMILIES,
    conditions=CONDITIONS,
    report=report,
    sections={
        "attention": dict[str, PhaseSection],
        "flash_attention": dict[str, ImplementationSection],
        **MODULE_SECTIONS,
    },
    uses=uses,
    requirable={
        "fa3": (FA3_NOT_IMPORTABLE.code, FA3_UNSUPPORTED.code),
        "fa4": (FA4_NOT_IMPORTABLE.code, FA4_UNSUPPORTED.code),
    },
)
