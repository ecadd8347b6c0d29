"""Splitting a shell script into commands and words as a POSIX shell does, without running anything of it.

`shlex` cannot: to it the ``(`` of ``$(cat key)`` and the ``&`` of ``2>&1`` end a command, and a ``#`` inside a word
starts a comment. A variable stands in its word as a `Reference`, for whoever knows its value. What only a running
shell can know, such as the output of a command, stays open: it is marked in its word, and never looked into. How the
commands hang together, which of them run in any case and in which shell, is `sidecar.launch.grammar`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, TypeAlias

from msgspec import Struct, field

OPEN: Final = "$"
"""In a word: something that only the shell knows, within this one word."""
SPLITS: Final = "$\1"
"""In a word: something that only the shell knows, and that may be any number of words. It contains `OPEN`."""

_LIMIT: Final = 1 << 20
"""Characters of a script that are looked at. The kernel passes at most 128 KiB in one argument."""
_DEPTH: Final = 40
"""Substitutions inside one another."""
_OPERATORS: Final = (";;&", ";;", ";&", "&&", "||", "|&", ";", "&", "|", "\n", "(", ")")
_REDIRECTION: Final = re.compile(r"&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||<|>")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_BRACED: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*])(:?[-+=?]|(?=\}))")
"""Behind a dollar sign: the forms in braces whose value follows from that of the variable."""
_MANY: Final = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\[@\]")
"""Behind a dollar sign: what is several words between double quotes too."""
_BASH_ONLY: Final = re.compile(r"\$['\"]|&>|\|&|<<<|[<>]\(|\[\[|=\(|\+=|\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}|\bfunction\b")
_SEVERAL: Final = frozenset({"@", "*"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_BRACES: Final = re.compile(r"\{([^{}\s]{0,500})\}")
_TILDE: Final = re.compile(r"~[A-Za-z0-9_.+-]*(?=[/:\s;&|<>()]|$)")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}


class Reference(Struct, frozen=True):
    """A variable or parameter in a word: ``$NAME`` or ``${NAME}``.

    ``operator`` is that of ``${NAME:-word}`` and its like, a tilde for a home folder, else empty; ``word`` is what
    stands behind it. ``quoted``: its value is one word, whatever is in it.
    """

    name: str
    quoted: bool
    operator: str = ""
    word: tuple[Part, ...] = ()


class Unknown(Struct, frozen=True):
    """Something in a word that only the shell knows; ``splits`` where it may be any number of words."""

    splits: bool


Part: TypeAlias = "str | Reference | Unknown"


class Word(Struct, frozen=True):
    """A word of a script. ``assigns``: as the first of its command it is an assignment; ``quoted``: a part of it is."""

    parts: tuple[Part, ...]
    assigns: bool = False
    quoted: bool = False

    @property
    def marked(self) -> str:
        """The text, with `OPEN` or `SPLITS` in place of all that is not written out."""
        return "".join(part if isinstance(part, str) else _mark(part) for part in self.parts)


class Redirection(Struct, frozen=True):
    """A redirection to or from what its ``target`` names; the text of a document needs nothing to be there."""

    operator: str
    target: Word


class Command(Struct, frozen=True, kw_only=True):
    """A simple command: its words, the files that its output goes to, and the operator behind it (empty: the end)."""

    parsed: tuple[Word, ...]
    written: tuple[str, ...] = ()
    redirections: tuple[Redirection, ...] = ()
    operator: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The words as text, with marks."""
        return tuple(word.marked for word in self.parsed)


class Script(Struct, frozen=True, kw_only=True):
    """The commands in the order in which they stand; ``complete`` is false where not all could be understood.

    ``pieces`` are the commands with the empty ones between them, whose operators are those of the grammar.
    ``bash_only``: it has what other shells read otherwise.
    """

    commands: tuple[Command, ...]
    pieces: tuple[Command, ...]
    complete: bool
    bash_only: bool = False


def _mark(part: Reference | Unknown) -> str:
    if isinstance(part, Unknown):
        return SPLITS if part.splits else OPEN
    return OPEN if part.quoted and part.name not in _SEVERAL else SPLITS


class _UnclosedError(Exception):
    """A quote or a substitution has no end."""


class _Building(Struct):
    words: list[Word] = field(default_factory=list)
    redirections: list[Redirection] = field(default_factory=list)

    def command(self, operator: str = "") -> Command:
        """The command that these make."""
        written = tuple(one.target.marked for one in self.redirections if ">" in one.operator)
        return Command(
            parsed=tuple(self.words), written=written, redirections=tuple(self.redirections), operator=operator
        )


