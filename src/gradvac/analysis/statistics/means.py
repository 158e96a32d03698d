"""Tests of means: one side of the model, layer or step against another."""

# S steps, T tasks, L layers

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.analysis.statistics import over_steps
from gradvac.analysis.statistics.noise import in_changes
from gradvac.analysis.statistics.summaries import NOTHING, LayerSimilarity, Matrix, mean_of_pairs

_FEWEST_TASKS = 3  # two tasks are one pair, which shows no variation
_FEWEST_LAYERS = 4  # three lie on a line by chance


class Estimate(NamedTuple):
    """A mean over pairs of tasks, and how far chance may have moved it.

    Attributes:
        mean: Over all known pairs.
        interval: 95 %; NaN where there is no test.
        p_value: Two-sided, of a mean of 0; NaN where there is no test.
        over: What was sampled: "tasks", or "records" of training.
    """

    mean: float
    interval: tuple[float, float]
    p_value: float
    over: str = "tasks"


def mean_over_tasks(matrix: Matrix, in_common: Matrix | None = None) -> Estimate:
    """The mean of a symmetric matrix over pairs, tested over *tasks* (jackknife, Student's t).

    Pairs that share a task are not independent: ten pairs of five tasks are five observations, not
    ten. Nor are tasks that were measured on the same lines, whose noise r they have in common:
    cosines hold products of two tasks' noise, so that the variance of a mean over T tasks is larger
    by 1 + (T - 1) r^2. The test is cautious where pairs do not depend on their tasks at all.

    Args:
        matrix: `[T, T]`, such as differences; NaN where unknown, and the diagonal does not count.
        in_common: `[T, T]`, of the tasks' noise (`noise_in_common`); None: nothing.
    """
    values = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(values, np.nan)
    values = values[np.ix_(*[~np.isnan(values).all(axis=1)] * 2)]
    num = len(values)
    mean = float(mean_where_known(values, axis=(0, 1)))
    known = ~np.isnan(values)
    numbers, sums = known.sum(axis=1), np.where(known, values, 0.0).sum(axis=1)
    left = numbers.sum() - 2 * numbers
    without = np.divide(sums.sum() - 2 * sums, left, out=np.full(num, np.nan), where=left > 0)
    if num < _FEWEST_TASKS or np.isnan(without).any():
        return Estimate(mean, (np.nan, np.nan), np.nan)
    error = np.sqrt((num - 1) / num * np.sum((without - without.mean()) ** 2))
    if in_common is not None:
        squares = np.nan_to_num(mean_of_pairs(in_common * np.abs(in_common)))  # 0 by chance
        error *= np.sqrt(1 + (num - 1) * np.clip(squares, 0.0, 1.0))
    reach = float(student.ppf(0.975, num - 1)) * error
    if abs(mean) < NOTHING:
        p_value = 1.0
    elif error <= NOTHING * abs(mean):  # all pairs alike
        p_value = 0.0
    else:
        p_value = float(2 * student.sf(abs(mean) / error, num - 1))
    return Estimate(mean, (mean - reach, mean + reach), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of parallel tests after Holm's correction: one false alarm in 20 for all of them.

    NaN (no test) stays NaN and does not count.
    """
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values)[: int((~np.isnan(values)).sum())]  # NaN comes last
    least = np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1))
    adjusted = np.full(len(values), np.nan)
    adjusted[order] = np.minimum(least, 1.0)
    corrected_values: list[float] = adjusted.tolist()
    return corrected_values


class Change(NamedTuple):
    """Two means over the same pairs, and the difference of the second from the first."""

    first: float
    second: float
    difference: Estimate


def paired(first: Matrix, second: Matrix, *, over: str, in_common: Matrix | None = None) -> Change:
    """Compare similarities `[S, T, T]` of the same steps pair by pair; only what both know counts.

    Args:
        first: One.
        second: The other.
        over: "records", if every step is a batch of its own; "tasks", if all are of the same lines.
        in_common: Of the tasks' noise (`mean_over_tasks`).
    """
    both = ~np.isnan(first) & ~np.isnan(second)
    one, two = (np.where(both, values, np.nan) for values in (first, second))
    means = [mean_where_known(values, axis=0) for values in (one, two)]
    over_tasks = mean_over_tasks(means[1] - means[0], in_common)
    difference = over_tasks
    if over == "records":
        difference = _estimate(mean_of_pairs(two) - mean_of_pairs(one))
        if not np.isnan(over_tasks.p_value) and over_tasks.p_value > difference.p_value:
            difference = over_tasks
    return Change(float(mean_of_pairs(means[0])), float(mean_of_pairs(means[1])), difference)


def _estimate(values: Matrix) -> Estimate:
    """The mean of a series `[S]` over records."""
    found = over_steps.mean_over_records(values[:, None])
    mean, reach = float(found.values[0]), float(found.reach[0])
    return Estimate(mean, (mean - reach, mean + reach), float(found.p_values[0]), "records")


class Depth(NamedTuple):
    """How similarity changes from the first layer to the last.

    Attributes:
        slope: Rise of a straight line from the first layer to the last.
        slope_p_value: Of no rise or fall, beyond how layers and records (or tasks) differ anyway;
            NaN with fewer than four layers.
        bend: How much the middle lies above the ends, by a parabola.
        bend_p_value: Of no bend; NaN with fewer than five layers.
    """

    slope: float
    slope_p_value: float
    bend: float
    bend_p_value: float


def depth(layers: Sequence[LayerSimilarity], *, over: str) -> Depth:
    """Test a rise and a bend over layers, in their order.

    Args:
        layers: In order.
        over: As in `paired`.
    """
    means = np.array([mean_of_pairs(layer.matrix) for layer in layers], dtype=np.float64)
    place = np.linspace(-1, 1, len(layers))
    shapes = [place, (place**2).mean() - place**2]
    design = np.stack([np.ones_like(place), *shapes], axis=1)
    found = []
    for n, shape in enumerate(shapes[: max(1, len(layers) - 2)], start=1):
        p_values = [_p_of_shape(design[:, : n + 1], means)]
        values = np.stack([np.asarray(layer.matrix, np.float64) for layer in layers])
        by_task = mean_over_tasks(_fit(shape, values)).p_value
        if over == "tasks" or not np.isnan(by_task):
            p_values.append(by_task)
        if over == "records":
            series = np.stack([np.asarray(layer.by_step, np.float64) for layer in layers])
            p_values.append(_estimate(_fit(shape, series)).p_value)
        found += [float(_fit(shape, means)) * (2 if n == 1 else 1), float(np.max(p_values))]
    return Depth(*found, *[float("nan")] * (4 - len(found)))


def _p_of_shape(design: Matrix, means: Matrix) -> float:
    """Of the last column of a design `[L, n]`, judged by what the layers leave unexplained."""
    freedom = len(means) - design.shape[1]
    if len(means) < _FEWEST_LAYERS or freedom < 2:
        return float("nan")
    inverse = np.linalg.inv(design.T @ design)
    fitted = inverse @ design.T @ means
    variance = float(((means - design @ fitted) ** 2).sum()) / freedom
    error = np.sqrt(max(variance, NOTHING**2) * inverse[-1, -1])
    return float(2 * student.sf(abs(fitted[-1]) / error, freedom))


def _fit(shape: NDArray[np.float64], values: Matrix) -> Matrix:
    """Coefficient of a centred shape over layers `[L, ...]`; NaN where a layer is unknown."""
    coefficients: Matrix = np.tensordot(shape, values, axes=1) / (shape @ shape)
    return coefficients


class ChangeOverSteps(NamedTuple):
    """The first quarter of the steps against the last, within pairs, and a test of a trend.

    Attributes:
        first: Mean of the first quarter, over what is known in both.
        second: Mean of the last quarter.
        p_value: Of no rise or fall over all steps; of no difference over tasks, where every task
            was measured on the same lines at a few steps. NaN if there are too few to tell.
        until: Last step of the first quarter.
        since: First step of the last quarter.
    """

    first: float
    second: float
    p_value: float
    until: int
    since: int


def change_over_steps(
    similarities: Similarities, in_common: Matrix | None = None
) -> ChangeOverSteps | None:
    """How similarity changed in training; None with fewer than four steps.

    Tasks may come and go: a pair counts in a component only if it is known early *and* late, so
    that no pair is compared with another, and only by how it differs from its own mean.

    Args:
        similarities: Any.
        in_common: Of the tasks' noise (`mean_over_tasks`).
    """
    steps = similarities.steps
    if len(steps) < 4:
        return None
    fourth = len(steps) // 4
    values = similarities.values[:, weighty(similarities.components)]
    early, late = (mean_where_known(part, axis=0) for part in (values[:fourth], values[-fourth:]))
    both = ~np.isnan(early) & ~np.isnan(late)  # [K, T, T]
    first, second = (
        float(mean_of_pairs(mean_where_known(np.where(both, v, np.nan), axis=0)))
        for v in (early, late)
    )
    own = np.where(both, mean_where_known(values, axis=0), np.nan)
    series = mean_where_known(mean_of_pairs(values - own), axis=1)
    p_value = over_steps.trend_over_records(series)
    if similarities.lines != "training":  # little noise at a step, and mostly the same
        changes = mean_where_known(np.where(both, late - early, np.nan), axis=0)
        by_task = mean_over_tasks(changes, None if in_common is None else in_changes(in_common))
        few = len(steps) < over_steps.FEWEST_FOR_SLOPES
        p_value = by_task.p_value if few else float(np.max([p_value, by_task.p_value]))
    return ChangeOverSteps(first, second, p_value, int(steps[fourth - 1]), int(steps[-fourth]))
