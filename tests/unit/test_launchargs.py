"""Reading SGLang command lines in every form in which they are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.launchargs import LaunchForm, parse_launch, server_form
from tests.fakes.sglang import CAPTURES, MARKER

FLAGS = ["--mamba-backend", "flashinfer", "--tp", "8", "--api-key", MARKER]
PARSED = {"mamba_backend": "flashinfer", "tp_size": 8}
SCRIPT = "--mamba-backend flashinfer --tp 8 --api-key " + MARKER


@pytest.mark.parametrize(
    ("argv", "form", "program"),
    [
        (FLAGS, LaunchForm.FLAGS, None),
        (["python", "-m", "sglang.launch_server", *FLAGS], LaunchForm.MODULE, "python"),
        (
            ["/v/bin/python3.12", "-u", "-X", "dev", "-m", "sglang.launch_server", *FLAGS],
            LaunchForm.MODULE,
            "/v/bin/python3.12",
        ),
        (["python3", "-um", "sglang.launch_server", *FLAGS], LaunchForm.MODULE, "python3"),
        (["python3", "-m", "sglang.cli.main", "serve", *FLAGS], LaunchForm.MODULE, "python3"),
        (["python3", "/v/lib/sglang/launch_server.py", *FLAGS], LaunchForm.MODULE, "python3"),
        (["sglang", "serve", *FLAGS], LaunchForm.CONSOLE_SCRIPT, "sglang"),
        (["/v/bin/python", "/v/bin/sglang", "serve", *FLAGS], LaunchForm.CONSOLE_SCRIPT, "/v/bin/python"),
        (["numactl", "-m", "0", "python", "-m", "sglang.launch_server", *FLAGS], LaunchForm.MODULE, "python"),
        (["sh", "-c", f"sglang serve {SCRIPT}"], LaunchForm.CONSOLE_SCRIPT, "sglang"),
        (
            ["/bin/bash", "-lc", f"cd /x && exec python -m sglang.launch_server {SCRIPT} | tee log"],
            LaunchForm.MODULE,
            "python",
        ),
        (
            ["bash", "-ec", f"ulimit -n 65536; python -m \\\n sglang.launch_server {SCRIPT} # --tp 2"],
            LaunchForm.MODULE,
            "python",
        ),
        (["tini", "--", "sh", "-c", f"sh -c 'sglang serve {SCRIPT}'"], LaunchForm.CONSOLE_SCRIPT, "sglang"),
        (["env", "-u", "X", "A=b", "sglang", "serve", *FLAGS], LaunchForm.CONSOLE_SCRIPT, "sglang"),
    ],
)
def test_every_form_gives_the_same_flags(argv: list[str], form: LaunchForm, program: str | None) -> None:
    """A launch means the same whether it is bare flags, a module, a console script or a shell's string."""
    launch = parse_launch(argv)
    assert (launch.form, launch.program, launch.flags) == (form, program, PARSED)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--attention-backend=fa4"], {"attention_backend": "fa4"}),
        (["--tensor-parallel-size", "2", "--tp-size=4"], {"tp_size": 4}),
        (
            ["--enable-mamba-cache-stochastic-rounding", "--port", "1"],
            {"enable_mamba_cache_stochastic_rounding": True, "port": 1},
        ),
        (["--no-such-flag", "value", "--json", '{"a": 1}', "--device", "cpu"], {"device": "cpu"}),
        (["--device", "--port", "30001"], {"port": 30001}),
        (["--attention-back", "fa3"], {"attention_backend": "fa3"}),
        (["--node", "3"], {"node_rank": 3}),
        (["--speculative", "x"], {}),
        (["--tp", "eight", "--host", "h" * 129], {}),
        (["--host", "a\x1b[31mb"], {}),
        (["--device"], {}),
        (["--config", "/private/path.yaml"], {"incomplete": True}),
        (["--ssl-certfile", "/private/cert.pem"], {"ssl": True}),
        (["--port", "$PORT", "--api-key", "$KEY"], {}),
        (["--mamba-backend", "$BACKEND"], {"incomplete": True}),
        (["--tp", "1", "$EXTRA_ARGS"], {"tp_size": 1, "incomplete": True}),
        ([], {}),
    ],
)
def test_flags_are_read_as_argparse_reads_them(argv: list[str], expected: dict[str, object]) -> None:
    """Known flags keep their typed value, the last one wins, and what cannot be read is left out."""
    assert parse_launch(argv).flags == expected


def test_a_command_of_another_kind_is_incomplete() -> None:
    """Behind a wrapper script a flag that is not there may still be added by the wrapper."""
    launch = parse_launch(["/entrypoint.sh", "--attention-backend", "fa3"])
    assert (launch.form, launch.flags) == (LaunchForm.OTHER, {"attention_backend": "fa3", "incomplete": True})


@pytest.mark.parametrize(
    "argv",
    [
        ["env", "SGLANG_IS_FLASHINFER_AVAILABLE=false", f"SGLANG_API_KEY={MARKER}", "sglang", "serve"],
        ["sh", "-c", f"SGLANG_API_KEY={MARKER} SGLANG_IS_FLASHINFER_AVAILABLE=false sglang serve"],
        ["sh", "-c", f"export SGLANG_IS_FLASHINFER_AVAILABLE=false K={MARKER}; sglang serve"],
    ],
)
def test_only_listed_assignments_are_kept(argv: list[str]) -> None:
    """Environment assignments in front of a launch are kept by an allow-list, whoever writes them."""
    assert parse_launch(argv).environ == {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}


def test_the_key_on_a_recorded_command_line_is_not_kept() -> None:
    """A real launch with --api-key leaves no trace of the key."""
    argv = json.loads((CAPTURES / "0.5.16" / "processes.json").read_text())["launch"]
    launch = parse_launch(argv)
    assert launch.flags == {"device": "cpu", "attention_backend": "torch_native", "host": "127.0.0.1", "port": 30111}
    assert MARKER in argv
    assert MARKER not in repr(launch)


@pytest.mark.parametrize(
    ("argv", "form"),
    [
        (["python3", "-m", "sglang.launch_server", "--port", "1"], LaunchForm.MODULE),
        (["/v/bin/python", "/v/bin/sglang", "serve"], LaunchForm.CONSOLE_SCRIPT),
        (["sh", "-c", "python3 -m sglang.launch_server"], None),
        (["tini", "--", "python3", "-m", "sglang.launch_server"], None),
        (["python", "/v/bin/sglang-sidecar", "check", "--", "python", "-m", "sglang.launch_server"], None),
        (["python", "-B", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"], None),
        (["python", "-m", "sglang.check_env"], None),
        (["python", "/v/bin/sglang", "generate"], None),
        (["python"], None),
        (["sglang::scheduler"], None),
        ([], None),
    ],
)
def test_only_the_server_itself_is_taken_for_one(argv: list[str], form: LaunchForm | None) -> None:
    """A shell, an init process or this agent may carry a launch as an argument; only the main process counts."""
    found = server_form(argv)
    assert found == form


@given(st.lists(st.text(max_size=20) | st.sampled_from(["sh", "-c", "env", "python", "-m", "--tp", "'", "A=b", "$X"])))
def test_no_command_line_is_an_error(argv: list[str]) -> None:
    """Whatever an operator typed, reading it gives an answer whose values are short and of plain types."""
    launch = parse_launch(argv)
    for name, value in launch.flags.items():
        assert name.isidentifier()
        assert isinstance(value, int) or (value.isprintable() and len(value) <= 128)
