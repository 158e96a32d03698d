"""What waits holds gradients, over which nobody may write meanwhile."""

# D width

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, Sum
from gradvac.engine.graph import Graph
from gradvac.engine.junctions import find_junctions

from .zoo._case import Scaled

ROWS, PER_ROW, D = 6, 5, 4
MIXED = [2, 0, 1, 0, 2, 2]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class WritesOverGradient(torch.autograd.Function):
    """In memory that no counter of versions sees, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return 3.0 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        gradient.data.mul_(3.0)
        return gradient


class WritingScale(Scaled):
    """The same, with a parameter of its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        found = Scaled.backward(ctx, gradient)
        gradient.data.mul_(7.0)
        return found


class Branches(nn.Module):
    """A function beside products, a norm and a lookup that get the same gradient before it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.below, self.beside, self.above = (nn.Linear(D, D) for _ in range(3))
        self.from_input, self.norm = nn.Linear(D, D), nn.LayerNorm(D)
        self.table = nn.Embedding(50, D)
        self.scale, self.way = nn.Parameter(torch.randn(D)), way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.below(x).sin()
        if self.way == "without a parameter":
            changed = WritesOverGradient.apply(hidden * self.scale)
        elif self.way == "by a hook":
            changed = (hidden * self.scale).cos()
            changed.register_hook(lambda gradient: gradient.data.mul_(3.0))
        else:
            changed = WritingScale.apply(x if self.way == "at the input" else hidden, self.scale)
        tokens = torch.arange(x.shape[1]).expand(x.shape[:2])
        every = self.beside(hidden) + self.norm(hidden) + self.from_input(x) + self.table(tokens)
        return self.above(every + changed)


@pytest.mark.parametrize("engine", ["one_backward", "auto"])
@pytest.mark.parametrize("options", [{}, {"stream_bytes": 1}, {"table_bytes": 1}], ids=str)
@pytest.mark.parametrize(
    "way", ["without a parameter", "with a parameter", "at the input", "by a hook"]
)
@pytest.mark.parametrize("tasks", [MIXED, [1] * ROWS], ids=["mixed", "one task"])
def test_what_writes_over_an_output_gradient(
    options: dict[str, Any], engine: str, tasks: list[int], way: str
) -> None:
    model = Branches(way).double()
    x = numbers(ROWS, PER_ROW, D)
    aligner = Aligner(model, ["a", "b", "c"], Sum(), engine=engine, **options)
    for _ in range(4):
        model(x).square().sum().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        aligner.backward(model(x).square().sum((1, 2)), tasks)
        assert aligner.engine == "one_backward"
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        model.zero_grad()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_functions_of_cpp_are_given_copies() -> None:
    """Here one of TorchScript's, which writes over nothing."""

    @torch.jit.script
    def gate(x: Tensor) -> Tensor:
        return torch.tanh(2.0 * x) * torch.sigmoid(x) + 1.0

    first, last = nn.Linear(D, D), nn.Linear(D, D)
    for _ in range(3):  # it is optimised on the way
        graph = Graph([last(gate(first(numbers(ROWS, D).float()))).sum(1)])
    parameters = {*first.parameters(), *last.parameters()}
    partition = find_junctions(graph, parameters, lambda _: ROWS, ())
    assert ["Graph" in graph.names[position] for position in partition.writers] == [True]


def test_what_a_pass_will_free() -> None:
    """Each input once; no parameters, and nothing that a checkpoint makes anew."""
    x, layers = numbers(ROWS, D).float(), [nn.Linear(D, D) for _ in range(2)]
    every = [parameter for layer in layers for parameter in layer.parameters()]
    inner = layers[0](x).sin()
    kept = Graph([(layers[1](inner) * layers[1](inner)).sum(1)]).kept_bytes(every)
    assert kept == 5 * x.nbytes  # x, what the sine is of, its value, and both factors
    again = checkpoint(lambda: layers[1](layers[0](x).sin()), use_reentrant=False)
    assert Graph([again.sum(1)]).kept_bytes(every) == 0
    sparse = torch.eye(ROWS).to_sparse()
    assert Graph([torch.sparse.mm(sparse, layers[0](x)).sum(1)]).kept_bytes(every) == x.nbytes
