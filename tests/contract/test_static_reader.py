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

from sidecar.environment import STATIC_READER
from sidecar.imports import IMPORT_PROBE
from tests.fakes.interpreters import available
from tests.fakes.reader import in_root, read
from tests.fakes.site import Site, driver_library, good, loader_cache, loader_config


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An environment in which everything works."""
    return good(tmp_path / "root/opt/venv")


SCRIPTS = (STATIC_READER, IMPORT_PROBE, *sorted(map(str, Path(STATIC_READER).with_name("reader").iterdir())))


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.endswith(".py")], ids=os.path.basename)
def test_scripts_stay_small(script: str) -> None:
    """The scripts parse as Python 3.8 and import the standard library only."""
    tree = ast.parse(Path(script).read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).partition(".")[0])
    own = {IMPORT_PROBE: {"flashinfer"}, STATIC_READER: {"reader"}}
    allowed = set(sys.stdlib_module_names) | own.get(script, set())
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
    assert result["torch"] == {"version": "2.11.0+cu130", "cuda": "13.0", "cuda_stated": True, "hip": None}
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
    """SGLang's requirements are read whole, past a licence text whose empty lines are indented."""
    lines = ("flashinfer_python[cu13]==0.6.14", "numpy", "torch==2.11.0 ; extra == 'x'")
    site.dist("sglang", "0.5.16", lines)
    assert read(site.python)["requires_of"] == {"sglang": list(lines), "flashinfer-python": []}
    path = site.packages / "sglang-0.5.16.dist-info/METADATA"
    licence = "License:       Apache License\n        \n        1. Definitions.\n\t\nRequires-Python: >=3.10\n"
    path.write_text(path.read_text().replace("Requires-Dist", licence + "Requires-Dist", 1))
    result = read(site.python)
    assert result["requires_of"]["sglang"] == list(lines)
    assert result["requires_python"] == {"sglang": ">=3.10"}


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
    again = read(site.python, known=first)
    beside = {"libcuda", "toolchain", "cache", "cubins"}
    assert {key: value for key, value in again.items() if key not in beside} == {
        "unchanged": True,
        "fingerprint": first,
    }


def upgrade(site: Site) -> None:
    site.remove("flashinfer_python-0.6.14.dist-info")
    site.flashinfer("0.6.15")


def reinstall(site: Site) -> None:
    record = site.packages / "flashinfer_python-0.6.14.dist-info/RECORD"
    before = record.stat()
    content = record.read_text()
    record.unlink()
    site.write("other")  # so that the freed inode is not given out again
    record.write_text(content)
    os.utime(record, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_in_place(site: Site) -> None:
    path = site.packages / "flashinfer/mamba/selective_state_update.py"
    before = path.stat()
    path.write_text(path.read_text().replace("...", "1/0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        upgrade,
        reinstall,
        edit_in_place,
        lambda site: site.remove("flashinfer_python-0.6.14.dist-info"),
        lambda site: site.write("sgl_kernel/__init__.py"),
        lambda site: site.write("sglang/srt/new.py"),
        lambda site: site.write("nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py"),
        lambda site: site.write("flash_attn/cute/__init__.py"),
        lambda site: site.write("einops.py"),
        lambda site: site.write("x.pth", "/tmp\n"),
        lambda site: site.dist("unrelated", "1.0"),
        lambda site: site.write("torch/version.py", "__version__ = '2.14.0'\n"),
        lambda site: site.companion("flashinfer-cubin", "0.6.14"),
        lambda site: site.write("tvm_ffi/core.so", "binary"),
        lambda site: site.remove("requests"),
        lambda site: site.write("flashinfer_jit_cache/x"),
    ],
    ids=[
        "upgrade",
        "reinstall",
        "same size and time",
        "metadata deleted",
        "kernel",
        "sglang",
        "cutlass",
        "fa4",
        "module",
        "pth",
        "dist",
        "torch",
        "companion",
        "native",
        "removed",
        "leftover",
    ],
)
def test_fingerprint_notices(site: Site, change: Any) -> None:
    """Whatever can change an import's outcome changes the fingerprint."""
    first = read(site.python)["fingerprint"]
    change(site)
    assert read(site.python, known=first)["fingerprint"] != first


def test_fingerprint_follows_the_path(site: Site, tmp_path: Path) -> None:
    """A new entry of the path changes the fingerprint, as does the source of an editable install behind one."""
    source = tmp_path / "source"
    (source / "sgl_kernel").mkdir(parents=True)
    (source / "sgl_kernel/__init__.py").write_text("")
    marks = [read(site.python)["fingerprint"], read(site.python, environ={"PYTHONPATH": str(source)})["fingerprint"]]
    site.write("__editable__.sgl_kernel.pth", f"{source}\n")
    marks.append(read(site.python)["fingerprint"])
    (source / "sgl_kernel/__init__.py").write_text("x = 1\n")
    marks.append(read(site.python)["fingerprint"])
    assert len(set(marks)) == 4


@pytest.mark.parametrize("name", ["random.py", "tqdm/__init__.py", "numpy.so"])
@pytest.mark.parametrize("where", ["cwd", "script", "path"])
def test_fingerprint_notices_what_comes_first(site: Site, tmp_path: Path, name: str, where: str) -> None:
    """A file in front of the standard library counts if a module of its name lies behind it, and no other does."""
    site.write("numpy/__init__.py")
    folder = tmp_path / "folder"
    folder.mkdir()
    spec: dict[str, Any] = {
        "cwd": {"cwd": str(folder), "cwd_on_path": True},
        "script": {"cwd": "/", "script": str(folder / "launch.py")},
        "path": {"environ": {"PYTHONPATH": str(folder)}},
    }[where]
    first = read(site.python, **spec)["fingerprint"]
    (folder / "tmp5kq2x7.py").touch()
    (folder / "logs").mkdir()
    assert read(site.python, **spec)["fingerprint"] == first
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).touch()
    changed = read(site.python, **spec)["fingerprint"]
    assert changed != first
    (folder / name).write_text("raise ImportError")
    assert read(site.python, **spec)["fingerprint"] not in {first, changed}


