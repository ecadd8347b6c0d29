"""What ends a launch before SGLang, judged from facts: what is certain, and what only may be."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.environment import EnvironmentFacts, InterpreterUnusable, ModuleFiles
from sidecar.imports import ImportEvidence, ImportOutcome
from sidecar.model import Answer, Scope, Status, Target
from sidecar.starting import StartFacts, judge
from tests.builders import view
from tests.fakes.flashinfer import world

WHOLE = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/v/bin/python",
    python_source="launch-command",
    python_version="3.11.7",
    distributions={"sglang": "0.5.16", "pip": "26.0"},
    modules={"sglang": ModuleFiles(kind="package", places=("/v/s/sglang",))},
    requires_python={"sglang": ">=3.10"},
    site_dirs=("/v/s",),
)
NONE = replace(WHOLE, distributions={"pip": "26.0"}, modules={}, requires_python={})
OLD = replace(WHOLE, requires_python={"sglang": ">=3.12"})
GONE = InterpreterUnusable("missing", Target(url="", url_source="", scope=Scope.SERVER, python="/gone"), "is gone")
BROKEN = ImportEvidence(
    outcome=ImportOutcome.NOT_ALLOWED, reason="interpreter-broken", at=0.0, where="/v/s/a.pth", cause="raises X"
)
LAUNCH = {"preflight": True, "python_source": "launch-command", "running": False, "variables_seen": True}


def said(answer: Answer | None = Answer.REFUSED, **facts: Any) -> dict[str, str]:
    """Status and reason of each condition."""
    given = StartFacts(**{"python": "/v/bin/python", **LAUNCH, **facts})
    found = judge(given, world(server=view(answer)))
    return {one.code: f"{one.status.value}: {one.reason}" for one in found}


def three(interpreter: str, installed: str, whole: str) -> dict[str, str]:
    return {"interpreter-unusable": interpreter, "sglang-not-installed": installed, "sglang-incomplete": whole}


FINE = "false: None"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"environment": WHOLE}, three(FINE, FINE, FINE)),
        ({"fault": GONE}, three("true: missing", "unknown: not-examined", "unknown: not-examined")),
        ({"fault": GONE, "python_source": "setting"}, three(*["unknown: not-examined"] * 3)),
        ({"fault": GONE, "preflight": False}, three(*["unknown: not-examined"] * 3)),
        ({"why": "Nothing found."}, three(*["unknown: no-interpreter"] * 3)),
        ({"environment": replace(WHOLE, scope=Scope.SELF)}, three(*["unknown: scope-self"] * 3)),
        ({"environment": NONE}, three(FINE, "true: absent", FINE)),
        ({"environment": NONE, "python_source": "setting", "preflight": False}, three(FINE, "true: absent", FINE)),
        ({"environment": NONE, "python_source": "path"}, three(FINE, "unknown: not-examined", FINE)),
        ({"environment": NONE, "running": True}, three(FINE, "unknown: server-runs", FINE)),
        ({"environment": NONE, "variables_seen": False}, three(FINE, "unknown: probe-environment", FINE)),
        ({"environment": replace(NONE, path_code=("hook.pth",))}, three(FINE, "unknown: probe-environment", FINE)),
        ({"environment": NONE, "without_site": True}, three(FINE, "true: without-site-packages", FINE)),
        ({"environment": OLD}, three("true: older-than-required", FINE, FINE)),
        ({"environment": replace(OLD, requires_python={"sglang": "garbage"})}, three(FINE, FINE, FINE)),
        ({"environment": replace(OLD, python_version=None)}, three(FINE, FINE, FINE)),
        ({"environment": OLD, "answer": Answer.ACCEPTED}, three(FINE, FINE, FINE)),
        ({"environment": WHOLE, "broken": BROKEN}, three("true: ends-at-start", FINE, FINE)),
        (
            {"environment": WHOLE, "broken": replace(BROKEN, withheld=("VENDOR_LICENSE",))},
            three("unknown: probe-environment", FINE, FINE),
        ),
        ({"environment": WHOLE, "broken": BROKEN, "variables_seen": False},
         three("unknown: probe-environment", FINE, FINE)),
        ({"environment": replace(WHOLE, unusable={"sglang/launch_server.py": "empty"})},
         three(FINE, FINE, "true: files-damaged")),
        ({"environment": replace(WHOLE, unusable={"sglang/launch_server.py": "empty"}, editable=("sglang",))},
         three(FINE, FINE, FINE)),
    ],
)  # fmt: skip
def test_what_is_certain_and_what_is_open(facts: dict[str, Any], expected: dict[str, str]) -> None:
    """Only the launch's own interpreter, looked into as the launch would, ends it for certain."""
    assert said(**facts) == expected


def test_each_cause_says_what_to_do() -> None:
    """The remedy of an interpreter that is too old is one that will do; a file that ends it is named."""
    facts = StartFacts(python="/v/bin/python", **LAUNCH)
    old = judge(replace(facts, environment=OLD), world())[0]
    assert str(old.remedy).startswith("python3.12 -m venv VENV && VENV/bin/python -m pip install sglang==0.5.16")
    nothing = replace(OLD, requires_python={"sglang": "<3"})
    assert "in an environment of Python <3" in str(judge(replace(facts, environment=nothing), world())[0].remedy)
    ended = judge(replace(facts, environment=WHOLE, broken=BROKEN), world())[0]
    assert (ended.status, "/v/s/a.pth raises X" in ended.message) == (Status.TRUE, True)
    missing = judge(replace(facts, environment=WHOLE, broken=replace(BROKEN, where=None, cause=None)), world())[0]
    assert "`/v/bin/python -v -c pass`" in str(missing.remedy)
