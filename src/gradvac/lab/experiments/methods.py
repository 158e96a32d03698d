"""Methods: runs read from their folders, and grouped by everything but their seed.

What the logs of runs say stands at the end: losses at equal steps and at equal time, and what
training cost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gradvac.analysis.run_files import flatten
from gradvac.lab.runs import RunFolder, TaskScores, read_scores
from gradvac.lab.runs.counts import SentenceCounts, read_counts
from gradvac.lab.training.settings import TECHNICAL, TECHNICAL_ELSEWHERE, RunConfig
from gradvac.utils.files import hash_of

SEED = "train.seed"
SEED_FOLDER = "seed-"  # begins the name of a run's folder within that of its method
PART = "+"  # METHOD+PART: models that stand together for one method, such as bilingual ones
_INIT = "model.init"
_RUNS = (_INIT, "align.options.run")  # settings that name a run, of the same seed as a rule
_NOT_COMPARED = {
    *(SEED, "align.seed", "sampling.seed", "data.prepared", "data.root"),
    "model.logits_per_chunk",  # how much memory the loss takes
    *(f"train.{key}" for key in TECHNICAL),
    *TECHNICAL_ELSEWHERE,
}
PLAN, PRIMARY = "sweep.json", "primary"  # in the folder of a sweep; its key of primary questions
JOINT = "joint"  # the name of the method that others are compared with, if one has it
LOSS = "dev/loss"
_SECONDS, _TRAIN_LOSS, _MEMORY = "train/seconds", "train/loss", "train/peak_memory"
_NUMBER = re.compile(rf"[-_.]?(?:{SEED_FOLDER}|seed)?\d+$")  # of a seed, at the end of a name
_LAST = 0.9  # a training loss is the mean of the log entries after this share of the steps


@dataclass(frozen=True)
class ScoredRun:
    """One run with its scores."""

    path: Path  # its folder; of several runs that stand together, that of the first
    seed: int  # `train.seed`
    settings: Mapping[str, Any]  # all settings but seeds, folders and technical ones, flat
    signature: Mapping[str, Any]  # of the run
    metrics: Sequence[Mapping[str, Any]]  # its log
    scores: TaskScores  # the metric that is compared
    counts: SentenceCounts | None  # what the scores are made of by sentence, if that is known


@dataclass(frozen=True)
class Method:
    """Runs that differ in nothing but their seed: a method.

    Attributes:
        name: What it is called.
        runs: By seed.
    """

    name: str
    runs: tuple[ScoredRun, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in order."""
        return tuple(run.seed for run in self.runs)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that all of its runs were scored on."""
        shared = set.intersection(*(set(run.scores.by_task) for run in self.runs))
        return tuple(task for task in self.runs[0].scores.by_task if task in shared)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders, and those in the folders of a sweep.

    Raises:
        ValueError: A path holds no run, or one is given twice.
    """
    run_paths: list[Path] = []
    for path in paths:
        runs_here = [path] if RunFolder(path).is_run() else _runs_below(path)
        if not runs_here:
            raise ValueError(f"{path}: holds no run; give run folders, or the folder of a sweep.")
        run_paths += runs_here
    resolved = [path.resolve() for path in run_paths]
    twice = [path for path in run_paths if resolved.count(path.resolve()) > 1]
    if twice:
        raise ValueError(f"{twice[0]}: is given twice; give every run once.")
    return run_paths


def _runs_below(path: Path) -> list[Path]:
    config = RunFolder(path).config.name
    nested = (file.parent for depth in ("*", "*/*") for file in path.glob(f"{depth}/{config}"))
    return sorted(nested)


def read_run(path: Path, *, split: str, weights: str | int, metric: str | None) -> ScoredRun | None:
    """Read a run; None if it has no such scores.

    Raises:
        ValueError: A file is damaged, scores and counts do not belong to each other, or the run
            was trained on since it was scored.
    """
    folder = RunFolder(path)
    scores_file = folder.scores_of(split, weights)
    if not scores_file.is_file():
        return None
    scores = read_scores(scores_file)
    if not folder.are_scores_current(split, weights):
        raise ValueError(folder.outdated(split, weights))
    chosen = scores[0] if metric is None else _named(metric, scores, scores_file)
    counts = read_counts(folder.counts_of(split, weights)).get(chosen.metric)
    if counts is not None:
        _check_counts(path, chosen, counts)
    settings = flatten(folder.read_table())
    compared = {
        key: value
        for key, value in (_younger_settings() | settings).items()
        if key not in _NOT_COMPARED
    }
    signature = folder.read_signature()
    for key in _RUNS:
        if key in settings:
            compared[key] = _parent(path, Path(str(settings[key])))
    if _INIT in settings:
        compared.pop("data.vocabulary.model", None)  # that run's
    else:  # weights to start from are part of the data, and differ from seed to seed
        compared["data"] = signature.get("data", "")
    return ScoredRun(
        path,
        int(settings.get(SEED, 0)),
        compared,
        signature,
        folder.read_metrics(),
        chosen,
        counts,
    )