def test_the_scripts_folder_leads_in_a_foreign_root_too(tmp_path: Path) -> None:
    """Beside a script or where its link leads to, inside the root; another variable forbids it as for the server."""
    site = Site(tmp_path / "opt/venv")
    site.dependencies()
    app = Site(tmp_path / "app")
    app.flashinfer()
    app.packages.rename(tmp_path / "srv")
    (tmp_path / "srv/launch.py").touch()
    (tmp_path / "launch").symlink_to("/srv/launch.py")
    kinds = [
        in_root(site, tmp_path, script=script, environ=environ)["flashinfer"]["kind"]
        for script, environ in (
            ("/srv/launch.py", {}),
            ("/launch", {}),
            ("/srv", {}),
            ("/srv/launch.py", {"PYTHONSAFEPATH": "1"}),
            ("/elsewhere/launch.py", {}),
            (None, {}),
        )
    ]
    assert kinds[:3] == ["package"] * 3
    assert kinds[4:] == ["absent"] * 2
    assert kinds[3] == ("absent" if sys.version_info >= (3, 11) else "package")


def test_fingerprint_follows_an_editable_finder(site: Site, tmp_path: Path) -> None:
    """The packages that setuptools' finder maps are found and watched where they lie."""
    package = tmp_path / "source/python/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    name = "__editable___sglang_0_5_16_finder"
    site.write(f"{name}.py", f"import sys\nMAPPING: dict[str, str] = {{'sglang': {str(package)!r}}}\n")
    site.write("__editable__.sglang-0.5.16.pth", f"import {name}; {name}.install()\n")
    before = read(site.python)
    assert before["modules"]["sglang"] == {"kind": "package", "places": [str(package)]}
    assert before["path_code"] == []
    (package / "launch.py").write_text("")
    edited = read(site.python)["fingerprint"]
    site.write(f"{name}.py", "MAPPING = {}\n")
    assert len({before["fingerprint"], edited, read(site.python)["fingerprint"]}) == 3


def test_fingerprint_follows_links_of_an_installer(site: Site, tmp_path: Path) -> None:
    """A file that an installer linked to its cache is watched there."""
    cached = tmp_path / "cached.py"
    cached.write_text("x = 1\n")
    (site.packages / "flashinfer/linked.py").symlink_to(cached)
    before = read(site.python)["fingerprint"]
    cached.write_text("x = 2\n")
    assert read(site.python)["fingerprint"] != before


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


