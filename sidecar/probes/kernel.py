"""Whether ``sgl_kernel``, the wheel with SGLang's compiled operations, can be loaded; if not, the one cause.

Reading shows what is not there. What the dynamic loader makes of the rest shows only by a real import, which tells
something where the driver's ``libcuda.so.1`` is found: without it the import fails whatever the wheel is like.

With the GPUs hidden, as imports run, the wheel's own loader takes its build for GPUs other than Hopper
(``sm100/common_ops``). For Hopper the other file counts, so that one is loaded for itself, in a process of its own:
both in one process end it, since each registers the same operations. Sources: sgl_kernel's load_utils.py in
sgl-project/sglang, and what the published wheel did.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from packaging.utils import canonicalize_name

from sidecar.config import ImportPolicy, Settings
from sidecar.crashes import Crash, crash
from sidecar.cudalibs import Capability, shown
from sidecar.environment import EnvironmentFacts
from sidecar.gpuset import capabilities, server_gpus
from sidecar.imports import ImportEvidence, ImportOutcome, ImportWork, LibraryLoad
from sidecar.loaderrors import LoadError, LoadFault, load_error
from sidecar.model import (
    ConditionType,
    Feature,
    Finding,
    Gate,
    Probe,
    Result,
    Sample,
    Scope,
    Severity,
    Skip,
    Status,
    Target,
    World,
)
from sidecar.modules import (
    ENDS_EVERY_LAUNCH,
    MODULE_FAMILIES,
    MODULE_SECTIONS,
    devices_missed,
    loader_told_less,
    module_samples,
    module_section,
    no_import,
    ran_short,
    start_code,
    variable_named,
    variables_missed,
)
from sidecar.requirements import distribution_of, installer, pinned, shadowing_folder, unshadow
from sidecar.services import Services, driver_reading
from sidecar.sglangtexts import minimum_of, refused_version

MODULE: Final = "sgl_kernel"
KERNEL_IMPORT: Final = ImportWork(MODULE, first="torch", load=("sm90/common_ops.*",))
"""The import of the wheel, and the loading of its build for Hopper."""
_DISTRIBUTIONS: Final = ("sglang-kernel", "sgl-kernel")
"""Its names, the newer one first."""
_LOADED_LATER: Final = ("flash_ops", "flash_attn.py", "flashmla_ops", "flash_mla.py", "infllm_ops")
"""Files that only some attention backends load: ``import sgl_kernel`` succeeds without them."""
_HOPPER: Final = (9, 0)
_HOPPER_FOLDER, _OTHER_FOLDER = "sm90", "sm100"
_DRIVER_CODES: Final = ("driver-too-old-for-cuda", "libcuda-unusable")
_FLASHINFER_CODES: Final = (
    "flashinfer-cubin-mismatch",
    "flashinfer-jit-cache-mismatch",
    "flashinfer-import-failed",
    "flashinfer-import-crashed",
)
_ARCH_CODE: Final = "gpu-arch-unsupported"
_TELLING: Final = {ImportOutcome.OK, ImportOutcome.FAILED, ImportOutcome.CRASHED, ImportOutcome.TIMEOUT}

BROKEN: Final = ConditionType(
    code="kernel-wheel-broken",
    severity=Severity.CRITICAL,
    gate=Gate.LAUNCH,
    title="sgl_kernel cannot be loaded",
    when="`import sgl_kernel` cannot load its compiled operations (common_ops): they are not there, were built for "
    "another torch or CUDA, or need a library that is not found. Judged by a real import with the GPUs hidden, where "
    "the server's libcuda.so.1 is found; else only what is missing is told, by reading. An import that succeeds says "
    "nothing about whether the wheel has code for a GPU; that is gpu-arch-unsupported.",
    remedy="Install the kernel wheel and the torch that SGLang pins, together.",
    reasons={
        "not-installed": "There is no package sgl_kernel beside SGLang.",
        "partial-install": "Files of the wheel are missing or damaged.",
        "wrong-arch-folder": "The wheel holds no build for these GPUs.",
        "abi-mismatch": "A symbol is undefined: the wheel was built for another torch, or the driver is too old.",
        "missing-library": "A shared library that it needs is not found, as one of another CUDA major.",
        "system-library-too-old": "It needs a newer C or C++ library than the system has.",
        "libcuda-missing": "It needs libcuda.so.1, which the loader does not find.",
        "flashinfer-fails": "Its operations load; then it imports FlashInfer, which fails.",
        "crashed": "The importing process was ended by a signal, or left by itself.",
        "other": "The import raised something else, which the message quotes.",
        "no-interpreter": "Unknown: no interpreter of the server was found.",
        "scope-self": "Unknown: only the sidecar's own environment could be read, which says nothing of the server's.",
        "kernel-too-old": "Unknown: this kernel cannot resolve paths inside another root (openat2, Linux 5.6).",
        "root-unreadable": "Unknown: the server's root may not be read from here.",
        "sglang-not-found": "Unknown: the environment that was found has neither sgl_kernel nor SGLang.",
        "no-libcuda": "Unknown: no libcuda.so.1 is found here, without which the import fails however good the wheel.",
        "not-imported": "Unknown: reading the files found no fault, and no real import was due: nothing asked for "
        "one, or several changes in a row each had one already.",
        "import-pending": "Unknown until the import that is under way has ended; reading the files found no fault.",
        "import-not-allowed": "Unknown: reading the files found no fault, and an import may not be run from here.",
        "import-starved": "Unknown: the import got too little CPU time to finish.",
        "insufficient-memory": "Unknown: there was not enough memory for the import.",
        "import-timeout": "Unknown: the import made no progress and was ended.",
        "damaged-package": "Unknown until imported: files are not as the wheel's RECORD lists them.",
        "editable-install": "Unknown until imported: its files are elsewhere.",
        "start-code": "Unknown until imported: code of a .pth file, which runs when the interpreter starts, may bring "
        "another one than reading finds.",
        "devices-hidden": "Unknown: the import failed because the probe hides the GPUs from it.",
        "probe-environment": "Unknown: this container, or a variable of the server that is not seen, can explain it.",
        "gpus-unknown": "Unknown: only one of the wheel's two builds loads, and which of them counts is not known.",
        "build-not-loaded": "Unknown: the build that these GPUs need was not loaded, only the other one was.",
    },
    depends_on=(*_DRIVER_CODES, _ARCH_CODE, *_FLASHINFER_CODES),
    moot_under=ENDS_EVERY_LAUNCH,
    uses=Feature.GPU,
)


# -- facts ------------------------------------------------------------------------------------------


class KernelFacts(Struct, frozen=True, kw_only=True):
    """All that is judged.

    ``environment`` is None where no interpreter was found. ``importing``: an import is under way or waiting.
    ``gpus`` are the compute capabilities of the server's GPUs, else of all that are visible; empty while unknown.
    ``device`` is what the running server resolved, ``variables_seen`` whether its environment can be read.
    """

    environment: EnvironmentFacts | None
    evidence: ImportEvidence | None = None
    importing: bool = False
    gpus: frozenset[Capability] = frozenset()
    device: str | None = None
    variables_seen: bool = False


async def collect(services: Services) -> KernelFacts:
    """Read the environment, shared with other probes, and start an import where it would tell something.

    Raises ProbeTimeout and ProbeCrash as the reading of the environment does.
    """
    target = await services.targets.find()
    environment, reading, info = await asyncio.gather(
        _environment(services, target), driver_reading(services), services.server.info(target)
    )
    known = reading is not None
    gpus = server_gpus(services.settings, target, reading, services.standing, info) if reading is not None else None
    facts = KernelFacts(
        environment=environment,
        gpus=frozenset(capabilities(reading, gpus).values()) if known else frozenset(),
        device=info.device if info is not None else None,
        variables_seen=target.environ is not None,
    )
    if environment is None or not _importable_at_all(environment):
        return facts
    imports = services.imports
    if _wanted(services.settings, target, facts.device) and imports.due(KERNEL_IMPORT, environment, target):
        imports.request(KERNEL_IMPORT, environment, target, lambda: services.imported(PROBE.name))
    return replace(
        facts,
        evidence=imports.evidence(KERNEL_IMPORT, environment, target),
        importing=imports.importing(KERNEL_IMPORT),
    )


async def _environment(services: Services, target: Target) -> EnvironmentFacts | None:
    try:
        return await services.environment.read(target)
    except Skip:
        return None


def _importable_at_all(environment: EnvironmentFacts) -> bool:
    """Whether an import would tell something of the wheel: it is there, and so is the driver's library."""
    return environment.problem is None and _may_be_there(environment) and _driver_library(environment)


