"""Theorem 1: on convex L-smooth losses GradVac converges if t < 1/L and t < 2/(L(1 + a^2))."""

# P parameters, N equations

import math
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, GradVac

EXAMPLE = Path(__file__).parents[2] / "examples" / "theorem_1.py"
TASKS = ["one", "two"]


@dataclass(frozen=True)
class LeastSquares:
    """Two losses 1/2 ||A x - b||^2; the Hessian of their sum is known."""

    matrices: tuple[Tensor, Tensor]  # [N, P] each
    solutions: tuple[Tensor, Tensor]  # [P] each
    start: Tensor  # [P]

    def losses(self, x: Tensor) -> Tensor:
        pairs = zip(self.matrices, self.solutions, strict=True)
        return torch.stack([0.5 * (A @ (x - c)).square().sum() for A, c in pairs])

    @property
    def lipschitz(self) -> float:
        hessian = sum(A.T @ A for A in self.matrices)
        return float(torch.linalg.eigvalsh(hessian).max())

    @property
    def smallest(self) -> float:
        """The smallest total loss."""
        whole = torch.cat(self.matrices)
        goal = torch.cat([A @ c for A, c in zip(self.matrices, self.solutions, strict=True)])
        best = torch.linalg.lstsq(whole, goal[:, None], driver="gelsd").solution[:, 0]
        return float(self.losses(best).sum())


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def agreeing(seed: int, *, rank: int = 5) -> LeastSquares:
    """One minimum, and curvatures along the same axes: then phi > 0 everywhere.

    With a rank below 5 the losses are convex, but not strongly, and have many minima.
    """
    axes = torch.linalg.qr(draw(seed, 5, 5))[0][:rank]
    curvatures = torch.linspace(1.0, 10.0, rank, dtype=torch.float64).sqrt()[:, None]
    solution = draw(seed + 1, 5)
    matrices = (curvatures * axes, 0.6 * curvatures.flip(0) * axes)
    return LeastSquares(matrices, (solution, solution), draw(seed + 2, 5))


def conflicting(seed: int) -> LeastSquares:
    """Minima far apart: the gradients disagree between them."""
    problem, solution = agreeing(seed), draw(seed + 7, 5)
    return LeastSquares(problem.matrices, (solution, -solution), 6 * problem.start)


@dataclass(frozen=True)
class Step:
    before: float
    after: float
    phi: float
    a: float
    squared_norm: float  # of the plain gradient


class Point(nn.Module):
    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


def descend(
    problem: LeastSquares, *, target: float, step_size: float, num_steps: int
) -> Iterator[Step]:
    """Gradient descent on the aligner's updates."""
    model = Point(problem.start)
    aligner = Aligner(model, TASKS, GradVac(target=target), "whole_model", "per_task")
    gamma = math.acos(target)
    for _ in range(num_steps):
        losses = problem.losses(model.x)
        alignment = aligner.backward(losses, TASKS)
        plain = torch.autograd.grad(problem.losses(model.x).sum(), model.x)[0]
        with torch.no_grad():
            model.x -= step_size * model.x.grad
        model.zero_grad()
        phi = alignment.similarity[0, 0, 1].item()
        a = max(0.0, math.sin(math.acos(phi) - gamma) / math.sin(gamma))
        before, after = losses.sum().item(), problem.losses(model.x.detach()).sum().item()
        yield Step(before, after, phi, a, plain.square().sum().item())


def safe_step(problem: LeastSquares, target: float) -> float:
    """Below both bounds for every phi > 0: then a is at most cot(gamma)."""
    largest_a = target / math.sqrt(1 - target**2)
    return 0.95 * min(1.0, 2.0 / (1.0 + largest_a**2)) / problem.lipschitz


@pytest.mark.parametrize("target", [0.5, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("rank", [5, 3], ids=["one minimum", "many minima"])
def test_short_steps_descend_to_the_minimum(rank: int, target: float) -> None:
    altered = 0
    for seed in range(3):
        problem = agreeing(seed, rank=rank)
        t, L = safe_step(problem, target), problem.lipschitz
        gaps = []
        for step in descend(problem, target=target, step_size=t, num_steps=2000):
            assert step.phi > 0
            # The last line of the proof: how much the loss must fall.
            promised = (t - (1 + step.a**2) / 2 * L * t**2) * step.squared_norm
            assert promised > 0
            assert step.after <= step.before - promised * (1 - 1e-6)
            gaps.append(step.after - problem.smallest)
            altered += step.a > 0
            if gaps[-1] < 1e-10 * gaps[0]:
                break
        assert gaps[-1] < 1e-10 * gaps[0]
    assert altered > 0


@pytest.mark.parametrize("target", [0.5, 0.9])
def test_every_agreeing_step_descends_even_if_minima_differ(target: float) -> None:
    seen = 0
    for seed in range(4):
        problem = conflicting(seed)
        t, L = safe_step(problem, target), problem.lipschitz
        for step in descend(problem, target=target, step_size=t, num_steps=60):
            if step.phi > 0:
                seen += 1
                promised = (t - (1 + step.a**2) / 2 * L * t**2) * step.squared_norm
                assert step.after <= step.before - promised * (1 - 1e-6)
    assert seen > 4


@pytest.mark.parametrize("target", [0.1, 0.5, 0.9])
def test_steps_well_above_the_bound_diverge(target: float) -> None:
    for seed in range(3):
        problem = agreeing(seed)
        t = 2.2 / problem.lipschitz
        steps = list(descend(problem, target=target, step_size=t, num_steps=60))
        assert steps[-1].after > 10 * steps[0].before


def test_the_second_bound_is_needed() -> None:
    """t < 1/L alone does not do: two nearly orthogonal gradients, and a high target."""
    matrices = tuple(
        torch.diag(torch.tensor(c, dtype=torch.float64).sqrt()) for c in ([1.0, 0.1], [0.1, 1.0])
    )
    zero = torch.zeros(2, dtype=torch.float64)
    problem = LeastSquares(matrices, (zero, zero), torch.ones(2, dtype=torch.float64))
    t = 0.95 / problem.lipschitz
    steps = list(descend(problem, target=0.9, step_size=t, num_steps=20))
    assert all(step.phi > 0 for step in steps)
    assert 2 / (problem.lipschitz * (1 + steps[0].a ** 2)) < t < 1 / problem.lipschitz
    assert steps[-1].after > 100 * steps[0].before

    t = 0.95 * 2 / (problem.lipschitz * (1 + steps[0].a ** 2))
    steps = list(descend(problem, target=0.9, step_size=t, num_steps=20))
    assert steps[-1].after < 1e-9 * steps[0].before


def test_example_agrees_with_the_theorem(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert len(lines) == 7
    for _, within, _, vaccinated in lines:
        if within == "yes":
            assert float(vaccinated) < 1e-12
    assert [line[-1] for line in lines[-3:]] == ["diverged"] * 3
