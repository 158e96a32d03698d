"""Files with a seal: what was written is known by size and hash, so that damage is told.

Every step of the preparation leaves a JSON file with what it did, the seals of its files, and a
hash of itself. `prepare` reads and compares all contents. Training, which may start often on a
large corpus, compares sizes always, and contents only where a file's times or its place on the
disk are not those of the moment it was sealed; what it has compared once it remembers in
`.verified.jsonl`. So a start costs a look at each file, a copied folder is read through once, and
whatever touches a file later is noticed. A disk that changes bits on its own is noticed by
`prepare`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from gradvac.lab.runs import files

Seal = dict[str, Any]
_CHECK = "check"
_VERIFIED = ".verified.jsonl"


class SealedFile:
    """A file being written, and its hash so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size = file, hashlib.blake2b(digest_size=16), 0

    def write(self, content: bytes) -> int:
        """Append."""
        self._digest.update(content)
        self._size += len(content)
        return self._file.write(content)

    def seal(self, path: Path) -> Seal:
        """The seal of what was written, once it is at its place."""
        return {"size": self._size, "hash": self._digest.hexdigest(), "stamp": stamp(path)}


@contextmanager
def sealing(path: Path) -> Iterator[SealedFile]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    with files.replacing(path) as file:
        yield SealedFile(file)


def write_columns(
    paths: Sequence[Path], rows: Iterable[Sequence[str]]
) -> tuple[str, dict[Path, Seal]]:
    """Write every column of the rows to a file of its own; a hash of them all, and the seals."""
    digest = hashlib.blake2b(digest_size=16)
    with ExitStack() as stack:
        columns = [stack.enter_context(sealing(path)) for path in paths]
        for row in rows:
            for column, text in zip(columns, row, strict=True):
                line = text.encode() + b"\n"
                digest.update(line)
                column.write(line)
    seals = {path: column.seal(path) for path, column in zip(paths, columns, strict=True)}
    return digest.hexdigest(), seals


def read_columns(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Read the two columns that `write_columns` wrote."""
    first, second = map(read_lines, paths)
    return zip(first, second, strict=True)


def read_lines(path: Path) -> Iterator[str]:
    """Read one column of it."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line[:-1]


def stamp(path: Path) -> list[int]:
    """What changes with any change of a file, or when it is another file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def is_intact(path: Path, seal: Seal) -> bool:
    """Whether a file holds what was written; reads all of it."""
    return (
        path.is_file()
        and path.stat().st_size == seal["size"]
        and files.hash_file(path) == seal["hash"]
    )


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON object with its own hash."""
    files.write_json(path, {**facts, _CHECK: files.hash_of(facts)})


def read_facts(path: Path) -> dict[str, Any]:
    """Read what `write_facts` wrote; an empty object if it is missing or damaged."""
    facts = files.read_json(path)
    check = facts.pop(_CHECK, None)
    return facts if check == files.hash_of(facts) else {}


class SealedFolder:
    """The files of a folder, each compared with its seal before it is used.

    Args:
        folder: Where they are.
        seals: Name -> seal.
        remedy: What to do about a damaged file.
    """

    def __init__(self, folder: Path, seals: Mapping[str, Seal], *, remedy: str) -> None:
        self._folder, self._seals, self._remedy = folder, seals, remedy
        self._verified = _read_verified(folder / _VERIFIED)

    def __getitem__(self, name: str) -> Path:
        """The path of a file that is as it was written.

        Raises:
            ValueError: It is missing or damaged.
        """
        path, seal = self._folder / name, self._seals.get(name)
        if seal is None:
            raise ValueError(f"data: nothing is known of {path}; {self._remedy}.")
        try:
            mark = stamp(path)
            if mark[0] != seal["size"]:
                what = f"has {mark[0]:,} bytes instead of {seal['size']:,}"
            elif mark == seal["stamp"] or self._verified.get(name) == [mark, seal["hash"]]:
                return path
            elif files.hash_file(path) == seal["hash"]:
                self._remember(name, [mark, seal["hash"]])
                return path
            else:
                what = "is not what was written"
        except OSError as error:
            what = f"cannot be read ({error.strerror})"
        raise ValueError(f"data: {path} {what}; {self._remedy}.")

    def _remember(self, name: str, mark_and_hash: list[Any]) -> None:
        """Add a line; one that is cut off by a kill counts for nothing."""
        self._verified[name] = mark_and_hash
        line = json.dumps({name: mark_and_hash}).encode() + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with suppress(OSError):  # a folder that may only be read is compared every time
            descriptor = os.open(self._folder / _VERIFIED, flags, 0o666)
            try:
                os.write(descriptor, b"\n" + line)
            finally:
                os.close(descriptor)


def _read_verified(path: Path) -> dict[str, Any]:
    verified: dict[str, Any] = {}
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, TypeError, RecursionError):
                verified |= json.loads(line)
    return verified
