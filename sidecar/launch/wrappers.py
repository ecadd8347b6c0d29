"""Programs in front of a launch: what each changes of environment, user and folder, and the command behind it.

Shells, which are programs in front of it too, are followed in `sidecar.launch.shell`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from sidecar.launch.assignments import ASSIGNED, NAME
from sidecar.launch.forms import WRAPPER_LIMIT, basename, is_shell, locate, locate_at, named, shell_script
from sidecar.launch.state import UNSEEN, Loss, State, joined, names
from sidecar.launch.trace import Trace
from sidecar.launch.words import OPEN

FAR: Final = "another-machine"
"""The token of a `Loss` where the machine is another one, too."""
OTHER_USER: Final = frozenset({"su", "runuser", "pkexec", "machinectl"})
"""Programs that run a command as another user, and give it an environment for that."""
OTHER_NAME: Final = Loss(
    "argv0", "The interpreter is started under a name of its own, by which it may find another environment."
)

_TRANSPARENT: Final = names(
    "nohup nice ionice chrt taskset numactl setsid timeout time tini tini-static dumb-init catatonit docker-init "
    "prlimit strace perf setarch linux64 exec command builtin setpriv stdbuf"
)
"""Programs that hand variables and folder on as they are, but for those of `_SET_BY`."""
_SET_BY: Final = MappingProxyType({"stdbuf": ("LD_PRELOAD", "_STDBUF_I", "_STDBUF_O", "_STDBUF_E")})
_SUBCOMMANDS: Final = MappingProxyType({"perf": {"record", "stat"}})
_SUDO: Final = frozenset({"sudo", "doas"})
_GOSU: Final = frozenset({"gosu", "su-exec"})
_ELSEWHERE: Final = names(
    "docker docker-compose podman nerdctl crictl ctr buildah lxc lxc-attach incus nsenter unshare chroot proot bwrap "
    "fakechroot singularity apptainer enroot charliecloud ch-run shifter toolbox distrobox flatpak systemd-run "
    "systemd-nspawn conda mamba micromamba uv uvx poetry pipenv pixi hatch pdm rye"
)
"""Programs whose command runs among other files, or in an environment that they make."""
_REMOTE: Final = names(
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
_ANOTHER: Final = "another environment than the one here"


def take_assignments(words: list[str], state: State) -> list[str]:
    """The command behind assignments that are words of their own, which set variables of the environment."""
    taken = 0
    while taken < len(words) and (match := ASSIGNED.match(words[taken])):
        _put(match[1], words[taken][match.end() :], state)
        taken += 1
    return words[taken:]


def _put(name: str, value: str, state: State) -> None:
    """Set a variable of the environment to what a word says, as far as that is known."""
    state.put(name, UNSEEN if OPEN in value else value)


# -- any program ------------------------------------------------------------------------------------


def unwrap(words: list[str], state: State, trace: Trace) -> tuple[list[str], bool]:
    """(the command behind a program that is no shell and no `OTHER_USER`, whether that was followed to its end)."""
    name = basename(words[0])
    if name in _SUDO:
        return _sudo(words, state, trace), False
    if name in _GOSU and len(words) > 2:
        trace.other_user = True
        state.put("HOME", UNSEEN)
        return words[2:], False
    if name in _TRANSPARENT and (rest := _transparent(words, state, trace)) is not None:
        return rest, False
    if name in _REMOTE:
        _leave(state, trace, Loss(FAR, f"{name} runs the command on another machine than this one."))
    elif name in _ELSEWHERE:
        _leave(state, trace, Loss("another-environment", f"{name} runs the command in {_ANOTHER}."))
    else:
        if (absent := _absent(words, state, trace)) is not None:
            trace.miss(f"there is no file {named(absent)}, which stands in front of it")
        shown = "what is not known here" if OPEN in words[0] else named(words[0])
        sentence = f"{shown} stands in front of the server, and what it sets is not looked into."
        state.lose(Loss("wrapper", sentence))
    return behind(words)


def behind(words: list[str]) -> tuple[list[str], bool]:
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


def _absent(words: Sequence[str], state: State, trace: Trace) -> str | None:
    """The script or program in front of the server, where it is named by a path that leads to nothing."""
    path = words[0]
    if is_shell(path):
        path = next((word for word in words[1:] if word[:1] not in {"-", "+"}), "")
    whole = joined(state.cwd, path) if "/" in path and OPEN not in path and ".." not in path.split("/") else None
    return path if whole is not None and trace.outside.is_absent(whole) else None


def _leave(state: State, trace: Trace, loss: Loss) -> None:
    """Go where nothing of here counts, whatever is set there."""
    trace.away = trace.away or loss
    state.lose(loss)


def _enter_by_name(folder: str, state: State, trace: Trace) -> None:
    """Go to a folder as the kernel does, which follows links where the name goes up."""
    trace.moved = True
    plain = OPEN not in folder and ".." not in folder.split("/")
    state.cwd = trace.outside.entered(joined(state.cwd, folder)) if plain else None


# -- env --------------------------------------------------------------------------------------------


def env(words: list[str], state: State, trace: Trace) -> list[str]:
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
            state.lose(OTHER_NAME)
        elif name == "--chdir":
            folders.append(value)
        elif name == "--split-string":
            try:
                words, position = ["env", *shlex.split(value), *words[position:]], 1
            except ValueError:
                trace.complete = False
                state.lose(Loss("unresolved", "The words that env is to split are not understood."))
                return []
    _change_environment(state, gone, cleared=cleared)
    while position < len(words) and "=" in words[position] and not words[position].startswith("="):
        name, _, value = words[position].partition("=")
        if OPEN in name:
            state.lose(Loss("unresolved", "Which variable env sets is not known."))
        else:
            _put(name, value, state)
        position += 1
    for folder in folders[-1:]:
        _enter_by_name(folder, state, trace)
    return words[position:]


def _change_environment(state: State, gone: Sequence[str], *, cleared: bool) -> None:
    if cleared:
        state.clear()
    for name in gone:
        if OPEN in name:
            state.lose(Loss("unresolved", "Which variable env takes away is not known."))
        else:
            state.unset(name)


def _env_option(word: str) -> tuple[str | None, str | None, str]:
    """(the option with a value, the value where it is attached, the letters in front of it)."""
    if word.startswith("--"):
        name, attached, value = word.partition("=")
        return (name, value if attached else None, "") if name in _ENV_VALUED.values() else (None, None, "")
    for index, letter in enumerate(word[1:], start=1):
        if letter in _ENV_VALUED:
            return _ENV_VALUED[letter], word[index + 1 :] or None, word[1:index]
    return None, None, word[1:]


# -- other users ------------------------------------------------------------------------------------


def _sudo(words: list[str], state: State, trace: Trace) -> list[str]:
    """The command behind ``sudo``: by default it gets a new environment, by rules that only root may read."""
    position, keeps, listed = 1, False, set[str]()
    trace.other_user = True
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
            _sudo_option(options, value, state, trace)
            continue
        for index, letter in enumerate(word[1:], start=1):
            keeps = keeps or letter == "E"
            value = ""
            if letter in _SUDO_VALUED:
                value = word[index + 1 :] or (words[position] if position < len(words) else "")
                position += word[index + 1 :] == ""
            _sudo_option(letter, value, state, trace)
            if letter in _SUDO_VALUED:
                break
    loss = Loss("another-user", f"{basename(words[0])} gives the command an environment that only its rules tell.")
    if keeps and state.loss is None and state.base is not None:
        known, unseen = state.exported()
        for name in [*known, *unseen]:
            if _SUDO_DROPPED.match(name):
                state.put(name, UNSEEN)
    else:
        kept = {name: state.value(name) for name in listed if name != "PATH" and NAME.fullmatch(name)}
        state.lose(loss)
        for name, kept_value in kept.items():
            state.put(name, kept_value)
    return take_assignments(words[position:], state)


def _sudo_option(letter: str, value: str, state: State, trace: Trace) -> None:
    if letter == "D":
        _enter_by_name(value, state, trace)
    elif letter == "i":
        trace.moved, state.cwd = True, None
        state.lose(Loss("login-shell", "A login shell reads files that set what is not looked into."))
    elif letter in {"R", "h"}:
        _leave(state, trace, Loss("another-environment", f"sudo runs the command in {_ANOTHER}."))


def another_user(words: Sequence[str], state: State, trace: Trace) -> str | None:
    """Become another user, as ``su`` does; the script of its ``-c``, None where there is none."""
    trace.other_user = True
    state.lose(Loss("another-user", f"{basename(words[0])} gives the command an environment of its own."))
    for position, word in enumerate(words[1:-1], start=1):
        if word.startswith("--command="):
            return word.partition("=")[2]
        if word in {"-c", "--command", "--session-command"}:
            return words[position + 1]
    return None


# -- programs that change nothing or little ---------------------------------------------------------


def _transparent(words: list[str], state: State, trace: Trace) -> list[str] | None:
    """The command behind a program that changes nothing, or None where it is not clear where that begins."""
    name = basename(words[0])
    trace.limits = trace.limits or name == "prlimit"
    if name == "exec":
        exec_options(words[1:2], state)
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


def exec_options(words: Sequence[str], process: State) -> None:
    """Apply options of ``exec`` to the process that it becomes."""
    for word in words:
        if word.startswith("-") and "c" in word:
            process.clear()
        if word.startswith("-") and {*word} & {"a", "l"}:
            process.lose(OTHER_NAME)


def _begins(words: Sequence[str], position: int) -> bool:
    """Whether a program that is known here stands at this place."""
    word = words[position]
    name = basename(word)
    known = name == "env" or name in _SUDO | OTHER_USER | _GOSU | _TRANSPARENT | _ELSEWHERE | _REMOTE
    return known or is_shell(word) or locate_at(words, position, word) is not None
