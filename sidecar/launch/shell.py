"""What a launch sets for its server: variables and working folder, followed through shells and wrappers.

Nothing is run. Either a variable, or the folder, is what the server would get to the letter, or it is *not seen*: a
command that may or may not run, the output of another one, a file that is not read. A variable that may be another
one's than the launch was given is never taken over from there.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sidecar.launch import words as shellwords
from sidecar.launch.forms import WRAPPER_LIMIT, basename, is_shell, locate, locate_at, script_place, shell_script
from sidecar.launch.grammar import Compound, Job, Kind, List, Node, Simple, Step, commands_of, grammar, simple_commands
from sidecar.launch.state import (
    KEPT_BY_SHELLS,
    READONLY_IN_BASH,
    RESET_BY_SHELLS,
    UNSEEN,
    End,
    Expansion,
    Loss,
    State,
    Value,
    names,
)
from sidecar.launch.words import OPEN, SPLITS, Command, Part, Redirection, Reference, Unknown, Word
from sidecar.record import Discreet

FAR: Final = "another-machine"
"""The token of a `Loss` where the machine is another one, too."""

_DEPTH_LIMIT: Final = 24
"""Shells and wrappers inside one another. Real images nest three shells."""
_CALLS_LIMIT: Final = 6
"""Functions and files that are read, inside one another."""
_STEPS_LIMIT: Final = 4000
"""Simple commands of a launch that are followed, loops and functions counted each time."""
_WORDS_LIMIT: Final = 16384
_DEPENDS_LIMIT: Final = 5
"""Commands that are named as those on which it depends whether the server is reached."""


class Outside(Discreet, frozen=True, kw_only=True):
    """What a launch is given: ``environ`` and ``cwd``, None where they are not known.

    ``is_folder`` tells whether a path is a folder that may be entered, ``is_absent`` whether surely nothing is there,
    ``read`` the text of a file that a shell reads commands from, None where it is not read.
    """

    withheld = frozenset({"environ"})

    environ: Mapping[str, str] | None = None
    cwd: str | None = None
    is_folder: Callable[[str], bool] = lambda _: False
    is_absent: Callable[[str], bool] = lambda _: False
    read: Callable[[str], str | None] = lambda _: None


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
    walk = _Walk(outside, complete=len(argv) <= _WORDS_LIMIT)
    state = State(outside.environ, outside.cwd)
    words = walk.command(list(argv[:_WORDS_LIMIT]), state, bare=True)
    state = walk.state
    if walk.unreached is not None:
        state.lose(walk.unreached)
    environ, unseen = state.exported()
    if walk.other_user and "HOME" not in environ:
        unseen.add("HOME")  # where it is not set, the user's own counts
    if any("__PYVENV_LAUNCHER__" in one for one in (environ, unseen)):
        state.lose(_OTHER_NAME)
        environ, unseen = state.exported()
    loss = walk.away or walk.unreached or state.loss
    return Inside(
        words=words,
        environ=environ,
        unseen=frozenset(unseen),
        loss=loss,
        elsewhere=walk.away is not None,
        cwd=None if walk.away is not None else state.cwd,
        moved=walk.moved or loss is not None,
        complete=walk.complete,
        launches=walk.launches,
        limits=walk.limits,
        depends=tuple(walk.depends)[:_DEPENDS_LIMIT],
        written=frozenset(walk.written),
        may_write=walk.may_write,
    )


# -- the walk ---------------------------------------------------------------------------------------

_ASSIGNED: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHOWN: Final = re.compile(r"[A-Za-z0-9_.+-]{1,40}")
_RESERVED: Final = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{", "time"})
"""Words of a shell that stand in front of a command."""
_QUIET: Final = frozenset(
    {"cd", "pushd", "export", "unset", "set", "ulimit", "exec", "sleep", "true", ":", "umask", ".", "source", "["}
)
"""Commands of a shell that make no files."""
_SPECIAL: Final = frozenset({"export", "unset", "set", ".", "source", "eval", "exec", "readonly", "trap", "shift", ":"})
"""Commands in front of which an assignment may stay."""
_SETTERS: Final = frozenset({"read", "getopts", "mapfile", "readarray", "printf", "let", "wait", "local"})
"""Commands of a shell that set the variables that they name."""

_HARDLY_FAILS: Final = names("echo printf sleep wait umask cat date")
"""Commands of which nobody needs to be told that a launch depends on them."""
_HARMLESS_OPTIONS: Final = names("b f h m v x B E H P T")
"""Options of a shell that change nothing of what is followed, by their letters."""
_LONG_OPTIONS: Final = MappingProxyType(
    {"allexport": "a", "errexit": "e", "nounset": "u", "noexec": "n", "onecmd": "t", "keyword": "k"}
    | dict.fromkeys(
        names("braceexpand hashall histexpand errtrace functrace monitor noglob notify pipefail posix verbose xtrace"),
        "x",
    )
)
_ALWAYS_THERE: Final = frozenset({"/dev/null", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/zero"})
"""Files that a redirection surely opens."""
_AT_THE_END: Final = names("EXIT 0 INT 2 TERM 15 HUP 1 QUIT 3")
"""Events of ``trap`` with which a script ends."""
_FILES_ENOUGH: Final = 1024
"""A limit of open files that hinders no import: it is the usual one of a login."""
_SHOWS_ONLY: Final = names("--version --help --dump-strings --dump-po-strings")
"""Options with which a shell runs nothing."""

_STATUS: Final = MappingProxyType({":": True, "true": True, "false": False, "export": True, "unset": True, "set": True})
"""Whether commands of a shell succeed, where that is always the same."""

_TRANSPARENT: Final = names(
    "nohup nice ionice chrt taskset numactl setsid timeout time tini tini-static dumb-init catatonit docker-init "
    "prlimit strace perf setarch linux64 exec command builtin setpriv stdbuf"
)
"""Programs that hand variables and folder on as they are, but for those of `_SET_BY`."""
_SET_BY: Final = MappingProxyType({"stdbuf": ("LD_PRELOAD", "_STDBUF_I", "_STDBUF_O", "_STDBUF_E")})
_SUBCOMMANDS: Final = MappingProxyType({"perf": {"record", "stat"}})
_SUDO: Final = frozenset({"sudo", "doas"})
_OTHER_USER: Final = frozenset({"su", "runuser", "pkexec", "machinectl"})
_GOSU: Final = frozenset({"gosu", "su-exec"})
_ELSEWHERE: Final = names(
    "docker docker-compose podman nerdctl crictl ctr buildah lxc lxc-attach incus nsenter unshare chroot proot bwrap "
    "fakechroot singularity apptainer enroot charliecloud ch-run shifter toolbox distrobox flatpak systemd-run "
    "systemd-nspawn conda mamba micromamba uv uvx poetry pipenv pixi hatch pdm rye"
)
"""Programs whose command runs among other files, or in an environment that they make."""
_FAR: Final = names(
    "ssh sshpass mosh rsh pdsh srun salloc sbatch bsub qsub flux kubectl oc helm nomad mpirun mpiexec prun horovodrun "
    "ray vagrant gcloud aws az sky modal runpodctl"
)
"""Programs whose command may run on another machine."""
_SUDO_VALUED: Final = names("u g p C c D h r t T R U a")
_SUDO_VALUED_LONG: Final = names(
    "user group prompt close-from login-class chdir host role type command-timeout chroot other-user auth-type"
)
_SUDO_DROPPED: Final = re.compile(
    r"LD_|PYTHON|PATH\Z|HOME\Z|USER\Z|LOGNAME\Z|SHELL\Z|MAIL\Z|TERMINFO|BASH_ENV|ENV\Z|IFS\Z"
)
"""What sudo may replace or take away although it is told to keep the environment (sudoers(5), env_delete)."""
_ENV_VALUED: Final = {"u": "--unset", "C": "--chdir", "S": "--split-string", "a": "--argv0"}
"""Options of ``env`` with a value, by letter."""
_SHEBANG: Final = re.compile(r"#! ?(?:/usr)?/bin/(?:env )?(sh|bash|dash)( -[eux]+)?[ \t]*\n")
_VIRTUAL_ENV: Final = re.compile(r"^[ \t]*(?:export[ \t]+)?VIRTUAL_ENV=(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_VENV_PATH: Final = re.compile(r"^[ \t]*(?:export[ \t]+)?PATH=(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_OLD_PATH: Final = re.compile(r"\"?\$\{?_OLD_VIRTUAL_PATH(?::?-)?\}?\"?")
_NEW_PATH: Final = re.compile(r"\"?\$\{?VIRTUAL_ENV\}?/\"?(?:bin|\$\{?\w+\}?)\"?:\$\{?PATH\}?\"?")
_OF_ACTIVATION: Final = re.compile(
    r"VIRTUAL_ENV(?:_PROMPT|_DISABLE_PROMPT)?|PATH|PYTHONHOME|PS1|_OLD_VIRTUAL_\w+|SCRIPT_PATH"
)


_ANOTHER: Final = "another environment than the one here"
_TOO_DEEP: Final = Loss("too-deep", "The launch nests more programs than are followed.")


_OTHER_NAME: Final = Loss(
    "argv0", "The interpreter is started under a name of its own, by which it may find another environment."
)

_ALSO_ACTIVATED: Final = ("PKG_CONFIG_PATH", "TCL_LIBRARY", "TK_LIBRARY")
"""Variables that some tools' activations set, too."""
_SET_IN_FILE: Final = re.compile(
    r"(?:^|[;&|(]|\b(?:then|else|do|export|declare|typeset|local))[ \t]*([A-Za-z_]\w*)\+?=", re.MULTILINE
)
_READS_MORE: Final = re.compile(
    r"^[ \t]*(?:\.|source|eval|cd|read|set|printf)[ \t]|[;&|][ \t]*(?:\.|source|eval)[ \t]", re.MULTILINE
)


