"""kernel-wheel-broken: what is told by reading, when an import is run, and what stays unknown for whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.catalog import build, discover
from sidecar.conditions.relevance import effective
from sidecar.config import ImportPolicy, Settings
from sidecar.environment import Damage, DriverLibrary, EnvironmentFacts, KernelFiles, LibraryFile, ModuleFiles
from sidecar.imports import ImportEvidence, ImportOutcome, ImportWork, LibraryLoad
from sidecar.model import (
    Feature,
    Finding,
    Placement,
    Processes,
    Result,
    Scope,
    ServerView,
    Severity,
    Skip,
    Standing,
    Status,
    Target,
    World,
)
from sidecar.nvml.reading import GpuReading, NvmlReading
from sidecar.probes import kernel
from sidecar.probes.kernel import BROKEN, KERNEL_IMPORT, PROBE, KernelFacts, classify, collect, judge, originals

HOPPER, BLACKWELL = (9, 0), (10, 0)
DRIVER = DriverLibrary(found=(LibraryFile(path="/usr/lib/libcuda.so.1", version="580.1"),), path_seen=True)
STUB = DriverLibrary(found=(LibraryFile(path="/usr/local/cuda/lib64/stubs/libcuda.so.1", kind="stub"),))
GOOD = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/venv/bin/python",
    distributions={"sglang": "0.5.16", "sglang-kernel": "0.4.5", "torch": "2.11.0+cu130", "pip": "25.0"},
    requires=("sglang-kernel==0.4.5", "torch==2.11.0"),
    torch_present=True,
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    kernel=KernelFiles(kind="package", folders=("sm100", "sm90")),
    libcuda=DRIVER,
)
OK = ImportEvidence(
    outcome=ImportOutcome.OK,
    at=1.0,
    seconds=5.0,
    versions={"sgl_kernel": "0.4.5", "torch": "2.11.0+cu130"},
    loads=(LibraryLoad("sm90/common_ops.abi3.so"),),
    devices_hidden=True,
)


def facts(evidence: ImportEvidence | None = None, *, importing: bool = False, **changes: Any) -> KernelFacts:
    """Facts of a server whose environment can be seen."""
    own = {name: changes.pop(name) for name in ("gpus", "device", "variables_seen") if name in changes}
    return KernelFacts(
        environment=replace(GOOD, **changes),
        evidence=evidence,
        importing=importing,
        **{"variables_seen": True, **own},
    )


def failed(message: str, **changes: Any) -> ImportEvidence:
    """Evidence of an import that raised."""
    return replace(
        OK, outcome=ImportOutcome.FAILED, exception="ImportError", message=message, step="import", loads=(), **changes
    )


# -- by reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({}, Status.UNKNOWN, "not-imported"),
        ({"libcuda": DriverLibrary()}, Status.UNKNOWN, "no-libcuda"),
        ({"libcuda": STUB}, Status.UNKNOWN, "no-libcuda"),
        ({"problem": "root-unreadable"}, Status.UNKNOWN, "root-unreadable"),
        ({"scope": Scope.SELF}, Status.UNKNOWN, "scope-self"),
        ({"kernel": KernelFiles(), "distributions": {"sglang": "0.5.16"}}, Status.TRUE, "not-installed"),
        ({"kernel": KernelFiles(), "distributions": {"torch": "2.11.0"}}, Status.UNKNOWN, "sglang-not-found"),
        # scikit-build-core's editable installs put a finder in front of the path.
        ({"kernel": KernelFiles(), "path_code": ("finder.pth",)}, Status.UNKNOWN, "start-code"),
        ({"kernel": KernelFiles(kind="namespace"), "path_code": ("finder.pth",)}, Status.UNKNOWN, "start-code"),
        ({"kernel": KernelFiles(kind="package"), "path_code": ("finder.pth",)}, Status.UNKNOWN, "start-code"),
        ({"kernel": KernelFiles(kind="namespace"), "path_code": ("_virtualenv.pth",)}, Status.TRUE, "partial-install"),
        ({"kernel": KernelFiles(), "editable": ("sglang-kernel",)}, Status.UNKNOWN, "editable-install"),
        ({"kernel": KernelFiles(kind="namespace")}, Status.TRUE, "partial-install"),
        ({"kernel": KernelFiles(kind="module")}, Status.TRUE, "partial-install"),
        ({"kernel": KernelFiles(kind="package")}, Status.TRUE, "partial-install"),
        (
            {"damaged": {"sglang-kernel": Damage(missing=1, examples=("sgl_kernel/sm100/common_ops.abi3.so",))}},
            Status.TRUE,
            "partial-install",
        ),
        # What is missing beside the code keeps nothing from being loaded.
        (
            {"damaged": {"sglang-kernel": Damage(missing=1, examples=("sgl_kernel/README.md",))}},
            Status.UNKNOWN,
            "not-imported",
        ),
        (
            {"damaged": {"sglang-kernel": Damage(resized=1, examples=("sgl_kernel/top_k.py",))}},
            Status.UNKNOWN,
            "damaged-package",
        ),
        (
            {"kernel": KernelFiles(kind="package", folders=("sm100",)), "gpus": frozenset({HOPPER})},
            Status.TRUE,
            "wrong-arch-folder",
        ),
        (
            {"kernel": KernelFiles(kind="package", folders=("sm100",)), "gpus": frozenset({HOPPER, BLACKWELL})},
            Status.UNKNOWN,
            "not-imported",
        ),
        # Beside the folders, the loader falls back to a build of no folder.
        (
            {"kernel": KernelFiles(kind="package", folders=("sm100",), plain=True), "gpus": frozenset({HOPPER})},
            Status.UNKNOWN,
            "not-imported",
        ),
    ],
)
def test_reading_tells_what_is_missing(changes: dict[str, Any], status: Status, reason: str) -> None:
    """Without an import only what is not there is a fault; everything else is unknown, with the reason."""
    verdict = classify(facts(**changes))
    assert (verdict.status, verdict.reason, verdict.verified) == (status, reason, False)


def test_nothing_found_nothing_said() -> None:
    """Without an interpreter nothing is known."""
    assert classify(KernelFacts(environment=None)).reason == "no-interpreter"


def test_remedies_are_exact() -> None:
    """The command installs the wheel under the name and in the version that this SGLang pins."""
    missing = classify(facts(kernel=KernelFiles(), distributions={"sglang": "0.5.16", "pip": "25.0"}))
    assert missing.remedy == "/venv/bin/python -m pip install sglang-kernel==0.4.5"
    assert missing.sglang_says == (
        "Exception: sglang-kernel with minimum required version 0.4.5 is not installed. "
        "Please reinstall the latest version with `pip install sglang-kernel --force-reinstall`"
    )
    older = classify(
        facts(
            kernel=KernelFiles(kind="namespace"),
            requires=("sgl-kernel==0.3.9.post2",),
            distributions={"sglang": "0.5.2", "sgl-kernel": "0.3.9.post2", "pip": "25.0"},
        )
    )
    assert older.remedy == ("/venv/bin/python -m pip install --force-reinstall --no-deps sgl-kernel==0.3.9.post2")


def test_a_copy_on_the_path_is_taken_off_it() -> None:
    """Installing the wheel does not change what is imported where a folder of PYTHONPATH comes first."""
    overlay = {"sgl_kernel": ModuleFiles(kind="package", places=("/srv/overlay/sgl_kernel",))}
    found = classify(facts(kernel=KernelFiles(kind="package"), modules=overlay, site_dirs=("/venv/site",)))
    assert str(found.remedy).startswith("take /srv/overlay out of the server's PYTHONPATH")


# -- by importing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (replace(OK, outcome=ImportOutcome.STARVED), "import-starved"),
        (replace(OK, outcome=ImportOutcome.INSUFFICIENT_MEMORY), "insufficient-memory"),
        (replace(OK, outcome=ImportOutcome.NOT_ALLOWED, reason="foreign-root"), "import-not-allowed"),
        (replace(OK, outcome=ImportOutcome.TIMEOUT, stage="import torch"), "import-timeout"),
    ],
)
def test_an_import_that_told_nothing(evidence: ImportEvidence, reason: str) -> None:
    """What kept an import from telling anything is the reason, and never a fault."""
    verdict = classify(facts(evidence))
    assert (verdict.status, verdict.reason) == (Status.UNKNOWN, reason)


def test_the_import_wins_over_reading() -> None:
    """An import that succeeded outweighs a file that RECORD lists and that is not there."""
    damaged = {"sglang-kernel": Damage(missing=1, examples=("sgl_kernel/top_k.py",))}
    assert classify(facts(OK, damaged=damaged)).status is Status.FALSE


def test_hopper_is_not_proven_by_the_other_build() -> None:
    """Where the build for Hopper was not loaded, an import that took the other one leaves it unknown."""
    evidence = replace(OK, loads=())
    assert classify(facts(evidence, gpus=frozenset({HOPPER}))).reason == "build-not-loaded"
    assert classify(facts(evidence, gpus=frozenset({BLACKWELL}))).status is Status.FALSE
    # A loader that sees the GPUs takes the build for them.
    with_devices = replace(evidence, devices_hidden=False)
    assert classify(facts(with_devices, gpus=frozenset({HOPPER}))).status is Status.FALSE


LOADER = """
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: /venv/lib/sgl_kernel/sm100/common_ops.* - found files: ['/venv/lib/x.so']
2. Fallback pattern: /venv/lib/sgl_kernel/common_ops.* - found files: []
3. Standard Python import: common_ops - failed

