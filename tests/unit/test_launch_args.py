"""Reading SGLang command lines in every form in which they are written."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.launch.args import LaunchFileError, is_listed, is_switch, parse_launch
from sidecar.launch.forms import LaunchForm, server_form
from sidecar.launch.shell import Outside
from tests.fakes.sglang import CAPTURES, MARKER

OPTIONS = CAPTURES / "launch-options.json"
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
        (
            ["--sampling-backend", "pytorch", "--linear-attn-decode-backend=flashinfer"],
            {"sampling_backend": "pytorch", "linear_attn_decode_backend": "flashinfer"},
        ),
        (
            ["--mamba-cache-philox-rounds", "-1", "--disable-cuda-graph"],
            {"mamba_cache_philox_rounds": -1, "disable_cuda_graph": True},
        ),
        (["--port", "3_000"], {"port": 3000}),
        (["--device", "-x"], {}),
        (["--mamba-backend", f"key={MARKER}"], {}),
        (["--tp=--", "--mamba-backend=--"], {}),
        (["--fa-impl-ver", "2"], {"fa_impl_ver": 2}),
        (["--fa_impl_ver=two"], {"fa_impl_ver": "two"}),
        (["--fa-impl-version", "4"], {"fa_impl_ver": 4}),
        (["--attention_backend", "fa3"], {"attention_backend": "fa3"}),
        (["--model-path", "/private/model", "--model=/private/other"], {}),
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
def test_no_assignment_is_shown(argv: list[str]) -> None:
    """Environment assignments in front of a launch are the server's, whoever writes them, and may be secret."""
    launch = parse_launch(argv)
    assert launch.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert MARKER in launch.environ.values()
    assert MARKER not in repr(launch)


def test_the_key_on_a_recorded_command_line_is_not_kept() -> None:
    """A real launch with --api-key leaves no trace of the key."""
    argv = json.loads((CAPTURES / "0.5.16" / "processes.json").read_text())["launch"]
    launch = parse_launch(argv)
    assert launch.flags == {
        "device": "cpu",
        "attention_backend": "torch_native",
        "skip_server_warmup": True,
        "host": "127.0.0.1",
        "port": 30111,
    }
    assert launch.notes.has_model
    assert "--api-key" in launch.notes.passed_over
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
    assert server_form(argv) == form
    assert server_form(tuple(argv)) == form, "a command line that was read is a tuple"


def words_of(configuration: dict[str, list[str] | LaunchFileError]):
    """Reads configuration files out of a table, as `parse_launch` wants it."""

    def read(path: str) -> list[str]:
        found = configuration[path]
        if isinstance(found, LaunchFileError):
            raise found
        return found

    return read


@pytest.mark.parametrize(
    ("argv", "flags", "config"),
    [
        (["--config", "a"], {"attention_backend": "fa3"}, "read"),
        (["--attention-backend", "fa4", "--config", "a"], {"attention_backend": "fa4"}, "read"),
        (["sh", "-c", "cd /x && sglang serve m --config /a"], {"attention_backend": "fa3"}, "read"),
        (["sh", "-c", "cd /x && sglang serve m --config b"], {"attention_backend": "fa4"}, "read"),
        (["env", "-C", "/x", "sglang", "serve", "--config", "b"], {"attention_backend": "fa4"}, "read"),
        (["sh", "-c", "cd /gone && sglang serve m --config a"], {"incomplete": True}, "unknown-folder"),
        (["sh", "-c", "cd $(x) && sglang serve m --config a"], {"incomplete": True}, "unknown-folder"),
        (["sh", "-c", "cat > b; cd /x; sglang serve m --config b"], {"incomplete": True}, "written-before"),
        (["docker", "run", "i", "sglang", "serve", "m", "--config", "/a"], {"incomplete": True}, "not-looked-at"),
        (["sh", "-c", "sglang serve m --config $(x)"], {"incomplete": True}, "unknown-path"),
        (["/entrypoint.sh", "--config", "a"], {"incomplete": True}, "not-looked-at"),
        (["--config", "bad"], {"incomplete": True}, "not-found"),
        (["--config=a"], {}, "ignored"),
        (["--config", "a", "--config", "a", "--port", "1"], {"incomplete": True, "port": 1}, "not-one-file"),
        (["--port", "1", "--config"], {"incomplete": True, "port": 1}, "not-one-file"),
        (["--port", "1"], {"port": 1}, None),
    ],
)
def test_a_configuration_file_stands_in_front_of_the_flags(
    argv: list[str], flags: dict[str, object], config: str | None
) -> None:
    """Its flags count where the very word --config names it, the command line wins, and what is not known is said."""
    files = {
        "a": ["--attention-backend", "fa3"],
        "/a": ["--attention-backend", "fa3"],
        "/x/b": ["--attention-backend", "fa4"],
        "bad": LaunchFileError("not-found", "bad: there is no such file", refused=True),
    }
    outside = Outside(environ={}, cwd="/", is_folder=lambda path: path == "/x")
    launch = parse_launch(argv, words_of(files), outside)
    assert (launch.flags, launch.notes.config) == (flags, config)