def _named(program: str) -> str:
    """A program for a sentence: its name where that looks like one, and can be nothing else."""
    name = basename(program)
    return name if _SHOWN.fullmatch(name) else "another program"


class _Walk:
    """Follows one launch. ``state`` is that of the process that the last command it came to would be."""

    def __init__(self, outside: Outside, *, complete: bool) -> None:
        self.state = State(outside.environ, outside.cwd)
        self.away: Loss | None = None
        self.unreached: Loss | None = None
        self.depends: dict[str, None] = {}
        self.other_user = False
        self.moved = False
        self.complete = complete
        self.launches = 1
        self.written: set[str] = set()
        self.may_write = False
        self._outside = outside
        self._left = _STEPS_LIMIT
        self._calls = 0
        self._bash = False
        self._tested = 0
        self._parted = False
        self.limits = False

    # -- programs that start others

    def command(self, words: list[str], state: State, *, bare: bool = False, depth: int = 0) -> list[str]:
        """Follow a command with its words to what it ends in; ``bare``: its words went through no shell."""
        self.state = state
        taken = 0
        while bare and taken < len(words) and (match := _ASSIGNED.match(words[taken])):
            self._put(state, match[1], words[taken][match.end() :])
            taken += 1
        words = words[taken:]
        ended = bare and words[:1] != [] and words[0].startswith("-")
        while words and not ended and locate_at(words, 0, words[0]) is None:
            depth += 1
            if depth > _DEPTH_LIMIT:
                self.complete = False
                state.lose(_TOO_DEEP)
                break
            words, ended = self._inside(words, state, depth)
        return words

    def _inside(self, words: list[str], state: State, depth: int) -> tuple[list[str], bool]:
        """(the command behind the first program, whether that was followed to its end)."""
        name = basename(words[0])
        if name == "env":
            return self._env(words, state), False
        if is_shell(words[0]) and (place := script_place(words, 0)) is not None:
            followed = self._shell(words, place, state, depth)
            if (followed and locate_at(followed, 0, followed[0])) or locate(words) is None:
                return followed, True
            # What stands behind the script, which does not say what it does with it.
            self.state = state
            state.lose(Loss("wrapper", "What a shell makes of its arguments is not seen."))
            return self._behind(words)
        if (followed_file := self._script_file(words, state, depth)) is not None:
            return followed_file, True
        if name in _SUDO:
            return self._sudo(words, state), False
        if name in _GOSU and len(words) > 2:
            self.other_user = True
            state.put("HOME", UNSEEN)
            return words[2:], False
        if name in _TRANSPARENT and (rest := self._transparent(words, state)) is not None:
            return rest, False
        if name in _OTHER_USER:
            state.lose(Loss("another-user", f"{name} gives the command an environment of its own."))
            return self._other_user(words, state, depth), True
        if name in _FAR:
            self._leave(state, Loss(FAR, f"{name} runs the command on another machine than this one."))
        elif name in _ELSEWHERE:
            self._leave(state, Loss("another-environment", f"{name} runs the command in {_ANOTHER}."))
        else:
            if (absent := self._absent(words, state)) is not None:
                self._miss(f"there is no file {_named(absent)}, which stands in front of it")
            shown = "what is not known here" if OPEN in words[0] else _named(words[0])
            sentence = f"{shown} stands in front of the server, and what it sets is not looked into."
            state.lose(Loss("wrapper", sentence))
        return self._behind(words)

    def _absent(self, words: Sequence[str], state: State) -> str | None:
        """The script or program in front of the server, where it is named by a path that leads to nothing."""
        path = words[0]
        if is_shell(path):
            path = next((word for word in words[1:] if word[:1] not in {"-", "+"}), "")
        whole = _joined(state.cwd, path) if "/" in path and OPEN not in path and ".." not in path.split("/") else None
        return path if whole is not None and self._outside.is_absent(whole) else None

    def _leave(self, state: State, loss: Loss) -> None:
        """Go where nothing of here counts, whatever is set there."""
        self.away = self.away or loss
        state.lose(loss)

    @staticmethod
    def _behind(words: list[str]) -> tuple[list[str], bool]:
        """The command behind a program that is not understood; the same words, and True, where there is none."""
        located = locate(words)
        before = located[1] if located is not None else min(len(words), WRAPPER_LIMIT)
        for start in range(1, before):
            if basename(words[start]) == "env":
                return words[start:], False
            script = shell_script(words, start) if is_shell(words[start]) else None
            if script is not None and (located is None or "sglang" in script):
                return words[start:], False
        return (words, True) if located is None or located[1] == 0 else (words[located[1] :], True)

    def _put(self, state: State, name: str, value: str) -> None:
        state.put(name, UNSEEN if OPEN in value else value)

    def _env(self, words: list[str], state: State) -> list[str]:
        """The command behind ``env`` and its options, which change the environment of it."""
        position = 1
        folders: list[str] = []
        gone: list[str] = []
        cleared = False
        while position < len(words) and words[position].startswith("-"):
            word = words[position]
            position += 1
            if word == "--":
                break
            name, value, rest = _env_option(word)
            cleared = cleared or word in {"-", "--ignore-environment"} or "i" in rest
            if name is None:
                if OPEN in word:
                    state.lose(Loss("unresolved", "An option of env is not known."))
                continue
            if value is None:
                value = words[position] if position < len(words) else ""
                position += 1
            if name == "--unset":
                gone.append(value)
            elif name == "--argv0":
                state.lose(_OTHER_NAME)
            elif name == "--chdir":
                folders.append(value)
            elif name == "--split-string":
                try:
                    words, position = ["env", *shlex.split(value), *words[position:]], 1
                except ValueError:
                    self.complete = False
                    state.lose(Loss("unresolved", "The words that env is to split are not understood."))
                    return []
        self._change_environment(state, gone, cleared=cleared)
        while position < len(words) and "=" in words[position] and not words[position].startswith("="):
            name, _, value = words[position].partition("=")
            if OPEN in name:
                state.lose(Loss("unresolved", "Which variable env sets is not known."))
            else:
                self._put(state, name, value)
            position += 1
        for folder in folders[-1:]:
            self._enter_by_name(folder, state)
        return words[position:]

    @staticmethod
    def _change_environment(state: State, gone: Sequence[str], *, cleared: bool) -> None:
        if cleared:
            state.clear()
        for name in gone:
            if OPEN in name:
                state.lose(Loss("unresolved", "Which variable env takes away is not known."))
            else:
                state.unset(name)

    def _enter_by_name(self, folder: str, state: State) -> None:
        """Go to a folder as the kernel does, which follows links where the name goes up."""
        self.moved = True
        plain = OPEN not in folder and ".." not in folder.split("/")
        state.cwd = self._entered(_joined(state.cwd, folder)) if plain else None

    def _entered(self, folder: str | None) -> str | None:
        """A folder, where it is there to be entered."""
        return folder if folder is not None and self._outside.is_folder(folder) else None

    def _sudo(self, words: list[str], state: State) -> list[str]:
        """The command behind ``sudo``: by default it gets a new environment, by rules that only root may read."""
        position, keeps, listed = 1, False, set[str]()
        self.other_user = True
        state.put("SUDO_COMMAND", UNSEEN)
        while position < len(words) and words[position].startswith("-") and words[position] != "-":
            word = words[position]
            position += 1
            if word == "--":
                break
            if word.startswith("--"):
                name, attached, value = word[2:].partition("=")
                keeps = keeps or (name == "preserve-env" and not attached)
                if name == "preserve-env" and attached:
                    listed |= {*value.split(",")}
                elif name in _SUDO_VALUED_LONG and not attached:
                    value = words[position] if position < len(words) else ""
                    position += 1
                options = {"chdir": "D", "chroot": "R", "host": "h", "login": "i", "shell": "s"}.get(name, "")
                self._sudo_option(options, value, state)
                continue
            for index, letter in enumerate(word[1:], start=1):
                keeps = keeps or letter == "E"
                value = ""
                if letter in _SUDO_VALUED:
                    value = word[index + 1 :] or (words[position] if position < len(words) else "")
                    position += word[index + 1 :] == ""
                self._sudo_option(letter, value, state)
                if letter in _SUDO_VALUED:
                    break
        loss = Loss("another-user", f"{basename(words[0])} gives the command an environment that only its rules tell.")
        if keeps and state.loss is None and state.base is not None:
            known, unseen = state.exported()
            for name in [*known, *unseen]:
                if _SUDO_DROPPED.match(name):
                    state.put(name, UNSEEN)
        else:
            kept = {name: state.value(name) for name in listed if name != "PATH" and _NAME.fullmatch(name)}
            state.lose(loss)
            for name, kept_value in kept.items():
                state.put(name, kept_value)
        while position < len(words) and (match := _ASSIGNED.match(words[position])):
            self._put(state, match[1], words[position][match.end() :])
            position += 1
        return words[position:]

    def _sudo_option(self, letter: str, value: str, state: State) -> None:
        if letter == "D":
            self._enter_by_name(value, state)
        elif letter == "i":
            self.moved, state.cwd = True, None
            state.lose(Loss("login-shell", "A login shell reads files that set what is not looked into."))
        elif letter in {"R", "h"}:
            self._leave(state, Loss("another-environment", f"sudo runs the command in {_ANOTHER}."))

    def _other_user(self, words: list[str], state: State, depth: int) -> list[str]:
        """The command of ``su -c`` and of ``runuser``, whose own settings still count."""
        self.other_user, self._bash = True, False
        for position, word in enumerate(words[1:-1], start=1):
            attached = word.partition("=")[2] if word.startswith("--command=") else None
            if attached is not None or word in {"-c", "--command", "--session-command"}:
                script = attached if attached is not None else words[position + 1]
                return self._script(script, [], state, depth)
        behind, ended = self._behind(words)
        return behind if ended else self.command(behind, state, depth=depth)

    def _transparent(self, words: list[str], state: State) -> list[str] | None:
        """The command behind a program that changes nothing, or None where it is not clear where that begins."""
        name = basename(words[0])
        self.limits = self.limits or name == "prlimit"
        if name == "exec":
            self._exec_options(words[1:2], state)
        if name == "setpriv" and "--reset-env" in words:
            return None
        for variable in _SET_BY.get(name, ()):
            state.put(variable, UNSEEN)
        position = 2 if words[1:2] and words[1] in _SUBCOMMANDS.get(name, ()) else 1
        valued = False
        while position < len(words):
            word = words[position]
            if word == "--":
                return words[position + 1 :]
            if _begins(words, position):
                return words[position:]
            if word.startswith("-"):
                valued = "=" not in word
            elif valued or re.fullmatch(r"[0-9][0-9a-fx.,:smhd-]*", word):
                valued = False
            else:
                return words[position:]
            position += 1
        return None

    # -- shells

    def _shell(self, words: list[str], place: int, state: State, depth: int) -> list[str]:
        """The command of ``sh -c``; ``words`` from the shell on, ``place`` is that of the script."""
        options = [word for word in words[1:place] if word[:1] in {"-", "+"}]
        letters = "".join(word[1:] for word in options if word[0] == "-" and not word.startswith("--"))
        name = basename(words[0])
        inner = state.process()
        if name.startswith("-") or "l" in letters or "i" in letters or "--login" in options:
            inner.lose(Loss("login-shell", "A login shell reads files that set what is not looked into."))
        self._before_script(name, inner)
        inner.exports_all = False
        self._set(words[1:place], inner, starts=True)
        self._bash = name.lstrip("-") == "bash"
        return self._script(words[place], words[place + 1 :], inner, depth)

    def _before_script(self, shell: str, state: State) -> None:
        """Note what variables make of a shell before its first command."""
        if shell == "zsh" or (shell == "bash" and self._may_be_set(state, "BASH_ENV")):
            state.lose(Loss("sourced", f"{shell} reads a file first, which may set anything."))
        elif shell == "bash" and any(self._may_be_set(state, name) for name in ("SHELLOPTS", "BASHOPTS")):
            state.lose(Loss("option", "A variable gives the shell options, which are not looked into."))

    @staticmethod
    def _may_be_set(state: State, name: str) -> bool:
        """Whether a variable has or may have a value; of variables that nobody knows that is not assumed."""
        known = state.base is not None or name in state.values
        return known and state.value(name) not in {None, ""}

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
        whole = None if ".." in path.split("/") else _joined(state.cwd, path)
        text = None if whole is None else self._outside.read(whole)
        if text is None:
            return None
        match = _SHEBANG.match(text)
        if not shell and match is None:
            return None
        shell = shell or (match[1] if match is not None else "sh")
        if not any("sglang" in word for one in shellwords.parse(text).commands for word in one.words):
            return None
        inner = state.process()
        self._before_script(shell, inner)
        self._set(words[1:place] if place else (match[2] or "").split() if match else [], inner, starts=True)
        self._bash = shell == "bash"
        reached, depends = self.unreached, dict(self.depends)
        followed = self._script(text, [path, *words[place + 1 :]], inner, depth)
        if followed and locate_at(followed, 0, followed[0]) is not None:
            return followed
        self.state, self.unreached, self.depends = state, reached, depends
        return None

    def _script(self, script: str, arguments: Sequence[str], state: State, depth: int) -> list[str]:
        """The command in a script that launches the server, the last one of several; else its last one."""
        if depth > _DEPTH_LIMIT:
            self.complete = False
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
        self.complete = self.complete and parsed.complete
        if not parsed.commands:
            self.state = state
            return []
        chosen = self._choose(parsed.commands, arguments)
        jobs = grammar(parsed) if self._bash or not parsed.bash_only else None
        place = None
        if jobs is not None:
            place = next((one for one in simple_commands(jobs) if one.command is parsed.commands[chosen]), None)
        if jobs is None or place is None:
            state.lose(Loss("script", "The script around the launch is not understood."))
            place = Simple(parsed.commands[chosen], _bare(parsed.commands[chosen]))
        else:
            self._enter(jobs, place, state)
            return self._last(place, state, depth, understood=True)
        return self._last(place, state, depth, understood=False)

    def _choose(self, commands: Sequence[Command], arguments: Sequence[str]) -> int:
        """Which command launches the server; note how many do, and what those before it may write."""
        expansion = Expansion(State(None, None))
        expansion.give(arguments)
        words = [[field for word in _bare(command) for field in expansion.fields(word)] for command in commands]
        launches = [index for index, found in enumerate(words) if _holds_launch(found)]
        self.launches = max(self.launches, len(launches))
        if not launches:
            launches = [index for index, found in enumerate(words) if "sglang.launch_server" in found]
        chosen = launches[-1] if launches else len(commands) - 1
        for found, command in zip(words[:chosen], commands, strict=False):
            self.written.update(command.written)
            if found and found[0] not in _QUIET and not _ASSIGNED.match(found[0]):
                self.may_write = True
                self.written.update(found[1:])
        return chosen

    def _last(self, place: Simple, state: State, depth: int, *, understood: bool) -> list[str]:
        """Follow the command that was chosen, with the state of its shell."""
        assigned, rest = _split(place.words)
        expansion = Expansion(state)
        words = [field for word in rest for field in expansion.fields(word)]
        if words and (words[0] in state.functions or self._is_handed_function(words[0], state)):
            state.lose(Loss("wrapper", "A function of the script starts the server."))
        process = state.process()
        for name in KEPT_BY_SHELLS:
            process.put(name, UNSEEN)
        process.pwd = state.pwd
        before: set[str] = set()
        for word in assigned:
            name, value = self._assignment(word, expansion, before)
            state.touch(name)
            process.put(name, value if understood else UNSEEN)
            before.add(name)
        if state.ended is not None or state.doubt is not None:
            self._miss(state.ended.why if state.ended is not None else state.doubt or "")
        while words and words[0] in {"exec", "command", "builtin"}:
            kind, words = words[0], words[1:]
            while words and words[0].startswith("-"):
                if kind == "exec":
                    self._exec_options(words[:1], process)
                words = words[2 if words[0].endswith("a") and kind == "exec" else 1 :]
        return self.command(words, process, depth=depth)

    @staticmethod
    def _exec_options(words: Sequence[str], process: State) -> None:
        for word in words:
            if word.startswith("-") and "c" in word:
                process.clear()
            if word.startswith("-") and {*word} & {"a", "l"}:
                process.lose(_OTHER_NAME)

    @staticmethod
    def _assignment(word: Word, expansion: Expansion, before: set[str]) -> tuple[str, Value]:
        """(name, value) of an assignment; ``before``: names whose new value it may or may not see."""
        name, appends, parts = _assigned(word)
        value = expansion.text(parts)
        if appends or any(isinstance(part, Reference) and part.name in before for part in _all_parts(parts)):
            return name, UNSEEN
        return name, value

    @staticmethod
    def _is_handed_function(name: str, state: State) -> bool:
        return state.base is not None and f"BASH_FUNC_{name}%%" in state.base

    # -- what surely runs before a command

    def _miss(self, why: str) -> None:
        """Note that the server is not started, or may not be."""
        sentence = f"It is not certain that the server is reached: {why}."
        self.unreached = self.unreached or Loss("not-reached", sentence)

    def _depend(self, step: Step) -> None:
        """Note that the server is started only if this comes out as the script wants it."""
        node = step.nodes[-1]
        if not isinstance(node, Simple):
            self.depends.setdefault("a compound command")
            return
        name = _name_of(node)
        if name not in _HARDLY_FAILS:
            self.depends.setdefault(name)

    def _enter(self, jobs: List, place: Simple, state: State) -> None:
        """Apply what runs before a command of these jobs."""
        for job in jobs:
            index = next((index for index, step in enumerate(job.steps) if _contains(step.nodes, place)), None)
            if index is None:
                self._job(job, state)
                if state.ended is not None:
                    return
                continue
            self._approach(job.steps, index, state)
            node = next(node for node in job.steps[index].nodes if _contains([node], place))
            self._enter_node(node, place, state)
            return

    def _approach(self, steps: Sequence[Step], index: int, state: State) -> None:
        """Apply the steps in front of the one at ``index``, on whose outcome it hangs."""
        sure = all(step.before in {"", "&&"} for step in steps[: index + 1])
        succeeded: bool | None = True
        last = steps[0]
        for step in steps[:index]:
            if succeeded is not None and succeeded is (step.before == "||"):
                continue
            runs, last = sure or succeeded is not None, step
            outcome = self._try(step, state, sure=runs)
            succeeded = outcome if runs else None
            if succeeded is None:
                self._depend(step)
        if index and succeeded is not None and succeeded is (steps[index].before == "||"):
            how = "succeeds" if succeeded else "fails"
            self._miss(f"{_name_of(last.nodes[-1])} in front of {steps[index].before} {how}")

    def _try(self, step: Step, state: State, *, sure: bool) -> bool | None:
        """Apply a step whose failure ends nothing."""
        self._tested += 1
        succeeded = self._step(step, state, sure=sure)
        self._tested -= 1
        return succeeded

    def _condition(self, jobs: List, state: State) -> bool | None:
        self._tested += 1
        holds = self._jobs(jobs, state)
        self._tested -= 1
        return holds

    def _enter_node(self, node: Node, place: Simple, state: State) -> None:
        if self._may_not_open(node, state):
            self.depends.setdefault("a redirection")
        if isinstance(node, Simple):
            return
        number = next(n for n, jobs in enumerate(node.lists) if any(one is place for one in simple_commands(jobs)))
        if node.kind is Kind.IF:
            for index in range(0, number, 2):
                holds = self._condition(node.lists[index], state)
                if holds is None:
                    self._depend_on(node.lists[index])
                elif holds is not (index == number - 1):
                    self._miss("a condition around it is known, and leads elsewhere")
        elif node.kind is Kind.LOOP:
            if number == len(node.lists) - 1:
                rounds = self._rounds(node, state)
                if rounds is False:
                    self._miss("the loop around it has no round")
                elif rounds is None:
                    self._depend_on(node.lists[0] if number else ())
            self._loop(node, state, inside=True)
            if number:
                self._condition(node.lists[0], state)
        elif node.kind is Kind.CASE:
            self.depends.setdefault("case")
        elif node.kind is Kind.FUNCTION:
            state.lose(Loss("function", "A function of the script starts the server; what comes before is not seen."))
            state.positional, state.cwd, self.moved = None, None, True
        self._enter(node.lists[number], place, state)

    def _depend_on(self, condition: List) -> None:
        if condition:
            self._depend(condition[-1].steps[-1])
        else:
            self.depends.setdefault("for")

    def _jobs(self, jobs: List, state: State) -> bool | None:
        """Apply jobs until the shell ends; give whether the last one succeeds, where that is known."""
        succeeded: bool | None = True
        for job in jobs:
            succeeded = self._job(job, state)
            if state.ended is not None:
                return None
        return succeeded

    def _job(self, job: Job, state: State) -> bool | None:
        if job.background:
            return True
        succeeded: bool | None = True
        for step in job.steps:
            if succeeded is not None and succeeded is (step.before == "||"):
                continue
            runs = succeeded is not None
            last = step is job.steps[-1] and not step.negated
            outcome = self._step(step, state, sure=runs) if last else self._try(step, state, sure=runs)
            if not runs and self._parted:
                self._depend(job.steps[max(0, job.steps.index(step) - 1)])
            succeeded = outcome if runs else None
            if state.ended is not None:
                return None
            if last:
                self._exit_on_error(step, succeeded, state)
        return succeeded

    def _exit_on_error(self, step: Step, succeeded: bool | None, state: State) -> None:
        """End the shell, as the option errexit does, where a step fails that nothing tests."""
        if state.errexit is False or self._tested or succeeded:
            return
        node = step.nodes[-1]
        if succeeded is None:
            if isinstance(node, Simple):
                self._depend(step)
        elif isinstance(node, Simple) or node.kind is Kind.SUBSHELL:
            # Another compound command that fails has ended the shell itself, unless what failed in it was tested.
            why = f"{_name_of(node)} fails, and `set -e` ends the script there"
            if state.errexit:
                state.ended = End(why, succeeded=False)
            else:
                state.doubt = state.doubt or why

    def _step(self, step: Step, state: State, *, sure: bool) -> bool | None:
        """Apply a pipeline that surely runs, or may; give whether it succeeds, where that is known."""
        self._parted = False
        if sure and len(step.nodes) == 1:
            succeeded = self._node(step.nodes[0], state)
            return succeeded if succeeded is None else succeeded is not step.negated
        # Some shells run the last command of a pipeline themselves.
        other = state.copy()
        self._node(step.nodes[-1], other)
        self._parted = other.ended is not None and len(step.nodes) == 1
        state.merge(other)
        return None

    def _node(self, node: Node, state: State) -> bool | None:
        """Apply a command that surely runs, unless a redirection of it fails; give whether it succeeds, where known."""
        if not self._may_not_open(node, state):
            return self._run(node, state)
        if isinstance(node, Simple) and _name_of(node) in _SPECIAL:
            self.depends.setdefault("a redirection")  # it ends some shells
        other = state.copy()
        self._run(node, other)
        if other.ended is not None:
            self.depends.setdefault("a redirection")
        state.merge(other)
        return None

    def _may_not_open(self, node: Node, state: State) -> bool:
        """Whether a redirection of a command may fail, so that the command does not run."""
        return any(
            not self._opens(one, state)
            for one in (node.command.redirections if isinstance(node, Simple) else node.redirections)
        )

    def _opens(self, one: Redirection, state: State) -> bool:
        fields = Expansion(state.copy()).fields(one.target)
        target = fields[0] if len(fields) == 1 else OPEN
        if OPEN in target:
            return False
        if one.operator in {">&", "<&"} and (target.isdecimal() or target == "-"):
            return target in {"0", "1", "2", "-"}
        if target in _ALWAYS_THERE:
            return True
        path = _joined(state.cwd, target)
        if path is None or one.operator in {"<", "<&"} or ".." in target.split("/"):
            return False
        return self._outside.is_folder(posixpath.dirname(path)) and not self._outside.is_folder(path)

    def _run(self, node: Node, state: State) -> bool | None:
        if isinstance(node, Simple):
            return self._simple(node, state)
        match node.kind:
            case Kind.GROUP:
                return self._jobs(node.lists[0], state)
            case Kind.IF:
                self._branches(node, state)
            case Kind.LOOP:
                self._loop(node, state)
            case Kind.CASE:
                before = state.copy()
                for jobs in node.lists:
                    other = before.copy()
                    self._jobs(jobs, other)
                    if other.ended is not None:
                        self.depends.setdefault("case")
                    state.merge(other)
            case Kind.FUNCTION:
                state.functions[node.name] = node
            case Kind.SUBSHELL:
                other = state.copy()
                succeeded = self._jobs(node.lists[0], other)
                state.doubt = state.doubt or other.doubt  # `kill` there means the shell around it
                return other.ended.succeeded if other.ended is not None else succeeded
        return None

    def _branches(self, node: Compound, state: State) -> None:
        ends: list[State] = []
        current = state.copy()
        for number in range(0, len(node.lists) - 1, 2):
            holds = self._condition(node.lists[number], current)
            if current.ended is not None:
                break
            if holds is False:
                continue
            branch = current if holds else current.copy()
            self._jobs(node.lists[number + 1], branch)
            if holds:
                break
            ends.append(branch)
            if branch.ended is not None:
                self._depend_on(node.lists[number])
        else:
            if len(node.lists) % 2:
                self._jobs(node.lists[-1], current)
                if current.ended is not None:
                    self._depend_on(node.lists[-3])
        for end in ends:
            current.merge(end)
        state.become(current)

    def _rounds(self, node: Compound, state: State) -> bool | None:
        """Whether a loop runs at all, where that is known."""
        if len(node.lists) > 1:
            holds = self._condition(node.lists[0], state.copy())
            return holds if holds is None else holds is not node.until
        if node.items is None:
            return None if state.positional is None else len(state.positional) > 1
        expansion = Expansion(state.copy())
        fields = [field_ for word in node.items for field_ in expansion.fields(word)]
        surely = any(field_.replace(SPLITS, "") for field_ in fields) or "" in fields
        return True if surely else None if fields else False

    def _loop(self, node: Compound, state: State, *, inside: bool = False) -> None:
        """Apply the rounds of a loop; ``inside``: what is asked for is a command in one of them, the first or another.

        Of what it sets only that is certain which holds however many there are.
        """
        if self._rounds(node, state) is False:
            if len(node.lists) > 1:
                self._condition(node.lists[0], state)
            return
        before = state.copy()
        leaves = _leaves(node, {"break", "continue", "return"})
        parted = False
        for number in range(10):
            other = state.copy()
            if _NAME.fullmatch(node.name):
                other.assign(node.name, UNSEEN)
            for jobs in node.lists[:-1]:
                self._condition(jobs, other)
            self._jobs(node.lists[-1], other)
            if other.ended is not None:
                parted = True
                if not inside and not number and not leaves and self._rounds(node, state):
                    state.become(other)
                    return
                if not inside:
                    self._depend_on(node.lists[0] if len(node.lists) > 1 else ())
            last = state.copy()
            state.merge(other)
            if state.same(last):
                break
        else:
            state.lose(Loss("script", "A loop of the script is not followed to its end."))
        if leaves and (parted or not state.same(before)):
            state.lose(Loss("script", "A loop of the script may end anywhere in it."))
        elif not inside and not leaves and len(node.lists) > 1 and self._rounds(node, state):
            state.ended = End("a loop in front of it has no end")

    # -- a simple command

    def _simple(self, node: Simple, state: State) -> bool | None:
        """Apply a command; give whether it succeeds, where that is known."""
        self._left -= 1
        if self._left < 0:
            state.lose(Loss("script", "The script around the launch is longer than is followed."))
            return None
        assigned, rest = _split(node.words)
        if not rest:
            return self._assign(assigned, state)
        expansion = Expansion(state)
        words = [field for word in rest for field in expansion.fields(word)]
        for word in assigned:
            state.touch(self._assignment(word, expansion, set())[0])
        if state.ended is not None:
            return None
        while words and words[0] in {"command", "builtin"}:
            words, rest = words[1:], rest[1:]
        if not words:
            return None
        name = words[0]
        if OPEN in name:
            state.lose(_unresolved())
            return None
        if assigned and (name in _SPECIAL or name in state.functions):
            for word in assigned:
                state.assign(_assigned(word)[0], UNSEEN)
                state.exports[_assigned(word)[0]] = None  # as the shell's mode has it
        if name in state.functions or self._is_handed_function(name, state):
            return self._call(name, words, state)
        if self._ends(name, words, rest, state):
            return None
        lost = state.loss
        self._builtin(name, words, rest, expansion, state)
        if state.loss != lost:
            return None
        return _status(name, words[1:], state)

    def _assign(self, assigned: Sequence[Word], state: State) -> bool | None:
        expansion = Expansion(state)
        for word in assigned:
            state.assign(*self._assignment(word, expansion, set()))
        # The output of a command has the status of that.
        unknown = any(isinstance(part, Unknown) for word in assigned for part in _all_parts(word.parts))
        return None if unknown else True

    def _ends(self, name: str, words: Sequence[str], rest: Sequence[Word], state: State) -> bool:
        """Note where a command ends the shell; give whether it surely does."""
        if name == "exit":
            status = words[1] if len(words) > 1 else ""
            succeeded = int(status) % 256 == 0 if status.isdecimal() and len(status) < 4 else None
            state.ended = End("the script ends in front of it, with `exit`", succeeded)
        elif name == "exec" and len(words) > 1:
            if any(word != SPLITS for word in words[1:]):
                state.ended = End("another program takes the place of the script in front of it, with `exec`")
            else:
                state.doubt = state.doubt or "another program may take the place of the script, with `exec`"
        elif name == "return" and not self._calls:
            state.doubt = state.doubt or "`return` ends some shells"
        elif name == "kill" and "-0" not in words:
            own = any(isinstance(part, Reference) and part.name == "$" for word in rest for part in word.parts)
            if own or "0" in words[1:]:
                state.doubt = state.doubt or "the script ends itself in front of it, with `kill`"
        return state.ended is not None

    def _builtin(self, name: str, words: list[str], rest: Sequence[Word], expansion: Expansion, state: State) -> None:
        match name:
            case "export" | "readonly" | "declare" | "typeset" | "local":
                self._declare(name, rest, expansion, state)
            case "unset":
                self._unset(words[1:], state)
            case "cd" | "pushd" | "popd":
                self._change_folder(name, words[1:], state)
            case "set":
                self._set(words[1:], state)
            case "shift":
                self._shift(words[1:], state)
            case "." | "source":
                self._source(words, state)
            case "trap":
                self._trap(words[1:], state)
            case "ulimit":
                self.limits = self.limits or _limits(words[1:])
            case "eval" | "alias" | "unalias" | "shopt" | "enable" | "conda" | "module":
                state.lose(Loss("sourced", f"{name} may change anything of the shell, and is not followed."))
            case _ if name in _SETTERS:
                self._set_anyhow(words[1:], state)

    @staticmethod
    def _trap(words: Sequence[str], state: State) -> None:
        """Note commands that run when something happens, unless that is at the end or the server's own."""
        words = [word for word in words if word != "--"]
        signals = {word.upper().removeprefix("SIG") for word in words[1:]}
        if words and words[0] not in {"", "-"} and not words[0].startswith("-") and signals - _AT_THE_END:
            state.lose(Loss("trap", "Commands that `trap` sets up may run at any time in front of the server."))

    def _shift(self, words: Sequence[str], state: State) -> None:
        count = 1 if not words else int(words[0]) if words[0].isdecimal() and len(words[0]) < 4 else None
        given = state.positional
        # Where there are fewer of them, one shell ends and another goes on.
        known = given is not None and count is not None and count < len(given)
        if given is not None and not known and not self._bash:
            state.doubt = state.doubt or "`shift` ends some shells where there are too few arguments"
        state.positional = (
            [given[0], *given[count + 1 :]] if known and given is not None and count is not None else None
        )

    @staticmethod
    def _unset(words: Sequence[str], state: State) -> None:
        if any(OPEN in word or (word.startswith("-") and word not in {"-f", "-v"}) for word in words):
            state.lose(_unresolved())
        elif "-f" not in words:
            for one in words:
                state.unset(one)

    @staticmethod
    def _set_anyhow(words: Sequence[str], state: State) -> None:
        """Forget what a command sets that names variables among its words."""
        for one in words:
            if OPEN in one:
                state.lose(_unresolved())
            elif match := _NAME.match(one):
                state.assign(match.group(), UNSEEN)

    def _declare(self, name: str, rest: Sequence[Word], expansion: Expansion, state: State) -> None:
        options: list[str] = []
        # What is local to a function is refused outside of one, and functions that have it are not followed.
        everywhere = name in {"export", "readonly"} or (self._bash and not self._calls and name != "local")
        if name == "local" and not self._bash:
            state.doubt = state.doubt or "`local` ends some shells outside of a function"
        given: list[tuple[str, Value] | str] = []
        # All of the words have their values before the first variable is set.
        for word in rest[1:]:
            if _ASSIGNED.match(word.marked):
                target, appends, parts = _assigned(word)
                given.append((target, UNSEEN if appends or not everywhere else expansion.declared(parts)))
            else:
                given += map(_declaration, expansion.fields(word))
        for one in given:
            if not isinstance(one, str):
                state.assign(*one)
                self._mark(name, options, one[0], state, sure=everywhere)
            elif OPEN in one:
                state.lose(_unresolved())
            elif one[:1] in {"-", "+"}:
                options.append(one)
                if not self._bash and one not in {"-p", "--"}:
                    state.doubt = state.doubt or f"an option of `{name}` ends some shells"
            elif _NAME.fullmatch(one):
                self._mark(name, options, one, state, sure=everywhere)
            else:
                state.lose(_unresolved())  # no name: some shells end here, others go on

    @staticmethod
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

    def _set(self, words: Sequence[str], state: State, *, starts: bool = False) -> None:
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
                self._set_option(_LONG_OPTIONS.get(named, "?") if named else letter, state, on=option[0] == "-")

    @staticmethod
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

    def _change_folder(self, name: str, words: list[str], state: State) -> None:
        self.moved = True
        words = [word for word in words if word not in {"--", "-L"}]
        home = state.value("HOME")
        target = words[0] if words else home if isinstance(home, str) and name == "cd" else None
        folder: str | None = None
        known = name == "cd" or (name == "pushd" and self._bash and words != [])
        if known and len(words) < 2 and target and OPEN not in target and not target.startswith(("-", "+")):
            # Upwards means along the name by which the shell knows its folder.
            names = state.pwd if isinstance(state.pwd, str) else None if ".." in target.split("/") else state.cwd
            listed = state.value("CDPATH") not in {None, ""} and not target.startswith(("/", "."))
            folder = None if listed else self._entered(_joined(names, target))
        by_name = target is not None and (target.startswith("/") or isinstance(state.pwd, str))
        state.cwd = folder
        state.pwd = folder if folder is not None and by_name else UNSEEN

    def _source(self, words: list[str], state: State) -> None:
        loss = Loss("sourced", "A file that the shell reads first is not followed: it may set anything.")
        path = words[1] if len(words) == 2 else ""
        if OPEN in path or "/" not in path or (words[0] == "source" and not self._bash):
            state.lose(loss)
            return
        # Through a link the name of a parent may lead elsewhere.
        whole = None if ".." in path.split("/") else _joined(state.cwd, path)
        text = None if whole is None else self._outside.read(whole)
        parsed = None if text is None else shellwords.parse(text)
        jobs = None if parsed is None or (parsed.bash_only and not self._bash) else grammar(parsed)
        after = state.copy()
        if jobs is None or self._calls >= _CALLS_LIMIT or any(_leaves_in(jobs, {"return"})):
            after.lose(loss)
        else:
            self._calls += 1
            self._jobs(jobs, after)
            self._calls -= 1
        activated = None if whole is None or text is None else _activation(whole, text)
        if activated is not None and after.loss != state.loss and text is not None and _only_activates(text):
            after = state.copy()
            for name in _ALSO_ACTIVATED:
                after.put(name, UNSEEN)
        if activated is not None and after.loss == state.loss:
            self._activate(activated, after, state)
        state.become(after)

    @staticmethod
    def _activate(root: str, after: State, before: State) -> None:
        """Do what the activation of a virtual environment does; ``after`` has what else its file sets."""
        for name in [*after.values]:
            if _OF_ACTIVATION.fullmatch(name):
                after.values[name], after.exports[name] = before.value(name), before.hands_on(name)
        path = before.value("PATH")
        earlier = before.value("_OLD_VIRTUAL_PATH") not in {None, ""}
        after.unset("PYTHONHOME")
        after.put("VIRTUAL_ENV", root)
        for shown in ("VIRTUAL_ENV_PROMPT", "PS1"):
            after.put(shown, UNSEEN)
        after.put("PATH", f"{root}/bin:{path}" if isinstance(path, str) and not earlier else UNSEEN)

    def _call(self, name: str, words: list[str], state: State) -> bool | None:
        body = state.functions.get(name)
        if body is None or self._calls >= _CALLS_LIMIT or _leaves(body, {"return", "local"}):
            state.lose(Loss("function", "A function of the script may change anything."))
            return None
        self._calls += 1
        arguments, state.positional = state.positional, [name, *words[1:]]
        succeeded = self._jobs(body.lists[0], state)
        state.positional = arguments
        self._calls -= 1
        return succeeded


