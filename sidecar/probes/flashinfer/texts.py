"""The sentences and commands that the flashinfer probe's verdicts carry, made from what the environment says."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from packaging.version import Version

from sidecar.crashes import Crash
from sidecar.environment import UNKNOWN_VERSION
from sidecar.imports import ImportEvidence, ImportOutcome
from sidecar.loaderrors import LoadError, LoadFault
from sidecar.modules import PLACES, as_remedy, as_sentence
from sidecar.probes.flashinfer.facts import FlashinferFacts
from sidecar.requirements import (
    Asked,
    Installer,
    distribution_of,
    installer,
    owner_of,
    pinned,
    satisfies,
    shadowing_folder,
    unshadow,
)
from sidecar.sglangtexts import parsed

FIRST_WITH_MAMBA = Version("0.6.1")
FIRST_WITH_CUBINS = Version("0.2.6")
"""From here on FlashInfer fetches precompiled kernels (``jit/cubin_loader.py``, which 0.2.5 has not)."""
_FIRST_DOWNLOAD_COMMAND = Version("0.2.10")
_FIRST_CUBIN_ON_PYPI = Version("0.4.0")
_ANY_WITH_MAMBA = "flashinfer-python>=0.6.1"
_LAST_CUBIN_ON_PYPI = Version("0.6.13")

AVAILABLE_VARIABLE = "SGLANG_IS_FLASHINFER_AVAILABLE"
BYPASS_VARIABLE = "FLASHINFER_DISABLE_VERSION_CHECK"
CALL_LOG_VARIABLE = "FLASHINFER_LOGLEVEL"
BUILD_LOG_VARIABLE = "FLASHINFER_LOGGING_LEVEL"
ARCH_VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"
LOG_FILE_VARIABLE = "FLASHINFER_LOGDEST"

OR_TRITON = "or start the server with --mamba-backend triton"
ONLY_TRUE = " SGLang takes true and 1 for on, in any case and without spaces, and everything else for off."
UNTRANSLATED = "SGLang does not translate this exception: it stands in the log as it is."


class Remedy(Struct, frozen=True, kw_only=True):
    """What repairs a fault: a shell command that can be pasted as it stands, or for ``shell`` False a sentence.

    ``note`` is what else there is to say; behind a command it becomes a shell comment.
    """

    action: str
    note: str = ""
    shell: bool = True

    def text(self, *, triton: bool) -> str:
        """Give it in one line, with the other mamba backend as the way out where that helps."""
        more = [one for one in (self.note, OR_TRITON if triton else "") if one]
        if not self.shell:
            return as_remedy(", ".join([self.action, *more]))
        return f"{self.action}  # {'; '.join(more)}" if more else self.action


def flashinfer_version(facts: FlashinferFacts) -> str | None:
    """FlashInfer's own version, or the one that it is registered with."""
    environment = facts.environment
    by_files = environment.flashinfer.version
    registered = environment.distributions.get("flashinfer-python") or environment.distributions.get("flashinfer")
    return registered if by_files in {None, UNKNOWN_VERSION} else by_files


def versions_line(facts: FlashinferFacts) -> tuple[str, ...]:
    """What is installed of FlashInfer and torch, as evidence, and what is odd about it; empty when nothing is."""
    environment = facts.environment
    files = environment.flashinfer
    versions = {
        "flashinfer": flashinfer_version(facts),
        "flashinfer-cubin": files.cubin.version,
        "flashinfer-jit-cache": files.jit_cache.version,
        "torch": environment.torch_version,
    }
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    lines = [known] if known else []
    if owners := environment.owners.get("flashinfer"):
        lines.append(f"files of flashinfer belong to {listed(owners)} at once")
    if "flashinfer" in environment.unregistered:
        lines.append("no distribution is registered for the package flashinfer")
    if damage := damage_line(facts, "flashinfer-python"):
        lines.append(damage)
    return tuple(lines)


