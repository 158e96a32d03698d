"""Temperature sampling: frequencies, schedules, and draws that continue exactly."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from gradvac.lab.training import SamplingConfig
from gradvac.lab.training.settings import TemperaturePhase
from gradvac.sampling import costs_by_slot, task_probabilities

SIZES = {"fr": 20_000, "cs": 30_000, "hi": 3_000, "gd": 40}


@pytest.mark.parametrize("temperature", [1.0, 5.0, 100.0])
def test_probabilities_follow_the_formula(temperature: float) -> None:
    total = sum(SIZES.values())
    powers = [(size / total) ** (1 / temperature) for size in SIZES.values()]
    expected = np.array(powers) / sum(powers)
    found = list(task_probabilities(SIZES, temperature).values())
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_extreme_temperatures() -> None:
    assert set(task_probabilities(SIZES, math.inf).values()) == {0.25}
    assert task_probabilities(SIZES, 1e-4)["cs"] == 1.0  # the largest task takes all


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_draws_have_these_frequencies(temperature: float) -> None:
    sampler = SamplingConfig(temperature=temperature).build(SIZES, seed=1)
    num = 40_000
    counts = np.bincount(
        np.concatenate([sampler.draw(num // 8, step=0) for _ in range(8)]), minlength=len(SIZES)
    )
    expected = np.array(list(sampler.probabilities(0).values()))
    deviation = np.sqrt(expected * (1 - expected) / num)
    assert (np.abs(counts / num - expected) < 4 * deviation).all()


def test_schedule_changes_the_temperature_from_its_step_on() -> None:
    phases = [
        TemperaturePhase(from_step=100, temperature=2.0),
        TemperaturePhase(from_step=200, temperature=1.0),
    ]
    config = SamplingConfig(temperature=5.0, schedule=phases)
    steps = [0, 99, 100, 199, 200, 10_000]
    sampler = config.build({"a": 1})
    assert [sampler.temperature_at(step) for step in steps] == [5.0, 5.0, 2.0, 2.0, 1.0, 1.0]
    sampler = config.build({"large": 99, "small": 1}, seed=0)
    early, late = sampler.draw(2000, step=0).mean(), sampler.draw(2000, step=200).mean()
    assert early == pytest.approx(sampler.probabilities(0)["small"], abs=0.05)
    assert late == pytest.approx(0.01, abs=0.01)


def test_restored_sampler_draws_what_would_have_come() -> None:
    config = SamplingConfig(temperature=3.0)
    whole = config.build(SIZES, seed=7)
    drawn = [whole.draw(5, step=step).tolist() for step in range(20)]
    first = config.build(SIZES, seed=7)
    for step in range(12):
        first.draw(5, step=step)
    state = json.loads(json.dumps(first.state_dict()))  # plain values only
    second = config.build(SIZES, seed=0)
    second.load_state_dict(state)
    assert [second.draw(5, step=step).tolist() for step in range(12, 20)] == drawn[12:]


def test_seeds_differ_and_the_config_s_own_goes_first() -> None:
    def drawn(config: SamplingConfig, seed: int) -> list[int]:
        return config.build(SIZES, seed=seed).draw(30, step=0).tolist()

    assert drawn(SamplingConfig(), 1) != drawn(SamplingConfig(), 2)
    assert drawn(SamplingConfig(seed=1), 2) == drawn(SamplingConfig(), 1)


@pytest.mark.parametrize(("sizes", "what"), [({"a": 3, "b": 0}, "'b'"), ({}, "no task")])
def test_empty_tasks_are_named(sizes: dict[str, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SamplingConfig().build(sizes)


def test_effective_epochs_by_hand() -> None:
    sizes = {"large": 300, "small": 100}
    flat = SamplingConfig(temperature=1.0).effective_epochs(sizes, num_steps=8, rows_per_step=50)
    assert [row.epochs for row in flat] == pytest.approx([1.0, 1.0])
    # four steps by size (3 : 1), then four in equal shares
    phases = [TemperaturePhase(from_step=4, temperature=math.inf)]
    config = SamplingConfig(temperature=1.0, schedule=phases)
    large, small = config.effective_epochs(sizes, num_steps=8, rows_per_step=50)
    assert (large.num_drawn, small.num_drawn) == pytest.approx((150 + 100, 50 + 100))
    assert small.epochs == pytest.approx(1.5)
    assert large.probability + small.probability == pytest.approx(1.0)
    # a phase that begins after the end does not count
    late = [TemperaturePhase(from_step=100, temperature=math.inf)]
    config = SamplingConfig(temperature=1.0, schedule=late)
    assert config.effective_epochs(sizes, num_steps=8, rows_per_step=50) == flat


def test_effective_epochs_agree_with_draws() -> None:
    config = SamplingConfig(
        temperature=5.0, schedule=[TemperaturePhase(from_step=30, temperature=1.0)]
    )
    sampler = config.build(SIZES, seed=0)
    drawn = np.concatenate([sampler.draw(500, step=step) for step in range(60)])
    counts = np.bincount(drawn, minlength=len(SIZES))
    rows = config.effective_epochs(SIZES, num_steps=60, rows_per_step=500)
    assert [row.num_drawn for row in rows] == pytest.approx(counts.tolist(), rel=0.05)


UNEVEN = {"en-fr": 100_000, "en-hi": 2_000, "en-yo": 100}


def test_unimax_is_uniform_up_to_the_cap() -> None:
    """By hand: yo may have 400 rows, hi 8,000; of 30,000 uniform thirds, fr takes the rest."""
    config = SamplingConfig(temperature=math.inf, most_epochs=4.0)
    shares = config.build(UNEVEN, num_rows=30_000).probabilities(0)
    assert shares == pytest.approx(
        {"en-yo": 400 / 3e4, "en-hi": 8_000 / 3e4, "en-fr": 21_600 / 3e4}
    )
    assert config.build(UNEVEN, num_rows=90).probabilities(0) == pytest.approx(
        dict.fromkeys(UNEVEN, 1 / 3)
    )


@pytest.mark.parametrize("temperature", [1.0, 5.0, math.inf])
@pytest.mark.parametrize("num_rows", [1_000, 50_000, 400_000])
def test_no_task_is_seen_more_often_than_the_cap(temperature: float, num_rows: int) -> None:
    config = SamplingConfig(temperature=temperature, most_epochs=4.0)
    shares = config.build(UNEVEN, num_rows=num_rows).probabilities(0)
    assert sum(shares.values()) == pytest.approx(1.0)
    rows = config.effective_epochs(UNEVEN, num_steps=num_rows // 10, rows_per_step=10)
    assert max(row.epochs for row in rows) <= 4.0 + 1e-9
    free = task_probabilities(UNEVEN, temperature)
    for task, share in shares.items():  # nobody but the capped ones loses
        assert share >= free[task] - 1e-12 or share == pytest.approx(4 * UNEVEN[task] / num_rows)


def test_a_sampler_with_a_cap_draws_that_often() -> None:
    sampler = SamplingConfig(temperature=math.inf, most_epochs=4.0).build(UNEVEN, num_rows=30_000)
    drawn = np.bincount(sampler.draw(30_000, step=0), minlength=3)
    assert drawn == pytest.approx([21_600, 8_000, 400], rel=0.15)


def test_a_cap_that_cannot_hold_is_refused() -> None:
    config = SamplingConfig(most_epochs=2.0)
    with pytest.raises(ValueError, match=r"4.9 epochs .*allow more"):
        config.build(UNEVEN, num_rows=500_000).probabilities(0)
    with pytest.raises(ValueError, match="in advance"):
        config.build(UNEVEN)


@pytest.mark.parametrize("num", [24, 27])
def test_slots_divide_the_rows_of_a_batch(num: int) -> None:
    """Few tasks in a batch, each with its share of rows; over many batches, the same shares."""
    sampler = SamplingConfig(temperature=5.0, slots=3).build(SIZES, seed=1)
    total = np.zeros(len(SIZES))
    for _ in range(4000):
        rows, slots = sampler.draw_rows(num, step=0)
        assert slots is not None
        assert (rows.sum(), slots.sum()) == (num, 3)
        np.testing.assert_array_equal(rows, slots * num // 3)
        costs = costs_by_slot(rows, slots)
        assert len(costs) == num
        assert sum(costs) == pytest.approx(3.0)
        total += rows
    expected = list(task_probabilities(SIZES, 5.0).values())
    np.testing.assert_allclose(total / total.sum(), expected, atol=0.015)


def test_without_slots_every_row_draws_its_task() -> None:
    config = SamplingConfig(temperature=5.0)
    rows, slots = config.build(SIZES, seed=1).draw_rows(50, step=0)
    assert slots is None
    drawn = config.build(SIZES, seed=1).draw(50, step=0)
    np.testing.assert_array_equal(rows, np.bincount(drawn, minlength=len(SIZES)))
