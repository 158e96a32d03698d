"""Readers: sentences of words and tags.

A source is a path with `{lang}` (or `{split}` and `{lang}`), relative to `data.root`; `.gz` is
unpacked. What it holds is told by its name, or by `data.format`:

    conllu      CoNLL-U (.conllu): FORM and UPOS. Lines of multi-word tokens (3-4) and of empty
                nodes (8.1) are no words of the sentence: their parts are, or they are not written.
    columns     word and tag in two columns, divided by a tab; a blank line ends a sentence. The
                form `fr:word` of WikiAnn is read as `word`, if all words of the file have it.
    conll       word first and tag last, divided by spaces or tabs (CoNLL 2002, 2003); lines
                `-DOCSTART-` are skipped and counted.
    constructed:SPLIT       the constructed languages with their parts of speech;
    constructed-names:SPLIT     with the names of people as entities
    hf:NAME:CONFIG:SPLIT    a Hugging Face dataset with `tokens` and `ner_tags`, `upos` or
                `pos_tags`, if `datasets` is installed and the data can be reached; or a folder
                that `save_to_disk` wrote.

A line that cannot be read stops the reading, with file and number: nothing is skipped silently.
"""

from __future__ import annotations

import gzip
import importlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradvac import corpora
from gradvac.hints import some

Format = Literal["auto", "conllu", "columns", "conll"]
_NOT_A_WORD = re.compile(r"\d+-\d+|\d+\.\d+")
_HF_TAGS = ("ner_tags", "upos", "pos_tags")


class Sentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass
class Reading:
    """The sentences of a file, and what in it was none.

    Attributes:
        sentences: In order.
        skipped: What was no sentence or word -> how often: multi-word tokens, empty nodes,
            sentences without words, document marks.
    """

    sentences: list[Sentence] = field(default_factory=list)
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
                "or an end of line; mend the data."
            )
        if words:
            self.sentences.append(Sentence(tuple(words), tuple(tags)))
        else:
            self.skipped["sentences without words"] += 1


def read_sentences(source: str, lang: str, split: str, *, root: Path, form: Format) -> Reading:
    """Read the sentences of a language.

    Args:
        source: See above.
        lang: Its code, in the place of `{lang}`.
        split: "train", "dev" or "test", in the place of `{split}`.
        root: What paths are relative to.
        form: The format; "auto": by the name.

    Raises:
        ValueError: There is no such file, or a line is not what it should be.
    """
    paths = files_of(source, lang, split, root=root)
    if not paths:
        name = _name(source, lang, split)
        return _read_hf(name, root) if name.startswith("hf:") else _read_constructed(name, lang)
    reading = _READERS[_format(paths[0]) if form == "auto" else form](paths[0])
    return _without_language(reading, f"{lang}:", paths[0])


def files_of(source: str, lang: str, split: str, *, root: Path) -> list[Path]:
    """List the file that a source stands for; none for datasets and constructed languages."""
    name = _name(source, lang, split)
    return [] if is_no_file(name) else [_find_file(name, root, lang)]


def is_no_file(source: str) -> bool:
    """Whether a source stands for no files of the user's."""
    return source.startswith(("hf:", "constructed:", "constructed-names:"))


def _name(source: str, lang: str, split: str) -> str:
    return source.replace("{lang}", lang).replace("{split}", split)


