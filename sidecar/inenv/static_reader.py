"""Read the packages of a Python environment without executing anything of it.

``python -I -S static_reader.py SPEC --fd N``: stdlib only, Python 3.8 or newer, run by path, never imported.
SPEC is a JSON object:

``environ``  the few variables of the server that decide its import path (PYTHONPATH, HOME, ...) and where the
             dynamic loader looks (LD_LIBRARY_PATH)
``tracked``  normalised names of the distributions whose versions are wanted
``known``    fingerprint of an earlier answer; if it still holds the answer is only ``unchanged`` and ``libcuda``,
             which is not part of it: the driver's files come and go beside the packages
``root``     a foreign root directory; without it the environment is the one of the interpreter running this
``python``   path of the environment's interpreter inside the foreign root, if known

JSON lines go to file descriptor N: ``{"stage": ...}`` and at the end ``{"result": {...}}`` or, where the
environment may not or cannot be read, ``{"result": {"problem": token}}``.

Everything that is read may be hostile: only regular files are opened, never blocking, never more than
`FILE_LIMIT` bytes; inside a foreign root every path is resolved by the kernel within that root.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import fnmatch
import hashlib
import json
import os
import re
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost every run 5 ms
    from collections.abc import Callable, Mapping
    from typing import Any

FILE_LIMIT = 4 * 1024 * 1024
AST_LIMIT = 256 * 1024
"""A package's ``__init__`` of more than this is not parsed; FlashInfer's are a few kB."""
WALK_LIMIT = 100000
"""Files looked at per package tree; torch, the largest, has about 5,000 that count."""
ENTRY_LIMIT = 20000
NAME_LIMIT = 200
LOADER_FILE_LIMIT = 64 * 1024
"""A file of the dynamic loader's configuration holds a few lines."""
LOADER_FILES = 200
LOADER_DIRS = 500
LIBRARY_LIMIT = 20

VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+!-]{0,63}\Z")
VERSION_ASSIGNMENT = re.compile(r"""^__version__(?:\s*:[^=\n]*)?\s*=\s*["']([^"'\n]{1,64})["']""", re.MULTILINE)
CUDA_ASSIGNMENT = re.compile(r"""^cuda(?:\s*:[^=\n]*)?\s*=\s*(?:["']([0-9.]{1,16})["']|None\b)""", re.MULTILINE)
HIP_ASSIGNMENT = re.compile(r"""^hip(?:\s*:[^=\n]*)?\s*=\s*["']([0-9A-Za-z.+-]{1,32})["']""", re.MULTILINE)
PYTHON_DIR = re.compile(r"python(\d+)\.(\d+)\Z")

WALKED = ("flashinfer", "flashinfer_cubin", "flashinfer_jit_cache", "tvm_ffi", "torch")
NEEDED = ("tvm_ffi", "torch", "packaging", "requests", "pynvml", "tqdm")
"""Modules that every FlashInfer with a mamba module imports unconditionally, in the order it meets them."""

LIBCUDA = "libcuda.so.1"
DRIVER_VERSION = re.compile(r"libcuda\.so\.(\d{2,4}(?:\.\d{1,4}){1,2})\Z")
STUB_DIR = re.compile(r"(?:^|/)stubs(?:/|\Z)")
COMPAT_DIR = re.compile(r"(?:^|/)(?:cuda[-_])?compat(?:/|\Z)")
ARCH_DIR = re.compile(r"sm\d{2,3}\Z")

SYS_OPENAT2 = 437
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10


class KernelTooOldError(Exception):
    """This kernel cannot resolve paths inside a root (openat2, Linux 5.6)."""


