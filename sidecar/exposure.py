"""Whether anybody on this machine may change a file that the agent believes."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def writable_by_all(path: Path) -> Path | None:
    """Find the file or folder whose permissions let every user change what ``path`` says; None where none does.

    The file, the folder that names it and, behind a link, the folder that holds it are looked at. What cannot be
    looked at counts as safe: whoever reads the file meets the error. Blocks.
    """
    places = [path, path.parent]
    # A loop of links has no end to look at.
    with contextlib.suppress(OSError, RuntimeError):
        places.append(path.resolve().parent)
    return next((place for place in dict.fromkeys(places) if anybody_may_write(place)), None)


def objection(place: Path) -> str:
    """The sentence, without its stop, for what `writable_by_all` found."""
    return f"{place} may be written by every user; remove that right (chmod o-w)"


def anybody_may_write(place: Path) -> bool:
    """Whether permissions let every user change a file, or put another one in its place in a folder. Blocks."""
    try:
        mode = place.stat().st_mode
        if not mode & stat.S_IWOTH:
            return False
        # In a folder with the sticky bit nobody can replace another user's file.
        if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
            return False
        # The folder of a mounted ConfigMap is 0777, and mounted read-only (kubernetes/kubernetes#133641).
        return not os.statvfs(place).f_flag & os.ST_RDONLY
    except OSError:
        return False
