"""All the knowledge of what FlashInfer's failures mean: facts in, the one cause out."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from typing import Final

from sidecar.environment import ImportEvidence, ImportOutcome
from sidecar.model import Scope
from sidecar.probes.flashinfer import faults, texts
from sidecar.probes.flashinfer.conditions import (
    CONDITIONS,
    CUBIN_MISMATCH,
    DISABLED,
    IMPORT_CRASHED,
    IMPORT_FAILED,
    IMPORT_TIMEOUT,
    JIT_CACHE_MISMATCH,
    MODULE,
    NOT_INSTALLED,
    SYMBOL_MISSING,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts
from sidecar.probes.flashinfer.faults import Classification
from sidecar.probes.flashinfer.reading import by_files, companion_faults, excluded_by_files
from sidecar.probes.flashinfer.texts import SGLANG_SAYS

_TELLING: Final = {ImportOutcome.OK, ImportOutcome.FAILED, ImportOutcome.CRASHED, ImportOutcome.TIMEOUT}
_OFF: Final = {"", "0", "false", "no", "n", "off"}
_ON: Final = {"1", "true"}
_MODULE_CODES: Final = frozenset(kind.code for kind in CONDITIONS) - {DISABLED.code}


def classify(facts: FlashinferFacts) -> Classification:
    """Find the single cause that keeps SGLang from using ``flashinfer.mamba`` in this environment."""
    if disabled(facts):
        value = (facts.variables or {})[texts.AVAILABLE_VARIABLE]
        return faults.fault(
            DISABLED,
            "variable-set",
            f"{texts.AVAILABLE_VARIABLE}={value} makes SGLang treat FlashInfer as absent, however well it is "
            f"installed. {SGLANG_SAYS}",
            f"unset {texts.AVAILABLE_VARIABLE} in the server's environment, {texts.OR_TRITON}",
        )
    return classify_module(facts)


def disabled(facts: FlashinferFacts) -> bool | None:
    """Whether the server's environment disables FlashInfer.

    None where that cannot be seen, or where SGLang's releases differ in what they make of the value.
    """
    if facts.variables is None:
        return None
    value = facts.variables.get(texts.AVAILABLE_VARIABLE, "true").strip().lower()
    return True if value in _OFF else False if value in _ON else None


def classify_module(facts: FlashinferFacts) -> Classification:
    """Judge the module by itself, whether or not SGLang is told to leave it alone."""
    environment = facts.environment
    if environment.problem is not None:
        return faults.unknown(environment.problem)
    if environment.scope is Scope.SELF:
        return faults.unknown("scope-self")
    if facts.evidence is not None and facts.evidence.outcome in _TELLING:
        verdict = _by_import(facts, facts.evidence)
    else:
        verdict = by_files(facts)
    excluded = excluded_by_files(facts)
    if facts.evidence is not None and verdict.verified:
        excluded |= _excluded_by_import(facts, facts.evidence, verdict.code)
    return replace(verdict, ruled_out=excluded - {verdict.code})


def _excluded_by_import(facts: FlashinferFacts, evidence: ImportEvidence, code: str | None) -> frozenset[str]:
    """Give the codes that a real import proves not to be the case; what it did not get to stays open.

    ``code`` is the cause that the import showed.
    """
    if code == IMPORT_CRASHED.code:
        return frozenset({IMPORT_TIMEOUT.code})
    imported = evidence.outcome is ImportOutcome.OK or evidence.step == "symbol"
    if not imported or code == NOT_INSTALLED.code:
        ended = {IMPORT_TIMEOUT.code, IMPORT_CRASHED.code}
        return frozenset({*ended, NOT_INSTALLED.code} if "flashinfer" in evidence.versions else ended)
    # All of FlashInfer ran, so what does not show is a mismatch that it does not check, or that a variable hides.
    unchecked = {item.code for item in companion_faults(facts) if item.importable or facts.variables is None}
    if evidence.outcome is not ImportOutcome.OK:
        unchecked.add(SYMBOL_MISSING.code)
    return _MODULE_CODES - unchecked


def _by_import(facts: FlashinferFacts, evidence: ImportEvidence) -> Classification:
    shown = texts.import_lines(evidence)
    match evidence.outcome:
        case ImportOutcome.OK:
            ignored = next((item for item in companion_faults(facts) if item.importable), None)
            if ignored is not None:
                return replace(ignored, verified=True, evidence=shown)
            # A mismatch that reading called fatal was not: the import has the last word, unless a variable decides.
            return Classification(
                importable=True, undecided="environ-unseen", verified=True, message="It was imported.", evidence=shown
            )
        case ImportOutcome.TIMEOUT:
            return faults.fault(
                IMPORT_TIMEOUT,
                "no-progress",
                f"The import made no progress for a minute at the stage: {evidence.stage or 'start'}.",
                IMPORT_TIMEOUT.remedy,
                importable=None,
                undecided="import-timeout",
                evidence=shown,
            )
        case ImportOutcome.CRASHED:
            return _crashed(facts, evidence, shown)
        case _:
            return _failed(facts, evidence, shown)


def _told_nothing(facts: FlashinferFacts, reason: str, message: str, shown: tuple[str, ...]) -> Classification:
    """Leave the verdict to the files where the import's failure says nothing of the server."""
    found = by_files(facts)
    if found.code is None:
        # Files without a fault prove little beside an import that failed, for whatever reason.
        return faults.unknown(reason, message, evidence=shown)
    evidence = (*found.evidence, *shown)
    if found.importable is False:
        return replace(found, evidence=evidence)
    return replace(found, importable=None, undecided=reason, undecided_message=message, evidence=evidence)


