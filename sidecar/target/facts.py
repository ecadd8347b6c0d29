"""What a `Target` says of itself: the tokens of its fields, and which of its variables may be relied on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sidecar.model import Target

PREFLIGHT: Final = "command-line"
"""`Target.launch_source` when a launch is judged that has not happened yet."""
RUNNING: Final = "process"
"""`Target.launch_source` when the flags are those of a running process."""

READ_SOURCES: Final = frozenset({"setting", "command-line"})
"""The `Target.url_source` of an address that is known: nobody listening there means that the server does not.

All others may be wrong: ``listening-socket`` (the one port on which the process listens), ``command-line-incomplete``
(the flags read do not settle it), ``command-line-other-network`` (there it is, here it may be somebody else's) and
``default`` (SGLang's own default, where no command line could be read).
"""

SET_BY_LAUNCH: Final = "set-by-launch"
"""`Target.environ_missing` where a launch sets variables to what cannot be told before it happens."""
LEFT_TO_READER: Final = "left-to-reader"
"""`Target.python_source` where the reader of a foreign root has to find the interpreter in it."""


def variables(target: Target, *names: str) -> Mapping[str, str] | None:
    """The server's variables, where they are known as far as these names go: one that is not there is not set."""
    return target.environ if target.unseen.isdisjoint(names) else None
