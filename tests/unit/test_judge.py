"""The judge: one cause, relevance, gates and the launch rule, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.conditions import NO_OVERRIDES, Memory, Overrides, judge
from sidecar.config import Settings
from sidecar.model import Answer, Feature, Gate, Outcome, Probe, Result, ServerView, Severity, Status
from tests.builders import EPOCH, HOST, condition, finding, probe, server_probe, view

DRIVER = "driver"


def judged(
    conditions: Mapping[str, Any],
    kinds: list[Any],
    *,
    server: ServerView | None = None,
    memory: Memory | None = None,
    required: frozenset[str] = frozenset(),
    overrides: Overrides = NO_OVERRIDES,
    rounds: int = 1,
) -> Any:
    probes: list[Probe[Any]] = [probe(DRIVER, *kinds), server_probe()]
    results: dict[str, Result[Any]] = {
        DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts=conditions, rounds=rounds),
        "server": Result(
            probe="server", outcome=Outcome.OK, facts=None if server is None else {"view": server}, rounds=rounds
        ),
    }
    return judge(
        probes,
        results,
        standing=HOST,
        settings=None,
        required=required,
        overrides=overrides,
        memory=memory or Memory(),
        now=EPOCH,
    )


def test_a_code_the_probe_left_out_is_unknown_not_fine() -> None:
    """A probe that says nothing about a condition leaves it unknown."""
    result = judged({}, [condition("a")])
    assert result.conditions["a"].status is Status.UNKNOWN
    assert result.conditions["a"].reason == "not-judged"
    assert result.verdict.ready


def test_a_finding_without_a_sentence_gets_the_meaning_of_its_token() -> None:
    """No condition is shown with a bare token: the declared meaning stands in for a missing sentence."""
    result = judged(
        {"a": finding("a", True, reason="broken"), "b": finding("b", None, reason="pending")},
        [condition("a"), condition("b")],
    )
    assert result.conditions["a"].message == "It is broken."
    assert result.conditions["b"].message == "The probe has not finished its first round."


def test_a_failed_run_is_a_round_only_of_what_is_judged_from_it() -> None:
    """A run that timed out confirms that the probe hangs, and nothing about the facts of an earlier run."""
    kinds = [condition("fact", hold=(2, 3)), condition("hang", hold=(2, 3))]

    def judge_(result: Any, _world: Any) -> Any:
        failed = result.outcome is Outcome.TIMEOUT
        return (finding("fact", result.facts["bad"]), finding("hang", failed, from_outcome=True))

    memory = Memory()
    published = []
    rounds = [(False, Outcome.OK), (True, Outcome.OK), (True, Outcome.TIMEOUT), (True, Outcome.TIMEOUT)]
    for number, (bad, outcome) in enumerate(rounds, 1):
        result = judge(
            [probe(DRIVER, *kinds, judge=judge_)],
            {DRIVER: Result(probe=DRIVER, outcome=outcome, facts={"bad": bad}, rounds=number)},
            standing=HOST,
            settings=None,
            required=(),
            memory=memory,
            now=EPOCH,
        )
        memory = result.memory
        published.append(tuple(c.code for c in result.conditions.values() if c.active))
    assert published == [(), (), (), ("hang",)]


def test_facts_that_ran_out_are_told_from_a_failure() -> None:
    """A condition whose facts expired since a good run says so, instead of naming a failure that never was."""
    probes = [probe(DRIVER, condition("a"))]
    results: dict[str, Result[Any]] = {DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts=None, rounds=1)}
    result = judge(probes, results, standing=HOST, settings=None, required=(), memory=Memory(), now=EPOCH)
    assert result.conditions["a"].reason == "expired"


def test_before_the_first_driver_round_nothing_is_ready() -> None:
    """Readiness is pending until the first driver round has ended, and only until then."""
    probes = [probe(DRIVER, condition("a"))]
    pending = judge(
        probes,
        {DRIVER: Result(probe=DRIVER)},
        standing=HOST,
        settings=None,
        required=(),
        memory=Memory(),
        now=EPOCH,
    )
    assert pending.verdict.pending
    assert not pending.verdict.ready
    ended = judge(
        probes,
        {DRIVER: Result(probe=DRIVER, outcome=Outcome.TIMEOUT, rounds=1)},
        standing=HOST,
        settings=None,
        required=(),
        memory=Memory(),
        now=EPOCH,
    )
    assert ended.verdict.ready
    assert ended.conditions["a"].reason == "probe-timeout"


def test_a_deeper_cause_suppresses_the_whole_chain_behind_it() -> None:
    """Of a chain of three failing conditions one is active and the others name it as their cause."""
    kinds = [
        condition("driver-gone"),
        condition("cuda-gone", depends_on=("driver-gone",)),
        condition("mamba-gone", depends_on=("cuda-gone",)),
    ]
    result = judged({"driver-gone": True, "cuda-gone": True, "mamba-gone": True}, kinds)
    assert [c.code for c in result.conditions.values() if c.active] == ["driver-gone"]
    assert result.conditions["mamba-gone"].consequence_of == "driver-gone"
    assert result.verdict.blockers == ("driver-gone",)


def test_a_finding_may_say_that_its_reason_has_another_cause() -> None:
    """What a code depends on need not explain each of its reasons: one that it does not explain stays active."""
    kinds = [condition("a"), condition("b", depends_on=("a",))]
    result = judged({"a": True, "b": finding("b", True, explained_by=())}, kinds)
    assert result.conditions["b"].active


def test_a_cause_that_does_not_hold_explains_nothing() -> None:
    """A condition stays active when what could explain it is fine or unknown."""
    kinds = [condition("a"), condition("b", depends_on=("a",))]
    for cause in (False, None):
        assert judged({"a": cause, "b": True}, kinds).conditions["b"].active


@pytest.mark.parametrize(
    ("used", "required", "relevant", "severity", "gate"),
    [
        (None, False, True, Severity.CRITICAL, Gate.SERVING),
        (True, False, True, Severity.CRITICAL, Gate.SERVING),
        (False, False, False, Severity.CRITICAL, Gate.SERVING),
        (False, True, True, Severity.CRITICAL, Gate.SERVING),
    ],
)
def test_a_condition_of_an_unused_feature_is_irrelevant(
    used: bool | None, required: bool, relevant: bool, severity: Severity, gate: Gate
) -> None:
    """GPU conditions matter unless the server is known not to use a GPU; `require` overrides that."""
    features = {} if used is None else {Feature.GPU: used}
    result = judged(
        {"a": True},
        [condition("a", uses=Feature.GPU)],
        server=view(features=features),
        required=frozenset({"a"} if required else ()),
    )
    found = result.conditions["a"]
    assert (found.relevant, found.severity, found.gate) == (relevant, severity, gate)
    assert result.verdict.ready is not relevant


@pytest.mark.parametrize(("seen", "relevant"), [(None, True), (True, True), (False, False)])
def test_another_probe_tells_of_features_that_the_server_leaves_open(seen: bool | None, relevant: bool) -> None:
    """What a probe concludes counts where neither the server nor its flags say; these outweigh it."""
    kind = condition("a", uses=Feature.FA3, only_when_used=True)
    told = probe("told", kind, uses=lambda _facts: {Feature.FA3: True})
    shown = view(features={} if seen is None else {Feature.FA3: seen})
    results: dict[str, Result[Any]] = {
        "told": Result(probe="told", outcome=Outcome.OK, facts={"a": True}, rounds=1),
        "server": Result(probe="server", outcome=Outcome.OK, facts={"view": shown}, rounds=1),
    }
    found = judge(
        [told, server_probe()], results, standing=HOST, settings=None, required=(), memory=Memory(), now=EPOCH
    )
    assert found.conditions["a"].relevant is relevant


@pytest.mark.parametrize(("used", "severity"), [(None, "info"), (False, "info"), (True, "critical")])
def test_a_fault_that_concerns_nobody_is_info_and_gates_nothing(used: bool | None, severity: str) -> None:
    """FlashInfer conditions weigh fully only for a server that is known to use it."""
    features = {} if used is None else {Feature.FLASHINFER_MAMBA: used}
    kind = condition("a", gate=Gate.LAUNCH, uses=Feature.FLASHINFER_MAMBA, info_when_unused=True)
    result = judged({"a": True}, [kind], server=view(Answer.REFUSED, features=features))
    assert result.conditions["a"].active
    assert result.conditions["a"].severity == severity
    assert result.verdict.ready is (used is not True)


def test_a_finding_can_lower_the_weight_but_never_raise_it() -> None:
    """Unknown GPU sets lower a finding to a warning that never gates; nothing raises a declared weight."""
    lowered = judged({"a": finding("a", True, severity=Severity.WARNING, gate=Gate.NEVER)}, [condition("a")])
    assert lowered.conditions["a"].severity is Severity.WARNING
    assert lowered.verdict.ready
    kind = condition("a", severity=Severity.WARNING, gate=Gate.NEVER)
    raised = judged({"a": finding("a", True, severity=Severity.CRITICAL, gate=Gate.SERVING)}, [kind])
    assert raised.conditions["a"].severity is Severity.WARNING
    assert raised.verdict.ready
    launch = condition("a", gate=Gate.LAUNCH)
    served = judged({"a": finding("a", True, gate=Gate.SERVING)}, [launch], server=view(Answer.ACCEPTED))
    assert served.conditions["a"].gate is Gate.LAUNCH
    assert served.verdict.ready


LAUNCH = condition("a", gate=Gate.LAUNCH)


@pytest.mark.parametrize(
    ("observations", "gates"),
    [
        ([None], False),
        ([view(Answer.REFUSED)], True),
        ([view(Answer.REFUSED, proof=False)], False),
        ([view(Answer.TIMEOUT)], False),
        ([view(Answer.UNREACHABLE)], False),
        ([view(Answer.ACCEPTED)], False),
        ([view(Answer.REFUSED), view(Answer.ACCEPTED)], False),
        ([view(Answer.ACCEPTED), view(Answer.TIMEOUT)], False),
        ([view(Answer.ACCEPTED), None], False),
        ([view(Answer.REFUSED), view(Answer.TIMEOUT)], True),
        # What nobody looks at any more may have started meanwhile.
        ([view(Answer.REFUSED), None], False),
        ([view(Answer.REFUSED), None, view(Answer.TIMEOUT)], False),
        ([view(Answer.REFUSED), None, view(Answer.REFUSED)], True),
        ([view(Answer.ACCEPTED), None, view(Answer.TIMEOUT)], False),
        ([view(Answer.ACCEPTED), view(Answer.REFUSED)], True),
        ([view(Answer.ACCEPTED, process="1"), view(Answer.REFUSED, process="2")], True),
        ([view(Answer.ACCEPTED, process="1"), view(Answer.TIMEOUT, process="2")], False),
        ([view(Answer.ACCEPTED, process="1"), view(Answer.TIMEOUT, process="1")], False),
        ([view(Answer.REFUSED, process="1"), view(Answer.TIMEOUT, process="1")], True),
        ([view(Answer.REFUSED, process="1"), view(Answer.TIMEOUT, process="2")], False),
    ],
)
def test_launch_conditions_gate_only_while_no_server_answers(
    observations: list[ServerView | None], gates: bool
) -> None:
    """A server that answered has passed its launch until a refusal or a new process; a time-out proves nothing."""
    memory = Memory()
    for round_, server in enumerate(observations, 1):
        result = judged({"a": True}, [LAUNCH], server=server, memory=memory, rounds=round_)
        memory = result.memory
    assert result.verdict.blockers == (("a",) if gates else ())


def test_a_bug_in_one_judge_makes_its_conditions_unknown_and_leaves_the_others() -> None:
    """An exception in a probe's judge is reported and never read as healthy or broken."""

    def broken(_result: Any, _world: Any) -> Any:
        raise RuntimeError("bug")

    probes = [probe(DRIVER, condition("a"), judge=broken), probe("other", condition("b"))]
    results: dict[str, Result[Any]] = {
        DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts={}, rounds=1),
        "other": Result(probe="other", outcome=Outcome.OK, facts={"b": True}, rounds=1),
    }
    result = judge(probes, results, standing=HOST, settings=None, required=(), memory=Memory(), now=EPOCH)
    assert result.conditions["a"].reason == "judge-failed"
    assert result.conditions["b"].active
    assert [name for name, _ in result.faults] == [DRIVER]