@pytest.mark.parametrize(
    ("text", "symbol"),
    [
        ("selective_state_update = len", "bound"),
        ("selective_state_update, other = len, 1", "bound"),
        ("[other, (*rest, selective_state_update)] = 1, (2, len)", "bound"),
        ("selective_state_update: object", "missing"),
        ("other = 1", "missing"),
        ("def other(): return 1", "missing"),
        ("def __getattr__(name): return len", "unknown"),
        ("from x import lazy as __getattr__", "unknown"),
        ("__getattr__, __dir__, __all__ = attach(__name__)", "unknown"),
        ("from x import *", "unknown"),
        ("exec('selective_state_update = len')", "unknown"),
        ("globals()['selective_state_update'] = len", "unknown"),
        ("setattr(x, 'selective_state_update', len)", "unknown"),
        ("import sys\nsys.modules[__name__] = x", "unknown"),
        ("for selective_state_update in [len]: pass", "unknown"),
        ("def bind():\n    global selective_state_update\nbind()", "unknown"),
        ("(selective_state_update := len)", "unknown"),
        ("try:\n    from .gone import selective_state_update\nexcept ImportError:\n    raise", "bound"),
        ("from .gone import selective_state_update", "source-missing"),
    ],
)
def test_a_name_is_missing_only_where_nothing_can_bind_it(site: Site, text: str, symbol: str) -> None:
    """A name is missing only in a module that binds every name plainly (module __getattr__: PEP 562)."""
    site.write("flashinfer/mamba/__init__.py", text)
    assert read(site.python)["flashinfer"]["mamba"]["symbol"] == symbol


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


# -- the CUDA driver's library --------------------------------------------------------------------------

LIB = f"/usr/lib/{os.uname().machine}-linux-gnu"
COMPAT = "/usr/local/cuda-13.0/compat"
STUBS = "/usr/local/cuda/lib64/stubs"


@pytest.fixture
def root(tmp_path: Path, site: Site) -> Path:
    """A root with that environment and the driver's own library where the container runtime mounts it."""
    folder = tmp_path / "root"
    assert site.root.is_relative_to(folder)
    driver_library(folder, LIB)
    return folder


def found(site: Site, root: Path, path: str = "") -> list[tuple[str, str | None, str, str]]:
    """(path, version, kind, where) of each libcuda.so.1 in the loader's order."""
    libraries = in_root(site, root, environ={"LD_LIBRARY_PATH": path})["libcuda"]["found"]
    return [(one["path"], one["version"], one["kind"], one["where"]) for one in libraries]


OWN = (f"{LIB}/libcuda.so.1", "580.159.04", "driver", "default")


def test_libcuda_in_a_default_folder(site: Site, root: Path) -> None:
    """Without a cache or a variable the default folders are looked through, one file under two names once."""
    (root / "lib").symlink_to("usr/lib")
    assert [(version, kind, where) for _, version, kind, where in found(site, root)] == [OWN[1:]]


def test_the_variable_comes_first(site: Site, root: Path) -> None:
    """LD_LIBRARY_PATH beats cache and defaults; relative, empty and missing folders on it are passed over."""
    driver_library(root, COMPAT, "580.95.05")
    loader_cache(root, f"{LIB}/libcuda.so.1")
    order = found(site, root, f"compat::/missing:{COMPAT};{LIB}")
    assert order == [
        (f"{COMPAT}/libcuda.so.1", "580.95.05", "compat", "LD_LIBRARY_PATH"),
        (*OWN[:3], "LD_LIBRARY_PATH"),
    ]


@pytest.mark.parametrize("old_format", [False, True], ids=["new", "old-and-new"])
def test_the_cache_keeps_its_order(site: Site, root: Path, old_format: bool) -> None:
    """A compat folder that comes first in the cache shadows the driver's own (NVIDIA/nvidia-container-toolkit#1679)."""
    driver_library(root, COMPAT, "580.95.05")
    conf = "/etc/ld.so.conf.d/00-compat-1.conf"
    loader_config(root, **{"00-compat-1": f"{COMPAT}\n", "x86": f"{LIB}\n"})
    others = ("/usr/lib/libc.so.6", "/usr/lib/libcuda.so.10", f"{COMPAT}/libcuda.so.1", f"{LIB}/libcuda.so.1")
    loader_cache(root, *others, old_format=old_format)
    libraries = in_root(site, root)["libcuda"]["found"]
    assert [(one["kind"], one["where"], one["conf"]) for one in libraries] == [
        ("compat", "ld.so.cache", conf),
        ("driver", "ld.so.cache", "/etc/ld.so.conf.d/x86.conf"),
    ]


