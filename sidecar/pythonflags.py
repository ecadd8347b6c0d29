"""Flags of a Python interpreter that decide what an import finds and does, read off a command line."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

_SWITCHES: Final = frozenset("bEIOPsS")
"""Switches without a value that an import can notice, by their letters."""
_UNNOTICED: Final = frozenset("BdiqRtuvx")
"""Other switches that Python takes and goes on."""
_VALUE: Final = {
    "W": re.compile(r"[\w.:]{1,100}", re.ASCII),
    "X": re.compile(r"(?:dev|utf8|no_debug_ranges|frozen_modules|int_max_str_digits|gil)(?:=\w{0,10})?", re.ASCII),
}
"""Flags with a value that an import can notice, with the values that are taken over."""
_LIMIT: Final = 20
_NO_USER_SITE: Final = frozenset({"-s", "-I"})
_IGNORES_VARIABLES: Final = frozenset({"-E", "-I"})


class PythonOptions(Struct, frozen=True):
    """The options in front of what an interpreter runs.

    ``flags`` are those that matter, each a word or two. ``inline`` says that it runs a module or a command (``-m``,
    ``-c``), not a script; ``script`` is the script's path as it was given. ``refused`` is the first option that keeps
    the interpreter from running it: none of Python's (exit status 2), or one that shows a text and ends.
    """

    flags: tuple[str, ...] = ()
    inline: bool = False
    script: str | None = None
    refused: str | None = None


def python_options(arguments: Sequence[str]) -> PythonOptions:
    """Read the arguments of an interpreter, up to what it runs."""
    flags: list[str] = []
    inline = False
    script = refused = None
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word in {"-", "--"}:
            script = next(words, None) if word == "--" else word
            break
        if word == "--check-hash-based-pycs":
            next(words, None)
        if word.startswith("--"):
            refused = refused or (None if word == "--check-hash-based-pycs" else "such an option")
            continue
        for position, letter in enumerate(word[1:], start=2):
            if letter in "cm":
                inline = True
                break
            if letter in _VALUE:
                # What follows an option with a value is that value, as in -Wignore.
                value = word[position:] or next(words, "")
                if _VALUE[letter].fullmatch(value):
                    flags += [f"-{letter}", value]
                break
            if letter in _SWITCHES:
                flags.append(f"-{letter}")
            elif letter not in _UNNOTICED:
                refused = refused or f"-{letter}"
        if inline:
            break
    return PythonOptions(tuple(flags[:_LIMIT]), inline, None if script == "-" else script, refused)


def leads_with_cwd(options: PythonOptions, environ: Mapping[str, str] | None) -> bool:
    """Whether the interpreter puts its working folder first on its import path: for ``-m`` and ``-c`` it does.

    A script puts its own folder there instead, and safe-path options nothing.
    """
    if not options.inline or not {"-I", "-P"}.isdisjoint(options.flags):
        return False
    return not without_ignored(environ or {}, options.flags).get("PYTHONSAFEPATH")


def leading_script(options: PythonOptions, cwd: str | None) -> str | None:
    """The path of the script whose folder the interpreter puts first on its import path; None where there is none.

    A relative one means a file below ``cwd``, and is not known without it. The safe-path variable is left to who
    knows the interpreter's version.
    """
    if options.script is None or not {"-I", "-P"}.isdisjoint(options.flags):
        return None
    if options.script.startswith("/"):
        return options.script
    return None if cwd is None else posixpath.join(cwd, options.script)


def without_ignored(environ: Mapping[str, str], flags: Sequence[str]) -> dict[str, str]:
    """The variables as an interpreter with these flags takes them: some ignore its own, or the user's packages."""
    ignored = not _IGNORES_VARIABLES.isdisjoint(flags)
    kept = {name: value for name, value in environ.items() if not (ignored and name.startswith("PYTHON"))}
    if not _NO_USER_SITE.isdisjoint(flags):
        kept["PYTHONNOUSERSITE"] = "1"
    return kept
