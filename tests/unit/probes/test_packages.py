"""The packages probe: what is installed, as identity and as a source that people can check."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.environment import EnvironmentFacts
from sidecar.model import Scope, Target
from sidecar.probes.packages import PROBE, PackagesFacts

FULL = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/venv/bin/python",
    python_source="process",
    python_version="3.12.3",
    site_dirs=("/a", "/b"),
    distribution_count=131,
    distributions={
        "sglang": "0.5.16",
        "torch": "2.11.0",
        "flashinfer-python": "0.6.14",
        "sglang-kernel": "0.4.5",
        "pynvml": "12.0.0",
    },
    torch_present=True,
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
)


def test_identity_holds_what_is_known() -> None:
    """Each known item is there under its name, nothing else is; torch keeps its local tag."""
    assert PROBE.identity(PackagesFacts(environment=FULL)) == {
        "python": "3.12.3",
        "sglang": "0.5.16",
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "flashinfer-python": "0.6.14",
        "sglang-kernel": "0.4.5",
    }


@pytest.mark.parametrize("change", [{"scope": Scope.SELF}, {"problem": "root-unreadable"}], ids=["self", "unreadable"])
def test_no_identity_of_somebody_else(change: dict[str, Any]) -> None:
    """The sidecar's own packages, or none that could be read, identify no server."""
    assert PROBE.identity(PackagesFacts(environment=replace(FULL, **change))) == {}


def test_report_says_where_it_looked() -> None:
    """The report names the interpreter, how it was found, and how much was read (sgl-project/sglang#30612)."""
    source = PROBE.report(PackagesFacts(environment=FULL))["environment_source"]
    assert (source.python, source.found_by, source.scope) == ("/venv/bin/python", "process", "server")
    assert (source.site_dirs, source.distributions) == (2, 131)


async def test_collect_reads_the_found_target() -> None:
    """The probe reads the environment of the target that was found."""
    target = Target(url="http://h", url_source="t", scope=Scope.SERVER, python="/venv/bin/python")

    async def find() -> Target:
        return target

    async def read(asked: Target) -> EnvironmentFacts:
        assert asked is target
        return FULL

    services: Any = SimpleNamespace(targets=SimpleNamespace(find=find), environment=SimpleNamespace(read=read))
    assert (await PROBE.collect(services)).environment is FULL
