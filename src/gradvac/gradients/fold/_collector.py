"""The task gradients of the backward that is running, and when they are complete."""

# K components, T tasks

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.gradients.fold._buffers import (
    Buffer,
    Chunked,
    Dense,
    LookedUp,
    first_buffer,
    joined_buffer,
)
from gradvac.gradients.fold._metric import Metric
from gradvac.gradients.fold._update import Weigh
from gradvac.gradients.kernels import Stacked
from gradvac.gradients.uses import Beside, Formed, Use

# Of uses that wait to be formed together, without and with a GPU that waits for launches.
_WAITING_BYTES = (1 << 26, 1 << 30)

Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Collector:
    """Collects uses by parameter, and folds components into updates as they complete.

    Args:
        members: The parameters of every component.
        stream_bytes: Complete components wait for each other until they hold this much, so that
            small models weigh everything at once; larger ones stream.
        table_bytes: Task gradients of a matrix above this size are not formed; see `Chunked`.
        metric: What Gram matrices see of task gradients, which are then formed whatever their size.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        *,
        stream_bytes: int = 0,
        table_bytes: int = 1 << 62,
        metric: Metric | None = None,
    ) -> None:
        self.members = members
        self.component_of = {p: k for k, parameters in enumerate(members) for p in parameters}
        self._slots = {p: _Slot(p) for parameters in members for p in parameters}
        self._slots_of = [[self._slots[p] for p in parameters] for parameters in members]
        self._stream_bytes, self._metric = stream_bytes, metric
        self.table_bytes = table_bytes if metric is None else 1 << 62
        self.clear()

    def clear(self) -> None:
        """Forget everything about the backward that ran."""
        for slot in self._slots.values():
            slot.clear()
        self._waiting: list[_Slot] = []  # those with uses that wait
        self._waiting_bytes, self._most_waiting = 0, _WAITING_BYTES[0]
        self._ready: list[int] = []
        self._held = 0  # bytes of the components that are ready
        self._weigh: Weigh | None = None
        self._write: Write | None = None

    @property
    def buffers(self) -> dict[nn.Parameter, Buffer]:
        """What was collected, without the uses that wait."""
        return {p: slot.buffer for p, slot in self._slots.items() if slot.buffer is not None}

    def open(self, weigh: Weigh | None, write: Write | None) -> None:
        """Expect a backward; `weigh=None` only collects."""
        self._weigh, self._write = weigh, write
        # Launches that are recorded cost nothing when they are replayed: then less is copied.
        is_on_gpu = next(p for parameters in self.members for p in parameters).is_cuda
        is_launched = is_on_gpu and not torch.cuda.is_current_stream_capturing()
        self._most_waiting = _WAITING_BYTES[is_launched]

    def deliver(self, parameter: nn.Parameter, use: Use) -> None:
        """Take what one use of a parameter contributes."""
        slot = self._slots[parameter]
        if not use.may_wait or slot.buffer is not None or use.formed_bytes > self.table_bytes:
            self._add(slot, use)
            return
        if not slot.waiting:
            self._waiting.append(slot)
        slot.waiting.append(use)
        self._waiting_bytes += use.held_bytes
        if self._waiting_bytes > self._most_waiting:
            self.form_waiting()

    def _add(self, slot: "_Slot", use: Use) -> None:
        about = (use, slot.parameter.shape, self.table_bytes)
        earlier = slot.buffer
        slot.buffer = first_buffer(*about) if earlier is None else joined_buffer(earlier, *about)

    @torch.no_grad()
    def form_waiting(self) -> None:
        """Form the uses that wait: those of one kind together, whatever their parameter."""
        kinds: dict[Any, list[tuple[_Slot, Any]]] = {}
        for slot in self._waiting:
            for use in slot.take_waiting():
                kinds.setdefault((type(use), use.kind), []).append((slot, use))
        self._waiting, self._waiting_bytes = [], 0
        for (kind, _), pairs in sorted(kinds.items(), key=lambda item: item[0][0] is Beside):
            formed = kind.form([use for _, use in pairs])
            for (slot, use), gradients in zip(pairs, formed, strict=True):
                self._add(slot, Formed(gradients, use.segments))

    def component_done(self, component: int) -> None:
        """All uses of all parameters of a component have arrived."""
        if self._weigh is None:
            return
        self._ready.append(component)
        for slot in self._slots_of[component]:
            if slot.buffer is not None:
                self._held += slot.buffer.nbytes
            for use in slot.waiting:
                self._held += use.formed_bytes
        if self._held >= self._stream_bytes:
            self._fold()

    def take(self, parameter: nn.Parameter) -> Buffer | None:
        """Hand out a parameter's buffer; it is no longer here."""
        slot = self._slots[parameter]
        for use in slot.take_waiting():
            self._add(slot, use)
        buffer, slot.buffer = slot.buffer, None
        return buffer

    def close(self) -> None:
        """Fold what has not been folded; the backward is over."""
        self.form_waiting()
        ready = set(self._ready)
        self._ready += [
            k
            for k, slots in enumerate(self._slots_of)
            if k not in ready and any(slot.buffer is not None for slot in slots)
        ]
        self._fold()

    @torch.no_grad()
    def _fold(self) -> None:
        """Gram -> weights -> update for the components that are ready, then free them."""
        self.form_waiting()
        used: list[int] = []
        members: list[list[tuple[nn.Parameter, Buffer]]] = []
        for component in self._ready:
            slots = self._slots_of[component]
            buffers = [(slot.parameter, slot.buffer) for slot in slots if slot.buffer is not None]
            if buffers:
                used.append(component)
                members.append(buffers)
            for slot in slots:
                slot.buffer = None
        self._ready, self._held = [], 0
        if not used:
            return
        assert self._weigh is not None
        assert self._write is not None
        fold = _Fold(members, self._metric)
        members.clear()
        weights = self._weigh(used, fold.grams())
        self._write(fold.parameters, fold.combine(weights))