GPU Info:
- Compute capability: 121
- Expected variant: SM121 (precise math for compatibility)
- CUDA version: 13.0

Please ensure sgl_kernel is properly installed with:
pip install --upgrade sglang-kernel

Error details from previous import attempts:
{details}
"""


@pytest.mark.parametrize(
    ("details", "reason", "part"),
    [
        # sgl-project/sglang#30562: the text speaks of an architecture, the cause is another torch.
        (
            (
                "- ImportError: /venv/lib/sgl_kernel/sm100/common_ops.abi3.so: undefined symbol: "
                "_ZN3c1013MessageLogger6streamB5cxx11Ev\n- ModuleNotFoundError: No module named 'common_ops'"
            ),
            "abi-mismatch",
            "c10::MessageLogger::stream",
        ),
        # sgl-project/sglang#18203
        (
            (
                "- ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"
                "- ModuleNotFoundError: No module named 'common_ops'"
            ),
            "missing-library",
            "libcudart.so.12",
        ),
        # Dao-AILab/flash-attention#879
        (
            (
                "- ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by "
                "/venv/lib/sgl_kernel/sm100/common_ops.abi3.so)"
            ),
            "system-library-too-old",
            "GLIBC_2.38",
        ),
        ("- ImportError: /venv/lib/common_ops.abi3.so: invalid ELF header", "partial-install", "invalid ELF header"),
        ("- RuntimeError: something nobody knows", "other", "Could not load any common_ops"),
    ],
)
def test_the_loaders_text_is_taken_apart(details: str, reason: str, part: str) -> None:
    """The failures that the wheel's loader lists at the end of its text decide, not its first line."""
    verdict = classify(facts(failed(LOADER.format(details=details)), gpus=frozenset({BLACKWELL})))
    assert (verdict.status, verdict.reason) == (Status.TRUE, reason)
    assert part in verdict.message
    assert verdict.sglang_says == "[sgl_kernel] CRITICAL: Could not load any common_ops library!"
    assert f"behind it: {details.splitlines()[0][2:]}" in verdict.evidence


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (
            failed("/v/sgl_kernel/sm100/common_ops.so: undefined symbol: x", withheld=("LD_PRELOAD",)),
            "probe-environment",
        ),
        (replace(failed("no VENDOR_X"), exception="ValueError", withheld=("VENDOR_X",)), "probe-environment"),
        (failed("/t/common_ops.so: failed to map segment from shared object", private=True), "probe-environment"),
        (failed("common_ops.so: cannot open shared object file: Too many open files"), "probe-environment"),
        (replace(failed("Expected at least one GPU"), exception="RuntimeError"), "devices-hidden"),
        (replace(OK, outcome=ImportOutcome.CRASHED, signal="SIGSEGV", withheld=("LD_PRELOAD",)), "probe-environment"),
        (replace(OK, outcome=ImportOutcome.CRASHED, signal="SIGBUS", private=True), "probe-environment"),
    ],
)
def test_what_the_imports_surroundings_explain_is_unknown(evidence: ImportEvidence, reason: str) -> None:
    """What a withheld variable, a folder of the import's own, a shortage or hidden GPUs explain is no fault."""
    verdict = classify(facts(evidence, gpus=frozenset({BLACKWELL})))
    assert (verdict.status, verdict.reason) == (Status.UNKNOWN, reason)


