"""Reading an SGLang command line: which flags a launch uses, and which interpreter it names.

Command lines contain keys (``--api-key``) and private paths, so nothing is kept of the flags but an allow-list, each
with its type checked and its length bounded, and the bare names of the others. What is not understood is passed over.
What argparse would refuse for these flags is noted, as far as the release of SGLang does not matter for it; which
release knows which flag and choice is `sidecar.launch.rules`. What the launch sets for the server, in shells and by
wrappers around it, is `sidecar.launch.shell`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import field

from sidecar.launch.forms import LaunchForm, locate
from sidecar.launch.shell import FAR, Inside, Outside, follow
from sidecar.launch.state import Loss
from sidecar.launch.words import OPEN, SPLITS
from sidecar.model import LaunchNotes, LaunchProblem
from sidecar.record import Discreet

LaunchValue = str | int | bool
"""The value of a launch flag."""

INCOMPLETE: Final = "incomplete"
"""The key of `LaunchArguments.flags` that says that there may be more flags than were read."""

UNUSABLE: Final = "\0"
"""A word that no flag keeps, in place of a value that is there and is not repeated.

In front of a flag it marks one that a configuration file names and passes no word for.
"""

_VALUE_LIMIT: Final = 128
"""Longest accepted value: the longest backend name is 21 characters, a host name 253 but seldom over 100."""
_FLAG_NAME: Final = re.compile(r"--[a-z0-9][a-z0-9-]{0,46}")
"""What the name of a flag looks like, and all that is told of one that is passed over. SGLang's longest has 46."""
_NAMES_LIMIT: Final = 100
"""Passed-over flags that are named; the others are counted."""


class LaunchArguments(Discreet, frozen=True, kw_only=True):
    """What was understood of a launch.

    ``flags`` is keyed as SGLang's ServerArgs names the fields. Three more keys are True or absent: ``incomplete``
    (flags also come from what was not read: a ``--config`` file, a wrapper, a shell variable, so that a missing one
    means nothing), ``ssl`` (the server speaks https) and ``grpc`` (it speaks no HTTP). ``environ`` is what the server
    is known to get of variables, as far as the launch's own are known; it may hold secrets, as any environment.
    ``unseen`` names those that the launch sets to what cannot be told from here, ``loss`` says why any other may be
    set, too. ``depends`` names commands on whose unknown outcome it depends whether the server is started. ``limits``:
    the launch may set limits of its own (ulimit). ``cwd`` is its working folder, None where that is not known.
    ``program`` is the interpreter, or for a console script the script, as written, None where the command names none;
    ``options`` are the interpreter's own words up to the server's first flag. ``notes`` tells how the flags were read.
    """

    withheld = frozenset({"environ"})

    form: LaunchForm
    notes: LaunchNotes
    flags: Mapping[str, LaunchValue] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    unseen: frozenset[str] = frozenset()
    loss: Loss | None = None
    depends: tuple[str, ...] = ()
    limits: bool = False
    cwd: str | None = None
    program: str | None = None
    options: tuple[str, ...] = ()

    @property
    def far(self) -> bool:
        """Whether the launch is one on another machine."""
        return self.loss is not None and self.loss.token == FAR

    @property
    def known_program(self) -> str | None:
        """The program where the whole word is known."""
        return None if self.program is None or OPEN in self.program else self.program


class LaunchFileError(Exception):
    """A file that ``--config`` names gives no flags.

    ``token`` is stable. ``refused``: SGLang does not take this file either; otherwise only this reader does not.
    ``line`` counts from 1, None where the whole file is meant. ``says`` is SGLang's own sentence where it has one.
    Nothing of the file's content is repeated.
    """

    def __init__(
        self, token: str, sentence: str, *, refused: bool, line: int | None = None, says: str | None = None
    ) -> None:
        super().__init__(sentence)
        self.token = token
        self.refused = refused
        self.line = line
        self.says = says


ReadConfig = Callable[[str], Sequence[str]]
"""Gives the words that SGLang puts in front of the flags for a ``--config`` file. Raises `LaunchFileError`."""


class _Kind(StrEnum):
    TEXT = "text"
    NAME = "name"
    """A name out of a set of choices, or a number: whatever looks like neither is not repeated."""
    INTEGER = "integer"
    SWITCH = "switch"
    PRESENCE = "presence"
    """Takes a value that is not kept, only that it was given."""


