"""Whole training runs against the literal transcription of Algorithm 1."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradvac import Aligner, GradVac

from ..rules.reference import Algorithm1, relative_deviation
from .problems import Translator, descend, draw_batch, gradients_of_tasks


def largest_deviation(
    granularity: str | Callable[[str], str],
    *,
    num_tasks: int,
    num_steps: int,
    engine: str = "per_task",
    absent: bool = False,
    beta: float = 0.1,
    target: float | None = None,
    **options: Any,
) -> float:
    """Train with the aligner; the worst relative deviation of an update from the reference's."""
    tasks = [f"en-{chr(122 - i)}" for i in range(num_tasks)]
    model = Translator()
    kind: dict[str, Any] = {"beta": beta} if target is None else {"target": target}
    rule = GradVac(**kind, **options)
    aligner = Aligner(model, tasks, rule, granularity, engine)
    reference = Algorithm1(
        tasks,
        list(aligner.components),
        beta=beta if target is None else 0.0,
        start=target or 0.0,
        **options,
    )
    generator = torch.Generator().manual_seed(num_tasks)
    worst, altered = 0.0, 0
    for _ in range(num_steps):
        here = tasks
        if absent:
            count = int(torch.randint(1, num_tasks + 1, (), generator=generator))
            here = [tasks[i] for i in torch.randperm(num_tasks, generator=generator)[:count]]
        batch = draw_batch(generator, here)
        single = gradients_of_tasks(model, batch)
        flat = {
            component: {
                task: np.concatenate([single[task][name].numpy().ravel() for name in names])
                for task in tasks
                if task in single
            }
            for component, names in aligner.components.items()
        }
        expected = reference.step(flat)
        aligner.backward(model(batch.source, batch.words), batch.tasks)
        parameters = dict(model.named_parameters())
        for component, names in aligner.components.items():
            found = np.concatenate([parameters[name].grad.numpy().ravel() for name in names])
            longest = max(np.linalg.norm(vector) for vector in flat[component].values())
            deviation = relative_deviation(found, expected[component], scale=1e-6 * longest)
            worst = max(worst, deviation)
        altered += len(reference.active)
        descend(model, lr=0.02)
    assert altered > num_steps  # the runs do test something
    return worst


GRANULARITIES = ("whole_model", "enc_dec", "all_layer", "all_matrix")


@pytest.mark.parametrize("num_tasks", range(2, 9))
def test_moving_targets(num_tasks: int) -> None:
    """Every number of tasks with two granularities, every granularity with three numbers."""
    for turn in (num_tasks, num_tasks + 1 + num_tasks // 4):
        granularity = GRANULARITIES[turn % 4]
        options = {"num_tasks": num_tasks, "num_steps": 15, "seed": num_tasks}
        assert largest_deviation(granularity, **options) < 1e-9, granularity


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_fixed_target(granularity: str) -> None:
    assert largest_deviation(granularity, num_tasks=4, num_steps=25, target=0.5) < 1e-9


@pytest.mark.parametrize("granularity", ["enc_dec", "all_layer"])
@pytest.mark.parametrize("target", [None, 0.3], ids=["moving", "fixed"])
def test_absent_tasks_and_a_vaccinated_subset(granularity: str, target: float | None) -> None:
    deviation = largest_deviation(
        granularity,
        num_tasks=6,
        num_steps=40,
        absent=True,
        target=target,
        vaccinated=["en-z", "en-w", "en-v"],
    )
    assert deviation < 1e-9


def test_preserved_norms() -> None:
    options = {"preserve_norm": True, "order": "fixed", "absent": True}
    assert largest_deviation("all_layer", num_tasks=5, num_steps=25, **options) < 1e-9


def test_components_of_ones_own() -> None:
    def by_kind(name: str) -> str:
        return "norms" if "norm" in name else name.partition(".")[0]

    assert largest_deviation(by_kind, num_tasks=5, num_steps=25) < 1e-9


@pytest.mark.parametrize("granularity", ["whole_model", "all_layer"])
def test_one_backward(granularity: str) -> None:
    options = {"engine": "one_backward", "absent": True}
    assert largest_deviation(granularity, num_tasks=6, num_steps=25, **options) < 1e-9
