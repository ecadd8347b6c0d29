"""The report: everything known, as JSON for machines, and the exit code of ``check``.

`build` turns a snapshot into a dictionary of plain JSON values; the text and the page read only that dictionary,
so whatever people see is in the JSON too. Times are seconds since the epoch, durations seconds. ``null`` means
that the source did not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Struct

from sidecar import __version__
from sidecar.catalog import Catalog
from sidecar.model import (
    ChangeKind,
    Condition,
    Deviation,
    Gate,
    Outcome,
    Placement,
    Processes,
    Result,
    Scope,
    Severity,
    Snapshot,
    Status,
)

_log = structlog.get_logger()

SCHEMA_VERSION = 1
"""Raised whenever a field changes its meaning or goes; a new field leaves it as it is."""


class Level(StrEnum):
    """The whole report in one word, as ``check`` tells it by its exit code."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


class ExitCode(IntEnum):
    """Exit codes of ``check``, those of monitoring plugins: 2 beats 1 beats 3 beats 0."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


# -- the report's types, from which the JSON Schema is made ----------------------------------------

_Seconds = Annotated[float, msgspec.Meta(description="Seconds since the epoch")]


class VerdictReport(Struct, frozen=True, kw_only=True):
    """The answer behind /readyz, and the whole report in one word."""

    ready: bool
    pending: Annotated[bool, msgspec.Meta(description="True until the first driver round ended")]
    blockers: Annotated[tuple[str, ...], msgspec.Meta(description="Codes that make the pod unready")]
    level: Annotated[Level, msgspec.Meta(description="What the exit code of check says")]


class GpuRef(Struct, frozen=True, kw_only=True):
    """A GPU that a condition concerns."""

    gpu: str
    uuid: str


class ConditionReport(Struct, frozen=True, kw_only=True):
    """A judged condition with its three texts: a token, a sentence, an action."""

    code: str
    probe: Annotated[str, msgspec.Meta(description="The probe that judges it")]
    title: str
    status: Status
    severity: Annotated[Severity, msgspec.Meta(description="The effective one")]
    gate: Annotated[Gate, msgspec.Meta(description="The effective one")]
    active: Annotated[bool, msgspec.Meta(description="It holds, matters here, and no other condition explains it")]
    blocking: Annotated[bool, msgspec.Meta(description="It makes the pod unready now")]
    accepted: Annotated[bool, msgspec.Meta(description="The setting accept names it, so it is info and gates nothing")]
    relevant: bool
    reason: Annotated[str | None, msgspec.Meta(description="A token of a closed set per code")]
    message: str
    remedy: str
    evidence: tuple[str, ...]
    sglang_says: Annotated[str | None, msgspec.Meta(description="What SGLang prints when it meets this")]
    since: _Seconds
    consequence_of: Annotated[str | None, msgspec.Meta(description="The code that explains this one")]
    gpus: tuple[GpuRef, ...]


class ProbeReport(Struct, frozen=True, kw_only=True):
    """How a probe's runs went."""

    title: str
    outcome: Outcome
    detail: str
    where: Annotated[str | None, msgspec.Meta(description="The call or stage that did not return")]
    stuck: Annotated[bool, msgspec.Meta(description="A child process of it cannot be ended")]
    interval: float
    deadline: float
    started_at: _Seconds | None
    duration: float | None
    last_success_at: _Seconds | None
    failing_since: _Seconds | None
    rounds: int


class EnvironmentItem(Struct, frozen=True, kw_only=True):
    """One item of the environment's identity."""

    value: str
    source: Annotated[str, msgspec.Meta(description="The probe that read it")]
    scope: Annotated[Scope | None, msgspec.Meta(description="Whose environment it was read from")]


class StandingReport(Struct, frozen=True, kw_only=True):
    """Where the sidecar stands, and why it thinks so."""

    placement: Placement
    placement_why: str
    processes: Processes
    processes_why: str


class TransitionReport(Struct, frozen=True, kw_only=True):
    """A change of a condition's status or of the readiness."""

    at: _Seconds
    subject: str
    before: str
    after: str
    reason: str | None


class DriftReport(Struct, frozen=True, kw_only=True):
    """An item that is not as the baseline wants it."""

    item: str
    deviation: Deviation
    expected: Annotated[str, msgspec.Meta(description="As the baseline writes it; absent is a word of it")]
    observed: Annotated[str | None, msgspec.Meta(description="null: proven absent")]


