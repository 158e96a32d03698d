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
from gradvac.utils import devices

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
    assert grown["python"] < 50 * 1024  # a graph that was kept would be more, every step


def test_indices_that_a_cuda_graph_reads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others give way to newer ones; what a recorded graph reads would be written over."""
    cpu, recorded = torch.device("cpu"), list[object]()
    monkeypatch.setattr(devices, "RECORDED", recorded)
    read, not_read = (weakref.ref(devices.index_on([901, last], cpu)) for last in (1, 2))
    with monkeypatch.context() as while_recording:
        while_recording.setattr(devices, "is_captured", lambda _: True)
        devices.index_on([901, 1], cpu)
        new = weakref.ref(devices.index_on([901, 3], cpu))
    assert devices.index_on([901, 3], cpu) is not new()  # it has values in the graph alone
    for number in range(300):
        devices.index_on([902, number], cpu)
    assert not_read() is None
    assert read() is not None
    assert new() is not None
    recorded.clear()
    assert read() is None
    assert new() is None


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
