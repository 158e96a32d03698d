"""Clusters, families, and known distances."""

# T tasks

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from scipy.stats import rankdata

from gradvac.analysis.statistics._summaries import Matrix


def dendrogram(matrix: Matrix) -> NDArray[np.float64]:
    """SciPy's linkage of the tasks: average linkage on 1 - cosine, leaves in the best order."""
    if len(matrix) < 2:
        raise ValueError("matrix: one task has nothing to be clustered with; give at least two.")
    distances = 1.0 - np.asarray(_symmetric(matrix), dtype=np.float64)
    unknown = np.isnan(distances)
    distances[unknown] = np.max(distances[~unknown], initial=1.0)
    np.fill_diagonal(distances, 0.0)
    condensed = squareform(distances.clip(min=0.0), checks=False)
    found = hierarchy.linkage(condensed, method="average", optimal_ordering=True)
    return np.asarray(found, dtype=np.float64)


def cluster_order(matrix: Matrix) -> list[int]:
    """Task positions such that similar tasks are neighbours."""
    if len(matrix) < 2:
        return list(range(len(matrix)))
    order: list[int] = hierarchy.leaves_list(dendrogram(matrix)).tolist()
    return order


def families_of(tasks: Sequence[str], families: Mapping[str, str]) -> list[str]:
    """The family of every task in order, "" where unknown: what `family_contrast` takes."""
    return [families.get(task, "") for task in tasks]


class FamilyContrast(NamedTuple):
    """Are relatives more similar? Mean cosines, and a one-sided permutation p-value."""

    within: float
    between: float
    difference: float
    p_value: float


def family_contrast(
    matrix: Matrix, families: Sequence[str], *, num_permutations: int = 9999, seed: int = 0
) -> FamilyContrast:
    """Mean similarity within families minus between them, against shuffled families.

    Args:
        matrix: `[T, T]`.
        families: The family of every task, in the matrix's order; "" (unknown) leaves a task out.
        num_permutations: How often families are shuffled over the tasks.
        seed: Of the shuffling.
    """
    if len(families) != len(matrix):
        raise ValueError(
            f"families: must name the family of each of {len(matrix)} tasks, got {len(families)}."
        )
    known = [i for i, family in enumerate(families) if family]
    names = list(dict.fromkeys(families[i] for i in known))
    labels = np.array([names.index(families[i]) for i in known], dtype=np.int64)
    values, rows, columns = _pairs(_symmetric(matrix)[np.ix_(known, known)])
    same = labels[rows] == labels[columns]
    if not same.any() or same.all():
        raise ValueError(
            "families: a contrast needs two tasks of one family and two of different families; "
            f"got {dict(Counter(families))}."
        )
    within, between = float(values[same].mean()), float(values[~same].mean())
    total, size = values.sum(), len(values)

    def contrast(order: NDArray[np.int64]) -> float:
        same = labels[order][rows] == labels[order][columns]
        num = int(same.sum())
        if num in (0, size):  # unknown pairs may leave a shuffle without one of the two
            return -np.inf
        inside = values[same].sum()
        return float(inside / num - (total - inside) / (size - num))

    as_extreme = _count(contrast, within - between, len(known), num_permutations, seed)
    p_value = (1 + as_extreme) / (1 + num_permutations)
    return FamilyContrast(within, between, within - between, p_value)


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
        seed: Of the shuffling.
        ranks: Correlate ranks (Spearman) instead of values (Pearson).
    """
    other = np.asarray(distances, dtype=np.float64)
    if other.shape != matrix.shape:
        raise ValueError(f"distances: must have shape {matrix.shape}, got {other.shape}.")
    if len(matrix) < 3:
        raise ValueError(f"matrix: a correlation over pairs needs 3 tasks, got {len(matrix)}.")
    one, other = _symmetric(matrix), _symmetric(other)
    one = np.where(np.isnan(other), np.nan, one)
    values, rows, columns = _pairs(one)
    if ranks:
        values, other = rankdata(values), _ranked(other)

    def correlation(order: NDArray[np.int64]) -> float:
        theirs = other[order[rows], order[columns]]
        known = ~np.isnan(theirs)  # a shuffle brings unknown distances to known pairs
        if not known.any():
            return 0.0
        mine = values[known] - values[known].mean()
        theirs = theirs[known] - theirs[known].mean()
        scale = np.sqrt((mine @ mine) * (theirs @ theirs))
        return float(mine @ theirs / scale) if scale > 0 else 0.0

    num_tasks = len(matrix)
    r = correlation(np.arange(num_tasks))
    as_extreme = _count(lambda o: abs(correlation(o)), abs(r), num_tasks, num_permutations, seed)
    return Correlation(r, (1 + as_extreme) / (1 + num_permutations))


def _symmetric(matrix: ArrayLike) -> NDArray[np.float64]:
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


def _count(
    statistic: Callable[[NDArray[np.int64]], float],
    observed: float,
    num_tasks: int,
    num_permutations: int,
    seed: int,
) -> int:
    """Permutations of the tasks whose statistic is at least the observed one."""
    draw = np.random.default_rng(seed)
    limit = observed - 1e-12  # rounding must not turn ties into less
    return sum(statistic(draw.permutation(num_tasks)) >= limit for _ in range(num_permutations))


def _ranked(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    values, rows, columns = _pairs(matrix)
    ranked = np.full_like(matrix, np.nan)
    ranked[rows, columns] = ranked[columns, rows] = rankdata(values)
    return ranked
