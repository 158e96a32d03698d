"""Task gradients: collected, reduced to Gram matrices, weighed and added to `.grad`.

The waist between engines and rules, and the way an update enters `.grad`.

What came of one parameter, until its component is complete.

Task gradients that are stored, `[T, P]`, and added up over micro-batches.

The task gradients of the backward that is running, and when they are complete.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.contributions import (
    Built,
    Contribution,
    Lookup,
    MatrixContribution,
    SharedShift,
)
from gradvac.engine.kernels import combine, gram, stacked, wide
from gradvac.engine.metric import Metric

Weigh = Callable[[Sequence[int], Tensor], Tensor]
"""Components (positions) and their Gram matrices [K, T, T] -> weights [K, T]."""


def add_to_grad(
    leaves: Sequence[Tensor], updates: Sequence[Tensor], *, by_hand: bool = False
) -> None:
    """Accumulate final gradients.

    Where somebody waits for a leaf's gradient, autograd itself accumulates it, so that hooks are
    torch's business; unless it is done by hand, because a replica's own hooks, which cannot be
    told apart there, would exchange it once more.
    """
    watched: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for leaf, update in zip(leaves, updates, strict=True):
            if update.dim() != leaf.dim() or update.shape != leaf.shape:
                update = update.view_as(leaf)  # a shape of Python's would take three times as long
            if update.dtype != leaf.dtype or update.device != leaf.device:
                update = update.to(leaf.device, leaf.dtype)
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                watched.append((leaf, update))
            elif leaf.grad is not None:
                added.append((leaf.grad, update))
            elif leaf.stride() == update.stride():
                leaf.grad = update.data  # no view, as optimizers of old take for granted
            else:  # fused optimizers take for granted that both lie alike in memory
                leaf.grad = torch.empty_like(leaf).copy_(update)
        if added:
            torch._foreach_add_([grad for grad, _ in added], [update for _, update in added])
    if by_hand:
        for leaf, update in watched:
            _accumulate(leaf, update)
    elif watched:
        torch.autograd.backward([leaf for leaf, _ in watched], [update for _, update in watched])


@torch.no_grad()
def _accumulate(leaf: Tensor, update: Tensor) -> None:
    """What autograd does with a leaf's gradient."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed = hook(update)
        update = update if changed is None else changed
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf).copy_(update)
    else:
        leaf.grad.add_(update)
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


