"""The faults that the flashinfer probe knows, each made from what the environment says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sidecar.environment import ImportEvidence
from sidecar.model import ConditionType, Severity
from sidecar.probes.flashinfer import texts
from sidecar.probes.flashinfer.conditions import (
    IMPORT_CRASHED,
    IMPORT_FAILED,
    MAMBA_MISSING,
    NOT_INSTALLED,
    SYMBOL_MISSING,
)
from sidecar.probes.flashinfer.facts import FlashinferFacts
from sidecar.probes.flashinfer.texts import SGLANG_SAYS

OTHER_CAUSE = "other-cause"
"""The token of a condition that cannot be judged as long as another one is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The one cause, or none.

    ``code`` None and ``importable`` True: fine, as far as ``verified`` says. ``importable`` None: unknown, for
    ``reason``. ``code`` with ``importable`` True is a fault that does not keep the module from being imported.
    ``ruled_out`` holds the codes that the evidence proves not to be the case. Every other one but ``code`` is
    undecided, for the reason ``undecided``, with ``undecided_message`` where there is more to say than it means.
    """

    importable: bool | None
    undecided: str
    undecided_message: str = ""
    code: str | None = None
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    verified: bool = False
    severity: Severity | None = None
    ruled_out: frozenset[str] = field(default_factory=frozenset)


def unknown(reason: str, message: str = "", **other: Any) -> Classification:
    """Nothing is known of the module, for a reason that each condition then carries."""
    return Classification(
        importable=None, undecided=reason, undecided_message=message, reason=reason, message=message, **other
    )


def fault(kind: ConditionType, reason: str, message: str, remedy: str, **other: Any) -> Classification:
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
    seen = found.message.removesuffix(SGLANG_SAYS).strip()
    where = "The server's PYTHONPATH, which may lead elsewhere, cannot be seen; set server_python to make this count."
    return unknown("probe-environment", f"Seen from here: {seen} {where}", evidence=found.evidence)


def not_installed(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    """There is no usable package ``flashinfer``."""
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
    leftovers = tuple(f"leftover: {place}" for place in environment.flashinfer.places[:3])
    found = fault(
        NOT_INSTALLED,
        reason,
        f"{what} {SGLANG_SAYS}",
        texts.install(facts) if reason == "absent" else texts.reinstall(facts),
        verified=verified,
        evidence=leftovers if reason == "leftover-folder" else (),
    )
    return _not_found(facts, found)


def shadowed(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    """A file ``flashinfer.py`` is found instead of the package."""
    place = next(iter(facts.environment.flashinfer.places), "flashinfer.py")
    found = fault(
        IMPORT_FAILED,
        "shadowed",
        f"{place} hides the package flashinfer. {SGLANG_SAYS}",
        f"move {place} away",
        verified=verified,
    )
    return _not_found(facts, found)


def mamba_missing(facts: FlashinferFacts, *, verified: bool = False) -> Classification:
    """FlashInfer is there without its mamba module."""
    version = texts.flashinfer_version(facts)
    parsed = texts.parsed(version)
    if parsed is not None and parsed < texts.FIRST_WITH_MAMBA:
        reason = "version-too-old"
        what = f"FlashInfer {version} has no mamba module; it exists since 0.6.1."
        remedy = texts.install(facts)
    else:
        reason = "partial-install"
        what = f"FlashInfer {version or 'of unknown version'} should have a mamba module, but its files are gone."
        remedy = texts.reinstall(facts)
    message = f"{what} {SGLANG_SAYS}"
    return fault(MAMBA_MISSING, reason, message, remedy, verified=verified, evidence=texts.versions_line(facts))


def symbol_missing(facts: FlashinferFacts, reason: str, *, verified: bool = False) -> Classification:
    """The module is there, but not the function that SGLang wants from it."""
    what = {
        "absent": "flashinfer.mamba has no selective_state_update.",
        "not-callable": "flashinfer.mamba.selective_state_update is no function.",
        "empty-package": "flashinfer/mamba has no or an empty __init__.py: selective_state_update is a module there.",
    }[reason]
    return fault(
        SYMBOL_MISSING,
        reason,
        f"{what} SGLang's check at start passes; the server fails when it wants to use the function.",
        texts.reinstall(facts),
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
        f"FlashInfer needs {texts.listed(modules)}, which the server's environment lacks. {SGLANG_SAYS}",
        texts.install_modules(facts, modules),
        verified=verified,
        evidence=evidence,
    )
    return _not_found(facts, found)


def torch_without_cuda(facts: FlashinferFacts, evidence: ImportEvidence, shown: tuple[str, ...]) -> Classification:
    """FlashInfer asks torch for a GPU while it is imported, and this torch knows none."""
    torch = evidence.versions.get("torch") or facts.environment.torch_version or "as installed"
    return fault(
        IMPORT_FAILED,
        "torch-without-cuda",
        f"torch {torch} is a build without CUDA, and FlashInfer {texts.flashinfer_version(facts) or ''} asks it for "
        "a GPU while it is imported.",
        texts.torch_with_cuda(facts),
        verified=True,
        evidence=shown,
    )


def mismatch(
    facts: FlashinferFacts, kind: ConditionType, distribution: str, version: str, *, soft: str | None, **other: Any
) -> Classification:
    """A companion is of another version; ``soft`` is the reason why that does not stop the import, if it does not."""
    what = f"{distribution} {version} does not match FlashInfer {facts.environment.flashinfer.version}"
    tail = {
        None: ": the import raises a RuntimeError that SGLang lets through, and the server dies with it.",
        "check-bypassed": f"; {texts.BYPASS_VARIABLE} hides it, and kernels of another version may be used.",
        "ignored": "; this FlashInfer ignores the package and fetches or builds what it would have supplied.",
    }[soft]
    if soft is None and facts.variables is None:
        tail += f" (Unless {texts.BYPASS_VARIABLE} is set for the server, which cannot be seen from here.)"
    return fault(
        kind,
        soft or "version-mismatch",
        what + tail,
        texts.match_companion(facts, distribution),
        importable=soft is not None,
        severity=Severity.WARNING if soft is not None else None,
        **other,
    )


def leftover_companion(
    facts: FlashinferFacts, kind: ConditionType, distribution: str, *, verified: bool = False
) -> Classification:
    """A folder of a companion is left over, which FlashInfer takes for the package."""
    module = distribution.replace("-", "_")
    return fault(
        kind,
        "leftover-folder",
        f"A leftover folder {module} without a package makes FlashInfer look for a version that is not there. "
        + SGLANG_SAYS,
        texts.remove_leftover(facts, distribution),
        verified=verified,
    )


def crashed(facts: FlashinferFacts, reason: str, how: str, *, evidence: tuple[str, ...]) -> Classification:
    """Importing ends the interpreter; ``how`` is the sentence about it, without its full stop."""
    message = f"{how}; the server would end the same way."
    return fault(IMPORT_CRASHED, reason, message, texts.reinstall(facts), verified=True, evidence=evidence)
