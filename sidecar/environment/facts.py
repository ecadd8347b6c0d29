"""What is known of an environment."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from sidecar.model import Scope

UNKNOWN_VERSION = "0.0.0+unknown"
"""What FlashInfer calls itself without its build metadata; it then compares no versions."""


class Companion(Struct, frozen=True, kw_only=True):
    """A package that FlashInfer looks for beside itself. ``kind`` is package, module, namespace or absent."""

    kind: str = "absent"
    version: str | None = None


class MambaFiles(Struct, frozen=True, kw_only=True):
    """The files of ``flashinfer.mamba``.

    ``state``: present, absent, no-init (a folder without ``__init__``), empty-init, invalid-init (does not parse).
    ``symbol``: bound, missing, source-missing (its submodule's file is not there) or unknown.
    """

    state: str = "absent"
    names: tuple[str, ...] | None = None
    symbol: str = "unknown"


class FlashInferFiles(Struct, frozen=True, kw_only=True):
    """FlashInfer as its files show it.

    ``kind``: package, module (a file shadows the package), namespace (a leftover folder) or absent. ``version`` is
    what ``flashinfer.__version__`` would say, from its build metadata; not the distribution's. ``missing`` lists
    modules that every import of it needs and that are not there.
    """

    kind: str = "absent"
    places: tuple[str, ...] = ()
    version: str | None = None
    mamba: MambaFiles = field(default_factory=MambaFiles)
    cubin: Companion = field(default_factory=Companion)
    jit_cache: Companion = field(default_factory=Companion)
    missing: tuple[str, ...] = ()


class KernelFiles(Struct, frozen=True, kw_only=True):
    """The kernel wheel's package ``sgl_kernel``.

    ``kind`` is package, module, namespace or absent. ``folders`` names the builds for GPUs that it holds (sm90,
    sm100), ``plain`` says that there is one beside them, as older releases have it.
    """

    kind: str = "absent"
    folders: tuple[str, ...] = ()
    plain: bool = False


class LibraryFile(Struct, frozen=True, kw_only=True):
    """A ``libcuda.so.1``.

    ``version`` is the driver's, from the real file's name. ``kind`` is stub (a toolkit's, for linking only), compat
    (a forward-compatibility package) or driver. ``where`` says what led to it: LD_LIBRARY_PATH, ld.so.cache,
    ld.so.conf, default or compat. ``conf`` is the file of the loader's configuration that names its folder.
    """

    path: str
    version: str | None = None
    kind: str = "driver"
    where: str = "default"
    conf: str | None = None


class DriverLibrary(Struct, frozen=True, kw_only=True):
    """The CUDA driver's library as the dynamic loader would find it, by reading alone.

    ``found`` is in the loader's order: the first is the one that is used. ``compat`` are the forward-compatibility
    ones that are installed, whether found or not. ``path_seen`` is False where LD_LIBRARY_PATH is not the server's.
    """

    found: tuple[LibraryFile, ...] = ()
    compat: tuple[LibraryFile, ...] = ()
    path_seen: bool = False


class ModuleFiles(Struct, frozen=True, kw_only=True):
    """A module as its files show it.

    ``kind``: package (a folder with ``__init__``), module (one .py file), extension (one .so file), namespace (a
    folder without ``__init__``), hidden (its parent is a regular package elsewhere, which does not contain it) or
    absent. ``places`` are folders or files, in the order of the import path.
    """

    kind: str = "absent"
    places: tuple[str, ...] = ()


class Damage(Struct, frozen=True, kw_only=True):
    """Files of a distribution that its RECORD lists and that are not as listed.

    ``missing`` and ``resized`` count them; ``examples`` names the first ones, relative to site-packages.
    ``no_record``: it has no RECORD, so nothing could be compared. ``missing_since``: when the missing ones were gone
    at the latest, by the times of the folders that they lay in (seconds since the epoch).
    """

    missing: int = 0
    resized: int = 0
    examples: tuple[str, ...] = ()
    no_record: bool = False
    missing_since: float | None = None


class Shadow(Struct, frozen=True, kw_only=True):
    """A ``sglang`` that Python finds before the installed one: in the launch's folder, or on PYTHONPATH.

    ``place`` is its folder or file. ``unusable`` says of the files that each launch reads what is wrong with them, as
    `EnvironmentFacts.unusable` does. ``meddles``: its code may lead the import of its modules elsewhere.
    ``raises``: its code raises wherever it runs.
    """

    place: str
    unusable: Mapping[str, str] = field(default_factory=dict)
    meddles: bool = False
    raises: bool = False

    @property
    def folder(self) -> str:
        """The entry of the import path that it lies in."""
        return self.place.rpartition("/")[0] or "/"


class Toolchain(Struct, frozen=True, kw_only=True):
    """What FlashInfer's just-in-time builds would find, by reading alone.

    ``cuda_home`` is the value of CUDA_HOME (or CUDA_PATH) where the server's environment sets one, ``cuda_home_ok``
    whether that is an absolute path of a folder (a value such as ``:/usr/local/cuda`` is none). ``nvcc`` is the
    compiler that would be used, ``nvcc_source`` how it was found: cuda-home, path, default, or wheel, where FlashInfer
    itself does not look unless CUDA_HOME says so. ``release`` is the compiler's major.minor and ``headers_release``
    that of its headers, which differ where wheels of two releases share a folder; both are read from version file,
    registration or header. ``headers``: its cuda_runtime.h is there; None without a toolkit. ``ninja``: one is on the
    server's PATH; ``ninja_beside``: one lies beside the interpreter, where PATH need not lead. ``environ_seen`` is
    False where the server's variables are unknown; then only a default place or a wheel can be named, and what is
    None may be there all the same.
    """

    cuda_home: str | None = None
    cuda_home_ok: bool | None = None
    nvcc: str | None = None
    nvcc_source: str | None = None
    release: str | None = None
    headers: bool | None = None
    headers_release: str | None = None
    ninja: bool | None = None
    ninja_beside: bool | None = None
    environ_seen: bool = False


class CacheFolder(Struct, frozen=True, kw_only=True):
    """FlashInfer's cache folder for the server's user.

    ``path`` is where it is or would be made; None where neither HOME nor the user database gives one
    (``problem`` no-home, which is an error even where FLASHINFER_WORKSPACE_BASE names another place) or where the
    server's variables are unknown. ``writable`` judges the folder, or the nearest one above it that exists, by owner,
    mode and mount flags for the server's user; None where the user or a folder's mode is not known, or where an
    access list may allow what the mode does not. ``problem`` is no-home, not-a-folder, read-only or permission.
    """

    path: str | None = None
    writable: bool | None = None
    problem: str | None = None


class EnvironmentFacts(Struct, frozen=True, kw_only=True):
    """An environment, read and not executed.

    ``problem`` is a token when the environment may not or cannot be read; then nothing else is known.
    ``distributions`` maps normalised names to the version that the import system would report. ``requires_of``
    holds the whole Requires-Dist lines of a few distributions (`DETAILED`), ``requires_python`` their Requires-
    Python, and ``requires`` the lines of SGLang. ``path_code`` names the .pth files that run code of unknown effect
    at start and the archives (.egg) on the import path: both can make modules importable that no reading finds.
    ``duplicates`` maps a distribution that is registered more than once to all versions of it, the effective one
    first: any that one folder has twice, and tracked ones of several folders. ``owners`` maps a top-level module,
    or a component of NVIDIA's libraries such as ``nvidia/nccl``, to the distributions that claim the same files of
    it, where several do. ``damaged`` says of tracked distributions what is not as RECORD lists it. ``leftovers``
    names tracked top-level folders that no distribution owns and that have no ``__init__``; ``unregistered`` names
    tracked modules that are importable although no distribution brings them (copied, on PYTHONPATH, or with their
    metadata deleted). ``editable`` names distributions whose files lie in a source folder. ``changed_at`` maps
    tracked distributions to the latest change of their registration and files (by mtime, seconds since the epoch).
    ``builds`` maps them to a mark of the files that RECORD lists, the same for each install of the same wheel.
    ``modules`` holds `MODULES`. ``cubins`` counts precompiled kernels where FlashInfer looks for them: in
    flashinfer-cubin, FLASHINFER_CUBIN_DIR or the cache; None where that is not known. ``unusable`` maps files that
    each launch of SGLang reads to what is wrong with them: missing, empty, cut-off (it parses, and lacks what must
    be in it), damaged (it does not parse) or unreadable. ``shadow`` is a ``sglang`` that comes before the
    installed one.

    The ``fingerprint`` changes with whatever in the files could change what an import comes to. The server's
    variables are not in it: who keeps evidence keys it by them as well. ``libcuda``, ``toolchain``, ``cache`` and
    ``cubins`` are not in it either and are read anew each time.
    """

    scope: Scope
    python: str | None = None
    python_source: str = "not-found"
    python_version: str | None = None
    root: str | None = None
    problem: str | None = None
    fingerprint: str = ""
    site_dirs: tuple[str, ...] = ()
    path_code: tuple[str, ...] = ()
    distributions: Mapping[str, str] = field(default_factory=dict)
    distribution_count: int = 0
    requires: tuple[str, ...] = ()
    requires_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    requires_python: Mapping[str, str] = field(default_factory=dict)
    duplicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    damaged: Mapping[str, Damage] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()
    unregistered: tuple[str, ...] = ()
    changed_at: Mapping[str, float] = field(default_factory=dict)
    builds: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, ModuleFiles] = field(default_factory=dict)
    toolchain: Toolchain = field(default_factory=Toolchain)
    cache: CacheFolder = field(default_factory=CacheFolder)
    cubins: int | None = None
    editable: tuple[str, ...] = ()
    unusable: Mapping[str, str] = field(default_factory=dict)
    shadow: Shadow | None = None
    torch_present: bool = False
    torch_version: str | None = None
    torch_cuda: str | None = None
    torch_without_cuda: bool = False
    torch_hip: str | None = None
    kernel: KernelFiles = field(default_factory=KernelFiles)
    libcuda: DriverLibrary = field(default_factory=DriverLibrary)
    flashinfer: FlashInferFiles = field(default_factory=FlashInferFiles)

    @property
    def sglang_release(self) -> str | None:
        """The release of the SGLang that a launch would run; None where there is none, or it is not known.

        The registration of an installed one says nothing of a copy that Python finds before it.
        """
        return None if self.shadow is not None else self.distributions.get("sglang")
