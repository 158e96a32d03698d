"""Plain text by language, for pretraining: lines from text files, tables and tagged files.

A source is a path with `{lang}`, relative to `text.root`; `.gz` is unpacked:

    bible/train.{lang}.gz               one sentence per line
    tatoeba/train.en-{lang}.tsv.gz#2    column 2 of a tab-separated table
    firefox/train.tsv.gz#{lang}         the column with this name in the first line
    pos/{lang}/train.conllu.gz          the words of tagged sentences, separated by blanks
    ner/{lang}/train.tsv.gz             likewise: a .tsv without # holds tagged words
    constructed:train                   the constructed languages

A language need not be in every source, but in at least one; and every source must have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gradvac.lab.recipes.tagging.readers import is_no_file, open_lines, read_sentences


def read_text(
    sources: Sequence[str], languages: Sequence[str], root: Path
) -> tuple[dict[str, list[str]], dict[str, dict[str, int]]]:
    """Read all text, every line of a language once.

    Returns:
        Language -> its distinct lines; and language -> source -> lines it added.

    Raises:
        ValueError: A language has no text, or a source is of no language.
    """
    lines: dict[str, list[str]] = {}
    counts: dict[str, dict[str, int]] = {}
    for lang in languages:
        distinct: dict[str, None] = {}
        counts[lang] = {}
        for source in sources:
            if not _has(source, lang, root):
                continue
            before = len(distinct)
            distinct.update((line, None) for line in _read(source, lang, root) if line)
            counts[lang][source] = len(distinct) - before
        lines[lang] = list(distinct)
    unused = [
        source
        for source in sources
        if not any(source in by_source for by_source in counts.values())
    ]
    if unused:
        raise ValueError(
            f"text: there is no file {unused[0]!r} under {str(root)!r} for any of "
            f"{', '.join(languages)}; fix or remove the source."
        )
    empty = [lang for lang, lang_lines in lines.items() if not lang_lines]
    if empty:
        raise ValueError(
            f"text: language {empty[0]!r} is in no source; leave it out of text.languages."
        )
    return lines, counts


def _path(source: str, lang: str, root: Path) -> tuple[Path, str]:
    name, _, column = source.replace("{lang}", lang).partition("#")
    return root / name, column


def _has(source: str, lang: str, root: Path) -> bool:
    if is_no_file(source):
        return True
    path, column = _path(source, lang, root)
    if not path.is_file():
        return False
    return not column or column.isdecimal() or column in _header(path)


def _header(path: Path) -> list[str]:
    return next((line for _, line in open_lines(path)), "").split("\t")


def _read(source: str, lang: str, root: Path) -> Iterator[str]:
    if is_no_file(source):
        yield from _words(source, lang, root)
        return
    path, column = _path(source, lang, root)
    kinds = {suffix for suffix in path.suffixes if suffix != ".gz"}
    if not column and kinds & {".conllu", ".conll", ".tsv"}:
        yield from _words(source, lang, root)
        return
    place = int(column) - 1 if column.isdecimal() else _header(path).index(column) if column else 0
    for number, line in open_lines(path):
        if not column:
            yield " ".join(line.split())
            continue
        if number == 1 and not column.isdecimal():
            continue
        cells = line.split("\t")
        if column.isdecimal() and place >= len(cells):
            raise ValueError(f"text: {path}, line {number}: has no column {column}: {line[:60]!r}.")
        yield " ".join(cells[place].split()) if place < len(cells) else ""


def _words(source: str, lang: str, root: Path) -> Iterator[str]:
    reading = read_sentences(source, lang, "train", root=root, form="auto")
    for sentence in reading.sentences:
        yield " ".join(sentence.words)
