"""Fixtures that every level of tests shares."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import settings

from tests.builders import FakeClock
from tests.fakes import prometheus3
from tests.fakes.nvml import build

# The same examples in every run, so that a change is judged by what it changes. Others are looked for on purpose:
# HYPOTHESIS_PROFILE=searching, or `make fuzz`. No deadline of an example's own: machines are busy.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# What is fetched once stays where it is, whatever home the tests are given.
os.environ.setdefault("SIDECAR_TEST_CACHE", str(prometheus3.cache()))
_ISOLATED = ("unit", "contract")
"""Levels of tests that see nothing of whoever runs them; others have tools with caches and profiles of their own."""
_THEIRS = ("FLASHINFER_", "SGLANG_", "SGL_", "CUDA_", "TORCH_", "TVM_", "TRITON_", "XDG_", "VIRTUAL_ENV", "CONDA_")
"""How the variables begin by which a developer's machine would answer in place of a test's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the browser tests leave pictures of the page."""
    parser.addoption("--screenshots", metavar="FOLDER", type=Path, help="keep the browser tests' pictures of the page")


@pytest.fixture(autouse=True)
def _nobodys_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home of the tests' own, empty: the developer's has caches of FlashInfer, packages and settings in it."""
    if not any(level in request.path.relative_to(request.config.rootpath).parts for level in _ISOLATED):
        return
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    for name in tuple(os.environ):
        if name.startswith(_THEIRS):
            monkeypatch.delenv(name)


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
