"""The learning rate by step, clipping, and steps that skip themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradvac.lab.training.optimizer import OptimizerConfig, clip, step_unless


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    config = OptimizerConfig(lr=0.1, warmup_steps=4)
    found = [config.lr_at(step, max_steps=100) for step in range(4)]
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1])


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("inverse_sqrt", 15, 0.05),  # step 16 of 4 warm-up steps: half the peak
        ("constant", 99, 0.1),
        ("linear", 4, 0.1),
        ("linear", 52, 0.05),  # half of the way from 4 to 100
        ("linear", 100, 0.0),
        ("cosine", 4, 0.1),
        ("cosine", 28, 0.1 * (2 + 2**0.5) / 4),  # a quarter of the way: (1 + cos 45°) / 2
        ("cosine", 52, 0.05),
        ("cosine", 100, 0.0),
        ("wsd", 80, 0.1),  # stable until a fifth of the 100 steps is left
        ("wsd", 81, 0.095),
        ("wsd", 90, 0.05),
        ("wsd", 100, 0.0),
    ],
)
def test_after_warm_up(schedule: Any, step: int, expected: float) -> None:
    config = OptimizerConfig(lr=0.1, warmup_steps=4, schedule=schedule)
    assert config.lr_at(step, max_steps=100) == pytest.approx(expected)


def test_a_decay_that_no_schedule_has_is_refused() -> None:
    half = OptimizerConfig(lr=0.1, warmup_steps=80, schedule="wsd", decay_share=0.5)
    assert half.lr_at(90, max_steps=100) == pytest.approx(0.05)  # never before the end of warm-up
    with pytest.raises(ValueError, match=r'decay_share.*"wsd"'):
        OptimizerConfig(decay_share=0.5)


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "linear", "cosine", "wsd", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(schedule: Any) -> None:
    config = OptimizerConfig(lr=0.1, warmup_steps=0, schedule=schedule)
    assert config.lr_at(0, max_steps=10) == pytest.approx(0.1)


def test_weight_decay_is_of_matrices() -> None:
    optimizer = OptimizerConfig(weight_decay=0.1).build(nn.Linear(2, 3))
    decays = {p.dim(): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    groups = OptimizerConfig().build(model).param_groups
    assert [p.shape for g in groups for p in g["params"]] == [model.weight.shape]


def test_clip_returns_the_norm_before_and_bounds_it_after() -> None:
    model = nn.Linear(1, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 1), 3.0), torch.full((2,), 4.0)
    assert float(clip(model, 0.0)) == pytest.approx(50**0.5)
    assert float(model.weight.grad[0]) == 3.0  # 0: measured, not clipped
    assert float(clip(model, 1.0)) == pytest.approx(50**0.5)
    assert float(clip(model, 1.0)) == pytest.approx(1.0, abs=1e-5)


def test_bad_step_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    config = OptimizerConfig(weight_decay=0.1)
    optimizer = config.build(model)

    def step(bad: bool) -> None:
        fill = torch.nan if bad else 1.0
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, fill)
        step_unless(optimizer, torch.tensor(bad))

    step(bad=True)  # also the very first one
    step(bad=False)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(bad=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for number, moments in optimizer.state_dict()["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, state["state"][number][name]), name
    step(bad=False)
    assert not torch.equal(model.weight, weights["weight"])

    reference = nn.Linear(3, 2)
    torch.manual_seed(0)
    reference.reset_parameters()
    plain = torch.optim.AdamW(
        [{"params": [reference.weight]}, {"params": [reference.bias], "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=0.1,
    )
    for _ in range(2):  # the good steps alone
        for parameter in reference.parameters():
            parameter.grad = torch.ones_like(parameter)
        plain.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
