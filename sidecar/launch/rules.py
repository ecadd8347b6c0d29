"""Which release of SGLang knows which launch flag, and which choices.

Read from the argument parsers of the releases in `RELEASES`. For a release between two of them, what either accepts
counts as accepted, and only what both refuse as refused; a newer one may know more than the newest that was read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from packaging.version import InvalidVersion, Version

from sidecar.launch import flagnames

RELEASES: Final = (
    "0.4.6.post5",
    "0.4.10.post2",
    "0.5.2",
    "0.5.3.post3",
    "0.5.6.post2",
    "0.5.8.post1",
    "0.5.9",
    "0.5.12.post1",
    "0.5.15",
    "0.5.16",
    "0.5.19",
    "0.5.23",
)
"""The releases whose parsers were read, oldest first."""

_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--prefill-attention-backend": "0.4.10.post2",
        "--decode-attention-backend": "0.4.10.post2",
        "--skip-server-warmup": "0.4.10.post2",
        "--model": "0.4.10.post2",
        "--speculative-attention-mode": "0.5.2",
        "--mamba-ssm-dtype": "0.5.2",
        "--moe-runner-backend": "0.5.2",
        "--config": "0.5.3.post3",
        "--enable-deterministic-inference": "0.5.3.post3",
        "--grpc-mode": "0.5.3.post3",
        "--speculative-draft-attention-backend": "0.5.8.post1",
        "--mamba-backend": "0.5.9",
        "--linear-attn-backend": "0.5.12.post1",
        "--linear-attn-decode-backend": "0.5.12.post1",
        "--linear-attn-prefill-backend": "0.5.12.post1",
        "--ssl-certfile": "0.5.12.post1",
        "--enable-mamba-cache-stochastic-rounding": "0.5.15",
        "--mamba-cache-philox-rounds": "0.5.15",
        "--smg-grpc-mode": "0.5.16",
    }
)
"""The first of `RELEASES` that has a flag; those that are not named are older than all of them."""

_PHASE_CHOICES: Final = (
    ("0.5.3.post3", "+fa4 +flex_attention +nsa -hybrid_linear_attn"),
    ("0.5.6.post2", "+intel_xpu"),
    ("0.5.12.post1", "+compressed +dsv4 +tokenspeed_mla"),
    ("0.5.15", "+cutedsl_mla +dsa"),
    ("0.5.19", "+hpc_ops +minicpm_flashattn +minicpm_flashinfer"),
    ("0.5.23", "+llada2_cfg_flashinfer +qsa -cutlass_mla -dual_chunk_flash_attn"),
)
_SPLIT: Final = (
    ("0.4.10.post2", "+cutlass_mla +fa3 +flashinfer +flashmla +torch_native +triton"),
    (
        "0.5.2",
        "+aiter +ascend +dual_chunk_flash_attn +hybrid_linear_attn +intel_amx +trtllm_mha +trtllm_mla +wave",
    ),
    *_PHASE_CHOICES,
)
_LINEAR: Final = (
    ("0.5.12.post1", "+cutedsl +flashinfer +triton"),
    ("0.5.15", "+flashkda"),
    ("0.5.19", "+helion +intel_xpu +nvidia_kda +ptx_kda"),
)
_CHOICES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        "--attention-backend": (
            ("0.4.6.post5", "+aiter +cutlass_mla +fa3 +flashinfer +flashmla +torch_native +triton"),
            ("0.4.10.post2", "+ascend +intel_amx +trtllm_mla"),
            ("0.5.2", "+dual_chunk_flash_attn +hybrid_linear_attn +trtllm_mha +wave"),
            *_PHASE_CHOICES,
        ),
        "--prefill-attention-backend": _SPLIT,
        "--decode-attention-backend": _SPLIT,
        "--mm-attention-backend": (
            ("0.4.6.post5", "+fa3 +sdpa +triton_attn"),
            ("0.5.3.post3", "+ascend_attn"),
            ("0.5.6.post2", "+aiter_attn"),
            ("0.5.9", "+fa4"),
            ("0.5.12.post1", "+flashinfer_cudnn"),
            ("0.5.15", "+amx_attn +xpu_attn"),
        ),
        "--speculative-algorithm": (
            ("0.4.6.post5", "+EAGLE +EAGLE3 +NEXTN"),
            ("0.5.2", "+STANDALONE"),
            ("0.5.3.post3", "+NGRAM"),
            ("0.5.12.post1", "any"),
        ),
        "--speculative-attention-mode": (("0.5.2", "+decode +prefill"),),
        "--mamba-backend": (("0.5.9", "+flashinfer +triton"),),
        "--kv-cache-dtype": (
            ("0.4.6.post5", "+auto +fp8_e4m3 +fp8_e5m2"),
            ("0.5.6.post2", "+bf16 +bfloat16 +fp4_e2m1"),
            ("0.5.16", "+fp4_mx_block16 +mxfp8 +nvfp4"),
            ("0.5.23", "-fp4_e2m1"),
        ),
        "--mamba-ssm-dtype": (("0.5.2", "+bfloat16 +float32"), ("0.5.9", "+float16")),
        "--sampling-backend": (
            ("0.4.6.post5", "+flashinfer +pytorch"),
            ("0.5.6.post2", "+ascend"),
            ("0.5.23", "+intel_xpu"),
        ),
        "--moe-runner-backend": (
            ("0.5.2", "+auto +flashinfer_cutlass +flashinfer_mxfp4 +flashinfer_trtllm +triton +triton_kernel"),
            ("0.5.3.post3", "+cutlass +deep_gemm +flashinfer_cutedsl"),
            ("0.5.12.post1", "+aiter +flashinfer_trtllm_routed +marlin"),
            ("0.5.15", "+experimental_sgl_trtllm"),
            ("0.5.16", "+experimental_sgl_marlin +humming"),
            ("0.5.19", "+hpc_ops +intel_xpu +megamoe"),
            ("0.5.23", "+flashinfer_megamoe +lora_cutedsl +lora_marlin +lora_triton"),
        ),
        "--linear-attn-backend": _LINEAR,
        "--linear-attn-decode-backend": _LINEAR,
        "--linear-attn-prefill-backend": _LINEAR,
    }
)
"""What came (+) and went (-) with a release among the choices of a flag; "any": it takes every value from there on."""

_EXTENDABLE: Final = frozenset(
    {
        "--attention-backend",
        "--prefill-attention-backend",
        "--decode-attention-backend",
        "--moe-runner-backend",
        "--linear-attn-backend",
        "--linear-attn-decode-backend",
        "--linear-attn-prefill-backend",
        "--mamba-ssm-dtype",
    }
)
"""Flags whose choices SGLang lets plugins add to."""

_NOT_IN_FILES: Final[Mapping[str, str]] = MappingProxyType(
    {"--disable-cuda-graph": "0.5.15", "--enable-dp-attention": "0.5.23"}
)
"""Deprecated flags that a configuration file may not hold, with the first of `RELEASES` that refuses them there."""


class Fit(StrEnum):
    """What a release makes of a flag with its value."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNLISTED = "unlisted"
    """Not among its choices, which a plugin, or a release newer than all that were read, may have added to."""
    NO_FLAG = "no-flag"
    """The release does not have the flag."""
    UNKNOWN = "unknown"
    """The release is not known, or older than all that were read."""