def damage_line(facts: FlashinferFacts, distribution: str) -> str | None:
    """What is not as a distribution's RECORD lists it, in one line; None where nothing is."""
    damage = facts.environment.damaged.get(distribution)
    if damage is None or not (damage.missing or damage.resized):
        return None
    counts = [(damage.missing, "missing"), (damage.resized, "of another size")]
    what = " and ".join(f"{count} {state}" for count, state in counts if count)
    example = f", first {damage.examples[0]}" if damage.examples else ""
    return f"{distribution}: files not as installed: {what}{example}"


def import_lines(evidence: ImportEvidence) -> tuple[str, ...]:
    """How an import went, as evidence."""
    lines = []
    if evidence.exception is not None:
        at = f" at {evidence.where}" if evidence.where else ""
        lines.append(f"{evidence.exception}{at}")
    if evidence.cause:
        lines.append(f"caused by {evidence.cause}")
    if evidence.stage is not None and evidence.outcome is not ImportOutcome.OK:
        lines.append(f"last stage: {evidence.stage}")
    if evidence.loading:
        lines.append(f"loading: {evidence.loading}")
    if evidence.died_at:
        lines.append(f"died in: {evidence.died_at}")
    if evidence.tail:
        lines.append(f"printed last: {evidence.tail}")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(evidence.versions.items()))
    if versions:
        lines.append(f"loaded: {versions}")
    if evidence.seconds is not None:
        lines.append(f"took {evidence.seconds:.1f} s")
    return tuple(lines)


def one_line(message: str) -> str:
    """Give a message in one bounded line."""
    text = " ".join(message.split())
    return text[:400] + ("…" if len(text) > 400 else "")


def quoted(evidence: ImportEvidence) -> str:
    """Quote the exception in one bounded sentence."""
    return as_sentence(f"The import raises {evidence.exception}: {one_line(evidence.message)}")


_UNUSABLE = {
    LoadFault.DENIED: "is there and may not be opened",
    LoadFault.DAMAGED: "is damaged or built for another kind of machine",
    LoadFault.UNMAPPABLE: "lies on a file system from which nothing may be executed",
    LoadFault.SHORTAGE: "was not loaded for want of memory or of file descriptors",
    LoadFault.UNREADABLE: "is there, and the file system does not give it",
}


def load_sentence(facts: FlashinferFacts, error: LoadError) -> str:
    """Say what the dynamic loader missed, and what that means."""
    torch = facts.environment.torch_version
    if error.fault is LoadFault.LIBRARY and error.library is not None:
        return f"The compiled file {error.library} is not there, or is built for another kind of machine."
    if error.fault is LoadFault.LIBRARY:
        at = f" It lies at {facts.library_at}, where the loader does not look." if facts.library_at else ""
        return f"The shared library {error.name} is not found.{at}"
    if error.fault in _UNUSABLE:
        return f"The compiled file {error.library or error.name} {_UNUSABLE[error.fault]}."
    whose = f" that {error.library} wants" if error.library else ""
    if error.fault is LoadFault.VERSION:
        return f"The system's C or C++ library lacks {error.name}{whose}: the binary was built on a newer system."
    symbol = f"{error.readable} ({error.name})" if error.readable else error.name
    built = f"another torch than the installed {torch}" if torch else "another torch than the installed one"
    why = f"the binary was built for {built}"
    if error.old_strings is not None:
        kind = "old" if error.old_strings else "new"
        why += f", and with the {kind} C++ string ABI (C++11 ABI), which this torch does not have"
    elif error.readable is None:
        why = "two libraries are of different releases"
    return f"The symbol {symbol}{whose} is defined nowhere: {why}."


def place(facts: FlashinferFacts) -> str:
    """Name the environment in brackets, by its interpreter; empty where that is not known."""
    python = facts.environment.python
    return f" ({python})" if python else ""


