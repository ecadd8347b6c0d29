"""The flashinfer probe: what it says of an environment, and what it leaves open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.catalog import COMMON_REASONS
from sidecar.config import ImportPolicy, Settings
from sidecar.environment import (
    CacheFolder,
    Companion,
    Damage,
    EnvironmentFacts,
    FlashInferFiles,
    MambaFiles,
    ModuleFiles,
)
from sidecar.imports import ImportEvidence, ImportOutcome, ImportWork
from sidecar.isolation import Isolation
from sidecar.model import Answer, Feature, Gate, Outcome, Placement, Result, Scope, Severity, Status, Target
from sidecar.probes import flashinfer
from sidecar.probes.flashinfer import PROBE, FlashinferFacts, ImportState, MambaArguments, classify
from sidecar.serverinfo import ServerInfo
from tests.builders import view
from tests.fakes.flashinfer import CODES, DEFAULT_LAUNCH, MAMBA_USED, Build, facts_of, judged, release, then, world
from tests.fakes.site import RealClock, Site
from tests.fakes.sources import Sources

OK = (None, None)


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
async def environment(isolation: Isolation) -> AsyncIterator[Sources]:
    one = Sources(isolation, RealClock(), Settings(), placement=Placement.CONTAINER)
    yield one
    await one.close()


def causes(facts: FlashinferFacts, **changes: Any) -> dict[str, Any]:
    return {code: finding for code, finding in judged(facts, **changes).items() if code in CODES}


def active(facts: FlashinferFacts) -> tuple[str | None, str | None]:
    found = [(code, finding.reason) for code, finding in causes(facts).items() if finding.status is Status.TRUE]
    assert len(found) <= 1
    return found[0] if found else OK


def exported(facts: FlashinferFacts) -> dict[str, float]:
    return {sample.family: sample.value for sample in PROBE.samples(facts)}


async def test_static_success_is_labelled(tmp_path: Path, environment: Sources) -> None:
    """Files without fault make the module importable but not verified, and leave import-only faults unknown."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    facts = await facts_of(environment, site.target(), imported=False)
    assert exported(facts) == {"module_importable": 1, "module_import_verified": 0}
    findings = judged(facts)
    assert findings["flashinfer-not-installed"].status is Status.FALSE
    assert findings["flashinfer-import-failed"].status is Status.UNKNOWN
    assert findings["flashinfer-import-failed"].reason == "not-imported"


async def test_verified_success_is_final(tmp_path: Path, environment: Sources) -> None:
    """After a real import that worked every condition is false at once, without hold."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    facts = await facts_of(environment, site.target(), imported=True)
    assert {finding.status for finding in causes(facts).values()} == {Status.FALSE}
    assert all(finding.final for finding in causes(facts).values())
    assert exported(facts)["module_import_duration_seconds"] >= 0
    section = PROBE.report(facts)["modules"]["flashinfer.mamba"]
    assert (section.importable, section.verified, section.evidence) == (True, True, "ok")
    assert section.names == ("selective_state_update",)


async def test_remedy_installs_what_sglang_pins(tmp_path: Path, environment: Sources) -> None:
    """The suggested install takes its version from SGLang's own requirements in that environment."""
    site = Site(tmp_path / "venv")
    site.dist("pip", "25.0")
    site.dependencies()
    site.dist("sglang", "0.5.23", ("flashinfer_python[cu13]==0.6.14", "torch==2.11.0", 'x; extra == "y"'))
    facts = await facts_of(environment, site.target(), imported=False)
    remedy = judged(facts)["flashinfer-not-installed"].remedy
    assert f"{site.python} -m pip install 'flashinfer-python[cu13]==0.6.14'" in remedy
    assert "--mamba-backend triton" in remedy


async def test_remedy_for_a_cubin_that_does_not_exist(tmp_path: Path, environment: Sources) -> None:
    """No flashinfer-cubin above 0.6.13 is suggested: PyPI has none (flashinfer-ai/flashinfer#4869)."""
    site = Site(tmp_path / "venv")
    site.dist("pip", "25.0")
    release("0.6.14")(site)
    site.companion("flashinfer-cubin", "0.6.13")
    finding = judged(await facts_of(environment, site.target(), imported=False))["flashinfer-cubin-mismatch"]
    assert f"{site.python} -m pip uninstall -y flashinfer-cubin" in finding.remedy
    assert "flashinfer-cubin==" not in finding.remedy
    assert "0.6.13" in finding.message
    assert "0.6.14" in finding.message


async def test_missing_dependencies_are_named_at_once(tmp_path: Path, environment: Sources) -> None:
    """All missing modules are named together, by their distributions in the remedy."""
    site = Site(tmp_path / "venv")
    site.dist("pip", "25.0")
    site.dependencies("tvm_ffi", "tqdm")
    site.flashinfer()
    finding = judged(await facts_of(environment, site.target(), imported=True))["flashinfer-import-failed"]
    assert (
        f"tvm_ffi (of apache-tvm-ffi) and tqdm, which the server's environment ({site.python}) lacks" in finding.message
    )
    assert "install apache-tvm-ffi tqdm" in finding.remedy


async def test_ignored_mismatch_is_a_warning(tmp_path: Path, environment: Sources) -> None:
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
    left = {code: finding.reason for code, finding in causes(facts).items() if finding.status is not Status.FALSE}
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
    case: tuple[str, Build, str], imported: bool, tmp_path: Path, environment: Sources
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
        for code, finding in causes(facts).items()
    }


OFF = {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}


async def test_disabled_says_nothing_of_the_module(tmp_path: Path, environment: Sources) -> None:
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
    assert {code for code, finding in causes(facts).items() if finding.final} == {"flashinfer-disabled-by-env"}


async def test_an_old_release_hides_whether_its_companion_would_do(tmp_path: Path, environment: Sources) -> None:
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


async def test_an_import_that_raised_rules_out_no_more_than_it_got_to(tmp_path: Path, environment: Sources) -> None:
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


async def test_a_second_ignored_companion_is_not_fine(tmp_path: Path, environment: Sources) -> None:
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


@pytest.mark.parametrize("value", ["yes", "2", " 1", ""])
def test_values_that_a_newer_release_may_read_otherwise_are_unknown(value: str) -> None:
    """A value on which SGLang's two readers of switches disagree neither disables nor clears an unknown release."""
    facts = FlashinferFacts(environment=GOOD, sglang="99.0", variables={"SGLANG_IS_FLASHINFER_AVAILABLE": value})
    assert said(facts)["disabled-by-env"] == "value-unclear"
    assert said(facts)["not-installed"] == "false"


