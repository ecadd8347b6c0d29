"""The composed agent, in this process, against recorded servers, the fake driver library and a fake /proc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sidecar import report
from sidecar.app import Agent
from sidecar.config import Image, ImportPolicy, Settings
from sidecar.exposition import Exposition
from sidecar.model import Gate, Placement, Processes, Snapshot, Status
from sidecar.readiness import readyz
from tests.fakes.nvml import Scenario
from tests.fakes.sglang import CAPTURES, FakeSglang, capture, serve
from tests.fakes.site import good

UPDATE = "UPDATE_GOLDENS" in os.environ
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)  \n"
    "GCC version:  gcc version 12.3.0\n"
)
OF_THE_MOMENT = re.compile(
    r"^sglang_sidecar_(build_info|probe_duration_seconds|probe_last_success_timestamp_seconds)\b"
)
"""Families whose values are this run's own; asserted in other tests."""


@pytest.fixture
def library(fake_library: Path) -> Path:
    """The compiled fake of the NVML library."""
    return fake_library


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc that shows a loaded open kernel module and one GPU, and no process."""
    driver = tmp_path / "proc" / "driver" / "nvidia"
    (driver / "gpus" / "0000:00:06.0").mkdir(parents=True)
    (driver / "version").write_text(OPEN_MODULE)
    return tmp_path / "proc"


def settings(url: str, **changes: object) -> Settings:
    """A sidecar in an image of its own whose server is known by address only."""
    values: dict[str, object] = {
        "server_url": url,
        "placement": Placement.CONTAINER,
        "image": Image.OWN,
        "processes": Processes.HIDDEN,
        "import_policy": ImportPolicy.NEVER,
        "explicit": frozenset({"server_url"}),
    }
    return Settings(**{**values, **changes})  # type: ignore[arg-type]  # a test's shorthand


async def check(one: Settings, environ: Mapping[str, str], proc: Path) -> tuple[Snapshot, Agent]:
    async with Agent.create(one, once=True, environ=environ, proc=proc) as agent:
        return await agent.check(), agent


def exposition(snapshot: Snapshot, agent: Agent, accept: str = "text/plain") -> str:
    return Exposition(agent.catalog).render(snapshot, accept=accept, accept_encoding="identity").body.decode()


def lasting(text: str) -> str:
    """The lines that do not depend on the moment or the machine."""
    lines = []
    for line in text.splitlines():
        name = line.split(" ")[2] if line.startswith("#") and line != "# EOF" else line
        if not name.startswith("process_") and not OF_THE_MOMENT.match(name):
            lines.append(line)
    return "\n".join(lines) + "\n"


RECORDED = sorted(path.parent.name for path in CAPTURES.glob("*/server_info.json"))


@pytest.mark.parametrize("name", RECORDED)
async def test_each_recorded_server_has_its_exposition(name: str, library: Path, proc: Path, tmp_path: Path) -> None:
    """What a real server answered gives exactly the reviewed series (UPDATE_GOLDENS=1 rewrites them)."""
    environ = Scenario(tmp_path / "scenario", gpus=1).environ(library)
    async with serve(FakeSglang(info=capture(name))) as server:
        snapshot, agent = await check(settings(server.url), environ, proc)
    text = lasting(exposition(snapshot, agent))
    golden = CAPTURES / name / "expected.prom"
    if UPDATE:
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("0.5.16-h200-fa3", {"prefill": 3, "decode": 3}),
        ("0.5.16-h200-fa4", {"prefill": 4, "decode": 4}),
        ("0.5.16-h200-fa4-fa3-hybrid", {"prefill": 4, "decode": 3}),
        ("0.5.16", {"prefill": 0, "decode": 0}),
    ],
)
async def test_the_active_flash_attention_of_recorded_servers(
    name: str, versions: dict[str, int], library: Path, proc: Path, tmp_path: Path
) -> None:
    """FA3 and FA4 by phase, 0 where none runs, and no series for phases that the server does not have."""
    environ = Scenario(tmp_path / "scenario", gpus=1).environ(library)
    async with serve(FakeSglang(info=capture(name))) as server:
        snapshot, agent = await check(settings(server.url), environ, proc)
    found = {
        sample.labels["phase"]: sample.value
        for family in parse_text(exposition(snapshot, agent))
        for sample in family.samples
        if sample.name == "sglang_sidecar_flash_attention_version"
    }
    assert found == versions


async def test_both_formats_parse_and_promtool_accepts_the_text(library: Path, proc: Path, tmp_path: Path) -> None:
    """Eight GPUs and a server: both client parsers read their format, promtool has nothing to say."""
    environ = Scenario(tmp_path / "scenario", gpus=8).environ(library)
    async with serve(FakeSglang()) as server:
        snapshot, agent = await check(settings(server.url), environ, proc)
    text = exposition(snapshot, agent)
    classic = {family.name for family in parse_text(text)}
    modern = {family.name for family in parse_openmetrics(exposition(snapshot, agent, "application/openmetrics-text"))}
    assert "sglang_sidecar_gpu_memory_used_bytes" in classic & modern
    linted = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")
    series = sum(not line.startswith("#") for line in text.splitlines())
    assert series <= 340
    assert len(text) <= 40 * 1024


@pytest.mark.parametrize("code", [12, 9, 4])
async def test_a_sidecar_without_gpu_access_beside_a_loaded_driver(
    code: int, library: Path, proc: Path, tmp_path: Path
) -> None:
    """In a container whose /proc shows a driver, 12, 9 and 4 are the sidecar's own lack and gate nothing.

    NVIDIA/nvidia-docker#1711, NVIDIA/k8s-device-plugin#605
    """
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    scenario.set({"nvmlInit": code})
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "libnvidia-ml.so.1").write_text("not a library")
    environ = {"LD_LIBRARY_PATH": str(empty)} if code == 12 else scenario.environ(library)
    # Nobody listens on port 9 of loopback: a launch condition would gate.
    snapshot, agent = await check(settings("http://127.0.0.1:9"), environ, proc)
    assert snapshot.conditions["sidecar-gpu-access"].active
    assert snapshot.conditions["sidecar-gpu-access"].gate is Gate.NEVER
    others = [c for c in snapshot.conditions.values() if agent.catalog.owner[c.code] == "driver" and c.active]
    assert [c.code for c in others] == ["sidecar-gpu-access"]
    assert snapshot.conditions["driver-not-loaded"].status is Status.UNKNOWN
    assert readyz(snapshot, agent.catalog, stopping=False).status == 200
    assert 'driver_info{cuda_driver_version="",driver_version="",kernel_module="open"' in exposition(snapshot, agent)


@pytest.mark.parametrize("code", [12, 9])
async def test_the_same_codes_on_a_host_are_the_drivers(code: int, library: Path, proc: Path, tmp_path: Path) -> None:
    """On a host the codes mean what they say, whatever /proc shows, and gate while nobody answers."""
    scenario = Scenario(tmp_path / "scenario", gpus=1)
    scenario.set({"nvmlInit": code})
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "libnvidia-ml.so.1").write_text("not a library")
    environ = {"LD_LIBRARY_PATH": str(empty)} if code == 12 else scenario.environ(library)
    snapshot, _agent = await check(settings("http://127.0.0.1:9", placement=Placement.HOST), environ, proc)
    wanted = {12: "nvml-library-missing", 9: "driver-not-loaded"}[code]
    assert snapshot.verdict.blockers == (wanted,)


def test_promtool_is_there() -> None:
    """The tests' own tools are installed, so nothing above was passed over."""
    assert shutil.which("promtool")


async def test_an_import_that_ends_before_a_slow_probe_counts(tmp_path: Path, proc: Path) -> None:
    """A check publishes what an import showed, also where another probe was still busy when it ended."""
    site = good(tmp_path / "venv")
    fake = FakeSglang(delay=1.5)
    async with serve(fake) as server:
        one = settings(
            server.url,
            image=Image.SERVER,
            placement=Placement.HOST,
            server_python=site.python,
            import_policy=ImportPolicy.ALWAYS,
            explicit=frozenset({"server_url", "server_python"}),
        )
        snapshot, agent = await check(one, {"PATH": os.defpath, "HOME": str(tmp_path)}, proc)
    shown = report.build(snapshot, agent.catalog)["modules"]["flashinfer.mamba"]
    assert (shown["evidence"], shown["verified"]) == ("ok", True)
