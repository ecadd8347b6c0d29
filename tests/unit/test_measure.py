"""What the benchmarks compute."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(name="measure")
def _measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("measure", monkeypatch)


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the benchmarks, which are programs in one folder."""
    monkeypatch.syspath_prepend(str(BENCH))
    return __import__(name)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([2.0, 1.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 1.0, 4.0),
        ([float(n) for n in range(101)], 0.99, 99.0),
        ([0.0, 10.0], 0.25, 2.5),
    ],
)
def test_quantile(measure: ModuleType, values: list[float], share: float, expected: float) -> None:
    """Between two values in proportion, whatever their order."""
    assert measure.quantile(values, share) == expected


def test_no_quantile_of_nothing(measure: ModuleType) -> None:
    """Nothing has no median."""
    with pytest.raises(ValueError, match="no values"):
        measure.quantile([], 0.5)


def test_spread(measure: ModuleType) -> None:
    """Median and quartiles; a unit divides all of them."""
    spread = measure.Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (3.0, 2.0, 4.0, 5)
    assert (spread / 2).median == 1.5


def test_ratios(measure: ModuleType) -> None:
    """Round by round; a round in which the other used nothing tells nothing, and rounds must be the same number."""
    assert measure.ratios([1.0, 2.0, 3.0], [2.0, 0.0, 1.0]) == [0.5, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        measure.ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_growth(measure: ModuleType, power: float) -> None:
    """The exponent of a power."""
    sizes = [1, 2, 4, 8, 16]
    assert measure.growth(sizes, [7 * size**power for size in sizes]) == pytest.approx(power)


def test_memory_is_read_from_a_rollup(measure: ModuleType) -> None:
    """In bytes, with Pss told apart from its parts."""
    text = (
        "5581e0000000-7ffd00000000 ---p 00000000 00:00 0                          [rollup]\n"
        "Rss:               48124 kB\nPss:               38120 kB\nPss_Dirty:         33000 kB\nShared_Clean: 1 kB\n"
    )
    assert measure.Memory.parse(text) == measure.Memory(48124 * 1024, 38120 * 1024)
    with pytest.raises(ValueError, match="without"):
        measure.Memory.parse("Rss: 1 kB\n")


def test_memory_of_a_process(measure: ModuleType) -> None:
    """This one has some, of which it shares a part."""
    memory = measure.Memory.of(os.getpid())
    assert 2**20 < memory.proportional <= memory.resident


def test_series(measure: ModuleType) -> None:
    """Lines that are no comment."""
    assert measure.series(b'# HELP a b\n# TYPE a gauge\na 1\na{b="c"} 2\n\n# EOF\n') == 2


def test_cpu_of_others_and_of_their_children(measure: ModuleType) -> None:
    """The clock of another process, and the time of a child that it waited for, are part of its CPU time."""
    program = (
        "import subprocess, sys, time\n"
        "burn = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "subprocess.run([sys.executable, '-c', burn])\n"
        "while time.process_time() < 0.2: pass\n"
        "print('burnt', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "burnt\n"
        used = measure.cpu(measure.tree(process.pid))
        assert 0.45 <= used <= 5
        assert measure.cpu([process.pid]) <= used + 1
    finally:
        process.communicate()
    assert measure.cpu([process.pid]) == 0  # it is gone


def test_the_clock_is_that_of_the_process(measure: ModuleType) -> None:
    """For this process it is the one that Python shows."""
    assert time.clock_gettime(measure.clock_of(os.getpid())) == pytest.approx(time.process_time(), abs=1)


def test_table(measure: ModuleType) -> None:
    """Markdown with its columns in line."""
    assert measure.table(["a", "long"], [["xyz", "1"]]) == "| a   | long |\n|-----|------|\n| xyz | 1    |"


def test_chunks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers send what they compress on the way."""
    scraping = imported("scraping", monkeypatch)
    assert scraping._unchunked(b"4\r\nabcd\r\na\r\n0123456789\r\n0\r\n\r\n") == b"abcd0123456789"


def test_a_target_is_judged_by_ratios_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the rounds' ratios, not the ratio of the medians; what was not measured is not judged."""
    table = imported("table", monkeypatch)
    ours, theirs = table.Figures({"x": [1.0, 10.0, 2.0]}), table.Figures({"x": [2.0, 20.0, 40.0]})
    results = {"sidecar": ours, "peer": theirs}
    assert table.judged(results, table.Target(figure="x", bound=1, to="peer")).median == 0.5
    assert table.judged(results, table.Target(figure="x", bound=1)).median == 2.0
    assert table.judged(results, table.Target(figure="x", bound=1, to="absent")) is None
    assert table.judged(results, table.Target(figure="y", bound=1)) is None


class _Exporter(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer as an exporter that has nothing to say."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Nothing to tell."""


def test_scrapers_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they met comes back: a time for each scrape that was answered, and the number of the others."""
    scraping = imported("scraping", monkeypatch)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Exporter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        met = scraping.storm_apart(server.server_port, 2, 1.5)
        server.shutdown()
    assert met.failed == 0
    assert len(met.times) >= 2
    assert all(0 < seconds < 1.5 for seconds in met.times)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        met = scraping.storm_apart(nobody.getsockname()[1], 2, 1.5)
    assert met.times == []
    assert met.failed >= 2
