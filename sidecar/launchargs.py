"""Reading an SGLang command line: which flags a launch uses, and which interpreter it names.

Command lines contain keys (``--api-key``) and private paths, so nothing is kept but an allow-list of flags and
environment assignments, each with its type checked and its length bounded. What is not understood is skipped:
this reads what an operator typed for another program, it does not judge it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

LaunchValue = str | int | bool
"""The value of a launch flag."""

INCOMPLETE: Final = "incomplete"
"""The key of `LaunchArguments.flags` that says that there may be more flags than were read."""

_VALUE_LIMIT: Final = 128
"""Longest accepted value: the longest backend name is 21 characters, a host name 253 but seldom over 100."""
_ENVIRON_LIMIT: Final = 4096
"""Longest accepted environment assignment; search paths are long."""
_DEPTH_LIMIT: Final = 6
"""Shells and wrappers inside one another. Real images nest three."""


class LaunchForm(StrEnum):
    """How a command starts SGLang."""

    MODULE = "module"
    """``python -m sglang.launch_server``, or that file run as a script."""
    CONSOLE_SCRIPT = "console-script"
    """``sglang serve``."""
    FLAGS = "flags"
    """Flags alone, without a command."""
    OTHER = "other"
    """A command that is none of these: a wrapper script that may pass its arguments on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchArguments:
    """What was understood of a launch.

    ``flags`` is keyed as SGLang's ServerArgs names the fields. Three more keys are True or absent: ``incomplete``
    (flags also come from what was not read: a ``--config`` file, a wrapper, a shell variable, so that a missing one
    means nothing), ``ssl`` (the server speaks https) and ``grpc`` (it speaks no HTTP).
    ``environ`` holds the assignments in front of the command. ``program`` is the interpreter, or for a console
    script the script, as written. None where the command names none.
    """

    form: LaunchForm
    flags: Mapping[str, LaunchValue] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None


class _Kind(StrEnum):
    TEXT = "text"
    INTEGER = "integer"
    SWITCH = "switch"
    PRESENCE = "presence"
    """Takes a value that is not kept, only that it was given."""


_FLAGS: Final[Mapping[str, tuple[str, _Kind]]] = MappingProxyType(
    {
        "--attention-backend": ("attention_backend", _Kind.TEXT),
        "--prefill-attention-backend": ("prefill_attention_backend", _Kind.TEXT),
        "--decode-attention-backend": ("decode_attention_backend", _Kind.TEXT),
        "--mm-attention-backend": ("mm_attention_backend", _Kind.TEXT),
        "--speculative-algorithm": ("speculative_algorithm", _Kind.TEXT),
        "--speculative-draft-attention-backend": ("speculative_draft_attention_backend", _Kind.TEXT),
        "--mamba-backend": ("mamba_backend", _Kind.TEXT),
        "--mamba-ssm-dtype": ("mamba_ssm_dtype", _Kind.TEXT),
        "--enable-mamba-cache-stochastic-rounding": ("enable_mamba_cache_stochastic_rounding", _Kind.SWITCH),
        "--tp-size": ("tp_size", _Kind.INTEGER),
        "--tensor-parallel-size": ("tp_size", _Kind.INTEGER),
        "--dp-size": ("dp_size", _Kind.INTEGER),
        "--data-parallel-size": ("dp_size", _Kind.INTEGER),
        "--pp-size": ("pp_size", _Kind.INTEGER),
        "--pipeline-parallel-size": ("pp_size", _Kind.INTEGER),
        "--nnodes": ("nnodes", _Kind.INTEGER),
        "--node-rank": ("node_rank", _Kind.INTEGER),
        "--device": ("device", _Kind.TEXT),
        "--host": ("host", _Kind.TEXT),
        "--port": ("port", _Kind.INTEGER),
        "--base-gpu-id": ("base_gpu_id", _Kind.INTEGER),
        "--gpu-id-step": ("gpu_id_step", _Kind.INTEGER),
        "--enable-dp-attention": ("enable_dp_attention", _Kind.SWITCH),
        "--kv-cache-dtype": ("kv_cache_dtype", _Kind.TEXT),
        "--page-size": ("page_size", _Kind.INTEGER),
        "--config": (INCOMPLETE, _Kind.PRESENCE),
        "--ssl-certfile": ("ssl", _Kind.PRESENCE),
        "--smg-grpc-mode": ("grpc", _Kind.SWITCH),
        "--grpc-mode": ("grpc", _Kind.SWITCH),
    }
)

