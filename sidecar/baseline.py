"""The baseline: what the environment should be, in a file that people write and edit.

A TOML file with one table ``[environment]``: item = exact value, PEP 440 specifier, or ``absent``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from sidecar import tomlfile
from sidecar.drift import ABSENT, compare, expectation, written
from sidecar.exhaustion import exhausted
from sidecar.model import Baseline, BaselineProblem, Expectation, Observed
from sidecar.regular import IrregularError, read_regular

TABLE: Final = "environment"
_LIMIT: Final = 256 * 1024
"""Bytes of the largest accepted file; a full one has about 1 kB."""
_ENCODING: Final = "utf-8-sig"
"""UTF-8, with or without the mark that editors on Windows put in front."""
_SECOND_LOOK: Final = 0.2
"""Seconds after which a file that cannot be used is read again: a small one takes less to be written."""


def load(path: Path, known: Collection[str]) -> Baseline:
    """Read a baseline. Blocks: call it from a thread. What is wrong with it is a problem beside the rest.

    ``known`` are the items that this release can observe. What cannot be used at all is read a second time, a moment
    later: somebody may be writing it. Raises OSError where the agent itself lacks what it needs to look.
    """
    baseline = _load(path, known)
    if baseline.problems and not baseline.items:
        time.sleep(_SECOND_LOOK)
        baseline = _load(path, known)
    return baseline


def _load(path: Path, known: Collection[str]) -> Baseline:
    try:
        content = read(path)
    except ValueError as error:
        return _unusable("unreadable", f"The baseline {path} {error}; correct `baseline`.")
    return parse(content, str(path), known)


def read(path: Path) -> bytes:
    """Read the file as it is. Blocks, but not for a pipe's other end.

    Raises ValueError with the rest of a sentence that starts with the path, OSError like `load`.
    """
    try:
        content = read_regular(path, _LIMIT + 1)
    except IrregularError as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        if exhausted(error):
            raise
        raise ValueError(f"cannot be read: {(error.strerror or type(error).__name__).lower()}") from None
    if len(content) > _LIMIT:
        raise ValueError("is larger than any baseline")
    return content


def text(path: Path) -> str:
    """Read the file as text, for `write`. Raises ValueError like `read`."""
    try:
        return read(path).decode(_ENCODING)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def parse(content: bytes, name: str, known: Collection[str]) -> Baseline:
    """Read the content of a baseline file; ``name`` is for the sentences."""
    try:
        data = tomlfile.loads(content.decode(_ENCODING))
    except UnicodeDecodeError:
        return _unusable("not-toml", f"The baseline {name} is not UTF-8 text; write it anew with `baseline write`.")
    except ValueError as error:
        # Not only TOMLDecodeError: a number of thousands of digits is refused by Python itself.
        return _unusable("not-toml", f"The baseline {name} is not valid TOML: {str(error)[:200]}.")
    table = data.get(TABLE)
    if not isinstance(table, dict):
        return _unusable("no-table", f"The baseline {name} has no table [{TABLE}]; see `baseline write`.")
    problems = [
        BaselineProblem("unknown-key", f"{key[:80]!r} in the baseline {name} is not known; only [{TABLE}] is.")
        for key in data
        if key != TABLE
    ]
    items: dict[str, Expectation] = {}
    for item, value in table.items():
        if item not in known:
            problems.append(BaselineProblem("unknown-item", _stranger(item, name, known)))
        elif not isinstance(value, str) or not value.strip():
            sentence = f"The value of {item} in the baseline {name} must be a text in quotes."
            problems.append(BaselineProblem("invalid-value", sentence))
        else:
            try:
                items[item] = expectation(value)
            except ValueError as error:
                sentence = f"The value of {item} in the baseline {name}: {error}."
                problems.append(BaselineProblem("invalid-value", sentence))
    return Baseline(items=items, problems=tuple(problems))


def _stranger(item: str, name: str, known: Collection[str]) -> str:
    """Say that an item is not known, and which one was probably meant: names of packages are spelt in many ways."""
    from difflib import get_close_matches  # rarely needed

    spelt = {one.replace("_", "-"): one for one in known}
    close = get_close_matches(item.lower().replace("_", "-"), spelt, n=1, cutoff=0.8)
    hint = f"; did you mean {spelt[close[0]]}?" if close else "."
    return f"The item {item[:80]!r} in the baseline {name} is not one that this release knows{hint}"


def _unusable(token: str, sentence: str) -> Baseline:
    return Baseline(problems=(BaselineProblem(token, sentence),))


def write(observed: Mapping[str, Observed], *, existing: str | None, heading: str) -> str:
    """The text of a baseline for what was observed; items that nobody could observe are left out.

    ``existing`` is the text of a baseline to bring up to date: its comments and order stay, and so does each value
    that still holds (a specifier above all). ``heading`` is the comment at the top of a new one. Raises ValueError
    for an existing text that is no baseline.
    """
    import tomlkit  # only here: no running agent needs to write TOML

    if existing is None:
        document = tomlkit.document()
        for line in heading.splitlines():
            document.add(tomlkit.comment(line))
        document.add(TABLE, tomlkit.table())
    else:
        if not existing.strip():
            raise ValueError(
                "the existing baseline is empty; a shell that redirects the output onto it empties it before it is "
                "read, so write to another file and move that"
            )
        try:
            document = tomlkit.parse(existing)
        except (tomlkit.exceptions.TOMLKitError, ValueError, RecursionError) as error:
            raise ValueError(f"the existing baseline is not valid TOML: {str(error)[:200]}") from None
    table = document.get(TABLE)
    if not isinstance(table, MutableMapping):
        raise ValueError(f"the existing baseline has no table [{TABLE}]")  # noqa: TRY004 - a fault of the file
    for item, one in sorted(observed.items()):
        if item in table and _holds(table[item], one):
            continue
        if one.value is not None:
            table[item] = one.value
        elif item in table:
            table[item] = ABSENT
    return tomlkit.dumps(document)


def _holds(text: object, one: Observed) -> bool:
    if not isinstance(text, str):
        return False
    try:
        wanted = expectation(text)
    except ValueError:
        return False
    return not compare({"item": wanted}, {"item": one})


# -- as text ------------------------------------------------------------------------------------------


class Row(Struct, frozen=True, kw_only=True):
    """One item of a baseline beside what was observed. ``state`` is ok, unknown, or how it deviates."""

    item: str
    expected: str
    observed: str | None
    state: str


def compared(baseline: Baseline, observed: Mapping[str, Observed]) -> tuple[Row, ...]:
    """Every item of the baseline, in its order, with what is known of it."""
    drifts = {one.item: one for one in compare(baseline.items, observed)}

    def state(item: str) -> str:
        if item in drifts:
            return drifts[item].deviation.value
        return "ok" if item in observed else "unknown"

    return tuple(
        Row(
            item=item,
            expected=written(wanted),
            observed=observed[item].value if item in observed else None,
            state=state(item),
        )
        for item, wanted in baseline.items.items()
    )


def status_of(rows: Sequence[Row], problems: Sequence[BaselineProblem] = ()) -> int:
    """Exit status: 0 all as wanted, 1 something differs, 3 nothing differs and something is not known.

    What a line that could not be used wants, is not known; and nothing is known where nothing was compared.
    """
    states = {row.state for row in rows}
    if states - {"ok", "unknown"}:
        return 1
    return 3 if "unknown" in states or problems or not rows else 0


def rendered(rows: Sequence[Row], problems: Sequence[BaselineProblem], form: str) -> str:
    """The comparison as ``text`` or ``json``."""
    if form == "json":
        items = [
            {"item": row.item, "expected": row.expected, "observed": row.observed, "state": row.state} for row in rows
        ]
        document = {"items": items, "problems": [one.sentence for one in problems]}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    cells = [("item", "baseline", "now", "")]
    cells += [(row.item, row.expected, _now(row), "" if row.state == "ok" else row.state) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=True)), line[3]]).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, *(f"warning: {one.sentence}" for one in problems)]) + "\n"


def _now(row: Row) -> str:
    if row.state == "unknown":
        return "?"
    return ABSENT if row.observed is None else row.observed
