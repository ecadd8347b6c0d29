"""Mounts of a process's own, as a container has them: what is read-only there and nowhere else."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence

_SEE_TO = """
import os, subprocess, sys
writable, *command = sys.argv[1:]
if writable:
    subprocess.run(["mount", "--bind", writable, writable], check=True)
for line in open("/proc/self/mounts").read().splitlines():
    place = line.split()[1].encode().decode("unicode_escape")
    if place != writable and not place.startswith(("/proc", "/sys")):
        # Some cannot be changed from here (those of devices); nobody writes there either.
        subprocess.run(["mount", "-o", "remount,bind,ro", place], stderr=subprocess.DEVNULL, check=False)
os.execvp(command[0], command)
"""


@functools.cache
def allowed() -> bool:
    """Whether this machine lets processes have mounts and users of their own."""
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def read_only(command: Sequence[str], *, writable: str = "") -> list[str]:
    """How to run a command as user 1000, without rights, where nothing but the folder ``writable`` can be written."""
    as_user = ["unshare", "-U", "--map-user=1000", "--map-group=1000"]
    return ["unshare", "-rm", sys.executable, "-c", _SEE_TO, writable, *as_user, *command]
