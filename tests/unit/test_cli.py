"""What the command line says of words that it does not take."""

from __future__ import annotations

import pytest

from sidecar.cli import EX_USAGE, main
from tests.fakes.sglang import MARKER


@pytest.mark.parametrize(
    "words",
    [
        ["check", "--attention-backend", "fa4", "--api-key", MARKER],
        ["check", "--api-key=" + MARKER],
        ["check", "--api-key", MARKER, "--", "--tp", "2"],
        ["serve", MARKER],
        ["--api-key", MARKER, "check"],
        ["check", "--no-import=" + MARKER],
        ["check", "--format", f"a'{MARKER}\n"],
        ["check", "--format", MARKER],
        ["explain", "driver-not-loaded", MARKER],
        ["baseline", MARKER],
    ],
)
def test_no_value_is_repeated(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A launch given without its -- has keys among its words, and what is printed ends up in logs."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == EX_USAGE
    assert MARKER not in said.out + said.err


def test_flags_of_a_launch_are_told_where_to_stand(capsys: pytest.CaptureFixture[str]) -> None:
    """The names of the flags are said, and that they belong behind --."""
    with pytest.raises(SystemExit):
        main(["check", "--attention-backend", "fa4", "--api-key", MARKER])
    assert capsys.readouterr().err.endswith(
        "unrecognized arguments: --attention-backend, --api-key;"
        " flags of a launch belong behind --, as in: check -- --tp 2\n"
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "--tls-cert", "x"], "--tls-cert; did you mean --tls-cert-file?"),
        (["serve", "--listn", "x"], "--listn; did you mean --listen?"),
        (["serve", "--no-such-thing-at-all"], "`sglang-sidecar serve --help` lists what there is"),
        (["check", "--listn", "x"], "did you mean --listen?; flags of a launch belong behind --"),
        (["serve", "extra"], "serve takes no such words (they are not repeated here); `sglang-sidecar serve --help`"),
    ],
)
def test_a_misspelt_flag(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag that was probably meant is named, and a launch only where one may be given."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == EX_USAGE
    assert hint in said
    assert ("flags of a launch" in said) == (words[0] == "check")


def test_an_empty_launch_is_no_launch(capsys: pytest.CaptureFixture[str]) -> None:
    """A script whose variable is unset must not get a verdict about whatever server runs here."""
    assert main(["check", "--"]) == EX_USAGE
    assert capsys.readouterr().err.startswith("sglang-sidecar: nothing stands behind --; give the launch there")
