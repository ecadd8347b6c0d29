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
    every_process: bool = True,
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
        every_process=every_process and processes is Processes.SHARED,
        nvidia_present=nvidia,
    )


def judged(given: ServerFacts) -> dict[str, tuple[str, str | None]]:
    findings = list(PROBE.judge(Result(probe="server", outcome=Outcome.OK, facts=given), WORLD))
    assert [finding.code for finding in findings] == [condition.code for condition in PROBE.conditions]
    declared = {condition.code: condition.reasons for condition in PROBE.conditions}
    for finding in findings:
        assert finding.reason is None or finding.reason in declared[finding.code]
        assert finding.status is Status.FALSE or finding.message.endswith(".")
    return {finding.code: (finding.status.value, finding.reason) for finding in findings if finding.status != "false"}


PENDING = {"server-unreachable": ("unknown", "info-pending"), "server-unauthorized": ("unknown", "info-pending")}
GUESSED = {
    "server-unreachable": ("unknown", "address-unknown"),
    "server-unauthorized": ("unknown", "address-unknown"),
}
RUN = {"pid": 7, "create_time": 1.5, "launch_source": RUNNING, "url_source": "command-line"}
GUESSES = ("default", "command-line-incomplete", "command-line-other-network", "listening-socket")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (facts(info=INFO), {}),
        (facts(REFUSED), {"server-not-found": ("true", "no-process")}),
        (facts(REFUSED, processes=Processes.HIDDEN), {"server-not-found": ("true", "connection-refused")}),
        (facts(REFUSED, candidates=(1, 2)), {"server-not-found": ("true", "several-servers")}),
        (facts(REFUSED, **RUN), {}),
        *((facts(REFUSED, **RUN | {"url_source": source}), GUESSED) for source in GUESSES),
        (facts(SILENT), {"server-unreachable": ("true", "timeout")}),
        (facts(SILENT, info=INFO, **RUN), {"server-unreachable": ("true", "timeout")}),
        (facts(problem=Problem("not-json", "A page.")), {"server-unreachable": ("true", "not-json")}),
        (facts(problem=Problem("no-key", "A key.")), {"server-unauthorized": ("true", "no-key")}),
        (facts(problem=Problem("key-withheld", "A key.")), {"server-unauthorized": ("true", "key-withheld")}),
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


@pytest.mark.parametrize("outcome", list(Outcome))
def test_without_facts_nothing_is_found(outcome: Outcome) -> None:
    """Why there are no facts is for the common judge to say, also when good ones have expired."""
    assert list(PROBE.judge(Result(probe="server", outcome=outcome), WORLD)) == []


def test_a_missing_key_names_the_setting() -> None:
    """The remedy of an unauthorized agent is the setting that takes the key."""
    unauthorized = next(condition for condition in PROBE.conditions if condition.code == "server-unauthorized")
    assert "server_key_file" in unauthorized.remedy
    assert unauthorized.severity is Severity.WARNING


def test_a_key_that_is_kept_back_names_its_own_remedy() -> None:
    """Where the agent has a key and does not trust the server with it, the way out is to name the server."""
    given = facts(problem=Problem("key-withheld", "A key."))
    found = list(PROBE.judge(Result(probe="server", outcome=Outcome.OK, facts=given), WORLD))
    remedies = [finding.remedy or "" for finding in found if finding.status is Status.TRUE]
    assert len(remedies) == 1
    assert "server_url" in remedies[0]


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
        (facts(every_process=False), False),
        (facts(candidates=(1, 2)), False),
        (facts(candidates=(1, 2), url_source="setting"), True),
        (facts(**RUN), True),
        (facts(processes=Processes.HIDDEN, **RUN), True),
        (facts(**RUN | {"url_source": "setting"}), True),
        *((facts(**RUN | {"url_source": source}), False) for source in GUESSES),
    ],
)
def test_a_refusal_proves_something_only_at_a_known_address(given: ServerFacts, proof: bool) -> None:
    """An address that was guessed proves nothing while a server may be there: its process, or one not looked for."""
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
    ("given", "used"),
    [
        (facts(info=INFO), False),
        (facts(info=HYBRID), True),
        (facts(info=ServerInfo(attention_backend="fa3")), False),
        (facts(info=INFO, launch={"mamba_backend": "flashinfer"}, launch_source=RUNNING), False),
        (facts(launch={"mamba_backend": "flashinfer"}, launch_source=PREFLIGHT), True),
        (facts(launch={}, launch_source=PREFLIGHT), False),
        (facts(launch={"incomplete": True}, launch_source=PREFLIGHT), None),
        (facts(), None),
    ],
)
def test_flashinfers_mamba_is_used_where_a_backend_says_so(given: ServerFacts, used: bool | None) -> None:
    """What the server resolved decides, then complete flags; where neither speaks the use is unknown, not absent."""
    assert view(given).features.get(Feature.FLASHINFER_MAMBA) is used


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
    assert list(PROBE.samples(facts(REFUSED, pid=7))) == [], "it may well answer at another address"
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
        uid=1000,
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
        *((facts(REFUSED, **RUN | {"url_source": source}), "address-unknown") for source in GUESSES),
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
