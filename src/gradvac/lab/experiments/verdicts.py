"""Is one method better than another? Seeds and sentences, each resampled where it varies.

A score y[s, i] varies with the seed s and with the test sentences i, and a claim is about other
seeds *and* other sentences. The difference of two methods that were trained with the same seeds
and scored on the same sentences is modelled as

    d[s, i] = difference + seed[s] + sentence[i] + both[s, i]

and the variance of its mean is the sum of three parts. A paired bootstrap over sentences gives
those of `sentence` and `both` (scores such as BLEU are no means over sentences, so nothing simpler
will do), the spread over seeds those of `seed` and `both`; what is in both is counted once.

Sentences are many and seeds are few, so the two parts are not known equally well. The error of the
mean is therefore taken for a * t + b * z: a is the standard error over R seeds, t Student's with
R - 1 degrees of freedom, b that over sentences, z normal (the test of Behrens and Fisher).
Whatever the two weigh it calls at most 5 % of equal methods different, from two seeds on; pooling
the degrees of freedom (Satterthwaite) calls up to 12 % with two and 8 % with three, because a
spread that came out small by chance then also counts as well known. Resampling a handful of seeds
in a bootstrap takes their spread for known: 15 % with four. Resampling sentences alone is worse.
`benchmarks/comparisons.py` has the rates, `tests/experiments` holds the test to them.
"""

# R runs (seeds), B drawings of the sentences

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from gradvac.analysis.statistics import holm
from gradvac.lab.experiments.methods import Method

Floats = NDArray[np.float64]
LEVEL = 0.05  # of false alarms
CLEAR, SUGGESTIVE, NOT_SHOWN, UNKNOWN = "clear", "suggestive", "not shown", "cannot tell"
FEWEST_PAIRS = 3  # two pairs have one degree of freedom: all runs unpaired say more
_ROUNDING = 1e-12  # differences of equal scores may differ by as much


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
    """A mean over seeds and how well it is known."""

    mean: float
    by_seeds: float  # its standard error over seeds; NaN with a single seed
    freedom: float  # degrees of freedom of that
    by_sentences: float = 0.0  # its standard error over sentences

    def interval(self) -> tuple[float, float]:
        """Where the true value is, with a confidence of 95 %; NaN if that cannot be told."""
        reach = self.reach(LEVEL)
        return self.mean - reach, self.mean + reach

    def p_value(self) -> float:
        """Two-sided, of the true value being 0; NaN if that cannot be told."""
        return self._beyond(abs(self.mean)) if self.by_seeds > 0.0 else math.nan

    def reach(self, level: float) -> float:
        """How far from 0 a mean must be for a p-value of `level`; NaN if that cannot be told."""
        if not self.by_seeds > 0.0:  # seeds that change nothing say nothing about other seeds
            return math.nan
        least = self.by_seeds * float(special.stdtrit(self.freedom, 1.0 - level / 2.0))
        most = least + self.by_sentences * float(special.ndtri(1.0 - level / 2.0))
        return float(optimize.brentq(lambda x: self._beyond(x) - level, 0.99 * least, 1.01 * most))

    def _beyond(self, distance: float) -> float:
        """The probability of an error larger than `distance`, on either side."""
        scales, density = _variances(self.freedom)
        errors = np.sqrt(self.by_sentences**2 + self.by_seeds**2 * scales)
        return float(2.0 * density @ special.ndtr(-distance / errors))


@cache
def _variances(freedom: float) -> tuple[Floats, Floats]:
    """Student's t is normal with a variance that varies: its values and their probabilities.

    The variance is the inverse of a chi-square by its degrees of freedom. The steps are equal in
    its logarithm, whose density is smooth and small at both ends.
    """
    around = 8.0 * math.sqrt(2.0 / freedom)
    logs = math.log(freedom) + np.linspace(-around - 40.0 / freedom, around, 400)
    density = np.exp(freedom / 2.0 * (logs - math.log(freedom)) - (np.exp(logs) - freedom) / 2.0)
    return freedom / np.exp(logs), density / density.sum()


def spread(scored: Scored) -> Spread:
    """The mean over seeds of one method."""
    return _pooled(float(scored.values.mean()), [_parts(scored.values, scored.drawn)], scored.drawn)


