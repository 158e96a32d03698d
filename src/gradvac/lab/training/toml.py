"""Writing TOML, and reading single values of it; the standard library only reads files."""

import datetime
import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any


def parse_value(text: str) -> Any:
    """A TOML literal; what is none, or is a date, is the string itself.

    Raises:
        ValueError: The text starts like a string, list or table, but is none.
    """
    if "\n" not in text and text:
        try:
            parsed = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError as error:
            if text[0] in "[{\"'":
                raise ValueError(f"not valid TOML ({error}); strings inside need quotes") from None
        else:
            value = parsed["value"]
            if not isinstance(value, datetime.date | datetime.time):
                return value
    return text


def write_toml(table: Mapping[str, Any]) -> str:
    """Nested mappings of plain values as TOML, in their order; plain values before sections."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {write_value(value)}" for key, value in plain.items()]
    if path and (lines or not table):
        lines.insert(0, f"[{'.'.join(map(_key, path))}]")
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", *_lines(value, (*path, key))]
    return lines


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_value(value: Any) -> str:
    """A plain value, list or table in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf and nan are TOML's words too
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {write_value(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(write_value, value)) + "]"
