"""The command line: parses, calls, and turns the outcome into an exit code. No logic of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import structlog
from msgspec.structs import replace

from sidecar import __version__, app, catalog, config, log
from sidecar.catalog import Catalog
from sidecar.config import ImportPolicy, Setting, Settings
from sidecar.demo import SCENARIOS, UnknownScenarioError
from sidecar.demo.replay import NOT_LOOKED_AT
from sidecar.model import Baseline

if TYPE_CHECKING:
    from sidecar.text import Style

T = TypeVar("T")

EX_USAGE = 64
EX_SOFTWARE = 70
_SERVE = "serve"
_DESCRIPTORS = 65536

_EPILOG = """\
exit status of check: 0 ok, 1 warning, 2 critical, 3 unknown; 64 usage or configuration, 70 internal error;
128 + the signal's number: ended by a signal before it was done
"""


_FLAG = re.compile(r"--[a-z][a-z0-9-]{0,46}")
_QUOTED = re.compile(
    r"(ignored explicit argument|invalid choice|invalid \w+ value):? ['\"].*?(?= \(choose from |\Z)", re.DOTALL
)
"""A word of the command line as argparse's messages repeat it."""


class _Parser(argparse.ArgumentParser):
    """argparse's own status for a usage error is 2, which a check must not return for "critical".

    Nor are flags abbreviated: what is unique today may not be tomorrow.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | more))

    def error(self, message: str) -> NoReturn:
        # argparse repeats what it does not take, and that may be a key: of a launch, for one, without its "--".
        message = _QUOTED.sub(r"\1", message)
        self.print_usage(sys.stderr)
        self.exit(EX_USAGE, f"{self.prog}: {message}\n")


def _parser(settings: Sequence[Setting]) -> argparse.ArgumentParser:
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
    for setting in settings:
        group.add_argument(
            setting.flag,
            dest=f"setting_{setting.key}",
            metavar=setting.metavar,
            action="append" if setting.repeatable else "store",
            help=f"{setting.doc} (default: {setting.default})".replace("%", "%%"),
        )

    demo = _Parser(add_help=False)
    demo.add_argument(
        "--demo",
        metavar="SCENARIO",
        help=f"show a recorded server instead of this machine's: {', '.join(SCENARIOS)}",
    )
    commands.add_parser(
        _SERVE, parents=[common, demo], help="run the agent", description="Run the agent until SIGTERM."
    )
    check = commands.add_parser(
        "check",
        parents=[common, demo],
        help="look once and say what is wrong",
        usage="%(prog)s [options] [-- LAUNCH...]",
        description="Run every probe once. After -- give the flags or the whole command that would launch the "
        "server; they are judged as if it were being launched here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("-v", "--verbose", action="store_true", help="also show the evidence and what is fine")
    check.add_argument("--format", choices=("text", "json", "metrics"), default="text", help="output (default: text)")
    check.add_argument("--no-import", action="store_true", help="judge from files only; under a second")
    check.add_argument(
        "--fail-on", choices=("warning", "critical"), default="warning", help="critical: exit 0 for warning and unknown"
    )
    baseline = commands.add_parser(
        "baseline",
        help="what the environment should be",
        description="Write or compare a baseline; nothing is imported.",
    )
    baseline_commands = baseline.add_subparsers(dest="baseline_command", required=True, metavar="COMMAND")
    baseline_commands.add_parser(
        "write",
        parents=[common],
        help="print a baseline of what runs now",
        description="Print a baseline of what runs now. With --baseline FILE that file is brought up to date: its "
        "comments stay, and so does each value that still holds. Items that cannot be seen from here are left out.",
    )
    diff = baseline_commands.add_parser(
        "diff",
        parents=[common],
        help="compare what runs now with the baseline",
        description="Compare what runs now with --baseline FILE. Exit status 0: as it should be, 1: it differs, "
        "3: an item of it is not known.",
    )
    diff.add_argument("--format", choices=("text", "json"), default="text", help="output (default: text)")
    config = commands.add_parser("config", help="settings", description="Look at the settings.")
    config_commands = config.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    show = config_commands.add_parser("show", parents=[common], help="each effective setting and where it came from")
    show.add_argument("--format", choices=("text", "json"), default="text", help="output (default: text)")
    explain = commands.add_parser("explain", help="describe a condition, or list them")
    explain.add_argument("code", nargs="?", metavar="CODE", help="for example driver-not-loaded")
    return parser


def _unrecognized(words: Sequence[str], command: str, known: Sequence[str]) -> str:
    """What is said of words that no option takes: the names of flags alone, for the others may be their values."""
    from difflib import get_close_matches  # rarely needed

    flags = [flag for flag in dict.fromkeys(word.partition("=")[0] for word in words) if _FLAG.fullmatch(flag)]
    if not flags:
        return f"{command} takes no such words (they are not repeated here); `sglang-sidecar {command} --help` tells"
    meant = dict.fromkeys(match for flag in flags for match in get_close_matches(flag, known, n=1))
    hints = [f"did you mean {', '.join(meant)}?"] if meant else []
    if command == "check":
        hints.append("flags of a launch belong behind --, as in: check -- --tp 2")
    elif not meant:
        hints.append(f"`sglang-sidecar {command} --help` lists what there is")
    return f"unrecognized arguments: {', '.join(flags)}; {'; '.join(hints)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        # Whoever runs a command reads what it says; an agent must not depend on that.
        with log.unwaited() if arguments[:1] == [_SERVE] else contextlib.nullcontext():
            return _main(arguments)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            log.leave(sys.stderr)


def _main(arguments: list[str]) -> int:
    launch: list[str] = []
    separated = "--" in arguments
    if separated:
        at = arguments.index("--")
        arguments, launch = arguments[:at], arguments[at + 1 :]
    known = catalog.build(catalog.discover())
    parser = _parser(known.settings)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unrecognized(unknown, options.command, [setting.flag for setting in known.settings]))
    if launch and options.command != "check":
        _say(f"sglang-sidecar: {options.command} takes nothing after --; launch flags belong to check\n")
        return EX_USAGE
    if separated and not launch and options.command == "check":
        # As of an unset variable in a script: what runs here must not be judged in the launch's place.
        _say("sglang-sidecar: nothing stands behind --; give the launch there, or leave -- out to look at ")
        _say("what runs here\n")
        return EX_USAGE
    try:
        code = _run(known, options, tuple(launch))
    except UnknownScenarioError as error:
        _say(f"sglang-sidecar: {error}\n")
        return EX_USAGE
    except OSError as error:
        # The disk is full, for one.
        _say(f"sglang-sidecar: the output cannot be written: {error.strerror}\n")
        log.leave(sys.stdout)
        return EX_SOFTWARE
    except app.StoppedError as stopped:
        return 128 + stopped.number
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - the last line of defence: a status that means "our fault"
        structlog.get_logger().exception("internal error")
        return EX_SOFTWARE
    return code


def _write(content: str | bytes) -> None:
    """Print all of the output. A reader that has seen enough, such as ``head``, leaves without a word about it."""
    try:
        if isinstance(content, bytes):
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
        else:
            sys.stdout.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        log.leave(sys.stdout)


def _say(text: str) -> None:
    """Print to standard error. Where that cannot be written, the exit status alone says it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)


