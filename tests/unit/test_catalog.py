"""The catalogue: contradictions are found, the real one has none, and the documentation is in step with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar import report
from sidecar.catalog import (
    AGENT_FAMILIES,
    COMMON_REASONS,
    CatalogError,
    build,
    discover,
)
from sidecar.config import SETTINGS
from sidecar.documentation import documents, main, markdown_conditions, markdown_metrics, markdown_settings
from sidecar.model import Family, Feature, Gate, Option, Severity
from tests.samples import Facts, catalog, condition_type, probe, snapshot

DOCS = Path(__file__).parents[2] / "docs"

A = condition_type("a-broken", Severity.CRITICAL, Gate.LAUNCH)
B = condition_type("b-broken", Severity.WARNING, Gate.NEVER, depends_on=("a-broken",))


def contradiction(*probes: Any) -> str:
    """Return what is wrong with a catalogue of these probes."""
    with pytest.raises(CatalogError) as caught:
        build(probes)
    return str(caught.value)


def family(name: str, kind: str = "gauge", **more: Any) -> Family:
    """Declare a family."""
    return Family(name=name, kind=kind, **({"help": "Some help"} | more))


# -- building -----------------------------------------------------------------------------------------


def test_everything_declared_is_in_the_catalogue() -> None:
    """Families of the agent come first, then those of each probe; each code knows its probe."""
    built = build((probe("x", A, families=(family("x_up"),)), probe("y", B, families=(family("y_up"),))))
    assert built.families == (*AGENT_FAMILIES, family("x_up"), family("y_up"))
    assert dict(built.conditions) == {"a-broken": A, "b-broken": B}
    assert dict(built.owner) == {"a-broken": "x", "b-broken": "y"}
    assert list(built.by_name) == ["x", "y"]


def test_requirements_of_several_probes_add_up() -> None:
    """A feature may rest on conditions of more than one probe."""
    built = build(
        (probe("x", A, requirable={"cuda": ("a-broken",)}), probe("y", B, requirable={"cuda": ("b-broken",)}))
    )
    assert dict(built.requirable) == {"cuda": ("a-broken", "b-broken")}


def test_a_shared_family_is_declared_by_several_probes() -> None:
    """A family that is meant for several probes is one family, on a part of the page that names no probe."""
    shared = family("module_importable", labels=("module",), shared=True)
    built = build((probe("x", families=(shared,)), probe("y", families=(shared, family("up")))))
    assert [one.name for one in built.families].count("module_importable") == 1
    page = markdown_metrics(built)
    assert page.count("sglang_sidecar_module_importable") == 1
    assert page.index("## Several probes") < page.index("sglang_sidecar_module_importable")
    other = family("module_importable", labels=("file",), shared=True)
    assert "module_importable is declared by x and by z" in contradiction(
        probe("x", families=(shared,)), probe("z", families=(other,))
    )


@pytest.mark.parametrize(
    ("probes", "told"),
    [
        ((probe("x"), probe("x")), "probe x is declared by x and by x"),
        ((probe("x", A), probe("y", A)), "condition a-broken is declared by x and by y"),
        (
            (probe("x", families=(family("up"),)), probe("y", families=(family("up"),))),
            "family up is declared by x and by y",
        ),
        ((probe("x", families=(family("ready"),)),), "family ready is declared by the agent and by x"),
        ((probe("x", B),), "condition b-broken refers to a-broken, which nobody declares"),
        (
            (
                probe(
                    "x",
                    condition_type("a-broken", Severity.WARNING, Gate.NEVER, depends_on=("b-broken",)),
                    B,
                ),
            ),
            "condition a-broken depends on itself",
        ),
        ((probe("x", requirable={"cuda": ("nope",)}),), "requirement cuda refers to nope, which nobody declares"),
        ((probe("a-broken", A),), "a-broken is both a probe and a condition"),
        ((probe("x", replace(A, code="Not_Kebab")),), "'Not_Kebab' is not a kebab-case token"),
        ((probe("x", replace(A, reasons={"Not OK": ""})),), "'Not OK' is not a kebab-case token"),
    ],
)
def test_contradictions_are_errors(probes: tuple[Any, ...], told: str) -> None:
    """Whatever is declared twice, misspelt or refers to nothing is told by name."""
    assert told in contradiction(*probes)


@pytest.mark.parametrize(
    "bad",
    [
        family("errors", "counter"),
        family("errors_total"),
        family("driver", "info"),
        family("driver_info"),
        family("x", "histogram"),
        family("Bad-Name"),
        family("x", help=""),
        family("x", help="two\nlines"),
        family("x", labels=("a", "a")),
        family("x", labels=("bad-label",)),
    ],
)
def test_families_follow_the_rules_for_metrics(bad: Family) -> None:
    """Suffixes belong to their kinds, names and labels are valid, help is one line."""
    assert f"family {bad.name}" in contradiction(probe("x", families=(bad,)))


def test_all_contradictions_are_told_at_once() -> None:
    """One round of repair is enough."""
    told = contradiction(probe("x", B, families=(family("errors_total"),)), probe("x"))
    assert told.count(";") == 2


# -- identity -----------------------------------------------------------------------------------------


def test_only_live_facts_identify_the_environment() -> None:
    """A probe without facts adds nothing; each item says which probe read it."""
    taken = snapshot(facts={"driver": Facts(identity={"driver": "580.1"})})
    items = catalog().environment(taken.results)
    assert {item: (one.value, one.probe) for item, one in items.items()} == {"driver": ("580.1", "driver")}


def test_a_probe_whose_identity_fails_leaves_the_others() -> None:
    """A defect in one probe silences that probe's items only."""

    def broken(_facts: Facts) -> dict[str, str]:
        raise RuntimeError("defect")

    built = build((replace(probe("driver"), identity=broken), probe("server")))
    taken = snapshot(facts={"driver": Facts(), "server": Facts(identity={"sglang": "0.5.16"})})
    assert set(built.environment(taken.results)) == {"sglang"}


