"""One list of everything the agent can say: probes, metric families, conditions, settings.

The exposition, the report, the endpoints, the documentation and the tests all read this list, so none of
them can name something that the others do not know. ``python -m sidecar.catalog --write docs/`` writes the
generated pages of the documentation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import structlog

from sidecar import probes as probe_package
from sidecar.config import SETTINGS
from sidecar.model import ConditionType, Family, Probe, Result

PREFIX = "sglang_sidecar_"
"""What every exported family's name starts with; `Family.name` leaves it out."""

AGENT_FAMILIES: tuple[Family, ...] = (
    Family(
        name="build_info",
        kind="info",
        help="Version of the sidecar and of the Python that runs it; always 1",
        labels=("version", "python_version"),
    ),
    Family(name="ready", kind="gauge", help="1 when /readyz answers 200, 0 when it answers 503"),
    Family(
        name="ready_transitions_total",
        kind="counter",
        help="Changes of the readiness verdict since the sidecar started, by the verdict changed to",
        labels=("to",),
    ),
    Family(
        name="condition_active",
        kind="gauge",
        help=(
            "1 while the condition is active, 0 when it was judged and does not hold; "
            "absent when unknown, irrelevant or explained by another active condition"
        ),
        labels=("code", "severity"),
    ),
    Family(
        name="condition_unknown",
        kind="gauge",
        help="1 while the condition concerns this server and could not be judged; absent otherwise",
        labels=("code",),
    ),
    Family(
        name="gpu_condition_active",
        kind="gauge",
        help="1 for each GPU that an active condition concerns; absent otherwise",
        labels=("code", "gpu", "uuid"),
    ),
    Family(
        name="probe_success",
        kind="gauge",
        help=(
            "1 when the last run of the probe gave an answer or found that its question does not arise, "
            "0 when it failed; absent before the first run ended"
        ),
        labels=("probe",),
    ),
    Family(
        name="probe_stuck",
        kind="gauge",
        help="1 while a child process of the probe cannot be ended; absent otherwise",
        labels=("probe",),
    ),
    Family(
        name="probe_duration_seconds",
        kind="gauge",
        help="How long the last run of the probe took",
        labels=("probe",),
    ),
    Family(
        name="probe_last_success_timestamp_seconds",
        kind="gauge",
        help="When the probe last gave an answer, in seconds since the epoch",
        labels=("probe",),
    ),
    Family(
        name="probe_runs_total",
        kind="counter",
        help="Runs of the probe since the sidecar started, by outcome",
        labels=("probe", "outcome"),
    ),
    Family(
        name="environment_info",
        kind="info",
        help="The identity of the environment: one series per item, its version in the label value; always 1",
        labels=("item", "value"),
    ),
)
"""The families that belong to the agent itself rather than to one probe."""

FIRST_ROUND = "driver"
"""The probe whose first round readiness waits for (and only its: no other question is asked of every server)."""

COMMON_REASONS: Mapping[str, str] = {
    "pending": "the probe has not finished its first round",
    "expired": "what was known is too old",
    "not-judged": "the probe's facts do not tell",
    "probe-skipped": "the probe's question does not arise here",
    "probe-timeout": "the probe did not answer in time, and what was known is too old",
    "probe-crashed": "the probe's child process ended without an answer, and what was known is too old",
    "probe-error": "the probe failed, which is a bug of the sidecar",
    "judge-failed": "the judgement failed, which is a bug of the sidecar",
}
"""Tokens that any condition may carry while it is unknown."""

_log = structlog.get_logger()

_FAMILY_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_LABEL_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_TOKEN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_SUFFIXES = {"counter": "_total", "info": "_info"}
_IDENTITY_FIRST = "packages"
"""The probe whose items win: what is installed in the server's environment, read from its own metadata,
outranks the same version as another source repeats it."""


