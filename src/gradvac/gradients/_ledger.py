"""The task gradients of the backward that is running, and when they are complete."""

# K components, T tasks, P parameters

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import reduce

import torch
from torch import Tensor, nn

from gradvac.gradients._contributions import Contribution, Lookup, Table
from gradvac.gradients._kernels import combine, gram
from gradvac.gradients._per_task import Weigh, add_to_grad
from gradvac.gradients._rows import RowTasks, Segments

JOINED = 1 << 19  # parameters up to this size share their products within a component
_CHUNK_BYTES = 1 << 28


class Mode(Enum):
    """What a layer's backward does with its parameters."""

    PLAIN = "plain"  # return their gradients: the caller is torch, not an aligner
    TASKS = "tasks"  # hand task gradients to the ledger
    WEIGHTED = "weighted"  # return sum_t w_t g_t with weights already known


Resolve = Callable[[RowTasks | None], Segments]
Inspect = Callable[[nn.Parameter, "Dense | Chunked"], None]


class Dense:
    """Task gradients of one parameter as `[T, *shape]`.

    Args:
        first: The first contribution.
        segments: Of the rows it came from.
        eager: Take the Gram matrix at once, while the gradients are still in cache; wasted if
            another use of the parameter arrives.
    """

    def __init__(self, first: Contribution, segments: Segments, *, eager: bool) -> None:
        self.gradients = first.task_gradients(segments)
        is_large = self.gradients[0].numel() > JOINED
        self._gram = gram(self.gradients.flatten(1)) if eager and is_large else None

    def add(self, contribution: Contribution, segments: Segments) -> None:
        self._gram = None
        if isinstance(contribution, Lookup):
            contribution.add_to(self.gradients, segments)
        else:
            self.gradients += contribution.task_gradients(segments)

    @property
    def nbytes(self) -> int:
        return self.gradients.nbytes

    def gram(self) -> Tensor:
        return gram(self.gradients.flatten(1)) if self._gram is None else self._gram

    def combine(self, weights: Tensor) -> Tensor:
        return combine(weights, self.gradients.flatten(1))


