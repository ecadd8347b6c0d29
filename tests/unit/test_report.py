"""The report: JSON, schema, the words that text and page share, and the exit code."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import structlog
from msgspec.structs import asdict, replace

from sidecar.catalog import build as build_catalog
from sidecar.model import Demo, Gate, Outcome, Scope, Severity, Status, Transition
from sidecar.report import build, causes, encode, exit_code, facts, gpu_names, headline, schema, when
from tests.samples import NOW, DriverSection, Facts, GpuSection, catalog, condition, condition_type, probe, snapshot

DRIVER = Facts(
    identity={"driver": "580.82.07", "kernel_module": "580.82.07", "cuda_driver": "13.0", "gpu_model": "NVIDIA H200"},
    report={
        "driver": DriverSection(driver_version="580.82.07", return_code=0),
        "gpus": (GpuSection(gpu="0", uuid="GPU-a", name="NVIDIA H200", memory_used_bytes=1),),
    },
)
FLASHINFER = Facts(report={"modules": {"flashinfer.mamba": {"importable": True, "verified": True}}})
SERVER = Facts(
    report={
        "server": {"up": True, "version": "0.5.16"},
        "attention": {
            "prefill": {"resolved": "fa3", "version": 3, "state": "known"},
            "decode": {"resolved": "torch_native", "version": 0, "state": "known"},
            "draft": {"resolved": None, "version": None, "state": "not-applicable"},
            "vision": {"declared": None, "version": None},
        },
    }
)
PACKAGES = Facts(identity={"torch": "2.9.1", "sglang": "0.5.16"}, scope=Scope.IMAGE)
ALL = {"driver": DRIVER, "flashinfer": FLASHINFER, "server": SERVER, "packages": PACKAGES}
LOST = condition("gpu-lost", Status.TRUE, evidence=("NVML 15",), gpus=(("0", "GPU-a"),))
HOT = condition("thermal-slowdown", Status.TRUE)
BROKEN = snapshot(
    condition("nvml-library-missing", Status.TRUE, remedy="mount libnvidia-ml.so.1\nor set nvml = x"),
    condition("gpu-lost", Status.TRUE, consequence_of="nvml-library-missing"),
    condition("flashinfer-not-installed", Status.UNKNOWN, reason="scope-self", message="Seen from elsewhere."),
    condition("flashinfer-import-failed", Status.UNKNOWN, reason="scope-self", message="Seen from elsewhere."),
    HOT,
    facts=ALL,
    blockers=("nvml-library-missing",),
    history=(Transition(at=NOW - 9, subject="ready", before="ready", after="not-ready", reason="gpu-lost"),),
)


def first(given):
    """The headline of a snapshot."""
    return headline(build(given, catalog()))


@pytest.mark.parametrize("given", [snapshot(), snapshot(facts=ALL), BROKEN, snapshot(pending=True)])
def test_report_matches_its_published_schema(given) -> None:
    """Whatever is known, the JSON satisfies the schema that consumers are given."""
    jsonschema.validate(json.loads(encode(build(given, catalog()))), schema(catalog()))


def test_schema_is_a_valid_schema_and_rejects_a_wrong_report() -> None:
    """The schema is itself well formed and says no to a status outside the closed set."""
    jsonschema.Draft202012Validator.check_schema(schema(catalog()))
    wrong = build(BROKEN, catalog())
    wrong["conditions"][0]["status"] = "maybe"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema(catalog()))


def test_schema_knows_each_probe_s_sections() -> None:
    """A section's declared type is part of the schema, and null is allowed while nothing is known."""
    section = schema(catalog())["properties"]["driver"]
    assert section == {"anyOf": [{"$ref": "#/$defs/DriverSection"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["verdict", "driver"])
def test_section_names_are_taken_once(name) -> None:
    """A probe cannot overwrite the report's own keys or another probe's section."""
    with pytest.raises(ValueError, match=name):
        schema(build_catalog((*catalog().probes, probe("late", sections={name: str}))))


def test_a_section_of_several_probes_is_put_together() -> None:
    """Probes that declare one section with the same type each contribute entries; one without facts takes none away."""
    shared = {"modules": dict[str, int]}
    world = build_catalog(tuple(probe(name, sections=shared) for name in ("driver", "packages", "flashinfer")))
    facts_of = {
        "driver": Facts(report={"modules": {"one": 1}}),
        "flashinfer": Facts(report={"modules": {"two": 2}}),
    }
    assert build(snapshot(facts=facts_of), world)["modules"] == {"one": 1, "two": 2}
    assert build(snapshot(facts={"flashinfer": facts_of["flashinfer"]}), world)["modules"] == {"two": 2}
    assert build(snapshot(), world)["modules"] is None
    assert list(schema(world)["properties"]).count("modules") == 1


def test_build_holds_the_verdict_and_each_condition_with_its_texts() -> None:
    """A condition carries token, sentence, action, owner and whether it gates."""
    report = build(BROKEN, catalog())
    assert report["schema_version"] == 1
    assert report["verdict"] == {
        "ready": False,
        "pending": False,
        "blockers": ["nvml-library-missing"],
        "level": "critical",
    }
    assert [one["code"] for one in report["conditions"]] == list(catalog().conditions)
    first, second = report["conditions"][:2]
    assert (first["active"], first["blocking"], first["probe"]) == (True, True, "driver")
    assert (second["active"], second["consequence_of"]) == (False, "nvml-library-missing")
    assert build(snapshot(LOST), catalog())["conditions"][1]["gpus"] == [{"gpu": "0", "uuid": "GPU-a"}]


def test_sections_are_null_until_their_probe_has_facts() -> None:
    """A section is always there, so that a reader can tell "nothing known" from a misspelt key."""
    assert build(snapshot(), catalog())["gpus"] is None
    assert build(snapshot(facts=ALL), catalog())["gpus"][0]["uuid"] == "GPU-a"


def test_a_defect_in_one_probe_leaves_the_other_sections() -> None:
    """A probe whose report raises is logged and null; what the others know is there."""
    broken = replace(catalog().by_name["driver"], report=lambda facts: facts.no_such_attribute)
    world = build_catalog((broken, *catalog().probes[1:]))
    with structlog.testing.capture_logs() as logs:
        report = build(snapshot(facts=ALL), world)
    assert report["driver"] is None
    assert report["server"]["version"] == "0.5.16"
    assert [(one["log_level"], one["probe"]) for one in logs] == [("error", "driver")]


def test_environment_names_source_and_scope() -> None:
    """Each item says which probe read it and whose environment that was; unknown scope stays null."""
    environment = build(snapshot(facts=ALL), catalog())["environment"]
    assert environment["torch"] == {"value": "2.9.1", "source": "packages", "scope": "image"}
    assert environment["driver"]["scope"] is None


def test_report_stays_json_whatever_a_probe_puts_in() -> None:
    """Values without a JSON form become text or null; they never break the report (case 52, hynek/structlog#360)."""
    odd = Facts(report={"modules": {"m": {"nan": float("nan"), "bytes": b"\xff", "object": object}}})
    report = build(snapshot(facts={"flashinfer": odd}), catalog())
    assert json.loads(encode(report))["modules"]["m"]["nan"] is None
    assert report["modules"]["m"]["object"] == "<class 'object'>"


def test_report_survives_file_names_that_are_not_utf_8() -> None:
    """A lone surrogate in a message or a section becomes a question mark."""
    odd = Facts(report={"modules": {"m\udcff": {"path": "/opt/\udcff"}}})
    evil = condition("gpu-lost", Status.TRUE, message="a\udcffb")
    report = build(snapshot(evil, facts={"flashinfer": odd}), catalog())
    assert json.loads(encode(report))["modules"] == {"m?": {"path": "/opt/?"}}
    assert headline(report) == "critical: gpu-lost: a?b"


@pytest.mark.parametrize(
    ("conditions", "code"),
    [
        ((), 0),
        ((condition("server-not-found", Status.TRUE),), 0),
        ((condition("server-not-found", Status.UNKNOWN),), 0),
        ((condition("gpu-lost", Status.UNKNOWN),), 3),
        ((condition("gpu-lost", Status.UNKNOWN, relevant=False),), 0),
        ((condition("gpu-lost", Status.UNKNOWN, severity=Severity.INFO),), 0),
        ((HOT,), 1),
        ((HOT, condition("gpu-lost", Status.UNKNOWN)), 1),
        ((HOT, LOST), 2),
        ((LOST, condition("flashinfer-import-failed", Status.UNKNOWN)), 2),
        ((condition("gpu-lost", Status.TRUE, relevant=False),), 0),
        ((condition("gpu-lost", Status.TRUE, consequence_of="nvml-library-missing"),), 0),
    ],
)
def test_exit_code(conditions, code) -> None:
    """2 beats 1 beats 3 beats 0; info, irrelevant and suppressed conditions never change it."""
    assert exit_code(snapshot(*conditions)) == code


def test_first_line_names_the_worst_cause() -> None:
    """The first line is the level, the code and its sentence, and says how many more there are."""
    assert first(BROKEN) == "critical: nvml-library-missing: message of nvml-library-missing"
    hung = condition("driver-hung", Status.TRUE)
    assert first(snapshot(LOST, hung)) == "critical: gpu-lost: message of gpu-lost (and 1 more)"
    assert first(snapshot(HOT)) == "warning: thermal-slowdown: message of thermal-slowdown"


def test_first_line_prefers_the_cause_that_gates() -> None:
    """Of two critical conditions the one that makes the pod unready comes first."""
    hung = condition("driver-hung", Status.TRUE)
    library = condition("nvml-library-missing", Status.TRUE)
    given = snapshot(library, hung, blockers=("driver-hung",))
    assert first(given).startswith("critical: driver-hung")


def test_first_line_of_ok_and_unknown() -> None:
    """Unknown counts what could not be judged with its reasons; ok is said only when nothing is unknown."""
    assert first(snapshot()) == "ok: everything that matters here was judged and nothing is wrong"
    unknown = snapshot(condition("gpu-lost", Status.UNKNOWN, reason="no-gpu-access"))
    assert first(unknown) == "unknown: 1 condition could not be judged (no-gpu-access)"


def test_facts_tell_driver_gpus_module_and_attention() -> None:
    """The facts block answers the three questions that the sidecar exists for."""
    found = dict(facts(build(snapshot(facts=ALL), catalog())))
    assert found["driver"] == "580.82.07, kernel module 580.82.07, CUDA 13.0"
    assert found["GPUs"] == "1 visible, NVIDIA H200"
    assert found["flashinfer.mamba"] == "importable, verified by a real import"
    assert found["attention prefill"] == "FlashAttention 3 (fa3)"
    assert found["attention decode"] == "no FlashAttention (torch_native)"
    assert found["attention draft"] == "not applicable"
    assert found["attention vision"] == "unknown"
    assert found["server"] == "answers, SGLang 0.5.16"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"up": True, "version": "0.5.9"}, "answers, SGLang 0.5.9"),
        ({"up": True, "version": None}, "answers"),
        ({"up": True, "version": None, "state": "unauthorized"}, "answers and wants a key"),
        ({"up": False, "is_sglang": False}, "something answers on http://h:1, but not as SGLang does"),
        ({"up": False}, "does not answer"),
        ({"up": None}, "unknown"),
    ],
)
def test_the_servers_version_is_its_own_word(section: dict[str, Any], said: str) -> None:
    """What is installed is no version of whatever answers."""
    built = build(snapshot(facts=ALL), catalog()) | {"server": {"url": "http://h:1", **section}}
    assert built["environment"]["sglang"]["value"] != "0.5.9"
    assert dict(facts(built))["server"] == said


