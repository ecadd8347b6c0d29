"""Reading the file of SGLang's --config as SGLang reads it, and nothing that is not such a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.launch.args import UNUSABLE, LaunchFileError, parse_launch
from sidecar.launch.file import LaunchFiles, fault_of, words
from tests.fakes.sglang import MARKER


def flags(text: str) -> dict[str, object]:
    """The flags that a file's text gives a launch."""
    launch = parse_launch(["--config", "x.yaml"], lambda path: list(words(text.encode(), path)))
    return dict(launch.flags)


def problems(text: str) -> list[str]:
    launch = parse_launch(["--config", "x.yaml"], lambda path: list(words(text.encode(), path)))
    return [problem.token for problem in launch.notes.problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attention-backend: fa3\n", {"attention_backend": "fa3"}),
        ("\ufeffattention-backend: fa3\n", {"attention_backend": "fa3"}),
        ("attention-backend: [fa3]\n", {"attention_backend": "fa3"}),
        ("attention-backend: []\n", {}),
        ("attention-backend: fa3\nattention-backend: fa4\n", {"attention_backend": "fa4"}),
        ("tensor-parallel-size: 2\ntp: 4\n", {"tp_size": 4}),
        ("port: 0x10\n", {"port": 16}),
        ("port: '30001'\n", {"port": 30001}),
        ("enable-deterministic-inference: true\n", {"enable_deterministic_inference": True}),
        ("enable-deterministic-inference: yes\n", {"enable_deterministic_inference": True}),
        ("enable-deterministic-inference: false\n", {}),
        ("mamba-backend:\n", {"mamba_backend": "None"}),
        ("mamba-backend: true\n", {"mamba_backend": "true"}),
        ("mm-attention-backend: {a: 1}\n", {}),
        (f"api-key: {MARKER}\nlora-paths: [a, b]\nhost: 0.0.0.0\n", {"host": "0.0.0.0"}),
        ("fa_impl_ver: 2\n", {"fa_impl_ver": 2}),
        ("", {}),
        ("# nothing\n", {}),
        ("~\n", {}),
    ],
)
def test_entries_become_flags(text: str, expected: dict[str, object]) -> None:
    """Each line is what SGLang 0.5.16 itself made of the same file."""
    assert flags(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attention_backend: fa3\n", ["unrecognized-flag"]),
        ("enable_deterministic_inference: true\n", ["unrecognized-flag"]),
        ("enable-deterministic-inference: 'yes'\n", ["unexpected-word"]),
        ("attention-backend: [fa3, fa4]\n", ["unexpected-word"]),
        ("attention-backend: --port\n", ["missing-value", "missing-value"]),
        ("port: 3e4\n", ["not-a-number"]),
        ("port:\n", ["not-a-number"]),
        ("tp: [[1]]\n", ["not-a-number"]),
        ("attention-backend: fa3\nsampling-backend: pytorch\n", []),
    ],
)
def test_what_argparse_would_refuse_is_noted(text: str, expected: list[str]) -> None:
    """SGLang puts the entries before its parser as words, so a file fails as a command line does."""
    assert problems(text) == expected


@pytest.mark.parametrize(
    ("text", "token", "line", "refused"),
    [
        ("a: 1\nattention-backend: [fa3\n", "invalid-yaml", 3, True),
        ("a: b: c\n", "invalid-yaml", 1, True),
        ("a: 1\n---\nb: 2\n", "invalid-yaml", 2, True),
        ("a: \x07\n", "invalid-yaml", None, True),
        ("- a\n", "not-a-mapping", 1, True),
        ("just text\n", "not-a-mapping", 1, True),
        ("a: 1\n1: b\n", "key-not-text", 2, True),
        ("a: 1\nyes: b\n", "key-not-text", 2, True),
        ("[a]: b\n", "key-not-text", 1, True),
        ("a: 1\nb: !!python/object/apply:os.system [x]\n", "unknown-tag", 2, True),
        ("a: &x fa3\nb: *x\n", "aliases", 2, False),
        ("<<: {a: 1}\n", "merge", 1, False),
        ("a: " + "[" * 100 + "]" * 100 + "\n", "too-deep", 1, False),
        ("a:\n" + "- 1\n" * 5000, "too-deep", 3999, False),
    ],
)
def test_a_file_that_gives_no_flags_is_named_by_its_line(
    text: str, token: str, line: int | None, refused: bool
) -> None:
    """Where SGLang ends with an error, and where only this reader does not go on, are told apart."""
    with pytest.raises(LaunchFileError) as caught:
        list(words(text.encode(), "launch.yaml"))
    error = caught.value
    assert (error.token, error.line, error.refused) == (token, line, refused)
    assert str(error).startswith("launch.yaml" if line is None else f"launch.yaml, line {line}:")


def test_a_key_that_passes_nothing_is_told_all_the_same() -> None:
    """SGLang 0.5.16 refuses disable-cuda-graph in a file also where it is false; such a key leaves its name only."""
    text = "disable-cuda-graph: false\ntp: []\nport: 1\n"
    notes = parse_launch(["--config", "x.yaml"], lambda path: list(words(text.encode(), path))).notes
    assert notes.from_config == ("--port", "--disable-cuda-graph", "--tp")
    assert [flag for flag, _, _ in notes.given] == ["--port"]


def test_text_that_is_not_utf_8() -> None:
    """SGLang opens the file as text; the line of the first wrong byte is named."""
    with pytest.raises(LaunchFileError) as caught:
        list(words(b"a: 1\nb: \xff\n", "launch.yaml"))
    assert (caught.value.token, caught.value.line) == ("invalid-yaml", 2)


