"""Whether the module that a FlashAttention version comes from can be imported: facts in, the one cause out.

Reading the files names all that is missing at once, where an import names the first thing only. A real import has
the last word, where it ran as the server would have run it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sidecar.crashes import crash
from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence, ImportOutcome
from sidecar.loaderrors import LoadError, LoadFault, load_error
from sidecar.model import Scope
from sidecar.modules import (
    DENIED,
    PLACES,
    as_sentence,
    devices_missed,
    error_number,
    loader_told_less,
    no_import,
    ran_short,
    said_by,
    start_code,
    variable_named,
    variables_missed,
)
from sidecar.probes.attention.conditions import KERNEL_WHEEL_BROKEN, LIBCUDA_UNUSABLE
from sidecar.probes.attention.facts import AttentionFacts
from sidecar.probes.attention.releases import FLASH_ATTN_4, Provider, provider_of_3, provider_of_4
from sidecar.requirements import (
    Asked,
    distribution_of,
    installer,
    interpreter_of,
    read_lines,
    satisfies,
    sglang_lines,
)

_TELLING: Final = {ImportOutcome.OK, ImportOutcome.FAILED, ImportOutcome.CRASHED}
_PRESENT: Final = {"package", "module", "extension"}
_SURROUNDINGS: Final = re.compile(
    r"cannot open shared object file|Could not determine home directory|\[Errno \d+\]|Read-only file system"
    r"|Permission denied|No space left on device|Cannot allocate memory|can't start new thread"
)
"""What an exception of any type says of the place where the import ran: its files, its rights, its limits."""
_OF_FILES: Final = {"ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError", "AttributeError", "NameError"}
"""Exceptions that come from what is installed, not from the value of a variable."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What is known of a provider's module.

    ``importable`` is None while unknown; ``verified``: by a real import. ``reason`` says why not, or why it is open.
    ``missing`` names the modules that are not there, ``installed`` says whether all of them are, None for unknown.
    ``faithful``: a real import that ran as in the server, with its files, its user and its variables, says so.
    """

    importable: bool | None
    installed: bool | None = None
    verified: bool = False
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    explained_by: tuple[str, ...] = ()
    faithful: bool = False


_UNSURE: Final = Verdict(importable=None, reason="start-code")


def provider(facts: AttentionFacts, version: int) -> Provider | None:
    """Where the environment's SGLang takes a version from; None where that is not known or nowhere."""
    if version == 3:
        return provider_of_3(facts.installed_release)
    return provider_of_4(facts.installed_release, from_pip=facts.from_pip)


def classify(facts: AttentionFacts, version: int) -> Verdict:
    """Judge the module of a FlashAttention version in the server's environment."""
    blind = unread(facts.environment)
    if blind is not None or facts.environment is None:
        return Verdict(importable=None, reason=blind)
    source = provider(facts, version)
    if source is None:
        return Verdict(importable=None, reason="release-unknown")
    by_files = _by_files(facts, facts.environment, source)
    if by_files.importable is False and start_code(facts.environment):
        # What is on the path need not be what is imported.
        by_files = replace(_UNSURE, message=by_files.message, missing=by_files.missing, evidence=by_files.evidence)
    state = facts.imports.get(version)
    evidence = None if state is None else state.evidence
    if evidence is None or evidence.outcome not in _TELLING:
        return by_files
    verdict = _by_import(facts, facts.environment, source, evidence, by_files)
    imported = True if verdict.importable else by_files.installed
    # The import of a server that is root runs with fewer rights; where the files show the same, rights are not why.
    evidence = evidence if by_files.importable is not False else replace(evidence, same_user=True)
    verdict = replace(verdict, faithful=verdict.verified and _faithful(facts, facts.environment, evidence))
    return verdict if verdict.installed is not None else replace(verdict, installed=imported)


def unread(environment: EnvironmentFacts | None) -> str | None:
    """Token that says why nothing is known of the server's files, or None."""
    if environment is None:
        return "no-interpreter"
    if environment.problem is not None:
        return environment.problem
    return "scope-self" if environment.scope is Scope.SELF else None


def driver_library(environment: EnvironmentFacts) -> bool:
    """Whether the loader finds a driver's libcuda.so.1, without which no import of these modules tells anything."""
    found = environment.libcuda.found
    return bool(found) and found[0].kind != "stub"


