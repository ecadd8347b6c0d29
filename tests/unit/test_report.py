"""The report: JSON, schema, text and exit code."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
import structlog

from sidecar.catalog import build as build_catalog
from sidecar.model import Outcome, Scope, Severity, Status, Transition
from sidecar.report import build, encode, exit_code, facts, gpu_names, headline, schema, text, when
from tests.samples import NOW, DriverSection, Facts, GpuSection, catalog, condition, probe, snapshot

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


def lines(given, *, verbose=False):
    """Give the lines of the text of a snapshot."""
    return text(build(given, catalog()), verbose=verbose).splitlines()


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
    assert lines(BROKEN)[0] == "critical: nvml-library-missing: message of nvml-library-missing"
    hung = condition("driver-hung", Status.TRUE)
    assert lines(snapshot(LOST, hung))[0] == "critical: gpu-lost: message of gpu-lost (and 1 more)"
    assert lines(snapshot(HOT))[0] == "warning: thermal-slowdown: message of thermal-slowdown"


def test_first_line_prefers_the_cause_that_gates() -> None:
    """Of two critical conditions the one that makes the pod unready comes first."""
    hung = condition("driver-hung", Status.TRUE)
    library = condition("nvml-library-missing", Status.TRUE)
    given = snapshot(library, hung, blockers=("driver-hung",))
    assert lines(given)[0].startswith("critical: driver-hung")


def test_first_line_of_ok_and_unknown() -> None:
    """Unknown counts what could not be judged with its reasons; ok is said only when nothing is unknown."""
    assert lines(snapshot())[0] == "ok: everything that matters here was judged and nothing is wrong"
    unknown = snapshot(condition("gpu-lost", Status.UNKNOWN, reason="no-gpu-access"))
    assert lines(unknown)[0] == "unknown: 1 condition could not be judged (no-gpu-access)"


def test_cause_shows_message_evidence_gpus_fix_and_consequences() -> None:
    """One cause is a block with everything that is needed to act on it."""
    found = lines(snapshot(LOST, facts=ALL, blockers=("gpu-lost",)))
    at = found.index("critical: gpu-lost (some-reason), gates readiness")
    assert found[at + 1 : at + 5] == [
        "  message of gpu-lost",
        "  GPUs: 0 (GPU-a)",
        "  evidence: NVML 15",
        "  fix: remedy of gpu-lost",
    ]
    broken = lines(BROKEN)
    at = broken.index("  fix: mount libnvidia-ml.so.1")
    assert broken[at + 1 : at + 3] == ["       or set nvml = x", "  consequence: gpu-lost"]
    assert "critical: gpu-lost (some-reason)" not in broken


def test_unknowns_are_grouped_by_probe_and_reason() -> None:
    """Conditions unknown for one reason share one sentence."""
    found = lines(BROKEN)
    at = found.index("could not be judged:")
    assert found[at + 1 : at + 3] == [
        "  flashinfer (scope-self): Seen from elsewhere.",
        "    flashinfer-not-installed, flashinfer-import-failed",
    ]


def test_facts_tell_driver_gpus_module_and_attention() -> None:
    """The facts block answers the three questions that the sidecar exists for."""
    found = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines(snapshot(facts=ALL)) if "  " in line}
    assert found["driver"] == "580.82.07, kernel module 580.82.07, CUDA 13.0"
    assert found["GPUs"] == "1 visible, NVIDIA H200"
    assert found["flashinfer.mamba"] == "importable, verified by a real import"
    assert found["attention prefill"] == "FlashAttention 3 (fa3)"
    assert found["attention decode"] == "no FlashAttention (torch_native)"
    assert found["attention draft"] == "not applicable"
    assert found["attention vision"] == "unknown"
    assert found["server"] == "answers, SGLang 0.5.16"
    assert found["torch"] == "2.9.1"


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
    found = lines(snapshot())
    assert [line.split()[-1] for line in found[3:8]] == ["unknown"] * 5


def test_verbose_adds_probes_judged_conditions_and_history() -> None:
    """With -v the text shows the runs, why every other condition is not active, and what changed."""
    found = lines(BROKEN, verbose=True)
    assert "  driver ok in 0.250 s" in found
    assert "  driver-hung: judged and fine" in found
    assert "  gpu-lost: explained by nvml-library-missing" in found
    assert "  flashinfer-not-installed: unknown (scope-self)" in found
    assert "  2025-06-15 15:06:31 UTC  ready: ready -> not-ready (gpu-lost)" in found


def test_terminal_control_characters_are_defused() -> None:
    """Text that a child printed cannot move the cursor or hide a line of the terminal."""
    evil = condition("gpu-lost", Status.TRUE, message="a\x1b[2Jb\r\x9bc", evidence=("\x1b]0;x\x07",))
    shown = text(build(snapshot(evil), catalog()), verbose=True, color=False)
    assert not any(ord(character) < 32 and character != "\n" for character in shown)
    assert "\x9b" not in shown


def test_color_only_when_asked() -> None:
    """Escape codes come with color=True and wrap whole words only."""
    report = build(BROKEN, catalog())
    assert "\x1b" not in text(report, verbose=True)
    assert text(report, verbose=False, color=True).startswith("\x1b[1;31mcritical: nvml-library-missing")


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
