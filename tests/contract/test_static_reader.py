"""The static reader as a real child of real interpreters, over real and hostile trees."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.environment import IMPORT_PROBE, STATIC_READER, TRACKED
from tests.fakes.interpreters import available
from tests.fakes.site import Site, good


def read(interpreter: str, **spec: Any) -> dict[str, Any]:
    """The reader's result, run as the agent runs it."""
    spec = {"environ": {}, "tracked": TRACKED, "known": None, **spec}
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as channel:
        argv = [interpreter, "-I", "-S", STATIC_READER, json.dumps(spec), "--fd", str(writing)]
        process = subprocess.Popen(argv, pass_fds=(writing,), stderr=subprocess.PIPE, env={})
        os.close(writing)
        lines = [json.loads(line) for line in channel]
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors.decode()
    return lines[-1]["result"]


def in_root(site: Site, root: Path, **spec: Any) -> dict[str, Any]:
    """The same environment read through a foreign root, by this interpreter."""
    inside = "/" + os.path.relpath(site.root, root)
    return read(sys.executable, root=str(root), python=f"{inside}/bin/python", **spec)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An environment in which everything works."""
    return good(tmp_path / "root/opt/venv")


@pytest.mark.parametrize("script", [STATIC_READER, IMPORT_PROBE], ids=os.path.basename)
def test_scripts_stay_small(script: str) -> None:
    """The scripts parse as Python 3.8 and import the standard library only."""
    tree = ast.parse(Path(script).read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    allowed = set(sys.stdlib_module_names) | ({"flashinfer"} if script == IMPORT_PROBE else set())
    assert imported <= allowed


@pytest.mark.parametrize("python", available(), ids=lambda path: os.path.realpath(path).rpartition("/")[2])
def test_every_interpreter_reads_its_own(python: str, tmp_path: Path) -> None:
    """Each interpreter from 3.8 on reads a virtual environment made for it."""
    site = Site(tmp_path / "venv", base=python)
    site.dependencies()
    site.flashinfer("0.6.14")
    result = read(site.python)
    assert result["distributions"] == {"flashinfer-python": "0.6.14"}
    assert result["site_dirs"] == [str(site.packages)]
    assert result["torch"] == {"version": "2.11.0+cu130", "cuda": "13.0", "cuda_stated": True}
    found = result["flashinfer"]
    assert (found["kind"], found["version"], found["mamba"]["state"]) == ("package", "0.6.14", "present")
    assert (found["mamba"]["symbol"], found["missing"]) == ("bound", [])


def test_nothing_of_the_environment_runs(site: Site, tmp_path: Path) -> None:
    """Code in .pth files is noted, not run (NVIDIA/cutlass#3001: the path lines beside it count)."""
    proof = tmp_path / "ran"
    extra = tmp_path / "extra"
    (extra / "flashinfer_cubin").mkdir(parents=True)
    (extra / "flashinfer_cubin/__init__.py").write_text('__version__ = "0.6.13"\n')
    site.write("code.pth", f"import pathlib; pathlib.Path({str(proof)!r}).touch()\n# comment\n\n{extra}\n/nowhere\n")
    site.write("sitecustomize.py", f"import pathlib; pathlib.Path({str(proof)!r}).touch()\n")
    result = read(site.python)
    assert not proof.exists()
    assert result["path_code"] == ["code.pth"]
    assert result["flashinfer"]["cubin"] == {"kind": "package", "version": "0.6.13"}


def test_first_on_the_path_wins(site: Site, tmp_path: Path) -> None:
    """PYTHONPATH comes before site-packages, for packages and distributions alike."""
    other = Site(tmp_path / "other")
    other.flashinfer("0.6.0")
    result = read(site.python, environ={"PYTHONPATH": f"relative:{other.packages}"})
    assert result["distributions"]["flashinfer-python"] == "0.6.0"
    assert result["flashinfer"]["version"] == "0.6.0"


def test_user_site_only_where_the_interpreter_uses_it(tmp_path: Path) -> None:
    """Packages of the user's own site count unless it is switched off (Dao-AILab/flash-attention#2310)."""
    site = Site(tmp_path / "venv", system=True)
    home = tmp_path / "home"
    user = home / ".local" / site.packages.relative_to(site.root)
    (user / "flashinfer").mkdir(parents=True)
    (user / "flashinfer/__init__.py").write_text("")
    kind = {
        switch: read(site.python, environ={"HOME": str(home), **switch_off})["flashinfer"]["kind"]
        for switch, switch_off in (("on", {}), ("off", {"PYTHONNOUSERSITE": "1"}))
    }
    assert kind == {"on": "package", "off": "absent"}
    isolated = Site(tmp_path / "isolated")
    assert read(isolated.python, environ={"HOME": str(home)})["flashinfer"]["kind"] == "absent"


def test_a_namespace_is_no_package(site: Site, tmp_path: Path) -> None:
    """A folder without __init__ is found only where no package of that name follows on the path."""
    (tmp_path / "before/flashinfer").mkdir(parents=True)
    environ = {"PYTHONPATH": str(tmp_path / "before")}
    assert read(site.python, environ=environ)["flashinfer"]["kind"] == "package"
    site.remove("flashinfer/__init__.py")
    assert read(site.python, environ=environ)["flashinfer"]["kind"] == "namespace"


@pytest.mark.parametrize(
    ("folder", "key", "version"),
    [
        ("Flashinfer_Python-0.2.3+cu121torch2.5.dist-info", "flashinfer-python", "0.2.3+cu121torch2.5"),
        ("flash.attn-2.8.3.egg-info", "flash-attn", "2.8.3"),
        ("sgl_kernel-0.3.21-py3.11.egg-info", "sgl-kernel", "0.3.21"),
    ],
)
def test_names_and_versions_in_any_spelling(tmp_path: Path, folder: str, key: str, version: str) -> None:
    """A distribution without metadata is known by its folder's name (flashinfer-ai/flashinfer#788)."""
    site = Site(tmp_path / "venv")
    (site.packages / folder).mkdir()
    assert read(site.python)["distributions"] == {key: version}


def test_sglangs_own_requirements(site: Site) -> None:
    """Only SGLang's requirements on tracked distributions are kept."""
    site.dist("sglang", "0.5.16", ("flashinfer_python[cu13]==0.6.14", "numpy", "torch==2.11.0 ; extra == 'x'"))
    assert read(site.python)["requires"] == ["flashinfer_python[cu13]==0.6.14", "torch==2.11.0 ; extra == 'x'"]


@pytest.mark.parametrize(
    ("text", "version", "cuda"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", "2.13.0+cpu", None),
        ("__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\n", "2.9.1+cu128", "12.8"),
        ("__version__ = \"2.1\"\ncuda = '11.8'\n", "2.1", "11.8"),
        ("garbage \x00", None, None),
    ],
)
def test_torch_is_read_as_text(site: Site, text: str, version: str | None, cuda: str | None) -> None:
    """The versions of torch and its CUDA come from its version file without importing it."""
    site.write("torch/version.py", text)
    torch = read(site.python)["torch"]
    assert (torch["version"], torch["cuda"]) == (version, cuda)


# -- the fingerprint ------------------------------------------------------------------------------------


def test_fingerprint_stands_still(site: Site) -> None:
    """Nothing changed, or only byte code was written: the answer is that and no more."""
    first = read(site.python)["fingerprint"]
    subprocess.run([site.python, "-c", "import flashinfer"], check=True, env={"HOME": str(site.root)})
    assert list(site.packages.glob("flashinfer/__pycache__/*.pyc"))
    assert read(site.python, known=first) == {"unchanged": True, "fingerprint": first}


def edit_in_place(site: Site) -> None:
    path = site.packages / "flashinfer/mamba/selective_state_update.py"
    before = path.stat()
    path.write_text(path.read_text().replace("...", "1/0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        edit_in_place,
        lambda site: site.write("x.pth", "/tmp\n"),
        lambda site: site.dist("unrelated", "1.0"),
        lambda site: site.write("torch/version.py", "__version__ = '2.14.0'\n"),
        lambda site: site.companion("flashinfer-cubin", "0.6.14"),
        lambda site: site.write("tvm_ffi/core.so", "binary"),
        lambda site: site.remove("requests"),
        lambda site: site.write("flashinfer_jit_cache/x"),
    ],
    ids=["same size and time", "pth", "dist", "torch", "companion", "native", "removed", "leftover"],
)
def test_fingerprint_notices(site: Site, change: Any) -> None:
    """Whatever can change an import's outcome changes the fingerprint."""
    first = read(site.python)["fingerprint"]
    change(site)
    assert read(site.python, known=first)["fingerprint"] != first


# -- hostile trees -------------------------------------------------------------------------------------


def fifo(site: Site) -> None:
    os.mkfifo(site.packages / "flashinfer_python-0.6.14.dist-info/RECORD2")
    site.remove("flashinfer_python-0.6.14.dist-info/METADATA")
    os.mkfifo(site.packages / "flashinfer_python-0.6.14.dist-info/METADATA")
    os.mkfifo(site.packages / "pipe.pth")


def loop(site: Site) -> None:
    os.symlink("loop", site.packages / "loop")
    os.symlink("..", site.packages / "flashinfer/up")
    site.write("loop.pth", "loop\n")


def not_text(site: Site) -> None:
    os.mkdir(os.fsencode(site.packages) + b"/\xff\xfe-1.dist-info")
    (site.packages / "flashinfer_python-0.6.14.dist-info/METADATA").write_bytes(b"\xff\xfe\x00" * 1000)
    (site.packages / "\udcff.pth").write_bytes(b"\xff\n")


def huge(site: Site) -> None:
    (site.packages / "flashinfer_python-0.6.14.dist-info/METADATA").write_text("X: y\n" * 2_000_000)


@pytest.mark.parametrize("spoil", [fifo, loop, not_text, huge], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
def test_hostile_files_cost_only_themselves(site: Site, tmp_path: Path, spoil: Any, foreign: bool) -> None:
    """Pipes, loops, undecodable names and endless files neither hang nor fail the reading of the rest."""
    spoil(site)
    result = in_root(site, tmp_path / "root") if foreign else read(site.python)
    assert result["distributions"]["flashinfer-python"] == "0.6.14"
    assert result["flashinfer"]["mamba"]["state"] == "present"
    json.dumps(result).encode()


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("(" * 50_000, "invalid-init"),
        ("x = " + "-" * 50_000 + "1", "invalid-init"),
        ("\x00" * 100, "invalid-init"),
        ("x = 1\n" * 200_000, "present"),
        ("", "empty-init"),
    ],
    ids=["brackets", "unary", "nul", "long", "empty"],
)
def test_mamba_of_any_content(site: Site, text: str, state: str) -> None:
    """An __init__ that is no ordinary Python file is judged, not obeyed."""
    site.write("flashinfer/mamba/__init__.py", text)
    assert read(site.python)["flashinfer"]["mamba"]["state"] == state


