"""The text answers of /readyz, /livez and /startupz."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sidecar.catalog import build, discover
from sidecar.conditions import Overrides
from sidecar.config import load
from sidecar.model import Gate, Outcome, Severity, Status
from sidecar.readiness import livez, readyz, single, startupz
from tests.samples import catalog, condition, snapshot

LOST = condition("gpu-lost", Status.TRUE)
MISSING = condition("nvml-library-missing", Status.TRUE)
ACCEPTED = condition("gpu-lost", Status.TRUE, severity=Severity.INFO, gate=Gate.NEVER, accepted=True)


def test_ready_is_a_bare_ok() -> None:
    """Without verbose a success answers only ok, as the API server does."""
    reply = readyz(snapshot(), catalog(), stopping=False)
    assert (reply.status, reply.text) == (200, "ok\n")


def test_verbose_success_lists_every_probe() -> None:
    """With verbose each probe has one line and the verdict comes last."""
    reply = readyz(snapshot(), catalog(), stopping=False, verbose=True)
    assert reply.status == 200
    assert reply.text == "[+]driver ok\n[+]flashinfer ok\n[+]server ok\n[+]packages ok\nreadyz check passed\n"


def test_blocker_fails_with_its_code_and_always_verbosely() -> None:
    """A gating condition answers 503 and names its code on the line of the probe that owns it."""
    reply = readyz(snapshot(LOST, blockers=("gpu-lost",)), catalog(), stopping=False)
    assert reply.status == 503
    assert reply.text.splitlines()[0] == "[-]driver failed: gpu-lost"
    assert reply.text.splitlines()[-1] == "readyz check failed"


def test_answers_carry_tokens_and_never_messages() -> None:
    """No sentence of a condition reaches an endpoint that is open to everyone."""
    broken = snapshot(LOST, MISSING, condition("flashinfer-import-failed", Status.UNKNOWN), blockers=("gpu-lost",))
    texts = [readyz(broken, catalog(), stopping=False).text]
    names = (*catalog().by_name, *catalog().conditions)
    texts += [reply.text for name in names if (reply := single(broken, catalog(), name, stopping=False))]
    assert not any("message of" in text or "remedy of" in text for text in texts)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (snapshot(condition("flashinfer-import-failed", Status.UNKNOWN)), "[+]flashinfer ok: unknown, not gating"),
        (snapshot(condition("thermal-slowdown", Status.UNKNOWN)), "[+]driver ok"),
        (snapshot(condition("driver-hung", Status.TRUE)), "[+]driver ok: driver-hung, not gating"),
        (snapshot(MISSING), "[+]driver ok: nvml-library-missing, not gating"),
        (snapshot(outcomes={"flashinfer": Outcome.PENDING}), "[+]flashinfer ok: pending, not gating"),
        (snapshot(outcomes={"packages": Outcome.CRASHED}), "[+]packages ok: crashed, not gating"),
        (snapshot(outcomes={"packages": Outcome.SKIPPED}), "[+]packages ok: skipped, not gating"),
        (snapshot(condition("gpu-lost", Status.UNKNOWN, relevant=False)), "[+]driver ok"),
        (snapshot(ACCEPTED), "[+]driver ok: gpu-lost accepted, not gating"),
        (snapshot(condition("gpu-lost", Status.UNKNOWN, gate=Gate.NEVER, accepted=True)), "[+]driver ok"),
        (
            snapshot(condition("thermal-slowdown", Status.UNKNOWN, gate=Gate.SERVING)),
            "[+]driver ok: unknown, not gating",
        ),
        (snapshot(condition("gpu-lost", Status.TRUE, consequence_of="nvml-library-missing")), "[+]driver ok"),
    ],
)
def test_what_does_not_gate_passes_and_is_named(given, line) -> None:  # type: ignore[no-untyped-def]
    """Unknown, pending and alert-only states pass, and the line says that they are not plain health."""
    reply = readyz(given, catalog(), stopping=False, verbose=True)
    assert reply.status == 200
    assert line in reply.text.splitlines()


def test_pending_verdict_fails_on_the_first_probe_only() -> None:
    """Until the driver's first round ended the answer is 503 with the token pending."""
    reply = readyz(snapshot(pending=True), catalog(), stopping=False)
    assert reply.status == 503
    assert [line for line in reply.text.splitlines() if line.startswith("[-]")] == ["[-]driver failed: pending"]


