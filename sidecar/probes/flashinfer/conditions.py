"""What the flashinfer probe declares: its conditions, each with its reasons, and its metric families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.model import ConditionType, Family, Feature, Gate, Severity
from sidecar.probes.flashinfer.texts import AVAILABLE_VARIABLE, OR_TRITON

MODULE = "flashinfer.mamba"
"""The module that SGLang imports, and the label of the metrics about it."""


def _condition(code: str, title: str, when: str, remedy: str, reasons: dict[str, str], **other: Any) -> ConditionType:
    return ConditionType(
        **{
            "code": code,
            "severity": Severity.CRITICAL,
            "gate": Gate.LAUNCH,
            "title": title,
            "when": when,
            "remedy": remedy,
            "reasons": {**reasons, **_UNKNOWN_REASONS},
            "uses": Feature.FLASHINFER_MAMBA,
            "info_when_unused": True,
            **other,
        }
    )


_UNKNOWN_REASONS: Mapping[str, str] = {
    "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing about the server's.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
    "import-pending": "Unknown until the import that is under way has ended; reading the files found no fault.",
    "not-imported": "Unknown: reading the files found no fault, and nothing asked for a real import.",
    "import-not-allowed": "Unknown: reading the files found no fault, and an import may not be run from here.",
    "import-starved": "Unknown: the import got too little CPU time to finish.",
    "insufficient-memory": "Unknown: there was not enough memory for the import.",
    "import-timeout": "Unknown: the import did not finish; see flashinfer-import-timeout.",
    "probe-environment": "Unknown: this container, or a variable of the server that cannot be seen, can explain it.",
    "devices-hidden": "Unknown: the import failed because the probe hides the GPUs from it.",
    "damaged-package": "Unknown until imported: the installation is damaged, and files alone do not tell how much.",
    "editable-install": "Unknown until imported: installed in editable mode, so its files are elsewhere.",
    "environ-unseen": "Unknown: the server's environment variables cannot be seen from here.",
    "version-unknown": "Unknown until imported: a version could not be read.",
    "other-cause": "Unknown while another of these conditions is active, behind which nothing more was judged.",
}

NOT_INSTALLED = _condition(
    "flashinfer-not-installed",
    "FlashInfer is not installed",
    "The server's environment has no usable package `flashinfer`.",
    "Install the flashinfer-python that SGLang pins, " + OR_TRITON + ".",
    {
        "absent": "There is no package of that name.",
        "leftover-folder": "Only a leftover folder is there, which Python accepts as an empty package.",
        "files-missing": "The distribution is registered, but its package is gone.",
    },
)
DISABLED = _condition(
    "flashinfer-disabled-by-env",
    "FlashInfer is disabled by an environment variable",
    "`SGLANG_IS_FLASHINFER_AVAILABLE` is false for the server: SGLang treats FlashInfer as absent.",
    f"Remove {AVAILABLE_VARIABLE} from the server's environment, {OR_TRITON}.",
    {
        "variable-set": "The variable is set to a false value.",
        "value-unclear": "Unknown: releases of SGLang differ in what they make of the variable's value.",
    },
)
MAMBA_MISSING = _condition(
    "flashinfer-mamba-missing",
    "This FlashInfer has no mamba module",
    "`flashinfer` is installed without `flashinfer.mamba`, which exists since 0.6.1.",
    "Install the flashinfer-python that SGLang pins (0.6.1 or newer), " + OR_TRITON + ".",
    {
        "version-too-old": "The installed version is older than 0.6.1.",
        "partial-install": "The version should have it, but its files are not there.",
    },
)
CUBIN_MISMATCH = _condition(
    "flashinfer-cubin-mismatch",
    "flashinfer-cubin does not match FlashInfer",
    "flashinfer-cubin and flashinfer-python have different versions. Fatal from 0.6.1 to 0.7.1, where the import "
    "raises a RuntimeError that SGLang does not translate; from 0.7.2 on the package is ignored with a warning.",
    "Uninstall flashinfer-cubin or install the version of flashinfer-python, " + OR_TRITON + ".",
    {
        "version-mismatch": "The versions differ and FlashInfer refuses to be imported.",
        "leftover-folder": "A leftover folder flashinfer_cubin has no version at all.",
        "check-bypassed": "The versions differ; FLASHINFER_DISABLE_VERSION_CHECK hides it.",
        "ignored": "The versions differ; this FlashInfer ignores the package.",
    },
)
JIT_CACHE_MISMATCH = _condition(
    "flashinfer-jit-cache-mismatch",
    "flashinfer-jit-cache does not match FlashInfer",
    "flashinfer-jit-cache was built for another FlashInfer. Fatal from 0.6.1 to 0.7.1; from 0.7.2 on the package "
    "is ignored with a warning. Bypassing the check has led to illegal memory access.",
    "Uninstall flashinfer-jit-cache or install the version of flashinfer-python, " + OR_TRITON + ".",
    {
        "version-mismatch": "The versions differ and FlashInfer refuses to be imported.",
        "leftover-folder": "A leftover folder flashinfer_jit_cache has no version at all.",
        "check-bypassed": "The versions differ; FLASHINFER_DISABLE_VERSION_CHECK hides it.",
        "ignored": "The versions differ; this FlashInfer ignores the package.",
    },
)
IMPORT_FAILED = _condition(
    "flashinfer-import-failed",
    "flashinfer.mamba cannot be imported",
    "The import raises an exception that none of the more specific conditions explains.",
    "Read the exception; reinstall flashinfer-python and what it names, " + OR_TRITON + ".",
    {
        "dependency-missing": "A module that FlashInfer needs is not installed.",
        "partial-install": "A part of FlashInfer itself is missing.",
        "corrupt-file": "A file does not parse.",
        "shadowed": "A file flashinfer.py hides the package.",
        "shared-library-missing": "A shared library could not be found.",
        "abi-mismatch": "A binary was built for other versions: a symbol is undefined.",
        "torch-without-cuda": "torch is a build without CUDA, and this FlashInfer asks it for a GPU when imported.",
        "permission": "A file or folder may not be read or written.",
        "file-system": "A file or folder cannot be used.",
        "exception": "Any other exception.",
    },
    depends_on=("cuda-unavailable-to-torch",),
)
IMPORT_CRASHED = _condition(
    "flashinfer-import-crashed",
    "Importing flashinfer.mamba ends the interpreter",
    "The importing process died: by a signal, or by leaving without an exception.",
    "Reinstall flashinfer-python, torch and apache-tvm-ffi as one matching set, " + OR_TRITON + ".",
    {"signal": "A signal ended it (segmentation fault, abort).", "exit": "It called exit."},
)
SYMBOL_MISSING = _condition(
    "flashinfer-symbol-missing",
    "flashinfer.mamba lacks selective_state_update",
    "The module can be imported, so SGLang's own check passes, but the function it needs is not there; "
    "the server fails later.",
    "Reinstall flashinfer-python, " + OR_TRITON + ".",
    {
        "absent": "The module has no such name.",
        "not-callable": "The name is there but is no function.",
        "empty-package": "flashinfer/mamba has no or an empty __init__.py, so its parts are modules, not functions.",
    },
)
IMPORT_TIMEOUT = _condition(
    "flashinfer-import-timeout",
    "Importing flashinfer.mamba does not end",
    "The import made no progress for a minute. Its last stage is named.",
    "Look at the stage; a leftover lock file in a build cache of the server's user is the usual cause.",
    {"no-progress": "Neither CPU time nor a new stage for a minute."},
    severity=Severity.WARNING,
    gate=Gate.NEVER,
)

CONDITIONS = (
    NOT_INSTALLED,
    DISABLED,
    MAMBA_MISSING,
    CUBIN_MISMATCH,
    JIT_CACHE_MISMATCH,
    IMPORT_FAILED,
    IMPORT_CRASHED,
    SYMBOL_MISSING,
    IMPORT_TIMEOUT,
)

FAMILIES = (
    Family(
        name="module_importable",
        kind="gauge",
        help="1 when the module can be imported in the server's environment by the best evidence there is, 0 when not; "
        "absent while unknown.",
        labels=("module",),
    ),
    Family(
        name="module_import_verified",
        kind="gauge",
        help="1 when module_importable rests on a real import, 0 when on reading files.",
        labels=("module",),
    ),
    Family(
        name="module_import_duration_seconds",
        kind="gauge",
        help="Duration of the last real import that succeeded or raised.",
        labels=("module",),
    ),
)