def difference(baseline: Scored, other: Scored) -> tuple[Spread, int]:
    """How much higher the other scores, and how many pairs of runs that is the mean of.

    Runs of one seed are compared with each other, and runs without a partner are left out, so that
    a seed that one method has beyond the other costs nothing. Where methods share fewer than three
    seeds and have more, all runs count and are not paired: 0 pairs. Sentences always are.
    """
    shared = sorted(set(baseline.seeds) & set(other.seeds))
    if len(shared) >= min(FEWEST_PAIRS, len(baseline.seeds), len(other.seeds)):
        first, second = (_of_seeds(one, shared) for one in (baseline, other))
        drawn = None
        if first.drawn is not None and second.drawn is not None:
            drawn = second.drawn - first.drawn
        return spread(Scored(tuple(shared), second.values - first.values, drawn)), len(shared)
    mean = float(other.values.mean() - baseline.values.mean())
    means = None
    if baseline.drawn is not None and other.drawn is not None:
        means = (other.drawn.mean(0) - baseline.drawn.mean(0))[None]
    sides = [_parts(one.values, None if means is None else one.drawn) for one in (baseline, other)]
    return _pooled(mean, sides, means), 0


def _of_seeds(scored: Scored, seeds: Sequence[int]) -> Scored:
    order = [scored.seeds.index(seed) for seed in seeds]
    drawn = None if scored.drawn is None else scored.drawn[order]
    return Scored(tuple(seeds), scored.values[order], drawn)


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
    if np.ptp(values) < _ROUNDING:
        return _Parts(num, 0.0, 0.0)
    both = 0.0
    if drawn is not None:
        # single = sentence + both, of one run; of the mean over runs: sentence + both / num
        single, of_mean = float(drawn.var(1, ddof=1).mean()), float(drawn.mean(0).var(ddof=1))
        both = max(0.0, single - of_mean) / (num - 1)
    return _Parts(num, float(values.var(ddof=1)) / num, both)


def _pooled(mean: float, sides: list[_Parts], drawn: Floats | None) -> Spread:
    """Seeds of all sides (Welch's degrees of freedom), and the sentences that they share."""
    by_seeds = sum(side.seeds for side in sides)
    by_sentences = 0.0
    if drawn is not None:
        by_sentences = float(drawn.mean(0).var(ddof=1)) - sum(side.both for side in sides)
    if not by_seeds > 0.0:
        return Spread(mean, by_seeds, math.nan)
    shares = sum(side.seeds**2 / (side.num - 1) for side in sides)
    freedom = by_seeds**2 / shares
    return Spread(mean, math.sqrt(by_seeds), freedom, math.sqrt(max(0.0, by_sentences)))


@dataclass(frozen=True)
class Against:
    """A method against the baseline.

    Attributes:
        difference: Method minus baseline.
        low: Lower end of its 95 % confidence interval; NaN with a single seed, as the next four, or
            where all seeds gave the same.
        high: Upper end.
        p_value: Two-sided.
        adjusted: The p-value among the primary questions (Holm); NaN if this is none of them.
        needed: The smallest difference that would have had the better verdict: for a primary
            question "clear", otherwise "suggestive".
        verdict: "clear": it is a primary question and its corrected p-value is below 5 %.
            "suggestive": the interval does not hold 0. "not shown": it does. "cannot tell".
        pairs: Runs of one seed that were compared with each other; 0: runs were not paired.
        is_better: Whether the difference is of the good sign.
    """

    difference: float
    low: float
    high: float
    p_value: float
    adjusted: float
    needed: float
    verdict: str
    pairs: int
    is_better: bool

    @property
    def largest(self) -> float:
        """The largest true difference, of either sign, that the interval allows."""
        return max(abs(self.low), abs(self.high))

    def in_words(self, digits: int) -> str:
        """The verdict with what belongs to it: the side, or what cannot be excluded."""
        if self.verdict in (CLEAR, SUGGESTIVE):
            return f"{self.verdict}: {'better' if self.is_better else 'worse'}"
        if self.verdict == NOT_SHOWN:
            return f"{self.verdict}: at most {self.largest:.{digits}f}"
        return self.verdict


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
    """One quantity of all methods."""

    kind: str  # "average", "level", "task" or "loss"
    name: str  # what it is
    cells: Mapping[str, Cell]  # method -> its number; a method of which it is not known is left out
    digits: int  # decimals to show
    higher_is_better: bool


