"""Is one method better than another? Seeds and sentences, each resampled where it varies.

A score y[s, i] varies with the seed s and with the test sentences i, and a claim is about other
seeds *and* other sentences. The difference of two methods that were trained with the same seeds
and scored on the same sentences is modelled as

    d[s, i] = difference + seed[s] + sentence[i] + both[s, i]

and the variance of its mean is the sum of three parts. A paired bootstrap over sentences gives
those of `sentence` and `both` (scores such as BLEU are no means over sentences, so nothing simpler
will do), the spread over seeds those of `seed` and `both`; what is in both is counted once. The
test is Student's t with the degrees of freedom of Satterthwaite, two-sided.

Resampling a handful of seeds in a bootstrap instead takes their spread for known: with 4 seeds it
calls some 15 % of equal methods different. Resampling sentences alone is worse. `tests/experiments`
holds this test to 5 %, and shows both of the others to fail.
"""

# R runs (seeds), B drawings of the sentences

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
LEVEL = 0.05  # of false alarms
POWER = 0.8  # of finding the smallest difference


@dataclass(frozen=True, eq=False)
class Scored:
    """The score of one method.

    Attributes:
        seeds: The seed of every run.
        values: Its score, `[R]`.
        drawn: The score on drawings of the sentences, the same for all methods, `[R, B]`; None if
            what it is made of is not known.
    """

    seeds: tuple[int, ...]
    values: Floats
    drawn: Floats | None = None


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and how well it is known.

    Attributes:
        mean: The estimate.
        error: Its standard error; NaN with a single seed.
        freedom: Degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: float

    def interval(self) -> tuple[float, float]:
        """Where the true value is, with a confidence of 95 %; NaN if that cannot be told."""
        if self.error == 0.0:  # seeds that change nothing say nothing about other seeds
            return math.nan, math.nan
        reach = self.error * _quantile(1.0 - LEVEL / 2.0, self.freedom)
        return self.mean - reach, self.mean + reach

    def p_value(self) -> float:
        """Two-sided, of the true value being 0; NaN if that cannot be told."""
        if math.isnan(self.error):
            return math.nan
        if self.error == 0.0:  # neither is there any sign of a difference
            return 1.0 if self.mean == 0.0 else math.nan
        return float(2.0 * stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def smallest(self, num_tests: int = 1) -> float:
        """The smallest true difference that such runs find in four cases of five; NaN: unknown.

        Args:
            num_tests: Tests that stand side by side, which makes each of them stricter.
        """
        if self.error == 0.0:
            return math.nan
        needed = _quantile(1.0 - LEVEL / 2.0 / num_tests, self.freedom)
        return self.error * (needed + _quantile(POWER, self.freedom))


def _quantile(share: float, freedom: float) -> float:
    return math.nan if math.isnan(freedom) else float(stats.t.ppf(share, freedom))


def spread(scored: Scored) -> Spread:
    """The mean over seeds of one method."""
    return _pooled(float(scored.values.mean()), [_parts(scored.values, scored.drawn)], scored.drawn)


def difference(baseline: Scored, other: Scored) -> tuple[Spread, bool]:
    """How much higher the other scores, and whether runs were paired by their seeds.

    With the same seeds on both sides, runs of one seed are compared with each other; with others,
    the two sides are independent. Sentences are paired either way.
    """
    drawn = [one.drawn for one in (baseline, other)]
    if sorted(baseline.seeds) == sorted(other.seeds):
        order, theirs = np.argsort(baseline.seeds), np.argsort(other.seeds)
        values = other.values[theirs] - baseline.values[order]
        both = None
        if drawn[0] is not None and drawn[1] is not None:
            both = drawn[1][theirs] - drawn[0][order]
        return _pooled(float(values.mean()), [_parts(values, both)], both), True
    mean = float(other.values.mean() - baseline.values.mean())
    means = None
    if drawn[0] is not None and drawn[1] is not None:
        means = (drawn[1].mean(0) - drawn[0].mean(0))[None]
    drawn_by_side = [one.drawn if means is not None else None for one in (baseline, other)]
    sides = [
        _parts(one.values, side_drawn)
        for one, side_drawn in zip((baseline, other), drawn_by_side, strict=True)
    ]
    return _pooled(mean, sides, means), False


@dataclass(frozen=True)
class _Parts:
    """Variances of a mean over runs: by their seeds, and by seed and sentence together."""

    num: int
    seeds: float
    both: float


def _parts(values: Floats, drawn: Floats | None) -> _Parts:
    num = len(values)
    if num < 2:
        return _Parts(num, math.nan, math.nan)
    both = 0.0
    if drawn is not None:
        # single = sentence + both, of one run; of the mean over runs: sentence + both / num
        single, of_mean = float(drawn.var(1, ddof=1).mean()), float(drawn.mean(0).var(ddof=1))
        both = max(0.0, single - of_mean) / (num - 1)
    return _Parts(num, float(values.var(ddof=1)) / num, both)


def _pooled(mean: float, sides: list[_Parts], drawn: Floats | None) -> Spread:
    """Seeds of all sides, and the sentences that they share."""
    by_seeds = sum(side.seeds for side in sides)
    by_sentences = 0.0
    if drawn is not None:
        by_sentences = float(drawn.mean(0).var(ddof=1)) - sum(side.both for side in sides)
    variance = by_seeds + max(0.0, by_sentences)
    if math.isnan(variance):
        return Spread(mean, math.nan, math.nan)
    if by_seeds == 0.0:
        return Spread(mean, math.sqrt(variance), math.inf if variance else 1.0)
    shares = sum(side.seeds**2 / (side.num - 1) for side in sides)
    return Spread(mean, math.sqrt(variance), variance**2 / shares)
