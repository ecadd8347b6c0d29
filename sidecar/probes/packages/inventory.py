"""Whether tracked packages are registered once, under one name, and with all their files."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from sidecar.environment import Damage, EnvironmentFacts
from sidecar.model import Finding, Severity, Status
from sidecar.probes.packages.declare import BINDING, DUPLICATE
from sidecar.probes.packages.facts import MODULES, SGLANG, TRACKED_PINS, PackagesFacts, blind
from sidecar.probes.packages.pins import contradicted
from sidecar.requirements import Installer, installer, parsed, shadowing_folder, unshadow

_PAIRS: Final = (("sgl-kernel", "sglang-kernel"), ("flashinfer", "flashinfer-python"))
"""Distributions of one package by their former and their present name."""
_OWNERS: Final = ("nvidia-ml-py", "nvidia-ml-py3", "pynvml")
"""Distributions that have brought a module pynvml."""
_OF_FLASHINFER: Final = frozenset({"flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"})
"""What their files do to an import is judged by FlashInfer's own conditions."""
_FLASHINFER_CODES: Final = (
    "flashinfer-not-installed",
    "flashinfer-mamba-missing",
    "flashinfer-import-failed",
    "flashinfer-symbol-missing",
)
_WATCHED: Final = frozenset({SGLANG, *MODULES, *TRACKED_PINS}) - {"nvidia-ml-py"}


class _Fault(Struct, frozen=True, kw_only=True):
    """One fault of the distributions ``about``.

    ``severity`` lowers the declared one, ``explained_by`` names what would say more of the same.
    """

    about: tuple[str, ...]
    reason: str
    sentence: str
    remedy: str
    severity: Severity | None = None
    explained_by: tuple[str, ...] = ()


def judge(facts: PackagesFacts) -> Finding:
    """Judge duplicate-distribution."""
    reason = blind(facts.environment)
    if reason is not None:
        return Finding(code=DUPLICATE.code, status=Status.UNKNOWN, reason=reason)
    pip = installer(facts.environment)
    faults = [
        *_pairs(facts, pip),
        *_versions(facts, pip),
        *_shared(facts, pip),
        *_contradicted(facts, pip),
        *_gone(facts, pip),
        *_left(facts),
    ]
    if not faults:
        return Finding(code=DUPLICATE.code, status=Status.FALSE)
    order = list(DUPLICATE.reasons)
    lead, *rest = sorted(faults, key=lambda one: (one.severity is Severity.INFO, order.index(one.reason)))
    return Finding(
        code=DUPLICATE.code,
        status=Status.TRUE,
        reason=lead.reason,
        severity=lead.severity,
        message=" ".join(one.sentence for one in (lead, *rest)),
        remedy="\n".join(_repairs((lead, *rest))),
        explained_by=lead.explained_by if all(one.explained_by for one in faults) else (),
    )


def _repairs(faults: Iterable[_Fault]) -> Iterable[str]:
    """What to do about all faults as grave as the first: one repair for each distribution, that of its gravest fault.

    Two faults of one distribution have one cause, such as a removal under its former name; two repairs for it would
    undo each other.
    """
    repaired: set[str] = set()
    severity = None
    for number, one in enumerate(faults):
        severity = one.severity if number == 0 else severity
        if one.severity is severity and repaired.isdisjoint(one.about):
            repaired |= set(one.about)
            yield one.remedy


def _again(facts: PackagesFacts, name: str) -> str:
    """What to install of a distribution: as SGLang requires it, else as it is registered."""
    for one in facts.checked:
        if one.source == SGLANG and one.package == name and one.required:
            return one.argument
    version = facts.environment.distributions.get(name)
    return name if version is None else f"{name}=={version}"


def _pairs(facts: PackagesFacts, pip: Installer) -> Iterable[_Fault]:
    versions = facts.environment.distributions
    required = {one.package for one in facts.checked if one.source == SGLANG}
    for old, new in _PAIRS:
        if old in versions and new in versions:
            # An older SGLang requires the former name.
            wanted = old if old in required else new
            yield _Fault(
                about=(old, new),
                reason="renamed-pair",
                sentence=f"{old} {versions[old]} and {new} {versions[new]} are both installed: one package under two "
                "names, whose files overwrite each other.",
                remedy=f"{pip.uninstall(old, new)} && {pip.install(_again(facts, wanted))}",
            )


def _versions(facts: PackagesFacts, pip: Installer) -> Iterable[_Fault]:
    for name, found in sorted(facts.environment.duplicates.items()):
        # The same version in two places is a layered environment, as one over the system's packages.
        if name in _WATCHED and len(set(found)) > 1:
            effective, *others = dict.fromkeys(found)
            folder = _shadowing(facts.environment, name)
            yield _Fault(
                about=(name,),
                reason="several-versions",
                sentence=f"{name} is registered as {effective} and as {' and '.join(others)}; Python reports the "
                "first, and "
                + ("the files can be of either." if folder is None else f"{folder} comes first on the import path."),
                remedy=_one_version(facts, name, found, pip) if folder is None else unshadow(name, folder),
            )


