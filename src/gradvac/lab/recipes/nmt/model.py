"""The Transformer: one model for all tasks, every parameter shared.

Sentences come padded (dimension 0 counts sentences) or packed (dimension 0 counts tokens); the
modules are the same. `Side.rows()` says whose rows a module sees: the encoder and the keys
and values of cross-attention follow the source, all else in the decoder the target.

Every parameter is used through the module that owns it, so that its gradient can be separated by
task; the softmax is a linear layer whose weight is the embedding's.
"""

# B sentences, S tokens of the longest, N tokens of all, D width, H heads, V vocabulary
# token by token: R slots for sentences, K beams, L steps
# [*, D] stands for [B, S, D] of padded and [N, D] of packed batches

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradvac
from gradvac.lab.recipes.nmt.batches import Batch, Side
from gradvac.lab.recipes.nmt.loss import cross_entropy, max_logits
from gradvac.utils.devices import triton_module

_SHORT = 256  # tokens of the longest sentence for which the kernel for short sentences is used
_HEAD_WIDTHS = (16, 32, 64, 128)  # that it supports


class Size(NamedTuple):
    """The size of a Transformer."""

    width: int  # D
    inner: int  # between the two layers of the feed-forward network
    heads: int
    encoder_layers: int
    decoder_layers: int


SIZES = {
    "tiny": Size(width=64, inner=256, heads=2, encoder_layers=2, decoder_layers=2),
    "small": Size(width=256, inner=1024, heads=4, encoder_layers=4, decoder_layers=4),
    "base": Size(width=512, inner=2048, heads=8, encoder_layers=6, decoder_layers=6),
    "big": Size(width=1024, inner=8192, heads=16, encoder_layers=6, decoder_layers=6),
}


class Layer(nn.Module):
    """A module that returns one tensor."""

    __call__: Callable[..., Tensor]


class Linear(Layer, nn.Linear):
    """`nn.Linear` with a typed call."""


def linear(width: int, out: int, *, parts: int = 1) -> Linear:
    """A linear layer, or several side by side, each with Glorot's initialisation."""
    layer = Linear(width, parts * out)
    for part in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(part)
    nn.init.zeros_(layer.bias)
    return layer