@cache
def _younger_settings() -> dict[str, Any]:
    """Defaults: what stands for a setting that is younger than a run, and not in its config."""
    return flatten(RunConfig().model_dump(exclude_none=True))


def _parent(run: Path, init: Path) -> str:
    """A run that another one needs stands for its settings, as it has a seed too.

    A path that is not absolute was so from where the run was trained: a folder above it. If the
    folder of a sweep was moved or renamed since, the end of the path, METHOD/seed-N, finds it.
    """
    above = run.resolve().parents
    candidates = [*(folder / init for folder in above), init]
    candidates += [folder / Path(*init.parts[-2:]) for folder in above]
    folders = [RunFolder(path) for path in candidates if RunFolder(path).is_run()]
    settings = flatten(folders[0].read_table()) if folders else {}
    return hash_of({k: v for k, v in settings.items() if k not in _NOT_COMPARED} or str(init))[:8]


def _named(metric: str, scores: Sequence[TaskScores], path: Path) -> TaskScores:
    for one in scores:
        if one.metric.lower() == metric.lower():
            return one
    names = ", ".join(one.metric for one in scores)
    raise ValueError(f"--metric: {path} has no {metric!r}; there are {names}.")


def _check_counts(path: Path, scores: TaskScores, counts: SentenceCounts) -> None:
    for task, value in scores.by_task.items():
        made = counts.score(task) if task in counts.by_task else float("nan")
        if not abs(made - value) < 1e-6 * max(1.0, abs(value)):
            raise ValueError(
                f"{path}: the {scores.metric} of {task} is {value:.4f}, but its sentences give "
                f"{made:.4f}; the files in {RunFolder(path).scores} do not belong together: score "
                "the run again."
            )


def group_by_method(runs: Sequence[ScoredRun]) -> list[Method]:
    """Methods, in the order in which they come.

    They are named by their folders: METHOD/seed-N, or METHOD-N with another number for every seed,
    or METHOD if there is a single run. If that is not one name for each, by the settings in which
    they differ.

    Raises:
        ValueError: Two runs have the same settings and the same seed, or one name stands for
            different settings.
    """
    by_settings: dict[str, list[ScoredRun]] = {}
    for run in runs:
        by_settings.setdefault(hash_of(run.settings), []).append(run)
    groups = [tuple(sorted(group, key=lambda run: run.seed)) for group in by_settings.values()]
    methods = [Method(name, group) for name, group in zip(_names(groups), groups, strict=True)]
    for method in methods:
        _check_seeds(method)
    methods = _assembled(methods)
    names = [method.name for method in methods]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        namesakes = [method.runs[0] for method in methods if method.name == twice[0]]
        keys = _varying([run.settings for run in namesakes])
        raise ValueError(
            f"{namesakes[0].path} and {namesakes[1].path}: are both called {twice[0]}, but "
            f"differ in {', '.join(keys)}; give them folders of different names."
        )
    return methods


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    return [
        key for key in keys if len({repr(run_settings.get(key)) for run_settings in settings}) > 1
    ]


def _names(groups: Sequence[Sequence[ScoredRun]]) -> list[str]:
    """What methods are called."""
    in_sweeps = [_sweep_name(runs) for runs in groups]
    if all(in_sweeps):
        return in_sweeps  # two methods of one name are refused
    names = [name or _folder_name(runs) for name, runs in zip(in_sweeps, groups, strict=True)]
    if all(names) and len(set(names)) == len(names):
        return names
    varying = _varying([runs[0].settings for runs in groups])
    return [
        name or " ".join(_word(key, runs[0].settings) for key in varying if key in runs[0].settings)
        for name, runs in zip(in_sweeps, groups, strict=True)
    ]


def _sweep_name(runs: Sequence[ScoredRun]) -> str:
    paths = [run.path.resolve() for run in runs]
    parents = {path.parent.name for path in paths}
    is_sweep = len(parents) == 1 and all(path.name.startswith(SEED_FOLDER) for path in paths)
    return parents.pop() if is_sweep else ""


def _folder_name(runs: Sequence[ScoredRun]) -> str:
    names = {run.path.resolve().name for run in runs}
    if len(names) > 1:
        names = {_NUMBER.sub("", name) for name in names}
    return names.pop() if len(names) == 1 else ""


def _word(key: str, settings: Mapping[str, Any]) -> str:
    return f"{key.rpartition('.')[2]}={settings[key]}"


def _check_seeds(method: Method) -> None:
    for first, second in zip(method.runs, method.runs[1:], strict=False):
        if first.seed == second.seed:
            raise ValueError(
                f"{first.path} and {second.path}: have the same settings and the same seed "
                f"({first.seed}); leave one out."
            )


def _assembled(methods: Sequence[Method]) -> list[Method]:
    """Methods NAME+PART as one NAME, which has the tasks of all its parts."""
    by_name: dict[str, list[Method]] = {}
    for method in methods:
        by_name.setdefault(method.name.partition(PART)[0], []).append(method)
    assembled = []
    for name, parts in by_name.items():
        if not any(PART in part.name for part in parts):
            assembled += parts
            continue
        if len({part.seeds for part in parts}) > 1:
            raise ValueError(
                f"{name}: its parts {', '.join(p.name for p in parts)} have different seeds; "
                "train the missing ones."
            )
        runs = zip(*(part.runs for part in parts), strict=True)
        assembled.append(Method(name, tuple(map(_together, runs))))
    return assembled


