"""Functions that run a backward of their own (reversible or tiled layers, some checkpoints)."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum

from .parity import TASKS, UNSORTED, assert_same_gradients
from .zoo._case import B, D, distance

ROWS = torch.tensor(UNSORTED)
HIDES = "a function runs a backward of its own, which hides 1.weight, 1.bias"


class Hiding(torch.autograd.Function):
    """Keeps only its input, and runs the layer again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            result: Tensor = layer(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def run(model: nn.Sequential, x: Tensor, *, hides: bool) -> Tensor:
    inner = model[0](x).tanh()
    return distance(model[2](Hiding.apply(inner, model[1]) if hides else model[1](inner)))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(D, D) for _ in range(3))).double()


def given(losses: Tensor, form: str) -> Any:
    if form == "rows":
        return losses, ROWS
    return ({task: losses[n == ROWS].sum() for n, task in enumerate(TASKS)},)


@pytest.mark.parametrize("form", ["rows", "mapping"])
@pytest.mark.parametrize("engine", ["per_task", "auto"])
@pytest.mark.filterwarnings("ignore:.*continues with per_task")
def test_hidden_parameters_are_aligned(engine: str, form: str) -> None:
    model, reference = make(), make()
    aligner = Aligner(model, TASKS, GradVac(beta=0.3), engine=engine)
    expected = Aligner(reference, TASKS, GradVac(beta=0.3), engine="per_task")
    for _ in range(3):  # gradients accumulate
        x = torch.randn(B, D, dtype=torch.float64)
        aligner.backward(*given(run(model, x, hides=True), form))
        expected.backward(*given(run(reference, x, hides=False), form))
        assert_same_gradients(model, reference, 1e-12)


@pytest.mark.parametrize("form", ["rows", "mapping", "separate forwards"])
def test_one_backward_refuses_them(form: str) -> None:
    model = make()
    aligner = Aligner(model, TASKS, Sum(), engine="one_backward")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    x = torch.randn(B, D, dtype=torch.float64)
    for _ in range(2):
        losses: Any = given(run(model, x, hides=True), form)
        if form == "separate forwards":
            losses = ({task: run(model, x, hides=True).sum() for task in TASKS},)
        with pytest.raises(ValueError, match=HIDES):
            aligner.backward(*losses)
        for parameter, kept in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad, kept, rtol=0, atol=0)
