"""What a launch sets for its server, form by form: known to the letter, or not seen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.launch.args import LaunchArguments, parse_launch
from sidecar.launch.forms import LaunchForm
from sidecar.launch.shell import Outside

LAUNCH = "python3 -m sglang.launch_server --model-path m"
WORDS = LAUNCH.split()
GIVEN: Mapping[str, str] = MappingProxyType({"PATH": "/bin", "HOME": "/home/u", "A": "old", "EMPTY": ""})
FOLDERS = frozenset({"/srv/run", "/srv/run/sub", "/x", "/home/u", "/v", "/v/bin"})
ACTIVATE = """
deactivate () {
    if [ -n "${_OLD_VIRTUAL_PATH:-}" ] ; then
        PATH="${_OLD_VIRTUAL_PATH:-}"
        export PATH
        unset _OLD_VIRTUAL_PATH
    fi
    unset VIRTUAL_ENV
}
deactivate nondestructive
case "$(uname)" in
    CYGWIN*)
        VIRTUAL_ENV=$(cygpath /v)
        export VIRTUAL_ENV
        ;;
    *)
        export VIRTUAL_ENV=/v
        ;;
esac
_OLD_VIRTUAL_PATH="$PATH"
PATH="$VIRTUAL_ENV/"bin":$PATH"
export PATH
if [ -n "${PYTHONHOME:-}" ] ; then
    _OLD_VIRTUAL_PYTHONHOME="${PYTHONHOME:-}"
    unset PYTHONHOME
