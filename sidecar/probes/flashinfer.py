"""Whether ``flashinfer.mamba`` can be imported in the server's environment, and if not, the one cause.

A verdict from reading files is there within a second. The verdict of a real import, where one may be run,
replaces it. `classify` holds all the knowledge of what FlashInfer's failures mean.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sidecar.config import ImportPolicy, Settings
from sidecar.environment import UNKNOWN_VERSION, EnvironmentFacts, ImportEvidence, ImportOutcome
from sidecar.model import (
    Answer,
    ConditionType,
    Family,
    Feature,
    Finding,
    Gate,
    Probe,
    Result,
    Sample,
    Scope,
    Severity,
    Status,
    Target,
    World,
)
from sidecar.services import Services

MODULE = "flashinfer.mamba"
_FIRST_WITH_MAMBA = Version("0.6.1")
_FIRST_THAT_ONLY_WARNS = Version("0.7.2")
_FIRST_EXACT_JIT_CACHE = Version("0.7.0")
"""From here on a jit-cache may differ by its local tag only; before, it need only start with FlashInfer's version."""
_LAST_LOOSE_JIT_CACHE = Version("0.6.14")
_LAST_CUBIN_ON_PYPI = Version("0.6.13")

_AVAILABLE_VARIABLE = "SGLANG_IS_FLASHINFER_AVAILABLE"
_BYPASS_VARIABLE = "FLASHINFER_DISABLE_VERSION_CHECK"
_CUBIN_DIR_VARIABLE = "FLASHINFER_CUBIN_DIR"
SEEN_VARIABLES = (_AVAILABLE_VARIABLE, _BYPASS_VARIABLE)
"""Variables of the server whose values are kept: neither can hold a secret or a path."""

_SGLANG_SAYS = (
    'SGLang reports this only as "FlashInfer mamba module not available, please check the FlashInfer installation."'
)
_OR_TRITON = "or start the server with --mamba-backend triton"


def _command(command: str, note: str = "") -> str:
    """Give a command that can be pasted as it stands: what else there is to say follows as a shell comment."""
    return f"{command}  # {note}{_OR_TRITON}"


_DISTRIBUTION_OF = {
    "tvm_ffi": "apache-tvm-ffi",
    "pynvml": "nvidia-ml-py",
    "cutlass": "nvidia-cutlass-dsl",
    "cuda": "cuda-python",
    "cudnn": "nvidia-cudnn-frontend",
    "flashinfer_cubin": "flashinfer-cubin",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
}
"""Distributions whose name differs from their module's."""


# -- what is declared -------------------------------------------------------------------------------


def _condition(code: str, title: str, when: str, remedy: str, reasons: dict[str, str], **other: Any) -> ConditionType:
    return ConditionType(
        **{
            "code": code,
            "severity": Severity.CRITICAL,
            "gate": Gate.LAUNCH,
            "title": title,
            "when": when,
            "remedy": remedy,
            "reasons": {**reasons, **_UNKNOWN_REASONS},
            "uses": Feature.FLASHINFER_MAMBA,
            "info_when_unused": True,
            **other,
        }
    )


_UNKNOWN_REASONS: Mapping[str, str] = {
    "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing about the server's.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
    "import-pending": "Unknown until the import that is under way has ended; reading the files found no fault.",
    "not-imported": "Unknown: reading the files found no fault, and nothing asked for a real import.",
    "import-not-allowed": "Unknown: reading the files found no fault, and an import may not be run from here.",
    "import-starved": "Unknown: the import got too little CPU time to finish.",
    "insufficient-memory": "Unknown: there was not enough memory for the import.",
    "import-timeout": "Unknown: the import did not finish; see flashinfer-import-timeout.",
    "probe-environment": "Unknown: the import failed in a way that this container alone can explain.",
    "devices-hidden": "Unknown: the import failed because the probe hides the GPUs from it.",
    "partial-install": "Unknown until imported: the installation is damaged, and files alone do not tell how much.",
    "editable-install": "Unknown until imported: installed in editable mode, so its files are elsewhere.",
    "environ-unseen": "Unknown: the server's environment variables cannot be seen from here.",
    "version-unknown": "Unknown until imported: a version could not be read.",
}

