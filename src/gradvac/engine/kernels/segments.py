"""Entries by task: bring those of a task together, sum and multiply over them, mask the others.

On CUDA, Triton kernels (`triton_kernels.py`) take sums and products where that is faster.
"""

# B rows, N entries, T tasks present, D width, O outputs, I inputs

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradvac.engine.kernels.stacks import HALF, padded, triton_kernels, wide
from gradvac.utils.devices import index_on, triton_module

# Multiplications of a product: beyond, a library's kernel gains more than sorting for it costs,
# unless whole blocks of rows are copied by the GPU itself.
_LARGE = 1 << 35
_FEW = 512  # entries of a task


class Segments:
    """The task of every row.

    A dimension may count several entries a row (a flattened [B * S, D]): each method takes its
    length as it comes.

    Args:
        index: The task of every row, `[B]`, on the host or the device.
        num_tasks: T.
        device: Of the gradients.
        only: All rows belong to this task, however many there are.
        ascending: An index on the device ascends, so that it need not be sorted.
    """

    def __init__(
        self,
        index: Tensor,
        num_tasks: int,
        device: torch.device,
        *,
        only: int | None = None,
        ascending: bool = False,
    ) -> None:
        self.num_rows, self.num_tasks, self.only = len(index), num_tasks, only
        on_host = index.device.type == "cpu"
        # What the host knows without waiting for the device.
        self._counts = index.bincount(minlength=num_tasks).tolist() if on_host else None
        in_order = (index[1:] >= index[:-1]).all() if on_host or ascending else None
        is_sorted = bool(in_order) if on_host else ascending
        if in_order is not None and not on_host:
            torch._assert_async(in_order, "rows: the tasks do not ascend, as ascending=True says")
        self.order = None if is_sorted else index_on(index.argsort(stable=True), device)
        self.tasks, self.device = index_on(index, device), device
        self._forget()

    def _forget(self) -> None:
        """Clear what is derived from the rest on first use."""
        self._sizes: Tensor | None = None
        self._offsets: dict[int, Tensor] = {}
        self._indicators: dict[torch.dtype, Tensor] = {}
        self._spread: dict[object, Segments] = {}

    @classmethod
    def of_one_task(cls, task: int, num_tasks: int, device: torch.device) -> "Segments":
        """One row, and with it all entries, of one task."""
        return cls(torch.tensor([task]), num_tasks, device, only=task)

    @property
    def sizes(self) -> Tensor:
        """Rows of every task, `[T]`, on the device."""
        if self._sizes is None:
            tasks = torch.arange(self.num_tasks, device=self.tasks.device)
            self._sizes = (self.tasks == tasks[:, None]).sum(1)
        return self._sizes

    @property
    def is_known_to_host(self) -> bool:
        """Whether counts are known without waiting for the device."""
        return self._counts is not None

    @property
    def may_be_empty(self) -> bool:
        """Whether some task may have no row."""
        return self._counts is None or 0 in self._counts

    def counts(self, length: int) -> list[int]:
        """Entries of every task; waits for the device if the tasks came from there."""
        if self._counts is None:
            if self.tasks.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "tasks_of_rows: are on the device, so that their counts are not known while a "
                    "CUDA graph is recorded, and products in float32 need them; train in bf16 "
                    "(torch.autocast), or give the tasks as a list."
                )
            self._counts = self.sizes.tolist()
        return [count * (length // self.num_rows) for count in self._counts]

    def offsets(self, length: int) -> Tensor:
        """End of every task's entries once sorted, int32 `[T]`."""
        if length not in self._offsets:
            ends = self.sizes.cumsum(0) * (length // self.num_rows)
            self._offsets[length] = ends.to(torch.int32)
        return self._offsets[length]

    def sort(self, values: Tensor) -> Tensor:
        """Bring the entries of each task together along dimension 0."""
        if self.order is None:
            return values
        rows = values.reshape(self.num_rows, -1)
        return rows.index_select(0, self.order).view(values.shape)

    def repeated(self, times: int, *, are_same: bool = False) -> "Segments":
        """Segments of several batches like this one, whose tasks are the same, or their own."""
        if times == 1:
            return self
        key = (times, are_same)
        if key not in self._spread:
            every = torch.arange(times, device=self.device)
            segments = copy.copy(self)
            segments._forget()
            segments.num_rows = times * self.num_rows
            if are_same:
                order = self.order
                if order is None:
                    order = torch.arange(self.num_rows, device=self.device)
                segments.order = (order[:, None] + self.num_rows * every).reshape(-1)
                segments.tasks, segments._sizes = self.tasks.repeat(times), times * self.sizes
            else:
                if self.order is not None:
                    segments.order = (self.num_rows * every[:, None] + self.order).reshape(-1)
                segments.tasks = (self.num_tasks * every[:, None] + self.tasks).reshape(-1)
                segments.num_tasks = times * self.num_tasks
                segments._sizes = self.sizes.repeat(times)
            if self._counts is not None:
                counts = self._counts
                segments._counts = [times * c for c in counts] if are_same else times * counts
            self._spread[key] = segments
        return self._spread[key]

    def entries_by_task(self, length: int) -> tuple[Tensor, ...]:
        """The positions of every task's entries in a dimension of `length`."""
        every = torch.arange(length, device=self.tasks.device)
        parts: tuple[Tensor, ...] = self.sort(every).split(self.counts(length))
        return parts

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the entries of each task: `[..., N, D]` -> `[..., T, D]`; float32 or better."""
        # Launching a kernel of our own costs more than it saves on a few rows.
        few = values.dim() > 2 or values.shape[0] <= 4096 or not values.is_cuda
        kernels = None if few else triton_kernels()
        if kernels is not None and values.dtype in kernels.DTYPES and self.only is None:
            summed: Tensor = kernels.segment_sums(values, self)
            return summed
        values = self.by_row(values)
        if values.dtype not in self._indicators:
            tasks = torch.arange(self.num_tasks, device=self.tasks.device)
            self._indicators[values.dtype] = (self.tasks == tasks[:, None]).to(values.dtype)
        return self._indicators[values.dtype] @ values

    def by_row(self, values: Tensor) -> Tensor:
        """Sum over the entries of each row: `[..., N, D]` -> `[..., B, D]`."""
        dtype = wide(values.dtype)
        if values.shape[-2] == self.num_rows:
            return values.to(dtype)
        shape = (*values.shape[:-2], self.num_rows, -1, values.shape[-1])
        return values.reshape(shape).sum(-2, dtype=dtype)

    def along(self, length: int, *, tiled: bool = False) -> Tensor:
        """The task of every entry of a dimension: rows stay together, or come round again."""
        if length == self.num_rows:
            return self.tasks
        times = length // self.num_rows
        if tiled:
            return self.tasks.repeat(times)
        return self.tasks.repeat_interleave(times, output_size=length)

    def over(self, shape: tuple[int, ...], dim: int, *, tiled: bool) -> "Segments":
        """Segments of all entries of `shape`, whose rows lie along `dim`."""
        key = (shape, dim, tiled)
        if key not in self._spread:
            along = self.along(shape[dim], tiled=tiled)
            view = [1] * len(shape)
            view[dim] = -1
            index = along.view(view).expand(shape).reshape(-1)
            self._spread[key] = Segments(index, self.num_tasks, self.tasks.device)
        return self._spread[key]


def by_expert(tasks: Tensor, num_tasks: int, ends: Tensor) -> Segments:
    """Segments by task and expert, and one more of entries that belong to none.

    Args:
        tasks: Of the entries, which come one expert after the other.
        num_tasks: T.
        ends: Of the entries of every expert.
    """
    every = torch.arange(len(tasks), device=tasks.device)
    experts = torch.bucketize(every, ends, right=True)
    num_groups = num_tasks * len(ends)
    group = torch.where(experts < len(ends), tasks * len(ends) + experts, num_groups)
    return Segments(group, num_groups + 1, tasks.device)


def joined(parts: Sequence[tuple[Segments, int]]) -> Segments:
    """Segments of entries put one after the other, each with its own number of entries."""
    first = parts[0][0]
    index = torch.cat([segments.along(length) for segments, length in parts])
    return Segments(index, first.num_tasks, first.tasks.device)


class Owned(NamedTuple):
    """Whose the entries of one output gradient are.

    Either rows lie along one dimension, or every vector of the last dimension has a task of its
    own, or all entries belong to one task.
    """

    shape: tuple[int, ...]  # of the output gradient
    rows: Segments  # the tasks of the rows, or of the entries
    # Where rows lie; None: `rows` counts all entries but for the last dimension.
    dim: int | None = 0
    tiled: bool = False  # the rows come round again in `dim`, instead of staying together

    def flat(self) -> Segments | None:
        """Segments of the entries `[N, D]`; None if rows lie along the last dimension."""
        if self.rows.only is not None or self.dim is None:
            return self.rows
        lead = self.shape[:-1] if len(self.shape) > 1 else self.shape
        if self.dim >= len(lead):
            return None
        if self.dim == 0 and not self.tiled:
            return self.rows
        return self.rows.over(lead, self.dim, tiled=self.tiled)

    def along(self, dim: int) -> Segments | None:
        """Segments of one dimension; None unless rows lie along it."""
        if self.rows.only is not None:
            return self.rows
        if self.dim != dim:
            return None
        return self.rows.over((self.shape[dim],), 0, tiled=True) if self.tiled else self.rows

    def tasks(self) -> Tensor:
        """The task of every entry, in a shape that broadcasts over the gradient's."""
        if self.dim is None:
            view = (*self.shape[:-1], 1) if len(self.shape) > 1 else self.shape
            return self.rows.tasks.view(view)
        along = self.rows.along(self.shape[self.dim], tiled=self.tiled)
        return along.view([-1 if dim == self.dim else 1 for dim in range(len(self.shape))])

    def sum(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Sum over each task's entries, down to the shape of what was broadcast: `[T, *shape]`."""
        dtype, by_task = wide(values.dtype), (self.rows.num_tasks, *shape)
        if self.rows.only is not None:
            out = values.new_zeros(by_task, dtype=dtype)
            out[self.rows.only] = values.to(dtype).sum_to_size(tuple(shape))
            return out
        kept = (*[1] * (values.dim() - len(shape)), *shape)
        by_task_along = range(max(1, values.dim() - 1)) if self.dim is None else (self.dim,)
        sizes = enumerate(zip(values.shape, kept, strict=True))
        gone = [d for d, (size, left) in sizes if left == 1 != size and d not in by_task_along]
        if gone:
            values = values.sum(gone, keepdim=True, dtype=dtype)
        if self.dim is not None and kept[self.dim] == 1:
            segments = self.along(self.dim)
            assert segments is not None
            flat = values.movedim(self.dim, 0).reshape(values.shape[self.dim], -1)
            return segments.sum(flat).view(by_task)
        tasks = self.tasks()
        if values.dim() == 1 or self.dim == values.dim() - 1:
            values, tasks, kept = values[..., None], tasks[..., None], (*kept, 1)
        lead, size = values.shape[:-1], math.prod(kept[:-1])
        if size == 1:
            return self.rows.sum(values.reshape(math.prod(lead), -1)).view(by_task)
        places = torch.arange(size, device=values.device).view(kept[:-1])
        places = (tasks[..., 0] * size + places).expand(lead).reshape(-1)
        out = values.new_zeros(self.rows.num_tasks * size, values.shape[-1], dtype=dtype)
        flat = values.reshape(len(places), -1).to(dtype)
        return out.index_add_(0, places, flat).view(by_task)


def grouped_outer(left: Tensor, right: Tensor, segments: Segments) -> Tensor:
    """left[entries of t]^T right[entries of t] for every task, `[T, O, I]`.

    Args:
        left: `[N, O]`.
        right: `[N, I]`.
        segments: The task of every entry.
    """
    length = left.shape[0]
    if segments.only is not None:
        out = left.new_zeros(segments.num_tasks, left.shape[1], right.shape[1])
        torch.mm(left.t(), right, out=out[segments.only])
        return out
    is_single = left.is_cuda and left.dtype == right.dtype == torch.float32
    are_unknown = is_single and not segments.is_known_to_host and _product_kernels(left) is not None
    is_half = left.dtype == right.dtype and are_products_in_place(left, right.shape[1], segments)
    if are_unknown or is_half:  # without waiting for counts, or without sorting
        products: Tensor = _product_kernels(left).products([left], [right], segments, 0)[0][0]
        return products
    left, right = segments.sort(left), segments.sort(right)
    is_grouped = left.is_cuda and left.dtype == torch.bfloat16
    if is_grouped and not _are_many_and_equal(segments, length):
        products = F.grouped_mm(padded(left).t(), padded(right), offs=segments.offsets(length))
        if segments.may_be_empty:  # the kernel leaves the result of an empty group undefined
            _clear_empty(products, segments.sizes)
        return products[:, : left.shape[1], : right.shape[1]]
    counts = segments.counts(length)
    if len(set(counts)) == 1:
        shape = (len(counts), counts[0], -1)
        return torch.bmm(left.reshape(shape).mT, right.reshape(shape))
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for result, a, b in zip(out, left.split(counts), right.split(counts), strict=True):
        torch.mm(a.t(), b, out=result)
    return out


def _clear_empty(products: Tensor, sizes: Tensor) -> None:
    """Write zeros to the products `[T, O, I]` of tasks without an entry."""
    kernels = triton_kernels() if products.is_contiguous() else None
    if kernels is None:
        products.masked_fill_((sizes == 0)[:, None, None], 0.0)
    else:
        kernels.clear_empty(products, sizes)


def _are_many_and_equal(segments: Segments, length: int) -> bool:
    """Whether a batched product is faster than a grouped one: many tasks of equal size."""
    if segments.num_tasks < 16 or not segments.is_known_to_host:
        return False
    return len(set(segments.counts(length))) == 1


def outer_products(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], segments: Segments, sums_of: int = 0
) -> tuple[Tensor, Tensor | None]:
    """left[entries of t]^T right[entries of t] of some pairs for every task, `[n, T, O, I]`.

    Args:
        lefts: `[N, O]` each.
        rights: `[N, I]` each.
        segments: The task of every entry, in each of them.
        sums_of: The sums of which over the same entries are wanted too: 1, the left ones, `[n, T,
            O]`; 2, the right ones, `[n, T, I]`; 0, none.
    """
    num, left, right = len(lefts), lefts[0], rights[0]
    if left.dtype == right.dtype and are_products_in_place(left, right.shape[1], segments):
        made: tuple[Tensor, Tensor | None] = _product_kernels(left).products(
            lefts, rights, segments, sums_of
        )
        return made
    left, right = _cat(lefts), _cat(rights)
    weights = grouped_outer(left, right, segments.repeated(num))
    weights = weights.reshape(num, segments.num_tasks, *weights.shape[1:])
    if not sums_of:
        return weights, None
    values = left if sums_of == 1 else right
    return weights, segments.sum(values.reshape(num, -1, values.shape[-1]))


def are_products_in_place(left: Tensor, width: int, segments: Segments) -> bool:
    """Whether products with matrices of that width are taken where both lie, without a copy."""
    kernels = _product_kernels(left) if left.dtype in HALF and segments.only is None else None
    num_entries = left.numel() // left.shape[-1]
    # Rows in order need no sorting, and a library gains more where tasks have few entries.
    is_split_up = segments.order is None and num_entries < _FEW * segments.num_tasks
    if kernels is None or left.numel() * width <= (_LARGE >> 2 if is_split_up else _LARGE):
        return kernels is not None
    sizes = (num_entries // segments.num_rows, left.shape[-1], width)
    return segments.order is not None and kernels.can_copy_rows(*sizes, left.device)


def _product_kernels(left: Tensor) -> Any:
    """The module of kernels that multiply, or None where they cannot be used."""
    kernels = triton_module("gradvac.engine.kernels.product_kernels") if left.is_cuda else None
    return kernels if kernels is not None and kernels.can_multiply(left.device) else None


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def norm_sums(
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    means: Sequence[Tensor],
    scales: Sequence[Tensor],
    segments: Segments,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the scales of some normalisations by task, and of their shifts.

    Args:
        gradients: Of the outputs, `[N, D]` each.
        inputs: Likewise.
        means: Of the inputs, `[N, 1]` each; none for RMS normalisations, which have no shifts.
        scales: Their reciprocal deviations, `[N, 1]` each.
        segments: The task of every entry, in each of them.

    Returns:
        `[n, T, D]` each.
    """
    x = inputs[0]
    if are_norms_in_place(x, x.shape[-1]):
        given = (gradients, inputs, means, scales, segments)
        made: tuple[Tensor, Tensor] = triton_kernels().norm_segment_sums(*given)
        return made[0], made[1] if means else None
    dtype, gradient = wide(x.dtype), _cat(gradients)
    normal = _cat(inputs).to(dtype)
    if means:
        normal = normal - _cat(means)
    shape = (len(inputs), -1, x.shape[-1])
    by_scale = segments.sum((gradient * (normal * _cat(scales))).view(shape))
    return by_scale, segments.sum(gradient.view(shape)) if means else None


def are_norms_in_place(x: Tensor, width: int) -> bool:
    """The same of normalisations."""
    kernels = triton_kernels() if x.is_cuda else None
    return kernels is not None and x.dtype != torch.float64 and width <= kernels.WIDEST
