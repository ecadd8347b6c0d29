"""The attention probe's judgement over facts: versions, GPUs, modules, evidence of the running server, and display."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sidecar.backends import phases, predict
from sidecar.conditions.relevance import effective
from sidecar.config import Settings
from sidecar.cudalibs import Capability
from sidecar.environment import (
    Damage,
    DriverLibrary,
    EnvironmentFacts,
    KernelFiles,
    LibraryFile,
    ModuleFiles,
)
from sidecar.gpuset import capabilities, server_gpus
from sidecar.imports import ImportEvidence, ImportLink, ImportOutcome
from sidecar.model import (
    Answer,
    Feature,
    Finding,
    Gate,
    Outcome,
    Phase,
    Result,
    Sample,
    Scope,
    ServerView,
    Severity,
    Status,
    World,
)
from sidecar.probes.attention import PROBE, AttentionFacts
from sidecar.probes.attention.facts import ImportState
from sidecar.probes.attention.hardware import backend_fit, fa3_fit, fa4_fit
from sidecar.serverinfo import ServerInfo
from sidecar.target import PREFLIGHT
from tests.builders import HOST
from tests.gpus import gpu as gpu_of
from tests.gpus import reading, target

PINS = (
    "sglang-kernel==0.4.5",
    "torch==2.11.0",
    "flash-attn-4>=4.0.0b18",
    "nvidia-cutlass-dsl[cu13]==4.6.0",
    "quack-kernels>=0.6.1",
    "apache-tvm-ffi==0.1.11",
    "cuda-python>=13.0",
)
VERSIONS = {
    "pip": "25.0",
    "sglang": "0.5.16",
    "sglang-kernel": "0.4.5",
    "torch": "2.11.0",
    "flash-attn-4": "4.0.0b19",
    "nvidia-cutlass-dsl": "4.6.0",
    "nvidia-cutlass-dsl-libs-base": "4.6.0",
    "quack-kernels": "0.6.3",
    "apache-tvm-ffi": "0.1.11",
    "cuda-python": "13.4.4",
    "cuda-bindings": "13.4.4",
}
MODULES = {
    "sgl_kernel": "package",
    "sgl_kernel.flash_attn": "module",
    "sgl_kernel.flash_ops": "extension",
    "sgl_kernel._fa4_interface": "absent",
    "flash_attn": "namespace",
    "flash_attn.cute": "package",
    "flash_attn_2_cuda": "absent",
    "sglang.jit_kernel.flash_attention.cute": "absent",
    "sglang.jit_kernel.flash_attn.cute": "package",
    "sglang.kernels.ops.attention.flash_attn.cute": "absent",
    "cutlass": "package",
    "quack": "package",
    "cuda.bindings": "package",
    "tvm_ffi": "package",
}
LIBCUDA = DriverLibrary(found=(LibraryFile(path="/usr/lib/libcuda.so.1"),), path_seen=True)
GPU = ("0", "GPU-0")
OK = ImportEvidence(outcome=ImportOutcome.OK, at=0.0, seconds=9.0)
FA3, FA4 = {"attention_backend": "fa3"}, {"attention_backend": "fa4"}


def environment(
    kinds: Mapping[str, str] | None = None, versions: Mapping[str, str | None] | None = None, **more: Any
) -> EnvironmentFacts:
    """A full environment of 0.5.16, after changes of module kinds and of versions (None: not installed)."""
    installed = {name: one for name, one in {**VERSIONS, **(versions or {})}.items() if one is not None}
    files = {name: ModuleFiles(kind=kind, places=("/env/x",)) for name, kind in {**MODULES, **(kinds or {})}.items()}
    values: dict[str, Any] = {
        "scope": Scope.SERVER,
        "python": "/env/bin/python",
        "python_version": "3.12.1",
        "distributions": installed,
        "requires": PINS,
        "requires_of": {"sglang": PINS, "flash-attn-4": ("nvidia-cutlass-dsl>=4.5.2", "quack-kernels>=0.5.0")},
        "modules": files,
        "kernel": KernelFiles(kind="package", folders=("sm90", "sm100")),
        "torch_present": True,
        "torch_version": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "libcuda": LIBCUDA,
    }
    return EnvironmentFacts(**{**values, **more})


def facts(
    launch: Mapping[str, Any] | None = None,
    info: ServerInfo | None = None,
    *,
    gpu: Capability | None = (9, 0),
    **more: Any,
) -> AttentionFacts:
    """What is known of a launch with these flags, or of a server with this answer, on one GPU."""
    values: dict[str, Any] = {
        "phases": phases(info, launch),
        "environment": environment(),
        "server_version": None if info is None else info.version,
        "info_seen": info is not None,
        "launch": launch,
        "preflight": launch is not None and info is None,
        "environ_seen": True,
        "gpus": {} if gpu is None else {GPU: gpu},
        "gpus_known": True,
    }
    return AttentionFacts(**{**values, **more})


def judged(one: AttentionFacts, answer: Answer | None = None, *, proof: bool = True) -> dict[str, Finding]:
    """The findings by code."""
    server = ServerView(answer=answer, refusal_is_proof=proof)
    world = World(standing=HOST, server=server, now=0.0, settings=None)
    result: Result[AttentionFacts] = Result(probe="attention", outcome=Outcome.OK, facts=one)
    return {finding.code: finding for finding in PROBE.judge(result, world)}


def running(backend: str = "fa3", version: str = "0.5.16", **more: Any) -> ServerInfo:
    """The answer of a server with this backend."""
    return ServerInfo(version=version, attention_backend=backend, is_vision=False, device="cuda", **more)


def failed(exception: str, message: str, *chain: tuple[str, str], **more: Any) -> ImportEvidence:
    """An import that raised."""
    links = tuple(ImportLink(name, text) for name, text in ((exception, message), *chain))
    values: dict[str, Any] = {"exception": exception, "message": message, "chain": links, "seconds": 5.0}
    return ImportEvidence(outcome=ImportOutcome.FAILED, at=0.0, **{**values, **more})


def state(version: int, evidence: ImportEvidence) -> dict[int, ImportState]:
    """That import as what is known of a version's module."""
    return {version: ImportState(evidence=evidence)}


