"""Similarities without the noise of a batch, from two half-batches of every task.

Used by the sweeps `controls`, `one_gpu` and `one_gpu_many`, as in

    "align.rule" = "studies/halves.py:Halves"
    "align.options" = { vaccinated = "low" }
"""

# K components, T tasks present

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac import Rule, Weighing, rule_named

_LEAST_SIGNAL = 1e-2  # of a squared length; what looks like less is taken for this much


class Halves(Rule):
    """A pairwise rule that sees lengths and similarities without the noise of the batch.

    The gradient of a small batch is mostly noise, which adds to its length but not to its product
    with another task's gradient, so cosines measure the size of the batch. The noise of two
    half-batches is independent, so 4 <a, b> is the squared length of a + b without it. A task with
    only one half in the batch keeps its raw length; at least a hundredth of a squared length counts
    as signal.

    Args:
        rule: "gradvac", "pcgrad" or another rule about the similarity of pairs; or one that is made
            already, and takes none of the other arguments.
        vaccinated: Names of the tasks whose gradients are altered; None: all.
        seed: Seed of the random order.
    """

    name = "halves"
    does = "measures similarities without the noise of the batch, for another rule"
    task_options = ("vaccinated",)
    parts_per_task = 2

    def __init__(
        self,
        rule: Rule | str = "gradvac",
        vaccinated: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(rule, str):
            rule = rule_named(rule, vaccinated=vaccinated, seed=seed)
        self.rule = rule
        self.vaccinated: Sequence[str] | None = getattr(rule, "vaccinated", None)  # for records

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        super().bind(tasks, components)
        self.rule.bind(tasks, components)

    def start_step(self, present: Sequence[int], losses: Tensor) -> None:
        super().start_step(present, losses)
        self.rule.start_step(present, losses)

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        weighing = self.rule.weigh(components, _without_noise(gram.double()))
        self.finite = self.rule.finite
        return weighing

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        return self.weigh(components, gram)

    def commit(self) -> None:
        self.rule.commit()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"of_tasks": self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state["of_tasks"])

    def __repr__(self) -> str:
        return f"Halves({self.rule})"


def _without_noise(gram: Tensor) -> Tensor:
    """Gram matrices of tasks `[K, T, T]` from those of their halves `[K, 2 T, 2 T]`."""
    num = gram.shape[-1] // 2
    of_tasks = gram.view(len(gram), num, 2, num, 2).sum((2, 4))
    squares = of_tasks.diagonal(dim1=-2, dim2=-1)
    of_halves = gram.diagonal(dim1=-2, dim2=-1).unflatten(-1, (num, 2))
    # ||a + b||^2 - ||a||^2 - ||b||^2 = 2 <a, b>
    signal = (2.0 * (squares - of_halves.sum(-1))).maximum(_LEAST_SIGNAL * squares)
    has_both = (of_halves > 0).all(-1)
    return of_tasks + torch.diag_embed(torch.where(has_both, signal, squares) - squares)
