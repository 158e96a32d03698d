"""Write tables from the runs of `gradvac sweep one_gpu` and those that go on.

    python docs/results/write_tables.py runs/one_gpu runs/one_gpu_more --out TABLES

Every table is a comparison of some methods on the seeds that all of them finished, so that runs are
paired; methods with fewer than two seeds are left out, and named; if these are most, there is no
table. Beside them: the claims one by one (`claims.py`), how far short runs predict long ones, and
what each rule did to the update. A run that is in several folders is read from the first one that
has scored it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import claims
from prediction import prediction_table, predictions
from questions import CONSTRUCTED, QUESTIONS, Question
from together import together_table
from updates import length_table, noise_table, update_table

from gradvac.analysis.figures.style import save_figure
from gradvac.analysis.record import Record, read_record
from gradvac.files import read_json, write_text
from gradvac.lab.experiments import compare_runs, to_markdown
from gradvac.lab.experiments.methods import LOSS
from gradvac.lab.experiments.page import comparison_figures
from gradvac.lab.experiments.sweep import HALVING
from gradvac.lab.runs import RunFolder, read_scores

_FEWEST = 2  # seeds
_PREDICTED = {"prediction": ("table1", "main", "mixture"), "prediction_long": ("long",)}
_TWICE = (
    ("joint", "long_joint", "another sweep, later code"),
    ("temperature2", "long_temperature2", "another sweep, later code"),
    ("joint", "joint_again", "a third sweep, later code"),
    ("joint", "joint_as_written", "no CUDA graph"),
    ("gradvac", "gradvac_as_written", "no CUDA graph"),
    ("gradvac", "long_gradvac", "another sweep, later code"),
    ("temperature2_gradvac", "long_temperature2_gradvac", "another sweep, later code"),
)
_DRAWN = "front"


class Runs:
    """The scored runs of some sweeps.

    Args:
        folders: Of the sweeps.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def seeds_of(self, method: str) -> dict[int, list[Path]]:
        """Seed -> the scored runs of a method: one, or all its parts."""
        own = {name: runs for name, runs in self.methods() if name.partition("+")[0] == method}
        found: dict[int, list[Path]] = {}
        for runs in own.values():
            for run in filter(_is_scored, runs):
                found.setdefault(_seed_of(run), []).append(run)
        return {seed: runs for seed, runs in found.items() if len(runs) == len(own)}

    def shared(self, methods: Sequence[str]) -> dict[int, list[Path]]:
        """Seed -> the runs of all these methods, where all have it."""
        found = [self.seeds_of(method) for method in methods]
        seeds = sorted(set.intersection(*map(set, found))) if found else []
        return {seed: [run for own in found for run in own[seed]] for seed in seeds}

    def losses(self, method: str) -> dict[int, dict[int, float]]:
        """Seed -> step -> development loss, of runs that ended and of runs that were stopped."""
        return {_seed_of(run): _losses(run) for run in dict(self.methods()).get(method, [])}

    def best_losses(self, method: str) -> dict[int, float]:
        """Seed -> the best development loss, of runs that are scored."""
        found = self.losses(method)
        return {seed: min(found[seed].values()) for seed in self.seeds_of(method)}

    def scores(self, method: str) -> dict[int, float]:
        """Seed -> the mean score over tasks."""
        return {
            seed: float(np.mean([score for run in own for score in _scores(run).values()]))
            for seed, own in self.seeds_of(method).items()
        }

    def records(self) -> Iterator[tuple[str, list[Record]]]:
        """Method -> the records of its scored runs."""
        for name, own in self.methods():
            kept = [RunFolder(run).record for run in own if _is_scored(run)]
            yield name, [read_record(path) for path in kept if path.is_file()]

    def methods(self) -> Iterator[tuple[str, list[Path]]]:
        """Method -> its runs, scored or not: one for each seed, a scored one if there is one."""
        every: dict[str, dict[int, Path]] = {}
        for folder in self.folders:
            for run in sorted(folder.glob("*/seed-*")):
                kept = every.setdefault(run.parent.name, {})
                known = kept.get(_seed_of(run))
                if known is None or (_is_scored(run) and not _is_scored(known)):
                    kept[_seed_of(run)] = run
        for name, runs in sorted(every.items()):
            yield name, [runs[seed] for seed in sorted(runs)]


def write_question(question: Question, runs: Runs, out: Path) -> str:
    """Write a table; how many runs it has, or why there is none."""
    there = [method for method in question.methods if len(runs.seeds_of(method)) >= _FEWEST]
    left_out = [method for method in question.methods if method not in there]
    target = out / f"{question.name}.md"
    target.unlink(missing_ok=True)
    if question.methods[0] not in there or len(there) < max(2, len(left_out)):
        return f"{question.name}: no table: too few runs of {', '.join(left_out)}"
    shared = runs.shared(there)
    if len(shared) < _FEWEST:
        return f"{question.name}: no table: no two seeds in common"
    found = compare_runs(
        [path for own in shared.values() for path in own], baseline=question.methods[0]
    )
    text = to_markdown(found).partition("\n")[2].lstrip("\n")
    missing = f"Left out, as fewer than two seeds were finished: {', '.join(left_out)}.\n\n"
    write_text(target, f"# {question.asked}\n\n{missing if left_out else ''}{text}")
    return f"{question.name}: {len(there)} methods, {len(shared)} seeds"


