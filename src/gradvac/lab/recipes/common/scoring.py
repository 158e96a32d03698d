"""Scores of a run on one set: what all recipes do around their own metrics.

A recipe scores one task at a time (`TaskResult`) and makes a table of all (`RunScores`);
`score_set` holds the lock, writes outputs, counts by sentence and scores to the run folder, and
notes which weights they belong to: `gradvac compare` and reports read any recipe's scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from gradvac.lab.runs import RunFolder, TaskScores
from gradvac.lab.runs.sentences import Counts, SentenceCounts, identify


@dataclass(frozen=True)
class TaskResult:
    """What scoring one task gave.

    Attributes:
        score: The score, in the recipe's own form.
        output: What was scored, for RUN/scores/SET.WEIGHTS.TASK.txt.
        counts: Metric -> the counts that it is computed from, example by example.
        examples: What identifies the examples and what was to be found in them: only scores of
            the same ones can be compared example by example.
    """

    score: Any
    output: str
    counts: Mapping[str, Counts]
    examples: Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class RunScores(ABC):
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

    @abstractmethod
    def by_metric(self) -> tuple[TaskScores, ...]:
        """Every metric's scores by task; reports show the first."""

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
            values = (one.show(one.by_task[task]) for one in metrics)
            shown.add_row(task, *values, *(cells[number] for cells in further.values()))
        shown.add_section()
        means = [one.by_level() for one in metrics]
        for level in means[0]:
            name = "average" if level == "all" else f"average, {level}"
            values = (f"{by_level[level]:.1f}" for by_level in means)
            shown.add_row(name, *values, *([""] * len(further)))
        return shown


S = TypeVar("S", bound=RunScores)


def score_set(
    run: Path,
    tasks: Iterable[str],
    score_task: Callable[[str], TaskResult],
    summarise: Callable[[Mapping[str, TaskResult], str], S],
    *,
    split: str,
    weights: str | int,
    of_weights: str,
    formulas: Mapping[str, str],
    console: Console | None = None,
) -> S:
    """Score all tasks of a set, and keep outputs, counts and scores in the run folder.

    Args:
        run: The run folder.
        tasks: Task names.
        score_task: Scores a task.
        summarise: Makes the scores of the run from the tasks' results and the run's signature.
        split: Name of the set.
        weights: "best", "last", "averaged", or a step.
        of_weights: What `RunFolder.identify_weights` said before they were read: training may
            replace them meanwhile.
        formulas: Metric -> how a score follows from its counts: see `runs.sentences.FORMULAS`.
        console: Where progress is shown; None: nowhere.
    """
    folder = RunFolder(run)
    with folder.lock_beside("scores"):
        shown = track(
            list(tasks), "Scoring", console=console or Console(quiet=True), transient=True
        )
        results = {task: score_task(task) for task in shown}
        scores = summarise(results, str(folder.read_signature().get("signature", "")))
        examples = {task: identify(result.examples) for task, result in results.items()}
        counts = [
            SentenceCounts(
                metric, formula, {t: one.counts[metric] for t, one in results.items()}, examples
            )
            for metric, formula in formulas.items()
        ]
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
