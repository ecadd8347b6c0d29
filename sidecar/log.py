"""The agent's log: one event per line on standard error, as JSON or for people.

Everything that logs (structlog, the standard library's loggers of aiohttp and asyncio, Python's warnings)
goes through one writer, so that each line has the same form and no value can break it: bytes, exceptions,
objects that cannot print themselves, control characters, a reader that has left or does not read on.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import select
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog
from msgspec import Struct

EventDict = structlog.typing.EventDict

_TEXT_LIMIT = 8192
"""Characters kept of any one text: more comes only from a source that is out of control."""
_ITEMS_LIMIT = 100
"""Items kept of any one list or mapping, for the same reason."""
_DEPTH_LIMIT = 6
"""Levels of nesting that are followed; it also ends a structure that contains itself."""
_FIRST = ("timestamp", "level", "event")
"""Keys that lead each line, in this order."""
_REPEAT_SECONDS = 60.0
"""How long the same message of another library is withheld after it was written."""
_FOREIGN_LEVEL = logging.WARNING
"""Least level of other libraries' messages: ours are about transitions, theirs about every connection."""
_QUEUE_LIMIT = 256 * 1024
"""Bytes that are kept for a reader that does not read: about a thousand lines."""
_END_SECONDS = 0.3
"""How long the end waits for what is queued still to be written."""


def configure(form: str, level: str, stream: TextIO) -> None:
    """Send all logging of this process to ``stream``.

    ``form`` is ``json``, ``console`` or ``auto``: json unless the stream is a terminal. ``level`` is the
    least level that is written: debug, info, warning or error. May be called again.
    """
    if form == "auto":
        form = "console" if stream.isatty() else "json"
    writer = Writer(stream, as_console if form == "console" else as_json)
    if isinstance(queue := getattr(stream, "buffer", None), Queue):
        queue.notice = writer.missing
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            writer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.ReturnLoggerFactory(),  # the writer, last of the processors, has written it
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, Bridge):
            root.removeHandler(handler)
    root.addHandler(Bridge(writer))
    root.setLevel(number if number == logging.DEBUG else max(number, _FOREIGN_LEVEL))
    logging.captureWarnings(True)


class Writer(Struct, frozen=True):
    """Writes events as lines; the last structlog processor."""

    stream: TextIO
    form: Callable[[Mapping[str, Any]], str]

    def __call__(self, _logger: object, _method: str, event: EventDict) -> str:
        """Write an event."""
        self.write(event)
        return ""

    def write(self, event: Mapping[str, Any]) -> None:
        """Write an event. Never raises: a log that cannot be written must not stop what it reports on."""
        line = self.form({str(key): plain(value) for key, value in event.items()})
        # OSError: the reader left or the disk is full. ValueError: the stream was closed.
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(line + "\n")
            self.stream.flush()

    def missing(self, lines: int) -> str:
        """The line that stands for as many others that could not be kept."""
        return self.form(
            {
                "timestamp": _shown(datetime.now(UTC)),
                "level": "warning",
                "event": "lines of the log are missing: nobody read it",
                "lines": lines,
            }
        )


class Bridge(logging.Handler):
    """Hands the standard library's records to the writer.

    What a library says again and again (a connection that cannot be accepted, a request that is none) is written
    once a minute with the number of times: whoever reaches the port must not be able to fill a disk.
    """

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the same was written within the last minute."""
        key = (record.name, str(record.msg)[:200])
        at, withheld = self._seen.get(key, (-math.inf, 0))
        if record.created - at < _REPEAT_SECONDS and record.created >= at:
            self._seen[key] = (at, withheld + 1)
            return
        if len(self._seen) >= _ITEMS_LIMIT:
            self._seen.clear()
        self._seen[key] = (record.created, 0)
        event: dict[str, Any] = {
            "timestamp": _shown(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "event": _message(record),
            "logger": record.name,
        }
        if withheld:
            event["withheld"] = withheld
        if record.exc_info and record.exc_info[1] is not None:
            event["exception"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        self._writer.write(event)


def _shown(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    """Format a record's text; arguments that do not fit it are shown beside it."""
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - the arguments' own __str__ may raise anything
        return f"{plain(record.msg)} {plain(record.args)}"


# -- a reader that does not read ----------------------------------------------------------------------


@contextlib.contextmanager
def unwaited() -> Iterator[None]:
    """Let nobody wait for standard error while the body runs, whoever writes to it.

    A collector that hangs leaves a pipe that is full; a write to it would hold up everything else for good. At the end
    a fraction of a second is given to what is queued.
    """
    stream = sys.stderr
    queue: Queue | None = None
    # The one: a stream without a descriptor. The other: no thread is to be had.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        queue = Queue(stream.fileno())
    if queue is None:
        yield
        return
    sys.stderr = io.TextIOWrapper(queue, encoding=stream.encoding, errors=stream.errors, write_through=True)
    try:
        yield
    finally:
        sys.stderr = stream
        if not queue.finish(_END_SECONDS):
            leave(stream)


