"""one_backward equals per_task: pairwise coverage of models, granularities, rules and options."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from gradvac import MGDA, GradVac, PCGrad, Sum
from gradvac.rules import Rule

from .parity import ONE_ABSENT, SORTED, UNSORTED, Twins, made
from .zoo import ZOO, make


def by_length(name: str) -> str:
    """Components that complete at any time and mix layers."""
    return "odd" if len(name) % 2 else "even"


GRANULARITIES: dict[str, str | Callable[[str], str]] = {
    "whole_model": "whole_model",
    "all_layer": "all_layer",
    "all_matrix": "all_matrix",
    "callable": by_length,
    "enc_dec": "enc_dec",
}
RULES: dict[str, Callable[[], Rule]] = {
    "moving target": lambda: GradVac(beta=0.3),
    "fixed target": lambda: GradVac(target=0.5),
    "pcgrad": PCGrad,
    "sum": Sum,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "recompute": {"recompute": True},
    "streaming": {"stream_bytes": 1},
    "split tables": {"table_bytes": 1},
    "single precision": {"tolerance": 1e-5},
}


WITH_SIDES = [name for name in ZOO if make(name).enc_dec]


def cases() -> list[tuple[str, str, str, str]]:
    """Model, granularity, rule and option: any two values of two columns meet in some row."""
    rows, rules, usual = [], list(RULES), list(GRANULARITIES)[:4]
    without_sides = [name for name in ZOO if name not in WITH_SIDES]
    every = [(n, name, usual[n % 4]) for n, name in enumerate(without_sides)]
    every += [(n, name, "enc_dec") for n, name in enumerate(WITH_SIDES)]
    for turn, name, last in every:
        granularities = [*usual, last]
        for number, option in enumerate(OPTIONS):
            granularity = granularities[(number + 2 * turn) % len(granularities)]
            rows.append((name, granularity, rules[(number + turn) % len(rules)], option))
    return rows


CASES = cases()


@pytest.mark.parametrize(("name", "granularity", "rule", "option"), CASES)
def test_equals_per_task(name: str, granularity: str, rule: str, option: str) -> None:
    case = made(name, torch.float32) if option == "single precision" else made(name)
    check = rule == "moving target"
    options = {"granularity": GRANULARITIES[granularity], "check": check, **OPTIONS[option]}
    twins = Twins(case, RULES[rule], **options)
    for tasks in (UNSORTED, SORTED, ONE_ABSENT) if check else (UNSORTED, ONE_ABSENT):
        twins.step(tasks)


def test_every_pair_of_values_is_covered() -> None:
    columns = [list(ZOO), list(GRANULARITIES), list(RULES), list(OPTIONS)]
    for first, second in combinations(range(4), 2):
        met = {(row[first], row[second]) for row in CASES}
        missing = {(a, b) for a in columns[first] for b in columns[second]} - met
        assert {a for a, b in missing if b == "enc_dec"} <= set(ZOO) - set(WITH_SIDES)
        assert {pair for pair in missing if pair[1] != "enc_dec"} == set()


@pytest.mark.parametrize("granularity", ["whole_model", "all_layer"])
@pytest.mark.parametrize("name", ["tied_softmax", "transformer", "heads_of_tasks", "packed"])
def test_shortest_combination(name: str, granularity: str) -> None:
    for normalize in ("none", "loss+"):
        twins = Twins(made(name), lambda n=normalize: MGDA(n), granularity=granularity)  # type: ignore[misc]
        for tasks in (UNSORTED, ONE_ABSENT):
            twins.step(tasks)
