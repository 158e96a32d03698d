"""What chance alone would give: permutations, the jackknife over tasks, multiple tests."""

# T tasks, N permutations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from math import factorial, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from gradvac.analysis.similarities import mean_where_known

Matrix = NDArray[np.floating]

MOST_COUNTED = 20_000  # permutations that are enumerated; if there are more, they are drawn
_NOTHING = 1e-7  # rounding errors around 0
_FEWEST_TASKS = 3  # two tasks are one pair, which shows no variation


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