fi
"""
FILES: Mapping[str, str] = MappingProxyType(
    {
        "/v/bin/activate": ACTIVATE,
        "/x/bin/activate": ACTIVATE,
        "/srv/run/own/bin/activate": "VIRTUAL_ENV='/srv/run/own'\nexport VIRTUAL_ENV\nPATH=\"$VIRTUAL_ENV/bin:$PATH\"\n"
        "export PATH\nexport A=mine\n",
        "/srv/run/odd/bin/activate": "VIRTUAL_ENV=/srv/run/odd\nPATH=$VIRTUAL_ENV/bin:$PATH\nPATH=/more:$PATH\n",
        "/conda/bin/activate": 'eval "$(conda shell.posix activate)"\n',
        "/srv/run/tool/bin/activate": "VIRTUAL_ENV='/srv/run/tool'\nif $(command -v cygpath); then\n"
        '    VIRTUAL_ENV=$(cygpath -u /x)\nfi\nexport VIRTUAL_ENV\n_OLD_VIRTUAL_PATH="$PATH"\n'
        'PATH="$VIRTUAL_ENV/bin:$PATH"\nexport PATH\nalias pydoc >/dev/null && unalias pydoc\n',
        "/srv/run/worse/bin/activate": "VIRTUAL_ENV='/srv/run/worse'\nexport VIRTUAL_ENV\n"
        'PATH="$VIRTUAL_ENV/bin:$PATH"\nexport PATH\nalias a=b\nif x; then export PYTHONPATH=/y; fi\n',
        "/srv/run/env.sh": "export A=filed B=2\n",
        "/srv/run/maybe.sh": '[ -n "$A" ] || return\nexport A=filed\n',
        "/srv/run/start.sh": f'#!/bin/sh\nset -e\nexport A=script\ncd /x\nexec {LAUNCH} "$@"\n',
        "/srv/run/other.sh": "#!/bin/sh\nexport A=script\nexec something else\n",
        "/srv/run/binary": "\x7fELF",
    }
)


def read(argv: list[str]) -> LaunchArguments:
    """A launch in /srv/run, with the variables, folders and files above."""
    return parse_launch(
        argv, None, Outside(environ=GIVEN, cwd="/srv/run", is_folder=FOLDERS.__contains__, read=FILES.get)
    )


def changes(launch: LaunchArguments) -> dict[str, str | None]:
    """What is otherwise than it was given: a value, or None for what is taken away."""
    gone: dict[str, str | None] = {name: None for name in GIVEN if name not in {*launch.environ, *launch.unseen}}
    return gone | {name: value for name, value in launch.environ.items() if GIVEN.get(name) != value}


NOT_REACHED = [
    # what a shell runs; what is said of it
    (f"exit 1; {LAUNCH}", "`exit`"),
    (f"export A=1; exit 0; {LAUNCH}", "`exit`"),
    (f"false || exit 1; {LAUNCH}", "`exit`"),
    (f"if true; then exit 1; fi; {LAUNCH}", "`exit`"),
    (f"f() {{ exit 1; }}; f; {LAUNCH}", "`exit`"),
    (f"exit; env -i {LAUNCH}", "`exit`"),
    (f"set -e; false; exec {LAUNCH}", "false fails"),
    (f"set -e; (false); exec {LAUNCH}", "set -e"),
    (f"set -e; f() {{ false; }}; f; {LAUNCH}", "false fails"),
    (f': "${{MODEL:?must be set}}"; exec {LAUNCH}', "MODEL must be set"),
    (f'export A="$(x)${{MODEL:?}}"; {LAUNCH}', "MODEL must be set"),
    (f"A=x${{EMPTY:?}} {LAUNCH}", "EMPTY must be set"),
    (f"set -u; exec {LAUNCH} --revision $NOPE", "NOPE is not set"),
    (f"if x; then set -u; fi; {LAUNCH} $NOPE", "NOPE is not set"),
    (f"set -u; A=$1; {LAUNCH}", "1 is not set"),
    (f"true || {LAUNCH}", "true in front of ||"),
    (f"x && false && {LAUNCH}", "false in front of &&"),
    (f"false && {LAUNCH}", "false in front of &&"),
    (f"if false; then {LAUNCH}; fi", "condition"),
    (f"if true; then :; elif x; then {LAUNCH}; fi", "condition"),
    (f"while false; do {LAUNCH}; done", "no round"),
    (f"for i in; do {LAUNCH}; done", "no round"),
    (f"while true; do :; done; {LAUNCH}", "no end"),
    (f"exec true; {LAUNCH}", "`exec`"),
    (f"while true; do exit; {LAUNCH}; done", "`exit`"),
    (f"exec $(x); {LAUNCH}", "`exec`"),
    (f"kill $$; {LAUNCH}", "`kill`"),
    (f"(kill $$); {LAUNCH}", "`kill`"),
    (f"set -n; {LAUNCH}", "-n"),
    (f"readonly X=1; X=2; {LAUNCH}", "X is readonly"),
    (f"readonly X=1; export X=2; {LAUNCH}", "X is readonly"),
    (f"readonly X; unset X; {LAUNCH}", "X is readonly"),
    (f"readonly X=1; X=2 {LAUNCH}", "X is readonly"),
    (f"readonly X=1; for X in 1; do :; done; {LAUNCH}", "X is readonly"),
    (f"UID=1; {LAUNCH}", "UID is readonly"),
    (f"sh -c 'exit; {LAUNCH}'", "`exit`"),
]


@pytest.mark.parametrize(("script", "why"), NOT_REACHED)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_launch_that_is_not_reached_leaves_nothing(shell: str, script: str, why: str) -> None:
    """Where the script ends before its launch, or passes it by, nothing is assumed of the server, and that is said."""
    launch = read([shell, "-c", script])
    assert launch.loss is not None
    assert launch.loss.token == "not-reached"
    assert launch.loss.sentence.startswith("It is not certain that the server is reached: ")
    assert why in launch.loss.sentence
    assert (dict(launch.environ), launch.cwd, launch.form) == ({}, None, LaunchForm.MODULE)


@pytest.mark.parametrize(
    ("script", "depends"),
    [
        (f"test -f /nope || exit 3; exec {LAUNCH}", ("test",)),
        (f"[ -d /x ] || {{ echo no; exit 1; }}; {LAUNCH}", ("[",)),
        (f"if [ -z $A ]; then exit 1; fi; {LAUNCH}", ("[",)),
        (f"if x; then :; else exit 1; fi; {LAUNCH}", ("x",)),
        (f"case $A in old) exit 1;; esac; {LAUNCH}", ("case",)),
        (f"x && {LAUNCH}", ("x",)),
        (f"export >&- && {LAUNCH}", ("export",)),
        (f"x || {LAUNCH}", ("x",)),
        (f"set -e; mkdir -p y; echo go; A=$(x); {LAUNCH}", ("mkdir", "an assignment")),
        (f"for i in $(x); do {LAUNCH}; done", ("for",)),
        (f"until x; do sleep 1; done; {LAUNCH}", ()),
        (f"if [ $A ]; then exec y; fi; {LAUNCH}", ("[",)),
        (f"x; {LAUNCH}", ()),
        (f"while true; do {LAUNCH}; sleep 1; done", ()),
        (f"for i in 1; do {LAUNCH}; exit; done", ()),
        (f"exec >/x/log 2>&1; {LAUNCH}", ()),
        (f"exec >/nope/log 2>&1; {LAUNCH}", ("a redirection",)),
        (f"{LAUNCH} >/nope/log 2>&1", ("a redirection",)),
        (f"{{ {LAUNCH}; }} >/nope/log", ("a redirection",)),
        (f"exit 1 >/nope/log; {LAUNCH}", ("a redirection",)),
        (f"x >/nope/log; {LAUNCH}", ()),
        (f"set -eu; export B=$A; cd /x; : ${{B:?}}; exec {LAUNCH}", ()),
        (f"set -e; if false; then :; fi; false || true; ! true; {LAUNCH}", ()),
        (f"(exit 1); exit 1 & {LAUNCH}", ()),
    ],
)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_the_launch_depends_on_is_named(shell: str, script: str, depends: tuple[str, ...]) -> None:
    """The usual guards leave a launch judged; commands that have to come out right for it are named."""
    launch = read([shell, "-c", script])
    assert (launch.depends, launch.loss) == (depends, None)


def test_an_option_of_export_is_bashs_own() -> None:
    """With `export -n` bash takes a variable out of the environment; another shell ends there."""
    launch = read(["bash", "-c", f"C='-n A'; export $C; {LAUNCH}"])
    assert (changes(launch), launch.loss) == ({"A": None}, None)
    elsewhere = read(["sh", "-c", f"export -n A; {LAUNCH}"])
    assert elsewhere.loss is not None
    assert elsewhere.loss.token == "not-reached"


def test_options_of_a_shell_end_it_too() -> None:
    """With -e, -u or -n in its own words, or in the first line of its file."""
    for argv in (["sh", "-ec", f"false; {LAUNCH}"], ["bash", "-euo", "pipefail", "-c", f"A=$NO; {LAUNCH}"],
                 ["bash", "-n", "-c", LAUNCH], ["bash", "-o", "noexec", "-c", LAUNCH], ["bash", "-D", "-c", LAUNCH],
                 ["bash", "--version", "-c", LAUNCH]):  # fmt: skip
        launch = read(argv)
        assert launch.loss is not None
        assert launch.loss.token == "not-reached"
    assert read(["bash", "-euo", "pipefail", "-c", LAUNCH]).loss is None


SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}

KNOWN = [
    # what a shell runs; what is otherwise in the server's environment
    (LAUNCH, {}),
    (f"A=1 {LAUNCH}", {"A": "1"}),
    (f"exec env A=1 {LAUNCH}", {"A": "1"}),
    (f"export A=1; {LAUNCH}", {"A": "1"}),
    (f"export B=1; {LAUNCH}", {"B": "1"}),
    (f"B=1; {LAUNCH}", {}),
    (f"A=1; {LAUNCH}", {"A": "1"}),
    (f"B=1; export B; {LAUNCH}", {"B": "1"}),
    (f"set -a; B=1; {LAUNCH}", {"B": "1"}),
    (f"set -o allexport; B=1; set +a; C=1; {LAUNCH}", {"B": "1"}),
    (f"unset A; {LAUNCH}", {"A": None}),
    (f"unset A; A=2 {LAUNCH}", {"A": "2"}),
    (f"export A=$A:x; {LAUNCH}", {"A": "old:x"}),
    (f"export B=/x:${{B:-}}; {LAUNCH}", {"B": "/x:"}),
    (f'export B="${{A:-y}}${{NONE:-z}}"; {LAUNCH}', {"B": "oldz"}),
    (f'export B="${{A:+alt}}${{NONE:+no}}${{EMPTY:+no}}"; {LAUNCH}', {"B": "alt"}),
    (f'export B="${{EMPTY-d}}${{EMPTY:-e}}"; {LAUNCH}', {"B": "e"}),
    (f': "${{B:=late}}"; export B; {LAUNCH}', {"B": "late"}),
    (f"export B='$A'\"a\"; {LAUNCH}", {}),
    (f"B=$A; export C=${{B}}${{B}}; {LAUNCH}", {"C": "oldold"}),
    (f"export B=1 && export C=$B && {LAUNCH}", {"B": "1", "C": "1"}),
    (f"false && export A=1; {LAUNCH}", {}),
    (f"false || export A=1; {LAUNCH}", {"A": "1"}),
    (f"! true || export A=1; {LAUNCH}", {"A": "1"}),
    (f"export A=1 || export A=2; {LAUNCH}", {"A": "1"}),
    (f"cd /x && export A=1\n{LAUNCH}", {"A": "1"}),
    (f"export A=$PWD; {LAUNCH}", {"A": "/srv/run"}),
    (f"export A=1 B=$A; {LAUNCH}", {"A": "1", "B": "old"}),
    (f"A=1 B=$A; export B; {LAUNCH}", {"A": "1", "B": "1"}),
    (f"cd sub; sh -c 'export A=$PWD; {LAUNCH}'", {"A": "/srv/run/sub"}),
    (f"(export A=1); {LAUNCH}", {}),
    (f"export A=1 | cat; {LAUNCH}", {}),
    (f"export A=1 & {LAUNCH}", {}),
    (f"{{ export A=1; }}; {LAUNCH}", {"A": "1"}),
    (f"if true; then A=1 {LAUNCH}; fi", {"A": "1"}),
    (f"if true; then export A=1; {LAUNCH}; fi", {"A": "1"}),
    (f"if x; then export A=1; else {LAUNCH}; fi", {}),
    (f"if export A=1; then :; fi; {LAUNCH}", {"A": "1"}),
    (f"f() {{ export A=1; }}; {LAUNCH}", {}),
    (f"f() {{ export A=$1; }}; f b; {LAUNCH}", {"A": "b"}),
    (f"export A=1; {LAUNCH}; export A=2", {"A": "1"}),
    (f"export A=old; x || export A=old; {LAUNCH}", {}),
    (f"[ -d /x ] || exit 1; {LAUNCH}", {}),
    (f"for i in 1 2; do echo; done; {LAUNCH} | tee log", {}),
    (f"ulimit -n 65536; sleep 1; {LAUNCH} > log 2>&1 &", {}),
    (f". /v/bin/activate; {LAUNCH}", {"VIRTUAL_ENV": "/v", "PATH": "/v/bin:/bin"}),
    (f". own/bin/activate && {LAUNCH}", {"VIRTUAL_ENV": "/srv/run/own", "PATH": "/srv/run/own/bin:/bin", "A": "mine"}),
    (f". ./tool/bin/activate && {LAUNCH}", {"VIRTUAL_ENV": "/srv/run/tool", "PATH": "/srv/run/tool/bin:/bin"}),
    (f". ./env.sh; {LAUNCH}", {"A": "filed", "B": "2"}),
    (f"export PATH=/v/bin:$PATH; {LAUNCH}", {"PATH": "/v/bin:/bin"}),
    (f"env -i A=1 {LAUNCH}", {"PATH": None, "HOME": None, "EMPTY": None, "A": "1"}),
    (f"env - {LAUNCH}", {"PATH": None, "HOME": None, "EMPTY": None, "A": None}),
    (f"env -u A --unset=EMPTY {LAUNCH}", {"A": None, "EMPTY": None}),
    (f"env -uA B=1 {LAUNCH}", {"A": None, "B": "1"}),
    (f"env -S 'A=1 B=2' {LAUNCH}", {"A": "1", "B": "2"}),
    (f"timeout -k 5 60 nice -n 5 numactl -m 0 env A=1 {LAUNCH}", {"A": "1"}),
    (f"sh -c 'A=1; {LAUNCH}'", {"A": "1"}),
    (f"B=1 sh -c 'export A=$B; {LAUNCH}'", {"A": "1", "B": "1"}),
    (f"B=1; sh -c 'export A=$B; {LAUNCH}'", {"A": ""}),
    (f"sh -c 'export A=$1; shift; {LAUNCH}' - a b", {"A": "a"}),
    (f"sh -c 'export A=1; exec \"$@\"' - {LAUNCH}", {"A": "1"}),
    ("exec ./start.sh --tp 2", {"A": "script"}),
    ("sh start.sh --tp 2", {"A": "script"}),
    ('PY=python3; "$PY" -m sglang.launch_server --model-path m', {}),
    (f"export A=1\\\n2\n# export A=3\n{LAUNCH}", {"A": "12"}),
    (f"export A=1 >/dev/null 2>&1 3<&- 4>/x/log; {LAUNCH}", {"A": "1"}),
    (f"{{ export A=1; }} 2>>log; {LAUNCH} >/nope/x", {"A": "1"}),
    (f"true >/dev/null && export A=1; {LAUNCH}", {"A": "1"}),
    (f"trap 'rm -f x' EXIT INT SIGTERM; trap - CHLD; trap '' PIPE; {LAUNCH}", {}),
    (f"B=C=1; export $B; {LAUNCH}", {"C": "1"}),
    (f"B='C=1 D=2 A'; export $B; {LAUNCH}", {"C": "1", "D": "2"}),
    (f"B='C=1 2'; export \"$B\"; {LAUNCH}", {"C": "1 2"}),
    (f'B=C; export "${{B}}=1"; {LAUNCH}', {"C": "1"}),
    (f"export ${{B:-C=1}}; {LAUNCH}", {"C": "1"}),
    (f"sh -c 'export $1; {LAUNCH}' - C=1", {"C": "1"}),
    (f"sh -c 'export \"$@\"; {LAUNCH}' - C=1 A=2", {"C": "1", "A": "2"}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), KNOWN)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_surely_runs_counts(shell: str, script: str, expected: dict[str, str | None]) -> None:
    """All that the launch is known to set reaches the server's environment, and no more than that."""
    launch = read([shell, "-c", script])
    assert (changes(launch), launch.loss) == (expected, None)
    shown = {"VIRTUAL_ENV_PROMPT", "PS1", "PKG_CONFIG_PATH", "TCL_LIBRARY", "TK_LIBRARY"}
    assert launch.unseen <= SHELLS_OWN | shown or "'$A'" in script
    assert launch.form is LaunchForm.MODULE


