"""The alert rules: true to the catalogue, complete, grouped as documented, and in step with what is made of them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from sidecar.catalog import PREFIX, build, discover
from sidecar.model import Severity

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
CATALOG = build(discover())

_spec = importlib.util.spec_from_file_location("rules_build", FOLDER / "build.py")
assert _spec is not None
assert _spec.loader is not None
rules_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rules_build)

RULES = rules_build.load()
ALERTS = list(rules_build.alerts(RULES))
RECORDS = {rule["record"]: rule for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
ROUTING = yaml.safe_load((FOLDER / "alertmanager.yaml").read_text())

TARGET = frozenset({"cluster", "namespace", "workload", "pod", "node"})
"""The labels that targets must have, as docs/alerts.md says."""
PROMETHEUS = ("up", "scrape_samples_scraped", "scrape_duration_seconds")
"""What Prometheus itself records of each target."""
CONDITION_COUNTS = {
    "node_code:sglang_sidecar_condition_active:count": "node",
    "workload_code:sglang_sidecar_condition_active:count": "workload",
}

UNALERTED = {
    "module_importable": "the conditions of a module tell more, and only where somebody uses it",
    "module_import_verified": "how something is known, not what",
    "module_import_duration_seconds": "a slow import is no fault; one that does not end is a condition",
    "probe_runs_total": "probe_success is what is alerted on, this tells why",
    "probe_duration_seconds": "a probe past its deadline fails",
    "probe_last_success_timestamp_seconds": "probe_success is what is alerted on",
    "condition_unknown": "often unknown for good, by where the sidecar stands",
    "demo": "shows a recorded machine: what fires for it is what a demo is for",
    "condition_transitions_total": "readiness that flaps is alerted on; which condition it was is in the history",
    "ready": "every unready replica has a condition that says why",
    "attention_backend_info": "a choice, not a fault",
    "environment_changes_total": "environment_info is what is alerted on: it tells from and to",
    "environment_last_change_timestamp_seconds": "as above",
    "baseline_loaded": "baseline-unreadable is the condition",
    "drift_items": "drift is alerted on, item by item",
    "tls_certificate_not_after_timestamp_seconds": "how early is early depends on who renews it; docs/kubernetes.md",
    "access_renewal_failing": "as above: what was loaded before is served; docs/kubernetes.md",
    "nvml_up": "the driver's conditions tell why",
    "nvml_return_code": "as above",
    "gpu_info": "names of GPUs, for joins",
    "gpus_expected": "gpu-missing is the condition",
    "gpus_in_scope": "as above",
    "gpu_up": "gpu-lost is the condition",
    "gpu_memory_used_bytes": "how a server uses its GPU is not judged here",
    "gpu_memory_total_bytes": "as above",
    "gpu_power_watts": "as above",
    "gpu_utilization_ratio": "as above",
    "gpu_ecc_errors_total": "ecc-uncorrected is the condition",
    "gpu_row_remap_pending": "row-remap-pending is the condition",
    "gpu_row_remap_failure": "row-remap-failed is the condition",
    "gpu_remapped_rows": "the conditions above judge it",
    "gpu_xid_errors_total": "a counter that is born at 1 has no increase; the conditions judge the timestamp",
    "gpu_clock_event_active": "thermal-slowdown is the condition",
    "gpu_pcie_link_generation": "pcie-degraded is the condition",
    "gpu_pcie_link_generation_max": "as above",
    "gpu_pcie_link_width": "as above",
    "gpu_pcie_link_width_max": "as above",
    "gpu_nvlink_links_active": "nvlink-down is the condition",
    "gpu_nvlink_links": "as above",
    "gpu_fabric_healthy": "fabric-not-ready is the condition",
    "server_up": "that a server does not answer is for its own monitoring; launches take minutes",
    "server_info": "what runs, for people",
    "server_start_time_seconds": "as above",
    "server_resident_memory_bytes": "how a server uses memory is not judged here",
    "server_processes": "server-workers-missing is the condition",
}
"""Families that no rule uses, and why; each is on a dashboard."""

each_alert = pytest.mark.parametrize("rule", ALERTS, ids=[f"{one['alert']}-{n}" for n, one in enumerate(ALERTS)])


# -- PromQL -----------------------------------------------------------------------------------------


class UnknownNameError(Exception):
    """An expression names a metric or a label that nobody has."""


def families() -> dict[str, frozenset[str]]:
    """Every metric that a rule may name, with its labels."""
    known = {PREFIX + one.name: frozenset(one.labels) | TARGET | {"job", "instance"} for one in CATALOG.families}
    known |= dict.fromkeys(PROMETHEUS, TARGET | {"job", "instance"})
    for name, rule in RECORDS.items():
        known[name] = labels(promql.parse(rule["expr"]), known)
    return known


def labels(expression: Any, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The labels that an expression's series may have. Raises `UnknownNameError` for a name that is none."""
    match expression:
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case promql.VectorSelector():
            if expression.name not in known:
                raise UnknownNameError(expression.name)
            return _among((one.name for one in expression.matchers.matchers), known[expression.name])
        case promql.MatrixSelector():
            return labels(expression.vector_selector, known)
        case promql.AggregateExpr():
            return _aggregated(expression, labels(expression.expr, known))
        case promql.BinaryExpr():
            return _combined(expression, labels(expression.lhs, known), labels(expression.rhs, known))
        case promql.Call():
            return _called(expression, known)
    return labels(expression.expr, known)


