"""Which maps and plots some runs give; report and figures draw them."""

# S steps, K components, T tasks

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.plots import (
    INKS,
    HeatMap,
    MissingError,
    Plot,
    Series,
    TaskTree,
    all_values,
    honest_range,
    range_around_one,
)
from gradvac.analysis.record import Record
from gradvac.analysis.run import Run, scores_by_one_metric
from gradvac.analysis.run_files import level_rank
from gradvac.analysis.similarities import Similarities, mean_where_known
from gradvac.analysis.views import Matrix
from gradvac.engine.components import DECODER, ENCODER, SHARED, side_of

WHOLE_MODEL = "whole model"
_SIDES = (ENCODER, DECODER, SHARED)
_RUN_MARKERS = ("circle", "diamond-open", "cross-thin-open", "square-open")
_FAMILY_MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
_MOST_METRIC_POINTS = 1000
_IN_RECORD = ("/similarity/", "/lowest/", "/norm/")  # of pairs and tasks: maps show these
_MANY_POINTS = 40  # of a line: more need no markers
_CONFLICTS, _ACTIVE = "pairs below 0 (PCGrad)", "below the target (active)"
_LOSSES, _TASK_LOSSES = "loss, training and validation", "validation loss of each task"

Order = tuple[list[int], list[views.Block]]


def shared_order(tasks: Sequence[str], run: Run, runs: Sequence[Run]) -> Order:
    """Families together; the same order in all drawings of the same tasks, so that they compare."""
    for other in runs:
        for first in views.sources(other).values():
            if set(first.tasks) == set(tasks):
                matrix = statistics.mean_matrix(first.select(tasks=tasks))
                return views.order_by_family(matrix, tasks, run.families)
    raise AssertionError("a run is one of the runs")


def _bounds(matrices: Iterable[Matrix]) -> tuple[float, float]:
    values = np.concatenate([views.pair_values(matrix) for matrix in matrices])
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _map(
    matrix: Matrix,
    tasks: Sequence[str],
    arranged: Order,
    what: str,
    bounds: tuple[float, float],
    **more: Any,
) -> HeatMap:
    """A map with its rows and columns in order; the diagonal of a symmetric one is blank."""
    order, blocks = arranged
    values = np.array(matrix, dtype=np.float64)[np.ix_(order, order)]
    if "rows" not in more:
        np.fill_diagonal(values, np.nan)
    labels = task_names.labels(tasks)
    names = tuple(labels[i] for i in order), tuple(tasks[i] for i in order)
    return HeatMap(values, *names, blocks, what, bounds, **more)


def with_similarities(runs: Sequence[Run]) -> list[tuple[Run, Similarities]]:
    """Runs whose main similarities have pairs."""
    sources = [(run, views.main_source(run)) for run in runs]
    usable = [(run, main) for run, main in sources if main is not None and len(main.tasks) > 1]
    if not usable:
        raise MissingError("needs similarities of at least two tasks.")
    return usable


def similarity_maps(run: Run, main: Similarities) -> dict[str, HeatMap]:
    """Similarity of each side and direction, clustered by family, in the same colours."""
    groups = task_names.by_direction(main.tasks).items()
    matrices = {
        (side, direction): views.side_matrix(main, side, tasks)
        for side in views.sides_of(main)
        for direction, tasks in groups
    }
    bounds = _bounds(matrices.values())
    maps = {}
    for (side, direction), matrix in matrices.items():
        tasks = dict(groups)[direction]
        if len(tasks) < 2:
            continue
        whole = views.side_matrix(main, views.MODEL, tasks)  # one order for all sides
        order = views.order_by_family(whole, tasks, run.families)
        what = f"cosine of {side} gradients {direction}".rstrip()
        title = f"{views.short(run.name, 30)}: {what}"
        name = "_".join(part for part in (run.name, side, direction) if part)
        maps[name] = _map(matrix, tasks, order, what, bounds, title=title)
    return maps


