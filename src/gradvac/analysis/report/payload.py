"""What the drawings of the page show, ready for JSON."""

# S steps, K components, T tasks, P pairs

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.cluster import hierarchy

from gradvac import tasks as task_names
from gradvac.analysis import statistics, views
from gradvac.analysis.record import Record
from gradvac.analysis.report import _points
from gradvac.analysis.report.quantities import ALL, Values, pack_tasks, quantities, rounded
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.sides import side_of

Order = tuple[list[int], list[views.Block]]

MAX_PACKED = 6_000_000  # characters of packed arrays in a page; plotly itself takes 4.8 million
_LEAST_PACKED = 0.3  # characters a cosine takes at the very least: where to begin
_MOST_POINTS = 1000  # of a logged value


def payload(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything the scripts of the page need, for all runs."""
    sources = [similarities for run in runs for similarities in views.sources(run).values()]
    longest = max((len(similarities.steps) for similarities in sources), default=0)
    least = _LEAST_PACKED * sum(similarities.values.size for similarities in sources)
    stride = 2 ** max(0, math.ceil(math.log2(max(least, 1) / MAX_PACKED)))
    while True:
        described = [_describe(run, stride, runs) for run in runs]
        size = sum(
            len(quantity["packed"])
            for run in described
            for source in run["sources"]
            for quantity in source["quantities"]
        )
        if size <= MAX_PACKED or stride >= longest:
            return {"runs": described, "stride": stride}
        stride *= 2


def _describe(run: Run, stride: int, runs: Sequence[Run]) -> dict[str, Any]:
    sources = views.sources(run)
    main = views.main_source(run)
    pushes = views.find_influence(run)
    return {
        "name": run.name,
        "sources": [_source(name, s, run, stride, runs) for name, s in sources.items()],
        "telling": [] if main is None else views.example_pairs(main),
        "layers": [] if main is None else _layers(main),
        "difference": None if main is None else _difference(main, run, runs),
        "tree": None if main is None else _tree(main, run),
        "pushes": None if pushes is None else _pushes(pushes, run, runs),
        "distance": [] if main is None else _points.against_distance(main, run),
        "scores": [] if main is None else _points.against_score(main, run),
        "reliability": _points.reliability_by_step(run),
        "rule": None if run.record is None else _rule(run.record),
        "metrics": _metrics(run.metrics),
    }


def _order(tasks: Sequence[str], run: Run, runs: Sequence[Run]) -> Order:
    """Families together; the same order in all drawings of the same tasks, so that they compare."""
    for other in runs:
        for first in views.sources(other).values():
            if set(first.tasks) == set(tasks):
                matrix = statistics.mean_matrix(first.select(tasks=tasks))
                return views.order_by_family(matrix, tasks, run.families)
    raise AssertionError("a run is one of the runs")


def _source(
    name: str, similarities: Similarities, run: Run, stride: int, runs: Sequence[Run]
) -> dict[str, Any]:
    order, blocks = _order(similarities.tasks, run, runs)
    reliability = similarities.reliability
    return {
        "name": name,
        "tasks": list(similarities.tasks),
        "labels": task_names.labels(similarities.tasks),
        "order": order,
        "blocks": _listed(blocks),
        "components": list(similarities.components),
        "averages": _averages(similarities),
        "reliability": None
        if reliability is None
        else pack_tasks(mean_where_known(reliability, axis=0)),
        "quantities": [quantity.packed(stride) for quantity in quantities(similarities, run)],
    }


def _listed(blocks: Sequence[views.Block]) -> list[list[Any]]:
    return [[block.family, block.start, block.stop] for block in blocks]


def _averages(similarities: Similarities) -> dict[str, list[int]]:
    """Name of a mean -> positions of the components it is over, as the sentences take them."""
    sides = {side_of(name) for name in similarities.components}
    named = [(ALL, None)] + [(s, s) for s in views.SIDES if s in sides and len(sides) > 1]
    return {
        name: np.flatnonzero(weighty(similarities.components, side)).tolist()
        for name, side in named
        if name not in similarities.components
    }


def _layers(main: Similarities) -> list[dict[str, Any]]:
    return [
        {
            "name": part.name,
            "side": part.side,
            "direction": part.direction,
            "layers": [layer for layer, _ in points],
            "means": rounded([m for _, m in points]),
        }
        for part, points in views.by_layer(main)
    ]


def _difference(main: Similarities, run: Run, runs: Sequence[Run]) -> dict[str, Any] | None:
    if views.sides_of(main) != views.SIDES or len(main.tasks) < 2:
        return None
    matrix = statistics.encoder_minus_decoder(main)
    order, blocks = _order(main.tasks, run, runs)
    return _map(matrix, main.tasks, order, blocks)


def _map(
    matrix: Values, tasks: Sequence[str], order: Sequence[int], blocks: Sequence[views.Block]
) -> dict[str, Any]:
    labels = task_names.labels(tasks)
    return {
        "labels": [labels[i] for i in order],
        "tasks": [tasks[i] for i in order],
        "blocks": _listed(blocks),
        "values": rounded(matrix[np.ix_(order, order)]),
    }


def _pushes(pushes: statistics.Influence, run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """Shares of every task in every other's predicted progress, in the model and by component."""
    order, blocks = _order(pushes.tasks, run, runs)
    shown = _map(pushes.shares, pushes.tasks, order, blocks)
    positive = np.where(pushes.totals > 0, pushes.totals, np.nan)[:, None]
    parts = {
        name: rounded((values / positive)[np.ix_(order, order)])
        for name, values in pushes.by_component.items()
    }
    return shown | {"components": parts, "unbiased": pushes.unbiased}


def _tree(main: Similarities, run: Run) -> dict[str, Any] | None:
    if len(main.tasks) < 3:
        return None
    linkage = statistics.dendrogram(statistics.mean_matrix(main))
    drawn = hierarchy.dendrogram(linkage, no_plot=True)
    labels = task_names.labels(main.tasks)
    return {
        # SciPy puts leaf n at 5 + 10 n.
        "places": (np.array(drawn["icoord"]) / 10 - 0.5).tolist(),
        "heights": rounded(drawn["dcoord"]),
        "labels": [labels[i] for i in drawn["leaves"]],
        "families": [run.families.get(main.tasks[i], "") for i in drawn["leaves"]],
    }


def _rule(record: Record) -> dict[str, Any]:
    counts = statistics.rule_counts(record)
    return {
        "name": record.rule,
        "steps": record.steps.tolist(),
        "active": counts.active.tolist(),
        "conflicts": counts.conflicts.tolist(),
        "pairs": counts.eligible.tolist(),
        "similarity": rounded(_over_pairs(record.similarity)),
        "target": rounded(_over_pairs(record.target)),
        "cosine": _band(record.update_cosine),
        "ratio": _band(record.update_ratio),
    }


def _over_pairs(values: Values) -> Values:
    """Mean over components and pairs of different tasks, `[S]`."""
    return mean_where_known(statistics.mean_of_pairs(values), axis=1)


def _band(values: Values) -> dict[str, Any]:
    """Mean, smallest and largest over components, by step."""
    known = ~np.isnan(values)
    least = np.where(known, values, np.inf).min(axis=1)
    most = np.where(known, values, -np.inf).max(axis=1)
    mean = mean_where_known(values, axis=1)
    return {"mean": rounded(mean, 6), "least": rounded(least, 6), "most": rounded(most, 6)}


def _metrics(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each logged value over steps; every n-th where there are very many."""
    series: dict[str, tuple[list[int], list[float]]] = {}
    for entry in metrics:
        for name, value in entry.items():
            if name != "step" and isinstance(value, int | float):
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(entry["step"]))
                values.append(float(f"{value:.6g}"))
    thinned = {}
    for name, (steps, values) in series.items():
        every = -(-len(steps) // _MOST_POINTS)
        thinned[name] = {"steps": steps[::every], "values": values[::every]}
    return thinned
