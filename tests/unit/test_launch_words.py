"""Splitting scripts as a POSIX shell does; each case was compared with what bash and dash make of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.launch.words import OPEN, SPLITS, parse

MANY, ONE = SPLITS, OPEN


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a b; c & d && e || f | g\nh", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"], ["h"]]),
        ("a $(b (c) 'd)' \")\" $(e)) f", [["a", MANY, "f"]]),
        ("a $((1+(2*3))) f", [["a", MANY, "f"]]),
        ("a `b \\` c` f", [["a", MANY, "f"]]),
        ("a <(b; c) f", [["a", ONE, "f"]]),
        ("a 2>&1 >log <in &>all b", [["a", "b"]]),
        ("a2>x b", [["a2", "b"]]),
        ("a b#c #d\ne", [["a", "b#c"], ["e"]]),
        ('a "$X" $X ${X:+b c} "$@" "${X[@]}"', [["a", ONE, MANY, MANY, MANY, MANY]]),
        ('a \'$X;&\' "b\\"c" d\\ e "f$(g "h")i"', [["a", "$X;&", 'b"c', "d e", f"f{ONE}i"]]),
        ("a ~ ~/b ~me/c x=~/d b~", [["a", ONE, f"{ONE}/b", f"{ONE}/c", f"x={ONE}/d", "b~"]]),
        ("a b{1,2} c{1..3} {d} *.e", [["a", f"b{MANY}", f"c{MANY}", "{d}", f"{MANY}.e"]]),
        ("a $'b\\n' $\"c\"", [["a", "b\n", "c"]]),
        ("a \\\n b", [["a", "b"]]),
        ("cat >c <<'E' 3<<-F\nx & y\nE\n\tz ;\n\tF\na", [["cat"], ["a"]]),
        ("X=(1 2) a", [[f"X={ONE}", "a"]]),
        ("( a; b )", [["a"], ["b"]]),
        ("", []),
    ],
)
def test_words_are_a_shells(script: str, expected: list[list[str]]) -> None:
    """Substitutions, redirections and comments end no command early, and what is open is marked."""
    parsed = parse(script)
    assert [list(command.words) for command in parsed.commands] == expected
    assert parsed.complete


@pytest.mark.parametrize("script", ["a 'b", 'a "b', "a $(b", "a ${b", "a `b", "cat <<E\nb", "a >", "((1)) a"])
def test_what_has_no_end_is_incomplete(script: str) -> None:
    """Where a shell would ask for more, or end with an error, the words are not known to be all."""
    assert not parse(script).complete


def test_the_files_that_are_written_are_told() -> None:
    """A configuration file may be made by the script that names it."""
    (command,) = parse("cat > a.yaml 2>>b < c").commands
    assert command.written == ("a.yaml", "b")


@given(st.text(alphabet="ab '\"\\$`(){}<>&|;#~*=\n\t,.[]@!-2", max_size=60))
def test_no_script_is_an_error(script: str) -> None:
    """Whatever a script holds, splitting it ends, with words that are not blank space."""
    assert all(command.words or command.written for command in parse(script).commands)


@pytest.mark.parametrize(
    "piece", ["$(", "${", "{,", "`\\`", "<(", "'", '"$', "a=~", "((", "<<E\n", '"$(', "${a:-", "\\\n", ">"]
)
def test_time_grows_with_the_length_only(piece: str) -> None:
    """A hostile script of eight times the length takes no more than about eight times as long."""

    def taken(count: int) -> float:
        script = piece * count
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            parse(script)
            best = min(best, time.process_time() - began)
        return best

    assert taken(16000) < 30 * max(taken(2000), 1e-3)
