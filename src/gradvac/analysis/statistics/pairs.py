"""Tests of pairs: relatives, distances, scores, two runs. Tasks are permuted."""

# T tasks, N permutations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from math import factorial, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

from gradvac.analysis.similarities import Floats, Similarities
from gradvac.analysis.statistics.means import Change, paired
from gradvac.analysis.statistics.noise import (
    in_changes,
    in_patterns,
    noise_in_common,
    pair_pattern,
    size_of,
)
from gradvac.analysis.statistics.summaries import (
    NOTHING,
    Counts,
    Matrix,
    by_step,
    mean_matrix,
    mean_of_pairs,
    symmetric,
)
from gradvac.tasks import turned

MOST_COUNTED = 20_000  # permutations that are enumerated; if there are more, they are drawn
_AT_ONCE = 4_000_000  # pairs of shuffles
_NUM_PERMUTATIONS, _SEED = 9999, 0
_FEWEST_PERMUTATIONS = 199
_MOST_SHUFFLED = 20_000_000  # pairs of shuffles: with many tasks, fewer shuffles will do


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
        return Shuffles(_labelings(tuple(labels.tolist())), True)
    draw = np.random.default_rng(seed)
    return Shuffles(draw.permuted(np.tile(labels, (num_permutations, 1)), axis=1), False)


def count_labelings(labels: Sequence[object]) -> int:
    """The number of ways to assign these labels: n! / (sizes!)."""
    sizes = Counter(labels).values()
    return factorial(len(labels)) // prod(map(factorial, sizes))


@cache
def _labelings(labels: tuple[int, ...]) -> NDArray[np.int64]:
    """Each kind in turn takes its places among those that are left."""
    num = len(labels)
    partial: list[tuple[list[int], tuple[int, ...]]] = [([-1] * num, tuple(range(num)))]
    for label, size in Counter(labels).items():
        following = []
        for given, free in partial:
            for taken in combinations(free, size):
                labeling = list(given)
                for place in taken:
                    labeling[place] = label
                following.append((labeling, tuple(place for place in free if place not in taken)))
        partial = following
    labelings = np.array([given for given, _ in partial], dtype=np.int64)
    labelings.flags.writeable = False
    return labelings


def families_of(tasks: Sequence[str], families: Mapping[str, str]) -> list[str]:
    """The family of every task in order, "" where unknown: what `family_contrast` takes."""
    return [families.get(task, "") for task in tasks]


class FamilyContrast(NamedTuple):
    """Are relatives more similar, or less? Mean cosines, and a two-sided permutation p-value.

    `difference` is that of what was tested, without the noise of tasks if `tested` was given;
    `least_p_value` is the smallest p-value that this many tasks in such families could give.
    """

    within: float
    between: float
    difference: float
    p_value: float
    least_p_value: float


