"""What is read of a launch line is what a real shell makes of it, or is said to be not seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.launch.args import LaunchForm, parse_launch
from sidecar.launch.shell import Outside
from sidecar.launch.words import OPEN
from tests.fakes.interpreters import available

_OWN_TO_SHELLS = {"PWD", "OLDPWD", "SHLVL", "_"}
_DUMP = """#!{python} -IS
import json, os, sys
with open({out!r}, "w") as file:
    json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], file)
"""


class Machine:
    """A folder with what launch lines may lead to, and an interpreter that tells how it was started."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.out = self.root / "out.json"
        for folder in ("bin", "a/b", "other bin"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "a/link").symlink_to(self.root / "other bin")
        self.python = self.root / "bin/python3"
        self.python.write_text(_DUMP.format(python=sys.executable, out=str(self.out)))
        self.python.chmod(0o755)
        shutil.copy(self.python, self.root / "other bin/python3")
        (self.root / "env.sh").write_text("export FROM_FILE=1\nLOCAL=2\nX=file\n")
        self.environ = {
            "PATH": f"{self.root}/bin:/usr/bin:/bin",
            "HOME": str(self.root / "a"),
            "X": "old",
            "EMPTY": "",
            "SPACED": " p  q ",
            "PAIR": "Y=pair",
            "PAIRS": " Y=one X",
        }
        venv = self.root / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (venv / "bin/python3").unlink()
        shutil.copy(self.python, venv / "bin/python3")

    def outside(self) -> Outside:
        """What this machine gives a launch."""

        def read(path: str) -> str | None:
            return Path(path).read_text() if Path(path).is_file() else None

        return Outside(environ=self.environ, cwd=str(self.root), is_folder=lambda path: Path(path).is_dir(), read=read)

    def run(self, argv: list[str]) -> tuple[list[str], str, dict[str, str]] | None:
        """(arguments, folder, environment) that the interpreter got; None where it was not started."""
        self.out.unlink(missing_ok=True)
        subprocess.run(
            argv,
            cwd=self.root,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        if not self.out.exists():
            return None
        arguments, folder, environ = json.loads(self.out.read_text())
        return arguments, folder, environ

    def agrees(self, argv: list[str]) -> bool:
        """Compare a launch with how it is read; give whether all of it was seen."""
        got = self.run(argv)
        launch = parse_launch(argv, None, self.outside())
        seen = launch.loss is None and launch.cwd is not None and not launch.unseen - _OWN_TO_SHELLS
        if got is None:
            found = shutil.which("python3", path=launch.environ.get("PATH", os.defpath))
            assert not seen or launch.depends or found != str(self.python), f"{argv!r} does not reach the server"
            return False
        arguments, folder, environ = got
        said = f"{argv!r}: {launch.environ} {launch.unseen} {launch.loss} {launch.cwd}"
        if launch.cwd is not None:
            assert os.path.realpath(launch.cwd) == folder, said
        for name, value in launch.environ.items():
            if name not in _OWN_TO_SHELLS:
                assert environ.get(name) == value, f"{name} in {said}"
        if launch.loss is None:
            extra = {*environ} - {*launch.environ} - launch.unseen - _OWN_TO_SHELLS - {"LC_CTYPE"}
            assert not extra, f"{extra} in {said}"
        if launch.form is LaunchForm.MODULE and launch.program is not None and OPEN not in launch.program:
            port = next((word for before, word in pairwise(arguments) if before == "--port"), None)
            read = launch.flags.get("port")
            assert read is None or str(read) == port, said
        return seen


@pytest.fixture(name="machine", scope="module")
def _machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


LAUNCH = "python3 -m sglang.launch_server --model-path m"

VALUES = st.sampled_from(
    ["1", "two words", "$X", '"$X"', "${X}", "${X:-y}", "${NONE:-z}", "${NONE-z}", "${EMPTY:-e}", "${EMPTY-e}",
     "${X:+alt}",
     "${NONE:+alt}", "${EMPTY+set}", "$X:$NONE", '"$X:$Y"', "'$X'", '"a b"', "$(echo out)", "`echo out`", "$SPACED",
     '"$SPACED"', "~", "~/z", "*", '"*"', "$Y$X", '"${Y:-$X}"', '"${Z:=def}"', "${Z:=def}", "$PWD", '"$PWD/x"', "$HOME",
     "$1", '"$@"', "$#", "a\\ b", "$OLDPWD", "${X%d}", "${#X}", "", "''", "$HOSTNAME", '"${X:-"q r"}"', "$((1+2))",
     "{a,b}", "$'t'", "${NONE:?no}", "[a]", '"\\$X"', "${NONE:-$(echo deep)}", "x=~", "a$X", "$PATH", "$UID"]
).map(lambda value: value if " " not in value or value[0] in "'\"$`a" else f"'{value}'")  # fmt: skip
NAMES = st.sampled_from(["X", "Y", "Z", "EMPTY", "NONE", "PYTHONPATH", "HOME", "PWD", "IFS"])


def _assignments(names: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("{}={}".format, names, VALUES)


ASSIGNMENTS = _assignments(NAMES)
FOLDERS = st.sampled_from(
    ["a", "a/b", "..", "$HOME", "nowhere", "", "a/link", "-", "./a", "~", '"$PWD/a"', "a/link/..", "."]
)
PLAIN = st.one_of(
    ASSIGNMENTS,
    st.builds("{} {}".format, ASSIGNMENTS, ASSIGNMENTS),
    ASSIGNMENTS.map("export {}".format),
    st.builds("export {} {}".format, ASSIGNMENTS, ASSIGNMENTS),
    NAMES.map("export {}".format),
    st.builds('export "{}"'.format, st.sampled_from(["$PAIR", "$X=1", "${NONE:-N=1}", "$1", "$@"])),
    st.builds("{} {}".format, st.sampled_from(["export", "readonly", "declare -x", "set -a; declare"]),
              st.sampled_from(["$PAIR", "$PAIRS", "$X=1", "${NONE:-N=1}", "${NONE:-N}", "$1", "$EMPTY", "$SPACED"])),
    NAMES.map("unset {}".format),
    NAMES.map("export -n {}".format),
    ASSIGNMENTS.map("readonly Q{}".format),
    ASSIGNMENTS.map("declare -x {}".format),
    ASSIGNMENTS.map("declare {}".format),
    ASSIGNMENTS.map("{} true".format),
    ASSIGNMENTS.map("{} export Y".format),
    FOLDERS.map("cd {}".format),
    st.sampled_from(
        ["set -a", "set +a", "set -o allexport", "true", "false", ":", ": ${Y:=late}", "read Y", "eval X=evil",
         ". ./env.sh",
         ". ./nowhere.sh", "source ./env.sh", "set -- p q", "shift", "f() { export X=func; }", "f",
         "f() { X=$1; }; f g",
         "printf -v Y 1", "echo $X >/dev/null", "alias python3=true", ". venv/bin/activate", ". ./venv/bin/activate",
         "export PATH=$PWD/'other bin':$PATH", 'PATH="$PWD/other bin:$PATH"', "env -u X true", "exec 3>/dev/null",
         "command export X=c", "builtin cd a", "local X=1", "unset -f f", "X+=more", "export X+=more", "X=(1 2)",
         "set -u", "set -e", "set -eu", "exit 3", "test -d a || exit 1", "test -d nowhere || exit 1", "exec true",
         '[ -z "$X" ] && exit 1', ': "${Y:?}"', "(exit 1)", "set -n", "while false; do export X=loop; done",
         "for Y in; do export X=loop; done", "if true; then export X=if; fi", "until true; do exit; done",
         "f() { exit 1; }", "set -- a b", "kill $$", "false || exit", "true || exit", "return",
         "trap 'export X=trap' EXIT", "trap 'export X=trap' DEBUG", "trap 'export X=trap' ERR", "unset -n X",
         "declare -i X", "declare -n Y=X", "declare -u Y", "declare -r Y", "readonly X", "set -o posix", "ulimit -n 64",
         "X=special :", "X=special eval :", "X=special export X", "shift", "set -C", "set -k",
         "getopts ab Y", "hash -r", 'test -n "$X"', '[ -n "$X" ]']
    ),
)  # fmt: skip


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("{} && {}".format, inner, inner),
        st.builds("{} || {}".format, inner, inner),
        inner.map("({})".format),
        inner.map("{{ {}; }}".format),
        st.builds("{{ {}; }} {}".format, inner, REDIRECTIONS),
        st.builds("if {}; then {}; fi".format, inner, inner),
        st.builds("if {}; then {}; else {}; fi".format, inner, inner, inner),
        st.builds("for Y in 1 2; do {}; done".format, inner),
        st.builds("while false; do {}; done".format, inner),
        st.builds("for Z in 1 2 3; do {}; {}; break; done".format, inner, inner),
        st.builds("case $X in old) {};; *) {};; esac".format, inner, inner),
        st.builds("{} | {}".format, inner, inner),
        st.builds("{} &".format, inner),
        st.builds("{}\n{}".format, inner, inner),
    )


REDIRECTIONS = st.sampled_from(
    [">/dev/null", ">/nope/x", "</nope/x", "<env.sh", ">out.txt", "2>&1", "3<&9", ">a", ">&-", ">>$X", ">a/log 2>&1"]
)
PLAIN = st.one_of(PLAIN, st.builds("{} {}".format, PLAIN, REDIRECTIONS))


STATEMENTS = st.recursive(PLAIN, _compound, max_leaves=4)
PREFIXES = st.one_of(
    st.just(""),
    ASSIGNMENTS.map("{} ".format),
    st.builds("{} {} ".format, ASSIGNMENTS, ASSIGNMENTS),
    st.sampled_from(
        ["exec ", "nohup ", "env -i ", "env -u X ", "env - PATH=$PATH ", "nice -n 5 ", "timeout 20 ", "command ",
         "env -C a ", "env --chdir=a/b ", "env X=$Y ", 'env "X=$X:1" ', "env -S 'X=s Y=t' ", "time ", "! ",
         "exec -a n ",
         "setsid -w ", "stdbuf -oL ", "env -uX -uY Z=1 ", "env -i -u X Y=1 ", "sh -c 'X=in; export X; \"$@\"' - ",
         "bash -c 'exec \"$@\"' - ", "exec env ", "exec env Y=2 nice "]
    ),
)  # fmt: skip
ENDS = st.sampled_from(
    [
        "",
        " --port 1",
        " --port $Y",
        " --port ${P:-7} $EMPTY",
        " | cat",
        " > /dev/null 2>&1",
        " &\nwait",
        ' "$@"',
        " --port '2'",
    ]
)


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A launch line: some statements, then the launch."""
    statements = draw(st.lists(STATEMENTS, max_size=4))
    launch = draw(PREFIXES) + LAUNCH + draw(ENDS)
    around = draw(
        st.sampled_from(
            [
                "{}",
                "{}",
                "{}",
                "({})",
                "{{ {}; }}",
                "if true; then {}; fi",
                "cd a && {}",
                "true && {}",
                "false || {}",
                "for Z in 1; do {}; done",
                "for Z in $EMPTY; do {}; done",
                "while true; do {}; break; done",
                "while false; do {}; done",
                "until false; do {}; break; done",
                "if test -d a; then {}; fi",
                "if false; then :; else {}; fi",
                "true || {}",
                "false && {}",
                "! true || {}",
                "sh -c '{}'",
            ]
        )
    )
    if "'" in launch and "'" in around:
        around = "{}"
    between = draw(st.sampled_from(["; ", "\n", " && "]))
    whole = around.format(launch)
    text = ""
    for statement in statements:
        text += statement + ("\n" if statement.endswith("&") else between)
    return text + whole


@pytest.mark.parametrize("shell", [one for one in ("sh", "bash") if shutil.which(one)])
@given(line=lines())
@settings(
    max_examples=int(os.environ.get("SHELL_EXAMPLES", "100")), deadline=None, suppress_health_check=list(HealthCheck)
)
def test_a_line_is_read_as_the_shell_runs_it(machine: Machine, shell: str, line: str) -> None:
    """Never different: arguments, folder and each variable are the same, or are said to be not seen."""
    machine.agrees([shell, "-c", line])


STOPPED = [
    "exit 1; {launch}",
    "exit 0\n{launch}",
    "export A=1; exit; {launch}",
    "test -d /nope || exit 3; {launch}",
    "set -e; false; {launch}",
    "set -e; (exit 2); {launch}",
    "set -e; f() {{ false; }}; f; {launch}",
    ': "${{MODEL:?must be set}}"; {launch}',
    "A=$(true)${{MODEL:?}}; {launch}",
    "set -u; {launch} --revision $NOPE",
    "set -u; export A=$1; {launch}",
    "true || {launch}",
    "false && {launch}",
    "if false; then {launch}; fi",
    "if true; then :; else {launch}; fi",
    "while false; do {launch}; done",
    "until true; do {launch}; done",
    "for i in; do {launch}; done",
    "for i in $EMPTY; do {launch}; done",
    "for i in 1; do exit 1; done; {launch}",
    "if true; then exit 1; fi; {launch}",
    "{{ exit 1; }}; {launch}",
    "exec true; {launch}",
    "command exec true; {launch}",
    "kill $$; {launch}",
    "set -n; {launch}",
    "set -o noexec; {launch}",
    "readonly X=1; X=2; {launch}",
]


@pytest.mark.parametrize("shell", [one for one in ("sh", "bash") if shutil.which(one)])
@pytest.mark.parametrize("line", STOPPED)
def test_a_line_that_ends_before_its_launch_is_not_judged(machine: Machine, shell: str, line: str) -> None:
    """Where the real shell never comes to the server, that is said, or named as what it depends on."""
    argv = [shell, "-c", line.format(launch=LAUNCH)]
    assert machine.run(argv) is None
    launch = parse_launch(argv, None, machine.outside())
    assert (launch.loss is not None and launch.loss.token == "not-reached") or launch.depends == ("test",)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@given(line=lines())
@settings(
    max_examples=int(os.environ.get("SHELL_EXAMPLES", "50")), deadline=None, suppress_health_check=list(HealthCheck)
)
def test_a_line_is_read_in_posix_mode_too(machine: Machine, line: str) -> None:
    """The mode of POSIX, in which assignments stay in front of some commands and more failures end the shell."""
    machine.agrees(["bash", "--posix", "-c", line])


@pytest.mark.parametrize("option", [["-n", "-c"], ["-nc"], ["-o", "noexec", "-c"], ["-ec"], ["-uc"]])
@pytest.mark.parametrize("shell", [one for one in ("sh", "bash") if shutil.which(one)])
def test_options_of_the_shell_itself_count(machine: Machine, shell: str, option: list[str]) -> None:
    """Those with which it runs nothing, and those with which it ends early."""
    argv = [shell, *option, f"false; A=$NOPE; {LAUNCH}"]
    launch = parse_launch(argv, None, machine.outside())
    assert machine.run(argv) is None
    assert launch.loss is not None
    assert launch.loss.token == "not-reached"


SEEN = [
    "set -eu; export A=1; cd a; : ${{X:?}}; {launch}",
    "set -e; false || true; if false; then :; fi; ! true; false && true; {launch}",
    "while true; do {launch}; exit; done",
    "if true; then export X=1; else exit 1; fi; while false; do X=2; done; {launch}",
    "{launch}",
    "A=1 {launch}",
    'export A=$X:${{NONE:-d}} B="$SPACED"; {launch} --port ${{P:-7}}',
    "B=$X; set -a; C=$B; set +a; D=1; {launch}",
    "unset X && cd a/b && {launch}",
    "cd a && cd .. && export X=$PWD; {launch} | cat",
    "(export X=1; cd a); export X=2 & wait; {launch}",
    "if true; then export X=1; {launch}; fi",
    "f() {{ export X=$1; }}; f 3; {launch}",
    ". ./env.sh && {launch}",
    "env -i -u X A=1 $PWD/bin/{launch}",
    "env -C a X=1 nice -n 1 timeout 20 {launch}",
    "sh -c 'export X=$1; shift; exec \"$@\"' - v {launch}",
    "cat <<E >/dev/null\nexport X=no\nE\nexport X='a  b' # c\nexec {launch} --port 1 2>&1",
]


@pytest.mark.parametrize("shell", [one for one in ("sh", "bash") if shutil.which(one)])
@pytest.mark.parametrize("line", SEEN)
def test_a_plain_line_is_seen_whole(machine: Machine, shell: str, line: str) -> None:
    """What people write is read to the last variable, and the real shell agrees."""
    assert machine.agrees([shell, "-c", line.format(launch=LAUNCH)])


@pytest.mark.parametrize("python", available())
@pytest.mark.parametrize("shell", [one for one in ("sh", "bash") if shutil.which(one)])
def test_an_activation_leads_to_its_environment(machine: Machine, tmp_path: Path, shell: str, python: str) -> None:
    """The file ``activate`` of any Python's own environments does what is said of it."""
    root = Path(os.path.realpath(tmp_path)) / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(root)], check=True)
    (root / "bin/python3").unlink()
    shutil.copy(machine.python, root / "bin/python3")
    argv = [shell, "-c", f". {root}/bin/activate && export X=1 && {LAUNCH}"]
    machine.agrees(argv)
    said = parse_launch(argv, None, machine.outside())
    assert machine.out.exists()
    assert (said.environ["VIRTUAL_ENV"], said.environ["X"]) == (str(root), "1")
    assert said.environ["PATH"] == f"{root}/bin:{machine.environ['PATH']}"