def fit(flag: str, value: str | int | bool, release: str | None) -> Fit:
    """What a release of SGLang makes of a flag that is spelled out, with its value."""
    around = _around(release)
    if flag not in _FLAGS and flag not in _CHOICES:
        return Fit.ACCEPTED
    if around is None:
        return Fit.UNKNOWN
    first = RELEASES.index(_FLAGS[flag]) if flag in _FLAGS else 0
    if max(around) < first:
        return Fit.NO_FLAG
    known = [choices(flag, RELEASES[index]) for index in around if index >= first]
    if any(one is None or value in one for one in known):
        return Fit.ACCEPTED
    elsewhere = any(value in (choices(flag, one) or ()) for one in RELEASES)
    newer = _is_newer(release)
    return Fit.UNLISTED if newer or (flag in _EXTENDABLE and not elsewhere) else Fit.REFUSED


def choices(flag: str, release: str) -> frozenset[str] | None:
    """The choices of a flag in one of `RELEASES`; None where it takes any value."""
    if flag not in _CHOICES:
        return None
    found: set[str] = set()
    for since, change in _CHOICES[flag]:
        if RELEASES.index(since) > RELEASES.index(release):
            break
        if change == "any":
            return None
        for name in change.split():
            (found.add if name[0] == "+" else found.discard)(name[1:])
    return frozenset(found)