def _may_be_there(environment: EnvironmentFacts) -> bool:
    if environment.kernel.kind == "package" or start_code(environment):
        return True
    return environment.kernel.kind == "absent" and not set(_DISTRIBUTIONS).isdisjoint(environment.editable)


def _driver_library(environment: EnvironmentFacts) -> bool:
    found = environment.libcuda.found
    return bool(found) and found[0].kind != "stub"


def _wanted(settings: Settings, target: Target, device: str | None) -> bool:
    """Whether the import policy asks for it: auto means that somebody counts on CUDA."""
    if settings.import_policy is not ImportPolicy.AUTO:
        return settings.import_policy is ImportPolicy.ALWAYS
    asked = target.launch.get("device") or device
    return _required(settings) or (isinstance(asked, str) and asked.startswith("cuda"))


def _required(settings: Settings) -> bool:
    return not {BROKEN.code, *PROBE.requirable}.isdisjoint(settings.require)


# -- judgement --------------------------------------------------------------------------------------


class Verdict(Struct, frozen=True, kw_only=True):
    """What is known of the wheel. ``explained_by`` lists the codes that can be behind ``reason``."""

    status: Status
    reason: str | None = None
    message: str = ""
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    verified: bool = False
    explained_by: tuple[str, ...] = ()
    sglang_says: str | None = None


