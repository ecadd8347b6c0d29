"""Broken environments of FlashInfer, and the probe's facts and findings of them, through its own collect and judge."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sidecar.config import ImportPolicy, Settings
from sidecar.environment import EnvironmentFacts
from sidecar.model import Feature, Outcome, Result, Target, World
from sidecar.probes.flashinfer import PROBE, FlashinferFacts
from sidecar.probes.flashinfer.conditions import CAUSES
from sidecar.serverinfo import ServerInfo
from tests.builders import HOST, view
from tests.fakes.site import Site
from tests.fakes.sources import Sources

Build = Callable[[Site], object]
CODES = {kind.code for kind in CAUSES}
"""The conditions of which one at most is active: what keeps SGLang from using the module."""
MAMBA_USED = {Feature.FLASHINFER_MAMBA: True, Feature.FLASHINFER: True, Feature.FLASHINFER_IMPORT: True}
DEFAULT_LAUNCH = {Feature.FLASHINFER_MAMBA: False, Feature.FLASHINFER_IMPORT: True}
"""A server on CUDA without a flag: it imports FlashInfer for its sampler."""


def release(version: str, **options: Any) -> Build:
    """An environment with a FlashInfer of this release and all that it needs."""

    def build(site: Site) -> None:
        site.dependencies()
        site.flashinfer(version, **options)

    return build


def then(first: Build, *steps: Build) -> Build:
    """One thing after another."""

    def build(site: Site) -> None:
        first(site)
        for step in steps:
            step(site)

    return build


def running(code: str) -> Build:
    """An environment in which importing ``flashinfer.mamba`` runs this code."""
    return release("0.6.14", mamba=code)


def writes(name: str, text: str = "") -> Build:
    """A step that writes a file below site-packages."""
    return lambda site: site.write(name, text)


def removes(name: str) -> Build:
    """A step that deletes a file or folder below site-packages."""
    return lambda site: site.remove(name)


def companion(name: str, version: str) -> Build:
    """A step that installs flashinfer-cubin or flashinfer-jit-cache."""
    return lambda site: site.companion(name, version)


def world(**changes: Any) -> World:
    """What the judge knows besides the facts."""
    values: dict[str, Any] = {"standing": HOST, "server": view(), "now": 0.0, "settings": Settings()}
    return World(**{**values, **changes})


def judged(facts: FlashinferFacts, **changes: Any) -> dict[str, Any]:
    """Every finding of the probe by its code."""
    result = Result(probe="flashinfer", outcome=Outcome.OK, facts=facts)
    return {finding.code: finding for finding in PROBE.judge(result, world(**changes))}


async def collected(environment: EnvironmentFacts, target: Target, *, info: ServerInfo | None) -> FlashinferFacts:
    """The probe's facts of an environment that was read already, and of a server that says this of itself."""

    async def find() -> Target:
        return target

    async def answer(_target: Target) -> ServerInfo | None:
        return info

    async def read(_target: Target) -> EnvironmentFacts:
        return environment

    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find),
        server=SimpleNamespace(info=answer),
        environment=SimpleNamespace(read=read),
        imports=SimpleNamespace(evidence=lambda *_what: None, importing=lambda _work: False),
        settings=Settings(import_policy=ImportPolicy.NEVER),
    )
    return await PROBE.collect(services)


async def facts_of(sources: Sources, target: Target, *, imported: bool) -> FlashinferFacts:
    """The probe's facts, through its own collect, with the import or without one."""

    async def find() -> Target:
        return target

    async def info(_target: Target) -> None:
        return None

    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find),
        server=SimpleNamespace(info=info),
        environment=sources.environment,
        imports=sources.imports,
        settings=Settings(import_policy=ImportPolicy.ALWAYS if imported else ImportPolicy.NEVER),
        imported=lambda _name: None,
    )
    facts = await PROBE.collect(services)
    if imported and facts.evidence is None:
        await sources.wait_import()
        facts = await PROBE.collect(services)
    return facts
