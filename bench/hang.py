"""Measures what a hanging GPU costs: eight GPUs of which one never answers, scraped all the while.

    python bench/hang.py [--seconds 60]

Prints the latency of /metrics, how many NVML workers there were at most, whether the other seven GPUs' values kept
changing, and how long SIGTERM took. Uses the tests' fake of the NVML library and needs a C compiler.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fakes import agent
from tests.fakes.nvml import Scenario, build


def main() -> int:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="length of the measurement (default: 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scenario = Scenario(Path(folder) / "scenario", gpus=8)
        env = scenario.environ(build(Path(folder) / "nvml"))
        arguments = ("--intervals", "driver=1", "--deadlines", "driver=2")
        with agent.serve(Path(folder) / "log", *arguments, env=env) as served:
            served.until("gpus_visible", 8)
            scenario.set({"nvmlDeviceGetTemperature@3": "hang"})
            times, workers, rounds = [], 0, {}
            end = time.monotonic() + options.seconds
            number = 0
            while time.monotonic() < end:
                number += 1
                if number % 20 == 0:
                    scenario.set({"power": 100_000 + number})
                    workers = max(workers, len(agent.children(served.process.pid)))
                begun = time.perf_counter()
                body = served.get("/metrics")[1]
                times.append(time.perf_counter() - begun)
                for gpu, watts in re.findall(r'gpu_power_watts\{gpu="(\d)".*?\} (\S+)', body):
                    rounds.setdefault(gpu, set()).add(watts)
                time.sleep(0.02)
            quantiles = statistics.quantiles(times, n=100)
            print(f"scrapes                       {len(times)}")
            print(f"scrape p50, p99               {1000 * quantiles[49]:.2f} ms, {1000 * quantiles[98]:.2f} ms")
            print(f"children at most              {workers}")
            print(f"values seen of each GPU       { ({gpu: len(seen) for gpu, seen in sorted(rounds.items())}) }")
            served.scrape()
            print(f"driver-hung                   {served.value('condition_active', code='driver-hung')}")
            print(f"ready                         {served.value('ready')}")
            code, seconds = served.stop()
            print(f"SIGTERM                       status {code} after {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
