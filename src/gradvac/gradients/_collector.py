"""The task gradients of the backward that is running, and when they are complete."""

# K components, T tasks, P parameters

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from gradvac.gradients._kernels import Stacked, gram
from gradvac.gradients._segments import Segments, joined
from gradvac.gradients._update import Weigh
from gradvac.gradients._uses import Lookup, Outer, Summed, Table, Use

_CHUNK_BYTES = 1 << 31  # of a large table's task gradients at a time
_WAITING_BYTES = 1 << 26  # of products that wait to be taken at once

Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Dense:
    """Task gradients of one parameter as `[T, *shape]`."""

    def __init__(self, first: Use) -> None:
        # Sums over rows wait: those of a component are taken together.
        self.waits = first if isinstance(first, Summed) else None
        self._segments = first.segments
        self._gradients = None if self.waits is not None else first.task_gradients()

    @property
    def gradients(self) -> Tensor:
        """`[T, *shape]`."""
        if self._gradients is None:
            assert self.waits is not None
            self._gradients, self.waits = self.waits.task_gradients(), None
        return self._gradients

    def add(self, use: Use) -> None:
        """Add another use."""
        own, only = self.gradients, use.segments.only
        if not own.is_contiguous():
            own = self._gradients = own.contiguous()
        if isinstance(use, Lookup):
            use.add_to(own)
        elif only is not None and isinstance(use, Table):
            own[only].add_(use.plain())
        else:
            given = use.task_gradients()
            wider = torch.promote_types(own.dtype, given.dtype)
            self._gradients = own.add_(given) if wider == own.dtype else own.to(wider).add_(given)

    @property
    def nbytes(self) -> int:
        held = self._gradients if self.waits is None else self.waits.values
        assert held is not None
        return held.nbytes

    def copy(self) -> "Dense":
        twin = copy.copy(self)
        twin._gradients, twin.waits = self.gradients.clone(), None
        return twin

    def whole(self) -> Tensor:
        return self.gradients

    def gram(self) -> Tensor:
        return gram(_flat(self.gradients))


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

    def copy(self) -> "Chunked":
        twin = copy.copy(self)
        twin._uses = list(self._uses)
        return twin

    def whole(self) -> Tensor:
        return reduce(torch.add, [use.task_gradients() for use in self._uses])

    def gram(self) -> Tensor:
        found = []
        for start in range(0, self._num_rows, self._step):
            end = min(start + self._step, self._num_rows)
            found.append(gram(self._slice(start, end).flatten(1)))
        return torch.stack(found).sum(0)

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
        parts = [use.weighted(weights) for use in self._uses]
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        return reduce(torch.add, [part.to(dtype) for part in parts])


def _slice(use: Use, start: int, end: int) -> Tensor:
    return use.slice(start, end) if isinstance(use, Table) else use.task_gradients()[:, start:end]