# -- versions that are asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "invalid", "ineffective"),
    [
        (None, None, False),
        ("", None, False),
        ("0", None, False),
        ("5", "variable-out-of-range", False),
        ("1", "variable-out-of-range", False),
        ("-3", "variable-out-of-range", False),
        ("fa3", "variable-not-a-number", False),
        ("3.0", "variable-not-a-number", False),
        ("2", None, True),
        ("3", None, True),
        ("4", None, True),
    ],
)
def test_an_override_that_nobody_reads_is_named(value: str | None, invalid: str | None, ineffective: bool) -> None:
    """Outside 2, 3, 4 it is invalid, inside ineffective; both are warnings that never gate. Empty and 0 are unset."""
    found = judged(facts(FA3, override=value))
    version, override = found["fa-version-invalid"], found["fa-override-ineffective"]
    assert (version.reason, override.status is Status.TRUE) == (invalid, ineffective)
    if invalid:
        assert (version.severity, version.gate) == (Severity.WARNING, Gate.NEVER)
        assert version.remedy is not None
        assert version.remedy.count("`unset SGLANG_FLASHATTENTION_VERSION`")


def test_an_override_of_five_quotes_the_error_it_is_known_for() -> None:
    """The sentence by which people look for it is there, and that this SGLang does not print it."""
    found = judged(facts(FA3, override="5"))["fa-version-invalid"]
    assert "`Invalid version: self.fa_impl_ver=5`" in found.message
    assert "No release of SGLang reads it" in found.message
    assert found.sglang_says is None


@pytest.mark.parametrize("value", ["2", "5", "0", "x"])
def test_a_refused_fa_impl_ver_is_critical(value: str) -> None:
    """A key that reaches SGLang's constructor stops it: its own sentence, full severity, final at once.

    sgl-project/sglang#22028: only 3 and 4 are taken, and version 2 is not served by that class.
    """
    found = judged(facts(FA3, declared={"flags": value}))["fa-version-invalid"]
    assert (found.status, found.reason, found.severity) == (Status.TRUE, "impl-version-refused", None)
    assert found.sglang_says == f"Invalid version: self.fa_impl_ver={value}"
    assert found.final


@given(st.text(), st.text())
def test_any_value_is_judged(override: str, declared: str) -> None:
    """Whatever somebody set is judged: invalid, ineffective or unset, and never a fault of the judgement."""
    found = judged(facts(FA3, override=override, declared={"flags": declared}))
    version = found["fa-version-invalid"]
    assert (version.status is Status.FALSE) is (declared in {"3", "4"} and version.reason is None)
    assert found["fa-override-ineffective"].status in {Status.TRUE, Status.FALSE}


def test_a_key_outweighs_the_variable() -> None:
    """One finding per condition: what stops SGLang comes before what it ignores."""
    found = judged(facts(FA3, declared={"server-info": "2"}, override="7"))["fa-version-invalid"]
    assert found.reason == "impl-version-refused"


@pytest.mark.parametrize("value", ["3", "4"])
def test_accepted_versions_are_fine(value: str) -> None:
    """3 and 4 are what the class takes."""
    assert judged(facts(FA3, declared={"flags": value}))["fa-version-invalid"].status is Status.FALSE


@pytest.mark.parametrize(
    ("version", "launch", "reason"),
    [
        ("0.5.2", FA4, "not-in-release"),
        ("0.5.2", FA3, None),
        ("0.5.5.post3", FA4, "prefill-only"),
        ("0.5.5.post3", {"prefill_attention_backend": "fa4", "decode_attention_backend": "fa3"}, None),
        ("0.5.8.post1", FA4, None),
        ("0.5.16", FA4, None),
    ],
)
def test_fa4_is_refused_by_releases_without_it(version: str, launch: dict[str, Any], reason: str | None) -> None:
    """It came with 0.5.3, and for decoding with 0.5.8."""
    one = facts(launch, environment=environment(versions={"sglang": version}))
    found = judged(one)["fa-version-invalid"]
    assert found.reason == reason
    assert (found.sglang_says is not None) is (reason is not None)


def test_a_declared_version_before_there_was_a_choice_is_invalid() -> None:
    """Releases before 0.5.3 have no fa_impl_ver at all."""
    one = facts(FA3, declared={"flags": "3"}, environment=environment(versions={"sglang": "0.5.2"}))
    assert judged(one)["fa-version-invalid"].reason == "not-in-release"


def test_unseen_variables_are_unknown_without_weight() -> None:
    """Nothing is claimed of a variable that cannot be seen, and that it cannot be changes nobody's verdict."""
    found = judged(facts(FA3, environ_seen=False))
    assert found["fa-override-ineffective"].status is Status.UNKNOWN
    assert found["fa-override-ineffective"].severity is Severity.INFO
    assert "cannot be seen" in found["fa-version-invalid"].message


# -- GPUs -----------------------------------------------------------------------------------------------

CARDS = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
TABLE: dict[str, str] = {
    # one letter per card: y runs, n refused, ? not known
    "fa3": "nn???ynnnnnn",
    "fa3, vision": "nnyyyynnnnnn",
    "fa3, server answers": "nnyyyynnnnnn",
    "fa4, 0.5.5": "nnnnnyyynnn?",
    "fa4, 0.5.9": "nnnnnyyyynn?",
    "fa4, 0.5.15": "nn???yyy????",
    "fa4, 0.5.16": "nnyyyyyyyyy?",
    "fa4, 0.5.23": "nnyyyyyyyyy?",
    "fa4, unknown release": "nn???yyy????",
}


@pytest.mark.parametrize(("row", "expected"), TABLE.items())
def test_the_table_of_gpus(row: str, expected: str) -> None:
    """7.x, 8.x, 9.0, 10.0, 10.3, 11.0, 12.0 and 12.1 are judged apart, by release, with a rule of our own.

    sgl-project/sglang#12360, #35080, #20709, #9140, #931; gpustack/gpustack#3326: "sm90 and above" is not the rule.
    """
    version, _, variant = row.partition(", ")

    def runs(card: Capability) -> bool | None:
        if version == "fa3":
            phase = Phase.VISION if variant == "vision" else Phase.DECODE
            return fa3_fit(card, phase, (13, 0), answers=variant == "server answers").runs
        release = None if variant == "unknown release" else tuple(map(int, variant.split(".")))
        return fa4_fit(card, release).runs  # type: ignore[arg-type]

    shown = "".join({True: "y", False: "n", None: "?"}[runs(card)] for card in CARDS)
    assert shown == expected


