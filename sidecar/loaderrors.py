"""What the dynamic loader says when a compiled module cannot be loaded, taken apart.

Pure functions over texts, and one that looks where a library lies. The texts are glibc's (``dlerror``), which
Python passes on in an ImportError and packages quote in messages of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct


class LoadFault(StrEnum):
    """What the loader missed, or stumbled over."""

    SYMBOL = "symbol"
    """A name that another library should have defined: it is of another version, or built another way."""
    LIBRARY = "library"
    """A shared library that it did not find."""
    VERSION = "version"
    """A symbol version of a system library, which is too old here (GLIBC, GLIBCXX)."""
    DENIED = "denied"
    """A file that is there and that it may not open."""
    DAMAGED = "damaged"
    """A file that is no library of this machine: cut off, overwritten, or for another word size."""
    SHORTAGE = "shortage"
    """Something of which there is too little where it ran: memory, descriptors."""
    UNMAPPABLE = "unmappable"
    """A file that the file system does not allow to be executed (noexec)."""
    UNREADABLE = "unreadable"
    """A file that the file system does not give: an I/O error, a mount that is gone."""


class LoadError(Struct, frozen=True, kw_only=True):
    """One thing that the loader missed.

    ``name`` is the symbol, the library's file name or the symbol version, else what is wrong. ``readable`` is the
    symbol as a programmer writes it, where that can be told. ``library`` is the file that wanted it, or that cannot
    be used, below site-packages or by its last two parts; a library that is not found has one where it was asked
    for by its path.
    ``old_strings``: True for a symbol that takes C++ strings as compilers did before the C++11 ABI, False for one
    that takes the new ones, None where none are in it.
    """

    fault: LoadFault
    name: str
    readable: str | None = None
    library: str | None = None
    old_strings: bool | None = None


# Each begins with what the loader says, and not with the file before it: a text of many file names, which whoever
# raises an exception may choose, would else be searched again from each of its characters.
_SYMBOL: Final = re.compile(r"undefined symbol: (?P<name>[^\s,)'\"]{1,500})")
_VERSION: Final = re.compile(r"version [`'](?P<name>[\w.]{1,60})' not found \(required by (?P<file>[^\s)]{1,300})\)")
_UNOPENED: Final = re.compile(r"cannot open shared object file(?:: (?P<why>[A-Z][\w /]{1,60}))?")
_OF_A_FILE: Final = (
    (
        LoadFault.SHORTAGE,
        re.compile(
            r"cannot allocate (?!memory in static TLS)[\w ]{1,60}"
            r"|failed to map segment from shared object: Cannot allocate"
            r"|cannot create shared object descriptor|cannot map zero-fill pages|out of memory",
            re.IGNORECASE,
        ),
    ),
    (LoadFault.UNMAPPABLE, re.compile(r"failed to map segment from shared object(?!: Cannot allocate)")),
    (
        LoadFault.UNREADABLE,
        re.compile(r"cannot read file data: (?:Input/output error|Stale file handle)|cannot stat shared object"),
    ),
    (
        LoadFault.DAMAGED,
        re.compile(
            r"file too short|invalid ELF header|wrong ELF class: \w+|ELF file\S{0,9} \w[\w ]{1,60}"
            r"|ELF load command[\w ]{1,60}|cannot read file data|object file has no [\w ]{1,40}|only ET_DYN[\w ]{1,40}"
        ),
    ),
)
"""What is wrong with a file that is there; all but a shortage only behind the name of a library."""
_WHY: Final = {
    "Permission denied": LoadFault.DENIED,
    "Operation not permitted": LoadFault.DENIED,
    "Too many open files": LoadFault.SHORTAGE,
    "Cannot allocate memory": LoadFault.SHORTAGE,
    "Input/output error": LoadFault.UNREADABLE,
    "Remote I/O error": LoadFault.UNREADABLE,
    "Stale file handle": LoadFault.UNREADABLE,
    "Transport endpoint is not connected": LoadFault.UNREADABLE,
    "Too many levels of symbolic links": LoadFault.UNREADABLE,
}
"""What keeps a file from being opened; anything else is that it is not there."""
_LIBRARY_NAME: Final = re.compile(r"[\w.+-]{1,100}")
_PATH_LIMIT: Final = 400


def load_error(text: str) -> LoadError | None:
    """Find what the loader missed in a message; a symbol first, since it is what sets broken builds apart."""
    if match := _SYMBOL.search(text):
        name = match["name"]
        return LoadError(
            fault=LoadFault.SYMBOL,
            name=name,
            readable=readable(name),
            library=_short(_named_before(text, match.start())),
            old_strings=_old_strings(name),
        )
    if match := _VERSION.search(text):
        return LoadError(fault=LoadFault.VERSION, name=match["name"], library=_short(match["file"]))
    for match in _UNOPENED.finditer(text):
        path = _named_before(text, match.start()) or ""
        name = path.rpartition("/")[2]
        if _LIBRARY_NAME.fullmatch(name):
            why = match["why"] or ""
            fault = next((fault for start, fault in _WHY.items() if why.startswith(start)), LoadFault.LIBRARY)
            return LoadError(fault=fault, name=name, library=_short(path) if "/" in path else None)
    for fault, pattern in _OF_A_FILE:
        for match in pattern.finditer(text):
            file = _named_before(text, match.start())
            if file is not None or fault is LoadFault.SHORTAGE:
                return LoadError(fault=fault, name=match[0], library=_short(file))
    return None


def _named_before(text: str, position: int) -> str | None:
    """Name the library in front of what the loader says of it: ``FILE: what is wrong``."""
    if not text.endswith(": ", 0, position):
        return None
    word = re.split(r"[\s:'\"]", text[max(0, position - _PATH_LIMIT) : position - 2])[-1]
    return word if ".so" in word else None


def _short(path: str | None) -> str | None:
    return None if path is None else below_packages(path)


def below_packages(path: str) -> str:
    """Give a file's path below site-packages, else its last two parts: no home directories."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2][-200:]
    return "/".join(path.split("/")[-2:])


