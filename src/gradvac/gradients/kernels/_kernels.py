"""The two products on stacked task gradients, and the grouped weight gradient.

Each has a torch form, which is the reference, and on CUDA a Triton kernel (`_triton_stacks.py`)
where that is faster: both products are memory-bound and read every gradient once.
"""

# T tasks, P parameters, N token rows (rows of a task are contiguous), O outputs, I inputs

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradvac.gram import working_dtype
from gradvac.triton_modules import triton_module

if TYPE_CHECKING:
    from gradvac.gradients.kernels._segments import Segments

_CHUNK = 1 << 18  # columns converted to the working precision at a time
_CACHED = 1 << 14  # on a CPU, where what was converted should still be in the cache when multiplied


def triton_kernels(name: str) -> Any:
    """A module of Triton kernels ("stacks" or "sums"), or None where Triton is not installed."""
    return triton_module(f"gradvac.gradients.kernels._triton_{name}")


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of such numbers are taken in: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows of `[T, P]`, in the working precision, `[T, T]`."""
    return Stacked([gradients], [0], 1).grams()[0]


def combine(weights: Tensor, gradients: Tensor) -> Tensor:
    """sum_t weights[t] gradients[t] for `[T, P]`, in float32 or better, `[P]`."""
    return Stacked([gradients], [0], 1).combine(weights[None])[0]


def gram_reference(gradients: Tensor) -> Tensor:
    """`gram` in torch operations."""
    num_tasks = gradients.shape[0]
    dtype = working_dtype(gradients.device)
    total = gradients.new_zeros(num_tasks, num_tasks, dtype=dtype)
    for chunk in gradients.split(_CHUNK if gradients.is_cuda else _CACHED, dim=1):
        block = chunk.to(dtype)
        total.addmm_(block, block.t())
    return total


def combine_reference(weights: Tensor, gradients: Tensor) -> Tensor:
    """`combine` in torch operations."""
    dtype = wide(gradients.dtype)
    if gradients.dtype == dtype:
        return weights.to(dtype) @ gradients
    chunks = gradients.split(_CHUNK, dim=1)
    return torch.cat([weights.to(dtype) @ chunk.to(dtype) for chunk in chunks])


_JOINED = 1 << 19  # parameters up to this size share their products within a component


class Stacked:
    """Task gradients of many parameters, for all Gram matrices and all updates at once.

    Args:
        stacks: `[T, P]` of every parameter; each may be a part of a wider one.
        groups: The component of every parameter.
        num_groups: K.
    """

    def __init__(self, stacks: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> None:
        self._is_complex = [stack.is_complex() for stack in stacks]
        self._stacks = stacks
        if any(self._is_complex):
            self._stacks = [_as_real(s) if s.is_complex() else s for s in stacks]
        self._groups, self._num_groups = groups, num_groups
        # Parameters whose products are taken as one; on CUDA a kernel takes them all.
        self._joined: list[tuple[int, list[int], Tensor]] | None = None

    def __bool__(self) -> bool:
        return bool(self._stacks)

    def grams(self) -> Tensor:
        """`[K, T, T]`, in the working precision."""
        kernels = self._kernels()
        if kernels is not None:
            total: Tensor = kernels.grams(self._stacks, self._groups, self._num_groups)
            return total
        num_tasks, device = len(self._stacks[0]), self._stacks[0].device
        shape = (self._num_groups, num_tasks, num_tasks)
        grams = torch.zeros(shape, dtype=working_dtype(device), device=device)
        for group, _, stack in self._join():
            grams[group] += gram_reference(stack)
        return grams

    def combine(self, weights: Tensor) -> list[Tensor]:
        """sum_t weights[k, t] g_t of every parameter, in float32 or better, `[P]` each."""
        kernels = self._kernels()
        if kernels is not None:
            return list(kernels.combine_many(weights, self._stacks, self._groups))
        combined = list(self._stacks)
        for group, members, stack in self._join():
            pieces = combine_reference(weights[group], stack)
            sizes = [self._stacks[m].shape[1] for m in members]
            for member, piece in zip(members, pieces.split(sizes), strict=True):
                combined[member] = piece
        return [
            # A copy: complex numbers may not begin at any place of a storage.
            torch.view_as_complex(update.view(-1, 2).clone()) if is_complex else update
            for update, is_complex in zip(combined, self._is_complex, strict=True)
        ]

    def _kernels(self) -> Any:
        first = self._stacks[0]
        kernels = triton_kernels("stacks") if first.is_cuda else None
        if kernels is None or len(first) > kernels.MOST_TASKS or any(self._is_complex):
            return None
        return kernels if all(s.dtype in kernels.DTYPES for s in self._stacks) else None

    def _join(self) -> list[tuple[int, list[int], Tensor]]:
        """(component, numbers of parameters, their gradients side by side)."""
        if self._joined is None:
            small: dict[tuple[int, torch.dtype], list[int]] = {}
            self._joined = []
            for number, (stack, group) in enumerate(zip(self._stacks, self._groups, strict=True)):
                if stack.shape[1] > _JOINED:
                    self._joined.append((group, [number], stack))
                else:
                    small.setdefault((group, stack.dtype), []).append(number)
            for (group, _), members in small.items():
                side_by_side = torch.cat([self._stacks[m] for m in members], dim=1)
                self._joined.append((group, members, side_by_side))
        return self._joined


def _as_real(stack: Tensor) -> Tensor:
    """The inner product of complex gradients is that of real and imaginary parts."""
    return torch.view_as_real(stack.contiguous()).flatten(1)


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
    left, right = segments.sort(left), segments.sort(right)
    is_grouped = left.is_cuda and left.dtype == torch.bfloat16
    if is_grouped and not _are_many_and_equal(segments, length):
        whole = F.grouped_mm(_padded(left).t(), _padded(right), offs=segments.offsets(length))
        if segments.may_be_empty:  # the kernel leaves the result of an empty group undefined
            _clear_empty(whole, segments.sizes)
        return whole[:, : left.shape[1], : right.shape[1]]
    counts = segments.counts(length)
    if len(set(counts)) == 1:
        shape = (len(counts), counts[0], -1)
        return torch.bmm(left.reshape(shape).mT, right.reshape(shape))
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for result, mine, theirs in zip(out, left.split(counts), right.split(counts), strict=True):
        torch.mm(mine.t(), theirs, out=result)
    return out


def _clear_empty(products: Tensor, sizes: Tensor) -> None:
    """Write zeros to the products `[T, O, I]` of tasks without an entry."""
    kernels = triton_kernels("stacks") if products.is_contiguous() else None
    if kernels is None:
        products.masked_fill_((sizes == 0)[:, None, None], 0.0)
    else:
        kernels.clear_empty(products, sizes)


def _are_many_and_equal(segments: Segments, length: int) -> bool:
    """Whether a batched product is faster than a grouped one: many tasks of equal size."""
    if segments.num_tasks < 16 or not segments.is_known_to_host:
        return False
    return len(set(segments.counts(length))) == 1


def _padded(matrix: Tensor) -> Tensor:
    """Rows of whole 16 bytes, as a grouped product wants them."""
    missing = -matrix.shape[1] % 8
    return F.pad(matrix, (0, missing)) if missing else matrix


def norm_sums(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    segments: Segments,
    many: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the scales of some normalisations by task, and of their shifts if that is free.

    Args:
        gradient: Of the outputs, one after the other, `[many * N, D]`.
        x: The inputs, likewise.
        mean: Of the inputs, `[many * N, 1]`; None for RMS normalisations.
        scale: Their reciprocal deviations, `[many * N, 1]`.
        segments: The task of every entry, in each of them.
        many: How many they are.

    Returns:
        `[many, T, D]` each.
    """
    kernels = triton_kernels("sums") if gradient.is_cuda else None
    shape = (many, -1, x.shape[-1])
    if kernels is None or x.dtype == torch.float64 or x.shape[-1] > kernels.WIDEST:
        dtype = wide(x.dtype)
        normal = x.to(dtype) if mean is None else x.to(dtype) - mean
        return segments.sum((gradient * (normal * scale)).view(shape)), None
    every = segments.repeated(many)
    scales, shifts = kernels.norm_sums(gradient, x, mean, scale, every)
    return scales.view(shape), None if mean is None else shifts.view(shape)