class Transformer(Layer):
    """Encoder and decoder with tied embeddings and softmax, and the loss.

    Args:
        size: One of `SIZES`, or your own.
        vocabulary_size: V.
        dropout: Of embeddings, and of what a sub-layer adds.
        norm_first: Normalise what a sub-layer reads (pre-norm) instead of what it returns.
        label_smoothing: Share of the probability spread over the vocabulary, in training.
        logits_per_chunk: The loss goes over the labels in chunks of this many logits, and, if
            there are several, computes them again in the backward: `[N, V]` is never stored.
            "auto": as many as a quarter of a GPU's memory holds, 2^27 elsewhere.

    Examples:
        >>> from gradvac.lab.recipes.nmt import SIZES, Transformer
        >>> model = Transformer(SIZES["tiny"], 1000)
        >>> sum(parameter.numel() for parameter in model.parameters())
        297728
    """

    def __init__(
        self,
        size: Size,
        vocabulary_size: int,
        *,
        dropout: float = 0.1,
        norm_first: bool = True,
        label_smoothing: float = 0.1,
        logits_per_chunk: int | Literal["auto"] = "auto",
    ) -> None:
        super().__init__()
        self.size, self.label_smoothing = size, label_smoothing
        self._logits_per_chunk = logits_per_chunk
        self.embedding = nn.Embedding(vocabulary_size, size.width)
        self.positions = Positions(size.width)
        self.dropout = dropout
        options = (size, dropout, norm_first)
        encoder = [EncoderLayer(*options) for _ in range(size.encoder_layers)]
        decoder = [DecoderLayer(*options) for _ in range(size.decoder_layers)]
        self.encoder = Stack(encoder, size.width, norm_first)
        self.decoder = Stack(decoder, size.width, norm_first)
        self.head = Linear(size.width, vocabulary_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)

    def forward(self, batch: Batch) -> Tensor:
        """The cross-entropy of every sentence, summed over its labels, `[B]`."""
        memory = self.encode(batch.source)
        states = self.decode(batch.target, memory, batch.source)
        losses = self._label_losses(states, batch.labels, batch.row_of_label)
        sums = losses.new_zeros(len(batch)).index_add(0, batch.sentence_of_label, losses)
        return sums if batch.counts is None else sums.where(batch.counts, 0.0)

    def encode(self, source: Side) -> Tensor:
        """The states of the source tokens, `[*, D]`."""
        with source.rows():
            x = self._embed(source.tokens, source.positions, source.longest)
            return self.encoder(x, source)

    def decode(self, target: Side, memory: Tensor, source: Side) -> Tensor:
        """The state before every label, `[N, D]`, with teacher forcing."""
        with target.rows():
            x = self._embed(target.tokens, target.positions, target.longest)
            states = self.decoder(x, target, memory, source)
        return states if target.packed else target.pack(states)

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.size.width)
        x = x + self.positions(positions, longest).to(x.dtype)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # all states between layers are of this type
            x = x.to(torch.get_autocast_dtype(kind))
        return F.dropout(x, self.dropout, self.training)

    def _label_losses(self, states: Tensor, labels: Tensor, sentences: Tensor) -> Tensor:
        """The cross-entropy of every label, `[N]`."""
        most = self._logits_per_chunk
        if most == "auto":
            most = max_logits(states.device)
        size = max(1, most // len(self.head.weight))
        if len(labels) <= size:
            return self._chunk_losses(states, labels, sentences)
        chunks = zip(
            *(torch.split(values, size) for values in (states, labels, sentences)), strict=True
        )
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([recomputed(self._chunk_losses, *chunk) for chunk in chunks])

    def _chunk_losses(self, states: Tensor, labels: Tensor, sentences: Tensor) -> Tensor:
        with gradvac.rows(gradvac.RowTasks(entries=sentences, ascending=True)):
            logits = self.head(states)
        smoothing = self.label_smoothing if self.training else 0.0
        return cross_entropy(logits, labels, smoothing)

    # Token by token

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder.layers if isinstance(layer, DecoderLayer)]

    def make_cache(self, num_slots: int, num_beams: int, *, source: int, target: int) -> KVCache:
        """An empty cache for translating token by token.

        Args:
            num_slots: Sentences translated at a time.
            num_beams: Of each sentence.
            source: Tokens of the longest source.
            target: Most steps.
        """
        self.positions.reach(max(source, target))
        heads, width = self.size.heads, self.size.width // self.size.heads
        sources = (num_slots, heads, source, width)
        shapes = (sources, sources, (num_slots, 2, heads, target * num_beams, width))
        zeros = self.embedding.weight.new_zeros  # what a mask hides must still be finite
        return [LayerCache(*map(zeros, shapes)) for _ in self._decoder_layers()]

    def read_source(self, source: Side) -> list[tuple[Tensor, Tensor]]:
        """Every layer's keys and values of padded sources, `[B, H, S, D / H]`."""
        memory = self.encode(source)
        read = [layer.cross_attention.read(memory).unbind(-3) for layer in self._decoder_layers()]
        return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in read]

    def step(self, tokens: Tensor, cache: KVCache, at: StepContext) -> Tensor:
        """Read one token of every beam, `[R, K]`, and return the logits of the next, `[R, K, V]`.

        Writes keys and values of the token into `cache`.
        """
        x = self.embedding(tokens)
        positions = self.positions.table[at.steps][:, None].to(x.dtype)
        x = positions.add(x, alpha=math.sqrt(self.size.width))
        for layer, layer_cache in zip(self._decoder_layers(), cache, strict=True):
            x = layer.step(x, layer_cache, at)
        return self.head(self.decoder.norm(x))


class Positions(Layer):
    """Sinusoidal positions; the table grows when a longer sentence comes."""

    def __init__(self, width: int, length: int = 256) -> None:
        super().__init__()
        self.width = width
        self.table: Tensor
        self.register_buffer("table", self.make(length), persistent=False)

    def make(self, length: int) -> Tensor:
        """The table of so many positions, `[length, D]`."""
        half = self.width // 2
        rates = torch.exp(torch.arange(half) * (-math.log(10_000) / max(half - 1, 1)))
        angles = torch.arange(length)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1)

    def forward(self, positions: Tensor, longest: int) -> Tensor:
        """Look up positions below `longest`."""
        self.reach(longest)
        return self.table[positions]

    def reach(self, longest: int) -> None:
        """Grow the table to positions below `longest`."""
        if longest > len(self.table):
            with torch.inference_mode(False):  # it outlives a search, and training may read it
                self.table = self.make(2 * longest).to(self.table)


