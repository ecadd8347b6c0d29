"""What the running server adds: whether there is one, what its schedulers prove, and what contradicts itself."""

from __future__ import annotations

from typing import Final

from sidecar.backends import BackendSource
from sidecar.model import Answer, Finding, Phase, Severity, Status, World
from sidecar.probes.attention.conditions import DISAGREEMENT
from sidecar.probes.attention.facts import AttentionFacts

_ALIASES: Final = {"nsa": "dsa", "compressed": "dsv4", "tokenspeed_mla": "trtllm_mla", "trtllm_mla": "trtllm_mla"}
"""Names that one and the same backend has in flags and in what the server tells."""
_FALLBACKS: Final = {("fa3", "triton"), ("intel_amx", "torch_native"), ("intel_xpu", "triton")}
"""What SGLang makes of an explicit choice by itself: fa3 with an fp8_e5m2 cache, and processors without the units."""

_OVERRIDING: Final = frozenset({"triton", "flashinfer", "dsv4", "llada2_cfg_flashinfer", "mamba2"})
"""What SGLang puts in the place of an explicit choice for some models, which are not seen here: HRM-Text takes triton,
diffusion language models flashinfer, DeepSeek-V4 dsv4 (``arg_groups/overrides.py`` of 0.5.16), and pure state-space
models are stamped mamba2 (0.5.23). Other rules for models heed an explicit choice."""


def nobody(world: World) -> bool:
    """Whether it is certain that no server is running."""
    server = world.server
    return server.answer is None or (server.answer is Answer.REFUSED and server.refusal_is_proof)


def answers(facts: AttentionFacts, world: World) -> bool:
    """Whether the server that the backends are those of answers, and so has passed its launch."""
    return world.server.answer is Answer.ACCEPTED and facts.info_seen and not facts.preflight


def proven(facts: AttentionFacts, world: World, version: int) -> str | None:
    """What proves that a running server could import a version, as one sentence; None for nothing."""
    if facts.preflight:
        return None
    if version == 4:
        return "An attention call of the running server has used it." if facts.ran and facts.phases_of(4) else None
    resolved = any(one.source is BackendSource.SERVER_INFO for one in facts.phases_of(3).values())
    if facts.loaded(3) is True and facts.phases_of(3):
        return "A scheduler of the running server has it loaded."
    return "The running server loaded it before it answered." if resolved and answers(facts, world) else None


def disagreement(facts: AttentionFacts, world: World) -> Finding:
    """Find two sources of which only one can be right."""
    code = DISAGREEMENT.code
    if facts.preflight or (nobody(world) and not facts.info_seen):
        return Finding(code=code, status=Status.FALSE, message="There is no running server to compare.")
    unfollowed = _not_followed(facts)
    if unfollowed is not None:
        return unfollowed
    resolved = [phase for phase in (Phase.PREFILL, Phase.DECODE) if (facts.phases[phase].resolved or "") == "fa3"]
    if resolved and answers(facts, world) and facts.loaded(3) is False:
        return Finding(
            code=code,
            status=Status.TRUE,
            reason="fa3-not-loaded",
            message=f"The server says fa3 for {' and '.join(resolved)}, and none of its schedulers has flash_ops "
            "loaded, which every release loads before it answers.",
            evidence=(f"maps of {len(facts.mapped or ())} schedulers read",),
        )
    compared = facts.info_seen and (facts.launch is not None or facts.loaded(3) is not None)
    if compared:
        return Finding(code=code, status=Status.FALSE)
    # With one source there is nothing to contradict: no fault that anybody could miss.
    return Finding(code=code, status=Status.UNKNOWN, reason="one-source", severity=Severity.INFO)


def _not_followed(facts: AttentionFacts) -> Finding | None:
    for phase in (Phase.PREFILL, Phase.DECODE):
        one = facts.phases[phase]
        if one.declared is None or one.resolved is None:
            continue
        asked, got = (_ALIASES.get(name, name) for name in (one.declared, one.resolved))
        if asked == got or (asked, got) in _FALLBACKS or one.resolved in _OVERRIDING:
            continue
        return Finding(
            code=DISAGREEMENT.code,
            status=Status.TRUE,
            reason="flag-not-followed",
            message=f"The server's flags ask for {one.declared} in {phase}, and it says that it runs {one.resolved}.",
            evidence=(f"flags: {one.declared}", f"server information: {one.resolved}"),
        )
    return None
