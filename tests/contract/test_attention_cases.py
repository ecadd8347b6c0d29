"""The attention probe over whole trees: real readers look at files and processes, and real children import.

Only what is outside is fake: the packages, the /proc, NVML's answer and the server's.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.app import Agent
from sidecar.config import ImportPolicy, Settings
from sidecar.isolation import Isolation
from sidecar.model import Answer, Finding, Gate, Outcome, Placement, Processes, Result, Severity, Status, Target, World
from sidecar.probes.attention import PROBE, AttentionFacts
from sidecar.processes import ProcessReader
from sidecar.serverinfo import ServerInfo, ServerObservation, parse_info
from tests.builders import HOST, view
from tests.fakes.nvml import Scenario
from tests.fakes.proc import MapLine, ProcTree
from tests.fakes.releases import OPEN_MODULE, install
from tests.fakes.sglang import CAPTURES
from tests.fakes.site import RealClock, Site, driver_library
from tests.fakes.sources import Sources
from tests.gpus import gpu, reading

MAIN, SCHEDULER = 100, 101
VENDORED = "sglang/jit_kernel/flash_attn/cute/__init__.py"
CUTE_MODULE = "import torch\nimport cutlass, quack, tvm_ffi\nimport cuda.bindings\ndef flash_attn_varlen_func(): ...\n"
FLASH_ATTN = (
    "import torch\ntry:\n    from sgl_kernel import flash_ops\nexcept:\n"
    '    raise ImportError("Can not import FA3 in sgl_kernel. Please check your installation.")\n'
    "def flash_attn_varlen_func(): ...\n"
)
"""As in the kernel wheel, where the bare except hides the cause from the message."""


class Machine:
    """One SGLang 0.5.16 on an H200: its files, its processes, and what it answers."""

    def __init__(self, folder: Path, isolation: Isolation) -> None:
        self.folder = folder
        self.site = install(folder / "environment", "0.5.16")
        self.site.write("sgl_kernel/flash_attn.py", FLASH_ATTN)
        # What can be imported without being a real library; the reader takes both for the extension.
        self.site.remove("sgl_kernel/flash_ops.abi3.so")
        self.site.write("sgl_kernel/flash_ops.py")
        self.site.dist("sglang-kernel", "0.4.5")  # with a RECORD that lists nothing of what was changed
        self.site.write(VENDORED, CUTE_MODULE)
        driver_library(folder, "driver")
        self.proc = ProcTree(folder / "machine")
        self.sources = Sources(isolation, RealClock(), proc=self.proc.proc, environ={})
        self.info: ServerInfo | None = None
        self.observation: ServerObservation | None = None
        self.launch: dict[str, Any] | None = None
        self.environ: dict[str, str] | None = {
            "PATH": os.defpath,
            "HOME": str(folder),
            "LD_LIBRARY_PATH": str(folder / "driver"),
        }
        self.pid: int | None = None
        self.settings = Settings()
        self.memory: dict[str, object] = {}
        self.woken: list[str] = []

    def runs(self, *mapped: str, main: tuple[str, ...] = ()) -> None:
        """A server whose scheduler has these objects mapped, and its main process those of ``main``."""
        for pid in (MAIN, SCHEDULER):
            shutil.rmtree(self.proc.proc / str(pid), ignore_errors=True)
        packages = str(self.site.packages)
        theirs = [MapLine(f"{packages}/{one}") for one in main]
        self.proc.process(MAIN, [self.site.python, "-m", "sglang.launch_server"], maps=theirs)
        own = [MapLine(f"{packages}/{one}") for one in mapped]
        self.proc.process(SCHEDULER, ["sglang::scheduler"], parent=MAIN, maps=own)
        self.pid = MAIN

    async def find(self) -> Target:
        """The server, or the launch."""
        return self.site.target(
            environ=self.environ,
            pid=self.pid,
            launch=self.launch or {},
            launch_source=None if self.launch is None else "process",
        )

    async def look(self, *, imports: bool = False) -> AttentionFacts:
        """One round of the probe, and with ``imports`` another one after the imports that the first one started."""
        services: Any = SimpleNamespace(
            settings=self.settings,
            clock=RealClock(),
            standing=HOST,
            nvml=SimpleNamespace(latest=reading(gpu(0)), latest_at=RealClock().monotonic()),
            targets=self,
            environment=self.sources.environment,
            imports=self.sources.imports,
            server=SimpleNamespace(info=self._info, observation=self.observation),
            processes=ProcessReader(RealClock(), proc=self.proc.proc),
            imported=self.woken.append,
            memory=self.memory,
        )
        facts = await PROBE.collect(services)
        if imports and await self.sources.wait_import():
            facts = await PROBE.collect(services)
        return facts

    async def _info(self, _target: Target) -> ServerInfo | None:
        return self.info


def judged(facts: AttentionFacts, answer: Answer | None = Answer.ACCEPTED) -> dict[str, Finding]:
    """The findings by code."""
    world = World(standing=HOST, server=view(answer), now=0.0, settings=Settings())
    result: Result[AttentionFacts] = Result(probe="attention", outcome=Outcome.OK, facts=facts)
    return {finding.code: finding for finding in PROBE.judge(result, world)}


def answer(backend: str, version: str = "0.5.16") -> ServerInfo:
    """What a server with this backend says."""
    return ServerInfo(version=version, attention_backend=backend, device="cuda", is_vision=False, tp_size=1)


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    """A machine in which everything works."""
    one = Machine(tmp_path, Isolation())
    yield one
    await one.sources.close()


# -- which version is active ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "versions", "loaded"),
    [
        ("0.5.16-h200-fa3", (3, 3), (3, 3)),
        ("0.5.16-h200-fa4", (4, 4), (4, 4)),
        ("0.5.16-h200-fa4-fa3-hybrid", (4, 3), (4, 3)),
    ],
)
async def test_recorded_servers_show_their_versions(
    machine: Machine, name: str, versions: tuple[int, int], loaded: tuple[int, int]
) -> None:
    """Real servers on an H200: prefill and decode by what they resolved, confirmed by what their schedulers mapped."""
    info = parse_info((CAPTURES / name / "server_info.json").read_bytes())
    assert isinstance(info, ServerInfo)
    machine.info = info
    machine.pid = machine.proc.recorded(CAPTURES / name)
    machine.settings = Settings(import_policy=ImportPolicy.NEVER)
    facts = await machine.look()
    sections = PROBE.report(facts)["attention"]
    phases = (sections["prefill"], sections["decode"])
    assert tuple(phase.version for phase in phases) == versions
    assert tuple(phase.loaded for phase in phases) == loaded
    assert tuple(phase.installed for phase in phases) == versions
    assert {phase.source for phase in phases} == {"server-info"}
    found = judged(facts)
    assert not [one.code for one in found.values() if one.status is Status.TRUE]
    assert found["attention-backend-disagreement"].status is Status.FALSE


async def test_what_other_processes_map_proves_nothing(machine: Machine) -> None:
    """A library in the main process alone leaves a phase without loaded evidence, and is a contradiction for fa3."""
    machine.runs("torch/lib/libtorch_cuda.so", main=("sgl_kernel/flash_ops.abi3.so",))
    machine.info = answer("fa3")
    facts = await machine.look()
    assert PROBE.report(facts)["attention"]["decode"].loaded == 0
    assert judged(facts)["attention-backend-disagreement"].reason == "fa3-not-loaded"


# -- imports --------------------------------------------------------------------------------------------


async def test_good_modules_are_imported_for_real(machine: Machine) -> None:
    """Both versions in use: each module is imported by a child of the server's interpreter, and is fine."""
    machine.launch = {"prefill_attention_backend": "fa4", "decode_attention_backend": "fa3"}
    facts = await machine.look(imports=True)
    found = judged(facts, Answer.REFUSED)
    for code in ("fa3-not-importable", "fa4-not-importable"):
        assert (found[code].status, found[code].final) == (Status.FALSE, True), found[code]
    shown = {sample.labels[0]: sample.value for sample in PROBE.samples(facts) if "verified" in sample.family}
    assert shown == {"sgl_kernel.flash_attn": 1, "sglang.jit_kernel.flash_attn.cute": 1}
    assert machine.woken == ["attention", "attention"]


