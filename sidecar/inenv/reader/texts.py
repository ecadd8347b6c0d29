"""What names, versions and header fields look like in the metadata of packages."""

from __future__ import annotations

import re

VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+!-]{0,63}\Z")


FOLDED = ("requires-dist", "requires-python")
"""Fields that are wanted whole; joining the lines of a description would take long."""


def normalised(name: str) -> str:
    """Distribution names compare in this form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_or_none(text: str | None) -> str | None:
    """Let through only what looks like a version."""
    text = text.strip() if text else ""
    return text if VERSION.match(text) else None


def headers(text: str) -> list[tuple[str, str]]:
    """Header fields of a METADATA file: a list of (name, value), names in lower case."""
    fields = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if not line:
            break
        # The lines of a long field are indented, and its empty ones may be nothing but that.
        if line[0] in " \t":
            if fields and fields[-1][0] in FOLDED:
                fields[-1] = (fields[-1][0], (fields[-1][1] + " " + line.strip()).strip())
            continue
        name, colon, value = line.partition(":")
        if colon:
            fields.append((name.strip().lower(), value.strip()))
        if len(fields) >= 2000:
            break
    return fields
