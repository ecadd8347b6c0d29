"""The state file: whole or absent, never half, never somebody else's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.drift import advance
from sidecar.model import Known, Observed
from sidecar.state import FILE, FOLDER, LOCK, State, StateError, StateFile, Stuck, decode, encode
from tests.fakes.descriptors import none_left

KNOWN = advance(
    advance(Known(), {"torch": Observed(value="2.11.0", source="packages/server", build="a")}, 1.0),
    {"torch": Observed(value="2.13.0", source="packages/server", build="b")},
    2.0,
)
FULL = State(known=KNOWN, stuck=(Stuck(probe="driver", where="nvmlDeviceGetCount", detail="It hangs.", since=3.0),))


def file_in(folder: Path) -> Path:
    return folder / FOLDER / FILE


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Items, counters, recent changes and stuck probes come back as they were."""
    StateFile(tmp_path).save(FULL)
    state, problem = StateFile(tmp_path).load(10.0)
    assert problem is None
    assert state == FULL


def test_the_folder_is_our_own(tmp_path: Path) -> None:
    """In a directory open to everybody the agent keeps a folder that only it may enter."""
    tmp_path.chmod(0o777)
    StateFile(tmp_path).save(FULL)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert stat.S_IMODE(file_in(tmp_path).stat().st_mode) == 0o600
    (tmp_path / FOLDER).chmod(0o777)
    StateFile(tmp_path).save(FULL)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\x00\xff", b"[]", b'{"format": 2}', encode(FULL)[:-40], b"[" * 100_000, b"x" * 2_000_000],
    ids=["empty", "cut", "binary", "list", "newer", "truncated", "deep", "large"],
)
def test_a_corrupt_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    """What does not read back is renamed, reported, and does not stand in the way of the next save."""
    file = StateFile(tmp_path)
    file.save(State())
    file_in(tmp_path).write_bytes(content)
    state, problem = file.load(0.0)
    assert state == State()
    assert problem is not None
    assert problem.token == "set-aside"
    aside = list((tmp_path / FOLDER).glob(f"{FILE}.unreadable-*"))
    assert [one.read_bytes() for one in aside] == [content]
    file.save(FULL)
    assert file.load(1.0) == (FULL, None)


def test_files_set_aside_do_not_pile_up(tmp_path: Path) -> None:
    """Only the last few corrupt files are kept."""
    file = StateFile(tmp_path)
    for second in range(10):
        file.save(State())
        file_in(tmp_path).write_bytes(b"{")
        file.load(float(second))
    assert len(list((tmp_path / FOLDER).glob(f"{FILE}.unreadable-*"))) == 3


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe, a folder or a link in the file's place neither blocks nor leads elsewhere."""
    file = StateFile(tmp_path)
    file.save(State())
    path = file_in(tmp_path)
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (tmp_path / "secret").write_bytes(encode(FULL))
        path.symlink_to(tmp_path / "secret")
    state, problem = file.load(0.0)
    assert state == State()
    assert problem is not None
    assert (tmp_path / "secret").exists() is (kind == "link")


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    """A write that the system cuts short raises, names the reason, and what was there before is still whole."""
    file = StateFile(tmp_path)
    file.save(FULL)
    pid = os.fork()
    if pid == 0:
        # In a child: the limit on file sizes is the nearest thing to a full disk and cannot be raised again.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
        try:
            StateFile(tmp_path).save(State(known=KNOWN))
        except StateError as error:
            os._exit(42 if "too large" in error.problem.sentence else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    assert file.load(0.0) == (FULL, None)
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [FILE]


def test_a_directory_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    """Loading and saving below a missing directory name the reason and raise nothing else."""
    file = StateFile(tmp_path / "missing")
    state, problem = file.load(0.0)
    assert state == State()
    assert problem is not None
    assert problem.token == "unwritable"
    with pytest.raises(StateError, match="no such file"):
        file.save(State())


@pytest.mark.parametrize("on_host", [False, True])
def test_what_others_may_write_is_reported(tmp_path: Path, on_host: bool) -> None:
    """A state file that any user may change is read with a warning, on a host set aside; the next write cures it."""
    tmp_path.chmod(0o755)
    file = StateFile(tmp_path, on_host=on_host)
    file.save(FULL)
    file_in(tmp_path).chmod(0o666)
    state, problem = file.load(0.0)
    assert state == (State() if on_host else FULL)
    assert problem is not None
    assert problem.token == "open-to-others"
    assert file.save(FULL) is None
    assert file.load(1.0) == (FULL, None)


def test_a_directory_open_to_all(tmp_path: Path) -> None:
    """In a container it is the rule (an emptyDir is 0777); on a host anybody could put another folder in its place."""
    tmp_path.chmod(0o777)
    assert StateFile(tmp_path).save(FULL) is None
    host = StateFile(tmp_path, on_host=True)
    state, problem = host.load(0.0)
    assert (state, problem and problem.token) == (State(), "open-to-others")
    with pytest.raises(StateError, match="chmod o-w"):
        host.save(State())
    tmp_path.chmod(0o1777)
    assert host.load(0.0) == (FULL, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("on_host", [False, True])
def test_the_folder_of_another_user(tmp_path: Path, on_host: bool) -> None:
    """What another user owns is theirs to say: a warning in a container, not believed on a host."""
    tmp_path.chmod(0o755)
    StateFile(tmp_path).save(FULL)
    os.chown(tmp_path / FOLDER, 4321, 4321)
    state, problem = StateFile(tmp_path, on_host=on_host).load(0.0)
    assert (state, problem and problem.token) == (State() if on_host else FULL, "open-to-others")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("counts", {"torch": 10**400}),
        ("counts", {"torch": -1}),
        ("counts", {"torch": True}),
        ("counts", []),
        ("seen", {"torch": "2"}),
        ("last_change", {"torch": 1e300}),
        ("recent", [{"item": "torch", "kind": "improved", "before": None, "after": None, "at": 1.0}]),
        ("stuck", [{"probe": "driver"}]),
    ],
)
def test_values_that_no_agent_writes(part: str, value: object) -> None:
    """A file is used as a whole or not at all; a number that no metric could show is none."""
    document = json.loads(encode(FULL)) | {part: value}
    with pytest.raises(ValueError, match="wrong kind"):
        decode(json.dumps(document).encode())


