"""The parts of the page below the verdict: what is known of the driver, the packages, the server, and what changed.

Each takes the report and gives HTML, or nothing where the report has nothing for it. What probes report beyond what is
laid out here is shown as it is, so that a new probe appears by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from sidecar.page.html import (
    NOTHING,
    Child,
    Markup,
    cell,
    el,
    fold,
    head_cell,
    joined,
    known,
    lasting,
    number,
    pairs,
    section,
    table,
    time,
)
from sidecar.report import Report, facts

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI: Final = 1024
_HISTORY_SHOWN: Final = 20
"""Transitions that are shown at once; the others are folded."""
_OUTCOME_TONES: Final = {
    "ok": "ok",
    "pending": "unknown",
    "skipped": "",
    "unavailable": "warning",
    "timeout": "warning",
    "crashed": "warning",
}
_FLASHINFER: Final = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
_DEPTH: Final = 4
"""Levels of what a probe reports that are laid out; what is deeper is in /report."""


def _in_short(report: Mapping[str, Any]) -> Markup:
    shown = [(name, value) for name, value in facts(report) if value != "not applicable"]
    tiles = [el("div", el("dt", name), el("dd", _fact(value))) for name, value in shown]
    return section("short", "In short", el("dl", tiles, cls="tiles"))


def _fact(value: str) -> Markup:
    return el("span", value, cls="nil") if value.startswith("unknown") else joined(value)


# -- driver and GPUs ----------------------------------------------------------------------------------


def _driver(report: Mapping[str, Any]) -> Markup:
    driver = report.get("driver") or {}
    rows: list[tuple[str, Child]] = []
    if driver:
        code = driver["return_code"]
        answer = f"answers {code}" + (f": {driver['error']}" if driver["error"] else "") if code else "answers"
        flavour = f" ({driver['kernel_module']})" if driver["kernel_module"] else ""
        rows = [
            ("NVML", el("span", answer, cls="tone critical") if code else answer),
            ("Driver", known(driver["driver_version"])),
            ("Kernel module", _with(driver["kernel_module_version"], flavour)),
            ("NVML library", _with(driver["library_version"] or driver["nvml_version"], "", driver["library"])),
            ("CUDA of the driver", known(driver["cuda_driver_version"])),
            ("CUDA of torch", known((report.get("cuda") or {}).get("torch_cuda"))),
            ("GPUs on the node", known(driver["gpus_on_node"])),
            ("GPUs of the server", _gpu_set(report)),
        ]
        if driver["xids"]:
            rows.append(("Xid errors", [_xid(one) for one in driver["xids"]]))
        elif not driver["xids_watched"]:
            rows.append(("Xid errors", "cannot be watched from here"))
    return section("driver", "Driver and GPUs", pairs(rows) if rows else NOTHING, _gpus(report))


def _with(value: Any, note: str, path: str | None = None) -> Markup:
    if value is None:
        return known(None)
    return joined([str(value), note, [" ", el("span", path, cls="soft")] if path else None])


def _gpu_set(report: Mapping[str, Any]) -> Child:
    found = report.get("gpu_set")
    if not found:
        return known(None)
    names = ", ".join(one["gpu"] or one["uuid"] or one["given"] for one in found["gpus"])
    expected = None if found["expected"] is None else f"{found['expected']} expected"
    said = "; ".join(part for part in (names, expected) if part) if found["known"] else expected
    return [known(said), " ", el("span", found["why"], cls="soft")]


def _xid(one: Mapping[str, Any]) -> Markup:
    times = f", {one['count']} times" if one["count"] > 1 else ""
    return el(
        "div",
        f"{one['xid']} on GPU {one['gpu']}{times}: {one['meaning']} ",
        el("span", "last ", time(one["last"]), cls="soft"),
    )


def _gpus(report: Mapping[str, Any]) -> Markup:
    troubles: dict[str, list[str]] = {}
    for condition in report["conditions"]:
        if condition["active"] or (condition["consequence_of"] and condition["status"] == "true"):
            for gpu in condition["gpus"]:
                troubles.setdefault(gpu["gpu"], []).append(condition["code"])
    return table(
        "GPUs",
        ("GPU", "name", "answers", "server's", "#memory", "#temperature", "#power", "#utilization", "conditions"),
        [
            (
                head_cell("GPU ", known(gpu.get("gpu"))),
                cell(known(gpu.get("name")), el("div", gpu.get("uuid"), cls="soft"), cls="nowrap"),
                _answers(gpu),
                cell({True: "yes", False: "no"}.get(gpu.get("in_scope"), known(None))),
                number(_memory(gpu)),
                number(_measure(gpu.get("temperature_celsius"), " \N{DEGREE SIGN}C")),
                number(_measure(gpu.get("power_watts"), " W")),
                number(_share(gpu.get("utilization_ratio"))),
                cell(", ".join(troubles.get(str(gpu.get("gpu")), ())), cls="tone critical"),
            )
            for gpu in report.get("gpus") or ()
        ],
    )


def _answers(gpu: Mapping[str, Any]) -> Markup:
    """Whether a GPU answers NVML, with NVML's code where it does not."""
    if gpu.get("up") is None:
        return cell(known(None))
    return cell("yes", cls="tone ok") if gpu["up"] else cell(f"no ({gpu.get('return_code')})", cls="tone critical")


