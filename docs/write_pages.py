"""Writes the parts of these pages that follow from the code.

    settings.md      every setting with its type, default and meaning, from the config classes
    guide.md         the table of rules, from their classes
    api/rules.md     the list of rules

python docs/write_pages.py          (a test compares the pages with what this would write)
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gradvac.lab.recipes.nmt import NmtConfig
from gradvac.lab.recipes.tagging import TaggingConfig
from gradvac.lab.training import RunConfig
from gradvac.lab.training.config import write_value
from gradvac.rules import RULES

DOCS = Path(__file__).parent
_BEGIN, _END = "<!-- written by docs/write_pages.py -->\n", "<!-- until here -->\n"
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_INTRODUCTION = """# Settings

Every setting of a run: written by `python docs/write_pages.py` from the classes that read them.
A setting is a line of a TOML file, or an override on the command line, `section.key=value`. What is
not set has its default; a run folder's `config.toml` holds all of them. *Required* ones have none.
"""


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a section and its bases say of each attribute."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        text = inspect.getdoc(base) if base.__doc__ else None
        _, heading, listed = (text or "").partition("Attributes:\n")
        if not heading:
            continue
        for block in re.split(r"\n(?=    \w+: )", listed.split("\n\n")[0]):
            name, _, about = block.strip().partition(": ")
            found[name] = " ".join(about.split())
    return found


def toml(value: Any) -> str:
    """A value as TOML has it."""
    return write_value(str(value) if isinstance(value, Path) else value)


def kind(annotation: Any) -> str:
    """A type in words that fit into a cell."""
    if annotation is types.NoneType:
        return "unset"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin is Literal:
        return ", ".join(toml(value) for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(part) for part in inner))
    if origin is list and isinstance(inner[0], type) and issubclass(inner[0], BaseModel):
        return "list of tables"
    if origin in (list, tuple):
        return f"list of {kind(inner[0])}"
    if origin is dict:
        return f"table of {kind(inner[1])}"
    if annotation is Path:
        return "path"
    return str(getattr(annotation, "__name__", annotation))


def bounds(field: FieldInfo) -> str:
    """What numbers are allowed."""
    parts = list(field.metadata)
    for part in typing.get_args(field.annotation):
        parts += getattr(part, "__metadata__", ())
    said = [
        f"{word} {_number(getattr(part, name))}"
        for part in parts
        for name, word in _BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    return f", {' and '.join(dict.fromkeys(said))}" if said else ""


def _number(value: float) -> str:
    """A bound as people write it: the numbers of 63 bits are a power."""
    return "2^63" if value == 2**63 else f"{value:g}"


def default(field: FieldInfo) -> str:
    """A default as TOML would have it."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "*required*"
    return "*unset*" if value is None else f"`{toml(value)}`"


def tables(section: type[BaseModel], name: str) -> list[str]:
    """The settings of a section, and after them those of the sections inside."""
    about, rows, inside = meanings(section), [], []
    for key, field in section.model_fields.items():
        own = field.annotation
        if isinstance(own, type) and issubclass(own, BaseModel):
            inside += tables(own, f"{name}.{key}")
            continue
        for part in typing.get_args(own):  # a list of sections, [[...]] in TOML
            if isinstance(part, type) and issubclass(part, BaseModel):
                inside += tables(part, f"[{name}.{key}]")
        meaning = (field.description or about.get(key, "")).replace("|", "\\|")
        if not meaning:
            raise ValueError(f"{section.__name__}.{key} has no meaning: describe it in its class")
        cell = (kind(own) + bounds(field)).replace("|", "\\|")
        rows.append(f"| `{key}` | {cell} | {default(field)} | {meaning} |")
    first = (inspect.getdoc(section) or "").split("\n\n")[0]
    head = [f"### [{name}]", "", " ".join(first.split()), ""]
    return [
        *head,
        "| key | type | default | meaning |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        *inside,
    ]


def settings_page() -> str:
    """The whole page of settings."""
    lines = [_INTRODUCTION]
    shared = RunConfig.model_fields
    for title, model in (
        ("Every run", RunConfig),
        ("Translation", NmtConfig),
        ("Tagging", TaggingConfig),
    ):
        lines += [f"## {title}", ""]
        for name, field in model.model_fields.items():
            if model is RunConfig or name not in shared:
                assert isinstance(field.annotation, type)
                lines += tables(field.annotation, name)
    return "\n".join(lines).rstrip() + "\n"


def rule_table() -> str:
    """The rules with what configs call them and what they do."""
    rows = [f'| `{rule.__name__}` | `"{name}"` | {rule.does} |' for name, rule in RULES.items()]
    return "\n".join(["| class | name | what it does |", "| --- | --- | --- |", *rows]) + "\n"


def rule_list() -> str:
    """The rules as the page of the API includes them."""
    return "\n".join(f"::: gradvac.{rule.__name__}\n" for rule in RULES.values())


def with_part(page: str, part: str) -> str:
    """A page with what stands between the two marks replaced."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin, "the page has lost its marks"
    assert end, "the page has lost its marks"
    return f"{before}{begin}\n{part}\n{end}{after}"


def pages(docs: Path) -> dict[str, str]:
    """Name -> text, of every page of a folder that this writes or has a part in."""
    parts = {"guide.md": rule_table(), "api/rules.md": rule_list()}
    made = {
        name: with_part((docs / name).read_text(encoding="utf-8"), part)
        for name, part in parts.items()
    }
    return made | {"settings.md": settings_page()}


if __name__ == "__main__":
    for name, text in pages(DOCS).items():
        (DOCS / name).write_text(text, encoding="utf-8")
    sys.stdout.write("The pages are written.\n")