def test_hostile_versions_are_dropped(site: Site) -> None:
    """What is no version does not get out, whoever states it."""
    site.write("flashinfer_python-0.6.14.dist-info/METADATA", 'Version: 1.0"} evil\nName: x\n\n')
    site.write("flashinfer/_build_meta.py", '__version__ = "<script>"\n')
    result = read(site.python)
    assert result["distributions"]["flashinfer-python"] == "0.6.14"
    assert result["flashinfer"]["version"] is None


# -- foreign roots ---------------------------------------------------------------------------------------


def test_foreign_root_is_read_alike(site: Site, tmp_path: Path) -> None:
    """Through a root the same facts are read as by the environment's own interpreter."""
    own, foreign = read(site.python), in_root(site, tmp_path / "root")
    for key in ("distributions", "flashinfer", "torch"):
        strip = json.dumps(own[key]).replace(str(tmp_path / "root"), "")
        assert json.dumps(foreign[key]) == strip
    assert foreign["site_dirs"] == ["/" + str(site.packages.relative_to(tmp_path / "root"))]


def test_foreign_interpreter_never_runs(site: Site, tmp_path: Path) -> None:
    """The interpreter inside a foreign root is not started."""
    (site.root / "bin/python").unlink()
    (site.root / "bin/python").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (site.root / "bin/python").chmod(0o755)
    assert in_root(site, tmp_path / "root")["flashinfer"]["kind"] == "package"
    assert not (tmp_path / "ran").exists()


