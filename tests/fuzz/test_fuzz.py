"""Made-up input for everything that is parsed.

With `make test` each target gets the same few examples each time; `make fuzz` goes on with new ones for MINUTES and
keeps what failed for the next run. More than "no exception" is asked for: what cannot be read becomes unknown, never
good or bad; nothing takes long; what was written reads back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from sidecar import baseline
from sidecar.catalog import build, discover
from sidecar.childenv import child_environment
from sidecar.config import ConfigError, Listen, load
from sidecar.connections import Limits
from sidecar.environment import EnvironmentFacts
from sidecar.environment.answer import facts_from
from sidecar.exposition import Exposition
from sidecar.imports import ImportOutcome
from sidecar.imports.answer import Circumstances, evidence_from
from sidecar.isolation import ChildReport, Isolation
from sidecar.launch.args import LaunchForm, parse_launch
from sidecar.launch.file import LaunchFileError, words
from sidecar.launch.words import parse
from sidecar.model import (
    Change,
    ChangeKind,
    Known,
    Observed,
    ProbeCrash,
    ProbeTimeout,
    Scope,
    Target,
)
from sidecar.nvml.client import NvmlClient, parse_module
from sidecar.serverinfo import Problem, ServerInfo, parse_info
from sidecar.state import State, Stuck, decode, encode
from sidecar.web import Web, bind
from tests.fakes.children import python
from tests.fakes.reader import read
from tests.fakes.site import good
from tests.samples import ProcessState, Store, catalog, snapshot

MINUTES = float(os.environ.get("MINUTES") or 0)
TARGETS: list[str] = []
SECRET = "s3cr3t-K3y!"


def fuzzed(few: int = 40, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of a function over made-up arguments: ``few`` examples, or as many as there is time for."""

    def decorate(function: Callable[..., Any]) -> Any:
        TARGETS.append(function.__name__)

        def test() -> None:
            checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
            if not MINUTES:
                run = settings(
                    max_examples=few, deadline=None, derandomize=True, database=None, suppress_health_check=checks
                )(given(**strategies)(function))
                run()
                return
            begun, runs = time.monotonic(), 0
            while time.monotonic() - begun < 60 * MINUTES / len(TARGETS):
                run = seed(random.randrange(2**32))(
                    settings(max_examples=few * 10, deadline=None, suppress_health_check=checks)(
                        given(**strategies)(function)
                    )
                )
                run()
                runs += 1
            sys.stderr.write(f"\n{function.__name__}: about {runs * few * 10} examples\n")

        test.guided = given(**strategies)(function).hypothesis.fuzz_one_input  # type: ignore[attr-defined]
        test.__name__ = function.__name__
        test.__doc__ = function.__doc__
        return pytest.mark.timeout(0 if MINUTES else 120)(test)

    return decorate


# -- what input is made of --------------------------------------------------------------------------------

NASTY = st.sampled_from(
    [
        "",
        "\0",
        "\x1b[2J",
        "\ud800",
        "\udcff",
        "\u2028",
        "\u202e",
        "NaN",
        "-1",
        "9" * 400,
        "1e999",
        "true",
        "null",
        "None",
        "../../etc/passwd",
        "a" * 5000,
        "%s%n",
        "${x}",
        "{{}}",
        "\r\n",
        "=",
        "==",
        "[]",
        "\ufeff",
        SECRET,
    ]
)
TEXT = st.text(max_size=30) | NASTY
NUMBER = st.integers() | st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**300]) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
DEEP = [b"[" * 100_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900, b"9" * 100_000, b'"' + b"\\" * 50_000]