# -- what is installed --------------------------------------------------------------------------------


def installed_2(environment: EnvironmentFacts) -> bool | None:
    """Whether FlashAttention 2 is installed.

    flash-attn-4 alone leaves a bare ``flash_attn`` that can be imported and is no version 2: a package with an
    ``__init__`` and the compiled flash_attn_2_cuda are needed. None where neither was looked at.
    """
    package, extension = environment.modules.get("flash_attn"), environment.modules.get("flash_attn_2_cuda")
    if package is None or extension is None:
        return True if "flash-attn" in environment.distributions else None
    return package.kind == "package" and extension.kind in _PRESENT


def _there(environment: EnvironmentFacts, module: str, distribution: str) -> bool | None:
    """Whether a module's files are there; None where they may be where no reading finds them."""
    if module == "torch":
        return environment.torch_present
    files = environment.modules.get(module)
    if files is None:
        return None
    if files.kind in _PRESENT:
        return True
    return None if files.kind == "absent" and distribution in environment.editable else False


def _by_files(facts: AttentionFacts, environment: EnvironmentFacts, source: Provider) -> Verdict:
    states = {
        module: _there(environment, module, distribution)
        for module, distribution in {source.module: source.distribution, **source.needs, "torch": "torch"}.items()
    }
    missing = tuple(module for module, state in states.items() if state is False)
    if missing:
        return _missing(environment, source, missing)
    if None in states.values():
        editable = any(module in environment.modules for module, state in states.items() if state is None)
        return Verdict(importable=None, reason="editable-install" if editable else "files-unread")
    damaged = [
        name
        for name in sorted({source.distribution, *source.needs.values()})
        if name in environment.damaged and (environment.damaged[name].missing or environment.damaged[name].resized)
    ]
    if damaged:
        examples = tuple(f"{name}: {example}" for name in damaged for example in environment.damaged[name].examples[:3])
        return Verdict(importable=None, installed=True, reason="damaged-package", evidence=examples)
    return _open(facts, environment, source)


def _open(facts: AttentionFacts, environment: EnvironmentFacts, source: Provider) -> Verdict:
    """Say what keeps the last word out, where reading the files found nothing wrong."""
    evidence = _pairs(environment, source)
    state = facts.imports.get(source.version)
    last = None if state is None else state.evidence
    reason, message = "not-imported", ""
    if not driver_library(environment):
        reason = "no-libcuda"
    elif last is not None and last.outcome is ImportOutcome.NOT_ALLOWED:
        reason, message = "import-not-allowed", no_import(last)
    elif last is not None:
        reason = {
            ImportOutcome.STARVED: "import-starved",
            ImportOutcome.INSUFFICIENT_MEMORY: "insufficient-memory",
        }.get(last.outcome, "import-timeout")
    elif state is not None and state.pending:
        reason = "import-pending"
    return Verdict(importable=True, installed=True, reason=reason, message=message, evidence=evidence)


# -- what is missing ----------------------------------------------------------------------------------


