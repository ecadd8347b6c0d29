"""The flashinfer probe: one broken environment, one cause, by files and by a real import alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.catalog import COMMON_REASONS
from sidecar.config import ImportPolicy, Settings
from sidecar.environment import (
    Companion,
    Environment,
    EnvironmentFacts,
    FlashInferFiles,
    ImportEvidence,
    ImportOutcome,
    MambaFiles,
)
from sidecar.isolation import Isolation
from sidecar.model import Answer, Feature, Gate, Outcome, Placement, Result, Scope, Severity, Status, Target, World
from sidecar.probes import flashinfer
from sidecar.probes.flashinfer import PROBE, FlashinferFacts, ImportState, classify
from tests.builders import HOST, view
from tests.fakes.site import RealClock, Site

OK = (None, None)
Build = Callable[[Site], object]


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
async def environment(isolation: Isolation) -> AsyncIterator[Environment]:
    one = Environment(isolation, RealClock(), Settings(), placement=Placement.CONTAINER)
    yield one
    await one.close()


class Case:
    """A broken environment: how it is made, and the cause by files and by import."""

    def __init__(
        self,
        name: str,
        build: Build,
        by_files: tuple[str | None, str | None],
        by_import: tuple[str | None, str | None] | None = None,
        *,
        environ: dict[str, str] | None = None,
        importable: bool = False,
    ) -> None:
        self.name = name
        self.build = build
        self.by_files = by_files
        self.by_import = by_files if by_import is None else by_import
        self.environ = environ or {}
        self.importable = importable


def release(version: str, **options: Any) -> Build:
    def build(site: Site) -> None:
        site.dependencies()
        site.flashinfer(version, **options)

    return build


def then(first: Build, *steps: Callable[[Site], object]) -> Build:
    def build(site: Site) -> None:
        first(site)
        for step in steps:
            step(site)

    return build


def crash(code: str) -> Build:
    return release("0.6.14", mamba=code)


def cpu_torch(site: Site) -> None:
    site.dependencies(cuda=None)
    site.flashinfer("0.6.14", mamba='raise AssertionError("Torch not compiled with CUDA enabled")')


def fails(code: str) -> str:
    """The code of a condition without its common prefix."""
    return f"flashinfer-{code}"


MAMBA = "flashinfer/mamba"
CASES = [
    Case("works", release("0.6.14"), OK, importable=True),
    # sgl-project/sglang#945
    Case("not installed", lambda site: site.dependencies(), (fails("not-installed"), "absent")),
    # sgl-project/sglang#945: what pip leaves behind still satisfies find_spec
    Case(
        "leftover data folder",
        lambda site: site.write("flashinfer/data/x"),
        (fails("not-installed"), "leftover-folder"),
    ),
    Case("leftover mamba folder", lambda site: site.write(f"{MAMBA}/x"), (fails("not-installed"), "leftover-folder")),
    # flashinfer-ai/flashinfer#794: the distribution is found by any spelling of its name
    Case(
        "registered, files gone",
        lambda site: site.dist("FlashInfer_Python", "0.6.14"),
        (fails("not-installed"), "files-missing"),
    ),
    # sgl-project/sglang#18070
    Case("release without mamba", release("0.6.0"), (fails("mamba-missing"), "version-too-old")),
    Case(
        "mamba folder removed",
        then(release("0.6.13"), lambda site: site.remove(MAMBA)),
        (fails("mamba-missing"), "partial-install"),
    ),
    # vllm-project/vllm#36162: importable, yet without the function
    Case(
        "mamba/__init__ removed",
        then(release("0.6.13"), lambda site: site.remove(f"{MAMBA}/__init__.py")),
        (fails("symbol-missing"), "empty-package"),
    ),
    Case(
        "mamba/__init__ empty",
        then(release("0.6.13"), lambda site: site.write(f"{MAMBA}/__init__.py")),
        (fails("symbol-missing"), "empty-package"),
    ),
    Case(
        "symbol gone",
        then(release("0.6.13"), lambda site: site.write(f"{MAMBA}/__init__.py", "other = 1\n")),
        (fails("symbol-missing"), "absent"),
    ),
    Case(
        "symbol no function",
        then(release("0.6.13"), lambda site: site.write(f"{MAMBA}/__init__.py", "selective_state_update = 3\n")),
        OK,
        (fails("symbol-missing"), "not-callable"),
    ),
    Case(
        "symbol's file removed",
        then(release("0.6.13"), lambda site: site.remove(f"{MAMBA}/selective_state_update.py")),
        (fails("import-failed"), "partial-install"),
    ),
    # NVIDIA-NeMo/Export-Deploy#679
    Case(
        "cubin of another release",
        then(release("0.6.10"), lambda site: site.companion("flashinfer-cubin", "0.6.8.post1")),
        (fails("cubin-mismatch"), "version-mismatch"),
    ),
    # flashinfer-ai/flashinfer#4781
    Case(
        "stale cubin after an upgrade",
        then(release("0.6.14"), lambda site: site.companion("flashinfer-cubin", "0.6.13")),
        (fails("cubin-mismatch"), "version-mismatch"),
    ),
    Case(
        "cubin leftover folder",
        then(release("0.6.13"), lambda site: site.write("flashinfer_cubin/cubins/x")),
        (fails("cubin-mismatch"), "leftover-folder"),
    ),
    Case(
        "cubin ignored from 0.7.2 on",
        then(release("0.7.2"), lambda site: site.companion("flashinfer-cubin", "0.6.13")),
        (fails("cubin-mismatch"), "ignored"),
        importable=True,
    ),
    # NVIDIA/Megatron-LM#4700
    Case(
        "check bypassed, even by 0",
        then(release("0.6.14"), lambda site: site.companion("flashinfer-cubin", "0.6.13")),
        (fails("cubin-mismatch"), "check-bypassed"),
        environ={"FLASHINFER_DISABLE_VERSION_CHECK": "0"},
        importable=True,
    ),
    # lightseekorg/tokenspeed#284
    Case(
        "jit-cache of another release",
        then(release("0.6.11"), lambda site: site.companion("flashinfer-jit-cache", "0.6.9+cu130")),
        (fails("jit-cache-mismatch"), "version-mismatch"),
    ),
    Case(
        "jit-cache leftover folder",
        then(release("0.6.13"), lambda site: site.write("flashinfer_jit_cache/x")),
        (fails("jit-cache-mismatch"), "leftover-folder"),
    ),
    Case(
        "jit-cache with a local tag",
        then(release("0.6.13"), lambda site: site.companion("flashinfer-jit-cache", "0.6.13+cu130")),
        OK,
        importable=True,
    ),
    Case(
        "0.6.1 takes 0.6.12 for its own",
        then(release("0.6.1"), lambda site: site.companion("flashinfer-jit-cache", "0.6.12+cu129")),
        OK,
        importable=True,
    ),
    Case(
        "0.7.1 does not take 0.7.12 for its own",
        then(release("0.7.1"), lambda site: site.companion("flashinfer-jit-cache", "0.7.12+cu130")),
        (fails("jit-cache-mismatch"), "version-mismatch"),
    ),
    Case(
        "no build metadata, nothing compared",
        then(
            release("0.6.13"),
            lambda site: site.remove("flashinfer/_build_meta.py"),
            lambda site: site.companion("flashinfer-cubin", "0.6.8"),
        ),
        OK,
        importable=True,
    ),
    Case("a file shadows the package", lambda site: site.write("flashinfer.py"), (fails("import-failed"), "shadowed")),
    # Dao-AILab/flash-attention#2205: modules go missing one after another; name them at once
    Case(
        "dependencies missing",
        then(lambda site: site.dependencies("tvm_ffi", "tqdm"), lambda site: site.flashinfer()),
        (fails("import-failed"), "dependency-missing"),
    ),
    Case(
        "mamba/__init__ cut off",
        then(release("0.6.13"), lambda site: site.write(f"{MAMBA}/__init__.py", "from .selective_state import (\n")),
        (fails("import-failed"), "corrupt-file"),
    ),
    Case(
        "an unrelated file cut off",
        then(release("0.6.13"), lambda site: site.write("flashinfer/jit/__init__.py", "def f(:\n")),
        OK,
        (fails("import-failed"), "corrupt-file"),
    ),
    Case("torch without CUDA", cpu_torch, OK, (fails("import-failed"), "torch-without-cuda")),
    # sgl-project/sglang#5094
    Case(
        "shared library missing",
        crash('raise ImportError("libnvrtc.so.12: cannot open shared object file: No such file or directory")'),
        OK,
        (fails("import-failed"), "shared-library-missing"),
    ),
    # sgl-project/sglang#5100
    Case(
        "undefined symbol",
        crash('raise ImportError("x.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEa")'),
        OK,
        (fails("import-failed"), "abi-mismatch"),
    ),
    Case(
        "cache not writable",
        crash('raise PermissionError(13, "Permission denied", "/x")'),
        OK,
        (fails("import-failed"), "permission"),
    ),
    Case("any exception", crash('raise ValueError("garbage")'), OK, (fails("import-failed"), "exception")),
    Case("sys.exit", crash("import sys; sys.exit(3)"), OK, (fails("import-crashed"), "exit")),
    Case("os._exit", crash("import os; os._exit(0)"), OK, (fails("import-crashed"), "exit")),
    Case("abort", crash("import os; os.abort()"), OK, (fails("import-crashed"), "signal")),
    # sgl-project/sglang#6160
    Case(
        "disabled by environment",
        release("0.6.14"),
        (fails("disabled-by-env"), "variable-set"),
        environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "False"},
        importable=True,
    ),
]


def world(**changes: Any) -> World:
    values: dict[str, Any] = {"standing": HOST, "server": view(), "now": 0.0, "settings": Settings()}
    return World(**{**values, **changes})


def judged(facts: FlashinferFacts, **changes: Any) -> dict[str, Any]:
    result = Result(probe="flashinfer", outcome=Outcome.OK, facts=facts)
    return {finding.code: finding for finding in PROBE.judge(result, world(**changes))}


def active(facts: FlashinferFacts) -> tuple[str | None, str | None]:
    found = [(code, finding.reason) for code, finding in judged(facts).items() if finding.status is Status.TRUE]
    assert len(found) <= 1
    return found[0] if found else OK


def exported(facts: FlashinferFacts) -> dict[str, float]:
    return {sample.family: sample.value for sample in PROBE.samples(facts)}


async def facts_of(environment: Environment, target: Target, *, imported: bool) -> FlashinferFacts:
    """The probe's facts, through its own collect."""

    async def find() -> Target:
        return target

    async def info(_target: Target) -> None:
        return None

    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find),
        server=SimpleNamespace(info=info),
        environment=environment,
        settings=Settings(import_policy=ImportPolicy.ALWAYS if imported else ImportPolicy.NEVER),
        wake=lambda _name: None,
    )
    facts = await PROBE.collect(services)
    if imported and facts.evidence is None:
        await environment.wait_import()
        facts = await PROBE.collect(services)
    return facts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_one_cause(case: Case, tmp_path: Path, environment: Environment) -> None:
    """Each broken environment has the one cause that its files show, and the one that a real import shows."""
    site = Site(tmp_path / "venv")
    case.build(site)
    base = site.target()
    target = replace(base, environ={**(base.environ or {}), **case.environ})
    by_files = await facts_of(environment, target, imported=False)
    assert active(by_files) == case.by_files
    by_import = await facts_of(environment, target, imported=True)
    assert active(by_import) == case.by_import
    assert exported(by_import)["module_importable"] == float(case.importable)
    assert exported(by_import)["module_import_verified"] == 1
    for facts in (by_files, by_import):
        for finding in judged(facts).values():
            kind = next(kind for kind in PROBE.conditions if kind.code == finding.code)
            assert finding.status is Status.FALSE or finding.reason in kind.reasons
            assert finding.status is not Status.TRUE or (finding.message and finding.remedy)


