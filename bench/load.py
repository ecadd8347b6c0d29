"""Measures the agent under load: how long /readyz takes while others scrape or hold connections open, and memory.

    python bench/load.py [--seconds 20] [--slow 1000] [--scrapers 200] [--limits]

The agent, the load and the one that asks for /readyz are processes of their own. /readyz is asked for ten times a
second as the kubelet does it, each time over a new connection. ``--limits`` makes a figure over its budget exit with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes import agent
from tests.fakes.kubelet import ask
from tests.fakes.load import load
from tests.fakes.nvml import Scenario, build

READYZ_P99_MS = 50.0
RSS_MIB = 100.0
INTERVAL = 0.1


def main() -> int:
    """Run every kind of load against one agent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="length of each measurement (default: 20)")
    parser.add_argument("--slow", type=int, default=1000, help="connections that dribble (default: 1000)")
    parser.add_argument("--scrapers", type=int, default=200, help="scrapers at a time (default: 200)")
    parser.add_argument("--limits", action="store_true", help="exit with 1 when a figure is over its budget")
    options = parser.parse_args()
    half = str(options.scrapers // 2)
    everyone = ("--scrapers", half, "--one-shot", half)
    slow = ("--slow", str(options.slow))
    kinds: list[tuple[str, Sequence[str] | None]] = [
        ("no load", None),
        ("scrapers, kept, 1 s apart", ("--scrapers", str(options.scrapers))),
        ("scrapers, new each, 1 s apart", ("--one-shot", str(options.scrapers))),
        ("slow connections", slow),
        ("both", (*everyone, *slow)),
        ("both, scrapes without a pause", (*everyone, *slow, "--pause", "0")),
        ("no load, afterwards", None),
    ]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        env = Scenario(Path(folder) / "scenario", gpus=8).environ(build(Path(folder) / "nvml"))
        # Whatever server runs on this machine is not what is measured.
        alone = ("--server-url", "http://127.0.0.1:9", "--processes", "hidden", "--image", "own")
        with agent.serve(Path(folder) / "log", *alone, env=env) as served:
            served.until("gpus_visible", 8)
            served.until("ready", 1)
            time.sleep(3)  # the first rounds are over
            print(f"{'load':<32}{'p50':>8}{'p99':>8}{'max':>8}  {'failed':>6}{'RSS':>8}{'open':>6}   of the load")
            print(f"{'':<32}{'ms':>8}{'ms':>8}{'ms':>8}  {'':>6}{'MiB':>8}")
            for name, arguments in kinds:
                good &= _measure(served, name, arguments, options.seconds)
            code, seconds = served.stop()
            print(f"SIGTERM: status {code} after {seconds:.2f} s; log {(Path(folder) / 'log').stat().st_size} bytes")
    return 1 if options.limits and not good else 0


def _measure(served: agent.Served, name: str, arguments: Sequence[str] | None, seconds: float) -> bool:
    process = psutil.Process(served.process.pid)
    times, failed, most, connections = [], 0, 0, 0
    with contextlib.nullcontext({}) if arguments is None else load(served.url, *arguments, seconds=600) as counted:
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            attempt = ask(served.url + "/readyz")
            times.append(1000 * attempt.seconds)
            failed += not attempt.passed
            most = max(most, process.memory_info().rss)
            connections = max(connections, process.num_fds())
            time.sleep(max(0.0, begun + INTERVAL - time.monotonic()))
    quantiles = statistics.quantiles(times, n=100)
    rss = most / 2**20
    good = quantiles[98] <= READYZ_P99_MS and rss <= RSS_MIB and failed == 0
    print(
        f"{name:<32}{quantiles[49]:8.2f}{quantiles[98]:8.2f}{max(times):8.1f}  {failed:6}{rss:8.1f}{connections:6}   "
        + ", ".join(f"{key} {value}" for key, value in sorted(counted.items()))
        + ("" if good else "  OVER"),
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(main())
