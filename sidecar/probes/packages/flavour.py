"""Whether what is installed was built for the CUDA major that torch was built for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from sidecar.environment import EnvironmentFacts
from sidecar.model import Finding, Severity, Status
from sidecar.probes.packages.declare import FLAVOUR
from sidecar.probes.packages.facts import SGLANG, TRACKED_PINS, PackagesFacts, blind
from sidecar.requirements import Installer, installer, parsed

_TAG: Final = re.compile(r"(?<![a-z])cu(\d{2,3})(?!\d)")
"""A CUDA version in a local tag: +cu130, +cu124, +cu121torch2.5, +cu12torch2.8cxx11abiTRUE, +pt2.9.0cu129."""
_WITH_MAJOR: Final = re.compile(r"nvidia-(.+)-cu(\d{2})\Z")
_PARTS: Final = "nvidia-cutlass-dsl-libs"
"""Its builds for two majors are made to be installed side by side, and are."""
_WITHOUT_MAJOR: Final = frozenset(
    {
        "cublas",
        "cuda-cupti",
        "cuda-nvcc",
        "cuda-nvrtc",
        "cuda-runtime",
        "cufft",
        "cufile",
        "curand",
        "cusolver",
        "cusparse",
        "nvjitlink",
        "nvtx",
    }
)
"""Libraries of the toolkit whose wheels are named without a major since CUDA 13, as torch requires them then."""
_FIRST_WITHOUT_MAJOR: Final = 13
_ONE_FOLDER: Final = frozenset({"cudnn", "cusparselt", "nccl", "nvshmem"})
"""Libraries whose wheels put the same file into the same folder for each major (nvidia/nccl/lib/libnccl.so.2), where
torch looks for it. The toolkit's libraries have a folder and a file name of their own for each major."""


def tag_major(version: str) -> int | None:
    """CUDA major in the local tag of a version, or None where it has none."""
    found = _TAG.search(version.partition("+")[2].lower())
    if found is None:
        return None
    digits = found.group(1)
    # cu12 is a major, cu124 a major and a minor, cu92 both in two digits.
    return int(digits[:2]) if len(digits) == 3 or digits < "20" else int(digits[0])


def library(name: str, version: str) -> tuple[str, int] | None:
    """(library, CUDA major) of one of NVIDIA's library wheels, or None for any other distribution."""
    found = _WITH_MAJOR.match(name)
    if found is not None and not name.startswith(_PARTS):
        return found.group(1), int(found.group(2))
    bare = name.removeprefix("nvidia-")
    if bare == name or bare not in _WITHOUT_MAJOR:
        return None
    release = parsed(version)
    # Placeholders of that name were published as 0.0.1 before. Only cuda-* are numbered by CUDA's own version.
    if release is None or release.major == 0:
        return None
    return bare, max(release.major, _FIRST_WITHOUT_MAJOR) if bare.startswith("cuda-") else _FIRST_WITHOUT_MAJOR


class _Fault(Struct, frozen=True, kw_only=True):
    """One fault.

    ``names`` are the distributions at fault, ``action`` is the command that repairs it, ``note`` what else there is to
    say of it.
    """

    reason: str
    sentence: str
    action: str
    names: tuple[str, ...]
    severity: Severity | None = None
    note: str = ""


def judge(facts: PackagesFacts) -> Finding:
    """Judge cuda-flavour-mismatch."""
    environment = facts.environment
    reason = blind(environment)
    if reason is not None:
        return _unknown(reason)
    if environment.torch_hip is not None:
        return Finding(code=FLAVOUR.code, status=Status.FALSE, message="torch is a build for AMD GPUs.")
    torch = _torch_major(environment)
    tags = {
        name: major
        for name, version in environment.distributions.items()
        if name != "torch" and (major := tag_major(version)) is not None
    }
    faults = [*_libraries(environment, torch), *_tagged(facts, tags, torch)]
    if faults:
        return _active(environment, faults)
    if not environment.torch_present:
        return _unknown("torch-not-found")
    if torch is None and not environment.torch_without_cuda:
        return _unknown("torch-cuda-unknown")
    return Finding(code=FLAVOUR.code, status=Status.FALSE)


def _unknown(reason: str) -> Finding:
    return Finding(code=FLAVOUR.code, status=Status.UNKNOWN, reason=reason)


def _torch_major(environment: EnvironmentFacts) -> int | None:
    version = parsed(environment.torch_cuda)
    return None if version is None else version.major


def _active(environment: EnvironmentFacts, faults: list[_Fault]) -> Finding:
    order = list(FLAVOUR.reasons)
    lead, *rest = sorted(faults, key=lambda one: order.index(one.reason))
    built = environment.torch_cuda or ("no CUDA" if environment.torch_without_cuda else "an unknown CUDA")
    versions = environment.distributions
    return Finding(
        code=FLAVOUR.code,
        status=Status.TRUE,
        reason=lead.reason,
        severity=lead.severity,
        message=" ".join(one.sentence for one in (lead, *rest)),
        remedy=_chained((lead, *rest)),
        evidence=(
            f"torch {environment.torch_version or versions.get('torch', 'of unknown version')}, built for {built}",
            *(f"{name} {versions[name]}" for one in (lead, *rest) for name in one.names),
        ),
        explained_by=FLAVOUR.depends_on if {one.reason for one in faults} == {"plain-torch"} else (),
    )


def _chained(faults: Iterable[_Fault]) -> str:
    """One command line that can be pasted as it stands: what else there is to say follows as a shell comment."""
    taken = list(faults)
    notes = "; ".join(dict.fromkeys(one.note for one in taken if one.note))
    commands = " && ".join(dict.fromkeys(one.action for one in taken if one.action))
    return f"{commands}  # {notes}" if commands and notes else commands or notes or FLAVOUR.remedy