class Chunked:
    """A large table in two passes: the Gram matrix by slices of rows, then one weighted product.

    Keeps the contributions, not the task gradients, and pays with a second product.
    """

    nbytes = 0

    def __init__(
        self, contribution: Contribution, segments: Segments, num_rows: int, row_bytes: int
    ) -> None:
        self._uses = [(contribution, segments)]
        self._num_rows = num_rows
        self._step = max(1, _CHUNK_BYTES // row_bytes)

    def add(self, contribution: Contribution, segments: Segments) -> None:
        self._uses.append((contribution, segments))

    def gram(self) -> Tensor:
        found = []
        for start in range(0, self._num_rows, self._step):
            end = min(start + self._step, self._num_rows)
            parts = [use.slice(segments, start, end).flatten(1) for use, segments in self._uses]
            found.append(gram(reduce(torch.add, parts)))
        return torch.stack(found).sum(0)

    def combine(self, weights: Tensor) -> Tensor:
        parts = [use.weighted(segments, weights) for use, segments in self._uses]
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        return reduce(torch.add, [part.to(dtype) for part in parts])


class Ledger:
    """Collects contributions by parameter, and folds components into `.grad` as they complete.

    Args:
        members: The parameters of every component.
        stream_bytes: Complete components wait for each other until they hold this much, so that
            small models weigh everything at once; larger ones stream.
        table_bytes: Task gradients of a matrix above this size are not formed; see `Chunked`.
    """

    def __init__(
        self, members: Sequence[Sequence[nn.Parameter]], *, stream_bytes: int, table_bytes: int
    ) -> None:
        self.members = members
        self.component_of = {p: k for k, own in enumerate(members) for p in own}
        self.streaming = True
        self._stream_bytes, self._table_bytes = stream_bytes, table_bytes
        self._uses: dict[nn.Parameter, int] = {}
        self.clear()

    def clear(self) -> None:
        """Forget everything about the backward that ran."""
        self.mode = Mode.PLAIN
        self.buffers: dict[nn.Parameter, Dense | Chunked] = {}
        self._arrived: dict[nn.Parameter, int] = {}
        self._ready: list[int] = []
        self._held = 0  # bytes of the components that are ready
        self._weigh: Weigh | None = None
        self._resolve: Resolve | None = None  # holds the batch, and with it the graph
        self._segments: dict[RowTasks | None, Segments] = {}
        self._grams: dict[int, Tensor] = {}
        self.weights: Tensor | None = None  # [K, T], for WEIGHTED
        self.inspect: Inspect | None = None  # look at task gradients instead of folding them
        self.leaked: set[nn.Parameter] = set()

    def pause(self) -> None:
        """Keep what was collected, but not the batch it came from."""
        self.mode = Mode.PLAIN
        self._resolve = None
        self._segments = {}

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Look at another backward; what was collected before is there again afterwards."""
        kept = self.buffers, self._arrived
        self.clear()
        try:
            yield
        finally:
            self.clear()
            self.buffers, self._arrived = kept

    def open(self, weigh: Weigh | None, num_tasks: int, resolve: Resolve) -> None:
        """Expect a backward in mode TASKS; `weigh=None` only collects."""
        self._weigh, self._num_tasks, self._resolve = weigh, num_tasks, resolve
        self._segments = {}
        self.mode = Mode.TASKS

    def segments(self, rows: RowTasks | None, length: int, name: str) -> Segments:
        """Tasks of the entries of a module's dimension 0."""
        if rows not in self._segments:  # every module of a forward asks for the same
            assert self._resolve is not None
            self._segments[rows] = self._resolve(rows)
        segments = self._segments[rows]
        if length % segments.num_rows:
            raise ValueError(
                f"engine: {name} received dimension 0 of size {length} in a batch of "
                f"{segments.num_rows} rows, so its rows cannot be told apart by task. Give it the "
                "batch as dimension 0, name the tasks of packed rows with gradvac.rows(...), or "
                'use engine="per_task".'
            )
        return segments

    def deliver(self, parameter: nn.Parameter, use: Contribution, segments: Segments) -> None:
        """Take what one use of a parameter contributes."""
        self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
        known = self.buffers.get(parameter)
        if known is None:
            self.buffers[parameter] = self._buffer(parameter, use, segments)
        else:
            known.add(use, segments)

    def _buffer(
        self, parameter: nn.Parameter, use: Contribution, segments: Segments
    ) -> Dense | Chunked:
        if isinstance(use, Table):
            row_bytes = self._num_tasks * parameter[0].numel() * use.element_size
            if parameter.shape[0] * row_bytes > self._table_bytes:
                return Chunked(use, segments, parameter.shape[0], row_bytes)
        return Dense(use, segments, eager=self._uses.get(parameter, 1) == 1)

    def component_done(self, component: int) -> None:
        """All uses of all parameters of a component have arrived."""
        if self.mode is not Mode.TASKS or not self.streaming:
            return
        if self.inspect is not None:
            self._show(self.members[component])
        if self._weigh is None:
            return
        self._ready.append(component)
        found = (self.buffers.get(p) for p in self.members[component])
        self._held += sum(buffer.nbytes for buffer in found if buffer is not None)
        if self._held >= self._stream_bytes:
            self._fold()

    @torch.no_grad()
    def parameter_done(self, parameter: nn.Parameter) -> None:
        """All uses of a parameter have arrived, and only its Gram matrix is wanted."""
        if self.mode is not Mode.TASKS or not self.streaming or parameter not in self.buffers:
            return
        if self.inspect is not None:
            self._show([parameter])
        else:
            component = self.component_of[parameter]
            own = self.buffers.pop(parameter).gram()
            total = self._grams.get(component)
            self._grams[component] = own if total is None else total + own

    @torch.no_grad()
    def _show(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self.inspect is not None
        for parameter in parameters:
            if parameter in self.buffers:
                self.inspect(parameter, self.buffers.pop(parameter))

    def close(self) -> None:
        """Fold what has not been folded; the backward is over."""
        if self.inspect is not None:
            self._show(list(self.buffers))
            return
        left = {self.component_of[p] for p in self.buffers} - set(self._ready)
        self._ready += sorted(left)
        self._fold()
        self._uses |= self._arrived

    def grams(self, device: torch.device) -> Tensor:
        """Gram matrices collected by `parameter_done`, `[K, T, T]`; zero for unused components."""
        self.streaming = True  # what a reentrant checkpoint kept back is complete now
        for parameter in list(self.buffers):
            self.parameter_done(parameter)
        known = next(iter(self._grams.values()))
        empty = torch.zeros_like(known, device=device)
        return torch.stack([self._grams.get(k, empty) for k in range(len(self.members))])

    @torch.no_grad()
    def _fold(self) -> None:
        """Gram -> weights -> `.grad` for the components that are ready, then free them."""
        used = [
            (k, own)
            for k in self._ready
            if (own := [p for p in self.members[k] if p in self.buffers])
        ]
        self._ready, self._held = [], 0
        if not used:
            return
        assert self._weigh is not None
        parts = [_Parts(own, self.buffers) for _, own in used]
        weights = self._weigh([k for k, _ in used], torch.stack([part.gram() for part in parts]))
        for part, own_weights in zip(parts, weights, strict=True):
            part.write(own_weights)
        for _, own in used:
            for parameter in own:
                del self.buffers[parameter]


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
                own = (parameter, buffer.gradients.flatten(1))
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

    def write(self, weights: Tensor) -> None:
        for parameter, buffer in self._large:
            add_to_grad(parameter, buffer.combine(weights))
        for own, gradients in self._joined:
            pieces = combine(weights, gradients).split([p.numel() for p in own])
            for parameter, piece in zip(own, pieces, strict=True):
                add_to_grad(parameter, piece)
