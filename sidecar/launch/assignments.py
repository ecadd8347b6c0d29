"""Assignments: in front of a command, and among its words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from sidecar.launch.state import UNSEEN, Expansion, Value
from sidecar.launch.words import OPEN, Part, Reference, Word

ASSIGNED: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def split(words: Sequence[Word]) -> tuple[Sequence[Word], Sequence[Word]]:
    """(assignments in front, the words behind them)."""
    position = 0
    while position < len(words) and words[position].assigns:
        position += 1
    return words[:position], words[position:]


def dissect(word: Word) -> tuple[str, bool, list[Part]]:
    """(name, whether it appends, what the value is made of) of an assignment."""
    first = word.parts[0] if word.parts and isinstance(word.parts[0], str) else ""
    match = ASSIGNED.match(first)
    if match is None:
        return "", True, []
    return match[1], match[2] != "", [first[match.end() :], *word.parts[1:]]


def assignment(word: Word, expansion: Expansion, before: set[str]) -> tuple[str, Value]:
    """(name, value) of an assignment; ``before``: names whose new value it may or may not see."""
    name, appends, parts = dissect(word)
    value = expansion.text(parts)
    if appends or any(isinstance(part, Reference) and part.name in before for part in all_parts(parts)):
        return name, UNSEEN
    return name, value


def declaration(field_: str) -> tuple[str, Value] | str:
    """(name, value) of a declaration's word that expansions made an assignment; else the word."""
    match = ASSIGNED.match(field_)
    if match is None or match[2]:
        return field_
    value = field_[match.end() :]
    return match[1], UNSEEN if OPEN in value else value


def all_parts(parts: Iterable[Part]) -> Iterable[Part]:
    """The parts of a word, and those of the words in its references."""
    for part in parts:
        yield part
        if isinstance(part, Reference):
            yield from all_parts(part.word)
