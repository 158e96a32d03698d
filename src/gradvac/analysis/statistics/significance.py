"""Tests: what chance alone would give, and what is more than that.

Permutations of tasks, leaving out one task at a time, Holm's correction; with them, contrasts of
families, correlations of matrices (Mantel), differences within pairs (sides, layers, steps,
directions), and comparisons of runs.
"""

# S steps, K components, T tasks, L layers, N permutations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from math import factorial, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

from gradvac.analysis.similarities import Floats, Similarities, mean_where_known, weighty
from gradvac.analysis.statistics.summaries import Matrix, mean_matrix, mean_of_pairs
from gradvac.sides import DECODER, ENCODER
from gradvac.tasks import turned

MOST_COUNTED = 20_000  # permutations that are enumerated; if there are more, they are drawn
_NOTHING = 1e-7  # rounding errors around 0
_FEWEST_TASKS = 3  # two tasks are one pair, which shows no variation
_AT_ONCE = 2048  # shuffles
_NUM_SAMPLES, _SEED = 9999, 0


class OverTasks(NamedTuple):
    """A mean over pairs of tasks, and how far it generalises beyond these tasks.

    Attributes:
        mean: Over all known pairs.
        interval: 95 %, by leaving out one task at a time; NaN with fewer than 3 tasks.
        p_value: Two-sided, of a mean of 0; NaN with fewer than 3 tasks.
    """

    mean: float
    interval: tuple[float, float]
    p_value: float


def mean_over_tasks(matrix: Matrix) -> OverTasks:
    """The mean of a symmetric matrix over pairs, tested over *tasks* (jackknife, Student's t).

    Pairs that share a task are not independent: ten pairs of five tasks are five observations, not
    ten. The test is cautious where pairs do not depend on their tasks at all.

    Args:
        matrix: `[T, T]`, such as differences; NaN where unknown, and the diagonal does not count.
    """
    values = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(values, np.nan)
    values = values[np.ix_(*[~np.isnan(values).all(axis=1)] * 2)]
    num = len(values)
    mean = float(mean_where_known(values, axis=(0, 1)))
    without = np.array([_mean_without(values, task) for task in range(num)])
    if num < _FEWEST_TASKS or np.isnan(without).any():
        return OverTasks(mean, (np.nan, np.nan), np.nan)
    error = np.sqrt((num - 1) / num * np.sum((without - without.mean()) ** 2))
    reach = float(student.ppf(0.975, num - 1)) * error
    if abs(mean) < _NOTHING:
        p_value = 1.0
    elif error <= _NOTHING * abs(mean):  # all pairs alike
        p_value = 0.0
    else:
        p_value = float(2 * student.sf(abs(mean) / error, num - 1))
    return OverTasks(mean, (mean - reach, mean + reach), p_value)


