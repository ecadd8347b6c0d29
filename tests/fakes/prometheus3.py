"""Prometheus 3 and a newer Alertmanager, from the unstable suite of the Debian mirror that this machine uses.

The programs are static enough to run on an older Debian. They are unpacked into a cache (``SIDECAR_TEST_CACHE``, else
``sglang-sidecar-tests`` in the user's cache folder) and neither installed nor put on the PATH.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("prometheus", "promtool", "prometheus-alertmanager")
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIMIT = 90.0
"""Seconds for the download of 60 MB."""


class UnavailableError(Exception):
    """The newer programs cannot be had here. The argument is one sentence that says why."""


def cache() -> Path:
    """Where what tests fetch is kept from one run to the next."""
    told = os.environ.get("SIDECAR_TEST_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(told) if told else home / "sglang-sidecar-tests"


@functools.cache
def newer() -> Path:
    """The folder of the programs. Raises `UnavailableError`."""
    folder = cache() / "prometheus-3"
    if all((folder / name).exists() for name in PROGRAMS):
        return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError("This is no Debian: apt-get and dpkg-deb are not there.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            found = _download(Path(name))
            folder.mkdir(exist_ok=True)
            for program in PROGRAMS:
                (found / "usr" / "bin" / program).replace(folder / program)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"The mirror took longer than {_LIMIT:.0f} s.") from error
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise UnavailableError(f"The packages cannot be had from the Debian mirror: {said.strip()[-200:]}") from error
    return folder


def _download(work: Path) -> Path:
    for part in ("lists/partial", "cache/archives/partial", "packages", "unpacked"):
        (work / part).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources.list").write_text(f"deb [signed-by={_KEYS}] {_mirror()} sid main\n")
    settings = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "APT::Sandbox::User": "",
    }
    (work / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    environ = os.environ | {"APT_CONFIG": str(work / "apt.conf")}
    _run(["apt-get", "update", "-qq", "--error-on=any"], work, environ)
    _run(["apt-get", "download", "-qq", *(f"{name}/sid" for name in PACKAGES)], work / "packages", environ)
    for package in (work / "packages").glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(work / "unpacked")], work, environ)
    return work / "unpacked"


def _mirror() -> str:
    listed = _run(["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages"], Path("/"))
    for line in listed.splitlines():
        origin, _, address = line.partition(" ")
        if origin == "Debian" and "security" not in address:
            return address
    raise OSError("no mirror of Debian is configured")


def _run(command: list[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=True)
    return done.stdout