def _memory(gpu: Mapping[str, Any]) -> str | None:
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    return None if used is None and total is None else f"{_size(used)} / {_size(total)}"


def _size(value: Any) -> str:
    """Bytes in the largest unit that leaves at least 1; a question mark where the source did not say."""
    if not isinstance(value, (int, float)):
        return "?"
    amount, unit = float(value), 0
    while amount >= _KIBI and unit < len(_UNITS) - 1:
        amount, unit = amount / _KIBI, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{amount:.0f} B"


def _measure(value: Any, unit: str) -> str | None:
    return f"{value:.0f}{unit}" if isinstance(value, (int, float)) else None


def _share(value: Any) -> str | None:
    return f"{value:.0%}" if isinstance(value, (int, float)) else None


# -- FlashInfer and the other modules -----------------------------------------------------------------


def _flashinfer(report: Mapping[str, Any]) -> Markup:
    modules = report.get("modules")
    if not modules:
        return NOTHING
    environment = report["environment"]
    server = report.get("server") or {}
    asked = (server.get("launch") or {}).get("mamba_backend")
    backend = known(server.get("mamba_backend") or (f"{asked}, by its flags" if asked else None))
    rows: list[tuple[str, Child]] = [("Mamba backend of the server", backend)]
    for name in _FLASHINFER:
        wanted = _required(report, name)
        note = f" (SGLang wants {wanted})" if wanted else ""
        if name in environment:
            rows.append((name, [environment[name]["value"], el("span", note, cls="soft")]))
        elif wanted:
            rows.append((name, ["not installed", el("span", note, cls="soft")]))
    return section(
        "flashinfer",
        "FlashInfer and kernels",
        pairs(rows),
        table(
            "Modules",
            ("module", "importable", "how we know", "version", "#import took", "note"),
            [_module(name, module) for name, module in modules.items()],
        ),
    )


def _required(report: Mapping[str, Any], package: str) -> str | None:
    return next((one["required"] for one in report.get("requirements") or () if one["package"] == package), None)


def _module(name: str, module: Mapping[str, Any]) -> Sequence[Markup]:
    importable = module.get("importable")
    word = known(None) if importable is None else "yes" if importable else "no"
    tone = None if importable is None else "tone ok" if importable else "tone critical"
    how = "by a real import" if module.get("verified") else "by reading its files"
    notes = [part for part in (module.get("code"), module.get("reason"), module.get("why")) if part]
    seconds = module.get("seconds")
    return (
        head_cell(el("code", name)),
        cell(word, cls=tone),
        cell("" if importable is None else how),
        cell(module.get("version")),
        number(f"{seconds:.1f} s" if isinstance(seconds, (int, float)) else None),
        cell(", ".join(map(str, notes))),
    )