def _mean_without(values: Matrix, task: int) -> float:
    rest = np.delete(np.delete(values, task, axis=0), task, axis=1)
    known = rest[~np.isnan(rest)]
    return float(known.mean()) if known.size else float("nan")


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of parallel tests after Holm's correction: one false alarm in 20 for all of them.

    NaN (no test) stays NaN and does not count.
    """
    adjusted = [float("nan")] * len(p_values)
    tested = sorted((p, n) for n, p in enumerate(p_values) if not np.isnan(p))
    least = 0.0
    for rank, (p, n) in enumerate(tested):
        least = max(least, min(1.0, p * (len(tested) - rank)))
        adjusted[n] = least
    return adjusted


@dataclass(frozen=True, eq=False)
class Shuffles:
    """Shuffled orders `[N, T]`, and whether they are all that exist (including the true one)."""

    orders: NDArray[np.int64]
    all_of_them: bool

    def p_value(self, chance: ArrayLike, observed: float) -> float:
        """Share of shuffles with a statistic as large as the observed one; never 0."""
        values = np.asarray(chance, dtype=np.float64)
        as_extreme = int((values >= observed - 1e-12).sum())  # rounding must not break ties
        if self.all_of_them:
            return as_extreme / len(values)
        return (1 + as_extreme) / (1 + len(values))


def shuffled_orders(num: int, *, num_permutations: int, seed: int) -> Shuffles:
    """Orders of `num` tasks: all of them if they can be enumerated, else random ones."""
    if factorial(num) <= MOST_COUNTED:
        return Shuffles(_all_orders(num), True)
    draw = np.random.default_rng(seed)
    tiled = np.tile(np.arange(num), (num_permutations, 1))
    return Shuffles(draw.permuted(tiled, axis=1), False)


@cache
def _all_orders(num: int) -> NDArray[np.int64]:
    orders = np.array(list(permutations(range(num))), dtype=np.int64)
    orders.flags.writeable = False
    return orders


def shuffled_labels(labels: NDArray[np.int64], *, num_permutations: int, seed: int) -> Shuffles:
    """Ways to assign labels to tasks: all of them if they can be enumerated, else random ones."""
    if count_labelings(labels.tolist()) <= MOST_COUNTED:
        labelings = np.array(_labelings(labels), dtype=np.int64)
        return Shuffles(labelings, True)
    draw = np.random.default_rng(seed)
    return Shuffles(draw.permuted(np.tile(labels, (num_permutations, 1)), axis=1), False)


def count_labelings(labels: Sequence[object]) -> int:
    """The number of ways to assign these labels: n! / (sizes!)."""
    sizes = Counter(labels).values()
    return factorial(len(labels)) // prod(map(factorial, sizes))


def _labelings(labels: NDArray[np.int64]) -> list[list[int]]:
    """Each kind in turn takes its places among those that are left."""
    num = len(labels)
    partial: list[tuple[list[int], tuple[int, ...]]] = [([-1] * num, tuple(range(num)))]
    for label, size in Counter(labels.tolist()).items():
        following = []
        for given, free in partial:
            for taken in combinations(free, size):
                labeling = list(given)
                for place in taken:
                    labeling[place] = label
                following.append((labeling, tuple(place for place in free if place not in taken)))
        partial = following
    return [given for given, _ in partial]


def families_of(tasks: Sequence[str], families: Mapping[str, str]) -> list[str]:
    """The family of every task in order, "" where unknown: what `family_contrast` takes."""
    return [families.get(task, "") for task in tasks]


class FamilyContrast(NamedTuple):
    """Are relatives more similar, or less? Mean cosines, and a two-sided permutation p-value.

    `least_p_value` is the smallest p-value that this many tasks in such families could give.
    """

    within: float
    between: float
    difference: float
    p_value: float
    least_p_value: float


def family_contrast(
    matrix: Matrix, families: Sequence[str], *, num_permutations: int = 9999, seed: int = 0
) -> FamilyContrast:
    """Mean similarity within families minus between them, against shuffled families.

    All assignments of families to tasks are enumerated if there are few enough.

    Args:
        matrix: `[T, T]`.
        families: The family of every task, in the matrix's order; "" (unknown) leaves a task out.
        num_permutations: How often families are shuffled over the tasks.
        seed: Seed of the shuffling.
    """
    if len(families) != len(matrix):
        raise ValueError(
            f"families: must name the family of each of {len(matrix)} tasks, got {len(families)}."
        )
    with_family = [i for i, family in enumerate(families) if family]
    names = list(dict.fromkeys(families[i] for i in with_family))
    labels = np.array([names.index(families[i]) for i in with_family], dtype=np.int64)
    values, rows, columns = _pairs(symmetric(matrix)[np.ix_(with_family, with_family)])
    same = labels[rows] == labels[columns]
    if not same.any() or same.all():
        raise ValueError(
            "families: a contrast needs two tasks of one family and two of different families; "
            f"got {dict(Counter(families))}."
        )

    def contrasts(shuffled: NDArray[np.int64]) -> NDArray[np.float64]:
        same = shuffled[:, rows] == shuffled[:, columns]  # [N, pairs]
        num, inside = same.sum(axis=1), same @ values
        differences = np.full(len(shuffled), np.nan)
        usable = (num > 0) & (num < len(values))  # unknown pairs may leave one of the two empty
        rest = (values.sum() - inside[usable]) / (len(values) - num[usable])
        differences[usable] = inside[usable] / num[usable] - rest
        return differences

    shuffles = shuffled_labels(labels, num_permutations=num_permutations, seed=seed)
    chance = np.concatenate([contrasts(part) for part in _chunks(shuffles.orders)])
    chance = np.where(np.isnan(chance), np.inf, np.abs(chance))  # to be cautious
    within, between = float(values[same].mean()), float(values[~same].mean())
    p_value = shuffles.p_value(chance, abs(within - between))
    alike = prod(map(factorial, Counter(Counter(labels.tolist()).values()).values()))
    least = max(alike / count_labelings(labels.tolist()), 1 / (1 + num_permutations))
    return FamilyContrast(within, between, within - between, p_value, least)


class Correlation(NamedTuple):
    """A correlation and its p-value."""

    r: float
    p_value: float


def mantel(
    matrix: Matrix,
    distances: ArrayLike,
    *,
    num_permutations: int = 9999,
    seed: int = 0,
    ranks: bool = False,
) -> Correlation:
    """Mantel test: correlation of two matrices over pairs, two-sided, tasks permuted.

    Similar tasks that are near each other give a *negative* r.

    Args:
        matrix: Similarities `[T, T]`.
        distances: Known distances `[T, T]`, in the same order.
        num_permutations: How often the tasks of one matrix are shuffled.
        seed: Seed of the shuffling.
        ranks: Correlate ranks (Spearman) instead of values (Pearson).
    """
    other = np.asarray(distances, dtype=np.float64)
    if other.shape != matrix.shape:
        raise ValueError(f"distances: must have shape {matrix.shape}, got {other.shape}.")
    if len(matrix) < 3:
        raise ValueError(f"matrix: a correlation over pairs needs 3 tasks, got {len(matrix)}.")
    one, other = symmetric(matrix), symmetric(other)
    one = np.where(np.isnan(other), np.nan, one)
    values, rows, columns = _pairs(one)
    if ranks:
        values, other = rankdata(values), _ranked(other)

    def correlations(orders: NDArray[np.int64]) -> NDArray[np.float64]:
        theirs = other[orders[:, rows], orders[:, columns]]  # [N, pairs]
        known = ~np.isnan(theirs)  # a shuffle brings unknown distances to known pairs
        num = known.sum(axis=1, keepdims=True).clip(min=1)
        mine = np.where(known, values, 0.0)
        theirs = np.where(known, theirs, 0.0)
        mine = np.where(known, mine - mine.sum(axis=1, keepdims=True) / num, 0.0)
        theirs = np.where(known, theirs - theirs.sum(axis=1, keepdims=True) / num, 0.0)
        scale = np.sqrt((mine**2).sum(axis=1) * (theirs**2).sum(axis=1))
        coefficients = np.zeros(len(orders))
        np.divide((mine * theirs).sum(axis=1), scale, out=coefficients, where=scale > 1e-15)
        return coefficients

    shuffles = shuffled_orders(len(matrix), num_permutations=num_permutations, seed=seed)
    chance = np.concatenate([correlations(part) for part in _chunks(shuffles.orders)])
    r = float(correlations(np.arange(len(matrix))[None])[0])
    return Correlation(r, shuffles.p_value(np.abs(chance), abs(r)))


def _chunks(orders: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """In blocks: all pairs of all shuffles would take too much memory."""
    return np.array_split(orders, -(-len(orders) // _AT_ONCE))


def symmetric(matrix: ArrayLike) -> NDArray[np.float64]:
    """A square matrix, averaged with its transpose."""
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"matrix: must be square, [T, T], got shape {values.shape}.")
    return (values + values.T) / 2


def _pairs(
    matrix: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Known values above the diagonal, and their rows and columns."""
    rows, columns = np.triu_indices(len(matrix), k=1)
    known = ~np.isnan(matrix[rows, columns])
    rows, columns = rows[known], columns[known]
    return matrix[rows, columns], rows, columns


