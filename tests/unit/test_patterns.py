"""Regular expressions for text that somebody else chooses."""

from __future__ import annotations

import re
import time

import pytest

from sidecar.patterns import is_prompt

GOOD = [
    r"llama",
    r"(?i)llama",
    r"sglang.*--port 30000",
    r"python\S* .*--port 30001",
    r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve",
    r"--port (?:30000|30001)\b",
    r"[*+?]{3}",
    r"\*\+\+\+x",
    r"(?:ab)*",
    r"(?P<n>ab)+c",
    r"(?#+*+*)a",
    r"[]*+]a+",
    r"[^]+*]b+",
    r"\d{5}x\d{5}y\d{5}",
    r"(a)?(b)?",
]
BAD = [
    r"(a+)+$",
    r"(?:a|aa)*c",
    r"(?:a|b)+",
    r"(a?){20}",
    r"((a+))+",
    r"((a+)b)+",
    r"(.*){10}b",
    r"a.*a.*a.*b",
    r"\w+\s*\w+b",
    "a?" * 30 + "a" * 30,
    "(?:a|a)" * 20 + "b",
    r"(?:(?=a+)a)*b",
]


@pytest.mark.parametrize("pattern", GOOD)
def test_prompt(pattern: str) -> None:
    """What people write to name a server, and what only looks like repetition."""
    re.compile(pattern)
    assert is_prompt(pattern)


@pytest.mark.parametrize("pattern", BAD)
def test_not_prompt(pattern: str) -> None:
    """What multiplies the ways to match (CWE-1333)."""
    re.compile(pattern)
    assert not is_prompt(pattern)


@pytest.mark.parametrize("pattern", [one for one in GOOD if "*" in one or "+" in one] + [r".*.*b", r"a.*a.*b"])
def test_what_is_prompt_ends_soon(pattern: str) -> None:
    """The worst texts of the longest length that is searched, beside ones of a quarter of it: no worse than cubic."""
    assert is_prompt(pattern)
    found = re.compile(pattern)

    def cost(length: int) -> float:
        begun = time.process_time()
        for text in ("a" * length, "ab" * (length // 2), "1" * length, " --port " * (length // 8)):
            found.search(text)
        return time.process_time() - begun

    cost(64)
    assert cost(1024) < 200 * max(cost(256), 0.0005)
