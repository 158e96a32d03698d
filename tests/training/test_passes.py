"""Every row once per pass, in a new order each time; where it stands is one number per task."""

from __future__ import annotations

from gradvac.training import Passes


def test_a_pass_has_every_row_once_and_the_next_another_order() -> None:
    passes = Passes([3, 80], seed=0)
    takes = [passes.take(1, 80).tolist() for _ in range(2)]
    assert sorted(takes[0]) == sorted(takes[1]) == list(range(80))
    assert takes[0] != takes[1]


def test_a_take_may_reach_over_several_passes() -> None:
    taken = Passes([3], seed=0).take(0, 7).tolist()
    assert [sorted(taken[:3]), sorted(taken[3:6])] == [[0, 1, 2]] * 2


def test_the_state_continues_within_a_pass() -> None:
    whole, first, second = (Passes([5, 9], seed=4) for _ in range(3))
    expected = [whole.take(1, 4).tolist(), whole.take(1, 13).tolist()]
    assert first.take(1, 4).tolist() == expected[0]
    second.load_state_dict(first.state_dict())
    assert second.take(1, 13).tolist() == expected[1]
