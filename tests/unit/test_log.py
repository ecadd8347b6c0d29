"""The log: every line has one form, and no value breaks it."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from sidecar.log import Bridge, Writer, as_json, configure
from tests.fakes.pipes import unread_pipe


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        """Fail as the system does."""
        raise OSError(28, "No space left on device")


class Rude:
    """An object that cannot show itself."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if isinstance(handler, Bridge):
            root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def fail(error: Exception) -> None:
    """Raise, so that the exception has a traceback."""
    raise error


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """Parse every line that was written."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def logged(**values: Any) -> dict[str, Any]:
    """Log one event as JSON and parse it."""
    stream = io.StringIO()
    configure("json", "info", stream)
    structlog.get_logger().info("something happened", **values)
    (line,) = lines(stream)
    return line


def test_a_line_is_one_object_that_starts_with_time_level_and_event() -> None:
    """Each event is a JSON object on one line, with a UTC timestamp first."""
    line = logged(code="gpu-lost", gpus=[0, 1])
    assert list(line) == ["timestamp", "level", "event", "code", "gpus"]
    assert line["timestamp"].endswith("Z")
    assert (line["level"], line["event"], line["gpus"]) == ("info", "something happened", [0, 1])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"ok \xff", "ok \\xff"),
        (bytearray(b"x"), "x"),
        (ValueError("bad"), "ValueError: bad"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({1}, [1]),
        ((1, b"x"), [1, "x"]),
        ({b"k": {"n": 1.5}, None: True}, {"k": {"n": 1.5}, "None": True}),
        (Rude(), "<Rude that cannot be shown: RuntimeError>"),
        ("line\nbreak \x1b[31m", "line\nbreak \x1b[31m"),
        ("lone \udcff", "lone \udcff"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_odd_values_become_json(value: Any, shown: Any) -> None:
    """Bytes, exceptions and whatever else is logged stay one valid JSON object (hynek/structlog#360)."""
    assert logged(value=value)["value"] == shown


def test_a_structure_that_contains_itself_ends() -> None:
    """A cycle is cut, not followed."""
    loop: list[Any] = []
    loop.append(loop)
    assert "list object" in json.dumps(logged(value=loop))


def test_sizes_are_bounded() -> None:
    """A value that is out of control does not make an endless line."""
    line = logged(text="x" * 100_000, items=list(range(100_000)))
    assert len(line["text"]) < 10_000
    assert line["text"].endswith("(100000 characters)")
    assert len(line["items"]) == 100


def test_exceptions_come_with_their_traceback_on_one_line() -> None:
    """An exception is one JSON line that holds the traceback as text."""
    stream = io.StringIO()
    configure("json", "info", stream)
    try:
        fail(ValueError(b"\xff"))
    except ValueError:
        structlog.get_logger().exception("failed")
    (line,) = lines(stream)
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert "ValueError" in line["exception"]


def test_other_libraries_write_the_same_lines() -> None:
    """What aiohttp and asyncio log by the standard library has the same form (litestar-org/litestar#2151)."""
    stream = io.StringIO()
    configure("json", "info", stream)
    try:
        fail(OSError("gone"))
    except OSError:
        logging.getLogger("aiohttp.server").exception("Error handling %s", b"\xff")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("Error handling b'\\xff'", "error", "aiohttp.server")
    assert "OSError: gone" in line["exception"]


def test_a_record_whose_arguments_do_not_fit_is_still_logged() -> None:
    """A wrong format string of a library loses neither text nor arguments."""
    stream = io.StringIO()
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "%d items", ("many",), None)
    Bridge(Writer(stream, as_json)).handle(record)
    (line,) = lines(stream)
    assert "%d items" in line["event"]
    assert "many" in line["event"]


