"""Which packages are installed in the server's environment, and whether they are what SGLang requires."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from sidecar import sglangtexts
from sidecar.environment import EnvironmentFacts
from sidecar.model import Answer, Feature, Finding, Probe, Result, Sample, Scope, Target, World
from sidecar.modules import start_code
from sidecar.probes.packages import flavour, inventory, pins
from sidecar.probes.packages.declare import CONDITIONS, SATISFIED
from sidecar.probes.packages.facts import SGLANG, Checked, PackagesFacts, blind
from sidecar.services import Services
from sidecar.target import variables

_NAME: Final = "packages"
_SHOWN: Final = (
    "sglang",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "sglang-kernel",
    "sgl-kernel",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "transformers",
)
"""Distributions that are items of the identity under their own name."""
_SKIP_VARIABLE: Final = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"
_ATTENTION_FLAGS: Final = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


class EnvironmentSource(Struct, frozen=True, kw_only=True):
    """Where the package versions come from.

    ``scope``: server (its own files and environment), image (the same image, another container) or self.
    ``found_by`` is the way the interpreter was found. ``problem`` is a token when it could not be read.
    """

    python: str | None
    found_by: str
    scope: Scope
    site_dirs: int
    distributions: int
    problem: str | None


class RequirementEntry(Struct, frozen=True, kw_only=True):
    """One requirement that applies in the server's environment.

    ``required`` is the specifier, with extras; empty for any version. ``satisfied`` is null where it cannot be told.
    ``tracked`` says whether its violation is judged. ``source`` is the distribution that asks for it.
    """

    package: str
    required: str
    installed: str | None
    satisfied: bool | None
    tracked: bool
    source: str


# -- facts ------------------------------------------------------------------------------------------


async def collect(services: Services) -> PackagesFacts:
    """Read the environment; shares one child with the other probes that do."""
    target = await services.targets.find()
    environment = await services.environment.read(target)
    checked, unreadable = _checked(services.memory, environment)
    return PackagesFacts(
        environment=environment,
        checked=checked,
        unreadable_lines=unreadable,
        check_skipped=_skipped(target, environment.distributions.get(SGLANG)),
        attention_backends=tuple(
            value for flag in _ATTENTION_FLAGS if isinstance(value := target.launch.get(flag), str)
        ),
    )


def facts_from(environment: EnvironmentFacts, *, machine: str = "x86_64", **more: Any) -> PackagesFacts:
    """Make the facts of an environment; ``machine`` is the processor as uname names it."""
    checked, unreadable = pins.check(environment, machine)
    return PackagesFacts(environment=environment, checked=checked, unreadable_lines=unreadable, **more)


def _checked(memory: dict[str, object], environment: EnvironmentFacts) -> tuple[tuple[Checked, ...], int]:
    """Evaluate the requirements, once per state of the environment: some hundred lines take milliseconds."""
    last = memory.get(_NAME)
    if isinstance(last, _Evaluated) and last.environment == environment:
        return last.checked, last.unreadable
    checked, unreadable = pins.check(environment, os.uname().machine)
    memory[_NAME] = _Evaluated(environment, checked, unreadable)
    return checked, unreadable


class _Evaluated(Struct, frozen=True):
    environment: EnvironmentFacts
    checked: tuple[Checked, ...]
    unreadable: int


def _skipped(target: Target, release: str | None) -> bool | None:
    """Whether the server's environment keeps SGLang from comparing versions; None where that cannot be told."""
    environ = variables(target, _SKIP_VARIABLE)
    if environ is None:
        return None
    return sglangtexts.is_on(environ.get(_SKIP_VARIABLE, "false"), release)


# -- judgement and what is shown --------------------------------------------------------------------


def judge(result: Result[PackagesFacts], world: World) -> Iterable[Finding]:
    """Judge what the installed versions say by themselves; what they mean for a server is for other probes."""
    facts = result.facts
    if facts is None:
        return ()
    # A server that answers has passed the check; one on another device is not checked.
    launch_passed = world.server.answer is Answer.ACCEPTED or world.server.features.get(Feature.GPU) is False
    return (
        pins.judge(facts, launch_passed=launch_passed),
        flavour.judge(facts),
        inventory.judge(facts),
        inventory.judge_binding(facts),
    )


def samples(facts: PackagesFacts) -> Iterable[Sample]:
    """Export whether each tracked package is as SGLang requires it; versions are exported from the identity."""
    verdicts: dict[str, list[bool | None]] = {}
    for one in facts.checked:
        if one.source == SGLANG and one.tracked:
            verdicts.setdefault(one.package, []).append(one.satisfied)
    for package, several in verdicts.items():
        if False in several:
            yield Sample(SATISFIED.name, (package,), 0)
        elif None not in several:
            yield Sample(SATISFIED.name, (package,), 1)


def identity(facts: PackagesFacts) -> Mapping[str, str | None]:
    """Map item to version, None for what is not installed.

    Empty for the agent's own environment, which identifies no server.
    """
    environment = facts.environment
    if blind(environment) is not None:
        return {}
    versions = environment.distributions
    items = {
        "python": environment.python_version,
        # torch/version.py carries the build's local tag where an installer rewrote the metadata.
        "torch": environment.torch_version or versions.get("torch"),
        "torch_cuda": environment.torch_cuda,
    } | {name: pins.imported_version(environment, name) for name in _SHOWN}
    # Nothing is proven where the module is there without a version (a copied folder), or code that runs at start
    # can make any module importable.
    absent = {
        name
        for name in _SHOWN
        if items[name] is None and not start_code(environment) and not pins.is_importable(environment, name)
    }
    return {item: value for item, value in items.items() if value is not None or item in absent}


def builds(facts: PackagesFacts) -> Mapping[str, str]:
    """Map item to a mark of the files that its distribution registers, which tells builds of one version apart."""
    return {} if blind(facts.environment) is not None else facts.environment.builds


def report(facts: PackagesFacts) -> Mapping[str, Any]:
    """Give the report's ``environment_source`` and ``requirements``."""
    environment = facts.environment
    source = EnvironmentSource(
        python=environment.python,
        found_by=environment.python_source,
        scope=environment.scope,
        site_dirs=len(environment.site_dirs),
        distributions=environment.distribution_count,
        problem=environment.problem,
    )
    requirements = tuple(
        RequirementEntry(
            package=one.package,
            required=one.required,
            installed=one.installed or one.instead,
            satisfied=one.satisfied,
            tracked=one.tracked,
            source=one.source,
        )
        for one in facts.checked
    )
    return {"environment_source": source, "requirements": requirements}


PROBE: Probe[PackagesFacts] = Probe(
    name=_NAME,
    title="Installed packages",
    interval=60.0,
    deadline=10.0,
    backoff=True,
    collect=collect,
    judge=judge,
    samples=samples,
    families=(SATISFIED,),
    conditions=CONDITIONS,
    identity=identity,
    builds=builds,
    report=report,
    sections={"environment_source": EnvironmentSource, "requirements": tuple[RequirementEntry, ...]},
)