def judge(result: Result[KernelFacts], world: World) -> Iterable[Finding]:
    """Judge the condition; a server that runs on CUDA settles what reading and importing leave open."""
    facts = result.facts
    if facts is None:
        return []
    verdict = classify(facts)
    if verdict.status is Status.UNKNOWN and _runs_on_cuda(facts):
        verdict = Verdict(status=Status.FALSE, message="The running server uses it.", evidence=verdict.evidence)
    finding = Finding(
        code=BROKEN.code,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message,
        remedy=verdict.remedy,
        evidence=verdict.evidence,
        final=verdict.verified,
        explained_by=verdict.explained_by,
        sglang_says=verdict.sglang_says,
    )
    counted_on = world.server.features.get(Feature.GPU) is True or _required(world.settings)
    if verdict.status is Status.UNKNOWN and not counted_on:
        # Nobody asked for the import that would tell: that this is open must not change anybody's verdict.
        finding = replace(finding, severity=Severity.INFO, gate=Gate.NEVER)
    return [finding]


def _runs_on_cuda(facts: KernelFacts) -> bool:
    amd = facts.environment is not None and facts.environment.torch_hip is not None
    # SGLang calls AMD's devices cuda, too.
    return (facts.device or "").startswith("cuda") and not amd


def classify(facts: KernelFacts) -> Verdict:
    """Find the single cause that keeps ``sgl_kernel`` from being loaded in this environment."""
    environment = facts.environment
    if environment is None:
        return _unknown("no-interpreter")
    if environment.problem is not None:
        return _unknown(environment.problem)
    if environment.scope is Scope.SELF:
        return _unknown("scope-self")
    by_files = _by_files(facts, environment)
    evidence = facts.evidence
    if evidence is None or evidence.outcome not in _TELLING:
        return by_files
    if evidence.outcome is ImportOutcome.TIMEOUT:
        stage = f"The import made no progress for a minute at the stage: {evidence.stage or 'start'}."
        return by_files if by_files.status is Status.TRUE else _unknown("import-timeout", stage)
    lines = _import_lines(facts, environment, evidence)
    if evidence.outcome is ImportOutcome.CRASHED:
        return _crashed(facts, environment, evidence, lines)
    return _by_import(facts, environment, evidence, lines)


def _unknown(reason: str, message: str = "", evidence: tuple[str, ...] = ()) -> Verdict:
    return Verdict(status=Status.UNKNOWN, reason=reason, message=message, evidence=evidence)


# -- by reading -------------------------------------------------------------------------------------


def _by_files(facts: KernelFacts, environment: EnvironmentFacts) -> Verdict:
    found = _on_the_path(facts, environment)
    if found.status is Status.TRUE and start_code(environment):
        # What is on the path need not be what is imported.
        return replace(_open(facts, environment, "start-code"), message=found.message)
    return found


def _on_the_path(facts: KernelFacts, environment: EnvironmentFacts) -> Verdict:
    kernel = environment.kernel
    if not _may_be_there(environment):
        if "sglang" not in environment.distributions and kernel.kind == "absent":
            return _unknown("sglang-not-found")
        return _not_installed(environment)
    if kernel.kind == "absent":
        editable = not set(_DISTRIBUTIONS).isdisjoint(environment.editable)
        return _open(facts, environment, "editable-install" if editable else "start-code")
    if kernel.kind != "package":
        return _not_installed(environment)
    if not kernel.folders and not kernel.plain and _version(environment) is not None:
        message = f"{_name(environment)} holds no compiled operations (common_ops)."
        return _partial(environment, message)
    missing = _missing_files(environment)
    if missing:
        message = f"Files of {_name(environment)} are missing: {', '.join(missing)}."
        return _partial(environment, message)
    needed = _needed_folders(facts)
    if kernel.folders and not kernel.plain and needed and not needed & set(kernel.folders):
        return _wrong_folder(facts, environment)
    damaged = any(environment.damaged[name].resized for name in _DISTRIBUTIONS if name in environment.damaged)
    return _open(facts, environment, "damaged-package" if damaged else "not-imported")


