"""From a fault to whoever is told of it: what fires, what does not, once per node or workload, and after how long.

Real Prometheus, real Alertmanager, the shipped rules and routing, and a webhook. Durations are divided by 75
(`tests.fakes.alerting`), so that an hour takes 48 seconds, and scrapes and evaluations are a second apart, which stands
for 75.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.catalog import build, discover
from tests.fakes import agent
from tests.fakes.alerting import FOLDER, Chain, Told, Webhook, chain, seconds
from tests.fakes.fleet import Fleet, Place, places
from tests.fakes.nvml import Scenario
from tests.fakes.prometheus3 import UnavailableError, newer

FACTOR = 75.0
INTERVAL = 1.0
"""Of scrapes and evaluations."""
PAST = 3600 / FACTOR + 2 * INTERVAL
"""Seconds after which a workload has a past of an hour."""
PATIENCE = 90.0
"""Seconds to wait for what takes a few on a machine that has nothing else to do."""
CATALOG = build(discover())

# All stories together take more than a minute, once for all tests.
pytestmark = pytest.mark.timeout(400)


# -- stories ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A workload of its own and what happens to it.

    ``told`` is what somebody must be told of; ``beside`` is what fires, too, and is told or silenced depending on
    which is first. ``replicas`` of which ``affected`` are put into the scenario, ``per_node`` on each node. ``late``:
    it happens when the workload has a past, with which changes are compared. ``before``: it was so all along.
    """

    scenario: str
    told: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    replicas: int = 1
    affected: int = 1
    per_node: int = 1
    late: bool = False
    before: bool = False


def story(scenario: str, *told: str, beside: str = "", **more: Any) -> Story:
    """Write a story, with the alerts' names as they are without SGLang."""
    return Story(scenario=scenario, told=told, beside=tuple(beside.split()), **more)


STORIES: Mapping[str, Story] = {
    "healthy": story("healthy", replicas=2, affected=2),
    # Driver and GPUs: two replicas on a node have one fault.
    "driver-not-loaded": story("driver-not-loaded", "DriverDown", replicas=2, affected=2, per_node=2),
    "library-mismatch": story("driver-library-mismatch", "DriverDown", "EnvironmentChanged", late=True),
    "driver-hangs": story("probe-stuck", "DriverDown"),
    "gpu-lost": story("gpu-lost", "GPULost", replicas=2, affected=2, per_node=2),
    "gpu-missing": story("gpu-missing", "GPULost"),
    "xid-79": story("xid-79", "GPUReset"),
    "recovery": story("recovery-required", "GPUReset"),
    "no-spare-rows": story("row-remap-failed", "GPUReplace"),
    "row-to-remap": story("row-remap-pending", "GPUDrain"),
    "ecc": story("ecc-uncorrected", "GPUDrain"),
    "heat": story("thermal-slowdown", "GPUDegraded"),
    "fabric": story("fabric-not-ready", "FabricNotReady"),
    "no-permission": story("device-permission", "GPUAccess"),
    # What a launch would die of, and what it runs with.
    "stale-cubin": story(
        "flashinfer-cubin-mismatch",
        "BackendNotImportable",
        beside="EnvironmentChanged",
        replicas=2,
        affected=2,
        late=True,
    ),
    "old-flashinfer": story(
        "mamba-missing", "BackendNotImportable", beside="RequirementViolated EnvironmentChanged", late=True
    ),
    "no-cutlass": story(
        "fa4-not-importable",
        "BackendNotImportable",
        beside="RequirementViolated FlashAttentionVersionChanged",
        late=True,
    ),
    "half-copied": story("sglang-incomplete", "NotStartable"),
    "wrong-backend": story("backend-unsupported", "LaunchRefused", beside="FlashAttentionVersionChanged", late=True),
    "old-driver": story("driver-too-old", "CUDAUnusable", beside="EnvironmentChanged", late=True),
    "old-kernel-wheel": story("requirement-violated", "RequirementViolated", "EnvironmentChanged", late=True),
    "on-cpu": story("on-cpu", "ServerOnCPU"),
    "fa-version": story("fa-version-invalid", "FlashAttentionVersionInvalid"),
    "worker-ended": story("workers-missing", "ServerWorkersMissing"),
    "replaced-files": story("replaced-files", "ServerRestartNeeded"),
    "no-baseline": story("baseline-unreadable", "ConditionActive"),
    # What differs.
    "drift": story("drift", "EnvironmentDrift", beside="EnvironmentChanged", replicas=2, affected=2, late=True),
    "upgrade-one-of-ten": story("upgraded", "EnvironmentChanged", replicas=10, late=True),
    "fa-changed": story("fa4", "FlashAttentionVersionChanged", late=True),
    "fleet-skew": story("driver-upgraded", "VersionSkew", replicas=2, before=True),
    # Whether anything is known.
    "one-silent": story("silent", "SidecarDown", replicas=2),
    "all-silent": story("silent", "SidecarDown", replicas=2, affected=2),
    "stranger": story("stranger", "SidecarSilent"),
    "probe-crashes": story("packages-crashed", "SidecarProbeFailing"),
    "import-stuck": story("import-stuck", "SidecarProbeStuck"),
    "too-large": story("too-large", "SidecarScrapeTooLarge"),
    "slow": story("slow", "SidecarScrapeSlow"),
    "flapping": story("flapping-fabric", "ReadinessFlapping"),
}


