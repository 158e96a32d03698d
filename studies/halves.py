"""Similarities without the noise of a batch, from two half-batches of every task.

The sweeps of the results used it through an option of translation runs, which divided every task's
rows in two. Now the caller divides them:

    aligner = Aligner(model, halves_of(tasks), Halves(GradVac()))
    aligner.backward(losses, in_halves(tasks_of_rows))      # task t -> 2 t and 2 t + 1 in turn
"""

# K components, T tasks present, L of their halves, B rows

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradvac import GradVac, Rule, Weighing

_LEAST_SIGNAL = 1e-2  # of a squared length; what looks like less is taken for this much


def halves_of(tasks: Sequence[str]) -> list[str]:
    """The task names for an aligner with `Halves`: "fr#a" and "fr#b" for "fr"."""
    return [f"{task}#{half}" for task in tasks for half in "ab"]


def in_halves(tasks_of_rows: Tensor) -> Tensor:
    """The half of every row, `[B]`: the rows of a task are dealt to its halves in turn."""
    same = tasks_of_rows[:, None] == tasks_of_rows
    earlier = same.tril(-1).sum(1)  # rows of the same task before this one
    return 2 * tasks_of_rows + earlier % 2


class Halves(Rule):
    """A pairwise rule that sees lengths and similarities without the noise of the batch.

    The gradient of a small batch is mostly noise, which adds to its length but not to its product
    with another task's gradient, so cosines measure the size of the batch. The noise of two
    half-batches is independent, so 4 <a, b> is the squared length of a + b without it. The aligner
    treats the halves as tasks (`halves_of`), and both halves of a task get the task's weight. A
    task with only one half in the batch keeps its raw length; at least a hundredth of a squared
    length counts as signal.

    Args:
        rule: `GradVac`, `PCGrad` or another rule about the similarity of pairs; None: `GradVac()`.
    """

    name = "halves"
    does = "measures similarities without the noise of the batch, for another rule"

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = GradVac() if rule is None else rule

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        whole = [name.removesuffix("#a") for name in tasks[::2]]
        if list(tasks) != halves_of(whole):
            raise ValueError(
                "tasks: this rule takes the halves of tasks, as halves_of(tasks) names them, got "
                f"{', '.join(tasks)}."
            )
        super().bind(tasks, components)
        self.rule.bind(whole, components)

    def begin(self, present: Sequence[int], losses: Tensor) -> None:
        super().begin(present, losses)
        owners = [half // 2 for half in present]
        whole = list(dict.fromkeys(owners))
        self._task_of_half = torch.tensor([whole.index(owner) for owner in owners])
        self._task_of_half = self._task_of_half.to(losses.device)
        total = losses.new_zeros(len(whole)).index_add(0, self._task_of_half, losses)
        self.rule.begin(whole, total)

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        task_of_half = self._task_of_half
        weighing = self.rule.weigh(components, self._without_noise(gram.double()))
        self.finite = self.rule.finite
        rows, columns = task_of_half[:, None], task_of_half
        return Weighing(
            weighing.weights[:, task_of_half],
            weighing.target[:, rows, columns],
            weighing.active[:, rows, columns],
        )

    def weigh_finite(self, components: Sequence[int], gram: Tensor) -> Weighing:
        return self.weigh(components, gram)

    def _without_noise(self, gram: Tensor) -> Tensor:
        """Gram matrices of tasks `[K, T, T]` from those of their halves `[K, L, L]`."""
        task_of_half, num = self._task_of_half, len(self.rule.present)
        rows = gram.new_zeros(len(gram), num, gram.shape[-1]).index_add(1, task_of_half, gram)
        whole = gram.new_zeros(len(gram), num, num).index_add(2, task_of_half, rows)
        squares = whole.diagonal(dim1=-2, dim2=-1)
        of_halves = gram.diagonal(dim1=-2, dim2=-1)
        within = gram.new_zeros(len(gram), num).index_add(1, task_of_half, of_halves)
        has_gradient = (of_halves > 0).to(gram.dtype)
        num_halves = gram.new_zeros(len(gram), num).index_add(1, task_of_half, has_gradient)
        # ||a + b||^2 - ||a||^2 - ||b||^2 = 2 <a, b>; 0 if there is one half, or one is empty.
        signal = (2.0 * (squares - within)).maximum(_LEAST_SIGNAL * squares)
        return whole + torch.diag_embed(torch.where(num_halves > 1, signal, squares) - squares)

    def commit(self) -> None:
        self.rule.commit()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"of_tasks": self.rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state["of_tasks"])

    def __repr__(self) -> str:
        return f"Halves({self.rule})"