# -- attention ----------------------------------------------------------------------------------------


def _attention(report: Mapping[str, Any]) -> Markup:
    phases = report.get("attention")
    if not isinstance(phases, Mapping) or not phases:
        return NOTHING
    flash = report.get("flash_attention") or {}
    return section(
        "attention",
        "Attention, phase by phase",
        table(
            "Attention by phase",
            ("phase", "runs", "declared by flags", "resolved by the server", "loaded in its processes", "installed"),
            [_phase(name, phase or {}) for name, phase in phases.items()],
        ),
        fold(
            "FlashAttention versions in this environment",
            table(
                "FlashAttention versions",
                ("version", "installed", "importable", "module", "from", "missing"),
                [
                    (
                        head_cell(number_),
                        cell(_yes(one.get("installed"))),
                        cell(_yes(one.get("importable"))),
                        cell(el("code", one["module"]) if one.get("module") else "not in this release"),
                        cell(f"{one.get('distribution') or ''} {one.get('distribution_version') or ''}".strip()),
                        cell(", ".join(one.get("missing") or ())),
                    )
                    for number_, one in flash.items()
                ],
            ),
        )
        if flash
        else None,
    )


def _phase(name: str, phase: Mapping[str, Any]) -> Sequence[Markup]:
    state = phase.get("state")
    if state == "not-applicable":
        return (head_cell(name), cell("this server has no such phase", cls="soft", colspan=5))
    version = phase.get("version")
    runs: Child = known(None)
    if version is not None:
        runs = f"FlashAttention {version}" if version else "no FlashAttention"
    elif isinstance(state, str) and state not in {"", "known", "unknown"}:
        runs = state.replace("-", " ")
    missing = ", ".join(phase.get("missing") or ())
    return (
        head_cell(name),
        cell(runs),
        cell(phase.get("declared") or el("span", "not given", cls="nil")),
        cell(known(phase.get("resolved") or phase.get("predicted"))),
        _compared(phase.get("loaded"), version, "nothing of it yet"),
        _compared(phase.get("installed"), version, f"incomplete, missing {missing}" if missing else "incomplete"),
    )


def _compared(found: Any, version: Any, lacking: str) -> Markup:
    """What is there of the version that a phase runs."""
    if version == 0 and found in (0, None):
        return cell("needs none", cls="soft")
    if found is None:
        return cell(known(None))
    if found == 0:
        return cell(lacking, cls="tone warning")
    return cell(f"FlashAttention {found}")


def _yes(value: Any) -> Child:
    return {True: "yes", False: "no"}.get(value, known(None))


# -- packages and drift -------------------------------------------------------------------------------


def _packages(report: Mapping[str, Any]) -> Markup:
    required = report.get("requirements")
    if not required:
        return NOTHING
    wrong = [one for one in required if one["satisfied"] is False]
    open_ = [one for one in required if one["satisfied"] is None]
    met = [one for one in required if one["satisfied"]]
    tracked = [one for one in met if one["tracked"] and one["source"] == "sglang"]
    rest = [one for one in met if one not in tracked]
    said = f"{len(met)} of {len(required)} requirements are met" + (f", {len(wrong)} are not" if wrong else "")
    said += f", {len(open_)} cannot be told." if open_ else "."
    return section(
        "packages",
        "Packages against SGLang's requirements",
        el("p", said),
        _requirements("Requirements that matter most", [*wrong, *open_, *tracked]),
        fold(f"The other {len(rest)}, which are met", _requirements("Other requirements", rest)) if rest else None,
    )


def _requirements(label: str, several: Iterable[Mapping[str, Any]]) -> Markup:
    words = {True: ("yes", "tone ok"), False: ("no", "tone warning")}
    return table(
        label,
        ("package", "wanted", "installed", "met", "by the metadata of"),
        [
            (
                head_cell(one["package"]),
                cell(one["required"] or "any version"),
                cell(one["installed"] or "not installed"),
                cell(words[one["satisfied"]][0], cls=words[one["satisfied"]][1])
                if one["satisfied"] in words
                else cell(known(None)),
                cell(one["source"], cls="soft"),
            )
            for one in several
        ],
    )


