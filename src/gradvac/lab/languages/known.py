"""What is known about tasks before any run: families and distances, from tables or files.

`load_runs` reads runs together with it, as report and figures need them.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis import KnownDistances, Run, load_run
from gradvac.lab.languages import default_corpus, genealogical_distances, real, uriel_distances
from gradvac.lab.runs import RunFolder, prepared_sizes
from gradvac.tasks import find_direction, other_languages, pivot_of, turned
from gradvac.utils.hints import some

GENEALOGY = "genealogy"
_URIEL = "uriel:"
_FEWEST = 3  # tasks; two have a single distance, which cannot correlate with anything


def load_runs(
    paths: Sequence[Path], *, distances: str = GENEALOGY, families: Path | None = None
) -> list[Run]:
    """Read run folders; runs of the same name are distinguished by their parent folders."""
    runs = [load_run(path) for path in paths]
    tasks = [run.tasks for run in runs]
    facts = zip(runs, find_families(tasks, families), find_distances(distances, tasks), strict=True)
    runs = [
        replace(run, families=f, distances=d, names=find_names(run.tasks)) for run, f, d in facts
    ]
    return [replace(run, name=name) for run, name in zip(runs, _unique_names(runs), strict=True)]


def _unique_names(runs: Sequence[Run]) -> list[str]:
    """The names of the folders, with as many parents as it takes to make them unique."""
    paths = [run.path.resolve() for run in runs]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ValueError(f"{twice[0]}: is given twice; give every run once.")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["-".join(path.parts[-depth:]).lstrip("/-") for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def sizes_of(runs: Sequence[Run]) -> dict[str, int]:
    """Training pairs of each task: as prepared, or else as the constructed languages have them."""
    constructed = default_corpus().languages
    sizes: dict[str, int] = {}
    for run in reversed(runs):
        prepared = prepared_sizes(RunFolder(run.path))
        for task, language in zip(run.tasks, other_languages(run.tasks), strict=True):
            size = prepared.get(task, prepared.get(turned(task)))
            if size is None and language in constructed:
                size = constructed[language].train
            if size is not None:
                sizes[task] = size
    return sizes


def find_families(runs: Sequence[Sequence[str]], path: Path | None = None) -> list[dict[str, str]]:
    """Task -> family for the tasks of each run, "" where unknown.

    The file takes precedence over the tables.
    """
    families = {code: built.family for code, built in default_corpus().languages.items()}
    for code in (code for tasks in runs for code in other_languages(tasks)):
        known = real.find(code)
        if known is not None:
            families.setdefault(code, known.family)
    if path is not None:
        from_file = _read_families(path)
        names = {name for tasks in runs for name in (*tasks, *other_languages(tasks))}
        if from_file.keys().isdisjoint(names):
            tasks = [task for run in runs for task in run]
            raise ValueError(f"--families {path}: names none of {some(tasks)}, nor a language.")
        families |= from_file
    return [
        {task: families.get(task, families.get(language, "")) for task, language in named}
        for named in map(_with_languages, runs)
    ]


def find_names(tasks: Sequence[str]) -> dict[str, str]:
    """Task -> name of its language, for the languages of the tables."""
    constructed = default_corpus().languages
    names = {}
    for task, code in _with_languages(tasks):
        language = constructed.get(code) or real.find(code)
        if language is not None:
            names[task] = language.name
    return names


def find_distances(source: str, runs: Sequence[Sequence[str]]) -> list[KnownDistances | None]:
    """Known distances of the tasks of each run; None where too little is known.

    Args:
        source: "genealogy", "uriel:KIND", or a file.
        runs: The tasks of each run.

    Raises:
        ValueError: There is no such source, or it was asked for and does not know the tasks.
    """
    tasks = [task for run in runs for task in run]
    codes = dict.fromkeys(code for run in runs for code in other_languages(run))
    tables = _tables(source, list(codes))
    distances: list[KnownDistances | None] = []
    for run in runs:
        candidates = [_on_tasks(table, run) for table in tables]
        # Constructed and real languages have no distance from each other: the more numerous count.
        best = max(candidates, key=lambda candidate: len(candidate.tasks), default=None)
        distances.append(best if best is not None and len(best.tasks) >= _FEWEST else None)
    if source != GENEALOGY and not any(distances):
        raise ValueError(
            f"--distances {source}: knows fewer than {_FEWEST} of {some(tasks)}, by task or by "
            "language."
        )
    return distances


def _with_languages(tasks: Sequence[str]) -> list[tuple[str, str]]:
    """Each task with its language that is not the pivot."""
    return list(zip(tasks, other_languages(tasks), strict=True))


def _tables(source: str, codes: Sequence[str]) -> list[KnownDistances]:
    """Distances between languages, or whatever a file names."""
    if source.startswith(_URIEL):
        kind = source.removeprefix(_URIEL)
        values = uriel_distances(codes, kind)
        return [KnownDistances(tuple(codes), values, f"URIEL {kind} distance")]
    if source != GENEALOGY:
        return [_read_distances(Path(source))]
    tables = []
    constructed = default_corpus()
    if any(code in constructed.languages for code in codes):
        built = constructed.distances()
        tables.append(KnownDistances(built.codes, built.distance, "distance by construction"))
    languages = {code: real.find(code) for code in codes}
    listed = {code: language.code for code, language in languages.items() if language is not None}
    if listed:
        values = genealogical_distances(list(listed.values()))
        tables.append(KnownDistances(tuple(listed), values, "genealogical distance"))
    return tables


def _on_tasks(table: KnownDistances, tasks: Sequence[str]) -> KnownDistances:
    """A table of languages turned into one of tasks, without tasks it knows nothing about."""
    rows = {name: row for row, name in enumerate(table.tasks)}
    known = ~np.isnan(table.values) & ~np.eye(len(rows), dtype=bool)
    row_of = {}
    for task, language in _with_languages(tasks):
        name = task if task in rows or _is_of_two_others(task, tasks) else language
        if name in rows and known[rows[name]].any():
            row_of[task] = rows[name]
    chosen = list(row_of.values())
    return replace(table, tasks=tuple(row_of), values=table.values[np.ix_(chosen, chosen)])


def _is_of_two_others(task: str, tasks: Sequence[str]) -> bool:
    """Whether a task is between two languages, neither of them the pivot."""
    direction = find_direction(task)
    return direction is not None and pivot_of(tasks) not in direction


def _read_families(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"--families {path}: no such file; give a TOML file.")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"--families {path}: is not TOML: {error}.") from None
    for name, family in table.items():
        if not isinstance(family, str):
            raise ValueError(
                f"--families {path}: {name} must be a family in quotes, as in "
                f'fr = "Romance"; got {family!r}.'
            )
    return table


def _read_distances(path: Path) -> KnownDistances:
    """A square table; an empty cell takes the value of its mirror image, or is unknown."""
    if not path.is_file():
        raise ValueError(f"--distances {path}: no such file; give genealogy, uriel:KIND or a file.")
    try:
        text = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--distances {path}: is not text; give a CSV or TSV file.") from None
    mark = next((mark for mark in "\t;" if text and mark in text[0]), ",")
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(text, delimiter=mark)]
    except csv.Error as error:
        raise ValueError(f"--distances {path}: is not a CSV or TSV file: {error}.") from None
    lines = [line for line in lines if any(line)]
    names = tuple(lines[0][1:]) if lines else ()
    rows = {line[0]: line[1:] for line in lines[1:]}
    if not names or len(rows) < len(lines) - 1 or sorted(rows) != sorted(set(names)):
        raise ValueError(
            f"--distances {path}: first row and first column must name the same tasks or "
            f"languages, each once; got {some(names)} and {some(list(rows))}."
        )
    values = np.array([_numbers(path, name, rows[name], len(names)) for name in names])
    values = np.where(np.isnan(values), values.T, values)
    _check(path, names, values)
    np.fill_diagonal(values, 0.0)
    return KnownDistances(names, values, f"the distance of {path.name}")


def _numbers(path: Path, name: str, cells: Sequence[str], width: int) -> list[float]:
    if len(cells) != width:
        raise ValueError(
            f"--distances {path}: row {name} has {len(cells)} values, the first row names {width}."
        )
    try:
        return [float(cell or "nan") for cell in cells]
    except ValueError as error:
        raise ValueError(f"--distances {path}: row {name}: {error}.") from None


def _check(path: Path, names: Sequence[str], values: NDArray[np.float64]) -> None:
    """Refuse what cannot be distances, and name the first pair that shows it."""
    faults = {
        "is below 0 or infinite": (values < 0) | np.isinf(values),
        "is not 0: are these similarities?": np.eye(len(names), dtype=bool) & (values > 0),
        "differs from its mirror image": ~np.isclose(values, values.T, equal_nan=True),
    }
    for fault, wrong in faults.items():
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            pair = f"{names[row]}, {names[column]}"
            raise ValueError(f"--distances {path}: {values[row, column]:g} ({pair}) {fault}")
