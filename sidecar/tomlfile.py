"""TOML of files that others write: parsed in bounded time."""

from __future__ import annotations

import tomllib
from typing import Any, Final

_MOST_DOTS: Final = 200
"""Dots of one line. The time that the parser takes for a key such as ``a.a.a`` grows with the square of its parts: one
line of 100 kB would hold the whole agent up for minutes."""


def loads(text: str) -> dict[str, Any]:
    """Parse a file's text. Raises ValueError whose text follows on "is not valid TOML: "."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if any(line.count(".") > _MOST_DOTS for line in lines):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
