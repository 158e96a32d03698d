"""What one use of a parameter contributes to its gradient, still separable by task.

A junction states the use; the collector asks for the form it needs: the plain gradient, all task
gradients, a slice of them (large vocabularies), or their weighted sum without ever forming them,
since sum_t w_t g_t of a linear layer is just (w[task] * dY)^T X.
"""

# N entries, T tasks, O rows of the parameter, I its columns

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gradvac.gradients._kernels import combine, grouped_outer
from gradvac.gradients._segments import Segments


class Use(ABC):
    """The gradient of one use of a parameter.

    Attributes:
        segments: The tasks of its entries.
    """

    segments: Segments

    @abstractmethod
    def task_gradients(self) -> Tensor:
        """`[T, *parameter shape]`."""

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t, in the shape of the parameter."""

    def transposed(self) -> "Use":
        """The same use of the transposed matrix."""
        return Formed(self.task_gradients().mT, self.segments)


class Table(Use):
    """A use of a matrix whose `slice` does not form the rest."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of its task gradients."""

    @abstractmethod
    def plain(self) -> Tensor:
        """The gradient over all entries."""

    @abstractmethod
    def slice(self, start: int, end: int) -> Tensor:
        """Task gradients of the matrix's rows start..end, `[T, end - start, I]`."""


@dataclass
class Outer(Table):
    """A matrix product: g = left^T right, summed over entries."""

    left: Tensor  # [N, O]
    right: Tensor  # [N, I]
    segments: Segments

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def plain(self) -> Tensor:
        return self.left.t() @ self.right

    def task_gradients(self) -> Tensor:
        return grouped_outer(self.left, self.right, self.segments)

    def slice(self, start: int, end: int) -> Tensor:
        columns = self.left[:, start:end].contiguous()
        return grouped_outer(columns, self.right, self.segments)

    def weighted(self, weights: Tensor) -> Tensor:
        if self.segments.only is not None:
            return self.plain() * weights[self.segments.only].to(self.left.dtype)
        length = self.left.shape[0]
        scale = weights.to(self.left.dtype)[self.segments.along(length)]
        return (self.left * scale[:, None]).t() @ self.right

    def transposed(self) -> "Outer":
        return Outer(self.right, self.left, self.segments)


@dataclass
class Lookup(Table):
    """Rows of a table: g[token] = sum of the values at the token's occurrences."""

    values: Tensor  # [N, I]
    tokens: Tensor  # [N]
    num_rows: int
    segments: Segments
    _once: tuple[Tensor, Tensor] | None = None  # what `_merged` found

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def plain(self) -> Tensor:
        return self._sum(self.values)

    def weighted(self, weights: Tensor) -> Tensor:
        scale = weights.to(self.values.dtype)[self._tasks()]
        return self._sum(self.values * scale[:, None])

    def task_gradients(self) -> Tensor:
        shape = (self.segments.num_tasks, self.num_rows, self.values.shape[1])
        return self.add_to(self.values.new_zeros(shape))

    def add_to(self, gradients: Tensor) -> Tensor:
        """Add to task gradients `[T, V, I]` in place: no second buffer for a tied table."""
        return self._scatter(gradients, self.tokens)

    def slice(self, start: int, end: int) -> Tensor:
        size, width = end - start, self.values.shape[1]
        empty = self.values.new_zeros(self.segments.num_tasks, size + 1, width)
        inside = (self.tokens >= start) & (self.tokens < end)
        tokens = torch.where(inside, self.tokens - start, size)  # the extra row takes the others
        return self._scatter(empty, tokens)[:, :size]

    def _tasks(self) -> Tensor:
        return self.segments.along(self.tokens.shape[0])

    def _sum(self, values: Tensor) -> Tensor:
        dtype = torch.promote_types(values.dtype, torch.float32)
        total = values.new_zeros(self.num_rows, values.shape[1], dtype=dtype)
        return total.index_add_(0, self.tokens, values.to(dtype))

    def _scatter(self, gradients: Tensor, tokens: Tensor) -> Tensor:
        flat = gradients.view(-1, gradients.shape[2])
        if gradients.dtype not in (torch.bfloat16, torch.float16):
            row = self._tasks() * gradients.shape[1] + tokens
            flat.index_add_(0, row, self.values.to(gradients.dtype))
            return gradients
        order, values = self._merged()
        row = (self._tasks() * gradients.shape[1] + tokens)[order]
        flat.index_add_(0, row, values.to(gradients.dtype))
        return gradients

    def _merged(self) -> tuple[Tensor, Tensor]:
        """Occurrences by task and token, and their values: the first has the sum, others zero.

        Frequent tokens would lose their small summands in 16 bits: they are summed in float32.
        """
        if self._once is None:
            row, order = (self._tasks() * self.num_rows + self.tokens).sort()
            first = torch.ones_like(row, dtype=torch.bool)
            first[1:] = row[1:] != row[:-1]
            slot = first.cumsum(0) - 1  # occurrences of one (task, token) share a slot
            sums = torch.zeros_like(self.values, dtype=torch.float32)
            sums.index_add_(0, slot, self.values[order].float())
            self._once = (order, sums[slot] * first[:, None])
        return self._once


@dataclass
class Summed(Use):
    """A shift or a scale: g = sum of the rows' values."""

    values: Tensor  # [B, D]
    segments: Segments
    shape: tuple[int, ...]

    def task_gradients(self) -> Tensor:
        return self.segments.sum(self.values).view(-1, *self.shape)

    def weighted(self, weights: Tensor) -> Tensor:
        return Formed(self.task_gradients(), self.segments).weighted(weights)


@dataclass
class Formed(Use):
    """Task gradients that are there already."""

    gradients: Tensor  # [T, *parameter shape]
    segments: Segments

    def task_gradients(self) -> Tensor:
        return self.gradients

    def weighted(self, weights: Tensor) -> Tensor:
        flat = self.gradients.reshape(len(self.gradients), -1)
        return combine(weights, flat).view(self.gradients.shape[1:])
