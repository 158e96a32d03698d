"""Joint training: the plain sum, or a weighted one."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from gradvac.rules.rule import Rule, Weighing, check_names


class Sum(Rule):
    """Joint training, the baseline: the update is sum_i w_i g_i with constant weights.

    `Sum()` equals `losses.sum().backward()`. Tuned weights are the baseline every method has to
    beat.

    Args:
        weights: Task name -> weight; tasks not named have weight 1. None: all 1.

    Examples:
        >>> from gradvac import Sum
        >>> rule = Sum(weights={"en-hi": 0.5})
    """

    name = "sum"
    does = "adds the gradients up, plain or weighted: joint training"
    task_options = ("weights",)

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        if not isinstance(weights, Mapping | None):
            raise ValueError(f"weights: must be a mapping task -> weight, got {weights!r}.")
        self.weights = dict(weights or {})
        for task, weight in self.weights.items():
            if not (isinstance(weight, Real) and math.isfinite(weight)):
                raise ValueError(f"weights: {task!r} must have a finite weight, got {weight!r}.")

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        check_names("weights", list(self.weights), tasks)
        super().bind(tasks, components)
        self._all = torch.tensor(
            [float(self.weights.get(task, 1.0)) for task in self.tasks], dtype=torch.float64
        )

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:  # noqa: ARG002
        if not self.weights:
            return self.answer(gram)
        self._all = self._all.to(gram)
        return self.answer(gram, self._all[self.index].expand(gram.shape[:-1]))

    def weigh_alone(self, components: Sequence[int], gram: Tensor) -> Weighing:
        return self.weigh_finite(
            components, gram
        )  # a constant weight holds whoever else is present

    def __repr__(self) -> str:
        return f"Sum(weights={self.weights})" if self.weights else "Sum()"
