"""Backwards that are right the first time alone: refused by name, whichever engine runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, Sum
from gradvac.engine import probe

from .parity import TASKS, UNSORTED, assert_same_gradients, plain_backward
from .zoo._case import B, D, distance

ENGINES = ["per_task", "one_backward", "auto"]
ROWS = torch.tensor(UNSORTED)


class WritesOver(torch.autograd.Function):
    """A product whose backward spoils what the weight's gradient is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone(), weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = gradients[0].T @ x
        x.data.zero_()
        return gradients[0] @ weight, of_weight


class Counts(torch.autograd.Function):
    """A product whose backward depends on how often it ran."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sign = 1
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient, ctx.sign = ctx.sign * gradients[0], -ctx.sign
        return gradient @ weight, gradient.T @ x


class Model(nn.Module):
    """A product of one's own before, or behind, a linear layer."""

    def __init__(self, product: Callable[..., Tensor], *, is_first: bool = False) -> None:
        super().__init__()
        self.product, self.is_first = product, is_first
        self.linear, self.weight = nn.Linear(D, D), nn.Parameter(torch.randn(D, D))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            result: Tensor = self.linear(self.product(x, self.weight).tanh())
            return result
        return self.product(self.linear(x).tanh(), self.weight).tanh()


def step(model: Model, engine: str, **options: Any) -> Aligner:
    aligner = Aligner(model, TASKS, Sum(), engine=engine, **options)
    aligner.backward(distance(model(torch.randn(B, D, dtype=torch.float64))), ROWS)
    return aligner


@pytest.mark.filterwarnings("ignore:.*(no fast path|continues with per_task)")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("function", [WritesOver, Counts])
def test_functions_that_are_right_once(function: Any, is_first: bool, engine: str) -> None:
    model = Model(function.apply, is_first=is_first)
    why = "add up|when it runs again" if engine == "one_backward" else rf"{function.__name__}Back"
    with pytest.raises(ValueError, match=why) as raised:
        step(model, engine, check=False)
    assert "weight" in str(raised.value) or engine == "one_backward"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("engine", ["per_task", "auto"])
@pytest.mark.filterwarnings("ignore:.*(no fast path|continues with per_task)")
def test_each_task_may_have_a_forward_of_its_own(engine: str) -> None:
    """What the refusal advises."""
    model = Model(Counts.apply)
    x = torch.randn(B, D, dtype=torch.float64)
    plain_backward(model(x).square().sum(1))
    plain = Model(Counts.apply)
    plain.load_state_dict(model.state_dict())
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        mine.grad, theirs.grad = theirs.grad, None
    losses = {task: model(x[n == ROWS]).square().sum() for n, task in enumerate(TASKS)}
    Aligner(model, TASKS, Sum(), engine=engine).backward(losses)
    assert_same_gradients(model, plain, 1e-9)


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.1, 0.3)


def noisy(gradient: Tensor) -> Tensor:
    return gradient * (1 + 0.1 * torch.randn_like(gradient))


@pytest.mark.filterwarnings("ignore:.*(no fast path|continues with per_task)")
@pytest.mark.parametrize("engine", ["per_task", "auto"])
@pytest.mark.parametrize("hook", [clipped, noisy])
def test_hooks_that_clip_or_draw_are_left_to_per_task(
    hook: Callable[[Tensor], Tensor], engine: str
) -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        x = x * 1.0
        x.register_hook(hook)
        return x @ weight.T

    assert step(Model(product), engine).engine == "per_task"


@pytest.mark.filterwarnings("ignore:.*(no fast path|continues with per_task)")
def test_a_hook_between_a_parameter_and_its_use() -> None:
    """It does not run when a node is called by itself."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        masked = weight * 1.0
        masked.register_hook(lambda gradient: gradient * (weight > 0))
        return x @ masked.T

    model = Model(product)
    with pytest.raises(ValueError, match=r"a hook changes the gradient .* weight"):
        step(model, "one_backward")
    plain = Model(product)
    plain.load_state_dict(model.state_dict())
    aligner = Aligner(model, TASKS, Sum(), engine="auto")
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        x = torch.randn(B, D, dtype=torch.float64)
        aligner.backward(distance(model(x)), ROWS)
        plain_backward(distance(plain(x)))
        assert_same_gradients(model, plain, 1e-9)
        assert aligner.engine == "per_task"


def test_a_hook_that_clips_only_what_is_large() -> None:
    """No gradient of this batch shows it."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        clipped = weight * 1.0
        clipped.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))
        return x @ clipped.T

    with pytest.raises(ValueError, match=r"a hook changes the gradient .* weight"):
        step(Model(product), "one_backward")


def test_a_hook_that_only_looks_on() -> None:
    seen: list[Tensor] = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        watched = weight * 1.0
        watched.register_hook(seen.append)
        return x @ watched.T

    assert step(Model(product), "auto").engine == "one_backward"


def test_hooks_are_looked_for_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes for every node that is made of parameters alone."""
    monkeypatch.setattr(probe, "has_changing_hook", lambda *_: pytest.fail("there is none"))
    model = Model(lambda x, weight: x @ (weight * 1.0).T)
    assert step(model, "one_backward").engine == "one_backward"


@pytest.mark.parametrize("engine", ["per_task", "one_backward"])
def test_verifying_leaves_activations_and_random_numbers_alone(engine: str) -> None:
    kept: list[Tensor] = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        kept.append(x @ weight.T)
        kept[-1].retain_grad()
        return kept[-1].tanh()

    model = Model(product)
    aligner = Aligner(model, TASKS, Sum(), engine=engine)
    x = torch.randn(B, D, dtype=torch.float64)
    before = torch.get_rng_state()
    for _ in range(3):
        aligner.backward(distance(model(x)), ROWS)
    assert torch.equal(torch.get_rng_state(), before)
    for looked_at in kept[:2]:
        torch.testing.assert_close(looked_at.grad, kept[2].grad, rtol=1e-9, atol=1e-12)
