"""What a rule says of itself: its options, from signature and docstring."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import dataclass
from typing import Any

from gradvac.rules._rule import Rule

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Option:
    """An argument of a rule.

    Attributes:
        name: The argument.
        kind: Its annotation.
        default: `REQUIRED` if it has none.
        about: What the docstring says of it.
    """

    name: str
    kind: Any
    default: Any
    about: str


def options_of(rule: type[Rule]) -> dict[str, Option]:
    """The arguments of a rule by name, in their order."""
    if rule.__init__ is object.__init__:
        return {}
    kinds = typing.get_type_hints(rule.__init__)
    about = _described(inspect.getdoc(rule) or "")
    return {
        name: Option(name, kinds.get(name, Any), parameter.default, about.get(name, ""))
        for name, parameter in inspect.signature(rule).parameters.items()
    }


def _described(docstring: str) -> dict[str, str]:
    """Argument -> text, of a docstring in Google style."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.split(r"^[ ]{4}(\w+): ", section[1], flags=re.MULTILINE) if section else [""]
    return {
        name: " ".join(text.split())
        for name, text in zip(entries[1::2], entries[2::2], strict=True)
    }
