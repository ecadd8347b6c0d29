"""Attention backends: what a name says, which phase uses which, what a release chooses, and what that needs."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.backends import PhaseState, features, implementation, phases, predict, release
from sidecar.model import Feature, Phase
from sidecar.serverinfo import ServerInfo

HOPPER, A100, B200, B300, T4, RTX = (9, 0), (8, 0), (10, 0), (10, 3), (7, 5), (12, 0)


@pytest.mark.parametrize(
    ("backend", "state", "version"),
    [
        ("fa3", PhaseState.FLASH_ATTENTION, 3),
        ("fa4", PhaseState.FLASH_ATTENTION, 4),
        ("dual_chunk_flash_attn", PhaseState.FLASH_ATTENTION, 3),
        ("flashinfer", PhaseState.NONE, 0),
        ("triton", PhaseState.NONE, 0),
        ("trtllm_mla", PhaseState.NONE, 0),
        ("torch_native", PhaseState.NONE, 0),
        ("mamba2", PhaseState.NONE, 0),
        ("sdpa", PhaseState.NONE, 0),
        ("dsa", PhaseState.MIXED, None),
        ("nsa", PhaseState.MIXED, None),
        ("dsv4", PhaseState.MIXED, None),
        ("minicpm_flashattn", PhaseState.MIXED, None),
        ("a_plugins_own", PhaseState.OTHER, None),
        ("fa2", PhaseState.OTHER, None),
    ],
)
def test_a_backends_name_decides_the_version(backend: str, state: PhaseState, version: int | None) -> None:
    """The version is a function of the name alone; a name that is not known claims nothing.

    sgl-project/sglang#22028
    """
    assert implementation(backend) == (state, version)


@pytest.mark.parametrize(
    ("info", "launch", "expected"),
    [
        ({"attention_backend": "fa3"}, None, {"prefill": "fa3", "decode": "fa3"}),
        (
            {"attention_backend": "fa3", "prefill_attention_backend": "fa4"},
            {"attention_backend": "triton"},
            {"prefill": "fa4", "decode": "fa3"},
        ),
        ({}, {"attention_backend": "fa4"}, {"prefill": "fa4", "decode": "fa4"}),
        (None, {"decode_attention_backend": "flashinfer"}, {"decode": "flashinfer"}),
        (
            None,
            {"attention_backend": "fa3", "mm_attention_backend": "fa4"},
            {"prefill": "fa3", "decode": "fa3", "vision": "fa4"},
        ),
        (
            {"attention_backend": "fa3", "decode_attention_backend": "triton", "speculative_algorithm": "EAGLE"},
            None,
            {"prefill": "fa3", "decode": "triton", "draft": "triton"},
        ),
        (
            {
                "attention_backend": "fa3",
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_attention_backend": "fa4",
            },
            None,
            {"prefill": "fa3", "decode": "fa3", "draft": "fa4"},
        ),
        ({"attention_backend": "fa3", "speculative_algorithm": "NGRAM"}, None, {"prefill": "fa3", "decode": "fa3"}),
        (None, None, {}),
    ],
)
def test_each_phase_falls_back_as_sglang_does(
    info: dict[str, Any] | None, launch: dict[str, Any] | None, expected: dict[str, str]
) -> None:
    """A phase's own field comes first, then the common one; what the server resolved outweighs the flags."""
    found = phases(None if info is None else ServerInfo(**info), launch)
    assert {phase.value: backend.backend for phase, backend in found.items() if backend.backend} == expected


@pytest.mark.parametrize(
    ("info", "launch", "phase", "state"),
    [
        ({}, None, Phase.DRAFT, "not-applicable"),
        ({"speculative_algorithm": "NGRAM"}, None, Phase.DRAFT, "not-applicable"),
        (None, {}, Phase.DRAFT, "not-applicable"),
        (None, {"attention_backend": "fa3", "incomplete": True}, Phase.DRAFT, "unknown"),
        (None, None, Phase.DRAFT, "unknown"),
        ({"is_vision": False, "mm_attention_backend": "fa3"}, None, Phase.VISION, "not-applicable"),
        ({"is_vision": True}, None, Phase.VISION, "unknown"),
        ({"is_vision": True, "mm_attention_backend": "fa3"}, None, Phase.VISION, "flash-attention"),
        ({}, None, Phase.VISION, "unknown"),
        ({}, None, Phase.PREFILL, "unknown"),
    ],
)
def test_absent_and_unknown_are_told_apart(
    info: dict[str, Any] | None, launch: dict[str, Any] | None, phase: Phase, state: str
) -> None:
    """A phase that the server does not have is not one of which nothing is known."""
    backend = phases(None if info is None else ServerInfo(**info), launch)[phase]
    assert (backend.state.value, backend.version if state in {"unknown", "not-applicable"} else None) == (state, None)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.5.16", (0, 5, 16)),
        ("0.5.3.post3", (0, 5, 3)),
        ("0.5.17.dev12+gabc", (0, 5, 17)),
        ("0.0.0", None),
        ("0.5", None),
        ("next", None),
        (None, None),
    ],
)
def test_releases_are_read_from_versions(text: str | None, found: tuple[int, int, int] | None) -> None:
    """A post-release counts as its release; a source tree without tags has none."""
    assert release(text) == found