def replicas() -> list[Place]:
    """Every replica of every story, each workload on nodes of its own."""
    return [
        Place(pod=f"{name}-{index}", node=f"{name}-node-{index // one.per_node}", workload=name)
        for name, one in STORIES.items()
        for index in range(one.replicas)
    ]


def whose(labels: Mapping[str, str]) -> str:
    """The workload that an alert belongs to."""
    return labels.get("workload") or labels["node"].rpartition("-node-")[0]


def short(labels: Mapping[str, str]) -> str:
    """An alert's name without SGLang."""
    return labels["alertname"].removeprefix("SGLang")


# -- playing them -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Played:
    """What came of all stories.

    ``begun`` and ``healed`` are monotonic seconds, by workload. ``fired`` is every alert that Prometheus had firing at
    some time, ``pending`` what was pending when the last story was told.
    """

    begun: dict[str, float] = field(default_factory=dict)
    healed: dict[str, float] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    open: list[Told] = field(default_factory=list)
    fired: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    pending: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def told_of(self, workload: str) -> dict[str, Told]:
        """What was told of a workload, each alert when it was for the first time."""
        found: dict[str, Told] = {}
        for one in self.told:
            if one.status == "firing" and whose(one.labels) == workload:
                found.setdefault(short(one.labels), one)
        return found


class Stage:
    """A fleet, the chain that watches it, and the stories that are played on it."""

    def __init__(self, fleet: Fleet, watching: Chain) -> None:
        self.played = Played()
        self._fleet = fleet
        self._chain = watching
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="poller", daemon=True)
        self._poller.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._poller.join(30)

    def _poll(self) -> None:
        while not self._stop.wait(0.5):
            for state, labels in self._chain.states():
                if state == "firing" and labels["alertname"].startswith("SGLang"):
                    self.played.fired[whose(labels)].add(short(labels))

    def begin(self, chosen: Callable[[Story], bool]) -> list[str]:
        """Begin the stories that are chosen."""
        names = [name for name, one in STORIES.items() if chosen(one)]
        for name in names:
            one = STORIES[name]
            self._fleet.set(one.scenario, *(f"{name}-{index}" for index in range(one.affected)))
            self.played.begun[name] = time.monotonic()
        return names

    def finish(self, names: list[str]) -> None:
        """Heal each of these stories when all that must be told of it was told, and what else fires does."""
        waiting = [name for name in names if STORIES[name].told]

        def done() -> bool:
            firing = self._chain.webhook.firing()
            for name in list(waiting):
                one = STORIES[name]
                told = {short(told.labels) for told in firing if whose(told.labels) == name}
                if told >= set(one.told) and told | self.played.fired[name] >= {*one.told, *one.beside}:
                    waiting.remove(name)
                    if name == "upgrade-one-of-ten":
                        self._note_pending()
                    self._fleet.set("healthy", *(f"{name}-{index}" for index in range(one.replicas)))
                    self.played.healed[name] = time.monotonic()
            return not waiting

        self._chain.until(done, patience=PATIENCE)

    def _note_pending(self) -> None:
        for state, labels in self._chain.states():
            if state == "pending":
                self.played.pending[whose(labels)].add(short(labels))

    def end(self) -> Played:
        """Wait until the end of everything was told, and give what came of it all."""
        self._chain.until(lambda: not self._chain.webhook.open(), patience=PATIENCE)
        self.played.told = list(self._chain.webhook.told)
        self.played.open = self._chain.webhook.open()
        return self.played


