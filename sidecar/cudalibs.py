"""What runs on what: CUDA builds on drivers, and builds for GPU architectures on GPUs.

Pure functions over version texts, and two published tables. Everything answers True, False or None for unknown; what
is not in a table is unknown, never a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from msgspec import Struct

Version = tuple[int, ...]
Capability = tuple[int, int]

MINIMUM_DRIVER: Final = MappingProxyType({11: "450.80.02", 12: "525.60.13", 13: "580.65.06"})
"""Oldest Linux driver for each CUDA major, by minor-version compatibility.

Source: docs.nvidia.com, CUDA Compatibility, "Minor Version Compatibility" (11.x >= 450, 12.x >= 525, 13.x >= 580)
and the CUDA Toolkit Release Notes, table "Minimum Required Driver Version for CUDA Minor Version Compatibility".
"""


def version(text: str | None) -> Version | None:
    """Read numbers separated by dots ("13.0", "580.65.06"); None for anything else."""
    if text is None or not re.fullmatch(r"\d{1,4}(?:\.\d{1,4}){0,3}", text):
        return None
    return tuple(int(part) for part in text.split("."))


def is_older(one: str | None, other: str | None) -> bool | None:
    """Whether driver version ``one`` is older than ``other``; None where either is no version.

    Compared as far as both go: NVML prints the driver 570.124.06 as 570.124.
    """
    first, second = version(one), version(other)
    if first is None or second is None:
        return None
    length = min(len(first), len(second))
    return first[:length] < second[:length]


def minimum_driver(cuda: str | None) -> str | None:
    """Oldest driver that runs a build for this CUDA version, or None for a major that is not in the table."""
    wanted = version(cuda)
    return None if wanted is None else MINIMUM_DRIVER.get(wanted[0])


def driver_runs(cuda: str | None, driver: str | None, driver_cuda: str | None) -> bool | None:
    """Whether a driver runs a build for a CUDA version, forward-compatibility packages aside.

    ``driver`` is the version of the kernel's driver, ``driver_cuda`` the CUDA version that NVML states for it. From
    CUDA 11 on any driver of a major runs every minor of it. The driver's own version decides where the table knows
    the major: NVML's CUDA version is that of the ``libcuda`` that it finds, which may be another. None as well
    where the two contradict each other to the build's cost: then only the server's own ``libcuda`` can tell.
    """
    wanted = version(cuda)
    if wanted is None or wanted[0] < min(MINIMUM_DRIVER):
        # Before CUDA 11 the minor counts; no SGLang was ever built for that.
        return None
    stated = version(driver_cuda)
    by_statement = None if stated is None else stated[0] >= wanted[0]
    branch = version(driver)
    if branch is None or wanted[0] not in MINIMUM_DRIVER:
        return by_statement
    # By the branch: its early betas differ, and are told by NVML's own statement.
    by_driver = branch[0] >= int(MINIMUM_DRIVER[wanted[0]].partition(".")[0])
    if by_driver and by_statement is False:
        return None
    return by_driver


# -- architectures ----------------------------------------------------------------------------------


class Build(Struct, frozen=True, kw_only=True):
    """GPU architectures that a binary was built for.

    ``sure`` in every release that the entry stands for, ``some`` in some of them only. ``ptx`` is the architecture
    whose intermediate code is in it, from which newer GPUs can be served; ``ptx_sure`` whether in every release.
    """

    sure: tuple[Capability, ...]
    some: tuple[Capability, ...] = ()
    ptx: Capability | None = None
    ptx_sure: bool = False


_UP_TO_HOPPER: Final = ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (9, 0))
_BLACKWELL: Final = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
_X86: Final = {
    (11, 8): Build(sure=_UP_TO_HOPPER, some=((3, 7),)),
    (12, 1): Build(sure=_UP_TO_HOPPER),
    (12, 4): Build(sure=_UP_TO_HOPPER),
    (12, 6): Build(sure=_UP_TO_HOPPER),
    (12, 8): Build(sure=_BLACKWELL, some=((7, 0),), ptx=(12, 0)),
    (12, 9): Build(sure=_BLACKWELL, some=((7, 0),), ptx=(12, 0)),
    (13, 0): Build(sure=_BLACKWELL, ptx=(12, 0), ptx_sure=True),
    (13, 2): Build(sure=_BLACKWELL, ptx=(12, 0), ptx_sure=True),
}
_ARM: Final = {
    (12, 6): Build(sure=((9, 0),), some=((8, 0),)),
    (12, 8): Build(sure=((9, 0), (10, 0), (12, 0)), some=((8, 0),), ptx=(12, 0)),
    (12, 9): Build(sure=((9, 0), (10, 0), (12, 0)), some=((8, 0),), ptx=(12, 0)),
    (13, 0): Build(sure=((8, 0), (9, 0), (10, 0), (11, 0), (12, 0)), ptx=(12, 0), ptx_sure=True),
    (13, 2): Build(sure=((8, 0), (9, 0), (10, 0), (11, 0), (12, 0)), ptx=(12, 0), ptx_sure=True),
}
_FIRST_TORCH: Final = (2, 4)
_LAST_TORCH: Final = (2, 14)
"""Releases of torch that the tables stand for, whose published lists agree but for what ``some`` says.

