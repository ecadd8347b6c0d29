"""What the flashinfer probe knows when it judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sidecar.environment import EnvironmentFacts, ImportEvidence


class ImportState(StrEnum):
    """What is up with a real import."""

    DONE = "done"
    PENDING = "pending"
    NOT_REQUESTED = "not-requested"
    NOT_ALLOWED = "not-allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashinferFacts:
    """All that `classify` judges.

    ``variables`` holds the server's values of `SEEN_VARIABLES`, and is None where its environment cannot be seen,
    with the token ``variables_missing``. ``cubin_dir`` says that FLASHINFER_CUBIN_DIR is set for it.
    """

    environment: EnvironmentFacts
    evidence: ImportEvidence | None = None
    state: ImportState = ImportState.NOT_REQUESTED
    variables: Mapping[str, str] | None = None
    variables_missing: str | None = None
    cubin_dir: bool = False