class _Slot:
    """What is there of one parameter: a buffer, or uses that wait to be formed."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.clear()

    def clear(self) -> None:
        self.buffer: Buffer | None = None
        self.waiting: list[Any] = []

    def take_waiting(self) -> Sequence[Any]:
        """The uses that waited, as few as possible; they are no longer here."""
        uses, self.waiting = self.waiting, []
        if len(uses) == 1:
            return uses
        kinds: dict[Any, list[Any]] = {}
        for use in uses:
            kinds.setdefault((type(use), use.kind), []).append(use)
        return [one for alike in kinds.values() for one in alike[0].join(alike)]


class _Fold:
    """The buffers of some components: all their Gram matrices, then all their updates, at once."""

    def __init__(
        self,
        members: Sequence[Sequence[tuple[nn.Parameter, Buffer]]],
        metric: Metric | None = None,
    ) -> None:
        self._num, self._metric = len(members), metric
        every = [(p, k, buffer) for k, buffers in enumerate(members) for p, buffer in buffers]
        if metric is not None:  # which is of whole parameters
            every = [
                (p, k, Dense(b.whole()) if isinstance(b, LookedUp) else b) for p, k, b in every
            ]
        self._dense = [(p, k, b) for p, k, b in every if not isinstance(b, Chunked)]
        self._tables = [(p, k, b) for p, k, b in every if isinstance(b, Chunked)]
        self._groups = [component for _, component, _ in self._dense]
        self._stacks = [b.stack() for _, _, b in self._dense]
        self._stacked = Stacked(self._stacks, self._groups, self._num)
        self.parameters = [p for p, *_ in self._dense] + [p for p, *_ in self._tables]

    def grams(self) -> Tensor:
        """`[K, T, T]`."""
        seen = self._stacked
        if self._metric is not None:
            pairs = zip(self._dense, self._stacks, strict=True)
            measured = [self._metric(p, stack) for (p, *_), stack in pairs]
            seen = Stacked(measured, self._groups, self._num)
        total = seen.grams() if seen else None
        for _, component, table in self._tables:
            gram = table.gram()
            if total is None:
                total = gram.new_zeros(self._num, *gram.shape)
            total[component] += gram
        assert total is not None
        return total

    def combine(self, weights: Tensor) -> list[Tensor]:
        """The updates, in the order of `parameters`."""
        combined = self._stacked.combine(weights) if self._stacked else []
        updates = [
            b.spread(combination)
            for (*_, b), combination in zip(self._dense, combined, strict=True)
        ]
        return updates + [table.combine(weights[component]) for _, component, table in self._tables]
