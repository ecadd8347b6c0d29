"""The reader's answer into facts: whatever it says, only what has the right shape gets in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from sidecar.environment.facts import (
    UNKNOWN_VERSION,
    CacheFolder,
    Companion,
    Damage,
    DriverLibrary,
    EnvironmentFacts,
    FlashInferFiles,
    KernelFiles,
    LibraryFile,
    MambaFiles,
    ModuleFiles,
    Shadow,
    Toolchain,
)
from sidecar.model import Target
from sidecar.redaction import scrubbed
from sidecar.target import variables
from sidecar.untrusted import boolean, integer, mapping, number, text, texts, versions

_REQUIREMENT = 2000
"""Characters of a requirement, which the reader keeps to."""
_NAMES = 500
"""Items of a mapping that is let in; the most that an honest answer has is a few dozen."""


def facts_from(answer: Mapping[str, Any], target: Target) -> EnvironmentFacts:
    """Take an answer for what is known of a target's environment."""
    torch = answer.get("torch")
    problem = text(answer.get("problem"))
    # A requirement may name a place to install from, with a login in front of it.
    requires_of = _lists(scrubbed(answer.get("requires_of"), ()), size=_REQUIREMENT)
    return EnvironmentFacts(
        scope=target.scope,
        python=text(answer.get("python"), 4096) or target.python,
        python_source=target.python_source,
        python_version=text(answer.get("python_version"), 32),
        root=target.root,
        problem=problem if problem in {None, "kernel-too-old"} else "root-unreadable",
        fingerprint=text(answer.get("fingerprint"), 64) or "",
        site_dirs=texts(answer.get("site_dirs")),
        path_code=texts(answer.get("path_code")),
        distributions=versions(answer.get("distributions")),
        distribution_count=integer(answer.get("distribution_count")) or 0,
        requires=requires_of.get("sglang", ()),
        requires_of=requires_of,
        requires_python={
            name: one
            for name, value in _named(answer.get("requires_python"))
            if (one := text(value, _REQUIREMENT)) is not None
        },
        duplicates=_lists(answer.get("duplicates")),
        owners=_lists(answer.get("owners")),
        damaged={name: _damage_from(mapping(one)) for name, one in _named(answer.get("damaged"))},
        leftovers=texts(answer.get("leftovers")),
        unregistered=texts(answer.get("unregistered")),
        builds=versions(answer.get("builds")),
        changed_at={name: at for name, value in _named(answer.get("changed_at")) if (at := number(value)) is not None},
        modules={name: _module_from(mapping(one)) for name, one in _named(answer.get("modules"))},
        editable=texts(answer.get("editable")),
        unusable=_states(answer.get("unusable")),
        shadow=_shadow_from(mapping(answer.get("shadow"))),
        torch_present=isinstance(torch, dict),
        torch_version=text(mapping(torch).get("version"), 64),
        torch_cuda=text(mapping(torch).get("cuda"), 16),
        torch_without_cuda=mapping(torch).get("cuda_stated") is True and mapping(torch).get("cuda") is None,
        torch_hip=text(mapping(torch).get("hip"), 32),
        kernel=_kernel_from(mapping(answer.get("kernel"))),
        flashinfer=_flashinfer_from(mapping(answer.get("flashinfer"))),
        **surroundings_from(answer, target),
    )


def _named(value: object) -> Iterator[tuple[str, Any]]:
    """The items of an object, with names of reasonable length."""
    for key, item in islice(mapping(value).items(), _NAMES):
        if (name := text(key, 200)) is not None:
            yield name, item


def _lists(value: object, limit: int = 500, *, size: int = 300) -> dict[str, tuple[str, ...]]:
    """An object of lists of strings of at most ``size`` characters."""
    return {name: texts(item, limit, size=size) for name, item in _named(value)}


def _shown(items: tuple[str, ...]) -> tuple[str, ...]:
    """File names as they can be shown: whoever named a file may have put line ends and escapes in it."""
    return tuple("".join(char if char.isprintable() else "?" for char in item) for item in items)


def _states(value: object) -> dict[str, str]:
    """An object of short tokens."""
    return {name: token for name, one in _named(value) if (token := text(one, 20)) is not None}


