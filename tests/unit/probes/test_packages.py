"""The packages probe: what is installed, whether it is what SGLang requires, and whether its parts fit together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sidecar.drift import ITEMS
from sidecar.environment import (
    Companion,
    Damage,
    EnvironmentFacts,
    FlashInferFiles,
    KernelFiles,
    ModuleFiles,
)
from sidecar.model import (
    Answer,
    Feature,
    Finding,
    Gate,
    Outcome,
    Result,
    Scope,
    ServerView,
    Severity,
    Status,
    Target,
    World,
)
from sidecar.probes.packages import PROBE, facts_from
from sidecar.probes.packages.declare import CONDITIONS
from sidecar.probes.packages.facts import TRACKED_PINS
from tests.builders import HOST, view

WORLD = World(standing=HOST, server=ServerView(), now=0.0, settings=None)
REQUIRES: Mapping[str, tuple[str, ...]] = {
    release: tuple(lines)
    for release, lines in json.loads(
        (Path(__file__).parents[2] / "captures/sglang/requires-dist.json").read_text(encoding="utf-8")
    )["releases"].items()
}
FULL = EnvironmentFacts(
    scope=Scope.SERVER,
    python="/venv/bin/python",
    python_source="process",
    python_version="3.12.3",
    site_dirs=("/a", "/b"),
    distribution_count=131,
    distributions={
        "sglang": "0.5.16",
        "torch": "2.11.0",
        "flashinfer-python": "0.6.14",
        "sglang-kernel": "0.4.5",
        "pynvml": "12.0.0",
    },
    torch_present=True,
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
)


def findings(environment: EnvironmentFacts, **more: Any) -> dict[str, Finding]:
    """What the probe says of an environment, by code."""
    facts = facts_from(environment, **more)
    return {one.code: one for one in PROBE.judge(Result(probe="packages", outcome=Outcome.OK, facts=facts), WORLD)}


def satisfied(environment: EnvironmentFacts) -> dict[str, float]:
    """The exported verdicts by package."""
    samples = PROBE.samples(facts_from(environment))
    return {sample.labels[0]: sample.value for sample in samples if sample.family == "requirement_satisfied"}


# -- collecting, identity and report ------------------------------------------------------------------


def test_identity_holds_what_is_known() -> None:
    """Each known item is there under its name, what is not installed is proven absent; torch keeps its local tag."""
    items = PROBE.identity(facts_from(FULL))
    assert {item: value for item, value in items.items() if value is not None} == {
        "python": "3.12.3",
        "sglang": "0.5.16",
        "torch": "2.11.0+cu130",
        "torch_cuda": "13.0",
        "flashinfer-python": "0.6.14",
        "sglang-kernel": "0.4.5",
    }
    assert {"flashinfer-cubin", "flash-attn", "sgl-kernel"} <= {item for item, value in items.items() if value is None}
    assert set(items) <= set(ITEMS)


def test_absence_is_proven_only_where_nothing_hides() -> None:
    """Code that runs at start can make any module importable, so nothing is said to be absent beside it."""
    items = PROBE.identity(facts_from(replace(FULL, path_code=("odd.pth",))))
    assert None not in items.values()


def test_identity_of_what_has_no_metadata() -> None:
    """A package without metadata is identified by the version that its files state (sgl-project/sglang#4812)."""
    files = FlashInferFiles(kind="package", version="0.6.14", cubin=Companion(kind="package", version="0.6.13"))
    items = PROBE.identity(facts_from(replace(FULL, distributions={}, flashinfer=files)))
    assert (items["flashinfer-python"], items["flashinfer-cubin"]) == ("0.6.14", "0.6.13")
    assert items["torch"] == "2.11.0+cu130"
    assert items["sglang"] is None


@pytest.mark.parametrize("change", [{"scope": Scope.SELF}, {"problem": "root-unreadable"}], ids=["self", "unreadable"])
def test_nothing_is_said_of_somebody_else(change: dict[str, Any]) -> None:
    """The sidecar's own packages, or none that could be read, identify no server and are not judged in its place."""
    environment = replace(FULL, **change)
    assert PROBE.identity(facts_from(environment)) == {}
    assert satisfied(environment) == {}
    assert PROBE.report(facts_from(environment))["requirements"] == ()
    found = findings(environment)
    assert {one.status for one in found.values()} == {Status.UNKNOWN}
    assert {one.reason for one in found.values()} == {change.get("problem", "scope-self")}


def test_report_says_where_it_looked() -> None:
    """The report names the interpreter, how it was found, and how much was read (sgl-project/sglang#30612)."""
    source = PROBE.report(facts_from(FULL))["environment_source"]
    assert (source.python, source.found_by, source.scope) == ("/venv/bin/python", "process", "server")
    assert (source.site_dirs, source.distributions) == (2, 131)


async def test_collect_reads_the_found_target() -> None:
    """The probe reads the environment of the target that was found, and takes from it only what it judges."""
    target = Target(
        url="http://h",
        url_source="t",
        scope=Scope.SERVER,
        python="/venv/bin/python",
        environ={"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "True", "OTHER": "x"},
        launch={"attention_backend": "fa3", "decode_attention_backend": "flashinfer", "tp_size": 2},
    )
    environment = replace(FULL, requires_of={"sglang": REQUIRES["0.5.16"]})

    async def find() -> Target:
        return target

    async def read(asked: Target) -> EnvironmentFacts:
        assert asked is target
        return environment

    services: Any = SimpleNamespace(
        targets=SimpleNamespace(find=find), environment=SimpleNamespace(read=read), memory={}
    )
    first = await PROBE.collect(services)
    assert first.environment is environment
    assert (first.check_skipped, first.attention_backends) == (True, ("fa3", "flashinfer"))
    assert first.checked == facts_from(environment).checked
    again = await PROBE.collect(services)
    assert again.checked is first.checked, "the same environment is evaluated once"
    environment = replace(environment, distributions={"sglang": "0.5.16"})
    assert (await PROBE.collect(services)).checked != first.checked


def test_each_condition_gets_one_verdict() -> None:
    """Nothing that the probe declares is left unjudged."""
    judged = [one.code for one in PROBE.judge(Result(probe="packages", facts=facts_from(FULL)), WORLD)]
    assert sorted(judged) == sorted(one.code for one in CONDITIONS)


# -- SGLang's requirements, release by release -------------------------------------------------------


class Pins(NamedTuple):
    """What a release of SGLang requires of the packages that matter most."""

    flashinfer: str
    kernel_name: str
    kernel: str
    torch: str
    cutlass: str | None = None
    cubin: str | None = None


PINS = {
    "0.4.6.post5": Pins("0.2.5", "sgl-kernel", "0.1.4", "2.6.0"),
    "0.4.10.post2": Pins("0.2.9rc2", "sgl-kernel", "0.2.8", "2.7.1"),
    "0.5.2": Pins("0.3.1", "sgl-kernel", "0.3.9.post2", "2.8.0"),
    "0.5.3.post3": Pins("0.4.0", "sgl-kernel", "0.3.15", "2.8.0", "4.2.1"),
    "0.5.4.post3": Pins("0.5.0", "sgl-kernel", "0.3.16.post4", "2.8.0", "4.2.1", "0.5.0"),
    "0.5.5.post3": Pins("0.5.2", "sgl-kernel", "0.3.17.post1", "2.8.0", "4.2.1", "0.5.2"),
    "0.5.6.post2": Pins("0.5.3", "sgl-kernel", "0.3.19", "2.9.1", "4.2.1", "0.5.3"),
    "0.5.8.post1": Pins("0.6.1", "sgl-kernel", "0.3.21", "2.9.1", "4.3.4", "0.6.1"),
    "0.5.9": Pins("0.6.3", "sgl-kernel", "0.3.21", "2.9.1", "4.3.4", "0.6.3"),
    "0.5.10.post1": Pins("0.6.7.post3", "sglang-kernel", "0.4.1", "2.9.1", "4.4.1", "0.6.7.post3"),
    "0.5.12.post1": Pins("0.6.11.post1", "sglang-kernel", "0.4.2.post2", "2.11.0", "4.5.1", "0.6.11.post1"),
    "0.5.15": Pins("0.6.12", "sglang-kernel", "0.4.4", "2.11.0", "4.5.2", "0.6.12"),
    "0.5.16": Pins("0.6.14", "sglang-kernel", "0.4.5", "2.11.0", "4.6.0"),
    "0.5.17": Pins("0.6.15.post1", "sglang-kernel", "0.4.5", "2.11.0", "4.6.0"),
    "0.5.18": Pins("0.6.17", "sglang-kernel", "0.4.6.post1", "2.13.0", "4.6.2"),
    "0.5.20": Pins("0.6.18", "sglang-kernel", "0.4.7", "2.13.0", "4.6.2"),
    "0.5.22": Pins("0.7.1", "sglang-kernel", "0.4.9", "2.14.1", "4.8.0"),
    "0.5.23": Pins("0.7.2", "sglang-kernel", "0.4.10", "2.14.1", "4.8.0"),
}
LADDER = list(PINS)


def some_version(line: str) -> tuple[str, str]:
    """(normalised name, a version that meets it) for a requirement line."""
    one = Requirement(line)
    bounds = {spec.operator: spec.version for spec in one.specifier}
    exact = bounds.get("==") or bounds.get(">=") or bounds.get("~=") or bounds.get("<=") or "1.0"
    return canonicalize_name(one.name), exact


def installed(release: str, pins: Pins, **changes: str | None) -> EnvironmentFacts:
    """An environment with a release of SGLang, the main packages of ``pins``, and all others as it requires them."""
    versions: dict[str, str | None] = dict(some_version(line) for line in REQUIRES[release] if "extra" not in line)
    versions |= dict(some_version(line) for line in REQUIRES[release] if 'extra == "srt"' in line)
    versions |= dict(some_version(line) for line in REQUIRES[release] if 'extra == "runtime-common"' in line)
    for name in ("sgl-kernel", "sglang-kernel"):
        versions.pop(name, None)
    versions |= {"sglang": release, "pip": "26.0", "torch": pins.torch, pins.kernel_name: pins.kernel}
    versions |= {"flashinfer-python": pins.flashinfer, "flashinfer-cubin": pins.cubin}
    versions |= {"nvidia-cutlass-dsl": pins.cutlass} if pins.cutlass else {}
    versions |= {name.replace("_", "-"): version for name, version in changes.items()}
    return EnvironmentFacts(
        scope=Scope.SERVER,
        python="/venv/bin/python",
        python_version="3.12.3",
        distributions={name: version for name, version in versions.items() if version is not None},
        requires_of={"sglang": REQUIRES[release]},
        torch_present=True,
        torch_version=versions["torch"] or pins.torch,
        torch_cuda="13.0",
        kernel=KernelFiles(kind="package"),
    )


def of_release(release: str, **changes: str | None) -> EnvironmentFacts:
    """The set that a release requires, with changes to it."""
    return installed(release, PINS[release], **changes)


def violated(environment: EnvironmentFacts, **more: Any) -> Finding:
    """What is said of SGLang's requirements."""
    return findings(environment, **more)["requirement-violated"]


@pytest.mark.parametrize("release", LADDER)
def test_the_required_set_is_fine(release: str) -> None:
    """With what its own metadata requires, each release has no fault, and every tracked package says so."""
    environment = of_release(release)
    found = findings(environment)
    assert {code: (one.status, one.message) for code, one in found.items()} == dict.fromkeys(found, (Status.FALSE, ""))
    verdicts = satisfied(environment)
    assert set(verdicts.values()) == {1}
    main = {"flashinfer-python", PINS[release].kernel_name, "torch", "transformers"}
    assert main <= set(verdicts) <= set(TRACKED_PINS)


@pytest.mark.parametrize(("before", "release"), list(pairwise(LADDER)))
def test_a_stale_set_is_named(before: str, release: str) -> None:
    """SGLang upgraded alone: the package that keeps it from starting leads, in SGLang's own words (case 17)."""
    old, new = PINS[before], PINS[release]
    found = violated(installed(release, old._replace(cubin=new.cubin)), check_skipped=False)
    kernel = old.kernel != new.kernel and release != "0.5.23"
    severity, gate = (Severity.CRITICAL, None) if kernel else (Severity.WARNING, Gate.NEVER)
    assert (found.status, found.severity, found.gate) == (Status.TRUE, severity, gate)
    if old.kernel_name != new.kernel_name:
        assert found.reason == "renamed"
        assert found.sglang_says == (
            f"Exception: {new.kernel_name} with minimum required version {new.kernel} is not installed. "
            f"Please reinstall the latest version with `pip install {new.kernel_name} --force-reinstall`"
        )
        assert str(found.remedy).startswith(f"/venv/bin/python -m pip uninstall -y {old.kernel_name} && ")
    else:
        # Two pairs of releases share a kernel wheel; there FlashInfer is what is too old. The last release checks
        # for less than it requires.
        package, got, least = (
            (new.kernel_name, old.kernel, new.kernel)
            if kernel
            else ("flashinfer_python", old.flashinfer, new.flashinfer)
        )
        assert found.reason == "below-minimum"
        advice = (
            f"Please reinstall the latest version with `pip install {package} --force-reinstall`"
            if kernel
            else "Please uninstall the old version and reinstall the latest version by following the instructions at "
            "https://docs.flashinfer.ai/installation.html."
        )
        assert found.sglang_says == (
            f"Exception: {package} is installed with version {got}, which is less than the minimum required version "
            f"{least}. {advice}"
        )
    for name, version in ((new.kernel_name, new.kernel), ("torch", new.torch)):
        changed = old.torch != new.torch if name == "torch" else (old.kernel_name, old.kernel) != (name, version)
        assert (f"{name}=={version}" in str(found.remedy)) is changed
    assert old.flashinfer in found.message
    assert satisfied(installed(release, old))["flashinfer-python"] == 0


@pytest.mark.parametrize(("release", "after"), list(pairwise(LADDER)))
def test_a_newer_set_is_outside_the_pins(release: str, after: str) -> None:
    """Packages upgraded alone start, since SGLang checks a minimum only; the pins tell (sgl-project/sglang#10891)."""
    new = PINS[after]._replace(kernel_name=PINS[release].kernel_name, cubin=PINS[release].cubin)
    found = violated(installed(release, new))
    assert (found.status, found.severity, found.reason) == (Status.TRUE, Severity.WARNING, "outside-pin")
    assert found.sglang_says is None
    assert new.flashinfer in f"{found.message} {found.evidence}"
    assert f"=={PINS[release].flashinfer}" in str(found.remedy)


def test_the_minimum_is_not_the_pin() -> None:
    """SGLang 0.5.23 pins a newer kernel wheel than it checks for: the older one starts and is outside the pin."""
    at_minimum = violated(of_release("0.5.23", sglang_kernel="0.4.9"))
    assert (at_minimum.reason, at_minimum.sglang_says) == ("outside-pin", None)
    below = violated(of_release("0.5.23", sglang_kernel="0.4.8"))
    assert (below.reason, "required version 0.4.9." in str(below.sglang_says)) == ("below-minimum", True)


def test_an_unknown_release_has_pins_and_no_known_minimum() -> None:
    """For a release whose check nobody has looked at, the pin is judged and no sentence is put into its mouth."""
    environment = of_release("0.5.16", sglang="0.5.16.post7", sglang_kernel="0.4.4")
    found = violated(environment)
    assert (found.reason, found.severity, found.sglang_says) == ("outside-pin", Severity.WARNING, None)


@pytest.mark.parametrize(
    ("more", "says"),
    [({"check_skipped": False}, True), ({"check_skipped": None}, True), ({"check_skipped": True}, False)],
)
def test_the_check_can_be_skipped(more: dict[str, Any], says: bool) -> None:
    """With the check switched off the old kernel wheel stays a fault that SGLang no longer names (case 17)."""
    found = violated(of_release("0.5.16", sglang_kernel="0.4.2"), **more)
    assert found.reason == "below-minimum"
    assert (found.sglang_says is not None) is says
    assert ("keeps SGLang from refusing it" in found.message) is not says
    certain = more["check_skipped"] is False
    assert (found.severity, found.gate) == ((Severity.CRITICAL, None) if certain else (Severity.WARNING, Gate.NEVER))


@pytest.mark.parametrize(
    "server", [view(answer=Answer.ACCEPTED), view(features={Feature.GPU: False})], ids=["answers", "without-gpu"]
)
def test_a_check_that_is_passed_or_not_made_is_a_warning(server: ServerView) -> None:
    """A server that answers has passed SGLang's check, and one on another device is not checked (case 17)."""
    facts = facts_from(of_release("0.5.16", sglang_kernel="0.4.2"), check_skipped=False)
    result = Result(probe="packages", outcome=Outcome.OK, facts=facts)
    found = next(
        one for one in PROBE.judge(result, replace(WORLD, server=server)) if one.code == "requirement-violated"
    )
    assert (found.reason, found.severity, found.gate) == ("below-minimum", Severity.WARNING, Gate.NEVER)


def test_the_skip_is_known_to_the_releases_that_have_it() -> None:
    """Before 0.5.2 no variable keeps SGLang from comparing, and before 0.5.8 none for FlashInfer."""
    assert violated(of_release("0.4.10.post2", sgl_kernel="0.2.7"), check_skipped=True).sglang_says is not None
    flashinfer = violated(of_release("0.5.6.post2", flashinfer_python="0.5.2"), check_skipped=True)
    assert flashinfer.sglang_says is not None
    assert violated(of_release("0.5.6.post2", sgl_kernel="0.3.18"), check_skipped=True).sglang_says is None


@pytest.mark.parametrize(
    ("backends", "says"), [((), True), (("flashinfer",), True), (("fa3", "flashinfer"), True), (("fa3",), False)]
)
def test_flashinfer_is_compared_for_its_own_backend_only(backends: tuple[str, ...], says: bool) -> None:
    """SGLang looks at FlashInfer's version only for the attention backend of that name."""
    found = violated(of_release("0.5.16", flashinfer_python="0.6.13"), attention_backends=backends)
    assert (found.reason, found.sglang_says is not None) == ("below-minimum", says)


def test_without_cuda_the_kernel_wheel_is_not_compared() -> None:
    """Where torch has no CUDA SGLang does not look at the kernel wheel's version."""
    environment = replace(of_release("0.5.16", sglang_kernel="0.4.2"), torch_without_cuda=True, torch_cuda=None)
    found = violated(environment)
    assert (found.reason, found.sglang_says) == ("outside-pin", None)


# -- single faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "severity", "fragments"),
    [
        ({"torch": "2.9.1"}, "outside-pin", Severity.WARNING, ("torch 2.9.1", "torch==2.11.0")),
        ({"torch": None, "sglang_kernel": "0.4.6"}, "outside-pin", Severity.WARNING, ("sglang-kernel 0.4.6",)),
        ({"nvidia_cutlass_dsl": None}, "not-installed", Severity.WARNING, ("nvidia-cutlass-dsl[cu13]==4.6.0",)),
        ({"sglang_kernel": None}, "unregistered", Severity.WARNING, ("without the metadata of sglang-kernel",)),
        ({"apache_tvm_ffi": "0.1.10"}, "outside-pin", Severity.INFO, ("apache-tvm-ffi==0.1.11",)),
        ({"flash_attn_4": "4.0.0b15"}, "outside-pin", Severity.INFO, ("flash-attn-4>=4.0.0b18",)),
        ({"quack_kernels": None}, "not-installed", Severity.INFO, ("quack-kernels>=0.6.1",)),
        ({"transformers": "5.13.0"}, "outside-pin", Severity.INFO, ("transformers 5.13.0",)),
        # A nightly of the pinned version is another version, and older than it.
        ({"flashinfer_python": "0.6.14.dev20260601"}, "below-minimum", Severity.WARNING, ("flashinfer_python[cu13]",)),
        # Case 30 (flashinfer-ai/flashinfer#794, #788).
        (
            {"flashinfer_python": None, "flashinfer": "0.2.3+cu121torch2.5"},
            "renamed",
            Severity.WARNING,
            ("only flashinfer 0.2.3+cu121torch2.5",),
        ),
    ],
)
def test_one_package_is_at_fault(
    changes: dict[str, str | None], reason: str, severity: Severity, fragments: tuple[str, ...]
) -> None:
    """Message and remedy name what is wanted and what is found; the weight follows the package."""
    found = violated(of_release("0.5.16", **changes))
    assert (found.status, found.reason, found.severity) == (Status.TRUE, reason, severity)
    for fragment in fragments:
        assert fragment in f"{found.message} {found.remedy}"


def test_what_is_not_tracked_is_only_mentioned() -> None:
    """Pins on other packages activate nothing: they are in the message and in the report (case 20)."""
    environment = of_release("0.5.16", numba="0.60.0", timm=None)
    found = violated(environment)
    assert found.status is Status.FALSE
    assert "2 other requirements of SGLang are not met: numba==0.65.1 (0.60.0), timm==1.0.16 (not installed)." in (
        found.message
    )
    unmet = {
        one.package: (one.required, one.installed, one.tracked, one.source)
        for one in PROBE.report(facts_from(environment))["requirements"]
        if one.satisfied is False
    }
    assert unmet == {"numba": ("==0.65.1", "0.60.0", False, "sglang"), "timm": ("==1.0.16", None, False, "sglang")}


def test_the_remedy_repairs_all_at_once() -> None:
    """A few packages are installed by name, quoted for a shell; many by SGLang's own version, if it has one."""
    few = violated(of_release("0.5.16", flashinfer_python="0.6.13", torch="2.9.1"))
    assert few.remedy == "/venv/bin/python -m pip install 'flashinfer_python[cu13]==0.6.14' torch==2.11.0"
    changes = dict.fromkeys(("torch", "transformers", "flashinfer_python", "apache_tvm_ffi", "quack_kernels"), "0.0.1")
    many = of_release("0.5.16", **changes)
    assert violated(many).remedy == "/venv/bin/python -m pip install sglang==0.5.16"
    for unpublished in (replace(many, editable=("sglang",)), of_release("0.5.16", sglang="0.5.16.dev3", **changes)):
        assert "torch==2.11.0" in str(violated(unpublished).remedy)


def test_an_environment_made_by_uv() -> None:
    """Where there is no pip the command is uv's."""
    found = violated(of_release("0.5.16", pip=None, torch="2.9.1"))
    assert found.remedy == "uv pip install --python /venv/bin/python torch==2.11.0"


def test_a_missing_flashinfer_has_one_cause() -> None:
    """What FlashInfer's own conditions say with more weight explains a requirement on it, and nothing else."""
    assert violated(of_release("0.5.16", flashinfer_python=None)).explained_by == ("flashinfer-not-installed",)
    both = violated(of_release("0.5.16", flashinfer_python=None, torch="2.9.1"))
    assert both.explained_by == ()
    cubin = violated(of_release("0.5.15", flashinfer_cubin="0.6.11"))
    assert (cubin.reason, cubin.explained_by) == ("outside-pin", ("flashinfer-cubin-mismatch",))


@pytest.mark.parametrize("removed", ["torch_memory_saver", "sgl_deep_gemm"])
def test_extras_do_not_count(removed: str) -> None:
    """What only an extra asks for is not required, and what SGLang itself asks for is, tracked or not."""
    requirements = PROBE.report(facts_from(of_release("0.5.16", **{removed: None})))["requirements"]
    packages = {one.package for one in requirements}
    assert {"diffusers", "ray", "checkpoint-engine"} & packages == set()
    assert [one.package for one in requirements if one.satisfied is False] == [removed.replace("_", "-")]


# -- what cannot be told -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"modules": {"sglang": ModuleFiles(kind="package")}}, "sglang-without-metadata"),
        ({"unregistered": ("sglang",)}, "sglang-without-metadata"),
        ({}, "sglang-not-found"),
    ],
)
def test_without_sglangs_metadata_nothing_is_required(change: dict[str, Any], reason: str) -> None:
    """A copied SGLang states no requirements: unknown, never "not installed" (sgl-project/sglang#4812, case 20)."""
    environment = replace(of_release("0.5.16", sglang=None, torch="1.0"), **change)
    found = violated(environment)
    assert (found.status, found.reason) == (Status.UNKNOWN, reason)
    assert satisfied(environment) == {}


