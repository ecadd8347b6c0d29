"""The CUDA driver's library as the dynamic loader would find it."""

from __future__ import annotations

import fnmatch
import os
import re
import struct

from .files import FILE_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from .files import Files
    from .searchpath import SearchPath

LOADER_FILE_LIMIT = 64 * 1024
"""A file of the dynamic loader's configuration holds a few lines."""
LOADER_FILES = 200
LOADER_DIRS = 500
LIBRARY_LIMIT = 20

LIBCUDA = "libcuda.so.1"
DRIVER_VERSION = re.compile(r"libcuda\.so\.(\d{2,4}(?:\.\d{1,4}){1,2})\Z")
STUB_DIR = re.compile(r"(?:^|/)stubs(?:/|\Z)")
COMPAT_DIR = re.compile(r"(?:^|/)(?:cuda[-_])?compat(?:/|\Z)")


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
