"""Finding the server in made-up /proc trees, and one real process that belongs to somebody else."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar.config import Image, Settings
from sidecar.model import Placement, Processes, Scope, Standing, Target
from sidecar.target import PREFLIGHT, RUNNING, TargetFinder, stand
from tests.fakes.sglang import CAPTURES, MARKER

SELF = 50
BOOT = 1_700_000_000
TICKS = os.sysconf("SC_CLK_TCK")
MODULE = ("/srv/env/bin/python", "-m", "sglang.launch_server")
UNREAD = ("--config", "/etc/sglang.yaml")
"""Flags that leave the rest of them in a file which is not read."""
LOOPBACK, ANY, ANY6 = "0100007F:1F90", "00000000:1F90", f"{'0' * 32}:1F90"
"""Port 8080 on three addresses."""


@dataclass
class Machine:
    """A /proc tree and the files that go with it."""

    base: Path
    now: float = 0.0
    proc: Path = field(init=False)
    files: Path = field(init=False)

    def __post_init__(self) -> None:
        self.proc, self.files = self.base / "proc", self.base / "files"
        self.files.mkdir()
        self.proc.mkdir()
        (self.proc / "stat").write_text(f"cpu 1 2 3\nbtime {BOOT}\n")
        self.process(SELF, ("/opt/agent/bin/python", "/opt/agent/bin/sglang-sidecar", "serve"))
        (self.proc / "self").symlink_to(str(SELF))

    def process(
        self,
        pid: int,
        argv: Sequence[str],
        *,
        parent: int = 1,
        environ: dict[str, str] | bytes | None = None,
        namespaces: dict[str, str] | None = None,
        root: str = "/",
        cwd: str | None = None,
        exe: str = "/usr/bin/python3.12",
        maps: str = "",
        state: str = "S",
        uids: Sequence[int] | None = None,
        listens: Sequence[str] = (),
    ) -> None:
        """Add a process; ``listens`` holds the addresses, as the kernel writes them, on which it listens."""
        folder = self.proc / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in argv))
        numbers = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{pid} (py ) thon) {state} {parent} {numbers} {10 * TICKS} 0 0\n")
        if not isinstance(environ, bytes):
            environ = b"".join(f"{name}={value}\0".encode() for name, value in (environ or {}).items())
        (folder / "environ").write_bytes(environ)
        for name in ("mnt", "pid", "net"):
            (folder / "ns" / name).symlink_to((namespaces or {}).get(name, f"{name}:[1]"))
        (folder / "root").symlink_to(root)
        if cwd is not None:
            (folder / "cwd").symlink_to(cwd)
        (folder / "exe").symlink_to(exe)
        (folder / "maps").write_text(maps)
        if uids is not None:
            (folder / "status").write_text("Name:\tpy\nUid:\t" + "\t".join(map(str, uids)) + "\nGid:\t0\t0\t0\t0\n")
        (folder / "fd").mkdir()
        for number, inode in enumerate(range(1000 * pid, 1000 * pid + len(listens))):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
        (folder / "fd" / "9").symlink_to("pipe:[7]")
        (folder / "net").mkdir()
        rows = [f" 0: {address} 00000000:0000 0A 0:0 0:0 0 0 0 {1000 * pid + n} 1" for n, address in enumerate(listens)]
        # Somebody else's listener, and a connection of this process.
        rows += [
            " 1: 00000000:0016 00000000:0000 0A 0:0 0:0 0 0 0 1 1",
            f" 2: 0100007F:1F91 0:0 01 0:0 0:0 0 0 0 {pid}",
        ]
        for name, size in (("tcp", 8), ("tcp6", 32)):
            mine = [row for row in rows if len(row.split()[1].partition(":")[0]) == size]
            (folder / "net" / name).write_text("\n".join(["  sl  local_address ...", *mine]) + "\n")

    def python(self, path: str, *packages: str, base: Path | None = None) -> None:
        """Put an interpreter with installed packages where a path says, here or under another root."""
        program = (base or self.files) / path.lstrip("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        for package in packages:
            (program.parent.parent / "lib/python3.12/site-packages" / package).mkdir(parents=True, exist_ok=True)

    def time(self) -> float:
        return BOOT + self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def finder(
        self,
        settings: Settings | None = None,
        *,
        placement: Placement = Placement.CONTAINER,
        processes: Processes = Processes.SHARED,
        environ: dict[str, str] | None = None,
        prefix: str | None = None,
    ) -> TargetFinder:
        standing = Standing(placement=placement, placement_why="", processes=processes, processes_why="it is so")
        return TargetFinder(
            settings or Settings(),
            standing,
            self,
            proc=self.proc,
            environ=environ or {},
            prefix=prefix or str(self.files / "opt/sglang-sidecar"),
            filesystem=self.files,
        )

    async def find(self, settings: Settings | None = None, **more: object) -> Target:
        return await self.finder(settings, **more).find()  # type: ignore[arg-type]


@pytest.fixture(name="machine")
def _machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# -- a running server -------------------------------------------------------------------------------


async def test_a_server_in_our_namespaces_is_seen_whole(machine: Machine) -> None:
    """In the same mount and process namespaces the process gives interpreter, flags, environment and address."""
    argv = (*MODULE, "--port", "30111", "--tp", "2", "--api-key", MARKER)
    machine.process(100, argv, environ={"CUDA_VISIBLE_DEVICES": "3"})
    target = await machine.find()
    assert (target.pid, target.create_time) == (100, BOOT + 10)
    assert (target.scope, target.root) == (Scope.SERVER, None)
    assert (target.python, target.python_source) == ("/srv/env/bin/python", "argv0")
    assert (target.url, target.url_source) == ("http://127.0.0.1:30111", "command-line")
    assert (target.launch, target.launch_source) == ({"port": 30111, "tp_size": 2}, RUNNING)
    assert (target.environ, target.environ_missing) == ({"CUDA_VISIBLE_DEVICES": "3"}, None)
    assert MARKER not in repr(target)


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ([], "http://127.0.0.1:30000"),
        (["--host", "0.0.0.0"], "http://127.0.0.1:30000"),
        (["--host", "::"], "http://[::1]:30000"),
        (["--host", "10.1.2.3", "--port", "8000"], "http://10.1.2.3:8000"),
        (["--ssl-certfile", "/c.pem"], "https://127.0.0.1:30000"),
    ],
)
async def test_the_address_follows_the_flags(machine: Machine, flags: list[str], url: str) -> None:
    """Without a configured URL the server's own host, port and certificate flags make it."""
    machine.process(100, (*MODULE, *flags))
    assert (await machine.find()).url == url