def side_maps(runs: Sequence[Run]) -> list[HeatMap | None]:
    """Encoder minus decoder of every run, in the same colours; None without both sides."""
    maps: list[HeatMap | None] = []
    for run in runs:
        main = views.main_source(run)
        if main is None or views.sides_of(main) != views.SIDES or len(main.tasks) < 2:
            maps.append(None)
            continue
        matrix, what = statistics.encoder_minus_decoder(main), "encoder minus decoder"
        look = {"title": f"{views.short(run.name, 40)}: {what}", "unit": "difference of cosines"}
        order = shared_order(main.tasks, run, runs)
        maps.append(_map(matrix, main.tasks, order, what, _bounds([matrix]), **look))
    limit = max((abs(bound) for one in maps if one for bound in one.bounds), default=0.0)
    return [one and replace(one, bounds=(-limit, limit)) for one in maps]


def difference_maps(runs: Sequence[Run]) -> dict[str, HeatMap]:
    """Name of a run -> its similarities minus those of the first, where they can be compared."""
    compared = {run.name: views.compared(runs[0], run) for run in runs[1:]}
    found = {name: one for name, one in compared.items() if one is not None}
    limit = max((abs(b) for one in found.values() for b in _bounds([one.difference])), default=0.0)
    first, maps = views.main_source(runs[0]), {}
    for name, one in found.items():
        assert first is not None, "what is compared has similarities"
        similarity = statistics.mean_matrix(first.select(tasks=one.tasks))
        order = views.order_by_family(similarity, one.tasks, runs[0].families)  # as in its map
        what, look = f"{name} minus {runs[0].name}", {"unit": "difference of cosines"}
        maps[name] = _map(one.difference, one.tasks, order, what, (-limit, limit), **look)
    return maps


def maps_beside(
    panels: Mapping[str, tuple[Matrix, Sequence[str]]], families: Mapping[str, str]
) -> list[HeatMap]:
    """Two maps with the same order of languages and the same colours.

    Args:
        panels: Title -> similarities `[T, T]` and their tasks.
        families: Task -> family.
    """
    (first, tasks), _ = panels.values()
    order, blocks = views.order_by_family(first, tasks, families)
    languages = [task_names.other_languages(tasks)[i] for i in order]
    bounds = _bounds(matrix for matrix, _ in panels.values())
    maps = []
    for title, (matrix, shown) in panels.items():
        where = {language: n for n, language in enumerate(task_names.other_languages(shown))}
        same = len(shown) == len(tasks) and all(language in where for language in languages)
        arranged = (
            ([where[language] for language in languages], blocks)
            if same and len(where) == len(shown)
            else views.order_by_family(matrix, shown, families)
        )
        full_title = f"{title}, mean {views.pair_mean(matrix):z.2f}"
        maps.append(_map(matrix, shown, arranged, "cosine", bounds, title=full_title))
    return maps


def influence_maps(runs: Sequence[Run], shown: Sequence[Run]) -> list[dict[str, HeatMap]]:
    """Shares of every task in every other's predicted progress, in the model and by component.

    Args:
        runs: All of each.
        shown: The part of each that has room in a map (`views.for_maps`).

    Returns:
        Of every run: choice -> map; empty if nothing is known. A row is the task whose loss moves.
    """
    shares: list[dict[str, Matrix]] = []
    influences = [views.find_influence(run) for run in runs]
    for influence in influences:
        if influence is None:
            shares.append({})
            continue
        progress = np.where(influence.totals > 0, influence.totals, np.nan)[:, None]
        parts = {name: values / progress for name, values in influence.by_component.items()}
        shares.append({WHOLE_MODEL: influence.shares, **parts})
    bounds: dict[str, tuple[float, float]] = {}
    for name, values in ((name, v) for by_name in shares for name, v in by_name.items()):
        known = np.append(values[np.isfinite(values)], bounds.get(name, (0.0, 0.0)))
        bounds[name] = (float(known.min()), float(known.max()))
    look = {"rows": "whose loss", "columns": "who moves it", "as_percent": True}
    what = "share of predicted progress"
    maps: list[dict[str, HeatMap]] = []
    for run, influence, by_name in zip(shown, influences, shares, strict=True):
        if influence is None:
            maps.append({})
            continue
        rows = [n for n, task in enumerate(influence.tasks) if task in run.tasks]
        tasks = tuple(influence.tasks[n] for n in rows)
        order = shared_order(tasks, run, shown)
        maps.append(
            {
                name: _map(values[np.ix_(rows, rows)], tasks, order, what, bounds[name], **look)
                for name, values in by_name.items()
            }
        )
    return maps


