"""Python interpreters on this machine that a server could be running."""

from __future__ import annotations

import os
import shutil
import sys

NAMES = tuple(f"python3.{minor}" for minor in range(8, 15))


def available() -> list[str]:
    """This interpreter, those in SIDECAR_TEST_PYTHONS (separated by colons) and those on PATH, each once."""
    listed = os.environ.get("SIDECAR_TEST_PYTHONS", "").split(":")
    found = [sys.executable, *listed, *(shutil.which(name) or "" for name in NAMES)]
    # A version manager's shim answers to a name without having the interpreter.
    real = {os.path.realpath(path): path for path in found if path and "shims" not in path}
    return list(real.values())