def _open(facts: KernelFacts, environment: EnvironmentFacts, reason: str) -> Verdict:
    """Say why it is not known, where reading the files found nothing wrong."""
    evidence = facts.evidence
    if not _driver_library(environment):
        return _unknown("no-libcuda")
    if evidence is not None:
        match evidence.outcome:
            case ImportOutcome.STARVED:
                return _unknown("import-starved")
            case ImportOutcome.INSUFFICIENT_MEMORY:
                return _unknown("insufficient-memory")
            case ImportOutcome.NOT_ALLOWED:
                return _unknown("import-not-allowed", no_import(evidence))
            case _:
                pass
    return _unknown("import-pending" if facts.importing else reason)


def _missing_files(environment: EnvironmentFacts) -> tuple[str, ...]:
    """Code of the package that its RECORD lists and that is not there."""
    return tuple(
        example
        for name in _DISTRIBUTIONS
        if name in environment.damaged and environment.damaged[name].missing
        for example in environment.damaged[name].examples
        if example.startswith(f"{MODULE}/")
        and example.endswith((".py", ".so"))
        and not example.removeprefix(f"{MODULE}/").startswith(_LOADED_LATER)
    )


def _needed_folders(facts: KernelFacts) -> set[str]:
    """Folders that the wheel's loader would take on these GPUs; empty while they are unknown."""
    return {_HOPPER_FOLDER if gpu == _HOPPER else _OTHER_FOLDER for gpu in facts.gpus}


def _not_installed(environment: EnvironmentFacts) -> Verdict:
    kind = environment.kernel.kind
    pin = _pin(environment)
    if kind == "namespace":
        return _partial(environment, "Of sgl_kernel only a folder without code is left.")
    if kind != "absent":
        return _partial(environment, f"In place of the package sgl_kernel there is a {kind} of that name.")
    from packaging.requirements import Requirement  # only here: it takes long to load

    release = environment.sglang_release
    name = canonicalize_name(Requirement(pin).name)
    minimum = minimum_of(release, name)
    sglang = f"SGLang {release}" if release else "SGLang"
    where = environment.python or "the server's environment"
    return Verdict(
        status=Status.TRUE,
        reason="not-installed",
        message=f"{sglang} is installed in {where} and the "
        f"kernel wheel, without which it does not run on CUDA, is not: it wants {pin}.",
        remedy=installer(environment).install(pin),
        sglang_says=None if minimum is None else refused_version(name, minimum, None),
    )


def _partial(
    environment: EnvironmentFacts, message: str, evidence: tuple[str, ...] = (), *, verified: bool = False
) -> Verdict:
    folder = shadowing_folder(environment, MODULE)
    return Verdict(
        status=Status.TRUE,
        reason="partial-install",
        message=message,
        remedy=_reinstall(environment) if folder is None else unshadow("sgl_kernel", folder),
        evidence=evidence,
        verified=verified,
    )


def _wrong_folder(
    facts: KernelFacts, environment: EnvironmentFacts, evidence: tuple[str, ...] = (), *, verified: bool = False
) -> Verdict:
    there = ", ".join(environment.kernel.folders) or "no folder"
    gpus = f" ({shown(facts.gpus)})" if facts.gpus else ""
    wanted = ", ".join(sorted(_needed_folders(facts))) or _OTHER_FOLDER
    return Verdict(
        status=Status.TRUE,
        reason="wrong-arch-folder",
        message=f"{_name(environment)} holds {there}; for these GPUs{gpus} its loader takes {wanted}.",
        remedy=f"Install a build of the wheel for these GPUs: {_reinstall(environment)}",
        evidence=evidence,
        verified=verified,
        explained_by=(_ARCH_CODE,),
    )


# -- by importing -----------------------------------------------------------------------------------


def _by_import(
    facts: KernelFacts, environment: EnvironmentFacts, evidence: ImportEvidence, lines: tuple[str, ...]
) -> Verdict:
    """Put together what the import showed of one build, and loading the other one of that."""
    imported = evidence.outcome is ImportOutcome.OK
    fine = Verdict(status=Status.FALSE, message="It was imported.", evidence=lines, verified=True)
    # A wheel without folders has one build, and a loader that sees the GPUs takes the right one.
    one_build = not environment.kernel.folders or evidence.devices_hidden is False
    if one_build or not (imported or _of_the_operations(evidence)):
        return fine if imported else _failed(environment, evidence, lines, _faithful(facts, environment, evidence))
    hopper = next((one for one in evidence.loads if one.path.startswith(f"{_HOPPER_FOLDER}/")), None)
    loads = {_OTHER_FOLDER: imported, _HOPPER_FOLDER: None if hopper is None else hopper.error is None}
    needed = _needed_folders(facts)
    if not needed and loads[_OTHER_FOLDER] is not loads[_HOPPER_FOLDER] and loads[_HOPPER_FOLDER] is not None:
        good, bad = sorted(loads, key=lambda folder: not loads[folder])
        message = f"{MODULE}/{good} loads and {MODULE}/{bad} does not; which of them counts depends on the GPUs."
        return _unknown("gpus-unknown", message, lines)
    if not imported and needed != {_HOPPER_FOLDER}:
        return _failed(environment, evidence, lines, _faithful(facts, environment, evidence))
    if _HOPPER_FOLDER not in needed:
        return fine
    if hopper is None:
        if _HOPPER_FOLDER not in environment.kernel.folders and not environment.kernel.plain:
            return _wrong_folder(facts, environment, lines, verified=True)
        return _unknown("build-not-loaded", evidence=lines)
    if hopper.error is not None:
        return _failed(environment, evidence, lines, _faithful(facts, environment, evidence), hopper=hopper)
    if not imported:
        message = f"{MODULE}/{hopper.path}, which these GPUs need, loads; with them hidden the import takes the other."
        return _unknown("build-not-loaded", message, lines)
    return fine


