"""The real FlashInfer with a CPU build of torch, through the real `Environment` and the probe's judge.

Installs several hundred MB; kept in SIDECAR_REAL_CACHE, if that is set, for the next run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.config import Settings
from sidecar.environment import Environment, ImportOutcome
from sidecar.isolation import Isolation
from sidecar.model import Outcome, Placement, Result, Scope, Status, Target, World
from sidecar.probes.flashinfer import PROBE, FlashinferFacts, ImportState
from tests.builders import HOST, view
from tests.fakes.site import RealClock

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

TORCH = "2.13.0"
NEEDED = ("apache-tvm-ffi", "packaging", "requests", "nvidia-ml-py", "tqdm", "numpy", "nvidia-cudnn-frontend")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what was installed stays."""
    given = os.environ.get("SIDECAR_REAL_CACHE")
    folder = Path(given) if given else tmp_path_factory.mktemp("real")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def python(cache: Path) -> str:
    """The interpreter of an environment with torch and all that FlashInfer imports, but without FlashInfer."""
    root = cache / f"torch-{TORCH}-py{sys.version_info[0]}.{sys.version_info[1]}"
    if not (root / "complete").exists():
        venv.create(root, with_pip=False, clear=True)
        pip("--python", str(root / "bin/python"), "install", f"torch=={TORCH}", *NEEDED)
        (root / "complete").touch()
    return str(root / "bin/python")


def release(cache: Path, version: str) -> str:
    """A folder for PYTHONPATH that holds one release of FlashInfer and nothing else."""
    folder = cache / f"flashinfer-{version}"
    if not (folder / "complete").exists():
        pip("install", "--no-deps", "--target", str(folder), f"flashinfer-python=={version}")
        (folder / "complete").touch()
    return str(folder)


@pytest.fixture
async def environment() -> AsyncIterator[Environment]:
    isolation = Isolation()
    one = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER)
    yield one
    await one.close()
    await isolation.close()


async def facts_of(environment: Environment, python: str, path: str | None) -> FlashinferFacts:
    """The probe's facts after a real import, with the server's environment in sight."""
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    environ |= {"PYTHONPATH": path} if path else {}
    target = Target(url="http://127.0.0.1:30000", url_source="test", scope=Scope.SERVER, python=python, environ=environ)
    facts = await environment.read(target)
    environment.request_import(facts, target, lambda: None)
    await environment.wait_import()
    evidence = environment.import_evidence(facts, target)
    assert evidence is not None
    print(  # noqa: T201 - the numbers are what one runs this for
        f"\n{evidence.outcome} {evidence.exception} {evidence.message[:200]} in {evidence.seconds:.1f} s, "
        f"peak {(evidence.max_rss_bytes or 0) / 2**20:.0f} MiB, versions {dict(evidence.versions)}"
    )
    return FlashinferFacts(environment=facts, evidence=evidence, state=ImportState.DONE, variables={})


def causes(facts: FlashinferFacts) -> dict[str, str | None]:
    """Active conditions with their reasons."""
    world = World(standing=HOST, server=view(), now=0.0, settings=Settings())
    result = Result(probe="flashinfer", outcome=Outcome.OK, facts=facts)
    return {item.code: item.reason for item in PROBE.judge(result, world) if item.status is Status.TRUE}


def exported(facts: FlashinferFacts) -> dict[str, float]:
    return {sample.family: sample.value for sample in PROBE.samples(facts)}


async def test_a_release_with_mamba_is_importable(environment: Environment, cache: Path, python: str) -> None:
    """FlashInfer 0.6.4 imports, is verified, and nothing is wrong."""
    facts = await facts_of(environment, python, release(cache, "0.6.4"))
    assert causes(facts) == {}
    assert facts.environment.flashinfer.version == "0.6.4"
    assert facts.environment.torch_without_cuda
    assert (exported(facts)["module_importable"], exported(facts)["module_import_verified"]) == (1, 1)
    assert facts.evidence is not None
    assert facts.evidence.outcome is ImportOutcome.OK
    assert facts.evidence.names == ("selective_state_update",)
    assert facts.evidence.cuda_initialized is False


async def test_a_release_without_mamba_is_told_apart(environment: Environment, cache: Path, python: str) -> None:
    """FlashInfer 0.6.0 has no mamba module, by files and by import (sgl-project/sglang#18070)."""
    facts = await facts_of(environment, python, release(cache, "0.6.0"))
    assert causes(facts) == {"flashinfer-mamba-missing": "version-too-old"}
    assert (exported(facts)["module_importable"], exported(facts)["module_import_verified"]) == (0, 1)


async def test_none_is_told_apart(environment: Environment, python: str) -> None:
    """Without FlashInfer the cause is that (sgl-project/sglang#945)."""
    facts = await facts_of(environment, python, None)
    assert causes(facts) == {"flashinfer-not-installed": "absent"}
    assert (exported(facts)["module_importable"], exported(facts)["module_import_verified"]) == (0, 1)