# T tasks, P parameters, V rows of a table, N tokens of the batch, I columns


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
        self._products: list[MatrixContribution] = []  # and its others

    def taken(self) -> "Buffer":
        """The uses in a buffer of their own; they are no longer here."""
        taken = copy.copy(self)
        self.clear()
        return taken

    def take_waiting(self) -> Sequence[Any]:
        """The uses that waited, as few as possible; they are no longer here."""
        contributions, self.waiting = self.waiting, []
        if len(contributions) < 2:
            return contributions
        kinds: dict[Any, list[Any]] = {}
        for contribution in contributions:
            kinds.setdefault((type(contribution), contribution.kind), []).append(contribution)
        return [one for alike in kinds.values() for one in alike[0].join(alike)]

    def add(self, contribution: Contribution) -> None:
        """Add a use."""
        self.has_begun, is_first = True, self._gradients is None
        if isinstance(contribution, MatrixContribution):
            self.is_split |= is_first and contribution.built_bytes > self._table_bytes
            if isinstance(contribution, Lookup):
                is_of_few_rows = (
                    is_first and 2 * contribution.tokens.shape[0] < contribution.num_rows
                )
                if self.is_split or is_of_few_rows:
                    self._lookups.append(contribution)
                    return
            elif self.is_split:
                self._products.append(contribution)
                return
        if is_first:
            self.begin(contribution.task_gradients())
            return
        gradients, only = self._built().contiguous(), contribution.segments.only
        if isinstance(contribution, Lookup):
            contribution.add_to(gradients)
        elif only is not None and isinstance(contribution, MatrixContribution):
            gradients[only].add_(contribution.total())
        else:
            given = contribution.task_gradients().reshape(gradients.shape)
            wider = torch.promote_types(gradients.dtype, given.dtype)
            gradients = gradients.to(wider).add_(given)
        self._gradients = gradients

    def begin(self, gradients: Tensor) -> None:
        """Take the first task gradients, `[T, P]` or `[T, *shape]`."""
        self.has_begun, self._gradients = True, gradients
        while self._lookups and not self.is_split:
            self.add(self._lookups.pop())

    def _built(self) -> Tensor:
        assert self._gradients is not None
        return self._gradients.reshape(self._gradients.shape[0], *self.parameter.shape)

    @property
    def nbytes(self) -> int:
        """Of what is held once all uses are formed."""
        total = 0 if self._gradients is None else self._gradients.nbytes
        for contribution in self._lookups:
            total += 0 if self.is_split else contribution.rows_bytes
        for contribution in self.waiting:
            total += contribution.built_bytes
        return total

    def whole(self) -> Tensor:
        """Task gradients, `[T, *shape]`."""
        assert not self.is_split
        if self._gradients is None:
            return Lookup.join(self._lookups)[0].task_gradients()
        return self._built()

    def stack(self, *, whole: bool = False) -> Tensor:
        """Task gradients `[T, P]`; of rows that are looked up alone, unless `whole` is wanted."""
        gradients = self._gradients
        if gradients is None and not whole:
            self.tokens, contribution = Lookup.join(self._lookups)[0].renumbered()
            return contribution.task_gradients().flatten(1)
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
        at_once = _CHUNK_BYTES // max(1, first.built_bytes // num_rows)
        # A multiple of 64 rows, which matrix products like; all of them on small tables.
        step = max(1, at_once // 64 * 64 or at_once)
        starts = range(0, num_rows, step)
        grams = [gram(self._slice(s, min(s + step, num_rows)).flatten(1)) for s in starts]
        return torch.stack(grams).sum(0)

    def _slice(self, start: int, end: int) -> Tensor:
        """Task gradients of some rows: products first, then lookups are added in place."""
        parts, lookups = (
            [contribution.slice(start, end) for contribution in self._products],
            list(self._lookups),
        )
        if self._gradients is not None:
            parts.append(self._built()[:, start:end].clone())  # which are not to be written
        if not parts:
            parts.append(lookups.pop().slice(start, end))
        total = reduce(torch.add, parts).contiguous()
        for contribution in lookups:
            contribution.add_to(total, start)
        return total

    def combine(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t; of a table that is split, never having formed the g_t."""
        if not self.is_split:
            return self.spread(combine(weights, self.stack()))
        parts = [
            contribution.weighted(weights) for contribution in (*self._products, *self._lookups)
        ]
        if self._gradients is not None:
            built = self._gradients.flatten(1)
            parts.append(combine(weights, built).view(self.parameter.shape))
        dtype = wide(parts[0].dtype)
        return reduce(torch.add, [part.to(dtype) for part in parts])


# K components, T tasks, P parameters of a component


class Stored:
    """Task gradients by leaf and task, and plain gradients of leaves that are not the model's.

    Args:
        storage_dtype: Of task gradients; None: that of each parameter.
        offload: Store them in host memory; each component visits the device twice.
        metric: What Gram matrices see of task gradients; None: they see them as they are.
    """

    def __init__(
        self,
        *,
        storage_dtype: torch.dtype | None = None,
        offload: bool = False,
        metric: Metric | None = None,
    ) -> None:
        self._dtype, self._offload, self._metric = storage_dtype, offload, metric
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._gradients: dict[Tensor, dict[int, Tensor]] = {}
        self._outside: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients or self._outside)

    def add(self, leaf: Tensor, by_task: Mapping[int, Tensor]) -> None:
        """Add to the task gradients of a leaf.

        Never in place: a gradient may share memory with another leaf's.
        """
        stored = self._gradients.setdefault(leaf, {})
        for task, gradient in by_task.items():
            device = torch.device("cpu") if self._offload else gradient.device
            is_kept = self._dtype is None or gradient.is_complex()  # it has no narrow dtypes
            gradient = gradient.to(device, gradient.dtype if is_kept else self._dtype)
            stored[task] = stored[task] + gradient if task in stored else gradient

    def add_outside(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add to plain gradients."""
        for leaf, gradient in gradients.items():
            earlier = self._outside.get(leaf)
            self._outside[leaf] = gradient if earlier is None else earlier + gradient

    def take(self, leaf: Tensor) -> dict[int, Tensor]:
        """Hand out the task gradients of a leaf; they are no longer here."""
        return self._gradients.pop(leaf, {})

    def stacked(self, parameter: Tensor, tasks: Sequence[int]) -> Tensor | None:
        """Task gradients of a parameter on its device, `[T, P]`; None if no task reached it."""
        stored = self._gradients.get(parameter)
        if not stored:
            return None
        some = next(iter(stored.values()))
        stacked = some.new_zeros(len(tasks), parameter.numel(), device=parameter.device)
        for row, task in zip(stacked, tasks, strict=True):
            if task in stored:
                row.copy_(stored[task].reshape(-1), non_blocking=True)
        return stacked

    def fold(
        self, members: Sequence[Sequence[nn.Parameter]], tasks: Sequence[int], weigh: Weigh
    ) -> None:
        """Gram -> weights -> `.grad`, for all components at once; nothing stays here."""
        grams = []
        for parameters in members:
            stacks = ((parameter, self.stacked(parameter, tasks)) for parameter in parameters)
            blocks = [gram(self._measured(p, stack)) for p, stack in stacks if stack is not None]
            empty = parameters[0].new_zeros(len(tasks), len(tasks), dtype=torch.float64)
            grams.append(torch.stack(blocks).sum(0) if blocks else empty)
        weights = weigh(range(len(grams)), torch.stack(grams))
        for component_weights, parameters in zip(weights, members, strict=True):
            for parameter in parameters:
                stacked = self.stacked(parameter, tasks)
                self.take(parameter)  # freed as the update takes its place
                if stacked is not None:  # unused by every task: .grad stays as it is
                    add_to_grad([parameter], [combine(component_weights, stacked)])
        add_to_grad(list(self._outside), list(self._outside.values()))
        self.clear()

    def _measured(self, parameter: nn.Parameter, stacked: Tensor) -> Tensor:
        return stacked if self._metric is None else self._metric(parameter, stacked)


# K components, T tasks


_BUILT_BYTES = 1 << 29  # of uses of one kind, which are copied side by side, at a time

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

    def deliver(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Take what one use of a parameter contributes."""
        if not parameter.requires_grad:  # frozen after the forward
            return
        buffer = self._buffers[id(parameter)]
        if (
            not contribution.may_wait
            or buffer.has_begun
            or contribution.built_bytes > self.table_bytes
        ):
            buffer.add(contribution)
            return
        buffer.waiting.append(contribution)
        self._waiting_bytes += contribution.held_bytes
        if self._waiting_bytes > self._most_waiting:
            self.build_waiting()

    @torch.no_grad()
    def build_waiting(self) -> None:
        """Form the uses that wait: those of one kind together, whatever their parameter."""
        kinds: dict[Any, list[tuple[Buffer, Any]]] = {}
        for buffer in self._buffers.values():
            for contribution in buffer.take_waiting() if buffer.waiting else ():
                kinds.setdefault((type(contribution), contribution.kind), []).append(
                    (buffer, contribution)
                )
        self._waiting_bytes = 0
        for (kind, _), pairs in sorted(kinds.items(), key=lambda item: item[0][0] is SharedShift):
            most = max(1, _BUILT_BYTES // max(1, pairs[0][1].held_bytes))
            while pairs:
                part = pairs[:most]
                del pairs[:most]  # what was formed is let go of
                built = kind.build([contribution for _, contribution in part])
                for (buffer, contribution), gradients in zip(part, built, strict=True):
                    if buffer.has_begun:
                        buffer.add(Built(gradients, contribution.segments))
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
        for contribution in buffer.take_waiting():
            buffer.add(contribution)
        return buffer.taken() if buffer.has_begun else None

    def close(self) -> None:
        """Fold what has not been folded; the backward is over."""
        self._ready = list(range(len(self.members)))
        self._fold()

    @torch.no_grad()
    def _fold(self) -> None:
        """Gram -> weights -> update for the components that are ready, then free them."""
        self.build_waiting()
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