def test_driver_that_cannot_be_asked_is_shown_with_nvml_s_answer() -> None:
    """A driver without a version is not just unknown: NVML's code and words are the fact."""
    driver = DriverSection(driver_version=None, return_code=12, error="NVML Shared Library Not Found")
    given = snapshot(facts={"driver": Facts(report={"driver": driver, "gpus": None})})
    assert facts(build(given, catalog()))[:2] == [
        ("driver", "NVML answers 12 (NVML Shared Library Not Found)"),
        ("GPUs", "unknown"),
    ]


def test_facts_nobody_knows_are_said_to_be_unknown() -> None:
    """Without facts each line says unknown rather than 0, no or nothing."""
    assert {value for _, value in facts(build(snapshot(), catalog()))} == {"unknown"}


def test_probe_that_failed_says_where() -> None:
    """A probe's entry carries what happened, never hidden behind kept facts."""
    report = build(snapshot(outcomes={"driver": Outcome.TIMEOUT}, facts=ALL), catalog())
    assert report["probes"]["driver"]["outcome"] == "timeout"
    assert report["gpus"] is not None


@pytest.mark.parametrize(("seconds", "shown"), [(NOW, "2025-06-15 15:06:40 UTC"), (None, ""), (1e300, "")])
def test_when(seconds, shown) -> None:
    """A time is shown in UTC; what is no time is shown as nothing."""
    assert when(seconds) == shown


