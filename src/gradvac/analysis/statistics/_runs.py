"""Statistics over several runs."""

# T tasks

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

from gradvac.analysis.similarities import Floats, Similarities
from gradvac.analysis.statistics._chance import shuffled_orders
from gradvac.analysis.statistics._differences import Change, paired
from gradvac.analysis.statistics._families import Correlation, mantel
from gradvac.analysis.statistics._summaries import mean_matrix
from gradvac.tasks import turned

_NUM_SAMPLES, _SEED = 9999, 0


class RankCorrelation(NamedTuple):
    """Spearman's rho, its 95 % bootstrap interval, and a permutation p-value."""

    rho: float
    interval: tuple[float, float]
    p_value: float


def similarity_against_score(points: Sequence[tuple[float, float]]) -> RankCorrelation:
    """Does more similarity go with better scores, over a set of runs?

    Args:
        points: (similarity, score) of every run; at least 4.
    """
    values = np.asarray(points, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != 2 or len(values) < 4:
        raise ValueError(f"points: need (similarity, score) of at least 4 runs, got {len(points)}.")
    if np.isnan(values).any():
        raise ValueError("points: hold NaN; leave out runs without similarity or score.")
    if (values == values[0]).all(axis=0).any():
        raise ValueError("points: all similarities or all scores are equal; nothing to correlate.")
    rho = float(spearmanr(values[:, 0], values[:, 1]).statistic)
    draw = np.random.default_rng(_SEED)
    drawn = values[draw.integers(len(values), size=(_NUM_SAMPLES, len(values)))]
    samples = _row_correlations(rankdata(drawn[..., 0], axis=1), rankdata(drawn[..., 1], axis=1))
    low, high = np.nanquantile(samples, [0.025, 0.975])
    first, second = rankdata(values[:, 0]), rankdata(values[:, 1])
    shuffles = shuffled_orders(len(values), num_permutations=_NUM_SAMPLES, seed=_SEED)
    shuffled = second[shuffles.orders]
    chance = _row_correlations(np.broadcast_to(first, shuffled.shape), shuffled)
    p_value = shuffles.p_value(np.abs(chance), abs(rho))
    return RankCorrelation(rho, (float(low), float(high)), p_value)


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Two runs on the same tasks.

    `difference` is second minus first, `[T, T]`; `change` tests it over tasks; `pattern` says
    whether the same pairs are similar in both.
    """

    tasks: tuple[str, ...]
    difference: Floats
    change: Change
    pattern: Correlation | None


def compare_runs(first: Similarities, second: Similarities) -> RunComparison:
    """Compare the similarities of two runs: batch size, model size, direction.

    Args:
        first: One run.
        second: Another. Tasks are matched by name; "fr-en" matches "en-fr" where no name does.
    """
    matches = match_tasks(first.tasks, second.tasks)
    tasks = tuple(matches)
    one = mean_matrix(first.select(tasks=tasks))
    two = mean_matrix(second.select(tasks=list(matches.values())))
    pattern = mantel(one, two) if len(tasks) > 2 else None
    return RunComparison(tasks, two - one, paired(one, two), pattern)


def match_tasks(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    """Tasks of one run -> those of another: by name, or else reversed ("en-fr": "fr-en")."""
    partners = {task: task for task in first if task in second}
    if len(partners) < 2:
        partners = {task: turned(task) for task in first if turned(task) in second}
    if len(partners) < 2:
        raise ValueError(
            f"runs: fewer than two tasks are in both; one has {', '.join(first)}; the other "
            f"{', '.join(second)}."
        )
    return partners


def _row_correlations(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Pearson correlation row by row; NaN where a row does not vary."""
    first = first - first.mean(axis=1, keepdims=True)
    second = second - second.mean(axis=1, keepdims=True)
    scale = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    product = (first * second).sum(axis=1)
    correlations = np.full(len(scale), np.nan)
    np.divide(product, scale, out=correlations, where=scale > 0)
    return correlations
