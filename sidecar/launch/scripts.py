"""The walk through a shell script: what surely runs, or may run, in front of one of its commands."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from typing import Final

from sidecar.launch import shellbuiltins
from sidecar.launch import words as shellwords
from sidecar.launch.activation import activated
from sidecar.launch.assignments import NAME, all_parts, assignment, dissect, split
from sidecar.launch.forms import named
from sidecar.launch.grammar import Compound, Job, Kind, List, Node, Simple, Step, commands_of, grammar, simple_commands
from sidecar.launch.state import UNSEEN, End, Expansion, Loss, State, joined, names
from sidecar.launch.trace import Outside, Trace
from sidecar.launch.words import OPEN, SPLITS, Redirection, Unknown, Word

_CALLS_LIMIT: Final = 6
"""Functions and files that are read, inside one another."""
_HARDLY_FAILS: Final = names("echo printf sleep wait umask cat date")
"""Commands of which nobody needs to be told that a launch depends on them."""
_ALWAYS_THERE: Final = frozenset({"/dev/null", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/zero"})
"""Files that a redirection surely opens."""


def is_function(name: str, state: State) -> bool:
    """Whether a command is a function of the script, or one that its shell takes over from the environment."""
    handed = state.base is not None and f"BASH_FUNC_{name}%%" in state.base
    return name in state.functions or handed


class Walk:
    """Goes through the commands of one script, whose shell is ``bash`` or another one.

    ``_calls`` counts the functions and files around a command that are read, ``_tested`` the conditions around it, and
    the like whose failure ends nothing. ``_parted``: the last step may have run, and then it ended the shell.
    """

    def __init__(self, trace: Trace, *, bash: bool) -> None:
        self._trace = trace
        self._bash = bash
        self._calls = 0
        self._tested = 0
        self._parted = False

    # -- on the way to a command

    def enter(self, jobs: List, place: Simple, state: State) -> None:
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
            self._trace.miss(f"{_name_of(last.nodes[-1])} in front of {steps[index].before} {how}")

    def _enter_node(self, node: Node, place: Simple, state: State) -> None:
        if _may_not_open(node, state, self._trace.outside):
            self._trace.depend("a redirection")
        if isinstance(node, Simple):
            return
        number = next(n for n, jobs in enumerate(node.lists) if any(one is place for one in simple_commands(jobs)))
        if node.kind is Kind.IF:
            for index in range(0, number, 2):
                holds = self._condition(node.lists[index], state)
                if holds is None:
                    self._depend_on(node.lists[index])
                elif holds is not (index == number - 1):
                    self._trace.miss("a condition around it is known, and leads elsewhere")
        elif node.kind is Kind.LOOP:
            if number == len(node.lists) - 1:
                rounds = self._rounds(node, state)
                if rounds is False:
                    self._trace.miss("the loop around it has no round")
                elif rounds is None:
                    self._depend_on(node.lists[0] if number else ())
            self._loop(node, state, inside=True)
            if number:
                self._condition(node.lists[0], state)
        elif node.kind is Kind.CASE:
            self._trace.depend("case")
        elif node.kind is Kind.FUNCTION:
            state.lose(Loss("function", "A function of the script starts the server; what comes before is not seen."))
            state.positional, state.cwd, self._trace.moved = None, None, True
        self.enter(node.lists[number], place, state)

    def _depend(self, step: Step) -> None:
        """Note that the server is started only if this comes out as the script wants it."""
        node = step.nodes[-1]
        if not isinstance(node, Simple):
            self._trace.depend("a compound command")
            return
        name = _name_of(node)
        if name not in _HARDLY_FAILS:
            self._trace.depend(name)

    def _depend_on(self, condition: List) -> None:
        if condition:
            self._depend(condition[-1].steps[-1])
        else:
            self._trace.depend("for")

    # -- lists, conditions and loops

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
        if not _may_not_open(node, state, self._trace.outside):
            return self._run(node, state)
        if isinstance(node, Simple) and _name_of(node) in shellbuiltins.SPECIAL:
            self._trace.depend("a redirection")  # it ends some shells
        other = state.copy()
        self._run(node, other)
        if other.ended is not None:
            self._trace.depend("a redirection")
        state.merge(other)
        return None

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
                        self._trace.depend("case")
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
            if NAME.fullmatch(node.name):
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
        self._trace.steps_left -= 1
        if self._trace.steps_left < 0:
            state.lose(Loss("script", "The script around the launch is longer than is followed."))
            return None
        assigned, rest = split(node.words)
        if not rest:
            return self._assign(assigned, state)
        expansion = Expansion(state)
        words = [field for word in rest for field in expansion.fields(word)]
        for word in assigned:
            state.touch(assignment(word, expansion, set())[0])
        if state.ended is not None:
            return None
        while words and words[0] in {"command", "builtin"}:
            words, rest = words[1:], rest[1:]
        if not words:
            return None
        name = words[0]
        if OPEN in name:
            state.lose(shellbuiltins.UNRESOLVED)
            return None
        if assigned and (name in shellbuiltins.SPECIAL or name in state.functions):
            for word in assigned:
                state.assign(dissect(word)[0], UNSEEN)
                state.exports[dissect(word)[0]] = None  # as the shell's mode has it
        if is_function(name, state):
            return self._call(name, words, state)
        if shellbuiltins.ends(words, rest, state, called=self._calls > 0):
            return None
        lost = state.loss
        if name in {".", "source"}:
            self._source(words, state)
        else:
            shellbuiltins.apply(words, rest, expansion, state, self._trace, bash=self._bash, called=self._calls > 0)
        if state.loss != lost:
            return None
        return shellbuiltins.status(name, words[1:], state)

    def _assign(self, assigned: Sequence[Word], state: State) -> bool | None:
        expansion = Expansion(state)
        for word in assigned:
            state.assign(*assignment(word, expansion, set()))
        # The output of a command has the status of that.
        unknown = any(isinstance(part, Unknown) for word in assigned for part in all_parts(word.parts))
        return None if unknown else True

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

    def _source(self, words: list[str], state: State) -> None:
        loss = Loss("sourced", "A file that the shell reads first is not followed: it may set anything.")
        path = words[1] if len(words) == 2 else ""
        if OPEN in path or "/" not in path or (words[0] == "source" and not self._bash):
            state.lose(loss)
            return
        # Through a link the name of a parent may lead elsewhere.
        whole = None if ".." in path.split("/") else joined(state.cwd, path)
        text = None if whole is None else self._trace.outside.read(whole)
        parsed = None if text is None else shellwords.parse(text)
        jobs = None if parsed is None or (parsed.bash_only and not self._bash) else grammar(parsed)
        after = state.copy()
        if jobs is None or self._calls >= _CALLS_LIMIT or any(_leaves_in(jobs, {"return"})):
            after.lose(loss)
        else:
            self._calls += 1
            self._jobs(jobs, after)
            self._calls -= 1
        state.become(after if whole is None or text is None else activated(whole, text, state, after))


def _may_not_open(node: Node, state: State, outside: Outside) -> bool:
    """Whether a redirection of a command may fail, so that the command does not run."""
    return any(
        not _opens(one, state, outside)
        for one in (node.command.redirections if isinstance(node, Simple) else node.redirections)
    )


def _opens(one: Redirection, state: State, outside: Outside) -> bool:
    fields = Expansion(state.copy()).fields(one.target)
    target = fields[0] if len(fields) == 1 else OPEN
    if OPEN in target:
        return False
    if one.operator in {">&", "<&"} and (target.isdecimal() or target == "-"):
        return target in {"0", "1", "2", "-"}
    if target in _ALWAYS_THERE:
        return True
    path = joined(state.cwd, target)
    if path is None or one.operator in {"<", "<&"} or ".." in target.split("/"):
        return False
    return outside.is_folder(posixpath.dirname(path)) and not outside.is_folder(path)


def _name_of(node: Node) -> str:
    """What a sentence calls a command."""
    if not isinstance(node, Simple):
        return "a compound command"
    _, rest = split(node.words)
    if not rest:
        return "an assignment"
    return "[" if rest[0].marked == "[" else named(rest[0].marked)


def _contains(nodes: Iterable[Node], place: Simple) -> bool:
    return any(one is place for node in nodes for one in commands_of(node))


def _leaves(node: Node, names: set[str]) -> bool:
    return any(one.words and one.words[0].marked in names for one in commands_of(node))


def _leaves_in(jobs: List, names: set[str]) -> Iterable[bool]:
    return (bool(one.words) and one.words[0].marked in names for one in simple_commands(jobs))
