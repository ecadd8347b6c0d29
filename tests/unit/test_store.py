"""The store: folding, the life of facts, history."""

from __future__ import annotations

from typing import Any

from sidecar.conditions import Overrides
from sidecar.model import Answer, Feature, Gate, Outcome, Snapshot, Status
from sidecar.store import HISTORY, Store
from tests.builders import EPOCH, HOST, FakeClock, attempt, condition, probe, server_probe, view


def make(clock: FakeClock, *probes: Any, **more: Any) -> Store:
    return Store(
        probes,
        standing=HOST,
        settings=None,
        required=(),
        clock=clock,
        lifetimes={p.name: 3 * p.interval + p.deadline for p in probes},
        **more,
    )


def test_every_publication_is_a_new_snapshot(clock: FakeClock) -> None:
    """A snapshot never changes; each publication makes a new one with the next generation."""
    store = make(clock, probe("driver", condition("a")))
    first = store.snapshot
    second = store.publish(attempt("driver", {"a": False}))
    assert second.generation == first.generation + 1
    assert first.results["driver"].outcome is Outcome.PENDING
    assert second.results["driver"].outcome is Outcome.OK


def test_facts_live_three_intervals_and_a_deadline(clock: FakeClock) -> None:
    """A stale result decays to unknown, never to healthy."""
    store = make(clock, probe("driver", condition("a")))
    store.publish(attempt("driver", {"a": False}))
    assert store.next_expiry() == clock.monotonic() + 35
    clock.now = EPOCH + 34.9
    assert store.refresh().conditions["a"].status is Status.FALSE
    clock.now = EPOCH + 35
    assert store.refresh().conditions["a"].status is Status.UNKNOWN
    assert store.next_expiry() is None


def test_a_step_of_the_wall_clock_ages_nothing() -> None:
    """Facts live by the monotonic clock: a clock set an hour ahead or back changes no verdict."""

    class Stepped(FakeClock):
        step = 0.0

        def time(self) -> float:
            return self.now + self.step

    clock = Stepped()
    store = make(clock, probe("driver", condition("a")))
    store.publish(attempt("driver", {"a": True}))
    for clock.step in (3600.0, -3600.0):
        assert store.refresh().conditions["a"].status is Status.TRUE
    clock.now += 35
    assert store.refresh().conditions["a"].status is Status.UNKNOWN


def test_a_step_of_the_wall_clock_leaves_no_mark(clock: FakeClock) -> None:
    """Set back and forth while conditions come and go, it changes when things are said to be, not what is."""

    class Stepped(FakeClock):
        def monotonic(self) -> float:
            return self.beat

        beat = 0.0

    clock = Stepped()
    store = make(clock, probe("driver", condition("a")))
    for beat, (wall, found) in enumerate([(0, False), (86400, True), (-86400, True), (1e9, False), (5, False)]):
        clock.beat, clock.now = 10.0 * beat, EPOCH + wall
        snapshot = store.publish(attempt("driver", {"a": found}, started_at=clock.now))
        assert snapshot.verdict.ready is not found
    assert [(one.subject, one.after, one.at - EPOCH) for one in store.snapshot.history] == [
        ("ready", "ready", 0),
        ("a", "active", 86400),
        ("ready", "not-ready", 86400),
        ("a", "false", 1e9),
        ("ready", "ready", 1e9),
    ]


def test_a_failed_round_keeps_the_facts_of_the_last_good_one(clock: FakeClock) -> None:
    """One missed round does not hide what is still known, but is counted and dated."""
    store = make(clock, probe("driver", condition("a")))
    store.publish(attempt("driver", {"a": True}))
    store.publish(attempt("driver", None, Outcome.TIMEOUT, started_at=EPOCH + 10, detail="hung"))
    result = store.publish(attempt("driver", None, Outcome.TIMEOUT, started_at=EPOCH + 20)).results["driver"]
    assert store.snapshot.conditions["a"].status is Status.TRUE
    assert result.failing_since == EPOCH + 10
    assert result.runs == {Outcome.OK: 1, Outcome.TIMEOUT: 2}
    assert store.publish(attempt("driver", {"a": True})).results["driver"].failing_since is None


def test_a_skipped_probe_has_no_facts(clock: FakeClock) -> None:
    """A question that does not arise any more leaves nothing behind."""
    store = make(clock, probe("driver", condition("a")))
    store.publish(attempt("driver", {"a": True}))
    snapshot = store.publish(attempt("driver", None, Outcome.SKIPPED))
    assert snapshot.results["driver"].facts is None
    assert snapshot.conditions["a"].status is Status.UNKNOWN


