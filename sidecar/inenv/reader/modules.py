"""Modules as the import system would find them: by listing folders, without importing anything."""

from __future__ import annotations

import ast
import os
import re

from .texts import version_or_none

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .files import Files
    from .searchpath import SearchPath

AST_LIMIT = 256 * 1024
"""A package's ``__init__`` of more than this is not parsed; FlashInfer's are a few kB."""
NAME_LIMIT = 200
FOLDER_LIMIT = 20
"""Builds for GPUs in a kernel wheel, and portions of a namespace."""

VERSION_ASSIGNMENT = re.compile(r"""^__version__(?:\s*:[^=\n]*)?\s*=\s*["']([^"'\n]{1,64})["']""", re.MULTILINE)
CUDA_ASSIGNMENT = re.compile(r"""^cuda(?:\s*:[^=\n]*)?\s*=\s*(?:["']([0-9.]{1,16})["']|None\b)""", re.MULTILINE)
HIP_ASSIGNMENT = re.compile(r"""^hip(?:\s*:[^=\n]*)?\s*=\s*["']([0-9A-Za-z.+-]{1,32})["']""", re.MULTILINE)
EXTENSION = re.compile(r"\.(?:abi3\.|cpython-(?P<version>\d{2,3})[^.]*\.)?so\Z")
"""How the name of an extension module goes on after the module's."""
MERGES = re.compile(r"extend_path|declare_namespace")
"""What a package says that adds the folders of its name on the rest of the path to its own."""
ARCH_DIR = re.compile(r"sm\d{2,3}\Z")

NEEDED = ("tvm_ffi", "torch", "packaging", "requests", "pynvml", "tqdm")
"""Modules that every FlashInfer with a mamba module imports unconditionally, in the order it meets them."""


def extension(files: Files, folder: str, name: str, version: tuple[int, int] | None) -> str | None:
    """File name of an extension module that an interpreter of this version loads, or None."""
    for suffix in (".abi3.so", ".so"):
        if files.has(folder, name + suffix):
            return name + suffix
    for item in files.libraries(folder):
        if not item.startswith(name + "."):
            continue
        match = EXTENSION.match(item, len(name))
        if match is None:
            continue
        built_for = match.group("version")
        if built_for is None or version is None or built_for == "%d%d" % version:
            return item
    return None


def find_in(files: Files, folders: list[str], name: str, version: tuple[int, int] | None) -> tuple[str, list[str]]:
    """(kind, places) of a module in the folders of a path or package, by the import system's own precedence.

    ``package``, ``extension`` and ``module`` end the search; a folder without ``__init__`` is a ``namespace`` only if
    nothing better follows.
    """
    portions = []
    for entry in folders:
        folder = os.path.join(entry, name)
        is_dir = files.has(entry, name) and files.is_dir(folder)
        if is_dir and has_init(files, folder, version):
            return "package", [folder]
        native = extension(files, entry, name, version)
        if native is not None and files.is_file(os.path.join(entry, native)):
            return "extension", [os.path.join(entry, native)]
        for suffix in (".py", ".pyc"):
            if files.has(entry, name + suffix) and files.is_file(folder + suffix):
                return "module", [folder + suffix]
        if is_dir:
            portions.append(folder)
    return ("namespace", portions[:FOLDER_LIMIT]) if portions else ("absent", [])


def has_init(files: Files, folder: str, version: tuple[int, int] | None) -> bool:
    """Whether a folder is a regular package."""
    if files.is_file(os.path.join(folder, "__init__.py")) or files.is_file(os.path.join(folder, "__init__.pyc")):
        return True
    native = extension(files, folder, "__init__", version)
    return native is not None and files.is_file(os.path.join(folder, native))


def locate(files: Files, path: SearchPath, name: str) -> tuple[str, list[str]]:
    """(kind, places) of a top-level module as the import system would find it."""
    kind, places = find_in(files, path.entries, name, path.version)
    # The finder of an editable install is asked only for what the path does not have.
    if kind == "absent" and name in path.mapping:
        place = path.mapping[name]
        if files.is_dir(place):
            return ("package" if has_init(files, place, path.version) else "namespace"), [place]
        return find_in(files, [os.path.dirname(place)], os.path.basename(place), path.version)
    return kind, places