@pytest.mark.parametrize(
    ("cuda", "runs"), [((12, 1), False), ((12, 3), True), ((12, 10), True), ((13, 0), True), (None, True)]
)
def test_cuda_versions_are_compared_as_numbers(cuda: tuple[int, int] | None, runs: bool) -> None:
    """The kernel wheel compares texts, by which 12.10 is older than 12.3; what is meant is judged.

    gpustack/gpustack#3326
    """
    assert fa3_fit((9, 0), Phase.DECODE, cuda, answers=False).runs is runs


@pytest.mark.parametrize(
    ("gpu", "reason", "says", "instead"),
    [
        ((10, 0), "above-sm90", "FlashAttention v3 Backend requires SM>=80 and SM<=90.", "fa4"),
        ((10, 3), "above-sm90", "FlashAttention v3 Backend requires SM>=80 and SM<=90.", "fa4"),
        ((12, 0), "above-sm90", "FlashAttention v3 Backend requires SM>=80 and SM<=90.", "flashinfer"),
        ((7, 5), "below-sm80", "FlashAttention v3 Backend requires SM>=80 and SM<=90.", "triton"),
    ],
)
def test_fa3_on_the_wrong_gpu(gpu: Capability, reason: str, says: str, instead: str) -> None:
    """The GPU and its capability are named, SGLang's sentence is quoted, and a backend that runs is proposed.

    sgl-project/sglang#12360, sgl-project/sglang#931
    """
    found = judged(facts(FA3, gpu=gpu))["fa3-unsupported-gpu"]
    assert (found.status, found.reason, found.gpus) == (Status.TRUE, reason, (GPU,))
    assert found.sglang_says is not None
    assert found.sglang_says.startswith(says)
    assert f"{gpu[0]}.{gpu[1]}" in found.message
    assert "and above" not in found.message
    assert found.remedy is not None
    assert f"--attention-backend {instead}" in found.remedy


def test_fa3_for_vision_has_a_sentence_of_its_own() -> None:
    """The vision tower refuses Blackwell with other words than the language model does."""
    found = judged(facts({"mm_attention_backend": "fa3", "attention_backend": "triton"}, gpu=(10, 0)))
    assert found["fa3-unsupported-gpu"].sglang_says == "The 'fa3' backend is not supported on Blackwell GPUs"


def test_one_of_several_gpus_weighs_less_while_the_set_is_unknown() -> None:
    """Which GPUs are the server's decides: unknown, a GPU that refuses is a warning; known, it stops the launch."""
    mixed = {("0", "GPU-0"): (9, 0), ("1", "GPU-1"): (12, 0)}
    unknown = judged(facts(FA3, gpus=mixed, gpus_known=False))["fa3-unsupported-gpu"]
    known = judged(facts(FA3, gpus=mixed, gpus_known=True))["fa3-unsupported-gpu"]
    assert (unknown.status, unknown.severity, unknown.gate) == (Status.TRUE, Severity.WARNING, Gate.NEVER)
    assert (known.status, known.severity, known.gpus) == (Status.TRUE, None, (("1", "GPU-1"),))


def test_a_gpu_that_the_launch_leaves_free_is_not_judged() -> None:
    """One rank on a Hopper GPU beside a Blackwell one runs fa3: what the other GPU refuses concerns nobody."""
    one, launch = reading(gpu_of(0), gpu_of(1, compute_capability="12.0")), {"attention_backend": "fa3"}
    more: dict[str, Any] = {"launch_source": PREFLIGHT, "launch": launch, "root": None, "pid": None}
    gpus = server_gpus(Settings(), target({}, **more), one, HOST, None)
    found = judged(facts(launch, gpus=capabilities(one, gpus), gpus_known=gpus.known))["fa3-unsupported-gpu"]
    assert (gpus.known, found.status) == (True, Status.FALSE)


def test_without_a_gpu_in_sight_the_rules_are_unknown() -> None:
    """No capability, no verdict; a server that answers has passed the check."""
    assert judged(facts(FA3, gpu=None))["fa3-unsupported-gpu"].reason == "gpus-unknown"
    passed = judged(facts(None, running(), gpu=None), Answer.ACCEPTED)["fa3-unsupported-gpu"]
    assert passed.status is Status.FALSE


BACKENDS: dict[tuple[str, str, str], str] = {
    ("trtllm_mha", "0.5.16", "prefill"): "nnnnnnyynnn?",
    ("trtllm_mha", "0.5.16", "decode"): "nnnnnyyynyy?",
    ("trtllm_mha", "0.5.5", "decode"): "nnnnnnyynnn?",
    ("trtllm_mha", "0.5.12", "decode"): "nnnnn?yy????",
    ("trtllm_mha", "0.5.23", "prefill"): "nnnnnnyy????",
    ("trtllm_mla", "0.5.16", "decode"): "nnnnnnyyyyy?",
    ("trtllm_mla", "0.5.16", "prefill"): "yyyyyyyyyyyy",
    ("cutedsl_mla", "0.5.16", "decode"): "nnnnnnyynnnn",
    ("flashinfer", "0.5.16", "decode"): "nyyyyyyyyyyy",
    ("triton", "0.5.16", "decode"): "yyyyyyyyyyyy",
}


@pytest.mark.parametrize(("key", "expected"), BACKENDS.items())
def test_backends_without_flash_attention_have_gpus_too(key: tuple[str, str, str], expected: str) -> None:
    """TensorRT-LLM's, CuTe DSL's and FlashInfer's own limits, by release and phase.

    flashinfer-ai/flashinfer#1115: below 7.5 FlashInfer refuses.
    """
    backend, version, phase = key
    release = (0, 5, int(version.rsplit(".", 1)[1]))
    fits = (backend_fit(backend, Phase(phase), card, release, (13, 0)).runs for card in CARDS)
    assert "".join({True: "y", False: "n", None: "?"}[runs] for runs in fits) == expected


def test_a_blackwell_gpu_with_an_older_cuda_is_not_recognized() -> None:
    """SGLang asks torch for CUDA 12.8 before it calls a GPU Blackwell."""
    assert backend_fit("trtllm_mha", Phase.PREFILL, (10, 0), (0, 5, 16), (12, 6)).runs is False


def test_trtllm_on_hopper_is_the_recorded_failure() -> None:
    """A launch on an H200 died after 20 s with this very sentence."""
    found = judged(facts({"attention_backend": "trtllm_mha"}))["attention-backend-unsupported-gpu"]
    assert (found.status, found.reason) == (Status.TRUE, "trtllm-mha-needs-blackwell")
    assert found.sglang_says == (
        "TRTLLM MHA backend for prefill is only supported on Blackwell GPUs (SM100). "
        "Please use a different prefill backend."
    )


