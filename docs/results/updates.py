"""What rules did to the update, from the records of runs."""

# S steps, K components, T tasks

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.record import Record

_LONGER = (
    *("gradvac", "norm", "frozen", "many_gradvac", "many_norm", "many_frozen"),
    *("many_direction", "many_length", "many_without_noise"),
)
_STEADY = 0.02  # lengths that vary less do not depend on anything
_MEASURED = ("gradvac", "long_gradvac", "large_batches_gradvac", "preconditioned", "many_gradvac")


def update_table(records: Mapping[str, Sequence[Record]]) -> str:
    """Means over the records of all runs of a method, in Markdown.

    Args:
        records: Method -> the records of its runs.
    """
    lines = [
        "# What rules did to the update",
        "",
        "Means over components, steps and scored runs; targets are those of the last third of",
        "training, of pairs that the rule may alter. Weights: of task gradients in the update, 1",
        "in the plain sum; *vary*: their deviation from step to step, as a share of the mean.",
        "",
        "| method | cosine to the plain sum | length, of the plain sum | pairs altered | cosine "
        "between tasks | target | weight of tasks it may alter | of the others | weights vary |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in records.items():
        if own:
            means = np.mean([_update(record) for record in own], axis=0)
            cosine, ratio, active, similar, target, weight, others, varies = means
            numbers = [f"{cosine:.4f}", f"{ratio:.3f}", f"{active:.0%}", f"{similar:.3f}"]
            numbers += [_or_none(target), f"{weight:.3f}", _or_none(others), f"{varies:.0%}"]
            lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _update(record: Record) -> tuple[float, ...]:
    """The numbers of a row, of one run."""
    altered = np.isin(np.arange(len(record.tasks)), record.eligible())
    pairs = ~np.eye(len(record.tasks), dtype=bool)
    own = pairs & altered[:, None]
    last = record.steps > record.steps[-1] * 2 / 3
    weights = record.weights.mean((0, 1))  # [T]
    varies = record.weights[last].std(0) / record.weights[last].mean(0)
    return (
        float(np.mean(record.update_cosine)),
        float(np.mean(record.update_ratio)),
        float(np.mean(record.active[:, :, own])),
        float(np.mean(record.similarity[:, :, pairs])),
        float(np.mean(record.target[last][:, :, own])),
        float(np.mean(weights[altered])),
        float(np.mean(weights[~altered])) if not altered.all() else np.nan,
        float(varies.mean()),
    )


def noise_table(records: Mapping[str, Sequence[Record]]) -> str:
    """How far cosines of batches say something about pairs of tasks, in Markdown.

    Args:
        records: Method -> the records of its runs.
    """
    lines = [
        "| method | mean cosine | from step to step | between pairs | of the variance | "
        "alike in another seed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in _MEASURED:
        own = [_cosines(record) for record in records.get(name, ())]
        if len(own) > 1:
            means = np.array([cosines.mean(0) for cosines in own])  # [runs, K, pairs]
            noise = np.sqrt(np.mean([cosines.var(0, ddof=1) for cosines in own]))
            apart = means - means.mean(-1, keepdims=True)
            signal = np.sqrt(apart.mean(0).var(-1, ddof=1).mean())
            seeds = np.corrcoef(apart.reshape(len(own), -1))[np.triu_indices(len(own), 1)]
            share = signal**2 / (signal**2 + noise**2)
            numbers = [f"{means.mean():.3f}", f"{noise:.3f}", f"{signal:.3f}", f"{share:.0%}"]
            lines.append(f"| {name} | {' | '.join(numbers)} | {seeds.mean():.2f} |")
    return "\n".join(lines) + "\n"


def _cosines(record: Record) -> NDArray[np.float32]:
    """Cosines of pairs in the last third of training, by step and component."""
    last = record.steps > record.steps[-1] * 2 / 3
    pairs = np.triu_indices(len(record.tasks), 1)
    cosines: NDArray[np.float32] = record.similarity[last][:, :, pairs[0], pairs[1]]
    return cosines


def _or_none(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"


def length_table(records: Mapping[str, Sequence[Record]]) -> str:
    """How much longer than plain sums updates are, and when, in Markdown.

    Args:
        records: Method -> the records of its runs.
    """
    lines = [
        "| method | length, of the plain sum | that varies by | with the cosine of the batch | "
        "lengths of plain sums vary by | of updates |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in _LONGER:
        if own := records.get(name):
            ratio, varies, correlation, sums, updates = np.mean([_lengths(r) for r in own], axis=0)
            told = f"r = {correlation:+.2f}" if varies > _STEADY else ""
            cells = [name, f"{ratio:.2f}", f"{varies:.0%}", told, f"{sums:.0%}", f"{updates:.0%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _lengths(record: Record) -> tuple[float, ...]:
    """After the first quarter of training; deviations over steps as shares of the mean."""
    later = record.steps > record.steps[-1] / 4
    ratio, norms = record.update_ratio[later], record.norms[later]  # [S, K], [S, K, T]
    pairs = ~np.eye(len(record.tasks), dtype=bool)
    similarity = np.where(pairs, record.similarity[later], 1.0)
    sums = np.sqrt(np.einsum("skij,ski,skj->sk", similarity, norms, norms).clip(min=0.0))
    cosines = similarity[:, :, pairs].mean(-1)
    varies, sums_vary, updates_vary = (x.std(0) / x.mean(0) for x in (ratio, sums, sums * ratio))
    both = zip(ratio.T, cosines.T, strict=True)
    correlations = [np.corrcoef(a, b)[0, 1] for a, b in both] if varies.min() > 0 else [np.nan]
    numbers = (ratio, varies, correlations, sums_vary, updates_vary)
    return tuple(float(np.mean(number)) for number in numbers)