UNSEEN = [
    # what a shell runs; which variable it leaves open
    (f"export A=$(x); {LAUNCH}", "A"),
    (f"export A=`x`; {LAUNCH}", "A"),
    (f"export A=$((1+1)); {LAUNCH}", "A"),
    (f"export A=${{A%d}}; {LAUNCH}", "A"),
    (f"export A=${{#A}}; {LAUNCH}", "A"),
    (f"export A=$RANDOM$$; {LAUNCH}", "A"),
    (f"export A=x:~/b; {LAUNCH}", "A"),
    (f"B=$(x); export A=a$B; {LAUNCH}", "A"),
    (f"A=$(x) {LAUNCH}", "A"),
    (f"x && export A=1; {LAUNCH}", "A"),
    (f"x && y && export A=1; {LAUNCH}", "A"),
    (f"! x || export A=1; {LAUNCH}", "A"),
    (f"cd /gone && export A=1; {LAUNCH}", "A"),
    (f"B=$(x) && export A=1; {LAUNCH}", "A"),
    (f"x || export A=1; {LAUNCH}", "A"),
    (f"if x; then export A=1; fi; {LAUNCH}", "A"),
    (f"if x; then export A=1; else export A=2; fi; {LAUNCH}", "A"),
    (f"case $A in x) export A=1;; esac; {LAUNCH}", "A"),
    (f"while x; do export A=1; done; {LAUNCH}", "A"),
    (f"for A in 1 2; do :; done; {LAUNCH}", "A"),
    (f"for i in 1 2; do {LAUNCH}; export A=1; done", "A"),
    (f"x || {{ export A=1; }}; {LAUNCH}", "A"),
    (f"if x; then unset A; fi; {LAUNCH}", "A"),
    (f"if x; then set -a; fi; B=1; {LAUNCH}", "B"),
    (f"read A; {LAUNCH}", "A"),
    (f"f() {{ export A=1; }}; x && f; {LAUNCH}", "A"),
    (f"x && . ./env.sh; {LAUNCH}", "A"),
    (f"x | export A=1; {LAUNCH}", "A"),
    (f"if x; then export B=1; fi; export A=$B; {LAUNCH}", "A"),
    (f'export A="$HOSTNAME"; {LAUNCH}', "A"),
    (f"PWD=/y; A=$PWD {LAUNCH}", "A"),
    (f"A=1 export B; {LAUNCH}", "A"),
    (f"C=1; C=2 :; export C; {LAUNCH}", "C"),
    (f"set -o posix; C=1 :; {LAUNCH}", "C"),
    (f"POSIXLY_CORRECT=1 bash -c 'C=1 export B; {LAUNCH}'", "C"),
    (f"bash --posix -c 'C=1 :; {LAUNCH}'", "C"),
    (f"B=1 A=$B {LAUNCH}", "A"),
    (f"IFS=l sh -c 'B=$A; A=$IFS {LAUNCH}'", "A"),
    (f"PWD=/y sh -c 'A=$PWD {LAUNCH}'", "A"),
    (f"unset PWD; export A=$PWD; {LAUNCH}", "A"),
    (f"export A=1 >/nope/x; {LAUNCH}", "A"),
    (f"export A=1 </nope/x; {LAUNCH}", "A"),
    (f"export A=1 >/x; {LAUNCH}", "A"),
    (f"export A=1 >$(x); {LAUNCH}", "A"),
    (f"export A=1 3<&9; {LAUNCH}", "A"),
    (f". ./env.sh >/nope/x; {LAUNCH}", "A"),
    (f"{{ export A=1; }} >/nope/x; {LAUNCH}", "A"),
    (f"if true; then export A=1; fi >/nope/x; {LAUNCH}", "A"),
    (f"for i in 1; do export A=1; done >/nope/x; {LAUNCH}", "A"),
    (f"f() {{ export A=1; }}; f >/nope/x; {LAUNCH}", "A"),
    (f"f() {{ export A=1; }} >/nope/x; f; {LAUNCH}", "A"),
    (f"true >/nope/x && export A=1; {LAUNCH}", "A"),
]


