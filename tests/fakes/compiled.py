"""Real compiled files, whole and cut off, for the dynamic loader to stumble over."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

_SOURCE = """
int filled[200000] = {1};
__attribute__((constructor)) static void touch(void) { for (int i = 0; i < 200000; i += 512) filled[i] += 1; }
"""
"""Writes to all of its data while it is loaded, as relocations do."""


def library(path: Path, *, needs: Path | None = None) -> Path:
    """A shared library of about 800 KB; ``needs`` is one in the folder ``lib`` beside it that it asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(_SOURCE)
    beside = [] if needs is None else ["-Wl,--no-as-needed,-rpath,$ORIGIN/lib", str(needs)]
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "-O0", f"-Wl,-soname,{path.name}", "-o", str(path), str(source), *beside]
    subprocess.run(command, check=True)
    source.unlink()
    return path


def cut_off(path: Path) -> None:
    """Leave the first half of a file, as a disk that was full or an interrupted copy does."""
    os.truncate(path, path.stat().st_size // 2)


def register(packages: Path, dist_info: str, *files: Path) -> None:
    """Add files to the RECORD of a distribution, by the sizes that they have."""
    with (packages / dist_info / "RECORD").open("a", newline="") as out:
        rows = [(str(file.relative_to(packages)), "sha256=0", file.stat().st_size) for file in files]
        csv.writer(out, lineterminator="\n").writerows(rows)
