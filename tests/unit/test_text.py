"""What check and explain print: structure, widths, colours, and commands that stay whole."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from sidecar.catalog import build as build_catalog
from sidecar.catalog import discover
from sidecar.model import Demo, Outcome, Status, Transition
from sidecar.remedy import parts
from sidecar.report import build
from sidecar.text import Style, explain, render, style_of, suggestions
from tests.samples import NOW, DriverSection, Facts, GpuSection, catalog, condition, snapshot

DRIVER = Facts(
    identity={"driver": "580.82.07", "cuda_driver": "13.0", "gpu_model": "NVIDIA H200"},
    report={
        "driver": DriverSection(driver_version="580.82.07", return_code=0),
        "gpus": (GpuSection(gpu="0", uuid="GPU-a", name="NVIDIA H200"),),
    },
)
PACKAGES = Facts(identity={"torch": "2.9.1", "flashinfer-python": "0.6.14"})
FACTS = {"driver": DRIVER, "packages": PACKAGES}
COMMAND = "/opt/env/bin/python -m pip install 'flashinfer-python[cu13]==0.6.14' 'nvidia-cutlass-dsl[cu13]==4.6.0'"
LOST = condition("gpu-lost", Status.TRUE, evidence=("NVML 15",), gpus=(("0", "GPU-a"),))
HOT = condition("thermal-slowdown", Status.TRUE)
BROKEN = snapshot(
    condition("nvml-library-missing", Status.TRUE, remedy="mount libnvidia-ml.so.1\nor set nvml = x"),
    condition("gpu-lost", Status.TRUE, consequence_of="nvml-library-missing"),
    condition("flashinfer-not-installed", Status.UNKNOWN, reason="scope-self", message="Seen from elsewhere."),
    condition("flashinfer-import-failed", Status.UNKNOWN, reason="scope-self", message="Seen from elsewhere."),
    HOT,
    facts=FACTS,
    blockers=("nvml-library-missing",),
    history=(Transition(at=NOW - 9, subject="ready", before="ready", after="not-ready", reason="gpu-lost"),),
)
TERMINAL = {"TERM": "xterm-256color"}


def lines(given, *, verbose=False, **style):
    """The lines of the text of a snapshot."""
    return render(build(given, catalog()), verbose=verbose, style=Style(**style)).splitlines()


def launch(*conditions, blockers=()):
    """The report of a launch that is judged before it happens."""
    preflight = {
        "form": "module",
        "release": "0.5.16",
        "understood": {},
        "passed_over": [],
        "passed_over_count": 0,
        "config": None,
        "complete": True,
    }
    return build(snapshot(*conditions, facts=FACTS, blockers=blockers), catalog()) | {"preflight": preflight}


# -- structure ------------------------------------------------------------------------------------------


def test_the_first_cause_follows_the_verdict() -> None:
    """The verdict is one sentence, and what to know and to do stands right below it, said once."""
    found = lines(snapshot(LOST, facts=FACTS, blockers=("gpu-lost",)))
    assert found[:5] == [
        "critical: gpu-lost: message of gpu-lost",
        "  reason: some-reason, gates readiness",
        "  GPUs: 0 (GPU-a)",
        "  fix: remedy of gpu-lost",
        "",
    ]
    assert sum("message of gpu-lost" in line for line in found) == 1


def test_further_causes_have_heads_of_their_own() -> None:
    """Each cause is a block; consequences are named by the cause that explains them, and nowhere else."""
    found = lines(BROKEN)
    at = found.index("  fix: mount libnvidia-ml.so.1")
    assert found[at + 1 : at + 3] == ["    or set nvml = x", "  consequences: gpu-lost"]
    at = found.index("warning: thermal-slowdown: message of thermal-slowdown")
    assert found[at - 1 : at + 3] == [
        "",
        "warning: thermal-slowdown: message of thermal-slowdown",
        "  reason: some-reason",
        "  fix: remedy of thermal-slowdown",
    ]
    assert not any(line.startswith("critical: gpu-lost") for line in found)


def test_evidence_comes_on_request() -> None:
    """-v shows what a verdict rests on and since when."""
    given = snapshot(LOST)
    assert not any("NVML 15" in line for line in lines(given))
    assert {"  evidence: NVML 15", "  since: 2025-06-15 15:05:40 UTC"} <= set(lines(given, verbose=True))


def test_an_information_below_an_ok_has_a_head() -> None:
    """The verdict ok is about no condition, so the first one shown says what it is."""
    found = lines(snapshot(condition("server-not-found", Status.TRUE)))
    assert found[0] == "ok: everything that matters here was judged and nothing is wrong"
    assert found[2] == "info: server-not-found: message of server-not-found"


def test_unknowns_are_grouped_and_counted() -> None:
    """Conditions unknown for one reason share a sentence; -v names them."""
    found = lines(BROKEN)
    at = found.index("could not be judged (-v names the conditions):")
    assert found[at + 1] == "  flashinfer (scope-self): Seen from elsewhere. (2 conditions)"
    found = lines(BROKEN, verbose=True)
    at = found.index("could not be judged:")
    assert found[at + 1 : at + 3] == [
        "  flashinfer (scope-self): Seen from elsewhere.",
        "    flashinfer-not-installed, flashinfer-import-failed",
    ]


def test_facts_and_versions_stand_in_the_same_columns() -> None:
    """What a person looks up is aligned, from the readiness to the last version."""
    found = lines(snapshot(facts=FACTS))
    rows = found[found.index("") + 1 :]
    assert {row[:19].strip() for row in rows} >= {"readiness", "driver", "flashinfer.mamba", "torch"}
    assert all(row[17:19] == "  " and row[19] != " " for row in rows if row)
    assert "torch              2.9.1" in rows
    assert not any(row.startswith("gpu_model") for row in rows), "the facts say it already"


def test_readiness_says_why_not() -> None:
    """Ready, pending, or what it waits for."""
    assert "readiness          ready" in lines(snapshot(facts=FACTS))
    assert any(line.startswith("readiness ") and "not ready because of" in line for line in lines(BROKEN))
    assert any("the first driver round has not ended" in line for line in lines(snapshot(pending=True)))


def test_a_launch_is_spoken_of_as_one() -> None:
    """Before a launch nobody asked about a readiness."""
    found = render(launch(LOST, blockers=("gpu-lost",)), verbose=False).splitlines()
    assert found[0] == "critical: this launch would fail: gpu-lost: message of gpu-lost"
    assert found[1] == "  reason: some-reason, hinders the launch"
    assert any(line.split("  ")[0] == "verdict" and line.endswith("hindered by gpu-lost") for line in found)
    assert not any(line.startswith("readiness") for line in found)


def test_verbose_adds_probes_judged_conditions_and_history() -> None:
    """With -v the text shows the runs, why every other condition is not active, and what changed."""
    found = [" ".join(line.split()) for line in lines(BROKEN, verbose=True)]
    assert "driver ok in 0.250 s" in found
    assert "driver-hung judged and fine" in found
    assert "gpu-lost explained by nvml-library-missing" in found
    assert "flashinfer-not-installed unknown (scope-self)" in found
    assert "2025-06-15 15:06:31 UTC ready: ready -> not-ready (gpu-lost)" in found
    assert "placement container: /.dockerenv exists" in found


def test_a_probe_that_hangs_says_where() -> None:
    """The outcome of a run that failed stands by the probe's name."""
    found = [" ".join(line.split()) for line in lines(snapshot(outcomes={"driver": Outcome.TIMEOUT}), verbose=True)]
    assert "driver timeout in 0.250 s" in found


