"""What a real import in the server's environment does.

An import is expensive and executes the environment's code, so it runs in a child with no more rights than the
server has, one at a time in the whole agent, and its outcome is kept as `ImportEvidence` for as long as everything
that it rests on stays the same.

What it cannot show: the child has a HOME and caches of its own, so that nothing is left behind in the server's. A
server whose user has no home folder, or whose caches cannot be written, fails where this import succeeds; that is
judged by reading (`environment.CacheFolder`). With the GPUs hidden, code that looks at them takes another way.

What it cannot prevent: where the child is the agent's own user, the imported code may do to the agent what any process
of that user may, such as sending it a signal. Nothing short of another user keeps the two apart.
"""

from sidecar.imports.evidence import (
    FLASHINFER_MAMBA,
    INTERPRETER_BROKEN,
    ImportEvidence,
    ImportLink,
    ImportOutcome,
    ImportWork,
    LibraryLoad,
)
from sidecar.imports.importer import IMPORT_PROBE, Importer
from sidecar.imports.supervisor import ImportLimits

__all__ = [
    "FLASHINFER_MAMBA",
    "IMPORT_PROBE",
    "INTERPRETER_BROKEN",
    "ImportEvidence",
    "ImportLimits",
    "ImportLink",
    "ImportOutcome",
    "ImportWork",
    "Importer",
    "LibraryLoad",
]
