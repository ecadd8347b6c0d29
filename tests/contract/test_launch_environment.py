"""What a launch sets reaches the reading and the import as the server would have it, or nothing is claimed.

By real interpreters and small packages: a launch is judged before it happens, in a folder where what it leads to lies.
"""

from __future__ import annotations

import os
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sidecar.config import Settings
from sidecar.imports import ImportOutcome
from sidecar.isolation import Isolation
from sidecar.model import Placement, Processes, Skip, Standing, Target
from sidecar.pythonflags import python_options
from sidecar.target import TargetFinder
from tests.fakes.site import RealClock, Site, good
from tests.fakes.sources import NO_LIMIT, Sources, imported

STANDING = Standing(placement=Placement.HOST, placement_why="", processes=Processes.SHARED, processes_why="")
PICKY = """
import os
int(os.environ.get("FLASHINFER_LOGLEVEL", "0"))
[float(one) for one in os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "9.0").split()]
"""
FAILING = "raise ImportError('not this one')\n"
LAUNCH = "-m sglang.launch_server --model-path m"

OK, FAILED = ImportOutcome.OK, ImportOutcome.FAILED
UNREAD = "unread"
UNTRIED = ImportOutcome.NOT_ALLOWED


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which launches happen: environments with and without FlashInfer, and what can lead elsewhere."""
    venv = good(tmp_path / "venv")
    venv.flashinfer(mamba=PICKY)
    bare = Site(tmp_path / "bare", system=True)
    for site in (venv, bare):
        (site.root / "bin/python3").symlink_to("python")
        (site.root / "bin/sglang").write_text(f"#!{site.python}\n")
        (site.root / "bin/sglang").chmod(0o755)
        (site.root / "bin/activate").write_text(
            f'VIRTUAL_ENV="{site.root}"\nexport VIRTUAL_ENV\nPATH="$VIRTUAL_ENV/bin:$PATH"\nexport PATH\n'
        )
    below = venv.packages.relative_to(venv.root)
    for base in ("base", "home/.local"):
        shutil.copytree(venv.packages, tmp_path / base / below)
    shutil.copytree(venv.packages, tmp_path / "packages")
    (tmp_path / "shadow/flashinfer").mkdir(parents=True)
    (tmp_path / "shadow/flashinfer/__init__.py").write_text(FAILING)
    (tmp_path / "nothing/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "nothing/up").symlink_to(tmp_path / "shadow")
    (tmp_path / "env.sh").write_text("export PYTHONPATH=$PWD/shadow\n")
    (tmp_path / "start.sh").write_text(f'#!/bin/sh\ncd shadow\nexec "{venv.python}" {LAUNCH} "$@"\n')
    (tmp_path / "start.sh").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="sources")
async def _sources() -> AsyncIterator[Sources]:
    isolation = Isolation()
    one = Sources(isolation, RealClock(), memory=NO_LIMIT)
    yield one
    await one.close()
    await isolation.close()


async def target_of(launch: list[str], place: Path, **environ: str) -> Target:
    """What a preflight takes for the server of this launch."""
    given = {"PATH": f"{place}/bare/bin:{os.defpath}", "HOME": str(place / "nothing"), **environ}
    return await TargetFinder(Settings(launch=tuple(launch)), STANDING, RealClock(), environ=given).find()


async def outcome(sources: Sources, target: Target) -> object:
    """How the import ends that stands for the server's; `UNREAD` where not even files are read."""
    try:
        return (await imported(sources, target)).outcome
    except Skip:
        return UNREAD


VENV, BARE = f"venv/bin/python3 {LAUNCH}", f"bare/bin/python3 {LAUNCH}"