def _together(runs: tuple[ScoredRun, ...]) -> ScoredRun:
    """Several models with different tasks as one run; what they cost is known, curves are not."""
    tasks = [task for run in runs for task in run.scores.by_task]
    if len(set(tasks)) < len(tasks):
        raise ValueError(f"{runs[0].path}: shares tasks with another part of its method.")
    scores = replace(
        runs[0].scores,
        by_task={task: value for run in runs for task, value in run.scores.by_task.items()},
        levels={task: level for run in runs for task, level in run.scores.levels.items()},
    )
    known = [run.counts for run in runs if run.counts is not None]
    counts = None
    if len(known) == len(runs):
        counts = replace(
            known[0],
            by_task={task: values for one in known for task, values in one.by_task.items()},
            sentences={task: name for one in known for task, name in one.sentences.items()},
        )
    return replace(runs[0], scores=scores, counts=counts, metrics=[])


@dataclass(frozen=True)
class Cost:
    """What the runs of a method cost, means over seeds; None: not known."""

    steps: float | None  # optimiser steps
    seconds: float | None  # training time, without validation and saving
    seconds_per_step: float | None
    peak_memory: float | None  # GiB, the most of any run: of the GPU, or of the process on a CPU
    best_step: float | None  # step of the best weights


def validations(run: ScoredRun, key: str) -> list[tuple[int, float]]:
    """Steps and values of something that was validated."""
    return [(entry["step"], entry[key]) for entry in run.metrics if entry.get(key) is not None]


def last_step(run: ScoredRun) -> int:
    """The last step in the log; 0 without one."""
    return max((int(entry["step"]) for entry in run.metrics), default=0)


def _seconds_at(run: ScoredRun, step: float) -> float:
    logged = [(0, 0.0), *validations(run, _SECONDS)]
    steps, seconds = zip(*logged, strict=True)
    return float(np.interp(step, steps, seconds))


def metric_of(run: ScoredRun) -> tuple[str, bool]:
    """What chose the best weights, and whether more of it is better."""
    settings = run.settings
    return str(settings.get("train.metric", LOSS)), bool(
        settings.get("train.higher_is_better", False)
    )


def best_step(run: ScoredRun) -> int | None:
    """The step of the best weights, by what chose them."""
    key, more_is_better = metric_of(run)
    validated = validations(run, key)
    if not validated:
        return None
    sign = -1.0 if more_is_better else 1.0
    return min(validated, key=lambda entry: (sign * entry[1], entry[0]))[0]


def at_best(run: ScoredRun, key: str) -> float:
    """A value at the step of the best weights; NaN if it is not known."""
    return dict(validations(run, key)).get(best_step(run) or -1, np.nan)


def common_step(runs: Sequence[ScoredRun], key: str) -> int | None:
    """The last step that all runs validated."""
    steps = [{step for step, _ in validations(run, key)} for run in runs]
    return max(set.intersection(*steps), default=None) if steps else None


def at_step(run: ScoredRun, key: str, step: int) -> float:
    """A value at a step that was validated."""
    return dict(validations(run, key)).get(step, np.nan)


def common_seconds(runs: Sequence[ScoredRun]) -> float | None:
    """The training time of the run that had least; None if some log has no times."""
    spent = [_seconds_at(run, last_step(run)) for run in runs]
    return min(spent) if spent and min(spent) > 0 else None


def after_seconds(run: ScoredRun, key: str, seconds: float) -> float:
    """A value after so much training time, between two validations on the line between them.

    NaN before the first validation.
    """
    validated = validations(run, key)
    if not validated:
        return np.nan
    steps, values = zip(*validated, strict=True)
    times = [_seconds_at(run, step) for step in steps]
    return float(np.interp(seconds, times, values, left=np.nan))


def train_loss(run: ScoredRun, step: int) -> float:
    """The mean training loss of the tenth of the steps that ends at `step`."""
    entries = validations(run, _TRAIN_LOSS)
    near = [value for at, value in entries if _LAST * step <= at <= step]
    return float(np.mean(near)) if near else np.nan


def cost_of(method: Method) -> Cost:
    """What its runs cost."""
    runs = [run for run in method.runs if run.metrics]
    if not runs:
        return Cost(None, None, None, None, None)
    steps = [last_step(run) for run in runs]
    seconds = [_seconds_at(run, step) for run, step in zip(runs, steps, strict=True)]
    memory = [_highest(run.metrics) for run in runs]
    best = [step for run in runs if (step := best_step(run)) is not None]
    return Cost(
        float(np.mean(steps)),
        float(np.mean(seconds)),
        sum(seconds) / sum(steps) if sum(steps) else None,
        max((value for value in memory if value is not None), default=None),
        float(np.mean(best)) if best else None,
    )


def _highest(metrics: Sequence[Mapping[str, object]]) -> float | None:
    values = [value for entry in metrics if isinstance(value := entry.get(_MEMORY), float)]
    return max(values, default=None)
