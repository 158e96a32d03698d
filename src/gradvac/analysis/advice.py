"""Advice: which tasks should learn together, from the gradients of a joint run.

A task's *companions* are the others in the order of predicted influence. The predictor is the
cosine of gradients in the decoder (where there is none, in the whole model) in the middle of
training: it chose partners of real languages in docs/results/transfer.md. Said of a companion:

    predicted   the cosine; from two halves of a task's lines without their noise
    advantage   by how much it is above what the task has with the others
    reach       half of the advantage's 95 % interval
    promised    whether the advantage is more than chance makes it

Noise is that of lines or of steps, never of components, which share a batch's noise. Of a record
of training, stretches of steps are left out one at a time; if they resemble their neighbours, they
count for less. Batches with more noise have smaller cosines in all pairs of a task,
c_ij = a_i a_j c, which looks like kinship of the others; so the advantage is what is beyond the
product that every task's mean implies. From two halves of lines, products are divided by the
reliability instead.

A promise needs p < .05 (one-sided t, Holm's correction over all pairs of a run), a cosine
above 0, an advantage above 0 in both halves of the data of every run, and at least half of the
best companion's: many differences are certain and too small to matter. So of runs whose tasks are
all alike, at most one in twenty promises anything.
"""

# T tasks, S steps, K components, B stretches of steps

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from gradvac.analysis import views
from gradvac.analysis.grouping import Groups, best_groups
from gradvac.analysis.record import Record
from gradvac.analysis.run import Run
from gradvac.analysis.similarities import Similarities, mean_where_known, weighty
from gradvac.analysis.statistics import LEAST, holm, without_factors
from gradvac.engine.components import DECODER, side_of

Matrix = NDArray[np.float64]

TRUST = (
    "How good is such advice? For ten small real languages, from English, the partner chosen by "
    "measured cosines brought 78 % of what the best of eight partners brought over the average "
    "one (chosen by kinship 47 %, by shared subwords 74 %); into English cosines chose no better "
    "than kinship. At equal compute, where companions take steps from the task itself, chosen ones "
    "helped small languages no more than random ones. The sweep that gradvac advise --out writes "
    "checks the advice on your tasks."
)
# What helped in the same table without gradients, and how far it is known.
LAST_FIFTH = (
    "What did help small languages at equal compute, from English: joint training for four fifths "
    "of the steps, and the last fifth divided among them, each trained alone (+3.1 BLEU on "
    "Tatoeba, +1.0 and +0.8 on the Bible). Into English no gain was shown (+0.3, interval -0.6 to "
    "+1.1). The other languages pay: they keep the joint model of four fifths of the steps "
    "(-0.7 BLEU, into English -1.3)."
)
_SIGNIFICANT = 0.05
_MOST_STRETCHES, _FEWEST_STRETCHES = 20, 4
_FEWEST_TASKS = 3  # with two there is nobody to be better than
_FEWEST_IN_GROUPS, _MOST_GROUPS = 4, 8
_FEWEST_TESTED = 7  # six can be shuffled into groups in too few ways for p < .05
_MOST_IN_GROUPS = 200  # for more, a search would take hours
_MOST_NAMED, _MOST_TASKS = 5, 12  # companions of a task, and tasks, that a sentence names
_PART_OF_BEST = 0.5
_ENOUGH = 0.9  # of the largest gain: then fewer groups, which share more
_NUM_PERMUTATIONS, _SEED = 199, 0
_FEW_STARTS, _STARTS_OF_TASKS = 20, 600  # for what is only compared


class Companion(NamedTuple):
    """Another task that a task could learn with; see the module for the numbers."""

    task: str
    predicted: float
    advantage: float
    reach: float
    promised: bool


