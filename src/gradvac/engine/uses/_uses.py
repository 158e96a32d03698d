"""What one use of a parameter contributes to its gradient, still separable by task.

A junction states the use; its buffer asks for the form it needs: all task gradients, and of large
tables a slice of them, or their weighted sum without ever forming them, since sum_t w_t g_t of a
linear layer is just (w[task] * dY)^T X. Products, shifts and scales are in `_waiting.py`.
"""

# N entries, T tasks, I columns of the parameter

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradvac.engine.kernels import Segments, joined, wide


class Use:  # no ABC, whose `isinstance` is Python: it is asked of every use
    """The gradient of one use of a parameter.

    Attributes:
        segments: The tasks of its entries.
        may_wait: It is cheap to keep for a while, and cheaper to form together with others.
        held_bytes: Of what it keeps while it waits.
        formed_bytes: Of its task gradients; known of those that may wait, and of tables.
    """

    segments: Segments
    may_wait = False
    held_bytes = 0
    formed_bytes = 0

    @abstractmethod
    def task_gradients(self) -> Tensor:
        """`[T, *parameter shape]`."""

    def plain(self) -> Tensor:
        """The gradient over all entries, in the shape of the parameter."""
        gradients = self.task_gradients()
        return gradients.sum(0, dtype=wide(gradients.dtype))

    @property
    def kind(self) -> Hashable:
        """Uses that may wait are formed together with others of their kind."""
        return None

    @staticmethod
    def join(uses: "Sequence[Any]") -> "Sequence[Use]":
        """Uses of one parameter and one kind, as few as is cheap."""
        return uses

    @staticmethod
    def form(uses: Sequence[Any]) -> Sequence[Tensor]:
        """The task gradients of several uses of one kind, `[T, P]` or `[T, *parameter shape]`."""
        return [use.task_gradients() for use in uses]

    def transposed(self) -> "Use":
        """The same use of the transposed matrix; this one is then of no more use."""
        return Formed(self.task_gradients().mT, self.segments)


class Table(Use):
    """A use of a matrix whose `slice` does not form the rest."""

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t, in the shape of the parameter."""

    @abstractmethod
    def slice(self, start: int, end: int) -> Tensor:
        """Task gradients of the matrix's rows start..end, `[T, end - start, I]`."""


@dataclass
class Lookup(Table):
    """Rows of a table: g[token] = sum of the values at the token's occurrences."""

    values: Tensor  # [N, I]
    tokens: Tensor  # [N]
    num_rows: int
    segments: Segments
    _once: tuple[Tensor, Tensor] | None = None  # what `_merged` found

    def __post_init__(self) -> None:
        row_bytes = self.segments.num_tasks * self.values.shape[1] * self.values.itemsize
        self.formed_bytes = self.num_rows * row_bytes

    @property
    def rows_bytes(self) -> int:
        """Of the task gradients of its rows alone."""
        return 4 * self.segments.num_tasks * self.values.numel()

    @staticmethod
    def join(uses: "Sequence[Lookup]") -> "Sequence[Lookup]":
        if len(uses) == 1:
            return uses
        values, tokens = torch.cat([u.values for u in uses]), torch.cat([u.tokens for u in uses])
        segments = joined([(u.segments, len(u.tokens)) for u in uses])
        return [Lookup(values, tokens, uses[0].num_rows, segments)]

    def renumbered(self) -> "tuple[Tensor, Lookup]":
        """The tokens of the batch `[N]`, and the same use of a table of their rows alone.

        There are fewer different tokens than N: the rest stands for token 0, and has no values.
        """
        ascending, order, _, row = _numbered(self.tokens)
        tokens = torch.zeros_like(ascending).scatter_(0, row, ascending)
        rows = torch.empty_like(ascending).scatter_(0, order, row)
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
        is_narrow = gradients.dtype in (torch.bfloat16, torch.float16)
        places, values = self._merged() if is_narrow else (self._places(), self.values)
        size = gradients.shape[1]
        if size < self.num_rows:  # tokens outside add zeros somewhere
            tokens = places % self.num_rows - start
            inside = (tokens >= 0) & (tokens < size)
            places = torch.where(inside, places // self.num_rows * size + tokens, 0)
            values = values * inside[:, None]
        flat = gradients.view(-1, gradients.shape[2])
        flat.index_add_(0, places, values.to(gradients.dtype))
        return gradients

    def slice(self, start: int, end: int) -> Tensor:
        shape = (self.segments.num_tasks, end - start, self.values.shape[1])
        return self.add_to(self.values.new_zeros(shape), start)

    def _tasks(self) -> Tensor:
        return self.segments.along(self.tokens.shape[0])

    def _places(self) -> Tensor:
        """Where occurrences are added in tables of all tasks, one after the other."""
        return self._tasks() * self.num_rows + self.tokens

    def _sum(self, values: Tensor) -> Tensor:
        dtype = wide(values.dtype)
        total = values.new_zeros(self.num_rows, values.shape[1], dtype=dtype)
        return total.index_add_(0, self.tokens, values.to(dtype))

    def _merged(self) -> tuple[Tensor, Tensor]:
        """Places in order, and values: of those at one place the first has the sum, others zero.

        Frequent tokens would lose their small summands in 16 bits: they are summed in float32.
        """
        if self._once is None:
            places, order, first, slot = _numbered(self._places())
            sums = torch.zeros_like(self.values, dtype=torch.float32)
            sums.index_add_(0, slot, self.values[order].float())
            self._once = (places, sums[slot] * first[:, None])
        return self._once


def _numbered(keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys in order, their places, whether each is new, and its number among the different ones."""
    ascending, order = keys.sort()
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return ascending, order, is_first, is_first.cumsum(0) - 1


@dataclass
class Formed(Use):
    """Task gradients that are there already."""

    gradients: Tensor  # [T, *parameter shape]
    segments: Segments

    def task_gradients(self) -> Tensor:
        return self.gradients
