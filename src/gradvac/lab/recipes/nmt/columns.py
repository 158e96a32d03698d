"""Tables: which column holds which language, told by a header, by `data.columns`, or by the name
of the file. Where they contradict each other, or a row has another form, nothing is guessed."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradvac.lab.languages.real import LANGUAGES
from gradvac.lab.recipes.nmt.lines import Problem, raw_lines

# Names that people give to columns, and that are no sentences.
_HEADINGS = {"source", "target", "src", "tgt", "trg", "text", "sentence", "translation", "id"}
_HEADINGS |= {language.name.casefold() for language in LANGUAGES.values()}
_WITH_REGION = re.compile(r"^([a-z]{2,3})[-_][a-z]{2,4}$")  # fr-fr, zh_hant


def read_table(
    path: Path, first: str, second: str, *, columns: Sequence[str], is_named: bool
) -> Iterator[tuple[str, str] | Problem]:
    """Read two columns of a table.

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
    rows = _csv_rows(path) if ".csv" in path.suffixes else _tsv_rows(path)
    for cells in rows:
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
        yield cells[header.index(first)], cells[header.index(second)]


def _tsv_rows(path: Path) -> Iterator[list[str] | Problem]:
    for line in raw_lines(path):
        yield line if isinstance(line, Problem) else line.split("\t")


def _csv_rows(path: Path) -> Iterator[list[str] | Problem]:
    """Rows with commas and quotes; a quoted cell may go over several lines.

    Raises:
        ValueError: A quote is never closed: all that follows would be one cell.
    """
    problems: list[Problem] = []
    num_lines, is_over = 0, False

    def lines() -> Iterator[str]:
        nonlocal num_lines, is_over
        for line in raw_lines(path):
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
        mark = "commas" if ".csv" in path.suffixes else "tabs"
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
