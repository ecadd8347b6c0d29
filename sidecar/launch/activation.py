"""Activation of virtual environments: the file that a shell reads for that, and what comes of it."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import Final

from sidecar.launch.forms import basename
from sidecar.launch.state import UNSEEN, State

_VIRTUAL_ENV: Final = re.compile(r"^[ \t]*(?:export[ \t]+)?VIRTUAL_ENV=(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_VENV_PATH: Final = re.compile(r"^[ \t]*(?:export[ \t]+)?PATH=(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_OLD_PATH: Final = re.compile(r"\"?\$\{?_OLD_VIRTUAL_PATH(?::?-)?\}?\"?")
_NEW_PATH: Final = re.compile(r"\"?\$\{?VIRTUAL_ENV\}?/\"?(?:bin|\$\{?\w+\}?)\"?:\$\{?PATH\}?\"?")
_OF_ACTIVATION: Final = re.compile(
    r"VIRTUAL_ENV(?:_PROMPT|_DISABLE_PROMPT)?|PATH|PYTHONHOME|PS1|_OLD_VIRTUAL_\w+|SCRIPT_PATH"
)
_ALSO_ACTIVATED: Final = ("PKG_CONFIG_PATH", "TCL_LIBRARY", "TK_LIBRARY")
"""Variables that some tools' activations set, too."""
_SET_IN_FILE: Final = re.compile(
    r"(?:^|[;&|(]|\b(?:then|else|do|export|declare|typeset|local))[ \t]*([A-Za-z_]\w*)\+?=", re.MULTILINE
)
_READS_MORE: Final = re.compile(
    r"^[ \t]*(?:\.|source|eval|cd|read|set|printf)[ \t]|[;&|][ \t]*(?:\.|source|eval)[ \t]", re.MULTILINE
)


def activated(path: str, text: str, before: State, after: State) -> State:
    """The state of a shell that has read a file; ``after`` is what comes of its commands.

    An activation is known by what it is for: followed command by command, most of them would lose what is known.
    """
    root = _root(path, text)
    if root is None:
        return after
    if after.loss != before.loss and _only_activates(text):
        after = before.copy()
        for name in _ALSO_ACTIVATED:
            after.put(name, UNSEEN)
    if after.loss == before.loss:
        _activate(root, after, before)
    return after


def _activate(root: str, after: State, before: State) -> None:
    """Do what the activation of a virtual environment does; ``after`` has what else its file sets."""
    for name in [*after.values]:
        if _OF_ACTIVATION.fullmatch(name):
            after.values[name], after.exports[name] = before.value(name), before.hands_on(name)
    path = before.value("PATH")
    earlier = before.value("_OLD_VIRTUAL_PATH") not in {None, ""}
    after.unset("PYTHONHOME")
    after.put("VIRTUAL_ENV", root)
    for shown in ("VIRTUAL_ENV_PROMPT", "PS1"):
        after.put(shown, UNSEEN)
    after.put("PATH", f"{root}/bin:{path}" if isinstance(path, str) and not earlier else UNSEEN)


def _root(path: str, text: str) -> str | None:
    """The folder of the virtual environment that a file activates, where it does that in the usual way."""
    if basename(path) != "activate":
        return None
    root = posixpath.dirname(posixpath.dirname(posixpath.normpath(path)))
    named: set[str] = set()
    for value in _VIRTUAL_ENV.findall(text):
        if "cygpath" in value:
            continue
        try:
            named.update(shlex.split(value))
        except ValueError:
            return None
    paths = _VENV_PATH.findall(text)
    new = [value for value in paths if _NEW_PATH.fullmatch(value)]
    others = [value for value in paths if not _NEW_PATH.fullmatch(value) and not _OLD_PATH.fullmatch(value)]
    return root if named == {root} and len(new) == 1 and not others else None


def _only_activates(text: str) -> bool:
    """Whether a file, in what may not be followed otherwise, sets nothing but what activations set."""
    others = (name for name in _SET_IN_FILE.findall(text) if name not in _ALSO_ACTIVATED)
    return _READS_MORE.search(text) is None and all(map(_OF_ACTIVATION.fullmatch, others))