async def test_a_configured_address_wins(machine: Machine) -> None:
    """A URL set by hand is used whatever the flags say."""
    machine.process(100, (*MODULE, "--port", "8000"))
    settings = Settings(server_url="http://proxy:80", server_pid=100, explicit=frozenset({"server_url"}))
    target = await machine.find(settings)
    assert (target.url, target.url_source, target.pid) == ("http://proxy:80", "setting", 100)


PINNED: dict[str, Any] = {"server_url": "http://127.0.0.1:30000", "explicit": frozenset({"server_url"})}


@pytest.mark.parametrize(
    ("flags", "listens", "pid"),
    [
        (("--port", "30001"), (), None),
        (UNREAD, (ANY,), None),
        (UNREAD, (), 100),
        (("--port", "30000"), (), 100),
        ((), (), 100),
    ],
    ids=["flags-elsewhere", "socket-elsewhere", "may-be-it", "flags", "default"],
)
async def test_an_address_is_not_paired_with_another_server(
    machine: Machine, flags: Sequence[str], listens: Sequence[str], pid: int | None
) -> None:
    """A visible server that cannot be at the configured port is not taken for the one that answers there, or did."""
    machine.process(100, (*MODULE, *flags), listens=listens)
    target = await machine.find(Settings(**PINNED))
    assert (target.pid, target.url, target.candidates) == (pid, "http://127.0.0.1:30000", ())
    if pid is None:
        assert (
            "No visible SGLang server is at the port of server_url (30000): process 100 serves elsewhere" in target.why
        )
        assert (target.launch_source, target.environ) == (None, None)


@pytest.mark.parametrize(("network", "pid"), [("net:[1]", None), ("net:[2]", 100)])
async def test_a_pattern_names_a_server_behind_a_mapped_port(machine: Machine, network: str, pid: int | None) -> None:
    """The port of a container may be mapped to another one here; among our own sockets a port is what it is."""
    machine.process(100, (*MODULE, "--port", "8000"), namespaces={"net": network})
    assert (await machine.find(Settings(**PINNED))).pid is None
    assert (await machine.find(Settings(**PINNED, server_pattern="launch_server"))).pid == pid


async def test_an_address_in_another_network_is_marked(machine: Machine) -> None:
    """A server in another network namespace has an address that here may be somebody else's."""
    machine.process(100, MODULE, namespaces={"net": "net:[2]"})
    assert (await machine.find()).url_source == "command-line-other-network"


@pytest.mark.parametrize(
    ("argv", "listens", "url"),
    [
        ((*MODULE, *UNREAD), [LOOPBACK], "http://127.0.0.1:8080"),
        ((*MODULE, *UNREAD), [ANY], "http://127.0.0.1:8080"),
        ((*MODULE, *UNREAD), [ANY6], "http://[::1]:8080"),
        ((*MODULE, *UNREAD), [ANY, ANY6], "http://127.0.0.1:8080"),
        ((*MODULE, *UNREAD), ["0301010A:1F90"], "http://10.1.1.3:8080"),
        ((*MODULE, *UNREAD, "--port", "8080"), [ANY, "00000000:2345"], "http://127.0.0.1:8080"),
        (("sglang::http_server/tokenizer_manager   ", ""), [ANY], "http://127.0.0.1:8080"),
        (("/srv/env/bin/python", "my_engine.py", "--port", "1"), [ANY], "http://127.0.0.1:8080"),
    ],
)
async def test_a_port_that_no_flag_tells_is_seen_where_the_process_listens(
    machine: Machine, argv: Sequence[str], listens: list[str], url: str
) -> None:
    """Flags in a file, a renamed process, an embedded engine: the one port that it listens on is its address."""
    machine.process(100, argv, listens=listens)
    target = await machine.find(Settings(server_pid=100))
    assert (target.url, target.url_source) == (url, "listening-socket")


@pytest.mark.parametrize(
    ("argv", "listens", "url", "source"),
    [
        ((*MODULE, *UNREAD), [], "http://127.0.0.1:30000", "command-line-incomplete"),
        ((*MODULE, *UNREAD), [ANY, "00000000:2345"], "http://127.0.0.1:30000", "command-line-incomplete"),
        ((*MODULE, *UNREAD, "--port", "9000"), [ANY], "http://127.0.0.1:9000", "command-line-incomplete"),
        ((*MODULE, *UNREAD, "--host", "10.1.1.3"), [], "http://10.1.1.3:30000", "command-line-incomplete"),
        ((*MODULE, "--host", "x@elsewhere/?"), [], "http://127.0.0.1:30000", "command-line-incomplete"),
        ((*MODULE, "--port", "0"), [], "http://127.0.0.1:30000", "command-line-incomplete"),
        (("sglang::http_server/tokenizer_manager   ", ""), [], "http://127.0.0.1:30000", "default"),
        (("/srv/env/bin/python", "my_engine.py", "--port", "1"), [], "http://127.0.0.1:30000", "default"),
    ],
)
async def test_an_address_that_nothing_tells_is_marked_as_a_guess(
    machine: Machine, argv: Sequence[str], listens: list[str], url: str, source: str
) -> None:
    """Where neither flags nor sockets settle host and port, the address is tried, and says that it is a guess."""
    machine.process(100, argv, listens=listens)
    target = await machine.find(Settings(server_pid=100))
    assert (target.url, target.url_source) == (url, source)


@pytest.mark.parametrize("flags", [("--port", "8080", "--host", "0.0.0.0"), (*UNREAD, "--port", "1", "--host", "h")])
async def test_an_address_in_the_flags_needs_no_socket(machine: Machine, flags: tuple[str, ...]) -> None:
    """Host and port on the command line are the address, whatever else the process listens on."""
    machine.process(100, (*MODULE, *flags), listens=["00000000:2345"])
    assert (await machine.find()).url_source == "command-line"


