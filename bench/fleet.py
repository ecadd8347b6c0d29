"""Simulates a fleet: a thousand sidecars scraped by one real Prometheus, and the queries that find version skew.

    python bench/fleet.py [--sidecars 1000] [--seconds 75] [--interval 15]

The expositions are real: one agent looks once at eight GPUs (the tests' fake of the NVML library) and at a fake
server, and each sidecar renders that snapshot with uuids, readings and, in a few pods, versions of its own. They are
served from one process under a path each, gzip as Prometheus asks for it. Needs Debian's package prometheus and a C
compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from sidecar.app import Agent
from sidecar.catalog import Catalog, build
from sidecar.config import Image, Settings
from sidecar.exposition import Exposition
from sidecar.model import Probe, Processes, Sample, Snapshot
from tests.fakes.nvml import Scenario
from tests.fakes.nvml import build as build_library
from tests.fakes.sglang import FakeSglang
from tests.fakes.sglang import serve as serve_sglang

VERSIONS = {
    "python": "3.12.11",
    "sglang": "0.5.16",
    "torch": "2.11.0",
    "torch_cuda": "13.0",
    "flashinfer-python": "0.6.14",
    "flashinfer-cubin": "0.6.14",
    "sglang-kernel": "0.4.5",
    "flash-attn-4": "4.0.0b4",
    "nvidia-cutlass-dsl": "4.4.2",
    "apache-tvm-ffi": "0.1.9",
    "triton": "3.6.0",
    "transformers": "5.3.0",
}
"""What every pod has, but for the odd ones."""
ODD = {7: {"flashinfer-cubin": "0.6.13"}, 500: {"flashinfer-cubin": "0.6.13"}, 731: {"driver": "575.57.08"}}
"""The pods that a roll-out left behind, by number."""

SKEW = "count by (item) (count by (item, value) (sglang_sidecar_environment_info)) > 1"
ODD_PODS = (
    "sglang_sidecar_environment_info * on (item, value) group_left () "
    "(count by (item, value) (sglang_sidecar_environment_info) < on (item) group_left () "
    "(count by (item) (sglang_sidecar_environment_info) / 2))"
)
"""The pods whose value of an item fewer than half of the fleet have, with the number that have it."""
QUERIES = {
    "which items differ": SKEW,
    "which pods are odd": ODD_PODS,
    "versions of one item": 'count by (value) (sglang_sidecar_environment_info{item="flashinfer-cubin"})',
    "pods that are not ready": "count(sglang_sidecar_ready == 0)",
    "active conditions by code": "sum by (code) (sglang_sidecar_condition_active)",
}


async def look_once(folder: Path) -> tuple[Snapshot, Catalog]:
    """Let a real agent look once at a fake driver with eight GPUs and a fake server."""
    environ = {"PATH": os.defpath} | Scenario(folder / "scenario", gpus=8).environ(build_library(folder / "nvml"))
    async with serve_sglang(FakeSglang()) as server:
        settings = Settings(server_url=server.url, processes=Processes.HIDDEN, image=Image.OWN)
        async with Agent.create(settings, once=True, environ=environ) as agent:
            return await agent.check(), agent.catalog


def of_pod(catalog: Catalog, pod: int) -> Catalog:
    """Make the catalogue of one pod: the same probes, telling of other GPUs, other readings and its versions."""
    versions = VERSIONS | ODD.get(pod, {})
    dice = random.Random(pod)

    def change(probe: Probe[Any]) -> Probe[Any]:
        places = {family.name: family.labels.index("uuid") for family in probe.families if "uuid" in family.labels}

        def samples(facts: Any) -> Iterable[Sample]:
            for sample in probe.samples(facts):
                if sample.family not in places:
                    yield sample
                    continue
                labels = list(sample.labels)
                labels[places[sample.family]] = f"{labels[places[sample.family]][:-6]}{pod:06d}"
                value = sample.value * dice.uniform(0.8, 1.0) if sample.value > 1 else sample.value
                yield Sample(sample.family, tuple(labels), value)

        def identity(facts: Any) -> Mapping[str, str | None]:
            known = dict(probe.identity(facts))
            known.update({item: value for item, value in versions.items() if item in known})
            return known | versions if probe.name == "driver" else known

        return replace(probe, samples=samples, identity=identity)

    return build(change(probe) for probe in catalog.probes)


def fleet(count: int, folder: str, started: Any) -> None:
    """Serve the fleet; sends the port, sizes and the time that rendering took."""

    async def main() -> None:
        snapshot, catalog = await look_once(Path(folder))
        begun = time.perf_counter()
        bodies: dict[str, bytes] = {}
        for pod in range(count):
            rendered = Exposition(of_pod(catalog, pod), process=list).render(
                snapshot, accept="text/plain;version=0.0.4", accept_encoding="gzip"
            )
            bodies[f"pod-{pod:04d}"] = rendered.body
        seconds = time.perf_counter() - begun
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8", "Content-Encoding": "gzip"}

        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=bodies[request.match_info["pod"]], headers=headers)

        application = web.Application()
        application.router.add_get("/{pod}/metrics", answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        plain = gzip.decompress(bodies["pod-0000"])
        series = sum(not line.startswith(b"#") for line in plain.splitlines())
        started.send((runner.addresses[0][1], series, len(plain), len(bodies["pod-0000"]), seconds / count))
        await asyncio.Event().wait()

    asyncio.run(main())


def configuration(count: int, port: int, interval: int) -> str:
    """Write Prometheus' configuration: a target per sidecar, its path from a label of its own."""
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"pod": f"pod-{pod:04d}", "instance": f"pod-{pod:04d}:9477"}}
        for pod in range(count)
    ]
    relabel = [{"source_labels": ["pod"], "target_label": "__metrics_path__", "replacement": "/$1/metrics"}]
    # JSON is YAML.
    return json.dumps(
        {
            "global": {"scrape_interval": f"{interval}s", "scrape_timeout": f"{min(interval, 10)}s"},
            "scrape_configs": [{"job_name": "sidecars", "static_configs": targets, "relabel_configs": relabel}],
        }
    )


