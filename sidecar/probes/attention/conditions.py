"""What the attention probe declares: its conditions, each with its reasons, and its metric families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sidecar.model import ConditionType, Family, Feature, Gate, Severity
from sidecar.modules import MODULE_FAMILIES
from sidecar.probes.attention.facts import OVERRIDE_VARIABLE

KERNEL_WHEEL_BROKEN: Final = "kernel-wheel-broken"
LIBCUDA_UNUSABLE: Final = "libcuda-unusable"
GPU_ARCH_UNSUPPORTED: Final = "gpu-arch-unsupported"
"""Conditions of other probes that explain some of these."""
_UNREAD: Final[Mapping[str, str]] = {
    "no-interpreter": "Unknown: no interpreter of the server was found.",
    "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing about the server's.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
}
_UNSEEN_BACKENDS: Final = "Unknown: neither the server's information nor its flags can be seen."
_NO_GPUS: Final = "Unknown: no GPU's compute capability is known."

_MODULE_REASONS: Final[Mapping[str, str]] = {
    **_UNREAD,
    "module-missing": "Its package is not installed, or not with this module.",
    "missing-dependency": "Modules that its import needs are missing; all of them are named at once.",
    "abi-mismatch": "A library of it was built against another version of what it loads: an undefined symbol.",
    "shared-library-missing": "A shared library that it loads is not found.",
    "symbol-missing": "It can be imported, and the function that SGLang takes from it is not there.",
    "corrupt-file": "A file of it, or of what it loads, is damaged.",
    "permission": "A file or folder that it needs may not be used.",
    "file-system": "A file or folder that it needs cannot be used.",
    "exception": "Its import raises something else.",
    "crashed": "Its import ends the process.",
    "files-unread": "Unknown: its files were not looked at.",
    "release-unknown": "Unknown: SGLang's release is not known, which decides where this version comes from.",
    "editable-install": "Unknown until imported: installed in editable mode, so its files are elsewhere.",
    "start-code": "Unknown until imported: code of a .pth file, which runs when the interpreter starts, may bring what "
    "reading does not find.",
    "damaged-package": "Unknown until imported: its files are not as they were installed.",
    "not-imported": "Unknown: reading the files found no fault, and no real import was due: nothing asked for one, or "
    "several changes in a row each had one already.",
    "no-libcuda": "Unknown: reading the files found no fault; a real import tells nothing without libcuda.so.1.",
    "import-pending": "Unknown until the import that is under way has ended; reading the files found no fault.",
    "import-not-allowed": "Unknown: reading the files found no fault, and an import may not be run from here.",
    "import-starved": "Unknown: the import got too little CPU time to finish.",
    "import-timeout": "Unknown: the import did not finish.",
    "insufficient-memory": "Unknown: there was not enough memory for the import.",
    "probe-environment": "Unknown: this container, or a variable of the server that cannot be seen, can explain it.",
    "devices-hidden": "Unknown: the import failed because the probe hides the GPUs from it.",
}


def _condition(
    code: str, title: str, when: str, remedy: str, reasons: Mapping[str, str], **other: Any
) -> ConditionType:
    return ConditionType(
        **{
            "code": code,
            "severity": Severity.CRITICAL,
            "gate": Gate.LAUNCH,
            "title": title,
            "when": when,
            "remedy": remedy,
            "reasons": reasons,
            **other,
        }
    )


VERSION_INVALID: Final = _condition(
    "fa-version-invalid",
    "A FlashAttention version is asked for that this SGLang does not accept",
    "`fa_impl_ver`, in flags, a configuration file or the server's information, is neither 3 nor 4; or the backend "
    f"fa4 is asked of a release that does not have it. A warning where {OVERRIDE_VARIABLE} is no 2, 3 or 4: no "
    "release reads that variable. What a plugin passes to a constructor cannot be seen.",
    f"Remove the setting (`unset {OVERRIDE_VARIABLE}`): the version follows from the attention backend's name.",
    {
        "impl-version-refused": "`fa_impl_ver` has a value that FlashAttentionBackend refuses.",
        "not-in-release": "This release of SGLang has no FlashAttention version to choose.",
        "prefill-only": "In this release the backend fa4 is for prefill only.",
        "variable-out-of-range": "The variable holds another number than 2, 3 or 4.",
        "variable-not-a-number": "The variable holds no number.",
        "backends-unseen": _UNSEEN_BACKENDS,
    },
    hold=(1, 1),
)
OVERRIDE_INEFFECTIVE: Final = _condition(
    "fa-override-ineffective",
    "A FlashAttention version is asked for in a variable that SGLang does not read",
    f"{OVERRIDE_VARIABLE} is 2, 3 or 4 for the server. No release of SGLang reads it.",
    f"Unset {OVERRIDE_VARIABLE}, and choose with --attention-backend fa3 or fa4 (version 2 is not among SGLang's).",
    {
        "variable-not-read": "The variable is set, and has no effect.",
        "environ-unseen": "Unknown: the server's environment variables cannot be seen from here.",
    },
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    hold=(1, 1),
)
FA3_NOT_IMPORTABLE: Final = _condition(
    "fa3-not-importable",
    "FlashAttention 3 cannot be imported",
    "A phase runs the backend fa3, and `sgl_kernel.flash_attn` with its `flash_ops` cannot be imported. SGLang "
    "hides the cause: it catches every exception there. A warning where only a prediction says that fa3 is chosen.",
    "Install the kernel wheel that SGLang pins, or choose --attention-backend flashinfer or triton.",
    {
        "flash-ops-missing": "The kernel wheel has no flash_ops library: it was built without FlashAttention 3.",
        "kernel-wheel-broken": "The kernel wheel itself cannot be imported.",
        **_MODULE_REASONS,
    },
    depends_on=(KERNEL_WHEEL_BROKEN, LIBCUDA_UNUSABLE),
    uses=Feature.FA3,
    only_when_used=True,
)
FA4_NOT_IMPORTABLE: Final = _condition(
    "fa4-not-importable",
    "FlashAttention 4 cannot be imported",
    "A phase runs the backend fa4, and where this release takes it from cannot be imported. SGLang defers the error "
    "to the first attention call: HTTP may answer before. So a server that answers proves nothing until attention "
    "has run, which a scheduler with libcute_dsl_runtime.so shows, and from 0.5.20 on a /ready that says 200. Until "
    "then a failed real import keeps the pod unready, server or not: where it ran with the server's own files, user "
    "and variables, and where one of the two can be seen.",
    "Install what is missing, or choose another --attention-backend.",
    {
        "cutlass-path-missing": "nvidia-cutlass-dsl is installed, and its .pth file does not lead to `cutlass`.",
        "hidden-by-flash-attn": "Another flash_attn package, elsewhere on the import path, hides flash_attn.cute.",
        "untested-pair": "Unknown: it can be imported, and its packages are not a pair that their own metadata allows; "
        "kernels are compiled at the first call.",
        **_MODULE_REASONS,
    },
    depends_on=(LIBCUDA_UNUSABLE,),
    uses=Feature.FA4,
    only_when_used=True,
    deferred=True,
)
FA3_UNSUPPORTED: Final = _condition(
    "fa3-unsupported-gpu",
    "FlashAttention 3 does not run on a GPU of the server",
    "A phase runs the backend fa3, which takes GPUs of compute capability 8.x (no MLA models there) and 9.x, and a "
    "torch built for CUDA 12.3 or newer.",
    "Choose another --attention-backend: fa4 on 10.x, flashinfer on 11.x and 12.x, triton below 8.0.",
    {
        "below-sm80": "The GPU is older than compute capability 8.0.",
        "above-sm90": "The GPU is newer than compute capability 9.x.",
        "cuda-too-old": "torch was built for a CUDA older than 12.3.",
        "model-unseen": "Unknown: on 8.x it depends on the model (no MLA models), which is not seen.",
        "gpus-unknown": _NO_GPUS,
    },
    uses=Feature.FA3,
    only_when_used=True,
    depends_on=(GPU_ARCH_UNSUPPORTED,),
)
FA4_UNSUPPORTED: Final = _condition(
    "fa4-unsupported-gpu",
    "FlashAttention 4 does not run on a GPU of the server",
    "A phase runs the backend fa4, whose kernels refuse the GPU's compute capability. Which they take depends on the "
    "release: 9.x and 10.x before 0.5.9, 11.x too in 0.5.9, 8.x to 12.x from 0.5.16 on.",
    "Choose another --attention-backend: fa3 on 8.x and 9.x, flashinfer or triton elsewhere.",
    {
        "capability-refused": "The GPU's compute capability is not among those that the kernels take.",
        "release-unknown": "Unknown: SGLang's release is not known, or not what its kernels take.",
        "gpus-unknown": _NO_GPUS,
    },
    uses=Feature.FA4,
    only_when_used=True,
    depends_on=(GPU_ARCH_UNSUPPORTED,),
)
BACKEND_UNSUPPORTED: Final = _condition(
    "attention-backend-unsupported-gpu",
    "An attention backend does not run on a GPU of the server",
    "A phase runs a backend of TensorRT-LLM, CuTe DSL or FlashInfer that SGLang, or FlashInfer itself, refuses on "
    "this compute capability. FlashAttention has conditions of its own.",
    "Choose another --attention-backend, or none: SGLang then picks one for the GPU.",
    {
        "trtllm-mha-needs-blackwell": "trtllm_mha needs SM100; for decode, from 0.5.16 on, SM90 or SM12x will do.",
        "mla-needs-blackwell": "trtllm_mla and tokenspeed_mla need a Blackwell GPU.",
        "cutedsl-needs-sm100": "cutedsl_mla needs compute capability 10.x.",
        "flashinfer-needs-sm75": "FlashInfer needs compute capability 7.5 or newer.",
        "release-unknown": "Unknown: SGLang's release is not known, or not what it refuses.",
        "gpus-unknown": _NO_GPUS,
        "backends-unseen": _UNSEEN_BACKENDS,
    },
    depends_on=(GPU_ARCH_UNSUPPORTED,),
)
DISAGREEMENT: Final = _condition(
    "attention-backend-disagreement",
    "What is told of the attention backends contradicts itself",
    "Two sources about the same running server cannot both be right: it resolved to fa3 and none of its schedulers "
    "has flash_ops loaded, or it resolved to another backend than its own flags ask for. What releases are known to "
    "change by themselves is no contradiction, nor is a version 4 that has not been called yet.",
    "See whether server_url leads to the very process that is looked at, and read the server's log for the backend.",
    {
        "fa3-not-loaded": "It resolved to fa3, and no scheduler has loaded FlashAttention 3.",
        "flag-not-followed": "It resolved to another backend than its flags name.",
        "one-source": "Unknown: fewer than two sources can be seen.",
    },
    severity=Severity.WARNING,
    gate=Gate.NEVER,
)
CONDITIONS: Final = (
    VERSION_INVALID,
    OVERRIDE_INEFFECTIVE,
    FA3_NOT_IMPORTABLE,
    FA3_UNSUPPORTED,
    FA4_UNSUPPORTED,
    FA4_NOT_IMPORTABLE,
    BACKEND_UNSUPPORTED,
    DISAGREEMENT,
)

VERSION: Final = Family(
    name="flash_attention_version",
    kind="gauge",
    help="FlashAttention implementation in use, 0 where the phase's backend runs none; absent while unknown.",
    labels=("phase",),
)
BACKEND: Final = Family(
    name="attention_backend_info",
    kind="info",
    help="Attention backend of each phase, and where it was read.",
    labels=("phase", "backend", "source"),
)
FAMILIES: Final = (VERSION, BACKEND, *MODULE_FAMILIES)