@dataclass(frozen=True, eq=False)
class Advice:
    """Which tasks should learn together.

    Attributes:
        tasks: Their names.
        predicted: `[T, T]`; NaN where unknown, and on the diagonal.
        advantage: `[T, T]`: of task j as a companion of task i.
        reach: `[T, T]`; NaN where nothing is known of the noise.
        promised: `[T, T]`.
        groups: Tasks of every group; empty if none stand out.
        p_value: Of groups like these if tasks were all alike; NaN without a test.
        source: What it is read off.
    """

    tasks: tuple[str, ...]
    predicted: Matrix
    advantage: Matrix
    reach: Matrix
    promised: NDArray[np.bool_]
    groups: tuple[tuple[str, ...], ...]
    p_value: float
    source: str

    def companions(self, task: str) -> list[Companion]:
        """The others, best first; those of which nothing is known are left out."""
        row = self.tasks.index(task)
        order = np.argsort(-self.advantage[row], kind="stable")
        return [
            Companion(
                self.tasks[j],
                float(self.predicted[row, j]),
                float(self.advantage[row, j]),
                float(self.reach[row, j]),
                bool(self.promised[row, j]),
            )
            for j in order
            if j != row and not np.isnan(self.advantage[row, j])
        ]

    def left_out(self) -> list[tuple[str, str]]:
        """Promised companions that are in another group: (task, companion)."""
        where = {task: group for group in self.groups for task in group}
        return [
            (self.tasks[i], self.tasks[j])
            for i, j in np.argwhere(self.promised)
            if where and self.tasks[j] not in where[self.tasks[i]]
        ]


@dataclass(frozen=True, eq=False)
class _Evidence:
    """What one run says; each `[T, T]`.

    `error` is the standard error of `advantage`, `freedom` its degrees; NaN and 0 if unknown.
    `halves` are the advantage, `beyond` the similarity beyond what every task has with all, each in
    two halves of the data.
    """

    predicted: Matrix
    advantage: Matrix
    error: Matrix
    freedom: int
    halves: tuple[Matrix, Matrix]
    beyond: tuple[Matrix, Matrix]


def advise(
    runs: Sequence[Record | Similarities], *, num_groups: int | None = None, side: str | None = None
) -> Advice:
    """Say which tasks should learn together.

    Args:
        runs: Of every run (of the same tasks, such as other seeds) its record, or its similarities
            on different lines with both halves (`across`), which are better.
        num_groups: How many groups; None: the fewest whose gain is nearly the largest, if they can
            be told from chance at all.
        side: Of the model: "encoder", "decoder" or "shared"; None: the decoder, without one the
            whole model.

    Raises:
        ValueError: There is no run, or they are of different tasks.
    """
    if not runs:
        raise ValueError("runs: give at least one.")
    tasks = runs[0].tasks
    if any(run.tasks != tasks for run in runs):
        raise ValueError("runs: must be of the same tasks in the same order.")
    if len(tasks) < _FEWEST_TASKS:
        raise ValueError(
            f"Advice needs three or more tasks to choose from; tasks: {', '.join(tasks)}."
        )
    found = [_evidence(run, side) for run in runs]
    predicted, advantage = (
        np.mean([getattr(one, name) for one in found], axis=0)
        for name in ("predicted", "advantage")
    )
    error, freedom = _over_runs(found)
    with np.errstate(invalid="ignore", divide="ignore"):
        chance = student.sf(advantage / error, max(1, freedom))
    apart = ~np.eye(len(tasks), dtype=bool) & ~np.isnan(chance)
    certain = np.zeros_like(apart)
    certain[apart] = np.array(holm(chance[apart].tolist())) < _SIGNIFICANT
    best = np.nanmax(np.where(apart, advantage, -np.inf), axis=1, keepdims=True)
    halves = [half for one in found for half in one.halves]
    stable = np.all([half > 0 for half in halves], axis=0)
    # The noise of one run is in both of its halves, that of training; runs share nothing.
    single = list(found[0].beyond)
    two = single if len(found) == 1 else [np.mean(one.beyond, axis=0) for one in found]
    groups, p_value = _grouped(two[::2], two[1::2], num_groups, told=freedom > 0)
    return Advice(
        tasks,
        predicted,
        advantage,
        float(student.ppf(0.975, max(1, freedom))) * error,
        certain & stable & (predicted > 0) & (advantage >= np.maximum(_PART_OF_BEST * best, LEAST)),
        tuple(tuple(tasks[i] for i in group) for group in groups),
        p_value,
        _described(runs, side),
    )


def advise_runs(
    runs: Sequence[Run], *, num_groups: int | None = None, side: str | None = None
) -> Advice:
    """`advise` of run folders: by what was measured on halves of lines, else by their records."""
    sources = [views.two_halves(run) or run.record for run in runs]
    known = [source for source in sources if source is not None]
    if len(known) < len(sources):
        raise ValueError(
            f"{runs[sources.index(None)].path}: its similarities were measured once, which says "
            "nothing about their noise; run `gradvac similarity` again."
        )
    return advise(known, num_groups=num_groups, side=side)


