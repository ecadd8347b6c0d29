"""Fixtures that every level of tests shares."""

from __future__ import annotations

import pytest

from tests.builders import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    """A clock that the test advances."""
    return FakeClock()
