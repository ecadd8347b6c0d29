"""The reader and the importer of an environment as one object, as an agent holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from sidecar.config import Settings
from sidecar.credentials import Credentials
from sidecar.environment import Environment, EnvironmentFacts
from sidecar.imports import FLASHINFER_MAMBA, Importer, ImportEvidence, ImportLimits, ImportWork
from sidecar.isolation import Isolation
from sidecar.memory import MemoryLimit
from sidecar.model import Clock, Placement, Target
from tests.fakes.site import good

NO_LIMIT = MemoryLimit(cgroup=Path("/nonexistent"))
"""As where no control group limits the memory."""


class Sources:
    """What services call ``environment`` and ``imports``; the short methods are about ``work``."""

    def __init__(
        self,
        isolation: Isolation,
        clock: Clock,
        settings: Settings | None = None,
        *,
        placement: Placement = Placement.CONTAINER,
        proc: Path = Path("/proc"),
        environ: Mapping[str, str] | None = None,
        memory: MemoryLimit | None = None,
        limits: ImportLimits | None = None,
        work: ImportWork = FLASHINFER_MAMBA,
        with_devices: bool = False,
    ) -> None:
        credentials = Credentials(proc=proc, environ=environ)
        self.environment = Environment(isolation, clock, settings or Settings(), credentials)
        self.imports = Importer(
            isolation,
            clock,
            credentials,
            placement=placement,
            with_devices=with_devices,
            memory=memory,
            limits=limits,
        )
        self.work = work

    @property
    def importing(self) -> bool:
        return self.imports.importing(self.work)

    async def read(self, target: Target) -> EnvironmentFacts:
        return await self.environment.read(target)

    def import_evidence(self, facts: EnvironmentFacts, target: Target) -> ImportEvidence | None:
        return self.imports.evidence(self.work, facts, target)

    def import_due(self, facts: EnvironmentFacts, target: Target) -> bool:
        return self.imports.due(self.work, facts, target)

    def request_import(self, facts: EnvironmentFacts, target: Target, done: Callable[[], None]) -> None:
        self.imports.request(self.work, facts, target, done)

    async def wait_import(self) -> bool:
        return await self.imports.wait()

    async def close(self) -> None:
        await self.imports.close()
        await self.environment.close()


async def imported(sources: Sources, target: Target) -> ImportEvidence:
    """The evidence of an import, running one where it is due."""
    facts = await sources.read(target)
    if sources.import_due(facts, target):
        sources.request_import(facts, target, lambda: None)
        await sources.wait_import()
    evidence = sources.import_evidence(facts, target)
    assert evidence is not None
    return evidence


async def import_of(sources: Sources, root: Path, mamba: str) -> ImportEvidence:
    """The evidence of importing a good environment with this code at the top of ``flashinfer.mamba``."""
    site = good(root / "venv")
    site.flashinfer(mamba=mamba)
    return await imported(sources, site.target())


def fake_proc(root: Path, uid: int, capabilities: str) -> Path:
    """A /proc with a server of this user as process 77, and the agent's own capabilities."""
    ids = "\t".join([str(uid)] * 4)
    for name, text in (
        ("77/status", f"Name:\tpython\nUid:\t{ids}\nGid:\t{ids}\nGroups:\t7 \n"),
        ("self/status", f"CapEff:\t{capabilities}\n"),
    ):
        path = root / "proc" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return root / "proc"
