"""A shell's own commands: what each changes of variables, folder, options and arguments.

Calls of functions, and files that a shell reads commands from, are followed in `sidecar.launch.scripts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from sidecar.launch.assignments import ASSIGNED, NAME, declaration, dissect
from sidecar.launch.state import UNSEEN, End, Expansion, Loss, State, Value, joined, names
from sidecar.launch.trace import Trace
from sidecar.launch.words import OPEN, SPLITS, Reference, Word

SPECIAL: Final = frozenset({"export", "unset", "set", ".", "source", "eval", "exec", "readonly", "trap", "shift", ":"})
"""Commands in front of which an assignment may stay."""
UNRESOLVED: Final = Loss("unresolved", "A command of the script is not known, and may change anything.")

_SETTERS: Final = frozenset({"read", "getopts", "mapfile", "readarray", "printf", "let", "wait", "local"})
"""Commands of a shell that set the variables that they name."""
_STATUS: Final = MappingProxyType({":": True, "true": True, "false": False, "export": True, "unset": True, "set": True})
"""Whether commands of a shell succeed, where that is always the same."""
_HARMLESS_OPTIONS: Final = names("b f h m v x B E H P T")
"""Options of a shell that change nothing of what is followed, by their letters."""
_LONG_OPTIONS: Final = MappingProxyType(
    {"allexport": "a", "errexit": "e", "nounset": "u", "noexec": "n", "onecmd": "t", "keyword": "k"}
    | dict.fromkeys(
        names("braceexpand hashall histexpand errtrace functrace monitor noglob notify pipefail posix verbose xtrace"),
        "x",
    )
)
_SHOWS_ONLY: Final = names("--version --help --dump-strings --dump-po-strings")
"""Options with which a shell runs nothing."""
_AT_THE_END: Final = names("EXIT 0 INT 2 TERM 15 HUP 1 QUIT 3")
"""Events of ``trap`` with which a script ends."""
_FILES_ENOUGH: Final = 1024
"""A limit of open files that hinders no import: it is the usual one of a login."""


def apply(
    words: list[str],
    rest: Sequence[Word],
    expansion: Expansion,
    state: State,
    trace: Trace,
    *,
    bash: bool,
    called: bool,
) -> None:
    """Apply a command of a shell with its words, which were ``rest``; any other program changes nothing of it.

    ``bash``: that is the shell. ``called``: the command stands in a function, or in a file that the shell reads.
    """
    name = words[0]
    match name:
        case "export" | "readonly" | "declare" | "typeset" | "local":
            _declare(rest, expansion, state, name=name, bash=bash, called=called)
        case "unset":
            _unset(words[1:], state)
        case "cd" | "pushd" | "popd":
            _change_folder(name, words[1:], state, trace, bash=bash)
        case "set":
            set_options(words[1:], state)
        case "shift":
            _shift(words[1:], state, bash=bash)
        case "trap":
            _trap(words[1:], state)
        case "ulimit":
            trace.limits = trace.limits or _limits(words[1:])
        case "eval" | "alias" | "unalias" | "shopt" | "enable" | "conda" | "module":
            state.lose(Loss("sourced", f"{name} may change anything of the shell, and is not followed."))
        case _ if name in _SETTERS:
            _set_anyhow(words[1:], state)


def status(name: str, arguments: Sequence[str], state: State) -> bool | None:
    """Whether a command of a shell succeeded that was applied to this state; None where that is not known."""
    if name in {"cd", "pushd"}:
        return True if state.cwd is not None else None
    if name in {"export", "set"} and not arguments:
        return None  # it prints, which fails where there is nowhere to
    return _STATUS.get(name) if name != "export" or all(map(NAME.match, arguments)) else None


def ends(words: Sequence[str], rest: Sequence[Word], state: State, *, called: bool) -> bool:
    """Note where a command ends the shell; give whether it surely does. ``called``: it stands in a function or file."""
    name = words[0]
    if name == "exit":
        code = words[1] if len(words) > 1 else ""
        succeeded = int(code) % 256 == 0 if code.isdecimal() and len(code) < 4 else None
        state.ended = End("the script ends in front of it, with `exit`", succeeded)
    elif name == "exec" and len(words) > 1:
        if any(word != SPLITS for word in words[1:]):
            state.ended = End("another program takes the place of the script in front of it, with `exec`")
        else:
            state.doubt = state.doubt or "another program may take the place of the script, with `exec`"
    elif name == "return" and not called:
        state.doubt = state.doubt or "`return` ends some shells"
    elif name == "kill" and "-0" not in words:
        own = any(isinstance(part, Reference) and part.name == "$" for word in rest for part in word.parts)
        if own or "0" in words[1:]:
            state.doubt = state.doubt or "the script ends itself in front of it, with `kill`"
    return state.ended is not None


# -- variables --------------------------------------------------------------------------------------


def _declare(rest: Sequence[Word], expansion: Expansion, state: State, *, name: str, bash: bool, called: bool) -> None:
    options: list[str] = []
    # What is local to a function is refused outside of one, and functions that have it are not followed.
    everywhere = name in {"export", "readonly"} or (bash and not called and name != "local")
    if name == "local" and not bash:
        state.doubt = state.doubt or "`local` ends some shells outside of a function"
    given: list[tuple[str, Value] | str] = []
    # All of the words have their values before the first variable is set.
    for word in rest[1:]:
        if ASSIGNED.match(word.marked):
            target, appends, parts = dissect(word)
            given.append((target, UNSEEN if appends or not everywhere else expansion.declared(parts)))
        else:
            given += map(declaration, expansion.fields(word))
    for one in given:
        if not isinstance(one, str):
            state.assign(*one)
            _mark(name, options, one[0], state, sure=everywhere)
        elif OPEN in one:
            state.lose(UNRESOLVED)
        elif one[:1] in {"-", "+"}:
            options.append(one)
            if not bash and one not in {"-p", "--"}:
                state.doubt = state.doubt or f"an option of `{name}` ends some shells"
        elif NAME.fullmatch(one):
            _mark(name, options, one, state, sure=everywhere)
        else:
            state.lose(UNRESOLVED)  # no name: some shells end here, others go on


def _mark(name: str, options: Sequence[str], target: str, state: State, *, sure: bool) -> None:
    """Export or not, as a declaration with these options says."""
    letters = "".join(option[1:] for option in options if option[0] == "-")
    if name == "readonly" or "r" in letters:
        state.readonly |= {target}
    if not sure:
        state.values[target], state.exports[target] = UNSEEN, None
    elif name == "export":
        if "f" not in letters:
            state.export(target, on="n" not in letters)
    elif name != "readonly":
        if set(letters) - {"x", "r", "g", "p"}:
            # What is given to another type of variable later becomes another value, or another variable's.
            state.lose(Loss("declared", "A variable of another type may change any that the script sets."))
        if "x" in letters:
            state.export(target)
        elif any("x" in option for option in options if option[0] == "+"):
            state.export(target, on=False)


def _unset(words: Sequence[str], state: State) -> None:
    if any(OPEN in word or (word.startswith("-") and word not in {"-f", "-v"}) for word in words):
        state.lose(UNRESOLVED)
    elif "-f" not in words:
        for one in words:
            state.unset(one)


def _set_anyhow(words: Sequence[str], state: State) -> None:
    """Forget what a command sets that names variables among its words."""
    for one in words:
        if OPEN in one:
            state.lose(UNRESOLVED)
        elif match := NAME.match(one):
            state.assign(match.group(), UNSEEN)


# -- options and arguments --------------------------------------------------------------------------


def set_options(words: Sequence[str], state: State, *, starts: bool = False) -> None:
    """Change options of a shell, as the command ``set`` does or, where it ``starts``, its own words."""
    rest = iter(words)
    for option in rest:
        if OPEN in option:
            state.exports_all, state.positional, state.errexit, state.nounset = None, None, None, None
            state.doubt = state.doubt or "options of its shell are not known"
            return
        if option == "--" or option[:1] not in {"-", "+"}:
            state.positional = None
            return
        if option.startswith("--"):
            if option in _SHOWS_ONLY:
                state.ended = End(f"with {option} a shell runs no command")
            elif option in {"--rcfile", "--init-file"}:
                next(rest, None)
            continue
        for letter in option[1:]:
            if starts and letter in "cils":
                continue
            named = next(rest, "") if letter in "oO" else ""
            _set_option(_LONG_OPTIONS.get(named, "?") if named else letter, state, on=option[0] == "-")


def _set_option(letter: str, state: State, *, on: bool) -> None:
    match letter:
        case "a":
            state.exports_all = on
        case "e":
            state.errexit = on
        case "u":
            state.nounset = on
        case "n" | "t" | "D":
            state.ended = End(f"with the option -{letter} its shell does not run it") if on else state.ended
        case _ if letter not in _HARMLESS_OPTIONS | {"o", "O"}:
            state.lose(Loss("option", "An option of its shell may change what it makes of the script."))


def _shift(words: Sequence[str], state: State, *, bash: bool) -> None:
    count = 1 if not words else int(words[0]) if words[0].isdecimal() and len(words[0]) < 4 else None
    given = state.positional
    # Where there are fewer of them, one shell ends and another goes on.
    known = given is not None and count is not None and count < len(given)
    if given is not None and not known and not bash:
        state.doubt = state.doubt or "`shift` ends some shells where there are too few arguments"
    state.positional = [given[0], *given[count + 1 :]] if known and given is not None and count is not None else None


# -- folder, traps and limits -----------------------------------------------------------------------


def _change_folder(name: str, words: list[str], state: State, trace: Trace, *, bash: bool) -> None:
    trace.moved = True
    words = [word for word in words if word not in {"--", "-L"}]
    home = state.value("HOME")
    target = words[0] if words else home if isinstance(home, str) and name == "cd" else None
    folder: str | None = None
    known = name == "cd" or (name == "pushd" and bash and words != [])
    if known and len(words) < 2 and target and OPEN not in target and not target.startswith(("-", "+")):
        # Upwards means along the name by which the shell knows its folder.
        names = state.pwd if isinstance(state.pwd, str) else None if ".." in target.split("/") else state.cwd
        listed = state.value("CDPATH") not in {None, ""} and not target.startswith(("/", "."))
        folder = None if listed else trace.outside.entered(joined(names, target))
    by_name = target is not None and (target.startswith("/") or isinstance(state.pwd, str))
    state.cwd = folder
    state.pwd = folder if folder is not None and by_name else UNSEEN


def _trap(words: Sequence[str], state: State) -> None:
    """Note commands that run when something happens, unless that is at the end or the server's own."""
    words = [word for word in words if word != "--"]
    signals = {word.upper().removeprefix("SIG") for word in words[1:]}
    if words and words[0] not in {"", "-"} and not words[0].startswith("-") and signals - _AT_THE_END:
        state.lose(Loss("trap", "Commands that `trap` sets up may run at any time in front of the server."))


def _limits(words: Sequence[str]) -> bool:
    """Whether ``ulimit`` may take from a program what an import needs."""
    letters = {letter for word in words if word.startswith("-") for letter in word[1:]} - {"S", "H"}
    values = [word for word in words if not word.startswith("-")]
    if not values or letters == {"c"} or set(values) == {"unlimited"}:
        return False
    enough = letters == {"n"} and all(one.isdecimal() and int(one[:9]) >= _FILES_ENOUGH for one in values)
    return not enough
