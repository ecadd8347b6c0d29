"""The page behind the links to the documentation: what this very agent can say, and what to do about it.

It is served by the agent, so that it is there at night and without a network, and never of another version.
"""

from __future__ import annotations

from typing import Final

from sidecar import __version__
from sidecar.catalog import COMMON_REASONS, PREFIX, Catalog
from sidecar.model import ConditionType
from sidecar.page.html import Markup, cell, el, head_cell, joined, pairs, section, sentence, table
from sidecar.remedy import Part

_HOW_TO_READ: Final = (
    "A condition is active, judged and fine, or unknown; unknown is neither healthy nor broken. One of gate serving "
    "makes the pod unready while it is active, one of gate launch only while no server answers, one of gate never only "
    "alerts. What another active condition explains is listed as its consequence and does not alert."
)


def documentation(catalog: Catalog) -> Markup:
    """Every condition, metric and setting, each at an anchor of its own."""
    parts = (("conditions", "Conditions"), ("metrics", "Metrics"), ("settings", "Settings"))
    header = el("header", el("b", f"sglang-sidecar {__version__}"), el("a", "Back to the page", href="/"), cls="bar")
    contents = el(
        "nav", el("ul", [el("li", el("a", title, href=f"#{name}")) for name, title in parts]), aria_label="Parts"
    )
    main = el(
        "main",
        el("h1", "What this agent says, and what it means"),
        contents,
        section(
            "conditions",
            "Conditions",
            _overview(catalog),
            [_condition(catalog, one) for one in catalog.conditions.values()],
        ),
        section("metrics", "Metrics", _metrics(catalog)),
        section("settings", "Settings", _settings(catalog)),
        id="main",
    )
    return joined([header, main])


def _text(text: str) -> Markup:
    return sentence(Part(text))


def _overview(catalog: Catalog) -> Markup:
    rows = [
        (
            head_cell(el("code", el("a", code, href=f"#{code}"))),
            cell(condition.severity.value),
            cell(condition.gate.value),
            cell(_text(condition.title), cls="wide"),
        )
        for code, condition in catalog.conditions.items()
    ]
    reasons = [(head_cell(el("code", token)), cell(meaning, cls="wide")) for token, meaning in COMMON_REASONS.items()]
    return joined(
        [
            el(
                "p",
                _HOW_TO_READ,
            ),
            table("All conditions", ("condition", "severity", "gate", "what it means"), rows),
            el("p", "Reasons that any of them may give while it is unknown:"),
            table("Common reasons", ("reason", "meaning"), reasons),
        ]
    )


def _condition(catalog: Catalog, condition: ConditionType) -> Markup:
    rows = [
        (
            "Severity",
            f"{condition.severity.value}, gate {condition.gate.value}, judged by probe {catalog.owner[condition.code]}",
        ),
        ("When", _text(condition.when)),
        ("What to do", _text(condition.remedy)),
    ]
    if condition.depends_on:
        links = [
            [", " if index else "", el("a", code, href=f"#{code}")] for index, code in enumerate(condition.depends_on)
        ]
        rows.append(("Explained by", joined(links)))
    reasons = [
        (head_cell(el("code", token)), cell(_text(meaning), cls="wide")) for token, meaning in condition.reasons.items()
    ]
    return el(
        "article",
        el("h3", el("code", condition.code)),
        el("p", _text(condition.title)),
        pairs(rows),
        table(f"Reasons of {condition.code}", ("reason", "meaning"), reasons),
        cls="card",
        id=condition.code,
        aria_label=condition.code,
    )


def _metrics(catalog: Catalog) -> Markup:
    rows = [
        (
            head_cell(el("code", PREFIX + family.name)),
            cell(family.kind),
            cell(", ".join(family.labels)),
            cell(_text(family.help), cls="wide"),
        )
        for family in catalog.families
    ]
    return table("All metrics", ("name", "kind", "labels", "meaning"), rows)


def _settings(catalog: Catalog) -> Markup:
    rows = [
        (
            head_cell(el("code", setting.key)),
            cell(el("code", f"{setting.flag} {setting.metavar}"), cls="nowrap"),
            cell(setting.default),
            cell(_text(setting.doc), cls="wide"),
        )
        for setting in catalog.settings
    ]
    return table("All settings", ("TOML key", "flag", "default", "meaning"), rows)
