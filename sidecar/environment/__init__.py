"""The Python environment of the server, by reading its files; nothing of it is executed.

A child reads, which is not trusted with more than its answer: the *static reader* runs once a minute and does almost
nothing while the environment's fingerprint stays the same.
"""

from sidecar.environment.facts import (
    UNKNOWN_VERSION,
    CacheFolder,
    Companion,
    Damage,
    DriverLibrary,
    EnvironmentFacts,
    FlashInferFiles,
    KernelFiles,
    LibraryFile,
    MambaFiles,
    ModuleFiles,
    Shadow,
    Toolchain,
)
from sidecar.environment.reading import (
    DETAILED,
    MODULES,
    STATIC_READER,
    TRACKED,
    Environment,
    InterpreterUnusable,
    digest,
)

__all__ = [
    "DETAILED",
    "MODULES",
    "STATIC_READER",
    "TRACKED",
    "UNKNOWN_VERSION",
    "CacheFolder",
    "Companion",
    "Damage",
    "DriverLibrary",
    "Environment",
    "EnvironmentFacts",
    "FlashInferFiles",
    "InterpreterUnusable",
    "KernelFiles",
    "LibraryFile",
    "MambaFiles",
    "ModuleFiles",
    "Shadow",
    "Toolchain",
    "digest",
]