async def test_only_what_is_in_use_is_imported(machine: Machine) -> None:
    """Nobody asks for version 4: its module is not imported."""
    machine.launch = {"attention_backend": "fa3"}
    facts = await machine.look(imports=True)
    assert facts.imports[3].evidence is not None
    assert facts.imports[4].evidence is None


async def test_a_required_version_is_imported(machine: Machine) -> None:
    """What the operator requires is looked at whether anything uses it or not."""
    machine.settings = Settings(require=("fa4",))
    facts = await machine.look(imports=True)
    assert facts.imports[4].evidence is not None


async def test_without_libcuda_nothing_is_imported(machine: Machine) -> None:
    """These imports fail where there is no driver, however good the environment is: files are all there is."""
    machine.launch = {"attention_backend": "fa3"}
    machine.environ = {"PATH": os.defpath, "HOME": str(machine.folder)}
    if Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists():
        pytest.skip("this machine has a driver's libcuda.so.1 where every loader looks")
    facts = await machine.look(imports=True)
    assert facts.imports[3].evidence is None
    assert judged(facts, Answer.REFUSED)["fa3-not-importable"].reason == "no-libcuda"


async def test_the_cause_behind_sglangs_sentence_is_recovered(machine: Machine) -> None:
    """A kernel wheel without flash_ops: the import shows what the bare except hides.

    sgl-project/sglang#9309, sgl-project/sglang#22306
    """
    machine.launch = {"attention_backend": "fa3"}
    machine.site.remove("sgl_kernel/flash_ops.py")
    facts = await machine.look(imports=True)
    found = judged(facts, Answer.REFUSED)["fa3-not-importable"]
    assert (found.status, found.reason, found.final) == (Status.TRUE, "flash-ops-missing", True)
    assert any("cannot import name 'flash_ops' from 'sgl_kernel'" in line for line in found.evidence)
    assert found.sglang_says == "Can not import FA3 in sgl_kernel. Please check your installation."