async def test_sockets_in_another_network_are_not_ours(machine: Machine) -> None:
    """The port on which a server listens in another network namespace is not reached here."""
    machine.process(100, (*MODULE, *UNREAD), listens=[ANY], namespaces={"net": "net:[2]"})
    assert (await machine.find()).url_source == "command-line-incomplete"


async def test_sockets_that_may_not_be_read_leave_a_guess(machine: Machine) -> None:
    """Without the right to see a process's file descriptors its address is a guess."""
    machine.process(100, (*MODULE, *UNREAD), listens=[ANY])
    for link in (machine.proc / "100/fd").iterdir():
        link.unlink()
    (machine.proc / "100/fd").rmdir()
    assert (await machine.find()).url_source == "command-line-incomplete"


@pytest.mark.parametrize(
    ("uids", "uid"),
    [((1000,) * 4, 1000), ((0,) * 4, 0), ((1000, 0, 0, 0), None), ((0, 0, 1000, 0), None), (None, None)],
)
async def test_a_process_has_a_user_only_where_all_its_ids_agree(
    machine: Machine, uids: tuple[int, ...] | None, uid: int | None
) -> None:
    """A set-uid program runs as root with a command line that another user chose: it is not root's."""
    machine.process(100, MODULE, uids=uids)
    assert (await machine.find()).uid == uid


async def test_recorded_processes_lead_to_their_main_one(machine: Machine) -> None:
    """Of a real server's processes only the main one is the server, although its children are renamed.

    sgl-project/sglang#9952: children show a title in place of their command line.
    """
    recorded = json.loads((CAPTURES / "0.5.16-h200-fa4-fa3-hybrid" / "processes.json").read_text())
    for process in recorded["processes"]:
        machine.process(process["pid"], process["cmdline"], parent=process["ppid"])
    target = await machine.find()
    assert (target.pid, target.candidates) == (1054, ())


async def test_a_child_about_to_become_another_program_is_no_second_server(machine: Machine) -> None:
    """Between fork and exec a child shows its parent's command line; the parent is the server."""
    machine.process(100, MODULE)
    machine.process(101, MODULE, parent=100)
    machine.process(102, MODULE, parent=101)
    assert (await machine.find()).pid == 100


async def test_a_shell_around_the_server_and_a_zombie_are_no_servers(machine: Machine) -> None:
    """The shell that started the server carries its command line too, and a zombie is dead."""
    machine.process(90, ("sh", "-c", "python -m sglang.launch_server; true"))
    machine.process(91, MODULE, state="Z")
    machine.process(100, MODULE, parent=90)
    target = await machine.find()
    assert (target.pid, target.candidates) == (100, ())


async def test_several_servers_are_listed_and_none_is_chosen(machine: Machine) -> None:
    """Two servers without a choice are shown as candidates instead of one picked at random.

    sgl-project/sglang#10351
    """
    machine.process(100, (*MODULE, "--port", "30001"))
    machine.process(200, (*MODULE, "--port", "30002"))
    target = await machine.find()
    assert (target.pid, target.candidates) == (None, (100, 200))
    assert "100, 200" in target.why


@pytest.mark.parametrize(
    "settings",
    [
        Settings(server_pid=200),
        Settings(server_url="http://127.0.0.1:30002", explicit=frozenset({"server_url"})),
        Settings(server_url="http://127.0.0.1:8080", explicit=frozenset({"server_url"})),
        Settings(server_pattern="port 30002"),
    ],
    ids=["pid", "url", "socket", "pattern"],
)
async def test_one_of_several_servers_is_chosen_by_hand(machine: Machine, settings: Settings) -> None:
    """server_pid, the port of server_url and server_pattern each choose among several servers."""
    machine.process(100, (*MODULE, "--port", "30001"))
    machine.process(200, (*MODULE, *(UNREAD if "8080" in settings.server_url else ("--port", "30002"))), listens=[ANY])
    assert (await machine.find(settings)).pid == 200


async def test_a_guessed_port_chooses_no_server(machine: Machine) -> None:
    """Of two servers whose port is in a file, none is taken for the one at SGLang's default port."""
    machine.process(100, (*MODULE, *UNREAD))
    machine.process(200, (*MODULE, "--port", "30002"))
    machine.process(300, (*MODULE, *UNREAD))
    settings = Settings(server_url="http://127.0.0.1:30000", explicit=frozenset({"server_url"}))
    found = await machine.find(settings)
    assert (found.pid, found.candidates) == (None, (100, 300))


async def test_a_pattern_finds_an_embedded_engine(machine: Machine) -> None:
    """A program that embeds the engine is found by server_pattern, but its flags and address are not presumed."""
    machine.process(100, ("/srv/env/bin/python", "my_engine.py", "--port", "1"))
    machine.process(101, ("sglang::scheduler my_engine", "", ""), parent=100)
    target = await machine.find(Settings(server_pattern=r"my_engine"))
    assert (target.pid, target.url, target.url_source) == (100, "http://127.0.0.1:30000", "default")
    assert target.launch["incomplete"] is True


async def test_a_pid_that_is_gone_is_said_so(machine: Machine) -> None:
    """A server_pid without a process chooses nothing, also when another server runs."""
    machine.process(100, MODULE)
    target = await machine.find(Settings(server_pid=7))
    assert target.pid is None
    assert "server_pid is 7" in target.why


async def test_an_overwritten_environment_is_unknown(machine: Machine) -> None:
    """An environment that reads back as NULs was overwritten by setproctitle; it is not an empty one.

    dvarrazzo/py-setproctitle#17
    """
    machine.process(100, MODULE, environ=bytes(500))
    target = await machine.find()
    assert (target.environ, target.environ_missing) == (None, "environ-overwritten")


async def test_the_renamed_main_process_of_an_old_release_is_found(machine: Machine) -> None:
    """SGLang 0.5.2 renames its main process: no flags are known of it, its environment comes from what it mapped."""
    maps = "7f00-7f01 r-xp 00000000 00:01 5 /srv/env/lib/python3.10/site-packages/sgl_kernel/x.so\n"
    machine.python("/srv/env/bin/python3")
    base = str(machine.files)
    maps = maps.replace("/srv/env", f"{base}/srv/env")
    machine.process(100, ("sglang::http_server/tokenizer_manager   ", ""), environ=bytes(90), maps=maps)
    target = await machine.find()
    assert (target.pid, target.launch_source, target.launch) == (100, None, {})
    assert (target.python, target.python_source) == (f"{base}/srv/env/bin/python3", "maps")
    assert target.url_source == "default"


