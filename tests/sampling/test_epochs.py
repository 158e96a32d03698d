"""Every row once per pass, in a new order each time; where it stands is one number per task."""

from __future__ import annotations

import numpy as np
import pytest

from gradvac.sampling import Epochs
from gradvac.sampling.epochs import permute, permute_by_blocks


def test_a_pass_has_every_row_once_and_the_next_another_order() -> None:
    passes = Epochs([3, 80], seed=0)
    takes = [passes.take(1, 80).tolist() for _ in range(2)]
    assert sorted(takes[0]) == sorted(takes[1]) == list(range(80))
    assert takes[0] != takes[1]


def test_a_take_may_reach_over_several_passes() -> None:
    taken = Epochs([3], seed=0).take(0, 7).tolist()
    assert [sorted(taken[:3]), sorted(taken[3:6])] == [[0, 1, 2]] * 2


def test_the_state_continues_within_a_pass() -> None:
    whole, first, second = (Epochs([5, 9], seed=4) for _ in range(3))
    expected = [whole.take(1, 4).tolist(), whole.take(1, 13).tolist()]
    assert first.take(1, 4).tolist() == expected[0]
    second.load_state_dict(first.state_dict())
    assert second.take(1, 13).tolist() == expected[1]


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000, 70_001])
def test_orders_that_are_not_stored_are_orders(size: int) -> None:
    orders = [permute(np.arange(size), size, seed=(1, turn)) for turn in range(2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(size))
    if size > 100:
        # As random ones: no place keeps its row, neighbours do not stay neighbours.
        assert (orders[0] == np.arange(size)).mean() < 0.01
        assert (orders[0] == orders[1]).mean() < 0.01
        assert abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 0.1
        some = permute(np.array([5, 99]), size, seed=(1, 0))
        assert some.tolist() == orders[0][[5, 99]].tolist()


def test_large_tasks_start_at_once_and_continue() -> None:
    size = (1 << 20) + 12_345
    passes = Epochs([10, size], seed=3)
    first = passes.take(1, size - 5)
    rest = passes.take(1, 8)
    assert len(np.unique(np.concatenate([first, rest[:5]]))) == size
    other = Epochs([10, size], seed=3)
    other.take(1, 1000)
    again = Epochs([10, size], seed=3)
    again.load_state_dict(other.state_dict())
    assert again.take(1, 50).tolist() == first[1000:1050].tolist()


def test_a_large_order_visits_a_few_places_at_a_time() -> None:
    size = 40 * (1 << 16) + 77
    orders = [permute_by_blocks(np.arange(size), size, seed=(0, turn)) for turn in range(2)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(size))
        assert 14 < len(np.unique(order[:50_000] >> 16)) <= 16
        assert abs(np.corrcoef(order[:50_000], np.arange(50_000))[0, 1]) < 0.05
    assert set(np.unique(orders[0][:1000] >> 16)) != set(np.unique(orders[1][:1000] >> 16))
    assert permute_by_blocks(np.array([9, size - 1]), size, seed=(0, 0)).tolist() == [
        orders[0][9],
        orders[0][-1],
    ]
