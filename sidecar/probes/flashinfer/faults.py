"""The faults that the flashinfer probe knows, each made from what the environment says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from sidecar import sglangtexts
from sidecar.crashes import Crash
from sidecar.model import ConditionType, Severity
from sidecar.probes.flashinfer import texts
from sidecar.probes.flashinfer.conditions import (
    CUBIN_MISMATCH,
    IMPORT_CRASHED,
    IMPORT_FAILED,
    JIT_CACHE_MISMATCH,
    MAMBA_MISSING,
    NOT_INSTALLED,
    SYMBOL_MISSING,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts
from sidecar.probes.flashinfer.texts import UNTRANSLATED, Remedy

OTHER_CAUSE = "other-cause"
"""The token of a condition that cannot be judged as long as another one is active."""
_COMPANIONS = {"flashinfer-cubin": CUBIN_MISMATCH, "flashinfer-jit-cache": JIT_CACHE_MISMATCH}


class Raised(Struct, frozen=True, kw_only=True):
    """What Python raises at a fault.

    ``text`` is how it stands at the end of a traceback, None where that is not known to the letter. ``translated``:
    the check for ``--mamba-backend flashinfer`` turns it into its own sentence. ``later``: it comes after that check,
    and is what the log shows.
    """

    text: str | None = None
    translated: bool = False
    later: bool = False


class Classification(Struct, frozen=True, kw_only=True):
    """The one cause, or none.

    ``code`` None and ``importable`` True: fine, as far as ``verified`` says. ``importable`` None: unknown, for
    ``reason``. ``code`` with ``importable`` True is a fault that does not keep the module from being imported.
    ``ruled_out`` holds the codes that the evidence proves not to be the case. Every other one but ``code`` is
    undecided, for the reason ``undecided``, with ``undecided_message`` where there is more to say than it means.
    ``mamba_only``: it concerns nobody but the users of ``flashinfer.mamba``.
    """

    importable: bool | None
    undecided: str
    undecided_message: str = ""
    code: str | None = None
    reason: str | None = None
    message: str = ""
    remedy: Remedy | None = None
    raised: Raised = field(default_factory=Raised)
    mamba_only: bool = False
    evidence: tuple[str, ...] = ()
    verified: bool = False
    severity: Severity | None = None
    ruled_out: frozenset[str] = field(default_factory=frozenset)


def unknown(reason: str, message: str = "", **other: Any) -> Classification:
    """Nothing is known of the module, for a reason that each condition then carries."""
    return Classification(
        importable=None, undecided=reason, undecided_message=message, reason=reason, message=message, **other
    )


def fault(kind: ConditionType, reason: str, message: str, remedy: Remedy, **other: Any) -> Classification:
    """One of the conditions is the cause; unless said otherwise the module cannot be imported."""
    return Classification(
        **{
            "importable": False,
            "undecided": OTHER_CAUSE,
            "code": kind.code,
            "reason": reason,
            "message": message,
            "remedy": remedy,
            **other,
        }
    )


def path_known(facts: FlashinferFacts) -> bool:
    """Whether modules were looked for where the server looks for them.

    The server's PYTHONPATH, where it cannot be seen, may lead elsewhere. An interpreter that the operator has named
    is taken at its word all the same; one that was merely found is not.
    """
    return facts.variables is not None or facts.environment.python_source == "setting"


def _not_found(facts: FlashinferFacts, found: Classification) -> Classification:
    """Keep a fault that rests on what was not found only where it was looked for in the right place."""
    if path_known(facts):
        return found
    where = "The server's PYTHONPATH, which may lead elsewhere, cannot be seen; set server_python to make this count."
    return unknown("probe-environment", f"Seen from here: {found.message} {where}", evidence=found.evidence)


def _no_module(name: str) -> Raised:
    return Raised(text=f"ModuleNotFoundError: No module named '{name}'", translated=True)


def not_installed(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    """There is no usable package ``flashinfer``."""
    environment = facts.environment
    files = environment.flashinfer
    version = texts.flashinfer_version(facts)
    raised = _no_module("flashinfer")
    if files.kind == "namespace":
        reason = "leftover-folder"
        what = (
            "Only a leftover folder named flashinfer is there, without the package; "
            "SGLang takes it for an installed FlashInfer and then fails."
        )
        # With a folder mamba in it even the check at start passes, and the scheduler fails.
        later = files.mamba.state != "absent"
        raised = Raised(text=sglangtexts.SCHEDULER, later=True) if later else _no_module("flashinfer.mamba")
    elif version is not None:
        reason = "files-missing"
        what = f"flashinfer-python {version} is registered as installed{texts.place(facts)}, but its package is gone."
    else:
        reason = "absent"
        what = f"There is no package flashinfer in the server's environment{texts.place(facts)}.{texts.wanted(facts)}"
    leftovers = tuple(f"leftover: {place}" for place in files.places[:3])
    remedy = texts.install(facts) if reason == "absent" else texts.reinstall(facts)
    if reason == "leftover-folder" and files.places:
        remedy = replace(remedy, note=f"and remove what else is in {files.places[0]}")
    found = fault(
        NOT_INSTALLED,
        reason,
        what,
        remedy,
        raised=raised,
        verified=verified,
        evidence=leftovers if reason == "leftover-folder" else (),
    )
    return _not_found(facts, found)


def shadowed(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    """A module ``flashinfer``, of one file, is found instead of the package."""
    place = next(iter(facts.environment.flashinfer.places), "flashinfer.py")
    raised = "ModuleNotFoundError: No module named 'flashinfer.mamba'; 'flashinfer' is not a package"
    found = fault(
        IMPORT_FAILED,
        "shadowed",
        f"{place} hides the package flashinfer.",
        Remedy(action=f"move {place} away", shell=False),
        raised=Raised(text=raised, translated=True),
        verified=verified,
    )
    return _not_found(facts, found)


def mamba_missing(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    """FlashInfer is there without its mamba module."""
    version = texts.flashinfer_version(facts)
    parsed = sglangtexts.parsed(version)
    shown = texts.versions_line(facts)
    if parsed is not None and parsed >= texts.FIRST_WITH_MAMBA:
        # From this release on FlashInfer imports the module itself, so that nothing of it can be imported.
        text = "ImportError: cannot import name 'mamba' from partially initialized module 'flashinfer'"
        message = f"FlashInfer {version} should have a mamba module, but its files are gone."
        raised = Raised(text=text, translated=True)
        return damaged(facts, "partial-install", message, raised=raised, verified=verified, evidence=shown)
    if parsed is None:
        reason, what = "absent", "FlashInfer, of unknown version, has no mamba module; it exists since 0.6.1."
    else:
        reason = "version-too-old"
        what = f"FlashInfer {version} has no mamba module; it exists since 0.6.1.{texts.wanted(facts)}"
    return fault(
        MAMBA_MISSING,
        reason,
        what,
        texts.newer(facts),
        raised=_no_module("flashinfer.mamba"),
        mamba_only=True,
        verified=verified,
        evidence=shown,
    )


def symbol_missing(
    facts: FlashinferFacts, reason: str, *, kind: str | None = None, verified: bool = False
) -> Classification:
    """The module is there, but not the function that SGLang wants from it; ``kind`` is the type of what is there."""
    what = {
        "absent": "flashinfer.mamba has no selective_state_update.",
        "not-callable": "flashinfer.mamba.selective_state_update is no function.",
        "empty-package": "flashinfer/mamba has no or an empty __init__.py: selective_state_update is a module there.",
    }[reason]
    kind = "module" if reason == "empty-package" else kind
    called = None if kind is None else f"TypeError: '{kind}' object is not callable"
    text = sglangtexts.SCHEDULER if reason == "absent" else called
    return fault(
        SYMBOL_MISSING,
        reason,
        f"{what} SGLang's check at start passes; the server fails when it wants to use the function.",
        texts.reinstall(facts),
        raised=Raised(text=text, later=True),
        mamba_only=True,
        verified=verified,
        evidence=texts.versions_line(facts),
    )


def damaged(facts: FlashinferFacts, reason: str, message: str, **other: Any) -> Classification:
    """A part of FlashInfer itself is missing or cannot be read."""
    return fault(IMPORT_FAILED, reason, message, texts.reinstall(facts), **other)


def dependencies_missing(
    facts: FlashinferFacts, modules: Iterable[str], *, verified: bool = False, evidence: tuple[str, ...] = ()
) -> Classification:
    """Modules that FlashInfer needs are not there."""
    modules = tuple(dict.fromkeys(modules))
    found = fault(
        IMPORT_FAILED,
        "dependency-missing",
        f"FlashInfer needs {texts.listed(map(texts.brought, modules))}, which the server's environment"
        f"{texts.place(facts)} lacks.",
        texts.install_modules(facts, modules),
        raised=_no_module(modules[0]),
        verified=verified,
        evidence=evidence,
    )
    return _not_found(facts, found)


def part_missing(
    facts: FlashinferFacts, part: str, *, verified: bool = False, evidence: tuple[str, ...] = ()
) -> Classification:
    """A package that FlashInfer needs is there without one of its parts, which installing it once more would skip."""
    distribution = texts.owner(facts, part.replace(".", "/"))
    whose = part.partition(".")[0] if distribution is None else distribution
    version = facts.environment.distributions.get(whose)
    found = fault(
        IMPORT_FAILED,
        "partial-install",
        f"A part of {whose}{f' {version}' if version else ''}, which FlashInfer needs, is missing: {part}.",
        texts.restore_module(facts, part),
        raised=_no_module(part),
        verified=verified,
        evidence=evidence,
    )
    return _not_found(facts, found)


def torch_without_cuda(
    facts: FlashinferFacts, torch: str | None, *, verified: bool = False, evidence: tuple[str, ...] = ()
) -> Classification:
    """FlashInfer asks torch for a GPU while it is imported, and this torch knows none."""
    torch = torch or facts.environment.torch_version or "as installed"
    return fault(
        IMPORT_FAILED,
        "torch-without-cuda",
        f"torch {torch} is a build without CUDA, and FlashInfer {texts.flashinfer_version(facts) or ''} asks it for "
        "a GPU while it is imported.",
        texts.torch_with_cuda(facts),
        # Without CUDA SGLang does not even try the import, and says the same.
        raised=Raised(text="AssertionError: Torch not compiled with CUDA enabled", translated=True),
        verified=verified,
        evidence=evidence,
    )


def mismatch(
    facts: FlashinferFacts, distribution: str, version: str, *, soft: str | None, **other: Any
) -> Classification:
    """A companion is of another version; ``soft`` is the reason why that does not stop the import, if it does not."""
    ours = facts.environment.flashinfer.version
    what = f"{distribution} {version} does not match FlashInfer {ours}"
    tail = {
        None: f": the import raises a RuntimeError, and the server dies with it. {UNTRANSLATED}",
        "check-bypassed": f"; {texts.BYPASS_VARIABLE} hides it, and kernels of another version may be used.",
        "ignored": "; this FlashInfer ignores the package and fetches or builds what it would have supplied.",
    }[soft]
    if soft is None and facts.variables is None:
        tail += f" (Unless {texts.BYPASS_VARIABLE} is set for the server, which cannot be seen from here.)"
    text = (
        f"RuntimeError: {distribution} version ({version}) does not match flashinfer version ({ours}). Please install "
        f"the same version of both packages. Set {texts.BYPASS_VARIABLE}=1 to bypass this check."
    )
    return fault(
        _COMPANIONS[distribution],
        soft or "version-mismatch",
        what + tail,
        texts.match_companion(facts, distribution, version),
        **{
            "importable": soft is not None,
            "severity": Severity.WARNING if soft is not None else None,
            "raised": Raised(text=text if soft is None else None),
            **other,
        },
    )


def leftover_companion(facts: FlashinferFacts, distribution: str, *, verified: bool = False) -> Classification:
    """A folder of a companion is left over, which FlashInfer takes for the package."""
    module = distribution.replace("-", "_")
    return fault(
        _COMPANIONS[distribution],
        "leftover-folder",
        f"A leftover folder {module} without a package makes FlashInfer look for a version that is not there.",
        texts.remove_leftover(facts, distribution),
        raised=Raised(text=f"AttributeError: module '{module}' has no attribute '__version__'", translated=True),
        verified=verified,
    )


def cache_unusable(facts: FlashinferFacts) -> Classification | None:
    """FlashInfer makes folders in the home of the server's user when it is imported, and cannot.

    By reading alone: the import has folders of its own. None where the folder is fine or was not judged.
    """
    cache = facts.environment.cache
    if not facts.cache_stands or cache.problem is None:
        return None
    if cache.problem == "no-home":
        text = "RuntimeError: Could not determine home directory."
        message = "The server's user has no home directory, which FlashInfer asks for while it is imported."
        reason = "no-home"
    else:
        text = {
            "not-a-folder": "NotADirectoryError: [Errno 20] Not a directory",
            "read-only": "OSError: [Errno 30] Read-only file system",
        }.get(cache.problem, "PermissionError: [Errno 13] Permission denied")
        why = {"not-a-folder": "is no folder", "read-only": "is read-only"}.get(cache.problem, "is not theirs to write")
        message = f"FlashInfer's cache folder {cache.path} cannot be made or written by the server's user: it {why}."
        reason = "cache-unwritable"
    return fault(
        IMPORT_FAILED,
        reason,
        f"{message} {UNTRANSLATED}",
        texts.usable_cache(cache.problem),
        raised=Raised(text=text),
        evidence=texts.versions_line(facts),
    )


def crashed(facts: FlashinferFacts, reason: str, crash: Crash, *, evidence: tuple[str, ...]) -> Classification:
    """Importing ends the interpreter; ``crash.how`` is the whole sentence about it, without its full stop."""
    message = f"{crash.how}. The server would end the same way, without a sentence of SGLang's."
    remedy = texts.restore_crashed(facts, crash)
    return fault(IMPORT_CRASHED, reason, message, remedy, verified=True, evidence=evidence)