def test_a_demo_says_that_it_is_one() -> None:
    """Nobody takes a recorded server for his own."""
    shown = Demo(scenario="gpu-lost", title="t", shows="s")
    found = lines(replace(snapshot(facts=FACTS), demo=shown))
    assert "demo               gpu-lost: recorded, nothing of this machine" in found


def test_terminal_control_characters_are_defused() -> None:
    """Text that a child printed cannot move the cursor, hide a line or turn the direction of writing."""
    evil = condition(
        "gpu-lost",
        Status.TRUE,
        message="a\x1b[2Jb\r\x9bc\u202ed",
        evidence=("\x1b]0;x\x07",),
        remedy="run\x1b[1m `a\x07b`\nrm -r '/x\x1by'",
        reason="\x1b[31m",
    )
    for color in (False, True):
        shown = render(build(snapshot(evil), catalog()), verbose=True, style=Style(width=60, color=color))
        plain = re.sub(r"\x1b\[1;3[1-6]m|\x1b\[0m", "", shown)
        assert not any(ord(character) < 32 and character != "\n" for character in plain)
        assert not set(plain) & {"\x9b", "\u202e"}


# -- widths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_sentences_fit_the_terminal(width) -> None:
    """Every line that is no command fits; nothing is lost by breaking."""
    message = "The loaded kernel module is 580.159.04, the driver's libraries are 580.173.02. " * 3
    remedy = f"Drain the node and reboot it; or, where that takes too long, run: {COMMAND}"
    given = snapshot(condition("gpu-lost", Status.TRUE, message=message, remedy=remedy), facts=FACTS)
    found = lines(given, width=width, verbose=True)
    assert [line for line in found if len(line) > width] == [f"    {COMMAND}"]
    assert " ".join(" ".join(found).split()).count("The loaded kernel module is 580.159.04") == 3


