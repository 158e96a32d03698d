"""Summaries: means of similarities, what the rule did, cosines without noise, influence.

*Without noise* (`corrected`), from two halves of every task's lines. If a task's two halves agree
by r (its reliability), the cosine of two tasks is too small by a factor of sqrt(r_i r_j). Single
reliabilities are as noisy as cosines, and a mean of ratios is biased and unstable, so products are
pooled over components and steps first, and divided once. How far chance moves the result shows in
cos(A_i, B_j) - cos(B_i, A_j), two measurements of the same thing: a value that chance may have
moved by more than `REACH` is not reported at all.

*Influence*: the predicted effect of a step of task j on the loss of task i. A step of plain SGD
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
from numpy.typing import NDArray
from scipy.stats import t as student

from gradvac.analysis.record import Record
from gradvac.analysis.similarities import (
    Floats,
    Similarities,
    layer_of,
    mean_where_known,
    weighty,
)
from gradvac.sides import side_of

Matrix = NDArray[np.floating]
Counts = NDArray[np.int64]

REACH = 0.05  # half a 99 % interval: more is "not reliable enough"
_MOST_BLOCKS = 10  # neighbouring steps are correlated, so means over long stretches are compared


def mean_matrix(similarities: Similarities, side: str | None = None) -> Floats:
    """Mean over steps and over the components of a side (None: all), `[T, T]`.

    Of the components, those that `weighty` names.
    """
    chosen = weighty(similarities.components, side)
    if not any(chosen):
        raise ValueError(
            f"side: no component is in {side!r}; the components are "
            f"{', '.join(similarities.components[:6])}."
        )
    return mean_where_known(similarities.values[:, chosen], axis=(0, 1))


def mean_of_pairs(values: Matrix) -> Floats:
    """Mean over all pairs of different tasks, `[..., T, T]` -> `[...]`; NaN without any."""
    apart = ~np.eye(values.shape[-1], dtype=bool)
    return mean_where_known(values[..., apart], axis=-1)


def mean_by_layer(similarities: Similarities) -> dict[str, list[tuple[int, float]]]:
    """Side -> (layer, mean similarity of all pairs and steps), from the first layer to the last."""
    return {
        side: [(layer, float(mean_of_pairs(matrix))) for layer, matrix in matrices]
        for side, matrices in layer_matrices(similarities).items()
    }


def layer_matrices(similarities: Similarities) -> dict[str, list[tuple[int, Floats]]]:
    """Side -> (layer, mean similarity of every pair over steps `[T, T]`), from the first layer."""
    means = similarities.mean_over_steps()
    by_side: dict[str, dict[int, list[Floats]]] = {}
    chosen = weighty(similarities.components)
    for name, mean, counts in zip(similarities.components, means, chosen, strict=True):
        layer = layer_of(name)
        if layer is not None and counts:
            by_side.setdefault(side_of(name), {}).setdefault(layer, []).append(mean)
    return {
        side: [
            (layer, mean_where_known(np.stack(layers[layer]), axis=0)) for layer in sorted(layers)
        ]
        for side, layers in by_side.items()
    }


def mean_by_step(similarities: Similarities, pair: tuple[str, str] | None = None) -> Floats:
    """Mean similarity at every step over components, of one pair or (None) of all, `[S]`."""
    chosen = weighty(similarities.components)
    if pair is None:
        return mean_where_known(mean_of_pairs(similarities.values[:, chosen]), axis=1)
    values = similarities.select(tasks=pair).values
    return mean_where_known(values[:, chosen, 0, -1], axis=1)


@dataclass(frozen=True, eq=False)
class RuleCounts:
    """Directed pairs (i, j) at every step, over the layers of the model, each `[S]`.

    Only eligible pairs count: task i is vaccinated, and their similarity is known. Normalisations
    are left out: they hold few numbers and would count as much as a layer.

    Attributes:
        eligible: Pairs that the rule could alter.
        active: Of these, pairs that it altered.
        conflicts: Of these, pairs with negative similarity, where PCGrad would act.
    """

    eligible: Counts
    active: Counts
    conflicts: Counts

    def share(self, part: Counts) -> NDArray[np.float64]:
        """Part of the eligible pairs at every step; NaN where there are none."""
        shares = np.full(len(part), np.nan)
        np.divide(part, self.eligible, out=shares, where=self.eligible > 0)
        return shares


def rule_counts(record: Record) -> RuleCounts:
    """Count what the rule could do and what it did."""
    layers = weighty(record.components)
    rows = np.ix_(np.arange(len(record.steps)), np.flatnonzero(layers), record.eligible())
    others = ~np.eye(len(record.tasks), dtype=bool)[record.eligible()]
    similarity = record.similarity[rows]
    eligible = ~np.isnan(similarity) & others

    def counted(which: NDArray[np.bool_]) -> Counts:
        return np.asarray((which & eligible).sum(axis=(1, 2, 3)), dtype=np.int64)

    return RuleCounts(counted(eligible), counted(record.active[rows]), counted(similarity < 0))


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
    complete = (
        known.sum() == (apart & ~np.isnan(raw)).sum()
    )  # else the least reliable would be missing
    mean = float(raw[known].sum() / scale[known].sum()) if complete and known.any() else np.nan
    mean_reach = float(np.sqrt((reach[known] ** 2).mean())) if known.any() else np.nan
    return Corrected(
        values, reach, reliability, mean if mean_reach <= enough else np.nan, mean_reach
    )


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


def recorded_products(record: Record) -> Matrix:
    """Predicted fall by step, component and pair, `[S, K, T, T]`: w_j cos_ij ||g_i|| ||g_j||.

    NaN in the rows of an absent task; an absent task has no influence.
    """
    cosines = np.array(record.similarity, dtype=np.float64)
    diagonal = np.arange(len(record.tasks))
    cosines[..., diagonal, diagonal] = 1.0
    norms = np.asarray(record.norms, dtype=np.float64)
    # A component without gradient of a task has no cosines, and adds nothing.
    lengths = norms[..., :, None] * np.nan_to_num(norms)[..., None, :]
    falls = np.nan_to_num(record.weights)[..., None, :] * lengths * np.nan_to_num(cosines)
    products: Matrix = np.where(np.isnan(norms)[..., None], np.nan, falls)
    return products


def recorded_influence(record: Record) -> Influence:
    """Influence in training, averaged over the recorded steps."""
    products = recorded_products(record)
    by_step = products.sum(axis=1)  # [S, T, T], NaN where a task was absent
    parts = dict(zip(record.components, _mean(products), strict=True))
    values, p_values = _over_blocks(by_step)
    totals, total_p_values = _over_blocks(by_step.sum(axis=2))
    return Influence(record.tasks, values, p_values, totals, total_p_values, parts, unbiased=False)


def _over_blocks(values: Matrix) -> tuple[Matrix, Matrix]:
    """Means over steps `[S, ...]`, and p-values of a mean of 0 by the means of stretches."""
    mean = _mean(values)
    num = min(_MOST_BLOCKS, len(values) // 2)
    if num < 3:
        return mean, np.full_like(mean, np.nan)
    blocks = np.stack([_mean(part) for part in np.array_split(values, num)])
    spread = blocks.std(axis=0, ddof=1) / np.sqrt(num)
    return mean, _p_values(blocks.mean(axis=0), spread, num - 1)


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
