"""Similarity without the noise of small samples, from two halves of every task's lines.

If a task's two halves agree by r (its reliability), the cosine of two tasks is too small by a
factor of sqrt(r_i r_j). Single reliabilities are as noisy as cosines, and a mean of ratios is
biased and unstable, so products are pooled over components and steps first, and divided once. How
far chance moves the result shows in cos(A_i, B_j) - cos(B_i, A_j), two measurements of the same
thing: a value that chance may have moved by more than `REACH` is not reported at all.
"""

# S steps, K components, T tasks

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from gradvac.analysis.components import weighty
from gradvac.analysis.similarities import Similarities, mean_where_known

Matrix = NDArray[np.floating]

REACH = 0.05  # half a 99 % interval: more is "not reliable enough"


@dataclass(frozen=True, eq=False)
class Corrected:
    """Corrected similarities of all pairs.

    Attributes:
        values: `[T, T]`, NaN where a pair is not reliable enough; the diagonal is 1.
        reach: `[T, T]`, half of the 95 % interval; NaN where nothing is known.
        reliability: `[T]`, cosine of a task's two halves, pooled.
        mean: Over all pairs; NaN if not reliable enough.
        mean_reach: Half of its 95 % interval, cautiously that of a typical pair.
    """

    values: Matrix
    reach: Matrix
    reliability: Matrix
    mean: float
    mean_reach: float


def corrected(similarities: Similarities, side: str | None = None) -> Corrected | None:
    """Similarity on different lines with unlimited data; None without both halves.

    Args:
        similarities: Of different lines, with `across`.
        side: Only the components of "encoder", "decoder" or "shared".
    """
    if similarities.across is None:
        return None
    chosen = weighty(similarities.components, side)
    if not any(chosen):
        return None
    return correct(mean_where_known(similarities.across[:, chosen], axis=(0, 1)))


def correct(across: Matrix) -> Corrected:
    """`corrected` of pooled cosines `[T, T]`: [i, j] of the first half of i, the second of j."""
    pooled = np.array(across, dtype=np.float64)
    num = len(pooled)
    apart = ~np.eye(num, dtype=bool)
    raw, reliability = (pooled + pooled.T) / 2, pooled.diagonal().copy()
    twice = (pooled - pooled.T)[apart]
    twice = twice[~np.isnan(twice)]
    if not len(twice):
        unknown = np.full_like(raw, np.nan)
        return Corrected(unknown, unknown, reliability, np.nan, np.nan)
    variance = float((twice**2).mean() / 4)  # of raw; that of a reliability is twice as much
    num_known = int((~np.isnan(reliability)).sum())
    # The noise of a task is in all of its pairs: there are as many observations as tasks.
    factor, strict = (float(student.ppf(q, max(1, num_known - 1))) for q in (0.975, 0.995))
    positive = np.where(reliability > 0, reliability, np.nan)
    scale = np.sqrt(positive[:, None] * positive[None])
    ratio = raw / scale
    relative = 1 / positive[:, None] ** 2 + 1 / positive[None] ** 2
    reach = factor * np.sqrt(variance / scale**2 + ratio**2 * variance / 2 * relative)
    enough = REACH * factor / strict
    values = np.where(reach <= enough, ratio, np.nan)
    np.fill_diagonal(values, 1.0)
    known = apart & ~np.isnan(ratio)
    told = known.sum() == (apart & ~np.isnan(raw)).sum()  # else the least reliable would be missing
    mean = float(raw[known].sum() / scale[known].sum()) if told and known.any() else np.nan
    mean_reach = float(np.sqrt((reach[known] ** 2).mean())) if known.any() else np.nan
    told_mean = mean if mean_reach <= enough else np.nan
    return Corrected(values, reach, reliability, told_mean, mean_reach)
