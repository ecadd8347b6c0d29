"""The forms of a command that starts SGLang, and which word of it does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

WRAPPER_LIMIT: Final = 1024
"""Words among which the program is looked for. A long ``docker run`` has a hundred in front of it."""
_OPTIONS_LIMIT: Final = 32
"""Options of an interpreter or a shell in front of what it runs."""
_MODULES: Final = frozenset({"sglang.launch_server", "sglang.cli.main", "sglang"})
_COMMAND_MODULES: Final = frozenset({"sglang.cli.main", "sglang"})
"""Modules that take the sub-command ``serve``."""
_PYTHON: Final = re.compile(r"^(?:python|pypy)[0-9.]*t?$")
_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_PYTHON_OPTIONS_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_SHOWN: Final = re.compile(r"[A-Za-z0-9_.+-]{1,40}")


class LaunchForm(StrEnum):
    """How a command starts SGLang."""

    MODULE = "module"
    """``python -m sglang.launch_server``, or that file run as a script."""
    CONSOLE_SCRIPT = "console-script"
    """``sglang serve``."""
    FLAGS = "flags"
    """Flags alone, without a command."""
    OTHER = "other"
    """A command that is none of these: a wrapper script that may pass its arguments on."""


def is_python(program: str) -> bool:
    """Whether a program's file name is that of a Python interpreter."""
    return _PYTHON.match(basename(program)) is not None


def is_shell(program: str) -> bool:
    """Whether a program's file name is that of a shell. A login shell's leading dash counts."""
    return basename(program).lstrip("-") in _SHELLS


def server_form(argv: Sequence[str]) -> LaunchForm | None:
    """How ``argv`` itself is an SGLang server's main process, or None when it is not one.

    Strict about positions: a shell, an init process or this agent's own command line may contain a launch as
    their argument without being the server.
    """
    located = locate_at(argv, 0, argv[0]) if argv else None
    return None if located is None else located[0]


def basename(path: str) -> str:
    """The file name of a program."""
    return path.rsplit("/", 1)[-1]


def named(program: str) -> str:
    """A program for a sentence: its name where that looks like one, and can be nothing else."""
    name = basename(program)
    return name if _SHOWN.fullmatch(name) else "another program"


def shell_script(words: Sequence[str], start: int) -> str | None:
    """The string that a shell gets with ``-c``, wherever its other options stand."""
    place = script_place(words, start)
    return None if place is None else words[place]


def script_place(words: Sequence[str], start: int) -> int | None:
    """The index of that string."""
    position, wanted = start + 1, False
    for _ in range(_OPTIONS_LIMIT):
        if position >= len(words):
            return None
        word = words[position]
        if len(word) < 2 or word[0] not in "-+" or word == "--":
            break
        position += 1
        if word.startswith("--"):
            position += word in {"--rcfile", "--init-file"}
            continue
        wanted = wanted or (word[0] == "-" and "c" in word)
        position += word.count("o") + word.count("O")  # each takes the name of an option: -eo pipefail
    while position < len(words) and words[position] == "--":
        position += 1
    return position if wanted and position < len(words) else None


def locate(argv: Sequence[str]) -> tuple[LaunchForm, int, int] | None:
    """(form, index of the program, index of the first server flag) of the launch inside a command."""
    for start, word in enumerate(argv[:WRAPPER_LIMIT]):
        found = locate_at(argv, start, word)
        if found is not None:
            return found
    return None


def locate_at(argv: Sequence[str], start: int, word: str) -> tuple[LaunchForm, int, int] | None:
    """The same for a launch whose program is at this place of the command."""
    if basename(word) == "sglang" and _has_serve(argv, start + 1):
        return LaunchForm.CONSOLE_SCRIPT, start, start + 2
    if not is_python(word):
        return None
    position = start + 1
    for _ in range(_OPTIONS_LIMIT):
        if position >= len(argv):
            return None
        option = argv[position]
        if option.startswith("-m") or (option.startswith("-") and not option.startswith("--") and option[-1] == "m"):
            attached = option[2:] if option.startswith("-m") else ""
            module = attached or (argv[position + 1] if position + 1 < len(argv) else "")
            rest = position + (1 if attached else 2)
            return _module_launch(argv, start, module, rest)
        if not option.startswith("-"):
            break
        position += 2 if option in _PYTHON_OPTIONS_WITH_VALUE else 1
    if position >= len(argv):
        return None
    script = argv[position]
    if script.endswith("sglang/launch_server.py"):
        return LaunchForm.MODULE, start, position + 1
    if basename(script) == "sglang" and _has_serve(argv, position + 1):
        return LaunchForm.CONSOLE_SCRIPT, start, position + 2
    return None


def _module_launch(argv: Sequence[str], start: int, module: str, rest: int) -> tuple[LaunchForm, int, int] | None:
    if module not in _MODULES:
        return None
    if module in _COMMAND_MODULES:
        if not _has_serve(argv, rest):
            return None
        rest += 1
    return LaunchForm.MODULE, start, rest


def _has_serve(argv: Sequence[str], position: int) -> bool:
    return position < len(argv) and argv[position] == "serve"