def _find_file(name: str, root: Path, lang: str) -> Path:
    """The file of a language; if it is missing, the error says which languages are there."""
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
    """Numbered lines without their ends."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"data: {path}, line {number}: is not UTF-8 ({error})."
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
    """Read words and tags in two columns, as they stand."""
    reading = Reading()
    for block in _blocks(path):
        cells = [_two_cells(path, number, line) for number, line in block]
        reading.add([word for word, _ in cells], [tag for _, tag in cells])
    return reading


def _two_cells(path: Path, number: int, line: str) -> tuple[str, str]:
    cells = line.split("\t")
    if len(cells) != 2 or not cells[0] or not cells[1].strip():
        raise ValueError(
            f"data: {path}, line {number}: must be a word, a tab and a tag, but is {line[:60]!r}."
        )
    return cells[0], cells[1].strip()


def _without_language(reading: Reading, mark: str, path: Path) -> Reading:
    """Take WikiAnn's `fr:` from the words, if all have it."""
    words = [word for sentence in reading.sentences for word in sentence.words]
    num_marked = sum(word.startswith(mark) for word in words)
    if 2 * num_marked <= len(words):  # a colon in some words means nothing
        return reading
    if num_marked < len(words) or mark in words:
        raise ValueError(
            f"data: {path}: {num_marked:,} of {len(words):,} words begin with {mark!r}, as in "
            "WikiAnn, but not all, or nothing follows it; mend the file."
        )
    sentences = [
        Sentence(tuple(word.removeprefix(mark) for word in one.words), one.tags)
        for one in reading.sentences
    ]
    return Reading(sentences, reading.skipped)


def _read_conll(path: Path) -> Reading:
    reading = Reading()
    for block in _blocks(path):
        words, tags = [], []
        for number, line in block:
            cells = line.split()
            if cells[0] == "-DOCSTART-":
                reading.skipped["document marks"] += 1
                continue
            if len(cells) < 2:
                raise ValueError(
                    f"data: {path}, line {number}: needs a word and a tag, but is {line[:60]!r}."
                )
            words.append(cells[0])
            tags.append(cells[-1])
        if words or not all(line.startswith("-DOCSTART-") for _, line in block):
            reading.add(words, tags)
    return reading


_READERS: dict[str, Callable[[Path], Reading]] = {
    "conllu": _read_conllu,
    "columns": read_columns,
    "conll": _read_conll,
}


def _read_hf(name: str, root: Path) -> Reading:
    parts = name.split(":")
    if len(parts) != 4:
        raise ValueError(f"data: {name} must be hf:NAME:CONFIG:SPLIT (CONFIG may be empty).")
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"data: {name} needs the package `datasets`; pip install datasets."
        ) from None
    rows = _load_rows(datasets, name, root)
    column = next((tag for tag in _HF_TAGS if tag in rows.features), None)
    if column is None or "tokens" not in rows.features:
        raise ValueError(
            f"data: {name} has the columns {', '.join(rows.features)}; it needs tokens and one of "
            f"{', '.join(_HF_TAGS)}."
        )
    inner = getattr(rows.features[column], "feature", None)
    names = getattr(inner, "names", None)
    reading = Reading()
    for row in rows:
        tags = [str(tag) if names is None else names[tag] for tag in row[column]]
        if len(tags) != len(row["tokens"]):
            raise ValueError(
                f"data: {name} has a row with {len(row['tokens'])} tokens and {len(tags)} tags."
            )
        reading.add(list(row["tokens"]), tags)
    return reading


def _load_rows(datasets: Any, name: str, root: Path) -> Any:
    """A split of a dataset: of a folder that `save_to_disk` wrote, or of the hub."""
    _, dataset, config, split = name.split(":")
    folder = root / dataset
    if not folder.is_dir():
        try:
            return datasets.load_dataset(dataset, config or None, split=split)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"data: {name} cannot be loaded ({reason}); give a folder that save_to_disk wrote, "
                "or a name of the hub while it can be reached."
            ) from error
    rows = datasets.load_from_disk(str(folder))
    splits = list(rows) if isinstance(rows, dict) else [""]
    if split not in splits:
        there = ", ".join(splits) if splits != [""] else "no splits: write hf:FOLDER::"
        raise ValueError(f"data: {name}: there is no split {split!r}; there are {there}.")
    return rows[split] if split else rows


def _read_constructed(name: str, lang: str) -> Reading:
    scheme, _, split = name.partition(":")
    reading = Reading()
    for words in _corpus().spoken(lang, split):  # type: ignore[arg-type]
        parts = [corpora.part_of_speech(word.concept) for word in words]
        if scheme != "constructed":
            parts = ["B-PER" if part == "PROPN" else "O" for part in parts]
        reading.add([word.form for word in words], parts)
    return reading


@lru_cache(maxsize=1)
def _corpus() -> corpora.Corpus:
    return corpora.default()