def test_python_warnings_are_lines_too() -> None:
    """A FutureWarning of a library is a JSON line, not text between lines (b2wdigital/aiologger#115)."""
    stream = io.StringIO()
    configure("json", "info", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("pynvml is deprecated", FutureWarning, stacklevel=1)
    (line,) = lines(stream)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "pynvml is deprecated" in line["event"]


@pytest.mark.parametrize(("level", "expected"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_the_level_decides_what_is_written(level: str, expected: int) -> None:
    """Events below the level are dropped."""
    stream = io.StringIO()
    configure("json", level, stream)
    log = structlog.get_logger()
    log.debug("one")
    log.info("two")
    log.warning("three")
    assert len(lines(stream)) == expected


def test_other_libraries_are_quiet_below_warning() -> None:
    """Info of other libraries is about every connection; it shows only with level debug."""
    stream = io.StringIO()
    configure("json", "info", stream)
    logging.getLogger("aiohttp.access").info("GET /metrics")
    assert stream.getvalue() == ""
    configure("json", "debug", stream)
    logging.getLogger("aiohttp.access").info("GET /metrics")
    assert len(lines(stream)) == 1


def test_auto_is_console_on_a_terminal_and_json_elsewhere() -> None:
    """People get text, collectors get JSON, without a setting."""
    terminal, pipe = Terminal(), io.StringIO()
    configure("auto", "info", terminal)
    structlog.get_logger().info("hello", probe="driver", detail="two words")
    configure("auto", "info", pipe)
    structlog.get_logger().info("hello")
    assert terminal.getvalue().endswith(' info     hello probe=driver detail="two words"\n')
    assert lines(pipe)[0]["event"] == "hello"


def test_the_console_cannot_be_steered() -> None:
    """Control characters of a value neither move the cursor nor forge a line; tracebacks keep their lines."""
    stream = io.StringIO()
    configure("console", "info", stream)
    structlog.get_logger().info("x\n12:00:00 info all fine", value="\x1b[2J", other="a\u2028b \udcff")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    try:
        fail(ValueError("\x1b[2J"))
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "\x1b" not in stream.getvalue()
    assert "\n  Traceback" in stream.getvalue()
    stream.getvalue().encode()


def test_a_closed_or_broken_stream_is_survived() -> None:
    """A reader that left does not stop the agent."""
    closed = io.StringIO()
    configure("json", "info", closed)
    closed.close()
    structlog.get_logger().info("into the void")
    configure("json", "info", Full())
    structlog.get_logger().info("disk is full")
    stream = io.StringIO()
    configure("json", "info", stream)
    structlog.get_logger().info("back again")
    assert [line["event"] for line in lines(stream)] == ["back again"]


def test_stdout_stays_empty_and_stderr_is_json_in_a_real_process() -> None:
    """Whoever logs, each line of standard error is a JSON object and standard output stays untouched."""
    program = (
        "import sys, logging, warnings, structlog\n"
        "from sidecar import log\n"
        "log.configure('auto', 'info', sys.stderr)\n"
        "structlog.get_logger().info('a', b=b'\\xff')\n"
        "logging.getLogger('b').error('b')\n"
        "warnings.warn('c')\n"
        "import asyncio\n"
        "async def main():\n"
        "    asyncio.get_running_loop().call_exception_handler({'message': 'd', 'odd': object()})\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    assert [event["level"] for event in events] == ["info", "error", "warning", "error"]


def test_what_a_library_repeats_is_written_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A flood of one message is one line, and the next line says how many were withheld."""
    stream = io.StringIO()
    configure("json", "info", stream)
    library = logging.getLogger("some.library")
    records = [
        library.makeRecord("some.library", logging.ERROR, "", 0, "cannot accept %d", (n,), None) for n in range(500)
    ]
    for number, record in enumerate(records):
        record.created = 1000.0 + (0 if number < 499 else 61)
        library.handle(record)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["cannot accept 0", "cannot accept 499"]
    assert lines[1]["withheld"] == 498


# -- a reader that does not read -----------------------------------------------------------------------

UNWAITED = """
import sys, structlog
from sidecar import log

with log.unwaited():
    log.configure("json", "info", sys.stderr)
    said = structlog.get_logger()
    for line in sys.stdin:
        for number in range(int(line)):
            said.info("line", number=number, text="x" * 1000)
        print("done", flush=True)
sys.exit(3)
"""
"""Logs as many lines as each line of its input says, in the way of an agent that serves."""


def unwaited(stderr: int) -> subprocess.Popen[str]:
    """Start it."""
    return subprocess.Popen(
        [sys.executable, "-c", UNWAITED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
    )


def say(process: subprocess.Popen[str], number: int) -> None:
    """Have it log so many lines; returns once that is done."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    assert select.select([process.stdout], [], [], 20)[0], "it waits for its log"
    assert process.stdout.readline() == "done\n"


def read_lines(descriptor: int, number: int) -> list[dict[str, Any]]:
    """The next lines that are no empty ones."""
    got = b""
    end = time.monotonic() + 20
    while got.count(b"\n") < number:
        assert time.monotonic() < end, got[-2000:]
        if select.select([descriptor], [], [], 0.1)[0]:
            got += os.read(descriptor, 65536).lstrip(b"\n")
    return [json.loads(line) for line in got.splitlines() if line]


def test_nobody_waits_for_a_reader_and_what_is_lost_is_counted() -> None:
    """What fits is kept in order; in place of the rest stands how many lines it were."""
    with unread_pipe(full=True) as (read, write), unwaited(write) as process:
        say(process, 1000)
        assert process.poll() is None
        first = read_lines(read, 50)
        # As many as are kept, and one that counts the others.
        while "lines" not in first[-1]:
            first += read_lines(read, 1)
        kept, told = first[:-1], first[-1]
        assert [line["number"] for line in kept] == list(range(len(kept)))
        assert (told["level"], told["lines"]) == ("warning", 1000 - len(kept))
        assert list(told)[:3] == ["timestamp", "level", "event"]
        assert 100 < len(kept) < 500
        say(process, 3)
        assert [line["number"] for line in read_lines(read, 3)] == [0, 1, 2]
        process.communicate(timeout=20)
        assert process.returncode == 3


def test_a_line_is_there_at_once() -> None:
    """Whoever reads need not wait for the next line, nor for the end; at the end nothing is left out."""
    with unread_pipe() as (read, write), unwaited(write) as process:
        for _ in range(3):
            say(process, 1)
            assert [line["number"] for line in read_lines(read, 1)] == [0]
        say(process, 3)
        process.communicate(timeout=20)
        assert process.returncode == 3
        assert [line["number"] for line in read_lines(read, 3)] == [0, 1, 2]


def test_a_full_pipe_does_not_keep_it_from_ending() -> None:
    """What is queued gets a moment, and Python's own flush at the end finds nothing to wait for."""
    with unread_pipe(full=True) as (_, write), unwaited(write) as process:
        say(process, 1000)
        begun = time.monotonic()
        process.communicate(timeout=20)
        assert process.returncode == 3
        assert time.monotonic() - begun < 2


def test_a_disk_that_was_full_leaves_no_line_that_continues_another() -> None:
    """What was cut off by an error is ended before the next line."""
    program = (
        "import sys, os, resource, signal, structlog\n"
        "from sidecar import log\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))\n"
        "with log.unwaited():\n"
        "    log.configure('json', 'info', sys.stderr)\n"
        "    structlog.get_logger().info('a', text='x' * 1000)\n"
        "    structlog.get_logger().info('b', text='x' * 1000)\n"
        "    input()\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "    structlog.get_logger().info('c')\n"
    )
    with open(os.memfd_create("log"), "w+b") as file:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=file)
        end = time.monotonic() + 20
        while os.fstat(file.fileno()).st_size < 1500:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.1)
        process.communicate(b"\n", timeout=20)
        file.seek(0)
        first, cut, last = file.read().decode().splitlines()
    assert [json.loads(line)["event"] for line in (first, last)] == ["a", "c"]
    assert '"event": "b"' in cut