def write_predictions(name: str, questions: Sequence[str], runs: Runs, out: Path) -> None:
    """How far short runs predict long ones: methods from English, on the seeds that they share."""
    asked = [question.methods for question in QUESTIONS if question.name in questions]
    methods = dict.fromkeys(method for own in asked for method in own)
    there = [method for method in methods if len(runs.seeds_of(method)) > _FEWEST]
    shared = sorted(runs.shared(there))
    points = {
        method: [path for seed in shared for path in runs.seeds_of(method)[seed]]
        for method in there
    }
    if shared and (found := predictions(points)):
        about = "# How far short runs predict long ones\n\nDevelopment loss. "
        about += f"{len(points)} methods ({', '.join(points)}), {len(shared)} seeds each.\n\n"
        write_text(out / f"{name}.md", about + prediction_table(found))


def write_picture(runs: Runs, out: Path) -> None:
    """The trade-off between resource levels: mixtures and their front, and all other methods."""
    methods = next(question.methods for question in QUESTIONS if question.name == _DRAWN)
    paths = [path for own in runs.shared(methods).values() for path in own]
    if paths:
        figures = comparison_figures(compare_runs(paths, baseline=methods[0]))
        save_figure(figures["trade_off"], out / _DRAWN, ("svg",))


def cost(runs: Runs) -> str:
    """What all runs took."""
    scored = [run for name, own in runs.methods() for run in own if _is_scored(run)]
    steps, seconds = np.sum([_last(run) for run in scored], axis=0)
    devices = sorted({str(RunFolder(run).read_signature()["device"]) for run in scored})
    return (
        f"{len(scored)} scored runs of {len(runs.folders)} sweeps on {', '.join(devices)}: "
        f"{steps:,.0f} steps, {seconds / 60:,.0f} minutes of training, many at a time.\n"
    )


def _seed_of(run: Path) -> int:
    return int(run.name.removeprefix("seed-"))


def _is_scored(run: Path) -> bool:
    return RunFolder(run).scores_of("test", "best").is_file()


def _last(run: Path) -> tuple[float, float]:
    entries = [e for e in RunFolder(run).read_metrics() if e.get("train/seconds") is not None]
    return float(entries[-1]["step"]), float(entries[-1]["train/seconds"])


def twice(runs: Runs) -> str:
    """How far runs of one method, one seed and the same batches are apart."""
    lines = ["| method | the other run | seeds | largest difference of development loss |"]
    lines.append("| --- | --- | --- | --- |")
    for method, other, how in _TWICE:
        first, second = runs.losses(method), runs.losses(other)
        apart = {
            seed: [
                abs(first[seed][step] - second[seed][step])
                for step in sorted(set(first[seed]) & set(second[seed]))
            ]
            for seed in sorted(set(first) & set(second))
        }
        known = [max(own) for own in apart.values() if own]
        if known:
            lines.append(f"| {method} | {how} | {len(known)} | {max(known):.4f} |")
    return "\n".join(lines) + "\n"


def _scores(run: Path) -> Mapping[str, float]:
    return read_scores(RunFolder(run).scores_of("test", "best"))[0].by_task


def _losses(run: Path) -> dict[int, float]:
    entries = RunFolder(run).read_metrics()
    return {entry["step"]: entry[LOSS] for entry in entries if entry.get(LOSS) is not None}


def halving_table(folder: Path) -> str:
    """The rounds of a sweep with `--halving`: how many points there were, and which went on."""
    told = read_json(folder / HALVING)["rungs"]
    lines = [
        "| step | points | best | development loss | kept |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rung in told:
        losses, kept = rung["losses"], rung["kept"]
        best, others = kept[0], ", ".join(kept[1:])
        row = [f"{rung['step']:,}", str(len(losses)), best, f"{losses[best]:.3f}", others]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--halved", type=Path, help="a sweep with --halving")
    parser.add_argument("--constructed", type=Path, help="the sweep of this name")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the tables")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(given.runs)
    for question in QUESTIONS:
        print(write_question(question, runs, given.out))
    write_picture(runs, given.out)
    for name, questions in _PREDICTED.items():
        write_predictions(name, questions, runs, given.out)
    records = dict(runs.records())
    parts = {"updates": update_table(records), "cost": cost(runs), "twice": twice(runs)}
    parts |= {"noise": noise_table(records), "length_variation": length_table(records)}
    parts["together"] = together_table(runs.scores, runs.best_losses)
    if given.halved is not None:
        parts["halving"] = halving_table(given.halved)
    if given.constructed is not None:
        made = Runs([given.constructed])
        print(write_question(CONSTRUCTED, made, given.out))
        parts["constructed_claims"] = claims.constructed_table(made.shared, made.losses)
    found = claims.claim_tables(runs.shared, runs.losses)
    parts |= {f"claims_{name}": text for name, text in found.items()}
    for name, text in parts.items():
        write_text(given.out / f"{name}.md", text)


if __name__ == "__main__":
    main()
