"""The store: folding, the life of facts, history."""

from __future__ import annotations

from typing import Any

from sidecar.model import Answer, Gate, Outcome, Snapshot, Status
from sidecar.store import Store
from tests.builders import EPOCH, HOST, FakeClock, attempt, condition, probe, server_probe, view


def make(clock: FakeClock, *probes: Any) -> Store:
    return Store(
        probes,
        standing=HOST,
        settings=None,
        required=(),
        clock=clock,
        lifetimes={p.name: 3 * p.interval + p.deadline for p in probes},
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
