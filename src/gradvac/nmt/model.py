"""The Transformer: one model for all tasks, every parameter shared.

Sentences come padded (dimension 0 counts sentences) or packed (dimension 0 counts tokens); the
modules are the same. Packed, `Side.rows()` says whose rows a module sees: the encoder and the keys
and values of cross-attention follow the source, all else in the decoder the target.

Every parameter is used through the module that owns it, so that its gradient can be separated by
task; the softmax is a linear layer whose weight is the embedding's.
"""

# B sentences, S tokens of the longest, N tokens of all, K beams, D width, H heads, V vocabulary
# [*, D] stands for [B, S, D] of padded and [N, D] of packed batches

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradvac
from gradvac.nmt.attention import (
    Cache,
    CrossAttention,
    Layer,
    LayerCache,
    Linear,
    SelfAttention,
    linear,
)
from gradvac.nmt.batch import Batch, Side


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

    Example:
        >>> from gradvac.nmt import SIZES, Transformer
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
        logits_per_chunk: int = 1 << 27,
    ) -> None:
        super().__init__()
        self.size, self.label_smoothing = size, label_smoothing
        self.labels_per_chunk = max(1, logits_per_chunk // vocabulary_size)
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
        """Compute the cross-entropy of every sentence, summed over its labels, `[B]`."""
        memory = self.encode(batch.source)
        states = self.decode(batch.target, memory, batch.source)
        losses = self.label_losses(states, batch.labels, batch.task_of_label)
        return losses.new_zeros(len(batch)).index_add(0, batch.sentence_of_label, losses)

    def encode(self, source: Side) -> Tensor:
        """Compute the states of the source tokens, `[*, D]`."""
        with source.rows():
            x = self._embed(source.tokens, source.positions, source.longest)
            return self.encoder(x, source)

    def decode(self, target: Side, memory: Tensor, source: Side) -> Tensor:
        """Compute the state before every label, `[N, D]`, for whole targets at once."""
        with target.rows():
            x = self._embed(target.tokens, target.positions, target.longest)
            states = self.decoder(x, target, memory, source)
        return states if target.packed else target.pack(states)

    def _embed(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.size.width)
        x = x + self.positions(positions, longest).to(x.dtype)
        return F.dropout(x, self.dropout, self.training)

    def label_losses(self, states: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        """Compute the cross-entropy of every label.

        Args:
            states: The state before every label, `[N, D]`.
            labels: `[N]`.
            tasks: Task positions of the labels, `[N]`, on the host.
        """
        size = self.labels_per_chunk
        if len(labels) <= size:
            return self._chunk_losses(states, labels, tasks)
        chunks = zip(*(torch.split(whole, size) for whole in (states, labels, tasks)), strict=True)
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(self._chunk_losses, *chunk) for chunk in chunks])

    def _chunk_losses(self, states: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        with gradvac.rows(tasks):
            logits = self.head(states)
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)

    def _steps(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder.layers if isinstance(layer, DecoderLayer)]

    def begin(self, source: Side, num_beams: int) -> Cache:
        """Read padded sources, to translate them token by token with `step`."""
        memory = self.encode(source)
        return Cache([layer.begin(memory, num_beams) for layer in self._steps()], source.mask)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Read one token of every beam, `[B, K]`, and return the logits of the next, `[B, K, V]`.

        Changes `cache`.
        """
        now = torch.full_like(tokens[:1, :1], cache.length)
        x = self._embed(tokens, now, cache.length + 1)
        for layer, own in zip(self._steps(), cache.layers, strict=True):
            x = layer.step(x, own, cache.mask)
        cache.length += 1
        return self.head(self.decoder.norm(x))


class Positions(Layer):
    """Sinusoidal positions; the table grows when a longer sentence comes."""

    def __init__(self, width: int, length: int = 256) -> None:
        super().__init__()
        self.width = width
        self.table: Tensor
        self.register_buffer("table", self._make(length), persistent=False)

    def _make(self, length: int) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half) * (-math.log(10_000) / max(half - 1, 1)))
        angles = torch.arange(length)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1)

    def forward(self, positions: Tensor, longest: int) -> Tensor:
        """Look up positions below `longest`."""
        if longest > len(self.table):
            self.table = self._make(2 * longest).to(self.table)
        return self.table[positions]


class Stack(Layer):
    """Layers one after the other; with pre-norm, a normalisation after the last."""

    def __init__(self, layers: Iterable[nn.Module], width: int, norm_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()

    def forward(self, x: Tensor, *context: object) -> Tensor:
        """`[*, D]` -> `[*, D]`; every layer gets the context."""
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

    def begin(self, memory: Tensor, num_beams: int) -> LayerCache:
        """Keep keys and values of the source, and of no target token yet."""
        keys, values = (part.transpose(1, 2) for part in self.cross_attention.read(memory))
        none = keys.new_empty(len(memory) * num_beams, keys.shape[1], 0, keys.shape[3])
        return LayerCache(keys, values, none, none)

    def step(self, x: Tensor, cache: LayerCache, mask: Tensor | None) -> Tensor:
        """Process the newest token of every beam, `[B, K, D]`."""
        x = self.after_attention(x, lambda y: self.attention.step(y, cache))
        x = self.after_cross_attention(x, lambda y: self.cross_attention.step(y, cache, mask))
        return self.after_network(x, self.network)


class Residual(Layer):
    """What surrounds a sub-layer: normalisation, dropout, and the sum with its input."""

    def __init__(self, width: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.norm_first, self.dropout = nn.LayerNorm(width), norm_first, dropout

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x + sublayer(norm(x)), or norm(x + sublayer(x))."""
        change = sublayer(self.norm(x) if self.norm_first else x)
        x = x + F.dropout(change, self.dropout, self.training)
        return x if self.norm_first else self.norm(x)


class FeedForward(Layer):
    """Two linear layers with a ReLU between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.first = linear(size.width, size.inner)
        self.second = linear(size.inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """`[*, D]` -> `[*, D]`."""
        return self.second(F.relu(self.first(x)))
