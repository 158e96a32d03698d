"""Divide tasks into groups by what they are predicted to gain from one another.

A task's gain in a group is the mean of its row over the others of the group; a task alone has 0.
The best division maximises the sum over all tasks. A mean instead of a sum, because who learns
with more companions sees less of each.
"""

# T tasks, G groups, n tasks of a group

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SEED = 0
_NOTHING = 1e-12  # rounding errors, which would exchange two tasks for ever

Groups = tuple[tuple[int, ...], ...]


def best_groups(
    gains: ArrayLike,
    num_groups: int,
    *,
    fewest: int = 2,
    most: int | None = None,
    starts: int = 100,
) -> Groups:
    """Divide all tasks into groups with the largest total gain; the same every time.

    Tasks move and change places as long as that helps, from several random divisions.

    Args:
        gains: `[T, T]`: [i, j] is what task i is predicted to gain from task j, such as the cosine
            of their gradients. The diagonal does not count.
        num_groups: How many groups.
        fewest: No group has fewer tasks.
        most: No group has more; None: one and a half times the average.
        starts: Divisions to start from.

    Returns:
        Positions of the tasks of every group, ascending; the group of the first task comes first.

    Examples:
        >>> best_groups([[1, 0.1, 0.6, 0], [0.1, 1, 0, 0.4], [0.6, 0, 1, 0.2], [0, 0.4, 0.2, 1]], 2)
        ((0, 2), (1, 3))
    """
    values = np.array(gains, dtype=np.float64)
    num = len(values)
    if values.shape != (num, num):
        raise ValueError(f"gains: must be [T, T], got {list(values.shape)}.")
    np.fill_diagonal(values, 0.0)
    if not np.isfinite(values).all():
        raise ValueError("gains: a pair of tasks is unknown; leave one of them out.")
    most = most or math.ceil(1.5 * num / max(1, num_groups))
    if not 1 <= fewest * num_groups <= num <= most * num_groups:
        raise ValueError(
            f"num_groups: {num} tasks cannot be divided into {num_groups} groups of {fewest} to "
            f"{most}."
        )
    draw = np.random.default_rng(_SEED)
    together = values + values.T
    found = [
        _improved(together, draw.permutation(np.arange(num) % num_groups), fewest, most)
        for _ in range(starts)
    ]
    best = max(found, key=lambda where: round(gain_within(values, _groups(where)), 9))
    return _groups(best)


def gain_within(gains: ArrayLike, groups: Groups) -> float:
    """The sum over all tasks of what they gain within their groups."""
    values = np.asarray(gains, dtype=np.float64)
    parts = [values[np.ix_(group, group)] for group in groups if len(group) > 1]
    return float(sum((part.sum() - np.trace(part)) / (len(part) - 1) for part in parts))


def _groups(where: NDArray[np.int64]) -> Groups:
    groups = [tuple(np.flatnonzero(where == group).tolist()) for group in np.unique(where)]
    return tuple(sorted(groups))


def _improved(
    together: NDArray[np.float64], where: NDArray[np.int64], fewest: int, most: int
) -> NDArray[np.int64]:
    """The division `[T]` after the best move or exchange, again and again.

    Args:
        together: `[T, T]`, what a pair adds to its group; the diagonal is 0.
        where: The group of every task, `[T]`.
        fewest: Tasks of a group.
        most: Likewise.
    """
    where, num = where.copy(), len(where)
    every = np.arange(num)
    while True:
        member = np.eye(int(where.max()) + 1)[where]  # [T, G]
        size, to_group = member.sum(axis=0), together @ member  # [G], [T, G]
        total = (member * to_group).sum(axis=0) / 2  # [G]
        own, own_size = to_group[every, where], size[where]
        value = _mean_of(total, size)
        # Task i goes to group b: [T, G].
        left = _mean_of(total[where] - own, own_size - 1) - value[where]
        moved = left[:, None] + _mean_of(total + to_group, size + 1) - value
        moved[(own_size <= fewest)[:, None] | (size >= most) | (member > 0)] = -np.inf
        # Tasks i and j change places: [T, T]; `gets` is the total of i's group with j for i.
        gets = (total[where] - own)[:, None] + to_group[:, where].T - together
        changed = _mean_of(gets, own_size[:, None]) - value[where][:, None]
        changed = np.where(where[:, None] == where, -np.inf, changed + changed.T)
        if max(moved.max(), changed.max()) <= _NOTHING:
            return where
        if moved.max() >= changed.max():
            task, group = np.unravel_index(moved.argmax(), moved.shape)
            where[task] = group
        else:
            one, other = np.unravel_index(changed.argmax(), changed.shape)
            where[[one, other]] = where[[other, one]]


def _mean_of(total: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    """What all tasks of a group gain, from the sum over its pairs."""
    return np.where(size > 1, total / np.maximum(size - 1, 1), 0.0)
