"""What the agent remembers across its own restarts: one small file in a folder of its own.

Written whole to a temporary file, flushed to the disk and renamed, so that whoever ends the process or the power at any
moment leaves the old content or the new one. A file that does not read back is set aside, never overwritten: the
next one starts from what is seen then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from sidecar.exhaustion import exhausted
from sidecar.exposure import anybody_may_write, objection
from sidecar.model import Change, ChangeKind, Known, Observed
from sidecar.regular import IrregularError, open_regular

FORMAT: Final = 1
"""Number of the file's format; a file of a newer one is set aside like one that does not read."""
FOLDER: Final = "sglang-sidecar"
"""The agent's own folder in the state directory, which may be shared and open to everybody (an emptyDir is 0777)."""
FILE: Final = "state.json"
LOCK: Final = ".lock"
"""Held by the agent whose state this is, for as long as it runs."""
_LIMIT: Final = 1024 * 1024
"""Bytes of the largest accepted file; a full one has about 20 kB."""
_ASIDE_KEPT: Final = 3
"""Files set aside that are kept: a disk must not fill with them."""
_TEXT: Final = 4000
_ITEMS: Final = 1000
_MOST: Final = 2**53
"""The largest count that a metric can show exactly."""


class Stuck(Struct, frozen=True, kw_only=True):
    """A probe whose child could not be ended. ``since`` is in seconds since the epoch."""

    probe: str
    where: str | None
    detail: str
    since: float


class State(Struct, frozen=True, kw_only=True):
    """All that is remembered."""

    known: Known = field(default_factory=Known)
    stuck: tuple[Stuck, ...] = ()


class StateProblem(Struct, frozen=True):
    """Why the state directory does not do its work: a token and a sentence.

    ``set-aside``: the file did not read and was renamed. ``unreadable``, ``unwritable``: the system's own words are in
    the sentence. ``open-to-others``: other users may write to the folder or the file. ``in-use``: another agent has it.
    """

    token: str
    sentence: str


class StateError(Exception):
    """The state could not be read or written. ``problem`` says why."""

    def __init__(self, problem: StateProblem) -> None:
        super().__init__(problem.sentence)
        self.problem = problem


