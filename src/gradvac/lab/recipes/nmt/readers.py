"""Readers: sentence pairs from the files people have.

A *source* is a file name with placeholders, or one of two schemes:

    train.{lang}.gz             two files, line i of one translates line i of the other (Moses)
    train.{pair}.tsv            two columns in the order of the pair's name, or of `data.columns`;
                                .csv likewise, with commas and quotes
    all.tsv.zst                 columns named in a header line, or in `data.columns`; empty cells
                                are gaps
    news.jsonl                  {"en": ..., "fr": ...}, also under "translation"
    memory.tmx.gz               translation memory
    news.parquet                columns "en" and "fr", or a column "translation" that holds both
    hf:NAME:CONFIG:SPLIT        a Hugging Face dataset, or a folder of one, as hf:FOLDER::SPLIT; a
                                single saved `Dataset` has no splits: hf:FOLDER::
    constructed:SPLIT           the constructed languages; constructed:FILE.toml:SPLIT for your own

`{pair}` stands for "en-fr", `{xx}` for its second language, `{lang}` for either. `.gz` and `.zst`
are unpacked while reading. Text is UTF-8. A file that is cut off, names its languages otherwise or
does not name them at all is refused, and so is one of which more than a hundredth is not UTF-8; a
row that cannot be read is counted.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gradvac.lab.languages import PIVOT, Corpus, default_corpus, load_corpus
from gradvac.lab.languages.real import LANGUAGES
from gradvac.lab.recipes.common.readers import (
    HUB,
    UNREADABLE,
    Problem,
    cut_off,
    open_text,
    read_cells,
    read_lines,
    read_rows,
    suffix_of,
)
from gradvac.tasks import Direction
from gradvac.utils.files import replacing

Pair = tuple[str, str]
Line = Pair | Problem
_KINDS = (".tsv", ".csv", ".jsonl", ".json", ".tmx", ".parquet")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_MOST_KEYS = 20
# Names that people give to columns, and that are no sentences.
_HEADINGS = {"source", "target", "src", "tgt", "trg", "text", "sentence", "translation", "id"}
_HEADINGS |= {language.name.casefold() for language in LANGUAGES.values()}
_WITH_REGION = re.compile(r"^([a-z]{2,3})[-_][a-z]{2,4}$")  # fr-fr, zh_hant
_STRAY_LINES, _STRAY_SHARE = 2, 0.01  # rows that may be in another encoding by accident
_LANG = "{http://www.w3.org/XML/1998/namespace}lang"


def read_pairs(
    source: str,
    first: str,
    second: str,
    *,
    root: Path,
    columns: Sequence[str] = (),
    is_shared: bool = False,
) -> Iterator[Line]:
    """Read the sentence pairs of two languages.

    Args:
        source: See the head of this module.
        first: Code of the language on the left.
        second: Code of the language on the right.
        root: What file names are relative to.
        columns: `data.columns`.
        is_shared: Whether other pairs are read from the same source. Two columns without a name
            cannot be all of them.

    Yields:
        (first, second), with every stretch of white space made one blank, or what was wrong.

    Raises:
        ValueError: A file is missing or cannot be what its name says.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "constructed":
        return _read_constructed(rest, first, second, root)
    paths = pair_files(source, first, second, root=root)
    if len(paths) == 2:
        return _read_moses(*paths)
    if paths and suffix_of(paths[0]) in (".tsv", ".csv"):
        is_named = not is_shared or _PLACEHOLDER.search(source) is not None
        return _read_table(paths[0], first, second, columns=columns, is_named=is_named)
    if paths and suffix_of(paths[0]) == ".tmx":
        return _from_rows(str(paths[0]), _read_tmx(paths[0]), first, second)
    name = fill(source, first, second, first)
    rows = read_rows(name, paths[0] if paths else None, root, (first, second, "translation"))
    return _from_rows(str(paths[0]) if paths else name, rows, first, second)


def check_characters(lines: Iterator[Line], where: str) -> Iterator[Line]:
    """Pass lines on, and refuse a source of which too much cannot be read."""
    problems: Counter[str] = Counter()
    num_read = 0
    for line in lines:
        num_read += 1
        if isinstance(line, Problem):
            problems[line.value] += 1
        yield line
    if not num_read:
        raise ValueError(f"data: {where} is empty; leave it out if there is nothing to read.")
    # A stray line is dropped and counted; this many are text in another encoding, and the lines
    # that happen to be readable would be a choice of those without accents.
    not_utf8 = problems[Problem.NOT_UTF8]
    if not_utf8 > max(_STRAY_LINES, _STRAY_SHARE * num_read):
        raise ValueError(
            f"data: {where}: {not_utf8:,} of {num_read:,} rows are not UTF-8, so it is in another "
            "encoding, at least in part; convert it, as in `iconv -f LATIN1 -t UTF-8`, or take "
            "those rows out."
        )
    if 2 * problems.total() > num_read:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in problems.most_common())
        raise ValueError(
            f"data: {where} is not what it should be: {reasons}, of {num_read:,} rows in all. "
            "`gradvac.lab.recipes.nmt.readers` says what each kind of file looks like."
        )


