"""What no combination of facts may do to the verdict: properties of the judge over the real catalogue.

Every probe keeps its declarations and is told what to find, so that any mixture of findings, outcomes and servers can
be tried, also those that no probe gives today. How many were tried is printed at the end.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct, field
from msgspec.structs import replace

from sidecar.catalog import Catalog, build, discover
from sidecar.conditions import NO_OVERRIDES, Judgement, Memory, Overrides, judge
from sidecar.model import (
    FAILURES,
    Answer,
    Attempt,
    Condition,
    Feature,
    Finding,
    Gate,
    Outcome,
    Probe,
    Result,
    ServerView,
    Severity,
    Snapshot,
    Status,
)
from sidecar.readiness import readyz
from sidecar.report import Level, level
from sidecar.store import Store
from tests.builders import EPOCH, HOST, FakeClock

T, F, U = Status.TRUE, Status.FALSE, Status.UNKNOWN
GPUS = (("0", "GPU-0"), ("1", "GPU-1"))
LIFE = 100
"""Seconds that facts live here."""


class Told(Struct, frozen=True, kw_only=True):
    """Facts of a probe that finds what it is told to."""

    findings: Mapping[str, Finding] = field(default_factory=dict)
    view: ServerView = field(default_factory=ServerView)


def _obedient(probe: Probe[Any]) -> Probe[Told]:
    def find(result: Result[Told], _world: Any) -> Iterable[Finding]:
        return () if result.facts is None else result.facts.findings.values()

    view = None if probe.view is None else lambda facts: facts.view
    return replace(probe, judge=find, view=view, uses=None, baseline=None)


CATALOG: Catalog = build(map(_obedient, discover()))
KINDS = CATALOG.conditions
OWNED = {probe.name: tuple(kind.code for kind in probe.conditions) for probe in CATALOG.probes}
SERVER = next(probe.name for probe in CATALOG.probes if probe.view is not None)

# -- how many -----------------------------------------------------------------------------------------

_tried: Counter[str] = Counter()


def counted(test: Callable[..., None]) -> Callable[..., None]:
    """Count each example that a property is tried with."""

    @functools.wraps(test)
    def run(*args: Any, **more: Any) -> None:
        _tried[test.__name__] += 1
        test(*args, **more)

    return run


@pytest.fixture(scope="module", autouse=True)
def _tell_how_many(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        reporter = request.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nproperties of the judge: {_tried.total()} examples of {len(_tried)} properties")


PROFILE = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No deadline: how long one example takes depends on who else uses the machine."""

# -- what is tried ------------------------------------------------------------------------------------


class Telling(Struct, frozen=True, kw_only=True):
    """What is found: some things in detail, and one status of all others."""

    said: Mapping[str, Finding] = field(default_factory=dict)
    others: Status = F

    def __getitem__(self, code: str) -> Finding:
        return self.said.get(code) or Finding(code=code, status=self.others)

    def each(self, change: Callable[[Finding], Finding]) -> Telling:
        """Change every finding."""
        return Telling(said={code: change(self[code]) for code in KINDS})


class Case(Struct, frozen=True, kw_only=True):
    """One state of the world."""

    told: Telling
    outcomes: Mapping[str, Outcome]
    server: ServerView
    required: frozenset[str]
    overrides: Overrides


def _finding(code: str) -> st.SearchStrategy[Finding]:
    causes = KINDS[code].depends_on
    narrowed = st.none() | st.lists(st.sampled_from(causes), unique=True).map(tuple) if causes else st.none()
    return st.builds(
        Finding,
        code=st.just(code),
        status=st.sampled_from([T, T, T, F, U]),
        reason=st.none() | st.sampled_from(sorted(KINDS[code].reasons)),
        gpus=st.sampled_from([(), (), GPUS, GPUS[:1], GPUS[1:]]),
        final=st.booleans(),
        severity=st.none() | st.sampled_from(Severity),
        gate=st.none() | st.sampled_from(Gate),
        irrelevant=st.sampled_from([False, False, False, True]),
        explained_by=narrowed,
    )