def test_without_facts_nothing_is_said() -> None:
    """The probe leaves the reason to the judge when it has no facts."""
    assert list(PROBE.judge(Result(probe="flashinfer", outcome=Outcome.CRASHED), world())) == []


# -- SGLang's own sentence, and the way out ---------------------------------------------------------------

ABSENT = replace(GOOD, flashinfer=FlashInferFiles())
STALE = replace(GOOD, flashinfer=replace(GOOD.flashinfer, cubin=Companion(kind="package", version="0.6.13")))
NEWER_SAYS = "ValueError: FlashInfer mamba module not available, please check the FlashInfer installation."
ROUNDING_TAIL = (
    " Stochastic rounding with --mamba-backend flashinfer requires FlashInfer Mamba and --mamba-ssm-dtype float16."
)


def finding_of(environment: EnvironmentFacts, features: dict[Feature, bool], **changes: Any) -> Any:
    """The one active cause of an environment for a server that uses these features."""
    facts = FlashinferFacts(environment=environment, **{"variables": {}, **changes})
    found = [one for one in causes(facts, server=view(features=features)).values() if one.status is Status.TRUE]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("version", "rounding", "expected"),
    [
        ("0.5.9", None, "ValueError: FlashInfer mamba module not available, please check flashinfer installation."),
        ("0.5.14", True, "ValueError: FlashInfer mamba module not available, please check flashinfer installation."),
        ("0.5.15", False, NEWER_SAYS),
        ("0.5.23", True, NEWER_SAYS + ROUNDING_TAIL),
        (None, None, NEWER_SAYS),
        ("not a version", None, NEWER_SAYS),
    ],
)
def test_sglang_sentence_of_each_release(version: str | None, rounding: bool | None, expected: str) -> None:
    """The sentence is the one of the installed release, with the tail that stochastic rounding adds."""
    mamba = MambaArguments(source="flags", rounding=rounding)
    assert finding_of(ABSENT, MAMBA_USED, sglang=version, mamba=mamba).sglang_says == expected
    off = finding_of(GOOD, MAMBA_USED, sglang=version, mamba=mamba, variables=OFF)
    assert (off.code, off.sglang_says) == ("flashinfer-disabled-by-env", expected)


def test_what_is_not_translated_stands_in_the_log_as_it_is() -> None:
    """A mismatch is a RuntimeError that no release translates (flashinfer-ai/flashinfer#4869)."""
    finding = finding_of(STALE, MAMBA_USED, sglang="0.5.16")
    assert finding.sglang_says == (
        "RuntimeError: flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.14). Please install "
        "the same version of both packages. Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check."
    )
    assert "does not translate" in finding.message


@pytest.mark.parametrize(
    ("environment", "features", "sglang", "offered"),
    [
        (ABSENT, MAMBA_USED, "0.5.9", True),
        (ABSENT, {}, None, True),
        # From 0.5.10 to 0.5.22 the sampler imports FlashInfer on every CUDA server.
        (ABSENT, MAMBA_USED, "0.5.10.post1", False),
        (STALE, MAMBA_USED, "0.5.16", False),
        (ABSENT, MAMBA_USED, "0.5.23", True),
        (STALE, DEFAULT_LAUNCH, "0.5.9", False),
    ],
)
def test_another_mamba_backend_is_offered_where_it_helps(
    environment: EnvironmentFacts, features: dict[Feature, bool], sglang: str | None, offered: bool
) -> None:
    """No remedy suggests a backend that leaves the server importing the same broken package."""
    remedy = finding_of(environment, features, sglang=sglang).remedy
    assert ("--mamba-backend triton" in remedy) == offered


@pytest.mark.parametrize(
    ("features", "sglang", "require", "severity"),
    [
        (DEFAULT_LAUNCH, "0.5.16", (), None),
        (DEFAULT_LAUNCH, "0.5.9", (), Severity.INFO),
        (DEFAULT_LAUNCH, "0.5.23", (), Severity.INFO),
        (DEFAULT_LAUNCH, None, (), Severity.INFO),
        ({**DEFAULT_LAUNCH, Feature.FLASHINFER: True}, "0.5.9", (), None),
        (MAMBA_USED, "0.5.9", (), None),
        ({}, "0.5.9", ("flashinfer-mamba",), None),
    ],
)
def test_absence_stops_only_who_cannot_do_without(
    features: dict[Feature, bool], sglang: str | None, require: tuple[str, ...], severity: Severity | None
) -> None:
    """FlashInfer that is not installed is no fault of a launch that falls back to something else."""
    facts = FlashinferFacts(environment=ABSENT, variables={}, sglang=sglang)
    found = causes(facts, server=view(features=features), settings=Settings(require=require))
    assert found["flashinfer-not-installed"].severity is severity


def test_the_sentence_of_other_users_is_the_exception() -> None:
    """A server that imports FlashInfer for its sampler alone dies with the exception itself."""
    assert finding_of(ABSENT, DEFAULT_LAUNCH).sglang_says == "ModuleNotFoundError: No module named 'flashinfer'"


def test_uv_environments_get_uv_commands() -> None:
    """An environment without pip is repaired with uv; one whose packages are unknown with pip."""
    made_by_uv = replace(STALE, distributions={"flashinfer-python": "0.6.14"})
    assert finding_of(made_by_uv, {}).remedy.startswith(
        "uv pip uninstall --python /venv/bin/python flashinfer-cubin  # it is optional"
    )
    assert finding_of(STALE, {}).remedy.startswith("/venv/bin/python -m pip uninstall -y flashinfer-cubin  # ")


def test_a_release_that_sglang_pins_needs_a_newer_sglang() -> None:
    """Where SGLang itself pins a FlashInfer without mamba, installing what it pins would repair nothing."""
    files = FlashInferFiles(kind="package", version="0.5.3", mamba=MambaFiles())
    old = replace(GOOD, flashinfer=files, requires_of={"sglang": ("flashinfer_python==0.5.3",)})
    assert "--upgrade sglang 'flashinfer-python>=0.6.1'" in finding_of(old, MAMBA_USED).remedy