@dataclass(slots=True)
class Real:
    """What was told of a real agent: of each fault, and of its end."""

    told: list[Told] = field(default_factory=list)


def targets(fleet: Fleet, real: str) -> list[dict[str, Any]]:
    """The fleet's targets and the real agent."""
    found = fleet.targets()
    for one in found:
        if one["labels"]["workload"] == "slow":
            one["labels"] |= {"__scrape_interval__": "3s", "__scrape_timeout__": "3s"}
    place = Place(pod="real-0", node="real-node-0", workload="real")
    return [*found, {"targets": [real.removeprefix("http://")], "labels": place.labels}]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, fake_library: Path) -> Iterator[tuple[Played, Real]]:
    """All stories and the real agent, played once."""
    folder = tmp_path_factory.mktemp("alerting")
    for name in ("fakes", "chain"):
        (folder / name).mkdir()
    scenario = Scenario(folder / "scenario", gpus=2)
    arguments = ("--placement", "host", "--intervals", "driver=0.5", "--gpus", "0,1", "--import", "never")
    arguments += ("--server-url", "http://127.0.0.1:9")
    with ExitStack() as stack:
        # The agents that look for the fleet end what they take for a child of theirs: this one is somebody else's.
        env = scenario.environ(fake_library) | {"SGLANG_SIDECAR_CHILD_OF": "a test"}
        served = stack.enter_context(agent.serve(folder / "agent.log", *arguments, env=env))
        where = Fleet(folder / "fakes", replicas(), gpus=2, interval=20, flapping=0.5)
        fleet = stack.enter_context(where)
        fleet.set("driver-upgraded", "fleet-skew-0")
        listed = targets(fleet, served.url)
        watching = stack.enter_context(chain(folder / "chain", listed, factor=FACTOR, interval=INTERVAL))
        watching.prometheus.until(f"count(up == 1) == {len(listed)}", seconds=PATIENCE)
        stage = Stage(fleet, watching)
        stack.callback(stage.close)
        started = time.monotonic()
        stage.begin(lambda one: one.before)
        early = stage.begin(lambda one: not one.late and not one.before)
        real = Real(told=play_real(watching, scenario))
        fleet.prepare(*(one.scenario for one in STORIES.values() if one.late))
        stage.finish(early)
        time.sleep(max(0.0, started + PAST - time.monotonic()))
        stage.finish(stage.begin(lambda one: one.late))
        stage.finish([name for name, one in STORIES.items() if one.before])
        yield stage.end(), real


def play_real(watching: Chain, scenario: Scenario) -> list[Told]:
    """Let a GPU of the real agent's be lost and come back, then its driver; give what was told of it."""

    def told() -> list[Told]:
        return [one for one in list(watching.webhook.told) if whose(one.labels) == "real"]

    faults: tuple[dict[str, int], ...] = (
        {"nvmlDeviceGetHandleByIndex@1": 15},
        {"nvmlInit": 18, "driver_generation": 1},
    )
    for fault in faults:
        before = len(told())
        scenario.set(fault)
        watching.until(lambda so_far=before: len(told()) > so_far, patience=PATIENCE)
        scenario.set(dict.fromkeys(fault))
        watching.until(lambda so_far=before: len(told()) > so_far + 1, patience=PATIENCE)
    return told()


