"""Models that share, freeze and leave out parameters, and activations of several shapes."""

# B rows, S tokens, D width

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._case import (
    B,
    Block,
    Case,
    D,
    HandWrittenNorm,
    Model,
    S,
    V,
    case,
    distance,
    mlp,
    next_token,
    output,
    tokens_of,
)

# -- shapes ----------------------------------------------------------------------------------


@case
def rows_of_vectors() -> Case:
    return Case(mlp(nn.LayerNorm(D), nn.ReLU()), output, (torch.randn(B, D),))


@case
def nested() -> Case:
    inner = nn.ModuleDict({"a": nn.Sequential(Block(), nn.Sequential(Block())), "b": Block()})
    model = Model(
        lambda m, x: m.layers[1](m.layers[0]["a"](m.layers[0]["b"](x))),
        layers=nn.ModuleList([inner, nn.Linear(D, 3)]),
    )
    return Case(model, output, (torch.randn(B, S, D),))


@case
def flattened() -> Case:
    def run(m: Any, x: Tensor) -> Tensor:
        flat = m.norm(m.own(m.first(x.reshape(-1, D))))
        result: Tensor = m.last(flat).view(len(x), -1)
        return result

    parts = {"first": nn.Linear(D, D), "own": HandWrittenNorm(), "norm": nn.LayerNorm(D)}
    return Case(Model(run, **parts, last=nn.Linear(D, 2)), output, (torch.randn(B, S, D),))


@case
def four_dimensions() -> Case:
    model = mlp(nn.LayerNorm(D), HandWrittenNorm(), nn.RMSNorm(D), nn.GELU())
    return Case(model, output, (torch.randn(B, 2, 3, D),))


@case
def transposed_inputs() -> Case:
    """Activations that are not contiguous."""
    model = Model(
        lambda m, x: m.last(m.norm(m.first(x.mT)).mT),
        first=nn.Linear(S, D),
        norm=nn.LayerNorm(D),
        last=nn.Linear(D, D),
    )
    return Case(model, output, (torch.randn(B, S, D),))


@case
def broadcast_positions() -> Case:
    def run(m: Any, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1])[None]
        result: Tensor = m.head(m.norm(m.words(tokens) + m.scale(m.positions(positions))))
        return result

    model = Model(
        run,
        words=nn.Embedding(V, D, padding_idx=0),
        positions=nn.Embedding(S, D),
        scale=nn.Linear(D, D),
        norm=nn.LayerNorm(D),
        head=nn.Linear(D, V),
    )
    return Case(model, next_token, (tokens_of(B, S),))


@case
def table_of_positions() -> Case:
    """A table without fast path that takes [B, S] and returns [1, S, D]."""

    class Positions(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.arange(input.shape[1])[None])

    model = Model(
        lambda m, tokens: m.head(m.block(m.words(tokens) + m.positions(tokens))),
        words=nn.Embedding(V, D),
        positions=Positions(S, D),
        block=Block(),
        head=nn.Linear(D, V),
    )
    return Case(model, next_token, (tokens_of(B, S),))


@case
def called_by_keyword() -> Case:
    model = Model(
        lambda m, tokens: m.head(input=m.norm(input=m.words(input=tokens))),
        words=nn.Embedding(V, D),
        norm=nn.LayerNorm(D),
        head=nn.Linear(D, V),
    )
    return Case(model, next_token, (tokens_of(B, S),))


