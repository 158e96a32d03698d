"""Task gradients: collected by parameter, reduced to Gram matrices, weighed, and added to `.grad`.

`TaskGradients` takes the contributions of a running backward, or what `AccumulatedGradients` added
up over micro-batches, and weighs components as they complete. It asks for weights in one place,
`_weigh_ready`: Gram matrices -> `weigh` -> combined gradients, which are written to `.grad`.
"""

# K components, T tasks, P entries of a parameter, V rows of a table, I its columns

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.engine.budget import WaitingBudget
from gradvac.engine.contributions import (
    Contribution,
    Lookup,
    MatrixContribution,
    OuterProduct,
    added,
    is_better_unbuilt,
)
from gradvac.engine.kernels import combine, gram, stacked, wide
from gradvac.engine.metric import Metric
from gradvac.engine.pairs_of_entries import gram_of_entries
from gradvac.utils.native import native

Weigh = Callable[[Sequence[int], Tensor], Tensor]
"""Components (positions) and their Gram matrices [K, T, T] -> weights [K, T]."""
Write = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Takes leaves and their updates."""

_CHUNK_BYTES = (1 << 24, 1 << 29)  # of a large table's at a time, without and with a GPU


class ParameterGradients:
    """The contributions to one parameter: its Gram matrix and its combined gradient.

    Most contributions are built and added up, `[T, *shape]`, with two exceptions. Of a table that
    is only looked up, and of which a batch uses few rows, those rows alone are built; on a GPU not
    even those. A table that is too large is split: its Gram matrix is taken by pairs of entries
    where those are few, else by slices of rows (of those that the batch uses, if it is only looked
    up), and its combined gradient from the contributions themselves, at the price of a second
    product.

    Args:
        parameter: The parameter.
        component: Its component.
        table_bytes: Task gradients of a matrix above this size are not built.

    Attributes:
        num_entries: Of the parameter.
        parameter_bytes: Likewise.
        is_split: The parameter is a table that is too large.
        has_begun: Contributions were added.
        tokens: Whose rows alone `stack` gave; None if it gave all.
        block: Of which its task gradients are a part.
    """

    def __init__(self, parameter: nn.Parameter, component: int, table_bytes: int) -> None:
        self.parameter, self.component, self._table_bytes = parameter, component, table_bytes
        self.num_entries, self.parameter_bytes = parameter.numel(), parameter.nbytes
        self.clear()

    def clear(self) -> None:
        """Forget all contributions."""
        self.is_split = self.has_begun = False
        self.tokens: Tensor | None = None
        self.block: Tensor | None = None
        self._number = 0  # in the block
        self._given: Tensor | None = None  # see _gradients
        self._lookups: list[Lookup] = []  # that were not built: of few rows, or of a large table
        self._products: list[MatrixContribution] = []  # that were not built: of a large table

    def take(self) -> "ParameterGradients":
        """The contributions in another object; they are no longer here."""
        taken = copy.copy(self)
        self.clear()
        return taken

    @property
    def _has_gradients(self) -> bool:
        return self._given is not None or self.block is not None

    @property
    def _gradients(self) -> Tensor | None:
        """`[T, P]` or `[T, *shape]`, of those that were built."""
        if self._given is None and self.block is not None:
            self._given = self.block[self._number]
        return self._given

    def add(self, contribution: Contribution, head_bytes: int = 1 << 62) -> None:
        """Add a contribution; a head above `head_bytes` is split if that takes less."""
        self.has_begun, is_first = True, not self._has_gradients
        if isinstance(contribution, MatrixContribution):
            is_large = contribution.built_bytes > contribution.split_share * self._table_bytes
            if isinstance(contribution, OuterProduct) and contribution.built_bytes > head_bytes:
                given = len(contribution.left), contribution.segments.num_tasks
                is_large = is_large or is_better_unbuilt(self.parameter, *given)
            self.is_split |= is_first and is_large
            if isinstance(contribution, Lookup):
                every = [*self._lookups, contribution]
                if self.is_split or (is_first and Lookup.are_of_few_rows(every)):
                    self._lookups = every
                    return
            elif self.is_split:
                self._products.append(contribution)
                return
        if is_first:
            self.begin(contribution.task_gradients())
        else:
            self._given, self.block = contribution.add_to(self._writable()), None

    @property
    def is_unbuilt(self) -> bool:
        """Its Gram matrix and its combined gradient are taken from the contributions."""
        return self.is_split or (not self._has_gradients and Lookup.have_gram(self._lookups))

    def add_stack(self, block: Tensor, number: int) -> None:
        """Add task gradients `[T, P]`, which are a part of a block."""
        if not self.has_begun:
            self.has_begun, self.block, self._number = True, block, number
        elif not self._has_gradients:
            self.begin(block[number])
        else:
            self._given, self.block = added(self._writable(), block[number]), None

    def begin(self, gradients: Tensor) -> None:
        """Take the first task gradients, `[T, P]` or `[T, *shape]`."""
        self.has_begun, self._given = True, gradients
        while self._lookups and not self.is_split:
            self.add(self._lookups.pop())

    def _shaped(self) -> Tensor:
        assert self._gradients is not None
        return self._gradients.reshape(self._gradients.shape[0], *self.parameter.shape)

    def _writable(self) -> Tensor:
        """Each task's lies in one piece, none in another's, and all are whole rows apart."""
        gradients = self._shaped()
        size, apart = gradients[0].numel(), gradients.stride(0)
        is_whole = gradients[0].is_contiguous() and apart >= size > 0
        is_whole = is_whole and not apart % gradients.shape[-1]
        return gradients if is_whole else gradients.contiguous()

    @property
    def nbytes(self) -> int:
        """Of what is held when it is weighed, beside what is kept."""
        held = 0
        if self._given is not None:
            held = self._given.nbytes
        elif self.block is not None:
            held = self.block.nbytes // len(self.block)
        for lookup in self._lookups:
            held += 0 if self.is_split else min(lookup.rows_bytes, lookup.built_bytes)
        return held

    @property
    def kept_bytes(self) -> int:
        """Of products that are not built."""
        return sum(product.kept_bytes for product in self._products)

    def dense(self) -> Tensor:
        """Task gradients, `[T, *shape]`."""
        assert not self.is_split
        if self._gradients is None:
            return Lookup.join(self._lookups)[0].task_gradients()
        return self._shaped()

    def stack(self, *, dense: bool = False) -> Tensor:
        """Task gradients `[T, P]`; of a table's looked-up rows alone, unless `dense` is wanted."""
        gradients = self._gradients
        if gradients is None and not dense:
            self.tokens, rows = Lookup.join(self._lookups)[0].of_few_rows()
            return rows.flatten(1)
        if gradients is None:
            gradients = self.dense()
        return gradients if gradients.dim() == 2 else gradients.reshape(gradients.shape[0], -1)

    def spread(self, combined: Tensor) -> Tensor:
        """The gradient from a combination of what `stack` gave."""
        if self.tokens is None:
            return combined
        num_rows, width = self.parameter.shape
        dense = combined.new_zeros(num_rows, width)
        return dense.index_add_(0, self.tokens, combined.view(-1, width))

    def gram(self) -> Tensor:
        """`[T, T]`."""
        if not self.is_unbuilt:
            return gram(self.stack())
        if not self._products and self._gradients is None and Lookup.have_gram(self._lookups):
            return Lookup.join(self._lookups)[0].gram()
        every = (*self._products, *self._lookups)
        by_entries = gram_of_entries(every) if self._gradients is None else None
        if by_entries is not None:
            return by_entries
        first, num_rows, part = every[0], self.parameter.shape[0], self._slice
        if not self._products and self._gradients is None:
            _, rows = Lookup.join(self._lookups)[0].renumbered()
            if rows.num_rows < num_rows:
                first, num_rows, part = rows, rows.num_rows, rows.slice
        at_once = _CHUNK_BYTES[self.parameter.is_cuda] // max(
            1, first.built_bytes // max(1, num_rows)
        )
        # A multiple of 64 rows, which matrix products like; all of them on small tables.
        step = max(1, at_once // 64 * 64 or at_once)
        starts = range(0, max(1, num_rows), step)
        grams = [gram(part(s, min(s + step, num_rows)).flatten(1)) for s in starts]
        return torch.stack(grams).sum(0)

    def _slice(self, start: int, end: int) -> Tensor:
        """Task gradients of some rows: products first, then lookups are added in place."""
        parts, lookups = [one.slice(start, end) for one in self._products], list(self._lookups)
        if self._gradients is not None:
            parts.append(self._shaped()[:, start:end].clone())  # the sum below is written to
        if not parts:
            parts.append(lookups.pop().slice(start, end))
        total = reduce(torch.add, parts).contiguous()
        for lookup in lookups:
            lookup.add_to(total, start)
        return total

    def combine(self, weights: Tensor) -> Tensor:
        """sum_t weights[t] g_t; of a table that is not built, without ever building the g_t."""
        if not self.is_unbuilt:
            return self.spread(combine(weights, self.stack()))
        parts = [one.weighted(weights) for one in self._products]
        if self._gradients is not None:
            parts.append(combine(weights, self._gradients.flatten(1)).view(self.parameter.shape))
        total = reduce(torch.add, [part.to(wide(part.dtype)) for part in parts]) if parts else None
        for lookup in self._lookups:
            total = lookup.weighted(weights, total)
        assert total is not None
        return total


class AccumulatedGradients:
    """Task gradients added up over micro-batches, and joint gradients of leaves outside the model.

    Args:
        storage_dtype: Of task gradients; None: that of each parameter.
        offload: Keep them in host memory.
    """

    def __init__(self, *, storage_dtype: torch.dtype | None = None, offload: bool = False) -> None:
        self._dtype, self._offload = storage_dtype, offload
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._gradients: dict[Tensor, dict[int, Tensor]] = {}
        self.outside: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients or self.outside)

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
        """Add to joint gradients."""
        for leaf, gradient in gradients.items():
            earlier = self.outside.get(leaf)
            self.outside[leaf] = gradient if earlier is None else earlier + gradient

    def take(self, leaf: Tensor) -> dict[int, Tensor]:
        """Hand out the task gradients of a leaf; they are no longer here."""
        return self._gradients.pop(leaf, {})

    def take_stack(self, parameter: Tensor, tasks: Sequence[int]) -> Tensor | None:
        """Those of a parameter on its device, `[T, P]`; None if no task reached it."""
        stored = self.take(parameter)
        if not stored:
            return None
        some = next(iter(stored.values()))
        stack = some.new_zeros(len(tasks), parameter.numel(), device=parameter.device)
        for row, task in zip(stack, tasks, strict=True):
            if task in stored:
                row.copy_(stored.pop(task).reshape(-1), non_blocking=True)
        return stack


