"""Readers: sentence pairs from the files people have.

A *source* is a file name with placeholders, or one of two schemes:

    train.{lang}.gz             two files, line i of one translates line i of the other (Moses)
    train.{pair}.tsv            columns (first language, second language), no header
    all.tsv.zst                 columns named in a header line; empty cells are gaps
    news.jsonl                  {"en": ..., "fr": ...}, also under "translation"
    memory.tmx.gz               translation memory
    hf:NAME:CONFIG:SPLIT        a Hugging Face dataset, if `datasets` is installed
    constructed:SPLIT           the constructed languages; constructed:FILE.toml:SPLIT for your own

`{pair}` stands for "en-fr", `{xx}` for its second language, `{lang}` for either. `.gz` and `.zst`
are unpacked while reading.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import zstandard

from gradvac import corpora


class Problem(StrEnum):
    """Why a pair could not be read."""

    NOT_UTF8 = "not UTF-8"
    MALFORMED = "malformed"


Line = tuple[str, str] | Problem
_LANG = "{http://www.w3.org/XML/1998/namespace}lang"


def read_pairs(source: str, first: str, second: str, *, root: Path) -> Iterator[Line]:
    """Read the sentence pairs of two languages.

    Args:
        source: See the head of this module.
        first: Code of the language on the left.
        second: Code of the language on the right.
        root: What file names are relative to.

    Yields:
        (first, second), with every stretch of white space made one blank, or what was wrong.

    Raises:
        ValueError: A file is missing or cannot be what its name says.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "hf":
        return _read_hf(rest, first, second, root)
    if scheme == "constructed":
        return _read_constructed(rest, first, second, root)
    paths = files_of(source, first, second, root=root)
    if len(paths) == 2:
        return _read_moses(*paths)
    reader = _READERS[_kind(paths[0])]
    return reader(paths[0], first, second)


def files_of(source: str, first: str, second: str, *, root: Path) -> list[Path]:
    """List the files a source stands for: two (Moses), one, or none of ours (`hf:`)."""
    scheme, _, rest = source.partition(":")
    if scheme == "hf":
        return []
    if scheme == "constructed":
        file = rest.rpartition(":")[0]
        return [root / file] if file else []
    names = [
        source.format(pair=f"{first}-{second}", xx=second, lang=code) for code in (first, second)
    ]
    paths = [root / name for name in dict.fromkeys(names)]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"data: no file {missing[0]} for {first}-{second}; it comes from {source!r} under "
            f"data.root = {str(root)!r}."
        )
    if len(paths) == 1 and _kind(paths[0]) not in _READERS:
        raise ValueError(
            f"data: {paths[0]} is one file, but neither .tsv, .jsonl nor .tmx; plain text needs "
            f"one file a language, with {{lang}} in the name: {source!r}."
        )
    return paths