def leave(stream: TextIO) -> None:
    """Keep Python from trying at exit to write what is left.

    When that fails it ends with a status of its own, and where nobody reads it does not end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Queue(io.BufferedIOBase):
    """Takes lines at once and has a thread write them to a descriptor, in order.

    What is more than the queue holds is dropped, and the number of lines is told as soon as there is room again, by a
    line that ``notice`` makes.
    """

    def __init__(self, descriptor: int) -> None:
        self.notice: Callable[[int], str] = "sglang-sidecar: {} lines are missing here: nobody read them".format
        self._descriptor = descriptor
        # One that its holder may take again: a warning may be raised, and written, amid anything.
        self._changed = threading.Condition(threading.RLock())
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._missing = 0
        self._torn = False
        self._finished = False
        # A daemon: nothing waits for its end. It alone calls what may block, and holds nothing meanwhile.
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def writable(self) -> bool:
        """Say so, as every stream that is written to."""
        return True

    def fileno(self) -> int:
        """Where it is written in the end."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Take a line."""
        line = bytes(data)
        with self._changed:
            if not self._finished:
                self._take(line)
        return len(line)

    def finish(self, seconds: float) -> bool:
        """Take no more, and say whether all that was taken is written before the time is over."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._size and not self._missing, seconds)

    def _take(self, line: bytes) -> None:
        # However long a line is: where nothing waits, it is taken.
        if self._size and self._size + len(line) > _QUEUE_LIMIT:
            self._missing += line.count(b"\n")
            return
        if self._missing:
            self._append(self._told())
        self._append(line)

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)
        self._changed.notify_all()

    def _told(self) -> bytes:
        told, self._missing = self.notice(self._missing), 0
        return f"{told}\n".encode("utf-8", "backslashreplace")

    def _run(self) -> None:
        while (line := self._next()) is not None:
            self._write(line)
            with self._changed:
                self._size -= len(line)
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        """The next line; None once all is written and no more will come."""
        with self._changed:
            while not self._lines:
                if self._missing:
                    self._append(self._told())
                elif self._finished:
                    return None
                else:
                    self._changed.wait()
            return self._lines.popleft()

    def _write(self, line: bytes) -> None:
        """Write a line, or what can be written of it. Blocks."""
        # After a part of a line, as on a disk that was full, the next one must not continue it.
        left = memoryview(b"\n" + line if self._torn else line)
        whole = len(left)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                # Whoever else has the descriptor made it so.
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()
            except OSError:
                break
        self._torn = 0 < len(left) < whole or (self._torn and len(left) == whole)


# -- forms --------------------------------------------------------------------------------------------


def as_json(event: Mapping[str, Any]) -> str:
    """Write an event of plain values as one JSON object on one line, in ASCII."""
    return json.dumps(_ordered(event), default=str)


def as_console(event: Mapping[str, Any]) -> str:
    """Write an event of plain values for people: time, level, event, then ``key=value``."""
    fields = _ordered(event)
    time, level, text = (str(fields.pop(key, "")) for key in _FIRST)
    exception = fields.pop("exception", None)
    pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items())
    line = _printable(f"{time[11:19]} {level:<8} {text}{pairs}")
    if exception is None:
        return line
    return "\n".join([line, *(f"  {_printable(part)}" for part in str(exception).splitlines())])


def _ordered(event: Mapping[str, Any]) -> dict[str, Any]:
    """Put the keys that every line has first."""
    first = {key: event[key] for key in _FIRST if key in event}
    return first | {key: value for key, value in event.items() if key not in first}


def _value(value: object) -> str:
    """Write a value on the console: bare where it is one word, else as JSON."""
    if isinstance(value, str) and value and not any(mark.isspace() or mark in "\"'=" for mark in value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _printable(text: str) -> str:
    """Replace control characters, which could move the cursor or forge lines, and what UTF-8 cannot hold."""
    shown = "".join(mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in text)
    return shown.encode("utf-8", "replace").decode("utf-8")


# -- values -------------------------------------------------------------------------------------------


def plain(value: object, depth: int = 0) -> Any:
    """Reduce any value to what JSON can hold, bounded in size and depth.

    Bytes are decoded with their undecodable parts escaped, exceptions become ``Type: text``, numbers that
    JSON lacks become texts, anything else its ``repr``.
    """
    match value:
        case None | bool():
            return value
        case str():
            return _bounded(str(value))
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else str(value)
        case bytes() | bytearray():
            return _bounded(bytes(value[:_TEXT_LIMIT]).decode("utf-8", "backslashreplace"))
        case BaseException():
            return _bounded(f"{type(value).__name__}: {_guarded(str, value)}")
    if depth >= _DEPTH_LIMIT:
        return _bounded(_guarded(object.__repr__, value))
    if isinstance(value, Mapping):
        items = list(value.items())[:_ITEMS_LIMIT]
        return {str(plain(key, _DEPTH_LIMIT)): plain(item, depth + 1) for key, item in items}
    if isinstance(value, Sequence | AbstractSet):
        return [plain(item, depth + 1) for item in list(value)[:_ITEMS_LIMIT]]
    return _bounded(_guarded(repr, value))


def _guarded(show: Callable[[Any], str], value: object) -> str:
    """Show a value whose own methods may fail."""
    try:
        return show(value)
    except Exception as error:  # noqa: BLE001 - foreign __repr__ and __str__ may raise anything
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _bounded(text: str) -> str:
    """Shorten a text to what a log line may hold."""
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}... ({len(text)} characters)"
