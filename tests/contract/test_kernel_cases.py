"""The kernel wheel with real shared libraries and real imports: what the loader says and what is made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from sidecar.cudalibs import Capability
from sidecar.environment import DriverLibrary, LibraryFile
from sidecar.imports import ImportEvidence, ImportOutcome
from sidecar.isolation import Isolation
from sidecar.memory import MemoryLimit
from sidecar.model import Scope, Status
from sidecar.probes.kernel import KERNEL_IMPORT, KernelFacts, Verdict, classify
from tests.fakes.kernel import HAVE_COMPILER, THERE, compiled, operations, wheel
from tests.fakes.site import RealClock, Site
from tests.fakes.sources import Sources, imported

pytestmark = pytest.mark.skipif(not HAVE_COMPILER, reason="needs a C compiler")

HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)
OLD_STRINGS = "_ZN5torch3jit17parseSchemaOrNameERKSsb"
NEW_STRINGS = "_ZN3c1013MessageLogger6streamB5cxx11Ev"
SET_DEVICE = "_ZN3c104cuda9SetDeviceEa"
SAYS = "[sgl_kernel] CRITICAL: Could not load any common_ops library!"


@dataclass(frozen=True)
class Machine:
    """An environment with the wheel, and how to judge it."""

    site: Site
    sources: Sources

    async def evidence(self, **environ: str) -> ImportEvidence:
        base = self.site.target()
        return await imported(self.sources, replace(base, environ={**(base.environ or {}), **environ}))

    async def verdict(self, *gpus: Capability, **changes: object) -> Verdict:
        """What is judged after a real import, for these GPUs."""
        evidence = await self.evidence()
        facts = await self.sources.read(self.site.target())
        found = DriverLibrary(found=(LibraryFile(path="/usr/lib/libcuda.so.1", version="580.1"),), path_seen=True)
        facts = replace(facts, libcuda=found, **changes)  # type: ignore[arg-type]
        return classify(KernelFacts(environment=facts, evidence=evidence, gpus=frozenset(gpus), variables_seen=True))


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    """A wheel without builds; tests compile what they need into it."""
    isolation = Isolation()
    site = Site(tmp_path / "venv")
    wheel(site)
    sources = Sources(isolation, RealClock(), memory=MemoryLimit(cgroup=Path("/nonexistent")), work=KERNEL_IMPORT)
    yield Machine(site, sources)
    await sources.close()
    await isolation.close()


async def test_both_builds_are_proven(machine: Machine) -> None:
    """The import takes one build with the GPUs hidden; the one for Hopper is loaded for itself, and both are told."""
    operations(machine.site, "sm90")
    operations(machine.site, "sm100")
    for gpus in ((), (HOPPER,), (BLACKWELL,), (HOPPER, BLACKWELL)):
        verdict = await machine.verdict(*gpus)
        assert (verdict.status, verdict.verified) == (Status.FALSE, True)
    assert "sgl_kernel/sm90/common_ops.abi3.so by itself: loaded" in verdict.evidence
    assert "with the GPUs hidden, the import loads sgl_kernel/sm100" in verdict.evidence


@pytest.mark.parametrize(("bad", "fine_on"), [("sm90", BLACKWELL), ("sm100", HOPPER)])
async def test_only_the_build_of_these_gpus_counts(machine: Machine, bad: str, fine_on: Capability) -> None:
    """A build that does not load concerns the GPUs that need it; unknown while they are (sgl-project/sglang#13948)."""
    good = "sm100" if bad == "sm90" else "sm90"
    operations(machine.site, good)
    operations(machine.site, bad, symbol=SET_DEVICE)
    concerned = HOPPER if bad == "sm90" else BLACKWELL
    assert (await machine.verdict(concerned)).reason == "abi-mismatch"
    assert (await machine.verdict(concerned, fine_on)).reason == "abi-mismatch"
    unknown = await machine.verdict()
    assert (unknown.status, unknown.reason) == (Status.UNKNOWN, "gpus-unknown")
    elsewhere = await machine.verdict(fine_on)
    # With sm100 broken the import itself never got to its end, so that for Hopper it is not proven to the last.
    assert elsewhere.status is (Status.FALSE if bad == "sm90" else Status.UNKNOWN)


@pytest.mark.parametrize(
    ("symbol", "readable", "strings"),
    [
        (OLD_STRINGS, "torch::jit::parseSchemaOrName", "from before C++11"),
        (NEW_STRINGS, "c10::MessageLogger::stream", "(cxx11)"),
        (SET_DEVICE, "c10::cuda::SetDevice", None),
    ],
)
async def test_undefined_symbol_of_torch(machine: Machine, symbol: str, readable: str, strings: str | None) -> None:
    """A symbol that torch lacks is named, with both versions and the pair to install (sgl-project/sglang#5100, #7033).

    The wheel's text about compute capabilities is not taken for the cause (sgl-project/sglang#30562).
    """
    operations(machine.site, "sm100", symbol=symbol)
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.status, verdict.reason, verdict.explained_by) == (Status.TRUE, "abi-mismatch", ())
    assert f"{readable} ({symbol})" in verdict.message
    assert "torch 2.11.0+cu130" in verdict.message
    assert "sgl_kernel 0.4.5" in verdict.message
    assert ("strings" in verdict.message) is (strings is not None)
    assert (strings or "") in verdict.message
    assert (verdict.remedy or "").endswith("sglang-kernel==0.4.5 torch==2.11.0")
    assert verdict.sglang_says == SAYS


