"""Readers of what people have: text files, tables, JSON lines, Parquet, Hugging Face datasets.

All recipes read through these functions, so all have the same guarantees. `.gz` and `.zst` are
unpacked. A file that is cut off, empty although it should be an archive, or not UTF-8 but UTF-16 is
an error that names it; so is a quote that is never closed. A single line that cannot be read is a
`Problem`, which the caller counts or refuses.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard

from gradvac.utils.hints import install_line

HUB = "hf:"
_PACKED = (".gz", ".zst")
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_PACKED_AT_ONCE = 1 << 10  # what a kilobyte unpacks to still fits into memory, whatever it is
_START = 1 << 12  # bytes that show the encoding
UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError, UnicodeError)


class Problem(StrEnum):
    """Why a line or row could not be read."""

    NOT_UTF8 = "not UTF-8"
    MALFORMED = "malformed"


def suffix_of(path: Path) -> str:
    """The suffix that names the format, without `.gz` and `.zst`."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _PACKED]
    return suffixes[-1] if suffixes else ""


def open_text(path: Path) -> io.BufferedIOBase:
    """Open a file for reading bytes, unpacking `.gz` and `.zst`; a cut-off one is an EOFError."""
    if path.suffix in _PACKED and path.stat().st_size == 0:
        raise EOFError("it is empty, and so not even an archive")
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return path.open("rb")


def read_lines(path: Path) -> Iterator[str | Problem]:
    """Read lines, without their ends; a problem for a line that is not text.

    Raises:
        ValueError: The file is cut off or damaged, or in another encoding than UTF-8.
    """
    try:
        with open_text(path) as file:
            assert isinstance(file, io.BufferedReader | gzip.GzipFile)
            check_encoding(file.peek(_START)[:_START])
            for number, raw in enumerate(file):
                try:
                    text = raw.decode("utf-8-sig" if number == 0 else "utf-8")
                except UnicodeDecodeError:
                    yield Problem.NOT_UTF8
                else:
                    yield Problem.MALFORMED if "\0" in text else text.rstrip("\r\n")
    except UNREADABLE as error:
        raise cut_off(path, error) from error


def read_all_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read numbered lines of a file of which none may be unreadable.

    Raises:
        ValueError: As `read_lines`, or a line is not text.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if isinstance(line, Problem):
            raise ValueError(
                f"data: {path}, line {number}: is {line.value}; convert the file, as in "
                "`iconv -f LATIN1 -t UTF-8`, or take the line out."
            )
        yield number, line


def cut_off(path: Path, error: object) -> ValueError:
    """The error for a file that cannot be read to its end."""
    return ValueError(f"data: {path} cannot be read to its end: {error}.")


class _ZstdFile(io.RawIOBase):
    """A `.zst` file, unpacked: all its frames, of which the last must be complete."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._unpacked = b""
        self._blocks = self._unpack()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        while not self._unpacked:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._unpacked = block
        part = self._unpacked[: len(view)]
        self._unpacked = self._unpacked[len(part) :]
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _unpack(self) -> Iterator[bytes]:
        frame, packed = None, b""
        while packed := packed or self._file.read(_PACKED_AT_ONCE):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        if frame is not None:
            raise EOFError("it is cut off")


def check_encoding(start: bytes) -> None:
    """Refuse two or four bytes a character: it would pass for UTF-8 full of NUL characters."""
    if start.startswith(_WIDE) or 4 * start.count(0) > len(start):
        raise UnicodeError(
            "it is not UTF-8 but UTF-16 or UTF-32; convert it, as in `iconv -f UTF-16 -t UTF-8`"
        )


def read_cells(path: Path) -> Iterator[list[str] | Problem]:
    """Read the rows of a table: `.csv` with commas and quotes, or else tabs without quotes."""
    if suffix_of(path) == ".csv":
        yield from _read_csv(path)
        return
    for line in read_lines(path):
        yield line if isinstance(line, Problem) else line.split("\t")


def _read_csv(path: Path) -> Iterator[list[str] | Problem]:
    """A quoted cell may go over several lines.

    Raises:
        ValueError: A quote is never closed: all that follows would be one cell.
    """
    problems: list[Problem] = []
    num_lines, is_over = 0, False

    def lines() -> Iterator[str]:
        nonlocal num_lines, is_over
        for line in read_lines(path):
            num_lines += 1
            if isinstance(line, Problem):
                problems.append(line)
            else:
                yield f"{line}\n"
        is_over = True

    rows = csv.reader(lines(), strict=True)
    while True:
        before, is_broken = num_lines, False
        try:
            row = next(rows, None)
        except csv.Error as error:
            if is_over:
                raise ValueError(
                    f"data: {path}: the row that begins in line {before + 1:,} has a quote that is "
                    "never closed; close it, or write the quote twice if it is part of the text."
                ) from error
            # Every line that was taken for a part of the broken row is lost with it.
            problems += [Problem.MALFORMED] * (num_lines - before - len(problems))
            row, is_broken = [], True
        yield from problems
        problems.clear()
        if row is None:
            return
        if not is_broken:
            yield row or [""]


def read_json_lines(path: Path) -> Iterator[Any]:
    """Read JSON lines: whatever each holds, or a problem.

    Raises:
        ValueError: The file is one JSON array.
    """
    for number, line in enumerate(read_lines(path)):
        if isinstance(line, Problem):
            yield line
            continue
        if number == 0 and line.lstrip().startswith("["):
            raise ValueError(
                f"data: {path} is one JSON array; write one object per line, as "
                f"`jq -c '.[]' {path.name}` does."
            )
        try:
            yield json.loads(line, object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            yield Problem.MALFORMED


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def read_parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read the rows of a Parquet file: those of these columns that it has, or else all."""
    parquet = import_package("pyarrow.parquet", f"data: {path}")
    try:
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=wanted or None):
                yield from batch.to_pylist()
    except (OSError, importlib.import_module("pyarrow").ArrowInvalid) as error:
        raise cut_off(path, error) from error


