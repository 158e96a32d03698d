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
    from gradvac.engine.kernels._segments import Segments

_CHUNK = 1 << 18  # columns converted to the working precision at a time
_CACHED = 1 << 14  # on a CPU, where what was converted should still be in the cache when multiplied


def triton_kernels(name: str) -> Any:
    """A module of Triton kernels ("stacks" or "sums"), or None where Triton is not installed."""
    return triton_module(f"gradvac.engine.kernels._triton_{name}")


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of such numbers are taken in: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows of `[T, P]`, in the working precision, `[T, T]`."""
    return stacked([gradients], [0], 1).grams()[0]


def combine(weights: Tensor, gradients: Tensor) -> Tensor:
    """sum_t weights[t] gradients[t] for `[T, P]`, in float32 or better, `[P]`."""
    return stacked([gradients], [0], 1).combine(weights[None])[0]


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
        self._is_complex = [stack.dtype.is_complex for stack in stacks]
        if any(self._is_complex):
            stacks = [_as_real(stack) if stack.is_complex() else stack for stack in stacks]
        self._sizes, self._num_groups = [stack.shape[1] for stack in stacks], num_groups
        together: dict[tuple[int, torch.dtype, int], list[int]] = {}
        for number, (stack, group) in enumerate(zip(stacks, groups, strict=True)):
            place = -1 if stack.shape[1] <= _JOINED else number
            together.setdefault((group, stack.dtype, place), []).append(number)
        # (component, numbers of parameters, their gradients side by side)
        self._joined: list[tuple[int, list[int], Tensor]] = []
        for (group, *_), numbers in together.items():
            parts = [stacks[n] for n in numbers]
            side_by_side = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            self._joined.append((group, numbers, side_by_side))

    def grams(self) -> Tensor:
        """`[K, T, T]`, in the working precision."""
        _, _, first = self._joined[0]
        shape, dtype = (self._num_groups, len(first), len(first)), working_dtype(first.device)
        grams = torch.zeros(shape, dtype=dtype, device=first.device)
        for group, _, stack in self._joined:
            grams[group] += gram_reference(stack)
        return grams

    def combine(self, weights: Tensor) -> list[Tensor]:
        """sum_t weights[k, t] g_t of every parameter, in float32 or better, `[P]` each."""
        combined: dict[int, Tensor] = {}
        for group, numbers, stack in self._joined:
            pieces = combine_reference(weights[group], stack)
            combined.update(
                zip(numbers, pieces.split([self._sizes[n] for n in numbers]), strict=True)
            )
        return [
            # A copy: complex numbers may not begin at any place of a storage.
            torch.view_as_complex(combined[n].view(-1, 2).clone()) if is_complex else combined[n]
            for n, is_complex in enumerate(self._is_complex)
        ]


def _as_real(stack: Tensor) -> Tensor:
    """The inner product of complex gradients is that of real and imaginary parts."""
    return torch.view_as_real(stack.resolve_conj().contiguous()).flatten(1)


def stacked(stacks: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> Stacked:
    """`Stacked`, or on CUDA the kernels that do the same."""
    kernels = triton_kernels("stacks") if stacks[0].is_cuda else None
    if kernels is None or len(stacks[0]) > kernels.MOST_TASKS:
        return Stacked(stacks, groups, num_groups)
    are_taken = all(stack.dtype in kernels.DTYPES for stack in stacks)
    return (kernels.Launched if are_taken else Stacked)(stacks, groups, num_groups)


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