def test_metadata_without_requirements() -> None:
    """A wheel whose metadata asks for nothing does not tell what it needs (sgl-project/sglang#30562, case 13)."""
    environment = replace(of_release("0.5.16"), requires_of={"sglang": ()})
    assert (violated(environment).status, violated(environment).reason) == (Status.UNKNOWN, "no-requirements")


@pytest.mark.parametrize(
    "change",
    [
        {"modules": {"triton": ModuleFiles(kind="package")}},
        {"unregistered": ("triton",)},
    ],
)
def test_a_package_without_metadata_is_not_missing(change: dict[str, Any]) -> None:
    """A module that is there without metadata is unknown and exports nothing (case 20)."""
    lines = (*REQUIRES["0.5.16"], "triton==3.6.0")
    environment = replace(of_release("0.5.16"), requires_of={"sglang": lines})
    assert satisfied(environment)["triton"] == 0
    environment = replace(environment, **change)
    assert "triton" not in satisfied(environment)
    assert (violated(environment).status, violated(environment).reason) == (Status.UNKNOWN, "version-unknown")
    assert "triton" in violated(environment).message


@pytest.mark.parametrize("others", [{}, {"sglang_kernel": None, "sgl_kernel": "0.3.21"}])
def test_a_marker_that_cannot_be_told_asks_for_nothing(others: dict[str, str | None]) -> None:
    """Where the interpreter's version is unknown, what depends on it is neither met nor violated."""
    lines = ('sglang-kernel==0.4.6; python_version >= "3.10"', "torch==2.11.0")
    environment = replace(of_release("0.5.16", **others), requires_of={"sglang": lines}, python_version=None)
    assert satisfied(environment) == {"torch": 1}
    assert (violated(environment).status, violated(environment).reason) == (Status.UNKNOWN, "version-unknown")


