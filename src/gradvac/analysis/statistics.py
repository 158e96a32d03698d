"""Statistics of similarities: do related tasks share gradients? Where, when, and does it matter?

Matrices are `[T, T]` cosines, rows in task order. Pairs (i, j) of a matrix share tasks and are not
independent, so that questions about *pairs* (relatives, distances) are tested by permuting tasks.
Where all permutations can be enumerated, they are; otherwise a p-value is (1 + as extreme) /
(1 + permutations), never 0. Questions about *means* (one side of the model against the other, one
step against another) are tested by leaving out tasks one at a time, and over the records of
training (`over_steps`), because whatever moves all tasks at once is one observation, however many
tasks there are; both have to agree. Two tasks are tested over records alone, and a measurement,
which has one set of lines, over tasks alone. A trend over layers also has to stand out from how
layers differ anyway. All tests are two-sided, NaN (unknown) pairs are left out, a test that is not
possible is NaN, and parallel tests are corrected by `holm`.

*Noise makes patterns* (`pair_pattern`). The cosine of two noisy gradients is a_i a_j c_ij, where
a_i shrinks with the noise of task i: tasks with large batches look similar to each other, though
all c_ij are equal. What a product of one factor per task explains is therefore taken out before
pairs are compared, in every component by itself, and the rest is divided by how much noise it has.

*Lines in common* (`noise_in_common`). Tasks that were measured on the same lines share the noise of
these lines. So pairs are tested on different lines, where a pattern also has to stand out from what
shared noise makes (`_p_of_noise`), and tasks count for fewer observations.

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

# S steps, K components, T tasks, L layers, N permutations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from math import factorial, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

from gradvac.analysis import over_steps
from gradvac.analysis.record import Record
from gradvac.analysis.similarities import (
    Floats,
    Similarities,
    layer_of,
    mean_where_known,
    weighty,
)
from gradvac.engine.components import DECODER, ENCODER, side_of
from gradvac.tasks import turned

Matrix = NDArray[np.floating]
Counts = NDArray[np.int64]

REACH = 0.05  # half a 99 % interval: more is "not reliable enough"
MOST_COUNTED = 20_000  # permutations that are enumerated; if there are more, they are drawn
_NOTHING = 1e-7  # rounding errors around 0
_ALIKE = 0.02  # variance of the logarithm of noise that explains nothing: relatives have it too
_FEWEST_TASKS = 3  # two tasks are one pair, which shows no variation
_FEWEST_LAYERS = 4  # three lie on a line by chance
LEAST = 0.01  # differences of cosines that are worth a claim
_ROUNDS = 60  # of fitting factors
_LEAST_NOISE = 0.02  # of a task; less is not told from none
_SIGNIFICANT = 0.05
_AT_ONCE = 4_000_000  # pairs of shuffles
_NUM_PERMUTATIONS, _SEED = 9999, 0
_FEWEST_PERMUTATIONS = 199
_MOST_SHUFFLED = 20_000_000  # pairs of shuffles: with many tasks, fewer shuffles will do


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
        side: [(layer.number, float(mean_of_pairs(layer.matrix))) for layer in layers]
        for side, layers in layers_of(similarities).items()
    }


@dataclass(frozen=True, eq=False)
class LayerSimilarity:
    """A layer: mean similarity of pairs over steps `[T, T]`, and of all pairs by step `[S]`."""

    number: int
    matrix: Floats
    by_step: Floats


def layers_of(similarities: Similarities) -> dict[str, list[LayerSimilarity]]:
    """Side -> its layers, from the first to the last."""
    by_side: dict[str, dict[int, list[int]]] = {}
    for k, counts in enumerate(weighty(similarities.components)):
        name = similarities.components[k]
        number = layer_of(name)
        if number is not None and counts:
            by_side.setdefault(side_of(name), {}).setdefault(number, []).append(k)

    def made(number: int, members: list[int]) -> LayerSimilarity:
        values = similarities.values[:, members]
        by_step = mean_where_known(mean_of_pairs(values), axis=1)
        return LayerSimilarity(number, mean_where_known(values, axis=(0, 1)), by_step)

    return {
        side: [made(number, layers[number]) for number in sorted(layers)]
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

    def share(self, part: Counts, window: int = 1) -> NDArray[np.float64]:
        """Part of the eligible pairs at every step, or near it; NaN where there are none."""
        near = np.ones(window)
        some, all_pairs = (np.convolve(counts, near, "same") for counts in (part, self.eligible))
        shares = np.full(len(part), np.nan)
        np.divide(some, all_pairs, out=shares, where=all_pairs > 0)
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
    if abs(mean) < _NOTHING:
        p_value = 1.0
    elif error <= _NOTHING * abs(mean):  # all pairs alike
        p_value = 0.0
    else:
        p_value = float(2 * student.sf(abs(mean) / error, num - 1))
    return Estimate(mean, (mean - reach, mean + reach), p_value)


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
    return np.divide(above, below, out=np.zeros(above.shape), where=below > _NOTHING)


def _in_changes(in_common: Matrix) -> Matrix:
    """The same of what other weights change on the same lines.

    A task's own noise is much the same before and after, and cancels; that of shared lines is left.
    """
    return np.full_like(in_common, np.maximum(mean_of_pairs(in_common), 0.0) ** 0.25)


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


@dataclass(frozen=True, eq=False)
class Shuffles:
    """Shuffled orders `[N, T]`, and whether they are all that exist (including the true one)."""

    orders: NDArray[np.int64]
    all_of_them: bool

    def p_value(self, chance: ArrayLike, observed: float) -> float:
        """Share of shuffles with a statistic as large as the observed one; never 0."""
        values = np.asarray(chance, dtype=np.float64)
        as_extreme = int((values >= observed - 1e-12).sum())  # rounding must not break ties
        if self.all_of_them:
            return as_extreme / len(values)
        return (1 + as_extreme) / (1 + len(values))


def shuffled_orders(num: int, *, num_permutations: int, seed: int) -> Shuffles:
    """Orders of `num` tasks: all of them if they can be enumerated, else random ones."""
    if factorial(num) <= MOST_COUNTED:
        return Shuffles(_all_orders(num), True)
    draw = np.random.default_rng(seed)
    tiled = np.tile(np.arange(num), (num_permutations, 1))
    return Shuffles(draw.permuted(tiled, axis=1), False)


@cache
def _all_orders(num: int) -> NDArray[np.int64]:
    orders = np.array(list(permutations(range(num))), dtype=np.int64)
    orders.flags.writeable = False
    return orders


def shuffled_labels(labels: NDArray[np.int64], *, num_permutations: int, seed: int) -> Shuffles:
    """Ways to assign labels to tasks: all of them if they can be enumerated, else random ones."""
    if count_labelings(labels.tolist()) <= MOST_COUNTED:
        return Shuffles(_labelings(tuple(labels.tolist())), True)
    draw = np.random.default_rng(seed)
    return Shuffles(draw.permuted(np.tile(labels, (num_permutations, 1)), axis=1), False)


def count_labelings(labels: Sequence[object]) -> int:
    """The number of ways to assign these labels: n! / (sizes!)."""
    sizes = Counter(labels).values()
    return factorial(len(labels)) // prod(map(factorial, sizes))


@cache
def _labelings(labels: tuple[int, ...]) -> NDArray[np.int64]:
    """Each kind in turn takes its places among those that are left."""
    num = len(labels)
    partial: list[tuple[list[int], tuple[int, ...]]] = [([-1] * num, tuple(range(num)))]
    for label, size in Counter(labels).items():
        following = []
        for given, free in partial:
            for taken in combinations(free, size):
                labeling = list(given)
                for place in taken:
                    labeling[place] = label
                following.append((labeling, tuple(place for place in free if place not in taken)))
        partial = following
    labelings = np.array([given for given, _ in partial], dtype=np.int64)
    labelings.flags.writeable = False
    return labelings


def families_of(tasks: Sequence[str], families: Mapping[str, str]) -> list[str]:
    """The family of every task in order, "" where unknown: what `family_contrast` takes."""
    return [families.get(task, "") for task in tasks]


class FamilyContrast(NamedTuple):
    """Are relatives more similar, or less? Mean cosines, and a two-sided permutation p-value.

    `difference` is that of what was tested, without the noise of tasks if `tested` was given;
    `least_p_value` is the smallest p-value that this many tasks in such families could give.
    """

    within: float
    between: float
    difference: float
    p_value: float
    least_p_value: float


def family_contrast(
    matrix: Matrix,
    families: Sequence[str],
    *,
    tested: Matrix | None = None,
    in_common: Matrix | None = None,
    num_permutations: int | None = None,
    seed: int = 0,
) -> FamilyContrast:
    """Mean similarity within families minus between them, against shuffled families.

    All assignments of families to tasks are enumerated if there are few enough. Shuffled families
    share no more lines than others; where the true ones do, their noise has to be excluded too.

    Args:
        matrix: `[T, T]`.
        families: The family of every task, in the matrix's order; "" (unknown) leaves a task out.
        tested: What the p-value is about, where it is not the matrix itself (`pair_pattern`).
        in_common: `[T, T]`, of the tasks' noise (`noise_in_common`); None: nothing.
        num_permutations: How often families are shuffled over the tasks; None: 9,999 times, less
            often for more than 60 tasks.
        seed: Seed of the shuffling.
    """
    if len(families) != len(matrix):
        raise ValueError(
            f"families: must name the family of each of {len(matrix)} tasks, got {len(families)}."
        )
    with_family = [i for i, family in enumerate(families) if family]
    names = list(dict.fromkeys(families[i] for i in with_family))
    labels = np.array([names.index(families[i]) for i in with_family], dtype=np.int64)
    values, rows, columns = _pairs(_symmetric(matrix)[np.ix_(with_family, with_family)])
    same = labels[rows] == labels[columns]
    shown = values
    if tested is not None:
        values = _symmetric(tested)[np.ix_(with_family, with_family)][rows, columns]
    if not same.any() or same.all():
        raise ValueError(
            "families: a contrast needs two tasks of one family and two of different families; "
            f"got {dict(Counter(families))}."
        )

    def contrasts(shuffled: NDArray[np.int64]) -> NDArray[np.float64]:
        same = shuffled[:, rows] == shuffled[:, columns]  # [N, pairs]
        num, inside = same.sum(axis=1), same.astype(np.float64) @ values
        differences = np.full(len(shuffled), np.nan)
        usable = (num > 0) & (num < len(values))  # unknown pairs may leave one of the two empty
        rest = (values.sum() - inside[usable]) / (len(values) - num[usable])
        differences[usable] = inside[usable] / num[usable] - rest
        return differences

    num_permutations = num_permutations or _enough_shuffles(len(values))
    shuffles = shuffled_labels(labels, num_permutations=num_permutations, seed=seed)
    chance = np.concatenate([contrasts(part) for part in _chunks(shuffles.orders, len(values))])
    chance = np.where(np.isnan(chance), np.inf, np.abs(chance))  # to be cautious
    within, between = float(shown[same].mean()), float(shown[~same].mean())
    difference = float(values[same].mean() - values[~same].mean())
    p_value = shuffles.p_value(chance, abs(difference))
    if in_common is not None:
        shared = in_common[np.ix_(with_family, with_family)]
        p_value = max(p_value, _p_of_noise(values, same, shared, rows, columns))
    alike = prod(map(factorial, Counter(Counter(labels.tolist()).values()).values()))
    least = max(alike / count_labelings(labels.tolist()), 1 / (1 + num_permutations))
    return FamilyContrast(within, between, difference, p_value, least)


def _p_of_noise(values: Matrix, contrast: NDArray[Any], in_common: Matrix, *pairs: Counts) -> float:
    """P-value of a pattern's correlation with a contrast of pairs, if it is shared noise alone.

    Products of two tasks' noises have a covariance C (x) C, if C is that of the tasks. How large
    that is in the one direction of large sets against small ones is known only roughly, so the
    correlation also has to hold where directions with more noise than others are scaled down. 0
    where no lines are shared: there C is chance alone, which would cost power.
    """
    apart, num = ~np.eye(len(in_common), dtype=bool), len(in_common)
    known = in_common[apart & ~np.isnan(in_common)]
    if not len(known) or known.mean() <= 3 * known.std() * np.sqrt(2 / len(known)):  # pairs twice
        return 0.0
    noise, both = _in_patterns(in_common), np.zeros((2, num, num))
    for matrix, one in zip(both, (values, contrast), strict=True):
        matrix[pairs] = matrix[pairs[::-1]] = one - one.mean()
    left = both[1] @ noise
    share = (left * left.T).sum() / (both[1] ** 2).sum() / _size(noise)
    sizes, directions = np.linalg.eigh(noise)
    scale = directions / np.sqrt(np.maximum(sizes, sizes.sum() / (num - 1))) @ directions.T
    alike = _row_correlations(*both[:, None, apart])
    scaled = _row_correlations(*(scale @ both @ scale)[:, None, apart])
    few = 2 / max(num * (num - 3), 1)  # pairs less a factor per task
    return max(_p_of_few(float(alike[0]), share), _p_of_few(float(scaled[0]), few))


def _in_patterns(in_common: Matrix) -> Matrix:
    """Correlations of noise less what all tasks share, which is in no pattern; NaN is the mean."""
    filled = np.nan_to_num(in_common, nan=float(np.nan_to_num(mean_of_pairs(in_common))))
    np.fill_diagonal(filled, 1.0)
    filled = filled.clip(-1.0, 1.0)
    filled -= filled.mean(axis=0)
    return np.asarray(filled - filled.mean(axis=1, keepdims=True))


def _size(noise: Matrix) -> float:
    """The sum of squares that products of such noise have."""
    return float(noise.trace() ** 2 + (noise**2).sum()) / 2


def _p_of_few(r: float, share: float) -> float:
    """P-value of a correlation whose mean square by chance is this: as if of 1 / share pairs."""
    freedom = max(1 / max(share, _NOTHING) - 1, _NOTHING)
    return float(2 * student.sf(abs(r) * np.sqrt(freedom / max(1 - r**2, _NOTHING)), freedom))


class Correlation(NamedTuple):
    """A correlation and its p-value."""

    r: float
    p_value: float


def mantel(
    matrix: Matrix,
    distances: ArrayLike,
    *,
    in_common: Matrix | None = None,
    num_permutations: int | None = None,
    seed: int = 0,
    ranks: bool = False,
) -> Correlation:
    """Mantel test: correlation of two matrices over pairs, two-sided, tasks permuted.

    Similar tasks that are near each other give a *negative* r.

    Args:
        matrix: Similarities `[T, T]`.
        distances: Known distances `[T, T]`, in the same order.
        in_common: As in `family_contrast`.
        num_permutations: How often the tasks of one matrix are shuffled; None: 9,999 times, less
            often for more than 60 tasks.
        seed: Seed of the shuffling.
        ranks: Correlate ranks (Spearman) instead of values (Pearson).
    """
    other = np.asarray(distances, dtype=np.float64)
    if other.shape != matrix.shape:
        raise ValueError(f"distances: must have shape {matrix.shape}, got {other.shape}.")
    if len(matrix) < 3:
        raise ValueError(f"matrix: a correlation over pairs needs 3 tasks, got {len(matrix)}.")
    one, other = _symmetric(matrix), _symmetric(other)
    one = np.where(np.isnan(other), np.nan, one)
    values, rows, columns = _pairs(one)
    if ranks:
        values, other = rankdata(values), _ranked(other)

    def correlations(orders: NDArray[np.int64]) -> NDArray[np.float64]:
        theirs = other[orders[:, rows], orders[:, columns]]  # [N, pairs]
        known = ~np.isnan(theirs)  # a shuffle brings unknown distances to known pairs
        num = known.sum(axis=1, keepdims=True).clip(min=1)
        mine = np.where(known, values, 0.0)
        theirs = np.where(known, theirs, 0.0)
        mine = np.where(known, mine - mine.sum(axis=1, keepdims=True) / num, 0.0)
        theirs = np.where(known, theirs - theirs.sum(axis=1, keepdims=True) / num, 0.0)
        scale = np.sqrt((mine**2).sum(axis=1) * (theirs**2).sum(axis=1))
        coefficients = np.zeros(len(orders))
        np.divide((mine * theirs).sum(axis=1), scale, out=coefficients, where=scale > 1e-15)
        return coefficients

    num_permutations = num_permutations or _enough_shuffles(len(values))
    shuffles = shuffled_orders(len(matrix), num_permutations=num_permutations, seed=seed)
    chance = np.concatenate([correlations(part) for part in _chunks(shuffles.orders, len(values))])
    r = float(correlations(np.arange(len(matrix))[None])[0])
    p_value = shuffles.p_value(np.abs(chance), abs(r))
    if in_common is not None and r:
        near = other[rows, columns]
        p_value = max(p_value, _p_of_noise(values, near, in_common, rows, columns))
    return Correlation(r, p_value)


def _enough_shuffles(num_pairs: int) -> int:
    most = _MOST_SHUFFLED // max(1, num_pairs)
    return max(_FEWEST_PERMUTATIONS, min(_NUM_PERMUTATIONS, most))


def _chunks(orders: NDArray[np.int64], num_pairs: int) -> list[NDArray[np.int64]]:
    """In blocks: all pairs of all shuffles would take too much memory."""
    return np.array_split(orders, -(-len(orders) * max(1, num_pairs) // _AT_ONCE))


def _symmetric(matrix: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] != values.shape[1]:
        raise ValueError(f"matrix: must be square, [T, T], got shape {values.shape}.")
    return (values + values.T) / 2


def _pairs(
    matrix: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Known values above the diagonal, and their rows and columns."""
    rows, columns = np.triu_indices(len(matrix), k=1)
    known = ~np.isnan(matrix[rows, columns])
    rows, columns = rows[known], columns[known]
    return matrix[rows, columns], rows, columns