async def test_static_success_is_labelled(tmp_path: Path, environment: Environment) -> None:
    """Files without fault make the module importable but not verified, and leave import-only faults unknown."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    facts = await facts_of(environment, site.target(), imported=False)
    assert exported(facts) == {"module_importable": 1, "module_import_verified": 0}
    findings = judged(facts)
    assert findings["flashinfer-not-installed"].status is Status.FALSE
    assert findings["flashinfer-import-failed"].status is Status.UNKNOWN
    assert findings["flashinfer-import-failed"].reason == "not-imported"


async def test_verified_success_is_final(tmp_path: Path, environment: Environment) -> None:
    """After a real import that worked every condition is false at once, without hold."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    facts = await facts_of(environment, site.target(), imported=True)
    assert {finding.status for finding in judged(facts).values()} == {Status.FALSE}
    assert all(finding.final for finding in judged(facts).values())
    assert exported(facts)["module_import_duration_seconds"] >= 0
    section = PROBE.report(facts)["modules"]["flashinfer.mamba"]
    assert (section.importable, section.verified, section.evidence) == (True, True, "ok")
    assert section.names == ("selective_state_update",)


async def test_remedy_installs_what_sglang_pins(tmp_path: Path, environment: Environment) -> None:
    """The suggested install takes its version from SGLang's own requirements in that environment."""
    site = Site(tmp_path / "venv")
    site.dependencies()
    site.dist("sglang", "0.5.16", ("flashinfer_python[cu13]==0.6.14", "torch==2.11.0", 'x; extra == "y"'))
    facts = await facts_of(environment, site.target(), imported=False)
    remedy = judged(facts)["flashinfer-not-installed"].remedy
    assert f"{site.python} -m pip install 'flashinfer-python[cu13]==0.6.14'" in remedy
    assert "--mamba-backend triton" in remedy