statuses = st.sampled_from([True, False, None])
gates = st.sampled_from(list(Gate))
answers = st.sampled_from([None, *Answer])


@given(
    st.lists(st.tuples(statuses, gates), min_size=1, max_size=5),
    answers,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8),
)
def test_readiness_follows_from_active_gating_conditions_alone(
    said: list[tuple[bool | None, Gate]], answer: Answer | None, proof: bool, edges: list[tuple[int, int]]
) -> None:
    """For any findings and dependencies: never ready with an active gate, never unready without one."""
    depends: dict[int, list[str]] = {}
    for effect, cause in edges:
        if cause < effect and cause < len(said):  # a catalogue with a cycle cannot be built
            depends.setdefault(effect, []).append(f"c{cause}")
    kinds = [
        condition(f"c{index}", gate=gate, depends_on=tuple(depends.get(index, ())))
        for index, (_, gate) in enumerate(said)
    ]
    result = judged(
        {f"c{index}": status for index, (status, _) in enumerate(said)}, kinds, server=view(answer, proof=proof)
    )
    active = [c for c in result.conditions.values() if c.active]
    refused = answer is Answer.REFUSED and proof
    gating = [c for c in active if c.gate is Gate.SERVING or (c.gate is Gate.LAUNCH and refused)]
    assert result.verdict.ready is (not gating)
    assert set(result.verdict.blockers) == {c.code for c in gating}
    failing = [c for c in result.conditions.values() if c.status is Status.TRUE]
    assert bool(active) is bool(failing)
    for found in failing:
        if found.consequence_of is not None:
            assert result.conditions[found.consequence_of].active


