"""Influence: the predicted effect of a step of task j on the loss of task i.

A step of plain SGD
moves the parameters by -lr u, where u = sum_j w_j g_j is the update. To first order, the loss of
task i falls by lr g_i . u = lr sum_j w_j g_i . g_j, so that every task j has its share:
w_j cos_ij ||g_i|| ||g_j|| in every component, and components add up. Negative: j raises the loss of
i. Adam scales every parameter by its own history, so that its steps differ from this. From a record
of training, g_i comes from the same batch as the update, and a task's own share counts the noise of
its batch as progress. From two halves of an aligned set (`measure`), g_i comes from one half and
the update from the other, so that the shares are unbiased.
"""

# S steps, K components, T tasks

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from gradvac.analysis.record import Record
from gradvac.analysis.similarities import Similarities, mean_where_known
from gradvac.analysis.statistics import over_steps
from gradvac.analysis.statistics.summaries import Matrix


@dataclass(frozen=True, eq=False)
class Influence:
    """Predicted fall of every task's loss, per unit of learning rate.

    Attributes:
        tasks: Names of rows and columns.
        values: `[T, T]`: [i, j] is the fall of task i's loss by task j, in a mean step.
        p_values: `[T, T]`, two-sided, of no fall or rise; NaN where there is no test.
        totals: `[T]`: the fall of task i's loss by all together.
        total_p_values: `[T]`.
        by_component: Component -> its part of `values`, which they add up to.
        unbiased: Whether a task's own share is free of its batch's noise.
    """

    tasks: tuple[str, ...]
    values: Matrix
    p_values: Matrix
    totals: Matrix
    total_p_values: Matrix
    by_component: Mapping[str, Matrix]
    unbiased: bool

    @property
    def shares(self) -> Matrix:
        """Part of every task in a task's predicted progress, `[T, T]`; NaN without progress."""
        positive = np.where(self.totals > 0, self.totals, np.nan)
        shares: Matrix = self.values / positive[:, None]
        return shares


def recorded_products(record: Record, component: int) -> Matrix:
    """Predicted fall by step and pair in a component, `[S, T, T]`: w_j cos_ij ||g_i|| ||g_j||.

    NaN in the rows of an absent task; an absent task has no influence. w_j is the mean weight of
    task j over steps: rules weigh a task more in just those batches whose noise made a product
    negative, so that the weights of single steps would find harm in noise.
    """
    cosines = np.nan_to_num(record.similarity[:, component].astype(np.float64))
    norms = record.norms[:, component].astype(np.float64)
    diagonal = np.arange(len(record.tasks))
    cosines[:, diagonal, diagonal] = 1.0
    # A component without gradient of a task has no cosines, and adds nothing.
    lengths = norms[:, :, None] * np.nan_to_num(norms)[:, None, :]
    weights = np.nan_to_num(mean_where_known(record.weights[:, component], axis=0))
    products: Matrix = weights * lengths * cosines  # NaN norms stay NaN
    return products


def recorded_influence(record: Record) -> Influence:
    """Influence in training, averaged over the recorded steps."""
    by_step = np.zeros((len(record.steps), len(record.tasks), len(record.tasks)))
    parts = {}
    for k, component in enumerate(record.components):
        products = recorded_products(record, k)
        by_step += products  # NaN where a task was absent
        parts[component] = _mean(products)
    values = over_steps.mean_over_records(by_step)
    totals = over_steps.mean_over_records(by_step.sum(axis=2))
    return Influence(
        record.tasks,
        _mean(by_step),
        values.p_values,
        _mean(by_step.sum(axis=2)),
        totals.p_values,
        parts,
        unbiased=False,
    )


def measured_influence(similarities: Similarities) -> Influence | None:
    """Influence in a step of the joint gradient on the aligned set; None without both halves.

    Args:
        similarities: Of different lines, with `across` and `half_norms`.
    """
    if similarities.across is None or similarities.half_norms is None:
        return None
    first, second = (similarities.half_norms[:, :, half] for half in (0, 1))  # [S, K, T]
    across = np.nan_to_num(similarities.across.astype(np.float64))
    # The same lines at every step: one measurement.
    products = (across * first[..., :, None] * second[..., None, :]).mean(axis=0)  # [K, T, T]
    lengths = (first**2).sum(axis=1, dtype=np.float64) + (second**2).sum(axis=1, dtype=np.float64)
    lengths = np.sqrt(lengths.mean(axis=0) / 2)  # [T]
    parts = (products + products.swapaxes(1, 2)) / 2
    both, values = products.sum(axis=0), parts.sum(axis=0)
    totals = values.sum(axis=1)
    # Two measurements of one thing show the noise, assumed equal once lengths are 1.
    scale = np.where(lengths > 0, lengths, np.nan)
    scale = scale[:, None] * scale[None]
    apart = ~np.eye(len(both), dtype=bool)
    twice = ((both - both.T) / scale)[apart]
    twice = twice[~np.isnan(twice)]
    if not len(twice):
        return None
    noise = np.sqrt((twice**2).mean() / 4) * scale
    noise[~apart] *= np.sqrt(2)  # measured once
    num = max(1, int((lengths > 0).sum()) - 1)  # a task's noise is in all of its pairs
    # Cautiously, as if the noise of all of a task's pairs had the same sign.
    total_noise = np.nansum(noise, axis=1)
    return Influence(
        similarities.tasks,
        values,
        _p_values(values, noise, num),
        totals,
        _p_values(totals, total_noise, num),
        dict(zip(similarities.components, parts, strict=True)),
        unbiased=True,
    )


def _mean(values: Matrix) -> Matrix:
    return np.asarray(mean_where_known(values, axis=0), dtype=np.float64)


def _p_values(mean: Matrix, spread: Matrix, freedom: int) -> Matrix:
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values: Matrix = 2 * student.sf(np.abs(mean) / spread, freedom)
    return p_values