def _of_run(name: str, run: Run, runs: Sequence[Run], form: str = "{}, {}") -> str:
    """The name of a series, with its run where there are several."""
    return form.format(name, views.short(run.name)) if len(runs) > 1 else name


def layer_plot(runs: Sequence[Run]) -> Plot:
    """Mean similarity by layer: a colour for each side, a dash for each run."""
    series = []
    for number, run in enumerate(runs):
        main = views.main_source(run)
        for subset, points in [] if main is None else views.layer_means(main):
            inward = task_names.is_into_pivot(subset.direction)
            layers, means = zip(*points, strict=True)
            series.append(
                Series(
                    _of_run(subset.name, run, runs),
                    layers,
                    means,
                    colour=_SIDES.index(subset.side),
                    dash=number,
                    mode="lines+markers",
                    marker="square-open" if inward else "circle",
                    size=8,
                )
            )
    numbers = [int(layer) for one in series for layer in np.asarray(one.x)]
    return Plot(
        series,
        x_title="layer",
        y_title="cosine, mean of pairs",
        y_range=honest_range(all_values(series)),
        missing="No component carries the number of a layer.",
        label="Mean similarity by layer",
        layers=(min(numbers), max(numbers)) if numbers else None,
    )


def reliability_plot(runs: Sequence[Run]) -> Plot:
    """How well tasks agree with themselves on other lines, by step and side."""
    series = []
    for number, run in enumerate(runs):
        halves = views.two_halves(run)
        if halves is None:
            continue
        for side, means in views.reliability_by_step(halves).items():
            colour, name = int(side == DECODER), _of_run(side, run, runs)
            look: dict[str, Any] = {"mode": "lines+markers", "size": 6}
            series.append(Series(name, halves.steps, means, colour, number, **look))
    return Plot(
        series,
        y_title="cosine of two halves",
        y_range=honest_range(all_values(series)),
        missing="Nothing was measured on halves of an aligned set: run gradvac similarity.",
        label="Agreement of tasks with themselves on other lines, by step",
    )


def rule_plots(runs: Sequence[Run]) -> dict[str, Plot]:
    """What the rule did, by step: "active", "target", "cosine" and "ratio"."""
    drawn: dict[str, list[Series]] = {"active": [], "target": [], "cosine": [], "ratio": []}
    for number, run in enumerate(runs):
        if run.record is not None:
            for name, series in _rule_series(run, run.record, runs).items():
                drawn[name] += [replace(one, colour=number) for one in series]
    plots = {}
    for name, series in drawn.items():
        by_pair = name in ("active", "target")
        plots[name] = Plot(
            series,
            y_range=(honest_range if by_pair else range_around_one)(all_values(series)),
            missing="Nothing was recorded in training.",
            number_format=".4~g",
            as_percent=name == "active",
            has_legend=len(runs) > 1 or by_pair,
        )
    return plots


def _rule_series(run: Run, record: Record, runs: Sequence[Run]) -> dict[str, list[Series]]:
    """Lines of one run; those of the update with their range over components."""
    counts, steps = statistics.rule_counts(record), record.steps
    altered, conflicts, similarity, target = (
        _of_run(name, run, runs, "{} ({})")
        for name in ("altered", "in conflict", "similarity", "target")
    )
    active = [Series(conflicts, steps, counts.share(counts.conflicts), dash=2)]
    if counts.active.any():
        active.insert(0, Series(altered, steps, counts.share(counts.active)))
    pairs = [Series(similarity, steps, _over_pairs(record.similarity))]
    if not np.isnan(record.target).all():
        pairs.append(Series(target, steps, _over_pairs(record.target), dash=2))
    series = {"active": active, "target": pairs}
    for name, values in (("cosine", record.update_cosine), ("ratio", record.update_ratio)):
        known = ~np.isnan(values)
        least = np.where(known, values, np.inf).min(axis=1)
        most = np.where(known, values, -np.inf).max(axis=1)
        mean = mean_where_known(values, axis=1)
        of_whom = run.name if len(runs) > 1 else "mean"
        series[name] = [Series(of_whom, steps, mean, band=(least, most))]
    return series