class RowQuantity(NamedTuple):
    """What a row is about, before any method is looked at."""

    kind: str  # as in `ComparisonRow`, like the next, and the last two
    name: str  # what it is
    score: Callable[[Method], Scored | None]  # of a method; None if it has none
    digits: int  # decimals to show
    higher_is_better: bool


def row_of(quantity: RowQuantity, methods: Sequence[Method]) -> ComparisonRow:
    """The numbers of all methods, the first being the baseline; no question is primary here."""
    baseline = quantity.score(methods[0])
    cells = {}
    for method in methods:
        scored = quantity.score(method)
        if scored is None:
            continue
        against = None
        if method is not methods[0] and baseline is not None:
            against = _judged(*difference(baseline, scored), quantity.higher_is_better)
        mean = spread(scored)
        cells[method.name] = Cell(mean.mean, *mean.interval(), against)
    kind, name, _, digits, higher_is_better = quantity
    return ComparisonRow(kind, name, cells, digits, higher_is_better)


def judge_primary(
    asked: Sequence[tuple[RowQuantity, Method, Method]],
) -> list[Against | None]:
    """The answers to primary questions, corrected among each other (Holm).

    Args:
        asked: In which quantity is the second method better than the first?

    Returns:
        In their order; None where a method does not have the quantity.
    """
    scored = [(one.score(baseline), one.score(method)) for one, baseline, method in asked]
    changes = [
        None if first is None or second is None else difference(first, second)
        for first, second in scored
    ]
    p_values = [math.nan if change is None else change[0].p_value() for change in changes]
    answers: list[Against | None] = []
    for (quantity, _, _), change, adjusted, level in zip(
        asked, changes, holm(p_values), _levels(p_values), strict=True
    ):
        primary = (adjusted, level)
        answers.append(change and _judged(*change, quantity.higher_is_better, primary))
    return answers


def _levels(p_values: Sequence[float]) -> list[float]:
    """Below which p-value each of some parallel tests is significant, the others being as they are.

    Holm's: the smallest is held to 5 % of all tests, the next to 5 % of the others, and so on.
    """
    levels = []
    for number in range(len(p_values)):
        others = sorted(p for n, p in enumerate(p_values) if n != number and not math.isnan(p))
        num_found = 0
        while num_found < len(others) and others[num_found] < LEVEL / (1 + len(others) - num_found):
            num_found += 1
        levels.append(LEVEL / (1 + len(others) - num_found))
    return levels


def _judged(
    change: Spread,
    pairs: int,
    higher_is_better: bool,
    primary: tuple[float, float] = (math.nan, LEVEL),
) -> Against:
    """Args: `primary` has the corrected p-value, and the level that the plain one is held to."""
    p_value, (adjusted, level) = change.p_value(), primary
    verdict = UNKNOWN
    if not math.isnan(p_value):
        verdict = CLEAR if adjusted < LEVEL else SUGGESTIVE if p_value < LEVEL else NOT_SHOWN
    return Against(
        change.mean,
        *change.interval(),
        p_value,
        adjusted,
        change.reach(level),
        verdict,
        pairs,
        (change.mean > 0) == higher_is_better,
    )


def means_by_method(rows: Sequence[ComparisonRow]) -> dict[str, list[float]]:
    """Method -> its means in some rows, more being better; methods that lack a row are left out."""
    signs = [1.0 if row.higher_is_better else -1.0 for row in rows]
    return {
        name: [sign * row.cells[name].mean for sign, row in zip(signs, rows, strict=True)]
        for name in rows[0].cells
        if all(name in row.cells for row in rows)
    }


def is_matched(point: Sequence[float], by: Sequence[float]) -> bool:
    """Whether another point equals or beats this one everywhere."""
    return all(other >= own for own, other in zip(point, by, strict=True))


def pareto_front(rows: Sequence[ComparisonRow], among: Collection[str] | None = None) -> list[str]:
    """Methods that no other one equals or beats in all rows and beats in one: the Pareto front.

    By means over seeds, without a test: a method may be on it by chance. Methods that lack a row
    are left out; `among` names those that count (None: all).
    """
    means = means_by_method(rows).items()
    points = {name: point for name, point in means if among is None or name in among}
    return [
        name
        for name, point in points.items()
        if not any(other != point and is_matched(point, other) for other in points.values())
    ]
