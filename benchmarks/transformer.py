"""The encoder-decoder Transformer that the benchmarks time: plain torch modules, tied softmax."""

# B rows, S tokens, D width, V vocabulary

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """What is timed: the model, and how many tokens per side."""

    vocabulary: int
    width: int
    heads: int
    hidden: int
    layers: int
    tokens: int


SIZES = {
    "thin": Size(64, 16, 2, 32, 6, 256),  # base's layers without its work: the host's time
    "tiny": Size(2000, 128, 4, 512, 2, 4096),
    "base": Size(32000, 512, 8, 2048, 6, 8192),
    "big": Size(64000, 1024, 16, 8192, 6, 32768),
    "xl": Size(64000, 2048, 16, 8192, 12, 16384),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, *, causal: bool) -> Tensor:
        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, size: Size, *, decoder: bool) -> None:
        super().__init__()
        width = size.width
        self.norm1, self.self_attention = nn.LayerNorm(width), Attention(width, size.heads)
        if decoder:
            self.norm2, self.cross_attention = nn.LayerNorm(width), Attention(width, size.heads)
        self.norm3 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, size.hidden), nn.Linear(size.hidden, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attention(y, y, causal=memory is not None)
        if memory is not None:
            x = x + self.cross_attention(self.norm2(x), memory, causal=False)
        return x + self.down(F.relu(self.up(self.norm3(x))))


class Transformer(nn.Module):
    """Pre-norm, without positions and dropout: neither matters for the time of a step."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.scale = math.sqrt(size.width)
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.encoder = nn.ModuleList(Layer(size, decoder=False) for _ in range(size.layers))
        self.decoder = nn.ModuleList(Layer(size, decoder=True) for _ in range(size.layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(source) * self.scale
        for layer in self.encoder:
            x = layer(x)
        memory = self.encoder_norm(x)
        y = self.embedding(target) * self.scale
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(self.decoder_norm(y))


def component(parameter: str) -> str:
    """One component per layer; both final norms and the tied table have their own."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[1].isdigit() else parts[0]


def row_losses(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Mean token loss of every sentence, `[B]`."""
    logits = model(source, target[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), reduction="none")
    return losses.view(len(source), -1).mean(1)


def make_batch(size: Size, num_tasks: int, device: str) -> tuple[Tensor, Tensor, list[int]]:
    """Random sentences of 32 tokens, rows sorted by task."""
    rows = max(1, size.tokens // 32 // num_tasks) * num_tasks
    source = torch.randint(0, size.vocabulary, (rows, 32), device=device)
    target = torch.randint(0, size.vocabulary, (rows, 33), device=device)
    return source, target, [row * num_tasks // rows for row in range(rows)]
