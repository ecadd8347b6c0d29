"""The dashboards against a real Prometheus that scrapes a simulated fleet: every panel in healthy and in bad times."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import boards
from tests.fakes.fleet import Fleet, Service, places, watched

GPUS = 2
PODS = ("qwen3-0", "qwen3-1", "qwen3-2", "qwen3-3")
PHASES: Mapping[str, tuple[str, ...]] = {
    "healthy": ("as-baseline", "as-baseline", "as-baseline", "as-baseline"),
    "faults": ("gpu-lost", "xid-94", "row-remap-pending", "launching"),
    "skew": ("upgraded", "drift", "probe-stuck", "silent"),
}
"""What each replica goes through, one phase after the other."""
ALL = "all"
WINDOW = 4
"""Seconds that a panel looks back at each step (``$__rate_interval``)."""
STEP = 1
"""Seconds between two steps of a range."""

Series = tuple[dict[str, str], list[float]]


@dataclass(slots=True)
class Shown:
    """What the panels of all dashboards show in one phase, by dashboard, pod, title and query."""

    answers: dict[tuple[str, str, str, str], list[Series]] = field(default_factory=dict)

    def rows(self, board: str, title: str, ref: str = "A", pod: str = ALL) -> list[Series]:
        """The series of one query."""
        return self.answers[board, pod, title, ref]

    def number(self, board: str, title: str, ref: str = "A", pod: str = ALL) -> float:
        """The one number of a panel."""
        ((_, values),) = self.rows(board, title, ref, pod)
        return values[-1]

    def labels(self, board: str, title: str, *names: str, ref: str = "A", pod: str = ALL) -> set[tuple[str, ...]]:
        """The values of these labels in each row of a table."""
        return {tuple(metric.get(name, "") for name in names) for metric, _ in self.rows(board, title, ref, pod)}


class Watch:
    """Asks a Prometheus what Grafana would ask it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.begin = time.time()

    def ask(self, target: Mapping[str, Any], values: Mapping[str, str]) -> list[Series]:
        """The answer to a panel's query."""
        query = boards.filled(target["expr"], values)
        if target.get("instant"):
            return [(one["metric"], [float(one["value"][1])]) for one in self.service.query(query)]
        return self.range(query, f"{STEP}s")

    def range(self, query: str, step: str) -> list[Series]:
        """The answer to a query over all of the time so far."""
        start, end = str(self.begin), str(time.time())
        found = self.service.get("/api/v1/query_range", query=query, start=start, end=end, step=step)["data"]["result"]
        return [(one["metric"], [float(value) for _, value in one["values"]]) for one in found]

    def values(self, pod: str = ".*") -> dict[str, str]:
        """What stands for the variables."""
        return {
            **boards.VARIABLES,
            "pod": pod,
            "lines": '"pod", "gpu"',
            "__rate_interval": f"{WINDOW}s",
            "__interval": f"{STEP}s",
            "__range": f"{max(int(time.time() - self.begin), 3)}s",
            "__from": str(int(self.begin * 1000)),
        }

    def look(self) -> Shown:
        """Ask for everything: the fleet, all GPUs, and each replica by itself."""
        shown = Shown()
        for name in boards.NAMES:
            board = boards.load(name)
            for pod in PODS if name == "server" else (ALL,):
                values = self.values(".*" if pod == ALL else pod)
                for panel in boards.panels(board):
                    for target in panel["targets"]:
                        answer = self.ask(target, values)
                        shown.answers[name, pod, panel["title"], target["refId"]] = answer
        return shown


@dataclass(slots=True)
class Played:
    """All phases, as they were shown, and the Prometheus at their end."""

    phases: dict[str, Shown]
    watch: Watch


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """A fleet of four that goes through all phases, looked at in each."""
    folder: Path = tmp_path_factory.mktemp("dashboards")
    (folder / "fakes").mkdir()
    phases: dict[str, Shown] = {}
    with Fleet(folder / "fakes", places(len(PODS)), gpus=GPUS, interval=0.5) as fleet:
        fleet.set("as-baseline")
        with watched(fleet, folder, interval="1s") as service:
            service.until(f"count(up == 1) == {len(PODS)}")
            watch = Watch(service)
            for name, scenarios in PHASES.items():
                for pod, scenario in zip(PODS, scenarios, strict=True):
                    fleet.set(scenario, pod)
                _settled(service, fleet)
                phases[name] = watch.look()
            yield Played(phases, watch)


def _settled(service: Service, fleet: Fleet) -> None:
    """Wait until no panel's last step looks back at a scrape of what was before, or of a change half made."""
    now = time.time()
    silent = sum(replica.case.silent for replica in fleet.replicas.values())
    service.until(f"count(timestamp(sglang_sidecar_ready) > {now + WINDOW + STEP}) == {len(PODS) - silent}")
    # The others are ahead of one whose scrape has yet to fail.
    service.until(f"count(sglang_sidecar_ready) == {len(PODS) - silent}")


# -- every panel, in every phase ------------------------------------------------------------------------


