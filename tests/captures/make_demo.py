"""Writes sidecar/demo/recordings/healthy.json, which every scenario of the demo rests on.

    python tests/captures/make_demo.py PYTHON

PYTHON is the interpreter of an environment in which the release `RELEASE` of SGLang is installed as a whole.

Real: the environment, as the static reader reads it there; the answers of two H200, by the fake library that repeats
tests/captures/nvml/h200x2.json; the server's information and processes of tests/captures/sglang/`SERVER`. Set by hand,
all in this file: where things lie, the GPUs' names, that the server runs on two GPUs instead of one, the driver's
library and the compiler beside the environment, and that the imports succeed. Times are seconds before the demo starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from sidecar.app import SystemClock  # noqa: E402 - the checkout, wherever this is started
from sidecar.config import Settings  # noqa: E402 - as above
from sidecar.demo import MODULES, Moment  # noqa: E402 - as above
from sidecar.environment import DriverLibrary, EnvironmentFacts, LibraryFile, Toolchain  # noqa: E402 - as above
from sidecar.imports import ImportEvidence, ImportOutcome, LibraryLoad  # noqa: E402 - as above
from sidecar.isolation import Isolation  # noqa: E402 - as above
from sidecar.launch.args import parse_launch  # noqa: E402 - as above
from sidecar.model import Answer, Placement, Processes, Scope, Standing, Target  # noqa: E402 - as above
from sidecar.nvml.client import NvmlClient  # noqa: E402 - as above
from sidecar.nvml.reading import NvmlReading  # noqa: E402 - as above
from sidecar.processes import ProcessReader, Role, ServerProcesses  # noqa: E402 - as above
from sidecar.serverinfo import ServerInfo, ServerObservation, parse_info  # noqa: E402 - as above
from tests.fakes.nvml import Scenario, build  # noqa: E402 - as above
from tests.fakes.proc import ProcTree  # noqa: E402 - as above
from tests.fakes.sglang import CAPTURES  # noqa: E402 - as above
from tests.fakes.sources import Sources  # noqa: E402 - as above

RELEASE = "0.5.16"
SERVER = "0.5.16-h200-fa3"
RECORDINGS = ROOT / "sidecar" / "demo" / "recordings"
PREFIX = "/opt/sglang"
"""Where the environment lies in the demo."""
SITE = f"{PREFIX}/lib/python3.12/site-packages"
PID = 852
BUILT = -3 * 86400.0
"""When the image was made, and when its server was started: seconds before the demo starts."""
STARTED = -6 * 3600.0
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\n"
UUIDS = ("GPU-5b1e3c0a-7a0f-4c1e-9d52-0c4f6b8e2a10", "GPU-c27d9f64-1e3b-4a58-8f06-7f1b2d93e5c1")
"""Made up: what is recorded has none."""
LAUNCH = (
    f"{PREFIX}/bin/python -m sglang.launch_server --model-path /models/demo --tp 2 --attention-backend fa3"
    " --mamba-backend flashinfer --port 30000"
)


def target(python: str) -> Target:
    """A server that runs as `LAUNCH` says, seen from a container that shares its image and its processes."""
    launch = parse_launch(LAUNCH.split())
    return Target(
        url="http://127.0.0.1:30000",
        url_source="command-line",
        scope=Scope.SERVER,
        python=python,
        python_source="command-line",
        cwd="/",
        cwd_on_path=False,
        pid=PID,
        uid=0,
        create_time=STARTED,
        launch=launch.flags,
        launch_source="process",
        notes=launch.notes,
        environ={"NVIDIA_VISIBLE_DEVICES": ",".join(UUIDS), "CUDA_HOME": "/usr/local/cuda", "HOME": "/root"},
    )


async def environment(python: str, isolation: Isolation) -> EnvironmentFacts:
    """What the static reader reads of an environment, as if it lay in `PREFIX`."""
    sources = Sources(isolation, SystemClock(), Settings(deadlines={"packages": 120.0, "flashinfer": 120.0}))
    read = await sources.environment.read(replace(target(python), pid=None))
    await sources.close()
    assert read.problem is None, read.problem
    assert read.distributions.get("sglang") == RELEASE, f"{python} has SGLang {read.distributions.get('sglang')}"
    place = str(Path(python).parent.parent)
    moved = msgspec.convert(
        json.loads(msgspec.json.encode(read).decode().replace(place, PREFIX)), EnvironmentFacts, strict=True
    )
    return replace(
        moved,
        python_version="3.12.13",
        changed_at=dict.fromkeys(moved.changed_at, BUILT),
        # The paths of this machine's own toolchain, driver and caches are none of the demo's.
        libcuda=DriverLibrary(
            found=(
                LibraryFile(path="/usr/lib/x86_64-linux-gnu/libcuda.so.1", version="580.159.04", where="ld.so.cache"),
            ),
            path_seen=True,
        ),
        toolchain=Toolchain(
            cuda_home="/usr/local/cuda",
            cuda_home_ok=True,
            nvcc="/usr/local/cuda/bin/nvcc",
            nvcc_source="cuda-home",
            release="13.0",
            headers=True,
            headers_release="13.0",
            ninja=True,
            ninja_beside=True,
            environ_seen=True,
        ),
        cache=replace(moved.cache, path="/root/.cache/flashinfer", writable=True, problem=None),
        cubins=3,
    )


async def gpus(folder: Path, isolation: Isolation) -> NvmlReading:
    """One round of the NVML worker on the fake library."""
    library = build(folder / "library")
    driver = folder / "proc" / "driver" / "nvidia"
    for bus in ("0000:00:06.0", "0000:00:07.0"):
        (driver / "gpus" / bus).mkdir(parents=True)
    (driver / "version").write_text(MODULE)
    (folder / "dev").mkdir()
    (folder / "dev" / "nvidiactl").write_text("")
    client = NvmlClient(
        isolation,
        environ={"PATH": os.defpath} | Scenario(folder / "scenario", gpus=2, profile="h200").environ(library),
        proc=folder / "proc",
        dev=folder / "dev",
    )
    reading = await client.round(30.0)
    await client.close()
    assert reading.count == 2, reading
    shown = {
        "library": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
        "library_version": "580.159.04",
        "visible_devices": "all",
        "driver_capabilities": "compute,utility",
    }
    named = tuple(
        replace(gpu, uuid=uuid, memory_used=132_070_244_352) for gpu, uuid in zip(reading.gpus, UUIDS, strict=True)
    )
    return replace(reading, **shown, gpus=named, device_present=True, device_refused=False)


async def processes(folder: Path) -> ServerProcesses:
    """The recorded processes, with a second scheduler for the second GPU."""
    tree = ProcTree(folder / "server")
    main = tree.recorded(CAPTURES / SERVER)
    reader = ProcessReader(SystemClock(), proc=tree.proc)
    read = await reader.read(replace(target("python"), pid=main, create_time=None))
    assert read is not None
    kept = [replace(one, started_at=STARTED, denied={}) for one in read.processes if one.role is not Role.OTHER]
    first = next(one for one in kept if one.role is Role.SCHEDULER)
    sizes = {Role.MAIN: 3_400_000_000, Role.SCHEDULER: 5_900_000_000, Role.DETOKENIZER: 2_700_000_000}
    return ServerProcesses(
        processes=tuple(replace(one, resident=sizes[one.role]) for one in (*kept, replace(first, pid=first.pid + 100))),
        replaced=(),
        # None: whoever replays this must not look for the folders on its own disk.
        site_folders=None,
    )


def info() -> ServerInfo:
    """The recorded information, of a server on two GPUs."""
    parsed = parse_info((CAPTURES / SERVER / "server_info.json").read_bytes())
    assert isinstance(parsed, ServerInfo)
    hand = {"tp_size": 2, "mamba_backend": "flashinfer", "is_vision": False}
    return replace(parsed, **hand, version=RELEASE, disable_cuda_graph=False, skip_server_warmup=False)


async def moment(python: str) -> Moment:
    """Everything that a healthy server shows."""
    isolation = Isolation()
    with tempfile.TemporaryDirectory() as folder:
        read = await environment(python, isolation)
        reading = await gpus(Path(folder), isolation)
        running = await processes(Path(folder))
    await isolation.close()
    imported = ImportEvidence(
        outcome=ImportOutcome.OK, at=-300.0, seconds=9.4, stage="done", step="symbol", devices_hidden=True
    )
    return Moment(
        standing=Standing(
            placement=Placement.CONTAINER,
            placement_why="KUBERNETES_SERVICE_HOST is set",
            processes=Processes.SHARED,
            processes_why="the server's processes are visible",
        ),
        target=target(f"{PREFIX}/bin/python"),
        nvml=reading,
        observation=ServerObservation(answer=Answer.ACCEPTED, status=200),
        info=info(),
        processes=running,
        environment=read,
        imports=dict.fromkeys(MODULES, imported)
        | {"sgl_kernel": replace(imported, loads=(LibraryLoad("sm90/common_ops.abi3.so"),))},
    )


def said(value: Any) -> Any:
    """JSON values without what is not known: its default says so."""
    if isinstance(value, dict):
        return {key: said(item) for key, item in value.items() if item is not None}
    return [said(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    """Write the recording."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    recorded = said(json.loads(msgspec.json.encode(asyncio.run(moment(sys.argv[1])))))
    for one in recorded["processes"]["processes"]:
        one["mapped"].sort()
    # Folders are listed, and sets are written, in any order.
    recorded["environment"] = json.loads(json.dumps(recorded["environment"], sort_keys=True))
    recording = {
        "title": "Two H200, everything well",
        "shows": "A server on two GPUs that is as its baseline wants it: ready, nothing to do.",
        "frames": [{"at": 0, "set": recorded}],
    }
    (RECORDINGS / "healthy.json").write_text(json.dumps(recording, indent=1) + "\n")


if __name__ == "__main__":
    main()