# -- predictions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "gpu", "cuda", "launch", "expected"),
    [
        ("0.5.16", HOPPER, (13, 0), {}, ("fa3", 3)),
        ("0.5.9", HOPPER, (12, 3), {}, ("fa3", 3)),
        ("0.5.16", HOPPER, (12, 1), {}, (None, 0)),
        ("0.5.16", HOPPER, (13, 0), {"kv_cache_dtype": "fp8_e5m2"}, ("triton", 0)),
        ("0.5.16", A100, (13, 0), {}, (None, 0)),
        ("0.5.16", T4, (13, 0), {}, (None, 0)),
        ("0.5.16", RTX, (13, 0), {}, (None, 0)),
        ("0.5.16", B200, (13, 0), {}, (None, 0)),
        ("0.5.16", B300, (13, 0), {}, (None, 0)),
        ("0.5.6.post2", B200, (12, 8), {}, (None, 0)),
        ("0.5.16", A100, (13, 0), {"enable_deterministic_inference": True}, ("fa3", 3)),
        ("0.5.16", B200, (13, 0), {"enable_deterministic_inference": True}, (None, 0)),
    ],
)
def test_what_a_release_chooses_is_predicted(
    version: str,
    gpu: tuple[int, int],
    cuda: tuple[int, int],
    launch: dict[str, Any],
    expected: tuple[str | None, int],
) -> None:
    """The release, the GPU and torch's CUDA decide; a second component on 12.x is never told to take fa3.

    sgl-project/sglang#15342, Edge0-AI/Audio8_TTS#17
    """
    found = predict(version, {gpu}, cuda, launch)
    assert found is not None
    assert (found.backend, found.version) == expected


@pytest.mark.parametrize(
    ("version", "gpus", "cuda", "launch"),
    [
        ("0.5.6.post2", {HOPPER}, (12, 8), {}),
        ("0.5.16", {HOPPER}, (13, 0), {"speculative_algorithm": "EAGLE"}),
        ("0.5.18", {B200}, (13, 0), {}),
        ("0.5.16", {HOPPER, A100}, (13, 0), {}),
        ("0.5.16", set(), (13, 0), {}),
        ("0.5.16", {HOPPER}, None, {}),
        (None, {HOPPER}, (13, 0), {}),
        ("0.5.16", {HOPPER}, (13, 0), {"incomplete": True}),
        ("0.5.16", {HOPPER}, (13, 0), {"device": "cpu"}),
        ("0.5.16", {HOPPER}, (13, 0), {"attention_backend": "triton"}),
    ],
)
def test_nothing_is_predicted_where_the_unseen_model_decides(
    version: str | None, gpus: set[tuple[int, int]], cuda: tuple[int, int] | None, launch: dict[str, Any]
) -> None:
    """Where models differ, a flag is given or something is not known, there is no prediction."""
    assert predict(version, gpus, cuda, launch) is None


def test_a_prediction_is_marked_and_spares_the_vision_phase() -> None:
    """Predicted phases say so; what a flag names is no prediction, and vision has rules and models of its own."""
    found = phases(None, {}, predict("0.5.16", {HOPPER}, (13, 0), {}))
    shown = {phase.value: (one.state.value, one.source and one.source.value) for phase, one in found.items()}
    assert shown == {
        "prefill": ("flash-attention", "prediction"),
        "decode": ("flash-attention", "prediction"),
        "vision": ("unknown", None),
        "draft": ("not-applicable", None),
    }


# -- features ------------------------------------------------------------------------------------------


