"""Gram matrices and combinations of stacked task gradients, `[T, P]`.

The torch form is the reference; on CUDA, Triton kernels (`triton_kernels.py`) do the same where
that is faster: both products are memory-bound and read every gradient once.
"""

# K components, T tasks, P parameters

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradvac.gram import working_dtype
from gradvac.utils.devices import index_on, triton_module
from gradvac.utils.native import native

HALF = (torch.bfloat16, torch.float16)
_COLUMNS = 1 << 15  # multiplied at a time, where that takes copies
_CHUNK = 1 << 18  # columns converted to the working precision at a time
_CACHED = 1 << 15  # on a CPU, where what was converted should still be in the cache when multiplied
_BY_THREAD = 1 << 13  # of them: one product of all is not divided among threads


def triton_kernels() -> Any:
    """The module of Triton kernels, or None where Triton is not installed."""
    return triton_module("gradvac.engine.kernels.triton_kernels")


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of such numbers are taken in: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Those of the rows of `[n, P]` and `[m, P]` in the working precision, `[n, m]`.

    Where the left rows are the first of the right ones, also in memory, a pair is multiplied once.
    On a GPU in float32, whose numbers are taken as two of bfloat16 (TF32 would be less precise).
    """
    given = [(one.data_ptr(), one.stride(), one.dtype) for one in (left, right)]
    are_first, num = given[0] == given[1], len(left)
    step = max(256, num // 4) if are_first else max(1, num)
    total = left.new_zeros(num, len(right), dtype=working_dtype(left.device))
    for left_part, right_part in _operands(left, right, are_first):
        for start in range(0, num, step):
            rows, columns = slice(start, start + step), slice(start, None)
            total[rows, columns] += _multiply(left_part[rows], right_part[columns])
    for start in range(step, num, step):  # what is below the diagonal
        total[start : start + step, :start] = total[:start, start : start + step].t()
    return total


def _operands(left: Tensor, right: Tensor, are_first: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as they are multiplied: where they lie, or copies of some columns after the other."""
    dtype, working = torch.promote_types(left.dtype, right.dtype), working_dtype(left.device)
    is_narrow = dtype in HALF and left.is_cuda
    if is_narrow and left.dtype == right.dtype and _is_aligned(left) and _is_aligned(right):
        yield left, right
        return
    for a, b in zip(left.split(_COLUMNS, 1), right.split(_COLUMNS, 1), strict=True):
        if not left.is_cuda or dtype == torch.float64:
            yield a.to(working), b.to(working)
        elif are_first and is_narrow:
            copy = padded(b)
            yield copy[: len(a)], copy
        else:
            yield _as_halves(a.to(dtype), b.to(dtype))