async def test_symbol_of_the_driver(machine: Machine) -> None:
    """A function that the driver's library lacks is the driver's fault, and explained by it where that is known."""
    operations(machine.site, "sm100", symbol="cuMemcpyBatchAsync")
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.reason, verdict.explained_by) == (
        "abi-mismatch",
        ("driver-too-old-for-cuda", "libcuda-unusable"),
    )
    assert "driver" in verdict.message


async def test_library_of_another_cuda(machine: Machine) -> None:
    """A wheel for CUDA 12 beside torch for 13: both are named, and what there is instead (sgl-project/sglang#18203)."""
    operations(machine.site, "sm100", needs="libcudart.so.12")
    machine.site.write("nvidia/cu13/lib/libcudart.so.13", "")
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "missing-library")
    for part in ("libcudart.so.12", "nvidia/cu13/lib/libcudart.so.13 instead", "build for CUDA 12", "CUDA 13.0"):
        assert part in verdict.message
    assert "build for CUDA 13" in (verdict.remedy or "")


async def test_library_where_nobody_looks(machine: Machine) -> None:
    """A library where the loader does not look is told with its place (sgl-project/sglang#5094)."""
    operations(machine.site, "sm100", needs="libnvrtc.so.13")
    machine.site.write("nvidia/cuda_nvrtc/lib/libnvrtc.so.13", "")
    verdict = await machine.verdict(BLACKWELL)
    assert verdict.reason == "missing-library"
    assert "It is at nvidia/cuda_nvrtc/lib/libnvrtc.so.13, where the loader does not look." in verdict.message
    assert "Put nvidia/cuda_nvrtc/lib (below site-packages) into the server's LD_LIBRARY_PATH" in (verdict.remedy or "")


async def test_the_servers_loader_path_counts(machine: Machine) -> None:
    """With the server's LD_LIBRARY_PATH, not the agent's, the same wheel loads (sgl-project/sglang#16052)."""
    operations(machine.site, "sm100", needs="libnvrtc.so.13")
    compiled(THERE, machine.site.root / "lib64/libnvrtc.so.13")
    without = await machine.evidence()
    given = await machine.evidence(LD_LIBRARY_PATH=str(machine.site.root / "lib64"))
    assert without.outcome is ImportOutcome.FAILED
    assert "libnvrtc.so.13: cannot open shared object file" in without.message
    assert given.outcome is ImportOutcome.OK


