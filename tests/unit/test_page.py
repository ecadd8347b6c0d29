"""The page for people."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
import structlog
from msgspec.structs import replace

from sidecar import page
from sidecar.catalog import build as build_catalog
from sidecar.catalog import discover
from sidecar.model import (
    Change,
    ChangeKind,
    Demo,
    Deviation,
    Drift,
    Known,
    Outcome,
    Scope,
    Status,
    Transition,
)
from sidecar.page.html import Markup, el, joined, lasting, table, time
from sidecar.report import build
from tests.samples import NOW, Facts, GpuSection, catalog, condition, snapshot

_VOID = {"meta", "link", "br", "hr", "img", "input"}
_EVIL = "</pre></code><script>alert(1)</script>\" onload='x' & <img src=//evil> --> ]]>"
GPU = GpuSection(
    gpu="0",
    uuid="GPU-a",
    name="NVIDIA H200",
    memory_used_bytes=2**33,
    memory_total_bytes=2**37,
    temperature_celsius=41,
)
DRIVER_FACTS = {
    "return_code": 0,
    "failed_call": None,
    "error": None,
    "driver_version": "580.82",
    "kernel_module_version": "580.82",
    "kernel_module": "open",
    "cuda_driver_version": "13.0",
    "nvml_version": "13.580.82",
    "library": "/lib/libnvidia-ml.so.580.82",
    "library_version": "580.82",
    "gpus_on_node": 8,
    "xids_watched": True,
    "xids": (),
}
DRIVER = Facts(report={"driver": DRIVER_FACTS, "gpus": (GPU,)})
LOST = condition("gpu-lost", Status.TRUE, evidence=("NVML 15",), gpus=(("0", "GPU-a"),))


class _Page(HTMLParser):
    """Collects what a browser would build: elements, attributes, visible text, and tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.unbalanced: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.unbalanced += self._open

    @property
    def said(self) -> str:
        """The visible text, on one line."""
        return " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data) -> None:
        if self._open and self._open[-1] not in {"style", "title"}:
            self.text.append(data)


def shown(given, **more):
    """Give the parsed page of a snapshot."""
    return _Page(page.render(build(given, catalog()) | more))


# -- the verdict and its causes -------------------------------------------------------------------------


def test_verdict_comes_first_and_says_whether_the_pod_is_ready() -> None:
    """The first heading is the headline, followed by readiness and what gates it, before any other part."""
    found = shown(snapshot(LOST, facts={"driver": DRIVER}, blockers=("gpu-lost",)))
    at = found.text.index("gpu-lost: message of gpu-lost")
    assert found.tags.index("h1") < found.tags.index("h2")
    assert found.text[at + 1] == "Not ready: gated by gpu-lost."
    assert found.tags.count("h1") == 1
    assert found.tags.index("h1") < found.tags.index("nav")


def test_cause_carries_its_three_texts_evidence_and_consequences() -> None:
    """A cause can be acted on from the page alone; what it explains is folded below it."""
    suppressed = condition("driver-hung", Status.TRUE, consequence_of="gpu-lost")
    html = page.render(build(snapshot(LOST, suppressed), catalog()))
    said = _Page(html).said
    for expected in ("some-reason", "message of gpu-lost", "remedy of gpu-lost", "NVML 15", "GPUs: 0 (GPU-a)"):
        assert expected in said
    folded = html[html.index("<summary>Explains 1 more") :]
    assert "driver-hung" in folded[: folded.index("</details>")]
    assert html.count("message of gpu-lost") == 1, "the headline says it already"


def test_further_causes_follow_with_their_evidence_folded() -> None:
    """The first cause shows its evidence at once, the others on request."""
    hot = condition("thermal-slowdown", Status.TRUE, evidence=("81 degrees",))
    html = page.render(build(snapshot(LOST, hot), catalog()))
    assert '<details open><summary>Why we think so</summary><ul class="plain"><li><code>NVML 15' in html
    assert '<details><summary>Why we think so</summary><ul class="plain"><li><code>81 degrees' in html
    assert '<article class="card warning" id="thermal-slowdown"' in html