def _ranked(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    values, rows, columns = _pairs(matrix)
    ranked = np.full_like(matrix, np.nan)
    ranked[rows, columns] = ranked[columns, rows] = rankdata(values)
    return ranked


def encoder_minus_decoder(similarities: Similarities) -> Floats:
    """How much more similar tasks are in the encoder than in the decoder, `[T, T]`."""
    return mean_matrix(similarities, ENCODER) - mean_matrix(similarities, DECODER)


class Change(NamedTuple):
    """Two means over the same pairs, and the difference of the second from the first."""

    first: float
    second: float
    difference: Estimate


def by_step(similarities: Similarities, side: str | None = None) -> Floats:
    """Mean over the components of a side (None: all), `[S, T, T]`."""
    return mean_where_known(similarities.values[:, weighty(similarities.components, side)], axis=1)


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
    error = np.sqrt(max(variance, _NOTHING**2) * inverse[-1, -1])
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
        by_task = mean_over_tasks(changes, None if in_common is None else _in_changes(in_common))
        few = len(steps) < over_steps.FEWEST_FOR_SLOPES
        p_value = by_task.p_value if few else float(np.max([p_value, by_task.p_value]))
    return ChangeOverSteps(first, second, p_value, int(steps[fourth - 1]), int(steps[-fourth]))


class RankCorrelation(NamedTuple):
    """Spearman's rho, its 95 % bootstrap interval, and a permutation p-value."""

    rho: float
    interval: tuple[float, float]
    p_value: float


def similarity_against_score(points: Sequence[tuple[float, float]]) -> RankCorrelation:
    """Does more similarity go with better scores, over a set of runs?

    Args:
        points: (similarity, score) of every run; at least 4.
    """
    values = np.asarray(points, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != 2 or len(values) < 4:
        raise ValueError(f"points: need (similarity, score) of at least 4 runs, got {len(points)}.")
    if np.isnan(values).any():
        raise ValueError("points: hold NaN; leave out runs without similarity or score.")
    if (values == values[0]).all(axis=0).any():
        raise ValueError("points: all similarities or all scores are equal; nothing to correlate.")
    rho = float(spearmanr(values[:, 0], values[:, 1]).statistic)
    draw = np.random.default_rng(_SEED)
    drawn = values[draw.integers(len(values), size=(_NUM_PERMUTATIONS, len(values)))]
    samples = _row_correlations(rankdata(drawn[..., 0], axis=1), rankdata(drawn[..., 1], axis=1))
    low, high = np.nanquantile(samples, [0.025, 0.975])
    first, second = rankdata(values[:, 0]), rankdata(values[:, 1])
    shuffles = shuffled_orders(len(values), num_permutations=_NUM_PERMUTATIONS, seed=_SEED)
    shuffled = second[shuffles.orders]
    chance = _row_correlations(np.broadcast_to(first, shuffled.shape), shuffled)
    p_value = shuffles.p_value(np.abs(chance), abs(rho))
    return RankCorrelation(rho, (float(low), float(high)), p_value)


@dataclass(frozen=True, eq=False)
class SimilarityComparison:
    """Two runs on the same tasks.

    `difference` is second minus first, `[T, T]`; `change` tests it over tasks; `pattern` says
    whether the same pairs are similar in both. Runs that were measured on the same lines share the
    noise of these lines, so that there is no test of that (NaN).
    """

    tasks: tuple[str, ...]
    difference: Floats
    change: Change
    pattern: Correlation | None


def compare_similarities(
    first: Similarities,
    second: Similarities,
    *,
    tested: tuple[Similarities, Similarities] | None = None,
) -> SimilarityComparison:
    """Compare the similarities of two runs: batch size, model size, direction.

    Args:
        first: One run.
        second: Another. Tasks are matched by name; "fr-en" matches "en-fr" where no name does.
        tested: What `pattern` is about, where it is not these: both runs on different lines.
    """
    matches = match_tasks(first.tasks, second.tasks)
    tasks = tuple(matches)
    both = [list(tasks), list(matches.values())]
    one, two = (run.select(tasks=names) for run, names in zip((first, second), both, strict=True))
    pairs = [one, two]
    if tested is not None:
        pairs = [run.select(tasks=names) for run, names in zip(tested, both, strict=True)]
    noise = [noise_in_common(*lines) for lines in zip((one, two), pairs, strict=True)]
    in_common = [_in_changes(shared) for shared in noise if shared is not None]
    means = [mean_matrix(one), mean_matrix(two)]
    recorded = first.lines == "training"
    if recorded and np.array_equal(first.steps, second.steps):
        change = paired(by_step(one), by_step(two), over="records")
    else:
        most = max(in_common, key=mean_of_pairs, default=None)
        change = paired(means[0][None], means[1][None], over="tasks", in_common=most)
    pattern = mantel(*map(pair_pattern, pairs)) if len(tasks) > 3 else None
    if pattern is not None and not recorded:
        pattern = pattern._replace(p_value=np.nan)
    return SimilarityComparison(tasks, means[1] - means[0], change, pattern)


def match_tasks(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    """Tasks of one run -> those of another: by name, or else reversed ("en-fr": "fr-en")."""
    partners = {task: task for task in first if task in second}
    if len(partners) < 2:
        partners = {task: turned(task) for task in first if turned(task) in second}
    if len(partners) < 2:
        raise ValueError(
            f"runs: fewer than two tasks are in both; one has {', '.join(first)}; the other "
            f"{', '.join(second)}."
        )
    return partners


def _row_correlations(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Pearson correlation row by row; NaN where a row does not vary."""
    first = first - first.mean(axis=1, keepdims=True)
    second = second - second.mean(axis=1, keepdims=True)
    scale = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    product = (first * second).sum(axis=1)
    correlations = np.full(len(scale), np.nan)
    np.divide(product, scale, out=correlations, where=scale > 0)
    return correlations


def dendrogram(matrix: Matrix) -> NDArray[np.float64]:
    """SciPy's linkage of the tasks `[T, T]`: average linkage on 1 - cosine, leaves in order."""
    if len(matrix) < 2:
        raise ValueError("matrix: one task has nothing to be clustered with; give at least two.")
    distances = 1.0 - np.asarray(_symmetric(matrix), dtype=np.float64)
    unknown = np.isnan(distances)
    distances[unknown] = np.max(distances[~unknown], initial=1.0)
    np.fill_diagonal(distances, 0.0)
    condensed = squareform(distances.clip(min=0.0), checks=False)
    tree = hierarchy.linkage(condensed, method="average", optimal_ordering=True)
    return np.asarray(tree, dtype=np.float64)


def cluster_order(matrix: Matrix) -> list[int]:
    """Task positions such that similar tasks are neighbours."""
    if len(matrix) < 2:
        return list(range(len(matrix)))
    order: list[int] = hierarchy.leaves_list(dendrogram(matrix)).tolist()
    return order


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
    pattern[known] -= unlike * (unlike @ pattern[known] / (unlike @ unlike + least + _NOTHING))
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