# -- its interpreter --------------------------------------------------------------------------------


async def test_a_relative_interpreter_is_looked_up_on_the_servers_own_path(machine: Machine) -> None:
    """`python3` means the first one on the server's PATH, not the base interpreter behind the exe link.

    sgl-project/sglang#30612: the exe link of a virtual environment's interpreter shows /usr/bin/python3.
    """
    folder = machine.files / "v/bin"
    machine.python("/v/bin/python3")
    machine.process(100, ("python3", *MODULE[1:]), environ={"PATH": f"/nowhere:{folder}"})
    target = await machine.find()
    assert (target.python, target.python_source) == (f"{folder}/python3", "server-path")


async def test_a_virtual_environment_is_taken_from_its_variable(machine: Machine) -> None:
    """With no usable program name and no PATH, VIRTUAL_ENV names the environment."""
    machine.python("/v/bin/python")
    machine.process(100, ("python3", *MODULE[1:]), environ={"VIRTUAL_ENV": str(machine.files / "v")})
    target = await machine.find()
    assert (target.python, target.python_source) == (str(machine.files / "v/bin/python"), "virtual-env")


async def test_the_exe_link_is_the_last_resort(machine: Machine) -> None:
    """When nothing else names an interpreter the exe link does, and says so."""
    machine.process(100, ("python3", *MODULE[1:]))
    target = await machine.find()
    assert (target.python, target.python_source) == ("/usr/bin/python3.12", "exe")


async def test_the_interpreter_set_by_hand_wins_even_if_it_does_not_exist(machine: Machine) -> None:
    """A configured interpreter is kept as it is: the probe that uses it has the better error."""
    machine.process(100, MODULE)
    target = await machine.find(Settings(server_python="/no/such/python"))
    assert (target.python, target.python_source, target.scope) == ("/no/such/python", "setting", Scope.SERVER)


@pytest.mark.parametrize("program", ["bin/python", "./bin/python"])
async def test_an_interpreter_named_from_the_working_folder_is_found_there(machine: Machine, program: str) -> None:
    """A relative path of the interpreter counts from the folder in which the server was started."""
    machine.process(100, (program, *MODULE[1:]), cwd="/srv/env")
    target = await machine.find()
    assert (target.python, target.python_source) == ("/srv/env/bin/python", "argv0")


@pytest.mark.parametrize(
    ("argv", "environ", "first"),
    [
        (("python3", "-m", "sglang.launch_server"), {}, True),
        (("python3", "-Bum", "sglang.launch_server"), {}, True),
        (("python3", "-X", "dev", "-m", "sglang.launch_server"), {}, True),
        (("python3", "-W", "ignore", "-msglang.launch_server"), {}, True),
        (("python3", "-Im", "sglang.launch_server"), {}, False),
        (("python3", "-P", "-m", "sglang.launch_server"), {}, False),
        (("python3", "-m", "sglang.launch_server"), {"PYTHONSAFEPATH": "1"}, False),
        (("/v/bin/python", "/v/bin/sglang", "serve"), {}, False),
        (("python3", "/src/sglang/launch_server.py"), {}, False),
    ],
)
async def test_the_working_folder_is_imported_from_where_python_does(
    machine: Machine, argv: tuple[str, ...], environ: dict[str, str], first: bool
) -> None:
    """`python -m` imports from the working folder before all else; a script and the safe-path options do not."""
    machine.process(100, argv, environ=environ, cwd="/srv/dir")
    target = await machine.find()
    assert (target.cwd, target.cwd_on_path) == ("/srv/dir", first)


@pytest.mark.parametrize(
    ("argv", "flags", "first"),
    [
        (("python3", "-s", "-E", "-m", "sglang.launch_server"), ("-s", "-E"), True),
        (("python3", "-ISm", "sglang.launch_server"), ("-I", "-S"), False),
        (("/v/bin/python", "-P", "/v/bin/sglang", "serve", "-E"), ("-P",), False),
    ],
)
async def test_the_interpreters_flags_are_kept(
    machine: Machine, argv: tuple[str, ...], flags: tuple[str, ...], first: bool
) -> None:
    """What was given to the interpreter, and not to what it runs, is kept; -E makes it ignore PYTHONSAFEPATH."""
    machine.process(100, argv, environ={"PYTHONSAFEPATH": "1"}, cwd="/srv/dir")
    target = await machine.find()
    assert (target.python_flags, target.cwd_on_path) == (flags, first)


async def test_a_launch_to_come_has_flags_of_its_interpreter(machine: Machine) -> None:
    """Flags of the interpreter in a launch command are kept, also behind what sets variables for it."""
    launch = ("env", "X=1", "python3", "-sI", "-m", "sglang.launch_server")
    target = await machine.find(Settings(launch=launch))
    assert (target.python_flags, target.cwd_on_path) == (("-s", "-I"), False)


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (("/opt/venv/bin/sglang", "serve"), "/opt/venv/bin/sglang"),
        (("-s", "sglang/launch_server.py"), "/srv/dir/sglang/launch_server.py"),
        (("-I", "sglang/launch_server.py"), None),
        (MODULE[1:], None),
    ],
)
async def test_the_script_is_known(machine: Machine, words: tuple[str, ...], script: str | None) -> None:
    """Python puts the folder of the script that it runs in front of its import path, and no folder with -I."""
    machine.process(100, (MODULE[0], *words), cwd="/srv/dir")
    assert (await machine.find()).script == script


@pytest.mark.parametrize(
    ("cwd", "root", "expected"),
    [
        ("/data", "/", "/data"),
        ("/", "/", "/"),
        ("/chroot/srv/data", "/chroot/srv", "/data"),
        ("/chroot/srv", "/chroot/srv", "/"),
        ("/outside", "/chroot/srv", None),
        ("/data (deleted)", "/", None),
    ],
)
async def test_the_working_folder_is_named_as_the_server_names_it(
    machine: Machine, cwd: str, root: str, expected: str | None
) -> None:
    """Below another root the folder is told relative to that root; one that is outside of it or gone is not known."""
    machine.process(100, MODULE, cwd=cwd, root=root)
    assert (await machine.find()).cwd == expected


