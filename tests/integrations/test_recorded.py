"""Recorded steps of a trainer: what surrounds the CUDA graph, with a stand-in for the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac.integrations.transformers import AlignedTrainer, Backward
from gradvac.utils import cuda_graph
from gradvac.utils.cuda_graph import MOST_SHAPES, GraphedStep


class StandIn:
    """Replays like a graph: from the third call on it writes into the tensors of the second."""

    def __init__(self, take: Callable[[], Backward], *_: Any) -> None:
        self.take, self.num_calls, self.is_replayed = take, 0, False
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    def __call__(self) -> Backward:
        self.num_calls += 1
        self.is_replayed = self.num_calls > 1
        if self.num_calls < 3:
            result = self.take()
            self.kept = [(p, p.grad) for p in MODEL.parameters() if p.grad is not None]
            return result
        before = [p.grad for p, _ in self.kept]
        result = self.take()
        for (parameter, place), own in zip(self.kept, before, strict=True):
            assert parameter.grad is not None
            place.copy_(parameter.grad)
            parameter.grad = own  # a graph knows nothing of attributes
        return result


MODEL = nn.Linear(3, 1)


def take(inputs: Mapping[str, Tensor]) -> Backward:
    loss = MODEL(inputs["x"]).square().sum()
    loss.backward()
    return Backward(loss.detach(), None)


def test_gradients_of_every_step_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "CudaGraph", StandIn)
    steps = GraphedStep(take, MODEL, torch.device("cpu"))
    torch.manual_seed(0)
    for step in range(60):
        x = torch.randn(1 + step % (MOST_SHAPES + 2), 3)
        MODEL.zero_grad()
        expected = torch.autograd.grad(MODEL(x).square().sum(), list(MODEL.parameters()))
        result = steps({"x": x})
        torch.testing.assert_close(result.loss, MODEL(x).square().sum().detach())
        for parameter, gradient in zip(MODEL.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


def test_a_changed_model_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "CudaGraph", StandIn)
    steps = GraphedStep(take, MODEL, torch.device("cpu"))
    x = torch.randn(2, 3)

    def step() -> list[bool]:
        MODEL.zero_grad()
        steps({"x": x})
        return [p.grad is not None for p in MODEL.parameters()]

    for _ in range(4):
        assert step() == [True, True]
    MODEL.bias.requires_grad_(False)
    try:
        for _ in range(4):
            assert step() == [True, False]
    finally:
        MODEL.bias.requires_grad_(True)
    assert step() == [True, True]
    MODEL.weight.data = MODEL.weight.data.clone() * 2  # elsewhere in memory
    for _ in range(3):
        step()
        expected = torch.autograd.grad(MODEL(x).square().sum(), MODEL.weight)[0]
        torch.testing.assert_close(MODEL.weight.grad, expected)
    with pytest.raises(ValueError, match=r"recorded: .*gradient before"):
        steps({"x": x})
    MODEL.zero_grad()


def test_needs_are_named(make_model: Callable[..., Any], arguments: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"recorded: .*GPU, bf16=True"):
        AlignedTrainer(
            model=make_model("tokens"), args=arguments(), tasks=["de", "fr"], recorded=True
        )