def _one_version(facts: PackagesFacts, name: str, found: Iterable[str], pip: Installer) -> str:
    versions = tuple(found)
    wanted = _again(facts, name)
    if wanted == f"{name}=={facts.environment.distributions.get(name)}":
        # Without a requirement of SGLang's nothing says which one it was tested with; the older one is a leftover.
        known = [one for one in map(parsed, versions) if one is not None]
        wanted = f"{name}=={max(known)}" if known else wanted
    return " && ".join([*[pip.uninstall(name)] * len(versions), pip.install(wanted)])


def _shadowing(environment: EnvironmentFacts, name: str) -> str | None:
    module = MODULES.get(name)
    return None if module is None else shadowing_folder(environment, module)


def _contradicted(facts: PackagesFacts, pip: Installer) -> Iterable[_Fault]:
    """Find packages whose files are of another release than the metadata beside them."""
    environment = facts.environment
    for name in sorted(_WATCHED & set(environment.distributions)):
        files = contradicted(environment, name)
        # Where it is registered in several versions that says it already.
        if files is None or len(set(environment.duplicates.get(name, ()))) > 1:
            continue
        registered = environment.distributions[name]
        folder = _shadowing(environment, name)
        where = "" if folder is None else f" They lie in {folder}, which comes before site-packages."
        yield _Fault(
            about=(name,),
            reason="files-of-another-version",
            sentence=f"{name} is registered as {registered}, and its files are those of {files}, which is what is "
            f"imported.{where}",
            remedy=unshadow(name, folder)
            if folder is not None
            else pip.install(_again(facts, name), replace=True, dependencies=False),
            explained_by=_FLASHINFER_CODES if name in _OF_FLASHINFER else (),
        )


def _shared(facts: PackagesFacts, pip: Installer) -> Iterable[_Fault]:
    versions = facts.environment.distributions
    pairs = {frozenset(pair) for pair in _PAIRS}
    for module, owners in sorted(facts.environment.owners.items()):
        several = tuple(dict.fromkeys(owners))
        # pynvml and NVIDIA's libraries have conditions of their own; a renamed pair was named already.
        if module == "pynvml" or module.split("/")[0] == "nvidia" or len(several) < 2 or frozenset(several) in pairs:
            continue
        named = " and ".join(f"{name} {versions.get(name, '')}".strip() for name in several)
        keep = next((name for name in several if any(one.package == name for one in facts.checked)), several[0])
        yield _Fault(
            about=several,
            reason="shared-files",
            sentence=f"{named} own the same files of {module}: those of whichever was installed last are there.",
            remedy=f"{pip.uninstall(*several)} && {pip.install(_again(facts, keep))}",
        )


def _gone(facts: PackagesFacts, pip: Installer) -> Iterable[_Fault]:
    environment = facts.environment
    for name, damage in sorted(environment.damaged.items()):
        if name not in _WATCHED:
            continue
        if name in _OF_FLASHINFER:
            yield from _of_flashinfer(facts, name, damage, pip)
            continue
        if damage.missing == 0:
            yield from _changed(facts, name, damage, pip)
            continue
        examples = f" ({', '.join(damage.examples[:3])})" if damage.examples else ""
        empty = _without_module(environment, name)
        files = f"{damage.missing} file{'s' if damage.missing > 1 else ''}"
        rest = (
            f"its module {MODULES[name]} is gone"
            if empty
            else "its module is there, so this may be an image that was made smaller"
        )
        yield _Fault(
            about=(name,),
            reason="files-missing",
            severity=None if empty else Severity.INFO,
            sentence=f"{name} {environment.distributions.get(name, '')} registers {files} that "
            f"{'are' if damage.missing > 1 else 'is'} not there{examples}; {rest}.",
            remedy=pip.restore(environment, name),
        )


def _of_flashinfer(facts: PackagesFacts, name: str, damage: Damage, pip: Installer) -> Iterable[_Fault]:
    """Find files of FlashInfer and its companions that are not as registered.

    An import shows those that it needs, and that is another condition. Headers and precompiled kernels are needed
    only when a kernel is built or used.
    """
    environment = facts.environment
    if not (damage.missing or damage.resized) or name in environment.editable:
        return
    counts = [(damage.missing, "missing"), (damage.resized, "of another size than registered")]
    what = " and ".join(f"{count} {state}" for count, state in counts if count)
    examples = f" ({', '.join(damage.examples[:3])})" if damage.examples else ""
    yield _Fault(
        about=(name,),
        reason="files-missing" if damage.missing else "files-changed",
        severity=Severity.INFO,
        sentence=f"Files of {name} {environment.distributions.get(name, '')} are not as installed: {what}{examples}; "
        "what an import does not need shows when a kernel is built or used.",
        remedy=pip.restore(environment, name),
        explained_by=_FLASHINFER_CODES,
    )


