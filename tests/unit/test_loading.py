"""What an agent loads before anybody asks it for more than metrics: each module costs every replica time and memory."""

from __future__ import annotations

import subprocess
import sys

SERVES = "import sidecar.cli, sidecar.exposition, sidecar.web; sidecar.cli.catalog.discover()"
"""What `serve` imports to begin."""


def loaded(program: str) -> set[str]:
    """The modules that a program has loaded at its end."""
    program += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_serving_begins_without_what_few_ask_for() -> None:
    """The page, the report, texts for a terminal and the readers of rare files come with the first use."""
    late = {"sidecar.page", "sidecar.report", "sidecar.text", "packaging.requirements", "difflib", "tomlkit", "yaml"}
    assert loaded(SERVES) & late == set()


def test_these_modules_exist() -> None:
    """Without this, a module of another name would pass the test above."""
    names = "sidecar.page, sidecar.report, sidecar.text, packaging.requirements, difflib, tomlkit, yaml"
    assert {"sidecar.page", "sidecar.report", "sidecar.text", "tomlkit", "yaml"} <= loaded(f"import {names}")


def test_a_check_begins_without_the_servers_library() -> None:
    """A preflight that only reads files needs no HTTP and no metrics."""
    assert loaded("import sidecar.cli; sidecar.cli.catalog.discover()") & {"aiohttp", "prometheus_client"} == set()