def tell(*lines: str) -> None:
    """Write what the test measured; ``pytest -s`` shows it."""
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


# -- what came of it --------------------------------------------------------------------------------


def test_each_story_is_told_and_nothing_else(played: tuple[Played, Real]) -> None:
    """In every scenario the alerts that must fire do and are told of; no other fires, in no workload."""
    what, _ = played
    rows = [f"{'scenario':<20} {'told':<32} {'fires, too':<52} does not"]
    names = {rule["alert"].removeprefix("SGLang") for rule in alerts()}
    for name, one in STORIES.items():
        told = set(what.told_of(name))
        fired = what.fired[name]
        rows.append(
            f"{name:<20} {', '.join(sorted(told & set(one.told))) or 'nothing':<32} "
            f"{', '.join(sorted((fired | told) - set(one.told))) or '-':<52} "
            f"the other {len(names - fired - told)} of {len(names)}"
        )
    tell(*rows)
    for name, one in STORIES.items():
        told = set(what.told_of(name))
        assert set(one.told) <= told <= {*one.told, *one.beside}, name
        assert what.fired[name] <= {*one.told, *one.beside}, name
        assert what.fired[name] | told == {*one.told, *one.beside}, name
    assert {whose(one.labels) for one in what.told} == {*(name for name, one in STORIES.items() if one.told), "real"}
    assert "VersionSkew" in what.pending["upgrade-one-of-ten"], "it fires when the others do not follow"


def test_every_alert_is_told_of(played: tuple[Played, Real]) -> None:
    """Each alert of the rules was told of by some story."""
    what, _ = played
    assert {one.name for one in what.told} == {rule["alert"] for rule in alerts()}


def test_notifications_are_by_node_or_workload(played: tuple[Played, Real]) -> None:
    """Each notification is about one node or one workload, and reaches whom the severity says."""
    what, _ = played
    for one in what.told:
        scope = one.labels["scope"]
        assert set(one.group) == ({"cluster", "node"} if scope == "node" else {"cluster", "namespace", "workload"})
        assert one.receiver == {"critical": "pager", "warning": "chat"}.get(one.labels["severity"]) or (
            (one.receiver, one.labels["severity"]) == ("log", "info")
        )
    severities = {name: what.told_of(name)["SidecarDown"].labels["severity"] for name in ("one-silent", "all-silent")}
    assert severities == {"one-silent": "warning", "all-silent": "critical"}


def test_the_end_of_everything_is_told(played: tuple[Played, Real]) -> None:
    """When a story is healed, whoever was told of it is told of its end."""
    what, _ = played
    assert what.open == []
    ended = {frozenset(one.labels.items()) for one in what.told if one.status == "resolved"}
    assert ended >= {frozenset(one.labels.items()) for one in what.told if one.status == "firing"}


def test_annotations_have_values(played: tuple[Played, Real]) -> None:
    """What is told has versions from and to, the GPUs and the replicas, and a runbook."""
    what, _ = played
    mismatch = what.told_of("library-mismatch")["DriverDown"].annotations
    assert "Driver libraries unknown, kernel module 580.126.09." in mismatch["description"]
    assert mismatch["runbook_url"].endswith("/docs/conditions.md#driver-library-mismatch")
    lost = what.told_of("gpu-lost")["GPULost"]
    assert lost.annotations["gpus"].startswith("0 (GPU-")
    assert "sidecars that see it: " in lost.annotations["description"]
    cubin = what.told_of("stale-cubin")["BackendNotImportable"].annotations
    assert "flashinfer-cubin 0.6.12" in cubin["description"]
    assert "stale-cubin-0 on stale-cubin-node-0" in cubin["replicas"]
    upgraded = [one.labels for one in what.told if one.name == "SGLangEnvironmentChanged"]
    assert {("sglang", "0.5.16", "0.5.18"), ("torch", "2.11.0+cu130", "2.13.0+cu130")} <= {
        (one["item"], one["from"], one["to"]) for one in upgraded if one["workload"] == "upgrade-one-of-ten"
    }
    changed = what.told_of("fa-changed")["FlashAttentionVersionChanged"].labels
    assert (changed["from"], changed["to"]) == ("3", "4")
    skew = what.told_of("fleet-skew")["VersionSkew"].annotations
    assert "580.159.04 in 1, 590.44.01 in 1" in skew["description"]


