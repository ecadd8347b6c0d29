"""The import path of an interpreter, as its files say it would be after a normal start."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import stat
import sys

from .texts import version_or_none

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from .files import Files

PYTHON_DIR = re.compile(r"python(\d+)\.(\d+)\Z")

STANDARD_ZIP = re.compile(r"python\d+\.zip\Z")
"""Where the standard library may lie."""
PATH_LIMIT = 500
"""Entries of an import path."""
FINDER = re.compile(r"\bimport (__editable___\w{1,200}_finder)\b")
"""How the .pth file of an editable install by setuptools names the module that finds its packages."""
FINDER_MAPPING = re.compile(r"^MAPPING(?:\s*:[^=\n]*)?\s*=\s*(\{[^\n]{0,100000}\})\s*$", re.MULTILINE)
DSL_FOLDERS = ("python_packages", "dsl_packages")
"""Folders of nvidia_cutlass_dsl that code in its .pth file puts in front of the path: 4.4's name and 4.6's."""


def settings_of(files: Files, config: str) -> dict[str, str]:
    """Settings of a pyvenv.cfg."""
    values = {}
    for line in (files.read(config, 65536) or "").splitlines():
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
    """The import path under construction, in the order in which the interpreter builds it.

    ``entries`` is the path, ``site_dirs`` those of it whose .pth files count. ``pth`` holds (file, hash) of what
    added to it, ``code`` the .pth files that run code of unknown effect and the archives on the path, ``mapping``
    the packages that finders of editable installs know, by name. ``version`` is the interpreter's (major, minor)
    where known. ``no_site`` says that there are no site directories at all. ``leading`` are those entries that come
    before the standard library's.
    """

    def __init__(self, files: Files, version: tuple[int, int] | None = None) -> None:
        self.files = files
        self.version = version
        self.entries: list[str] = []
        self.site_dirs: list[str] = []
        self.pth: list[tuple[str, str]] = []
        self.code: list[str] = []
        self.mapping: dict[str, str] = {}
        self.no_site = False
        self.leading: list[str] = []
        self._seen: set[object] = set()

    def add(self, path: str, *, first: bool = False) -> bool:
        """Append an entry unless it is there already, under this name or (lib64, a link to lib) another."""
        key = os.path.normpath(path)
        info = self.files.stat(key)
        marks = {key} if info is None else {key, (info.st_dev, info.st_ino)}
        if marks & self._seen or len(self.entries) >= PATH_LIMIT:
            return False
        self._seen |= marks
        if info is not None and stat.S_ISREG(info.st_mode) and not STANDARD_ZIP.match(os.path.basename(key)):
            # An archive that modules are imported from; nothing here looks into one.
            self.code.append(os.path.basename(key))
        self.entries.insert(0 if first else len(self.entries), key)
        return True

    def add_leading(self, spec: Mapping[str, Any]) -> None:
        """Add what comes before everything else: the server's folder or its script's, then PYTHONPATH."""
        self.no_site = spec.get("no_site") is True
        environ = spec.get("environ") or {}
        cwd = spec.get("cwd")
        cwd = cwd if isinstance(cwd, str) and cwd.startswith("/") else None
        script = spec.get("script")
        if not (environ.get("PYTHONSAFEPATH") and (self.version is None or self.version >= (3, 11))):
            if spec.get("cwd_on_path"):
                self._add_leading(cwd)
            elif isinstance(script, str) and script.startswith("/"):
                self._add_leading(self._folder_of(script))
        for entry in environ["PYTHONPATH"].split(":")[:100] if environ.get("PYTHONPATH") else ():
            # What a relative entry means depends on the server's folder, and so does an empty one.
            self._add_leading(entry if entry.startswith("/") else cwd and os.path.join(cwd, entry))

    def _add_leading(self, folder: str | None) -> None:
        if folder and self.add(folder):
            self.leading.append(os.path.normpath(folder))

    def _folder_of(self, script: str) -> str:
        """The folder that Python takes for a script's: links are followed; a folder that is run is its own."""
        if self.files.is_dir(script):
            return script
        real, root = self.files.real(script) or script, self.files.real("/") or "/"
        # Of a file behind another root the kernel says where it lies by its own root, or by ours.
        inside = real[len(root) :] if root != "/" and real.startswith(root + "/") else real
        folder = os.path.dirname(inside)
        return folder if self.files.is_dir(folder) else os.path.dirname(script)

    def add_site(self, path: str) -> None:
        """Add a site directory: itself, then the path lines of its .pth files; their code is only noted."""
        if self.no_site or not self.files.is_dir(path) or not self.add(path):
            return
        self.site_dirs.append(os.path.normpath(path))
        for name in self.files.names(path):
            if not name.endswith(".pth") or name.startswith("."):
                continue
            text = self.files.read(os.path.join(path, name), 1 << 20)
            if text is not None:
                self._add_pth(path, name, text)

    def _add_pth(self, path: str, name: str, text: str) -> None:
        self.pth.append((name, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()))
        for line in text.lstrip("\ufeff").splitlines()[:1000]:
            if line.startswith(("import ", "import\t")):
                if not self._add_known_code(path, line) and name not in self.code:
                    self.code.append(name)
            elif line.strip() and not line.startswith("#"):
                extra = os.path.join(path, line.rstrip())
                if self.files.stat(extra) is not None:
                    self.add(extra)

    def _add_known_code(self, path: str, line: str) -> bool:
        """Do what well-known lines of code would do, without running them; False for any other line."""
        if "_distutils_hack" in line and "SETUPTOOLS_USE_DISTUTILS" in line:
            return True
        if "nvidia_cutlass_dsl" in line:
            for folder in DSL_FOLDERS:
                place = os.path.join(path, "nvidia_cutlass_dsl", folder)
                if folder in line and self.files.is_dir(place):
                    self.add(place, first="insert(0" in line.replace(" ", ""))
                    return True
        match = FINDER.search(line)
        if match is None:
            return False
        text = self.files.read(os.path.join(path, match.group(1) + ".py"), 1 << 20) or ""
        self.pth.append((match.group(1), hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()))
        mapping = finder_mapping(text)
        for name, place in mapping.items():
            self.mapping.setdefault(name, place)
        return bool(mapping)


