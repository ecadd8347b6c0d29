"""What changed: the environment's identity against what it was, and against what it should be.

Pure functions. Three rules hold for all of them: what nobody knows is never "removed"; an absence counts only where a
probe looked and found nothing; an item that was not looked at before is not a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from sidecar.model import Change, ChangeKind, Deviation, Drift, Expectation, Known, Observed

MIG = "mig"
"""The item that says of the GPUs whether they are in MIG mode: ``enabled``, ``disabled``, or both words."""

ITEMS = (
    "driver",
    "kernel_module",
    "cuda_driver",
    "gpu_model",
    MIG,
    "python",
    "sglang",
    "torch",
    "torch_cuda",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "sglang-kernel",
    "sgl-kernel",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "transformers",
)
"""Everything that the environment's identity can consist of, and so all that a baseline can name."""

RECENT = 50
"""Changes that are kept for the report; the counters go on."""


def advance(known: Known, observed: Mapping[str, Observed], now: float) -> Known:
    """Fold in what is known of each item at ``now``; returns ``known`` itself where nothing is new."""
    seen = dict(known.seen)
    changes: list[Change] = []
    for item, one in observed.items():
        before = seen.get((item, one.source))
        if before == one:
            continue
        seen[item, one.source] = one
        kind = None if before is None else difference(before, one)
        if before is not None and kind is not None:
            changes.append(Change(item=item, kind=kind, before=before.value, after=one.value, at=now))
    if seen == known.seen:
        return known
    counts, last = dict(known.counts), dict(known.last_change)
    for change in changes:
        counts[change.item] = counts.get(change.item, 0) + 1
        last[change.item] = now
    return Known(
        seen=MappingProxyType(seen),
        counts=MappingProxyType(counts),
        last_change=MappingProxyType(last),
        recent=(*known.recent, *changes)[-RECENT:],
    )


def resume(before: Known, since: Known, now: float) -> Known:
    """Put what was remembered, and could be read only by now, in front of what was seen ``since`` the start.

    What differs between the two changed while nobody looked. Of an item that changed since as well it is not known
    from which value, so that only those changes count.
    """
    known = before
    for (item, _source), one in since.seen.items():
        if not since.counts.get(item):
            known = advance(known, {item: one}, now)
    counts = {item: known.counts.get(item, 0) + since.counts.get(item, 0) for item in {**known.counts, **since.counts}}
    return Known(
        seen=MappingProxyType({**known.seen, **since.seen}),
        counts=MappingProxyType(counts),
        last_change=MappingProxyType({**known.last_change, **since.last_change}),
        recent=tuple(sorted((*known.recent, *since.recent), key=lambda change: change.at))[-RECENT:],
    )


def difference(before: Observed, after: Observed) -> ChangeKind | None:
    """How two sightings of one item by one source differ; None where they mean the same."""
    if before.value is None or after.value is None:
        if before.value == after.value:
            return None
        return ChangeKind.ADDED if before.value is None else ChangeKind.REMOVED
    if before.value == after.value:
        # A mark that is missing on one side proves nothing.
        rebuilt = before.build is not None and after.build is not None and before.build != after.build
        return ChangeKind.REBUILT if rebuilt else None
    return ChangeKind.REBUILT if _same_release(before.value, after.value) else ChangeKind.CHANGED


def _same_release(first: str, second: str) -> bool:
    try:
        return Version(first).public == Version(second).public
    except InvalidVersion:
        return False


# -- against a baseline -------------------------------------------------------------------------------


ABSENT = "absent"
"""What a baseline file writes for an item that must not be there."""


_OPERATORS = ("=", "!", "<", ">", "~", "^")
"""How a version specifier begins; the last one is that of other package managers, and no version begins so."""
_WILDCARD = re.compile(r"\d+(\.\d+)*\.[*xX]\Z")


def expectation(text: str) -> Expectation:
    """Read a baseline's value: ``absent``, a PEP 440 specifier (it starts with an operator), else an exact value.

    Raises ValueError, with a sentence, for what looks like a specifier and is none.
    """
    text = text.strip()
    if text == ABSENT:
        return Expectation()
    if text.startswith("===") and "," not in text and text[3:].strip():
        return Expectation(value=text[3:].strip())  # PEP 440: whatever it is, as a text
    if not text.startswith(_OPERATORS) and not _WILDCARD.match(text):
        return Expectation(value=text)
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        sentence = f"{text[:80]!r} looks like a version specifier and is none; write an exact value or, say, {_MEANT}"
        raise ValueError(sentence) from None
    return Expectation(specifier=text)


_MEANT = "'>=0.6.1,<0.7' or '==2.11.*'"


def written(wanted: Expectation) -> str:
    """An expectation as a baseline file writes it."""
    return wanted.specifier or (ABSENT if wanted.value is None else wanted.value)


def compare(baseline: Mapping[str, Expectation], observed: Mapping[str, Observed]) -> tuple[Drift, ...]:
    """The items that are known and not as the baseline wants them, in the baseline's order."""
    return tuple(_deviations(baseline, observed))


def _deviations(baseline: Mapping[str, Expectation], observed: Mapping[str, Observed]) -> Iterable[Drift]:
    for item, wanted in baseline.items():
        if item not in observed:
            continue  # unknown is never a drift
        value = observed[item].value
        deviation = _deviation(wanted, value)
        if deviation is not None:
            yield Drift(item=item, deviation=deviation, expected=written(wanted), observed=value)


def _deviation(wanted: Expectation, value: str | None) -> Deviation | None:
    absent_wanted = wanted.value is None and wanted.specifier is None
    if value is None:
        return None if absent_wanted else Deviation.MISSING
    if absent_wanted:
        return Deviation.UNEXPECTED
    if _fits(wanted, value):
        return None
    pinned = _pinned(wanted)
    return Deviation.OTHER_BUILD if pinned is not None and _same_release(pinned, value) else Deviation.DIFFERENT


def _pinned(wanted: Expectation) -> str | None:
    """The one version that is wanted, if it is one."""
    if wanted.specifier is None:
        return wanted.value
    operator, version = wanted.specifier[:2], wanted.specifier[2:].strip()
    return version if operator == "==" and "," not in version else None


def _fits(wanted: Expectation, value: str) -> bool:
    if wanted.specifier is None:
        return wanted.value == value
    try:
        return SpecifierSet(wanted.specifier).contains(Version(value), prereleases=True)
    except InvalidVersion:
        return False