_CONFIG: Final = "config"
_MODEL: Final = "model_path"
"""Fields of which only this module hears: their values are paths."""

_FLAGS: Final[Mapping[str, tuple[str, _Kind]]] = MappingProxyType(
    {
        "--attention-backend": ("attention_backend", _Kind.NAME),
        "--prefill-attention-backend": ("prefill_attention_backend", _Kind.NAME),
        "--decode-attention-backend": ("decode_attention_backend", _Kind.NAME),
        "--mm-attention-backend": ("mm_attention_backend", _Kind.NAME),
        "--sampling-backend": ("sampling_backend", _Kind.NAME),
        "--moe-runner-backend": ("moe_runner_backend", _Kind.NAME),
        "--linear-attn-backend": ("linear_attn_backend", _Kind.NAME),
        "--linear-attn-decode-backend": ("linear_attn_decode_backend", _Kind.NAME),
        "--linear-attn-prefill-backend": ("linear_attn_prefill_backend", _Kind.NAME),
        "--speculative-algorithm": ("speculative_algorithm", _Kind.NAME),
        "--speculative-draft-attention-backend": ("speculative_draft_attention_backend", _Kind.NAME),
        "--speculative-attention-mode": ("speculative_attention_mode", _Kind.NAME),
        "--mamba-backend": ("mamba_backend", _Kind.NAME),
        "--mamba-ssm-dtype": ("mamba_ssm_dtype", _Kind.NAME),
        "--enable-mamba-cache-stochastic-rounding": ("enable_mamba_cache_stochastic_rounding", _Kind.SWITCH),
        "--mamba-cache-philox-rounds": ("mamba_cache_philox_rounds", _Kind.INTEGER),
        "--enable-deterministic-inference": ("enable_deterministic_inference", _Kind.SWITCH),
        "--disable-cuda-graph": ("disable_cuda_graph", _Kind.SWITCH),
        "--skip-server-warmup": ("skip_server_warmup", _Kind.SWITCH),
        "--tp-size": ("tp_size", _Kind.INTEGER),
        "--tensor-parallel-size": ("tp_size", _Kind.INTEGER),
        "--dp-size": ("dp_size", _Kind.INTEGER),
        "--data-parallel-size": ("dp_size", _Kind.INTEGER),
        "--pp-size": ("pp_size", _Kind.INTEGER),
        "--pipeline-parallel-size": ("pp_size", _Kind.INTEGER),
        "--nnodes": ("nnodes", _Kind.INTEGER),
        "--node-rank": ("node_rank", _Kind.INTEGER),
        "--device": ("device", _Kind.NAME),
        "--host": ("host", _Kind.TEXT),
        "--port": ("port", _Kind.INTEGER),
        "--base-gpu-id": ("base_gpu_id", _Kind.INTEGER),
        "--gpu-id-step": ("gpu_id_step", _Kind.INTEGER),
        "--enable-dp-attention": ("enable_dp_attention", _Kind.SWITCH),
        "--kv-cache-dtype": ("kv_cache_dtype", _Kind.NAME),
        "--page-size": ("page_size", _Kind.INTEGER),
        "--config": (_CONFIG, _Kind.PRESENCE),
        "--model-path": (_MODEL, _Kind.PRESENCE),
        "--model": (_MODEL, _Kind.PRESENCE),
        "--ssl-certfile": ("ssl", _Kind.PRESENCE),
        "--smg-grpc-mode": ("grpc", _Kind.SWITCH),
        "--grpc-mode": ("grpc", _Kind.SWITCH),
    }
)
_PLUGIN_VERSION: Final = re.compile(r"--fa[-_]?impl[-_]?ver(?:sion)?")
"""A FlashAttention version as a plugin may take it as a flag; SGLang itself has none."""
FA_IMPL_VER: Final = "fa_impl_ver"
"""The field of that version: a number where it is one, else text."""
_SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        field: tuple(flag for flag, (other, _) in _FLAGS.items() if other == field)
        for field in ("tp_size", "dp_size", "pp_size", _MODEL)
    }
)
"""Flags that argparse names by all their spellings."""