class Files:
    """All access to files. A path that cannot be read is None; nothing here raises for one."""

    def __init__(self, root: str | None = None) -> None:
        self.root_fd: int | None = None
        self._listed: dict[str, list[str]] = {}
        if root is not None:
            self.root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._libc = ctypes.CDLL(None, use_errno=True)
            os.close(self._open("/"))

    def _open(self, path: str) -> int:
        if self.root_fd is None:
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
        how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
        arguments = (ctypes.c_long(SYS_OPENAT2), ctypes.c_int(self.root_fd), ctypes.c_char_p(os.fsencode(path)))
        fd = int(self._libc.syscall(*arguments, ctypes.c_char_p(how), ctypes.c_size_t(len(how))))
        if fd < 0:
            code = ctypes.get_errno()
            # A seccomp filter of an older container runtime answers EPERM for a call it does not know.
            if code == errno.ENOSYS or (code == errno.EPERM and path == "/"):
                raise KernelTooOldError
            raise OSError(code, os.strerror(code))
        return fd

    def _reopen(self, path: str, wanted: Callable[[int], bool], flags: int) -> int:
        """Open what ``path`` names if it is of the ``wanted`` kind.

        Looked at before it is opened, so that no device or pipe is ever touched.
        """
        handle = self._open(path)
        try:
            if not wanted(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not what was expected")
            return os.open("/proc/self/fd/%d" % handle, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        finally:
            os.close(handle)

    def stat(self, path: str) -> os.stat_result | None:
        """Status of what a path leads to."""
        try:
            handle = self._open(path)
        except (OSError, ValueError):
            return None
        try:
            return os.fstat(handle)
        finally:
            os.close(handle)

    def is_file(self, path: str) -> bool:
        """Whether it is a regular file."""
        info = self.stat(path)
        return info is not None and stat.S_ISREG(info.st_mode)

    def is_dir(self, path: str) -> bool:
        """Whether it is a directory."""
        info = self.stat(path)
        return info is not None and stat.S_ISDIR(info.st_mode)

    def read(self, path: str, limit: int = FILE_LIMIT) -> str | None:
        """At most ``limit`` bytes of a regular file as text, or None."""
        data = self.read_bytes(path, limit)
        return None if data is None else data.decode("utf-8", "replace")

    def read_bytes(self, path: str, limit: int) -> bytes | None:
        """At most ``limit`` bytes of a regular file, or None."""
        try:
            fd = self._reopen(path, stat.S_ISREG, os.O_RDONLY)
        except (OSError, ValueError):
            return None
        try:
            chunks = []
            left = limit
            while left > 0:
                chunk = os.read(fd, min(left, 1 << 20))
                if not chunk:
                    break
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
        except OSError:
            return None
        finally:
            os.close(fd)

    def names(self, path: str) -> list[str]:
        """Sorted names in a directory, at most `ENTRY_LIMIT`; empty for what is no directory."""
        if path not in self._listed:
            self._listed[path] = self._names(path)
        return self._listed[path]

    def _names(self, path: str) -> list[str]:
        try:
            fd = self._reopen(path, stat.S_ISDIR, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError):
            return []
        try:
            return sorted(os.listdir(fd))[:ENTRY_LIMIT]
        except OSError:
            return []
        finally:
            os.close(fd)

    def link(self, path: str) -> str | None:
        """Last part of the name of the file that ``path`` leads to, or None."""
        real = self.real(path)
        return None if real is None else os.path.basename(real)

    def real(self, path: str) -> str | None:
        """Name of the file that ``path`` leads to, or None; in a foreign root its front may be another's view."""
        try:
            handle = self._open(path)
        except (OSError, ValueError):
            return None
        try:
            return os.readlink("/proc/self/fd/%d" % handle)
        except OSError:
            return None
        finally:
            os.close(handle)

    def walk(self, path: str, visit: Callable[[str, os.stat_result], None]) -> None:
        """Call ``visit(relative, stat)`` for each .py and .so file below a directory, in a stable order.

        Links are not followed and ``__pycache__`` is left out: an import writes there.
        """
        try:
            fd = self._reopen(path, stat.S_ISDIR, os.O_RDONLY | os.O_DIRECTORY)
        except (OSError, ValueError):
            return
        budget = [WALK_LIMIT]
        try:
            self._walk(fd, "", visit, budget, 40)
        finally:
            os.close(fd)

    def _walk(
        self, fd: int, prefix: str, visit: Callable[[str, os.stat_result], None], budget: list[int], depth: int
    ) -> None:
        try:
            with os.scandir(fd) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            return
        for entry in found:
            budget[0] -= 1
            if budget[0] < 0:
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name == "__pycache__" or depth == 0:
                        continue
                    inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        self._walk(inner, prefix + entry.name + "/", visit, budget, depth - 1)
                    finally:
                        os.close(inner)
                elif entry.name.endswith((".py", ".so")):
                    visit(prefix + entry.name, entry.stat(follow_symlinks=False))
            except OSError:
                continue


def normalised(name: str) -> str:
    """Distribution names compare in this form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_or_none(text: str | None) -> str | None:
    """Let through only what looks like a version."""
    text = text.strip() if text else ""
    return text if VERSION.match(text) else None


def headers(text: str) -> list[tuple[str, str]]:
    """Header fields of a METADATA file: a list of (name, value), names in lower case."""
    fields = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if not line.strip():
            break
        if line[0] in " \t":
            continue
        name, colon, value = line.partition(":")
        if colon:
            fields.append((name.strip().lower(), value.strip()))
        if len(fields) >= 2000:
            break
    return fields


# -- the import path -------------------------------------------------------------------------------


def settings_of(files: Files, config: str) -> dict[str, str]:
    """Settings of a pyvenv.cfg."""
    values = {}
    for line in (files.read(config) or "").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            values[key.strip().lower()] = value.strip()
    return values


def virtual_environment(files: Files, executable: str) -> tuple[str | None, dict[str, str]]:
    """(prefix, settings) of the virtual environment that an interpreter belongs to, else (None, {})."""
    folder = os.path.dirname(os.path.abspath(executable))
    for prefix in (folder, os.path.dirname(folder)):
        config = os.path.join(prefix, "pyvenv.cfg")
        if files.is_file(config):
            # The prefix is the parent of the interpreter's folder wherever the file lies; so says site.
            return os.path.dirname(folder), settings_of(files, config)
    return None, {}


class SearchPath:
    """The import path under construction, in the order in which the interpreter builds it."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.entries: list[str] = []
        self.site_dirs: list[str] = []
        self.pth: list[tuple[str, str]] = []
        self.code: list[str] = []
        self._seen: set[object] = set()

    def add(self, path: str) -> bool:
        """Append an entry unless it is there already, under this name or (lib64, a link to lib) another."""
        key = os.path.normpath(path)
        info = self.files.stat(key)
        marks = {key} if info is None else {key, (info.st_dev, info.st_ino)}
        if marks & self._seen or len(self.entries) >= 500:
            return False
        self._seen |= marks
        self.entries.append(key)
        return True

    def add_site(self, path: str) -> None:
        """Add a site directory: itself, then the path lines of its .pth files; their code is only noted."""
        if not self.files.is_dir(path) or not self.add(path):
            return
        self.site_dirs.append(os.path.normpath(path))
        for name in self.files.names(path):
            if not name.endswith(".pth") or name.startswith("."):
                continue
            text = self.files.read(os.path.join(path, name))
            if text is None:
                continue
            self.pth.append((name, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()))
            for line in text.lstrip("\ufeff").splitlines()[:1000]:
                if line.startswith(("import ", "import\t")):
                    if name not in self.code:
                        self.code.append(name)
                elif line.strip() and not line.startswith("#"):
                    extra = os.path.join(path, line.rstrip())
                    if self.files.stat(extra) is not None:
                        self.add(extra)


def user_site(environ: Mapping[str, str], version: tuple[int, int]) -> str | None:
    """Compute the user's own site-packages, as the interpreter would compute it."""
    base = environ.get("PYTHONUSERBASE")
    if not base and environ.get("HOME"):
        base = os.path.join(environ["HOME"], ".local")
    return os.path.join(base, "lib", "python%d.%d" % version, "site-packages") if base else None


def python_path(environ: Mapping[str, str]) -> list[str]:
    """Absolute entries of PYTHONPATH; what relative ones mean depends on the server's folder."""
    return [entry for entry in environ.get("PYTHONPATH", "").split(":") if entry.startswith("/")][:100]


def own_environment(files: Files, spec: Mapping[str, Any]) -> tuple[str | None, str, SearchPath]:
    """Find the environment of the interpreter that runs this, as it would be after a normal start."""
    import site

    environ = spec.get("environ") or {}
    prefix, config = virtual_environment(files, sys.executable)
    with_system = config.get("include-system-site-packages", "true").lower() == "true"
    path = SearchPath(files)
    for entry in python_path(environ):
        path.add(entry)
    for entry in sys.path:
        if entry:
            path.add(entry)
    bases = [sys.base_prefix, sys.base_exec_prefix]
    if prefix is not None:
        # site does the same on a normal start, and Debian's getsitepackages looks at it.
        sys.prefix = sys.exec_prefix = prefix
        for folder in site.getsitepackages([prefix]):
            path.add_site(folder)
    if (prefix is None or with_system) and not environ.get("PYTHONNOUSERSITE"):
        user = user_site(environ, sys.version_info[:2])
        if user:
            path.add_site(user)
    if prefix is None or with_system:
        for folder in site.getsitepackages(bases):
            path.add_site(folder)
    version = "%d.%d.%d" % sys.version_info[:3]
    return sys.executable or None, version, path


def library_dirs(files: Files, prefix: str, wanted: tuple[int, int] | None) -> list[tuple[tuple[int, int], str]]:
    """(version, directory) of each place below ``prefix`` where an interpreter of ``wanted`` looks for packages."""
    found = []
    for library in ("lib", "lib64", "local/lib"):
        for name in files.names(os.path.join(prefix, library)):
            match = PYTHON_DIR.match(name)
            if match is None:
                continue
            version = (int(match.group(1)), int(match.group(2)))
            if wanted is not None and version != wanted:
                continue
            for packages in ("site-packages", "dist-packages"):
                folder = os.path.join(prefix, library, name, packages)
                if files.is_dir(folder):
                    found.append((version, folder))
    if prefix == "/usr":
        # Debian's own packages; /usr/local comes before them in its interpreter's path.
        found = library_dirs(files, "/usr/local", wanted) + found
        if files.is_dir("/usr/lib/python3/dist-packages"):
            found.append((wanted or (3, 0), "/usr/lib/python3/dist-packages"))
    return found


def interpreter_version(
    files: Files, python: str, config: Mapping[str, str]
) -> tuple[tuple[int, int] | None, str | None]:
    """((major, minor), full version) of an interpreter that must not be run, as far as files tell."""
    for text in (config.get("version_info", ""), config.get("version", "")):
        match = re.match(r"(\d+)\.(\d+)", text)
        if match:
            return (int(match.group(1)), int(match.group(2))), version_or_none(text)
    match = PYTHON_DIR.match(files.link(python) or "")
    if match:
        return (int(match.group(1)), int(match.group(2))), None
    return None, None


def foreign_candidates(files: Files, python: str | None) -> list[str]:
    """Interpreters' prefixes inside a foreign root, the likeliest first."""
    if python:
        return [python]
    prefixes = ["/opt/" + name for name in files.names("/opt")[:200]]
    prefixes += ["/venv", "/app/venv", "/app/.venv", "/workspace/.venv", "/sgl-workspace/.venv", "/opt/conda"]
    prefixes += ["/root/miniconda3", "/usr/local", "/usr"]
    # By name, not by what the link leads to: the base interpreter may lie outside what can be seen.
    return [prefix + "/bin/python3" for prefix in prefixes if "python3" in files.names(prefix + "/bin")]


def foreign_environment(files: Files, spec: Mapping[str, Any]) -> tuple[str | None, str | None, SearchPath | None]:
    """Find the environment inside another root: read by this interpreter, nothing of it executed."""
    environ = spec.get("environ") or {}
    for python in foreign_candidates(files, spec.get("python")):
        prefix, config = virtual_environment(files, python)
        version, full = interpreter_version(files, python, config)
        with_system = config.get("include-system-site-packages", "true").lower() == "true"
        path = SearchPath(files)
        for entry in python_path(environ):
            path.add(entry)
        base = os.path.dirname(os.path.dirname(os.path.normpath(python)))
        found = library_dirs(files, prefix or base, version)
        if version is None and found:
            version = max(found)[0]
            found = [pair for pair in found if pair[0] == version]
        for _, folder in found if prefix is not None else []:
            path.add_site(folder)
        if (prefix is None or with_system) and not environ.get("PYTHONNOUSERSITE") and version:
            user = user_site(environ, version)
            if user:
                path.add_site(user)
        if prefix is None:
            for _, folder in found:
                path.add_site(folder)
        elif with_system and config.get("home"):
            for _, folder in library_dirs(files, os.path.dirname(config["home"]), version):
                path.add_site(folder)
        wanted = spec.get("python") or any(
            files.is_dir(os.path.join(folder, name)) for folder in path.site_dirs for name in ("sglang", "flashinfer")
        )
        if wanted and path.site_dirs:
            return python, full or ("%d.%d" % version if version else None), path
    return None, None, None


# -- distributions ---------------------------------------------------------------------------------


def split_name(folder: str) -> tuple[str, str] | None:
    """('name', 'version') of a .dist-info or .egg-info entry by its file name, or None."""
    for suffix in (".dist-info", ".egg-info"):
        if folder.endswith(suffix):
            name, _, rest = folder[: -len(suffix)].partition("-")
            return (name, rest.split("-")[0]) if name else None
    return None


def metadata_file(files: Files, folder: str) -> str:
    """Path of a distribution's header fields."""
    if folder.endswith(".dist-info"):
        return os.path.join(folder, "METADATA")
    return folder if files.is_file(folder) else os.path.join(folder, "PKG-INFO")


def editable(files: Files, folder: str) -> bool:
    """Whether a distribution was installed in editable mode, so that its files lie elsewhere."""
    text = files.read(os.path.join(folder, "direct_url.json"))
    if text is None:
        return False
    try:
        return bool(json.loads(text)["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):
        return False


def distributions(
    files: Files, path: SearchPath, tracked: set[str]
) -> tuple[dict[str, str], int, list[str], list[str]]:
    """Versions of the tracked distributions; the first on the import path wins, as for importlib.metadata."""
    versions = {}
    requires = []
    editables = []
    seen = set()
    total = 0
    for entry in path.entries:
        for name in files.names(entry):
            parts = split_name(name)
            if parts is None:
                continue
            total += 1
            key = normalised(parts[0])
            if key in seen or key not in tracked:
                continue
            seen.add(key)
            folder = os.path.join(entry, name)
            fields = headers(files.read(metadata_file(files, folder)) or "")
            stated = next((value for field, value in fields if field == "version"), None)
            version = version_or_none(stated) or version_or_none(parts[1])
            if version is not None:
                versions[key] = version
            if key == "sglang":
                lines = [value for field, value in fields if field == "requires-dist"]
                requires = [line[:300] for line in lines if requirement_name(line) in tracked][:200]
            if editable(files, folder):
                editables.append(key)
    return versions, total, requires, editables


def requirement_name(line: str) -> str:
    """Normalised name that a requirement line begins with."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
    return normalised(match.group(0)) if match else ""


# -- modules ---------------------------------------------------------------------------------------


def locate(files: Files, path: SearchPath, name: str) -> tuple[str, list[str]]:
    """(kind, places) of a top-level module as the import system would find it.

    ``package`` and ``module`` end the search; a folder without ``__init__`` is a ``namespace`` only if
    nothing better follows on the path.
    """
    portions = []
    for entry in path.entries:
        folder = os.path.join(entry, name)
        if files.is_file(os.path.join(folder, "__init__.py")):
            return "package", [folder]
        if files.is_file(folder + ".py"):
            return "module", [folder + ".py"]
        if files.is_dir(folder):
            portions.append(folder)
        elif any(item.startswith(name + ".") and item.endswith(".so") for item in files.names(entry)):
            return "module", [folder]
    return ("namespace", portions[:20]) if portions else ("absent", [])


def assigned_version(files: Files, folder: str) -> tuple[bool, str | None]:
    """``__version__`` as a package's own files state it: (found a _build_meta, version or None)."""
    text = files.read(os.path.join(folder, "_build_meta.py"))
    if text is not None:
        match = VERSION_ASSIGNMENT.search(text)
        return True, version_or_none(match.group(1)) if match else None
    match = VERSION_ASSIGNMENT.search(files.read(os.path.join(folder, "__init__.py")) or "")
    return False, version_or_none(match.group(1)) if match else None


def bound_names(body: list[ast.stmt]) -> dict[str, str | None] | None:
    """Names that a module body binds, with the submodule that each comes from; None for a star import."""
    names: dict[str, str | None] = {}
    for node in body:
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            blocks = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
            for block in blocks:
                inner = bound_names(block)
                if inner is None:
                    return None
                names.update(inner)
        elif isinstance(node, ast.ImportFrom):
            source = node.module if node.level == 1 and node.module and "." not in node.module else None
            for alias in node.names:
                if alias.name == "*":
                    return None
                names[alias.asname or alias.name] = source
        else:
            names.update(dict.fromkeys(plainly_bound(node)))
    return names


def plainly_bound(node: ast.stmt) -> list[str]:
    """Names that one simple statement binds."""
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
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
        text = files.read(os.path.join(folder, "__init__.py"))
        if text is None:
            facts["state"] = "no-init"
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


def companion(files: Files, path: SearchPath, name: str) -> dict[str, Any]:
    """Kind and version of a package that FlashInfer looks for beside itself."""
    kind, places = locate(files, path, name)
    version = assigned_version(files, places[0])[1] if kind == "package" else None
    return {"kind": kind, "version": version}


def flashinfer(files: Files, path: SearchPath) -> dict[str, Any]:
    """FlashInfer's files and those of what it needs."""
    kind, places = locate(files, path, "flashinfer")
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
    if kind != "package":
        return {"kind": kind, "folders": [], "plain": False}
    inner = [name for name in files.names(places[0]) if ARCH_DIR.match(name)]
    folders = [name for name in inner if has_ops(os.path.join(places[0], name))]
    return {"kind": kind, "folders": folders[:LIBRARY_LIMIT], "plain": has_ops(places[0])}


# -- the CUDA driver's library ---------------------------------------------------------------------


def cache_entries(data: bytes) -> list[str] | None:
    """Paths of libcuda.so.1 in an ld.so.cache in its order; None for what is no such file.

    The format is glibc's: a header with counts, entries of 24 bytes with offsets of name and path, strings. An
    older format may come first and carry the newer one behind itself.
    """
    start = data.find(b"glibc-ld.so.cache1.1")
    if start < 0 or (start > 0 and not data.startswith(b"ld.so-1.7.0")) or len(data) < start + 48:
        return None
    (count,) = struct.unpack_from("=I", data, start + 20)
    found = []
    for index in range(min(count, (len(data) - start - 48) // 24)):
        _flags, key, value = struct.unpack_from("=iII", data, start + 48 + 24 * index)
        name = data[start + key : start + key + len(LIBCUDA) + 1]
        if name != LIBCUDA.encode() + b"\0":
            continue
        text = data[start + value : start + value + 4096].split(b"\0", 1)[0]
        if text.startswith(b"/"):
            found.append(os.fsdecode(text))
    return found


def configured_dirs(files: Files) -> list[tuple[str, str]]:
    """(directory, file that names it) of the loader's configuration, in its order, includes followed once."""
    dirs: list[tuple[str, str]] = []
    seen: set[str] = set()

    def follow(path: str, depth: int) -> None:
        if path in seen or len(seen) >= LOADER_FILES or depth > 10:
            return
        seen.add(path)
        for raw in (files.read(path, LOADER_FILE_LIMIT) or "").splitlines()[:2000]:
            line = raw.partition("#")[0].strip()
            words = line.split()
            if words and words[0] == "include":
                for pattern in words[1:20]:
                    absolute = os.path.normpath(os.path.join("/etc", pattern))
                    folder, last = os.path.split(absolute)
                    for name in fnmatch.filter(files.names(folder), last):
                        follow(os.path.join(folder, name), depth + 1)
            elif line.startswith("/") and len(dirs) < LOADER_DIRS:
                dirs.append((line.partition("=")[0].rstrip("/ \t") or "/", path))

    follow("/etc/ld.so.conf", 0)
    return dirs


def library(files: Files, path: str, where: str, configured: Mapping[str, str]) -> dict[str, Any] | None:
    """Describe one libcuda.so.1, or None where the loader would pass it over: not there, or of another word size."""
    if not files.is_file(path):
        return None
    head = files.read_bytes(path, 5)
    if head is None or head == b"\x7fELF\x01":
        return None
    real = files.real(path) or path
    version = DRIVER_VERSION.search(real)
    folders = (os.path.dirname(path), os.path.dirname(real))
    kind = "driver"
    if any(STUB_DIR.search(folder) for folder in folders):
        kind = "stub"
    elif any(COMPAT_DIR.search(folder) for folder in folders):
        kind = "compat"
    return {
        "path": path,
        "version": version.group(1) if version else None,
        "kind": kind,
        "where": where,
        "conf": configured.get(os.path.dirname(path)),
    }


def loader_paths(files: Files, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """(path, where) at which the dynamic loader looks for libcuda.so.1, in its order.

    A RUNPATH is not considered: the libraries that need it look for it without one.
    """
    entries = re.split("[:;]", environ.get("LD_LIBRARY_PATH", ""))[:LOADER_DIRS]
    places = [(os.path.join(entry, LIBCUDA), "LD_LIBRARY_PATH") for entry in entries if entry.startswith("/")]
    cached = cache_entries(files.read_bytes("/etc/ld.so.cache", FILE_LIMIT) or b"")
    if cached is None:
        places += [(os.path.join(folder, LIBCUDA), "ld.so.conf") for folder, _ in configured_dirs(files)]
    else:
        places += [(path, "ld.so.cache") for path in cached[:LOADER_DIRS]]
    triplet = os.uname().machine + "-linux-gnu"
    for folder in ("/lib/" + triplet, "/usr/lib/" + triplet, "/lib64", "/usr/lib64", "/lib", "/usr/lib"):
        places.append((os.path.join(folder, LIBCUDA), "default"))
    return places


def compat_paths(files: Files, prefix: str | None, path: SearchPath) -> list[str]:
    """Where forward-compatibility packages put their libcuda.so.1: CUDA's own, conda's, and wheels'."""
    folders = []
    for name in files.names("/usr/local"):
        if name == "cuda" or name.startswith("cuda-"):
            base = os.path.join("/usr/local", name, "compat")
            folders += [base, base + "/lib", base + "/lib.real"]
    if prefix:
        folders.append(os.path.join(prefix, "cuda-compat"))
    for entry in path.site_dirs:
        for name in files.names(os.path.join(entry, "nvidia")):
            folders.append(os.path.join(entry, "nvidia", name, "compat"))
            if name == "cuda_compat":
                folders.append(os.path.join(entry, "nvidia", name, "lib"))
    return [os.path.join(folder, LIBCUDA) for folder in folders]


def libcuda(files: Files, environ: Mapping[str, str], python: str | None, path: SearchPath) -> dict[str, Any]:
    """Say which libcuda.so.1 the loader finds, best first, and which forward-compatibility ones are installed."""
    configured: dict[str, str] = {}
    for folder, conf in configured_dirs(files):
        configured.setdefault(folder, conf)

    def described(places: list[tuple[str, str]]) -> list[dict[str, Any]]:
        found: dict[object, dict[str, Any]] = {}
        for place, where in places:
            if len(found) >= LIBRARY_LIMIT:
                break
            info = files.stat(place)
            mark = None if info is None else (info.st_dev, info.st_ino)
            # One file under several names is one: /lib is a link to /usr/lib nowadays.
            if mark is None or mark in found:
                continue
            one = library(files, place, where, configured)
            if one is not None:
                found[mark] = one
        return list(found.values())

    prefix = os.path.dirname(os.path.dirname(os.path.normpath(python))) if python else None
    return {
        "found": described(loader_paths(files, environ)),
        "compat": described([(place, "compat") for place in compat_paths(files, prefix, path)]),
    }


# -- the fingerprint -------------------------------------------------------------------------------


def fingerprint(files: Files, python: str | None, version: str | None, path: SearchPath) -> str:
    """Compute what changes whenever an installation, an upgrade or an edit in place could change an import's outcome.

    Sizes, times and inodes, no contents: wheels may carry old mtimes, so ctime and inode count too. No
    device number and no directory times: a bind mount changes the one, a written .pyc the other.
    """
    digest = hashlib.sha256()

    def put(*parts: object) -> None:
        digest.update(json.dumps(parts).encode())

    def put_stat(label: str, info: os.stat_result | None) -> None:
        if info is None:
            put(label, None)
        else:
            put(label, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_mode)

    put("python", python, version)
    if python:
        put_stat("interpreter", files.stat(python))
    put("path", path.entries)
    put("pth", path.pth)
    for entry in path.entries:
        for name in files.names(entry):
            if name.endswith((".dist-info", ".egg-info")):
                folder = os.path.join(entry, name)
                for item in ("RECORD", "METADATA", "PKG-INFO", "direct_url.json"):
                    put_stat(folder + "/" + item, files.stat(os.path.join(folder, item)))
    for package in WALKED:
        kind, places = locate(files, path, package)
        put(package, kind, places)
        for place in places:
            if kind == "module":
                put_stat(place, files.stat(place))
            else:
                files.walk(place, put_stat)
    for package in NEEDED:
        put(package, locate(files, path, package))
    return digest.hexdigest()


# -- the script ------------------------------------------------------------------------------------


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
    python, version, path = own_environment(files, spec) if root is None else foreign_environment(files, spec)
    if path is None:
        return {"problem": "no-environment"}
    stage("fingerprint")
    mark = fingerprint(files, python, version, path)
    stage("libcuda")
    driver = libcuda(files, spec.get("environ") or {}, python, path)
    if mark == spec.get("known"):
        return {"unchanged": True, "fingerprint": mark, "libcuda": driver}
    stage("distributions")
    tracked = set(spec.get("tracked") or ())
    versions, total, requires, editables = distributions(files, path, tracked)
    stage("modules")
    return {
        "fingerprint": mark,
        "python": python,
        "python_version": version,
        "site_dirs": path.site_dirs,
        "path_code": path.code[:100],
        "distributions": versions,
        "distribution_count": total,
        "requires": requires,
        "editable": editables,
        "torch": torch(files, path),
        "kernel": kernel_wheel(files, path),
        "libcuda": driver,
        "flashinfer": flashinfer(files, path),
    }


def main() -> None:
    """Run the script."""
    spec = json.loads(sys.argv[1])
    fd = int(sys.argv[sys.argv.index("--fd") + 1])

    def emit(message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    sys.setrecursionlimit(2000)
    emit({"result": examine(spec, lambda name: emit({"stage": name}))})


main()
