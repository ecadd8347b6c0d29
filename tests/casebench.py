"""A machine on which a fault that people reported is set up, and what a real check prints of it.

The check is the agent's own: every probe collects, the judge judges, the text is rendered. What is made up lies
outside: the packages, NVML's library, /proc, /dev, and the server's answers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidecar import report, text
from sidecar.app import Agent
from sidecar.config import Image, ImportPolicy, Settings
from sidecar.model import Placement, Processes
from tests.fakes import kernel
from tests.fakes.nvml import Scenario, build
from tests.fakes.releases import install, load, placed, proc_tree, toolkit
from tests.fakes.sglang import FakeSglang, serve
from tests.fakes.site import Site, driver_library

RELEASE = "0.5.16"
DRIVER = "580.159.04"
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (root@host)\n"
MOMENTARY = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ": "2026-01-31T12:00:00Z",
    r"\b\d+ s ago": "6 s ago",
    r"lib/python3\.\d+/": "lib/python3.12/",
}
"""What is of this run alone, and what is shown instead."""
SHOWN_AT = "/opt/venv"
"""Where the environment lies in what is shown; in truth it is in a folder of the moment."""


FLASH_ATTN = """\
import torch
try:
    from sgl_kernel import flash_ops
except:
    raise ImportError("Can not import FA3 in sgl_kernel. Please check your installation.")
