"""Readers: sentences of words and tags.

A source is a path with `{lang}` (or `{split}` and `{lang}`), relative to `data.root`; `.gz` and
`.zst` are unpacked. Its format follows from its name, or from `data.format`:

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
                that `save_to_disk` wrote. JSON lines (.jsonl) and Parquet files with tags by name
                have the same columns.

A line that cannot be read is an error that names file and line: nothing is skipped silently.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradvac.lab.languages import Corpus, default_corpus, part_of_speech
from gradvac.lab.recipes.common.readers import (
    HUB,
    Problem,
    load_dataset,
    read_all_lines,
    read_rows,
    suffix_of,
)
from gradvac.utils.hints import some

Format = Literal["auto", "conllu", "columns", "conll"]
_DOCUMENT = "-DOCSTART-"
_LANGUAGE_MARK = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*:")
_NOT_A_WORD = re.compile(r"\d+-\d+|\d+\.\d+")
_TAG_COLUMNS = ("ner_tags", "upos", "pos_tags")


class TaggedSentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass
class Reading:
    """The sentences of a file, and what was skipped.

    Attributes:
        sentences: In order.
        skipped: What is not a sentence or word -> how often: multi-word tokens, empty nodes,
            sentences without words, document marks.
    """

    sentences: list[TaggedSentence] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, words: list[str], tags: list[str]) -> None:
        """Add a sentence, or count that it has no words.

        Raises:
            ValueError: A word is empty or holds a tab or an end of line.
        """
        bad = [word for word in words if not word or not {"\t", "\n", "\r"}.isdisjoint(word)]
        if bad:
            raise ValueError(
                f"data: the word {bad[0]!r} (in {' '.join(words)[:60]!r}) is empty or holds a tab "
                "or an end of line; fix the data."
            )
        if words:
            self.sentences.append(TaggedSentence(tuple(words), tuple(tags)))
        else:
            self.skipped["sentences without words"] += 1


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
    path = sentence_file(source, lang, split, root=root)
    name = _name(source, lang, split)
    if path is None:
        return _read_dataset(name, root) if name.startswith(HUB) else _read_constructed(name, lang)
    if suffix_of(path) in (".jsonl", ".parquet"):
        return _from_rows(str(path), read_rows(name, path, root, ("tokens", *_TAG_COLUMNS)))
    reading = _READERS[_format(path) if form == "auto" else form](path)
    return _without_language(reading, f"{lang}:", path)


def sentence_file(source: str, lang: str, split: str, *, root: Path) -> Path | None:
    """The file of a source; None for datasets and constructed languages."""
    name = _name(source, lang, split)
    if name.startswith((HUB, "constructed:", "constructed-names:")):
        return None
    return _find_file(name, root, lang)


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


def _format(path: Path) -> str:
    return {".conllu": "conllu", ".conll": "conll"}.get(suffix_of(path), "columns")


def _blocks(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Lines between blank lines; several blank lines in a row make no empty block."""
    block: list[tuple[int, str]] = []
    for number, line in read_all_lines(path):
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
        TaggedSentence(tuple(word.removeprefix(mark) for word in one.words), one.tags)
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


def _read_dataset(name: str, root: Path) -> Reading:
    rows = load_dataset(name, root)
    column = next((tag for tag in _TAG_COLUMNS if tag in rows.features), None)
    if column is None or "tokens" not in rows.features:
        raise _no_columns(name, rows.features)
    inner = getattr(rows.features[column], "feature", None)
    return _from_rows(name, rows, getattr(inner, "names", None))


def _from_rows(
    name: str, rows: Iterable[Any], tags_by_number: Sequence[str] | None = None
) -> Reading:
    """Sentences from mappings with `tokens` and a column of tags."""
    reading = Reading()
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Problem) or not isinstance(row, dict):
            raise ValueError(f"data: {name}, row {number:,}: is malformed; fix the data.")
        column = next((tag for tag in _TAG_COLUMNS if tag in row), None)
        if column is None or "tokens" not in row:
            raise _no_columns(name, row)
        tags = [_tag_name(tag, tags_by_number, name) for tag in row[column]]
        if len(tags) != len(row["tokens"]):
            raise ValueError(
                f"data: {name} has a row with {len(row['tokens'])} tokens and {len(tags)} tags."
            )
        reading.add(list(row["tokens"]), tags)
    return reading


def _no_columns(name: str, there: Iterable[str]) -> ValueError:
    return ValueError(
        f"data: {name} has the columns {', '.join(there)}; it needs tokens and one of "
        f"{', '.join(_TAG_COLUMNS)}."
    )


def _tag_name(tag: Any, names: Sequence[str] | None, dataset: str) -> str:
    if names is None:
        return str(tag)
    if not 0 <= tag < len(names):  # hidden labels are -1, which would be the last name
        raise ValueError(
            f"data: {dataset} has the tag {tag}, which has no name; there are {len(names)}. Choose "
            "a split with labels."
        )
    return str(names[tag])


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
