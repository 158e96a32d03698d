"""one_backward equals per_task: every model of the zoo, granularity, rule and precision."""

from collections.abc import Callable

import pytest
import torch

from gradvac import MGDA, GradVac, PCGrad, Sum
from gradvac.rules import Rule

from .parity import ONE_ABSENT, SORTED, UNSORTED, Twins, made
from .zoo import ZOO, make

RULES: dict[str, Callable[[], Rule]] = {
    "moving target": lambda: GradVac(beta=0.3),
    "fixed target": lambda: GradVac(target=0.5),
    "pcgrad": PCGrad,
    "sum": Sum,
}
WITH_SIDES = [name for name in ZOO if make(name).enc_dec]


def by_length(name: str) -> str:
    """Components that complete at any time and mix layers."""
    return "odd" if len(name) % 2 else "even"


GRANULARITIES: dict[str, str | Callable[[str], str]] = {
    "whole_model": "whole_model",
    "all_layer": "all_layer",
    "all_matrix": "all_matrix",
    "callable": by_length,
}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ZOO)
def test_equals_per_task(name: str, granularity: str) -> None:
    for kind, rule in RULES.items():
        first = kind == "moving target"
        twins = Twins(made(name), rule, granularity=GRANULARITIES[granularity], check=first)
        for tasks in (UNSORTED, SORTED, ONE_ABSENT) if first else (UNSORTED, ONE_ABSENT):
            twins.step(tasks)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", WITH_SIDES)
def test_equals_per_task_by_encoder_and_decoder(name: str, recompute: bool) -> None:
    for kind, rule in RULES.items():
        first = kind == "moving target"
        twins = Twins(made(name), rule, granularity="enc_dec", recompute=recompute, check=first)
        for tasks in (UNSORTED, ONE_ABSENT):
            twins.step(tasks)


@pytest.mark.parametrize("name", ZOO)
def test_second_backward_instead_of_storing(name: str) -> None:
    twins = Twins(made(name), RULES["moving target"], granularity="whole_model", recompute=True)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)


@pytest.mark.parametrize("granularity", ["whole_model", "all_layer"])
@pytest.mark.parametrize("name", ZOO)
def test_in_single_precision(name: str, granularity: str) -> None:
    case = made(name, torch.float32)
    twins = Twins(case, RULES["moving target"], granularity=granularity, tolerance=1e-5)
    for tasks in (UNSORTED, ONE_ABSENT):
        twins.step(tasks)


@pytest.mark.parametrize("granularity", ["whole_model", "all_layer"])
@pytest.mark.parametrize("name", ["tied_softmax", "transformer", "heads_of_tasks", "packed"])
def test_shortest_combination(name: str, granularity: str) -> None:
    for normalize in ("none", "loss+"):
        twins = Twins(made(name), lambda n=normalize: MGDA(n), granularity=granularity)  # type: ignore[misc]
        for tasks in (UNSORTED, ONE_ABSENT):
            twins.step(tasks)
