"""How a process was started: its interpreter, the options of that, and its working folder.

Told from its command line, its environment and what ``/proc`` shows of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from sidecar import procfs
from sidecar.launch.forms import is_python
from sidecar.pythonflags import PythonOptions, python_options
from sidecar.target.interpreters import Interpreter
from sidecar.target.scanning import ServerProcess

_MAPS_LIMIT: Final = 4 * 1024 * 1024
"""A real server maps about 1500 objects in 200 kB; what is larger is cut, not refused."""


def interpreter_of(
    proc: Path, process: ServerProcess, environ: Mapping[str, str] | None, cwd: str | None
) -> Interpreter | None:
    """The interpreter that a process on our own files was started with, as it was named.

    Never the ``exe`` link first: it shows the base interpreter, which does not reveal a virtual environment.
    """
    program = process.argv[0]
    if (named_path := _from_cwd(program, cwd)) is not None:
        return Interpreter(path=named_path, source="argv0")
    for path in on_path(program, environ):
        if os.path.lexists(path):
            return Interpreter(path=path, source="server-path")
    virtual = (environ or {}).get("VIRTUAL_ENV", "")
    if virtual.startswith("/") and os.path.lexists(f"{virtual}/bin/python"):
        return Interpreter(path=f"{virtual}/bin/python", source="virtual-env")
    mapped = _mapped_prefix(proc, process.pid)
    if mapped is not None and os.path.lexists(f"{mapped}/bin/python3"):
        return Interpreter(path=f"{mapped}/bin/python3", source="maps")
    executable = procfs.read_link(proc / str(process.pid) / "exe")
    if executable is not None and is_python(executable):
        return Interpreter(path=executable, source="exe")
    return None


def named_in(
    proc: Path, process: ServerProcess, environ: Mapping[str, str] | None, cwd: str | None
) -> Interpreter | None:
    """The interpreter of a process on other files than ours, as far as names alone settle it.

    No path below that root is looked at: only the reader, a child with a deadline, resolves paths inside it.
    None leaves the search to the reader, which is better than a base interpreter without its environment.
    """
    program = process.argv[0]
    if (named_path := _from_cwd(program, cwd)) is not None:
        return Interpreter(path=named_path, source="argv0")
    mapped = _mapped_prefix(proc, process.pid)
    if mapped is not None:
        return Interpreter(path=f"{mapped}/bin/python3", source="maps")
    named = on_path(program, environ)
    virtual = (environ or {}).get("VIRTUAL_ENV", "")
    if virtual.startswith("/") and (not named or f"{virtual}/bin/{program}" in named):
        return Interpreter(path=f"{virtual}/bin/python", source="virtual-env")
    executable = procfs.read_link(proc / str(process.pid) / "exe")
    # In the first folder of the search path no virtual environment can have come before it.
    if executable and is_python(executable) and named and _folder(executable) == _folder(named[0]):
        return Interpreter(path=executable, source="exe")
    return None


def on_path(program: str, environ: Mapping[str, str] | None) -> tuple[str, ...]:
    """The paths where a process may have found an interpreter that it was told without one, in its own order."""
    if environ is None or "/" in program or not is_python(program):
        return ()
    return tuple(f"{folder}/{program}" for folder in environ.get("PATH", "").split(":") if folder.startswith("/"))


def options_of(argv: Sequence[str]) -> PythonOptions:
    """The interpreter's options of a process; none of a program that is no Python interpreter."""
    return python_options(argv[1:]) if argv and is_python(argv[0]) else PythonOptions()


def folder_of(link: str | None, root: str | None) -> str | None:
    """A process's working folder as it names it itself, from the link's text and that of its root's link."""
    if link is None or not link.startswith("/") or link.endswith(" (deleted)"):
        return None
    if root is None or root == "/":
        return link
    # Below another root: what is outside of it has no name in there.
    return link.removeprefix(root) or "/" if link == root or link.startswith(f"{root}/") else None


def _mapped_prefix(proc: Path, pid: int) -> str | None:
    """The prefix of the environment whose kernels a process has mapped."""
    maps = procfs.read_text(proc / str(pid) / "maps", _MAPS_LIMIT) or ""
    match = re.search(r" (/\S*)/lib/python3\.\d+/site-packages/(?:sgl_kernel|torch)/", maps)
    return match.group(1) if match else None


def _from_cwd(program: str, cwd: str | None) -> str | None:
    """The path of an interpreter that was started by a path: absolute, or relative to its working folder."""
    if not is_python(program) or "/" not in program:
        return None
    if program.startswith("/"):
        return program
    return None if cwd is None else f"{cwd.rstrip('/')}/{program.removeprefix('./')}"


def _folder(path: str) -> str:
    """The folder in a path of another root: text, not a file of ours."""
    return path.rpartition("/")[0]