async def test_remedy_for_a_cubin_that_does_not_exist(tmp_path: Path, environment: Environment) -> None:
    """No flashinfer-cubin above 0.6.13 is suggested: PyPI has none (flashinfer-ai/flashinfer#4869)."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    site.companion("flashinfer-cubin", "0.6.13")
    finding = judged(await facts_of(environment, site.target(), imported=False))["flashinfer-cubin-mismatch"]
    assert f"{site.python} -m pip uninstall -y flashinfer-cubin" in finding.remedy
    assert "flashinfer-cubin==" not in finding.remedy
    assert "0.6.13" in finding.message
    assert "0.6.14" in finding.message


async def test_missing_dependencies_are_named_at_once(tmp_path: Path, environment: Environment) -> None:
    """All missing modules are named together, by their distributions in the remedy."""
    site = Site(tmp_path / "venv")
    site.dependencies("tvm_ffi", "tqdm")
    site.flashinfer()
    finding = judged(await facts_of(environment, site.target(), imported=True))["flashinfer-import-failed"]
    assert "tvm_ffi and tqdm" in finding.message
    assert "install apache-tvm-ffi tqdm" in finding.remedy


async def test_ignored_mismatch_is_a_warning(tmp_path: Path, environment: Environment) -> None:
    """A mismatch that does not stop the import is a warning that never gates."""
    site = Site(tmp_path / "venv")
    release("0.7.2")(site)
    site.companion("flashinfer-cubin", "0.6.13")
    finding = judged(await facts_of(environment, site.target(), imported=True))["flashinfer-cubin-mismatch"]
    assert (finding.severity, finding.gate) == (Severity.WARNING, Gate.NEVER)


# -- scopes and outcomes that need no child -------------------------------------------------------------

GOOD = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/venv/bin/python",
    fingerprint="f",
    flashinfer=FlashInferFiles(kind="package", version="0.6.14", mamba=MambaFiles(state="present", symbol="bound")),
)


def failed(exception: str, message: str, **changes: Any) -> ImportEvidence:
    values: dict[str, Any] = {"outcome": ImportOutcome.FAILED, "at": 0.0, "step": "import", "seconds": 1.0}
    return ImportEvidence(**{**values, "exception": exception, "message": message, **changes})


def with_evidence(evidence: ImportEvidence, scope: Scope = Scope.SERVER, **changes: Any) -> FlashinferFacts:
    values: dict[str, Any] = {"variables": {} if scope is Scope.SERVER else None, "state": ImportState.DONE}
    return FlashinferFacts(environment=replace(GOOD, scope=scope), evidence=evidence, **{**values, **changes})


def crash_of(signal: str | None = "SIGSEGV", exit_code: int = 5) -> ImportEvidence:
    return ImportEvidence(
        outcome=ImportOutcome.CRASHED, at=0.0, signal=signal, exit_code=None if signal else exit_code, stage="import x"
    )


OURS = [
    failed("PermissionError", "[Errno 13] Permission denied: '/root/.cache'", errno=13, os_error=True),
    failed("RuntimeError", "Could not determine home directory."),
    failed("OSError", "[Errno 30] Read-only file system: '/x'", errno=30, os_error=True),
    failed("RuntimeError", "cannot create the cache: Read-only file system"),
    failed("RuntimeError", "x failed", cause="PermissionError: [Errno 13] Permission denied: '/x'"),
    failed("ImportError", "libcuda.so.1: cannot open shared object file: No such file or directory"),
    failed("RuntimeError", "anything that a variable of the server might change"),
    failed("ValueError", "not enough values to unpack (expected 2, got 1)"),
]


@pytest.mark.parametrize("evidence", OURS, ids=lambda evidence: evidence.message[:40])
def test_what_this_container_can_explain_is_unknown(evidence: ImportEvidence) -> None:
    """In scope image a failure that the sidecar's own container can cause is no fault of the server."""
    facts = with_evidence(evidence, Scope.IMAGE)
    finding = judged(facts)["flashinfer-import-failed"]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "probe-environment")
    assert "module_importable" not in exported(facts)


