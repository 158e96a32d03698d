"""A step leaves nothing behind; the same over 2,000 steps: `benchmarks/memory.py`."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest

from ..drivers import load_module

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def memory() -> Any:
    return load_module(BENCHMARK)


@pytest.mark.parametrize("name", ["llama", "vit", "encoder"])
def test_memory_is_flat(memory: Any, name: str) -> None:
    gc.collect()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no fast path")
        found = memory.measure(name, steps=60, warmup=30)
    grown = memory.growth(found)
    assert grown["tensors"] == 0
    assert grown["python"] < 30 * 1024  # a graph that was kept would be more, every step
