"""pydantic's validation errors in our words: one line for each mistake, with its origin."""

import re
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

import pydantic
from pydantic import BaseModel

from gradvac.hints import nearest

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


def explain(
    error: pydantic.ValidationError,
    model_class: type[BaseModel],
    *,
    file: str,
    origins: Mapping[tuple[str, ...], str],
) -> list[str]:
    """One line per mistake.

    Args:
        error: What pydantic found.
        model_class: The model it validated.
        file: Name of the file the settings came from.
        origins: Key path -> the override that set it.
    """
    mistakes: dict[tuple[Keys, Any], list[str]] = {}
    for mistake in error.errors():
        keys, owner = _locate(mistake["loc"], model_class)
        message = _say(mistake, keys, owner)
        keys, message = _move_key(keys, message, mistake["type"], model_class)
        # A value that fits no member of a union is one mistake, which pydantic reports per member.
        mistakes.setdefault((keys, repr(mistake["input"])), []).append(message)
    lines = []
    for (keys, _), messages in mistakes.items():
        path = ".".join(map(str, keys))
        start = f"{_origin(keys, file, origins)}: {path}".removesuffix(": ")
        lines.append(f"{start}: {_join(messages)}")
    return lines


def _say(mistake: Any, keys: Keys, owner: type[BaseModel]) -> str:
    kind, given, context = mistake["type"], mistake["input"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(keys[-1]), owner.model_fields)}"
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
    annotation: Any = model_class
    for one in keys:
        annotation = next(iter(_members(_inner(annotation, one))), None)
    if kind == "value_error" and colon and _is_model(annotation) and key in annotation.model_fields:
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


def _locate(loc: Keys, model_class: type[BaseModel]) -> tuple[Keys, type[BaseModel]]:
    """Key path without the tags pydantic adds inside unions, and the model that owns the key."""
    keys: list[str | int] = []
    members: list[Any] = [model_class]
    owner = model_class
    tagged = False
    for item in loc:
        if tagged:
            tagged = False
            continue
        owner = next((m for m in members if _is_model(m)), owner)
        keys.append(item)
        members = [inner for m in members for inner in _members(_inner(m, item))]
        tagged = len(members) > 1
    return tuple(keys), owner


def _inner(annotation: Any, key: str | int) -> Any:
    """The type of what a key of this type holds; None where there is no such."""
    if _is_model(annotation):
        field = annotation.model_fields.get(key)
        return None if field is None else field.annotation
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return arguments[0] if get_origin(annotation) in (list, tuple) else None


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not types.NoneType]
    return [] if annotation is None else [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
