"""Control groups: files that look like one, and real ones of this machine for the limits that only the kernel has."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from sidecar.memory import MemoryLimit

MIB = 1024 * 1024


class Cgroup:
    """A fake control group, version 1 or 2, under a fake /proc."""

    def __init__(self, root: Path, version: int, limit: str, used: int, cache: int = 0) -> None:
        self.version = version
        self.proc = root / "proc"
        self.mount = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        line = "0::/pod/box\n" if version == 2 else "11:cpu:/\n4:memory:/pod/box\n0::/\n"
        (self.proc / "self/cgroup").write_text(line)
        self.group = self.mount / ("pod/box" if version == 2 else "memory/pod/box")
        self.group.mkdir(parents=True)
        names = ("memory.max", "inactive_file") if version == 2 else ("memory.limit_in_bytes", "total_inactive_file")
        (self.group / names[0]).write_text(f"{limit}\n")
        (self.group / "memory.stat").write_text(f"anon 1\n{names[1]} {cache}\n")
        self.use(used)

    def use(self, used: int) -> None:
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        (self.group / name).write_text(f"{used}\n")

    def limit(self) -> MemoryLimit:
        return MemoryLimit(proc=self.proc, cgroup=self.mount)


class RealGroup:
    """A control group that was made for a test, with one or more controllers of version 1."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def set(self, name: str, value: int) -> None:
        """Write a setting such as ``memory.limit_in_bytes``."""
        (self.folders[name.partition(".")[0]] / name).write_text(str(value))

    def get(self, name: str) -> str:
        """Read one."""
        return (self.folders[name.partition(".")[0]] / name).read_text().strip()

    @property
    def procs(self) -> list[str]:
        """The files into which a process writes its number to join."""
        return [str(folder / "cgroup.procs") for folder in self.folders.values()]


@contextlib.contextmanager
def real_group(*controllers: str) -> Iterator[RealGroup | str]:
    """Make a group below this process's own; a sentence instead where that is not possible."""
    folders: dict[str, Path] = {}
    try:
        for controller in controllers:
            parent = _own_group(controller)
            if parent is None:
                yield f"this machine has no {controller} control group of version 1"
                return
            folder = parent / f"sidecar-test-{os.getpid()}"
            folder.mkdir()
            folders[controller] = folder
    except OSError as error:
        _remove(folders)
        yield f"control groups cannot be made here: {error.strerror}"
        return
    try:
        yield RealGroup(folders)
    finally:
        _remove(folders)


def _own_group(controller: str) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            mount = Path("/sys/fs/cgroup") / controller
            inside = mount / path.lstrip("/")
            return inside if inside.is_dir() else mount if (mount / "cgroup.procs").exists() else None
    return None


def _remove(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        for _ in range(100):
            # Its processes have just been ended; the kernel may still count them.
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
