"""Which versions are installed in the server's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.environment import EnvironmentFacts
from sidecar.model import Finding, Probe, Result, Sample, Scope, World
from sidecar.services import Services

_SHOWN = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagesFacts:
    """The environment that was read. Nothing is imported for it."""

    environment: EnvironmentFacts

    @property
    def scope(self) -> Scope:
        """Whose environment it is; the report states it beside each item."""
        return self.environment.scope


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSource:
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


async def collect(services: Services) -> PackagesFacts:
    """Read the environment; shares one child with the flashinfer probe."""
    target = await services.targets.find()
    return PackagesFacts(environment=await services.environment.read(target))


def judge(_result: Result[PackagesFacts], _world: World) -> Iterable[Finding]:
    """Find nothing: versions are facts here, and other probes judge what they mean."""
    return ()


def samples(_facts: PackagesFacts) -> Iterable[Sample]:
    """Export nothing: versions are exported from every probe's identity."""
    return ()


def identity(facts: PackagesFacts) -> Mapping[str, str]:
    """Map item to version for what is known; empty for the agent's own environment, which identifies no server."""
    environment = facts.environment
    if environment.scope is Scope.SELF or environment.problem is not None:
        return {}
    versions = environment.distributions
    items = {
        "python": environment.python_version,
        # torch/version.py carries the build's local tag where an installer rewrote the metadata.
        "torch": environment.torch_version or versions.get("torch"),
        "torch_cuda": environment.torch_cuda,
    } | {name: versions.get(name) for name in _SHOWN}
    return {item: value for item, value in items.items() if value is not None}


def report(facts: PackagesFacts) -> Mapping[str, Any]:
    """Give the report's ``environment_source``."""
    environment = facts.environment
    source = EnvironmentSource(
        python=environment.python,
        found_by=environment.python_source,
        scope=environment.scope,
        site_dirs=len(environment.site_dirs),
        distributions=environment.distribution_count,
        problem=environment.problem,
    )
    return {"environment_source": source}


PROBE: Probe[PackagesFacts] = Probe(
    name="packages",
    title="Installed packages",
    interval=60.0,
    deadline=10.0,
    backoff=True,
    collect=collect,
    judge=judge,
    samples=samples,
    families=(),
    conditions=(),
    identity=identity,
    report=report,
    sections={"environment_source": EnvironmentSource},
)
