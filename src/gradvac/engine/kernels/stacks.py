"""Gram matrices and combinations of stacked task gradients, `[T, P]`.

The torch form is the reference; on CUDA, Triton kernels (`triton_kernels.py`) do the same where
that is faster: both products are memory-bound and read every gradient once.
"""

# K components, T tasks, P parameters

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradvac.devices import triton_module
from gradvac.gram import working_dtype

_CHUNK = 1 << 18  # columns converted to the working precision at a time
_CACHED = 1 << 14  # on a CPU, where what was converted should still be in the cache when multiplied
_JOINED = 1 << 19  # parameters up to this size share their products within a component


def triton_kernels() -> Any:
    """The module of Triton kernels, or None where Triton is not installed."""
    return triton_module("gradvac.engine.kernels.triton_kernels")


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


class Stacked:
    """Task gradients of many parameters, for all Gram matrices and all updates at once.

    Args:
        stacks: `[T, P]` of every parameter; each may be a part of a wider one.
        components: The component of every parameter.
        num_components: K.
    """

    def __init__(
        self, stacks: Sequence[Tensor], components: Sequence[int], num_components: int
    ) -> None:
        self._is_complex = [stack.dtype.is_complex for stack in stacks]
        if any(self._is_complex):
            stacks = [_as_real(stack) if stack.is_complex() else stack for stack in stacks]
        self._sizes, self._num_components = [stack.shape[1] for stack in stacks], num_components
        together: dict[tuple[int, torch.dtype, torch.device, int], list[int]] = {}
        for number, (stack, component) in enumerate(zip(stacks, components, strict=True)):
            alone = -1 if stack.shape[1] <= _JOINED else number
            key = (component, stack.dtype, stack.device, alone)
            together.setdefault(key, []).append(number)
        # (component, numbers of parameters, their gradients side by side)
        self._joined: list[tuple[int, list[int], Tensor]] = []
        for (component, *_), numbers in together.items():
            parts = [stacks[n] for n in numbers]
            side_by_side = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            self._joined.append((component, numbers, side_by_side))

    def grams(self) -> Tensor:
        """`[K, T, T]`, in the working precision."""
        _, _, first = self._joined[0]
        shape, dtype = (self._num_components, len(first), len(first)), working_dtype(first.device)
        grams = torch.zeros(shape, dtype=dtype, device=first.device)
        for component, _, stack in self._joined:
            grams[component] += gram_reference(stack).to(grams)
        return grams

    def combine(self, weights: Tensor) -> list[Tensor]:
        """sum_t weights[k, t] g_t of every parameter, in float32 or better, `[P]` each."""
        combined: dict[int, Tensor] = {}
        for component, numbers, stack in self._joined:
            pieces = combine_reference(weights[component].to(stack.device), stack)
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


def stacked(stacks: Sequence[Tensor], components: Sequence[int], num_components: int) -> Stacked:
    """`Stacked`, or on CUDA the kernels that do the same."""
    kernels = triton_kernels() if stacks[0].is_cuda else None
    if kernels is None or len(stacks[0]) > kernels.MOST_TASKS:
        return Stacked(stacks, components, num_components)
    device = stacks[0].device  # a kernel reads the memory of one
    are_taken = all(s.dtype in kernels.DTYPES and s.device == device for s in stacks)
    return (kernels.Launched if are_taken else Stacked)(stacks, components, num_components)
