"""Whether the FlashAttention version that somebody asks for is one that this SGLang knows."""

from __future__ import annotations

from typing import Final

from sidecar.backends import BackendSource
from sidecar.model import Finding, Gate, Phase, Severity, Status, World
from sidecar.probes.attention.conditions import OVERRIDE_INEFFECTIVE, VERSION_INVALID
from sidecar.probes.attention.facts import OVERRIDE_VARIABLE, AttentionFacts
from sidecar.probes.attention.relations import nobody
from sidecar.probes.attention.releases import FA4_DECODES_SINCE, FA4_SINCE

_ACCEPTED: Final = {"3", "4"}
"""What FlashAttentionBackend takes as ``fa_impl_ver``."""
_MEANT: Final = {2, 3, 4}
"""What people mean by a FlashAttention version, in the variable that nobody reads."""
_UNSET: Final = f"Take {OVERRIDE_VARIABLE} out of the server's environment (`unset {OVERRIDE_VARIABLE}`)"
_CHOOSE: Final = "choose the version with --attention-backend fa3 or fa4"


def sentence(value: str) -> str:
    """What SGLang prints for an ``fa_impl_ver`` that it does not know."""
    return f"Invalid version: self.fa_impl_ver={value}"


_WHERE: Final = {"server-info": "the server's information", "flags": "the flags or their configuration file"}


def invalid(facts: AttentionFacts, world: World) -> Finding:
    """Judge what was declared; the variable only where nothing worse is wrong."""
    code = VERSION_INVALID.code
    for where, value in facts.declared.items():
        if value not in _ACCEPTED:
            return Finding(
                code=code,
                status=Status.TRUE,
                reason="impl-version-refused",
                message=f"fa_impl_ver is {value} ({_WHERE[where]}): `{sentence(value)}`. FlashAttentionBackend takes "
                "3 and 4; it serves no version 2.",
                remedy=f"Remove fa_impl_ver and {_CHOOSE}.",
                evidence=(f"fa_impl_ver = {value}, from {_WHERE[where]}",),
                sglang_says=sentence(value),
                final=True,
            )
    found = facts.running_release
    if facts.declared and found is not None and found < FA4_SINCE:
        where, value = next(iter(facts.declared.items()))
        return Finding(
            code=code,
            status=Status.TRUE,
            reason="not-in-release",
            message=f"fa_impl_ver is {value} ({_WHERE[where]}), and this release of SGLang has no such choice.",
            remedy="Remove fa_impl_ver: this release runs FlashAttention 3 only.",
            final=True,
        )
    return _fa4_too_early(facts) or _variable(facts) or _fine(facts, world)


def _fa4_too_early(facts: AttentionFacts) -> Finding | None:
    """Refuse the backend fa4 where a release does not have it, or has it for prefill only."""
    found = facts.running_release
    asked = {
        phase: one
        for phase, one in facts.phases_of(4).items()
        if one.source is not BackendSource.PREDICTION and phase is not Phase.VISION
    }
    if not asked or found is None:
        return None
    shown = ".".join(map(str, found))
    if found < FA4_SINCE:
        return Finding(
            code=VERSION_INVALID.code,
            status=Status.TRUE,
            reason="not-in-release",
            message=f"The backend fa4 is asked for, which SGLang {shown} does not have.",
            remedy="Choose --attention-backend fa3, or upgrade SGLang to 0.5.3 or newer.",
            sglang_says="argument --attention-backend: invalid choice: 'fa4'",
        )
    if found < FA4_DECODES_SINCE and Phase.DECODE in asked and found != (0, 5, 7):
        says = "FA4 backend is only supported for prefill. Please use `--prefill-attention-backend fa4` instead."
        return Finding(
            code=VERSION_INVALID.code,
            status=Status.TRUE,
            reason="prefill-only",
            message=f"The backend fa4 is asked for decoding, which SGLang {shown} has for prefill only.",
            remedy="Use --prefill-attention-backend fa4 and another backend for decoding.",
            sglang_says=says,
        )
    return None


def _variable(facts: AttentionFacts) -> Finding | None:
    number = _number(facts.override)
    if facts.override is None or number == 0 or number in _MEANT:
        return None
    reason = "variable-not-a-number" if number is None else "variable-out-of-range"
    shown = facts.override if number is None else str(number)
    heeded = "" if number is None else f" A plugin that heeds it would stop SGLang with `{sentence(shown)}`."
    return Finding(
        code=VERSION_INVALID.code,
        status=Status.TRUE,
        reason=reason,
        message=f"{OVERRIDE_VARIABLE} is {shown}, which is no FlashAttention version (2, 3, 4). No release of SGLang "
        f"reads it.{heeded}",
        remedy=f"{_UNSET}, and {_CHOOSE}.",
        evidence=(f"{OVERRIDE_VARIABLE}={facts.override}",),
        severity=Severity.WARNING,
        gate=Gate.NEVER,
        final=True,
    )


def _fine(facts: AttentionFacts, world: World) -> Finding:
    code = VERSION_INVALID.code
    if not facts.info_seen and facts.launch is None and not nobody(world):
        # Nobody can pass this key to a server of SGLang's own, so that it is open must not change a verdict.
        return Finding(code=code, status=Status.UNKNOWN, reason="backends-unseen", severity=Severity.INFO)
    unseen = (
        "" if facts.environ_seen else " The server's variables cannot be seen; no release reads the one in question."
    )
    return Finding(code=code, status=Status.FALSE, message=f"No version is declared that SGLang would refuse.{unseen}")


def ineffective(facts: AttentionFacts, world: World) -> Finding:
    """Judge the variable that nobody reads."""
    code = OVERRIDE_INEFFECTIVE.code
    if not facts.environ_seen:
        if nobody(world) and facts.launch is None:
            return Finding(code=code, status=Status.FALSE, message="No server is running, and no launch is judged.")
        # It has no effect whether it is set or not: that it is open must not change a verdict.
        return Finding(code=code, status=Status.UNKNOWN, reason="environ-unseen", severity=Severity.INFO)
    if _number(facts.override) not in _MEANT:
        return Finding(code=code, status=Status.FALSE)
    known = {one.version for one in facts.phases.values()} - {None, 0}
    active = f" Active is {' and '.join(map(str, sorted(v for v in known if v)))}." if known else ""
    return Finding(
        code=code,
        status=Status.TRUE,
        reason="variable-not-read",
        message=f"{OVERRIDE_VARIABLE}={facts.override} has no effect: no release of SGLang reads it, the version "
        f"follows from the attention backend's name.{active}",
        remedy=f"{_UNSET}, and {_CHOOSE}.",
        final=True,
    )


def _number(value: str | None) -> int | None:
    """Read the variable as the recipe for it does: empty and 0 are unset, anything but a whole number is none."""
    if value is None or not value.strip():
        return 0
    try:
        return int(value)
    except ValueError:
        return None
