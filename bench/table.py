"""Measures the sidecar beside other exporters in one run, and prints one table.

    python bench/table.py [--peer-python PATH] [--gpus 1,8,16] [--quick] [--json FILE] [--limits]
    python bench/table.py --real-nvml --peer-python PATH [--quick]

The peers are nvitop-exporter (of the interpreter PATH, or from PATH as a folder of packages), Debian's node_exporter,
and a bare server of aiohttp and prometheus_client. All see the same fake NVML library, compiled from tests/fakes/nvml,
or with ``--real-nvml`` the machine's own. What is not there is skipped, with the reason.

All subjects run at the same time and take their turns, so that what else the machine does meets each of them. CPU is
measured by the processes' own clocks; a scrape is as Prometheus makes it (its connection kept where the server keeps
it, gzip where the server has it). Ratios are taken in each round and are told by their median and quartiles.
``--limits`` exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import subjects
from measure import MIB, Memory, Spread, cpu, quantile, ratios, series, table
from scraping import Scraper, compressed_size, scrape_once, storm_apart
from subjects import Running, Subject, SubjectError

from tests.fakes.nvml import Scenario, build
from tests.fakes.releases import install
from tests.fakes.site import driver_library

FAILURES = Path(__file__).parents[1] / "tests/captures/sglang/launch-failures-0.5.16.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long everything takes. Times are seconds."""

    starts: int
    settle: float
    idle_windows: int
    idle_seconds: float
    rounds: int
    scrapes: int
    changes: int
    storm_seconds: float
    checks: int


FULL = Plan(
    starts=7,
    settle=12,
    idle_windows=3,
    idle_seconds=60,
    rounds=11,
    scrapes=60,
    changes=40,
    storm_seconds=10,
    checks=5,
)
BRIEF = Plan(
    starts=2,
    settle=10,
    idle_windows=1,
    idle_seconds=30,
    rounds=5,
    scrapes=30,
    changes=8,
    storm_seconds=5,
    checks=0,
)
"""For the numbers of GPUs that no target is about."""
QUICK = Plan(
    starts=5,
    settle=8,
    idle_windows=2,
    idle_seconds=45,
    rounds=5,
    scrapes=40,
    changes=15,
    storm_seconds=8,
    checks=3,
)


@dataclass(slots=True)
class Figures:
    """What was measured of one subject: a list per figure with one value per round."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Note a value."""
        self.values.setdefault(name, []).append(value)


Results = dict[str, Figures]


# -- measuring --------------------------------------------------------------------------------------


def measure_starts(all_of_them: Sequence[Subject], plan: Plan, results: Results) -> None:
    """Start each subject again and again, in turns."""
    for number in range(plan.starts + 1):
        for subject in all_of_them:
            with subjects.running(subject) as one:
                if number:  # the first finds cold files
                    results[subject.name].add("start to first scrape s", one.first_scrape)
                    results[subject.name].add("start CPU s", one.start_cpu)
            if subject.modules and number:
                seconds, used = _import(subject)
                results[subject.name].add("import s", seconds)
                results[subject.name].add("import CPU s", used)