def family_contrast(
    matrix: Matrix,
    families: Sequence[str],
    *,
    tested: Matrix | None = None,
    in_common: Matrix | None = None,
    num_permutations: int | None = None,
    seed: int = 0,
) -> FamilyContrast:
    """Mean similarity within families minus between them, against shuffled families.

    All assignments of families to tasks are enumerated if there are few enough. Shuffled families
    share no more lines than others; where the true ones do, their noise has to be excluded too.

    Args:
        matrix: `[T, T]`.
        families: The family of every task, in the matrix's order; "" (unknown) leaves a task out.
        tested: What the p-value is about, where it is not the matrix itself (`pair_pattern`).
        in_common: `[T, T]`, of the tasks' noise (`noise_in_common`); None: nothing.
        num_permutations: How often families are shuffled over the tasks; None: 9,999 times, less
            often for more than 60 tasks.
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
    shown = values
    if tested is not None:
        values = symmetric(tested)[np.ix_(with_family, with_family)][rows, columns]
    if not same.any() or same.all():
        raise ValueError(
            "families: a contrast needs two tasks of one family and two of different families; "
            f"got {dict(Counter(families))}."
        )

    def contrasts(shuffled: NDArray[np.int64]) -> NDArray[np.float64]:
        same = shuffled[:, rows] == shuffled[:, columns]  # [N, pairs]
        num, inside = same.sum(axis=1), same.astype(np.float64) @ values
        differences = np.full(len(shuffled), np.nan)
        usable = (num > 0) & (num < len(values))  # unknown pairs may leave one of the two empty
        rest = (values.sum() - inside[usable]) / (len(values) - num[usable])
        differences[usable] = inside[usable] / num[usable] - rest
        return differences

    num_permutations = num_permutations or _enough_shuffles(len(values))
    shuffles = shuffled_labels(labels, num_permutations=num_permutations, seed=seed)
    chance = np.concatenate([contrasts(part) for part in _chunks(shuffles.orders, len(values))])
    chance = np.where(np.isnan(chance), np.inf, np.abs(chance))  # to be cautious
    within, between = float(shown[same].mean()), float(shown[~same].mean())
    difference = float(values[same].mean() - values[~same].mean())
    p_value = shuffles.p_value(chance, abs(difference))
    if in_common is not None:
        shared = in_common[np.ix_(with_family, with_family)]
        p_value = max(p_value, _p_of_noise(values, same, shared, rows, columns))
    alike = prod(map(factorial, Counter(Counter(labels.tolist()).values()).values()))
    least = max(alike / count_labelings(labels.tolist()), 1 / (1 + num_permutations))
    return FamilyContrast(within, between, difference, p_value, least)


def _p_of_noise(values: Matrix, contrast: NDArray[Any], in_common: Matrix, *pairs: Counts) -> float:
    """P-value of a pattern's correlation with a contrast of pairs, if it is shared noise alone.

    Products of two tasks' noises have a covariance C (x) C, if C is that of the tasks. How large
    that is in the one direction of large sets against small ones is known only roughly, so the
    correlation also has to hold where directions with more noise than others are scaled down. 0
    where no lines are shared: there C is chance alone, which would cost power.
    """
    apart, num = ~np.eye(len(in_common), dtype=bool), len(in_common)
    known = in_common[apart & ~np.isnan(in_common)]
    if not len(known) or known.mean() <= 3 * known.std() * np.sqrt(2 / len(known)):  # pairs twice
        return 0.0
    noise, both = in_patterns(in_common), np.zeros((2, num, num))
    for matrix, one in zip(both, (values, contrast), strict=True):
        matrix[pairs] = matrix[pairs[::-1]] = one - one.mean()
    left = both[1] @ noise
    share = (left * left.T).sum() / (both[1] ** 2).sum() / size_of(noise)
    sizes, directions = np.linalg.eigh(noise)
    scale = directions / np.sqrt(np.maximum(sizes, sizes.sum() / (num - 1))) @ directions.T
    alike = _row_correlations(*both[:, None, apart])
    scaled = _row_correlations(*(scale @ both @ scale)[:, None, apart])
    few = 2 / max(num * (num - 3), 1)  # pairs less a factor per task
    return max(_p_of_few(float(alike[0]), share), _p_of_few(float(scaled[0]), few))


def _p_of_few(r: float, share: float) -> float:
    """P-value of a correlation whose mean square by chance is this: as if of 1 / share pairs."""
    freedom = max(1 / max(share, NOTHING) - 1, NOTHING)
    return float(2 * student.sf(abs(r) * np.sqrt(freedom / max(1 - r**2, NOTHING)), freedom))


class Correlation(NamedTuple):
    """A correlation and its p-value."""

    r: float
    p_value: float


def mantel(
    matrix: Matrix,
    distances: ArrayLike,
    *,
    in_common: Matrix | None = None,
    num_permutations: int | None = None,
    seed: int = 0,
    ranks: bool = False,
) -> Correlation:
    """Mantel test: correlation of two matrices over pairs, two-sided, tasks permuted.

    Similar tasks that are near each other give a *negative* r.

    Args:
        matrix: Similarities `[T, T]`.
        distances: Known distances `[T, T]`, in the same order.
        in_common: As in `family_contrast`.
        num_permutations: How often the tasks of one matrix are shuffled; None: 9,999 times, less
            often for more than 60 tasks.
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

    num_permutations = num_permutations or _enough_shuffles(len(values))
    shuffles = shuffled_orders(len(matrix), num_permutations=num_permutations, seed=seed)
    chance = np.concatenate([correlations(part) for part in _chunks(shuffles.orders, len(values))])
    r = float(correlations(np.arange(len(matrix))[None])[0])
    p_value = shuffles.p_value(np.abs(chance), abs(r))
    if in_common is not None and r:
        near = other[rows, columns]
        p_value = max(p_value, _p_of_noise(values, near, in_common, rows, columns))
    return Correlation(r, p_value)