@pytest.mark.parametrize("part", ["view", "uses"])
def test_a_bug_in_what_a_probe_tells_of_the_server_stops_nothing(part: str) -> None:
    """Where the server's view fails it is unknown, the bug is reported, and everything else is judged as ever."""

    def broken(_facts: Any) -> Any:
        raise RuntimeError("bug")

    probes = [probe(DRIVER, condition("a"), **{part: broken})]
    results: dict[str, Result[Any]] = {DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts={"a": True}, rounds=1)}
    result = judge(probes, results, standing=HOST, settings=None, required=(), memory=Memory(), now=EPOCH)
    assert result.verdict.blockers == ("a",)
    assert result.server == ServerView()
    assert [name for name, _ in result.faults] == [DRIVER]


# -- what the operator decides ------------------------------------------------------------------------

S, L, N = Gate.SERVING, Gate.LAUNCH, Gate.NEVER
NEVER_SAID = finding("a", True, gate=N)


@pytest.mark.parametrize(
    ("declared", "chosen", "said", "answer", "gates"),
    [
        (S, N, finding("a", True), Answer.REFUSED, False),
        (S, L, finding("a", True), Answer.REFUSED, True),
        (S, L, finding("a", True), Answer.ACCEPTED, False),
        (L, S, finding("a", True), Answer.ACCEPTED, True),
        (N, S, finding("a", True), Answer.ACCEPTED, True),
        (N, L, finding("a", True), Answer.REFUSED, True),
        (S, S, NEVER_SAID, Answer.ACCEPTED, True),
        (S, None, NEVER_SAID, Answer.ACCEPTED, False),
        (N, S, finding("a", None), Answer.REFUSED, False),
    ],
)
def test_a_gate_is_the_operator_s_decision(
    declared: Gate, chosen: Gate | None, said: Any, answer: Answer, gates: bool
) -> None:
    """A chosen gate replaces the declared one both ways, also where a finding would lower it; unknown never gates."""
    overrides = Overrides(gate={} if chosen is None else {"a": chosen})
    result = judged({"a": said}, [condition("a", gate=declared)], server=view(answer), overrides=overrides)
    assert result.verdict.blockers == (("a",) if gates else ())


