"""The page for people: one HTML document without scripts or external resources, rendered from the report.

It never reloads itself under the reader's hands: what is open stays open, what is selected stays selected. Whether it
is still true is told by a strip of a line in a frame of its own, which is fetched anew every few seconds. Who wants the
whole page to be fetched anew asks for it (``?refresh=on``).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from sidecar.catalog import Catalog
from sidecar.page.documentation import documentation
from sidecar.page.findings import causes, demo, unknowns, verdict
from sidecar.page.html import Markup, el, joined, section, time
from sidecar.page.sections import SECTIONS
from sidecar.report import causes as causes_of
from sidecar.report import unknowns as unknowns_of

__all__ = ["LIVE_EVERY", "LIVE_POLICY", "POLICY", "REFRESH_EVERY", "documents", "live", "mark", "render"]

_log = structlog.get_logger()

LIVE_EVERY: Final = 10
"""Seconds after which the strip is fetched anew."""
REFRESH_EVERY: Final = 30
"""Seconds after which the whole page is, for who asks for that."""

_STYLE: Final = "\n" + Path(__file__).with_name("style.css").read_text(encoding="utf-8")
_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_COMMON: Final = f"default-src 'none'; style-src 'sha256-{_HASH}'; img-src data:; base-uri 'none'; form-action 'none'"
POLICY: Final = f"{_COMMON}; frame-src 'self'; frame-ancestors 'none'"
"""The Content-Security-Policy of the page: this one style sheet, the strip's frame, and nothing else."""
LIVE_POLICY: Final = f"{_COMMON}; frame-ancestors 'self'"
"""The strip's, which stands in the page."""

_ICONS: Final = {"ok": "1a7540", "warning": "c78a00", "critical": "c62f26", "unknown": "6544a3"}


def render(report: Mapping[str, Any], *, refreshing: bool = False) -> str:
    """Give the whole page. ``refreshing``: it is fetched anew as a whole, so that it needs no strip."""
    level = report["verdict"]["level"]
    parts = [(name, title, part) for name, title, make in SECTIONS if (part := _made(name, title, make, report))]
    body = [
        _header(report),
        el(
            "main",
            demo(report),
            verdict(report, _strip(report, refreshing=refreshing)),
            causes(report),
            unknowns(report),
            _contents([(name, title) for name, title, _ in parts]),
            [part for _, _, part in parts],
            id="main",
        ),
        _footer(report, refreshing=refreshing),
    ]
    prefix = "DEMO " if report["demo"] is not None else ""
    return _document(f"{prefix}{level} - sglang-sidecar", level, body)


def _made(name: str, title: str, make: Callable[[Mapping[str, Any]], Markup], report: Mapping[str, Any]) -> Markup:
    """A part of the page; a defect in it costs that part, not the verdict above it."""
    try:
        return make(report)
    except Exception:  # noqa: BLE001 - whatever a probe reports: somebody waits for the verdict
        _log.exception("a part of the page was left out", part=name)
        return section(name, title, el("p", "This part cannot be shown: a bug of the sidecar. See /report."))


def documents(catalog: Catalog) -> str:
    """Give the documentation: what each condition, metric and setting means, as this very agent has them."""
    return _document("Documentation - sglang-sidecar", "info", documentation(catalog))


def mark(report: Mapping[str, Any]) -> str:
    """Give a mark of what the verdict says: another one means that the page is out of date."""
    said = [
        report["verdict"],
        [(cause["code"], cause["reason"], cause["severity"], cause["gpus"]) for cause in causes_of(report)],
        [(group.probe, group.reason, group.codes) for group in unknowns_of(report)],
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def live(report: Mapping[str, Any], *, changed: bool) -> str:
    """Give the strip: that the page is still true, or what has become of it."""
    level = report["verdict"]["level"]
    if changed:
        found = causes_of(report)
        cause = f", {found[0]['code']}" if found and found[0]["severity"] == level else ""
        said = el("p", el("b", f"Changed: now {level}{cause}."), " Reload the page to see it.", cls=f"live {level}")
    else:
        said = el("p", "Still so at ", time(report["taken_at"], short=True), ".", cls="live")
    return _document("Live verdict", level, said, cls="strip")


def _document(title: str, level: str, body: Any, *, cls: str | None = None) -> str:
    icon = (
        "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
        f"%3Ccircle cx='8' cy='8' r='7' fill='%23{_ICONS.get(level, '1d5f9e')}'/%3E%3C/svg%3E"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("link", rel="icon", href=icon),
        el("style", Markup(_STYLE)),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{el("body", joined(body), cls=cls)}</html>\n'


def _header(report: Mapping[str, Any]) -> Markup:
    links = [("/report", "Report (JSON)"), ("/metrics", "Metrics"), ("/readyz?verbose", "Readiness"), ("/docs", "Docs")]
    return el(
        "header",
        el("b", f"sglang-sidecar {report['version']}"),
        el("span", "as of ", time(report["taken_at"])),
        el("a", "Reload", href="/"),
        el("span", [[el("a", title, href=path), " "] for path, title in links], cls="bar end"),
        cls="bar",
    )


def _contents(parts: list[tuple[str, str]]) -> Markup:
    links = [el("li", el("a", title, href=f"#{name}")) for name, title in parts]
    return el("nav", el("ul", links), aria_label="Parts of this page")


def _strip(report: Mapping[str, Any], *, refreshing: bool) -> Markup:
    if refreshing:
        again = f"This page is fetched anew every {REFRESH_EVERY} seconds. "
        return el("p", again, el("a", "Stop that", href="/"), cls="soft")
    return el("iframe", src=f"/?live={mark(report)}", title="Whether the verdict has changed since")


def _footer(report: Mapping[str, Any], *, refreshing: bool) -> Markup:
    offer = None
    if not refreshing:
        offer = el(
            "p",
            "Only the line below the verdict is fetched anew by itself. For a screen on a wall: ",
            el("a", "have the whole page fetched anew", href="/?refresh=on"),
            f" every {REFRESH_EVERY} seconds.",
        )
    return el("footer", offer, el("p", f"Generation {report['generation']} of what this agent knows."))
