"""The page for people: one HTML document without scripts or external resources, rendered from the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from sidecar.model import Status
from sidecar.report import causes, consequences, facts, gpu_names, headline, unknowns, when

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5b6675; --line: #dde2e9;
  --code: #eef1f5; --ok: #1a7f42; --warning: #9a6200; --critical: #b3261e; --unknown: #6b4fa0; --info: #2467a6; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161c; --card: #1a2028; --ink: #e4e9f0; --soft: #98a3b3;
  --line: #2d3540; --code: #232b35; --ok: #4cc27a; --warning: #e3b04b; --critical: #ff8a80; --unknown: #b9a2ec;
  --info: #7db8f0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 48px; }
header.top { display: flex; flex-wrap: wrap; gap: 4px 20px; align-items: baseline; justify-content: space-between;
  color: var(--soft); font-size: 13px; margin-bottom: 12px; }
header.top b { color: var(--ink); font-size: 16px; }
h2 { font-size: 13px; letter-spacing: .06em; text-transform: uppercase; color: var(--soft); margin: 32px 0 10px; }
.card, .verdict { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 18px;
  margin-bottom: 12px; overflow-wrap: anywhere; }
.verdict, .cause { border-left: 6px solid var(--tone, var(--line)); }
.verdict h1 { font-size: 20px; line-height: 1.35; margin: 0 0 4px; }
.verdict p, .cause p { margin: 4px 0; }
.word { color: var(--tone); font-weight: 700; text-transform: uppercase; letter-spacing: .04em; font-size: 13px; }
.cause h3 { font-size: 16px; margin: 0 0 4px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.tag { display: inline-block; border: 1px solid var(--line); border-radius: 10px; padding: 0 8px; font-size: 12px;
  color: var(--soft); margin-left: 6px; font-family: system-ui, "DejaVu Sans", sans-serif; font-weight: 400; }
.tag.gates { color: var(--critical); border-color: currentColor; }
.soft { color: var(--soft); font-size: 13px; }
pre { background: var(--code); border-radius: 6px; padding: 10px 12px; margin: 8px 0 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
ul { margin: 6px 0; padding-left: 20px; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 12px; margin: 0; }
dl.tiles > div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  overflow-wrap: anywhere; }
dl.tiles dt { color: var(--soft); font-size: 12px; }
dl.tiles dd { margin: 2px 0 0; font-weight: 600; }
dl.tiles dd.unknown { color: var(--unknown); font-weight: 400; font-style: italic; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; font-size: 12px; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.nowrap { white-space: nowrap; }
.ok { --tone: var(--ok); } .warning { --tone: var(--warning); } .critical { --tone: var(--critical); }
.unknown { --tone: var(--unknown); } .info { --tone: var(--info); }
td.tone { color: var(--tone); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); margin: 24px 0 10px; }
a { color: var(--info); }
@media (max-width: 600px) { main { padding: 14px 12px 32px; } .verdict h1 { font-size: 17px; }
  th, td { padding: 6px 9px; } dl.tiles { grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 8px; } }
""".strip()

_OUTCOME_TONES = {"ok": "ok", "pending": "unknown", "skipped": "", "timeout": "warning", "crashed": "warning"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI = 1024


def render(report: Mapping[str, Any]) -> str:
    """Give the whole page. Every value of the report is escaped; nothing on the page runs or is fetched."""
    level = report["verdict"]["level"]
    parts = [
        _verdict(report),
        *(_cause(report, cause) for cause in causes(report)),
        _unknowns(report),
        _facts(report),
        _gpus(report),
        _versions(report),
        _probes(report),
        _history(report),
        _judged(report),
        _standing(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(level)} - sglang-sidecar</title>\n"
        f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n'
        f"{_top(report)}\n" + "\n".join(part for part in parts if part) + "\n</main>\n</body>\n</html>\n"
    )


def _top(report: Mapping[str, Any]) -> str:
    taken = escape(when(report["taken_at"]))
    links = " ".join(f'<a href="{path}">{path}</a>' for path in ("/metrics", "/report", "/readyz?verbose"))
    return (
        f'<header class="top"><b>sglang-sidecar {escape(report["version"])}</b>'
        f"<span>as of {taken}</span><span>{links}</span></header>"
    )


def _verdict(report: Mapping[str, Any]) -> str:
    verdict = report["verdict"]
    level = verdict["level"]
    sentence = headline(report).removeprefix(f"{level}: ")
    if verdict["pending"]:
        readiness = "Not ready: the first driver round has not ended."
    elif verdict["ready"]:
        readiness = "Ready: nothing gates this pod."
    else:
        readiness = f"Not ready: gated by {', '.join(verdict['blockers'])}."
    return (
        f'<section class="verdict {escape(level)}"><span class="word">{escape(level)}</span>'
        f"<h1>{escape(sentence)}</h1><p>{escape(readiness)}</p></section>"
    )


def _cause(report: Mapping[str, Any], cause: Mapping[str, Any]) -> str:
    code = cause["code"]
    tags = f'<span class="tag">{escape(cause["reason"])}</span>' if cause["reason"] else ""
    if cause["blocking"]:
        tags += '<span class="tag gates">gates readiness</span>'
    parts = [
        f'<article class="card cause {escape(cause["severity"])}" id="{escape(code)}">',
        f'<span class="word">{escape(cause["severity"])}</span>',
        f"<h3>{escape(code)}{tags}</h3>",
        f"<p>{escape(cause['message'] or cause['title'])}</p>",
    ]
    if cause["gpus"]:
        parts.append(f'<p class="soft">GPUs: {escape(gpu_names(cause))}</p>')
    if cause["evidence"]:
        parts.append(_list(f"<code>{escape(item)}</code>" for item in cause["evidence"]))
    parts.append(f'<p class="soft">What to do</p><pre>{escape(cause["remedy"])}</pre>')
    explained = [one["code"] for one in consequences(report, code) if one["status"] != Status.FALSE]
    if explained:
        codes = ", ".join(f"<code>{escape(one)}</code>" for one in explained)
        parts.append(f'<p class="soft">Also explained by this: {codes}</p>')
    parts.append(f'<p class="soft">since {escape(when(cause["since"]))}</p></article>')
    return "".join(parts)


def _unknowns(report: Mapping[str, Any]) -> str:
    return _table(
        "Could not be judged",
        ("probe", "reason", "why", "conditions"),
        [
            (
                _cell(group.probe, "nowrap"),
                _cell(group.reason, "tone unknown"),
                _cell(group.message or "no reason was given"),
                _cell(", ".join(group.codes), "soft"),
            )
            for group in unknowns(report)
        ],
    )


def _facts(report: Mapping[str, Any]) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt>"
        f"<dd{' class=unknown' if value.startswith('unknown') else ''}>{escape(value)}</dd></div>"
        for name, value in facts(report)
    )
    return f'<h2>In short</h2><dl class="tiles">{tiles}</dl>'


