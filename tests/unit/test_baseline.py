"""Baseline files: read strictly, explained in sentences, rewritten without losing what people wrote."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.baseline import load, parse, text, write
from sidecar.drift import compare, written
from sidecar.model import Baseline, Observed
from tests.fakes.descriptors import none_left

ITEMS = ("driver", "torch", "sglang", "flashinfer-python", "flashinfer-cubin")


def read(text: str) -> Baseline:
    return parse(text.encode(), "baseline.toml", ITEMS)


def seen(**values: str | None) -> dict[str, Observed]:
    return {item.replace("_", "-"): Observed(value=value, source="packages/server") for item, value in values.items()}


def test_values_and_specifiers_are_read() -> None:
    """Exact values, specifiers and wanted absence stand side by side."""
    baseline = read("""
        # after the October roll-out
        [environment]
        driver = "580.159.04"
        torch = "==2.11.*"   # any build
        flashinfer-cubin = "absent"
    """)
    assert baseline.problems == ()
    assert {item: written(wanted) for item, wanted in baseline.items.items()} == {
        "driver": "580.159.04",
        "torch": "==2.11.*",
        "flashinfer-cubin": "absent",
    }


@pytest.mark.parametrize(
    ("text", "token", "named"),
    [
        ("[environment]\ntorch = nothing", "not-toml", "line 2"),
        ("driver = '580'", "no-table", "[environment]"),
        ("environment = 3", "no-table", "[environment]"),
        ("[environment]\nkernel = '6.1'", "unknown-item", "kernel"),
        ("[environment]\ntorch = 2.11", "invalid-value", "torch"),
        ("[environment]\ntorch = ''", "invalid-value", "torch"),
        ("[environment]\ntorch = '>=zero'", "invalid-value", "torch"),
        ("[environment]\n[other]", "unknown-key", "other"),
        ("[environment]\ntorch = '2'\ntorch = '3'\n", "not-toml", "overwrite a value"),
        ("[environment]\n[environment]", "not-toml", "line 2"),
        ("[environment]\ntorch = " + "9" * 5000, "not-toml", "TOML"),
        ("[environment]\ntorch = " + "[" * 5000, "not-toml", "TOML"),
        ("[environment]\ntorch = '^2.9'", "invalid-value", "'==2.11.*'"),
        ("[environment]\ntorch = '2.9.*'", "invalid-value", "'==2.11.*'"),
        ("[environment]\nflashinfer_python = '0.6'", "unknown-item", "did you mean flashinfer-python?"),
        ("[environment]\nFlashInfer-Cubins = '0.6'", "unknown-item", "did you mean flashinfer-cubin?"),
        ("[environment]\nbuild = ['a']", "unknown-item", "'build'"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_wrong_is_named(text: str, token: str, named: str) -> None:
    """Each fault of a file has a token and a sentence that names the file and the place."""
    problems = read(text).problems
    assert [problem.token for problem in problems] == [token]
    assert named in problems[0].sentence
    assert "baseline.toml" in problems[0].sentence


def test_one_bad_item_costs_only_itself() -> None:
    """The other items of the same file are still compared."""
    baseline = read("[environment]\nkernel = '6.1'\ndriver = '580'")
    assert set(baseline.items) == {"driver"}
    assert len(baseline.problems) == 1


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "large", "binary"])
def test_files_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    """A missing, blocking or foreign file is one problem and never an exception or a wait."""
    path = tmp_path / "baseline.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b"#" * 1_000_000)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    baseline = load(path, ITEMS)
    assert baseline.items == {}
    assert len(baseline.problems) == 1
    assert str(path) in baseline.problems[0].sentence


@pytest.mark.parametrize("form", ["crlf", "bom", "bom-crlf", "no-end"])
def test_what_editors_make_of_a_file(tmp_path: Path, form: str) -> None:
    """Line ends of Windows, a byte order mark, no last line end: the file means the same, also when it is updated."""
    content = "# ours\n[environment]\ntorch = '==2.11.*'  # any\ndriver = '570'\n"
    content = content.rstrip("\n") if form == "no-end" else content
    content = content.replace("\n", "\r\n") if "crlf" in form else content
    path = tmp_path / "baseline.toml"
    path.write_bytes(content.encode("utf-8-sig" if "bom" in form else "utf-8"))
    baseline = load(path, ITEMS)
    assert (set(baseline.items), baseline.problems) == ({"torch", "driver"}, ())
    updated = write(seen(torch="2.11.0", driver="580", sglang="0.5.16"), existing=text(path), heading="")
    assert read(updated).problems == ()
    assert {item: written(wanted) for item, wanted in read(updated).items.items()} == {
        "torch": "==2.11.*",
        "driver": "580",
        "sglang": "0.5.16",
    }
    assert "# ours" in updated
    assert "# any" in updated


def test_a_file_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    """Half a file, an empty one or none for a moment is no fault: it is looked at a second time."""
    path = tmp_path / "baseline.toml"
    for half in ("", "[environment]\ntorch = '2.1", None):
        if half is None:
            path.unlink()
        else:
            path.write_text(half)
        timer = threading.Timer(0.05, path.write_text, ["[environment]\ntorch = '2.11.0'\n"])
        timer.start()
        baseline = load(path, ITEMS)
        timer.join()
        assert (set(baseline.items), baseline.problems) == ({"torch"}, ())


def test_a_config_map_that_is_swapped_is_old_or_new(tmp_path: Path) -> None:
    """Kubernetes swaps a link to a folder: whenever it is read, the file is one of the two, whole."""
    texts = [f"[environment]\ntorch = '{number}'\n{'# padding' * 500}\n" for number in (1, 2)]
    for number, content in enumerate(texts):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "baseline.toml").write_text(content)
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "baseline.toml").symlink_to("..data/baseline.toml")
    done = threading.Event()

    def swap() -> None:
        for number in range(3000):
            (tmp_path / "..data_tmp").symlink_to(f"..{number % 2}")
            (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        done.set()

    swapping = threading.Thread(target=swap)
    swapping.start()
    found = set()
    while not done.is_set():
        baseline = load(tmp_path / "baseline.toml", ITEMS)
        assert baseline.problems == ()
        found.add(written(baseline.items["torch"]))
    swapping.join()
    assert found == {"1", "2"}


def test_writing_keeps_what_people_wrote() -> None:
    """Comments, order and specifiers that still hold stay; what no longer holds is replaced by what is seen."""
    existing = """# ours, do not edit on Fridays