@pytest.mark.parametrize(
    "argv",
    [
        ("python3", "-m", "sglang_router.launch_router", "--port", "30000"),
        ("python3", "-m", "sglang_router.launch_server", "--port", "30000"),
        ("python3", "-m", "sglang.bench_serving", "--backend", "sglang"),
        ("python3", "-m", "sglang.bench_one_batch"),
        ("python3", "-m", "sglang.check_env"),
        ("/v/bin/python", "/v/bin/sglang", "generate"),
        ("sglang::scheduler_TP0", ""),
        ("vim", "sglang.launch_server"),
    ],
)
async def test_what_only_sounds_like_a_server_is_none(machine: Machine, argv: tuple[str, ...]) -> None:
    """Routers, benchmarks, other commands and orphaned workers are no servers (sgl-project/sglang#10351)."""
    machine.process(100, argv)
    target = await machine.find()
    assert (target.pid, target.candidates) == (None, ())


async def test_a_pattern_looks_at_the_start_of_a_long_command_line(machine: Machine) -> None:
    """server_pattern is held against the first 1024 characters: a search cannot be interrupted."""
    machine.process(100, (*MODULE, "--model-path", "m" * 900, "--early"))
    assert (await machine.find(Settings(server_pattern="--early"))).pid == 100
    machine.process(200, (*MODULE, "--model-path", "m" * 1100, "--late"))
    assert (await machine.find(Settings(server_pattern="--late"))).pid is None


async def test_a_clock_that_is_adjusted_makes_no_new_process(machine: Machine) -> None:
    """The time of boot moves by a second when the clock is adjusted; the same process keeps its start."""
    machine.process(100, MODULE)
    finder = machine.finder()
    starts = []
    for moved in (0, 1, 3600):
        (machine.proc / "stat").write_text(f"cpu 1 2 3\nbtime {BOOT + moved}\n")
        machine.now += 10
        starts.append((await finder.find()).create_time)
    assert starts == [BOOT + 10, BOOT + 10, BOOT + 3610]


async def test_a_chosen_process_that_has_ended_is_said_to_be_a_zombie(machine: Machine) -> None:
    """A server_pid that names a zombie is told from one that does not exist."""
    machine.process(100, MODULE, state="Z")
    target = await machine.find(Settings(server_pid=100))
    assert target.pid is None
    assert "has ended" in target.why


# -- a server in another container ------------------------------------------------------------------


def foreign(machine: Machine, **more: str) -> Path:
    """A server in another mount namespace whose root can be entered."""
    root = machine.base / "foreign"
    machine.python("/srv/env/bin/python", "sglang", base=root)
    namespaces = {"mnt": "mnt:[2]", "pid": "pid:[1]"} | more
    machine.process(100, MODULE, namespaces=namespaces, root=str(root))
    return root


async def test_another_containers_files_are_read_through_its_root(machine: Machine) -> None:
    """A server in another mount namespace is read through its root, with its own path of the interpreter."""
    foreign(machine)
    target = await machine.find()
    assert (target.root, target.scope) == (str(machine.proc / "100/root"), Scope.SERVER)
    assert target.python == "/srv/env/bin/python"


@pytest.mark.parametrize(
    ("argv0", "more", "found"),
    [
        ("/srv/env/bin/python", {}, ("/srv/env/bin/python", "argv0")),
        (
            "python3",
            {"maps": "7f00-7f01 r-xp 0 00:01 5 /srv/env/lib/python3.10/site-packages/torch/x.so\n"},
            ("/srv/env/bin/python3", "maps"),
        ),
        (
            "python3",
            {"environ": {"VIRTUAL_ENV": "/v", "PATH": "/v/bin:/usr/bin"}},
            ("/v/bin/python", "virtual-env"),
        ),
        ("python3", {"environ": {"VIRTUAL_ENV": "/v"}}, ("/v/bin/python", "virtual-env")),
        ("python3", {"environ": {"VIRTUAL_ENV": "/v", "PATH": "/usr/bin"}}, ("/usr/bin/python3.12", "exe")),
        ("python3", {"environ": {"PATH": "/conda/bin:/usr/bin"}, "exe": "/conda/bin/python3.11"}, None),
        ("python3", {"environ": {"PATH": "/v/bin:/usr/bin"}}, (None, "left-to-reader")),
        ("python3", {}, (None, "left-to-reader")),
    ],
)
async def test_nothing_below_a_foreign_root_is_looked_at_here(
    machine: Machine, argv0: str, more: dict[str, Any], found: tuple[str | None, str] | None
) -> None:
    """Names settle the interpreter or the reader has to: a path in there may block, or lead out of that root.

    The root leads nowhere: whoever looked below it would find nothing.
    """
    namespaces = {"mnt": "mnt:[2]"}
    machine.process(100, (argv0, *MODULE[1:]), namespaces=namespaces, root=str(machine.base / "gone"), **more)
    target = await machine.find()
    assert (target.root, target.scope) == (str(machine.proc / "100/root"), Scope.SERVER)
    assert (target.python, target.python_source) == (found or ("/conda/bin/python3.11", "exe"))


async def test_in_the_same_image_the_servers_search_path_finds_its_interpreter(machine: Machine) -> None:
    """`python3` of a server in the same image is the first one on its PATH that this image has."""
    namespaces = {"mnt": "mnt:[2]"}
    machine.process(
        100, ("python3", *MODULE[1:]), namespaces=namespaces, root="/", environ={"PATH": "/none:/srv/env/bin:/usr/bin"}
    )
    machine.python("/usr/bin/python3", "sglang")
    machine.python("/srv/env/bin/python3", "sglang")
    target = await machine.find()
    assert (target.root, target.scope, target.python) == (None, Scope.IMAGE, "/srv/env/bin/python3")


async def test_the_same_image_allows_its_interpreter_to_be_used(machine: Machine) -> None:
    """When our own image has the server's interpreter and packages at the same path, they are used as image facts."""
    foreign(machine)
    machine.python("/srv/env/bin/python", "sglang")
    target = await machine.find()
    assert (target.root, target.scope, target.python) == (None, Scope.IMAGE, "/srv/env/bin/python")


