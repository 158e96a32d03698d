"""Attention within sentence pairs: whole sentences at once, or token by token with a cache."""

# B sentences, S tokens of the longest, N tokens of all, K beams, D width, H heads
# [*, D] stands for [B, S, D] of padded and [N, D] of packed batches

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from gradvac.nmt.batch import Side


class Layer(nn.Module):
    """A module that returns one tensor."""

    __call__: Callable[..., Tensor]


class Linear(Layer, nn.Linear):
    """`nn.Linear` with its type said."""


@dataclass
class LayerCache:
    """What a decoder layer keeps while it translates token by token."""

    source_keys: Tensor  # [B, H, S, D / H]
    source_values: Tensor
    keys: Tensor  # [B * K, H, tokens so far, D / H]
    values: Tensor


@dataclass
class Cache:
    """What the decoder keeps while it translates token by token."""

    layers: list[LayerCache]
    mask: Tensor | None  # [B, 1, 1, S]
    length: int = 0

    def select(self, sentences: Tensor | None, rows: Tensor) -> None:
        """Go on with some beams.

        Args:
            sentences: Which sentences stay, in order; None for all.
            rows: Which of the B * K rows the beams of those sentences continue.
        """
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if sentences is not None:
                layer.source_keys = layer.source_keys[sentences]
                layer.source_values = layer.source_values[sentences]
        if sentences is not None and self.mask is not None:
            self.mask = self.mask[sentences]


class SelfAttention(Layer):
    """Attention of a sentence to itself; queries, keys and values come from one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = linear(width, width, parts=3)
        self.write = linear(width, width)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(self.read(x), 3, self.heads)
        return query, key, value

    def forward(self, x: Tensor, side: Side, *, causal: bool) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        return self.write(attend(*self._project(x), side, side, causal=causal))

    def step(self, x: Tensor, cache: LayerCache) -> Tensor:
        """Let the newest token of every beam, `[B, K, D]`, see itself and all before it."""
        query, key, value = (part.flatten(0, 1).unsqueeze(2) for part in self._project(x))
        cache.keys = torch.cat([cache.keys, key], 2)
        cache.values = torch.cat([cache.values, value], 2)
        seen = F.scaled_dot_product_attention(query, cache.keys, cache.values)
        return self.write(seen.reshape(x.shape))


class CrossAttention(Layer):
    """Attention of the target to the source."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(width, width)
        self.memory = linear(width, width, parts=2)
        self.write = linear(width, width)

    def read(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Make keys and values of the source, `[*, H, D / H]`."""
        return split_heads(self.memory(memory), 2, self.heads)

    def forward(self, x: Tensor, target: Side, memory: Tensor, source: Side) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        (query,) = split_heads(self.query(x), 1, self.heads)
        with source.rows():
            key, value = self.read(memory)
        return self.write(attend(query, key, value, target, source, causal=False))

    def step(self, x: Tensor, cache: LayerCache, mask: Tensor | None) -> Tensor:
        """Let the beams of a sentence, `[B, K, D]`, be its queries: its source is kept once."""
        query = split_heads(self.query(x), 1, self.heads)[0].transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            query, cache.source_keys, cache.source_values, attn_mask=mask
        )
        return self.write(seen.transpose(1, 2).flatten(-2))


def attend(
    query: Tensor, key: Tensor, value: Tensor, queries: Side, keys: Side, *, causal: bool
) -> Tensor:
    """Attention within sentence pairs, `[*, H, D / H]` -> `[*, D]`.

    Padding lies at the end, so that a causal mask hides it already. A mask is used for unequal
    lengths only, because fused kernels are slower with one.
    """
    if queries.packed and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        reach = (-1, 0) if causal else (-1, -1)
        ends = (queries.ends, keys.ends, queries.longest, keys.longest)
        seen = varlen_attn(query, key, value, *ends, window_size=reach)
        assert isinstance(seen, Tensor)
        return seen.flatten(-2)
    if queries.packed:
        query, key, value = queries.pad(query), keys.pad(key), keys.pad(value)
    seen = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if causal else keys.mask,
        is_causal=causal,
    ).transpose(1, 2)
    return (queries.pack(seen) if queries.packed else seen).flatten(-2)


def split_heads(values: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """`[*, parts * D]` -> `parts` times `[*, H, D / H]`."""
    return values.view(*values.shape[:-1], parts, heads, -1).unbind(-3)


def linear(width: int, out: int, *, parts: int = 1) -> Linear:
    """Make a linear layer, or several side by side, each with Glorot's initialisation."""
    layer = Linear(width, parts * out)
    for part in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(part)
    nn.init.zeros_(layer.bias)
    return layer
