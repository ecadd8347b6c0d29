"""The dashboards as the tests read them: their panels and queries, and what PromQL expressions give."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql

from sidecar.catalog import PREFIX, build, discover

FOLDER = Path(__file__).parents[1] / "dashboards"
NAMES = ("fleet", "server", "gpu")
CATALOG = build(discover())
TARGET = frozenset({"cluster", "namespace", "workload", "pod", "node", "job", "instance"})
"""The labels of a target, as docs/alerts.md asks for them, and the two that every target has."""
OTHERS = {"up": frozenset(), "process_resident_memory_bytes": frozenset()}
"""Metrics that are not in the catalogue: Prometheus' own, and the agent's process. They have a target's labels."""
FAMILIES = {PREFIX + family.name: frozenset(family.labels) for family in CATALOG.families} | OTHERS
PLACEHOLDER = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|([A-Za-z_]\w*))")
BUILT_IN = {"__rate_interval": "4m", "__interval": "1m", "__range": "6h", "__from": "1700000000000"}
VARIABLES = dict.fromkeys(("cluster", "namespace", "workload", "pod", "item"), ".*")


def load(name: str) -> dict[str, Any]:
    """A dashboard as it is checked in."""
    board: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return board


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels that show something."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with values for its variables. Raises KeyError for a variable that has none."""
    return PLACEHOLDER.sub(lambda found: values[found[1] or found[2]], text)


def expressions(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every expression of a dashboard, its variables filled in, and what it is for."""
    lines = {"lines": '"pod", "gpu"'}
    values = BUILT_IN | VARIABLES | lines
    for panel in panels(board):
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", filled(target["expr"], values)
    for annotation in board["annotations"]["list"]:
        yield annotation["name"], filled(annotation["expr"], values)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = label_values(variable)
            yield variable["name"], f"count by ({label}) ({filled(selector, values)})"


def label_values(variable: Mapping[str, Any]) -> tuple[str, str]:
    """What a variable asks for: the label's values in a selector."""
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
    assert found, variable["query"]
    return found[1], found[2]


class UnknownNameError(Exception):
    """An expression names a metric or a label that nobody has."""


def labels(expression: promql.Expr) -> frozenset[str] | None:
    """The labels that the series of an expression may have; None for a scalar.

    Raises `UnknownNameError` for a metric that is not in the catalogue, a matcher of a label that it does not have,
    and a grouping, matching or copying of labels that an operand does not have.
    """
    match expression:
        case promql.NumberLiteral() | promql.StringLiteral():
            return None
        case promql.VectorSelector():
            return _selected(expression)
        case promql.MatrixSelector():
            return _selected(expression.vector_selector)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return labels(expression.expr)
        case promql.AggregateExpr():
            return _aggregated(expression)
        case promql.BinaryExpr():
            return _combined(expression)
        case promql.Call():
            return _called(expression)
    raise AssertionError(f"no rule for {type(expression)}")


def _need(wanted: Any, there: frozenset[str] | None, what: str) -> frozenset[str]:
    found = there or frozenset()
    if missing := set(wanted) - found:
        raise UnknownNameError(
            f"{what}: {', '.join(sorted(missing))} is not among {', '.join(sorted(found)) or 'none'}"
        )
    return found


def _selected(selector: promql.VectorSelector) -> frozenset[str]:
    if selector.name not in FAMILIES:
        raise UnknownNameError(f"no metric {selector.name}")
    there = FAMILIES[selector.name] | TARGET
    return _need([one.name for one in selector.matchers.matchers], there, selector.name)


def _aggregated(one: promql.AggregateExpr) -> frozenset[str]:
    there = labels(one.expr) or frozenset()
    by = frozenset(one.modifier.labels) if one.modifier else frozenset()
    _need(by, there, f"{one.op} by")
    name = str(one.op)
    if name == "topk":
        return there
    return by | ({one.param.val} if name == "count_values" else frozenset())


def _combined(one: promql.BinaryExpr) -> frozenset[str] | None:
    left, right = labels(one.lhs), labels(one.rhs)
    if left is None or right is None:
        return right if left is None else left
    matching = one.modifier.matching if one.modifier else None
    if matching is not None:
        _need(matching.labels, left, f"left of {one.op}")
        _need(matching.labels, right, f"right of {one.op}")
    name = str(one.op)
    if name == "or":
        return left | right
    if name in {"and", "unless"}:
        return left
    if matching is None:
        return left & right
    if one.modifier.card != promql.VectorMatchCardinality.ManyToOne:
        return frozenset(matching.labels)
    copied = frozenset(one.modifier.group_labels or ())
    _need(copied, right, "group_left")
    return left | copied


def _called(call: promql.Call) -> frozenset[str] | None:
    name, arguments = call.func.name, call.args
    if name in {"label_replace", "label_join"}:
        there = labels(arguments[0]) or frozenset()
        sources = [arguments[3].val] if name == "label_replace" else [one.val for one in arguments[3:]]
        _need([source for source in sources if source], there, name)
        return there | {arguments[1].val}
    if name in {"vector", "time"}:
        return frozenset() if name == "vector" else None
    return next((found for found in map(labels, arguments) if found is not None), None)


def metrics(expression: promql.Expr) -> Iterator[str]:
    """The names of all metrics in an expression."""
    if isinstance(expression, promql.VectorSelector):
        yield expression.name
    inner = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for one in [*inner, *getattr(expression, "args", ())]:
        if isinstance(one, promql.Expr):
            yield from metrics(one)