def test_versions_by_files_count() -> None:
    """A package without metadata whose files state their version is compared by that."""
    environment = of_release("0.5.16", torch=None, flashinfer_python=None)
    files = FlashInferFiles(kind="package", version="0.6.14")
    assert violated(replace(environment, flashinfer=files)).status is Status.FALSE
    wrong = violated(replace(environment, flashinfer=files, torch_version="2.9.1+cu128"))
    assert (wrong.reason, "torch 2.9.1+cu128 is installed" in wrong.message) == ("outside-pin", True)


def test_lines_that_are_no_requirements_are_counted() -> None:
    """Damaged metadata is said to be so; what can be read is judged."""
    environment = replace(of_release("0.5.16"), requires_of={"sglang": (*REQUIRES["0.5.16"], "==", "torch =>")})
    found = violated(environment)
    assert (found.status, found.message) == (
        Status.FALSE,
        "2 of SGLang's requirement lines could not be read.",
    )


# -- what dependencies ask for -----------------------------------------------------------------------


def with_dependencies(**changes: str | None) -> EnvironmentFacts:
    """An environment in which FlashInfer and flash-attn-4 state requirements of their own."""
    environment = of_release("0.5.16", **changes)
    own = {
        "flashinfer-python": ("click", "nvidia-cutlass-dsl>=4.5.0", 'nvidia-cutlass-dsl[cu13]>=4.5.0; extra == "cu13"'),
        "flash-attn-4": ("nvidia-cutlass-dsl>=4.5.2", "apache-tvm-ffi<0.2,>=0.1.5", "torch-c-dlpack-ext"),
    }
    return replace(environment, requires_of={**environment.requires_of, **own})