Damage = Callable[[Site], None]


def _without_cutlass(site: Site) -> None:
    site.remove("nvidia_cutlass_dsl.pth")


@pytest.mark.parametrize(
    ("changes", "damage", "reason", "words"),
    [
        (
            ("nvidia-cutlass-dsl", "quack-kernels"),
            None,
            "missing-dependency",
            ("cutlass (nvidia-cutlass-dsl is not installed)", "quack (quack-kernels is not installed)"),
        ),
        ((), _without_cutlass, "cutlass-path-missing", ("nvidia-cutlass-dsl 4.6.0 is installed",)),
        (
            (),
            lambda site: site.write("quack/__init__.py", "import absent_one\n"),
            "missing-dependency",
            ("absent_one",),
        ),
        ((), lambda site: site.write("quack/__init__.py", "def f(:\n"), "corrupt-file", ("SyntaxError",)),
        ((), lambda site: site.write("quack/__init__.py", "import os\nos._exit(7)\n"), "crashed", ("exit code 7",)),
        ((), lambda site: site.write(VENDORED, "import torch\n"), "symbol-missing", ("flash_attn_varlen_func",)),
    ],
)
async def test_fa4_has_one_cause(
    tmp_path: Path, changes: tuple[str, ...], damage: Damage | None, reason: str, words: tuple[str, ...]
) -> None:
    """Missing packages come all at once; a path that was not processed is told from a package that is not there.

    Dao-AILab/flash-attention#2234, Dao-AILab/flash-attention#2205, NVIDIA/cutlass#3001, vllm-project/vllm#43738
    """
    machine = Machine(tmp_path, Isolation())
    machine.site = install(tmp_path / "other", "0.5.16", dict.fromkeys(changes))
    machine.site.write(VENDORED, CUTE_MODULE)
    if damage is not None:
        damage(machine.site)
    machine.launch = {"attention_backend": "fa4"}
    found = judged(await machine.look(imports=True), Answer.REFUSED)["fa4-not-importable"]
    await machine.sources.close()
    assert (found.status, found.reason, found.final) == (Status.TRUE, reason, True), found
    assert all(word in found.message for word in words), found.message
    assert found.sglang_says is not None
    assert found.sglang_says.startswith("FlashAttention-4 CUTE is not available.")


async def test_fa4_gates_until_attention_has_run(machine: Machine) -> None:
    """HTTP answers before the first attention call: until a scheduler has run it, a failed import keeps it unready."""
    machine.site.remove("nvidia_cutlass_dsl.pth")
    machine.info = answer("fa4")
    machine.runs("torch/lib/libtorch_cuda.so")
    before = judged(await machine.look(imports=True))["fa4-not-importable"]
    assert (before.status, before.gate) == (Status.TRUE, Gate.SERVING)
    machine.runs("nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so")
    after = judged(await machine.look())["fa4-not-importable"]
    assert (after.status, after.gate) == (Status.TRUE, None)


