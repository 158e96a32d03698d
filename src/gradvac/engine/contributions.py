"""Contributions: what a junction contributes to a parameter's gradient, still separable by task.

They are asked for the form that is needed: all task gradients, and of large tables a slice of them,
or their weighted sum without ever building them, since sum_t w_t g_t of a linear layer is just
(w[task] * dY)^T X. What a small model's step costs is the number of operations, so contributions
that are cheap to keep wait, and are built together with others of their kind.
"""

# N entries, B rows, T tasks, D width, O rows of the parameter, I its columns

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradvac.engine.kernels import Segments, grouped_outer, joined, norm_sums, wide

# Of what may be kept while it waits, without and with a GPU, whose launches cost more than copies.
_SMALL_BYTES = (1 << 24, 3 << 24)


class Contribution:  # no ABC, whose `isinstance` is Python: every contribution is asked
    """What one junction contributes to the task gradients of a parameter.

    Attributes:
        segments: The tasks of its entries.
        may_wait: It is cheap to keep for a while, and cheaper to build together with others.
        held_bytes: Of what it keeps while it waits.
        built_bytes: Of its task gradients; known of those that may wait, and of tables.
    """

    segments: Segments
    may_wait = False
    held_bytes = 0
    built_bytes = 0

    @abstractmethod
    def task_gradients(self) -> Tensor:
        """`[T, *parameter shape]`."""

    def total(self) -> Tensor:
        """The gradient over all entries, in the shape of the parameter."""
        gradients = self.task_gradients()
        return gradients.sum(0, dtype=wide(gradients.dtype))

    @property
    def kind(self) -> Hashable:
        """Contributions that may wait are built together with others of their kind."""
        return None

    @staticmethod
    def join(every: "Sequence[Any]") -> "Sequence[Contribution]":
        """Contributions of one kind to one parameter, as few as is cheap."""
        return every

    @staticmethod
    def build(every: Sequence[Any]) -> Sequence[Tensor]:
        """Task gradients of several of one kind, `[T, P]` or `[T, *parameter shape]`."""
        return [one.task_gradients() for one in every]

    def transposed(self) -> "Contribution":
        """The same to the transposed matrix; this object must not be used any more."""
        return Built(self.task_gradients().mT, self.segments)


class MatrixContribution(Contribution):
    """To a matrix, of which `slice` does not build the rest."""

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t, in the shape of the parameter."""

    @abstractmethod
    def slice(self, start: int, end: int) -> Tensor:
        """Task gradients of the matrix's rows start..end, `[T, end - start, I]`."""


@dataclass
class Lookup(MatrixContribution):
    """Rows of a table: g[token] = sum of the values at the token's occurrences."""

    values: Tensor  # [N, I]
    tokens: Tensor  # [N]
    num_rows: int
    segments: Segments
    _once: tuple[Tensor, Tensor] | None = None  # what `_merged` found

    def __post_init__(self) -> None:
        row_bytes = self.segments.num_tasks * self.values.shape[1] * self.values.itemsize
        self.built_bytes = self.num_rows * row_bytes

    @property
    def rows_bytes(self) -> int:
        """Of the task gradients of its rows alone."""
        return 4 * self.segments.num_tasks * self.values.numel()

    @staticmethod
    def join(every: "Sequence[Lookup]") -> "Sequence[Lookup]":
        if len(every) == 1:
            return every
        values = torch.cat([one.values for one in every])
        tokens = torch.cat([one.tokens for one in every])
        segments = joined([(one.segments, len(one.tokens)) for one in every])
        return [Lookup(values, tokens, every[0].num_rows, segments)]

    @staticmethod
    def are_of_few_rows(every: "Sequence[Lookup]") -> bool:
        """Whether a table's lookups have less than half of its rows, each counted once.

        On a GPU, where counting would mean waiting, every occurrence is counted.
        """
        num_rows, tokens = every[0].num_rows, [one.tokens for one in every]
        num_tokens = sum(map(len, tokens))
        if 2 * num_tokens < num_rows:
            return True
        # Their values must not take more than the task gradients of the table.
        are_many = num_tokens > every[0].segments.num_tasks * num_rows
        if are_many or tokens[0].device.type != "cpu":
            return False
        is_seen = torch.zeros(num_rows, dtype=torch.bool).index_fill_(0, torch.cat(tokens), True)
        return 2 * int(is_seen.sum()) < num_rows

    def renumbered(self) -> "tuple[Tensor, Lookup]":
        """The tokens of the batch, and the same for a table of their rows alone.

        On a GPU, where counting different tokens would mean waiting, there are N of them: the rest
        stands for token 0, and has no values.
        """
        ascending, order, _, row = _numbered(self.tokens)
        is_counted = self.tokens.device.type == "cpu" and len(row) > 0
        num_rows = int(row[-1]) + 1 if is_counted else len(row)
        tokens = ascending.new_zeros(num_rows).scatter_(0, row, ascending)
        rows = torch.empty_like(ascending).scatter_(0, order, row)
        values = self.values.to(wide(self.values.dtype))
        return tokens, Lookup(values, rows, num_rows, self.segments)

    def total(self) -> Tensor:
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
class Built(Contribution):
    """Task gradients that are there already."""

    gradients: Tensor  # [T, *parameter shape]
    segments: Segments

    def task_gradients(self) -> Tensor:
        return self.gradients


