"""Whether SGLang takes the flags of a launch: what its argument parser would refuse, before anything is loaded.

Judged for a launch that is considered, and for a process that has just been started and does not answer yet; one that
answers has been through its parser. Flags that are not listed are passed over, and named: SGLang has hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from sidecar import starting
from sidecar.environment import EnvironmentFacts, InterpreterUnusable
from sidecar.launch import rules as launchrules
from sidecar.launch.args import FA_IMPL_VER, INCOMPLETE
from sidecar.launch.forms import LaunchForm
from sidecar.launch.rules import Fit
from sidecar.model import (
    Answer,
    ConditionType,
    Finding,
    Gate,
    LaunchNotes,
    Probe,
    ProbeCrash,
    ProbeTimeout,
    Result,
    Scope,
    Severity,
    Skip,
    Status,
    Target,
    World,
)
from sidecar.services import Services
from sidecar.target import PREFLIGHT

_PARSED_AFTER: Final = 600.0
"""Seconds after which a process that lives has certainly read its flags: that takes 10 to 60, starved some more."""


_SHOWN: Final = 6
"""Flags that are named of those that an abbreviation matches."""


class LaunchFacts(Struct, frozen=True, kw_only=True):
    """The flags of a launch and the SGLang that would read them.

    ``notes`` is None where no flags can be seen. ``release`` is that of the installed SGLang, None where it is not
    known. ``started_at`` is when the process was started whose flags they are (seconds since the epoch), None for a
    launch that is only considered.
    """

    preflight: bool
    notes: LaunchNotes | None
    flags: Mapping[str, str | int | bool]
    release: str | None
    started_at: float | None = None
    start: starting.StartFacts | None = None


async def collect(services: Services) -> LaunchFacts:
    """Read the flags, which SGLang is installed, and whether it can be started at all."""
    target = await services.targets.find()
    start = await _start(services, target)
    return LaunchFacts(
        preflight=target.launch_source == PREFLIGHT,
        notes=target.notes,
        flags=target.launch,
        release=None if target.notes is None else _release(start.environment),
        started_at=target.create_time,
        start=start,
    )


async def _start(services: Services, target: Target) -> starting.StartFacts:
    """Look at the interpreter of the launch and its SGLang; what cannot be read is for other probes to report."""
    try:
        environment = await services.environment.read(target)
    except InterpreterUnusable as fault:
        return starting.facts_of(target, fault=fault)
    except (Skip, ProbeCrash, ProbeTimeout) as error:
        return starting.facts_of(target, why=str(error))
    return starting.facts_of(
        target,
        environment=environment,
        broken=services.imports.broken_start(environment, target),
        elsewhere=None if "sglang" in environment.distributions else services.targets.with_sglang(target),
    )


def _release(environment: EnvironmentFacts | None) -> str | None:
    """The installed SGLang; None where that is not known."""
    if environment is None or environment.scope is Scope.SELF:
        return None
    return environment.sglang_release


# -- judgement --------------------------------------------------------------------------------------

REJECTED: Final = ConditionType(
    code="launch-flags-rejected",
    severity=Severity.CRITICAL,
    gate=Gate.LAUNCH,
    title="SGLang refuses the flags of this launch",
    when=(
        "A flag, its value or the configuration file is one that this release's argument parser ends with, for a launch"
        " that is considered, or for a server that was started and does not answer yet. A warning where a plugin, or a"
        " release newer than this agent knows, may accept it."
    ),
    remedy="Correct the flag; `python -m sglang.launch_server --help` lists what this release takes.",
    reasons={
        "invalid-choice": "the value is not among the choices of this release",
        "unknown-choice": "no known release has the value among its choices; a plugin or a newer one may",
        "unrecognized-flag": "this release does not have the flag, or not in this spelling",
        "ambiguous-flag": "the abbreviation stands for several flags of this release",
        "missing-value": "the flag comes without its value",
        "unexpected-value": "the flag takes no value and has one",
        "unexpected-word": "a word stands where only a flag may",
        "not-a-number": "the flag takes a whole number and has something else",
        "value-out-of-range": "the flag takes no number as small as this",
        "flag-conflict": "values that each are valid and that this release refuses together, or in this place",
        "missing-model": "no model is named",
        "several-configs": "more than one configuration file is named",
        "config-key-refused": "the configuration file holds a deprecated flag, which only the command line may",
        "config-ignored": "SGLang drops a configuration file that is named as --config=FILE",
        "sglang-version-unknown": "Unknown: it depends on the release of SGLang, which is not known.",
        "flags-incomplete": "Unknown: more flags come from where they cannot be read.",
        "flags-not-seen": "Unknown: no server answers, and no launch command can be seen.",
    },
    hold=(1, 1),
)

_MESSAGES: Final = {
    "missing-value": "{flag} comes without its value.",
    "unexpected-value": "{flag} takes no value.",
    "unexpected-word": "A word follows {flag} that belongs to no flag.",
    "not-a-number": "{flag} takes a whole number.",
    "unrecognized-flag": "{flag} is written with underscores, which no flag of SGLang has.",
    "several-configs": "--config is given more than once.",
}


class _Fault(Struct, frozen=True, kw_only=True):
    reason: str
    sentence: str
    says: str | None
    remedy: str | None = None
    sure: bool = True


def judge(result: Result[LaunchFacts], world: World) -> Iterable[Finding]:
    """Say whether the launch gets as far as SGLang, and whether that refuses its flags."""
    facts = result.facts
    if facts is None:
        return ()
    start = () if facts.start is None else starting.judge(facts.start, world)
    return (*start, *_flags(facts, world))


def _flags(facts: LaunchFacts, world: World) -> Iterable[Finding]:
    """Say whether the flags would be refused; the first fault is the reason, the others are evidence."""
    if not facts.preflight and _has_parsed(facts, world):
        return (Finding(code=REJECTED.code, status=Status.FALSE),)
    if facts.notes is None:
        # Not a gap in what was asked for: there may be no launch at all.
        return (_unknown("flags-not-seen", "No server answers and no launch command can be seen.", weighs=False),)
    # What is certain comes before what may be, in the order in which SGLang meets it.
    faults = sorted(_faults(facts, facts.notes), key=lambda fault: not fault.sure)
    if faults:
        first = faults[0]
        return (
            Finding(
                code=REJECTED.code,
                status=Status.TRUE,
                reason=first.reason,
                message=first.sentence,
                remedy=first.remedy,
                evidence=tuple(f"{fault.reason}: {fault.sentence}" for fault in faults[1:]),
                severity=None if first.sure else Severity.WARNING,
                gate=None if first.sure else Gate.NEVER,
                sglang_says=first.says,
            ),
        )
    return (_without_faults(facts, facts.notes),)


def _unknown(reason: str, sentence: str, *, weighs: bool) -> Finding:
    severity = None if weighs else Severity.INFO
    return Finding(code=REJECTED.code, status=Status.UNKNOWN, reason=reason, message=sentence, severity=severity)


def _without_faults(facts: LaunchFacts, notes: LaunchNotes) -> Finding:
    unsure = [flag for flag, _, value in notes.given if _fit(flag, value, facts) is Fit.UNKNOWN]
    unsure += [word for word, _ in notes.abbreviated if launchrules.may_be_ambiguous(word, facts.release)]
    if unsure:
        flags = ", ".join(dict.fromkeys(unsure))
        sentence = f"Which release of SGLang would read them is not known: {flags}."
        return _unknown("sglang-version-unknown", sentence, weighs=facts.preflight)
    if notes.launches > 1:
        sentence = f"The command starts SGLang in {notes.launches} places; only the last of them was judged."
        return _unknown("flags-incomplete", sentence, weighs=facts.preflight)
    if facts.flags.get(INCOMPLETE):
        sentence = "More flags come from where they cannot be read: a wrapper, a variable of a shell or a file."
        return _unknown("flags-incomplete", sentence, weighs=facts.preflight)
    return Finding(code=REJECTED.code, status=Status.FALSE)


def _has_parsed(facts: LaunchFacts, world: World) -> bool:
    """Whether a server's process has been through its argument parser."""
    if world.server.answer is Answer.ACCEPTED:
        return True
    return facts.started_at is not None and world.now - facts.started_at > _PARSED_AFTER