def parse(script: str) -> Script:
    """The commands of a script. Never raises; takes time in proportion to the length."""
    scanner = _Scanner(script[:_LIMIT])
    pieces = tuple(scanner.commands())
    commands = tuple(command for command in pieces if command.parsed or command.written)
    return Script(
        commands=commands,
        pieces=pieces,
        complete=scanner.complete and len(script) <= _LIMIT,
        bash_only=_BASH_ONLY.search(script) is not None,
    )


class _Scanner:
    """Walks through a script once, character by character."""

    def __init__(self, text: str) -> None:
        self.complete = True
        self._text = text.replace("\\\n", "")
        self._at = 0
        self._depth = 0
        self._documents: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[Command]:
        building = _Building()
        while self._at < len(self._text):
            operator = self._step(building)
            if operator is None:
                continue
            yield building.command(operator)
            building = _Building()
        yield building.command()

    def _step(self, building: _Building) -> str | None:
        """Take in the next word, redirection, comment or blank; or give the operator that ends the command."""
        text, at = self._text, self._at
        char = text[at]
        if char in " \t\r":
            self._at += 1
            return None
        if char == "#":
            end = text.find("\n", at)
            self._at = len(text) if end < 0 else end
            return None
        if text.startswith("((", at):
            self.complete = False  # arithmetic or two subshells: either way no words of a launch
        if self._redirection(building):
            return None
        operator = next((one for one in _OPERATORS if text.startswith(one, at)), None)
        if operator is not None:
            self._at += len(operator)
            if operator == "\n":
                self._skip_documents()
            return operator
        building.words.append(self._guarded_word())
        return None

    def _guarded_word(self) -> Word:
        try:
            return self._word()
        except _UnclosedError:
            # What was read before it still counts.
            self.complete = False
            self._at = len(self._text)
            return Word((Unknown(splits=True),))

    def _redirection(self, building: _Building) -> bool:
        text = self._text
        start = self._at
        digits = start
        while digits < len(text) and digits - start < 3 and text[digits].isdigit():
            digits += 1
        if text.startswith(("<(", ">("), start):
            return False
        match = _REDIRECTION.match(text, digits)
        if match is None or text.startswith(("<(", ">("), digits):
            return False
        if match.group().startswith("&") and digits != start:
            return False
        self._at = match.end()
        while self._at < len(text) and text[self._at] in " \t":
            self._at += 1
        if self._at >= len(text) or text[self._at] in "\n;|&":
            self.complete = False  # no file: the shell ends here
            return True
        quoted = text[self._at] in "'\"\\"
        word = self._guarded_word()
        target = word.marked
        if match.group() in {"<<", "<<-"}:
            self._documents.append((target, match.group() == "<<-"))
            self.complete = self.complete and (quoted or OPEN not in target)
        elif match.group() != "<<<":
            building.redirections.append(Redirection(match.group(), word))
        return True

    def _skip_documents(self) -> None:
        """Leave out the lines that are the input of a command."""
        for delimiter, tabs in self._documents:
            while True:
                if self._at >= len(self._text):
                    self.complete = False
                    break
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = min(end + 1, len(self._text))
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self._documents = []

    # -- words

    def _word(self) -> Word:
        text, start = self._text, self._at
        parts: list[Part] = []
        quoted = False
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\r\n;|&":
                break
            if char in "<>":
                if text[self._at + 1 : self._at + 2] != "(" or self._at != start:
                    break
                self._at += 2
                self._skip_to(")")
                parts.append(Unknown(splits=False))  # the name of a pipe: one word
            elif char in "()":
                if char == ")" or not (parts and isinstance(parts[-1], str) and parts[-1].endswith("=")):
                    break
                self._at += 1
                self._skip_to(")")  # an array
                parts.append(Unknown(splits=False))
            elif char in "'\"\\":
                quoted = True
                parts += self._quoted()
            elif char == "$":
                quoted = quoted or text[self._at + 1 : self._at + 2] in {"'", '"'}
                parts += self._dollar(quoted=False)
            elif char == "`":
                self._backticks()
                parts.append(Unknown(splits=True))
            else:
                parts.append(self._plain(at_start=self._at == start, behind=parts[-1] if parts else ""))
        return Word(_joined(parts), assigns=_ASSIGNMENT.match(text, start) is not None, quoted=quoted)

    def _quoted(self) -> list[Part]:
        """What a quote or a backslash, where this stands, makes of the text behind it."""
        char, text = self._text[self._at], self._text
        if char == "'":
            return [self._single()]
        self._at += 1
        if char == '"':
            return self._double()
        self._at += 1
        return [text[self._at - 1 : self._at]]

    def _plain(self, *, at_start: bool, behind: Part) -> Part:
        """One unquoted character, or what a shell makes several words or another one of."""
        text, at = self._text, self._at
        char = text[at]
        may_be_home = at_start or (isinstance(behind, str) and behind[-1:] in {"=", ":"})
        if char == "~" and may_be_home and (match := _TILDE.match(text, at)):
            self._at = match.end()
            own = at_start and match.group() == "~"
            return Reference("HOME", quoted=True, operator="~") if own else Unknown(splits=False)
        if char == "{" and (match := _BRACES.match(text, at)) and ("," in match[1] or ".." in match[1]):
            self._at = match.end()
            return Unknown(splits=True)
        self._at += 1
        return Unknown(splits=True) if char in "*?[" and self._is_pattern(char) else char

    def _is_pattern(self, char: str) -> bool:
        # A bracket without its end stands for itself, as that of the command ``[`` does.
        if char != "[":
            return True
        end = self._text.find("]", self._at, self._at + 100)
        return end > self._at and not any(one in " \t\n" for one in self._text[self._at : end])

    def _single(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise _UnclosedError
        found = self._text[self._at + 1 : end]
        self._at = end + 1
        return found

    def _double(self) -> list[Part]:
        """What stands between double quotes, from behind the first one."""
        parts = self._until('"', quoted=True)
        return [*parts, ""] if parts else [""]

    def _until(self, closing: str, *, quoted: bool) -> list[Part]:
        """The parts up to a character that ends them, and go behind it."""
        text = self._text
        parts: list[Part] = []
        while self._at < len(text):
            char = text[self._at]
            if char == closing:
                self._at += 1
                return parts
            escapable = '$`"\\' + (closing if closing == "}" else "")
            if char == "\\" and (not quoted or text[self._at + 1 : self._at + 2] in set(escapable)):
                parts.append(text[self._at + 1 : self._at + 2])
                self._at += 2
            elif char == "$":
                parts += self._dollar(quoted=quoted)
            elif char == "`":
                self._backticks()
                parts.append(Unknown(splits=not quoted))
            elif closing == "}" and char == '"':
                self._at += 1
                parts += self._double()
            elif closing == "}" and char == "'" and not quoted:
                parts.append(self._single())
            else:
                parts.append(Unknown(splits=True) if not quoted and char in "*?[~{" else char)
                self._at += 1
        raise _UnclosedError

    def _dollar(self, *, quoted: bool) -> list[Part]:
        text = self._text
        self._at += 1
        after = text[self._at : self._at + 1]
        if after == "'" and not quoted:
            return [self._escaped()]
        if after == '"' and not quoted:
            self._at += 1
            return self._double()
        if match := _BRACED.match(text, self._at):
            return [self._braced(match, quoted=quoted)]
        if after in {"(", "{"}:
            splits = not quoted or _MANY.match(text, self._at) is not None
            self._at += 1
            self._skip_to(")" if after == "(" else "}")
            return [Unknown(splits=splits)]
        if match := _NAME.match(text, self._at):
            self._at = match.end()
            return [Reference(match.group(), quoted=quoted)]
        return ["$"]

    def _braced(self, match: re.Match[str], *, quoted: bool) -> Reference:
        if self._depth > _DEPTH:
            raise _UnclosedError
        self._depth += 1
        self._at = match.end()
        word = _joined(self._until("}", quoted=quoted))
        self._depth -= 1
        return Reference(match[1], quoted=quoted, operator=match[2], word=word)

    def _escaped(self) -> str:
        """``$'...'`` of bash; an escape that is not a plain one stays open."""
        text = self._text
        parts: list[str] = []
        self._at += 1
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if char == "'":
                return "".join(parts)
            if char == "\\":
                parts.append(_ESCAPES.get(text[self._at : self._at + 1], OPEN))  # a literal dollar sign is open, too
                self._at += 1
            else:
                parts.append(char)
        raise _UnclosedError

    def _backticks(self) -> None:
        self._at += 1
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 2 if char == "\\" else 1
            if char == "`":
                return
        raise _UnclosedError

    def _skip_to(self, closing: str) -> None:
        """Go behind the end of a substitution, past the quotes and substitutions inside it."""
        if self._depth > _DEPTH:
            raise _UnclosedError
        self._depth += 1
        self._skip_inside(closing)
        self._depth -= 1

    def _skip_inside(self, closing: str) -> None:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if char == closing:
                return
            if char == "\\":
                self._at += 1
            elif char == "'" and closing != "}":
                self._at -= 1
                self._single()
            elif char == '"':
                self._double()
            elif char == "`":
                self._at -= 1
                self._backticks()
            elif char == "(" and closing == ")":
                self._skip_to(")")
            elif char == "$" and text[self._at : self._at + 1] in {"(", "{"}:
                inner = ")" if text[self._at] == "(" else "}"
                self._at += 1
                self._skip_to(inner)
        raise _UnclosedError


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts with the pieces of text that follow one another made one."""
    found: list[Part] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        pieces = list(group)
        found += ["".join(part for part in pieces if isinstance(part, str))] if is_text else pieces
    return tuple(found)