@st.composite
def damaged(draw: st.DrawFn, *originals: bytes) -> bytes:
    """An original, of which pieces were cut, doubled, swapped or overwritten."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, max(len(data), 1)))
        length = draw(st.integers(0, 40))
        match draw(st.integers(0, 4)):
            case 0:
                del data[at : at + length]
            case 1:
                data[at:at] = data[at : at + length]
            case 2:
                data[at:at] = draw(st.binary(max_size=8))
            case 3:
                data[at:at] = draw(NASTY).encode("utf-8", "surrogatepass")
            case _:
                data[at : at + length] = draw(
                    st.sampled_from([b"\n", b"\0", b'"', b"{", b"]", b"\xff", b":", b" " * 60])
                )
    return bytes(data)


def value_in(text: object) -> bool:
    """Whether a text can stand in every output: no line end, nothing that no encoding takes."""
    return isinstance(text, str) and text.encode() is not None


# -- files of a Python environment --------------------------------------------------------------------------

METADATA = (
    (
        b"Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\nRequires-Dist: numpy>=1.2; extra == 'x'\n"
        b"Requires-Python: >=3.9\n\nText\nVersion: 9.9\n"
    ),
    b"Metadata-Version: 2.1\r\nName: x\r\nVersion: 1\r\nDescription: a\r\n        b\r\n\r\n",
)
RECORD = (b'sglang/__init__.py,sha256=47DEQ,0\n"a,b.py",,\nflashinfer/x.so,sha256=zz,12\n../../../bin/x,,\n',)
PTH = (
    b"import sys; sys.path.insert(0, 'x')\n/usr/lib/x\n../up\n# c\n",
    b"import __editable___x_finder; __editable___x_finder.install()\n",
)
FINDER = (b"MAPPING: dict[str, str] = {'sglang': '/src/sglang'}\nNAMESPACES = {}\n",)
DIRECT = (b'{"url": "file:///src", "dir_info": {"editable": true}}',)


@fuzzed(
    few=6,
    files=st.lists(
        st.tuples(damaged(*METADATA), damaged(*RECORD), damaged(*PTH), damaged(*FINDER), damaged(*DIRECT)),
        min_size=1,
        max_size=12,
    ),
    site_py=damaged(b'__version__ = "2.11.0+cu130"\ncuda: Optional[str] = "13.0"\n', b"__version__ = '0.6.14'\n"),
)
def test_an_environment(files: list[tuple[bytes, ...]], site_py: bytes) -> None:
    """Whatever stands in a package's files, those beside it are read, each version looks like one, in bounded time."""
    with tempfile.TemporaryDirectory() as folder:
        site = good(Path(folder) / "venv")
        site.dist("sglang", "0.5.16")
        for number, (metadata, record, pth, finder, direct) in enumerate(files):
            info = site.packages / f"odd{number}-1.0.dist-info"
            info.mkdir()
            for name, content in (("METADATA", metadata), ("RECORD", record), ("direct_url.json", direct)):
                (info / name).write_bytes(content)
            (site.packages / f"odd{number}.pth").write_bytes(pth)
            (site.packages / f"__editable___odd{number}_finder.py").write_bytes(finder)
        (site.packages / "torch/version.py").write_bytes(site_py)
        (site.packages / "flashinfer/_build_meta.py").write_bytes(site_py)
        begun = time.monotonic()
        answer = read(site.python)
        assert time.monotonic() - begun < 20
        facts = facts_from(answer, site.target())
    assert facts.distributions["sglang"] == "0.5.16"
    assert all(version is None or version[0].isdigit() for version in facts.distributions.values())
    assert all(value_in(name) for name in facts.distributions)


@fuzzed(
    few=200,
    answer=st.dictionaries(
        st.sampled_from(
            [
                "fingerprint",
                "python",
                "python_version",
                "site_dirs",
                "path_code",
                "distributions",
                "requires_of",
                "duplicates",
                "damaged",
                "leftovers",
                "changed_at",
                "builds",
                "editable",
                "libcuda",
                "toolchain",
                "cache",
                "cubins",
                "modules",
                "torch",
                "kernel",
                "flashinfer",
                "problem",
            ]
        ),
        JSON,
    ),
)
def test_an_answer_of_the_reader(answer: dict[str, Any]) -> None:
    """A reader that answers anything gives facts of the right types, all of which can be shown."""
    target = Target(url="http://127.0.0.1:1", url_source="test", scope=Scope.SERVER, python="/p", python_source="test")
    facts = facts_from(answer, target)
    assert isinstance(facts, EnvironmentFacts)
    repr(facts).encode()
    assert len(repr(facts)) < 2_000_000


# -- children -----------------------------------------------------------------------------------------------

AROUND = Circumstances(
    same_user=True, memory_short=False, memory_limited=False, cpu_limited=False, busy=False, folder="/tmp/x"
)
FIELDS = st.sampled_from(
    [
        "ok",
        "exception",
        "message",
        "is_memory_error",
        "seconds",
        "step",
        "symbol",
        "names",
        "errno",
        "is_os_error",
        "exit",
        "versions",
        "chain",
        "loads",
        "wheels",
        "cause",
        "missing",
        "where",
        "cuda_available",
        "max_rss_bytes",
    ]
)