def test_what_a_value_may_not_be_is_not_repeated() -> None:
    """A long or structured value of a listed flag, and every value of another, leave no trace."""
    text = f"port: {MARKER * 20}\nhost: [{MARKER}{'x' * 200}]\napi-key: {MARKER}\n'a {MARKER}': 1\n"
    found = list(words(text.encode(), "launch.yaml"))
    assert found == ["--port", UNUSABLE, "--host", UNUSABLE, "--api-key", f"--{UNUSABLE}"]


# -- which files are opened ---------------------------------------------------------------------------


def token(path: str, folder: str | None, reader: int | None = None) -> str:
    """How reading a file ends."""
    try:
        LaunchFiles().read(path, folder, reader)
    except LaunchFileError as error:
        return error.token
    return "read"


def test_paths_are_relative_to_the_launch(tmp_path: Path) -> None:
    """A relative path is looked for where the launch would be; without a known folder it is not guessed."""
    (tmp_path / "a.yaml").write_text("tp: 2\n")
    assert token("a.yaml", str(tmp_path)) == "read"
    assert token("a.yaml", "/nonexistent") == "not-found"
    assert token("a.yaml", None) == "unknown-folder"
    assert token(str(tmp_path / "a.yaml"), None) == "read"


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A FIFO does not block, a device and a folder are not opened, and a name that SGLang does not take is said so."""
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "null.yml").symlink_to("/dev/zero")
    (tmp_path / "a.txt").write_text("tp: 2\n")
    (tmp_path / "a.YML").write_text("tp: 2\n")
    names = ("fifo.yaml", "folder.yaml", "null.yml", "a.txt", "a.YML", "none.yaml", "a.txt/b.yaml", "nul\0.yaml")
    assert [token(name, str(tmp_path)) for name in names] == [
        "not-a-file", "not-a-file", "not-a-file", "not-yaml-name", "read", "not-found", "not-found", "unreadable",
    ]  # fmt: skip


def test_size_is_bounded(tmp_path: Path) -> None:
    """What is larger than any such file is not read to its end."""
    (tmp_path / "a.yaml").write_text("#" * (256 * 1024 - 6) + "\ntp: 2")
    assert token("a.yaml", str(tmp_path)) == "read"
    (tmp_path / "a.yaml").write_text("#" * (256 * 1024 - 5) + "\ntp: 2")
    assert token("a.yaml", str(tmp_path)) == "too-large"


def test_a_file_is_read_with_no_more_rights_than_its_user_has(tmp_path: Path) -> None:
    """For a process of another user only what everybody, or that user as its owner, may read is read."""
    path = tmp_path / "a.yaml"
    path.write_text("tp: 2\n")
    path.chmod(0o600)
    other = os.geteuid() + 1000
    assert token(str(path), None, os.geteuid()) == "read"
    assert token(str(path), None, other) == "unreadable"
    path.chmod(0o644)
    assert token(str(path), None, other) == "read"


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    """What is remembered is given up with the file's size, time or place."""
    files, path = LaunchFiles(), tmp_path / "a.yaml"
    path.write_text("tp: 2\n")
    assert files.read(str(path), None) == ("--tp", "2")
    path.write_text("tp: 16\n")
    assert files.read(str(path), None) == ("--tp", "16")
    path.write_text("tp: [\n")
    for _ in range(2):
        with pytest.raises(LaunchFileError):
            files.read(str(path), None)


def test_the_fault_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a file that was looked for and gives nothing is a fault; one in an unknown folder is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("tp: 2\n")
    (tmp_path / "b.yaml").write_text("tp: [\n")
    launches = (["--config", "a.yaml"], ["--config", "b.yaml"], ["sh", "-c", "cd /x; sglang serve --config b.yaml"], [])
    assert [str(fault_of(launch)) for launch in launches] == [
        "None", f"{tmp_path}/b.yaml, line 2: not valid YAML", "None", "None",
    ]  # fmt: skip


YAML = st.text(alphabet=st.sampled_from("ab:-[]{}&*!'\"|>#%@,?\n \t0\x00\x85é"), max_size=80) | st.text(max_size=60)


@given(YAML)
def test_no_text_is_an_error_of_another_kind(text: str) -> None:
    """Whatever a file holds, it gives words or a `LaunchFileError`."""
    try:
        found = list(words(text.encode("utf-8", "surrogatepass"), "launch.yaml"))
    except LaunchFileError as error:
        assert error.token  # noqa: PT017 - both ends are right
    else:
        assert all(isinstance(word, str) for word in found)
    assert parse_launch(["--config", "x"], lambda path: list(words(text.encode("utf-8", "replace"), path))).form


@given(
    st.sampled_from(["api-key", "attention-backend", "ssl-keyfile", "x", "tp"]),
    st.sampled_from(["{}", "[{}]", "{{k: {}}}"]),
)
def test_no_secret_of_a_file_is_kept(key: str, shape: str) -> None:
    """A key's value never reaches what is kept, in whichever shape and under whichever name it stands."""
    text = f"{key}: " + shape.format(f"'{MARKER} !'") + "\n"
    launch = parse_launch(["--config", "x"], lambda path: list(words(text.encode(), path)))
    assert MARKER not in repr(launch)


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("sglang serve m --config gone.yaml", True),
        ("cd . && sglang serve m --config /gone.yaml", True),
        ("sglang serve m --config ~/gone.yaml", False),
        ("sglang serve m --config $X/gone.yaml", False),
        ("cat > gone.yaml <<E\nport: 1\nE\nsglang serve m --config gone.yaml", False),
        ("./prepare; sglang serve m --config gone.yaml", False),
    ],
)
def test_what_a_shell_may_still_make_is_no_fault(
    script: str, fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that the shell completes, or a file that the script writes, is not missing."""
    monkeypatch.chdir(tmp_path)
    assert (fault_of(["sh", "-c", script]) is not None) is fault
