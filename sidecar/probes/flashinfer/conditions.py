"""What the flashinfer probe declares: its conditions, each with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.model import ConditionType, Feature, Gate, Severity
from sidecar.modules import ENDS_EVERY_LAUNCH
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
            # A fault of FlashInfer as a whole concerns everyone who imports it; what concerns fewer says so.
            "uses": Feature.FLASHINFER_IMPORT,
            "info_when_unused": True,
            "moot_under": ENDS_EVERY_LAUNCH,
            **other,
        }
    )


_UNKNOWN_REASONS: Mapping[str, str] = {
    "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing about the server's.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
    "import-pending": "Unknown until the import that is under way has ended; reading the files found no fault.",
    "not-imported": "Unknown: reading the files found no fault, and no real import was due: nothing asked for one, or "
    "several changes in a row each had one already.",
    "import-not-allowed": "Unknown: reading the files found no fault, and an import may not be run from here.",
    "import-starved": "Unknown: the import got too little CPU time to finish.",
    "insufficient-memory": "Unknown: there was not enough memory for the import.",
    "import-timeout": "Unknown: the import did not finish; see flashinfer-import-timeout.",
    "probe-environment": "Unknown: this container, or a variable of the server that cannot be seen, can explain it.",
    "devices-hidden": "Unknown: the import failed because the probe hides the GPUs from it.",
    "damaged-package": "Unknown until imported: the installation is damaged, and files alone do not tell how much.",
    "editable-install": "Unknown until imported: installed in editable mode, so its files are elsewhere.",
    "start-code": "Unknown until imported: code of a .pth file, which runs when the interpreter starts, may make "
    "modules importable that no reading finds.",
    "environ-unseen": "Unknown: the server's environment variables cannot be seen from here.",
    "variable-suspect": "Unknown until imported: FlashInfer cannot read the value of one of the server's variables.",
    "interpreter-unsupported": "Unknown until imported: FlashInfer's releases with a mamba module need Python 3.10.",
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
    "`SGLANG_IS_FLASHINFER_AVAILABLE` is set for the server to anything but true or 1 (in any case): SGLang treats "
    "FlashInfer as absent. It does not strip spaces, and takes neither `yes` nor `on` for true.",
    f"Remove {AVAILABLE_VARIABLE} from the server's environment, {OR_TRITON}.",
    {
        "variable-set": "The variable has a value that SGLang does not take for true.",
        "value-unclear": "Unknown: SGLang is newer than the releases that this agent knows, and they have two ways "
        "to read such a value.",
    },
    uses=Feature.FLASHINFER,
)
MAMBA_MISSING = _condition(
    "flashinfer-mamba-missing",
    "This FlashInfer has no mamba module",
    "`flashinfer` is installed without `flashinfer.mamba`, which exists since 0.6.1.",
    "Install the flashinfer-python that SGLang pins (0.6.1 or newer), " + OR_TRITON + ".",
    {
        "version-too-old": "The installed version is older than 0.6.1.",
        "absent": "It is not there, and the installed version is not known.",
    },
    uses=Feature.FLASHINFER_MAMBA,
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
        "partial-install": "A part of FlashInfer itself, or of a package that it needs, is missing.",
        "corrupt-file": "A file cannot be read as what it is: cut off, overwritten or damaged.",
        "interpreter-too-old": "The interpreter is older than what this FlashInfer is written for.",
        "shadowed": "A module flashinfer, as a file flashinfer.py, hides the package.",
        "shared-library-missing": "A shared library could not be found.",
        "abi-mismatch": "A binary was built for other versions: a symbol is undefined.",
        "system-too-old": "A binary needs a newer C or C++ library of the system.",
        "torch-without-cuda": "torch is a build without CUDA, and this FlashInfer asks it for a GPU when imported.",
        "permission": "A file or folder may not be read or written.",
        "cache-unwritable": "FlashInfer's cache folder cannot be made or written by the server's user.",
        "no-home": "FlashInfer wants a home directory, and the server's user has none.",
        "bad-variable": "FlashInfer cannot read the value of one of its environment variables.",
        "file-system": "A file or folder cannot be used.",
        "exception": "Any other exception.",
    },
    depends_on=("cuda-unavailable-to-torch", "driver-too-old-for-cuda", "libcuda-unusable"),
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
    uses=Feature.FLASHINFER_MAMBA,
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

CAUSES = (
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
"""What can keep SGLang from using the module: at most one of them is active."""

JIT_TOOLCHAIN = _condition(
    "flashinfer-jit-toolchain",
    "FlashInfer cannot build kernels here",
    "FlashInfer builds kernels when they are first used, and what it needs for that is not there. An import that "
    "succeeds proves nothing about it. Not needed where flashinfer-jit-cache brings the kernels.",
    "Install the CUDA toolkit of torch's CUDA version and ninja, or the matching flashinfer-jit-cache.",
    {
        "cuda-home-malformed": "CUDA_HOME is set to what is no folder, for example with a colon in front.",
        "nvcc-missing": "There is no nvcc where FlashInfer looks for it.",
        "toolkit-mismatch": "The toolkit is of another CUDA major than torch, or older than torch's CUDA.",
        "headers-missing": "The toolkit has no headers (cuda_runtime.h).",
        "headers-mismatch": "The compiler and the headers beside it are of different releases.",
        "ninja-missing": "There is no ninja on the server's path.",
        "toolchain-unseen": "Unknown: where FlashInfer would look for its compiler cannot be seen from here.",
    },
    severity=Severity.WARNING,
    gate=Gate.NEVER,
    uses=Feature.FLASHINFER,
)
CUBINS_NOT_INSTALLED = _condition(
    "flashinfer-cubins-not-installed",
    "FlashInfer would download kernels at run time",
    "Some kernels of FlashInfer are precompiled and fetched when first used, unless they are installed. That fails "
    "without a network, and several processes may get into each other's way.",
    "Install the flashinfer-cubin of FlashInfer's version, or fetch the files in advance.",
    {
        "downloads-at-run-time": "Neither the package flashinfer-cubin nor files in the cache are there.",
        "cubins-unseen": "Unknown: the folder that would hold them was not looked at.",
    },
    # Kernels are of one FlashInfer, and the repair of these decides of which.
    depends_on=(NOT_INSTALLED.code, CUBIN_MISMATCH.code),
    severity=Severity.INFO,
    gate=Gate.NEVER,
    uses=Feature.FLASHINFER,
)
ROUNDING_DTYPE = _condition(
    "mamba-rounding-dtype",
    "Stochastic rounding without float16 states",
    "`--enable-mamba-cache-stochastic-rounding` is set without `--mamba-ssm-dtype float16`. SGLang looks at the flag "
    "alone: a model whose own configuration says float16 is refused too. From 0.5.15 on.",
    "Add --mamba-ssm-dtype float16, or remove --enable-mamba-cache-stochastic-rounding.",
    {
        "not-float16": "Another type is asked for.",
        "unset": "No type is asked for, and SGLang does not look into the model's configuration for it.",
        "flags-unseen": "Unknown: there is a server, and its flags cannot be seen.",
        "flags-incomplete": "Unknown: more flags come from where they were not read.",
    },
    uses=None,
    info_when_unused=False,
    # A fault of the flags, whatever interpreter reads them.
    moot_under=(),
)

CONDITIONS = (*CAUSES, JIT_TOOLCHAIN, CUBINS_NOT_INSTALLED, ROUNDING_DTYPE)