def test_only_one_agent_has_it(tmp_path: Path) -> None:
    """A second agent is told so and touches nothing, until the first has left it or is gone."""
    first, second = StateFile(tmp_path), StateFile(tmp_path)
    assert first.claim() is None
    assert first.claim() is None, "its own"
    problem = second.claim()
    assert problem is not None
    assert problem.token == "in-use"
    first.close()
    assert second.claim() is None


def test_the_lock_goes_with_its_process_and_is_no_child_s(tmp_path: Path) -> None:
    """A child that outlives the agent, as a stuck worker does, does not keep the directory from the next one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        StateFile(tmp_path).claim()
        os.write(writing, str(subprocess.Popen(["sleep", "60"]).pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    child = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    try:
        assert StateFile(tmp_path).claim() is None
    finally:
        os.kill(child, signal.SIGKILL)  # raises if it was not there any more


def test_two_that_write_at_once_do_not_mix(tmp_path: Path) -> None:
    """Even without a lock (a file system that has none) whoever writes last is there, whole.

    In two containers both agents may be process 1.
    """
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                file = StateFile(tmp_path)
                for _ in range(300):
                    file.save(_numbered(number))
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    while pids:
        state, problem = StateFile(tmp_path).load(0.0)
        assert problem is None
        assert len({one.value for one in state.known.seen.values()}) <= 1
        ended = [os.waitpid(pid, os.WNOHANG) for pid in pids]
        assert {status for _, status in ended} == {0}, "neither may hinder the other"
        pids = [pid for pid, (waited, _) in zip(pids, ended, strict=True) if not waited]
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [FILE]


def _numbered(number: int) -> State:
    """A state that is recognisable as one by the number that all of its parts carry."""
    seen = {(f"item{index}", PADDING): Observed(value=str(number), source=PADDING) for index in range(40)}
    return State(known=Known(seen=seen, counts={"number": number}))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_state_or_a_sentence(content: bytes) -> None:
    """Whatever lies in the file, reading it gives a state or one reason."""
    with contextlib.suppress(ValueError):
        assert isinstance(decode(content), State)


def _write_for_ever(folder: Path, start: int, begun: int) -> None:
    """Save states as an agent does."""
    file = StateFile(folder)
    if file.claim() is not None:
        return
    for number in range(start, start + 1_000_000):
        file.save(_numbered(number))
        if number == start:
            os.write(begun, b"x")


PADDING = "x" * 250


def test_a_killed_writer_leaves_a_whole_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL at 200 random moments of writing: never lost, never corrupt, never mixed of two writes."""
    rng = random.Random(20261201)
    number, torn = -1, 0
    for _ in range(200):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _write_for_ever(tmp_path, number + 1, writing)
            finally:
                os._exit(1)
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        time.sleep(rng.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        torn += any((tmp_path / FOLDER).glob(f".{FILE}.*"))
        file = StateFile(tmp_path)
        assert file.claim() is None, "the lock must have gone with its process"
        state, problem = file.load(0.0)
        file.close()
        assert problem is None
        found = state.known.counts.get("number", -1)
        assert found >= number, "what was saved before must not be lost"
        assert {one.value for one in state.known.seen.values()} == ({str(found)} if found >= 0 else set())
        number = found
    assert number >= 199, "each writer must have written"
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {FILE, LOCK}, "nothing is left behind"
    with capsys.disabled():
        sys.stdout.write(f"\nkilled while writing: 200 times in {number} writes; {torn} left half a file beside it\n")


def test_a_state_that_cannot_be_opened_for_want_of_descriptors_is_kept(tmp_path: Path) -> None:
    """It is no fault of the file, which must not be set aside for it."""
    file = StateFile(tmp_path)
    assert file.claim() is None
    file.save(State())
    with none_left(), pytest.raises(OSError, match="Too many open files"):
        file.load(0.0)
    assert file.load(0.0) == (State(), None)
    assert [one.name for one in file.folder.glob("*unreadable*")] == []
    file.close()