def _status(name: str, arguments: Sequence[str], state: State) -> bool | None:
    """Whether a command of a shell succeeded that was applied to this state; None where that is not known."""
    if name in {"cd", "pushd"}:
        return True if state.cwd is not None else None
    if name in {"export", "set"} and not arguments:
        return None  # it prints, which fails where there is nowhere to
    return _STATUS.get(name) if name != "export" or all(map(_NAME.match, arguments)) else None


def _limits(words: Sequence[str]) -> bool:
    """Whether ``ulimit`` may take from a program what an import needs."""
    letters = {letter for word in words if word.startswith("-") for letter in word[1:]} - {"S", "H"}
    values = [word for word in words if not word.startswith("-")]
    if not values or letters == {"c"} or set(values) == {"unlimited"}:
        return False
    enough = letters == {"n"} and all(one.isdecimal() and int(one[:9]) >= _FILES_ENOUGH for one in values)
    return not enough


def _name_of(node: Node) -> str:
    """What a sentence calls a command."""
    if not isinstance(node, Simple):
        return "a compound command"
    _, rest = _split(node.words)
    if not rest:
        return "an assignment"
    return "[" if rest[0].marked == "[" else _named(rest[0].marked)


def _unresolved() -> Loss:
    return Loss("unresolved", "A command of the script is not known, and may change anything.")