def test_nothing_is_wrapped_for_a_file() -> None:
    """One sentence, one line: what is searched for with grep is found."""
    message = "word " * 100
    assert len(lines(snapshot(condition("gpu-lost", Status.TRUE, message=message)))[0]) > 400


def test_a_wide_terminal_has_no_endless_lines() -> None:
    """Lines of 200 columns are hard to read."""
    found = lines(snapshot(condition("gpu-lost", Status.TRUE, message="word " * 100)), width=230)
    assert max(map(len, found)) <= 100


@pytest.mark.parametrize("width", [None, 40, 80])
def test_commands_stay_whole(width) -> None:
    """A command can be copied as it stands, whatever the width: on a line of its own or inside a sentence."""
    quoted = "`modprobe -r nvidia_drm nvidia_modeset nvidia_uvm nvidia && modprobe nvidia`"
    remedy = f"Stop every GPU process and reload the module ({quoted}) when nobody uses it.\n{COMMAND}  # or so"
    shown = "\n".join(lines(snapshot(condition("gpu-lost", Status.TRUE, remedy=remedy)), width=width))
    assert f"    {COMMAND}  # or so\n" in shown
    assert quoted in shown


def test_colours_do_not_count_as_columns() -> None:
    """A painted first line is broken where the plain one is."""
    given = snapshot(condition("gpu-lost", Status.TRUE, message="word " * 40))
    painted = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines(given, width=60, color=True)]
    plain = lines(given, width=60)
    assert max(map(len, painted)) <= 60
    assert painted[1:] == plain[1:]
    assert "".join(painted).split() == "".join(plain).split()