NOT_INSTALLED = _condition(
    "flashinfer-not-installed",
    "FlashInfer is not installed",
    "The server's environment has no usable package `flashinfer`.",
    "Install the flashinfer-python that SGLang pins, " + _OR_TRITON + ".",
    {
        "absent": "There is no package of that name.",
        "leftover-folder": "Only a leftover folder is there, which Python accepts as an empty package.",
        "files-missing": "The distribution is registered, but its package is gone.",
    },
)
DISABLED = _condition(
    "flashinfer-disabled-by-env",
    "FlashInfer is disabled by an environment variable",
    "`SGLANG_IS_FLASHINFER_AVAILABLE` is false for the server: SGLang treats FlashInfer as absent.",
    f"Remove {_AVAILABLE_VARIABLE} from the server's environment, {_OR_TRITON}.",
    {"variable-set": "The variable is set to a false value."},
)
MAMBA_MISSING = _condition(
    "flashinfer-mamba-missing",
    "This FlashInfer has no mamba module",
    "`flashinfer` is installed without `flashinfer.mamba`, which exists since 0.6.1.",
    "Install the flashinfer-python that SGLang pins (0.6.1 or newer), " + _OR_TRITON + ".",
    {
        "version-too-old": "The installed version is older than 0.6.1.",
        "partial-install": "The version should have it, but its files are not there.",
    },
)
CUBIN_MISMATCH = _condition(
    "flashinfer-cubin-mismatch",
    "flashinfer-cubin does not match FlashInfer",
    "flashinfer-cubin and flashinfer-python have different versions. Fatal from 0.6.1 to 0.7.1, where the import "
    "raises a RuntimeError that SGLang does not translate; from 0.7.2 on the package is ignored with a warning.",
    "Uninstall flashinfer-cubin or install the version of flashinfer-python, " + _OR_TRITON + ".",
    {
        "version-mismatch": "The versions differ and FlashInfer refuses to be imported.",
        "leftover-folder": "A leftover folder flashinfer_cubin has no version at all.",
        "check-bypassed": "The versions differ; FLASHINFER_DISABLE_VERSION_CHECK hides it.",
        "ignored": "The versions differ; this FlashInfer ignores the package.",
    },
)
JIT_CACHE_MISMATCH = _condition(
    "flashinfer-jit-cache-mismatch",
    "flashinfer-jit-cache does not match FlashInfer",
    "flashinfer-jit-cache was built for another FlashInfer. Fatal from 0.6.1 to 0.7.1; from 0.7.2 on the package "
    "is ignored with a warning. Bypassing the check has led to illegal memory access.",
    "Uninstall flashinfer-jit-cache or install the version of flashinfer-python, " + _OR_TRITON + ".",
    {
        "version-mismatch": "The versions differ and FlashInfer refuses to be imported.",
        "leftover-folder": "A leftover folder flashinfer_jit_cache has no version at all.",
        "check-bypassed": "The versions differ; FLASHINFER_DISABLE_VERSION_CHECK hides it.",
        "ignored": "The versions differ; this FlashInfer ignores the package.",
    },
)
IMPORT_FAILED = _condition(
    "flashinfer-import-failed",
    "flashinfer.mamba cannot be imported",
    "The import raises an exception that none of the more specific conditions explains.",
    "Read the exception; reinstall flashinfer-python and what it names, " + _OR_TRITON + ".",
    {
        "dependency-missing": "A module that FlashInfer needs is not installed.",
        "partial-install": "A part of FlashInfer itself is missing.",
        "corrupt-file": "A file does not parse.",
        "shadowed": "A file flashinfer.py hides the package.",
        "shared-library-missing": "A shared library could not be found.",
        "abi-mismatch": "A binary was built for other versions: a symbol is undefined.",
        "torch-without-cuda": "torch is a build without CUDA, and this FlashInfer asks it for a GPU when imported.",
        "permission": "A file or folder may not be read or written.",
        "file-system": "A file or folder cannot be used.",
        "exception": "Any other exception.",
    },
)
IMPORT_CRASHED = _condition(
    "flashinfer-import-crashed",
    "Importing flashinfer.mamba ends the interpreter",
    "The importing process died: by a signal, or by leaving without an exception.",
    "Reinstall flashinfer-python, torch and apache-tvm-ffi as one matching set, " + _OR_TRITON + ".",
    {"signal": "A signal ended it (segmentation fault, abort).", "exit": "It called exit."},
)
SYMBOL_MISSING = _condition(
    "flashinfer-symbol-missing",
    "flashinfer.mamba lacks selective_state_update",
    "The module can be imported, so SGLang's own check passes, but the function it needs is not there; "
    "the server fails later.",
    "Reinstall flashinfer-python, " + _OR_TRITON + ".",
    {
        "absent": "The module has no such name.",
        "not-callable": "The name is there but is no function.",
        "empty-package": "flashinfer/mamba has no or an empty __init__.py, so its parts are modules, not functions.",
    },
)
IMPORT_TIMEOUT = _condition(
    "flashinfer-import-timeout",
    "Importing flashinfer.mamba does not end",
    "The import made no progress for a minute. Its last stage is named.",
    "Look at the stage; a leftover lock file in a build cache of the server's user is the usual cause.",
    {"no-progress": "Neither CPU time nor a new stage for a minute."},
    severity=Severity.WARNING,
    gate=Gate.NEVER,
)

CONDITIONS = (
    NOT_INSTALLED,
    DISABLED,
    MAMBA_MISSING,
    CUBIN_MISMATCH,
    JIT_CACHE_MISMATCH,
    IMPORT_FAILED,
    IMPORT_CRASHED,
    SYMBOL_MISSING,
    IMPORT_TIMEOUT,
)
_FROM_FILES = frozenset(
    kind.code for kind in (NOT_INSTALLED, MAMBA_MISSING, CUBIN_MISMATCH, JIT_CACHE_MISMATCH, SYMBOL_MISSING)
)
"""What reading files can rule out."""

FAMILIES = (
    Family(
        name="module_importable",
        kind="gauge",
        help="1 when the module can be imported in the server's environment by the best evidence there is, 0 when not; "
        "absent while unknown.",
        labels=("module",),
    ),
    Family(
        name="module_import_verified",
        kind="gauge",
        help="1 when module_importable rests on a real import, 0 when on reading files.",
        labels=("module",),
    ),
    Family(
        name="module_import_duration_seconds",
        kind="gauge",
        help="Duration of the last real import that succeeded or raised.",
        labels=("module",),
    ),
)


# -- facts ----------------------------------------------------------------------------------------------


