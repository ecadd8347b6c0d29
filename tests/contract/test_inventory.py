"""What the static reader says of distributions, modules and what lies around them, over small real trees."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.reader import in_root, read
from tests.fakes.site import Site, good

FLASHINFER = {
    "flashinfer/__init__.py": "",
    "flashinfer/mamba/__init__.py": "x = 1\n",
    "flashinfer/data/include/a.cuh": "// kernel\n",
    "flashinfer/tests/test_a.py": "",
    "flashinfer/data/configs/N=1,K=2.json": "{}",
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty environment."""
    return Site(tmp_path / "root/opt/venv")


# -- distributions -----------------------------------------------------------------------------------------


def test_every_distribution_counts(site: Site) -> None:
    """All are listed, tracked or not, with local tags, in whatever form they were registered."""
    site.dist("torch", "2.11.0+cu130")
    site.dist("Flask.Cors", "4.0")
    site.write("legacy-1.2-py3.11.egg-info", "Name: legacy\nVersion: 1.2.post1\n")
    site.write("source.egg-info/PKG-INFO", "Name: source\nVersion: 0.1.dev3\n")
    site.write("bare-0.2.3+cu121torch2.5.dist-info/METADATA", "Name: bare\n")
    site.write("nameless.dist-info/METADATA", "Name: Other_Name\nVersion: 7\n")
    site.write("~orch-2.10.0.dist-info/METADATA", "Name: torch\nVersion: 2.10.0\n")
    site.write("old-3.1-py3.11.egg/EGG-INFO/PKG-INFO", "Name: old\nVersion: 3.1\n")
    site.write("easy-install.pth", "old-3.1-py3.11.egg\n")
    result = read(site.python)
    assert result["distributions"] == {
        "torch": "2.11.0+cu130",
        "flask-cors": "4.0",
        "legacy": "1.2.post1",
        "source": "0.1.dev3",
        "bare": "0.2.3+cu121torch2.5",
        "other-name": "7",
        "old": "3.1",
    }
    assert result["distribution_count"] == 7


def test_builds_of_one_version_are_told_apart(site: Site, tmp_path: Path) -> None:
    """The mark of a build depends on the files of the wheel, not on the installer, its order or byte code."""
    folder = site.install("flashinfer-python", "0.6.14", FLASHINFER)
    mark = read(site.python)["builds"]["flashinfer-python"]
    record = site.packages / folder / "RECORD"
    lines = record.read_text().splitlines()
    record.write_text(
        "\r\n".join([*reversed(lines), "flashinfer/__pycache__/__init__.cpython-312.pyc,,", "../bin/x,sha256=y,1"])
    )
    assert read(site.python)["builds"]["flashinfer-python"] == mark
    site.install("flashinfer-python", "0.6.14", {**FLASHINFER, "flashinfer/__init__.py": "# another build\n"})
    assert read(site.python)["builds"]["flashinfer-python"] != mark


def test_twice_in_one_folder(site: Site) -> None:
    """A name that one folder registers twice is named with both versions (XuehaiPan/nvitop#44)."""
    site.dist("attrs", "23.1.0")
    site.dist("attrs", "24.2.0")
    assert sorted(read(site.python)["duplicates"]["attrs"]) == ["23.1.0", "24.2.0"]


def test_in_two_folders_only_what_matters(site: Site, tmp_path: Path) -> None:
    """A tracked distribution that another folder shadows is named, the effective version first; others are not."""
    user = Site(tmp_path / "user")
    for name in ("flashinfer-python", "attrs"):
        user.dist(name, "0.6.4")
        site.dist(name, "0.6.14")
    duplicates = read(site.python, environ={"PYTHONPATH": str(user.packages)})["duplicates"]
    assert duplicates == {"flashinfer-python": ["0.6.4", "0.6.14"]}


