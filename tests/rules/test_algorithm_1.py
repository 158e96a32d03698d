"""The rules against the literal transcription of Algorithm 1."""

import numpy as np
import pytest
import torch

from gradvac import GradVac, PCGrad
from gradvac.rules import Rule

from .reference import Algorithm1, relative_deviation
from .steps import step

SIZES = {"space": 3, "bias": 5, "matrix": 40}  # components and how many numbers they hold
COMPONENTS = list(SIZES)
# Gradients of one or two numbers often point in exactly opposite directions. What is left of them
# after Eq. 3 is smaller than what a cosine in float64 can tell from nothing.
TINY = {"scalar": 1, "plane": 2}


def draw_gradients(
    random: np.random.Generator, tasks: list[str], shared: dict[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    """Task gradients that agree more or less, with lengths far apart and a few zeros."""
    drawn: dict[str, dict[str, np.ndarray]] = {}
    for component, direction in shared.items():
        drawn[component] = {}
        for task in tasks:
            vector = random.uniform(-0.3, 1.0) * direction + random.normal(size=len(direction))
            vector = vector * 10 ** random.uniform(-3, 3) * (random.random() > 0.05)
            drawn[component][task] = vector
    return drawn


def largest_deviation(
    rule: Rule, reference: Algorithm1, *, num_steps: int, absent: float = 0.0
) -> float:
    """Run both side by side; the worst relative deviation of an update or of a target."""
    random = np.random.default_rng(0)
    tasks = reference.tasks
    sizes = SIZES | TINY
    rule.bind(tasks, reference.components)
    shared = {k: random.normal(size=sizes[k]) for k in reference.components}
    worst = 0.0
    for _ in range(num_steps):
        present = [task for task in tasks if random.random() >= absent] or [tasks[0]]
        gradients = draw_gradients(random, present, shared)
        before = dict(reference.target)
        expected = reference.step(gradients)
        stacked = {k: np.stack(list(own.values())) for k, own in gradients.items()}
        gram = torch.stack([torch.from_numpy(own @ own.T) for own in stacked.values()])
        weighing = step(rule, gram, present=[tasks.index(task) for task in present])
        for k, name in enumerate(reference.components):
            found = weighing.weights[k].numpy() @ stacked[name]
            longest = np.linalg.norm(stacked[name], axis=1).max()
            deviation = relative_deviation(found, expected[name], scale=1e-6 * longest)
            worst = max(worst, deviation)
            for i, one in enumerate(present):
                for j, other in enumerate(present):
                    active = (name, one, other) in reference.active
                    assert bool(weighing.active[k, i, j]) == active
                    if i != j:
                        held_to = before[name, one, other]
                        worst = max(worst, abs(float(weighing.target[k, i, j]) - held_to))
    return worst


@pytest.mark.parametrize("num_tasks", range(2, 9))
@pytest.mark.parametrize("order", ["random", "fixed"])
def test_moving_targets(num_tasks: int, order: str) -> None:
    tasks = [f"task {i}" for i in reversed(range(num_tasks))]
    options = {"order": order, "seed": num_tasks}
    reference = Algorithm1(tasks, COMPONENTS, beta=0.05, **options)
    rule = GradVac(beta=0.05, **options)
    assert largest_deviation(rule, reference, num_steps=60) < 1e-9


@pytest.mark.parametrize("target", [-1.0, -0.4, 0.0, 0.5, 0.95, 1.0])
def test_fixed_targets(target: float) -> None:
    tasks = list("abcde")
    reference = Algorithm1(tasks, COMPONENTS, start=target)
    assert largest_deviation(GradVac(target=target), reference, num_steps=60) < 1e-9


@pytest.mark.parametrize("beta", [0.0, 1e-3, 1e-2, 1e-1, 1.0])
def test_absent_tasks_and_subsets(beta: float) -> None:
    tasks = list("fedcba")
    options = {"beta": beta, "vaccinated": ["a", "c", "f"], "seed": 3}
    reference = Algorithm1(tasks, COMPONENTS, **options)
    assert largest_deviation(GradVac(**options), reference, num_steps=100, absent=0.4) < 1e-9


@pytest.mark.parametrize("target", [None, 0.5])
def test_preserved_norms(target: float | None) -> None:
    tasks = list("abcd")
    reference = Algorithm1(
        tasks,
        COMPONENTS,
        beta=0.1 if target is None else 0.0,
        start=target or 0.0,
        preserve_norm=True,
    )
    kind = {"beta": 0.1} if target is None else {"target": target}
    rule = GradVac(**kind, preserve_norm=True)
    assert largest_deviation(rule, reference, num_steps=100, absent=0.2) < 1e-9


def test_pcgrad() -> None:
    tasks = list("abcdef")
    options = {"vaccinated": ["a", "b", "e"], "seed": 5}
    reference = Algorithm1(tasks, COMPONENTS, **options)
    assert largest_deviation(PCGrad(**options), reference, num_steps=100, absent=0.2) < 1e-9


@pytest.mark.parametrize("target", [None, 0.0, 0.5])
def test_components_of_one_or_two_numbers(target: float | None) -> None:
    tasks = list("abcdef")
    beta = 0.05 if target is None else 0.0
    reference = Algorithm1(tasks, list(TINY), beta=beta, start=target or 0.0)
    rule = GradVac(beta=beta) if target is None else GradVac(target=target)
    assert largest_deviation(rule, reference, num_steps=100, absent=0.2) < 1e-6


@pytest.mark.parametrize("order", ["random", "fixed"])
def test_gradvac_with_target_0_is_pcgrad_bit_for_bit(order: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gradvac, pcgrad = GradVac(target=0, order=order, seed=7), PCGrad(order=order, seed=7)
    for rule in (gradvac, pcgrad):
        rule.bind(list("abcde"), ["encoder", "decoder"])
    for _ in range(20):
        gradients = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
        gram = gradients @ gradients.mT
        found, expected = step(gradvac, gram), step(pcgrad, gram)
        assert torch.equal(found.weights, expected.weights)
        assert torch.equal(found.active, expected.active)
        assert found.active.any()
