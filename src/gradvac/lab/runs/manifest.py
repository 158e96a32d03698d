"""One manifest of checksums for a folder: which files were written, and what they held.

    manifest.json    {"model.safetensors": {"sha256": "9f2c...", "bytes": 1024}, ...}

Whoever writes a folder calls `write_manifest` last; whoever reads it calls `verify_manifest`
first. Checkpoints, prepared data and what a run saves beside its weights all use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from gradvac.utils.files import read_json, write_json

MANIFEST = "manifest.json"
_REMEDY = "restore the file, or write the folder again"


class Checksum(TypedDict):
    """What a manifest says of one file."""

    sha256: str
    bytes: int


def checksum_file(path: Path) -> Checksum:
    """Read a file, and describe what it holds."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "bytes": file.tell()}


def write_manifest(folder: Path, files: Iterable[str] | None = None) -> None:
    """Write the manifest of a folder, atomically.

    Args:
        folder: The folder.
        files: Names relative to it; None: all its files, in subfolders too, but hidden ones.
    """
    names = _find_files(folder) if files is None else sorted(files)
    write_json(folder / MANIFEST, {name: checksum_file(folder / name) for name in names})


def read_manifest(folder: Path) -> dict[str, Checksum]:
    """The manifest of a folder; empty if it is missing or damaged."""
    manifest = read_json(folder / MANIFEST)
    are_entries = (
        isinstance(one, dict) and set(one) == {"sha256", "bytes"} for one in manifest.values()
    )
    return manifest if all(are_entries) else {}


def verify_manifest(
    folder: Path,
    files: Iterable[str] | None = None,
    *,
    remedy: str = _REMEDY,
) -> None:
    """Compare files with the manifest of their folder.

    Args:
        folder: The folder.
        files: Names relative to it; None: all that the manifest lists.
        remedy: What the error advises.

    Raises:
        ValueError: The manifest is missing or does not list a file, or a file is missing or does
            not hold what was written. Names the first such file and the remedy.
    """
    damage = find_damage(folder, files)
    if damage is not None:
        name, what = damage
        raise ValueError(f"{folder / name} {what}; {remedy}.")


def find_damage(folder: Path, files: Iterable[str] | None = None) -> tuple[str, str] | None:
    """The first file that is not as its manifest says, and what is wrong; None: all are intact.

    The arguments are those of `verify_manifest`.
    """
    manifest = read_manifest(folder)
    if not manifest:
        return MANIFEST, "is missing or damaged"
    for name in manifest if files is None else files:
        path = folder / name
        try:
            if name not in manifest:
                return name, f"is not in {MANIFEST}"
            if path.stat().st_size != manifest[name]["bytes"]:
                size, expected = path.stat().st_size, manifest[name]["bytes"]
                return name, f"has {size} bytes instead of {expected}"
            if checksum_file(path) != manifest[name]:
                return name, "is not what was written: its SHA-256 differs"
        except OSError as error:
            return name, f"cannot be read ({error.strerror})"
    return None


def _find_files(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return sorted(path.as_posix() for path in visible if path.as_posix() != MANIFEST)
