"""What the commands print to a terminal, a pipe and a file, as real processes see it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import agent

PAINT = re.compile(r"\x1b\[[0-9;]*m")
DEMO = ("check", "--demo", "mamba-missing")


def on_terminal(*arguments: str, columns: int = 80, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command of the agent on a terminal of its own: exit status, and what it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in agent.environment().items() if name not in {"COLUMNS", "NO_COLOR"}}
    with subprocess.Popen(
        agent.command(*arguments),
        env=environ | {"TERM": "xterm-256color"} | dict(env or {}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")


def piped(script: str, *arguments: str) -> tuple[int, str, str]:
    """Run a command with its output going through a shell's pipe: the command's own status, output, errors."""
    shell = " ".join(agent.command(*arguments))
    done = subprocess.run(
        ["bash", "-c", f"{shell} | {script}; exit ${{PIPESTATUS[0]}}"],
        env=agent.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("columns", [50, 80, 160])
def test_a_terminal_gets_colours_and_lines_that_fit(columns: int) -> None:
    """The verdict is painted, sentences end at the edge, and only commands are longer."""
    status, shown = on_terminal(*DEMO, columns=columns)
    assert status == 2
    assert "\x1b[1;31mcritical\x1b[0m: flashinfer-mamba-missing: " in shown
    lines = PAINT.sub("", shown.rpartition("\x1b[K")[2]).splitlines()
    wide = [line for line in lines if len(line) > min(columns, 100)]
    assert all("uv pip install" in line for line in wide)
    assert any(
        "uv pip install --python /opt/sglang/bin/python 'flashinfer-python[cu13]==0.6.14'" in line for line in lines
    )


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_colours_can_be_declined(env: dict[str, str]) -> None:
    """Who wants none, or has a terminal that knows none, sees no escape code at all."""
    _, shown = on_terminal(*DEMO, env=env)
    assert not PAINT.search(shown)
    assert "critical: flashinfer-mamba-missing" in shown
    if env.get("TERM") == "dumb":
        assert "\x1b" not in shown


def test_explain_is_made_for_the_terminal_too() -> None:
    """Its lines fit, its head is painted."""
    status, shown = on_terminal("explain", "fa4-not-importable", columns=60)
    assert status == 0
    assert shown.startswith("\x1b[1;31mfa4-not-importable\x1b[0m: ")
    assert all(len(line) <= 60 or "`" in line for line in PAINT.sub("", shown).splitlines())


def test_a_pipe_gets_plain_lines() -> None:
    """One line per sentence and no colours, whatever COLUMNS says; FORCE_COLOR brings them back."""
    done = agent.run(*DEMO, env={"COLUMNS": "40"})
    assert "\x1b" not in done.stdout
    assert (
        "  SGLang says: ValueError: FlashInfer mamba module not available, please check the FlashInfer installation."
        in (done.stdout.splitlines())
    )
    forced = agent.run(*DEMO, env={"FORCE_COLOR": "1"})
    assert PAINT.sub("", forced.stdout) == done.stdout
    assert "\x1b" in forced.stdout


@pytest.mark.parametrize("form", ["text", "json", "metrics"])
def test_a_reader_that_leaves_is_no_error(form: str) -> None:
    """`| head -1` prints a line, nothing on standard error, and the check keeps its exit status."""
    status, out, error = piped("head -n 1", *DEMO, "--format", form)
    assert (status, error) == (2, "")
    assert out.count("\n") == 1


@pytest.mark.parametrize("arguments", [("explain",), ("config", "show"), ("baseline", "write")])
def test_a_pipe_that_is_closed_is_no_error(arguments: tuple[str, ...]) -> None:
    """A reader that never reads costs no traceback; what was asked for was done."""
    status, out, error = piped("exec 0<&-; sleep 0.5", *arguments)
    assert (status, out) == (0, "")
    assert "Traceback" not in error
    assert "cannot be written" not in error


def test_the_json_is_the_report_and_nothing_else() -> None:
    """One document on standard output, with the verdict first among what matters, the same keys each time."""
    first, second = (json.loads(agent.run(*DEMO, "--format", "json").stdout) for _ in range(2))
    assert list(first) == list(second)
    assert first["verdict"] == second["verdict"]
    assert first["verdict"]["level"] == "critical"
    assert [one["code"] for one in first["conditions"]] == [one["code"] for one in second["conditions"]]


def test_metrics_suit_a_textfile_collector(tmp_path: Path) -> None:
    """The classic format, as node_exporter's textfile collector reads it, without a family that it has itself."""
    done = agent.run(*DEMO, "--format", "metrics")
    assert done.returncode == 2
    assert done.stdout.endswith("\n")
    assert "# EOF" not in done.stdout
    families = list(text_string_to_metric_families(done.stdout))
    assert all(family.name.startswith("sglang_sidecar_") for family in families)
    # Whoever reads the file says when: a time stamp there is an error.
    assert all(sample.timestamp is None for family in families for sample in family.samples)
    linted = subprocess.run(
        ["promtool", "check", "metrics"], input=done.stdout, text=True, capture_output=True, check=False
    )
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")


def test_evidence_comes_with_v() -> None:
    """What the verdict rests on is there for who asks."""
    assert "  evidence: " not in agent.run(*DEMO).stdout
    assert "  evidence: flashinfer 0.6.0, torch 2.11.0+cu130" in agent.run(*DEMO, "-v").stdout


def test_a_code_that_does_not_exist() -> None:
    """One line that says what may have been meant."""
    done = agent.run("explain", "gpu-lots")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert "did you mean gpu-lost?" in done.stderr