class ChangeReport(Struct, frozen=True, kw_only=True):
    """A change of the environment that was seen."""

    item: str
    kind: ChangeKind
    before: Annotated[str | None, msgspec.Meta(description="null: proven absent")]
    after: Annotated[str | None, msgspec.Meta(description="null: proven absent")]
    at: _Seconds


class DemoReport(Struct, frozen=True, kw_only=True):
    """The recorded scenario that is shown instead of this machine."""

    scenario: str
    title: str
    shows: str
    replica: Annotated[int | None, msgspec.Meta(description="From 1; null where the scenario has only one")]
    replicas: int


class Report(Struct, frozen=True, kw_only=True):
    """What the sidecar knows, by its own account. Each probe adds the sections it declares."""

    schema_version: int
    version: Annotated[str, msgspec.Meta(description="Version of the sidecar")]
    demo: Annotated[DemoReport | None, msgspec.Meta(description="null: this is about a real machine")]
    generation: int
    taken_at: _Seconds
    verdict: VerdictReport
    conditions: tuple[ConditionReport, ...]
    probes: dict[str, ProbeReport]
    environment: dict[str, EnvironmentItem]
    standing: StandingReport
    history: tuple[TransitionReport, ...]
    drift: Annotated[
        tuple[DriftReport, ...] | None,
        msgspec.Meta(description="What is not as the baseline wants it; null where none is loaded"),
    ]
    changes: Annotated[
        tuple[ChangeReport, ...],
        msgspec.Meta(description="The last changes of the environment, across restarts where state_dir is set"),
    ]


# -- the level ------------------------------------------------------------------------------------


def level(snapshot: Snapshot) -> Level:
    """Give the worst active severity above info; else unknown if a condition that matters could not be judged."""
    active = {condition.severity for condition in snapshot.conditions.values() if condition.active}
    if Severity.CRITICAL in active:
        return Level.CRITICAL
    if Severity.WARNING in active:
        return Level.WARNING
    return Level.UNKNOWN if any(map(_counts_as_unknown, snapshot.conditions.values())) else Level.OK


def exit_code(snapshot: Snapshot) -> int:
    """Give the exit code of ``check``: 0 ok, 1 warning, 2 critical, 3 unknown."""
    return ExitCode[level(snapshot).name].value


def _counts_as_unknown(condition: Condition) -> bool:
    """Tell whether its being unknown changes the level. A condition that would be info if it held never does."""
    return (
        condition.status is Status.UNKNOWN
        and condition.relevant
        and condition.consequence_of is None
        and condition.severity is not Severity.INFO
    )


# -- building -------------------------------------------------------------------------------------


def build(snapshot: Snapshot, catalog: Catalog) -> dict[str, Any]:
    """Give the report as plain JSON values, conditions in the catalogue's order.

    A section whose probe has no facts is None. Facts may carry an attribute ``scope`` of type `Scope`, which is
    then the scope of the items they contribute to the environment.
    """
    core = Report(
        schema_version=SCHEMA_VERSION,
        version=__version__,
        demo=_demo(snapshot),
        generation=snapshot.generation,
        taken_at=snapshot.taken_at,
        verdict=VerdictReport(
            ready=snapshot.verdict.ready,
            pending=snapshot.verdict.pending,
            blockers=snapshot.verdict.blockers,
            level=level(snapshot),
        ),
        conditions=tuple(
            _condition(snapshot.conditions[code], catalog, snapshot)
            for code in catalog.conditions
            if code in snapshot.conditions
        ),
        probes={
            probe.name: _probe(snapshot.results.get(probe.name, Result(probe=probe.name)), catalog)
            for probe in catalog.probes
        },
        environment={
            item: EnvironmentItem(value=found.value, source=found.probe, scope=_scope(snapshot, found.probe))
            for item, found in catalog.environment(snapshot.results).items()
        },
        standing=StandingReport(
            placement=snapshot.standing.placement,
            placement_why=snapshot.standing.placement_why,
            processes=snapshot.standing.processes,
            processes_why=snapshot.standing.processes_why,
        ),
        history=tuple(
            TransitionReport(at=one.at, subject=one.subject, before=one.before, after=one.after, reason=one.reason)
            for one in snapshot.history
        ),
        drift=None
        if snapshot.baseline is None or not snapshot.baseline.items
        else tuple(
            DriftReport(item=one.item, deviation=one.deviation, expected=one.expected, observed=one.observed)
            for one in snapshot.drifts
        ),
        changes=tuple(
            ChangeReport(item=one.item, kind=one.kind, before=one.before, after=one.after, at=one.at)
            for one in snapshot.known.recent
        ),
    )
    sections: dict[str, Any] = {}
    for probe in catalog.probes:
        for name in probe.sections:
            sections.setdefault(name)
        result = snapshot.results.get(probe.name)
        if result is not None and result.facts is not None:
            try:
                contributed = probe.report(result.facts)
            except Exception:  # noqa: BLE001 - one probe's defect must not silence all others
                _log.exception("the report of a probe was left out", probe=probe.name)
                continue
            for key, value in contributed.items():
                known = sections.get(key)
                both = isinstance(known, Mapping) and isinstance(value, Mapping)
                sections[key] = dict(known or {}) | dict(value) if both else value
    return _plain(core) | _plain(sections)