def test_a_chosen_gate_beats_a_deferred_finding() -> None:
    """For a fault that surfaces late, too, the operator's class is the one that counts."""
    kind = condition("a", gate=L, deferred=True)
    said = {"a": finding("a", True, gate=S)}
    assert judged(said, [kind], server=view(Answer.ACCEPTED)).verdict.blockers == ("a",)
    chosen = judged(said, [kind], server=view(Answer.ACCEPTED), overrides=Overrides(gate={"a": L}))
    assert chosen.verdict.ready


@pytest.mark.parametrize(
    ("declared", "chosen", "said", "severity"),
    [
        ("warning", "critical", None, "critical"),
        ("critical", "info", None, "info"),
        ("critical", "critical", "warning", "warning"),
        ("critical", "info", "warning", "info"),
    ],
)
def test_a_severity_is_the_operator_s_decision(declared: str, chosen: str, said: str | None, severity: str) -> None:
    """A chosen severity replaces the declared one both ways; what a finding says of its own case still lowers it."""
    kind = condition("a", severity=Severity(declared))
    given = finding("a", True, severity=None if said is None else Severity(said))
    overrides = Overrides(severity={"a": Severity(chosen)})
    assert judged({"a": given}, [kind], overrides=overrides).conditions["a"].severity == severity


