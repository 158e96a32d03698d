"""Runs as report and figures need them: with what is known about their languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradvac.analysis import Run, load_run
from gradvac.lab.languages import default_corpus
from gradvac.lab.languages.known import GENEALOGY, find_distances, find_families, find_names
from gradvac.lab.runs import RunFolder, prepared_sizes
from gradvac.tasks import other_languages, turned


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