# -- NVIDIA's library wheels ------------------------------------------------------------------------


def _libraries(environment: EnvironmentFacts, torch: int | None) -> Iterable[_Fault]:
    """Find libraries of which wheels for several majors are installed, or one only for another than torch's."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name, version in sorted(environment.distributions.items()):
        known = library(name, version)
        if known is not None:
            found[known[0]][known[1]] = name
    several = {lib: majors for lib, majors in found.items() if len(majors) > 1}
    shared = {lib: majors for lib, majors in several.items() if lib in _ONE_FOLDER}
    if shared:
        yield _two_majors(environment, several, shared, torch)
    elif several:
        names = _names(several)
        yield _Fault(
            reason="two-majors",
            severity=Severity.INFO,
            sentence=f"Library wheels of two CUDA majors are installed: {', '.join(names)}; they have folders of "
            "their own, so each finds its own.",
            action=_removal(several, torch, installer(environment)),
            names=names,
        )
    # A torch without a tag may bring its own libraries, as a vendor's or a distribution's build does.
    if torch is not None and tag_major(environment.torch_version or "") == torch:
        strays = {lib: majors for lib, majors in found.items() if lib in _ONE_FOLDER and torch not in majors}
        if strays:
            names = _names(strays)
            pip = installer(environment)
            # torch's own metadata names the version; an installer that looks at torch brings it.
            action = f"{pip.uninstall(*names)} && {pip.install(_torch_as_installed(environment))}"
            yield _Fault(
                reason="other-major",
                sentence=f"{', '.join(names)} {'lies' if len(names) == 1 else 'lie'} where torch, built for CUDA "
                f"{environment.torch_cuda}, looks for its own.",
                action=action,
                names=names,
            )


def _torch_as_installed(environment: EnvironmentFacts) -> str:
    return f"torch=={environment.distributions.get('torch') or environment.torch_version}"


def _names(libraries: Mapping[str, Mapping[int, str]]) -> tuple[str, ...]:
    return tuple(name for majors in libraries.values() for _, name in sorted(majors.items()))


def _doomed(libraries: Mapping[str, Mapping[int, str]], torch: int) -> tuple[str, ...]:
    """Wheels of another major than torch's, where there is one of torch's."""
    return tuple(
        name
        for majors in libraries.values()
        if torch in majors
        for major, name in sorted(majors.items())
        if major != torch
    )


def _removal(libraries: Mapping[str, Mapping[int, str]], torch: int | None, pip: Installer) -> str:
    doomed = () if torch is None else _doomed(libraries, torch)
    return pip.uninstall(*doomed) if doomed else ""


def _two_majors(
    environment: EnvironmentFacts,
    several: Mapping[str, Mapping[int, str]],
    shared: Mapping[str, Mapping[int, str]],
    torch: int | None,
) -> _Fault:
    pip = installer(environment)
    names = _names(several)
    removal = _removal(several, torch, pip)
    kept = [majors[torch] for majors in shared.values() if torch is not None and torch in majors]
    again = [f"{name}=={environment.distributions[name]}" for name in kept]
    # The removal takes the shared file along, so what stays must be written anew.
    action = f"{removal} && {pip.install(*again, replace=True, dependencies=False)}" if removal and again else removal
    return _Fault(
        reason="shared-library",
        sentence=f"Wheels of two CUDA majors are installed: {', '.join(names)}; those of "
        f"{' and '.join(sorted(shared))} own the same file, which is that of whichever came last.",
        action=action,
        names=names,
    )


# -- local tags -------------------------------------------------------------------------------------


def _tagged(facts: PackagesFacts, tags: Mapping[str, int], torch: int | None) -> Iterable[_Fault]:
    environment = facts.environment
    if environment.torch_without_cuda and tags:
        names = tuple(sorted(tags, key=_importance))
        yield _Fault(
            reason="plain-torch",
            sentence=f"torch {environment.torch_version or ''} is a build without CUDA beside "
            f"{_listed(environment, names)}.".replace("  ", " "),
            action=installer(environment).install(_argument(facts, "torch"), replace=True),
            names=names,
            note="a build with CUDA",
        )
    wrong = tuple(sorted((name for name, major in tags.items() if torch not in {None, major}), key=_importance))
    if wrong:
        tag = "cu" + "".join((environment.torch_cuda or "").split(".")[:2])
        arguments = [_argument(facts, name, tag) for name in wrong]
        yield _Fault(
            reason="local-tag",
            sentence=f"torch was built for CUDA {environment.torch_cuda}, other packages were not: "
            f"{_listed(environment, wrong)}.",
            action=installer(environment).install(*arguments, replace=True, dependencies=False),
            names=wrong,
            note=f"builds for {tag}, from the package index that has them",
        )


def _importance(name: str) -> tuple[int, str]:
    return (TRACKED_PINS.index(name) if name in TRACKED_PINS else len(TRACKED_PINS), name)


def _listed(environment: EnvironmentFacts, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {environment.distributions[name]}" for name in names)


def _argument(facts: PackagesFacts, name: str, tag: str | None = None) -> str:
    """What to install: as SGLang requires it, else the same version for another CUDA."""
    for one in facts.checked:
        if one.source == SGLANG and one.package == name and one.required.startswith("=="):
            return one.argument
    version = parsed(facts.environment.distributions.get(name))
    if version is None:
        return name
    return f"{name}=={version.public}" + (f"+{tag}" if tag else "")
