"""The real FlashInfer, release by release, through the real `check`: by files, and by a real import.

What is expected was found by importing each of these by hand.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.agent import run
from tests.fakes.site import Site
from tests.real.conftest import Shelf, assemble, interpreter, row

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

OK: dict[str, str] = {}
NO_MAMBA = {"flashinfer-mamba-missing": "version-too-old"}
CUBIN = {"flashinfer-cubin-mismatch": "version-mismatch"}
DEPENDENCY = {"flashinfer-import-failed": "dependency-missing"}
TABLE = "FlashInfer: verdict by files, by import"


@dataclass(frozen=True, kw_only=True)
class Case:
    """An environment and its verdicts.

    ``packages`` lie beside torch and what FlashInfer needs; ``without`` are patterns of what is taken away.
    ``static`` and ``imported`` are conditions with their reasons; ``module`` is whether SGLang's import works.
    """

    name: str
    flashinfer: str | None
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    static: dict[str, str]
    imported: dict[str, str]
    module: bool
    python: int | None = None


CASES = [
    Case(name="none", flashinfer=None, static={"flashinfer-not-installed": "absent"},
         imported={"flashinfer-not-installed": "absent"}, module=False),
    Case(name="0.2.5", flashinfer="0.2.5", static=NO_MAMBA, imported=NO_MAMBA, module=False),
    Case(name="0.5.3", flashinfer="0.5.3", static=NO_MAMBA, imported=NO_MAMBA, module=False),
    Case(name="0.6.0", flashinfer="0.6.0", static=NO_MAMBA, imported=NO_MAMBA, module=False),
    Case(name="0.6.1", flashinfer="0.6.1", static=OK, imported=OK, module=True),
    Case(name="0.6.4", flashinfer="0.6.4", static=OK, imported=OK, module=True),
    Case(name="0.6.14", flashinfer="0.6.14", static=OK, imported=OK, module=True),
    Case(name="newest", flashinfer="", static=OK, imported=OK, module=True),
    Case(name="0.6.13 with cubin 0.6.12", flashinfer="0.6.13", packages=("flashinfer-cubin==0.6.12",),
         static=CUBIN, imported=CUBIN, module=False),
    Case(name="0.7.2 with cubin 0.6.12", flashinfer="0.7.2", packages=("flashinfer-cubin==0.6.12",),
         static={"flashinfer-cubin-mismatch": "ignored"}, imported={"flashinfer-cubin-mismatch": "ignored"},
         module=True),
    Case(name="0.6.13 without tvm_ffi", flashinfer="0.6.13", without=("tvm_ffi", "apache_tvm_ffi-*"),
         static=DEPENDENCY, imported=DEPENDENCY, module=False),
    Case(name="0.6.13 without torch", flashinfer="0.6.13", without=("torch", "torch-*", "functorch", "torchgen"),
         static=DEPENDENCY, imported=DEPENDENCY, module=False),
    Case(name="0.6.14, Python 3.10", flashinfer="0.6.14", static=OK, imported=OK, module=True, python=10),
    Case(name="0.6.14, Python 3.13", flashinfer="0.6.14", static=OK, imported=OK, module=True, python=13),
]  # fmt: skip


def check(site: Site, *, imports: bool) -> tuple[dict[str, Any], float]:
    """The report of a preflight for FlashInfer mamba in an environment, and the seconds that it took."""
    flags = ("--format", "json", "--server-python", site.python, *(() if imports else ("--no-import",)))
    environ = {"HOME": os.environ.get("HOME", "/")}
    begun = time.monotonic()
    done = run("check", *flags, "--", "--mamba-backend", "flashinfer", env=environ, timeout=900)
    seconds = time.monotonic() - begun
    assert done.stdout, done.stderr
    return json.loads(done.stdout), seconds


def verdict(report: dict[str, Any]) -> dict[str, str]:
    """FlashInfer's conditions that hold, with their reasons, consequences of others included."""
    return {
        one["code"]: one["reason"]
        for one in report["conditions"]
        if one["code"].startswith("flashinfer-") and one["status"] == "true" and one["code"] not in SIDE_ISSUES
    }


