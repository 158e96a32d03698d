"""The task gradients of the backward that is running, and when they are complete."""

# K components, T tasks

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.fold._buffers import Buffer
from gradvac.engine.fold._metric import Metric
from gradvac.engine.fold._update import Weigh
from gradvac.engine.kernels import stacked
from gradvac.engine.uses import Beside, Formed, Use

_FORMED_BYTES = 1 << 29  # of uses of one kind, which are copied side by side, at a time

Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


@cache
def _most_bytes(gpu: torch.device | None) -> tuple[int, int]:
    """Of uses that wait to be formed together, and of complete components, to be folded together.

    More with a GPU that waits for launches, but a small share of its memory.
    """
    if gpu is None:
        return 1 << 26, 1 << 28
    memory = torch.cuda.get_device_properties(gpu).total_memory
    return min(1 << 31, memory >> 5), min(1 << 30, memory >> 6)


class Collector:
    """Collects uses by parameter, and folds components into updates as they complete.

    Args:
        members: The parameters of every component.
        stream_bytes: Complete components wait for each other until they hold this much, so that
            small models weigh everything at once; larger ones stream. None: as the device likes it.
        table_bytes: Task gradients of a matrix above this size are not formed; see `Buffer`.
        metric: What Gram matrices see of task gradients, which are then formed whatever their size.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        stream_bytes: int | None = None,
        table_bytes: int = 1 << 62,
        metric: Metric | None = None,
    ) -> None:
        self.members = members
        self.component_of = {p: k for k, parameters in enumerate(members) for p in parameters}
        self._stream_bytes, self._metric = stream_bytes, metric
        self.table_bytes = table_bytes if metric is None else 1 << 62
        # By identity: the hash of a tensor is a function of Python.
        self._buffers = {id(p): Buffer(p, self.table_bytes) for p in self.component_of}
        self._buffers_of = [[self._buffers[id(p)] for p in parameters] for parameters in members]
        self.clear()

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        """A copy has parameters of its own, and collects nothing yet."""
        settings = (self._stream_bytes, self.table_bytes, self._metric)
        return Collector, (self.members, *settings)

    def clear(self) -> None:
        """Forget everything about the backward that ran."""
        for buffer in self._buffers.values():
            if buffer.has_begun or buffer.waiting:
                buffer.clear()
        self._most_waiting, self._most_held = _most_bytes(None)
        self._waiting_bytes = 0
        self._ready: list[int] = []
        self._held = 0  # bytes of the components that are ready
        self._weigh: Weigh | None = None
        self._write: Write | None = None

    @property
    def collected(self) -> list[nn.Parameter]:
        """The parameters of which something was added and not yet folded or taken."""
        return [buffer.parameter for buffer in self._buffers.values() if buffer.has_begun]

    def open(self, weigh: Weigh | None, write: Write | None) -> None:
        """Expect a backward; `weigh=None` only collects."""
        self._weigh, self._write = weigh, write
        # Launches that are recorded cost nothing when they are replayed: then less is copied.
        first = next(p for parameters in self.members for p in parameters)
        is_launched = first.is_cuda and not torch.cuda.is_current_stream_capturing()
        self._most_waiting, held = _most_bytes(first.device if is_launched else None)
        self._most_held = held if self._stream_bytes is None else self._stream_bytes

    def deliver(self, parameter: nn.Parameter, use: Use) -> None:
        """Take what one use of a parameter contributes."""
        if not parameter.requires_grad:  # frozen after the forward
            return
        buffer = self._buffers[id(parameter)]
        if not use.may_wait or buffer.has_begun or use.formed_bytes > self.table_bytes:
            buffer.add(use)
            return
        buffer.waiting.append(use)
        self._waiting_bytes += use.held_bytes
        if self._waiting_bytes > self._most_waiting:
            self.form_waiting()

    @torch.no_grad()
    def form_waiting(self) -> None:
        """Form the uses that wait: those of one kind together, whatever their parameter."""
        kinds: dict[Any, list[tuple[Buffer, Any]]] = {}
        for buffer in self._buffers.values():
            for use in buffer.take_waiting() if buffer.waiting else ():
                kinds.setdefault((type(use), use.kind), []).append((buffer, use))
        self._waiting_bytes = 0
        for (kind, _), pairs in sorted(kinds.items(), key=lambda item: item[0][0] is Beside):
            most = max(1, _FORMED_BYTES // max(1, pairs[0][1].held_bytes))
            while pairs:
                part = pairs[:most]
                del pairs[:most]  # what was formed is let go of
                formed = kind.form([use for _, use in part])
                for (buffer, use), gradients in zip(part, formed, strict=True):
                    if buffer.has_begun:
                        buffer.add(Formed(gradients, use.segments))
                    else:
                        buffer.begin(gradients)

    def component_done(self, component: int) -> None:
        """All uses of all parameters of a component have arrived."""
        if self._weigh is None:
            return
        self._ready.append(component)
        for buffer in self._buffers_of[component]:
            self._held += buffer.nbytes
        if self._held >= self._most_held:
            self._fold()

    def take(self, parameter: nn.Parameter) -> Buffer | None:
        """Hand out a parameter's buffer; it is no longer here."""
        buffer = self._buffers[id(parameter)]
        for use in buffer.take_waiting():
            buffer.add(use)
        return buffer.taken() if buffer.has_begun else None

    def close(self) -> None:
        """Fold what has not been folded; the backward is over."""
        self._ready = list(range(len(self.members)))
        self._fold()

    @torch.no_grad()
    def _fold(self) -> None:
        """Gram -> weights -> update for the components that are ready, then free them."""
        self.form_waiting()
        ready, self._ready, self._held = self._ready, [], 0
        begun = {k: [b for b in self._buffers_of[k] if b.has_begun] for k in ready}
        members = {k: buffers for k, buffers in begun.items() if buffers}
        if not members:
            return
        assert self._weigh is not None
        assert self._write is not None
        num, metric = len(members), self._metric
        every = [(n, b) for n, buffers in enumerate(members.values()) for b in buffers]
        dense = [(number, buffer) for number, buffer in every if not buffer.is_split]
        split = [(number, buffer) for number, buffer in every if buffer.is_split]
        groups = [number for number, _ in dense]
        stacks = [buffer.stack(whole=metric is not None) for _, buffer in dense]
        products = seen = stacked(stacks, groups, num) if dense else None
        if metric is not None:
            pairs = zip(dense, stacks, strict=True)
            seen = stacked([metric(b.parameter, stack) for (_, b), stack in pairs], groups, num)
        grams = None if seen is None else seen.grams()
        del seen  # what a metric made of task gradients is not needed for updates
        for number, buffer in split:
            gram = buffer.gram()
            grams = gram.new_zeros(num, *gram.shape) if grams is None else grams
            grams[number] += gram
        assert grams is not None
        weights = self._weigh(list(members), grams)
        combined = [] if products is None else products.combine(weights)
        updates = [
            own if buffer.tokens is None else buffer.spread(own)
            for (_, buffer), own in zip(dense, combined, strict=True)
        ]
        updates += [buffer.combine(weights[number]) for number, buffer in split]
        self._write([buffer.parameter for _, buffer in (*dense, *split)], updates)
        for _, buffer in every:
            buffer.clear()