# -- modules --------------------------------------------------------------------------------------------


def test_a_wheel_without_flash_ops_is_found_by_reading() -> None:
    """The cause that SGLang's sentence hides is told, with that sentence and a repair.

    sgl-project/sglang#9309, sgl-project/sglang#22306
    """
    found = judged(facts(FA3, environment=environment({"sgl_kernel.flash_ops": "absent"})))["fa3-not-importable"]
    assert (found.status, found.reason) == (Status.TRUE, "flash-ops-missing")
    assert "cannot import name 'flash_ops' from 'sgl_kernel'" in found.message
    assert found.sglang_says == "Can not import FA3 in sgl_kernel. Please check your installation."
    assert found.remedy is not None
    assert "sglang-kernel==0.4.5" in found.remedy
    assert found.explained_by == ()


def test_without_the_kernel_wheel_the_wheel_is_the_cause() -> None:
    """More than FlashAttention is missing then, and the wheel has a condition of its own."""
    one = environment(
        {"sgl_kernel": "absent", "sgl_kernel.flash_attn": "absent", "sgl_kernel.flash_ops": "absent"},
        {"sglang-kernel": None},
        kernel=KernelFiles(),
    )
    found = judged(facts(FA3, environment=one))["fa3-not-importable"]
    assert (found.reason, found.explained_by) == ("module-missing", ("kernel-wheel-broken",))


@pytest.mark.parametrize(
    ("evidence", "reason", "explained_by"),
    [
        (
            failed(
                "ImportError",
                "Can not import FA3 in sgl_kernel. Please check your installation.",
                ("ImportError", "cannot import name 'flash_ops' from 'sgl_kernel' (/env/sgl_kernel/__init__.py)"),
            ),
            "flash-ops-missing",
            (),
        ),
        (
            failed(
                "ImportError",
                "Can not import FA3 in sgl_kernel. Please check your installation.",
                ("ImportError", "/env/sgl_kernel/flash_ops.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"),
            ),
            "abi-mismatch",
            (),
        ),
        (
            failed(
                "ImportError",
                "Can not import FA3 in sgl_kernel. Please check your installation.",
                ("ImportError", "libcudart.so.12: cannot open shared object file: No such file or directory"),
            ),
            "shared-library-missing",
            (),
        ),
        (
            failed("ImportError", "[sgl_kernel] CRITICAL: Could not load any common_ops library!"),
            "kernel-wheel-broken",
            ("kernel-wheel-broken", "libcuda-unusable"),
        ),
        (failed("AttributeError", "no such thing", step="symbol"), "symbol-missing", ()),
        (failed("SyntaxError", "invalid syntax"), "corrupt-file", ()),
        (failed("ValueError", "something else"), "exception", ()),
        (ImportEvidence(outcome=ImportOutcome.CRASHED, at=0.0, signal="SIGSEGV", stage="torch"), "crashed", ()),
    ],
)
def test_the_cause_behind_a_failed_import_is_recovered(
    evidence: ImportEvidence, reason: str, explained_by: tuple[str, ...]
) -> None:
    """A bare except hides it from SGLang's message; the chain of exceptions still has it.

    sgl-project/sglang#9309, sgl-project/sglang#22306
    """
    found = judged(facts(FA3, imports=state(3, evidence)))["fa3-not-importable"]
    assert (found.status, found.reason, found.explained_by, found.final) == (Status.TRUE, reason, explained_by, True)


def test_nested_texts_of_the_wheels_loader_name_no_cause() -> None:
    """Its message quotes a dozen failures, of modules too; the wheel's own condition takes it apart."""
    text = "[sgl_kernel] CRITICAL: Could not load any common_ops library!\\n- ImportError: No module named 'common_ops'"
    found = judged(facts(FA3, imports=state(3, failed("ImportError", text))))["fa3-not-importable"]
    assert (found.reason, found.explained_by) == ("kernel-wheel-broken", ("kernel-wheel-broken", "libcuda-unusable"))


@pytest.mark.parametrize(
    "evidence",
    [
        failed("ImportError", "libcudart.so.12: cannot open shared object file: No such file or directory"),
        failed("PermissionError", "[Errno 13] Permission denied: '/root/.cache'", os_error=True),
        failed("RuntimeError", "No CUDA GPUs are available"),
        ImportEvidence(outcome=ImportOutcome.CRASHED, at=0.0, exit_code=3),
    ],
)
def test_what_this_container_can_explain_is_unknown(evidence: ImportEvidence) -> None:
    """In another container than the server's, such a failure says nothing of the server."""
    one = facts(FA3, environment=environment(scope=Scope.IMAGE), environ_seen=False, imports=state(3, evidence))
    assert judged(one)["fa3-not-importable"].status is Status.UNKNOWN


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        # ld.so(8): a preloaded library may bring a symbol.
        (failed("ImportError", "/s/a.so: undefined symbol: x", withheld=("LD_PRELOAD",)), "probe-environment"),
        (failed("ValueError", "something else", withheld=("VENDOR_LICENSE",)), "probe-environment"),
        (failed("OSError", "/t/a.so: failed to map segment from shared object", private=True), "probe-environment"),
        (failed("OSError", "[Errno 24] Too many open files: '/s/a.py'", errno=24, os_error=True), "probe-environment"),
        (failed("RuntimeError", "Expected at least one GPU"), "devices-hidden"),
        (ImportEvidence(outcome=ImportOutcome.CRASHED, at=0.0, exit_code=3, withheld=("X",)), "probe-environment"),
        (
            ImportEvidence(outcome=ImportOutcome.CRASHED, at=0.0, signal="SIGSEGV", withheld=("LD_PRELOAD",)),
            "probe-environment",
        ),
        (ImportEvidence(outcome=ImportOutcome.CRASHED, at=0.0, signal="SIGBUS", private=True), "probe-environment"),
    ],
)
def test_what_the_imports_surroundings_explain_is_unknown(evidence: ImportEvidence, reason: str) -> None:
    """What was withheld, a folder of the import's own, a shortage or hidden GPUs explain is no fault of the server."""
    found = judged(facts(FA4, imports=state(4, evidence)))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.UNKNOWN, reason)