class Stack(Layer):
    """Layers one after the other; with pre-norm, a normalisation after the last."""

    def __init__(self, layers: Iterable[nn.Module], width: int, norm_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(width) if norm_first else nn.Identity()

    def forward(self, x: Tensor, *context: object) -> Tensor:
        """Every layer gets the context."""
        for layer in self.layers:
            x = layer(x, *context)
        normal: Tensor = self.norm(x)
        return normal


class EncoderLayer(Layer):
    """Self-attention and feed-forward network."""

    def __init__(self, size: Size, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(size.width, size.heads)
        self.after_attention = Residual(size.width, dropout, norm_first)
        self.network = FeedForward(size)
        self.after_network = Residual(size.width, dropout, norm_first)

    def forward(self, x: Tensor, side: Side) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        x = self.after_attention(x, lambda y: self.attention(y, side, causal=False))
        return self.after_network(x, self.network)


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to the source, and feed-forward network."""

    def __init__(self, size: Size, dropout: float, norm_first: bool) -> None:
        super().__init__(size, dropout, norm_first)
        self.cross_attention = CrossAttention(size.width, size.heads)
        self.after_cross_attention = Residual(size.width, dropout, norm_first)

    def forward(self, x: Tensor, target: Side, memory: Tensor, source: Side) -> Tensor:  # type: ignore[override]
        """`[*, D]` -> `[*, D]`."""
        x = self.after_attention(x, lambda y: self.attention(y, target, causal=True))
        x = self.after_cross_attention(x, lambda y: self.cross_attention(y, target, memory, source))
        return self.after_network(x, self.network)

    def step(self, x: Tensor, cache: LayerCache, at: StepContext) -> Tensor:
        """Process the newest token of every beam, `[R, K, D]`."""
        x = self.after_attention(x, lambda y: self.attention.step(y, cache, at))
        x = self.after_cross_attention(x, lambda y: self.cross_attention.step(y, cache, at))
        return self.after_network(x, self.network)


class Residual(Layer):
    """What surrounds a sub-layer: normalisation, dropout, and the sum with its input."""

    def __init__(self, width: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.norm_first, self.dropout = Norm(width), norm_first, dropout

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x + sublayer(norm(x)), or norm(x + sublayer(x))."""
        change = sublayer(self.norm(x) if self.norm_first else x)
        x = x + (F.dropout(change, self.dropout) if self.training else change)
        return x if self.norm_first else self.norm(x)


class Norm(nn.LayerNorm):
    """`nn.LayerNorm` whose result has the type of its input, also under autocast.

    That one's would be float32, and what follows would be twice the memory to read and write. It
    computes in float32 in any case.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            scale, shift = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, scale, shift, self.eps)


class FeedForward(Layer):
    """Two linear layers with a ReLU between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = linear(size.width, size.inner)
        self.second = linear(size.inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        return self.second(F.relu(self.first(x)))


class LayerCache(NamedTuple):
    """The keys and values of one decoder layer, allocated once."""

    source_keys: Tensor  # [R, H, S, D / H]
    source_values: Tensor
    # Keys and values, so that one operation writes both: [R, 2, H, L * K, D / H]. Place t * K + k
    # is of what beam k read at its step t.
    target: Tensor

    def part(self, num_slots: int, source_length: int, num_places: int) -> LayerCache:
        """The beginning of every dimension, without a copy."""
        return LayerCache(
            self.source_keys[:num_slots, :, :source_length],
            self.source_values[:num_slots, :, :source_length],
            self.target[:num_slots, :, :, :num_places],
        )


KVCache = list[LayerCache]


class StepContext(NamedTuple):
    """What all layers must know of a step of translating token by token.

    Attributes:
        rows: 0 ... R - 1.
        steps: Which step every slot is at, `[R]`.
        target_mask: 0 for the keys a beam sees, its own and those of its ancestors; -inf for the
            others: `[R, 1, K, L * K]`.
        source_mask: The same of the source tokens that are real, `[R, 1, 1, S]`.
    """

    rows: Tensor
    steps: Tensor
    target_mask: Tensor
    source_mask: Tensor


class SelfAttention(Layer):
    """Attention of a sentence to itself; queries, keys and values come from one product."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = linear(width, width, parts=3)
        self.write = linear(width, width)

    def forward(self, x: Tensor, side: Side, *, causal: bool) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        qkv = split_heads(self.read(x), 3, self.heads)
        return self.write(attend(qkv, None, side, side, causal=causal))

    def step(self, x: Tensor, cache: LayerCache, at: StepContext) -> Tensor:
        """Let the newest token of every beam, `[R, K, D]`, see itself and all before it.

        Beams of a slot share their keys, and each is shown those of its ancestors: no key is ever
        moved when a beam continues another.
        """
        num, num_beams, width = x.shape
        new = self.read(x).view(num, num_beams, 3, self.heads, -1).permute(0, 2, 3, 1, 4)
        place = cache.target.unflatten(3, (-1, num_beams))
        place[at.rows, :, :, at.steps] = new[:, 1:]
        seen = F.scaled_dot_product_attention(
            new[:, 0], cache.target[:, 0], cache.target[:, 1], attn_mask=at.target_mask
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
            kv = self.read(memory)
        return self.write(attend(query, kv, target, source, causal=False))

    def step(self, x: Tensor, cache: LayerCache, at: StepContext) -> Tensor:
        """Let the beams of a slot, `[R, K, D]`, be its queries: its source is kept once."""
        query = split_heads(self.query(x), 1, self.heads).squeeze(-3).transpose(1, 2)
        seen = F.scaled_dot_product_attention(
            query, cache.source_keys, cache.source_values, attn_mask=at.source_mask
        )
        return self.write(seen.transpose(1, 2).flatten(-2))


def attend(qkv: Tensor, kv: Tensor | None, queries: Side, keys: Side, *, causal: bool) -> Tensor:
    """Attention within sentence pairs, -> `[*, D]`.

    Padding lies at the end, so that a causal mask hides it already. A mask is used for unequal
    lengths only, because fused kernels are slower with one.

    Args:
        qkv: Queries, and without `kv` keys and values too, `[*, 1 or 3, H, D / H]`.
        kv: Keys and values, `[*, 2, H, D / H]`.
        queries: Where the queries lie.
        keys: Where keys and values lie.
        causal: A query sees the keys up to its own place.
    """
    if queries.packed and qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16):
        return _attend_packed(qkv, kv, queries, keys, causal=causal).flatten(-2)
    query, key, value = split_qkv(qkv, kv)
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
    qkv: Tensor, kv: Tensor | None, queries: Side, keys: Side, *, causal: bool
) -> Tensor:
    """Attention on a GPU without padding, `[N, H, D / H]`."""
    kernels = triton_module("gradvac.lab.recipes.nmt.triton_kernels")
    is_short = max(queries.longest, keys.longest) <= _SHORT and qkv.shape[-1] in _HEAD_WIDTHS
    if is_short and kernels is not None:
        short: Tensor = kernels.attend_short(qkv, kv, queries.ends, keys.ends, causal=causal)
        return short
    # Here and not above: it brings the compiler along, a second that no other run should pay.
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal else (-1, -1)
    ends = (queries.ends, keys.ends, queries.longest, keys.longest)
    query, key, value = split_qkv(qkv, kv)
    seen = varlen_attn(query, key, value, *ends, window_size=window)
    assert isinstance(seen, Tensor)
    return seen


def split_qkv(qkv: Tensor, kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, `[*, H, D / H]` each."""
    query, key, value = (*qkv.unbind(-3), *(() if kv is None else kv.unbind(-3)))
    return query, key, value


def split_heads(values: Tensor, parts: int, heads: int) -> Tensor:
    """`[*, parts * D]` -> `[*, parts, H, D / H]`."""
    return values.view(*values.shape[:-1], parts, heads, -1)
