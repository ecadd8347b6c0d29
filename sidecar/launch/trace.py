"""What the following of a launch goes by, and what it finds besides the state of its processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from sidecar.launch.state import Loss
from sidecar.record import Discreet

_STEPS_LIMIT: Final = 4000
"""Simple commands of a launch that are followed, loops and functions counted each time."""


class Outside(Discreet, frozen=True, kw_only=True):
    """What a launch is given: ``environ`` and ``cwd``, None where they are not known.

    ``is_folder`` tells whether a path is a folder that may be entered, ``is_absent`` whether surely nothing is there,
    ``read`` the text of a file that a shell reads commands from, None where it is not read.
    """

    withheld = frozenset({"environ"})

    environ: Mapping[str, str] | None = None
    cwd: str | None = None
    is_folder: Callable[[str], bool] = lambda _: False
    is_absent: Callable[[str], bool] = lambda _: False
    read: Callable[[str], str | None] = lambda _: None

    def entered(self, folder: str | None) -> str | None:
        """A folder, where it is there to be entered."""
        return folder if folder is not None and self.is_folder(folder) else None


class Trace:
    """What is found about one launch, whichever of its processes shows it.

    ``away`` tells why nothing of here counts for the server, ``unreached`` why it is not started, or may not be.
    ``other_user``: it may run as another user. ``steps_left`` counts the simple commands that may still be followed.
    The others are those of `sidecar.launch.shell.Inside`.
    """

    def __init__(self, outside: Outside, *, complete: bool) -> None:
        self.outside = outside
        self.complete = complete
        self.away: Loss | None = None
        self.unreached: Loss | None = None
        self.depends: dict[str, None] = {}
        self.other_user = False
        self.moved = False
        self.launches = 1
        self.written: set[str] = set()
        self.may_write = False
        self.limits = False
        self.steps_left = _STEPS_LIMIT

    def miss(self, why: str) -> None:
        """Note that the server is not started, or may not be."""
        sentence = f"It is not certain that the server is reached: {why}."
        self.unreached = self.unreached or Loss("not-reached", sentence)

    def depend(self, name: str) -> None:
        """Note a command whose outcome decides whether the server is started, and is not known."""
        self.depends.setdefault(name)