def test_every_panel_shows_something(played: Played) -> None:
    """No panel is without data, whatever the fleet is in: its first query has an answer."""
    for name, shown in played.phases.items():
        for (board, pod, title, ref), answer in shown.answers.items():
            if ref == "A":
                assert answer, f"{board}, {title}, {pod}, is empty in phase {name}"


def test_no_value_is_without_meaning(played: Played) -> None:
    """No panel shows NaN or infinity."""
    for name, shown in played.phases.items():
        for (board, pod, title, ref), answer in shown.answers.items():
            for metric, values in answer:
                assert all(abs(value) < float("inf") for value in values), (name, board, pod, title, ref, metric)


def test_legends_are_words(played: Played) -> None:
    """Every name in a legend is a text of its own, never a set of labels and never empty."""
    for name, shown in played.phases.items():
        for board in boards.NAMES:
            for panel in boards.panels(boards.load(board)):
                for target in panel["targets"]:
                    if target["format"] != "time_series":
                        continue
                    for pod in PODS if board == "server" else (ALL,):
                        legends = [
                            re.sub(
                                r"\{\{(\w+)\}\}", lambda found, metric=metric: metric[found[1]], target["legendFormat"]
                            )
                            for metric, _ in shown.rows(board, panel["title"], target["refId"], pod)
                        ]
                        where = (name, board, panel["title"], pod, legends)
                        assert all(legend.strip() and "{" not in legend for legend in legends), where
                        assert len(set(legends)) == len(legends), where


def test_every_column_is_of_use(played: Played) -> None:
    """Each column of each table is filled in some phase."""
    for board in boards.NAMES:
        for panel in boards.panels(boards.load(board)):
            wanted = {
                column
                for one in panel.get("transformations", ())
                if one["id"] == "filterFieldsByName"
                for column in one["options"]["include"]["names"]
            }
            several = len(panel["targets"]) > 1
            filled: set[str] = set()
            for shown in played.phases.values():
                for (where, _, title, ref), answer in shown.answers.items():
                    if (where, title) == (board, panel["title"]):
                        filled |= {label for metric, _ in answer for label, value in metric.items() if value}
                        filled |= {f"Value #{ref}" if several else "Value"} if answer else set()
            assert wanted <= filled, (board, panel["title"], wanted - filled)


def test_variables_find_their_values(played: Played) -> None:
    """Each variable has something to choose from."""
    found = {}
    for board in boards.NAMES:
        for variable in boards.load(board)["templating"]["list"]:
            if variable["type"] == "query":
                selector, label = boards.label_values(variable)
                match = boards.filled(selector, played.watch.values())
                found[label] = played.watch.service.get(f"/api/v1/label/{label}/values", **{"match[]": match})["data"]
    assert found["cluster"] == ["eu-1"]
    assert found["namespace"] == ["inference"]
    assert found["workload"] == ["qwen3"]
    assert found["pod"] == list(PODS)
    assert set(found["item"]) >= {"driver", "sglang", "torch"}
    assert found["instance"] == [f"{pod}:9477" for pod in PODS]


# -- what the panels say ----------------------------------------------------------------------------------


def test_healthy_fleet(played: Played) -> None:
    """Nothing is wrong, and every panel that lists trouble says so."""
    shown = played.phases["healthy"]
    assert shown.number("fleet", "Replicas") == len(PODS)
    for title in ("Not ready", "Silent", "Critical", "Warning", "Not all judged", "Skewed items", "Off baseline"):
        assert shown.number("fleet", title) == 0, title
    assert shown.labels("fleet", "Top causes", "code", "severity") == {("none", "none")}
    assert shown.labels("fleet", "Which replicas differ", "item") == {("all replicas are alike",)}
    assert shown.labels("fleet", "Drift by item", "item") == {("as the baseline wants it",)}
    assert shown.number("gpu", "GPUs seen") == len(PODS) * GPUS
    for title in ("No answer", "Missing", "NVML down", "Conditions", "Xids in range", "ECC errors", "To recover"):
        assert shown.number("gpu", title) == 0, title
    assert shown.labels("gpu", "GPUs and drivers that need attention", "code") == {("none",)}
    for pod in PODS:
        assert shown.number("server", "Verdict", pod=pod) == 0
        assert shown.labels("server", "Cause and remedy", "code", "remedy", pod=pod) == {("none", "none")}