def _fit(flag: str, value: str | int | bool, facts: LaunchFacts) -> Fit:
    return launchrules.fit(flag, value, facts.release)


def _faults(facts: LaunchFacts, notes: LaunchNotes) -> Iterable[_Fault]:
    release = facts.release
    for problem in notes.problems:
        if problem.token == "odd-value":  # noqa: S105 - no secret
            if launchrules.has_choices(problem.flag, release):
                sentence = f"{problem.flag} has a value that is no name of a choice."
                remedy = _choices(problem.flag, release)
                yield _Fault(reason="invalid-choice", sentence=sentence, says=problem.says, remedy=remedy)
            continue
        sentence = _MESSAGES[problem.token].format(flag=problem.flag)
        if problem.flag == "--":
            sentence = "A bare -- stands among the flags, which SGLang's parser refuses with all that follows."
        remedy = f"Write it as {problem.flag}." if problem.token == "unrecognized-flag" else None  # noqa: S105 - no secret
        yield _Fault(reason=problem.token, sentence=sentence, says=problem.says, remedy=remedy)
    if notes.form == LaunchForm.OTHER:
        return  # another program reads these first
    if notes.config is not None and launchrules.fit("--config", True, release) is Fit.NO_FLAG:
        yield _no_flag("--config", release)
    for flag, field, value in notes.given:
        if field != FA_IMPL_VER:
            yield from _of_flag(flag, value, facts)
    yield from _ambiguous(notes, release)
    yield from _conflicts(facts)
    for flag in notes.from_config:
        if launchrules.refused_in_file(flag, release):
            key = flag.removeprefix("--")
            yield _Fault(
                reason="config-key-refused",
                sentence=f"SGLang {release} does not take {key} from a configuration file: it is deprecated.",
                says=f"ValueError: Unsupported config option '{key.replace('-', '_')}' with action ...",
                remedy=f"Take {key} out of the file, and give {flag} on the command line.",
            )
    if notes.config == "ignored":
        yield _Fault(
            reason="config-ignored",
            sentence="SGLang reads a configuration file only behind the word --config; it drops --config=FILE.",
            says=None,
            remedy="Write `--config FILE`, as two words.",
            sure=False,
        )
    commanded = notes.form in {LaunchForm.MODULE, LaunchForm.CONSOLE_SCRIPT}
    if facts.preflight and commanded and not notes.has_model and not facts.flags.get(INCOMPLETE):
        yield _no_model(notes)


