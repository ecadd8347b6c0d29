"""A whole SGLang environment: what reading it costs; what installers do to it is noticed, named and repaired."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from sidecar.environment import EnvironmentFacts
from sidecar.isolation import Isolation
from sidecar.model import Scope, Target
from tests.fakes.site import RealClock, Site
from tests.fakes.sources import Sources
from tests.real.conftest import find_uv, pip, row, run
from tests.real.test_flashinfer import check, verdict

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

TABLE = "A whole environment of SGLang"
CHANGES = "What installers did to it"


async def read(python: str) -> tuple[EnvironmentFacts, float]:
    """The environment, read by a child of its own, and the seconds that it took with the child's start."""
    isolation = Isolation()
    sources = Sources(isolation, RealClock())
    target = Target(url="http://127.0.0.1:30000", url_source="test", scope=Scope.SERVER, python=python, environ={})
    begun = time.monotonic()
    try:
        return await sources.read(target), time.monotonic() - begun
    finally:
        await sources.close()
        await isolation.close()


async def test_reading_it(full: Path) -> None:
    """Every distribution is listed, SGLang's requirements are met, nothing is damaged, doubled or left over."""
    facts, first = await read(str(full))
    _, again = await read(str(full))
    row(TABLE, "distributions", len(facts.distributions))
    row(TABLE, "requirements of SGLang", len(facts.requires))
    row(TABLE, "read, with the child's start", f"{first:.2f} s, again {again:.2f} s")
    assert len(facts.distributions) > 150
    assert facts.distributions["sglang"] == "0.5.16"
    assert len(facts.requires) > 100
    assert (dict(facts.duplicates), dict(facts.damaged), facts.leftovers, facts.unregistered) == ({}, {}, (), ())


def test_its_import(full: Path) -> None:
    """The real import of FlashInfer mamba works in it; without a GPU that is all there is to say of FlashInfer."""
    site = Site.__new__(Site)
    site.python = str(full)
    static, quick = check(site, imports=False)
    report, seconds = check(site, imports=True)
    module = report["modules"]["flashinfer.mamba"]
    row(TABLE, "check without an import", f"{quick:.2f} s")
    row(TABLE, "check with the import", f"{seconds:.1f} s")
    row(TABLE, "the import itself", f"{module['seconds']:.1f} s, {module['peak_memory_bytes'] / 2**20:.0f} MiB")
    assert verdict(static) == verdict(report) == {}
    assert (module["importable"], module["verified"]) == (True, True)
    wrong = [one["package"] for one in report["requirements"] if one["satisfied"] is False]
    assert wrong == []


FAULTS = [
    (("install", "--no-deps", "flashinfer-cubin==0.6.13"), "flashinfer-cubin-mismatch", "version-mismatch"),
    (("install", "--no-deps", "flashinfer-python==0.6.0"), "flashinfer-mamba-missing", "version-too-old"),
    (("uninstall", "--yes", "flashinfer-python"), "flashinfer-not-installed", "absent"),
]


async def test_what_installers_do(second: Site) -> None:
    """A companion that does not match, a downgrade and a removal are noticed and named; what is advised repairs each.

    NVIDIA-NeMo/Export-Deploy#679, sgl-project/sglang#18070, sgl-project/sglang#945
    """
    before, _ = await read(second.python)
    assert verdict(check(second, imports=False)[0]) == {}
    for arguments, code, reason in FAULTS:
        pip("--python", second.python, *arguments)
        facts, seconds = await read(second.python)
        report, _ = check(second, imports=False)
        assert (verdict(report), facts.fingerprint == before.fingerprint) == ({code: reason}, False)
        cause = next(one for one in report["conditions"] if one["code"] == code)
        requirement = next(one for one in report["requirements"] if one["package"] == "flashinfer-python")
        assert requirement["satisfied"] is ("flashinfer-cubin==0.6.13" in arguments)

        follow(cause["remedy"])
        before, _ = await read(second.python)
        row(
            CHANGES,
            " ".join(arguments),
            f"read in {seconds:.2f} s",
            f"{code} ({reason})",
            "repaired by",
            cause["remedy"],
        )
        assert facts.fingerprint != before.fingerprint
        assert verdict(check(second, imports=False)[0]) == {}


def follow(remedy: str) -> None:
    """Do what a remedy says, word for word."""
    words = shlex.split(remedy, comments=True)
    if words[0] == "uv":
        words[0] = find_uv() or pytest.skip("the remedy is a command of uv, which is not installed")
    run(*words)