class ImportState(StrEnum):
    """What is up with a real import."""

    DONE = "done"
    PENDING = "pending"
    NOT_REQUESTED = "not-requested"
    NOT_ALLOWED = "not-allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashinferFacts:
    """All that `classify` judges.

    ``variables`` holds the server's values of `SEEN_VARIABLES`, and is None where its environment cannot be seen,
    with the token ``variables_missing``. ``cubin_dir`` says that FLASHINFER_CUBIN_DIR is set for it.
    """

    environment: EnvironmentFacts
    evidence: ImportEvidence | None = None
    state: ImportState = ImportState.NOT_REQUESTED
    variables: Mapping[str, str] | None = None
    variables_missing: str | None = None
    cubin_dir: bool = False


async def collect(services: Services) -> FlashinferFacts:
    """Read the environment, take what earlier imports showed, and start one where it would tell something new."""
    target = await services.targets.find()
    environment, demanded = await asyncio.gather(services.environment.read(target), _demanded(services, target))
    evidence = services.environment.import_evidence(environment, target)
    policy = services.settings.import_policy
    wanted = policy is ImportPolicy.ALWAYS or (policy is ImportPolicy.AUTO and demanded)
    if wanted and environment.problem is None and services.environment.import_due(environment, target):
        services.environment.request_import(environment, target, lambda: services.wake("flashinfer"))
    return FlashinferFacts(
        environment=environment,
        evidence=evidence,
        state=_import_state(evidence, running=services.environment.importing),
        variables=_seen(target),
        variables_missing=target.environ_missing,
        cubin_dir=bool(target.environ and target.environ.get(_CUBIN_DIR_VARIABLE)),
    )


async def _demanded(services: Services, target: Target) -> bool:
    """Whether somebody counts on ``flashinfer.mamba``: the operator, the flags, or the running server."""
    if requires_mamba(services.settings) or target.launch.get("mamba_backend") == "flashinfer":
        return True
    if services.settings.import_policy is not ImportPolicy.AUTO:
        return False
    info = await services.server.info(target)
    return info is not None and info.mamba_backend == "flashinfer"


def requires_mamba(settings: Settings) -> bool:
    """Whether the settings require the feature or one of its conditions."""
    return not {Feature.FLASHINFER_MAMBA.value, *(kind.code for kind in CONDITIONS)}.isdisjoint(settings.require)


def _seen(target: Target) -> Mapping[str, str] | None:
    if target.environ is None:
        return None
    return {name: target.environ[name][:64] for name in SEEN_VARIABLES if name in target.environ}


def _import_state(evidence: ImportEvidence | None, *, running: bool) -> ImportState:
    if evidence is None:
        return ImportState.PENDING if running else ImportState.NOT_REQUESTED
    return ImportState.NOT_ALLOWED if evidence.outcome is ImportOutcome.NOT_ALLOWED else ImportState.DONE