def test_dependencies_ask_for_more_than_they_need() -> None:
    """What only FlashInfer and flash-attn-4 ask for is listed with its source and judged as information at most."""
    assert violated(with_dependencies()).status is Status.FALSE
    listed = [
        (one.package, one.required, one.satisfied, one.source)
        for one in PROBE.report(facts_from(with_dependencies()))["requirements"]
        if one.source != "sglang"
    ]
    assert ("click", "", False, "flashinfer-python") in listed
    assert ("nvidia-cutlass-dsl", "[cu13]>=4.5.0", True, "flashinfer-python") in listed, "SGLang asks for that extra"
    assert ("torch-c-dlpack-ext", "", False, "flash-attn-4") in listed


def test_an_untested_pair_is_information() -> None:
    """A cutlass that SGLang pins and flash-attn-4 refuses is said, with both (hao-ai-lab/FastVideo#1558)."""
    environment = with_dependencies(flash_attn_4="4.0.0b30")
    own = {**environment.requires_of, "flash-attn-4": ("nvidia-cutlass-dsl>=4.6.2",)}
    found = violated(replace(environment, requires_of=own))
    assert (found.reason, found.severity) == ("outside-dependency-pin", Severity.INFO)
    assert "flash-attn-4 4.0.0b30 asks for nvidia-cutlass-dsl>=4.6.2" in found.message
    assert "SGLang's own requirement on nvidia-cutlass-dsl is met" in str(found.remedy)


