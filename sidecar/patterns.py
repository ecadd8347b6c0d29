"""Regular expressions that somebody else's text is searched for.

Python's engine tries every way in which an expression may match, and nothing can interrupt it: all threads wait.
Each repetition of what may match in several ways multiplies the ways, with the length of the text, and inside another
repetition without a bound (CWE-1333).
"""

from __future__ import annotations

import re
from typing import Final

PROMPT: Final = (
    "use at most two of *, + and {m,n}, at most ten ? and groups with |, and none of all these inside a group that is "
    "repeated"
)
"""What `is_prompt` asks for, as advice."""
_REPEATS: Final = 2
_CHOICES: Final = 10

_TOKEN: Final = re.compile(
    r"""(?P<other>\[\^?\]?(?:\\.|[^\]\\])*\] | \\. | \(\?\#[^)]*\))
    | (?P<open>\((?:\?(?:P?<\w+> | P=\w+ | [a-zA-Z-]*: | <?[=!] | >))?)
    | (?P<close>\))
    | (?P<same>\{\d+\})[?+]?
    | (?P<repeat>[*+] | \{\d*,\d*\})[?+]?
    | (?P<optional>\?)[?+]?
    | (?P<or>\|)
    | .""",
    re.DOTALL | re.VERBOSE,
)


def is_prompt(pattern: str) -> bool:
    """Whether the search for this valid expression surely ends soon, whatever a text of a thousand characters holds.

    Cautious: many that are refused would be quick as well.
    """
    repeats = choices = 0
    groups = [[False, False]]  # of each open group: whether it may match in several ways, and has alternatives
    closed = False  # the group that ended just now may match in several ways
    for token in _TOKEN.finditer(pattern):
        kind, before, closed = token.lastgroup, closed, False
        if kind in {"same", "repeat"} and before:
            return False
        if kind == "open":
            groups.append([False, False])
        elif kind == "close" and len(groups) > 1:
            varies, has_alternatives = groups.pop()
            choices += has_alternatives
            closed = varies or has_alternatives
            groups[-1][0] |= closed
        elif kind == "or":
            groups[-1][1] = True
        elif kind in {"repeat", "optional"}:
            groups[-1][0] = True
            repeats += kind == "repeat"
            choices += kind == "optional"
    return repeats <= _REPEATS and choices <= _CHOICES
