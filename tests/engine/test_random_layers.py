"""Dropout and other draws: task gradients of the forward that ran, not of another draw."""

# T tasks

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, GradVac

from .parity import ONE_ABSENT, TASKS, UNSORTED, assert_same_gradients, attach, plain_backward
from .zoo._case import B, Block, D, Model, S, V, distance, tokens_of


class Noisy(nn.Module):
    """A module without fast path that draws in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * torch.rand(1, dtype=x.dtype) + torch.randn_like(x)


def dropout_between_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.LayerNorm(D), nn.Linear(D, 3))


def attention() -> nn.Module:
    return Model(
        lambda m, x: m.block(m.attention(x, x, x)[0]),
        attention=nn.MultiheadAttention(D, 2, dropout=0.4, batch_first=True),
        block=Block(),
    )


def transformer() -> nn.Module:
    inner = nn.Transformer(D, 2, 1, 1, 12, dropout=0.3, batch_first=True)
    return Model(lambda m, x: m.inner(x, x), inner=inner)


def recurrent() -> nn.Module:
    lstm = nn.LSTM(D, D, num_layers=2, dropout=0.5, batch_first=True)
    return Model(lambda m, x: m.lstm(m.first(x))[0], first=nn.Linear(D, D), lstm=lstm)


def own_draw() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), Noisy(), Block())


def checkpointed() -> nn.Module:
    """The draw happens again when the checkpoint runs again, with the same generator state."""

    def run(m: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(m.inner, m.first(x), use_reentrant=False)
        return result

    inner = nn.Sequential(Block(), nn.Dropout(0.5), Noisy(), Block())
    return Model(run, first=nn.Linear(D, D), inner=inner)


MODELS = [dropout_between_layers, attention, transformer, recurrent, own_draw, checkpointed]


@pytest.mark.parametrize("granularity", ["all_layer", "whole_model"])
@pytest.mark.parametrize("factory", MODELS, ids=lambda f: f.__name__)
def test_task_gradients_are_those_of_the_forward(factory: Any, granularity: str) -> None:
    """Plain autograd of the very same losses, task by task."""
    model: nn.Module = factory().double()
    aligner = attach(model, GradVac(target=0.5), granularity=granularity, check=False)
    losses = distance(model(torch.randn(B, S, D, dtype=torch.float64)))
    tasks = torch.tensor(UNSORTED)
    parameters = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(losses[tasks == t].sum(), list(parameters.values()), retain_graph=True)
        for t in range(len(TASKS))
    ]
    alignment = aligner.backward(losses, tasks)
    for k, names in enumerate(aligner.components.values()):
        for name in names:
            stacked = torch.stack([row[list(parameters).index(name)] for row in rows])
            expected = torch.einsum("t,t...->...", alignment.weights[k], stacked)
            torch.testing.assert_close(parameters[name].grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("factory", MODELS, ids=lambda f: f.__name__)
def test_equals_per_task_with_the_same_draws(factory: Any, recompute: bool) -> None:
    """Attaching draws nothing more: with one seed, both engines see the same forward."""
    model: nn.Module = factory().double()
    reference = copy.deepcopy(model)
    per_task = Aligner(reference, TASKS, GradVac(beta=0.3), "whole_model", "per_task")
    aligner = attach(model, GradVac(beta=0.3), granularity="whole_model", recompute=recompute)
    x = torch.randn(B, S, D, dtype=torch.float64)
    for seed, tasks in enumerate((UNSORTED, ONE_ABSENT)):
        torch.manual_seed(seed)
        expected = distance(reference(x))
        torch.manual_seed(seed)
        found = distance(model(x))
        torch.testing.assert_close(found, expected)
        per_task.backward(expected, tasks)
        aligner.backward(found, tasks)
        assert_same_gradients(model, reference, 1e-9)


def test_plain_backward_with_dropout() -> None:
    model = attention().double()
    plain = copy.deepcopy(model)
    _aligner = attach(model)
    x = torch.randn(B, S, D, dtype=torch.float64)
    for each in (model, plain):
        torch.manual_seed(1)
        plain_backward(distance(each(x)))
    assert_same_gradients(model, plain, 1e-9)


def test_buffers_move_once_a_forward() -> None:
    """Power iteration, running averages: running a module again must not move them again."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))
    model = nn.Sequential(layer, nn.InstanceNorm1d(S, affine=True, track_running_stats=True))
    plain = copy.deepcopy(model)
    aligner = attach(model)
    x = torch.randn(B, S, D)
    for _ in range(2):
        aligner.backward(distance(model(x)), UNSORTED)
        plain(x)
    expected = dict(plain.named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


def test_dropout_of_a_table() -> None:
    """Rows of the table that were dropped get no gradient."""
    words = nn.Embedding(V, D)
    model = nn.Sequential(words, nn.Dropout1d(0.5), nn.Linear(D, 2)).double()
    aligner = attach(model, check=False)
    losses = distance(model(tokens_of(B, S)))
    (expected,) = torch.autograd.grad(losses.sum(), [words.weight], retain_graph=True)
    aligner.backward(losses, [0] * B)
    torch.testing.assert_close(words.weight.grad, expected)
