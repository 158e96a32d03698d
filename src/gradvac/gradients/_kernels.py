"""The two products on stacked task gradients, and the grouped weight gradient.

Each has a torch form, which is the reference, and on CUDA a Triton kernel (`_triton.py`) where
that is faster: both products are memory-bound and read every gradient once.
"""

# T tasks, P parameters, N token rows (rows of a task are contiguous), O outputs, I inputs

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradvac.gram import working_dtype

if TYPE_CHECKING:
    from gradvac.gradients._segments import Segments

_CHUNK = 1 << 18  # columns converted to the working precision at a time
_SMALL = 1 << 14  # below this many columns one product in the working precision is cheapest


@cache
def triton_kernels() -> Any:
    """The module of Triton kernels, or None where Triton is not installed."""
    try:
        return import_module("gradvac.gradients._triton")
    except ImportError:
        return None


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows of `[T, P]`, in the working precision, `[T, T]`."""
    if gradients.is_complex():  # the inner product of real and imaginary parts
        return gram(torch.view_as_real(gradients.contiguous()).flatten(1))
    kernels = triton_kernels() if gradients.is_cuda else None
    num_tasks, size = gradients.shape
    # Float64 gradients are for checking: they keep their precision.
    fits = size > _SMALL and gradients.dtype != torch.float64
    if kernels is None or not fits or num_tasks > kernels.MOST_TASKS:
        return gram_reference(gradients)
    total: Tensor = kernels.gram(gradients)
    return total


def gram_reference(gradients: Tensor) -> Tensor:
    """`gram` in torch operations."""
    num_tasks = gradients.shape[0]
    dtype = working_dtype(gradients.device)
    total = gradients.new_zeros(num_tasks, num_tasks, dtype=dtype)
    for chunk in gradients.split(_CHUNK, dim=1):
        block = chunk.to(dtype)
        total.addmm_(block, block.t())
    return total


def combine(weights: Tensor, gradients: Tensor) -> Tensor:
    """sum_t weights[t] gradients[t] for `[T, P]`, in float32 or better, `[P]`."""
    if gradients.is_complex():
        parts = torch.view_as_real(gradients.contiguous()).flatten(1)
        return torch.view_as_complex(combine(weights, parts).view(-1, 2))
    kernels = triton_kernels() if gradients.is_cuda else None
    return (kernels.combine if kernels else combine_reference)(weights, gradients)


def combine_reference(weights: Tensor, gradients: Tensor) -> Tensor:
    """`combine` in torch operations."""
    dtype = torch.promote_types(gradients.dtype, torch.float32)
    if gradients.dtype == dtype:
        return weights.to(dtype) @ gradients
    chunks = gradients.split(_CHUNK, dim=1)
    return torch.cat([weights.to(dtype) @ chunk.to(dtype) for chunk in chunks])


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
    if _grouped_mm_fits(left, right):
        product = F.grouped_mm(left.t(), right, offs=segments.offsets(length))
        if segments.may_be_empty:  # the kernel leaves the result of an empty group undefined
            product.masked_fill_((segments.sizes == 0)[:, None, None], 0.0)
        return product
    counts = segments.counts(length)
    if len(set(counts)) == 1:
        shape = (len(counts), counts[0], -1)
        return torch.bmm(left.reshape(shape).mT, right.reshape(shape))
    out = left.new_empty(len(counts), left.shape[1], right.shape[1])
    for own, mine, theirs in zip(out, left.split(counts), right.split(counts), strict=True):
        torch.mm(mine.t(), theirs, out=own)
    return out


def _grouped_mm_fits(left: Tensor, right: Tensor) -> bool:
    """Whether one grouped GEMM does it: bf16 on CUDA with rows of whole 16 bytes."""
    aligned = left.shape[1] % 8 == 0 and right.shape[1] % 8 == 0
    return left.is_cuda and left.dtype == torch.bfloat16 and aligned


def norm_sums(
    gradient: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor, segments: Segments
) -> tuple[Tensor, Tensor] | None:
    """Gradients of a normalisation's scale and shift by task, `[T, D]` each.

    None where no kernel does it.
    """
    kernels = triton_kernels() if gradient.is_cuda else None
    if kernels is None or x.dtype == torch.float64 or x.shape[-1] > kernels.WIDEST:
        return None
    sums: tuple[Tensor, Tensor] = kernels.norm_sums(gradient, x, mean, scale, segments)
    return sums
