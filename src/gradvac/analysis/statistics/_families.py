"""Clusters, families, and known distances."""

# T tasks

from collections import Counter
from collections.abc import Mapping, Sequence
from math import factorial, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from scipy.stats import rankdata

from gradvac.analysis.statistics._chance import (
    Matrix,
    count_labelings,
    shuffled_labels,
    shuffled_orders,
)

_AT_ONCE = 2048  # shuffles


def dendrogram(matrix: Matrix, *, ordered: bool = True) -> NDArray[np.float64]:
    """SciPy's linkage of the tasks: average linkage on 1 - cosine, leaves in optimal order.

    Args:
        matrix: `[T, T]`.
        ordered: Whether the order of leaves matters; finding the best one takes most of the time.
    """
    if len(matrix) < 2:
        raise ValueError("matrix: one task has nothing to be clustered with; give at least two.")
    distances = 1.0 - np.asarray(_symmetric(matrix), dtype=np.float64)
    unknown = np.isnan(distances)
    distances[unknown] = np.max(distances[~unknown], initial=1.0)
    np.fill_diagonal(distances, 0.0)
    condensed = squareform(distances.clip(min=0.0), checks=False)
    tree = hierarchy.linkage(condensed, method="average", optimal_ordering=ordered)
    return np.asarray(tree, dtype=np.float64)


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
    values, rows, columns = _pairs(_symmetric(matrix)[np.ix_(with_family, with_family)])
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
    one, other = _symmetric(matrix), _symmetric(other)
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


def _ranked(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    values, rows, columns = _pairs(matrix)
    ranked = np.full_like(matrix, np.nan)
    ranked[rows, columns] = ranked[columns, rows] = rankdata(values)
    return ranked