@pytest.mark.parametrize("evidence", OURS, ids=lambda evidence: evidence.message[:40])
def test_the_same_failure_counts_in_the_servers_own_place(evidence: ImportEvidence) -> None:
    """In scope server, as the server's user, the same failure is active."""
    assert active(with_evidence(evidence))[0] == "flashinfer-import-failed"


@pytest.mark.parametrize("signal", ["SIGSYS", "SIGSEGV", "SIGABRT", None])
def test_a_crash_here_is_no_crash_there(signal: str | None) -> None:
    """A crash in scope image, where a sandbox or a library of this container can cause it, is unknown."""
    facts = with_evidence(crash_of(signal), Scope.IMAGE)
    findings = judged(facts)
    assert {finding.status for finding in findings.values()} == {Status.UNKNOWN, Status.FALSE}
    assert findings["flashinfer-import-crashed"].reason == "probe-environment"
    assert "import x" in findings["flashinfer-import-crashed"].message
    assert "module_importable" not in exported(facts)
    assert active(with_evidence(crash_of(signal)))[0] == "flashinfer-import-crashed"


def test_sys_exit_here_is_no_exit_there() -> None:
    """A call of sys.exit in scope image, where a variable can cause it, is unknown."""
    evidence = failed("SystemExit", "3", exited=True)
    assert judged(with_evidence(evidence, Scope.IMAGE))["flashinfer-import-crashed"].reason == "probe-environment"
    assert active(with_evidence(evidence)) == ("flashinfer-import-crashed", "exit")


@pytest.mark.parametrize(
    "evidence",
    [
        failed("SyntaxError", "invalid syntax (core.py, line 1)"),
        failed("ImportError", "cannot import name 'x' from 'flashinfer.jit'", sglang_catches=True),
        # sgl-project/sglang#5100
        failed("ImportError", "x.so: undefined symbol: _ZN3c104cuda9SetDeviceEa", sglang_catches=True),
        failed("AttributeError", "module 'torch' has no attribute 'x'", sglang_catches=True),
        failed("RuntimeError", "flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.14)."),
        failed("ModuleNotFoundError", "No module named 'flashinfer.jit.x'", missing="flashinfer.jit.x"),
    ],
    ids=lambda evidence: evidence.message[:40],
)
def test_what_the_files_explain_counts_in_scope_image(evidence: ImportEvidence) -> None:
    """Files and versions are the image's own: a failure that they explain is the server's in scope image too."""
    assert active(with_evidence(evidence, Scope.IMAGE)) == active(with_evidence(evidence)) != OK


def test_a_success_in_scope_image_counts() -> None:
    """A successful import in scope image is verified and rules everything out but what only a variable decides."""
    facts = with_evidence(ImportEvidence(outcome=ImportOutcome.OK, at=0.0, seconds=1.0), Scope.IMAGE)
    assert exported(facts)["module_import_verified"] == 1
    left = {code: finding.reason for code, finding in judged(facts).items() if finding.status is not Status.FALSE}
    assert left == {"flashinfer-disabled-by-env": "environ-unseen"}


def test_unseen_variables_make_scope_server_no_proof() -> None:
    """In scope server, too, an import without the server's variables proves no failure."""
    facts = with_evidence(crash_of(), variables=None)
    assert active(facts) == OK
    assert judged(facts)["flashinfer-import-crashed"].reason == "probe-environment"