@pytest.mark.parametrize(
    ("message", "reason", "part"),
    [
        ("/v/sgl_kernel/sm100/common_ops.so: file too short", "partial-install", "damaged"),
        ("/v/site-packages/torch/lib/libc10.so: file too short", "other", "torch/lib/libc10.so"),
        (
            "/v/sgl_kernel/sm100/common_ops.so: cannot open shared object file: No such file or directory",
            "partial-install",
            "another kind of machine",
        ),
        ("/v/sgl_kernel/common_ops.so: cannot open shared object file: Input/output error", "other", "does not give"),
        (
            "/v/sgl_kernel/common_ops.so: cannot open shared object file: Permission denied",
            "other",
            "may not be opened",
        ),
        ("/v/sgl_kernel/common_ops.so: failed to map segment from shared object", "other", "executed"),
    ],
)
def test_a_file_that_is_there_is_not_missing(message: str, reason: str, part: str) -> None:
    """What the loader finds and cannot use is told apart from what it does not find."""
    verdict = classify(facts(failed(message), gpus=frozenset({BLACKWELL})))
    assert (verdict.status, verdict.reason) == (Status.TRUE, reason)
    assert part in verdict.message
    if "torch" in message:
        assert verdict.remedy == "/venv/bin/python -m pip install --force-reinstall --no-deps torch==2.11.0+cu130"