def test_links_cannot_lead_out_of_the_root(site: Site, tmp_path: Path) -> None:
    """Absolute and climbing links are resolved inside the root, so files outside stay unread."""
    outside = tmp_path / "outside/flashinfer_cubin"
    outside.mkdir(parents=True)
    (outside / "__init__.py").write_text('__version__ = "6.6.6"\n')
    os.symlink(outside, site.packages / "flashinfer_cubin")
    os.symlink("../" * 30 + str(outside).lstrip("/"), site.packages / "flashinfer_jit_cache")
    site.write("out.pth", f"{tmp_path}/outside\n")
    found = in_root(site, tmp_path / "root")["flashinfer"]
    assert (found["cubin"]["kind"], found["jit_cache"]["kind"]) == ("absent", "absent")
    assert read(site.python)["flashinfer"]["cubin"]["version"] == "6.6.6"


def test_absolute_links_work_inside_the_root(site: Site, tmp_path: Path) -> None:
    """A link that is absolute in the container leads where it leads there."""
    shared = tmp_path / "root/shared/flashinfer_cubin"
    shared.mkdir(parents=True)
    (shared / "__init__.py").write_text('__version__ = "0.6.14"\n')
    os.symlink("/shared/flashinfer_cubin", site.packages / "flashinfer_cubin")
    assert in_root(site, tmp_path / "root")["flashinfer"]["cubin"]["version"] == "0.6.14"


def test_foreign_interpreter_is_found(site: Site, tmp_path: Path) -> None:
    """Without a named interpreter the usual places are searched for one that has FlashInfer or SGLang."""
    os.symlink("python", site.root / "bin/python3")
    result = read(sys.executable, root=str(tmp_path / "root"), python=None)
    assert result["python"] == "/opt/venv/bin/python3"
    assert result["flashinfer"]["kind"] == "package"


def test_roots_that_cannot_be_read(tmp_path: Path) -> None:
    """A root that is missing or has no environment is a problem with a token, not a crash."""
    assert read(sys.executable, root=str(tmp_path / "nowhere"), python=None) == {"problem": "root-unreadable"}
    assert read(sys.executable, root=str(tmp_path), python=None) == {"problem": "no-environment"}