NOT_FOUND: list[tuple[str, Build, str]] = [
    ("not installed", lambda site: site.dependencies(), "flashinfer-not-installed"),
    ("leftover folder", lambda site: site.write("flashinfer/data/x"), "flashinfer-not-installed"),
    (
        "dependency missing",
        then(lambda site: site.dependencies("tvm_ffi"), lambda site: site.flashinfer()),
        "flashinfer-import-failed",
    ),
    ("shadowed", lambda site: site.write("flashinfer.py"), "flashinfer-import-failed"),
]


@pytest.mark.parametrize("imported", [False, True], ids=["by files", "by import"])
@pytest.mark.parametrize("case", NOT_FOUND, ids=lambda case: case[0])
async def test_what_was_not_found_counts_where_it_was_looked_for_in_the_right_place(
    case: tuple[str, Build, str], imported: bool, tmp_path: Path, environment: Environment
) -> None:
    """An absence counts with the server's variables in sight or in a named interpreter, not in one merely found."""
    _, build, code = case
    site = Site(tmp_path / "venv")
    build(site)
    target = site.target(scope=Scope.IMAGE, environ=None, python_source="well-known-path")
    found = await facts_of(environment, target, imported=imported)
    assert active(found) == OK
    assert judged(found)[code].reason == "probe-environment"
    assert "server_python" in judged(found)[code].message
    if not found.environment.flashinfer.version:
        # Companions would be where the package is.
        assert said(found)["cubin-mismatch"] == "probe-environment"
    assert "module_importable" not in exported(found)
    named = replace(found, environment=replace(found.environment, python_source="setting"))
    seen = replace(found, variables={})
    for facts in (named, seen):
        assert active(facts)[0] == code
        assert exported(facts)["module_import_verified"] == float(imported)


def test_a_fault_of_the_files_outlives_an_import_that_says_nothing() -> None:
    """A mismatch that the files show stays the cause when this container stopped the import before it."""
    stale = replace(GOOD.flashinfer, cubin=Companion(kind="package", version="0.6.13"))
    environment = replace(GOOD, scope=Scope.IMAGE, flashinfer=stale)
    facts = replace(with_evidence(crash_of("SIGSYS"), Scope.IMAGE), environment=environment)
    assert active(facts) == ("flashinfer-cubin-mismatch", "version-mismatch")
    assert exported(facts) == {"module_importable": 0, "module_import_verified": 0}


# -- what was not judged ------------------------------------------------------------------------------------


def said(facts: FlashinferFacts) -> dict[str, str]:
    """Status of each condition by its code without the prefix; of an unknown one, the reason."""
    return {
        code.removeprefix("flashinfer-"): str(finding.reason if finding.status is Status.UNKNOWN else finding.status)
        for code, finding in judged(facts).items()
    }


OFF = {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}


async def test_disabled_says_nothing_of_the_module(tmp_path: Path, environment: Environment) -> None:
    """With FlashInfer disabled the rest is judged by the module alone, and its own fault is a second, unknown one."""
    site = Site(tmp_path / "venv")
    site.dependencies()
    target = site.target(environ={**(site.target().environ or {}), **OFF})
    assert said(await facts_of(environment, target, imported=False)) == {
        "not-installed": "other-cause",
        "disabled-by-env": "true",
        "mamba-missing": "other-cause",
        "cubin-mismatch": "false",
        "jit-cache-mismatch": "false",
        "import-failed": "other-cause",
        "import-crashed": "other-cause",
        "symbol-missing": "other-cause",
        "import-timeout": "other-cause",
    }


def test_disabled_leaves_what_only_an_import_tells_unknown() -> None:
    """With FlashInfer disabled and its files in order, what needs an import is unknown, and nothing else is final."""
    facts = FlashinferFacts(environment=GOOD, variables=OFF)
    assert said(facts) == {
        "not-installed": "false",
        "disabled-by-env": "true",
        "mamba-missing": "false",
        "cubin-mismatch": "false",
        "jit-cache-mismatch": "false",
        "import-failed": "not-imported",
        "import-crashed": "not-imported",
        "symbol-missing": "false",
        "import-timeout": "not-imported",
    }
    assert {code for code, finding in judged(facts).items() if finding.final} == {"flashinfer-disabled-by-env"}


async def test_an_old_release_hides_whether_its_companion_would_do(tmp_path: Path, environment: Environment) -> None:
    """A release without mamba and with a companion of another version leaves the companion unknown."""
    site = Site(tmp_path / "venv")
    release("0.6.0")(site)
    site.companion("flashinfer-cubin", "0.5.3")
    assert said(await facts_of(environment, site.target(), imported=False)) == {
        "not-installed": "false",
        "disabled-by-env": "false",
        "mamba-missing": "true",
        "cubin-mismatch": "other-cause",
        "jit-cache-mismatch": "false",
        "import-failed": "other-cause",
        "import-crashed": "other-cause",
        "symbol-missing": "other-cause",
        "import-timeout": "other-cause",
    }


