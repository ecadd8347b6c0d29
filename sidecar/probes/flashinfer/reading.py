"""What reading the files of the server's environment says of ``flashinfer.mamba``."""

from __future__ import annotations

from packaging.version import Version

from sidecar.environment import UNKNOWN_VERSION, Companion, ImportOutcome
from sidecar.model import ConditionType
from sidecar.probes.flashinfer import faults, texts
from sidecar.probes.flashinfer.conditions import (
    CUBIN_MISMATCH,
    JIT_CACHE_MISMATCH,
    MAMBA_MISSING,
    NOT_INSTALLED,
    SYMBOL_MISSING,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts, ImportState
from sidecar.probes.flashinfer.faults import Classification
from sidecar.probes.flashinfer.texts import SGLANG_SAYS

_FIRST_THAT_ONLY_WARNS = Version("0.7.2")
_FIRST_EXACT_JIT_CACHE = Version("0.7.0")
"""From here on a jit-cache may differ by its local tag only; before, it need only start with FlashInfer's version."""
_LAST_LOOSE_JIT_CACHE = Version("0.6.14")


def by_files(facts: FlashinferFacts) -> Classification:
    """Find the one cause that the files show, or none."""
    files = facts.environment.flashinfer
    if files.kind in {"absent", "namespace"} and _maybe_elsewhere(facts):
        return faults.unknown("editable-install", "FlashInfer is installed in editable mode; only an import can tell.")
    if files.kind == "namespace" and files.mamba.state == "present":
        return faults.unknown(
            "damaged-package", "The package flashinfer has lost its __init__.py; only an import can tell."
        )
    if files.kind in {"absent", "namespace"}:
        return faults.not_installed(facts)
    if files.kind == "module":
        return faults.shadowed(facts)
    if files.mamba.state == "absent":
        return faults.mamba_missing(facts)
    companion = companion_fault(facts)
    if companion is not None and not companion.importable:
        return companion
    if (damage := _damage(facts)) is not None:
        return damage
    if companion is not None:
        return companion
    return Classification(
        importable=True,
        undecided=why_not_verified(facts),
        reason=why_not_verified(facts),
        message="Reading the files found no fault.",
        evidence=texts.versions_line(facts),
    )


def excluded_by_files(facts: FlashinferFacts) -> frozenset[str]:
    """Give the codes that the files prove not to be the case, whatever else is wrong."""
    files = facts.environment.flashinfer
    excluded = set()
    if files.kind == "package":
        excluded.add(NOT_INSTALLED.code)
        if files.mamba.state != "absent":
            excluded.add(MAMBA_MISSING.code)
        if files.mamba.state == "present" and files.mamba.symbol == "bound":
            excluded.add(SYMBOL_MISSING.code)
    # Companions lie beside FlashInfer; where that was not found they may be wherever it is.
    found_all = files.kind == "package" or (faults.path_known(facts) and not _maybe_elsewhere(facts))
    for kind, companion, _ in _companions(facts):
        if (companion.kind == "absent" and found_all) or _agrees(facts, kind, companion) is True:
            excluded.add(kind.code)
    return frozenset(excluded)


def why_not_verified(facts: FlashinferFacts) -> str:
    """Say by which token there is no real import to rest on."""
    outcome = facts.evidence.outcome if facts.evidence is not None else None
    if outcome is ImportOutcome.STARVED:
        return "import-starved"
    if outcome is ImportOutcome.INSUFFICIENT_MEMORY:
        return "insufficient-memory"
    if facts.state is ImportState.PENDING:
        return "import-pending"
    return "import-not-allowed" if facts.state is ImportState.NOT_ALLOWED else "not-imported"


def version_unread(facts: FlashinferFacts, code: str) -> bool:
    """Whether the companion that ``code`` is about could not be compared for want of a version."""
    version = facts.environment.flashinfer.version
    return any(
        kind.code == code and companion.kind == "package" and None in {version, companion.version}
        for kind, companion, _ in _companions(facts)
    )


def companion_fault(facts: FlashinferFacts) -> Classification | None:
    """Say what FlashInfer's own comparison with flashinfer-cubin and flashinfer-jit-cache would come to."""
    found = companion_faults(facts)
    # The one that keeps the module from being imported is the cause; FlashInfer looks at cubin first.
    return next((item for item in found if not item.importable), next(iter(found), None))


def companion_faults(facts: FlashinferFacts) -> tuple[Classification, ...]:
    """Find every companion that does not match."""
    files = facts.environment.flashinfer
    version = texts.parsed(files.version)
    if version is None:
        return ()
    ignored = version >= _FIRST_THAT_ONLY_WARNS
    bypassed = bool((facts.variables or {}).get(texts.BYPASS_VARIABLE))
    found: list[Classification] = []
    for kind, companion, distribution in _companions(facts):
        if kind is CUBIN_MISMATCH and facts.cubin_dir:
            continue  # newer releases then never look at the package; for older ones the import tells
        if companion.kind == "namespace":
            found.append(faults.leftover_companion(facts, kind, distribution))
        elif _agrees(facts, kind, companion) is False:
            soft = "check-bypassed" if bypassed else "ignored" if ignored else None
            found.append(faults.mismatch(facts, kind, distribution, str(companion.version), soft=soft))
    return tuple(found)


def _companions(facts: FlashinferFacts) -> tuple[tuple[ConditionType, Companion, str], ...]:
    files = facts.environment.flashinfer
    return (
        (CUBIN_MISMATCH, files.cubin, "flashinfer-cubin"),
        (JIT_CACHE_MISMATCH, files.jit_cache, "flashinfer-jit-cache"),
    )


def _agrees(facts: FlashinferFacts, kind: ConditionType, companion: Companion) -> bool | None:
    """Whether a companion's version is one that FlashInfer accepts; None where that cannot be told."""
    version = facts.environment.flashinfer.version
    if companion.version is None or version in {None, UNKNOWN_VERSION}:
        return None
    agrees = _cubin_agrees if kind is CUBIN_MISMATCH else _jit_cache_agrees
    return agrees(str(version), companion.version)


def _cubin_agrees(flashinfer: str, cubin: str) -> bool:
    return flashinfer == cubin


def _jit_cache_agrees(flashinfer: str, cache: str) -> bool | None:
    """Compare as FlashInfer does; None where releases between two known ones differ."""
    exact = cache == flashinfer or cache.startswith(f"{flashinfer}+")
    version = texts.parsed(flashinfer)
    if exact or version is None or version >= _FIRST_EXACT_JIT_CACHE or not cache.startswith(flashinfer):
        return exact
    return True if version <= _LAST_LOOSE_JIT_CACHE else None


def _maybe_elsewhere(facts: FlashinferFacts) -> bool:
    """Whether code that runs at the interpreter's start may make modules importable that no reading finds."""
    environment = facts.environment
    return "flashinfer-python" in environment.editable or _has_import_hooks(facts)


def _has_import_hooks(facts: FlashinferFacts) -> bool:
    return any(name.startswith("__editable__") for name in facts.environment.path_code)


def _damage(facts: FlashinferFacts) -> Classification | None:
    """Find a fault in the files of ``flashinfer.mamba`` or among the modules that FlashInfer needs."""
    files = facts.environment.flashinfer
    mamba = files.mamba
    shown = texts.versions_line(facts)
    if mamba.state == "invalid-init":
        message = "flashinfer/mamba/__init__.py does not parse."
        return faults.damaged(facts, "corrupt-file", message, evidence=shown)
    if files.missing and not _has_import_hooks(facts):
        return faults.dependencies_missing(facts, files.missing)
    if mamba.symbol == "source-missing":
        message = "The file that flashinfer.mamba takes selective_state_update from is not there. " + SGLANG_SAYS
        return faults.damaged(facts, "partial-install", message, evidence=shown)
    if mamba.state in {"no-init", "empty-init"}:
        return faults.symbol_missing(facts, "empty-package")
    if mamba.symbol == "missing":
        return faults.symbol_missing(facts, "absent")
    return None
