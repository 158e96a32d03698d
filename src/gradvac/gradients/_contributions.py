"""What one use of a parameter contributes to its gradient, still separable by task.

A layer's backward states its contribution; the engine asks for the form it needs: the plain
gradient, all task gradients, a slice of them (large vocabularies), or their weighted sum without
ever forming them, since sum_t w_t g_t of a linear layer is just (w[task] * dY)^T X.
"""

# N entries of dimension 0, T tasks, O rows of the parameter, I its columns

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradvac.gradients._kernels import combine, grouped_outer
from gradvac.gradients._rows import Segments


class Contribution(ABC):
    """The gradient of one use of a parameter."""

    @abstractmethod
    def plain(self) -> Tensor:
        """The gradient over all rows, as torch computes it."""

    @abstractmethod
    def task_gradients(self, segments: Segments) -> Tensor:
        """`[T, *parameter shape]`."""

    def slice(self, segments: Segments, start: int, end: int) -> Tensor:
        """Task gradients of the parameter's rows start..end, `[T, end - start, *rest]`."""
        return self.task_gradients(segments)[:, start:end]

    def weighted(self, segments: Segments, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t, in the shape of the parameter."""
        gradients = self.task_gradients(segments)
        return combine(weights, gradients.flatten(1)).view(gradients.shape[1:])


class Table(Contribution):
    """A contribution to a matrix whose `slice` does not form the rest."""

    output_gradient: Tensor

    @property
    def element_size(self) -> int:
        """Bytes of a number in its task gradients."""
        return self.output_gradient.element_size()

    @abstractmethod
    def slice(self, segments: Segments, start: int, end: int) -> Tensor: ...


@dataclass
class Outer(Table):
    """A linear map: g = dY^T X."""

    output_gradient: Tensor  # [N, O]
    input: Tensor  # [N, I]

    def plain(self) -> Tensor:
        return self.output_gradient.t() @ self.input

    def task_gradients(self, segments: Segments) -> Tensor:
        return grouped_outer(self.output_gradient, self.input, segments)

    def slice(self, segments: Segments, start: int, end: int) -> Tensor:
        columns = self.output_gradient[:, start:end].contiguous()
        return grouped_outer(columns, self.input, segments)

    def weighted(self, segments: Segments, weights: Tensor) -> Tensor:
        scale = segments.spread(weights, self.input.shape[0]).to(self.output_gradient.dtype)
        return (self.output_gradient * scale[:, None]).t() @ self.input


@dataclass
class Lookup(Table):
    """An embedding: g[token] = sum of dY over the token's occurrences."""

    output_gradient: Tensor  # [N, I]
    tokens: Tensor  # [N]
    vocabulary: int

    def plain(self) -> Tensor:
        return self._sum(self.output_gradient)

    def weighted(self, segments: Segments, weights: Tensor) -> Tensor:
        scale = segments.spread(weights, self.tokens.shape[0]).to(self.output_gradient.dtype)
        return self._sum(self.output_gradient * scale[:, None])

    def task_gradients(self, segments: Segments) -> Tensor:
        width = self.output_gradient.shape[1]
        empty = self.output_gradient.new_zeros(segments.num_tasks, self.vocabulary, width)
        return self.add_to(empty, segments)

    def add_to(self, gradients: Tensor, segments: Segments) -> Tensor:
        """Add to task gradients `[T, V, I]` in place: no second buffer for a tied table."""
        return self._scatter(gradients, self.tokens, segments)

    def slice(self, segments: Segments, start: int, end: int) -> Tensor:
        size, width = end - start, self.output_gradient.shape[1]
        empty = self.output_gradient.new_zeros(segments.num_tasks, size + 1, width)
        inside = (self.tokens >= start) & (self.tokens < end)
        tokens = torch.where(inside, self.tokens - start, size)  # the extra row takes the others
        return self._scatter(empty, tokens, segments)[:, :size]

    def _sum(self, values: Tensor) -> Tensor:
        dtype = torch.promote_types(values.dtype, torch.float32)
        total = values.new_zeros(self.vocabulary, values.shape[1], dtype=dtype)
        return total.index_add_(0, self.tokens, values.to(dtype))

    def _scatter(self, gradients: Tensor, tokens: Tensor, segments: Segments) -> Tensor:
        row = segments.spread(segments.tasks, tokens.shape[0]) * gradients.shape[1] + tokens
        flat = gradients.view(-1, gradients.shape[2])
        values = self.output_gradient
        if torch.finfo(gradients.dtype).bits < 32:
            # Frequent tokens would lose their small summands in 16 bits: sum in float32 first.
            row, order = row.sort()
            first = torch.ones_like(row, dtype=torch.bool)
            first[1:] = row[1:] != row[:-1]
            slot = first.cumsum(0) - 1  # occurrences of one (task, token) share a slot
            sums = torch.zeros_like(values, dtype=torch.float32)
            sums.index_add_(0, slot, values[order].float())
            # The first occurrence carries the sum, the others add zero to the same row.
            values = sums[slot] * first[:, None]
        flat.index_add_(0, row, values.to(gradients.dtype))
        return gradients


@dataclass
class RowSum(Contribution):
    """A bias or an elementwise scale: g = sum of values over the rows."""

    values: Tensor  # [N, size]
    shape: torch.Size

    def plain(self) -> Tensor:
        return self.values.sum(0).view(self.shape)

    def task_gradients(self, segments: Segments) -> Tensor:
        return segments.sum(self.values).view(-1, *self.shape)


@dataclass
class Sliced(Contribution):
    """Anything that is computed task by task, from the task's entries."""

    length: int  # of dimension 0
    gradient_of: Callable[[Tensor | None], Tensor]  # its entries (None: all) -> gradient

    def plain(self) -> Tensor:
        return self.gradient_of(None)

    def task_gradients(self, segments: Segments) -> Tensor:
        return torch.stack([self.gradient_of(e) for e in segments.entries_by_task(self.length)])


@dataclass
class Formed(Contribution):
    """Task gradients that were computed together with the input gradient."""

    gradients: Tensor  # [T, *parameter shape]

    def plain(self) -> Tensor:
        return self.gradients.sum(0)

    def task_gradients(self, segments: Segments) -> Tensor:  # noqa: ARG002
        return self.gradients
