"""The contributor's walk: the probe of docs/contributing.md, as one file in a copy of the package, shows everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fakes import agent

PAGE = agent.ROOT / "docs" / "contributing.md"
PROBE, TEST = "sidecar/probes/shm.py", "tests/unit/probes/test_shm.py"
CODE = "shared-memory-short"
SERIES = "sglang_sidecar_shared_memory_free_bytes"


def files_of(page: Path) -> Mapping[str, str]:
    """The files that a page shows: a line with a path in backquotes and a colon, and the block after it."""
    found = re.findall(r"^`([\w/.]+)`:\n\n```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return dict(found)


@pytest.fixture(name="copy", scope="module")
def _copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the probe of the page in it, and the page's test beside it."""
    folder = tmp_path_factory.mktemp("contributor")
    shutil.copytree(agent.ROOT / "sidecar", folder / "sidecar", ignore=shutil.ignore_patterns("__pycache__"))
    shown = files_of(PAGE)
    assert list(shown) == [PROBE, TEST]
    for path, text in shown.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    shutil.copy(agent.ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture(name="env")
def _env(copy: Path) -> Mapping[str, str]:
    """In which the copy is imported, whatever the folder; without the probe's own settings of this process."""
    return {"PYTHONPATH": f"{copy}{os.pathsep}{agent.ROOT}"}


@pytest.fixture(name="server")
def _server() -> Iterator[int]:
    """A process that stands for a server: its /dev/shm is this machine's."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def run(copy: Path, env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with these words in the copy's folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env=agent.environment(env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def checked(copy: Path, env: Mapping[str, str], server: int, form: str, needed: int) -> str:
    """A check of the stand-in in one of its forms."""
    words = ("--server-pid", str(server), "--shm-needed", str(needed), "--no-import", "--format", form)
    return run(copy, env, "-m", "sidecar", "check", *words).stdout


def test_the_test_of_the_page_passes(copy: Path, env: Mapping[str, str]) -> None:
    """As a contributor's would."""
    done = run(copy, env, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(copy / TEST))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(("needed", "active"), [(0, False), (10**12, True)])
def test_it_is_in_report_and_metrics(
    copy: Path, env: Mapping[str, str], server: int, needed: int, active: bool
) -> None:
    """Condition, section and probe in the report, and in the metrics the gauge, both by its own setting."""
    report: dict[str, Any] = json.loads(checked(copy, env, server, "json", needed))
    (found,) = [one for one in report["conditions"] if one["code"] == CODE]
    assert (found["active"], found["probe"]) == (active, "shm")
    free = report["shared_memory"]["free"]
    assert 0 < free <= report["shared_memory"]["size"]
    assert report["probes"]["shm"]["outcome"] == "ok"
    series = checked(copy, env, server, "metrics", needed)
    assert re.search(rf"^{SERIES} \d", series, re.MULTILINE)
    assert f'sglang_sidecar_condition_active{{code="{CODE}",severity="warning"}} {float(active)}' in series
    assert ("fix: Mount an emptyDir" in checked(copy, env, server, "text", needed)) is active


def test_it_is_explained_and_set(copy: Path, env: Mapping[str, str]) -> None:
    """`explain`, `config show`, and errors that name its key."""
    explained = run(copy, env, "-m", "sidecar", "explain", CODE)
    assert "The server has little shared memory left" in explained.stdout
    variable = {**env, "SGLANG_SIDECAR_SHM_NEEDED": "7", "SGLANG_SIDECAR_INTERVALS": "shm=5"}
    shown = run(copy, variable, "-m", "sidecar", "config", "show")
    assert re.search(r"^shm_needed +7 +environment SGLANG_SIDECAR_SHM_NEEDED$", shown.stdout, re.MULTILINE)
    refused = run(copy, env, "-m", "sidecar", "check", "--shm-needed", "much")
    assert refused.returncode == 64
    assert refused.stderr == (
        "sglang-sidecar: shm_needed: 'much' (flag --shm-needed) must be a whole number of MiB, as in 1024\n"
    )


def test_it_is_in_the_generated_pages(copy: Path, env: Mapping[str, str], server: int, tmp_path: Path) -> None:
    """Metrics, conditions and settings have it, and the report is valid by the schema."""
    done = run(copy, env, "-m", "sidecar.documentation", "--write", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"`{SERIES}`" in (tmp_path / "metrics.md").read_text()
    assert f"\n## {CODE}\n" in (tmp_path / "conditions.md").read_text()
    assert "| `shm_needed` | `--shm-needed MIB` |" in (tmp_path / "settings.md").read_text()
    schema = json.loads((tmp_path / "report.schema.json").read_text())
    jsonschema.validate(json.loads(checked(copy, env, server, "json", 0)), schema)
    assert "shared_memory" in schema["required"]


def test_it_is_served(copy: Path, env: Mapping[str, str], server: int, tmp_path: Path) -> None:
    """The page, its documentation, readiness by probe and by code, and the metrics of a running agent."""
    words = ("--server-pid", str(server), "--shm-needed", str(10**12), "--import", "never")
    # From the copy's folder, which comes first on the import path of `-m`.
    with agent.serve(tmp_path / "log", *words, env=env, through=lambda line: ["env", "-C", str(copy), *line]) as served:
        served.until("condition_active", 1.0, code=CODE)
        page = served.get("/")[1]
        assert CODE in page
        assert "MiB are free in the server" in page
        assert "shared_memory" in page
        assert "The server has little shared memory left" in served.get("/docs")[1]
        assert "[+]shm ok" in served.get("/readyz?verbose")[1]
        assert served.get("/readyz/shm")[0] == 200
        assert served.get(f"/readyz/{CODE}")[0] == 503
        assert served.value("probe_success", probe="shm") == 1.0


# Ruff takes for the project's own what it finds beside the file.
OURS = "lint.isort.known-first-party = ['sidecar', 'tests']"


@pytest.mark.parametrize("command", [("check", "--config", OURS), ("format", "--check")])
def test_the_page_s_files_pass_the_linters(copy: Path, env: Mapping[str, str], command: tuple[str, ...]) -> None:
    """What is to be copied is what `make lint` accepts."""
    done = run(copy, env, "-m", "ruff", *command, "--no-cache", PROBE, TEST)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_s_probe_has_its_types(copy: Path, env: Mapping[str, str]) -> None:
    """Strict, as the package has them."""
    done = run(copy, env, "-m", "mypy", "--cache-dir", os.devnull, PROBE)
    assert done.returncode == 0, done.stdout + done.stderr
