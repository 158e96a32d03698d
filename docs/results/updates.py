"""What rules did to the update, from the records of runs."""

# S steps, K components, T tasks

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradvac.analysis.record import Record

_LONGER = ("gradvac", "norm", "frozen", "many_gradvac", "many_norm", "many_frozen")
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
    """How long updates are from step to step, and when they are longest, in Markdown.

    Args:
        records: Method -> the records of its runs.
    """
    lines = [
        "| method | length, of the plain sum | varies from step to step | with the cosine of the "
        "batch | cosine to the plain sum |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in _LONGER:
        if own := records.get(name):
            ratio, varies, correlation, cosine = np.mean([_lengths(r) for r in own], axis=0)
            told = f"r = {correlation:+.2f}" if varies > _STEADY else ""
            cells = [name, f"{ratio:.2f}", f"{varies:.0%}", told, f"{cosine:.4f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _lengths(record: Record) -> tuple[float, ...]:
    """After the first quarter of training: means over components."""
    later = record.steps > record.steps[-1] / 4
    ratio = record.update_ratio[later]  # [S, K]
    pairs = ~np.eye(len(record.tasks), dtype=bool)
    cosines = record.similarity[later][:, :, pairs].mean(-1)
    varies = ratio.std(0) / ratio.mean(0)
    both = zip(ratio.T, cosines.T, strict=True)
    correlations = [np.corrcoef(a, b)[0, 1] for a, b in both] if varies.min() > 0 else [np.nan]
    return (
        float(ratio.mean()),
        float(varies.mean()),
        float(np.mean(correlations)),
        float(record.update_cosine[later].mean()),
    )