class TaskGradients:
    """Collects contributions by parameter, and turns components into updates as they complete.

    Args:
        members: The parameters of every component.
        stream_bytes: Complete components wait for each other until they hold this much, so that
            small models weigh everything at once; larger ones stream. None: by what the step needs.
        table_bytes: Task gradients of a matrix above this size are not built.
        metric: What Gram matrices see of task gradients, which are then built whatever their size.

    Attributes:
        head_bytes: Those of a head above this size are not built if that takes less.
    """

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        stream_bytes: int | None = None,
        table_bytes: int = 1 << 62,
        metric: Metric | None = None,
    ) -> None:
        self.members = members
        self.stream_bytes, self.metric = stream_bytes, metric
        self.table_bytes = table_bytes if metric is None else 1 << 62
        self._by_component = [
            [ParameterGradients(p, component, self.table_bytes) for p in parameters]
            for component, parameters in enumerate(members)
        ]
        # By identity: the hash of a tensor is a function of Python.
        self._by_parameter = {id(g.parameter): g for group in self._by_component for g in group}
        self.clear()

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        """A copy has parameters of its own, and holds nothing yet."""
        settings = (self.stream_bytes, self.table_bytes, self.metric)
        return TaskGradients, (self.members, *settings)

    def clear(self) -> None:
        """Forget everything about the backward that ran."""
        for gradients in self._by_parameter.values():
            if gradients.has_begun:
                gradients.clear()
        self._blocks: list[tuple[Tensor, list[ParameterGradients]]] = []
        self._ready: list[int] = []  # complete components
        self.begin(None, None)

    @property
    def collected(self) -> list[nn.Parameter]:
        """The parameters of which something was added and not yet weighed or taken."""
        return [one.parameter for one in self._by_parameter.values() if one.has_begun]

    def begin(
        self,
        weigh: Weigh | None,
        write: Write | None,
        build_waiting: Callable[[], None] = lambda: None,
        entry_bytes: int = 0,
        budget: WaitingBudget | None = None,
    ) -> None:
        """Expect a backward; without `weigh`, its contributions are only collected.

        Args:
            weigh: Asks a rule.
            write: Takes updates.
            build_waiting: Adds what still waits to be built.
            entry_bytes: Of the task gradients of one entry of what waits.
            budget: Of complete components that wait for each other.
        """
        self._weigh, self._write = weigh, write
        self._build_waiting, self._entry_bytes = build_waiting, entry_bytes
        self._budget = WaitingBudget(1 << 28, self.stream_bytes) if budget is None else budget
        may_split = budget is not None and weigh is not None and self.metric is None
        self.head_bytes = self._budget.limit if may_split else 1 << 62

    def add(self, parameter: nn.Parameter, contribution: Contribution) -> None:
        """Take what a junction contributes to a parameter."""
        if not parameter.requires_grad:  # frozen after the forward
            return
        self._by_parameter[id(parameter)].add(contribution, self.head_bytes)

    def add_block(self, parameters: Sequence[nn.Parameter], block: Tensor) -> None:
        """Take task gradients of some parameters that were built together, `[n, T, P]`."""
        members = [self._by_parameter[id(parameter)] for parameter in parameters]
        for number, gradients in enumerate(members):
            if gradients.parameter.requires_grad:
                gradients.add_stack(block, number)
        if self._weigh is not None:  # whoever takes parameters one by one frees them one by one
            self._blocks.append((block, members))

    def component_done(self, component: int) -> None:
        """All contributions to all parameters of a component have arrived."""
        if self._weigh is None:
            return
        self._ready.append(component)
        for gradients in self._by_component[component]:
            if gradients.has_begun:
                self._budget.gradients += gradients.nbytes + gradients.kept_bytes
            else:
                self._budget.gradients += self._entry_bytes * gradients.num_entries
            self._budget.freed -= gradients.parameter_bytes  # its gradient will take that place
        if not self._budget.gradients_fit():
            self._weigh_ready()

    def take(self, parameter: nn.Parameter) -> ParameterGradients | None:
        """Hand out what was collected of a parameter; it is no longer here."""
        gradients = self._by_parameter[id(parameter)]
        return gradients.take() if gradients.has_begun else None

    def add_accumulated(self, accumulated: AccumulatedGradients, tasks: Sequence[int]) -> None:
        """Take what was accumulated, component by component; it is no longer there."""
        for component, parameters in enumerate(self.members):
            for parameter in parameters:
                stack = accumulated.take_stack(parameter, tasks)
                if stack is not None:  # else no task used it: .grad stays as it is
                    self._by_parameter[id(parameter)].begin(stack)
            self.component_done(component)

    def finish(self) -> None:
        """Weigh what has not been weighed; the backward is over."""
        self._ready = list(range(len(self.members)))
        self._weigh_ready()

    @torch.no_grad()
    def _weigh_ready(self) -> None:
        """Gram matrices -> weights -> updates of the components that are complete; frees them."""
        self._build_waiting()
        ready, self._ready, self._budget.gradients = self._ready, [], 0
        every = [g for component in ready for g in self._by_component[component] if g.has_begun]
        if not every:
            return
        assert self._weigh is not None
        assert self._write is not None
        components = list(dict.fromkeys([gradients.component for gradients in every]))
        number_of = {component: number for number, component in enumerate(components)}
        split = [g for g in every if g.is_unbuilt and self.metric is None]
        built, stacks = self._built(every, number_of)
        numbers = [number_of[gradients.component] for gradients in built]
        products = seen = stacked(stacks, numbers, len(components)) if built else None
        if self.metric is not None:
            pairs = zip(built, stacks, strict=True)
            scaled = (self.metric(gradients.parameter, stack) for gradients, stack in pairs)
            seen = stacked([*scaled], numbers, len(components))
        grams = [] if seen is None else [seen.grams()]
        del seen  # what a metric made of task gradients is not needed for updates
        for gradients in split:
            of_one = gradients.gram()
            grams.append(of_one.new_zeros(len(components), *of_one.shape))
            grams[-1][number_of[gradients.component]] = of_one
        weights = self._weigh(components, reduce(torch.add, grams))
        combined = [] if products is None else products.combine(weights)
        updates = [g.spread(update) for g, update in zip(built, combined, strict=True)]
        updates += [g.combine(weights[number_of[g.component]]) for g in split]
        self._write([gradients.parameter for gradients in (*built, *split)], updates)
        for gradients in every:
            gradients.clear()

    def _built(
        self, every: Sequence[ParameterGradients], components: Collection[int]
    ) -> tuple[list[ParameterGradients], list[Tensor]]:
        """Parameters whose task gradients are built, those of whole blocks first, and the stacks.

        `[n, T, P]` of n parameters in a block, `[T, P]` of others.
        """
        has_metric = self.metric is not None
        built, stacks = ([], []) if has_metric else self._blocks_of(components)
        blocks = set(map(id, stacks))
        lone = [g for g in every if id(g.block) not in blocks and (has_metric or not g.is_unbuilt)]
        return built + lone, stacks + [gradients.stack(dense=has_metric) for gradients in lone]

    def _blocks_of(
        self, components: Collection[int]
    ) -> tuple[list[ParameterGradients], list[Tensor]]:
        """Parameters whose task gradients are whole blocks, in their order, and these blocks."""
        members, blocks = list[ParameterGradients](), list[Tensor]()
        for block, parts in self._blocks:
            if all(part.block is block and part.component in components for part in parts):
                members += parts
                blocks.append(block)
        self._blocks = []
        return members, blocks