@pytest.mark.parametrize(("script", "name"), UNSEEN)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_what_may_run_is_not_seen(shell: str, script: str, name: str) -> None:
    """A value that only a running shell has, or that a condition decides, is not known."""
    launch = read([shell, "-c", script])
    assert name in launch.unseen
    assert name not in launch.environ
    assert (launch.loss, launch.form) == (None, LaunchForm.MODULE)
    assert launch.environ["HOME"] == GIVEN["HOME"]


BASH = [
    (f"declare -x A=1; {LAUNCH}", "1"),
    (f"source ./env.sh; {LAUNCH}", "filed"),
    (f"B=A=1; declare -x $B; {LAUNCH}", "1"),
    (f"B=A=1; set -a; typeset $B; {LAUNCH}", "1"),
    (f"export A=$'x'; {LAUNCH}", "x"),
    (f"source /v/bin/activate && A=1 {LAUNCH}", "1"),
    (f"export -n A; {LAUNCH}", None),
    (f"C='-n A'; export $C; {LAUNCH}", None),
    (f"local A=1; {LAUNCH}", None),
    (f"A+=x; {LAUNCH}", None),
    (f"export A+=x; {LAUNCH}", None),
]


@pytest.mark.parametrize(("script", "value"), BASH)
def test_what_is_bashs_own(script: str, value: str | None) -> None:
    """Where another shell may stand behind ``sh``, what only some shells understand is not seen."""
    assert read(["bash", "-c", script]).environ.get("A") == value
    assert "A" not in read(["sh", "-c", script]).environ or "activate" in script