def _ranked(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    values, rows, columns = _pairs(matrix)
    ranked = np.full_like(matrix, np.nan)
    ranked[rows, columns] = ranked[columns, rows] = rankdata(values)
    return ranked


def encoder_minus_decoder(similarities: Similarities) -> Floats:
    """How much more similar tasks are in the encoder than in the decoder, `[T, T]`."""
    return mean_matrix(similarities, ENCODER) - mean_matrix(similarities, DECODER)


class Change(NamedTuple):
    """Two means over the same pairs, and the difference of the second from the first."""

    first: float
    second: float
    difference: OverTasks


def paired(first: Matrix, second: Matrix) -> Change:
    """Compare two matrices `[T, T]` pair by pair; only pairs known in both count."""
    both = ~np.isnan(first) & ~np.isnan(second)
    one, two = (np.where(both, values, np.nan) for values in (first, second))
    return Change(float(mean_of_pairs(one)), float(mean_of_pairs(two)), mean_over_tasks(two - one))


class Depth(NamedTuple):
    """How similarity changes from the first layer to the last.

    Attributes:
        slope: Rise of a straight line from the first layer to the last.
        bend: How much the middle lies above the ends, by a parabola; None with two layers.
    """

    slope: OverTasks
    bend: OverTasks | None


def depth(layers: Sequence[Matrix]) -> Depth:
    """Test a rise and a bend over layers.

    Args:
        layers: `[T, T]` of every layer, at least two, in order.
    """
    values = np.stack([np.asarray(layer, dtype=np.float64) for layer in layers])  # [L, T, T]
    place = np.linspace(-1, 1, len(values))
    slope = mean_over_tasks(_fit(place, values) * 2)
    if len(values) < 3:
        return Depth(slope, None)
    arch = place**2 - (place**2).mean()
    return Depth(slope, mean_over_tasks(-_fit(arch, values)))


def _fit(shape: NDArray[np.float64], values: Matrix) -> Matrix:
    """Coefficient of a centred shape over layers, for every pair; NaN where a layer is unknown."""
    coefficients: Matrix = np.tensordot(shape, values, axes=1) / (shape @ shape)
    return coefficients


class ChangeOverSteps(NamedTuple):
    """The first quarter of the steps against the last, within pairs.

    Attributes:
        change: Means over what is known in both quarters, and their difference.
        until: Last step of the first quarter.
        since: First step of the last quarter.
    """

    change: Change
    until: int
    since: int


def change_over_steps(similarities: Similarities) -> ChangeOverSteps | None:
    """How similarity changed in training; None with fewer than four steps.

    Tasks may come and go: a pair counts in a component only if it is known early *and* late, so
    that no pair is compared with another.
    """
    steps = similarities.steps
    if len(steps) < 4:
        return None
    fourth = len(steps) // 4
    values = similarities.values[:, weighty(similarities.components)]
    early, late = (mean_where_known(part, axis=0) for part in (values[:fourth], values[-fourth:]))
    both = ~np.isnan(early) & ~np.isnan(late)  # [K, T, T]
    first, second = (mean_where_known(np.where(both, v, np.nan), axis=0) for v in (early, late))
    return ChangeOverSteps(paired(first, second), int(steps[fourth - 1]), int(steps[-fourth]))


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
class SimilarityComparison:
    """Two runs on the same tasks.

    `difference` is second minus first, `[T, T]`; `change` tests it over tasks; `pattern` says
    whether the same pairs are similar in both.
    """

    tasks: tuple[str, ...]
    difference: Floats
    change: Change
    pattern: Correlation | None


def compare_similarities(first: Similarities, second: Similarities) -> SimilarityComparison:
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
    return SimilarityComparison(tasks, two - one, paired(one, two), pattern)


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