@pytest.mark.parametrize(
    ("settings", "placement"),
    [(Settings(image=Image.OWN), Placement.CONTAINER), (Settings(), Placement.HOST)],
    ids=["own-image", "host"],
)
async def test_an_equal_path_is_not_trusted_where_images_differ(
    machine: Machine, settings: Settings, placement: Placement
) -> None:
    """On a host, or in an image declared as our own, an interpreter at the same path is another one."""
    foreign(machine)
    machine.python("/srv/env/bin/python", "sglang")
    target = await machine.find(settings, placement=placement)
    assert (target.root, target.scope) == (str(machine.proc / "100/root"), Scope.SERVER)


def test_an_unreadable_process_leaves_its_environment_unknown() -> None:
    """A process of another user gives its flags, but its environment and files are unknown, and it is said why.

    BishopFox/badPods#11, moby/moby#40713
    """
    if os.getuid() != 0:
        pytest.skip("only root can become the other user that this needs")
    argv = [sys.executable, "-c", "print('up', flush=True); input()"]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"TOKEN": MARKER})
    look = (
        "import asyncio, json, os, time\n"
        "from sidecar.config import Settings\n"
        "from sidecar.model import Placement, Processes, Standing\n"
        "from sidecar.target import TargetFinder\n"
        "s = Standing(placement=Placement.HOST, placement_why='', processes=Processes.SHARED, processes_why='')\n"
        f"f = TargetFinder(Settings(server_pid={server.pid}), s, time, environ={{}})\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "t = asyncio.run(f.find())\n"
        "print(json.dumps([t.pid, t.environ, t.environ_missing, t.root, t.scope, t.why]))\n"
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        found = subprocess.run(
            [sys.executable, "-c", look],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert found.returncode == 0, found.stderr
        pid, environ, missing, root, scope, why = json.loads(found.stdout)
        assert (pid, environ, missing, root, scope) == (server.pid, None, "other-user", None, "self")
        assert "may not be read: the server runs as another user" in why
    finally:
        server.kill()
        server.communicate()


# -- no server in sight -----------------------------------------------------------------------------


async def test_a_server_that_is_seen_counts_although_others_may_be_hidden(machine: Machine) -> None:
    """Not every process being visible does not make less of the one that is."""
    machine.process(100, MODULE)
    target = await machine.find(processes=Processes.HIDDEN)
    assert (target.pid, target.url_source) == (100, "command-line")


async def test_processes_said_to_be_hidden_are_not_searched(machine: Machine) -> None:
    """A configuration that says that the processes are hidden is obeyed."""
    machine.process(100, MODULE)
    target = await machine.find(Settings(processes=Processes.HIDDEN), processes=Processes.HIDDEN)
    assert (target.pid, target.environ_missing) == (None, "processes-hidden")


async def test_hidden_processes_are_said_to_be(machine: Machine) -> None:
    """Where no server is seen and its processes may be hidden, the reason is said.

    joe-elliott/netcore-kubernetes-profiling#2
    """
    target = await machine.find(processes=Processes.HIDDEN)
    assert (target.pid, target.environ_missing, target.scope) == (None, "processes-hidden", Scope.SELF)
    assert "hidden: it is so" in target.why


@pytest.mark.parametrize(
    ("path", "package", "source"),
    [
        ("/opt/sglang/bin/python", "sglang", "well-known-path"),
        ("/opt/venv/bin/python", "flashinfer_python-0.6.4.dist-info", "well-known-path"),
        ("/opt/conda/bin/python", "__editable__.sglang-0.5.16.pth", "conda"),
        ("/srv/tools/bin/python3", "__editable___sglang_0_5_16_finder.py", "path"),
        ("/usr/bin/python3", "sglang-0.5.16.dist-info", "well-known-path"),
    ],
)
async def test_an_interpreter_of_the_image_is_found_by_its_packages(
    machine: Machine, path: str, package: str, source: str
) -> None:
    """Without a process, an interpreter that has SGLang or FlashInfer beside it gives image facts, however installed.

    sgl-project/sglang#4812: the right interpreter is not always /usr/bin/python3.
    """
    machine.python("/opt/venv/bin/python")
    machine.python(path, package)
    target = await machine.find(environ={"PATH": "/srv/tools/bin"})
    assert (target.python, target.python_source, target.scope) == (path, source, Scope.IMAGE)


async def test_debian_keeps_packages_of_the_system_interpreter_under_local(machine: Machine) -> None:
    """What pip installs for /usr/bin/python3 lies in /usr/local/lib/python3.x/dist-packages."""
    machine.python("/usr/bin/python3")
    (machine.files / "usr/local/lib/python3.12/dist-packages/sglang").mkdir(parents=True)
    assert (await machine.find()).python == "/usr/bin/python3"


async def test_packages_with_similar_names_do_not_count(machine: Machine) -> None:
    """sglang_router, sglang-sidecar or flashinfer-bench do not make an interpreter the server's."""
    machine.python("/opt/venv/bin/python", "sglang_router", "sglang_sidecar-0.1.0.dist-info", "sglangx", "sidecar")
    assert (await machine.find()).python is None


async def test_the_agents_own_interpreter_counts_only_with_sglang_in_it(machine: Machine) -> None:
    """The agent's own environment is never the server's, unless SGLang itself is installed in it."""
    prefix = str(machine.files / "opt/sglang-sidecar")
    machine.python("/opt/sglang-sidecar/bin/python", "flashinfer")
    before = await machine.find(prefix=prefix)
    machine.python("/opt/sglang-sidecar/bin/python", "sglang")
    after = await machine.find(prefix=prefix)
    assert (before.python, before.scope) == (None, Scope.SELF)
    assert (after.python, after.python_source) == ("/opt/sglang-sidecar/bin/python", "own-environment")


async def test_an_own_image_is_not_searched(machine: Machine) -> None:
    """In an image declared as the agent's own no interpreter is the server's."""
    machine.python("/opt/venv/bin/python", "sglang")
    assert (await machine.find(Settings(image=Image.OWN))).scope is Scope.SELF


async def test_a_root_set_by_hand_is_read_without_a_process(machine: Machine) -> None:
    """server_root alone gives image facts from that folder."""
    target = await machine.find(Settings(server_root="/mnt/image"))
    assert (target.root, target.scope) == ("/mnt/image", Scope.IMAGE)


# -- a launch before it happens ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ((), {"HOME": "/h", "CUDA_HOME": "/c"}),
        (("env", "-u", "CUDA_HOME"), {"HOME": "/h"}),
        (("env", "-i", "PATH=/b"), {"PATH": "/b"}),
        (("env", "CUDA_HOME=/d"), {"HOME": "/h", "CUDA_HOME": "/d"}),
    ],
)
async def test_a_preflight_has_the_environment_that_the_command_leaves(
    machine: Machine, around: tuple[str, ...], expected: dict[str, str]
) -> None:
    """What `env -u` and `env -i` take away does not reach the server."""
    settings = Settings(launch=(*around, "python", "-m", "sglang.launch_server"))
    target = await machine.find(settings, environ={"HOME": "/h", "CUDA_HOME": "/c"})
    assert target.environ == expected