class SharesOutput(Contribution):
    """Keeps the gradient of its node's output, whose sums are those of a shift beside it.

    Attributes:
        output: That gradient, `[..., D]`; None if it is not kept for long enough.
        shared_shift: That shift, if there is one.
        shift_sums: Its task gradients `[T, D]`, as soon as they were built with these.
    """

    output: Tensor | None = None
    shared_shift: "SharedShift | None" = None
    shift_sums: Tensor | None = None


def _hand_over(every: Sequence[SharesOutput], shift_sums: Tensor) -> None:
    """Give the task gradients of shifts, `[contributions, T, D]`, to the shifts beside these."""
    for one, sums in zip(every, shift_sums.unbind(), strict=True):
        if one.shared_shift is None:
            one.shift_sums = sums
        else:
            one.shared_shift.take(sums)


class OuterProduct(MatrixContribution, SharesOutput):
    """A matrix product: g = left^T right, summed over entries.

    Args:
        left: `[N, O]`.
        right: `[N, I]`.
        segments: The tasks of its entries.
        output: Which of them is the gradient of the node's output.
    """

    def __init__(
        self, left: Tensor, right: Tensor, segments: Segments, output: Tensor | None = None
    ) -> None:
        self.left, self.right, self.segments = left, right, segments
        self.held_bytes = left.nbytes + right.nbytes
        self.built_bytes = segments.num_tasks * left.shape[1] * right.shape[1] * left.itemsize
        self.may_wait = segments.only is None and self.held_bytes <= _SMALL_BYTES[left.is_cuda]
        self.output = output if self.may_wait else None

    @property
    def kind(self) -> Hashable:
        shared = self.shared_shift is not None and (1 if self.output is self.left else 2)
        return (self.segments, self.left.dtype, self.left.shape, self.right.shape, shared)

    @staticmethod
    def join(every: "Sequence[OuterProduct]") -> "Sequence[OuterProduct]":
        """A loop over time uses a weight at every step: one product for all."""
        left, right = torch.cat([p.left for p in every]), torch.cat([p.right for p in every])
        return [OuterProduct(left, right, joined([(p.segments, len(p.left)) for p in every]))]

    @staticmethod
    def build(every: "Sequence[OuterProduct]") -> Sequence[Tensor]:
        first, many = every[0], len(every)
        left, right = _together([p.left for p in every]), _together([p.right for p in every])
        if first.shared_shift is not None:
            output = left if first.output is first.left else right
            _hand_over(every, first.segments.sum(output.view(many, -1, output.shape[1])))
        product = grouped_outer(left, right, first.segments.repeated(many))
        _, num_rows, num_columns = product.shape
        return product.reshape(many, first.segments.num_tasks, num_rows * num_columns).unbind()

    def total(self) -> Tensor:
        return self.left.t() @ self.right

    def task_gradients(self) -> Tensor:
        return grouped_outer(self.left, self.right, self.segments)

    def slice(self, start: int, end: int) -> Tensor:
        columns = self.left[:, start:end].contiguous()
        return grouped_outer(columns, self.right, self.segments)

    def weighted(self, weights: Tensor) -> Tensor:
        if self.segments.only is not None:
            return self.total() * weights[self.segments.only].to(self.left.dtype)
        length = self.left.shape[0]
        scale = weights.to(self.left.dtype)[self.segments.along(length)]
        return (self.left * scale[:, None]).t() @ self.right

    def transposed(self) -> "OuterProduct":
        self.left, self.right = self.right, self.left
        return self


