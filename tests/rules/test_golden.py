"""Weights worked out by hand."""

import math

import pytest
import torch

from gradvac import MGDA, GradNorm, GradVac, PCGrad, Sum
from gradvac.rules import Rule

from .steps import bound, gram_of, step, weights_of

OBTUSE = [[1.0, 0.0], [-1.0, 1.0]]  # cosine -1 / sqrt(2)
ACUTE = [[1.0, 0.0], [1.0, 1.0]]  # cosine 1 / sqrt(2)
THREE = [[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 1.0]]  # products -1, -1, 0

# With cot the cotangent of the target angle, Eq. 3 is a = |g_i| (sin(phi) cot - cos(phi)) / |g_j|.
COT_HALF = 1 / math.sqrt(3)  # target 0.5, 60 degrees
COT_HIGH = 4 / 3  # target 0.8

GOLDEN: list[tuple[Rule, list[list[float]], list[float]]] = [
    (Sum(), OBTUSE, [1, 1]),
    (Sum(weights={"b": 0.25}), OBTUSE, [1, 0.25]),
    (PCGrad(), OBTUSE, [1 + 1, 1 + 1 / 2]),
    (PCGrad(vaccinated=["a"]), OBTUSE, [1, 1 + 1 / 2]),
    (PCGrad(vaccinated=["b"]), OBTUSE, [1 + 1, 1]),
    (PCGrad(), ACUTE, [1, 1]),
    (GradVac(), OBTUSE, [2, 1.5]),  # targets start at 0
    (GradVac(target=0.5), OBTUSE, [1 + (COT_HALF + 1), 1 + (COT_HALF + 1) / 2]),
    (GradVac(target=0.5), ACUTE, [1, 1]),
    (GradVac(target=0.8), ACUTE, [1 + (COT_HIGH - 1), 1 + (COT_HIGH - 1) / 2]),
    # a becomes (1/2, 1/2), which has length 1/sqrt(2); b becomes (0, 1), shorter by sqrt(2) too
    (
        GradVac(target=0, preserve_norm=True),
        OBTUSE,
        [math.sqrt(2) + math.sqrt(2), math.sqrt(2) + math.sqrt(2) / 2],
    ),
    # a meets b: (1/2, 1/2, 0), then c: + c/3. b meets a: (0, 1, 0), then c: + c/3.
    # c meets a: (0, -1, 1), then b: + b/2.
    (PCGrad(order="fixed"), THREE, [1 + 1 + 1, 1 / 2 + 1 + 1 / 2, 1 / 3 + 1 / 3 + 1]),
    # The foot of the perpendicular from the origin is (1/5, 2/5).
    (MGDA(), OBTUSE, [3 / 5, 2 / 5]),
    (MGDA(), ACUTE, [1, 0]),
    # Orthogonal gradients share by the inverse of their squared lengths.
    (MGDA(), [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]], [36 / 49, 9 / 49, 4 / 49]),
    (MGDA(normalize="l2"), [[1.0, 0.0], [0.0, 2.0]], [1 / 2, 1 / 2]),
    (GradNorm(), OBTUSE, [1, 1]),  # a step uses the weights it starts with
]


@pytest.mark.parametrize(("rule", "gradients", "weights"), GOLDEN, ids=lambda value: str(value))
def test_weights(rule: Rule, gradients: list[list[float]], weights: list[float]) -> None:
    found = weights_of(rule, torch.tensor(gradients, dtype=torch.float64))
    torch.testing.assert_close(
        found, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-9
    )


def test_moving_average() -> None:
    """Eq. 4 by hand: two steps with cosine -1/sqrt(2), then one with 1/sqrt(2)."""
    rule = bound(GradVac(beta=0.1), 2)
    low = -1 / math.sqrt(2)
    expected = 0.0
    for gradients, phi in ((OBTUSE, low), (OBTUSE, low), (ACUTE, -low)):
        weighing = step(rule, gram_of(torch.tensor(gradients)))
        assert weighing.target[0, 0, 1].item() == pytest.approx(expected, abs=1e-12)
        assert weighing.active[0, 0, 1].item() == (phi < expected)
        expected = 0.9 * expected + 0.1 * phi
    target = rule.state_dict()["target"]
    assert target[0, 0, 1].item() == pytest.approx(expected, abs=1e-12)
    assert target[0, 1, 0].item() == pytest.approx(expected, abs=1e-12)


def test_targets_are_directional() -> None:
    """b is not vaccinated, so nothing is learned about (b, a)."""
    rule = bound(GradVac(beta=0.1, vaccinated=["a"]), 2)
    step(rule, gram_of(torch.tensor(OBTUSE)))
    target = rule.state_dict()["target"][0]
    assert target[0, 1].item() == pytest.approx(-0.1 / math.sqrt(2))
    assert target[1, 0].item() == 0.0