async def test_libcuda_that_vanished(machine: Machine) -> None:
    """A missing libcuda is told apart from other libraries: the driver explains it (sgl-project/sglang#4778)."""
    operations(machine.site, "sm100", needs="libcuda.so.1")
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "libcuda-missing")
    assert verdict.explained_by == ("driver-too-old-for-cuda", "libcuda-unusable")


@pytest.mark.parametrize("needs", ["libcuda.so.1", "libnvrtc.so.12"])
async def test_another_container_explains_a_missing_library(machine: Machine, needs: str) -> None:
    """In the same image, but another container, a library that is not found is no fault of the server."""
    operations(machine.site, "sm100", needs=needs)
    verdict = await machine.verdict(BLACKWELL, scope=Scope.IMAGE)
    assert (verdict.status, verdict.reason) == (Status.UNKNOWN, "probe-environment")


async def test_another_container_does_not_explain_a_symbol(machine: Machine) -> None:
    """The files of an image are the same in every container, and so is what torch lacks."""
    operations(machine.site, "sm100", symbol=OLD_STRINGS)
    verdict = await machine.verdict(BLACKWELL, scope=Scope.IMAGE)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "abi-mismatch")


async def test_truncated_file(machine: Machine) -> None:
    """A compiled file that was cut off is a partial install."""
    path = operations(machine.site, "sm100")
    path.write_bytes(path.read_bytes()[:40])
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "partial-install")
    assert "file too short" in verdict.message


async def test_a_library_that_crashes_is_contained(machine: Machine) -> None:
    """A build that ends the process that loads it is told; the import itself goes on."""
    operations(machine.site, "sm100")
    operations(machine.site, "sm90", code="#include <stdlib.h>\n__attribute__((constructor)) void f(void) { abort(); }")
    evidence = await machine.evidence()
    assert evidence.outcome is ImportOutcome.OK
    [load] = evidence.loads
    assert load.path == "sm90/common_ops.abi3.so"
    assert "SIGABRT" in (load.error or "")
    verdict = await machine.verdict(HOPPER)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "crashed")


async def test_the_import_itself_crashes(machine: Machine) -> None:
    """A build that ends the importing process is crashed, with the stage it came to."""
    operations(
        machine.site, "sm100", code="#include <stdlib.h>\n__attribute__((constructor)) void f(void) { abort(); }"
    )
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "crashed")
    assert "SIGABRT" in verdict.message
    assert "sgl_kernel" in verdict.message


async def test_only_another_architectures_folder(machine: Machine) -> None:
    """A wheel with one folder, on a GPU for which its loader looks into the other (sgl-project/sglang#13948)."""
    operations(machine.site, "sm100")
    verdict = await machine.verdict(HOPPER)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "wrong-arch-folder")
    assert verdict.explained_by == ("gpu-arch-unsupported",)
    assert (await machine.verdict(BLACKWELL)).status is Status.FALSE


async def test_flashinfer_behind_the_wheel(machine: Machine) -> None:
    """The wheel imports FlashInfer, whose refusal ends its own import: that is FlashInfer's fault, not the wheel's."""
    operations(machine.site, "sm100")
    site = machine.site
    site.flashinfer("0.6.14")
    site.companion("flashinfer-cubin", "0.6.12")
    with open(site.packages / "sgl_kernel/__init__.py", "a") as file:
        file.write("try:\n    import flashinfer.jit\nexcept ImportError:\n    pass\n")
    verdict = await machine.verdict(BLACKWELL)
    assert (verdict.status, verdict.reason) == (Status.TRUE, "flashinfer-fails")
    assert "flashinfer-cubin-mismatch" in verdict.explained_by
    assert (verdict.sglang_says or "").startswith("flashinfer-cubin version (0.6.12) does not match")


@pytest.mark.parametrize("symbol", [None, SET_DEVICE])
async def test_older_wheels_have_one_build(machine: Machine, symbol: str | None) -> None:
    """A release without folders loads the build beside its code, whatever the GPU (sgl-project/sglang#3769)."""
    operations(machine.site, ".", symbol=symbol)
    for gpu in (HOPPER, BLACKWELL):
        assert (await machine.verdict(gpu)).reason == ("abi-mismatch" if symbol else None)
