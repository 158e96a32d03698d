"""Runs as report and figures take them: with what is known of their languages."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from gradvac import corpora
from gradvac.analysis import Run, load_run

Runs = Annotated[list[Path], typer.Argument(help="Run folders; the first is compared with.")]


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read run folders; runs of the same name are told apart by the folder they are in."""
    runs = [_with_languages(load_run(path)) for path in paths]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.path.resolve().parent.name}-{run.name}")
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def sizes_of(runs: Sequence[Run]) -> dict[str, int]:
    """Training pairs of each task: as prepared, or else as the constructed languages have them."""
    constructed = corpora.default().languages
    sizes: dict[str, int] = {}
    for run in reversed(runs):
        prepared = _prepared_sizes(run)
        for task in run.tasks:
            turned = "-".join(reversed(task.split("-")))
            size = prepared.get(task, prepared.get(turned))
            if size is None and _language_of(task) in constructed:
                size = constructed[_language_of(task)].train
            if size is not None:
                sizes[task] = size
    return sizes


def _with_languages(run: Run) -> Run:
    """The run with the families and distances of its languages, as far as they are known."""
    constructed = corpora.default()
    tables = corpora.languages.LANGUAGES
    families, near = {}, []
    for task in run.tasks:
        code = _language_of(task)
        if code in constructed.languages:
            families[task] = constructed.languages[code].family
            near.append(task)
        else:
            families[task] = tables[code].family if code in tables else ""
    distances: tuple[tuple[str, ...], NDArray[np.floating]] | None = None
    if len(near) > 1:
        known = constructed.distances()
        where = [known.codes.index(_language_of(task)) for task in near]
        distances = tuple(near), known.distance[np.ix_(where, where)]
    return replace(run, families=families, distances=distances)


def _language_of(task: str) -> str:
    """The language of a task that is not the pivot: "fr" for "en-fr", "fr-en" and "fr"."""
    codes = [code for code in task.split("-") if code != corpora.PIVOT]
    return codes[-1] if codes else task


def _prepared_sizes(run: Run) -> dict[str, int]:
    """Sizes that the preparation of the data wrote down; empty if its folder is not there."""
    try:
        prepared = Path(tomllib.loads(run.settings)["data"]["prepared"])
        manifest: dict[str, Any] = json.loads((prepared / "manifest.json").read_bytes())
        found: dict[str, int] = manifest["sizes"]["train"]
    except (KeyError, TypeError, OSError, ValueError):
        return {}
    return found