def wanted(facts: FlashinferFacts) -> str:
    """Say as a further sentence which FlashInfer this SGLang requires; empty where that is not known."""
    asked = _pinned(facts, "flashinfer-python")
    return "" if asked is None or not facts.sglang else f" SGLang {facts.sglang} requires {asked.argument}."


def brought(module: str) -> str:
    """Name a module, and the distribution that brings it where that is called otherwise."""
    name = distribution_of(module)
    return module if name == module.replace("_", "-") else f"{module} (of {name})"


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence; there must be one at least."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


# -- commands ---------------------------------------------------------------------------------------------


def _pip(facts: FlashinferFacts) -> Installer:
    environment = facts.environment
    # Where no distribution was read nothing says that pip is missing.
    return installer(environment) if environment.distributions else Installer(python=environment.python or "python")


def _pinned(facts: FlashinferFacts, distribution: str) -> Asked | None:
    """SGLang's own requirement of a distribution in that environment, as far as it applies there."""
    return pinned(facts.environment, distribution)


def _meets(asked: Asked, version: str) -> bool:
    return satisfies(version, asked) is True


def _requirement(facts: FlashinferFacts, distribution: str) -> str:
    """Give what an installer takes: as SGLang pins it in that environment, else the bare name."""
    asked = _pinned(facts, distribution)
    if asked is not None:
        extras = f"[{','.join(asked.extras)}]" if asked.extras else ""
        return f"{distribution}{extras}{asked.specifier}"
    return _ANY_WITH_MAMBA if distribution == "flashinfer-python" else distribution


def install(facts: FlashinferFacts) -> Remedy:
    """Install FlashInfer, in the version that SGLang pins there."""
    return Remedy(action=_pip(facts).install(_requirement(facts, "flashinfer-python")))


def _unshadow(facts: FlashinferFacts) -> Remedy | None:
    """Take a FlashInfer off the import path that lies where no installer changes it; None where it does not."""
    folder = shadowing_folder(facts.environment, "flashinfer")
    return None if folder is None else Remedy(action=unshadow("flashinfer", folder), shell=False)


def newer(facts: FlashinferFacts) -> Remedy:
    """Install a FlashInfer that has a mamba module, also where SGLang pins one that has none."""
    if (elsewhere := _unshadow(facts)) is not None:
        return elsewhere
    asked = _pinned(facts, "flashinfer-python")
    version = flashinfer_version(facts)
    if asked is not None and version is not None and _meets(asked, version):
        sglang = f"SGLang {facts.sglang}" if facts.sglang else "this SGLang"
        note = f"{sglang} wants FlashInfer {asked.specifier}: upgrade SGLang with it"
        return Remedy(action=_pip(facts).install("sglang", _ANY_WITH_MAMBA, upgrade=True), note=note)
    return install(facts)


def reinstall(facts: FlashinferFacts) -> Remedy:
    """Replace FlashInfer's files by those of the version that SGLang pins there, or else of the same version."""
    if (elsewhere := _unshadow(facts)) is not None:
        return elsewhere
    wanted = _requirement(facts, "flashinfer-python")
    version = parsed(flashinfer_version(facts))
    if wanted == _ANY_WITH_MAMBA and version is not None and version >= FIRST_WITH_MAMBA:
        wanted = f"flashinfer-python=={version.public}"
    pip = _pip(facts)
    owners = facts.environment.owners.get("flashinfer", ())
    if len(owners) > 1:
        # Removing one of two owners would take the other's files with it; both must go first.
        return Remedy(action=f"{pip.uninstall(*sorted(owners))} && {pip.install(wanted, dependencies=False)}")
    return Remedy(action=pip.install(wanted, replace=True, dependencies=False))


NEEDED = {
    "flashinfer": "flashinfer-python",
    "torch": "torch",
    "tvm_ffi": "apache-tvm-ffi",
    "cutlass": "nvidia-cutlass-dsl",
}
"""FlashInfer and what its own metadata requires, by module: their files are known to be theirs without metadata."""


