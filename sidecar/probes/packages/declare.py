"""What the packages probe declares: its conditions and its metric family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sidecar.model import ConditionType, Family, Feature, Gate, Severity
from sidecar.modules import ENDS_EVERY_LAUNCH

_UNKNOWN: Final[Mapping[str, str]] = {
    "scope-self": "Unknown: only the sidecar's own packages can be seen.",
    "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
    "root-unreadable": "Unknown: the server's root may not be read from here.",
}
"""Reasons for which nothing is known of the server's packages."""


def _condition(
    code: str, title: str, when: str, remedy: str, reasons: Mapping[str, str], **other: Any
) -> ConditionType:
    return ConditionType(
        **{
            "code": code,
            "severity": Severity.WARNING,
            "gate": Gate.NEVER,
            "title": title,
            "when": when,
            "remedy": remedy,
            "reasons": {**reasons, **_UNKNOWN},
            "moot_under": ENDS_EVERY_LAUNCH,
            **other,
        }
    )


VIOLATED = _condition(
    "requirement-violated",
    "An installed version is not the one that SGLang requires",
    "A package that matters here does not meet SGLang's own Requires-Dist, as its metadata in that environment states "
    "it: markers for that interpreter, extras, PEP 440 with pre-releases and local tags. Critical where SGLang itself "
    "refuses to start: a kernel wheel, or with --attention-backend flashinfer a FlashInfer, below its minimum. Else a "
    "warning, which never gates, for the kernel wheel, FlashInfer, torch and nvidia-cutlass-dsl, and info for others; "
    "pins on packages that are not tracked are in the message and in the report only. SGLang itself compares two "
    "packages only, and only with a minimum.",
    "Install the versions that SGLang's metadata names; `pip install sglang==VERSION` brings all of them.",
    {
        "below-minimum": "It is older than the minimum that SGLang checks when it starts: a launch fails.",
        "renamed": "It is there under its distribution's other name only, which SGLang's check does not accept.",
        "not-installed": "It is not installed.",
        "unregistered": "Its module is there without metadata, which SGLang's check takes for not installed.",
        "outside-pin": "Its version is not the one that is required.",
        "parts-differ": "The packages that nvidia-cutlass-dsl consists of have different versions.",
        "outside-dependency-pin": "It meets SGLang's requirement, and not that of FlashInfer or flash-attn-4, "
        "whose metadata is stricter than what they need.",
        "sglang-without-metadata": "Unknown: SGLang can be imported and has no metadata (a copied folder), "
        "so nothing says what it requires.",
        "sglang-not-found": "Unknown: SGLang is not installed there.",
        "no-requirements": "Unknown: SGLang's metadata names no requirements.",
        "version-unknown": "Unknown: the version of a tracked package cannot be told.",
    },
    depends_on=("flashinfer-not-installed", "flashinfer-cubin-mismatch", "flashinfer-mamba-missing"),
    severity=Severity.CRITICAL,
    gate=Gate.LAUNCH,
)
FLAVOUR = _condition(
    "cuda-flavour-mismatch",
    "Packages were built for another CUDA major than torch",
    "A local version tag (+cu124) names another CUDA major than torch was built for, or NVIDIA's library wheels of two "
    "majors are installed. Another minor of the same major is fine. A version without a tag says nothing: wheels "
    "for CUDA 13 have been published without one in their metadata (sgl-project/sglang#14327).",
    "Install all of them for the CUDA major of torch, and remove the libraries of the other one.",
    {
        "shared-library": "Wheels of two majors own the same file; the one installed last has it, and removing the "
        "other removes it.",
        "local-tag": "A package's tag names another major than torch's.",
        "other-major": "A library of another major lies where torch looks for its own.",
        "plain-torch": "It is a build without CUDA beside packages that are tagged for one.",
        "two-majors": "Library wheels of two majors are installed, in folders of their own.",
        "torch-not-found": "Unknown: there is no torch to compare with.",
        "torch-cuda-unknown": "Unknown: torch does not say for which CUDA it was built.",
    },
    depends_on=("cuda-unavailable-to-torch",),
    uses=Feature.GPU,
)
DUPLICATE = _condition(
    "duplicate-distribution",
    "A package is registered twice, or only half there",
    "A tracked package is registered in several versions or under two names, several packages own the same files, "
    "files are of another version than the metadata beside them, or files that a package registers are gone or "
    "changed. Which files are imported is then a matter of luck, and removing one "
    "package removes files of the other. What FlashInfer's own files do to an import is judged by its own conditions.",
    "Uninstall all of them, then install the one that SGLang requires.",
    {
        "renamed-pair": "A distribution is installed under its former and its present name, which share their files.",
        "several-versions": "A distribution is registered in several versions.",
        "shared-files": "Several distributions own the same files.",
        "files-of-another-version": "The files state another version than the distribution's metadata.",
        "files-missing": "Files that the distribution registers are not there.",
        "files-changed": "Files have another size than the one that the distribution registers.",
        "leftover-folder": "A folder that no distribution owns, which Python accepts as an empty package.",
    },
    depends_on=(
        "flashinfer-not-installed",
        "flashinfer-mamba-missing",
        "flashinfer-import-failed",
        "flashinfer-symbol-missing",
    ),
)
BINDING = _condition(
    "nvml-binding-conflict",
    "The module pynvml is not nvidia-ml-py's",
    "More than one of nvidia-ml-py, nvidia-ml-py3 and pynvml before 12 is installed: each brings a module pynvml, "
    "one shadows the other, and removing one removes the other's files. From 12 on pynvml only refers to "
    "nvidia-ml-py and is harmless.",
    "Uninstall pynvml and nvidia-ml-py3, then `pip install --force-reinstall nvidia-ml-py`.",
    {
        "several-owners": "The named packages bring the same module.",
        "files-missing": "nvidia-ml-py is registered and its module is gone, as after another owner was removed.",
        "shadowed": "A folder pynvml, left by another package, hides nvidia-ml-py's file.",
    },
)
CONDITIONS: Final = (VIOLATED, FLAVOUR, DUPLICATE, BINDING)

SATISFIED = Family(
    name="requirement_satisfied",
    kind="gauge",
    help="1 when the installed version of a tracked package meets SGLang's own Requires-Dist, 0 when not; "
    "absent while unknown.",
    labels=("package",),
)