def flash_attn_varlen_func(): ...
"""
"""As in the kernel wheel, where the bare except hides the cause from the message."""
CUTE = "import torch\nimport cutlass, quack, tvm_ffi\nimport cuda.bindings\ndef flash_attn_varlen_func(): ...\n"


def importable(site: Site) -> None:
    """Make what the environment only describes pass a real import: the kernel wheel, FlashAttention 3 and 4."""
    site.remove("sgl_kernel")
    kernel.python_part(site, "0.4.5")
    for folder in ("sm90", "sm100"):
        kernel.operations(site, folder)
    site.write("sgl_kernel/flash_attn.py", FLASH_ATTN)
    site.write("sgl_kernel/flash_ops.py")
    site.write("sglang/jit_kernel/flash_attn/cute/__init__.py", CUTE)
    register(site)


def register(site: Site) -> None:
    """The kernel wheel as pip would have installed what is there."""
    site.dist("sglang-kernel", "0.4.5")
    files = [path for path in (site.packages / "sgl_kernel").rglob("*") if path.is_file()]
    lines = [f"{path.relative_to(site.packages)},,\n" for path in files]
    site.write("sglang_kernel-0.4.5.dist-info/RECORD", "".join(lines))


@dataclass(slots=True)
class Machine:
    """One with an SGLang 0.5.16 that works on an H200, until a case breaks it.

    ``flags`` are those of the launch that is judged, ``assignments`` the variables in front of it. With ``running``
    there is a server instead: a host's agent looks at ``processes`` and asks ``server``.
    """

    folder: Path
    library: Path
    site: Site
    nvml: Scenario
    flags: list[str] = field(default_factory=list)
    assignments: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    running: bool = False
    server: FakeSglang | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, library: Path) -> Machine:
        """A healthy one."""
        site = install(folder / "environment", RELEASE)
        site.companion("flashinfer-cubin", "0.6.14")
        importable(site)
        machine = cls(folder, library, site, Scenario(folder / "scenario", gpus=1))
        driver_library(folder, "driver", DRIVER)
        cuda = toolkit(folder / "cuda", "13.0")
        machine.environ = {
            "PATH": os.defpath,
            "HOME": str(folder),
            "LD_LIBRARY_PATH": str(folder / "driver"),
            "CUDA_HOME": str(cuda),
        }
        machine.module(DRIVER)
        return machine

    # -- what a case changes --------------------------------------------------------------------------

    def module(self, version: str | None, gpus: int = 1) -> None:
        """The kernel module that is loaded; None: there is none."""
        driver = self.folder / "proc" / "driver" / "nvidia"
        if version is None:
            driver.rename(self.folder / "no-module")
            return
        for index in range(gpus):
            (driver / "gpus" / f"0000:00:{index + 6:02x}.0").mkdir(parents=True, exist_ok=True)
        (driver / "version").write_text(MODULE.format(version=version))

    def driver(self, version: str, cuda: int) -> None:
        """Another driver as a whole; ``cuda`` is 12040 for CUDA 12.4."""
        self.module(version)
        self.nvml.set(driver_version=version, cuda_driver_version=cuda)
        self.library = build(self.folder / "nvml", version)
        driver_library(self.folder, "usr/lib/gpu", version)
        self.environ["LD_LIBRARY_PATH"] = str(self.folder / "usr/lib/gpu")

    def gpu(self, name: str, capability: int, profile: str = "rtx4090") -> None:
        """Another GPU than an H200; ``capability`` is 86 for 8.6."""
        self.nvml.set(profile=profile, name=name, compute_capability=capability)

    def serves(self, **info: Any) -> None:
        """A server runs, with these values in its answer."""
        self.running = True
        self.processes = placed(load(RELEASE, "processes.json")["processes"], self.site)
        answer = load(RELEASE, "server_info.json") | info
        for state in answer["internal_states"]:
            state.update(info)
        self.server = FakeSglang(info=answer, model_info=load(RELEASE, "model_info.json"))

    # -- what comes of it -----------------------------------------------------------------------------

    async def check(self, steps: Sequence[Callable[[Machine], None]] = ()) -> Checked:
        """Look once; then after each step once more, by the same agent."""
        async with AsyncExitStack() as stack:
            settings = await self._settings(stack)
            environ = {**self.environ, "FAKE_NVML_SCENARIO": str(self.nvml.path)}
            environ["LD_LIBRARY_PATH"] = f"{self.environ.get('LD_LIBRARY_PATH', '')}:{self.library}".strip(":")
            agent = await stack.enter_async_context(
                Agent.create(settings, once=True, environ=environ, proc=self.folder / "proc", dev=self.folder / "dev")
            )
            snapshot = await agent.check()
            for step in steps:
                step(self)
                snapshot = await agent.check()
            shown = report.encode(report.build(snapshot, agent.catalog)).decode()
        for path, instead in ((self.site.root, SHOWN_AT), (self.folder, "")):
            shown = shown.replace(str(path), instead)
        if self.server is not None:
            shown = shown.replace(self.server.url, "http://127.0.0.1:30000")
        for pattern, instead in MOMENTARY.items():
            shown = re.sub(pattern, instead, shown)
        return Checked(json.loads(shown))

    async def _settings(self, stack: AsyncExitStack) -> Settings:
        values: dict[str, Any] = {"placement": Placement.HOST, "import_policy": ImportPolicy.ALWAYS}
        if not self.running:
            launch = (*self.assignments, self.site.python, "-m", "sglang.launch_server", "--model-path", "m")
            values |= {"processes": Processes.HIDDEN, "launch": (*launch, *self.flags)}
            return Settings(**(values | self.settings))
        proc_tree(self.folder / "of-server", self.processes, self.environ)
        (self.folder / "of-server" / "proc" / "driver").rename(self.folder / "unused")
        (self.folder / "proc").rename(self.folder / "of-machine")
        (self.folder / "of-machine" / "driver").rename(self.folder / "of-server" / "proc" / "driver")
        (self.folder / "of-server" / "proc").rename(self.folder / "proc")
        if self.server is not None:
            await stack.enter_async_context(serve(self.server))
            values |= {"server_url": self.server.url, "explicit": frozenset({"server_url"})}
        if self.processes:
            values["server_pid"] = self.processes[0]["pid"]
        values |= {"image": Image.SERVER, "processes": Processes.SHARED}
        return Settings(**(values | self.settings))


@dataclass(frozen=True, slots=True)
class Checked:
    """A finished check."""

    report: dict[str, Any]

    @property
    def active(self) -> tuple[str, ...]:
        """The codes that a person would be told of."""
        return tuple(one["code"] for one in self.report["conditions"] if one["active"])

    @property
    def text(self) -> str:
        """What is printed, up to the facts and versions, which are the same for all."""
        whole = text.render(self.report, verbose=False)
        heads = ("verdict ", "readiness ")
        lines = whole.splitlines()
        end = next(number for number, line in enumerate(lines) if line.startswith(heads))
        return "\n".join(lines[:end]).strip()

    def fact(self, name: str) -> str:
        """A line of the facts, such as that of ``server``."""
        whole = text.render(self.report, verbose=False)
        return next(line for line in whole.splitlines() if line.startswith(f"{name} "))