def owner(facts: FlashinferFacts, file: str | None) -> str | None:
    """Name the distribution that a file below site-packages belongs to; None where that is not known."""
    return owner_of(facts.environment, file, named=NEEDED)


def restore(facts: FlashinferFacts, file: str | None, *, damaged: bool = False) -> Remedy:
    """Write the files of the distribution that a file belongs to anew.

    FlashInfer's where no file is named, or one of the standard library, unless that very file is ``damaged``.
    """
    name = owner(facts, file)
    top = (file or "").partition(":")[0].partition("/")[0].partition(".")[0]
    standard = top in sys.stdlib_module_names
    if name is None and standard and damaged:
        python = facts.environment.python or "the server's interpreter"
        return Remedy(action=f"install {python} again: {file} belongs to it", shell=False)
    if name is None and top and not standard and not top.startswith("<"):
        return Remedy(action=f"install the package that {file} belongs to again", shell=False)
    if name is None or name == "flashinfer-python":
        return reinstall(facts)
    if (folder := shadowing_folder(facts.environment, top)) is not None:
        return Remedy(action=unshadow(name, folder), shell=False)
    # In the version that is there: whether it is the right one is another matter.
    return _anew(facts, name)


def restore_module(facts: FlashinferFacts, module: str) -> Remedy:
    """Write the distribution that a module comes from anew; installing it would find it installed already."""
    name = owner(facts, module.replace(".", "/")) or distribution_of(module)
    if name in facts.environment.distributions:
        return _anew(facts, name)
    # Whatever else of that name is there requires it.
    whole = distribution_of(module.partition(".")[0])
    version = facts.environment.distributions.get(whole)
    return Remedy(action=_pip(facts).install(f"{whole}=={version}" if version else _requirement(facts, name)))


def _anew(facts: FlashinferFacts, name: str) -> Remedy:
    version = facts.environment.distributions.get(name)
    if version is None:
        return Remedy(action=_pip(facts).install(_requirement(facts, name), replace=True, dependencies=False))
    note = "from the package index that has this build" if "+" in version else ""
    return Remedy(action=_pip(facts).restore(facts.environment, name), note=note)


def restore_crashed(facts: FlashinferFacts, crash: Crash) -> Remedy:
    """Write anew what a process died of; where that is not known, the whole set of which FlashInfer is a part."""
    if crash.distribution is not None or crash.file is not None:
        return restore(facts, crash.file, damaged=crash.changed)
    # The last line of what Python prints of its imports is the one that the process died in.
    look = f"{shlex.quote(facts.environment.python or 'python')} -v -c 'import flashinfer.mamba'"
    return replace(match_build(facts), note=f"or first see which one it is: the last line of `{look}`")


def recompile(facts: FlashinferFacts) -> Remedy:
    """Write the byte code of the whole environment anew."""
    folders = " ".join(map(shlex.quote, facts.environment.site_dirs)) or "its site-packages"
    python = shlex.quote(facts.environment.python or "python")
    return Remedy(action=f"{python} -m compileall -q -f {folders}", note="as the owner of these files")


def install_modules(facts: FlashinferFacts, modules: Iterable[str]) -> Remedy:
    """Install the distributions that modules come from; those that count as installed already are written anew."""
    names = dict.fromkeys(map(distribution_of, modules))
    known = facts.environment.distributions
    pip = _pip(facts)
    new = [_requirement(facts, name) for name in names if name not in known]
    again = [name for name in names if name in known]
    commands = [pip.install(*new)] if new else []
    commands += [pip.restore(facts.environment, *again)] if again else []
    return Remedy(action=" && ".join(commands))


def torch_with_cuda(facts: FlashinferFacts) -> Remedy:
    """Replace torch by a build with CUDA."""
    return Remedy(action=_pip(facts).install(_requirement(facts, "torch"), replace=True), note="a build with CUDA")


