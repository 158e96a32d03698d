"""A rule's mean weights, read from the record of a run: does adapting matter, or the average?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradvac.analysis.record import read_record
from gradvac.lab.runs import RunFolder


def mean_weights(run: Path) -> dict[str, dict[str, float]]:
    """Component -> task -> mean weight over all recorded steps, for the rule `frozen`.

    Raises:
        ValueError: The run recorded nothing, or a task never had a weight in a component.
    """
    path = RunFolder(run).record
    if not path.is_file():
        raise ValueError(
            f"{run}: has no {path.name} to take mean weights from; train it with "
            "train.record_every above 0 and a rule."
        )
    record = read_record(path)
    known = ~np.isnan(record.weights)  # [S, K, T]
    counts = known.sum(0)
    if not counts.all():
        component, task = np.argwhere(counts == 0)[0]
        raise ValueError(
            f"{run}: {record.tasks[task]} has no weight in {record.components[component]} at any "
            "recorded step; train longer, or record more often (train.record_every)."
        )
    means = np.where(known, record.weights, 0.0).sum(0, dtype=np.float64) / counts
    return {
        component: {
            task: round(float(value), 6) for task, value in zip(record.tasks, row, strict=True)
        }
        for component, row in zip(record.components, means, strict=True)
    }
