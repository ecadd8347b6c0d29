"""Requirement lines of package metadata, evaluated for another interpreter than the agent's.

Pure functions over texts. Everything that is read may be malformed: nothing here raises for it, and what cannot be
told is None, never True or False.

Sources: PEP 440 (versions), PEP 503 (names), PEP 508 (requirement lines and markers).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from sidecar.environment import EnvironmentFacts

if TYPE_CHECKING:
    from packaging.markers import Marker

_LINE_LIMIT: Final = 2000
"""Characters; the longest line of SGLang's releases has about 250."""
_UNDECIDABLE: Final = (ValueError, KeyError, RecursionError)
"""What `packaging` raises for input that it cannot make sense of. Invalid versions, specifiers and requirements are
ValueErrors, and so is a number of too many digits; a marker's unknown variable is one or the other by release."""


def parsed(version: str | None) -> Version | None:
    """Read a version that can be compared; None for none or one that is not of the form of PEP 440."""
    try:
        return None if version is None else Version(version)
    except _UNDECIDABLE:
        return None


class Interpreter(Struct, frozen=True, kw_only=True):
    """The interpreter for which lines are evaluated, as far as it is known.

    ``python_version`` is major.minor or longer, ``machine`` the processor as uname names it. It is taken for CPython
    on Linux: SGLang runs on no other.
    """

    python_version: str | None
    machine: str = "x86_64"

    def _values(self) -> dict[str, str]:
        values = {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "sys_platform": "linux",
        }
        version = parsed(self.python_version)
        if version is not None:
            values |= {
                "python_version": f"{version.major}.{version.minor}",
                "python_full_version": str(self.python_version),
                "implementation_version": str(self.python_version),
            }
        return values

    def accepts(self, marker: Marker, extras: Iterable[str]) -> bool | None:
        """Whether a marker holds here with one of these extras or none; None where that cannot be told."""
        values = self._values()
        text = str(marker)
        if "python_version" not in values and ("python_" in text or "implementation_version" in text):
            return None
        try:
            return any(marker.evaluate(values | {"extra": extra}) for extra in ("", *extras))
        except _UNDECIDABLE:
            return None


class Asked(Struct, frozen=True, kw_only=True):
    """One requirement that a distribution has.

    ``package`` is the normalised name, ``name`` the one as written, ``url`` says that it names a place to install
    from, which states no version. ``applies`` is False where a marker or an extra rules it out, None where that
    cannot be told.
    """

    package: str
    name: str
    extras: tuple[str, ...] = ()
    specifier: str = ""
    url: bool = False
    applies: bool | None = True

    @property
    def argument(self) -> str:
        """What an installer takes: the name as written, its extras and its specifier."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.name}{extras}{self.specifier}"


class Lines(Struct, frozen=True, kw_only=True):
    """What a distribution requires; ``unreadable`` counts lines that are no requirements."""

    asked: tuple[Asked, ...] = ()
    unreadable: int = 0


def read_lines(lines: Iterable[str], interpreter: Interpreter, owner: str = "", extras: Iterable[str] = ()) -> Lines:
    """Read the Requires-Dist lines of the distribution ``owner``; lines that do not apply are left out.

    ``extras`` are those that it was installed with. Lines by which it asks for itself with more extras
    (``sglang[runtime_common]; extra == "srt"``) add these.
    """
    return _read_lines(tuple(lines), interpreter, owner, tuple(extras))


# Judged anew with each result of any probe, and reading a hundred lines takes longer than all the rest of it.
@lru_cache(maxsize=64)
def _read_lines(lines: tuple[str, ...], interpreter: Interpreter, owner: str, extras: tuple[str, ...]) -> Lines:
    # Only where there are lines: its patterns take longer to compile than any other module to load.
    from packaging.requirements import Requirement

    entries: list[tuple[Asked, Marker | None]] = []
    unreadable = 0
    for line in lines:
        try:
            one = Requirement(line[:_LINE_LIMIT])
        except _UNDECIDABLE:
            unreadable += 1
            continue
        asked = Asked(
            package=canonicalize_name(one.name),
            name=one.name,
            extras=tuple(sorted(one.extras)),
            specifier=str(one.specifier),
            url=one.url is not None,
        )
        entries.append((asked, one.marker))
    active = {canonicalize_name(extra) for extra in extras}
    while True:
        found = [
            (asked, True if marker is None else interpreter.accepts(marker, sorted(active)))
            for asked, marker in entries
        ]
        own = {
            canonicalize_name(extra)
            for asked, holds in found
            if holds and asked.package == owner
            for extra in asked.extras
        }
        if own <= active:
            break
        active |= own
    asked_for = (
        Asked(
            package=asked.package,
            name=asked.name,
            extras=asked.extras,
            specifier=asked.specifier,
            url=asked.url,
            applies=holds,
        )
        for asked, holds in found
        if holds is not False and asked.package != owner
    )
    return Lines(asked=tuple(asked_for), unreadable=unreadable)


def satisfies(version: str, asked: Asked) -> bool | None:
    """Whether an installed version is what a requirement asks for; None where the version is none.

    Pre-releases count: somebody installed them, and the question is not what to choose. Local tags (+cu130) only
    count where the requirement names one.
    """
    if not asked.specifier:
        return True
    try:
        specifiers = SpecifierSet(asked.specifier)
        if all(one.operator == "===" for one in specifiers):
            return all(one.version.lower() == version.strip().lower() for one in specifiers)
        return specifiers.contains(Version(version), prereleases=True)
    except _UNDECIDABLE:
        return None


# -- what SGLang requires ---------------------------------------------------------------------------

_SGLANG: Final = "sglang"
_SERVING_EXTRA: Final = "srt"
"""Up to 0.5.2 what a server needs was an extra of this name; since then it is required without one."""


def interpreter_of(environment: EnvironmentFacts, machine: str | None = None) -> Interpreter:
    """The interpreter of an environment; ``machine`` is its processor, by default this one's."""
    return Interpreter(python_version=environment.python_version, machine=machine or os.uname().machine)


