"""The probe endpoints' answers in the text format of the Kubernetes API server's health endpoints.

Pure functions of the snapshot. Every answer consists of names and tokens: a sentence of a message may quote
the server's environment, and these endpoints are open to whoever reaches the port.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from sidecar.catalog import FIRST_ROUND, Catalog
from sidecar.model import Condition, Gate, Outcome, Result, Snapshot, Status

_QUOTED_LIMIT = 64
"""Characters of a name from the query that are repeated in the answer."""


class Reply(Struct, frozen=True):
    """An HTTP status and a body of plain text."""

    status: int
    text: str


def readyz(
    snapshot: Snapshot, catalog: Catalog, *, stopping: bool, verbose: bool = False, exclude: Iterable[str] = ()
) -> Reply:
    """Give the answer of /readyz: one line per probe, 503 while anything that is not excluded gates.

    ``exclude`` names probes or codes. A failure is always verbose.
    """
    excluded = frozenset(exclude)
    lines: list[str] = ["[-]shutting-down failed"] if stopping else []
    known = {probe.name for probe in catalog.probes}
    for probe in catalog.probes:
        if probe.name in excluded:
            lines.append(f"[+]{probe.name} excluded: ok")
        else:
            lines.append(_probe_line(probe.name, snapshot, catalog, excluded))
    if snapshot.verdict.pending and FIRST_ROUND not in known:
        lines.append(f"[-]{FIRST_ROUND} failed: pending")
    lines += [
        f"[-]{code} failed: {code}"
        for code in snapshot.verdict.blockers
        if catalog.owner.get(code) not in known and code not in excluded
    ]
    if strangers := sorted(excluded - known - catalog.conditions.keys()):
        quoted = ",".join(json.dumps(name[:_QUOTED_LIMIT]) for name in strangers)
        lines.append(f"warn: some health checks cannot be excluded: no matches for {quoted}")
    return _finish("readyz", lines, verbose=verbose)


def single(snapshot: Snapshot, catalog: Catalog, name: str, *, stopping: bool) -> Reply | None:
    """Give the answer of /readyz/``name``, or None when there is no such probe or condition.

    A condition fails while it is active, unless it is accepted. A probe fails while one of its conditions of gate
    serving or launch is active, whether a server answers or not, and the first probe until its first round ended.
    """
    probe = name in catalog.by_name
    if not probe and name not in catalog.conditions:
        return None
    if stopping:
        return Reply(503, "[-]shutting-down failed\n")
    if not probe:
        return _code_reply(name, snapshot.conditions.get(name))
    if failing := [condition.code for condition in _owned(name, snapshot, catalog) if _gating_class(condition)]:
        return Reply(503, f"[-]{name} failed: {','.join(failing)}\n")
    if snapshot.verdict.pending and name == FIRST_ROUND:
        return Reply(503, f"[-]{name} failed: pending\n")
    note = _note(name, snapshot, catalog)
    return Reply(200, f"[+]{name} ok: {note}\n" if note else "ok\n")


def livez(reason: str | None, *, verbose: bool = False) -> Reply:
    """Give the answer of /livez. ``reason`` is a token that says why the scheduler makes no progress, else None."""
    return _finish("livez", [f"[-]scheduler failed: {reason}" if reason else "[+]scheduler ok"], verbose=verbose)


def startupz(reason: str | None, *, verbose: bool = False) -> Reply:
    """Give the answer of /startupz. ``reason`` is a token that says what the start still waits for, else None."""
    return _finish("startupz", [f"[-]startup failed: {reason}" if reason else "[+]startup ok"], verbose=verbose)


def _finish(name: str, lines: list[str], *, verbose: bool) -> Reply:
    """Give the lines with their verdict; only ``ok`` for a success that nobody asked the details of."""
    failed = any(line.startswith("[-]") for line in lines)
    if not failed and not verbose:
        return Reply(200, "ok\n")
    text = "\n".join([*lines, f"{name} check {'failed' if failed else 'passed'}"])
    return Reply(503 if failed else 200, text + "\n")


def _probe_line(name: str, snapshot: Snapshot, catalog: Catalog, excluded: Collection[str]) -> str:
    """Give the line of one probe that is not excluded as a whole."""
    blockers = [code for code in snapshot.verdict.blockers if catalog.owner.get(code) == name]
    if failing := [code for code in blockers if code not in excluded]:
        return f"[-]{name} failed: {','.join(failing)}"
    if snapshot.verdict.pending and name == FIRST_ROUND:
        return f"[-]{name} failed: pending"
    if blockers:
        return f"[+]{name} ok: {','.join(blockers)} excluded"
    note = _note(name, snapshot, catalog)
    return f"[+]{name} ok: {note}, not gating" if note else f"[+]{name} ok"


def _note(name: str, snapshot: Snapshot, catalog: Catalog) -> str | None:
    """Why a probe that does not fail is not plainly well either, in tokens."""
    owned = tuple(_owned(name, snapshot, catalog))
    if active := [_name(condition) for condition in owned if condition.active]:
        return ",".join(active)
    outcome = snapshot.results.get(name, Result(probe=name)).outcome
    if outcome is Outcome.PENDING:
        return outcome.value
    if any(_unknown(condition) and _could_gate(condition, catalog) for condition in owned):
        return Status.UNKNOWN.value
    return None if outcome is Outcome.OK else outcome.value


def _name(condition: Condition) -> str:
    """Name an active condition as a line does."""
    return f"{condition.code} accepted" if condition.accepted else condition.code


def _could_gate(condition: Condition, catalog: Catalog) -> bool:
    """Tell whether it would be of a class that gates if it held."""
    # By the declared gate too: that nobody uses a feature just now does not turn "not looked at" into "ok".
    gates = (condition.gate, catalog.conditions[condition.code].gate)
    return not condition.accepted and any(gate is not Gate.NEVER for gate in gates)


def _code_reply(code: str, condition: Condition | None) -> Reply:
    """Give the answer for one condition. Unknown passes, and says so."""
    if condition is not None and condition.active and condition.accepted:
        return Reply(200, f"[+]{code} ok: accepted\n")
    if condition is not None and condition.active:
        return Reply(503, f"[-]{code} failed: {condition.reason or 'active'}\n")
    if condition is None or _unknown(condition):
        return Reply(200, f"[+]{code} ok: unknown\n")
    if condition.status is Status.TRUE and condition.consequence_of is not None:
        return Reply(200, f"[+]{code} ok: consequence of {condition.consequence_of}\n")
    return Reply(200, "ok\n" if condition.relevant else f"[+]{code} ok: not relevant\n")


def _owned(name: str, snapshot: Snapshot, catalog: Catalog) -> Iterator[Condition]:
    """Give the published conditions that a probe judges, in the catalogue's order."""
    return (
        snapshot.conditions[code]
        for code, owner in catalog.owner.items()
        if owner == name and code in snapshot.conditions
    )


def _gating_class(condition: Condition) -> bool:
    """Tell whether it is active and of a class that can gate."""
    return condition.active and condition.gate is not Gate.NEVER


def _unknown(condition: Condition) -> bool:
    """Tell whether it matters here and nobody could judge it."""
    return condition.status is Status.UNKNOWN and condition.relevant and condition.consequence_of is None
