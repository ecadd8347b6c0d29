"""What SGLang's argument parser would say to a launch, by its release."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.launch.args import parse_launch
from sidecar.model import (
    Answer,
    Finding,
    Gate,
    Outcome,
    Placement,
    Processes,
    Result,
    ServerView,
    Severity,
    Standing,
    Status,
    World,
)
from sidecar.probes.launch import PROBE, REJECTED, LaunchFacts

MARKER = "SECRET-DO-NOT-EXPORT"
NOW = 1_000_000.0


def facts(*words: str, release: str | None = "0.5.16", preflight: bool = True, **more: Any) -> LaunchFacts:
    """A launch; a word ``@a: 1`` is the content of its configuration file, as flags."""
    launch = parse_launch([word for word in words if not word.startswith("@")], lambda _path: _file(words))
    return LaunchFacts(preflight=preflight, notes=launch.notes, flags=launch.flags, release=release, **more)


def _file(words: tuple[str, ...]) -> list[str]:
    return [part for word in words if word.startswith("@") for part in word[1:].split()]


def judged(given: LaunchFacts | None, answer: Answer | None = None) -> Finding:
    standing = Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why="")
    world = World(standing=standing, server=ServerView(answer=answer), now=NOW, settings=None)
    (finding,) = PROBE.judge(Result(probe="launch", outcome=Outcome.OK, facts=given), world)
    assert finding.reason in {None, *REJECTED.reasons}
    return finding


MODULE = ("python", "-m", "sglang.launch_server", "--model", "m")


@pytest.mark.parametrize(
    ("words", "reason", "says"),
    [
        (("--mamba-backend", "bogus"), "invalid-choice", "error: argument --mamba-backend: invalid choice: 'bogus'"),
        (("--sampling-backend", "x"), "invalid-choice", "error: argument --sampling-backend: invalid choice: 'x'"),
        (
            ("--mm-attention-backend", "flashinfer"),
            "invalid-choice",
            "error: argument --mm-attention-backend: invalid choice: 'flashinfer'",
        ),
        (
            ("--attention-backend", "hybrid_linear_attn"),
            "invalid-choice",
            "error: argument --attention-backend: invalid choice: 'hybrid_linear_attn'",
        ),
        (("--mamba-backend", "bogus", "--mamba-backend", "triton"), "invalid-choice", None),
        (("--mamba-backend", "a b"), "invalid-choice", "error: argument --mamba-backend: invalid choice: ..."),
        (("--mamba-ssm-dtype", ""), "invalid-choice", "error: argument --mamba-ssm-dtype: invalid choice: ..."),
        (("--config", "x.yaml", "@\0--disable-cuda-graph"), "config-key-refused", None),
        (("--kv-cache-dtype", "x"), "invalid-choice", "error: argument --kv-cache-dtype: invalid choice: 'x'"),
        (("--attention", "fa3"), "ambiguous-flag", "error: ambiguous option: --attention could match ..."),
        (("--mod", "x"), "ambiguous-flag", None),
        (("--enable-d",), "ambiguous-flag", None),
        ((*MODULE, "--", "--tp", "2"), "unexpected-word", "error: unrecognized arguments: -- ..."),
        (("--base-gpu-id", "-1"), "value-out-of-range", "AssertionError: base_gpu_id must be non-negative"),
        (("--tp", "-1"), "value-out-of-range", "IndexError: list index out of range"),
        (("--gpu-id-step", "0"), "value-out-of-range", "AssertionError: gpu_id_step must be positive"),
        (("--attention-backend",), "missing-value", "error: argument --attention-backend: expected one argument"),
        (("--tp", "two"), "not-a-number", "error: argument --tp-size/--tensor-parallel-size: invalid int value: ..."),
        (
            ("--enable-dp-attention=1",),
            "unexpected-value",
            "error: argument --enable-dp-attention: ignored explicit argument ...",
        ),
        (("--port", "1", "2"), "unexpected-word", "error: unrecognized arguments: ..."),
        (
            ("--attention_backend", "fa3"),
            "unrecognized-flag",
            "error: unrecognized arguments: --attention_backend",
        ),
        (
            ("--mamba-cache-philox-rounds", "-1"),
            "flag-conflict",
            "ValueError: --mamba-cache-philox-rounds must be non-negative.",
        ),
        (("--linear-attn-decode-backend", "flashkda"), "flag-conflict", None),
        (
            ("--config", "x.yaml", "--config", "y.yaml"),
            "several-configs",
            "ValueError: Multiple config files specified! Only one allowed.",
        ),
        (
            ("--config", "x.yaml", "@--disable-cuda-graph"),
            "config-key-refused",
            "ValueError: Unsupported config option 'disable_cuda_graph' with action ...",
        ),
        (("--config", "x.yaml", "@--mamba-backend bogus"), "invalid-choice", None),
    ],
)
def test_what_the_parser_refuses_is_critical(words: tuple[str, ...], reason: str, says: str | None) -> None:
    """Each is what SGLang 0.5.16's own parser ended with; the launch is hindered, and the sentence is the parser's."""
    finding = judged(facts(*words))
    assert (finding.status, finding.reason, finding.severity, finding.gate) == (Status.TRUE, reason, None, None)
    assert says is None or finding.sglang_says == says
    assert finding.message.endswith(".")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--mamba-backend", "flashinfer", "--attention-backend", "fa3"),
        ("--no-such-flag", "x"),
        ("--fa-impl-ver", "2"),
        ("--device", " 4 ", "--speculative-draft-attention-backend", "a b"),
        ("--config", "x.yaml", "@--attention-backend fa3"),
        (*MODULE, "--disable-cuda-graph"),
        ("sglang", "serve", "m"),
        ("sglang", "serve", "--model-type", "llm", "m", "--port", "1"),
        ("--attention-back", "fa3", "--tp", "2"),
        ("--port", "70000", "--dp", "0"),
    ],
)
def test_what_it_takes_is_fine(words: tuple[str, ...]) -> None:
    """Known flags with valid values, and flags that are not judged, are no fault."""
    assert judged(facts(*words)).status is Status.FALSE


@pytest.mark.parametrize(
    ("words", "release", "reason"),
    [
        (("--attention-backend", "bogus"), "0.5.16", "unknown-choice"),
        (("--attention-backend", "FA3"), "0.5.16", "unknown-choice"),
        (("--mamba-backend", "new"), "0.9.0", "unknown-choice"),
        (("--config=x.yaml",), "0.5.16", "config-ignored"),
        (("--attention", "fa3"), "9.0", "ambiguous-flag"),
        (("--tp", "-1"), "0.5.9", "value-out-of-range"),
    ],
)
def test_what_may_be_right_only_warns(words: tuple[str, ...], release: str, reason: str) -> None:
    """A plugin may add a backend (case 45, sgl-project/sglang#22028), a newer release too; nothing is hindered."""
    finding = judged(facts(*words, release=release))
    assert (finding.status, finding.reason) == (Status.TRUE, reason)
    assert (finding.severity, finding.gate) == (Severity.WARNING, Gate.NEVER)


def test_a_certain_fault_comes_before_a_possible_one() -> None:
    """The reason is what the launch surely ends with; all others are evidence."""
    finding = judged(facts("--attention-backend", "bogus", "--tp", "x", "--sampling-backend", "y"))
    assert (finding.reason, finding.severity) == ("not-a-number", None)
    assert [item.split(":")[0] for item in finding.evidence] == ["invalid-choice", "unknown-choice"]


@pytest.mark.parametrize(
    ("words", "release", "says"),
    [
        (("--mamba-backend", "triton"), "0.5.8.post1", "error: unrecognized arguments: --mamba-backend"),
        (("--prefill-attention-backend", "fa3"), "0.4.6.post5", None),
        (("--config", "x.yaml"), "0.5.2", "error: unrecognized arguments: --config"),
        (("--enable-deterministic-inference",), "0.5.2", None),
    ],
)
def test_a_flag_that_came_later_is_not_recognized(words: tuple[str, ...], release: str, says: str | None) -> None:
    """An older SGLang ends with its parser's sentence for a flag that it does not have yet."""
    finding = judged(facts(*words, release=release))
    assert finding.reason == "unrecognized-flag"
    assert release in finding.message
    assert says is None or finding.sglang_says == says


def test_the_remedy_lists_the_choices_of_that_release() -> None:
    """What may be given is said exactly, for the release that is installed."""
    assert judged(facts("--mamba-backend", "x")).remedy == "Give --mamba-backend one of: flashinfer, triton."
    old = judged(facts("--mamba-ssm-dtype", "float16", release="0.5.8.post1"))
    assert old.remedy == "Give --mamba-ssm-dtype one of: bfloat16, float32."


@pytest.mark.parametrize(
    ("words", "release", "reason"),
    [
        (("--mamba-backend", "flashinfer"), None, "sglang-version-unknown"),
        (("--mamba-backend", "flashinfer"), "0.0.0.dev1", "sglang-version-unknown"),
        (("/entrypoint.sh", "--attention-backend", "fa3"), "0.5.16", "flags-incomplete"),
        (("sh", "-c", "sglang serve m --trust-remote-code $MORE"), "0.5.16", "flags-incomplete"),
        (("sh", "-c", "sglang serve m & sglang serve n --port 2"), "0.5.16", "flags-incomplete"),
        (("sh", "-c", "sglang serve $(x)"), "0.5.16", "flags-incomplete"),
        (("--attention", "fa3"), None, "sglang-version-unknown"),
        (("--tp", "$TP"), "0.5.16", "flags-incomplete"),
    ],
)
def test_what_cannot_be_known_is_unknown(words: tuple[str, ...], release: str | None, reason: str) -> None:
    """Without the release, or without all flags, nothing is called fine."""
    finding = judged(facts(*words, release=release))
    assert (finding.status, finding.reason, finding.severity) == (Status.UNKNOWN, reason, None)


def test_a_fault_that_needs_no_release_is_told_without_one() -> None:
    """A missing value is refused by every release."""
    assert judged(facts("--mamba-backend", release=None)).reason == "missing-value"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (MODULE[:3], "error: the following arguments are required: --model-path/--model"),
        (("sglang", "serve"), "Exception: Error: --model-path is required. Please provide the path to the model."),
    ],
)
def test_a_whole_command_must_name_a_model(words: tuple[str, ...], says: str) -> None:
    """Each way to start SGLang says so in its own words; flags alone are judged without."""
    finding = judged(facts(*words, "--port", "1"))
    assert (finding.reason, finding.sglang_says) == ("missing-model", says)