def test_a_package_is_named_once() -> None:
    """What is outside SGLang's pin is not named again for a dependency."""
    found = violated(with_dependencies(nvidia_cutlass_dsl="4.4.0"))
    assert (found.reason, len(found.evidence)) == ("outside-pin", 1)


def test_parts_of_cutlass_have_one_version() -> None:
    """The packages that nvidia-cutlass-dsl consists of are compared with it (vllm-project/vllm#43738, case 42)."""
    parts = {"nvidia_cutlass_dsl_libs_base": "4.6.0", "nvidia_cutlass_dsl_libs_cu12": "4.6.0"}
    assert violated(of_release("0.5.16", **parts, nvidia_cutlass_dsl_libs_cu13="4.6.0")).status is Status.FALSE
    found = violated(of_release("0.5.16", **parts, nvidia_cutlass_dsl_libs_cu13="4.5.2"))
    assert (found.reason, found.severity) == ("parts-differ", Severity.WARNING)
    assert "nvidia-cutlass-dsl-libs-cu13 4.5.2" in found.message
    assert found.remedy == "/venv/bin/python -m pip install 'nvidia-cutlass-dsl[cu13]==4.6.0'"


# -- CUDA flavours -----------------------------------------------------------------------------------

REINSTALL = "/venv/bin/python -m pip install --force-reinstall --no-deps "


def flavour(torch_cuda: str | None = "13.0", torch: str = "2.11.0+cu130", **changes: Any) -> Finding:
    """What is said of an environment in which these packages are added to those that SGLang 0.5.16 requires."""
    known = {"torch_without_cuda", "torch_present", "torch_hip"}
    facts = {name: value for name, value in changes.items() if name in known}
    versions = {name: value for name, value in changes.items() if name not in known}
    environment = replace(of_release("0.5.16", **versions), torch_version=torch, torch_cuda=torch_cuda, **facts)
    return findings(environment)["cuda-flavour-mismatch"]


@pytest.mark.parametrize(
    ("torch_cuda", "torch", "changes"),
    [
        ("13.0", "2.11.0+cu130", {}),
        ("13.0", "2.11.0+cu130", {"sglang_kernel": "0.4.5+cu130", "flashinfer_jit_cache": "0.6.14+cu131"}),
        # Another minor of the same major is compatible.
        ("12.8", "2.9.1+cu128", {"flashinfer_jit_cache": "0.6.14+cu129", "sgl_kernel": "0.3.21+cu124"}),
        # A wheel for CUDA 13 whose metadata has no tag (sgl-project/sglang#14327).
        ("13.0", "2.9.1+cu130", {"sgl_kernel": "0.3.18.post2"}),
        # The parts of cutlass are made for both.
        ("13.0", "2.11.0+cu130", {"nvidia_cutlass_dsl_libs_cu12": "4.6.0", "nvidia_cutlass_dsl_libs_cu13": "4.6.0"}),
        # CUDA 13's libraries have no suffix, and versions of their own.
        (
            "13.0",
            "2.11.0+cu130",
            {"nvidia_cufft": "12.0.0.61", "nvidia_curand": "10.4.0.35", "nvidia_nccl_cu13": "2.28.9"},
        ),
        ("12.8", "2.9.1+cu128", {"nvidia_nccl_cu12": "2.27.5", "nvidia_cublas_cu12": "12.8.4.1"}),
        # Placeholders of those names.
        ("12.8", "2.9.1+cu128", {"nvidia_cublas_cu12": "12.8.4.1", "nvidia_cublas": "0.0.1.dev5"}),
        # A vendor's torch brings its own libraries; what others installed is theirs.
        ("13.0", "2.9.0a0+145a3a7bda.nv25.10", {"nvidia_nccl_cu12": "2.27.5"}),
        ("13.0", "2.11.0+cu130", {"nvidia_ml_py": "13.580.65", "nvidia_mathdx": "25.6.0"}),
    ],
)
def test_one_flavour_is_fine(torch_cuda: str, torch: str, changes: dict[str, str]) -> None:
    """What belongs to torch's CUDA major, or to none, is no mismatch."""
    assert flavour(torch_cuda, torch, **changes).status is Status.FALSE


@pytest.mark.parametrize(
    ("torch_cuda", "torch", "changes", "reason", "remedy"),
    [
        # Case 14 (sgl-project/sglang#18203): the loader of such a wheel wants libcudart.so.12.
        (
            "13.0",
            "2.11.0+cu130",
            {"sglang_kernel": "0.4.5+cu124"},
            "local-tag",
            "install --force-reinstall --no-deps sglang-kernel==0.4.5  # builds for cu130",
        ),
        (
            "13.0",
            "2.11.0+cu130",
            {"flashinfer_jit_cache": "0.6.14+cu129"},
            "local-tag",
            "install --force-reinstall --no-deps flashinfer-jit-cache==0.6.14+cu130",
        ),
        # An upgrade that replaced torch+cu130 by the registry's plain build for CUDA 12.
        ("12.8", "2.9.1", {"flashinfer_jit_cache": "0.6.14+cu130"}, "local-tag", "flashinfer-jit-cache==0.6.14+cu128"),
        ("13.0", "2.11.0+cu130", {"flash_attn": "2.8.3+cu12torch2.8cxx11abiTRUE"}, "local-tag", "flash-attn==2.8.3"),
        ("13.0", "2.11.0+cu130", {"flashinfer": "0.2.3+cu121torch2.5"}, "local-tag", "flashinfer==0.2.3+cu130"),
        # Case 19 (GoogleCloudPlatform/scientific-computing-examples#157): one libnccl.so.2 for both.
        (
            "13.0",
            "2.11.0+cu130",
            {"nvidia_nccl_cu12": "2.27.5", "nvidia_nccl_cu13": "2.28.9", "nvidia_cublas_cu12": "12.8.4.1"},
            "shared-library",
            "uninstall -y nvidia-nccl-cu12 && " + REINSTALL + "nvidia-nccl-cu13==2.28.9",
        ),
        (
            "12.8",
            "2.9.1+cu128",
            {"nvidia_cudnn_cu12": "9.10.2.21", "nvidia_cudnn_cu13": "9.19.0.56"},
            "shared-library",
            "uninstall -y nvidia-cudnn-cu13 && " + REINSTALL + "nvidia-cudnn-cu12==9.10.2.21",
        ),
        ("13.0", "2.11.0+cu130", {"nvidia_nccl_cu12": "2.27.5"}, "other-major", "uninstall -y nvidia-nccl-cu12"),
    ],
)
def test_mixed_flavours_are_named(
    torch_cuda: str, torch: str, changes: dict[str, str], reason: str, remedy: str
) -> None:
    """Packages for another CUDA major than torch's are named with a command that puts the right ones there."""
    found = flavour(torch_cuda, torch, **changes)
    assert (found.status, found.reason, found.severity) == (Status.TRUE, reason, None)
    assert remedy in str(found.remedy)
    for name in changes:
        assert name.replace("_", "-") in f"{found.message} {found.evidence}" or name == "nvidia_cublas_cu12"
    assert found.explained_by == ()


def test_libraries_in_folders_of_their_own_are_information() -> None:
    """A second CUDA runtime beside torch's is what a kernel wheel for the other major may need (case 14)."""
    found = flavour(nvidia_cuda_runtime_cu12="12.8.90", nvidia_cuda_runtime="13.0.96")
    assert (found.status, found.reason, found.severity) == (Status.TRUE, "two-majors", Severity.INFO)
    assert found.remedy == "/venv/bin/python -m pip uninstall -y nvidia-cuda-runtime-cu12"


