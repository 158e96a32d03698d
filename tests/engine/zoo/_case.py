"""What a case of the zoo is, and the parts cases are built from."""

# B rows, S tokens, D width

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, S, D, V = 6, 5, 8, 11

Losses = Callable[..., Tensor]
"""(model, tasks of the rows [B], *inputs) -> losses [B]."""


@dataclass(frozen=True)
class Case:
    """A model, how its losses are computed, and the inputs; dimension 0 of each is the batch."""

    model: nn.Module
    losses: Losses
    inputs: tuple[Tensor, ...]
    enc_dec: bool = False


ZOO: dict[str, Callable[[], Case]] = {}


def case(factory: Callable[[], Case]) -> Callable[[], Case]:
    """Add a case under its function's name."""
    ZOO[factory.__name__] = factory
    return factory


def make(name: str, dtype: torch.dtype = torch.float64) -> Case:
    """A case with the same weights and inputs every time."""
    torch.manual_seed(len(name))
    found = ZOO[name]()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in found.inputs)
    return replace(found, model=found.model.to(dtype), inputs=inputs)


def distance(output: Tensor) -> Tensor:
    """Distance from a different pattern for every row: [B, ...] -> [B]."""
    flat = output.flatten(1)
    row = torch.arange(flat.shape[0], dtype=flat.dtype, device=flat.device)[:, None]
    column = torch.arange(flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat - torch.sin(1.7 * row + 0.9 * column)).square().mean(1)


def output(model: nn.Module, tasks: Tensor, *inputs: Tensor) -> Tensor:
    """The losses of a model that returns one tensor."""
    return distance(model(*inputs))


def next_token(model: nn.Module, tasks: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy per row of a model that returns logits."""
    logits = model(tokens)[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(1)


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


class Model(nn.Module):
    """A model from parts and a function of them and the inputs."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)

    def __getattr__(self, name: str) -> Any:  # parts of any kind
        return super().__getattr__(name)


class HandWrittenNorm(nn.Module):
    """RMSNorm as model files write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt())


class Block(nn.Module):
    """A residual block of several layers."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return result


class Scaled(torch.autograd.Function):
    """A scale by a function of one's own, which has no fast path."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum_to_size(scale.shape)


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), *middle, nn.Linear(D, 3))
