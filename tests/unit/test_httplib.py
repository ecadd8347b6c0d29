"""How aiohttp is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ssl
from sidecar.httplib import aiohttp
held = aiohttp.connector._SSL_CONTEXT_VERIFIED.cert_store_stats()["x509"]
print(held, ssl.create_default_context().cert_store_stats()["x509"])
"""


def test_the_systems_authorities_are_not_read_at_import(tmp_path: Path) -> None:
    """The contexts that aiohttp makes for itself hold none of them; whoever makes one afterwards finds them."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("making a certificate needs the openssl program")
    file = tmp_path / "authority.pem"
    request = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test -keyout /dev/null"
    )
    subprocess.run([program, *request.split(), "-out", str(file)], check=True, capture_output=True)
    environ = os.environ | {"SSL_CERT_FILE": str(file), "SSL_CERT_DIR": str(tmp_path / "absent")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"]
