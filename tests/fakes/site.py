"""Small fake Python environments: a venv-like tree whose packages imitate FlashInfer and what it needs.

The imitation keeps what matters about the real one: which modules it imports in which order, where its version
comes from, and how it compares the versions of its companions, release by release.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from sidecar.model import Scope, Target

DEPENDENCIES = ("tvm_ffi", "torch", "packaging", "requests", "pynvml", "tqdm")

_INIT = """\
import tvm_ffi
import torch, packaging, requests, pynvml, tqdm
from .version import __version__
from .jit import env
"""

_VERSION = """\
try:
    from ._build_meta import __version__
except ModuleNotFoundError:
    __version__ = "0.0.0+unknown"
"""

_ENV = """\
import importlib.util, os, sys
from ..version import __version__ as ours

def check(module, name, agrees):
    if importlib.util.find_spec(module) is None:
        return
    theirs = __import__(module).__version__
    if os.getenv("FLASHINFER_DISABLE_VERSION_CHECK") or ours == "0.0.0+unknown" or agrees(theirs):
        return
    text = "%s version (%s) does not match flashinfer version (%s). Please install the same." % (name, theirs, ours)
    if ONLY_WARNS:
        print("Ignoring incompatible", text, file=sys.stderr)
    else:
        raise RuntimeError(text)