def test_stopping_fails_whatever_the_verdict_says() -> None:
    """From SIGTERM on it fails with shutting-down, which no exclude hides (case 51, aio-libs/aiohttp#1221)."""
    reply = readyz(snapshot(), catalog(), stopping=True, exclude=["shutting-down"])
    assert reply.status == 503
    assert reply.text.splitlines()[0] == "[-]shutting-down failed"


def test_excluded_probe_no_longer_gates() -> None:
    """Excluding the probe that owns the blocker lets the check pass and says that it was excluded."""
    reply = readyz(snapshot(LOST, blockers=("gpu-lost",)), catalog(), stopping=False, verbose=True, exclude=["driver"])
    assert reply.status == 200
    assert reply.text.splitlines()[0] == "[+]driver excluded: ok"


def test_excluded_code_leaves_the_probe_s_other_codes_gating() -> None:
    """Excluding one code drops that code only."""
    both = snapshot(LOST, MISSING, blockers=("gpu-lost", "nvml-library-missing"))
    one = readyz(both, catalog(), stopping=False, exclude=["gpu-lost"])
    assert one.status == 503
    assert one.text.splitlines()[0] == "[-]driver failed: nvml-library-missing"
    two = readyz(both, catalog(), stopping=False, verbose=True, exclude=["gpu-lost", "nvml-library-missing"])
    assert two.status == 200
    assert two.text.splitlines()[0] == "[+]driver ok: gpu-lost,nvml-library-missing excluded"


def test_exclude_that_matches_nothing_warns_safely() -> None:
    """A name that no check has is repeated quoted and shortened, so that it cannot forge a line."""
    forged = "x\n[+]driver ok " + "y" * 500
    reply = readyz(snapshot(), catalog(), stopping=False, verbose=True, exclude=["driver", forged])
    lines = reply.text.splitlines()
    assert reply.status == 200
    assert lines[-2].startswith('warn: some health checks cannot be excluded: no matches for "x\\n[+]driver ok yy')
    assert len(lines) == 6
    assert len(lines[-2]) < 200


@pytest.mark.parametrize(
    ("name", "given", "status", "text"),
    [
        ("gpu-lost", snapshot(LOST), 503, "[-]gpu-lost failed: some-reason\n"),
        ("gpu-lost", snapshot(), 200, "ok\n"),
        ("gpu-lost", snapshot(condition("gpu-lost", Status.UNKNOWN)), 200, "[+]gpu-lost ok: unknown\n"),
        (
            "gpu-lost",
            snapshot(condition("gpu-lost", Status.TRUE, relevant=False)),
            200,
            "[+]gpu-lost ok: not relevant\n",
        ),
        (
            "gpu-lost",
            snapshot(condition("gpu-lost", Status.TRUE, consequence_of="nvml-library-missing")),
            200,
            "[+]gpu-lost ok: consequence of nvml-library-missing\n",
        ),
        ("gpu-lost", snapshot(ACCEPTED), 200, "[+]gpu-lost ok: accepted\n"),
        ("driver", snapshot(ACCEPTED), 200, "[+]driver ok: gpu-lost accepted\n"),
        ("driver-hung", snapshot(condition("driver-hung", Status.TRUE)), 503, "[-]driver-hung failed: some-reason\n"),
        ("driver", snapshot(MISSING), 503, "[-]driver failed: nvml-library-missing\n"),
        ("driver", snapshot(condition("driver-hung", Status.TRUE)), 200, "[+]driver ok: driver-hung\n"),
        ("driver", snapshot(pending=True), 503, "[-]driver failed: pending\n"),
        ("packages", snapshot(pending=True), 200, "ok\n"),
        (
            "driver",
            snapshot(condition("gpu-lost", Status.TRUE, severity=Severity.WARNING, gate=Gate.NEVER)),
            200,
            "[+]driver ok: gpu-lost\n",
        ),
    ],
)
def test_single_check(name, given, status, text) -> None:  # type: ignore[no-untyped-def]
    """One code fails while active; one probe fails while a condition of a gating class is, server or not."""
    reply = single(given, catalog(), name, stopping=False)
    assert reply is not None
    assert (reply.status, reply.text) == (status, text)


