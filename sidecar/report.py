"""The report: everything known, as JSON for machines and as text for people, and the exit code of ``check``.

`build` turns a snapshot into a dictionary of plain JSON values; `text` and the page read only that dictionary,
so whatever people see is in the JSON too. Times are seconds since the epoch, durations seconds. ``null`` means
that the source did not say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Annotated, Any

import msgspec
import structlog

from sidecar import __version__
from sidecar.catalog import Catalog
from sidecar.model import (
    Condition,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReport:
    """The answer behind /readyz, and the whole report in one word."""

    ready: bool
    pending: Annotated[bool, msgspec.Meta(description="True until the first driver round ended")]
    blockers: Annotated[tuple[str, ...], msgspec.Meta(description="Codes that make the pod unready")]
    level: Annotated[Level, msgspec.Meta(description="What the exit code of check says")]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRef:
    """A GPU that a condition concerns."""

    gpu: str
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionReport:
    """A judged condition with its three texts: a token, a sentence, an action."""

    code: str
    probe: Annotated[str, msgspec.Meta(description="The probe that judges it")]
    title: str
    status: Status
    severity: Annotated[Severity, msgspec.Meta(description="The effective one")]
    gate: Annotated[Gate, msgspec.Meta(description="The effective one")]
    active: Annotated[bool, msgspec.Meta(description="It holds, matters here, and no other condition explains it")]
    blocking: Annotated[bool, msgspec.Meta(description="It makes the pod unready now")]
    relevant: bool
    reason: Annotated[str | None, msgspec.Meta(description="A token of a closed set per code")]
    message: str
    remedy: str
    evidence: tuple[str, ...]
    since: _Seconds
    consequence_of: Annotated[str | None, msgspec.Meta(description="The code that explains this one")]
    gpus: tuple[GpuRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentItem:
    """One item of the environment's identity."""

    value: str
    source: Annotated[str, msgspec.Meta(description="The probe that read it")]
    scope: Annotated[Scope | None, msgspec.Meta(description="Whose environment it was read from")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingReport:
    """Where the sidecar stands, and why it thinks so."""

    placement: Placement
    placement_why: str
    processes: Processes
    processes_why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionReport:
    """A change of a condition's status or of the readiness."""

    at: _Seconds
    subject: str
    before: str
    after: str
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the sidecar knows, by its own account. Each probe adds the sections it declares."""

    schema_version: int
    version: Annotated[str, msgspec.Meta(description="Version of the sidecar")]
    generation: int
    taken_at: _Seconds
    verdict: VerdictReport
    conditions: tuple[ConditionReport, ...]
    probes: dict[str, ProbeReport]
    environment: dict[str, EnvironmentItem]
    standing: StandingReport
    history: tuple[TransitionReport, ...]


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
    )
    sections: dict[str, Any] = {}
    for probe in catalog.probes:
        sections |= dict.fromkeys(probe.sections)
        result = snapshot.results.get(probe.name)
        if result is not None and result.facts is not None:
            try:
                sections |= probe.report(result.facts)
            except Exception:  # noqa: BLE001 - one probe's defect must not silence all others
                _log.exception("the report of a probe was left out", probe=probe.name)
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
    own = set(Report.__dataclass_fields__)
    for probe in catalog.probes:
        if taken := probe.sections.keys() & (own | sections.keys()):
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
        relevant=condition.relevant,
        reason=condition.reason,
        message=condition.message,
        remedy=condition.remedy,
        evidence=condition.evidence,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    """Conditions of one probe that could not be judged for the same reason."""

    probe: str
    reason: str
    message: str
    codes: tuple[str, ...]


def causes(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Give the active conditions, what gates first, then the worst first, else in the catalogue's order."""
    active = [condition for condition in report["conditions"] if condition["active"]]
    return sorted(active, key=lambda one: (not one["blocking"], -Severity(one["severity"]).rank))


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
    """Give what matters here and could not be judged, grouped by probe and reason."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in report["conditions"]:
        if one["status"] == Status.UNKNOWN and one["relevant"] and one["consequence_of"] is None:
            groups.setdefault((one["probe"], one["reason"] or "not-judged"), []).append(one)
    return [
        Unknowns(
            probe=probe,
            reason=reason,
            message=next((one["message"] for one in members if one["message"]), ""),
            codes=tuple(one["code"] for one in members),
        )
        for (probe, reason), members in groups.items()
    ]


def headline(report: Mapping[str, Any]) -> str:
    """Give the whole report in one sentence that starts with its level."""
    found = report["verdict"]["level"]
    if found in (Level.CRITICAL, Level.WARNING):
        worst = [one for one in causes(report) if one["severity"] == found]
        more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
        return _one_line(f"{found}: {worst[0]['code']}: {worst[0]['message'] or worst[0]['title']}{more}")
    if found == Level.UNKNOWN:
        groups = unknowns(report)
        count = sum(len(group.codes) for group in groups)
        reasons = ", ".join(dict.fromkeys(group.reason for group in groups))
        return _one_line(f"unknown: {count} condition{'s' * (count != 1)} could not be judged ({reasons})")
    return "ok: everything that matters here was judged and nothing is wrong"


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give the few facts that people look for first, as (name, sentence). "unknown" where nobody knows."""
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


def _server_fact(report: Mapping[str, Any]) -> str:
    server = _section(report, "server") or {}
    up = server.get("up")
    state = "unknown" if up is None else "answers" if up else "does not answer"
    version = server.get("version") or _item(report, "sglang")
    return f"{state}, SGLang {version}" if version else state


# -- the text -------------------------------------------------------------------------------------

_COLORS = {Level.OK: "32", Level.WARNING: "33", Level.CRITICAL: "31", Level.UNKNOWN: "35", "info": "36"}
_IN_FACTS = frozenset({"driver", "kernel_module", "cuda_driver", "gpu_model"})
"""Items of the environment that the facts already say."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What would act on a terminal: a message may quote what a child process printed."""


def text(report: Mapping[str, Any], *, verbose: bool, color: bool = False) -> str:
    """Give the report as ``check`` prints it: the verdict first, then causes, unknowns and facts.

    ``verbose`` adds every judged condition, the probes' runs and the history. ``color`` adds ANSI colours.
    """
    lines = [_paint(headline(report), report["verdict"]["level"], color=color), _readiness_line(report)]
    for cause in causes(report):
        lines += ["", *_cause_lines(report, cause, color=color)]
    if groups := unknowns(report):
        lines += ["", "could not be judged:"]
        for group in groups:
            lines += _entry(f"{group.probe} ({group.reason})", group.message or "no reason was given")
            lines.append(f"    {', '.join(group.codes)}")
    lines += ["", *_aligned(facts(report)), "", *_aligned(_versions(report))]
    if verbose:
        lines += _verbose_lines(report)
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


def when(seconds: float | None) -> str:
    """Give a time as people read it, in UTC. Empty for None and for what is no time."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def _readiness_line(report: Mapping[str, Any]) -> str:
    verdict = report["verdict"]
    if verdict["pending"]:
        return "readiness: not ready, the first driver round has not ended"
    if verdict["ready"]:
        return "readiness: ready"
    return f"readiness: not ready because of {', '.join(verdict['blockers'])}"


def gpu_names(cause: Mapping[str, Any]) -> str:
    """Name the GPUs that a condition of the report concerns: index and uuid, or what of them is known."""
    named = ((one["gpu"], one["uuid"]) for one in cause["gpus"])
    return ", ".join(f"{index} ({uuid})" if index and uuid else index or uuid for index, uuid in named)


def _cause_lines(report: Mapping[str, Any], cause: Mapping[str, Any], *, color: bool) -> list[str]:
    reason = f" ({cause['reason']})" if cause["reason"] else ""
    gates = ", gates readiness" if cause["blocking"] else ""
    severity = _paint(cause["severity"], cause["severity"], color=color)
    lines = [f"{severity}: {cause['code']}{reason}{gates}", *_indented(cause["message"] or cause["title"], "  ")]
    if cause["gpus"]:
        lines.append(f"  GPUs: {_clean(gpu_names(cause))}")
    for item in cause["evidence"]:
        lines += _indented(item, "  evidence: ")
    lines += _indented(cause["remedy"], "  fix: ")
    lines += [
        f"  consequence: {one['code']}" + (" (could not be judged)" if one["status"] == Status.UNKNOWN else "")
        for one in consequences(report, cause["code"])
        if one["status"] != Status.FALSE
    ]
    return lines


def _versions(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(item["value"])) for name, item in report["environment"].items() if name not in _IN_FACTS]


def _verbose_lines(report: Mapping[str, Any]) -> list[str]:
    standing = report["standing"]
    lines = ["", "where the sidecar stands:"]
    lines += _entry(f"placement {standing['placement']}", standing["placement_why"])
    lines += _entry(f"processes {standing['processes']}", standing["processes_why"])
    lines += ["", "probes:"]
    for name, probe in report["probes"].items():
        seconds = "" if probe["duration"] is None else f" in {probe['duration']:.3f} s"
        place = f" at {probe['where']}" if probe["where"] else ""
        lines += _entry(f"{name} {probe['outcome']}{place}{seconds}", probe["detail"])
    rest = [one for one in report["conditions"] if not one["active"]]
    lines += ["", "conditions that are not active:"]
    lines += [f"  {one['code']}: {_state(one)}" for one in rest]
    if report["history"]:
        lines += ["", "history:"]
        for one in report["history"]:
            reason = f" ({one['reason']})" if one["reason"] else ""
            lines.append(_clean(f"  {when(one['at'])}  {one['subject']}: {one['before']} -> {one['after']}{reason}"))
    return lines


def _state(condition: Mapping[str, Any]) -> str:
    """Give the status of a condition that is not active, in words."""
    if not condition["relevant"]:
        return "does not concern this server"
    if condition["consequence_of"] is not None:
        return f"explained by {condition['consequence_of']}"
    if condition["status"] == Status.UNKNOWN:
        return f"unknown ({condition['reason'] or 'not-judged'})"
    return "judged and fine"


def _entry(name: str, sentence: str) -> list[str]:
    return _indented(f"{name}: {sentence}" if sentence else name, "  ")


def _indented(content: str, prefix: str) -> list[str]:
    """Lines of ``content`` after ``prefix``; further ones stand below the first."""
    first, *more = _clean(content).splitlines() or [""]
    return [prefix + first, *(" " * len(prefix) + line for line in more)]


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {_one_line(value)}" for name, value in rows]


def _paint(content: str, kind: str, *, color: bool) -> str:
    return f"\x1b[1;{_COLORS[kind]}m{content}\x1b[0m" if color and kind in _COLORS else content


def _clean(content: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", content)


def _one_line(content: str) -> str:
    return " ".join(_clean(content.replace("\n", " ")).split())
