"""The page in a real Chromium, for each scenario of the demo: what people see, on a phone and on a wide screen.

`make test` looks at one scenario, `make test-browser` at all of them; ``--screenshots FOLDER`` keeps the pictures.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Frame, Page, async_playwright

from sidecar import report
from sidecar.app import Agent
from sidecar.catalog import Catalog
from sidecar.config import ImportPolicy, Listen, Settings
from sidecar.demo import SCENARIOS, load
from sidecar.exposition import Exposition
from sidecar.model import Snapshot
from sidecar.page import mark
from sidecar.web import Web, bind

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
THEMES = ("light", "dark")
WIDTHS = (360, 1440)
VIOLATED = "window.violated = []; addEventListener('securitypolicyviolation', e => violated.push(e.violatedDirective));"
FEW = "mamba-missing"
"""The scenario that `make test` looks at, too: it has most parts of the page."""


@dataclass
class Shown:
    """What is served; a test may put another snapshot in its place."""

    snapshot: Snapshot
    catalog: Catalog
    stopping: bool = False
    url: str = ""
    complaints: list[str] = field(default_factory=list)

    def alive(self) -> None:
        return None

    def started(self) -> None:
        return None


@asynccontextmanager
async def serving(name: str) -> AsyncIterator[Shown]:
    """The web side with how a scenario ends; of a fleet, its last replica."""
    settings = Settings(import_policy=ImportPolicy.ALWAYS)
    async with Agent.create(settings, once=True, demo=load(name)[-1]) as agent:
        shown = Shown(await agent.check(), agent.catalog)
        sockets = bind([Listen(host="127.0.0.1", port=0)])
        shown.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        web = Web(shown, Exposition(agent.catalog), agent.catalog, state=shown)
        await web.start(sockets)
        try:
            yield shown
        finally:
            await web.stop()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, "tests/system-packages installs Chromium"
    async with async_playwright() as playwright:
        # Its sandbox needs what containers that run tests as root do not have.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        launched = await playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield launched
        finally:
            await launched.close()


@asynccontextmanager
async def reading(browser: Browser, shown: Shown, path: str = "/", **options: Any) -> AsyncIterator[Page]:
    """A page of ours in a browser; whatever the browser complains about is collected."""
    context: BrowserContext = await browser.new_context(**options)
    page = await context.new_page()

    def told(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            shown.complaints.append(message.text)

    page.on("console", told)
    page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    if options.get("java_script_enabled", True):
        await page.add_init_script(VIOLATED)
    await page.goto(shown.url + path, wait_until="networkidle")
    try:
        yield page
    finally:
        await context.close()


async def faults(page: Page, *tags: str) -> list[str]:
    """What axe finds in the page: the rule, and the elements that break it; with ``tags`` by the rules of these only.

    Not in its frame, which is fetched anew while axe looks: the strip is looked at for itself.
    """
    await page.evaluate(AXE)
    options: dict[str, Any] = {"resultTypes": ["violations"], "iframes": False}
    if tags:
        options["runOnly"] = tags
    found = await page.evaluate("options => axe.run(document, options)", options)
    return [f"{one['id']}: {[node['html'][:160] for node in one['nodes'][:3]]}" for one in found["violations"]]


async def first_screen(page: Page) -> bytes:
    """A WebP picture of what is seen without scrolling, at most 1280 wide: one of them is docs/images/page.webp."""
    session = await page.context.new_cdp_session(page)
    size = page.viewport_size
    assert size is not None
    clip = {
        "x": max(0, (size["width"] - 1280) / 2),
        "y": 0,
        "width": min(size["width"], 1280),
        "height": 1000,
        "scale": 1,
    }
    taken = await session.send(
        "Page.captureScreenshot", {"format": "webp", "quality": 82, "clip": clip, "captureBeyondViewport": True}
    )
    return base64.b64decode(taken["data"])


async def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    width: int = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


async def violated(page: Page) -> list[str]:
    """Directives of the policy that the page or a frame tripped over."""
    return [one for frame in page.frames for one in await frame.evaluate("window.violated || []")]


async def live(page: Page) -> Frame:
    """The strip's frame."""
    element = await page.query_selector("iframe")
    assert element is not None
    frame = await element.content_frame()
    assert frame is not None
    return frame


@pytest.mark.browser
@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_scenario_reads_well(name: str, browser: Browser, request: pytest.FixtureRequest) -> None:
    """Nothing is wider than the window, axe has nothing to say, nothing breaks the policy; folded or opened."""
    await look_at(name, browser, request, [(theme, width) for theme in THEMES for width in WIDTHS])


async def test_one_scenario_reads_well(browser: Browser, request: pytest.FixtureRequest) -> None:
    """The same for one of them, as every change has it."""
    await look_at(FEW, browser, request, list(zip(THEMES, WIDTHS, strict=True)))


async def look_at(name: str, browser: Browser, request: pytest.FixtureRequest, looks: list[tuple[str, int]]) -> None:
    """Look at the page of a scenario in these themes and widths."""
    folder: Path | None = request.config.getoption("--screenshots")
    async with serving(name) as shown:
        for theme, width in looks:
            look = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
            async with reading(browser, shown, **look) as page:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    await page.screenshot(path=folder / f"{name}-{theme}-{width}.png", full_page=True)
                    (folder / f"{name}-{theme}-{width}.webp").write_bytes(await first_screen(page))
                assert await overflow(page) <= 0
                assert await faults(page) == []
                await page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
                assert await overflow(page) <= 0
                assert await faults(page) == []
                assert await violated(page) == []
                assert "DEMO" in await page.title()
                assert "Still so at" in await (await live(page)).inner_text("body")
        assert shown.complaints == []


