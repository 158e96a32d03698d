"""What rules did to the update, from the records of runs."""

# T tasks

from collections.abc import Mapping, Sequence

import numpy as np

from gradvac.analysis.record import Record


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
        "in the plain sum.",
        "",
        "| method | cosine to the plain sum | length, of the plain sum | pairs altered | cosine "
        "between tasks | target | weight of tasks it may alter | of the others |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, own in records.items():
        if own:
            means = np.mean([_update(record) for record in own], axis=0)
            cosine, ratio, active, similar, target, weight, others = means
            numbers = [f"{cosine:.4f}", f"{ratio:.3f}", f"{active:.0%}", f"{similar:.3f}"]
            numbers += [_or_none(target), f"{weight:.3f}", _or_none(others)]
            lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def _update(record: Record) -> tuple[float, ...]:
    """The numbers of a row, of one run."""
    altered = np.isin(np.arange(len(record.tasks)), record.eligible())
    pairs = ~np.eye(len(record.tasks), dtype=bool)
    own = pairs & altered[:, None]
    last = record.steps > record.steps[-1] * 2 / 3
    weights = record.weights.mean((0, 1))  # [T]
    return (
        float(np.mean(record.update_cosine)),
        float(np.mean(record.update_ratio)),
        float(np.mean(record.active[:, :, own])),
        float(np.mean(record.similarity[:, :, pairs])),
        float(np.mean(record.target[last][:, :, own])),
        float(np.mean(weights[altered])),
        float(np.mean(weights[~altered])) if not altered.all() else np.nan,
    )


def _or_none(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"
