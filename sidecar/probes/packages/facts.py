"""What the packages probe knows when it judges, and the names that it knows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct

from sidecar.environment import EnvironmentFacts
from sidecar.model import Scope

SGLANG: Final = "sglang"
KERNELS: Final = ("sglang-kernel", "sgl-kernel")
"""The kernel wheel's distribution, by its name since SGLang 0.5.10 and before; the module is ``sgl_kernel``."""

TRACKED_PINS: Final = (
    *KERNELS,
    "flashinfer-python",
    "flashinfer-cubin",
    "torch",
    "nvidia-cutlass-dsl",
    "flash-attn-4",
    "apache-tvm-ffi",
    "cuda-python",
    "quack-kernels",
    "triton",
    "transformers",
    "nvidia-ml-py",
)
"""Distributions whose requirement is exported and judged, the most consequential first."""

WEIGHTY: Final = frozenset({*KERNELS, "flashinfer-python", "flashinfer-cubin", "torch", "nvidia-cutlass-dsl"})
"""Those whose violated requirement is a warning; for the others it is information."""

RENAMED: Final[Mapping[str, str]] = {
    "sgl-kernel": "sglang-kernel",
    "sglang-kernel": "sgl-kernel",
    "flashinfer-python": "flashinfer",
}
"""Distribution -> the other name under which its modules have been published (flashinfer-ai/flashinfer#794)."""

MODULES: Final[Mapping[str, str]] = {
    "sglang": "sglang",
    "sglang-kernel": "sgl_kernel",
    "sgl-kernel": "sgl_kernel",
    "flashinfer-python": "flashinfer",
    "flashinfer-cubin": "flashinfer_cubin",
    "flashinfer-jit-cache": "flashinfer_jit_cache",
    "torch": "torch",
    "nvidia-cutlass-dsl": "cutlass",
    "flash-attn": "flash_attn",
    "flash-attn-4": "flash_attn.cute",
    "apache-tvm-ffi": "tvm_ffi",
    "quack-kernels": "quack",
    "triton": "triton",
    "transformers": "transformers",
    "nvidia-ml-py": "pynvml",
}
"""Distribution -> the module that people import of it."""


class Fit(StrEnum):
    """How an installed package meets a requirement on it."""

    MET = "met"
    OUTSIDE = "outside"
    """It is installed, in a version that is not asked for."""
    NOT_INSTALLED = "not-installed"
    RENAMED = "renamed"
    """It is not installed; the same modules are, under the distribution's other name."""
    UNREGISTERED = "unregistered"
    """Its module is there although no metadata of it is, so its version is not known."""
    UNREADABLE = "unreadable"
    """Its version, or the condition under which it is asked for, cannot be made sense of."""


class Checked(Struct, frozen=True, kw_only=True):
    """One requirement that applies in this environment, and what is installed.

    ``package`` is the normalised name. ``required`` is what is asked for, extras and specifier, empty for any
    version; ``argument`` is what an installer takes. ``source`` is the distribution that asks. ``instead`` is the
    distribution and version that is there under another name.
    """

    package: str
    source: str
    required: str
    argument: str
    installed: str | None
    fit: Fit
    instead: str | None = None

    @property
    def satisfied(self) -> bool | None:
        """True, False, or None where it cannot be told."""
        if self.fit in {Fit.UNREGISTERED, Fit.UNREADABLE}:
            return None
        return self.fit is Fit.MET

    @property
    def tracked(self) -> bool:
        """Whether its violation is judged; others are shown only."""
        return self.package in TRACKED_PINS


class PackagesFacts(Struct, frozen=True, kw_only=True):
    """The environment that was read, and its requirements. Nothing is imported for it.

    ``checked`` are the requirements of SGLang and of the other distributions whose lines were read,
    ``unreadable_lines`` counts those of SGLang that are none. ``check_skipped`` says whether
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK is set for the server, None where its environment cannot be seen.
    ``attention_backends`` are those that its flags name.
    """

    environment: EnvironmentFacts
    checked: tuple[Checked, ...] = ()
    unreadable_lines: int = 0
    check_skipped: bool | None = None
    attention_backends: tuple[str, ...] = ()

    @property
    def scope(self) -> Scope:
        """Whose environment it is; the report states it beside each item."""
        return self.environment.scope


def blind(environment: EnvironmentFacts) -> str | None:
    """Token that says why nothing is known of the server's packages, or None."""
    if environment.problem is not None:
        return environment.problem
    return "scope-self" if environment.scope is Scope.SELF else None