_ENVIRON: Final = frozenset(
    {
        "SGLANG_IS_FLASHINFER_AVAILABLE",
        "FLASHINFER_DISABLE_VERSION_CHECK",
        "CUDA_VISIBLE_DEVICES",
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "CUDA_HOME",
    }
)

_MODULES: Final = frozenset({"sglang.launch_server", "sglang.cli.main", "sglang"})
_COMMAND_MODULES: Final = frozenset({"sglang.cli.main", "sglang"})
"""Modules that take the sub-command ``serve``."""
_PYTHON: Final = re.compile(r"^(?:python|pypy)[0-9.]*t?$")
_SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_ASSIGNMENT: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON_OPTIONS_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_SEPARATORS: Final = frozenset(";&|\n()")


def is_python(program: str) -> bool:
    """Whether a program's file name is that of a Python interpreter."""
    return _PYTHON.match(_basename(program)) is not None


def is_shell(program: str) -> bool:
    """Whether a program's file name is that of a shell. A login shell's leading dash counts."""
    return _basename(program).lstrip("-") in _SHELLS


def server_form(argv: Sequence[str]) -> LaunchForm | None:
    """How ``argv`` itself is an SGLang server's main process, or None when it is not one.

    Strict about positions: a shell, an init process or this agent's own command line may contain a launch as
    their argument without being the server.
    """
    located = _locate(argv)
    return located[0] if located is not None and located[1] == 0 else None


def parse_launch(argv: Sequence[str]) -> LaunchArguments:
    """The allow-listed flags of a launch, in any of its forms.

    ``argv`` is bare flags, ``python -m sglang.launch_server ...``, ``sglang serve ...``, a shell with a ``-c``
    string around one of them, each with ``env NAME=value`` or other wrappers in front. Never raises.
    """
    environ: dict[str, str] = {}
    words = list(argv)
    for _ in range(_DEPTH_LIMIT):
        words, inner = _unwrap(words, environ)
        if not inner:
            break
    kept = {name: value for name, value in environ.items() if name in _ENVIRON and len(value) <= _ENVIRON_LIMIT}
    if not words or words[0].startswith("-"):
        return LaunchArguments(form=LaunchForm.FLAGS, flags=_flags(words), environ=kept)
    located = _locate(words)
    if located is None:
        return LaunchArguments(form=LaunchForm.OTHER, flags={**_flags(words[1:]), INCOMPLETE: True}, environ=kept)
    form, start, rest = located
    return LaunchArguments(form=form, flags=_flags(words[rest:]), environ=kept, program=words[start])


