"""Distributions: which are registered, what they require, what they claim, and whether it is there."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from urllib.parse import unquote

from .files import Tree, loadable
from .modules import locate
from .texts import headers, normalised, version_or_none

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

    from .files import Files
    from .searchpath import SearchPath

DISTRIBUTION_LIMIT = 5000
"""Distributions taken; past it only those that matter."""
HEAD_BYTES = 8192
"""Of a METADATA file; the version is in its first lines, before requirements and description."""
METADATA_BYTES = 512 * 1024
"""Of a METADATA file whose requirements are wanted; SGLang's has 40 kB with its description."""
REQUIREMENT_LIMIT = 500
REQUIREMENT_CHARS = 2000
"""Longest requirement that whoever parses them takes."""
NO_REQUIREMENT = " ;;"
"""Stands for the rest of a longer one, and for those past the limit: whoever parses it counts a line that could not be
read."""
RECORD_BYTES = 8 * 1024 * 1024
"""Of a RECORD; torch's has 1.4 MB."""
RECORDS_BYTES = 96 * 1024 * 1024
"""Of all RECORDs together; those of a full environment have 7.6 MB."""
FOLDERS = 2000
"""Folders of missing files whose times are looked at; torch, the largest package, has some 700 with code."""
EXAMPLES = 10
"""Files named of a damaged distribution, code first."""

VERSION_FIELD = re.compile(r"^version:[ \t]*(\S.*?)\s*$", re.MULTILINE | re.IGNORECASE)
NAME_FIELD = re.compile(r"^name:[ \t]*(\S.*?)\s*$", re.MULTILINE | re.IGNORECASE)
CUTLASS = "nvidia-cutlass-dsl"