def test_a_torch_without_cuda_has_another_cause() -> None:
    """Tagged packages beside a torch without CUDA are a consequence of that."""
    found = flavour(None, "2.11.0+cpu", torch_without_cuda=True, sglang_kernel="0.4.5+cu130")
    assert (found.reason, found.explained_by) == ("plain-torch", ("cuda-unavailable-to-torch",))
    assert "install --force-reinstall torch==2.11.0" in str(found.remedy)
    assert flavour(None, "2.11.0+cpu", torch_without_cuda=True).status is Status.FALSE


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"torch_present": False}, Status.UNKNOWN, "torch-not-found"),
        ({"sglang_kernel": "0.4.5+cu124"}, Status.UNKNOWN, "torch-cuda-unknown"),
        ({"torch_hip": "6.4", "sglang_kernel": "0.4.5+cu124"}, Status.FALSE, None),
    ],
)
def test_without_torchs_cuda_no_tag_is_wrong(changes: dict[str, Any], status: Status, reason: str | None) -> None:
    """Where it is not known for which CUDA torch was built, nothing is said to differ from it."""
    found = flavour(None, "2.11.0", **changes)
    assert (found.status, found.reason) == (status, reason)


# -- twice, or half there ----------------------------------------------------------------------------


def duplicate(change: dict[str, Any] | None = None, **versions: str | None) -> Finding:
    """What is said of the registration of packages."""
    return findings(replace(of_release("0.5.16", **versions), **(change or {})))["duplicate-distribution"]


def test_old_and_new_name_together() -> None:
    """One package under two names is named, and the one that SGLang requires is put there (case 30)."""
    kernel = duplicate(sgl_kernel="0.3.21")
    assert (kernel.status, kernel.reason) == (Status.TRUE, "renamed-pair")
    assert kernel.remedy == (
        "/venv/bin/python -m pip uninstall -y sgl-kernel sglang-kernel && "
        "/venv/bin/python -m pip install sglang-kernel==0.4.5"
    )
    flashinfer = duplicate(flashinfer="0.2.3+cu121torch2.5")
    assert "flashinfer 0.2.3+cu121torch2.5 and flashinfer-python 0.6.14" in flashinfer.message
    older = findings(of_release("0.5.9", sglang_kernel="0.4.5"))["duplicate-distribution"]
    assert str(older.remedy).endswith("install sgl-kernel==0.3.21"), "an older SGLang requires the former name"


@pytest.mark.parametrize(
    ("duplicates", "reason"),
    [
        ({"torch": ("2.11.0", "2.9.1")}, "several-versions"),
        ({"flashinfer-python": ("0.6.14", "0.6.12")}, "several-versions"),
        # An environment layered over another, and what nobody tracks.
        ({"torch": ("2.11.0", "2.11.0")}, None),
        ({"setuptools": ("80.0", "65.0")}, None),
    ],
)
def test_several_versions_of_one(duplicates: dict[str, tuple[str, ...]], reason: str | None) -> None:
    """A tracked package that is registered in two versions is named with both; the same version twice is not."""
    found = duplicate({"duplicates": duplicates})
    assert (found.status is Status.TRUE, found.reason) == (reason is not None, reason)
    for version in set(*duplicates.values()) if reason else ():
        assert version in found.message


def test_shared_files() -> None:
    """Two packages that own the same files are named; those that have conditions of their own are left to these."""
    found = duplicate({"owners": {"flash_attn": ("flash-attn", "flash-attn-4")}}, flash_attn="2.8.3")
    assert (found.reason, "flash-attn 2.8.3 and flash-attn-4" in found.message) == ("shared-files", True)
    assert "install 'flash-attn-4>=4.0.0b18'" in str(found.remedy)
    others = {
        "pynvml": ("nvidia-ml-py", "pynvml"),
        "nvidia/nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "sgl_kernel": ("sgl-kernel", "sglang-kernel"),
        "torch": ("torch",),
    }
    assert duplicate({"owners": others}).status is Status.FALSE


@pytest.mark.parametrize(
    ("name", "change", "severity"),
    [
        ("sglang-kernel", {"kernel": KernelFiles(kind="absent")}, None),
        ("sglang-kernel", {"kernel": KernelFiles(kind="namespace")}, None),
        ("sglang-kernel", {}, Severity.INFO),
        ("torch", {"torch_present": False}, None),
        ("triton", {"modules": {"triton": ModuleFiles(kind="absent")}}, None),
        ("triton", {}, Severity.INFO),
    ],
)
def test_files_that_are_gone(name: str, change: dict[str, Any], severity: Severity | None) -> None:
    """Without its module a registered package is half removed; with it, the image may have been made smaller."""
    damage = {name: Damage(missing=3, examples=("sgl_kernel/__init__.py",))}
    found = duplicate({"damaged": damage, **change}, triton="3.6.0")
    assert (found.status, found.reason, found.severity) == (Status.TRUE, "files-missing", severity)
    assert f"{name} " in found.message
    assert "3 files" in found.message
    assert "install --force-reinstall --no-deps" in str(found.remedy)


def test_flashinfers_leftovers_have_conditions_of_their_own() -> None:
    """FlashInfer's leftovers are not named a second time here, nor what was merely edited in SGLang."""
    found = duplicate(
        {"damaged": {"sglang": Damage(resized=2)}, "leftovers": ("flashinfer", "flashinfer_cubin")},
    )
    assert found.status is Status.FALSE


@pytest.mark.parametrize(
    ("name", "damage", "reason", "said"),
    [
        ("flashinfer-python", Damage(missing=9, examples=("flashinfer/data/a.cuh",)), "files-missing", "a.cuh"),
        ("flashinfer-python", Damage(resized=1), "files-changed", "1 of another size than registered"),
        ("flashinfer-cubin", Damage(missing=2, resized=1), "files-missing", "2 missing and 1 of another size"),
        ("flashinfer-jit-cache", Damage(no_record=True), None, ""),
    ],
)
def test_damage_to_flashinfer_that_an_import_does_not_show(
    name: str, damage: Damage, reason: str | None, said: str
) -> None:
    """Headers and kernels that are damaged reach a condition; where the import fails for it, that one tells."""
    found = duplicate({"damaged": {name: damage}}, flashinfer_cubin="0.6.14", flashinfer_jit_cache="0.6.14+cu130")
    assert (found.status is Status.TRUE, found.reason) == (reason is not None, reason)
    if reason is not None:
        assert said in found.message
        assert found.severity is Severity.INFO
        assert f"--force-reinstall --no-deps {name}==0.6.14" in str(found.remedy)
        assert "flashinfer-import-failed" in found.explained_by
        kind = next(one for one in CONDITIONS if one.code == found.code)
        assert set(found.explained_by) <= set(kind.depends_on)
        both = duplicate({"damaged": {name: damage, "torch": Damage(resized=1)}}, flashinfer_cubin="0.6.14")
        assert both.explained_by == ()


