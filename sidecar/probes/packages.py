"""Which versions are installed in the server's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from sidecar.environment import EnvironmentFacts
from sidecar.model import ConditionType, Finding, Gate, Probe, Result, Sample, Scope, Severity, Status, World
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


BINDING_CONFLICT = ConditionType(
    code="nvml-binding-conflict",
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    title="Several packages own the module pynvml",
    when="More than one of nvidia-ml-py, nvidia-ml-py3 and pynvml before 12 is installed: each brings a module pynvml, "
    "one shadows the other, and removing one removes the other's files. From 12 on pynvml only refers to "
    "nvidia-ml-py and is harmless.",
    remedy="Uninstall pynvml and nvidia-ml-py3, then `pip install --force-reinstall nvidia-ml-py`.",
    reasons={
        "several-owners": "the named packages bring the same module",
        "scope-self": "only the sidecar's own packages can be seen",
        "unreadable": "the server's packages could not be read",
    },
)


def judge(result: Result[PackagesFacts], _world: World) -> Iterable[Finding]:
    """Judge what the installed versions say by themselves; what they mean for a server is for other probes."""
    facts = result.facts
    return () if facts is None else (_binding(facts.environment),)


def _binding(environment: EnvironmentFacts) -> Finding:
    code = BINDING_CONFLICT.code
    if environment.scope is Scope.SELF or environment.problem is not None:
        reason = "scope-self" if environment.scope is Scope.SELF else "unreadable"
        return Finding(code=code, status=Status.UNKNOWN, reason=reason)
    versions = environment.distributions
    owners = {name: versions[name] for name in ("nvidia-ml-py", "nvidia-ml-py3", "pynvml") if name in versions}
    if _redirects(owners.get("pynvml")):
        del owners["pynvml"]
    if len(owners) < 2:
        return Finding(code=code, status=Status.FALSE)
    named = ", ".join(f"{name} {version}" for name, version in owners.items())
    pip = f"{environment.python or 'python'} -m pip"
    doomed = " ".join(name for name in owners if name != "nvidia-ml-py")
    return Finding(
        code=code,
        status=Status.TRUE,
        reason="several-owners",
        message=f"The module pynvml belongs to several packages: {named}; which one is imported is a matter of luck.",
        remedy=f"{pip} uninstall -y {doomed} && {pip} install --force-reinstall nvidia-ml-py",
    )


def _redirects(version: str | None) -> bool:
    """Whether this pynvml brings no module of its own. A version that is none is taken for an old one."""
    try:
        return version is not None and Version(version).major >= 12
    except InvalidVersion:
        return False


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
    conditions=(BINDING_CONFLICT,),
    identity=identity,
    report=report,
    sections={"environment_source": EnvironmentSource},
)