def test_what_a_platform_adds_explains_nothing() -> None:
    """Every pod has Kubernetes' own variables, which no import reads: a failure beside them stays a fault."""
    evidence = replace(failed("it broke"), exception="RuntimeError", withheld=("KUBERNETES_SERVICE_HOST", "HF_TOKEN"))
    assert classify(facts(evidence, gpus=frozenset({BLACKWELL}))).status is Status.TRUE


def test_the_pin_is_the_one_that_applies() -> None:
    """A requirement of an extra or for another processor is not what the remedy installs (PEP 508)."""
    lines = ('sglang-kernel==0.1; extra == "old"', "sglang-kernel==0.4.5", "torch==2.11.0")
    verdict = classify(facts(requires=lines, kernel=KernelFiles()))
    assert "sglang-kernel==0.4.5" in str(verdict.remedy)


def test_originals_are_bounded() -> None:
    """However many failures a text lists, a few bounded ones are kept."""
    details = "\n".join(f"- ImportError: {number} {'x' * 1500}" for number in range(50))
    found = originals(failed(LOADER.format(details=details)))
    assert (len(found), max(map(len, found))) == (8, 500)


def test_no_file_in_the_folder() -> None:
    """A loader that found nothing in the folder of these GPUs, beside another folder (sgl-project/sglang#13948)."""
    text = LOADER.replace("['/venv/lib/x.so']", "[]").format(details="- ModuleNotFoundError: No module named 'x'")
    verdict = classify(facts(failed(text), kernel=KernelFiles(kind="package", folders=("sm90",))))
    assert (verdict.reason, verdict.explained_by) == ("wrong-arch-folder", ("gpu-arch-unsupported",))
    assert "holds sm90; its loader looks into sm100 here" in verdict.message


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.TRUE),
        ({"scope": Scope.IMAGE}, Status.UNKNOWN),
        ({"variables_seen": False}, Status.UNKNOWN),
    ],
)
def test_a_crash_counts_only_where_the_import_was_faithful(changes: dict[str, Any], status: Status) -> None:
    """A crash in another container, or without the server's variables, can come from there."""
    evidence = replace(OK, outcome=ImportOutcome.CRASHED, signal="SIGSEGV", stage="import sgl_kernel.load_utils")
    assert classify(facts(evidence, **changes)).status is status
    as_root = replace(evidence, same_user=False)
    assert classify(facts(as_root, **changes)).status is Status.UNKNOWN


# -- for whom ---------------------------------------------------------------------------------------


def world(settings: Settings | None = None, **features: bool) -> World:
    """A judge's world in which the server uses these features."""
    return World(
        standing=Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why=""),
        server=ServerView(features={Feature(name): used for name, used in features.items()}),
        now=0.0,
        settings=settings or Settings(),
    )


