"""Whose environment and whose rights code of the server's environment gets: never more than the server has."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from sidecar.isolation import Privilege
from sidecar.model import Target

_CAP_SETGID, _CAP_SETUID = 6, 7


class User(Struct, frozen=True):
    """Effective user, group and supplementary groups of a process."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class Credentials:
    """Answers for a target; reads ``/proc`` anew each time, since a server may be another process by then.

    ``environ`` stands in for the server's environment where that may not be read.
    """

    def __init__(self, *, proc: Path = Path("/proc"), environ: Mapping[str, str] | None = None) -> None:
        self._proc = proc
        self._environ = os.environ if environ is None else environ
        self._last: tuple[int, User] | None = None

    def environ(self, target: Target) -> Mapping[str, str]:
        """Environment variables of the server, or those that stand in for them."""
        return self._environ if target.environ is None else target.environ

    def user(self, target: Target) -> User | None:
        """Find the user of the server's process, or None where there is none to see.

        A process that has ended keeps the user that it had: until another one is found in its place, what rests on
        the user must not be taken for something new.
        """
        if target.pid is None:
            return None
        user = _user_of(target.pid, self._proc)
        if user is not None:
            self._last = (target.pid, user)
        elif self._last is not None and self._last[0] == target.pid:
            user = self._last[1]
        return user

    def privilege(self, target: Target) -> tuple[str | None, Privilege]:
        """(refusal, privilege) for code of the server's environment: never more rights than the server has."""
        user = self.user(target)
        if user is None or user.uid == os.geteuid():
            return None, Privilege()
        if os.geteuid() == 0 and _may_change_user(self._proc):
            return None, Privilege(uid=user.uid, gid=user.gid, groups=user.groups)
        if user.uid == 0:
            # Root's files run with the agent's lesser rights: safe, though not faithful (`same_user`).
            return None, Privilege()
        return "privilege", Privilege()

    def same_user(self, target: Target, privilege: Privilege) -> bool:
        """Whether a child with this privilege is the user that the server is."""
        user = self.user(target)
        uid = os.geteuid() if privilege.uid is None else privilege.uid
        # Root without capabilities is not the root that the server is.
        return user is None or (user.uid == uid and uid != 0)


def home_of(user: User | None) -> str | None:
    """Home directory by the user database, which is what Python falls back to without HOME."""
    try:
        return pwd.getpwuid(os.geteuid() if user is None else user.uid).pw_dir
    except KeyError:
        return None


def _status_field(path: Path, name: str) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.split()
    return []


def _user_of(pid: int, proc: Path) -> User | None:
    """Effective user, group and supplementary groups of a process, or None when it is gone."""
    status = proc / str(pid) / "status"
    uids, gids, groups = (_status_field(status, name) for name in ("Uid", "Gid", "Groups"))
    try:
        return User(int(uids[1]), int(gids[1]), tuple(int(group) for group in groups))
    except (ValueError, IndexError):
        return None


def _may_change_user(proc: Path) -> bool:
    """Whether this process holds CAP_SETUID and CAP_SETGID: uid 0 in a container often does not."""
    try:
        capabilities = int(_status_field(proc / "self/status", "CapEff")[0], 16)
    except (ValueError, IndexError):
        return False
    return bool(capabilities >> _CAP_SETUID & 1 and capabilities >> _CAP_SETGID & 1)