@fuzzed(
    few=200,
    lines=st.lists(
        st.fixed_dictionaries({}, optional={"stage": JSON, "too_old": JSON, "exec_error": JSON, "folder": JSON})
        | st.fixed_dictionaries({"result": st.dictionaries(FIELDS, JSON) | JSON}),
        max_size=5,
    ),
    code=st.none() | st.integers(-64, 255),
    timed_out=st.booleans(),
)
def test_an_imports_lines(lines: list[dict[str, Any]], code: int | None, timed_out: bool) -> None:
    """An import counts as good for one answer only, and what it says can be shown whatever it says."""
    report_ = ChildReport(lines=tuple(lines), exit_code=code, timed_out=timed_out, tail="\x1b[31mtail\n")
    evidence = evidence_from(report_, 0.0, AROUND)
    last = report_.result
    good_answer = last is not None and isinstance(last["result"], dict) and last["result"].get("ok") is True
    assert (evidence.outcome is ImportOutcome.OK) == good_answer
    repr(evidence).encode()


@fuzzed(
    few=12, content=damaged(b'{"stage": "a"}\n{"result": 1}\n', b'{"result": {"ok": true}}\n') | st.sampled_from(DEEP)
)
def test_a_childs_channel(content: bytes) -> None:
    """Any bytes on the channel: objects are those that are there, and the rest is counted, not believed."""

    async def run() -> ChildReport:
        isolation = Isolation()
        try:
            code = f"data = {content[:20000]!r}\nwhile data: data = data[os.write(fd, data):]"
            return await isolation.run(python(code), env=child_environment(os.environ), timeout=30)
        finally:
            await isolation.close()

    ended = asyncio.run(run())
    expected = []
    for line in content[:20000].split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            expected += [value] if isinstance(value, dict) else []
    # By their text: NaN is not itself.
    assert repr(list(ended.lines)) == repr(expected)
    assert ended.exit_code == 0


class Told:
    """A worker that says what it is told to; the boundary is the process."""

    def __init__(self, lines: list[Any]) -> None:
        self._lines = list(lines)
        self.stuck = False
        self.exit_code = 0
        self.tail = ""

    async def send(self, message: Any) -> None:
        """Take a request."""

    async def receive(self) -> Any:
        """Give the next line."""
        return self._lines.pop(0) if self._lines else None

    def signal_group(self, number: int) -> None:
        """Be told to end."""


class Stage:
    """An isolation in which such a worker is all that is started."""

    def __init__(self, lines: list[Any]) -> None:
        self._lines = lines

    async def start(self, *_args: Any, **_more: Any) -> Told:
        """Start it."""
        return Told(self._lines)

    async def stop(self, *_args: Any, **_more: Any) -> int:
        """End it."""
        return 0


HEAD = {
    "code": 0,
    "call": "nvmlInit",
    "words": "",
    "loader": None,
    "driver_version": "580.1",
    "nvml_version": "13",
    "cuda_driver_version": 13000,
    "library": "/l/libnvidia-ml.so.580.1",
    "count": 1,
    "errors": {},
    "module_text": None,
    "module_gpus": 1,
    "device": {"present": True, "refused": False},
}
LINE = (
    st.fixed_dictionaries({"at": JSON}, optional={"gpu": JSON})
    | st.fixed_dictionaries(
        {"head": st.dictionaries(st.sampled_from([*HEAD]), JSON).map(lambda odd: HEAD | odd) | JSON}
    )
    | st.fixed_dictionaries({"gpu": st.fixed_dictionaries({"index": JSON, "code": JSON}) | JSON})
    | st.fixed_dictionaries({"events": st.fixed_dictionaries({"watched": JSON, "xids": JSON, "errors": JSON}) | JSON})
    | st.sampled_from([{"done": True}, {"head": HEAD}, {}, {"stale": 1}, {"unusable": []}, {"exec_error": {}}])
)


@fuzzed(few=80, lines=st.lists(LINE, max_size=6))
def test_the_workers_lines(lines: list[Any]) -> None:
    """Whatever a worker says, its round ends in a reading or in one of the two failures that are declared."""

    async def run() -> None:
        client = NvmlClient(Stage(lines), environ={})  # type: ignore[arg-type]  # the boundary
        for _ in range(2):
            with contextlib.suppress(ProbeCrash, ProbeTimeout):
                reading = await client.round(0.05)
                assert {"done": True} in lines
                assert reading.code == 0 or any("head" in line for line in lines)
        await client.close()

    asyncio.run(run())


