"""The metrics: what is present, what is absent, and that every variant is valid and rendered once."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sidecar import __version__
from sidecar.catalog import build
from sidecar.drift import ITEMS
from sidecar.exposition import Exposition, Rendered, accepts_gzip, negotiate
from sidecar.model import (
    Baseline,
    Demo,
    Deviation,
    Drift,
    Expectation,
    Family,
    Known,
    Outcome,
    Sample,
    Severity,
    Snapshot,
    Status,
    Verdict,
)
from tests.samples import NOW, Facts, catalog, condition, probe, snapshot

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
OPENMETRICS = "application/openmetrics-text"


def no_process() -> Iterable[Metric]:
    """Stand for the agent's own process, whose numbers change."""
    return ()


def of_access() -> Iterable[Sample]:
    """Stand for what the agent knows of its certificate and of the files beside it."""
    yield Sample("tls_certificate_not_after_timestamp_seconds", (), NOW)
    yield Sample("access_renewal_failing", ("certificate",), 0)


def render(taken: Snapshot, *, accept: str = "", accept_encoding: str = "", declared: Any = None) -> Rendered:
    """Render with a fresh exposition."""
    exposition = Exposition(declared or catalog(), process=no_process, more=of_access, python_version="3.11.7")
    return exposition.render(taken, accept=accept, accept_encoding=accept_encoding)


def series(taken: Snapshot, declared: Any = None) -> dict[str, float]:
    """Return the series of the classic text, without prefix: line -> value."""
    text = render(taken, declared=declared).body.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("sglang_sidecar_"): float(value) for name, _, value in lines}


# -- conditions ---------------------------------------------------------------------------------------


def test_an_active_condition_is_1_with_its_effective_severity() -> None:
    """The severity label is the effective one, not the declared one."""
    shown = series(snapshot(condition("gpu-lost", Status.TRUE, severity=Severity.WARNING)))
    assert shown['condition_active{code="gpu-lost",severity="warning"}'] == 1
    assert not [name for name in shown if "gpu-lost" in name and 'severity="critical"' in name]


def test_a_judged_condition_that_does_not_hold_is_0() -> None:
    """Judged and fine is 0, so that its absence can mean unknown."""
    assert series(snapshot())['condition_active{code="gpu-lost",severity="critical"}'] == 0


def test_an_unknown_condition_is_neither_0_nor_1() -> None:
    """Unknown has a family of its own and no series among the judged ones."""
    shown = series(snapshot(condition("gpu-lost", Status.UNKNOWN)))
    assert shown['condition_unknown{code="gpu-lost"}'] == 1
    assert not [name for name in shown if name.startswith("condition_active") and "gpu-lost" in name]


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("change", [{"relevant": False}, {"consequence_of": "nvml-library-missing"}])
def test_irrelevant_and_explained_conditions_are_absent(status: Status, change: dict[str, Any]) -> None:
    """What does not concern this server, or follows from another cause, has no series at all."""
    shown = series(snapshot(condition("gpu-lost", status, gpus=(("0", "GPU-a"),), **change)))
    assert not [name for name in shown if "gpu-lost" in name]


def test_gpus_of_an_active_condition() -> None:
    """Each GPU that an active condition concerns has a series; those of others have none."""
    gpus = (("0", "GPU-a"), ("3", "GPU-b"))
    shown = series(
        snapshot(condition("gpu-lost", Status.TRUE, gpus=gpus), condition("driver-hung", Status.FALSE, gpus=gpus))
    )
    assert {name for name in shown if name.startswith("gpu_condition")} == {
        'gpu_condition_active{code="gpu-lost",gpu="0",uuid="GPU-a"}',
        'gpu_condition_active{code="gpu-lost",gpu="3",uuid="GPU-b"}',
    }


