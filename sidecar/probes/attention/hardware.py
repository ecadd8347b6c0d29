"""Which backend runs on which GPU. Tables of our own: what SGLang prints there is partly misleading.

Sources: SGLang's attention registry and argument checks, ``is_fa3_supported`` of the kernel wheel, and the
assertions of the FlashAttention 4 kernels, by release. True, False or None for unknown, with the reason's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from sidecar.backends import Release
from sidecar.cudalibs import Capability
from sidecar.model import Phase

FA3_CUDA: Final = (12, 3)
"""Oldest CUDA of torch that FlashAttention 3 takes. The kernel wheel compares it as text; this is what is meant."""
_BLACKWELL_CUDA: Final = (12, 8)
"""Oldest CUDA of torch with which SGLang recognizes a Blackwell GPU as such."""


class Fit(Struct, frozen=True):
    """Whether something runs on a GPU, and the reason's token where it does not or is not known.

    ``says`` is SGLang's sentence.
    """

    runs: bool | None
    reason: str | None = None
    says: str | None = None


_RUNS: Final = Fit(runs=True)
_FA3_TEXT: Final = "FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend flashinfer`."
_FA3_VISION_TEXT: Final = "The 'fa3' backend is not supported on Blackwell GPUs"
_FA3_CALL_TEXT: Final = "flash_attn at sgl-kernel is only supported on sm90 and above"


def fa3_fit(gpu: Capability, phase: Phase, cuda: tuple[int, ...] | None, *, answers: bool) -> Fit:
    """FlashAttention 3: 9.x; 8.x unless the model is one with latent attention, which a server that answers is not.

    The vision tower knows no such models.
    """
    major = gpu[0]
    if major not in {8, 9}:
        vision = phase is Phase.VISION and major >= 10
        says = _FA3_VISION_TEXT if vision else _FA3_TEXT
        return Fit(runs=False, reason="below-sm80" if major < 8 else "above-sm90", says=says)
    if cuda is not None and cuda[:2] < FA3_CUDA:
        return Fit(runs=False, reason="cuda-too-old", says=_FA3_CALL_TEXT)
    if major == 8 and phase is not Phase.VISION and not answers:
        return Fit(runs=None, reason="model-unseen")
    return _RUNS


_FA4_MAJORS: Final[Mapping[Release, tuple[frozenset[int], frozenset[int]]]] = MappingProxyType(
    {
        # release from which on: (majors that run, majors of which nothing is known); newest first
        (0, 5, 16): (frozenset({8, 9, 10, 11, 12}), frozenset()),
        # From the flash-attn-4 package, whose releases differ.
        (0, 5, 10): (frozenset({9, 10}), frozenset({8, 11, 12})),
        (0, 5, 9): (frozenset({9, 10, 11}), frozenset()),
        (0, 5, 3): (frozenset({9, 10}), frozenset()),
    }
)


def fa4_fit(gpu: Capability, release: Release | None) -> Fit:
    """FlashAttention 4, by the release's kernels. What is newer than every known GPU is not known."""
    major = gpu[0]
    everywhere = {9, 10}
    if major in everywhere:
        return _RUNS
    if major < 8:
        return Fit(runs=False, reason="capability-refused", says=_fa4_text(release))
    since = next((first for first in _FA4_MAJORS if release is not None and release >= first), None)
    if since is None or major > 12:
        return Fit(runs=None, reason="release-unknown")
    runs, unknown = _FA4_MAJORS[since]
    if major in runs:
        return _RUNS
    if major in unknown:
        return Fit(runs=None, reason="release-unknown")
    return Fit(runs=False, reason="capability-refused", says=_fa4_text(release))


def _fa4_text(release: Release | None) -> str | None:
    if release is not None and (0, 5, 9) <= release < (0, 5, 10):
        return "Unsupported compute capability. Supported: 9.x, 10.x, 11.x"
    if release is not None and (0, 5, 16) <= release < (0, 5, 17):
        return "Unsupported compute capability. Supported: 8.x, 9.x, 10.x, 11.x, 12.x"
    return None


def backend_fit(
    backend: str, phase: Phase, gpu: Capability, release: Release | None, cuda: tuple[int, ...] | None
) -> Fit:
    """Whether SGLang takes a backend that has no FlashAttention on a GPU. What has no rule here runs."""
    if phase is Phase.VISION:
        return _RUNS
    if cuda is not None and cuda[:2] < _BLACKWELL_CUDA and gpu[0] >= 10:
        # Too old for SGLang to see what GPU it is: the same refusal as on an older one.
        gpu = (0, 0)
    match backend:
        case "trtllm_mha":
            return _trtllm_mha(phase, gpu[0], release)
        case "trtllm_mla" | "tokenspeed_mla" if phase is Phase.DECODE:
            return _RUNS if gpu[0] in {10, 11, 12} else _refused_mla(backend, gpu, release)
        case "cutedsl_mla" if phase is Phase.DECODE and gpu[0] != 10:
            says = "CuteDSL MLA backend is only supported on Blackwell GPUs (SM100). Please use a different backend."
            return Fit(runs=False, reason="cutedsl-needs-sm100", says=says)
        case "flashinfer" if (0, 0) < gpu < (7, 5):
            return Fit(runs=False, reason="flashinfer-needs-sm75", says="FlashInfer requires GPUs with sm75 or higher")
        case _:
            return _RUNS


def _refused_mla(backend: str, gpu: Capability, release: Release | None) -> Fit:
    if gpu[0] > 12:
        return Fit(runs=None, reason="release-unknown")
    says = None
    if release is not None and (0, 5, 16) <= release < (0, 5, 17):
        tail = " Please use a different backend." if backend == "trtllm_mla" else ""
        name = "TRTLLM MLA" if backend == "trtllm_mla" else backend
        says = f"{name} backend is only supported on Blackwell GPUs (SM100/SM12x).{tail}"
    return Fit(runs=False, reason="mla-needs-blackwell", says=says)


def _trtllm_mha(phase: Phase, major: int, release: Release | None) -> Fit:
    if major == 10:
        return _RUNS
    # Split by phase in 0.5.16; up to 0.5.8 one rule for both.
    split = release is not None and release >= (0, 5, 16)
    joint = release is not None and release < (0, 5, 9)
    if phase is not Phase.PREFILL and split and major in {9, 12}:
        return _RUNS
    unknown = major > 12 or (major >= 9 and phase is not Phase.PREFILL and not split and not joint)
    if unknown or (major in {11, 12} and (release is None or release >= (0, 5, 17))):
        return Fit(runs=None, reason="release-unknown")
    says = None
    if joint:
        says = "TRTLLM MHA backend is only supported on Blackwell GPUs (SM100). Please use a different backend."
    elif split and phase is Phase.PREFILL:
        says = (
            "TRTLLM MHA backend for prefill is only supported on Blackwell GPUs (SM100). "
            "Please use a different prefill backend."
        )
    elif split:
        says = (
            "TRTLLM MHA backend for decode is only supported on Hopper (SM90), Blackwell (SM100) and (SM120) GPUs. "
            "Please use a different decode backend."
        )
    return Fit(runs=False, reason="trtllm-mha-needs-blackwell", says=says)