def test_a_command_can_be_taken_whole() -> None:
    """A command stands in an element of its own, with nothing else in it; a click selects it."""
    command = "uv pip install 'torch==2.11.0'"
    remedy = f"{command}  # or use another one\nThen see `nvidia-smi -q`."
    html = page.render(build(snapshot(condition("gpu-lost", Status.TRUE, remedy=remedy)), catalog()))
    assert '<pre class="command"><code>uv pip install &#x27;torch==2.11.0&#x27;</code></pre>' in html
    assert "Or use another one" in html
    assert 'Then see <code class="command">nvidia-smi -q</code>.' in html
    assert re.search(r"\.command[^{]*\{[^}]*user-select: all", html)


def test_what_a_gpu_suffers_from_stands_beside_it() -> None:
    """The table of GPUs names the conditions of each, also those that another one explains."""
    explained = condition("driver-hung", Status.TRUE, consequence_of="gpu-lost", gpus=(("0", "GPU-a"),))
    html = page.render(build(snapshot(LOST, explained, facts={"driver": DRIVER}), catalog()))
    assert '<td data-name="conditions" class="tone critical">gpu-lost, driver-hung</td>' in html


@pytest.mark.parametrize("pending", [True, False])
def test_page_of_nothing_known_is_complete(pending) -> None:
    """Before any fact the page is well formed and says unknown."""
    found = shown(snapshot(pending=pending, outcomes=dict.fromkeys(catalog().by_name, Outcome.PENDING)))
    assert found.unbalanced == []
    assert found.text.count("unknown") >= 4
    assert ("Not ready: the first driver round has not ended." in found.text) is pending


def test_unknowns_are_folded_unless_they_are_the_verdict() -> None:
    """What could not be judged is one line, and open where it is all that there is to say."""
    unknown = condition("driver-hung", Status.UNKNOWN, reason="no-gpu", message="No GPU.")
    beside = page.render(build(snapshot(LOST, unknown), catalog()))
    alone = page.render(build(snapshot(unknown), catalog()))
    assert '<details class="block" id="unknown"><summary>1 condition could not be judged' in beside
    assert '<details class="block" id="unknown" open>' in alone


# -- safety ---------------------------------------------------------------------------------------------


def test_everything_from_outside_is_escaped() -> None:
    """No text of a message, fact, path or reason becomes markup."""
    evil = Facts(
        identity={_EVIL: _EVIL},
        report={
            "modules": {_EVIL: {"importable": None, "reason": _EVIL, "version": _EVIL}},
            "gpus": ({"gpu": _EVIL, "uuid": _EVIL, "name": _EVIL, "memory_used_bytes": _EVIL},),
            "driver": DRIVER_FACTS | {"error": _EVIL, "return_code": 12, "library": _EVIL, "driver_version": _EVIL},
            "server": {"up": True, "version": _EVIL, "url": _EVIL, "launch": {_EVIL: _EVIL}, "why": _EVIL},
            "attention": {_EVIL: {"resolved": _EVIL, "state": _EVIL, "missing": [_EVIL]}},
        },
        scope=Scope.SERVER,
    )
    texts = {
        "reason": _EVIL,
        "message": _EVIL,
        "remedy": f"{_EVIL}\nRun: rm -r {_EVIL}  # {_EVIL}\n`{_EVIL}`",
        "evidence": (_EVIL,),
        "gpus": ((_EVIL, _EVIL),),
        "sglang_says": _EVIL,
    }
    given = snapshot(
        condition("gpu-lost", Status.TRUE, **texts),
        condition("driver-hung", Status.UNKNOWN, **texts),
        condition("thermal-slowdown", Status.TRUE, consequence_of="gpu-lost", **texts),
        facts=dict.fromkeys(catalog().by_name, evil),
        history=(Transition(at=NOW, subject=_EVIL, before=_EVIL, after=_EVIL, reason=_EVIL),),
    )
    given = replace(
        given,
        known=Known(recent=(Change(item=_EVIL, kind=ChangeKind.CHANGED, before=_EVIL, after=_EVIL, at=NOW),)),
        demo=Demo(scenario=_EVIL, title=_EVIL, shows=_EVIL),
    )
    more = {
        "requirements": [
            {
                "package": _EVIL,
                "required": _EVIL,
                "installed": _EVIL,
                "satisfied": False,
                "tracked": True,
                "source": _EVIL,
            }
        ],
        "drift": [{"item": _EVIL, "deviation": _EVIL, "expected": _EVIL, "observed": _EVIL}],
        "baseline": {"items": {_EVIL: _EVIL}},
        "flash_attention": {_EVIL: {"module": _EVIL, "distribution": _EVIL, "missing": [_EVIL]}},
        "of a new probe": {_EVIL: [_EVIL, {_EVIL: _EVIL}]},
    }
    report = build(given, catalog()) | more
    for html in (page.render(report), page.live(report, changed=True), page.live(report, changed=False)):
        found = _Page(html)
        assert not {"script", "img", "object", "embed", "form"} & set(found.tags)
        assert not any(name.startswith("on") or name == "style" for name, _ in found.attributes)
        assert found.unbalanced == []
    assert shown(given, **more).said.count("<script>alert(1)</script>") >= 50