def test_a_real_agent(played: tuple[Played, Real]) -> None:
    """NVML says so, the agent judges, Prometheus fires, Alertmanager tells, and tells of the end; then the next one."""
    _, real = played
    # Alertmanager may tell of an end once more with the next one of the same node.
    assert list(dict.fromkeys((one.status, one.name) for one in real.told)) == [
        ("firing", "SGLangGPULost"),
        ("resolved", "SGLangGPULost"),
        ("firing", "SGLangDriverDown"),
        ("resolved", "SGLangDriverDown"),
    ]
    lost, down = [one for one in real.told if one.status == "firing"]
    assert lost.labels == {
        "alertname": "SGLangGPULost",
        "cluster": "eu-1",
        "node": "real-node-0",
        "code": "gpu-lost",
        "severity": "critical",
        "scope": "node",
        "action": "drain",
    }
    assert lost.annotations == {
        "summary": "GPUs of real-node-0 are gone (gpu-lost)",
        "description": "gpu-lost on real-node-0 (sidecars that see it: 1). "
        "A replica that is known to use these GPUs is not ready. Drain the node.",
        "gpus": "1 (GPU-00000000-0000-4000-8000-000000000001)",
        "runbook_url": "https://github.com/sglang-sidecar/sglang-sidecar/blob/main/docs/conditions.md#gpu-lost",
    }
    assert (down.labels["code"], down.receiver) == ("driver-library-mismatch", "pager")


# -- how long it takes ------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    """The shipped alerting rules."""
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    return [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]


def detection(name: str, code: str | None) -> float:
    """Seconds at most until a sidecar publishes it: the rounds that must agree, with their jitter and deadline."""
    if code is not None:
        probe = CATALOG.by_name[CATALOG.owner[code]]
        return CATALOG.conditions[code].hold[0] * 1.1 * probe.interval + probe.deadline
    probe = CATALOG.by_name["packages"]
    told_by_probes = any(word in name for word in ("Changed", "Skew", "Probe"))
    return 1.1 * probe.interval + probe.deadline if told_by_probes else 0.0


def test_minutes_to_notification(played: tuple[Played, Real]) -> None:
    """Each alert is told of within its `for`, the intervals and the group's wait; printed as computed and measured.

    Measured is from a fault that the sidecar publishes to the webhook, in seconds, times the factor. Computed is the
    most it takes with the shipped examples, detection included.
    """
    what, _ = played
    scrape = yaml.safe_load((FOLDER / "scrape.yaml").read_text())["global"]
    wait = seconds(yaml.safe_load((FOLDER / "alertmanager.yaml").read_text())["route"]["group_wait"])
    intervals = seconds(scrape["scrape_interval"]) + seconds(scrape["evaluation_interval"])
    rows = [
        "Minutes. Computed: at most, with intervals of 30 s. Measured: once a sidecar publishes it, intervals of 75 s.",
        f"{'alert':<38} {'code':<34} {'probe':>6} {'for':>6} {'computed':>9} {'measured':>9}",
    ]
    durations = {(rule["alert"], rule["labels"].get("severity")): seconds(rule.get("for", "0s")) for rule in alerts()}
    seen = set()
    for name, one in STORIES.items():
        for told in what.told_of(name).values():
            severity = told.labels["severity"]
            patience = durations.get((told.name, severity), durations.get((told.name, None)))
            assert patience is not None
            found, code = detection(told.name, told.labels.get("code")), told.labels.get("code")
            if told.name == "SGLangReadinessFlapping":
                found = 1800.0
            measured = told.at - what.begun[name] if not one.before else told.at - what.begun[name] + 2 * INTERVAL
            seen.add((told.name, code))
            rows.append(
                f"{told.name + (' (critical)' if name == 'all-silent' else ''):<38} {code or '-':<34} "
                f"{found / 60:>6.1f} {patience / 60:>6.1f} {(found + intervals + patience + wait) / 60:>9.1f} "
                f"{measured * FACTOR / 60:>9.1f}"
            )
            assert measured >= patience / FACTOR - INTERVAL, told.name
            # Two intervals, the group's wait and the next turn of a notification; the rest is what other programs take.
            assert measured <= (patience + wait) / FACTOR + 2 * INTERVAL + PATIENCE, told.name
    tell(*rows)
    assert {alert for alert, _ in seen} == {rule["alert"] for rule in alerts()}


