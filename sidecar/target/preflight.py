"""A launch that has not happened yet, judged where the agent runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sidecar.childenv import may_matter
from sidecar.config import Settings
from sidecar.launch.args import LaunchArguments, parse_launch
from sidecar.launch.forms import LaunchForm, is_python
from sidecar.launch.shell import Outside
from sidecar.model import Scope, Target
from sidecar.pythonflags import PythonOptions, leading_script, leads_with_cwd, python_options, without_ignored
from sidecar.regular import IrregularError, read_regular
from sidecar.target.address import url_source
from sidecar.target.configuration import ConfigFiles
from sidecar.target.facts import PREFLIGHT, SET_BY_LAUNCH
from sidecar.target.image import ImageInterpreters
from sidecar.target.interpreters import Interpreter, set_by_hand, unnamed_source
from sidecar.target.launched import launch_options, named_by, named_in_root

_FINDING: Final = frozenset(
    {"PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONPLATLIBDIR", "HOME"}
)
"""Variables that decide which packages an interpreter finds."""
_OF_SHELLS: Final = frozenset({"PWD", "OLDPWD", "SHLVL", "_"})
"""Variables that a shell hands on with values of its own, which no import reads."""
_SCRIPT_LIMIT: Final = 256 * 1024
"""Bytes of the longest file that a shell of a launch reads and that is followed."""


def preflight(settings: Settings, image: ImageInterpreters, configs: ConfigFiles, environ: Mapping[str, str]) -> Target:
    """The server that a launch would start right here; ``environ`` is what the launch would be given."""
    own = _own_folder()
    root = settings.server_root
    outside = Outside(
        environ=environ,
        cwd=own,
        is_absent=lambda path: root is None and not os.path.lexists(path),
        is_folder=lambda path: _may_be_entered((root or "") + path),
        # A file of another root may be a link out of it.
        read=_script_text if root is None else lambda _: None,
    )
    launch = parse_launch(settings.launch, configs.reader(own), outside)
    options = launch_options(launch, root)
    unseen = _heeded(launch.unseen, options)
    by_hand = set_by_hand(settings)
    cwd_on_path = _module_launch(launch, options)
    doubt = _unread(launch, unseen, cwd_on_path=cwd_on_path is True)
    # Where its packages are is the operator's word then; how it finds them is not seen all the same.
    unread = None if by_hand is not None or root is not None else doubt
    interpreter = by_hand if by_hand is not None or unread is not None else _launched_by(launch, root, image)
    known = doubt is None
    why = "A launch is judged before it happens: it would run right here."
    if launch.limits:
        why += " It sets limits (ulimit) that nothing here has, so no import stands for its own."
    if launch.depends:
        why += f" The server is started only if what is in front of it lets it: {', '.join(launch.depends)}."
    return Target(
        url=settings.server_url,
        url_source=url_source(settings),
        scope=Scope.SERVER,
        python=interpreter.path if interpreter else None,
        python_source=interpreter.source if interpreter else unnamed_source(settings),
        root=root,
        cwd=launch.cwd,
        cwd_on_path=cwd_on_path,
        script=leading_script(options, launch.cwd),
        python_flags=options.flags,
        launch=launch.flags,
        launch_source=PREFLIGHT,
        notes=launch.notes,
        environ=launch.environ if known else None,
        environ_missing=None if known and not any(map(may_matter, unseen)) else SET_BY_LAUNCH,
        unseen=unseen,
        unread=unread,
        limited=launch.limits,
        far=launch.far,
        why=why if unread is None else f"{why} {unread}",
    )


def _unread(launch: LaunchArguments, unseen: frozenset[str], *, cwd_on_path: bool) -> str | None:
    """Why the environment of a launch is not known well enough to be read, as a sentence; None where it is."""
    if launch.loss is not None:
        return f"The server's environment is not seen: {launch.loss.sentence}"
    program = launch.program or ""
    refused = python_options(launch.options).refused if is_python(program) else None
    if refused is not None:
        reached = f"It is not certain that the server is reached: with {refused} Python does not run it."
        return f"The server's environment is not seen: {reached}"
    deciding = {name for name in unseen if name in _FINDING}
    if launch.program is not None and "/" not in program and "PATH" in unseen:
        deciding.add("PATH")
    if deciding:
        names = ", ".join(sorted(deciding))
        return f"The server's environment is not seen: the launch sets {names} to what only its shell knows."
    path = [*launch.environ.get("PYTHONPATH", "/").split(":"), *([program] if "/" in program else ["/"])]
    relative = cwd_on_path or any(not entry.startswith("/") for entry in path)
    if launch.cwd is None and relative:
        return "The server's environment is not seen: the folder that the launch goes to is not known."
    return None


def _launched_by(launch: LaunchArguments, root: str | None, image: ImageInterpreters) -> Interpreter | None:
    if root is not None:
        return named_in_root(launch)
    return named_by(launch) or image.search(launch.environ)


def _heeded(unseen: frozenset[str], options: PythonOptions) -> frozenset[str]:
    """Those of the variables that a program may take notice of: not a shell's own, nor what Python is to ignore."""
    return (frozenset(without_ignored(dict.fromkeys(unseen, ""), options.flags)) & unseen) - _OF_SHELLS


def _module_launch(launch: LaunchArguments, options: PythonOptions) -> bool | None:
    """Whether a launch to come puts its working folder on the import path; None where its form does not tell."""
    if launch.form is LaunchForm.CONSOLE_SCRIPT:
        return False
    if launch.form is LaunchForm.MODULE and options != PythonOptions():
        return leads_with_cwd(options, launch.environ)
    if launch.environ.get("PYTHONSAFEPATH"):
        return False
    return True if launch.form is LaunchForm.MODULE else None


def _own_folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was deleted
        return None


def _may_be_entered(path: str) -> bool:
    try:
        return os.path.isdir(path) and os.access(path, os.X_OK)  # noqa: PTH112 - the answer is about a text
    except (OSError, ValueError):
        return False


def _script_text(path: str) -> str | None:
    """The text of a file that a shell of a launch reads commands from; only of a regular one of modest size."""
    try:
        content = read_regular(path, _SCRIPT_LIMIT + 1)
        return content.decode() if len(content) <= _SCRIPT_LIMIT else None
    except (OSError, ValueError, IrregularError):  # a path may hold what no path can, a text what is no UTF-8
        return None
