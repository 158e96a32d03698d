"""Batches of many sizes: what was learned is used again only where it is sure to hold."""

# B rows, S tokens, D width

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, Sum
from gradvac.engine.graph import Graph

from .parity import TASKS, UNSORTED, WEIGHTS, assert_same_gradients
from .zoo._case import Block, D, Model, distance

B = 6
Run = Callable[[Any, Tensor], Tensor]


def two_layers(run: Run) -> nn.Module:
    return Model(run, first=nn.Linear(D, D), last=nn.Linear(D, 3)).double()


def exact_steps(model: nn.Module, shapes: Sequence[Sequence[int]], engine: str) -> list[str]:
    """One step of every shape, each compared with per_task; which engine ran."""
    twin = copy.deepcopy(model)
    # Verified by schedule only once: what the other steps probe, they probe by themselves.
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine=engine, check=False)
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    ran = []
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        tasks = (UNSORTED * 2)[: shape[0]]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message='.*"auto" continues with per_task')
            for own, by in ((model, aligner), (twin, reference)):
                own.zero_grad()
                by.backward(distance(own(x)), tasks)
        assert_same_gradients(model, twin, 1e-9)
        ran.append(aligner.engine)
    return ran


def in_windows(m: Any, x: Tensor) -> Tensor:
    """Four entries at a time, of one row if four divides its length, of two rows if not."""
    windows = m.first(x).reshape(-1, 4, D)
    windows = windows - windows.mean(1, keepdim=True)
    result: Tensor = m.last(windows.reshape(x.shape).tanh())
    return result


def test_a_view_that_mixes_rows_at_some_lengths() -> None:
    lengths = (8, 4, 12, 6, 8, 16, 10, 6)
    ran = exact_steps(two_layers(in_windows), [(B, length, D) for length in lengths], "auto")
    expected = ["one_backward" if length % 4 == 0 else "per_task" for length in lengths]
    assert ran == expected


def test_a_refusal_at_one_length_is_no_refusal_at_another() -> None:
    ran = exact_steps(two_layers(in_windows), [(B, n, D) for n in (6, 8, 6, 12)], "auto")
    assert ran == ["per_task", "one_backward"] * 2


def test_a_structure_that_was_always_refused_is_not_probed_for_ever(probes: list[int]) -> None:
    def centred(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.last(m.first(x).tanh())
        return result - result.mean(0)

    model = two_layers(centred)
    exact_steps(model, [(B, length, D) for length in range(2, 26)], "auto")
    assert len(probes) == 16


def copies_behind_rows(m: Any, x: Tensor) -> Tensor:
    """Rows, and behind them k copies of each."""
    first = m.first(x[:, 0])
    others = m.first(x[:, 1:].reshape(-1, D))
    both: Tensor = m.last(torch.cat([first, others]).tanh())
    return both[:B] + both[B:].reshape(B, -1, 3).mean(1)


def tiled_or_together(m: Any, x: Tensor) -> Tensor:
    """Rows come round again in short sequences, and stay together in long ones."""
    hidden = m.first(x)
    is_long = x.shape[1] > 4
    hidden = (hidden if is_long else hidden.transpose(0, 1)).reshape(-1, D)
    result: Tensor = m.last(hidden.tanh())
    return result.reshape(B, -1, 3) if is_long else result.reshape(-1, B, 3).transpose(0, 1)


def rows_in_the_middle(m: Any, x: Tensor) -> Tensor:
    """Rows lie in the middle of what is merged, and chunks of two are taken of it."""
    hidden = m.first(x).unflatten(1, (2, -1)).permute(1, 0, 2, 3).reshape(-1, 2, D)
    result: Tensor = m.last(hidden.tanh()).reshape(2, B, -1, 3)
    return result.permute(1, 0, 2, 3).reshape(B, -1)


def unfolded(m: Any, x: Tensor) -> Tensor:
    """Windows along the rows that hold one row each, or all of them."""
    hidden = m.first(x)
    size = 1 if x.shape[1] > 3 else B
    windows = hidden.unfold(0, size, size).mean(-1)
    result: Tensor = m.last((hidden + windows).tanh())
    return result


def one_for_all_or_one_each(m: Any, x: Tensor) -> Tensor:
    """What is added is made from the first row alone, or from each."""
    context = x[:, :1] if x.shape[1] > 3 else x[:1, :1]
    result: Tensor = m.last((m.first(x) + m.first(context)).tanh())
    return result


CHANGING: dict[str, tuple[Run, list[int]]] = {
    "copies_behind_rows": (copies_behind_rows, [2, 3, 2, 4, 3]),
    "tiled_or_together": (tiled_or_together, [3, 6, 4, 1, 6, 12, 2]),
    "rows_in_the_middle": (rows_in_the_middle, [4, 8, 12, 4, 6]),
    "unfolded": (unfolded, [5, 3, 6, 2]),
    "one_for_all_or_one_each": (one_for_all_or_one_each, [5, 3, 6, 2]),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_layout_that_changes_with_the_length(name: str) -> None:
    run, lengths = CHANGING[name]
    exact_steps(two_layers(run), [(B, length, D) for length in lengths], "auto")


def test_ordinary_models_are_not_probed_again(probes: list[int]) -> None:
    """Lengths equal to the rows, to their multiples, to the width and to 1 are among them."""
    encoder = nn.TransformerEncoderLayer(D, 2, 2 * D, 0.0, batch_first=True)
    model = Model(lambda m, x: m.block(m.encoder(x)), encoder=encoder, block=Block()).double()
    shapes = [(rows, length, D) for rows in (6, 4, 12) for length in (5, 6, 1, 8, 12, 16, 7, 24)]
    ran = exact_steps(model, shapes, "one_backward")
    assert set(ran) == {"one_backward"}
    assert len(probes) == 2  # with one token, torch takes another way through attention


def test_sequence_first_models_are_not_probed_again(probes: list[int]) -> None:
    encoder = nn.TransformerEncoderLayer(D, 2, 2 * D, 0.0)
    model = Model(lambda m, x: m.e(x.transpose(0, 1)).transpose(0, 1), e=encoder).double()
    exact_steps(model, [(6, length, D) for length in (5, 6, 1, 8, 12, 16, 7)], "one_backward")
    assert len(probes) <= 2


def test_what_is_looked_up_is_not_part_of_the_structure() -> None:
    """Nor is it asked for: on a GPU that would wait for the device in every step."""
    table = torch.randn(7, 3, requires_grad=True)

    def signature(index: list[int]) -> int:
        rows = table.index_select(0, torch.tensor(index))
        return Graph([rows.gather(1, torch.tensor([index[:2]] * len(index))).sum()]).signature

    assert signature([0, 1, 2]) == signature([2, 2, 1])
    assert (
        Graph([table.select(0, 1).sum()]).signature != Graph([table.select(0, 2).sum()]).signature
    )
