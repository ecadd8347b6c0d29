"""HTML that cannot be broken by what it shows: every text is escaped, only what `el` made is taken as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from sidecar.remedy import Part
from sidecar.report import when


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None | Iterable["Child"]
"""What an element may hold: text (escaped), `Markup`, nothing, or several of these."""

NOTHING: Final = Markup("")
_VOID: Final = frozenset({"meta", "link", "br"})


def el(name: str, /, *children: Child, **attributes: str | int | bool | None) -> Markup:
    """Make an element. ``cls`` is its class; an underscore in a name is a hyphen; None and False leave one out."""
    shown = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{joined(children)}</{name}>")


def _attribute(key: str, value: str | int | bool) -> str:
    name = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def joined(children: Child) -> Markup:
    """Put several children into one piece of HTML."""
    if children is None:
        return NOTHING
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(children))
    return Markup("".join(map(joined, children)))


def time(seconds: float | None, *, short: bool = False) -> Markup:
    """A moment, in UTC; nothing for none. ``short`` leaves the day out."""
    shown = when(seconds)
    if seconds is None or not shown:
        return NOTHING
    machine = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return el("time", shown.partition(" ")[2] if short else shown, datetime=machine, title=shown if short else None)


_LENGTHS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def lasting(seconds: float) -> str:
    """A length of time as people say it, in its largest unit and the next one; empty below a second."""
    left = int(seconds)
    for index, (size, unit) in enumerate(_LENGTHS):
        if left >= size:
            more = [f" {left % size // smaller} {name}" for smaller, name in _LENGTHS[index + 1 : index + 2]]
            return f"{left // size} {unit}" + "".join(one for one in more if not one.startswith(" 0 "))
    return ""


def fold(summary: Child, *content: Child, name: str | None = None, cls: str | None = None) -> Markup:
    """Something that the reader opens."""
    return el("details", el("summary", summary), content, id=name, cls=cls)


def table(label: str, header: Sequence[str], rows: Sequence[Sequence[Markup]]) -> Markup:
    """A table in a frame of its own, which scrolls where there is too little room; nothing without rows.

    A column whose name starts with # holds numbers. The first cell of each row names it. Each other one carries the
    name of its column, for narrow windows, in which a row becomes a card.
    """
    if not rows:
        return NOTHING
    names = [name.removeprefix("#") for name in header]
    head = [
        el("th", name.removeprefix("#"), scope="col", cls="number" if name.startswith("#") else None) for name in header
    ]
    body = [el("tr", [_named(one, name) for one, name in zip(row, names, strict=False)]) for row in rows]
    inner = el("table", el("caption", label, cls="hidden"), el("thead", el("tr", head)), el("tbody", body))
    # Whoever has no mouse scrolls it with the arrow keys once it has the focus.
    return el("div", inner, cls="scroll", tabindex=0, role="region", aria_label=label)


def _named(one: Markup, name: str) -> Markup:
    return Markup(f'<td data-name="{escape(name)}"{one[3:]}') if one.startswith("<td") else one


def head_cell(*content: Child, cls: str | None = None) -> Markup:
    """The cell that names its row."""
    return el("th", content, scope="row", cls=cls)


def cell(*content: Child, cls: str | None = None, colspan: int | None = None) -> Markup:
    """A cell, over several columns where ``colspan`` says so."""
    return el("td", content, cls=cls, colspan=colspan)


def number(value: str | None) -> Markup:
    """A cell with a figure; empty where nobody knows it."""
    return cell(value, cls="number")


def known(value: object) -> Markup:
    """A value, or that it is not known."""
    return el("span", "unknown", cls="nil") if value is None or value == "" else joined(str(value))


def pairs(rows: Iterable[tuple[str, Child]]) -> Markup:
    """Names and values, below each other."""
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in rows], cls="pairs")


def section(name: str, title: str, *content: Child) -> Markup:
    """A part of the page with a heading; nothing where there is nothing in it."""
    inner = joined(content)
    return (
        el("section", el("h2", title, id=f"{name}-title"), inner, id=name, aria_labelledby=f"{name}-title")
        if inner
        else NOTHING
    )


def steps(parts: Iterable[Part]) -> Markup:
    """What to do: sentences, and commands that a click selects as a whole."""
    return joined(_step(part) for part in parts)


def _step(part: Part) -> Markup:
    if part.command:
        note = el("p", part.note[0].upper() + part.note[1:], cls="soft") if part.note else NOTHING
        return joined([el("pre", el("code", part.text), cls="command"), note])
    return el("p", sentence(part))


def sentence(part: Part) -> Markup:
    """A sentence, with the commands in it."""
    return joined(el("code", piece, cls="command") if code else piece for piece, code in part.pieces)
