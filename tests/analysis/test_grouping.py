"""Groups of tasks: as good as trying all divisions."""

from collections.abc import Iterator

import numpy as np
import pytest

from gradvac.analysis.grouping import Groups, best_groups, gain_within


def divisions(tasks: tuple[int, ...], fewest: int, most: int) -> Iterator[Groups]:
    """All divisions of tasks into groups of these sizes."""
    if not tasks:
        yield ()
        return
    first, rest = tasks[0], tasks[1:]
    for bits in range(2 ** len(rest)):
        inside = (first, *(task for n, task in enumerate(rest) if bits >> n & 1))
        if fewest <= len(inside) <= most:
            others = tuple(task for task in rest if task not in inside)
            for division in divisions(others, fewest, most):
                yield (inside, *division)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_groups", "fewest", "most"), [(2, 2, 6), (3, 2, 4), (3, 1, 5)])
def test_as_good_as_trying_all(seed: int, num_groups: int, fewest: int, most: int) -> None:
    gains = np.random.default_rng(seed).normal(size=(8, 8))  # not symmetric, and below 0 too
    groups = best_groups(gains, num_groups, fewest=fewest, most=most)
    every = [d for d in divisions(tuple(range(8)), fewest, most) if len(d) == num_groups]
    assert groups in every
    best = max(gain_within(gains, division) for division in every)
    assert gain_within(gains, groups) == pytest.approx(best)


def test_planted_groups_of_many_tasks_are_found() -> None:
    draw = np.random.default_rng(0)
    where = draw.permutation(np.arange(60) % 10)
    gains = 0.1 * (where[:, None] == where) + draw.normal(scale=0.02, size=(60, 60))
    groups = best_groups(gains, 10)
    assert {len(set(where[list(group)])) for group in groups} == {1}
    assert groups == best_groups(gains, 10)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="num_groups: 5 tasks"):
        best_groups(np.eye(5), 3)
    with pytest.raises(ValueError, match=r"gains: .* unknown"):
        best_groups(np.full((4, 4), np.nan), 2)
    with pytest.raises(ValueError, match=r"gains: must be \[T, T\]"):
        best_groups(np.ones((4, 3)), 2)
