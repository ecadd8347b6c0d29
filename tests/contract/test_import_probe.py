"""The import probe as a real child: whatever the imported code does, the answer arrives and is right."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sidecar.imports import IMPORT_PROBE
from tests.fakes.interpreters import available
from tests.fakes.kernel import HAVE_COMPILER, REGISTERS_ONCE, compiled
from tests.fakes.site import Site

SPEC = json.dumps({"module": "flashinfer.mamba", "symbol": "selective_state_update"})


def probe(
    python: str, spec: str = SPEC, *, script: str = IMPORT_PROBE, **environ: str
) -> tuple[list[dict[str, Any]], int, str]:
    """(lines on the private channel, exit status, what was printed)."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as channel:
        argv = [python, script, spec, "--fd", str(writing)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environ = {"PYTHONDONTWRITEBYTECODE": "1", **environ}
        process = subprocess.Popen(argv, pass_fds=(writing,), env=environ, text=True, **output)
        os.close(writing)
        lines = [json.loads(line) for line in channel]
        printed, _ = process.communicate(timeout=30)
    return lines, process.returncode, printed


def result_of(site: Site, **environ: str) -> dict[str, Any]:
    lines, status, _ = probe(site.python, **environ)
    assert status == 0
    return lines[-1]["result"]


def with_mamba(root: Path, code: str) -> Site:
    site = Site(root / "venv")
    site.dependencies()
    site.flashinfer(mamba=code)
    return site


@pytest.mark.parametrize("python", available(), ids=lambda path: os.path.realpath(path).rpartition("/")[2])
def test_a_file_of_null_bytes_is_named(python: str, tmp_path: Path) -> None:
    """Python names the importer of such a file alone (python/cpython#96670); the file is what was opened last."""
    site = Site(tmp_path / "venv", base=python)
    site.dependencies()
    site.flashinfer()
    site.write("flashinfer/jit/__init__.py", "\0" * 100)
    assert result_of(site)["where"] == "flashinfer/jit/__init__.py"
    # The same words from elsewhere are about no file.
    site.write("flashinfer/jit/__init__.py", 'compile("\\0", "x", "exec")\n')
    assert result_of(site)["where"] == "flashinfer/jit/__init__.py:1"


@pytest.mark.parametrize("python", available(), ids=lambda path: os.path.realpath(path).rpartition("/")[2])
def test_every_interpreter_answers(python: str, tmp_path: Path) -> None:
    """Each interpreter from 3.8 on imports, checks the symbol and names what is loaded."""
    site = Site(tmp_path / "venv", base=python)
    site.dependencies()
    site.flashinfer("0.6.14")
    result = result_of(site)
    assert (result["ok"], result["step"], result["symbol"]) == (True, "symbol", "function")
    assert result["names"] == ["selective_state_update"]
    assert result["versions"] == {"flashinfer": "0.6.14", "torch": "2.11.0+cu130"}
    assert (result["torch_cuda"], result["cuda_initialized"]) == ("13.0", False)


def test_stages_tell_how_far_it_came(tmp_path: Path) -> None:
    """Stage markers name each large package when its import begins, so that a crash can be placed."""
    lines, status, _ = probe(with_mamba(tmp_path, "import os; os._exit(5)").python)
    assert status == 5
    assert [line["stage"] for line in lines if "stage" in line] == [
        "interpreter",
        "import flashinfer.mamba",
        "import flashinfer",
        "import tvm_ffi",
        "import torch",
        "import requests",
        "import pynvml",
        "import flashinfer.version",
        "import flashinfer._build_meta",
        "import flashinfer.jit",
    ]


def test_noise_does_not_reach_the_answer(tmp_path: Path) -> None:
    """What the code prints, and even a closed stdout, leaves the answer alone (hynek/structlog#360)."""
    code = 'import sys, os; print("{}"); print("noise", file=sys.stderr); os.close(1)'
    lines, status, printed = probe(with_mamba(tmp_path, code).python)
    assert (status, lines[-1]["result"]["ok"]) == (0, True)
    assert "noise" in printed


def test_nothing_runs_after_the_answer(tmp_path: Path) -> None:
    """Exit handlers and lingering threads of the imported code get no say."""
    proof = tmp_path / "ran"
    code = (
        f"import atexit, pathlib, threading, time\natexit.register(pathlib.Path({str(proof)!r}).touch)\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()"
    )
    assert result_of(with_mamba(tmp_path, code))["ok"] is True
    assert not proof.exists()


@pytest.mark.parametrize("switch", [{}, {"PYTHONSAFEPATH": "1"}], ids=["plain", "safe path"])
def test_own_folder_is_not_importable(tmp_path: Path, switch: dict[str, str]) -> None:
    """The probe's folder is off the import path, and nothing else is taken off."""
    own = os.path.dirname(IMPORT_PROBE)
    site = with_mamba(tmp_path, f"import sys; assert {own!r} not in sys.path; assert {str(tmp_path)!r} in sys.path")
    assert result_of(site, PYTHONPATH=str(tmp_path), **switch)["ok"] is True


def test_own_folder_is_not_importable_behind_a_link(tmp_path: Path) -> None:
    """An agent whose folder is a link to that of its release is off the import path as well."""
    (tmp_path / "current").symlink_to(os.path.dirname(IMPORT_PROBE))
    site = with_mamba(tmp_path, "import reader")
    lines, _, _ = probe(site.python, script=str(tmp_path / "current/import_probe.py"))
    assert lines[-1]["result"]["missing"] == "reader"


def test_the_channel_is_not_inherited(tmp_path: Path) -> None:
    """Processes that the import starts cannot keep the channel open."""
    code = (
        "import os\ntry:\n    fds = [int(fd) for fd in os.listdir('/proc/self/fd')]\nfinally:\n    pass\n"
        "kept = []\nfor fd in fds:\n    try:\n        kept += [fd] if fd > 2 and os.get_inheritable(fd) else []\n"
        "    except OSError:\n        pass\nraise ValueError(kept)"
    )
    assert result_of(with_mamba(tmp_path, code))["message"] == "[]"


def test_pth_files_and_path_count(tmp_path: Path) -> None:
    """The environment starts normally: its .pth files run (NVIDIA/cutlass#3034)."""
    site = with_mamba(tmp_path, "import sys; assert sys.from_pth == 1")
    site.write("code.pth", "import sys; sys.from_pth = 1\n")
    assert result_of(site)["ok"] is True


def test_exceptions_are_told_in_full(tmp_path: Path) -> None:
    """Type, message, place, cause and whether SGLang would have caught it."""
    code = "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ImportError('x' * 9000) from e"
    result = result_of(with_mamba(tmp_path, code))
    assert (result["ok"], result["exception"], len(result["message"])) == (False, "ImportError", 6000)
    assert result["where"] == "flashinfer/mamba/__init__.py:4"
    assert result["cause"] == "ZeroDivisionError: division by zero"
    assert result["sglang_catches"] is True


@pytest.mark.parametrize(
    ("code", "exception", "catches"),
    [
        ("import sys; sys.exit(3)", "SystemExit", False),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", False),
        ("raise AttributeError('x')", "AttributeError", True),
        ("raise MemoryError", "MemoryError", False),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E", False),
        ("def f(): f()\nf()", "RecursionError", False),
        ("import sys; sys.setrecursionlimit(60)\ndef f(): f()\nf()", "RecursionError", False),
    ],
)
def test_whatever_is_raised_is_an_answer(tmp_path: Path, code: str, exception: str, catches: bool) -> None:
    """No exception, not even one that leaves every handler, keeps the answer from arriving."""
    result = result_of(with_mamba(tmp_path, code))
    assert (result["ok"], result["exception"], result["sglang_catches"]) == (False, exception, catches)


def test_a_module_in_place_of_the_function_is_not_ok(tmp_path: Path) -> None:
    """An import that yields the submodule of that name is told apart (vllm-project/vllm#36162)."""
    site = with_mamba(tmp_path, "")
    site.write("flashinfer/mamba/__init__.py", "")
    result = result_of(site)
    assert (result["ok"], result["step"], result["symbol"]) == (False, "symbol", "module")
    assert "exception" not in result


def test_the_whole_chain_is_told(tmp_path: Path) -> None:
    """Each exception behind the one that was raised is there in turn, with the library that Python names."""
    code = (
        "try:\n    try:\n        raise OSError('inner')\n    except OSError as e:\n"
        "        raise ImportError('middle', path=__file__.replace('__init__.py', 'x.abi3.so')) from e\n"
        "except ImportError:\n    raise ValueError('outer')"
    )
    assert result_of(with_mamba(tmp_path, code))["chain"] == [
        {"exception": "ValueError", "message": "outer", "library": None},
        {"exception": "ImportError", "message": "middle", "library": "flashinfer/mamba/x.abi3.so"},
        {"exception": "OSError", "message": "inner", "library": None},
    ]


def test_a_chain_without_end_is_cut(tmp_path: Path) -> None:
    """Hundreds of exceptions behind one another, each with a long text, stay a bounded answer."""
    code = (
        "error = None\nfor number in range(500):\n    try:\n        raise ValueError('x' * 5000) from error\n"
        "    except ValueError as one:\n        error = one\nraise error"
    )
    chain = result_of(with_mamba(tmp_path, code))["chain"]
    assert (len(chain), {len(link["message"]) for link in chain}) == (8, {1000})


def test_a_statement_that_fails_by_itself_has_no_place(tmp_path: Path) -> None:
    """A module that is not there was missed by the statement, which is ours: no file is named."""
    spec = json.dumps({"module": "absent.module", "symbol": None})
    lines, _, _ = probe(Site(tmp_path / "venv").python, spec)
    result = lines[-1]["result"]
    assert (result["exception"], result["missing"], result["where"]) == ("ModuleNotFoundError", "absent", None)


def test_what_comes_first_comes_first(tmp_path: Path) -> None:
    """A module that is named as first is imported before the other; its failure is the answer, and ends it."""
    site = Site(tmp_path / "venv")
    site.write("early.py", "raise RuntimeError('early')")
    site.write("late.py", "raise RuntimeError('late')")
    lines, _, _ = probe(site.python, json.dumps({"module": "late", "first": "early", "load": ["*.so"]}))
    assert [line["stage"] for line in lines if "stage" in line] == ["interpreter", "import early"]
    assert (lines[-1]["result"]["message"], lines[-1]["result"]["step"]) == ("early", "import")


@pytest.mark.skipif(not HAVE_COMPILER, reason="needs a C compiler")
def test_libraries_are_loaded_apart(tmp_path: Path) -> None:
    """Each is loaded in a process of its own, after what comes first and before the module: none meets another."""
    site = Site(tmp_path / "venv")
    site.write("early.py")
    site.write("package/__init__.py", "import os; assert 'FAKE_OPERATIONS' not in os.environ")
    for name in ("a", "b"):
        compiled(REGISTERS_ONCE, site.packages / f"package/{name}/ops.so")
    site.write("package/c/ops.so", "no library")
    spec = {"module": "package", "first": "early", "load": ["*/ops.*", "../early*"]}
    lines, _, _ = probe(site.python, json.dumps(spec))
    result = lines[-1]["result"]
    assert result["ok"] is True
    assert [(one["path"], one["signal"]) for one in result["loads"]] == [
        ("a/ops.so", None),
        ("b/ops.so", None),
        ("c/ops.so", None),
    ]
    assert [bool(one["error"]) for one in result["loads"]] == [False, False, True]
    assert [line["stage"] for line in lines[2:6]] == [
        "load a/ops.so",
        "load b/ops.so",
        "load c/ops.so",
        "import package",
    ]


@pytest.mark.parametrize("version", [(3, 6, 15), (3, 7, 16)])
def test_too_old_interpreters_say_so(tmp_path: Path, version: tuple[int, int, int]) -> None:
    """Before Python 3.8 the answer is the version, and nothing is imported."""
    proof = tmp_path / "ran"
    site = with_mamba(tmp_path, f"open({str(proof)!r}, 'w')")
    site.write("pretend.pth", f"import sys; sys.version_info = ({', '.join(map(str, version))}, 'final', 0)\n")
    lines, status, _ = probe(site.python)
    assert (lines, status) == ([{"too_old": "{}.{}.{}".format(*version)}], 0)
    assert not proof.exists()


def test_the_script_is_read_by_older_interpreters() -> None:
    """Nothing in the script is evaluated or parsed that Python 3.6 and 3.7 lack, or they could not say so."""
    tree = ast.parse(Path(IMPORT_PROBE).read_text(), feature_version=(3, 7))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.arg | ast.FunctionDef | ast.AnnAssign)]
    notes = [getattr(node, "annotation", None) or getattr(node, "returns", None) for node in found]
    evaluated = {ast.unparse(note) for note in notes if note is not None and not isinstance(note, ast.Constant)}
    assert evaluated <= {"object", "str", "int", "bool", "BaseException"}
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in ast.walk(tree))
