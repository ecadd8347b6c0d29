"""A made-up ``/proc``: processes from a description, or from what was recorded of a real server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOOT = 1_700_000_000
TICKS = os.sysconf("SC_CLK_TCK")
SELF = 50
ALL = 0x1FFFFFFFFFF
"""Every capability, as root on a host has them."""
CONTAINER = 0xA80425FB
"""The 14 capabilities that a container of root gets unless configured."""
PTRACE = 1 << 19


@dataclass(frozen=True)
class MapLine:
    """One line of maps. ``device`` and ``inode`` as the kernel writes them."""

    path: str
    inode: int = 5
    device: str = "fe:00"

    @classmethod
    def of(cls, file: Path) -> MapLine:
        """A mapping of a file that is on the disk now."""
        status = file.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        return cls(str(file), status.st_ino, device)


@dataclass
class ProcTree:
    """A ``/proc`` below ``base``. The reader of it is process ``SELF``, root without capabilities unless told."""

    base: Path
    proc: Path = field(init=False)

    def __post_init__(self) -> None:
        self.proc = self.base / "proc"
        self.proc.mkdir(parents=True)
        (self.proc / "stat").write_text(f"cpu 1 2 3\nbtime {BOOT}\n")
        self.process(SELF, ["/opt/agent/bin/python", "-m", "sidecar"])
        (self.proc / "self").symlink_to(str(SELF))

    def process(
        self,
        pid: int,
        argv: Sequence[str] = (),
        *,
        parent: int = 1,
        name: str | None = None,
        state: str = "S",
        started: float = 10.0,
        threads: int = 1,
        resident_kib: int | None = 1000,
        uids: Sequence[int] = (0, 0, 0, 0),
        gids: Sequence[int] = (0, 0, 0, 0),
        capabilities: int = 0,
        bounding: int | None = None,
        environ: bytes = b"",
        maps: Iterable[MapLine | str] | None = (),
        namespace: str = "mnt:[1]",
        root: str = "/",
        cwd: str = "/",
        exe: str = "/usr/bin/python3.12",
        label: str = "",
    ) -> Path:
        """Add a process, ``started`` seconds after boot. ``name`` is cut as the kernel does; None: from the title.

        A zombie (state Z) has no command line, no maps and no memory. ``maps`` None: there is no such file.
        """
        folder = self.proc / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "fd").mkdir()
        (folder / "attr").mkdir()
        zombie = state == "Z"
        short = (name or (argv[0].rpartition("/")[2] if argv else "python"))[:15]
        (folder / "comm").write_text(short + "\n")
        (folder / "cmdline").write_bytes(b"" if zombie else b"".join(word.encode() + b"\0" for word in argv))
        # Fields 3 to 24 of proc_pid_stat(5): threads are field 20, the start is field 22.
        fields = [state, str(parent), *["0"] * 15, str(threads), "0", str(int(started * TICKS)), "0", "0"]
        (folder / "stat").write_text(f"{pid} ({short}) " + " ".join(fields) + "\n")
        lines = [f"Name:\t{short}", f"State:\t{state} (so)", f"Uid:\t{_tabbed(uids)}", f"Gid:\t{_tabbed(gids)}"]
        if resident_kib is not None and not zombie:
            lines.append(f"VmRSS:\t{resident_kib:8d} kB")
        bounding = capabilities if bounding is None else bounding
        lines += [f"CapPrm:\t{capabilities:016x}", f"CapEff:\t{capabilities:016x}", f"CapBnd:\t{bounding:016x}"]
        (folder / "status").write_text("\n".join(lines) + "\n")
        (folder / "environ").write_bytes(b"" if zombie else environ)
        if maps is not None:
            (folder / "maps").write_text("" if zombie else "".join(map(_line, maps)))
        (folder / "ns" / "mnt").symlink_to(namespace)
        for link, target in (("root", root), ("cwd", cwd), ("exe", exe)):
            if not zombie:
                (folder / link).symlink_to(target)
        (folder / "attr" / "current").write_text(label)
        (folder / "uid_map").write_text("         0          0 4294967295\n")
        return folder

    def recorded(self, capture: Path) -> int:
        """The processes that a capture's ``processes.json`` tells of; the main one's pid."""
        recorded = json.loads((capture / "processes.json").read_text())
        everywhere = recorded.get("mapped_objects_in_every_process", ())
        main = 0
        for one in recorded["processes"]:
            argv, main = _argv(one, recorded), main or one["pid"]
            maps = [MapLine(path if path.startswith("/") else f"/srv/{path}") for path in one.get("maps", everywhere)]
            renamed = argv[0].startswith("sglang::")
            self.process(
                one["pid"],
                argv,
                parent=one["ppid"],
                name=one.get("comm"),
                resident_kib=one.get("rss_kib", 1000),
                environ=bytes(100) if renamed else b"LANG=C\0",
                maps=maps,
                exe=one.get("exe", "/usr/bin/python3.12"),
            )
        return main


def _argv(one: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    if "cmdline" in one:
        return list(one["cmdline"])
    if "argv" in one:
        return list(one["argv"])
    if one["role"] == "main":
        return [one["argv0"], *recorded["launch"][1:]]
    title = re.match(r"sglang::\w+", one.get("argv_as_read", f"sglang::{one['role']}"))
    assert title is not None
    return [title[0] + " " * 40]


def _tabbed(numbers: Sequence[int]) -> str:
    return "\t".join(map(str, numbers))


def _line(one: MapLine | str) -> str:
    if isinstance(one, str):
        return one + "\n"
    return f"7f0000000000-7f0000001000 r-xp 00000000 {one.device} {one.inode} {' ' * 20}{one.path}\n"