async def test_a_preflight_judges_the_given_launch(machine: Machine) -> None:
    """In a preflight the flags and assignments of the command count, not a server that happens to run."""
    machine.process(100, MODULE)
    launch = ("env", "SGLANG_IS_FLASHINFER_AVAILABLE=false", "/v/bin/python", "-m", "sglang.launch_server", "--tp", "2")
    target = await machine.find(Settings(launch=launch), environ={"HOME": "/root"})
    assert (target.pid, target.launch, target.launch_source) == (None, {"tp_size": 2}, PREFLIGHT)
    assert target.environ == {"HOME": "/root", "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
    assert (target.python, target.python_source, target.scope) == ("/v/bin/python", "launch-command", Scope.SERVER)


@pytest.mark.parametrize("program", ["python3", "sglang"])
async def test_a_preflight_resolves_the_command_on_its_path(machine: Machine, program: str) -> None:
    """`python3 -m ...` and `sglang serve` lead to the interpreter that would run them, without running anything."""
    machine.python("/v/bin/python3")
    folder = machine.files / "v/bin"
    (folder / "sglang").write_text(f"#!{folder}/python3\n")
    (folder / "sglang").chmod(0o755)
    rest = ("serve",) if program == "sglang" else ("-m", "sglang.launch_server")
    target = await machine.find(Settings(launch=(program, *rest)), environ={"PATH": str(folder)})
    assert target.python == f"{folder}/python3"


@pytest.mark.parametrize(
    "lines",
    [
        "#!/usr/bin/env python3\n",
        '#!/bin/sh\n\'\'\'exec\' "{python}" "$0" "$@"\n',
        "#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n",
    ],
    ids=["env", "long-path-quoted", "long-path"],
)
async def test_a_console_script_names_its_interpreter_in_three_ways(machine: Machine, lines: str) -> None:
    """Through env, and through a shell where the path is too long for a first line, the interpreter is found too."""
    machine.python("/v/bin/python3")
    folder = machine.files / "v/bin"
    (folder / "sglang").write_text(lines.format(python=folder / "python3"))
    (folder / "sglang").chmod(0o755)
    target = await machine.find(Settings(launch=("sglang", "serve")), environ={"PATH": str(folder)})
    assert (target.python, target.python_source) == (f"{folder}/python3", "launch-command")
    assert (target.cwd, target.cwd_on_path) == (str(Path.cwd()), False)


async def test_a_preflight_of_bare_flags_uses_the_images_interpreter(machine: Machine) -> None:
    """Flags without a command are judged with the interpreter that has SGLang."""
    machine.python("/opt/venv/bin/python", "sglang")
    target = await machine.find(Settings(launch=("--mamba-backend", "flashinfer")))
    assert (target.python, target.launch) == ("/opt/venv/bin/python", {"mamba_backend": "flashinfer"})


@pytest.mark.parametrize("program", ["python3", "sglang", "v/bin/python3", "/v/bin/sglang"])
async def test_a_preflight_under_a_root_looks_for_nothing_outside(machine: Machine, program: str) -> None:
    """Under server_root only an absolute interpreter is taken from the command; the reader looks for any other."""
    machine.python("/v/bin/python3", "sglang")
    folder = machine.files / "v/bin"
    (folder / "sglang").write_text(f"#!{folder}/python3\n")
    (folder / "sglang").chmod(0o755)
    rest = ("-m", "sglang.launch_server") if "python" in program else ("serve",)
    target = await machine.find(
        Settings(launch=(program, *rest), server_root="/mnt/image"), environ={"PATH": str(folder)}
    )
    assert (target.python, target.python_source, target.root) == (None, "left-to-reader", "/mnt/image")


async def test_a_preflight_under_a_root_takes_an_absolute_interpreter(machine: Machine) -> None:
    """An interpreter that the command names by an absolute path is the one of that path inside the root."""
    launch = ("/v/bin/python3", "-m", "sglang.launch_server")
    target = await machine.find(Settings(launch=launch, server_root="/mnt/image"))
    assert (target.python, target.root) == ("/v/bin/python3", "/mnt/image")


@pytest.mark.parametrize(
    ("script", "cwd", "seen"),
    [
        ("cd /app && {launch}", "/app", True),
        ("cd /gone && {launch}", None, False),
        (". /app/env.sh; {launch}", None, False),
        ("docker run image {launch}", None, False),
        ("export PYTHONPATH=$(x); {launch}", str(Path.cwd()), False),
    ],
)
async def test_a_preflight_under_a_root_follows_the_launch_in_it(
    machine: Machine, tmp_path: Path, script: str, cwd: str | None, seen: bool
) -> None:
    """Folders are those of the root; its packages are read whatever is not seen, and no variable is assumed then."""
    (tmp_path / "image/app").mkdir(parents=True)
    (tmp_path / "image/app/env.sh").write_text("export A=1\n")
    line = script.format(launch="/v/bin/python3 -m sglang.launch_server")
    target = await machine.find(Settings(launch=("sh", "-c", line), server_root=str(tmp_path / "image")))
    assert (target.cwd, target.environ is not None, target.unread) == (cwd, seen, None)
    assert (target.python, target.environ_missing) == ("/v/bin/python3", None if seen else "set-by-launch")


# -- keeping what was found -------------------------------------------------------------------------


async def test_a_found_target_is_kept_for_a_few_seconds(machine: Machine) -> None:
    """Probes of one round share a search; a later round sees the change."""
    finder = machine.finder()
    first = await finder.find()
    machine.process(100, MODULE)
    machine.now += 1
    again = await finder.find()
    machine.now += 10
    later = await finder.find()
    assert (first.pid, again.pid, later.pid) == (None, None, 100)


async def test_a_cancelled_caller_does_not_spoil_the_search(machine: Machine) -> None:
    """One probe's deadline leaves the search to the others."""
    machine.process(100, MODULE)
    finder = machine.finder()
    impatient = asyncio.create_task(finder.find())
    patient = asyncio.create_task(finder.find())
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).pid == 100


