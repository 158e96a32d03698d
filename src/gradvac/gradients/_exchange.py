"""Task gradients of several processes, put together exactly.

Every process differentiates its own rows, in whichever engine, and keeps its m task gradients. Then
the processes agree on who holds what, and exchange, a few components at a time:

    all-to-all   every process gets a slice of all parameters from all others: m P / W numbers each
    locally      rows of one task are summed, and the slice's part of the Gram matrix is taken
    all-reduce   of the parts, [K, T, T]: a Gram matrix is a sum over parameters
    locally      the rule gives all processes the same weights; each combines its slice
    all-gather   of the combined slices

So a process sends (m + 1) P numbers where an all-reduce sends 2 P. A Gram matrix is *not* a sum
over processes: `exact=False` treats it as one, leaves out the products between gradients of
different processes, and sends what an all-reduce sends.
"""

# W processes, K components, T tasks present on any of them, m on this one, P parameters, S a slice

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from gradvac import gram as geometry
from gradvac.gradients._agreement import Agreed, Agreement
from gradvac.gradients._components import Components
from gradvac.gradients._distributed import Ranks, device_of
from gradvac.gradients._kernels import combine, gram
from gradvac.gradients._losses import Losses
from gradvac.gradients._update import Weigh, add_to_grad
from gradvac.indices import index_on

_BUCKET_BYTES = 1 << 26  # of one task's gradients that are exchanged at once

Deliver = Callable[[nn.Parameter, Tensor], None]


class Engine(Protocol):
    """What separates the tasks of this process."""

    def task_gradients(self, losses: Losses, deliver: Deliver) -> Mapping[Tensor, Tensor]: ...