@pytest.mark.parametrize(("required", "severity", "ready"), [(False, "info", True), (True, "critical", False)])
def test_no_decision_makes_an_unused_feature_page(required: bool, severity: str, ready: bool) -> None:
    """What nobody is known to use stays informational whatever was chosen for it; `require` is what changes that."""
    kind = condition("a", severity=Severity.WARNING, gate=N, uses=Feature.FLASHINFER_MAMBA, info_when_unused=True)
    overrides = Overrides(gate={"a": S}, severity={"a": Severity.CRITICAL})
    result = judged({"a": True}, [kind], overrides=overrides, required=frozenset({"a"} if required else ()))
    assert (result.conditions["a"].severity, result.verdict.ready) == (severity, ready)


@pytest.mark.parametrize("required", [False, True])
def test_what_is_accepted_weighs_nothing_and_stays_visible(required: bool) -> None:
    """An accepted condition is active as info and gates nothing, whatever else was decided or required."""
    overrides = Overrides(gate={"a": S}, severity={"a": Severity.CRITICAL}, accept=frozenset({"a"}))
    result = judged(
        {"a": finding("a", True, gate=S)},
        [condition("a", deferred=True)],
        server=view(Answer.REFUSED),
        overrides=overrides,
        required=frozenset({"a"} if required else ()),
    )
    found = result.conditions["a"]
    assert (found.active, found.accepted, found.severity, found.gate) == (True, True, Severity.INFO, N)
    assert result.verdict.ready


def test_accepting_a_cause_accepts_what_follows_from_it() -> None:
    """One cause stays one cause: what an accepted condition explains is still listed as its consequence."""
    kinds = [condition("a"), condition("b", depends_on=("a",))]
    result = judged({"a": True, "b": True}, kinds, overrides=Overrides(accept=frozenset({"a"})))
    assert result.conditions["b"].consequence_of == "a"
    assert result.verdict.ready


def test_overrides_are_read_from_the_settings() -> None:
    """The three settings become the three decisions."""
    settings = Settings(gate={"a": S}, severity={"b": Severity.INFO}, accept=("c",))
    expected = Overrides(gate={"a": S}, severity={"b": Severity.INFO}, accept=frozenset({"c"}))
    assert Overrides.of(settings) == expected


# -- one cause, over time and weight ------------------------------------------------------------------


def over_time(*steps: tuple[tuple[int, Any], tuple[int, Any]]) -> list[tuple[str, str]]:
    """What is published of a cause and its consequence, each judged by a probe of its own, step by step.

    A step gives each probe's round and what it found.
    """
    probes = [probe(DRIVER, condition("cause", hold=(2, 3))), probe("cuda", _DEPENDENT)]
    memory = Memory()
    seen = []
    for number, ((round_a, a), (round_b, b)) in enumerate(steps):
        results: dict[str, Result[Any]] = {
            DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts={"cause": a}, rounds=round_a),
            "cuda": Result(probe="cuda", outcome=Outcome.OK, facts={"b": b}, rounds=round_b),
        }
        judgement = judge(probes, results, standing=HOST, settings=None, required=(), memory=memory, now=EPOCH + number)
        memory = judgement.memory
        b_ = judgement.conditions["b"]
        words = "active" if b_.active else "consequence" if b_.consequence_of else b_.reason or b_.status.value
        seen.append((judgement.conditions["cause"].status.value, words))
    return seen


_DEPENDENT = condition("b", hold=(2, 3), depends_on=("cause",))
BACK = finding("cause", False, final=True)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((2, False), "false"),
        ((2, True), "active"),
        ((2, None), "unknown"),
    ],
)
def test_a_consequence_outlives_its_cause_only_if_it_is_found_again(after: tuple[int, Any], expected: str) -> None:
    """When a driver is back, what it explained is unknown until the slower probe has looked, and then what it says."""
    steps = [((1, True), (1, True)), ((2, BACK), (1, True)), ((3, BACK), (1, True)), ((4, BACK), after)]
    assert [words for _, words in over_time(*steps)] == ["consequence", "cause-ended", "cause-ended", expected]


