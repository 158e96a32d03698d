"""Rows that an index moves: followed through it, and checked in every batch."""

# B rows, S entries of each, D width

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradvac import Aligner, GradVac, Sum

from .parity import TASKS, UNSORTED, WEIGHTS, assert_same_gradients
from .zoo._case import B, D, Model, S, distance

Run = Callable[[Any, Tensor, Tensor], Tensor]  # with the order of all entries
NUM_EXPERTS = 3


def by_index(m: Any, x: Tensor, order: Tensor) -> Tensor:
    moved = m.middle(m.first(x)[order]).tanh()
    result: Tensor = m.last(moved[order.argsort()])
    return result


def by_negative_index(m: Any, x: Tensor, order: Tensor) -> Tensor:
    moved = m.middle(m.first(x)[order - len(order)]).tanh()
    result: Tensor = m.last(moved[order.argsort()])
    return result


def by_index_select(m: Any, x: Tensor, order: Tensor) -> Tensor:
    moved = m.middle(m.first(x).index_select(0, order.int())).tanh()
    result: Tensor = m.last(moved.index_select(-2, order.argsort().int()))
    return result


def by_two_indices(m: Any, x: Tensor, order: Tensor) -> Tensor:
    halves = m.first(x).unflatten(-1, (2, -1))
    moved = m.middle(halves[order, order % 2].repeat(1, 2)).tanh()
    result: Tensor = m.last(moved[order.argsort()])
    return result


def by_masks(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """All entries, then some: what a mask takes is measured."""
    is_odd = order % 2 == int(order[0] != 0)
    taken = torch.cat([m.first(x)[order >= 0][is_odd], m.first(x)[~is_odd]])
    back = torch.cat([is_odd.nonzero(), (~is_odd).nonzero()]).view(-1).argsort()
    result: Tensor = m.last(m.middle(taken).tanh()[back])
    return result


def twice_each(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Every entry to two experts, and the sum back, as with grouped products."""
    both = torch.cat([order, order]).argsort(stable=True)  # pairs, in the order of entries
    pairs = both[torch.cat([order, order + len(order)])]
    moved = m.middle(m.first(x)[pairs // 2]).tanh()
    back = moved[pairs.argsort()].view(len(order), 2, D)
    result: Tensor = m.last(back.sum(1))
    return result


def to_experts(m: Any, x: Tensor, order: Tensor) -> Tensor:
    y = m.first(x)
    total = torch.zeros_like(y)
    for number in range(NUM_EXPERTS):  # of several sizes; the last one gets none at times
        mine = order[(order % 4 == number) & (number < 2 or bool(order[0] % 2))]
        total = total.index_add(0, mine, m.middle(y[mine].view(len(mine), 1, D)).flatten(1))
    result: Tensor = m.last(total)
    return result


def inside_a_checkpoint(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Reading the index would run the forward once more: it is measured."""
    y = m.first(x)
    result: Tensor = torch.utils.checkpoint.checkpoint(by_index, m, y, order, use_reentrant=False)
    return result


def make_model(run: Run) -> Model:
    parts = {name: nn.Linear(D, D) for name in ("first", "middle", "last")}
    return Model(run, **parts).double()


RUNS = (by_index, by_negative_index, by_index_select, by_two_indices, twice_each, to_experts)


MEASURED = (by_masks, inside_a_checkpoint)


@pytest.mark.parametrize("run", [*RUNS, *MEASURED])
def test_equals_per_task(run: Run) -> None:
    """In order at first, which a plan must not rely on; then in any order, in batches of sizes."""
    model = make_model(run)
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="one_backward")
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    for step in range(6):
        num = B * (S + step % 2)
        order = torch.arange(num) if step < 2 else torch.randperm(num)
        x = torch.randn(num, D, dtype=torch.float64)
        for one, by in ((model, aligner), (twin, reference)):
            one.zero_grad()
            by.backward(distance(one(x, order).view(B, -1)), UNSORTED)
        assert_same_gradients(model, twin, 1e-9)
    says = str(aligner)
    assert ("measured" in says) == (run in MEASURED)
    assert "moved by an index" in says or run in MEASURED


def test_an_index_that_serves_all_entries() -> None:
    """Of the same sizes as one with an index for each."""

    def run(m: Any, x: Tensor, order: Tensor) -> Tensor:
        result: Tensor = m.last(m.first(x)[order, torch.zeros(B, dtype=torch.int64)].tanh())
        return result

    model = make_model(run)
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="one_backward")
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    x, each, one_for_all = torch.randn(B, S, D).double(), torch.arange(B), torch.tensor([2])
    for order in (each, each, each, one_for_all, one_for_all, each, one_for_all):
        for m, by in ((model, aligner), (twin, reference)):
            m.zero_grad()
            by.backward(distance(m(x, order)), UNSORTED)
        assert_same_gradients(model, twin, 1e-9)


