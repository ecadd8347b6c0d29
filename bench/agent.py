"""Measures the running agent: start, memory, idle CPU, scrape latency, and `check --no-import`.

    python bench/agent.py [--seconds 60] [--limits]

Prints one line per figure with its budget. ``--limits`` makes a figure over its budget exit with 1; without
it nothing fails, because on a busy machine times say little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

AGENT = [sys.executable, "-m", "sidecar"]


def figure(name: str, value: float, unit: str, budget: float | None = None) -> bool:
    """Print a figure; True when it is within its budget."""
    within = budget is None or value <= budget
    limit = "" if budget is None else f"  (budget {budget:g} {unit}{'' if within else ': OVER'})"
    print(f"{name:<34} {value:10.2f} {unit}{limit}")
    return within


def wait_for(log: Path, process: subprocess.Popen[bytes]) -> tuple[float, str]:
    """Epoch seconds of the first answer, and the address."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "listening":
                    url = f"http://{event['addresses'][0]}"
                    urllib.request.urlopen(url + "/livez", timeout=5).read()
                    return time.time(), url
        time.sleep(0.005)
    raise SystemExit(log.read_text())


def main() -> int:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="length of the idle measurement (default: 60)")
    parser.add_argument("--limits", action="store_true", help="exit with 1 when a figure is over its budget")
    parser.add_argument("arguments", nargs="*", help="further arguments for serve, after --")
    options = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        starts = []
        for last in (False, False, True):
            with log.open("wb") as out:
                begun = time.time()
                process = subprocess.Popen(
                    [*AGENT, "serve", "--listen", "127.0.0.1:0", "--log-format", "json", *options.arguments],
                    stdout=out,
                    stderr=out,
                )
            answered, url = wait_for(log, process)
            starts.append(answered - begun)
            if not last:
                process.terminate()
                process.wait()
        good &= figure("start until /livez answers (best)", min(starts), "s", 1.0)
        agent = psutil.Process(process.pid)
        time.sleep(8)  # the first rounds are over
        good &= _idle(agent, options.seconds)
        good &= _memory(agent)
        _scrapes(url)
        good &= _memory(agent, " after 2000 scrapes")
        begun = time.time()
        process.terminate()
        process.wait()
        good &= figure("SIGTERM until the end", time.time() - begun, "s", 2.0)
    checks = []
    for _ in range(3):
        begun = time.time()
        subprocess.run([*AGENT, "check", "--no-import"], check=False, capture_output=True)
        checks.append(time.time() - begun)
    good &= figure("check --no-import (best of 3)", min(checks), "s", 1.0)
    return 1 if options.limits and not good else 0


def _idle(agent: psutil.Process, seconds: float) -> bool:
    def spent() -> dict[int, float]:
        return {p.pid: sum(p.cpu_times()[:2]) for p in [agent, *agent.children(recursive=True)]}

    before, begun = spent(), time.time()
    time.sleep(seconds)
    after, length = spent(), time.time() - begun
    # Short-lived children count too: the kernel adds them to the parent's children times.
    total = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    good = figure("idle CPU, agent and worker", 100 * total / length, "%", 1.0)
    for process in [agent, *agent.children(recursive=True)]:
        used = after.get(process.pid, 0.0) - before.get(process.pid, 0.0)
        figure(f"  {'agent' if process == agent else 'worker'}", 100 * used / length, "%")
    return good


def _memory(agent: psutil.Process, when: str = "") -> bool:
    good = figure(f"resident memory, agent{when}", agent.memory_info().rss / 2**20, "MiB", 50.0)
    for child in agent.children(recursive=True):
        figure("resident memory, NVML worker", child.memory_info().rss / 2**20, "MiB")
    return good


def _scrapes(url: str) -> None:
    times = []
    for _ in range(2000):
        begun = time.perf_counter()
        body = urllib.request.urlopen(url + "/metrics", timeout=5).read()
        times.append(time.perf_counter() - begun)
    quantiles = statistics.quantiles(times, n=100)
    figure("scrape, new connection each, p50", 1000 * quantiles[49], "ms")
    figure("scrape, new connection each, p99", 1000 * quantiles[98], "ms")
    figure("exposition size", len(body) / 1024, "KiB", 40.0)
    figure("exposition series", sum(not line.startswith(b"#") for line in body.splitlines()), "", 340)


if __name__ == "__main__":
    sys.exit(main())