CASES = [
    # its working folder
    (VENV, OK),
    (f"cd shadow && ../{VENV}", FAILED),
    (f"env -C shadow $PWD/{VENV}", FAILED),
    (f"env --chdir=shadow $PWD/{VENV}", FAILED),
    ("cd shadow && ../venv/bin/sglang serve m", OK),
    (f"cd link && ../{VENV}", OK),
    (f"cd link && cd .. && {VENV}", OK),
    (f"(cd shadow); {VENV}", OK),
    (f"cd $(echo shadow) && $OLDPWD/{VENV}", UNREAD),
    (f"true && cd shadow; ../{VENV}", FAILED),
    (f"x && cd shadow; {VENV}", UNREAD),
    ("./start.sh --tp 2", FAILED),
    # its import path
    (f"export PYTHONPATH=$PWD/shadow:${{PYTHONPATH:-}}; {VENV}", FAILED),
    (f"PYTHONPATH=shadow {VENV}", FAILED),
    (f"cd nothing/up && ../{VENV}", FAILED),
    (f"cd nothing; PYTHONPATH=shadow ../{VENV}", OK),
    (f"PYTHONPATH=${{NONE:-$PWD/packages}} {BARE}", OK),
    (f"export PYTHONPATH=$(echo $PWD/packages); {BARE}", UNREAD),
    (f"PYTHONPATH=packages; {BARE}", FAILED),
    (f"PYTHONPATH=packages; export PYTHONPATH; {BARE}", OK),
    (f"(export PYTHONPATH=packages); {BARE}", FAILED),
    (f"false && export PYTHONPATH=packages; {BARE}", FAILED),
    (f"x && export PYTHONPATH=packages; {BARE}", UNREAD),
    (f"if true; then export PYTHONPATH=packages; fi; {BARE}", OK),
    (f"if x; then export PYTHONPATH=packages; fi; {BARE}", UNREAD),
    (f"exit 1; {VENV}", UNREAD),
    (f"set -e; false; {VENV}", UNREAD),
    (f"[ -d /nope ] || exit 1; {VENV}", OK),
    (f"B=PYTHONPATH=$PWD/shadow; export $B; {VENV}", FAILED),
    (f"export PYTHONPATH=packages </nope/x; {BARE}", UNREAD),
    (f"./nope.sh {VENV}", UNREAD),
    (f"venv/bin/python3 -Z {LAUNCH}", UNREAD),
    (f"venv/bin/python3 -V {LAUNCH}", UNREAD),
    (f"venv/bin/python3 -Bu {LAUNCH}", OK),
    (f"__PYVENV_LAUNCHER__=$PWD/bare/bin/python3 {VENV}", UNREAD),
    (f"ulimit -v 400000; {VENV}", UNTRIED),
    (f"ulimit -n 4096; {VENV}", OK),
    (f"PYTHONPATH=$(x) venv/bin/python3 -E {LAUNCH}", OK),
    (f". ./env.sh; {VENV}", FAILED),
    (f". ./gone.sh; {VENV}", UNREAD),
    # its user's packages
    (BARE, FAILED),
    (f"PYTHONUSERBASE=$PWD/base {BARE}", OK),
    (f"HOME=$PWD/home {BARE}", OK),
    (f"HOME=$PWD/home PYTHONUSERBASE= {BARE}", OK),
    (f"HOME=$PWD/home PYTHONUSERBASE=/nowhere {BARE}", FAILED),
    (f"HOME=$PWD/home PYTHONNOUSERSITE=1 {BARE}", FAILED),
    (f"HOME=$(x) {BARE}", UNREAD),
    # what FlashInfer reads
    (f"FLASHINFER_LOGLEVEL=loud {VENV}", FAILED),
    (f"export FLASHINFER_CUDA_ARCH_LIST=hopper; {VENV}", FAILED),
    (f"FLASHINFER_CUDA_ARCH_LIST=9.0 {VENV}", OK),
    (f"FLASHINFER_CUDA_ARCH_LIST=$(x) {VENV}", UNTRIED),
    (f"LD_LIBRARY_PATH=$(x):$LD_LIBRARY_PATH {VENV}", UNTRIED),
    (f"CUDA_VISIBLE_DEVICES=$(x) MASTER_ADDR=$(hostname) {VENV}", OK),
    # its interpreter
    (f"python3 {LAUNCH}", FAILED),
    (f". venv/bin/activate && python3 {LAUNCH}", OK),
    (f"PATH=$PWD/venv/bin:$PATH; python3 {LAUNCH}", OK),
    (f"export PATH=venv/bin:$PATH; exec python3 {LAUNCH}", OK),
    (f"PATH=$(x):$PATH; python3 {LAUNCH}", UNREAD),
    (f"x && . venv/bin/activate; python3 {LAUNCH}", UNREAD),
    (f'eval "$(conda shell.posix hook)"; {VENV}', UNREAD),
    # whose environment it is
    (f"sudo {VENV}", UNREAD),
    (f"sudo PYTHONPATH=packages {BARE}", UNREAD),
    (f"su me -c '{VENV}'", UNREAD),
    (f"bash -lc '{VENV}'", UNREAD),
    (f"docker run --gpus all image {VENV}", UNREAD),
    (f"conda run -n x {VENV}", UNREAD),
    (f"ssh host {VENV}", UNREAD),
    (f"./wrapper {VENV}", UNREAD),
    (f"HOME=$PWD/home env -i {BARE}", FAILED),
    (f"HOME=$PWD/home env -u HOME {BARE}", FAILED),
]  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), CASES)
async def test_what_a_launch_sets_reaches_the_import(
    sources: Sources, place: Path, script: str, expected: object
) -> None:
    """The import of a launch's server finds what the server would find; else none is run, and nothing is read."""
    target = await target_of(["sh", "-c", script], place)
    assert await outcome(sources, target) == expected
    said = (target.unread or "").startswith("The server's environment is not seen: ")
    assert (said, target.python is None) == (expected == UNREAD, expected == UNREAD)


