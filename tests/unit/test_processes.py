"""The server's processes as made-up and recorded /proc trees show them."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar import procfs
from sidecar.model import Scope, Target
from sidecar.processes import ProcessReader, Role, ServerProcess, ServerProcesses, role_of
from sidecar.procfs import Denial
from tests.builders import FakeClock
from tests.fakes.proc import ALL, BOOT, CONTAINER, PTRACE, SELF, MapLine, ProcTree
from tests.fakes.sglang import CAPTURES

MODULE = ("/srv/env/bin/python", "-m", "sglang.launch_server", "--tp", "2")
PACKAGES = "/srv/env/lib/python3.12/site-packages"


@pytest.fixture(name="tree")
def _tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


def target(pid: int | None = 100, started: float | None = BOOT + 10) -> Target:
    return Target(url="http://h:1", url_source="default", scope=Scope.SERVER, pid=pid, create_time=started)


async def read(tree: ProcTree, *, found: Target | None = None) -> ServerProcesses:
    processes = await ProcessReader(FakeClock(), proc=tree.proc).read(found or target())
    assert processes is not None
    return processes


def roles(processes: ServerProcesses) -> list[tuple[int, str]]:
    return [(one.pid, one.role.value) for one in processes.processes]


def main_of(processes: ServerProcesses) -> ServerProcess:
    return processes.processes[0]


# -- roles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("sglang::scheduler", Role.SCHEDULER),
        ("sglang::scheduler_DP0_PP1_ATTN_CP0_MOE_DP1_TP3_EP2", Role.SCHEDULER),
        ("sglang::scheduler_TP0_PP1", Role.SCHEDULER),
        ("sgl_diffusion::scheduler_0", Role.SCHEDULER),
        ("sglang::detokenizer", Role.DETOKENIZER),
        ("sglang::detokenizer_router", Role.DETOKENIZER),
        ("sglang::data_parallel_controller", Role.DATA_PARALLEL_CONTROLLER),
        ("sglang::tokenizer_worker:4711", Role.TOKENIZER_WORKER),
        ("sglang::something_new", Role.OTHER),
        ("/usr/bin/nvcc", Role.OTHER),
        ("", Role.OTHER),
    ],
)
def test_a_title_tells_the_role(title: str, role: Role) -> None:
    """Each title that SGLang gives its children names a role; what is not known is other.

    sgl-project/sglang#2382
    """
    assert role_of((title,), "") is role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("sglang::schedul", Role.SCHEDULER),
        ("sglang::detoken", Role.DETOKENIZER),
        ("sglang::data_pa", Role.DATA_PARALLEL_CONTROLLER),
        ("sglang::tokeniz", Role.TOKENIZER_WORKER),
        ("sgl_diffusion::", Role.SCHEDULER),
        ("python3", Role.OTHER),
    ],
)
def test_a_zombie_is_known_by_its_short_name(name: str, role: Role) -> None:
    """A zombie has no command line any more, only its name of 15 characters."""
    assert len(name) <= 15
    assert role_of((), name) is role


async def test_a_layout_with_replicas_is_walked_to_its_leaves(tree: ProcTree) -> None:
    """Schedulers below a data-parallel controller are the server's; another server's children are not."""
    tree.process(100, MODULE)
    tree.process(90, ("sglang::detokenizer",), parent=1)
    tree.process(101, ("sglang::data_parallel_controller",), parent=100)
    tree.process(102, ("sglang::detokenizer  ", "", ""), parent=100)
    for pid in (103, 104):
        tree.process(pid, (f"sglang::scheduler_DP{pid - 103}", ""), parent=101)
    spawn = ("python", "-c", "from multiprocessing.resource_tracker import main;main(25)")
    tree.process(105, spawn, parent=100)
    assert roles(await read(tree)) == [
        (100, "main"),
        (101, "data-parallel-controller"),
        (102, "detokenizer"),
        (103, "scheduler"),
        (104, "scheduler"),
        (105, "other"),
    ]


async def test_zombies_are_told_from_the_living(tree: ProcTree) -> None:
    """A scheduler that ended and was not collected is a zombie of its role, with neither memory nor maps.

    vllm-project/vllm#36960, sgl-project/sglang#18579
    """
    tree.process(100, MODULE)
    tree.process(101, (), parent=100, name="sglang::scheduler_TP0", state="Z")
    tree.process(102, ("sglang::scheduler_TP1",), parent=100, name="sglang::scheduler_TP1")
    found = await read(tree)
    assert [one.pid for one in found.of(Role.SCHEDULER)] == [102]
    zombie = found.zombies(Role.SCHEDULER)[0]
    assert (zombie.pid, zombie.resident, zombie.mapped, zombie.denied) == (101, None, None, {})


async def test_a_first_thread_that_ended_is_no_zombie(tree: ProcTree) -> None:
    """A process whose first thread ended while others run shows state Z and lives."""
    tree.process(100, MODULE)
    tree.process(101, ("sglang::scheduler",), parent=100, threads=7)
    stat = tree.proc / "101" / "stat"
    stat.write_text(stat.read_text().replace(") S ", ") Z "))
    assert len((await read(tree)).of(Role.SCHEDULER)) == 1


async def test_memory_and_start_are_read(tree: ProcTree) -> None:
    """Resident memory is in bytes, the start in seconds since the epoch."""
    tree.process(100, MODULE, resident_kib=1_216_932)
    main = main_of(await read(tree))
    assert (main.resident, main.started_at) == (1_216_932 * 1024, BOOT + 10)


# -- recorded servers ---------------------------------------------------------------------------------

COMMON = "sm90/common_ops.abi3.so"
CUDA = "libcuda.so.580.159.04"
FA3, FA4 = "flash_ops.abi3.so", "libcute_dsl_runtime.so"


@pytest.mark.parametrize(
    ("capture", "scheduler"),
    [
        ("0.5.16-h200-fa3", {COMMON, CUDA, FA3}),
        ("0.5.16-h200-fa4", {COMMON, CUDA, FA4}),
        ("0.5.16-h200-fa4-fa3-hybrid", {COMMON, CUDA, FA3, FA4}),
        ("0.5.16", {"sm100/common_ops.abi3.so", "libcuda.so.550.163.01", "libtorch_cuda.so"}),
    ],
)
async def test_recorded_schedulers_show_what_they_loaded(tree: ProcTree, capture: str, scheduler: set[str]) -> None:
    """Of a real server's maps the objects of interest are kept by base name, the build's folder with common_ops."""
    main = tree.recorded(CAPTURES / capture)
    found = await read(tree, found=target(main))
    assert [one.mapped for one in found.of(Role.SCHEDULER)] == [scheduler]
    assert len(found.of(Role.DETOKENIZER)) == 1
    for role in (Role.MAIN, Role.DETOKENIZER):
        assert not {FA3, FA4} & (found.of(role)[0].mapped or frozenset())


# -- maps ---------------------------------------------------------------------------------------------


async def test_maps_are_reduced_to_an_allow_list(tree: ProcTree) -> None:
    """No other mapped file is kept: paths show what people do."""
    private = "/home/jane/secret-project/weights.so"
    tree.process(100, MODULE, maps=[MapLine(private), MapLine("/models/llama/model.safetensors"), "not a line"])
    found = await read(tree)
    assert main_of(found).mapped == frozenset()
    assert "jane" not in repr(found)


async def test_what_helpers_map_is_not_read(tree: ProcTree) -> None:
    """Compilers and other helpers prove nothing: their maps stay unread."""
    tree.process(100, MODULE, maps=[MapLine("/lib/libc.so.6")])
    tree.process(101, ("nvcc",), parent=100, maps=[MapLine(f"{PACKAGES}/sgl_kernel/flash_ops.abi3.so (deleted)")])
    found = await read(tree)
    assert found.processes[1].mapped is None
    assert found.replaced == ()


async def test_the_folder_of_the_servers_packages_is_seen(tree: ProcTree) -> None:
    """Torch and the kernels tell from which site-packages the server runs."""
    tree.process(
        100, MODULE, maps=[MapLine(f"{PACKAGES}/torch/lib/libtorch.so"), MapLine("/x/site-packages/numpy/a.so")]
    )
    assert (await read(tree)).site_folders == (PACKAGES,)


@pytest.mark.parametrize(
    ("path", "replaced"),
    [
        (f"{PACKAGES}/sgl_kernel/flash_ops.abi3.so (deleted)", ("sgl_kernel/flash_ops.abi3.so",)),
        ("/usr/lib/python3/dist-packages/torch/lib/libc10.so.2 (deleted)", ("torch/lib/libc10.so.2",)),
        (f"{PACKAGES}/torch/lib/.nfs00000000deadbeef00000001", ("torch/lib/.nfs00000000deadbeef00000001",)),
        (f"{PACKAGES}/torch/lib/libtorch.so", ()),
        (f"{PACKAGES}/torch/data.bin (deleted)", ()),
        ("/root/.cache/flashinfer/0.6.14/90a/cached_ops/norm/norm.so (deleted)", ()),
        ("/dev/shm/psm_1234 (deleted)", ()),
        ("/tmp/tmp123/kernel.so (deleted)", ()),
        ("/memfd:jit.so (deleted)", ()),
    ],
)
async def test_deleted_libraries_of_packages_count(tree: ProcTree, path: str, replaced: tuple[str, ...]) -> None:
    """A loaded library of an installed package that was deleted is named; what compilers delete on purpose is not."""
    tree.process(100, MODULE)
    tree.process(101, ("sglang::scheduler",), parent=100, maps=[MapLine(path)])
    assert (await read(tree)).replaced == replaced


async def test_a_deleted_library_is_still_loaded(tree: ProcTree) -> None:
    """What was deleted on disk is what the server runs on all the same."""
    tree.process(100, MODULE, maps=[MapLine(f"{PACKAGES}/sgl_kernel/flash_ops.abi3.so (deleted)")])
    assert main_of(await read(tree)).mapped == {FA3}


def library(tmp_path: Path) -> Path:
    file = tmp_path / "site-packages" / "torch" / "lib" / "libtorch.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"old")
    return file


async def test_another_file_at_the_same_path_counts(tree: ProcTree, tmp_path: Path) -> None:
    """Where the path is ours, a file of another inode on the same device is another file."""
    file = library(tmp_path)
    mapped = MapLine.of(file)
    tree.process(100, MODULE, maps=[mapped])
    assert (await read(tree)).replaced == ()
    (file.parent / "new").write_bytes(b"new")
    (file.parent / "new").rename(file)
    assert (await read(tree)).replaced == ("torch/lib/libtorch.so",)


@pytest.mark.parametrize(
    ("namespace", "root", "device"),
    [("mnt:[2]", "/", None), ("mnt:[1]", "/srv/chroot", None), ("mnt:[1]", "/", "00:9f")],
    ids=["other-mounts", "other-root", "other-device"],
)
async def test_inodes_are_compared_only_where_they_mean_the_same(
    tree: ProcTree, tmp_path: Path, namespace: str, root: str, device: str | None
) -> None:
    """Below another root the path is another file; on overlay and btrfs the kernel's two devices differ anyway."""
    mapped = MapLine.of(library(tmp_path))
    other = MapLine(mapped.path, mapped.inode + 1, device or mapped.device)
    tree.process(100, MODULE, maps=[other], namespace=namespace, root=root)
    assert (await read(tree)).replaced == ()


