"""Theorem 1 of the paper: GradVac converges on convex smooth losses if steps are short enough.

Two quadratic losses with one minimum. The gradient of their sum is Lipschitz with constant L, and
with a = sin(theta - gamma) / sin(gamma), theta and gamma the angles of the similarity and of its
target, steps t < 1/L and t < 2/(L(1 + a^2)) are short enough. Both conditions are sufficient, not
necessary; what they guard against is that vaccination lengthens the update by up to 1 + a.
"""

import math

import torch
from torch import nn

from gradvac import Aligner, GradVac, Sum
from gradvac.rules import Rule

TARGET = 0.9
CURVATURES = torch.tensor([[1.0, 0.1], [0.1, 1.0]], dtype=torch.float64)  # of the two losses
LIPSCHITZ = float(CURVATURES.sum(0).max())


def final_gap(rule: Rule, step_size: float, num_steps: int = 60) -> float:
    """Total loss (its minimum is 0) after gradient descent."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(model.weight)
    aligner = Aligner(model, ["one", "two"], rule, "whole_model", "per_task")
    for _ in range(num_steps):
        losses = 0.5 * (CURVATURES * model.weight.square()).sum(1)
        aligner.backward(losses, ["one", "two"])
        with torch.no_grad():
            model.weight -= step_size * model.weight.grad
        model.zero_grad()
    return 0.5 * (CURVATURES * model.weight.detach().square()).sum().item()


def largest_step(similarity: float) -> float:
    """The bound of the theorem, as a multiple of 1/L."""
    theta, gamma = math.acos(similarity), math.acos(TARGET)
    a = math.sin(theta - gamma) / math.sin(gamma)
    return min(1.0, 2.0 / (1.0 + a * a))


if __name__ == "__main__":
    similarity = torch.cosine_similarity(*CURVATURES, dim=0).item()  # at (1, 1), and ever after
    bound = largest_step(similarity)
    print(f"similarity {similarity:.2f}, target {TARGET}: steps below {bound:.2f}/L are safe\n")
    print(f"{'step * L':>8}  {'within bound':>12}  {'gap, plain sum':>14}  {'gap, GradVac':>12}")
    for multiple in (0.1, 0.2, 0.45, 0.6, 0.8, 1.5, 2.5):
        gaps = (final_gap(r, multiple / LIPSCHITZ) for r in (Sum(), GradVac(target=TARGET)))
        plain, vaccinated = (f"{gap:.1e}" if gap < 1.0 else "diverged" for gap in gaps)
        within = "yes" if multiple < bound else "no"
        print(f"{multiple:8}  {within:>12}  {plain:>14}  {vaccinated:>12}")