def _missing(
    environment: EnvironmentFacts,
    source: Provider,
    missing: tuple[str, ...],
    *,
    verified: bool = False,
    lines: tuple[str, ...] = (),
) -> Verdict:
    """Name all that is missing, by the distributions that bring it."""
    base = Verdict(importable=False, installed=False, verified=verified, missing=missing, evidence=lines)
    brought = {module: _owner(source, module) for module in missing}
    if source.version == 3:
        return _missing_3(environment, source, base)
    hidden = environment.modules.get("flash_attn.cute")
    if "flash_attn.cute" in missing and hidden is not None and hidden.kind == "hidden":
        parent = environment.modules.get("flash_attn")
        where = f" ({parent.places[0]})" if parent is not None and parent.places else ""
        return replace(
            base,
            reason="hidden-by-flash-attn",
            message=f"A regular package flash_attn{where} hides flash_attn.cute of {FLASH_ATTN_4}: Python looks for "
            "submodules in one of the two only.",
            remedy=f"Install flash-attn and {FLASH_ATTN_4} into the same site-packages, or remove flash-attn.",
        )
    versions = environment.distributions
    if missing == ("cutlass",) and brought["cutlass"] in versions:
        return replace(
            base,
            reason="cutlass-path-missing",
            message=f"nvidia-cutlass-dsl {versions['nvidia-cutlass-dsl']} is installed, and the module cutlass is not "
            "found: its .pth file, which puts it on the import path, is missing or not processed.",
            remedy=f"{_reinstall(environment, ('nvidia-cutlass-dsl',))}  # .pth files count in site-packages only, not "
            "on PYTHONPATH, and not with python -S",
            evidence=(*lines, *_cutlass_versions(environment)),
        )
    if source.module in missing and source.distribution != "sglang" and len(missing) == 1:
        return replace(
            base,
            reason="module-missing",
            message=f"{source.module} is not there: {_state(environment, source.distribution)}.",
            remedy=_reinstall(environment, (source.distribution,)),
        )
    named = ", ".join(f"{module} ({_state(environment, owner)})" for module, owner in brought.items())
    return replace(
        base,
        reason="missing-dependency" if source.module not in missing else "module-missing",
        message=f"FlashAttention 4, here {source.module}, cannot be imported; missing: {named}.",
        remedy=_reinstall(environment, dict.fromkeys(brought.values())),
        evidence=(*lines, *(_cutlass_versions(environment) if "cutlass" in missing else ())),
    )


def _missing_3(environment: EnvironmentFacts, source: Provider, base: Verdict) -> Verdict:
    remedy = f"{_reinstall(environment, (source.distribution,))}  # or choose --attention-backend flashinfer or triton"
    wheel = _kernel(environment, source)
    if environment.kernel.kind == "absent" or source.module in base.missing:
        absent = environment.kernel.kind == "absent"
        return replace(
            base,
            reason="module-missing",
            message=f"{'sgl_kernel' if absent else source.module} is not there: {_state(environment, wheel)}.",
            remedy=remedy,
            # Without the whole wheel more than this version is missing.
            explained_by=(KERNEL_WHEEL_BROKEN,) if absent else (),
        )
    others = tuple(module for module in base.missing if module != "sgl_kernel.flash_ops")
    if others:
        message = f"{source.module} needs {' and '.join(others)}, which cannot be found."
        return replace(base, reason="missing-dependency", message=message, remedy=_reinstall(environment, others))
    return replace(
        base,
        reason="flash-ops-missing",
        message=f"sgl_kernel ({_state(environment, wheel)}) has no flash_ops library: SGLang's sentence hides "
        "\"cannot import name 'flash_ops' from 'sgl_kernel'\".",
        remedy=remedy,
    )


def _owner(source: Provider, module: str) -> str:
    """The distribution that brings a module: a known one, the provider's own, or else the one of the same name."""
    top = module.partition(".")[0]
    known = source.needs.get(module) or source.needs.get(top)
    if known is not None:
        return known
    return source.distribution if top == source.module.partition(".")[0] else top.replace("_", "-")


def _kernel(environment: EnvironmentFacts, source: Provider) -> str:
    """The name under which the kernel wheel is installed, whatever the release asks for."""
    return next(
        (name for name in ("sglang-kernel", "sgl-kernel") if name in environment.distributions), source.distribution
    )


def _state(environment: EnvironmentFacts, distribution: str) -> str:
    version = environment.distributions.get(distribution)
    return (
        f"{distribution} is not installed" if version is None else f"{distribution} {version} is installed without it"
    )


def _cutlass_versions(environment: EnvironmentFacts) -> tuple[str, ...]:
    """The versions of nvidia-cutlass-dsl and of its libraries, which must be one and the same."""
    found = {name: one for name, one in environment.distributions.items() if name.startswith("nvidia-cutlass-dsl")}
    return (", ".join(f"{name} {one}" for name, one in sorted(found.items())),) if found else ()