def has_choices(flag: str, release: str | None) -> bool:
    """Whether a release is known to take only certain names for a flag."""
    around = _around(release)
    return around is not None and all(choices(flag, RELEASES[index]) for index in around)


def nearest(release: str | None) -> str | None:
    """The newest of `RELEASES` that is not newer than a release; None where there is none."""
    around = _around(release)
    return None if around is None else RELEASES[around[0]]


def refused_in_file(flag: str, release: str | None) -> bool:
    """Whether a release certainly refuses a flag in a configuration file."""
    around = _around(release)
    return flag in _NOT_IN_FILES and around is not None and around[0] >= RELEASES.index(_NOT_IN_FILES[flag])


def at_least(release: str | None, first: str) -> bool:
    """Whether a release is known to be ``first`` or newer, both as versions."""
    found = _version(release)
    return found is not None and found >= Version(first)


class Ambiguity(Struct, frozen=True, kw_only=True):
    """Flags that an abbreviation may stand for; ``sure`` is False where a newer release may have fewer of them."""

    flags: tuple[str, ...]
    sure: bool


def ambiguity(word: str, release: str | None) -> Ambiguity | None:
    """What a release's parser finds ambiguous in a word; None where it takes it, or where that is not known.

    Between two releases that were read, only what both find ambiguous counts, as the older one has it.
    """
    around = _named_around(release)
    matching = [flagnames.matching(word, one) for one in around]
    if not around or any(len(flags) < 2 for flags in matching):
        return None
    return Ambiguity(flags=matching[0], sure=len(around) == 2 or not _is_newer(release))


def may_be_ambiguous(word: str, release: str | None) -> bool:
    """Whether a word is ambiguous to some release that this one may be like, and not to all of them."""
    around = _named_around(release) or flagnames.RELEASES
    return ambiguity(word, release) is None and any(len(flagnames.matching(word, one)) > 1 for one in around)


def _named_around(release: str | None) -> tuple[str, ...]:
    """A release itself or its neighbours, of those whose flags were all read; none for one that is not known."""
    found = _version(release)
    index = 0 if found is None else bisect_right(_NAMES_VERSIONS, found)
    if found is None or index == 0:
        return ()
    exact = _NAMES_VERSIONS[index - 1] == Version(found.public)
    return flagnames.RELEASES[index - 1 : index if exact else index + 1]


def _around(release: str | None) -> tuple[int, ...] | None:
    """The places in `RELEASES` of a release itself or of its neighbours; None for one that is older or not known."""
    found = _version(release)
    if found is None:
        return None
    index = bisect_right(_VERSIONS, found) - 1
    if index < 0:
        return None
    exact = _VERSIONS[index] == Version(found.public)
    return (index,) if exact or index + 1 == len(RELEASES) else (index, index + 1)


def _is_newer(release: str | None) -> bool:
    found = _version(release)
    return found is not None and Version(found.public) > _VERSIONS[-1]


def _version(release: str | None) -> Version | None:
    try:
        return None if release is None else Version(release)
    except InvalidVersion:
        return None


_VERSIONS: Final = [Version(release) for release in RELEASES]
_NAMES_VERSIONS: Final = [Version(release) for release in flagnames.RELEASES]
