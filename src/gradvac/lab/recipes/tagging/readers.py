"""Readers: sentences of words and tags.

A source is a path with `{lang}` (or `{split}` and `{lang}`), relative to `data.root`; `.gz` is
unpacked. Its format follows from its name, or from `data.format`:

    conllu      CoNLL-U (.conllu): FORM and UPOS. Lines of multi-word tokens (3-4) and of empty
                nodes (8.1) are not words: their parts are, or they are not written.
    columns     word and tag in two columns, separated by a tab; a blank line ends a sentence.
                WikiAnn's `fr:word` is read as `word`, if all words of the file have that form.
    conll       word first and tag last, separated by spaces or tabs (CoNLL 2002, 2003), the same
                number of columns in every line; comment lines (`# ...`) are skipped and counted.

Lines `-DOCSTART-` of the last two are skipped and counted.

    constructed:SPLIT       the constructed languages with their parts of speech;
    constructed-names:SPLIT     with the names of people as entities
    hf:NAME:CONFIG:SPLIT    a Hugging Face dataset with `tokens` and `ner_tags`, `upos` or
                `pos_tags`, if `datasets` is installed and the data can be reached; or a folder
                that `save_to_disk` wrote.

A line that cannot be read is an error that names file and line: nothing is skipped silently.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

from gradvac.hints import some
from gradvac.lab.languages import Corpus, default_corpus, part_of_speech
from gradvac.lab.recipes.tagging.hub import read_dataset
from gradvac.lab.recipes.tagging.sentences import Reading, Sentence

Format = Literal["auto", "conllu", "columns", "conll"]
_DOCUMENT = "-DOCSTART-"
_LANGUAGE_MARK = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*:")
_NOT_A_WORD = re.compile(r"\d+-\d+|\d+\.\d+")


def read_sentences(source: str, lang: str, split: str, *, root: Path, form: Format) -> Reading:
    """Read the sentences of a language.

    Args:
        source: See above.
        lang: Its code, which replaces `{lang}`.
        split: "train", "dev" or "test", which replaces `{split}`.
        root: What paths are relative to.
        form: The format; "auto": by the file name.

    Raises:
        ValueError: There is no such file, or a line is not what it should be.
    """
    paths = files_of(source, lang, split, root=root)
    if not paths:
        name = _name(source, lang, split)
        return read_dataset(name, root) if name.startswith("hf:") else _read_constructed(name, lang)
    reading = _READERS[_format(paths[0]) if form == "auto" else form](paths[0])
    return _without_language(reading, f"{lang}:", paths[0])


def files_of(source: str, lang: str, split: str, *, root: Path) -> list[Path]:
    """The file of a source, in a list; empty for datasets and constructed languages."""
    name = _name(source, lang, split)
    return [] if is_no_file(name) else [_find_file(name, root, lang)]


def is_no_file(source: str) -> bool:
    """Whether a source is something other than a file."""
    return source.startswith(("hf:", "constructed:", "constructed-names:"))


def _name(source: str, lang: str, split: str) -> str:
    return source.replace("{lang}", lang).replace("{split}", split)


def _find_file(name: str, root: Path, lang: str) -> Path:
    """The file of a language; if it is missing, the error says what is there."""
    path = root / name
    if path.is_file():
        return path
    folder = path.parent
    if folder.is_dir():
        there = f"the folder holds {some(sorted(p.name for p in folder.iterdir()), 12)}"
    elif folder.parent.is_dir():
        there = f"{folder.parent} holds {some(sorted(p.name for p in folder.parent.iterdir()), 12)}"
    else:
        there = f"there is no folder {folder.parent} either"
    raise ValueError(
        f"data: no file {path} for language {lang!r}; {there}. Set data.root, or leave the "
        "language out of data.languages."
    )


def open_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their line ends."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"data: {path}, line {number}: is not UTF-8 ({error}); convert "
                        "the file, as in `iconv -f LATIN1 -t UTF-8`."
                    ) from None
                yield number, text.rstrip("\r\n")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"data: {path} cannot be read to its end: {error}.") from error


def _format(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return {".conllu": "conllu", ".conll": "conll"}.get(suffixes[-1] if suffixes else "", "columns")


def _blocks(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Lines between blank lines; several blank lines in a row make no empty block."""
    block: list[tuple[int, str]] = []
    for number, line in open_lines(path):
        if line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _read_conllu(path: Path) -> Reading:
    reading = Reading()
    for block in _blocks(path):
        words, tags = [], []
        for number, line in block:
            if line.startswith("#"):
                continue
            cells = line.split("\t")
            if len(cells) != 10 or not cells[1]:
                raise ValueError(
                    f"data: {path}, line {number}: CoNLL-U has 10 columns and a word in the "
                    f"second, but this is {line[:60]!r}."
                )
            if _NOT_A_WORD.fullmatch(cells[0]):
                kind = "multi-word tokens" if "-" in cells[0] else "empty nodes"
                reading.skipped[f"lines of {kind}"] += 1
                continue
            words.append(cells[1])
            tags.append(cells[3])
        reading.add(words, tags)
    return reading


