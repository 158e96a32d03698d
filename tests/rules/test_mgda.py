"""MGDA against a brute-force minimum and against TorchJD's solver."""

# K components, T tasks, P parameters

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor
from torchjd import aggregation as torchjd

from gradvac import MGDA
from gradvac.rules import mgda

from .steps import gram_of, weights_of


def brute_force(gram: np.ndarray) -> float:
    """The smallest w^T G w on the simplex: the best over all sets of tasks with positive weight.

    On each set the minimum without signs is a linear system; where its solution is positive it is
    a candidate, and the true minimum is among the candidates.
    """
    num_tasks = len(gram)
    best = np.inf
    for size in range(1, num_tasks + 1):
        for chosen in combinations(range(num_tasks), size):
            block = gram[np.ix_(chosen, chosen)]
            system = np.block([[block, np.ones((size, 1))], [np.ones((1, size)), np.zeros((1, 1))]])
            weights = np.linalg.lstsq(system, np.r_[np.zeros(size), 1.0], rcond=None)[0][:size]
            if weights.min() >= -1e-12:
                best = min(best, float(weights @ block @ weights))
    return best


def solve_exactly(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """Gauss-Jordan elimination in rational numbers; None if the matrix is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(len(rows)):
        pivot = next((r for r in range(column, len(rows)) if rows[r][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r, row in enumerate(rows):
            if r != column and row[column]:
                factor = row[column] / rows[column][column]
                rows[r] = [a - factor * b for a, b in zip(row, rows[column], strict=True)]
    return [row[-1] / row[n] for n, row in enumerate(rows)]


def shortest_exactly(gradients: list[list[Fraction]]) -> Fraction:
    """`brute_force` without rounding."""
    gram = [[sum(map(Fraction.__mul__, a, b), Fraction()) for b in gradients] for a in gradients]
    candidates = []
    for size in range(1, len(gram) + 1):
        for chosen in combinations(range(len(gram)), size):
            system = [[*(gram[i][j] for j in chosen), Fraction(1)] for i in chosen]
            system.append([*[Fraction(1)] * size, Fraction()])
            weights = solve_exactly(system, [*[Fraction()] * size, Fraction(1)])
            if weights is not None and min(weights[:size]) >= 0:
                candidates.append(-weights[size])  # the multiplier: w^T G w at the minimum
    return min(candidates)


@pytest.fixture(params=["faces", "newton"])
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way to the minimum, whatever the number of tasks."""
    monkeypatch.setattr(mgda, "_MOST_FACES", {"faces": 127, "newton": 0}[request.param])


def draw(num_tasks: int, size: int, seed: int) -> Tensor:
    """Gradients that agree somewhat, so that the minimum lies on faces as well as inside."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_tasks, size, generator=generator, dtype=torch.float64)
    lengths = torch.rand(num_tasks, 1, generator=generator, dtype=torch.float64) * 2 + 0.1
    return (noise + torch.randn(size, generator=generator, dtype=torch.float64)) * lengths


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("num_tasks", [2, 3, 4, 6])
@pytest.mark.parametrize("size", [2, 5, 20], ids=lambda size: f"{size} parameters")
def test_no_combination_is_shorter(num_tasks: int, size: int) -> None:
    for seed in range(6):
        gradients = draw(num_tasks, size, seed)
        weights = weights_of(MGDA(), gradients)
        assert (weights >= 0).all()
        assert weights.sum().item() == pytest.approx(1.0, abs=1e-12)
        found = float((weights @ gradients).square().sum())
        smallest = brute_force((gradients @ gradients.T).numpy())
        longest = float(gradients.square().sum(1).max())
        assert smallest - 1e-12 * longest <= found <= smallest + 1e-9 * longest


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("ratio", [1.0, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("num_tasks", [2, 3, 5])
def test_short_gradients_are_not_drowned_by_long_ones(num_tasks: int, ratio: float) -> None:
    """Against rational arithmetic, with lengths that differ by up to 12 orders of magnitude."""
    lengths = torch.logspace(0.0, float(np.log10(ratio)), num_tasks, dtype=torch.float64)
    for seed in range(4):
        order = torch.randperm(num_tasks, generator=torch.Generator().manual_seed(seed))
        gradients = draw(num_tasks, 6, seed) * lengths[order][:, None]
        assert squared_over_shortest(gradients) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("ratio", [1.0, 1e4, 1e8])
def test_nearly_opposite_gradients_leave_what_they_share(ratio: float) -> None:
    """Two long gradients cancel but for a little across, which shortens the third."""
    across = 1e-3
    gradients = torch.tensor(
        [[ratio, ratio * across, 0.0], [-ratio, ratio * across, 0.0], [0.0, -1.0, 1.0]],
        dtype=torch.float64,
    )
    assert squared_over_shortest(gradients) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("num_tasks", [5, 7, 8, 12, 25])
def test_dependent_gradients_that_cancel(num_tasks: int) -> None:
    """More tasks than numbers, lengths up to 1e8 apart, and 0 between the gradients."""
    lengths = torch.logspace(0.0, 8.0, num_tasks, dtype=torch.float64)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        gradients = torch.randn(num_tasks, 3, generator=generator, dtype=torch.float64)
        gradients[-1] = -gradients[:-1].sum(0)
        order = torch.randperm(num_tasks, generator=generator)
        gradients = gradients * lengths[order][:, None]
        update = weights_of(MGDA(), gradients) @ gradients
        assert update.norm() < 1e-6 * gradients.norm(dim=1).min()


def squared_over_shortest(gradients: Tensor) -> float:
    """||update||^2 of MGDA, divided by the smallest one there is; without rounding."""
    weights = [Fraction(w) for w in weights_of(MGDA(), gradients).tolist()]
    exact = [[Fraction(x) for x in row] for row in gradients.tolist()]
    update = [sum(map(Fraction.__mul__, weights, column)) for column in zip(*exact, strict=True)]
    return float(sum((x * x for x in update), Fraction()) / shortest_exactly(exact))


@pytest.mark.parametrize("num_tasks", [2, 5, 7, 8, 25, 100])
def test_duality_gap(num_tasks: int) -> None:
    """At the minimum w* every gradient has at least the length of the update along it."""
    gradients = draw(num_tasks, 60, seed=num_tasks)
    update = weights_of(MGDA(), gradients) @ gradients
    gap = update.square().sum() - (gradients @ update).min()
    assert gap <= 1e-6 * gradients.square().sum(1).max()


@pytest.mark.parametrize("num_tasks", [2, 3, 5, 8])
def test_agrees_with_torchjd(num_tasks: int) -> None:
    frank_wolfe = torchjd.MGDAWeighting(epsilon=1e-7, max_iters=5000)
    for seed in range(3):
        gradients = draw(num_tasks, 30, seed)
        expected = frank_wolfe(gradients @ gradients.T)
        torch.testing.assert_close(weights_of(MGDA(), gradients), expected, rtol=0, atol=2e-3)


def test_normalisations() -> None:
    """The shortest combination of gradients divided by norm, loss, or both."""
    gradients, losses = draw(4, 9, seed=3), torch.tensor([0.5, 2.0, 1.0, 4.0], dtype=torch.float64)
    norms = gradients.norm(dim=1)
    divisors = {
        "none": torch.ones_like(norms),
        "l2": norms,
        "loss": losses,
        "loss+": losses * norms,
    }
    seen = []
    for name, divisor in divisors.items():
        found = weights_of(MGDA(normalize=name), gradients, losses=losses)
        expected = weights_of(MGDA(), gradients / divisor[:, None])
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
        shortest = float((found @ (gradients / divisor[:, None])).square().sum())
        normalised = (gradients / divisor[:, None]).numpy()
        assert shortest == pytest.approx(brute_force(normalised @ normalised.T), rel=1e-7)
        seen.append(found)
    assert all(not torch.allclose(one, other) for one, other in combinations(seen, 2))


def test_a_zero_gradient_does_not_stop_the_others() -> None:
    gradients = draw(4, 9, seed=5)
    padded = torch.cat([gradients[:2], torch.zeros(1, 9, dtype=torch.float64), gradients[2:]])
    found, expected = weights_of(MGDA(), padded), weights_of(MGDA(), gradients)
    assert found[2] == 0
    torch.testing.assert_close(found[[0, 1, 3, 4]], expected, rtol=0, atol=1e-7)


def test_many_components_are_solved_together() -> None:
    gradients = torch.stack([draw(5, 12, seed) for seed in range(50)])
    rule = MGDA()
    rule.bind(list("abcde"), [str(k) for k in range(50)])
    rule.start_step(range(5), torch.ones(5, dtype=torch.float64))
    together = rule.weigh(range(50), gram_of(gradients)).weights
    for k in range(0, 50, 10):
        torch.testing.assert_close(together[k], weights_of(MGDA(), gradients[k]), rtol=0, atol=1e-8)