def open_text(path: Path) -> io.BufferedIOBase:
    """Open a file for reading bytes, unpacking `.gz` and `.zst`."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(
            zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True)
        )
    return path.open("rb")


def raw_lines(path: Path) -> Iterator[str | None]:
    """Read lines, without their ends; None for a line that is not UTF-8."""
    try:
        with open_text(path) as file:
            for number, raw in enumerate(file):
                try:
                    text = raw.decode("utf-8-sig" if number == 0 else "utf-8")
                except UnicodeDecodeError:
                    yield None
                else:
                    yield text.rstrip("\r\n")
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise ValueError(f"data: {path} cannot be read to its end: {error}.") from error


def _kind(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    return suffixes[-1] if suffixes else ""


def _read_moses(first: Path, second: Path) -> Iterator[Line]:
    counts = [0, 0]
    end = object()
    for left, right in zip_longest(raw_lines(first), raw_lines(second), fillvalue=end):
        counts[0] += left is not end
        counts[1] += right is not end
        if counts[0] == counts[1]:
            yield _pair(left, right)
    if counts[0] != counts[1]:
        raise ValueError(
            f"data: {first} has {counts[0]:,} lines, but {second} has {counts[1]:,}; line i of one "
            "must be the translation of line i of the other."
        )


def _read_tsv(path: Path, first: str, second: str) -> Iterator[Line]:
    columns: tuple[int, int] | None = None
    for line in raw_lines(path):
        if line is None:
            yield Problem.NOT_UTF8
            continue
        cells = line.split("\t")
        if columns is None:
            columns = (0, 1)
            if first in cells and second in cells:
                columns = (cells.index(first), cells.index(second))
                continue
            if len(cells) != 2:
                raise ValueError(
                    f"data: {path} starts with {len(cells)} column(s) and no header that names "
                    f"{first!r} and {second!r}; give it such a header, or two columns."
                )
        if len(cells) == 1 and line:
            yield Problem.MALFORMED
        else:
            # Editors strip tabs at the end of a line: what is missing there is a gap.
            left, right = (cells[column] if column < len(cells) else "" for column in columns)
            yield _pair(left, right)


def _read_jsonl(path: Path, first: str, second: str) -> Iterator[Line]:
    for line in raw_lines(path):
        if line is None:
            yield Problem.NOT_UTF8
            continue
        try:
            pair = _from_row(json.loads(line), first, second)
            "".join(pair).encode()  # an escape may be half a character
        except json.JSONDecodeError:
            yield Problem.MALFORMED
        except UnicodeEncodeError:
            yield Problem.NOT_UTF8
        else:
            yield pair


def _read_tmx(path: Path, first: str, second: str) -> Iterator[Line]:
    try:
        with open_text(path) as file:
            for _, unit in ElementTree.iterparse(file):
                if _name(unit) == "tu":
                    # The first variant of a language counts.
                    texts = dict(reversed(list(_variants(unit))))
                    yield _from_row(texts, first, second)
                    unit.clear()
    except ElementTree.ParseError as error:
        raise ValueError(f"data: {path} is not valid TMX: {error}.") from error


def _variants(unit: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Language and text of a unit's variants; "en-GB" counts as "en" too."""
    for variant in unit:
        if _name(variant) != "tuv":
            continue
        code = (variant.get(_LANG) or variant.get("lang") or "").lower().replace("_", "-")
        segments = [child for child in variant if _name(child) == "seg"]
        text = "".join(segments[0].itertext()) if segments else ""
        yield code, text
        yield code.partition("-")[0], text


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _read_hf(rest: str, first: str, second: str, root: Path) -> Iterator[Line]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"data: hf:{rest} needs the package `datasets`; pip install datasets."
        ) from None
    parts = rest.format(pair=f"{first}-{second}", xx=second, lang=first).split(":")
    if len(parts) != 3:
        raise ValueError(f"data: hf:{rest} must be hf:NAME:CONFIG:SPLIT (CONFIG may be empty).")
    name, config, split = parts
    if (root / name).is_dir():
        rows = datasets.load_from_disk(str(root / name))[split]
    else:
        rows = datasets.load_dataset(name, config or None, split=split)
    return (_from_row(row, first, second) for row in rows)


def _read_constructed(rest: str, first: str, second: str, root: Path) -> Iterator[Line]:
    file, _, split = rest.rpartition(":")
    corpus = _corpus(root / file if file else None)
    if corpora.PIVOT not in (first, second):
        raise ValueError(
            f"data: the constructed languages are paired with {corpora.PIVOT!r}; "
            f"{first}-{second} has no training pairs."
        )
    if first == corpora.PIVOT:
        yield from corpus.pairs(second, split)  # type: ignore[arg-type]
    else:
        yield from ((right, left) for left, right in corpus.pairs(first, split))  # type: ignore[arg-type]


@lru_cache(maxsize=2)
def _corpus(path: Path | None) -> corpora.Corpus:
    return corpora.default() if path is None else corpora.load(path)


def _from_row(row: Any, first: str, second: str) -> Line:
    """Take a pair from a mapping, or from the mapping under "translation"."""
    if isinstance(row, dict) and isinstance(row.get("translation"), dict):
        row = row["translation"]
    if not isinstance(row, dict):
        return Problem.MALFORMED
    found = [row.get(code) or "" for code in (first, second)]
    if not all(isinstance(text, str) for text in found):
        return Problem.MALFORMED
    return _pair(*found)


def _pair(left: Any, right: Any) -> Line:
    if left is None or right is None:
        return Problem.NOT_UTF8
    return " ".join(left.split()), " ".join(right.split())


_READERS = {
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".tmx": _read_tmx,
}
