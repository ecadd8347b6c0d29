"""Requirement lines, evaluated for another interpreter than the agent's, and the commands that meet them."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.environment import EnvironmentFacts
from sidecar.model import Scope
from sidecar.requirements import (
    Asked,
    Installer,
    Interpreter,
    distribution_of,
    installer,
    parsed,
    read_lines,
    satisfies,
)

PYTHON = Interpreter(python_version="3.12.3")


def asked(line: str, interpreter: Interpreter = PYTHON) -> Asked:
    """The one requirement of a line that applies."""
    (one,) = read_lines([line], interpreter).asked
    return one


@pytest.mark.parametrize(
    ("line", "version", "met"),
    [
        ("torch==2.11.0", "2.11.0", True),
        # A local tag is no other version (case 14 is judged elsewhere).
        ("torch==2.11.0", "2.11.0+cu130", True),
        ("torch==2.11.0+cu130", "2.11.0+cu130", True),
        ("torch==2.11.0+cu130", "2.11.0+cu128", False),
        ("torch==2.11.0", "2.11.0.post1", False),
        ("torch==2.11.0", "2.11", True),
        ("torch==2.9.*", "2.9.1+cu128", True),
        ("torch==2.9.*", "2.10.0", False),
        ("torch!=2.9.*", "2.9.0", False),
        # Numbers compare as numbers (areal-project/AReaL#1010).
        ("torch>=2.6", "2.10.0", True),
        ("torch~=2.6.1", "2.6.4", True),
        ("torch~=2.6.1", "2.7.0", False),
        # Case 17 (verl-project/verl#1832): post releases, and rcs that are pinned.
        ("sgl-kernel==0.3.9.post2", "0.3.9", False),
        ("sgl-kernel>=0.1.1", "0.0.9.post2", False),
        ("flashinfer_python==0.2.9rc2", "0.2.9rc2", True),
        ("flashinfer_python==0.2.9rc2", "0.2.9", False),
        # Case 31 (sgl-project/sglang#10891): a candidate is newer than the release before.
        ("flashinfer_python==0.4.0rc1", "0.3.1", False),
        # What somebody installed counts, pre-release or not.
        ("flash-attn-4>=4.0.0b18", "4.0.0b19", True),
        ("flash-attn-4>=4.0.0b18", "4.0.0b15", False),
        ("flash-attn-4>=4.0.0b18", "4.0.0", True),
        ("flashinfer_python>=0.6.1", "0.6.2.dev20260101", True),
        ("flashinfer_python==0.6.14", "0.6.14.dev20260601", False),
        ("flashinfer_python==0.6.14", "0.6.14.dev20260601+cu130", False),
        ("apache-tvm-ffi<0.2,>=0.1.5", "0.2.0rc1", False),
        ("apache-tvm-ffi!=0.1.8,!=0.1.8.post0,<0.2,>=0.1.6", "0.1.8", False),
        ("apache-tvm-ffi!=0.1.8,!=0.1.8.post0,<0.2,>=0.1.6", "0.1.11", True),
        ("cuda-python==12.9", "12.9.0", True),
        ("cuda-python==12.9", "13.0.1", False),
        ("x===2.0-odd", "2.0-ODD", True),
        ("x===1.0", "1.0.0", False),
        # Case 30 (flashinfer-ai/flashinfer#794): unusual local tags.
        ("flashinfer==0.2.3", "0.2.3+cu121torch2.5", True),
        ("numpy", "anything at all", True),
        ("numpy>=1", "not a version", None),
        ("numpy==1", "9" * 5000, None),
        ("x @ https://example.org/x-1.0-py3-none-any.whl", "7.0", True),
    ],
)
def test_versions_compare_by_pep_440(line: str, version: str, met: bool | None) -> None:
    """Specifiers hold or not as PEP 440 says, pre-releases included; what is no version is unknown."""
    assert satisfies(version, asked(line)) is met


@pytest.mark.parametrize(
    ("marker", "python", "machine", "applies"),
    [
        ('python_version < "3.10"', "3.9.18", "x86_64", True),
        ('python_version < "3.10"', "3.10.0", "x86_64", False),
        ('python_full_version >= "3.12.2"', "3.12.1", "x86_64", False),
        ('python_version >= "3.10"', "3.12", "x86_64", True),
        ('sys_platform == "linux" and platform_machine == "aarch64"', "3.12.3", "aarch64", True),
        ('sys_platform == "linux" and platform_machine == "aarch64"', "3.12.3", "x86_64", False),
        ('sys_platform == "darwin"', "3.12.3", "x86_64", False),
        ('platform_system == "Linux"', "3.12.3", "x86_64", True),
        ('implementation_name == "cpython"', "3.12.3", "x86_64", True),
        ('platform_python_implementation == "PyPy"', "3.12.3", "x86_64", False),
        ('extra == "test"', "3.12.3", "x86_64", False),
        # Nothing is concluded for a Python of unknown version, unless the marker asks something else.
        ('python_version >= "3.10"', None, "x86_64", None),
        ('sys_platform == "linux"', None, "x86_64", True),
    ],
)
def test_markers_are_those_of_the_server(marker: str, python: str | None, machine: str, applies: bool | None) -> None:
    """Markers are evaluated for the server's interpreter and machine, not for the agent's."""
    found = read_lines([f"av==1.0; {marker}"], Interpreter(python_version=python, machine=machine)).asked
    assert [one.applies for one in found] == ([] if applies is False else [applies])


def test_own_extras_add_up() -> None:
    """A distribution that asks for itself with an extra is asked for what that extra needs, in any spelling."""
    lines = (
        "aiohttp",
        'sglang[runtime_common]; extra == "srt"',
        'torch==2.8.0; extra == "srt"',
        'orjson; extra == "runtime-common"',
        'sglang[srt]; extra == "all"',
        'torch; extra == "srt-hip"',
    )
    everything = {
        extra: [one.package for one in read_lines(lines, PYTHON, "sglang", (extra,)).asked]
        for extra in ("", "runtime_common", "srt", "all")
    }
    assert everything == {
        "": ["aiohttp"],
        "runtime_common": ["aiohttp", "orjson"],
        "srt": ["aiohttp", "torch", "orjson"],
        "all": ["aiohttp", "torch", "orjson"],
    }


def test_names_and_extras_as_written() -> None:
    """A requirement keeps its spelling for the installer and has a normalised name for comparing."""
    one = asked("Flashinfer_Python [cu13] == 0.6.14")
    assert (one.package, one.argument) == ("flashinfer-python", "Flashinfer_Python[cu13]==0.6.14")


def test_unreadable_lines_are_counted() -> None:
    """A line that is no requirement is passed over and counted; the others are read."""
    read = read_lines(["", "== 1", "torch==", "torch=>1", "numpy", "Requires-Python: >=3.10"], PYTHON)
    assert ([one.package for one in read.asked], read.unreadable) == (["numpy"], 5)


@given(
    st.lists(st.text() | st.from_regex(r"[a-z]{1,3}(\[[a-z]\])?[<>=!~]{0,3}[0-9.*a-z+]{0,8}( ?; ?\w+ ?== ?\"\w*\")?"))
)
@example(["a; " + "(" * 900 + 'extra == "x"' + ")" * 900])
@example(["a==" + "9" * 5000])
@example(['a; extra == "x" and python_version > "banana"'])
@example(['a; python_version in "3.8, 3.9"'])
@example(['a; "linux" ~= sys_platform'])
def test_any_lines_can_be_read(lines: list[str]) -> None:
    """Arbitrary lines never raise, and each is either read, ruled out or counted."""
    for python in ("3.12.3", None, "nonsense"):
        read = read_lines(lines, Interpreter(python_version=python), "a", ("x",))
        assert len(read.asked) + read.unreadable <= len(lines)


@given(st.text(), st.text())
@example("1.0", "==1.0")
@example("1.0", "===")
@example("9" * 5000, "==1")
def test_any_version_can_be_compared(version: str, specifier: str) -> None:
    """Arbitrary versions and specifiers never raise: they fit, do not fit, or cannot be told."""
    assert satisfies(version, Asked(package="a", name="a", specifier=specifier)) in {True, False, None}
    assert parsed(version) is None or str(parsed(version))


def test_commands_can_be_pasted() -> None:
    """Commands are words that a shell leaves as they are, whatever the interpreter's path holds."""
    pip = Installer(python="/opt/my env/bin/python")
    command = pip.install("flashinfer_python[cu13]==0.6.14", "kernels<0.15,>=0.14.1", replace=True, dependencies=False)
    assert shlex.split(command) == [
        "/opt/my env/bin/python",
        *("-m", "pip", "install", "--force-reinstall", "--no-deps"),
        *("flashinfer_python[cu13]==0.6.14", "kernels<0.15,>=0.14.1"),
    ]
    assert pip.uninstall("a", "b") == "'/opt/my env/bin/python' -m pip uninstall -y a b"
    hostile = Installer(python="/opt/$(touch x);'/bin/python", uv=True)
    facts = EnvironmentFacts(scope=Scope.SERVER, distributions={"a": "1+$(b)"})
    for command in (hostile.install("a"), hostile.uninstall("a"), hostile.restore(facts, "a")):
        assert shlex.split(command)[3:5] == ["--python", "/opt/$(touch x);'/bin/python"]
    assert shlex.split(hostile.restore(facts, "a"))[-1] == "a==1+$(b)"


