"""Measures a preflight that only reads, against an environment with SGLang, cold and warm.

    python bench/preflight.py /path/to/server/python [--limits] [-- FLAGS...]

Prints wall and CPU seconds with the budget. On a busy machine only the CPU seconds say something.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

from measure import figure

AGENT = [sys.executable, "-m", "sidecar"]
ROUNDS = 7
BUDGET = 1.0
"""Seconds of wall time; the agent's design."""


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", help="the interpreter of an environment with SGLang")
    parser.add_argument("--limits", action="store_true", help="exit with 1 when the budget is passed")
    parser.add_argument("flags", nargs="*", help="flags of the launch, after --")
    options = parser.parse_args()
    flags = options.flags or ["--attention-backend", "fa3", "--mamba-backend", "flashinfer"]
    command = [options.python, "-m", "sglang.launch_server", "--model-path", "model", *flags]
    wall, cpu = [], []
    for _ in range(ROUNDS):
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        done = subprocess.run([*AGENT, "check", "--no-import", "--", *command], check=False, capture_output=True)
        wall.append(time.time() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode > 3:
            print(done.stderr.decode("utf-8", "replace"))
            return 1
    figure("preflight, first", wall[0], "s")
    good = figure(f"preflight, best of {ROUNDS}", min(wall), "s", BUDGET)
    figure("preflight, median", statistics.median(wall), "s")
    figure("CPU of it and its children, median", statistics.median(cpu), "s")
    return 0 if good or not options.limits else 1


if __name__ == "__main__":
    sys.exit(main())
