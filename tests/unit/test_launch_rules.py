"""Which release takes which flag and value, against the parsers of those releases."""

from __future__ import annotations

import json

import pytest

from sidecar.launch import flagnames
from sidecar.launch.rules import (
    RELEASES,
    Fit,
    ambiguity,
    at_least,
    choices,
    fit,
    may_be_ambiguous,
    nearest,
    refused_in_file,
)
from tests.fakes.sglang import CAPTURES

OPTIONS = json.loads((CAPTURES / "launch-options.json").read_text())
FREE = {"--device", "--host", "--speculative-draft-attention-backend"}
"""Flags with any text: SGLang's parser has no choices for them."""


def test_the_releases_are_those_that_were_read() -> None:
    """The table and the capture name the same releases, oldest first."""
    assert tuple(OPTIONS) == RELEASES


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_is_as_its_parser_says(release: str) -> None:
    """Every flag that a release has is known to be there with exactly its choices, every other one is not."""
    for flag in {flag for options in OPTIONS.values() for flag in options}:
        if flag not in OPTIONS[release]:
            assert fit(flag, "x", release) is Fit.NO_FLAG, flag
            continue
        taken = set(OPTIONS[release][flag])
        assert (choices(flag, release) or set()) == taken, flag
        assert all(fit(flag, value, release) is Fit.ACCEPTED for value in taken), flag


@pytest.mark.parametrize(
    ("flag", "value", "release", "expected"),
    [
        ("--mamba-backend", "bogus", "0.5.16", Fit.REFUSED),
        ("--mamba-backend", "bogus", "0.5.16+cu130", Fit.REFUSED),
        ("--mamba-backend", "flashinfer", "0.5.8", Fit.NO_FLAG),
        ("--mamba-backend", "flashinfer", "0.5.9", Fit.ACCEPTED),
        ("--attention-backend", "fa4", "0.5.2", Fit.REFUSED),
        ("--attention-backend", "fa4", "0.5.3", Fit.ACCEPTED),
        ("--attention-backend", "FA3", "0.5.16", Fit.UNLISTED),
        ("--attention-backend", "dual_chunk_flash_attn", "0.5.23", Fit.REFUSED),
        ("--attention-backend", "dual_chunk_flash_attn", "0.5.21", Fit.ACCEPTED),
        ("--attention-backend", "brand_new", "0.6.0", Fit.UNLISTED),
        ("--mamba-backend", "brand_new", "0.6.0", Fit.UNLISTED),
        ("--mamba-backend", "triton", "0.6.0", Fit.ACCEPTED),
        ("--mm-attention-backend", "fa4", "0.5.8.post1", Fit.REFUSED),
        ("--mm-attention-backend", "fa4", "0.5.9", Fit.ACCEPTED),
        ("--sampling-backend", "x", "0.5.16", Fit.REFUSED),
        ("--speculative-algorithm", "MINE", "0.5.9", Fit.REFUSED),
        ("--speculative-algorithm", "MINE", "0.5.16", Fit.ACCEPTED),
        ("--mamba-ssm-dtype", "float16", "0.5.8.post1", Fit.REFUSED),
        ("--prefill-attention-backend", "fa3", "0.4.6.post5", Fit.NO_FLAG),
        ("--prefill-attention-backend", "fa3", "0.4.8", Fit.ACCEPTED),
        ("--mamba-backend", "bogus", None, Fit.UNKNOWN),
        ("--mamba-backend", "bogus", "0.0.0.dev1+g1234", Fit.UNKNOWN),
        ("--mamba-backend", "bogus", "unknown", Fit.UNKNOWN),
        ("--kv-cache-dtype", "bogus", "0.5.16", Fit.REFUSED),
        ("--kv-cache-dtype", "nvfp4", "0.5.12.post1", Fit.REFUSED),
        ("--kv-cache-dtype", "fp4_e2m1", "0.5.23", Fit.REFUSED),
        ("--kv-cache-dtype", "bf16", "0.5.9", Fit.ACCEPTED),
        ("--tp-size", 4, None, Fit.ACCEPTED),
        ("--device", "tpu", "0.5.16", Fit.ACCEPTED),
    ],
)
def test_a_value_is_refused_only_where_that_is_certain(
    flag: str, value: str | int, release: str | None, expected: Fit
) -> None:
    """Between two known releases either may be right; plugins and newer releases may know more (case 45)."""
    assert fit(flag, value, release) is expected


