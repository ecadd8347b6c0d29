"""What the server's picture means: conditions, features, series and the report."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.model import (
    Answer,
    Feature,
    Outcome,
    Placement,
    Processes,
    Result,
    Sample,
    Scope,
    ServerView,
    Severity,
    Standing,
    Status,
    Target,
    World,
)
from sidecar.probes.server import PROBE, ServerFacts, ServerSection, summarize, view
from sidecar.serverinfo import PROBLEMS, Problem, ServerInfo, ServerObservation
from sidecar.target import PREFLIGHT, RUNNING

MARKER = "SECRET-DO-NOT-EXPORT"
WORLD = World(
    standing=Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why=""),
    server=ServerView(),
    now=0.0,
    settings=None,
)
UP = ServerObservation(answer=Answer.ACCEPTED, status=200)
REFUSED = ServerObservation(answer=Answer.REFUSED, problem=Problem("refused", "Nobody."))
SILENT = ServerObservation(answer=Answer.TIMEOUT, problem=Problem("timeout", "Silence."))
INFO = ServerInfo(
    version="0.5.16", device="cuda", tp_size=8, mamba_backend="triton", attention_backend="fa3", is_vision=False
)


def facts(
    observation: ServerObservation = UP,
    *,
    info: ServerInfo | None = None,
    problem: Problem | None = None,
    processes: Processes = Processes.SHARED,
    nvidia: bool = True,
    **target: Any,
) -> ServerFacts:
    found: dict[str, Any] = {"url": "http://h:1", "url_source": "default", "scope": Scope.SELF, "why": "So it is."}
    return ServerFacts(
        target=summarize(Target(**(found | target))),
        observation=observation,
        info=info,
        info_problem=problem,
        processes=processes,
        nvidia_present=nvidia,
    )


def judged(given: ServerFacts | None, outcome: Outcome = Outcome.OK) -> dict[str, tuple[str, str | None]]:
    findings = list(PROBE.judge(Result(probe="server", outcome=outcome, facts=given), WORLD))
    assert [finding.code for finding in findings] == [condition.code for condition in PROBE.conditions]
    declared = {condition.code: condition.reasons for condition in PROBE.conditions}
    for finding in findings:
        assert finding.status is Status.UNKNOWN or finding.reason is None or finding.reason in declared[finding.code]
        assert finding.status is not Status.TRUE or finding.message.endswith(".")
    return {finding.code: (finding.status.value, finding.reason) for finding in findings if finding.status != "false"}


PENDING = {"server-unreachable": ("unknown", "info-pending"), "server-unauthorized": ("unknown", "info-pending")}
RUN = {"pid": 7, "create_time": 1.5, "launch_source": RUNNING}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (facts(info=INFO), {}),
        (facts(REFUSED), {"server-not-found": ("true", "no-process")}),
        (facts(REFUSED, processes=Processes.HIDDEN), {"server-not-found": ("true", "connection-refused")}),
        (facts(REFUSED, candidates=(1, 2)), {"server-not-found": ("true", "several-servers")}),
        (facts(REFUSED, **RUN), {}),
        (facts(SILENT), {"server-unreachable": ("true", "timeout")}),
        (facts(SILENT, info=INFO, **RUN), {"server-unreachable": ("true", "timeout")}),
        (facts(problem=Problem("not-json", "A page.")), {"server-unreachable": ("true", "not-json")}),
        (facts(problem=Problem("no-key", "A key.")), {"server-unauthorized": ("true", "no-key")}),
        (facts(info=INFO, problem=Problem("key-refused", "A key.")), {"server-unauthorized": ("true", "key-refused")}),
        (facts(info=INFO, problem=Problem("http-error", "An error.")), {}),
        (facts(problem=Problem("refused", "Just now.")), PENDING),
        (facts(), PENDING),
        (facts(launch={"node_rank": 1}, **RUN), {}),
        (
            facts(
                ServerObservation(answer=Answer.ACCEPTED, problem=Problem("protocol", "gRPC.")),
                launch={"grpc": True},
                **RUN,
            ),
            {},
        ),
        (facts(ServerObservation(answer=None), launch_source=PREFLIGHT), {}),
        (
            facts(ServerObservation(answer=None, problem=Problem("ca-file", "Bad."))),
            {"server-unreachable": ("true", "ca-file")},
        ),
    ],
)
def test_each_picture_has_at_most_one_meaning(given: ServerFacts, expected: dict[str, tuple[str, str]]) -> None:
    """Not found, unreachable and unauthorized exclude each other; a starting or unasked server is none of them."""
    assert judged(given) == expected


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.PENDING, "pending"),
        (Outcome.TIMEOUT, "probe-timeout"),
        (Outcome.CRASHED, "probe-crashed"),
        (Outcome.ERROR, "probe-error"),
    ],
)
def test_without_facts_everything_is_unknown(outcome: Outcome, reason: str) -> None:
    """A probe that gave nothing says so, as unknown."""
    assert set(judged(None, outcome).values()) == {("unknown", reason)}


def test_a_missing_key_names_the_setting() -> None:
    """The remedy of an unauthorized agent is the setting that takes the key."""
    unauthorized = next(condition for condition in PROBE.conditions if condition.code == "server-unauthorized")
    assert "server_key_file" in unauthorized.remedy
    assert unauthorized.severity is Severity.WARNING


def test_every_visible_problem_is_a_declared_reason() -> None:
    """Whatever keeps the server from being asked is in the closed set of some condition."""
    for token in set(PROBLEMS) - {"refused"}:
        assert len(judged(facts(problem=Problem(token, "It is so.")))) == 1


# -- the view of the judge ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "proof"),
    [
        (facts(), True),
        (facts(processes=Processes.HIDDEN), False),
        (facts(processes=Processes.HIDDEN, url_source="setting"), True),
        (facts(candidates=(1, 2)), False),
        (facts(url_source="command-line-other-network", **RUN), False),
        (facts(url_source="command-line", **RUN), True),
    ],
)
def test_a_refusal_proves_something_only_at_a_known_address(given: ServerFacts, proof: bool) -> None:
    """With hidden processes and no configured address, or an address in another network, a refusal proves nothing."""
    assert view(given).refusal_is_proof is proof


def test_the_process_tells_servers_apart() -> None:
    """The key changes with the process and is not invented where none can be seen."""
    assert view(facts(**RUN)).process == "7:1.5"
    assert view(facts()).process is None
    assert view(facts(REFUSED)).answer is Answer.REFUSED


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (facts(info=INFO), True),
        (facts(info=ServerInfo(device="cpu"), nvidia=False), False),
        (facts(info=ServerInfo(device="cpu"), nvidia=True), None),
        (facts(info=ServerInfo(device="cpu"), nvidia=True, launch={"device": "cpu"}, launch_source=RUNNING), False),
        (facts(launch={"device": "cuda"}, launch_source=PREFLIGHT), True),
        (facts(), None),
    ],
)
def test_gpu_matters_unless_another_device_was_asked_for(given: ServerFacts, used: bool | None) -> None:
    """A server that resolved to the CPU unasked on NVIDIA hardware keeps its GPU conditions."""
    assert view(given).features.get(Feature.GPU) is used


HYBRID = ServerInfo(attention_backend="fa3", mamba_backend="flashinfer")


@pytest.mark.parametrize(
    ("given", "mamba", "flashinfer"),
    [
        (facts(info=INFO), False, False),
        (facts(info=HYBRID), True, True),
        (facts(info=ServerInfo(attention_backend="trtllm_mha", mamba_backend="triton")), False, True),
        (facts(info=ServerInfo(attention_backend="fa3")), False, None),
        (facts(info=INFO, launch={"mamba_backend": "flashinfer"}, launch_source=RUNNING), False, False),
        (facts(launch={"mamba_backend": "flashinfer"}, launch_source=PREFLIGHT), True, True),
        (facts(launch={}, launch_source=PREFLIGHT), False, None),
        (facts(launch={"incomplete": True}, launch_source=PREFLIGHT), None, None),
        (facts(launch={"attention_backend": "flashinfer", "incomplete": True}, launch_source=PREFLIGHT), None, True),
        (facts(), None, None),
    ],
)
def test_flashinfer_is_used_where_a_backend_says_so(
    given: ServerFacts, mamba: bool | None, flashinfer: bool | None
) -> None:
    """What the server resolved decides, then complete flags; where neither speaks the use is unknown, not absent."""
    features = view(given).features
    assert (features.get(Feature.FLASHINFER_MAMBA), features.get(Feature.FLASHINFER)) == (mamba, flashinfer)


# -- what is shown ------------------------------------------------------------------------------------


def test_series_of_a_known_server() -> None:
    """A server that describes itself is up, named, and dated when its process can be seen."""
    assert list(PROBE.samples(facts(info=INFO, **RUN))) == [
        Sample("server_up", (), 1),
        Sample("server_info", ("0.5.16", "triton", "8", "cuda"), 1),
        Sample("server_start_time_seconds", (), 1.5),
    ]
    assert PROBE.identity(facts(info=INFO)) == {"sglang": "0.5.16"}


def test_series_of_an_unknown_server_are_absent() -> None:
    """What is not known has no series; a preflight has no server at all."""
    assert list(PROBE.samples(facts(REFUSED))) == [Sample("server_up", (), 0)]
    assert list(PROBE.samples(facts(ServerObservation(answer=None), launch_source=PREFLIGHT))) == []
    assert list(PROBE.samples(facts(info=ServerInfo(tp_size=2)))) == [
        Sample("server_up", (), 1),
        Sample("server_info", ("", "", "2", ""), 1),
    ]
    assert PROBE.identity(facts()) == {}


def test_the_report_holds_the_servers_picture_without_secrets() -> None:
    """The section names process, scope and flags; environment and credentials of the URL stay out."""
    given = facts(
        info=INFO,
        url=f"http://user:{MARKER}@h:1?key={MARKER}",
        environ={"HF_TOKEN": MARKER},
        launch={"tp_size": 8},
        **RUN,
    )
    section = PROBE.report(given)["server"]
    text = msgspec.json.encode(section).decode()
    assert isinstance(section, ServerSection)
    assert (section.state, section.up, section.url, section.environ) == ("up", True, "http://h:1", "readable")
    assert (section.version, section.tp_size, section.launch) == ("0.5.16", 8, {"tp_size": 8})
    assert MARKER not in text + repr(given)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (facts(info=INFO), "up"),
        (facts(REFUSED), "not-found"),
        (facts(REFUSED, **RUN), "starting"),
        (facts(SILENT), "unreachable"),
        (facts(problem=Problem("no-key", "A key.")), "unauthorized"),
        (facts(ServerObservation(answer=None), launch_source=PREFLIGHT), "preflight"),
    ],
)
def test_the_report_says_the_state_in_one_word(given: ServerFacts, state: str) -> None:
    """One word tells a starting server from an absent, silent or locked one."""
    assert PROBE.report(given)["server"].state == state


def test_nothing_has_passed_a_launch_that_is_only_considered() -> None:
    """In a preflight what hinders a launch gates, so that the verdict is not "ready"."""
    seen = view(facts(ServerObservation(answer=None), launch_source=PREFLIGHT))
    assert (seen.answer, seen.refusal_is_proof) == (Answer.REFUSED, True)
