"""Hold-off: what it delays, and what it must never delay."""

from __future__ import annotations

import pytest

from sidecar.conditions.hold import Track, settle
from sidecar.model import Status
from tests.builders import finding


def published(
    statuses: list[bool | None],
    *,
    final_at: int | None = None,
    same_round: bool = False,
    failed: tuple[int, ...] = (),
) -> list[Status]:
    """The published status after each round, with a hold of 2 bad and 3 good rounds."""
    track: Track | None = None
    seen = []
    for number, status in enumerate(statuses):
        round_ = 1 if same_round else number
        track = settle(
            track,
            finding("a", status, final=number == final_at),
            hold=(2, 3),
            round_=round_,
            informative=number not in failed,
            now=float(number),
        )
        seen.append(track.finding.status)
    return seen


T, F, U = Status.TRUE, Status.FALSE, Status.UNKNOWN


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([True], [T]),
        ([False], [F]),
        ([False, True, True], [F, F, T]),
        ([False, True, False, True, False], [F, F, F, F, F]),
        ([True, False, False, False], [T, T, T, F]),
        ([True, False, False, True, False, False, False], [T, T, T, T, T, T, F]),
        ([False, None, True], [F, U, T]),
        ([None, False], [U, F]),
    ],
)
def test_hold(rounds: list[bool | None], expected: list[Status]) -> None:
    """The first verdict and unknown come at once; a change of verdict needs two bad or three good rounds."""
    assert published(rounds) == expected


def test_a_final_fact_is_not_delayed() -> None:
    """NVML 9, 12, 15, 18 and a verified import take effect in the round that brings them."""
    assert published([False, True], final_at=1) == [F, T]


def test_looking_twice_at_one_round_counts_once() -> None:
    """A re-judgement because time passed is not a round."""
    assert published([False, True, True, True], same_round=True) == [F, F, F, F]


def test_a_failed_round_confirms_nothing() -> None:
    """A round that brought no facts leaves those of the last one in place; one bad observation stays one."""
    assert published([False, True, True, True], failed=(2,)) == [F, F, F, T]


def test_since_is_the_time_of_the_published_change() -> None:
    """Since stays while the status stays, whatever reason it carries."""
    first = settle(None, finding("a", True, reason="x"), hold=(1, 1), round_=1, informative=True, now=1.0)
    second = settle(first, finding("a", True, reason="y"), hold=(1, 1), round_=2, informative=True, now=2.0)
    assert (second.since, second.finding.reason) == (1.0, "y")
    assert settle(second, finding("a", False), hold=(1, 1), round_=3, informative=True, now=3.0).since == 3.0
