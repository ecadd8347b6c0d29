"""docs/cases.md: every reported failure has the verdict that the document shows, by a real check of its state.

``UPDATE_GOLDENS=1`` rewrites the document instead of comparing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sidecar import catalog
from sidecar.remedy import parts
from tests.casebench import Machine
from tests.cases import CASES, DOCUMENT, ROOT, Case, answer, document, section, sections_of
from tests.fakes.kernel import HAVE_COMPILER

UPDATE = "UPDATE_GOLDENS" in os.environ
X86 = os.uname().machine == "x86_64"

pytestmark = pytest.mark.skipif(not HAVE_COMPILER, reason="needs a C compiler")


async def answers(case: Case, folder: Path, library: Path) -> list[str]:
    """What a check says of each scene of a case."""
    found = []
    for number, scene in enumerate(case.scenes):
        machine = Machine.make(folder / f"{case.number}-{number}", library)
        scene.setup(machine)
        checked = await machine.check(scene.steps)
        assert sorted(checked.active) == sorted(scene.expects), f"{case.number}, {scene.title}: {checked.text}"
        found.append(answer(scene, checked))
    return found


@pytest.mark.skipif(UPDATE, reason="the document is being written")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"case-{case.number}")
async def test_a_reported_failure_has_its_verdict(case: Case, fake_library: Path, tmp_path: Path) -> None:
    """Cause, sentence and command are those of the document, and no other cause is told of."""
    if any(scene.x86 for scene in case.scenes) and not X86:
        pytest.skip("torch is built for other GPUs on other processors")
    found = section(case, await answers(case, tmp_path, fake_library))
    assert found == sections_of(DOCUMENT.read_text())[case.number]


@pytest.mark.skipif(UPDATE, reason="the document is being written")
def test_the_document_is_put_together_from_them() -> None:
    """Between the sections nothing was written by hand, and there are no others."""
    text = DOCUMENT.read_text()
    assert document(sections_of(text)) == text


@pytest.mark.skipif(not UPDATE, reason="rewrites the document, on demand")
@pytest.mark.timeout(600)
async def test_the_document_is_written(fake_library: Path, tmp_path: Path) -> None:
    """All sections, by all checks."""
    sections = {case.number: section(case, await answers(case, tmp_path, fake_library)) for case in CASES}
    DOCUMENT.write_text(document(sections))
    assert sections_of(DOCUMENT.read_text()) == sections


def test_cases_are_numbered_and_referred_to() -> None:
    """Every case has its number and a public report; one without a verdict says why, and which tests stand for it."""
    assert [case.number for case in CASES] == list(range(1, len(CASES) + 1))
    known = catalog.build(catalog.discover()).conditions
    for case in CASES:
        assert case.refs, case.number
        assert case.scenes or (case.note and case.tests), case.number
        assert all((ROOT / path).is_file() for path in case.tests), case.number
        assert all(code in known for scene in case.scenes for code in scene.expects), case.number


@pytest.mark.skipif(UPDATE, reason="the document is being written")
def test_every_remedy_is_a_command_or_a_sentence() -> None:
    """What the document shows behind "fix:" can be pasted, or begins and ends as a sentence does."""
    shown = [line.removeprefix("  fix: ") for line in DOCUMENT.read_text().splitlines() if line.startswith("  fix: ")]
    assert len(shown) > 50
    for remedy in shown:
        (first, *_) = parts(remedy)
        assert first.command or re.match(r"[A-Z].*[.:]\Z", remedy), remedy