SIDE_ISSUES = ("flashinfer-jit-toolchain", "flashinfer-cubins-not-installed")
"""What concerns later builds and downloads, and no import."""


def environment(shelf: Shelf, case: Case, root: Path) -> Site:
    """Put the environment of a case together."""
    python = interpreter(case.python) if case.python else None
    if case.python and not os.environ.get("FULL"):
        pytest.skip("needs a torch of 3 GB for another Python: run `make test-real FULL=1`")
    folders = [shelf.torch(python) if python else shelf.torch()]
    if case.flashinfer == "0.2.5":
        folders.append(shelf.source("flashinfer-python==0.2.5", "flashinfer"))
    elif case.flashinfer is not None:
        version = f"=={case.flashinfer}" if case.flashinfer else ""
        folders.append(shelf.package(f"flashinfer-python{version}"))
    folders += [shelf.package(one) for one in case.packages]
    more = {"python": python} if python else {}
    return assemble(root, *folders, without=case.without, **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_release_of_flashinfer(case: Case, shelf: Shelf, tmp_path: Path) -> None:
    """Each release and each damage has the verdict that importing it gave (sgl-project/sglang#18070, #945)."""
    site = environment(shelf, case, tmp_path / "environment")
    static, quick = check(site, imports=False)
    full, _ = check(site, imports=True)
    module = full["modules"]["flashinfer.mamba"]
    _note(case.name, static, quick, full)
    assert verdict(static) == case.static
    assert (verdict(full), module["importable"], module["verified"]) == (case.imported, case.module, True)
    assert not module["cuda_initialized"]


def test_a_build_of_torch_without_cuda(shelf: Shelf, tmp_path: Path) -> None:
    """FlashInfer 0.6.14 with nvidia-cutlass-dsl asks torch for a GPU: a build without CUDA is the cause."""
    packages = shelf.package("nvidia-cutlass-dsl==4.6.0", dependencies=True), shelf.package("flashinfer-python==0.6.14")
    site = assemble(tmp_path / "environment", shelf.torch(), *packages)
    site.write("sglang/__init__.py")  # without SGLang nothing else would be a cause
    static, quick = check(site, imports=False)
    full, _ = check(site, imports=True)
    module = full["modules"]["flashinfer.mamba"]
    _note("0.6.14 with nvidia-cutlass-dsl", static, quick, full)
    if "+cpu" not in (full["environment"]["torch"]["value"] or ""):
        assert (verdict(full), module["importable"]) == ({}, True), "a build with CUDA finds no driver, and goes on"
        return
    assert verdict(full) == {"flashinfer-import-failed": "torch-without-cuda"}
    assert verdict(static) in ({}, verdict(full)), "files may leave it open, and must not name another cause"
    causes = {one["code"]: one["consequence_of"] for one in full["conditions"] if one["status"] == "true"}
    assert causes["flashinfer-import-failed"] == "cuda-unavailable-to-torch"


def _note(name: str, static: dict[str, Any], quick: float, full: dict[str, Any]) -> None:
    module = full["modules"]["flashinfer.mamba"]
    peak = (module["peak_memory_bytes"] or 0) / 2**20
    row(
        TABLE,
        name,
        _words(static),
        f"{quick:.2f} s",
        _words(full),
        f"{module['seconds'] or 0:.1f} s",
        f"{peak:.0f} MiB",
    )


def _words(report: dict[str, Any]) -> str:
    found = [f"{code} ({reason})" for code, reason in verdict(report).items()]
    return (
        ", ".join(found)
        or {True: "importable", False: "not importable", None: "no fault seen"}[
            report["modules"]["flashinfer.mamba"]["importable"]
        ]
    )