_LOADER_SAYS: Final = "[sgl_kernel] CRITICAL: Could not load any common_ops library!"
_LOADER_TEXT: Final = re.compile(r"Could not load any common_ops library|common_ops")
_NESTED: Final = re.compile(r"^- (\w{1,60}): (.{1,2000})$", re.MULTILINE)
_NO_FILES: Final = re.compile(r"Architecture-specific pattern: .* found files: \[\]")
_DAMAGED: Final = re.compile(
    r"file too short|invalid ELF header|file data|ELF load command|wrong ELF class|not a dynamic"
)


def _of_the_operations(evidence: ImportEvidence) -> bool:
    """Whether a failure is that of loading the compiled operations."""
    return bool(_LOADER_TEXT.search(evidence.message)) or any(link.library for link in evidence.chain)


def originals(evidence: ImportEvidence) -> tuple[str, ...]:
    """Exceptions behind the wheel's own text, which lists them at its end, and behind any other, innermost last."""
    nested = [f"{kind}: {said.strip()}" for kind, said in _NESTED.findall(evidence.message)]
    chained = [f"{link.exception}: {' '.join(link.message.split())}" for link in evidence.chain[1:]]
    return tuple(dict.fromkeys(line[:500] for line in (*nested, *chained)))[:8]


def _failed(
    environment: EnvironmentFacts,
    evidence: ImportEvidence,
    lines: tuple[str, ...],
    faithful: bool,
    *,
    hopper: LibraryLoad | None = None,
) -> Verdict:
    """Find the cause behind what was raised, or behind what kept the build for Hopper from being loaded."""
    said = hopper.error or "" if hopper is not None else "\n".join((evidence.message, *originals(evidence)))
    missed = load_error(said)
    verdict = _cause(environment, evidence, said, missed, hopper)
    if verdict.status is Status.UNKNOWN:
        return replace(verdict, evidence=lines)
    if hopper is None and verdict.reason == "other" and devices_missed(evidence):
        return _unknown("devices-hidden", verdict.message, lines)
    if evidence.private or ran_short(evidence) or _withheld_explains(evidence, verdict, missed, said):
        return _unknown("probe-environment", verdict.message, lines)
    if not faithful and _may_be_ours(verdict, missed):
        return _unknown("probe-environment", verdict.message, lines)
    says = _first_line(evidence.message) if hopper is None else _LOADER_SAYS
    return replace(verdict, verified=True, evidence=lines, sglang_says=verdict.sglang_says or says)


def _cause(
    environment: EnvironmentFacts,
    evidence: ImportEvidence,
    said: str,
    missed: LoadError | None,
    hopper: LibraryLoad | None,
) -> Verdict:
    """Name the cause.

    A symbol or library that the loader missed comes before all that the wheel's text says of architectures: it
    prints that text whatever went wrong.
    """
    name = _name(environment)
    if hopper is None and _in_flashinfer(evidence):
        return Verdict(
            status=Status.TRUE,
            reason="flashinfer-fails",
            message=f"The operations of {name} load; then it imports FlashInfer, which raises {_quoted(evidence)}",
            remedy="Repair FlashInfer, or uninstall it: the kernel wheel does without.",
            explained_by=_FLASHINFER_CODES,
        )
    if missed is not None:
        return _missed(environment, evidence, missed, f"{MODULE}/{hopper.path}" if hopper is not None else name)
    if _DAMAGED.search(said):
        return _partial(environment, f"A compiled file of {name} is damaged: {_damage(said)}")
    if evidence.missing == MODULE:
        return _not_installed(environment)
    if evidence.missing is not None and evidence.missing.startswith(f"{MODULE}."):
        return _partial(environment, f"A part of {name} is missing: {evidence.missing}.")
    if hopper is None and _NO_FILES.search(evidence.message):
        return _no_build(environment, evidence)
    if hopper is not None:
        reason, message = "other", f"{MODULE}/{hopper.path} cannot be loaded: {hopper.error}."
        if hopper.signal is not None:
            reason = "crashed"
    else:
        reason, message = "other", f"The import of {name} raises {_quoted(evidence)}"
    remedy = f"Install the pair that SGLang pins: {_both(environment)}"
    return Verdict(status=Status.TRUE, reason=reason, message=message, remedy=remedy, explained_by=_DRIVER_CODES)


