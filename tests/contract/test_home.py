"""The tests themselves: nothing of the home of whoever runs them decides what they see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fakes import agent

NESTED = "SIDECAR_TEST_NESTED"


def test_no_test_sees_the_home_of_its_developer(tmp_path: Path) -> None:
    """Neither FlashInfer's cache there, nor packages of the user's, nor variables reach a test."""
    home = Path(os.environ["HOME"])
    assert not list(home.glob(".cache/flashinfer"))
    assert not [name for name in os.environ if name.startswith(("FLASHINFER_", "SGLANG_", "CUDA_"))]
    if NESTED in os.environ:
        return
    theirs = tmp_path / "developer"
    kernels = theirs / ".cache/flashinfer/cubins"
    kernels.mkdir(parents=True)
    (kernels / "one.cubin").write_bytes(b"x")
    given = {"HOME": str(theirs), "FLASHINFER_CUBIN_DIR": str(kernels), "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
    cases = "sees_the_home or (kernels and precompiled)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-k", cases,
         __file__, "tests/contract/test_flashinfer_table.py"],
        env={**os.environ, **given, NESTED: "1"}, cwd=agent.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
