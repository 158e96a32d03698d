"""The task gradients of the backward that is running, and when they are complete."""

# K components, T tasks

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.gradients._buffers import Buffer, Chunked, first_buffer, joined_buffer
from gradvac.gradients._kernels import Stacked
from gradvac.gradients._update import Weigh
from gradvac.gradients._uses import Formed, Outer, Use, Waiting

_WAITING_BYTES = 1 << 26  # of uses that wait to be formed together

Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


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
        self.buffers: dict[nn.Parameter, Buffer] = {}
        self._waiting: dict[nn.Parameter, list[Any]] = {}  # uses
        self._waiting_bytes = 0
        self._ready: list[int] = []
        self._held = 0  # bytes of the components that are ready
        self._weigh: Weigh | None = None
        self._write: Write | None = None

    def open(self, weigh: Weigh | None, write: Write | None) -> None:
        """Expect a backward; `weigh=None` only collects."""
        self._weigh, self._write = weigh, write

    def deliver(self, parameter: nn.Parameter, use: Use) -> None:
        """Take what one use of a parameter contributes."""
        if not isinstance(use, Waiting) or not self._may_wait(parameter, use):
            self._add(parameter, use)
            return
        self._waiting.setdefault(parameter, []).append(use)
        self._waiting_bytes += use.held_bytes
        if self._waiting_bytes > _WAITING_BYTES:
            self.form_waiting()

    def _may_wait(self, parameter: nn.Parameter, use: Waiting) -> bool:
        is_table = isinstance(use, Outer) and (
            use.segments.only is not None or use.formed_bytes > self.table_bytes
        )
        is_small = 4 * use.held_bytes <= _WAITING_BYTES
        return is_small and not is_table and parameter not in self.buffers

    def _add(self, parameter: nn.Parameter, use: Use) -> None:
        known, about = self.buffers.get(parameter), (use, parameter.shape, self.table_bytes)
        self.buffers[parameter] = (
            first_buffer(*about) if known is None else joined_buffer(known, *about)
        )

    @torch.no_grad()
    def form_waiting(self) -> None:
        """Form the uses that wait: those of one kind together, whatever their parameter."""
        kinds: dict[Any, list[tuple[nn.Parameter, Any]]] = {}
        for parameter, uses in self._waiting.items():
            for use in _joined(uses):
                kinds.setdefault((type(use), use.kind), []).append((parameter, use))
        self._waiting, self._waiting_bytes = {}, 0
        for (form, _), own in kinds.items():
            found = form.form([use for _, use in own])
            for (parameter, use), gradients in zip(own, found, strict=True):
                self._add(parameter, Formed(gradients, use.segments))

    def component_done(self, component: int) -> None:
        """All uses of all parameters of a component have arrived."""
        if self._weigh is None:
            return
        self._ready.append(component)
        for parameter in self.members[component]:
            buffer = self.buffers.get(parameter)
            self._held += buffer.nbytes if buffer is not None else 0
            self._held += sum(use.formed_bytes for use in self._waiting.get(parameter, ()))
        if self._held >= self._stream_bytes:
            self._fold()

    def take(self, parameter: nn.Parameter) -> Buffer | None:
        """Hand out a parameter's buffer; it is no longer here."""
        for use in _joined(self._waiting.pop(parameter, [])):
            self._add(parameter, use)
        return self.buffers.pop(parameter, None)

    def close(self) -> None:
        """Fold what has not been folded; the backward is over."""
        self.form_waiting()
        left = {self.component_of[p] for p in self.buffers} - set(self._ready)
        self._ready += sorted(left)
        self._fold()

    @torch.no_grad()
    def _fold(self) -> None:
        """Gram -> weights -> update for the components that are ready, then free them."""
        self.form_waiting()
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


def _joined(uses: Sequence[Any]) -> Sequence[Any]:
    """Uses of one parameter, as few as possible."""
    kinds: dict[Any, list[Any]] = {}
    for use in uses:
        kinds.setdefault((type(use), use.kind), []).append(use)
    return [own[0] if len(own) == 1 else own[0].join(own) for own in kinds.values()]


class _Fold:
    """The buffers of some components: all their Gram matrices, then all their updates, at once."""

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        buffers: Mapping[nn.Parameter, Buffer],
    ) -> None:
        self._num = len(members)
        every = [(p, k, buffers[p]) for k, own in enumerate(members) for p in own]
        self._dense = [(p, k, b) for p, k, b in every if not isinstance(b, Chunked)]
        self._tables = [(p, k, b) for p, k, b in every if isinstance(b, Chunked)]
        groups = [component for _, component, _ in self._dense]
        self._stacked = Stacked([b.stack() for _, _, b in self._dense], groups, self._num)
        self.parameters = [p for p, *_ in self._dense] + [p for p, *_ in self._tables]

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
        combined = self._stacked.combine(weights) if self._stacked else []
        updates = [b.spread(own) for (*_, b), own in zip(self._dense, combined, strict=True)]
        return updates + [table.combine(weights[component]) for _, component, table in self._tables]
