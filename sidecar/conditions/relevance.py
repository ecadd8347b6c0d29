"""Which conditions matter for this server, and how much."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sidecar.model import ConditionType, Finding, Gate, ServerView, Severity


@dataclass(frozen=True, slots=True)
class Effective:
    """A condition's weight after the server's use of the feature was considered."""

    relevant: bool
    severity: Severity
    gate: Gate


def effective(kind: ConditionType, finding: Finding | None, server: ServerView, required: Collection[str]) -> Effective:
    """Weigh a condition by what the server uses.

    A required code always has its declared weight. A feature known to be unused makes its conditions
    irrelevant, or informational where they are declared so; for those, an unknown use counts as unused,
    since a fault that concerns nobody must not page. A finding may lower the result, never raise it.
    """
    severity, gate, relevant = kind.severity, kind.gate, True
    if kind.uses is not None and kind.code not in required:
        used = server.features.get(kind.uses)
        if kind.info_when_unused:
            if used is not True:
                severity, gate = Severity.INFO, Gate.NEVER
        elif used is False:
            relevant = False
    if finding is not None:
        if finding.severity is not None and finding.severity.rank < severity.rank:
            severity = finding.severity
        if finding.gate is Gate.NEVER:
            gate = Gate.NEVER
    return Effective(relevant, severity, gate)
