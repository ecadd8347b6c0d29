"""Which GPUs are the server's: every source as a table, and how many it needs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.config import Settings
from sidecar.gpuset import CountSource, Expected, GpuSource, Pins, expected_gpus, server_gpus
from sidecar.launch.args import INCOMPLETE
from sidecar.model import Placement
from sidecar.nvml.reading import MigDevice, NvmlReading
from sidecar.serverinfo import ServerInfo
from sidecar.target import PREFLIGHT
from tests.gpus import gpu, reading, standing, target

EIGHT = reading(*(gpu(index) for index in range(8)))
UUIDS = {gpu.index: gpu.uuid for gpu in EIGHT.gpus}
HERE: dict[str, Any] = {"root": None}
"""A server among the very devices that the agent sees."""


def found(
    environ: dict[str, str] | None,
    *,
    one: NvmlReading = EIGHT,
    placement: Placement = Placement.HOST,
    settings: Settings | None = None,
    info: ServerInfo | None = None,
    pins: Pins | None = None,
    **more: Any,
) -> tuple[str | None, list[str | None]]:
    """Give the source and the uuids; (None, []) while the set is not known."""
    result = server_gpus(settings or Settings(), target(environ, **more), one, standing(placement), info, pins=pins)
    assert result.why.endswith(".")
    assert result.known is (result.source is not None)
    return (result.source and result.source.value), [member.uuid for member in result.gpus]


def named(*indices: int) -> list[str | None]:
    return [UUIDS[index] for index in indices]


CUDA, NVIDIA = "cuda-visible-devices", "nvidia-visible-devices"
ENVIRONMENTS: list[tuple[str, dict[str, str], dict[str, Any], tuple[str | None, list[str | None]]]] = [
    ("uuids", {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-5"}, {}, (CUDA, named(2, 5))),
    ("index-here", {"CUDA_VISIBLE_DEVICES": "3, 1"}, HERE, (CUDA, named(3, 1))),
    ("index-elsewhere", {"CUDA_VISIBLE_DEVICES": "3"}, {}, (None, [])),
    ("stops-at-invalid", {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, HERE, (CUDA, named(0, 1))),
    ("none-wanted", {"CUDA_VISIBLE_DEVICES": ""}, HERE, (CUDA, [])),
    ("minus-one", {"CUDA_VISIBLE_DEVICES": "-1"}, {}, (CUDA, [])),
    ("index-too-high", {"CUDA_VISIBLE_DEVICES": "9"}, HERE, (CUDA, [None])),
    ("given", {"NVIDIA_VISIBLE_DEVICES": "GPU-6,GPU-4"}, {}, (NVIDIA, named(4, 6))),
    # The container counts its GPUs by PCI address: its GPU 1 is the node's GPU 6.
    ("index-of-given", {"NVIDIA_VISIBLE_DEVICES": "GPU-6,GPU-4", "CUDA_VISIBLE_DEVICES": "1"}, {}, (CUDA, named(6))),
    ("given-by-index-on-host", {"NVIDIA_VISIBLE_DEVICES": "1,2"}, {}, (NVIDIA, named(1, 2))),
    ("all-on-host", {"NVIDIA_VISIBLE_DEVICES": "all"}, {"launch": {"tp_size": 2}}, (NVIDIA, named(0, 1))),
    ("all-of-unknown-size", {"NVIDIA_VISIBLE_DEVICES": "all"}, {}, (None, [])),
    ("void", {"NVIDIA_VISIBLE_DEVICES": "void"}, {}, (None, [])),
    ("none", {"NVIDIA_VISIBLE_DEVICES": "none"}, {}, (None, [])),
    ("nothing", {}, {}, (None, [])),
    ("nothing-here", {}, HERE, (None, [])),
    ("never-seen", {"NVIDIA_VISIBLE_DEVICES": "GPU-77"}, {}, (NVIDIA, ["GPU-77"])),
    ("repeated", {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-2"}, {}, (CUDA, named(2))),
]


@pytest.mark.parametrize(
    ("environ", "more", "expected"), [row[1:] for row in ENVIRONMENTS], ids=[row[0] for row in ENVIRONMENTS]
)
def test_the_servers_environment(
    environ: dict[str, str], more: dict[str, Any], expected: tuple[str | None, list[str | None]]
) -> None:
    """Uuids count anywhere, an index only where the server's own view of the GPUs is known.

    Case 10: NVIDIA/k8s-device-plugin#605, NVIDIA/gpu-operator#421.
    """
    assert found(environ, **more) == expected


@pytest.mark.parametrize(("listed", "known"), [("all", True), ("1,2", True)])
def test_indices_of_the_node_need_all_of_it(listed: str, known: bool) -> None:
    """In a container the node's indices mean something only if it sees every GPU of the node."""
    environ = {"NVIDIA_VISIBLE_DEVICES": listed}
    sizes: dict[str, Any] = {"launch": {"tp_size": 2}}
    assert (found(environ, placement=Placement.CONTAINER, **sizes)[0] == NVIDIA) is known
    partly = replace(EIGHT, module_gpus=16)
    assert found(environ, one=partly, placement=Placement.CONTAINER, **sizes) == (None, [])


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize(
    "listed",
    [
        "/var/run/nvidia-container-devices",
        "nvidia.com/gpu=3",
        "nvidia.com/gpu=all",
        "0000:00:09.0",
        "00000000:09:00.0",
        "GPU-3,nvidia.com/gpu=4",
        "none,",
    ],
)
def test_what_is_neither_index_nor_uuid_names_no_gpu(listed: str, placement: Placement) -> None:
    """Mounted volumes, names of CDI and PCI addresses leave the set unknown, and the reason says so."""
    environ = {"NVIDIA_VISIBLE_DEVICES": listed}
    result = server_gpus(Settings(), target(environ), EIGHT, standing(placement), None)
    assert (result.known, result.gpus) == (False, ())
    assert "names something else than indices and uuids" in result.why
    assert found(environ | {"CUDA_VISIBLE_DEVICES": "0"}, placement=placement) == (None, [])
    assert found(environ | {"CUDA_VISIBLE_DEVICES": "GPU-2"}, placement=placement) == (CUDA, named(2))