def judged(known: KernelFacts, where: World, *required: str) -> tuple[Finding, Severity]:
    """The finding, and the severity that it has in the end."""
    [finding] = judge(Result(probe="kernel", facts=known), where)
    return finding, effective(BROKEN, finding, where.server, required).severity


@pytest.mark.parametrize(
    ("where", "severity"),
    [
        (world(), Severity.INFO),
        (world(gpu=True), Severity.CRITICAL),
        (world(Settings(require=("cuda",))), Severity.CRITICAL),
        (world(Settings(require=("kernel-wheel-broken",))), Severity.CRITICAL),
    ],
)
def test_unknown_counts_only_for_those_who_asked(where: World, severity: Severity) -> None:
    """That nobody imported changes no verdict where nobody counts on CUDA, and is unknown where somebody does."""
    finding, effective_severity = judged(facts(libcuda=DriverLibrary()), where, *where.settings.require)
    assert (finding.status, finding.reason, effective_severity) == (Status.UNKNOWN, "no-libcuda", severity)


def test_a_fault_counts_without_a_server() -> None:
    """Before a launch without flags, a wheel that is not there is critical and gates."""
    finding, severity = judged(facts(kernel=KernelFiles()), world())
    assert (finding.status, severity, finding.gate) == (Status.TRUE, Severity.CRITICAL, None)


def test_a_running_server_settles_what_is_open() -> None:
    """A server that runs on CUDA has loaded the wheel; what reading shows of the files since is not overruled."""
    finding, _ = judged(facts(device="cuda", libcuda=DriverLibrary()), world(gpu=True))
    assert (finding.status, finding.message) == (Status.FALSE, "The running server uses it.")
    gone, _ = judged(facts(device="cuda", kernel=KernelFiles(kind="namespace")), world(gpu=True))
    assert gone.status is Status.TRUE
    # SGLang calls AMD's devices cuda, too.
    amd, _ = judged(facts(device="cuda", torch_hip="6.4", libcuda=DriverLibrary()), world(gpu=True))
    assert amd.status is Status.UNKNOWN


def test_no_facts_no_findings() -> None:
    """Without facts the judge's own reasons stand."""
    assert list(judge(Result(probe="kernel"), world())) == []


# -- what is shown ----------------------------------------------------------------------------------


