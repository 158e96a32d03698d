"""Differences within pairs, tested over tasks: between sides, layers, steps and directions."""

# S steps, K components, T tasks, L layers

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.components import weighty
from gradvac.analysis.similarities import Floats, Similarities, mean_where_known
from gradvac.analysis.statistics._chance import Matrix, OverTasks, mean_over_tasks
from gradvac.analysis.statistics._summaries import mean_matrix, mean_of_pairs
from gradvac.sides import DECODER, ENCODER


def encoder_minus_decoder(similarities: Similarities) -> Floats:
    """How much more similar tasks are in the encoder than in the decoder, `[T, T]`."""
    return mean_matrix(similarities, ENCODER) - mean_matrix(similarities, DECODER)


class Change(NamedTuple):
    """Two means over the same pairs, and the difference of the second from the first."""

    first: float
    second: float
    difference: OverTasks


def paired(first: Matrix, second: Matrix) -> Change:
    """Compare two matrices `[T, T]` pair by pair; only pairs known in both count."""
    both = ~np.isnan(first) & ~np.isnan(second)
    one, two = (np.where(both, values, np.nan) for values in (first, second))
    return Change(float(mean_of_pairs(one)), float(mean_of_pairs(two)), mean_over_tasks(two - one))


class Depth(NamedTuple):
    """How similarity changes from the first layer to the last.

    Attributes:
        slope: Rise of a straight line from the first layer to the last.
        bend: How much the middle lies above the ends, by a parabola; None with two layers.
    """

    slope: OverTasks
    bend: OverTasks | None


def depth(layers: Sequence[Matrix]) -> Depth:
    """Test a rise and a bend over layers.

    Args:
        layers: `[T, T]` of every layer, at least two, in order.
    """
    values = np.stack([np.asarray(layer, dtype=np.float64) for layer in layers])  # [L, T, T]
    place = np.linspace(-1, 1, len(values))
    slope = mean_over_tasks(_fit(place, values) * 2)
    if len(values) < 3:
        return Depth(slope, None)
    arch = place**2 - (place**2).mean()
    return Depth(slope, mean_over_tasks(-_fit(arch, values)))


def _fit(shape: NDArray[np.float64], values: Matrix) -> Matrix:
    """Coefficient of a centred shape over layers, for every pair; NaN where a layer is unknown."""
    coefficients: Matrix = np.tensordot(shape, values, axes=1) / (shape @ shape)
    return coefficients


class ChangeOverSteps(NamedTuple):
    """The first quarter of the steps against the last, within pairs.

    Attributes:
        change: Means over what is known in both quarters, and their difference.
        until: Last step of the first quarter.
        since: First step of the last quarter.
    """

    change: Change
    until: int
    since: int


def change_over_steps(similarities: Similarities) -> ChangeOverSteps | None:
    """How similarity changed in training; None with fewer than four steps.

    Tasks may come and go: a pair counts in a component only if it is known early *and* late, so
    that no pair is compared with another.
    """
    steps = similarities.steps
    if len(steps) < 4:
        return None
    fourth = len(steps) // 4
    values = similarities.values[:, weighty(similarities.components)]
    early, late = (mean_where_known(part, axis=0) for part in (values[:fourth], values[-fourth:]))
    both = ~np.isnan(early) & ~np.isnan(late)  # [K, T, T]
    first, second = (mean_where_known(np.where(both, v, np.nan), axis=0) for v in (early, late))
    return ChangeOverSteps(paired(first, second), int(steps[fourth - 1]), int(steps[-fourth]))