LOST = [
    (["sh", "-c", f'eval "$(conda shell.bash hook)"; {LAUNCH}'], "sourced"),
    (["sh", "-c", f". /nowhere/env.sh; {LAUNCH}"], "sourced"),
    (["sh", "-c", f". ./maybe.sh; {LAUNCH}"], "sourced"),
    (["sh", "-c", f". ./odd/bin/activate; {LAUNCH}"], None),
    (["sh", "-c", f". ./worse/bin/activate; {LAUNCH}"], "sourced"),
    (["sh", "-c", f". /x/bin/activate; {LAUNCH}"], None),
    (["bash", "-c", f"source /conda/bin/activate; {LAUNCH}"], "sourced"),
    (["sh", "-c", f"conda activate x; {LAUNCH}"], "sourced"),
    (["sh", "-c", f"$SETUP; {LAUNCH}"], None),
    (["sh", "-c", f"$(x); {LAUNCH}"], "unresolved"),
    (["sh", "-c", f"export $(cat .env); {LAUNCH}"], "unresolved"),
    (["sh", "-c", f'export "$(x)"; {LAUNCH}'], "unresolved"),
    (["sh", "-c", f"B='C=*'; export $B; {LAUNCH}"], "unresolved"),
    (["sh", "-c", f"B=$(x); export ${{B}}=1; {LAUNCH}"], "unresolved"),
    (["sh", "-c", f"readonly $(x); export A; {LAUNCH}"], "unresolved"),
    (["bash", "-c", f"declare -x $(x); {LAUNCH}"], "unresolved"),
    (["bash", "-c", f"set -a; declare $(x); {LAUNCH}"], "unresolved"),
    (["bash", "-c", f"typeset -x C+=$(x)$B 1=2; {LAUNCH}"], "unresolved"),
    (["sh", "-c", f"env $(cat .env) {LAUNCH}"], "wrapper"),
    (["sh", "-c", f"unset $(x); {LAUNCH}"], "unresolved"),
    (["sh", "-c", f"main() {{ {LAUNCH}; }}; main"], "function"),
    (["sh", "-c", f'run() {{ X=1 "$@"; }}; run {LAUNCH}'], "wrapper"),
    (["sh", "-c", f"f() {{ return; }}; f; {LAUNCH}"], "function"),
    (["sh", "-c", f"((A=1)); {LAUNCH}"], "script"),
    (["sh", "-c", f"if x; {LAUNCH}"], "script"),
    (["sh", "-c", f"for i in 1; do A=$i; break; done; {LAUNCH}"], "script"),
    (["bash", "-c", f"exec -a /v/bin/python3 {LAUNCH}"], "argv0"),
    (["bash", "-c", f"exec -la n {LAUNCH}"], "argv0"),
    (["bash", "-c", f"exec -l {LAUNCH}"], "argv0"),
    (["env", "-a", "n", *WORDS], "argv0"),
    (["env", "--argv0=n", *WORDS], "argv0"),
    (["env", "__PYVENV_LAUNCHER__=/v/bin/python3", *WORDS], "argv0"),
    (["sh", "-c", f"__PYVENV_LAUNCHER__=$(x) {LAUNCH}"], "argv0"),
    (["bash", "-c", f"declare -n R=A; R=1; {LAUNCH}"], "declared"),
    (["bash", "-c", f"declare -i A; A=1+1; {LAUNCH}"], "declared"),
    (["bash", "-c", f"typeset -ux A; A=low; {LAUNCH}"], "declared"),
    (["bash", "-c", f"declare -a A; A=1; export A; {LAUNCH}"], "declared"),
    (["bash", "-c", f"unset -n A; {LAUNCH}"], "unresolved"),
    (["bash", "-c", f"trap 'export A=1' DEBUG; {LAUNCH}"], "trap"),
    (["bash", "-c", f"trap 'export A=1' ERR; false; {LAUNCH}"], "trap"),
    (["sh", "-c", f"trap 'export A=1' USR1; {LAUNCH}"], "trap"),
    (["sh", "-c", f"set -k; {LAUNCH} A=1"], "option"),
    (["sh", "-c", f"set -C; {LAUNCH}"], "option"),
    (["env", "SHELLOPTS=errexit", "bash", "-c", f"false; {LAUNCH}"], "option"),
    (["bash", "-lc", LAUNCH], "login-shell"),
    (["bash", "-i", "-c", LAUNCH], "login-shell"),
    (["zsh", "-c", LAUNCH], "sourced"),
    (["sudo", *WORDS], "another-user"),
    (["sudo", "-u", "me", "-n", *WORDS], "another-user"),
    (["sudo", "-i", *WORDS], "login-shell"),
    (["sudo", "--preserve-env=A", *WORDS], "another-user"),
    (["sh", "-c", f"sudo {LAUNCH}"], "another-user"),
    (["doas", *WORDS], "another-user"),
    (["su", "me", "-c", LAUNCH], "another-user"),
    (["su", "-", "me", "-c", LAUNCH], "another-user"),
    (["runuser", "-u", "me", "--", *WORDS], "another-user"),
    (["docker", "run", "--gpus", "all", "-e", "A=1", "image", *WORDS], "another-environment"),
    (["docker", "exec", "-it", "name", "bash", "-c", LAUNCH], "another-environment"),
    (["podman", "run", "image", *WORDS], "another-environment"),
    (["kubectl", "exec", "pod", "--", *WORDS], "another-machine"),
    (["conda", "run", "-n", "x", *WORDS], "another-environment"),
    (["uv", "run", *WORDS], "another-environment"),
    (["poetry", "run", *WORDS], "another-environment"),
    (["ssh", "host", LAUNCH.replace("'", "")], "another-machine"),
    (["srun", "-N", "1", *WORDS], "another-machine"),
    (["nsenter", "-t", "1", "-m", *WORDS], "another-environment"),
    (["chroot", "/x", *WORDS], "another-environment"),
    (["apptainer", "exec", "--nv", "a.sif", *WORDS], "another-environment"),
    (["singularity", "exec", "a.sif", "sh", "-c", LAUNCH], "another-environment"),
    (["nohup", "docker", "run", "i", *WORDS], "another-environment"),
    (["env", "A=1", "docker", "run", "i", *WORDS], "another-environment"),
    (["systemd-run", "--user", *WORDS], "another-environment"),
    (["docker", "run", "image", "env", "-i", "A=1", *WORDS], "another-environment"),
    (["ssh", "host", "env", "-i", *WORDS], "another-machine"),
    (["docker", "run", "image", "sh", "-c", f"cd /x && exec -c {LAUNCH}"], "another-environment"),
    (["sudo", "-R", "/x", *WORDS], "another-environment"),
    (["mpirun", "-np", "1", *WORDS], "another-machine"),
    (["/entrypoint.sh", *WORDS], "wrapper"),
    (["./other.sh", "--tp", "2"], "wrapper"),
    (["nohup", "wrapper", *WORDS], "wrapper"),
    (["taskset", "0xff", "wrapper", *WORDS], "wrapper"),
    (["setpriv", "--reset-env", *WORDS], "wrapper"),
    (["nsys", "profile", *WORDS], "wrapper"),
    (["./binary", *WORDS], "wrapper"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "token"), LOST)
