"""Attention within sentence pairs: whole sentences at once, or token by token with a cache."""

# B sentences, S tokens of the longest, N tokens of all, D width, H heads
# token by token: R slots for sentences, K beams, L steps
# [*, D] stands for [B, S, D] of padded and [N, D] of packed batches

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradvac.devices import triton_module
from gradvac.lab.recipes.nmt.batch import Side

_SHORT = 256  # tokens of the longest sentence for which a kernel for sentences is used
_WIDTHS = (16, 32, 64, 128)  # of a head, that it can have


class Layer(nn.Module):
    """A module that returns one tensor."""

    __call__: Callable[..., Tensor]


class Linear(Layer, nn.Linear):
    """`nn.Linear` with its type said."""


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What a decoder layer keeps while it translates token by token: allocated once."""

    source_keys: Tensor  # [R, H, S, D / H]
    source_values: Tensor
    # Keys and values, so that one operation writes both: [R, 2, H, L * K, D / H]. Place t * K + k
    # is of what beam k read at its step t.
    own: Tensor

    @classmethod
    def zeros(cls, size: CacheSize, like: Tensor) -> LayerCache:
        """Zeros, because what a mask hides must still be finite."""
        source = (size.num_slots, size.heads, size.source_length, size.head_width)
        places = size.target_length * size.num_beams
        own = (size.num_slots, 2, size.heads, places, size.head_width)
        return cls(*(like.new_zeros(shape) for shape in (source, source, own)))

    def part(self, num_slots: int, source_length: int, num_places: int) -> LayerCache:
        """The beginning of every dimension, without a copy."""
        return LayerCache(
            self.source_keys[:num_slots, :, :source_length],
            self.source_values[:num_slots, :, :source_length],
            self.own[:num_slots, :, :, :num_places],
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All three."""
        return self.source_keys, self.source_values, self.own


class CacheSize(NamedTuple):
    """The dimensions of a cache."""

    num_slots: int  # R
    num_beams: int  # K
    source_length: int  # S
    target_length: int  # L
    heads: int
    head_width: int


@dataclass(frozen=True, eq=False)
class Moment:
    """What all layers must know of a step of translating token by token.

    Attributes:
        rows: 0 ... R - 1.
        steps: Which step every slot is at, `[R]`.
        readable: 0 for the keys a beam sees, its own and those of its ancestors; -inf for the
            others: `[R, 1, K, L * K]`.
        source: The same of the source tokens that are real, `[R, 1, 1, S]`.
    """

    rows: Tensor
    steps: Tensor
    readable: Tensor
    source: Tensor


class SelfAttention(Layer):
    """Attention of a sentence to itself; queries, keys and values come from one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = linear(width, width, parts=3)
        self.write = linear(width, width)

    def forward(self, x: Tensor, side: Side, *, causal: bool) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        read = split_heads(self.read(x), 3, self.heads)
        return self.write(attend(read, None, side, side, causal=causal))

    def step(self, x: Tensor, cache: LayerCache, now: Moment) -> Tensor:
        """Let the newest token of every beam, `[R, K, D]`, see itself and all before it.

        Beams of a slot share their keys, and each is shown those of its ancestors: no key is ever
        moved when a beam continues another.
        """
        num, num_beams, width = x.shape
        new = self.read(x).view(num, num_beams, 3, self.heads, -1).permute(0, 2, 3, 1, 4)
        place = cache.own.unflatten(3, (-1, num_beams))
        place[now.rows, :, :, now.steps] = new[:, 1:]
        seen = F.scaled_dot_product_attention(
            new[:, 0], cache.own[:, 0], cache.own[:, 1], attn_mask=now.readable
        )
        return self.write(seen.transpose(1, 2).reshape(num, num_beams, width))


class CrossAttention(Layer):
    """Attention of the target to the source."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(width, width)
        self.memory = linear(width, width, parts=2)
        self.write = linear(width, width)

    def read(self, memory: Tensor) -> Tensor:
        """Keys and values of the source, `[*, 2, H, D / H]`."""
        return split_heads(self.memory(memory), 2, self.heads)

    def forward(self, x: Tensor, target: Side, memory: Tensor, source: Side) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        query = split_heads(self.query(x), 1, self.heads)
        with source.rows():
            read = self.read(memory)
        return self.write(attend(query, read, target, source, causal=False))

    def step(self, x: Tensor, cache: LayerCache, now: Moment) -> Tensor:
        """Let the beams of a slot, `[R, K, D]`, be its queries: its source is kept once."""
        query = split_heads(self.query(x), 1, self.heads).squeeze(-3).transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            query, cache.source_keys, cache.source_values, attn_mask=now.source
        )
        return self.write(seen.transpose(1, 2).flatten(-2))


def attend(
    read: Tensor, memory: Tensor | None, queries: Side, keys: Side, *, causal: bool
) -> Tensor:
    """Attention within sentence pairs, -> `[*, D]`.

    Padding lies at the end, so that a causal mask hides it already. A mask is used for unequal
    lengths only, because fused kernels are slower with one.

    Args:
        read: Queries, and without `memory` keys and values too, `[*, 1 or 3, H, D / H]`.
        memory: Keys and values, `[*, 2, H, D / H]`.
        queries: Where the queries lie.
        keys: Where keys and values lie.
        causal: A query sees the keys up to its own place.
    """
    if queries.packed and read.is_cuda and read.dtype in (torch.bfloat16, torch.float16):
        return _attend_packed(read, memory, queries, keys, causal=causal).flatten(-2)
    query, key, value = parts(read, memory)
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


def _attend_packed(
    read: Tensor, memory: Tensor | None, queries: Side, keys: Side, *, causal: bool
) -> Tensor:
    """Attention on a GPU without padding, `[N, H, D / H]`; sentences have a kernel of their own."""
    kernels = triton_module("gradvac.lab.recipes.nmt._triton_attention")
    is_short = max(queries.longest, keys.longest) <= _SHORT and read.shape[-1] in _WIDTHS
    if is_short and kernels is not None:
        short: Tensor = kernels.attend_short(read, memory, queries.ends, keys.ends, causal=causal)
        return short
    # Here and not above: it brings the compiler along, a second that no other run should pay.
    from torch.nn.attention.varlen import varlen_attn

    reach = (-1, 0) if causal else (-1, -1)
    ends = (queries.ends, keys.ends, queries.longest, keys.longest)
    query, key, value = parts(read, memory)
    seen = varlen_attn(query, key, value, *ends, window_size=reach)
    assert isinstance(seen, Tensor)
    return seen


def parts(read: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
    """Queries, keys and values, `[*, H, D / H]` each."""
    return (*read.unbind(-3), *(() if memory is None else memory.unbind(-3)))


def split_heads(values: Tensor, parts: int, heads: int) -> Tensor:
    """`[*, parts * D]` -> `[*, parts, H, D / H]`."""
    return values.view(*values.shape[:-1], parts, heads, -1)


def linear(width: int, out: int, *, parts: int = 1) -> Linear:
    """A linear layer, or several side by side, each with Glorot's initialisation."""
    layer = Linear(width, parts * out)
    for part in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(part)
    nn.init.zeros_(layer.bias)
    return layer
