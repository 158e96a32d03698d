"""Losses without an aligner, whose gradients torch itself averages over processes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, nn

from gradvac.lab.training.recipe import BatchT, Recipe, StepLosses
from gradvac.models import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LossesOf = Callable[[BatchT, bool], StepLosses]


def losses_of(recipe: Recipe[BatchT], group: "ProcessGroup | None") -> LossesOf[BatchT]:
    """The losses of a batch, by (batch, whether it is the last of its step).

    Args:
        recipe: Computes them.
        group: Processes over which gradients are averaged when the last batch of a step is
            differentiated; None: they are not averaged, or an aligner does it.
    """
    if group is not None:
        return _Averaged(recipe, group)
    model: Any = recipe.model

    def losses(batch: BatchT, is_last: bool) -> StepLosses:
        if is_sharded(model):  # averages by itself, unless an aligner does
            model.set_requires_gradient_sync(is_last)
        return recipe.losses(batch)

    return losses


class _Averaged(Generic[BatchT]):
    def __init__(self, recipe: Recipe[BatchT], group: "ProcessGroup") -> None:
        from torch.nn.parallel import DistributedDataParallel

        self._losses = _Losses(recipe)
        # Buffers are not statistics (`refuse_batch_norm`) but tables that may grow with the
        # data, differently in every process.
        buffers = [name for name, _ in self._losses.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._losses, buffers)
        self._replica = DistributedDataParallel(
            self._losses, process_group=group, find_unused_parameters=True
        )

    def __call__(self, batch: BatchT, is_last: bool) -> StepLosses:
        if is_last:
            losses = self._replica(batch)
        else:
            with self._replica.no_sync():
                losses = self._replica(batch)
        step_losses = self._losses.found
        return StepLosses(losses, step_losses.tasks, step_losses.shown)


class _Losses(nn.Module):
    """A recipe's losses as the forward pass of a module, which is what torch replicates."""

    found: StepLosses

    def __init__(self, recipe: Recipe[Any]) -> None:
        super().__init__()
        self.model = recipe.model
        self._of = recipe.losses
        # The rows of one process may leave out a parameter that others need. Torch allows that,
        # but warns if it never happens; with this parameter it always does.
        like = next(recipe.model.parameters())
        self.left_out = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def forward(self, batch: Any) -> Tensor:
        self.found = self._of(batch)
        return self.found.losses
