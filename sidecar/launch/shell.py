"""What a launch sets for its server: variables and working folder, followed through shells and wrappers.

Nothing is run. Either a variable, or the folder, is what the server would get to the letter, or it is *not seen*: a
command that may or may not run, the output of another one, a file that is not read. A variable that may be another
one's than the launch was given is never taken over from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from sidecar.launch import words as shellwords
from sidecar.launch import wrappers
from sidecar.launch.assignments import ASSIGNED, assignment, split
from sidecar.launch.forms import WRAPPER_LIMIT, basename, is_shell, locate, locate_at, script_place, shell_script
from sidecar.launch.grammar import Simple, grammar, simple_commands
from sidecar.launch.scripts import Walk, is_function
from sidecar.launch.shellbuiltins import set_options
from sidecar.launch.state import (
    KEPT_BY_SHELLS,
    READONLY_IN_BASH,
    RESET_BY_SHELLS,
    UNSEEN,
    Expansion,
    Loss,
    State,
    joined,
)
from sidecar.launch.trace import Outside, Trace
from sidecar.launch.words import OPEN, Command, Word
from sidecar.launch.wrappers import FAR
from sidecar.record import Discreet

__all__ = ["FAR", "Inside", "Outside", "follow"]

_DEPTH_LIMIT: Final = 24
"""Shells and wrappers inside one another. Real images nest three shells."""
_WORDS_LIMIT: Final = 16384
_DEPENDS_LIMIT: Final = 5
"""Commands that are named as those on which it depends whether the server is reached."""

_RESERVED: Final = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{", "time"})
"""Words of a shell that stand in front of a command."""
_QUIET: Final = frozenset(
    {"cd", "pushd", "export", "unset", "set", "ulimit", "exec", "sleep", "true", ":", "umask", ".", "source", "["}
)
"""Commands of a shell that make no files."""
_SHEBANG: Final = re.compile(r"#! ?(?:/usr)?/bin/(?:env )?(sh|bash|dash)( -[eux]+)?[ \t]*\n")
_TOO_DEEP: Final = Loss("too-deep", "The launch nests more programs than are followed.")


class Inside(Discreet, frozen=True, kw_only=True):
    """What the program at the end of a launch gets, and the words that it is started with.

    ``unseen`` names the variables whose values are not known; they are not in ``environ``. ``loss``: any variable that
    is not in ``environ`` may be set, too. ``cwd`` is None where it is not known, ``moved`` whether it may be another
    than that of the launch. ``complete``: all of it was understood. ``launches`` counts the launches in the command, of
    which the last one is meant. ``depends`` names commands whose outcome decides whether the program is started, and is
    not known. ``limits``: it may get less of memory, files or the like than a program here. ``written`` are the files
    that earlier commands may have written, ``may_write`` whether there may be others.
    """

    withheld = frozenset({"words", "environ"})

    words: list[str]
    environ: Mapping[str, str]
    unseen: frozenset[str]
    loss: Loss | None
    elsewhere: bool
    cwd: str | None
    moved: bool
    complete: bool
    launches: int
    depends: tuple[str, ...]
    limits: bool
    written: frozenset[str]
    may_write: bool


def follow(argv: Sequence[str], outside: Outside) -> Inside:
    """Follow a launch to the program that it ends in. Never raises."""
    trace = Trace(outside, complete=len(argv) <= _WORDS_LIMIT)
    launch = _Launch(trace)
    state = State(outside.environ, outside.cwd)
    words = launch.command(list(argv[:_WORDS_LIMIT]), state, bare=True)
    state = launch.state
    if trace.unreached is not None:
        state.lose(trace.unreached)
    environ, unseen = state.exported()
    if trace.other_user and "HOME" not in environ:
        unseen.add("HOME")  # where it is not set, the user's own counts
    if any("__PYVENV_LAUNCHER__" in one for one in (environ, unseen)):
        state.lose(wrappers.OTHER_NAME)
        environ, unseen = state.exported()
    loss = trace.away or trace.unreached or state.loss
    return Inside(
        words=words,
        environ=environ,
        unseen=frozenset(unseen),
        loss=loss,
        elsewhere=trace.away is not None,
        cwd=None if trace.away is not None else state.cwd,
        moved=trace.moved or loss is not None,
        complete=trace.complete,
        launches=trace.launches,
        limits=trace.limits,
        depends=tuple(trace.depends)[:_DEPENDS_LIMIT],
        written=frozenset(trace.written),
        may_write=trace.may_write,
    )


class _Launch:
    """Follows one launch. ``state`` is that of the process that the last command it came to would be."""

    def __init__(self, trace: Trace) -> None:
        self.state = State(trace.outside.environ, trace.outside.cwd)
        self._trace = trace

    # -- programs that start others

    def command(self, words: list[str], state: State, *, bare: bool = False, depth: int = 0) -> list[str]:
        """Follow a command with its words to what it ends in; ``bare``: its words went through no shell."""
        self.state = state
        if bare:
            words = wrappers.take_assignments(words, state)
        ended = bare and words[:1] != [] and words[0].startswith("-")
        while words and not ended and locate_at(words, 0, words[0]) is None:
            depth += 1
            if depth > _DEPTH_LIMIT:
                self._trace.complete = False
                state.lose(_TOO_DEEP)
                break
            words, ended = self._inside(words, state, depth)
        return words

    def _inside(self, words: list[str], state: State, depth: int) -> tuple[list[str], bool]:
        """(the command behind the first program, whether that was followed to its end)."""
        name = basename(words[0])
        if name == "env":
            return wrappers.env(words, state, self._trace), False
        if is_shell(words[0]) and (place := script_place(words, 0)) is not None:
            followed = self._shell(words, place, state, depth)
            if (followed and locate_at(followed, 0, followed[0])) or locate(words) is None:
                return followed, True
            # What stands behind the script, which does not say what it does with it.
            self.state = state
            state.lose(Loss("wrapper", "What a shell makes of its arguments is not seen."))
            return wrappers.behind(words)
        if (followed_file := self._script_file(words, state, depth)) is not None:
            return followed_file, True
        if name in wrappers.OTHER_USER:
            return self._other_user(words, state, depth), True
        return wrappers.unwrap(words, state, self._trace)

    def _other_user(self, words: list[str], state: State, depth: int) -> list[str]:
        """The command of ``su -c`` and of ``runuser``, whose own settings still count."""
        script = wrappers.another_user(words, state, self._trace)
        if script is not None:
            return self._script(script, [], state, depth, bash=False)
        behind, ended = wrappers.behind(words)
        return behind if ended else self.command(behind, state, depth=depth)

    # -- shells

    def _shell(self, words: list[str], place: int, state: State, depth: int) -> list[str]:
        """The command of ``sh -c``; ``words`` from the shell on, ``place`` is that of the script."""
        options = [word for word in words[1:place] if word[:1] in {"-", "+"}]
        letters = "".join(word[1:] for word in options if word[0] == "-" and not word.startswith("--"))
        name = basename(words[0])
        inner = state.process()
        if name.startswith("-") or "l" in letters or "i" in letters or "--login" in options:
            inner.lose(Loss("login-shell", "A login shell reads files that set what is not looked into."))
        _before_script(name, inner)
        inner.exports_all = False
        set_options(words[1:place], inner, starts=True)
        return self._script(words[place], words[place + 1 :], inner, depth, bash=name.lstrip("-") == "bash")

    def _script_file(self, words: list[str], state: State, depth: int) -> list[str] | None:
        """The command of a shell script that is run as a file; None where it is none, or launches no server."""
        place, shell = 0, ""
        if is_shell(words[0]):
            shell = basename(words[0])
            place = next((index for index, word in enumerate(words) if index and word[:1] not in {"-", "+"}), 0)
            if not place or any(set(word) - set("-eux") for word in words[1:place]):
                return None
        path = words[place]
        if OPEN in path or ("/" not in path and not shell):
            return None
        whole = None if ".." in path.split("/") else joined(state.cwd, path)
        text = None if whole is None else self._trace.outside.read(whole)
        if text is None:
            return None
        match = _SHEBANG.match(text)
        if not shell and match is None:
            return None
        shell = shell or (match[1] if match is not None else "sh")
        if not any("sglang" in word for one in shellwords.parse(text).commands for word in one.words):
            return None
        inner = state.process()
        _before_script(shell, inner)
        set_options(words[1:place] if place else (match[2] or "").split() if match else [], inner, starts=True)
        reached, depends = self._trace.unreached, dict(self._trace.depends)
        followed = self._script(text, [path, *words[place + 1 :]], inner, depth, bash=shell == "bash")
        if followed and locate_at(followed, 0, followed[0]) is not None:
            return followed
        self.state, self._trace.unreached, self._trace.depends = state, reached, depends
        return None

    def _script(self, script: str, arguments: Sequence[str], state: State, depth: int, *, bash: bool) -> list[str]:
        """The command in a script that launches the server, the last one of several; else its last one."""
        if depth > _DEPTH_LIMIT:
            self._trace.complete = False
            state.lose(_TOO_DEEP)
            self.state = state
            return []
        state.positional = list(arguments)
        for name in RESET_BY_SHELLS & {*state.values, *(state.base or {})}:
            state.put(name, UNSEEN)
        state.readonly = READONLY_IN_BASH
        given = None if state.loss is not None or state.base is None else state.base.get("PWD")
        if "PWD" in state.values:
            given = state.pwd if isinstance(state.pwd, str) else ""  # as the shell around it names the folder
        # A shell takes over another name of the same folder, but no other.
        state.pwd = state.cwd if state.cwd is not None and given in {None, state.cwd} else UNSEEN
        parsed = shellwords.parse(script)
        self._trace.complete = self._trace.complete and parsed.complete
        if not parsed.commands:
            self.state = state
            return []
        chosen = self._choose(parsed.commands, arguments)
        jobs = grammar(parsed) if bash or not parsed.bash_only else None
        place = None
        if jobs is not None:
            place = next((one for one in simple_commands(jobs) if one.command is parsed.commands[chosen]), None)
        if jobs is None or place is None:
            state.lose(Loss("script", "The script around the launch is not understood."))
            place = Simple(parsed.commands[chosen], _bare(parsed.commands[chosen]))
        else:
            Walk(self._trace, bash=bash).enter(jobs, place, state)
            return self._last(place, state, depth, understood=True)
        return self._last(place, state, depth, understood=False)

    def _choose(self, commands: Sequence[Command], arguments: Sequence[str]) -> int:
        """Which command launches the server; note how many do, and what those before it may write."""
        expansion = Expansion(State(None, None))
        expansion.give(arguments)
        words = [[field for word in _bare(command) for field in expansion.fields(word)] for command in commands]
        launches = [index for index, found in enumerate(words) if _holds_launch(found)]
        self._trace.launches = max(self._trace.launches, len(launches))
        if not launches:
            launches = [index for index, found in enumerate(words) if "sglang.launch_server" in found]
        chosen = launches[-1] if launches else len(commands) - 1
        for found, command in zip(words[:chosen], commands, strict=False):
            self._trace.written.update(command.written)
            if found and found[0] not in _QUIET and not ASSIGNED.match(found[0]):
                self._trace.may_write = True
                self._trace.written.update(found[1:])
        return chosen

    def _last(self, place: Simple, state: State, depth: int, *, understood: bool) -> list[str]:
        """Follow the command that was chosen, with the state of its shell."""
        assigned, rest = split(place.words)
        expansion = Expansion(state)
        words = [field for word in rest for field in expansion.fields(word)]
        if words and is_function(words[0], state):
            state.lose(Loss("wrapper", "A function of the script starts the server."))
        process = state.process()
        for name in KEPT_BY_SHELLS:
            process.put(name, UNSEEN)
        process.pwd = state.pwd
        before: set[str] = set()
        for word in assigned:
            name, value = assignment(word, expansion, before)
            state.touch(name)
            process.put(name, value if understood else UNSEEN)
            before.add(name)
        if state.ended is not None or state.doubt is not None:
            self._trace.miss(state.ended.why if state.ended is not None else state.doubt or "")
        while words and words[0] in {"exec", "command", "builtin"}:
            kind, words = words[0], words[1:]
            while words and words[0].startswith("-"):
                if kind == "exec":
                    wrappers.exec_options(words[:1], process)
                words = words[2 if words[0].endswith("a") and kind == "exec" else 1 :]
        return self.command(words, process, depth=depth)


def _before_script(shell: str, state: State) -> None:
    """Note what variables make of a shell before its first command."""
    if shell == "zsh" or (shell == "bash" and _may_be_set(state, "BASH_ENV")):
        state.lose(Loss("sourced", f"{shell} reads a file first, which may set anything."))
    elif shell == "bash" and any(_may_be_set(state, name) for name in ("SHELLOPTS", "BASHOPTS")):
        state.lose(Loss("option", "A variable gives the shell options, which are not looked into."))


def _may_be_set(state: State, name: str) -> bool:
    """Whether a variable has or may have a value; of variables that nobody knows that is not assumed."""
    known = state.base is not None or name in state.values
    return known and state.value(name) not in {None, ""}


def _bare(command: Command) -> tuple[Word, ...]:
    """The words of a command without the reserved ones in front of it."""
    position = 0
    while position < len(command.parsed) and command.parsed[position].marked in _RESERVED:
        position += 1
    return command.parsed[position:]


def _holds_launch(command: Sequence[str]) -> bool:
    if locate(command) is not None:
        return True
    head = command[:WRAPPER_LIMIT]
    return any(
        (is_shell(word) and "sglang" in (shell_script(command, start) or ""))
        or (basename(word) == "env" and any("sglang" in one for one in head[start:]))
        for start, word in enumerate(head)
    )