def pair_files(source: str, first: str, second: str, *, root: Path) -> list[Path]:
    """The files a source stands for: two (Moses), one, or none of ours (`hf:`)."""
    if source.startswith(HUB):
        return []
    scheme, _, rest = source.partition(":")
    if scheme == "constructed":
        file = rest.rpartition(":")[0]
        return [root / file] if file else []
    names = [fill(source, first, second, code) for code in (first, second)]
    paths = [root / name for name in dict.fromkeys(names)]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"data: no file {missing[0]} for {first}-{second}; it comes from {source!r} under "
            f"data.root = {str(root)!r}."
        )
    if len(paths) == 1 and suffix_of(paths[0]) not in _KINDS:
        raise ValueError(
            f"data: {paths[0]} is one file, but none of {', '.join(_KINDS)}; plain text needs "
            f"one file per language, with {{lang}} in the name: {source!r}."
        )
    return paths


def fill(source: str, first: str, second: str, code: str) -> str:
    """Replace `{pair}`, `{xx}` and `{lang}` by codes."""
    values = {"pair": Direction(first, second).name, "xx": second, "lang": code}
    unknown = [name for name in _PLACEHOLDER.findall(source) if name not in values]
    if unknown:
        raise ValueError(
            f"{{{unknown[0]}}} in {source!r} is none of {{pair}}, {{xx}} and {{lang}}."
        )
    return _PLACEHOLDER.sub(lambda match: values[match[1]], source)


def _read_moses(first: Path, second: Path) -> Iterator[Line]:
    counts = [0, 0]
    end = object()
    for left, right in zip_longest(read_lines(first), read_lines(second), fillvalue=end):
        counts[0] += left is not end
        counts[1] += right is not end
        if counts[0] == counts[1]:
            problems = [side for side in (left, right) if isinstance(side, Problem)]
            yield problems[0] if problems else _pair(str(left), str(right))
    if counts[0] != counts[1]:
        raise ValueError(
            f"data: {first} has {counts[0]:,} lines, but {second} has {counts[1]:,}; line i of one "
            "must be the translation of line i of the other."
        )


def _read_table(
    path: Path, first: str, second: str, *, columns: Sequence[str], is_named: bool
) -> Iterator[Line]:
    """Read two columns of a table, named by a header, by `data.columns`, or by the file's name.

    Where these contradict each other, or a row has another form, nothing is guessed.

    Args:
        path: The file: TSV without quotes, or CSV with them.
        first: Code of the language on the left.
        second: Code of the language on the right.
        columns: What the columns hold, by code; `{xx}` is the second language. Empty: a header
            says so, or else the two columns are in the order of the pair's name.
        is_named: Whether it is clear which pair the file holds.
    """
    names = [second if name == "{xx}" else name for name in columns]
    header: list[str] | None = None
    for cells in read_cells(path):
        if isinstance(cells, Problem):
            yield cells
            continue
        if header is None:
            header = _header(path, cells, names, first, second, is_named=is_named)
            if header == cells:
                continue
        if len(cells) > len(header) or (len(cells) == 1 and cells[0]) or cells == header:
            # As many cells as columns, or the text may be of another one. A header in the middle
            # is what is left where two files were put together.
            yield Problem.MALFORMED
            continue
        # Editors strip tabs at the end of a line: what is missing there is a gap.
        cells += [""] * (len(header) - len(cells))
        yield _pair(cells[header.index(first)], cells[header.index(second)])