def _drift(report: Mapping[str, Any]) -> Markup:
    environment = report["environment"]
    wanted = (report.get("baseline") or {}).get("items") or {}
    drifts = {one["item"]: one for one in report["drift"] or ()}
    items = sorted({*environment, *wanted}, key=lambda item: (item not in drifts, item))
    if report["drift"] is None:
        said: Child = [
            "No baseline is set. ",
            el("code", "sglang-sidecar baseline write", cls="command"),
            " prints one of what runs now.",
        ]
    elif drifts:
        said = f"{len(drifts)} of {len(wanted)} items of the baseline differ."
    else:
        said = f"All {len(wanted)} items of the baseline are as it wants them."
    return section(
        "drift",
        "Environment, before and now",
        el("p", said),
        table(
            "Environment",
            ("item", "baseline", "now", "differs", "read by"),
            [
                (
                    head_cell(item),
                    cell(el("code", wanted[item]) if item in wanted else el("span", "not in it", cls="nil")),
                    _now(environment.get(item), drifts.get(item)),
                    cell(drifts[item]["deviation"].replace("-", " "), cls="tone warning") if item in drifts else cell(),
                    cell(_source(environment.get(item)), cls="soft"),
                )
                for item in items
            ],
        ),
        _changes(report),
    )


def _now(found: Mapping[str, Any] | None, drift: Mapping[str, Any] | None) -> Markup:
    if found is not None:
        return cell(el("code", found["value"]))
    return cell("absent") if drift is not None and drift["observed"] is None else cell(known(None))


def _source(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['source']}, scope {found['scope']}" if found["scope"] else str(found["source"])


def _changes(report: Mapping[str, Any]) -> Markup:
    return table(
        "Changes that were seen",
        ("when", "item", "before", "after", "kind"),
        [
            (
                head_cell(time(one["at"]), cls="nowrap"),
                cell(one["item"]),
                cell(one["before"] or "absent"),
                cell(one["after"] or "absent"),
                cell(one["kind"]),
            )
            for one in reversed(report["changes"])
        ],
    )


# -- server -------------------------------------------------------------------------------------------


def _server(report: Mapping[str, Any]) -> Markup:
    server = report.get("server")
    if not server:
        return NOTHING
    started = server.get("started_at")
    age = lasting(report["taken_at"] - started) if isinstance(started, (int, float)) else ""
    launch = server.get("launch") or {}
    rows: list[tuple[str, Child]] = [
        ("State", known(server.get("state"))),
        ("Address", known(server.get("url"))),
        ("SGLang", known(server.get("version"))),
        ("Started", [time(started), f", {age} ago" if age else ""] if started else known(None)),
        ("Flags that matter", ", ".join(f"{name}={value}" for name, value in launch.items()) or known(None)),
        ("Interpreter", known(server.get("python"))),
    ]
    if server.get("why"):
        rows.append(("How it was found", server["why"]))
    processes = table(
        "Processes of the server",
        ("#pid", "role", "#resident memory"),
        [
            (
                head_cell(str(one.get("pid")), cls="number"),
                cell(one.get("role"), " (zombie)" if one.get("zombie") else None),
                number(None if one.get("resident") is None else _size(one["resident"])),
            )
            for one in server.get("processes") or ()
        ],
    )
    return section("server", "Server", pairs(rows), fold("Its processes", processes) if processes else None)


# -- history and workings -----------------------------------------------------------------------------


def _history(report: Mapping[str, Any]) -> Markup:
    newest = list(reversed(report["history"]))
    if not newest:
        return NOTHING
    older = newest[_HISTORY_SHOWN:]
    return section(
        "history",
        "History",
        _transitions("Changes of conditions and readiness", newest[:_HISTORY_SHOWN]),
        fold(f"{len(older)} older", _transitions("Older changes of conditions and readiness", older))
        if older
        else None,
    )


