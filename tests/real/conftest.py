"""Real environments: packages from the configured index, each installed once and put together by hard links.

What was installed is kept in SIDECAR_REAL_CACHE, if that is set, for the next run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from tests.fakes import debian
from tests.fakes.interpreters import available
from tests.fakes.site import Site

TORCH = "2.13.0"
NEEDED = ("apache-tvm-ffi", "packaging", "requests", "nvidia-ml-py", "tqdm", "numpy")
ALONE = ("nvidia-cudnn-frontend",)
"""What FlashInfer imports besides torch; the latter without its requirements: nvidia-cutlass-dsl makes a difference."""
FULL_SGLANG = "0.5.16"
FULL_PYTHON = "3.12"

_TABLES: dict[str, list[tuple[str, ...]]] = {}


def row(table: str, *cells: object) -> None:
    """Add a line to a table that is printed when all tests are done."""
    _TABLES.setdefault(table, []).append(tuple(str(cell) for cell in cells))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables: their numbers are what one runs these tests for."""
    for title, rows in _TABLES.items():
        terminalreporter.section(title)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for cells in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            terminalreporter.write_line(line.rstrip())


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """Run an installer; its standard output. Fails with the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, (done.stderr or done.stdout)[-2000:]
    return done.stdout


def pip(*arguments: str) -> None:
    """The pip of the tests' own environment."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def interpreter(minor: int) -> str:
    """An interpreter of this machine; the test is skipped where there is none."""
    found = [*available(), *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))]
    for path in found:
        asked = subprocess.run([path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, check=False)
        if asked.stdout.strip() == str(minor).encode():
            return path
    pytest.skip(f"this machine has no Python 3.{minor}; name one in SIDECAR_TEST_PYTHONS")


class Shelf:
    """Installed packages, each in a folder of its own, from which environments are put together."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _once(self, name: str) -> tuple[Path, bool]:
        folder = self.root / name
        return folder, (folder / "complete").exists()

    def torch(self, python: str = sys.executable) -> Path:
        """The site-packages of an environment with torch and all that FlashInfer imports, without FlashInfer."""
        version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        root, done = self._once(f"torch-{TORCH}-py{version}")
        if not done:
            if python == sys.executable:
                venv.create(root, with_pip=False, clear=True)
            else:
                run(python, "-m", "venv", "--without-pip", "--clear", str(root))
            pip("--python", str(root / "bin/python"), "install", f"torch=={TORCH}", *NEEDED)
            pip("--python", str(root / "bin/python"), "install", "--no-deps", *ALONE)
            (root / "complete").touch()
        return root / f"lib/python{version}/site-packages"

    def package(self, requirement: str, *, dependencies: bool = False) -> Path:
        """A folder that holds one distribution, with what it requires where that is asked for."""
        folder, done = self._once(requirement.replace("==", "-"))
        if not done:
            pip("install", *([] if dependencies else ["--no-deps"]), "--target", str(folder), requirement)
            (folder / "complete").touch()
        return folder

    def source(self, requirement: str, module: str) -> Path:
        """The module of a distribution that exists as a source archive only, unpacked and not built."""
        folder, done = self._once(requirement.replace("==", "-") + "-source")
        if not done:
            python = str(self.torch().parents[2] / "bin/python")
            options = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder))
            pip("--python", python, "download", *options, requirement)
            archive = next(folder.glob("*.tar.gz"))
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
            unpacked = folder / archive.name.removesuffix(".tar.gz")
            for each in (unpacked / module, *unpacked.glob("*.egg-info")):
                shutil.move(each, folder / each.name)
            shutil.rmtree(unpacked)
            archive.unlink()
            (folder / "complete").touch()
        return folder


def assemble(root: Path, *folders: Path, python: str = sys.executable, without: tuple[str, ...] = ()) -> Site:
    """An environment that holds the contents of folders, except the top-level names that match a pattern."""
    site = Site(root, base=python)
    for folder in folders:
        for entry in folder.iterdir():
            if entry.name in {"complete", "bin"} or any(entry.match(pattern) for pattern in without):
                continue
            place(entry, site.packages / entry.name)
    return site


def place(source: Path, target: Path) -> None:
    """A file or folder at another place: by hard links, since installers replace files and never write into them."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)
    else:
        _link(str(source), str(target))


def _link(source: str, target: str) -> None:
    # A file that is there already is a link itself: written to, it would change where it came from.
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """What was installed, kept for the next run where SIDECAR_REAL_CACHE says so."""
    given = os.environ.get("SIDECAR_REAL_CACHE")
    folder = Path(given).resolve() if given else tmp_path_factory.mktemp("real")
    folder.mkdir(parents=True, exist_ok=True)
    return Shelf(folder)


@pytest.fixture(scope="session")
def full(shelf: Shelf) -> Path:
    """The interpreter of a whole SGLang environment of 8 GB; only with FULL=1. Tests leave it as it is."""
    if not os.environ.get("FULL"):
        pytest.skip("needs a whole SGLang environment of 8 GB: run `make test-real FULL=1`")
    root = shelf.root / f"sglang-{FULL_SGLANG}-py{FULL_PYTHON}"
    if not (root / "bin/python").exists():
        install_sglang(root)
    return root / "bin/python"


@pytest.fixture
def second(full: Path, tmp_path: Path) -> Site:
    """Another whole environment, for tests that let installers loose on it."""
    return install_sglang(tmp_path / "second")


def install_sglang(root: Path) -> Site:
    """Install SGLang with all that it requires; by uv where there is one, which takes a minute instead of five."""
    site = Site(root, base=interpreter(int(FULL_PYTHON.partition(".")[2])))
    requirement = f"sglang=={FULL_SGLANG}"
    if uv := find_uv():
        # Copied: hard links to uv's cache would change the times of every environment that shares them.
        run(uv, "pip", "install", "--link-mode", "copy", "--python", site.python, requirement)
    else:
        pip("--python", site.python, "install", requirement)
    return site


def find_uv() -> str | None:
    """The uv of the tests' environment, or of this machine."""
    return shutil.which("uv", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))


def overlay(full: Path, root: Path, *folders: Path, without: tuple[str, ...] = ()) -> Site:
    """An environment with everything of the whole one except ``without``, and the contents of ``folders``.

    What comes from the whole one is linked as folders, so that nothing in it is touched, not even its times. So
    nothing but the packages in ``without`` may be installed into it or removed: an installer would follow the links.
    """
    source = next(full.parent.parent.glob("lib/python3.*/site-packages"))
    site = Site(root, base=str(full))
    for entry in source.iterdir():
        if not any(entry.match(pattern) for pattern in without):
            (site.packages / entry.name).symlink_to(entry)
    for folder in folders:
        for entry in folder.iterdir():
            if entry.name not in {"complete", "bin"}:
                place(entry, site.packages / entry.name)
    return site


@pytest.fixture(scope="session")
def libcuda(shelf: Shelf) -> Path:
    """A folder with NVIDIA's own libcuda.so.1, without which SGLang's kernels cannot even be imported."""
    folder = shelf.root / "libcuda1"
    if not folder.exists():
        debian.download("libcuda1", folder)
    return next((folder / "root").rglob("libcuda.so.1")).parent