def read_columns(path: Path) -> Reading:
    """Read words and tags in two columns, unchanged."""
    reading = Reading()
    for block in _blocks(path):
        cells = [_two_cells(path, number, line) for number, line in block]
        words = [(word, tag) for word, tag in cells if word != _DOCUMENT]
        reading.skipped["document marks"] += len(cells) - len(words)
        if words:
            reading.add([word for word, _ in words], [tag for _, tag in words])
    return reading


def _two_cells(path: Path, number: int, line: str) -> tuple[str, str]:
    cells = line.split("\t")
    if len(cells) != 2 or not cells[0] or not cells[1].strip():
        raise ValueError(
            f"data: {path}, line {number}: must be a word, a tab and a tag, but is {line[:60]!r}."
        )
    return cells[0], cells[1].strip()


def _without_language(reading: Reading, mark: str, path: Path) -> Reading:
    """Remove WikiAnn's `fr:` from the words, if all have it."""
    words = [word for sentence in reading.sentences for word in sentence.words]
    marks = {match[0] if (match := _LANGUAGE_MARK.match(word)) else "" for word in words}
    if len(words) > 1 and len(marks) == 1 and not marks & {mark, ""}:
        raise ValueError(
            f"data: {path}: all words begin with {marks.pop()!r}, as in WikiAnn, but the language "
            f"is {mark[:-1]!r}; give the file of that language, or take the marks out."
        )
    num_marked = sum(word.startswith(mark) for word in words)
    if 2 * num_marked <= len(words):  # a colon in some words means nothing
        return reading
    if num_marked < len(words) or mark in words:
        raise ValueError(
            f"data: {path}: {num_marked:,} of {len(words):,} words begin with {mark!r}, as in "
            "WikiAnn, but not all, or nothing follows it; fix the file."
        )
    sentences = [
        Sentence(tuple(word.removeprefix(mark) for word in one.words), one.tags)
        for one in reading.sentences
    ]
    return Reading(sentences, reading.skipped)


def _read_conll(path: Path) -> Reading:
    reading = Reading()
    # Not at all Unicode white space: a word may contain a non-breaking one ("10 000").
    blocks = [[(n, re.split("[ \t]+", x.strip(" \t"))) for n, x in one] for one in _blocks(path)]
    widths = Counter(len(cells) for block in blocks for _, cells in block)
    width = max(2, widths.most_common(1)[0][0]) if widths else 2
    for block in blocks:
        words, tags = [], []
        for number, cells in block:
            kind = _no_word(cells, width)
            if kind is not None:
                reading.skipped[kind] += 1
                continue
            if len(cells) != width:
                raise ValueError(
                    f"data: {path}, line {number}: must have {width} columns, a word first and a "
                    f"tag last, as most lines, but is {' '.join(cells)[:60]!r}."
                )
            words.append(cells[0])
            tags.append(cells[-1])
        if words:
            reading.add(words, tags)
    return reading


def _no_word(cells: list[str], width: int) -> str | None:
    """The kind of a CoNLL line without a word; None if it has one."""
    if cells[0] == _DOCUMENT:
        return "document marks"
    return "lines of comments" if cells[0].startswith("#") and len(cells) != width else None


_READERS: dict[str, Callable[[Path], Reading]] = {
    "conllu": _read_conllu,
    "columns": read_columns,
    "conll": _read_conll,
}


def _read_constructed(name: str, lang: str) -> Reading:
    scheme, _, split = name.partition(":")
    reading = Reading()
    for words in _corpus().spoken(lang, split):  # type: ignore[arg-type]
        parts = [part_of_speech(word.concept) for word in words]
        if scheme != "constructed":
            parts = ["B-PER" if part == "PROPN" else "O" for part in parts]
        reading.add([word.form for word in words], parts)
    return reading


@lru_cache(maxsize=1)
def _corpus() -> Corpus:
    return default_corpus()
