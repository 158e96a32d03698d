"""Sketches: random projections, a few numbers per vector, by which gradients are compared."""

# G shape of a gradient, R numbers per vector

from functools import lru_cache

import torch
from torch import Tensor

from gradvac.engine.kernels.stacks import wide

_AT_ONCE = 1 << 26


def sketch(gradient: Tensor) -> Tensor:
    """Project the vectors of a gradient: `[*G[:-1], R]`, or `[*G, R]` of at most one dimension."""
    num_parts, dtype = 1 + gradient.is_complex(), wide(gradient.dtype.to_real())
    if gradient.dim() < 2:
        gradient = torch.view_as_real(gradient.resolve_conj()) if num_parts > 1 else gradient
        return gradient.reshape(-1, num_parts).to(dtype)
    if num_parts > 1:
        gradient = torch.view_as_real(gradient.resolve_conj()).flatten(-2)
    flat = gradient.flatten(0, -2)
    across = _projection(flat.shape[1], dtype, gradient.device)
    if flat.numel() <= _AT_ONCE:
        joined = flat.to(dtype) @ across
    else:  # in pieces: the gradient of large logits is never copied at once
        pieces = flat.split(max(1, _AT_ONCE // flat.shape[1]))
        joined = torch.cat([piece.to(dtype) @ across for piece in pieces])
    return joined.view(*gradient.shape[:-1], across.shape[1])


@lru_cache(maxsize=64)
def _projection(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Several directions, so that hardly any vector is orthogonal to all of them."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator).to(device, dtype)


def tolerance(lowest: torch.dtype) -> float:
    """How much may stay unexplained beyond the rounding that was measured."""
    return {torch.float64: 1e-10, torch.float32: 1e-4}.get(lowest, 2e-2)


def negligible(lowest: torch.dtype) -> float:
    """What rounding may leave of a gradient that cancels out, as a share of the largest one."""
    return {torch.float64: 1e-14, torch.float32: 4e-6}.get(lowest, 1e-2)


def repeatable(lowest: torch.dtype) -> float:
    """What rounding can do at most: a backward with larger differences is not the same again."""
    return {torch.float64: 1e-4, torch.float32: 5e-2}.get(lowest, 0.3)