def test_a_distribution_is_restored_with_those_that_hold_its_files() -> None:
    """What nvidia-cutlass-dsl and cuda-python bring lies in other distributions, of the versions that are there."""
    known = {
        "cuda-python": "13.4.4",
        "cuda-bindings": "13.4.3",
        "nvidia-cutlass-dsl-libs-base": "4.6.0",
        "torch": "2.11.0",
    }
    facts = EnvironmentFacts(scope=Scope.SERVER, distributions=known)
    options = ["--force-reinstall", "--no-deps"]
    command = Installer().restore(facts, "cuda-python", "torch")
    assert command.split()[4:] == [*options, "cuda-python==13.4.4", "cuda-bindings==13.4.3", "torch==2.11.0"]
    # A distribution whose version is not known is named all the same.
    assert Installer().restore(facts, "quack-kernels").split()[4:] == [*options, "quack-kernels"]


@pytest.mark.parametrize(
    ("module", "distribution"),
    [
        ("tvm_ffi", "apache-tvm-ffi"),
        ("google.protobuf", "protobuf"),
        ("cuda", "cuda-python"),
        ("cuda.bindings.driver", "cuda-bindings"),
        ("torch._C", "torch"),
        ("flashinfer_jit_cache", "flashinfer-jit-cache"),
    ],
)
def test_modules_are_told_by_their_distributions(module: str, distribution: str) -> None:
    """A module's distribution is a known one, or one of its own name as PEP 503 writes it."""
    assert distribution_of(module) == distribution


def test_an_environment_without_pip_is_changed_by_uv() -> None:
    """Where pip is not installed uv does it, with its own names for the options."""
    facts = EnvironmentFacts(scope=Scope.SERVER, python="/venv/bin/python")
    uv = installer(facts)
    assert uv.install("a==1", replace=True, dependencies=False) == (
        "uv pip install --python /venv/bin/python --reinstall --no-deps a==1"
    )
    assert uv.uninstall("a") == "uv pip uninstall --python /venv/bin/python a"
    with_pip = EnvironmentFacts(scope=Scope.SERVER, python="/venv/bin/python", distributions={"pip": "26.0"})
    assert installer(with_pip).install("a==1") == "/venv/bin/python -m pip install a==1"
    assert installer(EnvironmentFacts(scope=Scope.IMAGE, distributions={"pip": "26.0"})).python == "python"