def _crashed(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    if evidence.signal is not None:
        reason, how = "signal", f"was ended by {evidence.signal}"
    else:
        reason, how = "exit", f"left with exit code {evidence.exit_code}"
    sentence = f"The importing process {how} at the stage: {evidence.stage or 'before the first stage'}"
    if not _faithful(facts, evidence):
        return _told_nothing(facts, "probe-environment", f"{sentence}.", shown)
    return faults.crashed(facts, reason, sentence, evidence=shown)


_MISMATCH_TEXT = re.compile(r"(flashinfer-cubin|\S*jit-cache\S*) version \(([^)]{1,64})\) does not match ")
_NO_VERSION_TEXT = re.compile(r"module '(flashinfer_cubin|flashinfer_jit_cache)' has no attribute '__version__'")
_HIDDEN_DEVICES_TEXT = re.compile(
    r"No CUDA GPUs are available|[Ii]nvalid device (id|ordinal)|no CUDA-capable device|Found no NVIDIA driver"
)
_SURROUNDINGS_TEXT = re.compile(
    r"cannot open shared object file|Could not determine home directory|\[Errno \d+\]|Read-only file system"
    r"|Permission denied|Operation not permitted|No space left on device|Disk quota exceeded|Too many open files"
    r"|Cannot allocate memory|can't start new thread|Resource temporarily unavailable"
)
"""What an exception of any type says of the place where the import ran: its files, its rights, its limits."""
_OF_THE_CODE: Final = {"SyntaxError", "IndentationError", "TabError", "AttributeError", "NameError", "TypeError"}
"""Exceptions that come from what is installed, not from the value of a variable."""


def _failed(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    """Find the cause behind an import that raised."""
    message = evidence.message
    if evidence.exited:
        how = f"Importing flashinfer.mamba calls sys.exit ({message})"
        if not _faithful(facts, evidence):
            return _told_nothing(facts, "probe-environment", f"{how}.", shown)
        return faults.crashed(facts, "exit", how, evidence=shown)
    if evidence.step == "symbol" and evidence.exception in {None, "ImportError", "AttributeError"}:
        return _no_symbol(facts, evidence)
    if match := _MISMATCH_TEXT.search(message):
        cubin = match.group(1) == "flashinfer-cubin"
        kind, distribution = (CUBIN_MISMATCH if cubin else JIT_CACHE_MISMATCH), match.group(1)
        return faults.mismatch(facts, kind, distribution, match.group(2), soft=None, verified=True, evidence=shown)
    if match := _NO_VERSION_TEXT.search(message):
        kind = CUBIN_MISMATCH if match.group(1) == "flashinfer_cubin" else JIT_CACHE_MISMATCH
        return faults.leftover_companion(facts, kind, match.group(1).replace("_", "-"), verified=True)
    if evidence.exception == "ModuleNotFoundError" and evidence.missing is not None:
        return _module_not_found(facts, evidence, shown)
    if "cannot import name 'mamba' from partially initialized module 'flashinfer'" in message:
        return faults.mamba_missing(facts, verified=True)
    if _HIDDEN_DEVICES_TEXT.search(message):
        return _told_nothing(facts, "devices-hidden", texts.quoted(evidence), shown)
    if "Torch not compiled with CUDA enabled" in message and evidence.torch_cuda is None:
        return faults.torch_without_cuda(facts, evidence, shown)
    if _may_be_ours(facts, evidence):
        return _told_nothing(facts, "probe-environment", texts.quoted(evidence), shown)
    return _other_exception(facts, evidence, shown)


def _no_symbol(facts: FlashinferFacts, evidence: ImportEvidence) -> Classification:
    files = facts.environment.flashinfer
    if files.kind == "namespace":
        return faults.not_installed(facts, verified=True)
    if evidence.exception is not None or files.mamba.symbol == "missing":
        # Without the name Python hands out the submodule of the same name, which is no function either.
        return faults.symbol_missing(facts, "absent", verified=True)
    empty = files.mamba.state in {"no-init", "empty-init"}
    return faults.symbol_missing(facts, "empty-package" if empty else "not-callable", verified=True)


def _module_not_found(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    missing = str(evidence.missing)
    files = facts.environment.flashinfer
    if "is not a package" in evidence.message and missing == MODULE:
        return faults.shadowed(facts, verified=True)
    if missing == "flashinfer" or (missing == MODULE and files.kind == "namespace"):
        return faults.not_installed(facts, verified=True)
    if missing == MODULE:
        return faults.mamba_missing(facts, verified=True)
    if missing.startswith("flashinfer."):
        message = f"A part of FlashInfer is missing: {missing}. {SGLANG_SAYS}"
        return faults.damaged(facts, "partial-install", message, verified=True, evidence=shown)
    # Python names the first missing module only; reading the files finds the others at once.
    others = files.missing if missing in files.missing else ()
    return faults.dependencies_missing(facts, (missing.partition(".")[0], *others), verified=True, evidence=shown)


def _faithful(facts: FlashinferFacts, evidence: ImportEvidence) -> bool:
    """Whether the import ran as in the server: its files, its user, its environment variables."""
    return facts.environment.scope is Scope.SERVER and evidence.same_user and facts.variables is not None


def _may_be_ours(facts: FlashinferFacts, evidence: ImportEvidence) -> bool:
    """Whether this exception can come from where the import ran instead of from the server's environment."""
    if _faithful(facts, evidence):
        return False
    text = f"{evidence.message} {evidence.cause or ''}"
    if evidence.os_error or _SURROUNDINGS_TEXT.search(text):
        return True
    if facts.variables is not None or evidence.exception in _OF_THE_CODE:
        return False
    # Any other exception can come from a variable that the server has and the import had not, or the reverse.
    return not any(sign in text for sign in ("undefined symbol", "cannot import name", "null bytes"))


def _other_exception(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    text = f"{evidence.message} {evidence.cause or ''}"
    if "cannot open shared object file" in text:
        reason = "shared-library-missing"
    elif "undefined symbol" in text:
        reason = "abi-mismatch"
    elif evidence.exception in {"SyntaxError", "IndentationError", "TabError"} or "null bytes" in evidence.message:
        reason = "corrupt-file"
    elif evidence.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        reason = "permission"
    elif evidence.os_error:
        reason = "file-system"
    elif evidence.exception == "ImportError" and "cannot import name" in evidence.message:
        reason = "partial-install"
    else:
        reason = "exception"
    surfaces = SGLANG_SAYS if evidence.sglang_catches else "SGLang lets this exception through."
    message = f"{texts.quoted(evidence)} {surfaces}"
    return faults.fault(IMPORT_FAILED, reason, message, texts.repair(facts, reason), verified=True, evidence=shown)
