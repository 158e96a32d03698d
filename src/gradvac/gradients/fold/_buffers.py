"""Where the uses of one parameter are collected until its component is complete.

A buffer gives the parameter's Gram matrix and its combined gradient. The usual one holds task
gradients `[T, *shape]`; large tables and tables that are only looked up are spared that.
"""

# T tasks, P parameters, V rows of a table, N tokens of the batch, I columns

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from gradvac.gradients.kernels import combine, gram, wide
from gradvac.gradients.uses import Formed, Lookup, Table, Use

_CHUNK_BYTES = 1 << 31  # of a large table's task gradients at a time


class Stack:
    """Task gradients that can be stacked, `[T, P]`."""

    @abstractmethod
    def stack(self) -> Tensor:
        """`[T, P]`, for Gram matrices and combinations."""

    @abstractmethod
    def spread(self, combined: Tensor) -> Tensor:
        """The gradient from a combination of what `stack` gave."""

    def gram(self) -> Tensor:
        """`[T, T]`."""
        return gram(self.stack())

    def combine(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t."""
        return self.spread(combine(weights, self.stack()))


class Dense(Stack):
    """Task gradients as `[T, *shape]`."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def add(self, use: Use) -> None:
        """Add another use."""
        gradients, only = self.gradients, use.segments.only
        if not gradients.is_contiguous():
            gradients = self.gradients = gradients.contiguous()
        if isinstance(use, Lookup):
            use.add_to(gradients)
        elif only is not None and isinstance(use, Table):
            gradients[only].add_(use.plain())
        else:
            given = use.task_gradients()
            wider = torch.promote_types(gradients.dtype, given.dtype)
            self.gradients = (
                gradients.add_(given)
                if wider == gradients.dtype
                else gradients.to(wider).add_(given)
            )

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return self.gradients.nbytes

    def whole(self) -> Tensor:
        """`[T, *shape]`."""
        return self.gradients

    def stack(self) -> Tensor:
        gradients = self.gradients
        return gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1)

    def spread(self, combined: Tensor) -> Tensor:
        return combined


class LookedUp(Stack):
    """A table of which a batch uses few rows: task gradients `[T, N, I]`, of its tokens alone."""

    def __init__(self, first: Lookup) -> None:
        self._uses: list[Lookup] = [first]
        self._tokens: Tensor | None = None

    def add(self, use: Lookup) -> None:
        self._uses.append(use)

    @property
    def nbytes(self) -> int:
        first = self._uses[0]
        return 4 * first.segments.num_tasks * sum(use.values.numel() for use in self._uses)

    def joined(self) -> Lookup:
        """All uses as one."""
        return Lookup.as_one(self._uses)

    def whole(self) -> Tensor:
        return self.joined().task_gradients()

    def stack(self) -> Tensor:
        self._tokens, use = self.joined().renumbered()
        return use.task_gradients().flatten(1)

    def spread(self, combined: Tensor) -> Tensor:
        assert self._tokens is not None
        first = self._uses[0]
        rows = combined.view(-1, first.values.shape[1])
        return rows.new_zeros(first.num_rows, rows.shape[1]).index_add_(0, self._tokens, rows)


class Chunked:
    """A large table in two passes: the Gram matrix by slices of rows, then one weighted product.

    Keeps the uses, not the task gradients, and pays with a second product.
    """

    nbytes = 0

    def __init__(self, first: Table, num_rows: int, row_bytes: int) -> None:
        self._uses: list[Use] = [first]
        self._num_rows = num_rows
        # A multiple of 64 rows, which matrix products like; all of them on small tables.
        self._step = max(1, _CHUNK_BYTES // row_bytes // 64 * 64 or _CHUNK_BYTES // row_bytes)

    def add(self, use: Use) -> None:
        self._uses.append(use)

    def gram(self) -> Tensor:
        """`[T, T]`."""
        grams = []
        for start in range(0, self._num_rows, self._step):
            end = min(start + self._step, self._num_rows)
            grams.append(gram(self._slice(start, end).flatten(1)))
        return torch.stack(grams).sum(0)

    def _slice(self, start: int, end: int) -> Tensor:
        """Task gradients of some rows: products first, then lookups are added in place."""
        first, *others = sorted(self._uses, key=lambda use: isinstance(use, Lookup))
        total = _slice(first, start, end)
        for use in others:
            if isinstance(use, Lookup):
                use.add_to(total, start)
            else:
                total = total + _slice(use, start, end)
        return total

    def combine(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t, never having formed the g_t."""
        parts = [use.weighted(weights) for use in self._uses]
        dtype = wide(parts[0].dtype)
        return reduce(torch.add, [part.to(dtype) for part in parts])


Buffer = Dense | LookedUp | Chunked


def _slice(use: Use, start: int, end: int) -> Tensor:
    return use.slice(start, end) if isinstance(use, Table) else use.task_gradients()[:, start:end]


def first_buffer(use: Use, shape: Sequence[int], table_bytes: int) -> Buffer:
    """A buffer that begins with a use.

    Args:
        use: Of a parameter.
        shape: The parameter's.
        table_bytes: Task gradients of a matrix above this size are not formed.
    """
    if isinstance(use, Formed):
        return Dense(use.gradients)
    if isinstance(use, Lookup) and 2 * len(use.tokens) < shape[0]:
        return LookedUp(use)
    if isinstance(use, Table):
        row_bytes = use.segments.num_tasks * shape[1] * use.dtype.itemsize
        if shape[0] * row_bytes > table_bytes:
            return Chunked(use, shape[0], row_bytes)
    return Dense(use.task_gradients())


def joined_buffer(known: Buffer, use: Use, shape: Sequence[int], table_bytes: int) -> Buffer:
    """A buffer with another use."""
    if isinstance(known, LookedUp):
        if isinstance(use, Lookup):
            known.add(use)
            return known
        earlier = known.joined()
        known, use = first_buffer(use, shape, table_bytes), earlier
        assert not isinstance(known, LookedUp)
    known.add(use)
    return known
