"""An imitation of the kernel wheel with real shared libraries, so that the dynamic loader's own words are in it.

It keeps what matters: the order of its imports, which folder it takes for which GPU, the text that it raises with
the failures behind it, and that two builds in one process end it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.fakes.site import Site

HAVE_COMPILER = shutil.which(os.environ.get("CC", "cc")) is not None

_INIT = """\
from sgl_kernel.version import __version__
import torch
from sgl_kernel.load_utils import load
common_ops = load()
"""

_LOADER = '''\
import ctypes, glob, os
import torch

def open_library(path):
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(str(error)) from None

def load():
    here = os.path.dirname(__file__)
    capability = 90 if os.environ.get("FAKE_HOPPER") and torch.cuda.is_available() else None
    folder = "sm90" if capability == 90 else "sm100"
    pattern = os.path.join(here, folder, "common_ops.*")
    fallback = os.path.join(here, "common_ops.*")
    errors = []
    for place in (pattern, fallback):
        for path in glob.glob(place)[:1]:
            try:
                return open_library(path)
            except Exception as error:
                errors.append(error)
    try:
        import common_ops
    except ImportError as error:
        errors.append(error)
    details = "\\n".join("- %s: %s" % (type(error).__name__, error) for error in errors)
    raise ImportError(f"""
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: {pattern} - found files: {glob.glob(pattern)}
2. Fallback pattern: {fallback} - found files: {glob.glob(fallback)}
3. Standard Python import: common_ops - failed

GPU Info:
- Compute capability: {capability}
- Expected variant: CPU/No GPU detected (using precise math)
- CUDA version: {torch.version.cuda}

Please ensure sgl_kernel is properly installed with:
pip install --upgrade sglang-kernel

Error details from previous import attempts:
{details}
""")
'''

THERE = "int there(void) { return 1; }"
"""What a library that is needed defines."""

REGISTERS_ONCE = """
#include <stdlib.h>
__attribute__((constructor)) static void once(void) {
    if (getenv("FAKE_OPERATIONS")) abort();
    setenv("FAKE_OPERATIONS", "registered", 1);
}
"""
"""A build: a second one in the same process ends it, as two registrations of the same operations do."""


def wheel(site: Site, version: str = "0.4.5", name: str = "sglang-kernel") -> None:
    """The Python part of the wheel, without a compiled build, beside an SGLang that pins it."""
    site.dependencies()
    site.dist("sglang", "0.5.16", (f"{name}=={version}", "torch==2.11.0"))
    site.dist(name, version)
    python_part(site, version)


def python_part(site: Site, version: str) -> None:
    """The wheel's modules, and a torch that sees no GPU."""
    site.write("torch/cuda.py", "def is_initialized(): return False\ndef is_available(): return False\n")
    site.write("sgl_kernel/version.py", f'__version__ = "{version}"\n')
    site.write("sgl_kernel/__init__.py", _INIT)
    site.write("sgl_kernel/load_utils.py", _LOADER)


def operations(
    site: Site, folder: str, *, symbol: str | None = None, needs: str | None = None, code: str = REGISTERS_ONCE
) -> Path:
    """Compile a build of the operations into a folder of the wheel ("." for none).

    ``symbol`` is one that nothing defines, ``needs`` the file name of a library that is not there at run time.
    """
    path = site.packages / "sgl_kernel" / folder / "common_ops.abi3.so"
    if symbol is not None:
        code += f"\nextern int {symbol}(void);\nint use(void) {{ return {symbol}(); }}\n"
    linked: list[str] = []
    if needs is not None:
        stub = site.root / "stubs" / needs
        compiled(THERE, stub, f"-Wl,-soname,{needs}")
        code += "\nextern int there(void);\nint need(void) { return there(); }\n"
        linked = [str(stub)]
    compiled(code, path, *linked)
    if linked:
        os.unlink(linked[0])
    return path


def compiled(code: str, path: Path, *options: str) -> None:
    """Compile C code into a shared library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(code)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-z,now", "-o", str(path), str(source), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    source.unlink()