async def test_names_of_files_are_shown_without_tricks(tree: ProcTree) -> None:
    """A program chooses its files' names: what cannot be printed is replaced, what is long is cut."""
    name = f"{PACKAGES}/torch/\x1b[31m{'x' * 300}.so (deleted)"
    tree.process(100, MODULE, maps=[MapLine(name)])
    replaced = (await read(tree)).replaced
    assert replaced is not None
    assert replaced[0].startswith("torch/?[31mxxx")
    assert len(replaced[0]) == 160


# -- what is not there --------------------------------------------------------------------------------


async def test_without_a_process_there_is_nothing_to_read(tree: ProcTree) -> None:
    """No pid, a pid that is gone, or one that another process took over: no picture, rather than an empty one."""
    reader = ProcessReader(FakeClock(), proc=tree.proc)
    tree.process(100, MODULE, started=500)
    assert await reader.read(target(None)) is None
    assert await reader.read(target(7)) is None
    assert await reader.read(target(100, BOOT + 10)) is None
    assert await reader.read(target(100, BOOT + 501.5)) is not None, "the time of boot is rounded"


async def test_maps_that_cannot_be_read_leave_their_question_open(tree: ProcTree) -> None:
    """Without any maps nothing is said of replaced files; the rest of the picture stays."""
    tree.process(100, MODULE, maps=None)
    found = await read(tree)
    assert (found.replaced, found.site_folders, main_of(found).mapped) == (None, None, None)
    assert main_of(found).denied == {"maps": "unreadable"}
    assert main_of(found).resident == 1000 * 1024