def _changed(facts: PackagesFacts, name: str, damage: Damage, pip: Installer) -> Iterable[_Fault]:
    """Find files that were replaced or edited; people patch packages in place, so that alone is information."""
    environment = facts.environment
    # SGLang's own files are edited more often than not; others are compared with what torch and it were built for.
    if not damage.resized or name == SGLANG or name in environment.editable:
        return
    examples = f" ({', '.join(damage.examples[:3])})" if damage.examples else ""
    several = damage.resized > 1
    yield _Fault(
        about=(name,),
        reason="files-changed",
        severity=Severity.INFO,
        sentence=f"{damage.resized} file{'s' if several else ''} of {name} {environment.distributions.get(name, '')} "
        f"{'have' if several else 'has'} another size than registered{examples}: patched, replaced or damaged.",
        remedy=pip.restore(environment, name),
    )


def _without_module(environment: EnvironmentFacts, name: str) -> bool:
    """Whether the module of a distribution cannot be imported for want of its files."""
    module = MODULES.get(name)
    if module is None:
        return False
    if module == "torch":
        return not environment.torch_present
    files = environment.modules.get(module)
    kind = environment.kernel.kind if module == "sgl_kernel" else None if files is None else files.kind
    return kind in {"absent", "namespace"}


def _left(facts: PackagesFacts) -> Iterable[_Fault]:
    ours = {module.partition(".")[0] for name, module in MODULES.items() if name not in _OF_FLASHINFER}
    for folder in sorted(set(facts.environment.leftovers)):
        # A distribution of a namespace package owns nothing of its top level, and is none of these.
        if folder in ours - {"pynvml"}:
            yield _Fault(
                about=tuple(name for name, module in MODULES.items() if module.partition(".")[0] == folder),
                reason="leftover-folder",
                sentence=f"A folder {folder} is left in site-packages that no installed package owns; importing it "
                "gives an empty package.",
                remedy=f"remove the folder {folder} from {_site(facts.environment)}",
            )


def _site(environment: EnvironmentFacts) -> str:
    return environment.site_dirs[0] if len(environment.site_dirs) == 1 else "site-packages"


# -- the NVML binding -------------------------------------------------------------------------------


def judge_binding(facts: PackagesFacts) -> Finding:
    """Judge nvml-binding-conflict."""
    environment = facts.environment
    reason = blind(environment)
    if reason is not None:
        return Finding(code=BINDING.code, status=Status.UNKNOWN, reason=reason)
    versions = environment.distributions
    owners = {name: versions[name] for name in _OWNERS if name in versions}
    if _redirects(owners.get("pynvml")) and "pynvml" not in environment.owners.get("pynvml", ()):
        del owners["pynvml"]
    pip = installer(environment)
    again = pip.install("nvidia-ml-py", replace=True)
    if len(owners) > 1:
        named = ", ".join(f"{name} {version}" for name, version in owners.items())
        return Finding(
            code=BINDING.code,
            status=Status.TRUE,
            reason="several-owners",
            message=f"The module pynvml belongs to several packages: {named}; "
            "which one is imported is a matter of luck.",
            remedy=f"{pip.uninstall(*(name for name in owners if name != 'nvidia-ml-py'))} && {again}",
            evidence=_damage(environment, owners),
        )
    if set(owners) == {"nvidia-ml-py"}:
        return _alone(environment, again)
    return Finding(code=BINDING.code, status=Status.FALSE)


def _alone(environment: EnvironmentFacts, again: str) -> Finding:
    """Judge the maintained distribution by itself: its one file must be there and be the one that is found."""
    version = environment.distributions["nvidia-ml-py"]
    files = environment.modules.get("pynvml")
    # A folder without __init__ is found only where the file is not.
    gone = files.kind in {"absent", "namespace"} if files is not None else "pynvml" in environment.flashinfer.missing
    if gone:
        return Finding(
            code=BINDING.code,
            status=Status.TRUE,
            reason="files-missing",
            message=f"nvidia-ml-py {version} is registered and its module pynvml is gone, as after the removal of "
            "another package that owned the same file.",
            remedy=again,
            evidence=_damage(environment, ("nvidia-ml-py",)),
        )
    if files is not None and files.kind == "package":
        where = files.places[0] if files.places else "pynvml"
        return Finding(
            code=BINDING.code,
            status=Status.TRUE,
            reason="shadowed",
            message=f"A folder of another package hides nvidia-ml-py {version}'s module pynvml: {where}.",
            remedy=f"rm -r {shlex.quote(where)} && {again}" if files.places else again,
        )
    return Finding(code=BINDING.code, status=Status.FALSE)


def _damage(environment: EnvironmentFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Say which of their files are gone."""
    return tuple(
        f"{name}: {', '.join(damage.examples[:3]) or f'{damage.missing} files'} missing"
        for name in names
        if (damage := environment.damaged.get(name)) is not None and damage.missing
    )


def _redirects(version: str | None) -> bool:
    """Whether this pynvml brings no module of its own. A version that is none is taken for an old one."""
    release = parsed(version)
    return release is not None and release.major >= 12
