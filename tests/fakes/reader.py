"""The static reader as a real child, run as the agent runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sidecar.environment import DETAILED, MODULES, STATIC_READER, TRACKED
from tests.fakes.site import Site


def read(interpreter: str, **spec: Any) -> dict[str, Any]:
    """The reader's result, run as the agent runs it."""
    spec = {"environ": {}, "tracked": TRACKED, "detailed": DETAILED, "modules": MODULES, "known": None, **spec}
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as channel:
        argv = [interpreter, "-I", "-S", "-B", STATIC_READER, json.dumps(spec), "--fd", str(writing)]
        process = subprocess.Popen(argv, pass_fds=(writing,), stderr=subprocess.PIPE, env={})
        os.close(writing)
        lines = [json.loads(line) for line in channel]
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors.decode()
    return lines[-1]["result"]


def in_root(site: Site, root: Path, **spec: Any) -> dict[str, Any]:
    """The same environment read through a foreign root, by this interpreter."""
    inside = "/" + os.path.relpath(site.root, root)
    return read(sys.executable, root=str(root), python=f"{inside}/bin/python", **spec)