def test_an_editable_install_is_no_duplicate(site: Site, tmp_path: Path) -> None:
    """An editable install is registered by its source folder too, and is one install (hiyouga/LlamaFactory#8544)."""
    source = tmp_path / "source"
    (source / "sglang.egg-info").mkdir(parents=True)
    (source / "sglang.egg-info/PKG-INFO").write_text("Name: sglang\nVersion: 0.5.9.dev1\n")
    site.dist("sglang", "0.5.16")
    site.write("sglang-0.5.16.dist-info/direct_url.json", '{"url": "file:///s", "dir_info": {"editable": true}}')
    site.write("__editable__.sglang.pth", f"{source}\n")
    site.write("old-tool.egg-link", f"{source}\n")
    result = read(site.python)
    assert result["duplicates"] == {}
    assert result["editable"] == ["old-tool", "sglang"]


def test_two_owners_of_a_module(site: Site) -> None:
    """Two distributions that bring the same module as file and as package are its owners (XuehaiPan/nvitop#13)."""
    site.install("nvidia-ml-py", "13.580.82", {"pynvml.py": "", "example.py": ""})
    site.install("pynvml", "11.4.1", {"pynvml/__init__.py": "", "example.py": "", "pynvml/smi.py": ""})
    assert read(site.python)["owners"] == {"pynvml": ["nvidia-ml-py", "pynvml"]}


def test_two_owners_of_a_library(site: Site) -> None:
    """Wheels of two CUDA majors share a path (GoogleCloudPlatform/scientific-computing-examples#157)."""
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        site.install(name, "2.28.9", {"nvidia/__init__.py": "", "nvidia/nccl/lib/libnccl.so.2": name})
    site.install("nvidia-cudnn-cu13", "9.19", {"nvidia/__init__.py": "", "nvidia/cudnn/lib/libcudnn.so.9": ""})
    assert read(site.python)["owners"] == {"nvidia/nccl": ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]}


def test_shared_names_that_are_no_conflict(site: Site) -> None:
    """Parts of a namespace, licences, loose build files and folders of headers are shared on purpose."""
    site.install(
        "flash-attn-4", "4.0.0b19", {"flash_attn/cute/__init__.py": "", "build_backend.py": "1", "LICENSE": ""}
    )
    site.install("flash-attn", "2.8.3", {"flash_attn/__init__.py": "", "build_backend.py": "22", "LICENSE": "x"})
    for part in ("base", "core"):
        site.install(f"nvidia-cutlass-dsl-libs-{part}", "4.6.0", {f"nvidia_cutlass_dsl/{part}/a.py": ""})
    result = read(site.python)
    assert (result["owners"], result["damaged"]) == ({}, {})


def test_an_undamaged_install_is_silent(site: Site) -> None:
    """Files as RECORD lists them, quoted names and removed tests and byte code among them, are no damage."""
    site.install("flashinfer-python", "0.6.14", {**FLASHINFER, "flashinfer/__pycache__/a.cpython-312.pyc": ""})
    site.remove("flashinfer/__pycache__")
    site.remove("flashinfer/tests")
    assert read(site.python)["damaged"] == {}


def test_missing_and_resized_files(site: Site) -> None:
    """What is gone or of another size is counted and named, code first."""
    site.install("flashinfer-python", "0.6.14", FLASHINFER)
    site.remove("flashinfer/data/include/a.cuh")
    site.write("flashinfer/mamba/__init__.py", "")
    site.remove("flashinfer/__init__.py")
    for folder, at in (("flashinfer", 1_700_000_000), ("flashinfer/data/include", 1_700_000_100)):
        os.utime(site.packages / folder, (at, at))
    assert read(site.python)["damaged"] == {
        "flashinfer-python": {
            "missing": 2,
            "resized": 1,
            "examples": ["flashinfer/__init__.py", "flashinfer/mamba/__init__.py", "flashinfer/data/include/a.cuh"],
            "no_record": False,
            "missing_since": 1_700_000_100.0,
        }
    }