# -- what reading leaves open -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "variables", "reason", "said"),
    [
        (
            {"damaged": {"flashinfer-python": Damage(missing=2, resized=1, examples=("flashinfer/norm.py",))}},
            {},
            "damaged-package",
            "flashinfer-python: files not as installed: 2 missing and 1 of another size, first flashinfer/norm.py",
        ),
        ({"damaged": {"torch": Damage(missing=1)}}, {}, "damaged-package", "torch: files not as installed: 1 missing"),
        ({"python_version": "3.9.18"}, {}, "interpreter-unsupported", "this is 3.9.18"),
        ({}, {"FLASHINFER_LOGLEVEL": "abc"}, "variable-suspect", "FLASHINFER_LOGLEVEL"),
        ({}, {"FLASHINFER_LOGGING_LEVEL": "loud"}, "variable-suspect", "FLASHINFER_LOGGING_LEVEL"),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "9.0a;10.0"}, "variable-suspect", "FLASHINFER_CUDA_ARCH_LIST"),
    ],
)
def test_doubts_are_unknown_until_imported(
    changes: dict[str, Any], variables: dict[str, str], reason: str, said: str
) -> None:
    """What may or may not stop the import makes the module unknown by files, and a success settles it."""
    environment = replace(GOOD, **changes)
    facts = FlashinferFacts(environment=environment, variables=variables)
    finding = causes(facts)["flashinfer-import-failed"]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, reason)
    assert said in finding.message
    assert exported(facts) == {}
    settled = replace(facts, evidence=ImportEvidence(outcome=ImportOutcome.OK, at=0.0), state=ImportState.DONE)
    assert active(settled) == OK
    assert exported(settled)["module_importable"] == 1


@pytest.mark.parametrize(
    ("changes", "variables"),
    [
        ({"damaged": {"flashinfer-python": Damage(no_record=True)}}, {}),
        ({"python_version": "3.10.0"}, {}),
        ({"python_version": "3.14.1"}, {}),
        (
            {},
            {"FLASHINFER_LOGLEVEL": "3", "FLASHINFER_LOGGING_LEVEL": "debug", "FLASHINFER_CUDA_ARCH_LIST": "9.0a 10.0"},
        ),
    ],
)
def test_what_is_in_order_raises_no_doubt(changes: dict[str, Any], variables: dict[str, str]) -> None:
    """A missing RECORD, a new enough interpreter and readable values leave the module importable."""
    facts = FlashinferFacts(environment=replace(GOOD, **changes), variables=variables)
    assert exported(facts)["module_importable"] == 1


@pytest.mark.parametrize(
    ("version", "cutlass", "asks"),
    [
        ("0.6.7", True, False),
        ("0.6.8", True, True),
        ("0.6.11.post3", True, True),
        ("0.6.12", True, False),
        ("0.6.13", True, False),
        ("0.6.14", True, True),
        ("0.6.14", False, False),
        ("0.7.0", True, True),
        ("0.7.1", True, False),
    ],
)
def test_releases_that_ask_torch_for_a_gpu(version: str, cutlass: bool, asks: bool) -> None:
    """A torch without CUDA is the cause beside those releases that ask it for a GPU, and only with CUTLASS's DSL."""
    installed = {"pip": "25.0", "torch": "2.11.0+cpu"} | ({"nvidia-cutlass-dsl": "4.6.0"} if cutlass else {})
    environment = replace(
        GOOD,
        flashinfer=replace(GOOD.flashinfer, version=version),
        torch_version="2.11.0+cpu",
        torch_without_cuda=True,
        distributions=installed,
    )
    facts = FlashinferFacts(environment=environment, variables={})
    assert active(facts) == (("flashinfer-import-failed", "torch-without-cuda") if asks else OK)
    if asks:
        # SGLang does not try the import without CUDA, and says the same as ever.
        assert finding_of(environment, MAMBA_USED).sglang_says == NEWER_SAYS


