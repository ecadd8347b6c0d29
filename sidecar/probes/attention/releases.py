"""What a release of SGLang imports for each FlashAttention version, and what it prints when that fails.

Read in the released packages; a boundary is the first release of a ladder in which the new state was seen. What
0.5.3 to 0.5.8 take from the kernel wheel was read in its repository only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from sidecar.backends import Release
from sidecar.imports import ImportWork

SYMBOL: Final = "flash_attn_varlen_func"
"""The function that every provider must have."""

FA4_SINCE: Final[Release] = (0, 5, 3)
"""First release with a backend fa4, and with a version to choose at all."""
FA4_DECODES_SINCE: Final[Release] = (0, 5, 8)
"""Before it, fa4 was for prefill only."""
READY_SINCE: Final[Release] = (0, 5, 20)
"""First release whose ``/ready`` says that the warm-up has run."""

PIP_VARIABLE: Final = "SGLANG_INKLING_FA4_USE_PIP"
"""Makes 0.5.16 to 0.5.22 take FlashAttention 4 from the flash-attn-4 package."""


class Provider(Struct, frozen=True, kw_only=True):
    """Where a release takes a FlashAttention version from.

    ``module`` holds `SYMBOL`; ``distribution`` brings it. ``needs`` maps each module that its import needs besides
    to the distribution that brings that. ``says`` is SGLang's sentence when the import fails; None: not known.
    """

    version: int
    module: str
    distribution: str
    needs: Mapping[str, str]
    says: str | None

    @property
    def work(self) -> ImportWork:
        """What a real import of it is."""
        return ImportWork(self.module, SYMBOL)


_CUTLASS: Final = {"cutlass": "nvidia-cutlass-dsl", "cuda.bindings": "cuda-python"}
_CUTE: Final = MappingProxyType({**_CUTLASS, "quack": "quack-kernels", "tvm_ffi": "apache-tvm-ffi"})
_VENDORED_TEXT: Final = (
    "Vendored FlashAttention CUTE is not available (cannot import {module}). Please check your source tree."
)
_CURRENT_TEXT: Final = (
    "FlashAttention-4 CUTE is not available. Install flash-attn-4 with its CUDA/CUTE dependencies, or run from a "
    "source tree where the vendored FA4 package is importable."
)
FLASH_ATTN_4: Final = "flash-attn-4"


def kernel_distribution(release: Release | None) -> str:
    """Name of the kernel wheel's distribution, which was renamed with 0.5.10."""
    return "sgl-kernel" if release is not None and release < (0, 5, 10) else "sglang-kernel"


def provider_of_3(release: Release | None) -> Provider:
    """FlashAttention 3 comes from the kernel wheel in every release."""
    return Provider(
        version=3,
        module="sgl_kernel.flash_attn",
        distribution=kernel_distribution(release),
        needs=MappingProxyType({"sgl_kernel.flash_ops": kernel_distribution(release)}),
        says="Can not import FA3 in sgl_kernel. Please check your installation."
        if release is None or release >= (0, 5, 3)
        else None,
    )


def provider_of_4(release: Release | None, *, from_pip: bool) -> Provider | None:
    """Where FlashAttention 4 comes from; None where the release has none or is not known.

    ``from_pip``: `PIP_VARIABLE` is set to 1 for the server.
    """
    if release is None or release < FA4_SINCE:
        return None
    if release < (0, 5, 9):
        return Provider(
            version=4,
            module="sgl_kernel._fa4_interface",
            distribution="sgl-kernel",
            needs=MappingProxyType({**_CUTLASS, "flash_attn.cute": "sgl-kernel"}),
            says="FA4 is not available, please check your installation.",
        )
    if release < (0, 5, 10):
        module, distribution = "sglang.jit_kernel.flash_attention.cute", "sglang"
        says = _VENDORED_TEXT.format(module=module)
    elif release < (0, 5, 16):
        module, distribution = "flash_attn.cute", FLASH_ATTN_4
        says = _VENDORED_TEXT.format(module=module)
    elif from_pip and release < (0, 5, 23):
        module, distribution, says = "flash_attn.cute", FLASH_ATTN_4, _CURRENT_TEXT
    elif release < (0, 5, 17):
        module, distribution, says = "sglang.jit_kernel.flash_attn.cute", "sglang", _CURRENT_TEXT
    else:
        module, distribution, says = "sglang.kernels.ops.attention.flash_attn.cute", "sglang", _CURRENT_TEXT
    return Provider(version=4, module=module, distribution=distribution, needs=_CUTE, says=says)
