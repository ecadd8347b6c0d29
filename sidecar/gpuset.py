"""Which GPUs are the server's, and how many it needs. Pure.

Several sources tell, some of them in terms of another container's view: an index counts the GPUs that the server
sees, which need not be the ones that the agent sees. Such an index is used only where the two views are known to
be the same, or where the server's own list of GPUs spells its view out. What NVML says of processes is not used:
it answers with an empty list for those of other process namespaces, which proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.cudalibs import Capability, capability
from sidecar.launch.args import INCOMPLETE
from sidecar.model import Placement, Scope, Standing, Target
from sidecar.nvml.reading import NvmlReading
from sidecar.serverinfo import ServerInfo
from sidecar.target import PREFLIGHT, variables


class GpuSource(StrEnum):
    """What told which GPUs are the server's."""

    SETTING = "setting"
    CUDA_VISIBLE_DEVICES = "cuda-visible-devices"
    """The variable in the server's environment."""
    NVIDIA_VISIBLE_DEVICES = "nvidia-visible-devices"
    """The variable in the server's environment: what its container was given."""
    SIZES = "server-sizes"
    """The server sees the same GPUs as the agent, and takes as many as its sizes say, from its first one on."""
    PREFLIGHT = "preflight"
    """A launch that has not happened yet would happen here: it takes as many of the visible GPUs as its sizes say."""


class CountSource(StrEnum):
    """What told how many GPUs are expected."""

    SETTING = "setting"
    SERVER_INFO = "server-info"
    COMMAND_LINE = "command-line"
    GPU_SET = "gpu-set"
    """The number of GPUs that are known to be the server's."""
    SEEN = "seen"
    """The most that were visible at once since the agent started."""


class Member(Struct, frozen=True, kw_only=True):
    """One GPU of the server's set.

    ``given`` is how the source named it. ``index`` is NVML's, ``uuid`` that of the whole GPU; each is None where it
    could not be found out. ``mig`` is True where the source named a MIG device on it rather than the whole GPU.
    """

    given: str
    index: int | None = None
    uuid: str | None = None
    mig: bool = False


class GpuSet(Struct, frozen=True, kw_only=True):
    """The server's GPUs. ``why`` is one sentence; ``gpus`` is empty and ``source`` None while they are not known."""

    known: bool
    why: str
    source: GpuSource | None = None
    gpus: tuple[Member, ...] = ()

    def holds(self, index: int | None, uuid: str | None) -> bool | None:
        """Whether a GPU is the server's; None while the set is not known. None for what is not known of the GPU."""
        if not self.known:
            return None
        return any(_same(member, index, uuid) for member in self.gpus)


class Expected(Struct, frozen=True, kw_only=True):
    """How many GPUs the server needs on this node."""

    count: int
    source: CountSource


def _same(member: Member, index: int | None, uuid: str | None) -> bool:
    if member.uuid is not None and uuid is not None:
        return member.uuid == uuid
    return member.index is not None and member.index == index


# -- how many -----------------------------------------------------------------------------------------


def expected_gpus(settings: Settings, target: Target | None, info: ServerInfo | None) -> Expected | None:
    """The number that is configured, else tp * pp * dp / nnodes from the server's own answer or its flags.

    Data-parallel replicas have GPUs of their own unless they share them (``enable_dp_attention``). None where a
    size is not known, and for a server that runs on another device.
    """
    if settings.gpus_expected is not None:
        return Expected(count=settings.gpus_expected, source=CountSource.SETTING)
    return _sized(target, info)


def _sized(target: Target | None, info: ServerInfo | None) -> Expected | None:
    for sizes, source in ((_resolved(info), CountSource.SERVER_INFO), (_typed(target), CountSource.COMMAND_LINE)):
        if sizes is not None:
            count = _product(sizes)
            return None if count is None else Expected(count=count, source=source)
    return None


_SIZES: Final = ("tp_size", "pp_size", "dp_size", "nnodes")


def _resolved(info: ServerInfo | None) -> Mapping[str, Any] | None:
    if info is None or info.tp_size is None:
        return None
    # Releases that lack one of the other sizes have no such parallelism.
    sizes: dict[str, Any] = {name: getattr(info, name) for name in _SIZES}
    sizes = {name: 1 if value is None else value for name, value in sizes.items()}
    return sizes | {"shared": info.enable_dp_attention, "device": info.device}


