"""Marks: a few numbers per vector of a gradient, by which gradients are compared."""

# G shape of a gradient, R numbers per vector

import math
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradvac.gradients.kernels._kernels import wide

_AT_ONCE = 1 << 26


class Marks(NamedTuple):
    """A few numbers per vector of the last dimension, and per position in the last dimension."""

    # [*G[:-1], R], 1 where a dimension is not kept; [*G, R] if there is at most one dimension.
    entries: Tensor
    columns: Tensor | None  # [G[-1], R]


def mark(
    gradient: Tensor, *, columns_too: bool = True, kept: Collection[int] | None = None
) -> Marks:
    """Project an output gradient.

    Args:
        gradient: The output gradient.
        columns_too: Rows may lie along its last dimension.
        kept: Other dimensions along which they may; the rest is projected too. None: all.
    """
    is_vector, shape = gradient.dim() < 2, (gradient.numel(), 1 + gradient.is_complex())
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient).flatten(-2)
    dtype = wide(gradient.dtype)
    if is_vector:
        return Marks(gradient.reshape(shape).to(dtype), None)
    flat = gradient.reshape(-1, gradient.shape[-1])
    across = _projection(flat.shape[1], dtype, gradient.device)
    entries, columns, start = [], None, 0
    # The gradient of large logits is not copied whole.
    for part in flat.split(max(1, _AT_ONCE // flat.shape[1])):
        part = part.to(dtype)
        entries.append(part @ across)
        if columns_too:
            along = _projection(flat.shape[0], dtype, gradient.device)[start : start + len(part)]
            partial = part.t() @ along
            columns, start = partial if columns is None else columns + partial, start + len(part)
    if columns is not None:  # both parts of a complex number are its own
        columns = columns.reshape(flat.shape[1] // shape[1], -1)
    whole = entries[0] if len(entries) == 1 else torch.cat(entries)
    whole = whole.view(*gradient.shape[:-1], whole.shape[1])
    for dim, size in enumerate(gradient.shape[:-1]):
        if kept is not None and dim not in kept and size:
            view = (size, *(1 for _ in gradient.shape[dim + 1 : -1]), whole.shape[-1])
            weights = _projection(size, dtype, gradient.device).view(view) / math.sqrt(size)
            whole = (whole * weights).sum(dim, keepdim=True)
    return Marks(whole, columns)


@lru_cache(maxsize=64)
def _projection(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Several directions, so that hardly any vector is orthogonal to all of them."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator).to(device, dtype)


def tolerance(lowest: torch.dtype) -> float:
    """How much may stay unexplained beyond what rounding was seen to do."""
    return {torch.float64: 1e-10, torch.float32: 1e-4}.get(lowest, 2e-2)


def negligible(lowest: torch.dtype) -> float:
    """What rounding may leave of a gradient that cancels out, as a share of the largest one."""
    return {torch.float64: 1e-14, torch.float32: 4e-6}.get(lowest, 1e-2)


def repeatable(lowest: torch.dtype) -> float:
    """What rounding can do at most: a backward with larger differences is not the same again."""
    return {torch.float64: 1e-4, torch.float32: 5e-2}.get(lowest, 0.3)
