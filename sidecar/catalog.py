"""One list of everything the agent can say: probes, metric families, conditions, settings.

The exposition, the report, the endpoints, the documentation and the tests all read this list, so none of
them can name something that the others do not know.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import structlog
from msgspec import Struct

from sidecar import probes as probe_package
from sidecar.config import SETTINGS, Setting, with_options
from sidecar.model import ConditionType, Family, Observed, Probe, Result, Scope

PREFIX = "sglang_sidecar_"
"""What every exported family's name starts with; `Family.name` leaves it out."""

AGENT_FAMILIES: tuple[Family, ...] = (
    Family(
        name="build_info",
        kind="info",
        help="Version of the sidecar and of the Python that runs it; always 1",
        labels=("version", "python_version"),
    ),
    Family(
        name="demo",
        kind="gauge",
        help="1 while a recorded scenario is shown instead of this machine; absent otherwise",
    ),
    Family(name="ready", kind="gauge", help="1 when /readyz answers 200, 0 when it answers 503"),
    Family(
        name="ready_transitions_total",
        kind="counter",
        help="Changes of the readiness verdict since the sidecar started, by the verdict changed to",
        labels=("to",),
    ),
    Family(
        name="condition_transitions_total",
        kind="counter",
        help="Beginnings and ends of conditions being active since the sidecar started, of all conditions together",
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
    Family(
        name="environment_changes_total",
        kind="counter",
        help=(
            "Changes of the environment's item that were seen, across restarts where `state_dir` is set; "
            "what was unknown in between or before is no change"
        ),
        labels=("item",),
    ),
    Family(
        name="environment_last_change_timestamp_seconds",
        kind="gauge",
        help="When a change of the item was last seen, in seconds since the epoch; absent while there was none",
        labels=("item",),
    ),
    Family(
        name="baseline_loaded",
        kind="gauge",
        help="1 when the baseline could be read, 0 when not; absent where none is set",
    ),
    Family(
        name="drift_items",
        kind="gauge",
        help="Number of items that are not as the baseline wants them; absent where none is loaded",
    ),
    Family(
        name="drift",
        kind="gauge",
        help="1 while the item is not as the baseline wants it; absent otherwise",
        labels=("item",),
    ),
    Family(
        name="tls_certificate_not_after_timestamp_seconds",
        kind="gauge",
        help="When the certificate that is served ends, in seconds since the epoch; absent without TLS",
    ),
    Family(
        name="access_renewal_failing",
        kind="gauge",
        help=(
            "1 while what the file holds now cannot be taken, so that what was loaded before stays in force, else 0; "
            "by file: certificate (with its key), client_ca, token; absent for one that is not set"
        ),
        labels=("file",),
    ),
)
"""The families that belong to the agent itself rather than to one probe."""

FIRST_ROUND = "driver"
"""The probe whose first round readiness waits for (and only its: no other question is asked of every server)."""

CAUSE_ENDED = "cause-ended"
"""The token of what was the consequence of a condition that ended, until its own probe looks again."""

COMMON_REASONS: Mapping[str, str] = {
    "pending": "the probe has not finished its first round",
    "expired": "what was known is too old",
    "not-judged": "the probe's facts do not tell",
    "probe-skipped": "the probe's question does not arise here",
    "probe-unavailable": "what the probe was told to ask, as an interpreter, is not there or cannot be used",
    "probe-timeout": "the probe did not answer in time, and what was known is too old",
    "probe-crashed": "the probe's child process ended without an answer, and what was known is too old",
    "probe-error": "the probe failed, which is a bug of the sidecar",
    CAUSE_ENDED: "what explained it ended, and its probe has not looked since",
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


class IdentityItem(Struct, frozen=True, kw_only=True):
    """One item of the environment's identity: its value and the probe that read it."""

    value: str
    probe: str


class Catalog(Struct, frozen=True, kw_only=True):
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
    def settings(self) -> tuple[Setting, ...]:
        """Every setting: the agent's own, then those that probes declare."""
        return with_options(option for probe in self.probes for option in probe.options)

    @property
    def by_name(self) -> Mapping[str, Probe[Any]]:
        """The probes by name, in their order."""
        return {probe.name: probe for probe in self.probes}

    def environment(self, results: Mapping[str, Result[Any]]) -> Mapping[str, IdentityItem]:
        """Merge the facts that are alive into the environment's identity, item by item and sorted.

        Where two probes know the same item, the packages probe wins, then the earlier probe.
        """
        return {
            item: IdentityItem(value=one.value, probe=one.source.partition("/")[0])
            for item, one in self.observed(results).items()
            if one.value is not None
        }

    def observed(self, results: Mapping[str, Result[Any]]) -> Mapping[str, Observed]:
        """What is known of the environment's items: value, source and build, and what is proven absent.

        An item that one probe knows is not absent because another one did not find it.
        """
        merged: dict[str, Observed] = {}
        for probe in sorted(self.probes, key=lambda probe: probe.name != _IDENTITY_FIRST):
            result = results.get(probe.name)
            if result is None or result.facts is None:
                continue
            try:
                items, builds = probe.identity(result.facts), probe.builds(result.facts)
            except Exception:  # noqa: BLE001 - one probe's defect must not silence all others
                _log.exception("the identity of a probe was left out", probe=probe.name)
                continue
            source = _source(probe.name, result)
            for item, value in items.items():
                if item not in merged or (merged[item].value is None and value is not None):
                    merged[item] = Observed(value=value, source=source, build=builds.get(item))
        return dict(sorted(merged.items()))


def _source(probe: str, result: Result[Any]) -> str:
    """Name a probe and whose environment it read: another scope is another environment."""
    scope = getattr(result.facts, "scope", None)
    return f"{probe}/{scope.value}" if isinstance(scope, Scope) else probe


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
    for probe in declared:
        known = {family for _, family in families if family.shared}
        families += [(probe.name, family) for family in probe.families if family not in known]
    types = [(probe.name, condition) for probe in declared for condition in probe.conditions]
    conditions = {condition.code: condition for _, condition in types}
    requirable: dict[str, tuple[str, ...]] = {}
    for probe in declared:
        for name, codes in probe.requirable.items():
            # A feature may rest on conditions of more than one probe; their codes add up.
            requirable[name] = (*requirable.get(name, ()), *codes)

    settings = [(setting.key, "the agent") for setting in SETTINGS]
    settings += [(option.key, probe.name) for probe in declared for option in probe.options]

    problems = [
        *_repeated("probe", ((probe.name, probe.name) for probe in declared)),
        *_repeated("family", ((family.name, where) for where, family in families)),
        *_repeated("condition", ((condition.code, where) for where, condition in types)),
        *_repeated("setting", settings),
        *(f"setting {key} is not a valid name" for key, _ in settings if not _FAMILY_NAME.match(key)),
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
    references = [(f"condition {code}", condition.causes) for code, condition in conditions.items()]
    references += [(f"requirement {name}", codes) for name, codes in requirable.items()]
    for where, codes in references:
        for code in codes:
            if code not in conditions:
                yield f"{where} refers to {code}, which nobody declares"


def _cycles(conditions: Mapping[str, ConditionType]) -> Iterable[str]:
    """Find conditions that explain themselves through others: each would silence the next, and none would show."""
    for code in conditions:
        seen: set[str] = set()
        frontier = set(conditions[code].causes)
        while frontier:
            seen |= frontier
            frontier = {cause for known in frontier if known in conditions for cause in conditions[known].causes} - seen
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