FINDINGS = {code: _finding(code) for code in KINDS}
CAUSES = {
    code: st.lists(st.sampled_from(kind.depends_on), max_size=4) for code, kind in KINDS.items() if kind.depends_on
}
CODES = st.sampled_from(sorted(KINDS))
SEVERAL_CODES = st.lists(CODES, max_size=5)
SEVERAL_EXPLAINED = st.lists(st.sampled_from(sorted(CAUSES)), max_size=4)
OTHERS = st.sampled_from([F, F, U, T])
PICKED = st.lists(st.integers(0, 9), max_size=3)
"""Positions in a list of conditions, which may be shorter."""
NOTHING_ODD: dict[str, Outcome] = {}
ODD_OUTCOMES = st.just(NOTHING_ODD) | st.dictionaries(
    st.sampled_from(sorted(OWNED)), st.sampled_from(Outcome), max_size=3
)
FEATURES = st.sampled_from([frozenset(), *(frozenset(codes) for codes in CATALOG.requirable.values())])
GATES, SEVERITIES = st.sampled_from(Gate), st.sampled_from(Severity)
VIEWS = st.builds(
    ServerView,
    answer=st.sampled_from([Answer.REFUSED, Answer.REFUSED, Answer.ACCEPTED, Answer.TIMEOUT, Answer.UNREACHABLE, None]),
    refusal_is_proof=st.sampled_from([True, True, False]),
    process=st.sampled_from([None, "1", "2"]),
    features=st.dictionaries(st.sampled_from(Feature), st.booleans()),
)


@st.composite
def tellings(draw: st.DrawFn) -> Telling:
    """Findings about several conditions, whole chains of causes among them."""
    codes = set(draw(SEVERAL_CODES))
    for code in draw(SEVERAL_EXPLAINED):
        codes |= {code, *draw(CAUSES[code])}
    return Telling(said={code: draw(FINDINGS[code]) for code in sorted(codes)}, others=draw(OTHERS))


TELLINGS = tellings()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any state of the world; what is required, chosen and accepted is among what is found."""
    told = draw(TELLINGS)
    found = sorted(told.said) or sorted(KINDS)

    def pick() -> list[str]:
        return [found[position % len(found)] for position in draw(PICKED)]

    return Case(
        told=told,
        outcomes=draw(ODD_OUTCOMES),
        server=draw(VIEWS),
        required=draw(FEATURES) | frozenset(pick()),
        overrides=Overrides(
            gate={code: draw(GATES) for code in pick()},
            severity={code: draw(SEVERITIES) for code in pick()},
            accept=frozenset(pick()),
        ),
    )


CASES = cases()


def results(case: Case) -> dict[str, Result[Any]]:
    """The probes' results of a case. A failed run leaves the facts of the one before; a skipped one has none."""
    found: dict[str, Result[Any]] = {}
    for name, codes in OWNED.items():
        outcome = case.outcomes.get(name, Outcome.OK)
        facts: Told | None = Told(findings={code: case.told[code] for code in codes}, view=case.server)
        if outcome in (Outcome.PENDING, Outcome.SKIPPED):
            facts = None
        found[name] = Result(probe=name, outcome=outcome, facts=facts, rounds=int(outcome is not Outcome.PENDING))
    return found


def judged(case: Case, *, memory: Memory | None = None, probes: Iterable[Probe[Any]] = CATALOG.probes) -> Judgement:
    """Judge a case."""
    return judge(
        tuple(probes),
        results(case),
        standing=HOST,
        settings=None,
        required=case.required,
        overrides=case.overrides,
        memory=memory or Memory(),
        now=EPOCH,
    )


def holds(condition: Condition) -> bool:
    """Whether it is true and matters."""
    return condition.status is T and condition.relevant


# -- one cause ----------------------------------------------------------------------------------------


