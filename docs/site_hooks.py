"""What the site needs beyond Markdown: README as first page, formulas as MathML, version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

import gradvac

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_README = Path(__file__).parents[1] / "README.md"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?!docs/|https?:|#)[^)]+\)")  # links to files the site lacks
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&"}


def on_config(config: Any) -> None:
    """Say below every page which version it is about."""
    config.copyright = f"gradvac {gradvac.__version__}, Apache-2.0"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The site begins as the repository does; results have wide tables; the log is not searched."""
    if page.file.src_uri == "index.md":
        text = _OUTSIDE.sub(r"\1", _README.read_text(encoding="utf-8"))
        return text.replace("](docs/", "](")
    if page.file.src_uri.startswith(("results/", "data.md")):
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == "log.md":
        page.meta["search"] = {"exclude": True}
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Set formulas: browsers draw MathML without a script."""
    return _FORMULA.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    formula = found[2]
    for entity, letter in _ENTITIES.items():
        formula = formula.replace(entity, letter)
    if found[1] == "span":
        return convert(formula)
    return f'<div class="formula">{convert(formula, display="block")}</div>'