def match_companion(facts: FlashinferFacts, distribution: str, version: str) -> Remedy:
    """Make FlashInfer and a companion agree, by whichever of the two is not what SGLang wants."""
    asked = _pinned(facts, "flashinfer-python")
    ours = facts.environment.flashinfer.version
    theirs = parsed(version)
    pip = _pip(facts)
    if asked is not None and ours is not None and theirs is not None:
        fits = [_meets(asked, one) for one in (ours, theirs.public)]
        if fits == [False, True]:
            if (elsewhere := _unshadow(facts)) is not None:
                return elsewhere
            action = pip.install(_requirement(facts, "flashinfer-python"), dependencies=False)
            return Remedy(action=action, note=f"{distribution} is the one that SGLang wants, FlashInfer is not")
    uninstall = pip.uninstall(distribution)
    wanted = parsed(ours)
    if distribution == "flashinfer-cubin" and wanted and _FIRST_CUBIN_ON_PYPI <= wanted <= _LAST_CUBIN_ON_PYPI:
        matching = pip.install(f"flashinfer-cubin=={wanted.public}", dependencies=False)
        return Remedy(action=matching, note=f"or {uninstall}, it is optional")
    note = "it is optional; PyPI has no matching one, FlashInfer's own package index may"
    return Remedy(action=uninstall, note=note)


def fetch_cubins(facts: FlashinferFacts) -> str:
    """Have the precompiled kernels in place before they are needed: those of the FlashInfer that is to stay."""
    asked, ours = _pinned(facts, "flashinfer-python"), facts.environment.flashinfer.version
    if asked is not None and ours is not None and satisfies(ours, asked) is False:
        return (
            f"{install(facts).action}  # the one that SGLang wants, and then its kernels: FlashInfer {ours} is another"
        )
    version = parsed(facts.environment.flashinfer.version)
    if version is not None and _FIRST_CUBIN_ON_PYPI <= version <= _LAST_CUBIN_ON_PYPI:
        return _pip(facts).install(f"flashinfer-cubin=={version.public}", dependencies=False)
    if version is not None and version < _FIRST_DOWNLOAD_COMMAND:
        return "copy what another server has in .cache/flashinfer/cubins of its home, or upgrade SGLang and FlashInfer"
    note = "where there is a network, as the server's user"
    return f"{shlex.quote(facts.environment.python or 'python')} -m flashinfer --download-cubin  # {note}"


def remove_leftover(facts: FlashinferFacts, distribution: str) -> Remedy:
    """Remove what is left of a companion, whether pip still knows it or not."""
    place = f"the folder {distribution.replace('-', '_')} from site-packages"
    return Remedy(action=_pip(facts).uninstall(distribution), note=f"and remove {place}")


def see_library(facts: FlashinferFacts, error: LoadError | None) -> Remedy:
    """Make a shared library visible to the loader of the server."""
    if facts.library_at is not None and facts.environment.site_dirs:
        folder = f"{facts.environment.site_dirs[0]}/{facts.library_at.rpartition('/')[0]}"
        action = f"export LD_LIBRARY_PATH={shlex.quote(folder)}:$LD_LIBRARY_PATH"
        return Remedy(action=action, note="in the server's environment")
    if error is not None and (other := _of_another_cuda(facts, error)) is not None:
        return replace(match_build(facts), note=f"{error.name} is of CUDA {other}, and torch is not")
    name = error.name if error is not None else "the library"
    driver = "its driver mount" if name.startswith(("libcuda.", "libnvidia-")) else "the package that brings it"
    return Remedy(action=f"make {name} visible to the server: {driver}, or LD_LIBRARY_PATH", shell=False)


_CUDA_LIBRARY: Final = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink)\.so\.(\d+)")
"""Libraries whose number is the major of their CUDA."""


