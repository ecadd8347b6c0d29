"""What reading the files of the server's environment says of ``flashinfer.mamba``."""

from __future__ import annotations

import re
import sys
from typing import Final

from packaging.version import Version

from sidecar.environment import UNKNOWN_VERSION, Companion
from sidecar.imports import ImportOutcome
from sidecar.model import ConditionType
from sidecar.modules import no_import, start_code
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
from sidecar.sglangtexts import parsed
from sidecar.target import SET_BY_LAUNCH

_FIRST_THAT_ONLY_WARNS: Final = Version("0.7.2")
_FIRST_EXACT_JIT_CACHE: Final = Version("0.7.0")
"""From here on a jit-cache may differ by its local tag only; before, it need only start with FlashInfer's version."""
_LAST_LOOSE_JIT_CACHE: Final = Version("0.6.14")
_ASKS_FOR_A_GPU: Final = (("0.6.8", "0.6.11.post3"), ("0.6.14", "0.7.0"))
"""Releases, first and last, that ask torch for a GPU's properties on import, where nvidia-cutlass-dsl is there."""
_FIRST_IMPORTS: Final = frozenset({"tvm_ffi", "torch"})
"""What FlashInfer imports before it looks at its companions."""
_MATTERS: Final = ("flashinfer-python", "apache-tvm-ffi", "torch")
"""Distributions of which every damaged file can be one that the import needs."""
OLDEST_PYTHON: Final = (3, 10)
"""What all releases with a mamba module, 0.6.1 to 0.7.4, require."""


def by_files(facts: FlashinferFacts) -> Classification:
    """Find the one cause that the files show, or none."""
    found = _by_files(facts)
    code = start_code(facts.environment)
    if not code or found.code is None or found.reason in _OF_THE_PLACE:
        return found
    # Such code can put a folder or a finder in front of the path, as scikit-build-core's editable installs do.
    message = f"{found.message} Only an import can tell whether the code of {texts.listed(code[:3])} changes that."
    return faults.unknown("start-code", message, evidence=found.evidence)


def _by_files(facts: FlashinferFacts) -> Classification:
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
    found = _in_the_order_of_the_import(facts)
    if found is not None:
        return found
    if (doubt := _doubt(facts)) is not None:
        return doubt
    ignored = companion_fault(facts)
    if ignored is not None:
        return ignored
    return Classification(
        importable=True,
        undecided=why_not_verified(facts),
        undecided_message=no_import(facts.evidence),
        reason=why_not_verified(facts),
        message="Reading the files found no fault.",
        evidence=texts.versions_line(facts),
    )


_OF_THE_PLACE: Final = frozenset({"no-home", "cache-unwritable"})
"""What is the same whichever files are imported."""


def _in_the_order_of_the_import(facts: FlashinferFacts) -> Classification | None:
    """Find the first fault that FlashInfer would meet."""
    missing = facts.environment.flashinfer.missing
    if not _FIRST_IMPORTS.isdisjoint(missing) and not _has_import_hooks(facts):
        return faults.dependencies_missing(facts, missing)
    cache = faults.cache_unusable(facts)
    if cache is not None and cache.reason == "no-home":
        return cache
    companion = companion_fault(facts)
    if companion is not None and not companion.importable:
        return _unless_bypassed(facts, companion)
    return cache or _damage(facts) or _gpu_wanted(facts)


def _unless_bypassed(facts: FlashinferFacts, companion: Classification) -> Classification:
    """Leave a mismatch open where the launch sets variables that are not seen: one of them makes it harmless."""
    if companion.reason != "version-mismatch" or facts.variables_missing != SET_BY_LAUNCH:
        return companion
    return faults.unknown("environ-unseen", companion.message, evidence=companion.evidence)


def _gpu_wanted(facts: FlashinferFacts) -> Classification | None:
    """Find a torch that knows no GPU beside a FlashInfer that asks for one."""
    environment = facts.environment
    version = parsed(environment.flashinfer.version)
    if version is None or not environment.torch_without_cuda or environment.torch_hip is not None:
        return None
    asks = any(Version(first) <= version <= Version(last) for first, last in _ASKS_FOR_A_GPU)
    if not asks or "nvidia-cutlass-dsl" not in environment.distributions:
        return None
    return faults.torch_without_cuda(facts, None, evidence=texts.versions_line(facts))


def _doubt(facts: FlashinferFacts) -> Classification | None:
    """Find what may or may not stop the import, so that reading alone says nothing."""
    shown = texts.versions_line(facts)
    lines = [line for name in _MATTERS if (line := texts.damage_line(facts, name)) is not None]
    if lines:
        return faults.unknown("damaged-package", f"Only an import can tell: {'; '.join(lines)}.", evidence=shown)
    if python_too_old(facts):
        python = facts.environment.python_version
        message = f"FlashInfer with a mamba module needs Python 3.10 or newer; this is {python}."
        return faults.unknown("interpreter-unsupported", message, evidence=shown)
    if names := suspect_variables(facts):
        message = f"FlashInfer cannot read the value of {texts.listed(names)}."
        return faults.unknown("variable-suspect", message, evidence=shown)
    return None