@case
def written_in_place() -> Case:
    """What a layer returned is overwritten by the next."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.words(tokens)
        x *= 2.0
        x += 0.5
        hidden = F.relu(m.up(x), inplace=True)
        hidden = F.relu(m.own(m.norm(hidden)), inplace=True)
        result: Tensor = m.head(hidden)
        result += x
        return result

    model = Model(
        run,
        words=nn.Embedding(V, D),
        up=nn.Linear(D, D),
        norm=nn.LayerNorm(D),
        own=HandWrittenNorm(),
        head=nn.Linear(D, D),
    )
    return Case(model, output, (tokens_of(B, S),))


# -- sharing ---------------------------------------------------------------------------------


@case
def tied_softmax() -> Case:
    model = Model(
        lambda m, tokens: m.head(m.block(m.words(tokens))),
        words=nn.Embedding(V, D, padding_idx=1),
        block=Block(),
        head=nn.Linear(D, V, bias=False),
    )
    model.head.weight = model.words.weight
    return Case(model, next_token, (tokens_of(B, S),))


@case
def tied_across_encoder_and_decoder() -> Case:
    def run(m: Any, source: Tensor, target: Tensor) -> Tensor:
        state = m.encoder[1](m.encoder[0](source)).mean(1, keepdim=True)
        result: Tensor = m.head(m.decoder[1](m.decoder[0](target) + state))
        return result

    model = Model(
        run,
        encoder=nn.Sequential(nn.Embedding(V, D), Block()),
        decoder=nn.Sequential(nn.Embedding(V, D), Block()),
        head=nn.Linear(D, V),
    )
    model.head.weight = model.encoder[0].weight = model.decoder[0].weight
    return Case(model, output, (tokens_of(B, S), tokens_of(B, 4)), enc_dec=True)


@case
def shared_layer_of_encoder_and_decoder() -> Case:
    shared = Block()
    model = Model(
        lambda m, x: m.decoder(m.encoder(x)),
        encoder=nn.Sequential(Block(), shared),
        decoder=nn.Sequential(shared, Block(), nn.Linear(D, 2)),
    )
    return Case(model, output, (torch.randn(B, S, D),), enc_dec=True)


@case
def called_twice() -> Case:
    block = Block(HandWrittenNorm())
    return Case(
        nn.Sequential(block, Block(), block, nn.Linear(D, 2)), output, (torch.randn(B, S, D),)
    )


@case
def weight_of_two_modules() -> Case:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), nn.LayerNorm(D), second)
    return Case(model, output, (torch.randn(B, D),))


@case
def fallback_shares_with_fast_path() -> Case:
    """A weight used by a module that runs task by task and by one that does not."""

    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 0.5 * super().forward(input)

    model = Model(
        lambda m, tokens: m.head(m.block(m.words(tokens) + m.scaled(tokens))),
        words=nn.Embedding(V, D),
        scaled=Scaled(V, D),
        block=Block(),
        head=nn.Linear(D, V, bias=False),
    )
    model.head.weight = model.scaled.weight = model.words.weight
    return Case(model, next_token, (tokens_of(B, S),))


@case
def shared_with_the_inside_of_a_fallback() -> Case:
    """A layer inside a module that runs task by task, called from outside of it too."""
    norm = nn.LayerNorm(D)
    gate = Model(lambda m, x: m.norm(x) * m.scale, norm=norm, scale=nn.Parameter(torch.randn(D)))
    model = Model(
        lambda m, x: m.norm(m.gate(m.linear(x))), gate=gate, linear=nn.Linear(D, D), norm=norm
    )
    return Case(model, output, (torch.randn(B, S, D),))


# -- which parameters take part --------------------------------------------------------------


@case
def frozen_parameters() -> Case:
    words = nn.Embedding(V, D)
    block, last = Block(), nn.Linear(D, V)
    for frozen in (words.weight, block.up.weight, block.norm.bias, last.bias):
        frozen.requires_grad_(False)
    assert isinstance(block.norm, nn.LayerNorm)
    return Case(nn.Sequential(words, block, last), next_token, (tokens_of(B, S),))


@case
def heads_of_tasks() -> Case:
    """Every row has the head of its task alone: other tasks' gradients of a head are zero."""

    def losses(model: Any, tasks: Tensor, x: Tensor) -> Tensor:
        every = torch.stack([distance(head(model.trunk(x))) for head in model.heads])
        return every.gather(0, tasks[None])[0]

    heads = nn.ModuleList([nn.Linear(D, 2 + t) for t in range(3)])
    return Case(Model(_no_forward, trunk=Block(), heads=heads), losses, (torch.randn(B, S, D),))


@case
def unused_in_some_steps() -> Case:
    """A layer takes part in every second step only, and one never."""

    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block(), Block(HandWrittenNorm()), Block()])
            self.step = 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            result: Tensor = self.layers[0](self.layers[1 + self.step % 2](x))
            return result

    return Case(Alternating(), output, (torch.randn(B, S, D),))


@case
def output_not_in_the_loss() -> Case:
    """A module runs, but nothing of it reaches the loss."""

    def run(m: Any, x: Tensor) -> Tensor:
        m.probe(m.first(x))
        result: Tensor = m.last(m.first(x))
        return result

    parts = {"first": Block(), "probe": nn.Linear(D, D), "last": nn.Linear(D, 2)}
    return Case(Model(run, **parts), output, (torch.randn(B, S, D),))


def _no_forward(*args: object) -> Tensor:
    raise NotImplementedError


@case
def made_of_itself_many_times() -> Case:
    """Sinkhorn's iterations: 16 million ways lead from the product to the weight."""

    def run(m: Any, x: Tensor) -> Tensor:
        weight = m.weight
        for _ in range(12):
            weight = weight - weight.logsumexp(0, keepdim=True)
            weight = weight - weight.logsumexp(1, keepdim=True)
        upper, lower = weight.exp().chunk(2)
        result: Tensor = m.last(x @ weight.exp() + x @ torch.cat([lower, upper]))
        return result

    model = Model(run, weight=nn.Parameter(torch.randn(D, D)), last=nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, S, D),))