def test_what_came_from_the_file_is_told_apart() -> None:
    """The notes name the flags of the file, and hold all that is given in SGLang's order."""
    words = ["--disable-cuda-graph", "--tp", "2"]
    notes = parse_launch(["--tp", "4", "--config", "a"], words_of({"a": words})).notes
    assert notes.from_config == ("--disable-cuda-graph", "--tp-size")
    assert notes.given == (
        ("--disable-cuda-graph", "disable_cuda_graph", True),
        ("--tp-size", "tp_size", 2),
        ("--tp-size", "tp_size", 4),
    )


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--attention-backend"], ("missing-value", "--attention-backend")),
        (["--attention-backend", "--port", "1"], ("missing-value", "--attention-backend")),
        (["--tp", "eight"], ("not-a-number", "--tp-size")),
        (["--tp", "1.5"], ("not-a-number", "--tp-size")),
        (["--enable-deterministic-inference=true"], ("unexpected-value", "--enable-deterministic-inference")),
        (["--enable-deterministic-inference", "yes"], ("unexpected-word", "--enable-deterministic-inference")),
        (["--attention-backend", "fa3", "fa4"], ("unexpected-word", "--attention-backend")),
        (["--attention_backend", "fa3"], ("unrecognized-flag", "--attention-backend")),
        (["--config", "a", "--config", "b"], ("several-configs", "--config")),
        (["--config"], ("missing-value", "--config")),
        (["sglang", "serve", "model", "--port", "x"], ("not-a-number", "--port")),
        (["sh", "-c", "sglang serve model --port 1 > log 2>&1"], None),
        (["sh", "-c", "sglang serve model --port 1 2>/dev/null &"], None),
        (["sh", "-c", "sglang serve model --tp $TP $MORE"], None),
        (["--lora-paths", "a", "b", "--port", "-1"], None),
        (["--json-model-override-args", "--not a flag", "--host", ""], None),
        (["/entrypoint.sh", "--tp", "eight"], None),
    ],
)
def test_what_argparse_refuses_is_noted(argv: list[str], problem: tuple[str, str] | None) -> None:
    """Each is what SGLang 0.5.16's own parser says of these words; a wrapper's arguments are its own business."""
    found = [(one.token, one.flag) for one in parse_launch(argv).notes.problems]
    assert found == ([] if problem is None else [problem])


def test_the_parsers_sentence_names_all_spellings() -> None:
    """It can be found in the log: argparse names an option by all of its spellings, and the value is not repeated."""
    (problem,) = parse_launch(["--tensor-parallel-size", MARKER]).notes.problems
    assert problem.says == "error: argument --tp-size/--tensor-parallel-size: invalid int value: ..."


def test_other_flags_are_named_and_their_values_dropped() -> None:
    """Passed-over flags are told by bare name; what does not look like one is only counted."""
    argv = [
        "--api-key",
        MARKER,
        "--api-key=" + MARKER,
        f"--{MARKER.upper()}_x",
        "--trust-remote-code",
        "-x",
        "--mem",
        "1",
    ]
    notes = parse_launch(argv).notes
    assert notes.passed_over == ("--api-key", "--trust-remote-code", "--mem")
    assert notes.passed_over_count == 5
    assert MARKER not in repr(notes)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["python", "-m", "sglang.launch_server", "--model", "m"], True),
        (["sglang", "serve", "m"], True),
        (["sglang", "serve", "--model-path=m"], True),
        (["sglang", "serve", "--port", "1"], False),
        (["python", "-m", "sglang.launch_server", "m"], False),
    ],
)
def test_whether_a_model_is_named(argv: list[str], named: bool) -> None:
    """By either flag, or as the first word behind `sglang serve`; which one is not kept."""
    assert parse_launch(argv).notes.has_model is named


def test_every_listed_flag_is_one_of_sglangs() -> None:
    """Each flag that is looked at exists in a release, and a switch there is a switch here."""
    known = {flag for options in json.loads(OPTIONS.read_text()).values() for flag in options}
    assert {flag for flag in known if not is_listed(flag)} == set()
    assert not is_listed("--no-such-flag")
    switches = {flag for flag in known if is_switch(flag)}
    assert switches == {
        "--enable-mamba-cache-stochastic-rounding", "--enable-deterministic-inference", "--disable-cuda-graph",
        "--skip-server-warmup", "--enable-dp-attention", "--smg-grpc-mode", "--grpc-mode",
    }  # fmt: skip


