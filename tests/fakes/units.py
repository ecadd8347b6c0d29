"""systemd's unit for the agent with a drop-in, read as systemd reads it, and what it comes to without systemd."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "deploy/systemd"
UNIT = FOLDER / "sglang-sidecar.service"
_LISTS = frozenset({"SystemCallFilter", "Environment", "DeviceAllow"})
_OWN_MOUNTS = (
    "PrivateMounts", "ProtectSystem", "ProtectHome", "PrivateTmp", "ProtectControlGroups", "ProtectKernelLogs",
    "ProtectKernelModules", "ProtectKernelTunables",
)  # fmt: skip
"""Options of this unit with which systemd gives a service a mount namespace (systemd.exec(5)); so does DynamicUser."""


def settings(drop_in: str | None) -> dict[str, str]:
    """The options of [Service]: of several lines the last one counts, or all of an option that is a list."""
    found: dict[str, str] = {}
    for path in (UNIT, *([FOLDER / drop_in] if drop_in else [])):
        section = ""
        for line in path.read_text().splitlines():
            if line.startswith("["):
                section = line
            elif section == "[Service]" and "=" in line and not line.startswith("#"):
                key, _, value = line.partition("=")
                if key in _LISTS and value:
                    value = f"{found.get(key, '')} {value}".strip()
                found[key] = value
    return found


def launcher(options: dict[str, str], uid: int, gid: int) -> list[str]:
    """A command in front of the agent's own that gives it the user, rights and mounts of these options."""
    words = []
    if options.get("DynamicUser") == "yes" or any(options.get(name, "no") != "no" for name in _OWN_MOUNTS):
        words += ["unshare", "--mount"]
    kept = ["+" + name.removeprefix("CAP_").lower() for name in options["CapabilityBoundingSet"].split()]
    words += ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all"]
    return [*words, f"--bounding-set={','.join(['-all', *kept])}", "--no-new-privs"]
