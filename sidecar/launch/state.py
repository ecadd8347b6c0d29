"""The variables, words and working folder of a shell that is followed without being run.

A value is known to the letter, or it is `UNSEEN`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, TypeAlias

from msgspec import Struct

from sidecar.launch.grammar import Compound
from sidecar.launch.words import OPEN, SPLITS, Part, Reference, Unknown, Word

_VALUE_LIMIT: Final = 32768
"""Longest value that is followed; the kernel passes 131,072 bytes."""


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def joined(folder: str | None, path: str) -> str | None:
    """A path as it is from a folder; None where that is not known."""
    if path.startswith("/"):
        return posixpath.normpath(path)
    return None if folder is None or not path else posixpath.normpath(posixpath.join(folder, path))


class _Unseen(Enum):
    VALUE = "unseen"


UNSEEN: Final = _Unseen.VALUE
Value: TypeAlias = "str | _Unseen | None"
"""A variable's value; None where it is not set."""


class Loss(Struct, frozen=True):
    """Why nothing that a launch was given can be assumed for its server.

    ``token`` is stable; ``sentence`` says it to people and repeats no value of the launch but a program's name.
    """

    token: str
    sentence: str


class End(Struct, frozen=True):
    """Where a shell surely ends: ``why``, as half a sentence, and whether it ``succeeded``, None where that is open."""

    why: str
    succeeded: bool | None = None


# -- variables --------------------------------------------------------------------------------------

_OF_THE_SHELL: Final = names(
    "OLDPWD SHLVL _ RANDOM SRANDOM SECONDS LINENO PPID UID EUID GROUPS BASHPID BASHOPTS SHELLOPTS BASH_VERSION "
    "BASH_SOURCE FUNCNAME EPOCHSECONDS EPOCHREALTIME HISTCMD DIRSTACK PIPESTATUS OPTIND OPTARG"
)
"""Variables that a shell sets itself, whatever it is given."""
_DEFAULTED: Final = names(
    "PATH HOME SHELL TERM USER LOGNAME HOSTNAME HOSTTYPE MACHTYPE OSTYPE BASH IFS PS1 PS2 PS4 OPTERR COLUMNS LINES "
    "COMP_WORDBREAKS"
)
"""Variables that some shells set where they are not given them."""
RESET_BY_SHELLS: Final = _OF_THE_SHELL | {"IFS"}
"""Variables that a shell does not take over from its environment."""
READONLY_IN_BASH: Final = names("UID EUID PPID SHELLOPTS BASHOPTS BASH_VERSINFO")
"""Variables that bash lets nobody set."""
KEPT_BY_SHELLS: Final = ("PWD", "OLDPWD", "SHLVL", "_")
"""Variables that a shell may hand on with a value of its own."""


