"""The law of repetition, high-resource tasks first, and thinned data."""

import numpy as np
import pytest

from gradvac.lab.training import RunConfig, SamplingConfig
from gradvac.lab.training.stream import RowStream
from gradvac.lab.training.workload import BatchSlice
from gradvac.sampling import TaskSampler, repetition_temperature, task_probabilities
from gradvac.sampling.shares import useful_rows

FOUR = {"fr": 21_305, "cs": 31_467, "hi": 3_000, "tr": 3_000}


def test_rows_that_are_seen_again_are_worth_less() -> None:
    worth = [useful_rows(100, drawn) for drawn in (50, 100, 200, 1e9)]
    assert worth[:2] == [50, 100]
    assert worth[2] == pytest.approx(100 * (1 + 4.5 * (1 - np.exp(-1 / 4.5))))
    assert worth[3] == pytest.approx(550)


def test_the_longer_training_the_nearer_to_the_data() -> None:
    found = [repetition_temperature(FOUR, rows) for rows in (8e4, 4.5e5, 9e5, 2.1e6, 1e9)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 5.0
    assert found[-1] == 1.0


@pytest.mark.parametrize("rows", [3e5, 4.5e5, 2.1e6])
def test_it_minimises_the_predicted_loss(rows: float) -> None:
    def loss(temperature: float) -> float:
        shares = task_probabilities(FOUR, temperature)
        return sum(useful_rows(FOUR[task], rows * shares[task]) ** -0.353 for task in FOUR)

    found = repetition_temperature(FOUR, rows)
    assert loss(found) <= min(loss(t) for t in np.linspace(1, 5, 300)) + 1e-6


def test_auto_needs_to_know_how_much_is_drawn() -> None:
    auto = SamplingConfig(temperature="auto")
    assert auto.build(FOUR, num_rows=4.5e5).temperature_at(0) == pytest.approx(1.91)
    with pytest.raises(ValueError, match=r"sampling.temperature = .auto.: .* give a number"):
        auto.build(FOUR)
    with pytest.raises(ValueError, match=r"sampling\.high_first"):
        SamplingConfig(high_first=0.5).build(FOUR)


def test_high_resource_tasks_come_first() -> None:
    sampler = SamplingConfig(temperature=5.0, high_first=0.25).build(FOUR, num_steps=100)
    early = sampler.probabilities(24)
    assert early["hi"] == early["tr"] == 0.0
    assert early["cs"] / early["fr"] == pytest.approx((31_467 / 21_305) ** 0.2)
    assert sampler.probabilities(25) == task_probabilities(FOUR, 5.0)
    assert set(sampler.draw(5000, step=24).tolist()) == {0, 1}
    assert set(sampler.draw(5000, step=25).tolist()) == {0, 1, 2, 3}
    epochs = {one.task: one for one in sampler.effective_epochs(num_steps=100, rows_per_step=10)}
    assert epochs["hi"].num_drawn == pytest.approx(750 * task_probabilities(FOUR, 5.0)["hi"])
    assert sum(one.num_drawn for one in epochs.values()) == pytest.approx(1000)


def test_a_last_task_without_a_share_is_not_drawn() -> None:
    sampler = TaskSampler({"large": 9, "small": 1}, high_first=1)
    sampler._edges[5.0, True] = np.array([1.0 - 1e-3, 1.0 - 1e-3])  # rounded to below 1
    assert not sampler.draw(20_000, step=0).any()


def test_thinned_data_keep_the_repeats() -> None:
    seen: list[list[int]] = []

    class Rows:
        num_tokens = 1

        def take(self, part: BatchSlice, costs: object) -> "Rows":
            return self

    def make(chosen: object) -> Rows:
        seen.append([row for rows in chosen for row in rows.tolist()])  # type: ignore[attr-defined]
        return Rows()

    config = RunConfig(sampling=SamplingConfig(thin=8))
    stream = RowStream(config, {"a": 25}, make, rows=4)
    for _ in range(2):
        next(stream)
    assert sorted(seen[0]) == sorted(seen[1]) == [0, 8, 16, 24]
    whole = SamplingConfig().effective_epochs(FOUR, num_steps=800, rows_per_step=100)
    thin = SamplingConfig(thin=8).effective_epochs(FOUR, num_steps=100, rows_per_step=100)
    for one, other in zip(whole, thin, strict=True):
        assert other.epochs == pytest.approx(one.epochs, rel=1e-3)
