"""How much memory this control group has left.

On cgroup v2 Kubernetes has the kernel kill a container's processes together, so an expensive child that runs
into the limit would take the agent with it: the child is started only with room, and ended before the limit.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

_NO_LIMIT = 1 << 60
"""cgroup v1 writes "unlimited" as the largest multiple of the page size."""


class MemoryReading(Struct, frozen=True):
    """A limit and what counts against it, in bytes."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        """Bytes left below the limit; never negative."""
        return max(0, self.limit - self.used)


class MemoryLimit:
    """The tightest memory limit that this process is under. ``proc`` and ``cgroup`` are the usual mount points."""

    def __init__(self, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = cgroup

    def read(self) -> MemoryReading | None:
        """Find the reading with the least room among the group and its parents, or None without any limit."""
        readings = [reading for group in self._groups() if (reading := _read_group(group)) is not None]
        return min(readings, key=lambda reading: reading.free, default=None)

    def kills(self) -> int | None:
        """Count the processes of this group that the kernel has ended for want of memory; None where it does not say.

        Those count, too, that a parent's limit or the whole machine's memory ended.
        """
        for group in self._groups():
            for name in ("memory.events", "memory.oom_control"):
                counters = _text(group / name)
                if counters is not None and any(line.startswith("oom_kill ") for line in counters.splitlines()):
                    return _field(counters, "oom_kill")
        return None

    def _groups(self) -> list[Path]:
        """Directories of this process's group and its parents, as far as they can be seen from here."""
        mounts: list[tuple[Path, str]] = []
        for line in (_text(self._proc / "self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                mounts.append((self._cgroup, path))
            elif "memory" in controllers.split(","):
                mounts.append((self._cgroup / "memory", path))
        groups: list[Path] = []
        for mount, path in mounts:
            # Inside a container the path may name the host's hierarchy; then only the mount itself exists.
            parts = [part for part in path.split("/") if part not in {"", "..", "."}]
            groups += [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        return groups


def _read_group(group: Path) -> MemoryReading | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(_text(group / limit_name))
        usage = _number(_text(group / usage_name))
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            # Pages of files that nobody uses are given back before anything is killed.
            return MemoryReading(limit=limit, used=max(0, usage - _field(_text(group / "memory.stat"), cache_name)))
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _field(stat: str | None, name: str) -> int:
    for line in (stat or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0
