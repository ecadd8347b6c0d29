"""Compiled files that were cut off, loaded by real interpreters: who is named for the signal that follows.

A file that is shorter than what the loader maps of it ends the process by SIGBUS (mmap(2)); pytorch/pytorch#62330 and
its like are reports of people who saw nothing but that word.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.crashes import Crash, crash
from sidecar.imports import FLASHINFER_MAMBA, ImportOutcome, ImportWork
from sidecar.isolation import Isolation
from sidecar.model import Status
from tests.fakes.compiled import cut_off, library, register
from tests.fakes.flashinfer import facts_of, judged
from tests.fakes.interpreters import available
from tests.fakes.site import RealClock, Site
from tests.fakes.sources import NO_LIMIT, Sources, imported

LOADS = "import ctypes, os\nctypes.CDLL(os.path.join(os.path.dirname(__file__), 'lib', '{name}'))\n"
"""How tvm_ffi and the kernel wheel load their libraries."""


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


def environment(root: Path, *, base: str | None = None) -> Site:
    """FlashInfer and what it needs, all registered; tvm_ffi imports torch before it loads its own library."""
    site = Site(root / "venv", base=base)
    site.dependencies()
    site.flashinfer("0.6.14")
    site.install("torch", "2.11.0", {"torch/extra.py": ""})
    site.install("apache-tvm-ffi", "0.1.11", {"tvm_ffi/extra.py": ""})
    site.write("tvm_ffi/__init__.py", "import torch\nfrom . import libinfo\n")
    site.write("tvm_ffi/libinfo.py")
    site.dist("pip", "26.0")
    return site


def tvm_ffi(site: Site) -> Path:
    file = library(site.packages / "tvm_ffi/lib/libtvm_ffi.so")
    register(site.packages, "apache_tvm_ffi-0.1.11.dist-info", file)
    site.write("tvm_ffi/libinfo.py", LOADS.format(name=file.name))
    return file


def torch_extension(site: Site) -> Path:
    file = library(site.packages / "torch/_C.abi3.so")
    register(site.packages, "torch-2.11.0.dist-info", file)
    site.write("torch/__init__.py", "from . import _C\n")
    return file


def torch_library(site: Site) -> Path:
    """A library that the extension needs: the loader reads it, and no code of Python names it."""
    file = library(site.packages / "torch/lib/libtorch_cpu.so")
    extension = library(site.packages / "torch/_C.abi3.so", needs=file)
    register(site.packages, "torch-2.11.0.dist-info", file, extension)
    site.write("torch/__init__.py", "from . import _C\n")
    return file


CUT = {
    "tvm_ffi/lib/libtvm_ffi.so": (tvm_ffi, "apache-tvm-ffi==0.1.11"),
    "torch/_C.abi3.so": (torch_extension, "torch==2.11.0"),
    "torch/lib/libtorch_cpu.so": (torch_library, "torch==2.11.0"),
}


@pytest.mark.parametrize("named", CUT)
async def test_a_file_that_was_cut_off_is_named(isolation: Isolation, tmp_path: Path, named: str) -> None:
    """The file and the distribution to write anew, whichever package was imported before it."""
    site = environment(tmp_path)
    build, wanted = CUT[named]
    cut_off(build(site))
    sources = Sources(isolation, RealClock(), memory=NO_LIMIT)
    found = judged(await facts_of(sources, site.target(), imported=True))["flashinfer-import-crashed"]
    assert (found.status, found.reason) == (Status.TRUE, "signal")
    assert "was ended by SIGBUS" in found.message
    assert f"{named} is not of the size with which {wanted.partition('==')[0]} was installed" in found.message
    assert found.remedy == (
        f"{site.python} -m pip install --force-reinstall --no-deps {wanted}"
        "  # or start the server with --mamba-backend triton"
    )
    await sources.close()


@pytest.mark.parametrize("python", available(), ids=lambda path: Path(path).resolve().name)
async def test_the_loaded_file_is_told_without_any_record(isolation: Isolation, tmp_path: Path, python: str) -> None:
    """Where no RECORD gives sizes, the interpreter's own account and the load that began say where it was."""
    site = environment(tmp_path, base=python)
    file = tvm_ffi(site)
    site.remove("apache_tvm_ffi-0.1.11.dist-info/RECORD")
    cut_off(file)
    sources = Sources(isolation, RealClock(), memory=NO_LIMIT)
    evidence = await imported(sources, site.target())
    assert (evidence.outcome, evidence.signal) == (ImportOutcome.CRASHED, "SIGBUS")
    assert evidence.loading == "tvm_ffi/lib/libtvm_ffi.so"
    assert evidence.died_at == "tvm_ffi/libinfo.py:2"
    assert evidence.stage == "import torch", "what was imported last is another package"
    found = crash(await sources.read(site.target()), evidence, named={})
    assert (found.file, found.distribution) == ("tvm_ffi/lib/libtvm_ffi.so", "apache-tvm-ffi")
    await sources.close()


