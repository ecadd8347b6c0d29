"""What lies around the packages and comes and goes beside them: the CUDA toolkit, FlashInfer's cache and cubins."""

from __future__ import annotations

import os
import re
import stat

from .modules import locate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from .files import Files
    from .searchpath import SearchPath

HEADER_BYTES = 512 * 1024
"""Of cuda.h: it states its version in the first tenth of its 1.1 MB."""
CUDA_VERSION = re.compile(r"^#\s*define\s+(?:CUDA_VERSION|CUDART_VERSION)\s+(\d{4,6})\s*$", re.MULTILINE)
RELEASE = re.compile(r"(\d{1,3})\.(\d{1,3})")
NVCC_JSON = re.compile(r'"cuda_nvcc"\s*:\s*\{[^{}]*"version"\s*:\s*"([0-9.]{1,20})"')
TOOLKIT_TEXT = re.compile(r"CUDA Version ([0-9.]{1,20})")
CUBIN_LIMIT = 100000
PASSWD_BYTES = 1 << 20


def surroundings(files: Files, spec: Mapping[str, Any], python: str | None, path: SearchPath) -> dict[str, Any]:
    """Build this part of the answer. ``environ_seen`` in the specification: the variables are the server's own."""
    environ = (spec.get("environ") or {}) if spec.get("environ_seen") else {}
    seen = bool(spec.get("environ_seen"))
    return {
        "toolchain": toolchain(files, environ, python, path, seen),
        "cache": cache_folder(files, environ, spec.get("user"), seen),
        "cubins": cubins(files, environ, spec.get("user"), path, seen),
    }


# -- the CUDA toolkit ------------------------------------------------------------------------------


def toolchain(
    files: Files, environ: Mapping[str, str], python: str | None, path: SearchPath, seen: bool
) -> dict[str, Any]:
    """Say which nvcc FlashInfer would run, as flashinfer.jit.cpp_ext.get_cuda_path looks for it.

    That is CUDA_HOME or else CUDA_PATH as they stand, the folder above that of an nvcc on PATH, /usr/local/cuda;
    torch.utils.cpp_extension and tvm_ffi do alike. A compiler that only a wheel brings is found by none of them.
    """
    stated = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = which(files, environ.get("PATH", ""), "nvcc")
    nvcc, source, home = None, None, None
    if stated:
        home, source = stated, "cuda-home"
        nvcc = program(files, os.path.join(stated, "bin/nvcc")) if stated.startswith("/") else None
    elif on_path:
        home, source, nvcc = os.path.dirname(os.path.dirname(on_path)), "path", on_path
    elif files.is_dir("/usr/local/cuda"):
        home, source = "/usr/local/cuda", "default"
        nvcc = program(files, "/usr/local/cuda/bin/nvcc")
    if nvcc is None and not stated:
        wheel = next((place for place in wheel_homes(files, path) if program(files, place + "/bin/nvcc")), None)
        if wheel is not None:
            home, source, nvcc = wheel, "wheel", wheel + "/bin/nvcc"
    include = None if home is None or not home.startswith("/") else include_dir(files, home)
    prefix = os.path.dirname(os.path.normpath(python)) if python else None
    beside = program(files, os.path.join(prefix, "ninja")) if prefix else None
    on_path_ninja = which(files, environ.get("PATH", ""), "ninja") if seen else None
    return {
        "environ_seen": seen,
        "cuda_home": stated[:300] if stated else None,
        "cuda_home_ok": (stated.startswith("/") and files.is_dir(stated)) if stated else None,
        "nvcc": nvcc,
        "nvcc_source": source if nvcc else None,
        "release": compiler_release(files, home, source, path) if nvcc else None,
        "headers": None if home is None else include is not None,
        "headers_release": header_release(files, include),
        "ninja": (on_path_ninja is not None) if seen else None,
        "ninja_beside": beside is not None if prefix else None,
    }


def program(files: Files, path: str) -> str | None:
    """The path, if it is a file that somebody may execute."""
    info = files.stat(path)
    return path if info is not None and stat.S_ISREG(info.st_mode) and info.st_mode & 0o111 else None


def which(files: Files, variable: str, name: str) -> str | None:
    """Find a program on PATH; relative entries mean another folder for whoever starts it and are passed over."""
    for folder in variable.split(":")[:200]:
        found = program(files, os.path.join(folder, name)) if folder.startswith("/") else None
        if found:
            return found
    return None


def wheel_homes(files: Files, path: SearchPath) -> list[str]:
    """Folders in which NVIDIA's wheels put the compiler: one per CUDA release since 13, its own before."""
    homes = []
    for entry in path.site_dirs:
        nvidia = os.path.join(entry, "nvidia")
        names = [name for name in files.names(nvidia) if re.match(r"cu\d{2}\Z", name)]
        homes += [os.path.join(nvidia, name) for name in (*reversed(names), "cuda_nvcc")]
    return homes


def include_dir(files: Files, home: str) -> str | None:
    """The folder of a toolkit that has the runtime's headers."""
    for folder in (home + "/include", home + "/targets/%s-linux/include" % os.uname().machine):
        if files.is_file(folder + "/cuda_runtime.h"):
            return folder
    return None