@pytest.mark.parametrize(
    ("answer", "age", "expected"),
    [
        (Answer.REFUSED, 20.0, Status.TRUE),
        (None, 20.0, Status.TRUE),
        (Answer.ACCEPTED, 20.0, Status.FALSE),
        (Answer.REFUSED, 900.0, Status.FALSE),
    ],
)
def test_a_server_that_lives_has_passed_its_parser(answer: Answer | None, age: float, expected: Status) -> None:
    """Judged only until it answers, or has lived longer than reading flags can take."""
    given = facts(*MODULE, "--mamba-backend", "bogus", preflight=False, started_at=NOW - age)
    assert judged(given, answer).status is expected


def test_of_several_launches_one_is_judged_and_that_is_said() -> None:
    """The others may be the ones that fail."""
    finding = judged(facts("sh", "-c", "sglang serve m & sglang serve n --port 2"))
    assert finding.message == "The command starts SGLang in 2 places; only the last of them was judged."


def test_a_launch_that_nobody_sees_weighs_nothing() -> None:
    """Without a launch command in sight there may be none: unknown, and no reason for concern."""
    finding = judged(LaunchFacts(preflight=False, notes=None, flags={}, release=None))
    assert (finding.status, finding.reason, finding.severity) == (Status.UNKNOWN, "flags-not-seen", Severity.INFO)


def test_the_section_says_how_the_launch_was_read() -> None:
    """Flags that count, names of those that do not, and no value of theirs."""
    given = facts(*MODULE, "--tp", "2", "--api-key", MARKER, "--config", "x.yaml", "@--attention-backend fa3")
    section = PROBE.report(given)["preflight"]
    assert (section.form, section.release, section.config, section.complete) == ("module", "0.5.16", "read", True)
    assert section.understood == {"--attention-backend": "fa3", "--tp-size": 2}
    assert (section.passed_over, section.passed_over_count) == (("--api-key",), 1)
    assert MARKER not in repr(section)
    assert PROBE.report(facts(*MODULE, preflight=False)) == {}