def _env_option(word: str) -> tuple[str | None, str | None, str]:
    """(the option with a value, the value where it is attached, the letters in front of it)."""
    if word.startswith("--"):
        name, attached, value = word.partition("=")
        return (name, value if attached else None, "") if name in _ENV_VALUED.values() else (None, None, "")
    for index, letter in enumerate(word[1:], start=1):
        if letter in _ENV_VALUED:
            return _ENV_VALUED[letter], word[index + 1 :] or None, word[1:index]
    return None, None, word[1:]


def _begins(words: Sequence[str], position: int) -> bool:
    """Whether a program that is known here stands at this place."""
    word = words[position]
    name = basename(word)
    known = name == "env" or name in _SUDO | _OTHER_USER | _GOSU | _TRANSPARENT | _ELSEWHERE | _FAR
    return known or is_shell(word) or locate_at(words, position, word) is not None


def _joined(folder: str | None, path: str) -> str | None:
    if path.startswith("/"):
        return posixpath.normpath(path)
    return None if folder is None or not path else posixpath.normpath(posixpath.join(folder, path))


def _bare(command: Command) -> tuple[Word, ...]:
    """The words of a command without the reserved ones in front of it."""
    position = 0
    while position < len(command.parsed) and command.parsed[position].marked in _RESERVED:
        position += 1
    return command.parsed[position:]