class CatalogError(Exception):
    """Two declarations contradict each other, or one breaks a naming rule. A defect of the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityItem:
    """One item of the environment's identity: its value and the probe that read it."""

    value: str
    probe: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything the agent can say, checked for contradictions.

    ``owner`` maps each condition's code to the name of the probe that judges it. ``requirable`` maps each
    name that the setting ``require`` accepts to the codes it makes relevant.
    """

    probes: tuple[Probe[Any], ...]
    families: tuple[Family, ...]
    conditions: Mapping[str, ConditionType]
    owner: Mapping[str, str]
    requirable: Mapping[str, tuple[str, ...]]

    @property
    def by_name(self) -> Mapping[str, Probe[Any]]:
        """The probes by name, in their order."""
        return {probe.name: probe for probe in self.probes}

    def environment(self, results: Mapping[str, Result[Any]]) -> Mapping[str, IdentityItem]:
        """Merge the facts that are alive into the environment's identity, item by item and sorted.

        Where two probes know the same item, the packages probe wins, then the earlier probe.
        """
        ranked = sorted(self.probes, key=lambda probe: probe.name != _IDENTITY_FIRST)
        merged: dict[str, IdentityItem] = {}
        for probe in ranked:
            result = results.get(probe.name)
            if result is None or result.facts is None:
                continue
            try:
                items = probe.identity(result.facts)
            except Exception:  # noqa: BLE001 - one probe's defect must not silence all others
                _log.exception("the identity of a probe was left out", probe=probe.name)
                continue
            for item, value in items.items():
                merged.setdefault(item, IdentityItem(value=value, probe=probe.name))
        return dict(sorted(merged.items()))


def discover(package: ModuleType = probe_package) -> tuple[Probe[Any], ...]:
    """Find the ``PROBE`` of each public module of ``package``, in the order of the modules' names.

    Raises `CatalogError` for a public module that declares none: helpers start with an underscore.
    """
    found: list[Probe[Any]] = []
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if module.name.startswith("_"):
            continue
        name = f"{package.__name__}.{module.name}"
        probe = getattr(importlib.import_module(name), "PROBE", None)
        if not isinstance(probe, Probe):
            raise CatalogError(f"{name} declares no PROBE")
        found.append(probe)
    return tuple(found)


def build(probes: Iterable[Probe[Any]]) -> Catalog:
    """Put together the catalogue of these probes and of the agent itself.

    Raises `CatalogError` that lists every contradiction: a name, code or family declared twice, a family or
    token that breaks the naming rules, a code that is referred to but declared nowhere.
    """
    declared = tuple(probes)
    families = [("the agent", family) for family in AGENT_FAMILIES]
    families += [(probe.name, family) for probe in declared for family in probe.families]
    types = [(probe.name, condition) for probe in declared for condition in probe.conditions]
    conditions = {condition.code: condition for _, condition in types}
    requirable: dict[str, tuple[str, ...]] = {}
    for probe in declared:
        for name, codes in probe.requirable.items():
            # A feature may rest on conditions of more than one probe; their codes add up.
            requirable[name] = (*requirable.get(name, ()), *codes)

    problems = [
        *_repeated("probe", ((probe.name, probe.name) for probe in declared)),
        *_repeated("family", ((family.name, where) for where, family in families)),
        *_repeated("condition", ((condition.code, where) for where, condition in types)),
        *(problem for _, family in families for problem in _family_problems(family)),
        *(problem for _, condition in types for problem in _condition_problems(condition)),
        *_reference_problems(conditions, requirable),
        *_cycles(conditions),
        # /readyz/X takes either.
        *(f"{probe.name} is both a probe and a condition" for probe in declared if probe.name in conditions),
    ]
    if problems:
        raise CatalogError("; ".join(problems))
    return Catalog(
        probes=declared,
        families=tuple(family for _, family in families),
        conditions=MappingProxyType(conditions),
        owner=MappingProxyType({condition.code: where for where, condition in types}),
        requirable=MappingProxyType(requirable),
    )


def _repeated(kind: str, declarations: Iterable[tuple[str, str]]) -> Iterable[str]:
    """Say which names are declared more than once, and by whom."""
    owners: dict[str, str] = {}
    for name, where in declarations:
        if name in owners:
            yield f"{kind} {name} is declared by {owners[name]} and by {where}"
        owners.setdefault(name, where)


def _reference_problems(
    conditions: Mapping[str, ConditionType], requirable: Mapping[str, tuple[str, ...]]
) -> Iterable[str]:
    """Say which codes are referred to and declared nowhere."""
    references = [(f"condition {code}", condition.depends_on) for code, condition in conditions.items()]
    references += [(f"requirement {name}", codes) for name, codes in requirable.items()]
    for where, codes in references:
        for code in codes:
            if code not in conditions:
                yield f"{where} refers to {code}, which nobody declares"


def _cycles(conditions: Mapping[str, ConditionType]) -> Iterable[str]:
    """Find conditions that explain themselves through others: each would silence the next, and none would show."""
    for code in conditions:
        seen: set[str] = set()
        frontier = set(conditions[code].depends_on)
        while frontier:
            seen |= frontier
            frontier = {
                cause for known in frontier if known in conditions for cause in conditions[known].depends_on
            } - seen
        if code in seen:
            yield f"condition {code} depends on itself"


def _family_problems(family: Family) -> Iterable[str]:
    """Say what breaks the rules for names of metrics."""
    if family.kind not in {"gauge", "counter", "info"}:
        yield f"family {family.name} is of the unknown kind {family.kind}"
    if not _FAMILY_NAME.match(family.name):
        yield f"family {family.name} is not a valid metric name"
    for kind, suffix in _SUFFIXES.items():
        if family.name.endswith(suffix) != (family.kind == kind):
            yield f"family {family.name} is a {family.kind}: {suffix} belongs to every {kind} and to nothing else"
    if not family.help.strip() or family.help != family.help.strip() or "\n" in family.help:
        yield f"family {family.name} needs a help text of one line"
    if len(set(family.labels)) != len(family.labels) or not all(_LABEL_NAME.match(label) for label in family.labels):
        yield f"family {family.name} has labels that are invalid or repeated"


def _condition_problems(condition: ConditionType) -> Iterable[str]:
    """Say what breaks the rules for codes and reasons, which are public tokens."""
    for token in (condition.code, *condition.reasons):
        if not _TOKEN.match(token):
            yield f"condition {condition.code}: {token!r} is not a kebab-case token"


# -- the generated pages of the documentation -----------------------------------------------------

_GENERATED_COMMENT = "Generated by `python -m sidecar.catalog --write docs/`; edit the declarations instead."
_GENERATED = f"<!-- {_GENERATED_COMMENT} -->\n"


def markdown_metrics(catalog: Catalog) -> str:
    """Write the page of all metric families, by owner."""
    lines = [
        _GENERATED,
        "# Metrics",
        "",
        (
            f"Every name starts with `{PREFIX}`. A series that does not apply, or whose value nobody knows, is "
            "absent: there is no NaN and no -1. The sidecar's own `process_*` families come with them."
        ),
    ]
    owners: list[tuple[str, Sequence[Family]]] = [("The sidecar itself", AGENT_FAMILIES)]
    owners += [(f"Probe `{probe.name}`: {probe.title}", probe.families) for probe in catalog.probes]
    for title, families in owners:
        if not families:
            continue
        rows = [
            (f"`{PREFIX}{family.name}`", family.kind, ", ".join(f"`{label}`" for label in family.labels), family.help)
            for family in families
        ]
        lines += ["", f"## {_text(title)}", "", *_table(("name", "kind", "labels", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def markdown_conditions(catalog: Catalog) -> str:
    """Write the page of all conditions: an overview, then one section per code, which is the alert's runbook."""
    lines = [
        _GENERATED,
        "# Conditions",
        "",
        (
            "A condition is active, judged and fine, or unknown; unknown is neither healthy nor broken. An active "
            "condition of gate `serving` makes the pod unready; one of gate `launch` does so only while no server "
            "answers; one of gate `never` only alerts. A condition that another active one explains is listed as its "
            "consequence and does not alert."
        ),
        "",
        *_table(
            ("code", "severity", "gate", "probe", "what it means"),
            [
                (
                    f"[`{code}`](#{code})",
                    condition.severity.value,
                    condition.gate.value,
                    f"`{catalog.owner[code]}`",
                    condition.title,
                )
                for code, condition in catalog.conditions.items()
            ],
        ),
        "",
        "Reasons that any condition may give while it is unknown:",
        "",
        *_table(("reason", "meaning"), [(f"`{token}`", meaning) for token, meaning in COMMON_REASONS.items()]),
    ]
    for code, condition in catalog.conditions.items():
        lines += ["", *_condition_section(condition, catalog.owner[code])]
    return "\n".join(lines) + "\n"