def test_a_file_that_another_removal_took(site: Site) -> None:
    """After the removal of pynvml the one file of nvidia-ml-py is gone (wookayin/gpustat#153)."""
    site.install("nvidia-ml-py", "13.580.82", {"pynvml.py": "x"})
    site.remove("pynvml.py")
    assert read(site.python)["damaged"]["nvidia-ml-py"]["examples"] == ["pynvml.py"]


def test_a_registration_without_files(site: Site) -> None:
    """A half-removed package whose folder is gone has lost every file."""
    site.install("sglang-kernel", "0.4.5", {"sgl_kernel/__init__.py": "", "sgl_kernel/sm90/common_ops.abi3.so": "b"})
    site.remove("sgl_kernel")
    assert read(site.python)["damaged"]["sglang-kernel"]["missing"] == 2


@pytest.mark.parametrize(("installer", "damaged"), [("pip\n", True), ("uv", True), ("conda", False)])
def test_a_missing_record(site: Site, installer: str, damaged: bool) -> None:
    """Pip and uv write a RECORD and its lack is stated; conda and eggs need none."""
    folder = site.install("flashinfer-python", "0.6.14", {"flashinfer/__init__.py": ""}, record=False)
    site.write(f"{folder}/INSTALLER", installer)
    site.write("torch-2.11.0-py3.11.egg-info/PKG-INFO", "Version: 2.11.0\n")
    result = read(site.python)["damaged"]
    assert result == ({"flashinfer-python": {"no_record": True}} if damaged else {})


def test_files_linked_into_a_cache(site: Site, tmp_path: Path) -> None:
    """Files that an installer linked count by what they lead to; a dangling link is a missing file."""
    site.install("flashinfer-python", "0.6.14", FLASHINFER)
    for number, name in enumerate(("__init__.py", "mamba/__init__.py")):
        path = site.packages / "flashinfer" / name
        path.rename(tmp_path / f"cached{number}")
        path.symlink_to(tmp_path / f"cached{number}")
    assert read(site.python)["damaged"] == {}


def test_a_folder_that_pip_left_behind(site: Site) -> None:
    """A folder that no distribution owns is a leftover; one that a namespace distribution owns is not."""
    site.write("flashinfer/data/stray.txt")
    site.write("sgl_kernel/__pycache__/x.pyc")
    site.install("flash-attn-4", "4.0.0b19", {"flash_attn/cute/__init__.py": ""})
    result = read(site.python)
    assert (result["leftovers"], result["unregistered"]) == (["flashinfer", "sgl_kernel"], [])


def test_modules_without_metadata(site: Site) -> None:
    """A module that is importable and registered by nothing is named so (sgl-project/sglang#4812)."""
    site.write("sglang/__init__.py")
    site.write("pynvml.py")
    site.install("renamed-fork", "1.0", {"flashinfer/__init__.py": ""})
    site.dist("nvidia-ml-py3", "7.352.0")
    assert read(site.python)["unregistered"] == ["sglang"]


def test_changes_are_dated(site: Site) -> None:
    """The latest change of a distribution's files or registration is told in seconds."""
    site.install("flashinfer-python", "0.6.14", FLASHINFER)
    path = site.packages / "flashinfer/mamba/__init__.py"
    later = path.stat().st_mtime + 1000
    path.write_text("x = 2\n")
    os.utime(path, (later, later))
    assert read(site.python)["changed_at"]["flashinfer-python"] == pytest.approx(later)
    # Files from a package cache carry old times; the folder that registers them is made at install.
    os.utime(path, (1, 1))
    folder = next(site.packages.glob("flashinfer_python-*.dist-info"))
    os.utime(folder, (later + 1000, later + 1000))
    assert read(site.python)["changed_at"]["flashinfer-python"] == pytest.approx(later + 1000)