async def test_a_process_that_is_ending_maps_nothing_and_proves_nothing(tree: ProcTree) -> None:
    """Empty maps are those of a process whose memory is gone already."""
    tree.process(100, MODULE, maps=())
    assert main_of(await read(tree)).denied == {"maps": "gone"}


async def test_one_reading_serves_a_round(tree: ProcTree) -> None:
    """Within five seconds the same picture is given; after that, and for another process, it is taken anew."""
    clock = FakeClock()
    reader = ProcessReader(clock, proc=tree.proc)
    tree.process(100, MODULE)
    tree.process(200, MODULE)
    first = await reader.read(target())
    tree.process(101, ("sglang::scheduler",), parent=100)
    assert await reader.read(target()) is first
    other = await reader.read(target(200))
    assert other is not None
    assert main_of(other).pid == 200
    clock.now += 6
    again = await reader.read(target())
    assert again is not None
    assert len(again.processes) == 2


async def test_a_process_that_blocks_its_readers_costs_a_moment(tree: ProcTree) -> None:
    """Maps that do not return leave the picture unknown instead of taking the probe's time; only one thread waits.

    A named pipe stands for a process whose memory map is locked.
    """
    tree.process(100, MODULE, maps=None)
    os.mkfifo(tree.proc / "100" / "maps")
    reader = ProcessReader(FakeClock(), proc=tree.proc, patience=0.1)
    stuck = [await reader.read(target()), await reader.read(target())]
    assert [one and one.problem for one in stuck] == ["timeout", "timeout"]
    os.close(os.open(tree.proc / "100" / "maps", os.O_WRONLY | os.O_NONBLOCK))
    for _ in range(200):
        found = await reader.read(target())
        if found is not None and found.problem is None:
            break
        await asyncio.sleep(0.01)
    assert found is not None
    assert found.problem is None


