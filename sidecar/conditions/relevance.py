"""Which conditions matter for this server, how much, and what the operator decided about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field

from sidecar.config import Settings
from sidecar.model import ConditionType, Feature, Finding, Gate, ServerView, Severity


class Overrides(Struct, frozen=True, kw_only=True):
    """What the operator decided by code: other gates, other severities, and what is accepted as it is."""

    gate: Mapping[str, Gate] = field(default_factory=dict)
    severity: Mapping[str, Severity] = field(default_factory=dict)
    accept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: Settings) -> Overrides:
        """Take them from the settings, which vouch that each code exists."""
        return cls(gate=settings.gate, severity=settings.severity, accept=frozenset(settings.accept))


NO_OVERRIDES = Overrides()
"""Everything as declared."""


class Effective(Struct, frozen=True):
    """A condition's weight after the server's use of the feature and the operator's decisions were considered.

    ``idle``: it is only informational because nobody is known to use what it concerns.
    """

    relevant: bool
    severity: Severity
    gate: Gate
    accepted: bool = False
    idle: bool = False


def effective(
    kind: ConditionType,
    finding: Finding | None,
    server: ServerView,
    required: Collection[str],
    overrides: Overrides = NO_OVERRIDES,
) -> Effective:
    """Weigh a condition by what the server uses and by what the operator decided.

    The operator's severity and gate stand in for the declared ones. A required code always has that weight. A
    feature known to be unused makes its conditions irrelevant, or informational where they are declared so; for
    those, an unknown use counts as unused, since a fault that concerns nobody must not page. A finding may say that
    its question does not arise. It may lower the result; it raises it only from launch to serving, for a fault that
    surfaces after the server answers; and it leaves a gate alone that the operator chose. What is accepted is
    informational and gates nothing, whatever else is said of it; so is what concerns the GPUs of this machine, where
    the server would run on another one.
    """
    severity = overrides.severity.get(kind.code, kind.severity)
    gate = overrides.gate.get(kind.code, kind.gate)
    relevant, idle = True, False
    if kind.uses is not None and kind.code not in required:
        used = server.features.get(kind.uses)
        if kind.info_when_unused:
            idle = used is not True
        elif used is False or (used is None and kind.only_when_used):
            relevant = False
    if finding is not None:
        relevant = relevant and not (finding.irrelevant and kind.code not in required)
        if finding.severity is not None and finding.severity.rank < severity.rank:
            severity = finding.severity
        if kind.code not in overrides.gate:
            gate = _gate_of(finding, kind, gate)
    accepted = kind.code in overrides.accept
    if idle or accepted or (server.far and kind.uses is Feature.GPU):
        severity, gate = Severity.INFO, Gate.NEVER
    return Effective(relevant, severity, gate, accepted, idle)


def _gate_of(finding: Finding, kind: ConditionType, declared: Gate) -> Gate:
    if finding.gate is Gate.NEVER:
        return Gate.NEVER
    if finding.gate is Gate.SERVING and kind.deferred and declared is Gate.LAUNCH:
        return Gate.SERVING
    return declared