def test_without_a_cache_the_configuration_counts(site: Site, root: Path) -> None:
    """Folders come in the order of the included files' names, with comments, types and slashes taken off."""
    driver_library(root, COMPAT, "580.95.05")
    loader_config(root, b=f"{LIB}/ # the driver\n", a=f"# first\n\n  {COMPAT}=libc6\nhwcap 1 nosegneg\nrelative\n")
    assert [place[2:] for place in found(site, root)] == [("compat", "ld.so.conf"), ("driver", "ld.so.conf")]


def test_a_cached_file_that_is_gone_is_passed_over(site: Site, root: Path) -> None:
    """What the cache names and nobody mounted does not count (NVIDIA/nvidia-docker#400)."""
    loader_cache(root, f"{COMPAT}/libcuda.so.1")
    assert found(site, root) == [OWN]


def test_a_library_of_another_word_size_is_passed_over(site: Site, root: Path) -> None:
    """The loader skips a 32-bit library and goes on; so does the reader."""
    driver_library(root, "/usr/lib/i386-linux-gnu", "580.159.04", elf_class=1)
    assert found(site, root, "/usr/lib/i386-linux-gnu") == [OWN]


def test_a_stub_is_known_by_its_folder(site: Site, root: Path) -> None:
    """A link in another folder that leads to a toolkit's stub is a stub (sgl-project/sglang#2584)."""
    driver_library(root, STUBS, None)
    (root / "opt/links").mkdir()
    (root / "opt/links/libcuda.so.1").symlink_to(f"{STUBS}/libcuda.so")
    assert found(site, root, "/opt/links") == [("/opt/links/libcuda.so.1", None, "stub", "LD_LIBRARY_PATH"), OWN]


def test_installed_compat_packages(site: Site, root: Path) -> None:
    """Forward-compatibility libraries are listed wherever CUDA, NVIDIA's containers and wheels put them."""
    driver_library(root, COMPAT, "580.95.05")
    driver_library(root, "/usr/local/cuda-12.9/compat/lib.real", "575.57.08")
    inside = "/" + os.path.relpath(site.packages, root)
    driver_library(root, f"{inside}/nvidia/cuda_compat/lib", "590.48.01")
    (root / "usr/local/cuda").symlink_to("cuda-13.0")
    versions = [one["version"] for one in in_root(site, root)["libcuda"]["compat"]]
    assert sorted(versions) == ["575.57.08", "580.95.05", "590.48.01"]


def test_resolution_stays_inside_the_root(site: Site, root: Path, tmp_path: Path) -> None:
    """A link out of the root, and a variable that climbs out of it, lead to nothing outside."""
    driver_library(tmp_path, "/outside", "111.11")
    (root / "escape").symlink_to(tmp_path / "outside")
    (root / "etc").mkdir()
    (root / "etc/ld.so.conf").symlink_to(tmp_path / "outside.conf")
    (tmp_path / "outside.conf").write_text("/outside\n")
    assert found(site, root, f"/escape:/../../outside:{tmp_path}/outside") == [OWN]


def test_libcuda_is_looked_up_again_for_an_unchanged_environment(site: Site, root: Path) -> None:
    """The driver's files change beside the packages: each answer has them anew."""
    first = in_root(site, root)
    driver_library(root, COMPAT, "580.95.05")
    again = in_root(site, root, known=first["fingerprint"], environ={"LD_LIBRARY_PATH": COMPAT})
    assert again["unchanged"] is True
    assert [one["version"] for one in again["libcuda"]["found"]] == ["580.95.05", "580.159.04"]


