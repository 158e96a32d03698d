"""Batches of mixed tasks for any loader: shares, order, processes, and exact continuation."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from gradvac.sampling import TaskBatchSampler, repetition_temperature

TASKS = ["fr"] * 60 + ["hi"] * 12 + ["sw"] * 4


def sampler(**options: Any) -> TaskBatchSampler:
    given = {"tasks": TASKS, "batch_size": 8, "temperature": 5.0, "seed": 3}
    return TaskBatchSampler(**given | options)


def passes(of: TaskBatchSampler, num: int) -> list[list[int]]:
    return [batch for _ in range(num) for batch in of]


def test_every_row_of_a_task_comes_before_any_comes_again() -> None:
    rows = list(itertools.chain(*passes(sampler(), 6)))
    assert len(rows) == 6 * 10 * 8
    for task in ("fr", "hi", "sw"):
        own = [row for row in rows if TASKS[row] == task]
        size = TASKS.count(task)
        for start in range(0, len(own) - size, size):
            assert len(set(own[start : start + size])) == size
    orders = [tuple(r for r in rows if TASKS[r] == "sw")[n : n + 4] for n in range(0, 40, 4)]
    assert len(set(orders)) > 3


def test_shares_are_those_of_the_table() -> None:
    mixed = sampler()
    rows = Counter(TASKS[row] for row in itertools.chain(*passes(mixed, 50)))
    for expected in mixed.effective_epochs(500):
        assert rows[expected.task] == pytest.approx(expected.num_drawn, rel=0.08)
        assert expected.epochs == expected.num_drawn / TASKS.count(expected.task)
    assert sum(task.num_drawn for task in mixed.effective_epochs(7)) == pytest.approx(56)


def test_caps_and_schedules() -> None:
    capped = sampler(temperature=float("inf"), most_epochs=6.0, num_rows=400)
    epochs = {task.task: task.epochs for task in capped.effective_epochs(50)}
    assert epochs["sw"] == pytest.approx(6.0)
    assert epochs["hi"] == pytest.approx(6.0)
    with pytest.raises(ValueError, match="most_epochs: needs num_rows"):
        sampler(most_epochs=6.0)
    cooled = sampler(
        temperature=float("inf"), schedule=[(10, 0.05)], batches_per_step=2, num_batches=40
    )
    batches = [{TASKS[row] for row in batch} for batch in cooled]
    assert any("sw" in batch for batch in batches[15:20])  # step 9 is batches 18 and 19
    assert all(batch == {"fr"} for batch in batches[20:])


def test_the_temperature_of_sizes_and_length_and_large_tasks_first() -> None:
    auto = sampler(temperature="auto", num_rows=4_000)
    expected = sampler(temperature=repetition_temperature({"fr": 60, "hi": 12, "sw": 4}, 4_000))
    assert passes(auto, 2) == passes(expected, 2)
    with pytest.raises(ValueError, match=r'temperature = "auto": needs num_rows'):
        sampler(temperature="auto")
    tasks = [{TASKS[row] for row in batch} for batch in sampler(high_first=4)]
    assert tasks[:4] == [{"fr"}] * 4
    assert {"hi", "sw"} <= tasks[4] | tasks[5]


@pytest.mark.parametrize("slots", [None, 4])
def test_processes_take_equal_parts_of_one_batch(slots: int | None) -> None:
    whole = sampler(slots=slots)
    parts = [sampler(slots=slots, rank=rank, num_ranks=4) for rank in range(4)]
    for batch, *own in zip(whole, *parts, strict=True):
        assert [len(part) for part in own] == [2] * 4
        assert list(itertools.chain(*own)) == batch
        tasks = [TASKS[row] for row in batch]
        assert sorted(tasks, key=["fr", "hi", "sw"].index) == tasks  # together
        if slots:
            assert all(len({TASKS[row] for row in part}) == 1 for part in own)


def test_the_same_batches_from_a_concatenation_of_data_sets() -> None:
    blocks = sampler(tasks={"fr": 60, "hi": 12, "sw": 4})
    assert passes(blocks, 2) == passes(sampler(), 2)
    parts = [TensorDataset(torch.full((size,), n)) for n, size in enumerate((60, 12, 4))]
    loader = DataLoader(ConcatDataset(parts), batch_sampler=sampler())
    for (values,), batch in zip(loader, sampler(), strict=True):
        assert values.tolist() == [["fr", "hi", "sw"].index(TASKS[row]) for row in batch]


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 11, 25])
def test_a_restored_sampler_goes_on_exactly(stop: int) -> None:
    """In the middle of a pass it hands out the rest of it, then whole passes again."""
    every = passes(sampler(), 4)
    first = sampler()
    batches = itertools.chain.from_iterable(iter(first) for _ in range(4))
    assert list(itertools.islice(batches, stop)) == every[:stop]
    again = sampler()
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(again) == every[stop : 10 * (stop // 10 + 1)]
    again.load_state_dict(first.state_dict())
    again.set_epoch(stop // 10)  # as trainers do, also in the middle
    assert passes(again, 4 - stop // 10) == every[stop:]
    again.load_state_dict(first.state_dict())
    for epoch in range(4 - stop // 10):  # as trainers do that count from 0 again
        again.set_epoch(epoch)
        start = 10 * (stop // 10 + epoch)
        assert list(again) == every[max(stop, start) : start + 10]


def test_set_epoch_goes_to_a_pass_from_anywhere() -> None:
    every = passes(sampler(), 3)
    one = sampler()
    for epoch in (2, 0, 1):
        one.set_epoch(epoch)
        assert list(one) == every[10 * epoch : 10 * (epoch + 1)]


def test_a_loader_with_workers_is_ahead_and_the_loop_says_where_it_stands() -> None:
    data = torch.arange(len(TASKS))
    expected = passes(sampler(), 2)
    first = sampler()
    loader = DataLoader(data, batch_sampler=first, num_workers=1, prefetch_factor=3)  # type: ignore[arg-type]
    taken = [batch.tolist() for batch in itertools.islice(loader, 4)]
    assert taken == expected[:4]
    assert first.state_dict()["batch"] > 4
    again = sampler()
    again.load_state_dict(first.state_dict(num_batches=4))
    rest = [batch.tolist() for batch in DataLoader(data, batch_sampler=again)]  # type: ignore[arg-type]
    assert rest == expected[4:10]


def test_with_another_temperature_it_goes_on_with_rows_that_are_left() -> None:
    """Where the loop says how far it is, too: the rows drawn so far are part of the state."""
    first = sampler()
    taken = list(itertools.chain(*itertools.islice(iter(first), 2)))
    again = sampler(temperature=1.0)
    again.load_state_dict(first.state_dict(num_batches=2))
    assert again.state_dict()["drawn"] == [
        sum(TASKS[row] == task for row in taken) for task in ("fr", "hi", "sw")
    ]
    french = [row for row in [*taken, *next(iter(again))] if TASKS[row] == "fr"]
    assert len(set(french)) == len(french)


def test_states_of_something_else_are_refused() -> None:
    state = sampler().state_dict()
    for options, said in (
        ({"batch_size": 4}, "batch_size = 8, but this sampler has 4"),
        ({"seed": 4}, "seed = 3"),
        ({"tasks": [*TASKS, "sw"]}, "sizes = "),
    ):
        with pytest.raises(ValueError, match=said):
            sampler(**options).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size: must be at least 1"),
        ({"batch_size": 9, "num_ranks": 2}, "must be a multiple of num_ranks = 2, got 9"),
        ({"slots": 3}, "slots: must divide batch_size = 8"),
        ({"slots": 2, "num_ranks": 4}, "multiple of num_ranks = 4"),
        ({"rank": 2, "num_ranks": 2}, "rank: must be from 0 to 1, got 2"),
        ({"tasks": np.array([0, 1])}, "must be the name of every row's task"),
        ({"tasks": []}, "there is no task"),
        ({"temperature": "hot"}, "temperature: must be a positive number, got 'hot'"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sampler(**options)