def python_too_old(facts: FlashinferFacts) -> bool:
    """Whether the interpreter is older than what every release with a mamba module requires."""
    numbers = re.match(r"(\d+)\.(\d+)", facts.environment.python_version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST_PYTHON


def suspect_variables(facts: FlashinferFacts) -> tuple[str, ...]:
    """Name the server's variables whose values FlashInfer cannot read when it is imported."""
    variables = facts.variables or {}
    found = []
    if not re.fullmatch(r"\s*[+-]?\d+\s*", variables.get(texts.CALL_LOG_VARIABLE, "0")):
        found.append(texts.CALL_LOG_VARIABLE)
    if variables.get(texts.BUILD_LOG_VARIABLE, "info").upper() not in _LOG_LEVELS:
        found.append(texts.BUILD_LOG_VARIABLE)
    listed = variables.get(texts.ARCH_VARIABLE, "9.0a")
    if not all(re.fullmatch(r"\d+\.\d+[a-z]?", one) for one in listed.split(" ")):
        found.append(texts.ARCH_VARIABLE)
    return tuple(found)


_LOG_LEVELS: Final = {"CRITICAL", "FATAL", "ERROR", "WARN", "WARNING", "INFO", "DEBUG", "NOTSET"}


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
    found_all = files.kind == "package" or (
        faults.path_known(facts) and not _maybe_elsewhere(facts) and not start_code(facts.environment)
    )
    for kind, companion, _ in _companions(facts):
        if (companion.kind == "absent" and found_all) or agrees(facts, kind, companion) is True:
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
    version = parsed(files.version)
    if version is None:
        return ()
    ignored = version >= _FIRST_THAT_ONLY_WARNS
    bypassed = bool((facts.variables or {}).get(texts.BYPASS_VARIABLE))
    found: list[Classification] = []
    for kind, companion, distribution in _companions(facts):
        if kind is CUBIN_MISMATCH and facts.cubin_dir:
            continue  # newer releases then never look at the package; for older ones the import tells
        if companion.kind == "namespace":
            found.append(faults.leftover_companion(facts, distribution))
        elif agrees(facts, kind, companion) is False:
            soft = "check-bypassed" if bypassed else "ignored" if ignored else None
            found.append(faults.mismatch(facts, distribution, str(companion.version), soft=soft))
    return tuple(found)


def _companions(facts: FlashinferFacts) -> tuple[tuple[ConditionType, Companion, str], ...]:
    files = facts.environment.flashinfer
    return (
        (CUBIN_MISMATCH, files.cubin, "flashinfer-cubin"),
        (JIT_CACHE_MISMATCH, files.jit_cache, "flashinfer-jit-cache"),
    )


def agrees(facts: FlashinferFacts, kind: ConditionType, companion: Companion) -> bool | None:
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
    version = parsed(flashinfer)
    if exact or version is None or version >= _FIRST_EXACT_JIT_CACHE or not cache.startswith(flashinfer):
        return exact
    return True if version <= _LAST_LOOSE_JIT_CACHE else None


def _maybe_elsewhere(facts: FlashinferFacts) -> bool:
    """Whether code that runs at the interpreter's start may make modules importable that no reading finds."""
    environment = facts.environment
    return "flashinfer-python" in environment.editable or _has_import_hooks(facts)


def _has_import_hooks(facts: FlashinferFacts) -> bool:
    """Whether a finder of an editable install, or an archive on the path, may have what the folders have not."""
    return any(name.startswith("__editable__") or not name.endswith(".pth") for name in facts.environment.path_code)


def _newer_than_the_reader(facts: FlashinferFacts) -> bool:
    """Whether files were parsed by an older interpreter than theirs: below another root by the agent's own."""
    numbers = re.match(r"(\d+)\.(\d+)", facts.environment.python_version or "")
    outside = facts.environment.root is not None
    return outside and numbers is not None and (int(numbers[1]), int(numbers[2])) > sys.version_info[:2]


def _damage(facts: FlashinferFacts) -> Classification | None:
    """Find a fault in the files of ``flashinfer.mamba`` or among the modules that FlashInfer needs."""
    files = facts.environment.flashinfer
    mamba = files.mamba
    shown = texts.versions_line(facts)
    if mamba.state == "invalid-init" and _newer_than_the_reader(facts):
        return faults.unknown("damaged-package", "Only its own interpreter can tell whether it parses.", evidence=shown)
    if mamba.state == "invalid-init":
        message = f"flashinfer/mamba/__init__.py does not parse: the import raises a SyntaxError. {texts.UNTRANSLATED}"
        return faults.damaged(facts, "corrupt-file", message, evidence=shown)
    if files.missing and not _has_import_hooks(facts):
        return faults.dependencies_missing(facts, files.missing)
    if mamba.symbol == "source-missing":
        version = texts.flashinfer_version(facts) or "of unknown version"
        message = (
            f"A file of FlashInfer {version} is missing: flashinfer/mamba/selective_state_update.py, from which "
            "flashinfer.mamba takes the function of that name."
        )
        name = "flashinfer.mamba.selective_state_update"
        raised = faults.Raised(text=f"ModuleNotFoundError: No module named '{name}'", translated=True)
        return faults.damaged(facts, "partial-install", message, raised=raised, evidence=shown)
    if mamba.state in {"no-init", "empty-init"}:
        return faults.symbol_missing(facts, "empty-package")
    if mamba.symbol == "missing":
        return faults.symbol_missing(facts, "absent")
    return None
