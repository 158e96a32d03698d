"""Task gradients that are stored, `[T, P]`, and added up over micro-batches."""

# K components, T tasks, P parameters of a component

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradvac.engine.fold._metric import Metric
from gradvac.engine.fold._update import Weigh, add_to_grad
from gradvac.engine.kernels import combine, gram


class Stored:
    """Task gradients by leaf and task, and plain gradients of leaves that are not the model's.

    Args:
        storage_dtype: Of task gradients; None: that of each parameter.
        offload: Store them in host memory; each component visits the device twice.
        metric: What Gram matrices see of task gradients; None: they see them as they are.
    """

    def __init__(
        self,
        *,
        storage_dtype: torch.dtype | None = None,
        offload: bool = False,
        metric: Metric | None = None,
    ) -> None:
        self._dtype, self._offload, self._metric = storage_dtype, offload, metric
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._gradients: dict[Tensor, dict[int, Tensor]] = {}
        self._outside: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients or self._outside)

    def add(self, leaf: Tensor, by_task: Mapping[int, Tensor]) -> None:
        """Add to the task gradients of a leaf.

        Never in place: a gradient may share memory with another leaf's.
        """
        stored = self._gradients.setdefault(leaf, {})
        for task, gradient in by_task.items():
            device = torch.device("cpu") if self._offload else gradient.device
            is_kept = self._dtype is None or gradient.is_complex()  # it has no narrow dtypes
            gradient = gradient.to(device, gradient.dtype if is_kept else self._dtype)
            stored[task] = stored[task] + gradient if task in stored else gradient

    def add_outside(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add to plain gradients."""
        for leaf, gradient in gradients.items():
            earlier = self._outside.get(leaf)
            self._outside[leaf] = gradient if earlier is None else earlier + gradient

    def take(self, leaf: Tensor) -> dict[int, Tensor]:
        """Hand out the task gradients of a leaf; they are no longer here."""
        return self._gradients.pop(leaf, {})

    def stacked(self, parameter: Tensor, tasks: Sequence[int]) -> Tensor | None:
        """Task gradients of a parameter on its device, `[T, P]`; None if no task reached it."""
        stored = self._gradients.get(parameter)
        if not stored:
            return None
        some = next(iter(stored.values()))
        stacked = some.new_zeros(len(tasks), parameter.numel(), device=parameter.device)
        for row, task in zip(stacked, tasks, strict=True):
            if task in stored:
                row.copy_(stored[task].reshape(-1), non_blocking=True)
        return stacked

    def fold(
        self, members: Sequence[Sequence[nn.Parameter]], tasks: Sequence[int], weigh: Weigh
    ) -> None:
        """Gram -> weights -> `.grad`, for all components at once; nothing stays here."""
        grams = []
        for parameters in members:
            stacks = ((parameter, self.stacked(parameter, tasks)) for parameter in parameters)
            blocks = [gram(self._measured(p, stack)) for p, stack in stacks if stack is not None]
            empty = parameters[0].new_zeros(len(tasks), len(tasks), dtype=torch.float64)
            grams.append(torch.stack(blocks).sum(0) if blocks else empty)
        weights = weigh(range(len(grams)), torch.stack(grams))
        for component_weights, parameters in zip(weights, members, strict=True):
            for parameter in parameters:
                stacked = self.stacked(parameter, tasks)
                self.take(parameter)  # freed as the update takes its place
                if stacked is not None:  # unused by every task: .grad stays as it is
                    add_to_grad([parameter], [combine(component_weights, stacked)])
        add_to_grad(list(self._outside), list(self._outside.values()))
        self.clear()

    def _measured(self, parameter: nn.Parameter, stacked: Tensor) -> Tensor:
        return stacked if self._metric is None else self._metric(parameter, stacked)
