"""Copies of a model and its aligner, forked processes, and gradients that stand alone."""

import copy
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Sum

from .parity import TASKS, UNSORTED, assert_same_gradients, attach, plain_backward
from .zoo._case import B, D, distance

ROWS = torch.tensor(UNSORTED)


class TwoHeads(nn.Module):
    """Graphs of equal structure that differ by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(D, D)
        self.heads = nn.ModuleList(nn.Linear(D, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        result: Tensor = self.heads[head](self.trunk(x).tanh())
        return result


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_of_a_model_and_its_aligner(way: str) -> None:
    model = TwoHeads()
    aligner = attach(model, Sum())
    aligner.backward(distance(model(torch.randn(B, D), 0)), ROWS)
    both = (model, aligner)
    twin, copied = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    for step in range(4):
        twin.zero_grad()
        x = torch.randn(B, D)
        copied.backward(distance(twin(x, step % 2)), ROWS)
        plain = copy.deepcopy(twin)
        plain.zero_grad()
        plain_backward(distance(plain(x, step % 2)))
        assert_same_gradients(twin, plain, 1e-5)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_goes_on() -> None:
    """It has none of the threads of the process it comes from."""
    model = nn.Sequential(nn.Linear(D, D), nn.PReLU(D), nn.Linear(D, 3)).double()
    aligner = attach(model)

    def step() -> None:
        aligner.backward(distance(model(torch.randn(B, D, dtype=torch.float64))), ROWS)

    step()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a process that waits for a thread
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class Fused(torch.autograd.Function):
    """A head and its loss; the gradients are there since the forward, and are scaled in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scores = x @ weight.T
        ctx.kept = (2 * scores @ weight, 2 * scores.T @ x)
        return scores.square().sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(own.mul_(gradients[0]) for own in ctx.kept)


def test_a_function_whose_backward_can_run_once() -> None:
    """Each task has a forward of its own, and a factor."""
    model, plain = TwoHeads(), TwoHeads()
    plain.load_state_dict(model.state_dict())

    def losses(own: TwoHeads) -> dict[str, Tensor]:
        head = own.heads[0].weight
        return {
            task: 0.5 * Fused.apply(own.trunk(torch.full((2, D), number + 1.0)), head)
            for number, task in enumerate(TASKS)
        }

    torch.autograd.backward([torch.stack(list(losses(plain).values())).sum()])
    attach(model, Sum()).backward(losses(model))
    assert_same_gradients(model, plain, 1e-5)


def test_gradients_are_tensors_of_their_own() -> None:
    """What optimizers have long done at the begin of a step, and no view allows."""
    model = TwoHeads()
    attach(model, Sum()).backward(distance(model(torch.randn(B, D), 0)), ROWS)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    versions = [gradient._version for gradient in gradients]
    gradients[0].detach_().zero_()
    assert [gradient._version for gradient in gradients[1:]] == versions[1:]