def describe_advice(advice: Advice, names: Mapping[str, str]) -> list[str]:
    """What to do, in sentences that leave out what nobody would read; how far to trust it.

    Args:
        advice: What `advise` said.
        names: Task -> its name in a sentence; others by task name.
    """

    def named(tasks: Iterable[str]) -> str:
        return ", ".join(names.get(task, task) for task in tasks)

    told = []
    for task, row in zip(advice.tasks, advice.promised, strict=True):
        if row.any():
            best = [one.task for one in advice.companions(task) if one.promised]
            told.append(f"{named([task])} with {named(best[:_MOST_NAMED])}")
            told[-1] += _and_others(len(best) - _MOST_NAMED)
    rest = [task for task, row in zip(advice.tasks, advice.promised, strict=True) if not row.any()]
    others = _and_others(len(told) - _MOST_TASKS, "task")
    said = [f"Learn together: {'; '.join(told[:_MOST_TASKS])}{others}."] if told else []
    if rest:
        untested = np.isnan(advice.reach).all()
        why = ", for lack of independent records" if untested else " from chance"
        others = _and_others(len(rest) - _MOST_TASKS, "task")
        said.append(f"Cannot be told{why}: companions of {named(rest[:_MOST_TASKS])}{others}.")
    chance = "" if np.isnan(advice.p_value) else f" (p = {advice.p_value:.3f})"
    if advice.groups:
        parts = "; ".join(f"({n}) {named(group)}" for n, group in enumerate(advice.groups, 1))
        said.append(f"Groups for {len(advice.groups)} models{chance}: {parts}.")
        apart = [f"{named([task])} without {named([other])}" for task, other in advice.left_out()]
        if apart:
            others = _and_others(len(apart) - _MOST_TASKS, "pair")
            shown = ", ".join(apart[:_MOST_TASKS])
            said.append(f"These groups leave promised companions apart: {shown}{others}.")
    elif len(advice.tasks) > _MOST_IN_GROUPS:
        said.append(
            f"Groups are looked for among up to {_MOST_IN_GROUPS} tasks; --groups asks for more."
        )
    elif np.isnan(advice.p_value):
        said.append(
            f"Groups are not tested: that takes {_FEWEST_TESTED} tasks, all of whose pairs are "
            "known, and enough independent records."
        )
    else:
        why = "matter" if advice.p_value < _SIGNIFICANT else "are told from chance"
        said.append(f"No groups {why}{chance}: nothing here speaks against one model for all.")
    return [*said, TRUST, LAST_FIFTH]


def _and_others(num: int, what: str = "") -> str:
    noun = f"other {what}".strip()
    return f" and {num:,} {noun}{'s' if num > 1 else ''}" if num > 0 else ""


def _described(runs: Sequence[Record | Similarities], side: str | None) -> str:
    where = _side(runs[0].components, side) or "whole model"
    kinds = {"batches of training" if isinstance(run, Record) else "two halves of lines"
             for run in runs}  # fmt: skip
    seeds = f", {len(runs)} runs" if len(runs) > 1 else ""
    return f"{where}, {' and '.join(sorted(kinds))}{seeds}"


def _side(components: Sequence[str], side: str | None) -> str | None:
    if side is None and any(side_of(name) == DECODER for name in components):
        return DECODER
    return side


def _chosen(components: Sequence[str], side: str | None) -> list[bool]:
    chosen = weighty(components, _side(components, side))
    if not any(chosen):
        raise ValueError(f"side: no component is in {side!r}; there are {', '.join(components)}.")
    return chosen


def _evidence(run: Record | Similarities, side: str | None) -> _Evidence:
    if isinstance(run, Record):
        return _of_record(run, _chosen(run.components, side))
    if run.across is None:
        raise ValueError(
            "runs: these similarities were measured once, which says nothing about their noise; "
            "give those of different lines with both halves, or the record of training."
        )
    return _of_halves(run, _chosen(run.components, side))


