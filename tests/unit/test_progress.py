"""The line that a check shows while it works."""

from __future__ import annotations

import asyncio
import io

import pytest

from sidecar.progress import line, shown


class Terminal(io.StringIO):
    """A stream that says it is a terminal; ``broken`` makes it one that is gone."""

    broken = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize(
    ("probes", "stage", "columns", "expected"),
    [
        (["driver", "flashinfer"], None, 80, "checking driver, flashinfer | 3 s"),
        ([], "import torch", 80, "checking judging | import: import torch | 3 s"),
        (["driver", "packages"], None, 20, "checking driver,..."),
        (["driver"], "a\x1b[2J\r\u202eb", 80, "checking driver | import: a?[2J??b | 3 s"),
    ],
)
def test_line(probes: list[str], stage: str | None, columns: int, expected: str) -> None:
    """It names what is not done and an import's stage, fits into the terminal, and cannot act on it."""
    assert line(probes, stage, 3.2, columns) == expected


async def run(stream: io.StringIO, seconds: float = 0.7) -> None:
    async with shown(stream, lambda: ["driver"], lambda: None, lambda: 80):
        await asyncio.sleep(seconds)


async def test_a_terminal_shows_it_and_is_clean_afterwards() -> None:
    """The last thing written is the erasure of the line."""
    stream = Terminal()
    await run(stream)
    assert "checking driver | " in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


async def test_it_is_erased_when_the_check_is_cancelled() -> None:
    """A check that is stopped leaves the terminal as it found it."""
    stream = Terminal()
    task = asyncio.create_task(run(stream, 60))
    await asyncio.sleep(0.7)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.getvalue().endswith("\r\x1b[K")


async def test_what_is_no_terminal_gets_nothing() -> None:
    """A pipe or a log sees no escape codes."""
    stream = io.StringIO()
    await run(stream)
    assert stream.getvalue() == ""


async def test_a_terminal_that_cannot_erase_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor's shell window (TERM=dumb) would show every state of the line, one after the other."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    await run(stream)
    assert stream.getvalue() == ""


async def test_a_quick_check_shows_nothing() -> None:
    """Nothing flickers when the answer is there at once."""
    stream = Terminal()
    await run(stream, 0)
    assert stream.getvalue() == ""


async def test_a_terminal_that_is_gone_does_not_end_the_check() -> None:
    """A closed terminal costs the line and nothing else."""
    stream = Terminal()
    stream.broken = True
    await run(stream)
    assert stream.getvalue() == ""