def test_page_fetches_and_runs_nothing() -> None:
    """The page works offline and without JavaScript: no script, and every reference is local or inline data."""
    found = shown(snapshot(LOST, facts={"driver": DRIVER}))
    references = {value for name, value in found.attributes if name in ("href", "src") and value}
    assert "script" not in found.tags
    outside = {value for value in references if not value.startswith(("data:", "#"))}
    assert {value.partition("#")[0].partition("=")[0] for value in outside} == {
        "/", "/metrics", "/report", "/readyz?verbose", "/docs", "/?live", "/?refresh",
    }  # fmt: skip


def test_links_within_the_page_lead_somewhere() -> None:
    """Each link to a part names an id that is there, and no id is there twice."""
    for html in (page.render(build(snapshot(LOST, facts={"driver": DRIVER}), catalog())), page.documents(catalog())):
        found = _Page(html)
        targets = {value[1:] for name, value in found.attributes if name == "href" and value and value.startswith("#")}
        assert targets
        assert targets <= set(found.ids)
        assert len(found.ids) == len(set(found.ids))


def test_the_policy_allows_this_style_and_nothing_else() -> None:
    """The style sheet's hash is in the policy; no other style, no script and no foreign frame is allowed."""
    html = page.render(build(snapshot(), catalog()))
    style = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert len(style) == 1
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    for policy in (page.POLICY, page.LIVE_POLICY):
        directives = dict(one.strip().partition(" ")[::2] for one in policy.split(";"))
        assert directives["default-src"] == "'none'"
        assert directives["style-src"] == f"'sha256-{digest}'"
        assert "unsafe" not in policy
        assert "script-src" not in directives
    assert "frame-ancestors 'none'" in page.POLICY
    assert "frame-ancestors 'self'" in page.LIVE_POLICY


# -- parts ----------------------------------------------------------------------------------------------


def test_gpu_row_shows_known_values_and_leaves_unknown_ones_empty() -> None:
    """A measure the driver did not give is an empty cell, not a zero."""
    html = page.render(build(snapshot(facts={"driver": DRIVER}), catalog()))
    assert '<td data-name="memory" class="number">8.0 GiB / 128.0 GiB</td>' in html
    assert '<td data-name="temperature" class="number">41 \N{DEGREE SIGN}C</td>' in html
    assert '<td data-name="power" class="number"></td><td data-name="utilization" class="number"></td>' in html