class RowSums(Contribution):
    """A shift or a scale: g = sum of the rows' values."""

    def __init__(self, values: Tensor, segments: Segments, shape: tuple[int, ...]) -> None:
        self.values, self.segments, self.shape = values, segments, shape  # values [B, D]
        self.held_bytes = values.nbytes
        self.built_bytes = segments.num_tasks * values.shape[1] * values.itemsize
        self.may_wait = self.held_bytes <= _SMALL_BYTES[values.is_cuda]

    @property
    def kind(self) -> Hashable:
        return (self.segments, self.values.dtype)

    @staticmethod
    def join(every: "Sequence[RowSums]") -> "Sequence[RowSums]":
        values = reduce(torch.add, [one.values for one in every])
        return [RowSums(values, every[0].segments, every[0].shape)]

    @staticmethod
    def build(every: "Sequence[RowSums]") -> Sequence[Tensor]:
        sums = every[0].segments.sum(torch.cat([one.values for one in every], dim=1))
        parts: Sequence[Tensor] = sums.split([one.values.shape[1] for one in every], dim=1)
        return parts

    def task_gradients(self) -> Tensor:
        return self.segments.sum(self.values).view(-1, *self.shape)


class SharedShift(Contribution):
    """A shift beside a product or a scale: g = sum of the output gradient, built with theirs."""

    def __init__(self, of: SharesOutput) -> None:
        assert of.output is not None
        self.segments, self.may_wait, self._sums = of.segments, of.may_wait, of.shift_sums
        self.output = of.output if of.shift_sums is None else None
        width, dtype = of.output.shape[-1], wide(of.output.dtype)
        self.built_bytes = of.segments.num_tasks * width * dtype.itemsize
        self._kind = (of.segments, of.output.dtype, width)
        of.shared_shift = self

    def take(self, sums: Tensor) -> None:
        """Its task gradients, `[T, D]`; the output gradient is no longer needed."""
        self._sums, self.output = sums, None

    @property
    def kind(self) -> Hashable:
        return self._kind

    @staticmethod
    def join(every: "Sequence[SharedShift]") -> "Sequence[SharedShift | RowSums]":
        segments, _, width = every[0]._kind
        outputs = [one.output.reshape(-1, width) for one in every if one.output is not None]
        if len(outputs) < len(every):  # some are built already
            return every
        return [RowSums(reduce(torch.add, map(segments.by_row, outputs)), segments, (width,))]

    def task_gradients(self) -> Tensor:
        if self._sums is not None:
            return self._sums
        assert self.output is not None
        return self.segments.sum(self.output.reshape(-1, self.output.shape[-1]))


class NormScale(SharesOutput):
    """The scale of a normalisation: g = sum of the output gradient times the normalised input.

    Args:
        output: Gradient of the output, `[..., D]`.
        x: The input, likewise.
        mean: Of the input, `[..., 1]`; None for an RMS normalisation.
        scale: Its reciprocal deviation, `[..., 1]`.
        segments: The tasks of its entries.
    """

    def __init__(
        self, output: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor, segments: Segments
    ) -> None:
        self.output: Tensor = output
        self.x, self.mean, self.scale, self.segments = x, mean, scale, segments
        self.held_bytes = output.nbytes + x.nbytes
        self.built_bytes = segments.num_tasks * x.shape[-1] * wide(x.dtype).itemsize
        self.may_wait = self.held_bytes <= _SMALL_BYTES[x.is_cuda]

    @property
    def kind(self) -> Hashable:
        about = (self.output.dtype, self.x.dtype, self.x.shape, self.mean is None)
        return (self.segments, *about, self.shared_shift is None)

    @staticmethod
    def build(every: "Sequence[NormScale]") -> Sequence[Tensor]:
        first, width = every[0], every[0].x.shape[-1]
        gradient = _together([one.output for one in every]).reshape(-1, width)
        x = _together([one.x for one in every]).reshape(-1, width)
        scale = _together([one.scale for one in every]).reshape(-1, 1)
        means = [one.mean for one in every if one.mean is not None]
        mean = _together(means).reshape(-1, 1) if means else None
        scales, shift_sums = norm_sums(gradient, x, mean, scale, first.segments, len(every))
        if first.shared_shift is not None and shift_sums is None:
            shift_sums = first.segments.sum(gradient.view(len(every), -1, width))
        if shift_sums is not None:
            _hand_over(every, shift_sums)
        return scales.unbind()

    def task_gradients(self) -> Tensor:
        return self.build([self])[0]


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