def sglang_lines(environment: EnvironmentFacts, machine: str | None = None) -> Lines:
    """What SGLang requires for serving in an environment; ``machine`` is its processor, by default this one's."""
    interpreter = interpreter_of(environment, machine)
    raw = environment.requires_of.get(_SGLANG, environment.requires)
    lines = read_lines(raw, interpreter, _SGLANG)
    if any(asked.package == "torch" for asked in lines.asked):
        return lines
    return read_lines(raw, interpreter, _SGLANG, (_SERVING_EXTRA,))


def pinned(environment: EnvironmentFacts, package: str) -> Asked | None:
    """SGLang's requirement on a distribution, where it applies there and says which versions will do."""
    found = sglang_lines(environment).asked
    return next((one for one in found if one.package == package and one.specifier and one.applies), None)


# -- who brings what --------------------------------------------------------------------------------

_DISTRIBUTION_OF: Final[Mapping[str, str]] = {
    "PIL": "pillow",
    "_cffi_backend": "cffi",
    "attr": "attrs",
    "cudnn": "nvidia-cudnn-frontend",
    "cutlass": "nvidia-cutlass-dsl",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "dateutil": "python-dateutil",
    "flashinfer": "flashinfer-python",
    "functorch": "torch",
    "google": "protobuf",
    "pynvml": "nvidia-ml-py",
    "quack": "quack-kernels",
    "torchgen": "torch",
    "tvm_ffi": "apache-tvm-ffi",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Top-level module -> distribution, where the names differ."""
_BESIDE: Final[Mapping[str, str]] = {"cuda-python": "cuda-bindings", "nvidia-cutlass-dsl": "nvidia-cutlass-dsl-libs"}
"""Distributions whose files are in others of the same version, by how the names of these start."""


def distribution_of(module: str) -> str:
    """Name the distribution that a module comes from: a known one, else one of its own name."""
    top, _, rest = module.partition(".")
    if top == "cuda":
        # A namespace, of which each distribution brings one part (cuda-bindings, cuda-core, cuda-tile).
        return f"cuda-{rest.partition('.')[0].replace('_', '-')}" if rest else "cuda-python"
    return _DISTRIBUTION_OF.get(top, canonicalize_name(top))


def owner_of(environment: EnvironmentFacts, file: str | None, *, named: Mapping[str, str]) -> str | None:
    """Name the distribution that a file below site-packages belongs to; None where that is not known.

    ``named`` maps top-level modules to distributions that count as theirs also where no metadata says so.
    """
    first, *rest = (file or "").partition(":")[0].split("/")
    top = first.partition(".")[0]
    if not top or top.startswith("<"):
        return None
    known = environment.distributions
    if top == "nvidia" and rest:
        # nvidia/nccl/lib is nvidia-nccl-cu12's or -cu13's.
        wheel = re.compile(rf"nvidia-{re.escape(rest[0].replace('_', '-'))}(-cu\d+)?")
        wheels = [name for name in known if wheel.fullmatch(name)]
        return wheels[0] if len(wheels) == 1 else None
    if top == "sgl_kernel":
        # Under the one name or the other; its module's name is the former one's.
        return next((name for name in ("sglang-kernel", "sgl-kernel") if name in known), None)
    name = distribution_of(".".join([top, *rest[:1]]) if top == "cuda" else top)
    return name if name in known or named.get(top) == name else None


def with_parts(environment: EnvironmentFacts, distribution: str) -> tuple[str, ...]:
    """A distribution and those that hold its files, as far as they are installed."""
    start = _BESIDE.get(distribution)
    beside = [name for name in environment.distributions if start is not None and name.startswith(start)]
    return (distribution, *beside)


def shadowing_folder(environment: EnvironmentFacts, module: str) -> str | None:
    """Name the folder outside site-packages that a module is taken from: one of PYTHONPATH, or the server's own.

    None where it is taken from site-packages, where it was not looked for, or where an editable install leads to it.
    """
    files = environment.modules.get(module)
    places = environment.flashinfer.places if module == "flashinfer" else files.places if files is not None else ()
    if not places or not environment.site_dirs or distribution_of(module) in environment.editable:
        return None
    folder = places[0].rsplit("/", module.count(".") + 1)[0]
    # A folder below site-packages is one that a .pth file leads to, as nvidia-cutlass-dsl's does.
    within = any(folder == site or folder.startswith(f"{site}/") for site in environment.site_dirs)
    return None if within else folder


def unshadow(name: str, folder: str) -> str:
    """Say how a copy outside site-packages is kept from being imported; no installer changes what lies there."""
    return (
        f"take {folder} out of the server's PYTHONPATH (or start it in another folder), or remove {name} from it: no "
        "installer changes what lies there"
    )


# -- commands ---------------------------------------------------------------------------------------


class Installer(Struct, frozen=True, kw_only=True):
    """Writes the commands that change an environment, to be pasted into a shell as they stand.

    ``python`` is its interpreter. ``uv``: it has no pip of its own, as uv makes environments; uv itself is then
    what can change it.
    """

    python: str = "python"
    uv: bool = False

    def install(
        self, *requirements: str, replace: bool = False, dependencies: bool = True, upgrade: bool = False
    ) -> str:
        """Install requirements.

        ``replace`` writes files anew, without ``dependencies`` nothing else changes, ``upgrade`` takes the newest.
        """
        options = ["--upgrade"] if upgrade else []
        if replace:
            options.append("--reinstall" if self.uv else "--force-reinstall")
        if not dependencies:
            options.append("--no-deps")
        return " ".join([*self._start("install"), *options, *map(shlex.quote, requirements)])

    def restore(self, environment: EnvironmentFacts, *names: str) -> str:
        """Write the files of installed distributions anew, in the versions that are there, and nothing else."""
        known = environment.distributions
        whole = dict.fromkeys(one for name in names for one in with_parts(environment, name))
        wanted = (f"{one}=={known[one]}" if one in known else one for one in whole)
        return self.install(*wanted, replace=True, dependencies=False)

    def uninstall(self, *names: str) -> str:
        """Remove distributions without asking."""
        return " ".join([*self._start("uninstall"), *([] if self.uv else ["-y"]), *map(shlex.quote, names)])

    def _start(self, verb: str) -> list[str]:
        python = shlex.quote(self.python)
        return ["uv", "pip", verb, "--python", python] if self.uv else [python, "-m", "pip", verb]


def installer(environment: EnvironmentFacts) -> Installer:
    """Choose the installer of an environment: pip where it is installed there, else uv."""
    return Installer(python=environment.python or "python", uv="pip" not in environment.distributions)
