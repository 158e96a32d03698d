"""The waist between engines and rules, and the way an update enters `.grad`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Weigh = Callable[[Sequence[int], Tensor], Tensor]
"""Components (positions) and their Gram matrices [K, T, T] -> weights [K, T]."""


def add_to_grad(leaves: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
    """Accumulate final gradients.

    Where somebody waits for a leaf's gradient, autograd itself accumulates it, so that hooks are
    torch's business.
    """
    watched: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for leaf, update in zip(leaves, updates, strict=True):
            update = update.view(leaf.shape).to(leaf.device, leaf.dtype)
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                watched.append((leaf, update))
            elif leaf.grad is not None:
                leaf.grad.add_(update)
            elif leaf.stride() == update.stride():
                leaf.grad = update
            else:  # fused optimizers take for granted that both lie alike in memory
                leaf.grad = torch.empty_like(leaf).copy_(update)
    if watched:
        torch.autograd.backward([leaf for leaf, _ in watched], [own for _, own in watched])
