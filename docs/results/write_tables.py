"""Write the tables of this page from the runs of `gradvac sweep one_gpu`.

    python docs/results/write_tables.py runs/one_gpu --out docs/results

Every table is a comparison of some methods on the seeds that all of them finished, so that runs are
paired; methods with fewer than two seeds are left out, and named. Beside them: how far short runs
predict long ones, and what each rule did to the update.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradvac.experiments import Trial, compare_runs, prediction_table, predictions, to_markdown
from gradvac.runs import RunFolder
from gradvac.runs.files import write_text

_FEWEST = 2  # seeds
_PREDICTED = ("table1", "main", "mixture")


class Question(NamedTuple):
    """A table: its file, what is asked, and the methods; the first is the baseline."""

    name: str
    asked: str
    methods: tuple[str, ...]


QUESTIONS = (
    Question(
        "table1",
        "Table 1: do rules beat joint training at the paper's temperature, 5?",
        (
            *("joint", "gradnorm", "mgda", "pcgrad", "pcgrad_layers"),
            *("gradvac_fixed", "gradvac_model", "gradvac", "gradvac_all"),
        ),
    ),
    Question(
        "bilingual",
        "Table 1, row 1: one model for all, or one for each language?",
        ("joint", "bilingual"),
    ),
    Question(
        "main",
        "The same with more seeds: GradVac and the temperature, each alone and together",
        ("joint", "gradvac", "temperature2", "temperature2_gradvac"),
    ),
    Question(
        "variants",
        "Variants of GradVac against joint training",
        ("joint", "gradvac", "gradvac_all", "gradvac_model", "gradvac_fixed"),
    ),
    Question(
        "tuned",
        "Do rules help on top of the tuned mixture?",
        (
            *("temperature2", "temperature2_gradvac", "temperature2_gradvac_all"),
            "temperature2_pcgrad_layers",
        ),
    ),
    Question(
        "mixture",
        "What does the mixture alone do?",
        ("joint", "temperature1", "temperature2", "temperature3", "half_weight", "unimax"),
    ),
    Question(
        "controls",
        "What is left of GradVac without its directions, its targets, its adapting?",
        ("gradvac", "joint", "norm", "shuffled", "random", "frozen"),
    ),
    Question(
        "into_english",
        "Into English",
        (
            *("into_english", "into_english_gradvac", "into_english_pcgrad_layers"),
            "into_english_temperature2",
        ),
    ),
    Question(
        "many",
        "Table 2 and figure 6 in miniature: 19 languages",
        ("many_temperature5", "many_temperature1", "many_temperature2", "many_gradvac"),
    ),
    Question(
        "large_batches",
        "Four times the batch before the rule",
        ("large_batches", "large_batches_gradvac"),
    ),
    Question("small", "A smaller model", ("small", "small_gradvac")),
    Question("halves", "Only early, or only late", ("halves", "early", "late")),
    Question(
        "tables6to8",
        "Tables 6 to 8: which tasks, which granularity, which beta?",
        (
            *("gradvac", "gradvac_high", "gradvac_all", "gradvac_model", "gradvac_sides"),
            *("gradvac_matrices", "gradvac_beta1", "gradvac_beta3"),
        ),
    ),
)


def seeds_of(runs: Path, method: str) -> dict[int, list[Path]]:
    """Seed -> the scored runs of a method: one, or all its parts."""
    names = [own for own in runs.iterdir() if own.name.partition("+")[0] == method]
    found: dict[int, list[Path]] = {}
    for folder in sorted(names):
        for run in folder.glob("seed-*"):
            if RunFolder(run).scores_of("test", "best").is_file():
                found.setdefault(int(run.name.removeprefix("seed-")), []).append(run)
    return {seed: own for seed, own in found.items() if len(own) == len(names)}


def write_question(question: Question, runs: Path, out: Path) -> str:
    """Write a table; how many runs it has, or why there is none."""
    by_method = {method: seeds_of(runs, method) for method in question.methods}
    there = [method for method, seeds in by_method.items() if len(seeds) >= _FEWEST]
    left_out = [method for method in question.methods if method not in there]
    if question.methods[0] not in there or len(there) < 2:
        return f"{question.name}: no table: too few runs of {', '.join(left_out)}"
    shared = set.intersection(*(set(by_method[method]) for method in there))
    if len(shared) < _FEWEST:
        return f"{question.name}: no table: no two seeds in common"
    paths = [
        path for method in there for seed in sorted(shared) for path in by_method[method][seed]
    ]
    found = compare_runs(paths, baseline=question.methods[0])
    text = to_markdown(found).partition("\n")[2].lstrip("\n")
    told = f"Left out, as fewer than two seeds were finished: {', '.join(left_out)}.\n\n"
    text = f"# {question.asked}\n\n{told if left_out else ''}{text}"
    write_text(out / f"{question.name}.md", text)
    return f"{question.name}: {len(there)} methods, {len(shared)} seeds"


def write_predictions(runs: Path, out: Path) -> None:
    """How far short runs predict long ones: methods from English, on the seeds that they share."""
    asked = (question.methods for question in QUESTIONS if question.name in _PREDICTED)
    by_method = {method: seeds_of(runs, method) for own in asked for method in own}
    there = {method: seeds for method, seeds in by_method.items() if len(seeds) >= _FEWEST}
    shared = sorted(set.intersection(*map(set, there.values()))) if there else []
    points = {
        method: [Trial(method, method, n, {}, path, True, ()) for n in shared for path in seeds[n]]
        for method, seeds in there.items()
    }
    if shared and (found := predictions(points)):
        about = "# How far short runs predict long ones\n\nDevelopment loss. "
        about += f"{len(points)} methods ({', '.join(points)}), {len(shared)} seeds each.\n\n"
        write_text(out / "prediction.md", about + prediction_table(found))


def write_updates(runs: Path, out: Path) -> None:
    """What rules did to the update: means over the log entries of all runs of a method."""
    keys = ("update_cosine", "update_ratio", "active", "similarity")
    lines = [
        "# What rules did to the update",
        "",
        "Means over components and over the log entries of all runs.",
        "",
        "| method | cosine to the plain sum | length, of the plain sum | pairs altered | cosine "
        "between tasks |",
        "| --- | --- | --- | --- | --- |",
    ]
    for folder in sorted(own for own in runs.iterdir() if own.is_dir()):
        entries = [
            [entry[f"train/{key}"] for key in keys]
            for path in sorted(folder.glob("seed-*"))
            for entry in RunFolder(path).read_metrics()
            if entry.get("train/update_cosine") is not None
        ]
        if entries:
            cosine, ratio, active, similar = np.nanmean(entries, axis=0)
            numbers = (f"{cosine:.4f}", f"{ratio:.3f}", f"{active:.0%}", f"{similar:.3f}")
            lines.append(f"| {folder.name} | {' | '.join(numbers)} |")
    write_text(out / "updates.md", "\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for question in QUESTIONS:
        print(write_question(question, given.runs, given.out))
    write_predictions(given.runs, given.out)
    write_updates(given.runs, given.out)


if __name__ == "__main__":
    main()