def test_faults_of_gpus(played: Played) -> None:
    """A lost GPU, an Xid and a pending row remap are each at their place, with what to do."""
    shown = played.phases["faults"]
    assert shown.number("fleet", "Not ready") == 1
    assert shown.number("fleet", "Critical") == 1
    assert shown.number("fleet", "Warning") == 2
    causes = {("gpu-lost", "critical"), ("xid-warning", "warning"), ("row-remap-pending", "warning")}
    assert shown.labels("fleet", "Top causes", "code", "severity") == causes
    attention = shown.labels("gpu", "GPUs and drivers that need attention", "pod", "node", "gpu", "code", "severity")
    assert attention == {
        ("qwen3-0", "gpu-00", "0", "gpu-lost", "critical"),
        ("qwen3-1", "gpu-01", "0", "xid-warning", "warning"),
        ("qwen3-2", "gpu-02", "0", "row-remap-pending", "warning"),
    }
    first = shown.rows("gpu", "GPUs and drivers that need attention")[0]
    assert first[0]["severity"] == "critical"
    assert shown.number("gpu", "No answer") == 1
    assert shown.number("gpu", "Xids in range") == 1
    assert shown.labels("gpu", "Xid events", "pod", "xid", "meaning") == {("qwen3-1", "94", "94")}
    assert [m["pod"] for m, values in shown.rows("gpu", "Every GPU", "G") if values == [1]] == ["qwen3-2"]


def test_verdicts(played: Played) -> None:
    """Each replica's verdict is the worst of what is known of it, in the fleet's timeline and by itself."""
    shown = played.phases["faults"]
    title = "Verdict over time: the 24 replicas that were worst"
    last = {metric["pod"]: values[-1] for metric, values in shown.rows("fleet", title)}
    assert last == {
        "qwen3-0": 4,
        "qwen3-1": 2,
        "qwen3-2": 2,
        "qwen3-3": shown.number("server", "Verdict", pod="qwen3-3"),
    }
    assert shown.number("server", "Verdict", pod="qwen3-0") == 4
    assert shown.number("server", "Verdict", pod="qwen3-1") == 2
    assert shown.number("server", "Server", pod="qwen3-3") == 0
    assert played.phases["skew"].number("server", "Verdict", pod="qwen3-3") == -1


def test_what_is_not_judged_has_no_remedy(played: Played) -> None:
    """An unknown condition is shown as such, never with the words for an active one, and after the causes."""
    rows = played.phases["faults"].rows("server", "Cause and remedy", pod="qwen3-0")
    assert rows[0][0]["code"] == rows[0][0]["meaning"] == rows[0][0]["remedy"] == "gpu-lost"
    unknown = [metric for metric, _ in rows if metric["severity"] == "unknown"]
    assert unknown
    assert {(metric["meaning"], metric["remedy"]) for metric in unknown} == {("unknown", "unknown")}
    assert [metric for metric, _ in rows[-len(unknown) :]] == unknown


def test_skew(played: Played) -> None:
    """The replica that was upgraded and the one that drifts are named, with their versions from and to."""
    shown = played.phases["skew"]
    assert shown.number("fleet", "Skewed items") >= 3
    assert shown.number("fleet", "Off baseline") == 1
    odd = shown.labels("fleet", "Which replicas differ", "pod", "item", "value")
    assert {("qwen3-0", "sglang", "0.5.18"), ("qwen3-1", "triton", "3.5.1")} <= odd
    changed = shown.labels("fleet", "What changed in this time range", "workload", "item", "from", "value")
    assert ("qwen3", "sglang", "0.5.16", "0.5.18") in changed
    assert "triton" in {item for (item,) in shown.labels("fleet", "Drift by item", "item")}
    differs = shown.labels("server", "Environment", "item", ref="C", pod="qwen3-1")
    assert ("triton",) in differs


def test_trouble_of_sidecars(played: Played) -> None:
    """A silent sidecar is counted and all else about it is unknown; a child that cannot be killed is shown."""
    shown = played.phases["skew"]
    assert shown.number("fleet", "Silent") == 1
    assert shown.number("fleet", "Replicas") == len(PODS) - 1
    assert shown.labels("server", "Environment", "item", pod="qwen3-3") == {("nothing is known",)}
    assert shown.labels("server", "Probes", "probe", ref="E", pod="qwen3-2") == {("driver",)}


def test_annotations(played: Played) -> None:
    """Changes, restarts of servers and Xids have their marks on the charts."""
    watch = played.watch
    values = watch.values()
    marks: dict[str, list[Series]] = {}
    for board in boards.NAMES:
        for annotation in boards.load(board)["annotations"]["list"]:
            # The fleet is younger than the five minutes by which a new version is told from a known one.
            query = boards.filled(annotation["expr"], values).replace("offset 5m", "offset 5s")
            marks[annotation["name"]] = watch.range(query, "1s")
            wanted = re.findall(r"\{\{(\w+)\}\}", annotation["titleFormat"] + annotation["textFormat"])
            assert all(metric.get(label) for metric, _ in marks[annotation["name"]] for label in wanted)
            if annotation["useValueForTime"]:
                for _, moments in marks[annotation["name"]]:
                    assert all(watch.begin * 1000 <= moment <= time.time() * 1000 + 60_000 for moment in moments)
    assert ("sglang", "0.5.18") in {(metric["item"], metric["value"]) for metric, _ in marks["New versions"]}
    assert ("qwen3-1", "triton") in {(metric["pod"], metric["item"]) for metric, _ in marks["Changes"]}
    assert {metric["xid"] for metric, _ in marks["Xid events"]} == {"94"}
    assert marks["Starts of the server"]