# -- discovery ----------------------------------------------------------------------------------------


@pytest.fixture(name="package")
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make an importable package of probes, empty so far."""
    (tmp_path / "sample_probes").mkdir()
    (tmp_path / "sample_probes" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("sample_probes")
    for name in [name for name in sys.modules if name.split(".")[0] == "sample_probes"]:
        del sys.modules[name]


def write(package: ModuleType, name: str, text: str) -> None:
    """Add a module to the package."""
    (Path(package.__path__[0]) / f"{name}.py").write_text(text)


def test_each_public_module_is_a_probe(package: ModuleType) -> None:
    """Probes come in the order of their modules' names; modules that start with an underscore are helpers."""
    for name in ("second", "first"):
        write(package, name, f"from tests.samples import probe\nPROBE = probe({name!r})\n")
    write(package, "_helper", "raise SystemExit('must not be imported')\n")
    assert [found.name for found in discover(package)] == ["first", "second"]


def test_a_module_without_a_probe_is_an_error(package: ModuleType) -> None:
    """A probe cannot get lost by a misspelt name."""
    write(package, "first", "PROBES = 1\n")
    with pytest.raises(CatalogError, match=r"sample_probes\.first declares no PROBE"):
        discover(package)


# -- documentation ------------------------------------------------------------------------------------


def test_metrics_page_lists_every_family() -> None:
    """Each family stands on the page with its kind, labels and help."""
    page = markdown_metrics(catalog())
    for one in catalog().families:
        assert f"| `sglang_sidecar_{one.name}` | {one.kind} |" in page
        assert one.help in page


def test_conditions_page_has_an_anchor_for_every_code() -> None:
    """Each code has a section of its own name, which alerts link to, and every link leads to one."""
    page = markdown_conditions(catalog())
    anchors = set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert anchors == set(catalog().conditions)
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == anchors


def test_condition_section_says_it_all() -> None:
    """When, remedy, reasons, what explains it and whom it concerns are all there; HTML and pipes are escaped."""
    odd = replace(
        B,
        remedy="run `pip install x==<version>` or <ask>",
        when="a | b",
        uses=Feature.FLASHINFER_MAMBA,
        info_when_unused=True,
        reasons={"some-reason": "either | or"},
    )
    page = markdown_conditions(build((probe("x", A, odd),)))
    section = page[page.index("## b-broken") :]
    assert "- **Remedy** run `pip install x==<version>` or &lt;ask>" in section
    assert "- **When** a | b" in section
    assert "[`a-broken`](#a-broken)" in section
    assert "servers that use flashinfer-mamba; for others it is shown as info" in section
    assert "| `some-reason` | either \\| or |" in section


def test_settings_page_lists_every_setting() -> None:
    """Each setting stands on the page with its flag and its variable."""
    page = markdown_settings(catalog())
    for setting in SETTINGS:
        assert f"| `{setting.key}` | `{setting.flag} " in page
        assert f"`{setting.variable}`" in page


def _option(key: str) -> Option:
    return Option(key=key, default="1", doc="Some setting", metavar="NUMBER", parse=lambda value: int(str(value)))


def test_a_probes_setting_is_on_the_page() -> None:
    """It comes after the agent's own, and the same key is never declared twice."""
    page = markdown_settings(build((probe("x", options=(_option("x_limit"),)),)))
    assert "| `x_limit` | `--x-limit NUMBER` | `SGLANG_SIDECAR_X_LIMIT` | 1 | Some setting |" in page
    assert page.index("`log_level`") < page.index("`x_limit`")
    assert contradiction(probe("x", options=(_option("listen"),))) == "setting listen is declared by the agent and by x"
    assert "setting a-b is not a valid name" in contradiction(probe("x", options=(_option("a-b"),)))


# -- the real catalogue ---------------------------------------------------------------------------------


def test_the_real_probes_contradict_nothing() -> None:
    """What is shipped builds, and its schema follows from it."""
    built = build(discover())
    assert {"driver", "packages", "flashinfer", "attention", "server"} <= set(built.by_name)
    assert report.schema(built)


def test_the_documentation_is_in_step(tmp_path: Path) -> None:
    """The generated pages in docs/ are what the declarations say now; `make docs` writes them."""
    assert main(["--write", str(tmp_path)]) == 0
    for name, content in documents(build(discover())).items():
        assert (tmp_path / name).read_text(encoding="utf-8") == content
        assert "Generated by" in "".join(content.splitlines()[:2])
        assert (DOCS / name).read_text(encoding="utf-8") == content, f"docs/{name} is out of date"


def test_tokens_that_any_condition_may_carry_are_declared_once() -> None:
    """No condition gives a common token a meaning of its own."""
    for code, kind in build(discover()).conditions.items():
        assert not kind.reasons.keys() & COMMON_REASONS.keys(), code