@fuzzed(
    few=100,
    content=damaged(
        b"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC version: 12\n",
        b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue\n",
    ),
)
def test_the_drivers_version(content: bytes) -> None:
    """A version is digits and dots or not known, a flavour one of two or not known."""
    version, flavour = parse_module(content.decode("utf-8", "replace"))
    assert version is None or set(version) <= set(string.digits + ".")
    assert flavour in (None, "open", "proprietary")


# -- the server ---------------------------------------------------------------------------------------------

INFO = json.dumps(
    {"version": "0.5.16", "tp_size": 2, "attention_backend": "fa3", "api_key": SECRET, "internal_states": [{"x": 1}]}
).encode()


@fuzzed(
    few=200,
    body=damaged(INFO)
    | JSON.map(lambda one: json.dumps({"version": one, "tp_size": one}).encode())
    | st.sampled_from(DEEP),
)
def test_the_servers_information(body: bytes) -> None:
    """Short values of plain types or a problem, no key among them, in bounded time."""
    begun = time.monotonic()
    found = parse_info(body)
    assert time.monotonic() - begun < 5
    assert isinstance(found, ServerInfo | Problem)
    repr(found).encode()
    assert SECRET not in repr(found)


WORDS = st.lists(
    TEXT
    | st.sampled_from(
        [
            "sh",
            "-c",
            "-lc",
            "env",
            "exec",
            "python3",
            "-m",
            "sglang.launch_server",
            "--tp",
            "--tp=2",
            "--config",
            "&&",
            "'",
            "--attention-backend",
            "fa3",
            "$(cat /x)",
            "A=b",
            "--",
            "-e",
            "--api-key",
            "sglang",
            "serve",
            "bash -c 'sglang",
        ]
    ),
    max_size=14,
)


@fuzzed(few=150, argv=WORDS)
def test_a_launch(argv: list[str]) -> None:
    """Any words: values are short and of plain types, and the value behind a key's flag is not kept."""
    launch = parse_launch([*argv, "--api-key", SECRET + "x"])
    assert launch.form in LaunchForm
    for name, value in launch.flags.items():
        assert name.isidentifier()
        assert isinstance(value, int) or (value.isprintable() and len(value) <= 128)
    assert SECRET + "x" not in repr(launch.flags)


@fuzzed(
    few=150,
    content=damaged(
        b"tp: 2\nattention-backend: fa3\napi-key: s3cr3t-K3y!\n",
        b"a: &x [1, 2]\nb: *x\nc: {d: e}\n",
        b"? x\n: !!set {a}\n",
    )
    | st.sampled_from(DEEP),
)
def test_a_launchs_file(content: bytes) -> None:
    """Words or one sentence, without a key, in bounded time."""
    begun = time.monotonic()
    try:
        found = list(words(content[:200_000], "launch.yaml"))
    except LaunchFileError as error:
        assert SECRET not in str(error)  # noqa: PT017 - both ends are right
    else:
        assert all(isinstance(word, str) for word in found)
        # A key may stand behind any flag: it has characters that no choice has.
        launch = parse_launch(["python3", "-m", "sglang.launch_server", "--config", "x.yaml"], lambda _path: found)
        assert SECRET not in repr({**launch.flags, "host": ""}) + repr(launch.notes.problems)
    assert time.monotonic() - begun < 10


# -- files of the agent's own ---------------------------------------------------------------------------------

PLAIN = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30)
TIME = st.floats(0, 1e10, allow_nan=False)
STATES = st.builds(
    State,
    known=st.builds(
        Known,
        seen=st.dictionaries(st.tuples(PLAIN, PLAIN), st.tuples(st.none() | PLAIN, st.none() | PLAIN), max_size=4).map(
            lambda seen: {key: Observed(value=one[0], source=key[1], build=one[1]) for key, one in seen.items()}
        ),
        counts=st.dictionaries(PLAIN, st.integers(0, 2**53), max_size=3),
        last_change=st.dictionaries(PLAIN, TIME, max_size=3),
        recent=st.lists(
            st.builds(
                Change,
                item=PLAIN,
                kind=st.sampled_from(ChangeKind),
                before=st.none() | PLAIN,
                after=st.none() | PLAIN,
                at=TIME,
            ),
            max_size=3,
        ).map(tuple),
    ),
    stuck=st.lists(st.builds(Stuck, probe=PLAIN, where=st.none() | PLAIN, detail=PLAIN, since=TIME), max_size=2).map(
        tuple
    ),
)


