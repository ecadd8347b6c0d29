"""What docs/drift.md shows is what happens: its baseline, its table, its queries, its words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from sidecar.baseline import compared, parse, rendered, status_of
from sidecar.catalog import build, discover
from sidecar.drift import ITEMS, RECENT, written
from sidecar.model import Baseline, ChangeKind, Deviation, Observed
from sidecar.state import FOLDER

PAGE = (Path(__file__).parents[2] / "docs" / "drift.md").read_text()
QUERIES = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)


def shown() -> Baseline:
    """The baseline of the page."""
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    return parse(text.encode(), "docs/drift.md", ITEMS)


def test_its_baseline_is_one() -> None:
    """It reads without a problem, and its values are shown again as they are written."""
    baseline = shown()
    assert baseline.problems == ()
    assert all(f'{item} = "{written(wanted)}"' in PAGE for item, wanted in baseline.items.items())


def test_its_table_is_what_is_printed() -> None:
    """The comparison is printed like that."""
    baseline = b"""[environment]
driver = ">=580,<590"
gpu_model = "NVIDIA H200"
sglang = "0.5.16"
torch = "2.11.0"
triton = "3.6.0"
"""
    now = {"driver": "580.159.04", "gpu_model": "NVIDIA H200", "sglang": "0.5.17", "torch": "2.11.0+cu130"}
    rows = compared(
        parse(baseline, "b", ITEMS), {item: Observed(value=value, source="packages") for item, value in now.items()}
    )
    assert f"```text\n{rendered(rows, (), 'text')}```" in PAGE
    assert status_of(rows) == 1


@pytest.mark.parametrize(
    ("baseline", "status"),
    [
        (b'[environment]\nsglang = "0.5.17"\n', 0),
        (b'[environment]\nsglang = "0.5.17"\npython = ">=1,<"\n', 3),
        (b'[environment]\nsglang = "0.5.17"\nsglagn = "9"\n', 3),
        (b'[environment]\nsglang = "0.5.16"\nsglagn = "9"\n', 1),
        (b"[environment]\n", 3),
    ],
)
def test_what_was_not_compared_is_not_as_it_should_be(baseline: bytes, status: int) -> None:
    """A line that cannot be used, or none at all, proves nothing."""
    wanted = parse(baseline, "b", ITEMS)
    rows = compared(wanted, {"sglang": Observed(value="0.5.17", source="packages")})
    assert status_of(rows, wanted.problems) == status


def test_it_names_everything_there_is() -> None:
    """Every item, deviation, kind of change and reason of `state-unusable` has its line."""
    words = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
    assert set(ITEMS) <= words
    assert {one.value for one in Deviation} | {one.value for one in ChangeKind} <= words
    catalog = build(discover())
    reasons = set(catalog.conditions["state-unusable"].reasons) - {"no-state-dir"}
    assert reasons <= words
    assert {code for code in words if code in catalog.conditions} >= {
        "environment-drift",
        "baseline-unreadable",
        "state-unusable",
        "mig-unexpected",
    }
    metrics = {f"sglang_sidecar_{family.name}" for family in catalog.families}
    assert set(re.findall(r"sglang_sidecar_\w+", PAGE)) <= metrics
    assert FOLDER in words
    assert f"last {RECENT} in" in PAGE


@pytest.mark.parametrize("number", range(4))
def test_its_queries_find_what_they_say(tmp_path: Path, number: int) -> None:
    """Prometheus itself runs them over a fleet of four, one of which was left behind by a roll-out."""
    versions = {"pod-0": "0.6.14", "pod-1": "0.6.14", "pod-2": "0.6.14", "pod-3": "0.6.13"}
    series = [
        {"series": f'sglang_sidecar_environment_info{{item="{item}",value="{value}",pod="{pod}"}}', "values": "1x20000"}
        for pod, version in versions.items()
        for item, value in (("flashinfer-cubin", version), ("driver", "580.159.04"))
    ]
    changed = 'sglang_sidecar_environment_last_change_timestamp_seconds{item="sglang",pod="pod-0"}'
    series.append({"series": changed, "values": "604800x20000"})
    odd = 'sglang_sidecar_environment_info{item="flashinfer-cubin",value="0.6.13",pod="pod-3"}'
    expected = [
        [{"labels": '{item="flashinfer-cubin"}', "value": 2}],
        [{"labels": odd, "value": 1}],
        [{"labels": '{item="sglang",pod="pod-0"}', "value": 600}],
        [{"labels": one["series"], "value": 1} for one in series[:-1]],
    ][number]
    test = {"expr": QUERIES[number], "eval_time": "10090m", "exp_samples": expected}
    document = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [test]}]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(QUERIES) == 4