async def test_an_import_that_raised_rules_out_no_more_than_it_got_to(tmp_path: Path, environment: Environment) -> None:
    """A real import that raised did not crash and did not hang; what lies behind the exception stays unknown."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    site.companion("flashinfer-cubin", "0.6.13")
    site.companion("flashinfer-jit-cache", "0.6.13")
    assert said(await facts_of(environment, site.target(), imported=True)) == {
        "not-installed": "false",
        "disabled-by-env": "false",
        "mamba-missing": "false",
        "cubin-mismatch": "true",
        "jit-cache-mismatch": "other-cause",
        "import-failed": "other-cause",
        "import-crashed": "false",
        "symbol-missing": "false",
        "import-timeout": "false",
    }


async def test_a_second_ignored_companion_is_not_fine(tmp_path: Path, environment: Environment) -> None:
    """Of two companions that this FlashInfer ignores one is active and the other unknown, import or not."""
    site = Site(tmp_path / "venv")
    release("0.7.2")(site)
    site.companion("flashinfer-cubin", "0.6.13")
    site.companion("flashinfer-jit-cache", "0.6.13")
    for imported in (False, True):
        facts = await facts_of(environment, site.target(), imported=imported)
        assert active(facts) == ("flashinfer-cubin-mismatch", "ignored")
        assert said(facts)["jit-cache-mismatch"] != "false"
    assert said(facts)["jit-cache-mismatch"] == "other-cause"


def test_a_mismatch_that_only_a_variable_can_hide_is_not_fine() -> None:
    """An import that works in spite of a mismatch, with variables unseen, leaves the mismatch unknown."""
    stale = replace(GOOD.flashinfer, cubin=Companion(kind="package", version="0.6.13"))
    facts = with_evidence(ImportEvidence(outcome=ImportOutcome.OK, at=0.0), Scope.IMAGE)
    facts = replace(facts, environment=replace(facts.environment, flashinfer=stale))
    assert said(facts)["cubin-mismatch"] == "environ-unseen"
    seen = replace(facts, variables={}, environment=replace(facts.environment, scope=Scope.SERVER))
    assert said(seen)["cubin-mismatch"] == "false"


def test_a_name_that_reading_cannot_see_is_unknown() -> None:
    """Where the files do not tell what flashinfer.mamba binds, symbol-missing is unknown until imported."""
    files = replace(GOOD.flashinfer, mamba=MambaFiles(state="present", symbol="unknown"))
    facts = FlashinferFacts(environment=replace(GOOD, flashinfer=files), variables={})
    assert said(facts)["symbol-missing"] == "not-imported"
    assert said(facts)["mamba-missing"] == "false"


def test_a_success_clears_the_name_whatever_else_is_active() -> None:
    """An import that found the function clears symbol-missing, also beside a companion that is ignored."""
    companion = Companion(kind="package", version="0.6.13")
    files = replace(
        GOOD.flashinfer, version="0.7.2", cubin=companion, mamba=MambaFiles(state="present", symbol="unknown")
    )
    evidence = ImportEvidence(outcome=ImportOutcome.OK, at=0.0, step="symbol")
    facts = replace(with_evidence(evidence), environment=replace(GOOD, flashinfer=files))
    assert said(facts)["cubin-mismatch"] == "true"
    assert {status for code, status in said(facts).items() if code != "cubin-mismatch"} == {"false"}


def test_a_version_that_cannot_be_read_is_unknown() -> None:
    """A companion whose version cannot be read is unknown until imported, not fine."""
    files = replace(GOOD.flashinfer, cubin=Companion(kind="package"))
    facts = FlashinferFacts(environment=replace(GOOD, flashinfer=files), variables={})
    assert said(facts)["cubin-mismatch"] == "version-unknown"
    assert said(facts)["jit-cache-mismatch"] == "false"


def test_an_exception_while_the_name_is_looked_up_is_no_missing_name() -> None:
    """A module that raises when asked for its name does not lack it."""
    evidence = failed("RuntimeError", "cannot build the kernel", step="symbol")
    assert active(with_evidence(evidence)) == ("flashinfer-import-failed", "exception")


def test_disabled_is_known_where_the_files_are_not() -> None:
    """The server's variable disables FlashInfer even where its files cannot be read."""
    unread = EnvironmentFacts(scope=Scope.SERVER, problem="root-unreadable")
    facts = FlashinferFacts(environment=unread, variables=OFF)
    assert active(facts) == ("flashinfer-disabled-by-env", "variable-set")
    assert said(facts)["not-installed"] == "root-unreadable"


@pytest.mark.parametrize("value", ["yes", "2", "enabled"])
def test_values_that_releases_read_differently_are_unknown(value: str) -> None:
    """A value that one SGLang takes for true and another for false neither disables nor clears."""
    facts = FlashinferFacts(environment=GOOD, variables={"SGLANG_IS_FLASHINFER_AVAILABLE": value})
    assert said(facts)["disabled-by-env"] == "value-unclear"
    assert said(facts)["not-installed"] == "false"


def test_without_facts_nothing_is_said() -> None:
    """The probe leaves the reason to the judge when it has no facts."""
    assert list(PROBE.judge(Result(probe="flashinfer", outcome=Outcome.CRASHED), world())) == []


