"""Geometry of task gradients, read off their Gram matrix alone.

Every rule and every statistic of gradvac works on `gram[k, i, j] = <g_i, g_j>`, the inner products
of the task gradients in component k. Nothing here sees a parameter. All functions accept any
leading dimensions, are safe for zero gradients, and never wait for the device.
"""

# K components, T tasks

import torch
from torch import Tensor


def working_dtype(device: torch.device) -> torch.dtype:
    """The precision Gram matrices are handled in: float64 wherever the device has it.

    Cancelled gradients are recognised by ||g'|| <= 1e-6 ||g||, that is 1e-12 in the Gram matrix,
    which float32 cannot represent next to 1.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def norms(gram: Tensor) -> Tensor:
    """Lengths of the task gradients, `[..., T]`."""
    return gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()


def cosine(gram: Tensor) -> Tensor:
    """Cosine similarity of all pairs, `[..., T, T]`; 0 where a gradient is zero.

    Rows are scaled one side at a time, so that neither 1e-200 nor 1e200 leaves the number range.
    """
    inverse = reciprocal(norms(gram))
    similarity = gram * inverse[..., :, None] * inverse[..., None, :]
    return similarity.clamp(-1.0, 1.0)


def known_cosine(gram: Tensor) -> Tensor:
    """`cosine`, but NaN where a gradient is zero: what statistics and records keep."""
    return cosine(gram).masked_fill(has_zero(gram), torch.nan)


def has_zero(gram: Tensor) -> Tensor:
    """Whether one of the two gradients of a pair is zero, bool `[..., T, T]`."""
    is_zero = norms(gram) == 0
    return is_zero[..., :, None] | is_zero[..., None, :]


def reciprocal(values: Tensor) -> Tensor:
    """1 / values, and 0 for 0."""
    return torch.where(values > 0, 1.0 / torch.where(values > 0, values, 1.0), 0.0)


def product(gram: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Inner product of two combinations of the task gradients, `[...]`.

    `left` and `right` are coefficients `[..., T]`: <sum_i left_i g_i, sum_j right_j g_j>.
    """
    return (left * (gram @ right[..., None])[..., 0]).sum(-1)


def length(gram: Tensor, weights: Tensor) -> Tensor:
    """Length of the combination sum_i weights_i g_i, `[...]`."""
    return product(gram, weights, weights).clamp_min(0).sqrt()


def update_cosine(gram: Tensor, weights: Tensor) -> Tensor:
    """cos(update, plain sum) of the update sum_i weights_i g_i; 0 where either vanishes."""
    ones = torch.ones_like(weights)
    similarity = product(gram, weights, ones) * reciprocal(length(gram, weights))
    return (similarity * reciprocal(length(gram, ones))).clamp(-1.0, 1.0)


def update_ratio(gram: Tensor, weights: Tensor) -> Tensor:
    """||update|| / ||plain sum||; 0 where the plain sum vanishes."""
    return length(gram, weights) * reciprocal(length(gram, torch.ones_like(weights)))


def is_finite(gram: Tensor) -> Tensor:
    """Whether a component's Gram matrix holds only finite values, bool `[...]`."""
    return torch.isfinite(gram).flatten(-2).all(-1)
