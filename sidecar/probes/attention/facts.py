"""What the attention probe knows when it judges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, field

from sidecar.backends import BackendSource, PhaseBackend, Release, release
from sidecar.cudalibs import Capability, version
from sidecar.environment import EnvironmentFacts
from sidecar.gpuset import Gpu
from sidecar.imports import ImportEvidence
from sidecar.model import Phase

OVERRIDE_VARIABLE = "SGLANG_FLASHATTENTION_VERSION"
"""What people set to choose a FlashAttention version. No release of SGLang reads it."""
_LOADED: Final[Mapping[int, re.Pattern[str]]] = MappingProxyType(
    {
        3: re.compile(r"flash_ops|_?(?:sgl_)?flash_attn_?3"),
        4: re.compile(r"lib(?:cute_dsl|cuda_dialect|mlir_cuda)_runtime"),
    }
)
"""How the names of the objects start that a scheduler has mapped once it loaded version 3, or ran version 4.

Version 3 is the kernel wheel's, or with SGLANG_USE_SGL_FA3_KERNEL=0 one from a kernel repository. Version 4 shows by
what compiled CuTe kernels run on: libmlir_cuda_runtime in nvidia-cutlass-dsl 4.2, libcuda_dialect_runtime in 4.3,
libcute_dsl_runtime since.
"""


class ImportState(Struct, frozen=True, kw_only=True):
    """What is up with the real import of a provider's module. ``pending``: under way or waiting for its turn."""

    evidence: ImportEvidence | None = None
    pending: bool = False


class AttentionFacts(Struct, frozen=True, kw_only=True):
    """All that is judged.

    ``environment`` is None where no interpreter was found. ``server_version`` is the running server's own word.
    ``info_seen``: the server has told its resolved arguments; ``launch`` holds its flags, None where they cannot be
    seen; ``preflight``: they are those of a launch that is not done yet. ``declared`` maps where a ``fa_impl_ver``
    was found (server-info, flags) to its value as text. ``override`` is the value of `OVERRIDE_VARIABLE`,
    None where it is not set; ``environ_seen`` is False where the server's variables cannot be seen, and then
    ``environ_missing`` says why. ``from_pip``: FlashAttention 4 is taken from its own package by a variable.
    ``imports`` is keyed by FlashAttention version. ``gpus`` are the server's where ``gpus_known``, else all visible
    ones. ``mapped`` holds, for each scheduler, the base names of the objects that it has mapped (None: its maps may
    not be read); it is None where no processes are seen. ``ran`` is whether an attention call is known to have been
    made by this server process; ``ready_seen``: its ``/ready`` tells whether its warm-up has run.
    """

    phases: Mapping[Phase, PhaseBackend]
    environment: EnvironmentFacts | None = None
    server_version: str | None = None
    info_seen: bool = False
    launch: Mapping[str, Any] | None = None
    preflight: bool = False
    declared: Mapping[str, str] = field(default_factory=dict)
    override: str | None = None
    environ_seen: bool = False
    environ_missing: str | None = None
    from_pip: bool = False
    imports: Mapping[int, ImportState] = field(default_factory=dict)
    gpus: Mapping[Gpu, Capability] = field(default_factory=dict)
    gpus_known: bool = False
    mapped: tuple[frozenset[str] | None, ...] | None = None
    ran: bool = False
    ready_seen: bool = False
    prediction_why: str | None = None

    @property
    def installed_version(self) -> str | None:
        """SGLang's version in the environment: what the next launch would run."""
        return None if self.environment is None else self.environment.sglang_release

    @property
    def running_release(self) -> Release | None:
        """The release that the backends are those of: the running server's, else the installed one."""
        return release(self.server_version) or release(self.installed_version)

    @property
    def installed_release(self) -> Release | None:
        """The release whose imports are judged: the installed one, else the running server's."""
        return release(self.installed_version) or release(self.server_version)

    @property
    def cuda(self) -> tuple[int, ...] | None:
        """Version of CUDA that the server's torch was built for."""
        return None if self.environment is None else version(self.environment.torch_cuda)

    def phases_of(self, fa_version: int) -> Mapping[Phase, PhaseBackend]:
        """The phases that run that version."""
        return MappingProxyType({key: one for key, one in self.phases.items() if one.version == fa_version})

    def only_predicted(self, fa_version: int) -> bool:
        """Whether nothing but a prediction says that the version is used."""
        used = self.phases_of(fa_version).values()
        return bool(used) and all(one.source is BackendSource.PREDICTION for one in used)

    def loaded(self, fa_version: int) -> bool | None:
        """Whether a scheduler has mapped what that version loads; None while that cannot be seen."""
        if not self.mapped:
            return None
        start = _LOADED.get(fa_version)
        if start is None:
            return None
        if any(start.match(name) for one in self.mapped if one is not None for name in one):
            return True
        return None if any(one is None for one in self.mapped) else False