def _middle(num: int) -> slice:
    """The middle half of the steps, all of them if there are few."""
    return slice(num // 4, num - num // 4) if num >= 4 * _FEWEST_STRETCHES else slice(None)


def _cosines(cosines: Matrix, first: Matrix, second: Matrix) -> Matrix:
    """Cosines of whole sides `[..., T, T]` from those of their components `[..., K, T, T]`.

    Args:
        cosines: [i, j] of one gradient of task i and another of task j.
        first: Lengths of the ones, `[..., K, T]`.
        second: Of the others.
    """
    products = np.nan_to_num(cosines * first[..., :, None] * second[..., None, :]).sum(axis=-3)
    lengths = [np.sqrt(np.nansum(norms**2, axis=-2)) for norms in (first, second)]
    scale = lengths[0][..., :, None] * lengths[1][..., None, :]
    whole: Matrix = np.divide(products, scale, out=np.full_like(products, np.nan), where=scale > 0)
    return whole


def _of_record(record: Record, chosen: list[bool]) -> _Evidence:
    norms = np.asarray(record.norms[:, chosen], np.float64)
    every = _cosines(np.asarray(record.similarity[:, chosen], np.float64), norms, norms)
    every = _without_diagonal(every[_middle(len(every))])
    num = min(_MOST_STRETCHES, len(every) // 2)
    mean = _mean(every)
    advantage = _beyond_product(mean)
    part = max(1, 2 * len(every) // 5)  # neighbours resemble each other: a gap between the two
    halves = _beyond_product(_mean(every[:part])), _beyond_product(_mean(every[-part:]))
    if num < _FEWEST_STRETCHES:
        return _Evidence(mean, advantage, np.full_like(mean, np.nan), 0, halves, halves)
    stretches = np.array_split(np.arange(len(every)), num)
    without = np.stack([_mean(np.delete(every, part, axis=0)) for part in stretches])
    single = num * advantage - (num - 1) * _beyond_product(without)  # the jackknife's pseudo-values
    error, counted = _error_of_mean(single)
    if counted < _FEWEST_STRETCHES:
        return _Evidence(mean, advantage, np.full_like(mean, np.nan), 0, halves, halves)
    return _Evidence(mean, advantage, error, int(counted) - 1, halves, halves)


def _error_of_mean(single: Matrix) -> tuple[Matrix, float]:
    """Standard error of a mean over stretches `[B, ...]`, and how many they count for.

    Neighbours that resemble each other count for less: B (1 - r) / (1 + r), with their correlation
    r over all pairs of tasks, corrected for the bias that a short series has.
    """
    num = len(single)
    centred = single - single.mean(axis=0)
    spread = (centred**2).sum(axis=0)
    known = spread > 0
    if not known.any():
        return np.full_like(spread, np.nan), 0.0
    r = float(((centred[1:] * centred[:-1]).sum(axis=0)[known] / spread[known]).mean())
    r = min(0.99, max(0.0, (num * r + 1) / (num - 3)))
    counted = num * (1 - r) / (1 + r)
    return np.sqrt(spread / (num - 1) / counted), counted


def _of_halves(measured: Similarities, chosen: list[bool]) -> _Evidence:
    """From the middle checkpoint: the lines are the same at all of them, and so is their noise."""
    assert measured.across is not None
    middle = int(np.abs(measured.steps - measured.steps.max() / 2).argmin())
    across = np.asarray(measured.across[middle, chosen], np.float64)
    if measured.half_norms is None:
        pooled = _mean(across)
    else:
        norms = np.asarray(measured.half_norms[middle, chosen], np.float64)  # [K, 2, T]
        pooled = _cosines(across, norms[:, 0], norms[:, 1])
    reliability = np.where(pooled.diagonal() > 0, pooled.diagonal(), np.nan)
    scale = np.sqrt(reliability[:, None] * reliability)
    pooled = _without_diagonal(pooled)
    # Two measurements of one thing show the noise; that of a reliability is measured once.
    variance = float(mean_where_known((pooled - pooled.T) ** 2, axis=(0, 1))) / 4
    predicted = (pooled + pooled.T) / 2 / scale
    relative = 1 / reliability[:, None] ** 2 + 1 / reliability**2
    of_pair = variance / scale**2 + predicted**2 * variance / 2 * relative
    others = _without_diagonal(of_pair)
    error = np.sqrt(of_pair + _mean_of_others(others) / max(1, len(pooled) - 2))
    one, other = (np.where(np.tri(len(pooled)), half.T, half) for half in (pooled, pooled.T))
    return _Evidence(
        predicted,
        _above_others(predicted),
        error,
        len(pooled) - 1,
        (_above_others(one / scale), _above_others(other / scale)),
        (_beyond_product(one), _beyond_product(other)),
    )


def _over_runs(found: Sequence[_Evidence]) -> tuple[Matrix, int]:
    """The standard error of the mean over runs, which differ by more than their own noise."""
    within = np.mean([one.error**2 for one in found], axis=0)
    freedom = min(one.freedom for one in found)
    if len(found) == 1:
        return np.sqrt(within), freedom
    between = np.var([one.advantage for one in found], axis=0, ddof=1)
    more = max(0.0, float(np.nanmean(between - within))) if not np.isnan(within).all() else 0.0
    return np.sqrt((within + more) / len(found)), freedom


def _mean(values: Matrix) -> Matrix:
    return np.asarray(mean_where_known(values, axis=0), np.float64)


def _without_diagonal(values: Matrix) -> Matrix:
    alone = np.eye(values.shape[-1], dtype=bool)
    return np.where(alone, np.nan, values)


def _mean_of_others(values: Matrix) -> Matrix:
    """[i, j]: the mean of row i without i and j, of a matrix with NaN on the diagonal."""
    known = ~np.isnan(values)
    total, count = np.nansum(values, axis=1)[:, None], known.sum(axis=1)[:, None]
    rest = np.where(count - known > 0, count - known, np.nan)
    others: Matrix = (total - np.nan_to_num(values)) / rest
    return others


def _above_others(values: Matrix) -> Matrix:
    """By how much j is above the other companions of i."""
    values = _without_diagonal(values)
    return values - _mean_of_others(values)


def _beyond_product(values: Matrix) -> Matrix:
    """What remains of cosines `[..., T, T]` beyond one factor per task, which noise can make."""
    return np.asarray(without_factors(values), np.float64)


def _grouped(
    first: Sequence[Matrix], second: Sequence[Matrix], num_groups: int | None, *, told: bool
) -> tuple[Groups, float]:
    """Groups by all data, and the p-value of what those of one half gain in the other.

    Under chance it is the same after the tasks of the other half have been shuffled.
    """
    halves = [_symmetric(np.mean(part, axis=0)) for part in (first, second) if len(part)]
    num = len(halves[0])
    if num_groups is None and not (told and _FEWEST_TESTED <= num <= _MOST_IN_GROUPS):
        return (), np.nan
    if num < _FEWEST_IN_GROUPS or any(np.isnan(half).any() for half in halves):
        if num_groups is not None:
            raise ValueError("num_groups: a pair of tasks is unknown, or there are fewer than 4.")
        return (), np.nan
    numbers = range(2, min(num // 2, _MOST_GROUPS) + 1) if num_groups is None else [num_groups]
    starts = max(4, min(_FEW_STARTS, _STARTS_OF_TASKS // num))
    by_half = [[best_groups(half, n, starts=starts) for n in numbers] for half in halves]
    weights = np.array([[_weights(groups, num) for groups in one] for one in by_half])

    def gains(order: NDArray[np.int64]) -> Matrix:
        back = np.argsort(order)
        other = halves[1][np.ix_(order, order)], halves[0][np.ix_(back, back)]
        total: Matrix = (weights * np.array(other)[:, None]).sum(axis=(0, 2, 3))
        return total

    draw = np.random.default_rng(_SEED)
    found = gains(np.arange(num))
    by_chance = [gains(draw.permutation(num)).max() for _ in range(_NUM_PERMUTATIONS)]
    p_value = (1 + sum(g >= found.max() for g in by_chance)) / (1 + _NUM_PERMUTATIONS)
    each = found.max() / (2 * num)  # of both halves
    if num_groups is None and not (p_value < _SIGNIFICANT and each >= LEAST):
        return (), p_value
    number = next(
        n for n, gain in zip(numbers, found, strict=True) if gain >= _ENOUGH * found.max()
    )
    return best_groups(np.mean(halves, axis=0), number), p_value


def _weights(groups: Groups, num: int) -> Matrix:
    """`[T, T]`, whose sum of products with gains is what tasks gain within groups."""
    weights = np.zeros((num, num))
    for group in groups:
        weights[np.ix_(group, group)] = 1 / max(1, len(group) - 1)
    np.fill_diagonal(weights, 0.0)
    return weights


def _symmetric(values: Matrix) -> Matrix:
    both = (values + values.T) / 2
    np.fill_diagonal(both, 0.0)
    return both
