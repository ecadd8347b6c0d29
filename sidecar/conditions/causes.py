"""Which condition explains which, and what that does to both. Pure.

A condition *holds* when it is true and matters here. Of those that hold, one that another explains is that one's
consequence; what nothing explains is a root, and the root alone is published as active.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from sidecar.conditions.relevance import Effective
from sidecar.model import Condition, Gate, Severity, Status

_GATES = (Gate.NEVER, Gate.LAUNCH, Gate.SERVING)
"""From what weighs least to what weighs most."""


def holds(condition: Condition) -> bool:
    """Whether it is true and matters here, explained or not."""
    return condition.status is Status.TRUE and condition.relevant


def cause_of(code: str, conditions: Mapping[str, Condition]) -> str | None:
    """Name the condition that explains this one directly, the first that it declares; None for a root."""
    if not holds(conditions[code]):
        return None
    for cause in conditions[code].explained_by:
        if cause in conditions and holds(conditions[cause]) and _explains(conditions[cause], conditions[code]):
            return cause
    return None


def _explains(cause: Condition, condition: Condition) -> bool:
    # A fault of one GPU does not explain what another one suffers from.
    return not cause.gpus or not condition.gpus or set(condition.gpus) <= set(cause.gpus)


def suppress(conditions: Mapping[str, Condition]) -> dict[str, Condition]:
    """Mark each condition that another one explains with the root of that chain; declarations have no cycles."""
    out: dict[str, Condition] = {}
    for code, condition in conditions.items():
        root = code
        while (cause := cause_of(root, conditions)) is not None:
            root = cause
        out[code] = condition if root == code else replace(condition, consequence_of=root)
    return out


def lend_weight(conditions: Mapping[str, Condition], full: Mapping[str, Effective]) -> dict[str, Condition]:
    """Let each cause that nobody is known to use weigh as much as what it breaks.

    ``full`` has what such an idle condition weighs where it is used, which is the most that it can be lent. Without
    this, a fault that stops the server would vanish behind one that is only informational.
    """
    out = dict(conditions)
    waiting = list(out)
    while waiting:
        code = waiting.pop()
        cause = cause_of(code, out)
        if cause is None or cause not in full:
            continue
        raised = _raised(out[cause], out[code], full[cause])
        if raised != out[cause]:
            out[cause] = raised
            waiting.append(cause)
    return out


def _raised(cause: Condition, consequence: Condition, most: Effective) -> Condition:
    severity = min(consequence.severity, most.severity, key=_rank)
    gate = min(consequence.gate, most.gate, key=_GATES.index)
    return replace(
        cause, severity=max(cause.severity, severity, key=_rank), gate=max(cause.gate, gate, key=_GATES.index)
    )


def _rank(severity: Severity) -> int:
    return severity.rank