[environment]
torch = "==2.11.*"  # any build
driver = "570.86.15"
sglang = ">=0.5.16"
flashinfer-cubin = "0.6.12"  # still there
"""
    observed = seen(torch="2.11.0+cu130", driver="580.159.04", sglang="0.5.15", flashinfer_cubin=None)
    assert (
        write(observed, existing=existing, heading="")
        == """# ours, do not edit on Fridays
[environment]
torch = "==2.11.*"  # any build
driver = "580.159.04"
sglang = "0.5.15"
flashinfer-cubin = "absent"  # still there
"""
    )


def test_a_new_one_holds_what_is_seen() -> None:
    """Without an existing file every known item is written, and the result is a baseline without drift."""
    observed = seen(torch="2.11.0+cu130", driver="580.159.04", flashinfer_cubin=None)
    text = write(observed, existing=None, heading="Written by a test.")
    assert text.startswith("# Written by a test.\n")
    baseline = read(text)
    assert (set(baseline.items), baseline.problems) == ({"torch", "driver"}, ())
    assert compare(baseline.items, observed) == ()


@pytest.mark.parametrize(
    "existing", ["", " \n", "[environment", "environment = 1", "a = 1", "a = " + "9" * 5000, "a = " + "[" * 5000]
)
def test_what_is_no_baseline_is_not_rewritten(existing: str) -> None:
    """An existing file that does not read is refused, not replaced."""
    with pytest.raises(ValueError, match="existing baseline"):
        write({}, existing=existing, heading="")


def test_an_empty_file_tells_of_the_shell() -> None:
    """``baseline write --baseline FILE > FILE`` empties the file before it is read; the sentence says what to do."""
    with pytest.raises(ValueError, match="write to another file"):
        write({}, existing="", heading="")


def test_a_value_that_is_no_text_is_replaced() -> None:
    """A number that looks like the version is no value of a baseline, and does not stay."""
    assert write(seen(torch="2.11"), existing="[environment]\ntorch = 2.11\n", heading="") == (
        '[environment]\ntorch = "2.11"\n'
    )


VALUES = st.sampled_from(["2.11.0", "2.11.0+cu130", "0.6.14", "580.159.04", "NVIDIA H200", "open"])
WANTED = VALUES | st.sampled_from(["absent", ">=0.6,<0.7", "~=2.1", "==2.11.*", "^1", "", "==2.11.0+cu129"])


@given(
    st.dictionaries(st.sampled_from([*ITEMS, "stranger"]), WANTED, max_size=5),
    st.dictionaries(st.sampled_from(ITEMS), st.none() | VALUES, max_size=5),
    st.sampled_from(["\n", "\r\n"]),
)
def test_what_is_updated_holds_and_keeps_its_comments(
    wanted: dict[str, str], now: dict[str, str | None], end: str
) -> None:
    """Whatever a baseline says: updated, nothing that is known differs from it, and no comment is lost."""
    lines = ["# top", "[environment]", *(f'{item} = "{value}"  # why {item}' for item, value in wanted.items())]
    observed = {item: Observed(value=value, source="packages/server") for item, value in now.items()}
    updated = write(observed, existing=end.join([*lines, ""]), heading="")
    baseline = read(updated)
    assert compare(baseline.items, observed) == ()
    assert not {"not-toml", "no-table"} & {one.token for one in baseline.problems}
    assert all(f"# why {item}" in updated for item in wanted)
    assert write(observed, existing=updated, heading="") == updated


@given(st.text(max_size=300))
def test_any_text_is_a_baseline_or_problems(text: str) -> None:
    """Whatever a file holds, reading it ends in items or in sentences."""
    baseline = parse(text.encode("utf-8", "surrogatepass"), "f", ITEMS)
    assert baseline.items or baseline.problems or "environment" in text


def test_a_baseline_that_cannot_be_opened_for_want_of_descriptors_is_not_wrong(tmp_path: Path) -> None:
    """That the agent cannot look says nothing of the file."""
    (tmp_path / "b.toml").write_text("[environment]\n")
    with none_left(), pytest.raises(OSError, match="Too many open files"):
        load(tmp_path / "b.toml", ITEMS)


def test_a_key_of_very_many_parts_is_refused_at_once() -> None:
    """What the parser would take minutes for is told instead; a comment may have as many dots as it likes."""
    begun = time.process_time()
    found = parse(b"a" + b".a" * 100_000 + b" = 1\n", "f", ITEMS)
    assert time.process_time() - begun < 2
    assert [one.token for one in found.problems] == ["not-toml"]
    assert parse(b"# " + b"." * 1000 + b"\n[environment]\n", "f", ITEMS).problems == ()