# -- probes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.PENDING, None),
        (Outcome.OK, 1.0),
        (Outcome.SKIPPED, 1.0),
        (Outcome.TIMEOUT, 0.0),
        (Outcome.CRASHED, 0.0),
        (Outcome.ERROR, 0.0),
    ],
)
def test_probe_success(outcome: Outcome, expected: float | None) -> None:
    """A probe whose question does not arise succeeded; one that never ended says nothing."""
    assert series(snapshot(outcomes={"driver": outcome})).get('probe_success{probe="driver"}') == expected


def test_probe_runs_are_counted_from_zero_on() -> None:
    """Every outcome of every probe has a counter before the first run, so that the first failure is an increase."""
    taken = snapshot()
    driver = replace(taken.results["driver"], runs={Outcome.OK: 3, Outcome.SKIPPED: 9})
    shown = series(replace(taken, results={"driver": driver}))
    runs = {name: value for name, value in shown.items() if name.startswith("probe_runs_total")}
    assert len(runs) == 5 * len(catalog().probes)
    assert runs.pop('probe_runs_total{outcome="ok",probe="driver"}') == 3
    assert set(runs.values()) == {0}


def test_probe_times() -> None:
    """Duration and absolute time of the last success are shown as they are, and absent where there is none."""
    taken = snapshot()
    fresh = replace(taken.results["server"], duration=None, last_success_at=None)
    shown = series(replace(taken, results={**taken.results, "server": fresh}))
    assert shown['probe_duration_seconds{probe="driver"}'] == 0.25
    assert shown['probe_last_success_timestamp_seconds{probe="driver"}'] == NOW - 3
    assert 'probe_duration_seconds{probe="server"}' not in shown
    assert 'probe_last_success_timestamp_seconds{probe="server"}' not in shown


def test_a_stuck_child_is_shown_only_while_there_is_one() -> None:
    """probe_stuck is absent unless a child cannot be ended."""
    taken = snapshot()
    stuck = replace(taken.results["driver"], stuck=True, outcome=Outcome.TIMEOUT)
    shown = series(replace(taken, results={**taken.results, "driver": stuck}))
    assert [name for name in shown if name.startswith("probe_stuck")] == ['probe_stuck{probe="driver"}']
    assert not [name for name in series(taken) if name.startswith("probe_stuck")]


# -- verdict and identity -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict(ready=True, pending=False, blockers=()), 1),
        (Verdict(ready=False, pending=True, blockers=()), 0),
        (Verdict(ready=False, pending=False, blockers=("gpu-lost",)), 0),
    ],
)
def test_ready(verdict: Verdict, expected: int) -> None:
    """The gauge is the verdict behind /readyz."""
    assert series(replace(snapshot(), verdict=verdict))["ready"] == expected


def test_condition_transitions_are_counted_from_zero_on() -> None:
    """Both series are there before anything happened, so that the first change is an increase."""
    assert series(snapshot())['condition_transitions_total{to="active"}'] == 0
    changed = replace(snapshot(), condition_transitions={True: 3, False: 2})
    assert series(changed)['condition_transitions_total{to="active"}'] == 3
    assert series(changed)['condition_transitions_total{to="inactive"}'] == 2


def test_ready_transitions_are_counted_from_zero_on() -> None:
    """Both directions are there before the first change."""
    assert series(snapshot())['ready_transitions_total{to="ready"}'] == 0
    changed = replace(snapshot(), ready_transitions={False: 2, True: 1})
    assert series(changed)['ready_transitions_total{to="not-ready"}'] == 2


def test_build_info() -> None:
    """The agent names its own version and its Python's."""
    assert series(snapshot())[f'build_info{{python_version="3.11.7",version="{__version__}"}}'] == 1


def test_identity_is_merged_and_the_packages_probe_wins() -> None:
    """One series per item; what the server's own metadata says outranks what another source repeats."""
    facts = {
        "server": Facts(identity={"sglang": "0.5.15", "python": "3.12"}),
        "packages": Facts(identity={"sglang": "0.5.16"}),
        "driver": Facts(identity={"driver": "580.1"}),
    }
    shown = [name for name in series(snapshot(facts=facts)) if name.startswith("environment_info")]
    assert shown == [
        'environment_info{item="driver",value="580.1"}',
        'environment_info{item="python",value="3.12"}',
        'environment_info{item="sglang",value="0.5.16"}',
    ]