def test_gpu_that_does_not_answer_shows_nvml_s_code() -> None:
    """A lost GPU stays in the table, marked, instead of vanishing from it."""
    lost = GpuSection(gpu="3", uuid="GPU-d", name=None, up=False, return_code=15)
    html = page.render(build(snapshot(facts={"driver": Facts(report={"gpus": (GPU, lost)})}), catalog()))
    assert '<td data-name="answers" class="tone ok">yes</td>' in html
    assert '<td data-name="answers" class="tone critical">no (15)</td>' in html


def test_driver_that_fails_shows_nvml_s_answer() -> None:
    """What NVML answered is there, with both versions side by side."""
    failed = DRIVER_FACTS | {
        "return_code": 18,
        "error": "mismatch",
        "driver_version": None,
        "library_version": "580.99",
    }
    said = shown(snapshot(facts={"driver": Facts(report={"driver": failed})})).said
    for expected in ("answers 18: mismatch", "Kernel module 580.82 (open)", "NVML library 580.99"):
        assert expected in said


ATTENTION = {
    "prefill": {
        "declared": "fa4", "resolved": "fa4", "predicted": None, "loaded": 0, "installed": 0, "version": 4,
        "state": "flash-attention", "source": "server-info", "missing": ["cutlass"],
    },
    "decode": {
        "declared": None, "resolved": "triton", "predicted": None, "loaded": 0, "installed": None, "version": 0,
        "state": "known", "source": "server-info", "missing": [],
    },
    "draft": {"version": None, "state": "not-applicable"},
    "vision": {"version": None, "state": "unknown"},
}  # fmt: skip


def test_attention_stands_side_by_side() -> None:
    """Per phase: what was declared, resolved, loaded and is installed; what is lacking is marked."""
    html = page.render(build(snapshot(), catalog()) | {"attention": ATTENTION})
    prefill = html[html.index('<th scope="row">prefill</th>') :].partition("</tr>")[0]
    cells = re.findall(r'<td data-name="([^"]*)"[^>]*>(.*?)</td>', prefill)
    assert cells == [
        ("runs", "FlashAttention 4"),
        ("declared by flags", "fa4"),
        ("resolved by the server", "fa4"),
        ("loaded in its processes", "nothing of it yet"),
        ("installed", "incomplete, missing cutlass"),
    ]
    decode = html[html.index('<th scope="row">decode</th>') :].partition("</tr>")[0]
    assert "no FlashAttention" in decode
    assert "not given" in decode
    assert decode.count("needs none") == 2
    assert "this server has no such phase" in html
    vision = html[html.index('<th scope="row">vision</th>') :].partition("</tr>")[0]
    assert vision.count("unknown") == 4


def requirement(package, satisfied, *, tracked=True, source="sglang"):
    return {
        "package": package, "required": "==1", "installed": "2", "satisfied": satisfied, "tracked": tracked,
        "source": source,
    }  # fmt: skip


def test_packages_are_compared_with_the_pins() -> None:
    """What is not met comes first, then what cannot be told; what nobody tracks is folded."""
    required = [
        requirement("met", True),
        requirement("wrong", False),
        requirement("open", None),
        requirement("other", True, tracked=False),
        requirement("met", True, source="flashinfer-python"),
    ]
    html = page.render(build(snapshot(), catalog()) | {"requirements": required})
    assert "3 of 5 requirements are met, 1 are not, 1 cannot be told." in html
    order = [html.index(f'<th scope="row">{name}</th>') for name in ("wrong", "open", "met", "other")]
    assert order == sorted(order)
    assert html.index("<summary>The other 2, which are met") < order[3]