def _split(words: Sequence[Word]) -> tuple[Sequence[Word], Sequence[Word]]:
    """(assignments in front, the words behind them)."""
    position = 0
    while position < len(words) and words[position].assigns:
        position += 1
    return words[:position], words[position:]


def _assigned(word: Word) -> tuple[str, bool, list[Part]]:
    """(name, whether it appends, what the value is made of) of an assignment."""
    first = word.parts[0] if word.parts and isinstance(word.parts[0], str) else ""
    match = _ASSIGNED.match(first)
    if match is None:
        return "", True, []
    return match[1], match[2] != "", [first[match.end() :], *word.parts[1:]]


def _declaration(field_: str) -> tuple[str, Value] | str:
    """(name, value) of a declaration's word that expansions made an assignment; else the word."""
    match = _ASSIGNED.match(field_)
    if match is None or match[2]:
        return field_
    value = field_[match.end() :]
    return match[1], UNSEEN if OPEN in value else value


def _all_parts(parts: Iterable[Part]) -> Iterable[Part]:
    for part in parts:
        yield part
        if isinstance(part, Reference):
            yield from _all_parts(part.word)


def _contains(nodes: Iterable[Node], place: Simple) -> bool:
    return any(one is place for node in nodes for one in commands_of(node))


def _leaves(node: Node, names: set[str]) -> bool:
    return any(one.words and one.words[0].marked in names for one in commands_of(node))