def test_a_folder_that_a_pth_file_leads_to_is_part_of_site_packages() -> None:
    """The module cutlass lies below nvidia_cutlass_dsl in site-packages, which is no matter of PYTHONPATH."""
    place = "/venv/site/nvidia_cutlass_dsl/dsl_packages/cutlass"
    changes = {
        "duplicates": {"nvidia-cutlass-dsl": ("4.6.0", "4.5.2")},
        "site_dirs": ("/venv/site",),
        "modules": {"cutlass": ModuleFiles(kind="package", places=(place,))},
    }
    found = duplicate(changes)
    assert found.reason == "several-versions"
    assert "PYTHONPATH" not in str(found.remedy)
    assert "uninstall -y nvidia-cutlass-dsl" in str(found.remedy)


def test_a_kernel_that_may_be_elsewhere_is_no_certain_refusal() -> None:
    """Code of a .pth file may lead to metadata that no reading finds: never critical, and not said to be absent."""
    gone = replace(of_release("0.5.16", sglang_kernel=None), kernel=KernelFiles())
    plain = violated(gone, check_skipped=False)
    assert (plain.reason, plain.severity, plain.gate) == ("not-installed", Severity.CRITICAL, None)
    hooked = replace(gone, path_code=("_editable.pth",))
    found = violated(hooked, check_skipped=False)
    assert (found.reason, found.severity, found.gate) == ("not-installed", Severity.WARNING, Gate.NEVER)
    known = replace(hooked, path_code=("_virtualenv.pth", "google-nspkg.pth"))
    assert violated(known, check_skipped=False).severity is Severity.CRITICAL
    assert "sglang-kernel" in PROBE.identity(facts_from(known))


def test_a_leftover_folder() -> None:
    """A folder that nobody owns and Python takes for a package is named with its place."""
    found = duplicate({"leftovers": ("sgl_kernel",), "site_dirs": ("/venv/site",)}, sglang_kernel=None)
    assert (found.reason, found.remedy) == ("leftover-folder", "remove the folder sgl_kernel from /venv/site")


def test_the_gravest_fault_leads() -> None:
    """Several faults are all in the message, the gravest first, and each package has one repair."""
    found = duplicate({"duplicates": {"torch": ("2.11.0", "2.9.1")}, "leftovers": ("quack",)}, sgl_kernel="0.3.21")
    assert found.reason == "renamed-pair"
    assert "torch is registered as 2.11.0" in found.message
    kernel, torch, quack = str(found.remedy).splitlines()
    assert (" sgl-kernel " in kernel, " torch " in torch, "folder quack" in quack) == (True, True, True)
    assert not found.evidence


def test_two_faults_of_one_package_have_one_repair() -> None:
    """A pair of names whose files are gone besides is repaired once: a second command would undo the first."""
    gone = {"sglang-kernel": Damage(missing=3, examples=("sgl_kernel/a.py",)), "sgl-kernel": Damage(resized=1)}
    found = duplicate({"damaged": gone, "owners": {"sgl_kernel": ("sgl-kernel", "sglang-kernel")}}, sgl_kernel="0.3.21")
    assert found.reason == "renamed-pair"
    assert len(str(found.remedy).splitlines()) == 1
    assert "install sglang-kernel==0.4.5" in str(found.remedy)


def test_what_is_only_information_has_no_command_beside_a_fault() -> None:
    """Files that somebody may have left out on purpose are told of, and need no repair beside a real fault."""
    slimmed = {"transformers": Damage(resized=1, examples=("transformers/a.py",))}
    found = duplicate({"damaged": slimmed, "duplicates": {"torch": ("2.11.0", "2.9.1")}})
    assert "transformers/a.py" in found.message
    assert "transformers" not in str(found.remedy)


# -- the NVML binding --------------------------------------------------------------------------------


def binding(change: dict[str, Any] | None = None, **versions: str) -> Finding:
    """The finding for these owners of the module pynvml."""
    distributions = {"pip": "26.0"} | {name.replace("_", "-"): version for name, version in versions.items()}
    environment = replace(FULL, distributions=distributions, **(change or {}))
    return findings(environment)["nvml-binding-conflict"]


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"nvidia_ml_py": "13.580.65"}, Status.FALSE),
        ({"pynvml": "11.4.1"}, Status.FALSE),
        # Case 54 (flashinfer-ai/flashinfer#1693): it only refers to nvidia-ml-py and warns of itself.
        ({"nvidia_ml_py": "13.580.65", "pynvml": "13.0.1"}, Status.FALSE),
        ({"nvidia_ml_py": "12.560.30", "pynvml": "12.0.0"}, Status.FALSE),
        # Case 55 (XuehaiPan/nvitop#44, wookayin/gpustat#105, vllm-project/vllm#7649).
        ({"nvidia_ml_py": "13.580.65", "pynvml": "11.5.3"}, Status.TRUE),
        ({"nvidia_ml_py": "13.580.65", "nvidia_ml_py3": "7.352.0"}, Status.TRUE),
        ({"nvidia_ml_py3": "7.352.0", "pynvml": "8.0.4"}, Status.TRUE),
        ({"nvidia_ml_py": "13.580.65", "pynvml": "not-a-version"}, Status.TRUE),
    ],
)
def test_owners_of_the_nvml_binding(versions: dict[str, str], status: Status) -> None:
    """Two packages with a module pynvml are a conflict; the one that merely refers to the other is not."""
    found = binding(**versions)
    assert found.status is status
    if status is Status.TRUE:
        assert found.reason == "several-owners"
        assert all(version in found.message for version in versions.values())
        assert "/venv/bin/python -m pip" in str(found.remedy)


def test_a_redirecting_pynvml_that_brings_the_file_all_the_same() -> None:
    """What RECORD says of the owners outranks what the version suggests (mlco2/codecarbon#933)."""
    owners = {"owners": {"pynvml": ("nvidia-ml-py", "pynvml")}}
    assert binding(owners, nvidia_ml_py="13.580.65", pynvml="12.0.0").reason == "several-owners"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"modules": {"pynvml": ModuleFiles(kind="absent")}}, "files-missing"),
        # A folder without __init__ hides no file: Python takes it where there is none.
        ({"modules": {"pynvml": ModuleFiles(kind="namespace", places=("/s/pynvml",))}}, "files-missing"),
        ({"flashinfer": FlashInferFiles(missing=("pynvml",))}, "files-missing"),
        ({"modules": {"pynvml": ModuleFiles(kind="package", places=("/s/pynvml",))}}, "shadowed"),
        ({"modules": {"pynvml": ModuleFiles(kind="module", places=("/s/pynvml.py",))}}, None),
    ],
)
def test_what_another_owner_leaves_behind(change: dict[str, Any], reason: str | None) -> None:
    """Removing one owner takes the other's file along, or leaves a folder that hides it (XuehaiPan/nvitop#4)."""
    found = binding(change, nvidia_ml_py="13.580.65")
    assert (found.status is Status.TRUE, found.reason) == (reason is not None, reason)
    if reason is not None:
        assert str(found.remedy).endswith("-m pip install --force-reinstall nvidia-ml-py")


# -- anything ----------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    ("sglang", "torch", "flashinfer-python", "flashinfer", "sgl-kernel", "sglang-kernel", "nvidia-nccl-cu12", "x")
)
VERSIONS = st.text(max_size=20) | st.from_regex(r"\A[0-9]{1,3}(\.[0-9]{1,3}){0,2}(\+cu[0-9]{1,4})?\Z")


