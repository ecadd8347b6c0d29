"""Hold-off: a published verdict changes only after enough rounds agree, unless the new fact is final."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from sidecar.model import Finding, Status


class Track(Struct, frozen=True, kw_only=True):
    """What is remembered of one condition between judgements.

    ``finding`` is the published one, ``since`` the time its status was first published. ``against`` counts
    the rounds in a row that disagreed with it; ``round`` is the owning probe's round last counted, ``informed`` the
    last one that brought something new, 0 while none did.
    """

    finding: Finding
    since: float
    round: int
    informed: int = 0
    against: int = 0


def settle(
    before: Track | None, finding: Finding, *, hold: tuple[int, int], round_: int, informative: bool, now: float
) -> Track:
    """Fold one round's finding into what is published.

    Unknown is not a verdict: it is published at once, and whatever follows it too. A repeated look at the same
    round never counts, nor does a round that is not ``informative``: one that failed and merely left the facts
    of an earlier one in place.
    """
    if before is None:
        return Track(finding=finding, since=now, round=round_, informed=round_ if informative else 0)
    informed = round_ if informative else before.informed
    published = before.finding.status
    if finding.status is published:
        return replace(before, finding=finding, round=round_, informed=informed, against=0)
    verdicts = (Status.TRUE, Status.FALSE)
    held = finding.status in verdicts and published in verdicts and not finding.final
    against = before.against + (1 if informative and round_ > before.round else 0)
    needed = hold[0] if finding.status is Status.TRUE else hold[1]
    if held and against < needed:
        return replace(before, round=round_, informed=informed, against=against)
    return Track(finding=finding, since=now, round=round_, informed=informed)