def test_another_name_or_mode_of_a_file_is_no_change(site: Site, tmp_path: Path) -> None:
    """A cache that links a file elsewhere, or a chmod, moves its ctime and changes nothing of what is installed."""
    site.install("flashinfer-python", "0.6.14", FLASHINFER)
    path = site.packages / "flashinfer/mamba/__init__.py"
    first, ctime = read(site.python)["changed_at"]["flashinfer-python"], path.stat().st_ctime_ns
    (tmp_path / "elsewhere.py").hardlink_to(path)
    path.chmod(0o600)
    assert path.stat().st_ctime_ns > ctime
    assert read(site.python)["changed_at"]["flashinfer-python"] == first


# -- modules -----------------------------------------------------------------------------------------------


def kinds(result: dict[str, Any], *names: str) -> list[str]:
    return [result["modules"][name]["kind"] for name in names]


def test_kinds_of_modules(site: Site) -> None:
    """Packages, files, extensions, namespaces and absent ones are told apart at any depth."""
    site.write("sgl_kernel/__init__.py")
    site.write("sgl_kernel/flash_attn.py")
    site.write("sgl_kernel/flash_ops.abi3.so", "binary")
    site.write("flash_attn/cute/__init__.py")
    result = read(site.python)
    names = ("sgl_kernel", "sgl_kernel.flash_attn", "sgl_kernel.flash_ops", "flash_attn", "flash_attn.cute", "quack")
    assert kinds(result, *names) == ["package", "module", "extension", "namespace", "package", "absent"]
    assert result["modules"]["sgl_kernel.flash_ops"]["places"] == [str(site.packages / "sgl_kernel/flash_ops.abi3.so")]


def test_an_extension_for_another_python_does_not_count(site: Site) -> None:
    """The interpreter passes over an extension module that was built for another release of it."""
    site.write("flash_attn_2_cuda.cpython-36m-x86_64-linux-gnu.so", "binary")
    assert kinds(read(site.python), "flash_attn_2_cuda") == ["absent"]
    tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    site.write(f"flash_attn_2_cuda.{tag}-x86_64-linux-gnu.so", "binary")
    assert kinds(read(site.python), "flash_attn_2_cuda") == ["extension"]


def test_a_regular_package_hides_what_lies_elsewhere(site: Site, tmp_path: Path) -> None:
    """FlashAttention 2 on one entry of the path hides flash_attn.cute on another, in whichever order."""
    other = tmp_path / "other"
    (other / "flash_attn").mkdir(parents=True)
    (other / "flash_attn/__init__.py").write_text("")
    site.write("flash_attn/cute/__init__.py")
    result = read(site.python, environ={"PYTHONPATH": str(other)})
    assert kinds(result, "flash_attn", "flash_attn.cute") == ["package", "hidden"]
    assert result["modules"]["flash_attn.cute"]["places"] == [str(site.packages / "flash_attn/cute")]
    (other / "flash_attn/__init__.py").write_text("__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n")
    assert kinds(read(site.python, environ={"PYTHONPATH": str(other)}), "flash_attn.cute") == ["package"]
    (site.packages / "flash_attn/__init__.py").write_text("")
    assert kinds(read(site.python), "flash_attn.cute") == ["package"]


@pytest.mark.parametrize(
    ("folder", "pth"),
    [
        ("python_packages", "nvidia_cutlass_dsl/python_packages\n"),
        (
            "dsl_packages",
            (
                "import sys, os, nvidia_cutlass_dsl; "
                "sys.path.insert(0, os.path.join(nvidia_cutlass_dsl.__path__[0], 'dsl_packages'))"
            ),
        ),
    ],
)
def test_cutlass_is_found_by_its_pth_file(site: Site, folder: str, pth: str) -> None:
    """Both ways in which nvidia-cutlass-dsl extends the path are followed, neither is run (NVIDIA/cutlass#3001)."""
    site.write(f"nvidia_cutlass_dsl/{folder}/cutlass/cute/__init__.py")
    site.write(f"nvidia_cutlass_dsl/{folder}/cutlass/__init__.py")
    assert kinds(read(site.python), "cutlass") == ["absent"]
    site.write("nvidia_cutlass_dsl.pth", pth)
    result = read(site.python)
    assert kinds(result, "cutlass", "cutlass.cute") == ["package", "package"]
    assert result["path_code"] == []
    copied = read(Site(site.root.parent / "other").python, environ={"PYTHONPATH": str(site.packages)})
    assert kinds(copied, "cutlass") == ["absent"]