def ask(port: int, query: str) -> tuple[list[Any], float]:
    """Ask Prometheus; gives the series and how long it took in seconds."""
    begun = time.perf_counter()
    address = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(address, timeout=60) as response:
        result: list[Any] = json.load(response)["data"]["result"]
    return result, time.perf_counter() - begun


def own_metric(port: int, name: str) -> float:
    """Read one value of Prometheus' own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    raise SystemExit(f"Prometheus has no {name}")


def free_port() -> int:
    """Find a port of loopback."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def row(name: str, value: str) -> None:
    """Print a line of the table."""
    print(f"{name:<54} {value}", flush=True)


def main() -> int:
    """Run the simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sidecars", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seconds", type=float, default=75, help="time to scrape before measuring (default: 75)")
    parser.add_argument("--interval", type=int, default=15, help="scrape interval in seconds (default: 15)")
    options = parser.parse_args()
    program = shutil.which("prometheus")
    if program is None:
        print("Prometheus is not installed: sudo apt-get install --no-install-recommends prometheus")
        return 1
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving = multiprocessing.Process(target=fleet, args=(options.sidecars, name, theirs), daemon=True)
        serving.start()
        port, series, plain, packed, seconds = ours.recv()
        row("sidecars, scrape interval", f"{options.sidecars}, {options.interval} s")
        row("series per sidecar, 8 GPUs", str(series))
        row("bytes per scrape, plain and gzip", f"{plain} and {packed}")
        row("rendering one exposition", f"{1000 * seconds:.1f} ms")
        (folder / "prometheus.yml").write_text(configuration(options.sidecars, port, options.interval))
        listen = free_port()
        with (folder / "prometheus.log").open("wb") as log:
            prometheus = subprocess.Popen(
                [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
                 f"--web.listen-address=127.0.0.1:{listen}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            _measure(listen, prometheus.pid, options)
        except (OSError, SystemExit):
            print((folder / "prometheus.log").read_text()[-2000:])
            raise
        finally:
            prometheus.terminate()
            prometheus.wait(60)
            serving.terminate()
            serving.join(10)
    return 0


def _measure(port: int, pid: int, options: argparse.Namespace) -> None:
    process = psutil.Process(pid)
    end = time.monotonic() + 60
    while True:  # it has no event to wait for
        with contextlib.suppress(OSError):
            if ask(port, "count(up == 1)")[0]:
                break
        if time.monotonic() > end:
            raise SystemExit("Prometheus scraped nothing within a minute")
        time.sleep(0.5)
    time.sleep(options.interval)
    before, begun = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(options.seconds)
    used = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)
    up = ask(port, "count(up == 1)")[0]
    row("targets up", up[0]["value"][1] if up else "0")
    durations = sorted(float(one["value"][1]) for one in ask(port, "scrape_duration_seconds")[0])
    quantiles = statistics.quantiles(durations, n=100)
    row("scrape duration p50, p99", f"{1000 * quantiles[49]:.1f} ms, {1000 * quantiles[98]:.1f} ms")
    row("series in Prometheus' head", f"{own_metric(port, 'prometheus_tsdb_head_series'):.0f}")
    rate = ask(port, "sum(scrape_samples_scraped)")[0][0]["value"][1]
    row("samples per second", f"{float(rate) / options.interval:.0f}")
    row("Prometheus, CPU and resident memory", f"{100 * used:.0f} %, {process.memory_info().rss / 2**20:.0f} MiB")
    for name, query in QUERIES.items():
        times = sorted(ask(port, query)[1] for _ in range(10))
        row(f"query: {name}, p50 and max of 10", f"{1000 * times[5]:.0f} ms, {1000 * times[-1]:.0f} ms")
    for one in ask(port, SKEW)[0]:
        row("  found to differ", f"{one['metric']['item']}: {one['value'][1]} versions")
    for one in ask(port, ODD_PODS)[0]:
        metric = one["metric"]
        row("  found odd", f"{metric.get('pod')} {metric['item']} {metric['value']} ({one['value'][1]} have it)")


if __name__ == "__main__":
    sys.exit(main())
