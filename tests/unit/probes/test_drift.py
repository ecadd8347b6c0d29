"""What the drift probe makes of a baseline, of its absence, and of a state directory that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.conditions.relevance import effective
from sidecar.drift import compare
from sidecar.model import Baseline, Finding, Observed, Outcome, Placement, Result, Standing, Status, World
from sidecar.probes.drift import PROBE, STATE, DriftFacts
from sidecar.state import StateProblem
from tests.builders import HOST, view

CONTAINER = replace(HOST, placement=Placement.CONTAINER)


async def collected(
    baseline: Path | None, standing: Standing = HOST, *, problem: StateProblem | None = None, state: str | None = None
) -> DriftFacts:
    services: Any = SimpleNamespace(
        settings=SimpleNamespace(baseline=None if baseline is None else str(baseline), state_dir=state),
        standing=standing,
        memory={STATE: problem},
    )
    return await PROBE.collect(services)


def judged(facts: DriftFacts, **environment: str | None) -> dict[str, Finding]:
    """The findings, with these items known."""
    observed = {item: Observed(value=value, source="packages/server") for item, value in environment.items()}
    drifts = compare((facts.baseline or Baseline()).items, observed)
    world = World(standing=HOST, server=view(), now=0.0, settings=None, environment=observed, drifts=drifts)
    result = Result(probe="drift", outcome=Outcome.OK, facts=facts)
    return {one.code: one for one in PROBE.judge(result, world)}


def test_what_does_not_arise_is_not_exported() -> None:
    """A finding of a question that does not arise makes its condition irrelevant, unless it is required."""
    kind = next(one for one in PROBE.conditions if one.code == "environment-drift")
    finding = Finding(code=kind.code, status=Status.UNKNOWN, irrelevant=True)
    assert not effective(kind, finding, view(), required=()).relevant
    assert effective(kind, finding, view(), required=(kind.code,)).relevant


def file(folder: Path, text: str, mode: int = 0o644) -> Path:
    folder.chmod(0o755)
    path = folder / "baseline.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


async def test_without_a_baseline_the_question_does_not_arise() -> None:
    """Nothing was compared, so nothing is green or unknown: the conditions are irrelevant."""
    found = judged(await collected(None), torch="2.11.0")
    assert {code: (one.status, one.irrelevant) for code, one in found.items()} == dict.fromkeys(
        ("environment-drift", "baseline-unreadable", "state-unusable"), (Status.UNKNOWN, True)
    )


@pytest.mark.parametrize(
    ("value", "status", "reason"),
    [
        ("2.11.0", Status.FALSE, None),
        ("2.13.0", Status.TRUE, "different"),
        ("2.11.0+cu130", Status.TRUE, "other-build"),
        (None, Status.TRUE, "missing"),
    ],
)
async def test_drift_is_named(tmp_path: Path, value: str | None, status: Status, reason: str | None) -> None:
    """Each way to differ has its token, and the message names item, expectation and observation."""
    facts = await collected(file(tmp_path, "[environment]\ntorch = '2.11.0'"))
    found = judged(facts, torch=value)["environment-drift"]
    assert (found.status, found.reason) == (status, reason)
    if status is Status.TRUE:
        assert "torch" in found.message
        assert "2.11.0" in found.message
        assert found.evidence == (found.message,)


async def test_all_that_differs_is_listed(tmp_path: Path) -> None:
    """The first item leads, the others are counted and in the evidence."""
    facts = await collected(file(tmp_path, "[environment]\ntorch = '2'\nsglang = '0.5.16'\ndriver = '580'"))
    found = judged(facts, torch="3", sglang="0.5.17", driver="580")["environment-drift"]
    assert found.message == "torch is 3; the baseline wants 2. 1 more item differs."
    assert len(found.evidence) == 2


@pytest.mark.parametrize(
    ("environment", "explained"),
    [({"mig": "enabled", "torch": "2"}, True), ({"mig": "enabled", "torch": "3"}, False), ({"torch": "3"}, False)],
)
async def test_mig_mode_has_a_condition_of_its_own(
    tmp_path: Path, environment: dict[str, str], explained: bool
) -> None:
    """A drift of MIG mode alone is a consequence of the condition that names the GPUs; any other item is a root."""
    facts = await collected(file(tmp_path, "[environment]\ntorch = '2'\nmig = 'disabled'"))
    found = judged(facts, **environment)["environment-drift"]
    assert (found.status, found.explained_by) == (Status.TRUE, ("mig-unexpected",) if explained else ())


async def test_what_nobody_knows_is_unknown(tmp_path: Path) -> None:
    """Where none of the baseline's items is known, drift is unknown and not absent."""
    facts = await collected(file(tmp_path, "[environment]\ntorch = '2'"))
    found = judged(facts, driver="580")["environment-drift"]
    assert (found.status, found.reason) == (Status.UNKNOWN, "nothing-known")


async def test_a_bad_file_is_a_condition(tmp_path: Path) -> None:
    """A file that is no baseline leaves drift unknown and says what is wrong with it."""
    found = judged(await collected(file(tmp_path, "[environment")), torch="2")
    assert (found["environment-drift"].status, found["environment-drift"].reason) == (
        Status.UNKNOWN,
        "baseline-unreadable",
    )
    assert (found["baseline-unreadable"].status, found["baseline-unreadable"].reason) == (Status.TRUE, "not-toml")


@pytest.mark.parametrize(("standing", "used"), [(HOST, False), (CONTAINER, True)], ids=["host", "container"])
@pytest.mark.parametrize("place", ["file", "folder"])
async def test_what_everybody_may_write(tmp_path: Path, standing: Standing, used: bool, place: str) -> None:
    """A baseline that any user may change is reported, and on a host, where there are others, not believed."""
    path = file(tmp_path, "[environment]\ntorch = '2'", 0o666 if place == "file" else 0o644)
    if place == "folder":
        tmp_path.chmod(0o777)
    facts = await collected(path, standing)
    assert facts.baseline is not None
    assert bool(facts.baseline.items) is used
    found = judged(facts, torch="2")["baseline-unreadable"]
    assert (found.status, found.reason) == (Status.TRUE, "open-to-others")


async def test_a_state_that_fails_is_a_condition() -> None:
    """What the keeper met is published, and nothing is said while all is well."""
    problem = StateProblem("unwritable", "It is full.")
    found = judged(await collected(None, problem=problem, state="/s"))["state-unusable"]
    assert (found.status, found.reason, found.message) == (Status.TRUE, "unwritable", "It is full.")
    found = judged(await collected(None, state="/s"))["state-unusable"]
    assert found.status is Status.FALSE


async def test_the_report_shows_the_baseline(tmp_path: Path) -> None:
    """The report holds the baseline as written, and its problems."""
    facts = await collected(file(tmp_path, "[environment]\ntorch = '>=2,<3'\nkernel = '6'"))
    section = PROBE.report(facts)["baseline"]
    assert section.items == {"torch": ">=2,<3"}
    assert len(section.problems) == 1