@PROFILE
@given(CASES)
@counted
def test_every_failing_chain_has_exactly_one_root_cause(case: Case) -> None:
    """What holds is active, or the consequence of one active condition that it can be traced to, never of itself."""
    conditions = judged(case).conditions
    for code, condition in conditions.items():
        if not holds(condition):
            assert condition.consequence_of is None
            assert not condition.active
            continue
        if condition.active:
            direct = [conditions[cause] for cause in condition.explained_by if holds(conditions[cause])]
            # Only another GPU's fault may stand beside it.
            assert all(cause.gpus and not set(condition.gpus) <= set(cause.gpus) for cause in direct)
            continue
        root = condition.consequence_of
        assert root is not None
        assert root != code
        assert conditions[root].active
        assert root in _upwards(code, conditions)


def _upwards(code: str, conditions: Mapping[str, Condition]) -> set[str]:
    """Every condition that the declarations let explain this one, through others that hold."""
    found: set[str] = set()
    frontier = {code}
    while frontier:
        frontier = {
            cause for one in frontier for cause in conditions[one].explained_by if holds(conditions[cause])
        } - found
        found |= frontier
    return found


IDLE_LINKS = [
    (cause, code) for code, kind in KINDS.items() for cause in kind.depends_on if KINDS[cause].info_when_unused
]


@PROFILE
@given(
    st.sampled_from(IDLE_LINKS), st.none() | st.sampled_from(Severity), st.none() | st.sampled_from(Gate), st.booleans()
)
@counted
def test_nothing_that_matters_hides_behind_what_concerns_nobody(
    link: tuple[str, str], severity: Severity | None, gate: Gate | None, known: bool
) -> None:
    """A cause that is informational only because nobody uses it takes the weight of what it explains, and no more."""
    cause, code = link
    features = {feature: True for feature in Feature if feature is not KINDS[cause].uses}
    if known:
        features |= {feature: False for feature in Feature if feature is KINDS[cause].uses}
    said = Telling(
        said={cause: Finding(code=cause, status=T), code: Finding(code=code, status=T, severity=severity, gate=gate)}
    )
    view = ServerView(answer=Answer.REFUSED, refusal_is_proof=True, features=features)
    judgement = judged(Case(told=said, outcomes={}, server=view, required=frozenset({code}), overrides=Overrides()))
    hidden, root = judgement.conditions[code], judgement.conditions[cause]
    assert hidden.consequence_of == cause
    assert root.severity.rank == min(hidden.severity.rank, KINDS[cause].severity.rank)
    gates = hidden.gate is not Gate.NEVER and KINDS[cause].gate is not Gate.NEVER
    assert judgement.verdict.blockers == ((cause,) if gates else ())


@PROFILE
@given(CASES, st.randoms(use_true_random=False))
@counted
def test_the_order_of_the_probes_means_nothing(case: Case, random: Any) -> None:
    """The same facts give the same conditions in whichever order the probes are asked."""
    shuffled = list(CATALOG.probes)
    random.shuffle(shuffled)
    one, other = judged(case), judged(case, probes=shuffled)
    assert one.conditions == other.conditions
    assert set(one.verdict.blockers) == set(other.verdict.blockers)


# -- readiness ----------------------------------------------------------------------------------------


def _gates(condition: Condition, answering: bool | None) -> bool:
    """The rule in one line, for comparison."""
    return condition.active and condition.gate in (
        {Gate.SERVING, Gate.LAUNCH} if answering is False else {Gate.SERVING}
    )


@PROFILE
@given(CASES)
@counted
def test_ready_means_that_nothing_active_gates(case: Case) -> None:
    """Ready with an active gating condition does not exist, nor not ready without one once the driver was looked at."""
    judgement = judged(case)
    gating = {one.code for one in judgement.conditions.values() if _gates(one, judgement.memory.answering)}
    if judgement.verdict.pending:
        assert case.outcomes.get("driver") is Outcome.PENDING
        assert not judgement.verdict.ready
    else:
        assert judgement.verdict.ready is not bool(gating)
        assert set(judgement.verdict.blockers) == gating


