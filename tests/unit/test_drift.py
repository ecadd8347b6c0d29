"""What counts as a change of the environment, and what is only a gap in what is known."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.drift import RECENT, advance, compare, expectation, resume, written
from sidecar.model import ChangeKind, Deviation, Known, Observed

PACKAGES = "packages/server"


def one(value: str | None, *, source: str = PACKAGES, build: str | None = None) -> Observed:
    return Observed(value=value, source=source, build=build)


def after(*rounds: dict[str, Observed]) -> Known:
    """What is known after rounds of observations, one second apart."""
    known = Known()
    for second, observed in enumerate(rounds):
        known = advance(known, observed, float(second))
    return known


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (one("0.5.15"), one("0.5.16"), ChangeKind.CHANGED),
        (one("0.5.16"), one("0.5.15"), ChangeKind.CHANGED),
        (one("2.11.0+cu129"), one("2.11.0+cu130"), ChangeKind.REBUILT),
        (one("2.11.0"), one("2.11.0+cu130"), ChangeKind.REBUILT),
        (one("0.6.14", build="a"), one("0.6.14", build="b"), ChangeKind.REBUILT),
        (one(None), one("0.6.12"), ChangeKind.ADDED),
        (one("0.6.12"), one(None), ChangeKind.REMOVED),
        (one("open"), one("proprietary"), ChangeKind.CHANGED),
    ],
    ids=lambda value: value.name if isinstance(value, ChangeKind) else f"{value.value}-{value.build}",
)
def test_kinds_are_told_apart(before: Observed, now: Observed, kind: ChangeKind) -> None:
    """Added, removed, changed and another build of the same version are four things."""
    known = after({"torch": before}, {"torch": now})
    assert [(change.kind, change.before, change.after, change.at) for change in known.recent] == [
        (kind, before.value, now.value, 1.0)
    ]
    assert known.counts == {"torch": 1}
    assert known.last_change == {"torch": 1.0}


@pytest.mark.parametrize(
    "rounds",
    [
        [{"torch": one("2.11.0")}, {"torch": one("2.11.0")}],
        [{"torch": one("2.11.0")}, {}, {"torch": one("2.11.0")}],
        [{}, {"torch": one("2.11.0")}],
        [{"sglang": one("0.5.16")}, {"sglang": one("0.5.16"), "transformers": one("5.1")}],
        [{"torch": one("2.11.0", build="a")}, {"torch": one("2.11.0")}, {"torch": one("2.11.0", build="a")}],
    ],
    ids=["same", "gap", "first-sight", "new-item", "mark-missing"],
)
def test_a_gap_is_no_change(rounds: list[dict[str, Observed]]) -> None:
    """What was not known in between, or never before, is no change."""
    assert after(*rounds).counts == {}


def test_sources_are_not_compared_with_each_other() -> None:
    """A running server that still reports the old version beside upgraded files makes no change by itself."""
    disk, server = one("0.5.17"), one("0.5.16", source="server/server")
    known = after({"sglang": disk}, {"sglang": server}, {"sglang": disk}, {"sglang": server})
    assert known.counts == {}


def test_each_change_counts_and_the_list_is_bounded() -> None:
    """Counters go on for ever, the list of changes does not grow."""
    rounds = [{"driver": one(str(number))} for number in range(RECENT + 30)]
    known = after(*rounds)
    assert known.counts == {"driver": RECENT + 29}
    assert len(known.recent) == RECENT
    assert known.recent[-1].after == str(RECENT + 29)


def test_nothing_new_gives_the_same_object() -> None:
    """Whoever saves on change need only compare identities."""
    known = after({"driver": one("580")})
    assert advance(known, {"driver": one("580")}, 9.0) is known
    assert advance(known, {}, 9.0) is known


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", None]), max_size=3), max_size=12))
def test_counts_are_the_changes_between_sightings(rounds: list[dict[str, str | None]]) -> None:
    """Each item's count is the number of its neighbouring sightings that differ, whatever gaps lie between."""
    known = after(*({item: one(value) for item, value in observed.items()} for observed in rounds))
    for item in "abc":
        values = [observed[item] for observed in rounds if item in observed]
        assert known.counts.get(item, 0) == sum(a != b for a, b in pairwise(values))


