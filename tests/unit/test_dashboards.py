"""The dashboards' JSON: in step with its source, readable by Grafana 10.4, and true to the catalogue."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import common, dashboard

from dashboards.build import BOARDS, documents
from dashboards.parts import LONGEST, MEANINGS, OWN_KEYS, REMEDIES, RUNBOOKS, SHORTER, TITLES
from tests import boards
from tests.fakes import kustomize

ROOT = Path(__file__).parents[2]
register_default_plugins()

every_board = pytest.mark.parametrize("name", boards.NAMES)


# -- the source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOARDS)
def test_in_step_with_source(name: str) -> None:
    """What is checked in is what the source builds; ``make dashboards`` rewrites it."""
    assert (boards.FOLDER / name).read_text(encoding="utf-8") == documents()[name], "run: make dashboards"


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The keys and values that are in ``before`` and not in ``after``, by their paths."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after[key], f"{path}.{key}") if key in after else [f"{path}.{key}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif before != after:
        yield path


def round_trip(board: dict[str, Any]) -> dict[str, Any]:
    """What Grafana's models of the schema keep of a dashboard."""
    model = dashboard.Dashboard.from_json(copy.deepcopy(board))
    result: dict[str, Any] = json.loads(json.dumps(model, cls=JSONEncoder))
    return result


@every_board
def test_nothing_is_outside_the_schema(name: str) -> None:
    """Every key is one that Grafana's schema has, but for those of Prometheus' own annotations."""
    board = boards.load(name)
    missing = {re.sub(r"\[\d+\]", "[]", path) for path in lost(board, round_trip(board))}
    assert missing == {f".annotations.list[].{key}" for key in OWN_KEYS}


def _with(board: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(board)
    *way, last = path.split(".")
    place: Any = changed
    for step in way:
        place = place[int(step)] if step.isdecimal() else place[step]
    place[last] = value
    return changed


@pytest.mark.parametrize(
    "path",
    [
        "tiem",
        "panels.0.gridPos.width",
        "panels.0.option",
        "panels.0.options.colourMode",
        "panels.0.fieldConfig.defaults.units",
        "panels.0.targets.0.legend",
        "templating.list.1.includeALL",
        "links.0.keepTimes",
        "annotations.list.0.titelFormat",
    ],
)
def test_a_typo_is_noticed(path: str) -> None:
    """A key that the schema does not have is lost on the round trip, which the test above then reports."""
    board = _with(boards.load("fleet"), path, 1)
    assert {re.sub(r"\[(\d+)\]", r".\1", one)[1:] for one in lost(board, round_trip(board))} >= {path}


def _property_ids() -> set[str]:
    """What an override may set: a field's options and those of the cells of a table."""
    field = dashboard.FieldConfig(
        display_name="", unit="", decimals=0, min_val=0, max_val=1, no_value="", mappings=[], links=[],
        thresholds=dashboard.ThresholdsConfig(),
    )  # fmt: skip
    cell = common.TableFieldOptions(width=1, min_width=1, inspect=True, cell_options=common.TableAutoCellOptions())
    # Grafana 12.1 reads it; an older one passes it over.
    return set(field.to_json()) | {f"custom.{key}" for key in cell.to_json()} | {"custom.wrapText"}


@every_board
def test_overrides_set_what_there_is(name: str) -> None:
    """Overrides are free-form in the schema: each option is one that fields have, with a value of its shape."""
    known = _property_ids()
    for panel in boards.panels(boards.load(name)):
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["id"] in {"byName", "byType"}
            for one in override["properties"]:
                assert one["id"] in known, (panel["title"], one)
                if one["id"] in {"mappings", "thresholds"}:
                    given = {one["id"]: one["value"]}
                    kept = json.loads(
                        json.dumps(dashboard.FieldConfig.from_json(copy.deepcopy(given)), cls=JSONEncoder)
                    )
                    assert kept == given
                if one["id"] == "custom.cellOptions":
                    assert one["value"]["type"] in set(common.TableCellDisplayMode)
                    assert set(one["value"]) <= {"type", "mode", "valueDisplayMode", "wrapText"}


@every_board
def test_grafana_10_4_reads_it(name: str) -> None:
    """The schema is not newer than 10.4's, and panels and transformations are ones that it has."""
    board = boards.load(name)
    assert board["schemaVersion"] <= 39
    for panel in boards.panels(board):
        assert panel["type"] in {"stat", "table", "timeseries", "state-timeline"}
        used = {one["id"] for one in panel.get("transformations", ())}
        assert used <= {"filterFieldsByName", "groupingToMatrix", "joinByField", "merge", "organize"}


# -- PromQL ---------------------------------------------------------------------------------------------


@every_board
def test_expressions_name_what_there_is(name: str) -> None:
    """Every expression parses; each metric and label is in the catalogue, or is a target's."""
    for what, expression in boards.expressions(boards.load(name)):
        try:
            boards.labels(promql.parse(expression))
        except (boards.UnknownNameError, ValueError) as error:
            pytest.fail(f"{name}: {what}: {error}\n{expression}")


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("sglang_sidecar_gpu_upp", "no metric"),
        ('sglang_sidecar_ready{code="x"}', "code"),
        ("sum by (uuid) (sglang_sidecar_ready)", "uuid"),
        ("sglang_sidecar_drift * on (value) sglang_sidecar_environment_info", "value"),
        ("sglang_sidecar_drift * on (item) group_left (version) sglang_sidecar_environment_info", "version"),
        ('label_replace(sglang_sidecar_ready, "a", "$1", "code", "(.*)")', "code"),
        ('sum by (line) (label_join(sglang_sidecar_ready, "line", "-", "pod", "gpu"))', "gpu"),
        ("sum by (pod) (sum by (node) (sglang_sidecar_ready))", "pod"),
    ],
)
def test_a_wrong_name_is_noticed(expression: str, said: str) -> None:
    """The check above knows a wrong metric, a wrong label, and a label that an inner grouping took away."""
    with pytest.raises(boards.UnknownNameError, match=said):
        boards.labels(promql.parse(expression))


