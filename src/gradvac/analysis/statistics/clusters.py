"""The tree of tasks, and groups of tasks that could train together: its branches that come back.

Any data give a tree, even noise. So two questions are asked. Do the same pairs stand out in two
independent halves of the data (of every task's lines, if they were measured that way; else of the
components)? If not, there are no groups. And does a branch reappear when components are resampled
(Felsenstein's bootstrap)? Only branches that reappear nine times out of ten are reported.
"""

# S steps, K components, T tasks

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.analysis.statistics.significance import Correlation, mantel, symmetric
from gradvac.analysis.statistics.summaries import Matrix

SUPPORT = 0.9
_FEWEST_TASKS, _FEWEST_COMPONENTS = 4, 4
_SIGNIFICANT = 0.05
_NUM_SAMPLES, _SEED = 200, 0  # of the components


def dendrogram(matrix: Matrix, *, ordered: bool = True) -> NDArray[np.float64]:
    """SciPy's linkage of the tasks: average linkage on 1 - cosine, leaves in optimal order.

    Args:
        matrix: `[T, T]`.
        ordered: Whether the order of leaves matters; finding the best one takes most of the time.
    """
    if len(matrix) < 2:
        raise ValueError("matrix: one task has nothing to be clustered with; give at least two.")
    distances = 1.0 - np.asarray(symmetric(matrix), dtype=np.float64)
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


class TaskGroup(NamedTuple):
    """Tasks that belong together, and the share of samples in which they do."""

    tasks: tuple[str, ...]
    support: float


class TaskGroups(NamedTuple):
    """Groups of tasks, the most distinct first; none if they are not stable.

    Attributes:
        found: The groups.
        agreement: Whether the same pairs stand out in two halves of the data.
        why_none: What is missing, in words; "" if there are groups.
    """

    found: tuple[TaskGroup, ...]
    agreement: Correlation | None
    why_none: str


def stable_groups(similarities: Similarities) -> TaskGroups:
    """Suggest groups of tasks, or say why there are none.

    Args:
        similarities: Of at least 4 tasks and 4 components.
    """
    values = similarities.values[:, weighty(similarities.components)]
    layers = mean_where_known(values, axis=0)  # [K, T, T]
    if len(similarities.tasks) < _FEWEST_TASKS or len(layers) < _FEWEST_COMPONENTS:
        few = f"{_FEWEST_TASKS} tasks and {_FEWEST_COMPONENTS} components"
        return TaskGroups((), None, f"groups need at least {few}")
    first, second = (_apart_from_tasks(half) for half in _halves(similarities, layers))
    agreement = mantel(first, second)
    if not (agreement.r > 0 and agreement.p_value < _SIGNIFICANT):
        why = "other pairs stand out in one half of the data than in the other"
        return TaskGroups((), agreement, why)
    draw = np.random.default_rng(_SEED)
    drawn = draw.integers(len(layers), size=(_NUM_SAMPLES, len(layers)))
    samples = [_branches(mean_where_known(layers[indices], axis=0)) for indices in drawn]
    lengths = _branches(mean_where_known(layers, axis=0))
    stable: list[tuple[frozenset[int], float]] = []
    for branch in sorted(lengths, key=lengths.__getitem__, reverse=True):  # the most distinct first
        support = sum(branch in sample for sample in samples) / _NUM_SAMPLES
        if support >= SUPPORT and all(branch.isdisjoint(other) for other, _ in stable):
            stable.append((branch, support))
    groups = tuple(
        TaskGroup(tuple(similarities.tasks[i] for i in sorted(branch)), support)
        for branch, support in stable
    )
    return TaskGroups(
        groups, agreement, "" if groups else "no branch of the tree reappears reliably"
    )


def _halves(similarities: Similarities, layers: Matrix) -> tuple[Matrix, Matrix]:
    """Two measurements of every pair that share no noise, each `[T, T]`."""
    if similarities.across is None:
        one, two = (mean_where_known(layers[start::2], axis=0) for start in (0, 1))
        return one, two
    chosen = weighty(similarities.components)
    across = mean_where_known(similarities.across[:, chosen], axis=(0, 1))
    upper, lower = np.triu(across, 1), np.tril(across, -1)
    return upper + upper.T, lower + lower.T


def _apart_from_tasks(matrix: Matrix) -> Matrix:
    """What remains of a pair without both tasks' own means: one odd task is not a group."""
    values = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(values, np.nan)
    num = len(values)
    rows, columns = np.nonzero(~np.isnan(values))
    design = np.zeros((len(rows), num))
    design[np.arange(len(rows)), rows] += 1
    design[np.arange(len(rows)), columns] += 1
    task_means, *_ = np.linalg.lstsq(design, values[rows, columns], rcond=None)
    left: Matrix = values - task_means[:, None] - task_means[None]
    return left


def _branches(matrix: Matrix) -> dict[frozenset[int], float]:
    """Tasks below every join of the tree -> how much closer they are than with any other task.

    Joins of nearly all tasks do not count: all but one is not a group.
    """
    num, tree = len(matrix), dendrogram(matrix, ordered=False)
    below = {n: frozenset([n]) for n in range(num)}
    heights: dict[frozenset[int], float] = {}
    lengths: dict[frozenset[int], float] = {}
    for join, (one, other, height, _) in enumerate(tree, start=num):
        parts = below[int(one)], below[int(other)]
        lengths.update({part: height - heights[part] for part in parts if part in heights})
        below[join] = parts[0] | parts[1]
        heights[below[join]] = float(height)
    return {branch: length for branch, length in lengths.items() if len(branch) <= num - 2}
