"""The command line: parses, calls, and turns the outcome into an exit code. No logic of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import structlog

from sidecar import __version__, app, catalog, config, log, report
from sidecar.catalog import Catalog
from sidecar.config import SETTINGS, Settings

EX_USAGE = 64
EX_SOFTWARE = 70
_DESCRIPTORS = 65536

_EPILOG = """\
exit status of check: 0 ok, 1 warning, 2 critical, 3 unknown; 64 usage or configuration, 70 internal error
"""


class _Parser(argparse.ArgumentParser):
    """argparse's own status for a usage error is 2, which a check must not return for "critical".

    Nor are flags abbreviated: what is unique today may not be tomorrow.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | more))

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EX_USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sglang-sidecar",
        description="Diagnostics beside an SGLang server: can it run in this environment, and if not, why.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sglang-sidecar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--config", metavar="FILE", help="TOML file with settings")
    group = common.add_argument_group("settings (each is also a TOML key and an environment variable)")
    for setting in SETTINGS:
        group.add_argument(
            setting.flag,
            dest=f"setting_{setting.key}",
            metavar=setting.metavar,
            action="append" if setting.repeatable else "store",
            help=f"{setting.doc} (default: {setting.default})".replace("%", "%%"),
        )

    commands.add_parser("serve", parents=[common], help="run the agent", description="Run the agent until SIGTERM.")
    check = commands.add_parser(
        "check",
        parents=[common],
        help="look once and say what is wrong",
        usage="%(prog)s [options] [-- LAUNCH...]",
        description="Run every probe once. After -- give the flags or the whole command that would launch the "
        "server; they are judged as if it were being launched here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("-v", "--verbose", action="store_true", help="also show what is fine and what is unknown")
    check.add_argument("--format", choices=("text", "json", "metrics"), default="text", help="output (default: text)")
    check.add_argument("--no-import", action="store_true", help="judge from files only; under a second")
    check.add_argument(
        "--fail-on", choices=("warning", "critical"), default="warning", help="critical: exit 0 for warning and unknown"
    )
    config = commands.add_parser("config", help="settings", description="Look at the settings.")
    config_commands = config.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    show = config_commands.add_parser("show", parents=[common], help="each effective setting and where it came from")
    show.add_argument("--format", choices=("text", "json"), default="text", help="output (default: text)")
    explain = commands.add_parser("explain", help="describe a condition, or list them")
    explain.add_argument("code", nargs="?", metavar="CODE", help="for example driver-not-loaded")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    launch: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, launch = arguments[:at], arguments[at + 1 :]
    options = _parser().parse_args(arguments)
    if launch and options.command != "check":
        sys.stderr.write(f"sglang-sidecar: {options.command} takes nothing after --; launch flags belong to check\n")
        return EX_USAGE
    try:
        code = _run(options, tuple(launch))
        sys.stdout.flush()
    except OSError as error:
        # The reader has left or the disk is full. Python would try to write the rest again at exit.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"sglang-sidecar: the output cannot be written: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EX_SOFTWARE
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except Exception:  # noqa: BLE001 - the last line of defence: a status that means "our fault"
        structlog.get_logger().exception("internal error")
        return EX_SOFTWARE
    return code


def _raise_descriptor_limit() -> None:
    """Use more of the file descriptors that this process may have.

    Service managers start processes with 1024, which a few hundred connections that never send a request would
    use up; then no probe of the kubelet would be answered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open_standard_streams() -> None:
    """Give closed standard streams somewhere to go.

    Otherwise the next files that are opened would get their numbers, and be written to by whoever prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _run(options: argparse.Namespace, launch: tuple[str, ...]) -> int:
    known = catalog.build(catalog.discover())
    if options.command == "explain":
        return _explain(known, options.code)
    flags = {key.removeprefix("setting_"): value for key, value in vars(options).items() if key.startswith("setting_")}
    if getattr(options, "no_import", False):
        flags["import"] = "never"
    try:
        loaded = config.load(
            file=Path(options.config) if "config" in options else None,
            environ=os.environ,
            flags=flags,
            probe_names=tuple(probe.name for probe in known.probes),
            allowed_requirements=(*known.requirable, *known.conditions),
        )
    except config.ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"sglang-sidecar: {problem.sentence}\n")
        return EX_USAGE
    for warning in loaded.warnings:
        sys.stderr.write(f"sglang-sidecar: warning: {warning}\n")
    if options.command == "config":
        sys.stdout.write(config.render(loaded, options.format))
        return 0
    settings = replace(loaded.settings, launch=launch)
    log.configure(settings.log_format, settings.log_level, sys.stderr)
    return _serve(settings) if options.command == "serve" else _check(settings, options)


def _serve(settings: Settings) -> int:
    from sidecar.web import ListenError  # a check is faster without the HTTP server

    _raise_descriptor_limit()
    # What start-up made stays for good: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(app.serve(settings))
    except ListenError as error:
        sys.stderr.write(f"sglang-sidecar: {error}\n")
        return EX_USAGE
    return 0


def _check(settings: Settings, options: argparse.Namespace) -> int:
    snapshot, known = asyncio.run(app.check(settings))
    if options.format == "metrics":
        from sidecar.exposition import Exposition  # only here: the other forms need no metrics library

        rendered = Exposition(known).render(snapshot, accept="text/plain", accept_encoding="identity")
        sys.stdout.write(rendered.body.decode())
    else:
        built = report.build(snapshot, known)
        if options.format == "json":
            sys.stdout.buffer.write(report.encode(built) + b"\n")
        else:
            color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            sys.stdout.write(report.text(built, verbose=options.verbose, color=color))
    code = report.exit_code(snapshot)
    return 0 if options.fail_on == "critical" and code in (1, 3) else code


def _explain(known: Catalog, code: str | None) -> int:
    if code is not None and code not in known.conditions:
        sys.stderr.write(f"sglang-sidecar: no condition is called {code}; `sglang-sidecar explain` lists them\n")
        return EX_USAGE
    sys.stdout.write(catalog.explain(known, code))
    return 0