def test_what_may_set_anything_leaves_nothing(argv: list[str], token: str | None) -> None:
    """Behind another user, another environment or what is not followed, no variable or folder of here is assumed."""
    launch = read(argv)
    assert (launch.loss and launch.loss.token) == token
    if token is not None:
        assert launch.cwd is None
        assert not {"PATH", "HOME", "EMPTY"} & {*launch.environ}
        assert launch.loss is not None
        assert launch.loss.sentence.endswith(".")


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["sudo", "A=1", *WORDS], {"A": "1"}),
        (["sudo", "-u", "me", "A=1", "env", "B=2", *WORDS], {"A": "1", "B": "2"}),
        (["sudo", "--preserve-env=A,PATH", *WORDS], {"A": "old"}),
        (["sudo", "-E", *WORDS], {"A": "old", "EMPTY": ""}),
        (["sudo", "-E", "PATH=/y", *WORDS], {"A": "old", "EMPTY": "", "PATH": "/y"}),
        (["sudo", "-nE", "-u", "me", "sh", "-c", f"A=2 {LAUNCH}"], {"A": "2", "EMPTY": ""}),
        (["sudo", "-E", "env", "-i", "A=1", *WORDS], {"A": "1"}),
        (["su", "me", "-c", f"export A=1; {LAUNCH}"], {"A": "1"}),
        (["bash", "-lc", f"export A=1; {LAUNCH}"], {"A": "1"}),
        (["gosu", "me", "env", "-u", "HOME", *WORDS], {"A": "old", "EMPTY": "", "PATH": "/bin"}),
        (["gosu", "me", *WORDS], {"A": "old", "EMPTY": "", "PATH": "/bin"}),
    ],
)
def test_what_is_set_behind_another_user_counts(argv: list[str], environ: dict[str, str]) -> None:
    """What sudo is told to keep or to set is known, but for what its rules may replace; so is what is set inside."""
    launch = read(argv)
    assert dict(launch.environ) == environ
    assert "HOME" in launch.unseen or launch.loss is not None


