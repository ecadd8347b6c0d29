"""The packages probe: what is installed, as identity and as a source that people can check."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.environment import EnvironmentFacts
from sidecar.model import Finding, Outcome, Result, Scope, ServerView, Status, Target, World
from sidecar.probes.packages import PROBE, PackagesFacts
from tests.builders import HOST

WORLD = World(standing=HOST, server=ServerView(), now=0.0, settings=None)
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


def binding(**versions: str) -> Finding:
    """The finding for these owners of the module pynvml."""
    distributions = {name.replace("_", "-"): version for name, version in versions.items()}
    facts = PackagesFacts(environment=replace(FULL, distributions=distributions))
    (found,) = PROBE.judge(Result(probe="packages", outcome=Outcome.OK, facts=facts), WORLD)
    return found


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"nvidia_ml_py": "13.580.65"}, Status.FALSE),
        ({"pynvml": "11.4.1"}, Status.FALSE),
        # Case 54 (flashinfer-ai/flashinfer#1693): it only refers to nvidia-ml-py and warns of itself.
        ({"nvidia_ml_py": "13.580.65", "pynvml": "13.0.1"}, Status.FALSE),
        ({"nvidia_ml_py": "12.560.30", "pynvml": "12.0.0"}, Status.FALSE),
        # Case 55 (XuehaiPan/nvitop#44, wookayin/gpustat#105, vllm-project/vllm#7649).
        ({"nvidia_ml_py": "13.580.65", "pynvml": "11.5.3"}, Status.TRUE),
        ({"nvidia_ml_py": "13.580.65", "nvidia_ml_py3": "7.352.0"}, Status.TRUE),
        ({"nvidia_ml_py3": "7.352.0", "pynvml": "8.0.4"}, Status.TRUE),
        ({"nvidia_ml_py": "13.580.65", "pynvml": "not-a-version"}, Status.TRUE),
    ],
)
def test_owners_of_the_nvml_binding(versions: dict[str, str], status: Status) -> None:
    """Two packages with a module pynvml are a conflict; the one that merely refers to the other is not."""
    found = binding(**versions)
    assert found.status is status
    if status is Status.TRUE:
        assert all(version in found.message for version in versions.values())
        assert "/venv/bin/python -m pip" in str(found.remedy)


@pytest.mark.parametrize("change", [{"scope": Scope.SELF}, {"problem": "root-unreadable"}], ids=["self", "unreadable"])
def test_the_binding_of_somebody_else_says_nothing(change: dict[str, Any]) -> None:
    """The sidecar's own packages are never judged in place of the server's."""
    facts = PackagesFacts(environment=replace(FULL, **change))
    (found,) = PROBE.judge(Result(probe="packages", outcome=Outcome.OK, facts=facts), WORLD)
    assert found.status is Status.UNKNOWN
