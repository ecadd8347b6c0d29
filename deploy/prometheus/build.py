# ruff: noqa: INP001 - a program of its own
"""Writes what follows from rules.yaml: the operator's PrometheusRule and the table in docs/alerts.md.

    python deploy/prometheus/build.py [--runbooks URL]

``make rules`` runs it, and a test compares. With ``--runbooks`` the links in the PrometheusRule lead to another copy of
the documentation; for Prometheus without the operator replace `RUNBOOKS` in a copy of rules.yaml.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RULES = HERE / "rules.yaml"
PROMETHEUSRULE = HERE / "prometheusrule.yaml"
ALERTS = HERE.parents[1] / "docs" / "alerts.md"
RUNBOOKS = "https://github.com/sglang-sidecar/sglang-sidecar/blob/main/docs"
"""What every runbook_url in rules.yaml starts with; conditions.md#CODE or alerts.md#ALERT follows."""

SCOPES: Mapping[str, tuple[str, ...]] = {
    "node": ("cluster", "node"),
    "workload": ("cluster", "namespace", "workload"),
    "sidecar": ("cluster", "namespace", "workload"),
}
"""By which labels alertmanager.yaml groups the alerts of each scope, and so what one notification is about."""

_HEADER = "# Generated from rules.yaml by `make rules`; edit that file instead.\n"
_BEGIN, _END = "<!-- generated from deploy/prometheus/rules.yaml by `make rules` -->", "<!-- end -->"
_CODES = re.compile(r'condition_active:count\{[^}]*?\bcode=~?"([^"]+)"')


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and everything once: no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Repeat what the source shares."""
        del data
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def load(path: Path = RULES) -> dict[str, Any]:
    """Read a file of rules."""
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


def alerts(rules: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Give the alerting rules in their order."""
    return (rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule)


def prometheusrule(rules: Mapping[str, Any], runbooks: str = RUNBOOKS) -> str:
    """Write the operator's object."""
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "sglang-sidecar", "labels": {"app.kubernetes.io/name": "sglang-sidecar"}},
        "spec": rules,
    }
    text = yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
    return _HEADER + text.replace(f"{RUNBOOKS}/", f"{runbooks.rstrip('/')}/")


def codes(rule: Mapping[str, Any]) -> list[str]:
    """Give the conditions that an alert's expression selects; patterns are spelled out."""
    label = rule["labels"].get("code")
    found = [label] if label else [code for text in _CODES.findall(rule["expr"]) for code in spelled(text)]
    return list(dict.fromkeys(found))


def spelled(pattern: str) -> Iterator[str]:
    """Spell out a pattern of alternatives, some of which may share a beginning before a group."""
    inner = re.fullmatch(r"(.*?)([\w-]*)\(([^()]*)\)(.*)", pattern)
    if inner is None:
        yield from (code for code in pattern.split("|") if code)
        return
    before, prefix, group, after = inner.groups()
    yield from (code for code in before.split("|") if code)
    yield from (prefix + code for code in group.split("|"))
    yield from spelled(after)


def table(rules: Mapping[str, Any]) -> str:
    """Write the table of the documentation."""
    lines = ["| alert | severity | `for` | one notification per | conditions |", "|---|---|---|---|---|"]
    for rule in alerts(rules):
        name, labels = rule["alert"], rule["labels"]
        severity = labels.get("severity", "the condition's")
        shown = ", ".join(f"[`{code}`](conditions.md#{code})" for code in codes(rule))
        if name == "SGLangConditionActive":
            shown = "every other one of severity critical or warning"
        groups = ", ".join(SCOPES[labels["scope"]])
        lines.append(f"| [{name}](#{name.lower()}) | {severity} | {rule.get('for', '0s')} | {groups} | {shown} |")
    return "\n".join(lines)


def documented(page: str, rules: Mapping[str, Any]) -> str:
    """Put the table into the page. Raises ValueError for a page without its place."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no {_BEGIN!r} and {_END!r}")
    return f"{before}{_BEGIN}\n{table(rules)}\n{_END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write what follows from rules.yaml.")
    parser.add_argument(
        "--runbooks", default=RUNBOOKS, metavar="URL", help=f"folder of the pages (default: {RUNBOOKS})"
    )
    options = parser.parse_args(arguments)
    rules = load()
    PROMETHEUSRULE.write_text(prometheusrule(rules, options.runbooks))
    ALERTS.write_text(documented(ALERTS.read_text(), rules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