def add_to_grad(
    leaves: Sequence[Tensor], updates: Sequence[Tensor], *, by_hand: bool = False
) -> None:
    """Accumulate final gradients.

    Autograd itself accumulates the gradients of leaves with hooks, so that calling these is torch's
    business; unless it is done by hand, because a replica's own hooks, which cannot be told apart
    there, would exchange the gradient once more.
    """
    hooked: list[tuple[Tensor, Tensor]] = []
    free: list[tuple[Tensor, Tensor]] = []
    for leaf, update in zip(leaves, updates, strict=True):
        (hooked if has_hooks(leaf) else free).append((leaf, update))
    if free and (kernels := native()) is not None:
        left = kernels.accumulate([leaf for leaf, _ in free], [update for _, update in free])
        free = [free[number] for number in left]
    hooked = [(leaf, _fitted(leaf, update)) for leaf, update in hooked]
    added: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for leaf, update in free:
            update = _fitted(leaf, update)
            if leaf.grad_dtype not in (leaf.dtype, None):
                hooked.append((leaf, update))  # autograd casts it, too
            elif leaf.grad is not None:
                added.append((leaf.grad, update))
            elif leaf.stride() == update.stride():
                leaf.grad = update.data  # no view, as optimizers of old take for granted
            else:  # fused optimizers take for granted that both lie alike in memory
                leaf.grad = torch.empty_like(leaf).copy_(update)
        if added:
            torch._foreach_add_([grad for grad, _ in added], [update for _, update in added])
    if by_hand:
        for leaf, update in hooked:
            _accumulate(leaf, update)
    elif hooked:
        torch.autograd.backward([leaf for leaf, _ in hooked], [update for _, update in hooked])


def has_hooks(leaf: Tensor) -> bool:
    """Whether hooks wait for a leaf's gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def _fitted(leaf: Tensor, update: Tensor) -> Tensor:
    """In the shape and dtype of its leaf."""
    if update.dim() != leaf.dim() or update.shape != leaf.shape:
        update = update.view_as(leaf)  # a shape of Python's would take three times as long
    if update.dtype != leaf.dtype or update.device != leaf.device:
        update = update.to(leaf.device, leaf.dtype)
    return update


@torch.no_grad()
def _accumulate(leaf: Tensor, update: Tensor) -> None:
    """What autograd does with a leaf's gradient."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed = hook(update)
        update = update if changed is None else changed
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf, dtype=leaf.grad_dtype).copy_(update)
    else:
        leaf.grad.add_(update)
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)
