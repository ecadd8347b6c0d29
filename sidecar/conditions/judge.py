"""Facts in, conditions and verdict out.

The order matters: each probe judges its own facts, hold-off settles what is published, relevance weighs
it, a deeper cause suppresses what it explains, and only what is then still active can gate.

Two rules keep "one cause" honest over time and weight. What a cause explained does not become a fault of its own
because the cause ended: until its probe looks again, nobody knows. And a fault of something that nobody is known to
use weighs as much as what it breaks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from sidecar.catalog import CAUSE_ENDED, COMMON_REASONS, FIRST_ROUND
from sidecar.conditions.causes import holds, lend_weight, suppress
from sidecar.conditions.hold import Track, settle
from sidecar.conditions.relevance import NO_OVERRIDES, Effective, Overrides, effective
from sidecar.model import (
    FAILURES,
    Answer,
    Condition,
    ConditionType,
    Drift,
    Feature,
    Finding,
    Gate,
    Observed,
    Outcome,
    Probe,
    Result,
    ServerView,
    Standing,
    Status,
    Verdict,
    World,
)


class Memory(Struct, frozen=True, kw_only=True):
    """What one judgement hands to the next.

    ``answering``: True once the server's address accepted a connection, False after a refusal that
    proves something, None while neither happened. ``process`` is the server process it was said of.
    ``explained`` maps each code that was last seen as a consequence to the last round that brought its probe
    something new by then.
    """

    tracks: Mapping[str, Track] = field(default_factory=dict)
    explained: Mapping[str, int] = field(default_factory=dict)
    answering: bool | None = None
    process: str | None = None


class Judgement(Struct, frozen=True, kw_only=True):
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
    overrides: Overrides = NO_OVERRIDES,
    environment: Mapping[str, Observed] = MappingProxyType({}),
    drifts: tuple[Drift, ...] = (),
) -> Judgement:
    """Judge everything that is known at ``now`` (epoch seconds).

    ``environment`` is what all probes together know of its items, ``drifts`` what of it is not as the baseline wants.
    """
    faults: list[tuple[str, Exception]] = []
    server = _server_view(probes, results, faults)
    world = World(standing=standing, server=server, now=now, settings=settings, environment=environment, drifts=drifts)
    scale = _Scale(server=server, required=frozenset(required), overrides=overrides)
    tracks: dict[str, Track] = {}
    latest: dict[str, Finding] = {}
    kinds: dict[str, ConditionType] = {}
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
            kinds[kind.code], latest[kind.code] = kind, finding
            tracks[kind.code] = settle(
                memory.tracks.get(kind.code),
                finding,
                hold=kind.hold,
                round_=result.rounds,
                informative=finding.from_outcome or result.outcome not in FAILURES,
                now=now,
            )
    conditions = _explain(kinds, tracks, scale)
    while ended := _no_longer_explained(conditions, tracks, latest, memory):
        for code in ended:
            tracks[code] = _after_its_cause(tracks[code], latest[code], memory.tracks.get(code), now)
        conditions = _explain(kinds, tracks, scale)
    answering, process = _answering(memory, server)
    return Judgement(
        conditions=conditions,
        verdict=_verdict(conditions.values(), answering, results),
        server=server,
        memory=Memory(
            tracks=tracks,
            explained=_explained(conditions, tracks, memory),
            answering=answering,
            process=process,
        ),
        faults=tuple(faults),
    )


def _server_view(
    probes: Iterable[Probe[Any]], results: Mapping[str, Result[Any]], faults: list[tuple[str, Exception]]
) -> ServerView:
    server = ServerView()
    told: dict[Feature, bool] = {}
    for probe in probes:
        facts = results[probe.name].facts
        if facts is None:
            continue
        try:
            if probe.view is not None:
                server = probe.view(facts)
            if probe.uses is not None:
                told |= probe.uses(facts)
        except Exception as error:  # noqa: BLE001 - as for a judge; what it would have said is not known
            faults.append((probe.name, error))
    # What the server shows or its flags say outweighs what another probe concludes.
    return replace(server, features={**told, **server.features}) if told else server


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


class _Scale(Struct, frozen=True, kw_only=True):
    """What decides how much each condition weighs."""

    server: ServerView
    required: frozenset[str]
    overrides: Overrides

    def weigh(self, kind: ConditionType, finding: Finding) -> Effective:
        """Weigh a condition as it is used."""
        return effective(kind, finding, self.server, self.required, self.overrides)

    def weigh_used(self, kind: ConditionType, finding: Finding) -> Effective:
        """Weigh it as if what it concerns were used."""
        return effective(kind, finding, self.server, {kind.code}, self.overrides)


def _explain(kinds: Mapping[str, ConditionType], tracks: Mapping[str, Track], scale: _Scale) -> dict[str, Condition]:
    """Weigh everything that is published, and find the causes."""
    weights = {code: scale.weigh(kind, tracks[code].finding) for code, kind in kinds.items()}
    conditions = {code: _condition(kind, tracks[code], weights[code]) for code, kind in kinds.items()}
    full = {
        code: scale.weigh_used(kinds[code], tracks[code].finding) for code, weight in weights.items() if weight.idle
    }
    return suppress(lend_weight(conditions, full))


def _no_longer_explained(
    conditions: Mapping[str, Condition],
    tracks: Mapping[str, Track],
    latest: Mapping[str, Finding],
    memory: Memory,
) -> list[str]:
    """Name what is a root only because its cause ended: its own probe has not found it since."""
    return [
        code
        for code, condition in conditions.items()
        if holds(condition)
        and condition.consequence_of is None
        and code in memory.explained
        and (latest[code].status is not Status.TRUE or tracks[code].informed <= memory.explained[code])
    ]


def _after_its_cause(track: Track, latest: Finding, before: Track | None, now: float) -> Track:
    """Publish what the probe says by now instead of what was held; unknown if it has not looked since."""
    if latest.status is Status.TRUE:
        latest = _unknown(latest.code, CAUSE_ENDED, "")
    same = before is not None and before.finding.status is latest.status
    since = before.since if same and before is not None else now
    return Track(finding=latest, since=since, round=track.round, informed=track.informed)


def _explained(conditions: Mapping[str, Condition], tracks: Mapping[str, Track], memory: Memory) -> Mapping[str, int]:
    """Remember what is explained now, and what still waits for its probe after its cause ended."""
    now = {code: tracks[code].informed for code, one in conditions.items() if one.consequence_of is not None}
    waiting = {
        code: round_
        for code, round_ in memory.explained.items()
        if code in tracks and tracks[code].finding.reason == CAUSE_ENDED
    }
    return waiting | now


def _condition(kind: ConditionType, track: Track, weight: Effective) -> Condition:
    finding = track.finding
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
        explained_by=(
            *kind.moot_under,
            *(code for code in kind.depends_on if finding.explained_by is None or code in finding.explained_by),
        ),
        sglang_says=finding.sglang_says,
        relevant=weight.relevant,
        accepted=weight.accepted,
    )


def _meaning(kind: ConditionType, finding: Finding) -> str:
    """What the finding's token means, for one that comes without a sentence of its own."""
    reason = finding.reason or ""
    meaning = kind.reasons.get(reason) or COMMON_REASONS.get(reason) or ""
    return meaning[:1].upper() + meaning[1:].rstrip(".") + "." if meaning else ""


def _answering(memory: Memory, server: ServerView) -> tuple[bool | None, str | None]:
    """Fold the server's last reaction into whether it answers.

    It ends with a refusal or with a new server process, not with a time-out: a server under load that
    misses one connection has still passed its launch. That nobody serves is proven no longer than facts of the
    server live: what is not looked at any more may have started.
    """
    new_process = server.process is not None and memory.process is not None and server.process != memory.process
    process = server.process or memory.process
    match server.answer:
        case Answer.ACCEPTED:
            return True, process
        case Answer.REFUSED:
            return (False if server.refusal_is_proof else None), process
        case None:
            return (None if new_process else memory.answering or None), process
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