def _no_build(environment: EnvironmentFacts, evidence: ImportEvidence) -> Verdict:
    """Judge a wheel in which its own loader found nothing to load."""
    if not environment.kernel.folders:
        return _partial(environment, f"{_name(environment)} holds no compiled operations (common_ops).")
    wanted = re.search(r"Architecture-specific pattern: \S*?/(sm\d{2,3})/", evidence.message)
    return Verdict(
        status=Status.TRUE,
        reason="wrong-arch-folder",
        message=f"{_name(environment)} holds {', '.join(environment.kernel.folders)}; its loader looks into "
        f"{wanted[1] if wanted else 'another folder'} here.",
        remedy=f"Install a build of the wheel for these GPUs: {_reinstall(environment)}",
        explained_by=(_ARCH_CODE,),
    )


def _missed(environment: EnvironmentFacts, evidence: ImportEvidence, missed: LoadError, where: str) -> Verdict:
    """Judge what the dynamic loader missed."""
    what = missed.library or where
    if missed.fault not in _MISSED:
        return _unusable(environment, missed, what)
    if missed.fault is LoadFault.LIBRARY and missed.library is not None:
        # Asked for by its path; the loader says the same of a file that is there for another kind of machine.
        message = f"{what} is not there, or is built for another kind of machine."
        return _of_its_package(environment, missed.library, message)
    if missed.fault is LoadFault.SYMBOL:
        return _abi(environment, evidence, missed, what)
    if missed.fault is LoadFault.VERSION:
        return Verdict(
            status=Status.TRUE,
            reason="system-library-too-old",
            message=f"{what} needs {missed.name}, which this system's C or C++ library does not have.",
            remedy="Use an image with a newer distribution, or a wheel that was built for this one.",
        )
    if missed.name.startswith("libcuda.so"):
        return Verdict(
            status=Status.TRUE,
            reason="libcuda-missing",
            message=f"{what} needs {missed.name}, the driver's library, and the loader does not find it.",
            remedy="Start the server's container through the NVIDIA runtime with `compute` among its "
            "NVIDIA_DRIVER_CAPABILITIES; a stub or compat folder on LD_LIBRARY_PATH does not help.",
            explained_by=_DRIVER_CODES,
        )
    return _missing_library(environment, evidence, missed.name, what)


def _unusable(environment: EnvironmentFacts, missed: LoadError, what: str) -> Verdict:
    """Judge a file that is there and cannot be loaded."""
    match missed.fault:
        case LoadFault.SHORTAGE:
            message = f"{what} was not loaded for want of memory or of file descriptors where the import ran."
            return _unknown("probe-environment", message)
        case LoadFault.DENIED:
            message = f"{what} needs {missed.name}, which is there and may not be opened."
            remedy = "Give the server's user the right to read that file and to enter the folders above it."
        case LoadFault.UNMAPPABLE:
            message = f"{what} lies on a file system from which nothing may be executed."
            remedy = "Mount it without noexec, or move the environment to another file system."
        case LoadFault.UNREADABLE:
            message = f"{what} needs {missed.name}, which is there and which the file system does not give."
            remedy = "Look at the kernel's log and the health of the disk or of the network file system."
        case _:
            return _of_its_package(environment, what, f"The compiled file {what} is damaged: {missed.name}.")
    return Verdict(status=Status.TRUE, reason="other", message=message, remedy=remedy)


def _of_its_package(environment: EnvironmentFacts, library: str, message: str) -> Verdict:
    """Judge a compiled file that cannot be used, of the wheel itself or of what it loads."""
    if MODULE in library or "common_ops" in library or library.startswith(_HOPPER_FOLDER):
        return _partial(environment, message)
    remedy = "Install the package that this file belongs to again."
    name = distribution_of(library.partition("/")[0])
    if name in environment.distributions:
        remedy = installer(environment).restore(environment, name)
    return Verdict(status=Status.TRUE, reason="other", message=message, remedy=remedy)


