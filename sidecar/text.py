"""What ``check`` and ``explain`` print for people, made from the report and the catalogue.

The first line is the verdict in one sentence. On a terminal sentences are wrapped at its width and the words that
matter are coloured; what goes to a file or another program has one line per sentence. A command is never broken: what
is copied must run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from sidecar.catalog import Catalog
from sidecar.model import Status
from sidecar.remedy import parts
from sidecar.report import (
    Level,
    causes,
    clean,
    consequences,
    facts,
    gpu_names,
    headline,
    is_preflight,
    one_line,
    sglang_says,
    unknowns,
    when,
)

_COLORS: Final = {
    Level.OK.value: "32",
    Level.WARNING.value: "33",
    Level.CRITICAL.value: "31",
    Level.UNKNOWN.value: "35",
    "info": "36",
}
_WIDEST: Final = 100
"""Columns beyond which lines are hard to read."""
_NARROWEST: Final = 40
_IN_FACTS: Final = frozenset({"driver", "kernel_module", "cuda_driver", "gpu_model"})
"""Items of the environment that the facts already say."""
_GLUE: Final = "\ue000"
"""Stands for a space at which no line may end; of Unicode's private use, so that no message has it."""


class Style(Struct, frozen=True):
    """How to print. ``width`` is the terminal's, in columns, None where nothing is to be wrapped."""

    width: int | None = None
    color: bool = False

    @property
    def room(self) -> int | None:
        """Columns of a line, None for any number."""
        return None if self.width is None else min(max(self.width, _NARROWEST), _WIDEST)


PLAIN: Final = Style()
"""For files, pipes and tests."""


def style_of(environ: Mapping[str, str], *, terminal: bool, columns: int) -> Style:
    """Choose how to print. ``terminal`` is whether somebody reads along, ``columns`` its width.

    NO_COLOR takes the colours away, FORCE_COLOR brings them wherever the output goes; either counts where it is set and
    not empty, and the former counts more. A terminal of the kind ``dumb`` has none.
    """
    forced = environ.get("FORCE_COLOR", "") not in {"", "0"}
    able = terminal and environ.get("TERM") != "dumb"
    return Style(width=columns if terminal else None, color=(able or forced) and not environ.get("NO_COLOR"))


# -- check --------------------------------------------------------------------------------------------


def render(report: Mapping[str, Any], *, verbose: bool, style: Style = PLAIN) -> str:
    """Give the report as ``check`` prints it: the verdict first, then causes, unknowns and facts.

    ``verbose`` adds the evidence, every judged condition, the probes' runs and the history.
    """
    out = _Lines(style)
    found = causes(report)
    level, _, sentence = headline(report).partition(": ")
    out.headed(level, one_line(sentence), level)
    # The first line is about the first cause wherever its level is that of a cause.
    told = bool(found) and found[0]["severity"] == report["verdict"]["level"]
    for number, cause in enumerate(found):
        if number or not told:
            out.blank()
            _head(out, cause)
        _cause(out, report, cause, verbose=verbose)
    _unknowns(out, report, verbose=verbose)
    out.blank()
    width = max(len(name) for name, _ in (*_state(report), *facts(report), *_versions(report)))
    for name, value in (*_state(report), *facts(report)):
        out.row(name, value, width)
    if versions := _versions(report):
        out.blank()
        for name, value in versions:
            out.row(name, value, width)
    if verbose:
        _verbose(out, report)
    return out.text