def test_every_family_is_charted() -> None:
    """Each family of the catalogue is in some panel."""
    used = {
        metric
        for name in boards.NAMES
        for _, expression in boards.expressions(boards.load(name))
        for metric in boards.metrics(promql.parse(expression))
    }
    assert set(boards.FAMILIES) - used == set()


@every_board
def test_columns_and_legends_come_from_labels(name: str) -> None:
    """Each column of a table and each name in a legend is a label of what the query gives, or its value."""
    for panel in boards.panels(boards.load(name)):
        values = boards.BUILT_IN | boards.VARIABLES | {"lines": '"pod"'}
        given = {
            target["refId"]: boards.labels(promql.parse(boards.filled(target["expr"], values))) or frozenset()
            for target in panel["targets"]
        }
        several = len(given) > 1
        columns = {f"Value #{ref}" if several else "Value" for ref in given}.union(*given.values())
        for one in panel.get("transformations", ()):
            if one["id"] == "filterFieldsByName":
                assert set(one["options"]["include"]["names"]) <= columns, panel["title"]
                overridden = {rule["matcher"]["options"] for rule in panel["fieldConfig"]["overrides"]}
                assert overridden == set(one["options"]["include"]["names"]), panel["title"]
        for target in panel["targets"]:
            if target["format"] == "time_series":
                wanted = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                assert target["legendFormat"]
                assert set(wanted) <= given[target["refId"]], panel["title"]


# -- panels ---------------------------------------------------------------------------------------------


@every_board
def test_panels_are_placed(name: str) -> None:
    """Ids are unique; panels stay within the grid and do not overlap."""
    board = boards.load(name)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, f"{panel['title']} overlaps {taken[cell]}"
            taken[cell] = panel["title"]
    bottom = max(y for _, y in taken)
    assert {y for _, y in taken} == set(range(bottom + 1)), "a row of the grid is empty"


@every_board
def test_panels_explain_themselves(name: str) -> None:
    """Each has a title of its own that fits, a description in sentences, and a unit."""
    titles = [panel["title"] for panel in boards.panels(boards.load(name))]
    assert len(set(titles)) == len(titles)
    for panel in boards.panels(boards.load(name)):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        # About seven pixels a letter, at a width of 1280 pixels.
        assert 7 * len(panel["title"]) < 52 * panel["gridPos"]["w"] - 30, panel["title"]


@every_board
def test_detail_is_said(name: str) -> None:
    """A panel that needs gpu_detail says so in its description, and no other does."""
    detailed = {boards.PREFIX + one.name for one in boards.CATALOG.families if one.help.startswith("With gpu_detail")}
    assert detailed
    for panel in boards.panels(boards.load(name)):
        needs = any(family in target["expr"] for target in panel["targets"] for family in detailed)
        assert needs == ("gpu_detail" in panel["description"]), panel["title"]


@every_board
def test_no_panel_can_be_empty(name: str) -> None:
    """The first query of each panel answers, with nothing at all in the database, unless the panel lists replicas."""
    lists_replicas = {"Versions by replica", "Versions in use", "Verdict over time: the 24 replicas that were worst"}
    for panel in boards.panels(boards.load(name)):
        if panel["title"] not in lists_replicas:
            assert "vector(" in panel["targets"][0]["expr"], panel["title"]


# -- variables and links ----------------------------------------------------------------------------------


