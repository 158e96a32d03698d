"""Write the tables of this page from the runs of `gradvac sweep one_gpu` and `one_gpu_more`.

    python docs/results/write_tables.py runs/one_gpu runs/one_gpu_more --out docs/results

Every table is a comparison of some methods on the seeds that all of them finished, so that runs are
paired; methods with fewer than two seeds are left out, and named. Beside them: the claims one by
one (`claims.py`), how far short runs predict long ones, and what each rule did to the update. A
method whose runs are in several folders is read from the first of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import claims

from gradvac.experiments import Trial, compare_runs, prediction_table, predictions, to_markdown
from gradvac.experiments.curves import LOSS
from gradvac.runs import RunFolder
from gradvac.runs.files import write_text

_FEWEST = 2  # seeds
_PREDICTED = {"prediction": ("table1", "main", "mixture"), "prediction_long": ("long",)}
_CONTINUED = ("joint", "temperature2", "gradvac", "temperature2_gradvac")
_BEGIN, _END = "<!-- written by write_tables.py: {} -->\n", "<!-- until here -->\n"


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
        "long",
        "The same with twice the steps",
        ("long_joint", "long_gradvac", "long_temperature2", "long_temperature2_gradvac"),
    ),
    Question(
        "long_tuned",
        "Does GradVac help on top of the tuned mixture, with twice the steps?",
        ("long_temperature2", "long_temperature2_gradvac"),
    ),
    Question(
        "variants",
        "Variants of GradVac against joint training",
        ("joint", "gradvac", "gradvac_all", "gradvac_model", "gradvac_fixed"),
    ),
    Question(
        "lengths",
        "Is it the length of the update? Targets of 0.5 with gradients as long as they were",
        ("joint", "gradvac_fixed", "gradvac_fixed_length"),
    ),
    Question(
        "attempts",
        "Make it work: without the noise of batches, on one side of the model, early or late",
        (
            *("joint", "gradvac", "without_noise", "encoder_only", "decoder_only"),
            *("table_only", "early", "late"),
        ),
    ),
    Question(
        "tuned",
        "Do rules help on top of the tuned mixture?",
        (
            *("temperature2", "temperature2_gradvac", "temperature2_gradvac_all"),
            *("temperature2_pcgrad_layers", "temperature2_without_noise"),
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
            *("into_english_temperature2", "into_english_temperature2_gradvac"),
        ),
    ),
    Question(
        "many",
        "Table 2 and figure 6 in miniature: 19 languages",
        ("many_temperature5", "many_temperature1", "many_temperature2", "many_gradvac"),
    ),
    Question(
        "large_batches",
        "Four times the batch before the rule, and a quarter of the steps",
        ("large_batches", "large_batches_gradvac"),
    ),
    Question("small", "A smaller model", ("small", "small_gradvac")),
    Question(
        "tables6to8",
        "Tables 6 to 8: which tasks, which granularity, which beta?",
        (
            *("gradvac", "gradvac_high", "gradvac_all", "gradvac_model", "gradvac_sides"),
            *("gradvac_matrices", "gradvac_beta1", "gradvac_beta3"),
        ),
    ),
)


class Runs:
    """The scored runs of some sweeps.

    Args:
        folders: Of the sweeps.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def seeds_of(self, method: str) -> dict[int, list[Path]]:
        """Seed -> the scored runs of a method: one, or all its parts."""
        for folder in self.folders:
            names = [own for own in folder.iterdir() if own.name.partition("+")[0] == method]
            found: dict[int, list[Path]] = {}
            for own in sorted(names):
                for run in own.glob("seed-*"):
                    if RunFolder(run).scores_of("test", "best").is_file():
                        found.setdefault(int(run.name.removeprefix("seed-")), []).append(run)
            whole = {seed: runs for seed, runs in found.items() if len(runs) == len(names)}
            if whole:
                return whole
        return {}

    def shared(self, methods: Sequence[str]) -> dict[int, list[Path]]:
        """Seed -> the runs of all these methods, where all have it."""
        found = [self.seeds_of(method) for method in methods]
        seeds = sorted(set.intersection(*map(set, found))) if found else []
        return {seed: [run for own in found for run in own[seed]] for seed in seeds}

    def methods(self) -> Iterator[tuple[str, list[Path]]]:
        """Method -> all its runs, scored or not."""
        every: dict[str, list[Path]] = {}
        for folder in self.folders:
            for own in sorted(path for path in folder.iterdir() if path.is_dir()):
                every.setdefault(own.name, sorted(own.glob("seed-*")))
        yield from sorted((name, runs) for name, runs in every.items() if runs)