async def test_a_blocking_proc_file_does_not_block_the_loop(machine: Machine) -> None:
    """A /proc file that does not return holds up its caller only.

    A named pipe stands for the command line of a process in uninterruptible sleep.
    """
    machine.process(100, MODULE)
    (machine.proc / "100" / "cmdline").unlink()
    os.mkfifo(machine.proc / "100" / "cmdline")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(machine.finder().find(), 0.3)
    os.close(os.open(machine.proc / "100" / "cmdline", os.O_WRONLY | os.O_NONBLOCK))


# -- where the agent stands -------------------------------------------------------------------------


def place(machine: Machine, *, settings: Settings | None = None, environ: dict[str, str] | None = None) -> Placement:
    standing = stand(
        settings or Settings(), proc=machine.proc, environ=environ or {}, filesystem=machine.files, pid=9, parent=8
    )
    assert standing.placement_why
    return standing.placement


def test_a_machine_without_signs_of_a_container_is_a_host(machine: Machine) -> None:
    """No marker, no variable and ordinary control groups make a host, where processes can be seen."""
    (machine.proc / str(SELF) / "cgroup").write_text("0::/system.slice/sglang-sidecar.service\n")
    standing = stand(Settings(), proc=machine.proc, environ={}, filesystem=machine.files, pid=9, parent=1)
    assert (standing.placement, standing.processes) == (Placement.HOST, Processes.SHARED)


def test_each_sign_of_a_container_counts(machine: Machine) -> None:
    """A marker file, Kubernetes' variable or a control group each prove a container; a setting overrides them."""
    assert place(machine, environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is Placement.CONTAINER
    (machine.proc / str(SELF) / "cgroup").write_text("1:cpu:/kubepods.slice/pod1\n")
    assert place(machine) is Placement.CONTAINER
    (machine.proc / str(SELF) / "cgroup").unlink()
    assert place(machine) is Placement.HOST
    (machine.files / "run").mkdir()
    (machine.files / "run/.containerenv").touch()
    assert place(machine) is Placement.CONTAINER
    assert place(machine, settings=Settings(placement=Placement.HOST)) is Placement.HOST


def processes(
    machine: Machine,
    *,
    pid: int = 9,
    chain: Sequence[int] = (0,),
    first: str = "bash",
    second: str | None = None,
    kubernetes: bool = False,
    control_group: str | None = None,
    mount: str | None = None,
    placement: Placement | None = Placement.CONTAINER,
) -> Processes:
    """Whether processes are shared, seen from ``pid``, whose parents are the ``chain``, beside process 1."""
    machine.process(1, (first,), parent=0, namespaces={"mnt": mount} if mount else None)
    (machine.proc / "1/comm").write_text(f"{first}\n")
    if mount is None:  # another user's: its namespaces may not be read
        for link in (machine.proc / "1/ns").iterdir():
            link.unlink()
    if control_group is not None:
        (machine.proc / "1/cgroup").write_text(control_group)
        (machine.proc / str(SELF) / "cgroup").write_text("0::/\n")
    if second is not None:
        machine.process(2, (), parent=0)
        (machine.proc / "2/comm").write_text(f"{second}\n")
    for member, parent in itertools.pairwise(chain):
        if member > 1:
            machine.process(member, ("sh",), parent=parent)
    standing = stand(
        Settings(placement=placement),
        proc=machine.proc,
        environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"} if kubernetes else {},
        filesystem=machine.files,
        pid=pid,
        parent=chain[0],
    )
    assert standing.processes_why
    return standing.processes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pid": 1}, Processes.HIDDEN),
        ({"chain": (1, 0), "first": "tini"}, Processes.HIDDEN),
        ({"chain": (1, 0), "first": "bash", "kubernetes": True}, Processes.HIDDEN),
        ({"chain": (20, 1, 0), "first": "supervisord", "kubernetes": True}, Processes.HIDDEN),
        ({"chain": (20, 1, 0), "first": "supervisord", "control_group": "0::/kubepods/x\n"}, Processes.HIDDEN),
        ({"chain": (20, 0), "mount": "mnt:[1]", "kubernetes": True}, Processes.HIDDEN),
        ({"chain": (0,), "control_group": "0::/\n", "kubernetes": True}, Processes.HIDDEN),
        ({"chain": (0,), "kubernetes": True}, Processes.HIDDEN),
        ({"chain": (0,), "mount": "mnt:[2]", "kubernetes": True}, Processes.SHARED),
        ({"chain": (0,), "control_group": "0::/../cri-1.scope\n", "kubernetes": True}, Processes.SHARED),
        ({"chain": (0,), "first": "pause", "kubernetes": True}, Processes.SHARED),
        ({"chain": (1, 0), "first": "pause", "kubernetes": True}, Processes.SHARED),
        ({"chain": (20, 1, 0), "first": "systemd", "second": "kthreadd", "kubernetes": True}, Processes.SHARED),
        ({"chain": (20, 1, 0), "first": "bash"}, Processes.SHARED),
        ({"chain": (1, 0), "first": "bash", "kubernetes": True, "placement": Placement.HOST}, Processes.SHARED),
    ],
    ids=[
        "number-1",
        "init-shim",
        "entry-point",
        "supervisor",
        "supervisor-by-control-group",
        "exec-same-files",
        "exec-same-group",
        "exec-untold",
        "pod-shared-by-files",
        "pod-shared-by-group",
        "pod-shared-by-pause",
        "orphan-of-a-shared-pod",
        "host-pid",
        "development-container",
        "host",
    ],
)
def test_in_a_pod_a_container_of_our_own_hides_the_server(
    machine: Machine, given: dict[str, Any], expected: Processes
) -> None:
    """In a pod processes are shared when number 1 is not this container's own; elsewhere all run beside the agent.

    iovisor/kubectl-trace#16
    """
    assert processes(machine, **given) is expected
