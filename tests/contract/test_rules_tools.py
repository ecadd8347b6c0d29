"""Rules and the examples beside them, as the tools of Prometheus and Alertmanager judge them, in two major versions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.fleet import free_port, prometheus
from tests.fakes.prometheus3 import UnavailableError, newer

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())
NAMES = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}


@pytest.fixture(name="tools", params=["installed", "newer"], scope="module")
def _tools(request: pytest.FixtureRequest) -> str:
    """What to put before a program's name: nothing for Debian's own, a folder for Prometheus 3 and its company."""
    if request.param == "installed":
        return ""
    try:
        return f"{newer()}/"
    except UnavailableError as error:
        pytest.skip(f"Prometheus 3 is not checked, 2.42 is: {error}")


def run(*command: str | Path) -> tuple[int, str]:
    """Exit status and all output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


# -- rules ------------------------------------------------------------------------------------------


def test_rules_are_valid(tools: str, tmp_path: Path) -> None:
    """Promtool finds no fault, not even of style, in the plain rules and in those of the operator's object."""
    status, said = run(f"{tools}promtool", "check", "rules", "--lint=all", "--lint-fatal", FOLDER / "rules.yaml")
    assert status == 0, said
    assert f"{sum(len(group['rules']) for group in RULES['groups'])} rules found" in said
    body = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text())["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(body))
    status, said = run(f"{tools}promtool", "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "rules.yaml")
    assert status == 0, said


def test_rules_fire_and_are_silent(tools: str) -> None:
    """Every case of rules_test.yaml: labels and annotations of what fires, and what does not."""
    status, said = run(f"{tools}promtool", "test", "rules", FOLDER / "rules_test.yaml")
    assert status == 0, said


@pytest.mark.parametrize(
    ("expr", "wait", "missed"),
    [("vector(1) > 2", None, "firing"), ("vector(1)", "0s", "silent")],
    ids=["never", "always"],
)
def test_cases_notice_broken_alerts(expr: str, wait: str | None, missed: str, tmp_path: Path) -> None:
    """With alerts that never fire, or always do, the cases of each fail: none passes whatever the rules say."""
    changed = json.loads(json.dumps(RULES))
    for group in changed["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule.update({"expr": expr, "for": wait or rule.get("for", "0s"), "annotations": {}})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(changed))
    cases = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())
    for test in cases["tests"]:
        kept = [case for case in test["alert_rule_test"] if bool(case["exp_alerts"]) == (missed == "firing")]
        test["alert_rule_test"] = kept
    (tmp_path / "rules_test.yaml").write_text(yaml.safe_dump(cases))
    status, said = run("promtool", "test", "rules", tmp_path / "rules_test.yaml")
    assert status != 0
    assert set(re.findall(r"alertname: ?(\w+)", said)) == NAMES


# -- Alertmanager -----------------------------------------------------------------------------------


def test_routing_is_valid(tools: str) -> None:
    """Amtool reads the example."""
    status, said = run(f"{tools}amtool", "check-config", FOLDER / "alertmanager.yaml")
    assert status == 0, said
    assert "3 receivers" in said


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=SGLangGPULost scope=node severity=critical", "pager"),
        ("alertname=SGLangGPUDrain scope=node severity=warning", "chat"),
        ("alertname=SGLangBackendNotImportable scope=workload severity=critical", "pager"),
        ("alertname=SGLangVersionSkew scope=workload severity=warning", "chat"),
        ("alertname=SGLangEnvironmentChanged scope=workload severity=info", "log"),
        ("alertname=SGLangSidecarDown scope=sidecar severity=critical", "pager"),
        ("alertname=SGLangSidecarScrapeTooLarge scope=sidecar severity=info", "log"),
        ("alertname=KubePodCrashLooping scope=workload severity=critical", "chat"),
    ],
)
def test_alerts_reach_their_receiver(labels: str, receiver: str) -> None:
    """Critical ones page, warnings are told, what is for reading is logged; others' alerts are left alone."""
    config = f"--config.file={FOLDER / 'alertmanager.yaml'}"
    status, said = run("amtool", "config", "routes", "test", config, f"--verify.receivers={receiver}", *labels.split())
    assert status == 0, said


# -- scraping ---------------------------------------------------------------------------------------

