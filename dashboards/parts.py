"""What the three dashboards have in common: their variables, links, colours and kinds of panels, and PromQL.

The field names and options are those that Grafana 10.4 reads. What an older release does not know, such as wrapped
text in tables, it ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, table
from grafana_foundation_sdk.builders import timeseries as series_builder
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from sidecar.catalog import PREFIX, Catalog, build, discover

CATALOG: Final[Catalog] = build(discover())
SIDECARS: Final = 'job=~".*sglang-sidecar.*"'
"""How the jobs that scrape sidecars are called (docs/alerts.md)."""
RUNBOOKS: Final = "https://github.com/sglang-sidecar/sglang-sidecar/blob/main/docs/conditions.md"
"""Where a condition's code leads: its section of docs/conditions.md."""

FLEET, SERVER, GPU = "sglang-sidecar-fleet", "sglang-sidecar-server", "sglang-sidecar-gpu"
"""The uids of the dashboards, by which they link to each other."""

DATASOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

WORKLOAD: Final = "cluster, namespace, workload"
"""The labels that tell one workload from another."""
REPLICA: Final = f"{WORKLOAD}, pod, node"
"""The labels that tell one replica from another."""

_WORKLOADS: Final = 'cluster=~"$cluster", namespace=~"$namespace", workload=~"$workload"'
_PODS: Final = f'{_WORKLOADS}, pod=~"$pod"'


# -- PromQL ---------------------------------------------------------------------------------------


def metric(name: str, *matchers: str, whole: bool = False, window: str = "") -> str:
    """Select the family ``name`` of the chosen replicas; ``whole``: of all replicas of the chosen workloads.

    Raises KeyError for a family that the catalogue does not have.
    """
    if name not in {family.name for family in CATALOG.families}:
        raise KeyError(name)
    return select(PREFIX + name, *matchers, whole=whole, window=window)


def select(name: str, *matchers: str, whole: bool = False, window: str = "") -> str:
    """Select any metric of the chosen replicas, such as Prometheus' own ``up``."""
    chosen = ", ".join((_WORKLOADS if whole else _PODS, *matchers))
    return f"{name}{{{chosen}}}" + (f"[{window}]" if window else "")


def otherwise(expr: str, value: int = 0, /, **labels: str) -> str:
    """Let a query whose answer is empty answer with one series that says so."""
    instead = f"vector({value})"
    for label, text in labels.items():
        instead = f'label_replace({instead}, "{label}", "{text}", "", "")'
    return f"({expr}) or on () {instead}"


def copied(expr: str, source: str, *labels: str) -> str:
    """Repeat a label under other names, so that one code can be shown as its meaning and as its remedy."""
    for label in labels:
        expr = f'label_replace({expr}, "{label}", "$1", "{source}", "(.*)")'
    return expr


def count_of(expr: str) -> str:
    """Count the series of a query, 0 where there is none."""
    return f"count({expr}) or vector(0)"


def verdict(by: str, window: str = "$__rate_interval", at: str = "", fold: str = "max") -> str:
    """Rank each replica's state as `VERDICTS` does; the worst since the last step, or with ``fold`` avg its average."""
    low = "min" if fold == "max" else fold

    def past(function: str, selector: str) -> str:
        return f"{function}_over_time({selector}{at})"

    ready = past(low, metric("ready", window=window))
    unready = f"{ready} == bool 0" if fold == "max" else f"1 - {ready}"
    # Every operation is on one series per replica and severity: on one per condition it would take ten times as long.
    parts = [f"4 * max by ({by}) ({unready})"]
    for rank, severity in ((3, "critical"), (2, "warning")):
        active = past(fold, metric("condition_active", f'severity="{severity}"', window=window))
        parts.append(f"{rank} * max by ({by}, severity) ({active})")
    unknown = f"max by ({by}) ({past(fold, metric('condition_unknown', window=window))})"
    parts.append(f'label_replace({unknown}, "severity", "unknown", "", "")')
    return f"max by ({by}) ({' or '.join(parts)})"