PROVIDERS = {
    "sglang": ("sglang",),
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "flashinfer_cubin": ("flashinfer-cubin",),
    "flashinfer_jit_cache": ("flashinfer-jit-cache",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "flash_attn": ("flash-attn", "flash-attn-4"),
    "flash_attn_interface": ("flash-attn-3",),
    "torch": ("torch",),
    "tvm_ffi": ("apache-tvm-ffi",),
    "triton": ("triton", "pytorch-triton"),
    "quack": ("quack-kernels",),
    "pynvml": ("nvidia-ml-py", "nvidia-ml-py3", "pynvml"),
    "nvidia_cutlass_dsl": (CUTLASS,),
}
"""Modules whose origin matters, with the distributions that are known to bring them."""

SKIPPED = {"torch": ("include", "share", "test", "testing"), "sglang": ("test", "multimodal_gen")}
"""Folders of a package that are not walked: torch's 9,000 headers, tests, and what serves pictures and not text."""
APART = {"flashinfer": ("data",)}
"""Folders that no import needs, only a build at run time: compared with RECORD, but no part of the fingerprint."""
LOOSE = re.compile(
    r"(?P<file>(?P<name>%s|flash_attn_2_cuda|nvidia_cutlass_dsl_packages)(?:\.[\w-]+)*\.(?P<kind>py|so|pth)),"
    % "|".join(PROVIDERS)
)
"""Lines of single files beside the packages. Others are claimed by several distributions quite legitimately."""
KINDS = (".py", ".so", ".cu", ".cuh", ".h", ".hpp", ".inl", ".cubin")
"""Kinds of files that an import or a build at run time needs; images are often slimmed of others."""
LEFT_OUT = tuple("%s/%s/" % (module, folder) for module, folders in SKIPPED.items() for folder in folders)
MATTERS = re.compile(b"\n(?:%s)" % "|".join((*PROVIDERS, "nvidia/", "flash_attn_2_cuda")).encode())
"""What a RECORD has in it if any of its lines matters; most have nothing, which this tells in a fifth of the time."""
ESSENTIAL = {"__init__.py": None, "launch_server.py": "", "srt/server_args.py": "ServerArgs"}
"""Files of SGLang that each launch reads, in every release, with the name that must be in it; empty for any, None where
it may be empty."""
SOURCE_BYTES = 4 << 20
SLIMMED = re.compile(r"(?:^|/)(?:tests?|testing|examples|benchmarks?|docs)/")


class Dist:
    """A registered distribution. ``entry`` is the folder of the path that registers it, ``form`` its ending."""

    __slots__ = ("entry", "folder", "form", "key", "version")

    def __init__(self, key: str, version: str | None, entry: str, folder: str, form: str) -> None:
        self.key = key
        self.version = version
        self.entry = entry
        self.folder = folder
        self.form = form


def split_name(folder: str) -> tuple[str, str, str] | None:
    """('name', 'version', 'ending') of a .dist-info or .egg-info entry by its file name, or None."""
    for suffix in (".dist-info", ".egg-info"):
        if folder.endswith(suffix):
            name, _, rest = folder[: -len(suffix)].partition("-")
            # An interrupted pip leaves what it had set aside under a name that begins with a tilde.
            return (name, rest.split("-")[0], suffix) if name and name[0] != "~" else None
    return None


def metadata_file(files: Files, folder: str) -> str:
    """Path of a distribution's header fields."""
    if folder.endswith(".dist-info"):
        return os.path.join(folder, "METADATA")
    return folder if files.is_file(folder) else os.path.join(folder, "PKG-INFO")


def entries_of(files: Files, entry: str) -> Iterable[tuple[str, tuple[str, str, str]]]:
    """(path, (name, version, ending)) of what registers distributions in a folder of the path."""
    if entry.endswith(".egg") and files.is_dir(os.path.join(entry, "EGG-INFO")):
        name, _, rest = os.path.basename(entry)[:-4].partition("-")
        yield os.path.join(entry, "EGG-INFO"), (name, rest.split("-")[0], ".egg")
    # In the folder's own order: where one registers a name twice, importlib.metadata takes the first it meets.
    for item in files.listing(entry):
        parts = split_name(item)
        if parts is not None:
            yield os.path.join(entry, item), parts


def registered(files: Files, path: SearchPath, tracked: set[str]) -> list[Dist]:
    """All distributions, in the order in which importlib.metadata finds them."""
    found: list[Dist] = []
    for entry in path.entries:
        for folder, (name, version, form) in entries_of(files, entry):
            key = normalised(name)
            if len(found) >= DISTRIBUTION_LIMIT and key not in tracked:
                continue
            head = (files.read(metadata_file(files, folder), HEAD_BYTES) or "").replace("\r\n", "\n")
            head = head.partition("\n\n")[0]
            stated = VERSION_FIELD.search(head)
            if not version[:1].isdigit():
                # A folder of no regular name, as some builders wrote it: its metadata knows better.
                named = NAME_FIELD.search(head)
                key = normalised(named.group(1)) if named else key
            if len(key) <= 100:
                effective = version_or_none(stated.group(1) if stated else None) or version_or_none(version)
                found.append(Dist(key, effective, entry, folder, form))
    return found


def requirements(files: Files, dist: Dist) -> tuple[list[str], str | None]:
    """(Requires-Dist lines, Requires-Python) of a distribution."""
    fields = headers(files.read(metadata_file(files, dist.folder), METADATA_BYTES) or "")
    lines = [
        value if len(value) <= REQUIREMENT_CHARS else value[: REQUIREMENT_CHARS - len(NO_REQUIREMENT)] + NO_REQUIREMENT
        for field, value in fields
        if field == "requires-dist"
    ]
    if len(lines) > REQUIREMENT_LIMIT:
        lines[REQUIREMENT_LIMIT - 1 :] = [NO_REQUIREMENT]
    python = next((value for field, value in fields if field == "requires-python"), None)
    return lines, python if python and len(python) <= REQUIREMENT_CHARS else None


def is_editable(files: Files, dist: Dist) -> bool:
    """Whether a distribution was installed in editable mode, so that its files lie elsewhere."""
    text = files.read(os.path.join(dist.folder, "direct_url.json"), 65536) if dist.form == ".dist-info" else None
    try:
        return text is not None and bool(json.loads(text)["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def editables(files: Files, path: SearchPath, dists: list[Dist]) -> list[str]:
    """Names of the distributions that are installed in editable mode, in the old way or the new."""
    found = {dist.key for dist in dists if is_editable(files, dist)}
    for entry in path.site_dirs:
        found |= {normalised(item[: -len(".egg-link")]) for item in files.listing(entry) if item.endswith(".egg-link")}
    return sorted(found)


def duplicates(dists: list[Dist], tracked: set[str], editable: set[str]) -> dict[str, list[str]]:
    """Name -> versions of what is registered more than once, the effective one first.

    Twice in one folder is a fault of any distribution: chance decides which counts. In several folders only tracked
    ones are listed: what a venv shadows of the system's is shadowed on purpose. An editable install is registered by
    its source folder too, and Debian's own packages are made to be shadowed.
    """
    by_name: dict[str, list[Dist]] = {}
    for dist in dists:
        if not dist.entry.endswith("/python3/dist-packages"):
            by_name.setdefault(dist.key, []).append(dist)
    found = {}
    for key, several in by_name.items():
        here = [dist for dist in several if dist.entry == several[0].entry]
        count = several if key in tracked and key not in editable else here
        if len(count) > 1:
            found[key] = [dist.version or "unknown" for dist in count][:10]
    return found


# -- what RECORD says ------------------------------------------------------------------------------


class Claims:
    """What distributions say they brought: files of the modules that matter.

    ``listed`` maps a compared distribution's folder to its (module, file, size as stated) lines, the file relative to
    the module's folder and empty for a module that is a single file; ``loose`` maps it to single files beside the
    packages. ``builds`` holds their marks (`build_mark`). ``claimed`` holds the modules of which any RECORD lists a
    file; ``owners`` maps a module, or a component of NVIDIA's libraries, to the distributions of which several brought
    the same file of it.
    """

    def __init__(self) -> None:
        self.listed: dict[str, list[tuple[str, str, str]]] = {}
        self.loose: dict[str, list[str]] = {}
        self.claimed: set[str] = set()
        self.builds: dict[str, str] = {}
        self.owners: dict[str, list[str]] = {}


def claims_of(files: Files, dists: list[Dist]) -> Claims:
    """Read every RECORD for the lines that matter; no path in it is followed."""
    claims = Claims()
    owned: dict[tuple[str, str], list[tuple[str, set[str]]]] = {}
    left = RECORDS_BYTES
    # The compared ones first: whatever else is there must not use up what may be read.
    for dist in sorted(dists, key=lambda one: not is_compared(one.key)):
        if dist.form != ".dist-info" or left <= 0:
            continue
        data = files.read_bytes(os.path.join(dist.folder, "RECORD"), min(RECORD_BYTES, left))
        if data is None:
            continue
        left -= len(data)
        matters = MATTERS.search(b"\n" + data) is not None
        lines = data.decode("utf-8", "surrogateescape").split("\n") if matters else []
        tops = {line.partition("/")[0] for line in lines}
        modules = [module for module in (*PROVIDERS, "nvidia") if module in tops]
        loose = [match for match in map(LOOSE.match, tops) if match is not None]
        compared = is_compared(dist.key)
        if compared:
            claims.builds[dist.folder] = build_mark(data)
            claims.listed[dist.folder] = []
            claims.loose[dist.folder] = [match.group("file") for match in loose]
        claims.claimed.update(match.group("name") for match in loose)
        if not modules and not loose:
            continue
        found: dict[str, set[str]] = {match.group("name"): {""} for match in loose if match.group("kind") != "pth"}
        for module, rest, size in lines_of(lines, modules):
            if module == "nvidia":
                # By name of the library: NVIDIA's wheels share folders on purpose.
                if ".so" in rest:
                    found.setdefault("nvidia/" + rest.partition("/")[0], set()).add(rest)
                continue
            found.setdefault(module, set()).add(rest)
            if compared:
                claims.listed[dist.folder].append((module, rest, size))
        claims.claimed.update(modules)
        for module, names in found.items():
            owned.setdefault((dist.entry, module), []).append((dist.key, names))
    for (_, module), claimants in owned.items():
        several = rivals(claimants) if len(claimants) > 1 else []
        if several:
            claims.owners[module] = several
    return claims


def build_mark(record: bytes) -> str:
    """A mark of the files that a RECORD lists with their hashes: the same for each install of the same wheel.

    What an installer adds (byte code, scripts with the interpreter's path, its own notes) and the order of the lines
    differ between two installs of one wheel, and are left out.
    """
    kept = [
        line
        for line in record.split(b"\n")
        if b"sha256=" in line and b".dist-info/" not in line and b".pyc," not in line and not line.startswith(b"..")
    ]
    return hashlib.sha256(b"\n".join(sorted(line.rstrip(b"\r") for line in kept))).hexdigest()[:16]


def lines_of(lines: list[str], modules: list[str]) -> list[tuple[str, str, str]]:
    """(module, file in it, size as stated) of those lines of RECORD whose files an import or a build may need.

    A line is path,hash,size; a path with a comma stands in quotes, and is none of these.
    """
    prefixes = tuple(module + "/" for module in modules)
    found = []
    for line in lines:
        if line.startswith(prefixes) and not line.startswith(LEFT_OUT):
            path, _, rest = line.partition(",")
            if path.endswith(KINDS) or ".so." in path:
                module, _, inner = path.partition("/")
                found.append((module, inner, rest.rpartition(",")[2].rstrip("\r")))
    return found


def rivals(claimants: list[tuple[str, set[str]]]) -> list[str]:
    """Those of several distributions that brought the same loadable file, or both the module itself."""
    found: set[str] = set()
    for index, (key, names) in enumerate(claimants):
        own = {"" if name == "__init__.py" else name for name in names if name == "" or loadable(name)}
        for other, others in claimants[index + 1 :]:
            if other != key and not own.isdisjoint(others | ({""} if "__init__.py" in others else set())):
                found |= {key, other}
    return sorted(found)[:20]


def is_compared(key: str) -> bool:
    """Whether a distribution's files are compared with its RECORD."""
    return key.startswith(CUTLASS) or any(key in names for names in PROVIDERS.values())


def damage(files: Files, dist: Dist, claims: Claims) -> dict[str, Any] | None:
    """Say which files of a distribution are not as its RECORD lists them; None where all are."""
    lines = claims.listed.get(dist.folder)
    if lines is None:
        return {"no_record": True} if lacks_record(files, dist) else None
    missing = [name for name in claims.loose[dist.folder] if not files.has(dist.entry, name)]
    resized: list[str] = []
    nothing = Tree()
    lines = [part_of(line) for line in lines]
    trees = {module: tree_of(files, dist.entry, module) for module in {line[0] for line in lines}}
    for module, rest, size in lines:
        tree = trees[module] or nothing
        marks = tree.stats.get(rest)
        if marks is not None:
            # As text: the size is what a hostile file says.
            if size and str(marks[0]) != size:
                resized.append(module + "/" + rest)
        elif rest not in tree.names and tree.complete and not SLIMMED.search(module + "/" + rest):
            missing.append(module + "/" + rest)
    unseen = [
        module for module, tree in trees.items() if tree is None and files.denied(os.path.join(dist.entry, module))
    ]
    if unseen:
        missing = [path for path in missing if not path.startswith(tuple(module + "/" for module in unseen))]
    if not missing and not resized:
        return None
    named = sorted(missing + resized, key=lambda path: (not path.endswith((".py", ".so")), path))
    examples = [path[:200] for path in named[:EXAMPLES]]
    return {
        "missing": len(missing),
        "resized": len(resized),
        "examples": examples,
        "no_record": False,
        "missing_since": last_removal(files, dist.entry, missing),
    }


def last_removal(files: Files, entry: str, missing: list[str]) -> float | None:
    """Seconds since the epoch by which these files were gone for sure; None where that cannot be told.

    A file that goes, or a folder above it that does, changes the time of the nearest folder that is still there. So
    does whatever else is added or removed in it: they may have been gone for longer.
    """
    lay_in = {os.path.dirname(path) for path in missing}
    if len(lay_in) > FOLDERS or any(".." in folder.split("/") for folder in lay_in):
        return None
    latest = 0
    for lost in lay_in:
        folder = lost
        while folder and not files.is_dir(os.path.join(entry, folder)):
            folder = os.path.dirname(folder)
        info = files.stat(os.path.join(entry, folder) if folder else entry)
        if info is not None:
            latest = max(latest, info.st_mtime_ns)
    return latest / 1e9 if latest else None


def unusable(files: Files, dist: Dist, claims: Claims, user: Any) -> dict[str, str]:
    """Say which of the files that every launch of SGLang reads cannot be read as such: path -> what is wrong.

    ``missing`` only where RECORD lists the file: releases differ in what they have. A file of the registered size is
    what was installed; one of another size, such as a patched one, is looked into. ``unreadable`` only where this runs
    as the server's ``user``, and that is not root: it runs without the capability by which root reads everything.
    """
    uid = user.get("uid") if isinstance(user, dict) else None
    as_server = files.root_fd is None and uid == os.geteuid() != 0
    sizes = {rest: size for module, rest, size in claims.listed.get(dist.folder, ()) if module == "sglang"}
    found = {}
    for name in ESSENTIAL:
        path = os.path.join(dist.entry, "sglang", name)
        info = files.stat(path)
        wrong = None
        if info is None:
            wrong = None if files.denied(path) or name not in sizes else "missing"
        elif str(info.st_size) != sizes.get(name):
            wrong = unusable_source(files, path, name)
        if as_server and files.read_bytes(path, 1) is None and (info is not None or files.denied(path)):
            wrong = "unreadable"
        if wrong is not None:
            found[name] = wrong
    return {"sglang/" + name: wrong for name, wrong in found.items()}


def unusable_source(files: Files, path: str, name: str) -> str | None:
    """What is wrong with a source file that is not as it was installed; None where it may well work."""
    data = files.read_bytes(path, SOURCE_BYTES)
    if data is None:
        return None
    wanted = ESSENTIAL[name]
    if not data.strip():
        return "empty" if wanted is not None else None
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Below another root this is the agent's own interpreter, which may be older than the server's.
        return "damaged" if files.root_fd is None else None
    if wanted is None or wanted == "":
        return None
    return None if any(getattr(node, "name", None) == wanted for node in tree.body) else "cut-off"


MEDDLES = re.compile(r"\b(?:__path__|meta_path|path_hooks|sys\.path|sys\.modules|extend_path|exec)\b")
"""What code of a package says that may lead the import of its modules elsewhere."""


def shadow_of(files: Files, path: SearchPath, dist: Dist | None, *, editable: bool) -> dict[str, Any] | None:
    """Say what a ``sglang`` is like that Python meets in front of what is installed; None without one.

    In front lie the folder of a launch with ``python -m``, that of a script, and those of PYTHONPATH. A copy that is
    registered in the same folder, and the source of an editable install, are what is installed.
    """
    kind, places = locate(files, path, "sglang")
    entry = os.path.dirname(places[0]) if places else None
    if entry is None or entry not in path.leading or (dist is not None and dist.entry == entry):
        return None
    if dist is not None and editable and is_source(files, path, dist, places[0]):
        return None
    if kind == "namespace" and not editable:
        # A regular package anywhere on the path is preferred to it, so there is none: nothing is hidden.
        return None
    found: dict[str, str] = {}
    meddles = ends = False
    if kind in ("package", "namespace"):
        for name in ESSENTIAL:
            file = os.path.join(places[0], name)
            if not files.is_file(file):
                wrong = None if files.denied(file) or name == "__init__.py" else "missing"
            else:
                wrong = unusable_source(files, file, name)
            if wrong is not None:
                found["sglang/" + name] = wrong
        text = files.read(os.path.join(places[0], "__init__.py"), SOURCE_BYTES) or ""
        meddles = MEDDLES.search(text) is not None
        ends = always_raises(text)
    return {"place": places[0], "unusable": found, "meddles": meddles, "raises": ends}


def is_source(files: Files, path: SearchPath, dist: Dist, place: str) -> bool:
    """Whether a package's folder lies in the source folder of an editable install."""
    if place == path.mapping.get("sglang"):
        return True
    text = files.read(os.path.join(dist.folder, "direct_url.json"), 65536)
    try:
        source = unquote(json.loads(text or "")["url"].partition("file://")[2])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return source.startswith("/") and place.startswith(os.path.normpath(source) + "/")


def always_raises(text: str) -> bool:
    """Whether a module's code raises wherever it runs: by a statement outside of all blocks."""
    try:
        return any(isinstance(node, ast.Raise) for node in ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def part_of(line: tuple[str, str, str]) -> tuple[str, str, str]:
    """The line of a file in a folder that is walked apart, as one of that folder."""
    module, rest, size = line
    for folder in APART.get(module, ()):
        if rest.startswith(folder + "/"):
            return module + "/" + folder, rest[len(folder) + 1 :], size
    return line


def tree_of(files: Files, entry: str, module: str) -> Tree | None:
    """Walk a module's folder, once in a run however often it is asked for."""
    return files.tree(os.path.join(entry, module), not_walked(module))


def not_walked(module: str) -> tuple[str, ...]:
    """Folders of a module that are left out when it is walked."""
    return SKIPPED.get(module, ()) + APART.get(module, ())


def lacks_record(files: Files, dist: Dist) -> bool:
    """Whether a RECORD should be there: pip and uv write one, conda and Debian need none."""
    if dist.form != ".dist-info" or dist.entry.endswith("/dist-packages") or not files.is_dir(dist.folder):
        return False
    record = os.path.join(dist.folder, "RECORD")
    if files.denied(record) or files.stat(record) is not None:
        return False
    return (files.read(os.path.join(dist.folder, "INSTALLER"), 100) or "pip").strip() in ("pip", "uv")


def changed_at(files: Files, dist: Dist) -> float | None:
    """Seconds since the epoch at which a distribution's registration or files last changed, or None.

    By modification times, never by ctime: that one moves, too, when a file only gets another owner, mode or name, and
    uv gives every file of its cache one more name whenever it installs the same release into any other environment.
    A file linked from such a cache may carry an old time; the registration's folder and RECORD are made at install.
    """
    latest = 0
    for item in ("RECORD", "METADATA", "PKG-INFO", ""):
        info = files.stat(os.path.join(dist.folder, item) if item else dist.folder)
        if info is not None:
            latest = max(latest, info.st_mtime_ns)
    for module in modules_of(dist.key):
        tree = tree_of(files, dist.entry, module)
        latest = max([latest] + [marks[1] for marks in tree.stats.values()]) if tree is not None else latest
    return latest / 1e9 if latest else None


def modules_of(key: str) -> list[str]:
    """Folders that a distribution of this name brings."""
    if key.startswith(CUTLASS):
        return ["nvidia_cutlass_dsl"]
    return [module for module, names in PROVIDERS.items() if key in names]


# -- modules and who brought them ------------------------------------------------------------------


def unowned(files: Files, path: SearchPath, dists: list[Dist], claims: Claims) -> tuple[list[str], list[str]]:
    """(leftovers, unregistered): folders without ``__init__`` and modules that no distribution brought."""
    names = {dist.key for dist in dists}
    leftovers, unregistered = [], []
    for module, providers in PROVIDERS.items():
        if module in claims.claimed or not names.isdisjoint(providers):
            continue
        kind, _ = locate(files, path, module)
        if kind == "namespace":
            leftovers.append(module)
        elif kind != "absent":
            unregistered.append(module)
    return leftovers, unregistered


def inventory(files: Files, path: SearchPath, tracked: set[str], detailed: list[str], user: Any) -> dict[str, Any]:
    """Build what the answer says of distributions; ``detailed`` names those whose requirements are wanted."""
    dists = registered(files, path, tracked)
    effective: dict[str, Dist] = {}
    for dist in dists:
        effective.setdefault(dist.key, dist)
    claims = claims_of(files, dists)
    editable = editables(files, path, dists)
    leftovers, unregistered = unowned(files, path, dists, claims)
    wanted = [dist for key, dist in effective.items() if key in tracked or key.startswith(CUTLASS)]
    requires = {key: requirements(files, effective[key]) for key in detailed if key in effective}
    damaged = {dist.key: damage(files, dist, claims) for dist in wanted if is_compared(dist.key)}
    changes = {dist.key: changed_at(files, dist) for dist in wanted}
    return {
        "distributions": {key: dist.version for key, dist in effective.items() if dist.version is not None},
        "distribution_count": len(dists),
        "requires_of": {key: lines for key, (lines, _) in requires.items()},
        "requires_python": {key: python for key, (_, python) in requires.items() if python is not None},
        "duplicates": duplicates(dists, tracked, set(editable)),
        "owners": claims.owners,
        "damaged": {key: found for key, found in damaged.items() if found is not None},
        "leftovers": leftovers,
        "unregistered": unregistered,
        "changed_at": {key: value for key, value in changes.items() if value is not None},
        "builds": {dist.key: claims.builds[dist.folder] for dist in wanted if dist.folder in claims.builds},
        "editable": editable,
        "unusable": unusable(files, effective["sglang"], claims, user) if "sglang" in effective else {},
        "shadow": shadow_of(files, path, effective.get("sglang"), editable="sglang" in editable),
    }