def test_headline_is_one_line() -> None:
    """A message of several lines cannot break the first line."""
    report = build(snapshot(condition("gpu-lost", Status.TRUE, message="a\nb")), catalog())
    assert headline(report) == "critical: gpu-lost: a b"


@pytest.mark.parametrize(
    ("gpu", "shown"),
    [(("3", "GPU-3"), "3 (GPU-3)"), (("", "GPU-3"), "GPU-3"), (("3", ""), "3")],
)
def test_a_gpu_is_named_by_what_is_known_of_it(gpu: tuple[str, str], shown: str) -> None:
    """A GPU that answers to nobody has no uuid, one that was never seen no index; neither leaves a gap."""
    assert gpu_names({"gpus": [{"gpu": gpu[0], "uuid": gpu[1]}]}) == shown


# -- a launch that is judged before it happens ---------------------------------------------------------

PREFLIGHT = {
    "form": "module",
    "release": "0.5.16",
    "understood": {"--attention-backend": "fa4", "--mamba-backend": "flashinfer", "--enable-dp-attention": True},
    "passed_over": ["--trust-remote-code", "--api-key"],
    "passed_over_count": 2,
    "config": None,
    "complete": True,
}


def preflight(*conditions, blockers=(), **more):
    """Give a report of a launch; ``more`` replaces what is known of it."""
    report = build(snapshot(*conditions, facts=ALL, blockers=blockers), catalog())
    modules = report["modules"] | {
        "sgl_kernel.flash_attn": {"importable": None},
        "sglang.jit_kernel.flash_attn.cute": {"importable": False, "verified": False},
    }
    attention = {
        "prefill": {"declared": "fa4", "version": 4, "state": "flash-attention"},
        "decode": {"declared": "fa3", "version": 3, "state": "flash-attention"},
        "draft": {"version": None, "state": "not-applicable"},
    }
    return report | {"modules": modules, "attention": attention, "preflight": PREFLIGHT | more}


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            preflight(LOST, HOT, blockers=("gpu-lost",)),
            "critical: this launch would fail: gpu-lost: message of gpu-lost",
        ),
        (
            preflight(condition("driver-hung", Status.TRUE)),
            "critical: nothing that was judged stops this launch, but driver-hung: message of driver-hung",
        ),
        (
            preflight(
                condition("thermal-slowdown", Status.TRUE, severity=Severity.WARNING, message="It is hot."),
                condition("gpu-lost", Status.UNKNOWN, reason="x"),
            ),
            (
                "warning: nothing that was judged stops this launch, but thermal-slowdown: It is hot; "
                "1 condition could not be judged"
            ),
        ),
        (
            preflight(HOT, condition("gpu-lost", Status.UNKNOWN, reason="x")),
            (
                "warning: nothing that was judged stops this launch, but thermal-slowdown: message of "
                "thermal-slowdown; 1 condition could not be judged"
            ),
        ),
        (
            preflight(condition("gpu-lost", Status.UNKNOWN, reason="no-gpu-access")),
            "unknown: whether this launch would succeed could not be judged: 1 open (no-gpu-access)",
        ),
        (preflight(), "ok: nothing stands in the way of this launch"),
    ],
)
def test_first_line_of_a_preflight(report, expected) -> None:
    """A launch would fail only where what gates is critical; what nobody judged is never promised."""
    assert headline(report) == expected