@pytest.mark.parametrize(
    ("argv", "cwd"),
    [
        (WORDS, "/srv/run"),
        (["sh", "-c", f"cd sub && {LAUNCH}"], "/srv/run/sub"),
        (["sh", "-c", f"cd /x; {LAUNCH}"], "/x"),
        (["sh", "-c", f"cd sub; cd ..; {LAUNCH}"], "/srv/run"),
        (["sh", "-c", f"cd || exit 1; {LAUNCH}"], "/home/u"),
        (["sh", "-c", f'cd "$HOME"; {LAUNCH}'], "/home/u"),
        (["sh", "-c", f"cd ~ && {LAUNCH}"], "/home/u"),
        (["sh", "-c", f"(cd /x); {LAUNCH}"], "/srv/run"),
        (["sh", "-c", f"(cd /x && {LAUNCH})"], "/x"),
        (["sh", "-c", f"cd /x && sh -c 'cd /v; {LAUNCH}'"], "/v"),
        (["sh", "-c", f"cd /gone; {LAUNCH}"], None),
        (["sh", "-c", f"cd /x >/nope/x; {LAUNCH}"], None),
        (["sh", "-c", f"cd /x >/dev/null 2>&1; {LAUNCH}"], "/x"),
        (["sh", "-c", f"cd $(x); {LAUNCH}"], None),
        (["sh", "-c", f"cd -; {LAUNCH}"], None),
        (["sh", "-c", f"x && cd /x; {LAUNCH}"], None),
        (["sh", "-c", f"CDPATH=/; cd x; {LAUNCH}"], None),
        (["bash", "-c", f"pushd /x; {LAUNCH}"], "/x"),
        (["bash", "-c", f"pushd /x; popd; {LAUNCH}"], None),
        (["env", "-C", "sub", *WORDS], "/srv/run/sub"),
        (["env", "--chdir=/x", *WORDS], "/x"),
        (["env", "--chdir", "/gone", *WORDS], None),
        (["env", "-C", "sub/..", *WORDS], None),
        (["sudo", "-D", "/x", *WORDS], None),
        (["./start.sh"], "/x"),
    ],
)
def test_the_folder_is_followed(argv: list[str], cwd: str | None) -> None:
    """Where a launch surely goes is the server's folder; one that is not there, or may not be meant, is not known."""
    assert read(argv).cwd == cwd


