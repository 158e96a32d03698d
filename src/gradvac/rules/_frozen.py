"""Constant weights by component: another rule's average, frozen."""

# K components, T tasks

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradvac.devices import index_on
from gradvac.rules._rule import Rule, Weighing, check_names


class Frozen(Rule):
    """Constant weights by component and task: the average of a rule that no longer adapts.

    `gradvac sweep` takes them from the record of a run of that rule; `Sum` has one weight per task
    for all components.

    Args:
        component_weights: Component -> task -> weight, for every component and task.

    Example:
        >>> from gradvac import Frozen
        >>> rule = Frozen({"encoder": {"en-fr": 1.0, "en-hi": 1.2}})
    """

    name = "frozen"
    does = "weighs the tasks by constants of each component, such as another rule's means"

    def __init__(self, component_weights: Mapping[str, Mapping[str, float]]) -> None:
        self.component_weights = {
            name: dict(weights) for name, weights in component_weights.items()
        }

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        missing = [name for name in components if name not in self.component_weights]
        if missing or len(components) < len(self.component_weights):
            what = f"{missing[0]!r} has none" if missing else "there are more than components"
            raise ValueError(
                f"component_weights: {what}; the components are {', '.join(components[:6])}: take "
                "weights from a run of the same model and granularity."
            )
        for name, weights in self.component_weights.items():
            check_names(f"component_weights: {name}", list(weights), tasks)
            absent = [task for task in tasks if task not in weights]
            if absent:
                raise ValueError(f"component_weights: {name}: there is none for {absent[0]!r}.")
        super().bind(tasks, components)
        self._all = torch.tensor(
            [[self.component_weights[name][task] for task in tasks] for name in components],
            dtype=torch.float64,
        )

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        self._asked = components
        return super().weigh(components, gram)

    def weigh_alone(self, gram: Tensor) -> Weighing:
        return self.weigh_finite(self._asked, gram)  # constants hold whoever else is present

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        self._all = self._all.to(gram)
        chosen = index_on(components, gram.device)[:, None]
        return self.answer(gram, self._all[chosen, self.index])

    def __repr__(self) -> str:
        return f"Frozen({len(self.component_weights)} components)"
