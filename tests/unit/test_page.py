"""The page for people."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from sidecar.model import Outcome, Scope, Status, Transition
from sidecar.page import render
from sidecar.report import build
from tests.samples import NOW, DriverSection, Facts, GpuSection, catalog, condition, snapshot

_VOID = {"meta", "link", "br", "hr", "img", "input"}
_EVIL = "</pre><script>alert(1)</script>\" onload='x' & <img src=//evil>"
GPU = GpuSection(
    gpu="0",
    uuid="GPU-a",
    name="NVIDIA H200",
    memory_used_bytes=2**33,
    memory_total_bytes=2**37,
    temperature_celsius=41,
)
DRIVER = Facts(report={"driver": DriverSection(driver_version="580.82", return_code=0), "gpus": (GPU,)})
LOST = condition("gpu-lost", Status.TRUE, evidence=("NVML 15",), gpus=(("0", "GPU-a"),))


class _Page(HTMLParser):
    """Collects what a browser would build: elements, attributes, visible text, and tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.unbalanced += self._open

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data) -> None:
        if self._open and self._open[-1] != "style":
            self.text.append(data)


def page(given):
    """Give the parsed page of a snapshot."""
    return _Page(render(build(given, catalog())))


def test_verdict_comes_first_and_says_whether_the_pod_is_ready() -> None:
    """The first heading is the headline, followed by readiness and what gates it."""
    found = page(snapshot(LOST, facts={"driver": DRIVER}, blockers=("gpu-lost",)))
    at = found.text.index("gpu-lost: message of gpu-lost")
    assert found.tags.index("h1") < found.tags.index("h2")
    assert found.text[at + 1] == "Not ready: gated by gpu-lost."


def test_cause_carries_its_three_texts_evidence_and_consequences() -> None:
    """A cause can be acted on from the page alone."""
    suppressed = condition("driver-hung", Status.TRUE, consequence_of="gpu-lost")
    text = page(snapshot(LOST, suppressed)).text
    for expected in ("some-reason", "message of gpu-lost", "remedy of gpu-lost", "NVML 15", "GPUs: 0 (GPU-a)"):
        assert expected in text
    assert text[text.index("Also explained by this: ") + 1] == "driver-hung"


def test_remedy_stands_in_pre_so_that_a_command_can_be_copied() -> None:
    """Line breaks of a remedy survive."""
    html = render(build(snapshot(condition("gpu-lost", Status.TRUE, remedy="one\ntwo")), catalog()))
    assert "<pre>one\ntwo</pre>" in html


@pytest.mark.parametrize("pending", [True, False])
def test_page_of_nothing_known_is_complete(pending) -> None:
    """Before any fact the page is well formed and says unknown."""
    found = page(snapshot(pending=pending, outcomes=dict.fromkeys(catalog().by_name, Outcome.PENDING)))
    assert found.unbalanced == []
    assert found.text.count("unknown") >= 4
    assert ("Not ready: the first driver round has not ended." in found.text) is pending


def test_everything_from_outside_is_escaped() -> None:
    """No text of a message, fact, path or reason becomes markup."""
    evil = Facts(
        identity={_EVIL: _EVIL},
        report={
            "modules": {"flashinfer.mamba": {"importable": None}},
            "gpus": ({"gpu": _EVIL, "uuid": _EVIL, "name": _EVIL, "memory_used_bytes": _EVIL},),
            "server": {"up": True, "version": _EVIL},
            "attention": {_EVIL: {"resolved": _EVIL, "state": _EVIL}},
        },
        scope=Scope.SERVER,
    )
    texts = {"reason": _EVIL, "message": _EVIL, "remedy": _EVIL, "evidence": (_EVIL,), "gpus": ((_EVIL, _EVIL),)}
    found = page(
        snapshot(
            condition("gpu-lost", Status.TRUE, **texts),
            condition("driver-hung", Status.UNKNOWN, **texts),
            facts=dict.fromkeys(catalog().by_name, evil),
            history=(Transition(at=NOW, subject=_EVIL, before=_EVIL, after=_EVIL, reason=_EVIL),),
        )
    )
    assert "script" not in found.tags
    assert "img" not in found.tags
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert found.text.count(_EVIL) >= 15
    assert found.unbalanced == []


def test_page_fetches_and_runs_nothing() -> None:
    """The page works offline and without JavaScript: no script, and every reference is local or inline data."""
    found = page(snapshot(LOST, facts={"driver": DRIVER}))
    references = {value for name, value in found.attributes if name in ("href", "src")}
    assert "script" not in found.tags
    assert references == {"data:,", "/metrics", "/report", "/readyz?verbose"}


def test_gpu_row_shows_known_values_and_leaves_unknown_ones_empty() -> None:
    """A measure the driver did not give is an empty cell, not a zero."""
    html = render(build(snapshot(facts={"driver": DRIVER}), catalog()))
    assert '<td class="number">8.0 GiB / 128.0 GiB</td><td class="number">41\N{DEGREE SIGN}C</td>' in html
    assert '41\N{DEGREE SIGN}C</td><td class="number"></td><td class="number"></td></tr>' in html


def test_gpu_that_does_not_answer_shows_nvml_s_code() -> None:
    """A lost GPU stays in the table, marked, instead of vanishing from it."""
    lost = GpuSection(gpu="3", uuid="GPU-d", name=None, up=False, return_code=15)
    html = render(build(snapshot(facts={"driver": Facts(report={"gpus": (GPU, lost)})}), catalog()))
    assert '<td class="tone ok">yes</td>' in html
    assert '<td class="tone critical">no (15)</td>' in html


def test_history_is_newest_first() -> None:
    """The latest change is at the top of the history."""
    history = tuple(Transition(at=NOW + step, subject=f"step-{step}", before="a", after="b") for step in range(2))
    text = page(snapshot(history=history)).text
    assert text.index("step-1") < text.index("step-0")


def test_failed_probe_shows_where_it_was() -> None:
    """A probe that timed out is marked as such."""
    text = page(snapshot(outcomes={"driver": Outcome.TIMEOUT})).text
    assert "timeout" in text