class _Lines:
    """Lines in the making, wrapped where the style says so. What they are given is cleaned already."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n") + "\n"

    def blank(self) -> None:
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def raw(self, line: str) -> None:
        """A line as it is."""
        self._lines.append(line)

    def sentence(self, content: str, *, first: str = "", rest: str | None = None) -> None:
        """Text behind ``first``; further lines stand behind ``rest``, by default below the first one's text."""
        rest = " " * len(first) if rest is None else rest
        room = self._style.room
        for number, line in enumerate(content.splitlines() or [""]):
            start = rest if number else first
            if room is None:
                self._lines.append(start + line)
            else:
                self._lines += _wrapped(line, start, rest, room)

    def headed(self, word: str, content: str, kind: str) -> None:
        """A sentence behind a word, which has the colour of a severity or level."""
        at = len(self._lines)
        self.sentence(f"{word}: {content}")
        if self._style.color and kind in _COLORS:
            # Once the line is broken: colours take no columns.
            self._lines[at] = f"\x1b[1;{_COLORS[kind]}m{word}\x1b[0m" + self._lines[at].removeprefix(word)

    def row(self, name: str, value: str, width: int) -> None:
        """A name and its value, in two columns."""
        room = self._style.room
        if room is not None and room - width - 2 < _NARROWEST // 2:
            self.sentence(name)
            self.sentence(one_line(value), first="    ")
        else:
            self.sentence(one_line(value), first=f"{name:<{width}}  ")

    def labelled(self, label: str, content: str) -> None:
        """A line of a block."""
        self.sentence(clean(content), first=f"  {label}: ", rest="    ")