@pytest.mark.parametrize(
    ("wanted", "value", "deviation"),
    [
        ("0.5.16", "0.5.16", None),
        ("0.5.16", "0.5.17", Deviation.DIFFERENT),
        ("2.11.0", "2.11.0+cu130", Deviation.OTHER_BUILD),
        ("2.11.0+cu129", "2.11.0+cu130", Deviation.OTHER_BUILD),
        (">=0.6.1,<0.7", "0.6.14", None),
        (">=0.6.1,<0.7", "0.7.0", Deviation.DIFFERENT),
        (">=0.6.1", "0.7.0rc1", None),
        ("==2.11.*", "2.11.0+cu130", None),
        (">=580", "not a version", Deviation.DIFFERENT),
        (">=0.6.1", None, Deviation.MISSING),
        ("0.6.12", None, Deviation.MISSING),
        ("absent", None, None),
        ("absent", "0.6.12", Deviation.UNEXPECTED),
        ("NVIDIA H200", "NVIDIA H100 80GB HBM3", Deviation.DIFFERENT),
        ("NVIDIA H200", "NVIDIA H200", None),
        ("~=2.1", "2.9.1", None),
        ("~=2.1", "3.0", Deviation.DIFFERENT),
        ("==2.9.1", "2.9.1+cu130", None),
        ("==2.9.1+cu129", "2.9.1+cu130", Deviation.OTHER_BUILD),
        ("== 2.9.1+cu129", "2.9.2+cu130", Deviation.DIFFERENT),
        ("==2.9.1,!=2.9.1+cu130", "2.9.1+cu130", Deviation.DIFFERENT),
        ("!=2.9.0", "2.9.1", None),
        ("===580.159.04", "580.159.04", None),
        ("=== NVIDIA H200", "NVIDIA H200", None),
        (" 0.5.16 ", "0.5.16", None),
    ],
)
def test_a_baseline_is_compared_by_its_own_words(wanted: str, value: str | None, deviation: Deviation | None) -> None:
    """Exact values are exact, specifiers follow PEP 440, and absence can be wanted."""
    found = compare({"item": expectation(wanted)}, {"item": one(value)})
    assert [drift.deviation for drift in found] == ([] if deviation is None else [deviation])


def test_what_is_unknown_does_not_drift() -> None:
    """An item that nobody could observe is neither different nor missing."""
    assert compare({"torch": expectation("2.11.0")}, {"driver": one("580")}) == ()


@pytest.mark.parametrize("text", [">=", ">=zero", "~=1", "<<1", "^0.6", "2.9.*", "2.x", "=2", "===", "==NVIDIA H200"])
def test_a_broken_specifier_says_so(text: str) -> None:
    """What starts like a specifier and is none is refused with the remedy."""
    with pytest.raises(ValueError, match="write an exact value"):
        expectation(text)


@pytest.mark.parametrize("text", ["0.5.16", ">=0.6.1,<0.7", "== 2.9.*", "absent", "NVIDIA H200"])
def test_an_expectation_is_shown_as_it_was_written(text: str) -> None:
    """People find in the report what stands in their file."""
    assert written(expectation(text)) == text


# -- what was remembered and read late ----------------------------------------------------------------


def test_what_changed_while_nobody_looked_counts_once() -> None:
    """A state that could be read only by now still tells what an upgrade before the start changed."""
    before = after({"torch": one("2.11.0"), "driver": one("570")}, {"torch": one("2.12.0")})
    since = after({"torch": one("2.13.0"), "driver": one("570"), "sglang": one("0.5.16")})
    known = resume(before, since, 9.0)
    assert known.counts == {"torch": 2}
    assert [(change.before, change.after, change.at) for change in known.recent] == [
        ("2.11.0", "2.12.0", 1.0),
        ("2.12.0", "2.13.0", 9.0),
    ]
    assert known.last_change == {"torch": 9.0}
    assert advance(known, {"torch": one("2.13.0"), "sglang": one("0.5.16")}, 10.0) is known


def test_changes_since_the_start_are_kept() -> None:
    """An item that changed since the start keeps those changes; what lies before them is not made up."""
    before = after({"torch": one("2.11.0"), "driver": one("570")})
    since = after({"torch": one("2.12.0"), "driver": one("580")}, {"torch": one("2.13.0")})
    known = resume(before, since, 9.0)
    assert known.counts == {"torch": 1, "driver": 1}
    assert {item: seen.value for (item, _), seen in known.seen.items()} == {"torch": "2.13.0", "driver": "580"}


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", None]), max_size=3), max_size=6),
    st.lists(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2", None]), max_size=3), max_size=6),
)
def test_late_is_never_more_than_in_time(early: list[dict[str, str | None]], late: list[dict[str, str | None]]) -> None:
    """Read late, a state makes no change that it would not have made in time, and ends with the same sightings."""
    rounds = [[{item: one(value) for item, value in observed.items()} for observed in part] for part in (early, late)]
    in_time, resumed = after(*rounds[0], *rounds[1]), resume(after(*rounds[0]), after(*rounds[1]), 99.0)
    assert resumed.seen == in_time.seen
    for item in "abc":
        lost = in_time.counts.get(item, 0) - resumed.counts.get(item, 0)
        assert 0 <= lost <= 1