def resolve(files: Files, path: SearchPath, name: str) -> dict[str, Any]:
    """Kind and places of a module of any depth.

    ``hidden``: its parent is a regular package, which does not contain it, while a folder of the parent's name
    elsewhere on the path does; the import system does not look there.
    """
    parts = name.split(".")
    kind, places = locate(files, path, parts[0])
    for index, part in enumerate(parts[1:], start=1):
        if kind not in ("package", "namespace"):
            return {"kind": "absent", "places": []}
        inner = find_in(files, places, part, path.version)
        if inner[0] == "absent" and kind == "package":
            others = [os.path.join(entry, *parts[:index]) for entry in path.entries]
            elsewhere = find_in(files, [one for one in others if one not in places], part, path.version)
            if elsewhere[0] != "absent":
                if not MERGES.search(files.read(os.path.join(places[0], "__init__.py"), AST_LIMIT) or ""):
                    return {"kind": "hidden", "places": elsewhere[1]}
                inner = elsewhere
        kind, places = inner
    return {"kind": kind, "places": places}


def assigned_version(files: Files, folder: str) -> tuple[bool, str | None]:
    """``__version__`` as a package's own files state it: (found a _build_meta, version or None)."""
    text = files.read(os.path.join(folder, "_build_meta.py"))
    if text is not None:
        match = VERSION_ASSIGNMENT.search(text)
        return True, version_or_none(match.group(1)) if match else None
    match = VERSION_ASSIGNMENT.search(files.read(os.path.join(folder, "__init__.py")) or "")
    return False, version_or_none(match.group(1)) if match else None


def bound_names(body: list[ast.stmt]) -> dict[str, str | None] | None:
    """Names that a module body binds, with the submodule that each comes from.

    None where names may be bound in a way that reading does not follow: a star import, a module's ``__getattr__``,
    ``exec``, a write into ``globals()``, a loop.
    """
    if any(binds_unseen(node) for node in body):
        return None
    names: dict[str, str | None] = {}
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            blocks = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            for block in blocks:
                inner = bound_names(block)
                if inner is None:
                    return None
                # Which block runs is not known, so neither is the submodule that a name comes from.
                names.update(dict.fromkeys(inner))
        elif isinstance(node, ast.ImportFrom):
            source = node.module if node.level == 1 and node.module and "." not in node.module else None
            for alias in node.names:
                if alias.name == "*":
                    return None
                names[alias.asname or alias.name] = source
        else:
            names.update(dict.fromkeys(plainly_bound(node)))
    return names


WRITERS = {
    "exec",
    "eval",
    "globals",
    "locals",
    "vars",
    "setattr",
    "__getattr__",
    "__dict__",
    "modules",
    "import_module",
}
"""Names by which code binds names that do not stand in it (``sys.modules`` replaces a module as a whole)."""
FOLLOWED = (
    ast.If, ast.Try, ast.With, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Assert, ast.Raise, ast.Pass,
)  # fmt: skip


def binds_unseen(node: ast.stmt) -> bool:
    """Whether a statement can bind names that `bound_names` would not tell."""
    if not isinstance(node, FOLLOWED):
        return not isinstance(node, ast.Delete)
    if isinstance(node, (ast.If, ast.Try, ast.With)):
        # What is in the blocks is looked at by itself; a ``with ... as`` binds, and so may any expression.
        parts: list[ast.AST] = [node.test] if isinstance(node, ast.If) else []
        parts += list(node.items) if isinstance(node, ast.With) else []
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        # A function may write names once it is called, and a module's own ``__getattr__`` answers for any name.
        parts = [node] if node.name == "__getattr__" else list(ast.walk(node))
        return node.name == "__getattr__" or any(isinstance(part, ast.Global) for part in parts)
    elif isinstance(node, ast.ClassDef):
        return False
    else:
        parts = [node]
    for part in parts:
        for inner in ast.walk(part):
            if isinstance(inner, ast.Name) and inner.id in WRITERS:
                return True
            if isinstance(inner, ast.Attribute) and inner.attr in WRITERS:
                return True
            if isinstance(inner, ast.alias) and (inner.asname or inner.name) == "__getattr__":
                return True
            if isinstance(inner, ast.NamedExpr):
                return True
    return False


