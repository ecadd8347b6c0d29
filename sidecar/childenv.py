"""Which variables a child gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sidecar.redaction import is_secret, is_service

_NEVER_INHERITED: Final = frozenset(
    {"LD_PRELOAD", "LD_AUDIT", "PROMETHEUS_MULTIPROC_DIR", "PYTHONSTARTUP", "PYTHONINSPECT"}
)
_OURS: Final = "SGLANG_SIDECAR_"
_SERVER_VARIABLES: Final = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "PWD", "LANG", "LANGUAGE", "VIRTUAL_ENV",
        "CPATH", "LIBRARY_PATH", "CC", "CXX", "MAX_JOBS", "HOSTNAME", "HF_HOME", "HF_HUB_OFFLINE",
        "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM",
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_DATA_DIRS", "XDG_CONFIG_DIRS",
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        # What images are built with.
        "NVARCH", "BUILD_TYPE", "DEBIAN_FRONTEND", "GDRCOPY_HOME",
    }
)  # fmt: skip
_SERVER_PREFIXES: Final = (
    "PYTHON", "LD_", "LC_", "CUDA", "NVIDIA_", "NVCC", "CUDNN", "NCCL_", "CONDA_", "SGLANG_", "SGL_",
    "FLASHINFER_", "FLASH_ATTENTION", "FA_", "TVM_", "TORCH", "PYTORCH_", "AOT", "TRITON_", "CUTE_", "CUTEDSL_",
    "CUTLASS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUBLAS", "NVSHMEM_", "UCX_", "NV_", "DG_",
)  # fmt: skip
_WITHHELD_LIMIT: Final = 300
_WITHOUT_EFFECT: Final = frozenset(
    {
        "_", "SHLVL", "OLDPWD", "PS1", "PS2", "LS_COLORS", "LESSOPEN", "LESSCLOSE",
        # They act on an interpreter that a person types into.
        "PYTHONSTARTUP", "PYTHONINSPECT",
    }
)  # fmt: skip


def child_environment(environ: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of ``environ`` without secrets and without variables that would act on the child, plus ``extra``.

    A variable that looks like a secret is dropped: an import does not need it, and a crashing child
    may print its environment.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _NEVER_INHERITED and not name.startswith(_OURS) and not is_secret(name, value)
    }
    return kept | dict(extra or {})


def server_environment(environ: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of a server's variables that can matter to an import, without secrets, plus ``extra``.

    A list of what is let through, not of what is held back: code of the server's environment may quote any
    variable in an exception, which then stands in reports and logs; and nobody can list how secrets are named.
    """
    let_through = {
        name: value
        for name, value in environ.items()
        if name in _SERVER_VARIABLES or name.startswith(_SERVER_PREFIXES) or is_service(name, value)
    }
    return child_environment(let_through, extra)


def may_matter(name: str) -> bool:
    """Whether a variable of this name is one that `server_environment` lets through whatever its value is."""
    return name != "PWD" and (name in _SERVER_VARIABLES or name.startswith(_SERVER_PREFIXES))


def withheld(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the variables of a server that `server_environment` holds back, but for those that no import heeds."""
    given = server_environment(environ)
    names = (name for name in environ if name not in given and name not in _WITHOUT_EFFECT)
    shown = (name for name in names if not name.startswith(_OURS) and re.fullmatch(r"\w{1,100}", name, re.ASCII))
    return tuple(sorted(shown)[:_WITHHELD_LIMIT])
