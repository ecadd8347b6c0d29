"""The snapshot as Prometheus metrics: text or OpenMetrics, plain or gzip.

Families are built fresh from the snapshot, so no series outlives the fact behind it, and each variant is
rendered at most once per generation: a scrape writes bytes that are there already. Of a new generation only the
families are encoded whose series are others than they were; between two scrapes most are not.
"""

from __future__ import annotations

import gzip
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import structlog
from msgspec import Struct

from sidecar import __version__
from sidecar.catalog import PREFIX, Catalog
from sidecar.drift import ITEMS
from sidecar.model import Condition, Family, Outcome, Sample, Snapshot, Status

# The client library decides at import, for good, whether values go to files in the folder that these
# variables name. A container that copies the server's environment inherits them; the files in there are the
# server's (prometheus/client_python#1015).
for _variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
    os.environ.pop(_variable, None)

from prometheus_client import ProcessCollector  # noqa: E402 - must not be imported before the lines above
from prometheus_client.exposition import choose_encoder  # noqa: E402 - as above
from prometheus_client.metrics_core import (  # noqa: E402 - as above
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector  # noqa: E402 - as above

COUNTED_OUTCOMES = (Outcome.OK, Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.CRASHED, Outcome.ERROR)
"""The outcomes of ``probe_runs_total``, present from the start so that the first failure is an increase."""

READY_NAMES: Mapping[bool, str] = MappingProxyType({True: "ready", False: "not-ready"})
"""The values of the label ``to`` of ``ready_transitions_total``."""

ACTIVE_NAMES: Mapping[bool, str] = MappingProxyType({True: "active", False: "inactive"})
"""Those of ``condition_transitions_total``."""

_SUCCESSES = (Outcome.OK, Outcome.SKIPPED)
_OPENMETRICS = "application/openmetrics-text"
_TEXT = "text/plain"
_END = b"# EOF\n"
"""How an OpenMetrics exposition ends."""
_ESCAPINGS = frozenset({"allow-utf-8", "underscores", "dots", "values"})

_Series = tuple[tuple[tuple[str, ...], float], ...]
"""A family's series in their order: label values and value."""

_log = structlog.get_logger()


class Rendered(Struct, frozen=True, kw_only=True):
    """A finished answer to a scrape."""

    body: bytes
    headers: Mapping[str, str]


class Exposition:
    """Renders snapshots, each variant of each generation at most once."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        process: Callable[[], Iterable[Metric]] | None = None,
        more: Callable[[], Iterable[Sample]] = tuple,
        python_version: str = platform.python_version(),
    ) -> None:
        """``process`` yields the families of the agent's own process; None reads them from /proc.

        ``more`` yields samples of the agent's families that are about nothing that a snapshot holds.
        """
        self._catalog = catalog
        self._process = process or ProcessCollector(registry=None).collect
        self._more = more
        self._python_version = python_version
        self._generation: int | None = None
        self._series: Sequence[tuple[Family, _Series]] = ()
        self._own: Sequence[Metric] = ()
        self._texts: dict[str, dict[str, tuple[_Series, bytes]]] = {}
        self._variants: dict[tuple[str, bool], Rendered] = {}
        self._reported: set[str] = set()

    def render(self, snapshot: Snapshot, *, accept: str, accept_encoding: str) -> Rendered:
        """Answer a scrape with these ``Accept`` and ``Accept-Encoding`` headers; empty ones mean plain text."""
        if snapshot.generation != self._generation:
            self._series = tuple(self._build(snapshot))
            self._own = tuple(self._process())
            self._variants = {}
            self._generation = snapshot.generation
        media_type, compressed = negotiate(accept), accepts_gzip(accept_encoding)
        rendered = self._variants.get((media_type, compressed))
        if rendered is None:
            plain = self._variants.get((media_type, False))
            rendered = _rendered(
                self._text(media_type) if plain is None else plain.body, media_type, compressed=compressed
            )
            self._variants[media_type, compressed] = rendered
        return rendered

    def _text(self, media_type: str) -> bytes:
        """Encode the current families, those anew that changed since this media type was last asked for.

        Kept is one text per media type that `negotiate` can choose, so that no client can add to them.
        """
        encode, _ = choose_encoder(media_type)
        before = self._texts.get(media_type, {})
        texts: dict[str, tuple[_Series, bytes]] = {}
        for family, series in self._series:
            known = before.get(family.name)
            if known is None or known[0] != series:
                known = (series, _body(encode, _metric(family, series)))
            texts[family.name] = known
        self._texts[media_type] = texts
        parts = [text for _, text in texts.values()]
        parts += [_body(encode, metric) for metric in self._own]
        if media_type.startswith(_OPENMETRICS):
            parts.append(_END)
        return b"".join(parts)

    def _build(self, snapshot: Snapshot) -> Iterable[tuple[Family, _Series]]:
        """Group the samples of the agent and of all live facts by family, in the catalogue's order."""
        by_family: dict[str, dict[tuple[str, ...], float]] = {family.name: {} for family in self._catalog.families}
        of_snapshot = agent_samples(snapshot, self._catalog, python_version=self._python_version)
        for sample in (*of_snapshot, *self._more()):
            by_family[sample.family][sample.labels] = sample.value
        for probe in self._catalog.probes:
            result = snapshot.results.get(probe.name)
            if result is None or result.facts is None:
                continue
            own = {family.name: family for family in probe.families}
            try:
                samples = tuple(probe.samples(result.facts))
            except Exception as error:  # noqa: BLE001 - one probe's defect must not silence all others
                self._report(f"{probe.name}: samples failed: {type(error).__name__}: {error}")
                continue
            for sample in samples:
                if problem := _problem(sample, own.get(sample.family), by_family):
                    self._report(f"{probe.name}: {problem}")
                elif not math.isnan(sample.value):
                    by_family[sample.family][sample.labels] = sample.value
        for family in self._catalog.families:
            if series := by_family[family.name]:
                yield family, tuple(series.items())

    def _report(self, problem: str) -> None:
        """Log a defect of the program once, not once per generation."""
        if problem not in self._reported and len(self._reported) < 100:
            self._reported.add(problem)
            _log.error("a sample was left out", problem=problem)


def agent_samples(snapshot: Snapshot, catalog: Catalog, *, python_version: str) -> Iterable[Sample]:
    """Yield the series of the families that belong to no probe."""
    yield Sample("build_info", (__version__, python_version), 1)
    if snapshot.demo is not None:
        yield Sample("demo", (), 1)
    yield Sample("ready", (), float(snapshot.verdict.ready))
    for ready, name in READY_NAMES.items():
        yield Sample("ready_transitions_total", (name,), snapshot.ready_transitions.get(ready, 0))
    for active, name in ACTIVE_NAMES.items():
        yield Sample("condition_transitions_total", (name,), snapshot.condition_transitions.get(active, 0))
    for condition in snapshot.conditions.values():
        yield from _condition_samples(condition)
    for probe in catalog.probes:
        yield from _probe_samples(snapshot, probe.name)
    for item, identity in catalog.environment(snapshot.results).items():
        yield Sample("environment_info", (item, identity.value), 1)
    yield from _drift_samples(snapshot)


def _drift_samples(snapshot: Snapshot) -> Iterable[Sample]:
    """Yield what changed and what is not as the baseline wants it. The counters are there from the start."""
    for item in ITEMS:
        yield Sample("environment_changes_total", (item,), snapshot.known.counts.get(item, 0))
    for item, at in snapshot.known.last_change.items():
        if item in ITEMS:
            yield Sample("environment_last_change_timestamp_seconds", (item,), at)
    if snapshot.baseline is None:
        return
    yield Sample("baseline_loaded", (), float(bool(snapshot.baseline.items)))
    if snapshot.baseline.items:
        yield Sample("drift_items", (), len(snapshot.drifts))
    for drift in snapshot.drifts:
        yield Sample("drift", (drift.item,), 1)


def _condition_samples(condition: Condition) -> Iterable[Sample]:
    """Yield a condition's series: none while it is irrelevant or explained by another one."""
    if not condition.relevant or condition.consequence_of is not None:
        return
    if condition.status is Status.UNKNOWN:
        yield Sample("condition_unknown", (condition.code,), 1)
        return
    yield Sample("condition_active", (condition.code, condition.severity.value), float(condition.active))
    if condition.active:
        for gpu, uuid in condition.gpus:
            yield Sample("gpu_condition_active", (condition.code, gpu, uuid), 1)


def _probe_samples(snapshot: Snapshot, name: str) -> Iterable[Sample]:
    """Yield what happened to a probe. Its counters are there from the start."""
    result = snapshot.results.get(name)
    runs = {} if result is None else result.runs
    for outcome in COUNTED_OUTCOMES:
        yield Sample("probe_runs_total", (name, outcome.value), runs.get(outcome, 0))
    if result is None:
        return
    if result.outcome is not Outcome.PENDING:
        yield Sample("probe_success", (name,), float(result.outcome in _SUCCESSES))
    if result.stuck:
        yield Sample("probe_stuck", (name,), 1)
    if result.duration is not None:
        yield Sample("probe_duration_seconds", (name,), result.duration)
    if result.last_success_at is not None:
        yield Sample("probe_last_success_timestamp_seconds", (name,), result.last_success_at)


def _problem(
    sample: Sample, family: Family | None, by_family: Mapping[str, Mapping[tuple[str, ...], float]]
) -> str | None:
    """Say what makes a sample invalid, or None. A single bad line would make a whole scrape invalid."""
    if family is None:
        return f"{sample.family} is not one of its families"
    if len(sample.labels) != len(family.labels):
        return f"{sample.family} has {len(sample.labels)} label values instead of {len(family.labels)}"
    if not all(isinstance(label, str) for label in sample.labels) or not isinstance(sample.value, (int, float)):
        return f"{sample.family} has a label that is no text or a value that is no number"
    if sample.labels in by_family[family.name]:
        return f"{sample.family} has two series with the same labels"
    return None


def _metric(family: Family, series: _Series) -> Metric:
    """Turn a family and its series into what the client library renders."""
    name = PREFIX + family.name
    if family.kind == "info":
        info = InfoMetricFamily(name.removesuffix("_info"), family.help)
        for labels, _ in series:
            info.add_metric([], dict(zip(family.labels, map(_encodable, labels), strict=True)))
        return info
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(name, family.help, labels=family.labels)
    for labels, value in series:
        metric.add_metric([_encodable(label) for label in labels], value)
    return metric


def _encodable(label: str) -> str:
    """Replace what UTF-8 cannot hold: file names and device names may carry undecodable bytes."""
    return label.encode("utf-8", "replace").decode("utf-8")


class _One(Collector):
    """A family in the shape that the client library's encoders take."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        """Return the family as it is."""
        return (self._metric,)


def _body(encode: Callable[[Collector], bytes], metric: Metric) -> bytes:
    """Encode one family, without the end of an exposition."""
    return encode(_One(metric)).removesuffix(_END)


def _rendered(body: bytes, media_type: str, *, compressed: bool) -> Rendered:
    """Make an answer of a text."""
    _, content_type = choose_encoder(media_type)
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if compressed:
        # No time in the header: the same generation gives the same bytes.
        body = gzip.compress(body, compresslevel=6, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Rendered(body=body, headers=MappingProxyType(headers))


# -- negotiation ------------------------------------------------------------------------------------


def negotiate(accept: str) -> str:
    """Reduce an ``Accept`` header to one of the few media types that the encoders are asked for.

    The client library's own choice ignores preferences, repeats any version that the client makes up, and
    raises on one that is no number; Prometheus 3 rejects a content type that it does not know
    (prometheus/prometheus#17086). Whatever cannot be served falls back to the classic text format.
    """
    best, best_quality = _TEXT, 0.0
    for item in accept.split(","):
        media_type, parameters = _parse(item)
        chosen = _supported(media_type, parameters)
        quality = _quality(parameters)
        if chosen is not None and quality > best_quality:
            best, best_quality = chosen, quality
    return best


def _supported(media_type: str, parameters: Mapping[str, str]) -> str | None:
    """Name the variant that satisfies one media range, or None."""
    version = parameters.get("version", "")
    if media_type == _OPENMETRICS and version in {"", "1.0.0"}:
        served = _OPENMETRICS
    elif media_type == _TEXT and version == "1.0.0":
        served = _TEXT
    elif (media_type == _TEXT and version in {"", "0.0.4"}) or media_type in {"*/*", "text/*"}:
        return _TEXT
    else:
        return None
    if not version:
        return served
    escaping = parameters.get("escaping", "")
    suffix = f";escaping={escaping}" if escaping in _ESCAPINGS else ""
    return f"{served};version={version}{suffix}"


def accepts_gzip(accept_encoding: str) -> bool:
    """Tell whether an ``Accept-Encoding`` header allows gzip."""
    allowed = {coding: _quality(parameters) for coding, parameters in map(_parse, accept_encoding.split(","))}
    return allowed.get("gzip", allowed.get("*", 0.0)) > 0


def _parse(item: str) -> tuple[str, Mapping[str, str]]:
    """Split one element of an ``Accept`` header into its name and its parameters."""
    name, *rest = item.split(";")
    pairs = (part.partition("=") for part in rest)
    return name.strip().lower(), {key.strip().lower(): value.strip().strip('"').lower() for key, _, value in pairs}


def _quality(parameters: Mapping[str, str]) -> float:
    """Read the preference from 0 to 1; what cannot be read counts as 0, that is, as refused."""
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
    return quality if 0 <= quality <= 1 else 0.0
