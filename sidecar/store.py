"""The one place that holds the current snapshot. Single-threaded by design: the event loop's alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from sidecar.conditions import NO_OVERRIDES, Memory, Overrides, judge
from sidecar.drift import advance, compare, resume
from sidecar.model import (
    FAILURES,
    Attempt,
    Baseline,
    Clock,
    Condition,
    Demo,
    Known,
    Observed,
    Outcome,
    Probe,
    Result,
    Snapshot,
    Standing,
    Transition,
)

HISTORY = 200
"""Transitions kept for the report: a day of a pod that changes its mind every few minutes."""

Listener = Callable[[Snapshot, Snapshot], None]


class Store:
    """Folds attempts into results, has them judged, and publishes whole snapshots."""

    def __init__(
        self,
        probes: Sequence[Probe[Any]],
        *,
        standing: Standing,
        settings: Any,
        required: Collection[str],
        clock: Clock,
        lifetimes: Mapping[str, float],
        overrides: Overrides = NO_OVERRIDES,
        observe: Callable[[Mapping[str, Result[Any]]], Mapping[str, Observed]] = lambda _results: {},
        demo: Demo | None = None,
        on_fault: Callable[[str, Exception], None] = lambda _probe, _error: None,
    ) -> None:
        """``lifetimes``: seconds that a probe's facts live after its last success.

        ``observe`` gives what all results together know of the environment's items. ``demo`` says what is shown
        instead of this machine.
        """
        self._probes = tuple(probes)
        self._standing = standing
        self._settings = settings
        self._required = frozenset(required)
        self._clock = clock
        self._lifetimes = dict(lifetimes)
        self._overrides = overrides
        self._observe = observe
        self._demo = demo
        self._on_fault = on_fault
        self._known = Known()
        self._memory = Memory()
        self._faulty: frozenset[tuple[str, str]] = frozenset()
        self._results: dict[str, Result[Any]] = {probe.name: Result(probe=probe.name) for probe in probes}
        self._history: deque[Transition] = deque(maxlen=HISTORY)
        self._listeners: list[Listener] = []
        self._ready_transitions = {True: 0, False: 0}
        self._condition_transitions = {True: 0, False: 0}
        self._snapshot = self._judge(generation=1)

    @property
    def snapshot(self) -> Snapshot:
        """The current snapshot; never None, pending before the first result."""
        return self._snapshot

    def restore(self, known: Known, stuck: Mapping[str, Result[Any]]) -> None:
        """Go on from what was known before a restart, by probes that are still there. Only before the first result."""
        self._known = known
        self._results |= {name: result for name, result in stuck.items() if name in self._results}
        self._snapshot = self._judge(generation=self._snapshot.generation + 1)

    def resume(self, known: Known) -> Snapshot:
        """Go on from what was known before a restart although there are results by now."""
        self._known = resume(known, self._known, self._clock.time())
        return self._advance()

    def subscribe(self, listener: Listener) -> None:
        """Have ``listener(before, after)`` called after each publication."""
        self._listeners.append(listener)

    def publish(self, attempt: Attempt[Any]) -> Snapshot:
        """Fold one probe run in and publish the snapshot that follows from it."""
        self._results[attempt.probe] = self._fold(self._results[attempt.probe], attempt)
        return self._advance()

    def refresh(self) -> Snapshot:
        """Judge again, because time passed: facts whose life is over become unknown."""
        return self._advance()

    def next_expiry(self) -> float | None:
        """Monotonic seconds at which the next facts expire, or None."""
        times = [result.expires_at for result in self._results.values() if result.expires_at is not None]
        return min(times, default=None)

    def _fold(self, before: Result[Any], attempt: Attempt[Any]) -> Result[Any]:
        now = self._clock.time()
        runs = {**before.runs, attempt.outcome: before.runs.get(attempt.outcome, 0) + 1}
        common = replace(
            before,
            outcome=attempt.outcome,
            detail=attempt.detail,
            where=attempt.where,
            stuck=attempt.stuck,
            started_at=attempt.started_at,
            duration=attempt.duration,
            rounds=before.rounds + 1,
            runs=MappingProxyType(runs),
        )
        if attempt.outcome in FAILURES:
            # Facts are kept until they expire: one missed round proves nothing about them.
            return replace(common, failing_since=before.failing_since or attempt.started_at)
        if attempt.outcome is Outcome.SKIPPED:
            return replace(common, facts=None, expires_at=None, failing_since=None, last_success_at=now)
        return replace(
            common,
            facts=attempt.facts,
            last_success_at=now,
            expires_at=self._clock.monotonic() + self._lifetimes[attempt.probe],
            failing_since=None,
        )

    def _advance(self) -> Snapshot:
        # Not by the clock on the wall: a step of it would age facts, or keep them young for ever.
        now = self._clock.monotonic()
        for name, result in self._results.items():
            if result.expires_at is not None and result.expires_at <= now:
                self._results[name] = replace(result, facts=None, expires_at=None)
        before = self._snapshot
        self._snapshot = self._judge(generation=before.generation + 1)
        for listener in self._listeners:
            listener(before, self._snapshot)
        return self._snapshot

    def _judge(self, generation: int) -> Snapshot:
        now = self._clock.time()
        environment = self._observe(self._results)
        self._known = advance(self._known, environment, now)
        baseline = self._baseline()
        drifts = () if baseline is None else compare(baseline.items, environment)
        judgement = judge(
            self._probes,
            self._results,
            standing=self._standing,
            settings=self._settings,
            required=self._required,
            memory=self._memory,
            now=now,
            overrides=self._overrides,
            environment=environment,
            drifts=drifts,
        )
        self._memory = judgement.memory
        self._tell_faults(judgement.faults)
        if generation > 1:
            self._record(now, self._snapshot.conditions, judgement.conditions)
            was, is_ = self._snapshot.verdict, judgement.verdict
            if was.ready != is_.ready:
                self._ready_transitions[is_.ready] += 1
            if (was.pending, was.ready) != (is_.pending, is_.ready):
                names = {True: "ready", False: "not-ready"}
                self._history.append(
                    Transition(
                        at=now,
                        subject="ready",
                        before="pending" if was.pending else names[was.ready],
                        after=names[is_.ready],
                        reason=", ".join(is_.blockers) or None,
                    )
                )
        return Snapshot(
            generation=generation,
            taken_at=now,
            standing=self._standing,
            server=judgement.server,
            results=MappingProxyType(dict(self._results)),
            conditions=MappingProxyType(dict(judgement.conditions)),
            verdict=judgement.verdict,
            history=tuple(self._history),
            ready_transitions=MappingProxyType(dict(self._ready_transitions)),
            condition_transitions=MappingProxyType(dict(self._condition_transitions)),
            environment=MappingProxyType(dict(environment)),
            baseline=baseline,
            drifts=drifts,
            known=self._known,
            demo=self._demo,
        )

    def _baseline(self) -> Baseline | None:
        for probe in self._probes:
            if probe.baseline is not None and (facts := self._results[probe.name].facts) is not None:
                return probe.baseline(facts)
        return None

    def _tell_faults(self, faults: Sequence[tuple[str, Exception]]) -> None:
        """Tell of each fault when it begins, not each time it is met again."""
        now = {(probe, repr(error)): error for probe, error in faults}
        for (probe, text), error in now.items():
            if (probe, text) not in self._faulty:
                self._on_fault(probe, error)
        self._faulty = frozenset(now)

    def _record(self, now: float, before: Mapping[str, Condition], after: Mapping[str, Condition]) -> None:
        for code, condition in after.items():
            if (words := change(before[code], condition)) is not None:
                was, is_ = words
                self._history.append(Transition(at=now, subject=code, before=was, after=is_, reason=condition.reason))
                if before[code].active is not condition.active:
                    self._condition_transitions[condition.active] += 1


def change(before: Condition, after: Condition) -> tuple[str, str] | None:
    """Put a change that people want to see into two words; None where there is none.

    Such are the beginning and the end of being active, and another severity while it lasts: what was only
    informational may page from then on.
    """
    was, is_ = label(before), label(after)
    if was == is_ == "active" and before.severity is not after.severity:
        return before.severity.value, after.severity.value
    return (was, is_) if was != is_ and "active" in (was, is_) else None


def label(condition: Condition) -> str:
    """One word for where a condition stands: active, consequence, irrelevant, false or unknown."""
    if condition.active:
        return "active"
    if not condition.relevant:
        return "irrelevant"
    if condition.consequence_of is not None:
        return "consequence"
    return condition.status.value