# -- one fault is one notification --------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What to put before the programs' names, by version."""
    try:
        return {"2.42": "", "3": f"{newer()}/"}
    except UnavailableError as error:
        tell(f"Prometheus 3 is left out: {error}")
        return {"2.42": ""}


def test_one_fault_is_one_notification(tmp_path: Path) -> None:
    """Two workloads of ten replicas on two nodes each, with eight GPUs: one notification per node, one per workload.

    In the first one all GPUs are lost, which makes eighty series; in the second one all replicas have a stale package.
    Prometheus 2.42 and 3 watch the same fleet, each with an Alertmanager of its time.
    """
    (tmp_path / "fakes").mkdir()
    where = [
        replace(place, node=f"{name}-{place.node}")
        for name in ("hard", "soft")
        for place in places(10, per_node=5, workload=name)
    ]
    hard, soft = ([place.pod for place in where if place.workload == name] for name in ("hard", "soft"))
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(tmp_path / "fakes", where, gpus=8, interval=20))
        fleet.prepare("gpus-lost", "flashinfer-cubin-mismatch")
        chains = {}
        for version, programs in versions().items():
            (folder := tmp_path / version).mkdir()
            one = chain(folder, fleet.targets(), factor=FACTOR, interval=INTERVAL, programs=programs)
            chains[version] = stack.enter_context(one)
        for watching in chains.values():
            watching.prometheus.until("count(up == 1) == 20", seconds=PATIENCE)
        fleet.set("gpus-lost", *hard)
        fleet.set("flashinfer-cubin-mismatch", *soft)
        for watching in chains.values():
            watching.prometheus.until("count(sglang_sidecar_gpu_condition_active == 1) == 80", seconds=PATIENCE)
            stale = 'sglang_sidecar_condition_active{code="flashinfer-cubin-mismatch", severity="critical"} == 1'
            watching.prometheus.until(f"count({stale}) == 10", seconds=PATIENCE)
            watching.until(lambda heard=watching.webhook: len(heard.open()) == 3, patience=PATIENCE)
        # Whatever else were told of would be by now: two evaluations, the group's wait and its next turn.
        time.sleep(2 * INTERVAL + 5)
        for version, watching in chains.items():
            _is_three_notifications(watching.webhook)
            tell(
                f"Prometheus {version}: 10 replicas on 2 nodes with 8 GPUs, all lost, in 80 series: 2 notifications",
                f"Prometheus {version}: a stale package in 10 replicas: 1 notification",
            )


def _is_three_notifications(heard: Webhook) -> None:
    assert sorted((one.status, one.name, *one.group.values()) for one in heard.told) == [
        ("firing", "SGLangBackendNotImportable", "eu-1", "inference", "soft"),
        ("firing", "SGLangGPULost", "eu-1", "hard-gpu-00"),
        ("firing", "SGLangGPULost", "eu-1", "hard-gpu-01"),
    ]
    assert heard.notifications == 3
    lost = [one.annotations["gpus"] for one in heard.told if one.name == "SGLangGPULost"]
    assert [text.count("GPU-") for text in lost] == [8, 8]
    stale = next(one for one in heard.told if one.name == "SGLangBackendNotImportable")
    assert " of 10: soft-" in stale.annotations["replicas"]