def test_single_check_fails_while_stopping() -> None:
    """A pod that uses one check as its readiness probe leaves the service on SIGTERM too."""
    reply = single(snapshot(), catalog(), "driver", stopping=True)
    assert reply is not None
    assert reply.status == 503


def test_single_check_of_an_unknown_name_is_none() -> None:
    """A name that is neither a probe nor a code has no answer, stopping or not."""
    assert single(snapshot(), catalog(), "nonsense", stopping=True) is None


def test_livez_and_startupz_name_their_reason() -> None:
    """Both pass with ok, and fail with the token they were given."""
    assert livez(None).text == startupz(None).text == "ok\n"
    assert livez(None, verbose=True).text == "[+]scheduler ok\nlivez check passed\n"
    assert livez("scheduler-stalled").text == "[-]scheduler failed: scheduler-stalled\nlivez check failed\n"
    assert startupz("first-round").status == 503


# -- what people read of it -----------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "readiness.md").read_text()


def test_the_page_quotes_lines_as_they_are() -> None:
    """Each line that the documentation explains is one that the endpoint gives."""
    unknown = condition("flashinfer-import-failed", Status.UNKNOWN)
    given = [
        readyz(snapshot(LOST, blockers=("gpu-lost",)), catalog(), stopping=True),
        readyz(snapshot(LOST, blockers=("gpu-lost",)), catalog(), stopping=False, verbose=True, exclude=["gpu-lost"]),
        readyz(snapshot(condition("driver-hung", Status.TRUE)), catalog(), stopping=False, verbose=True),
        readyz(snapshot(ACCEPTED), catalog(), stopping=False, verbose=True),
        readyz(snapshot(unknown), catalog(), stopping=False, verbose=True, exclude=["driver"]),
        readyz(snapshot(outcomes={"flashinfer": Outcome.PENDING}), catalog(), stopping=False, verbose=True),
        readyz(snapshot(outcomes={"packages": Outcome.TIMEOUT}), catalog(), stopping=False, verbose=True),
        readyz(snapshot(pending=True), catalog(), stopping=False),
    ]
    lines = {line for reply in given for line in reply.text.splitlines()}
    quoted = re.findall(r"^\| `(\[[^`]*)`", PAGE, re.MULTILINE)
    assert len(quoted) == 11
    assert set(quoted) <= lines


def test_the_page_wires_endpoints_that_exist() -> None:
    """The manifest that is copied from the documentation names the probe endpoints and the default port."""
    [manifest] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    [container] = manifest["containers"]
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert paths == {"readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert container["ports"] == [{"name": "sglang-sidecar", "containerPort": 9477}]


def test_the_page_s_settings_are_accepted(tmp_path: Path) -> None:
    """The overrides that the documentation shows are read as it says."""
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "sidecar.toml"
    file.write_text(text)
    real = build(discover())
    settings = load(
        file=file, environ={}, flags={}, probe_names=(), allowed_requirements=(), conditions=tuple(real.conditions)
    ).settings
    assert Overrides.of(settings) == Overrides(
        gate={"environment-drift": Gate.SERVING, "gpu-lost": Gate.NEVER},
        severity={"duplicate-distribution": Severity.INFO},
        accept=frozenset({"nvml-binding-conflict"}),
    )
