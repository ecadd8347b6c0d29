"""Whether the installed versions are those that SGLang's own metadata asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from sidecar.environment import UNKNOWN_VERSION, EnvironmentFacts
from sidecar.model import Finding, Gate, Severity, Status
from sidecar.modules import start_code
from sidecar.probes.packages.declare import VIOLATED
from sidecar.probes.packages.facts import (
    KERNELS,
    MODULES,
    RENAMED,
    SGLANG,
    TRACKED_PINS,
    WEIGHTY,
    Checked,
    Fit,
    PackagesFacts,
    blind,
)
from sidecar.requirements import (
    Asked,
    Installer,
    Lines,
    installer,
    interpreter_of,
    parsed,
    read_lines,
    satisfies,
    sglang_lines,
    shadowing_folder,
    unshadow,
)
from sidecar.sglangtexts import minimum_of, refused_version

_CUTLASS: Final = "nvidia-cutlass-dsl"
_MESSAGE_LIMIT: Final = 8
"""Packages that the message names; the report has all of them."""
_SEPARATE_LIMIT: Final = 4
"""Packages that the remedy installs one by one; beyond, SGLang itself brings them all."""


_FIRST_KERNEL_SKIP = parsed("0.5.2")
_FIRST_FLASHINFER_SKIP = parsed("0.5.8")
"""Releases since which SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK is known to leave out the one check and the other."""


# -- facts ------------------------------------------------------------------------------------------


def check(environment: EnvironmentFacts, machine: str) -> tuple[tuple[Checked, ...], int]:
    """(requirements that apply, SGLang's unreadable lines): SGLang's first, then those of its dependencies."""
    if blind(environment) is not None:
        return (), 0
    interpreter = interpreter_of(environment, machine)
    lines = sglang_lines(environment, machine) if SGLANG in environment.distributions else Lines()
    checked = [_checked(environment, asked, SGLANG) for asked in lines.asked]
    extras = {asked.package: asked.extras for asked in lines.asked}
    for source, own in environment.requires_of.items():
        if source != SGLANG and source in environment.distributions:
            read = read_lines(own, interpreter, source, extras.get(source, ()))
            checked += [_checked(environment, asked, source) for asked in read.asked]
    return tuple(checked), lines.unreadable


def _checked(environment: EnvironmentFacts, asked: Asked, source: str) -> Checked:
    installed, fit, instead = _fit(environment, asked)
    return Checked(
        package=asked.package,
        source=source,
        required=asked.argument.removeprefix(asked.name),
        argument=asked.argument,
        installed=installed,
        fit=fit,
        instead=instead,
    )


def _fit(environment: EnvironmentFacts, asked: Asked) -> tuple[str | None, Fit, str | None]:
    """(installed version, how it fits, what is there under the other name)."""
    package = asked.package
    version = environment.distributions.get(package)
    other = RENAMED.get(package)
    if asked.applies is None:
        return version, Fit.UNREADABLE, None
    if version is None and other in environment.distributions:
        return None, Fit.RENAMED, f"{other} {environment.distributions[str(other)]}"
    version = imported_version(environment, package)
    if version is None:
        return None, Fit.UNREGISTERED if is_importable(environment, package) else Fit.NOT_INSTALLED, None
    met = True if asked.url else satisfies(version, asked)
    return version, Fit.UNREADABLE if met is None else Fit.MET if met else Fit.OUTSIDE, None


def version_by_files(environment: EnvironmentFacts, package: str) -> str | None:
    """Version that a package's own files state, for one that has no metadata; None for all that state none."""
    flashinfer = environment.flashinfer
    stated = {
        "torch": environment.torch_version if environment.torch_present else None,
        "flashinfer-python": flashinfer.version if flashinfer.kind == "package" else None,
        "flashinfer-cubin": flashinfer.cubin.version if flashinfer.cubin.kind == "package" else None,
        "flashinfer-jit-cache": flashinfer.jit_cache.version if flashinfer.jit_cache.kind == "package" else None,
    }.get(package)
    return None if stated == UNKNOWN_VERSION else stated


def contradicted(environment: EnvironmentFacts, package: str) -> str | None:
    """Version of the files of a package whose metadata names another one; None where they agree or do not say.

    Local tags are left out: installers and vendors write them into one of the two.
    """
    if package in environment.editable:
        return None
    files = version_by_files(environment, package)
    stated, registered = parsed(files), parsed(environment.distributions.get(package))
    if stated is None or registered is None or stated.public == registered.public:
        return None
    return files


def imported_version(environment: EnvironmentFacts, package: str) -> str | None:
    """Version of what is imported of a package.

    By its metadata, unless its files are of another release: then the metadata says nothing. None where neither tells.
    """
    registered = environment.distributions.get(package)
    return contradicted(environment, package) or registered or version_by_files(environment, package)


def is_importable(environment: EnvironmentFacts, package: str) -> bool:
    """Whether the module of a package that has no metadata is there all the same."""
    module = MODULES.get(package)
    if module is None:
        return False
    if module in environment.unregistered:
        return True
    kind = {
        "torch": "package" if environment.torch_present else "absent",
        "flashinfer": environment.flashinfer.kind,
        "sgl_kernel": environment.kernel.kind,
    }.get(module)
    if kind is None:
        files = environment.modules.get(module)
        kind = "absent" if files is None else files.kind
    return kind in {"package", "module", "extension"}


# -- judgement --------------------------------------------------------------------------------------


class _Violation(Struct, frozen=True, kw_only=True):
    """One fault. ``checked_by_sglang``: SGLang compares it when it starts; ``says`` is its sentence then."""

    checked: Checked
    reason: str
    severity: Severity
    sentence: str
    checked_by_sglang: bool = False
    says: str | None = None

    @property
    def rank(self) -> tuple[int, bool, bool, int]:
        """Order of faults, the smallest leads: what keeps a server from starting, what is not there, the rest."""
        package = self.checked.package
        place = TRACKED_PINS.index(package) if package in TRACKED_PINS else len(TRACKED_PINS)
        present = self.reason in {"outside-pin", "outside-dependency-pin"}
        return (-self.severity.rank, not self.checked_by_sglang, present, place)


def judge(facts: PackagesFacts, *, launch_passed: bool) -> Finding:
    """Judge requirement-violated: the worst package leads, all are named.

    ``launch_passed``: the check that a launch would fail is behind the server, or does not concern it.
    """
    environment = facts.environment
    reason = blind(environment)
    if reason is not None:
        return _unknown(reason)
    violations = sorted(_violations(facts), key=lambda one: one.rank)
    notes = _notes(facts)
    if violations:
        return _active(facts, violations, notes, launch_passed=launch_passed)
    if SGLANG not in environment.distributions:
        if is_importable(environment, SGLANG):
            return _unknown(
                "sglang-without-metadata",
                "SGLang can be imported and has no metadata, so nothing says which versions it requires.",
            )
        return _unknown("sglang-not-found")
    undecided = [one for one in facts.checked if one.source == SGLANG and one.tracked and one.satisfied is None]
    if undecided:
        return _unknown("version-unknown", " ".join(_doubt(one) for one in undecided))
    if not any(one.source == SGLANG for one in facts.checked):
        return _unknown("no-requirements")
    return Finding(code=VIOLATED.code, status=Status.FALSE, message=" ".join(notes))


def _unknown(reason: str, message: str = "") -> Finding:
    return Finding(code=VIOLATED.code, status=Status.UNKNOWN, reason=reason, message=message)


def _doubt(one: Checked) -> str:
    if one.fit is Fit.UNREGISTERED:
        return f"The version of {one.package} cannot be told: its module is there and its metadata is not."
    return f"Whether {one.package} {one.installed or ''} is {_wanted(one)} cannot be told.".replace("  ", " ")


def _violations(facts: PackagesFacts) -> Iterable[_Violation]:
    environment = facts.environment
    release = environment.distributions.get(SGLANG, "")
    own = {one.package for one in facts.checked if one.source == SGLANG}
    for one in facts.checked:
        if not one.tracked:
            continue
        if one.source == SGLANG:
            found = _of_sglang(facts, one, release)
            if found is not None:
                yield found
        elif one.fit is Fit.OUTSIDE and not (one.package in own and _violates(facts, one.package)):
            yield _Violation(
                checked=one,
                reason="outside-dependency-pin",
                severity=Severity.INFO,
                sentence=f"{one.package} {one.installed} is installed; {one.source} "
                f"{environment.distributions[one.source]} asks for {_wanted(one)}.",
            )
    yield from _parts(facts)


def _violates(facts: PackagesFacts, package: str) -> bool:
    return any(one.satisfied is False for one in facts.checked if one.source == SGLANG and one.package == package)


def _of_sglang(facts: PackagesFacts, one: Checked, release: str) -> _Violation | None:
    minimum = _minimum(facts, one.package, release)
    severity = Severity.WARNING if one.package in WEIGHTY else Severity.INFO
    wanted = f"SGLang {release} requires {_wanted(one)}"
    says = None
    # SGLang compares what the metadata states, whatever the files are.
    registered = facts.environment.distributions.get(one.package)
    found, least = parsed(registered), parsed(minimum)
    match one.fit:
        case Fit.OUTSIDE | Fit.MET if found is not None and least is not None and found < least:
            reason = "below-minimum"
            says = refused_version(one.package, str(minimum), registered)
            other = "" if registered == one.installed else f" (its files are of {one.installed})"
            sentence = f"{one.package} {registered} is installed{other}; {wanted}."
        case Fit.OUTSIDE:
            reason, sentence = "outside-pin", f"{one.package} {one.installed} is installed; {wanted}."
        case Fit.MET if registered is None and minimum is not None and one.installed is not None:
            reason = "unregistered"
            sentence = f"The files of {one.package} {one.installed} are there without its metadata; {wanted}."
        case Fit.RENAMED:
            reason, sentence = "renamed", f"{one.package} is not installed, only {one.instead}; {wanted}."
        case Fit.NOT_INSTALLED:
            reason, sentence = "not-installed", f"{one.package} is not installed; {wanted}."
        case Fit.UNREGISTERED if one.package in KERNELS and minimum is not None:
            reason = "unregistered"
            sentence = f"The module {MODULES[one.package]} is there without the metadata of {one.package}; {wanted}."
        case _:
            return None
    if says is None and minimum is not None and reason in {"renamed", "not-installed", "unregistered"}:
        says = refused_version(one.package, minimum, None)
    compared = says is not None
    if says is not None:
        says, note = _shown(facts, one.package, release, says)
        if one.fit is Fit.MET and (says is None or "flashinfer" not in facts.attention_backends):
            # What is imported is as required, and nothing is known to ask for SGLang's comparison.
            return None
        sentence += note
        if says is not None and _certainly_refused(facts, one.package):
            severity = Severity.CRITICAL
    return _Violation(
        # What is compared is what is shown.
        checked=replace(one, installed=registered) if one.fit is Fit.MET else one,
        reason=reason,
        severity=severity,
        sentence=sentence,
        checked_by_sglang=compared,
        says=says,
    )


def _wanted(one: Checked) -> str:
    return one.argument if one.required else f"{one.package} in any version"


def _minimum(facts: PackagesFacts, package: str, release: str) -> str | None:
    """Least version of a package with which this release starts, where it checks one."""
    environment = facts.environment
    # SGLang looks at the kernel wheel only where torch finds CUDA.
    without_cuda = environment.torch_without_cuda or environment.torch_hip is not None
    return None if package in KERNELS and without_cuda else minimum_of(release, package)


def _shown(facts: PackagesFacts, package: str, release: str, says: str) -> tuple[str | None, str]:
    """(the sentence where SGLang gets to print it, what to add to ours)."""
    first = _FIRST_KERNEL_SKIP if package in KERNELS else _FIRST_FLASHINFER_SKIP
    version = parsed(release)
    if facts.check_skipped and version is not None and first is not None and version >= first:
        return None, " SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK keeps SGLang from refusing it."
    unless = "" if facts.check_skipped is False else " unless SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK is set"
    if package in KERNELS:
        return says, f" SGLang refuses to start with CUDA{unless}."
    if facts.attention_backends and "flashinfer" not in facts.attention_backends:
        # Only that backend makes SGLang look at FlashInfer's version.
        return None, ""
    return says, f" SGLang refuses to start with --attention-backend flashinfer{unless}."


def _certainly_refused(facts: PackagesFacts, package: str) -> bool:
    """Whether nothing that cannot be seen could keep SGLang from refusing to start because of this package.

    Code that runs when the interpreter starts may lead to folders with metadata that no reading finds.
    """
    asked = package in KERNELS or "flashinfer" in facts.attention_backends
    return facts.check_skipped is False and asked and not start_code(facts.environment)


def _parts(facts: PackagesFacts) -> Iterable[_Violation]:
    """Compare the distributions that nvidia-cutlass-dsl consists of: it pins each to its own version."""
    environment = facts.environment
    whole = environment.distributions.get(_CUTLASS)
    if whole is None or _violates(facts, _CUTLASS):
        return
    parts = {
        name: version
        for name, version in environment.distributions.items()
        if name.startswith(f"{_CUTLASS}-libs-") and _differ(version, whole)
    }
    if parts:
        named = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
        own = (one.argument for one in facts.checked if one.source == SGLANG and one.package == _CUTLASS)
        yield _Violation(
            checked=Checked(
                package=_CUTLASS,
                source=_CUTLASS,
                required=f"=={whole}",
                # An installer looks at the parts of what is there already; the extra names one of them.
                argument=next(own, f"{_CUTLASS}=={whole}"),
                installed=named,
                fit=Fit.OUTSIDE,
            ),
            reason="parts-differ",
            severity=Severity.WARNING,
            sentence=f"{_CUTLASS} {whole} is installed with parts of other versions: {named}.",
        )


def _differ(one: str, other: str) -> bool:
    first, second = parsed(one), parsed(other)
    return first is not None and second is not None and first != second


def _notes(facts: PackagesFacts) -> list[str]:
    """What the message adds about packages that are not judged."""
    notes = []
    others = [one for one in facts.checked if one.source == SGLANG and not one.tracked and one.satisfied is False]
    if others:
        count = f"{len(others)} other requirement{'s' if len(others) > 1 else ''} of SGLang"
        named = _joined([f"{one.argument} ({one.installed or one.instead or 'not installed'})" for one in others])
        notes.append(f"{count} {'are' if len(others) > 1 else 'is'} not met: {named}.")
    if facts.unreadable_lines:
        notes.append(f"{facts.unreadable_lines} of SGLang's requirement lines could not be read.")
    return notes


def _joined(items: list[str]) -> str:
    more = len(items) - _MESSAGE_LIMIT
    return ", ".join(items[:_MESSAGE_LIMIT]) + (f" and {more} more" if more > 0 else "")


def _active(facts: PackagesFacts, violations: list[_Violation], notes: list[str], *, launch_passed: bool) -> Finding:
    lead, *rest = violations
    fatal = lead.severity is Severity.CRITICAL and not launch_passed
    message = [lead.sentence]
    if rest:
        message.append("Also: " + _joined([f"{one.checked.package} ({_brief(one)})" for one in rest]) + ".")
    return Finding(
        code=VIOLATED.code,
        status=Status.TRUE,
        reason=lead.reason,
        severity=lead.severity if fatal or lead.severity is not Severity.CRITICAL else Severity.WARNING,
        gate=None if fatal else Gate.NEVER,
        message=" ".join([*message, *notes]),
        remedy=_remedy(facts, violations),
        evidence=tuple(
            f"{one.checked.package}: {_brief(one)}, by the metadata of {one.checked.source}" for one in violations
        ),
        explained_by=_explained_by(violations),
        sglang_says=lead.says,
    )


def _brief(one: _Violation) -> str:
    checked = one.checked
    found = checked.installed or checked.instead or "no metadata" * (one.reason == "unregistered") or "not installed"
    return f"{found}, wanted {checked.required or 'any version'}"


def _explained_by(violations: list[_Violation]) -> tuple[str, ...]:
    """Codes that say the same with more weight, where nothing but their package is at fault."""
    weighty = [one for one in violations if one.severity is not Severity.INFO]
    packages = {one.checked.package for one in weighty}
    if packages == {"flashinfer-python"} and all(one.reason == "not-installed" for one in weighty):
        return ("flashinfer-not-installed",)
    if packages == {"flashinfer-python"} and all(one.severity is not Severity.CRITICAL for one in weighty):
        # One too old to have the module is not the one that is required either.
        return ("flashinfer-cubin-mismatch", "flashinfer-mamba-missing")
    # A companion that does not match is the fault behind either pin, and it is fatal.
    return ("flashinfer-cubin-mismatch",) if packages and packages <= _COMPANIONS else ()


_COMPANIONS: Final = frozenset({"flashinfer-python", "flashinfer-cubin"})


def _remedy(facts: PackagesFacts, violations: list[_Violation]) -> str:
    environment = facts.environment
    pip = installer(environment)
    own = [one for one in violations if one.checked.source in {SGLANG, _CUTLASS}]
    if not own:
        return _remedy_of_dependency(facts, violations[0], pip)
    shadowed = {
        package: folder
        for package in dict.fromkeys(one.checked.package for one in own)
        if (folder := shadowing_folder(environment, MODULES.get(package, package))) is not None
    }
    others = [one for one in own if one.checked.package not in shadowed]
    commands = " && ".join([*_removals(others, pip), _installs(environment, others, pip)]) if others else ""
    return "; then ".join([*(unshadow(*pair) for pair in shadowed.items()), *([commands] if commands else [])])


def _removals(own: list[_Violation], pip: Installer) -> list[str]:
    """Remove what shares its files with its other name first: its removal later would take them along."""
    old = sorted({str(RENAMED[one.checked.package]) for one in own if one.reason == "renamed"})
    return [pip.uninstall(*old)] if old else []


def _installs(environment: EnvironmentFacts, own: list[_Violation], pip: Installer) -> str:
    wanted = list(dict.fromkeys(one.checked.argument for one in own))
    release = parsed(environment.distributions.get(SGLANG))
    registry = release is not None and not release.is_devrelease and release.local is None
    if len(wanted) > _SEPARATE_LIMIT and registry and SGLANG not in environment.editable:
        wanted = [f"{SGLANG}=={environment.distributions[SGLANG]}"]
    return pip.install(*wanted)


def _remedy_of_dependency(facts: PackagesFacts, one: _Violation, pip: Installer) -> str:
    pinned_here = any(item.source == SGLANG and item.package == one.checked.package for item in facts.checked)
    if not pinned_here:
        return pip.install(one.checked.argument)
    sentence = f"None while {one.checked.source} works: SGLang's own requirement on {one.checked.package} is met"
    own = next((item for item in facts.checked if item.source == SGLANG and item.package == one.checked.source), None)
    return f"{sentence}; else choose a {one.checked.source} that accepts it" + (
        f" ({own.argument})" if own is not None and own.required else ""
    )