def _typed(target: Target | None) -> Mapping[str, Any] | None:
    # With a configuration file or a wrapper in between, a flag that was not seen means nothing.
    if target is None or target.launch_source is None or INCOMPLETE in target.launch:
        return None
    sizes: dict[str, Any] = {name: target.launch.get(name, 1) for name in _SIZES}
    shared = target.launch.get("enable_dp_attention", False)
    return sizes | {"shared": shared, "device": target.launch.get("device")}


def _product(sizes: Mapping[str, Any]) -> int | None:
    device = sizes["device"]
    return None if isinstance(device, str) and not device.startswith("cuda") else _ranks(sizes)


def _ranks(sizes: Mapping[str, Any]) -> int | None:
    """How many ranks these sizes make on this node."""
    tp, pp, dp, nodes = (sizes[name] for name in _SIZES)
    if any(not isinstance(size, int) or size < 1 for size in (tp, pp, dp, nodes)):
        return None
    if dp > 1 and sizes["shared"] is None:
        return None
    total = int(tp * pp * (1 if sizes["shared"] else dp))
    return total // nodes if total % nodes == 0 else None


def expected_schedulers(target: Target | None, info: ServerInfo | None) -> int | None:
    """How many scheduler processes the server has on this node, on whatever device; None where a size is not known.

    As `expected_gpus`, but never from a setting: SGLang starts one process for each rank.
    """
    sizes = _resolved(info) or _typed(target)
    return None if sizes is None else _ranks(sizes)


# -- which --------------------------------------------------------------------------------------------


