"""Figures made of lines and points: 2b, 3, 4b, 4c, and similarity against known distance."""

# S steps, K components, T tasks

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.figures.style import (
    DASHES,
    INKS,
    MissingError,
    cosine_axis,
    legend,
    name_points,
    new_figure,
)
from gradvac.analysis.run import Run, scores_by_one_metric
from gradvac.analysis.similarities import Similarities
from gradvac.sides import DECODER, ENCODER, SHARED, side_of

Counts = NDArray[np.int64]

_FEWEST_FOR_CORRELATION = 4
_MOST_TICKS = 12


def score_against_similarity(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 2b: score of a task that all runs share against its similarity to their others."""
    sources = zip(runs, map(views.main_source, runs), scores_by_one_metric(runs), strict=True)
    full = [(run, main, scores) for run, main, scores in sources if main is not None and scores]
    if len(full) < 3:
        raise MissingError("needs at least 3 runs with similarities and scores.")
    common = [
        task
        for task in full[0][2].by_task
        if all(task in scores.by_task and task in main.tasks for _, main, scores in full)
    ]
    if not common:
        raise MissingError("needs a task that is scored and measured in all runs.")
    task = common[0]
    points = [(_similarity_of(task, main), scores.by_task[task]) for _, main, scores in full]
    figure = new_figure(4.6, 3.6)
    axes = figure.subplots()
    cosines, values = zip(*points, strict=True)
    axes.scatter(cosines, values, color=INKS[0], s=26, zorder=3)
    names = []
    for run, main, _ in full:
        languages = zip(main.tasks, task_names.other_languages(main.tasks), strict=True)
        others = [language for other, language in languages if other != task]
        names.append(others[0] if len(others) == 1 else run.name)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel(f"cosine of {task} with the other tasks of its model")
    axes.set_ylabel(f"{full[0][2].metric} of {task}")
    axes.set_title(_correlation(points), loc="left")
    name_points(figure, names, points, ["black"] * len(names))
    return {task: figure}


def active_shares(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 3: pairs in conflict, where PCGrad acts, and pairs below their target, over steps.

    The paper counts pairs. Shares compare runs with other tasks or components; they are of the
    pairs that the rule could alter (those of vaccinated tasks), in layers.
    """
    recorded = [(run, run.record) for run in runs if run.record is not None]
    if not recorded:
        raise MissingError("needs a run that recorded its training.")
    figure = new_figure(7.2, 2.9)
    left, right = figure.subplots(1, 2, sharey=True)
    drawn: dict[str, Artist] = {}
    for number, (run, record) in enumerate(recorded):
        color = INKS[number % len(INKS)]
        counts = statistics.rule_counts(record)
        drawn[run.name] = _smoothed(left, record.steps, counts.conflicts, counts.eligible, color)
        if not np.isnan(record.target).all():
            _smoothed(right, record.steps, counts.active, counts.eligible, color)
    left.set_title("pairs below 0 (PCGrad)", loc="left")
    right.set_title("below the target (active)", loc="left")
    left.set_ylabel("of the pairs it could alter")
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    if not right.lines:
        right.text(0.5, 0.5, "no run has targets", transform=right.transAxes, ha="center")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
    if len(recorded) > 1:
        legend(figure, drawn, loc="outside right upper", fontsize=8)
    return {"": figure}


def _smoothed(axes: Axes, steps: Counts, counts: Counts, eligible: Counts, color: str) -> Artist:
    """Shares scatter from batch to batch: pale as they are, strong as a running mean."""
    near = np.ones(min(len(counts), max(1, len(counts) // 30)))
    axes.plot(steps, _share(counts, eligible), color=color, alpha=0.25, linewidth=0.7)
    mean = _share(np.convolve(counts, near, "same"), np.convolve(eligible, near, "same"))
    return axes.plot(steps, mean, color=color)[0]


def _share(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    share = np.full(len(part), np.nan)
    np.divide(part, whole, out=share, where=whole > 0)
    return share


def layers(runs: Sequence[Run]) -> dict[str, Figure]:
    """Figure 4b: mean similarity by layer."""
    sources = [(run, views.main_source(run)) for run in runs]
    layers_of_runs = [(run, [] if main is None else views.by_layer(main)) for run, main in sources]
    if not any(lines for _, lines in layers_of_runs):
        raise MissingError(
            "needs components that carry the number of a layer (all_layer, all_matrix)."
        )
    figure = new_figure(6.2, 3.2)
    axes = figure.subplots()
    sides = (ENCODER, DECODER, SHARED)
    drawn: dict[str, Artist] = {}
    for number, (run, lines) in enumerate(layers_of_runs):
        for part, points in lines:
            name = f"{views.short(run.name)}, {part.name}" if len(runs) > 1 else part.name
            look: dict[str, Any] = {
                "color": INKS[sides.index(part.side)],
                "linestyle": DASHES[number % len(DASHES)],
                "marker": "s" if task_names.is_into_pivot(part.direction) else "o",
                "fillstyle": "none" if task_names.is_into_pivot(part.direction) else "full",
            }
            drawn[name] = axes.plot(*zip(*points, strict=True), **look)[0]
    numbers = [layer for _, lines in layers_of_runs for _, points in lines for layer, _ in points]
    first, last = min(numbers), max(numbers)
    axes.set_xticks(range(first, last + 1, (last - first) // _MOST_TICKS + 1))
    axes.set_xlabel("layer")
    axes.set_ylabel("cosine, mean of pairs and steps")
    cosine_axis(axes)
    legend(figure, drawn, loc="outside right upper", fontsize=8)
    return {"": figure}


def steps(runs: Sequence[Run], pairs: Sequence[tuple[str, str]] | None) -> dict[str, Figure]:
    """Figure 4c: similarity of some pairs over steps, in the encoder and in the decoder."""
    drawn = {}
    for run in runs:
        main = views.main_source(run)
        if main is None or len(main.steps) < 2 or len(main.tasks) < 2:
            continue
        chosen = [p for p in pairs or views.example_pairs(main) if set(p) <= set(main.tasks)]
        if not chosen:
            continue
        drawn[run.name] = _steps(run.name, main, chosen)
    if not drawn:
        raise MissingError("needs similarities at two steps or more, and pairs that the run has.")
    return drawn


def _steps(name: str, main: Similarities, pairs: Sequence[tuple[str, str]]) -> Figure:
    sides = views.sides_of(main)
    labels = dict(zip(main.tasks, task_names.labels(main.tasks), strict=True))
    figure = new_figure(3.4 * len(sides) + 2.0, 3.1)
    panels = np.atleast_1d(figure.subplots(1, len(sides), sharey=True))
    drawn: dict[str, Artist] = {}
    for axes, side in zip(panels, sides, strict=True):
        inside = [
            component
            for component in main.components
            if side == views.MODEL or side_of(component) == side
        ]
        part = main.select(components=inside)
        for number, pair in enumerate(pairs):
            values = statistics.mean_by_step(part, pair)
            color = INKS[number % len(INKS)]
            label = " and ".join(views.short(labels[task], 16) for task in pair)
            drawn[label] = axes.plot(main.steps, values, color=color)[0]
        axes.set_title(f"{views.short(name, 24)}: {side}", loc="left")
        axes.set_xlabel("step")
    for axes in panels:  # which share a scale: not before all lines are drawn
        cosine_axis(axes)
    panels[0].set_ylabel("cosine")
    legend(figure, drawn, loc="outside right upper", fontsize=8)
    return figure


def distance(runs: Sequence[Run]) -> dict[str, Figure]:
    """Similarity of every pair against its known distance, in the encoder and in the decoder."""
    drawn = {}
    for run in runs:
        main = views.main_source(run)
        if main is None or run.distances is None:
            continue
        with_distances = views.against_distance(main, run.distances)
        if with_distances:
            drawn[run.name] = _distance(run.name, run.distances.name, with_distances)
    if not drawn:
        raise MissingError("needs five tasks of one direction with different known distances.")
    return drawn


def _distance(
    name: str, what: str, with_distances: Sequence[tuple[views.Section, views.Matrix, views.Matrix]]
) -> Figure:
    sides = list(dict.fromkeys(part.side for part, _, _ in with_distances))
    figure = new_figure(3.4 * len(sides) + 0.6, 3.1)
    panels = np.atleast_1d(figure.subplots(1, len(sides), sharey=True))
    drawn: dict[str, dict[str, Artist]] = {side: {} for side in sides}
    for part, matrix, distances in with_distances:
        axes = panels[sides.index(part.side)]
        pairs = np.tril_indices(len(matrix), -1)
        r, p_value = statistics.mantel(matrix, distances)
        way = f"{part.direction}: " if part.direction else ""
        label = f"{way}r = {r:z.2f}, p = {p_value:.4f}"
        is_outward = bool(part.direction) and not task_names.is_into_pivot(part.direction)
        color = INKS[is_outward]
        look: dict[str, Any] = {"s": 12, "alpha": 0.6, "color": color}
        drawn[part.side][label] = axes.scatter(distances[pairs], matrix[pairs], **look)
        axes.set_title(f"{views.short(name, 24)}: {part.side}", loc="left")
        axes.set_xlabel(what)
    for axes, side in zip(panels, sides, strict=True):
        below = (0.5, -0.22)  # on no point
        legend(axes, drawn[side], fontsize=8, loc="upper center", bbox_to_anchor=below)
        cosine_axis(axes)
    panels[0].set_ylabel("cosine of a pair")
    return figure


def _similarity_of(task: str, main: Similarities) -> float:
    """Mean similarity of one task with the others."""
    matrix = statistics.mean_matrix(main)
    row = np.delete(matrix[main.tasks.index(task)], main.tasks.index(task))
    return float(row[~np.isnan(row)].mean())


def _correlation(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < _FEWEST_FOR_CORRELATION:
        return f"{len(points)} runs: too few for a correlation"
    try:
        correlation = statistics.similarity_against_score(points)
    except ValueError:
        return "no correlation: a value is the same in all runs"
    low, high = correlation.interval
    return (
        f"Spearman {correlation.rho:z.2f} [{low:z.2f}, {high:z.2f}], p = {correlation.p_value:.3f}"
    )
