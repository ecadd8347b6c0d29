"""From what is wrong with single GPUs to one finding: whose GPUs they are decides how much it weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec import Struct

from sidecar.model import ConditionType, Finding, Gate, Severity, Status
from sidecar.nvml.reading import GpuReading
from sidecar.probes.driver.declare import GPU_HUNG, LOST, NO_PERMISSION, SUCCESS, fine, unknown
from sidecar.probes.driver.facts import DriverFacts

ABSENT: Final = frozenset({2, 3, 13, 22, 25, 26, "not-in-binding"})
"""Codes of a call that mean that there is no such thing here: the GPU, or this release of the driver or of its
binding, does not have it. Any other code means that it is there and was not read."""


class Hit(Struct, frozen=True, kw_only=True):
    """Something that is wrong with one GPU.

    ``text`` completes the sentence that begins with the GPU's name. ``index`` is None where it is not known.
    ``severity`` lowers the declared one. ``action`` is what to do about this one, a clause in which ``{gpus}`` stands
    for what ``nvidia-smi -i`` takes. ``member`` marks what the server's list of GPUs names itself.
    """

    index: int | None
    uuid: str | None
    reason: str
    text: str
    pci: str | None = None
    severity: Severity | None = None
    final: bool = False
    action: str | None = None
    member: bool = False


class Unread(Struct, frozen=True):
    """A GPU did not tell what a condition depends on: the call and its code."""

    call: str
    code: int | str


Look = Callable[[GpuReading, DriverFacts], Hit | Unread | None]
"""Judges one GPU that answers: something is wrong, it cannot be told, or all is fine."""


def hit(gpu: GpuReading, reason: str, text: str, **more: Severity | bool | str | None) -> Hit:
    """Make a hit of a GPU that NVML shows."""
    return Hit(index=gpu.index, uuid=gpu.uuid, pci=gpu.pci_bus_id, reason=reason, text=text, **more)  # type: ignore[arg-type]  # the optional fields


def unread(gpu: GpuReading, *calls: str) -> Unread | None:
    """Say which of the calls failed for another reason than that there is nothing to read."""
    for call in calls:
        code = gpu.errors.get(call)
        if code is not None and code not in ABSENT:
            return Unread(call, code)
    return None


def name(index: int | None, uuid: str | None, pci: str | None = None) -> str:
    """Name a GPU so that it can be found from any container: "GPU 3 (GPU-5b7c1f0e, 00000000:06:00.0)"."""
    if index is None:
        return uuid or "A GPU"
    return f"GPU {index} ({', '.join(part for part in (uuid or 'uuid unknown', pci) if part)})"


def survey(kind: ConditionType, look: Look, facts: DriverFacts, *, remedy: str | None = None) -> Finding:
    """Judge a condition over every GPU that answers. ``remedy`` may hold ``{gpus}``, for ``nvidia-smi -i``."""
    hits: list[Hit] = []
    missed: list[tuple[str, str]] = []
    for gpu in facts.reading.gpus:
        mine = facts.in_scope(gpu.index, gpu.uuid)
        if gpu.code != SUCCESS:
            if mine is not False:
                missed.append(mute(gpu))
            continue
        seen = look(gpu, facts)
        if isinstance(seen, Hit):
            hits.append(seen)
        elif isinstance(seen, Unread) and mine is not False:
            where = name(gpu.index, gpu.uuid, gpu.pci_bus_id)
            missed.append(("not-read", f"{where} answered {seen.code} to {seen.call}."))
    return conclude(kind, hits, facts, missed=missed, remedy=remedy)


def conclude(
    kind: ConditionType,
    hits: Sequence[Hit],
    facts: DriverFacts,
    *,
    missed: Iterable[tuple[str, str]] = (),
    remedy: str | None = None,
) -> Finding:
    """Turn hits into one finding; without any, it is unknown if something was missed, else it does not hold.

    The GPUs that are the server's decide the reason, the severity and the remedy. While that is not known, and where
    none of them is the server's, it is at most a warning and gates nothing: one dead GPU must not take its
    neighbours' pods out.
    """
    if not hits:
        for reason, message in missed:
            return unknown(kind.code, reason, message)
        if facts.unseen:
            return unknown(kind.code, "no-gpu-access", "Some of the server's GPUs are not visible here.")
        if not facts.reading.gpus:
            return unknown(kind.code, "no-gpu", "NVML shows no GPU.")
        if len(facts.reading.gpus) < (facts.reading.count or 0):
            return unknown(kind.code, "gpu-silent", "A call to one GPU hung before every other one had been read.")
        return fine(kind.code)
    scopes = [True if one.member else facts.in_scope(one.index, one.uuid) for one in hits]
    mine, doubtful, foreign = (
        [one for one, scope in zip(hits, scopes, strict=True) if scope is wanted] for wanted in (True, None, False)
    )
    deciding = mine or doubtful or foreign
    order = list(kind.reasons)
    worst = min(deciding, key=lambda one: order.index(one.reason))
    severity = max((one.severity or kind.severity for one in deciding), key=lambda level: level.rank)
    message = _sentence(deciding)
    if not facts.gpu_set.known:
        message += " Which GPUs are the server's is not known."
    elif mine and doubtful:
        message += f" Not known whose: {_sentence(doubtful)}"
    elif doubtful:
        message += f" Whether the server uses {'these GPUs' if len(doubtful) > 1 else 'this GPU'} is not known."
    if foreign and deciding is not foreign:
        message += f" Not the server's: {_sentence(foreign)}"
    elif foreign:
        message += " The server uses none of these GPUs." if len(foreign) > 1 else " The server does not use this GPU."
    if not mine and severity.rank > Severity.WARNING.rank:
        severity = Severity.WARNING
    return Finding(
        code=kind.code,
        status=Status.TRUE,
        reason=worst.reason,
        message=message,
        remedy=_actions(deciding) if remedy is None else remedy.format(gpus=_selector(deciding)),
        gpus=tuple(dict.fromkeys(_labels(one) for one in (*mine, *doubtful, *foreign))),
        final=any(one.final for one in deciding),
        severity=severity,
        gate=None if mine else Gate.NEVER,
    )


_NAMED: Final = 2
"""GPUs with the same fault that a sentence names in full; of more it gives the indices, and the finding the rest."""


def _sentence(hits: Sequence[Hit]) -> str:
    """Say what is wrong with each; what is wrong with several in the same way is said once."""
    alike: dict[str, list[Hit]] = {}
    for one in hits:
        alike.setdefault(one.text, []).append(one)
    clauses: list[str] = []
    for text, group in alike.items():
        if len(group) > _NAMED and all(one.index is not None for one in group):
            clauses.append(f"Each of the GPUs {', '.join(str(one.index) for one in group)} {text}")
        else:
            clauses += [f"{name(one.index, one.uuid, one.pci)} {one.text}" for one in group]
    return "; ".join(clauses) + "."


def _labels(one: Hit) -> tuple[str, str]:
    return "" if one.index is None else str(one.index), one.uuid or ""


def _actions(hits: Sequence[Hit]) -> str | None:
    """Join what is to be done about each of them; every action names the GPUs that it is for. None without any."""
    clauses: list[str] = []
    for action in dict.fromkeys(one.action for one in hits if one.action is not None):
        clause = action.format(gpus=_selector([one for one in hits if one.action == action]))
        clauses.append(clause[:1].upper() + clause[1:])
    return "; ".join(clauses) + "." if clauses else None


def _selector(hits: Sequence[Hit]) -> str:
    """What ``nvidia-smi -i`` takes: a uuid means the same GPU in every container and on the host."""
    return ",".join(dict.fromkeys(one.uuid or str(one.index) for one in hits if one.uuid or one.index is not None))


def mute(gpu: GpuReading) -> tuple[str, str]:
    """Say why nothing is known of a GPU that does not answer: a token and a sentence."""
    where = name(gpu.index, gpu.uuid, gpu.pci_bus_id)
    if gpu.code == NO_PERMISSION:
        return "no-permission", f"{where} may not be opened by this process (NVML code 4)."
    return "gpu-silent", f"{where} does not answer."


def silence(gpu: GpuReading) -> str:
    """Say how a GPU fails to answer."""
    if gpu.code == LOST:
        return "is lost (NVML code 15)"
    if gpu.code == GPU_HUNG:
        return "does not return"
    return f"cannot be addressed (NVML code {gpu.code}{f': {gpu.words}' if gpu.words else ''})"