async def test_it_can_be_read_without_javascript_and_without_a_mouse(browser: Browser) -> None:
    """With scripts off everything is there; the keyboard reaches every link, fold and table, and opens folds."""
    async with serving(FEW) as shown:
        async with reading(browser, shown, java_script_enabled=False) as page:
            assert (await page.inner_text("h1")).startswith("flashinfer-mamba-missing: ")
            assert await page.locator("details#unknown table").is_hidden()
            await page.locator("details#unknown summary").click()
            assert await page.locator("details#unknown table").is_visible()
        async with reading(browser, shown) as page:
            wanted = await page.evaluate(
                "[...document.querySelectorAll('a, summary, [tabindex]')].filter(one => one.checkVisibility()).length"
            )
            reached = 0
            for _ in range(wanted):
                await page.keyboard.press("Tab")
                outlined = await page.evaluate(
                    "document.activeElement !== document.body && "
                    "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
                )
                reached += outlined
            assert reached >= wanted - 1, "the frame is no stop: there is nothing in it to focus"
            await page.focus("details#unknown summary")
            await page.keyboard.press("Enter")
            assert await page.evaluate("document.querySelector('details#unknown').open")
        assert shown.complaints == []


async def test_a_click_takes_the_whole_command(browser: Browser) -> None:
    """The command that repairs is selected as a whole, and what is copied is what has to be typed."""
    async with serving(FEW) as shown, reading(browser, shown) as page:
        await page.locator("pre.command").first.click()
        selected = await page.evaluate("getSelection().toString()")
    assert selected.strip() == "uv pip install --python /opt/sglang/bin/python 'flashinfer-python[cu13]==0.6.14'"


async def test_what_the_reader_opened_and_selected_stays(browser: Browser) -> None:
    """The verdict changes under an open page: its strip says so, and nothing that the reader did is undone."""
    async with serving(FEW) as shown, serving("healthy") as healthy, reading(browser, shown) as page:
        await page.locator("details#unknown summary").click()
        await page.locator("pre.command").first.click()
        await page.focus("details#unknown summary")
        await page.evaluate("window.scrollTo(0, 300)")
        shown.snapshot = healthy.snapshot
        frame = await live(page)
        # What the Refresh header makes the browser do; waiting for that is the next test's business.
        await frame.goto(frame.url)
        assert "Changed: now ok." in await frame.inner_text("body")
        assert await page.evaluate("document.querySelector('details#unknown').open")
        assert await page.evaluate("document.activeElement.textContent") == "1 condition could not be judged"
        assert "uv pip install" in await page.evaluate("getSelection().toString()")
        assert await page.evaluate("window.scrollY") == 300
        assert (await page.inner_text("h1")).startswith("flashinfer-mamba-missing")
        await page.get_by_role("link", name="Reload").click()
        assert (await page.inner_text("h1")).startswith("Everything that matters here was judged")


@pytest.mark.parametrize("theme", THEMES)
async def test_the_strip_reads_well(browser: Browser, theme: str) -> None:
    """Both things that it may say are held to the same as the page; what is cut off in it is nothing that matters."""
    async with serving(FEW) as shown:
        look = {"viewport": {"width": 300, "height": 26}, "color_scheme": theme}
        for path, said in (
            (f"/?live={mark(report.build(shown.snapshot, shown.catalog))}", "Still so at"),
            ("/?live=other", "Changed: now critical, flashinfer-mamba-"),
        ):
            async with reading(browser, shown, path, **look) as page:
                assert said in await page.inner_text("body")
                # Of a whole page more is asked, such as a heading: this one stands in another.
                assert await faults(page, "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa") == []
                assert await violated(page) == []
                assert await overflow(page) <= 0
        assert shown.complaints == []


@pytest.mark.browser
async def test_the_strip_is_fetched_anew_by_the_browser(browser: Browser) -> None:
    """Without a script and without a hand the strip tells of a change within its period."""
    without = {"java_script_enabled": False}
    async with (
        serving(FEW) as shown,
        serving("healthy") as healthy,
        reading(browser, shown, **without) as page,
    ):
        shown.snapshot = healthy.snapshot
        frame = page.frame_locator("iframe")
        await frame.get_by_text("Changed: now ok.").wait_for(timeout=30_000)
        assert (await page.inner_text("h1")).startswith("flashinfer-mamba-missing")


@pytest.mark.browser
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
async def test_the_documentation_reads_well(browser: Browser, theme: str, width: int) -> None:
    """The page behind the links is held to the same."""
    async with serving("healthy") as shown:
        look = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
        async with reading(browser, shown, "/docs", **look) as page:
            assert await overflow(page) <= 0
            assert await faults(page) == []
            assert await violated(page) == []
            await page.goto(shown.url + "/docs#gpu-lost")
            assert await page.locator("#gpu-lost").is_visible()
        assert shown.complaints == []