async def test_a_tree_of_processes_is_bounded(tree: ProcTree) -> None:
    """A server that starts very many processes is cut, and it is said."""
    tree.process(100, MODULE)
    for pid in range(1000, 1520):
        tree.process(pid, ("cc1plus",), parent=100, maps=None)
    found = await read(tree)
    assert (len(found.processes), found.cut) == (512, True)


# -- refused reads ------------------------------------------------------------------------------------

USER = (10001,) * 4
BESIDES_PTRACE = CONTAINER & ~PTRACE


@pytest.mark.parametrize(
    ("ours", "theirs", "field", "reason"),
    [
        # The agent is uid 0 without capabilities: root's server has more, another user's is not root's.
        ({}, {"capabilities": CONTAINER}, "maps", Denial.NO_SYS_PTRACE),
        ({}, {"uids": USER}, "maps", Denial.NO_SYS_PTRACE),
        ({"capabilities": BESIDES_PTRACE}, {"uids": USER}, "root", Denial.NO_SYS_PTRACE),
        # The agent is another user.
        ({"uids": USER}, {}, "maps", Denial.OTHER_USER),
        ({"uids": USER, "bounding": ALL}, {}, "maps", Denial.OTHER_USER),
        ({"uids": USER, "bounding": PTRACE}, {}, "maps", Denial.SYS_PTRACE_NOT_EFFECTIVE),
        ({"uids": USER}, {"uids": (10001, 0, 0, 0)}, "maps", Denial.OTHER_USER),
        ({"uids": USER, "gids": USER}, {"uids": USER}, "maps", Denial.OTHER_GROUP),
        # It may trace, and the mode of the file keeps it out.
        ({"uids": USER, "capabilities": PTRACE}, {}, "environ", Denial.OWNER_ONLY),
        ({"uids": USER, "capabilities": PTRACE}, {}, "fd", Denial.OWNER_ONLY),
        # The same user, and still refused.
        ({"uids": USER}, {"uids": USER}, "maps", Denial.NOT_DUMPABLE),
        ({"uids": USER, "label": "cri-containerd.apparmor.d (enforce)\n"}, {"uids": USER}, "maps", "security-module"),
        ({"uids": USER, "label": "docker-default (complain)\n"}, {"uids": USER}, "maps", Denial.NOT_DUMPABLE),
        ({"uids": USER, "label": "unconfined\n"}, {"uids": USER}, "maps", Denial.NOT_DUMPABLE),
        (
            {"uids": USER, "label": "system_u:system_r:container_t:s0:c1,c2\0"},
            {"uids": USER},
            "maps",
            "security-module",
        ),
        ({"uids": USER, "label": "system_u:system_r:spc_t:s0"}, {"uids": USER}, "maps", Denial.NOT_DUMPABLE),
        # It has the right, and is refused for another reason.
        ({"capabilities": ALL, "label": "docker-default (enforce)\n"}, {"uids": USER}, "maps", "security-module"),
        ({"capabilities": ALL}, {"uids": USER}, "maps", Denial.PERMISSION_DENIED),
    ],
)
def test_the_rule_behind_a_refusal_is_worked_out(
    tree: ProcTree, ours: dict[str, object], theirs: dict[str, object], field: str, reason: str
) -> None:
    """User, group, capability, file mode and security module are told apart: each has a remedy of its own.

    BishopFox/badPods#11, moby/moby#40713, containers/container-selinux#273, cloudfoundry/garden-runc-release#117
    """
    shutil.rmtree(tree.proc / str(SELF))
    tree.process(SELF, ("agent",), **ours)  # type: ignore[arg-type]
    tree.process(100, MODULE, **theirs)  # type: ignore[arg-type]
    assert procfs.denial(tree.proc, 100, field, PermissionError(13, "no")) == reason


