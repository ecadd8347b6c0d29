"""The sentences and commands that the flashinfer probe's verdicts carry, made from what the environment says."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sidecar.environment import UNKNOWN_VERSION, ImportEvidence, ImportOutcome
from sidecar.probes.flashinfer.facts import FlashinferFacts

FIRST_WITH_MAMBA = Version("0.6.1")
_LAST_CUBIN_ON_PYPI = Version("0.6.13")

AVAILABLE_VARIABLE = "SGLANG_IS_FLASHINFER_AVAILABLE"
BYPASS_VARIABLE = "FLASHINFER_DISABLE_VERSION_CHECK"

SGLANG_SAYS = (
    'SGLang reports this only as "FlashInfer mamba module not available, please check the FlashInfer installation."'
)
OR_TRITON = "or start the server with --mamba-backend triton"


def _with_note(command: str, note: str = "") -> str:
    """Give a command that can be pasted as it stands: what else there is to say follows as a shell comment."""
    return f"{command}  # {note}{OR_TRITON}"


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


def parsed(version: str | None) -> Version | None:
    """Give a version that can be compared; None for none or one that is not of that form."""
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def flashinfer_version(facts: FlashinferFacts) -> str | None:
    """FlashInfer's own version, or the one that it is registered with."""
    environment = facts.environment
    by_files = environment.flashinfer.version
    registered = environment.distributions.get("flashinfer-python")
    return registered if by_files in {None, UNKNOWN_VERSION} else by_files


def versions_line(facts: FlashinferFacts) -> tuple[str, ...]:
    """What is installed of FlashInfer and torch, as evidence; empty when nothing is."""
    files = facts.environment.flashinfer
    versions = {
        "flashinfer": flashinfer_version(facts),
        "flashinfer-cubin": files.cubin.version,
        "flashinfer-jit-cache": files.jit_cache.version,
        "torch": facts.environment.torch_version,
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    return (known,) if known else ()


def import_lines(evidence: ImportEvidence) -> tuple[str, ...]:
    """How an import went, as evidence."""
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


def quoted(evidence: ImportEvidence) -> str:
    """Quote the exception in one bounded line."""
    text = " ".join(evidence.message.split())
    return f"The import raises {evidence.exception}: {text[:400]}" + ("…" if len(text) > 400 else "")


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence; there must be one at least."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _pip(facts: FlashinferFacts) -> str:
    return f"{facts.environment.python or 'python'} -m pip"


def _requirement(facts: FlashinferFacts, distribution: str) -> str:
    """Give a requirement as a shell word: as SGLang pins it in that environment, else the bare name."""
    for line in facts.environment.requires:
        try:
            pinned = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(pinned.name) == distribution and pinned.specifier:
            extras = f"[{','.join(sorted(pinned.extras))}]" if pinned.extras else ""
            return f"'{distribution}{extras}{pinned.specifier}'"
    return "'flashinfer-python>=0.6.1'" if distribution == "flashinfer-python" else distribution


def install(facts: FlashinferFacts) -> str:
    """Install FlashInfer, in the version that SGLang pins there."""
    return _with_note(f"{_pip(facts)} install {_requirement(facts, 'flashinfer-python')}")


def reinstall(facts: FlashinferFacts) -> str:
    """Replace FlashInfer's files by those of the version that SGLang pins there, or else of the same version."""
    wanted = _requirement(facts, "flashinfer-python")
    version = parsed(flashinfer_version(facts))
    if wanted == "'flashinfer-python>=0.6.1'" and version is not None and version >= FIRST_WITH_MAMBA:
        wanted = f"'flashinfer-python=={version.public}'"
    return _with_note(f"{_pip(facts)} install --force-reinstall --no-deps {wanted}")


def install_modules(facts: FlashinferFacts, modules: Iterable[str]) -> str:
    """Install the distributions that modules come from."""
    names = dict.fromkeys(_requirement(facts, _DISTRIBUTION_OF.get(name, name)) for name in modules)
    return _with_note(f"{_pip(facts)} install {' '.join(names)}")


def torch_with_cuda(facts: FlashinferFacts) -> str:
    """Replace torch by a build with CUDA."""
    command = f"{_pip(facts)} install --force-reinstall {_requirement(facts, 'torch')}"
    return _with_note(command, "a build with CUDA; ")


def match_companion(facts: FlashinferFacts, distribution: str) -> str:
    """Bring the companion to FlashInfer's version where a registry has it, else remove it: it is optional."""
    uninstall = f"{_pip(facts)} uninstall -y {distribution}"
    version = parsed(facts.environment.flashinfer.version)
    if distribution == "flashinfer-cubin" and version is not None and version <= _LAST_CUBIN_ON_PYPI:
        matching = f"{_pip(facts)} install --no-deps 'flashinfer-cubin=={version.public}'"
        return _with_note(matching, f"or {uninstall}, it is optional; ")
    return _with_note(uninstall, "it is optional, and PyPI has no matching one; ")


def remove_leftover(facts: FlashinferFacts, distribution: str) -> str:
    """Remove what is left of a companion, whether pip still knows it or not."""
    place = f"the folder {distribution.replace('-', '_')} from site-packages"
    return _with_note(f"{_pip(facts)} uninstall -y {distribution}", f"and remove {place}; ")


def repair(facts: FlashinferFacts, reason: str) -> str:
    """Repair what an exception names; ``reason`` is one of those of flashinfer-import-failed."""
    if reason == "shared-library-missing":
        return f"make the library visible to the server: its package, LD_LIBRARY_PATH or driver mount, {OR_TRITON}"
    if reason == "abi-mismatch":
        wanted = f"{_requirement(facts, 'flashinfer-python')} {_requirement(facts, 'torch')}"
        return _with_note(f"{_pip(facts)} install --force-reinstall {wanted}")
    if reason in {"permission", "file-system"}:
        return "give the server's user the right to use the file or folder that the exception names"
    return reinstall(facts)