def test_history_has_one_line_per_change(clock: FakeClock) -> None:
    """Activation, clearing and readiness are recorded once each, with their reason."""
    store = make(clock, probe("driver", condition("a")), server_probe())
    store.publish(attempt("driver", {"a": False}))
    for _ in range(3):
        store.publish(attempt("driver", {"a": True}))
    store.publish(attempt("driver", {"a": False}))
    assert [(t.subject, t.before, t.after) for t in store.snapshot.history] == [
        ("ready", "pending", "ready"),
        ("a", "false", "active"),
        ("ready", "ready", "not-ready"),
        ("a", "active", "false"),
        ("ready", "not-ready", "ready"),
    ]
    assert store.snapshot.ready_transitions == {True: 2, False: 1}
    assert store.snapshot.condition_transitions == {True: 1, False: 1}


def test_listeners_see_before_and_after(clock: FakeClock) -> None:
    """Whoever subscribed is handed both snapshots of each publication."""
    store = make(clock, probe("driver", condition("a")))
    seen: list[tuple[Snapshot, Snapshot]] = []
    store.subscribe(lambda before, after: seen.append((before, after)))
    store.publish(attempt("driver", {"a": True}))
    assert [(b.generation, a.generation) for b, a in seen] == [(1, 2)]


def test_an_answering_server_lifts_a_launch_gate_and_its_loss_brings_it_back(clock: FakeClock) -> None:
    """The launch rule has no latch: it follows the server."""
    store = make(clock, probe("driver", condition("a", gate=Gate.LAUNCH)), server_probe())
    store.publish(attempt("driver", {"a": True}))
    readiness = [
        store.publish(attempt("server", {"view": view(answer)})).verdict.ready
        for answer in (Answer.REFUSED, Answer.ACCEPTED, Answer.TIMEOUT, Answer.REFUSED)
    ]
    assert readiness == [False, True, True, False]


def test_an_accepted_condition_is_active_and_leaves_the_pod_ready(clock: FakeClock) -> None:
    """What the operator decided reaches every publication."""
    store = make(clock, probe("driver", condition("a")), overrides=Overrides(accept=frozenset({"a"})))
    snapshot = store.publish(attempt("driver", {"a": True}))
    assert (snapshot.conditions["a"].active, snapshot.verdict.ready) == (True, True)


def test_a_start_that_ends_unready_is_in_the_history_and_no_transition(clock: FakeClock) -> None:
    """From pending to not ready the answer stays 503, which nobody counts but everybody wants to see dated."""
    store = make(clock, probe("driver", condition("a")))
    snapshot = store.publish(attempt("driver", {"a": True}))
    assert [(t.subject, t.before, t.after, t.reason) for t in snapshot.history] == [
        ("a", "unknown", "active", None),
        ("ready", "pending", "not-ready", "a"),
    ]
    assert snapshot.ready_transitions == {True: 0, False: 0}


def test_another_severity_is_a_change_of_its_own(clock: FakeClock) -> None:
    """What was informational pages from the moment a server is seen to need it, and history says when that was."""
    kind = condition("a", uses=Feature.FLASHINFER, info_when_unused=True)
    store = make(clock, probe("driver", kind), server_probe())
    store.publish(attempt("driver", {"a": True}))
    store.publish(attempt("server", {"view": view(features={Feature.FLASHINFER: True})}))
    snapshot = store.publish(attempt("server", {"view": view(features={Feature.FLASHINFER: True})}))
    changes = [(t.before, t.after) for t in snapshot.history if t.subject == "a"]
    assert changes == [("unknown", "active"), ("info", "critical")]
    assert snapshot.condition_transitions == {True: 1, False: 0}, "it has been active all along"


def test_history_is_bounded_and_transitions_are_counted_on(clock: FakeClock) -> None:
    """A pod that never settles keeps its latest changes only, while the counters tell of all."""
    store = make(clock, probe("driver", condition("a")))
    for number in range(HISTORY + 1):
        store.publish(attempt("driver", {"a": number % 2 == 0}))
    snapshot = store.snapshot
    assert len(snapshot.history) == HISTORY
    # It begins unready, which is no transition from pending, and each round after the first is one.
    assert snapshot.ready_transitions == {True: HISTORY // 2, False: HISTORY // 2}
    assert snapshot.condition_transitions == {True: HISTORY // 2 + 1, False: HISTORY // 2}


def test_a_lasting_bug_is_told_of_once(clock: FakeClock) -> None:
    """A judge that fails at each publication is reported when it begins to, not each time."""
    told: list[str] = []

    def judge(result: Any, _world: Any) -> Any:
        if result.facts is not None and result.facts["broken"]:
            raise RuntimeError("bug")
        return ()

    store = make(clock, probe("driver", condition("a"), judge=judge), on_fault=lambda name, _error: told.append(name))
    for broken in (True, True, False, True, True):
        store.publish(attempt("driver", {"broken": broken}))
    assert told == ["driver", "driver"]