def _of_another_cuda(facts: FlashinferFacts, error: LoadError) -> str | None:
    """The CUDA major of a library that is wanted, where torch was built for another one."""
    match = _CUDA_LIBRARY.match(error.name)
    ours = facts.environment.torch_cuda
    return match[1] if match is not None and ours is not None and match[1] != ours.partition(".")[0] else None


def newer_system(facts: FlashinferFacts, error: LoadError) -> Remedy:
    """Run on a system that is as new as a binary wants, or with a build for an older one."""
    action = (
        f"run the server on a system that has {error.name} (`ldd --version` shows the C library's release), or install "
        f"a build of {owner(facts, error.library) or error.library or 'the package'} for this system"
    )
    return Remedy(action=action, shell=False)


def match_build(facts: FlashinferFacts) -> Remedy:
    """Bring FlashInfer, its runtime and torch to one set of versions."""
    names = ("flashinfer-python", "apache-tvm-ffi", "torch")
    return Remedy(action=_pip(facts).install(*(_requirement(facts, name) for name in names), replace=True))


def no_lock() -> Remedy:
    """Look for what keeps an import waiting."""
    action = (
        "as the server's user, while nothing is being built: look for locks that a build which was killed left behind, "
        "`find ~/.cache/torch_extensions ~/.cache/tvm-ffi ~/.cache/flashinfer -name '*lock*'`, and remove them"
    )
    return Remedy(action=action, shell=False)


def unset(variable: str) -> Remedy:
    """Take a variable out of the server's environment."""
    return Remedy(action=f"take {variable} out of the server's environment (`unset {variable}`)", shell=False)


def usable_cache(problem: str | None) -> Remedy:
    """Give FlashInfer a folder that it can write; ``problem`` is that of the cache folder."""
    if problem == "no-home":
        # A base of its own does not help: FlashInfer asks for the home directory all the same.
        return Remedy(action="set HOME in the server's environment to a folder that its user may write", shell=False)
    action = "set FLASHINFER_WORKSPACE_BASE in the server's environment to a folder that its user may write"
    return Remedy(action=action, shell=False)


def newer_python(facts: FlashinferFacts) -> Remedy:
    """Use an interpreter that FlashInfer is written for."""
    python = facts.environment.python_version or "this one"
    return Remedy(action=f"install SGLang in an environment of Python 3.10 or newer, not {python}", shell=False)


_NAMED: Final = re.compile(r"(?:: b?'(?P<quoted>[^']{1,500})'|(?:^|[\s:'\"])(?P<plain>/[^\s:'\"]{1,500})(?=:))")
"""A path as an OSError ends with it, or as the dynamic loader begins with it."""


def _thing(said: str) -> str:
    """The file or folder that an exception names, else words for it."""
    match = _NAMED.search(said)
    path = None if match is None else match["quoted"] or match["plain"]
    return shlex.quote(path) if path else "the file or folder that the exception names"


def use_what_the_exception_names(said: str) -> Remedy:
    """Grant a right; ``said`` is what the exception says."""
    thing = _thing(said)
    look = f": `namei -l {thing}` shows who may do what on the way to it" if thing.startswith(("/", "'/")) else ""
    return Remedy(action=f"give the server's user the right to use {thing}{look}", shell=False)


def place_sentence(number: int | None) -> str:
    """Say what is wrong with the place that an exception names; empty where that is not known."""
    return "" if number is None or number not in PLACES else f" What it names {PLACES[number][0]}."


def repair_the_place(number: int | None, said: str) -> Remedy:
    """Repair a place that is not what it should be, where no right is missing; ``said`` is what the exception says."""
    _, action = PLACES[errno.ENOENT if number is None or number not in PLACES else number]
    thing = _thing(said)
    named = action.replace("the file or folder that the exception names", thing)
    return Remedy(action=named.replace("what the exception names", thing), shell=False)


def allow_execution() -> Remedy:
    """Let code be mapped from where it lies."""
    action = "mount the file system that holds the file without noexec, or move the environment to another one"
    return Remedy(action=action, shell=False)