def ranked(by: str, *matchers: str) -> str:
    """Give the active conditions by these labels and severity, worth 2 where critical and 1 otherwise."""
    critical = metric("condition_active", 'severity="critical"', *matchers)
    other = metric("condition_active", 'severity=~"warning|info"', *matchers)
    return f"2 * max by ({by}, code, severity) ({critical} == 1) or max by ({by}, code, severity) ({other} == 1)"


# -- how values look ------------------------------------------------------------------------------


def mapped(options: Mapping[str, tuple[str, str | None]]) -> models.ValueMap:
    """Map values to a text and a colour."""
    return models.ValueMap(
        options={
            value: models.ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(options.items())
        }
    )


VERDICTS: Final = mapped(
    {
        "-1": ("silent", "dark-purple"),
        "0": ("ok", "green"),
        "1": ("not all judged", "purple"),
        "2": ("warning", "orange"),
        "3": ("critical", "red"),
        "4": ("not ready", "dark-red"),
    }
)
SEVERITIES: Final = mapped(
    {
        "critical": ("critical", "red"),
        "warning": ("warning", "orange"),
        "info": ("info", "blue"),
        "unknown": ("not judged", "purple"),
        "none": ("none", "green"),
    }
)
NOTHING: Final = "none"
"""The code that stands for no condition at all where a table would be empty."""

UNKNOWN: Final = "unknown"
"""What stands for the code where neither the meaning nor the remedy of a condition is called for."""

MEANINGS: Final = mapped(
    {
        NOTHING: ("Nothing is wrong", None),
        UNKNOWN: ("Could not be judged: neither healthy nor broken", None),
        **{code: (condition.title, None) for code, condition in CATALOG.conditions.items()},
    }
)
LONGEST: Final = 185
"""Characters that two lines of a remedy's column hold at 1280 pixels: a table makes no room for a third one."""
SHORTER: Final = {
    "driver-library-mismatch": "Drain the node and reboot it, or stop every GPU process and reload the kernel module; "
    "the runbook has the command. Exclude the driver from unattended upgrades.",
    "sidecar-gpu-access": "Give the sidecar's container the GPUs without claiming one: runtimeClassName: nvidia and "
    "the variables that the runbook names, or the server's own device claim.",
    "xid-critical": "Drain the node, stop what uses the GPU, and reset it (`nvidia-smi -i GPU -r`); for Xid 79 and 167 "
    "power-cycle the node instead. Replace the GPU if it returns.",
}
"""Remedies that are too long for a table. Nothing is cut off: half a remedy may be the wrong one."""


def remedy(code: str) -> str:
    """Say what to do about a condition in at most `LONGEST` characters."""
    return SHORTER.get(code) or " ".join(CATALOG.conditions[code].remedy.split())


REMEDIES: Final = mapped(
    {
        NOTHING: ("Nothing to do", None),
        UNKNOWN: ("The sidecar's page says why it could not be judged", None),
        **{code: (remedy(code), None) for code in CATALOG.conditions},
    }
)
YES_NO: Final = mapped({"-1": ("unknown", "purple"), "0": ("no", "red"), "1": ("yes", "green")})
UP_DOWN: Final = mapped({"-1": ("unknown", "purple"), "0": ("down", "red"), "1": ("up", "green")})