class State:
    """Variables and working folder of a process, or of a shell with variables that it does not hand on.

    What was not touched is as in ``base``, unless there is a ``loss``. ``ended``: nothing runs any more. ``doubt``
    says, as half a sentence, why it may have ended; unlike the other it stays when another way leads here, too.
    ``errexit`` and ``nounset`` are options of the shell, None where they are not known; variables that are
    ``readonly`` may not be set again.
    """

    def __init__(self, base: Mapping[str, str] | None, cwd: str | None, loss: Loss | None = None) -> None:
        self.base = base
        self.cwd = cwd
        self.loss = loss
        self.values: dict[str, Value] = {}
        self.exports: dict[str, bool | None] = {}
        self.exports_all: bool | None = False
        self.functions: dict[str, Compound | None] = {}
        self.positional: Sequence[str] | None = None
        self.pwd: Value = UNSEEN
        self.ended: End | None = None
        self.doubt: str | None = None
        self.errexit: bool | None = False
        self.nounset: bool | None = False
        self.readonly: frozenset[str] = frozenset()

    def copy(self) -> State:
        """Another state that is the same so far."""
        other = State(self.base, self.cwd, self.loss)
        other.values, other.exports = dict(self.values), dict(self.exports)
        other.exports_all, other.functions = self.exports_all, dict(self.functions)
        other.positional, other.pwd = self.positional, self.pwd
        other.ended, other.doubt, other.readonly = self.ended, self.doubt, self.readonly
        other.errexit, other.nounset = self.errexit, self.nounset
        return other

    def become(self, other: State) -> None:
        """Take over all of another state."""
        self.base, self.cwd, self.loss, self.pwd = other.base, other.cwd, other.loss, other.pwd
        self.values, self.exports, self.exports_all = other.values, other.exports, other.exports_all
        self.functions, self.positional = other.functions, other.positional
        self.ended, self.doubt, self.readonly = other.ended, other.doubt, other.readonly
        self.errexit, self.nounset = other.errexit, other.nounset

    def same(self, other: State) -> bool:
        """Whether nothing is otherwise in another state."""
        return vars(self) == vars(other)

    def merge(self, other: State) -> None:
        """Become what is certain whichever of the two it is: where one has ended, it is the other."""
        self.doubt = other.doubt = self.doubt or other.doubt
        if other.ended is not None:
            return
        if self.ended is not None:
            self.become(other.copy())
            return
        self.errexit = self.errexit if self.errexit is other.errexit else None
        self.nounset = self.nounset if self.nounset is other.nounset else None
        self.readonly |= other.readonly
        names = [*{*self.values, *self.exports, *other.values, *other.exports}]
        found = [
            (name, self.value(name), other.value(name), self.hands_on(name), other.hands_on(name)) for name in names
        ]
        for name, ours, theirs, handed, handed_there in found:
            self.values[name] = ours if ours == theirs else UNSEEN
            self.exports[name] = handed if handed == handed_there else None
        self.loss = self.loss or other.loss
        self.cwd = self.cwd if self.cwd == other.cwd else None
        self.pwd = self.pwd if self.pwd == other.pwd else UNSEEN
        self.exports_all = self.exports_all if self.exports_all == other.exports_all else None
        for name in {*self.functions, *other.functions}:
            if self.functions.get(name) != other.functions.get(name):
                self.functions[name] = None
        self.positional = self.positional if self.positional == other.positional else None

    def value(self, name: str) -> Value:
        """A variable as a shell has it, handed on or not."""
        if name in self.values:
            return self.values[name]
        if self.loss is not None or self.base is None:
            return UNSEEN
        return self.base.get(name)

    def hands_on(self, name: str) -> bool | None:
        """Whether a variable, if it is set, is one of the environment; None where that is not known."""
        if name in self.exports:
            return self.exports[name]
        if self.loss is not None or self.base is None:
            return None
        return name in self.base

    def assign(self, name: str, value: Value) -> None:
        """Set a variable of a shell."""
        self.touch(name)
        if isinstance(value, str) and len(value) > _VALUE_LIMIT:
            value = UNSEEN
        handed = self.hands_on(name)
        self.pwd = UNSEEN if name == "PWD" else self.pwd
        self.values[name] = value
        self.exports[name] = True if self.exports_all or handed else None if self.exports_all is None else handed

    def touch(self, name: str) -> None:
        """Note that a variable is set or taken away, which ends some shells where they may not do so."""
        if name in self.readonly:
            self.doubt = self.doubt or f"{name} is readonly, and what sets it fails"

    def export(self, name: str, *, on: bool = True) -> None:
        """Hand a variable on, or no longer."""
        value = self.value(name)
        self.values[name] = UNSEEN if on and value is None and name in _DEFAULTED else value
        self.exports[name] = on

    def put(self, name: str, value: Value) -> None:
        """Set a variable of the environment."""
        self.assign(name, value)
        self.exports[name] = True

    def unset(self, name: str) -> None:
        """Take a variable away."""
        self.touch(name)
        self.pwd = UNSEEN if name == "PWD" else self.pwd
        self.values[name] = None
        self.exports[name] = False

    def clear(self) -> None:
        """Leave nothing of the environment."""
        self.base, self.loss, self.values, self.exports = {}, None, {}, {}

    def lose(self, loss: Loss) -> None:
        """Anything may be another than it was."""
        self.loss = self.loss or loss
        self.values, self.exports, self.functions = {}, {}, {}
        self.cwd, self.pwd, self.positional = None, UNSEEN, None

    def exported(self) -> tuple[dict[str, str], set[str]]:
        """(what the environment is known to hold, names of what it may hold besides)."""
        known = dict(self.base or {}) if self.loss is None else {}
        unseen: set[str] = set()
        for name in {*self.values, *self.exports}:
            known.pop(name, None)
            value, handed = self.value(name), self.hands_on(name)
            if value is None or handed is False:
                continue
            if value is UNSEEN or handed is None:
                unseen.add(name)
            else:
                known[name] = value
        return known, unseen

    def process(self) -> State:
        """The state of a program that this shell starts."""
        known, unseen = self.exported()
        if self.base is None and self.loss is None:
            other = State(None, self.cwd)
            touched = {*self.values, *self.exports}
            other.values = {name: known.get(name, UNSEEN if name in unseen else None) for name in touched}
            other.exports = dict.fromkeys(touched, True)
            other.pwd = self.pwd
            return other
        other = State(known, self.cwd, self.loss)
        other.values = {**(known if self.loss else {}), **dict.fromkeys(unseen, UNSEEN)}
        other.exports, other.pwd = dict.fromkeys(other.values, True), self.pwd
        if self.loss:
            # What was taken away since is known to be absent.
            gone = [name for name in self.values if name not in other.values]
            other.values.update(dict.fromkeys(gone, None))
            other.exports.update(dict.fromkeys(gone, True))
        return other


