"""The documentation: what it shows can be run, read and found, and says what the product says.

Outputs that the product can give here are made anew and compared; ``UPDATE_GOLDENS=1`` rewrites them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import promql_parser as promql
import pytest
import yaml

from sidecar import baseline, cli, config, readiness, report, text
from sidecar.app import Agent
from sidecar.catalog import PREFIX, build, discover
from sidecar.config import ImportPolicy, Settings
from sidecar.demo import SCENARIOS, load
from sidecar.drift import ITEMS
from sidecar.exposition import Exposition
from sidecar.model import Snapshot
from sidecar.web import Web
from tests.cases import DOCUMENT, sections_of
from tests.samples import snapshot

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
UPDATE = "UPDATE_GOLDENS" in os.environ
CATALOG = build(discover())
PAGES = sorted(
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *DOCS.glob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
        *(ROOT / "dashboards").glob("*.md"),
    )
)
LANGUAGES = {"console", "json", "promql", "python", "text", "toml", "yaml"}
HOSTS = {
    "github.com": "where the projects and the reports are",
    "grafana.com": "Grafana's manual",
    "keepachangelog.com": "the form of the changelog",
    "packaging.python.org": "Python's rules for versions",
    "semver.org": "what a version says",
}
"""Every host that a page links to, and for what."""
EXAMPLES = re.compile(r"\.example(\.com)?\Z|\A(localhost|127\.0\.0\.1)\Z")
"""Hosts that stand for the reader's own."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, the line of its fence, the words behind the fence, its lines."""

    page: Path
    line: int
    info: str
    content: str

    @property
    def language(self) -> str:
        """The first word behind the fence."""
        return self.info.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    found: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"^(\s*)```(.*)$", line)
        if found is None and fence:
            found, lines = (number, fence[1], fence[2].strip()), []
        elif found is not None and fence and not fence[2]:
            yield Block(page, found[0], found[2], "".join(f"{one}\n" for one in lines))
            found = None
        elif found is not None:
            lines.append(line.removeprefix(found[1]))
    assert found is None, f"{page}: a block is not closed"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> Any:
    """A test's argument ``block``: each block in one of these languages."""
    chosen = [block for block in BLOCKS if block.language in languages]
    assert chosen, f"no block in {languages}"
    return pytest.mark.parametrize("block", chosen, ids=str)


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^(\s*)```.*?^\s*```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


# -- blocks -------------------------------------------------------------------------------------------


def test_every_block_says_what_it_is() -> None:
    """A language behind each fence, of those that are checked below."""
    assert [f"{block}: {block.info!r}" for block in BLOCKS if block.language not in LANGUAGES] == []


@of("toml")
def test_toml_is_accepted(block: Block, tmp_path: Path) -> None:
    """A table [environment] is a baseline, everything else a configuration of this agent."""
    path = tmp_path / "shown.toml"
    path.write_text(block.content)
    if "environment" in tomllib.loads(block.content):
        assert baseline.load(path, ITEMS).problems == ()
        return
    loaded = config.load(
        file=path,
        environ={},
        flags={},
        probe_names=tuple(CATALOG.by_name),
        allowed_requirements=(*CATALOG.requirable, *CATALOG.conditions),
        conditions=tuple(CATALOG.conditions),
        declared=CATALOG.settings,
    )
    assert loaded.settings.explicit == set(tomllib.loads(block.content))


@of("yaml")
def test_yaml_is_valid(block: Block) -> None:
    """It parses, into something."""
    assert [one for one in yaml.safe_load_all(block.content) if one]


@of("promql")
def test_promql_is_valid(block: Block) -> None:
    """Each query parses, and names only metrics that there are."""
    known = {PREFIX + family.name for family in CATALOG.families}
    for query in re.split(r"\n\s*\n", re.sub(r"^\s*#.*$", "", block.content, flags=re.MULTILINE).strip()):
        promql.parse(query)
        assert set(re.findall(rf"\b{PREFIX}\w+", query)) <= known, query


