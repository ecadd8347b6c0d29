"""Attention backends: which one each phase of inference uses, and whose kernels that means.

SGLang exports no FlashAttention version: the version of the implementation is a pure function of the backend's
name, and no environment variable selects it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from sidecar.model import Feature, Phase

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
    PREDICTION = "prediction"
    """What this release of SGLang chooses by itself on these GPUs. Only for a launch that is not done yet."""


class PhaseBackend(Struct, frozen=True, kw_only=True):
    """One phase: what the flags ask for, what the server resolved, and what that means.

    ``backend`` is the effective one; ``version`` is 3 or 4, 0 for no FlashAttention, None for unknown. A prediction
    may know that no FlashAttention runs without knowing which of several backends is chosen instead.
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


def phases(
    info: ServerInfo | None, launch: Mapping[str, Any] | None, prediction: Prediction | None = None
) -> Mapping[Phase, PhaseBackend]:
    """The attention backend of each phase.

    ``info`` is the running server's answer. ``launch`` holds the flags as typed, None when they cannot be seen.
    The answer wins: it is resolved, flags are only asked for. ``prediction`` fills in what neither names; the vision
    phase chooses by rules of its own, and only for models that have one.
    """
    resolved = _resolved(info)
    declared = _declared(launch)
    exists: dict[Phase, bool | None] = dict.fromkeys(Phase, True)
    exists[Phase.DRAFT] = _drafts(info, launch)
    if info is not None and info.is_vision is False:
        exists[Phase.VISION] = False
    return MappingProxyType(
        {
            phase: _phase(
                exists[phase],
                declared.get(phase),
                resolved.get(phase),
                None if phase is Phase.VISION else prediction,
            )
            for phase in Phase
        }
    )


def _phase(
    exists: bool | None, declared: str | None, resolved: str | None, prediction: Prediction | None
) -> PhaseBackend:
    backend = resolved or declared
    if exists is False:
        return PhaseBackend(state=PhaseState.NOT_APPLICABLE)
    if exists and backend is None and prediction is not None:
        return PhaseBackend(
            state=PhaseState.FLASH_ATTENTION if prediction.version else PhaseState.NONE,
            backend=prediction.backend,
            source=BackendSource.PREDICTION,
            version=prediction.version,
        )
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


# -- releases and what they choose by themselves -------------------------------------------------------

Release = tuple[int, int, int]
"""A release of SGLang. Post-releases and development versions count as the release that they are named after."""


def release(version: str | None) -> Release | None:
    """Read a version of SGLang ("0.5.16", "0.5.3.post3"); None for none, and for a source tree's 0.0.0."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?!\d)", version or "")
    if match is None:
        return None
    major, minor, micro = (int(part) for part in match.groups())
    return (major, minor, micro) if (major, minor, micro) > (0, 0, 0) else None


class Prediction(Struct, frozen=True, kw_only=True):
    """The backend that a release chooses without being told.

    ``backend`` is None for one of several without FlashAttention; ``version`` is 3, 4 or 0. ``why`` is one sentence.
    """

    backend: str | None
    version: int
    why: str


_CUDA_OF_FA3: Final = (12, 3)
_CUDA_OF_BLACKWELL: Final = (12, 8)
_HOPPER, _SM100, _BLACKWELL = 9, 10, frozenset({10, 11, 12})


def predict(
    version: str | None,
    capabilities: Collection[tuple[int, int]],
    cuda: tuple[int, ...] | None,
    launch: Mapping[str, Any],
) -> Prediction | None:
    """What a release chooses when no flag names a backend, from its ``_get_default_attn_backend``.

    ``capabilities`` are those of the GPUs that the launch would use, ``cuda`` the version of CUDA that torch was
    built for. None wherever the model decides and it is not seen: models with latent attention (MLA) follow another
    table, speculation with a tree has an exception, and a few architectures have rules of their own, which no
    prediction knows.
    """
    found = release(version)
    device = launch.get("device")
    named = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "incomplete")
    foreign = isinstance(device, str) and not device.startswith("cuda")
    majors = {major for major, _ in capabilities}
    if found is None or cuda is None or foreign or len(majors) != 1 or any(name in launch for name in named):
        return None
    (major,) = majors
    if launch.get("enable_deterministic_inference") is True:
        return _deterministic(found, major)
    if major == _HOPPER and cuda[:2] >= _CUDA_OF_FA3:
        return _on_hopper(found, launch)
    if major == _SM100 and cuda[:2] >= _CUDA_OF_BLACKWELL:
        if found >= (0, 5, 18):  # fa4 for models whose keys and values differ in size
            return None
        return Prediction(backend=None, version=0, why="On SM100 this release chooses trtllm_mha or flashinfer.")
    return Prediction(
        backend=None, version=0, why="On these GPUs this release chooses flashinfer or triton, by the model."
    )


def _on_hopper(found: Release, launch: Mapping[str, Any]) -> Prediction | None:
    # Before 0.5.9 only listed architectures get fa3; a tree of drafts (topk above 1) gets flashinfer.
    if found < (0, 5, 9) or "speculative_algorithm" in launch:
        return None
    if launch.get("kv_cache_dtype") == "fp8_e5m2":
        return Prediction(backend="triton", version=0, why="fp8_e5m2 makes SGLang take triton instead of fa3.")
    return Prediction(backend="fa3", version=3, why="On Hopper this release chooses fa3 for most models.")


def _deterministic(found: Release, major: int) -> Prediction | None:
    if found < (0, 5, 3):
        return None
    if major in _BLACKWELL:
        why = "Deterministic inference takes flashinfer or triton on Blackwell, by the model."
        return Prediction(backend=None, version=0, why=why)
    return Prediction(backend="fa3", version=3, why="Deterministic inference takes fa3 on this GPU.")


# -- which features a server or a launch uses ----------------------------------------------------------

_FLASHINFER_ATTENTION: Final = frozenset(
    {
        "flashinfer",
        "trtllm_mha",
        "trtllm_mla",
        "cutedsl_mla",
        "tokenspeed_mla",
        "minicpm_flashinfer",
        "llada2_cfg_flashinfer",
        "flashinfer_cudnn",
    }
)
"""Attention backends, also of the vision tower, whose kernels are FlashInfer's."""
_LINEAR: Final = ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend")


