"""What a remedy consists of: sentences, and commands to be pasted into a shell.

Remedies are written as one text (see `sidecar.model.ConditionType`): a command alone, a sentence that ends in one, or a
sentence with commands in backquotes. Whoever shows one must keep its commands whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

_COMMAND: Final = re.compile(
    # Programs that remedies begin with; a path in front of an interpreter may be quoted for the shell.
    r"(?:(?:/[^\s']*/)?python[\d.]*|'/[^']*python[\d.]*'|uv|pip|rm|export|systemctl|modprobe|nvidia-smi)"
    r" (?=[\w'/-])"
)
_NOTE: Final = "  # "
"""What separates a command from the words about it, so that both can be pasted together."""
_QUOTE: Final = "`"


class Part(Struct, frozen=True):
    """A sentence, which may hold commands in backquotes, or a whole ``command`` with the words about it as ``note``."""

    text: str
    command: bool = False
    note: str = ""

    @property
    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text in pieces: (piece, whether it stood in backquotes)."""
        several = self.text.split(_QUOTE)
        # An odd one out opens nothing.
        paired = len(several) if len(several) % 2 else len(several) - 1
        for index, piece in enumerate(several):
            if piece:
                yield piece, index % 2 == 1 and index < paired


def parts(remedy: str) -> tuple[Part, ...]:
    """Take a remedy apart, in its order."""
    return tuple(part for line in remedy.splitlines() for part in _of_line(line.strip()) if part.text)


def _of_line(line: str) -> Iterator[Part]:
    begins = _begin(line)
    if begins is None:
        yield Part(line)
        return
    if begins:
        yield Part(line[:begins].rstrip())
    command, _, note = line[begins:].partition(_NOTE)
    if not note:
        # Words may follow after a semicolon; in a shell's line it would be followed by another command.
        command, semicolon, rest = command.partition("; ")
        if semicolon and _COMMAND.match(rest):
            command, rest = f"{command}; {rest}", ""
        note = rest
    yield Part(command.rstrip(), command=True, note=note)


def _begin(line: str) -> int | None:
    """Where a command begins that goes to the end of the line: at its start, or after a colon."""
    if _COMMAND.match(line):
        return 0
    for colon in re.finditer(r": ", line):
        if _COMMAND.match(line, colon.end()):
            return colon.end()
    return None