@fuzzed(few=100, state=STATES)
def test_a_state_reads_back(state: State) -> None:
    """What was written is what is read."""
    assert decode(encode(state)) == state


@fuzzed(few=200, content=STATES.map(encode).flatmap(damaged) | st.sampled_from(DEEP))
def test_a_damaged_state(content: bytes) -> None:
    """A state whose every text can be shown and whose numbers a metric can hold, or one sentence."""
    try:
        state = decode(content)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both ends are right
        return
    repr(state).encode()
    json.dumps([one.before for one in state.known.recent], ensure_ascii=False).encode()
    assert encode(decode(encode(state))) == encode(state)
    assert all(0 <= one < 1e11 for one in state.known.last_change.values())


ITEMS = ("driver", "sglang", "torch", "gpu_model")


@fuzzed(
    few=150,
    content=damaged(b'[environment]\ndriver = ">=580,<590"\ntorch = "2.11.0"\nsglang = "absent"\n', b"[environment]\n"),
)
def test_a_baseline(content: bytes) -> None:
    """Items or sentences; what an unreadable file expects is nothing, not everything."""
    found = baseline.parse(content, "b", ITEMS)
    assert set(found.items) <= set(ITEMS)
    for problem in found.problems:
        problem.sentence.encode()
    for row in baseline.compared(found, {"driver": Observed(value="580.1", source="x")}):
        assert row.item in ITEMS


CONFIG = (
    (
        b'listen = [":9477"]\nserver_url = "http://127.0.0.1:30000"\nrequire = ["fa3"]\n[intervals]\ndriver = 10\n'
        b'[severity]\ngpu-lost = "warning"\n'
    ),
    b'import = "never"\ngpus = "0,1"\nserver_pid = 12\n',
)


@fuzzed(few=100, content=damaged(*CONFIG) | st.sampled_from(DEEP))
def test_a_configuration(content: bytes) -> None:
    """Settings, or sentences of one line each that name the key."""
    known = build(discover())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_bytes(content)
        try:
            load(
                file=path,
                environ={},
                flags={},
                probe_names=[probe.name for probe in known.probes],
                allowed_requirements=[*known.requirable, *known.conditions],
                conditions=list(known.conditions),
            )
        except ConfigError as error:
            for problem in error.problems:
                assert problem.sentence.startswith(problem.key)
                assert "\n" not in problem.sentence
                problem.sentence.encode()


# -- HTTP -----------------------------------------------------------------------------------------------------

REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain;version=0.0.4;q=0.5\r\nAccept-Encoding: gzip\r\n\r\n",
    b"GET /readyz?exclude=driver&verbose HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /readyz/gpu-lost HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /?live=abc&refresh=on HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cr3t-K3y!\r\nUpgrade: websocket\r\n\r\n",
    b"HEAD /docs HTTP/1.0\r\n\r\n",
)


STATUSES = {200, 400, 401, 403, 404, 405, 413, 414, 417, 426, 431, 501, 505}


@fuzzed(few=5, requests=st.lists(st.tuples(damaged(*REQUESTS), st.integers(1, 4)), min_size=5, max_size=30))
def test_requests(requests: list[tuple[bytes, int]]) -> None:
    """Any bytes on the port get an answer that is no fault of ours, or an end; the next probe is answered."""

    async def ask(port: int, data: bytes, pieces: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            size = max(1, len(data) // pieces)
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await asyncio.sleep(0)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), 10)
        except (ConnectionError, OSError):
            return b""
        finally:
            writer.close()

    async def run() -> None:
        sockets = bind([Listen(host="127.0.0.1", port=0)])
        port = sockets[0].getsockname()[1]
        web = Web(
            Store(snapshot()),
            Exposition(catalog()),
            catalog(),
            state=ProcessState(),
            limits=Limits(request_seconds=1.0),
        )
        await web.start(sockets)
        try:
            answers = await asyncio.gather(*(ask(port, data, pieces) for data, pieces in requests))
            alive = await ask(port, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 1)
        finally:
            await web.stop()
        assert alive.startswith(b"HTTP/1.1 200")
        for answer in answers:
            assert SECRET.encode() not in answer
            if answer:
                assert answer.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")), answer[:80]
                assert int(answer[9:12]) in STATUSES, answer[:200]

    asyncio.run(run())