def features(info: ServerInfo | None, launch: Mapping[str, Any] | None, *, preflight: bool) -> Mapping[Feature, bool]:
    """What is used: True, False, or no entry for unknown.

    ``info`` is the running server's answer, ``launch`` its flags as typed or those of a launch that is judged
    (``preflight``), None when they cannot be seen. Nothing here depends on the GPUs; what a release chooses by them
    is `predict`'s.
    """
    found = phases(info, launch)
    mamba, other = _uses_flashinfer_mamba(info, launch), _uses_flashinfer(info, launch, found)
    used = {
        Feature.FLASHINFER_MAMBA: mamba,
        Feature.FLASHINFER: other,
        # What is asked for by name is imported, whatever the device that nobody named will be.
        Feature.FLASHINFER_IMPORT: mamba or other or _imports_flashinfer(info, launch, preflight=preflight),
        # On other devices the same names mean other implementations, which need none of what is judged here.
        Feature.FA3: False if _on_cuda(info, launch) is False else uses_version(found, 3),
        Feature.FA4: False if _on_cuda(info, launch) is False else uses_version(found, 4),
    }
    return MappingProxyType({feature: value for feature, value in used.items() if value is not None})


def uses_version(found: Mapping[Phase, PhaseBackend], version: int) -> bool | None:
    """Whether any phase runs that FlashAttention version; None while a phase that is not known may."""
    if any(backend.version == version for backend in found.values()):
        return True
    settled = {PhaseState.FLASH_ATTENTION, PhaseState.NONE, PhaseState.NOT_APPLICABLE}
    return False if all(backend.state in settled for backend in found.values()) else None


def _uses_flashinfer_mamba(info: ServerInfo | None, launch: Mapping[str, Any] | None) -> bool | None:
    if info is not None:
        return info.mamba_backend == "flashinfer"
    if launch is None or ("mamba_backend" not in launch and "incomplete" in launch):
        return None
    # Never resolved automatically: without the flag it is triton.
    return bool(launch.get("mamba_backend") == "flashinfer")


def _uses_flashinfer(
    info: ServerInfo | None, launch: Mapping[str, Any] | None, found: Mapping[Phase, PhaseBackend]
) -> bool | None:
    def value(name: str) -> Any:
        # A launch flag counts only where the server does not say what became of it.
        return getattr(info, name, None) if info is not None else (launch or {}).get(name)

    if any(backend.backend in _FLASHINFER_ATTENTION for backend in found.values()):
        return True
    sampling = value("sampling_backend")
    parts = [sampling, value("mamba_backend"), value("moe_runner_backend"), *map(value, _LINEAR)]
    if any(isinstance(part, str) and part.startswith("flashinfer") for part in parts):
        return True
    if _on_cuda(info, launch) is False:
        return False
    # What sampling and attention default to where nobody says is FlashInfer on most GPUs.
    attention = (found[Phase.PREFILL], found[Phase.DECODE])
    known = all(one.state in {PhaseState.FLASH_ATTENTION, PhaseState.NONE} for one in attention)
    complete = info is not None or (launch is not None and "incomplete" not in launch)
    return False if known and complete and sampling is not None else None


def _imports_flashinfer(info: ServerInfo | None, launch: Mapping[str, Any] | None, *, preflight: bool) -> bool | None:
    """Whether the server imports FlashInfer where it is installed, whatever it then uses of it.

    On CUDA every release does, for its quantization and MoE code. The sampler and the vision layer of 0.5.16 do it
    unconditionally: ``--sampling-backend pytorch`` does not avoid it there.
    """
    on_cuda = _on_cuda(info, launch)
    if on_cuda is None and preflight:
        return True  # an unset device is CUDA wherever SGLang finds one
    return on_cuda


def _on_cuda(info: ServerInfo | None, launch: Mapping[str, Any] | None) -> bool | None:
    device = info.device if info is not None else (launch or {}).get("device")
    return device.startswith("cuda") if isinstance(device, str) else None