def _reinstall(environment: EnvironmentFacts, distributions: Iterable[str]) -> str:
    """The command that brings distributions: as SGLang pins them, and those that fit already anew, as they are."""
    pins = {one.package: one for one in _asked(environment, "sglang")}
    versions, tool = environment.distributions, installer(environment)
    wanted: list[str] = []
    anew: list[str] = []
    for name in distributions:
        pin, version = pins.get(name), versions.get(name)
        if version is not None and (pin is None or satisfies(version, pin) is not False):
            anew.append(name)
        else:
            wanted.append(name if pin is None else f"{name}{pin.argument.removeprefix(pin.name)}")
    commands = [tool.install(*wanted)] if wanted else []
    return " && ".join([*commands, *([tool.restore(environment, *anew)] if anew else [])])


def _asked(environment: EnvironmentFacts, distribution: str) -> tuple[Asked, ...]:
    if distribution == "sglang":
        return tuple(one for one in sglang_lines(environment).asked if one.applies)
    return read_lines(environment.requires_of.get(distribution, ()), interpreter_of(environment), distribution).asked


def _pairs(environment: EnvironmentFacts, source: Provider) -> tuple[str, ...]:
    """What the provider's own metadata asks of the packages that it is compiled with, and what is there instead."""
    if source.version == 3:
        return ()
    owner = FLASH_ATTN_4 if source.distribution == FLASH_ATTN_4 else "sglang"
    parts = {*source.needs.values(), "torch"}
    return tuple(
        f"{owner} asks for {one.package}{one.specifier}, {environment.distributions[one.package]} is installed"
        for one in _asked(environment, owner)
        if one.package in parts
        and one.applies
        and one.package in environment.distributions
        and satisfies(environment.distributions[one.package], one) is False
    )


# -- by import ----------------------------------------------------------------------------------------


def _by_import(
    facts: AttentionFacts, environment: EnvironmentFacts, source: Provider, evidence: ImportEvidence, by_files: Verdict
) -> Verdict:
    lines = _lines(evidence)
    if evidence.outcome is ImportOutcome.OK:
        pairs = _pairs(environment, source)
        if pairs:
            return Verdict(
                importable=True,
                verified=True,
                reason="untested-pair",
                message=f"{source.module} can be imported, which proves little here: {'; '.join(pairs)}. Its kernels "
                "are compiled at the first call.",
                evidence=(*pairs, *lines),
            )
        return Verdict(importable=True, verified=True, message="It was imported.", evidence=lines)
    faithful = _faithful(facts, environment, evidence)
    if evidence.outcome is ImportOutcome.CRASHED or evidence.exited:
        found = crash(environment, evidence, named={})
        message = f"The process that imported {source.module} {found.how}."
        # A process that leaves by itself may have missed any variable; a signal may come from a missing preload.
        less = loader_told_less(evidence) if evidence.signal else bool(variables_missed(evidence))
        if less or evidence.private or not faithful:
            return _told_nothing(by_files, "probe-environment", message, lines)
        return Verdict(
            importable=False,
            verified=True,
            reason="crashed",
            message=message,
            remedy=_reinstall(environment, (found.distribution,))
            if found.distribution is not None
            else f"see which module it is, by the last line of `{environment.python} -v -c 'import {source.module}'`, "
            "and install the package that it belongs to again",
            evidence=lines,
        )
    text = said_by(evidence)
    quoted = f"{evidence.exception}: {_root(evidence)}"
    if evidence.step == "symbol" and evidence.exception in {None, "ImportError", "AttributeError"}:
        return Verdict(
            importable=False,
            verified=True,
            reason="symbol-missing",
            message=f"{source.module} has no function {evidence.symbol or source.work.symbol}.",
            remedy=_reinstall(environment, (source.distribution,)),
            evidence=lines,
        )
    if devices_missed(evidence):
        return _told_nothing(by_files, "devices-hidden", quoted, lines)
    if "Could not load any common_ops" in text:
        # The whole wheel fails to load, which has a condition, and causes, of its own: its text quotes many.
        if not faithful:
            return _told_nothing(by_files, "probe-environment", "sgl_kernel itself cannot be loaded here.", lines)
        return Verdict(
            importable=False,
            verified=True,
            reason=KERNEL_WHEEL_BROKEN,
            message="sgl_kernel itself cannot be loaded.",
            remedy=_reinstall(environment, (source.distribution,)),
            evidence=lines,
            explained_by=(KERNEL_WHEEL_BROKEN, LIBCUDA_UNUSABLE),
        )
    module = evidence.missing or next(filter(None, (_not_found(link.message) for link in evidence.chain)), None)
    if module is not None:
        known = _known(source, module)
        if module.startswith(f"{known}.") and known not in by_files.missing and known in source.needs:
            return _moved(environment, source, known, module, lines)
        missing = tuple(dict.fromkeys((known, *by_files.missing)))
        return _missing(environment, source, missing, verified=True, lines=lines)
    ours = evidence.private or ran_short(evidence) or _withheld_explains(evidence, text)
    if ours or (not faithful and _may_be_ours(evidence, text, environ_seen=facts.environ_seen)):
        return _told_nothing(by_files, "probe-environment", quoted, lines)
    return _raised(environment, source, evidence, lines)


