"""How the commands of a shell script hang together: which are conditional, and which run in a shell of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from sidecar.launch.words import Command, Redirection, Script, Unknown, Word

_DEPTH: Final = 40
"""Compound commands inside one another."""
_COMMANDS: Final = 4000
"""Commands of a script whose grammar is looked at."""
_SEPARATORS: Final = frozenset({";", "\n", "&"})
_CASE_ENDS: Final = frozenset({";;", ";&", ";;&"})


class Kind(StrEnum):
    """What a compound command does with the lists in it."""

    GROUP = "group"
    SUBSHELL = "subshell"
    IF = "if"
    """Lists in turn: a condition, what follows where it holds; at the end perhaps what follows where none does."""
    LOOP = "loop"
    """One list, or a condition and one; both may run any number of times."""
    CASE = "case"
    """At most one of the lists runs."""
    FUNCTION = "function"
    """The list runs where the name is called."""


class Simple(Struct, frozen=True):
    """A simple command, and its words behind those that are the grammar's own."""

    command: Command
    words: tuple[Word, ...]


class Compound(Struct, frozen=True):
    """A compound command. ``name`` is a loop's variable or a function's name.

    ``redirections`` are those of all of it. ``items`` are the words that a loop's variable goes through, None for
    those of the shell itself. ``until``: a loop with a condition goes on where that fails.
    """

    kind: Kind
    lists: tuple[List, ...]
    name: str = ""
    redirections: tuple[Redirection, ...] = ()
    items: tuple[Word, ...] | None = None
    until: bool = False


Node: TypeAlias = "Simple | Compound"


class Step(Struct, frozen=True):
    """A pipeline, and the operator in front of it: ``&&``, ``||`` or nothing. Several nodes run in subshells.

    ``negated``: it succeeds where its last command fails.
    """

    nodes: tuple[Node, ...]
    before: str = ""
    negated: bool = False


class Job(Struct, frozen=True):
    """Steps that hang on each other's success; in the background they run in a subshell."""

    steps: tuple[Step, ...]
    background: bool


List: TypeAlias = "tuple[Job, ...]"


class _NotUnderstoodError(Exception):
    """The script follows no grammar that is known here."""


def grammar(script: Script) -> List | None:
    """The jobs of a script; None where it is not complete or not understood. Never raises."""
    if not script.complete or len(script.pieces) > _COMMANDS:
        return None
    parser = _Parser(script.pieces)
    try:
        jobs, ended = parser.jobs(frozenset())
    except _NotUnderstoodError:
        return None
    return None if ended or not parser.at_end else jobs


def simple_commands(jobs: List) -> Iterator[Simple]:
    """All simple commands, in the order in which they stand."""
    for job in jobs:
        for step in job.steps:
            for node in step.nodes:
                yield from commands_of(node)


def commands_of(node: Node) -> Iterator[Simple]:
    """The simple commands of a node."""
    if isinstance(node, Simple):
        yield node
    else:
        for one in node.lists:
            yield from simple_commands(one)