def _missing_library(environment: EnvironmentFacts, evidence: ImportEvidence, library: str, what: str) -> Verdict:
    """Judge a library that is not found: of another CUDA than torch's, in a folder nobody looks into, or nowhere."""
    places = evidence.wheels.get(library, ())
    exact = next((place for place in places if place.rpartition("/")[2] == library), None)
    wanted = re.search(r"\.so\.(\d{2})\b", library) if _of_cuda(library) else None
    cuda = evidence.torch_cuda or environment.torch_cuda
    major = (cuda or "").partition(".")[0]
    message = f"{what} needs {library}, which the server's loader does not find."
    remedy = "Install the package that has the library, or extend the server's LD_LIBRARY_PATH by its folder."
    if exact is not None:
        message += f" It is at {exact}, where the loader does not look."
        remedy = f"Put {exact.rpartition('/')[0]} (below site-packages) into the server's LD_LIBRARY_PATH."
    elif places:
        message += f" There is {places[0]} instead."
    if wanted is not None and major and wanted[1] != major:
        message += f" The wheel is a build for CUDA {wanted[1]}, and torch is one for CUDA {cuda}."
        remedy = f"Install the wheel in its build for CUDA {major}: {_reinstall(environment)}"
    return Verdict(status=Status.TRUE, reason="missing-library", message=message, remedy=remedy)


def _of_cuda(library: str) -> bool:
    """Whether the number in a library's name is CUDA's major."""
    return library.startswith(("libcudart.", "libnvrtc.", "libcublas", "libnvJitLink."))


def _abi(environment: EnvironmentFacts, evidence: ImportEvidence, missed: LoadError, what: str) -> Verdict:
    """Judge a symbol that no library defines."""
    # The driver's functions have names of one style: cuMemAlloc_v2, cuTensorMapEncodeTiled.
    if re.fullmatch(r"cu[A-Z]\w+", missed.name):
        return Verdict(
            status=Status.TRUE,
            reason="abi-mismatch",
            message=f"{what} needs {missed.name}, which the driver's libcuda.so.1 does not have: it is too old.",
            remedy="Upgrade the driver, or use an image whose wheels were built for an older CUDA.",
            explained_by=_DRIVER_CODES,
        )
    torch = evidence.versions.get("torch") or environment.torch_version or "of unknown version"
    symbol = f"{missed.readable} ({missed.name})" if missed.readable is not None else missed.name
    strings = ""
    if missed.old_strings is not None:
        abi = "the old C++ strings, from before C++11" if missed.old_strings else "C++11 strings (cxx11)"
        strings = f" The symbol takes {abi}."
    return Verdict(
        status=Status.TRUE,
        reason="abi-mismatch",
        message=f"{what} needs the symbol {symbol}, which torch {torch} does not have: {_name(environment)} was built "
        f"for another torch.{strings} The wheel does not state which one it needs, so that pip sees no conflict.",
        remedy=f"Install the pair that SGLang pins: {_both(environment)}",
    )


def _crashed(
    facts: KernelFacts, environment: EnvironmentFacts, evidence: ImportEvidence, lines: tuple[str, ...]
) -> Verdict:
    found = crash(environment, evidence, named={"torch": "torch"})
    message = f"The importing process {found.how}."
    # A process that leaves by itself may have missed any variable; a signal may come from a missing preload.
    less = bool(variables_missed(evidence)) if evidence.signal is None else loader_told_less(evidence)
    if less or evidence.private or not _faithful(facts, environment, evidence):
        return _unknown("probe-environment", message, lines)
    return Verdict(
        status=Status.TRUE,
        reason="crashed",
        message=message,
        remedy=_restored(environment, found) or f"Install the pair that SGLang pins: {_both(environment)}",
        evidence=lines,
        verified=True,
        explained_by=_DRIVER_CODES,
    )


def _faithful(facts: KernelFacts, environment: EnvironmentFacts, evidence: ImportEvidence) -> bool:
    """Whether the import ran as in the server: its files, its user, its environment variables."""
    return environment.scope is Scope.SERVER and evidence.same_user and facts.variables_seen


def _withheld_explains(evidence: ImportEvidence, verdict: Verdict, missed: LoadError | None, said: str) -> bool:
    """Whether a variable of the server that the import did not get can be behind the failure."""
    if variable_named(evidence, said):
        return True
    if missed is not None:
        return loader_told_less(evidence) and missed.fault in _MISSED
    return bool(variables_missed(evidence)) and verdict.reason == "other"


_MISSED: Final = {LoadFault.SYMBOL, LoadFault.LIBRARY, LoadFault.VERSION}
"""What a library that is loaded before all others can bring."""


def _may_be_ours(verdict: Verdict, missed: LoadError | None) -> bool:
    """Whether a failure can come from where the import ran: the driver's files, LD_LIBRARY_PATH, rights."""
    if verdict.reason in {"not-installed", "partial-install", "wrong-arch-folder"}:
        return False
    of_the_driver = bool(set(_DRIVER_CODES) & set(verdict.explained_by))
    return missed is None or missed.fault is not LoadFault.SYMBOL or of_the_driver