def _transitions(label: str, several: Iterable[Mapping[str, Any]]) -> Markup:
    return table(
        label,
        ("when", "what", "from", "to", "reason"),
        [
            (
                head_cell(time(one["at"]), cls="nowrap"),
                cell(one["subject"]),
                cell(one["before"]),
                cell(one["after"]),
                cell(one["reason"]),
            )
            for one in several
        ],
    )


def _workings(report: Mapping[str, Any]) -> Markup:
    standing = report["standing"]
    judged = [one for one in report["conditions"] if not one["active"]]
    return section(
        "workings",
        "The sidecar itself",
        pairs(
            (name.capitalize(), f"{standing[name]}: {standing[f'{name}_why']}") for name in ("placement", "processes")
        ),
        fold("Runs of its probes", _probes(report)),
        fold(
            f"{len(judged)} conditions that are not active",
            table(
                "Conditions that are not active",
                ("condition", "meaning", "holds", "severity", "gate"),
                [
                    (
                        head_cell(el("code", el("a", one["code"], href=f"/docs#{one['code']}"))),
                        cell(one["title"], cls="wide"),
                        cell(_holds(one)),
                        cell(one["severity"]),
                        cell(one["gate"]),
                    )
                    for one in judged
                ],
            ),
        )
        if judged
        else None,
        [
            fold(["Also reported: ", el("code", name)], _anything(report[name], _DEPTH))
            for name in report
            if name not in _LAID_OUT and report[name] is not None
        ],
    )


def _holds(one: Mapping[str, Any]) -> str:
    if not one["relevant"]:
        return "does not concern this server"
    if one["consequence_of"]:
        return f"explained by {one['consequence_of']}"
    return "no" if one["status"] == "false" else f"unknown ({one['reason'] or 'not-judged'})"


def _probes(report: Mapping[str, Any]) -> Markup:
    return table(
        "Probes",
        ("probe", "last run", "detail", "#took", "started"),
        [
            (
                head_cell(name),
                cell(probe["outcome"], cls=f"tone {_OUTCOME_TONES.get(probe['outcome'], 'critical')}"),
                cell(_detail(probe), cls="wide"),
                number("" if probe["duration"] is None else f"{probe['duration'] * 1000:.0f} ms"),
                cell(time(probe["started_at"]), cls="nowrap"),
            )
            for name, probe in report["probes"].items()
        ],
    )


def _detail(probe: Mapping[str, Any]) -> str:
    """What a probe said of its last run, and where it was when it did not return."""
    place = f"at {probe['where']}" if probe["where"] else ""
    stuck = "a child cannot be ended" if probe["stuck"] else ""
    return "; ".join(part for part in (probe["detail"], place, stuck) if part)


def _anything(value: Any, depth: int) -> Child:
    """Lay out what a probe reports, whatever its shape."""
    if isinstance(value, Mapping) and value:
        return pairs((str(key), _anything(item, depth - 1)) for key, item in value.items()) if depth else "..."
    if isinstance(value, list) and value:
        return el("ul", [el("li", _anything(item, depth - 1)) for item in value], cls="plain") if depth else "..."
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in ([], {}) else known(value)


SECTIONS: Final[Sequence[tuple[str, str, Callable[[Mapping[str, Any]], Markup]]]] = (
    ("short", "In short", _in_short),
    ("driver", "Driver and GPUs", _driver),
    ("flashinfer", "FlashInfer", _flashinfer),
    ("attention", "Attention", _attention),
    ("packages", "Packages", _packages),
    ("drift", "Drift", _drift),
    ("server", "Server", _server),
    ("history", "History", _history),
    ("workings", "Sidecar", _workings),
)
"""Every part in its order: its id, what the links at the top call it, and what makes it."""

_LAID_OUT: Final = frozenset(
    {
        *Report.__struct_fields__,
        "driver", "gpus", "gpu_set", "cuda", "modules", "attention", "flash_attention", "requirements", "baseline",
        "server", "preflight",
    }
)  # fmt: skip
"""Keys of the report that some part shows in its own way."""
