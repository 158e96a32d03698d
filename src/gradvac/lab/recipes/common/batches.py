"""Batches of rows drawn from tasks: what recipes put between their data and the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from torch import Tensor

from gradvac.lab.training import BatchSlice, TensorBatch, TrainConfig, choose_device


@dataclass(frozen=True, eq=False)
class RowBatch(TensorBatch):
    """A batch whose tensors and lists have an entry for every row.

    Attributes:
        tasks: The task of every row.
        num_tokens: Tokens that carry a loss, or rows: what the sum of the losses is divided by.
    """

    tasks: list[int]
    num_tokens: int

    def take(self, batch_slice: BatchSlice, costs: Sequence[float] | None = None) -> Self:
        """The part of one process, which needs at least a row."""
        if batch_slice.of == 1:
            return self
        rows = batch_slice.cut([1.0] * len(self.tasks) if costs is None else costs)
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        by_row = {k: value for k, value in values.items() if isinstance(value, Tensor | list)}
        return type(self)(**values | {name: value[rows] for name, value in by_row.items()})


def is_on_gpu(train: TrainConfig) -> bool:
    """Whether a run trains on a GPU."""
    return choose_device(train.device).type == "cuda"


def has_static_shape(
    fixed: bool | Literal["auto"], train: TrainConfig, batch_slice: BatchSlice, *, is_possible: Any
) -> bool:
    """Whether all batches get one size, so that a step can be recorded as a CUDA graph.

    Args:
        fixed: `batch.fixed`.
        train: [train].
        batch_slice: Which part of every batch this process has: true is for one process.
        is_possible: What "auto" needs besides a GPU and `train.cuda_graph`.
    """
    if batch_slice.of > 1 and True in (fixed, train.cuda_graph):
        raise ValueError(
            f"batch.fixed: true is for one process, but {batch_slice.of} train; set it and "
            'train.cuda_graph to "auto" or false.'
        )
    if fixed != "auto":
        return fixed
    return bool(is_possible) and train.cuda_graph is not False and is_on_gpu(train)