@pytest.mark.parametrize("placement", [Placement.HOST, Placement.CONTAINER])
def test_every_gpu_is_not_the_servers_while_its_sizes_are_unknown(placement: Placement) -> None:
    """A container that was given all GPUs may use one of them: judged as a server in the agent's own view."""
    environ = {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert found(environ, placement=placement) == found({}, placement=placement, **HERE) == (None, [])
    info = ServerInfo(tp_size=2, device="cuda")
    assert found(environ, placement=placement, info=info) == (NVIDIA, named(0, 1))


def test_the_setting_wins() -> None:
    """GPUs that are configured outrank whatever the server's environment says; indices are those of NVML here."""
    settings = Settings(gpus=("7", "GPU-1"))
    assert found({"CUDA_VISIBLE_DEVICES": "0"}, settings=settings, **HERE) == ("setting", named(7, 1))
    assert found(None, settings=settings, environ_missing="permission-denied") == ("setting", named(7, 1))


def test_a_uuid_may_be_shortened() -> None:
    """CUDA accepts the beginning of a uuid; one that fits two GPUs tells nothing."""
    one = reading(gpu(0, uuid="GPU-aa11"), gpu(1, uuid="GPU-ab22"))
    assert found({"CUDA_VISIBLE_DEVICES": "GPU-ab"}, one=one) == (CUDA, ["GPU-ab22"])
    assert found({"CUDA_VISIBLE_DEVICES": "GPU-a"}, one=one) == (None, [])


def test_a_mig_device_stands_for_its_gpu() -> None:
    """A MIG device is judged by the health of its GPU, in both ways of naming it; one of nobody's is unknown.

    Case 7: NVIDIA/k8s-device-plugin#399.
    """
    one = reading(gpu(0), gpu(1, mig=True, mig_devices=(MigDevice(uuid="MIG-77"), MigDevice(uuid="MIG-78"))))
    assert found({"NVIDIA_VISIBLE_DEVICES": "MIG-78"}, one=one) == (NVIDIA, ["GPU-1"])
    assert found({"CUDA_VISIBLE_DEVICES": "MIG-GPU-1/2/0"}, one=one) == (CUDA, ["GPU-1"])
    assert found({"NVIDIA_VISIBLE_DEVICES": "1:0"}, one=one) == (NVIDIA, ["GPU-1"])
    assert found({"NVIDIA_VISIBLE_DEVICES": "MIG-99"}, one=one) == (None, [])
    result = server_gpus(Settings(), target({"NVIDIA_VISIBLE_DEVICES": "MIG-78"}), one, standing(), None)
    assert [member.mig for member in result.gpus] == [True]


def test_different_models_are_counted_by_speed() -> None:
    """With unlike GPUs CUDA's index is not NVML's, unless CUDA was told to go by PCI address."""
    one = reading(gpu(0, name="NVIDIA A100"), gpu(1))
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    assert found(environ, one=one, **HERE) == (None, [])
    assert found(environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, one=one, **HERE) == (CUDA, ["GPU-0"])


def test_an_index_keeps_its_gpu() -> None:
    """After a GPU vanished and the others moved up, an index still means the GPU that it meant first."""
    moved = reading(gpu(0), gpu(1, uuid="GPU-2"))
    pins = Pins(indices={0: "GPU-0", 1: "GPU-1", 2: "GPU-2"})
    assert found({"CUDA_VISIBLE_DEVICES": "1,2"}, one=moved, pins=pins, **HERE) == (CUDA, ["GPU-1", "GPU-2"])


def test_a_launch_to_come_takes_what_is_visible() -> None:
    """A launch to come takes as many of the visible GPUs as its sizes say; those that stay free are not its."""
    more: dict[str, Any] = {"launch_source": PREFLIGHT, "pid": None, "root": None}
    assert found({}, launch={}, **more) == ("preflight", named(0))
    assert found({}, launch={"tp_size": 2, "pp_size": 2}, **more) == ("preflight", named(0, 1, 2, 3))
    steps = {"tp_size": 2, "base_gpu_id": 3, "gpu_id_step": 2}
    assert found({}, launch=steps, **more) == ("preflight", named(3, 5))
    assert found({"CUDA_VISIBLE_DEVICES": "4,6"}, launch={}, **more) == (CUDA, named(4))
    assert found({"CUDA_VISIBLE_DEVICES": "4"}, **more) == (CUDA, named(4))
    # Its sizes are in a file that was not read, or one GPU is all there is.
    assert found({}, **more) == (None, [])
    assert found({}, one=reading(gpu(0)), **more) == ("preflight", ["GPU-0"])


@pytest.mark.parametrize("listed", ["$GPUS", "${GPUS:-0}", "$(GPUS)", "0,$SECOND", "`first-free`"])
def test_a_variable_that_is_not_resolved_names_no_gpu(listed: str) -> None:
    """What a shell or Kubernetes puts in later may be any GPU: the set is unknown, not empty."""
    more: dict[str, Any] = {"launch_source": PREFLIGHT, "pid": None, "root": None, "launch": {}}
    assert found({"CUDA_VISIBLE_DEVICES": listed}, **more) == (None, [])


MIXED = reading(gpu(0), gpu(1, name="NVIDIA RTX PRO 6000", compute_capability="12.0"))


@pytest.mark.parametrize("source", [PREFLIGHT, "process"])
def test_some_of_different_gpus_need_an_order(source: str) -> None:
    """CUDA counts the fastest GPU first: which of two models one rank takes is known only by PCI address."""
    more: dict[str, Any] = {"one": MIXED, "launch": {}, "launch_source": source, **HERE}
    assert found({}, **more) == (None, [])
    expected = "preflight" if source == PREFLIGHT else "server-sizes"
    assert found({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, **more) == (expected, ["GPU-0"])
    assert found({}, **more | {"launch": {"tp_size": 2}})[1] == ["GPU-0", "GPU-1"]


def test_a_server_takes_as_many_as_it_needs() -> None:
    """Among the GPUs that it sees a server takes its share, from its first one on and in its steps."""
    info = ServerInfo(tp_size=2, base_gpu_id=4, device="cuda")
    assert found({}, info=info, **HERE) == ("server-sizes", named(4, 5))
    assert found({}, info=replace(info, gpu_id_step=2), **HERE) == ("server-sizes", named(4, 6))
    assert found({"CUDA_VISIBLE_DEVICES": "7,6,5"}, launch={"tp_size": 2}, **HERE) == (CUDA, named(7, 6))
    assert found({}, info=replace(info, tp_size=16), **HERE) == ("server-sizes", named(*range(8)))


def test_an_environment_that_may_not_be_read_tells_nothing() -> None:
    """Without the server's environment, or the server, the set is unknown and says why."""
    result = server_gpus(Settings(), target(None, environ_missing="permission-denied"), EIGHT, standing(), None)
    assert (result.known, "permission-denied" in result.why) == (False, True)
    assert server_gpus(Settings(), None, EIGHT, standing(), None).known is False


def test_membership() -> None:
    """A GPU is held by its uuid, and by its index where one of the two has none; unknown while the set is."""
    result = server_gpus(Settings(gpus=("GPU-1",)), None, EIGHT, standing(), None)
    assert [result.holds(0, "GPU-0"), result.holds(1, "GPU-1"), result.holds(1, None)] == [False, True, True]
    assert result.holds(3, "GPU-1") is True
    assert server_gpus(Settings(), None, EIGHT, standing(), None).holds(0, "GPU-0") is None
    assert result.source is GpuSource.SETTING


# -- how many -----------------------------------------------------------------------------------------

SIZES: list[tuple[dict[str, Any], int | None]] = [
    ({"tp_size": 8}, 8),
    ({"tp_size": 8, "pp_size": 2, "nnodes": 2}, 8),
    ({"tp_size": 2, "dp_size": 4}, 8),
    ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
    ({"tp_size": 3, "nnodes": 2}, None),
    ({"tp_size": 8, "device": "cpu"}, None),
    ({"tp_size": 0}, None),
]


@pytest.mark.parametrize(("sizes", "count"), SIZES)
def test_the_number_follows_from_the_sizes(sizes: dict[str, Any], count: int | None) -> None:
    """The product tp * pp * dp / nnodes, where data-parallel replicas that share GPUs count once, and only on GPUs."""
    info = ServerInfo(**({"enable_dp_attention": False} | sizes))
    expected = None if count is None else Expected(count=count, source=CountSource.SERVER_INFO)
    assert expected_gpus(Settings(), None, info) == expected
    typed = expected_gpus(Settings(), target({}, launch=sizes), None)
    assert typed == (None if count is None else Expected(count=count, source=CountSource.COMMAND_LINE))


def test_what_is_not_known_is_not_guessed() -> None:
    """No sizes from a server that does not say whether replicas share, from partial flags, or from no flags at all."""
    assert expected_gpus(Settings(), None, ServerInfo(tp_size=2, dp_size=2)) is None
    assert expected_gpus(Settings(), None, ServerInfo(version="0.5.16")) is None
    assert expected_gpus(Settings(), target({}, launch={"tp_size": 2, INCOMPLETE: True}), None) is None
    assert expected_gpus(Settings(), target({}, launch={}, launch_source=None), None) is None
    assert expected_gpus(Settings(), None, None) is None


def test_a_bare_launch_needs_one() -> None:
    """Without any size SGLang takes one GPU; a configured number outranks everything."""
    assert expected_gpus(Settings(), target({}, launch={}), None) == Expected(count=1, source=CountSource.COMMAND_LINE)
    settings = Settings(gpus_expected=4)
    assert expected_gpus(settings, target({}, launch={}), ServerInfo(tp_size=8)) == Expected(
        count=4, source=CountSource.SETTING
    )
