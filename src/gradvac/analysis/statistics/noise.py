"""What noise does to cosines: factors by task, lines in common, and values without noise.

*Noise makes patterns* (`pair_pattern`). The cosine of two noisy gradients is a_i a_j c_ij, where
a_i shrinks with the noise of task i: tasks with large batches look similar to each other, though
all c_ij are equal. What a product of one factor per task explains is therefore taken out before
pairs are compared, in every component by itself, and the rest is divided by how much noise it has.

*Lines in common* (`noise_in_common`). Tasks that were measured on the same lines share the noise of
these lines. So pairs are tested on different lines, where a pattern also has to stand out from what
shared noise makes (`pairs.py`), and tasks count for fewer observations.

*Without noise* (`corrected`), from two halves of every task's lines. If a task's two halves agree
by r (its reliability), the cosine of two tasks is too small by a factor of sqrt(r_i r_j). Single
reliabilities are as noisy as cosines, and a mean of ratios is biased and unstable, so products are
pooled over components and steps first, and divided once. How far chance moves the result shows in
cos(A_i, B_j) - cos(B_i, A_j), two measurements of the same thing: a value that chance may have
moved by more than `REACH` is not reported at all.
"""

# K components, T tasks

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from gradvac.analysis.similarities import Floats, Similarities, mean_where_known, weighty
from gradvac.analysis.statistics.summaries import NOTHING, Matrix, mean_of_pairs

REACH = 0.05  # half a 99 % interval: more is "not reliable enough"
_ALIKE = 0.02  # variance of the logarithm of noise that explains nothing: relatives have it too
_ROUNDS = 60  # of fitting factors
_LEAST_NOISE = 0.02  # of a task; less is not told from none


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


def task_means(similarities: Similarities) -> Matrix | None:
    """Every task's similarity with the others with unlimited data, `[T]`; None without both halves.

    Pooled over the others, and divided once; NaN where a task's two halves do not agree.
    """
    if similarities.across is None:
        return None
    chosen = weighty(similarities.components)
    across = mean_where_known(similarities.across[:, chosen], axis=(0, 1)).astype(np.float64)
    raw, reliability = (across + across.T) / 2, across.diagonal()
    positive = np.where(reliability > 0, reliability, np.nan)
    scale = np.sqrt(positive[:, None] * positive)
    apart = ~np.eye(len(raw), dtype=bool) & ~np.isnan(raw) & ~np.isnan(scale)
    with np.errstate(invalid="ignore"):  # of a task that none can be compared with
        means: Matrix = np.where(apart, raw, 0.0).sum(1) / np.where(apart, scale, 0.0).sum(1)
    return means


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
    complete = (
        known.sum() == (apart & ~np.isnan(raw)).sum()
    )  # else the least reliable would be missing
    mean = float(raw[known].sum() / scale[known].sum()) if complete and known.any() else np.nan
    mean_reach = float(np.sqrt((reach[known] ** 2).mean())) if known.any() else np.nan
    return Corrected(
        values, reach, reliability, mean if mean_reach <= enough else np.nan, mean_reach
    )


def noise_in_common(same: Similarities, different: Similarities) -> Matrix | None:
    """Correlations of the noise of two tasks' gradients, `[T, T]`: which lines they share.

    Of a task with halves A and B, the noise is A - B. Where both are equally long and their cosine
    is r, the sum A + B is longer than A by sqrt(2 (1 + r)), and A - B by sqrt(2 (1 - r)). What
    chance adds to a pair on different lines is missing here, so that noise looks less shared just
    where it matters; all components together, which share the lines, make little of that.

    Args:
        same: On the same lines.
        different: Of the same tasks and components on different lines.

    Returns:
        The correlations, or None where noise was not measured.
    """
    if (same.lines, different.lines) != ("same", "different") or different.reliability is None:
        return None
    if (same.components, same.shape) != (different.components, different.shape):
        return None
    chosen = weighty(same.components)
    reliability = np.clip(different.reliability[:, chosen], -1.0, 1.0).astype(np.float64)
    sums, noise = (np.sqrt(1 + sign * reliability) for sign in (1, -1))
    sums, noise = (one[..., :, None] * one[..., None, :] for one in (sums, noise))
    shared = same.values[:, chosen] * sums - 2 * different.values[:, chosen]
    above, below = (mean_where_known(one, axis=(0, 1)) for one in (shared, noise))
    return np.divide(above, below, out=np.zeros(above.shape), where=below > NOTHING)