Sources: pytorch/pytorch RELEASE.md, "PyTorch CUDA Support Matrix" (2.12 to 2.14); its .ci/manywheel/build_cuda.sh
(2.8 to 2.11); lists that torch itself printed in pytorch/pytorch#182250 (2.10 and 2.11) and #157517 (2.8);
moi90/pytorch_compute_capabilities (2.5 to 2.7).
"""


def torch_build(torch: str | None, cuda: str | None, machine: str) -> Build | None:
    """Look up what a published wheel of torch was built for, on a ``machine`` as uname names it; else None.

    A published wheel is known by its local tag, which names its CUDA version. Builds of NVIDIA's containers, of
    distributions and of one's own carry none, or another, and are built for other GPUs.
    """
    wanted = version(cuda)
    match = re.fullmatch(r"(\d+)\.(\d+)\.\d+\+cu(\d{3})", torch or "")
    if match is None or wanted is None or len(wanted) < 2 or match[3] != f"{wanted[0]}{wanted[1]}":
        return None
    if not _FIRST_TORCH <= (int(match[1]), int(match[2])) <= _LAST_TORCH:
        return None
    tables = {"x86_64": _X86, "aarch64": _ARM}
    return tables.get(machine, {}).get((wanted[0], wanted[1]))


def capability(text: str | None) -> Capability | None:
    """Read a compute capability ("9.0")."""
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def build_runs(build: Build | None, gpu: Capability) -> bool | None:
    """Whether a build has code for a GPU: of its own major and no newer minor, or intermediate code of an older one."""
    if build is None:
        return None
    if _serves(build.sure, gpu) or (build.ptx_sure and build.ptx is not None and build.ptx <= gpu):
        return True
    if _serves(build.some, gpu) or (build.ptx is not None and build.ptx <= gpu):
        return None
    return False


def _serves(architectures: Iterable[Capability], gpu: Capability) -> bool:
    return any(major == gpu[0] and minor <= gpu[1] for major, minor in architectures)


def kernel_runs(
    folders: tuple[str, ...], gpu: Capability, *, plain: bool, kernel: str | None, cuda: str | None, machine: str
) -> bool | None:
    """Whether the kernel wheel has code for a GPU. None for releases whose builds are not known.

    ``kernel`` is its version, whose local tag may name the CUDA version, else ``cuda`` (torch's) is taken for it: a
    wheel for another major does not load at all. From the folders on, ``import sgl_kernel`` loads sm90 for exactly
    9.0 and sm100 for every other GPU, and the wheel holds no intermediate code. Sources: sgl_kernel's load_utils.py
    and sgl-kernel/CMakeLists.txt in sgl-project/sglang.
    """
    if not folders:
        return None
    wanted = "sm90" if gpu == (9, 0) else "sm100"
    if wanted not in folders:
        return None if plain else False
    if gpu < (8, 0):
        return False
    if gpu[0] == 9:
        return True
    if gpu[0] == 8:
        # On other machines nothing below 9.0 is built by default.
        return True if machine == "x86_64" else None
    tag = re.search(r"\+cu(\d{2})(\d)(?!\d)", kernel or "")
    built_for = (int(tag[1]), int(tag[2])) if tag else version(cuda)
    if built_for is None:
        return None
    if built_for < (12, 8):
        return False
    if gpu in {(10, 0), (12, 0)} or (gpu == (10, 3) and built_for >= (13, 0)):
        return True
    return None


def shown(capabilities: Iterable[Capability]) -> str:
    """Write architectures as torch prints them: sm_80, sm_90."""
    return ", ".join(f"sm_{major}{minor}" for major, minor in sorted(capabilities))