def load_dataset(source: str, root: Path) -> Any:
    """A split of a Hugging Face dataset, `hf:NAME:CONFIG:SPLIT`.

    NAME is a name on the hub, or a folder; of a single `Dataset` that `save_to_disk` wrote there
    are no splits: hf:FOLDER::.
    """
    datasets = import_package("datasets", f"data: {source}")
    parts = source.removeprefix(HUB).split(":")
    if len(parts) != 3:
        raise ValueError(f"data: {source} must be hf:NAME:CONFIG:SPLIT (CONFIG may be empty).")
    name, config, split = parts
    folder = root / name
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        rows = datasets.load_from_disk(str(folder))
        splits = list(rows) if isinstance(rows, dict) else [""]
        if split not in splits:
            there = ", ".join(splits) if splits != [""] else "no splits: write hf:FOLDER::"
            raise ValueError(f"data: {source}: there is no split {split!r}; there are {there}.")
        return rows[split] if split else rows
    place = str(folder) if folder.is_dir() else name
    try:
        return datasets.load_dataset(place, config or None, split=split)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"data: {source} cannot be loaded ({reason}); give a folder that save_to_disk wrote, "
            "or a name on the hub if it can be reached."
        ) from error


def import_package(name: str, what: str) -> Any:
    """Import an optional package; its absence is an error that says what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ValueError(
            f"{what} needs the package `{package}`; {install_line('datasets')}."
        ) from None


def read_rows(source: str, path: Path | None, root: Path, columns: Sequence[str]) -> Iterable[Any]:
    """Read rows that name their fields: a dataset, JSON lines, or Parquet.

    Args:
        source: `hf:NAME:CONFIG:SPLIT`, if there is no file.
        path: The file.
        root: What folders of datasets are relative to.
        columns: The fields that are wanted.
    """
    if path is None:
        return load_dataset(source, root)  # type: ignore[no-any-return]
    return read_parquet(path, columns) if suffix_of(path) == ".parquet" else read_json_lines(path)


class LenientReader:
    """Reads lines to translate or to tag; what is not UTF-8 is replaced by marks.

    Attributes:
        num_replaced: Lines with such marks so far.
    """

    def __init__(self) -> None:
        self.num_replaced = 0

    def read(self, paths: Iterable[Path]) -> Iterator[str]:
        """The lines of files, one after the other, without their ends; `-` is standard input."""
        for path in paths:
            is_input = str(path) == "-"
            try:
                with nullcontext(sys.stdin.buffer) if is_input else open_text(path) as file:
                    first = file.readline()
                    check_encoding(first)
                    yield from self._decode(chain([first] if first else [], file))
            except UNREADABLE as error:
                raise ValueError(f"{path}: cannot be read to its end: {error}.") from error

    def _decode(self, lines: Iterable[bytes]) -> Iterator[str]:
        for number, raw in enumerate(lines):
            encoding = "utf-8-sig" if number == 0 else "utf-8"
            try:
                text = raw.decode(encoding)
            except UnicodeDecodeError:
                self.num_replaced += 1
                text = raw.decode(encoding, errors="replace")
            yield text.rstrip("\r\n")