def _old_strings(symbol: str) -> bool | None:
    """Tell the C++ string ABI from a mangled name: ``Ss`` is the old std::string, ``cxx11`` marks the new one."""
    if not symbol.startswith("_Z"):
        return None
    if "cxx11" in symbol:
        return False
    rest = re.sub(r"\d+[A-Za-z_]\w*?(?=\d|E|$)", "", symbol)
    return True if re.search(r"(?:[RPKO]|^|E|v|i)Ss", rest) else None


def readable(symbol: str) -> str | None:
    """Give the qualified name in a mangled one (``c10::cuda::SetDevice``); None where it is no simple one."""
    if not symbol.startswith("_Z"):
        return None
    rest = symbol[2:].removeprefix("N")
    parts: list[str] = []
    while rest:
        rest = re.sub(r"^[KVrRO]+(?=\d|St|S[a-z])", "", rest)
        if rest.startswith("St"):
            parts, rest = [*parts, "std"], rest[2:]
            continue
        match = re.match(r"\d{1,3}", rest)
        if match is None:
            break
        length = int(match[0])
        name, rest = rest[match.end() : match.end() + length], rest[match.end() + length :]
        if len(name) != length:
            return None
        parts.append(name)
        if not symbol.startswith("_ZN"):
            break
    return "::".join(parts) or None


def found_in_wheels(site_dirs: Iterable[str], library: str) -> str | None:
    """Where NVIDIA's wheels brought a library that the loader does not find, relative to site-packages.

    Looks at folders that wheels are known to use, and no deeper; never raises.
    """
    for folder in site_dirs:
        for pattern in ("nvidia/*/lib", "nvidia/*/lib64", "torch/lib", "nvidia/*/bin"):
            try:
                for place in sorted(Path(folder).glob(pattern)):
                    if (place / library).exists():
                        return (place / library).relative_to(folder).as_posix()
            except (OSError, ValueError):
                continue
    return None
