"""The fuzz targets with input that libFuzzer makes, guided by what of the sidecar's code it has reached (atheris).

    python tests/fuzz/guided.py [--minutes 10] [TARGET ...]

Only targets whose work is done in this process: of a child's code nothing is seen. Each runs in a process of its own,
because libFuzzer ends the process. What made one fail is kept in ``.fuzz``, for ``guided.py --input FILE TARGET``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".fuzz"
TARGETS = (
    "test_an_answer_of_the_reader",
    "test_an_imports_lines",
    "test_the_workers_lines",
    "test_the_drivers_version",
    "test_the_servers_information",
    "test_a_launch",
    "test_a_launchs_file",
    "test_a_state_reads_back",
    "test_a_damaged_state",
    "test_a_baseline",
    "test_a_configuration",
)

_ONE = "--in-this-process"


def fuzz(target: str, flags: list[str]) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["sidecar"]):
        import sidecar.app  # noqa: F401 - what is imported here is instrumented
        from sidecar import baseline, config, serverinfo, state  # noqa: F401
        from sidecar.launch import args, file, shell  # noqa: F401
    from tests.fuzz import test_fuzz

    atheris.Setup([sys.argv[0], *flags], getattr(test_fuzz, target).guided)
    atheris.Fuzz()


def main() -> int:
    """Fuzz the targets one after the other, and return the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long, for all targets together (default: 10)")
    parser.add_argument("--input", type=Path, help="run one target once, with what was kept of a failure")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    targets = options.targets or TARGETS
    KEPT.mkdir(exist_ok=True)
    failed = 0
    for target in targets:
        corpus = KEPT / target
        corpus.mkdir(exist_ok=True)
        more = [str(options.input)] if options.input else [str(corpus), "-len_control=20", "-max_len=8192"]
        seconds = max(int(60 * options.minutes / len(targets)), 1)
        more += [f"-max_total_time={seconds}", f"-artifact_prefix={KEPT}/{target}-", "-timeout=60"]
        command = [sys.executable, __file__, _ONE, target, *more]
        ended = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        said = ended.stderr
        runs = re.findall(r"^Done (\d+) runs", said, re.MULTILINE)
        reached = re.findall(r"cov: (\d+) ft: (\d+)", said)
        coverage = f"{reached[0][0]} -> {reached[-1][0]} edges" if reached else "nothing reached"
        sys.stdout.write(f"{target}: {runs[-1] if runs else 'not all of its'} runs, {coverage}\n")
        sys.stdout.flush()
        if ended.returncode:
            failed += 1
            sys.stderr.write(said[-6000:])
    return min(failed, 99)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == [_ONE]:
        fuzz(sys.argv[2], sys.argv[3:])
    sys.exit(main())
