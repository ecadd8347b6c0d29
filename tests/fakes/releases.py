"""Environments and servers of SGLang's releases, from what tests/captures/make_releases.py took from their wheels."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.fakes.proc import BOOT, MapLine, ProcTree
from tests.fakes.sglang import CAPTURES
from tests.fakes.site import Site

RELEASES = CAPTURES / "releases"
NAMES = sorted((path.name for path in RELEASES.iterdir()), key=Version)
PREFIX = "/srv/env"
"""Where the environment lies in the captures."""

OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)  \n"

GPUS: Mapping[str, Mapping[str, str | int]] = {
    "a100": {"profile": "a100"},
    "h100": {"profile": "h100"},
    "h200": {"profile": "h200"},
    "b200": {"profile": "b200"},
    "rtx5090": {"profile": "rtx4090", "name": "NVIDIA GeForce RTX 5090", "compute_capability": 120},
}
"""The properties that make the fake NVML library answer for each."""


def load(release: str, name: str) -> Any:
    """A file of a release's capture."""
    return json.loads((RELEASES / release / name).read_text())


def install(root: Path, release: str, changes: Mapping[str, str | None] | None = None) -> Site:
    """An environment with everything that a release requires, after ``changes`` (None takes a distribution away).

    The packages are stubs with the names, versions, requirements and module files of the real ones.
    """
    described = load(release, "environment.json")
    versions: dict[str, str] = {
        name: version
        for name, version in {**described["distributions"], **(changes or {})}.items()
        if version is not None
    }
    requires = tuple((RELEASES / release / "requires.txt").read_text().splitlines())
    site = Site(root)
    for name, version in versions.items():
        site.dist(name, version, requires if name == "sglang" else ())
    site.dependencies(cuda=described["torch_cuda"])
    tag = "cu" + described["torch_cuda"].replace(".", "")
    text = f"from typing import Optional\n__version__ = '{versions['torch']}+{tag}'\n"
    site.write("torch/version.py", text + f"cuda: Optional[str] = '{described['torch_cuda']}'\n")
    # The module of nvidia-ml-py is a file.
    site.remove("pynvml")
    site.write("pynvml.py")
    site.write("sglang/__init__.py")
    site.write("sglang/launch_server.py", "import sglang\n")
    for path in described["modules"]:
        site.write(path)
    _flashinfer(site, versions)
    _kernel(site, versions, described)
    _cute(site, versions)
    if "ninja" in versions:
        (site.root / "bin" / "ninja").symlink_to("/bin/true")
    return site


def _flashinfer(site: Site, versions: Mapping[str, str]) -> None:
    if (version := versions.get("flashinfer-python")) is not None:
        site.flashinfer(version, registered=False)
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        if (version := versions.get(name)) is not None:
            site.companion(name, version)


def _kernel(site: Site, versions: Mapping[str, str], described: Mapping[str, Any]) -> None:
    """The kernel wheel, under the name that its release has."""
    name = next((name for name in ("sglang-kernel", "sgl-kernel") if name in versions), None)
    if name is None:
        return
    folders = ("sm100", "sm90") if any(one.startswith("sm") for one in described["kernel"]) else ()
    site.kernel(*folders, plain=not folders)
    paths = ["sgl_kernel/flash_ops.abi3.so", "sgl_kernel/flash_attn.py"]
    if Version("0.5.3") <= Version(versions["sglang"]) < Version("0.5.9"):
        # These bring FlashAttention 4 with them.
        paths += ["sgl_kernel/_fa4_interface.py", "flash_attn/cute/__init__.py", "flash_attn/cute/interface.py"]
    for path in paths:
        site.write(path)
    record = site.packages / f"{name.replace('-', '_')}-{versions[name]}.dist-info" / "RECORD"
    record.write_text("".join(f"{path},,\n" for path in ["sgl_kernel/__init__.py", *paths]))


def _cute(site: Site, versions: Mapping[str, str]) -> None:
    """What FlashAttention 4 is built on."""
    if "nvidia-cutlass-dsl" in versions:
        site.write("nvidia_cutlass_dsl/python_packages/cutlass/__init__.py")
        site.write("nvidia_cutlass_dsl.pth", "nvidia_cutlass_dsl/python_packages\n")
    for name, path in (
        ("quack-kernels", "quack/__init__.py"),
        ("cuda-bindings", "cuda/bindings/__init__.py"),
        ("flash-attn-4", "flash_attn/cute/__init__.py"),
        ("flash-attn-4", "flash_attn/cute/interface.py"),
        ("einops", "einops/__init__.py"),
    ):
        if name in versions:
            site.write(path)


def toolkit(folder: Path, release: str) -> Path:
    """A CUDA toolkit of a release, so that this machine's own is not looked at."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (folder / "bin" / "nvcc").chmod(0o755)
    (folder / "version.json").write_text(json.dumps({"cuda": {"version": f"{release}.0"}}))
    (folder / "include").mkdir()
    major, _, minor = release.partition(".")
    (folder / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {int(major) * 1000 + int(minor) * 10}\n")
    (folder / "include" / "cuda_runtime.h").write_text("")
    return folder


def placed(processes: list[dict[str, Any]], site: Site) -> list[dict[str, Any]]:
    """The processes of a capture, with the environment where it lies."""
    packages = f"{PREFIX}/lib/python3.12/site-packages"
    text = json.dumps(processes).replace(packages, str(site.packages)).replace(PREFIX, str(site.root))
    moved: list[dict[str, Any]] = json.loads(text)
    return moved


def proc_tree(folder: Path, processes: list[dict[str, Any]], environ: Mapping[str, str]) -> Path:
    """A /proc that shows the processes of a capture, all of this process's user and on the same files.

    ``environ`` is the main process's; its children's is written over by their titles. They started after their
    packages were installed, which has only just happened.
    """
    tree = ProcTree(folder)
    for one in processes:
        readable = one is processes[0] and one.get("environ_ok", True)
        text = "".join(f"{name}={value}\0" for name, value in environ.items()).encode()
        tree.process(
            one["pid"],
            one["cmdline"],
            parent=one["ppid"],
            name=one["name"],
            started=time.time() - BOOT + 60,
            uids=[os.geteuid()] * 4,
            gids=[os.getegid()] * 4,
            environ=text if readable else bytes(len(text)),
            # No device and no inode, which would have to be those of a file on the disk.
            maps=[MapLine(path, inode=0, device="00:00") for path in one["maps"]],
        )
    driver = tree.proc / "driver" / "nvidia"
    (driver / "gpus" / "0000:00:06.0").mkdir(parents=True)
    (driver / "version").write_text(OPEN_MODULE)
    return tree.proc
