"""What all declarations of this probe have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sidecar.model import ConditionType, Feature, Finding, Gate, Severity, Status

NAME: Final = "driver"
DEADLINE: Final = 5.0
"""Seconds that NVML has for one round."""
SUCCESS: Final = 0
LOST: Final = 15
"""NVML's code for a GPU that has fallen off the bus."""
NO_PERMISSION: Final = 4
"""NVML's code for a device that this process may not open; NVML lists such devices too."""
GPU_HUNG: Final = "hung"
"""The code of a GPU that is left out because a call to it did not return."""

SHARED_REASONS: Final[Mapping[str, str]] = {
    "driver-hung": "the driver does not answer, and what was known before is too old",
    "not-reached": "NVML failed at something that comes before",
    "no-gpu-access": "this container has no access to the GPUs, so nothing can be said of the server's",
}
"""Tokens of an unknown condition, the same for all codes of this probe, beside those of all probes."""
GPU_REASONS: Final[Mapping[str, str]] = {
    "no-gpu": "NVML shows no GPU that could be judged",
    "no-permission": "this process may not open a GPU that NVML lists (code 4), so nothing can be said of it",
    "gpu-silent": "a GPU does not answer, so nothing can be said of it",
    "not-read": "a GPU did not tell what this depends on, for another reason than not having it",
}
"""More tokens of an unknown condition about single GPUs."""
GPU_RULE: Final = (
    " While it is not known which GPUs are the server's, and for a GPU that is known not to be, this is at most a "
    "warning and gates nothing."
)
"""Part of the explanation of every condition about single GPUs."""


def condition(code: str, severity: Severity, gate: Gate, *, reasons: Mapping[str, str], **more: Any) -> ConditionType:
    """Declare a condition about the driver as a whole."""
    return ConditionType(
        code=code, severity=severity, gate=gate, reasons={**reasons, **SHARED_REASONS}, uses=Feature.GPU, **more
    )


def gpu_condition(
    code: str, severity: Severity, gate: Gate, *, when: str, reasons: Mapping[str, str], **more: Any
) -> ConditionType:
    """Declare a condition about single GPUs."""
    return condition(code, severity, gate, when=when + GPU_RULE, reasons={**reasons, **GPU_REASONS}, **more)


def fine(code: str) -> Finding:
    """Judged, and it does not hold."""
    return Finding(code=code, status=Status.FALSE)


def unknown(code: str, reason: str, message: str) -> Finding:
    """Could not be judged."""
    return Finding(code=code, status=Status.UNKNOWN, reason=reason, message=message)
