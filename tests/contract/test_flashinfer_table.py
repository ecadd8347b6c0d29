"""Broken environments, each with one cause: by files, by a real import, with its remedy and SGLang's own sentence.

The environments are small trees of fake packages; the reader and the importer are real children. What the files
cannot tell may be unknown before the import, but never another cause than the one that the import then shows.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.imports import ImportLimits
from sidecar.isolation import Isolation
from sidecar.model import Feature, Placement, Scope, Status
from sidecar.probes.flashinfer import PROBE, FlashinferFacts
from tests.builders import view
from tests.fakes.cgroups import Cgroup
from tests.fakes.flashinfer import (
    CODES,
    DEFAULT_LAUNCH,
    MAMBA_USED,
    Build,
    companion,
    facts_of,
    judged,
    release,
    removes,
    running,
    then,
    writes,
)
from tests.fakes.site import RealClock, Site
from tests.fakes.sources import Sources

NOTHING = "none"
MAMBA = "flashinfer/mamba"
OLD_SAYS = "ValueError: FlashInfer mamba module not available, please check flashinfer installation."
SAYS = "ValueError: FlashInfer mamba module not available, please check the FlashInfer installation."
SCHEDULER_SAYS = (
    "ValueError: Mamba backend 'flashinfer' requested but its dependencies are not available. Install the required "
    "package or use a different --mamba-backend value."
)
PIN = "'flashinfer-python[cu13]==0.6.14'"
AGAIN = f"-m pip install --force-reinstall --no-deps {PIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A broken environment.

    ``files`` and ``real`` are "code: reason" without the common prefix, "unknown: reason", or none; ``real`` left out
    is the same as ``files``. ``remedy`` is a part of the remedy, ``says`` the whole of SGLang's sentence or, ending in
    an ellipsis, its beginning. ``message`` is a part of the probe's own. ``process``: there is a process of the
    server, so that its user is known. ``memory_used``: so many of the ten GiB of a memory limit are in use.
    ``source`` is the public report that it follows, where there is one.
    """

    name: str
    build: Build
    files: str
    real: str | None = None
    remedy: str = ""
    says: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[Feature, bool] = field(default_factory=lambda: MAMBA_USED)
    sglang: str | None = "0.5.16"
    pip: bool = True
    seen: bool = True
    process: bool = False
    limits: ImportLimits | None = None
    memory_used: int | None = None
    message: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


def mismatch(name: str, theirs: str, ours: str) -> str:
    return (
        f"RuntimeError: {name} version ({theirs}) does not match flashinfer version ({ours}). Please install the same…"
    )


def loads(text: str) -> str:
    """Code of a package whose compiled part the loader refuses."""
    return f"raise ImportError({text!r})"


def cpu_torch(site: Site) -> None:
    site.dependencies(cuda=None)
    site.dist("nvidia-cutlass-dsl", "4.6.0")
    site.flashinfer("0.6.14", mamba='raise AssertionError("Torch not compiled with CUDA enabled")')


def without(*names: str) -> Build:
    return then(lambda site: site.dependencies(*names), lambda site: site.flashinfer())


def wheel_library(site: Site) -> None:
    site.dependencies()
    site.write("nvidia/cuda_nvrtc/lib/libsidecar_nvrtc.so.12")
    site.flashinfer("0.6.14", mamba='import ctypes; ctypes.CDLL("libsidecar_nvrtc.so.12")')


