"""What is imported, and what an import is known to have done."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field


class ImportWork(Struct, frozen=True):
    """What to import: a module, and the name in it that must be callable, if any.

    ``first`` is a module that it imports before anything else. ``load`` are patterns of shared libraries below the
    module's folder that are loaded for themselves, with ``first`` imported: those that its import may pass over.
    """

    module: str
    symbol: str | None = None
    first: str | None = None
    load: tuple[str, ...] = ()


FLASHINFER_MAMBA: Final = ImportWork("flashinfer.mamba", "selective_state_update")
"""What SGLang imports for ``--mamba-backend flashinfer``."""


INTERPRETER_BROKEN: Final = "interpreter-broken"
"""Reason of evidence: the interpreter ended, or hung, before anything was imported."""


class ImportOutcome(StrEnum):
    """How an import ended. Only ok, failed, crashed and timeout say something about the environment."""

    OK = "ok"
    FAILED = "failed"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    STARVED = "starved"
    INSUFFICIENT_MEMORY = "insufficient-memory"
    NOT_ALLOWED = "not-allowed"


class ImportLink(Struct, frozen=True):
    """One exception of a chain. ``library`` is the file that could not be loaded, where Python names one."""

    exception: str
    message: str
    library: str | None = None


class LibraryLoad(Struct, frozen=True):
    """A shared library that was loaded for itself; ``path`` is below the module's folder.

    ``error`` is what the loader said, or how the loading process ended; None when it was loaded. ``signal`` names
    the signal that ended that process, if one did.
    """

    path: str
    error: str | None = None
    signal: str | None = None


class ImportEvidence(Struct, frozen=True, kw_only=True):
    """What a real import did, as far as the child could tell.

    ``reason`` is the token behind not-allowed; also ``busy`` for one that was starved of nothing but computed to
    the end, and ``rlimit`` for one that met a limit which this agent's processes are under. ``step`` is import or
    symbol. ``exited``: the code called ``sys.exit``. ``same_user`` is False when the child could not run as the
    server's user. ``tail`` is the last line that the child printed. For an interpreter that does not start
    ``where`` is the file of its own that ends it, and ``cause`` how. ``loading`` is the compiled file that was
    being loaded when a child died, ``died_at`` the ``file:line`` that it was in by the interpreter's own trace,
    each where it is known. ``chain`` is the exception and what it was raised from, outermost first. ``loads`` are
    the libraries that were loaded for themselves. ``wheels`` maps each library that the loader did not find to
    where NVIDIA's wheels have it, in that version or another, below the import path. ``devices_hidden`` is None
    where nothing was run; ``cuda_available`` is what torch said of the GPUs, where they were not hidden.
    ``withheld`` names those of the server's variables that no import gets; ``private`` says that what failed
    concerns a folder that the child had in place of the server's, or a full disk.
    """

    outcome: ImportOutcome
    at: float
    reason: str | None = None
    seconds: float | None = None
    stage: str | None = None
    step: str | None = None
    symbol: str | None = None
    names: tuple[str, ...] = ()
    exception: str | None = None
    message: str = ""
    where: str | None = None
    missing: str | None = None
    errno: int | None = None
    os_error: bool = False
    exited: bool = False
    sglang_catches: bool | None = None
    cause: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    tail: str = ""
    loading: str | None = None
    died_at: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    cuda_initialized: bool | None = None
    max_rss_bytes: int | None = None
    same_user: bool = True
    chain: tuple[ImportLink, ...] = ()
    loads: tuple[LibraryLoad, ...] = ()
    wheels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    devices_hidden: bool | None = None
    cuda_available: bool | None = None
    withheld: tuple[str, ...] = ()
    private: bool = False
