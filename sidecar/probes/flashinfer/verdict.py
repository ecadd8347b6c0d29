"""All the knowledge of what FlashInfer's failures mean: facts in, the one cause out."""

from __future__ import annotations

import errno
import re
from typing import Final

from msgspec.structs import replace

from sidecar import loaderrors, sglangtexts
from sidecar.crashes import Crash, crash
from sidecar.imports import ImportEvidence, ImportOutcome
from sidecar.model import Scope
from sidecar.modules import (
    DENIED,
    PLACES,
    devices_missed,
    error_number,
    loader_told_less,
    ran_short,
    variable_named,
    variables_missed,
)
from sidecar.probes.flashinfer import faults, texts
from sidecar.probes.flashinfer.conditions import (
    CAUSES,
    DISABLED,
    IMPORT_CRASHED,
    IMPORT_FAILED,
    IMPORT_TIMEOUT,
    MAMBA_MISSING,
    MODULE,
    NOT_INSTALLED,
    SYMBOL_MISSING,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts
from sidecar.probes.flashinfer.faults import Classification, Raised
from sidecar.probes.flashinfer.reading import (
    by_files,
    companion_faults,
    excluded_by_files,
    python_too_old,
    suspect_variables,
)

_TELLING: Final = {ImportOutcome.OK, ImportOutcome.FAILED, ImportOutcome.CRASHED, ImportOutcome.TIMEOUT}
_PLAIN_OFF: Final = frozenset({"false", "0"})
"""Values by which somebody says that it is to be off."""
_MODULE_CODES: Final = frozenset(kind.code for kind in CAUSES) - {DISABLED.code}


def classify(facts: FlashinferFacts) -> Classification:
    """Find the single cause that keeps SGLang from using ``flashinfer.mamba`` in this environment."""
    if disabled(facts):
        value = (facts.variables or {})[texts.AVAILABLE_VARIABLE]
        return faults.fault(
            DISABLED,
            "variable-set",
            f"{texts.AVAILABLE_VARIABLE}={value!r} makes SGLang treat FlashInfer as absent, however well it is "
            f"installed.{'' if value.lower() in _PLAIN_OFF else texts.ONLY_TRUE}",
            texts.unset(texts.AVAILABLE_VARIABLE),
            raised=Raised(translated=True),
        )
    return classify_module(facts)


def disabled(facts: FlashinferFacts) -> bool | None:
    """Whether the server's environment disables FlashInfer.

    None where that cannot be seen, or where it is not known what this release makes of the value.
    """
    if facts.variables is None:
        return None
    on = sglangtexts.is_on(facts.variables.get(texts.AVAILABLE_VARIABLE, "true"), facts.sglang)
    return None if on is None else not on


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


def read(facts: FlashinferFacts) -> str | None:
    """What reading alone says: importable, unknown, or a condition and its reason; None where nothing was read."""
    if facts.environment.problem is not None or facts.environment.scope is Scope.SELF:
        return None
    found = by_files(facts)
    if found.code is not None:
        return f"{found.code}: {found.reason}"
    return "importable" if found.importable else "unknown"


def disagreement(facts: FlashinferFacts) -> str | None:
    """Give one sentence where an import shows something else than the files; the import has the last word."""
    evidence = facts.evidence
    if evidence is None or evidence.outcome not in _TELLING or read(facts) is None:
        return None
    by_reading, by_import = by_files(facts), _by_import(facts, evidence)
    if None in {by_reading.importable, by_import.importable} or not by_import.verified:
        return None
    if (by_reading.code, by_reading.importable) == (by_import.code, by_import.importable):
        return None
    said = f"{by_reading.code} ({by_reading.reason})" if by_reading.code else "no fault"
    shown = f"{by_import.code} ({by_import.reason})" if by_import.code else "no fault"
    return f"Reading the files showed {said}, the real import shows {shown}; the import has the last word."


def _excluded_by_import(facts: FlashinferFacts, evidence: ImportEvidence, code: str | None) -> frozenset[str]:
    """Give the codes that a real import proves not to be the case; what it did not get to stays open.

    ``code`` is the cause that the import showed.
    """
    if code == IMPORT_CRASHED.code:
        return frozenset({IMPORT_TIMEOUT.code})
    # A release without the module says so only after all the rest of it was imported.
    older = code == MAMBA_MISSING.code and evidence.missing == MODULE
    imported = evidence.outcome is ImportOutcome.OK or evidence.step == "symbol" or older
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
            unusable = faults.cache_unusable(facts)
            if unusable is not None:
                # The import has a home and caches of its own, which the server has not.
                return replace(unusable, evidence=(*unusable.evidence, *shown))
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
                texts.no_lock(),
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
    found = crash(facts.environment, evidence, named=texts.NEEDED)
    sentence = f"The importing process {found.how}"
    # A process that leaves by itself may have missed any variable; a signal may come from a missing preload.
    less = bool(variables_missed(evidence)) if evidence.signal is None else loader_told_less(evidence)
    if less or evidence.private or not _faithful(facts, evidence):
        return _told_nothing(facts, "probe-environment", f"{sentence}.", shown)
    reason = "exit" if evidence.signal is None else "signal"
    return faults.crashed(facts, reason, replace(found, how=sentence), evidence=shown)


_MISMATCH_TEXT = re.compile(r"(flashinfer-cubin|[\w-]{0,30}jit-cache) version \(([^)]{1,64})\) does not match ")
_NO_VERSION_TEXT = re.compile(r"module '(flashinfer_cubin|flashinfer_jit_cache)' has no attribute '__version__'")
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
        at = f" in {evidence.where}" if evidence.where else ""
        how = f"Importing flashinfer.mamba calls sys.exit ({message}){at}"
        if variables_missed(evidence) or not _faithful(facts, evidence):
            return _told_nothing(facts, "probe-environment", f"{how}.", shown)
        file = (evidence.where or "").rpartition(":")[0] or None
        return faults.crashed(facts, "exit", Crash(how=how, file=file), evidence=shown)
    if evidence.step == "symbol" and evidence.exception in {None, "ImportError", "AttributeError"}:
        return _no_symbol(facts, evidence)
    if match := _MISMATCH_TEXT.search(message):
        distribution = "flashinfer-cubin" if match.group(1) == "flashinfer-cubin" else "flashinfer-jit-cache"
        raised = Raised(text=f"{evidence.exception}: {texts.one_line(message)}")
        return faults.mismatch(
            facts, distribution, match.group(2), soft=None, verified=True, raised=raised, evidence=shown
        )
    if match := _NO_VERSION_TEXT.search(message):
        return faults.leftover_companion(facts, match.group(1).replace("_", "-"), verified=True)
    if evidence.exception == "ModuleNotFoundError" and evidence.missing is not None:
        return _module_not_found(facts, evidence, shown)
    if "cannot import name 'mamba' from partially initialized module 'flashinfer'" in message:
        return faults.mamba_missing(facts, verified=True)
    if "Torch not compiled with CUDA enabled" in message and evidence.torch_cuda is None:
        return faults.torch_without_cuda(facts, evidence.versions.get("torch"), verified=True, evidence=shown)
    if devices_missed(evidence):
        return _told_nothing(facts, "devices-hidden", texts.quoted(evidence), shown)
    if ran_short(evidence):
        return _told_nothing(facts, "probe-environment", f"{texts.quoted(evidence)} {_SHORTAGE}", shown)
    if _may_be_ours(facts, evidence):
        return _told_nothing(facts, "probe-environment", texts.quoted(evidence), shown)
    return _other_exception(facts, evidence, shown)


def _no_symbol(facts: FlashinferFacts, evidence: ImportEvidence) -> Classification:
    files = facts.environment.flashinfer
    if files.kind == "namespace":
        return faults.not_installed(facts, verified=True)
    if evidence.exception is not None or files.mamba.symbol == "missing":
        # Without the name Python hands out the submodule of the same name, which is no function either.
        return faults.symbol_missing(facts, "absent", kind=evidence.symbol, verified=True)
    empty = files.mamba.state in {"no-init", "empty-init"}
    return faults.symbol_missing(
        facts, "empty-package" if empty else "not-callable", kind=evidence.symbol, verified=True
    )


def _module_not_found(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    missing = str(evidence.missing)
    files = facts.environment.flashinfer
    if "is not a package" in evidence.message and missing == MODULE:
        # Where the files show the package itself, code has put something else in its place.
        hidden = files.kind == "module"
        return faults.shadowed(facts, verified=True) if hidden else _other_exception(facts, evidence, shown)
    if missing == "flashinfer" or (missing == MODULE and files.kind == "namespace"):
        return faults.not_installed(facts, verified=True)
    if missing == MODULE:
        return faults.mamba_missing(facts, verified=True)
    if missing.startswith("flashinfer."):
        version = texts.flashinfer_version(facts)
        message = f"A part of FlashInfer{f' {version}' if version else ''} is missing: {missing}."
        raised = _raised(evidence)
        return faults.damaged(facts, "partial-install", message, raised=raised, verified=True, evidence=shown)
    if "." in missing:
        return faults.part_missing(facts, missing, verified=True, evidence=shown)
    # Python names the first missing module only; reading the files finds the others at once.
    others = files.missing if missing in files.missing else ()
    return faults.dependencies_missing(facts, (missing.partition(".")[0], *others), verified=True, evidence=shown)


def _faithful(facts: FlashinferFacts, evidence: ImportEvidence) -> bool:
    """Whether the import ran as in the server: its files, its user, its environment variables."""
    return facts.environment.scope is Scope.SERVER and evidence.same_user and facts.variables is not None


def _may_be_ours(facts: FlashinferFacts, evidence: ImportEvidence) -> bool:
    """Whether this exception can come from where the import ran instead of from the server's environment."""
    text = f"{evidence.message} {evidence.cause or ''}"
    # However faithful the import was in all else, the server has neither these folders nor these gaps.
    if evidence.private or _withheld_explains(evidence, text):
        return True
    if _faithful(facts, evidence):
        return False
    if evidence.os_error or _SURROUNDINGS_TEXT.search(text):
        return True
    if facts.variables is not None:
        return False
    return _hangs_on_a_variable(evidence, text)


def _hangs_on_a_variable(evidence: ImportEvidence, text: str) -> bool:
    """Whether an exception can come from a variable that the server has and the import had not, or the reverse."""
    if evidence.exception in _OF_THE_CODE:
        return False
    return not any(sign in text for sign in ("undefined symbol", "cannot import name", "null bytes"))


def _withheld_explains(evidence: ImportEvidence, text: str) -> bool:
    """Whether a variable of the server that the import did not get can be behind the failure."""
    if variable_named(evidence, text):
        return True
    error = loaderrors.load_error(text)
    if error is not None:
        # Only what the loader is told brings it a symbol or a library.
        return loader_told_less(evidence) and error.fault in _LOAD_REASONS
    code_like = evidence.exception in {"ImportError", "ModuleNotFoundError"}
    read = bool(variables_missed(evidence))
    return read and not evidence.os_error and not code_like and _hangs_on_a_variable(evidence, text)


_SHORTAGE: Final = "There was too little of that where the import ran, which may be otherwise for the server."


def _raised(evidence: ImportEvidence) -> Raised:
    text = f"{evidence.exception}: {texts.one_line(evidence.message)}"
    return Raised(text=text, translated=evidence.sglang_catches is True)


_OLD_PYTHON_TEXT = re.compile(r"unsupported operand type\(s\) for \||object is not subscriptable")


def _other_exception(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    text = f"{evidence.message} {evidence.cause or ''}"
    error = loaderrors.load_error(text)
    unread = _unread_variable(facts, evidence)
    syntax = evidence.exception in {"SyntaxError", "IndentationError", "TabError"}
    says = texts.quoted(evidence)
    if python_too_old(facts) and (syntax or _OLD_PYTHON_TEXT.search(text)):
        reason, remedy = "interpreter-too-old", texts.newer_python(facts)
        says += f" The interpreter is Python {facts.environment.python_version}, and FlashInfer needs 3.10."
    elif error is not None:
        reason, remedy = _of_the_loader(facts, evidence, error)
        says = f"{texts.load_sentence(facts, error)} {says}"
    elif _BYTE_CODE_TEXT.search(text):
        reason, remedy = "corrupt-file", texts.recompile(facts)
        says += f" Byte code (.pyc) of a module that {evidence.where or 'it'} imports is damaged."
    elif "null bytes" in evidence.message:
        damaged = _damaged_source(facts, evidence)
        reason, remedy = "corrupt-file", texts.restore(facts, damaged or evidence.where, damaged=damaged is not None)
        says += f" The file {damaged} is damaged." if damaged else f" A file that {evidence.where} imports is damaged."
    elif syntax:
        reason, remedy = "corrupt-file", texts.restore(facts, evidence.where, damaged=True)
        says += f" The file {evidence.where} is damaged." if evidence.where else ""
    elif unread is not None:
        reason, remedy = "bad-variable", texts.unset(unread)
        says += f" FlashInfer cannot use the value of {unread}."
    elif (number := error_number(evidence)) in DENIED:
        reason, remedy = "permission", texts.use_what_the_exception_names(text)
    elif number in PLACES or evidence.os_error:
        reason, remedy = "file-system", _place_remedy(facts, text, number)
        says += texts.place_sentence(number)
    elif evidence.exception == "ImportError" and "cannot import name" in evidence.message:
        reason, remedy = "partial-install", texts.restore(facts, _named_module(facts, evidence))
    elif "Failed to load PyTorch C extensions" in evidence.message:
        reason, remedy = "partial-install", texts.restore(facts, "torch/_C")
        says = f"The compiled part of torch (torch._C) is missing. {says}"
    else:
        reason, remedy = "exception", texts.restore(facts, evidence.where)
    raised = _raised(evidence)
    message = says if raised.translated else f"{says} {texts.UNTRANSLATED}"
    return faults.fault(IMPORT_FAILED, reason, message, remedy, raised=raised, verified=True, evidence=shown)


_LOAD_REASONS: Final = {
    loaderrors.LoadFault.SYMBOL: "abi-mismatch",
    loaderrors.LoadFault.LIBRARY: "shared-library-missing",
    loaderrors.LoadFault.VERSION: "system-too-old",
}
_BYTE_CODE_TEXT: Final = re.compile(r"marshal data too short|bad marshal data|bad magic number|EOF read where")
"""What Python says of a .pyc file that is cut off or of another release."""


def _of_the_loader(
    facts: FlashinferFacts, evidence: ImportEvidence, error: loaderrors.LoadError
) -> tuple[str, texts.Remedy]:
    """(reason, remedy) of what the dynamic loader stumbled over."""
    whole = next((link.library for link in evidence.chain if link.library), error.library)
    match error.fault:
        case loaderrors.LoadFault.LIBRARY if error.library is not None and texts.owner(facts, whole) is not None:
            # Asked for by its path, so that no search path leads to it.
            return "partial-install", texts.restore(facts, whole)
        case loaderrors.LoadFault.LIBRARY:
            return _LOAD_REASONS[error.fault], texts.see_library(facts, error)
        case loaderrors.LoadFault.VERSION:
            return _LOAD_REASONS[error.fault], texts.newer_system(facts, error)
        case loaderrors.LoadFault.DENIED:
            return "permission", texts.use_what_the_exception_names(evidence.message)
        case loaderrors.LoadFault.DAMAGED:
            return "corrupt-file", texts.restore(facts, whole, damaged=True)
        case loaderrors.LoadFault.UNMAPPABLE:
            return "file-system", texts.allow_execution()
        case loaderrors.LoadFault.UNREADABLE:
            return "file-system", texts.repair_the_place(errno.EIO, evidence.message)
        case _:
            return _LOAD_REASONS.get(error.fault, "file-system"), texts.match_build(facts)


def _damaged_source(facts: FlashinferFacts, evidence: ImportEvidence) -> str | None:
    """Name the file with the null bytes: Python names the one that imports it, as far as it names any."""
    if evidence.where and evidence.where.endswith(".py"):
        # Without a line: the file that was read last. With one it is where that is imported.
        return evidence.where
    changed = [
        example
        for damage in facts.environment.damaged.values()
        if damage.resized
        for example in damage.examples
        if example.endswith(".py")
    ]
    return changed[0] if len(changed) == 1 else None


def _named_module(facts: FlashinferFacts, evidence: ImportEvidence) -> str | None:
    """Give the module that lacks a name as a path, where its distribution is known; else the file that asked for it."""
    match = re.search(r"cannot import name '[^']*' from (?:partially initialized module )?'([\w.]+)'", evidence.message)
    named = match[1].replace(".", "/") if match else None
    return named if texts.owner(facts, named) is not None else evidence.where


def _place_remedy(facts: FlashinferFacts, text: str, number: int | None) -> texts.Remedy:
    """Say what to do about a place that cannot be used; a file of a package comes back with the package."""
    named = re.search(r": '(/[^']{1,500})'", text)
    for folder in facts.environment.site_dirs:
        if named is not None and number == errno.ENOENT and named[1].startswith(f"{folder}/"):
            inner = named[1][len(folder) + 1 :]
            if texts.owner(facts, inner) is not None:
                return texts.restore(facts, inner)
    return texts.repair_the_place(number, text)


def _unread_variable(facts: FlashinferFacts, evidence: ImportEvidence) -> str | None:
    """Name the variable whose value made FlashInfer's own code raise, if one did."""
    suspects = suspect_variables(facts)
    if evidence.exception == "ValueError" and suspects:
        return suspects[0]
    if facts.log_file and evidence.os_error and "api_logging" in (evidence.where or ""):
        return texts.LOG_FILE_VARIABLE
    return None