# -- samples of probes ----------------------------------------------------------------------------------


def one_probe(samples: Any, *families: Family) -> Any:
    """Return a catalogue of one probe that yields these samples."""
    return build((replace(probe("driver", families=families), samples=samples),))


GAUGE = Family(name="temperature_celsius", kind="gauge", help="Temperature", labels=("gpu",))
COUNTER = Family(name="errors_total", kind="counter", help="Errors", labels=("gpu",))
INFO = Family(name="driver_info", kind="info", help="Driver", labels=("version",))


def taken_with_driver() -> Snapshot:
    """Return a snapshot in which the driver probe has facts."""
    return snapshot(facts={"driver": Facts()})


def test_every_kind_of_family() -> None:
    """A gauge, a counter and an info come out under exactly their declared names."""
    declared = one_probe(
        lambda _facts: [
            Sample("temperature_celsius", ("0",), 41.5),
            Sample("errors_total", ("0",), 2),
            Sample("driver_info", ("580",), 1),
        ],
        GAUGE,
        COUNTER,
        INFO,
    )
    shown = series(taken_with_driver(), declared)
    assert shown['temperature_celsius{gpu="0"}'] == 41.5
    assert shown['errors_total{gpu="0"}'] == 2
    assert shown['driver_info{version="580"}'] == 1


def test_a_family_without_series_is_omitted() -> None:
    """There is no HELP without a value, and no facts means no series."""
    declared = one_probe(lambda _facts: [Sample("errors_total", ("0",), 2)], GAUGE, COUNTER)
    assert b"temperature_celsius" not in render(taken_with_driver(), declared=declared).body
    assert b"errors_total" not in render(snapshot(), declared=declared).body


def test_families_come_in_the_order_of_the_catalogue() -> None:
    """The order is stable whatever order a probe yields its samples in."""
    declared = one_probe(
        lambda _facts: [Sample("errors_total", ("0",), 2), Sample("temperature_celsius", ("0",), 1)], GAUGE, COUNTER
    )
    text = render(taken_with_driver(), declared=declared).body.decode()
    names = [line.split()[2].removeprefix("sglang_sidecar_") for line in text.splitlines() if line.startswith("# TYPE")]
    order = [family.name for family in declared.families]
    assert names == [name for name in order if name in names]
    assert names.index("temperature_celsius") < names.index("errors_total")


@pytest.mark.parametrize(
    "bad",
    [
        Sample("undeclared", (), 1),
        Sample("ready", (), 1),
        Sample("temperature_celsius", ("0", "1"), 1),
        Sample("temperature_celsius", ("0",), 99),
        Sample("temperature_celsius", ("1",), float("nan")),
        Sample("temperature_celsius", (1,), 1),  # type: ignore[arg-type]  # what a defect could yield
        Sample("temperature_celsius", ("1",), None),  # type: ignore[arg-type]  # as above
    ],
)
def test_an_invalid_sample_is_left_out_and_the_others_stay(bad: Sample) -> None:
    """One bad series of one probe neither breaks the scrape nor changes any other value."""
    good = [Sample("temperature_celsius", ("0",), 41), Sample("errors_total", ("0",), 1)]
    with_bad = one_probe(lambda _facts: [good[0], bad, good[1]], GAUGE, COUNTER)
    without = one_probe(lambda _facts: good, GAUGE, COUNTER)
    assert series(taken_with_driver(), with_bad) == series(taken_with_driver(), without)


def test_a_probe_whose_samples_fail_leaves_the_others() -> None:
    """A defect in one probe silences that probe's families only."""

    def broken(_facts: Facts) -> Iterable[Sample]:
        yield Sample("temperature_celsius", ("0",), 41)
        raise RuntimeError("defect")

    shown = series(taken_with_driver(), one_probe(broken, GAUGE))
    assert 'temperature_celsius{gpu="0"}' not in shown
    assert "ready" in shown


