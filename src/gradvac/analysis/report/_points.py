"""Points of scatters and lines that need some counting first."""

# S steps, K components, T tasks

from typing import Any

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import views
from gradvac.analysis.report.quantities import rounded
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty


def against_distance(main: Similarities, run: Run) -> list[dict[str, Any]]:
    """Every pair's known distance and similarity, in every part that has enough of both."""
    panels = []
    for part, matrix, distances in views.against_distance(main, run.distances):
        assert run.distances is not None
        labels = task_names.labels(part.tasks)
        rows, columns = np.tril_indices(len(labels), -1)
        known = ~np.isnan(matrix[rows, columns]) & ~np.isnan(distances[rows, columns])
        rows, columns = rows[known], columns[known]
        panels.append(
            {
                "name": part.name,
                "what": run.distances.name,
                "x": rounded(distances[rows, columns]),
                "y": rounded(matrix[rows, columns]),
                "pairs": [
                    f"{labels[j]} and {labels[i]}" for i, j in zip(rows, columns, strict=True)
                ],
            }
        )
    return panels


def against_score(main: Similarities, run: Run) -> list[dict[str, Any]]:
    """Every scored task's mean similarity with the others, and its score."""
    if run.scores is None:
        return []
    return [
        {"task": task, "x": round(x, 4), "y": y}
        for task, x, y in views.similarity_and_score(main, run.scores)
    ]


def reliability_by_step(run: Run) -> list[dict[str, Any]]:
    """How well tasks agree with themselves on other lines, by step and side."""
    halves = views.two_halves(run)
    if halves is None or halves.reliability is None:
        return []
    lines = []
    for side in views.sides_of(halves):
        chosen = weighty(halves.components, None if side == views.MODEL else side)
        means = mean_where_known(halves.reliability[:, chosen], axis=(1, 2))
        lines.append({"name": side, "steps": halves.steps.tolist(), "values": rounded(means)})
    return lines
