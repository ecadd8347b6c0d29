"""A digest of all that can change what an import in this environment comes to."""

from __future__ import annotations

import hashlib
import json
import os
import sys

from .dists import entries_of, not_walked
from .files import marks_of
from .modules import NEEDED, locate, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

    from .files import Files, Tree
    from .searchpath import SearchPath

WALKED = (
    "sglang",
    "flashinfer",
    "flashinfer_cubin",
    "flashinfer_jit_cache",
    "sgl_kernel",
    "flash_attn",
    "torch",
    "tvm_ffi",
    "triton",
    "quack",
    "nvidia_cutlass_dsl",
)
"""Packages of which every file counts that can be loaded."""


def fingerprint(files: Files, python: str | None, version: str | None, path: SearchPath, modules: Sequence[str]) -> str:
    """Compute what changes whenever an installation, an upgrade or an edit in place could change an import's outcome.

    Sizes, times and inodes, no contents: wheels may carry old mtimes, so ctime and inode count too. No
    device number and no directory times: a bind mount changes the one, a written .pyc the other. Not in it are the
    environment's variables, by which whoever keeps evidence must tell it apart as well, and the system's libraries.
    """
    digest = hashlib.sha256()

    def put(*parts: object) -> None:
        digest.update(json.dumps(parts).encode())

    def put_stat(label: str) -> None:
        info = files.stat(label)
        put(label, None if info is None else marks_of(info))

    put("python", python, version)
    if python:
        put_stat(python)
    put("path", path.entries)
    put("pth", path.pth, sorted(path.mapping.items()))
    for entry in path.entries:
        for folder, (_, _, form) in sorted(entries_of(files, entry)):
            put(folder)
            for item in ("RECORD", "METADATA") if form == ".dist-info" else ("PKG-INFO", ""):
                put_stat(os.path.join(folder, item) if item else folder)
    for place in shadowing(files, path):
        put_stat(place)
    for package in WALKED:
        kind, places = locate(files, path, package)
        put(package, kind, places)
        for place in places:
            if kind in ("module", "extension"):
                put_stat(place)
            else:
                put_tree(digest, place, files.tree(place, not_walked(package)))
    for package in NEEDED:
        put(package, locate(files, path, package))
    for name in modules:
        found = resolve(files, path, name)
        put(name, found["kind"], found["places"])
        for place in found["places"]:
            put_stat(place if found["kind"] in ("module", "extension") else os.path.join(place, "__init__.py"))
    return digest.hexdigest()


def shadowing(files: Files, path: SearchPath) -> list[str]:
    """Files in front of the standard library that are met in place of a module of that name behind them.

    Others that lie there are not looked at: the server's working folder may be one in which files come and go.
    """
    known = set(getattr(sys, "stdlib_module_names", ()))
    for entry in path.entries if path.leading else ():
        if entry not in path.leading:
            known.update(name.partition(".")[0] for name in files.listing(entry))
    found = []
    for entry in path.leading:
        for name in files.names(entry):
            if name.partition(".")[0] not in known:
                continue
            if name.endswith((".py", ".pyc", ".so")):
                found.append(os.path.join(entry, name))
            elif "." not in name:
                found.append(os.path.join(entry, name, "__init__.py"))
    return found


def put_tree(digest: hashlib._Hash, place: str, tree: Tree | None) -> None:
    """Add a package's files that can be loaded, in a stable order."""
    if tree is None:
        return
    digest.update(repr((place, sorted(tree.stats.items()))).encode("utf-8", "backslashreplace"))