def steps(*values: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Make thresholds: each value with the colour from it on; None for the lowest."""
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in values])
    )


PLAIN: Final = ((None, "text"),)
BAD_FROM_ONE: Final = ((None, "green"), (1.0, "red"))
WARN_FROM_ONE: Final = ((None, "green"), (1.0, "orange"))

Steps = Sequence[tuple[float | None, str]]


# -- queries --------------------------------------------------------------------------------------


def now(expr: str, ref: str = "A") -> prometheus.Dataquery:
    """Ask for the state at the end of the time range, as a table."""
    return prometheus.Dataquery().expr(expr).instant().format(PromQueryFormat.TABLE).ref_id(ref).datasource(DATASOURCE)


def number(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """Ask for the state at the end of the time range, as a series per legend."""
    return (
        prometheus.Dataquery()
        .expr(expr)
        .instant()
        .format(PromQueryFormat.TIME_SERIES)
        .legend_format(legend)
        .ref_id(ref)
        .datasource(DATASOURCE)
    )


def over_time(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """Ask for the whole time range."""
    return (
        prometheus.Dataquery()
        .expr(expr)
        .range()
        .format(PromQueryFormat.TIME_SERIES)
        .legend_format(legend)
        .ref_id(ref)
        .datasource(DATASOURCE)
    )


# -- panels ---------------------------------------------------------------------------------------


KEPT: Final = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}&${namespace:queryparam}"
"""What every link to a dashboard keeps."""


def link(title: str, uid: str, pod: str = "${pod:queryparam}") -> dict[str, Any]:
    """Link a cell or a row to a dashboard, keeping time range and variables; ``pod`` chooses one replica."""
    chosen = pod if pod.startswith("${pod:") else f"var-pod={pod}"
    return {"title": title, "url": f"/d/{uid}?{KEPT}&${{workload:queryparam}}&{chosen}", "targetBlank": False}


def runbook(value: str) -> dict[str, Any]:
    """Link a condition's code to its runbook."""
    return {"title": "Runbook", "url": f"{RUNBOOKS}#{value}", "targetBlank": True}


TO_REPLICA: Final = link("This replica's environment", SERVER, "${__data.fields.pod}")
"""From a row of a table to the dashboard of its pod."""
TO_REPLICA_OF_SERIES: Final = link("This replica's environment", SERVER, "${__field.labels.pod}")
"""From a series to the dashboard of its pod."""
TO_RUNBOOK: Final = runbook("${__data.fields.code}")
"""From a row of a table to the runbook of its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: the field it shows, and how."""

    name: str
    title: str
    width: int | None = None
    unit: str | None = None
    mappings: models.ValueMap | None = None
    thresholds: Steps | None = None
    colored: bool = False
    gauge: tuple[float, float | None] | None = None
    wrap: bool = False
    link: Mapping[str, Any] | None = None
    decimals: int | None = None
    absent: str | None = None

    def properties(self) -> list[models.DynamicConfigValue]:
        """Write the overrides of the field."""
        given: dict[str, Any] = {"displayName": self.title}
        if self.width is not None:
            given["custom.width"] = self.width
        else:
            given["custom.minWidth"] = 90
        if self.unit is not None:
            given["unit"] = self.unit
        if self.decimals is not None:
            given["decimals"] = self.decimals
        if self.absent is not None:
            given["noValue"] = self.absent
        if self.mappings is not None:
            given["mappings"] = [self.mappings]
        if self.thresholds is not None:
            given["thresholds"] = steps(*self.thresholds).build()
        if self.colored:
            given["custom.cellOptions"] = {"type": "color-text"}
        if self.gauge is not None:
            given["min"] = self.gauge[0]
            if self.gauge[1] is not None:
                given["max"] = self.gauge[1]
            given["custom.cellOptions"] = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
        if self.wrap:
            # The first is read by Grafana 11 and 12.0, the second from 12.1 on.
            given["custom.cellOptions"] = {"type": "auto", "wrapText": True}
            given["custom.wrapText"] = True
            given["custom.inspect"] = True
        if self.link is not None:
            given["links"] = [dict(self.link)]
        return [models.DynamicConfigValue(id_val=name, value=value) for name, value in given.items()]


def columns(
    panel: table.Panel, shown: Iterable[Column], *, joined: Sequence[models.DataTransformerConfig] = ()
) -> table.Panel:
    """Show these columns and no other, in this order, after the transformations ``joined``."""
    shown = list(shown)
    for step in joined:
        panel.with_transformation(step)
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="filterFieldsByName", options={"include": {"names": [column.name for column in shown]}}
        )
    )
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {},
                "indexByName": {column.name: index for index, column in enumerate(shown)},
                "renameByName": {},
            },
        )
    )
    for column in shown:
        panel.override_by_name(column.name, column.properties())
    return panel


MERGED: Final = models.DataTransformerConfig(id_val="merge", options={})
"""Makes one row of what several queries say of the same labels."""


def joined_by(name: str) -> models.DataTransformerConfig:
    """Make one row of what several queries say of the same value of one label."""
    return models.DataTransformerConfig(id_val="joinByField", options={"byField": name, "mode": "outer"})