@pytest.mark.parametrize(
    ("script", "limits"),
    [
        (f"ulimit -v 1000; {LAUNCH}", True),
        (f"ulimit -Sm 1000; {LAUNCH}", True),
        (f"ulimit -d $(x); {LAUNCH}", True),
        (f"ulimit -n 16; {LAUNCH}", True),
        (f"ulimit -n $(x); {LAUNCH}", True),
        (f"ulimit 1000; {LAUNCH}", True),
        (f"x && ulimit -v 1000; {LAUNCH}", True),
        (f"prlimit --as=1000 {LAUNCH}", True),
        (f"ulimit -n 65536; ulimit -l unlimited; ulimit -c 0; ulimit -a; {LAUNCH}", False),
        (LAUNCH, False),
    ],
)
def test_limits_are_told(script: str, limits: bool) -> None:
    """Limits that the launch sets and that may matter to an import are noted; the usual raised ones are not."""
    launch = read(["sh", "-c", script])
    assert (launch.limits, launch.loss, launch.form) == (limits, None, LaunchForm.MODULE)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["./gone/nope.sh", *WORDS], "nope.sh"),
        (["sh", "gone/nope.sh", *WORDS], "nope.sh"),
        (["sh", "-c", f"cd /x && exec ./nope.sh {LAUNCH}"], "nope.sh"),
        (["./binary", *WORDS], None),
        (["nope.sh", *WORDS], None),
    ],
)
def test_a_wrapper_that_is_not_there_is_named(argv: list[str], named: str | None) -> None:
    """Where a script in front of the server is no file, that is said, not that it is not looked into."""
    here = {*FILES, *FOLDERS}
    outside = Outside(
        environ=GIVEN, cwd="/srv/run", is_folder=FOLDERS.__contains__, is_absent=lambda path: path not in here
    )
    launch = parse_launch(argv, None, outside)
    assert launch.loss is not None
    assert launch.loss.token == ("wrapper" if named is None else "not-reached")
    assert named is None or f"no file {named}" in launch.loss.sentence


def test_bash_reads_a_file_that_a_variable_names() -> None:
    """With BASH_ENV bash reads a file before its commands, whoever set it; another shell does not."""
    named = "BASH_ENV=/f"
    for argv in (["env", named, "bash", "-c", LAUNCH], ["sh", "-c", f"export BASH_ENV=$(x); bash -c '{LAUNCH}'"]):
        launch = read(argv)
        assert launch.loss is not None
        assert launch.loss.token == "sourced"
    assert read(["env", named, "sh", "-c", LAUNCH]).loss is None


def test_a_value_is_used_in_flags_too() -> None:
    """A known variable in the launch itself is what the server gets; one that is not known leaves the flags open."""
    launch = read(["sh", "-c", f"B=triton; {LAUNCH} --attention-backend $B ${{NONE:+--tp 2}} ${{A:+--dp 2}}"])
    assert launch.flags == {"attention_backend": "triton", "dp_size": 2}
    assert read(["sh", "-c", f"B=$(x); {LAUNCH} --attention-backend $B"]).flags == {"incomplete": True}
    assert read(["./start.sh", "--tp", "2"]).flags == {"tp_size": 2}


def test_without_anything_known_nothing_is_claimed() -> None:
    """Where the variables that a launch is given are not known, only what it sets is told."""
    launch = parse_launch(["sh", "-c", f"export A=1 B=$C; {LAUNCH}"])
    assert (dict(launch.environ), launch.cwd) == ({"A": "1"}, None)
    assert "B" in launch.unseen


PIECES = st.sampled_from(
    ["if ", "; then ", "; fi", "; ", "export A=", "$A", "${A:-", "}", "(", ")", "{ ", "; }", "&&", "||", "|",
     "case x in ",
     "a) ", ";; ", "esac", "for i in 1; do ", "; done", "f() ", "cd x", "\n", LAUNCH, "'", '"', "env -i ", "sudo ",
     ". ./env.sh",
     "sh -c ", "$(", "while x; do ", "$@", "set -a", "unset A", "exec ", "docker run ", "a=b ", "else ", "elif ", "`"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30).map("".join))
def test_no_script_is_an_error(script: str) -> None:
    """Whatever a script holds, following it ends, and no variable is both known and not seen."""
    launch = read(["sh", "-c", script])
    assert not {*launch.environ} & launch.unseen


@pytest.mark.parametrize(
    "piece",
    ["export A=$A$A; ", "if x; then A=1; fi; ", "x && A=1; ", "f() { f; f; }; f; ", "{ ", "( ",
     "for i in 1; do A=$B; B=$A; done; ",
     "A=1 && ", "case x in a) A=1;; esac; ", "export A$A=1; ", "sh -c '", "while x; do ", "B=${A:=${B:=", "set -- $A; "]
)  # fmt: skip
def test_time_grows_with_the_length_only(piece: str) -> None:
    """A hostile script of eight times the length takes no 64 times as long."""

    def taken(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            read(["sh", "-c", piece * count + LAUNCH])
            best = min(best, time.process_time() - began)
        return best

    assert taken(2400) < 30 * max(taken(300), 1e-3)