def header_release(files: Files, include: str | None) -> str | None:
    """major.minor of a toolkit's headers."""
    for name in ("cuda.h", "cuda_runtime_api.h") if include else ():
        match = CUDA_VERSION.search(files.read("%s/%s" % (include, name), HEADER_BYTES) or "")
        if match:
            number = int(match.group(1))
            return "%d.%d" % (number // 1000, number % 1000 // 10)
    return None


def compiler_release(files: Files, home: str | None, source: str | None, path: SearchPath) -> str | None:
    """major.minor of an nvcc, from files beside it; the compiler itself is not run."""
    if home is None or not home.startswith("/"):
        return None
    match = NVCC_JSON.search(files.read(home + "/version.json", 65536) or "")
    match = match or TOOLKIT_TEXT.search(files.read(home + "/version.txt", 4096) or "")
    if match is None:
        # A wheel says its version by its registration, and so does a CUDA_HOME that leads to one.
        for entry in path.site_dirs:
            if not os.path.normpath(home).startswith(os.path.join(entry, "nvidia") + "/"):
                continue
            for item in files.names(entry):
                match = match or re.match(r"nvidia_cuda_nvcc(?:_cu\d+)?-(\d+\.\d+)[\d.]*\.dist-info\Z", item)
    if match is not None:
        release = RELEASE.match(match.group(1))
        return release.group(0) if release else None
    # Installed as one from an archive, compiler and headers are of one release; a wheel's need not be.
    return None if source == "wheel" else header_release(files, include_dir(files, home))


# -- FlashInfer's cache ----------------------------------------------------------------------------


def home_of(files: Files, environ: Mapping[str, str], user: Any, seen: bool) -> tuple[str | None, bool]:
    """(home folder, whether it is known that there is none) as pathlib.Path.home finds it for a user."""
    if "HOME" in environ:
        return environ["HOME"].rstrip("/") or "/", False
    if not seen or not isinstance(user, dict):
        return None, False
    text = files.read("/etc/passwd", PASSWD_BYTES)
    for line in (text or "").splitlines():
        fields = line.split(":")
        if len(fields) >= 7 and fields[2] == str(user.get("uid")):
            return fields[5] or "/", False
    return None, text is not None


def cache_base(files: Files, environ: Mapping[str, str], user: Any, seen: bool) -> tuple[str | None, bool]:
    """(FlashInfer's cache folder, whether it is known that there can be none)."""
    home, homeless = home_of(files, environ, user, seen)
    # The home folder is evaluated even where the variable stands in for it, and its absence is an error then too.
    base = None if homeless else environ.get("FLASHINFER_WORKSPACE_BASE", home) if seen else None
    return (os.path.normpath(os.path.join(base, ".cache/flashinfer")) if base else None), homeless


def cache_folder(files: Files, environ: Mapping[str, str], user: Any, seen: bool) -> dict[str, Any]:
    """Say where FlashInfer's cache is or would be made, and whether the server's user may write there."""
    folder, homeless = cache_base(files, environ, user, seen)
    if homeless:
        return {"path": None, "writable": False, "problem": "no-home"}
    if folder is None or not folder.startswith("/"):
        return {"path": folder, "writable": None, "problem": None}
    return {"path": folder[:300], **may_write(files, folder, user)}


def may_write(files: Files, folder: str, user: Any) -> dict[str, Any]:
    """Judge by owner, mode and mount flags whether a user can make or use a folder."""
    existing = "/"
    parts = [part for part in folder.split("/") if part]
    for index in range(len(parts) + 1):
        current = "/" + "/".join(parts[:index])
        info = files.stat(current)
        if info is None:
            if files.denied(current):
                return {"writable": None, "problem": None}
            break
        if not stat.S_ISDIR(info.st_mode):
            return {"writable": False, "problem": "not-a-folder"}
        existing = current
        if index < len(parts) and files.stat("/" + "/".join(parts[: index + 1])) is not None:
            allowed = permitted(files, current, info, user, 1)
            if not allowed:
                return {"writable": allowed, "problem": None if allowed is None else "permission"}
    if files.read_only(existing):
        return {"writable": False, "problem": "read-only"}
    info = files.stat(existing)
    allowed = None if info is None else permitted(files, existing, info, user, 3)
    return {"writable": allowed, "problem": "permission" if allowed is False else None}


def permitted(files: Files, path: str, info: os.stat_result, user: Any, wanted: int) -> bool | None:
    """Whether a user has the ``wanted`` bits (4 read, 2 write, 1 search) of a folder; None where that is not known."""
    if not isinstance(user, dict) or not isinstance(user.get("uid"), int):
        return None
    if user["uid"] == 0:
        return True
    groups = [user.get("gid"), *(user.get("groups") or [])]
    shift = 6 if info.st_uid == user["uid"] else 3 if info.st_gid in groups else 0
    if (info.st_mode >> shift) & wanted == wanted:
        return True
    # A list of further users may allow what the mode does not.
    return None if files.has_acl(path) else False


def cubins(files: Files, environ: Mapping[str, str], user: Any, path: SearchPath, seen: bool) -> int | None:
    """Count precompiled kernels where FlashInfer looks for them; None where that folder is not known or not readable.

    The package flashinfer_cubin comes first, then FLASHINFER_CUBIN_DIR, then the cache.
    """
    kind, places = locate(files, path, "flashinfer_cubin")
    if kind == "package":
        folder: str | None = places[0]
    elif environ.get("FLASHINFER_CUBIN_DIR"):
        folder = environ["FLASHINFER_CUBIN_DIR"]
    else:
        base, _ = cache_base(files, environ, user, seen)
        folder = None if base is None else base + "/cubins"
    if folder is None or not folder.startswith("/"):
        return None
    if files.stat(folder) is None:
        return None if files.denied(folder) else 0
    tree = files.tree(folder)
    if tree is None:
        return None
    count = sum(1 for name in tree.names if name.endswith(".cubin"))
    return min(count, CUBIN_LIMIT) if tree.complete or count else None
