"""Small files written whole or not at all, and hashes of what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def hash_of(value: Any) -> str:
    """Hash anything JSON can say."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """Hash the contents of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; an empty one if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, value: Any) -> None:
    """Write an object."""
    write_bytes(path, json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")


def write_bytes(path: Path, contents: bytes) -> None:
    """Replace a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(contents)
    os.replace(part, path)


def read_lines(path: Path) -> Iterator[str]:
    """Read what `write_columns` wrote."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line[:-1]


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        yield file
    os.replace(part, path)