def include_loop(etc: Path) -> None:
    (etc / "ld.so.conf").write_text("include ld.so.conf.d/*.conf\ninclude /etc/ld.so.conf\n")
    (etc / "ld.so.conf.d/a.conf").write_text("include /etc/ld.so.conf.d/*.conf ../etc/ld.so.conf\n/a\n")
    (etc / "ld.so.conf.d/b.conf").symlink_to("b.conf")
    (etc / "ld.so.conf.d/c").symlink_to("../ld.so.conf.d")
    (etc / "ld.so.conf.d/d.conf").write_text("include c/c/c/c/*.conf c/*.conf\n")


def pipes(etc: Path) -> None:
    os.mkfifo(etc / "ld.so.conf.d/pipe.conf")
    os.mkfifo(etc / "ld.so.cache")
    (etc / "ld.so.conf").write_text("include ld.so.conf.d/*\n")


def many_and_large(etc: Path) -> None:
    (etc / "ld.so.conf").write_text("include ld.so.conf.d/*\n")
    for index in range(300):
        (etc / f"ld.so.conf.d/{index}").write_text("/nowhere\n" * 20_000)
    with (etc / "ld.so.conf.d/sparse").open("wb") as file:
        file.truncate(1 << 40)


def not_a_configuration(etc: Path) -> None:
    (etc / "ld.so.conf").write_bytes(b"include [\xff*\ninclude\n/\x00\n/" + b"x" * 10_000 + b"\n\xff\xfe")
    (etc / "ld.so.conf.d/dir.conf").mkdir()


def lying_cache(etc: Path) -> None:
    header = b"glibc-ld.so.cache1.1" + b"\xff" * 28
    (etc / "ld.so.cache").write_bytes(header + b"\xff" * 24 * 1000)


def cut_cache(etc: Path) -> None:
    (etc / "ld.so.cache").write_bytes(b"ld.so-1.7.0\0glibc-ld.so.cache1.1\x01")


@pytest.mark.parametrize(
    "spoil",
    [include_loop, pipes, many_and_large, not_a_configuration, lying_cache, cut_cache],
    ids=lambda spoil: spoil.__name__,
)
def test_a_hostile_loader_configuration_costs_only_itself(site: Site, root: Path, spoil: Any) -> None:
    """Loops, pipes, endless and lying files of the loader neither hang nor fail the reading of the rest."""
    (root / "etc/ld.so.conf.d").mkdir(parents=True)
    spoil(root / "etc")
    assert found(site, root) == [OWN]


def hostile_pipe(folder: Path) -> None:
    os.mkfifo(folder / "libcuda.so.1")


def hostile_folder(folder: Path) -> None:
    (folder / "libcuda.so.1").mkdir()


def hostile_loop(folder: Path) -> None:
    (folder / "libcuda.so.1").symlink_to("libcuda.so.1")


@pytest.mark.parametrize("spoil", [hostile_pipe, hostile_folder, hostile_loop], ids=lambda spoil: spoil.__name__)
def test_what_is_no_file_is_no_library(site: Site, root: Path, spoil: Any) -> None:
    """A pipe, a folder or a loop of that name is never opened and never found."""
    (root / "bad").mkdir()
    spoil(root / "bad")
    assert found(site, root, "/bad") == [OWN]


# -- torch and the kernel wheel -------------------------------------------------------------------------


def test_the_kernel_wheels_builds(site: Site) -> None:
    """Folders count that hold a build of the operations, whatever else lies there (sgl-project/sglang#18203)."""
    assert read(site.python)["kernel"] == {"kind": "absent", "folders": [], "plain": False}
    site.kernel("sm100", "sm90", plain=True)
    site.write("sgl_kernel/sm75/README")
    site.write("sgl_kernel/smart/common_ops.abi3.so")
    assert read(site.python)["kernel"] == {"kind": "package", "folders": ["sm100", "sm90"], "plain": True}


def test_torch_for_amd_is_told_apart(site: Site) -> None:
    """A build for AMD states no CUDA and a HIP version."""
    site.write(
        "torch/version.py", "__version__ = '2.9.1+rocm6.4'\ncuda: Optional[str] = None\nhip = '6.4.43482-0f2d'\n"
    )
    torch = read(site.python)["torch"]
    assert (torch["cuda"], torch["cuda_stated"], torch["hip"]) == (None, True, "6.4.43482-0f2d")
