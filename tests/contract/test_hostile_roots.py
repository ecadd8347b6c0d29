"""A root whose owner means harm: nothing outside it is read, nothing in it runs, and the answer comes in time."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.reader import in_root, read
from tests.fakes.site import Site, driver_library, good

DEADLINE = 9.0
"""Seconds after which the agent gives up on the reader with its default settings."""
CANARY = "66.6.6"
INFO = "flashinfer_python-0.6.14.dist-info"
_IN_ACCESS, _IN_OPEN, _NONBLOCK = 0x1, 0x20, os.O_NONBLOCK


class Watch:
    """Notices every opening and reading of what lies in a few folders, by inotify."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(_NONBLOCK)
        assert self.fd >= 0
        for folder in folders:
            assert libc.inotify_add_watch(self.fd, os.fsencode(folder), _IN_ACCESS | _IN_OPEN) >= 0

    def touched(self) -> bool:
        """Whether anything was opened or read since the last question."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self.fd, 65536))
        return False


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def site(root: Path) -> Site:
    """An environment in which everything works, inside the root."""
    site = good(root / "opt/venv")
    (site.root / "bin/python3").symlink_to("python")
    return site


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Folders beside the root whose contents would show in the answer."""
    folder = tmp_path / "outside"
    other = Site(folder / "venv")
    other.flashinfer(CANARY)
    other.companion("flashinfer-cubin", CANARY)
    other.dist("sglang", CANARY, (f"torch=={CANARY}",))
    other.kernel("sm66")
    other.write("torch/version.py", f"__version__ = '{CANARY}'\ncuda = '66.6'\n")
    driver_library(folder, "/lib", f"666.66.{6:02}")
    (folder / "toolkit/bin").mkdir(parents=True)
    (folder / "toolkit/bin/nvcc").write_text("")
    (folder / "toolkit/bin/nvcc").chmod(0o755)
    (folder / "toolkit/version.json").write_text(f'{{"cuda_nvcc": {{"version": "{CANARY}"}}}}')
    (folder / "passwd").write_text("canary:x:4321:1::/66.6.6:\n")
    (folder / "one.py").write_text("x")
    return folder


@pytest.fixture
def watch(outside: Path) -> Iterator[Watch]:
    folders = [outside, *(path for path in outside.rglob("*") if path.is_dir() and not path.is_symlink())]
    one = Watch(*folders)
    yield one
    os.close(one.fd)


def answer(site: Site, root: Path, **spec: Any) -> dict[str, Any]:
    """The reader's answer, which came in time and which every output can encode."""
    begun = time.monotonic()
    spec = {"environ_seen": True, "user": {"uid": 4321, "gid": 1, "groups": []}, **spec}
    result = in_root(site, root, **spec)
    assert time.monotonic() - begun < DEADLINE
    json.dumps(result).encode()
    return result


def climbing(path: Path) -> str:
    return "../" * 40 + str(path).lstrip("/")


def test_the_watch_notices(outside: Path, watch: Watch) -> None:
    """The means by which these tests tell that nothing was read would tell if something was."""
    assert not watch.touched()
    (outside / "venv/pyvenv.cfg").read_text()
    assert watch.touched()
    assert read(sys.executable, environ={"PYTHONPATH": str(outside / "venv/lib")})
    assert read(sys.executable, root=str(outside), python="/venv/bin/python")["flashinfer"]["version"] == CANARY
    assert watch.touched()


