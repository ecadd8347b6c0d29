"""Fleet environment: which replicas are not as the others, since when, and why."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.parts import (
    BAD_FROM_ONE,
    DATASOURCE,
    FLEET,
    MEANINGS,
    NOTHING,
    REPLICA,
    SERVER,
    SEVERITIES,
    SIDECARS,
    TO_REPLICA,
    TO_REPLICA_OF_SERIES,
    TO_RUNBOOK,
    VERDICTS,
    WARN_FROM_ONE,
    WORKLOAD,
    Annotation,
    Band,
    Column,
    a_series,
    a_stat,
    a_table,
    a_timeline,
    assemble,
    columns,
    copied,
    count_of,
    link,
    metric,
    now,
    number,
    otherwise,
    over_time,
    select,
    variables,
    verdict,
)
from sidecar.drift import ITEMS

SHOWN_ITEMS = (
    "driver",
    "sglang",
    "torch",
    "flashinfer-python",
    "flashinfer-cubin",
    "sglang-kernel",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
)
"""The items whose versions are shown replica by replica until others are chosen."""
WORST = 24
"""Replicas in the timeline: those that were worst in the time range."""

_ENVIRONMENT = metric("environment_info", whole=True)
_VALUES = f"count by ({WORKLOAD}, item, value) ({_ENVIRONMENT})"
_BEFORE = f"count by ({WORKLOAD}, item, value) ({metric('environment_info', whole=True)} offset $__range)"
_SERIOUS = metric("condition_active", 'severity=~"critical|warning"')


def _replicas_with(name: str, *matchers: str) -> str:
    return count_of(f"count by ({REPLICA}) ({metric(name, *matchers)} == 1)")


SILENT = f"{select('up', SIDECARS)} == 0"
"""Targets that do not answer."""
SKEWED = f"count by ({WORKLOAD}, item) ({_VALUES}) > 1"
"""Items of which one workload has several values."""
ODD = (
    f"{metric('environment_info')} * on ({WORKLOAD}, item, value) group_left () "
    f"({_VALUES} <= on ({WORKLOAD}, item) group_left () (count by ({WORKLOAD}, item) ({_ENVIRONMENT}) / 2))"
)
"""Values that at most half of a workload's replicas have; the value is how many have it."""
CHANGED = (
    f"({_VALUES} unless {_BEFORE}) * on ({WORKLOAD}, item) group_left (from) "
    f"(topk by ({WORKLOAD}, item) (1, {copied(_BEFORE, 'value', 'from')}) ^ 0)"
)
"""Values that a workload did not have at the start of the time range, with the most common one that it had."""
APPEARED = (
    f"({_VALUES} unless count by ({WORKLOAD}, item, value) ({_ENVIRONMENT} offset 5m)) "
    f"and on ({WORKLOAD}, item) count by ({WORKLOAD}, item) ({_ENVIRONMENT} offset 5m)"
)
"""The first minutes of a value that is new to a workload."""
_NOTHING_DRIFTS = (
    f'label_replace(count({metric("baseline_loaded")} == 1) * 0, "item", "as the baseline wants it", "", "")'
)
DRIFTING = otherwise(f"count by (item) ({metric('drift')} == 1) or on () {_NOTHING_DRIFTS}", item="no baseline is set")
_LOST_READINESS = metric("ready_transitions_total", 'to="not-ready"', window="$__range")
_CHOSEN = 'item=~"$item"'
_SIDECARS = copied(metric("build_info"), "version", "value")
IN_USE = (
    f"count by (item, value) ({metric('environment_info')}) or "
    f'count by (item, value) (label_replace({_SIDECARS}, "item", "sglang-sidecar", "", ""))'
)
_WORST = f"topk({WORST}, {verdict(REPLICA, window='$__range', at=' @ end()', fold='avg')})"