async def crashed_at(isolation: Isolation, site: Site, work: ImportWork) -> Crash:
    sources = Sources(isolation, RealClock(), memory=NO_LIMIT, work=work)
    evidence = await imported(sources, site.target())
    assert evidence.outcome is ImportOutcome.CRASHED
    found = crash(await sources.read(site.target()), evidence, named={})
    await sources.close()
    return found


@pytest.mark.parametrize(
    ("distribution", "file", "work"),
    [
        ("sglang-kernel", "sgl_kernel/flash_ops.abi3.so", ImportWork("sgl_kernel.flash_attn")),
        ("flash-attn-4", "flash_attn/cute/native.abi3.so", ImportWork("flash_attn.cute")),
    ],
)
async def test_other_imports_name_the_file_as_well(
    isolation: Isolation, tmp_path: Path, distribution: str, file: str, work: ImportWork
) -> None:
    """The kernel wheel's operations and a part of FlashAttention 4, each cut off."""
    site = environment(tmp_path)
    folder = file.rpartition("/")[0]
    name = Path(file).name.partition(".")[0]
    module = f"{work.module.replace('.', '/')}.py" if folder == "sgl_kernel" else f"{folder}/__init__.py"
    info = site.install(distribution, "1.0", {f"{folder}/__init__.py": "", module: f"from . import {name}\n"})
    built = library(site.packages / file)
    register(site.packages, info, built)
    cut_off(built)
    found = await crashed_at(isolation, site, work)
    assert (found.file, found.distribution, found.changed) == (file, distribution, True)


async def test_a_library_is_not_blamed_once_it_was_loaded(isolation: Isolation, tmp_path: Path) -> None:
    """A crash in code that runs after a library was loaded is that code's."""
    site = environment(tmp_path)
    tvm_ffi(site)
    site.write("requests/__init__.py", "import ctypes\nctypes.string_at(0)\n")
    found = await crashed_at(isolation, site, FLASHINFER_MAMBA)
    assert (found.file, found.distribution) == ("requests/__init__.py", None)
    assert found.how == "was ended by SIGSEGV in requests/__init__.py:2"


async def test_deep_code_is_found_at_its_innermost_frame(isolation: Isolation, tmp_path: Path) -> None:
    """However many frames lie around it, and whatever was printed before."""
    site = environment(tmp_path)
    code = (
        "import ctypes\nprint('x' * 50000)\ndef go(n):\n    return go(n - 1) if n else ctypes.string_at(0)\ngo(300)\n"
    )
    site.write("tqdm/__init__.py", code)
    found = await crashed_at(isolation, site, FLASHINFER_MAMBA)
    assert found.how == "was ended by SIGSEGV in tqdm/__init__.py:4"


async def test_a_process_that_leaves_has_no_trace(isolation: Isolation, tmp_path: Path) -> None:
    """``os._exit`` leaves no account of where: the package that was imported last is not named for it."""
    site = environment(tmp_path)
    site.write("tqdm/__init__.py", "import os; os._exit(5)\n")
    found = await crashed_at(isolation, site, FLASHINFER_MAMBA)
    assert (found.file, found.distribution) == (None, None)
    assert found.how.startswith("left with exit code 5, in a module that is not known")
