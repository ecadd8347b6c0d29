"""The line that a check shows on a terminal while it works, and takes away again.

It goes to standard error, so that what is piped or kept is the report alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TextIO

_PERIOD: Final = 0.2
"""Seconds between two looks: often enough to seem alive, too seldom to cost."""
_PATIENCE: Final = 0.3
"""Seconds before anything is shown: a check that is done by then needs no line."""
_ERASE: Final = "\r\x1b[K"
_CONTROL: Final = re.compile(r"[^\x20-\x7e]")
_NARROWEST: Final = 20


def line(waiting_for: Sequence[str], stage: str | None, seconds: float, columns: int) -> str:
    """What the line says, cut to a terminal of ``columns``: what is not done yet, an import's stage, the time."""
    parts = [", ".join(waiting_for) or "judging"]
    if stage is not None:
        parts.append(f"import: {_CONTROL.sub('?', stage)}")
    said = f"checking {' | '.join(parts)} | {seconds:.0f} s"
    room = max(columns, _NARROWEST) - 1  # a full line would wrap, and could not be erased
    return said if len(said) <= room else said[: room - 3] + "..."


@contextlib.asynccontextmanager
async def shown(
    stream: TextIO,
    waiting_for: Callable[[], Sequence[str]],
    stage: Callable[[], str | None],
    columns: Callable[[], int],
) -> AsyncIterator[None]:
    """Show the line while the body runs, where ``stream`` is a terminal. It is erased at the end, however that comes.

    A stream that cannot be written to any more ends the line, never the check.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb":  # which cannot erase
        yield
        return
    task = asyncio.get_running_loop().create_task(_keep(stream, waiting_for, stage, columns))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep(
    stream: TextIO,
    waiting_for: Callable[[], Sequence[str]],
    stage: Callable[[], str | None],
    columns: Callable[[], int],
) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.sleep(_PATIENCE)
    with contextlib.suppress(OSError, ValueError):
        try:
            while True:
                stream.write(_ERASE + line(waiting_for(), stage(), loop.time() - begun, columns()))
                stream.flush()
                await asyncio.sleep(_PERIOD)
        finally:
            stream.write(_ERASE)
            stream.flush()