@pytest.mark.parametrize(
    ("problem", "reason", "says"),
    [
        ("no-home", "no-home", "RuntimeError: Could not determine home directory."),
        ("not-a-folder", "cache-unwritable", "NotADirectoryError: [Errno 20] Not a directory"),
        ("read-only", "cache-unwritable", "OSError: [Errno 30] Read-only file system"),
        ("permission", "cache-unwritable", "PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_a_cache_that_the_import_does_not_use(problem: str, reason: str, says: str) -> None:
    """The server's cache folder is judged by reading: the import has one of its own and succeeds all the same."""
    environment = replace(GOOD, cache=CacheFolder(path="/root/.cache/flashinfer", writable=False, problem=problem))
    evidence = ImportEvidence(outcome=ImportOutcome.OK, at=0.0)
    for changes in ({}, {"evidence": evidence, "state": ImportState.DONE}):
        facts = FlashinferFacts(environment=environment, variables={}, cache_stands=True, **changes)
        assert active(facts) == ("flashinfer-import-failed", reason)
        assert causes(facts)["flashinfer-import-failed"].sglang_says == says
        assert exported(facts)["module_importable"] == 0
        elsewhere = replace(facts, cache_stands=False)
        assert active(elsewhere) == OK


async def test_sglang_moves_the_cache(tmp_path: Path, environment: Sources) -> None:
    """From 0.5.18 on SGLang redirects FlashInfer's cache, so that the default one says nothing."""
    site = Site(tmp_path / "venv")
    release("0.6.14")(site)
    target = site.target()
    assert (await facts_of(environment, target, imported=False)).cache_stands
    other = Site(tmp_path / "other")
    release("0.6.14")(other)
    other.dist("sglang", "0.5.18")
    assert not (await facts_of(environment, other.target(), imported=False)).cache_stands
    named = replace(other.target(), environ={"FLASHINFER_WORKSPACE_BASE": "/data", "HOME": "/"})
    assert (await facts_of(environment, named, imported=False)).cache_stands


def test_an_old_interpreter_explains_what_does_not_parse() -> None:
    """A syntax error under an interpreter that FlashInfer does not support is no damaged file."""
    old = replace(GOOD, python_version="3.9.18")
    evidence = failed("SyntaxError", "invalid syntax (core.py, line 1)")
    facts = FlashinferFacts(environment=old, variables={}, evidence=evidence, state=ImportState.DONE)
    assert active(facts) == ("flashinfer-import-failed", "interpreter-too-old")
    assert "Python 3.10 or newer" in causes(facts)["flashinfer-import-failed"].remedy
    assert active(with_evidence(evidence)) == ("flashinfer-import-failed", "corrupt-file")


def test_the_symbol_is_named_as_a_programmer_writes_it() -> None:
    """An undefined symbol is demangled, and the C++ string ABI named (sgl-project/sglang#5100)."""
    message = "/x/a.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameERKSsb"
    found = causes(with_evidence(failed("ImportError", message, sglang_catches=True)))["flashinfer-import-failed"]
    assert "torch::jit::parseSchemaOrName (_ZN5torch3jit17parseSchemaOrNameERKSsb)" in found.message
    assert "C++11 ABI" in found.message


# -- files and import against each other ------------------------------------------------------------------


async def test_the_report_says_where_the_import_disagrees(tmp_path: Path, environment: Sources) -> None:
    """What reading said stays in the report beside what the import showed, with one sentence where they differ."""
    site = Site(tmp_path / "venv")
    then(release("0.6.14"), lambda site: site.write("flashinfer/jit/__init__.py", "def f(:\n"))(site)
    before = await facts_of(environment, site.target(), imported=False)
    section = PROBE.report(before)["modules"]["flashinfer.mamba"]
    assert (section.by_files, section.disagreement) == ("importable", None)
    after = await facts_of(environment, site.target(), imported=True)
    section = PROBE.report(after)["modules"]["flashinfer.mamba"]
    assert section.by_files == "importable"
    assert section.disagreement == (
        "Reading the files showed no fault, the real import shows flashinfer-import-failed (corrupt-file); "
        "the import has the last word."
    )
    assert section.disagreement in causes(after)["flashinfer-import-failed"].evidence


def test_agreement_is_not_mentioned() -> None:
    """An import that shows what the files showed makes no sentence."""
    facts = with_evidence(ImportEvidence(outcome=ImportOutcome.OK, at=0.0))
    section = PROBE.report(facts)["modules"]["flashinfer.mamba"]
    assert (section.by_files, section.disagreement) == ("importable", None)


async def test_a_release_without_mamba_proves_the_rest(tmp_path: Path, environment: Sources) -> None:
    """That only the mamba module is missing shows after all of FlashInfer was imported, which clears the rest."""
    site = Site(tmp_path / "venv")
    release("0.6.0")(site)
    assert said(await facts_of(environment, site.target(), imported=True)) == {
        "not-installed": "false",
        "disabled-by-env": "false",
        "mamba-missing": "true",
        "cubin-mismatch": "false",
        "jit-cache-mismatch": "false",
        "import-failed": "false",
        "import-crashed": "false",
        "symbol-missing": "other-cause",
        "import-timeout": "false",
    }


# -- whatever the facts -----------------------------------------------------------------------------------

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
    python_version=st.sampled_from([None, "3.9.1", "3.12.0"]),
    damaged=st.sampled_from([{}, {"flashinfer-python": Damage(missing=1)}]),
    cache=st.builds(CacheFolder, problem=st.sampled_from([None, "no-home", "permission"])),
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
    cache_stands=st.booleans(),
    sglang=st.sampled_from([None, "0.5.9", "0.5.16"]),
    mamba=st.builds(MambaArguments, source=st.sampled_from([None, "flags"]), rounding=st.sampled_from([None, True])),
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
    assert sum(finding.status is Status.TRUE and code in CODES for code, finding in findings.items()) <= 1
    for code, finding in findings.items():
        assert finding.message
        if finding.status is not Status.FALSE:
            meaning = kinds[code].reasons[str(finding.reason)]
            assert meaning.startswith("Unknown") == (finding.status is Status.UNKNOWN)
    blocked = any(
        finding.status is Status.TRUE and finding.severity is not Severity.WARNING and code in CODES - NO_OBSTACLE
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
    assert {(finding.status, finding.reason) for finding in causes(facts).values()} == {(Status.UNKNOWN, "scope-self")}
    assert exported(facts) == {}


def test_unreadable_root_is_unknown() -> None:
    """A root that cannot be read leaves everything unknown with its token."""
    facts = FlashinferFacts(environment=EnvironmentFacts(scope=Scope.SERVER, problem="kernel-too-old"), variables={})
    assert judged(facts)["flashinfer-not-installed"].reason == "kernel-too-old"


def test_unseen_variables_are_unknown_until_the_server_answers() -> None:
    """Without the server's variables, disabled is unknown; a server that answers and uses it was not disabled."""
    facts = FlashinferFacts(environment=replace(GOOD, scope=Scope.IMAGE))
    assert judged(facts)["flashinfer-disabled-by-env"].reason == "environ-unseen"
    running = view(Answer.ACCEPTED, features=MAMBA_USED)
    assert judged(facts, server=running)["flashinfer-disabled-by-env"].status is Status.FALSE


@pytest.mark.parametrize("release", ["0.4.10.post2", "0.5.16", "0.5.23", None])
@pytest.mark.parametrize("value", ["false", "0", "", "False", "no", " 1", "1 ", "true\n", "yes", "on", "2", "t"])
def test_all_but_two_values_disable(value: str, release: str | None) -> None:
    """SGLang lowers the letters, compares with true and 1, and takes the rest for false (sgl-project/sglang#831)."""
    facts = FlashinferFacts(environment=GOOD, sglang=release, variables={"SGLANG_IS_FLASHINFER_AVAILABLE": value})
    verdict = classify(facts)
    assert verdict.code == "flashinfer-disabled-by-env"
    assert repr(value) in verdict.message
    assert ("without spaces" in verdict.message) == (value.lower() not in {"false", "0"})


@pytest.mark.parametrize("release", ["0.4.10.post2", "0.5.23", "99.0", None])
@pytest.mark.parametrize("value", ["true", "1", "TRUE", "True"])
def test_true_does_not_disable(value: str, release: str | None) -> None:
    """The variable's default, set explicitly, is no fault."""
    facts = FlashinferFacts(environment=GOOD, sglang=release, variables={"SGLANG_IS_FLASHINFER_AVAILABLE": value})
    assert classify(facts).code is None


def test_oversized_exception_is_bounded() -> None:
    """A message of any length becomes one bounded line."""
    finding = judged(with_evidence(failed("ValueError", "x\n" * 1000)))["flashinfer-import-failed"]
    assert len(finding.message) < 600
    assert "\n" not in finding.message


def test_every_code_documents_its_reasons() -> None:
    """Each condition declares what it concerns and why a remedy follows."""
    for kind in PROBE.conditions:
        assert (kind.uses is None) == (kind.code == "mamba-rounding-dtype")
        assert kind.info_when_unused == (kind.uses is not None)
        assert all(meaning.endswith(".") for meaning in kind.reasons.values())


@pytest.mark.parametrize(
    ("policy", "launch", "resolved", "require", "wanted"),
    [
        (ImportPolicy.ALWAYS, {}, None, (), True),
        (ImportPolicy.NEVER, {"mamba_backend": "flashinfer"}, ("flashinfer", "cuda"), ("flashinfer-mamba",), False),
        (ImportPolicy.AUTO, {}, None, (), False),
        (ImportPolicy.AUTO, {}, ("triton", "cpu"), (), False),
        (ImportPolicy.AUTO, {}, ("flashinfer", "cuda"), (), True),
        # A server on CUDA imports FlashInfer whatever its backends.
        (ImportPolicy.AUTO, {}, ("triton", "cuda"), (), True),
        (ImportPolicy.AUTO, {"sampling_backend": "flashinfer"}, None, (), True),
        (ImportPolicy.AUTO, {"attention_backend": "flashinfer"}, None, (), True),
        (ImportPolicy.AUTO, {"mamba_backend": "flashinfer"}, None, (), True),
        (ImportPolicy.AUTO, {}, None, ("flashinfer-mamba",), True),
        (ImportPolicy.AUTO, {}, None, ("flashinfer-import-failed",), True),
    ],
)
async def test_import_policy(
    policy: ImportPolicy,
    launch: dict[str, str],
    resolved: tuple[str, str] | None,
    require: tuple[str, ...],
    wanted: bool,
) -> None:
    """An import is started exactly when the policy, the flags, the server or a requirement ask for it."""
    requested: list[str] = []
    target = Target(url="http://h", url_source="t", scope=Scope.SERVER, python="/p", launch=launch)

    async def find() -> Target:
        return target

    async def info(_target: Target) -> Any:
        return None if resolved is None else ServerInfo(mamba_backend=resolved[0], device=resolved[1])

    async def read(_target: Target) -> EnvironmentFacts:
        return GOOD

    def request(_work: ImportWork, _facts: EnvironmentFacts, _target: Target, done: Callable[[], None]) -> None:
        requested.append("import")
        done()

    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find),
        server=SimpleNamespace(info=info),
        environment=SimpleNamespace(
            read=read,
        ),
        imports=SimpleNamespace(
            importing=lambda _work: False,
            evidence=lambda _work, _facts, _target: None,
            due=lambda _work, _facts, _target: True,
            request=request,
        ),
        settings=Settings(import_policy=policy, require=require),
        imported=requested.append,
    )
    await flashinfer.collect(services)
    assert requested == (["import", "flashinfer"] if wanted else [])


@pytest.mark.parametrize(
    ("where", "remedy"),
    [
        ("flashinfer/jit/core.py:12", "flashinfer-python==0.6.14"),
        ("cutlass/base_dsl/dsl.py:40", "nvidia-cutlass-dsl==4.6.0"),
        ("tvm_ffi/__init__.py:3", "apache-tvm-ffi==0.1.11"),
        ("einops/einops.py:7", "einops==0.8.1"),
        ("cuda/pathfinder/load.py:5", "cuda-pathfinder==1.9.1"),
        ("nvidia/nccl/x.py:5", "nvidia-nccl-cu13==2.28.9"),
        (None, "flashinfer-python==0.6.14"),
    ],
)
@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("RuntimeError", "it broke"),
        ("SyntaxError", "invalid syntax"),
        ("ImportError", "cannot import name 'x' from 'y'"),
    ],
)
def test_the_distribution_whose_file_raised_is_reinstalled(
    where: str | None, remedy: str, exception: str, message: str
) -> None:
    """An exception out of a file of another distribution is not mended by installing FlashInfer again."""
    facts = with_evidence(failed(exception, message, where=where, same_user=True))
    installed = {"pip": "25.0", "einops": "0.8.1", "nvidia-cutlass-dsl": "4.6.0", "apache-tvm-ffi": "0.1.11"}
    installed |= {"cuda-python": "13.0.3", "cuda-pathfinder": "1.9.1", "nvidia-nccl-cu13": "2.28.9"}
    facts = replace(facts, environment=replace(facts.environment, distributions=installed))
    found = causes(facts)["flashinfer-import-failed"]
    assert found.status is Status.TRUE
    assert f"install --force-reinstall --no-deps {remedy}" in str(found.remedy)


