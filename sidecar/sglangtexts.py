"""What SGLang itself does with FlashInfer, release by release, and the sentences that it prints.

Read in the sources of the releases that are named. A person finds a sentence in the server's log, so the texts are
SGLang's to the letter, the type of the exception in front as a traceback ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from packaging.version import InvalidVersion, Version

_REWORDED: Final = Version("0.5.15")
"""First release with the newer wording (0.5.14 has the older one), and with stochastic rounding."""
_FIRST_SAMPLER: Final = Version("0.5.10")
_LAST_SAMPLER: Final = Version("0.5.22")
"""On CUDA these import ``flashinfer.sampling`` unconditionally: whatever the backends, and disabled or not."""
_FIRST_REDIRECT: Final = Version("0.5.18")
_LAST_READ: Final = Version("0.5.23")
"""The newest release whose sources were read."""

_OFF_FOR_BOTH: Final = frozenset({"false", "0", "no", "n"})

SCHEDULER: Final = (
    "ValueError: Mamba backend 'flashinfer' requested but its dependencies are not available. Install the required "
    "package or use a different --mamba-backend value."
)
"""What the scheduler says when the name cannot be imported, after the check at start has passed."""


def parsed(version: str | None) -> Version | None:
    """Give a version that can be compared; None for none or one that is not of that form."""
    try:
        return None if version is None else Version(version)
    except InvalidVersion:
        return None


def is_on(value: str, version: str | None) -> bool | None:
    """Whether a release takes the value of one of its switches for on, as its ``get_bool_env_var`` does.

    That one lowers the letters and compares, spaces and all: anything but ``true`` and ``1`` is off. None for a value
    on which SGLang's two readers of switches disagree (``EnvBool`` knows ``yes``, and falls back to the default), where
    the release is newer than those that were read.
    """
    lowered = value.lower()
    if lowered in {"true", "1"}:
        return True
    release = parsed(version)
    return None if release is not None and release > _LAST_READ and lowered not in _OFF_FOR_BOTH else False


def unavailable(version: str | None, *, rounding: bool | None) -> str:
    """The check at start: one sentence for four causes."""
    release = parsed(version)
    if release is not None and release < _REWORDED:
        return "ValueError: FlashInfer mamba module not available, please check flashinfer installation."
    tail = (
        " Stochastic rounding with --mamba-backend flashinfer requires FlashInfer Mamba and --mamba-ssm-dtype float16."
    )
    first = "ValueError: FlashInfer mamba module not available, please check the FlashInfer installation."
    return first + (tail if rounding else "")


def rounding_refused(ssm_dtype: str | None) -> str:
    """The check of stochastic rounding, which looks at the flag alone and not at the model's configuration."""
    return (
        f"ValueError: Stochastic rounding for the Mamba SSM cache requires --mamba-ssm-dtype float16, got "
        f"{ssm_dtype!r}. Run with --mamba-ssm-dtype float16 or disable --enable-mamba-cache-stochastic-rounding."
    )


def knows_rounding(version: str | None) -> bool | None:
    """Whether this release has the flag for stochastic rounding; None where its version is not known."""
    release = parsed(version)
    return None if release is None else release >= _REWORDED


def always_imports(version: str | None) -> bool | None:
    """Whether this release imports FlashInfer on every CUDA server, for its sampler; None where not known."""
    release = parsed(version)
    return None if release is None else _FIRST_SAMPLER <= release <= _LAST_SAMPLER


def redirects_cache(version: str | None) -> bool:
    """Whether this release moves FlashInfer's cache to a folder of its own, unless a variable names another."""
    release = parsed(version)
    return release is not None and release >= _FIRST_REDIRECT


# -- the versions that it checks itself -----------------------------------------------------------------


class Minimum(Struct, frozen=True):
    """The versions below which a release of SGLang refuses to start: of FlashInfer, and of the named kernel wheel."""

    flashinfer: str
    kernel: str
    kernel_version: str


_K, _SK = "sgl-kernel", "sglang-kernel"
MINIMA: Final[Mapping[str, Minimum]] = MappingProxyType(
    {
        "0.4.6.post5": Minimum("0.2.5", _K, "0.1.4"),
        "0.4.10.post2": Minimum("0.2.9rc2", _K, "0.2.8"),
        "0.5.2": Minimum("0.3.1", _K, "0.3.9.post2"),
        "0.5.3.post3": Minimum("0.4.0", _K, "0.3.15"),
        "0.5.4.post3": Minimum("0.5.0", _K, "0.3.16.post4"),
        "0.5.5.post3": Minimum("0.5.2", _K, "0.3.17.post1"),
        "0.5.6.post2": Minimum("0.5.3", _K, "0.3.19"),
        "0.5.8.post1": Minimum("0.6.1", _K, "0.3.21"),
        "0.5.9": Minimum("0.6.3", _K, "0.3.21"),
        "0.5.10.post1": Minimum("0.6.7.post3", _SK, "0.4.1"),
        "0.5.12.post1": Minimum("0.6.11.post1", _SK, "0.4.2.post2"),
        "0.5.15": Minimum("0.6.12", _SK, "0.4.4"),
        "0.5.16": Minimum("0.6.14", _SK, "0.4.5"),
        "0.5.17": Minimum("0.6.15.post1", _SK, "0.4.5"),
        "0.5.18": Minimum("0.6.17", _SK, "0.4.6.post1"),
        "0.5.19": Minimum("0.6.18", _SK, "0.4.6.post1"),
        "0.5.20": Minimum("0.6.18", _SK, "0.4.7"),
        "0.5.21": Minimum("0.6.18", _SK, "0.4.7"),
        "0.5.22": Minimum("0.7.1", _SK, "0.4.9"),
        # Here alone the minimum is not the pinned version, which is 0.4.10.
        "0.5.23": Minimum("0.7.2", _SK, "0.4.9"),
    }
)
"""SGLang's release -> what ``assert_pkg_version`` in its srt/entrypoints/engine.py compares with. What a release that
is not here would refuse is not known; its pins are."""

_FLASHINFER_ADVICE: Final = (
    "Please uninstall the old version and reinstall the latest version by following the instructions at "
    "https://docs.flashinfer.ai/installation.html."
)


def minimum_of(release: str | None, package: str) -> str | None:
    """The version of FlashInfer or of the kernel wheel below which a release refuses to start; None: not known."""
    version = parsed(release)
    known = None if version is None else MINIMA.get(version.public)
    if known is None:
        return None
    if package == known.kernel:
        return known.kernel_version
    return known.flashinfer if package == "flashinfer-python" else None


def refused_version(package: str, minimum: str, installed: str | None) -> str:
    """What the check at start raises for a package that is older than its ``minimum``, or not ``installed``."""
    flashinfer = package == "flashinfer-python"
    name = "flashinfer_python" if flashinfer else package
    advice = (
        _FLASHINFER_ADVICE
        if flashinfer
        else f"Please reinstall the latest version with `pip install {name} --force-reinstall`"
    )
    if installed is None:
        return f"Exception: {name} with minimum required version {minimum} is not installed. {advice}"
    return (
        f"Exception: {name} is installed with version {installed}, which is less than the minimum required version "
        f"{minimum}. {advice}"
    )
