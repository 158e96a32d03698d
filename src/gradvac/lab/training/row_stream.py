"""Batches of rows drawn from tasks, and an endless stream of them."""

# T tasks

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from gradvac.lab.training.passes import Numbers, Passes
from gradvac.lab.training.ranks import WHOLE, Part
from gradvac.lab.training.sampling import SamplingConfig, costs_by_slot

B = TypeVar("B", bound="TensorBatch")


@dataclass(frozen=True, eq=False)
class TensorBatch(ABC):
    """A batch that moves with all of its tensors.

    With a `static_shape` (rows and columns) all batches of a run have it, and nothing that differs
    between them stays on the host, so a step can be recorded.
    """

    @abstractmethod
    def take(self, part: Part, costs: Sequence[float] | None = None) -> Self:
        """The part of one process; `costs` replaces what the rows cost."""

    def pin(self) -> Self:
        """The same in pinned memory, from which a GPU copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def copy(self) -> Self:
        """The same in memory of its own."""
        return self._map(Tensor.clone)

    def copy_(self, other: Self) -> None:
        """Copy another batch of the same shape into this one, asynchronously."""
        theirs = other._tensors()
        for name, tensor in self._tensors().items():
            assert tensor.shape == theirs[name].shape, "batches of a run have one size"
            tensor.copy_(theirs[name], non_blocking=True)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one for name, one in values.items() if isinstance(one, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = {name: change(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changed)


class RowStream(Generic[B]):
    """An endless stream of batches of rows that can be stopped and continued exactly.

    Args:
        sizes: Task -> number of its rows.
        sampling: How tasks are drawn.
        make: Makes a batch of the chosen rows of every task, given its number in the stream.
        rows: Rows per batch.
        accumulation: Batches per optimizer step, which is what a schedule counts.
        num_steps: Optimizer steps of the whole training; a cap on epochs needs it.
        seed: Seed of everything that is drawn.
        part: Which part of every batch is handed out here.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        sampling: SamplingConfig,
        make: Callable[[Sequence[Numbers], int], B],
        *,
        rows: int,
        accumulation: int,
        num_steps: int | None = None,
        seed: int,
        part: Part = WHOLE,
    ) -> None:
        if sampling.slots is not None and sampling.slots > rows:
            raise ValueError(
                f"sampling.slots = {sampling.slots} is more than batch.rows = {rows}; every slot "
                "needs a row."
            )
        self._make = make
        num_rows = None if num_steps is None else num_steps * accumulation * rows
        self._sampler = sampling.build(sizes, seed=seed, num_rows=num_rows)
        self._passes = Passes(list(sizes.values()), seed=seed)
        self._rows, self._part = rows, part
        self._accumulation, self._num_batches = accumulation, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> B:
        """Draw the tasks of the rows, then each task's next ones."""
        number = self._num_batches
        counts, slots = self._sampler.draw_rows(self._rows, step=number // self._accumulation)
        self._num_batches += 1
        chosen = [self._passes.take(task, count) for task, count in enumerate(counts.tolist())]
        costs = None if slots is None else costs_by_slot(counts, slots)
        return self._make(chosen, number).take(self._part, costs)

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream."""
        return {
            "sampler": self._sampler.state_dict(),
            **self._passes.state_dict(),
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there."""
        self._sampler.load_state_dict(state["sampler"])
        self._passes.load_state_dict(state)
        self._num_batches = int(state["num_batches"])