ODD = 'quote " backslash \\ newline \n tab \t bell \x07 \u2028 ü 雪 lone \udcff'


def test_label_values_may_hold_anything() -> None:
    """Undecodable bytes, quotes and line breaks in a name keep both formats valid."""
    declared = one_probe(lambda _facts: [Sample("driver_info", (ODD,), 1)], INFO)
    expected = ODD.encode("utf-8", "replace").decode()
    for accept, parse in (("", parse_text), (OPENMETRICS, parse_openmetrics)):
        body = render(taken_with_driver(), accept=accept, declared=declared).body.decode()
        families = {family.name: family for family in parse(body)}
        found = families.get("sglang_sidecar_driver_info") or families["sglang_sidecar_driver"]
        assert [sample.labels["version"] for sample in found.samples] == [expected]


# -- formats --------------------------------------------------------------------------------------------


def full() -> Snapshot:
    """Return a snapshot with something in every family of the sample catalogue."""
    taken = snapshot(
        condition("gpu-lost", Status.TRUE, gpus=(("0", "GPU-a"),)),
        condition("driver-hung", Status.UNKNOWN),
        facts={
            "driver": Facts(samples=(Sample("gpus_visible", (), 8),), identity={"driver": "580.1"}),
        },
        blockers=("gpu-lost",),
    )
    stuck = replace(taken.results["driver"], stuck=True, runs={Outcome.TIMEOUT: 2})
    return replace(
        taken,
        results={**taken.results, "driver": stuck},
        ready_transitions={True: 1, False: 1},
        baseline=Baseline(items={"driver": Expectation(value="570.1")}),
        drifts=(Drift(item="driver", deviation=Deviation.DIFFERENT, expected="570.1", observed="580.1"),),
        known=Known(counts={"driver": 2}, last_change={"driver": 1.5}),
        demo=Demo(scenario="gpu-lost", title="t", shows="s"),
    )


def test_the_sample_covers_every_family() -> None:
    """The tests below look at all families, not only at those that happen to be filled."""
    text = render(full()).body.decode()
    assert [family.name for family in catalog().families if f"# TYPE sglang_sidecar_{family.name} " not in text] == []


def test_only_a_demo_is_marked_as_one() -> None:
    """A dashboard can leave demos out: the family is there in a demo and nowhere else."""
    assert "\nsglang_sidecar_demo 1.0\n" in render(full()).body.decode()
    assert "sglang_sidecar_demo" not in render(snapshot()).body.decode()


def test_what_no_snapshot_holds_is_read_once_per_generation() -> None:
    """What access says of its files is as new as the snapshot beside it; without any there is no family of it."""
    values = iter([0, 1])
    exposition = Exposition(
        catalog(), process=no_process, more=lambda: [Sample("access_renewal_failing", ("token",), next(values))]
    )
    for generation, value in ((1, 0.0), (1, 0.0), (2, 1.0)):
        body = exposition.render(snapshot(generation=generation), accept="", accept_encoding="").body.decode()
        assert f'sglang_sidecar_access_renewal_failing{{file="token"}} {value}\n' in body
    alone = Exposition(catalog(), process=no_process).render(snapshot(), accept="", accept_encoding="").body
    assert b"access_renewal" not in alone


def test_drift_and_changes_are_exported() -> None:
    """Counters of all items are there from the start; what differs and when something changed only where it did."""
    text = render(full()).body.decode()
    lines = [line for line in text.splitlines() if "environment_c" in line or "_last_change" in line or "drift" in line]
    series = {line for line in lines if not line.startswith("#")}
    prefix = "sglang_sidecar_"
    assert series == {
        f'{prefix}environment_changes_total{{item="{item}"}} {2.0 if item == "driver" else 0.0}' for item in ITEMS
    } | {
        f'{prefix}environment_last_change_timestamp_seconds{{item="driver"}} 1.5',
        f"{prefix}drift_items 1.0",
        f'{prefix}drift{{item="driver"}} 1.0',
    }
    assert f"{prefix}baseline_loaded 1.0" in text