@pytest.mark.parametrize("letter", sorted({*string.ascii_letters, "?"} - {*"cmWX"}))
def test_python_refuses_the_options_that_are_said_to_be(letter: str) -> None:
    """Whether a real interpreter comes to what it is to run, whatever letter stands in front of that."""
    done = subprocess.run(
        [sys.executable, f"-{letter}", "-c", "print('came here')"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (python_options([f"-{letter}", "-c", "pass"]).refused is None) == (b"came here" in done.stdout)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (["env", "-C", "shadow", "../venv/bin/python3", *LAUNCH.split()], FAILED),
        (["env", "PYTHONPATH=shadow", *VENV.split()], FAILED),
        (["nohup", "env", "-u", "PYTHONPATH", *VENV.split()], OK),
        (["docker", "exec", "c", *VENV.split()], UNREAD),
        (["sudo", "-E", *VENV.split()], UNREAD),
        (["bash", "start.sh"], FAILED),
    ],
)
async def test_a_launch_without_a_shell_counts_too(
    sources: Sources, place: Path, launch: list[str], expected: object
) -> None:
    """The same for wrappers alone, and for a script that is a file."""
    assert await outcome(sources, await target_of(launch, place)) == expected


async def test_what_the_files_show_is_the_launchs(sources: Sources, place: Path) -> None:
    """Reading the files alone finds the packages where the server would, by each way that leads to them."""
    for script, kind in (
        (BARE, "absent"),
        (f"PYTHONUSERBASE=$PWD/base {BARE}", "package"),
        (f"HOME=$PWD/home {BARE}", "package"),
        (f"export PYTHONPATH=$PWD/packages:${{PYTHONPATH:-}}; {BARE}", "package"),
        (f"cd packages && ../{BARE}", "package"),
        (f". venv/bin/activate && python3 {LAUNCH}", "package"),
    ):
        facts = await sources.read(await target_of(["sh", "-c", script], place))
        assert facts.flashinfer.kind == kind, script