FLASHINFER_AGAIN = "--force-reinstall --no-deps flashinfer-python==0.6.14"
SET_AGAIN = "flashinfer-python>=0.6.1' apache-tvm-ffi torch"


@pytest.mark.parametrize(
    ("trace", "damaged", "signal", "remedy", "named"),
    [
        pytest.param(
            {"loading": "tvm_ffi/lib/libtvm_ffi.so", "died_at": "tvm_ffi/libinfo.py:9"},
            {},
            "SIGBUS",
            "--no-deps apache-tvm-ffi==0.1.11",
            "while it loaded tvm_ffi/lib/libtvm_ffi.so",
            id="the file that was being loaded",
        ),
        pytest.param(
            {"died_at": "tvm_ffi/libinfo.py:9"},
            {},
            "SIGSEGV",
            "--no-deps apache-tvm-ffi==0.1.11",
            "in tvm_ffi/libinfo.py:9",
            id="the code that ran, whatever was imported last",
        ),
        pytest.param(
            {"loading": "sgl_kernel/sm90/common_ops.abi3.so"},
            {"torch": Damage(resized=1, examples=("torch/a.py", "torch/lib/libtorch_cpu.so"))},
            "SIGBUS",
            "--no-deps torch==2.11.0",
            "torch/lib/libtorch_cpu.so is not of the size with which torch was installed",
            id="a library that the loaded one needs, by its size",
        ),
        pytest.param(
            {"loading": "tvm_ffi/lib/libtvm_ffi.so"},
            {"torch": Damage(resized=1, examples=("torch/lib/libtorch_cpu.so",))},
            "SIGSEGV",
            "--no-deps apache-tvm-ffi==0.1.11",
            "while it loaded tvm_ffi/lib/libtvm_ffi.so",
            id="another size explains no other signal of another package",
        ),
        pytest.param(
            {}, {}, "SIGSEGV", SET_AGAIN, "a module that is not known; the last step that had begun is: import torch",
            id="nothing but the last import is no trace",
        ),
        pytest.param(
            {"died_at": "flashinfer/jit/env.py:3"}, {}, "SIGSEGV", FLASHINFER_AGAIN, "in flashinfer/jit/env.py:3",
            id="FlashInfer itself",
        ),
        pytest.param(
            {"loading": "numpy/_core/_multiarray_umath.so"}, {}, "SIGSEGV",
            "Install the package that numpy/_core/_multiarray_umath.so belongs to again", "while it loaded numpy/",
            id="a package that no metadata knows",
        ),
    ],
)  # fmt: skip
def test_a_crash_is_mended_where_it_happened(
    trace: dict[str, str], damaged: dict[str, Damage], signal: str, remedy: str, named: str
) -> None:
    """A file that was cut off ends the process while it is loaded (SIGBUS, mmap(2)), long after imports that went well.

    What was imported last is never blamed: flashinfer imports tvm_ffi first, and that imports torch.
    """
    facts = with_evidence(replace(crash_of(signal), stage="import torch", **trace))
    facts = replace(facts, environment=replace(facts.environment, distributions=INSTALLED, damaged=damaged))
    found = causes(facts)["flashinfer-import-crashed"]
    assert found.status is Status.TRUE
    assert remedy in str(found.remedy)
    assert named in found.message
    assert str(found.remedy).count(" install ") <= 1


