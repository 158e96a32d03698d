"""Runs as a comparison sees them: read from their folders, and grouped by all but the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gradvac.lab.runs import RunFolder, TaskScores, read_scores
from gradvac.lab.runs.files import hash_of
from gradvac.lab.runs.sentences import SentenceCounts, read_counts
from gradvac.lab.training.config import flatten
from gradvac.lab.training.settings import TECHNICAL, TECHNICAL_ELSEWHERE, RunConfig

SEED = "train.seed"
SEED_FOLDER = "seed-"  # begins the name of a run's folder within that of its method
PART = "+"  # METHOD+PART: models that stand together for one method, such as bilingual ones
_INIT = "model.init"
_FROZEN = "align.component_weights."  # from a run of the same seed, and so other ones for each
_NOT_COMPARED = {
    *(SEED, "align.seed", "sampling.seed", "data.prepared", "data.root"),
    "model.logits_per_chunk",  # how much memory the loss takes
    *(f"train.{key}" for key in TECHNICAL),
    *TECHNICAL_ELSEWHERE,
}


@dataclass(frozen=True)
class ScoredRun:
    """One run with its scores.

    Attributes:
        path: Its folder; of several runs that stand together, that of the first.
        seed: `train.seed`.
        settings: All settings but seeds, places and technical ones, flat.
        signature: Of the run.
        metrics: Its log.
        scores: The metric that is compared.
        counts: What the scores are made of by sentence, if that is known.
    """

    path: Path
    seed: int
    settings: Mapping[str, Any]
    signature: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    scores: TaskScores
    counts: SentenceCounts | None


@dataclass(frozen=True)
class Group:
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
    places = [path.resolve() for path in run_paths]
    twice = [path for path, place in zip(run_paths, places, strict=True) if places.count(place) > 1]
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
    settings = _settings(folder)
    compared = {
        key: value
        for key, value in (_younger_settings() | settings).items()
        if key not in _NOT_COMPARED and not key.startswith(_FROZEN)
    }
    signature = folder.read_signature()
    if _INIT in settings:
        compared[_INIT] = _parent(path, Path(str(settings[_INIT])))
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


def _settings(folder: RunFolder) -> dict[str, Any]:
    return flatten(folder.read_table())


@cache
def _younger_settings() -> dict[str, Any]:
    """Defaults: what stands for a setting that is younger than a run, and not in its config."""
    return flatten(RunConfig().model_dump(exclude_none=True))


def _parent(run: Path, init: Path) -> str:
    """A run to start from stands for its settings, as it has a seed too.

    A path that is not absolute was so from where the run was trained: a folder above it. If the
    folder of a sweep was moved or renamed since, the end of the path, METHOD/seed-N, finds it.
    """
    above = run.resolve().parents
    places = [*(folder / init for folder in above), init]
    places += [folder / Path(*init.parts[-2:]) for folder in above]
    folders = [RunFolder(place) for place in places if RunFolder(place).is_run()]
    settings = _settings(folders[0]) if folders else {}
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


def group_runs(runs: Sequence[ScoredRun]) -> list[Group]:
    """Methods, in the order in which they come.

    A run whose folder is METHOD/seed-N belongs to METHOD; others are named by the settings in
    which they differ.

    Raises:
        ValueError: Two runs have the same settings and the same seed, or one name stands for
            different settings.
    """
    by_settings: dict[str, list[ScoredRun]] = {}
    for run in runs:
        by_settings.setdefault(hash_of(run.settings), []).append(run)
    groups = list(by_settings.values())
    varying = _varying([members[0].settings for members in groups])
    methods = [
        Group(_name(members, varying), tuple(sorted(members, key=lambda run: run.seed)))
        for members in groups
    ]
    for group in methods:
        _check_seeds(group)
    methods = _assembled(methods)
    names = [group.name for group in methods]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        namesakes = [group.runs[0] for group in methods if group.name == twice[0]]
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


def _name(runs: Sequence[ScoredRun], varying: Sequence[str]) -> str:
    folders = {run.path.resolve().parent.name for run in runs}
    if len(folders) == 1 and all(run.path.resolve().name.startswith(SEED_FOLDER) for run in runs):
        return folders.pop()
    if not varying:
        return runs[0].path.resolve().name
    settings = runs[0].settings
    return " ".join(f"{key.split('.')[-1]}={settings[key]}" for key in varying if key in settings)


def _check_seeds(group: Group) -> None:
    for first, second in zip(group.runs, group.runs[1:], strict=False):
        if first.seed == second.seed:
            raise ValueError(
                f"{first.path} and {second.path}: have the same settings and the same seed "
                f"({first.seed}); leave one out."
            )


def _assembled(groups: Sequence[Group]) -> list[Group]:
    """Groups METHOD+PART as one METHOD, which has the tasks of all its parts."""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        method = group.name.partition(PART)[0] if PART in group.name else group.name
        by_name.setdefault(method, []).append(group)
    methods = []
    for method, parts in by_name.items():
        if not any(PART in part.name for part in parts):
            methods += parts
            continue
        seeds = {part.seeds for part in parts}
        if len(seeds) > 1:
            raise ValueError(
                f"{method}: its parts {', '.join(p.name for p in parts)} have different seeds; "
                "train the missing ones."
            )
        methods.append(
            Group(method, tuple(map(_together, zip(*(p.runs for p in parts), strict=True))))
        )
    return methods


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
    all_counts = [run.counts for run in runs if run.counts is not None]
    counts = None
    if len(all_counts) == len(runs):
        counts = replace(
            all_counts[0],
            by_task={
                task: values
                for run_counts in all_counts
                for task, values in run_counts.by_task.items()
            },
            sentences={
                task: name
                for run_counts in all_counts
                for task, name in run_counts.sentences.items()
            },
        )
    return replace(runs[0], scores=scores, counts=counts, metrics=[])
