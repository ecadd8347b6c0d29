"""`Environment`: what the reader is told, with which rights it runs, and what of its answer gets in."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields, replace

from sidecar.config import Settings
from sidecar.environment import CacheFolder, EnvironmentFacts, Toolchain
from sidecar.isolation import Isolation
from sidecar.model import Placement, Scope
from tests.builders import FakeClock
from tests.fakes.site import RealClock, Site, good
from tests.fakes.sources import Sources, fake_proc


@pytest.fixture
async def isolation() -> AsyncIterator[Isolation]:
    one = Isolation()
    yield one
    await one.close()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return good(tmp_path / "venv")


def reader(isolation: Isolation, proc: Path = Path("/proc"), clock: Any = None) -> Sources:
    return Sources(isolation, clock or RealClock(), Settings(), placement=Placement.CONTAINER, proc=proc)


async def answered(isolation: Isolation, tmp_path: Path, result: object) -> EnvironmentFacts:
    """The facts that come of an interpreter that answers this, whatever it is asked."""
    script = tmp_path / "python"
    (tmp_path / "answer").write_text(json.dumps({"stage": "x"}) + "\n" + json.dumps({"result": result}) + "\n")
    script.write_text(f'#!/bin/bash\nfor fd; do :; done\ncat {tmp_path}/answer >&"$fd"\n')
    script.chmod(0o755)
    return await reader(isolation).read(Site(tmp_path / "venv").target(python=str(script)))


async def test_everything_that_is_read_gets_in(isolation: Isolation, site: Site, tmp_path: Path) -> None:
    """Each fact of the reader's answer stands in the facts under its name."""
    site.install("sglang", "0.5.16", {"sglang/__init__.py": "", "sglang/a.py": ""}, requires=("torch==2.11.0", "numpy"))
    site.remove("sglang/a.py")
    site.dist("attrs", "1.0")
    site.dist("attrs", "2.0")
    site.install("nvidia-ml-py", "13.0", {"pynvml.py": ""})
    site.install("pynvml", "11.4.1", {"pynvml/__init__.py": ""})
    site.write("quack/x.txt")
    (tmp_path / "cuda/bin").mkdir(parents=True)
    environ = {"HOME": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda"), "PATH": "/nowhere"}
    facts = await reader(isolation).read(site.target(environ=environ, pid=os.getpid()))
    assert facts.distributions["attrs"] in {"1.0", "2.0"}
    assert facts.requires == facts.requires_of["sglang"] == ("torch==2.11.0", "numpy")
    assert sorted(facts.duplicates["attrs"]) == ["1.0", "2.0"]
    assert facts.owners == {"pynvml": ("nvidia-ml-py", "pynvml")}
    assert (facts.damaged["sglang"].missing, facts.damaged["sglang"].examples) == (1, ("sglang/a.py",))
    assert (facts.leftovers, facts.unregistered) == (("quack",), ("torch", "tvm_ffi"))
    assert facts.changed_at["sglang"] == pytest.approx(site.packages.stat().st_mtime, abs=60)
    assert (facts.modules["sglang"].kind, facts.modules["flash_attn"].kind) == ("package", "absent")
    assert (facts.toolchain.cuda_home, facts.toolchain.cuda_home_ok) == (str(tmp_path / "cuda"), True)
    assert (facts.toolchain.nvcc, facts.toolchain.ninja, facts.toolchain.environ_seen) == (None, False, True)
    assert facts.cache == CacheFolder(path=f"{tmp_path}/.cache/flashinfer", writable=True)
    assert facts.cubins == 0


async def test_an_unchanged_environment_has_its_surroundings_anew(isolation: Isolation, site: Site) -> None:
    """What comes and goes beside the packages is renewed although nothing of them was read again."""
    clock = FakeClock()
    environment = reader(isolation, clock=clock)
    first = await environment.read(site.target())
    folder = site.root / ".cache/flashinfer/cubins"
    folder.mkdir(parents=True)
    (folder / "a.cubin").write_text("")
    clock.now += 31
    second = await environment.read(site.target())
    assert (first.cubins, second.cubins) == (0, 1)
    assert second == replace(first, cubins=1)
    clock.now += 31
    assert await environment.read(site.target()) is second


async def test_facts_belong_to_what_led_to_them(isolation: Isolation, site: Site) -> None:
    """Another way of finding the interpreter, another folder or other variables are another reading."""
    environment = reader(isolation)
    first = await environment.read(site.target())
    for changes in ({"python_source": "argv"}, {"cwd": "/", "cwd_on_path": True}, {"environ": None}, {"environ": {}}):
        facts = await environment.read(site.target(**changes))
        assert facts is not first
        assert facts.python_source == changes.get("python_source", "server_python")
        first = facts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")
async def test_the_reader_has_no_capabilities_of_the_agent(isolation: Isolation, site: Site, tmp_path: Path) -> None:
    """Also as the same user the server's interpreter gets none of the agent's capabilities."""
    os.rename(site.python, f"{site.python}-real")
    Path(site.python).write_text(f'#!/bin/sh\ncat /proc/$$/status > {tmp_path}/status\nexec "$0-real" "$@"\n')
    Path(site.python).chmod(0o755)
    proc = fake_proc(tmp_path, 0, "ffffffffffffffff")
    facts = await reader(isolation, proc).read(site.target(pid=77))
    assert facts.flashinfer.kind == "package"
    status = dict(line.split(":", 1) for line in (tmp_path / "status").read_text().splitlines())
    assert {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == dict.fromkeys(
        ("CapInh", "CapPrm", "CapEff", "CapAmb"), 0
    )


NONSENSE = (
    None,
    True,
    -1,
    1.5,
    "x" * 20_000,
    "\udcff",
    [],
    ["a", 1, None, {}],
    {},
    {"a": None, "b": [], "c": {"d": 1}},
)
READ = (
    "fingerprint", "python", "python_version", "site_dirs", "path_code", "distributions", "distribution_count",
    "requires_of", "requires_python", "duplicates", "owners", "damaged", "leftovers", "unregistered", "changed_at",
    "editable", "libcuda", "toolchain", "cache", "cubins", "modules", "torch", "kernel", "flashinfer",
)  # fmt: skip


async def test_nonsense_does_not_get_in(isolation: Isolation, tmp_path: Path) -> None:
    """Whatever an interpreter answers, facts come of it that every output can encode, and no exception."""
    for number, value in enumerate(NONSENSE):
        folder = tmp_path / str(number)
        folder.mkdir()
        nested = {key: dict.fromkeys(("a", "missing", "kind", "path", "nvcc"), value) for key in READ}
        for result in (dict.fromkeys(READ, value), nested):
            (folder / str(len(list(folder.iterdir())))).mkdir()
            facts = await answered(isolation, max(folder.iterdir()), result)
            repr(facts).encode()
            assert facts.scope is Scope.SERVER
            assert len(repr(facts)) < 200_000


async def test_an_answer_without_anything_is_unknown(isolation: Isolation, tmp_path: Path) -> None:
    """What the answer does not say is unknown, in every field."""
    facts = await answered(isolation, tmp_path, {})
    blank = EnvironmentFacts(scope=Scope.SERVER)
    differing = {one.name for one in fields(blank) if getattr(facts, one.name) != getattr(blank, one.name)}
    assert differing <= {"python", "python_source", "libcuda"}
    assert facts.toolchain == Toolchain()


async def test_names_of_files_are_shown_harmlessly(isolation: Isolation, tmp_path: Path) -> None:
    """Line ends and escapes in a file's name do not reach a terminal or a log."""
    damaged = {"flashinfer-python": {"missing": 1, "examples": ["flashinfer/\x1b[2J\nx.py"]}}
    modules = {"quack": {"kind": "package", "places": ["/a\nb"]}}
    facts = await answered(isolation, tmp_path, {"damaged": damaged, "modules": modules})
    assert facts.damaged["flashinfer-python"].examples == ("flashinfer/?[2J?x.py",)
    assert facts.modules["quack"].places == ("/a?b",)
