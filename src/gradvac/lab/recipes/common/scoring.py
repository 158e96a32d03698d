"""Scores of a run on one set: what all recipes do around their own metrics.

A recipe opens a `Scorer`, which scores one task at a time; `score_run` holds the lock, writes
outputs, counts by sentence and scores to the run folder, and notes which weights they belong to, so
that `gradvac compare` and reports read any recipe's scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradvac.lab.runs import RunFolder, TaskScores
from gradvac.lab.runs.counts import Counts, SentenceCounts, identify
from gradvac.lab.training import RunConfig, choose_device
from gradvac.lab.training.settings import trained_settings


@dataclass(frozen=True)
class TaskResult:
    """What scoring one task gave.

    Attributes:
        score: The score: metric -> value, or whatever the recipe's own `RunScores` expects.
        output: What was scored, for RUN/scores/SET.WEIGHTS.TASK.txt.
        counts: Metric -> the counts that it is computed from, example by example; a metric that
            this task has no number of is left out.
        examples: What identifies the examples and what was to be found in them: only scores of
            the same ones can be compared example by example.
    """

    score: Any
    output: str
    counts: Mapping[str, Counts]
    examples: Sequence[str] | Sequence[Sequence[str]]


def compare_labels(found: Sequence[object], expected: Sequence[object]) -> TaskResult:
    """The result of a task whose examples have one label each: accuracy, in percent."""
    output, truth = [*map(str, found)], [*map(str, expected)]
    rows = [(one == other, 1) for one, other in zip(output, truth, strict=True)]
    counts = np.array(rows, dtype=np.int64)
    score = {"accuracy": 100 * float(counts[:, 0].mean())}
    return TaskResult(score, "\n".join([*output, ""]), {"accuracy": counts}, truth)


@dataclass(frozen=True)
class RunScores:
    """The scores of a run on one set; a recipe adds what else belongs to them.

    Attributes:
        run: The run folder.
        split: Name of the set.
        weights: Which weights were used.
        by_task: Task -> score.
        levels: Task -> resource level, where known.
        signature: The run's signature.
    """

    task_word: ClassVar[str] = "task"
    run: str
    split: str
    weights: str
    by_task: Mapping[str, Any]
    levels: Mapping[str, str]
    signature: str

    def by_metric(self) -> tuple[TaskScores, ...]:
        """Every metric's scores by task; reports show the first."""
        metrics = next(iter(self.by_task.values()))
        note = f"{self.split} set, {self.weights} weights"
        return tuple(
            TaskScores(name, {t: one[name] for t, one in self.by_task.items()}, self.levels, note)
            for name in metrics
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self) | {"means": {one.metric: one.by_level() for one in self.by_metric()}}

    def further_columns(self) -> dict[str, list[str]]:
        """What else a table shows of every task: heading -> cells."""
        return {}

    def table(self) -> Table:
        """The scores as a table."""
        metrics, further = self.by_metric(), self.further_columns()
        title = f"{self.run}: {self.split}, {self.weights} weights"
        shown = Table(title=title, title_justify="left")
        shown.add_column(self.task_word)
        for heading in (*(one.metric for one in metrics), *further):
            shown.add_column(heading, justify="right")
        for number, task in enumerate(self.by_task):
            values = (_cell(one, one.by_task.get(task)) for one in metrics)
            shown.add_row(task, *values, *(cells[number] for cells in further.values()))
        shown.add_section()
        means = [one.by_level() for one in metrics]
        for level in means[0]:
            name = "average" if level == "all" else f"average, {level}"
            pairs = zip(metrics, means, strict=True)
            values = (_cell(one, by_level.get(level)) for one, by_level in pairs)
            shown.add_row(name, *values, *([""] * len(further)))
        return shown


def _cell(scores: TaskScores, value: float | None) -> str:
    return "-" if value is None else scores.show(value)


S = TypeVar("S", bound=RunScores)


@dataclass(frozen=True)
class Scorer(Generic[S]):
    """A run's model, loaded to score a set.

    Attributes:
        tasks: Task names.
        score: Scores a task.
        formulas: Metric -> how a score follows from its counts: see `runs.counts.FORMULAS`.
        summarise: Makes the scores of the run, given what `RunScores` takes.
        levels: Task -> resource level, where known.
        complete: Adds what is scored of all tasks at once.
    """

    tasks: Sequence[str]
    score: Callable[[str], TaskResult]
    formulas: Mapping[str, str]
    summarise: Callable[..., S] = RunScores  # type: ignore[assignment]
    levels: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[dict[str, TaskResult]], dict[str, TaskResult]] = lambda results: results


def score_run(
    run: str | Path,
    settings_class: type[RunConfig],
    open_scorer: Callable[[Any, Path, str, str | int, torch.device], Scorer[S]],
    *,
    split: str = "test",
    weights: str | int = "best",
    device: str = "auto",
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> S:
    """Score a set with a run's model, and keep outputs and scores in the run folder.

    Writes RUN/scores/SET.WEIGHTS.json, the counts of every sentence beside it, for comparisons,
    and what was scored: RUN/scores/SET.WEIGHTS.TASK.txt.

    Args:
        run: The run folder.
        settings_class: The class of its config.
        open_scorer: `open_scorer(settings, run, split, weights, device)` loads the model.
        split: "test", "dev", or another set that was prepared.
        weights: "best", "last", "averaged", or a step.
        device: "auto", "cpu", "cuda", ...
        overrides: Of the run's config, such as "data.prepared=...".
        console: Where progress is shown; None: nowhere.
    """
    run = Path(run)
    folder = RunFolder(run)
    settings = trained_settings(settings_class, run, overrides)
    of_weights = folder.identify_weights(weights)  # before they are read: training may replace them
    scorer = open_scorer(settings, run, split, weights, choose_device(device))
    console = console or Console(quiet=True)
    with folder.lock_beside("scores"):
        tasks = track(list(scorer.tasks), "Scoring", console=console, transient=True)
        results = scorer.complete({task: scorer.score(task) for task in tasks})
        scores = scorer.summarise(
            run=str(run),
            split=split,
            weights=str(weights),
            by_task={task: result.score for task, result in results.items()},
            levels=dict(scorer.levels),
            signature=str(folder.read_signature().get("signature", "")),
        )
        examples = {task: identify(result.examples) for task, result in results.items()}
        counts = []
        for metric, formula in scorer.formulas.items():
            by_task = {t: one.counts[metric] for t, one in results.items() if metric in one.counts}
            of_these = {task: examples[task] for task in by_task}
            counts.append(SentenceCounts(metric, formula, by_task, of_these))
        folder.write_scored(
            split,
            weights,
            outputs={task: result.output for task, result in results.items()},
            counts=counts,
            scores=scores.by_metric(),
            details=scores.to_dict(),
            of_weights=of_weights,
        )
    return scores