def _header(
    path: Path, cells: list[str], names: list[str], first: str, second: str, *, is_named: bool
) -> list[str]:
    """What every column holds, from the first row."""
    named = [code for code in (first, second) if code in cells]
    twice = [code for code in named if cells.count(code) > 1]
    if twice:
        raise ValueError(f"data: the header of {path} names {twice[0]!r} twice; rename a column.")
    if names:
        if first not in names or second not in names:
            raise ValueError(
                f"data.columns: {names} has no {first!r} or no {second!r}, which {path} is read "
                "for; write {xx} for the language that is not the pivot."
            )
        if cells != names and (len(named) == 2 or len(cells) != len(names)):
            raise ValueError(
                f"data.columns: {names} was given, but {path} begins with {len(cells)} cells: "
                f"{_shown(cells)}."
            )
        expected = names
    elif len(named) == 2:
        return cells
    elif len(cells) == 2 and is_named:
        expected = [first, second]
    elif len(cells) == 1:
        mark = "commas" if suffix_of(path) == ".csv" else "tabs"
        raise ValueError(
            f"data: {path} starts with {_shown(cells)}, a single column; {mark} separate columns, "
            "as the end of its name says (.tsv: tabs, .csv: commas)."
        )
    else:
        raise ValueError(
            f"data: {path} starts with {len(cells)} column(s) and no header that names {first!r} "
            f"and {second!r}; give it such a header, or say what the columns hold, as in "
            f'data.columns = ["{first}", "{second}"].'
        )
    codes = {first.casefold(), second.casefold()} | _HEADINGS
    words = [_WITH_REGION.sub(r"\1", cell.strip().casefold()) for cell in cells]
    if cells != names and codes & set(words):
        raise ValueError(
            f"data: {path} begins with {_shown(cells)}, which looks like a header, but not like "
            f"one that names {first!r} and {second!r}; write those, or remove the line."
        )
    return expected


def _shown(cells: list[str]) -> str:
    return ", ".join(repr(cell[:20]) for cell in cells[:5])


def _read_tmx(path: Path) -> Iterator[dict[str, str]]:
    try:
        with open_text(path) as file:
            for _, unit in ElementTree.iterparse(file):
                if _name(unit) == "tu":
                    # The first variant of a language counts.
                    yield dict(reversed(list(_variants(unit))))
                    unit.clear()
    # Expat's words for an encoding that it does not know are errors of these kinds too.
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"data: {path} is not valid TMX: {error}.") from error
    except UNREADABLE as error:
        raise cut_off(path, error) from error


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


def _read_constructed(rest: str, first: str, second: str, root: Path) -> Iterator[Line]:
    file, _, split = rest.rpartition(":")
    corpus = _corpus(root / file if file else None)
    if split not in ("train", "dev", "test"):
        raise ValueError(f"data: constructed:{rest} must end in train, dev or test.")
    if PIVOT not in (first, second):
        raise ValueError(
            f"data: the constructed languages are paired with {PIVOT!r}; "
            f"{first}-{second} has no training pairs."
        )
    if first == PIVOT:
        yield from corpus.pairs(second, split)  # type: ignore[arg-type]
    else:
        yield from ((right, left) for left, right in corpus.pairs(first, split))  # type: ignore[arg-type]


@lru_cache(maxsize=2)
def _corpus(path: Path | None) -> Corpus:
    return default_corpus() if path is None else load_corpus(path)


def _from_rows(where: str, rows: Iterable[Any], first: str, second: str) -> Iterator[Line]:
    """Take pairs from mappings, or from the mappings under "translation".

    Raises:
        ValueError: Not a single one knows one of the languages.
    """
    keys: dict[str, None] = {}
    has_rows = False
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        if isinstance(row, dict) and isinstance(row.get("translation"), dict):
            row = row["translation"]
        if not isinstance(row, dict):
            yield Problem.MALFORMED
            continue
        has_rows = True
        if len(keys) < _MOST_KEYS or first not in keys or second not in keys:
            keys.update(dict.fromkeys(row))
        texts = [row.get(code) or "" for code in (first, second)]  # what is missing is a gap
        yield _pair(*texts) if all(isinstance(t, str) for t in texts) else Problem.MALFORMED
    for code in (first, second):
        if has_rows and code not in keys:
            there = ", ".join(repr(str(key)) for key in list(keys)[:_MOST_KEYS])
            raise ValueError(
                f"data: nothing in {where} is called {code!r}; there is {there}. Rename it there, "
                "or use these codes in data.languages."
            )


def _pair(left: str, right: str) -> Line:
    texts = " ".join(left.split()), " ".join(right.split())
    try:
        "".join(texts).encode()  # an escape may be half a character
    except UnicodeEncodeError:
        return Problem.NOT_UTF8
    return Problem.MALFORMED if "\0" in left + right else texts


# -- clean text, one file per side ----------------------------------------------------------------


def write_pairs(paths: Sequence[Path], pairs: Iterable[Pair]) -> str:
    """Write the two sides of pairs to a file each, line by line; a hash of them all."""
    digest = hashlib.blake2b(digest_size=16)
    with ExitStack() as stack:
        sides = [stack.enter_context(replacing(path)) for path in paths]
        for pair in pairs:
            for side, text in zip(sides, pair, strict=True):
                line = text.encode() + b"\n"
                digest.update(line)
                side.write(line)
    return digest.hexdigest()


def read_written_pairs(paths: Sequence[Path]) -> Iterator[Pair]:
    """Read what `write_pairs` wrote."""
    first, second = map(read_written, paths)
    return zip(first, second, strict=True)


def read_written(path: Path) -> Iterator[str]:
    """Read one side of it."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line[:-1]