class Collector:
    """Collects uses by parameter, and folds components into updates as they complete.

    Args:
        members: The parameters of every component.
        stream_bytes: Complete components wait for each other until they hold this much, so that
            small models weigh everything at once; larger ones stream.
        table_bytes: Task gradients of a matrix above this size are not formed; see `Chunked`.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        *,
        stream_bytes: int = 0,
        table_bytes: int = 1 << 62,
    ) -> None:
        self.members = members
        self.component_of = {p: k for k, own in enumerate(members) for p in own}
        self._stream_bytes, self.table_bytes = stream_bytes, table_bytes
        self.clear()

    def clear(self) -> None:
        """Forget everything about the backward that ran."""
        self.buffers: dict[nn.Parameter, Dense | Chunked] = {}
        self._waiting: dict[nn.Parameter, list[Outer]] = {}
        self._ready: list[int] = []
        self._held = 0  # bytes of the components that are ready
        self._uses: Mapping[nn.Parameter, int] = {}
        self._weigh: Weigh | None = None
        self._write: Write | None = None

    def open(
        self, uses: Mapping[nn.Parameter, int], weigh: Weigh | None, write: Write | None
    ) -> None:
        """Expect a backward with so many uses of every parameter; `weigh=None` only collects."""
        self._uses, self._weigh, self._write = uses, weigh, write

    def deliver(self, parameter: nn.Parameter, use: Use) -> None:
        """Take what one use of a parameter contributes."""
        if self._uses.get(parameter, 1) > 2 and isinstance(use, Outer):
            # A loop over time uses a weight at every step: one product for all.
            waiting = self._waiting.setdefault(parameter, [])
            waiting.append(use)
            if sum(own.left.nbytes + own.right.nbytes for own in waiting) > _WAITING_BYTES:
                self._take_waiting(parameter)
            return
        self._add(parameter, use)

    def _add(self, parameter: nn.Parameter, use: Use) -> None:
        known = self.buffers.get(parameter)
        if known is None:
            self.buffers[parameter] = self._buffer(parameter, use)
        else:
            known.add(use)

    def _take_waiting(self, parameter: nn.Parameter) -> None:
        waiting = self._waiting.pop(parameter, None)
        if not waiting:
            return
        if len(waiting) == 1 or any(use.segments.only is not None for use in waiting):
            for use in waiting:
                self._add(parameter, use)
            return
        left, right = torch.cat([u.left for u in waiting]), torch.cat([u.right for u in waiting])
        segments = joined([(u.segments, u.left.shape[0]) for u in waiting])
        self._add(parameter, Outer(left, right, segments))

    def _buffer(self, parameter: nn.Parameter, use: Use) -> Dense | Chunked:
        if isinstance(use, Table):
            row_bytes = use.segments.num_tasks * parameter[0].numel() * use.dtype.itemsize
            if parameter.shape[0] * row_bytes > self.table_bytes:
                return Chunked(use, parameter.shape[0], row_bytes)
        return Dense(use)

    @torch.no_grad()
    def component_done(self, component: int) -> None:
        """All uses of all parameters of a component have arrived."""
        for parameter in self.members[component]:
            self._take_waiting(parameter)
        if self._weigh is None:
            return
        self._ready.append(component)
        found = (self.buffers.get(p) for p in self.members[component])
        self._held += sum(buffer.nbytes for buffer in found if buffer is not None)
        if self._held >= self._stream_bytes:
            self._fold()

    def take(self, parameter: nn.Parameter) -> Dense | Chunked | None:
        """Hand out a parameter's buffer; it is no longer here."""
        self._take_waiting(parameter)
        return self.buffers.pop(parameter, None)

    def close(self) -> None:
        """Fold what has not been folded; the backward is over."""
        for parameter in list(self._waiting):
            self._take_waiting(parameter)
        left = {self.component_of[p] for p in self.buffers} - set(self._ready)
        self._ready += sorted(left)
        self._fold()

    @torch.no_grad()
    def _fold(self) -> None:
        """Gram -> weights -> update for the components that are ready, then free them."""
        used = [
            (k, own)
            for k in self._ready
            if (own := [p for p in self.members[k] if p in self.buffers])
        ]
        self._ready, self._held = [], 0
        if not used:
            return
        assert self._weigh is not None
        assert self._write is not None
        fold = _Fold([own for _, own in used], self.buffers)
        for _, own in used:
            for parameter in own:
                del self.buffers[parameter]
        weights = self._weigh([k for k, _ in used], fold.grams())
        self._write(fold.parameters, fold.combine(weights))


class _Fold:
    """The buffers of some components: all their Gram matrices, then all their updates, at once."""

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        buffers: Mapping[nn.Parameter, Dense | Chunked],
    ) -> None:
        self._num = len(members)
        dense: list[tuple[nn.Parameter, int]] = []
        self._tables: list[tuple[nn.Parameter, int, Chunked]] = []
        waiting: dict[Segments, list[tuple[nn.Parameter, Summed]]] = {}
        for component, own in enumerate(members):
            for parameter in own:
                buffer = buffers[parameter]
                if isinstance(buffer, Chunked):
                    self._tables.append((parameter, component, buffer))
                    continue
                dense.append((parameter, component))
                if buffer.waits is not None:
                    waiting.setdefault(buffer.waits.segments, []).append((parameter, buffer.waits))
        formed = _take_sums(waiting)
        stacks = [formed[p] if p in formed else _flat(_of(buffers[p]).gradients) for p, _ in dense]
        self._stacked = Stacked(stacks, [component for _, component in dense], self._num)
        self.parameters = [p for p, _ in dense] + [p for p, _, _ in self._tables]

    def grams(self) -> Tensor:
        """`[K, T, T]`."""
        total = self._stacked.grams() if self._stacked else None
        for _, component, table in self._tables:
            own = table.gram()
            if total is None:
                total = own.new_zeros(self._num, *own.shape)
            total[component] += own
        assert total is not None
        return total

    def combine(self, weights: Tensor) -> list[Tensor]:
        """The updates, in the order of `parameters`."""
        updates = self._stacked.combine(weights) if self._stacked else []
        return updates + [table.combine(weights[component]) for _, component, table in self._tables]


def _flat(gradients: Tensor) -> Tensor:
    """`[T, *shape]` -> `[T, P]`, of single numbers too."""
    return gradients.reshape(len(gradients), -1)


def _of(buffer: Dense | Chunked) -> Dense:
    assert isinstance(buffer, Dense)
    return buffer


def _take_sums(
    waiting: Mapping[Segments, Sequence[tuple[nn.Parameter, Summed]]],
) -> dict[nn.Parameter, Tensor]:
    """Sum the rows of many shifts and scales by task in one product, `[T, P]` each."""
    found: dict[nn.Parameter, Tensor] = {}
    for segments, uses in waiting.items():
        dtypes = {use.values.dtype for _, use in uses}
        for dtype in dtypes:
            own = [(p, use) for p, use in uses if use.values.dtype == dtype]
            whole = segments.sum(torch.cat([use.values for _, use in own], dim=1))
            parts = whole.split([use.values.shape[1] for _, use in own], dim=1)
            found |= {p: part for (p, _), part in zip(own, parts, strict=True)}
    return found