def test_a_damaged_copy_on_the_path_is_taken_off_it() -> None:
    """A dependency in a folder of PYTHONPATH is not what an installer writes anew."""
    overlay = {"torch": ModuleFiles(kind="package", places=("/srv/overlay/torch",))}
    found = of_installed(failed("SyntaxError", "invalid syntax", where="torch/__init__.py:3"), modules=overlay)
    assert found.remedy.startswith("Take /srv/overlay out of the server's PYTHONPATH")
    assert "The file torch/__init__.py:3 is damaged." in found.message
    assert "invalid syntax. The file" in found.message


def test_files_of_cutlass_are_in_its_parts() -> None:
    """nvidia-cutlass-dsl itself has no code: its packages -libs-* of the same version do, and are installed again."""
    parts = {"nvidia-cutlass-dsl-libs-base": "4.6.0", "nvidia-cutlass-dsl-libs-core": "4.6.0"}
    evidence = failed("SyntaxError", "invalid syntax", where="cutlass/base_dsl/dsl.py:40")
    found = of_installed(evidence, distributions={"pip": "25.0", "nvidia-cutlass-dsl": "4.6.0", **parts})
    expected = "nvidia-cutlass-dsl==4.6.0 nvidia-cutlass-dsl-libs-base==4.6.0 nvidia-cutlass-dsl-libs-core==4.6.0"
    assert f"install --force-reinstall --no-deps {expected}" in found.remedy


@pytest.mark.parametrize(
    ("exception", "where", "remedy"),
    [
        # Whoever called it is at fault, unless the file itself is damaged.
        ("RuntimeError", "json/decoder.py:355", "flashinfer-python==0.6.14"),
        ("SyntaxError", "json/decoder.py:355", "Install /venv/bin/python again: json/decoder.py:355 belongs to it"),
        ("SyntaxError", "odd/name.py:3", "Install the package that odd/name.py:3 belongs to again"),
        ("RuntimeError", "odd/name.py:3", "Install the package that odd/name.py:3 belongs to again"),
        ("RuntimeError", "<frozen importlib._bootstrap>:3", "flashinfer-python==0.6.14"),
    ],
)
def test_a_file_of_no_known_distribution(exception: str, where: str, remedy: str) -> None:
    """A file of the standard library comes with the interpreter, and of an unknown owner nothing is made up."""
    assert remedy in of_installed(failed(exception, "invalid syntax", where=where)).remedy


# -- what the import's own surroundings explain -----------------------------------------------------------

UNDEFINED = "/s/tvm_ffi/core.so: undefined symbol: preloaded_only"


@pytest.mark.parametrize(
    ("exception", "message", "withheld", "reason"),
    [
        ("ImportError", UNDEFINED, ("LD_PRELOAD",), "probe-environment"),
        ("OSError", "libx.so.1: cannot open shared object file: No such file", ("LD_AUDIT",), "probe-environment"),
        ("KeyError", "'VENDOR_LICENSE'", ("VENDOR_LICENSE",), "probe-environment"),
        ("RuntimeError", "the vendor's runtime is not set up", ("VENDOR_LICENSE",), "probe-environment"),
        ("ValueError", "PROMETHEUS_MULTIPROC_DIR is unset", ("PROMETHEUS_MULTIPROC_DIR",), "probe-environment"),
        # What is installed explains these, whatever else the server is told.
        ("ImportError", UNDEFINED, ("VENDOR_LICENSE",), None),
        ("SyntaxError", "invalid syntax", ("LD_PRELOAD", "VENDOR_LICENSE"), None),
        ("ImportError", "cannot import name 'x' from 'flashinfer.jit'", ("VENDOR_LICENSE",), None),
        ("RuntimeError", "the vendor's runtime is not set up", (), None),
        # What a platform, a session or an image adds to every process.
        (
            "RuntimeError",
            "it broke",
            (
                "KUBERNETES_PORT",
                "KUBERNETES_SERVICE_HOST",
                "HF_TOKEN",
                "INVOCATION_ID",
                "AWS_SECRET_ACCESS_KEY",
                "SSH_CLIENT",
            ),
            None,
        ),
        ("RuntimeError", "HF_TOKEN is not set", ("HF_TOKEN",), "probe-environment"),
        ("RuntimeError", "it broke", ("MASTER_PORT",), "probe-environment"),
    ],
)
def test_what_a_withheld_variable_explains_is_unknown(
    exception: str, message: str, withheld: tuple[str, ...], reason: str | None
) -> None:
    """A variable that the server has and the import had not (ld.so(8): LD_PRELOAD) leaves its failure open."""
    facts = with_evidence(failed(exception, message, withheld=withheld))
    found = causes(facts)["flashinfer-import-failed"]
    assert (found.status, found.reason if reason else None) == (Status.UNKNOWN if reason else Status.TRUE, reason)
    assert ("module_importable" in exported(facts)) is (reason is None)


@pytest.mark.parametrize(
    ("evidence", "unknown"),
    [
        (replace(crash_of(), withheld=("LD_PRELOAD",)), True),
        (replace(crash_of(), withheld=("VENDOR_LICENSE",)), False),
        (replace(crash_of(None), withheld=("VENDOR_LICENSE",)), True),
        (failed("SystemExit", "3", exited=True, withheld=("VENDOR_LICENSE",)), True),
        (failed("SystemExit", "3", exited=True, withheld=("KUBERNETES_SERVICE_HOST",)), False),
        # It printed the name of the import's own folder before it died.
        (replace(crash_of(), private=True), True),
    ],
)
def test_an_end_that_a_withheld_variable_explains_is_unknown(evidence: ImportEvidence, unknown: bool) -> None:
    """A crash may come from a missing preload, leaving by itself from any missing variable."""
    found = causes(with_evidence(evidence))["flashinfer-import-crashed"]
    assert (found.status is Status.UNKNOWN, found.status is Status.TRUE) == (unknown, not unknown)


@pytest.mark.parametrize(
    "evidence",
    [
        failed("OSError", "/t/x.so: failed to map segment from shared object", os_error=True, private=True),
        failed("PermissionError", "[Errno 13] Permission denied: '/t/x'", errno=13, os_error=True, private=True),
        failed("OSError", "[Errno 28] No space left on device", errno=28, os_error=True),
        failed("OSError", "[Errno 24] Too many open files: '/s/x.py'", errno=24, os_error=True),
        failed("ImportError", "libx.so.1: cannot open shared object file: Too many open files"),
        failed("RuntimeError", "x failed", cause="OSError: [Errno 28] No space left on device"),
    ],
    ids=lambda evidence: evidence.message[:40],
)
def test_shortage_and_private_folders_are_no_fault_of_the_server(evidence: ImportEvidence) -> None:
    """What fails in the import's own folders, or for want of something, is unknown however faithful the import was."""
    facts = with_evidence(evidence)
    finding = judged(facts)["flashinfer-import-failed"]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "probe-environment")
    assert "module_importable" not in exported(facts)