def test_a_consequence_that_already_ended_does_not_flash() -> None:
    """A consequence whose probe found it gone, and only waits for more good rounds, is gone when its cause is."""
    steps = [((1, True), (1, True)), ((2, False), (2, False)), ((3, BACK), (2, False))]
    assert [words for _, words in over_time(*steps)] == ["consequence", "consequence", "false"]


def test_since_of_a_consequence_without_cause_is_stable() -> None:
    """While nobody has looked again, looking twice at the same rounds changes nothing."""
    probes = [probe(DRIVER, condition("cause")), probe("cuda", _DEPENDENT)]
    memory, since = Memory(), []
    for number, cause in enumerate([True, BACK, BACK, BACK]):
        results: dict[str, Result[Any]] = {
            DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts={"cause": cause}, rounds=number + 1),
            "cuda": Result(probe="cuda", outcome=Outcome.OK, facts={"b": True}, rounds=1),
        }
        judgement = judge(probes, results, standing=HOST, settings=None, required=(), memory=memory, now=EPOCH + number)
        memory = judgement.memory
        since.append(judgement.conditions["b"].since - EPOCH)
    assert since == [0, 1, 1, 1]


def test_every_link_of_a_chain_waits_for_its_own_probe() -> None:
    """A consequence of a consequence does not become active because the middle one is unknown now."""
    kinds = [condition("b", depends_on=("cause",)), condition("c", depends_on=("b",))]
    probes = [probe(DRIVER, condition("cause")), probe("cuda", *kinds)]
    memory = Memory()
    for number, cause in enumerate([True, BACK]):
        results: dict[str, Result[Any]] = {
            DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts={"cause": cause}, rounds=number + 1),
            "cuda": Result(probe="cuda", outcome=Outcome.OK, facts={"b": True, "c": True}, rounds=1),
        }
        judgement = judge(probes, results, standing=HOST, settings=None, required=(), memory=memory, now=EPOCH)
        memory = judgement.memory
    assert {code: one.reason for code, one in judgement.conditions.items() if code != "cause"} == {
        "b": "cause-ended",
        "c": "cause-ended",
    }
    assert judgement.verdict.ready


def _unused(code: str, **changes: Any) -> Any:
    return condition(code, gate=L, uses=Feature.FLASHINFER, info_when_unused=True, **changes)


@pytest.mark.parametrize("used", [None, False])
def test_a_cause_that_nobody_uses_weighs_as_much_as_what_it_breaks(used: bool | None) -> None:
    """A fault of FlashInfer that breaks the kernel wheel does not hide it behind an information."""
    kinds = [_unused("flashinfer"), condition("kernel", gate=L, depends_on=("flashinfer",))]
    features = {} if used is None else {Feature.FLASHINFER: used}
    result = judged({"flashinfer": True, "kernel": True}, kinds, server=view(Answer.REFUSED, features=features))
    cause = result.conditions["flashinfer"]
    assert (cause.active, cause.severity, cause.gate) == (True, Severity.CRITICAL, L)
    assert result.verdict.blockers == ("flashinfer",)


@pytest.mark.parametrize(
    ("consequence", "severity", "ready"),
    [
        (finding("kernel", True, severity=Severity.WARNING, gate=N), Severity.WARNING, True),
        (finding("kernel", False), Severity.INFO, True),
        (finding("kernel", None), Severity.INFO, True),
        (finding("kernel", True, explained_by=()), Severity.INFO, False),
    ],
)
def test_no_more_weight_is_lent_than_there_is(consequence: Any, severity: Severity, ready: bool) -> None:
    """A cause that nobody uses gets the weight of what it explains and no more."""
    kinds = [_unused("flashinfer"), condition("kernel", gate=L, depends_on=("flashinfer",))]
    result = judged({"flashinfer": True, "kernel": consequence}, kinds, server=view(Answer.REFUSED))
    assert result.conditions["flashinfer"].severity is severity
    assert result.verdict.ready is ready


def test_weight_reaches_the_root_of_a_chain() -> None:
    """Weight is lent link by link, so that no length of a chain hides a fault."""
    kinds = [_unused("r"), _unused("m", depends_on=("r",)), condition("kernel", gate=L, depends_on=("m",))]
    result = judged({"r": True, "m": True, "kernel": True}, kinds, server=view(Answer.REFUSED))
    assert result.verdict.blockers == ("r",)