@given(
    versions=st.dictionaries(NAMES, VERSIONS),
    lines=st.lists(
        st.text(max_size=40) | st.builds("{}{}{}".format, NAMES, st.sampled_from(("==", ">=", ";", "@")), VERSIONS)
    ),
    torch_cuda=st.none() | st.text(max_size=8),
    duplicates=st.dictionaries(NAMES, st.lists(VERSIONS, min_size=2, max_size=3).map(tuple)),
    python=st.none() | st.text(max_size=8),
)
def test_any_metadata_can_be_judged(
    versions: dict[str, str],
    lines: list[str],
    torch_cuda: str | None,
    duplicates: dict[str, tuple[str, ...]],
    python: str | None,
) -> None:
    """Arbitrary names, versions and lines never raise; every condition gets one verdict with a documented reason."""
    environment = replace(
        FULL,
        distributions=versions,
        requires_of={"sglang": tuple(lines), "flashinfer-python": tuple(lines)},
        torch_cuda=torch_cuda,
        duplicates=duplicates,
        python_version=python,
    )
    found = findings(environment)
    assert set(found) == {one.code for one in CONDITIONS}
    for kind in CONDITIONS:
        reason = found[kind.code].reason
        assert reason is None or reason in kind.reasons
        assert (reason is None) is (found[kind.code].status is Status.FALSE)
    facts = facts_from(environment)
    assert all(sample.value in {0, 1} for sample in PROBE.samples(facts))
    PROBE.report(facts)


def test_files_of_another_release_count() -> None:
    """Files that state another version than the metadata are named, and are what a requirement is judged by."""
    environment = replace(of_release("0.5.16"), torch_version="2.15.0+cu132", torch_cuda="13.2")
    found = findings(environment)
    assert (found["duplicate-distribution"].reason, found["requirement-violated"].reason) == (
        "files-of-another-version",
        "outside-pin",
    )
    assert "2.15.0+cu132" in found["duplicate-distribution"].message
    assert "torch 2.15.0+cu132 is installed" in found["requirement-violated"].message
    assert "--force-reinstall --no-deps torch==2.11.0" in str(found["duplicate-distribution"].remedy)


@pytest.mark.parametrize(
    ("registered", "files", "backend", "reason", "says"),
    [
        # SGLang asks importlib.metadata, and refuses what is as required.
        ("0.6.10", "0.6.14", "flashinfer", "below-minimum", "version 0.6.10, which is less than"),
        (None, "0.6.14", "flashinfer", "unregistered", "required version 0.6.14 is not installed."),
        ("0.6.10", "0.6.14", "fa3", None, None),
        (None, "0.6.14", "fa3", None, None),
        # And it lets pass what is not.
        ("0.6.14", "0.6.10", "flashinfer", "outside-pin", None),
        ("0.6.10", "0.6.10", "flashinfer", "below-minimum", "version 0.6.10, which is less than"),
    ],
)
def test_sglang_compares_the_metadata(
    registered: str | None, files: str, backend: str, reason: str | None, says: str | None
) -> None:
    """What SGLang refuses follows from the metadata, what a requirement is met by from the files that are imported."""
    there = FlashInferFiles(kind="package", version=files)
    environment = replace(of_release("0.5.16", flashinfer_python=registered), flashinfer=there)
    found = violated(environment, check_skipped=False, attention_backends=(backend,))
    assert (found.status is Status.TRUE, found.reason) == (reason is not None, reason)
    assert found.severity is (Severity.CRITICAL if says else Severity.WARNING if reason else None)
    assert (says is None) == (found.sglang_says is None)
    assert says is None or says in str(found.sglang_says)
    shown = {"unregistered": "no metadata"}.get(str(reason), registered if says else files)
    assert reason is None or found.evidence[0].startswith(f"flashinfer-python: {shown}, wanted")


def test_what_identifies_an_environment_is_what_is_imported() -> None:
    """Where files are of another release than their metadata, drift compares the files' version."""
    files = FlashInferFiles(kind="package", version="0.6.10")
    items = PROBE.identity(facts_from(replace(of_release("0.5.16"), flashinfer=files)))
    assert items["flashinfer-python"] == "0.6.10"


@pytest.mark.parametrize("name", ["flashinfer-python", "flashinfer-cubin"])
def test_companions_of_another_release_count(name: str) -> None:
    """FlashInfer's own build metadata states the version of its files, and so do its companions'."""
    good = of_release("0.5.15")
    version = good.distributions["flashinfer-python"]
    files = FlashInferFiles(kind="package", version=version, cubin=Companion(kind="package", version=version))
    environment = replace(good, flashinfer=files, distributions={**good.distributions, name: "0.6.10"})
    found = findings(environment)["duplicate-distribution"]
    assert (found.reason, name in found.message) == ("files-of-another-version", True)
    assert findings(replace(environment, editable=(name,)))["duplicate-distribution"].status is Status.FALSE


def test_a_local_tag_is_no_other_version() -> None:
    """Installers and vendors write the local tag into the metadata or into the files only."""
    environment = replace(of_release("0.5.16"), torch_version="2.11.0+cu130")
    assert findings(environment)["duplicate-distribution"].status is Status.FALSE


def test_files_of_another_size_are_told() -> None:
    """Files of a tracked package that are not as registered reach a condition, as information: people patch them."""
    found = duplicate({"damaged": {"torch": Damage(resized=1, examples=("torch/version.py",))}})
    assert (found.status, found.reason, found.severity) == (Status.TRUE, "files-changed", Severity.INFO)
    assert "torch/version.py" in found.message


def test_a_copy_on_the_path_is_taken_off_it() -> None:
    """A copy in a folder of PYTHONPATH is named with the folder; installing would not change what is imported."""
    changes = {
        "duplicates": {"torch": ("2.9.1", "2.11.0")},
        "site_dirs": ("/venv/site",),
        "modules": {"torch": ModuleFiles(kind="package", places=("/srv/overlay/torch",))},
    }
    found = duplicate(changes)
    assert found.reason == "several-versions"
    assert "/srv/overlay comes first" in found.message
    assert "take /srv/overlay out of the server's PYTHONPATH" in str(found.remedy)
    assert "install torch==2.9.1" not in str(found.remedy)


def test_a_pin_that_a_copy_on_the_path_violates_is_no_matter_for_an_installer() -> None:
    """What pip installs lies in site-packages, which comes after PYTHONPATH; what is wrong there, it can mend."""
    environment = replace(
        of_release("0.5.16", torch="2.9.1", nvidia_cutlass_dsl="4.5.2"),
        site_dirs=("/venv/site",),
        modules={"torch": ModuleFiles(kind="package", places=("/srv/my overlay/torch",))},
        torch_version="2.9.1",
    )
    found = violated(environment)
    assert str(found.remedy).startswith("take /srv/my overlay out of the server's PYTHONPATH")
    assert str(found.remedy).endswith("; then /venv/bin/python -m pip install 'nvidia-cutlass-dsl[cu13]==4.6.0'")
    editable = replace(environment, editable=("torch",))
    assert "PYTHONPATH" not in str(violated(editable).remedy)


def test_of_two_unpinned_versions_the_newer_stays() -> None:
    """Without a requirement of SGLang's an older leftover that comes first is not what is installed again."""
    versions = {"sglang": "0.5.16", "flash-attn": "2.7.0", "pip": "26.0"}
    environment = replace(FULL, distributions=versions, duplicates={"flash-attn": ("2.7.0", "2.8.3")})
    assert str(findings(environment)["duplicate-distribution"].remedy).endswith("install flash-attn==2.8.3")