def compiled(site: Site) -> None:
    """A real shared library that wants a name that nobody defines."""
    site.dependencies()
    source = site.write(
        "flashinfer/kernels.c", "void _ZN3c104cuda9SetDeviceEa(char);\nvoid f(void) { _ZN3c104cuda9SetDeviceEa(0); }\n"
    )
    library = site.packages / "flashinfer/kernels.so"
    command = ["cc", "-shared", "-fPIC", "-Wl,-z,now", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    site.flashinfer("0.6.14", mamba=f"import ctypes; ctypes.CDLL({str(library)!r})")


def two_owners(site: Site) -> None:
    release("0.6.14")(site)
    record = "flashinfer/__init__.py,,\nflashinfer/version.py,,\n"
    site.dist("flashinfer", "0.2.3+cu121torch2.5")
    site.write("flashinfer-0.2.3+cu121torch2.5.dist-info/RECORD", record)
    site.write("flashinfer_python-0.6.14.dist-info/RECORD", record)
    site.remove(f"{MAMBA}/selective_state_update.py")


def write_at(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.touch()


GIB = 1024**3
PAUSE = "import time; time.sleep(1)"
"""Long enough for whoever watches the memory to have looked."""

CASES = [
    # -- nothing wrong --------------------------------------------------------------------------------------
    Case(name="works", build=release("0.6.14"), files=NOTHING),
    Case(name="oldest release with mamba", build=release("0.6.1"), files=NOTHING),
    Case(
        name="noise on stdout and stderr",
        build=running('import sys; print("{}" * 5000); print("noise", file=sys.stderr)'),
        files=NOTHING,
    ),
    Case(
        name="registered under its old name",
        build=then(release("0.6.14", registered=False), lambda site: site.dist("flashinfer", "0.6.14")),
        files=NOTHING,
        source="flashinfer-ai/flashinfer#794",
    ),
    Case(
        name="importable without metadata",
        build=release("0.6.14", registered=False),
        files=NOTHING,
        source="sgl-project/sglang#4812",
    ),
    Case(
        name="GPUs stay hidden from the import",
        build=running('import os\nassert os.environ["CUDA_VISIBLE_DEVICES"] == ""'),
        files=NOTHING,
        source="flashinfer-ai/flashinfer#4889",
    ),
    Case(
        name="jit-cache with a local tag",
        build=then(release("0.6.13"), companion("flashinfer-jit-cache", "0.6.13+cu130")),
        files=NOTHING,
        beside={"flashinfer-jit-toolchain": "false"},
    ),
    Case(
        name="0.6.1 takes 0.6.12 for its own",
        build=then(release("0.6.1"), companion("flashinfer-jit-cache", "0.6.12+cu129")),
        files=NOTHING,
    ),
    Case(
        name="no build metadata, nothing compared",
        build=then(release("0.6.13"), removes("flashinfer/_build_meta.py"), companion("flashinfer-cubin", "0.6.8")),
        files=NOTHING,
    ),
    # -- not installed --------------------------------------------------------------------------------------
    Case(
        name="not installed",
        build=lambda site: site.dependencies(),
        files="not-installed: absent",
        remedy=f"-m pip install {PIN}",
        says=SAYS,
        source="sgl-project/sglang#945",
    ),
    Case(
        name="not installed, default launch",
        build=lambda site: site.dependencies(),
        files="not-installed: absent",
        remedy=f"-m pip install {PIN}",
        says="ModuleNotFoundError: No module named 'flashinfer'",
        features=DEFAULT_LAUNCH,
        source="modal-labs/modal-examples#864",
    ),
    Case(
        name="not installed, older sentence",
        build=lambda site: site.dependencies(),
        files="not-installed: absent",
        says=OLD_SAYS,
        sglang="0.5.12.post1",
    ),
    Case(
        name="not installed, environment made by uv",
        build=lambda site: site.dependencies(),
        files="not-installed: absent",
        remedy="uv pip install --python ",
        says=SAYS,
        pip=False,
    ),
    Case(
        name="leftover data folder",
        build=writes("flashinfer/data/x"),
        files="not-installed: leftover-folder",
        remedy=AGAIN,
        says=SAYS,
    ),
    Case(
        name="leftover mamba folder",
        build=writes(f"{MAMBA}/x"),
        files="not-installed: leftover-folder",
        remedy=AGAIN,
        says=SCHEDULER_SAYS,
    ),
    Case(
        name="registered, files gone",
        build=lambda site: site.dist("FlashInfer_Python", "0.6.14"),
        files="not-installed: files-missing",
        remedy=AGAIN,
        says=SAYS,
        source="flashinfer-ai/flashinfer#788",
    ),
    Case(
        name="another interpreter than the server's",
        build=lambda site: site.dependencies(),
        files="unknown: probe-environment",
        seen=False,
        source="sgl-project/sglang#30612",
    ),
    # -- disabled -------------------------------------------------------------------------------------------
    Case(
        name="disabled by environment",
        build=release("0.6.14"),
        files="disabled-by-env: variable-set",
        remedy="unset SGLANG_IS_FLASHINFER_AVAILABLE",
        says=SAYS,
        environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "False"},
        source="sgl-project/sglang#6160",
    ),
    Case(
        name="disabled beside a broken package",
        build=then(release("0.6.14"), removes(MAMBA)),
        files="disabled-by-env: variable-set",
        says=SAYS,
        environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "0"},
        source="sgl-project/sglang#831",
    ),
    # -- no mamba module ------------------------------------------------------------------------------------
    Case(
        name="release without mamba",
        build=release("0.6.0"),
        files="mamba-missing: version-too-old",
        remedy=f"-m pip install {PIN}",
        says=SAYS,
        source="sgl-project/sglang#18070",
    ),
    Case(
        name="mamba folder removed",
        build=then(release("0.6.13"), removes(MAMBA)),
        files="import-failed: partial-install",
        remedy=AGAIN,
        says=SAYS,
    ),
    Case(
        name="mamba folder removed, default launch",
        build=then(release("0.6.13"), removes(MAMBA)),
        files="import-failed: partial-install",
        remedy=AGAIN,
        says="ImportError: cannot import name 'mamba' from partially initialized module 'flashinfer'",
        features=DEFAULT_LAUNCH,
    ),
    # -- the function ---------------------------------------------------------------------------------------
    Case(
        name="mamba/__init__ removed",
        build=then(release("0.6.13"), removes(f"{MAMBA}/__init__.py")),
        files="symbol-missing: empty-package",
        remedy=AGAIN,
        says="TypeError: 'module' object is not callable",
        source="vllm-project/vllm#36162",
    ),
    Case(
        name="mamba/__init__ empty",
        build=then(release("0.6.13"), writes(f"{MAMBA}/__init__.py")),
        files="symbol-missing: empty-package",
        says="TypeError: 'module' object is not callable",
    ),
    Case(
        name="symbol gone",
        build=then(release("0.6.13"), writes(f"{MAMBA}/__init__.py", "other = 1\n")),
        files="symbol-missing: absent",
        remedy="--mamba-backend triton",
        says=SCHEDULER_SAYS,
    ),
    Case(
        name="symbol no function",
        build=then(release("0.6.13"), writes(f"{MAMBA}/__init__.py", "selective_state_update = 3\n")),
        files=NOTHING,
        real="symbol-missing: not-callable",
        says="TypeError: 'int' object is not callable",
    ),
    # -- companions -----------------------------------------------------------------------------------------
    Case(
        name="cubin of another release",
        build=then(release("0.6.10"), companion("flashinfer-cubin", "0.6.8.post1")),
        files="cubin-mismatch: version-mismatch",
        remedy="-m pip install --no-deps flashinfer-cubin==0.6.10",
        says=mismatch("flashinfer-cubin", "0.6.8.post1", "0.6.10"),
        source="NVIDIA-NeMo/Export-Deploy#679",
    ),
    Case(
        name="stale cubin after an upgrade, default launch",
        build=then(release("0.6.14"), companion("flashinfer-cubin", "0.6.13")),
        files="cubin-mismatch: version-mismatch",
        remedy="-m pip uninstall -y flashinfer-cubin",
        says=mismatch("flashinfer-cubin", "0.6.13", "0.6.14"),
        features=DEFAULT_LAUNCH,
        source="flashinfer-ai/flashinfer#4781",
    ),
    Case(
        name="FlashInfer upgraded alone",
        build=then(
            release("0.6.15"),
            companion("flashinfer-cubin", "0.6.14"),
        ),
        files="cubin-mismatch: version-mismatch",
        remedy=f"-m pip install --no-deps {PIN}",
        says=mismatch("flashinfer-cubin", "0.6.14", "0.6.15"),
        source="sgl-project/sglang#10891",
    ),
    Case(
        name="cubin leftover folder",
        build=then(release("0.6.13"), writes("flashinfer_cubin/cubins/x")),
        files="cubin-mismatch: leftover-folder",
        remedy="remove the folder flashinfer_cubin",
        says=SAYS,
    ),
    Case(
        name="cubin ignored from 0.7.2 on",
        build=then(release("0.7.2"), companion("flashinfer-cubin", "0.6.13")),
        files="cubin-mismatch: ignored",
        remedy="-m pip uninstall -y flashinfer-cubin",
    ),
    Case(
        name="check bypassed, even by 0",
        build=then(release("0.6.14"), companion("flashinfer-cubin", "0.6.13")),
        files="cubin-mismatch: check-bypassed",
        environ={"FLASHINFER_DISABLE_VERSION_CHECK": "0"},
        source="NVIDIA/Megatron-LM#4700",
    ),
    Case(
        name="jit-cache of another release",
        build=then(release("0.6.11"), companion("flashinfer-jit-cache", "0.6.9+cu130")),
        files="jit-cache-mismatch: version-mismatch",
        remedy="-m pip uninstall -y flashinfer-jit-cache",
        says=mismatch("flashinfer-jit-cache", "0.6.9+cu130", "0.6.11"),
        source="lightseekorg/tokenspeed#284",
    ),
    Case(
        name="jit-cache bypassed",
        build=then(release("0.6.11"), companion("flashinfer-jit-cache", "0.6.9+cu130")),
        files="jit-cache-mismatch: check-bypassed",
        environ={"FLASHINFER_DISABLE_VERSION_CHECK": "1"},
        source="vllm-project/recipes#511",
    ),
    Case(
        name="jit-cache leftover folder",
        build=then(release("0.6.13"), writes("flashinfer_jit_cache/x")),
        files="jit-cache-mismatch: leftover-folder",
        says=SAYS,
    ),
    Case(
        name="0.7.1 does not take 0.7.12 for its own",
        build=then(release("0.7.1"), companion("flashinfer-jit-cache", "0.7.12+cu130")),
        files="jit-cache-mismatch: version-mismatch",
        says=mismatch("flashinfer-jit-cache", "0.7.12+cu130", "0.7.1"),
    ),
    # -- modules that are missing ---------------------------------------------------------------------------
    Case(
        name="runtime missing",
        build=without("tvm_ffi"),
        files="import-failed: dependency-missing",
        remedy="-m pip install apache-tvm-ffi",
        says=SAYS,
        source="Dao-AILab/flash-attention#2205",
    ),
    Case(
        name="several modules missing",
        build=without("tvm_ffi", "tqdm"),
        files="import-failed: dependency-missing",
        remedy="-m pip install apache-tvm-ffi tqdm",
        says=SAYS,
    ),
    Case(
        name="torch missing, default launch",
        build=without("torch"),
        files="import-failed: dependency-missing",
        remedy="-m pip install torch==2.11.0",
        says="ModuleNotFoundError: No module named 'torch'",
        features=DEFAULT_LAUNCH,
    ),
    Case(
        name="what a dependency needs is missing",
        build=then(release("0.6.14"), writes("requests/__init__.py", "import urllib3\n")),
        files=NOTHING,
        real="import-failed: dependency-missing",
        remedy="-m pip install urllib3",
        says=SAYS,
    ),
    Case(
        name="a part of FlashInfer missing",
        build=then(running("import flashinfer.artifacts"), writes("flashinfer/jit/__init__.py")),
        files=NOTHING,
        real="import-failed: partial-install",
        remedy=AGAIN,
        says=SAYS,
    ),
    Case(
        name="symbol's file removed",
        build=then(release("0.6.13"), removes(f"{MAMBA}/selective_state_update.py")),
        files="import-failed: partial-install",
        remedy=AGAIN,
        says=SAYS,
    ),
    Case(
        name="a name removed upstream",
        build=running("from flashinfer.jit import gen_selective_state_update_module"),
        files=NOTHING,
        real="import-failed: partial-install",
        says=SAYS,
        source="sgl-project/sglang#12204",
    ),
    Case(
        name="a file shadows the package",
        build=writes("flashinfer.py"),
        files="import-failed: shadowed",
        remedy="flashinfer.py away",
        says=SAYS,
    ),
    # -- files that are damaged -----------------------------------------------------------------------------
    Case(
        name="mamba/__init__ cut off",
        build=then(release("0.6.13"), writes(f"{MAMBA}/__init__.py", "from .selective_state import (\n")),
        files="import-failed: corrupt-file",
        remedy=AGAIN,
        says="SyntaxError: …",
    ),
    Case(
        name="an unrelated file cut off",
        build=then(release("0.6.13"), writes("flashinfer/jit/__init__.py", "def f(:\n")),
        files=NOTHING,
        real="import-failed: corrupt-file",
        remedy=AGAIN,
        says="SyntaxError: …",
    ),
    Case(
        name="a file of zeros",
        build=then(release("0.6.13"), writes("flashinfer/jit/__init__.py", "\0" * 100)),
        files=NOTHING,
        real="import-failed: corrupt-file",
        remedy=AGAIN,
        says="…",
        message="The file flashinfer/jit/__init__.py is damaged.",
    ),
    Case(
        name="a dependency's file of zeros",
        build=then(
            release("0.6.14"),
            lambda site: site.install("tqdm", "4.67.1", {"tqdm/__init__.py": "from . import a\n", "tqdm/a.py": "x"}),
            # As after a loss of power: it has its registered size.
            writes("tqdm/a.py", "\0"),
        ),
        files=NOTHING,
        real="import-failed: corrupt-file",
        remedy="-m pip install --force-reinstall --no-deps tqdm==4.67.1",
        says="…",
        message="The file tqdm/a.py is damaged.",
    ),
    Case(
        name="a dependency's compiled part missing",
        build=then(
            release("0.6.14"),
            lambda site: site.install("torch", "2.11.0", {"torch/__init__.py": "from torch._C import *\n"}),
        ),
        files=NOTHING,
        real="import-failed: partial-install",
        remedy="-m pip install --force-reinstall --no-deps torch==2.11.0",
        says=SAYS,
        message="A part of torch 2.11.0, which FlashInfer needs, is missing: torch._C.",
    ),
    Case(
        name="two distributions own the package",
        build=two_owners,
        files="import-failed: partial-install",
        remedy="uninstall -y flashinfer flashinfer-python && ",
        says=SAYS,
        source="vllm-project/vllm#22297",
    ),
    # -- compiled code --------------------------------------------------------------------------------------
    Case(
        name="symbol with old strings",
        build=running(loads("/x/a.abi3.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameERKSsb")),
        files=NOTHING,
        real="import-failed: abi-mismatch",
        remedy=f"install --force-reinstall {PIN} apache-tvm-ffi torch==2.11.0",
        says=SAYS,
        source="sgl-project/sglang#5100",
    ),
    Case(
        name="symbol with new strings amid talk of architectures",
        build=running(
            loads(
                "no build for compute capability 12.1\nx.so: undefined symbol: _ZN3c1013MessageLogger6streamB5cxx11Ev"
            )
        ),
        files=NOTHING,
        real="import-failed: abi-mismatch",
        says=SAYS,
        source="sgl-project/sglang#30562",
    ),
    Case(
        name="a real library that wants a name nobody defines",
        build=compiled,
        files=NOTHING,
        real="import-failed: abi-mismatch",
        says="OSError: …",
        source="sgl-project/sglang#7033",
    ),
    Case(
        name="NCCL of another CUDA major",
        build=running(loads("/x/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommResume")),
        files=NOTHING,
        real="import-failed: abi-mismatch",
        says=SAYS,
        source="GoogleCloudPlatform/scientific-computing-examples#157",
    ),
    Case(
        name="system too old",
        build=running(loads("/lib/libc.so.6: version `GLIBC_2.32' not found (required by /x/flashinfer/a.so)")),
        files=NOTHING,
        real="import-failed: system-too-old",
        says=SAYS,
        source="Dao-AILab/flash-attention#879",
    ),
    Case(
        name="library not found, but in a wheel",
        build=wheel_library,
        files=NOTHING,
        real="import-failed: shared-library-missing",
        remedy="nvidia/cuda_nvrtc/lib:$LD_LIBRARY_PATH",
        says="OSError: libsidecar_nvrtc.so.12: cannot open shared object file: No such file or directory",
        source="sgl-project/sglang#16052",
    ),
    Case(
        name="runtime library of another CUDA major",
        build=running(loads("libcudart.so.12: cannot open shared object file: No such file or directory")),
        files=NOTHING,
        real="import-failed: shared-library-missing",
        remedy="torch==2.11.0  # libcudart.so.12 is of CUDA 12, and torch is not",
        says=SAYS,
        source="sgl-project/sglang#18203",
    ),
    Case(
        name="a compiled file that may not be read",
        build=running(loads("/x/tvm_ffi/core.so: cannot open shared object file: Permission denied")),
        files=NOTHING,
        real="import-failed: permission",
        remedy="the right to use /x/tvm_ffi/core.so: `namei -l /x/tvm_ffi/core.so`",
        says=SAYS,
        message="is there and may not be opened",
    ),
    Case(
        name="a compiled file cut off",
        build=then(
            running(loads("/x/site-packages/tvm_ffi/core.so: file too short")),
            lambda site: site.dist("apache-tvm-ffi", "0.1.11"),
        ),
        files=NOTHING,
        real="import-failed: corrupt-file",
        remedy="-m pip install --force-reinstall --no-deps apache-tvm-ffi==0.1.11",
        says=SAYS,
        message="The compiled file tvm_ffi/core.so is damaged",
    ),
    Case(
        name="no driver library",
        build=running(loads("libcuda.so.1: cannot open shared object file: No such file or directory")),
        files=NOTHING,
        real="import-failed: shared-library-missing",
        remedy="its driver mount",
        says=SAYS,
        source="sgl-project/sglang#4778",
    ),
    # -- CUDA and torch -------------------------------------------------------------------------------------
    Case(
        name="torch without CUDA",
        build=cpu_torch,
        files="import-failed: torch-without-cuda",
        remedy="--force-reinstall torch==2.11.0",
        says=SAYS,
    ),
    Case(
        name="torch without CUDA, release that does not ask",
        build=then(lambda site: site.dependencies(cuda=None), lambda site: site.flashinfer("0.6.13")),
        files=NOTHING,
    ),
    Case(
        name="GPUs hidden by the probe",
        build=running('raise RuntimeError("No CUDA GPUs are available")'),
        files=NOTHING,
        real="unknown: devices-hidden",
    ),
    Case(
        name="no kernel image shows at no import",
        build=release("0.6.14"),
        files=NOTHING,
        source="sgl-project/sglang#7249",
    ),
    # -- surroundings ---------------------------------------------------------------------------------------
    Case(
        name="permission",
        build=running('raise PermissionError(13, "Permission denied", "/x")'),
        files=NOTHING,
        real="import-failed: permission",
        remedy="the right to use /x: `namei -l /x`",
        says="PermissionError: [Errno 13] Permission denied: '/x'",
    ),
    Case(
        name="I/O error",
        build=running('raise OSError(5, "Input/output error", "/x")'),
        files=NOTHING,
        real="import-failed: file-system",
        remedy="the health of the disk",
        says="OSError: [Errno 5] Input/output error: '/x'",
        message="I/O error",
    ),
    Case(
        name="read-only file system",
        build=running('raise OSError(30, "Read-only file system", "/x")'),
        files=NOTHING,
        real="import-failed: file-system",
        remedy="Mount that file system writable",
        says="OSError: [Errno 30] Read-only file system: '/x'",
        message="is on a read-only file system",
    ),
    Case(
        name="no such file",
        build=running('open("/nowhere/at/all")'),
        files=NOTHING,
        real="import-failed: file-system",
        remedy="is there and can be used",
        says="FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'",
        message="What it names is not there.",
    ),
    Case(
        name="too many open files",
        build=running('raise OSError(24, "Too many open files", "/x")'),
        files=NOTHING,
        real="unknown: probe-environment",
    ),
    Case(
        name="no space left",
        build=running('raise OSError(28, "No space left on device")'),
        files=NOTHING,
        real="unknown: probe-environment",
    ),
    Case(
        name="a failure in the import's own folder",
        build=running('import os; os.mkdir(os.environ["HOME"] + "/a"); os.mkdir(os.environ["HOME"] + "/a")'),
        files=NOTHING,
        real="unknown: probe-environment",
    ),
    Case(
        name="a variable that the import had not",
        build=running('import os; os.environ["VENDOR_LICENSE"]'),
        files=NOTHING,
        real="unknown: probe-environment",
        environ={"VENDOR_LICENSE": "x"},
    ),
    Case(
        name="variables of a pod explain nothing",
        build=running('raise KeyError("garbage")'),
        files=NOTHING,
        real="import-failed: exception",
        says="KeyError: 'garbage'",
        environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_PORT": "tcp://10.0.0.1:443", "HF_TOKEN": "hf_xyzw"},
    ),
    Case(
        name="code at start may bring what is missing",
        build=then(without("tvm_ffi"), writes("_apache_tvm_ffi_editable.pth", "import types\n")),
        files="unknown: start-code",
        real="import-failed: dependency-missing",
        says=SAYS,
    ),
    Case(
        name="code at start brings what is missing",
        build=then(
            without("tvm_ffi"),
            writes("added.pth", 'import sys; sys.path.append(sys.prefix + "/added")\n'),
            lambda site: write_at(site.root / "added/tvm_ffi/__init__.py"),
        ),
        files="unknown: start-code",
        real=NOTHING,
    ),
    Case(
        name="cache under a file",
        build=release("0.6.14"),
        files="import-failed: cache-unwritable",
        remedy="FLASHINFER_WORKSPACE_BASE",
        says="NotADirectoryError: [Errno 20] Not a directory",
        environ={"HOME": "{site}/pyvenv.cfg"},
        process=True,
    ),
    Case(
        name="log level that is no number",
        build=running('import os; int(os.environ["FLASHINFER_LOGLEVEL"])'),
        files="unknown: variable-suspect",
        real="import-failed: bad-variable",
        remedy="unset FLASHINFER_LOGLEVEL",
        says="ValueError: invalid literal for int() with base 10: 'abc'",
        environ={"FLASHINFER_LOGLEVEL": "abc"},
    ),
    Case(
        name="architectures that are none",
        build=running('import os; major, minor = os.environ["FLASHINFER_CUDA_ARCH_LIST"].split(".")'),
        files="unknown: variable-suspect",
        real="import-failed: bad-variable",
        says="ValueError: not enough values to unpack (expected 2, got 1)",
        environ={"FLASHINFER_CUDA_ARCH_LIST": "garbage"},
    ),
    Case(
        name="log file that cannot be opened",
        build=then(
            running("import flashinfer.api_logging"),
            writes("flashinfer/api_logging.py", 'import os; open(os.environ["FLASHINFER_LOGDEST"], "a")\n'),
        ),
        files=NOTHING,
        real="import-failed: bad-variable",
        remedy="unset FLASHINFER_LOGDEST",
        says="FileNotFoundError: …",
        environ={"FLASHINFER_LOGDEST": "/nowhere/at/all"},
    ),
    Case(
        name="any exception",
        build=running('raise KeyError("garbage")'),
        files=NOTHING,
        real="import-failed: exception",
        remedy=AGAIN,
        says="KeyError: 'garbage'",
    ),
    # -- the process ----------------------------------------------------------------------------------------
    Case(name="sys.exit", build=running("import sys; sys.exit(3)"), files=NOTHING, real="import-crashed: exit"),
    Case(name="os._exit", build=running("import os; os._exit(5)"), files=NOTHING, real="import-crashed: exit"),
    # So ends the probe where it fails itself.
    Case(
        name="os._exit without a failure",
        build=running("import os; os._exit(0)"),
        files=NOTHING,
        real="unknown: import-not-allowed",
        message="ended without an answer",
    ),
    Case(name="abort", build=running("import os; os.abort()"), files=NOTHING, real="import-crashed: signal"),
    Case(
        name="segmentation fault",
        build=running("import ctypes; ctypes.string_at(0)"),
        files=NOTHING,
        real="import-crashed: signal",
    ),
    Case(
        name="killed for memory",
        build=running(f"{PAUSE}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        files=NOTHING,
        real="unknown: insufficient-memory",
        memory_used=8,
        source="flashinfer-ai/flashinfer#4901",
    ),
    Case(
        name="out of memory",
        build=running(f"{PAUSE}; raise MemoryError"),
        files=NOTHING,
        real="unknown: insufficient-memory",
        memory_used=8,
    ),
    Case(
        name="killed by somebody",
        build=running("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        files=NOTHING,
        real="unknown: import-not-allowed",
        message="was killed from outside",
        memory_used=1,
    ),
    Case(
        name="MemoryError with memory to spare",
        build=running("raise MemoryError"),
        files=NOTHING,
        real="unknown: import-not-allowed",
        message="where memory was not short",
        memory_used=1,
    ),
    Case(
        name="hang",
        build=running("import time; time.sleep(600)"),
        files=NOTHING,
        real="import-timeout: no-progress",
        limits=ImportLimits(stall=3.0),
    ),
    # -- building and fetching kernels ----------------------------------------------------------------------
    Case(
        name="CUDA_HOME with a colon",
        build=release("0.6.14"),
        files=NOTHING,
        environ={"CUDA_HOME": ":/usr/local/cuda-12.8"},
        beside={"flashinfer-jit-toolchain": "true: cuda-home-malformed"},
        source="flashinfer-ai/flashinfer#1904",
    ),
    Case(
        name="no compiler under CUDA_HOME",
        build=then(release("0.6.14"), lambda site: (site.root / "cuda").mkdir()),
        files=NOTHING,
        environ={"CUDA_HOME": "{site}/cuda"},
        beside={"flashinfer-jit-toolchain": "true: nvcc-missing"},
        source="flashinfer-ai/flashinfer#1919",
    ),
    Case(
        name="no precompiled kernels",
        build=release("0.6.14"),
        files=NOTHING,
        beside={"flashinfer-cubins-not-installed": "true: downloads-at-run-time"},
        source="sgl-project/sglang#10933",
    ),
    Case(
        name="precompiled kernels in their package",
        build=then(release("0.6.13"), companion("flashinfer-cubin", "0.6.13")),
        files=NOTHING,
        beside={"flashinfer-cubins-not-installed": "false"},
    ),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case."""

    by_files: FlashinferFacts
    by_import: FlashinferFacts


class Table:
    """The cases that were run, each once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._outcomes: dict[str, Outcome] = {}

    def outcome(self, case: Case) -> Outcome:
        if case.name not in self._outcomes:
            self._outcomes[case.name] = asyncio.run(self._run(case))
        return self._outcomes[case.name]

    async def _run(self, case: Case) -> Outcome:
        site = Site(self._root / str(len(self._outcomes)))
        if case.sglang is not None:
            site.dist("sglang", case.sglang, ("flashinfer_python[cu13]==0.6.14", "torch==2.11.0"))
        if case.pip:
            site.dist("pip", "25.0")
        case.build(site)
        target = site.target()
        environ = {**(target.environ or {}), **case.environ}
        environ = {name: value.replace("{site}", str(site.root)) for name, value in environ.items()}
        target = replace(target, environ=environ, pid=os.getpid() if case.process else None)
        if not case.seen:
            target = replace(target, scope=Scope.IMAGE, environ=None, python_source="well-known-path")
        isolation = Isolation()
        memory = None
        if case.memory_used is not None:
            memory = Cgroup(site.root / "memory", 2, str(10 * GIB), case.memory_used * GIB).limit()
        sources = Sources(
            isolation, RealClock(), Settings(), placement=Placement.CONTAINER, memory=memory, limits=case.limits
        )
        try:
            by_files = await facts_of(sources, target, imported=False)
            return Outcome(by_files, await facts_of(sources, target, imported=True))
        finally:
            await sources.close()
            await isolation.close()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory.mktemp("table"))


def findings(case: Case, facts: FlashinferFacts) -> dict[str, Any]:
    return judged(facts, server=view(features=case.features))


def verdict(case: Case, facts: FlashinferFacts) -> str:
    """The one cause as the table writes it."""
    found = {code: finding for code, finding in findings(case, facts).items() if code in CODES}
    active = [finding for finding in found.values() if finding.status is Status.TRUE]
    assert len(active) <= 1
    if active:
        return f"{active[0].code.removeprefix('flashinfer-')}: {active[0].reason}"
    undecided = found["flashinfer-import-failed"]
    if facts.evidence is not None and undecided.status is Status.UNKNOWN:
        return f"unknown: {undecided.reason}"
    importable = {sample.family: sample.value for sample in PROBE.samples(facts)}.get("module_importable")
    return NOTHING if importable == 1 else f"unknown: {undecided.reason}"


def needs(case: Case) -> None:
    if case.build is compiled and shutil.which("cc") is None:
        pytest.skip("needs a C compiler")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_cause(case: Case, table: Table) -> None:
    """A broken environment has the one cause, by its files and by a real import, that was put into it."""
    needs(case)
    outcome = table.outcome(case)
    assert verdict(case, outcome.by_files) == case.files
    assert verdict(case, outcome.by_import) == (case.real or case.files)
    for facts in (outcome.by_files, outcome.by_import):
        for finding in findings(case, facts).values():
            kind = next(kind for kind in PROBE.conditions if kind.code == finding.code)
            assert finding.status is Status.FALSE or finding.reason in kind.reasons
            assert finding.status is not Status.TRUE or (finding.message and finding.remedy)
    found = findings(case, outcome.by_import)
    lead = next((one for code, one in found.items() if code in CODES and one.status is Status.TRUE), None)
    assert case.message in (lead or found["flashinfer-import-failed"]).message
    for code, expected in case.beside.items():
        finding = findings(case, outcome.by_import)[code]
        shown = str(finding.status) if finding.status is Status.FALSE else f"{finding.status}: {finding.reason}"
        assert shown == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_remedy_and_sentence(case: Case, table: Table) -> None:
    """The cause comes with the command that repairs it, and with the words that the server's log has for it."""
    needs(case)
    active = [
        finding
        for code, finding in findings(case, table.outcome(case).by_import).items()
        if code in CODES and finding.status is Status.TRUE
    ]
    said = active[0].sglang_says if active else None
    remedy = active[0].remedy if active else ""
    assert case.remedy in remedy
    if case.says is not None and case.says.endswith("…"):
        assert said is not None
        assert said.startswith(case.says[:-1])
    else:
        assert said == case.says


def test_no_wrong_cause(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all environments the import names the right cause, and the files the right one or none."""
    counts: Counter[tuple[str, str]] = Counter()
    broken, wrong = 0, []
    for case in CASES:
        if case.build is compiled and shutil.which("cc") is None:
            continue
        outcome = table.outcome(case)
        expected = case.real or case.files
        broken += expected != NOTHING
        for how, facts in (("files", outcome.by_files), ("import", outcome.by_import)):
            said = verdict(case, facts)
            if said == expected:
                counts[how, "right"] += 1
            elif said == NOTHING or said.startswith("unknown"):
                counts[how, "not seen"] += 1
            else:
                counts[how, "wrong"] += 1
                wrong.append((case.name, how, said, expected))
    reported = sum(bool(case.source) for case in CASES)
    lines = [
        f"\n{len(CASES)} environments, {broken} of them broken, {reported} after public reports",
        f"{'':8}{'right':>10}{'not seen':>10}{'wrong':>10}",
    ]
    kinds = ("right", "not seen", "wrong")
    lines += [f"{how:8}" + "".join(f"{counts[how, kind]:>10}" for kind in kinds) for how in ("files", "import")]
    with capsys.disabled():
        sys.stdout.write("\n".join(lines) + "\n")
    assert wrong == []
    assert counts["import", "not seen"] == 0
    assert broken >= 40
