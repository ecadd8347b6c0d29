"""A library to preload into the agent: a wall clock that jumps, files that open slowly, a storm of signals."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.c")


def build(directory: Path) -> Path:
    """Compile it; gives the library's path, for LD_PRELOAD. What it does is told by variables, see its source."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "shim.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library