def write_question(question: Question, runs: Runs, out: Path) -> str:
    """Write a table; how many runs it has, or why there is none."""
    there = [method for method in question.methods if len(runs.seeds_of(method)) >= _FEWEST]
    left_out = [method for method in question.methods if method not in there]
    target = out / f"{question.name}.md"
    target.unlink(missing_ok=True)
    if question.methods[0] not in there or len(there) < 2:
        return f"{question.name}: no table: too few runs of {', '.join(left_out)}"
    shared = runs.shared(there)
    if len(shared) < _FEWEST:
        return f"{question.name}: no table: no two seeds in common"
    found = compare_runs(
        [path for own in shared.values() for path in own], baseline=question.methods[0]
    )
    text = to_markdown(found).partition("\n")[2].lstrip("\n")
    told = f"Left out, as fewer than two seeds were finished: {', '.join(left_out)}.\n\n"
    write_text(target, f"# {question.asked}\n\n{told if left_out else ''}{text}")
    return f"{question.name}: {len(there)} methods, {len(shared)} seeds"


def write_predictions(name: str, questions: Sequence[str], runs: Runs, out: Path) -> None:
    """How far short runs predict long ones: methods from English, on the seeds that they share."""
    asked = [question.methods for question in QUESTIONS if question.name in questions]
    methods = dict.fromkeys(method for own in asked for method in own)
    there = [method for method in methods if len(runs.seeds_of(method)) > _FEWEST]
    shared = sorted(runs.shared(there))
    points = {
        method: [
            Trial(method, method, seed, {}, path, True, ())
            for seed in shared
            for path in runs.seeds_of(method)[seed]
        ]
        for method in there
    }
    if shared and (found := predictions(points)):
        about = "# How far short runs predict long ones\n\nDevelopment loss. "
        about += f"{len(points)} methods ({', '.join(points)}), {len(shared)} seeds each.\n\n"
        write_text(out / f"{name}.md", about + prediction_table(found))


def write_updates(runs: Runs, out: Path) -> None:
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
    for name, own in runs.methods():
        entries = [
            [entry[f"train/{key}"] for key in keys]
            for path in own
            for entry in RunFolder(path).read_metrics()
            if entry.get("train/update_cosine") is not None
        ]
        if entries:
            cosine, ratio, active, similar = np.nanmean(entries, axis=0)
            numbers = (f"{cosine:.4f}", f"{ratio:.3f}", f"{active:.0%}", f"{similar:.3f}")
            lines.append(f"| {name} | {' | '.join(numbers)} |")
    write_text(out / "updates.md", "\n".join(lines) + "\n")


def cost(runs: Runs) -> str:
    """What all runs took."""
    scored = [run for name, own in runs.methods() for run in own if _is_scored(run)]
    steps, seconds = np.sum([_last(run) for run in scored], axis=0)
    devices = sorted({str(RunFolder(run).read_signature()["device"]) for run in scored})
    return (
        f"{len(scored)} scored runs of {len(runs.folders)} sweeps on {', '.join(devices)}: "
        f"{steps:,.0f} steps, {seconds / 60:,.0f} minutes of training, many at a time.\n"
    )


def _is_scored(run: Path) -> bool:
    return RunFolder(run).scores_of("test", "best").is_file()


def _last(run: Path) -> tuple[float, float]:
    entries = [e for e in RunFolder(run).read_metrics() if e.get("train/seconds") is not None]
    return float(entries[-1]["step"]), float(entries[-1]["train/seconds"])


def continued(runs: Runs) -> str:
    """Whether long runs, of another sweep and another day's code, begin as the short ones."""
    lines = ["| method | seeds | largest difference of development loss up to the shorter end |"]
    lines.append("| --- | --- | --- |")
    for method in _CONTINUED:
        short, long = runs.seeds_of(method), runs.seeds_of(f"long_{method}")
        apart = [
            abs(own[step] - other[step])
            for seed in sorted(set(short) & set(long))
            for own, other in [(_losses(short[seed][0]), _losses(long[seed][0]))]
            for step in own
            if step in other
        ]
        if apart:
            lines.append(f"| {method} | {len(set(short) & set(long))} | {max(apart):.4f} |")
    return "\n".join(lines) + "\n"


def _losses(run: Path) -> dict[int, float]:
    entries = RunFolder(run).read_metrics()
    return {entry["step"]: entry[LOSS] for entry in entries if entry.get(LOSS) is not None}


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Write parts into a page, between the lines that name them and those that end them."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin = _BEGIN.format(name)
        before, found, rest = text.partition(begin)
        if not found or _END not in rest:
            raise ValueError(f"{page}: has no {begin.strip()} ... {_END.strip()}")
        text = f"{before}{begin}\n{part}\n{_END}{rest.partition(_END)[2]}"
    write_text(page, text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(given.runs)
    for question in QUESTIONS:
        print(write_question(question, runs, given.out))
    written = [q for q in QUESTIONS if (given.out / f"{q.name}.md").is_file()]
    tables = "\n".join(f"- [{question.asked}]({question.name}.md)" for question in written) + "\n"
    for name, questions in _PREDICTED.items():
        write_predictions(name, questions, runs, given.out)
    write_updates(runs, given.out)
    page = given.out / "index.md"
    if page.is_file():
        parts = {"cost": cost(runs), "continued": continued(runs), "tables": tables}
        fill(page, parts | claims.claim_tables(runs.shared))


if __name__ == "__main__":
    main()
