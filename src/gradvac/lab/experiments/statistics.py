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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from gradvac.analysis.statistics import holm
from gradvac.lab.experiments.methods import Method

Floats = NDArray[np.float64]
LEVEL = 0.05  # of false alarms
BETTER, WORSE, NOISE, UNKNOWN = "better", "worse", "within noise", "cannot tell"
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


@dataclass(frozen=True)
class Against:
    """A method against the baseline.

    Attributes:
        difference: Method minus baseline.
        low: Lower end of its 95 % confidence interval; NaN with a single seed, as the next four, or
            where all seeds gave the same.
        high: Upper end.
        p_value: Two-sided.
        adjusted: The p-value among all tests of its kind (Holm).
        smallest: The smallest true difference that these runs would have found in 4 of 5 cases.
        verdict: "better", "worse", "within noise", or "cannot tell".
        paired: Whether runs of one seed were compared with each other.
    """

    difference: float
    low: float
    high: float
    p_value: float
    adjusted: float
    smallest: float
    verdict: str
    paired: bool


@dataclass(frozen=True)
class Cell:
    """One method in one row.

    Attributes:
        mean: Over seeds.
        low: Lower end of its 95 % confidence interval; NaN with a single seed, or where all gave
            the same.
        high: Upper end.
        against: The difference to the baseline; None for the baseline itself.
    """

    mean: float
    low: float
    high: float
    against: Against | None


@dataclass(frozen=True)
class ComparisonRow:
    """One quantity of all methods.

    Attributes:
        kind: "average", "level", "task" or "loss": tests of one kind stand side by side.
        name: What it is.
        cells: Method -> its number; a method of which it is not known is left out.
        digits: Decimals to show.
        higher_is_better: Whether a larger number is the better one.
    """

    kind: str
    name: str
    cells: Mapping[str, Cell]
    digits: int
    higher_is_better: bool


def cells_of(
    methods: Sequence[Method], score: Callable[[Method], Scored | None], *, num_tests: int
) -> dict[str, Cell]:
    """The numbers of all methods, the first being the baseline, before `judged`.

    Args:
        methods: The methods.
        score: The score of a method; None if it has none.
        num_tests: Tests of the same kind that stand side by side.
    """
    baseline = score(methods[0])
    cells = {}
    for method in methods:
        scored = baseline if method is methods[0] else score(method)
        if scored is None:
            continue
        against = None
        if method is not methods[0] and baseline is not None:
            change, paired = difference(baseline, scored)
            p_value, smallest = change.p_value(), change.smallest(num_tests)
            against = Against(
                change.mean, *change.interval(), p_value, p_value, smallest, UNKNOWN, paired
            )
        mean = spread(scored)
        cells[method.name] = Cell(mean.mean, *mean.interval(), against)
    return cells


def judged(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows with verdicts: p-values adjusted among all tests of one kind."""
    tests = {
        kind: [
            (number, name)
            for number, row in enumerate(rows)
            if row.kind == kind
            for name, cell in row.cells.items()
            if cell.against is not None
        ]
        for kind in dict.fromkeys(row.kind for row in rows)
    }
    cells = [dict(row.cells) for row in rows]
    for tested in tests.values():
        all_against: list[Any] = [rows[number].cells[name].against for number, name in tested]
        for (number, name), against, adjusted in zip(
            tested, all_against, holm([one.p_value for one in all_against]), strict=True
        ):
            verdict = _verdict(against.difference, adjusted, rows[number].higher_is_better)
            changed = replace(against, adjusted=adjusted, verdict=verdict)
            cells[number][name] = replace(cells[number][name], against=changed)
    return [replace(row, cells=row_cells) for row, row_cells in zip(rows, cells, strict=True)]


def _verdict(change: float, p_value: float, higher_is_better: bool) -> str:
    if math.isnan(p_value):
        return UNKNOWN
    if p_value >= LEVEL:
        return NOISE
    return BETTER if (change > 0) == higher_is_better else WORSE


def pareto_front(rows: Sequence[ComparisonRow]) -> list[str]:
    """Methods that no other one equals or beats in all rows and beats in one: the Pareto front.

    By means over seeds, without a test: a method may be on it by chance. Methods that lack a row
    are left out.
    """
    signs = [1.0 if row.higher_is_better else -1.0 for row in rows]
    names = [name for name in rows[0].cells if all(name in row.cells for row in rows)]
    points = {
        name: [sign * row.cells[name].mean for sign, row in zip(signs, rows, strict=True)]
        for name in names
    }

    def is_beaten(point: list[float]) -> bool:
        return any(
            other != point and all(a >= b for a, b in zip(other, point, strict=True))
            for other in points.values()
        )

    return [name for name, point in points.items() if not is_beaten(point)]