def _enough_shuffles(num_pairs: int) -> int:
    most = _MOST_SHUFFLED // max(1, num_pairs)
    return max(_FEWEST_PERMUTATIONS, min(_NUM_PERMUTATIONS, most))


def _chunks(orders: NDArray[np.int64], num_pairs: int) -> list[NDArray[np.int64]]:
    """In blocks: all pairs of all shuffles would take too much memory."""
    return np.array_split(orders, -(-len(orders) * max(1, num_pairs) // _AT_ONCE))


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
    drawn = values[draw.integers(len(values), size=(_NUM_PERMUTATIONS, len(values)))]
    samples = _row_correlations(rankdata(drawn[..., 0], axis=1), rankdata(drawn[..., 1], axis=1))
    low, high = np.nanquantile(samples, [0.025, 0.975])
    first, second = rankdata(values[:, 0]), rankdata(values[:, 1])
    shuffles = shuffled_orders(len(values), num_permutations=_NUM_PERMUTATIONS, seed=_SEED)
    shuffled = second[shuffles.orders]
    chance = _row_correlations(np.broadcast_to(first, shuffled.shape), shuffled)
    p_value = shuffles.p_value(np.abs(chance), abs(rho))
    return RankCorrelation(rho, (float(low), float(high)), p_value)


@dataclass(frozen=True, eq=False)
class SimilarityComparison:
    """Two runs on the same tasks.

    `difference` is second minus first, `[T, T]`; `change` tests it over tasks; `pattern` says
    whether the same pairs are similar in both. Runs that were measured on the same lines share the
    noise of these lines, so that there is no test of that (NaN).
    """

    tasks: tuple[str, ...]
    difference: Floats
    change: Change
    pattern: Correlation | None


def compare_similarities(
    first: Similarities,
    second: Similarities,
    *,
    tested: tuple[Similarities, Similarities] | None = None,
) -> SimilarityComparison:
    """Compare the similarities of two runs: batch size, model size, direction.

    Args:
        first: One run.
        second: Another. Tasks are matched by name; "fr-en" matches "en-fr" where no name does.
        tested: What `pattern` is about, where it is not these: both runs on different lines.
    """
    matches = match_tasks(first.tasks, second.tasks)
    tasks = tuple(matches)
    both = [list(tasks), list(matches.values())]
    one, two = (run.select(tasks=names) for run, names in zip((first, second), both, strict=True))
    pairs = [one, two]
    if tested is not None:
        pairs = [run.select(tasks=names) for run, names in zip(tested, both, strict=True)]
    noise = [noise_in_common(*lines) for lines in zip((one, two), pairs, strict=True)]
    in_common = [in_changes(shared) for shared in noise if shared is not None]
    means = [mean_matrix(one), mean_matrix(two)]
    recorded = first.lines == "training"
    if recorded and np.array_equal(first.steps, second.steps):
        change = paired(by_step(one), by_step(two), over="records")
    else:
        most = max(in_common, key=mean_of_pairs, default=None)
        change = paired(means[0][None], means[1][None], over="tasks", in_common=most)
    pattern = mantel(*map(pair_pattern, pairs)) if len(tasks) > 3 else None
    if pattern is not None and not recorded:
        pattern = pattern._replace(p_value=np.nan)
    return SimilarityComparison(tasks, means[1] - means[0], change, pattern)


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