check("flashinfer_cubin", "flashinfer-cubin", lambda theirs: theirs == ours)
check("flashinfer_jit_cache", "flashinfer-jit-cache", lambda theirs: AGREES)
"""

_LOOSE = "theirs.startswith(ours)"
_EXACT = 'theirs == ours or theirs.startswith(ours + "+")'


class RealClock:
    """The machine's time."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Site:
    """A virtual environment without pip: ``python`` is its interpreter, ``packages`` its site-packages."""

    def __init__(self, root: Path, *, base: str | None = None, system: bool = False) -> None:
        base = os.path.realpath(base or sys.executable)
        self.root = root
        (root / "bin").mkdir(parents=True)
        self.python = str(root / "bin/python")
        os.symlink(base, self.python)
        flag = "true" if system else "false"
        config = f"home = {os.path.dirname(base)}\ninclude-system-site-packages = {flag}\n"
        (root / "pyvenv.cfg").write_text(config)
        version = version_of(base)
        self.packages = root / f"lib/python{version}/site-packages"
        self.packages.mkdir(parents=True)

    def write(self, name: str, text: str = "") -> Path:
        """A file below site-packages."""
        path = self.packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def remove(self, name: str) -> None:
        """Delete a file or folder below site-packages."""
        path = self.packages / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def dist(self, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
        """A .dist-info folder as pip writes it."""
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(f"{folder}/METADATA", "\n".join(lines) + "\n\nA long description.\nVersion: 9.9\n")
        self.write(f"{folder}/RECORD", "")

    def install(
        self, name: str, version: str, files: Mapping[str, str], *, requires: tuple[str, ...] = (), record: bool = True
    ) -> str:
        """A distribution with these files and a true RECORD of them, in place of any other of its name and version.

        Returns the name of its .dist-info folder.
        """
        self.dist(name, version, requires)
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        for path, content in files.items():
            self.write(path, content)
        self.write(f"{folder}/INSTALLER", "pip\n")
        if not record:
            self.remove(f"{folder}/RECORD")
            return folder
        listed = [*files, f"{folder}/METADATA", f"{folder}/INSTALLER"]
        contents = {path: (self.packages / path).read_bytes() for path in listed}
        rows = [(path, f"sha256={hashlib.sha256(data).hexdigest()}", str(len(data))) for path, data in contents.items()]
        rows.append((f"{folder}/RECORD", "", ""))
        with (self.packages / folder / "RECORD").open("w", newline="") as out:
            csv.writer(out, lineterminator="\n").writerows(rows)
        return folder

    def dependencies(self, *without: str, cuda: str | None = "13.0") -> None:
        """Stubs of what FlashInfer imports, except ``without``."""
        for name in DEPENDENCIES:
            if name not in without:
                self.write(f"{name}/__init__.py")
        if "torch" not in without:
            tag = "cpu" if cuda is None else "cu" + cuda.replace(".", "")
            version = f"from typing import Optional\n__version__ = '2.11.0+{tag}'\ncuda: Optional[str] = {cuda!r}\n"
            self.write("torch/version.py", version)
            self.write(
                "torch/__init__.py",
                f"from . import cuda\nfrom .version import __version__\nclass version:\n    cuda = {cuda!r}\n",
            )
            self.write("torch/cuda.py", "def is_initialized(): return False\n")

    def flashinfer(self, version: str = "0.6.14", *, mamba: str = "", registered: bool = True) -> None:
        """A FlashInfer of a release; ``mamba`` is code at the top of ``flashinfer/mamba/__init__.py``."""
        release = Version(version)
        has_mamba = release >= Version("0.6.1")
        self.write("flashinfer/__init__.py", _INIT + ("from . import mamba\n" if has_mamba else ""))
        self.write("flashinfer/_build_meta.py", f'"""Build metadata."""\n__version__ = "{version}"\n')
        self.write("flashinfer/version.py", _VERSION)
        self.write("flashinfer/jit/__init__.py")
        agrees = _EXACT if release >= Version("0.7.0") else _LOOSE
        only_warns = str(release >= Version("0.7.2"))
        self.write("flashinfer/jit/env.py", _ENV.replace("AGREES", agrees).replace("ONLY_WARNS", only_warns))
        if has_mamba:
            init = "from .selective_state_update import selective_state_update\n"
            self.write("flashinfer/mamba/__init__.py", f'{mamba}\n{init}__all__ = ["selective_state_update"]\n')
            self.write("flashinfer/mamba/selective_state_update.py", "def selective_state_update(): ...\n")
        if registered:
            self.dist("flashinfer-python", version)

    def companion(self, name: str, version: str) -> None:
        """flashinfer-cubin or flashinfer-jit-cache of a version."""
        module = name.replace("-", "_")
        self.write(f"{module}/__init__.py", "from ._build_meta import __version__\n")
        self.write(f"{module}/_build_meta.py", f'__version__ = "{version}"\n')
        self.dist(name, version)

    def kernel(self, *folders: str, plain: bool = False) -> None:
        """A kernel wheel with a build of its operations in each of these folders, and one beside them."""
        self.write("sgl_kernel/__init__.py")
        for folder in folders:
            self.write(f"sgl_kernel/{folder}/common_ops.abi3.so", "binary")
        if plain:
            self.write("sgl_kernel/common_ops.abi3.so", "binary")

    def target(self, **changes: object) -> Target:
        """This environment as a server's, with an environment of its own that can be seen."""
        values: dict[str, object] = {
            "url": "http://127.0.0.1:30000",
            "url_source": "test",
            "scope": Scope.SERVER,
            "python": self.python,
            "python_source": "server_python",
            "environ": {"PATH": os.defpath, "HOME": str(self.root)},
        }
        return Target(**{**values, **changes})  # type: ignore[arg-type]


def good(root: Path, version: str = "0.6.14") -> Site:
    """An environment in which everything works."""
    site = Site(root)
    site.dependencies()
    site.flashinfer(version)
    return site


def version_of(python: str) -> str:
    """'3.11' for an interpreter, by the name that its real path ends in or else this interpreter's own."""
    name = os.path.basename(os.path.realpath(python))
    return name[6:] if name[6:].count(".") == 1 else f"{sys.version_info[0]}.{sys.version_info[1]}"


def driver_library(root: Path, folder: str, version: str | None = "580.159.04", *, elf_class: int = 2) -> str:
    """A libcuda.so.1 in a folder under ``root`` as packages install it: a link to a name with the version.

    ``elf_class`` is 2 for 64 bit and 1 for 32 bit. Returns its path inside the root.
    """
    inside = root / folder.lstrip("/")
    inside.mkdir(parents=True, exist_ok=True)
    real = "libcuda.so" if version is None else f"libcuda.so.{version}"
    (inside / real).write_bytes(b"\x7fELF" + bytes([elf_class, 1, 1]) + bytes(57))
    (inside / "libcuda.so.1").symlink_to(real)
    return f"{folder}/libcuda.so.1"


def loader_cache(root: Path, *paths: str, old_format: bool = False) -> None:
    """An ld.so.cache that lists libraries by their paths in this order, as ldconfig writes it."""
    strings = b""
    entries = b""
    start = 48 + 24 * len(paths)
    for path in paths:
        name = os.path.basename(path).encode() + b"\0"
        where = start + len(strings)
        strings += name + path.encode() + b"\0"
        entries += struct.pack("=iIIIQ", 0x0303, where, where + len(name), 0, 0)
    data = struct.pack("=20sIIBxxxIIII", b"glibc-ld.so.cache1.1", len(paths), len(strings), 2, 0, 0, 0, 0)
    data += entries + strings
    if old_format:
        # Older releases put the older format in front, padded to eight bytes.
        data = b"ld.so-1.7.0\0" + struct.pack("=I", 1) + struct.pack("=iII", 3, 0, 5) + bytes(4) + data
    (root / "etc").mkdir(parents=True, exist_ok=True)
    (root / "etc/ld.so.cache").write_bytes(data)


def loader_config(root: Path, **files: str) -> None:
    """The loader's configuration: an ld.so.conf that includes its folder, and there a file for each argument."""
    folder = root / "etc/ld.so.conf.d"
    folder.mkdir(parents=True, exist_ok=True)
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    for name, text in files.items():
        (folder / f"{name}.conf").write_text(text)
