"""What a child says, let in by shape and size."""

from __future__ import annotations

import math

import pytest

from sidecar.untrusted import integer, number, text, texts, versions


def test_texts_can_be_shown_anywhere() -> None:
    """Line ends and escape sequences act on no report and no terminal; long texts may keep their lines."""
    assert text("a\nb\x1b[2J\udc80", 100) == "a?b?[2J?"
    assert text("a\nb\tc\r\x1b", lines=True) == "a\nb\tc??"
    assert texts(["a\n", 5, "b" * 9], size=3) == ("a?", "bbb")
    assert versions({"x\n": "1\n", "y": 2}) == {"x?": "1?"}
    assert len(versions({str(number): "1" for number in range(10000)})) == 6000


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, 10**400, True, "1", None, 1e13])
def test_numbers_are_finite(value: object) -> None:
    """Infinities, numbers beyond any measure and what is no number are not let in."""
    assert number(value) is None


def test_whole_numbers_fit() -> None:
    """A whole number that 64 bits do not hold is none; an ordinary one stays."""
    assert (integer(2**63), integer(-(2**63)), integer(7), number(7), number(0.5)) == (None, -(2**63), 7, 7.0, 0.5)
