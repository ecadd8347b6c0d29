"""The first part of the page: the verdict, its causes with their repair, and what could not be judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.model import Status
from sidecar.page.html import NOTHING, Markup, cell, el, fold, head_cell, joined, lasting, steps, table, time
from sidecar.remedy import parts
from sidecar.report import causes as causes_of
from sidecar.report import consequences, gpu_names, headline, sglang_says
from sidecar.report import unknowns as unknowns_of


def demo(report: Mapping[str, Any]) -> Markup:
    """Say that nothing here is real, where nothing is."""
    shown = report["demo"]
    if shown is None:
        return NOTHING
    replica = f" (replica {shown['replica']} of {shown['replicas']})" if shown["replica"] is not None else ""
    return el(
        "aside",
        el(
            "p",
            el("b", f"This is a demo: {shown['title']}{replica}."),
            " It was recorded; nothing of it is this machine's.",
        ),
        el("p", shown["shows"]),
        cls="demo",
        aria_label="Demo",
    )


def verdict(report: Mapping[str, Any], strip: Markup) -> Markup:
    """The whole report in one sentence, whether the pod is ready and that is still so; then the cause that it names."""
    found = report["verdict"]
    level = found["level"]
    sentence = headline(report).removeprefix(f"{level}: ")
    if found["pending"]:
        readiness = "Not ready: the first driver round has not ended."
    elif found["ready"]:
        readiness = "Ready: nothing gates this pod."
    else:
        readiness = f"Not ready: gated by {', '.join(found['blockers'])}."
    named = _named(report)
    if named is None:
        sentence = sentence[:1].upper() + sentence[1:]
    return el(
        "section",
        el("span", level, cls="word"),
        el("h1", sentence),
        el("p", readiness),
        strip,
        _details(report, named, opened=True) if named is not None else None,
        cls=f"card verdict {level}",
        id=None if named is None else named["code"],
        aria_label="Verdict",
    )


def _named(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The cause that the headline is about; None where it is about none."""
    found = causes_of(report)
    return found[0] if found and found[0]["severity"] == report["verdict"]["level"] else None


def causes(report: Mapping[str, Any]) -> Markup:
    """Every active condition but the one that the headline is about, which stands below that."""
    named = _named(report)
    return joined(_cause(report, cause) for cause in causes_of(report) if cause is not named)


def _cause(report: Mapping[str, Any], cause: Mapping[str, Any]) -> Markup:
    return el(
        "article",
        el("span", cause["severity"], cls="word"),
        el("h2", f"{cause['code']}: {cause['message'] or cause['title']}"),
        _details(report, cause, opened=False),
        cls=f"card {cause['severity']}",
        id=cause["code"],
        aria_label=cause["code"],
    )


def _details(report: Mapping[str, Any], cause: Mapping[str, Any], *, opened: bool) -> list[Markup | None]:
    """What to know of a cause and to do about it. ``opened``: its evidence is shown at once."""
    says = sglang_says(report, cause)
    return [
        el("p", "SGLang says: ", el("q", says)) if says else None,
        el("p", f"GPUs: {gpu_names(cause)}") if cause["gpus"] else None,
        el("p", "What to do", cls="todo"),
        steps(parts(cause["remedy"])),
        _evidence(cause, opened=opened),
        _explained(report, cause["code"]),
        el("div", _tags(cause), el("span", _since(report, cause), cls="soft"), cls="tags"),
    ]


def _tags(cause: Mapping[str, Any]) -> list[Markup]:
    tags = [el("a", "About this condition", href=f"/docs#{cause['code']}")]
    if cause["reason"]:
        tags.append(el("span", cause["reason"], cls="tag"))
    if cause["blocking"]:
        tags.append(el("span", "gates readiness", cls="tag gates"))
    if cause["accepted"]:
        tags.append(el("span", "accepted", cls="tag"))
    return tags


def _evidence(cause: Mapping[str, Any], *, opened: bool) -> Markup:
    if not cause["evidence"]:
        return NOTHING
    found = el("ul", [el("li", el("code", item)) for item in cause["evidence"]], cls="plain")
    return el("details", el("summary", "Why we think so"), found, open=opened)


def _explained(report: Mapping[str, Any], code: str) -> Markup:
    """What follows from a cause, folded: it goes away with it."""
    found = [one for one in consequences(report, code) if one["status"] != Status.FALSE]
    if not found:
        return NOTHING
    items = [
        el(
            "li",
            el("code", el("a", one["code"], href=f"/docs#{one['code']}")),
            ": ",
            one["message"] or one["title"],
            " (could not be judged)" if one["status"] == Status.UNKNOWN else None,
        )
        for one in found
    ]
    count = len(items)
    return fold(
        f"Explains {count} more: nothing to do about {'it' if count == 1 else 'them'}", el("ul", items, cls="plain")
    )


def _since(report: Mapping[str, Any], cause: Mapping[str, Any]) -> list[Markup | str]:
    lasted = lasting(report["taken_at"] - cause["since"])
    return ["Since ", time(cause["since"]), f", for {lasted}" if lasted else ""]


def unknowns(report: Mapping[str, Any]) -> Markup:
    """What matters here and nobody could tell, folded unless it is the verdict."""
    groups = unknowns_of(report)
    count = sum(len(group.codes) for group in groups)
    rows = [
        (
            head_cell(group.probe),
            cell(group.reason, cls="nowrap"),
            cell(group.message or "No reason was given.", cls="wide"),
            cell(", ".join(group.codes), cls="wide soft"),
        )
        for group in groups
    ]
    if not rows:
        return NOTHING
    return el(
        "details",
        el("summary", f"{count} condition{'s' * (count != 1)} could not be judged"),
        table("Could not be judged", ("probe", "reason", "why", "conditions"), rows),
        cls="block",
        id="unknown",
        open=report["verdict"]["level"] == "unknown",
    )
