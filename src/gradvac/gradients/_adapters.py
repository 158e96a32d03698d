"""Parameters that models use without a batch dimension, given one.

A relative position bias is looked up once and broadcast over the batch, so its gradient arrives
summed over all tasks. Looking it up once per row instead lets it arrive separated; the models add
it to scores of that shape anyway.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gradvac.gradients._site import Forward


def adapt(module: nn.Module, forward: Forward) -> list[Callable[[], None]]:
    """Adapt a module if it is of a known kind; returns how to undo it."""
    table = getattr(module, "relative_attention_bias", None)
    if not isinstance(table, nn.Embedding) or not hasattr(module, "compute_bias"):
        return []
    original: Callable[..., Tensor] = module.compute_bias

    @wraps(type(module).compute_bias)
    def compute_bias(own: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if own is not module:
            return type(own).compute_bias(own, *args, **kwargs)  # type: ignore[no-any-return]
        num_rows = None if forward.inside_fallback else forward.num_rows
        if not torch.is_grad_enabled() or num_rows is None or not table.weight.requires_grad:
            return original(*args, **kwargs)
        attached = table.forward
        seen: list[Tensor] = []

        def look(buckets: Tensor) -> Tensor:
            seen.append(buckets)
            return table.weight.new_zeros(*buckets.shape, table.embedding_dim)

        table.forward = look  # type: ignore[method-assign]
        try:
            plain = original(*args, **kwargs)
        finally:
            table.forward = attached  # type: ignore[method-assign]
        if plain.shape != (1, table.embedding_dim, *seen[0].shape):
            return original(*args, **kwargs)  # another layout, not ours to guess
        values: Tensor = table(seen[0].expand(num_rows, *seen[0].shape))
        return values.permute(0, 3, 1, 2)  # [B, heads, queries, keys]

    module.compute_bias = MethodType(compute_bias, module)
    return [lambda: module.__dict__.pop("compute_bias", None)]