@pytest.mark.parametrize("link", [str, climbing], ids=["absolute", "climbing"])
def test_links_out_of_the_root(
    site: Site, root: Path, outside: Path, watch: Watch, link: Callable[[Path], str]
) -> None:
    """Links in the place of packages, metadata, files and whole folders lead to nothing outside."""
    there = next((outside / "venv/lib").iterdir()) / "site-packages"
    for name in ("flashinfer_cubin", "sgl_kernel"):
        (site.packages / name).symlink_to(link(there / name))
    for name in ("sglang", "flashinfer_cubin"):
        (site.packages / f"{name}-1.dist-info").symlink_to(link(there / f"{name}-{CANARY}.dist-info"))
    site.remove("torch/version.py")
    (site.packages / "torch/version.py").symlink_to(link(there / "torch/version.py"))
    (site.packages / "flashinfer/linked.py").symlink_to(link(outside / "one.py"))
    (site.packages / "flashinfer/folder").symlink_to(link(there))
    site.remove(f"{INFO}/METADATA")
    (site.packages / INFO / "METADATA").symlink_to(link(there / f"flashinfer_python-{CANARY}.dist-info/METADATA"))
    site.write("more.pth", f"{there}\n{climbing(there)}\nlinked\n")
    (site.packages / "linked").symlink_to(link(there))
    (root / "etc").mkdir()
    (root / "etc/passwd").symlink_to(link(outside / "passwd"))
    (root / "etc/ld.so.conf").symlink_to(link(outside / "passwd"))
    (root / "usr/local").mkdir(parents=True)
    (root / "usr/local/cuda").symlink_to(link(outside / "toolkit"))
    (root / "home").symlink_to(link(outside))
    environ = {
        "PYTHONPATH": f"{there}:/{climbing(there)}",
        "PYTHONUSERBASE": str(outside / "venv"),
        "LD_LIBRARY_PATH": f"{outside}/lib",
        "PATH": f"{outside}/toolkit/bin",
        "CUDA_HOME": f"/{climbing(outside / 'toolkit')}",
        "FLASHINFER_CUBIN_DIR": str(outside),
    }
    watch.touched()  # finding the folders above was this test's own doing
    for variables in (environ, {}, {"HOME": "/home"}):
        result = answer(site, root, environ=variables, cwd=str(there), cwd_on_path=True)
        # A version that only the registration's name states is the name's, not what the metadata outside says.
        versions = {"flashinfer-python": "0.6.14", "sglang": "1", "flashinfer-cubin": "1"}
        assert result["distributions"] == versions
        assert result["requires_of"]["sglang"] == []
        assert result["flashinfer"]["version"] == "0.6.14"
        said = json.dumps({key: value for key, value in result.items() if key != "toolchain"})
        assert CANARY not in said
        assert "666.66" not in said
        assert (result["toolchain"]["nvcc"], result["toolchain"]["release"]) == (None, None)
        assert result["cubins"] in {0, None}
    assert not watch.touched()


def test_a_record_that_points_elsewhere(site: Site, root: Path, outside: Path, watch: Watch) -> None:
    """Paths of a RECORD are compared with what was listed, never followed: absolute and climbing ones are nothing."""
    lines = [
        f"{outside}/one.py,sha256=x,1",
        f"../../../../../..{outside}/one.py,sha256=x,1",
        f"flashinfer/../../../../../../../..{outside}/one.py,sha256=x,1",
        f"flashinfer/{climbing(outside / 'one.py')},sha256=x,999",
        "flashinfer/\x00.py,,1",
        "flashinfer/" + "x/" * 5000 + ".py,,1",
        '"flashinfer/a,b.py",sha256=x,1',
        "flashinfer/huge.py,,99999999999999999999999999",
        "flashinfer/__init__.py,,-1",
        ",,",
        "flashinfer/\udcff.py,,",
        "flashinfer\n\n",
    ]
    (site.packages / INFO / "RECORD").write_text("\n".join(lines), errors="surrogateescape")
    damaged = answer(site, root)["damaged"]["flashinfer-python"]
    assert damaged["resized"] == 1  # __init__.py is not of -1 bytes
    assert str(outside) not in json.dumps(read(site.python)["distributions"])
    assert not watch.touched()


