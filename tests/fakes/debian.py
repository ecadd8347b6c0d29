"""Fetches a package of Debian's non-free component through the mirror that apt is set up with."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def download(package: str, folder: Path) -> None:
    """Unpack ``package`` into ``folder`` without installing it.

    Works with a second apt configuration (own lists, own sources), so that the machine's own is left as it
    is. Raises OSError or SubprocessError where that is not possible.
    """
    lists, archives = folder / "lists", folder / "archives"
    for path in (lists / "partial", archives / "partial"):
        path.mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(_source())
    options = [
        f"-oDir::Etc::sourcelist={sources}", "-oDir::Etc::sourceparts=/dev/null", f"-oDir::State::lists={lists}",
        f"-oDir::Cache::archives={archives}", f"-oDir::Cache::pkgcache={folder}/pkg.bin",
        f"-oDir::Cache::srcpkgcache={folder}/src.bin", "-oAPT::Sandbox::User=root",
    ]  # fmt: skip
    _run(["apt-get", *options, "update", "-qq"], folder)
    _run(["apt-get", *options, "download", "-qq", package], folder)
    for file in folder.glob(f"{package}_*.deb"):
        _run(["dpkg-deb", "-x", str(file), str(folder / "root")], folder)


def _source() -> str:
    """A source line for the main archive of the configured mirror, with the non-free component."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for uri, suite in re.findall(r"^deb\s+(?:\[[^]]*]\s+)?(\S+)\s+(\S+)\s+.*\bmain\b", text, re.MULTILINE):
            if "security" not in suite and "debian" in uri:
                return f"deb {uri} {suite} main non-free\n"
        uris = re.search(r"^URIs:\s*(\S+)", text, re.MULTILINE)
        suites = re.search(r"^Suites:\s*(\S+)", text, re.MULTILINE)
        signed = re.search(r"^Signed-By:\s*(/\S+)", text, re.MULTILINE)
        components = re.search(r"^Components:.*\bmain\b", text, re.MULTILINE)
        if uris and suites and components and "security" not in suites[1] and "debian" in (signed[1] if signed else ""):
            return f"deb [signed-by={signed[1] if signed else ''}] {uris[1]} {suites[1]} main non-free\n"
    raise FileNotFoundError("apt has no Debian archive configured")


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=90, capture_output=True, env=os.environ | {"LC_ALL": "C"})
