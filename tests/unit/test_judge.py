"""The judge: one cause, relevance, gates and the launch rule, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.conditions import Memory, judge
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
    rounds: int = 1,
) -> Any:
    probes: list[Probe[Any]] = [probe(DRIVER, *kinds), server_probe()]
    results = {
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

    def judge_(result: Result[Any], _world: Any) -> Any:
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
    results = {DRIVER: Result(probe=DRIVER, outcome=Outcome.OK, facts=None, rounds=1)}
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
        ([view(Answer.ACCEPTED), view(Answer.REFUSED)], True),
        ([view(Answer.ACCEPTED, process="1"), view(Answer.REFUSED, process="2")], True),
        ([view(Answer.ACCEPTED, process="1"), view(Answer.TIMEOUT, process="2")], False),
        ([view(Answer.ACCEPTED, process="1"), view(Answer.TIMEOUT, process="1")], False),
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
    results = {
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