@PROFILE
@given(CASES)
@counted
def test_only_what_may_gate_does(case: Case) -> None:
    """A blocker is true and relevant, and neither its class, the probe nor the operator says that it never gates."""
    judgement = judged(case)
    for code in judgement.verdict.blockers:
        kind, said, chosen = KINDS[code], case.told[code], case.overrides.gate.get(code)
        assert judgement.conditions[code].status is T
        assert judgement.conditions[code].relevant
        assert code not in case.overrides.accept
        assert chosen is not Gate.NEVER
        if chosen is None:
            assert kind.gate is not Gate.NEVER
            assert said.gate is not Gate.NEVER
        if case.server.answer is Answer.ACCEPTED and SERVER not in case.outcomes:
            deferred = kind.deferred and said.gate is Gate.SERVING and chosen is None
            assert deferred or (chosen or kind.gate) is Gate.SERVING


@PROFILE
@given(CASES)
@counted
def test_nothing_unknown_makes_unready(case: Case) -> None:
    """With every finding unknown, whatever is declared, chosen or required, a driver that was looked at is enough."""
    judgement = judged(replace(case, told=case.told.each(lambda said: replace(said, status=U))))
    assert judgement.verdict.ready is not judgement.verdict.pending
    assert not any(one.active for one in judgement.conditions.values())


@PROFILE
@given(CASES)
@counted
def test_what_never_gates_never_does(case: Case) -> None:
    """Of drift and of everything else of that class alone nothing becomes unready, server answering or not."""

    def harmless(said: Finding) -> Finding:
        return said if KINDS[said.code].gate is Gate.NEVER else replace(said, status=F)

    alerts = case.told.each(harmless)
    judgement = judged(replace(case, told=alerts, overrides=replace(case.overrides, gate={})))
    assert judgement.verdict.ready is not judgement.verdict.pending


@PROFILE
@given(TELLINGS, st.lists(VIEWS, min_size=1, max_size=6))
@counted
def test_a_launch_gates_only_between_a_refusal_and_an_answer(told: Telling, views: list[ServerView]) -> None:
    """A launch condition needs proof that nobody serves; an answer takes it away, and a new process starts afresh.

    So does a round in which nobody looked.
    """
    memory = Memory()
    for position, view in enumerate(views):
        case = Case(told=told, outcomes={}, server=view, required=frozenset(), overrides=Overrides())
        judgement = judged(case, memory=memory)
        memory = judgement.memory
        definite = _last_definite(views[: position + 1])
        refused = definite is not None and definite.answer is Answer.REFUSED and definite.refusal_is_proof
        launch = {one.code for one in judgement.conditions.values() if one.active and one.gate is Gate.LAUNCH}
        assert launch & set(judgement.verdict.blockers) == (launch if refused else set())


def _last_definite(views: list[ServerView]) -> ServerView | None:
    """The last acceptance or refusal that is of the process that runs now, as far as processes were seen."""
    for position in reversed(range(len(views))):
        if views[position].answer in (Answer.ACCEPTED, Answer.REFUSED, None):
            return views[position]
        seen = [view.process for view in views[: position + 1] if view.process is not None]
        if len(seen) > 1 and views[position].process is not None and seen[-1] != seen[-2]:
            return None
    return None


@PROFILE
@given(CASES)
@counted
def test_what_is_required_always_matters(case: Case) -> None:
    """A required condition is never irrelevant, and unknown it keeps a check from saying that all is well."""
    judgement = judged(case)
    assert all(judgement.conditions[code].relevant for code in case.required)
    store = _store(required=case.required, overrides=case.overrides)
    _publish_all(store, case)
    weighty = [
        one
        for code in case.required
        if (one := store.snapshot.conditions[code]).status is U and one.severity is not Severity.INFO
    ]
    assert not weighty or level(store.snapshot) is not Level.OK