@pytest.mark.parametrize(
    ("evidence", "reason", "said", "remedy"),
    [
        (
            failed("ImportError", "/s/site-packages/tvm_ffi/core.so: file too short"),
            "corrupt-file",
            "tvm_ffi/core.so is damaged",
            "--force-reinstall --no-deps apache-tvm-ffi==0.1.11",
        ),
        (
            failed("ImportError", "/s/site-packages/tvm_ffi/core.so: cannot open shared object file: No such file"),
            "corrupt-file",
            "is not there, or is built for another kind of machine",
            "apache-tvm-ffi==0.1.11",
        ),
        (
            failed("ImportError", "/s/a/b.so: cannot open shared object file: Permission denied"),
            "permission",
            "a/b.so is there and may not be opened",
            "the right to read that file",
        ),
        (
            failed("ImportError", "/s/a/b.so: cannot open shared object file: Input/output error"),
            "file-system",
            "the file system does not give it",
            "health of the disk",
        ),
        (
            failed("ImportError", "/s/a/b.so: failed to map segment from shared object"),
            "file-system",
            "nothing may be executed",
            "noexec",
        ),
        # Dao-AILab/flash-attention#879
        (
            failed("ImportError", "/l/libc.so.6: version `GLIBC_2.38' not found (required by /s/a/b.so)"),
            "abi-mismatch",
            "a/b.so needs GLIBC_2.38",
            "a newer distribution",
        ),
        (
            failed("PermissionError", "[Errno 13] Permission denied: '/s/x'", errno=13, os_error=True),
            "permission",
            "Permission denied: '/s/x'",
            "the right to use",
        ),
        (
            failed("OSError", "[Errno 5] Input/output error: '/s/x'", errno=5, os_error=True),
            "file-system",
            "I/O error",
            "health of the disk",
        ),
        (
            failed("SyntaxError", "invalid syntax", where="quack/x.py:3"),
            "corrupt-file",
            "The file quack/x.py:3 is damaged",
            "--force-reinstall --no-deps quack-kernels==0.6.3",
        ),
        (
            failed("SyntaxError", "source code string cannot contain null bytes", where="cutlass/x.py"),
            "corrupt-file",
            "The file cutlass/x.py is damaged",
            "nvidia-cutlass-dsl==4.6.0 nvidia-cutlass-dsl-libs-base==4.6.0",
        ),
        (failed("RuntimeError", "cannot build", step="symbol"), "exception", "cannot build", ""),
        # What a platform adds to every process explains nothing.
        (failed("ValueError", "odd", withheld=("KUBERNETES_SERVICE_HOST", "HF_TOKEN")), "exception", "odd", ""),
    ],
    ids=lambda one: one.message[:40] if isinstance(one, ImportEvidence) else None,
)
def test_faults_of_files_are_told_apart(evidence: ImportEvidence, reason: str, said: str, remedy: str) -> None:
    """What the loader or the system finds and cannot use is neither missing nor built for another version."""
    found = judged(facts(FA4, imports=state(4, evidence)))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.TRUE, reason)
    assert said in found.message
    assert remedy in str(found.remedy)


@pytest.mark.parametrize(
    ("number", "kinds"),
    [(3, {"sgl_kernel.flash_ops": "absent"}), (4, {"cutlass": "absent"}), (4, {"flash_attn.cute": "hidden"})],
)
def test_code_that_runs_at_start_leaves_absences_open(number: int, kinds: dict[str, str]) -> None:
    """Code of a .pth file may bring what reading does not find: unknown then, with what was seen."""
    launch = {3: FA3, 4: FA4}[number]
    versions = {"sglang": "0.5.15"} if "flash_attn.cute" in kinds else {}
    plain = judged(facts(launch, environment=environment(kinds, versions)))[f"fa{number}-not-importable"]
    hooked = environment(kinds, versions, path_code=("_editable.pth",))
    found = judged(facts(launch, environment=hooked))[f"fa{number}-not-importable"]
    assert plain.status is Status.TRUE
    assert (found.status, found.reason) == (Status.UNKNOWN, "start-code")
    assert found.message == plain.message


def test_the_pin_is_the_one_that_applies() -> None:
    """A requirement of an extra or for another processor is not what the remedy installs (PEP 508)."""
    lines = (
        'quack-kernels==0.1; extra == "old"',
        "quack-kernels==0.2; platform_machine == 'riscv64'",
        "quack-kernels==0.6.1; platform_machine != 'riscv64'",
        "torch==2.11.0",
    )
    gone = environment({"quack": "absent"}, {"quack-kernels": None}, requires_of={"sglang": lines})
    found = judged(facts(FA4, environment=gone))["fa4-not-importable"]
    assert found.remedy == "/env/bin/python -m pip install quack-kernels==0.6.1"


def test_a_verified_import_is_fine() -> None:
    """An import that succeeded settles it, in whatever container of the image it ran."""
    one = facts(FA3, environment=environment(scope=Scope.IMAGE), imports=state(3, OK))
    found = judged(one)["fa3-not-importable"]
    assert (found.status, found.final) == (Status.FALSE, True)


def test_reading_alone_does_not_call_it_importable() -> None:
    """Files that are all there are no proof; why no import was run is told apart."""
    without = environment(libcuda=DriverLibrary(path_seen=True))
    reasons = {
        judged(facts(FA3))["fa3-not-importable"].reason,
        judged(facts(FA3, environment=without))["fa3-not-importable"].reason,
        judged(facts(FA3, imports={3: ImportState(pending=True)}))["fa3-not-importable"].reason,
        judged(facts(FA3, environment=replace(without, modules={})))["fa3-not-importable"].reason,
        judged(facts(FA3, environment=None))["fa3-not-importable"].reason,
        judged(facts(FA3, environment=environment(scope=Scope.SELF)))["fa3-not-importable"].reason,
    }
    assert reasons == {
        "not-imported",
        "no-libcuda",
        "import-pending",
        "files-unread",
        "no-interpreter",
        "scope-self",
    }


def test_all_missing_dependencies_of_fa4_are_named_at_once() -> None:
    """People met cutlass, then quack, then tvm_ffi, one failure after another; here all come in one command.

    Dao-AILab/flash-attention#2234, Dao-AILab/flash-attention#2205, PrimeIntellect-ai/prime-rl#1945
    """
    gone = {"cutlass": "absent", "quack": "absent", "tvm_ffi": "absent", "cuda.bindings": "absent"}
    names = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "cuda-python", "cuda-bindings")
    one = environment(gone, dict.fromkeys(names))
    found = judged(facts(FA4, environment=one))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.TRUE, "missing-dependency")
    assert all(module in found.message for module in gone)
    assert found.remedy == (
        "/env/bin/python -m pip install 'nvidia-cutlass-dsl[cu13]==4.6.0' 'cuda-python>=13.0' "
        "'quack-kernels>=0.6.1' apache-tvm-ffi==0.1.11"
    )