def special_files(site: Site) -> None:
    for name in ("RECORD", "METADATA", "direct_url.json", "INSTALLER"):
        with contextlib.suppress(FileNotFoundError):
            site.remove(f"{INFO}/{name}")
        os.mkfifo(site.packages / INFO / name)
    for name in ("a.pth", "sgl_kernel.py", "torch-1.dist-info", "torch-2.egg-info", "__editable___x_finder.py"):
        os.mkfifo(site.packages / name)
    site.write("b.pth", "import __editable___x_finder\n")
    where = os.getcwd()
    try:
        os.chdir(site.packages)  # a socket's name is limited to 108 bytes
        for name in ("c.pth", "flashinfer/d.py", "quack"):
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(name)
    finally:
        os.chdir(where)


def devices(site: Site) -> None:
    zero = site.packages / "zero"
    try:
        os.mknod(zero, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        # Without the right to make a device the one of this machine stands in, for the reader of its own root.
        zero.symlink_to("/dev/zero")
    for name in ("endless.pth", "einops.py", "flashinfer/zero.py", "flashinfer/mamba/zero.so"):
        (site.packages / name).symlink_to(zero)
    site.remove(f"{INFO}/METADATA")
    (site.packages / INFO / "METADATA").symlink_to(zero)


def sparse(site: Site) -> None:
    for name in (f"{INFO}/METADATA", f"{INFO}/RECORD", "sparse.pth", "torch/version.py", "flashinfer/sparse.py"):
        with (site.packages / name).open("ab") as file:
            file.truncate(1 << 30)
    for number in range(100):
        site.dist(f"padding{number}", "1.0")
        with (site.packages / f"padding{number}-1.0.dist-info/RECORD").open("ab") as file:
            file.truncate(1 << 30)


def loops(site: Site) -> None:
    (site.packages / "loop").symlink_to("loop")
    (site.packages / "flashinfer/up").symlink_to("..")
    (site.packages / "flashinfer/self").symlink_to(".")
    (site.packages / "a").symlink_to("b")
    (site.packages / "b").symlink_to("a")
    site.write("loop.pth", "loop\na\n.\n../site-packages\nflashinfer/up/flashinfer/up\n")
    site.remove("requests")
    (site.packages / "requests").symlink_to("requests")
    (site.packages / "b-1.0.dist-info").symlink_to("b-1.0.dist-info")


def deep(site: Site) -> None:
    where = os.open(site.packages / "flashinfer", os.O_RDONLY)
    for _ in range(200):  # more would break whoever tidies up after the tests
        os.mkdir("d", dir_fd=where)
        inner = os.open("d", os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = inner
    os.close(where)


def crowded(site: Site) -> None:
    folder = os.open(site.packages, os.O_RDONLY)
    os.mkdir("flashinfer/many", dir_fd=folder)
    for number in range(21000):
        os.close(os.open(f"flashinfer/many/{number}.py", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)


def many_distributions(site: Site) -> None:
    for number in range(6000):
        (site.packages / f"p{number}-1.0.dist-info").mkdir()


def odd_names(site: Site) -> None:
    base = os.fsencode(site.packages)
    for name in (
        b"\xff\xfe-1.dist-info",
        b"a\nb-1.0.dist-info",
        b"\x1b[31m-1.0.dist-info",
        b"-.dist-info",
        b".egg-info",
    ):
        os.mkdir(base + b"/" + name)
    for name in (b"flashinfer/\xff\xfe.py", b"flashinfer/a\nb.py", b"flashinfer/\x1b[2J.so", b"\xff.pth", b"\n.pth"):
        with open(base + b"/" + name, "wb") as file:
            file.write(b"\xff\n")
    (site.packages / INFO / "RECORD").write_bytes(b"flashinfer/\xff\xfe.py,,2\nflashinfer/\x1b[2J\xff.py,,2\n")


def huge_path(site: Site) -> None:
    site.write("many.pth", "".join(f"d{number}\n" for number in range(5000)))
    for number in range(1200):
        (site.packages / f"d{number}").mkdir()
    site.write("long.pth", "x" * 1_000_000 + "\n\x00\n/\x00\n" + "../" * 3000 + "\n")


def lying_config(site: Site) -> None:
    text = (site.root / "pyvenv.cfg").read_text()
    (site.root / "pyvenv.cfg").write_text(text + "version = 99.99999999999999999\nhome = \x00/\n" + "=\n" * 10000)
    site.write("__editable___x_finder.py", "MAPPING = {" + "'a': [" * 20000 + "\n")
    site.write("x.pth", "import __editable___x_finder\n")
    site.write("__editable___y_finder.py", "MAPPING = {'flashinfer_cubin': '/dev/zero', 'b': 3, 4: '/etc'}\n")
    site.write("y.pth", "import __editable___y_finder\n")
    site.write(f"{INFO}/direct_url.json", "[" * 60000)


SPOILS = [
    special_files, devices, sparse, loops, deep, crowded, many_distributions, odd_names, huge_path, lying_config,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("foreign", [True, False], ids=["foreign", "own"])
def test_what_a_hostile_owner_puts_in_the_way(
    site: Site, root: Path, spoil: Callable[[Site], None], foreign: bool
) -> None:
    """Pipes, sockets, devices, endless files and folders, loops and odd names cost only themselves."""
    config = (site.root / "pyvenv.cfg").read_text()
    spoil(site)
    if not foreign:
        # The interpreter itself obeys its configuration; only through a root is it the reader's alone.
        (site.root / "pyvenv.cfg").write_text(config)
    begun = time.monotonic()
    result = answer(site, root) if foreign else read(site.python, environ_seen=True)
    assert time.monotonic() - begun < DEADLINE
    json.dumps(result).encode()
    assert result["distributions"]["flashinfer-python"] == "0.6.14"
    assert result["flashinfer"]["mamba"]["state"] == "present"
    assert result["flashinfer"]["version"] == "0.6.14"


def test_limits_claim_nothing(site: Site, root: Path) -> None:
    """What a limit cut off is neither missing nor damaged."""
    record = "".join(f"flashinfer/many/{number}.py,sha256=x,0\n" for number in range(21000))
    (site.packages / INFO / "RECORD").write_text(record)
    crowded(site)
    assert "flashinfer-python" not in answer(site, root)["damaged"]


def test_nothing_in_the_root_runs(site: Site, root: Path) -> None:
    """Code in .pth files, in start-up modules, packages and programs stays unrun, in this and in a foreign root."""
    proof = root / "ran"
    code = f"import pathlib; pathlib.Path({str(proof)!r}).touch(); pathlib.Path('/ran').touch()\n"
    for name in ("sitecustomize.py", "usercustomize.py", "flashinfer/__init__.py", "json.py", "reader.py", "site.py"):
        site.write(name, code)
    for name in ("reader/__init__.py", "sidecar/__init__.py", "torch/__init__.py", "nvidia_cutlass_dsl/__init__.py"):
        site.write(name, code)
    site.write("code.pth", code)
    site.write("nvidia_cutlass_dsl.pth", f"import nvidia_cutlass_dsl; 'insert(0, dsl_packages'; {code}")
    site.write("nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py", code)
    for program in ("nvcc", "ninja", "ldconfig"):
        (site.root / "bin" / program).write_text(f"#!/bin/sh\ntouch {proof} /ran\n")
        (site.root / "bin" / program).chmod(0o755)
    inside = "/" + str((site.root / "bin").relative_to(root))
    environ = {"PATH": inside, "PYTHONPATH": "/opt", "CUDA_HOME": os.path.dirname(inside)}
    foreign = answer(site, root, environ=environ)
    own = read(site.python, environ={"PATH": str(site.root / "bin")}, environ_seen=True)
    assert foreign["toolchain"]["nvcc"] == f"{inside}/nvcc"
    assert own["toolchain"]["nvcc"] == str(site.root / "bin/nvcc")
    assert foreign["modules"]["cutlass"]["kind"] == own["modules"]["cutlass"]["kind"] == "package"
    assert foreign["path_code"] == own["path_code"] == ["code.pth"]
    assert not proof.exists()
    assert not Path("/ran").exists()
