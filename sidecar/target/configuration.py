"""The configuration files that launches name."""

from __future__ import annotations

from sidecar.config import Settings
from sidecar.launch.args import ReadConfig
from sidecar.launch.file import LaunchFiles


class ConfigFiles:
    """Reads such files for one search at a time, and remembers the last one while it stays the same."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._files = LaunchFiles()

    def reader(self, folder: str | None, uid: int | None = None) -> ReadConfig | None:
        """What reads the file of a ``--config`` flag, for the user who gave it; None below a root that is set."""
        if self._settings.server_root is not None:
            return None
        return lambda path: self._files.read(path, folder, uid)


def about_config(found: str | None) -> str:
    """What became of a configuration file, as a further sentence where its flags are not known."""
    return "" if found in {None, "read", "ignored"} else f" Its configuration file is not known ({found})."