# -- what takes long --------------------------------------------------------------------------------------------


def costly(size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Input that parsers of its kind are known to choke on, by name; the larger the longer it takes."""
    shell = {
        "quotes": "'" * size,
        "substitutions": "$(" * size,
        "backquotes": "`" * size,
        "backslashes": "\\" * size,
        "documents": "<<a\n" * (size // 4),
        "braces": "${" * size,
        "groups": "(" * size,
        "words": "a " * size,
        "arithmetic": "((" * size,
        "escaped": '"\\"' * size,
    }
    for name, script in shell.items():
        yield f"shell, {name}", lambda script=script: parse(script)  # type: ignore[misc]  # bound now
        yield f"launch, {name}", lambda script=script: parse_launch(["sh", "-c", script])  # type: ignore[misc]
    yaml = {
        "deep lists": b"[" * size,
        "deep maps": b"{a: " * size,
        "aliases": b"a: &a [1]\n" + b"b: *a\n" * size,
        "bomb": b"".join(b"k%d: &x%d [*x%d, *x%d]\n" % (n, n + 1, n, n) for n in range(20)),
        "anchors": b"&a " * size,
        "indents": b"".join(b" " * (n % 900) + b"- \n" for n in range(size // 100)),
        "keys": b"tp: 1\n" * size,
        "quotes": b'"' * size,
        "folded": b"a: >\n" + b" x\n" * size,
        "comments": b"#" * size,
        "tabs": b"\t" * size,
    }

    def file(content: bytes) -> None:
        with contextlib.suppress(LaunchFileError):
            list(words(content, "f"))

    for name, content in yaml.items():
        yield f"YAML, {name}", lambda content=content: file(content)  # type: ignore[misc]
    for name, content in {
        "lists": b"[" * size,
        "maps": b'{"a":' * size,
        "digits": b"9" * size,
        "escapes": b'"' + b"\\u0000" * size,
        "keys": b"{" + b",".join(b'"k%d":1' % n for n in range(size)) + b"}",
    }.items():
        yield f"JSON, {name}", lambda content=content: parse_info(content)  # type: ignore[misc]
    for name, content in {
        "dots": b'[environment]\ndriver = "' + b"1." * size + b'"',
        "commas": b'[environment]\ndriver = "' + b">1," * size + b'"',
        "tables": b"[a]\n" + b"[a.b]\n" * 1 + b"".join(b"[a.x%d]\n" % n for n in range(size // 10)),
        "dotted": b"a" + b".a" * size + b" = 1",
        "arrays": b"a = " + b"[" * size,
    }.items():
        yield f"baseline, {name}", lambda content=content: baseline.parse(content, "b", ITEMS)  # type: ignore[misc]
    for name, text in {
        "spaces": "NVRM version: " + " " * size,
        "digits": "NVRM version: x  " + "1" * size,
        "dots": "NVRM version: x  " + "1." * size,
    }.items():
        yield f"driver, {name}", lambda text=text: parse_module(text)  # type: ignore[misc]


SIZES = (4_000, 16_000)


@pytest.mark.parametrize("name", [name for name, _ in costly(10)])
def test_no_input_takes_more_than_its_length(name: str) -> None:
    """Four times the input takes about four times the time: nothing that others write can hold the agent up."""
    times = []
    for size in SIZES:
        work = dict(costly(size))[name]
        best = float("inf")
        for _ in range(2):
            begun = time.process_time()
            work()
            best = min(best, time.process_time() - begun)
        times.append(best)
    # What is over at once proves nothing about its growth.
    assert times[1] < 0.2 or times[1] / times[0] < 10, times
    assert times[1] < 20


def test_half_a_character_in_a_state_can_be_shown() -> None:
    """JSON can hold what no output can encode; what was remembered is shown in the report."""
    known = Known(recent=(Change(item="sglang", kind=ChangeKind.CHANGED, before="a", after="b", at=1.0),))
    content = encode(State(known=known)).replace(b'"a"', b'"\\ud800"')
    assert [one.before for one in decode(content).known.recent] == ["?"]
