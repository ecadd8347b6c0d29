"""Images and pods for the tests that run them, built once; and the table of what they cost."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.fakes import containers, kernel
from tests.fakes.containers import Images, Pod
from tests.fakes.nvml import Scenario
from tests.fakes.site import Site, driver_library

ROOT = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3.11"
"""The interpreter of the images that the tests build; Debian 12's."""

_TABLE: list[tuple[str, str]] = []
_STORY: list[tuple[str, str]] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables: their numbers are part of what one runs these tests for."""
    for title, table in (("images and pods", _TABLE), ("faults", _STORY)):
        if table:
            terminalreporter.section(title)
            for what, value in table:
                terminalreporter.write_line(f"{what:<60} {value}")


@pytest.fixture(scope="session")
def measured() -> Callable[[str, str], None]:
    """Give what adds a line to the table that is printed when all tests are done."""
    return lambda what, value: _TABLE.append((what, value))


@pytest.fixture(scope="session")
def told() -> Callable[[str, str], None]:
    """Give what adds a line to the table of faults, which is printed when all tests are done."""
    return lambda what, value: _STORY.append((what, value))


@pytest.fixture(scope="session")
def pods_possible() -> None:
    """Fail, rather than skip, where pods cannot run: whoever selects these tests wants them run."""
    if reason := containers.why_not():
        pytest.fail(f"{reason}.", pytrace=False)


@pytest.fixture
def memory_counters() -> None:
    """Skip where the kernel does not count what the test reads."""
    if not Path("/sys/fs/cgroup/memory/memory.usage_in_bytes").exists():
        pytest.skip("it reads the memory counters of control groups of version 1, and this machine has version 2")


@pytest.fixture(scope="session")
def images(pods_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """The images: ``builder``, ``runtime``, ``sidecar``, ``sglang`` and ``overlaid``.

    SIDECAR_POD_CACHE=FOLDER keeps the Debian that they are built in for the next run.
    """
    given = os.environ.get("SIDECAR_POD_CACHE")
    kept = Path(given) if given else tmp_path_factory.mktemp("pods")
    kept.mkdir(parents=True, exist_ok=True)
    work = tmp_path_factory.mktemp("images")
    with Images(work / "images") as made:
        builder = containers.builder_root(kept)
        made.take("builder", builder)
        made.take("runtime", containers.runtime_root(builder, work))
        dockerfiles = ROOT / "deploy/image"
        # Debian's own Python links a library that needs 2.36; the images of python.org's link their own copy of it.
        arguments = {"PYTHON_IMAGE": "localhost/builder", "RUNTIME_IMAGE": "localhost/runtime", "GLIBC": "2.36"}
        made.build("sidecar", dockerfiles / "Dockerfile", ROOT, VERSION="0.0.test", **arguments)
        made.take_above("sglang", "builder", server_files(work / "server"), {"PATH": f"/opt/sglang/bin:{os.defpath}"})
        overlay = {"SGLANG_IMAGE": "localhost/sglang", "SIDECAR_IMAGE": "localhost/sidecar"}
        made.build("overlaid", dockerfiles / "Dockerfile.overlay", ROOT, **overlay)
        if not given:
            shutil.rmtree(builder, ignore_errors=True)
        yield made


def server_files(folder: Path) -> Path:
    """What a server's image has besides Debian: an environment in which all is well, and a server's program."""
    site = Site(folder / "opt/sglang", base=PYTHON)
    (site.root / "bin/python3").symlink_to("python")
    kernel.wheel(site)
    for variant in ("sm90", "sm100"):
        kernel.operations(site, variant)
    site.flashinfer("0.6.14")
    site.dist("torch", "2.11.0")
    site.write("sglang/__init__.py")
    site.write("sglang/launch_server.py", (ROOT / "tests/fakes/launch_server.py").read_text())
    return folder


class Node:
    """What a machine with a driver gives its containers: NVIDIA's libraries, which the runtime injects.

    ``driver`` is the scenario that the fake NVML follows. With ``asking`` a container asks for all of it.
    """

    asking: ClassVar = [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
    ]
    variables: ClassVar = {"FAKE_NVML_SCENARIO": "/run/nvml/scenario"}

    def __init__(self, folder: Path, library: Path) -> None:
        (folder / "nvml").mkdir(parents=True)
        self.driver = Scenario(folder / "nvml/scenario", gpus=1)
        driver_library(folder, "/lib")
        nvml, cuda = library / "libnvidia-ml.so.580.159.04", folder / "lib/libcuda.so.580.159.04"
        libraries = f"/usr/lib/{os.uname().machine}-linux-gnu"
        self.injected = {
            f"{libraries}/libnvidia-ml.so.580.159.04": nvml,
            f"{libraries}/libnvidia-ml.so.1": nvml,
            f"{libraries}/libcuda.so.580.159.04": cuda,
            f"{libraries}/libcuda.so.1": cuda,
            "/run/nvml": folder / "nvml",
        }


@pytest.fixture
def node(tmp_path: Path, fake_library: Path) -> Node:
    """A machine with one GPU."""
    return Node(tmp_path / "node", fake_library)


MakePod = Callable[..., Pod]


@pytest.fixture
def make_pod(images: Images, node: Node, tmp_path: Path) -> Iterator[MakePod]:
    """Give a function that starts a sandbox for a manifest on that node; at the end the pods are removed."""
    with contextlib.ExitStack() as stack:
        count = itertools.count()

        def make(manifest: dict[str, Any], **more: Any) -> Pod:
            folder = tmp_path / f"pod{next(count)}"
            return stack.enter_context(
                Pod(images, manifest, folder, nvidia=node.injected, variables=node.variables, **more)
            )

        yield make
