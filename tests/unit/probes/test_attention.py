"""Which attention backend a phase uses, and what its name says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.backends import PhaseState, implementation, phases
from sidecar.model import Phase, Placement, Processes, Result, Sample, ServerView, Standing, World
from sidecar.probes.attention import PROBE, AttentionFacts
from sidecar.serverinfo import ServerInfo

WORLD = World(
    standing=Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why=""),
    server=ServerView(),
    now=0.0,
    settings=None,
)


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


def test_unknown_versions_have_no_series() -> None:
    """A backend of unknown implementation is named, without a version; an unknown phase has no series at all."""
    facts = AttentionFacts(phases=phases(None, {"prefill_attention_backend": "dsa"}))
    assert list(PROBE.samples(facts)) == [Sample("attention_backend_info", ("prefill", "dsa", "command-line"), 1)]


def test_the_report_shows_flags_beside_what_they_became() -> None:
    """Declared and resolved backends stand side by side, for every phase."""
    info = ServerInfo(attention_backend="fa3", is_vision=False)
    facts = AttentionFacts(phases=phases(info, {"attention_backend": "fa4"}))
    section = msgspec.to_builtins(PROBE.report(facts))["attention"]
    assert list(section) == ["prefill", "decode", "vision", "draft"]
    assert section["decode"] == {
        "declared": "fa4",
        "resolved": "fa3",
        "loaded": None,
        "installed": None,
        "version": 3,
        "state": "flash-attention",
    }


def test_the_probe_only_shows() -> None:
    """It declares no condition and finds none."""
    assert PROBE.conditions == ()
    assert list(PROBE.judge(Result(probe="attention"), WORLD)) == []


def test_samples_fit_their_families() -> None:
    """Every series has the labels that its family declares."""
    labels = {family.name: len(family.labels) for family in PROBE.families}
    facts = AttentionFacts(phases=phases(ServerInfo(attention_backend="fa3"), None))
    shown = [(sample.family, len(sample.labels)) for sample in PROBE.samples(facts)]
    assert len(shown) == 4
    assert all(labels[family] == count for family, count in shown)
