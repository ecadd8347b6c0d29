"""Makes an environment that needs nothing of the image it lands in but glibc; run while the images are built.

``bundle.py make FOLDER`` copies the interpreter that runs it (3.11 or later), its standard library and the shared
libraries they need to ``FOLDER/python``, and lays a virtual environment around them: ``FOLDER/bin/python`` then works
in any image, whatever Python that has or has not. ``FOLDER`` must be the path that it will have there.

``bundle.py check FOLDER --glibc 2.35`` fails where a file in it needs a newer glibc than that.

A program of its own: nothing but the standard library, and ``ldd`` and ``patchelf`` on PATH.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

GLIBC = re.compile(r"(?:ld-linux.*|linux-vdso|lib(?:c|m|dl|rt|pthread|util|resolv|anl))\.so\.\d+")
"""Libraries of glibc itself, which stay the image's own: two of them in one process do not work."""
LEFT_OUT = frozenset(
    {
        # Other packages, and what only developers use.
        "__pycache__", "site-packages", "dist-packages", "sitecustomize.py", "EXTERNALLY-MANAGED",
        "test", "distutils", "idlelib", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "venv",
        # What wants a screen, a terminal or a database.
        "tkinter", "turtle.py", "curses", "dbm", "sqlite3",
    }
)  # fmt: skip
LEFT_OUT_EXTENSIONS = re.compile(r"_?(?:tkinter|curses|curses_panel|g?dbm|sqlite3|readline|crypt|nis|test\w*|xx\w*)\.")
"""The extension modules of those, and two whose libraries nothing else uses."""
UNWINDER = "libgcc_s.so.1"
"""Loaded by glibc when a thread ends; a process that does not find it then is aborted."""


def main() -> None:
    """Parse and call."""
    parser = argparse.ArgumentParser(description="An environment that needs nothing of its image but glibc.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="copy this interpreter and lay an environment around it")
    making.add_argument("folder", type=Path)
    checking = commands.add_parser("check", help="fail where something needs a newer glibc")
    checking.add_argument("folder", type=Path)
    checking.add_argument("--glibc", required=True, help="the oldest one that it must run on, such as 2.35")
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder)
    else:
        check(options.folder, options.glibc)


def make(folder: Path) -> None:
    """Copy the interpreter to ``folder/python`` and make ``folder`` an environment of it."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the image may have any
        sys.exit(f"bundle: the agent needs Python 3.11 or later, this is {sys.version.split()[0]}")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base = folder / "python"
    program, library = base / "bin" / name, base / "lib" / name
    program.parent.mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), program)
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_left_out)
    bring_libraries(base / "lib", [program, *elf_files(library)])
    (folder / "bin").mkdir()
    for link in ("python", "python3", name):
        (folder / "bin" / link).symlink_to(f"../python/bin/{name}")
    (folder / "lib" / name / "site-packages").mkdir(parents=True)
    settings = f"home = {base}/bin\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n"
    (folder / "pyvenv.cfg").write_text(settings)


def bring_libraries(target: Path, files: list[Path]) -> None:
    """Copy to ``target`` what these files need besides glibc, and let them find it there before anywhere else."""
    needed = {UNWINDER: loaded_path(UNWINDER)}
    users = []
    for file in files:
        found = {name: path for name, path in dependencies(file).items() if not GLIBC.fullmatch(name)}
        needed |= found
        users += [file] if found else []
    for name, path in needed.items():
        shutil.copy(path, target / name)
    for file in [*users, *(target / name for name in needed)]:
        # RPATH, not RUNPATH: a server's image may set LD_LIBRARY_PATH, and what lies there is not meant for us.
        command = ["patchelf", "--force-rpath", "--set-rpath", f"$ORIGIN/{os.path.relpath(target, file.parent)}"]
        subprocess.run([*command, str(file)], check=True)


def dependencies(file: Path) -> dict[str, str]:
    """The libraries that the loader would load for a file, with their paths."""
    said = subprocess.run(["ldd", str(file)], check=False, capture_output=True, text=True)
    if missing := re.findall(r"^\s*(\S+) => not found", said.stdout, re.MULTILINE):
        sys.exit(f"bundle: {file} needs {', '.join(missing)}, which this image lacks")
    return dict(re.findall(r"^\s*(\S+) => (/\S+)", said.stdout, re.MULTILINE))


def loaded_path(library: str) -> str:
    """Where the loader finds a library."""
    ctypes.CDLL(library)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f"/{library}"):
            return line[line.index("/") :]
    sys.exit(f"bundle: {library} is not where it was loaded from")


def check(folder: Path, floor: str) -> None:
    """Say which files need a newer glibc than ``floor``, and fail if there are any."""
    needs = {file: glibc_needed(file) for file in elf_files(folder)}
    allowed = tuple(map(int, floor.split(".")))
    beyond = [f"{file.relative_to(folder)} needs {_text(one)}" for file, one in needs.items() if one > allowed]
    if beyond:
        remedy = "build on an image with an older glibc, or allow it with --build-arg GLIBC"
        sys.exit(f"bundle: this would not run on glibc {floor}: {'; '.join(beyond)}; {remedy}")
    sys.stdout.write(f"runs on glibc {_text(max(needs.values()))} and later\n")


def glibc_needed(file: Path) -> tuple[int, int]:
    """The newest version of glibc whose symbols a file asks for."""
    data = file.read_bytes()
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)]
    # A compact form of relocations that loaders understand from then on.
    return max([*versions, (2, 36)] if b"GLIBC_ABI_DT_RELR" in data else [*versions, (2, 0)])


def elf_files(folder: Path) -> Iterator[Path]:
    """Programs and libraries below a folder."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as opened:
                if opened.read(4) == b"\x7fELF":
                    yield file


def _left_out(folder: str, names: list[str]) -> set[str]:
    if folder.endswith("/lib-dynload"):
        return {name for name in names if LEFT_OUT_EXTENSIONS.match(name)}
    return {name for name in names if name in LEFT_OUT or name.startswith("config-")}


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


if __name__ == "__main__":
    main()
