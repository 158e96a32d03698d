"""Copies of files that a run needs wherever it is moved, such as a vocabulary.

Next to NAME is NAME.sha256, as `sha256sum` writes it: a copy is verified whenever it is read.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from gradvac.lab.runs.files import write_bytes, write_text


def keep_file(path: Path, content: bytes, *, is_new: bool) -> None:
    """Keep a copy, once; a damaged one is repaired. Only the holder of the folder's lock may.

    Args:
        path: Where it is kept.
        content: What it holds.
        is_new: Whether the run has not begun: what is there may be replaced.

    Raises:
        ValueError: The run was begun with another one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(content).hexdigest()
    there = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    sealed = _read_seal(path) or there
    if not is_new and sealed and sealed != digest:
        remedy = "choose a new run folder"
        if there == digest:  # the copy is the one given, so that the hash may be what is damaged
            remedy += f", or, if only {_seal(path).name} was damaged, remove that file"
        raise ValueError(f"run: {path.parent} was trained with another {path.name}; {remedy}.")
    if there != digest:
        write_bytes(path, content)
    if _read_seal(path) != digest:
        write_text(_seal(path), f"{digest}  {path.name}\n")


def read_kept(path: Path) -> bytes:
    """Read a copy.

    Raises:
        ValueError: It is missing, or not the one the run was begun with.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"run: {path} cannot be read ({error.strerror}); {_REMEDY}.") from error
    if hashlib.sha256(content).hexdigest() != _read_seal(path):
        raise ValueError(
            f"run: {path} is not what {_seal(path).name} says that the run was trained with; "
            f"{_REMEDY}."
        )
    return content


_REMEDY = "the command that trained the run, given again, puts it back"


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _read_seal(path: Path) -> str:
    """The hash; empty if there is none, or if it is not a hash: the copy is then trusted."""
    try:
        digest = _seal(path).read_text(encoding="utf-8").partition(" ")[0]
    except (OSError, ValueError):
        return ""
    return digest if re.fullmatch("[0-9a-f]{64}", digest) else ""
