"""The driver probe's series, their budget, and its sections of the report."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec.structs import replace

from sidecar.catalog import build
from sidecar.config import Settings
from sidecar.exposition import Exposition
from sidecar.gpuset import CountSource, Expected
from sidecar.model import Outcome
from sidecar.nvml.reading import GpuReading, NvmlReading, PcieLink, RemappedRows, XidCount
from sidecar.probes.driver import FAMILIES, PROBE, report, samples
from sidecar.probes.driver.facts import DriverFacts
from sidecar.probes.driver.sections import DriverSection, GpuSetSection
from tests.gpus import facts, gpu, known, reading, silent, standing


def series(one: DriverFacts) -> dict[tuple[str, ...], float]:
    """Key samples by (family, *labels); check that each is declared, with that many labels, and unique."""
    labels = {family.name: len(family.labels) for family in FAMILIES}
    found = list(samples(one))
    assert all(len(sample.labels) == labels[sample.family] for sample in found)
    unique = {(sample.family, *sample.labels): sample.value for sample in found}
    assert len(unique) == len(found)
    return unique


EVENT = XidCount(index=0, uuid="GPU-0", xid=79, count=2, last=1234.5)
BASIC = {
    ("nvml_up",): 1,
    ("nvml_return_code",): 0,
    ("driver_info", "580.159.04", "580.159.04", "open", "13.0", "13.580.159.04"): 1,
    ("gpus_expected",): 2,
    ("gpus_visible",): 1,
    ("gpus_in_scope",): 1,
    ("gpu_info", "0", "GPU-0", "NVIDIA H200", "9.0", "disabled"): 1,
    ("gpu_up", "0", "GPU-0"): 1,
    ("gpu_memory_used_bytes", "0", "GPU-0"): 644939776,
    ("gpu_memory_total_bytes", "0", "GPU-0"): 150754820096,
    ("gpu_temperature_celsius", "0", "GPU-0"): 38,
    ("gpu_power_watts", "0", "GPU-0"): 78.786,
    ("gpu_utilization_ratio", "0", "GPU-0"): 0.25,
    ("gpu_ecc_errors_total", "0", "GPU-0", "corrected"): 7,
    ("gpu_ecc_errors_total", "0", "GPU-0", "uncorrected"): 0,
    ("gpu_row_remap_pending", "0", "GPU-0"): 1,
    ("gpu_row_remap_failure", "0", "GPU-0"): 0,
    ("gpu_remapped_rows", "0", "GPU-0", "correctable"): 2,
    ("gpu_remapped_rows", "0", "GPU-0", "uncorrectable"): 3,
    ("gpu_recovery_action_info", "0", "GPU-0", "none"): 1,
    ("gpu_xid_errors_total", "0", "GPU-0", "79"): 2,
    ("gpu_xid_last_timestamp_seconds", "0", "GPU-0", "79"): 1234.5,
}
DETAIL = {
    ("gpu_clock_event_active", "0", "GPU-0", "sw_power_cap"): 1,
    ("gpu_clock_event_active", "0", "GPU-0", "sw_thermal_slowdown"): 0,
    ("gpu_clock_event_active", "0", "GPU-0", "hw_thermal_slowdown"): 0,
    ("gpu_clock_event_active", "0", "GPU-0", "hw_power_brake_slowdown"): 0,
    ("gpu_pcie_link_generation", "0", "GPU-0"): 3,
    ("gpu_pcie_link_generation_max", "0", "GPU-0"): 5,
    ("gpu_pcie_link_width", "0", "GPU-0"): 8,
    ("gpu_pcie_link_width_max", "0", "GPU-0"): 16,
    ("gpu_nvlink_links_active", "0", "GPU-0"): 17,
    ("gpu_nvlink_links", "0", "GPU-0"): 18,
    ("gpu_fabric_healthy", "0", "GPU-0"): 0,
}


@pytest.mark.parametrize("detail", [False, True])
def test_samples(detail: bool) -> None:
    """A round gives every family, those of gpu_detail on request only, in base units."""
    one = gpu(
        0,
        ecc_corrected=7,
        remapped_rows=RemappedRows(correctable=2, uncorrectable=3, pending=True, failed=False),
        clock_events=frozenset({"sw_power_cap"}),
        pcie=PcieLink(generation=3, generation_max=5, width=8, width_max=16),
        nvlinks_active=17,
        fabric="in-progress",
    )
    found = series(
        facts(
            reading(one, xids=(EVENT,)),
            gpu_set=known("GPU-0", "GPU-1"),
            expected=Expected(count=2, source=CountSource.SETTING),
            detail=detail,
        )
    )
    assert found == pytest.approx(BASIC | (DETAIL if detail else {}))
    if detail:
        assert {key[0] for key in found} == {family.name for family in FAMILIES}


def test_what_a_gpu_does_not_support_has_no_series() -> None:
    """A GPU without ECC, remapping, NVLink and fabric has none of their series rather than zeros."""
    bare = GpuReading(index=0, code=0, uuid="GPU-0", name="NVIDIA GeForce RTX 4090", compute_capability="8.9")
    for fabric in (None, "not-supported"):
        found = series(facts(reading(replace(bare, fabric=fabric)), detail=True))
        assert {key[0] for key in found if key[0].startswith("gpu_")} == {"gpu_info", "gpu_up"}


def test_an_unknown_set_has_no_size() -> None:
    """How many GPUs are in scope is absent, not zero, while nobody knows; so is what is expected."""
    found = series(facts(reading()))
    assert not {("gpus_in_scope",), ("gpus_expected",)} & set(found)
    assert series(facts(reading(), gpu_set=known("GPU-9")))["gpus_in_scope",] == 0


def test_a_gpu_that_was_not_reached_is_neither_up_nor_down() -> None:
    """A round that was cut short says nothing of the GPUs that it did not reach, nor how many are in scope."""
    one = series(facts(replace(reading(gpu(0)), count=2), gpu_set=known("GPU-0", "GPU-1")))
    assert one["gpus_visible",] == 2
    assert ("gpus_in_scope",) not in one
    assert [key for key in one if key[0] == "gpu_up"] == [("gpu_up", "0", "GPU-0")]


def test_samples_of_a_failed_round() -> None:
    """What is not known has no series: no count of GPUs, and no driver_info when no version is known."""
    bare = NvmlReading(code=12, call="nvmlInit")
    assert series(facts(bare)) == {("nvml_up",): 0, ("nvml_return_code",): 12}
    versions = series(facts(replace(bare, code=9, module_version="580.159.04", module_flavour="open")))
    assert versions["driver_info", "", "580.159.04", "open", "", ""] == 1


@pytest.mark.parametrize("code", [15, 999, "hung"])
def test_samples_of_a_silent_gpu(code: int | str) -> None:
    """A GPU that does not answer is down and has no values, under the uuid that it had."""
    found = series(facts(reading(gpu(0), silent(1, code)), detail=True))
    assert {key: value for key, value in found.items() if key[1:2] == ("1",)} == {("gpu_up", "1", "GPU-1"): 0}


def test_the_report() -> None:
    """The sections are JSON of the declared shapes: every GPU with its place in the server's set, and the Xids."""
    one = facts(
        reading(gpu(0), silent(1, "hung"), xids=(EVENT,), left_out={1: "nvmlDeviceGetName"}),
        gpu_set=known("GPU-0"),
        expected=Expected(count=1, source=CountSource.GPU_SET),
    )
    data = json.loads(msgspec.json.encode(report(one)))
    driver = msgspec.convert(data["driver"], DriverSection)
    gpus = msgspec.convert(data["gpus"], PROBE.sections["gpus"])
    gpu_set = msgspec.convert(data["gpu_set"], GpuSetSection)
    assert [(each.in_scope, each.up, each.return_code) for each in gpus] == [(True, True, 0), (False, False, "hung")]
    assert (gpus[0].pci_bus_id, gpus[0].recovery_action) == ("00000000:00:06.0", "none")
    assert (driver.xids[0].xid, driver.xids[0].kind, driver.left_out) == (79, "hardware", {"1": "nvmlDeviceGetName"})
    assert (gpu_set.known, gpu_set.source, gpu_set.expected, gpu_set.expected_source) == (True, "setting", 1, "gpu-set")
    assert [member.uuid for member in gpu_set.gpus] == ["GPU-0"]