@PROFILE
@given(CASES)
@counted
def test_the_endpoint_says_what_the_verdict_says(case: Case) -> None:
    """/readyz answers 200 exactly when the verdict is ready, and names each blocker once."""
    store = _store(required=case.required, overrides=case.overrides)
    snapshot = _publish_all(store, case)
    reply = readyz(snapshot, CATALOG, stopping=False, verbose=True)
    assert (reply.status == 200) is snapshot.verdict.ready
    failed = [line.partition("failed: ")[2] for line in reply.text.splitlines() if line.startswith("[-]")]
    named = [code for line in failed for code in line.split(",") if code != "pending"]
    assert sorted(named) == sorted(snapshot.verdict.blockers)


# -- time ---------------------------------------------------------------------------------------------


def _store(
    *, clock: FakeClock | None = None, required: Iterable[str] = (), overrides: Overrides = NO_OVERRIDES
) -> Store:
    return Store(
        CATALOG.probes,
        standing=HOST,
        settings=None,
        required=frozenset(required),
        clock=clock or FakeClock(),
        lifetimes=dict.fromkeys(OWNED, LIFE),
        overrides=overrides,
    )


def _attempt(name: str, told: Telling, view: ServerView, outcome: Outcome = Outcome.OK) -> Attempt[Any]:
    findings = {code: told[code] for code in OWNED[name]}
    facts = Told(findings=findings, view=view) if outcome is Outcome.OK else None
    return Attempt(probe=name, outcome=outcome, started_at=EPOCH, duration=0.0, facts=facts)


def _publish_all(store: Store, case: Case) -> Snapshot:
    for name in OWNED:
        if (outcome := case.outcomes.get(name, Outcome.OK)) is not Outcome.PENDING:
            store.publish(_attempt(name, case.told, case.server, outcome))
    return store.snapshot


def _seen(snapshot: Snapshot) -> object:
    counted = (snapshot.ready_transitions, snapshot.condition_transitions)
    return (snapshot.conditions, snapshot.verdict, snapshot.server, snapshot.history, counted)


def _only(code: str, status: Status, *, final: bool = False) -> Telling:
    """One thing that is found; all others are fine."""
    return Telling(said={code: Finding(code=code, status=status, final=final)})


STATUSES = st.sampled_from([T, F, T, F, U])
SEVERAL_FAILURES = st.lists(st.sampled_from(FAILURES), max_size=2)
LINKS = st.sampled_from(
    sorted(
        (cause, code)
        for code, kind in KINDS.items()
        for cause in kind.depends_on
        if CATALOG.owner[cause] != CATALOG.owner[code]
    )
)
ROUNDS = st.lists(st.tuples(st.sampled_from(sorted(OWNED)), TELLINGS, VIEWS), min_size=1, max_size=5)


@PROFILE
@given(ROUNDS, st.integers(0, LIFE - 1))
@counted
def test_looking_again_changes_nothing(rounds: list[tuple[str, Telling, ServerView]], passed: int) -> None:
    """Without a new round only the snapshot's number and time change, however often and late it is judged again."""
    clock = FakeClock()
    store = _store(clock=clock)
    for name, told, view in rounds:
        store.publish(_attempt(name, told, view))
    before = store.snapshot
    clock.now += passed
    for _ in range(3):
        after = store.refresh()
    assert _seen(after) == _seen(before)
    assert after.generation == before.generation + 3


@PROFILE
@given(ROUNDS)
@counted
def test_what_nobody_renews_is_unknown(rounds: list[tuple[str, Telling, ServerView]]) -> None:
    """When all facts are too old nothing is active, nothing gates, and nothing is judged fine either."""
    clock = FakeClock()
    store = _store(clock=clock)
    for name, told, view in [*rounds, ("driver", Telling(), ServerView())]:
        store.publish(_attempt(name, told, view))
    clock.now += LIFE
    snapshot = store.refresh()
    assert {one.status for one in snapshot.conditions.values()} == {U}
    assert snapshot.verdict.ready


