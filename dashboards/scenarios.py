"""Draws all dashboards in scenarios: ``make pictures``, or ``python -m dashboards.scenarios --out FOLDER``.

What a simulated fleet of the tests says in the course of six hours is written into the database of a real Prometheus,
so that the pictures show a past. The tool in ``pictures/`` draws, with Grafana's own components.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from tests.fakes.fleet import Fleet, places, prometheus

TOOL: Final = Path(__file__).parent / "pictures"
HOURS: Final = 6
STEP: Final = 60
"""Seconds between the samples of the past."""
VARIANTS: Final = 15
"""Rounds that are rendered of each phase, and repeated over its length."""
JOB: Final = "sglang-sidecar"
REPLICAS: Final = 10
READINGS: Final = tuple(
    f"sglang_sidecar_gpu_{name}" for name in ("memory_used", "power", "temperature_celsius", "utilization")
)
"""What is told in any order, so that it looks like noise and not like a wave."""
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Hours before now at which these replicas get into a scenario, with a restart of their servers or without."""

    hours: float
    scenario: str
    pods: tuple[int, ...]
    restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happens, which replica is shown by itself, and how."""

    turns: tuple[Turn, ...] = ()
    pod: int = 0
    widths: tuple[int, ...] = (1280,)
    themes: tuple[str, ...] = ("light", "dark")


STORIES: Final[Mapping[str, Story]] = {
    "healthy": Story(turns=(Turn(hours=6, scenario="as-baseline", pods=tuple(range(10))),)),
    "one-fault": Story(
        turns=(Turn(hours=1.5, scenario="gpu-lost", pods=(3,)),),
        pod=3,
    ),
    "skew": Story(
        turns=(
            Turn(hours=3, scenario="upgraded", pods=(0,), restart=True),
            Turn(hours=2, scenario="upgraded", pods=(1, 2), restart=True),
            Turn(hours=1, scenario="drift", pods=(7,), restart=True),
        ),
        pod=7,
    ),
    "many": Story(
        turns=(
            Turn(hours=5, scenario="thermal-slowdown", pods=(9,)),
            Turn(hours=4.5, scenario="healthy", pods=(9,)),
            Turn(hours=4, scenario="flapping", pods=(8,)),
            Turn(hours=3, scenario="xid-94", pods=(2,)),
            Turn(hours=2.5, scenario="flashinfer-cubin-mismatch", pods=(5,), restart=True),
            Turn(hours=2, scenario="row-remap-failed", pods=(6,)),
            Turn(hours=1, scenario="driver-library-mismatch", pods=(0,)),
            Turn(hours=0.7, scenario="xid-79", pods=(7,)),
            Turn(hours=0.5, scenario="silent", pods=(4,)),
        ),
        pod=5,
        widths=(1280, 1920),
    ),
}


class Past:
    """Writes what the replicas say, in OpenMetrics, as if it had been scraped at another time."""

    def __init__(self, fleet: Fleet, target: TextIO) -> None:
        self._fleet = fleet
        self._target = target
        self._begin = 0
        self._moments: dict[tuple[str, str, str], int] = {}
        self._starts: dict[str, int] = {}
        self._dice = random.Random(7)  # noqa: S311 - noise in pictures

    def write(self, start: float, end: float) -> None:
        """Write from ``start`` to ``end`` what the replicas say at present, going on from round to round."""
        self._begin = self._begin or int(start)
        rounds = [self._round() for _ in range(VARIANTS)]
        for index, at in enumerate(range(int(start), int(end), STEP)):
            again, this = divmod(index, VARIANTS)
            for (name, labels), value in rounds[this].items():
                told = self._told(name, labels, value, at)
                if name.endswith("_total"):
                    first, last = (float(one.get((name, labels), value)) for one in (rounds[0], rounds[-1]))
                    told = str(float(value) + again * (last - first))
                elif name.startswith(READINGS):
                    told = self._dice.choice(rounds).get((name, labels), value)
                self._target.write(f"{name}{{{labels}}} {told} {at}\n")

    def restart(self, pod: str, at: float) -> None:
        """Have the server of a replica start at ``at``: the agents that look each saw a process of their own."""
        self._starts[self._target_of(pod)] = int(at)

    def _target_of(self, pod: str) -> str:
        place = self._fleet.places[pod].labels | {"job": JOB}
        return ",".join(f'{name}="{value}"' for name, value in place.items())

    def _told(self, name: str, labels: str, value: str, at: int) -> str:
        """Move what is a moment to when it was first told, or, if that is the very beginning, to an hour before."""
        if name.endswith("_last_success_timestamp_seconds"):
            return str(at - 5)
        if name.endswith("_start_time_seconds"):
            return str(self._starts.get(labels, self._begin - 3600))
        if not name.endswith("_timestamp_seconds"):
            return value
        return str(self._moments.setdefault((name, labels, value), at if at > self._begin else at - 3600))

    def _round(self) -> dict[tuple[str, str], str]:
        now = time.time()
        samples: dict[tuple[str, str], str] = {}
        for pod, replica in self._fleet.replicas.items():
            replica.round(now)
            target = self._target_of(pod)
            samples["up", target] = str(int(not replica.case.silent))
            if not replica.case.silent:
                samples |= _parsed(replica.render("text/plain")[0].decode(), target)
                # The simulated agents have no process of their own; this is what a real one needs.
                samples["process_resident_memory_bytes", target] = f"{self._dice.uniform(44e6, 45e6):.0f}"
        return samples


def _parsed(body: str, target: str) -> dict[tuple[str, str], str]:
    return {(name, f"{own},{target}" if own else target): value for name, own, value in _SAMPLE.findall(body)}


def tell(story: Story, fleet: Fleet, path: Path, now: float) -> None:
    """Play the story and write down all of it."""
    pods = list(fleet.places)
    start = now - HOURS * 3600 - 600
    with path.open("w", encoding="utf-8") as target:
        past = Past(fleet, target)
        for turn in story.turns:
            at = now - turn.hours * 3600
            past.write(start, at)
            start = at
            chosen = [pods[index] for index in turn.pods]
            fleet.set(turn.scenario, *chosen)
            for pod in chosen if turn.restart else ():
                past.restart(pod, at)
        past.write(start, now + STEP)
        target.write("# EOF\n")


def draw(name: str, out: Path, options: Sequence[str]) -> None:
    """Play a story, have a real Prometheus serve it, and draw every dashboard."""
    story, now = STORIES[name], time.time()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (fakes := folder / "fakes").mkdir()
        past = folder / "past.om"
        where = places(REPLICAS)
        with Fleet(fakes, where, gpus=8, interval=3600.0) as fleet:
            tell(story, fleet, past, now)
        _run("promtool", "tsdb", "create-blocks-from", "openmetrics", str(past), str(folder / "tsdb"), quiet=True)
        past.unlink()
        with prometheus(folder, {"scrape_configs": []}) as service:
            for width in story.widths[: 1 if "--width" in options else None]:
                _run(
                    "node", str(TOOL / "draw.mjs"), "--prometheus", service.url, "--out", str(out),
                    "--prefix", f"{name}-", "--width", str(width), "--themes", ",".join(story.themes),
                    "--to", str(int(now)), "--hours", str(HOURS), "--scrape", str(STEP),
                    "--var", f"server:pod={where[story.pod].pod}", *options,
                )  # fmt: skip


def _run(*command: str, quiet: bool = False) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL if quiet else None)  # noqa: S603 - ours
    if done.returncode:
        raise SystemExit(done.returncode)


def main(arguments: Iterable[str] | None = None) -> int:
    """Draw the stories that were asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dashboards.scenarios",
        description="Draw the dashboards.",
        epilog="Other options go to draw.mjs.",
    )
    parser.add_argument("--out", type=Path, default=Path("build/pictures"), help="folder for the pictures")
    parser.add_argument("--stories", default=",".join(STORIES), help=f"some of {', '.join(STORIES)}")
    options, others = parser.parse_known_args(None if arguments is None else list(arguments))
    for name in options.stories.split(","):
        draw(name, options.out, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