def in_changes(in_common: Matrix) -> Matrix:
    """The same of what other weights change on the same lines.

    A task's own noise is much the same before and after, and cancels; that of shared lines is left.
    """
    return np.full_like(in_common, np.maximum(mean_of_pairs(in_common), 0.0) ** 0.25)


def in_patterns(in_common: Matrix) -> Matrix:
    """Correlations of noise less what all tasks share, which is in no pattern; NaN is the mean."""
    filled = np.nan_to_num(in_common, nan=float(np.nan_to_num(mean_of_pairs(in_common))))
    np.fill_diagonal(filled, 1.0)
    filled = filled.clip(-1.0, 1.0)
    filled -= filled.mean(axis=0)
    return np.asarray(filled - filled.mean(axis=1, keepdims=True))


def size_of(noise: Matrix) -> float:
    """The sum of squares that products of such noise have."""
    return float(noise.trace() ** 2 + (noise**2).sum()) / 2


def pair_pattern(similarities: Similarities, side: str | None = None) -> Floats:
    """What stands out in pairs beyond one factor per task, mean over components and steps.

    Of two gradients that share a direction, what noise leaves at right angles to it has a variance
    of (1 - a_i^2) (1 - a_j^2). Permutations take all tasks to be alike, so pairs are divided by
    this; else pairs of noisy tasks would decide. That noise is also skewed: gradients of few lines
    lean away from the shared direction, all to the same side. So what the difference of two tasks
    in noise explains is taken out too.

    Args:
        similarities: Any.
        side: Only the components of "encoder", "decoder" or "shared".
    """
    values = similarities.values[:, weighty(similarities.components, side)]
    cosines = np.asarray(mean_where_known(values, axis=0), dtype=np.float64)
    factors, _ = _noise_factors(cosines)
    noise = np.clip(1 - (factors**2).mean(axis=0), _LEAST_NOISE, 1.0)  # [T]
    weights = 1 / np.sqrt(noise[:, None] * noise)
    weights /= mean_of_pairs(weights)
    pattern = mean_where_known(without_factors(cosines * weights), axis=0)
    known = ~np.isnan(pattern)
    unlike = np.abs(np.log(noise[:, None] / noise))[known]
    unlike -= unlike.mean() if len(unlike) else 0.0
    least = _ALIKE * len(unlike)
    pattern[known] -= unlike * (unlike @ pattern[known] / (unlike @ unlike + least + NOTHING))
    return pattern


def without_factors(matrices: Matrix) -> Floats:
    """`[..., T, T]` less a product of one factor per task, with every task's mean; NaN diagonal."""
    factors, sign = _noise_factors(matrices)
    explained = sign * factors[..., :, None] * factors[..., None, :]
    every = np.arange(explained.shape[-1])
    explained[..., every, every] = np.nan
    return np.asarray(matrices - explained, dtype=np.float32)


def _noise_factors(matrices: Matrix) -> tuple[Matrix, Matrix]:
    """The factors `[..., T]` of a product a_i a_j c with the row sums of matrices, and c's sign.

    The noise of a task shrinks all of its cosines by one factor, and factors are not negative: so a
    product a_i a_j c, with c of the sign of the mean, is what unequal noise makes of equal tasks.
    The product with the least squares would be of one group alone, where there are two.
    """
    known = ~np.isnan(matrices) & ~np.eye(matrices.shape[-1], dtype=bool)
    filled = np.where(known, matrices, 0.0)
    total = filled.sum(axis=(-1, -2), keepdims=True)
    sign = np.where(total < 0, -1.0, 1.0)
    counts = np.maximum(known.sum(axis=(-1, -2), keepdims=True), 1)
    factors = np.broadcast_to(np.sqrt(np.abs(total) / counts)[..., 0], filled.shape[:-1])
    sums, weights = (filled * sign).sum(axis=-1), known.astype(np.float64)
    for _ in range(_ROUNDS):
        others = (weights @ factors[..., None])[..., 0]
        better = np.divide(sums, others, out=np.zeros_like(sums), where=others > 0)
        factors = (factors + np.maximum(better, 0.0)) / 2  # in full steps it may jump for ever
    return factors, sign


def without_task_means(matrix: Matrix) -> Matrix:
    """What remains of pairs `[T, T]` without both tasks' means; NaN diagonal."""
    values = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(values, np.nan)
    known = (~np.isnan(values)).astype(np.float64)
    system = known + np.diag(known.sum(axis=1))
    means, *_ = np.linalg.lstsq(system, np.nansum(values, axis=1), rcond=None)
    left: Matrix = values - means[:, None] - means[None]
    return left