VERSIONS = st.sampled_from([None, "0.0.0+unknown", "0.6.0", "0.6.1", "0.6.12", "0.6.14", "0.6.20", "0.7.1", "0.7.2"])
COMPANIONS = st.builds(
    Companion,
    kind=st.sampled_from(["absent", "package", "module", "namespace"]),
    version=st.sampled_from([None, "0.6.12", "0.6.14", "0.6.14+cu130", "0.7.2"]),
)
FILES = st.builds(
    FlashInferFiles,
    kind=st.sampled_from(["absent", "package", "module", "namespace"]),
    version=VERSIONS,
    mamba=st.builds(
        MambaFiles,
        state=st.sampled_from(["absent", "present", "no-init", "empty-init", "invalid-init"]),
        symbol=st.sampled_from(["bound", "missing", "source-missing", "unknown"]),
    ),
    cubin=COMPANIONS,
    jit_cache=COMPANIONS,
    missing=st.sampled_from([(), ("tvm_ffi",)]),
)
ENVIRONMENTS = st.builds(
    EnvironmentFacts,
    scope=st.sampled_from([Scope.SERVER, Scope.IMAGE, Scope.SERVER, Scope.IMAGE, Scope.SELF]),
    python_source=st.sampled_from(["setting", "path"]),
    problem=st.sampled_from([None, None, None, "kernel-too-old", "root-unreadable"]),
    editable=st.sampled_from([(), ("flashinfer-python",)]),
    flashinfer=FILES,
)
EXCEPTIONS = [
    *OURS,
    failed("SystemExit", "3", exited=True),
    failed("RuntimeError", "No CUDA GPUs are available"),
    failed("AssertionError", "Torch not compiled with CUDA enabled"),
    failed("RuntimeError", "flashinfer-cubin version (0.6.12) does not match flashinfer version"),
    failed("AttributeError", "module 'flashinfer_jit_cache' has no attribute '__version__'"),
    failed("ImportError", "cannot import name 'mamba' from partially initialized module 'flashinfer'"),
    failed("ImportError", "cannot import name 'selective_state_update'", step="symbol"),
    ImportEvidence(outcome=ImportOutcome.FAILED, at=0.0, step="symbol", symbol="module"),
    *(
        failed("ModuleNotFoundError", f"No module named '{name}'", missing=name)
        for name in ("flashinfer", "flashinfer.mamba", "flashinfer.jit", "tqdm")
    ),
    failed("ModuleNotFoundError", "'flashinfer' is not a package", missing="flashinfer.mamba"),
]
ENDINGS = [ImportEvidence(outcome=outcome, at=0.0) for outcome in ImportOutcome if outcome is not ImportOutcome.FAILED]
ANY_FACTS = st.builds(
    FlashinferFacts,
    environment=ENVIRONMENTS,
    evidence=st.sampled_from([None, *EXCEPTIONS, *ENDINGS, crash_of(), crash_of(None)]),
    state=st.sampled_from(ImportState),
    variables=st.sampled_from([None, {}, OFF, {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}]),
    cubin_dir=st.booleans(),
)


NO_OBSTACLE = {"flashinfer-disabled-by-env", "flashinfer-import-timeout"}
"""Disabled is SGLang's decision, and of an import that hangs nothing is known."""


@settings(max_examples=1000, deadline=None)
@given(ANY_FACTS)
def test_every_finding_is_declared_and_one_cause_is_active(facts: FlashinferFacts) -> None:
    """Whatever the facts: one finding a condition, at most one active, each reason declared and of its own kind."""
    kinds = {kind.code: kind for kind in PROBE.conditions}
    findings = judged(facts)
    assert set(findings) == set(kinds)
    assert sum(finding.status is Status.TRUE for finding in findings.values()) <= 1
    for code, finding in findings.items():
        assert finding.message
        if finding.status is not Status.FALSE:
            meaning = kinds[code].reasons[str(finding.reason)]
            assert meaning.startswith("Unknown") == (finding.status is Status.UNKNOWN)
    blocked = any(
        finding.status is Status.TRUE and finding.severity is not Severity.WARNING and code not in NO_OBSTACLE
        for code, finding in findings.items()
    )
    importable = exported(facts).get("module_importable")
    assert not (blocked and importable == 1)
    if importable == 1 and exported(facts)["module_import_verified"] == 0:
        # What only an import can tell is never fine without one.
        assert findings["flashinfer-import-crashed"].status is Status.UNKNOWN
    PROBE.report(facts)


def test_tokens_that_every_condition_shares_are_not_declared_here() -> None:
    """What happened to the probe itself is no reason of one of its conditions."""
    for kind in PROBE.conditions:
        assert COMMON_REASONS.keys().isdisjoint(kind.reasons)


def test_another_user_is_not_the_server() -> None:
    """In scope server a permission failure of a child that could not run as the server's user is unknown."""
    evidence = replace(OURS[0], same_user=False)
    assert judged(with_evidence(evidence))["flashinfer-import-failed"].status is Status.UNKNOWN


def test_hidden_devices_are_the_probes_doing() -> None:
    """An import that fails for want of a GPU that the probe hid from it says nothing."""
    facts = with_evidence(failed("RuntimeError", "No CUDA GPUs are available"))
    assert judged(facts)["flashinfer-import-failed"].reason == "devices-hidden"
    assert exported(facts) == {"module_import_duration_seconds": 1}


