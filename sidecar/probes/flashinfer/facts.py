"""What the flashinfer probe knows when it judges."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence


class ImportState(StrEnum):
    """What is up with a real import."""

    DONE = "done"
    PENDING = "pending"
    NOT_REQUESTED = "not-requested"
    NOT_ALLOWED = "not-allowed"


class MambaArguments(Struct, frozen=True, kw_only=True):
    """What a launch says of the mamba cache.

    ``source`` is server-info or flags, None where neither was seen. ``rounding`` says whether stochastic rounding is
    asked for, None where the flags may hold more than was read. ``ssm_dtype`` None is the default: the model's own.
    """

    source: str | None = None
    rounding: bool | None = None
    ssm_dtype: str | None = None


class FlashinferFacts(Struct, frozen=True, kw_only=True):
    """All that `classify` judges.

    ``sglang`` is SGLang's version, by its metadata or by the running server. ``mamba`` is what the launch asks for.
    ``server_seen``: there is a process or an answer of a server, whatever may be read of it. ``variables`` holds the
    server's values of `SEEN_VARIABLES`, and is None where its environment cannot be seen, with the token
    ``variables_missing``. ``cubin_dir`` and ``log_file`` say that FLASHINFER_CUBIN_DIR and FLASHINFER_LOGDEST are
    set for it. ``cache_stands``: FlashInfer's cache folder is the one that was judged, and not one that SGLang
    redirects it to. ``library_at`` is where a shared library that an import missed lies, below site-packages.
    """

    environment: EnvironmentFacts
    evidence: ImportEvidence | None = None
    state: ImportState = ImportState.NOT_REQUESTED
    sglang: str | None = None
    mamba: MambaArguments = field(default_factory=MambaArguments)
    server_seen: bool = False
    variables: Mapping[str, str] | None = None
    variables_missing: str | None = None
    cubin_dir: bool = False
    log_file: bool = False
    cache_stands: bool = False
    library_at: str | None = None