# -- the verdict -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The one cause, or none.

    ``code`` None and ``importable`` True: fine, as far as ``verified`` says. ``importable`` None: unknown, for
    ``reason``; what is in ``ruled_out`` is known not to be the case all the same. ``code`` with ``importable``
    True is a fault that does not keep the module from being imported.
    """

    importable: bool | None
    code: str | None = None
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    verified: bool = False
    severity: Severity | None = None
    ruled_out: frozenset[str] = field(default_factory=frozenset)


def classify(facts: FlashinferFacts) -> Classification:
    """Find the single cause that keeps SGLang from using ``flashinfer.mamba`` in this environment."""
    environment = facts.environment
    if environment.problem is not None:
        return _unknown(environment.problem)
    if environment.scope is Scope.SELF:
        return _unknown("scope-self")
    if _disabled(facts):
        value = (facts.variables or {})[_AVAILABLE_VARIABLE]
        return _fault(
            DISABLED,
            "variable-set",
            f"{_AVAILABLE_VARIABLE}={value} makes SGLang treat FlashInfer as absent, however well it is installed. "
            + _SGLANG_SAYS,
            f"unset {_AVAILABLE_VARIABLE} in the server's environment, {_OR_TRITON}",
            verified=True,
        )
    if facts.evidence is not None and facts.evidence.outcome in _TELLING:
        return _by_import(facts, facts.evidence)
    return _by_files(facts)


_TELLING = {ImportOutcome.OK, ImportOutcome.FAILED, ImportOutcome.CRASHED, ImportOutcome.TIMEOUT}


def _unknown(reason: str, message: str = "", ruled_out: frozenset[str] = frozenset(), **other: Any) -> Classification:
    return Classification(importable=None, reason=reason, message=message, ruled_out=ruled_out, **other)


def _fault(kind: ConditionType, reason: str, message: str, remedy: str, **other: Any) -> Classification:
    return Classification(
        **{"importable": False, "code": kind.code, "reason": reason, "message": message, "remedy": remedy, **other}
    )


def _disabled(facts: FlashinferFacts) -> bool:
    value = (facts.variables or {}).get(_AVAILABLE_VARIABLE)
    # What else SGLang makes of a value differs between its releases.
    return value is not None and value.strip().lower() in {"", "0", "false", "no", "n", "off"}


# -- by files ----------------------------------------------------------------------------------------------


def _by_files(facts: FlashinferFacts) -> Classification:
    environment = facts.environment
    files = environment.flashinfer
    maybe_elsewhere = "flashinfer-python" in environment.editable or any(
        name.startswith("__editable__") for name in environment.path_code
    )
    if files.kind in {"absent", "namespace"} and maybe_elsewhere:
        return _unknown("editable-install", "FlashInfer is installed in editable mode; only an import can tell.")
    if files.kind in {"absent", "namespace"} and not (files.kind == "namespace" and files.mamba.state == "present"):
        return _not_installed(facts)
    if files.kind == "namespace":
        return _unknown("partial-install", "The package flashinfer has lost its __init__.py; only an import can tell.")
    if files.kind == "module":
        return _shadowed(facts)
    if files.mamba.state == "absent":
        return _mamba_missing(facts)
    if (companion := _companion_fault(facts)) is not None and not companion.importable:
        return companion
    if (damage := _damage(facts)) is not None:
        return damage
    if companion is not None:
        return companion
    return Classification(
        importable=True,
        reason=_why_not_verified(facts),
        message="Reading the files found no fault.",
        evidence=_versions_line(facts),
        ruled_out=_FROM_FILES if _versions_known(facts) else _FROM_FILES - _COMPANION_CODES,
    )


_COMPANION_CODES = frozenset({CUBIN_MISMATCH.code, JIT_CACHE_MISMATCH.code})


def _why_not_verified(facts: FlashinferFacts) -> str:
    outcome = facts.evidence.outcome if facts.evidence is not None else None
    if outcome is ImportOutcome.STARVED:
        return "import-starved"
    if outcome is ImportOutcome.INSUFFICIENT_MEMORY:
        return "insufficient-memory"
    if facts.state is ImportState.PENDING:
        return "import-pending"
    return "import-not-allowed" if facts.state is ImportState.NOT_ALLOWED else "not-imported"


def _versions_known(facts: FlashinferFacts) -> bool:
    files = facts.environment.flashinfer
    companions = (files.cubin, files.jit_cache)
    return files.version is not None and all(item.kind != "package" or item.version is not None for item in companions)


def _damage(facts: FlashinferFacts) -> Classification | None:
    """Find a fault in the files of ``flashinfer.mamba`` or among the modules that FlashInfer needs."""
    environment = facts.environment
    mamba = environment.flashinfer.mamba
    if mamba.state == "invalid-init":
        message = "flashinfer/mamba/__init__.py does not parse."
        return _fault(IMPORT_FAILED, "corrupt-file", message, _reinstall(facts), evidence=_versions_line(facts))
    if environment.flashinfer.missing and not any(name.startswith("__editable__") for name in environment.path_code):
        return _dependencies_missing(facts, environment.flashinfer.missing)
    if mamba.symbol == "source-missing":
        message = "The file that flashinfer.mamba takes selective_state_update from is not there. " + _SGLANG_SAYS
        return _fault(IMPORT_FAILED, "partial-install", message, _reinstall(facts), evidence=_versions_line(facts))
    if mamba.state in {"no-init", "empty-init"}:
        return _symbol_missing(facts, "empty-package")
    if mamba.symbol == "missing":
        return _symbol_missing(facts, "absent")
    return None


def _not_installed(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    environment = facts.environment
    version = environment.distributions.get("flashinfer-python")
    if environment.flashinfer.kind == "namespace":
        reason = "leftover-folder"
        what = (
            "Only a leftover folder named flashinfer is there, without the package; "
            "SGLang takes it for an installed FlashInfer and then fails."
        )
    elif version is not None:
        reason = "files-missing"
        what = f"flashinfer-python {version} is registered as installed, but its package is gone."
    else:
        reason, what = "absent", "There is no package flashinfer in the server's environment."
    remedy = _install(facts) if reason == "absent" else _reinstall(facts)
    return _fault(
        NOT_INSTALLED,
        reason,
        f"{what} {_SGLANG_SAYS}",
        remedy,
        verified=verified,
        evidence=_leftovers(facts) if reason == "leftover-folder" else (),
    )


def _leftovers(facts: FlashinferFacts) -> tuple[str, ...]:
    return tuple(f"leftover: {place}" for place in facts.environment.flashinfer.places[:3])


def _shadowed(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    place = next(iter(facts.environment.flashinfer.places), "flashinfer.py")
    return _fault(
        IMPORT_FAILED,
        "shadowed",
        f"{place} hides the package flashinfer. {_SGLANG_SAYS}",
        f"move {place} away",
        verified=verified,
    )


def _mamba_missing(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    version = _flashinfer_version(facts)
    parsed = _parsed(version)
    if parsed is not None and parsed < _FIRST_WITH_MAMBA:
        reason = "version-too-old"
        what = f"FlashInfer {version} has no mamba module; it exists since 0.6.1."
        remedy = _install(facts)
    else:
        reason = "partial-install"
        what = f"FlashInfer {version or 'of unknown version'} should have a mamba module, but its files are gone."
        remedy = _reinstall(facts)
    return _fault(
        MAMBA_MISSING, reason, f"{what} {_SGLANG_SAYS}", remedy, verified=verified, evidence=_versions_line(facts)
    )


def _symbol_missing(facts: FlashinferFacts, reason: str, *, verified: bool = False) -> Classification:
    what = {
        "absent": "flashinfer.mamba has no selective_state_update.",
        "not-callable": "flashinfer.mamba.selective_state_update is no function.",
        "empty-package": "flashinfer/mamba has no or an empty __init__.py: selective_state_update is a module there.",
    }[reason]
    return _fault(
        SYMBOL_MISSING,
        reason,
        f"{what} SGLang's check at start passes; the server fails when it wants to use the function.",
        _reinstall(facts),
        verified=verified,
        evidence=_versions_line(facts),
    )


def _dependencies_missing(
    facts: FlashinferFacts, modules: Iterable[str], *, verified: bool = False, evidence: tuple[str, ...] = ()
) -> Classification:
    modules = tuple(dict.fromkeys(modules))
    packages = " ".join(dict.fromkeys(_requirement(facts, _DISTRIBUTION_OF.get(name, name)) for name in modules))
    return _fault(
        IMPORT_FAILED,
        "dependency-missing",
        f"FlashInfer needs {_listed(modules)}, which the server's environment lacks. {_SGLANG_SAYS}",
        _command(f"{_pip(facts)} install {packages}"),
        verified=verified,
        evidence=evidence,
    )


def _companion_fault(facts: FlashinferFacts) -> Classification | None:
    """Say what FlashInfer's own comparison with flashinfer-cubin and flashinfer-jit-cache would come to."""
    files = facts.environment.flashinfer
    version = _parsed(files.version)
    if version is None:
        return None
    ignored = version >= _FIRST_THAT_ONLY_WARNS
    bypassed = bool((facts.variables or {}).get(_BYPASS_VARIABLE))
    found: list[Classification] = []
    for kind, companion, distribution in (
        (CUBIN_MISMATCH, files.cubin, "flashinfer-cubin"),
        (JIT_CACHE_MISMATCH, files.jit_cache, "flashinfer-jit-cache"),
    ):
        if kind is CUBIN_MISMATCH and facts.cubin_dir:
            continue  # newer releases then never look at the package; for older ones the import tells
        if companion.kind == "namespace":
            found.append(_leftover_companion(facts, kind, distribution))
        elif companion.version is not None and files.version != UNKNOWN_VERSION:
            agrees = _cubin_agrees if kind is CUBIN_MISMATCH else _jit_cache_agrees
            if agrees(str(files.version), companion.version) is False:
                soft = "check-bypassed" if bypassed else "ignored" if ignored else None
                found.append(_mismatch(facts, kind, distribution, str(companion.version), soft=soft))
    # The one that keeps the module from being imported is the cause; FlashInfer looks at cubin first.
    return next((item for item in found if not item.importable), next(iter(found), None))


