"""Similarities without the noise of a batch, from two half-batches of every task."""

# K components, T tasks present, L of their halves

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvac import gram as geometry
from gradvac.devices import index_on
from gradvac.hints import some
from gradvac.rules._around import Around
from gradvac.rules._pairwise import Pairwise
from gradvac.rules._rule import Rule, Weighing

_LEAST_SIGNAL = 1e-2  # of a squared length; what looks like less is taken for this much


def halves_of(tasks: Sequence[str]) -> list[str]:
    """The task names for an aligner with `Halves`: two for each task, next to each other."""
    return [f"{task} ({half} of 2)" for task in tasks for half in (1, 2)]


def _whole(halves: Sequence[str]) -> list[str]:
    return [name.removesuffix(" (1 of 2)") for name in halves[::2]]


class Halves(Around):
    """A pairwise rule that sees lengths and similarities without the noise of the batch.

    The gradient of a small batch is mostly noise, which adds to its length but not to its product
    with another task's gradient, so cosines measure the size of the batch. The noise of two
    half-batches is independent, so 4 <a, b> is the squared length of a + b without it. The aligner
    treats the halves as tasks (`halves_of`), and both halves of a task get the task's weight. A
    task with only one half in the batch keeps its raw length; at least a hundredth of a squared
    length counts as signal.

    Args:
        rule: `GradVac`, `PCGrad` or a `Control`.

    Example:
        >>> from gradvac import GradVac, Halves
        >>> rule = Halves(GradVac(beta=1e-2))
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        if not isinstance(self.innermost, Pairwise):
            raise ValueError(
                f"rule: {type(self.innermost).__name__} is not about similarities of pairs; take "
                "GradVac, PCGrad or Control."
            )

    def bind(self, tasks: Sequence[str], components: Sequence[str]) -> None:
        if list(tasks) != halves_of(_whole(tasks)):
            raise ValueError(
                "tasks: this rule takes the halves of tasks, as gradvac.rules.halves_of(tasks) "
                f"names them, got {some(tasks)}."
            )
        super().bind(tasks, components)

    def tasks_within(self) -> Sequence[str]:
        return _whole(self.tasks)

    def begin(self, present: Sequence[int], losses: Tensor) -> None:
        super().begin(present, losses)
        owners = [position // 2 for position in present]
        whole = list(dict.fromkeys(owners))
        self._task_of_half = index_on([whole.index(owner) for owner in owners], losses.device)
        total = losses.new_zeros(len(whole)).index_add(0, self._task_of_half, losses)
        self.rule.begin(whole, total)

    def weigh(self, components: Sequence[int], gram: Tensor) -> Weighing:
        gram = gram.to(geometry.working_dtype(gram.device))
        task_of_half = self._task_of_half
        weighing = self.rule.weigh(components, self._without_noise(gram))
        self.finite = self.rule.finite
        rows, columns = task_of_half[:, None], task_of_half
        return Weighing(
            weighing.weights[:, task_of_half],
            weighing.target[:, rows, columns],
            weighing.active[:, rows, columns],
        )

    def _without_noise(self, gram: Tensor) -> Tensor:
        """Gram matrices of whole tasks `[K, T, T]` of those of halves `[K, L, L]`."""
        task_of_half, num = self._task_of_half, len(self.rule.present)
        rows = gram.new_zeros(len(gram), num, gram.shape[-1]).index_add(1, task_of_half, gram)
        whole = gram.new_zeros(len(gram), num, num).index_add(2, task_of_half, rows)
        squares = whole.diagonal(dim1=-2, dim2=-1)
        within = gram.new_zeros(len(gram), num)
        within = within.index_add(1, task_of_half, gram.diagonal(dim1=-2, dim2=-1))
        # ||a + b||^2 - ||a||^2 - ||b||^2 = 2 <a, b>; 0 if there is one half, or one is empty.
        signal = 2.0 * (squares - within)
        is_split = self._is_split(gram)
        signal = torch.where(is_split, signal.maximum(_LEAST_SIGNAL * squares), squares)
        return whole + torch.diag_embed(signal - squares)

    def _is_split(self, gram: Tensor) -> Tensor:
        """Where both halves of a task have a gradient, bool `[K, T]`."""
        has_any = (gram.diagonal(dim1=-2, dim2=-1) > 0).to(gram.dtype)
        counted = gram.new_zeros(len(gram), len(self.rule.present))
        return counted.index_add(1, self._task_of_half, has_any) > 1

    def __repr__(self) -> str:
        return f"Halves({self.rule})"