def test_a_timeout_is_a_warning_and_the_rest_unknown() -> None:
    """An import that hangs is its own warning, names the stage, and leaves importability unknown."""
    evidence = ImportEvidence(outcome=ImportOutcome.TIMEOUT, at=0.0, stage="import tvm_ffi")
    facts = with_evidence(evidence)
    findings = judged(facts)
    assert findings["flashinfer-import-timeout"].status is Status.TRUE
    assert "import tvm_ffi" in findings["flashinfer-import-timeout"].message
    assert findings["flashinfer-import-failed"].reason == "import-timeout"
    assert findings["flashinfer-not-installed"].status is Status.FALSE
    assert exported(facts) == {}


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ImportOutcome.STARVED, "import-starved"),
        (ImportOutcome.INSUFFICIENT_MEMORY, "insufficient-memory"),
        (ImportOutcome.NOT_ALLOWED, "import-not-allowed"),
    ],
)
def test_an_import_that_could_not_run_leaves_the_static_verdict(outcome: ImportOutcome, reason: str) -> None:
    """What kept the import from finishing is unknown with its token, never a fault (flashinfer-ai/flashinfer#4889)."""
    state = ImportState.NOT_ALLOWED if outcome is ImportOutcome.NOT_ALLOWED else ImportState.DONE
    facts = with_evidence(ImportEvidence(outcome=outcome, at=0.0), state=state)
    assert active(facts) == OK
    assert judged(facts)["flashinfer-import-failed"].reason == reason
    assert exported(facts) == {"module_importable": 1, "module_import_verified": 0}


def test_own_environment_judges_nothing() -> None:
    """In scope self everything is unknown, whatever was read."""
    facts = FlashinferFacts(environment=EnvironmentFacts(scope=Scope.SELF))
    assert {(finding.status, finding.reason) for finding in judged(facts).values()} == {(Status.UNKNOWN, "scope-self")}
    assert exported(facts) == {}


def test_unreadable_root_is_unknown() -> None:
    """A root that cannot be read leaves everything unknown with its token."""
    facts = FlashinferFacts(environment=EnvironmentFacts(scope=Scope.SERVER, problem="kernel-too-old"), variables={})
    assert judged(facts)["flashinfer-not-installed"].reason == "kernel-too-old"


def test_unseen_variables_are_unknown_until_the_server_answers() -> None:
    """Without the server's variables, disabled is unknown; a server that answers and uses it was not disabled."""
    facts = FlashinferFacts(environment=replace(GOOD, scope=Scope.IMAGE))
    assert judged(facts)["flashinfer-disabled-by-env"].reason == "environ-unseen"
    running = view(Answer.ACCEPTED, features={Feature.FLASHINFER_MAMBA: True})
    assert judged(facts, server=running)["flashinfer-disabled-by-env"].status is Status.FALSE


@pytest.mark.parametrize("value", ["false", "0", "", "False", "no"])
def test_false_values_disable(value: str) -> None:
    """Every spelling of false that SGLang takes disables FlashInfer (sgl-project/sglang#831)."""
    facts = FlashinferFacts(environment=GOOD, variables={"SGLANG_IS_FLASHINFER_AVAILABLE": value})
    assert classify(facts).code == "flashinfer-disabled-by-env"


def test_true_does_not_disable() -> None:
    """The variable's default, set explicitly, is no fault."""
    facts = FlashinferFacts(environment=GOOD, variables={"SGLANG_IS_FLASHINFER_AVAILABLE": "true"})
    assert classify(facts).code is None


def test_oversized_exception_is_bounded() -> None:
    """A message of any length becomes one bounded line."""
    finding = judged(with_evidence(failed("ValueError", "x\n" * 1000)))["flashinfer-import-failed"]
    assert len(finding.message) < 600
    assert "\n" not in finding.message


def test_every_code_documents_its_reasons() -> None:
    """Each condition declares what it concerns and why a remedy follows."""
    for kind in PROBE.conditions:
        assert kind.uses is Feature.FLASHINFER_MAMBA
        assert kind.info_when_unused
        assert all(meaning.endswith(".") for meaning in kind.reasons.values())


@pytest.mark.parametrize(
    ("policy", "launch", "resolved", "require", "wanted"),
    [
        (ImportPolicy.ALWAYS, {}, None, (), True),
        (ImportPolicy.NEVER, {"mamba_backend": "flashinfer"}, "flashinfer", ("flashinfer-mamba",), False),
        (ImportPolicy.AUTO, {}, None, (), False),
        (ImportPolicy.AUTO, {}, "triton", (), False),
        (ImportPolicy.AUTO, {}, "flashinfer", (), True),
        (ImportPolicy.AUTO, {"mamba_backend": "flashinfer"}, None, (), True),
        (ImportPolicy.AUTO, {}, None, ("flashinfer-mamba",), True),
        (ImportPolicy.AUTO, {}, None, ("flashinfer-import-failed",), True),
    ],
)
async def test_import_policy(
    policy: ImportPolicy, launch: dict[str, str], resolved: str | None, require: tuple[str, ...], wanted: bool
) -> None:
    """An import is started exactly when the policy, the flags, the server or a requirement ask for it."""
    requested: list[str] = []
    target = Target(url="http://h", url_source="t", scope=Scope.SERVER, python="/p", launch=launch)

    async def find() -> Target:
        return target

    async def info(_target: Target) -> Any:
        return None if resolved is None else SimpleNamespace(mamba_backend=resolved)

    async def read(_target: Target) -> EnvironmentFacts:
        return GOOD

    def request_import(_facts: EnvironmentFacts, _target: Target, done: Callable[[], None]) -> None:
        requested.append("import")
        done()

    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find),
        server=SimpleNamespace(info=info),
        environment=SimpleNamespace(
            read=read,
            importing=False,
            import_evidence=lambda _facts, _target: None,
            import_due=lambda _facts, _target: True,
            request_import=request_import,
        ),
        settings=Settings(import_policy=policy, require=require),
        wake=requested.append,
    )
    await flashinfer.collect(services)
    assert requested == (["import", "flashinfer"] if wanted else [])