@pytest.mark.parametrize(
    ("exception", "message", "where"),
    [
        ("ValueError", "invalid literal for int() with base 10: ''", "flashinfer/utils.py:3"),
        ("RuntimeError", "Expected at least one GPU", "flashinfer/utils.py:3"),
        (
            "RuntimeError",
            "The NVIDIA driver on your system is too old (found version 11040).",
            "torch/cuda/__init__.py:1",
        ),
        ("RuntimeError", "CUDA driver version is insufficient for CUDA runtime version", "tvm_ffi/x.py:1"),
        ("AssertionError", "", "torch/cuda/__init__.py:400"),
        ("RuntimeError", "cuInit failed", "cuda/bindings/driver.pyx:1"),
    ],
)
def test_hidden_devices_explain_whatever_concerns_them(exception: str, message: str, where: str) -> None:
    """With the GPUs hidden a failure over devices says nothing; where they were seen, it counts."""
    evidence = failed(exception, message, where=where, devices_hidden=True)
    finding = judged(with_evidence(evidence))["flashinfer-import-failed"]
    assert (finding.status, finding.reason) == (Status.UNKNOWN, "devices-hidden")
    seen = judged(with_evidence(replace(evidence, devices_hidden=False)))["flashinfer-import-failed"]
    assert seen.status is Status.TRUE
    assert seen.explained_by == (("driver-too-old-for-cuda",) if "driver" in message else ())


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (
            failed(
                "RuntimeError",
                "the runtime does not start",
                cause="RuntimeError: The NVIDIA driver on your system is too old (found version 12040).",
                devices_hidden=False,
            ),
            "driver-too-old-for-cuda",
        ),
        # sgl-project/sglang#4778
        (
            failed("ImportError", "libcuda.so.1: cannot open shared object file: No such file or directory"),
            "libcuda-unusable",
        ),
        (failed("ImportError", "libcudart.so.12: cannot open shared object file: No such file"), None),
    ],
)
def test_what_the_driver_probe_knows_explains_the_failure(evidence: ImportEvidence, cause: str | None) -> None:
    """A failure that follows from the driver or its library is a consequence of the condition that names it."""
    found = judged(with_evidence(evidence))["flashinfer-import-failed"]
    assert (found.status, found.explained_by) == (Status.TRUE, () if cause is None else (cause,))
    assert cause is None or cause in next(one for one in PROBE.conditions if one.code == found.code).depends_on


@pytest.mark.parametrize(
    ("exception", "message"),
    [("SyntaxError", "invalid syntax"), ("ImportError", "x.so: undefined symbol: cudaErrorX")],
)
def test_hidden_devices_do_not_explain_what_is_installed(exception: str, message: str) -> None:
    """A file that does not parse and a symbol that is not there are the same with every GPU in sight."""
    evidence = failed(exception, message, where="torch/cuda/__init__.py:3", devices_hidden=True)
    assert active(with_evidence(evidence))[0] == "flashinfer-import-failed"


# -- what is damaged, and what brings it back ----------------------------------------------------------------

INSTALLED = {"pip": "25.0", "torch": "2.11.0", "apache-tvm-ffi": "0.1.11", "tqdm": "4.67.1", "requests": "2.32.5"}


def of_installed(evidence: ImportEvidence, **changes: Any) -> Any:
    facts = with_evidence(evidence)
    values = {"distributions": INSTALLED, "site_dirs": ("/s",), **changes}
    return judged(replace(facts, environment=replace(facts.environment, **values)))["flashinfer-import-failed"]


@pytest.mark.parametrize("part", ["torch._C", "torch.version"])
def test_a_missing_part_of_a_dependency_is_named(part: str) -> None:
    """`pip install torch` finds torch installed and does nothing; only installing it again brings back a part."""
    found = of_installed(failed("ModuleNotFoundError", f"No module named '{part}'", missing=part))
    assert found.reason == "partial-install"
    assert part in found.message
    assert "-m pip install --force-reinstall --no-deps torch==2.11.0" in found.remedy


def test_a_registered_dependency_is_installed_again() -> None:
    """A dependency whose metadata outlived its files is installed again, and one that is unknown is installed."""
    found = of_installed(failed("ModuleNotFoundError", "No module named 'tqdm'", missing="tqdm"))
    assert "-m pip install --force-reinstall --no-deps tqdm==4.67.1" in found.remedy
    found = of_installed(failed("ModuleNotFoundError", "No module named 'einops'", missing="einops"))
    assert "-m pip install einops" in found.remedy