def _condition_section(condition: ConditionType, probe: str) -> list[str]:
    """Write the lines of one condition's section."""
    bad, good = condition.hold
    lines = [
        f"## {condition.code}",
        "",
        f"{_text(condition.title)}",
        "",
        f"- **Severity** {condition.severity.value}, **gate** {condition.gate.value}, judged by probe `{probe}`",
        f"- **When** {_text(condition.when)}",
        f"- **Remedy** {_text(condition.remedy)}",
    ]
    if condition.depends_on:
        lines.append("- **Explained by** " + ", ".join(f"[`{code}`](#{code})" for code in condition.depends_on))
    if condition.uses is not None:
        otherwise = "shown as info, never gating" if condition.info_when_unused else "irrelevant"
        lines.append(f"- **Concerns** servers that use {condition.uses.value}; for others it is {otherwise}")
    if condition.hold != (1, 1):
        lines.append(
            f"- **Hold** {bad} bad or {good} good rounds before a published verdict changes; "
            "the first judgement and facts that cannot become more certain take effect at once"
        )
    if condition.reasons:
        reasons = [(f"`{token}`", meaning) for token, meaning in condition.reasons.items()]
        lines += ["", *_table(("reason", "meaning"), reasons)]
    return lines


def markdown_settings(catalog: Catalog) -> str:
    """Write the page of all settings."""
    rows = [
        (
            f"`{setting.key}`",
            f"`{setting.flag} {setting.metavar}`" + (" (repeatable)" if setting.repeatable else ""),
            f"`{setting.variable}`",
            setting.default,
            setting.doc,
        )
        for setting in SETTINGS
    ]
    lines = [
        _GENERATED,
        "# Settings",
        "",
        (
            "Each setting is a key of the TOML file, a variable of the environment and a flag. A flag wins over the "
            "environment, the environment over the file, the file over the default. An unknown key or flag is an "
            "error; an unknown `SGLANG_SIDECAR_*` variable is a warning, and those that Kubernetes injects for "
            "services are ignored. The file is named by `--config` or `SGLANG_SIDECAR_CONFIG`. "
            "`sglang-sidecar config show` prints each effective value and where it came from."
        ),
        "",
        *_table(("TOML key", "flag", "environment", "default", "meaning"), rows),
        "",
        "## Values of `require`",
        "",
        *_table(
            ("value", "conditions that then concern this server"),
            [
                (f"`{name}`", ", ".join(f"`{code}`" for code in codes))
                for name, codes in sorted(catalog.requirable.items())
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write the lines of a Markdown table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(_text(cell).replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def _text(text: str) -> str:
    """Put ``text`` on one line, with what Markdown would take for HTML escaped outside of code."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


# -- on the command line ------------------------------------------------------------------------------


def explain(catalog: Catalog, code: str | None) -> str:
    """Write what is known of a condition for people, or the list of all codes. Raises KeyError for no such code."""
    if code is None:
        width = max((len(known) for known in catalog.conditions), default=0)
        lines = [f"{known:<{width}}  {condition.title}" for known, condition in catalog.conditions.items()]
        return "\n".join(lines) + "\n"
    condition = catalog.conditions[code]
    # Nothing is wrapped: a command in a remedy must stay whole when it is copied.
    lines = [
        f"{code}: {condition.title}",
        "",
        f"severity: {condition.severity.value}, gate {condition.gate.value}, judged by probe {catalog.owner[code]}",
        f"when: {condition.when}",
        f"remedy: {condition.remedy}",
    ]
    if condition.depends_on:
        lines.append(f"explained by: {', '.join(condition.depends_on)}")
    if condition.reasons:
        lines += ["", "reasons:", *(f"  {token}: {meaning}" for token, meaning in condition.reasons.items())]
    return "\n".join(lines) + "\n"


def documents(catalog: Catalog) -> Mapping[str, str]:
    """Generate the files of the documentation: name -> content."""
    # The schema belongs to the report, which itself reads the catalogue: only this generator, which no
    # serving code calls, needs both.
    from sidecar import report

    return {
        "metrics.md": markdown_metrics(catalog),
        "conditions.md": markdown_conditions(catalog),
        "settings.md": markdown_settings(catalog),
        "report.schema.json": json.dumps({"$comment": _GENERATED_COMMENT} | report.schema(catalog), indent=2) + "\n",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the generated files into a folder. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sidecar.catalog", description="Generate the documentation's lists."
    )
    parser.add_argument("--write", required=True, type=Path, metavar="FOLDER", help="where the files go")
    folder: Path = parser.parse_args(arguments).write
    for name, content in documents(build(discover())).items():
        (folder / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