def _style() -> Style:
    """How to print to where the output goes."""
    from sidecar import text

    return text.style_of(os.environ, terminal=sys.stdout.isatty(), columns=shutil.get_terminal_size().columns)


def _raise_descriptor_limit() -> None:
    """Use more of the file descriptors that this process may have.

    Service managers start processes with 1024, which a few hundred connections that never send a request would
    use up; then no probe of the kubelet would be answered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _forbid_core_dumps() -> None:
    """Keep this process' memory out of files: it holds the server's environment and key.

    A limit of 1 byte, not 0: to the kernel 1 means no core at all, while with 0 it still hands one to a program that
    collects them, as systemd and Ubuntu have it (core(5), fs/coredump.c).
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    limit = 1 if hard == resource.RLIM_INFINITY else min(hard, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


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


def _run(known: Catalog, options: argparse.Namespace, launch: tuple[str, ...]) -> int:
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
            conditions=tuple(known.conditions),
            declared=known.settings,
        )
    except config.ConfigError as error:
        for problem in error.problems:
            _say(f"sglang-sidecar: {problem.sentence}\n")
        return EX_USAGE
    warnings = loaded.warnings
    if loaded.exposed is not None:
        if options.command != "config" and app.on_host(loaded.believable_placement()):
            _say(f"sglang-sidecar: {loaded.exposed}\n")
            return EX_USAGE
        warnings = (*warnings, loaded.exposed)
    for warning in warnings:
        _say(f"sglang-sidecar: warning: {warning}\n")
    if options.command == "config":
        _write(config.render(loaded, options.format))
        return 0
    settings = replace(loaded.settings, launch=launch)
    log.configure(settings.log_format, settings.log_level, sys.stderr)
    _forbid_core_dumps()
    if options.command == "baseline":
        return _baseline(settings, options)
    if options.demo is not None:
        if launch:
            _say("sglang-sidecar: a demo has a server of its own; leave out what stands after --\n")
            return EX_USAGE
        if ignored := sorted(settings.explicit & NOT_LOOKED_AT):
            _say(f"sglang-sidecar: warning: of no effect in a demo: {', '.join(ignored)}\n")
    return _serve(settings, options.demo) if options.command == _SERVE else _check(settings, options)


