"""Blocking calls kept off the event loop, in threads that never hold up the end of the process."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """The result of ``function()``, run in a daemon thread of its own.

    Not ``asyncio.to_thread``: the loop's executor joins its threads at shutdown, so that one read of a
    ``/proc`` file that blocks (a process in uninterruptible sleep), or one name server that is silent, would
    keep the whole agent from ending. Raises whatever ``function`` raises, and OSError (EAGAIN) where there is no room
    for another thread. A cancelled caller leaves the thread behind; its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only when T itself allows it

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except Exception as error:  # noqa: BLE001 - handed to the awaiting caller, not swallowed
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            return  # the loop is closed: nobody waits for the result any more

    try:
        threading.Thread(target=work, name="offload", daemon=True).start()
    except RuntimeError as error:
        # As when a process cannot be started: the limit is the same.
        raise OSError(errno.EAGAIN, "no thread can be started") from error
    return await future
