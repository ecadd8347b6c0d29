"""Where a process was that an import ended, and what that points to.

A signal leaves two traces: the compiled file that was about to be loaded, and the interpreter's own account of where it
was. Which of the packages is at fault follows from them, or from files that are not of the size that was installed; the
import that began last is no such trace, for it may have ended long before.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from sidecar.environment import EnvironmentFacts
from sidecar.imports import ImportEvidence
from sidecar.requirements import owner_of


class Crash(Struct, frozen=True, kw_only=True):
    """The end of an importing process.

    ``how`` continues a sentence about that process, without a full stop. ``file``, below site-packages, is what is
    likely at fault, and ``distribution`` brings it; None: not known. ``changed``: it is not of the size that was
    installed.
    """

    how: str
    file: str | None = None
    distribution: str | None = None
    changed: bool = False


def crash(environment: EnvironmentFacts, evidence: ImportEvidence, *, named: Mapping[str, str]) -> Crash:
    """Place a crash. ``named`` maps top-level modules to distributions that are there also where nothing says so."""
    ended = _ended(evidence)
    at = evidence.loading or (evidence.died_at or "").rpartition(":")[0] or None
    where = f" while it loaded {evidence.loading}" if evidence.loading else ""
    where = where or (f" in {evidence.died_at}" if evidence.died_at else "")
    owner = owner_of(environment, at, named=named)
    changed = _changed(environment, owner, at, cut=evidence.signal == "SIGBUS")
    if changed is not None:
        distribution, file = changed
        how = f"{ended}{where}; {file} is not of the size with which {distribution} was installed"
        return Crash(how=how, file=file, distribution=distribution, changed=True)
    if at is None:
        begun = f"; the last step that had begun is: {evidence.stage}" if evidence.stage else " before its first step"
        return Crash(how=f"{ended}, in a module that is not known{begun}")
    if evidence.signal == "SIGBUS":
        # mmap(2): the file ends before what was mapped of it.
        where += ", as by a compiled file that was cut off: this one, or one that it needs"
    return Crash(how=ended + where, file=at, distribution=owner)


def _ended(evidence: ImportEvidence) -> str:
    if evidence.signal is not None:
        return f"was ended by {evidence.signal}"
    return f"left with exit code {evidence.exit_code}"


def _changed(environment: EnvironmentFacts, owner: str | None, at: str | None, *, cut: bool) -> tuple[str, str] | None:
    """(distribution, compiled file) of what explains a crash: the loaded file itself, or another of its package.

    ``cut``: the signal is the one of a file that was cut off, which may be a library of another package that the
    loaded one needs.
    """
    resized = {
        name: [file for file in damage.examples if ".so" in file.rpartition("/")[2]]
        for name, damage in environment.damaged.items()
        if damage.resized
    }
    suspects = {name: files for name, files in resized.items() if files and (name == owner or cut)}
    if not suspects:
        return None
    name = owner if owner in suspects else next(iter(sorted(suspects)))
    return name, at if at in suspects[name] else suspects[name][0]