def test_capabilities_of_a_user_namespace_count_there_only(tree: ProcTree) -> None:
    """With every capability in a user namespace of its own the agent is refused by the server's one."""
    shutil.rmtree(tree.proc / str(SELF))
    (tree.process(SELF, ("agent",), capabilities=ALL) / "uid_map").write_text("0 100000 65536\n")
    tree.process(100, MODULE)
    assert procfs.denial(tree.proc, 100, "maps", PermissionError(1, "no")) is Denial.USER_NAMESPACE


def test_refusals_without_a_reason_say_so(tree: ProcTree) -> None:
    """What is gone, ended or otherwise unreadable is no matter of rights."""
    tree.process(100, MODULE)
    tree.process(101, (), state="Z")
    gone, broken = FileNotFoundError(2, "gone"), OSError(5, "broken")
    assert procfs.denial(tree.proc, 7, "exe", gone) is Denial.GONE
    assert procfs.denial(tree.proc, 101, "exe", gone) is Denial.ZOMBIE
    assert procfs.denial(tree.proc, 100, "exe", broken) is Denial.UNREADABLE
    (tree.proc / "100" / "status").unlink()
    assert procfs.denial(tree.proc, 100, "exe", PermissionError(13, "no")) is Denial.PERMISSION_DENIED


def test_every_reason_has_its_texts() -> None:
    """Each token of a refusal has a sentence; those that a setting cures have a remedy."""
    for reason in Denial:
        assert reason.sentence
        assert reason.remedy.endswith(".") is (reason not in {Denial.ZOMBIE, Denial.GONE, Denial.UNREADABLE})


# -- hostile contents ---------------------------------------------------------------------------------

ANY_BYTES = st.one_of(
    st.binary(max_size=400),
    st.lists(
        st.sampled_from(
            [
                b"7f00-7f01 r-xp 0 fe:00 5 /a/site-packages/torch/x.so (deleted)\n",
                b"\0",
                b"sglang::scheduler",
                b")",
                b"Z",
            ]
        ),
        max_size=8,
    ).map(b"".join),
)


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(ANY_BYTES, min_size=6, max_size=6))
def test_no_content_of_proc_breaks_the_reading(contents: Sequence[bytes]) -> None:
    """Arbitrary bytes as command line, environment, stat, status, maps and name: no exception, no invented fact.

    The main process stays whole, so that there is a reading at all; its child is what is made up.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree = ProcTree(Path(folder))
        tree.process(100, MODULE, maps=[MapLine("/lib/libc.so.6")])
        child = tree.process(101, ("sglang::scheduler",), parent=100)
        for name, content in zip(("cmdline", "environ", "status", "maps", "comm", "stat"), contents, strict=True):
            (child / name).write_bytes(content)
        # A stat that cannot be parsed hides the process; with a whole one the other files are looked at.
        if not contents[5].startswith(b"7f"):
            (child / "stat").write_bytes(b"101 (" + contents[4][:15] + b") S 100" + b" 0" * 17 + b" 1000 0\n")
        found = asyncio.run(read(tree))
        procfs.environment(tree.proc, 101)
        procfs.process_stat(tree.proc, 101)
        for one in found.processes[1:]:
            assert one.zombie is False
            assert one.resident is None or one.resident >= 0
        if b"(deleted)" not in contents[3] and b".nfs" not in contents[3]:
            assert not found.replaced


@settings(max_examples=150, deadline=None)
@given(content=ANY_BYTES)
def test_no_environment_is_made_up(content: bytes) -> None:
    """Whatever an environment holds, names and values are those between its separators, or it is not known."""
    with tempfile.TemporaryDirectory() as folder:
        tree = ProcTree(Path(folder))
        tree.process(100, MODULE, environ=content)
        variables, missing = procfs.environment(tree.proc, 100)
        assert (variables is None) is (missing is not None)
        text = content.decode("utf-8", "replace")
        assert all(f"{name}={value}" in text for name, value in (variables or {}).items())
        if content and not content.strip(b"\0"):
            assert missing == "environ-overwritten"
