"""What came of one parameter, until its component is complete."""

# T tasks, P parameters, V rows of a table, N tokens of the batch, I columns

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.kernels import combine, gram, wide
from gradvac.engine.uses import Lookup, Table, Use

_CHUNK_BYTES = 1 << 31  # of a large table's task gradients at a time


class Buffer:
    """The uses of one parameter: its Gram matrix and its combined gradient.

    Most uses are formed and added up, `[T, *shape]`. Two kinds of tables are spared that. Of one
    that is only looked up, and of which a batch uses few rows, those rows alone are formed. One
    that is too large is split: its Gram matrix is taken by slices of rows, and its combined
    gradient from the uses themselves, at the price of a second product.

    Args:
        parameter: The parameter.
        table_bytes: Task gradients of a matrix above this size are not formed.

    Attributes:
        waiting: Uses that are not looked at yet, see `Use.may_wait`.
        is_split: The parameter is a table that is too large.
        has_begun: Uses were added.
        tokens: Whose rows alone `stack` gave; None if it gave all.
    """

    def __init__(self, parameter: nn.Parameter, table_bytes: int) -> None:
        self.parameter, self._table_bytes = parameter, table_bytes
        self.clear()

    def clear(self) -> None:
        """Forget all uses."""
        self.waiting: list[Any] = []
        self.is_split = self.has_begun = False
        self.tokens: Tensor | None = None
        self._gradients: Tensor | None = None  # [T, P] or [T, *shape], of uses that were formed
        self._lookups: list[Lookup] = []  # those that were not: of few rows, or of a large table
        self._products: list[Table] = []  # and its others

    def taken(self) -> "Buffer":
        """The uses in a buffer of their own; they are no longer here."""
        taken = copy.copy(self)
        self.clear()
        return taken

    def take_waiting(self) -> Sequence[Any]:
        """The uses that waited, as few as possible; they are no longer here."""
        uses, self.waiting = self.waiting, []
        if len(uses) < 2:
            return uses
        kinds: dict[Any, list[Any]] = {}
        for use in uses:
            kinds.setdefault((type(use), use.kind), []).append(use)
        return [one for alike in kinds.values() for one in alike[0].join(alike)]

    def add(self, use: Use) -> None:
        """Add a use."""
        self.has_begun, is_first = True, self._gradients is None
        if isinstance(use, Table):
            self.is_split |= is_first and use.formed_bytes > self._table_bytes
            if isinstance(use, Lookup):
                is_of_few_rows = is_first and 2 * use.tokens.shape[0] < use.num_rows
                if self.is_split or is_of_few_rows:
                    self._lookups.append(use)
                    return
            elif self.is_split:
                self._products.append(use)
                return
        if is_first:
            self.begin(use.task_gradients())
            return
        gradients, only = self._formed().contiguous(), use.segments.only
        if isinstance(use, Lookup):
            use.add_to(gradients)
        elif only is not None and isinstance(use, Table):
            gradients[only].add_(use.plain())
        else:
            given = use.task_gradients().reshape(gradients.shape)
            wider = torch.promote_types(gradients.dtype, given.dtype)
            gradients = gradients.to(wider).add_(given)
        self._gradients = gradients

    def begin(self, gradients: Tensor) -> None:
        """Take the first task gradients, `[T, P]` or `[T, *shape]`."""
        self.has_begun, self._gradients = True, gradients
        while self._lookups and not self.is_split:
            self.add(self._lookups.pop())

    def _formed(self) -> Tensor:
        assert self._gradients is not None
        return self._gradients.reshape(self._gradients.shape[0], *self.parameter.shape)

    @property
    def nbytes(self) -> int:
        """Of what is held once all uses are formed."""
        total = 0 if self._gradients is None else self._gradients.nbytes
        for use in self._lookups:
            total += 0 if self.is_split else use.rows_bytes
        for use in self.waiting:
            total += use.formed_bytes
        return total

    def whole(self) -> Tensor:
        """Task gradients, `[T, *shape]`."""
        assert not self.is_split
        if self._gradients is None:
            return Lookup.join(self._lookups)[0].task_gradients()
        return self._formed()

    def stack(self, *, whole: bool = False) -> Tensor:
        """Task gradients `[T, P]`; of rows that are looked up alone, unless `whole` is wanted."""
        gradients = self._gradients
        if gradients is None and not whole:
            self.tokens, use = Lookup.join(self._lookups)[0].renumbered()
            return use.task_gradients().flatten(1)
        if gradients is None:
            gradients = self.whole()
        return gradients if gradients.dim() == 2 else gradients.reshape(gradients.shape[0], -1)

    def spread(self, combined: Tensor) -> Tensor:
        """The gradient from a combination of what `stack` gave."""
        if self.tokens is None:
            return combined
        num_rows, width = self.parameter.shape
        whole = combined.new_zeros(num_rows, width)
        return whole.index_add_(0, self.tokens, combined.view(-1, width))

    def gram(self) -> Tensor:
        """`[T, T]`."""
        if not self.is_split:
            return gram(self.stack())
        num_rows = self.parameter.shape[0]
        first = (*self._products, *self._lookups)[0]
        at_once = _CHUNK_BYTES // max(1, first.formed_bytes // num_rows)
        # A multiple of 64 rows, which matrix products like; all of them on small tables.
        step = max(1, at_once // 64 * 64 or at_once)
        starts = range(0, num_rows, step)
        grams = [gram(self._slice(s, min(s + step, num_rows)).flatten(1)) for s in starts]
        return torch.stack(grams).sum(0)

    def _slice(self, start: int, end: int) -> Tensor:
        """Task gradients of some rows: products first, then lookups are added in place."""
        parts, lookups = [use.slice(start, end) for use in self._products], list(self._lookups)
        if self._gradients is not None:
            parts.append(self._formed()[:, start:end].clone())  # which are not to be written
        if not parts:
            parts.append(lookups.pop().slice(start, end))
        total = reduce(torch.add, parts).contiguous()
        for use in lookups:
            use.add_to(total, start)
        return total

    def combine(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t; of a table that is split, never having formed the g_t."""
        if not self.is_split:
            return self.spread(combine(weights, self.stack()))
        parts = [use.weighted(weights) for use in (*self._products, *self._lookups)]
        if self._gradients is not None:
            formed = self._gradients.flatten(1)
            parts.append(combine(weights, formed).view(self.parameter.shape))
        dtype = wide(parts[0].dtype)
        return reduce(torch.add, [part.to(dtype) for part in parts])