def _gpus(report: Mapping[str, Any]) -> str:
    gpus = report.get("gpus") or ()
    return _table(
        "GPUs",
        ("", "name", "uuid", "answers", "#memory", "#temperature", "#power", "#utilization"),
        [
            (
                _cell(gpu.get("gpu")),
                _cell(gpu.get("name"), "nowrap"),
                _cell(gpu.get("uuid"), "soft"),
                _answers(gpu),
                _cell(_memory(gpu), "number"),
                _cell(_measure(gpu.get("temperature_celsius"), "\N{DEGREE SIGN}C"), "number"),
                _cell(_measure(gpu.get("power_watts"), " W"), "number"),
                _cell(_share(gpu.get("utilization_ratio")), "number"),
            )
            for gpu in gpus
        ],
    )


def _versions(report: Mapping[str, Any]) -> str:
    return _table(
        "Environment",
        ("item", "value", "read by", "scope"),
        [
            (
                _cell(name, "nowrap"),
                f"<td><code>{escape(str(item['value']))}</code></td>",
                _cell(item["source"]),
                _cell(item["scope"]),
            )
            for name, item in report["environment"].items()
        ],
    )


def _probes(report: Mapping[str, Any]) -> str:
    return _table(
        "Probes",
        ("probe", "last run", "detail", "#took", "started"),
        [
            (
                _cell(name, "nowrap"),
                _cell(probe["outcome"], f"tone {_OUTCOME_TONES.get(probe['outcome'], 'critical')}"),
                _cell(_detail(probe)),
                _cell("" if probe["duration"] is None else f"{probe['duration'] * 1000:.0f} ms", "number"),
                _cell(when(probe["started_at"]), "nowrap"),
            )
            for name, probe in report["probes"].items()
        ],
    )


def _history(report: Mapping[str, Any]) -> str:
    return _table(
        "History",
        ("when", "what", "from", "to", "reason"),
        [
            (
                _cell(when(one["at"]), "nowrap"),
                _cell(one["subject"]),
                _cell(one["before"]),
                _cell(one["after"]),
                _cell(one["reason"]),
            )
            for one in reversed(report["history"])
        ],
    )


def _judged(report: Mapping[str, Any]) -> str:
    rows = [
        (
            f"<td><code>{escape(one['code'])}</code></td>",
            _cell(one["title"]),
            _cell("irrelevant" if not one["relevant"] else "explained" if one["consequence_of"] else one["status"]),
            _cell(one["severity"]),
            _cell(one["gate"]),
        )
        for one in report["conditions"]
        if not one["active"]
    ]
    table = _table("", ("code", "meaning", "holds", "severity", "gate"), rows)
    return f"<details><summary>{len(rows)} conditions that are not active</summary>{table}</details>" if rows else ""


def _standing(report: Mapping[str, Any]) -> str:
    standing = report["standing"]
    rows = [(_cell(name), _cell(standing[name]), _cell(standing[f"{name}_why"])) for name in ("placement", "processes")]
    return _table("Where the sidecar stands", ("", "", "because"), rows)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a table of ready-made cells; nothing when it would be empty. A ``#`` marks a column of numbers."""
    if not rows:
        return ""
    head = "".join(
        f'<th class="number">{escape(name[1:])}</th>' if name.startswith("#") else f"<th>{escape(name)}</th>"
        for name in header
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f'{heading}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object, kind: str = "") -> str:
    """Make a table cell; empty where the source did not say."""
    shown = "" if value is None else escape(str(value))
    return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _detail(probe: Mapping[str, Any]) -> str:
    """Give what a probe said of its last run, and where it was when it did not return."""
    place = f"at {probe['where']}" if probe["where"] else ""
    stuck = "a child cannot be ended" if probe["stuck"] else ""
    return "; ".join(part for part in (probe["detail"], place, stuck) if part)


def _answers(gpu: Mapping[str, Any]) -> str:
    """Make the cell that tells whether a GPU answers NVML, with NVML's code where it does not."""
    if gpu.get("up") is None:
        return _cell(None)
    return _cell("yes", "tone ok") if gpu["up"] else _cell(f"no ({gpu.get('return_code')})", "tone critical")


def _memory(gpu: Mapping[str, Any]) -> str | None:
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    if used is None and total is None:
        return None
    return f"{_size(used)} / {_size(total)}"


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
