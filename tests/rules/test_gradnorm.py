"""GradNorm against a transcription of its algorithm on weights, losses and norms."""

# T tasks

import pytest
import torch
from torch import Tensor, nn

from gradvac import GradNorm

from .steps import assert_same_state, bound, gram_of, step


class Transcription:
    """Algorithm 1 of Chen et al. (2018), with torch's own Adam on the weights."""

    def __init__(self, num_tasks: int, alpha: float, lr: float) -> None:
        self.weights = nn.Parameter(torch.ones(num_tasks, dtype=torch.float64))
        self.optimizer = torch.optim.Adam([self.weights], lr=lr)
        self.alpha = alpha
        self.first_losses: Tensor | None = None

    def step(self, gradients: Tensor, losses: Tensor) -> Tensor:
        """The weights of this step, from the gradients of the shared layer `[T, P]`."""
        if self.first_losses is None:
            self.first_losses = losses.clone()
        used = self.weights.detach().clone()
        norms = (self.weights[:, None] * gradients).norm(dim=1)  # G_W^(i)
        inverse_rate = losses / self.first_losses
        relative = inverse_rate / inverse_rate.mean()
        goal = (norms.mean() * relative**self.alpha).detach()  # held constant
        self.optimizer.zero_grad()
        (norms - goal).abs().sum().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.weights.mul_(len(self.weights) / self.weights.sum())
        return used


@pytest.mark.parametrize("num_tasks", [2, 4, 7])
@pytest.mark.parametrize(("alpha", "lr"), [(1.5, 0.025), (0.12, 0.01), (0.0, 0.03)])
def test_follows_the_paper(num_tasks: int, alpha: float, lr: float) -> None:
    generator = torch.Generator().manual_seed(num_tasks)
    rule = bound(GradNorm(alpha=alpha, lr=lr), num_tasks)
    reference = Transcription(num_tasks, alpha, lr)
    losses = torch.rand(num_tasks, generator=generator, dtype=torch.float64) + 1.0
    lengths = torch.logspace(-0.5, 0.5, num_tasks, dtype=torch.float64)[:, None]
    for _ in range(60):
        gradients = torch.randn(num_tasks, 20, generator=generator, dtype=torch.float64) * lengths
        expected = reference.step(gradients, losses)
        found = step(rule, gram_of(gradients), losses=losses).weights[0]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        speed = torch.linspace(0.97, 0.995, num_tasks, dtype=torch.float64)
        losses = losses * speed
    assert (found - 1).abs().max() > 0.1  # it did learn


def test_slow_tasks_gain_and_long_gradients_lose() -> None:
    gradients = torch.eye(2, dtype=torch.float64)
    rule = bound(GradNorm(), 2)
    for seconds in range(40):
        losses = torch.tensor([1.0, 0.9**seconds], dtype=torch.float64)  # b trains faster
        weights = step(rule, gram_of(gradients), losses=losses).weights[0]
    assert weights[0] > 1.2 > 0.8 > weights[1]

    rule = bound(GradNorm(), 2)
    for _ in range(40):
        gradients = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
        weights = step(rule, gram_of(gradients)).weights[0]
    assert weights[0] > 1.2 > 0.8 > weights[1]


def test_the_named_component_decides() -> None:
    generator = torch.Generator().manual_seed(0)
    whole, part = bound(GradNorm(component="1"), 3, 3), bound(GradNorm(), 3, 1)
    for _ in range(10):
        gradients = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64)
        found = step(whole, gram_of(gradients)).weights
        expected = step(part, gram_of(gradients[1])).weights
        assert torch.equal(found, expected.expand(3, -1))  # one weight per task, everywhere


def test_the_last_component_all_tasks_reach_is_the_default() -> None:
    """Components 2 and 3 are heads of single tasks."""
    generator = torch.Generator().manual_seed(0)
    whole, part = bound(GradNorm(), 2, 4), bound(GradNorm(), 2, 1)
    for _ in range(10):
        gradients = torch.randn(4, 2, 6, generator=generator, dtype=torch.float64)
        gradients[2, 0] = gradients[3, 1] = 0.0
        found = step(whole, gram_of(gradients)).weights
        assert torch.equal(found[0], step(part, gram_of(gradients[1])).weights[0])


def test_absent_tasks() -> None:
    """Weights always sum to the number of tasks; present ones keep their own optimizer state."""
    generator = torch.Generator().manual_seed(0)
    rule = bound(GradNorm(), 4)
    for seed in range(30):
        present = [[0, 1, 2, 3], [0, 2], [3], [1, 2, 3]][seed % 4]
        gradients = torch.randn(len(present), 6, generator=generator, dtype=torch.float64)
        losses = torch.rand(len(present), generator=generator, dtype=torch.float64) + 0.5
        step(rule, gram_of(gradients), present=present, losses=losses)
        state = rule.state_dict()
        assert state["weights"].sum().item() == pytest.approx(4.0)
        assert (state["weights"] > 0).all()
    assert state["steps"].tolist() == [
        16.0,
        15.0,
        23.0,
        15.0,
    ]  # a step with one task teaches nothing


def test_a_task_without_gradient_counts_as_absent() -> None:
    """Tasks that live on the device are all said to be present, and some have no rows."""
    generator = torch.Generator().manual_seed(0)
    listed, shown = bound(GradNorm(), 4, 2), bound(GradNorm(), 4, 2)
    for seed in range(20):
        present = [[0, 1, 2, 3], [0, 2], [3], [1, 2, 3]][seed % 4]
        gradients = torch.randn(2, len(present), 6, generator=generator, dtype=torch.float64)
        losses = torch.rand(len(present), generator=generator, dtype=torch.float64) + 0.5
        step(listed, gram_of(gradients), present=present, losses=losses)
        every, all_losses = torch.zeros(2, 4, 6).double(), torch.zeros(4).double()
        every[:, present], all_losses[present] = gradients, losses
        step(shown, gram_of(every), losses=all_losses)
        assert_same_state(shown.state_dict(), listed.state_dict(), rtol=1e-9)
    assert (listed.state_dict()["weights"] - 1).abs().max() > 0.05


def test_scaled_losses_teach_the_same() -> None:
    """A GradScaler multiplies losses and gradients alike, and changes its factor on the way."""
    plain, scaled = bound(GradNorm(), 3), bound(GradNorm(), 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradients = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        losses = torch.rand(3, generator=generator, dtype=torch.float64) + 0.5
        expected = step(plain, gram_of(gradients), losses=losses).weights
        found = step(scaled, gram_of(gradients * 65536), losses=losses * 65536).weights
        torch.testing.assert_close(found, expected)