class StateFile:
    """The file. Every method blocks: call them from a thread.

    ``directory`` is the setting ``state_dir``; the file lies in a folder of the agent's own below it. With ``on_host``
    nothing is believed that other users could have written, nor written where they could replace it; in a container
    there are no others, so that it is only reported.
    """

    def __init__(self, directory: Path, *, on_host: bool = False) -> None:
        self.folder = directory / FOLDER
        self.path = self.folder / FILE
        self._on_host = on_host
        self._lock: int | None = None

    def claim(self) -> StateProblem | None:
        """Make it this agent's until `close`, or say that it is another one's: two would overwrite each other.

        Where it cannot be locked (a file system without locks, or a read-only one) it is used all the same.
        """
        if self._lock is not None:
            return None
        try:
            self._make_folder()
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.folder / LOCK, flags, 0o600)
        except OSError:
            return None  # what hinders will be met again, by who reads or writes
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            return StateProblem("in-use", f"{self.folder} is used by another agent; each needs a state_dir of its own.")
        self._lock = descriptor
        for left in self.folder.glob(f".{FILE}.*"):
            # Of a process that was ended while it wrote: nobody else writes here.
            with contextlib.suppress(OSError):
                left.unlink()
        return None

    def close(self) -> None:
        """Leave it to others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, now: float) -> tuple[State, StateProblem | None]:
        """Read what was remembered; an empty state where nothing was, with the problem if there is one.

        Raises OSError where the agent itself lacks what it needs to look: that says nothing of the file.
        """
        try:
            self._make_folder()
        except OSError as error:
            return State(), StateProblem("unwritable", f"{self.folder} cannot be made or used: {_words(error)}")
        exposed = self._exposed_folder()
        if exposed is not None and self._on_host:
            return State(), exposed
        try:
            file = open_regular(self.path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return State(), exposed
        except IrregularError as error:
            return self._set_aside(now, f"it {error}")
        except OSError as error:
            if exhausted(error):
                raise
            return self._set_aside(now, f"it cannot be opened: {_words(error)}")
        try:
            with file:
                status = os.fstat(file.fileno())
                content = file.read(_LIMIT + 1)
        except OSError as error:
            if exhausted(error):
                raise
            return self._set_aside(now, f"it cannot be read: {_words(error)}")
        exposed = exposed or _exposed(self.path, status)
        if exposed is not None and self._on_host:
            return self._set_aside(now, "others may have written it", token=exposed.token)
        if len(content) > _LIMIT:
            return self._set_aside(now, "it is too large")
        try:
            state = decode(content)
        except ValueError as error:
            return self._set_aside(now, str(error))
        return state, exposed

    def save(self, state: State) -> StateProblem | None:
        """Write it; gives what is wrong with the place although it could be written.

        Raises StateError; then what was written before is still there, whole.
        """
        # A name that no other process makes: in two containers both agents may be process 1.
        temporary = self.folder / f".{FILE}.{os.urandom(8).hex()}"
        try:
            self._make_folder()
            exposed = self._exposed_folder()
            if exposed is not None and self._on_host:
                raise StateError(exposed)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(encode(state))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            self._sync_folder()
        except OSError as error:
            raise StateError(StateProblem("unwritable", f"{self.path} cannot be written: {_words(error)}")) from error
        return exposed

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            self.folder.chmod(0o700)

    def _sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _set_aside(self, now: float, why: str, *, token: str = "set-aside") -> tuple[State, StateProblem]:  # noqa: S107 - no password
        name = f"{FILE}.unreadable-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
        try:
            self.path.rename(self.folder / name)
        except OSError as error:
            sentence = f"{self.path} is not usable ({why}) and cannot be set aside: {_words(error)}"
            return State(), StateProblem("unreadable", sentence)
        for old in sorted(self.folder.glob(f"{FILE}.unreadable-*"))[:-_ASIDE_KEPT]:
            with contextlib.suppress(OSError):
                old.unlink()
        return State(), StateProblem(token, f"{self.path} is not usable ({why}); it was renamed to {name}.")

    def _exposed_folder(self) -> StateProblem | None:
        """Whether others may change the folder: what is remembered would then be theirs to say."""
        # That all may write beside it is the rule for an emptyDir, which only one pod has; on a host anybody could put
        # another folder in its place.
        if self._on_host and anybody_may_write(self.folder.parent):
            return _open_to_others(self.folder.parent)
        with contextlib.suppress(OSError):
            return _exposed(self.folder, self.folder.lstat())
        return None


def _exposed(path: Path, status: os.stat_result) -> StateProblem | None:
    if status.st_uid not in {os.geteuid(), 0}:
        return StateProblem("open-to-others", f"{path} belongs to another user ({status.st_uid}).")
    return _open_to_others(path) if status.st_mode & stat.S_IWOTH else None


def _open_to_others(path: Path) -> StateProblem:
    return StateProblem("open-to-others", f"{objection(path)}.")


def _words(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


# -- the format -----------------------------------------------------------------------------------------


def encode(state: State) -> bytes:
    """The file's content."""
    known = state.known
    return json.dumps(
        {
            "format": FORMAT,
            "seen": [
                {"item": item, "source": source, "value": one.value, "build": one.build}
                for (item, source), one in known.seen.items()
            ],
            "counts": dict(known.counts),
            "last_change": dict(known.last_change),
            "recent": [
                {"item": one.item, "kind": one.kind.value, "before": one.before, "after": one.after, "at": one.at}
                for one in known.recent
            ],
            "stuck": [
                {"probe": one.probe, "where": one.where, "detail": one.detail, "since": one.since}
                for one in state.stuck
            ],
        },
        indent=1,
    ).encode()


def decode(content: bytes) -> State:
    """Read a file's content. Raises ValueError with what is wrong; nothing of a wrong file is used."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not complete JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("its format is not the one that this release writes")
    try:
        return State(
            known=Known(
                seen={
                    (_text(one["item"]), _text(one["source"])): Observed(
                        value=_optional(one["value"]), source=_text(one["source"]), build=_optional(one["build"])
                    )
                    for one in data["seen"][:_ITEMS]
                },
                counts={_text(item): _count(value) for item, value in data["counts"].items()},
                last_change={_text(item): _time(value) for item, value in data["last_change"].items()},
                recent=tuple(_change(one) for one in data["recent"][:_ITEMS]),
            ),
            stuck=tuple(
                Stuck(
                    probe=_text(one["probe"]),
                    where=_optional(one["where"]),
                    detail=_text(one["detail"]),
                    since=_time(one["since"]),
                )
                for one in data["stuck"][:_ITEMS]
            ),
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError("a part of it is missing or of the wrong kind") from None


def _change(one: Mapping[str, Any]) -> Change:
    return Change(
        item=_text(one["item"]),
        kind=ChangeKind(one["kind"]),
        before=_optional(one["before"]),
        after=_optional(one["after"]),
        at=_time(one["at"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    # JSON can say what no output can encode: half of a character.
    return value[:_TEXT].encode("utf-8", "replace").decode()


def _optional(value: object) -> str | None:
    return None if value is None else _text(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ValueError(value)
    return value


def _time(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e11:
        raise ValueError(value)
    return float(value)
