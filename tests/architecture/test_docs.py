"""Commands that the pages name exist, with their options and configs; links lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml

from gradvac.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / folder / "README.md" for folder in (".", "benchmarks", "configs")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CONFIGS = {path.stem for path in (ROOT / "configs").rglob("*.toml")}
TAKE_CONFIGS = {"prepare", "train", "sweep"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in code, a line of a block or a piece of a sentence."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    pieces = [" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", prose)]
    for line in [*(line for block in blocks for line in block.splitlines()), *pieces]:
        for command in re.split(r" && |\| ", line):
            words = command.strip().partition(" #")[0].split()
            if words[:1] == ["gradvac"]:
                yield words[1:]


COMMANDS: Any = typer.main.get_command(app)


def mistake(words: list[str]) -> str:
    """What is wrong with a command; "" if nothing is."""
    command = COMMANDS
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, "--help")}
    options = re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(words))
    unknown = [option for option in options if option not in known]
    if unknown:
        return f"{command.name} has no option {unknown[0]}"
    name = words[0] if words and command.name in TAKE_CONFIGS else ""
    is_name = re.fullmatch("[a-z][a-z0-9_]*", name) is not None
    return f"no config {name!r}" if is_name and name not in CONFIGS else ""


def test_commands_in_the_pages_exist() -> None:
    found = [(page, words) for page in PAGES for words in commands(page.read_text("utf-8"))]
    assert len(found) > 60
    wrong = [
        f"{page.relative_to(ROOT)}: gradvac {' '.join(words)}: {what}"
        for page, words in found
        if (what := mistake(words))
    ]
    assert not wrong


def test_the_rule_can_fail() -> None:
    text = (
        "Say `gradvac nmt\nfly RUN`:\n```\ngradvac sweep nothing && gradvac report RUN --loud\n```"
    )
    assert [mistake(words) for words in commands(text)] == [
        "no config 'nothing'",
        "report has no option --loud",
        "no command 'fly'",
    ]


def test_every_config_is_on_the_list() -> None:
    folder = ROOT / "configs"
    listed = set(re.findall(r"`(\w+/\w+\.toml)`", (folder / "README.md").read_text("utf-8")))
    assert listed == {path.relative_to(folder).as_posix() for path in folder.rglob("*.toml")}


def test_links_between_pages_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", page.read_text("utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path
            if not target.exists():
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                wrong.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert not wrong


def test_the_navigation_reaches_every_page() -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    reached = re.findall(r"[\w/]+\.md", str(yaml.safe_load(settings)["nav"]))
    docs = ROOT / "docs"
    assert sorted(reached) == sorted(p.relative_to(docs).as_posix() for p in docs.rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """The names by which headings of a page are linked."""
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE) + re.findall(r"^::: (\S+)", text, re.M)
    plain = (re.sub(r"[^\w\s.-]", "", heading).strip() for heading in headings)
    named = {re.sub(r"\s+", "-", heading) for heading in plain}
    return named | {re.sub(r"\.", "", name).lower() for name in named}