def _cubin_agrees(flashinfer: str, cubin: str) -> bool:
    return flashinfer == cubin


def _jit_cache_agrees(flashinfer: str, cache: str) -> bool | None:
    """Compare as FlashInfer does; None where releases between two known ones differ."""
    exact = cache == flashinfer or cache.startswith(f"{flashinfer}+")
    version = _parsed(flashinfer)
    if exact or version is None or version >= _FIRST_EXACT_JIT_CACHE or not cache.startswith(flashinfer):
        return exact
    return True if version <= _LAST_LOOSE_JIT_CACHE else None


def _mismatch(
    facts: FlashinferFacts, kind: ConditionType, distribution: str, version: str, *, soft: str | None, **other: Any
) -> Classification:
    flashinfer = facts.environment.flashinfer.version
    what = f"{distribution} {version} does not match FlashInfer {flashinfer}"
    tail = {
        None: ": the import raises a RuntimeError that SGLang lets through, and the server dies with it.",
        "check-bypassed": f"; {_BYPASS_VARIABLE} hides it, and kernels of another version may be used.",
        "ignored": "; this FlashInfer ignores the package and fetches or builds what it would have supplied.",
    }[soft]
    if soft is None and facts.variables is None:
        tail += f" (Unless {_BYPASS_VARIABLE} is set for the server, which cannot be seen from here.)"
    return _fault(
        kind,
        soft or "version-mismatch",
        what + tail,
        _match_companion(facts, distribution),
        importable=soft is not None,
        severity=Severity.WARNING if soft is not None else None,
        ruled_out=_FROM_FILES if soft is not None else frozenset(),
        **other,
    )


def _leftover_companion(
    facts: FlashinferFacts, kind: ConditionType, distribution: str, *, verified: bool = False
) -> Classification:
    module = distribution.replace("-", "_")
    place = f"the folder {module} from site-packages"
    return _fault(
        kind,
        "leftover-folder",
        f"A leftover folder {module} without a package makes FlashInfer look for a version that is not there. "
        + _SGLANG_SAYS,
        _command(f"{_pip(facts)} uninstall -y {distribution}", f"and remove {place}; "),
        verified=verified,
    )


# -- by a real import ----------------------------------------------------------------------------------------


def _by_import(facts: FlashinferFacts, evidence: ImportEvidence) -> Classification:
    shown = _import_lines(evidence)
    match evidence.outcome:
        case ImportOutcome.OK:
            companion = _companion_fault(facts)
            if companion is not None and companion.importable:
                return replace(companion, verified=True, evidence=shown)
            # A mismatch that reading called fatal was not: the import has the last word.
            return Classification(importable=True, verified=True, message="It was imported.", evidence=shown)
        case ImportOutcome.TIMEOUT:
            stage = evidence.stage or "start"
            return _fault(
                IMPORT_TIMEOUT,
                "no-progress",
                f"The import made no progress for a minute at the stage: {stage}.",
                IMPORT_TIMEOUT.remedy,
                importable=None,
                evidence=shown,
                ruled_out=_FROM_FILES - {SYMBOL_MISSING.code},
            )
        case ImportOutcome.CRASHED:
            return _crashed(facts, evidence, shown)
        case _:
            return _failed(facts, evidence, shown)