# -- the import path ---------------------------------------------------------------------------------------


def test_the_servers_folder(site: Site, tmp_path: Path) -> None:
    """Relative entries of PYTHONPATH mean the server's folder, which leads the path only as with python -m."""
    (tmp_path / "work/lib/quack").mkdir(parents=True)
    (tmp_path / "work/lib/quack/__init__.py").write_text("")
    (tmp_path / "work/einops.py").write_text("")

    def found(**spec: Any) -> list[str]:
        return kinds(read(site.python, **spec), "quack", "einops")

    cwd = str(tmp_path / "work")
    assert found() == ["absent", "absent"]
    assert found(cwd=cwd) == ["absent", "absent"]
    assert found(cwd=cwd, cwd_on_path=True) == ["absent", "module"]
    assert found(cwd=cwd, environ={"PYTHONPATH": "lib"}) == ["package", "absent"]
    assert found(environ={"PYTHONPATH": "lib"}) == ["absent", "absent"]
    safe = {"PYTHONSAFEPATH": "1", "PYTHONPATH": "lib"}
    assert found(cwd=cwd, cwd_on_path=True, environ=safe) == ["package", "absent"]


def test_archives_on_the_path_are_passed_over(site: Site, tmp_path: Path) -> None:
    """An entry that is no folder neither hides anything nor is opened."""
    (tmp_path / "packages.zip").write_bytes(b"PK\x03\x04")
    site.write("einops.py")
    assert kinds(read(site.python, environ={"PYTHONPATH": str(tmp_path / "packages.zip")}), "einops") == ["module"]


@pytest.mark.parametrize("layout", ["lib/python3.12/site-packages", "lib/python3/dist-packages"])
def test_layouts_without_a_virtual_environment(tmp_path: Path, layout: str) -> None:
    """Conda's and Debian's folders are found inside a root (sgl-project/sglang#30612)."""
    prefix = tmp_path / ("opt/conda" if "site" in layout else "usr")
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python3").symlink_to("python3.12")
    (prefix / "bin/python3.12").write_text("")
    package = prefix / layout / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    result = read(sys.executable, root=str(tmp_path), python=None)
    assert (result["flashinfer"]["kind"], result["python_version"]) == ("package", "3.12")


# -- the toolkit -------------------------------------------------------------------------------------------


def toolkit(root: Path, place: str, *, headers: int | None = 13000, version: str | None = None) -> str:
    """A CUDA toolkit at a place inside the root; returns the place."""
    home = root / place.lstrip("/")
    (home / "bin").mkdir(parents=True)
    (home / "bin/nvcc").write_text("#!/bin/sh\necho run > /ran\n")
    (home / "bin/nvcc").chmod(0o755)
    if headers is not None:
        (home / "include").mkdir()
        (home / "include/cuda_runtime.h").write_text("")
        (home / "include/cuda.h").write_text(f"/* CUDA */\n#define CUDA_VERSION {headers}\n")
    if version is not None:
        (home / "version.json").write_text(f'{{"cuda_nvcc": {{"name": "CUDA NVCC", "version": "{version}"}}}}')
    return place