def _over_pairs(values: Matrix) -> Matrix:
    """Mean over components and pairs of different tasks, `[S]`."""
    return mean_where_known(statistics.mean_of_pairs(values), axis=1)


def active_plots(runs: Sequence[Run]) -> list[Plot]:
    """Pairs in conflict, where PCGrad acts, and pairs below their target, over steps.

    The paper counts pairs. Shares compare runs with other tasks or components; they are of the
    pairs that the rule could alter (those of vaccinated tasks), in layers. They scatter from batch
    to batch: pale as they are, strong as a running mean.
    """
    recorded = [(run, run.record) for run in runs if run.record is not None]
    if not recorded:
        raise MissingError("needs a run that recorded its training.")
    conflicts: list[Series] = []
    active: list[Series] = []
    for number, (run, record) in enumerate(recorded):
        counts = statistics.rule_counts(record)
        conflicts += _smoothed(run, record, counts, counts.conflicts, number)
        if not np.isnan(record.target).all():
            active += _smoothed(run, record, counts, counts.active, number)
    look: dict[str, Any] = {
        "y_range": honest_range(all_values([*conflicts, *active])),
        "as_percent": True,
        "has_legend": len(recorded) > 1,
    }
    return [
        Plot(conflicts, "step", "of the pairs it could alter", title=_CONFLICTS, **look),
        Plot(active, title=_ACTIVE, missing="no run has targets", **look),
    ]