def _as_halves(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices of 16 bits with the same inner products, in rows of whole 16 bytes."""
    if left.dtype == torch.float32:
        left_high, right_high = left.to(torch.bfloat16), right.to(torch.bfloat16)
        left_low, right_low = (left - left_high).bfloat16(), (right - right_high).bfloat16()
        left = torch.cat([left_high, left_high, left_low, left_low], 1)
        right = torch.cat([right_high, right_low, right_high, right_low], 1)
    return padded(left), padded(right)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype in HALF:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return left @ right.t()


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows begin at whole 16 bytes, without which products take several times as long."""
    return matrix.stride(1) == 1 and not (matrix.stride(0) % 8 or matrix.shape[1] % 8)


def padded(matrix: Tensor) -> Tensor:
    """The same in 16 bits, aligned by zeros."""
    if _is_aligned(matrix):
        return matrix
    return F.pad(matrix, (0, -matrix.shape[1] % 8)).contiguous()


def gram(gradients: Tensor) -> Tensor:
    """Inner products of the rows of `[T, P]`, in the working precision, `[T, T]`."""
    return stacked([gradients], [0], 1).grams()[0]


def combine(weights: Tensor, gradients: Tensor) -> Tensor:
    """sum_t weights[t] gradients[t] for `[T, P]`, in float32 or better, `[P]`."""
    return stacked([gradients], [0], 1).combine(weights[None])[0]


def gram_reference(gradients: Tensor) -> Tensor:
    """`gram` in torch operations."""
    num_tasks, dtype = gradients.shape[0], working_dtype(gradients.device)
    total = gradients.new_zeros(num_tasks, num_tasks, dtype=dtype)
    for chunk in gradients.split(_CHUNK if gradients.is_cuda else _CACHED, dim=1):
        width = chunk.shape[1]
        num = 1 if width % _BY_THREAD else max(1, width // _BY_THREAD)
        block = chunk.to(dtype).view(num_tasks, num, -1).transpose(0, 1)
        total += torch.bmm(block, block.mT).sum(0)
    return total


def combine_reference(weights: Tensor, gradients: Tensor) -> Tensor:
    """`combine` in torch operations."""
    dtype = wide(gradients.dtype)
    if gradients.dtype == dtype:
        return weights.to(dtype) @ gradients
    chunks = gradients.split(_CHUNK, dim=1)
    return torch.cat([weights.to(dtype) @ chunk.to(dtype) for chunk in chunks])


class Stacked:
    """Task gradients of many parameters, for all Gram matrices and all updates at once.

    Args:
        blocks: Those of one parameter `[T, P]`, or of several alike `[n, T, P]`.
        components: The component of every parameter, in the order of the blocks.
        num_components: K.
    """

    def __init__(
        self, blocks: Sequence[Tensor], components: Sequence[int], num_components: int
    ) -> None:
        self._is_complex = [block.dtype.is_complex for block in blocks]
        if any(self._is_complex):
            blocks = [_as_real(block) if block.is_complex() else block for block in blocks]
        self._blocks = [block if block.dim() == 3 else block[None] for block in blocks]
        self._components, self._num_components = list(components), num_components

    def grams(self) -> Tensor:
        """`[K, T, T]`, in the working precision."""
        if (kernels := native()) is not None:
            given = (self._blocks, self._components, self._num_components)
            found: Tensor | None = kernels.grams(*given)
            if found is not None:
                return found
        device = self._blocks[0].device
        every = torch.cat([_grams(block).to(device) for block in self._blocks])
        grams = every.new_zeros(self._num_components, *every.shape[1:])
        return grams.index_add_(0, index_on(self._components, device), every)

    def combine(self, weights: Tensor) -> list[Tensor]:
        """sum_t weights[k, t] g_t of every parameter, in float32 or better, `[P]` each."""
        if (kernels := native()) is not None and not any(self._is_complex):
            found: list[Tensor] | None = kernels.combine(self._blocks, self._components, weights)
            if found is not None:
                return found
        updates: list[Tensor] = []
        weights = weights[index_on(self._components, self._blocks[0].device)]
        by_block = weights.split([len(block) for block in self._blocks])
        for block, its_weights, is_complex in zip(
            self._blocks, by_block, self._is_complex, strict=True
        ):
            combined = _combined(its_weights.to(block.device), block)
            if is_complex:  # a copy: complex numbers may not begin at any place of a storage
                combined = torch.view_as_complex(combined.view(len(block), -1, 2).clone())
            updates += combined.unbind()
        return updates


def _grams(block: Tensor) -> Tensor:
    """`[n, T, P]` -> `[n, T, T]`."""
    if block[0].numel() > _CACHED * block.shape[1]:
        return torch.stack([gram_reference(gradients) for gradients in block])
    block = block.to(working_dtype(block.device))
    return torch.bmm(block, block.mT)


def _combined(weights: Tensor, block: Tensor) -> Tensor:
    """`[n, T]`, `[n, T, P]` -> `[n, P]`."""
    dtype = wide(block.dtype)
    if block.dtype == dtype:
        return torch.bmm(weights.to(dtype)[:, None], block)[:, 0]
    return torch.stack([combine_reference(*pair) for pair in zip(weights, block, strict=True)])


def _as_real(stack: Tensor) -> Tensor:
    """The inner product of complex gradients is that of real and imaginary parts."""
    return torch.view_as_real(stack.resolve_conj().contiguous()).flatten(-2)


def stacked(blocks: Sequence[Tensor], components: Sequence[int], num_components: int) -> Stacked:
    """`Stacked`, or on CUDA the kernels that do the same."""
    kernels, device = triton_kernels() if blocks[0].is_cuda else None, blocks[0].device
    if kernels is None or not kernels.can_multiply(device):
        return Stacked(blocks, components, num_components)
    # A kernel reads the memory of one device.
    are_alike = all(block.dtype in kernels.DTYPES and block.device == device for block in blocks)
    if not are_alike or blocks[0].shape[-2] > kernels.MOST_TASKS:
        return Stacked(blocks, components, num_components)
    launched: Stacked = kernels.Launched(blocks, components, num_components)
    return launched