def tools(site: Site, root: Path, **environ: str) -> dict[str, Any]:
    return in_root(site, root, environ=environ, environ_seen=True)["toolchain"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root in which the environment lies."""
    return tmp_path / "root"


def test_cuda_home_decides(site: Site, root: Path) -> None:
    """The toolkit that CUDA_HOME names is used, whatever else is there, and its release is read, not run."""
    toolkit(root, "/usr/local/cuda")
    home = toolkit(root, "/opt/cuda-12.8", headers=12080, version="12.8.93")
    found = tools(site, root, CUDA_HOME=home, PATH="/usr/local/cuda/bin")
    assert (found["nvcc"], found["nvcc_source"]) == (f"{home}/bin/nvcc", "cuda-home")
    assert (found["release"], found["headers_release"], found["headers"]) == ("12.8", "12.8", True)
    assert not (root / "ran").exists()


@pytest.mark.parametrize("value", [":/usr/local/cuda", "/nowhere", "cuda"])
def test_a_malformed_cuda_home(site: Site, root: Path, value: str) -> None:
    """FlashInfer takes CUDA_HOME as it stands; what is no folder has no compiler (vllm-project/vllm#36077)."""
    toolkit(root, "/usr/local/cuda")
    found = tools(site, root, CUDA_HOME=value)
    assert (found["cuda_home"], found["cuda_home_ok"], found["nvcc"]) == (value, False, None)


def test_the_path_comes_before_the_default(site: Site, root: Path) -> None:
    """Without CUDA_HOME an nvcc on PATH decides, then /usr/local/cuda (flashinfer-ai/flashinfer#1919)."""
    toolkit(root, "/usr/local/cuda")
    toolkit(root, "/opt/cuda", headers=None)
    found = tools(site, root, PATH="relative:/nowhere:/opt/cuda/bin")
    assert (found["nvcc"], found["nvcc_source"], found["headers"]) == ("/opt/cuda/bin/nvcc", "path", False)
    assert tools(site, root, PATH="/bin")["nvcc_source"] == "default"
    assert tools(site, root, CUDA_PATH="/opt/cuda")["nvcc_source"] == "cuda-home"


def test_a_compiler_in_a_wheel(site: Site, root: Path) -> None:
    """A wheel's compiler is named as one, with the release of its registration, which its headers need not share."""
    inside = "/" + str(site.packages.relative_to(root))
    toolkit(root, f"{inside}/nvidia/cu13")
    site.dist("nvidia-cuda-nvcc", "13.5.37")
    found = tools(site, root, PATH="/bin")
    assert (found["nvcc_source"], found["release"], found["headers_release"]) == ("wheel", "13.5", "13.0")
    assert tools(site, root, CUDA_HOME=f"{inside}/nvidia/cu13")["release"] == "13.5"


def test_no_compiler_at_all(site: Site, root: Path) -> None:
    """Nothing found is said so where the server's variables are known, and left open where they are not."""
    found = tools(site, root, PATH="/bin")
    assert (found["nvcc"], found["headers"], found["ninja"]) == (None, None, False)
    unseen = in_root(site, root, environ={"PATH": "/bin"})["toolchain"]
    assert (unseen["environ_seen"], unseen["ninja"]) == (False, None)


def test_ninja_beside_the_interpreter(site: Site, root: Path) -> None:
    """A ninja in the environment's bin counts only where PATH leads there: FlashInfer starts it by name."""
    (site.root / "bin/ninja").write_text("")
    (site.root / "bin/ninja").chmod(0o755)
    inside = "/" + str((site.root / "bin").relative_to(root))
    away, there = tools(site, root, PATH="/bin"), tools(site, root, PATH=inside)
    assert (away["ninja"], away["ninja_beside"]) == (False, True)
    assert there["ninja"] is True


# -- cache and cubins --------------------------------------------------------------------------------------

USER: dict[str, Any] = {"uid": 4321, "gid": 4321, "groups": [4322]}


def cache(site: Site, root: Path, user: Any = USER, **environ: str) -> dict[str, Any]:
    return in_root(site, root, environ=environ, environ_seen=True, user=user)["cache"]


def test_a_cache_that_may_be_made(site: Site, root: Path) -> None:
    """The nearest folder that exists decides by owner, group or others; the server's root may write anywhere."""
    home = root / "home/user"
    home.mkdir(parents=True)
    home.chmod(0o755)
    place = {"path": "/home/user/.cache/flashinfer"}
    assert cache(site, root, HOME="/home/user") == {**place, "writable": False, "problem": "permission"}
    assert cache(site, root, {**USER, "uid": 0}, HOME="/home/user") == {**place, "writable": True, "problem": None}
    assert cache(site, root, None, HOME="/home/user") == {**place, "writable": None, "problem": None}
    if os.getuid() == 0:
        os.chown(home, USER["uid"], 0)
    owner = {**USER, "uid": home.stat().st_uid}
    assert cache(site, root, owner, HOME="/home/user")["writable"] is True
    home.chmod(0o707)
    assert cache(site, root, {**USER, "uid": 5432}, HOME="/home/user")["writable"] is True
    home.parent.chmod(0o700)
    assert cache(site, root, HOME="/home/user/")["problem"] == "permission"


def test_a_cache_by_group(site: Site, root: Path) -> None:
    """A supplementary group's right to write is the server's."""
    base = root / "srv"
    base.mkdir()
    base.chmod(0o070)
    user = {**USER, "groups": [base.stat().st_gid]}
    assert cache(site, root, user, HOME="/nowhere", FLASHINFER_WORKSPACE_BASE="/srv") == {
        "path": "/srv/.cache/flashinfer",
        "writable": True,
        "problem": None,
    }


def test_a_cache_below_a_file(site: Site, root: Path) -> None:
    """A file where a folder must be is named as the problem."""
    (root / "home").write_text("")
    assert cache(site, root, HOME="/home/user")["problem"] == "not-a-folder"


def test_a_user_without_a_home(site: Site, root: Path) -> None:
    """Without HOME the user database decides; a user in neither has no home, and no variable mends that."""
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:4321:1::/var/nobody:\n")
    assert cache(site, root)["path"] == "/var/nobody/.cache/flashinfer"
    lost = cache(site, root, {**USER, "uid": 99}, FLASHINFER_WORKSPACE_BASE="/tmp")
    assert lost == {"path": None, "writable": False, "problem": "no-home"}


def test_a_cache_that_nobody_can_tell(site: Site, root: Path) -> None:
    """Where the variables are not the server's own nothing is said of its cache."""
    result = in_root(site, root, environ={"HOME": "/root"}, user=USER)
    assert (result["cache"], result["cubins"]) == ({"path": None, "writable": None, "problem": None}, None)


def test_cubins_where_flashinfer_looks(site: Site, root: Path) -> None:
    """The package comes first, then the variable, then the cache (sgl-project/sglang#10933)."""

    def count(**environ: str) -> int | None:
        return in_root(site, root, environ={"HOME": "/home", **environ}, environ_seen=True, user=USER)["cubins"]

    assert count() == 0
    for place, number in (("home/.cache/flashinfer/cubins/a", 1), ("srv/cubins", 2)):
        (root / place).mkdir(parents=True)
        for index in range(number):
            (root / place / f"{index}.cubin").write_text("")
    assert (count(), count(FLASHINFER_CUBIN_DIR="/srv/cubins"), count(FLASHINFER_CUBIN_DIR="/none")) == (1, 2, 0)
    site.companion("flashinfer-cubin", "0.6.14")
    for index in range(3):
        site.write(f"flashinfer_cubin/cubins/x/{index}.cubin")
    assert count(FLASHINFER_CUBIN_DIR="/srv/cubins") == 3


def test_what_lies_around_is_read_anew(tmp_path: Path) -> None:
    """An unchanged environment is answered with the present toolkit and cache all the same."""
    root = tmp_path / "root"
    site = good(root / "opt/venv")
    first = in_root(site, root, environ_seen=True)
    toolkit(root, "/usr/local/cuda")
    again = in_root(site, root, environ_seen=True, known=first["fingerprint"])
    assert again["unchanged"] is True
    assert (first["toolchain"]["nvcc"], again["toolchain"]["nvcc"]) == (None, "/usr/local/cuda/bin/nvcc")