@every_board
def test_variables(name: str) -> None:
    """All have the same variables in the same order, and use no other than those and Grafana's own."""
    board = boards.load(name)
    declared = [one["name"] for one in board["templating"]["list"]]
    assert declared[:5] == ["datasource", "cluster", "namespace", "workload", "pod"]
    own = {"__all", "__url_time_range", "__data", "__field", "__value", *boards.BUILT_IN}
    used = {found[1] or found[2] for found in boards.PLACEHOLDER.finditer(json.dumps(board))}
    used |= set(re.findall(r"\$\{(\w+)\.", json.dumps(board)))
    assert used - own <= set(declared)
    assert set(declared) <= used, "a variable is of no use"
    for panel in boards.panels(board):
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def _links(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in boards.panels(board):
        yield from panel["fieldConfig"]["defaults"].get("links") or ()
        for override in panel["fieldConfig"]["overrides"]:
            for one in override["properties"]:
                yield from one["value"] if one["id"] == "links" else ()


@every_board
def test_links_resolve(name: str) -> None:
    """Links to dashboards lead to one of ours, with time and variables; runbooks are sections that exist."""
    board = boards.load(name)
    others = {f"/d/{uid}" for uid in TITLES if uid != board["uid"]}
    ours = [one for one in board["links"] if one["url"].startswith("/d/")]
    assert {one["url"] for one in ours} == others
    assert all(one["includeVars"] and one["keepTime"] for one in ours)
    found = list(_links(board))
    assert found
    for one in found:
        if one["url"].startswith("/d/"):
            uid, _, query = one["url"].removeprefix("/d/").partition("?")
            assert uid in TITLES
            assert query.startswith("${__url_time_range}&${datasource:queryparam}&")
            kept = ("cluster", "namespace", "workload")
            assert all(f"${{{variable}:queryparam}}" in query for variable in kept)
            assert "var-pod=" in query
        else:
            assert one["url"] == f"{RUNBOOKS}#${{__data.fields.code}}"


def test_runbooks() -> None:
    """The codes that link to a runbook are its sections; alerts link to the same documentation."""
    path = ROOT / "docs" / RUNBOOKS.rpartition("/")[2]
    sections = set(re.findall(r"^## (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(boards.CATALOG.conditions) == sections
    rules = (ROOT / "deploy" / "prometheus" / "rules.yaml").read_text(encoding="utf-8")
    assert RUNBOOKS.rpartition("/")[0] in rules


def test_only_the_server_has_one_replica() -> None:
    """It shows exactly one, and leads to its own page; the others show any number."""
    for name in boards.NAMES:
        board = boards.load(name)
        pod = next(one for one in board["templating"]["list"] if one["name"] == "pod")
        assert pod["multi"] == pod["includeAll"] == (name != "server")
    pages = [one["url"] for one in boards.load("server")["links"] if not one["url"].startswith("/d/")]
    assert pages == ["http://${instance}/"]


# -- texts ------------------------------------------------------------------------------------------------


def test_every_condition_has_its_texts() -> None:
    """Tables can say what each code means and what to do, in two lines."""
    assert set(boards.CATALOG.conditions) <= set(MEANINGS.options)
    assert set(boards.CATALOG.conditions) <= set(REMEDIES.options)
    for code, one in REMEDIES.options.items():
        assert len(one.text or "") <= LONGEST, f"{code}: give it a shorter text in dashboards/parts.py"


def test_only_long_remedies_are_reworded() -> None:
    """What fits is the runbook's own text."""
    for code in SHORTER:
        assert len(" ".join(boards.CATALOG.conditions[code].remedy.split())) > LONGEST, code


# -- ConfigMaps -------------------------------------------------------------------------------------------


def test_kustomization_names_every_dashboard() -> None:
    """Each JSON file goes into a ConfigMap of its own, with the label that Grafana's sidecar looks for."""
    described = yaml.safe_load((boards.FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert sorted(file for one in described["configMapGenerator"] for file in one["files"]) == sorted(BOARDS)
    assert all(len(one["files"]) == 1 for one in described["configMapGenerator"])
    assert described["generatorOptions"]["labels"]["grafana_dashboard"] == "1"
    # kubectl apply keeps a copy in an annotation, and annotations hold 256 KiB.
    assert max((boards.FOLDER / name).stat().st_size for name in BOARDS) < 200_000


@pytest.mark.skipif(not kustomize.kubectls(), reason="no kubectl, which builds kustomizations, is installed")
def test_kustomize_builds_the_config_maps() -> None:
    """What kustomize makes of it holds the very JSON."""
    kubectl = next(iter(kustomize.kubectls().values()))
    built = subprocess.run([kubectl, "kustomize", boards.FOLDER], check=True, capture_output=True, text=True).stdout
    made = {}
    for one in yaml.safe_load_all(built):
        assert one["kind"] == "ConfigMap"
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        made.update(one["data"])
    assert {name: json.loads(text) for name, text in made.items()} == {
        f"{name}.json": boards.load(name) for name in boards.NAMES
    }
