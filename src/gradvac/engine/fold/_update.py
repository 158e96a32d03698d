"""The waist between engines and rules, and the way an update enters `.grad`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Weigh = Callable[[Sequence[int], Tensor], Tensor]
"""Components (positions) and their Gram matrices [K, T, T] -> weights [K, T]."""


def add_to_grad(
    leaves: Sequence[Tensor], updates: Sequence[Tensor], *, by_hand: bool = False
) -> None:
    """Accumulate final gradients.

    Where somebody waits for a leaf's gradient, autograd itself accumulates it, so that hooks are
    torch's business; unless it is done by hand, because a replica's own hooks, which cannot be
    told apart there, would exchange it once more.
    """
    watched: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for leaf, update in zip(leaves, updates, strict=True):
            if update.dim() != leaf.dim() or update.shape != leaf.shape:
                update = update.view_as(leaf)  # a shape of Python's would take three times as long
            if update.dtype != leaf.dtype or update.device != leaf.device:
                update = update.to(leaf.device, leaf.dtype)
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                watched.append((leaf, update))
            elif leaf.grad is not None:
                added.append((leaf.grad, update))
            elif leaf.stride() == update.stride():
                leaf.grad = update.data  # no view, as optimizers of old take for granted
            else:  # fused optimizers take for granted that both lie alike in memory
                leaf.grad = torch.empty_like(leaf).copy_(update)
        if added:
            torch._foreach_add_([grad for grad, _ in added], [update for _, update in added])
    if by_hand:
        for leaf, update in watched:
            _accumulate(leaf, update)
    elif watched:
        torch.autograd.backward([leaf for leaf, _ in watched], [update for _, update in watched])


@torch.no_grad()
def _accumulate(leaf: Tensor, update: Tensor) -> None:
    """What autograd does with a leaf's gradient."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed = hook(update)
        update = update if changed is None else changed
    if leaf.grad is None:
        leaf.grad = torch.empty_like(leaf).copy_(update)
    else:
        leaf.grad.add_(update)
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)
