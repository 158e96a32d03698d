"""Typed settings from TOML files and `section.key=value` overrides.

A config is a pydantic model of sections; every component owns the section it reads. Nothing is
guessed: an unknown key, a wrong type or a contradiction is one line that names the file or override
it came from, the key, and the nearest valid key.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict

from gradvac.hints import nearest
from gradvac.lab.training._mistakes import explain
from gradvac.lab.training.toml import parse_value, write_toml

Config = TypeVar("Config", bound=BaseModel)


_SEALED, _SEAL = "# Written by gradvac; the last line seals it.", "# sha256 "


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


def load(
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
        text = path.read_text(encoding="utf-8-sig")
        if not _holds(text):
            raise ConfigError(
                f"{path}: was changed or damaged after it was written. Give other settings as "
                "overrides; to keep a change, remove the first and the last line."
            )
        table = tomllib.loads(text)
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
        lines = explain(error, model_class, file=str(path), origins=origins)
        raise ConfigError("\n".join(lines)) from None


def dump(config: BaseModel) -> str:
    """A config as TOML, every default written out; `load` reads it back to an equal config."""
    return write_toml(config.model_dump(mode="json", exclude_none=True))


def seal(text: str) -> str:
    """A config that `load` accepts only unchanged: nobody edits it, so a change is damage."""
    text = f"{_SEALED}\n{text}"
    return f"{text}{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def _holds(text: str) -> bool:
    content, mark, digest = text.rpartition(_SEAL)
    if not mark:
        return not text.startswith(_SEALED)
    return hashlib.sha256(content.encode()).hexdigest() == digest.strip()


def differences(old: BaseModel, new: BaseModel) -> dict[str, tuple[Any, Any]]:
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


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: {"train": {"seed": 1}} -> {"train.seed": 1}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