@PROFILE
@given(CODES, st.lists(st.tuples(STATUSES, SEVERAL_FAILURES), min_size=2, max_size=12))
@counted
def test_a_failed_round_is_neither_good_nor_bad(code: str, rounds: list[tuple[Status, list[Outcome]]]) -> None:
    """Runs that fail between others leave what is published as it would be without them, then and afterwards."""
    steady, disturbed = _store(), _store()
    owner = CATALOG.owner[code]
    for status, failures in rounds:
        for store in (steady, disturbed):
            store.publish(_attempt(owner, _only(code, status), ServerView()))
        expected = steady.snapshot.conditions[code].status
        assert disturbed.snapshot.conditions[code].status is expected
        for outcome in failures:
            snapshot = disturbed.publish(_attempt(owner, Telling(), ServerView(), outcome))
            assert snapshot.conditions[code].status is expected


@PROFILE
@given(LINKS, st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=14))
@counted
def test_no_fault_is_left_over_from_a_cause_that_ended(
    link: tuple[str, str], rounds: list[tuple[bool, bool, bool]]
) -> None:
    """What was a consequence becomes active only when its own probe, asked since, still finds it; time adds nothing."""
    cause, code = link
    clock = FakeClock()
    store = _store(clock=clock, required={cause, code})
    confirmed = True
    for of_cause, true, final in rounds:
        said = cause if of_cause else code
        clock.now += 1
        snapshot = store.publish(
            _attempt(CATALOG.owner[said], _only(said, T if true else F, final=final), ServerView())
        )
        condition = snapshot.conditions[code]
        if true and not of_cause:
            confirmed = True
        if condition.consequence_of is not None:
            confirmed = False
        assert confirmed or not condition.active
        clock.now += 1
        assert _seen(store.refresh()) == _seen(snapshot)


@PROFILE
@given(
    CODES,
    st.lists(st.tuples(st.sampled_from(Status), st.booleans()), max_size=8),
    st.sampled_from(Status),
    st.booleans(),
)
@counted
def test_a_lasting_fact_is_published_once_and_in_time(
    code: str, before: list[tuple[Status, bool]], lasting: Status, final: bool
) -> None:
    """The same finding again and again changes what is published at most once, after the declared rounds at the latest.

    Unknown and final facts take effect at once, and so does everything that follows unknown.
    """
    store = _store()
    owner = CATALOG.owner[code]

    def publish(status: Status, certain: bool) -> Status:
        said = _only(code, status, final=certain)
        return store.publish(_attempt(owner, said, ServerView())).conditions[code].status

    for status, certain in before:
        publish(status, certain)
    published = store.snapshot.conditions[code].status
    hold = KINDS[code].hold[0 if lasting is T else 1]
    seen = [publish(lasting, final) for _ in range(hold + 2)]
    assert seen[hold - 1 :] == [lasting] * 3
    assert sum(one is not other for one, other in zip([published, *seen], seen, strict=False)) <= 1
    if final or U in (lasting, published):
        assert seen[0] is lasting
    elif not before or before[-1][0] is published is not lasting:
        assert seen[: hold - 1] == [published] * (hold - 1)


@PROFILE
@given(CODES, st.lists(st.sampled_from([T, F]), min_size=1, max_size=30))
@counted
def test_a_flapping_fact_changes_nothing_before_its_hold(code: str, statuses: list[Status]) -> None:
    """What is published changes only after as many rounds in a row as declared, counted independently here."""
    store = _store()
    owner = CATALOG.owner[code]
    expected: Status | None = None
    run = 0
    for status in statuses:
        shown = store.publish(_attempt(owner, _only(code, status), ServerView())).conditions[code].status
        run = 0 if expected is None or status is expected else run + 1
        if expected is None or run >= KINDS[code].hold[0 if status is T else 1]:
            expected, run = status, 0
        assert shown is expected