def plainly_bound(node: ast.stmt) -> list[str]:
    """Names that one simple statement binds."""
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [name for target in node.targets for name in targets_of(target)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        # A bare annotation (``name: type``) binds nothing.
        return [] if node.value is None else [node.target.id]
    return []


def targets_of(target: ast.expr) -> list[str]:
    """Names that the left side of an assignment binds: one, or those of a tuple, list or starred part."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Starred):
        return targets_of(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for one in target.elts for name in targets_of(one)]
    return []


def mamba(files: Files, portions: list[str]) -> dict[str, Any]:
    """Say what ``flashinfer.mamba`` is made of: ``state``, the ``names`` it binds and where its symbol is from."""
    facts: dict[str, Any] = {"state": "absent", "names": None, "symbol": "unknown"}
    for portion in portions:
        folder = os.path.join(portion, "mamba")
        if not files.is_dir(folder):
            if files.is_file(folder + ".py"):
                facts["state"] = "present"
                return facts
            continue
        init = os.path.join(folder, "__init__.py")
        text = files.read(init)
        if text is None:
            # One that is there and may not be read leaves everything open.
            facts["state"] = "present" if files.is_file(init) else "no-init"
            if facts["state"] == "present":
                return facts
            continue
        if not text:
            facts["state"] = "empty-init"
            return facts
        facts["state"] = "present"
        if len(text) > AST_LIMIT:
            return facts
        try:
            names = bound_names(ast.parse(text).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            facts["state"] = "invalid-init"
            return facts
        if names is None:
            return facts
        facts["names"] = sorted(name[:100] for name in names)[:NAME_LIMIT]
        if "selective_state_update" not in names:
            facts["symbol"] = "missing"
            return facts
        facts["symbol"] = "bound"
        source = names["selective_state_update"]
        if source is not None:
            base = os.path.join(folder, source)
            there = [item for item in files.names(folder) if item.startswith(source + ".") and item.endswith(".so")]
            if not there and not files.is_file(base + ".py") and not files.is_dir(base):
                facts["symbol"] = "source-missing"
        return facts
    return facts


def plainly(kind: str) -> str:
    """A file that stands where a package should is a ``module``, of whatever kind it is."""
    return "module" if kind == "extension" else kind


def companion(files: Files, path: SearchPath, name: str) -> dict[str, Any]:
    """Kind and version of a package that FlashInfer looks for beside itself."""
    kind, places = locate(files, path, name)
    kind = plainly(kind)
    version = assigned_version(files, places[0])[1] if kind == "package" else None
    return {"kind": kind, "version": version}


def flashinfer(files: Files, path: SearchPath) -> dict[str, Any]:
    """FlashInfer's files and those of what it needs."""
    kind, places = locate(files, path, "flashinfer")
    kind = plainly(kind)
    has_meta, version = assigned_version(files, places[0]) if kind == "package" else (False, None)
    return {
        "kind": kind,
        "places": places,
        "build_meta": has_meta,
        "version": version,
        "mamba": mamba(files, places if kind in ("package", "namespace") else []),
        "cubin": companion(files, path, "flashinfer_cubin"),
        "jit_cache": companion(files, path, "flashinfer_jit_cache"),
        "missing": [name for name in NEEDED if locate(files, path, name)[0] == "absent"],
    }


def torch(files: Files, path: SearchPath) -> dict[str, Any] | None:
    """Version of torch and the CUDA version that it was built for, from its version file read as text."""
    kind, places = locate(files, path, "torch")
    if kind != "package":
        return None
    text = files.read(os.path.join(places[0], "version.py"))
    if text is None:
        return {"version": None, "cuda": None, "cuda_stated": False, "hip": None}
    version = VERSION_ASSIGNMENT.search(text)
    cuda = CUDA_ASSIGNMENT.search(text)
    hip = HIP_ASSIGNMENT.search(text)
    return {
        "version": version_or_none(version.group(1)) if version else None,
        "cuda": cuda.group(1) if cuda else None,
        "cuda_stated": cuda is not None,
        "hip": hip.group(1) if hip else None,
    }


def kernel_wheel(files: Files, path: SearchPath) -> dict[str, Any]:
    """Kind of ``sgl_kernel`` and the folders sm90, sm100, ... that hold a build of its common_ops for a GPU.

    ``plain`` says that one lies beside them, which is loaded where no folder fits.
    """

    def has_ops(folder: str) -> bool:
        return any(name.startswith("common_ops.") and name.endswith(".so") for name in files.names(folder))

    kind, places = locate(files, path, "sgl_kernel")
    kind = plainly(kind)
    if kind != "package":
        return {"kind": kind, "folders": [], "plain": False}
    inner = [name for name in files.names(places[0]) if ARCH_DIR.match(name)]
    folders = [name for name in inner if has_ops(os.path.join(places[0], name))]
    return {"kind": kind, "folders": folders[:FOLDER_LIMIT], "plain": has_ops(places[0])}