def test_drift_shows_before_and_now() -> None:
    """Items that differ come first, with the baseline's value and the one that is there; absent is said."""
    given = replace(
        snapshot(facts={"packages": Facts(identity={"torch": "2.9", "sglang": "0.5"})}),
        known=Known(recent=(Change(item="torch", kind=ChangeKind.CHANGED, before="2.8", after="2.9", at=NOW),)),
    )
    drifts = [
        {"item": "torch", "deviation": "different", "expected": "2.8", "observed": "2.9"},
        {"item": "triton", "deviation": "missing", "expected": "3.6", "observed": None},
    ]
    wanted = {"items": {"torch": "2.8", "triton": "3.6", "sglang": "0.5"}}
    found = shown(given, drift=drifts, baseline=wanted)
    assert "2 of 3 items of the baseline differ." in found.said
    assert "torch 2.8 2.9 different packages" in found.said
    assert "triton 3.6 absent missing" in found.said
    assert "2025-06-15 15:06:40 UTC torch 2.8 2.9 changed" in found.said
    order = [found.text.index(name, found.text.index("item")) for name in ("torch", "triton", "sglang")]
    assert order == sorted(order)


def test_no_baseline_says_how_to_make_one() -> None:
    """Where nothing is compared the page says so instead of showing that all is well."""
    said = shown(snapshot(facts={"packages": Facts(identity={"torch": "2.9"})})).said
    assert "No baseline is set. sglang-sidecar baseline write prints one of what runs now." in said


def test_history_is_newest_first_and_long_ones_are_folded() -> None:
    """The latest change is at the top, with its time; what is old is there on request."""
    history = tuple(Transition(at=NOW + step, subject=f"step-{step}", before="a", after="b") for step in range(30))
    html = page.render(build(snapshot(history=history), catalog()))
    assert html.index(">step-29<") < html.index(">step-10<") < html.index("<summary>10 older") < html.index(">step-9<")
    assert '<time datetime="2025-06-15T15:07:09Z">2025-06-15 15:07:09 UTC</time>' in html


def test_failed_probe_shows_where_it_was() -> None:
    """A probe that timed out is marked as such."""
    assert "timeout" in shown(snapshot(outcomes={"driver": Outcome.TIMEOUT})).text


def test_what_a_new_probe_reports_appears_by_itself() -> None:
    """A section that the page knows nothing of is laid out as it is."""
    said = shown(snapshot(), fans={"front": {"speed": 0.5, "ok": True}, "rear": None, "seen": [1, 2], "none": []}).said
    assert "Also reported: fans" in said
    assert "front speed 0.5 ok yes rear unknown seen 1 2 none none" in said


def test_a_defect_in_one_part_leaves_the_verdict() -> None:
    """What a probe reports in a shape that nobody expected costs that part of the page, and is logged."""
    with structlog.testing.capture_logs() as logs:
        said = shown(snapshot(LOST), requirements=[{"surprise": 1}]).said
    assert "gpu-lost: message of gpu-lost" in said
    assert "This part cannot be shown: a bug of the sidecar." in said
    assert [(one["log_level"], one["part"]) for one in logs] == [("error", "packages")]


def test_a_demo_says_that_it_is_one_before_anything_else() -> None:
    """Whoever opens the page of a demo cannot miss it; the tab says it, too."""
    given = replace(
        snapshot(), demo=Demo(scenario="gpu-lost", title="A title", shows="A story.", replica=2, replicas=4)
    )
    html = page.render(build(given, catalog()))
    assert html.index("This is a demo: A title (replica 2 of 4).") < html.index("<h1>")
    assert "<title>DEMO ok - sglang-sidecar</title>" in html
    assert "demo" not in page.render(build(snapshot(), catalog())).partition("<body>")[2].lower()


# -- what the reader has before him ---------------------------------------------------------------------


