"""Claims about small networks whose tasks are all one task: `benchmarks/nulls.py`, in short."""

from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.stats import binom

from ..drivers import load_module

FILE = Path(__file__).parents[2] / "benchmarks" / "nulls.py"


@pytest.fixture(scope="module")
def nulls() -> ModuleType:
    return load_module(FILE)


def count(nulls: ModuleType, name: str, num: int, folder: Path) -> Counter[str]:
    torch.set_num_threads(1)
    case = nulls.CASES[name]
    return Counter(
        kind
        for seed in range(1000, 1000 + num)
        for kind in nulls.claims(case, *nulls.make(case, seed, folder))
    )


@pytest.mark.parametrize(
    "name",
    [
        "training",
        "batches by family",
        "memory, short",
        "common fluctuation",
        "two tasks",
        "measured, lines by family",
        "measured, shared lines by family",
        "measured, lengths",
    ],
)
def test_identical_tasks_are_left_alone(nulls: ModuleType, name: str, tmp_path: Path) -> None:
    """Halves of components, tests over tasks alone and raw cosines claimed here in up to 100 %."""
    num = 12
    found = count(nulls, name, num, tmp_path)
    assert max(found.values(), default=0) <= binom.ppf(0.9999, num, 0.05), found


@pytest.mark.parametrize(
    "name",
    [
        "planted families, batches",
        "planted families, measured",
        "planted trend, memory",
        "planted harm",
    ],
)
def test_what_was_planted_in_networks_is_found(
    nulls: ModuleType, name: str, tmp_path: Path
) -> None:
    found = count(nulls, name, 4, tmp_path)
    assert all(found[kind] >= 2 for kind in nulls.CASES[name].finds), found
