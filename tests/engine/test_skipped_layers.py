"""Models that skip layers at random: nearly every step has a graph of its own."""

# B rows, D width

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradvac import Aligner, Sum
from gradvac.engine import planner

from .parity import TASKS, UNSORTED, WEIGHTS, assert_same_gradients
from .zoo._case import B, Block, D


class Skipping(nn.Module):
    """Layers of which every forward takes some, chosen by the step."""

    def __init__(self, length: int = B + 1) -> None:
        super().__init__()
        self.positions = nn.Embedding(length, D)
        self.layers = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        draw = random.Random(step)
        hidden = x + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            if draw.random() < 0.6:
                hidden = hidden + layer(hidden)
        losses: Tensor = self.head(hidden).square().mean((1, 2))
        return losses


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was probed."""
    every: list[object] = []

    def probe(*given: Any) -> Any:
        every.append(given[0])
        return planner_probe(*given)

    planner_probe = planner.probe
    monkeypatch.setattr(planner, "probe", probe)
    return every


def steps(numbers: range, change: Any = None) -> None:
    torch.manual_seed(0)
    model = Skipping().double()
    twin = copy.deepcopy(model)
    aligner = Aligner(model, TASKS, Sum(WEIGHTS), engine="one_backward")
    reference = Aligner(twin, TASKS, Sum(WEIGHTS), engine="per_task")
    for step in numbers:
        x = torch.randn(B, B + 1, D).double()
        for own, by in ((model, aligner), (twin, reference)):
            own.zero_grad()
            if change is not None:
                change(own, step)
            by.backward(own(x, step), UNSORTED)
        assert_same_gradients(model, twin, 1e-9)


def test_a_graph_of_known_pieces_is_not_probed(probed: list[object]) -> None:
    steps(range(40))
    draws = map(random.Random, range(40))
    assert len({tuple(draw.random() < 0.6 for _ in range(6)) for draw in draws}) > 20
    assert len(probed) < 15


def test_hooks_are_no_known_pieces(probed: list[object]) -> None:
    """A hook that mixes rows is refused in a graph of known pieces, too."""

    def mix(model: nn.Module, step: int) -> None:
        if step == 30:
            model.layers[3].register_forward_hook(
                lambda _, __, y: y.register_hook(lambda g: g - g.mean(0)) and None
            )

    with pytest.raises(ValueError, match="influence each other"):
        steps(range(60), mix)
    assert len(probed) < 25
