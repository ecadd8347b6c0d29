"""What the server's picture means: conditions, features, series and the report."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sidecar.environment import Damage, EnvironmentFacts, ModuleFiles
from sidecar.model import (
    Answer,
    Feature,
    Finding,
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
from sidecar.probes.server.facts import removed_since
from sidecar.processes import Role, ServerProcess, ServerProcesses
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
    more: dict[str, Any] | None = None,
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
        **(more or {}),
    )


def judged(given: ServerFacts) -> dict[str, tuple[str, str | None]]:
    findings = list(PROBE.judge(Result(probe="server", outcome=Outcome.OK, facts=given), WORLD))
    assert [finding.code for finding in findings] == [condition.code for condition in PROBE.conditions]
    declared = {condition.code: condition.reasons for condition in PROBE.conditions}
    for finding in findings:
        assert finding.reason is None or finding.reason in declared[finding.code]
        assert finding.status is Status.FALSE or (finding.message or declared[finding.code][finding.reason]).endswith(
            "."
        )
    return {finding.code: (finding.status.value, finding.reason) for finding in findings if finding.status != "false"}


RUNNING_CODES = ("server-workers-missing", "server-runs-replaced-files")


def reached(given: ServerFacts) -> dict[str, tuple[str, str | None]]:
    """What is judged of the address alone."""
    return {code: said for code, said in judged(given).items() if code not in RUNNING_CODES}


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
    assert reached(given) == expected


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
        assert len(reached(facts(problem=Problem(token, "It is so.")))) == 1


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


@pytest.mark.parametrize(
    ("given", "is_sglang", "up"),
    [
        (facts(info=INFO), True, True),
        (facts(), None, True),
        (facts(problem=Problem("not-sglang", "No.")), False, False),
        (facts(problem=Problem("not-json", "No.")), False, False),
        (facts(problem=Problem("http-error", "500.")), None, True),
        (facts(problem=Problem("no-key", "A key.")), None, True),
        (facts(problem=Problem("not-sglang", "No."), **RUN), None, True),
        (facts(problem=Problem("not-sglang", "No."), candidates=(1, 2)), None, True),
        (facts(info=INFO, problem=Problem("not-json", "No longer.")), True, True),
        (facts(REFUSED), None, False),
    ],
)
def test_what_is_no_sglang_is_not_up(given: ServerFacts, is_sglang: bool | None, up: bool) -> None:
    """Anything that answers gates as a server does, for it may be a proxy; only what may be SGLang is called up."""
    section = PROBE.report(given)["server"]
    assert (section.is_sglang, section.up) == (is_sglang, up)
    assert Sample("server_up", (), float(up)) in list(PROBE.samples(given))
    if given.observation.answer is Answer.ACCEPTED:
        assert view(given).answer is Answer.ACCEPTED


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


# -- its workers ----------------------------------------------------------------------------------------


def running(alive: int = 0, zombies: int = 0, *, other: Role | None = Role.DETOKENIZER, **more: Any) -> ServerProcesses:
    """A server with that many schedulers, and one process of another role."""
    processes = [ServerProcess(pid=7, role=Role.MAIN, resident=10)]
    if other is not None:
        processes.append(ServerProcess(pid=8, role=other, resident=20))
    processes += [ServerProcess(pid=20 + n, role=Role.SCHEDULER, resident=100) for n in range(alive)]
    processes += [ServerProcess(pid=90 + n, role=Role.SCHEDULER, zombie=True) for n in range(zombies)]
    return ServerProcesses(processes=tuple(processes), **({"replaced": ()} | more))


def with_workers(
    found: ServerProcesses | None,
    *,
    expected: int | None = None,
    seen: int = 0,
    observation: ServerObservation = UP,
    **target: Any,
) -> ServerFacts:
    more = {"running": found, "schedulers_expected": expected, "schedulers_seen": seen}
    return facts(observation, info=INFO, more=more, **RUN | target)


WORKERS, REPLACED = RUNNING_CODES


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (with_workers(running(2), expected=2), None),
        (with_workers(running(2), seen=2), None),
        (with_workers(running(1, 1), expected=2), ("true", "ended")),
        (with_workers(running(0, 2)), ("true", "ended")),
        (with_workers(running(2, 1), expected=2), None),
        (with_workers(running(1), expected=2, seen=2), ("true", "gone")),
        (with_workers(running(0), seen=1), ("true", "gone")),
        (with_workers(running(0, other=None), seen=1), ("true", "gone")),
        (with_workers(running(7), expected=8, seen=7), ("true", "fewer")),
        (with_workers(running(0), expected=1), ("unknown", "never-seen")),
        (with_workers(running(0, other=None), expected=1), ("unknown", "never-seen")),
        (with_workers(running(1, cut=True), expected=2, seen=2), ("unknown", "not-read")),
        (with_workers(ServerProcesses(problem="timeout"), expected=2), ("unknown", "not-read")),
        (with_workers(None, expected=2), ("unknown", "no-process")),
        (with_workers(running(0, 1), observation=REFUSED), None),
        (with_workers(running(0, 1), observation=SILENT), None),
        (with_workers(running(0, 1), url_source="setting"), ("true", "ended")),
        (with_workers(running(0, 1), url_source="listening-socket"), ("true", "ended")),
        (with_workers(running(0, 1), url_source="command-line-other-network"), ("unknown", "address-unknown")),
        (facts(info=INFO, processes=Processes.HIDDEN), ("unknown", "processes-hidden")),
        (facts(REFUSED), None),
        (facts(ServerObservation(answer=None), launch_source=PREFLIGHT), None),
    ],
)
def test_workers_are_missed_only_where_they_are_known_to_be_gone(
    given: ServerFacts, expected: tuple[str, str] | None
) -> None:
    """A server that answers without its schedulers is critical; a layout that was never seen proves nothing.

    vllm-project/vllm#36960, sgl-project/sglang#18579, ai-dynamo/dynamo#2137. A launch through Ray, or of an encoder,
    has a detokenizer or nothing below its main process, and no scheduler.
    """
    assert judged(given).get(WORKERS) == expected


def test_what_cannot_be_seen_from_here_fails_no_check() -> None:
    """Hidden processes leave both conditions unknown at severity info, so that they change no exit code."""
    given = facts(info=INFO, processes=Processes.HIDDEN)
    found = PROBE.judge(Result(probe="server", outcome=Outcome.OK, facts=given), WORLD)
    ours = [one for one in found if one.code in RUNNING_CODES]
    assert [(one.status, one.severity) for one in ours] == [(Status.UNKNOWN, Severity.INFO)] * 2


def test_zombies_are_named() -> None:
    """The evidence names the ended processes and what still lives."""
    given = with_workers(running(1, 1), expected=2)
    found = {one.code: one for one in PROBE.judge(Result(probe="server", outcome=Outcome.OK, facts=given), WORLD)}
    assert (
        found[WORKERS].message == "The server answers with 1 scheduler alive: 1 scheduler ended and was not replaced."
    )
    assert found[WORKERS].evidence == ("process 90: scheduler, a zombie", "main 1, scheduler 1, detokenizer 1")


# -- replaced files -------------------------------------------------------------------------------------

STARTED = 1_700_000_000.0
NOW = World(standing=WORLD.standing, server=ServerView(), now=STARTED + 3600, settings=None)
LIBRARY = "sgl_kernel/flash_ops.abi3.so"


def on_disk(
    changed: dict[str, float] | None,
    found: ServerProcesses | None = None,
    *,
    observation: ServerObservation = UP,
    installed: str | None = None,
    **target: Any,
) -> ServerFacts:
    more = {"running": found or running(1), "changed_at": changed, "installed_sglang": installed}
    return facts(observation, info=INFO, more=more, **RUN | {"create_time": STARTED} | target)


def replaced(given: ServerFacts) -> Finding:
    found = PROBE.judge(Result(probe="server", outcome=Outcome.OK, facts=given), NOW)
    return next(one for one in found if one.code == REPLACED)


@pytest.mark.parametrize(
    ("given", "status", "reason"),
    [
        (on_disk({"torch": STARTED - 100}), "false", None),
        (on_disk({"torch": STARTED + 3}), "false", None),
        (on_disk({"torch": STARTED + 60}), "true", "changed-after-start"),
        (on_disk({"torch": STARTED + 60}, running(1, replaced=None)), "true", "changed-after-start"),
        (on_disk({"torch": STARTED + 7200}), "false", None),
        (on_disk({}, running(1, replaced=(LIBRARY,))), "true", "mapped-replaced"),
        (on_disk(None, running(1, replaced=(LIBRARY,))), "true", "mapped-replaced"),
        (on_disk({"torch": STARTED + 60}, running(1, replaced=(LIBRARY,))), "true", "mapped-replaced"),
        (on_disk({"torch": STARTED + 60}, running(1), observation=REFUSED), "true", "changed-after-start"),
        (on_disk(None), "unknown", "files-unseen"),
        (on_disk(None, running(1, replaced=None)), "unknown", "files-unseen"),
        (on_disk({"torch": STARTED + 60}, create_time=None), "unknown", "files-unseen"),
        (on_disk(None, ServerProcesses(problem="timeout")), "unknown", "not-read"),
        (facts(info=INFO, processes=Processes.HIDDEN), "unknown", "processes-hidden"),
        (facts(REFUSED), "false", None),
        (facts(ServerObservation(answer=None), launch_source=PREFLIGHT), "false", None),
    ],
)
def test_a_server_runs_replaced_files_where_disk_and_process_differ(
    given: ServerFacts, status: str, reason: str | None
) -> None:
    """Loaded libraries that are gone, or packages changed well after the start; a clock set back dates nothing.

    sgl-project/sglang#30612, Dao-AILab/flash-attention#2310
    """
    found = replaced(given)
    assert (found.status.value, found.reason) == (status, reason)


GONE = "flashinfer-python"
MISSING = Damage(missing=9, examples=("flashinfer/__init__.py",))


@pytest.mark.parametrize(
    ("since", "status"),
    [(STARTED - 100, "false"), (STARTED + 3, "false"), (STARTED + 60, "unknown"), (None, "unknown")],
)
def test_files_that_may_have_gone_since_the_start_leave_it_open(since: float | None, status: str) -> None:
    """A file that goes leaves no time behind; the folder that it lay in tells by when it had gone."""
    given = replace(on_disk({}), incomplete={GONE: replace(MISSING, missing_since=since)})
    found = replaced(given)
    assert (found.status.value, found.reason) == (status, "files-gone" if status == "unknown" else None)
    assert (GONE in found.message) == (status == "unknown")
    assert len(found.evidence) == (status == "unknown")


def test_what_was_seen_to_go_is_known() -> None:
    """Where this agent saw it before under the same server."""
    found = replaced(replace(on_disk({}), removed={GONE: "the module flashinfer is gone (/s/flashinfer)"}))
    assert (found.status.value, found.reason) == ("true", "changed-after-start")
    assert found.message.startswith(f"Files of {GONE} were removed under the running server")
    assert f"{GONE}: the module flashinfer is gone (/s/flashinfer)" in found.evidence


WITH_FLASHINFER = EnvironmentFacts(
    scope=Scope.SERVER,
    changed_at={"flashinfer-python": STARTED, "sglang": STARTED},
    modules={"flashinfer": ModuleFiles(kind="package", places=("/s/flashinfer",))},
)


@pytest.mark.parametrize(
    ("change", "packages"),
    [
        ({}, []),
        ({"modules": {"flashinfer": ModuleFiles()}}, [GONE]),
        ({"modules": {"flashinfer": ModuleFiles(kind="namespace", places=("/s/flashinfer",))}}, [GONE]),
        ({"damaged": {"sglang": MISSING}}, ["sglang"]),
        ({"damaged": {"sglang": Damage(resized=1)}}, []),
        ({"changed_at": {"sglang": STARTED}}, [GONE]),
    ],
)
def test_what_an_environment_lacks_that_it_had(change: dict[str, Any], packages: list[str]) -> None:
    """Folders, single files and registrations; what was missing before is not counted, nor what was never seen."""
    later = replace(WITH_FLASHINFER, **change)
    assert list(removed_since(WITH_FLASHINFER, later)) == packages
    assert removed_since(later, replace(later)) == {}
    assert removed_since(None, later) == {}


def test_replaced_files_are_listed_with_their_packages() -> None:
    """Message and evidence name packages, files, times and the two releases."""
    changed = {"flashinfer-python": STARTED + 60, "torch": STARTED - 9}
    found = replaced(on_disk(changed, running(1, replaced=(LIBRARY,)), installed="0.5.17"))
    assert "flashinfer-python, sgl_kernel" in found.message
    assert found.evidence == (
        f"loaded, and deleted or replaced on disk: {LIBRARY}",
        "flashinfer-python: files changed at 2023-11-14T22:14:20Z",
        "process 7 started at 2023-11-14T22:13:20Z",
        "the server says that it runs sglang 0.5.16; 0.5.17 is installed",
    )


# -- its processes shown --------------------------------------------------------------------------------


def process_samples(given: ServerFacts) -> set[tuple[str, str, float]]:
    families = {"server_processes", "server_resident_memory_bytes"}
    return {(one.family, one.labels[0], one.value) for one in PROBE.samples(given) if one.family in families}


def test_processes_are_counted_by_role() -> None:
    """Living processes and their memory by role; a role whose only process is a zombie counts 0."""
    assert process_samples(with_workers(running(2, 1))) == {
        ("server_processes", "main", 1),
        ("server_processes", "detokenizer", 1),
        ("server_processes", "scheduler", 2),
        ("server_resident_memory_bytes", "main", 10),
        ("server_resident_memory_bytes", "detokenizer", 20),
        ("server_resident_memory_bytes", "scheduler", 200),
    }
    assert ("server_processes", "scheduler", 0) in process_samples(with_workers(running(0, 1)))


def test_a_sum_with_a_hole_is_no_sum() -> None:
    """Memory of a role is absent when one of its processes does not tell."""
    found = ServerProcesses(
        processes=(
            ServerProcess(pid=1, role=Role.SCHEDULER, resident=5),
            ServerProcess(pid=2, role=Role.SCHEDULER, resident=None),
        )
    )
    shown = process_samples(with_workers(found))
    assert ("server_processes", "scheduler", 2) in shown
    assert not [one for one in shown if one[0] == "server_resident_memory_bytes"]


@pytest.mark.parametrize("found", [None, ServerProcesses(problem="timeout"), running(1, cut=True)])
def test_processes_that_were_not_seen_have_no_series(found: ServerProcesses | None) -> None:
    """What was not read, or not whole, is not counted."""
    assert process_samples(with_workers(found)) == set()


def test_the_report_lists_processes_and_what_may_not_be_read_of_them() -> None:
    """Each process with role and memory; each refusal once, with its reason and what would allow it."""
    main = ServerProcess(pid=7, role=Role.MAIN, resident=10, denied={"environ": "other-user", "maps": "other-user"})
    workers = [
        ServerProcess(pid=20 + n, role=Role.SCHEDULER, resident=100, denied={"maps": "other-user"}) for n in (0, 1)
    ]
    found = ServerProcesses(processes=(main, *workers))
    given = with_workers(found, expected=2)
    section = PROBE.report(given)["server"]
    assert [(one.pid, one.role, one.resident, one.zombie) for one in section.processes] == [
        (7, "main", 10, False),
        (20, "scheduler", 100, False),
        (21, "scheduler", 100, False),
    ]
    assert section.schedulers_expected == 2
    assert [(one.what, one.token) for one in section.denied] == [
        ("environ", "other-user"),
        ("maps", "other-user"),
        ("maps of scheduler", "other-user"),
    ]
    assert "runAsUser" in section.denied[0].remedy
    assert PROBE.report(facts(processes=Processes.HIDDEN))["server"].processes is None
