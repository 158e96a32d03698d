"""Constant weights by component: another rule's average. Does adapting matter, or the average?

Used by the sweeps `controls`, `twin`, `one_gpu` and `one_gpu_many`, as in

    "align.rule" = "studies/frozen.py:Frozen"
    "align.options.run" = "{run:gradvac}"           # the GradVac run of the same seed
"""

# S recorded steps, K components, T tasks

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradvac import Rule, Weighing
from gradvac.analysis.record import read_record
from gradvac.lab.runs import RunFolder

Weights = Mapping[str, Mapping[str, float]]


class Frozen(Rule):
    """Constant weights by component and task: the average of a rule that no longer adapts.

    `Sum` has one weight per task for all components.

    Args:
        component_weights: Component -> task -> weight, for every component and task.
        run: Instead: a run folder, whose recorded weights are averaged once the rule is used.
    """

    name = "frozen"
    does = "weighs the tasks by constants of each component, such as another rule's means"

    def __init__(
        self, component_weights: Weights | None = None, run: str | Path | None = None
    ) -> None:
        if (component_weights is None) == (run is None):
            raise ValueError("component_weights, run: give one of the two.")
        self.component_weights, self.run = component_weights, run

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        weights = self.component_weights
        if weights is None:
            assert self.run is not None
            weights = mean_weights(Path(self.run))
        missing = [name for name in components if name not in weights]
        if missing or len(components) < len(weights):
            what = f"{missing[0]!r} has none" if missing else "there are more than components"
            raise ValueError(
                f"component_weights: {what}; the components are {', '.join(components[:6])}: take "
                "weights from a run of the same model and granularity."
            )
        for name, of_tasks in weights.items():
            if set(of_tasks) != set(tasks):
                wrong = sorted(set(of_tasks) ^ set(tasks))[0]
                raise ValueError(f"component_weights: {name}: only one side has task {wrong!r}.")
        super().bind(tasks, components)
        self._weights = torch.tensor(
            [[weights[name][task] for task in tasks] for name in components], dtype=torch.float64
        )

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        self._weights = self._weights.to(gram)
        return self.answer(gram, self.take(self._weights, components)[:, self.index])

    def weigh_alone(self, components: Sequence[int], gram: Tensor) -> Weighing:
        return self.weigh_finite(components, gram)  # constants hold whoever else is present

    def __repr__(self) -> str:
        return f"Frozen({self.run or self.component_weights})"


def mean_weights(run: Path) -> dict[str, dict[str, float]]:
    """Component -> task -> mean weight over all recorded steps of a run.

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