def test_flags_without_choices_take_anything() -> None:
    """What the parsers leave open is not judged."""
    assert all(choices(flag, release) is None for flag in FREE for release in RELEASES)


@pytest.mark.parametrize(
    ("release", "expected"),
    [("0.5.16", "0.5.16"), ("0.5.17", "0.5.16"), ("9.9", "0.5.23"), ("0.3", None), (None, None)],
)
def test_the_nearest_older_release(release: str | None, expected: str | None) -> None:
    """Choices are shown of the newest release that is not newer than the installed one."""
    assert nearest(release) == expected


def test_deprecated_flags_leave_configuration_files() -> None:
    """0.5.16 ends with an error for disable-cuda-graph in a file, 0.5.12.post1 took it; between them it is open."""
    seen = [refused_in_file("--disable-cuda-graph", release) for release in ("0.5.12.post1", "0.5.14", "0.5.16", None)]
    assert seen == [False, False, True, False]
    assert not refused_in_file("--tp-size", "0.5.16")


def test_releases_are_compared_as_versions() -> None:
    """A post-release is newer than its release, and what is not known is not at least anything."""
    assert [at_least(one, "0.5.9") for one in ("0.5.9.post1", "0.5.10", "0.5.8.post1", None)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("release", sorted(set(RELEASES) & set(flagnames.RELEASES)))
def test_all_names_hold_those_that_are_listed(release: str) -> None:
    """The table of names and the parsers that were captured agree on every listed flag."""
    known = flagnames.names(release)
    assert set(OPTIONS[release]) <= known
    listed = {flag for options in OPTIONS.values() for flag in options}
    assert not (listed - set(OPTIONS[release])) & known


@pytest.mark.parametrize(
    "word",
    ["--attention", "--mod", "--decode", "--prefill", "--sampling", "--moe", "--pp", "--kv", "--mm", "--skip", "--ssl"],
)
def test_an_abbreviation_of_several_flags_is_ambiguous(word: str) -> None:
    """SGLang 0.5.16's parser ends with "ambiguous option" for each of them."""
    found = ambiguity(word, "0.5.16")
    assert found is not None
    assert found.sure
    assert len(found.flags) > 1
    assert all(flag.startswith(word) for flag in found.flags)


@pytest.mark.parametrize(
    ("word", "release", "sure"),
    [
        ("--tp", "0.5.16", None),
        ("--attention-back", "0.5.16", None),
        ("--model", "0.5.16", None),
        ("--nothing-like-it", "0.5.16", None),
        ("--attention", "0.4.6.post5", None),
        ("--attention", "0.5.17", True),
        ("--attention", "9.9", False),
        ("--attention", "0.3", None),
        ("--attention", None, None),
    ],
)
def test_ambiguity_is_told_only_where_it_is_known(word: str, release: str | None, sure: bool | None) -> None:
    """One that is unique or exact is none, and a release that was not read may have fewer flags."""
    found = ambiguity(word, release)
    assert (None if found is None else found.sure) is sure


@pytest.mark.parametrize(
    ("word", "release", "expected"),
    [
        ("--attention", None, True),
        ("--attention", "0.3", True),
        ("--attention-back", None, False),
        ("--attention", "0.5.16", False),
        ("--ssl", "0.5.9.post1", True),
        ("--ssl", "0.5.11", False),
        ("--ssl", "0.5.9", False),
        ("--tp", "0.5.11", False),
    ],
)
def test_what_may_be_ambiguous(word: str, release: str | None, expected: bool) -> None:
    """Without the release, or between one that takes a word and one that does not, it is not known."""
    assert may_be_ambiguous(word, release) is expected