def _wrapped(line: str, first: str, rest: str, room: int) -> list[str]:
    """Break a line at spaces, never inside a command in backquotes."""
    glued = "`".join(piece.replace(" ", _GLUE) if index % 2 else piece for index, piece in enumerate(line.split("`")))
    wrapped = textwrap.wrap(
        glued,
        width=room,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [one.replace(_GLUE, " ") for one in wrapped] or [first]


def _head(out: _Lines, cause: Mapping[str, Any]) -> None:
    said = one_line(cause["message"] or cause["title"])
    out.headed(cause["severity"], f"{cause['code']}: {said}", cause["severity"])


def _cause(out: _Lines, report: Mapping[str, Any], cause: Mapping[str, Any], *, verbose: bool) -> None:
    gates = ("hinders the launch" if is_preflight(report) else "gates readiness") if cause["blocking"] else ""
    notes = [one for one in (cause["reason"], gates, "accepted" if cause["accepted"] else "") if one]
    if notes:
        out.labelled("reason", ", ".join(notes))
    if cause["gpus"]:
        out.labelled("GPUs", gpu_names(cause))
    if verbose:
        for item in cause["evidence"]:
            out.labelled("evidence", item)
        out.labelled("since", when(cause["since"]))
    if says := sglang_says(report, cause):
        out.labelled("SGLang says", says)
    _remedy(out, cause["remedy"])
    explained = [
        one["code"] + (" (could not be judged)" if one["status"] == Status.UNKNOWN else "")
        for one in consequences(report, cause["code"])
        if one["status"] != Status.FALSE
    ]
    if explained:
        out.labelled("consequences", ", ".join(explained))


def _remedy(out: _Lines, remedy: str) -> None:
    """What to do. A command has a line of its own, so that it can be copied whole, however long it is."""
    label = "  fix: "
    for part in parts(remedy):
        if part.command:
            out.raw(label + clean(part.text + (f"  # {part.note}" if part.note else "")))
        else:
            out.sentence(clean(part.text), first=label, rest="    ")
        label = "    "


def _unknowns(out: _Lines, report: Mapping[str, Any], *, verbose: bool) -> None:
    groups = unknowns(report)
    if not groups:
        return
    out.blank()
    out.sentence("could not be judged:" if verbose else "could not be judged (-v names the conditions):")
    for group in groups:
        count = len(group.codes)
        said = one_line(group.message) or "No reason was given."
        more = "" if verbose else f" ({count} condition{'s' * (count != 1)})"
        out.sentence(f"{group.probe} ({group.reason}): {said}{more}", first="  ", rest="    ")
        if verbose:
            out.sentence(", ".join(group.codes), first="    ")


def _state(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the verdict means for the pod or the launch; in a demo, that it is one."""
    rows = []
    if (demo := report["demo"]) is not None:
        rows.append(("demo", f"{demo['scenario']}: recorded, nothing of this machine"))
    verdict = report["verdict"]
    blockers = ", ".join(verdict["blockers"])
    if is_preflight(report):
        said = f"hindered by {blockers}" if blockers else "nothing that was judged hinders the launch"
        return [*rows, ("verdict", said)]
    if verdict["pending"]:
        said = "not ready, the first driver round has not ended"
    else:
        said = "ready" if verdict["ready"] else f"not ready because of {blockers}"
    return [*rows, ("readiness", said)]


def _versions(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(item["value"])) for name, item in report["environment"].items() if name not in _IN_FACTS]


def _verbose(out: _Lines, report: Mapping[str, Any]) -> None:
    standing = report["standing"]
    out.blank()
    out.raw("where the sidecar stands:")
    for name in ("placement", "processes"):
        out.sentence(one_line(f"{name} {standing[name]}: {standing[f'{name}_why']}"), first="  ", rest="    ")
    out.blank()
    out.raw("probes:")
    width = max(map(len, report["probes"]), default=0)
    for name, probe in report["probes"].items():
        seconds = "" if probe["duration"] is None else f" in {probe['duration']:.3f} s"
        place = f" at {probe['where']}" if probe["where"] else ""
        detail = f": {probe['detail']}" if probe["detail"] else ""
        out.row(f"  {name}", f"{probe['outcome']}{place}{seconds}{detail}", width + 2)
    out.blank()
    out.raw("conditions that are not active:")
    rest = [one for one in report["conditions"] if not one["active"]]
    width = max((len(one["code"]) for one in rest), default=0)
    for one in rest:
        out.row(f"  {one['code']}", _standing(one), width + 2)
    if report["history"]:
        out.blank()
        out.raw("history:")
        for one in report["history"]:
            reason = f" ({one['reason']})" if one["reason"] else ""
            out.sentence(
                one_line(f"{one['subject']}: {one['before']} -> {one['after']}{reason}"),
                first=f"  {when(one['at'])}  ",
                rest="    ",
            )


def _standing(condition: Mapping[str, Any]) -> str:
    """The status of a condition that is not active, in words."""
    if not condition["relevant"]:
        return "does not concern this server"
    if condition["consequence_of"] is not None:
        return f"explained by {condition['consequence_of']}"
    if condition["status"] == Status.UNKNOWN:
        return f"unknown ({condition['reason'] or 'not-judged'})"
    return "judged and fine"


# -- explain ------------------------------------------------------------------------------------------


def explain(catalog: Catalog, code: str | None, style: Style = PLAIN) -> str:
    """Write what is known of a condition, or the list of all codes. Raises KeyError for no such code."""
    out = _Lines(style)
    if code is None:
        width = max((len(known) for known in catalog.conditions), default=0)
        for known, condition in catalog.conditions.items():
            out.row(known, condition.title, width)
        return out.text
    condition = catalog.conditions[code]
    severity = condition.severity.value
    rows = [
        ("severity", f"{severity}, gate {condition.gate.value}, judged by probe {catalog.owner[code]}"),
        ("when", condition.when),
        ("fix", condition.remedy),
        ("explained by", ", ".join(condition.causes)),
    ]
    out.headed(code, condition.title, severity)
    out.blank()
    _columns(out, rows)
    if condition.reasons:
        out.blank()
        out.raw("reasons:")
        _columns(out, [(f"  {token}", meaning) for token, meaning in condition.reasons.items()])
    return out.text


def _columns(out: _Lines, rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        if value:
            out.row(name, value, width)


def suggestions(catalog: Catalog, word: str) -> Iterable[str]:
    """Codes that somebody may have meant who wrote ``word``."""
    from difflib import get_close_matches  # rarely needed

    parts_of = [code for code in catalog.conditions if word in code] if len(word) > 2 else []
    return dict.fromkeys([*get_close_matches(word, catalog.conditions, n=3), *parts_of[:3]])
