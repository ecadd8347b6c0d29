"""A compiled fake of the NVML library, and the scenario file that says what it answers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_nvml.c")
SONAME = "libnvidia-ml.so.1"


def build(directory: Path, version: str = "580.159.04", omit: Sequence[str] = ()) -> Path:
    """Compile the fake into ``directory`` as libnvidia-ml.so.<version> with the usual link beside it.

    ``omit`` names functions that an old library would lack. Returns ``directory``, for LD_LIBRARY_PATH.
    """
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"libnvidia-ml.so.{version}"
    exports = directory / "exports.map"
    hidden = "".join(f" {name};" for name in omit)
    exports.write_text("{ global: nvml*; local: " + hidden + " *; };\n")
    subprocess.run(
        [
            os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror",
            f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={exports}",
            "-o", str(library), str(_SOURCE),
        ],
        check=True,
    )  # fmt: skip
    link = directory / SONAME
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    return directory


class Scenario:
    """The file that tells the fake what to answer; see fake_nvml.c for keys and values.

    Each `set` takes effect with the next NVML call, also in a process that runs already.
    """

    def __init__(self, path: Path, **properties: str | int) -> None:
        self.path = path
        self._lines: dict[str, str | bytes | int] = {}
        self.set(**properties)

    def set(self, lines: Mapping[str, str | bytes | int | None] | None = None, **more: str | int | None) -> None:
        """Merge keys into the scenario; None takes a key back. Calls are named without _v2 or _v3."""
        for key, value in {**(lines or {}), **more}.items():
            if value is None:
                self._lines.pop(key, None)
            else:
                self._lines[key] = value
        data = b"".join(
            key.encode() + b"=" + (value if isinstance(value, bytes) else str(value).encode()) + b"\n"
            for key, value in self._lines.items()
        )
        # In one step: the fake may be reading it right now.
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_bytes(data)
        fresh.replace(self.path)

    def environ(self, library: Path) -> dict[str, str]:
        """Give the variables that make a process load the fake from ``library`` and follow this scenario."""
        return {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCENARIO": str(self.path)}
