"""The task gradients of the backward that is running, and when they are complete."""

# K components, T tasks, P parameters

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from gradvac.gradients._kernels import combine, gram
from gradvac.gradients._segments import joined
from gradvac.gradients._update import Weigh
from gradvac.gradients._uses import Formed, Lookup, Outer, Table, Use

JOINED = 1 << 19  # parameters up to this size share their products within a component
_CHUNK_BYTES = 1 << 28
_WAITING_BYTES = 1 << 26  # of products that wait to be taken at once

Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Dense:
    """Task gradients of one parameter as `[T, *shape]`.

    Args:
        first: The first use.
        eager: Take the Gram matrix at once, while the gradients are still in cache; wasted if
            another use of the parameter arrives.
    """

    def __init__(self, first: Use, *, eager: bool) -> None:
        self.gradients = first.task_gradients()
        is_large = self.gradients[0].numel() > JOINED
        self._gram = gram(self.gradients.flatten(1)) if eager and is_large else None

    def add(self, use: Use) -> None:
        self._gram = None
        only = use.segments.only
        if isinstance(use, Formed):
            only = None
        if isinstance(use, Lookup):
            use.add_to(self._own())
        elif only is not None and isinstance(use, Table):
            self._own()[only].add_(use.plain())
        else:
            given = use.task_gradients()
            wider = torch.promote_types(self.gradients.dtype, given.dtype)
            if wider == self.gradients.dtype:
                self._own().add_(given)
            else:
                self.gradients = self.gradients.to(wider).add_(given)

    def _own(self) -> Tensor:
        if not self.gradients.is_contiguous():
            self.gradients = self.gradients.contiguous()
        return self.gradients

    @property
    def nbytes(self) -> int:
        return self.gradients.nbytes

    def copy(self) -> "Dense":
        twin = copy.copy(self)
        twin.gradients = self.gradients.clone()
        return twin

    def whole(self) -> Tensor:
        return self.gradients

    def gram(self) -> Tensor:
        return gram(self.gradients.flatten(1)) if self._gram is None else self._gram

    def combine(self, weights: Tensor) -> Tensor:
        return combine(weights, self.gradients.flatten(1))


class Chunked:
    """A large table in two passes: the Gram matrix by slices of rows, then one weighted product.

    Keeps the uses, not the task gradients, and pays with a second product.
    """

    nbytes = 0

    def __init__(self, first: Table, num_rows: int, row_bytes: int) -> None:
        self._uses: list[Use] = [first]
        self._num_rows = num_rows
        self._step = max(1, _CHUNK_BYTES // row_bytes)

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
            parts = [_slice(use, start, end).flatten(1) for use in self._uses]
            found.append(gram(reduce(torch.add, parts)))
        return torch.stack(found).sum(0)

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
        return Dense(use, eager=self._uses.get(parameter, 1) == 1)

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
        parts = [_Parts(own, self.buffers) for _, own in used]
        for _, own in used:
            for parameter in own:
                del self.buffers[parameter]
        weights = self._weigh([k for k, _ in used], torch.stack([part.gram() for part in parts]))
        for part, own_weights in zip(parts, weights, strict=True):
            part.write(own_weights, self._write)


class _Parts:
    """The buffers of one component; its small parameters are handled as one, to launch less."""

    def __init__(
        self, parameters: list[nn.Parameter], buffers: dict[nn.Parameter, Dense | Chunked]
    ) -> None:
        self._large: list[tuple[nn.Parameter, Dense | Chunked]] = []
        small: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in parameters:
            buffer = buffers[parameter]
            if isinstance(buffer, Dense) and parameter.numel() <= JOINED:
                own = (parameter, buffer.gradients.reshape(len(buffer.gradients), -1))
                small.setdefault(buffer.gradients.dtype, []).append(own)
            else:
                self._large.append((parameter, buffer))
        self._joined = [
            ([p for p, _ in group], torch.cat([gradients for _, gradients in group], dim=1))
            for group in small.values()
        ]

    def gram(self) -> Tensor:
        found = [buffer.gram() for _, buffer in self._large]
        found += [gram(gradients) for _, gradients in self._joined]
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def write(self, weights: Tensor, write: Write) -> None:
        parameters: list[Tensor] = [parameter for parameter, _ in self._large]
        updates = [buffer.combine(weights) for _, buffer in self._large]
        for own, gradients in self._joined:
            parameters += own
            updates += combine(weights, gradients).split([p.numel() for p in own])
        write(parameters, updates)