@given(st.lists(st.text(max_size=20) | st.sampled_from(["sh", "-c", "env", "python", "-m", "--tp", "'", "A=b", "$X"])))
def test_no_command_line_is_an_error(argv: list[str]) -> None:
    """Whatever an operator typed, reading it gives an answer whose values are short and of plain types."""
    launch = parse_launch(argv)
    for name, value in launch.flags.items():
        assert name.isidentifier()
        assert isinstance(value, int) or (value.isprintable() and len(value) <= 128)
    assert all(re.fullmatch(r"--[a-z0-9-]{1,47}", name) for name in launch.notes.passed_over)


FLAG = st.sampled_from(
    ["--api-key", "--attention-backend", "--tp", "--config", "--mamba-backend=", "--ssl-keyfile", "--sampling_backend",
     "--enable-dp-attention", "--admin-api-key=", "--port", "--model-path", "sglang", "serve", "sh", "-c", "--", "$X"]
)  # fmt: skip


@given(st.lists(FLAG | st.sampled_from([f" {MARKER}", f"{MARKER}=", f"{MARKER}!", f"'{MARKER}'"]), max_size=12))
def test_no_secret_is_kept_wherever_it_stands(argv: list[str]) -> None:
    """A key may be typed in any place; it has characters that no choice has, and no list keeps it."""
    launch = parse_launch(argv, lambda path: [path])
    assert MARKER not in repr(launch.flags | {"host": ""})
    assert MARKER not in repr(launch.notes.problems) + repr(launch.notes.passed_over)


@given(st.binary(max_size=200))
def test_no_command_line_of_the_kernel_is_an_error(content: bytes) -> None:
    """Whatever bytes a process puts there, decoded as this agent decodes them."""
    assert parse_launch(content.decode("utf-8", "replace").split("\0")).form in LaunchForm


LAUNCH = "python3 -m sglang.launch_server --model-path m "


@pytest.mark.parametrize(
    ("flags", "kept", "complete"),
    [
        ("--api-key $(cat /run/key) --attention-backend fa4", {"attention_backend": "fa4"}, False),
        ('--api-key "$(cat /run/key)" --attention-backend fa4', {"attention_backend": "fa4"}, True),
        ("--port $((3000+1)) --attention-backend fa4", {"attention_backend": "fa4"}, True),
        ("--port `cat p` --mamba-backend flashinfer", {"mamba_backend": "flashinfer"}, True),
        ("--chat-template <(cat x) --attention-backend fa4", {"attention_backend": "fa4"}, True),
        ("2>&1 --mamba-backend flashinfer | tee log", {"mamba_backend": "flashinfer"}, True),
        ("--api-key abc#def --attention-backend fa4", {"attention_backend": "fa4"}, True),
        ("--mem-fraction-static 0.8 $EXTRA", {}, False),
        ("--trust-remote-code $EXTRA", {}, False),
        ("--api-key=$KEY", {}, False),
        ('--api-key "$KEY"', {}, True),
        ("--port 3 ${X:+--mamba-backend flashinfer}", {"port": 3}, False),
        ('--port 3 "$@"', {"port": 3}, True),
        ("--port 3 $@", {"port": 3}, False),
        ("--tp $(nvidia-smi -L | wc -l) --port 1", {"port": 1}, False),
        ("--attention-backend fa{3,4}", {}, False),
        ("--attention-backend 'fa4", {}, False),
        ("--${X}-backend fa4", {}, False),
    ],
)
def test_a_script_is_read_as_a_shell_reads_it(flags: str, kept: dict[str, object], complete: bool) -> None:
    """A substitution or redirection ends no launch early, and what only the shell knows is never a fault."""
    launch = parse_launch(["sh", "-c", LAUNCH + flags])
    assert launch.flags == (kept if complete else kept | {"incomplete": True})
    assert launch.notes.problems == ()
    assert launch.notes.has_model


@pytest.mark.parametrize(
    "argv",
    [
        ["bash", "-o", "pipefail", "-c", LAUNCH + "--tp 2"],
        ["bash", "-eo", "pipefail", "-c", LAUNCH + "--tp 2"],
        ["bash", "-c", "-e", "--", LAUNCH + "--tp 2"],
        ["env", "-S", LAUNCH + "--tp 2"],
        ["env", "-iS", LAUNCH, "--tp", "2"],
        ["sh", "-c", 'exec "$@"', "--", *LAUNCH.split(), "--tp", "2"],
        ["bash", "-lc", "exec -a name " + LAUNCH + "--tp 2"],
        ["sh", "-c", "if true; then " + LAUNCH + "--tp 2; fi"],
    ],
)
def test_shells_and_env_with_options(argv: list[str]) -> None:
    """Options of a shell may take a value, and `env -S` splits one word into a command (coreutils' manual)."""
    launch = parse_launch(argv)
    assert (launch.form, launch.flags) == (LaunchForm.MODULE, {"tp_size": 2})


