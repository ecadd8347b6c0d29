"""The unit for hosts and its drop-ins, as systemd itself reads them. That they suffice is for `make test-pods`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.units import FOLDER, UNIT, settings

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")

VARIANTS = {None: 1.9, "server-user.conf": 3.3, "any-server.conf": 4.7}
"""The drop-in, and the highest exposure that systemd may see: 0 is none, 10 is all of root's."""


def laid(folder: Path, drop_in: str | None) -> Path:
    """The unit as an administrator would install it, with a program that is there."""
    program = folder / "sglang-sidecar"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = folder / "sglang-sidecar.service"
    unit.write_text(UNIT.read_text().replace("/opt/sglang-sidecar/bin/sglang-sidecar", str(program)))
    if drop_in is not None:
        (folder / f"{unit.name}.d").mkdir()
        shutil.copy(FOLDER / drop_in, folder / f"{unit.name}.d")
    return unit


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze, which needs no running systemd for these."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("drop_in", VARIANTS)
def test_systemd_understands_every_line(tmp_path: Path, drop_in: str | None) -> None:
    """An option that it does not know it would ignore, and warn of in a log that nobody reads."""
    done = analyze("verify", "--man=no", str(laid(tmp_path, drop_in)))
    said = [line for line in done.stderr.splitlines() if "sglang-sidecar" in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("drop_in", VARIANTS)
def test_each_variant_is_as_closed_as_it_can_be(tmp_path: Path, drop_in: str | None) -> None:
    """The exposure that systemd computes does not grow unnoticed."""
    done = analyze("security", "--offline=yes", "--no-pager", str(laid(tmp_path, drop_in)))
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= VARIANTS[drop_in]


def test_the_default_has_no_right_and_the_drop_ins_no_more_than_they_say() -> None:
    """No capability but with any-server.conf, never root but there, and no new rights anywhere."""
    rights = {name: settings(name) for name in VARIANTS}
    assert all(one["NoNewPrivileges"] == "yes" for one in rights.values())
    assert [one["CapabilityBoundingSet"] for one in rights.values()][:2] == ["", ""]
    assert "CAP_SYS_ADMIN" not in rights["any-server.conf"]["CapabilityBoundingSet"]
    assert [one.get("User", "dynamic") for one in rights.values()] == ["dynamic", "sglang", "root"]
    # What would hide the server, whoever runs the agent.
    for one in rights.values():
        assert {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivateDevices", "PrivateNetwork"} & set(one) == set()
