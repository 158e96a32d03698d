"""Single layers: convolutions, norms, tables, and layers that have no fast path."""

# B rows, S tokens, D width

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ._case import B, Block, Case, D, HandWrittenNorm, Model, S, V, case, mlp, output, tokens_of

# -- convolutions ----------------------------------------------------------------------------


@case
def conv1d() -> Case:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv1d(8, 8, 3, dilation=2, groups=4, bias=False),
        nn.Conv1d(8, 2, 1),
    )
    return Case(model, output, (torch.randn(B, 4, 16),))


@case
def conv1d_with_other_padding() -> Case:
    model = nn.Sequential(
        nn.Conv1d(4, 6, 5, padding="same"),
        nn.Tanh(),
        nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(6, 2, 3, padding="valid"),
    )
    return Case(model, output, (torch.randn(B, 4, 9),))


@case
def conv2d() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=(2, 1), padding=(1, 0)),
        nn.GroupNorm(3, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6, dilation=(1, 2), padding=2),
        nn.Conv2d(6, 4, 1, bias=False),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return Case(model, output, (torch.randn(B, 3, 6, 7),))


@case
def conv_transposed() -> Case:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.PReLU(3), nn.ConvTranspose2d(3, 2, 2, stride=2))
    return Case(model, output, (torch.randn(B, 2, 5, 5),))


# -- norms -----------------------------------------------------------------------------------


@case
def layer_norms() -> Case:
    model = nn.Sequential(
        nn.Linear(D, D),
        nn.LayerNorm(D, elementwise_affine=False),
        nn.LayerNorm(D, bias=False),
        nn.LayerNorm((S, D)),
        nn.Linear(D, 3),
    )
    return Case(model, output, (torch.randn(B, S, D),))


@case
def rms_norms() -> Case:
    middle = (nn.RMSNorm(D), nn.Tanh(), HandWrittenNorm(), nn.RMSNorm((S, D), eps=1e-5))
    return Case(mlp(*middle), output, (torch.randn(B, S, D),))


@case
def group_norm_of_vectors() -> Case:
    return Case(mlp(nn.GroupNorm(2, D), nn.Tanh()), output, (torch.randn(B, D),))


@case
def batch_norm_in_eval_mode() -> Case:
    model = nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Tanh(), nn.Conv1d(6, 2, 1))
    return Case(model.eval(), output, (torch.randn(B, 4, 7),))


# -- tables ----------------------------------------------------------------------------------


def table(embedding: nn.Module) -> Case:
    return Case(nn.Sequential(embedding, Block()), output, (tokens_of(B, S),))


@case
def embedding_with_padding() -> Case:
    return table(nn.Embedding(V, D, padding_idx=-1))


@case
def embedding_with_max_norm() -> Case:
    return table(nn.Embedding(V, D, max_norm=1.0))


@case
def embedding_scaled_by_frequency() -> Case:
    return table(nn.Embedding(V, D, scale_grad_by_freq=True))


@case
def embedding_sparse() -> Case:
    return table(nn.Embedding(V, D, sparse=True))


@case
def embedding_bag() -> Case:
    return table(nn.EmbeddingBag(V, D, mode="mean"))


@case
def embedding_bag_with_offsets() -> Case:
    """Dimension 0 of the first input is not the batch."""

    def run(m: Any, tokens: Tensor) -> Tensor:
        lengths = 1 + torch.arange(len(tokens)) % 3
        kept = torch.cat([row[:n] for row, n in zip(tokens, lengths, strict=True)])
        result: Tensor = m.block(m.bag(kept, lengths.cumsum(0) - lengths))
        return result

    model = Model(run, bag=nn.EmbeddingBag(V, D, mode="sum"), block=Block())
    return Case(model, output, (tokens_of(B, S),))


# -- no fast path ----------------------------------------------------------------------------


@case
def weight_norm() -> Case:
    layer = parametrizations.weight_norm(nn.Linear(D, D))
    return Case(nn.Sequential(layer, Block()), output, (torch.randn(B, S, D),))


@case
def spectral_norm() -> Case:
    """In training mode its buffers move with every forward."""
    layer = parametrizations.spectral_norm(nn.Linear(D, D))
    return Case(nn.Sequential(layer, Block()), output, (torch.randn(B, S, D),))


@case
def weight_computed_by_a_hook() -> Case:
    """The weight is no parameter but computed from one before the forward."""
    layer = nn.utils.spectral_norm(nn.Linear(D, D))
    return Case(nn.Sequential(layer, Block()), output, (torch.randn(B, S, D),))


@case
def bilinear() -> Case:
    model = Model(
        lambda m, x, y: m.join(m.left(x), m.right(y)),
        left=nn.Linear(D, 4),
        right=nn.Linear(D, 3),
        join=nn.Bilinear(4, 3, 5),
    )
    return Case(model, output, (torch.randn(B, S, D), torch.randn(B, S, D)))


@case
def parameter_list() -> Case:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.ParameterList(torch.randn(D, D) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for matrix in self.matrices:
                x = (x @ matrix).tanh()
            return x

    return Case(nn.Sequential(Block(), Mixture(), Block()), output, (torch.randn(B, S, D),))


@case
def class_token_of_the_root() -> Case:
    """The model itself has a parameter, so all of it runs task by task."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([m.token.expand(len(x), 1, D), x], dim=1)
        result: Tensor = m.head(m.block(x)[:, 0])
        return result

    token = nn.Parameter(torch.randn(1, 1, D))
    model = Model(run, token=token, block=Block(), head=nn.Linear(D, 3))
    return Case(model, output, (torch.randn(B, S, D),))


@case
def several_outputs() -> Case:
    """A module that returns a dict with an integer tensor, a number and an unused tensor."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, D, D))

        def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
            left, right = x @ self.weight[0], x @ self.weight[1]
            return {"left": left * scale, "best": left.argmax(-1), "n": 3, "unused": right}

    def run(m: Any, x: Tensor) -> Tensor:
        found = m.router(m.first(x), scale=0.5)
        result: Tensor = m.last(found["left"]) + found["best"][..., None] + found["n"]
        return result

    model = Model(run, first=nn.Linear(D, D), router=Router(), last=nn.Linear(D, 2))
    return Case(model, output, (torch.randn(B, S, D),))