def _among(wanted: Any, there: frozenset[str]) -> frozenset[str]:
    if missing := set(wanted) - there:
        raise UnknownNameError(", ".join(sorted(missing)))
    return there


def _aggregated(one: Any, there: frozenset[str]) -> frozenset[str]:
    named = one.modifier.labels if one.modifier else []
    _among(named, there)
    if one.modifier and one.modifier.type == promql.AggModifierType.Without:
        return there - set(named)
    if str(one.op) == "topk":
        return there
    return frozenset(named) | ({one.param.val} if str(one.op) == "count_values" else set())


def _combined(one: Any, left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    matching = one.modifier.matching if one.modifier else None
    if matching is not None:
        _among(matching.labels, left)
        _among(matching.labels, right)
    if str(one.op) in {"and", "unless"}:
        return left
    if str(one.op) == "or":
        return left | right
    if not left or not right:
        return left | right
    if one.modifier and one.modifier.card == promql.VectorMatchCardinality.ManyToOne:
        copied = frozenset(one.modifier.group_labels or ())
        _among(copied, right)
        return left | copied
    return left if matching is None else frozenset(matching.labels)


def _called(call: Any, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    if call.func.name not in {"label_replace", "label_join"}:
        return frozenset().union(*(labels(one, known) for one in call.args))
    there = labels(call.args[0], known)
    sources = call.args[3:4] if call.func.name == "label_replace" else call.args[3:]
    _among({one.val for one in sources} - {""}, there)
    return there | {call.args[1].val}


def selectors(expression: Any) -> Iterator[Any]:
    """Every selector in an expression."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if isinstance(one := getattr(expression, name, None), promql.Expr):
            yield from selectors(one)
    for one in getattr(expression, "args", ()):
        yield from selectors(one)


def queries(rule: Mapping[str, Any]) -> Iterator[str]:
    """The queries in the templates of an alert's annotations, filled in."""
    for text in rule["annotations"].values():
        found = re.findall(r'printf "((?:[^"\\]|\\.)*)"', text)
        for query in found:
            if "(" in query or "{" in query:
                yield query.replace("%q", '"x"')


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression of the rules, those in annotations too."""
    for group in RULES["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            yield name, rule["expr"]
            if "alert" in rule:
                yield from ((name, query) for query in queries(rule))


def test_expressions_name_what_there_is() -> None:
    """Every expression parses; each metric, matcher, grouping and joined label is in the catalogue, or a target's."""
    known = families()
    found = list(expressions())
    assert len(found) > len(ALERTS) + 20, "the queries in annotations are looked at, too"
    for name, text in found:
        try:
            labels(promql.parse(text), known)
        except (UnknownNameError, ValueError) as error:
            pytest.fail(f"{name}: {error}\n{text}")


@pytest.mark.parametrize(
    "text",
    [
        "sglang_sidecar_gpu_upp",
        'sglang_sidecar_ready{code="x"}',
        "sum by (uuid) (sglang_sidecar_ready)",
        "sglang_sidecar_drift * on (value) sglang_sidecar_environment_info",
        "sglang_sidecar_drift * on (item) group_left (version) sglang_sidecar_environment_info",
        'label_replace(sglang_sidecar_ready, "a", "$1", "code", "(.*)")',
        'label_join(sglang_sidecar_ready, "a", " ", "pod", "code")',
        "sum by (pod) (sum by (node) (sglang_sidecar_ready))",
        "sum without (code) (sglang_sidecar_ready)",
    ],
)
def test_a_wrong_name_is_noticed(text: str) -> None:
    """The check above knows a wrong metric, a wrong label, and one that an inner grouping took away."""
    with pytest.raises(UnknownNameError):
        labels(promql.parse(text), families())


# -- what is covered --------------------------------------------------------------------------------


def selecting(code: str, severity: str) -> list[str]:
    """The alerts that a condition of this severity is selected by."""
    found = []
    for rule in ALERTS:
        for one in selectors(promql.parse(rule["expr"])):
            drift = one.name == f"{PREFIX}condition_active" and rule["alert"] == "SGLangEnvironmentDrift"
            if (one.name in CONDITION_COUNTS or drift) and _matches(one, code, severity):
                found.append(rule["alert"])
    return found


def _matches(selector: Any, code: str, severity: str) -> bool:
    values = {"code": code, "severity": severity}
    for one in selector.matchers.matchers:
        same = one.value == values[one.name]
        like = re.fullmatch(one.value, values[one.name]) is not None
        # Compared one by one: they have no hash.
        if one.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
            holds = same == (one.op == promql.MatchOp.Equal)
        else:
            holds = like == (one.op == promql.MatchOp.Re)
        if not holds:
            return False
    return True


@pytest.mark.parametrize("code", CATALOG.conditions)
@pytest.mark.parametrize("severity", ["critical", "warning"])
def test_every_condition_has_one_alert(code: str, severity: str) -> None:
    """Whatever its effective severity, a condition is selected by exactly one alert."""
    found = selecting(code, severity)
    assert len(found) == 1, found


def test_later_conditions_have_an_alert() -> None:
    """A code that this release does not know is not lost."""
    assert selecting("not-yet-known", "critical") == selecting("not-yet-known", "warning") == ["SGLangConditionActive"]


def test_big_classes_have_alerts_of_their_own() -> None:
    """What is left to the general alert are warnings only: nothing critical is without a text of its own."""
    left = {code for code in CATALOG.conditions if selecting(code, "warning") == ["SGLangConditionActive"]}
    assert {CATALOG.conditions[code].severity for code in left} <= {Severity.WARNING, Severity.INFO}


def test_named_conditions_exist() -> None:
    """No rule names a code that the catalogue does not have."""
    named = {code for rule in ALERTS for code in rules_build.codes(rule)}
    assert named - set(CATALOG.conditions) == set()
    excluded = next(rule for rule in ALERTS if rule["alert"] == "SGLangConditionActive")
    for pattern in re.findall(r'code!~"([^"]+)"', excluded["expr"]):
        assert set(rules_build.spelled(pattern)) - set(CATALOG.conditions) == set()


def test_node_faults_are_the_drivers() -> None:
    """What is aggregated by node is judged by the driver probe, and what concerns one container only is not."""
    scopes: dict[str, set[str]] = {"node": set(), "workload": set()}
    for rule in ALERTS:
        if rule["labels"]["scope"] in scopes:
            scopes[rule["labels"]["scope"]].update(rules_build.codes(rule))
    owned = {code for code, probe in CATALOG.owner.items() if probe == "driver"}
    container = {"device-access-lost", "device-permission", "sidecar-gpu-access", "mig-unexpected"}
    assert scopes["node"] == owned - container
    assert not scopes["workload"] & scopes["node"]


def test_every_family_is_of_use() -> None:
    """Each family is alerted on or listed above with the reason, and then it is on a dashboard."""
    alerted = {one.name for _, text in expressions() for one in selectors(promql.parse(text))}
    charted = "".join(path.read_text() for path in sorted((ROOT / "dashboards").glob("*.json")))
    for family in CATALOG.families:
        used = PREFIX + family.name in alerted
        assert used != (family.name in UNALERTED), f"{family.name} is alerted on, or listed with a reason"
        assert used or re.search(rf"\b{PREFIX}{family.name}\b", charted), f"{family.name} is on no dashboard"
    assert set(UNALERTED) <= {family.name for family in CATALOG.families}


# -- the shape of alerts ----------------------------------------------------------------------------


def labels_of(rule: Mapping[str, Any]) -> frozenset[str]:
    """The labels of an alert when it fires."""
    return labels(promql.parse(rule["expr"]), families()) | set(rule["labels"])


@each_alert
def test_an_alert_is_aggregated_as_it_is_grouped(rule: dict[str, Any]) -> None:
    """It has the labels that its scope is grouped by, and no label of a GPU; a replica's only where it says why."""
    has = labels_of(rule)
    scope = rule["labels"]["scope"]
    assert set(rules_build.SCOPES[scope]) <= has
    assert not has & {"gpu", "uuid", "instance", "job"}
    assert ("pod" in has) == (rule["alert"] == "SGLangReadinessFlapping")
    assert ("node" in has) == (scope == "node" or "pod" in has)
    assert "severity" in has
    assert rule["labels"].get("severity", "critical") in {one.value for one in Severity}


@each_alert
def test_an_alert_explains_itself(rule: dict[str, Any]) -> None:
    """Summary, description with values, a runbook that exists, and a comment on its `for`."""
    annotations = rule["annotations"]
    assert {"summary", "description", "runbook_url"} <= set(annotations)
    assert set(annotations) <= {"summary", "description", "replicas", "gpus", "runbook_url"}
    assert not annotations["summary"].endswith(".")
    wanted = "node" if rule["labels"]["scope"] == "node" else "namespace"
    assert f"$labels.{wanted}" in annotations["summary"]
    assert "$" in annotations["description"]
    page, _, section = annotations["runbook_url"].removeprefix(f"{rules_build.RUNBOOKS}/").partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    if section == "{{ $labels.code }}":
        assert page == "conditions.md"
        assert set(rules_build.codes(rule)) <= set(headings)
    else:
        assert section in {heading.lower() for heading in headings}
    used = re.findall(r"\$labels\.(\w+)", " ".join(annotations.values()))
    assert set(used) <= labels_of(rule)


def test_every_for_is_explained() -> None:
    """The line before, or the rest of the line, says why it is that long."""
    lines = (FOLDER / "rules.yaml").read_text().splitlines()
    found = [(before, line) for before, line in itertools.pairwise(lines) if line.strip().startswith("for:")]
    assert len(found) == sum("for" in rule for rule in ALERTS)
    for before, line in found:
        assert before.strip().startswith("#") or " #" in line, line


def test_every_alert_is_documented() -> None:
    """Each has a section, and each section is of an alert."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    assert set(re.findall(r"^### (SGLang\w+)$", page, re.MULTILINE)) == {rule["alert"] for rule in ALERTS}


# -- what is made of the rules ----------------------------------------------------------------------


def test_the_operators_object_is_in_step() -> None:
    """`make rules` was run, and what the operator gets are the very same rules."""
    text = rules_build.PROMETHEUSRULE.read_text()
    assert text == rules_build.prometheusrule(RULES), "run: make rules"
    assert yaml.safe_load(text)["spec"] == RULES
    assert not re.search(r"[:-] [&*]\w", text), "anchors are spelled out"


def test_the_documentations_table_is_in_step() -> None:
    """`make rules` was run; a page without its place is an error."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    assert page == rules_build.documented(page, RULES), "run: make rules"
    with pytest.raises(ValueError, match="the page has no"):
        rules_build.documented("# Alerts\n", RULES)


def test_runbooks_can_lead_elsewhere() -> None:
    """With --runbooks every link of the operator's object leads to another copy of the documentation."""
    text = rules_build.prometheusrule(RULES, "https://wiki.example/sidecar/")
    links = re.findall(r"runbook_url: (\S+)", text)
    assert len(links) == len(ALERTS)
    assert all(
        link.startswith(("https://wiki.example/sidecar/conditions.md#", "https://wiki.example/sidecar/alerts.md#"))
        for link in links
    )
    assert rules_build.RUNBOOKS not in text


# -- tests of the rules -------------------------------------------------------------------------------


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    """In rules_test.yaml, for each alert and each severity that it has of itself."""
    cases = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())
    firing: Counter[tuple[str, str]] = Counter()
    silent: Counter[str] = Counter()
    for test in cases["tests"]:
        for case in test["alert_rule_test"]:
            silent[case["alertname"]] += not case["exp_alerts"]
            for one in case["exp_alerts"]:
                assert one["exp_annotations"], case["alertname"]
                firing[case["alertname"], one["exp_labels"]["severity"]] += 1
    for rule in ALERTS:
        name, severity = rule["alert"], rule["labels"].get("severity")
        assert silent[name], f"{name} has no silent case"
        fires = [said for (alert, said), count in firing.items() if alert == name and count]
        assert severity in fires if severity else fires, f"{name} ({severity}) has no firing case"
    assert {name for name, _ in firing} == {rule["alert"] for rule in ALERTS}


# -- routing ----------------------------------------------------------------------------------------


def test_routes_group_by_scope() -> None:
    """Each scope has its route, grouped by the labels that its alerts are aggregated by."""
    grouped = {}
    for route in ROUTING["route"]["routes"]:
        scope = next(one for one in route["matchers"] if one.startswith("scope"))
        for name in re.fullmatch(r'scope=~?"([\w|]+)"', scope)[1].split("|"):  # type: ignore[index]
            grouped[name] = tuple(route["group_by"])
        assert all("group_by" not in child for child in route["routes"]), "children inherit it"
    assert grouped == dict(rules_build.SCOPES)


def _selected(matchers: list[str]) -> list[dict[str, Any]]:
    """The alerting rules that matchers can select, as far as their own labels tell."""
    found = []
    for rule in ALERTS:
        own = {"alertname": rule["alert"], **rule["labels"]}
        for text in matchers:
            name, op, value = re.fullmatch(r'(\w+)(=~|!=|=)"(.+)"', text).groups()  # type: ignore[union-attr]
            if name not in own:
                assert name == "severity", text
                continue
            holds = re.fullmatch(value, own[name]) is not None
            if holds == (op == "!="):
                break
        else:
            found.append(rule)
    return found


@pytest.mark.parametrize("inhibition", ROUTING["inhibit_rules"], ids=json.dumps)
def test_inhibitions_compare_labels_that_are_there(inhibition: dict[str, Any]) -> None:
    """Source and target exist and have every label that must be equal: what both lack would count as equal."""
    targets = _selected(inhibition["target_matchers"])
    assert targets
    foreign = any("Kube" in one for one in inhibition["source_matchers"])
    sources = [] if foreign else _selected(inhibition["source_matchers"])
    assert sources or foreign
    for rule in (*sources, *targets):
        assert set(inhibition["equal"]) <= labels_of(rule), rule["alert"]
