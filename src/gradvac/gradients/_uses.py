"""What one use of a parameter contributes to its gradient, still separable by task.

A junction states the use; the collector asks for the form it needs: the plain gradient, all task
gradients, a slice of them (large vocabularies), or their weighted sum without ever forming them,
since sum_t w_t g_t of a linear layer is just (w[task] * dY)^T X.
"""

# N entries, T tasks, O rows of the parameter, I its columns

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from gradvac.gradients._kernels import combine, grouped_outer, grouped_outers, wide
from gradvac.gradients._segments import Segments, joined


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


class Waiting(Use):
    """A use that is cheap to keep, and cheaper to form together with others of its kind.

    It has `join`, several uses of one parameter as one, and `form`, the task gradients of several
    uses of one kind.

    Attributes:
        kind: Uses of one kind are formed together.
        held_bytes: Of what it keeps.
        formed_bytes: Of its task gradients.
    """

    kind: Hashable
    held_bytes: int
    formed_bytes: int


@dataclass
class Outer(Table, Waiting):
    """A matrix product: g = left^T right, summed over entries."""

    left: Tensor  # [N, O]
    right: Tensor  # [N, I]
    segments: Segments

    def __post_init__(self) -> None:
        left, right = self.left, self.right
        self.kind = (self.segments, left.dtype, left.shape, right.shape)
        self.held_bytes = left.nbytes + right.nbytes
        size = self.segments.num_tasks * left.shape[1] * right.shape[1]
        self.formed_bytes = size * left.element_size()

    @staticmethod
    def join(uses: "Sequence[Outer]") -> "Outer":
        """A loop over time uses a weight at every step: one product for all."""
        left, right = torch.cat([u.left for u in uses]), torch.cat([u.right for u in uses])
        return Outer(left, right, joined([(u.segments, u.left.shape[0]) for u in uses]))

    @staticmethod
    def form(uses: "Sequence[Outer]") -> Sequence[Tensor]:
        segments = uses[0].segments
        return grouped_outers([u.left for u in uses], [u.right for u in uses], segments)

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

    @staticmethod
    def join(uses: "Sequence[Lookup]") -> "Lookup":
        """Several uses of one table as one."""
        if len(uses) == 1:
            return uses[0]
        values, tokens = torch.cat([u.values for u in uses]), torch.cat([u.tokens for u in uses])
        segments = joined([(u.segments, len(u.tokens)) for u in uses])
        return Lookup(values, tokens, uses[0].num_rows, segments)

    def renumbered(self) -> "tuple[Tensor, Lookup]":
        """The tokens of the batch `[N]`, and the same use of a table of their rows alone.

        There are fewer different tokens than N: the rest stands for token 0, and has no values.
        """
        found, order = self.tokens.sort()
        is_new = torch.ones_like(found)
        is_new[1:] = found[1:] != found[:-1]
        row = is_new.cumsum(0) - 1
        tokens = torch.zeros_like(found).scatter_(0, row, found)
        rows = torch.empty_like(found).scatter_(0, order, row)
        values = self.values.to(wide(self.values.dtype))
        return tokens, Lookup(values, rows, len(rows), self.segments)

    def plain(self) -> Tensor:
        return self._sum(self.values)

    def weighted(self, weights: Tensor) -> Tensor:
        scale = weights.to(self.values.dtype)[self._tasks()]
        return self._sum(self.values * scale[:, None])

    def task_gradients(self) -> Tensor:
        shape = (self.segments.num_tasks, self.num_rows, self.values.shape[1])
        return self.add_to(self.values.new_zeros(shape))

    def add_to(self, gradients: Tensor, start: int = 0) -> Tensor:
        """Add to task gradients of the table's rows from `start` on, `[T, rows, I]`, in place.

        No second buffer for a table that is also the softmax's.
        """
        tokens, size = self.tokens - start, gradients.shape[1]
        order, values = None, self.values
        if gradients.dtype in (torch.bfloat16, torch.float16):
            order, values = self._merged()
        row = self._tasks() * size + tokens
        if size < self.num_rows:  # tokens outside add zeros somewhere
            inside = (tokens >= 0) & (tokens < size)
            row = torch.where(inside, row, 0)
            values = values * (inside if order is None else inside[order])[:, None]
        flat = gradients.view(-1, gradients.shape[2])
        flat.index_add_(0, row if order is None else row[order], values.to(gradients.dtype))
        return gradients

    def slice(self, start: int, end: int) -> Tensor:
        shape = (self.segments.num_tasks, end - start, self.values.shape[1])
        return self.add_to(self.values.new_zeros(shape), start)

    def _tasks(self) -> Tensor:
        return self.segments.along(self.tokens.shape[0])

    def _sum(self, values: Tensor) -> Tensor:
        dtype = wide(values.dtype)
        total = values.new_zeros(self.num_rows, values.shape[1], dtype=dtype)
        return total.index_add_(0, self.tokens, values.to(dtype))

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
class Summed(Waiting):
    """A shift or a scale: g = sum of the rows' values."""

    values: Tensor  # [B, D]
    segments: Segments
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        values = self.values
        self.kind, self.held_bytes = (self.segments, values.dtype), values.nbytes
        self.formed_bytes = self.segments.num_tasks * values.shape[1] * values.element_size()

    @staticmethod
    def join(uses: "Sequence[Summed]") -> "Summed":
        values = reduce(torch.add, [use.values for use in uses])
        return Summed(values, uses[0].segments, uses[0].shape)

    @staticmethod
    def form(uses: "Sequence[Summed]") -> Sequence[Tensor]:
        whole = uses[0].segments.sum(torch.cat([use.values for use in uses], dim=1))
        parts = whole.split([use.values.shape[1] for use in uses], dim=1)
        both = zip(parts, uses, strict=True)
        return [part if len(u.shape) == 1 else part.reshape(-1, *u.shape) for part, u in both]

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
