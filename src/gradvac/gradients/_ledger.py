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

_SMALL = 1 << 14  # parameters up to this size share one product per component
_CHUNK_BYTES = 1 << 28


class Mode(Enum):
    """What a layer's backward does with its parameters."""

    PLAIN = "plain"  # return their gradients: the caller is torch, not an aligner
    TASKS = "tasks"  # hand task gradients to the ledger
    WEIGHTED = "weighted"  # return sum_t w_t g_t with weights already known


Inspect = Callable[[nn.Parameter, "Dense | Chunked"], None]


class Dense:
    """Task gradients of one parameter as `[T, *shape]`."""

    def __init__(self, *, eager: bool) -> None:
        self._eager = eager  # take the Gram matrix while the gradients are still in cache
        self.gradients: Tensor | None = None
        self._gram: Tensor | None = None

    def add(self, contribution: Contribution, segments: Segments) -> None:
        self._gram = None
        if self.gradients is None:
            self.gradients = contribution.task_gradients(segments)
            if self._eager and self.gradients[0].numel() > _SMALL:
                self._gram = gram(self.gradients.flatten(1))
        elif isinstance(contribution, Lookup):
            contribution.add_to(self.gradients, segments)
        else:
            self.gradients += contribution.task_gradients(segments)

    @property
    def nbytes(self) -> int:
        return 0 if self.gradients is None else self.gradients.nbytes

    def gram(self) -> Tensor:
        assert self.gradients is not None
        return gram(self.gradients.flatten(1)) if self._gram is None else self._gram

    def combine(self, weights: Tensor) -> Tensor:
        assert self.gradients is not None
        return combine(weights, self.gradients.flatten(1))


class Chunked:
    """A large table in two passes: the Gram matrix by slices of rows, then one weighted product.

    Keeps the contributions, not the task gradients, and pays with a second product.
    """

    nbytes = 0

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._uses: list[tuple[Contribution, Segments]] = []
        self._num_rows = num_rows
        self._step = max(1, _CHUNK_BYTES // row_bytes)

    def add(self, contribution: Contribution, segments: Segments) -> None:
        self._uses.append((contribution, segments))

    def gram(self) -> Tensor:
        total: Tensor | None = None
        for start in range(0, self._num_rows, self._step):
            end = min(start + self._step, self._num_rows)
            block: Tensor | None = None
            for use, segments in self._uses:
                part = use.slice(segments, start, end).flatten(1)
                block = part if block is None else block + part
            assert block is not None
            own = gram(block)
            total = own if total is None else total + own
        assert total is not None
        return total

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
        self._weigh: Weigh | None = None
        self._grams: dict[int, Tensor] = {}
        self.weights: Tensor | None = None  # [K, T], for WEIGHTED
        self.inspect: Inspect | None = None  # look at task gradients instead of folding them
        self.leaked: set[nn.Parameter] = set()

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

    def open(
        self, weigh: Weigh | None, num_tasks: int, resolve: Callable[[RowTasks | None], Segments]
    ) -> None:
        """Expect a backward in mode TASKS; `weigh=None` only collects."""
        self._weigh, self._num_tasks, self._resolve = weigh, num_tasks, resolve
        self._segments: dict[RowTasks | None, Segments] = {}
        self.mode = Mode.TASKS

    def segments(self, rows: RowTasks | None, length: int, name: str) -> Segments:
        """Tasks of the entries of a module's dimension 0."""
        if rows not in self._segments:  # every module of a forward asks for the same
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
        if parameter not in self.buffers:
            self.buffers[parameter] = self._buffer(parameter, use)
        self.buffers[parameter].add(use, segments)

    def _buffer(self, parameter: nn.Parameter, use: Contribution) -> Dense | Chunked:
        if isinstance(use, Table):
            row_bytes = self._num_tasks * parameter[0].numel() * use.element_size
            if len(parameter) * row_bytes > self._table_bytes:
                return Chunked(len(parameter), row_bytes)
        return Dense(eager=self._uses.get(parameter, 1) == 1)

    def component_done(self, component: int) -> None:
        """All uses of all parameters of a component have arrived."""
        if self.mode is not Mode.TASKS or not self.streaming:
            return
        if self.inspect is not None:
            self._show(self.members[component])
        if self._weigh is None:
            return
        self._ready.append(component)
        held = sum(
            self.buffers[p].nbytes
            for k in self._ready
            for p in self.members[k]
            if p in self.buffers
        )
        if held >= self._stream_bytes:
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
        self._ready = []
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
    """The buffers of one component; its small parameters are handled as one."""

    def __init__(
        self, parameters: list[nn.Parameter], buffers: dict[nn.Parameter, Dense | Chunked]
    ) -> None:
        self._large, self._small, pieces = [], [], []
        for parameter in parameters:
            buffer = buffers[parameter]
            if isinstance(buffer, Dense) and parameter.numel() <= _SMALL:
                assert buffer.gradients is not None
                self._small.append(parameter)
                pieces.append(buffer.gradients.flatten(1))
            else:
                self._large.append((parameter, buffer))
        self._joined = torch.cat(pieces, dim=1) if pieces else None

    def gram(self) -> Tensor:
        found = [buffer.gram() for _, buffer in self._large]
        if self._joined is not None:
            found.append(gram(self._joined))
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def write(self, weights: Tensor) -> None:
        for parameter, buffer in self._large:
            add_to_grad(parameter, buffer.combine(weights))
        if self._joined is not None:
            pieces = combine(weights, self._joined).split([p.numel() for p in self._small])
            for parameter, piece in zip(self._small, pieces, strict=True):
                add_to_grad(parameter, piece)
