"""Facts in, conditions and verdict out.

The order matters: each probe judges its own facts, hold-off settles what is published, relevance weighs
it, a deeper cause suppresses what it explains, and only what is then still active can gate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.catalog import COMMON_REASONS, FIRST_ROUND
from sidecar.conditions.hold import Track, settle
from sidecar.conditions.relevance import effective
from sidecar.model import (
    FAILURES,
    Answer,
    Condition,
    ConditionType,
    Finding,
    Gate,
    Outcome,
    Probe,
    Result,
    ServerView,
    Standing,
    Status,
    Verdict,
    World,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one judgement hands to the next.

    ``answering``: True once the server's address accepted a connection, False after a refusal that
    proves something, None while neither happened. ``process`` is the server process it was said of.
    """

    tracks: Mapping[str, Track] = field(default_factory=dict)
    answering: bool | None = None
    process: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of one judgement. ``faults`` are exceptions of a probe's judge: bugs, to be logged."""

    conditions: Mapping[str, Condition]
    verdict: Verdict
    server: ServerView
    memory: Memory
    faults: tuple[tuple[str, Exception], ...] = ()


def judge(
    probes: Sequence[Probe[Any]],
    results: Mapping[str, Result[Any]],
    *,
    standing: Standing,
    settings: Any,
    required: Collection[str],
    memory: Memory,
    now: float,
) -> Judgement:
    """Judge everything that is known at ``now`` (epoch seconds)."""
    server = _server_view(probes, results)
    world = World(standing=standing, server=server, now=now, settings=settings)
    conditions: dict[str, Condition] = {}
    tracks: dict[str, Track] = {}
    faults: list[tuple[str, Exception]] = []
    for probe in probes:
        result = results[probe.name]
        try:
            findings = {finding.code: finding for finding in probe.judge(result, world)}
        except Exception as error:  # noqa: BLE001 - one probe's bug must not silence the others
            faults.append((probe.name, error))
            findings = {
                kind.code: _unknown(kind.code, "judge-failed", "The judgement failed; this is a bug of the sidecar.")
                for kind in probe.conditions
            }
        for kind in probe.conditions:
            finding = findings.get(kind.code) or _unknown(kind.code, *_why_unknown(result))
            track = settle(
                memory.tracks.get(kind.code),
                finding,
                hold=kind.hold,
                round_=result.rounds,
                informative=finding.from_outcome or result.outcome not in FAILURES,
                now=now,
            )
            tracks[kind.code] = track
            conditions[kind.code] = _condition(kind, track, server, required)
    conditions = _suppress(conditions)
    answering, process = _answering(memory, server)
    return Judgement(
        conditions=conditions,
        verdict=_verdict(conditions.values(), answering, results),
        server=server,
        memory=Memory(tracks=tracks, answering=answering, process=process),
        faults=tuple(faults),
    )


def _server_view(probes: Iterable[Probe[Any]], results: Mapping[str, Result[Any]]) -> ServerView:
    for probe in probes:
        if probe.view is not None and (facts := results[probe.name].facts) is not None:
            return probe.view(facts)
    return ServerView()


def _unknown(code: str, reason: str, message: str) -> Finding:
    return Finding(code=code, status=Status.UNKNOWN, reason=reason, message=message)


def _why_unknown(result: Result[Any]) -> tuple[str, str]:
    """The token and sentence for a condition that its probe said nothing about."""
    match result.outcome:
        case Outcome.PENDING:
            return "pending", "The probe has not finished its first round."
        case Outcome.OK if result.facts is None:
            return "expired", "What was known is too old."
        case Outcome.OK:
            return "not-judged", "The probe's facts do not tell."
        case outcome:
            return f"probe-{outcome.value}", result.detail or f"The probe's last run ended as {outcome.value}."


def _condition(kind: ConditionType, track: Track, server: ServerView, required: Collection[str]) -> Condition:
    finding = track.finding
    weight = effective(kind, finding, server, required)
    return Condition(
        code=kind.code,
        status=finding.status,
        severity=weight.severity,
        gate=weight.gate,
        reason=finding.reason,
        message=finding.message or _meaning(kind, finding),
        remedy=finding.remedy or kind.remedy,
        evidence=finding.evidence,
        since=track.since,
        gpus=finding.gpus,
        explained_by=tuple(
            code for code in kind.depends_on if finding.explained_by is None or code in finding.explained_by
        ),
        relevant=weight.relevant,
    )


def _meaning(kind: ConditionType, finding: Finding) -> str:
    """What the finding's token means, for one that comes without a sentence of its own."""
    reason = finding.reason or ""
    meaning = kind.reasons.get(reason) or COMMON_REASONS.get(reason) or ""
    return meaning[:1].upper() + meaning[1:].rstrip(".") + "." if meaning else ""


def _suppress(conditions: Mapping[str, Condition]) -> dict[str, Condition]:
    """Mark each condition that another active one explains with the root of that chain."""

    def holds(code: str) -> bool:
        condition = conditions.get(code)
        return condition is not None and condition.status is Status.TRUE and condition.relevant

    def explains(cause: str, code: str) -> bool:
        # A fault of one GPU does not explain what another one suffers from.
        named, suffering = conditions[cause].gpus, conditions[code].gpus
        return not named or not suffering or set(suffering) <= set(named)

    def root(code: str, seen: frozenset[str]) -> str:
        for cause in conditions[code].explained_by:
            if cause not in seen and holds(cause) and explains(cause, code):
                return root(cause, seen | {cause})
        return code

    out: dict[str, Condition] = {}
    for code, condition in conditions.items():
        cause = root(code, frozenset({code})) if holds(code) else code
        out[code] = condition if cause == code else replace(condition, consequence_of=cause)
    return out


def _answering(memory: Memory, server: ServerView) -> tuple[bool | None, str | None]:
    """Fold the server's last reaction into whether it answers.

    It ends with a refusal or with a new server process, not with a time-out: a server under load that
    misses one connection has still passed its launch.
    """
    new_process = server.process is not None and memory.process is not None and server.process != memory.process
    process = server.process or memory.process
    match server.answer:
        case Answer.ACCEPTED:
            return True, process
        case Answer.REFUSED:
            return (False if server.refusal_is_proof else None), process
        case _:
            return (None if new_process else memory.answering), process


def _verdict(conditions: Iterable[Condition], answering: bool | None, results: Mapping[str, Result[Any]]) -> Verdict:
    first = results.get(FIRST_ROUND)
    pending = first is not None and first.outcome is Outcome.PENDING
    blockers = tuple(
        condition.code
        for condition in conditions
        if condition.active
        and (condition.gate is Gate.SERVING or (condition.gate is Gate.LAUNCH and answering is False))
    )
    return Verdict(ready=not pending and not blockers, pending=pending, blockers=() if pending else blockers)