_NEGATIVE: Final = re.compile(r"-[0-9]+|-[0-9]*\.[0-9]+")
"""What argparse takes for a value although it starts with a dash."""
_CHOICE: Final = re.compile(r"[\w.+:/-]{1,64}", re.ASCII)
_LAUNCHERS: Final = frozenset({LaunchForm.MODULE, LaunchForm.CONSOLE_SCRIPT, LaunchForm.FLAGS})
"""Forms whose flags argparse itself reads; what another program makes of its arguments is not known."""


def parse_launch(
    argv: Sequence[str], read_config: ReadConfig | None = None, outside: Outside | None = None
) -> LaunchArguments:
    """The allow-listed flags of a launch, in any of its forms, and what it sets for the server.

    ``argv`` is bare flags, ``python -m sglang.launch_server ...``, ``sglang serve ...``, a shell with a ``-c``
    string around one of them, each with ``env NAME=value`` or other wrappers in front. ``read_config`` reads the file
    that ``--config`` names; without it that file is not looked at. ``outside`` is what the launch is given. Never
    raises.
    """
    around = follow(argv, outside or Outside())
    words = around.words
    form, program, rest, serves = LaunchForm.FLAGS, None, words, False
    options: tuple[str, ...] = ()
    if words and not words[0].startswith("-"):
        located = locate(words)
        if located is None:
            form, rest = LaunchForm.OTHER, words[1:]
        else:
            form, start, position = located
            program, rest, serves = words[start], words[position:], words[position - 1] == "serve"
            options = tuple(words[start + 1 : position])
    reading = _Reading(form, launches=around.launches)
    if form is LaunchForm.OTHER or around.elsewhere:
        read_config = None  # whether the wrapper hands it on, and which file it is there, is not known
    if form is LaunchForm.OTHER or not around.complete or around.launches > 1:
        reading.flags[INCOMPLETE] = True
    reading.launch(rest, read_config, around, serves=serves)
    return LaunchArguments(
        form=form,
        flags=reading.flags,
        environ=around.environ,
        unseen=around.unseen,
        loss=around.loss,
        depends=around.depends,
        limits=around.limits,
        cwd=around.cwd,
        program=program,
        options=options,
        notes=reading.notes(),
    )


def is_listed(flag: str) -> bool:
    """Whether a flag's value is looked at, spelled as argparse takes it."""
    return _flag(flag) is not None


def is_switch(flag: str) -> bool:
    """Whether a listed flag takes no value."""
    found = _flag(flag)
    return found is not None and found[2] is _Kind.SWITCH


def _flag(word: str) -> tuple[str, str, _Kind] | None:
    """(flag, field, kind) of a listed flag. Unique abbreviations count, as they do for argparse (``--tp 8``)."""
    if word in _FLAGS:
        return word, *_FLAGS[word]
    if _PLUGIN_VERSION.fullmatch(word):
        return word, FA_IMPL_VER, _Kind.NAME
    found = [name for name in _FLAGS if name.startswith(word)]
    fields = {_FLAGS[name][0] for name in found}
    return (found[0], *_FLAGS[found[0]]) if len(fields) == 1 and len(word) >= len("--tp") else None


def _is_option(word: str) -> bool:
    """Whether argparse takes a word for an option, and so not for a value."""
    if len(word) < 2 or not word.startswith("-") or _NEGATIVE.fullmatch(word):  # a dash alone is a value
        return False
    return " " not in word or "=" in word.split(" ", 1)[0]


