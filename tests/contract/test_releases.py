"""Servers of many SGLang releases, each with its own shape of answers, processes and environment: one golden verdict.

``tests/captures/make_releases.py`` says what of the captures is real. UPDATE_GOLDENS=1 rewrites the verdicts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import report, text
from sidecar.app import Agent
from sidecar.catalog import Catalog
from sidecar.config import Image, ImportPolicy, Settings
from sidecar.exposition import Exposition
from sidecar.model import Placement, Processes, Snapshot, Status
from tests.fakes.nvml import Scenario
from tests.fakes.releases import GPUS, NAMES, RELEASES, install, load, placed, proc_tree, toolkit
from tests.fakes.sglang import MARKER, FakeSglang, serve
from tests.fakes.site import driver_library

UPDATE = "UPDATE_GOLDENS" in os.environ
MATCHING = "matching"
"""The environment with exactly what the release requires."""


def situations() -> Iterator[tuple[str, str]]:
    """Each release with its matching environment, and with each of its changed ones."""
    for release in NAMES:
        yield release, MATCHING
        yield from ((release, change) for change in load(release, "environment.json")["changes"])


async def looked_at(release: str, situation: str, library: Path, folder: Path) -> tuple[Snapshot, Catalog, FakeSglang]:
    """One look of a host's agent at the server of a release."""
    described = load(release, "environment.json")
    site = install(folder / "environment", release, described["changes"].get(situation))
    processes = placed(load(release, "processes.json")["processes"], site)
    schedulers = [one for one in processes if one["cmdline"][0].startswith("sglang::scheduler")]
    driver_library(folder, "driver")
    nvml = Scenario(folder / "scenario", gpus=len(schedulers), **GPUS[described["gpu"]]).environ(library)
    theirs = {
        "PATH": os.defpath,
        "HOME": str(folder),
        "LD_LIBRARY_PATH": str(folder / "driver"),
        "CUDA_HOME": str(toolkit(folder / "cuda", described["torch_cuda"])),
    }
    proc = proc_tree(folder, processes, theirs)
    key = folder / "key"
    key.write_text(MARKER)
    fake = FakeSglang(
        info=load(release, "server_info.json"),
        model_info=load(release, "model_info.json"),
        ready=200 if "/ready" in described["paths"] else 404,
        old="/server_info" not in described["paths"],
        api_key=MARKER,
    )
    async with serve(fake) as server:
        settings = Settings(
            server_url=server.url,
            # Its flags name another port than the one that was free for the answers.
            server_pid=processes[0]["pid"],
            server_key_file=str(key),
            server_python=site.python if processes[0]["cmdline"][0].startswith("sglang::") else None,
            placement=Placement.HOST,
            image=Image.SERVER,
            processes=Processes.SHARED,
            import_policy=ImportPolicy.NEVER,
            explicit=frozenset({"server_url"}),
        )
        async with Agent.create(settings, once=True, environ={"PATH": os.defpath, **nvml}, proc=proc) as agent:
            return await agent.check(), agent.catalog, fake


def verdict(snapshot: Snapshot, shown: dict[str, Any]) -> dict[str, Any]:
    """What a person would want reviewed of a look: nothing of the moment or the machine."""
    conditions = [one for one in snapshot.conditions.values() if one.relevant]
    return {
        "active": {
            one.code: f"{one.severity.value}, {one.gate.value}: {one.reason}" for one in conditions if one.active
        },
        "consequences": {one.code: one.consequence_of for one in conditions if one.consequence_of is not None},
        "unknown": {one.code: one.reason for one in conditions if one.status is Status.UNKNOWN},
        "blockers": list(snapshot.verdict.blockers),
        "features": {feature.value: used for feature, used in sorted(snapshot.server.features.items())},
        "server": {name: shown["server"][name] for name in ("state", "ready", "version", "scope", "environ", "launch")},
        "attention": shown["attention"],
        "mamba": shown["server"]["mamba_backend"],
        "modules": {
            name: {part: module[part] for part in ("importable", "verified", "version", "code", "reason")}
            for name, module in shown["modules"].items()
        },
        "requirements": {
            one["package"]: f"{one['required']}, found {one['installed']}: {one['satisfied']}"
            for one in shown["requirements"]
            if one["tracked"] or one["satisfied"] is not True
        },
    }


@pytest.mark.parametrize(("release", "situation"), list(situations()))
async def test_a_release_has_its_verdict(release: str, situation: str, fake_library: Path, tmp_path: Path) -> None:
    """Backends and versions by phase, features, requirements, FlashInfer and FlashAttention are the reviewed ones."""
    snapshot, catalog, _fake = await looked_at(release, situation, fake_library, tmp_path)
    shown = json.loads(report.encode(report.build(snapshot, catalog)))
    # Where the environment lies is this run's own.
    text = json.dumps(verdict(snapshot, shown)).replace(str(tmp_path), "")
    golden = RELEASES / release / "expected.json"
    expected = json.loads(golden.read_text()) if golden.exists() else {}
    if UPDATE:
        expected[situation] = json.loads(text)
        golden.write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    assert json.loads(text) == expected.get(situation)


@pytest.mark.parametrize("release", NAMES)
async def test_no_key_of_any_release_is_shown(release: str, fake_library: Path, tmp_path: Path) -> None:
    """The keys in a release's answer, in its command line and in ours appear in nothing that is served or printed."""
    planted = (RELEASES / release / "server_info.json").read_text().count(MARKER)
    assert planted >= 1
    snapshot, catalog, fake = await looked_at(release, MATCHING, fake_library, tmp_path)
    assert f"Bearer {MARKER}" in fake.authorizations, "the server was asked with the key"
    built = report.build(snapshot, catalog)
    rendered = Exposition(catalog).render(snapshot, accept="text/plain", accept_encoding="identity").body.decode()
    served = [report.encode(built).decode(), text.render(built, verbose=True), rendered]
    assert not any(MARKER in one for one in served)
    assert MARKER not in repr(snapshot)


@pytest.mark.parametrize("release", NAMES)
async def test_a_release_is_asked_where_it_answers(release: str, fake_library: Path, tmp_path: Path) -> None:
    """Information is asked for once, by the path that the release has, and never by one that generates a token."""
    paths = load(release, "environment.json")["paths"]
    _snapshot, _catalog, fake = await looked_at(release, MATCHING, fake_library, tmp_path)
    wanted = "/server_info" if "/server_info" in paths else "/get_server_info"
    assert fake.requests[wanted] == 1
    assert ("/get_server_info" in fake.requests) == (wanted == "/get_server_info")
    assert not {"/health", "/health_generate"} & set(fake.requests)