def _basename(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _unwrap(words: list[str], environ: dict[str, str]) -> tuple[list[str], bool]:
    """Take off assignments, ``env`` and a shell around a command; True when there may be more inside."""
    position = _take_assignments(words, 0, environ)
    if position < len(words) and _basename(words[position]) == "env":
        position = _skip_env(words, position + 1, environ)
    words = words[position:]
    if _locate(words) is not None:
        return words, False
    for start, word in enumerate(words):
        # Not only the first word: an init process, numactl or nohup may stand in front of the shell.
        script = _shell_script(words[start:]) if is_shell(word) else None
        if script is not None:
            return _command_of(script, environ), True
    return words, False


def _take_assignments(words: Sequence[str], position: int, environ: dict[str, str]) -> int:
    while position < len(words) and _ASSIGNMENT.match(words[position]):
        name, _, value = words[position].partition("=")
        if "$" not in value:  # a reference that only the shell can resolve: not known
            environ[name] = value
        position += 1
    return position


def _skip_env(words: Sequence[str], position: int, environ: dict[str, str]) -> int:
    while position < len(words) and words[position].startswith("-"):
        if words[position] in {"-u", "--unset", "-C", "--chdir"}:
            position += 1
        position += 1
    return _take_assignments(words, position, environ)


def _shell_script(words: Sequence[str]) -> str | None:
    """The string after a shell's ``-c``, whichever letters it is combined with."""
    for position, word in enumerate(words[1:], start=1):
        if not word.startswith(("-", "+")):
            return None
        if not word.startswith("--") and "c" in word:
            after = [later for later in words[position + 1 :] if later != "--"]
            return after[0] if after else None
    return None


def _command_of(script: str, environ: dict[str, str]) -> list[str]:
    """The command in a shell script that launches the server, else its last one."""
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace = " \t\r"
    lexer.commenters = "#"
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word and set(word) <= _SEPARATORS:
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        # Unbalanced quotes: what was read before them still counts.
        pass
    commands = [command for command in commands if command]
    for command in commands:
        if command[0] == "export":
            _take_assignments(command, 1, environ)
    launches = [command for command in commands if _holds_launch(command)]
    chosen = (launches or commands or [[]])[-1]
    return chosen[1:] if chosen[:1] == ["exec"] else chosen


def _holds_launch(command: Sequence[str]) -> bool:
    return _locate(command) is not None or any(is_shell(word) for word in command)


def _locate(argv: Sequence[str]) -> tuple[LaunchForm, int, int] | None:
    """(form, index of the program, index of the first server flag) of the launch inside a command."""
    for start, word in enumerate(argv):
        found = _locate_at(argv, start, word)
        if found is not None:
            return found
    return None


def _locate_at(argv: Sequence[str], start: int, word: str) -> tuple[LaunchForm, int, int] | None:
    if _basename(word) == "sglang" and argv[start + 1 : start + 2] == ["serve"]:
        return LaunchForm.CONSOLE_SCRIPT, start, start + 2
    if not is_python(word):
        return None
    position = start + 1
    while position < len(argv):
        option = argv[position]
        if option.startswith("-m") or (option.startswith("-") and not option.startswith("--") and option[-1] == "m"):
            attached = option[2:] if option.startswith("-m") else ""
            module = attached or (argv[position + 1] if position + 1 < len(argv) else "")
            rest = position + (1 if attached else 2)
            return _module_launch(argv, start, module, rest)
        if not option.startswith("-"):
            break
        position += 2 if option in _PYTHON_OPTIONS_WITH_VALUE else 1
    if position >= len(argv):
        return None
    script = argv[position]
    if script.endswith("sglang/launch_server.py"):
        return LaunchForm.MODULE, start, position + 1
    if _basename(script) == "sglang" and argv[position + 1 : position + 2] == ["serve"]:
        return LaunchForm.CONSOLE_SCRIPT, start, position + 2
    return None


def _module_launch(argv: Sequence[str], start: int, module: str, rest: int) -> tuple[LaunchForm, int, int] | None:
    if module not in _MODULES:
        return None
    if module in _COMMAND_MODULES:
        if argv[rest : rest + 1] != ["serve"]:
            return None
        rest += 1
    return LaunchForm.MODULE, start, rest


def _flag(word: str) -> tuple[str, _Kind] | None:
    """The field that a flag sets. Unique abbreviations count, as they do for argparse (``--tp 8``)."""
    if word in _FLAGS:
        return _FLAGS[word]
    fields = {target for name, target in _FLAGS.items() if name.startswith(word)}
    return fields.pop() if len(fields) == 1 and len(word) >= len("--tp") else None


def _flags(words: Sequence[str]) -> dict[str, LaunchValue]:
    found: dict[str, LaunchValue] = {}
    position = 0
    while position < len(words):
        word, attached, value = words[position].partition("=")
        position += 1
        target = _flag(word) if word.startswith("--") else None
        if target is None:
            # A variable that stands where a flag may, not behind one: it may hold any number of flags.
            if word.startswith("$") and not (position > 1 and words[position - 2].startswith("--")):
                found[INCOMPLETE] = True
            continue
        name, kind = target
        if kind is _Kind.SWITCH:
            found[name] = True
            continue
        if not attached:
            if position >= len(words) or words[position].startswith("--"):
                continue
            value = words[position]
            position += 1
        parsed = _value(kind, value)
        if parsed is not None:
            found[name] = parsed
        elif "$" in value and name not in {"host", "port"}:
            found[INCOMPLETE] = True
    return found


def _value(kind: _Kind, text: str) -> LaunchValue | None:
    """A flag's value with its type, or None for one that cannot be what was meant."""
    if kind is _Kind.PRESENCE:
        return True
    if not text or len(text) > _VALUE_LIMIT or "$" in text or not text.isprintable():
        return None
    if kind is _Kind.TEXT:
        return text
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
