"""Overflow under a GradScaler: the step is skipped, and the rule learns nothing from it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradvac import Aligner, GradNorm, GradVac, PCGrad, Sum
from gradvac.rules import Rule

from ..rules.steps import assert_same_state
from .problems import ENGINES, Translator, draw_batch

TASKS = ["fr", "hi", "tr"]
RULES: dict[str, Callable[[], Rule]] = {
    "gradvac": lambda: GradVac(beta=0.2),
    "pcgrad": lambda: PCGrad(),
    "gradnorm": lambda: GradNorm(),
    "sum": lambda: Sum(),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("granularity", ["whole_model", "all_layer"])
@pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
def test_overflow_steps_leave_no_trace(
    engine: str, granularity: str, make: Callable[[], Rule]
) -> None:
    """A run with overflows in between equals one without them."""
    runs = []
    for overflows in (False, True):
        model = Translator().float()
        aligner = Aligner(model, TASKS, make(), granularity, engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        generator = torch.Generator().manual_seed(0)
        for number in range(8):
            batch = draw_batch(generator, TASKS)
            if overflows and number in (0, 4):
                before, scale = aligner.state_dict(), scaler.get_scale()
                losses = model(batch.source, batch.words)
                losses = losses * torch.where(torch.arange(len(losses)) == 3, torch.inf, 1.0)
                aligner.backward(scaler.scale(losses), batch.tasks)
                found = torch.cat([p.grad.flatten() for p in model.parameters()])
                assert not found.isfinite().all()
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == scale / 2
                scaler.update(scale)  # the two runs differ by the overflow alone
                optimizer.zero_grad()
                assert_same_state(aligner.state_dict(), before)
            aligner.backward(scaler.scale(model(batch.source, batch.words)), batch.tasks)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        runs.append((model.state_dict(), aligner.state_dict()))
    # Sums on a CPU round by where in memory their terms lie, which the overflows may move.
    assert_same_state(dict(runs[1][0]), dict(runs[0][0]), rtol=1e-6)
    assert_same_state(runs[1][1], runs[0][1], rtol=1e-12)  # in float64


def test_scaled_losses_give_the_same_weights() -> None:
    weights = []
    for scale in (1.0, 65536.0):
        model = Translator()
        aligner = Aligner(model, TASKS, GradVac(target=0.3), engine="per_task")
        batch = draw_batch(torch.Generator().manual_seed(0), TASKS)
        alignment = aligner.backward(model(batch.source, batch.words) * scale, batch.tasks)
        weights.append(alignment.weights)
    torch.testing.assert_close(weights[1], weights[0])


class _Overflow(torch.autograd.Function):
    """Zero, with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return (gradients[0] * torch.inf).expand(ctx.shape)


def test_one_component_overflows() -> None:
    """State of the other components must not move either; their values stay finite."""
    model = Translator()
    aligner = Aligner(model, TASKS, GradVac(beta=0.5), "all_layer", "per_task")
    generator = torch.Generator().manual_seed(0)
    batch = draw_batch(generator, TASKS)
    aligner.backward(model(batch.source, batch.words), batch.tasks)
    before = aligner.state_dict()
    assert before["step"] == 1
    assert before["target"].abs().max() > 0

    model.zero_grad()
    handle = model.decoder[1].linear.register_forward_hook(
        lambda module, _, output: output + _Overflow.apply(module.weight)
    )
    alignment = aligner.backward(model(batch.source, batch.words), batch.tasks)
    handle.remove()
    assert_same_state(aligner.state_dict(), before)
    position = alignment.components.index("decoder.1")
    finite = alignment.gram.isfinite().flatten(1).all(1)
    assert finite.tolist() == [k != position for k in range(len(alignment.components))]
    assert not model.decoder[1].linear.weight.grad.isfinite().any()
    assert model.encoder[0].linear.weight.grad.isfinite().all()
