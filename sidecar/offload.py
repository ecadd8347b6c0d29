"""Blocking calls kept off the event loop, in threads that never hold up the end of the process."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class OneByOne:
    """Calls that may hang, such as of files on a disk that does not answer: one at a time, each for ``seconds``.

    What hangs is waited for once, and holds one thread; until it returns, further calls fail at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._call: asyncio.Task[object] | None = None
        self._until = 0.0

    async def run(self, function: Callable[[], T]) -> T:
        """The result of ``function()``. Raises TimeoutError, and what `in_daemon_thread` raises."""
        loop = asyncio.get_running_loop()
        while self._call is not None and not self._call.done():
            await self._wait(self._call)
        call = loop.create_task(in_daemon_thread(function))
        # Nobody may be waiting any more when it fails.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._call, self._until = call, loop.time() + self._seconds
        await self._wait(call)
        return call.result()

    async def _wait(self, call: asyncio.Task[Any]) -> None:
        left = self._until - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({call}, timeout=max(0.0, left))
        if not done:
            raise TimeoutError

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._call is not None:
            self._call.cancel()


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