def _faithful(facts: AttentionFacts, environment: EnvironmentFacts, evidence: ImportEvidence) -> bool:
    """Whether the import ran as in the server: its files, its user, its environment variables."""
    return environment.scope is Scope.SERVER and evidence.same_user and facts.environ_seen


def _moved(environment: EnvironmentFacts, source: Provider, known: str, module: str, lines: tuple[str, ...]) -> Verdict:
    """Judge a package that is there without a part that the provider expects: another version has it."""
    owner = source.needs[known]
    version = environment.distributions.get(owner, "of unknown version")
    pairs = _pairs(environment, source)
    return Verdict(
        importable=False,
        verified=True,
        reason="missing-dependency",
        message=f"{source.module} needs {module}, which {owner} {version} does not have: the two do not fit together.",
        remedy=_reinstall(environment, (owner, source.distribution)),
        evidence=(*pairs, *lines),
        missing=(module,),
    )


def _not_found(message: str) -> str | None:
    match = re.search(r"No module named '([\w.]+)'", message)
    return None if match is None else match[1]


def _known(source: Provider, module: str) -> str:
    """The module of the provider's own list that a missing one belongs to, else its top level."""
    for name in (source.module, *source.needs, "torch"):
        if module == name or module.startswith(f"{name}."):
            return name
        if name.startswith(f"{module}."):
            return name
    return module.partition(".")[0]


def _raised(
    environment: EnvironmentFacts, source: Provider, evidence: ImportEvidence, lines: tuple[str, ...]
) -> Verdict:
    text, quoted = said_by(evidence), f"{evidence.exception}: {_root(evidence)}"
    verdict = Verdict(importable=False, verified=True, reason="exception", message=quoted, evidence=lines)
    if source.version == 3 and "cannot import name 'flash_ops'" in text:
        return _missing_3(environment, source, replace(verdict, missing=("sgl_kernel.flash_ops",)))
    fault = load_error(text)
    if fault is not None:
        return _of_the_loader(environment, source, verdict, fault)
    # Of an exception that another one was raised from, the place says nothing.
    first = evidence.chain[-1].exception if evidence.chain else evidence.exception
    where = evidence.where if len(evidence.chain) <= 1 else None
    if first in {"SyntaxError", "IndentationError", "TabError"} or "null bytes" in text:
        said = f" The file {where} is damaged." if where else ""
        remedy = _restore(environment, source, where)
        return replace(verdict, reason="corrupt-file", message=f"{as_sentence(quoted)}{said}", remedy=remedy)
    number = error_number(evidence)
    if number in DENIED:
        remedy = "give the server's user the right to use the file or folder that the exception names"
        return replace(verdict, reason="permission", remedy=remedy)
    if number is not None and number in PLACES:
        what, remedy = PLACES[number]
        return replace(
            verdict, reason="file-system", message=f"{as_sentence(quoted)} What it names {what}.", remedy=remedy
        )
    return replace(verdict, remedy=_restore(environment, source, where))


