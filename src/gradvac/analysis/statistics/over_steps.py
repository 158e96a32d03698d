"""Tests over the records of training: is a mean 0, and does it rise or fall?

Neighbouring records resemble each other, because weights move slowly and loaders have an order.

*Means.* The records are put together in at most 16 stretches, and the correlation of neighbouring
stretches, with the bias that few of them have (Kendall), says how many *independent* ones there
are: n (1 - r) / (1 + r). These are the observations of a t-test. With fewer than `_FEWEST` there is
no test: then p-values are NaN. A slow change below noise is not seen: with a memory of 0.9 below as
much noise, a mean of 0 is refuted in a fifth of series of 20 records, in a tenth of 40, and in less
than 6 % from 100 on.

*Slopes.* A slow change that hides below noise looks like a slope, and correlations of neighbours do
not show it. So the series is taken apart into waves (cosine transform), the slope is fitted to the
slowest 20, and noise may be of several kinds: without memory, or with a memory of 0.9, 0.97 or 0.99
in a tenth, nine tenths or all of its variance. For every kind there is a t-test, and its p-value
counts by how likely that kind makes the waves (their restricted likelihood). Simulated with 24 to
2,000 records, a slope of 0 is refuted in at most 8 % of series with a memory of up to 0.97, alone
or below noise, and in at most 11 % of those with 0.99. With fewer records there is no test.
"""

# S steps, B blocks, H kinds of noise, W waves

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct
from scipy.stats import t as student

from gradvac.analysis.similarities import mean_where_known

Values = NDArray[np.floating]

FEWEST_FOR_SLOPES = 24  # records
_WAVES = 20
_MEMORIES = np.array([0.9, 0.97, 0.99])
_SLOW = np.array([0.0, 0.1, 0.9, 1.0])  # shares of the variance that have a memory
_NOTHING = 1e-7  # rounding errors around 0
_MOST_BLOCKS = 16
_FEWEST = 5  # independent blocks
_CAUTION = 0.5  # standard errors added to the correlation
_HIGHEST = 0.99


@dataclass(frozen=True, eq=False)
class OverSteps:
    """Means over steps, half of their 95 % intervals, and two-sided p-values, `[...]`."""

    values: Values
    reach: Values
    p_values: Values


def _independent_blocks(residuals: Values) -> Values:
    """How many independent blocks `[B, ...]` are worth, `[...]`.

    Correlation is estimated over all columns together; a column that is clearly more correlated
    than the rest counts by its own.

    Args:
        residuals: Deviations from the mean, NaN where unknown.
    """
    known = ~np.isnan(residuals)
    num = known.sum(axis=0)
    filled = np.where(known, residuals, 0.0)
    squares, lagged = (filled**2).sum(axis=0), (filled[1:] * filled[:-1]).sum(axis=0)
    own = np.divide(lagged, squares, out=np.zeros(np.shape(squares)), where=squares > 0)
    enough = num > 3
    if not np.any(enough):
        return np.zeros(np.shape(num))
    left = np.where(enough, num - 3, 1)  # without bias: n r - (1 + 3 r)
    pooled = float(np.mean(own[enough]))
    columns = float(np.sqrt(np.sum(enough)))  # pairs share tasks
    root = np.sqrt(np.maximum(num, 1))
    together = (num * pooled + 1) / left + _CAUTION / root / np.sqrt(columns)
    alone = (num * own + 1) / left - 1 / root
    memory = np.clip(np.maximum(together, alone), 0.0, _HIGHEST)
    counts: Values = np.where(enough, num * (1 - memory) / (1 + memory), 0.0)
    return counts


def mean_over_records(values: Values) -> OverSteps:
    """Means over steps `[S, ...]`, tested against 0; unknown steps (NaN) do not count."""
    parts = np.array_split(values, min(_MOST_BLOCKS, len(values)))
    blocks = np.stack([np.asarray(mean_where_known(part, axis=0), np.float64) for part in parts])
    mean = np.asarray(mean_where_known(blocks, axis=0), dtype=np.float64)
    residuals = blocks - mean
    squares = np.asarray(mean_where_known(residuals**2, axis=0), dtype=np.float64)
    counts = _independent_blocks(residuals)
    freedom = np.where(counts >= _FEWEST, counts - 1, np.nan)
    error = np.sqrt(squares / freedom)
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values = 2 * student.sf(np.abs(mean) / error, freedom)
    return OverSteps(mean, student.ppf(0.975, freedom) * error, p_values)


def trend_over_records(values: Values) -> float:
    """The p-value of no rise or fall of a series `[S]`, over steps or over their logarithm."""
    known = np.asarray(values[~np.isnan(values)], dtype=np.float64)
    if len(known) < FEWEST_FOR_SLOPES:
        return float("nan")
    steps = np.arange(len(known), dtype=np.float64)
    p_values = [_p_of_slope(known, shape) for shape in (steps, np.log1p(steps))]
    return min(1.0, len(p_values) * min(p_values))


def _p_of_slope(series: Values, shape: Values) -> float:
    """Of no multiple of a shape in a series `[S]`, over all kinds of noise."""
    num = len(series)
    waves = slice(1, min(_WAVES, num - 1) + 1)  # the mean is wave 0
    found, shaped = (dct(one, norm="ortho")[waves] for one in (series, shape))
    angle = np.pi * np.arange(num)[waves] / num
    memory, slow = _MEMORIES[:, None, None], _SLOW[:, None]
    spectrum = (1 - memory**2) / (1 - 2 * memory * np.cos(angle) + memory**2)
    weights = (1 / (1 - slow + slow * spectrum)).reshape(-1, len(angle))  # [H, W]
    known = weights @ shaped**2
    slopes = weights @ (shaped * found) / known
    freedom = len(angle) - 1
    rest = (weights * (found - slopes[:, None] * shaped) ** 2).sum(axis=1) + _NOTHING**2
    likely = np.log(weights).sum(axis=1) - np.log(known) - freedom * np.log(rest)
    share = np.exp((likely - likely.max()) / 2)
    p_values = 2 * student.sf(np.abs(slopes) * np.sqrt(known * freedom / rest), freedom)
    return float(share @ p_values / share.sum())