def test_an_import_names_the_rest_that_reading_finds() -> None:
    """Python names the first missing module only; the others are added from the files."""
    gone = environment({"quack": "absent", "tvm_ffi": "absent"}, {"quack-kernels": None, "apache-tvm-ffi": None})
    evidence = failed("ModuleNotFoundError", "No module named 'quack'", missing="quack")
    found = judged(facts(FA4, environment=gone, imports=state(4, evidence)))["fa4-not-importable"]
    assert found.final
    assert all(name in found.message for name in ("quack-kernels is not installed", "apache-tvm-ffi is not installed"))


def test_a_module_of_another_package_is_that_packages() -> None:
    """What the provider's own parent packages import belongs to a distribution of its name, not to the provider."""
    evidence = failed("ModuleNotFoundError", "No module named 'orjson'", missing="orjson")
    found = judged(facts(FA4, environment=environment(), imports=state(4, evidence)))["fa4-not-importable"]
    assert "orjson (orjson is not installed)" in found.message
    assert found.remedy == "/env/bin/python -m pip install orjson"


def test_a_part_that_another_version_has_is_no_missing_package() -> None:
    """The DSL is there without a submodule that FlashAttention expects: the pair does not fit, and both are named.

    Dao-AILab/flash-attention#2234
    """
    evidence = failed("ModuleNotFoundError", "No module named 'cutlass.utils.ampere_helpers'")
    old = environment(versions={"nvidia-cutlass-dsl": "4.4.1"})
    found = judged(facts(FA4, environment=old, imports=state(4, evidence)))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.TRUE, "missing-dependency")
    assert "cutlass.utils.ampere_helpers, which nvidia-cutlass-dsl 4.4.1 does not have" in found.message
    assert found.evidence[0] == "sglang asks for nvidia-cutlass-dsl==4.6.0, 4.4.1 is installed"
    assert found.remedy is not None
    assert "'nvidia-cutlass-dsl[cu13]==4.6.0'" in found.remedy


def test_cutlass_off_the_path_is_not_cutlass_uninstalled() -> None:
    """The distribution is there and its .pth file was not processed; the versions of its parts are shown.

    NVIDIA/cutlass#3001, NVIDIA/cutlass#3034, vllm-project/vllm#43738
    """
    found = judged(facts(FA4, environment=environment({"cutlass": "absent"})))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.TRUE, "cutlass-path-missing")
    assert "nvidia-cutlass-dsl 4.6.0, nvidia-cutlass-dsl-libs-base 4.6.0" in found.evidence
    assert found.remedy is not None
    assert "nvidia-cutlass-dsl==4.6.0 nvidia-cutlass-dsl-libs-base==4.6.0" in found.remedy


def test_an_import_is_no_proof_for_a_pair_that_metadata_rules_out() -> None:
    """Its kernels are compiled at the first call: importable, and still unknown, with what was asked and what is there.

    hao-ai-lab/FastVideo#1558, jd-opensource/JoyAI-Video-Edit#6, Dao-AILab/flash-attention#2089
    """
    old = environment(versions={"nvidia-cutlass-dsl": "4.4.1"})
    found = judged(facts(FA4, environment=old, imports=state(4, OK)))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.UNKNOWN, "untested-pair")
    assert "sglang asks for nvidia-cutlass-dsl==4.6.0, 4.4.1 is installed" in found.message
    ran = facts(None, running("fa4"), environment=old, imports=state(4, OK), ran=True)
    assert judged(ran, Answer.ACCEPTED)["fa4-not-importable"].status is Status.FALSE


def test_a_flash_attn_elsewhere_hides_version_4() -> None:
    """A regular package on another entry of the path shadows the namespace that flash-attn-4 shares."""
    one = environment({"flash_attn": "package", "flash_attn.cute": "hidden"}, {"sglang": "0.5.15"})
    found = judged(facts(FA4, environment=one))["fa4-not-importable"]
    assert (found.status, found.reason) == (Status.TRUE, "hidden-by-flash-attn")


@pytest.mark.parametrize(
    ("version", "from_pip", "module", "says"),
    [
        ("0.5.2", False, None, None),
        ("0.5.5.post3", False, "sgl_kernel._fa4_interface", "FA4 is not available"),
        ("0.5.9", False, "sglang.jit_kernel.flash_attention.cute", "sglang.jit_kernel.flash_attention.cute)"),
        ("0.5.10.post1", False, "flash_attn.cute", "(cannot import flash_attn.cute)"),
        ("0.5.15", False, "flash_attn.cute", "(cannot import flash_attn.cute)"),
        ("0.5.16", False, "sglang.jit_kernel.flash_attn.cute", "FlashAttention-4 CUTE is not available."),
        ("0.5.16", True, "flash_attn.cute", "FlashAttention-4 CUTE is not available."),
        ("0.5.17", False, "sglang.kernels.ops.attention.flash_attn.cute", "FlashAttention-4 CUTE is not available."),
        ("0.5.23", True, "sglang.kernels.ops.attention.flash_attn.cute", "FlashAttention-4 CUTE is not available."),
        ("next", False, None, None),
    ],
)
def test_version_4_comes_from_elsewhere_in_each_release(
    version: str, from_pip: bool, module: str | None, says: str | None
) -> None:
    """The module that is judged, and the sentence that SGLang prints, are those of the installed release."""
    gone = environment(dict.fromkeys(MODULES, "absent"), {"sglang": version})
    one = facts({"prefill_attention_backend": "fa4"}, environment=gone, from_pip=from_pip)
    section = PROBE.report(one)["flash_attention"]["4"]
    found = judged(one)["fa4-not-importable"]
    assert section.module == module
    assert (says is None) == (found.sglang_says is None)
    assert says is None or (found.sglang_says is not None and says in found.sglang_says)


@pytest.mark.parametrize(
    ("kinds", "versions", "installed"),
    [
        ({}, {}, False),
        ({"flash_attn": "package"}, {}, False),
        ({"flash_attn": "package", "flash_attn_2_cuda": "extension"}, {"flash-attn": "2.8.3"}, True),
    ],
)
def test_version_2_is_not_concluded_from_version_4(
    kinds: dict[str, str], versions: dict[str, str], installed: bool
) -> None:
    """flash-attn-4 alone leaves a bare flash_attn, which is importable and is no FlashAttention 2.

    huggingface/transformers#44559
    """
    section = PROBE.report(facts(FA4, environment=environment(kinds, versions)))["flash_attention"]["2"]
    assert section.installed is installed


