"""A step leaves nothing behind; the same over 2,000 steps: `benchmarks/memory.py`."""

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner

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
        found = memory.measure(name, steps=40, warmup=20)
    grown = memory.growth(found)
    assert grown["tensors"] == 0
    assert grown["python"] < 20 * 1024  # a graph that was kept would be more, every step


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return 2 * gradient


@pytest.mark.parametrize("engine", ["auto", "one_backward", "per_task"])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_losses_that_are_kept_keep_no_activations(engine: str, is_sorted: bool) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)])
    aligner = Aligner(model, ["a", "b"], engine=engine)
    for _ in range(3):  # verified, verified, and as it was learned
        x = torch.randn(4, 3)
        order = torch.randperm(4) if is_sorted else torch.arange(4)
        hidden = model[0](x[order])
        doubled = _Doubled.apply(hidden * hidden)
        activations = [weakref.ref(hidden), weakref.ref(doubled)]
        losses = model[1](doubled * doubled)[order.argsort()].squeeze(1)
        del hidden, doubled
        assert all(seen() is not None for seen in activations)
        aligner.backward(losses, ["a", "b", "b", "a"])
        assert all(seen() is None for seen in activations)
        with pytest.raises(RuntimeError, match=r"used up|second time"):
            losses.sum().backward()