def _of_flag(flag: str, value: str | int | bool, facts: LaunchFacts) -> Iterable[_Fault]:
    release = facts.release
    match _fit(flag, value, facts):
        case Fit.NO_FLAG:
            yield _no_flag(flag, release)
        case Fit.REFUSED:
            yield _Fault(
                reason="invalid-choice",
                sentence=f"SGLang {release} does not take {value} for {flag}.",
                says=f"error: argument {flag}: invalid choice: '{value}'",
                remedy=_choices(flag, release),
            )
        case Fit.UNLISTED:
            yield _Fault(
                reason="unknown-choice",
                sentence=f"No release up to {launchrules.RELEASES[-1]} takes {value} for {flag}; unless a plugin or a"
                " newer release adds it, SGLang ends with its argument parser's error.",
                says=f"error: argument {flag}: invalid choice: '{value}'",
                remedy=_choices(flag, release),
                sure=False,
            )
        case _:
            return


def _ambiguous(notes: LaunchNotes, release: str | None) -> Iterable[_Fault]:
    words = [word for word, _ in notes.abbreviated]
    for word in dict.fromkeys([*words, *notes.passed_over]):
        found = launchrules.ambiguity(word, release)
        if found is not None:
            listed = ", ".join(found.flags)
            some = listed if len(found.flags) <= _SHOWN else ", ".join(found.flags[:_SHOWN]) + " and others"
            yield _Fault(
                reason="ambiguous-flag",
                sentence=f"{word} is short for several flags of SGLang {release}: {some}.",
                says=f"error: ambiguous option: {word} could match ...",
                remedy=f"Write out the flag that {word} is to be.",
                sure=found.sure,
            )


def _no_flag(flag: str, release: str | None) -> _Fault:
    return _Fault(
        reason="unrecognized-flag",
        sentence=f"SGLang {release} does not have {flag}, which came with a later release.",
        says=f"error: unrecognized arguments: {flag}",
        remedy=f"Leave {flag} out, or install a release of SGLang that has it.",
    )