def test_a_broken_version_2_concerns_nobody() -> None:
    """SGLang runs no FlashAttention 2, so that its extension's ABI break activates nothing.

    sgl-project/sglang#851, Dao-AILab/flash-attention#1832, Dao-AILab/flash-attention#966
    """
    one = environment(
        {"flash_attn": "package", "flash_attn_2_cuda": "extension"},
        {"flash-attn": "2.7.4+cu121torch2.5cxx11abiFALSE"},
        damaged={"flash-attn": Damage(missing=3)},
    )
    found = judged(facts(FA3, environment=one, imports=state(3, OK)))
    assert not [finding.code for finding in found.values() if finding.status is Status.TRUE]


# -- a running server -----------------------------------------------------------------------------------


NO_CUTLASS = failed("ModuleNotFoundError", "No module named 'cutlass'", same_user=True)
WITHOUT_CUTLASS = environment({"cutlass": "absent"}, {"nvidia-cutlass-dsl": None})


@pytest.mark.parametrize(
    ("evidence", "changes", "gate"),
    [
        (NO_CUTLASS, {}, Gate.SERVING),
        (NO_CUTLASS, {"mapped": None, "ready_seen": True}, Gate.SERVING),
        (NO_CUTLASS, {"ran": True}, None),
        (None, {}, None),
        # Nothing would ever show that attention has run.
        (NO_CUTLASS, {"mapped": None}, None),
        (NO_CUTLASS, {"mapped": (None,)}, None),
        # The import may have failed for what the server has, and this container has not.
        (NO_CUTLASS, {"environ_seen": False}, None),
        (replace(NO_CUTLASS, same_user=False), {"environment": environment()}, None),
        # A server that is root: its import has fewer rights, and the files show that these are not why.
        (replace(NO_CUTLASS, same_user=False), {}, Gate.SERVING),
        (NO_CUTLASS, {"environment": replace(WITHOUT_CUTLASS, scope=Scope.IMAGE)}, None),
    ],
)
def test_fa4_gates_an_answering_server_until_attention_has_run(
    evidence: ImportEvidence | None, changes: dict[str, Any], gate: Gate | None
) -> None:
    """On an H200 HTTP answered after 41 s and the server died after 71 s: a failed real import gates meanwhile.

    Only one that ran as the server does, and where the end of that time can be seen.
    """
    values: dict[str, Any] = {"environment": WITHOUT_CUTLASS, "mapped": (frozenset(),), **changes}
    one = facts(None, running("fa4"), imports={} if evidence is None else state(4, evidence), **values)
    found = judged(one, Answer.ACCEPTED)["fa4-not-importable"]
    assert (found.status, found.gate) == (Status.TRUE, gate)
    kind = next(kind for kind in PROBE.conditions if kind.code == found.code)
    weight = effective(kind, found, ServerView(features={Feature.FA4: True}), ())
    assert weight.gate is (gate or Gate.LAUNCH)


def test_an_answering_server_proves_fa3_and_not_fa4() -> None:
    """Version 3 is loaded before the server answers; version 4 is not tried before the first call, and that is said."""
    fa3 = judged(facts(None, running("fa3")), Answer.ACCEPTED)["fa3-not-importable"]
    fa4 = judged(facts(None, running("fa4")), Answer.ACCEPTED)["fa4-not-importable"]
    assert fa3.status is Status.FALSE
    assert fa4.status is Status.UNKNOWN
    assert "proves nothing before its first attention call" in fa4.message


def test_a_running_server_does_not_overrule_what_is_missing_now() -> None:
    """Files may be removed under it: it goes on, and its next launch fails."""
    gone = environment({"sgl_kernel.flash_ops": "absent"})
    one = facts(None, running(), environment=gone, mapped=(frozenset({"flash_ops.abi3.so"}),))
    found = judged(one, Answer.ACCEPTED)["fa3-not-importable"]
    assert (found.status, found.gate) == (Status.TRUE, None)


FLASH_OPS, CUTE = frozenset({"flash_ops.abi3.so"}), frozenset({"libcute_dsl_runtime.so"})


@pytest.mark.parametrize(
    ("info", "launch", "mapped", "reason"),
    [
        (running("fa3"), None, (FLASH_OPS,), None),
        (running("fa3"), None, (frozenset(),), "fa3-not-loaded"),
        (running("fa3"), None, (frozenset(), None), None),
        (running("fa3"), None, (frozenset({"_flash_attn3_abc.abi3.so"}),), None),
        (running("fa4"), FA4, (frozenset(),), None),
        (running("triton", "0.5.9"), None, (FLASH_OPS,), None),
        (running("triton"), FA3, None, None),
        (running("fa3"), {"attention_backend": "flashinfer"}, None, "flag-not-followed"),
        (running("trtllm_mha"), FA4, None, "flag-not-followed"),
        # HRM-Text, DeepSeek-V4, diffusion language models (arg_groups/overrides.py), pure state-space models
        (running("triton"), {"attention_backend": "flashinfer"}, None, None),
        (running("dsv4"), FA3, None, None),
        (running("flashinfer"), FA3, None, None),
        (running("mamba2", "0.5.23"), FA3, None, None),
        (running("dsa"), {"attention_backend": "nsa"}, None, None),
        (
            running("fa3", prefill_attention_backend="fa4", decode_attention_backend="fa3"),
            {"prefill_attention_backend": "fa4", "decode_attention_backend": "fa3"},
            (FLASH_OPS | CUTE,),
            None,
        ),
    ],
)
def test_only_real_contradictions_are_told(
    info: ServerInfo, launch: dict[str, Any] | None, mapped: Any, reason: str | None
) -> None:
    """What a release loads eagerly, loads late, renames or falls back to by itself is none."""
    found = judged(facts(launch, info, mapped=mapped), Answer.ACCEPTED)["attention-backend-disagreement"]
    assert (found.reason if found.status is Status.TRUE else None) == reason


def test_one_source_contradicts_nothing() -> None:
    """With processes hidden and flags unseen there is nothing to compare, which changes no verdict."""
    found = judged(facts(None, running()), Answer.ACCEPTED)["attention-backend-disagreement"]
    assert (found.status, found.reason, found.severity) == (Status.UNKNOWN, "one-source", Severity.INFO)