@pytest.mark.parametrize(("version", "ran"), [("0.5.20", True), ("0.5.19", False)])
async def test_ready_proves_attention_once_it_means_that(machine: Machine, version: str, ran: bool) -> None:
    """From 0.5.20 on /ready says that the warm-up has run; that stays true until the server goes away."""
    machine.info = answer("fa4", version)
    machine.observation = ServerObservation(answer=Answer.ACCEPTED, status=200, ready=True)
    assert (await machine.look()).ran is ran
    machine.observation = ServerObservation(answer=Answer.ACCEPTED, status=503, ready=False)
    assert (await machine.look()).ran is ran
    machine.observation = ServerObservation(answer=Answer.REFUSED)
    assert (await machine.look()).ran is False


# -- installed ------------------------------------------------------------------------------------------


async def test_flash_attn_4_alone_is_no_version_2(machine: Machine) -> None:
    """It shares the bare package flash_attn: version 4 is offered, version 2 is not installed.

    huggingface/transformers#44559
    """
    sections = PROBE.report(await machine.look())["flash_attention"]
    assert {number: one.installed for number, one in sections.items()} == {"2": False, "3": True, "4": True}
    assert sections["2"].distribution_version is None


async def test_version_2_is_found_beside_it(machine: Machine) -> None:
    """With its package and its compiled part it is installed, and still no version of SGLang's."""
    machine.site.dist("flash-attn", "2.8.3")
    machine.site.write("flash_attn/__init__.py")
    machine.site.write(f"flash_attn_2_cuda{sysconfig.get_config_var('EXT_SUFFIX')}", "binary")
    sections = PROBE.report(await machine.look())["flash_attention"]
    assert (sections["2"].installed, sections["2"].distribution_version) == (True, "2.8.3")


# -- before a launch ------------------------------------------------------------------------------------


async def preflight(
    folder: Path,
    library: Path,
    *words: str,
    damage: Damage | None = None,
    settings: dict[str, Any] | None = None,
    **gpus: Any,
) -> Any:
    """What a check of a launch says on a machine with an H200, or a GPU with other properties: the snapshot."""
    site = install(folder / "environment", "0.5.16")
    if damage is not None:
        damage(site)
    nvidia = folder / "proc" / "driver" / "nvidia"
    (nvidia / "gpus" / "0000:00:06.0").mkdir(parents=True)
    (nvidia / "version").write_text(OPEN_MODULE)
    nvml = Scenario(folder / "scenario", gpus=1, **gpus).environ(library)
    driver_library(folder, "driver")
    nvml["LD_LIBRARY_PATH"] = f"{folder / 'driver'}:{nvml['LD_LIBRARY_PATH']}"
    environ = {"PATH": os.defpath, "HOME": str(folder), **nvml}
    named = [word for word in words if "=" in word]
    flags = [word for word in words if "=" not in word]
    values: dict[str, Any] = {
        "launch": (*named, site.python, "-m", "sglang.launch_server", "--model-path", "m", *flags),
        "placement": Placement.HOST,
        "processes": Processes.HIDDEN,
        "import_policy": ImportPolicy.NEVER,
    }
    async with Agent.create(
        Settings(**(values | (settings or {}))), once=True, environ=environ, proc=folder / "proc"
    ) as agent:
        return await agent.check()


async def test_a_launch_without_a_backend_is_predicted(fake_library: Path, tmp_path: Path) -> None:
    """On Hopper 0.5.16 takes fa3 by itself: without flash_ops such a launch is warned of, since it is a prediction."""
    snapshot = await preflight(tmp_path, fake_library, damage=lambda site: site.remove("sgl_kernel/flash_ops.abi3.so"))
    found = snapshot.conditions["fa3-not-importable"]
    assert (found.active, found.severity, found.reason) == (True, Severity.WARNING, "flash-ops-missing")
    section = PROBE.report(snapshot.results["attention"].facts)["attention"]["decode"]
    assert (section.predicted, section.version, section.source) == ("fa3", 3, "prediction")


async def test_a_launch_with_another_backend_is_not_concerned(fake_library: Path, tmp_path: Path) -> None:
    """A flag that names a backend leaves nothing to predict, and version 3's absence to nobody."""
    damage: Damage = lambda site: site.remove("sgl_kernel/flash_ops.abi3.so")  # noqa: E731 - as the others are written
    snapshot = await preflight(tmp_path, fake_library, "--attention-backend", "triton", damage=damage)
    assert not snapshot.conditions["fa3-not-importable"].active


