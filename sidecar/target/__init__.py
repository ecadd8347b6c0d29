"""Finding the server: its process, interpreter, root, environment and address, each with the way it was found.

Everything here reads ``/proc`` and file names; nothing is executed or imported. Command lines and environments
hold keys: a command line is reduced to its allow-listed flags at once, and an environment stays inside `Target`.

`TargetFinder` makes a `Target` in one of three ways: of a launch to come (``preflight``, with ``launched`` for its
interpreter), of a process (``scanning`` and ``choosing``, then ``running`` with ``address``, ``namespaces`` and
``invocation``), or where none is in sight of what is set and of this image (``image``). ``standing`` decides before
that whether the agent would see the server's process at all.
"""

from sidecar.target.facts import PREFLIGHT, READ_SOURCES, RUNNING, SET_BY_LAUNCH, variables
from sidecar.target.finder import TargetFinder
from sidecar.target.standing import stand

__all__ = [
    "PREFLIGHT",
    "READ_SOURCES",
    "RUNNING",
    "SET_BY_LAUNCH",
    "TargetFinder",
    "stand",
    "variables",
]