def test_the_page_does_not_move_by_itself() -> None:
    """No element makes a browser fetch it anew; the strip in its frame is what does."""
    report = build(snapshot(LOST), catalog())
    html = page.render(report)
    assert "http-equiv" not in html
    assert f'<iframe src="/?live={page.mark(report)}" title=' in html
    again = page.render(report, refreshing=True)
    assert "<iframe" not in again
    assert '<a href="/">Stop that</a>' in again


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        (snapshot(LOST), False),
        (snapshot(LOST, facts={"driver": DRIVER}, generation=9), False),
        (snapshot(LOST, blockers=("gpu-lost",)), True),
        (snapshot(condition("gpu-lost", Status.TRUE, reason="other")), True),
        (snapshot(LOST, condition("driver-hung", Status.UNKNOWN)), True),
        (snapshot(LOST, condition("thermal-slowdown", Status.TRUE)), True),
        (snapshot(), True),
    ],
)
def test_the_mark_changes_with_the_verdict(given, differs) -> None:
    """Another cause, reason, readiness or unknown is news; another measure is not."""
    assert (page.mark(build(given, catalog())) != page.mark(build(snapshot(LOST), catalog()))) is differs


def test_the_strip_says_whether_the_page_is_still_true() -> None:
    """It names the time, or what has become of the verdict, and has nothing to focus or to click."""
    report = build(snapshot(LOST), catalog())
    same, changed = _Page(page.live(report, changed=False)), _Page(page.live(report, changed=True))
    assert same.said == "Still so at 15:06:40 UTC ."
    assert changed.said == "Changed: now critical, gpu-lost. Reload the page to see it."
    assert _Page(page.live(build(snapshot(), catalog()), changed=True)).said.startswith("Changed: now ok.")
    for one in (same, changed):
        assert not {"a", "button", "input", "details"} & set(one.tags)


# -- documentation --------------------------------------------------------------------------------------


def test_the_documentation_has_every_condition_metric_and_setting() -> None:
    """Each condition has a section that links lead to, with its remedy and every reason."""
    real = build_catalog(discover())
    html = page.documents(real)
    found = _Page(html)
    assert found.unbalanced == []
    assert set(real.conditions) <= set(found.ids)
    for family in real.families:
        assert f"sglang_sidecar_{family.name}" in found.text
    for one in real.conditions.values():
        assert all(token in found.text for token in one.reasons)
    assert "state_dir" in found.text


# -- HTML -----------------------------------------------------------------------------------------------


def test_elements_escape_texts_and_attributes() -> None:
    """Only what was made by `el` is taken as it is."""
    made = el("p", "<b>", el("i", "&"), None, ["x", "<"], cls='"', aria_label="<", hidden=True, title=None, open=False)
    assert made == '<p class="&quot;" aria-label="&lt;" hidden>&lt;b&gt;<i>&amp;</i>x&lt;</p>'
    assert joined(Markup("<b>")) == "<b>"
    assert el("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, ""), (1, "1 s"), (61, "1 min 1 s"), (120, "2 min"), (3700, "1 h 1 min"), (3601, "1 h"), (90000, "1 d 1 h")],
)
def test_lengths_of_time(seconds, expected) -> None:
    """In the largest unit and the next one."""
    assert lasting(seconds) == expected


def test_times_are_for_people_and_machines() -> None:
    """A moment that is none is nothing."""
    assert time(NOW) == '<time datetime="2025-06-15T15:06:40Z">2025-06-15 15:06:40 UTC</time>'
    assert time(NOW, short=True).endswith(">15:06:40 UTC</time>")
    assert time(None) == ""
    assert time(1e300) == ""


def test_a_table_without_rows_is_nothing() -> None:
    """No heading stands above an empty frame."""
    assert table("Empty", ("a",), []) == ""


def test_deviations_of_the_model_are_words_of_the_page() -> None:
    """What differs is said in words."""
    drift = Drift(item="torch", deviation=Deviation.OTHER_BUILD, expected="2.8+cu130", observed="2.8")
    given = {"item": drift.item, "deviation": drift.deviation.value, "expected": drift.expected, "observed": "2.8"}
    found = shown(
        snapshot(facts={"packages": Facts(identity={"torch": "2.8"})}),
        drift=[given],
        baseline={"items": {"torch": "2.8+cu130"}},
    )
    assert "other build" in found.text