def _crashed(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    if evidence.signal is not None:
        reason, how = "signal", f"was ended by {evidence.signal}"
    else:
        reason, how = "exit", f"left with exit code {evidence.exit_code}"
    stage = evidence.stage or "before the first stage"
    message = f"The importing process {how} at the stage: {stage}. The server would end the same way."
    return _fault(IMPORT_CRASHED, reason, message, _reinstall(facts), verified=True, evidence=shown)


_MISMATCH_TEXT = re.compile(r"(flashinfer-cubin|\S*jit-cache\S*) version \(([^)]{1,64})\) does not match ")
_NO_VERSION_TEXT = re.compile(r"module '(flashinfer_cubin|flashinfer_jit_cache)' has no attribute '__version__'")
_HIDDEN_DEVICES_TEXT = re.compile(
    r"No CUDA GPUs are available|[Ii]nvalid device (id|ordinal)|no CUDA-capable device|Found no NVIDIA driver"
)
_NOT_OURS_TEXT = re.compile(r"cannot open shared object file|Could not determine home directory")


def _failed(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    """Find the cause behind an import that raised."""
    message = evidence.message
    if evidence.step == "symbol":
        return _no_symbol(facts, evidence)
    if evidence.exited:
        text = f"Importing flashinfer.mamba calls sys.exit ({message}); the server would end the same way."
        return _fault(IMPORT_CRASHED, "exit", text, _reinstall(facts), verified=True, evidence=shown)
    if match := _MISMATCH_TEXT.search(message):
        cubin = match.group(1) == "flashinfer-cubin"
        kind, distribution = (CUBIN_MISMATCH if cubin else JIT_CACHE_MISMATCH), match.group(1)
        return _mismatch(facts, kind, distribution, match.group(2), soft=None, verified=True, evidence=shown)
    if match := _NO_VERSION_TEXT.search(message):
        kind = CUBIN_MISMATCH if match.group(1) == "flashinfer_cubin" else JIT_CACHE_MISMATCH
        return _leftover_companion(facts, kind, match.group(1).replace("_", "-"), verified=True)
    if evidence.exception == "ModuleNotFoundError" and evidence.missing is not None:
        return _module_not_found(facts, evidence, shown)
    if "cannot import name 'mamba' from partially initialized module 'flashinfer'" in message:
        return _mamba_missing(facts, verified=True)
    if _HIDDEN_DEVICES_TEXT.search(message):
        return _unknown("devices-hidden", _quoted(evidence), _ruled_out_by(facts), evidence=shown)
    if "Torch not compiled with CUDA enabled" in message and evidence.torch_cuda is None:
        return _torch_without_cuda(facts, evidence, shown)
    if _may_be_ours(facts, evidence):
        return _unknown("probe-environment", _quoted(evidence), _ruled_out_by(facts), evidence=shown)
    return _other_exception(facts, evidence, shown)


def _ruled_out_by(facts: FlashinferFacts) -> frozenset[str]:
    """Say what the files still rule out when an import told nothing."""
    return _FROM_FILES if _companion_fault(facts) is None else frozenset()


def _no_symbol(facts: FlashinferFacts, evidence: ImportEvidence) -> Classification:
    files = facts.environment.flashinfer
    if files.kind == "namespace":
        return _not_installed(facts, verified=True)
    if evidence.exception is not None or files.mamba.symbol == "missing":
        # Without the name Python hands out the submodule of the same name, which is no function either.
        return _symbol_missing(facts, "absent", verified=True)
    empty = files.mamba.state in {"no-init", "empty-init"}
    return _symbol_missing(facts, "empty-package" if empty else "not-callable", verified=True)


def _module_not_found(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    missing = str(evidence.missing)
    files = facts.environment.flashinfer
    if "is not a package" in evidence.message and missing == MODULE:
        return _shadowed(facts, verified=True)
    if missing == "flashinfer" or (missing == MODULE and files.kind == "namespace"):
        return _not_installed(facts, verified=True)
    if missing == MODULE:
        return _mamba_missing(facts, verified=True)
    if missing.startswith("flashinfer."):
        message = f"A part of FlashInfer is missing: {missing}. {_SGLANG_SAYS}"
        return _fault(IMPORT_FAILED, "partial-install", message, _reinstall(facts), verified=True, evidence=shown)
    # Python names the first missing module only; reading the files finds the others at once.
    others = files.missing if missing in files.missing else ()
    return _dependencies_missing(facts, (missing.partition(".")[0], *others), verified=True, evidence=shown)


def _torch_without_cuda(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    torch = evidence.versions.get("torch") or facts.environment.torch_version or "as installed"
    return _fault(
        IMPORT_FAILED,
        "torch-without-cuda",
        f"torch {torch} is a build without CUDA, and FlashInfer {_flashinfer_version(facts) or ''} asks it for a GPU "
        "while it is imported.",
        _command(f"{_pip(facts)} install --force-reinstall {_requirement(facts, 'torch')}", "a build with CUDA; "),
        verified=True,
        evidence=shown,
    )


def _may_be_ours(facts: FlashinferFacts, evidence: ImportEvidence) -> bool:
    """Whether this failure can come from where the import ran instead of from the server's environment."""
    faithful = facts.environment.scope is Scope.SERVER and evidence.same_user
    if faithful:
        return False
    if evidence.os_error or _NOT_OURS_TEXT.search(evidence.message) or _NOT_OURS_TEXT.search(evidence.cause or ""):
        return True
    # A value that FlashInfer reads from a variable of ours, while the server's variables cannot be seen.
    return facts.variables is None and evidence.exception == "ValueError"


def _other_exception(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    text = f"{evidence.message} {evidence.cause or ''}"
    if "cannot open shared object file" in text:
        reason = "shared-library-missing"
    elif "undefined symbol" in text:
        reason = "abi-mismatch"
    elif evidence.exception in {"SyntaxError", "IndentationError"} or "null bytes" in evidence.message:
        reason = "corrupt-file"
    elif evidence.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        reason = "permission"
    elif evidence.os_error:
        reason = "file-system"
    elif evidence.exception == "ImportError" and "cannot import name" in evidence.message:
        reason = "partial-install"
    else:
        reason = "exception"
    surfaces = _SGLANG_SAYS if evidence.sglang_catches else "SGLang lets this exception through."
    remedy = _repair(facts, reason)
    message = f"{_quoted(evidence)} {surfaces}"
    return _fault(IMPORT_FAILED, reason, message, remedy, verified=True, evidence=shown)


def _repair(facts: FlashinferFacts, reason: str) -> str:
    if reason == "shared-library-missing":
        return f"make the library visible to the server: its package, LD_LIBRARY_PATH or driver mount, {_OR_TRITON}"
    if reason == "abi-mismatch":
        wanted = f"{_requirement(facts, 'flashinfer-python')} {_requirement(facts, 'torch')}"
        return _command(f"{_pip(facts)} install --force-reinstall {wanted}")
    if reason in {"permission", "file-system"}:
        return "give the server's user the right to use the file or folder that the exception names"
    return _reinstall(facts)


# -- texts -------------------------------------------------------------------------------------------------------


def _parsed(version: str | None) -> Version | None:
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def _flashinfer_version(facts: FlashinferFacts) -> str | None:
    environment = facts.environment
    by_files = environment.flashinfer.version
    registered = environment.distributions.get("flashinfer-python")
    return registered if by_files in {None, UNKNOWN_VERSION} else by_files


def _versions_line(facts: FlashinferFacts) -> tuple[str, ...]:
    files = facts.environment.flashinfer
    versions = {
        "flashinfer": _flashinfer_version(facts),
        "flashinfer-cubin": files.cubin.version,
        "flashinfer-jit-cache": files.jit_cache.version,
        "torch": facts.environment.torch_version,
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    return (known,) if known else ()


def _import_lines(evidence: ImportEvidence) -> tuple[str, ...]:
    lines = []
    if evidence.exception is not None:
        at = f" at {evidence.where}" if evidence.where else ""
        lines.append(f"{evidence.exception}{at}")
    if evidence.cause:
        lines.append(f"caused by {evidence.cause}")
    if evidence.stage is not None and evidence.outcome is not ImportOutcome.OK:
        lines.append(f"last stage: {evidence.stage}")
    if evidence.tail:
        lines.append(f"printed last: {evidence.tail}")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(evidence.versions.items()))
    if versions:
        lines.append(f"loaded: {versions}")
    if evidence.seconds is not None:
        lines.append(f"took {evidence.seconds:.1f} s")
    return tuple(lines)


def _quoted(evidence: ImportEvidence) -> str:
    """Quote the exception in one bounded line."""
    text = " ".join(evidence.message.split())
    return f"The import raises {evidence.exception}: {text[:400]}" + ("…" if len(text) > 400 else "")


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _pip(facts: FlashinferFacts) -> str:
    return f"{facts.environment.python or 'python'} -m pip"


def _requirement(facts: FlashinferFacts, distribution: str) -> str:
    """Give a requirement as a shell word: as SGLang pins it in that environment, else the bare name."""
    for line in facts.environment.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == distribution and requirement.specifier:
            extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            return f"'{distribution}{extras}{requirement.specifier}'"
    return "'flashinfer-python>=0.6.1'" if distribution == "flashinfer-python" else distribution


def _install(facts: FlashinferFacts) -> str:
    return _command(f"{_pip(facts)} install {_requirement(facts, 'flashinfer-python')}")


def _reinstall(facts: FlashinferFacts) -> str:
    requirement = _requirement(facts, "flashinfer-python")
    version = _parsed(_flashinfer_version(facts))
    if requirement == "'flashinfer-python>=0.6.1'" and version is not None and version >= _FIRST_WITH_MAMBA:
        requirement = f"'flashinfer-python=={version.public}'"
    return _command(f"{_pip(facts)} install --force-reinstall --no-deps {requirement}")


def _match_companion(facts: FlashinferFacts, distribution: str) -> str:
    """Bring the companion to FlashInfer's version where a registry has it, else remove it: it is optional."""
    uninstall = f"{_pip(facts)} uninstall -y {distribution}"
    version = _parsed(facts.environment.flashinfer.version)
    if distribution == "flashinfer-cubin" and version is not None and version <= _LAST_CUBIN_ON_PYPI:
        install = f"{_pip(facts)} install --no-deps 'flashinfer-cubin=={version.public}'"
        return _command(install, f"or {uninstall}, it is optional; ")
    return _command(uninstall, "it is optional, and PyPI has no matching one; ")


# -- the probe ---------------------------------------------------------------------------------------------------


def judge(result: Result[FlashinferFacts], world: World) -> Iterable[Finding]:
    """One finding per condition; at most one of them is true."""
    if result.facts is None:
        return []
    facts = result.facts
    verdict = classify(facts)
    return [_finding(kind, verdict, facts, world) for kind in CONDITIONS]


def _finding(kind: ConditionType, verdict: Classification, facts: FlashinferFacts, world: World) -> Finding:
    if verdict.code == kind.code:
        return Finding(
            code=kind.code,
            status=Status.TRUE,
            reason=verdict.reason,
            message=verdict.message,
            remedy=verdict.remedy,
            evidence=verdict.evidence,
            final=verdict.verified,
            severity=verdict.severity,
            gate=Gate.NEVER if verdict.severity is Severity.WARNING else None,
        )
    if kind is DISABLED and facts.variables is None and facts.environment.scope is not Scope.SELF:
        return _finding_disabled_unseen(world)
    breaking = verdict.code is not None and verdict.importable is False
    if breaking or verdict.verified or kind.code in verdict.ruled_out:
        return Finding(code=kind.code, status=Status.FALSE, message="Not the case.", final=verdict.verified)
    if kind is DISABLED and facts.variables is not None:
        return Finding(code=kind.code, status=Status.FALSE, message=f"{_AVAILABLE_VARIABLE} does not say so.")
    if verdict.code == IMPORT_TIMEOUT.code:
        reason = "import-timeout"
    elif verdict.code is not None:
        reason = _why_not_verified(facts)
    else:
        reason = verdict.reason or "not-imported"
    message = verdict.message or kind.reasons[reason]
    return Finding(code=kind.code, status=Status.UNKNOWN, reason=reason, message=message, evidence=verdict.evidence)


def _finding_disabled_unseen(world: World) -> Finding:
    server = world.server
    if server.answer is Answer.ACCEPTED and server.features.get(Feature.FLASHINFER_MAMBA) is True:
        message = "The running server uses FlashInfer's mamba backend, so it was not disabled when it started."
        return Finding(code=DISABLED.code, status=Status.FALSE, message=message)
    return Finding(
        code=DISABLED.code,
        status=Status.UNKNOWN,
        reason="environ-unseen",
        message="The server's environment variables cannot be seen from here.",
    )


def samples(facts: FlashinferFacts) -> Iterable[Sample]:
    """Tell of ``flashinfer.mamba`` by the best evidence; nothing while unknown."""
    verdict = classify(facts)
    # Disabled is SGLang's decision; the module itself may well be importable, and then says so.
    if verdict.code == DISABLED.code:
        verdict = _module_alone(facts)
    if verdict.importable is not None:
        yield Sample("module_importable", (MODULE,), float(verdict.importable))
        yield Sample("module_import_verified", (MODULE,), float(verdict.verified))
    evidence = facts.evidence
    ended = evidence is not None and evidence.outcome in {ImportOutcome.OK, ImportOutcome.FAILED}
    if evidence is not None and evidence.seconds is not None and ended:
        yield Sample("module_import_duration_seconds", (MODULE,), evidence.seconds)


def _module_alone(facts: FlashinferFacts) -> Classification:
    if facts.evidence is not None and facts.evidence.outcome in _TELLING:
        return _by_import(facts, facts.evidence)
    return _by_files(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSection:
    """A module of the server's environment.

    ``importable``: null while unknown. ``verified``: by a real import. ``evidence``: how the last import ended, or
    files, pending or not-allowed. ``why``: token behind not-allowed. ``stage``: the last one that the import
    reached. ``code``: the condition that names the cause.
    """

    importable: bool | None
    verified: bool
    evidence: str
    why: str | None
    seconds: float | None
    version: str | None
    stage: str | None
    scope: str
    code: str | None
    reason: str | None
    names: tuple[str, ...]
    variables: Mapping[str, str] | None
    variables_missing: str | None
    peak_memory_bytes: int | None
    cuda_initialized: bool | None


def report(facts: FlashinferFacts) -> Mapping[str, Any]:
    """Give the report's ``modules``."""
    verdict = classify(facts)
    alone = _module_alone(facts) if verdict.code == DISABLED.code else verdict
    evidence = facts.evidence
    how = "pending" if facts.state is ImportState.PENDING else "files"
    section = ModuleSection(
        importable=alone.importable,
        verified=alone.verified,
        evidence=evidence.outcome.value if evidence is not None else how,
        why=evidence.reason if evidence is not None else None,
        seconds=evidence.seconds if evidence is not None else None,
        version=_flashinfer_version(facts),
        stage=evidence.stage if evidence is not None else None,
        scope=facts.environment.scope.value,
        code=verdict.code,
        reason=verdict.reason,
        names=evidence.names if evidence is not None else (),
        variables=facts.variables,
        variables_missing=facts.variables_missing,
        peak_memory_bytes=evidence.max_rss_bytes if evidence is not None else None,
        cuda_initialized=evidence.cuda_initialized if evidence is not None else None,
    )
    return {"modules": {MODULE: section}}


PROBE: Probe[FlashinferFacts] = Probe(
    name="flashinfer",
    title="flashinfer.mamba",
    interval=60.0,
    deadline=10.0,
    collect=collect,
    judge=judge,
    samples=samples,
    families=FAMILIES,
    conditions=CONDITIONS,
    report=report,
    sections={"modules": dict[str, ModuleSection]},
    requirable={Feature.FLASHINFER_MAMBA.value: tuple(kind.code for kind in CONDITIONS)},
)
