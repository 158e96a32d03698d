"""Scores by task, for any metric."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradvac.lab.runs.files import hash_of, read_json, write_json

ALL = "all"
_CHECK = "check"
_OF_WEIGHTS = "of_weights"
RESOURCE_LEVELS = ("high", "medium", "low", "extremely_low")


@dataclass(frozen=True)
class TaskScores:
    """What a run scores on one set, by one metric.

    Attributes:
        metric: Its name, as it appears in a sentence or on an axis: "BLEU", "F1".
        by_task: Task -> score.
        levels: Task -> resource level, as far as it is known.
        note: How it was scored, in a few words: the set, the weights, the metric's signature.
        higher_is_better: Whether a larger number is better.
        digits: Decimals to show.
    """

    metric: str
    by_task: Mapping[str, float]
    levels: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    higher_is_better: bool = True
    digits: int = 1

    def by_level(self) -> dict[str, float]:
        """Mean over the tasks of each resource level, largest first, and over "all"."""
        named = dict.fromkeys(self.levels[task] for task in self.by_task if task in self.levels)
        names = sorted(named, key=level_rank)
        groups = {
            name: [task for task in self.by_task if self.levels.get(task) == name] for name in names
        }
        groups[ALL] = list(self.by_task)
        return {
            name: sum(self.by_task[task] for task in tasks) / len(tasks)
            for name, tasks in groups.items()
            if tasks
        }

    def show(self, value: float) -> str:
        """A score with as many decimals as this metric has."""
        return f"{value:.{self.digits}f}"


def level_rank(level: str) -> int:
    """The place of a resource level in a table: from high to low, others last."""
    known = level in RESOURCE_LEVELS
    return RESOURCE_LEVELS.index(level) if known else len(RESOURCE_LEVELS)


def write_scores(
    path: Path,
    scores: Sequence[TaskScores],
    details: Mapping[str, Any] | None = None,
    *,
    of_weights: str = "",
) -> None:
    """Write the scores of one set; the metric to show first comes first.

    Args:
        path: The file; see `RunFolder.scores_of`.
        scores: One entry for every metric.
        details: What else the recipe wants to keep, ready for JSON.
        of_weights: What `RunFolder.identify_weights` said of the weights that were scored.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "scores": [asdict(one) for one in scores],
        "details": dict(details or {}),
        _OF_WEIGHTS: of_weights,
    }
    write_json(path, content | {_CHECK: hash_of(content)})


def read_scores(path: Path) -> tuple[TaskScores, ...]:
    """Read what `write_scores` wrote: one entry for every metric, the one to show first.

    Raises:
        ValueError: The file is damaged, or something else.
    """
    try:
        content = json.loads(path.read_bytes())
        check = content.pop(_CHECK, None)  # which scores of another origin need not have
        if check is not None and check != hash_of(content):
            raise ValueError("it is not what was written")
        scores = tuple(TaskScores(**entry) for entry in content["scores"])
        if not scores:
            raise ValueError("it holds none")
        for one in scores:
            _check(one)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path}: holds no scores by task, or is damaged ({reason}); score again, or remove it."
        ) from None
    return scores


def scored_weights(path: Path) -> str:
    """Which weights were scored, as passed to `write_scores`; empty if unknown."""
    return str(read_json(path).get(_OF_WEIGHTS, ""))


def _check(scores: TaskScores) -> None:
    for task, value in scores.by_task.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the {scores.metric} of {task} is {str(value)[:40]}, no number")
    for name, kind in (("metric", str), ("note", str), ("digits", int), ("levels", dict)):
        if not isinstance(getattr(scores, name), kind):
            raise ValueError(f"{name} is {str(getattr(scores, name))[:40]}")