def _smoothed(
    run: Run, record: Record, counts: statistics.RuleCounts, part: NDArray[np.int64], colour: int
) -> list[Series]:
    window = min(len(part), max(1, len(part) // 30))
    raw = Series("", record.steps, counts.share(part), colour, is_faint=True)
    return [raw, Series(run.name, record.steps, counts.share(part, window), colour)]


def step_plots(run: Run, main: Similarities, pairs: Sequence[tuple[str, str]]) -> list[Plot]:
    """Similarity of some pairs over steps, one plot for each side."""
    labels = dict(zip(main.tasks, task_names.labels(main.tasks), strict=True))
    plots = []
    for side in views.sides_of(main):
        inside = [
            component
            for component in main.components
            if side == views.MODEL or side_of(component) == side
        ]
        part = main.select(components=inside)
        series = []
        for number, pair in enumerate(pairs):
            name = " and ".join(views.short(labels[task], 16) for task in pair)
            values = statistics.mean_by_step(part, pair)
            series.append(Series(name, main.steps, values, number))
        plots.append(Plot(series, title=f"{views.short(run.name, 24)}: {side}", has_legend=True))
    both = honest_range(all_values([one for plot in plots for one in plot.series]))
    first, *others = (replace(plot, y_range=both) for plot in plots)
    return [replace(first, y_title="cosine"), *others]


def _with_distances(run: Run) -> list[tuple[views.TaskSubset, Matrix, Matrix]]:
    main = views.main_source(run)
    return [] if main is None else views.against_distance(main, run.distances)


def _known_pairs(one: Matrix, other: Matrix) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of the pairs that are known in both matrices."""
    rows, columns = np.tril_indices(len(one), -1)
    known = ~np.isnan(one[rows, columns]) & ~np.isnan(other[rows, columns])
    return rows[known], columns[known]


def _of_points(num: int) -> dict[str, Any]:
    """Many points are small and faint: where they lie on each other, more of them are darker."""
    less = min(1.0, (50 / max(num, 1)) ** 0.3)
    return {"mode": "markers", "size": round(8 * less, 1), "alpha": max(0.4, round(0.75 * less, 2))}


def distance_plot(runs: Sequence[Run]) -> Plot:
    """Similarity of every pair against its known distance, in all sections of all runs."""
    series = []
    for number, run in enumerate(runs):
        for colour, (subset, matrix, far) in enumerate(_with_distances(run)):
            labels, pairs = task_names.labels(subset.tasks), _known_pairs(matrix, far)
            look = _of_points(len(pairs[0])) | {
                "marker": _RUN_MARKERS[number % len(_RUN_MARKERS)],
                "points": [f"{labels[j]} and {labels[i]}" for i, j in zip(*pairs, strict=True)],
            }
            name = _of_run(subset.name, run, runs)
            series.append(Series(name, far[pairs], matrix[pairs], colour, **look))
    names = [run.distances.name for run in runs if run.distances is not None]
    what = names[0] if names else ""
    return Plot(
        series,
        x_title=what,
        y_title="cosine of a pair",
        y_range=honest_range(all_values(series)),
        missing="This needs five tasks of one direction with different known distances "
        "(see --distances).",
        label=f"Similarity of every pair against {what}",
        point_words=("pair", "distance", "cosine", "in"),
    )


def distance_panels(run: Run) -> list[Plot]:
    """The same for one run: a plot for each side, with the test of the report's sentences."""
    by_side: dict[str, list[Series]] = {}
    main = views.main_source(run)
    for subset, matrix, far in _with_distances(run):
        assert main is not None
        pairs = _known_pairs(matrix, far)
        r = float(np.corrcoef(far[pairs], matrix[pairs])[0, 1])
        p_value = views.correlation_with_distance(main, run, subset, far).p_value
        way = f"{subset.direction}: " if subset.direction else ""
        is_outward = bool(way) and not task_names.is_into_pivot(subset.direction)
        name = f"{way}r = {r:z.2f}, p = {p_value:.4f}"
        look = _of_points(len(pairs[0]))
        series = Series(name, far[pairs], matrix[pairs], int(is_outward), **look)
        by_side.setdefault(subset.side, []).append(series)
    both = honest_range(all_values([one for series in by_side.values() for one in series]))
    what = "" if run.distances is None else run.distances.name
    return [
        Plot(
            series,
            x_title=what,
            y_title="" if number else "cosine of a pair",
            y_range=both,
            title=f"{views.short(run.name, 24)}: {side}",
            has_legend=True,
        )
        for number, (side, series) in enumerate(by_side.items())
    ]


def score_plot(runs: Sequence[Run], metric: str) -> Plot:
    """Every scored task's mean similarity with the others, and its score."""
    series = []
    for number, run in enumerate(runs):
        main = views.main_source(run)
        if main is None or run.scores is None:
            continue
        points = views.similarity_and_score(main, run.scores)
        if len(points) > 2:  # two tasks are as similar to each other
            tasks, cosines, scores = zip(*points, strict=True)
            mode = "markers" if len(tasks) > 30 else "markers+text"
            look: dict[str, Any] = {"mode": mode, "size": 8, "points": tasks}
            series.append(Series(run.name, cosines, scores, number, **look))
    return Plot(
        series,
        x_title="mean cosine with the other tasks",
        y_title=metric,
        missing="This needs scores of three tasks whose similarity is known.",
        label=f"{metric} of every task against its mean similarity with the others",
        has_legend=len(runs) > 1,
        point_words=("task", "cosine", "score", "run"),
    )


def score_of_one_task(runs: Sequence[Run]) -> tuple[str, Plot]:
    """The score of a task that all runs share against its similarity to their others."""
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
    task, names = common[0], []
    for run, main, _ in full:
        languages = zip(main.tasks, task_names.other_languages(main.tasks), strict=True)
        others = [language for other, language in languages if other != task]
        names.append(others[0] if len(others) == 1 else run.name)
    points = [(_similarity_of(task, main), scores.by_task[task]) for _, main, scores in full]
    cosines, values = zip(*points, strict=True)
    return task, Plot(
        [Series("", cosines, values, mode="markers", points=names)],
        x_title=f"cosine of {task} with the other tasks of its model",
        y_title=f"{full[0][2].metric} of {task}",
        title=_correlation(points),
    )


def _similarity_of(task: str, main: Similarities) -> float:
    """Mean similarity of one task with the others."""
    position = main.tasks.index(task)
    row = np.delete(statistics.mean_matrix(main)[position], position)
    return float(row[~np.isnan(row)].mean())


def _correlation(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < 4:
        return f"{len(points)} runs: too few for a correlation"
    try:
        rho, (low, high), p_value = statistics.similarity_against_score(points)
    except ValueError:
        return "no correlation: a value is the same in all runs"
    return f"Spearman {rho:z.2f} [{low:z.2f}, {high:z.2f}], p = {p_value:.3f}"


def metric_plots(runs: Sequence[Run]) -> dict[str, Plot]:
    """Logged values over steps, by what to choose: losses together, then each alone."""
    logged = [_metrics(run.metrics) for run in runs]
    names = list(dict.fromkeys(name for one in logged for name in one))
    both = [name for name in names if name in ("train/loss", "dev/loss")]
    by_task = [name for name in names if name.startswith("dev/loss/")]
    choices = ({_LOSSES: both} if both else {}) | ({_TASK_LOSSES: by_task} if by_task else {})
    choices |= {name: [name] for name in sorted(names)}
    plots = {}
    for choice, chosen in choices.items():
        series = []
        for r, (run, values) in enumerate(zip(runs, logged, strict=True)):
            for name in (name for name in chosen if name in values):
                # Few names: a colour for each run. Many names: a colour for each name.
                is_task = choice == _TASK_LOSSES
                dash = r if is_task else int(len(chosen) > 1 and name == "dev/loss")
                shown = name.removeprefix("dev/loss/") if is_task else name
                steps, y = values[name]
                mode = "lines" if len(steps) > _MANY_POINTS else "lines+markers"
                colour = chosen.index(name) if is_task else r
                named = _of_run(shown, run, runs, "{} ({})")
                series.append(Series(named, steps, y, colour, dash, mode))
        plots[choice] = Plot(series, label=choice, number_format=".4~g", has_legend=True)
    return plots


def _metrics(metrics: Sequence[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Each logged value over steps; every n-th where there are very many."""
    logged: dict[str, tuple[list[int], list[float]]] = {}
    for entry in metrics:
        for name, value in entry.items():
            is_shown = name != "step" and not any(part in name for part in _IN_RECORD)
            if is_shown and isinstance(value, int | float):
                steps, values = logged.setdefault(name, ([], []))
                steps.append(int(entry["step"]))
                values.append(float(value))
    thinned = {}
    for name, (steps, values) in logged.items():
        every = -(-len(steps) // _MOST_METRIC_POINTS)
        thinned[name] = steps[::every], values[::every]
    return thinned


def task_tree(run: Run) -> TaskTree | None:
    """The tree of a run's tasks; None with fewer than three."""
    main = views.main_source(run)
    if main is None or len(main.tasks) < 3:
        return None
    linkage = statistics.dendrogram(statistics.mean_matrix(main))
    drawn = hierarchy.dendrogram(linkage, no_plot=True)
    heights = np.round(np.array(drawn["dcoord"]), 4)
    joins = 1 - heights[heights > 0]
    low, high = (float(joins.min()), float(joins.max())) if joins.size else (1.0, 1.0)
    room = (high - low) * 0.2 or 0.05
    cosines = np.where(heights > 0, 1 - heights, high + room)
    positions = np.array(drawn["icoord"]) / 10 - 0.5  # SciPy puts leaf n at 5 + 10 n
    labels = task_names.labels(main.tasks)
    return TaskTree(
        positions.tolist(),
        cosines.tolist(),
        high + room,
        (high + room, low - room / 2),
        [labels[i] for i in drawn["leaves"]],
        [run.families.get(main.tasks[i], "") for i in drawn["leaves"]],
    )


def family_marks(trees: Sequence[TaskTree | None]) -> dict[str, tuple[int, str]]:
    """Family -> its colour and marker in all trees, which meet anew in every round."""
    families = [family for tree in trees if tree is not None for family in tree.families]
    marks = {}
    for number, family in enumerate(dict.fromkeys(filter(None, families))):
        turn, which = divmod(number, len(_FAMILY_MARKERS))
        marks[family] = number + turn, _FAMILY_MARKERS[which] + ("-open" if turn % 2 else "")
    return marks


def score_bars(runs: Sequence[Run], sizes: Mapping[str, int]) -> list[Plot]:
    """The score of each run minus that of the first: by task, largest first, and averages."""
    scored = [
        (run, scores)
        for run, scores in zip(runs, scores_by_one_metric(runs), strict=True)
        if scores
    ]
    if len(scored) < 2:
        raise MissingError("needs at least two runs with scores; the first is the baseline.")
    (first, base), *rest = scored
    baseline, levels = base.by_task, base.levels
    others = [
        (run, scores.by_task)
        for run, scores in rest
        if not baseline.keys().isdisjoint(scores.by_task)
    ]
    tasks = [task for task in baseline if any(task in values for _, values in others)]
    if not others:
        raise MissingError("needs a task that two runs were scored on.")
    tasks.sort(key=lambda task: (-sizes.get(task, 0), level_rank(levels.get(task, ""))))
    by_task, averages, names = [], [], list[str]()
    width = 0.8 / len(others)
    for number, (run, values) in enumerate(others):
        gains = {task: values[task] - baseline[task] for task in tasks if task in values}
        shift = (number - (len(others) - 1) / 2) * width
        means = replace(base, by_task=gains).by_level()
        look: dict[str, Any] = {"colour": number, "mode": "bars", "size": width}
        positions = [tasks.index(task) + shift for task in gains]
        by_task.append(Series(run.name, positions, list(gains.values()), **look))
        positions = [n + shift for n in range(len(means))]
        averages.append(Series(run.name, positions, list(means.values()), **look))
        names = [name.replace("_", " ") for name in means]
    order = "largest data first" if all(task in sizes for task in tasks) else "by resource level"
    y_title = f"{base.metric} minus {views.short(first.name, 20)}"
    labels = [views.short(name, 20) for name in task_names.labels(tasks)]
    return [
        Plot(by_task, "", y_title, x_names=labels, title=f"by task, {order}"),
        Plot(averages, "", x_names=names, title="averages", has_legend=False),
    ]


def size_bars(runs: Sequence[Run], sizes: Mapping[str, int]) -> Plot:
    """Training pairs of each task, in the colour of its family; a pair both ways is one."""
    task_of_pair: dict[frozenset[str], str] = {}
    for task in (task for run in runs for task in run.tasks):
        if sizes.get(task, 0) > 0:
            task_of_pair.setdefault(frozenset(task_names.languages_of(task)), task)
    if not task_of_pair:
        raise MissingError("needs the number of training pairs of each task.")
    tasks = sorted(task_of_pair.values(), key=lambda task: -sizes[task])
    known: dict[str, str] = {}
    for run in runs:
        known |= run.families
    families = [known.get(task, "") for task in tasks]
    names = list(dict.fromkeys(families))
    if len(names) > len(INKS["light"]):  # colours would say nothing
        names, families = [""], [""] * len(tasks)
    heights = [sizes[task] for task in tasks]
    series = []
    for colour, name in enumerate(names):
        positions = [n for n, family in enumerate(families) if family == name]
        values = [heights[n] for n in positions]
        series.append(Series(name, positions, values, colour, mode="bars", size=0.8))
    return Plot(
        series,
        x_title="",
        y_title="training pairs",
        x_names=[views.short(name, 20) for name in task_names.labels(tasks)],
        number_format=",.0f",
        has_legend=True,
        is_log=heights[0] > 10 * heights[-1],
    )