def _looped(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, run in an event loop."""
    before = {number: signal.getsignal(number) for number in app.STOP_SIGNALS}
    try:
        return asyncio.run(work)
    finally:
        # The loop, which handles them while it runs, leaves none: then process 1 would not be ended any more.
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(settings: Settings, demo: str | None) -> int:
    from sidecar.access import AccessError  # a check is faster without the HTTP server and what belongs to it
    from sidecar.web import ListenError

    _raise_descriptor_limit()
    # What start-up made stays for good: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    try:
        _looped(app.serve(settings, demo))
    except (ListenError, AccessError) as error:
        _say(f"sglang-sidecar: {error}\n")
        return EX_USAGE
    return 0


def _check(settings: Settings, options: argparse.Namespace) -> int:
    from sidecar import report, text  # an agent that serves needs the one late and the other never

    if any(word.startswith("--config") or " --config" in word for word in settings.launch):
        from sidecar.launch.file import fault_of  # only here: few launches have such a file

        fault = None if settings.server_root is not None else fault_of(settings.launch)
        if fault is not None:
            says = f" (SGLang: {fault.says})" if fault.says else ""
            _say(f"sglang-sidecar: the launch's --config {fault}{says}\n")
            return EX_USAGE
    snapshot, known = _looped(app.check(settings, options.demo))
    if options.format == "metrics":
        from sidecar.exposition import Exposition  # only here: the other forms need no metrics library

        # Without the families about the process: it is over, and whoever exports the file has such families of its own.
        rendered = Exposition(known, process=list).render(snapshot, accept="text/plain", accept_encoding="identity")
        _write(rendered.body)
    elif options.format == "json":
        _write(report.encode(report.build(snapshot, known)) + b"\n")
    else:
        _write(text.render(report.build(snapshot, known), verbose=options.verbose, style=_style()))
    code = report.exit_code(snapshot)
    return 0 if options.fail_on == "critical" and code in (1, 3) else code


def _baseline(settings: Settings, options: argparse.Namespace) -> int:
    from sidecar import baseline  # only here: no other command writes one

    path = settings.baseline
    writing = options.baseline_command == "write"
    if path is None and not writing:
        _say("sglang-sidecar: baseline diff needs --baseline FILE, or `baseline` in the configuration\n")
        return EX_USAGE
    existing = None
    if path is not None:
        try:
            if writing and not Path(path).exists():
                # The first one is written where its place is known already, as in a pod whose ConfigMap is yet to come.
                _say(f"sglang-sidecar: there is no baseline {path} yet, so this is a new one\n")
            else:
                existing = baseline.text(Path(path))
        except ValueError as error:
            _say(f"sglang-sidecar: the baseline {path} {error}\n")
            return EX_USAGE
    snapshot, _ = _looped(
        app.check(
            replace(settings, import_policy=ImportPolicy.NEVER, explicit=settings.explicit | {"import"}, launch=())
        )
    )
    if writing:
        try:
            written = baseline.write(snapshot.environment, existing=existing, heading=_heading())
        except ValueError as error:
            _say(f"sglang-sidecar: {error}; correct {path}, or leave --baseline out\n")
            return EX_USAGE
        _write(written)
        return 0
    wanted = snapshot.baseline or Baseline()
    if wanted.problems and not wanted.items:
        _say("".join(f"sglang-sidecar: {one.sentence}\n" for one in wanted.problems))
        return EX_USAGE
    rows = baseline.compared(wanted, snapshot.environment)
    _write(baseline.rendered(rows, wanted.problems, options.format))
    return baseline.status_of(rows, wanted.problems)


def _heading() -> str:
    return (
        f"Baseline of an SGLang environment, written by sglang-sidecar {__version__}.\n"
        "item = exact value, PEP 440 specifier such as '>=0.6.1,<0.7', or 'absent'; remove what may change freely."
    )


def _explain(known: Catalog, code: str | None) -> int:
    from sidecar import text  # as in _check

    if code is not None and code not in known.conditions:
        meant = ", ".join(text.suggestions(known, code))
        hint = f"did you mean {meant}? " if meant else ""
        _say(f"sglang-sidecar: no condition is called {code}; {hint}`sglang-sidecar explain` lists them\n")
        return EX_USAGE
    _write(text.explain(known, code, _style()))
    return 0