def a_table(
    title: str,
    description: str,
    *targets: prometheus.Dataquery,
    sort: tuple[str, bool] | None = None,
    tall: bool = False,
) -> table.Panel:
    """Make a table without columns yet.

    ``sort``: the title of a column, and whether the greatest comes first. ``tall``: rows have two lines.
    """
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .thresholds(steps(*PLAIN))
        .cell_height(shapes.TableCellHeight.LG if tall else shapes.TableCellHeight.SM)
        .show_header(True)
        .targets(list(targets))
    )
    if sort is not None:
        panel.sort_by([common.TableSortByFieldState().display_name(sort[0]).desc(sort[1])])
    return panel


def a_stat(
    title: str,
    description: str,
    *targets: prometheus.Dataquery,
    unit: str = "none",
    thresholds: Steps = PLAIN,
    mappings: models.ValueMap | None = None,
    text: shapes.BigValueTextMode = shapes.BigValueTextMode.VALUE,
    filled: bool = False,
) -> stat.Panel:
    """Make a panel of big numbers or words. ``filled`` colours the background instead of the text."""
    mode = shapes.BigValueColorMode.BACKGROUND_SOLID if filled else shapes.BigValueColorMode.VALUE
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .thresholds(steps(*thresholds))
        .color_mode(mode)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .justify_mode(shapes.BigValueJustifyMode.CENTER)
        .text_mode(text)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
        .no_value("none")
        .targets(list(targets))
    )
    return panel if mappings is None else panel.mappings([mappings])


def a_timeline(
    title: str,
    description: str,
    *targets: prometheus.Dataquery,
    mappings: models.ValueMap,
    points: int = 120,
    row_height: float = 0.85,
) -> statetimeline.Panel:
    """Make a timeline of states: one row per series, coloured as ``mappings`` says."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit("none")
        .thresholds(steps(*PLAIN))
        .mappings([mappings])
        .max_data_points(points)
        .merge_values(True)
        .show_value(shapes.VisibilityMode.NEVER)
        .align_value(shapes.TimelineValueAlignment.LEFT)
        .row_height(row_height)
        .fill_opacity(80)
        .line_width(0)
        .legend(legend())
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.SINGLE).sort(shapes.SortOrder.NONE))
        .targets(list(targets))
    )


def legend(placement: shapes.LegendPlacement = shapes.LegendPlacement.BOTTOM) -> common.VizLegendOptions:
    """Make a legend of names."""
    return (
        common.VizLegendOptions()
        .display_mode(shapes.LegendDisplayMode.LIST)
        .placement(placement)
        .show_legend(True)
        .calcs([])
    )


def a_series(
    title: str,
    description: str,
    *targets: prometheus.Dataquery,
    unit: str,
    low: float | None = 0,
    high: float | None = None,
    thresholds: Steps | None = None,
    decimals: int | None = None,
    stacked: bool = False,
    points: int | None = None,
) -> series_builder.Panel:
    """Make a chart of lines, or of stacked areas. ``thresholds`` are drawn as dashed lines."""
    panel = (
        series_builder.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .line_width(1)
        .fill_opacity(60 if stacked else 0)
        .show_points(shapes.VisibilityMode.NEVER)
        .span_nulls(False)
        .thresholds(steps(*(thresholds or PLAIN)))
        .legend(legend())
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
        .targets(list(targets))
    )
    if low is not None:
        panel.min(low)
        if high is None:
            panel.axis_soft_max(1)
    if high is not None:
        panel.max(high)
    if decimals is not None:
        panel.decimals(decimals)
    if points is not None:
        panel.max_data_points(points)
    if stacked:
        panel.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
        panel.line_interpolation(shapes.LineInterpolation.STEP_AFTER)
    if thresholds:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(shapes.GraphTresholdsStyleMode.DASHED))
    return panel


# -- whole dashboards -----------------------------------------------------------------------------


Stack = Builder[models.Panel] | Sequence[Builder[models.Panel]]
"""A panel, or several of the same height below each other."""


@dataclass(frozen=True, slots=True)
class Band:
    """Panels side by side: each with its width out of 24; a title where a new section begins."""

    height: int
    panels: Sequence[tuple[int, Stack]]
    title: str | None = None


class Annotation(models.AnnotationQuery):
    """An annotation of the Prometheus data source, whose own fields the library does not know."""

    def __init__(self, name: str, expr: str, *, color: str, title: str, text: str, value_is_time: bool) -> None:
        """``expr`` gives a series per event; with ``value_is_time`` its value is the time, in milliseconds."""
        super().__init__(name=name, datasource=DATASOURCE, enable=True, icon_color=color, expr=expr)
        self._own: dict[str, object] = {
            "titleFormat": title,
            "textFormat": text,
            "tagKeys": "item,pod",
            "step": "60s",
            "useValueForTime": value_is_time,
        }

    def to_json(self) -> dict[str, object]:
        """Add the fields of the data source."""
        return super().to_json() | self._own


OWN_KEYS: Final = frozenset({"titleFormat", "textFormat", "tagKeys", "step", "useValueForTime"})
"""The keys of `Annotation` that a round trip through the library loses."""


def choice(name: str, label: str, family: str, matchers: str, *, single: bool = False) -> dashboard.QueryVariable:
    """Let people choose values of a label; a label that no target has matches with All."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({PREFIX}{family}{{{matchers}}}, {name})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(not single)
        .include_all(not single)
    )
    if single:
        return variable
    return variable.all_value(".*").current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))


