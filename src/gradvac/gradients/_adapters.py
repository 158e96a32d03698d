"""Parameters that models use without a batch dimension, given one.

A relative position bias is looked up once and broadcast over the batch, so its gradient arrives
summed over all tasks. Looking it up once per row instead lets it arrive separated; the models add
it to scores of that shape anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.gradients._site import Forward


def adapt(module: nn.Module, forward: Forward) -> list[Callable[[], None]]:
    """Adapt a module if it is of a known kind; returns how to undo it."""
    table = getattr(module, "relative_attention_bias", None)
    unbound: Callable[..., Tensor] | None = getattr(type(module), "compute_bias", None)
    if not isinstance(table, nn.Embedding) or unbound is None:
        return []

    @wraps(unbound)
    def compute_bias(own: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        num_rows = None if own is not module or forward.inside_fallback else forward.num_rows
        if not torch.is_grad_enabled() or num_rows is None or not table.weight.requires_grad:
            return unbound(own, *args, **kwargs)
        seen: list[Tensor] = []

        def look(buckets: Tensor) -> Tensor:
            seen.append(buckets)
            return table.weight.new_zeros(*buckets.shape, table.embedding_dim)

        with _instead(table, look):
            plain = unbound(own, *args, **kwargs)
        if plain.shape != (1, table.embedding_dim, *seen[0].shape):
            return unbound(own, *args, **kwargs)  # another layout, not ours to guess
        values: Tensor = table(seen[0].expand(num_rows, *seen[0].shape))
        return values.permute(0, 3, 1, 2)  # [B, heads, queries, keys]

    module.__dict__["compute_bias"] = MethodType(compute_bias, module)
    return [lambda: module.__dict__.pop("compute_bias", None)]


@contextmanager
def _instead(module: nn.Module, run: Callable[[Tensor], Tensor]) -> Iterator[None]:
    attached = module.forward
    module.forward = run
    try:
        yield
    finally:
        module.forward = attached
