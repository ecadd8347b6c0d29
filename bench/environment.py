"""Measures the reading of an environment against its budgets: inventory and fingerprint, inside the reader's child.

    python bench/environment.py [--python INTERPRETER] [--rounds 7] [--limits]

INTERPRETER is that of the environment to read, by default the one that runs this. Without a full SGLang environment
(some 200 distributions) the figures say little. Takes the best of the rounds: on a busy machine the others tell of
the machine. ``--limits`` makes a figure over its budget exit with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from measure import figure

from sidecar.environment import DETAILED, MODULES, STATIC_READER, TRACKED


def read(python: str, known: str | None) -> tuple[dict[str, float], dict[str, object], float]:
    """(milliseconds since the script's start at each stage, answer, wall milliseconds of the whole child)."""
    spec = {
        "environ": {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "environ_seen": True,
        "tracked": TRACKED,
        "detailed": DETAILED,
        "modules": MODULES,
        "known": known,
    }
    reading, writing = os.pipe()
    begun = time.perf_counter()
    argv = [python, "-I", "-S", "-B", STATIC_READER, json.dumps(spec), "--fd", str(writing)]
    process = subprocess.Popen(argv, pass_fds=(writing,), env={})
    os.close(writing)
    with os.fdopen(reading) as channel:
        lines = [json.loads(line) for line in channel]
    process.wait()
    wall = 1000 * (time.perf_counter() - begun)
    return {line["stage"]: 1000 * line["at"] for line in lines if "stage" in line}, lines[-1]["result"], wall


def main() -> int:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment to read")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (default: 7)")
    parser.add_argument("--limits", action="store_true", help="exit with 1 when a figure is over its budget")
    options = parser.parse_args()
    marks, inventories, whole, confirmed = [], [], [], []
    read(options.python, None)  # warms the page cache
    for _ in range(options.rounds):
        stages, answer, wall = read(options.python, None)
        whole.append(wall)
        marks.append(stages["surroundings"] - stages["fingerprint"])
        inventories.append(stages["answer"] - stages["surroundings"])
        confirmed.append(read(options.python, str(answer["fingerprint"]))[2])
    figure("distributions", float(str(answer["distribution_count"])), "")
    good = figure("fingerprint (best)", min(marks), "ms", 120)
    good &= figure("inventory (best)", min(inventories), "ms", 150)
    figure("child, everything read anew (best)", min(whole), "ms")
    figure("child, environment unchanged (best)", min(confirmed), "ms")
    return 1 if options.limits and not good else 0


if __name__ == "__main__":
    sys.exit(main())