def _shadow_from(answer: Mapping[str, Any]) -> Shadow | None:
    place = text(answer.get("place"), 4096)
    if place is None or not place.startswith("/"):
        return None
    return Shadow(
        place=_shown((place,))[0],
        unusable=_states(answer.get("unusable")),
        meddles=answer.get("meddles") is True,
        raises=answer.get("raises") is True,
    )


def _damage_from(answer: Mapping[str, Any]) -> Damage:
    return Damage(
        missing=max(0, integer(answer.get("missing")) or 0),
        resized=max(0, integer(answer.get("resized")) or 0),
        examples=_shown(texts(answer.get("examples"), 10)),
        no_record=answer.get("no_record") is True,
        missing_since=number(answer.get("missing_since")),
    )


def _module_from(answer: Mapping[str, Any]) -> ModuleFiles:
    return ModuleFiles(kind=text(answer.get("kind"), 32) or "absent", places=_shown(texts(answer.get("places"), 20)))


def surroundings_from(answer: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """What comes and goes beside the packages, and is in every answer."""
    tools, cache = mapping(answer.get("toolchain")), mapping(answer.get("cache"))
    cubins = integer(answer.get("cubins"))
    return {
        "libcuda": _libcuda_from(answer.get("libcuda"), target),
        "toolchain": Toolchain(
            cuda_home=text(tools.get("cuda_home")),
            cuda_home_ok=boolean(tools.get("cuda_home_ok")),
            nvcc=text(tools.get("nvcc"), 4096),
            nvcc_source=text(tools.get("nvcc_source"), 32),
            release=text(tools.get("release"), 16),
            headers=boolean(tools.get("headers")),
            headers_release=text(tools.get("headers_release"), 16),
            ninja=boolean(tools.get("ninja")),
            ninja_beside=boolean(tools.get("ninja_beside")),
            environ_seen=tools.get("environ_seen") is True,
        ),
        "cache": CacheFolder(
            path=text(cache.get("path")),
            writable=boolean(cache.get("writable")),
            problem=text(cache.get("problem"), 32),
        ),
        "cubins": None if cubins is None or cubins < 0 else cubins,
    }


def _kernel_from(answer: Mapping[str, Any]) -> KernelFiles:
    return KernelFiles(
        kind=text(answer.get("kind")) or "absent",
        folders=texts(answer.get("folders")),
        plain=answer.get("plain") is True,
    )


def _libcuda_from(answer: object, target: Target) -> DriverLibrary:
    return DriverLibrary(
        found=_libraries(mapping(answer).get("found")),
        compat=_libraries(mapping(answer).get("compat")),
        path_seen=variables(target, "LD_LIBRARY_PATH") is not None,
    )


def _libraries(value: object) -> tuple[LibraryFile, ...]:
    items = value if isinstance(value, list) else []
    return tuple(
        LibraryFile(
            path=path,
            version=text(mapping(item).get("version"), 32),
            kind=text(mapping(item).get("kind"), 16) or "driver",
            where=text(mapping(item).get("where"), 32) or "default",
            conf=text(mapping(item).get("conf"), 4096),
        )
        for item in items[:40]
        if (path := text(mapping(item).get("path"), 4096)) is not None
    )


def _flashinfer_from(answer: Mapping[str, Any]) -> FlashInferFiles:
    mamba = mapping(answer.get("mamba"))
    names = mamba.get("names")
    version = text(answer.get("version"), 64)
    if version is None and answer.get("kind") == "package" and answer.get("build_meta") is False:
        version = UNKNOWN_VERSION
    return FlashInferFiles(
        kind=text(answer.get("kind")) or "absent",
        places=texts(answer.get("places")),
        version=version,
        mamba=MambaFiles(
            state=text(mamba.get("state")) or "absent",
            names=None if names is None else texts(names),
            symbol=text(mamba.get("symbol")) or "unknown",
        ),
        cubin=_companion_from(mapping(answer.get("cubin"))),
        jit_cache=_companion_from(mapping(answer.get("jit_cache"))),
        missing=texts(answer.get("missing")),
    )


def _companion_from(answer: Mapping[str, Any]) -> Companion:
    return Companion(kind=text(answer.get("kind")) or "absent", version=text(answer.get("version"), 64))
