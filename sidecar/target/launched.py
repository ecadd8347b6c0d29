"""The interpreter of a launch that has not happened yet, as its command names it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from sidecar import procfs
from sidecar.launch.args import LaunchArguments
from sidecar.launch.forms import is_python
from sidecar.pythonflags import PythonOptions, python_options
from sidecar.target.interpreters import Interpreter


def named_by(launch: LaunchArguments) -> Interpreter | None:
    """The interpreter that is found here by the command, directly or in a console script."""
    program = _program_of(launch)
    if program is None:
        return None
    if is_python(program):
        return Interpreter(path=program, source="launch-command")
    interpreter = _shebang(Path(program), launch.environ)
    return Interpreter(path=interpreter, source="launch-command") if interpreter else None


def named_in_root(launch: LaunchArguments) -> Interpreter | None:
    """The interpreter inside another root, where the command names it by its whole path.

    A bare name, a console script or a relative path means a file inside the root, and this machine's own PATH and
    files say nothing of it: the reader, which cannot be led out of the root, looks for it there.
    """
    program = launch.program
    if program is not None and program.startswith("/") and is_python(program):
        return Interpreter(path=program, source="launch-command")
    return None


def launch_options(launch: LaunchArguments, root: str | None) -> PythonOptions:
    """How the interpreter of a launch is started; the kernel starts a console script's with the script."""
    if launch.program is None or is_python(launch.program):
        return python_options(launch.options)
    program = _program_of(launch) if root is None else None
    return PythonOptions(script=program if program is not None and program.startswith("/") else None)


def _program_of(launch: LaunchArguments) -> str | None:
    """The path of the program of a launch, its bare name where it is not found; None where none is known."""
    program, cwd = launch.known_program, launch.cwd or "/"
    if program is None:
        return None
    if "/" not in program:
        folders = launch.environ.get("PATH", os.defpath).split(":")
        found = shutil.which(program, path=":".join(str(Path(cwd, folder)) for folder in folders))
        return found or program
    path = Path(cwd, program)
    if ".." in path.parts:
        # The kernel goes up from where a link leads to.
        return str(Path(os.path.realpath(path.parent), path.name))
    # Links stay: that of a virtual environment tells it.
    return os.path.normpath(path)


def _shebang(script: Path, environ: Mapping[str, str]) -> str | None:
    """The interpreter that a console script names: directly, through ``env``, or through a shell.

    Installers write the last where the interpreter's path is too long for a first line, or holds blanks.
    """
    lines = (procfs.read_text(script, 2048) or "").split("\n")
    words = lines[0][2:].split() if lines[0].startswith("#!") else []
    program: str | None = " ".join(words)
    if len(words) == 2 and words[0].endswith("/env") and is_python(words[1]):
        program = shutil.which(words[1], path=environ.get("PATH", os.defpath))
    elif words == ["/bin/sh"] and len(lines) > 1:
        match = re.match(r"\'\'\'exec\' (?:\"([^\"]+)\"|(\S+)) ", lines[1])
        program = (match[1] or match[2]) if match else None
    return program if program is not None and program.startswith("/") and is_python(program) else None