def test_facts_of_a_preflight_say_what_is_needed_and_whether_it_is_there() -> None:
    """Each phase and the mamba backend name the module that they import, with what is known of it."""
    found = dict(facts(preflight()))
    assert found["launch"] == "python -m sglang.launch_server, SGLang 0.5.16"
    assert found["flags judged"] == "--attention-backend fa4, --mamba-backend flashinfer, --enable-dp-attention"
    assert found["passed over"] == "2: --trust-remote-code, --api-key"
    assert found["mamba"] == "flashinfer, needs flashinfer.mamba: importable, verified by a real import"
    assert found["attention prefill"] == (
        "FlashAttention 4 (fa4), needs sglang.jit_kernel.flash_attn.cute: not importable, judged without importing"
    )
    assert found["attention decode"] == "FlashAttention 3 (fa3), needs sgl_kernel.flash_attn: unknown"
    assert found["attention draft"] == "not applicable"
    assert "server" not in found
    assert "configuration file" not in found


@pytest.mark.parametrize(
    ("more", "name", "expected"),
    [
        ({"form": "other", "release": None}, "launch",
         "another program, which may change its arguments, SGLang's release unknown"),
        ({"understood": {}}, "flags judged", "none"),
        ({"understood": {}}, "mamba", "triton (no other is asked for), needs nothing of FlashInfer"),
        ({"understood": {}, "complete": False}, "mamba", "unknown"),
        ({"understood": {"--mamba-backend": "bogus"}}, "mamba", "bogus, which is none that is known here"),
        ({"passed_over": [f"--f{n}" for n in range(10)], "passed_over_count": 12}, "passed over",
         "12: --f0, --f1, --f2, --f3, --f4, --f5, --f6, --f7 and 4 more"),
        ({"passed_over": [], "passed_over_count": 3}, "passed over", "3"),
        ({"config": "too-large"}, "configuration file", "too large"),
        ({"complete": False}, "not seen", "more flags come from a wrapper, a variable of a shell or a file"),
    ],
)  # fmt: skip
def test_how_a_launch_was_read(more, name, expected) -> None:
    """What was not understood is said, and never taken for a default."""
    assert dict(facts(preflight(**more)))[name] == expected


