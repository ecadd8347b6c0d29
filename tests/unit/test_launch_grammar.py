"""How the commands of a script hang together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.launch.grammar import List, Node, Simple, commands_of, grammar, simple_commands
from sidecar.launch.words import parse


def shown(jobs: List) -> str:
    """Jobs as text: compound commands by their kind, with their lists in brackets."""

    def of_node(node: Node) -> str:
        if isinstance(node, Simple):
            return " ".join(word.marked for word in node.words)
        return f"{node.kind}{node.name and ':' + node.name}[{' / '.join(map(shown, node.lists))}]"

    return "; ".join(
        " ".join(
            f"{step.before} {'! ' * step.negated}{' | '.join(map(of_node, step.nodes))}".strip() for step in job.steps
        )
        + " &" * job.background
        for job in jobs
    )


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("", ""),
        ("a b; c & d && e || f | g\nh", "a b; c &; d && e || f | g; h"),
        ("a &&\n\n b |\n c", "a && b | c"),
        ("! a && ! b | c", "! a && ! b | c"),
        ("time -p a", "-p a"),
        ("(a; b) && c", "subshell[a; b] && c"),
        ("( a ) > log 2>&1; b", "subshell[a]; b"),
        ("{ a; b; } || { c; exit 1; }", "group[a; b] || group[c; exit 1]"),
        ("if a; then b; fi", "if[a / b]"),
        ("if a\nthen b\nelif c; then d; else e; fi && f", "if[a / b / c / d / e] && f"),
        ("if (a); then (b); fi; c", "if[subshell[a] / subshell[b]]; c"),
        ("while a; do b; done > log; c", "loop[a / b]; c"),
        ("until a; b\ndo c; done", "loop[a; b / c]"),
        ("for x in a b; do c; done; d", "loop:x[c]; d"),
        ("for x\ndo c\ndone", "loop:x[c]"),
        ("case x in a|b) c;; (d) e;; *) f; esac; g", "case[c / e / f]; g"),
        ("case x in\n  a)\n    b\n    ;;\nesac", "case[b]"),
        ("case x in esac; b", "case[]; b"),
        ("f() { a; }; f", "function:f[group[a]]; f"),
        ("f ()\n(\n a\n)\nb", "function:f[subshell[a]]; b"),
        ("> log; a", "a"),
        ("'if' a; echo fi then", "if a; echo fi then"),
        ("a <<E\nif x\nE\nb", "a; b"),
    ],
)
def test_commands_hang_together_as_in_a_shell(script: str, expected: str) -> None:
    """Lists, conditions, subshells and functions are what a shell takes them for."""
    jobs = grammar(parse(script))
    assert jobs is not None
    assert shown(jobs) == expected


@pytest.mark.parametrize(
    "script",
    ["if a; b", "fi", "a; ) b", "( a", "a &&", "{ a", "case x", "case x in a) b", "for x in a; b; done",
     "f() a", "a | | b",
     "while a; do b", "function f { a; }", "if a; then b; else c; else d; fi", "(" * 100, "( a ) b", "a 'b"],
)  # fmt: skip
def test_what_no_grammar_fits_is_not_understood(script: str) -> None:
    """Where a shell would ask for more, or end with an error, nothing is told of what runs."""
    assert grammar(parse(script)) is None


WORDS = "if then else elif fi while do done for x in case esac ;; ( ) { } && || | & ; ! a f() \n"
PIECES = st.sampled_from(WORDS.split(" "))


@given(st.lists(PIECES, max_size=40).map(" ".join))
def test_no_command_is_lost(script: str) -> None:
    """Whatever the words, either the script is not understood, or its commands stand in it in their order."""
    parsed = parse(script)
    jobs = grammar(parsed)
    if jobs is not None:
        places = [
            next(n for n, one in enumerate(parsed.commands) if one is node.command) for node in simple_commands(jobs)
        ]
        assert places == sorted(places)
        assert all(list(commands_of(node)) == [node] for node in simple_commands(jobs))