class _Reading:
    """Reads the words behind a command as argparse does, into what may be kept."""

    def __init__(self, form: LaunchForm, *, launches: int) -> None:
        self.flags: dict[str, LaunchValue] = {}
        self._form = form
        self._launches = launches
        self._abbreviated: dict[tuple[str, str], None] = {}
        self._judged = True
        self._given: list[tuple[str, str, LaunchValue]] = []
        self._from_config: tuple[str, ...] = ()
        self._passed_over: dict[str, None] = {}
        self._unnamed = 0
        self._problems: dict[LaunchProblem, None] = {}
        self._has_model = False
        self._config: str | None = None

    def notes(self) -> LaunchNotes:
        """How the flags were read."""
        return LaunchNotes(
            form=self._form.value,
            given=tuple(self._given),
            from_config=self._from_config,
            passed_over=tuple(self._passed_over)[:_NAMES_LIMIT],
            passed_over_count=len(self._passed_over) + self._unnamed,
            problems=tuple(self._problems) if self._form in _LAUNCHERS and self._judged else (),
            has_model=self._has_model,
            config=self._config,
            abbreviated=tuple(self._abbreviated),
            launches=self._launches,
        )

    def launch(
        self, words: Sequence[str], read_config: ReadConfig | None, around: Inside, *, serves: bool = False
    ) -> None:
        """Read a launch's own words, after those of the file that they name: theirs win.

        ``serves`` is whether it is the sub-command ``serve``, which looks at the words before the parser does
        (sglang/cli/serve.py).
        """
        if serves:
            words = self._without_model_type(words)
            if words and not words[0].startswith(("-", OPEN)):
                self._has_model = True  # `sglang serve MODEL`
                words = words[1:]
        words = self._configuration(words, read_config, around)
        self._words(words)

    def _without_model_type(self, words: Sequence[str]) -> Sequence[str]:
        kept: list[str] = []
        position = 0
        while position < len(words):
            name, attached, value = words[position].partition("=")
            position += 1
            if name != "--model-type":
                kept.append(words[position - 1])
                continue
            self._pass_over(name)
            if not attached:
                value = words[position] if position < len(words) else ""
                position += 1
            if value not in {"auto", "llm"}:
                # Another parser reads the flags of a diffusion model.
                self.flags[INCOMPLETE] = True
                self._judged = False
        return kept

    # -- the configuration file

    def _configuration(self, words: Sequence[str], read_config: ReadConfig | None, around: Inside) -> Sequence[str]:
        """Read the flags of a ``--config`` file; give the words without that flag.

        SGLang looks for the very word. ``--config=FILE`` and abbreviations reach argparse, which drops them.
        """
        places = [position for position, word in enumerate(words) if word == "--config"]
        if not places:
            if any(word.startswith("--config=") for word in words):
                self._config = "ignored"
            return words
        place = places[0]
        path = words[place + 1] if place + 1 < len(words) else None
        rest = [*words[:place], *words[place + 2 :]]
        if len(places) > 1:
            self._problem(
                "several-configs", "--config", "ValueError: Multiple config files specified! Only one allowed."
            )
        elif path is None:
            self._problem("missing-value", "--config", "ValueError: No config file specified after --config flag!")
        if len(places) > 1 or path is None:
            self._config = "not-one-file"
            self.flags[INCOMPLETE] = True
            return [word for word in words if word != "--config"]
        silent: list[str] = []
        try:
            found = self._read(path, read_config, around)
            silent = [word[1:] for word in found if word.startswith(f"{UNUSABLE}--")]
            self._words([word for word in found if not word.startswith(f"{UNUSABLE}--")])
            self._config = "read"
        except LaunchFileError as error:
            self._config = error.token
            self.flags[INCOMPLETE] = True
        self._from_config = tuple(dict.fromkeys([flag for flag, _, _ in self._given] + silent))
        return rest

    @staticmethod
    def _read(path: str, read_config: ReadConfig | None, around: Inside) -> Sequence[str]:
        if read_config is None:
            raise LaunchFileError("not-looked-at", "The file is not one that may be read from here.", refused=False)
        if OPEN in path:
            raise LaunchFileError("unknown-path", "A variable of a shell stands in the file's path.", refused=False)
        if around.moved and not path.startswith("/"):
            if around.cwd is None:
                raise LaunchFileError(
                    "unknown-folder", "The folder that the path is relative to is not known.", refused=False
                )
            given, path = path, f"{around.cwd.rstrip('/')}/{path}"
        else:
            given = path
        if not around.written.isdisjoint({given, path}) or any(OPEN in one for one in around.written):
            raise LaunchFileError("written-before", "An earlier command may write the file.", refused=False)
        try:
            return read_config(path)
        except LaunchFileError as error:
            if not around.may_write:
                raise
            sentence = "The file is not there, or not readable, before earlier commands have run."
            raise LaunchFileError("written-before", sentence, refused=False) from error

    # -- words

    def _words(self, words: Sequence[str]) -> None:
        position = 0
        after: str | None = None  # the flag that takes no more words
        bare = True  # whether a word here would be taken by nothing
        while position < len(words):
            word = words[position]
            position += 1
            if word == "--" and self._form in _LAUNCHERS:
                # The rest are positional words, and SGLang's parser takes none.
                self._problem("unexpected-word", "--", "error: unrecognized arguments: -- ...")
                return
            if not _is_option(word):
                self._loose(word, after, bare=bare)
                continue
            name, attached, value = word.partition("=")
            found = _flag(name) or self._misspelled(name)
            after, bare = None, False
            if found is None:
                self._pass_over(name)
                self._may_be_more(OPEN in name or SPLITS in value)
                continue
            flag, field_, kind = found
            bare = True
            if flag != name and flag.startswith(name):
                self._abbreviated.setdefault((name, flag))
            if kind is _Kind.SWITCH:
                after = flag
                if attached:
                    self._problem(
                        "unexpected-value", flag, f"error: argument {_shown(flag)}: ignored explicit argument ..."
                    )
                else:
                    self._keep(flag, field_, True)
                continue
            if not attached:
                if position >= len(words) or _is_option(words[position]):
                    self._problem("missing-value", flag, f"error: argument {_shown(flag)}: expected one argument")
                    continue
                value = words[position]
                position += 1
            after = flag
            if value != "--":  # after "=" argparse drops it, and the flag is as good as not given
                self._value(flag, field_, kind, value)

    def _loose(self, word: str, after: str | None, *, bare: bool) -> None:
        """A word that is no flag, where it is not the value of a listed one."""
        if OPEN in word and (SPLITS in word or word.startswith(OPEN)):
            # Where a flag may stand, even one word may be one; behind a flag that is passed over it is its value.
            self._may_be_more(bare or SPLITS in word)
        elif after is not None:
            self._problem("unexpected-word", after, "error: unrecognized arguments: ...")

    def _may_be_more(self, so: bool) -> None:
        if so:
            self.flags[INCOMPLETE] = True

    def _value(self, flag: str, field_: str, kind: _Kind, text: str) -> None:
        """Keep a flag's value with its type, unless it cannot be what was meant."""
        if kind is _Kind.PRESENCE:
            self._has_model = self._has_model or field_ == _MODEL
            self._may_be_more(SPLITS in text)
            if field_ not in {_MODEL, _CONFIG}:
                self._keep(flag, field_, True)
            return
        if OPEN in text:
            if field_ not in {"host", "port"}:
                self.flags[INCOMPLETE] = True
            return
        if kind is _Kind.INTEGER:
            number = _integer(text)
            if number is None:
                says = f"error: argument {_shown(flag)}: invalid int value: ..."
                self._problem("not-a-number", flag, says)
            elif abs(number) < 10**9:
                self._keep(flag, field_, number)
            return
        if field_ == FA_IMPL_VER and (number := _integer(text)) is not None and abs(number) < 10**9:
            self._keep(flag, field_, number)
        elif kind is _Kind.NAME:
            if _CHOICE.fullmatch(text):
                self._keep(flag, field_, text)
            else:
                self._problem("odd-value", flag, f"error: argument {_shown(flag)}: invalid choice: ...")
        elif text and len(text) <= _VALUE_LIMIT and text.isprintable():
            self._keep(flag, field_, text)

    def _misspelled(self, name: str) -> tuple[str, str, _Kind] | None:
        """A listed flag with underscores. SGLang has no such flag; what was meant is read all the same."""
        if "_" not in name or not name.startswith("--"):
            return None
        meant = name.replace("_", "-")
        if meant not in _FLAGS:
            return None
        self._problem("unrecognized-flag", meant, f"error: unrecognized arguments: --{meant[2:].replace('-', '_')}")
        return meant, *_FLAGS[meant]

    def _keep(self, flag: str, field_: str, value: LaunchValue) -> None:
        self.flags[field_] = value
        self._given.append((flag, field_, value))

    def _pass_over(self, name: str) -> None:
        if _FLAG_NAME.fullmatch(name):
            self._passed_over.setdefault(name)
        else:
            self._unnamed += 1

    def _problem(self, token: str, flag: str, says: str) -> None:
        self._problems.setdefault(LaunchProblem(token=token, flag=flag, says=says))


def _shown(flag: str) -> str:
    """A flag as argparse names it in its messages: by all its spellings."""
    field_ = _FLAGS[flag][0] if flag in _FLAGS else ""
    return "/".join(_SPELLINGS.get(field_, (flag,)))


def _integer(text: str) -> int | None:
    """A number as Python's ``int`` reads it, which argparse calls; None where that fails."""
    try:
        return int(text) if len(text) <= _VALUE_LIMIT else None
    except ValueError:
        return None