class _Parser:
    """Walks over the commands; ``_skip`` counts the words of the next one that were taken."""

    def __init__(self, pieces: Sequence[Command]) -> None:
        self._pieces = pieces
        self._at = 0
        self._skip = 0
        self._depth = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._pieces)

    def jobs(self, until: frozenset[str]) -> tuple[List, str]:
        """Jobs up to a reserved word, which is left, or to a closing operator, which is taken and given."""
        jobs: list[Job] = []
        steps: list[Step] = []
        before = ""
        while not self.at_end:
            if not self._words() and self._piece.operator not in {"(", ")"}:
                operator = self._piece.operator
                if operator in _CASE_ENDS and not steps:
                    self._take()
                    return tuple(jobs), operator
                if operator not in {"\n", ""} and not (self._piece.written and operator in _SEPARATORS):
                    raise _NotUnderstoodError
                self._take()
                continue
            if not self._words() and self._piece.operator == ")":
                if steps:
                    raise _NotUnderstoodError
                self._take()
                return tuple(jobs), ")"
            if self._reserved() in until:
                if steps:
                    raise _NotUnderstoodError
                return tuple(jobs), ""
            step, operator = self._step(before)
            steps.append(step)
            if operator in {"&&", "||"}:
                before = operator
                continue
            jobs.append(Job(tuple(steps), background=operator == "&"))
            steps, before = [], ""
            if operator == ")" or operator in _CASE_ENDS:
                return tuple(jobs), operator
        if steps:
            raise _NotUnderstoodError
        return tuple(jobs), ""

    # -- one after the other

    @property
    def _piece(self) -> Command:
        if self.at_end:
            raise _NotUnderstoodError
        return self._pieces[self._at]

    def _words(self) -> tuple[Word, ...]:
        return self._piece.parsed[self._skip :]

    def _reserved(self) -> str:
        """The next word where it may be one of the grammar's: it is written out and no part of it is quoted."""
        words = self._words()
        return words[0].marked if words and not words[0].quoted else ""

    def _take(self) -> str:
        """Go behind a command; give its operator."""
        operator = self._piece.operator
        self._at += 1
        self._skip = 0
        return operator

    def _close(self, *words: str) -> str:
        """Take one of the closing words, and what stands behind it; give the operator."""
        if self._reserved() not in words:
            raise _NotUnderstoodError
        self._skip += 1
        if self._words():
            raise _NotUnderstoodError
        return self._take()

    def _open(self, *words: str) -> str:
        """Take one of the words that stand in front of a list."""
        word = self._reserved()
        if word not in words:
            raise _NotUnderstoodError
        self._skip += 1
        return word

    def _step(self, before: str) -> tuple[Step, str]:
        nodes: list[Node] = []
        negated = self._reserved() == "!"
        self._skip += negated
        while True:
            node, operator = self._node()
            nodes.append(node)
            if operator not in {"|", "|&"}:
                return Step(tuple(nodes), before, negated), operator
            while not self._words() and self._piece.operator == "\n":
                self._take()

    def _node(self) -> tuple[Node, str]:
        self._depth += 1
        if self._depth > _DEPTH:
            raise _NotUnderstoodError
        try:
            node, operator = self._one()
            if isinstance(node, Compound) and node.kind is not Kind.FUNCTION:
                node = replace(node, redirections=self._pieces[self._at - 1].redirections)
            return node, operator
        finally:
            self._depth -= 1

    def _one(self) -> tuple[Node, str]:
        word = self._reserved()
        if not self._words():
            if self._piece.operator != "(":
                raise _NotUnderstoodError
            return self._subshell()
        match word:
            case "time":
                self._skip += 1
                return self._node()
            case "{":
                self._skip += 1
                return self._until_closed(Kind.GROUP, "}")
            case "if":
                return self._if()
            case "while" | "until":
                self._skip += 1
                condition = self._list("do")
                self._open("do")
                loop, operator = self._until_closed(Kind.LOOP, "done", condition)
                return replace(loop, until=word == "until"), operator
            case "for" | "select":
                return self._for()
            case "case":
                return self._case()
            case "!" | "function" | "coproc" | "}" | "fi" | "done" | "esac" | "then" | "else" | "elif" | "do":
                raise _NotUnderstoodError
        if self._piece.operator == "(":
            return self._function()
        node = Simple(self._piece, self._words())
        return node, self._take()

    def _list(self, *until: str) -> List:
        jobs, ended = self.jobs(frozenset(until))
        if ended:
            raise _NotUnderstoodError
        return jobs

    def _until_closed(self, kind: Kind, closing: str, *before: List, name: str = "") -> tuple[Compound, str]:
        body = self._list(closing)
        return Compound(kind, (*before, body), name), self._close(closing)

    def _subshell(self) -> tuple[Node, str]:
        self._take()
        jobs, ended = self.jobs(frozenset())
        if ended != ")" or self._words():
            raise _NotUnderstoodError
        return Compound(Kind.SUBSHELL, (jobs,)), self._take()

    def _if(self) -> tuple[Node, str]:
        self._skip += 1
        lists = [self._list("then")]
        self._open("then")
        while True:
            lists.append(self._list("elif", "else", "fi"))
            if self._reserved() == "fi":
                return Compound(Kind.IF, tuple(lists)), self._close("fi")
            if self._open("elif", "else") == "elif":
                lists.append(self._list("then"))
                self._open("then")
                continue
            lists.append(self._list("fi"))
            return Compound(Kind.IF, tuple(lists)), self._close("fi")

    def _for(self) -> tuple[Node, str]:
        asks = self._reserved() == "select"
        self._skip += 1
        words = self._words()
        if not words or self._piece.operator not in {";", "\n"}:
            raise _NotUnderstoodError
        name = words[0].marked
        items = words[2:] if len(words) > 1 else None
        if asks:
            items = (Word((Unknown(splits=True),)),)
        self._take()
        while not self._words() and self._piece.operator == "\n":
            self._take()
        self._open("do")
        node, operator = self._until_closed(Kind.LOOP, "done", name=name)
        return replace(node, items=items), operator

    def _case(self) -> tuple[Node, str]:
        words = [word.marked for word in self._words()]
        if len(words) < 3 or words[2] != "in":
            raise _NotUnderstoodError
        self._skip += 3
        lists: list[List] = []
        while True:
            while not self._words() and self._piece.operator in {"\n", "("}:
                self._take()
            if self._reserved() == "esac":
                return Compound(Kind.CASE, tuple(lists)), self._close("esac")
            while self._piece.operator == "|":
                self._take()
            if self._take() != ")":
                raise _NotUnderstoodError
            jobs, ended = self.jobs(frozenset({"esac"}))
            if ended and ended not in _CASE_ENDS:
                raise _NotUnderstoodError
            lists.append(jobs)

    def _function(self) -> tuple[Node, str]:
        words = self._words()
        if len(words) != 1:
            raise _NotUnderstoodError
        self._take()
        if self._words() or self._take() != ")":
            raise _NotUnderstoodError
        while not self._words() and self._piece.operator == "\n":
            self._take()
        body, operator = self._node()
        if isinstance(body, Simple):
            raise _NotUnderstoodError
        job = Job((Step((body,)),), background=False)
        return Compound(Kind.FUNCTION, ((job,),), words[0].marked), operator