POD = {
    "__meta_kubernetes_namespace": "inference",
    "__meta_kubernetes_pod_name": "qwen3-7d4b9c6f5d-x2x9z",
    "__meta_kubernetes_pod_node_name": "gpu-01",
    "__meta_kubernetes_pod_phase": "Running",
    "__meta_kubernetes_pod_container_port_name": "sglang-sidecar",
}
LWS = "__meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_name"


def controlled(kind: str, name: str, **more: str) -> dict[str, str]:
    """A pod of a controller."""
    own = {"__meta_kubernetes_pod_controller_kind": kind, "__meta_kubernetes_pod_controller_name": name}
    return POD | own | more


PODS: dict[str, tuple[dict[str, str], str | None]] = {
    "deployment": (controlled("ReplicaSet", "qwen3-7d4b9c6f5d"), "qwen3"),
    "dashes": (controlled("ReplicaSet", "qwen3-coder-480b-7d4b9c6f5d"), "qwen3-coder-480b"),
    "bare-replica-set": (controlled("ReplicaSet", "qwen3"), "qwen3"),
    "stateful-set": (controlled("StatefulSet", "qwen3-decode"), "qwen3-decode"),
    "daemon-set": (controlled("DaemonSet", "probe"), "probe"),
    "leader-worker-set": (controlled("StatefulSet", "deepseek-0", **{LWS: "deepseek"}), "deepseek"),
    "alone": (POD, "qwen3-7d4b9c6f5d-x2x9z"),
    "other-port": (POD | {"__meta_kubernetes_pod_container_port_name": "http"}, None),
    "ended": (POD | {"__meta_kubernetes_pod_phase": "Failed"}, None),
}
"""Pods as discovery describes them, and the workload each is counted to; None: not scraped."""


def example() -> dict[str, Any]:
    """The example's configuration. Debian's builds of Prometheus have no discovery in Kubernetes: files instead."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
    [by_pod] = [job for job in config["scrape_configs"] if "kubernetes_sd_configs" in job]
    assert by_pod.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    by_pod["file_sd_configs"] = [{"files": ["pods.json"]}]
    return config


def test_scraping_is_valid(tools: str, tmp_path: Path) -> None:
    """Promtool reads the example and the rules that it names."""
    shutil.copy(FOLDER / "rules.yaml", tmp_path)
    (tmp_path / "pods.json").write_text("[]")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(example()))
    status, said = run(f"{tools}promtool", "check", "config", tmp_path / "prometheus.yml")
    assert status == 0, said


def test_pods_are_counted_to_their_workload(tools: str, tmp_path: Path) -> None:
    """A real Prometheus gives the labels that the rules rely on, and scrapes no other ports and no ended pods."""
    port = free_port()
    groups = [
        {"targets": [f"127.0.0.{index}:{port}"], "labels": given} for index, (given, _) in enumerate(PODS.values(), 1)
    ]
    (tmp_path / "pods.json").write_text(json.dumps(groups))
    config = example()
    del config["rule_files"], config["alerting"]
    # Nothing is to be looked up or connected to; the first scrape comes within an interval.
    config["global"] |= {"scrape_interval": "10d"}
    for job in config["scrape_configs"]:
        for one in job.get("file_sd_configs", ()):
            one["files"] = [str(tmp_path / "pods.json")]
    with prometheus(tmp_path, config, program=f"{tools}prometheus") as service:
        end = time.monotonic() + 20
        while len(found := service.get("/api/v1/targets")["data"]["activeTargets"]) < 9:
            assert time.monotonic() < end, found
            time.sleep(0.1)
    labels = {one["labels"]["instance"]: one["labels"] for one in found}
    for index, (given, workload) in enumerate(PODS.values(), 1):
        own = labels.get(f"127.0.0.{index}:{port}")
        if workload is None:
            assert own is None
            continue
        assert own == {
            "job": "sglang-sidecar",
            "instance": f"127.0.0.{index}:{port}",
            "namespace": "inference",
            "node": "gpu-01",
            "pod": given["__meta_kubernetes_pod_name"],
            "workload": workload,
        }
    assert labels["gpu-host-1.example:9477"] == {
        "job": "sglang-sidecar-hosts",
        "instance": "gpu-host-1.example:9477",
        "namespace": "hosts",
        "node": "gpu-host-1",
        "pod": "gpu-host-1",
        "workload": "chat",
    }
