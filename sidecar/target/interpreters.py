"""Interpreters by the names of files alone: whether one is there, and which packages it has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from sidecar import procfs
from sidecar.config import Settings
from sidecar.target.facts import LEFT_TO_READER


class Interpreter(Struct, frozen=True, kw_only=True):
    """An interpreter, by the path that names it, and how it was found."""

    path: str
    source: str


def set_by_hand(settings: Settings) -> Interpreter | None:
    """The interpreter that ``server_python`` names."""
    # Not checked: one that does not exist must reach the probe that says so.
    path = settings.server_python
    return Interpreter(path=path, source="setting") if path else None


def unnamed_source(settings: Settings) -> str:
    """What is said of an interpreter that nothing names."""
    return "not-found" if settings.server_root is None else LEFT_TO_READER


def is_executable(path: Path) -> bool:
    """Whether a program is there that the agent may run."""
    try:
        return path.is_file() and os.access(path, os.X_OK)
    except OSError:
        return False


def holds(python: Path, packages: Sequence[str]) -> bool:
    """Whether one of the packages is installed for an interpreter, by file names alone.

    An editable installation has no folder of its own there, only its metadata: official images install SGLang so.
    """
    pattern = re.compile(rf"(?:__editable__[._])?(?:{'|'.join(packages)})(?:$|[-_][0-9]|\.egg-)")
    for folder in _site_folders(python):
        try:
            if any(pattern.match(entry.name) for entry in folder.iterdir()):
                return True
        except OSError:
            continue
    return False


def _site_folders(python: Path) -> Iterator[Path]:
    """Where packages of an interpreter lie, told from its unresolved path alone."""
    prefix = python.parent.parent
    yield from _packages_under(prefix)
    configuration = procfs.read_text(prefix / "pyvenv.cfg")
    if configuration is None:
        if prefix.name == "usr":  # Debian keeps what pip installs for /usr/bin/python3 under /usr/local
            yield prefix / "lib/python3/dist-packages"
            yield from _packages_under(prefix / "local")
        return
    values = dict(re.findall(r"^\s*([\w-]+)\s*=\s*(.*?)\s*$", configuration, re.MULTILINE))
    if values.get("include-system-site-packages", "").lower() == "true" and values.get("home"):
        yield from _packages_under(Path(values["home"]).parent)


def _packages_under(prefix: Path) -> Iterator[Path]:
    for library in ("lib", "lib64"):
        try:
            versions = sorted(entry for entry in (prefix / library).iterdir() if entry.name.startswith("python3."))
        except OSError:
            continue
        for version in versions:
            yield version / "site-packages"
            yield version / "dist-packages"
