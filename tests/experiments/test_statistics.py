"""The test behind the verdicts: as many false alarms as it says, and it finds what is there."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gradvac.lab.experiments.statistics import Scored, difference, spread
from gradvac.lab.runs.sentences import f1

SENTENCES, DRAWINGS = 60, 60


def make(
    random: np.random.Generator, num: int, *, effect: float, seed_spread: float
) -> tuple[Scored, Scored]:
    """Two methods scored by F1 on the same sentences; logit of a right span = easy + seed + both.

    The second is better by `effect`.
    """
    easy = random.normal(0.5, 0.8, SENTENCES)
    times = random.multinomial(SENTENCES, np.full(SENTENCES, 1 / SENTENCES), size=DRAWINGS)

    def method(better: float) -> Scored:
        by_seed = random.normal(0, seed_spread, num)[:, None]
        logit = easy + better + by_seed + random.normal(0, 0.5, (num, SENTENCES))
        correct = random.binomial(5, 1 / (1 + np.exp(-logit)))
        counts = np.stack([correct, np.full_like(correct, 5), np.full_like(correct, 5)], -1)
        drawn = np.stack([f1((times @ own).astype(float)) for own in counts])
        return Scored(tuple(range(num)), f1(counts.sum(1).astype(float)), drawn)

    return method(0.0), method(effect)


def alarms(
    num: int, *, effect: float = 0.0, seed_spread: float = 0.3, num_times: int = 400
) -> float:
    """How often two methods are called different."""
    random = np.random.default_rng(0)
    made = (make(random, num, effect=effect, seed_spread=seed_spread) for _ in range(num_times))
    return float(np.mean([difference(*both)[0].p_value() < 0.05 for both in made]))


@pytest.mark.parametrize("num", [3, 20])
@pytest.mark.parametrize("seed_spread", [0.3, 0.02])
def test_equal_methods_are_called_different_in_five_percent(num: int, seed_spread: float) -> None:
    """Whether seeds or sentences matter more; of 400 tests 9 to 32 are expected (99 %)."""
    assert 0.0225 <= alarms(num, seed_spread=seed_spread) <= 0.08


def test_other_ways_to_test_call_noise_significant() -> None:
    """Sentences alone, or a bootstrap of four seeds: why neither is used."""
    random = np.random.default_rng(1)
    by_sentences, by_both = [], []
    for _ in range(200):
        first, second = make(random, 4, effect=0.0, seed_spread=0.3)
        assert first.drawn is not None
        assert second.drawn is not None
        both = second.drawn - first.drawn
        by_sentences.append(two_sided(both.mean(0)))
        chosen = random.integers(0, 4, (4, DRAWINGS))
        by_both.append(two_sided(np.take_along_axis(both, chosen, 0).mean(0)))
    assert np.mean(np.array(by_sentences) < 0.05) > 0.3
    assert np.mean(np.array(by_both) < 0.05) > 0.08


def two_sided(drawn: NDArray[np.float64]) -> float:
    return 2 * min(float((drawn <= 0).mean()), float((drawn >= 0).mean()))


def test_a_planted_difference_is_found_and_the_smallest_is_told_right() -> None:
    """A true difference as large as the smallest that can be found is found in 4 of 5 cases."""
    random = np.random.default_rng(2)
    assert alarms(8, effect=1.5, num_times=60) > 0.95
    errors, found = [], []
    for _ in range(300):
        first, second = make(random, 8, effect=0.0, seed_spread=0.3)
        errors.append(difference(first, second)[0].smallest())
    typical = float(np.median(errors))
    for _ in range(300):
        first, second = make(random, 8, effect=0.0, seed_spread=0.3)
        assert second.drawn is not None
        moved = Scored(second.seeds, second.values + typical, second.drawn + typical)
        found.append(difference(first, moved)[0].p_value() < 0.05)
    assert 0.7 < np.mean(found) < 0.9


def test_hand_values() -> None:
    """Without sentences it is the t-test of a textbook, paired or Welch's."""
    first = Scored((0, 1, 2), np.array([10.0, 11.0, 13.0]))
    second = Scored((2, 1, 0), np.array([14.5, 12.5, 10.5]))
    found, paired = difference(first, second)
    assert paired
    assert found.mean == pytest.approx((0.5 + 1.5 + 1.5) / 3)
    assert found.error == pytest.approx(np.std([0.5, 1.5, 1.5], ddof=1) / 3**0.5)
    assert found.freedom == pytest.approx(2)
    from scipy import stats

    other = Scored((5, 6, 7, 8), np.array([14.5, 12.5, 10.5, 11.0]))
    found, paired = difference(first, other)
    assert not paired
    welch = stats.ttest_ind(other.values, first.values, equal_var=False)
    assert found.p_value() == pytest.approx(welch.pvalue)
    low, high = welch.confidence_interval()
    assert found.interval() == pytest.approx((low, high))


def test_one_seed_tells_nothing_and_equal_runs_are_equal() -> None:
    one = Scored((0,), np.array([10.0]))
    found, _ = difference(one, Scored((0,), np.array([12.0])))
    assert found.mean == 2.0
    assert np.isnan([found.p_value(), *found.interval(), found.smallest()]).all()
    same = Scored((0, 1), np.array([10.0, 11.0]))
    assert difference(same, same)[0].p_value() == 1.0
    constant, moved = Scored((0, 1), np.array([1.0, 1.0])), Scored((0, 1), np.array([2.0, 2.0]))
    assert np.isnan(difference(constant, moved)[0].p_value())
    assert spread(same).mean == 10.5


def test_seeds_that_all_gave_the_same_say_nothing_about_others() -> None:
    values, drawn = np.array([1.0, 1.5, 2.0]), np.full((3, 50), 1.5)
    same = Scored((0, 1, 2), values, drawn)
    for shift, p_value in ((0.0, 1.0), (0.5, np.nan)):
        found, _ = difference(same, Scored((0, 1, 2), values + shift, drawn + shift))
        assert found.mean == shift
        assert found.p_value() == pytest.approx(p_value, nan_ok=True)
        assert np.isnan([*found.interval(), found.smallest()]).all()