def server_gpus(
    settings: Settings,
    target: Target | None,
    reading: NvmlReading,
    standing: Standing,
    info: ServerInfo | None,
    *,
    pins: Pins | None = None,
) -> GpuSet:
    """Find the server's GPUs among those that NVML shows, and those of them that it does not show."""
    ours = _ours(reading, pins or Pins())
    if settings.gpus:
        members = _named(settings.gpus, ours, ours.gpus)
        return _known(GpuSource.SETTING, members, "The setting gpus names them.")
    if target is None:
        return GpuSet(known=False, why="The server could not be looked for in time.")
    environ = variables(target, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
    if environ is None:
        why = target.environ_missing or "not-found"
        return GpuSet(known=False, why=f"The server's environment cannot be read ({why}), and no setting names them.")
    view, view_why = _view(target, environ, ours, reading, standing)
    if (listed := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        if target.launch_source == PREFLIGHT and _UNRESOLVED.search(listed):
            return GpuSet(known=False, why="CUDA_VISIBLE_DEVICES of the launch comes from what is known only later.")
        ordered = _is_ordered(reading, environ)
        members = _named(_until_invalid(listed), ours, view if ordered else None)
        if members is not None:
            members = _taken(members, target, info)
        elif view_why or not ordered:
            view_why = view_why if ordered else "its GPUs differ in model, so that CUDA's order is not NVML's"
        else:
            view_why = "it names a GPU or MIG device that is not among them, or by more than one's name"
        why = f"CUDA_VISIBLE_DEVICES of the server cannot be matched to what NVML shows: {view_why}."
        return _known(GpuSource.CUDA_VISIBLE_DEVICES, members, "The server's CUDA_VISIBLE_DEVICES names them.", why)
    if view is None:
        return GpuSet(known=False, why=f"The server's environment does not name them: {view_why}.")
    here = _is_here(target)
    if len(view) > 1 and (here or _given(environ) == _ALL) and _sized(target, info) is None:
        return GpuSet(known=False, why="The server sees every GPU that is visible here, and may use only some.")
    members = _taken(view, target, info)
    if len(members) < len(view) and not _is_ordered(reading, environ):
        return GpuSet(known=False, why="It takes some of GPUs that differ in model: CUDA's order is not NVML's then.")
    if target.launch_source == PREFLIGHT:
        return _known(GpuSource.PREFLIGHT, members, "The launch would happen here, and takes what its sizes say.")
    if not here:
        return _known(GpuSource.NVIDIA_VISIBLE_DEVICES, members, "The server's NVIDIA_VISIBLE_DEVICES names them.")
    return _known(GpuSource.SIZES, members, "The server sees what is visible here, and takes what its sizes say.")


def _known(source: GpuSource, members: Sequence[Member] | None, why: str, otherwise: str = "") -> GpuSet:
    if members is None:
        return GpuSet(known=False, why=otherwise or "What names them fits more than one GPU.")
    unique = {(member.uuid, None if member.uuid else member.given): member for member in reversed(members)}
    return GpuSet(known=True, source=source, gpus=tuple(reversed(unique.values())), why=why)


class Pins(Struct, frozen=True, kw_only=True):
    """What was first seen in the life of the server.

    After a GPU vanished the others move up, and what named it would silently mean another one, or nothing.
    ``indices`` maps an index to the uuid of its GPU, ``mig`` the uuid of a MIG device to that of its GPU.
    """

    indices: Mapping[int, str] = field(default_factory=dict)
    mig: Mapping[str, str] = field(default_factory=dict)


class _Ours(Struct, frozen=True, kw_only=True):
    """The GPUs that are or were visible here, in NVML's order, and to which of them each MIG device belongs."""

    gpus: tuple[Member, ...]
    mig: Mapping[str, str]


def _ours(reading: NvmlReading, pins: Pins) -> _Ours:
    uuids = {gpu.index: gpu.uuid for gpu in reading.gpus} | dict(pins.indices)
    shown = {gpu.uuid: gpu.index for gpu in reading.gpus if gpu.uuid is not None}
    gpus = tuple(
        Member(given=str(index), index=shown.get(uuid, index) if uuid else index, uuid=uuid)
        for index, uuid in sorted(uuids.items())
    )
    return _Ours(gpus=gpus, mig=dict(pins.mig) | mig_parents(reading))


def mig_parents(reading: NvmlReading) -> dict[str, str]:
    """The uuid of each MIG device with that of its GPU."""
    return {device.uuid: gpu.uuid for gpu in reading.gpus if gpu.uuid is not None for device in gpu.mig_devices or ()}


def _is_here(target: Target) -> bool:
    """Whether the server runs among the very device nodes that the agent sees."""
    return target.launch_source == PREFLIGHT or (
        target.scope is Scope.SERVER and target.root is None and target.pid is not None
    )


def _is_ordered(reading: NvmlReading, environ: Mapping[str, str]) -> bool:
    """Whether CUDA counts GPUs as NVML does: it puts the fastest first unless told to go by PCI address."""
    models = {gpu.name for gpu in reading.gpus if gpu.name is not None}
    return len(models) <= 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


_ALL: Final = "all"


def _given(environ: Mapping[str, str]) -> str:
    """What the container was given, as the variable says; empty where it is not set."""
    return environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()


def _view(
    target: Target,
    environ: Mapping[str, str],
    ours: _Ours,
    reading: NvmlReading,
    standing: Standing,
) -> tuple[tuple[Member, ...] | None, str]:
    """(the GPUs that the server's container was given, in the order in which it counts them; else why not)."""
    if _is_here(target):
        return ours.gpus, ""
    listed = _given(environ)
    everything = standing.placement is Placement.HOST or (
        reading.count is not None and reading.count == reading.module_gpus
    )
    if listed in ("", "void", "none"):
        return None, f"its NVIDIA_VISIBLE_DEVICES is {listed or 'not set'}"
    if listed == _ALL:
        return (
            (ours.gpus, "")
            if everything
            else (None, "it was given all GPUs of the node, of which not all are seen here")
        )
    entries = [entry.strip() for entry in listed.split(",")]
    if not all(_NAME.fullmatch(entry) for entry in entries):
        # A device plugin that mounts volumes, names of CDI, PCI addresses: what they stand for is not told here.
        return None, "its NVIDIA_VISIBLE_DEVICES names something else than indices and uuids of GPUs"
    members = _named(entries, ours, ours.gpus if everything else None)
    if members is None:
        return None, "its NVIDIA_VISIBLE_DEVICES counts GPUs of the node, of which not all are seen here"
    # The container counts by PCI address, as NVML does, whatever the order of the list.
    return tuple(sorted(members, key=lambda member: 10**6 if member.index is None else member.index)), ""


_UNRESOLVED: Final = re.compile(r"[$`]")
"""What a shell, or Kubernetes, would have put something else for."""


def _until_invalid(listed: str) -> list[str]:
    """The entries that CUDA heeds: it stops at the first one that names nothing."""
    entries: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not re.fullmatch(r"\d{1,4}|(?:GPU|MIG)-.+", entry):
            break
        entries.append(entry)
    return entries


_NAME: Final = re.compile(r"\d{1,4}(?::\d{1,3})?|(?:GPU|MIG)-.+")
"""An index, also one of a MIG device on a GPU (``1:0``), or a uuid. Nothing else names a GPU for certain."""


def _named(entries: Sequence[str], ours: _Ours, view: tuple[Member, ...] | None) -> tuple[Member, ...] | None:
    """The GPUs that a list names; None where one entry cannot be told for certain.

    Indices count ``view``; None means that they say nothing here. What is named and not there is kept, so that its
    absence can be noticed.
    """
    found: list[Member] = []
    for entry in (part.strip() for part in entries):
        if not _NAME.fullmatch(entry):
            return None
        position, _, instance = entry.partition(":")
        member = _by_position(position, view, ours) if position.isdigit() else _by_uuid(entry, ours)
        if member is None:
            return None
        found.append(replace(member, given=entry, mig=member.mig or bool(instance)))
    return tuple(found)


def _by_position(position: str, view: tuple[Member, ...] | None, ours: _Ours) -> Member | None:
    if view is None:
        return None
    at = int(position)
    return view[at] if at < len(view) else Member(given=position, index=at if view is ours.gpus else None)


def _by_uuid(entry: str, ours: _Ours) -> Member | None:
    """The GPU with that uuid, or with the only one that starts so, which CUDA accepts too. None if it is ambiguous.

    A MIG device that no visible GPU has is None too: nobody can tell whose it would be.
    """
    mig = entry.startswith("MIG-")
    uuid = entry
    if entry.startswith("MIG-GPU-"):  # as drivers before R470 name a MIG device: with its GPU, and two numbers
        uuid = entry.removeprefix("MIG-").partition("/")[0]
    elif mig:
        parents = {parent for device, parent in ours.mig.items() if device.startswith(entry)}
        if len(parents) != 1:
            return None
        uuid = parents.pop()
    matches = [member for member in ours.gpus if member.uuid is not None and member.uuid.startswith(uuid)]
    matches = [member for member in matches if member.uuid == uuid] or matches
    if len(matches) > 1:
        return None
    return replace(matches[0], mig=mig) if matches else Member(given=entry, uuid=uuid, mig=mig)


def _taken(members: tuple[Member, ...], target: Target, info: ServerInfo | None) -> tuple[Member, ...]:
    """The ones that the server takes of those it sees: from its first on, in steps, as many as its sizes say."""
    needed = _sized(target, info)
    if needed is None:
        return members
    first = info.base_gpu_id if info is not None else target.launch.get("base_gpu_id")
    step = info.gpu_id_step if info is not None else target.launch.get("gpu_id_step")
    chosen = members[first or 0 :: step or 1][: needed.count]
    # Fewer than needed: its launch fails, or this picture of its view is wrong. Judge all that it was given.
    return chosen if len(chosen) == needed.count else members


# -- what they are ------------------------------------------------------------------------------------

Gpu = tuple[str, str]
"""Index and uuid as the per-GPU series name them."""


def capabilities(reading: NvmlReading | None, gpus: GpuSet | None) -> dict[Gpu, Capability]:
    """Compute capabilities of the server's GPUs where these are known, else of all that are visible."""
    found: dict[Gpu, Capability] = {}
    for gpu in reading.gpus if reading is not None else ():
        known = capability(gpu.compute_capability)
        mine = gpus is None or gpus.holds(gpu.index, gpu.uuid) is not False
        if known is not None and mine:
            found[str(gpu.index), gpu.uuid or ""] = known
    return found