@of("python")
def test_python_is_valid(block: Block) -> None:
    """It parses; tests/e2e/test_contributor.py runs it."""
    ast.parse(block.content)


@of("json")
def test_json_is_a_part_of_a_report(block: Block) -> None:
    """It parses, and each field is one of the report's by the schema."""
    schema = report.schema(CATALOG)
    for name, value in json.loads(block.content).items():
        jsonschema.validate(value, {"$defs": schema["$defs"], **schema["properties"][name]})


# -- commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a shell: variables in front of it, and its words."""

    assignments: Mapping[str, str]
    words: tuple[str, ...]


def commands(block: Block) -> Iterator[Command]:
    """The commands behind the prompts of a console: $, or # for root. What is printed is passed over."""
    joined = re.sub(r"\\\n\s*>?\s*", " ", block.content)
    for line in joined.splitlines():
        if not (prompt := re.match(r"^[$#] (.*)$", line)):
            continue
        lexer = shlex.shlex(prompt[1], posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        part: list[str] = []
        for word in (*lexer, ";"):
            if not re.fullmatch(r"[|&;]+", word):
                part.append(word)
                continue
            assigned = {}
            while part and (pair := re.fullmatch(r"([A-Z_]+)=(.*)", part[0])):
                assigned[pair[1]] = pair[2]
                part.pop(0)
            part = part[: part.index(">")] if ">" in part else part
            if part:
                yield Command(assigned, tuple(part))
            part = []


def refused(words: Iterable[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What the agent's command line has against these words; None where it takes them."""
    ours = list(words)
    ours = ours[: ours.index("--")] if "--" in ours else ours
    try:
        cli._parser(CATALOG.settings).parse_args(ours)
    except SystemExit as ended:
        return None if ended.code == 0 else capsys.readouterr().err
    return None


ENDPOINTS = ("/metrics", "/livez", "/startupz", "/readyz", "/report", "/docs", "/")


def make_names() -> tuple[set[str], set[str]]:
    """Targets and variables of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    return targets, set(re.findall(r"\$\(([A-Z]+)\)", makefile)) | {"PYTHON"}


@of("console")
def test_commands_exist(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags and commands of the agent, targets and variables of make, endpoints and files that are named."""
    targets, variables = make_names()
    settings = {setting.variable for setting in CATALOG.settings} | {config.FILE_VARIABLE}
    found = list(commands(block))
    assert found, "no prompt"
    for command in found:
        name, *rest = command.words
        if name in {"kubectl", "podman", "docker"}:
            # Their own words are theirs; behind -- stands a command of ours.
            name, *rest = rest[rest.index("--") + 1 :] if "--" in rest else (name,)
        ours = {one for one in command.assignments if one.startswith(config.ENVIRONMENT_PREFIX)}
        assert ours <= settings, command
        if name.rpartition("/")[2] == "sglang-sidecar":
            assert refused(rest, capsys) is None, command
        elif name == "make":
            given = {word.partition("=")[0] for word in rest if "=" in word}
            assert {word for word in rest if "=" not in word} <= targets, command
            assert given <= variables, command
        elif name == "curl":
            address = next(word for word in rest if "9477" in word)
            path = urlsplit(address if "://" in address else f"http://{address}").path or "/"
            assert path in ENDPOINTS or path.startswith("/readyz/"), command
        for word in rest:
            if re.match(r"(docs|deploy|dashboards|bench|tests|sidecar)/", word):
                assert (ROOT / word).exists(), f"{command} names {word}"


def test_code_in_prose_is_true_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands of the agent and of make that stand in sentences and tables."""
    targets, _ = make_names()
    seen = 0
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            words = code.split()
            if words[0] == "make" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
                assert words[1] in targets, f"{page.name}: {code}"
                seen += 1
            if words[0] == "sglang-sidecar" and len(words) > 1 and not re.search(r"\.\.\.|…|[A-Z|]{3,}", code):
                assert refused(words[1:], capsys) is None, f"{page.name}: {code}"
                seen += 1
    assert seen > 20


# -- what is printed ----------------------------------------------------------------------------------


async def demo(name: str) -> Snapshot:
    """How a scenario ends."""
    async with Agent.create(Settings(import_policy=ImportPolicy.ALWAYS), once=True, demo=load(name)[0]) as agent:
        return await agent.check()


def printed(command: str, seen: Snapshot) -> str:
    """What a command prints of a scenario, as far as the README uses it."""
    first, _, then = command.partition(" | ")
    if "check --demo" in first:
        shown = text.render(report.build(seen, CATALOG), verbose=False)
    elif first.endswith("/readyz"):
        shown = readiness.readyz(seen, CATALOG, stopping=False).text
    elif first.endswith("/metrics"):
        rendered = Exposition(CATALOG).render(seen, accept="text/plain", accept_encoding="identity")
        shown = rendered.body.decode()
    else:
        return ""
    lines = shown.splitlines()
    words = shlex.split(then)
    if words[:2] == ["grep", "-E"]:
        lines = [line for line in lines if re.search(words[2], line)]
    elif words[:2] == ["head", "-n"]:
        lines = lines[: int(words[2])]
    else:
        assert not words, command
    return "".join(f"{line}\n" for line in lines).rstrip("\n") + "\n"


EXCERPT = ("schema_version", "verdict", "demo")
"""Fields of a report that are the same each time, and short."""


async def regenerated(block: Block) -> str:
    """The block with what is printed made anew."""
    (word, value) = re.fullmatch(r"\w+ (\w+)=(\S+)", block.info).groups()  # type: ignore[union-attr]  # chosen by it
    if word == "case":
        section = sections_of(DOCUMENT.read_text())[int(value)]
        return re.search(r"```text\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]  # a case without one: an error
    shown = await demo(value)
    if word == "demo" and block.language == "json":
        whole = json.loads(report.encode(report.build(shown, CATALOG)))
        return json.dumps({name: whole[name] for name in EXCERPT}, indent=2) + "\n"
    asked = [line for line in block.content.splitlines() if line.startswith("$ ")]
    return "".join(f"{line}\n{printed(line[2:], shown)}" for line in asked)


SHOWING = [page for page in PAGES if any(" " in block.info for block in blocks_of(page))]


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: page.name)
async def test_what_is_shown_is_what_is_printed(page: Path) -> None:
    """Blocks that name a scenario or a case hold the product's own words, to the letter."""
    for block in reversed([block for block in blocks_of(page) if " " in block.info]):
        wanted = await regenerated(block)
        if UPDATE:
            lines = page.read_text().splitlines(keepends=True)
            end = next(number for number in range(block.line, len(lines)) if lines[number].strip() == "```")
            lines[block.line : end] = [wanted]
            page.write_text("".join(lines))
        else:
            assert block.content == wanted, str(block)


# -- links --------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page, the second of the same name with -1 and so on."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        name = slug(heading)
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def links(page: Path) -> list[str]:
    """Where a page's links and pictures lead."""
    body = re.sub(r"`[^`\n]*`", lambda code: code[0] if "](" in code[0] else "", prose(page))
    return [*re.findall(r"\]\(([^)\s]+)\)", body), *re.findall(r"<(https?://[^>\s]+)>", body)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files exist, and anchors are headings of theirs."""
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} -> {link}"
        assert target.is_relative_to(ROOT), f"{page.name} -> {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} -> {link}"


def test_other_sites_are_listed_once() -> None:
    """Every host with its purpose, by https, without a host that nobody links to."""
    used = set()
    for page in PAGES:
        for link in links(page):
            parts = urlsplit(link)
            if not parts.scheme or EXAMPLES.search(parts.hostname or ""):
                continue
            assert parts.scheme == "https", f"{page.name} -> {link}"
            assert parts.hostname in HOSTS, f"{page.name} -> {link}"
            assert not parts.query, f"{page.name} -> {link}"
            used.add(parts.hostname)
    assert used == set(HOSTS)


def test_every_page_is_reached() -> None:
    """From the README, by links."""
    reached: set[Path] = set()
    open_ = [ROOT / "README.md"]
    while open_:
        page = open_.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if "://" not in link and target.suffix == ".md" and target.is_file():
                open_.append(target)
    assert set(PAGES) - reached == set()
    index = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "README.md")}
    assert set(DOCS.glob("*.md")) - index == {DOCS / "README.md"}


def test_pictures_are_small_and_described() -> None:
    """Each picture is used, has words for those who do not see it, and does not weigh much."""
    used = {
        (page.parent / path).resolve(): words
        for page in PAGES
        for words, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text())
    }
    assert set(used) == set((DOCS / "images").iterdir())
    assert all(len(words) > 20 for words in used.values())
    assert all(path.stat().st_size < 300_000 for path in used)


# -- completeness -------------------------------------------------------------------------------------


def test_everything_public_is_described() -> None:
    """Settings, metrics, conditions, endpoints, exit codes, commands, scenarios, targets: each on its page."""
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    for setting in CATALOG.settings:
        assert all(f"`{name}" in pages["settings.md"] for name in (setting.key, setting.flag, setting.variable))
    for family in CATALOG.families:
        assert f"`{PREFIX}{family.name}`" in pages["metrics.md"]
    for code in CATALOG.conditions:
        assert f"\n## {code}\n" in pages["conditions.md"]
    for code in (*map(int, report.ExitCode), cli.EX_USAGE, cli.EX_SOFTWARE):
        assert f"\n| {code} | " in pages["commands.md"], code
    for name in SCENARIOS:
        assert f"| `{name}` |" in (ROOT / "README.md").read_text()
    for target in re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE):
        assert re.search(rf"`make {target}\b", "".join(pages.values())), target


def test_every_endpoint_is_described() -> None:
    """Each route of the application, and none that there is not."""
    nothing: Any = SimpleNamespace(snapshot=snapshot())
    web = Web(nothing, Exposition(CATALOG), CATALOG, state=nothing)
    routes = {str(getattr(route.resource, "canonical", "")) for route in web.application().router.routes()}
    shown = {path.replace("{name}", "X") for path in routes} - {"/metrics/"}
    table = (DOCS / "commands.md").read_text().partition("## Endpoints")[2]
    assert set(re.findall(r"^\| `(/[^`]*)`", table, re.MULTILINE)) == shown
    assert {path.removesuffix("X") for path in shown if path != "/readyz/X"} == set(ENDPOINTS)


def test_every_command_is_described() -> None:
    """Each command of the command line has its row."""
    parser = cli._parser(CATALOG.settings)
    (commands_,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    rows = re.findall(r"^\| `([a-z]+)", (DOCS / "commands.md").read_text().partition("## check")[0], re.MULTILINE)
    assert set(rows) == set(commands_.choices)


def test_metrics_are_known() -> None:
    """Whatever page names a metric of this agent, in prose or in a block: there is one of that name."""
    known = {PREFIX + family.name for family in CATALOG.families}
    # The probe of contributing.md is an example; tests/e2e/test_contributor.py looks for its metric.
    for page in set(PAGES) - {DOCS / "contributing.md"}:
        for name in re.findall(rf"\b{PREFIX}[a-z0-9_]+", page.read_text()):
            assert name in known, f"{page.name}: {name}"


def test_tokens_are_known() -> None:
    """What the page on troubleshooting and the README take for codes and reasons are such."""
    tokens = {*CATALOG.conditions, *CATALOG.by_name, *SCENARIOS}
    tokens |= {reason for one in CATALOG.conditions.values() for reason in one.reasons}
    sources = "\n".join(path.read_text() for path in (ROOT / "sidecar").rglob("*.py"))
    others = {"dcgm-exporter", "nvitop-exporter", "sglang-sidecar", "nvidia-smi"}
    for page in (DOCS / "troubleshooting.md", ROOT / "README.md"):
        for token in re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", prose(page)):
            known = token in tokens | others or f'"{token}"' in sources
            assert known, f"{page.name}: {token}"