def test_entries_of_two_rows_that_meet() -> None:
    """Their gradients are added up behind the index."""

    def run(m: Any, x: Tensor, order: Tensor) -> Tensor:
        result: Tensor = m.last(m.first(x.requires_grad_())[order].tanh())
        return result

    model = make_model(run)
    aligner = Aligner(model, TASKS, engine="one_backward")
    for order in (torch.arange(B), torch.randperm(B)):
        aligner.backward(distance(model(torch.randn(B, D).double(), order)), UNSORTED)
    assert UNSORTED[0] != UNSORTED[1]
    order[0] = order[1]
    with pytest.raises(ValueError, match="influence each other"):
        aligner.backward(distance(model(torch.randn(B, D).double(), order)), UNSORTED)


def test_no_pass_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a plan is proven: owners behind an index need not be measured."""
    model = make_model(by_index)
    aligner = Aligner(model, TASKS, Sum(), engine="one_backward", check=False)
    x, passes = torch.randn(B, D, dtype=torch.float64), []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(1) or grad(*a, **k))
    counts = []
    for _ in range(4):
        passes.clear()
        aligner.backward(distance(model(x, torch.randperm(B))), UNSORTED)
        counts.append(len(passes))
    assert counts[-2:] == [1, 1]


@pytest.mark.parametrize("has_second", [False, True])
def test_ends_of_experts_that_change_unseen(has_second: bool) -> None:
    """Nothing of a step is taken for the next one's, and nothing of a layer for another's."""
    buffer = np.zeros(3, dtype=np.int32)

    def run(m: Any, x: Tensor) -> Tensor:
        ends = torch.from_numpy(buffer)  # the same memory in every step, and no other version
        moved = F.grouped_mm(m.first(x), m.experts, offs=ends).tanh()
        if has_second:
            moved = F.grouped_mm(moved, m.others, offs=ends[:2])
        result: Tensor = m.last(moved)
        return result

    experts = nn.Parameter(torch.randn(NUM_EXPERTS, 16, 16))
    parts = {"others": nn.Parameter(torch.randn(2, 16, 16)), "first": nn.Linear(D, 16)}
    model = Model(run, experts=experts, last=nn.Linear(16, 3), **parts)
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, GradVac(target=0.5), engine="one_backward")
    reference = Aligner(twin, TASKS, GradVac(target=0.5), engine="per_task")
    for ends in ([2, B, B], [1, B, B], [4, B, B], [2, B, B]):
        buffer[:], x = ends, torch.randn(B, D)
        for one, by in ((model, aligner), (twin, reference)):
            one.zero_grad()
            by.backward(distance(one(x)), UNSORTED)
        assert_same_gradients(model, twin, 1e-4)


@pytest.mark.parametrize("table_bytes", [None, 2000])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products(transposed: bool, table_bytes: int | None) -> None:
    """Experts that are one parameter: their rows are followed; if they are large, also split."""

    def run(m: Any, x: Tensor, order: Tensor) -> Tensor:
        # One expert without entries, and layers that share their entries out alike or not.
        ends, others = torch.tensor([[2, 2, len(order)], [1, 3, len(order)]], dtype=torch.int32)
        weights = m.experts.mT if transposed else m.experts
        moved = m.first(x)[order]
        for offs in (ends, ends, others):
            moved = F.grouped_mm(moved, weights, offs=offs).tanh()
        result: Tensor = m.last(moved[order.argsort()])
        return result

    experts = nn.Parameter(torch.randn(NUM_EXPERTS, 16, 16))
    parts = {"first": nn.Linear(D, 16), "last": nn.Linear(16, 3)}
    model = Model(run, experts=experts, **parts)
    twin = copy.deepcopy(model)
    settings = {} if table_bytes is None else {"table_bytes": table_bytes}
    aligner = Aligner(model, TASKS, GradVac(target=0.5), engine="one_backward", **settings)
    reference = Aligner(twin, TASKS, GradVac(target=0.5), engine="per_task")
    for _ in range(4):
        x, order = torch.randn(B, D), torch.randperm(B)
        for one, by in ((model, aligner), (twin, reference)):
            one.zero_grad()
            by.backward(distance(one(x, order)), UNSORTED)
        assert_same_gradients(model, twin, 1e-4)
    assert "measured" not in str(aligner)