async def test_pythonhome_moves_what_is_read(sources: Sources, place: Path) -> None:
    """Packages below PYTHONHOME count for the reading as for the import, and those of the base no longer do."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library, moved = Path(os.__file__).parent, place / "moved/lib" / version
    moved.mkdir(parents=True)
    for entry in library.iterdir():
        if entry.name not in {"site-packages", "dist-packages", "sitecustomize.py"}:
            (moved / entry.name).symlink_to(entry)
    shutil.copytree(place / "packages", moved / "site-packages")
    target = await target_of(["sh", "-c", f"PYTHONHOME=$PWD/moved {BARE}"], place)
    assert (await sources.read(target)).flashinfer.kind == "package"
    assert await outcome(sources, target) is OK
    ignored = await target_of(["sh", "-c", f"PYTHONHOME=$PWD/moved bare/bin/python3 -E {LAUNCH}"], place)
    assert (await sources.read(ignored)).flashinfer.kind == "absent"
    assert (await target_of(["sh", "-c", f"PYTHONHOME=$(x) {BARE}"], place)).unread is not None


async def test_an_interpreter_set_by_hand_is_read_but_not_imported(sources: Sources, place: Path) -> None:
    """Its files are the operator's word; an import would have an environment that the server has not."""
    settings = Settings(launch=("docker", "run", "i", *BARE.split()), server_python=str(place / "venv/bin/python"))
    target = await TargetFinder(settings, STANDING, RealClock(), environ={"PATH": os.defpath}).find()
    assert (target.environ, target.environ_missing, target.cwd) == (None, "set-by-launch", None)
    assert (await sources.read(target)).flashinfer.kind == "package"
    evidence = await imported(sources, target)
    assert (evidence.outcome, evidence.reason) == (UNTRIED, "environment-unseen")


async def test_what_may_be_missed_is_named(sources: Sources, place: Path) -> None:
    """A variable with a value that is not seen is one that the import had not."""
    evidence = await imported(sources, await target_of(["sh", "-c", f"MY_PLUGIN=$(x) {VENV}"], place))
    assert evidence.withheld == ("MY_PLUGIN",)


# -- the launch and the server that it becomes ----------------------------------------------------------


@pytest.fixture(name="running")
def _running() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "script",
    [
        f"cd shadow && PYTHONPATH=../packages exec ../{VENV}",
        f"export PYTHONUSERBASE=$PWD/base FLASHINFER_LOGLEVEL=3; unset NONE; exec {VENV}",
        f"exec env -i -C nothing HOME=/x $PWD/{VENV}",
        f". venv/bin/activate && exec python3 {LAUNCH}",
    ],
)
async def test_the_server_has_what_was_said_of_its_launch(place: Path, running: list[int], script: str) -> None:
    """A process that was started by the line has the interpreter, folder and variables that were read before."""
    (place / "venv/lib").joinpath(f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages/sglang").mkdir()
    package = next((place / "venv/lib").glob("python3.*/site-packages/sglang"))
    for folder in (package, place / "packages/sglang"):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "launch_server.py").write_text("import time; time.sleep(600)\n")
    given = {"PATH": f"{place}/bare/bin:{os.defpath}", "HOME": str(place / "nothing")}
    said = await target_of(["sh", "-c", script], place)
    started = subprocess.run(
        # Not a child of this process: an agent takes none of its own descendants for the server.
        ["sh", "-c", 'sh -c "$1" >/dev/null 2>&1 & echo $!', "-", script],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(started.stdout)
    running.append(pid)
    end = time.monotonic() + 20
    while not Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(b"python3"):
        assert time.monotonic() < end
        time.sleep(0.02)
    found = await TargetFinder(Settings(server_pid=pid), STANDING, RealClock()).find()
    own = {"PWD", "OLDPWD", "SHLVL", "_", "PS1", "VIRTUAL_ENV_PROMPT"}
    assert said.environ is not None
    assert found.environ is not None
    assert {**said.environ} == {name: value for name, value in found.environ.items() if name not in own}
    assert (said.cwd, said.cwd_on_path) == (found.cwd, found.cwd_on_path)
    assert said.python == os.path.normpath(Path(str(found.cwd), str(found.python)))
