"""What a child says is untrusted: only what has the right shape and size gets in."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

_WHOLE_LIMIT = 2**63
_MOST_VERSIONS = 6000


def text(value: object, limit: int = 300, *, lines: bool = False) -> str | None:
    """A string of at most ``limit`` characters that every output can encode, or None.

    What cannot be printed becomes a question mark: a line end would put a line of the child's into a report, an
    escape sequence would act on a terminal. ``lines`` keeps the line ends and tabs of a longer text.
    """
    if not isinstance(value, str):
        return None
    kept = "\n\t" if lines else ""
    shown = "".join(char if char.isprintable() or char in kept else "?" for char in value[:limit])
    # Undecodable file names arrive as lone surrogates, which no output could encode.
    return shown.encode("utf-8", "replace").decode()


def texts(value: object, limit: int = 200, *, size: int = 300) -> tuple[str, ...]:
    """The strings of a list, at most ``limit`` items of it and ``size`` characters of each."""
    items = value if isinstance(value, list) else []
    return tuple(one for item in items[:limit] if (one := text(item, size)) is not None)


def mapping(value: object) -> Mapping[str, Any]:
    """An object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def integer(value: object) -> int | None:
    """A whole number that 64 bits hold, or None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if -_WHOLE_LIMIT <= value < _WHOLE_LIMIT else None


def number(value: object, most: float = 1e12) -> float | None:
    """A finite number from nought to ``most``, or None: JSON as Python reads it has infinities, too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= most else None


def boolean(value: object) -> bool | None:
    """True or False, or None."""
    return value if isinstance(value, bool) else None


def versions(value: object) -> dict[str, str]:
    """An object of short strings, as many as there may be distributions; other values are dropped."""
    return {
        name: one
        for key, item in islice(mapping(value).items(), _MOST_VERSIONS)
        if (name := text(key)) is not None and (one := text(item, 64)) is not None
    }


def last_line(tail: str) -> str:
    """Give the last line that a child printed, printable characters only, bounded."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return "".join(char for char in (lines[-1] if lines else "") if char.isprintable())[:200]
