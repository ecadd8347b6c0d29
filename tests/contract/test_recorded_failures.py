"""Launches of SGLang 0.5.16 that failed for real: the preflight names the recorded cause before the launch.

The captures hold what each printed at its end, after 14 to 71 seconds on an H200.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sidecar import report, text
from sidecar.app import Agent
from sidecar.config import ImportPolicy, Settings
from sidecar.model import Placement, Processes, Severity
from tests.fakes.nvml import Scenario
from tests.fakes.releases import OPEN_MODULE, install
from tests.fakes.sglang import CAPTURES
from tests.fakes.site import Site, driver_library

LAUNCHES: list[dict[str, Any]] = json.loads((CAPTURES / "launch-failures-0.5.16.json").read_text())["launches"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the recording says of a launch's environment in words, built.

    ``code`` is the condition that names the cause, where the recording's word for it is none. ``nvml`` is what the
    driver's library answers first, None where there is no such library.
    """

    changes: dict[str, str | None] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    damage: Callable[[Site], None] = lambda _site: None
    nvml: int | None = 0
    code: str | None = None


SETTINGS = {
    "SGLANG_IS_FLASHINFER_AVAILABLE=false": Setting(environ={"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}),
    # That torch sees no GPU is a consequence: what is missing is the driver, or all of it with its library.
    "2 CPU cores, no CUDA device; flashinfer.mamba importable": Setting(nvml=None, code="nvml-library-missing"),
    "flashinfer-cubin 0.6.12 beside flashinfer-python 0.6.14": Setting(changes={"flashinfer-cubin": "0.6.12"}),
    "nvidia-cutlass-dsl not importable; default warm-up, CUDA graphs off": Setting(
        changes={"nvidia-cutlass-dsl": None}
    ),
    "sgl_kernel/flash_ops.abi3.so missing": Setting(damage=lambda site: site.remove("sgl_kernel/flash_ops.abi3.so")),
    "H200 (SM90)": Setting(code="attention-backend-unsupported-gpu"),
}


def machine(folder: Path, library: Path, setting: Setting) -> tuple[dict[str, str], Path]:
    """The environment variables and the /proc of a machine with H200s, or of one without a driver."""
    proc = folder / "proc"
    proc.mkdir()
    environ = {"PATH": os.defpath, "HOME": str(folder), **setting.environ}
    if setting.nvml is None:
        return environ, proc
    if setting.nvml == 0:
        driver = proc / "driver" / "nvidia"
        (driver / "gpus" / "0000:00:06.0").mkdir(parents=True)
        (driver / "version").write_text(OPEN_MODULE)
    driver_library(folder, "driver")
    scenario = Scenario(folder / "scenario", gpus=1)
    scenario.set({"nvmlInit": setting.nvml})
    nvml = scenario.environ(library)
    return environ | nvml | {"LD_LIBRARY_PATH": f"{folder / 'driver'}:{nvml['LD_LIBRARY_PATH']}"}, proc


async def judged(
    recorded: dict[str, Any], setting: Setting, library: Path, folder: Path
) -> tuple[set[str], str, int, float]:
    """The critical causes of a preflight, its text, its exit status and its seconds."""
    site = install(folder / "environment", "0.5.16", setting.changes)
    setting.damage(site)
    environ, proc = machine(folder, library, setting)
    settings = Settings(
        # Those that do not matter were not recorded.
        launch=(site.python, "-m", "sglang.launch_server", "--model-path", "/models/tiny", *recorded["arguments"]),
        placement=Placement.HOST,
        processes=Processes.HIDDEN,
        import_policy=ImportPolicy.NEVER,
    )
    begun = time.monotonic()
    async with Agent.create(settings, once=True, environ=environ, proc=proc) as agent:
        snapshot = await agent.check()
    seconds = time.monotonic() - begun
    active = {one.code for one in snapshot.conditions.values() if one.active and one.severity is Severity.CRITICAL}
    shown = text.render(report.build(snapshot, agent.catalog), verbose=False)
    return active, " ".join(shown.split()), report.exit_code(snapshot), seconds


@pytest.mark.parametrize("recorded", LAUNCHES, ids=[launch["cause"].replace(" ", "-") for launch in LAUNCHES])
async def test_the_cause_is_named(recorded: dict[str, Any], fake_library: Path, tmp_path: Path) -> None:
    """One cause leads, it is the recorded one, and SGLang's own last words are shown with it."""
    setting = SETTINGS[recorded["environment"]]
    active, shown, status, seconds = await judged(recorded, setting, fake_library, tmp_path)
    print(f"\n{recorded['cause']}: {seconds:.2f} s instead of {recorded['seconds']} s")  # noqa: T201 - what it is for
    assert (active, status) == ({setting.code or recorded["cause"]}, 2)
    assert recorded["cause"] in shown or setting.code
    assert recorded["last_error"].partition(": ")[2] in shown


async def test_a_driver_that_is_not_loaded(fake_library: Path, tmp_path: Path) -> None:
    """With the driver's library and no driver the same launch dies with the same words: torch sees no GPU."""
    recorded = next(launch for launch in LAUNCHES if launch["cause"] == "cuda-unavailable-to-torch")
    active, shown, status, _ = await judged(recorded, Setting(nvml=9), fake_library, tmp_path)
    assert (active, status) == ({"driver-not-loaded"}, 2)
    assert "consequences: cuda-unavailable-to-torch" in shown
    assert recorded["last_error"] in shown
