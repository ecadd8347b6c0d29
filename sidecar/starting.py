"""What ends a launch before any code of SGLang's runs: its interpreter, or an SGLang that is not there or not whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from sidecar.environment import EnvironmentFacts, InterpreterUnusable, Shadow
from sidecar.imports import ImportEvidence
from sidecar.launch.forms import LaunchForm
from sidecar.model import Answer, ConditionType, Finding, Gate, Scope, Severity, Status, Target, World
from sidecar.modules import (
    INTERPRETER_UNUSABLE,
    SGLANG_NOT_INSTALLED,
    as_remedy,
    broken_start,
    start_code,
    variables_missed,
)
from sidecar.requirements import installer, parsed, unshadow
from sidecar.target import PREFLIGHT

_LAUNCH_COMMAND: Final = "launch-command"
_NAMED: Final = "setting"
_SGLANG: Final = "sglang"
_LAUNCHES: Final[Mapping[str, str]] = {
    LaunchForm.MODULE: "sglang.launch_server",
    LaunchForm.CONSOLE_SCRIPT: "sglang.cli.main",
}
"""What a form of launch runs; releases before 0.5.5.post3 have no other than the first."""
SERVER_MODULES: Final = tuple(_LAUNCHES.values())
_NOT_LOOKED: Final[Mapping[str, str]] = {
    "no-interpreter": "Unknown: no interpreter with SGLang or FlashInfer was found.",
    "not-examined": "Unknown: the launch's interpreter was not examined: it could not be, or nothing names it.",
    "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing about the server's.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
    "probe-environment": "Unknown: a variable of the server that cannot be seen, or code that runs at the start, "
    "may lead elsewhere.",
    "server-runs": "Unknown: a server runs, so what it runs on lies elsewhere than what was read.",
}

INTERPRETER: Final = ConditionType(
    code=INTERPRETER_UNUSABLE,
    severity=Severity.CRITICAL,
    gate=Gate.LAUNCH,
    title="The interpreter of the launch cannot run this SGLang",
    when="The interpreter that a launch names is not there, cannot be executed, ends while it starts, or is older than "
    "what SGLang's metadata requires. What keeps the sidecar from examining one that only a setting names is told of "
    "as unknown: the server may run on another.",
    remedy="Name an interpreter that works, in the launch or with server_python.",
    reasons={
        "missing": "There is no such file.",
        "folder": "It is a folder.",
        "not-executable": "It may not be executed: by its mode, or by the file system that it lies on.",
        "wrong-architecture": "It is a program for another processor, or no program at all.",
        "loader-missing": "It is there, and the loader or the interpreter that it names in turn is not.",
        "not-python": "It runs, and is no Python 3.8 or newer.",
        "ends-at-start": "A sitecustomize, usercustomize or .pth file, which runs whenever it starts, ends it.",
        "older-than-required": "SGLang's metadata (Requires-Python) excludes this Python.",
        **_NOT_LOOKED,
    },
    hold=(1, 1),
)
NOT_INSTALLED: Final = ConditionType(
    code=SGLANG_NOT_INSTALLED,
    severity=Severity.CRITICAL,
    gate=Gate.LAUNCH,
    title="SGLang is not installed in the launch's interpreter",
    when="The interpreter that a launch names has no package `sglang`: the launch ends within a second. What else is "
    "missing there follows from it.",
    remedy="Launch with the interpreter that has SGLang, or install SGLang there.",
    reasons={
        "absent": "There is no package of that name.",
        "without-site-packages": "The flag -S keeps the interpreter from looking where packages are installed.",
        "leftover-folder": "Only a leftover folder is there, which Python accepts as an empty package.",
        **_NOT_LOOKED,
    },
    depends_on=(INTERPRETER_UNUSABLE,),
    hold=(1, 1),
)
INCOMPLETE: Final = ConditionType(
    code="sglang-incomplete",
    severity=Severity.CRITICAL,
    gate=Gate.LAUNCH,
    title="SGLang is not whole",
    when="SGLang is registered as installed, and files that every launch reads are missing or cannot be read as what "
    "they are, or Python finds another `sglang` before it that has no server. What this agent says of the release then "
    "rests on its metadata alone.",
    remedy="Install the same release again: `pip install --force-reinstall --no-deps sglang==VERSION`.",
    reasons={
        "module-gone": "The package itself is gone; only its registration is left.",
        "files-missing": "A file that its RECORD lists is not there.",
        "files-damaged": "A file is empty, cut off, or does not parse.",
        "files-unreadable": "The server's user may not read a file.",
        "shadowed": "Another `sglang`, in the launch's folder or on PYTHONPATH, comes first and has no server.",
        "shadow-unread": "Unknown: another `sglang` comes first, and only running it would show whether it is one.",
        **_NOT_LOOKED,
    },
    depends_on=(INTERPRETER_UNUSABLE, SGLANG_NOT_INSTALLED),
    hold=(1, 1),
)
CONDITIONS: Final = (INTERPRETER, NOT_INSTALLED, INCOMPLETE)


class StartFacts(Struct, frozen=True, kw_only=True):
    """What is known of the interpreter and its SGLang.

    ``without_site``: it is told to do without its site-packages (``-S``). ``environment`` is None where it could
    not be read: ``fault`` says what is wrong with the interpreter, ``why`` why there is nothing to read. ``broken``
    is an import that did not get as far as the probe. ``elsewhere`` names an interpreter of this image that has
    SGLang, where this one has not. ``modules`` are those of which the launch runs one.
    """

    preflight: bool
    python: str | None
    python_source: str
    running: bool
    variables_seen: bool
    without_site: bool = False
    environment: EnvironmentFacts | None = None
    fault: InterpreterUnusable | None = None
    why: str = ""
    broken: ImportEvidence | None = None
    elsewhere: str | None = None
    modules: tuple[str, ...] = SERVER_MODULES

    @property
    def by_launch(self) -> bool:
        """Whether a launch itself names this interpreter, so that the launch ends with it."""
        return self.preflight and self.python_source == _LAUNCH_COMMAND

    @property
    def looked_right(self) -> bool:
        """Whether modules were looked for where the launch looks for them."""
        return self.variables_seen or self.python_source == _NAMED


def facts_of(target: Target, **found: object) -> StartFacts:
    """Make the facts about a target from what was ``found`` of it."""
    return StartFacts(
        preflight=target.launch_source == PREFLIGHT,
        python=target.python,
        python_source=target.python_source,
        running=target.pid is not None,
        variables_seen=target.environ is not None,
        without_site="-S" in target.python_flags,
        modules=_modules_of(target),
        **found,  # type: ignore[arg-type]  # the fields of the very class, given by name
    )


def _modules_of(target: Target) -> tuple[str, ...]:
    named = None if target.notes is None else _LAUNCHES.get(target.notes.form)
    return SERVER_MODULES if named is None else (named,)


def judge(facts: StartFacts, world: World) -> tuple[Finding, ...]:
    """One finding per condition."""
    environment = facts.environment
    if environment is None:
        return _unread(facts)
    reason = environment.problem or ("scope-self" if environment.scope is Scope.SELF else None)
    if reason is not None:
        return tuple(_unknown(kind, reason) for kind in CONDITIONS)
    answering = world.server.answer is Answer.ACCEPTED
    return (
        _interpreter(facts, environment, answering=answering),
        _installed(facts, environment, answering=answering),
        _whole(environment) if environment.shadow is None else _shadowed(facts, environment, environment.shadow),
    )


def _unknown(kind: ConditionType, reason: str, message: str = "", remedy: str | None = None) -> Finding:
    # Other probes, which ask for more of the same environment, weigh for all that is not known of it.
    return Finding(
        code=kind.code,
        status=Status.UNKNOWN,
        reason=reason,
        message=message or kind.reasons[reason],
        remedy=remedy,
        severity=Severity.INFO,
    )


def _unread(facts: StartFacts) -> tuple[Finding, ...]:
    fault = facts.fault
    if fault is None:
        return tuple(_unknown(kind, "no-interpreter", facts.why) for kind in CONDITIONS)
    if not facts.by_launch:
        return tuple(_unknown(kind, "not-examined", str(fault), fault.remedy) for kind in CONDITIONS)
    first = Finding(
        code=INTERPRETER.code,
        status=Status.TRUE,
        reason=fault.reason,
        message=fault.sentence,
        remedy=fault.remedy,
        final=True,
        sglang_says=None,
    )
    return (first, *(_unknown(kind, "not-examined", fault.sentence) for kind in (NOT_INSTALLED, INCOMPLETE)))


def _interpreter(facts: StartFacts, environment: EnvironmentFacts, *, answering: bool) -> Finding:
    broken = facts.broken
    if broken is not None:
        how = broken_start(broken) or "it ends before its first line"
        message = f"{facts.python} does not start: {how}."
        missed = variables_missed(broken)
        faithful = facts.variables_seen and broken.same_user and environment.scope is Scope.SERVER
        if missed or not faithful:
            lacking = ", ".join(missed[:3]) or "they cannot be seen"
            message += f" One of the server's variables that it was started without ({lacking}) may change that."
            return _unknown(INTERPRETER, "probe-environment", message)
        named = (
            f"repair or remove {broken.where}" if broken.where else f"see what `{facts.python} -v -c pass` ends with"
        )
        return Finding(
            code=INTERPRETER.code,
            status=Status.TRUE,
            reason="ends-at-start",
            message=f"{message} Whatever this interpreter is to run ends the same way, the server too.",
            remedy=f"{named}: Python runs it whenever it starts" if broken.where else named,
            evidence=(f"printed last: {broken.tail}",) if broken.tail else (),
            final=True,
        )
    wanted = environment.requires_python.get(_SGLANG)
    # A server that answers proves that it gets along, whatever its metadata says.
    if wanted is not None and not answering and _excludes(wanted, environment.python_version):
        release = environment.distributions.get(_SGLANG, "")
        return Finding(
            code=INTERPRETER.code,
            status=Status.TRUE,
            reason="older-than-required",
            message=f"{environment.python} is Python {environment.python_version}, and SGLang {release} requires "
            f"Python {wanted} by its metadata: no installer puts the two together.",
            remedy=_other_python(wanted, release),
        )
    return Finding(code=INTERPRETER.code, status=Status.FALSE)


def _excludes(wanted: str, version: str | None) -> bool:
    found = parsed(version)
    if found is None:
        return False
    try:
        return not SpecifierSet(wanted).contains(found, prereleases=True)
    except InvalidSpecifier:
        return False


def _other_python(wanted: str, release: str) -> str:
    """Make an environment of a Python that will do: the oldest of the usual ones that is accepted."""
    fits = [minor for minor in range(10, 15) if not _excludes(wanted, str(Version(f"3.{minor}.0")))]
    python = f"python3.{fits[0]}" if fits else "another Python"
    pinned = f"sglang=={release}" if release else "sglang"
    if not fits:
        return f"Install {pinned} in an environment of Python {wanted}, and launch with that."
    return f"{python} -m venv VENV && VENV/bin/python -m pip install {pinned}  # and launch with VENV/bin/python"


def _installed(facts: StartFacts, environment: EnvironmentFacts, *, answering: bool) -> Finding:
    files = environment.modules.get(_SGLANG)
    registered = _SGLANG in environment.distributions
    kind = "absent" if files is None else files.kind
    module = environment.modules.get("sglang.launch_server")
    # A folder without its __init__ may be enough of a package, as long as what is launched is in it.
    launched = module is not None and module.kind not in {"absent", "namespace"}
    if registered or launched or kind not in {"absent", "namespace"}:
        return Finding(code=NOT_INSTALLED.code, status=Status.FALSE)
    if facts.running or answering:
        return _unknown(NOT_INSTALLED, "server-runs")
    if not facts.by_launch and facts.python_source != _NAMED:
        # It was found by looking around: whoever launches may well use another.
        return _unknown(NOT_INSTALLED, "not-examined")
    if not facts.looked_right or start_code(environment) or _SGLANG in environment.editable:
        return _unknown(NOT_INSTALLED, "probe-environment")
    leftover = kind == "namespace" and files is not None and bool(files.places)
    whose = " of this launch" if facts.by_launch else " that server_python names" * (facts.python_source == _NAMED)
    if facts.without_site:
        return Finding(
            code=NOT_INSTALLED.code,
            status=Status.TRUE,
            reason="without-site-packages",
            message=f"The interpreter{whose}, {environment.python}, is started with -S, by which it does without its "
            "site-packages, and has no SGLang elsewhere.",
            remedy="Leave -S out of the launch.",
            sglang_says="ModuleNotFoundError: No module named 'sglang'",
        )
    only = f", only a leftover folder ({files.places[0]})" if leftover and files is not None else ""
    install = installer(environment).install(_SGLANG)
    return Finding(
        code=NOT_INSTALLED.code,
        status=Status.TRUE,
        reason="leftover-folder" if leftover else "absent",
        message=f"The interpreter{whose}, {environment.python}, has no SGLang{only}.",
        remedy=install
        if facts.elsewhere is None
        else f"Launch with {facts.elsewhere}, which has SGLang, or install it here: `{install}`.",
        sglang_says=f"ModuleNotFoundError: No module named '{'sglang.launch_server' if leftover else 'sglang'}'",
    )


_WRONG: Final = {
    "missing": "is missing",
    "empty": "is empty",
    "cut-off": "is cut off",
    "damaged": "does not parse",
    "unreadable": "may not be read by the server's user",
}


def _whole(environment: EnvironmentFacts) -> Finding:
    release = environment.distributions.get(_SGLANG)
    files = environment.modules.get(_SGLANG)
    if release is None or _SGLANG in environment.editable:
        return Finding(code=INCOMPLETE.code, status=Status.FALSE)
    again = installer(environment).restore(environment, _SGLANG)
    if files is not None and files.kind in {"absent", "namespace"} and not start_code(environment):
        return Finding(
            code=INCOMPLETE.code,
            status=Status.TRUE,
            reason="module-gone",
            message=f"SGLang {release} is registered as installed in {environment.python}, and its package is gone.",
            remedy=again,
            sglang_says="ModuleNotFoundError: No module named 'sglang'" if files.kind == "absent" else None,
        )
    wrong = environment.unusable
    if not wrong:
        return Finding(code=INCOMPLETE.code, status=Status.FALSE)
    states = set(wrong.values())
    denied = states == {"unreadable"}
    reason = "files-unreadable" if denied else "files-missing" if "missing" in states else "files-damaged"
    named = ", ".join(f"{file} {_WRONG.get(state, 'is damaged')}" for file, state in wrong.items())
    return Finding(
        code=INCOMPLETE.code,
        status=Status.TRUE,
        reason=reason,
        message=f"SGLang {release} is not whole: {named}. Every launch reads that, and what is said of this release "
        "rests on its metadata alone.",
        remedy=f"give the server's user the right to read {next(iter(wrong))} in {environment.site_dirs[0]}"
        if denied and environment.site_dirs
        else again,
    )


def _shadowed(facts: StartFacts, environment: EnvironmentFacts, shadow: Shadow) -> Finding:
    """Judge what Python finds before the installed SGLang: a whole one, as a developer's checkout, is SGLang, too."""
    installed = environment.distributions.get(_SGLANG)
    instead = f" before the installed SGLang {installed}" if installed else ""
    found = f"Python finds {shadow.place}{instead}"
    launched = any(_is_code(environment, name) for name in facts.modules)
    ended = shadow.raises or shadow.unusable.get("sglang/__init__.py") == "damaged"
    if launched and not ended and not shadow.unusable:
        return Finding(
            code=INCOMPLETE.code,
            status=Status.FALSE,
            message=f"{found}: that is what the launch runs, and which release it is, is not known.",
        )
    remedy = unshadow(_SGLANG, shadow.folder)
    led_elsewhere = shadow.meddles or (_SGLANG in environment.editable and bool(start_code(environment)))
    if not ended and (launched or led_elsewhere):
        return Finding(
            code=INCOMPLETE.code,
            status=Status.UNKNOWN,
            reason="shadow-unread",
            message=f"{found}, which is not a whole SGLang; only running it would show what the launch comes to.",
            remedy=as_remedy(remedy),
            evidence=tuple(f"{file} {_WRONG.get(state, 'is damaged')}" for file, state in shadow.unusable.items()),
        )
    if not facts.variables_seen:
        return _unknown(INCOMPLETE, "probe-environment")
    first = facts.modules[0]
    lacks = "cannot be imported" if ended else f"has no {first.removeprefix('sglang.')}"
    return Finding(
        code=INCOMPLETE.code,
        status=Status.TRUE,
        reason="shadowed",
        message=f"{found}, which {lacks}: a launch ends with that.",
        remedy=as_remedy(remedy),
        # What code raises is not known by reading; an empty package has one answer only.
        sglang_says=None if ended else _refusal(facts, environment),
    )


def _refusal(facts: StartFacts, environment: EnvironmentFacts) -> str | None:
    """What Python says where the module that is launched is not in the package; None where that depends."""
    files = environment.modules.get(_SGLANG)
    if len(facts.modules) != 1 or files is None or files.kind not in {"package", "namespace"}:
        return None
    if facts.modules == ("sglang.launch_server",):
        return "No module named sglang.launch_server"
    return "ModuleNotFoundError: No module named 'sglang.cli'"


def _is_code(environment: EnvironmentFacts, name: str) -> bool:
    module = environment.modules.get(name)
    return module is not None and module.kind in {"package", "module", "extension"}