def _leaves_in(jobs: List, names: set[str]) -> Iterable[bool]:
    return (bool(one.words) and one.words[0].marked in names for one in simple_commands(jobs))


def _holds_launch(command: Sequence[str]) -> bool:
    if locate(command) is not None:
        return True
    head = command[:WRAPPER_LIMIT]
    return any(
        (is_shell(word) and "sglang" in (shell_script(command, start) or ""))
        or (basename(word) == "env" and any("sglang" in one for one in head[start:]))
        for start, word in enumerate(head)
    )


def _only_activates(text: str) -> bool:
    """Whether a file, in what may not be followed otherwise, sets nothing but what activations set."""
    others = (name for name in _SET_IN_FILE.findall(text) if name not in _ALSO_ACTIVATED)
    return _READS_MORE.search(text) is None and all(map(_OF_ACTIVATION.fullmatch, others))


def _activation(path: str, text: str) -> str | None:
    """The folder of the virtual environment that a file activates, where it does that in the usual way."""
    if basename(path) != "activate":
        return None
    root = posixpath.dirname(posixpath.dirname(posixpath.normpath(path)))
    named: set[str] = set()
    for value in _VIRTUAL_ENV.findall(text):
        if "cygpath" in value:
            continue
        try:
            named.update(shlex.split(value))
        except ValueError:
            return None
    paths = _VENV_PATH.findall(text)
    new = [value for value in paths if _NEW_PATH.fullmatch(value)]
    others = [value for value in paths if not _NEW_PATH.fullmatch(value) and not _OLD_PATH.fullmatch(value)]
    return root if named == {root} and len(new) == 1 and not others else None
