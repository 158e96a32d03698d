"""What the scripts of the page draw, ready for JSON: plots, maps, and packed arrays of pairs.

The arrays become short text that a browser unpacks at once. A cosine is shown with three digits, so
it is kept as an integer number of thousandths. Similarities move slowly, so each step is stored as
the difference to the step before; the high bytes, nearly all alike, are put apart from the low
ones, and gzip finds little left to say.
"""

# S steps, K components, T tasks, P pairs

import base64
import gzip
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvac import tasks as task_names
from gradvac.analysis import pictures, plots, statistics, views
from gradvac.analysis.record import Record
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.engine.components import side_of

Values = NDArray[np.floating]

ALL = "all components"
UNIT = 0.001
MISSING = -32768
_LIMIT = 32.0
MAX_PACKED = 6_000_000  # characters of packed arrays in a page; plotly itself takes 1.9 million
_LEAST_PACKED = 0.3  # characters a cosine takes at the very least: where to begin


def page_data(runs: Sequence[Run], metric: str) -> dict[str, Any]:
    """Everything the scripts of the page need."""
    shown = views.for_maps(runs)
    drawn = {
        "layers-plot": pictures.layer_plot(runs),
        "distance-plot": pictures.distance_plot(shown),
        "reliability-plot": pictures.reliability_plot(runs),
        "scores-plot": pictures.score_plot(runs, metric),
        **{f"{name}-plot": plot for name, plot in pictures.rule_plots(runs).items()},
    }
    sides, trees = pictures.side_maps(shown), [pictures.task_tree(run) for run in shown]
    return {
        **_packed_runs(shown),
        "style": plots.page_style(),
        "plots": {name: plot.for_page() for name, plot in drawn.items()},
        "metrics": {name: plot.for_page() for name, plot in pictures.metric_plots(runs).items()},
        "sides": [one and one.for_page() for one in sides],
        "differences": [one.for_page() for one in pictures.difference_maps(shown).values()],
        "trees": [tree and asdict(tree) for tree in trees],
        "familyMarks": pictures.family_marks(trees),
        "influence": [
            {name: one.for_page() for name, one in maps.items()}
            for maps in pictures.influence_maps(runs, shown)
        ],
    }