# -- words ------------------------------------------------------------------------------------------

_BLANK: Final = re.compile(r"[ \t\n]+")


class Expansion:
    """Makes words of a script into those that a command gets, with marks for what is not known."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._fields: list[str] = [""]
        self._there = False

    def give(self, arguments: Sequence[str]) -> None:
        """Let the parameters of the shell be known."""
        self._state.positional = list(arguments)

    def fields(self, word: Word) -> list[str]:
        """The words that one word becomes."""
        self._fields, self._there = [""], False
        several = any(isinstance(part, Reference) and part.name in {"@", "*"} for part in word.parts)
        self._there = word.quoted and not several
        for part in word.parts:
            if isinstance(part, str):
                self._fields[-1] += part
                self._there = self._there or part != ""
            elif isinstance(part, Unknown):
                self._open(splits=part.splits)
            else:
                self._reference(part)
        return self._fields if self._there else self._fields[:-1]

    def _open(self, *, splits: bool) -> None:
        self._fields[-1] += SPLITS if splits else OPEN
        self._there = True

    def _reference(self, part: Reference) -> None:
        if part.name in {"@", "*"}:
            self._positional(part)
            return
        value = self.value_of(part)
        if value is None:
            return
        if value is UNSEEN:
            self._open(splits=not part.quoted)
        elif part.quoted:
            self._fields[-1] += value
            self._there = True
        elif "IFS" in self._state.values or any(one in value for one in "*?["):
            self._open(splits=True)
        else:
            pieces = _BLANK.split(value)
            for index, piece in enumerate(pieces):
                if index and self._there:
                    self._fields.append("")
                    self._there = False
                self._fields[-1] += piece
                self._there = self._there or piece != ""

    def _positional(self, part: Reference) -> None:
        known = self._state.positional
        if known is None or part.name == "*" or part.operator or not part.quoted:
            self._open(splits=True)
            return
        for index, piece in enumerate(known[1:]):
            if index:
                self._fields.append("")
            self._fields[-1] += piece
            self._there = True

    def value_of(self, part: Reference) -> Value:
        """What a reference stands for; ``${NAME:=word}`` assigns."""
        state = self._state
        value = self._parameter(part.name)
        if part.operator in {"", "~"}:
            if value is None and part.operator == "" and state.nounset is not False:
                why = f"the variable {part.name} is not set, and `set -u` ends the script there"
                if state.nounset:
                    state.ended = state.ended or End(why, succeeded=False)
                else:
                    state.doubt = state.doubt or why
            return UNSEEN if part.operator == "~" and not value else value
        if value is UNSEEN:
            if "=" in part.operator:
                state.assign(part.name, UNSEEN)
            return UNSEEN
        absent = value is None or (part.operator.startswith(":") and value == "")
        match part.operator[-1]:
            case "+":
                return None if absent else self.text(part.word)
            case "-":
                return self.text(part.word) if absent else value
            case "=":
                if absent:
                    value = self.text(part.word)
                    state.assign(part.name, "" if value is None else value)
                return value
        if absent:
            why = f"the variable {part.name} must be set there, and is not"
            state.ended = state.ended or End(why, succeeded=False)
            return UNSEEN
        return value

    def _parameter(self, name: str) -> Value:
        state = self._state
        if name == "PWD":
            return state.pwd
        if name.isdigit() and len(name) < 4:
            if state.positional is None or (name == "0" and not state.positional):
                return UNSEEN
            return dict(enumerate(state.positional)).get(int(name))
        if name in _OF_THE_SHELL or not name.isidentifier():
            return UNSEEN
        value = state.value(name)
        return UNSEEN if value is None and name in _DEFAULTED and name not in state.values else value

    def text(self, parts: Iterable[Part]) -> Value:
        """The value that an assignment of these parts gives."""
        found = ""
        for part in parts:  # all of them: any may assign, or end the shell
            if isinstance(part, str):
                found += part
            elif isinstance(part, Reference) and part.name not in {"@", "*"}:
                value = self.value_of(part)
                found += OPEN if value is UNSEEN else value or ""
            else:
                found += OPEN
        return found if OPEN not in found else UNSEEN

    def declared(self, parts: Sequence[Part]) -> Value:
        """The value behind ``export NAME=``, which some shells split into words and others do not."""
        splits = False
        for part in parts:
            if isinstance(part, Reference) and not part.quoted:
                value = self.value_of(part)
                splits |= isinstance(value, str) and (
                    _BLANK.search(value) is not None or any(one in value for one in "*?[")
                )
        value = self.text(parts)
        return UNSEEN if splits else value