class Exchange:
    """Keeps the task gradients of this process, and combines them with those of the others.

    Args:
        model: The model, a replica of which every process has.
        components: Its components.
        tasks: Task names.
        ranks: The processes.
        exact: Whether Gram matrices are those of the whole batch.
        facts: See `Agreement`.
    """

    def __init__(
        self,
        model: nn.Module,
        components: Components,
        tasks: Sequence[str],
        ranks: Ranks,
        *,
        exact: bool,
        facts: Callable[[], Mapping[str, object]],
    ) -> None:
        parameters = dict(model.named_parameters())
        self._members = [[parameters[p] for p in own] for own in components.values()]
        self._parameters = [p for own in self._members for p in own]
        self._device = device_of(self._parameters)
        self.ranks, self.exact = ranks, exact
        self.agreement = Agreement(ranks, tasks, components, self._parameters, facts)
        self._gradients: dict[nn.Parameter, dict[int, Tensor]] = {}

    # -- this process --------------------------------------------------------------------------

    def collect(self, engine: Engine, losses: Losses) -> None:
        """Add the task gradients of a micro-batch to those that wait; no process is asked."""
        fresh: dict[nn.Parameter, Tensor] = {}
        outside = engine.task_gradients(losses, fresh.__setitem__)
        if outside:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in list(outside)[:3])
            raise ValueError(
                f"losses: they also reach {len(outside)} tensor(s) outside the model (shapes "
                f"{shapes}), whose gradients no process would share with the others; make one "
                "nn.Module of everything that is trained, and give that to the Aligner."
            )
        for parameter, gradients in fresh.items():
            own = self._gradients.setdefault(parameter, {})
            for task, gradient in zip(losses.present, gradients, strict=True):
                own[task] = own[task] + gradient if task in own else gradient

    def discard(self) -> None:
        """Forget what waits."""
        self._gradients = {}

    # -- all processes -------------------------------------------------------------------------

    def agree(self, losses: Mapping[int, Tensor]) -> Agreed:
        """Learn who holds what; see `Agreement.agree`."""
        return self.agreement.agree(losses, self._gradients.keys())

    @torch.no_grad()
    def fold(self, agreed: Agreed, weigh: Weigh) -> None:
        """Gram -> weights -> `.grad`, a few components at a time, alike in all processes."""
        for bucket in self._buckets(agreed.used):
            own = self._side_by_side(bucket, agreed.held[self.ranks.rank])
            update = (self._exactly if self.exact else self._nearly)(bucket, own, agreed, weigh)
            updates = update[: bucket.length].split(bucket.sizes)
            add_to_grad(
                bucket.parameters,
                [_as_given(u, p) for u, p in zip(updates, bucket.parameters, strict=True)],
                by_hand=True,
            )
        self.discard()

    def _exactly(self, bucket: "_Bucket", own: Tensor, agreed: Agreed, weigh: Weigh) -> Tensor:
        ranks, num_mine = self.ranks, own.shape[0]
        width = -(-bucket.length // ranks.size)
        padded = own.new_zeros(num_mine, ranks.size * width)
        padded[:, : bucket.length] = own
        slices = padded.view(num_mine, ranks.size, width).transpose(0, 1).contiguous()
        rows = ranks.all_to_all(slices, [len(tasks) for tasks in agreed.held])
        where = [agreed.present.index(task) for tasks in agreed.held for task in tasks]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        sums = rows.new_zeros(len(agreed.present), width, dtype=dtype)
        sums.index_add_(0, index_on(where, rows.device), rows.to(dtype))
        sums /= ranks.size
        parts = bucket.parts(ranks.rank * width, (ranks.rank + 1) * width)
        grams = _grams(sums, parts, len(bucket.components))
        weights = weigh(bucket.components, ranks.all_reduce(grams))
        update = own.new_zeros(width)
        for component, start, end in parts:
            update[start:end] = combine(weights[component], sums[:, start:end])
        return ranks.all_gather(update).view(-1)

    def _nearly(self, bucket: "_Bucket", own: Tensor, agreed: Agreed, weigh: Weigh) -> Tensor:
        ranks, num_tasks = self.ranks, len(agreed.present)
        mine = index_on(
            [agreed.present.index(task) for task in agreed.held[ranks.rank]], own.device
        )
        parts = bucket.parts(0, bucket.length)
        dtype = geometry.working_dtype(own.device)
        grams = own.new_zeros(len(bucket.components), num_tasks, num_tasks, dtype=dtype)
        if len(own):
            local = _grams(own, parts, len(bucket.components)) / ranks.size**2
            grams[:, mine[:, None], mine] = local
        weights = weigh(bucket.components, ranks.all_reduce(grams))
        update = own.new_zeros(bucket.length)
        for component, start, end in parts if len(own) else ():
            update[start:end] = combine(weights[component, mine] / ranks.size, own[:, start:end])
        return ranks.all_reduce(update)

    # -- how -----------------------------------------------------------------------------------

    def _buckets(self, used: frozenset[nn.Parameter]) -> "list[_Bucket]":
        """Components that are exchanged at once; a component is never divided."""
        buckets: list[_Bucket] = []
        for component, members in enumerate(self._members):
            own = [p for p in members if p in used]
            if not own:
                continue
            if not buckets or buckets[-1].nbytes >= _BUCKET_BYTES:
                buckets.append(_Bucket())
            buckets[-1].add(component, own)
        return buckets

    def _side_by_side(self, bucket: "_Bucket", tasks: Sequence[int]) -> Tensor:
        """Task gradients of this process, `[m, P]`; zero where a task does not reach."""
        rows = torch.zeros(len(tasks), bucket.length, dtype=bucket.dtype, device=self._device)
        start = 0
        for parameter, size in zip(bucket.parameters, bucket.sizes, strict=True):
            own = self._gradients.pop(parameter, {})
            for row, task in zip(rows, tasks, strict=True):
                if task in own:
                    row[start : start + size] = _flat(own[task])
            start += size
        return rows


class _Bucket:
    """Some components and their parameters, side by side."""

    def __init__(self) -> None:
        self.components: list[int] = []
        self.parameters: list[nn.Parameter] = []
        self.sizes: list[int] = []
        self._ends: list[int] = []
        self.dtype = torch.bfloat16

    def add(self, component: int, parameters: Sequence[nn.Parameter]) -> None:
        """Append a component."""
        real = [p.real.dtype if p.is_complex() else p.dtype for p in parameters]
        for dtype in real:  # what an all-reduce of the gradients would send
            known = self.dtype if self.parameters else dtype
            self.dtype = torch.promote_types(known, dtype)
        self.components.append(component)
        self.parameters += parameters
        self.sizes += [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        self._ends.append(sum(self.sizes))

    @property
    def length(self) -> int:
        return self._ends[-1]

    @property
    def nbytes(self) -> int:
        return self.length * self.dtype.itemsize

    def parts(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The components within start..end: (number, first column, end), counted from start."""
        found, first = [], 0
        for number, last in enumerate(self._ends):
            here, there = max(first, start), min(last, end)
            if here < there:
                found.append((number, here - start, there - start))
            first = last
        return found


def _grams(rows: Tensor, parts: Sequence[tuple[int, int, int]], num: int) -> Tensor:
    """Of every part of the columns, `[K, T, T]`."""
    dtype = geometry.working_dtype(rows.device)
    found = rows.new_zeros(num, rows.shape[0], rows.shape[0], dtype=dtype)
    for component, start, end in parts:
        found[component] = gram(rows[:, start:end])
    return found


def _flat(gradient: Tensor) -> Tensor:
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return gradient.reshape(-1)


def _as_given(update: Tensor, parameter: nn.Parameter) -> Tensor:
    return torch.view_as_complex(update.view(-1, 2)) if parameter.is_complex() else update.clone()