def _packed_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """What the controls of the page choose from: so many steps that the page stays small."""
    sources = [similarities for run in runs for similarities in views.sources(run).values()]
    longest = max((len(similarities.steps) for similarities in sources), default=0)
    least = _LEAST_PACKED * sum(similarities.values.size for similarities in sources)
    most = max(1, longest // 2 ** max(0, math.ceil(math.log2(max(least, 1) / MAX_PACKED))))
    while True:
        packed = [_run(run, most, runs) for run in runs]
        size = sum(
            len(quantity["packed"])
            for run in packed
            for source in run["sources"]
            for quantity in source["quantities"]
        )
        if size <= MAX_PACKED or most == 1:
            return {"runs": packed, "mostSteps": most if most < longest else None}
        most //= 2


def _run(run: Run, most: int, runs: Sequence[Run]) -> dict[str, Any]:
    main = views.main_source(run)
    return {
        "name": run.name,
        "sources": [_source(name, s, run, most, runs) for name, s in views.sources(run).items()],
        "examples": [] if main is None else views.example_pairs(main),
    }


def _source(
    name: str, similarities: Similarities, run: Run, most: int, runs: Sequence[Run]
) -> dict[str, Any]:
    order, blocks = pictures.shared_order(similarities.tasks, run, runs)
    reliability = similarities.reliability
    return {
        "name": name,
        "tasks": list(similarities.tasks),
        "labels": task_names.labels(similarities.tasks),
        "order": order,
        "blocks": blocks,
        "components": list(similarities.components),
        "averages": _averages(similarities),
        "reliability": None  # `[K, T]`: two digits are what fading needs
        if reliability is None
        else plots.rounded(mean_where_known(reliability, axis=0), 2),
        "quantities": [quantity.packed(most) for quantity in quantities(similarities, run)],
    }


def _averages(similarities: Similarities) -> dict[str, list[int]]:
    """Name of a mean -> positions of the components it is over, as the sentences take them."""
    return {
        name: np.flatnonzero(weighty(similarities.components, side)).tolist()
        for name, side in _means(similarities).items()
    }


def _means(similarities: Similarities) -> dict[str, str | None]:
    """Name of a mean -> the side it is over (None: the model), unless a component is called so."""
    sides = {side_of(name) for name in similarities.components}
    means: dict[str, str | None] = {ALL: None}
    means |= {side: side for side in views.SIDES if side in sides and len(sides) > 1}
    return {name: side for name, side in means.items() if name not in similarities.components}


@dataclass(frozen=True, eq=False)
class Quantity:
    """Something that every pair of tasks has.

    Attributes:
        key: Name in the page's controls.
        values: `[S, K, T, T]`.
        steps: `[S]`.
        rows: What the task of a row is, in words; "" where (i, j) is (j, i), so that half of the
            values will do.
        columns: What the task of a column is.
        overall: Whether its one "step" stands for the whole of training.
        averages: Mean -> position of the component that holds it, where it is not a mean of others.
    """

    key: str
    values: Values
    steps: NDArray[np.int64]
    rows: str = ""
    columns: str = ""
    overall: bool = False
    averages: dict[str, int] = field(default_factory=dict)

    def packed(self, most: int) -> dict[str, Any]:
        """At most so many steps, up to the last, and the mean over all, as the page reads it."""
        every = max(1, math.ceil(len(self.steps) / most))
        kept = np.arange(len(self.steps))[::-every][::-1]
        num_tasks = self.values.shape[-1]
        rows, columns = np.tril_indices(num_tasks, num_tasks if self.rows else -1)
        pairs = self.values[:, :, rows, columns]
        return {
            "key": self.key,
            "steps": self.steps[kept].tolist(),
            "numSteps": len(self.steps),
            "shape": list(pairs[kept].shape),
            "symmetric": not self.rows,
            "rows": self.rows,
            "columns": self.columns,
            "overall": self.overall,
            "averages": self.averages,
            "limit": _limit(self.values),
            "packed": pack(pairs[kept]),
            "mean": pack(mean_where_known(pairs, axis=0)[None]),
        }


def quantities(similarities: Similarities, run: Run) -> list[Quantity]:
    """Everything that the pairs of a source have."""
    made = [Quantity("similarity", similarities.values, similarities.steps)]
    if similarities.across is not None:
        made.append(_without_noise(similarities))
    if similarities.lines == "training" and run.record is not None:
        made += _rule_quantities(run.record)
    return made


def _without_noise(similarities: Similarities) -> Quantity:
    """Pooled over steps, and over components for means: no mean of values that were divided."""
    assert similarities.across is not None
    by_component = mean_where_known(similarities.across, axis=0)  # [K, T, T]
    values = [statistics.correct(one).values for one in by_component]
    averages = {}
    for name, side in _means(similarities).items():
        corrected = statistics.corrected(similarities, side)
        if corrected is not None:
            averages[name] = len(values)
            values.append(corrected.values)
    last = similarities.steps[-1:]
    return Quantity("without noise", np.stack(values)[None], last, overall=True, averages=averages)


def _rule_quantities(record: Record) -> list[Quantity]:
    """How often a pair was in conflict; targets and active pairs, where the rule has them."""
    below = np.where(np.isnan(record.similarity), np.nan, record.similarity < 0)
    conflicts = mean_where_known(below, axis=0)[None]
    made = [Quantity("share of steps in conflict", conflicts, record.steps[-1:], overall=True)]
    rows, columns = "the task that is altered", "against this task"
    if not np.isnan(record.target).all():
        made.append(Quantity("target", record.target, record.steps, rows, columns))
    if record.active.any():
        active = np.where(np.isnan(record.similarity), np.nan, record.active)
        spared = np.setdiff1d(np.arange(len(record.tasks)), record.eligible())
        active[:, :, spared] = np.nan  # never altered, whatever they do
        share = mean_where_known(active, axis=0)[None]
        last = record.steps[-1:]
        made.append(Quantity("share of steps active", share, last, rows, columns, overall=True))
    return made


def _limit(values: Values) -> float:
    """Where colours end: nearly all pairs lie within, and outliers do not pale the rest."""
    others = values[..., ~np.eye(values.shape[-1], dtype=bool)]
    sizes = np.abs(others[~np.isnan(others)])
    return round(float(np.quantile(sizes, 0.995)), 3) if sizes.size else 1.0


def pack(values: NDArray[np.floating]) -> str:
    """Pack `[S, K, P]` into text; NaN is kept, and what is not within +-32 is cut off."""
    missing = np.isnan(values)
    whole = np.rint(np.where(missing, 0.0, values).clip(-_LIMIT, _LIMIT) / UNIT)
    coded = np.where(missing, MISSING, whole).astype("<i2").view("<u2")
    # Unsigned: differences wrap around, and the running sum in the browser wraps back.
    moves = np.diff(coded, axis=0, prepend=np.zeros_like(coded[:1]))
    planes = moves.reshape(-1).view(np.uint8).reshape(-1, 2).T  # low bytes, then high bytes
    return base64.b64encode(gzip.compress(planes.tobytes(), 6, mtime=0)).decode("ascii")