def _in_flashinfer(evidence: ImportEvidence) -> bool:
    deep = (evidence.stage or "").startswith("import flashinfer")
    return (evidence.where or "").startswith(("flashinfer/", "flashinfer_")) or (
        deep and not _of_the_operations(evidence)
    )


# -- texts ------------------------------------------------------------------------------------------


def _version(environment: EnvironmentFacts) -> str | None:
    return next((environment.distributions[one] for one in _DISTRIBUTIONS if one in environment.distributions), None)


def _name(environment: EnvironmentFacts) -> str:
    version = _version(environment)
    return f"sgl_kernel {version}" if version is not None else "sgl_kernel"


def _pin(environment: EnvironmentFacts, *names: str) -> str:
    """Give the wheel's requirement as SGLang states it there, else the name under which it is installed."""
    names = names or _DISTRIBUTIONS
    for name in names:
        asked = pinned(environment, name)
        if asked is not None:
            return f"{asked.package}{asked.specifier}"
    return next((name for name in names if name in environment.distributions), names[0])


def _reinstall(environment: EnvironmentFacts) -> str:
    return installer(environment).install(_pin(environment), replace=True, dependencies=False)


def _restored(environment: EnvironmentFacts, found: Crash) -> str | None:
    """Write anew what a process died of; None where that is not known, or is the kernel wheel or torch, a pair."""
    name = found.distribution
    if name is None or (name in {*_DISTRIBUTIONS, "torch"} and not found.changed):
        return None
    return installer(environment).restore(environment, name)


def _both(environment: EnvironmentFacts) -> str:
    return installer(environment).install(_pin(environment), _pin(environment, "torch"), replace=True)


def _first_line(message: str) -> str | None:
    """Give the line by which the failure is found in SGLang's log."""
    return next((line.strip()[:300] for line in message.splitlines() if line.strip()), None)


def _quoted(evidence: ImportEvidence) -> str:
    text = " ".join(evidence.message.split())
    return f"{evidence.exception}: {text[:300]}" + ("…" if len(text) > 300 else "")


def _damage(text: str) -> str:
    line = next((line for line in text.splitlines() if _DAMAGED.search(line)), "")
    return " ".join(line.removeprefix("- ").split())[-200:]


def _import_lines(facts: KernelFacts, environment: EnvironmentFacts, evidence: ImportEvidence) -> tuple[str, ...]:
    """How the import went, as evidence."""
    versions = dict(evidence.versions) or {"torch": environment.torch_version or "unknown"}
    hidden = evidence.outcome is ImportOutcome.OK and evidence.devices_hidden and environment.kernel.folders
    return (
        *(f"behind it: {one}" for one in originals(evidence)),
        *(f"{MODULE}/{one.path} by itself: {one.error or 'loaded'}" for one in evidence.loads),
        *([f"with the GPUs hidden, the import loads {MODULE}/{_OTHER_FOLDER}"] if hidden else []),
        *([f"{evidence.exception} at {evidence.where}"] if evidence.where else []),
        *([f"printed last: {evidence.tail}"] if evidence.tail else []),
        "loaded: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
        *([f"GPUs: {shown(facts.gpus)}"] if facts.gpus else []),
        *([f"took {evidence.seconds:.1f} s"] if evidence.seconds is not None else []),
    )


# -- what is shown ----------------------------------------------------------------------------------


def samples(facts: KernelFacts) -> Iterable[Sample]:
    """Tell of ``sgl_kernel`` by the best evidence; nothing while unknown."""
    importable, verdict = _importable(facts)
    return module_samples(MODULE, importable=importable, verified=verdict.verified, evidence=facts.evidence)


def _importable(facts: KernelFacts) -> tuple[bool | None, Verdict]:
    verdict = classify(facts)
    return None if verdict.status is Status.UNKNOWN else verdict.status is Status.FALSE, verdict


def report(facts: KernelFacts) -> Mapping[str, Any]:
    """Give the module's entry in the report's ``modules``."""
    environment = facts.environment
    if environment is None:
        return {}
    importable, verdict = _importable(facts)
    section = module_section(
        importable=importable,
        verified=verdict.verified,
        evidence=facts.evidence,
        pending=facts.importing,
        scope=environment.scope,
        version=_version(environment),
        code=BROKEN.code if verdict.status is Status.TRUE else None,
        reason=verdict.reason,
    )
    return {"modules": {MODULE: section}}


PROBE: Probe[KernelFacts] = Probe(
    name="kernel",
    title="sgl_kernel",
    interval=60.0,
    deadline=10.0,
    backoff=True,
    collect=collect,
    judge=judge,
    samples=samples,
    families=MODULE_FAMILIES,
    conditions=(BROKEN,),
    report=report,
    sections=MODULE_SECTIONS,
    requirable={"cuda": (BROKEN.code,)},
)
"""What the rest of the agent needs to know of this probe."""