# -- colours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "terminal", "color"),
    [
        (TERMINAL, True, True),
        (TERMINAL, False, False),
        ({}, True, True),
        ({"TERM": "dumb"}, True, False),
        (TERMINAL | {"NO_COLOR": "1"}, True, False),
        (TERMINAL | {"NO_COLOR": ""}, True, True),
        (TERMINAL | {"FORCE_COLOR": "1"}, False, True),
        (TERMINAL | {"FORCE_COLOR": "0"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "3"}, True, True),
        (TERMINAL | {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_when_there_are_colours(environ, terminal, color) -> None:
    """On a terminal that can, unless NO_COLOR; elsewhere only where FORCE_COLOR asks for them."""
    assert style_of(environ, terminal=terminal, columns=80).color is color


def test_only_a_terminal_has_a_width() -> None:
    """What goes to a pipe is not broken, whatever COLUMNS says."""
    assert style_of(TERMINAL, terminal=True, columns=80).width == 80
    assert style_of(TERMINAL | {"FORCE_COLOR": "1"}, terminal=False, columns=80).width is None


def test_the_level_is_painted_and_nothing_else() -> None:
    """Colour marks severities, never a whole paragraph; without it the text is the same."""
    painted = render(build(BROKEN, catalog()), verbose=True, style=Style(color=True))
    assert painted.startswith("\x1b[1;31mcritical\x1b[0m: nvml-library-missing: ")
    assert re.findall(r"\x1b\[1;\d+m(.*?)\x1b\[0m", painted) == ["critical", "warning"]
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == render(build(BROKEN, catalog()), verbose=True)


# -- remedies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        (COMMAND, [(COMMAND, True, "")]),
        (f"{COMMAND}  # or use triton", [(COMMAND, True, "or use triton")]),
        ("Run: uv pip install torch==2.11.0", [("Run:", False, ""), ("uv pip install torch==2.11.0", True, "")]),
        ("'/opt/my env/bin/python3.12' -m pip uninstall -y pynvml",
         [("'/opt/my env/bin/python3.12' -m pip uninstall -y pynvml", True, "")]),
        ("rm -r /a/b && uv pip install x", [("rm -r /a/b && uv pip install x", True, "")]),
        ("uv pip install x; .pth files count in site-packages only",
         [("uv pip install x", True, ".pth files count in site-packages only")]),
        ("uv pip uninstall x; uv pip install y", [("uv pip uninstall x; uv pip install y", True, "")]),
        ("Drain it, then reset it: `nvidia-smi -r`.", [("Drain it, then reset it: `nvidia-smi -r`.", False, "")]),
        ("first\nsecond", [("first", False, ""), ("second", False, "")]),
        ("", []),
    ],
)  # fmt: skip
def test_a_remedy_is_taken_apart(remedy, expected) -> None:
    """Commands are told from sentences; what cannot be told is a sentence."""
    assert [(part.text, part.command, part.note) for part in parts(remedy)] == expected


def test_pieces_of_a_sentence() -> None:
    """What stands in backquotes is marked; an odd one opens nothing."""
    (one,) = parts("see `a b` and `c`.")
    assert list(one.pieces) == [("see ", False), ("a b", True), (" and ", False), ("c", True), (".", False)]
    (odd,) = parts("see `a` and `b")
    assert list(odd.pieces) == [("see ", False), ("a", True), (" and ", False), ("b", False)]


# -- explain --------------------------------------------------------------------------------------------


def test_explain_prints_one_condition_or_the_list() -> None:
    """It shows remedy and reasons whole, lists all codes without an argument, and knows no others."""
    shown = explain(catalog(), "gpu-lost")
    assert shown.startswith("gpu-lost: title of gpu-lost\n")
    for line in (
        "severity      critical, gate serving, judged by probe driver",
        "when          when gpu-lost",
        "fix           remedy of gpu-lost",
        "explained by  nvml-library-missing",
        "  some-reason  for some reason",
    ):
        assert line in shown.splitlines()
    assert [line.split()[0] for line in explain(catalog(), None).splitlines()] == list(catalog().conditions)
    with pytest.raises(KeyError):
        explain(catalog(), "no-such-code")


@pytest.mark.parametrize("width", [40, 80])
def test_explanations_of_every_real_condition_fit(width) -> None:
    """On a terminal each is aligned and fits, but for commands and words that are longer than the room."""
    real = build_catalog(discover())
    for code in (None, *real.conditions):
        for line in explain(real, code, Style(width=width)).splitlines():
            alone = len(line.rpartition("  ")[2].split()) == 1
            assert len(line) <= width or "`" in line or alone, (code, line)


@pytest.mark.parametrize(
    ("word", "meant"), [("gpu-lots", "gpu-lost"), ("library", "nvml-library-missing"), ("xyzzy", None)]
)
def test_a_code_that_was_meant(word, meant) -> None:
    """A slip of the keyboard or a part of the code leads to it."""
    found = list(suggestions(catalog(), word))
    assert found[:1] == ([meant] if meant else [])
