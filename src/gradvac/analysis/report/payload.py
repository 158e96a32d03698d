"""What the scripts of the page draw, ready for JSON: plots, maps, and packed arrays of pairs."""

# S steps, K components, T tasks, P pairs

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradvac import tasks as task_names
from gradvac.analysis import pictures, plots, views
from gradvac.analysis.report.quantities import ALL, quantities
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.sides import side_of

MAX_PACKED = 6_000_000  # characters of packed arrays in a page; plotly itself takes 4.8 million
_LEAST_PACKED = 0.3  # characters a cosine takes at the very least: where to begin


def payload(runs: Sequence[Run], metric: str) -> dict[str, Any]:
    """Everything the scripts of the page need.

    Args:
        runs: All runs of the page.
        metric: Of their scores.
    """
    drawn = {
        "layers-plot": pictures.layer_plot(runs),
        "distance-plot": pictures.distance_plot(runs),
        "reliability-plot": pictures.reliability_plot(runs),
        "scores-plot": pictures.score_plot(runs, metric),
        **{f"{name}-plot": plot for name, plot in pictures.rule_plots(runs).items()},
    }
    sides, trees = pictures.side_maps(runs), pictures.trees(runs)
    return {
        **_packed_runs(runs),
        "style": plots.page_style(),
        "plots": {name: plot.for_page() for name, plot in drawn.items()},
        "metrics": {name: plot.for_page() for name, plot in pictures.metric_plots(runs).items()},
        "sides": [None if one is None else one.for_page() for one in sides],
        "trees": [None if one is None else one.for_page() for one in trees],
        "influence": [
            {name: one.for_page() for name, one in maps.items()}
            for maps in pictures.influence_maps(runs)
        ],
    }


def _packed_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """What the controls of the page choose from: every n-th step, so that the page stays small."""
    sources = [similarities for run in runs for similarities in views.sources(run).values()]
    longest = max((len(similarities.steps) for similarities in sources), default=0)
    least = _LEAST_PACKED * sum(similarities.values.size for similarities in sources)
    stride = 2 ** max(0, math.ceil(math.log2(max(least, 1) / MAX_PACKED)))
    while True:
        packed = [_run(run, stride, runs) for run in runs]
        size = sum(
            len(quantity["packed"])
            for run in packed
            for source in run["sources"]
            for quantity in source["quantities"]
        )
        if size <= MAX_PACKED or stride >= longest:
            return {"runs": packed, "stride": stride}
        stride *= 2


def _run(run: Run, stride: int, runs: Sequence[Run]) -> dict[str, Any]:
    main = views.main_source(run)
    return {
        "name": run.name,
        "sources": [_source(name, s, run, stride, runs) for name, s in views.sources(run).items()],
        "examples": [] if main is None else views.example_pairs(main),
    }


def _source(
    name: str, similarities: Similarities, run: Run, stride: int, runs: Sequence[Run]
) -> dict[str, Any]:
    order, blocks = pictures.shared_order(similarities.tasks, run, runs)
    reliability = similarities.reliability
    return {
        "name": name,
        "tasks": list(similarities.tasks),
        "labels": task_names.labels(similarities.tasks),
        "order": order,
        "blocks": plots.listed_blocks(blocks),
        "components": list(similarities.components),
        "averages": _averages(similarities),
        "reliability": None  # `[K, T]`: two digits are what fading needs
        if reliability is None
        else plots.rounded(mean_where_known(reliability, axis=0), 2),
        "quantities": [quantity.packed(stride) for quantity in quantities(similarities, run)],
    }


def _averages(similarities: Similarities) -> dict[str, list[int]]:
    """Name of a mean -> positions of the components it is over, as the sentences take them."""
    sides = {side_of(name) for name in similarities.components}
    named = [(ALL, None)] + [(s, s) for s in views.SIDES if s in sides and len(sides) > 1]
    return {
        name: np.flatnonzero(weighty(similarities.components, side)).tolist()
        for name, side in named
        if name not in similarities.components
    }
