"""Fixtures that every level of tests shares."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.builders import FakeClock
from tests.fakes.nvml import build


@pytest.fixture
def clock() -> FakeClock:
    """A clock that the test advances."""
    return FakeClock()


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled fake of the NVML library, for LD_LIBRARY_PATH."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def closed_port() -> str:
    """An address of loopback that refuses connections."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"