async def test_an_override_in_front_of_a_launch_is_seen(fake_library: Path, tmp_path: Path) -> None:
    """An assignment before the command counts as the server's variable."""
    snapshot = await preflight(tmp_path, fake_library, "SGLANG_FLASHATTENTION_VERSION=5", "--attention-backend", "fa3")
    found = snapshot.conditions["fa-version-invalid"]
    assert (found.active, found.severity, found.reason) == (True, Severity.WARNING, "variable-out-of-range")
    assert "Invalid version: self.fa_impl_ver=5" in found.message


@pytest.mark.parametrize(
    ("backend", "card", "code"),
    [
        ("fa3", "b200", "fa3-unsupported-gpu"),
        ("trtllm_mha", "h200", "attention-backend-unsupported-gpu"),
        ("trtllm_mla", "a100", "attention-backend-unsupported-gpu"),
    ],
)
async def test_the_gpu_that_nvml_shows_is_judged(
    fake_library: Path, tmp_path: Path, backend: str, card: str, code: str
) -> None:
    """The capability comes from NVML, restricted to the launch's GPUs; what SGLang refuses there is critical.

    sgl-project/sglang#12360, sgl-project/sglang#931
    """
    capability = {"b200": 100, "h200": 90, "a100": 80}[card]
    snapshot = await preflight(tmp_path, fake_library, "--attention-backend", backend, compute_capability=capability)
    found = snapshot.conditions[code]
    assert (found.active, found.severity, len(found.gpus)) == (True, Severity.CRITICAL, 1)


@pytest.mark.parametrize("backend", ["fa3", "fa4"])
async def test_a_gpu_that_nothing_runs_on_has_one_cause(fake_library: Path, tmp_path: Path, backend: str) -> None:
    """No kernel wheel has code for a T4: that is told, and not another backend that would fail there, too.

    sgl-project/sglang#931, vllm-project/vllm#8189
    """
    snapshot = await preflight(tmp_path, fake_library, "--attention-backend", backend, compute_capability=75)
    assert snapshot.conditions["gpu-arch-unsupported"].active
    found = snapshot.conditions[f"{backend}-unsupported-gpu"]
    assert (found.status, found.consequence_of) == (Status.TRUE, "gpu-arch-unsupported")


@pytest.mark.parametrize(
    ("flags", "capability", "remedy"),
    [
        (("--attention-backend", "fa3"), 120, "Choose --attention-backend flashinfer for"),
        (
            ("--attention-backend", "triton", "--decode-attention-backend", "fa3"),
            100,
            "Choose --decode-attention-backend fa4 for",
        ),
        (
            ("--attention-backend", "triton", "--mm-attention-backend", "fa3"),
            120,
            "Choose --mm-attention-backend triton_attn for",
        ),
        (("--attention-backend", "triton", "--mm-attention-backend", "fa3"), 100, "Choose --mm-attention-backend fa4"),
    ],
)
async def test_the_remedy_names_the_flag_that_decides(
    fake_library: Path, tmp_path: Path, flags: tuple[str, ...], capability: int, remedy: str
) -> None:
    """A phase with a backend of its own is not mended by the flag for all, nor the vision tower by a decoder's."""
    snapshot = await preflight(tmp_path, fake_library, *flags, compute_capability=capability)
    found = snapshot.conditions["fa3-unsupported-gpu"]
    assert found.active
    assert found.remedy.startswith(remedy)


async def test_a_long_import_does_not_make_the_gpus_unknown(fake_library: Path, tmp_path: Path) -> None:
    """A check looks at the driver once; what it saw then is renewed where an import outlasts it."""

    def slow(site: Site) -> None:
        site.write("sgl_kernel/flash_attn.py", f"import time\ntime.sleep(2)\n{FLASH_ATTN}")

    snapshot = await preflight(
        tmp_path,
        fake_library,
        "--attention-backend",
        "fa3",
        damage=slow,
        settings={"import_policy": ImportPolicy.AUTO, "intervals": {"driver": 0.1}, "deadlines": {"driver": 1.0}},
        compute_capability=100,
    )
    assert snapshot.conditions["fa3-not-importable"].status is Status.TRUE, "the stub of flash_ops cannot be loaded"
    found = snapshot.conditions["fa3-unsupported-gpu"]
    assert (found.status, found.reason) == (Status.TRUE, "above-sm90")