def test_without_a_baseline_there_is_no_drift() -> None:
    """No baseline: no series that says 0; an unreadable one: not loaded, and no number of differing items."""
    assert "drift" not in render(snapshot()).body.decode()
    text = render(replace(snapshot(), baseline=Baseline())).body.decode()
    assert "sglang_sidecar_baseline_loaded 0.0" in text
    assert "drift_items" not in text


def test_both_parsers_accept_both_formats_and_agree() -> None:
    """Text and OpenMetrics hold the same series and the same values."""

    def values(families: Iterable[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
        return {(s.name, tuple(sorted(s.labels.items())), s.value) for family in families for s in family.samples}

    text = render(full())
    openmetrics = render(full(), accept=OPENMETRICS)
    assert openmetrics.body.endswith(b"# EOF\n")
    assert values(parse_text(text.body.decode())) == values(parse_openmetrics(openmetrics.body.decode()))


def test_promtool_accepts_the_text() -> None:
    """Prometheus's own linter finds nothing to say, the agent's process families included."""
    body = Exposition(catalog()).render(full(), accept="", accept_encoding="").body
    done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False, timeout=60)
    assert (done.stdout + done.stderr).decode() == ""
    assert done.returncode == 0


def test_the_agents_own_process_is_measured() -> None:
    """Memory and start time of the agent come from /proc."""
    body = Exposition(catalog()).render(full(), accept="", accept_encoding="").body.decode()
    families = {family.name: family for family in parse_text(body)}
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert "process_start_time_seconds" in families


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4; charset=utf-8"),
        ("image/png", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=1.0.0; q=0, */*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=9.9.9", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=evil", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=0.0.1", "text/plain; version=0.0.4; charset=utf-8"),
        (OPENMETRICS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (
            "text/plain;q=0.4, Application/OpenMetrics-Text;q=0.5",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
        ("application/openmetrics-text;q=0.4, text/plain;q=0.5", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
def test_content_type(accept: str, expected: str) -> None:
    """The exact content type that Prometheus 3 demands, never an echo of the request (prometheus/prometheus#17086)."""
    assert render(snapshot(), accept=accept).headers["Content-Type"] == expected


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3])
def test_real_scrapers_get_openmetrics(accept: str) -> None:
    """What Prometheus 2 and 3 send by default is answered with what they prefer."""
    rendered = render(snapshot(), accept=accept)
    assert rendered.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert rendered.body.endswith(b"# EOF\n")


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(PROMETHEUS_3.replace("=", ";").split(";")), max_size=8).map(";".join)
)
def test_any_accept_header_leads_to_one_of_few_variants(accept: str) -> None:
    """No client can fill the cache or choose what stands in the answer's header."""
    escapings = ("allow-utf-8", "underscores", "dots", "values")
    allowed = {"text/plain", "application/openmetrics-text"}
    for media_type in ("text/plain", "application/openmetrics-text"):
        allowed |= {f"{media_type};version=1.0.0"} | {f"{media_type};version=1.0.0;escaping={one}" for one in escapings}
    assert negotiate(accept) in allowed


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("*", True),
        ("*, gzip;q=0", False),
        ("identity", False),
        ("xgzip", False),
        ("gzip;q=nonsense", False),
    ],
)
def test_accepts_gzip(header: str, expected: bool) -> None:
    """Compression is used only where the client allows it."""
    assert accepts_gzip(header) is expected


def test_gzip_holds_the_same_text() -> None:
    """The compressed variant is the same exposition and says so."""
    plain, packed = render(full()), render(full(), accept_encoding="gzip")
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Vary"] == plain.headers["Vary"] == "Accept, Accept-Encoding"


# -- caching --------------------------------------------------------------------------------------------


def test_each_variant_of_a_generation_is_rendered_once() -> None:
    """Scrapes of one generation get the same bytes and read the process once, whatever they ask for."""
    reads = []

    def process() -> Iterable[Metric]:
        reads.append(1)
        return [GaugeMetricFamily("process_reads", "Reads", value=len(reads))]

    exposition = Exposition(catalog(), process=process)
    taken = snapshot(generation=1)
    first = exposition.render(taken, accept="", accept_encoding="")
    assert exposition.render(taken, accept="text/plain", accept_encoding="") is first
    packed = exposition.render(taken, accept="", accept_encoding="gzip")
    assert exposition.render(taken, accept="*/*", accept_encoding="gzip;q=0.1") is packed
    assert len(reads) == 1
    assert exposition.render(snapshot(generation=2), accept="", accept_encoding="") is not first
    assert len(reads) == 2


def test_a_new_generation_shows_nothing_of_the_old_one() -> None:
    """No series outlives the fact behind it."""
    exposition = Exposition(catalog(), process=no_process)
    old = snapshot(generation=1, facts={"driver": Facts(identity={"driver": "570.1"})})
    new = snapshot(generation=2, facts={"driver": Facts(identity={"driver": "580.2"})})
    assert b"570.1" in exposition.render(old, accept="", accept_encoding="").body
    body = exposition.render(new, accept="", accept_encoding="").body
    assert b"580.2" in body
    assert b"570.1" not in body


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", OPENMETRICS, PROMETHEUS_3]),
            st.dictionaries(st.sampled_from(["driver", "torch", "sglang"]), st.sampled_from(["1", "2"])),
            st.booleans(),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_what_was_encoded_before_changes_no_byte(scrapes: list[tuple[str, dict[str, str], bool]]) -> None:
    """An exposition that has rendered other generations and variants gives what a fresh one gives."""
    used = Exposition(catalog(), process=no_process, more=of_access, python_version="3.11.7")
    for generation, (accept, items, ready) in enumerate(scrapes):
        taken = snapshot(
            generation=generation,
            facts={"driver": Facts(identity=items)},
            blockers=() if ready else ("gpu-lost",),
        )
        assert used.render(taken, accept=accept, accept_encoding="").body == render(taken, accept=accept).body


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_only_what_changed_is_encoded_anew(accept: str) -> None:
    """Of a generation that differs in one family, the client library encodes that one."""
    exposition = Exposition(catalog(), process=no_process)

    def calls_of_the_library(taken: Snapshot) -> int:
        calls = 0

        def count(frame: Any, event: str, _argument: Any) -> None:
            nonlocal calls
            calls += event == "call" and "prometheus_client" in frame.f_code.co_filename

        sys.setprofile(count)
        try:
            exposition.render(taken, accept=accept, accept_encoding="")
        finally:
            sys.setprofile(None)
        return calls

    everything = calls_of_the_library(replace(full(), generation=1))
    nothing = calls_of_the_library(replace(full(), generation=2))
    one = calls_of_the_library(replace(full(), generation=3, ready_transitions={True: 5}))
    assert nothing < one < everything / 5


# -- an inherited environment -----------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
@pytest.mark.parametrize("exists", [True, False])
def test_the_servers_multiprocess_folder_is_left_alone(tmp_path: Path, variable: str, exists: bool) -> None:
    """An inherited variable neither fails nor gets a file in its folder (prometheus/client_python#1015)."""
    folder = tmp_path / "multiproc"
    if exists:
        folder.mkdir()
    program = (
        "import sys\n"
        "from sidecar.exposition import Exposition\n"
        "from tests.samples import catalog, snapshot\n"
        "sys.stdout.buffer.write(Exposition(catalog()).render(snapshot(), accept='', accept_encoding='').body)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, variable: str(folder)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "sglang_sidecar_ready 1.0" in done.stdout
    assert "process_resident_memory_bytes" in done.stdout
    assert not exists or list(folder.iterdir()) == []
    assert done.stderr == ""