def _of_the_loader(environment: EnvironmentFacts, source: Provider, verdict: Verdict, fault: LoadError) -> Verdict:
    """Judge what the dynamic loader missed, or found and cannot use."""
    file = fault.library or source.module
    quoted = verdict.message
    match fault.fault:
        case LoadFault.LIBRARY if fault.library is None:
            return replace(
                verdict,
                reason="shared-library-missing",
                message=f"{source.module} needs {fault.name}, which the loader does not find. {quoted}",
                remedy="make the library visible to the server: its package, LD_LIBRARY_PATH or driver mount",
                explained_by=(LIBCUDA_UNUSABLE,) if fault.name.startswith("libcuda.") else (),
            )
        case LoadFault.LIBRARY:
            reason, message = "corrupt-file", f"{file} is not there, or is built for another kind of machine."
            remedy = _restore(environment, source, fault.library)
        case LoadFault.DENIED:
            reason, message = "permission", f"{file} is there and may not be opened."
            remedy = "give the server's user the right to read that file and to enter the folders above it"
        case LoadFault.UNMAPPABLE:
            reason, message = "file-system", f"{file} lies on a file system from which nothing may be executed."
            remedy = "mount it without noexec, or move the environment to another file system"
        case LoadFault.UNREADABLE:
            reason, message = "file-system", f"{file} is there, and the file system does not give it."
            remedy = "look at the kernel's log and the health of the disk or of the network file system"
        case LoadFault.DAMAGED:
            reason, message = "corrupt-file", f"{file} is damaged or built for another kind of machine."
            remedy = _restore(environment, source, fault.library)
        case LoadFault.VERSION:
            reason, message = "abi-mismatch", f"{file} needs {fault.name}, which this system's C library lacks."
            remedy = "use an image with a newer distribution, or a wheel that was built for this one"
        case _:
            named = fault.readable or fault.name
            reason, message = "abi-mismatch", f"{file} was built against another version of what it loads: {named}."
            return replace(
                verdict, reason=reason, message=message, remedy=_reinstall(environment, (source.distribution, "torch"))
            )
    return replace(verdict, reason=reason, message=f"{message} {quoted}", remedy=remedy)


def _restore(environment: EnvironmentFacts, source: Provider, file: str | None) -> str:
    """The command that brings a file back: of the distribution that it is known to belong to, else the provider's."""
    top = (file or "").partition(":")[0].partition("/")[0].partition(".")[0]
    name = distribution_of(top) if top else source.distribution
    known = name in environment.distributions and name != "sglang"
    return _reinstall(environment, (name if known else source.distribution,))


def _withheld_explains(evidence: ImportEvidence, text: str) -> bool:
    """Whether a variable of the server that the import did not get can be behind the failure."""
    if variable_named(evidence, text):
        return True
    fault = load_error(text)
    if fault is not None:
        return loader_told_less(evidence) and fault.fault in {LoadFault.SYMBOL, LoadFault.LIBRARY, LoadFault.VERSION}
    of_files = evidence.exception in _OF_FILES or evidence.exception == "ImportError"
    return bool(variables_missed(evidence)) and not evidence.os_error and not of_files


def _may_be_ours(evidence: ImportEvidence, text: str, *, environ_seen: bool) -> bool:
    """Whether this exception can come from where the import ran instead of from the server's environment."""
    if evidence.os_error or _SURROUNDINGS.search(text):
        return True
    if environ_seen or evidence.exception in _OF_FILES:
        return False
    return not any(sign in text for sign in ("undefined symbol", "cannot import name", "null bytes"))


def _told_nothing(by_files: Verdict, reason: str, message: str, lines: tuple[str, ...]) -> Verdict:
    """Leave the verdict to the files where the import's failure says nothing of the server."""
    if by_files.importable is False:
        return replace(by_files, evidence=(*by_files.evidence, *lines))
    return Verdict(importable=None, reason=reason, message=message, evidence=(*by_files.evidence, *lines))


def _root(evidence: ImportEvidence) -> str:
    """What was raised first: SGLang's and the wheel's own sentences come on top of it."""
    if evidence.chain:
        return evidence.chain[-1].message[:400]
    return evidence.cause or evidence.message[:400]


def _lines(evidence: ImportEvidence) -> tuple[str, ...]:
    """The import as evidence: how it ended, and the exceptions behind one another."""
    took = "" if evidence.seconds is None else f" after {evidence.seconds:.1f} s"
    chain = tuple(
        f"{link.exception}: {link.message.splitlines()[0][:300]}" for link in evidence.chain[:6] if link.message
    )
    alone = (f"{evidence.exception}: {evidence.message[:300]}",) if evidence.exception and not chain else ()
    return (f"import: {evidence.outcome.value}{took}", *chain, *alone)