def test_the_parser_comes_first() -> None:
    """A launch ends at its flags before it gets to the driver: of two hindrances that one is named first."""
    rejected = {
        "code": "launch-flags-rejected",
        "probe": "launch",
        "title": "t",
        "status": "true",
        "severity": "critical",
        "gate": "launch",
        "active": True,
        "blocking": True,
        "accepted": False,
        "relevant": True,
        "reason": "invalid-choice",
        "message": "SGLang 0.5.16 does not take bogus for --mamba-backend.",
        "remedy": "r",
        "evidence": [],
        "sglang_says": "error: argument --mamba-backend: invalid choice: 'bogus'",
        "since": NOW,
        "consequence_of": None,
        "gpus": [],
    }
    report = preflight(LOST, blockers=("gpu-lost",))
    report["conditions"].append(rejected)
    said = "critical: this launch would fail: launch-flags-rejected: SGLang 0.5.16 does not take"
    assert headline(report).startswith(said)


def test_drift_comes_last_among_equals() -> None:
    """That something differs says less than what is wrong with it, and has no command that repairs it."""
    drift = condition_type("environment-drift", Severity.WARNING, Gate.NEVER)
    world = build_catalog((probe("drift", drift), *catalog().probes))
    given = snapshot(HOT)
    differs = replace(HOT, code="environment-drift", message="torch is 2.9; the baseline wants 2.11.")
    given = replace(given, conditions={"environment-drift": differs, **given.conditions})
    assert [one["code"] for one in causes(build(given, world))] == ["thermal-slowdown", "environment-drift"]


def test_a_demo_is_marked_as_one() -> None:
    """Whoever gets the report of a demo can tell; any other has null there."""
    shown = Demo(scenario="gpu-lost", title="A GPU is lost", shows="What is lost.", replica=2, replicas=4)
    report = json.loads(encode(build(replace(snapshot(), demo=shown), catalog())))
    assert report["demo"] == asdict(shown)
    jsonschema.validate(report, schema(catalog()))
    assert build(snapshot(), catalog())["demo"] is None
