"""Read the packages of a Python environment without executing anything of it.

``python -I -S -B static_reader.py SPEC --fd N``: stdlib only, Python 3.8 or newer, run by path, never imported; the
folder ``reader`` beside it holds its parts. SPEC is a JSON object:

``environ``  the few variables of the server that decide its import path (PYTHONPATH, HOME, ...), where the
             dynamic loader looks (LD_LIBRARY_PATH) and where FlashInfer looks for a compiler and its cache
``home``     home folder of the server's user by the user database, which counts where HOME is not set, or null
``environ_seen``  whether these are the server's own variables, and not another process's in their place
``cwd``      the server's working directory, if known: what relative entries of PYTHONPATH mean
``cwd_on_path``  whether that folder leads the import path, as with ``python -m``
``script``   path of the script whose folder leads it instead, or null
``no_site``  whether the interpreter was told to do without its site directories (``-S``)
``user``     ``uid``, ``gid`` and ``groups`` of the server, or null
``tracked``  normalised names of the distributions of which more than the version is wanted
``detailed`` normalised names of those whose requirements are wanted
``modules``  dotted names of modules to look for
``known``    fingerprint of an earlier answer; if it still holds the answer is only ``unchanged`` and what the
             fingerprint does not cover: ``libcuda``, ``toolchain``, ``cache`` and ``cubins`` come and go beside the
             packages
``root``     a foreign root directory; without it the environment is the one of the interpreter running this
``python``   path of the environment's interpreter inside the foreign root, if known

JSON lines go to file descriptor N: ``{"stage": ...}`` and at the end ``{"result": {...}}`` or, where the
environment may not or cannot be read, ``{"result": {"problem": token}}``.

Everything that is read may be hostile: only regular files are opened, never blocking, never more than a limit of
each and of all; folders are cut off that never end; inside a foreign root every path is resolved by the kernel
within that root.
"""

from __future__ import annotations

import json
import os
import sys
import time

# The parts are found by this file's place; the environment's own path must not keep the entry.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from reader import dists, loader, modules, searchpath, surroundings
from reader.files import Files, KernelTooOldError
from reader.fingerprint import fingerprint

sys.path.pop()

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost every run 5 ms
    from typing import Any, Callable, Mapping

    from reader.searchpath import SearchPath


def examine(spec: Mapping[str, Any], stage: Callable[[str], None]) -> dict[str, Any]:
    """Build the result object for a specification."""
    root = spec.get("root")
    stage("open")
    try:
        files = Files(root)
    except KernelTooOldError:
        return {"problem": "kernel-too-old"}
    except OSError:
        return {"problem": "root-unreadable"}
    stage("search path")
    python: str | None
    version: str | None
    path: SearchPath | None
    if root is None:
        python, version, path = searchpath.own_environment(files, spec)
    else:
        python, version, path = searchpath.foreign_environment(files, spec)
    if path is None:
        return {"problem": "no-environment"}
    stage("fingerprint")
    names = [name for name in spec.get("modules") or () if isinstance(name, str)]
    mark = fingerprint(files, python, version, path, names)
    stage("surroundings")
    beside = {"libcuda": loader.libcuda(files, spec.get("environ") or {}, python, path)}
    beside.update(surroundings.surroundings(files, spec, python, path))
    if mark == spec.get("known"):
        return {"unchanged": True, "fingerprint": mark, **beside}
    stage("distributions")
    inventory = dists.inventory(
        files, path, set(spec.get("tracked") or ()), list(spec.get("detailed") or ()), spec.get("user")
    )
    stage("modules")
    answer = {
        "fingerprint": mark,
        "python": python,
        "python_version": version,
        "site_dirs": path.site_dirs,
        "path_code": path.code[:100],
        **inventory,
        **beside,
        "modules": {name: modules.resolve(files, path, name) for name in names},
        "torch": modules.torch(files, path),
        "kernel": modules.kernel_wheel(files, path),
        "flashinfer": modules.flashinfer(files, path),
    }
    stage("answer")
    return answer


def main() -> None:
    """Run the script."""
    begun = time.perf_counter()
    spec = json.loads(sys.argv[1])
    fd = int(sys.argv[sys.argv.index("--fd") + 1])

    def emit(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    sys.setrecursionlimit(2000)
    emit({"result": examine(spec, lambda name: emit({"stage": name, "at": time.perf_counter() - begun}))})


main()