@pytest.mark.parametrize(
    ("evidence", "reason", "fragment"),
    [
        (failed("SyntaxError", "invalid syntax", where="torch/__init__.py:3"), "corrupt-file", "torch==2.11.0"),
        (failed("OSError", "/s/tvm_ffi/core.so: file too short"), "corrupt-file", "apache-tvm-ffi==0.1.11"),
        (failed("ImportError", "/s/tvm_ffi/core.so: wrong ELF class: ELFCLASS32"), "corrupt-file", "apache-tvm-ffi=="),
        (
            failed(
                "ImportError", "cannot import name 'tqdm' from 'tqdm' (/s/tqdm/__init__.py)", where="flashinfer/x.py:1"
            ),
            "partial-install",
            "tqdm==4.67.1",
        ),
        (failed("RuntimeError", "urllib3 is odd", where="requests/compat.py:3"), "exception", "requests==2.32.5"),
        (
            failed("EOFError", "marshal data too short", where="torch/__init__.py:3"),
            "corrupt-file",
            "compileall -q -f /s",
        ),
        (
            failed("FileNotFoundError", "[Errno 2] No such file or directory: '/s/torch/x'", errno=2, os_error=True),
            "file-system",
            "torch==2.11.0",
        ),
        (
            failed("FileNotFoundError", "[Errno 2] No such file or directory: '/d/x'", errno=2, os_error=True),
            "file-system",
            "See that /d/x is there and can be used",
        ),
        (
            failed("OSError", "[Errno 30] Read-only file system: '/d'", errno=30, os_error=True),
            "file-system",
            "Mount that file system writable",
        ),
        (
            failed("OSError", "[Errno 5] Input/output error: '/s/torch/x.py'", errno=5, os_error=True),
            "file-system",
            "health of the disk or of the network file system",
        ),
        (
            failed("RuntimeError", "no cache", cause="OSError: [Errno 5] Input/output error: '/d'"),
            "file-system",
            "health of the disk",
        ),
        (
            failed("OSError", "[Errno 116] Stale file handle: '/s/torch/x.py'", errno=116, os_error=True),
            "file-system",
            "Mount the network file system again",
        ),
        (
            failed("ImportError", "/s/tvm_ffi/core.so: cannot open shared object file: Input/output error"),
            "file-system",
            "health of the disk",
        ),
        (
            failed("ImportError", "/s/tvm_ffi/core.so: cannot open shared object file: No such file or directory"),
            "partial-install",
            "apache-tvm-ffi==0.1.11",
        ),
        (
            failed(
                "ImportError",
                "Failed to load PyTorch C extensions:\n It appears that PyTorch has loaded the `torch/_C` folder",
                where="torch/__init__.py:1046",
            ),
            "partial-install",
            "torch==2.11.0",
        ),
        (
            failed("PermissionError", "[Errno 13] Denied: '/d'", errno=13, os_error=True),
            "permission",
            "the right to use",
        ),
        (
            failed("ImportError", "/s/tvm_ffi/core.so: cannot open shared object file: Permission denied"),
            "permission",
            "the right to use",
        ),
        (
            failed("OSError", "/s/tvm_ffi/core.so: failed to map segment from shared object", os_error=True),
            "file-system",
            "noexec",
        ),
    ],
    ids=lambda one: one.message[:50] if isinstance(one, ImportEvidence) else None,
)
def test_the_remedy_is_for_what_is_damaged(evidence: ImportEvidence, reason: str, fragment: str) -> None:
    """The kind of a damage and the distribution that owns the damaged file decide on the remedy, not FlashInfer."""
    found = of_installed(evidence)
    assert (found.status, found.reason) == (Status.TRUE, reason)
    assert fragment in found.remedy
    assert "flashinfer-python" not in found.remedy


@pytest.mark.parametrize("exception", ["SyntaxError", "ValueError"])
def test_a_file_of_null_bytes_is_named(exception: str) -> None:
    """Python names the importer of a file with null bytes (python/cpython#96670); the probe, or RECORD, the file."""
    evidence = failed(exception, "source code string cannot contain null bytes", where="flashinfer/__init__.py:3")
    itself = of_installed(replace(evidence, where="tvm_ffi/core.py"))
    assert "The file tvm_ffi/core.py is damaged." in itself.message
    assert "apache-tvm-ffi==0.1.11" in itself.remedy
    damaged = {"apache-tvm-ffi": Damage(resized=1, examples=("tvm_ffi/core.py",))}
    found = of_installed(evidence, damaged=damaged)
    assert "The file tvm_ffi/core.py is damaged." in found.message
    assert "apache-tvm-ffi==0.1.11" in found.remedy
    assert "A file that flashinfer/__init__.py:3 imports is damaged." in of_installed(evidence).message


def test_the_package_itself_shadows_nothing() -> None:
    """Where the files show the package and the import something else, code has replaced it: nothing is moved away."""
    message = "No module named 'flashinfer.mamba'; 'flashinfer' is not a package"
    found = judged(with_evidence(failed("ModuleNotFoundError", message, missing="flashinfer.mamba")))
    finding = found["flashinfer-import-failed"]
    assert (finding.status, finding.reason) == (Status.TRUE, "exception")
    assert "move" not in finding.remedy


# -- by files, with code that runs at start --------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"missing": ("tvm_ffi",)},
        {"missing": ("tqdm",)},
        {"mamba": MambaFiles(state="present", symbol="missing")},
        {"mamba": MambaFiles(state="absent")},
        {"kind": "absent"},
        {"kind": "module", "places": ("/s/flashinfer.py",)},
    ],
    ids=str,
)
def test_code_that_runs_at_start_leaves_absences_open(changes: dict[str, Any]) -> None:
    """scikit-build-core's editable installs put a finder in front of the path (their .pth file names no package)."""
    environment = replace(GOOD, flashinfer=replace(GOOD.flashinfer, **changes))
    hooked = replace(environment, path_code=("_apache_tvm_ffi_editable.pth",))
    assert active(FlashinferFacts(environment=environment, variables={})) != OK
    facts = FlashinferFacts(environment=hooked, variables={})
    assert active(facts) == OK
    assert "module_importable" not in exported(facts)


# -- commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.6.0", "mamba": MambaFiles()},
        {"mamba": MambaFiles(state="present", symbol="missing")},
        {"mamba": MambaFiles(state="invalid-init")},
    ],
    ids=str,
)
def test_a_copy_on_the_path_is_taken_off_it(changes: dict[str, Any]) -> None:
    """Installing does not change what is imported where a folder of PYTHONPATH comes first (site-packages is last)."""
    files = replace(GOOD.flashinfer, places=("/srv/overlay/flashinfer",), **changes)
    environment = replace(GOOD, flashinfer=files, site_dirs=("/venv/site",))
    finding = next(
        one
        for one in causes(FlashinferFacts(environment=environment, variables={})).values()
        if one.status is Status.TRUE
    )
    assert finding.remedy.startswith("Take /srv/overlay out of the server's PYTHONPATH")
    assert "pip install" not in finding.remedy
    usual = replace(environment, flashinfer=replace(files, places=("/venv/site/flashinfer",)))
    finding = next(
        one for one in causes(FlashinferFacts(environment=usual, variables={})).values() if one.status is Status.TRUE
    )
    assert "pip install" in finding.remedy


def test_commands_can_be_pasted_whatever_the_path() -> None:
    """An interpreter's path with spaces or shell syntax is quoted in every command."""
    python = "/opt/my $(touch x)/bin/python"
    environment = replace(GOOD, python=python, flashinfer=FlashInferFiles())
    remedy = judged(FlashinferFacts(environment=environment, variables={}))["flashinfer-not-installed"].remedy
    assert str(remedy).startswith(f"'{python}' -m pip install ")


def test_a_requirement_that_does_not_apply_is_no_pin() -> None:
    """Extras that were not asked for and other processors do not decide on the version that is suggested (PEP 508)."""
    lines = (
        'flashinfer-python==0.2.0; extra == "old"',
        "flashinfer-python==0.3.0; platform_machine == 'riscv64'",
        "flashinfer-python==0.6.14; platform_machine != 'riscv64'",
        "torch==2.11.0",
    )
    environment = replace(GOOD, flashinfer=FlashInferFiles(), requires_of={"sglang": lines})
    remedy = judged(FlashinferFacts(environment=environment, variables={}))["flashinfer-not-installed"].remedy
    assert "install flashinfer-python==0.6.14 " in f"{remedy} "
