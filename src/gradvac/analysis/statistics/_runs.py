"""Statistics over several runs."""

# T tasks

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr

from gradvac.analysis.similarities import Floats, Similarities, mean_where_known
from gradvac.analysis.statistics._families import Correlation, mantel
from gradvac.analysis.statistics._summaries import mean_matrix, mean_of_pairs
from gradvac.tasks import turned


class RankCorrelation(NamedTuple):
    """Spearman's rho, its 95 % bootstrap interval, and a permutation p-value."""

    rho: float
    interval: tuple[float, float]
    p_value: float


def similarity_against_score(
    points: Sequence[tuple[float, float]], *, num_samples: int = 9999, seed: int = 0
) -> RankCorrelation:
    """Does more similarity go with better scores, over a set of runs?

    Args:
        points: (similarity, score) of every run; at least 4.
        num_samples: Bootstrap samples, and permutations of the two-sided test.
        seed: Of both.
    """
    values = np.asarray(points, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != 2 or len(values) < 4:
        raise ValueError(f"points: need (similarity, score) of at least 4 runs, got {len(points)}.")
    if np.isnan(values).any():
        raise ValueError("points: hold NaN; leave out runs without similarity or score.")
    if (values == values[0]).all(axis=0).any():
        raise ValueError("points: all similarities or all scores are equal; nothing to correlate.")
    rho = float(spearmanr(values[:, 0], values[:, 1]).statistic)
    draw = np.random.default_rng(seed)
    drawn = values[draw.integers(len(values), size=(num_samples, len(values)))]
    samples = _row_correlations(rankdata(drawn[..., 0], axis=1), rankdata(drawn[..., 1], axis=1))
    low, high = np.nanquantile(samples, [0.025, 0.975])
    first, second = rankdata(values[:, 0]), rankdata(values[:, 1])
    shuffled = draw.permuted(np.tile(second, (num_samples, 1)), axis=1)
    chance = _row_correlations(np.broadcast_to(first, shuffled.shape), shuffled)
    as_extreme = int((np.abs(chance) >= abs(rho) - 1e-12).sum())
    p_value = (1 + as_extreme) / (1 + num_samples)
    return RankCorrelation(rho, (float(low), float(high)), p_value)


class RunComparison(NamedTuple):
    """Two runs on the same tasks.

    `difference` is second minus first, `[T, T]`; `mean_difference` is over pairs, with a 95 %
    interval from resampling tasks; `pattern` says whether the same pairs are similar in both.
    """

    tasks: tuple[str, ...]
    first: float
    second: float
    difference: Floats
    mean_difference: float
    interval: tuple[float, float]
    pattern: Correlation | None


def compare_runs(
    first: Similarities,
    second: Similarities,
    *,
    side: str | None = None,
    num_samples: int = 9999,
    seed: int = 0,
) -> RunComparison:
    """Compare the similarities of two runs: batch size, model size, direction.

    Args:
        first: One run.
        second: Another. Tasks are matched by name; "fr-en" matches "en-fr" where no name does.
        side: Only the components of "encoder", "decoder" or "shared".
        num_samples: Bootstrap samples, and permutations of the pattern's test.
        seed: Of both.
    """
    matches = match_tasks(first.tasks, second.tasks)
    tasks = tuple(matches)
    one = mean_matrix(first.select(tasks=tasks), side)
    two = mean_matrix(second.select(tasks=list(matches.values())), side)
    difference = two - one
    draw = np.random.default_rng(seed)
    unknown = difference.copy()
    np.fill_diagonal(unknown, np.nan)  # a task drawn twice is no pair of tasks
    drawn = draw.integers(len(tasks), size=(num_samples, len(tasks)))
    samples = [float(mean_where_known(unknown[np.ix_(d, d)], axis=(0, 1))) for d in drawn]
    known = [sample for sample in samples if not np.isnan(sample)]
    low, high = np.quantile(known, [0.025, 0.975]) if known else (np.nan, np.nan)
    pattern = None
    if len(tasks) > 2:
        pattern = mantel(one, two, num_permutations=num_samples, seed=seed)
    return RunComparison(
        tasks,
        first=float(mean_of_pairs(one)),
        second=float(mean_of_pairs(two)),
        difference=difference,
        mean_difference=float(mean_of_pairs(difference)),
        interval=(float(low), float(high)),
        pattern=pattern,
    )


def match_tasks(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    """Tasks of one run -> those of another: by name, or else turned round ("en-fr": "fr-en")."""
    found = {task: task for task in first if task in second}
    if len(found) < 2:
        found = {task: turned(task) for task in first if turned(task) in second}
    if len(found) < 2:
        raise ValueError(
            f"runs: fewer than two tasks are in both; one has {', '.join(first)}; the other "
            f"{', '.join(second)}."
        )
    return found


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
