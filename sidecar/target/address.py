"""The address of a running server: set, told by its flags, or that of the socket on which it listens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sidecar.config import Settings
from sidecar.launch.args import INCOMPLETE, LaunchValue, parse_launch
from sidecar.launch.forms import LaunchForm
from sidecar.sockets import listeners_of
from sidecar.target.namespaces import shares
from sidecar.target.scanning import ServerProcess

_DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_PORT: Final = 30000
"""What SGLang takes where neither a flag nor a configuration file says otherwise."""
_HOST: Final = re.compile(r"[\w.:%-]+", re.ASCII)
"""What a host may look like: a process chooses its own command line, and must not choose more of a URL with it."""


def address_of(
    process: ServerProcess, settings: Settings, proc: Path, flags: Mapping[str, LaunchValue]
) -> tuple[str, str]:
    """(URL, how it was found) of a running server."""
    if "server_url" in settings.explicit:
        return settings.server_url, url_source(settings)
    host, port = _endpoint(process.form, flags)
    ours = shares(proc, process.pid, "net") is True
    if host is not None and port is not None:
        # In another network namespace the address is somebody else's: what it answers proves nothing.
        return _url(flags, host, port), "command-line" if ours else "command-line-other-network"
    # Sought only where the flags do not tell: a server in its first minutes does not listen yet.
    found = [one for one in listeners_of(proc, process.pid) if port in {None, one.port}] if ours else []
    if len({listener.port for listener in found}) == 1:
        return _url(flags, found[0].reachable_host, found[0].port), "listening-socket"
    if process.form is LaunchForm.OTHER:
        return settings.server_url, "default"
    return _url(flags, host or _DEFAULT_HOST, port or _DEFAULT_PORT), "command-line-incomplete"


def url_source(settings: Settings) -> str:
    """How the address of ``server_url`` is known: it has a default."""
    return "setting" if "server_url" in settings.explicit else "default"


def ports_of(process: ServerProcess, proc: Path) -> set[int]:
    """The ports that a process may serve on: the one that its flags settle, else those it listens on."""
    port = _endpoint(process.form, parse_launch(process.argv).flags)[1]
    return {port} if port is not None else {listener.port for listener in listeners_of(proc, process.pid)}


def _endpoint(form: LaunchForm, flags: Mapping[str, LaunchValue]) -> tuple[str | None, int | None]:
    """(host, port) that a server with these flags listens on, each None where the flags do not settle it.

    Flags of a program that is not SGLang's own launcher mean what that program makes of them.
    """
    if form is LaunchForm.OTHER:
        return None, None
    complete = INCOMPLETE not in flags
    host = flags.get("host", _DEFAULT_HOST if complete else None)
    port = flags.get("port", _DEFAULT_PORT if complete else None)
    return (
        host if isinstance(host, str) and _HOST.fullmatch(host) else None,
        port if isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536 else None,
    )


def _url(flags: Mapping[str, LaunchValue], host: str, port: int) -> str:
    """The URL of a server, as seen from the same network."""
    if host in {"0.0.0.0", "*"}:  # noqa: S104 - compared with, not bound to
        host = _DEFAULT_HOST
    elif host == "::":
        host = "::1"
    if ":" in host:
        host = f"[{host}]"
    return f"{'https' if flags.get('ssl') else 'http'}://{host}:{port}"