def _choices(flag: str, release: str | None) -> str | None:
    nearest = launchrules.nearest(release)
    found = None if nearest is None else launchrules.choices(flag, nearest)
    return f"Give {flag} one of: {', '.join(sorted(found))}." if found else None


def _conflicts(facts: LaunchFacts) -> Iterable[_Fault]:
    """What the release's own checks refuse although its parser takes it, where no GPU is needed to know."""
    flags, release = facts.flags, facts.release
    for field, flag, least, says in (
        ("base_gpu_id", "--base-gpu-id", 0, "AssertionError: base_gpu_id must be non-negative"),
        ("gpu_id_step", "--gpu-id-step", 1, "AssertionError: gpu_id_step must be positive"),
    ):
        value = flags.get(field)
        if isinstance(value, int) and value < least and launchrules.at_least(release, launchrules.RELEASES[0]):
            yield _Fault(reason="value-out-of-range", sentence=f"{flag} is less than {least}.", says=says)
    ranks = flags.get("tp_size")
    if isinstance(ranks, int) and ranks < 0 and launchrules.nearest(release) is not None:
        yield _Fault(
            reason="value-out-of-range",
            sentence="--tp-size is negative, so that no scheduler is started.",
            says="IndexError: list index out of range",
            sure=launchrules.nearest(release) == "0.5.16",  # seen there
        )
    rounds = flags.get("mamba_cache_philox_rounds")
    if isinstance(rounds, int) and rounds < 0 and launchrules.at_least(release, "0.5.15"):
        yield _Fault(
            reason="flag-conflict",
            sentence="--mamba-cache-philox-rounds is negative.",
            says="ValueError: --mamba-cache-philox-rounds must be non-negative.",
        )
    if flags.get("linear_attn_decode_backend") == "flashkda" and launchrules.at_least(release, "0.5.15"):
        yield _Fault(
            reason="flag-conflict",
            sentence="flashkda is for prefill only and is given as --linear-attn-decode-backend.",
            says="ValueError: --linear-attn-decode-backend flashkda is not supported: FlashKDA is prefill-only.",
            remedy="Use --linear-attn-prefill-backend flashkda; decoding stays with triton.",
        )


def _no_model(notes: LaunchNotes) -> _Fault:
    says = "error: the following arguments are required: --model-path/--model"
    if notes.form == LaunchForm.CONSOLE_SCRIPT:
        says = "Exception: Error: --model-path is required. Please provide the path to the model."
    return _Fault(
        reason="missing-model",
        sentence="The command names no model.",
        says=says,
        remedy="Add --model-path; to have flags judged alone, give them without a command.",
    )


# -- what is shown ----------------------------------------------------------------------------------


class PreflightSection(Struct, frozen=True, kw_only=True):
    """A launch that is considered, as it was read. null: no launch is considered.

    ``form`` is module, console-script, flags or other. ``release`` is the SGLang that would read the flags.
    ``understood`` holds the flags that were judged, ``passed_over`` names those that were not, the first hundred;
    ``passed_over_count`` counts them all. ``config`` is what became of the file of ``--config``: read, ignored, the
    token of a reason, or null where none is named. ``complete`` is false where more flags come from elsewhere.
    """

    form: str
    release: str | None
    understood: Mapping[str, str | int | bool]
    passed_over: tuple[str, ...]
    passed_over_count: int
    config: str | None
    complete: bool


def report(facts: LaunchFacts) -> Mapping[str, PreflightSection]:
    """Give the report's ``preflight`` key, for a launch that is considered."""
    notes = facts.notes
    if not facts.preflight or notes is None:
        return {}
    return {
        "preflight": PreflightSection(
            form=notes.form,
            release=facts.release,
            understood={flag: value for flag, _, value in notes.given},
            passed_over=notes.passed_over,
            passed_over_count=notes.passed_over_count,
            config=notes.config,
            complete=not facts.flags.get(INCOMPLETE),
        )
    }


PROBE: Probe[LaunchFacts] = Probe(
    name="launch",
    title="Whether the launch gets to SGLang, and SGLang takes its flags",
    interval=60,
    deadline=10,
    collect=collect,
    judge=judge,
    samples=lambda _facts: (),
    families=(),
    conditions=(*starting.CONDITIONS, REJECTED),
    report=report,
    sections={"preflight": PreflightSection},
)