def finder_mapping(text: str) -> dict[str, str]:
    """Package name -> folder, or module name -> file without its ending, of an editable install's finder."""
    match = FINDER_MAPPING.search(text)
    if match is None:
        return {}
    try:
        value = ast.literal_eval(match.group(1))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    pairs = list(value.items())[:100] if isinstance(value, dict) else []
    return {
        name: place
        for name, place in pairs
        if isinstance(name, str) and isinstance(place, str) and place.startswith("/")
    }


def user_site(environ: Mapping[str, str], version: tuple[int, int], home: str | None = None) -> str | None:
    """Compute the user's own site-packages, as the interpreter would; ``home`` is what stands in for HOME."""
    base = environ.get("PYTHONUSERBASE")
    home = environ.get("HOME", home)
    if not base and home is not None:
        base = home.rstrip("/") + "/.local"
    return os.path.join(base, "lib", "python%d.%d" % version, "site-packages") if base else None


def moved_home(environ: Mapping[str, str]) -> list[str]:
    """Give the prefixes that PYTHONHOME puts in place of an interpreter's own, platform-independent part first."""
    first, _, second = (environ.get("PYTHONHOME") or "").partition(":")
    return [first, second or first] if first else []


def own_environment(files: Files, spec: Mapping[str, Any]) -> tuple[str | None, str, SearchPath]:
    """Find the environment of the interpreter that runs this, as it would be after a normal start."""
    import site

    environ = spec.get("environ") or {}
    prefix, config = virtual_environment(files, sys.executable)
    with_system = config.get("include-system-site-packages", "true").lower() == "true"
    path = SearchPath(files, sys.version_info[:2])
    path.add_leading(spec)
    bases = [sys.base_prefix, sys.base_exec_prefix]
    moved = moved_home(environ)
    own = bases[0].rstrip("/")
    for entry in filter(None, sys.path):
        if moved and entry.startswith(own + "/"):
            path.add(moved[entry.endswith("/lib-dynload")] + entry[len(own) :])
        else:
            path.add(entry)
    bases = moved or bases
    if prefix is not None:
        # site does the same on a normal start, and Debian's getsitepackages looks at it.
        sys.prefix = sys.exec_prefix = prefix
        for folder in site.getsitepackages([prefix]):
            path.add_site(folder)
    if (prefix is None or with_system) and not environ.get("PYTHONNOUSERSITE"):
        user = user_site(environ, sys.version_info[:2], spec.get("home"))
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
        base = os.path.dirname(os.path.dirname(os.path.normpath(python)))
        base = next(iter(moved_home(environ)), base)
        found = library_dirs(files, prefix or base, version)
        if version is not None and not found:
            # The configuration of a copied environment may name another interpreter than it has packages for.
            version, full = None, None
            found = library_dirs(files, prefix or base, None)
        if version is None and found:
            version = max(found)[0]
            found = [pair for pair in found if pair[0] == version]
        path = SearchPath(files, version)
        path.add_leading(spec)
        for _, folder in found if prefix is not None else []:
            path.add_site(folder)
        if (prefix is None or with_system) and not environ.get("PYTHONNOUSERSITE") and version:
            user = user_site(environ, version)
            if user:
                path.add_site(user)
        if prefix is None:
            for _, folder in found:
                path.add_site(folder)
        elif with_system and (config.get("home") or moved_home(environ)):
            system = next(iter(moved_home(environ)), os.path.dirname(config.get("home", "")))
            for _, folder in library_dirs(files, system, version):
                path.add_site(folder)
        wanted = spec.get("python") or any(
            files.is_dir(os.path.join(folder, name)) for folder in path.site_dirs for name in ("sglang", "flashinfer")
        )
        if wanted and (path.site_dirs or path.no_site):
            return python, full or ("%d.%d" % version if version else None), path
    return None, None, None
