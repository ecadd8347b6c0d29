"""Whether the GPUs are there and answer: lost, missing, hanging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from sidecar.gpuset import CountSource, Member
from sidecar.model import ConditionType, Finding, Gate, Placement, Severity, Status
from sidecar.probes.driver.declare import GPU_HUNG, LOST, NO_PERMISSION, SUCCESS, fine, gpu_condition, unknown
from sidecar.probes.driver.facts import DriverFacts
from sidecar.probes.driver.hits import Hit, conclude, hit, mute, name, silence
from sidecar.probes.driver.state import CAUSES, HUNG, NO_ACCESS

GPU_LOST: Final = gpu_condition(
    "gpu-lost",
    Severity.CRITICAL,
    Gate.SERVING,
    title="A GPU does not answer",
    when="A GPU answers NVML code 15, or cannot be addressed at all. One that this process may not open (code 4) is "
    "not lost.",
    remedy="Drain the node and power-cycle it; if the GPU is lost again, check power, cooling and seating, and "
    "replace it.",
    reasons={
        "lost": "NVML says that the GPU is lost: it has fallen off the bus (code 15)",
        "unreachable": "NVML cannot address the GPU, with the code in the message",
    },
    depends_on=CAUSES,
)
GPU_MISSING: Final = gpu_condition(
    "gpu-missing",
    Severity.CRITICAL,
    Gate.SERVING,
    title="A GPU is missing",
    when="NVML works and shows fewer GPUs than the server needs, or no longer shows one that it showed before, even "
    "if the number still fits. A container that sees fewer GPUs than the node has is normal.",
    remedy="Drain the node, look for the GPU with `lspci -d 10de:` and for its last words in the kernel log "
    "(`dmesg | grep -i nvrm`), and power-cycle the node; replace the GPU if it stays away.",
    reasons={
        "vanished": "a GPU that was visible earlier is no more, with its uuid in the message",
        "not-listed": "a GPU that is known to be the server's was never visible, although every GPU that the kernel "
        "module lists is, or it does not list as many either",
        "fewer-than-expected": "NVML shows, or the server was given, fewer GPUs than it needs",
    },
    depends_on=CAUSES,
)
CONDITIONS: Final[tuple[ConditionType, ...]] = (GPU_LOST, GPU_MISSING)


def judge(facts: DriverFacts, placement: Placement) -> Mapping[str, Finding]:
    """Judge a round in which NVML could be asked for its GPUs."""
    return {
        GPU_LOST.code: conclude(GPU_LOST, tuple(_silent(facts)), facts, missed=_unheard(facts)),
        GPU_MISSING.code: _missing(facts, placement),
    }


def _silent(facts: DriverFacts) -> Iterable[Hit]:
    for gpu in facts.reading.gpus:
        if gpu.code not in (SUCCESS, GPU_HUNG, NO_PERMISSION):
            yield hit(gpu, "lost" if gpu.code == LOST else "unreachable", silence(gpu), final=gpu.code == LOST)
    nameless = [gpu for gpu in facts.reading.gpus if gpu.uuid is None]
    lost = all(gpu.code == LOST for gpu in nameless)
    for member in facts.unanswering:
        yield _absent(
            member,
            "lost" if lost else "unreachable",
            f"belongs to the server and is among the {len(nameless)} GPUs that do not answer: no other has its uuid",
            final=lost,
        )


def _absent(member: Member, reason: str, text: str, *, final: bool = False) -> Hit:
    """Make a hit of a GPU of the server that NVML does not show."""
    return Hit(index=member.index, uuid=member.uuid, reason=reason, text=text, final=final, member=True)


def _unheard(facts: DriverFacts) -> Iterable[tuple[str, str]]:
    for gpu in facts.reading.gpus:
        if facts.in_scope(gpu.index, gpu.uuid) is False:
            continue
        if gpu.code == NO_PERMISSION:
            yield mute(gpu)
        elif gpu.code == GPU_HUNG:
            yield "gpu-silent", f"{name(gpu.index, gpu.uuid, gpu.pci_bus_id)} is left out: it did not answer in time."


def hanging(facts: DriverFacts) -> Finding:
    """Judge `driver-hung` in a round that ended: a call to one GPU may still not return."""
    known = {gpu.index: gpu for gpu in facts.reading.gpus}
    stuck = facts.reading.stuck_workers
    hits = []
    for index, call in sorted(facts.reading.left_out.items()):
        gpu = known.get(index)
        hits.append(
            Hit(
                index=index,
                uuid=gpu.uuid if gpu else None,
                pci=gpu.pci_bus_id if gpu else None,
                reason="gpu-hung",
                text=f"did not return from {call} in time; it is left out, and tried again every few rounds"
                + ("; the worker that waits for it cannot be killed" if stuck else ""),
            )
        )
    if hits:
        return conclude(HUNG, hits, facts)
    if not stuck:
        return fine(HUNG.code)
    return Finding(
        code=HUNG.code,
        status=Status.TRUE,
        reason="unkillable",
        message=f"The driver answers, but earlier workers wait inside it and cannot be killed: {stuck}.",
    )


def unseen(facts: DriverFacts, placement: Placement) -> Finding | None:
    """Judge `sidecar-gpu-access` where NVML works: the server has GPUs that this container may not use."""
    return _not_given(facts, placement) or _refused(facts, placement)


def _refused(facts: DriverFacts, placement: Placement) -> Finding | None:
    """Judge whether this container may not open GPUs of the server; while those are not known, any at all."""
    refused = [gpu for gpu in facts.reading.gpus if gpu.code == NO_PERMISSION]
    if facts.gpu_set.known:
        refused = [gpu for gpu in refused if facts.in_scope(gpu.index, gpu.uuid) is not False]
    elif len(refused) < len(facts.reading.gpus):
        return None
    if placement is not Placement.CONTAINER or not refused:
        return None
    which = ", ".join(name(gpu.index, gpu.uuid, gpu.pci_bus_id) for gpu in refused)
    return Finding(
        code=NO_ACCESS.code,
        status=Status.TRUE,
        reason="no-permission",
        message=f"This container may not open {which}: NVML answers 4, although it lists them.",
        evidence=(f"GPUs that NVML shows: {facts.reading.count}",),
    )


def _not_given(facts: DriverFacts, placement: Placement) -> Finding | None:
    """Judge whether the node has more GPUs than this container was given, and the server some of those."""
    listed, visible = facts.reading.module_gpus, facts.reading.count
    if placement is not Placement.CONTAINER or not facts.unseen or listed is None or visible is None:
        return None
    needed = facts.expected.count if facts.expected else len(facts.gpu_set.gpus)
    if listed <= visible or listed < max(needed, len(facts.gpu_set.gpus)):
        return None
    given = ", ".join(member.uuid or member.given for member in facts.unseen)
    return Finding(
        code=NO_ACCESS.code,
        status=Status.TRUE,
        reason="server-gpus-not-seen",
        message=f"This container was not given {len(facts.unseen)} of the server's {len(facts.gpu_set.gpus)} GPUs "
        f"({given}), although the kernel module lists {listed}.",
        evidence=(f"GPUs in /proc: {listed}", f"GPUs that NVML shows: {facts.reading.count}"),
    )


def _missing(facts: DriverFacts, placement: Placement) -> Finding:
    hits = [
        Hit(index=gone.index, uuid=gone.uuid, reason="vanished", text="was visible before and is no more")
        for gone in facts.vanished
    ]
    # Where /proc is masked nobody can say whether this container sees every GPU of the node.
    masked = placement is Placement.CONTAINER and facts.reading.module_gpus is None
    if not masked and _not_given(facts, placement) is None:
        hits += [
            _absent(member, "not-listed", f"belongs to the server (as {member.given}) and was never visible")
            for member in facts.unseen
        ]
    if hits:
        return conclude(GPU_MISSING, hits, facts)
    if facts.unseen:
        return unknown(GPU_MISSING.code, "no-gpu-access", "Some of the server's GPUs are not visible here.")
    return _too_few(facts, placement)


def _too_few(facts: DriverFacts, placement: Placement) -> Finding:
    expected, visible, known = facts.expected, facts.reading.count or 0, facts.gpu_set.known
    if expected is None:
        return fine(GPU_MISSING.code) if visible else unknown(GPU_MISSING.code, "no-gpu", "NVML shows no GPU.")
    there = len(facts.gpu_set.gpus) if known else visible
    if there >= expected.count or expected.source is CountSource.SEEN:
        return fine(GPU_MISSING.code)
    listed = facts.reading.module_gpus
    if not known and placement is Placement.CONTAINER and listed is not None and listed >= expected.count:
        return unknown(
            GPU_MISSING.code,
            "no-gpu-access",
            f"The server needs {expected.count} GPUs; {visible} are visible here, and the node has {listed}.",
        )
    number = f"{there} GPU{'s' * (there != 1)}"
    needs = f"needs {expected.count} ({_SAID_BY[expected.source]})."
    return Finding(
        code=GPU_MISSING.code,
        status=Status.TRUE,
        reason="fewer-than-expected",
        message=f"The server was given {number} and {needs}" if known else f"NVML shows {number}; the server {needs}",
        severity=None if known else Severity.WARNING,
        gate=None if known else Gate.NEVER,
    )


_SAID_BY: Final = {
    CountSource.SETTING: "by the setting gpus_expected",
    CountSource.SERVER_INFO: "by the server's own sizes",
    CountSource.COMMAND_LINE: "by its command line",
    CountSource.GPU_SET: "by the list of its GPUs",
    CountSource.SEEN: "by what was visible before",
}
