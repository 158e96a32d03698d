"""Tests over the records of training: is a mean 0, and does it rise or fall?

Neighbouring records resemble each other, because weights move slowly and loaders have an order. So
the records are put together in at most 16 stretches, and the correlation of neighbouring stretches,
with the bias that few of them have (Kendall), says how many *independent* ones there are:
n (1 - r) / (1 + r). These are the observations of a t-test. With fewer than `_FEWEST` there is no
test: then p-values are NaN. A slope takes a number more to fit, and 24 stretches: with 16, every
fifth series without any memory seemed to have too much of it for a test. Its error is made larger
in short records, which show no memory that is hidden below noise without any.

Simulated with 12 to 2,000 records, a mean or a slope of 0 is refuted in at most 8 % of series with
correlation 0, 0.5 or 0.9, alone or below up to twice as much noise. A slower change than that is
not seen in a record that is not much longer: with a correlation of 0.97 below as much noise, a
slope is claimed in 12 % of 40 records, 15 % of 60, 10 % of 100 and 4 % of 200.
"""

# S steps, B blocks

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from gradvac.analysis.similarities import mean_where_known

Values = NDArray[np.floating]

_MOST_BLOCKS, _MOST_FOR_SLOPES = 16, 24
_FEWEST = 5  # independent blocks
_CAUTION = 0.5  # standard errors added to the correlation
_MEMORY = 10  # records: of a correlation of 0.9
_HIGHEST = 0.99


@dataclass(frozen=True, eq=False)
class OverSteps:
    """Means over steps or slopes, half of their 95 % intervals, and two-sided p-values, `[...]`."""

    values: Values
    reach: Values
    p_values: Values


def _block_means(values: Values, most: int) -> Values:
    """Means of neighbouring steps, `[S, ...]` -> `[B, ...]`; NaN where a block knows nothing."""
    parts = np.array_split(values, min(most, len(values)))
    return np.stack([np.asarray(mean_where_known(part, axis=0), np.float64) for part in parts])


def _independent_blocks(residuals: Values, used: int) -> Values:
    """How many independent blocks `[B, ...]` are worth, `[...]`.

    Correlation is estimated over all columns together; a column that is clearly more correlated
    than the rest counts by its own.

    Args:
        residuals: Deviations from what was fitted, NaN where unknown.
        used: Numbers that were fitted: 1 for a mean, 2 for a line.
    """
    known = ~np.isnan(residuals)
    num = known.sum(axis=0)
    filled = np.where(known, residuals, 0.0)
    squares, lagged = (filled**2).sum(axis=0), (filled[1:] * filled[:-1]).sum(axis=0)
    own = np.divide(lagged, squares, out=np.zeros(np.shape(squares)), where=squares > 0)
    enough = num > 2 + used
    if not np.any(enough):
        return np.zeros(np.shape(num))
    left = np.where(enough, num - 2 - used, 1)  # without bias: n r - (used + (2 + used) r)
    pooled = float(np.mean(own[enough]))
    columns = float(np.sqrt(np.sum(enough)))  # pairs share tasks
    root = np.sqrt(np.maximum(num, 1))
    together = (num * pooled + used) / left + _CAUTION / root / np.sqrt(columns)
    alone = (num * own + used) / left - 1 / root
    memory = np.clip(np.maximum(together, alone), 0.0, _HIGHEST)
    counts: Values = np.where(enough, num * (1 - memory) / (1 + memory), 0.0)
    return counts


def mean_over_records(values: Values) -> OverSteps:
    """Means over steps `[S, ...]`, tested against 0; unknown steps (NaN) do not count."""
    blocks = _block_means(values, _MOST_BLOCKS)
    mean = np.asarray(mean_where_known(blocks, axis=0), dtype=np.float64)
    residuals = blocks - mean
    squares = np.asarray(mean_where_known(residuals**2, axis=0), dtype=np.float64)
    return _tested(mean, squares, _independent_blocks(residuals, 1), 1)


def trend_over_records(values: Values) -> float:
    """The p-value of no rise or fall of a series `[S]`, over steps or over their logarithm."""
    known = np.asarray(values[~np.isnan(values)], dtype=np.float64)
    if len(known) <= _FEWEST:
        return float("nan")
    blocks = _block_means(known, _MOST_FOR_SLOPES)
    p_values = []
    for shape in (np.arange(len(known)), np.log1p(np.arange(len(known)))):
        place = _block_means(shape.astype(np.float64), _MOST_FOR_SLOPES)
        place = (place - place.mean()) / place.std()
        slope = place @ blocks / len(blocks)
        residuals = blocks - blocks.mean() - slope * place
        counts = _independent_blocks(residuals[:, None], 2)
        squares = np.mean(residuals**2, keepdims=True) * (1 + _MEMORY / len(known)) ** 2
        p_values.append(float(_tested(np.array([slope]), squares, counts, 2).p_values[0]))
    if np.isnan(p_values).all():
        return float("nan")
    return min(1.0, len(p_values) * float(np.nanmin(p_values)))


def _tested(estimate: Values, squares: Values, counts: Values, used: int) -> OverSteps:
    """A t-test; `squares` are mean squares of what was not fitted, `counts` independent blocks."""
    enough = counts >= _FEWEST + 2 * (used - 1)  # slow changes look like slopes
    freedom = np.where(enough, counts - used, np.nan)
    error = np.sqrt(squares / freedom)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values = 2 * student.sf(np.abs(estimate) / error, freedom)
    return OverSteps(estimate, student.ppf(0.975, freedom) * error, p_values)
