"""Flags of a server's interpreter, read off its command line."""

from __future__ import annotations

import pytest

from sidecar.pythonflags import PythonOptions, leading_script, leads_with_cwd, python_options, without_ignored


@pytest.mark.parametrize(
    ("arguments", "flags", "inline", "script"),
    [
        (["-m", "sglang.launch_server", "-E"], (), True, None),
        (["-sIm", "sglang.launch_server"], ("-s", "-I"), True, None),
        (["-u", "-E", "-S", "launch.py", "-P"], ("-E", "-S"), False, "launch.py"),
        (["-Werror", "-X", "dev", "-c", "pass"], ("-W", "error", "-X", "dev"), True, None),
        (["-X", "presite=evil", "-W", "a b", "-OO", "x.py"], ("-O", "-O"), False, "x.py"),
        (["--check-hash-based-pycs", "never", "-P", "-"], ("-P",), False, None),
        (["-s", "--", "-odd.py"], ("-s",), False, "-odd.py"),
        (["-X"], (), False, None),
    ],
)
def test_flags_in_front_of_what_runs_count(
    arguments: list[str], flags: tuple[str, ...], inline: bool, script: str | None
) -> None:
    """Only known flags in front of the script, module or command are taken over, in groups and with their values."""
    assert python_options(arguments) == PythonOptions(flags, inline, script)


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["-Z", "-m", "x"], "-Z"),
        (["-sVm", "x"], "-V"),
        (["--help", "-m", "x"], "such an option"),
        (["-BbdEIiOPqsSuvxm", "x"], None),
        (["--check-hash-based-pycs", "never", "-WZ", "-X", "Z", "-m", "x", "-Z"], None),
    ],
)
def test_an_option_that_keeps_python_from_running_anything_is_found(arguments: list[str], refused: str | None) -> None:
    """One that is none, or that shows a text and ends; behind what runs it is not Python's."""
    assert python_options(arguments).refused == refused


@pytest.mark.parametrize(
    ("arguments", "environ", "leads"),
    [
        (["-m", "x"], {}, True),
        (["-m", "x"], {"PYTHONSAFEPATH": "1"}, False),
        (["-E", "-m", "x"], {"PYTHONSAFEPATH": "1"}, True),
        (["-I", "-m", "x"], {}, False),
        (["-P", "-m", "x"], {}, False),
        (["x.py"], {}, False),
    ],
)
def test_the_working_folder_leads(arguments: list[str], environ: dict[str, str], leads: bool) -> None:
    """It does for a module, unless a flag or a variable that is heeded forbids it (python/cpython#57684)."""
    assert leads_with_cwd(python_options(arguments), environ) is leads


@pytest.mark.parametrize(
    ("arguments", "cwd", "script"),
    [
        (["/opt/venv/bin/sglang", "serve"], None, "/opt/venv/bin/sglang"),
        (["launch.py"], "/srv", "/srv/launch.py"),
        (["launch.py"], None, None),
        (["-E", "launch.py"], "/srv", "/srv/launch.py"),
        (["-I", "/srv/launch.py"], "/srv", None),
        (["-P", "/srv/launch.py"], "/srv", None),
        (["-m", "launch"], "/srv", None),
        (["-"], "/srv", None),
    ],
)
def test_the_scripts_folder_leads(arguments: list[str], cwd: str | None, script: str | None) -> None:
    """A script's own folder leads, where that is known and no flag forbids it."""
    assert leading_script(python_options(arguments), cwd) == script


def test_ignored_variables_are_left_out() -> None:
    """-E and -I ignore the interpreter's own variables, -s and -I the user's packages."""
    environ = {"PYTHONPATH": "/x", "HOME": "/h"}
    assert without_ignored(environ, ()) == environ
    assert without_ignored(environ, ("-E",)) == {"HOME": "/h"}
    assert without_ignored(environ, ("-s",)) == environ | {"PYTHONNOUSERSITE": "1"}
    assert without_ignored(environ, ("-I",)) == {"HOME": "/h", "PYTHONNOUSERSITE": "1"}