def test_reasons_are_a_closed_set() -> None:
    """Every token in the code is declared with a meaning, and none is declared that the code never gives."""
    assert all(meaning.endswith(".") for meaning in BROKEN.reasons.values())
    tokens = {
        node.value
        for node in ast.walk(ast.parse(Path(str(kernel.__file__)).read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z]+(-[a-z]+)+", node.value)
    }
    others = {BROKEN.code, *BROKEN.depends_on, "sglang-kernel", "sgl-kernel"}
    from_elsewhere = {"kernel-too-old", "root-unreadable", "crashed", "other"}
    assert tokens - others <= BROKEN.reasons.keys()
    assert BROKEN.reasons.keys() - tokens <= from_elsewhere


def test_samples_and_report() -> None:
    """The module is exported once it is known, and is an entry of its own beside those of other probes."""
    assert {(one.family, one.labels, one.value) for one in PROBE.samples(facts(OK))} == {
        ("module_importable", ("sgl_kernel",), 1.0),
        ("module_import_verified", ("sgl_kernel",), 1.0),
        ("module_import_duration_seconds", ("sgl_kernel",), 5.0),
    }
    assert list(PROBE.samples(facts())) == []
    section = PROBE.report(facts(OK))["modules"]["sgl_kernel"]
    assert (section.importable, section.version, section.devices_hidden) == (True, "0.4.5", True)
    assert section.libraries == {"sm90/common_ops.abi3.so": None}
    broken = PROBE.report(facts(kernel=KernelFiles(kind="namespace")))["modules"]["sgl_kernel"]
    assert (broken.importable, broken.verified, broken.code, broken.reason) == (
        False,
        False,
        "kernel-wheel-broken",
        "partial-install",
    )
    assert PROBE.report(KernelFacts(environment=None)) == {}


def test_the_catalogue_takes_it() -> None:
    """The codes that explain it are declared by others, and the families of modules are shared."""
    catalog = build(discover())
    assert catalog.owner[BROKEN.code] == "kernel"
    assert BROKEN.code in catalog.requirable["cuda"]
    assert [family.name for family in catalog.families].count("module_importable") == 1


# -- collecting -------------------------------------------------------------------------------------


async def collected(
    settings: Settings,
    *,
    launch: dict[str, Any] | None = None,
    device: str | None = None,
    environment: EnvironmentFacts | None = GOOD,
) -> tuple[KernelFacts, list[str]]:
    """What was collected, and what was asked of the importer and the scheduler."""
    asked: list[str] = []
    target = Target(
        url="http://h", url_source="t", scope=Scope.SERVER, python="/p", launch=launch or {}, environ={"PATH": "/bin"}
    )

    async def find() -> Target:
        return target

    async def info(_target: Target) -> Any:
        return None if device is None else SimpleNamespace(device=device, tp_size=None, pp_size=None, dp_size=None)

    async def read(_target: Target) -> EnvironmentFacts:
        if environment is None:
            raise Skip("nothing there")
        return environment

    def request(work: ImportWork, _facts: EnvironmentFacts, _target: Target, done: Callable[[], None]) -> None:
        asked.append(work.module)
        done()

    gpu = GpuReading(index=0, code=0, uuid="GPU-1", compute_capability="9.0")
    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find),
        server=SimpleNamespace(info=info),
        environment=SimpleNamespace(read=read),
        imports=SimpleNamespace(
            importing=lambda _work: False,
            evidence=lambda work, _facts, _target: OK if work == KERNEL_IMPORT else None,
            due=lambda _work, _facts, _target: True,
            request=request,
        ),
        nvml=SimpleNamespace(latest=NvmlReading(code=0, count=1, gpus=(gpu,)), latest_at=0.0),
        standing=world().standing,
        clock=SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 0.0),
        settings=settings,
        imported=asked.append,
    )
    return await collect(services), asked


@pytest.mark.parametrize(
    ("policy", "launch", "device", "require", "wanted"),
    [
        (ImportPolicy.ALWAYS, {}, None, (), True),
        (ImportPolicy.NEVER, {"device": "cuda"}, "cuda", ("cuda",), False),
        (ImportPolicy.AUTO, {}, None, (), False),
        (ImportPolicy.AUTO, {"device": "cpu"}, None, (), False),
        (ImportPolicy.AUTO, {}, "cpu", (), False),
        (ImportPolicy.AUTO, {"device": "cuda"}, None, (), True),
        (ImportPolicy.AUTO, {}, "cuda:0", (), True),
        (ImportPolicy.AUTO, {}, None, ("cuda",), True),
        (ImportPolicy.AUTO, {}, None, ("kernel-wheel-broken",), True),
    ],
)
async def test_when_it_is_imported(
    policy: ImportPolicy, launch: dict[str, Any], device: str | None, require: tuple[str, ...], wanted: bool
) -> None:
    """An import is started exactly when the policy, the flags, the server or a requirement ask for it."""
    found, asked = await collected(Settings(import_policy=policy, require=require), launch=launch, device=device)
    assert asked == (["sgl_kernel", "kernel"] if wanted else [])
    assert found.evidence is OK
    assert found.gpus == {HOPPER}


@pytest.mark.parametrize(
    "changes",
    [
        {"libcuda": DriverLibrary()},
        {"libcuda": STUB},
        {"kernel": KernelFiles()},
        {"kernel": KernelFiles(kind="namespace")},
        {"problem": "root-unreadable"},
    ],
)
async def test_when_an_import_would_tell_nothing(changes: dict[str, Any]) -> None:
    """Without the wheel or without the driver's library nothing is imported, whatever the policy says."""
    settings = Settings(import_policy=ImportPolicy.ALWAYS)
    found, asked = await collected(settings, environment=replace(GOOD, **changes))
    assert (found.evidence, asked) == (None, [])


async def test_without_an_interpreter() -> None:
    """Where no environment was found, the facts say so instead of the probe being skipped."""
    found, asked = await collected(Settings(import_policy=ImportPolicy.ALWAYS), environment=None)
    assert (found.environment, asked) == (None, [])