def variables(*, single: bool = False) -> list[Builder[models.VariableModel]]:
    """Make the variables that all dashboards have; ``single``: exactly one pod is shown."""
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        choice("cluster", "Cluster", "build_info", ""),
        choice("namespace", "Namespace", "build_info", 'cluster=~"$cluster"'),
        choice("workload", "Workload", "build_info", 'cluster=~"$cluster", namespace=~"$namespace"'),
        choice("pod", "Replica", "build_info", _WORKLOADS, single=single),
    ]


TITLES: Final = {FLEET: "Fleet environment", SERVER: "Server environment", GPU: "GPU health"}


def _dashboard_links(uid: str) -> Iterable[dashboard.DashboardLink]:
    for other, title in TITLES.items():
        if other != uid:
            yield (
                dashboard.DashboardLink(title)
                .type(models.DashboardLinkType.LINK)
                .icon("dashboard")
                .url(f"/d/{other}")
                .include_vars(True)
                .keep_time(True)
                .tooltip("With the same time range and variables")
            )


def assemble(
    uid: str,
    description: str,
    bands: Sequence[Band],
    *,
    chosen: Sequence[Builder[models.VariableModel]],
    annotations: Sequence[models.AnnotationQuery] = (),
    links: Sequence[dashboard.DashboardLink] = (),
) -> models.Dashboard:
    """Put a dashboard together: positions and ids follow from the order of its bands."""
    board = (
        dashboard.Dashboard(TITLES[uid])
        .uid(uid)
        .description(description)
        .tags(["sglang-sidecar"])
        .timezone("browser")
        .time("now-6h", "now")
        .refresh("1m")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .editable()
        .variables(list(chosen))
        .links([*_dashboard_links(uid), *links])
    )
    made = board.build()
    made.annotations = models.AnnotationContainer(list_val=list(annotations))
    made.panels = list(_placed(bands))
    return made


def _placed(bands: Iterable[Band]) -> Iterable[models.Panel | models.RowPanel]:
    number, y = 1, 0
    for band in bands:
        if band.title is not None:
            yield models.RowPanel(
                title=band.title, id_val=number, grid_pos=models.GridPos(x=0, y=y, w=24, h=1), panels=[]
            )
            number, y = number + 1, y + 1
        x = 0
        for width, stack in band.panels:
            builders = stack if isinstance(stack, Sequence) else (stack,)
            height = band.height // len(builders)
            for row, builder in enumerate(builders):
                panel = builder.build()
                panel.id_val = number
                panel.grid_pos = models.GridPos(x=x, y=y + row * height, w=width, h=height)
                yield panel
                number += 1
            x += width
        y += band.height
