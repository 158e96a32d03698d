"""Rows behind slices that are written in place: read in C++, or seen when the node is watched."""

# B rows, S tokens, D width

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradvac import Aligner, Sum
from gradvac.engine.layouts import Layout, _lying, _step, layouts
from gradvac.engine.slices import Place, watch

from .parity import TASKS, UNSORTED, WEIGHTS, assert_same_gradients
from .zoo._case import B, D, Model, S, distance

Run = Callable[[Any, Tensor, Tensor], Tensor]  # with an order of the rows


def steps_of_a_loop(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """As recurrent models write what they made of each token."""
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = m.middle(state + m.first(x[:, t])).tanh()
        out[:, t] = state
    result: Tensor = m.last(out)
    return result


def sequence_first(m: Any, x: Tensor, order: Tensor) -> Tensor:
    out = m.middle(x.transpose(0, 1)).contiguous()
    out[1] = m.first(x[:, 1])
    out[::2] = m.first(x[:, 2])
    result: Tensor = m.last(out.tanh()).transpose(0, 1)
    return result


def parts_of_heads(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Written over, added to, scaled, filled; one row of tokens for all heads."""
    keys = x.new_empty(len(x), 2, x.shape[1], D)
    keys[..., :3] = m.first(x)[:, None, :, :3]
    keys[..., 3:] = m.middle(x)[:, None, :, 3:]
    keys[:, 0] += m.first(x.cos())
    keys[:, 1, 1:].mul_(m.middle(x.sin())[:, 1:])
    keys[:, :, 0] = 0.0
    result: Tensor = m.last(keys.tanh().sum(1))
    return result


def turned(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Views that are turned, of what is not in order either; diagonals and windows that overlap."""
    out = torch.zeros_like(m.first(x).mT)  # as dense, in another order
    out.mT[...] = m.first(x)
    out.permute(1, 2, 0)[:2] += m.middle(x)[..., :2].permute(2, 1, 0)
    out.diagonal(dim1=1, dim2=2)[...] = m.middle(x[:, 1])[:, :S]
    out.unfold(1, 2, 1)[:, 0] *= m.first(x.sin())[:, 0, :2, None].mT
    result: Tensor = m.last(out.tanh().mT)
    return result


def a_view_of_what_was_written(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """A bias that is added to a view; the view is made anew from the whole."""
    whole = m.first(x).bmm(m.middle(x).mT)
    view = whole.view(B, 1, S, S)
    view += x[:, None, :, :S]
    whole[:, 0] *= 2.0
    result: Tensor = m.last(F.pad(view.squeeze(1).softmax(-1), (0, D - S)))
    return result


def rows_repeated(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Coming round again, and together."""
    out = torch.zeros(2 * B, S, D, dtype=x.dtype)
    out[:B] = m.first(x)
    out[B:, 1] = m.middle(x[:, 0])
    both = out.view(2, B, S, D).sum(0).tanh().repeat_interleave(2, 0)
    again = both.clone()
    again[:, 0] *= m.middle(both[:, 1])
    result: Tensor = m.last(again).view(B, 2, S, -1).sum(1)
    return result


def a_token_for_all(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """A parameter is written to every row."""
    out = m.first(x)
    out[:, 0] = m.token
    result: Tensor = m.last(out.tanh())
    return result


FOLLOWED = (
    *(steps_of_a_loop, sequence_first, parts_of_heads, turned, a_view_of_what_was_written),
    *(rows_repeated, a_token_for_all),
)


def by_an_index_copy(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """The same node as of a plain write, with the same inputs and shapes."""
    out = torch.zeros_like(x)
    if order[0] == 0:
        out[:, 1] = m.first(x[:, 1])
    else:
        out[:, 1].index_copy_(0, order, m.first(x[:, 1]))
    result: Tensor = m.last(out)
    return result


def by_an_index(m: Any, x: Tensor, order: Tensor) -> Tensor:
    out = m.middle(x)
    out[order, 1] = m.first(x[:, 1])
    result: Tensor = m.last(out)
    return result


def by_a_mask(m: Any, x: Tensor, order: Tensor) -> Tensor:
    out = m.middle(x)
    out[:, 0][order % 2 == 0] = m.first(x[order % 2 == 1, 1])
    result: Tensor = m.last(out)
    return result


def shifted_by_one(m: Any, x: Tensor, order: Tensor) -> Tensor:
    out, y = m.middle(x), m.first(x[:, 1])
    out[1:, 1] = y[:-1]
    out[0, 1] = y[-1]
    result: Tensor = m.last(out)
    return result


def row_by_row(m: Any, x: Tensor, order: Tensor) -> Tensor:
    out, y = m.middle(x), m.first(x[:, 1])
    for row, other in enumerate(order.tolist()):
        out[row, 1] = y[other]
    result: Tensor = m.last(out)
    return result


def from_somewhere_on(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Slices of the same sizes: from the first row on they are in order, from others they are not.

    Rows come round again in the whole.
    """
    start = int(order[0])
    out = torch.zeros(2 * B, D, dtype=x.dtype)
    out[start : start + B] = m.first(x[:, 1])
    result: Tensor = m.last(out.view(2, B, D).sum(0).tanh()[:, None] + m.middle(x))
    return result


def every_other_row(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """Strides alone tell it from a slice that is in order."""
    out = torch.zeros(2 * B, D, dtype=x.dtype)
    out.as_strided((B, D), (D * (1 + (order[0] != 0)), 1)).copy_(m.first(x[:, 1]))
    result: Tensor = m.last(out.view(2, B, D).sum(0).tanh()[:, None] + m.middle(x))
    return result


def read_from_somewhere_on(m: Any, x: Tensor, order: Tensor) -> Tensor:
    twice = m.first(x[:, 1]).expand(2, B, D).reshape(2 * B, D)
    read = twice.as_strided((B, D), (D, 1), int(order[0]) * D)
    result: Tensor = m.last(read.tanh()[:, None] + m.middle(x))
    return result


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(order.argsort())
        return x.copy_(x[order])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0][ctx.saved_tensors[0]], None


def by_a_function_in_place(m: Any, x: Tensor, order: Tensor) -> Tensor:
    out = m.first(x)
    Turned.apply(out.view(B, -1), order)
    result: Tensor = m.last(out)
    return result


def inside_a_checkpoint(m: Any, x: Tensor, order: Tensor) -> Tensor:
    """To ask a product what it saved would run the forward once more."""

    def run(y: Tensor) -> Tensor:
        out = torch.zeros_like(y)
        out[:, 0] = m.middle(y[:, 1])
        out[:, 1:] += y[:, :-1]
        out[:, 1] *= m.middle(y[:, 2].tanh())
        return out

    result: Tensor = m.last(checkpoint(run, m.first(x), use_reentrant=False))
    return result


MOVED = (
    *(by_an_index_copy, by_an_index, by_a_mask, shifted_by_one, row_by_row, from_somewhere_on),
    *(every_other_row, read_from_somewhere_on, by_a_function_in_place),
    inside_a_checkpoint,
)


def check(run: Run, steps: int = 8) -> str:
    """In order at first, then in any, and in order again; what the aligner says at the end."""
    torch.manual_seed(0)
    parts = {name: nn.Linear(D, D) for name in ("first", "middle", "last")}
    model = Model(run, **parts, token=nn.Parameter(torch.randn(D))).double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="one_backward")
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    for step in range(steps):
        order = torch.arange(B) if step < 3 or step == 6 else torch.randperm(B)
        x = torch.randn(B, S, D, dtype=torch.float64)
        for one, by in ((model, aligner), (twin, reference)):
            one.zero_grad()
            by.backward(distance(one(x, order)), UNSORTED)
        assert_same_gradients(model, twin, 1e-9)
    return str(aligner)


@pytest.fixture(params=["executed", "read", "watched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that are known go to C++, which compares them itself; or Python's way; or no C++."""
    if request.param == "watched":
        for name in ("engine.graph", "engine.executor"):
            monkeypatch.setattr(f"gradvac.{name}.native", lambda: None)
        return
    request.getfixturevalue("kernels")
    if request.param == "read":
        monkeypatch.setattr("gradvac.engine.one_backward.executor", lambda *_: None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("run", FOLLOWED)
def test_rows_are_followed(run: Run) -> None:
    assert "measured" not in check(run)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("run", MOVED)
def test_rows_that_may_move(run: Run) -> None:
    check(run)


class Written(torch.autograd.Function):
    """What it gives back is what it was given, or something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, is_own: bool) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        ctx.is_own = is_own
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 0 * gradients[0], ctx.saved_tensors[0] if ctx.is_own else gradients[0], None


@pytest.mark.parametrize("is_own", [False, True])
def test_what_a_function_gives_back(is_own: bool) -> None:
    out, y = torch.zeros(B, D, dtype=torch.float64), torch.randn(B, 3, requires_grad=True)
    Written.apply(out[:, 1:4], y.double(), is_own)
    assert out.grad_fn is not None
    with torch.no_grad():
        found = watch(out.grad_fn, out.grad_fn._input_metadata[0])  # type: ignore[attr-defined]
    assert (found is None) == is_own


def test_rows_of_slices_are_those_of_the_memory() -> None:
    """Any sizes and strides that fit into the memory, overlapping or not."""
    draw, num_rows, known = random.Random(0), 4, 0
    for _ in range(20000):
        sizes = [draw.choice([1, 2, 3, 4, 8]) for _ in range(draw.randint(0, 2))]
        sizes.insert(draw.randint(0, len(sizes)), draw.choice([4, 8, 12]))
        whole = torch.empty(sizes).permute(draw.sample(range(len(sizes)), len(sizes)))
        layout = draw.choice(list(layouts(whole.shape, num_rows)))
        rows = torch.empty_like(whole).copy_(owners(layout, whole.shape, num_rows))
        dims = range(draw.randint(1, 3))
        part = Place(
            tuple(draw.choice([1, 2, 3, 4, 4, 8, 16]) for _ in dims),
            tuple(draw.choice([1, 2, 3, *whole.stride(), whole[0].numel()]) for _ in dims),
            draw.choice([0, 0, 1, *range(whole.numel())]),
        )
        pairs = zip(part.sizes, part.strides, strict=True)
        if part.offset + sum((size - 1) * stride for size, stride in pairs) >= whole.numel():
            continue
        start = Place(whole.shape, whole.stride(), 0)
        step = _step(layout, start, num_rows)
        found = _lying(part, step, num_rows)
        if found is not None:
            known += 1
            assert torch.equal(owners(found, part.sizes, num_rows), rows.as_strided(*part))
            assert _step(found, part, num_rows) == step  # and back
        assert step
    assert known > 300


def test_a_whole_whose_rows_share_memory() -> None:
    """Its gradient has one value for entries of several rows."""
    assert not _step(Layout(0), Place((4, 3), (1, 1), 0), 4)
    assert not _step(Layout(0), Place((4, 3), (0, 1), 0), 4)


def owners(layout: Layout, shape: Any, num_rows: int) -> Tensor:
    """The row of every entry."""
    view = [1] * len(shape)
    view[layout.dim] = -1
    rows = layout.rows(shape[layout.dim], num_rows, torch.device("cpu"))
    return rows.view(view).expand(tuple(shape)).float()
