"""Attention backends: which one each phase of inference uses, and whose kernels that means.

SGLang exports no FlashAttention version: the version of the implementation is a pure function of the backend's
name, and no environment variable selects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sidecar.model import Phase

if TYPE_CHECKING:
    from sidecar.serverinfo import ServerInfo


class PhaseState(StrEnum):
    """What is known of a phase's attention."""

    FLASH_ATTENTION = "flash-attention"
    """It runs FlashAttention of a known version."""
    NONE = "none"
    """Its backend runs no FlashAttention."""
    MIXED = "mixed"
    """Its backend chooses by GPU or by layer."""
    OTHER = "other"
    """Its backend is one that this release does not know (a plugin's, or a newer SGLang's)."""
    NOT_APPLICABLE = "not-applicable"
    """The server has no such phase: no speculative algorithm, or a model without a vision tower."""
    UNKNOWN = "unknown"
    """No source names its backend."""


class BackendSource(StrEnum):
    """Where a phase's backend was read."""

    SERVER_INFO = "server-info"
    """The running server's resolved arguments."""
    COMMAND_LINE = "command-line"
    """Flags as typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBackend:
    """One phase: what the flags ask for, what the server resolved, and what that means.

    ``backend`` is the effective one; ``version`` is 3 or 4, 0 for no FlashAttention, None for unknown.
    """

    state: PhaseState
    declared: str | None = None
    resolved: str | None = None
    backend: str | None = None
    source: BackendSource | None = None
    version: int | None = None


_VERSIONS: Final[Mapping[str, int]] = MappingProxyType({"fa3": 3, "fa4": 4, "dual_chunk_flash_attn": 3})
_MIXED: Final = frozenset({"dsa", "nsa", "dsv4", "compressed", "qsa", "minicpm_flashattn"})
_WITHOUT: Final = frozenset(
    {
        # Language model backends.
        "flashinfer",
        "triton",
        "trtllm_mha",
        "trtllm_mla",
        "cutedsl_mla",
        "tokenspeed_mla",
        "flashmla",
        "cutlass_mla",
        "minicpm_flashinfer",
        "llada2_cfg_flashinfer",
        "hpc_ops",
        "torch_native",
        "flex_attention",
        "aiter",
        "wave",
        "ascend",
        "intel_amx",
        "intel_xpu",
        # What a pure state-space model is stamped with; it builds no attention backend.
        "mamba2",
        # Vision backends.
        "sdpa",
        "triton_attn",
        "ascend_attn",
        "aiter_attn",
        "amx_attn",
        "xpu_attn",
        "flashinfer_cudnn",
    }
)
_WITHOUT_DRAFT_MODEL: Final = frozenset({"NGRAM", "LOOKAHEAD"})
"""Speculative algorithms that run no draft model."""


def implementation(backend: str) -> tuple[PhaseState, int | None]:
    """What a backend's name says about FlashAttention: the state, and the version where there is one."""
    if backend in _VERSIONS:
        return PhaseState.FLASH_ATTENTION, _VERSIONS[backend]
    if backend in _WITHOUT:
        return PhaseState.NONE, 0
    return (PhaseState.MIXED if backend in _MIXED else PhaseState.OTHER), None


def phases(info: ServerInfo | None, launch: Mapping[str, Any] | None) -> Mapping[Phase, PhaseBackend]:
    """The attention backend of each phase.

    ``info`` is the running server's answer. ``launch`` holds the flags as typed, None when they cannot be seen.
    The answer wins: it is resolved, flags are only asked for.
    """
    resolved = _resolved(info)
    declared = _declared(launch)
    exists: dict[Phase, bool | None] = dict.fromkeys(Phase, True)
    exists[Phase.DRAFT] = _drafts(info, launch)
    if info is not None and info.is_vision is False:
        exists[Phase.VISION] = False
    return MappingProxyType({phase: _phase(exists[phase], declared.get(phase), resolved.get(phase)) for phase in Phase})


def _phase(exists: bool | None, declared: str | None, resolved: str | None) -> PhaseBackend:
    backend = resolved or declared
    if exists is False:
        return PhaseBackend(state=PhaseState.NOT_APPLICABLE)
    if exists is None or backend is None:
        return PhaseBackend(state=PhaseState.UNKNOWN)
    state, version = implementation(backend)
    return PhaseBackend(
        state=state,
        declared=declared,
        resolved=resolved,
        backend=backend,
        source=BackendSource.SERVER_INFO if resolved else BackendSource.COMMAND_LINE,
        version=version,
    )


def _resolved(info: ServerInfo | None) -> dict[Phase, str | None]:
    if info is None:
        return {}
    return _by_phase(
        info.attention_backend,
        info.prefill_attention_backend,
        info.decode_attention_backend,
        info.mm_attention_backend,
        info.speculative_draft_attention_backend,
    )


def _declared(launch: Mapping[str, Any] | None) -> dict[Phase, str | None]:
    flags = launch or {}
    return _by_phase(
        flags.get("attention_backend"),
        flags.get("prefill_attention_backend"),
        flags.get("decode_attention_backend"),
        flags.get("mm_attention_backend"),
        flags.get("speculative_draft_attention_backend"),
    )


def _by_phase(
    common: str | None, prefill: str | None, decode: str | None, vision: str | None, draft: str | None
) -> dict[Phase, str | None]:
    """SGLang's own fallback: a phase's field if set, else the common one; drafting follows decoding."""
    return {
        Phase.PREFILL: prefill or common,
        Phase.DECODE: decode or common,
        Phase.VISION: vision,
        Phase.DRAFT: draft or decode or common,
    }


def _drafts(info: ServerInfo | None, launch: Mapping[str, Any] | None) -> bool | None:
    """Whether the server runs a draft model; None when no source says."""
    if info is not None:
        algorithm = info.speculative_algorithm
    elif launch is not None and ("speculative_algorithm" in launch or "incomplete" not in launch):
        algorithm = launch.get("speculative_algorithm")
    else:
        return None
    return algorithm is not None and algorithm.upper() not in _WITHOUT_DRAFT_MODEL