def used(
    info: dict[str, Any] | None = None, launch: dict[str, Any] | None = None, *, preflight: bool = False
) -> dict[str, bool]:
    """The features that are known to be used or not, by name."""
    found = features(None if info is None else ServerInfo(**info), launch, preflight=preflight)
    return {feature.value: value for feature, value in found.items()}


@pytest.mark.parametrize(
    ("info", "launch", "mamba"),
    [
        ({"mamba_backend": "flashinfer"}, None, True),
        ({"mamba_backend": "triton"}, {"mamba_backend": "flashinfer"}, False),
        ({}, None, False),
        (None, {"mamba_backend": "flashinfer"}, True),
        (None, {}, False),
        (None, {"incomplete": True}, None),
        (None, None, None),
    ],
)
def test_flashinfers_mamba_is_used_only_when_asked_for(
    info: dict[str, Any] | None, launch: dict[str, Any] | None, mamba: bool | None
) -> None:
    """No release chooses it by itself; flags that may lie elsewhere leave it open."""
    assert used(info, launch).get("flashinfer-mamba") is mamba


@pytest.mark.parametrize(
    ("info", "launch", "flashinfer"),
    [
        ({"attention_backend": "flashinfer"}, None, True),
        ({"attention_backend": "fa3", "decode_attention_backend": "trtllm_mla"}, None, True),
        ({"mm_attention_backend": "flashinfer_cudnn", "is_vision": True}, None, True),
        ({"attention_backend": "fa3", "mamba_backend": "flashinfer"}, None, True),
        (None, {"sampling_backend": "flashinfer"}, True),
        (None, {"moe_runner_backend": "flashinfer_cutlass"}, True),
        (None, {"linear_attn_decode_backend": "flashinfer"}, True),
        (None, {"attention_backend": "triton", "sampling_backend": "pytorch"}, False),
        (None, {"attention_backend": "triton", "sampling_backend": "pytorch", "incomplete": True}, None),
        (None, {"attention_backend": "triton"}, None),
        (None, {"device": "cpu"}, False),
        (None, {}, None),
    ],
)
def test_flashinfer_has_many_users(
    info: dict[str, Any] | None, launch: dict[str, Any] | None, flashinfer: bool | None
) -> None:
    """Attention, sampling, MoE, linear attention and mamba can each use it; an unset flag is no proof against it."""
    assert used(info, launch).get("flashinfer") is flashinfer


@pytest.mark.parametrize(
    ("info", "launch", "preflight", "imported"),
    [
        (None, {}, True, True),
        (None, {"sampling_backend": "pytorch"}, True, True),
        (None, {"device": "cuda"}, False, True),
        (None, {"device": "cpu"}, True, False),
        ({"device": "cpu"}, {}, False, False),
        ({"device": "cuda"}, None, False, True),
        (None, {}, False, None),
        (None, None, False, None),
        (None, {"mamba_backend": "flashinfer"}, False, True),
    ],
)
def test_every_server_on_cuda_imports_flashinfer(
    info: dict[str, Any] | None, launch: dict[str, Any] | None, preflight: bool, imported: bool | None
) -> None:
    """The sampler and the vision layer import it on CUDA whatever the sampling backend is; on a CPU nothing does."""
    assert used(info, launch, preflight=preflight).get("flashinfer-import") is imported


@pytest.mark.parametrize(
    ("info", "launch", "fa3", "fa4"),
    [
        ({"attention_backend": "fa3", "is_vision": False}, None, True, False),
        ({"attention_backend": "fa3", "prefill_attention_backend": "fa4", "is_vision": False}, None, True, True),
        ({"attention_backend": "triton", "is_vision": True, "mm_attention_backend": "fa3"}, None, True, False),
        ({"attention_backend": "triton"}, None, None, None),
        ({"attention_backend": "dual_chunk_flash_attn", "is_vision": False}, None, True, False),
        ({"attention_backend": "minicpm_flashattn", "is_vision": False}, None, None, None),
        (None, {"attention_backend": "fa4"}, None, True),
        (None, {"attention_backend": "fa3", "device": "xpu"}, False, False),
        (None, {}, None, None),
    ],
)
def test_any_phase_makes_a_version_used(
    info: dict[str, Any] | None, launch: dict[str, Any] | None, fa3: bool | None, fa4: bool | None
) -> None:
    """One phase is enough for yes; no needs all phases known. On other devices the names mean other code."""
    found = used(info, launch)
    assert (found.get(Feature.FA3.value), found.get(Feature.FA4.value)) == (fa3, fa4)