@pytest.mark.parametrize("between", ["&", "||", ";"])
def test_several_launches_are_not_all_judged(between: str) -> None:
    """The last one is read; that the others are not is said, and nothing is complete."""
    launch = parse_launch(["sh", "-c", f"{LAUNCH} --tp 2 {between} {LAUNCH} --tp 4; wait"])
    assert launch.notes.launches == 2
    assert launch.flags == {"tp_size": 4, "incomplete": True}


@pytest.mark.parametrize(
    ("words", "named", "flags"),
    [
        (["--model-type", "llm", "Qwen/x", "--port", "1"], True, {"port": 1}),
        (["--model-type=auto", "Qwen/x"], True, {}),
        (["--port", "1", "--model-type", "llm"], False, {"port": 1}),
        (["--model-type", "diffusion", "x", "--port", "y"], True, {"incomplete": True}),
    ],
)
@pytest.mark.parametrize("command", [["sglang", "serve"], ["python", "-m", "sglang.cli.main", "serve"]])
def test_serve_takes_its_own_words_first(
    command: list[str], words: list[str], named: bool, flags: dict[str, object]
) -> None:
    """`sglang serve` strips --model-type before the model's place is looked at (sglang/cli/serve.py, 0.5.16)."""
    launch = parse_launch([*command, *words])
    assert (launch.notes.has_model, launch.flags, launch.notes.problems) == (named, flags, ())
    assert launch.notes.passed_over == ("--model-type",)


def test_nothing_follows_a_bare_double_dash() -> None:
    """To argparse the rest are positional words, of which SGLang takes none; another program may."""
    launch = parse_launch(["sglang", "serve", "m", "--", "--tp", "2"])
    assert launch.flags == {}
    assert [(one.token, one.flag) for one in launch.notes.problems] == [("unexpected-word", "--")]
    assert parse_launch(["/run.sh", "--", "--tp", "2"]).flags == {"tp_size": 2, "incomplete": True}


@pytest.mark.parametrize(
    ("script", "config"),
    [
        (f"{LAUNCH} --config ~/a.yaml", "unknown-path"),
        (f"{LAUNCH} --config $DIR/a.yaml", "unknown-path"),
        (f"cat > a.yaml <<'E'\nport: 1\n# don't\nE\n{LAUNCH} --config a.yaml", "written-before"),
        (f"curl -o a.yaml http://x; {LAUNCH} --config a.yaml", "written-before"),
        (f"./prepare && {LAUNCH} --config b.yaml", "written-before"),
        (f"ulimit -n 4096; export A=b; {LAUNCH} --config b.yaml", "not-found"),
        (f"./prepare && {LAUNCH} --config c.yaml", "read"),
    ],
)
def test_a_file_that_the_script_makes_is_not_missing(script: str, config: str) -> None:
    """What a script writes before the launch is not there yet, or not as it will be."""
    gone = LaunchFileError("not-found", "there is no such file", refused=True)
    launch = parse_launch(["bash", "-c", script], words_of({"a.yaml": gone, "b.yaml": gone, "c.yaml": []}))
    assert launch.notes.config == config


def test_a_running_server_has_no_shell() -> None:
    """In a process's own words a dollar sign, a tilde or a bracket is nothing but itself: the flags are all there."""
    argv = ["python", "-m", "sglang.launch_server", "--model", "m", "--api-key", "$(x) {a,b}`", "--chat-template", "~"]
    assert parse_launch([*argv, "--tp", "2"]).flags == {"tp_size": 2}


@pytest.mark.parametrize(
    "piece",
    [
        ["python", "-X"],
        ["python", "-m"],
        ["sh", "-e"],
        ["bash", "-o"],
        ["env", "-i"],
        ["env", "-u"],
        ["A=b"],
        ["sh", "-c"],
    ],
)
def test_time_grows_with_the_number_of_words_only(piece: list[str]) -> None:
    """Any process may have any command line, and each is looked at: eight times the words take no 64 times as long."""

    def taken(count: int) -> float:
        argv = piece * count
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            server_form(argv)
            parse_launch(argv)
            parse_launch(["sh", "-c", " ".join(argv)])
            best = min(best, time.process_time() - began)
        return best

    assert taken(6400) < 30 * max(taken(800), 1e-3)


def test_a_command_line_that_is_too_long_is_incomplete() -> None:
    """Words beyond the limit are not looked at, and that is said."""
    assert parse_launch(["--port", "1", *["x"] * 20000, "--tp", "2"]).flags == {"port": 1, "incomplete": True}