def _strip() -> Band:
    return Band(
        4,
        [
            (3, a_stat("Replicas", "Sidecars that answer.", number(count_of(metric("build_info")), "replicas"))),
            (
                3,
                a_stat(
                    "Not ready",
                    "Replicas whose /readyz answers 503: Kubernetes sends them no traffic.",
                    number(count_of(f"{metric('ready')} == 0"), "replicas"),
                    thresholds=BAD_FROM_ONE,
                ),
            ),
            (
                3,
                a_stat(
                    "Silent",
                    "Targets whose scrape fails. Nothing is known of these replicas; all other panels leave them out.",
                    number(count_of(SILENT), "targets"),
                    thresholds=BAD_FROM_ONE,
                ),
            ),
            (
                3,
                a_stat(
                    "Critical",
                    "Replicas with an active condition of severity critical, ready or not.",
                    number(_replicas_with("condition_active", 'severity="critical"'), "replicas"),
                    thresholds=BAD_FROM_ONE,
                ),
            ),
            (
                3,
                a_stat(
                    "Warning",
                    "Replicas with an active condition of severity warning.",
                    number(_replicas_with("condition_active", 'severity="warning"'), "replicas"),
                    thresholds=WARN_FROM_ONE,
                ),
            ),
            (
                3,
                a_stat(
                    "Not all judged",
                    "Replicas with a condition that concerns them and could not be judged: neither healthy nor broken.",
                    number(_replicas_with("condition_unknown"), "replicas"),
                    thresholds=((None, "green"), (1.0, "purple")),
                ),
            ),
            (
                3,
                a_stat(
                    "Skewed items",
                    "Items of the environment, such as the driver or torch, of which the replicas of one workload have "
                    "more than one value.",
                    number(count_of(SKEWED), "items"),
                    thresholds=WARN_FROM_ONE,
                ),
            ),
            (
                3,
                a_stat(
                    "Off baseline",
                    "Replicas with items that are not as their baseline wants them. Replicas without a baseline do "
                    "not count.",
                    number(count_of(f"{metric('drift_items')} > 0"), "replicas"),
                    thresholds=WARN_FROM_ONE,
                ),
            ),
        ],
    )


def _causes() -> Band:
    by_cause = f"count by (code, severity) ({_SERIOUS} == 1)"
    table = columns(
        a_table(
            "Top causes",
            "Active conditions by the number of replicas that have them. What another condition explains is not "
            "listed. A code leads to its runbook.",
            now(copied(otherwise(by_cause, code=NOTHING, severity="none"), "code", "meaning")),
            sort=("Replicas", True),
            tall=True,
        ),
        [
            Column(name="severity", title="Severity", width=90, mappings=SEVERITIES, colored=True),
            Column(name="code", title="Cause", width=240, link=TO_RUNBOOK),
            Column(name="meaning", title="What it means", mappings=MEANINGS, wrap=True),
            Column(name="Value", title="Replicas", width=90),
        ],
    )
    chart = a_series(
        "Causes over time",
        "Replicas by active condition of severity critical or warning.",
        over_time(otherwise(f"count by (code) ({_SERIOUS} == 1)", code=NOTHING), "{{code}}"),
        unit="none",
        decimals=0,
        stacked=True,
        points=180,
    )
    return Band(9, [(14, table), (10, chart)], "What is wrong")


def _verdicts() -> Band:
    shown = f"{verdict(REPLICA)} and on ({REPLICA}) {_WORST}"
    timeline = a_timeline(
        f"Verdict over time: the {WORST} replicas that were worst",
        "The worst state of each replica since the step before. A gap: the sidecar did not answer, or there was none. "
        "Click a row for the replica.",
        over_time(shown, "{{pod}}"),
        mappings=VERDICTS,
    ).data_links([_as_link(TO_REPLICA_OF_SERIES)])
    return Band(12, [(24, timeline)])


def _as_link(given: dict[str, object]) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(str(given["title"])).url(str(given["url"]))


def _differences() -> Band:
    odd = columns(
        a_table(
            "Which replicas differ",
            "Replicas with a value that at most half of their workload's replicas have.",
            now(otherwise(f"max by ({REPLICA}, item, value) ({ODD})", pod="-", item="all replicas are alike")),
            sort=("Item", False),
        ),
        [
            Column(name="workload", title="Workload", width=120),
            Column(name="pod", title="Replica", link=TO_REPLICA),
            Column(name="node", title="Node", width=110),
            Column(name="item", title="Item", width=150),
            Column(name="value", title="Value", width=110),
            Column(name="Value", title="Have it", width=70),
        ],
    )
    changed = columns(
        a_table(
            "What changed in this time range",
            "Values that no replica of the workload had at the start of the time range. Also where it goes back to an "
            "older version, if none had it at the start.",
            now(otherwise(CHANGED, item="nothing changed, or nothing is known of the start")),
            sort=("Item", False),
        ),
        [
            Column(name="workload", title="Workload", width=95),
            Column(name="item", title="Item"),
            Column(name="from", title="From", width=95),
            Column(name="value", title="To", width=95),
            Column(name="Value", title="Replicas", width=75),
        ],
    )
    return Band(8, [(14, odd), (10, changed)], "What differs")


