"""Mixtures by gradients: what is read off a step, and which way shares move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gradvac import Aligner, Sum
from gradvac.utils.plugins import import_plugin

mixtures = import_plugin("studies/mixtures.py", "mixtures")
TASKS = ["p", "q"]


def test_estimates_are_those_of_the_mean_losses() -> None:
    """Both halves have the same rows, so that there is no noise, and all is exact."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(2, 4, 3).double(), torch.randn(2, 4, 1).double()
    dev = torch.randn(2, 5, 3).double()
    names = mixtures.parts_of(TASKS)
    aligner = Aligner(model, names, Sum(weights=dict.fromkeys(names[2::3], 0.0)), engine="per_task")
    losses, labels = [], []
    for task in range(2):
        own = (model(x[task]) - y[task]).square().squeeze(1)
        losses += [own, own, model(dev[task]).square().squeeze(1)]
        labels += [3 * task] * 4 + [3 * task + 1] * 4 + [3 * task + 2] * 5
    alignment = aligner.backward(torch.cat(losses) / 7, torch.tensor(labels))
    seen = mixtures.estimates(alignment, torch.tensor([8 / 7, 8 / 7]), torch.tensor([5 / 7, 5 / 7]))

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([value.flatten() for value in found])

    means = [gradient((model(x[k]) - y[k]).square().mean()) for k in range(2)]
    devs = [gradient(model(dev[k]).square().mean()) for k in range(2)]
    assert seen.squared.tolist() == pytest.approx([float(g @ g) for g in means], rel=1e-5)
    assert seen.variance.tolist() == pytest.approx([0, 0], abs=1e-5)
    expected = [[float(d @ g) for g in means] for d in devs]
    assert np.allclose(seen.to_dev.numpy(), expected, rtol=1e-4)


def seen(
    squared: tuple[float, float] = (1.0, 1.0),
    variance: tuple[float, float] = (0.0, 0.0),
    to_dev: tuple[float, float] = (0.0, 0.0),
    *,
    step: int = 1,
    losses: tuple[float, float] = (1.0, 1.0),
) -> object:
    found = mixtures.Estimates(
        torch.tensor(squared), torch.tensor(variance), torch.tensor([to_dev, (0.0, 0.0)])
    )
    return mixtures.Seen(step, found, dict(zip(TASKS, losses, strict=True)))


def test_shares_move_as_published() -> None:
    pike = mixtures.Pike(TASKS, signal=1.0, noise=1.0, batch=4)
    pike.learn(seen((2.0, 1.0)))
    assert pike.shares["p"] / pike.shares["q"] == pytest.approx(
        (0.99 * np.e / (1 + np.e) + 0.005) / (0.99 / (1 + np.e) + 0.005)
    )
    noisy = mixtures.Pike(TASKS, signal=1.0, noise=1.0, batch=4)
    noisy.learn(seen((2.0, 1.0), (16.0, 0.0)))
    assert noisy.shares["p"] < noisy.shares["q"]
    doge = mixtures.Doge(TASKS, rate=1.0)
    doge.learn(seen((9.0, 1.0), to_dev=(0.1, 0.9)))
    assert doge.shares["q"] > doge.shares["p"]
    ado = mixtures.Ado({"p": 10, "q": 10})
    for step in range(1, 20):
        ado.learn(seen(step=step, losses=(1 + step**-0.05, 4 * step**-0.9)))
    assert ado.shares["q"] > ado.shares["p"]  # it still falls
    for mixture in (pike, noisy, doge, ado):
        assert sum(mixture.shares.values()) == pytest.approx(1)


def test_the_toy_trains() -> None:
    untrained = mixtures.train_toy(mixtures.Fixed(mixtures.SIZES, 2.0), 0, num_steps=0)
    short = mixtures.train_toy(mixtures.Doge(list(mixtures.SIZES), rate=0.1), 0, num_steps=60)
    assert short < untrained