def _import(subject: Subject) -> tuple[float, float]:
    """Seconds and CPU seconds of an interpreter that only imports."""
    before, begun = os.times(), time.perf_counter()
    subprocess.run(
        [subject.python, "-c", subject.modules],
        cwd="/",
        env=subjects.common_environ() | dict(subject.environ),
        check=True,
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begun, used


def measure_idle(running: Sequence[Running], plan: Plan, results: Results) -> None:
    """Let all of them be, and see what they use meanwhile."""
    for _ in range(plan.idle_windows):
        begun = time.perf_counter()
        before = [one.cpu() for one in running]
        time.sleep(plan.idle_seconds)
        seconds = time.perf_counter() - begun
        for one, used in zip(running, before, strict=True):
            results[one.subject.name].add("idle CPU %", 100 * (one.cpu() - used) / seconds)


def measure_scrapes(running: Sequence[Running], plan: Plan, results: Results) -> None:
    """Scrape each in turns, one scrape after the other."""
    with contextlib.ExitStack() as stack:
        scrapers = [stack.enter_context(Scraper(one.port)) for one in running]
        for _ in range(plan.rounds):
            for one, scraper in zip(running, scrapers, strict=True):
                figures = results[one.subject.name]
                times, used = _timed(one, scraper.scrape, plan.scrapes)
                figures.add("CPU per scrape ms", used)
                figures.add("scrape p50 ms", Spread.of(times).median)
                figures.add("scrape p99 ms", _p99(times))
                times, used = _timed(one, lambda port=one.port: scrape_once(port), plan.scrapes)
                figures.add("CPU per scrape, new connection ms", used)
                figures.add("scrape p50, new connection ms", Spread.of(times).median)


def _timed(one: Running, scrape: Callable[[], bytes], count: int) -> tuple[list[float], float]:
    """The milliseconds of each scrape, and of CPU per scrape in all processes of the subject."""
    pids = one.pids
    before, times = cpu(pids), []
    for _ in range(count):
        begun = time.perf_counter()
        scrape()
        times.append(1000 * (time.perf_counter() - begun))
    return times, 1000 * (cpu(pids) - before) / count


def _p99(times: Sequence[float]) -> float:
    return quantile(times, 0.99)


def measure_changes(running: Sequence[Running], plan: Plan, results: Results, change: Callable[[int], None]) -> None:
    """Scrape when what there is to tell has changed: readings of every GPU, and a round of each exporter since."""
    with contextlib.ExitStack() as stack:
        scrapers = [stack.enter_context(Scraper(one.port)) for one in running]
        for number in range(plan.changes):
            change(number)
            time.sleep(1.25)
            for one, scraper in zip(running, scrapers, strict=True):
                pids = [one.process.pid]  # what the others do meanwhile is no part of the scrape
                before, begun = cpu(pids), time.perf_counter()
                scraper.scrape()
                results[one.subject.name].add("scrape of a changed state ms", 1000 * (time.perf_counter() - begun))
                results[one.subject.name].add("CPU per scrape of a changed state ms", 1000 * (cpu(pids) - before))


def measure_storm(running: Sequence[Running], plan: Plan, results: Results) -> None:
    """Fifty scrapers at a time, each once a second."""
    for one in running:
        met = storm_apart(one.port, 50, plan.storm_seconds)
        figures = results[one.subject.name]
        figures.add("50 scrapers p50 ms", 1000 * quantile(met.times, 0.5))
        figures.add("50 scrapers p99 ms", 1000 * quantile(met.times, 0.99))
        figures.add("50 scrapers, failed %", 100 * met.failed / (met.failed + len(met.times)))


def measure_size(running: Sequence[Running], results: Results) -> None:
    """What they send, and what memory they hold after all that."""
    for one in running:
        figures = results[one.subject.name]
        body = scrape_once(one.port)
        figures.add("series", series(body))
        figures.add("bytes", len(body))
        figures.add("bytes with gzip", compressed_size(body))
        memory = [Memory.of(pid) for pid in one.pids]
        figures.add("processes", len(memory))
        figures.add("RSS serving process MiB", memory[0].resident / MIB)
        figures.add("RSS all processes MiB", sum(each.resident for each in memory) / MIB)
        if len(memory) > 1:
            figures.add("RSS NVML worker MiB", max(each.resident for each in memory[1:]) / MIB)


def measure_alone(all_of_them: Sequence[Subject], plan: Plan, results: Results) -> None:
    """What memory each holds while none of the others shares its libraries, as in a container of its own."""
    for subject in all_of_them:
        with subjects.running(subject) as one:
            time.sleep(plan.settle)
            for _ in range(plan.scrapes):
                scrape_once(one.port)
            memory = [Memory.of(pid) for pid in one.pids]
            results[subject.name].add("PSS all processes MiB", sum(each.proportional for each in memory) / MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How a recorded environment is made again; the rest of it is what the release requires."""

    changes: Mapping[str, str | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    without: str | None = None


FAULTS = {
    "flashinfer-cubin-mismatch": Fault(changes={"flashinfer-cubin": "0.6.12"}),
    "flashinfer-disabled-by-env": Fault(environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}),
    "fa3-not-importable": Fault(without="sgl_kernel/flash_ops.abi3.so"),
    "fa4-not-importable": Fault(changes={"nvidia-cutlass-dsl": None}),
}


def measure_checks(folder: Path, environ: Mapping[str, str], plan: Plan) -> list[dict[str, Any]]:
    """How long `check` takes to name the cause for which recorded launches of SGLang died."""
    if not plan.checks:
        return []
    driver_library(folder, "driver")
    environ = dict(environ)
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder / "driver"), environ.get("LD_LIBRARY_PATH")]))
    rows = []
    for launch in json.loads(FAILURES.read_text())["launches"]:
        fault = FAULTS.get(launch["cause"])
        if fault is None:
            continue
        site = install(folder / launch["cause"], "0.5.16", fault.changes)
        if fault.without is not None:
            site.remove(fault.without)
        row: dict[str, Any] = {"cause": launch["cause"], "SGLang s": launch["seconds"]}
        for kind, flags in (("static", ["--no-import"]), ("full", [])):
            alone = ["--server-url", "http://127.0.0.1:9", "--placement", "host", "--processes", "hidden"]
            server = [site.python, "-m", "sglang.launch_server", "--model-path", "model", *launch["arguments"]]
            command = [sys.executable, "-m", "sidecar", "check", *alone, *flags, "--", *server]
            env = subjects.common_environ() | environ | dict(fault.environ)
            row[f"{kind} s"], row[f"{kind} CPU s"] = [], []
            for _ in range(plan.checks):
                before, begun = os.times(), time.perf_counter()
                done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False)
                after = os.times()
                row[f"{kind} s"].append(time.perf_counter() - begun)
                row[f"{kind} CPU s"].append(
                    after.children_user + after.children_system - before.children_user - before.children_system
                )
                if done.returncode != 2 or launch["cause"] not in done.stdout:
                    raise SubjectError(f"check did not find {launch['cause']}: {done.stdout}{done.stderr}")
        rows.append(row)
    return rows


# -- one number of GPUs -----------------------------------------------------------------------------


def measure(gpus: int | None, plan: Plan, peers: Path | None, folder: Path) -> tuple[Results, list[Any], list[str]]:
    """Measure everything with so many fake GPUs (None: with what this machine has)."""
    scenario = None if gpus is None else Scenario(folder / f"scenario-{gpus}", gpus=gpus)
    environ: dict[str, str] = {} if scenario is None else scenario.environ(build(folder / "nvml"))
    if gpus is None and "LD_LIBRARY_PATH" in os.environ:
        environ["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]  # where a container has the driver's libraries
    main = [subjects.sidecar(environ=environ), subjects.bare()]
    beside = [
        subjects.sidecar("--intervals", "driver=1", name="sidecar, GPUs every 1 s", environ=environ),
        subjects.sidecar(name="sidecar, looking for a server", discover=True, environ=environ),
    ]
    skipped = []
    try:
        main.insert(1, _able(subjects.nvitop(peers, environ=environ)))
        every15 = subjects.nvitop(peers, "--interval", "15", name="nvitop-exporter, every 15 s", environ=environ)
        beside.append(every15)
    except SubjectError as error:
        skipped.append(f"nvitop-exporter: {error}")
    try:
        main.append(_able(subjects.node_exporter()))
    except SubjectError as error:
        skipped.append(f"node_exporter: {error}")
    results: Results = {subject.name: Figures() for subject in (*main, *beside)}
    say("start")
    measure_starts(main, plan, results)
    with contextlib.ExitStack() as stack:
        say("idle")
        running = [stack.enter_context(subjects.running(subject)) for subject in (*main, *beside)]
        time.sleep(plan.settle)
        measure_idle(running, plan, results)
        say("scrapes")
        compared = running[: len(main)]
        measure_scrapes(compared, plan, results)
        # The agent that looks every second: as old as its state is, each scrape of this kind finds a new one.
        changing = [one for one in running if one.subject.name != "sidecar"]

        def change(number: int) -> None:
            if scenario is not None:
                scenario.set(power=80_000 + number, temperature=40 + number % 9, utilization=number % 100)

        measure_changes(changing, plan, results, change)
        measure_storm(compared, plan, results)
        measure_size(running, results)
    say("memory")
    measure_alone(main, plan, results)
    say("checks")
    return results, measure_checks(folder, environ, plan) if gpus is not None else [], skipped


def _able(subject: Subject) -> Subject:
    """Give a peer back that can serve here. Raises SubjectError for one that cannot."""
    with subjects.running(subject):
        return subject


def say(what: str) -> None:
    """Tell on standard error what is going on; the table is all that is on the other."""
    load = os.getloadavg()[0]
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {what} (load {load:.1f})\n")


# -- telling ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound on a figure of the sidecar: on itself, or on its ratio to another subject's."""

    figure: str
    bound: float
    to: str | None = None
    of: str = "sidecar"
    theirs: str | None = None
    """The other's figure, where it is another one."""


BARE, NVITOP, EVERY_SECOND = "bare server", "nvitop-exporter", "sidecar, GPUs every 1 s"
TARGETS = (
    Target(figure="CPU per scrape ms", bound=1 / 15, to=NVITOP),
    Target(figure="CPU per scrape ms", bound=1 / 5, to=BARE),
    Target(figure="scrape p50 ms", bound=1 / 10, to=NVITOP),
    Target(figure="scrape p50 ms", bound=1 / 4, to=BARE),
    Target(figure="scrape p99 ms", bound=1 / 5, to=NVITOP),
    Target(figure="idle CPU %", bound=1 / 4, to=NVITOP),
    Target(figure="idle CPU %", bound=2, to=NVITOP, of=EVERY_SECOND),
    Target(figure="PSS all processes MiB", bound=1.6, to=BARE),
    Target(figure="RSS serving process MiB", bound=48),
    Target(figure="RSS NVML worker MiB", bound=16),
    Target(figure="start to first scrape s", bound=1.5, to=BARE),
    Target(figure="series", bound=340),
)


def judged(results: Results, target: Target) -> Spread | None:
    """The figure that a target bounds; None where one of the two was not measured."""
    ours = results.get(target.of, Figures()).values.get(target.figure)
    if ours is None:
        return None
    if target.to is None:
        return Spread.of(ours)
    theirs = results.get(target.to, Figures()).values.get(target.theirs or target.figure)
    return None if theirs is None else Spread.of(ratios(ours, theirs))


def number(value: float) -> str:
    """A number with three digits that say something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def told(spread: Spread) -> str:
    """A figure with its quartiles, where they differ."""
    middle, low, high = number(spread.median), number(spread.low), number(spread.high)
    return middle if low == high else f"{middle} ({low} to {high})"


def figures_table(results: Results) -> str:
    """A row per figure, a column per subject."""
    names = list(dict.fromkeys(name for figures in results.values() for name in figures.values))
    rows = [
        [name, *(told(Spread.of(one.values[name])) if name in one.values else "" for one in results.values())]
        for name in names
    ]
    return table(["figure", *results], rows)


def targets_table(results: Results) -> tuple[str, bool]:
    """A row per target, and whether all that could be judged are met."""
    rows, good = [], True
    for target in TARGETS:
        found = judged(results, target)
        name = f"{target.figure}, {target.of}" + (f" / {target.to}" if target.to else "")
        met = found is not None and found.median <= target.bound
        good &= met or found is None
        verdict = "not measured" if found is None else "met" if met else "MISSED"
        rows.append([name, number(target.bound), "" if found is None else told(found), verdict])
    return table(["target", "at most", "measured", ""], rows), good


def checks_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row per recorded launch."""
    kinds = ("static s", "static CPU s", "full s", "full CPU s")
    return table(
        ["cause", "SGLang dies after s", *(f"check, {kind}" for kind in kinds)],
        [[row["cause"], number(row["SGLang s"]), *(told(Spread.of(row[kind])) for kind in kinds)] for row in rows],
    )


def machine() -> str:
    """What was measured on, in general words."""
    system, kind, cores = platform.system(), platform.machine(), os.cpu_count()
    return f"{cores} cores, {system} {kind}, Python {platform.python_version()}"


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="interpreter or folder of packages with nvitop-exporter")
    parser.add_argument("--gpus", default="8,1,16", help="numbers of fake GPUs; targets are judged by the first")
    parser.add_argument("--real-nvml", action="store_true", help="this machine's NVML and GPUs instead of fake ones")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: some four minutes, less certain figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single value")
    parser.add_argument("--limits", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args()
    numbers: list[int | None] = [None] if options.real_nvml else [int(one) for one in options.gpus.split(",")]
    if options.quick:
        numbers = numbers[:1]
    written: dict[str, Any] = {"machine": machine(), "load": [os.getloadavg()[0]], "runs": {}}
    good = True
    print(f"Measured on {machine()}. Median (quartiles).")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # whoever the agent lowers its children to may read there
        for place, gpus in enumerate(numbers):
            title = "the GPUs of this machine" if gpus is None else f"{gpus} fake GPUs"
            say(title)
            plan = QUICK if options.quick else BRIEF if place else FULL
            results, checks, skipped = measure(gpus, plan, options.peer_python, Path(folder))
            parts = [f"\n## {title}\n", figures_table(results), *(f"\nskipped: {one}" for one in skipped)]
            if place == 0:
                judgement, good = targets_table(results)
                parts += ["", judgement]
            if checks:
                parts += ["", checks_table(checks)]
            written["runs"][title] = {
                "plan": asdict(plan),
                "figures": {name: figures.values for name, figures in results.items()},
                "checks": checks,
                "skipped": skipped,
            }
            written["load"].append(os.getloadavg()[0])
            # At once: what comes after it takes minutes, and may fail.
            print("\n".join(parts), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if options.limits and not good else 0


if __name__ == "__main__":
    sys.exit(main())
