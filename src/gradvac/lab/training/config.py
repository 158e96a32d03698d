"""Typed settings from TOML files and `section.key=value` overrides.

A config is a pydantic model of sections; every component owns the section it reads. Nothing is
guessed: an unknown key, a wrong type or a contradiction is one line that names the file or override
it came from, the key, and the nearest valid key.

The file has three parts: reading and comparing configs, pydantic's errors in our words, and writing
TOML, which the standard library only reads.
"""

import datetime
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict

from gradvac.analysis.run_files import flatten
from gradvac.utils.hints import nearest

Config = TypeVar("Config", bound=BaseModel)
Keys = tuple[str | int, ...]

_WORDS = {
    "a valid array": "a list",
    "a valid dictionary": "a section",
    "an object": "a section",
    "a valid string": "a string",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


class ConfigError(ValueError):
    """Settings that cannot be used: one line for each mistake."""


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, types are strict, values cannot be changed.

    Numbers are finite, unless a section allows infinity where it means something.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


def _require_name(path: object) -> object:
    if path == "":  # what an unset shell variable leaves
        raise ValueError('must name a folder, got ""; "." is the current one')
    return path


Folder = Annotated[Path, BeforeValidator(_require_name)]


def read_config(
    model_class: type[Config],
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    folders: Iterable[Path] = (),
) -> Config:
    """Read a config.

    Args:
        model_class: What to read: a pydantic model, usually a recipe's `RunConfig`.
        source: A TOML file; or the name of one in `folders`, without `.toml`.
        overrides: `section.key=value`, applied in order. Values are TOML literals; a bare word is
            a string.
        folders: Where named configs are.

    Raises:
        ConfigError: With one line for each mistake.
    """
    path = find_config(source, folders)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    origins = {_apply(override, table): f"override {override}" for override in overrides}
    for name, field in model_class.model_fields.items():
        set_aside = getattr(field.annotation, "set_aside", None)
        if set_aside is not None and isinstance(table.get(name), dict):
            set_aside(table[name], {keys[1] for keys in origins if keys[0] == name and keys[1:]})
    # Through JSON, because pydantic's strict JSON mode takes what a text file can say (a string
    # for a path, a list for a tuple) and nothing else.
    try:
        return model_class.model_validate_json(json.dumps(table, default=str))
    except pydantic.ValidationError as error:
        lines = _explain(error, model_class, table, file=str(path), origins=origins)
        raise ConfigError("\n".join(lines)) from None


load = read_config  # config.load(...) reads well


def dump(config: BaseModel) -> str:
    """A config as TOML, every default written out; `load` reads it back to an equal config."""
    return write_toml(config.model_dump(mode="json", exclude_none=True))


def compare_settings(old: BaseModel, new: BaseModel) -> dict[str, tuple[Any, Any]]:
    """Key path -> (old value, new value) of everything that differs; None for an unset key."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    keys = dict.fromkeys([*before, *after])
    changes = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: pair for key, pair in changes.items() if pair[0] != pair[1]}


def find_config(source: str | Path, folders: Iterable[Path]) -> Path:
    """The file of that name: a path, or a name in one of the folders, without `.toml`."""
    path = Path(source)
    if path.is_file():
        return path
    named = {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for folder in folders
        for file in sorted(folder.rglob("*.toml"))
    }
    if str(source) in named:
        return named[str(source)]
    hint = f"; {nearest(str(source), named)}" if named else ""
    raise ConfigError(f"config: there is no file {str(source)!r}{hint}")


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`section.key=value` -> {"section.key": value}, to change settings by name."""
    values: dict[str, Any] = {}
    for override in overrides:
        table: dict[str, Any] = {}
        keys = _apply(override, table)
        for key in keys[:-1]:
            table = table[key]
        values[".".join(keys)] = table[keys[-1]]
    return values


def _apply(override: str, table: dict[str, Any]) -> tuple[str, ...]:
    """Set the key an override names, and return its path."""
    name, equals, text = override.partition("=")
    keys = tuple(key.strip() for key in name.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"override {override}: must have the form section.key=value")
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            where = ".".join(keys[:depth])
            raise ConfigError(f"override {override}: {where} is a value, not a section")
    try:
        table[keys[-1]] = parse_value(text.strip())
    except ValueError as error:
        raise ConfigError(f"override {override}: {error}") from None
    return keys


# -- mistakes --------------------------------------------------------------------------------------


def _explain(
    error: pydantic.ValidationError,
    model_class: type[BaseModel],
    table: Mapping[str, Any],
    *,
    file: str,
    origins: Mapping[tuple[str, ...], str],
) -> list[str]:
    """One line per mistake.

    Args:
        error: What pydantic found.
        model_class: The model it validated.
        table: The settings.
        file: Name of the file the settings came from.
        origins: Key path -> the override that set it.
    """
    mistakes: dict[tuple[Keys, Any], list[str]] = {}
    for mistake in error.errors():
        keys = _keys_of(mistake, table)
        message = _describe(mistake, keys, model_class)
        keys, message = _move_key(keys, message, mistake["type"], model_class)
        # A value that fits no member of a union is one mistake, which pydantic reports per member.
        mistakes.setdefault((keys, repr(mistake["input"])), []).append(message)
    lines = []
    for (keys, _), messages in mistakes.items():
        path = ".".join(map(str, keys))
        start = f"{_origin(keys, file, origins)}: {path}".removesuffix(": ")
        lines.append(f"{start}: {_join(messages)}")
    return lines


def _describe(mistake: Any, keys: Keys, model_class: type[BaseModel]) -> str:
    kind, given, context = mistake["type"], mistake["input"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        section = _section_at(keys[:-1], model_class) or model_class
        return f"unknown key; {nearest(str(keys[-1]), section.model_fields)}"
    if kind == "missing":
        return "is missing, and has no default"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", context["expected"])
        return f"got {given!r}; {nearest(str(given), choices)}"
    start, _, wanted = mistake["msg"].partition("Input should be ")
    return f"must be {_WORDS.get(wanted, wanted)}, got {given!r}" if wanted else start


def _move_key(
    keys: Keys, message: str, kind: str, model_class: type[BaseModel]
) -> tuple[Keys, str]:
    """A section that checks itself begins with the key it speaks of: that belongs to the path."""
    key, colon, rest = message.partition(": ")
    section = _section_at(keys, model_class)
    if kind == "value_error" and colon and section is not None and key in section.model_fields:
        return (*keys, key), rest
    return keys, message


def _join(messages: list[str]) -> str:
    """`must be a list, got 3` and `must be a valid string, got 3` in one."""
    if len(messages) == 1 or not all(text.startswith("must be ") for text in messages):
        return messages[0]
    wanted = [text.removeprefix("must be ").rpartition(", got ")[0] for text in messages]
    return f"must be {' or '.join(wanted)}, got {messages[0].rpartition(', got ')[2]}"


def _origin(keys: Keys, file: str, origins: Mapping[tuple[str, ...], str]) -> str:
    """The override that set this key, or the file, with the overrides that set parts of it."""
    for depth in range(len(keys), 0, -1):
        if keys[:depth] in origins:
            return origins[tuple(map(str, keys[:depth]))]
    inside = [origin for path, origin in origins.items() if path[: len(keys)] == keys]
    return f"{file} with {', '.join(inside)}" if inside else file


def _keys_of(mistake: Any, value: Any) -> Keys:
    """The keys that lead to a mistake, without the tags that pydantic adds inside unions."""
    keys: list[str | int] = []
    for item in mistake["loc"]:
        is_list, is_table = isinstance(value, list), isinstance(value, dict)
        if (is_table and item in value) or (is_list and item in range(len(value))):
            keys.append(item)
            value = value[item]
    if mistake["type"] == "missing":
        keys.append(mistake["loc"][-1])
    return tuple(keys)


def _section_at(keys: Keys, model_class: type[BaseModel]) -> type[BaseModel] | None:
    """The section that some keys lead to; None if it is a value."""
    section: type[BaseModel] | None = model_class
    for key in (key for key in keys if isinstance(key, str)):
        field = None if section is None else section.model_fields.get(key)
        section = None if field is None else _section_in(field.annotation)
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section itself, or that of a list or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


# -- TOML ------------------------------------------------------------------------------------------


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
