"""Contributions: what a junction contributes to a parameter's gradient, still separable by task.

They are asked for the form that is needed: all task gradients, and of large tables a slice of them,
or their weighted sum without ever building them, since sum_t w_t g_t of a linear layer is just
dY^T (w[task] * X), or (w[task] * dY)^T X.
"""

# N entries, B rows, T tasks, D width, O rows of the parameter, I its columns

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.kernels import Segments, by_expert, grouped_outer, joined, wide
from gradvac.engine.kernels.stacks import HALF
from gradvac.utils.devices import triton_module
from gradvac.utils.native import native

# Multiplications that take as long as building an entry of a task gradient, without and with a GPU.
_ENTRY_COST = (1 << 5, 1 << 10)
_FEW_BYTES = 1 << 26  # of task gradients, which are built in a few launches


class Contribution:  # no ABC, whose `isinstance` is Python: every contribution is asked
    """What one junction contributes to the task gradients of a parameter.

    Attributes:
        segments: The tasks of its entries.
        built_bytes: Of its task gradients; known of tables.
    """

    segments: Segments
    built_bytes = 0

    @abstractmethod
    def task_gradients(self) -> Tensor:
        """`[T, *parameter shape]`."""

    def total(self) -> Tensor:
        """The gradient over all entries, in the shape of the parameter."""
        gradients = self.task_gradients()
        return gradients.sum(0, dtype=wide(gradients.dtype))

    def add_to(self, gradients: Tensor) -> Tensor:
        """Task gradients `[T, *parameter shape]` with this one, in place where their dtype does."""
        return added(gradients, self.task_gradients())

    def transposed(self) -> "Contribution":
        """The same to the transposed matrix; this object must not be used any more."""
        return Built(self.task_gradients().mT, self.segments)


def added(gradients: Tensor, given: Tensor) -> Tensor:
    """Two task gradients of a parameter, the second `[T, P]` or `[T, *parameter shape]`."""
    wider = torch.promote_types(gradients.dtype, given.dtype)
    return gradients.to(wider).add_(given.reshape(gradients.shape))