def test_the_report_does_not_claim_to_know_whose_gpus_they_are() -> None:
    """While the set is unknown each GPU's place is null, and the section says why."""
    found = report(facts(reading()))
    assert [each.in_scope for each in found["gpus"]] == [None, None]
    assert (found["gpu_set"].known, bool(found["gpu_set"].why)) == (False, True)


def _exposed(one: DriverFacts) -> tuple[int, int]:
    """(series, bytes) of the probe's own part of the exposition, classic text."""
    from sidecar.store import Store
    from tests.builders import FakeClock, attempt

    catalog = build((PROBE,))
    store = Store(
        catalog.probes,
        standing=standing(),
        settings=Settings(),
        required=frozenset(),
        clock=FakeClock(),
        lifetimes={"driver": 35.0},
        on_fault=lambda _probe, error: pytest.fail(str(error)),
    )
    store.publish(attempt("driver", one))
    assert store.snapshot.results["driver"].outcome is Outcome.OK
    body = Exposition(catalog, process=lambda: ()).render(store.snapshot, accept="", accept_encoding="").body
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    return len(lines), len(body)


def test_the_probes_part_of_the_budget() -> None:
    """Eight GPUs leave room for every other probe: detail adds at most 100 series and 12 KiB, as documented."""
    eight = facts(
        reading(*(gpu(index, uuid=f"GPU-00000000-0000-4000-8000-{index:012d}") for index in range(8))),
        expected=Expected(count=8, source=CountSource.SERVER_INFO),
    )
    plain, size = _exposed(eight)
    detailed, detailed_size = _exposed(replace(eight, detail=True))
    assert plain <= 200
    assert detailed - plain <= 100
    assert detailed_size - size <= 12 * 1024
