"""Scores of several runs, side by side."""

from collections.abc import Sequence

from gradvac.analysis.run import Run
from gradvac.run_files import TaskScores


def by_one_metric(runs: Sequence[Run]) -> list[TaskScores | None]:
    """The scores of each run, by the metric of the first that was scored.

    None for a run that was not scored, or scored by another metric, which is not comparable.
    """
    metric = next((run.scores.metric for run in runs if run.scores is not None), None)
    return [
        run.scores if run.scores is not None and run.scores.metric == metric else None
        for run in runs
    ]