class MatrixContribution(Contribution):
    """To a matrix, or to a stack of matrices, of which `slice` does not build the rest.

    Attributes:
        kept_bytes: Of its operands, if it has any beside values of a lookup.
        split_share: Of the bytes beyond which the task gradients of a table are not built: those of
            a stack are split earlier, because its combined gradient costs little more than plain.
    """

    kept_bytes = 0
    split_share = 1.0

    @abstractmethod
    def weighted(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t, in the shape of the parameter."""

    @abstractmethod
    def slice(self, start: int, end: int) -> Tensor:
        """Task gradients of start..end along the first dimension, `[T, end - start, ...]`."""

    def add_to(self, gradients: Tensor) -> Tensor:
        if self.segments.only is None:
            return super().add_to(gradients)
        gradients[self.segments.only].add_(self.total())
        return gradients


@dataclass
class Lookup(MatrixContribution):
    """Rows of a table: g[token] = sum of the values at the token's occurrences."""

    values: Tensor  # [N, I]
    tokens: Tensor  # [N]
    num_rows: int
    segments: Segments
    _once: tuple[Tensor, Tensor] | None = None  # what `_by_token_and_task` found

    def __post_init__(self) -> None:
        row_bytes = self.segments.num_tasks * self.values.shape[1] * self.values.itemsize
        self.built_bytes = self.num_rows * row_bytes

    @property
    def rows_bytes(self) -> int:
        """Of the task gradients of its rows alone, or of what their Gram matrix takes instead."""
        times = 1 if Lookup.have_gram([self]) else self.segments.num_tasks
        return 4 * times * self.values.numel()

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
        """Whether a table's lookups have less than three of four of its rows, each counted once.

        On a GPU, where counting would mean waiting, every occurrence is counted, unless there are
        kernels: then it is whether their values take less than the task gradients of the table.
        """
        num_rows, tokens = every[0].num_rows, [one.tokens for one in every]
        num_tokens = sum(map(len, tokens))
        if 4 * num_tokens < 3 * num_rows:
            return True
        are_many = num_tokens > every[0].segments.num_tasks * num_rows
        if are_many or tokens[0].device.type != "cpu":
            return not are_many and Lookup.have_gram(every)
        is_seen = torch.zeros(num_rows, dtype=torch.bool).index_fill_(0, torch.cat(tokens), True)
        return 4 * int(is_seen.sum()) < 3 * num_rows

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

    def of_few_rows(self) -> tuple[Tensor, Tensor]:
        """The tokens of the batch, and the task gradients of their rows alone."""
        if not self.values.is_cuda and (kernels := native()) is not None:
            given = (self.segments.tasks, self.segments.num_tasks, self.num_rows)
            found: tuple[Tensor, Tensor] | None = kernels.lookup(self.values, self.tokens, *given)
            if found is not None:
                return found
        tokens, rows = self.renumbered()
        return tokens, rows.task_gradients()

    @staticmethod
    def have_gram(every: "Sequence[Lookup]") -> bool:
        """Whether the Gram matrix of a table that is only looked up takes no task gradients.

        There are kernels for it, and these would be so large that it is worth their launches.
        """
        if not every or _kernels(*[one.values for one in every]) is None:
            return False
        num_rows = min(every[0].num_rows, sum(len(one.tokens) for one in every))
        return every[0].built_bytes // every[0].num_rows * num_rows > _FEW_BYTES

    def gram(self) -> Tensor:
        """`[T, T]`."""
        keys, rows = self._by_token_and_task()
        gram: Tensor = _kernels(self.values).gram_of_rows(keys, rows, self.segments.num_tasks)
        return gram

    def total(self) -> Tensor:
        return self._sum(self.values)

    def weighted(self, weights: Tensor, total: Tensor | None = None) -> Tensor:
        """The same, added to a total in place if there is one."""
        dtype = wide(self.values.dtype)
        return self._sum(_scaled(self.values, weights, self._tasks(), dtype), total)

    def task_gradients(self) -> Tensor:
        shape = (self.segments.num_tasks, self.num_rows, self.values.shape[1])
        return self.add_to(self.values.new_zeros(shape))

    def add_to(self, gradients: Tensor, start: int = 0) -> Tensor:
        """Add to task gradients of the table's rows from `start` on, `[T, rows, I]`, in place.

        No second buffer for a table that is also the softmax's.
        """
        if not gradients.numel():
            return gradients
        is_narrow = gradients.dtype in HALF
        is_part = start > 0 or gradients.shape[1] < self.num_rows
        kernels = _kernels(self.values, gradients) if is_narrow or is_part else None
        if kernels is not None:
            kernels.add_rows(gradients, *self._by_token_and_task(), start)
            return gradients
        places, values = self._places(), self.values
        if is_narrow:  # frequent tokens would lose their small summands
            keys, values = self._by_token_and_task()
            tokens, tasks = keys // self.segments.num_tasks, keys % self.segments.num_tasks
            places = torch.where(keys < 0, 0, tasks * self.num_rows + tokens)
        num_tasks, size, width = gradients.shape
        apart = gradients.stride(0) // width  # rows of the memory from task to task
        if start or apart != self.num_rows or size != self.num_rows:
            tasks, tokens = places // self.num_rows, places % self.num_rows - start
            places = tasks * apart + tokens
            if size < self.num_rows:  # tokens outside add zeros, not all at one place
                inside = (tokens >= 0) & (tokens < size)
                anywhere = torch.arange(len(places), device=places.device) % size
                places, values = torch.where(inside, places, anywhere), values * inside[:, None]
        flat = gradients.as_strided(((num_tasks - 1) * apart + size, width), (width, 1))
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

    def _sum(self, values: Tensor, total: Tensor | None = None) -> Tensor:
        if total is None:
            total = values.new_zeros(self.num_rows, values.shape[1], dtype=wide(values.dtype))
        return total.index_add_(0, self.tokens, values.to(total.dtype))

    def _by_token_and_task(self) -> tuple[Tensor, Tensor]:
        """Sums of the values by token and task, in float32 or better, `[N, I]`.

        Their keys, `token * T + task`, come first, in order; then -1 for what is left.
        """
        if self._once is None:
            ascending, order, _, slot = _numbered(
                self.tokens * self.segments.num_tasks + self._tasks()
            )
            keys = torch.full_like(ascending, -1).scatter_(0, slot, ascending)
            rows = torch.empty_like(slot).scatter_(0, order, slot)
            values = self.values.to(wide(self.values.dtype))
            sums = values.new_zeros(values.shape)  # row by row, however the values lie
            self._once = (keys, sums.index_add_(0, rows, values))
        return self._once


def _scaled(entries: Tensor, weights: Tensor, tasks: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries times the weights of their tasks, which bf16 would round: it takes 1.003 for 1."""
    factors = weights.to(wide(entries.dtype))[tasks, None]
    return torch.mul(entries, factors, out=torch.empty_like(entries, dtype=dtype))


def _kernels(*of: Tensor) -> Any:
    """The module of kernels for lookups, or None where they cannot be used."""
    if not all(one.is_cuda and one.dtype in (*HALF, torch.float32) for one in of):
        return None
    kernels = triton_module("gradvac.engine.kernels.lookup_kernels")
    return kernels if kernels is not None and of[0].shape[-1] <= kernels.WIDEST else None


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


class OuterProduct(MatrixContribution):
    """A matrix product: g = left^T right, summed over entries.

    Args:
        left: `[N, O]`.
        right: `[N, I]`.
        segments: The tasks of its entries.
    """

    def __init__(self, left: Tensor, right: Tensor, segments: Segments) -> None:
        self.left, self.right, self.segments = left, right, segments
        self.kept_bytes = left.nbytes + right.nbytes
        self.built_bytes = segments.num_tasks * left.shape[1] * right.shape[1] * left.itemsize

    def total(self) -> Tensor:
        return self.left.t() @ self.right

    def task_gradients(self) -> Tensor:
        return grouped_outer(self.left, self.right, self.segments)

    def slice(self, start: int, end: int) -> Tensor:
        columns = self.left[:, start:end].contiguous()
        return grouped_outer(columns, self.right, self.segments)

    def weighted(self, weights: Tensor) -> Tensor:
        if self.segments.only is not None:
            only = self.segments.only
            return self.total() * weights[only : only + 1].to(wide(self.left.dtype))
        left, right, tasks = self.left, self.right, self.segments.along(len(self.left))
        # The narrower one; in float16 what a GradScaler keeps in range.
        if left.shape[1] < right.shape[1] or left.dtype == torch.float16:
            left = _scaled(left, weights, tasks, left.dtype)
        else:
            right = _scaled(right, weights, tasks, right.dtype)
        return left.t() @ right

    def transposed(self) -> "OuterProduct":
        self.left, self.right = self.right, self.left
        return self


class ExpertProducts(MatrixContribution):
    """Matrix products of experts, whose entries come one expert after the other.

    Args:
        left: `[N, O]`.
        right: `[N, I]`.
        ends: Of the entries of every expert, `[E]`; those beyond belong to none.
        segments: The tasks of the entries.
        last: How entries were grouped for the last weight of this backward: those of a layer share
            their ends.
    """

    split_share = 0.5

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        ends: Tensor,
        segments: Segments,
        last: dict[object, Any],
    ) -> None:
        self.left, self.right, self.segments, self._last = left, right, segments, last
        self._ends, self._tasks = ends, segments.along(len(left))
        self.kept_bytes = left.nbytes + right.nbytes
        size = left.shape[1] * right.shape[1] * left.itemsize
        self.built_bytes = segments.num_tasks * len(ends) * size

    def task_gradients(self) -> Tensor:
        ends, segments = self._ends, self.segments
        key = (id(segments), ends.data_ptr(), ends.shape, ends.stride(), len(self._tasks))
        if key not in self._last:
            self._last.clear()
            groups = by_expert(self._tasks, segments.num_tasks, ends)
            self._last[key] = groups, ends, segments  # whose addresses are no others' meanwhile
        return self._products(self.left, self.right, self._last[key][0])

    def _products(self, left: Tensor, right: Tensor, groups: Segments) -> Tensor:
        """Of some entries, by task and expert."""
        products = grouped_outer(left, right, groups)[:-1]
        by_task: Tensor = products.unflatten(0, (self.segments.num_tasks, -1))
        return by_task

    def slice(self, start: int, end: int) -> Tensor:
        ends, num_tasks = self._ends_on_host, self.segments.num_tasks
        entries = slice(ends[start - 1] if start else 0, ends[end - 1])
        groups = by_expert(self._tasks[entries], num_tasks, self._ends[start:end] - entries.start)
        return self._products(self.left[entries], self.right[entries], groups)

    @cached_property
    def _ends_on_host(self) -> list[int]:
        """Waits for the device."""
        ends: list[int] = self._ends.tolist()
        return ends

    def total(self) -> Tensor:
        return self._sum(self.right)

    def weighted(self, weights: Tensor) -> Tensor:
        return self._sum(_scaled(self.right, weights, self._tasks, self.right.dtype))

    def _sum(self, right: Tensor) -> Tensor:
        """Over all tasks."""
        ends = self._ends_on_host
        out = self.left.new_empty(len(ends), self.left.shape[1], right.shape[1])
        for product, start, end in zip(out, [0, *ends], ends, strict=False):
            torch.mm(self.left[start:end].t(), right[start:end], out=product)
        return out

    def transposed(self) -> "ExpertProducts":
        self.left, self.right = self.right, self.left
        return self


def is_better_unbuilt(head: nn.Parameter, num_entries: int, num_tasks: int) -> bool:
    """Of a head, which has many more rows than columns, whether pairs of entries cost less."""
    if head.dim() != 2 or head.shape[0] < 16 * head.shape[1]:
        return False
    shape = (head.shape[0], head.shape[1])
    return are_pairs_cheaper(num_entries, num_entries, shape, num_tasks, is_cuda=head.is_cuda)


def are_pairs_cheaper(
    in_products: int, in_all: int, shape: tuple[int, int], num_tasks: int, *, is_cuda: bool
) -> bool:
    """Whether multiplying all pairs of entries takes less than building task gradients.

    Args:
        in_products: Entries of products.
        in_all: And of lookups.
        shape: Rows and columns that would be built.
        num_tasks: T.
        is_cuda: On a GPU.
    """
    built = _ENTRY_COST[is_cuda] * num_tasks * shape[0] * shape[1]
    return in_products**2 * shape[0] + in_all**2 * shape[1] < built
