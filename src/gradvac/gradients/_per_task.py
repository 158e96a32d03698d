"""The per_task engine: one backward per task, task gradients stored as [T, P].

Slow and general: it works for every model, and every faster path is compared with it.
"""

# K components, T tasks, P parameters of a component

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradvac.gradients._batch import Batch
from gradvac.gradients._components import Components
from gradvac.gradients._graph import Node, graph_nodes
from gradvac.gradients._kernels import combine, gram

Weigh = Callable[[Sequence[int], Tensor], Tensor]
"""The waist: components (positions) and their Gram matrices [K, T, T] -> weights [K, T]."""


class PerTask:
    """One backward per task.

    Args:
        model: The model.
        components: Its components.
        storage_dtype: Of the stored task gradients; None: that of each parameter.
        offload: Store task gradients in host memory; each component visits the device twice.
    """

    name = "per_task"

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        *,
        storage_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        parameters = dict(model.named_parameters())
        self._members = [[parameters[p] for p in own] for own in components.values()]
        self._parameters = [p for own in self._members for p in own]
        self._model, self._known = model, {id(p) for p in self._parameters}
        self._storage_dtype, self._offload = storage_dtype, offload
        self._rows: dict[int, dict[int, Tensor]] = {}  # task -> parameter (by id) -> gradient

    def backward(self, batch: Batch, weigh: Weigh, *, present: Sequence[int]) -> None:
        """Differentiate, weigh every component, and add the update to `.grad`.

        Args:
            batch: This micro-batch.
            weigh: From Gram matrices to weights.
            present: The tasks of this step: those of `batch` and of what was accumulated before.
        """
        self.accumulate(batch)
        rows, self._rows = self._rows, {}
        self._fold([rows[task] for task in present], weigh)

    def accumulate(self, batch: Batch) -> None:
        """Add the task gradients of a micro-batch to the stored ones; `.grad` is left alone."""
        self._refuse_unfrozen()
        retain = _retain_graph(batch)
        parameters = [p for p in self._parameters if p.requires_grad]  # some may be frozen by now
        for position, task in enumerate(batch.present):
            one = torch.zeros(len(batch.present))
            one[position] = 1.0
            roots, starts = batch.roots(), batch.starts(one)
            if batch.index is None:
                roots, starts = roots[position : position + 1], starts[position : position + 1]
            gradients = torch.autograd.grad(
                roots, parameters, starts, retain_graph=retain[position], allow_unused=True
            )
            stored = self._rows.setdefault(task, {})
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    _add(stored, id(parameter), self._store(gradient))

    def _refuse_unfrozen(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise ValueError(
                    f"model: {name} became trainable after the Aligner was made; make another "
                    "Aligner after freezing or unfreezing."
                )

    def discard(self) -> None:
        """Forget what was accumulated."""
        self._rows = {}

    def _store(self, gradient: Tensor) -> Tensor:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        dtype = self._storage_dtype or gradient.dtype
        return gradient.to("cpu" if self._offload else gradient.device, dtype)

    def _fold(self, rows: Sequence[Mapping[int, Tensor]], weigh: Weigh) -> None:
        grams = []
        for own in self._members:
            blocks = [gram(stacked) for stacked in (_stack(rows, p) for p in own) if len(stacked)]
            empty = own[0].new_zeros(len(rows), len(rows), dtype=torch.float64)
            grams.append(torch.stack(blocks).sum(0) if blocks else empty)
        weights = weigh(range(len(grams)), torch.stack(grams))
        for component_weights, own in zip(weights, self._members, strict=True):
            for parameter in own:
                stacked = _stack(rows, parameter)
                if len(stacked):  # unused by every task: .grad stays as it is
                    add_to_grad(parameter, combine(component_weights, stacked))
                for row in rows:
                    assert isinstance(row, dict)
                    row.pop(id(parameter), None)  # freed as the update takes its place


def add_to_grad(parameter: nn.Parameter, update: Tensor) -> None:
    """Accumulate as torch does."""
    update = update.view(parameter.shape).to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = update
    else:
        parameter.grad.add_(update)


def _add(stored: dict[int, Tensor], key: int, gradient: Tensor) -> None:
    stored[key] = stored[key] + gradient if key in stored else gradient


def _stack(rows: Sequence[Mapping[int, Tensor]], parameter: nn.Parameter) -> Tensor:
    """Task gradients of a parameter on its device, `[T, P]`; empty if no task reached it."""
    found = [row.get(id(parameter)) for row in rows]
    known = next((gradient for gradient in found if gradient is not None), None)
    if known is None:
        return parameter.new_empty(0, parameter.numel())
    stacked = known.new_zeros(len(rows), parameter.numel(), device=parameter.device)
    for row, gradient in zip(stacked, found, strict=True):
        if gradient is not None:
            row.copy_(gradient.reshape(-1), non_blocking=True)
    return stacked


def _retain_graph(batch: Batch) -> list[bool]:
    """Whether the graph is still needed after each task's backward.

    Rows of one batch share their graph. Losses from separate forward passes do not, and each graph
    is freed as soon as its task is done.
    """
    num_tasks = len(batch.present)
    if batch.index is not None:
        return [position < num_tasks - 1 for position in range(num_tasks)]
    later: set[Node] = set()
    retain = []
    for root in reversed(batch.roots()):
        nodes = set(graph_nodes([root]))
        retain.append(not later.isdisjoint(nodes))
        later |= nodes
    return retain[::-1]