def _plain(value: Any) -> dict[str, Any]:
    """Give the value as JSON reads it back: tuples are lists, and what JSON lacks is null or text."""
    try:
        encoded = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        # A file name that is not UTF-8 reaches Python as lone surrogates, which no encoder accepts.
        encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(value, str_keys=True, enc_hook=str)))
    decoded: dict[str, Any] = msgspec.json.decode(encoded)
    return decoded


def _encodable(value: Any) -> Any:
    """Give the value with a question mark for each character that UTF-8 cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def encode(report: Mapping[str, Any]) -> bytes:
    """Give the report as indented JSON that ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def schema(catalog: Catalog) -> dict[str, Any]:
    """Give the JSON Schema (2020-12) of the report with the sections of these probes.

    Raises ValueError when a section's name belongs to the report itself or to another probe.
    """
    sections: dict[str, Any] = {}
    own = set(Report.__struct_fields__)
    for probe in catalog.probes:
        shared = {name for name, shape in probe.sections.items() if name in sections and sections[name] == shape}
        if taken := (probe.sections.keys() & (own | sections.keys())) - shared:
            raise ValueError(f"probe {probe.name} declares report sections that are taken: {', '.join(sorted(taken))}")
        sections |= probe.sections
    (_, *shapes), components = msgspec.json.schema_components(
        (Report, *sections.values()), schema_hook=_schema_of_foreign, ref_template="#/$defs/{name}"
    )
    definitions = dict(components)
    core = definitions.pop("Report")
    properties = core["properties"] | {
        name: {"anyOf": [shape, {"type": "null"}]} for name, shape in zip(sections, shapes, strict=True)
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sglang-sidecar report",
        "description": core["description"],
        "type": "object",
        "properties": properties,
        "required": [*core["required"], *sections],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _schema_of_foreign(_type: type) -> dict[str, Any]:
    """Describe a type that JSON lacks: it is encoded as its text, see `build`."""
    return {"type": "string"}


def _demo(snapshot: Snapshot) -> DemoReport | None:
    shown = snapshot.demo
    if shown is None:
        return None
    return DemoReport(
        scenario=shown.scenario,
        title=shown.title,
        shows=shown.shows,
        replica=shown.replica,
        replicas=shown.replicas,
    )


def _condition(condition: Condition, catalog: Catalog, snapshot: Snapshot) -> ConditionReport:
    """One entry of the report's conditions."""
    return ConditionReport(
        code=condition.code,
        probe=catalog.owner[condition.code],
        title=catalog.conditions[condition.code].title,
        status=condition.status,
        severity=condition.severity,
        gate=condition.gate,
        active=condition.active,
        blocking=condition.code in snapshot.verdict.blockers,
        accepted=condition.accepted,
        relevant=condition.relevant,
        reason=condition.reason,
        message=condition.message,
        remedy=condition.remedy,
        evidence=condition.evidence,
        sglang_says=condition.sglang_says,
        since=condition.since,
        consequence_of=condition.consequence_of,
        gpus=tuple(GpuRef(gpu=gpu, uuid=uuid) for gpu, uuid in condition.gpus),
    )


def _probe(result: Result[Any], catalog: Catalog) -> ProbeReport:
    """One entry of the report's probes."""
    declared = catalog.by_name[result.probe]
    return ProbeReport(
        title=declared.title,
        outcome=result.outcome,
        detail=result.detail,
        where=result.where,
        stuck=result.stuck,
        interval=declared.interval,
        deadline=declared.deadline,
        started_at=result.started_at,
        duration=result.duration,
        last_success_at=result.last_success_at,
        failing_since=result.failing_since,
        rounds=result.rounds,
    )


def _scope(snapshot: Snapshot, probe: str) -> Scope | None:
    """Give the scope that a probe's facts declare, if they do."""
    scope = getattr(snapshot.results[probe].facts, "scope", None)
    return scope if isinstance(scope, Scope) else None


# -- reading a report, for the text and the page ------------------------------------------------------


class Unknowns(Struct, frozen=True, kw_only=True):
    """Conditions that could not be judged for the same reason, of one probe or of several that say the same.

    ``probe`` names it, or them.
    """

    probe: str
    reason: str
    message: str
    codes: tuple[str, ...]


def causes(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Give the active conditions, what gates first, then the worst first, else in the catalogue's order."""
    active = [condition for condition in report["conditions"] if condition["active"]]
    # A launch ends at its flags before it gets to anything else.
    first = _PARSER if is_preflight(report) else None
    # That something is not as it was says less than what is wrong with it.
    return sorted(
        active,
        key=lambda one: (
            not one["blocking"],
            -Severity(one["severity"]).rank,
            one["probe"] != first,
            one["probe"] == _DRIFT,
        ),
    )


def sglang_says(report: Mapping[str, Any], cause: Mapping[str, Any]) -> str | None:
    """Give what stands in the server's log for a cause: SGLang may have a sentence for a consequence only."""
    after = (one for one in consequences(report, cause["code"]) if one["status"] != Status.FALSE)
    return next((one["sglang_says"] for one in (cause, *after) if one["sglang_says"]), None)


def consequences(report: Mapping[str, Any], code: str) -> list[Mapping[str, Any]]:
    """Give the conditions that ``code`` explains, directly or through others."""
    found: list[Mapping[str, Any]] = []
    explained = {code}
    # Conditions may explain each other in any order of declaration: repeat until nothing is added.
    while True:
        more = [
            one
            for one in report["conditions"]
            if one["relevant"] and one["consequence_of"] in explained and one["code"] not in explained
        ]
        if not more:
            return found
        found += more
        explained |= {one["code"] for one in more}


def unknowns(report: Mapping[str, Any]) -> list[Unknowns]:
    """Give what matters here and could not be judged, grouped by probe and reason.

    Where several probes failed at the same thing, such as an interpreter that does not start, they are one group.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in report["conditions"]:
        if one["status"] == Status.UNKNOWN and one["relevant"] and one["consequence_of"] is None:
            groups.setdefault((one["probe"], one["reason"] or "not-judged"), []).append(one)
    found: dict[tuple[str, str], Unknowns] = {}
    for (probe, reason), members in groups.items():
        message = next((one["message"] for one in members if one["message"]), "")
        codes = tuple(one["code"] for one in members)
        key = (reason, message) if message and reason.startswith("probe-") else (probe, reason)
        before = found.get(key)
        found[key] = Unknowns(
            probe=probe if before is None else f"{before.probe}, {probe}",
            reason=reason,
            message=message,
            codes=codes if before is None else (*before.codes, *codes),
        )
    return list(found.values())


_PARSER = "launch"
"""The probe that judges what SGLang's argument parser says."""
_DRIFT = "drift"
"""The probe that compares the environment with its baseline."""


def is_preflight(report: Mapping[str, Any]) -> bool:
    """Tell whether a launch was judged that has not happened."""
    return report.get("preflight") is not None


def headline(report: Mapping[str, Any]) -> str:
    """Give the whole report in one sentence that starts with its level."""
    found = report["verdict"]["level"]
    if is_preflight(report):
        return one_line(f"{found}: {_launch_verdict(report, found)}")
    if found in (Level.CRITICAL, Level.WARNING):
        worst = [one for one in causes(report) if one["severity"] == found]
        more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
        return one_line(f"{found}: {worst[0]['code']}: {worst[0]['message'] or worst[0]['title']}{more}")
    if found == Level.UNKNOWN:
        groups = unknowns(report)
        count = sum(len(group.codes) for group in groups)
        reasons = ", ".join(dict.fromkeys(group.reason for group in groups))
        return one_line(f"unknown: {count} condition{'s' * (count != 1)} could not be judged ({reasons})")
    return "ok: everything that matters here was judged and nothing is wrong"


def _launch_verdict(report: Mapping[str, Any], found: str) -> str:
    """Say in one sentence what would become of a launch. Critical and gating is what it would fail with."""
    unjudged = sum(len(group.codes) for group in unknowns(report))
    gaps = f"; {unjudged} condition{'s' * (unjudged != 1)} could not be judged" if unjudged else ""
    if found in (Level.CRITICAL, Level.WARNING):
        worst = [one for one in causes(report) if one["severity"] == found]
        more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
        cause = f"{worst[0]['code']}: {worst[0]['message'] or worst[0]['title']}{more}"
        if worst[0]["blocking"] and found == Level.CRITICAL:
            return f"this launch would fail: {cause}"
        return f"nothing that was judged stops this launch, but {cause.removesuffix('.') if gaps else cause}{gaps}"
    if found == Level.UNKNOWN:
        reasons = ", ".join(dict.fromkeys(group.reason for group in unknowns(report)))
        return f"whether this launch would succeed could not be judged: {unjudged} open ({reasons})"
    return "nothing stands in the way of this launch"


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give the few facts that people look for first, as (name, sentence). "unknown" where nobody knows."""
    if is_preflight(report):
        return [
            *_launch_facts(report["preflight"]),
            ("driver", _driver_fact(report)),
            ("GPUs", _gpu_fact(report)),
            ("mamba", _mamba_need(report)),
            *((f"attention {phase}", _phase_need(report, found)) for phase, found in _attention(report)),
        ]
    return [
        ("driver", _driver_fact(report)),
        ("GPUs", _gpu_fact(report)),
        ("flashinfer.mamba", _module_fact(report, "flashinfer.mamba")),
        *((f"attention {phase}", _phase_fact(found)) for phase, found in _attention(report)),
        ("server", _server_fact(report)),
    ]


def _item(report: Mapping[str, Any], name: str) -> str | None:
    """Give the value of one item of the environment."""
    found = report["environment"].get(name)
    return None if found is None else str(found["value"])


def _section(report: Mapping[str, Any], name: str) -> Any:
    """Give a probe's section, or None when there is no such section or nothing is known."""
    return report.get(name)


def _driver_fact(report: Mapping[str, Any]) -> str:
    driver = _section(report, "driver") or {}
    parts = [driver.get("driver_version") or _item(report, "driver")]
    module = driver.get("kernel_module_version") or _item(report, "kernel_module")
    if module is not None:
        flavour = driver.get("kernel_module")
        parts.append(f"kernel module {module}" + (f" ({flavour})" if flavour else ""))
    if cuda := _item(report, "cuda_driver"):
        parts.append(f"CUDA {cuda}")
    if code := driver.get("return_code"):
        error = driver.get("error")
        parts.append(f"NVML answers {code}" + (f" ({error})" if error else ""))
    return ", ".join(part for part in parts if part) or "unknown"


def _gpu_fact(report: Mapping[str, Any]) -> str:
    gpus = _section(report, "gpus")
    if gpus is None:
        return "unknown"
    model = _item(report, "gpu_model")
    return f"{len(gpus)} visible" + (f", {model}" if model else "")


def _module_fact(report: Mapping[str, Any], name: str) -> str:
    module = (_section(report, "modules") or {}).get(name) or {}
    importable = module.get("importable")
    if importable is None:
        return "unknown"
    how = "verified by a real import" if module.get("verified") else "judged without importing"
    return f"{'importable' if importable else 'not importable'}, {how}"


def _attention(report: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Give the phases of the attention section; one unknown line where there is none."""
    section = _section(report, "attention")
    return section.items() if isinstance(section, Mapping) and section else [("backend", {})]


def _phase_fact(phase: Mapping[str, Any] | None) -> str:
    phase = phase or {}
    backend = phase.get("resolved") or phase.get("declared")
    version = phase.get("version")
    state = phase.get("state")
    if version is not None:
        name = f"FlashAttention {version}" if version else "no FlashAttention"
        return f"{name} ({backend})" if backend else name
    if isinstance(state, str) and state not in ("", "known"):
        return state.replace("-", " ") if backend is None else f"{backend} ({state.replace('-', ' ')})"
    return str(backend) if backend else "unknown"


_FORMS = {
    "module": "python -m sglang.launch_server",
    "console-script": "sglang serve",
    "flags": "flags alone",
}


def _launch_facts(launch: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Say how the launch was read: which SGLang, which flags count, which were passed over."""
    release = launch["release"]
    form = _FORMS.get(launch["form"], "another program, which may change its arguments")
    yield "launch", f"{form}, SGLang {release}" if release else f"{form}, SGLang's release unknown"
    understood = [flag if value is True else f"{flag} {value}" for flag, value in launch["understood"].items()]
    yield "flags judged", ", ".join(understood) or "none"
    if count := launch["passed_over_count"]:
        named = launch["passed_over"]
        shown = ", ".join(named[:_FLAGS_SHOWN])
        rest = count - len(named[:_FLAGS_SHOWN])
        yield "passed over", f"{count}: {shown}{f' and {rest} more' if rest else ''}" if shown else str(count)
    if launch["config"] is not None:
        yield "configuration file", str(launch["config"]).replace("-", " ")
    if not launch["complete"]:
        yield "not seen", "more flags come from a wrapper, a variable of a shell or a file"


_FLAGS_SHOWN = 8


def _mamba_need(report: Mapping[str, Any]) -> str:
    asked = report["preflight"]["understood"].get("--mamba-backend")
    if asked == "flashinfer":
        return f"flashinfer, needs {_need(report, 'flashinfer.mamba')}"
    if asked is None and not report["preflight"]["complete"]:
        return "unknown"
    if asked not in (None, "triton"):
        return f"{asked}, which is none that is known here"
    return f"{asked or 'triton (no other is asked for)'}, needs nothing of FlashInfer"


def _phase_need(report: Mapping[str, Any], phase: Mapping[str, Any] | None) -> str:
    """Say what a phase would run, what that needs and whether it is there."""
    fact = _phase_fact(phase)
    version = (phase or {}).get("version")
    modules = _section(report, "modules") or {}
    # Version 4 comes from another module in almost every release.
    names = [name for name in modules if name.endswith((".cute", "._fa4_interface"))]
    module = "sgl_kernel.flash_attn" if version == 3 else names[0] if version == 4 and names else None
    return fact if module is None else f"{fact}, needs {_need(report, module)}"


def _need(report: Mapping[str, Any], module: str) -> str:
    return f"{module}: {_module_fact(report, module)}"


def _server_fact(report: Mapping[str, Any]) -> str:
    server = _section(report, "server") or {}
    up = server.get("up")
    if server.get("state") == "not-found":
        # What is installed is in the list of versions: it is nobody's version yet.
        return "not found"
    if server.get("is_sglang") is False:
        return f"something answers on {server['url']}, but not as SGLang does"
    state = "unknown" if up is None else "answers" if up else "does not answer"
    if server.get("state") == "unauthorized":
        state += " and wants a key"
    # By its own word alone: what is installed may be newer than what runs, or be another's.
    version = server.get("version")
    return f"{state}, SGLang {version}" if version else state


# -- words that the text and the page share --------------------------------------------------------


def when(seconds: float | None) -> str:
    """Give a time as people read it, in UTC. Empty for None and for what is no time."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def gpu_names(cause: Mapping[str, Any]) -> str:
    """Name the GPUs that a condition of the report concerns: index and uuid, or what of them is known."""
    named = ((one["gpu"], one["uuid"]) for one in cause["gpus"])
    return ", ".join(f"{index} ({uuid})" if index and uuid else index or uuid for index, uuid in named)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What would act on a terminal, or turn the direction of writing: a message may quote what a child process printed."""


def clean(content: str) -> str:
    """Give the text with a replacement for each character that would act on a terminal; lines stay lines."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", content)


def one_line(content: str) -> str:
    """Give the text, cleaned, on one line."""
    return " ".join(clean(content.replace("\n", " ")).split())