def _versions() -> Band:
    matrix = (
        a_table(
            "Versions by replica",
            "The values of the items chosen above. An empty cell: the sidecar does not know, or the package is absent.",
            now(f"max by (pod, item, value) ({metric('environment_info', _CHOSEN)})"),
        )
        .with_transformation(
            models.DataTransformerConfig(
                id_val="groupingToMatrix",
                options={"columnField": "item", "rowField": "pod", "valueField": "value", "emptyValue": "empty"},
            )
        )
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {},
                    "indexByName": {name: index for index, name in enumerate(("pod\\item", *ITEMS))},
                    "renameByName": {},
                },
            )
        )
        .override_by_field_type("string", [models.DynamicConfigValue(id_val="custom.minWidth", value=110)])
        .override_by_name(
            "pod\\item",
            [
                models.DynamicConfigValue(id_val="displayName", value="Replica"),
                models.DynamicConfigValue(id_val="custom.width", value=180),
                models.DynamicConfigValue(
                    id_val="links", value=[link(str(TO_REPLICA["title"]), SERVER, "${__value.text}")]
                ),
            ],
        )
    )
    return Band(12, [(24, matrix)])


def _bar(title: str, color: str) -> Column:
    """A column that draws its numbers as bars."""
    thresholds = ((None, "green"), (1.0, color))
    return Column(name="Value", title=title, width=170, decimals=0, gauge=(0, None), thresholds=thresholds)


def _counts() -> Band:
    in_use = columns(
        a_table(
            "Versions in use",
            "Each value of each item, and the sidecar's own version, with the number of replicas that have it.",
            now(IN_USE),
            sort=("Item", False),
        ),
        [
            Column(name="item", title="Item"),
            Column(name="value", title="Value", width=150),
            Column(name="Value", title="Replicas", width=80),
        ],
    )
    drift = columns(
        a_table(
            "Drift by item",
            "Replicas whose item is not as their baseline wants it.",
            now(DRIFTING),
            sort=("Replicas", True),
        ),
        [Column(name="item", title="Item"), _bar("Replicas", "orange")],
    )
    versions = f'count_values by (phase) ("version", {metric("flash_attention_version")})'
    attention = columns(
        a_table(
            "FlashAttention by phase",
            "Replicas by phase and FlashAttention implementation, as far as known; version 0: the phase runs none.",
            now(otherwise(versions, phase="nothing is known", version="-")),
            sort=("Phase", False),
        ),
        [
            Column(name="phase", title="Phase"),
            Column(name="version", title="Version", width=75),
            _bar("Replicas", "blue"),
        ],
    )
    lost = f"topk(10, max by (pod) (increase({_LOST_READINESS})))"
    unready = columns(
        a_table(
            "Became not ready",
            "How often replicas became not ready in this time range: the ten that did so most.",
            now(otherwise(lost, pod="no replica answers")),
            sort=("Times", True),
        ),
        [Column(name="pod", title="Replica", link=TO_REPLICA), _bar("Times", "orange")],
    )
    return Band(14, [(8, in_use), (8, (drift, attention)), (8, unready)])


def board() -> models.Dashboard:
    """Build the dashboard."""
    item = (
        dashboard.QueryVariable("item")
        .label("Items")
        .description("The items in Versions by replica")
        .datasource(DATASOURCE)
        .query(f"label_values({metric('environment_info')}, item)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=list(SHOWN_ITEMS), value=list(SHOWN_ITEMS)))
    )
    assert set(SHOWN_ITEMS) <= set(ITEMS)
    return assemble(
        FLEET,
        "Which replicas are not as the others, since when, and why: verdicts, causes, versions, drift and changes.",
        [_strip(), _causes(), _verdicts(), _differences(), _versions(), _counts()],
        chosen=[*variables(), item],
        annotations=[
            Annotation(
                "New versions",
                APPEARED,
                color="blue",
                title="{{workload}}: {{item}} {{value}}",
                text="first seen in this workload",
                value_is_time=False,
            )
        ],
    )