def test_without_a_server_nothing_is_claimed_and_nothing_counts() -> None:
    """No server and no launch: no version is used, and no condition weighs on the verdict."""
    found = judged(AttentionFacts(phases=phases(None, None)), None)
    assert not [one.code for one in found.values() if one.status is Status.TRUE]
    open_ = {one.code for one in found.values() if one.status is Status.UNKNOWN}
    assert open_ == {"fa3-not-importable", "fa4-not-importable", "fa3-unsupported-gpu", "fa4-unsupported-gpu"}
    kinds = {kind.code: kind for kind in PROBE.conditions}
    assert not any(effective(kinds[code], found[code], ServerView(), ()).relevant for code in open_)


# -- predictions ----------------------------------------------------------------------------------------


def predicted(**more: Any) -> AttentionFacts:
    """A launch on a Hopper GPU that names no backend."""
    guess = predict("0.5.16", {(9, 0)}, (13, 0), {})
    assert guess is not None
    return facts({}, phases=phases(None, {}, guess), prediction_why=guess.why, **more)


def test_a_prediction_makes_its_version_relevant() -> None:
    """The flags do not say fa3, the release on this GPU does; a flag or a running server needs no such help."""
    assert PROBE.uses is not None
    assert PROBE.uses(predicted()) == {Feature.FA3: True}
    assert PROBE.uses(facts(FA3)) == {}
    assert PROBE.uses(facts(None, running())) == {}


def test_what_is_only_predicted_is_a_warning() -> None:
    """A wheel without FlashAttention 3 kills such a launch most likely, and a guess is no more than that."""
    one = predicted(environment=environment({"sgl_kernel.flash_ops": "absent"}))
    found = judged(one)["fa3-not-importable"]
    assert (found.status, found.severity, found.gate) == (Status.TRUE, Severity.WARNING, Gate.NEVER)


# -- what is shown --------------------------------------------------------------------------------------


def test_unknown_versions_have_no_series() -> None:
    """A backend of unknown implementation is named, without a version; an unknown phase has no series at all."""
    one = AttentionFacts(phases=phases(None, {"prefill_attention_backend": "dsa"}))
    assert list(PROBE.samples(one)) == [Sample("attention_backend_info", ("prefill", "dsa", "command-line"), 1)]


def test_modules_in_use_have_series() -> None:
    """The module of a version in use is told of, by files or by a real import; that of another version is not."""
    one = facts(FA3, imports=state(3, OK))
    shown = {(sample.family, sample.labels): sample.value for sample in PROBE.samples(one)}
    module = ("sgl_kernel.flash_attn",)
    assert shown["module_importable", module] == 1
    assert shown["module_import_verified", module] == 1
    assert shown["module_import_duration_seconds", module] == 9.0
    assert not any("cute" in labels[0] for _, labels in shown)


def test_the_report_shows_flags_beside_what_they_became() -> None:
    """Declared, resolved, loaded and installed stand side by side, for every phase."""
    one = facts({"attention_backend": "fa4"}, running("fa3"), mapped=(FLASH_OPS,))
    section = json.loads(msgspec.json.encode(PROBE.report(one)))["attention"]
    assert list(section) == ["prefill", "decode", "vision", "draft"]
    assert section["decode"] == {
        "declared": "fa4",
        "resolved": "fa3",
        "predicted": None,
        "loaded": 3,
        "installed": 3,
        "version": 3,
        "state": "flash-attention",
        "source": "server-info",
        "needs": ["sgl_kernel.flash_attn", "sgl_kernel.flash_ops"],
        "missing": [],
    }


@pytest.mark.parametrize(
    ("info", "mapped", "loaded", "installed"),
    [
        (running("fa3"), (frozenset(),), 0, 3),
        (running("fa4"), (frozenset(),), 0, 4),
        (running("fa4"), (CUTE,), 4, 4),
        (running("fa4"), (None,), None, 4),
        (running("fa4"), None, None, 4),
        (running("triton"), (frozenset(),), 0, None),
        (running("triton"), (FLASH_OPS,), None, None),
        (running("dsa"), (FLASH_OPS,), None, None),
    ],
)
def test_loaded_evidence_is_attributed_to_a_phase_only_where_it_can_be(
    info: ServerInfo, mapped: Any, loaded: int | None, installed: int | None
) -> None:
    """Null is unseen or not attributable, 0 is seen and not there."""
    section = PROBE.report(facts(None, info, mapped=mapped))["attention"]["decode"]
    assert (section.loaded, section.installed) == (loaded, installed)


def test_the_report_marks_predictions() -> None:
    """What a release would choose stands apart from what flags ask for and servers settle on."""
    section = PROBE.report(predicted())["attention"]["prefill"]
    assert (section.declared, section.resolved, section.predicted) == (None, None, "fa3")
    assert (section.version, section.source) == (3, "prediction")


def test_samples_fit_their_families() -> None:
    """Every series has the labels that its family declares."""
    labels = {family.name: len(family.labels) for family in PROBE.families}
    shown = [(sample.family, len(sample.labels)) for sample in PROBE.samples(facts(None, running()))]
    assert len(shown) >= 4
    assert all(labels[family] == count for family, count in shown)


def test_every_reason_is_declared() -> None:
    """Each finding's reason is one of its condition's own, over a wide set of facts."""
    kinds = {kind.code: kind for kind in PROBE.conditions}
    worlds = [
        facts(launch, gpu=gpu, environment=one, imports=imports, override=override)
        for launch in (FA3, FA4, {"attention_backend": "trtllm_mha"}, {"attention_backend": "trtllm_mla"}, {})
        for gpu in (None, (7, 0), (8, 0), (9, 0), (12, 0), (13, 0))
        for one in (
            environment(),
            None,
            environment(dict.fromkeys(MODULES, "absent")),
            environment(problem="kernel-too-old"),
        )
        for imports in ({}, state(3, OK), state(4, failed("OSError", "x", os_error=True)))
        for override in (None, "9", "x", "3")
    ]
    seen = {(finding.code, finding.reason) for one in worlds for finding in judged(one).values() if finding.reason}
    assert len(seen) > 20
    assert not [(code, reason) for code, reason in seen if reason not in kinds[code].reasons]


def test_no_facts_no_findings() -> None:
    """Before the first round nothing is judged."""
    world = World(standing=HOST, server=ServerView(), now=0.0, settings=SimpleNamespace())
    assert list(PROBE.judge(Result(probe="attention"), world)) == []
